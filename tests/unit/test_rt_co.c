/* SPDX-License-Identifier: MIT */
/* Coroutines: spawn, switch, park, wake, tasks. */
#include <fenv.h>
#include <math.h>

#include "test_rt.h"

static char trace[64];
static unsigned trace_n;

static void note(char c)
{
	CHECK(trace_n < sizeof(trace) - 1);
	trace[trace_n++] = c;
	trace[trace_n] = 0;
}

static void trace_reset(void)
{
	trace_n = 0;
	trace[0] = 0;
}

/* Order */

static co_fn void co_writes_letter_thrice(void *arg)
{
	for (int i = 0; i < 3; i++) {
		note(*(const char *)arg);
		co_yield();
	}
}

static co_fn void co_spawns_three(void *arg)
{
	CHECK_EQ(co_spawn("a", co_writes_letter_thrice, (void *)"a"), 0);
	CHECK_EQ(co_spawn("b", co_writes_letter_thrice, (void *)"b"), 0);
	CHECK_EQ(co_spawn("c", co_writes_letter_thrice, (void *)"c"), 0);
	note('.');
	for (int i = 0; i < 4; i++)
		co_yield();
}

static void yielding_coroutines_take_turns_in_order(void)
{
	trace_reset();
	on_real(co_spawns_three, NULL);
	CHECK_STR(trace, ".abcabcabc");
}

static struct co *parked[3];

static co_fn void co_parks(void *arg)
{
	long i = (long)arg;

	parked[i] = co_self();
	co_park("a test");
	note((char)('0' + i));
}

static co_fn void co_wakes_in_reverse(void *arg)
{
	for (long i = 0; i < 3; i++)
		CHECK_EQ(co_spawn("parker", co_parks, (void *)i), 0);
	co_yield();
	for (int i = 2; i >= 0; i--)
		co_wake(parked[i]);
	co_wake(parked[1]);	/* ready already: no effect */
}

static void woken_coroutines_run_in_the_order_of_waking(void)
{
	trace_reset();
	on_real(co_wakes_in_reverse, NULL);
	CHECK_STR(trace, "210");
}

static co_fn void co_wakes_itself_first(void *arg)
{
	co_wake(co_self());
	co_sleep_ns(1000);
	note('x');
}

static void a_wake_before_the_park_is_not_remembered(void)
{
	trace_reset();
	on_real(co_wakes_itself_first, NULL);
	CHECK_STR(trace, "x");
}

/* Many */

static unsigned finished;

static co_fn void co_finishes(void *arg)
{
	finished++;
}

static co_fn void co_spawns_ten_thousand(void *arg)
{
	for (unsigned i = 0; i < 10000; i++) {
		if (i % 7 == 0)
			co_yield();
		CHECK_EQ(co_spawn("short", co_finishes, NULL), 0);
	}
}

static void ten_thousand_coroutines_come_and_go(void)
{
	finished = 0;
	on_real(co_spawns_ten_thousand, NULL);
	CHECK_EQ(finished, 10000u);
}

static co_fn void co_fills_the_pool(void *arg)
{
	CHECK_EQ(co_available(), 7u);
	for (int i = 0; i < 7; i++)
		CHECK_EQ(co_spawn("short", co_finishes, NULL), 0);
	CHECK_EQ(co_available(), 0u);
	CHECK_EQ(co_spawn("one too many", co_finishes, NULL), -EAGAIN);
	co_yield();
	CHECK_EQ(co_available(), 7u);
	CHECK_EQ(co_spawn("short", co_finishes, NULL), 0);
}

static void spawn_says_when_the_pool_is_empty(void)
{
	struct rt *rt = make_rt(&(struct rt_config){ .coroutines = 8 });
	struct rt_stats s;

	CHECK_EQ(rt_run(rt, co_fills_the_pool, NULL), 0);
	rt_get_stats(rt, &s);
	CHECK_EQ(s.coroutines_peak, 8u);
	CHECK_EQ(s.coroutines_now, 0u);
	CHECK_EQ(s.spawned, 9u);
	rt_destroy(rt);
}

static void a_reactor_runs_again(void)
{
	struct rt *rt = make_rt(NULL);

	finished = 0;
	for (int i = 0; i < 3; i++)
		CHECK_EQ(rt_run(rt, co_spawns_ten_thousand, NULL), 0);
	CHECK_EQ(finished, 30000u);
	rt_destroy(rt);
}

/* What a switch keeps */

#if defined(__x86_64__)
static co_fn void co_fills_registers(void *arg)
{
	uint64_t seed = (uint64_t)(uintptr_t)arg, got[5];

	for (int i = 0; i < 100; i++) {
		uint64_t *to = got, from = seed + (uint64_t)i;

		/* The values cross the switch in the callee-saved registers (but rbp, which a debug build needs as frame pointer). */
		__asm__ volatile("movq %1, %%rbx; leaq 1(%1), %%r12; leaq 2(%1), %%r13; leaq 3(%1), %%r14; leaq 4(%1), %%r15\n\t"
				 "movq %%rsp, %%rax; andq $-16, %%rsp; subq $256, %%rsp; movq %%rax, (%%rsp); movq %0, 8(%%rsp)\n\t"
				 "call co_yield\n\t"
				 "movq 8(%%rsp), %%rax; movq (%%rsp), %%rsp\n\t"
				 "movq %%rbx, (%%rax); movq %%r12, 8(%%rax); movq %%r13, 16(%%rax); movq %%r14, 24(%%rax); movq %%r15, 32(%%rax)"
				 : "+D"(to), "+S"(from)
				 :
				 : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc",
				   "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
		for (unsigned k = 0; k < 5; k++)
			CHECK_EQ(got[k], seed + (uint64_t)i + k);
		seed += 1000;
	}
}

static co_fn void co_two_fill_registers(void *arg)
{
	CHECK_EQ(co_spawn("one", co_fills_registers, (void *)0x1111111111ul), 0);
	CHECK_EQ(co_spawn("two", co_fills_registers, (void *)0x7777777777ul), 0);
}

static void a_switch_keeps_callee_saved_registers(void)
{
	on_real(co_two_fill_registers, NULL);
}
#endif

static co_fn void co_rounds(void *arg)
{
	int mode = (int)(intptr_t)arg;
	volatile double x = 1.5, y = 2.5;

	fesetround(mode);
	for (int i = 0; i < 10; i++) {
		co_yield();
		CHECK_EQ(fegetround(), mode);
		if (RUNNING_ON_VALGRIND)
			continue;	/* it rounds to nearest whatever is set */
		CHECK_EQ((int)rint(x), mode == FE_UPWARD ? 2 : 1);
		CHECK_EQ((int)rint(y), mode == FE_UPWARD ? 3 : 2);
	}
}

static co_fn void co_two_round(void *arg)
{
	CHECK_EQ(co_spawn("up", co_rounds, (void *)(intptr_t)FE_UPWARD), 0);
	CHECK_EQ(co_spawn("down", co_rounds, (void *)(intptr_t)FE_DOWNWARD), 0);
	for (int i = 0; i < 20; i++) {
		co_yield();
		CHECK_EQ(fegetround(), FE_TONEAREST);
	}
}

static void each_coroutine_has_its_own_rounding_mode(void)
{
	on_real(co_two_round, NULL);
	CHECK_EQ(fegetround(), FE_TONEAREST);
}

__attribute__((noinline))
static co_fn unsigned co_recurse(unsigned depth)
{
	volatile char frame[256];
	unsigned below;

	memset((void *)frame, (int)depth, sizeof(frame));
	if (depth % 16 == 0)
		co_yield();
	below = depth ? co_recurse(depth - 1) : 0;
	for (unsigned i = 0; i < sizeof(frame); i++)
		CHECK_EQ((unsigned char)frame[i], (unsigned char)depth);
	return below + 1;
}

static co_fn void co_recurses(void *arg)
{
	CHECK_EQ(co_recurse((unsigned)(uintptr_t)arg), 1 + (unsigned)(uintptr_t)arg);
}

static co_fn void co_many_recurse(void *arg)
{
	for (uintptr_t i = 0; i < 20; i++)
		CHECK_EQ(co_spawn("deep", co_recurses, (void *)(100 + i)), 0);
}

static void deep_recursion_fits_a_stack(void)
{
	on_real(co_many_recurse, NULL);
}

static void all_of_it_works_with_ucontext_too(void)
{
	struct rt *rt = make_rt(&(struct rt_config){ .ucontext = true });

	finished = 0;
	trace_reset();
	CHECK_EQ(rt_run(rt, co_spawns_three, NULL), 0);
	CHECK_STR(trace, ".abcabcabc");
	CHECK_EQ(rt_run(rt, co_spawns_ten_thousand, NULL), 0);
	CHECK_EQ(finished, 10000u);
	CHECK_EQ(rt_run(rt, co_many_recurse, NULL), 0);
	CHECK_EQ(rt_run(rt, co_two_round, NULL), 0);
	rt_destroy(rt);
}

/* Tasks */

static unsigned seen;

static void look_at_task(const struct rt_task_info *t, void *arg)
{
	seen++;
	if (strcmp(t->name, "sleeper") == 0) {
		CHECK_STR(t->why, "a time");
		CHECK(t->since_ns >= 4000000);
	} else {
		CHECK_STR(t->name, "parker");
		CHECK_STR(t->why, "a test");
	}
}

static co_fn void co_sleeps(void *arg)
{
	co_sleep_ns(10000000);
}

static co_fn void co_looks_at_tasks(void *arg)
{
	CHECK_EQ(co_spawn("sleeper", co_sleeps, NULL), 0);
	CHECK_EQ(co_spawn("parker", co_parks, (void *)0), 0);
	co_sleep_ns(5000000);
	seen = 0;
	rt_for_each_task(rt_self(), look_at_task, NULL);
	CHECK_EQ(seen, 2u);
	co_wake(parked[0]);
}

static void tasks_say_what_they_wait_for_and_since_when(void)
{
	on_sim(1, co_looks_at_tasks, NULL);
}

static void outside_of_a_reactor_there_is_no_self(void)
{
	CHECK(!rt_self());
	CHECK(!co_self());
	CHECK(rt_now_ns() > 0);
}

int main(void)
{
	RUN(yielding_coroutines_take_turns_in_order);
	RUN(woken_coroutines_run_in_the_order_of_waking);
	RUN(a_wake_before_the_park_is_not_remembered);
	RUN(ten_thousand_coroutines_come_and_go);
	RUN(spawn_says_when_the_pool_is_empty);
	RUN(a_reactor_runs_again);
#if defined(__x86_64__)
	RUN(a_switch_keeps_callee_saved_registers);
#endif
	RUN(each_coroutine_has_its_own_rounding_mode);
	RUN(deep_recursion_fits_a_stack);
	RUN(all_of_it_works_with_ucontext_too);
	RUN(tasks_say_what_they_wait_for_and_since_when);
	RUN(outside_of_a_reactor_there_is_no_self);
	return 0;
}
