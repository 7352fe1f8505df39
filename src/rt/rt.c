/* SPDX-License-Identifier: MIT */
/*
 * Reactor: creation, the loop, clock and random numbers.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include "rt/rt_int.h"

#define DEFAULT_COROUTINES 1024u
#define DEFAULT_STACK (64u << 10)
#define SANITIZER_STACK (256u << 10)
#define DEFAULT_ENTRIES 512u
#define DEFAULT_OFFLOAD 4u

static int create_parts(struct rt *rt, const struct rt_config *c, struct err *err)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	size_t stack = c->stack_size ? c->stack_size : RT_ASAN || RT_TSAN ? SANITIZER_STACK : DEFAULT_STACK;
	unsigned n = c->coroutines ? c->coroutines : DEFAULT_COROUTINES;
	int r;

	rt->ucontext = c->ucontext || !RT_HAVE_ASM;
	rt->spin_ns = c->spin_ns;
	rt->offload_threads = c->offload_threads ? c->offload_threads : DEFAULT_OFFLOAD;
	r = cos_init(rt, n, (stack + page - 1) / page * page, err);
	if (r < 0)
		return r;
	if (timers_reserve(rt, n + 64) < 0)
		return err_set(err, -ENOMEM, "no memory for timers");
	r = mail_init(rt, err);
	if (r < 0)
		return r;
	if (!rt->sim)
		return ring_init(rt, c->ring_entries ? c->ring_entries : DEFAULT_ENTRIES, err);
	rt->sim_ready = calloc(n, sizeof(*rt->sim_ready));
	return rt->sim_ready ? 0 : err_set(err, -ENOMEM, "no memory for a simulated reactor");
}

static int create(const struct rt_config *config, bool sim, struct rt **ret, struct err *err)
{
	static const struct rt_config defaults;
	struct rt *rt = aligned_alloc(64, sizeof(*rt));
	int r;

	if (!rt)
		return err_set(err, -ENOMEM, "no memory for a reactor");
	*rt = (struct rt){ .sim = sim, .wake_fd = -1 };
	list_init(&rt->pools);
	list_init(&rt->pollers);
	list_init(&rt->watches);
	r = create_parts(rt, config ? config : &defaults, err);
	if (r < 0) {
		rt_destroy(rt);
		return r;
	}
	*ret = rt;
	return 0;
}

int rt_create(const struct rt_config *config, struct rt **ret, struct err *err)
{
	uint64_t seed;
	int r = create(config, false, ret, err);

	if (r < 0)
		return r;
	if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != sizeof(seed))
		seed = rt_clock_ns(CLOCK_REALTIME) ^ (uint64_t)getpid() << 40;
	rng_seed(&(*ret)->rng, seed);
	return 0;
}

int rt_create_sim(const struct rt_config *config, uint64_t seed, struct rt **ret, struct err *err)
{
	int r = create(config, true, ret, err);

	if (r == 0)
		rt_sim_reseed(*ret, seed);
	return r;
}

void rt_destroy(struct rt *rt)
{
	if (!rt)
		return;
	offload_fini(rt);
	ring_fini(rt);
	watches_fini(rt);
	mail_fini(rt);
	cos_fini(rt);
	free(rt->heap);
	free(rt->sim_ready);
	free(rt->fixed_free);
	free(rt);
}

static int real_loop(struct rt *rt)
{
	for (;;) {
		rt->stats.turns++;
		rt_run_ready(rt);
		mail_deliver(rt);
		ring_reap(rt);
		if (unlikely(rt->ring_error))
			return rt->ring_error;
		if (!list_empty(&rt->pollers))
			pollers_poll(rt);
		if (rt->ready_n) {
			rt->now_ns = rt_clock_ns(CLOCK_MONOTONIC);
			timers_fire(rt);
			ring_poll(rt);
			continue;
		}
		if (!rt->cos_live && mail_is_quiet(rt))
			return 0;
		ring_wait(rt);
		timers_fire(rt);
	}
}

int rt_run(struct rt *rt, co_entry *main_fn, void *arg)
{
	int r;

	assert(!rt_current);	/* nothing runs the loop from inside the loop */
	if (rt->sim) {
		if (rt->cos_live || rt->stop)
			sim_forget(rt);
	} else {
		r = ring_enable(rt);
		if (r < 0)
			return r;
		rt->now_ns = rt_clock_ns(CLOCK_MONOTONIC);
	}
	rt_current = rt;
	rt_co_thread(rt);
	stacks_watch(&rt->stacks);
	r = co_spawn("main", main_fn, arg);
	if (r == 0)
		r = rt->sim ? sim_loop(rt) : real_loop(rt);
	if (!rt->sim)
		io_uring_submit(&rt->ring);
	stacks_unwatch(&rt->stacks);
	rt_current = NULL;
	return r;
}

struct rt *rt_self(void)
{
	return rt_current;
}

bool rt_is_sim(const struct rt *rt)
{
	return rt->sim;
}

uint64_t rt_now_ns(void)
{
	return rt_current ? rt_current->now_ns : rt_clock_ns(CLOCK_MONOTONIC);
}

uint64_t rt_now_exact_ns(void)
{
	return rt_current && rt_current->sim ? rt_current->now_ns : rt_clock_ns(CLOCK_MONOTONIC);
}

uint64_t rt_wall_ns(void)
{
	return rt_current && rt_current->sim ? rt_current->now_ns : rt_clock_ns(CLOCK_REALTIME);
}

uint64_t rt_rand64(void)
{
	return rng_u64(&rt_current->rng);
}

void rt_get_stats(const struct rt *rt, struct rt_stats *ret)
{
	*ret = rt->stats;
	ret->coroutines_now = rt->cos_live;
}
