/* SPDX-License-Identifier: MIT */
/*
 * qcow2: giving back in time what a crash would leak.
 *
 * That is the reserve, and what was freed and is not free yet. While there is any, a timer looks every two seconds:
 *
 *  - what was freed is reclaimed, and its holes are punched. If nobody has flushed since it was freed, the tables are flushed for it;
 *  - `demand`, to which the reserve is filled (alloc.c), is halved. When so few clusters are wanted that the least will do, the rest goes back: some ten
 *    seconds after the last of many.
 *
 * At rest nothing is left to be done, and the timer stands still. What is to be settled before an image is closed, or its stamp looked at, does not
 * wait for this (open.c), and leaves nothing to be done here.
 */
#include <errno.h>

#include "format/qcow2/internal.h"

#define RUNS_AT_ONCE 64u	/* that are reclaimed before others may have the lock */

static void on_tick(struct rt_timer *t);

void q2_tidy_later(struct qcow2 *q)
{
	if (!q->tidy_timer.heap_pos && !q->tidying && !q->closing)
		rt_timer_arm(&q->tidy_timer, rt_now_ns() + q->tidy_ns, on_tick);
}

void q2_tidy_end(struct qcow2 *q)
{
	q->closing = true;
	rt_timer_cancel(&q->tidy_timer);
}

static bool too_much_reserved(const struct qcow2 *q)
{
	return q->reserved > q2_reserve_least(q) && q2_reserve_wanted(q) == q2_reserve_least(q);
}

/* Nobody flushes, and so it never becomes free. */
static bool freed_needs_flush(const struct qcow2 *q)
{
	return q->nfreed && q->freed[q->freed_at].gen >= q->durable_gen && q->meta_gen == q->tidy_gen;
}

static co_fn int co_reclaim_freed(struct qcow2 *q)
{
	unsigned before;
	bool any = false;
	int ret = 0;

	do {
		co_mutex_lock(&q->alloc_lock);
		before = q->nfreed;
		if (!q->disk.failed)
			ret = co_q2_reclaim(q, RUNS_AT_ONCE);
		if (!ret && !q->disk.failed)
			ret = co_q2_refcounts_write(q);
		co_mutex_unlock(&q->alloc_lock);
		any |= q->nfreed < before;
	} while (!ret && before >= q->nfreed + RUNS_AT_ONCE && !q->disk.failed);
	return !ret && any && !q->disk.failed ? co_disk_flush(q->disk.file) : ret;
}

static co_fn int co_look(struct qcow2 *q)
{
	bool flush = freed_needs_flush(q);
	int ret = 0;

	q->demand = min(q->demand, q2_reserve_wanted(q)) / 2;
	if (flush)
		ret = co_q2_flush_tables(q);
	q->tidy_gen = q->meta_gen;
	if (!ret && q->nfreed)
		ret = co_reclaim_freed(q);
	if (!ret && !q->disk.failed && too_much_reserved(q))
		ret = co_q2_release(q, q2_reserve_least(q));
	return ret;
}

static co_fn void co_tidy(void *arg)
{
	struct qcow2 *q = arg;
	int ret = co_look(q);

	if (ret && !q->disk.failed)
		disk_fail(&q->disk, ret, "qcow2: giving clusters back");
	q->tidying = false;
	co_queue_wake_all(&q->background);
	if (!q->disk.failed && (q->nfreed || q->reserved > q2_reserve_least(q)))
		q2_tidy_later(q);
}

static void on_tick(struct rt_timer *t)
{
	struct qcow2 *q = container_of(t, struct qcow2, tidy_timer);

	if (q->disk.failed)
		return;
	q->tidying = !co_spawn("qcow2 tidy", co_tidy, q);
	if (!q->tidying)
		q2_tidy_later(q);
}
