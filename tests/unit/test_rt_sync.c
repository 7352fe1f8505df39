/* SPDX-License-Identifier: MIT */
/* Queue, mutex, semaphore, group, range lock: on the real reactor and in many simulated orders. */
#include "rt/sync.h"
#include "test_rt.h"

#define SEEDS 50

static char trace[64];
static unsigned trace_n;

static void note(char c)
{
	CHECK(trace_n < sizeof(trace) - 1);
	trace[trace_n++] = c;
	trace[trace_n] = 0;
}

static void in_many_orders(co_entry *fn, void *arg)
{
	struct rt *rt = make_sim(0);

	on_real(fn, arg);
	for (uint64_t seed = 0; seed < SEEDS; seed++) {
		rt_sim_reseed(rt, seed);
		CHECK_EQ(rt_run(rt, fn, arg), 0);
	}
	rt_destroy(rt);
}

/* Starts fn(0) ... fn(n-1), each waiting before the next is started. */
static co_fn void co_start_in_order(co_entry *fn, long n)
{
	for (long i = 0; i < n; i++) {
		CHECK_EQ(co_spawn("test", fn, (void *)i), 0);
		co_sleep_ns(1000);
	}
}

/* Queue */

static struct co_queue queue;

static co_fn void co_queues(void *arg)
{
	co_queue_wait(&queue, "the queue");
	note((char)('0' + (long)arg));
}

static co_fn void co_tests_queue(void *arg)
{
	trace_n = 0;
	co_queue_init(&queue);
	CHECK(co_queue_is_empty(&queue));
	CHECK(!co_queue_wake_one(&queue));
	co_start_in_order(co_queues, 4);
	CHECK(!co_queue_is_empty(&queue));
	CHECK(co_queue_wake_one(&queue));
	co_sleep_ns(1000);
	CHECK_STR(trace, "0");
	CHECK(co_queue_wake_one(&queue));
	co_sleep_ns(1000);
	CHECK_STR(trace, "01");
	co_queue_wake_all(&queue);
	CHECK(co_queue_is_empty(&queue));
	co_sleep_ns(1000);
	CHECK_EQ(trace_n, 4u);
}

static void a_queue_wakes_the_first_that_came(void)
{
	in_many_orders(co_tests_queue, NULL);
}

static co_fn void co_wakes_soon(void *arg)
{
	co_sleep_ns(1000);
	CHECK(co_queue_wake_one(&queue));
}

static co_fn void co_tests_deadline(void *arg)
{
	uint64_t start = rt_now_ns();

	co_queue_init(&queue);
	CHECK(!co_queue_wait_until(&queue, start + 5000, "the queue"));
	CHECK(rt_now_ns() >= start + 5000);
	CHECK(co_queue_is_empty(&queue));
	CHECK(!co_queue_wait_until(&queue, start, "the queue"));
	CHECK_EQ(co_spawn("waker", co_wakes_soon, NULL), 0);
	CHECK(co_queue_wait_until(&queue, UINT64_MAX, "the queue"));
	CHECK(co_queue_is_empty(&queue));
}

static void a_wait_with_a_deadline_ends_by_either(void)
{
	in_many_orders(co_tests_deadline, NULL);
}

/* A wake and the deadline in the same instant: it is one or the other, and the wake is not lost. */
static unsigned woken, expired;

static co_fn void co_waits_until(void *arg)
{
	if (co_queue_wait_until(&queue, *(uint64_t *)arg, "the queue"))
		woken++;
	else
		expired++;
}

static co_fn void co_tests_race(void *arg)
{
	uint64_t deadline = rt_now_ns() + 10000;
	unsigned wakes = 0;

	woken = expired = 0;
	co_queue_init(&queue);
	for (int i = 0; i < 5; i++)
		CHECK_EQ(co_spawn("waiter", co_waits_until, &deadline), 0);
	co_sleep_ns(10000);
	for (int i = 0; i < 5; i++)
		wakes += co_queue_wake_one(&queue);
	co_sleep_ns(10000);
	CHECK_EQ(woken, wakes);
	CHECK_EQ(woken + expired, 5u);
}

static void a_wake_at_the_deadline_is_not_lost(void)
{
	in_many_orders(co_tests_race, NULL);
}

/* Woken, and then the deadline passes before the waiter runs. */
static co_fn void co_tests_late_deadline(void *arg)
{
	uint64_t deadline = rt_now_ns() + 250;

	woken = expired = 0;
	co_queue_init(&queue);
	CHECK_EQ(co_spawn("waiter", co_waits_until, &deadline), 0);
	while (co_queue_is_empty(&queue) && !expired)
		co_yield();
	if (co_queue_wake_one(&queue)) {
		deadline = rt_now_ns() + 10000;
		while (!woken && !expired && rt_now_ns() < deadline)
			co_yield();
		CHECK_EQ(woken, 1u);
	}
}

static void a_deadline_after_the_wake_changes_nothing(void)
{
	struct rt *rt = make_sim(0);

	for (uint64_t seed = 0; seed < 200; seed++) {
		rt_sim_reseed(rt, seed);
		CHECK_EQ(rt_run(rt, co_tests_late_deadline, NULL), 0);
	}
	rt_destroy(rt);
}

/* Mutex */

static struct co_mutex mutex;
static int inside, entries;

static co_fn void co_enters(void *arg)
{
	for (int i = 0; i < 5; i++) {
		co_mutex_lock(&mutex);
		CHECK_EQ(inside++, 0);
		CHECK(!co_mutex_trylock(&mutex));
		if (rt_rand64() % 2)
			co_yield();
		else
			co_sleep_ns(rt_rand64() % 1000);
		CHECK_EQ(--inside, 0);
		entries++;
		co_mutex_unlock(&mutex);
		if (rt_rand64() % 2)
			co_yield();
	}
}

static co_fn void co_tests_mutex(void *arg)
{
	entries = 0;
	co_mutex_init(&mutex);
	for (int i = 0; i < 10; i++)
		CHECK_EQ(co_spawn("enters", co_enters, NULL), 0);
	while (entries < 50)
		co_sleep_ns(10000);
	CHECK(co_mutex_trylock(&mutex));
	co_mutex_unlock(&mutex);
}

static void a_mutex_admits_one(void)
{
	in_many_orders(co_tests_mutex, NULL);
}

static co_fn void co_locks_once(void *arg)
{
	co_mutex_lock(&mutex);
	note((char)('0' + (long)arg));
	co_mutex_unlock(&mutex);
}

static co_fn void co_tests_mutex_order(void *arg)
{
	trace_n = 0;
	co_mutex_init(&mutex);
	co_mutex_lock(&mutex);
	co_start_in_order(co_locks_once, 5);
	co_mutex_unlock(&mutex);
	/* Not ours again: it went to the first waiter. */
	CHECK(!co_mutex_trylock(&mutex));
	co_mutex_lock(&mutex);
	CHECK_STR(trace, "01234");
	co_mutex_unlock(&mutex);
}

static void a_mutex_is_fair(void)
{
	in_many_orders(co_tests_mutex_order, NULL);
}

/* Semaphore */

static struct co_sem sem;
static int peak;

static co_fn void co_takes(void *arg)
{
	for (int i = 0; i < 5; i++) {
		co_sem_take(&sem, "a place");
		if (++inside > peak)
			peak = inside;
		CHECK(inside <= 3);
		co_sleep_ns(rt_rand64() % 1000);
		inside--;
		entries++;
		co_sem_give(&sem);
	}
}

static co_fn void co_tests_sem(void *arg)
{
	entries = peak = 0;
	co_sem_init(&sem, 3);
	for (int i = 0; i < 10; i++)
		CHECK_EQ(co_spawn("takes", co_takes, NULL), 0);
	while (entries < 50)
		co_sleep_ns(10000);
	CHECK_EQ(peak, 3);
	CHECK_EQ(sem.count, 3u);
}

static void a_semaphore_admits_its_count(void)
{
	in_many_orders(co_tests_sem, NULL);
}

/* Group */

struct child {
	int result;
	uint64_t ns;
	struct co *ran_as;
	bool done;
};

static co_fn int co_child(void *arg)
{
	struct child *c = arg;

	c->ran_as = co_self();
	if (c->ns)
		co_sleep_ns(c->ns);
	c->done = true;
	return c->result;
}

static co_fn void co_tests_group(void *arg)
{
	struct co_group g;
	struct child c[4] = { { 0, 1000 }, { -EIO, 3000 }, { -ENOSPC, 2000 }, { 0, 4000 } };

	co_group_init(&g);
	CHECK_EQ(co_group_wait(&g), 0);
	for (int i = 0; i < 4; i++)
		co_group_start(&g, "child", co_child, &c[i]);
	CHECK(!c[0].done);
	if (rt_is_sim(rt_self()))
		CHECK_EQ(co_group_wait(&g), -ENOSPC);	/* the first in time */
	else
		CHECK(co_group_wait(&g) < 0);
	for (int i = 0; i < 4; i++) {
		CHECK(c[i].done);
		CHECK(c[i].ran_as != co_self());
	}
}

static void a_group_waits_for_all_and_the_first_error_wins(void)
{
	in_many_orders(co_tests_group, NULL);
}

static co_fn void co_uses_last(void *arg)
{
	struct co_group g;
	struct child c[3] = { { -EIO, 0 }, { 0, 100 }, { -ENOSPC, 100 } };

	while (co_available() > 1)
		co_spawn("filler", co_queues, NULL);
	co_group_init(&g);
	for (int i = 0; i < 3; i++)
		co_group_start(&g, "child", co_child, &c[i]);
	CHECK(c[0].ran_as != co_self());
	CHECK(c[1].ran_as == co_self());
	CHECK(c[1].done);
	CHECK(co_group_wait(&g) < 0);
	co_queue_wake_all(&queue);
	co_sleep_ns(1000);
}

static void a_group_works_with_an_empty_pool(void)
{
	struct rt *rt = make_rt(&(struct rt_config){ .coroutines = 6 });

	co_queue_init(&queue);
	CHECK_EQ(rt_run(rt, co_uses_last, NULL), 0);
	rt_destroy(rt);
}

/* Range lock (random tests are in tests/prop) */

static struct co_rangelock ranges;

static co_fn void co_locks_range(uint64_t off, uint64_t len, bool shared, char name)
{
	struct co_range r;

	co_range_lock(&ranges, &r, off, len, shared);
	note(name);
	co_sleep_ns(100000);
	note((char)(name - 32));
	co_range_unlock(&ranges, &r);
}

static co_fn void co_locks_one_of(void *arg)
{
	switch ((long)arg) {
	case 0: co_locks_range(0, 100, true, 'a'); break;
	case 1: co_locks_range(50, 100, true, 'b'); break;	/* beside a */
	case 2: co_locks_range(90, 20, false, 'w'); break;	/* after a and b */
	case 3: co_locks_range(0, 100, true, 'c'); break;	/* fair: after w, though a holds the same */
	case 4: co_locks_range(200, 1, false, 'x'); break;	/* free */
	case 5: co_locks_range(95, 0, false, 'e'); break;	/* empty: never waits */
	case 6: co_locks_range(UINT64_MAX - 9, 10, false, 'y'); break;
	case 7: co_locks_range(201, UINT64_MAX - 201, true, 'z'); break;	/* overlaps y */
	}
}

static co_fn void co_tests_ranges(void *arg)
{
	struct co_range all;

	trace_n = 0;
	co_rangelock_init(&ranges);
	co_start_in_order(co_locks_one_of, 8);
	if (rt_is_sim(rt_self()))
		CHECK_STR(trace, "abxey");
	co_range_lock(&ranges, &all, 0, UINT64_MAX, false);
	CHECK_EQ(trace_n, 16u);
	if (rt_is_sim(rt_self()))
		CHECK_STR(trace, "abxeyABwXEYzWcZC");
	CHECK_EQ(ranges.n, 1u);
	co_range_unlock(&ranges, &all);
}

static void ranges_that_conflict_take_turns_in_order(void)
{
	in_many_orders(co_tests_ranges, NULL);
}

int main(void)
{
	RUN(a_queue_wakes_the_first_that_came);
	RUN(a_wait_with_a_deadline_ends_by_either);
	RUN(a_wake_at_the_deadline_is_not_lost);
	RUN(a_deadline_after_the_wake_changes_nothing);
	RUN(a_mutex_admits_one);
	RUN(a_mutex_is_fair);
	RUN(a_semaphore_admits_its_count);
	RUN(a_group_waits_for_all_and_the_first_error_wins);
	RUN(a_group_works_with_an_empty_pool);
	RUN(ranges_that_conflict_take_turns_in_order);
	return 0;
}
