/* SPDX-License-Identifier: MIT */
/*
 * Range lock: a list of the ranges held and waited for, in order of arrival.
 *
 * A range waits for each earlier one that conflicts with it (overlaps, and not both shared), whether that one is held or waiting
 * itself; `blockers` counts them. Unlocking a range takes one from the count of each later one that
 * conflicts, and who has none left holds its lock. So both cost one walk over the list: lock and unlock take 5 ns with none
 * held, 40 ns with 32 and 750 ns with 512 (rt_perf). An interval tree would pay from some hundreds of ranges on.
 */
#include "rt/rt_int.h"
#include "rt/sync.h"

static bool conflict(const struct co_range *a, const struct co_range *b)
{
	if (a->shared && b->shared)
		return false;
	/* Written so that a range up to 2^64 does not overflow. */
	return a->off <= b->off ? b->off - a->off < a->len : a->off - b->off < b->len;
}

void co_rangelock_init(struct co_rangelock *l)
{
	list_init(&l->ranges);
	l->n = 0;
}

void co_range_lock(struct co_rangelock *l, struct co_range *r, uint64_t off, uint64_t len, bool shared)
{
	*r = (struct co_range){ .off = off, .len = len, .shared = shared };
	list_init(&r->node);
	if (len == 0)
		return;
	list_for_each(&l->ranges, n)
		r->blockers += conflict(container_of(n, struct co_range, node), r);
	list_add_tail(&l->ranges, &r->node);
	l->n++;
	r->waiter = co_self();
	while (r->blockers)
		co_park("a range of the disk");
}

void co_range_unlock(struct co_rangelock *l, struct co_range *r)
{
	if (r->len == 0)
		return;
	for (struct list *n = r->node.next; n != &l->ranges; n = n->next) {
		struct co_range *later = container_of(n, struct co_range, node);

		if (conflict(r, later) && --later->blockers == 0)
			co_wake(later->waiter);
	}
	list_del(&r->node);
	l->n--;
}
