/* SPDX-License-Identifier: MIT */
/*
 * The range lock against a brute-force model: random ranges, shared and exclusive, in random simulated orders.
 *
 * The model keeps, for each request in order of arrival, whether it waits, holds or is gone, and says that a request holds as
 * soon as no earlier one that is not gone conflicts with it.
 */
#include "lib/test.h"
#include "rt/sync.h"
#include "util/rng.h"

#define TASKS 60
#define ROUNDS 12
#define REQUESTS (TASKS * ROUNDS)

enum state { WAITS, HOLDS, GONE };

struct request {
	uint64_t first, last;
	bool empty, shared;
	enum state state;
};

static struct request model[REQUESTS];
static unsigned arrived;
static struct co_rangelock lock;
static struct rng rng;
static unsigned space;

static bool conflict(const struct request *a, const struct request *b)
{
	if (a->empty || b->empty || (a->shared && b->shared))
		return false;
	return a->first <= b->last && b->first <= a->last;
}

static bool may_hold(unsigned i)
{
	for (unsigned k = 0; k < i; k++)
		if (model[k].state != GONE && conflict(&model[k], &model[i]))
			return false;
	return true;
}

/* At a time at which nothing else happens: all who may hold their range do. */
static void check_nobody_waits_in_vain(void)
{
	for (unsigned i = 0; i < arrived; i++)
		if (model[i].state == WAITS)
			CHECK(!may_hold(i));
}

static co_fn void co_locks_at_random(void *arg)
{
	for (int n = 0; n < ROUNDS; n++) {
		uint64_t off = rng_below(&rng, space), len = rng_below(&rng, 8) ? rng_below(&rng, space / 4 + 1) : UINT64_MAX - off;
		unsigned i = arrived++;
		struct co_range r;

		if (rng_below(&rng, 16) == 0)
			off = UINT64_MAX - len;
		model[i] = (struct request){ off, off + len - 1, len == 0, rng_below(&rng, 2), WAITS };
		co_range_lock(&lock, &r, off, len, model[i].shared);
		CHECK(may_hold(i));
		model[i].state = HOLDS;
		co_sleep_ns(2 + 2 * rng_below(&rng, 500));
		for (unsigned k = 0; k < arrived; k++)
			CHECK(k == i || model[k].state != HOLDS || !conflict(&model[k], &model[i]));
		model[i].state = GONE;
		co_range_unlock(&lock, &r);
		if (rng_below(&rng, 2))
			co_sleep_ns(2 + 2 * rng_below(&rng, 500));
	}
}

static co_fn void co_locks_main(void *arg)
{
	for (int i = 0; i < TASKS; i++)
		CHECK_EQ(co_spawn("locks", co_locks_at_random, NULL), 0);
	/* The others sleep even times, this one is at odd times. */
	co_sleep_ns(1);
	while (arrived < REQUESTS || lock.n) {
		co_sleep_ns(2 + 2 * rng_below(&rng, 300));
		check_nobody_waits_in_vain();
	}
}

int main(void)
{
	uint64_t seed = test_seed(), rounds = test_scale(40);
	struct err *none = NULL;
	struct rt *rt;

	CHECK_EQ(rt_create_sim(NULL, seed, &rt, none), 0);
	for (uint64_t i = 0; i < rounds; i++) {
		rt_sim_reseed(rt, seed + i);
		rng_seed(&rng, seed ^ i << 32);
		arrived = 0;
		/* From heavy contention to little. */
		space = 4u << i % 16;
		co_rangelock_init(&lock);
		CHECK_EQ(rt_run(rt, co_locks_main, NULL), 0);
		CHECK_EQ(lock.n, 0u);
	}
	rt_destroy(rt);
	return 0;
}
