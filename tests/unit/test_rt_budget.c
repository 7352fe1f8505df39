/* SPDX-License-Identifier: MIT */
/* The budget of memory: floors, limits, the bell; and that pools and stacks keep to it. */
#include "rt/budget.h"

#include "rt/buf.h"
#include "test_rt.h"
#include "util/bytes.h"
#include "util/rng.h"

#define MIB (1ull << 20)
#define USERS 5

static void the_sum_of_what_is_held_or_kept_never_exceeds_the_limit(void)
{
	struct rng rng;
	struct budget *b;
	struct budget_user u[USERS];
	uint64_t held[USERS] = { 0 }, forced = 0;

	rng_seed(&rng, test_seed());
	CHECK_EQ(budget_create(1000, &b), 0);
	for (unsigned i = 0; i < USERS; i++)
		CHECK(budget_join(b, &u[i], i % 2 ? "odd" : "even", i * 50));
	for (unsigned n = 0; n < test_scale(100000); n++) {
		unsigned i = rng_u64(&rng) % USERS;
		uint64_t bytes = rng_u64(&rng) % 300, sum = 0, now = held[i] + bytes;

		for (unsigned k = 0; k < USERS; k++)
			sum += k == i ? max(now, u[k].floor) : max(held[k], u[k].floor);
		if (rng_u64(&rng) % 2) {
			bool fits = sum <= 1000 || now <= u[i].floor, ok = budget_take(&u[i], bytes);

			/* Beyond the limit, by force, only what is within a floor is given. */
			CHECK_EQ(ok, fits);
			held[i] += ok ? bytes : 0;
		} else {
			bytes = min(bytes, held[i]);
			held[i] -= bytes;
			budget_give(&u[i], bytes);
		}
		if (rng_u64(&rng) % 1000 == 0) {
			budget_force(&u[i], 500);
			budget_give(&u[i], 500);
			forced++;
		}
		sum = 0;
		for (unsigned k = 0; k < USERS; k++) {
			CHECK_EQ(u[k].held, held[k]);
			sum += max(held[k], u[k].floor);
		}
		CHECK_EQ(budget_committed(b), sum);
		CHECK(sum <= 1000);
		CHECK_EQ(budget_room(b), 1000 - sum);
	}
	CHECK(budget_refused(b) > 0);

	struct budget_part part[8];

	CHECK_EQ(budget_parts(b, part, 8), 2u);
	CHECK_STR(part[0].name, "even");
	CHECK_EQ(part[0].users, 3u);
	CHECK_EQ(part[0].held, held[0] + held[2] + held[4]);
	CHECK_EQ(part[0].floor, 300u);
	for (unsigned i = 0; i < USERS; i++)
		budget_leave(&u[i]);
	CHECK_EQ(budget_committed(b), 0u);
	budget_destroy(b);
}

static void a_floor_that_does_not_fit_is_refused(void)
{
	struct budget_user a, c;
	struct budget *b;

	CHECK_EQ(budget_create(100, &b), 0);
	CHECK(budget_join(b, &a, "a", 60));
	CHECK(!budget_join(b, &c, "c", 41));
	CHECK(budget_take(&c, 1000));	/* is no user, and counts for nothing */
	CHECK_EQ(budget_committed(b), 60u);
	budget_leave(&a);
	budget_destroy(b);
	CHECK(budget_join(NULL, &a, "a", 60) && budget_take(&a, 1000));
	budget_give(&a, 1000);
	budget_leave(&a);
}

static void what_was_refused_is_remembered_and_who_yields_counts_as_obtainable(void)
{
	struct budget_user a, cache;
	struct budget *b;

	CHECK_EQ(budget_create(100, &b), 0);
	CHECK(budget_join(b, &a, "a", 0) && budget_join(b, &cache, "cache", 10));
	budget_set_yielding(&cache);
	CHECK_EQ(budget_obtainable(b), 90u);
	CHECK(budget_take(&cache, 80));
	CHECK_EQ(budget_room(b), 20u);
	CHECK_EQ(budget_obtainable(b), 90u);
	CHECK_EQ(budget_wanted(b), 0u);
	CHECK(!budget_take(&a, 30) && !budget_take(&a, 50) && !budget_take(&a, 40));
	CHECK_EQ(budget_wanted(b), 50u);
	CHECK_EQ(budget_wanted(b), 0u);
	budget_give(&cache, 75);	/* now within its floor */
	CHECK(budget_take(&a, 50));
	CHECK_EQ(budget_obtainable(b), 40u);
	CHECK_EQ(budget_room(b), 40u);
	CHECK(budget_take(&cache, 25));
	CHECK_EQ(budget_obtainable(b), 40u);
	budget_leave(&cache);
	CHECK_EQ(budget_obtainable(b), 50u);
	budget_want(b, 7);
	CHECK_EQ(budget_wanted(b), 7u);
	budget_want(NULL, 7);
	CHECK_EQ(budget_obtainable(NULL), UINT64_MAX);
	budget_leave(&a);
	budget_destroy(b);
}

/* --- Pools and stacks --- */

struct bed {
	struct budget *b;
	struct rt *rt;
	struct rt_bufpool *pool;
	struct budget_user other;
	unsigned bells, done;
	void *buf;
};

static void rung(void *arg)
{
	struct bed *bed = arg;

	bed->bells++;
}

static co_fn void co_wants_more(void *arg)
{
	struct bed *bed = arg;

	bed->buf = co_buf_get(bed->pool, 4 * MIB);
	bed->done = 1;
}

static co_fn void co_pool(void *arg)
{
	struct bed *bed = arg;
	void *a = rt_buf_tryget(bed->pool, 4096), *c;

	/* Its floor it gets although all is taken. */
	budget_force(&bed->other, budget_room(bed->b));
	CHECK(a);
	c = rt_buf_tryget(bed->pool, MIB);
	CHECK(c);
	CHECK(!rt_buf_tryget(bed->pool, 4 * MIB) && rt_bufpool_starved(bed->pool));
	co_yield();
	CHECK(bed->bells > 0);
	CHECK_EQ(co_spawn("wants more", co_wants_more, bed), 0);
	co_sleep_ns(5000000);
	CHECK(!bed->done);
	/* Nobody wakes who waits: the memory of another user comes back. */
	budget_give(&bed->other, 4 * MIB);
	while (!bed->done)
		co_sleep_ns(1000000);
	CHECK(bed->buf);
	memset(bed->buf, 1, 4 * MIB);
	rt_buf_put(bed->pool, bed->buf);
	CHECK_EQ(rt_bufpool_left(bed->pool), 6 * MIB - rt_bufpool_used(bed->pool));
	/* What is free goes back when it is wanted. */
	CHECK_EQ(budget_room(bed->b), 0u);
	rt_trim(rt_self());
	CHECK_EQ(budget_room(bed->b), 4 * MIB);
	rt_buf_put(bed->pool, c);
	rt_buf_put(bed->pool, a);
}

static struct bed make_bed(uint64_t limit, const struct rt_config *config)
{
	struct err err = ERR_INIT;
	struct bed bed = { .rt = make_rt(config) };

	CHECK_EQ(budget_create(limit, &bed.b), 0);
	CHECK_EQ(rt_set_budget(bed.rt, bed.b), 0);
	CHECK_EQ(rt_bufpool_create(bed.rt, 32 * MIB, &bed.pool, &err), 0);
	CHECK_EQ(rt_bufpool_account(bed.pool, "pool", &err), 0);
	CHECK(budget_join(bed.b, &bed.other, "other", 0));
	return bed;
}

static void end_bed(struct bed *bed)
{
	budget_set_keeper(bed->b, NULL, NULL, NULL);
	budget_leave(&bed->other);
	rt_bufpool_destroy(bed->pool);
	rt_destroy(bed->rt);
	CHECK_EQ(budget_committed(bed->b), 0u);
	budget_destroy(bed->b);
}

static void a_pool_waits_for_memory_of_others_and_gives_back_what_is_free(void)
{
	struct bed bed = make_bed(64 * MIB, NULL);

	budget_set_keeper(bed.b, bed.rt, rung, &bed);
	CHECK_EQ(rt_run(bed.rt, co_pool, &bed), 0);
	end_bed(&bed);
}

static co_fn void co_sleeper(void *arg)
{
	char deep[8192];

	memset(deep, 1, sizeof(deep));
	__asm__ volatile("" : : "r"(deep) : "memory");
	co_sleep_ns(1000000);
	(*(unsigned *)arg)--;
}

static co_fn unsigned co_spawn_all(unsigned *left)
{
	unsigned n = 0;

	while (co_available()) {
		CHECK_EQ(co_spawn("sleeper", co_sleeper, left), 0);
		n++;
	}
	CHECK_EQ(co_spawn("one more", co_sleeper, left), -EAGAIN);
	*left = n;
	while (*left)
		co_sleep_ns(1000000);
	return n;
}

static co_fn void co_stacks(void *arg)
{
	struct bed *bed = arg;
	uint64_t room = budget_room(bed->b);
	unsigned n, left = 0;

	n = co_spawn_all(&left);
	CHECK(n >= 128 && n < 1000);
	CHECK(budget_room(bed->b) < room && budget_room(bed->b) < MIB);
	/* As often as one likes. */
	CHECK_EQ(co_spawn_all(&left), n);
	if (SANITIZED || RUNNING_ON_VALGRIND)
		return;
	rt_trim(rt_self());
	CHECK_EQ(budget_room(bed->b), room);
	CHECK_EQ(co_spawn_all(&left), n);
}

static void what_can_be_spawned_is_what_the_budget_has_room_for(void)
{
	struct bed bed = make_bed(10 * MIB, &(struct rt_config){ .coroutines = 2000 });

	CHECK_EQ(rt_run(bed.rt, co_stacks, &bed), 0);
	end_bed(&bed);
}

int main(void)
{
	RUN(the_sum_of_what_is_held_or_kept_never_exceeds_the_limit);
	RUN(a_floor_that_does_not_fit_is_refused);
	RUN(what_was_refused_is_remembered_and_who_yields_counts_as_obtainable);
	RUN(a_pool_waits_for_memory_of_others_and_gives_back_what_is_free);
	RUN(what_can_be_spawned_is_what_the_budget_has_room_for);
	return 0;
}
