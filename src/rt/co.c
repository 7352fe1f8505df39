/* SPDX-License-Identifier: MIT */
/*
 * Coroutines: the pool, the switch, parking and waking.
 *
 * A stack keeps its bottom frame from one coroutine to the next: rt_co_start() calls the entry function, puts itself on
 * the free list, switches away, and finds the next entry function when it is switched to again. So a spawn
 * only fills in a few fields.
 *
 * A coroutine that suspends switches straight to the next one of the turn, and to the loop after the last.
 * Sanitizers and valgrind are told of each switch and stack.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "rt/rt_int.h"
#include "rt/sync.h"
#include "util/bytes.h"

#if RT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if RT_TSAN
#include <sanitizer/tsan_interface.h>
#endif
#if __has_include(<valgrind/valgrind.h>)
#include <valgrind/valgrind.h>
#else
#define VALGRIND_STACK_REGISTER(lo, hi) 0
#endif

#define STACK_COST (16u << 10)	/* what a coroutine is taken to touch of its stack, its control block included */
#define STACKS_FLOOR 128u

struct role co_role;
__thread struct rt *rt_current;

void rt_switch_asm(void **save_sp, void *to_sp);
void rt_start_asm(void);
void rt_co_start(void);

/* The switch */

static void switch_context(struct rt *rt, struct co *from, struct co *to)
{
#if RT_HAVE_ASM
	if (likely(!rt->ucontext)) {
		rt_switch_asm(&from->sp, to->sp);
		return;
	}
#endif
	swapcontext(from->sp, to->sp);
}

#if RT_ASAN
/* After each switch; learns where the stack of the loop's thread is. */
static void switched(struct rt *rt, void *fake_stack)
{
	const void *bottom;
	size_t size;

	__sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
	if (rt->prev == &rt->loop) {
		rt->loop.stack = (char *)bottom;
		rt->loop.stack_len = size;
	}
}
#endif

static void switch_to(struct rt *rt, struct co *to)
{
	struct co *from = rt->current;

	rt->prev = from;
	rt->current = to;
	rt->stats.switches++;
#if RT_ASAN
	__sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_len);
#endif
#if RT_TSAN
	__tsan_switch_to_fiber(to->fiber, 0);
#endif
	switch_context(rt, from, to);
#if RT_ASAN
	switched(rt, from->fake_stack);
#endif
}

/* Lays out the frame that rt_switch_asm() pops for a coroutine that has never run. */
static void *switch_frame(char *stack, size_t len)
{
	void **top = (void **)(stack + len);

#if defined(__x86_64__)
	uint32_t mxcsr;
	uint16_t x87;
	uint64_t control;

	__asm__("stmxcsr %0" : "=m"(mxcsr));
	__asm__("fnstcw %0" : "=m"(x87));
	control = mxcsr | (uint64_t)x87 << 32;
	top -= 10;
	memset(top, 0, 10 * sizeof(*top));
	memcpy(&top[0], &control, sizeof(control));
	top[7] = (void *)rt_start_asm;
#elif defined(__aarch64__)
	top -= 22;
	memset(top, 0, 22 * sizeof(*top));
	__asm__("mrs %0, fpcr" : "=r"(top[20]));
	top[11] = (void *)rt_start_asm;
#endif
	return top;
}

static void prepare_context(struct rt *rt, struct co *co)
{
	char *stack = co->stack;
	size_t len = co->stack_len;

#if RT_ASAN
	ASAN_UNPOISON_MEMORY_REGION(stack, len);
	co->fake_stack = NULL;
#endif
	if (rt->ucontext) {
		size_t room = (sizeof(ucontext_t) + 63) & ~(size_t)63;
		ucontext_t *uc = (ucontext_t *)(stack + len - room);

		getcontext(uc);
		uc->uc_stack.ss_sp = stack;
		uc->uc_stack.ss_size = len - room;
		uc->uc_link = NULL;
		makecontext(uc, rt_co_start, 0);
		co->sp = uc;
	} else {
		co->sp = switch_frame(stack, len);
	}
	co->started = true;
}

/* The bottom of every coroutine's stack. */
void co_role_unchecked rt_co_start(void)
{
	struct rt *rt = rt_current;
	struct co *self = rt->current;

#if RT_ASAN
	switched(rt, NULL);
#endif
	for (;;) {
		if (self->group)
			co_group_child_done(self->group, self->group_fn(self->arg));
		else
			self->fn(self->arg);
		self->state = CO_FREE;
		rt->cos_live--;
		list_add_head(&rt->free, &self->node);
		co_suspend(rt);
	}
}

/* The loop's own context is the thread that calls rt_run(). */
void rt_co_thread(struct rt *rt)
{
#if RT_TSAN
	rt->loop.fiber = __tsan_get_current_fiber();
#endif
}

/* The pool */

int cos_init(struct rt *rt, unsigned n, size_t stack_size, struct err *err)
{
	int r = stacks_init(&rt->stacks, n, stack_size, err);

	if (r < 0)
		return r;
	/* Pages of control blocks are touched when used, as the stacks are. */
	rt->cos = aligned_alloc(64, n * sizeof(struct co));
	if (!rt->cos)
		return err_set(err, -ENOMEM, "no memory for %u coroutines", n);
	rt->cos_max = n;
	list_init(&rt->free);
	list_init(&rt->run);
	list_init(&rt->ready);
	rt->current = &rt->loop;
	rt->loop.name = "loop";
	rt->loop.state = CO_RUNNING;
	if (rt->ucontext) {
		rt->loop.sp = calloc(1, sizeof(ucontext_t));
		if (!rt->loop.sp)
			return err_set(err, -ENOMEM, "no memory for %u coroutines", n);
	}
	return 0;
}

static void co_fini(struct rt *rt, struct co *co)
{
#if RT_ASAN
	ASAN_UNPOISON_MEMORY_REGION(co->stack, co->stack_len);
#endif
#if RT_TSAN
	__tsan_destroy_fiber(co->fiber);
#endif
}

void cos_fini(struct rt *rt)
{
	for (unsigned i = 0; i < rt->cos_touched; i++)
		co_fini(rt, &rt->cos[i]);
	budget_leave(&rt->stack_user);
	if (rt->ucontext)
		free(rt->loop.sp);
	free(rt->cos);
	stacks_fini(&rt->stacks);
}

/* Forgets the coroutines that are left; what they own in the heap is lost. */
void cos_abandon_all(struct rt *rt)
{
	if (!rt->cos_live)
		return;
	list_init(&rt->run);
	list_init(&rt->ready);
	rt->ready_n = 0;
	for (unsigned i = 0; i < rt->cos_touched; i++) {
		struct co *co = &rt->cos[i];

		if (co->state == CO_FREE)
			continue;
		co->state = CO_FREE;
		prepare_context(rt, co);
		list_add_head(&rt->free, &co->node);
	}
	rt->cos_live = 0;
}

static struct co *co_new_slot(struct rt *rt)
{
	struct co *co = &rt->cos[rt->cos_touched];

	memset(co, 0, sizeof(*co));
	co->stack = stacks_prepare(&rt->stacks, rt->cos_touched);
	if (!co->stack)
		return NULL;
	co->stack_len = rt->stacks.usable;
#if RT_TSAN
	co->fiber = __tsan_create_fiber(0);
#endif
	(void)VALGRIND_STACK_REGISTER(co->stack, co->stack + co->stack_len);
	prepare_context(rt, co);
	rt->cos_touched++;
	return co;
}

static void make_ready(struct rt *rt, struct co *co)
{
	co->state = CO_READY;
	co->since_ns = rt->now_ns;
	if (rt->sim) {
		sim_ready_push(rt, co);
	} else {
		list_add_tail(&rt->ready, &co->node);
		rt->ready_n++;
	}
}

/* A stack more is about to be used. False: the budget has no room for it. */
static bool count_stack(struct rt *rt)
{
	if (!budget_take(&rt->stack_user, STACK_COST))
		return false;
	rt->cos_counted++;
	return true;
}

static struct co *spawn(const char *name, void *arg)
{
	struct rt *rt = rt_current;
	struct co *co = list_first(&rt->free, struct co, node);

	if (co && (co->counted || count_stack(rt)))
		list_del(&co->node);
	else if (co || rt->cos_touched == rt->cos_max || !count_stack(rt))
		return NULL;
	else if (!(co = co_new_slot(rt))) {
		rt->cos_counted--;
		budget_give(&rt->stack_user, STACK_COST);
		return NULL;
	}
	co->counted = true;
	co->name = name;
	co->why = NULL;
	co->arg = arg;
	rt->stats.spawned++;
	if (++rt->cos_live > rt->stats.coroutines_peak)
		rt->stats.coroutines_peak = rt->cos_live;
	make_ready(rt, co);
	return co;
}

int co_spawn(const char *name, co_entry *fn, void *arg)
{
	struct co *co = spawn(name, arg);

	if (!co)
		return -EAGAIN;
	co->fn = fn;
	co->group = NULL;
	return 0;
}

int co_spawn_child(const char *name, struct co_group *g, int (*fn)(void *arg), void *arg)
{
	struct co *co = spawn(name, arg);

	if (!co)
		return -EAGAIN;
	co->group = g;
	co->group_fn = fn;
	return 0;
}

unsigned co_available(void)
{
	struct rt *rt = rt_current;
	unsigned more = rt->cos_max - rt->cos_counted, ready = rt->cos_counted - rt->cos_live;
	uint64_t floor = rt->stack_user.floor - min(rt->stack_user.floor, rt->stack_user.held);

	if (!rt->budget)
		return ready + more;
	return ready + (unsigned)min((uint64_t)more, (floor + budget_room(rt->budget)) / STACK_COST);
}

int rt_set_budget(struct rt *rt, struct budget *b)
{
	if (!budget_join(b, &rt->stack_user, "stacks", (uint64_t)min(rt->cos_max, STACKS_FLOOR) * STACK_COST))
		return -ENOMEM;
	rt->budget = b;
	return 0;
}

struct budget *rt_budget(void)
{
	return rt_current ? rt_current->budget : NULL;
}

/* The frame that a free coroutine goes on from is at the top. */
void cos_trim(struct rt *rt)
{
	if (RT_ASAN || RT_TSAN || rt->under_valgrind)
		return;
	list_for_each(&rt->free, n) {
		struct co *co = container_of(n, struct co, node);

		if (!co->counted)
			break;
		madvise(co->stack, co->stack_len - rt->stacks.page, MADV_DONTNEED);
		co->counted = false;
		rt->cos_counted--;
		budget_give(&rt->stack_user, STACK_COST);
	}
}

struct co *co_self(void)
{
	struct rt *rt = rt_current;

	return rt && rt->current != &rt->loop ? rt->current : NULL;
}

/* Suspending and waking */

static struct co *next_of_turn(struct rt *rt)
{
	struct co *co = list_first(&rt->run, struct co, node);

	if (!co)
		return &rt->loop;
	list_del(&co->node);
	co->state = CO_RUNNING;
	return co;
}

void co_suspend(struct rt *rt)
{
	switch_to(rt, next_of_turn(rt));
}

void co_resume(struct rt *rt, struct co *co)
{
	co->state = CO_RUNNING;
	switch_to(rt, co);
}

void rt_run_ready(struct rt *rt)
{
	struct co *co;

	list_splice_tail(&rt->run, &rt->ready);
	rt->ready_n = 0;
	co = next_of_turn(rt);
	if (co != &rt->loop)
		switch_to(rt, co);
}

void co_yield(void)
{
	struct rt *rt = rt_current;

	if (rt->sim)
		rt->now_ns += 100;	/* so that who polls for a time sees it come */
	rt->current->why = "its turn";
	make_ready(rt, rt->current);
	co_suspend(rt);
}

void co_park(const char *why)
{
	struct rt *rt = rt_current;
	struct co *self = rt->current;

	assert(self != &rt->loop);
	self->state = CO_PARKED;
	self->why = why;
	self->since_ns = rt->now_ns;
	co_suspend(rt);
}

void co_wake(struct co *co)
{
	if (co->state == CO_PARKED)
		make_ready(rt_current, co);
}

/* Tasks */

void rt_for_each_task(struct rt *rt, void (*fn)(const struct rt_task_info *, void *), void *arg)
{
	for (unsigned i = 0; i < rt->cos_touched; i++) {
		const struct co *co = &rt->cos[i];
		struct rt_task_info info = { .name = co->name, .why = co->why };

		if (co->state == CO_FREE || co->state == CO_RUNNING)
			continue;
		if (co->state == CO_READY)
			info.why = "its turn";
		info.since_ns = rt->now_ns > co->since_ns ? rt->now_ns - co->since_ns : 0;
		fn(&info, arg);
	}
}

static void print_task(const struct rt_task_info *t, void *arg)
{
	fprintf(arg, "  %-20s waits for %s, %llu.%06llu s\n", t->name, t->why ? t->why : "nothing",
		(unsigned long long)(t->since_ns / 1000000000u), (unsigned long long)(t->since_ns / 1000u % 1000000u));
}

void rt_dump_tasks(struct rt *rt, FILE *out)
{
	rt_for_each_task(rt, print_task, out);
}
