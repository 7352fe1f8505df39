/* SPDX-License-Identifier: MIT */
/* Timers against a model that keeps an unsorted array: random arming, arming again, cancelling, waiting. */
#include "lib/test.h"
#include "rt/rt.h"
#include "util/rng.h"

#define TIMERS 300

struct model_timer {
	struct rt_timer t;
	uint64_t at;
	bool armed;
};

static struct model_timer timers[TIMERS];
static struct rng rng;
static unsigned armed, fired;
static uint64_t last;

static void fire(struct rt_timer *t)
{
	struct model_timer *m = container_of(t, struct model_timer, t);

	CHECK(m->armed);
	CHECK_EQ(m->at, rt_now_ns());
	CHECK(m->at >= last);
	last = m->at;
	/* It is the earliest. */
	for (unsigned i = 0; i < TIMERS; i++)
		CHECK(!timers[i].armed || timers[i].at >= m->at);
	m->armed = false;
	armed--;
	fired++;
}

static void arm(struct model_timer *m)
{
	/* Few different times, so that some are equal. */
	uint64_t at = rt_now_ns() + 1 + rng_below(&rng, 100) * 10;

	armed += !m->armed;
	m->armed = true;
	m->at = at;
	rt_timer_arm(&m->t, at, fire);
}

static void cancel(struct model_timer *m)
{
	armed -= m->armed;
	m->armed = false;
	rt_timer_cancel(&m->t);
}

static co_fn void co_acts_at_random(void *arg)
{
	for (uint64_t n = *(uint64_t *)arg; n > 0; n--) {
		struct model_timer *m = &timers[rng_below(&rng, TIMERS)];

		switch (rng_below(&rng, 8)) {
		default: arm(m); break;
		case 5:
		case 6: cancel(m); break;
		case 7: co_sleep_ns(rng_below(&rng, 40)); break;
		}
		for (unsigned i = 0; i < TIMERS; i += 37)
			CHECK_EQ(timers[i].t.heap_pos != 0, timers[i].armed);
	}
	co_sleep_ns(2000);
	CHECK_EQ(armed, 0u);
}

int main(void)
{
	uint64_t seed = test_seed(), n = test_scale(100000);
	struct rt *rt;

	CHECK_EQ(rt_create_sim(&(struct rt_config){ .coroutines = 2 }, seed, &rt, NULL), 0);
	rng_seed(&rng, seed);
	CHECK_EQ(rt_run(rt, co_acts_at_random, &n), 0);
	CHECK(fired > n / 20);
	rt_destroy(rt);
	return 0;
}
