/* SPDX-License-Identifier: MIT */
/* The simulated reactor: virtual time, an order that the seed decides, deadlocks, power cuts. */
#include <fcntl.h>

#include "rt/sync.h"
#include "test_rt.h"

#define EVENTS 4000

static uint64_t history[EVENTS];
static unsigned history_n;
static struct co_mutex mutex;

static void record(uint64_t what)
{
	if (history_n < EVENTS)
		history[history_n++] = what * 1000003u ^ rt_now_ns();
}

static int heavy(void *arg)
{
	return (int)(uintptr_t)arg;
}

static co_fn void co_acts(void *arg)
{
	uint64_t id = (uintptr_t)arg;

	for (int i = 0; i < 20; i++) {
		record(id);
		switch (rt_rand64() % 4) {
		case 0: co_yield(); break;
		case 1: co_sleep_ns(rt_rand64() % 3 * 1000); break;
		case 2:
			co_mutex_lock(&mutex);
			record(id + 100);
			co_sleep_ns(500);
			co_mutex_unlock(&mutex);
			break;
		case 3: record(id + (uint64_t)co_offload(heavy, (void *)7)); break;
		}
	}
}

static co_fn void co_starts_actors(void *arg)
{
	history_n = 0;
	co_mutex_init(&mutex);
	for (uintptr_t i = 0; i < 20; i++)
		CHECK_EQ(co_spawn("actor", co_acts, (void *)i), 0);
}

static void a_seed_gives_one_order(void)
{
	static uint64_t first[EVENTS];
	unsigned first_n, differing = 0;
	struct rt *rt = make_sim(42), *other = make_sim(0);

	CHECK_EQ(rt_run(rt, co_starts_actors, NULL), 0);
	first_n = history_n;
	CHECK(first_n > 400);
	memcpy(first, history, sizeof(first));
	/* Again on the same reactor, and on one with a past. */
	rt_sim_reseed(rt, 42);
	CHECK_EQ(rt_run(rt, co_starts_actors, NULL), 0);
	CHECK_EQ(history_n, first_n);
	CHECK(memcmp(first, history, first_n * sizeof(first[0])) == 0);
	for (uint64_t seed = 1; seed <= 10; seed++) {
		rt_sim_reseed(other, seed);
		CHECK_EQ(rt_run(other, co_starts_actors, NULL), 0);
		differing += history_n != first_n || memcmp(first, history, first_n * sizeof(first[0])) != 0;
	}
	CHECK_EQ(differing, 10u);
	rt_sim_reseed(other, 42);
	CHECK_EQ(rt_run(other, co_starts_actors, NULL), 0);
	CHECK_EQ(history_n, first_n);
	CHECK(memcmp(first, history, first_n * sizeof(first[0])) == 0);
	rt_destroy(rt);
	rt_destroy(other);
}

static unsigned order;

static co_fn void co_appends(void *arg)
{
	order = order * 10 + (unsigned)(uintptr_t)arg;
}

static co_fn void co_appends_at_one_time(void *arg)
{
	co_sleep_ns(1000);
	co_appends(arg);
}

static co_fn void co_starts_three(void *arg)
{
	order = 0;
	for (uintptr_t i = 1; i <= 3; i++)
		CHECK_EQ(co_spawn("appends", arg ? co_appends_at_one_time : co_appends, (void *)i), 0);
}

static struct rt_timer three[3];

static void append(struct rt_timer *t)
{
	order = order * 10 + (unsigned)(t - three) + 1;
}

static co_fn void co_arms_three(void *arg)
{
	order = 0;
	for (int i = 0; i < 3; i++)
		rt_timer_arm(&three[i], rt_now_ns() + 1000, append);
	co_sleep_ns(2000);
}

static unsigned orders_seen(co_entry *fn, void *arg)
{
	struct rt *rt = make_sim(0);
	bool seen[322] = { false };
	unsigned n = 0;

	for (uint64_t seed = 0; seed < 200; seed++) {
		rt_sim_reseed(rt, seed);
		CHECK_EQ(rt_run(rt, fn, arg), 0);
		CHECK(order >= 123 && order <= 321);
		n += !seen[order];
		seen[order] = true;
	}
	rt_destroy(rt);
	return n;
}

static void every_order_of_what_is_ready_comes_up(void)
{
	CHECK_EQ(orders_seen(co_starts_three, NULL), 6u);
	CHECK_EQ(orders_seen(co_starts_three, three), 6u);
	CHECK_EQ(orders_seen(co_arms_three, NULL), 6u);
}

/* Time */

static co_fn void co_spends_a_year(void *arg)
{
	uint64_t start = rt_now_ns();

	CHECK_EQ(rt_wall_ns(), start);
	CHECK_EQ(rt_now_exact_ns(), start);
	for (int i = 0; i < 365; i++)
		co_sleep_ns(86400ull * 1000000000u);
	CHECK_EQ(rt_now_ns() - start, 365 * 86400ull * 1000000000u);
	/* Who polls for a time gets there. */
	start = rt_now_ns();
	while (rt_now_ns() < start + 1000000)
		co_yield();
	*(uint64_t *)arg = start;
}

static void a_year_passes_in_no_time(void)
{
	struct rt *rt = make_sim(1);
	uint64_t first, second, third;

	CHECK_EQ(rt_run(rt, co_spends_a_year, &first), 0);
	CHECK_EQ(rt_run(rt, co_spends_a_year, &second), 0);
	CHECK(second > first);
	rt_sim_reseed(rt, 1);
	CHECK_EQ(rt_run(rt, co_spends_a_year, &third), 0);
	CHECK_EQ(third, first);
	rt_destroy(rt);
}

/* Deadlock */

static co_fn void co_locks_for_ever(void *arg)
{
	co_mutex_lock(&mutex);
	co_park("Godot");
}

static co_fn void co_deadlocks(void *arg)
{
	co_mutex_init(&mutex);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(co_spawn("estragon", co_locks_for_ever, NULL), 0);
	co_sleep_ns(5000000);
}

static void a_deadlock_is_reported_with_who_waits_for_what(void)
{
	struct rt *rt = make_sim(1);
	char text[4096];
	int saved = dup(STDERR_FILENO), fd[2];
	ssize_t n;

	CHECK_EQ(pipe(fd), 0);
	dup2(fd[1], STDERR_FILENO);
	CHECK_EQ(rt_run(rt, co_deadlocks, NULL), -EDEADLK);
	dup2(saved, STDERR_FILENO);
	close(fd[1]);
	n = read(fd[0], text, sizeof(text) - 1);
	CHECK(n > 0);
	text[n] = 0;
	CHECK(strstr(text, "deadlock: 3 coroutines are left"));
	CHECK(strstr(text, "estragon"));
	CHECK(strstr(text, "waits for Godot, 0.005000 s"));
	CHECK(strstr(strstr(text, "waits for a mutex") + 1, "waits for a mutex"));
	close(fd[0]);
	close(saved);
	/* Who is left is forgotten. */
	CHECK_EQ(rt_run(rt, co_starts_actors, NULL), 0);
	rt_destroy(rt);
}

/* Power cuts */

static unsigned survivors;
static struct rt_timer pending;

static void fires(struct rt_timer *t)
{
	survivors++;
}

static co_fn void co_works(void *arg)
{
	co_sleep_ns(1000 + rt_rand64() % 1000);
	survivors++;
}

static co_fn void co_cuts(void *arg)
{
	for (int i = 0; i < 50; i++)
		CHECK_EQ(co_spawn("works", co_works, NULL), 0);
	rt_timer_arm(&pending, rt_now_ns() + 1000, fires);
	co_sleep_ns(500);
	rt_sim_stop();
	co_sleep_ns(500);
	survivors += 1000;
}

static co_fn void co_goes_on(void *arg)
{
	struct rt_stats s;

	rt_get_stats(rt_self(), &s);
	CHECK_EQ(s.coroutines_now, 1u);
	CHECK_EQ(co_available(), 1023u);
	co_sleep_ns(10000000);
	CHECK_EQ(survivors, 0u);
	/* A timer that was armed at the cut can be used again. */
	rt_timer_arm(&pending, rt_now_ns() + 1000, fires);
	co_sleep_ns(10000);
	CHECK_EQ(survivors, 1u);
	rt_timer_arm(&pending, rt_now_ns() + 1000, fires);
	rt_timer_cancel(&pending);
	co_sleep_ns(10000);
	CHECK_EQ(survivors, 1u);
	survivors = 0;
}

static void a_power_cut_stops_everything_where_it_is(void)
{
	struct rt *rt = make_sim(1);

	survivors = 0;
	for (int i = 0; i < 100; i++) {
		if (i % 2)
			rt_sim_reseed(rt, (uint64_t)i);
		CHECK_EQ(rt_run(rt, co_cuts, NULL), -ECANCELED);
		CHECK_EQ(rt_run(rt, co_goes_on, NULL), 0);
	}
	CHECK_EQ(rt_run(rt, co_cuts, NULL), -ECANCELED);
	rt_destroy(rt);
}

int main(void)
{
	RUN(a_seed_gives_one_order);
	RUN(every_order_of_what_is_ready_comes_up);
	RUN(a_year_passes_in_no_time);
	RUN(a_deadlock_is_reported_with_who_waits_for_what);
	RUN(a_power_cut_stops_everything_where_it_is);
	return 0;
}
