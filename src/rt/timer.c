/* SPDX-License-Identifier: MIT */
/*
 * Timers: a 4-ary heap of (time, key, timer) ordered by time, then key.
 *
 * The key counts up, so that timers of one time fire in the order in which they were armed; on a simulated reactor it
 * is random. `heap_pos` is the index + 1. The heap keeps room for one timer per coroutine from the start and doubles
 * beyond, so that arming allocates nothing in practice.
 */
#include <errno.h>
#include <stdlib.h>

#include "rt/rt_int.h"
#include "util/log.h"

#define ARITY 4u

static bool before(const struct heap_entry *a, const struct heap_entry *b)
{
	return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->key < b->key;
}

static void put(struct rt *rt, unsigned i, struct heap_entry e)
{
	rt->heap[i] = e;
	e.t->heap_pos = i + 1;
}

static void sift_up(struct rt *rt, unsigned i, struct heap_entry e)
{
	while (i > 0) {
		unsigned parent = (i - 1) / ARITY;

		if (!before(&e, &rt->heap[parent]))
			break;
		put(rt, i, rt->heap[parent]);
		i = parent;
	}
	put(rt, i, e);
}

static void sift_down(struct rt *rt, unsigned i, struct heap_entry e)
{
	for (;;) {
		unsigned child = i * ARITY + 1, end = child + ARITY, best;

		if (child >= rt->heap_n)
			break;
		if (end > rt->heap_n)
			end = rt->heap_n;
		for (best = child++; child < end; child++)
			if (before(&rt->heap[child], &rt->heap[best]))
				best = child;
		if (!before(&rt->heap[best], &e))
			break;
		put(rt, i, rt->heap[best]);
		i = best;
	}
	put(rt, i, e);
}

/* Puts `e` where the entry at `i` was. */
static void place(struct rt *rt, unsigned i, struct heap_entry e)
{
	if (i > 0 && before(&e, &rt->heap[(i - 1) / ARITY]))
		sift_up(rt, i, e);
	else
		sift_down(rt, i, e);
}

/* The heap decides, not heap_pos alone: a simulated power cut empties the heap and leaves the timers as they are. */
static bool is_armed(const struct rt *rt, const struct rt_timer *t)
{
	return t->heap_pos && t->heap_pos <= rt->heap_n && rt->heap[t->heap_pos - 1].t == t;
}

int timers_reserve(struct rt *rt, unsigned n)
{
	struct heap_entry *heap = realloc(rt->heap, n * sizeof(*heap));

	if (!heap)
		return -ENOMEM;
	rt->heap = heap;
	rt->heap_cap = n;
	return 0;
}

void rt_timer_arm(struct rt_timer *t, uint64_t at_ns, void (*fn)(struct rt_timer *t))
{
	struct rt *rt = rt_current;
	struct heap_entry e = { at_ns, rt->sim ? rng_u64(&rt->rng) : rt->timer_seq++, t };

	t->at_ns = at_ns;
	t->fn = fn;
	if (is_armed(rt, t)) {
		place(rt, t->heap_pos - 1, e);
		return;
	}
	if (rt->heap_n == rt->heap_cap && timers_reserve(rt, rt->heap_cap * 2) < 0) {
		log_error("no memory for %u timers", rt->heap_cap * 2);
		abort();
	}
	sift_up(rt, rt->heap_n++, e);
}

void rt_timer_cancel(struct rt_timer *t)
{
	timer_cancel(rt_current, t);
}

void timer_cancel(struct rt *rt, struct rt_timer *t)
{
	unsigned i = t->heap_pos - 1;

	if (!is_armed(rt, t))
		return;
	t->heap_pos = 0;
	if (i != --rt->heap_n)
		place(rt, i, rt->heap[rt->heap_n]);
}

void timers_fire(struct rt *rt)
{
	/* Bounded: a timer that its function arms again for a time already past waits for the next turn. */
	for (unsigned n = rt->heap_n; n > 0 && rt->heap_n > 0 && rt->heap[0].at_ns <= rt->now_ns; n--) {
		struct rt_timer *t = rt->heap[0].t;

		timer_cancel(rt, t);
		t->fn(t);
	}
}

struct sleeper {
	struct rt_timer timer;
	struct co *co;
	bool done;
};

static void sleeper_wake(struct rt_timer *t)
{
	struct sleeper *s = container_of(t, struct sleeper, timer);

	s->done = true;
	co_wake(s->co);
}

void co_sleep_ns(uint64_t ns)
{
	struct sleeper s = { .co = co_self() };
	uint64_t now = rt_now_exact_ns();

	rt_timer_arm(&s.timer, ns > UINT64_MAX - now ? UINT64_MAX : now + ns, sleeper_wake);
	while (!s.done)
		co_park("a time");
}
