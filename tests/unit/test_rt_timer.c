/* SPDX-License-Identifier: MIT */
/* Timers: order, arming again, cancelling, sleeping. */
#include "rt/sync.h"
#include "test_rt.h"

static char trace[64];
static unsigned trace_n;

struct named_timer {
	struct rt_timer t;
	char name;
};

static void note(struct rt_timer *t)
{
	trace[trace_n++] = container_of(t, struct named_timer, t)->name;
	trace[trace_n] = 0;
	CHECK_EQ(t->heap_pos, 0u);
	CHECK(rt_now_ns() >= t->at_ns);
}

static co_fn void co_arms(void *arg)
{
	struct named_timer t[5] = { { .name = 'a' }, { .name = 'b' }, { .name = 'c' }, { .name = 'd' }, { .name = 'e' } };
	uint64_t now = rt_now_ns();

	trace_n = 0;
	for (int i = 0; i < 5; i++)
		rt_timer_arm(&t[i].t, now + 1000 * (uint64_t)(5 - i), note);
	rt_timer_cancel(&t[2].t);
	rt_timer_cancel(&t[2].t);
	rt_timer_arm(&t[3].t, now + 100000, note);	/* later */
	rt_timer_arm(&t[0].t, now + 1, note);		/* earlier */
	co_sleep_ns(200000);
	CHECK_STR(trace, "aebd");
	/* In the past: on the next turn. */
	rt_timer_arm(&t[2].t, 0, note);
	CHECK_STR(trace, "aebd");
	co_sleep_ns(1);
	CHECK_STR(trace, "aebdc");
}

static void timers_fire_in_order_once_unless_cancelled(void)
{
	on_real(co_arms, NULL);
	on_sim(5, co_arms, NULL);
}

static co_fn void co_arms_same_time(void *arg)
{
	struct named_timer t[5] = { { .name = 'a' }, { .name = 'b' }, { .name = 'c' }, { .name = 'd' }, { .name = 'e' } };
	uint64_t now = rt_now_ns();

	trace_n = 0;
	for (int i = 0; i < 5; i++)
		rt_timer_arm(&t[i].t, now + 1000, note);
	co_sleep_ns(100000);
	CHECK_STR(trace, "abcde");
}

static void timers_of_one_time_fire_in_the_order_of_arming(void)
{
	on_real(co_arms_same_time, NULL);
}

static unsigned ticks;

static void rearms_itself_at_once(struct rt_timer *t)
{
	if (++ticks < 100)
		rt_timer_arm(t, 0, rearms_itself_at_once);
}

static co_fn void co_ticks(void *arg)
{
	struct rt_timer t = RT_TIMER_INIT;
	unsigned turns = 0;

	ticks = 0;
	rt_timer_arm(&t, 0, rearms_itself_at_once);
	while (ticks < 100) {
		co_yield();
		turns++;
	}
	CHECK(turns >= 100);
}

static void a_timer_that_rearms_itself_does_not_stop_the_loop(void)
{
	on_real(co_ticks, NULL);
	on_sim(3, co_ticks, NULL);
}

static co_fn void co_sleeps_exactly(void *arg)
{
	uint64_t t0 = rt_now_exact_ns(), w0 = rt_wall_ns();

	for (int i = 0; i < 10; i++)
		co_sleep_ns(300000);
	CHECK(rt_now_exact_ns() - t0 >= 3000000);
	if (arg)
		CHECK_EQ(rt_now_exact_ns() - t0, 3000000u);
	CHECK(rt_wall_ns() - w0 >= 2900000);
	co_sleep_ns(0);
}

static void a_sleep_is_never_too_short(void)
{
	on_real(co_sleeps_exactly, NULL);
	on_sim(1, co_sleeps_exactly, (void *)1);
}

static co_fn void co_sleeps_for_ever(void *arg)
{
	co_sleep_ns(UINT64_MAX);
}

static co_fn void co_outsleeps(void *arg)
{
	CHECK_EQ(co_spawn("for ever", co_sleeps_for_ever, NULL), 0);
	co_sleep_ns(1000);
	rt_sim_stop();
}

static void the_longest_sleep_does_not_overflow(void)
{
	struct rt *rt = make_sim(1);

	CHECK_EQ(rt_run(rt, co_outsleeps, NULL), -ECANCELED);
	rt_destroy(rt);
}

int main(void)
{
	RUN(timers_fire_in_order_once_unless_cancelled);
	RUN(timers_of_one_time_fire_in_the_order_of_arming);
	RUN(a_timer_that_rearms_itself_does_not_stop_the_loop);
	RUN(a_sleep_is_never_too_short);
	RUN(the_longest_sleep_does_not_overflow);
	return 0;
}
