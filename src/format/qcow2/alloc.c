/* SPDX-License-Identifier: MIT */
/*
 * qcow2: the reserve of free clusters, and what was freed.
 *
 * Clusters are reserved many at a time, ahead of their use: they are made to read as zeroes where they do not (a file that grows does), their
 * refcounts are set to 1 and flushed, and only then may anything use them (internal.h, invariant (1)). So allocating is a subtraction, refcounts cost a
 * write and a flush per reserve, and a flush of the guest's writes none at all. The file system gives their space at once and in one piece. Writers who
 * allocate one after another get adjacent clusters.
 *
 * A crash leaks the reserve, so it is no larger than what was taken from it lately: from 16 clusters (or 1 MiB) it is filled up to `demand`, at most run_ahead.
 * What is left of it is given back at close, and before that when nobody wants any more (tidy.c).
 *
 * What is freed goes through a ring: (off the table) -> freed, until a flush of tables has ended and the requests of that time have -> refcount
 * lowered, in memory and some time later on disk -> if that is 0, the hole is punched -> reserved again, when the holes have been flushed.
 *
 * `fresh` tells which clusters came from the reserve since the image was opened: what the guest has not written of them reads as zeroes.
 */
#include <errno.h>
#include <limits.h>
#include <string.h>

#include "format/qcow2/internal.h"
#include "util/err.h"
#include "util/log.h"

#define RESERVE_LEAST 16ull	/* clusters */
#define RESERVE_LEAST_BYTES (1ull << 20)

/* --- Reserve --- */

static uint64_t reserve_most(const struct qcow2 *q)
{
	return max(q->run_ahead >> q->g.cluster_bits, 4ull);
}

uint64_t q2_reserve_least(const struct qcow2 *q)
{
	return min(max(RESERVE_LEAST_BYTES >> q->g.cluster_bits, RESERVE_LEAST), reserve_most(q));
}

uint64_t q2_reserve_wanted(const struct qcow2 *q)
{
	return max(min(q->demand, reserve_most(q)), q2_reserve_least(q));
}

uint64_t q2_alloc(struct qcow2 *q, uint64_t want, uint64_t *ret_got)
{
	struct q2_run *r = &q->reserve[0];
	uint64_t first, n;

	if (!q->nreserve)
		return 0;
	n = min(r->n, want);
	first = r->first;
	r->first += n;
	r->n -= n;
	q->reserved -= n;
	q->demand += n;
	if (!r->n)
		memmove(q->reserve, q->reserve + 1, --q->nreserve * sizeof(*r));
	*ret_got = n;
	return first << q->g.cluster_bits;
}

static void fresh_add(struct qcow2 *q, uint64_t first, uint64_t n)
{
	for (unsigned i = 0; i < q->nfresh; i++) {
		struct q2_run *r = &q->fresh[i];

		if (first >= r->first && first <= r->first + r->n) {
			r->n = max(r->n, first + n - r->first);
			return;
		}
	}
	/* The oldest is forgotten: then its clusters are padded. */
	if (q->nfresh < Q2_FRESH)
		q->fresh[q->nfresh++] = (struct q2_run){ first, n };
	else
		q->fresh[q->fresh_next++ % Q2_FRESH] = (struct q2_run){ first, n };
}

bool q2_is_fresh(const struct qcow2 *q, uint64_t host)
{
	uint64_t c = host >> q->g.cluster_bits;

	for (unsigned i = q->nfresh; i--; )
		if (c - q->fresh[i].first < q->fresh[i].n)
			return true;
	return false;
}

void q2_forget_fresh(struct qcow2 *q)
{
	q->nfresh = 0;
}

/* Makes a run read as zeroes; it has no user. */
co_fn int co_q2_make_zero(struct qcow2 *q, uint64_t first, uint64_t n)
{
	uint64_t off = first << q->g.cluster_bits, end = off + (n << q->g.cluster_bits);

	while (off < end) {
		struct disk_extent e;
		int ret = co_disk_extent(q->disk.file, off, end - off, &e);

		if (ret)
			return ret;
		if (!e.zero) {
			ret = co_disk_zero(q->disk.file, off, e.len, DISK_UNMAP);
			if (ret)
				return ret;
		}
		off += e.len;
	}
	return 0;
}

struct refill {
	struct q2_run run[Q2_RUNS];
	unsigned n;
	uint64_t got, want;
};

static co_fn int co_take(struct qcow2 *q, struct refill *f, uint64_t first, uint64_t n)
{
	uint64_t value;
	int ret = co_q2_make_zero(q, first, n);

	/* Space in one piece: small writes into holes would each have the file system look for some. Where it cannot be had, holes will do. */
	if (!ret)
		co_disk_zero(q->disk.file, first << q->g.cluster_bits, n << q->g.cluster_bits, DISK_FAST);
	for (uint64_t i = 0; i < n && !ret; i++) {
		ret = co_q2_refcount_add(q, first + i, 1, &value);
		/* It was 0 a moment ago. */
		if (!ret && value != 1)
			ret = -EIO;
	}
	if (ret)
		return ret;
	f->run[f->n++] = (struct q2_run){ first, n };
	f->got += n;
	return 0;
}

/* Takes what is free below the frontier; runs of at least `least` clusters. Looks at no more than `budget` refcounts. */
static co_fn int co_take_holes(struct qcow2 *q, struct refill *f, uint64_t least, uint64_t budget)
{
	uint64_t c = q->free_hint, run = 0, value;
	int ret = 0;

	while (!ret && c < q->frontier && f->got < f->want && f->n + q->nreserve < Q2_RUNS - 2 && budget--) {
		ret = co_q2_refcount(q, c, &value);
		if (ret)
			break;
		/* Where there is no block, no refcount can be set. */
		if (!q2_has_block(q, c))
			value = 1;
		run = value ? 0 : run + 1;
		if (!value && q2_meta_has(q, c << q->g.cluster_bits))
			return co_q2_corrupt(q, "the table at %llu has refcount 0", (unsigned long long)(c << q->g.cluster_bits));
		c++;
		if (run && (c == q->frontier || run + f->got >= f->want)) {
			ret = run >= least || c < q->frontier ? co_take(q, f, c - run, run) : 0;
			run = 0;
			continue;
		}
		if (run && c < q->frontier) {
			ret = co_q2_refcount(q, c, &value);
			if (!ret && (value || !q2_has_block(q, c))) {
				ret = run >= least ? co_take(q, f, c - run, run) : 0;
				run = 0;
			}
		}
	}
	if (!ret)
		q->free_hint = c - run;
	return ret;
}

/* Takes clusters at the frontier. */
static co_fn int co_take_new(struct qcow2 *q, struct refill *f)
{
	uint64_t per_block = 1ull << q->g.rb_bits, n, want;
	int ret = 0;

	while (!ret && f->got < f->want && f->n + q->nreserve < Q2_RUNS) {
		ret = co_q2_cover_frontier(q);
		if (ret)
			break;
		want = min(f->want - f->got, per_block - q->frontier % per_block);
		ret = co_q2_grow_file(q, q->frontier + want);
		/* A disk that is nearly full may have a little. */
		while (ret == -ENOSPC && want > 1 && !f->got) {
			want = (want + 7) / 8;
			ret = co_q2_grow_file(q, q->frontier + want);
		}
		if (ret)
			break;
		n = q->frontier;
		ret = co_take(q, f, n, want);
		if (!ret)
			q->frontier = n + want;
	}
	return ret == -ENOSPC && f->got ? 0 : ret;
}

/* On failure nothing was taken, save for refcounts in memory: those go back. */
static co_fn void co_untake(struct qcow2 *q, struct refill *f)
{
	uint64_t value;

	for (unsigned i = 0; i < f->n; i++)
		for (uint64_t k = 0; k < f->run[i].n; k++)
			co_q2_refcount_add(q, f->run[i].first + k, -1, &value);
}

static co_fn int co_refill_locked(struct qcow2 *q)
{
	uint64_t least = max(65536u >> q->g.cluster_bits, 1u);
	struct refill f = { .want = q2_reserve_wanted(q) - min(q->reserved, q2_reserve_wanted(q)) };
	int ret = co_q2_reclaim(q, UINT_MAX);

	if (q->nreserve > Q2_RUNS / 2 || !f.want)
		return ret;
	if (!ret)
		ret = co_take_holes(q, &f, least, 16384);
	if (!ret && f.got < f.want)
		ret = co_take_new(q, &f);
	if (ret == -ENOSPC && !f.got) {
		/* The last resort: any hole anywhere. */
		q->free_hint = 0;
		ret = co_take_holes(q, &f, 1, UINT64_MAX);
		if (!ret && !f.got)
			ret = -ENOSPC;
	}
	if (!ret)
		ret = co_q2_refcounts_write(q);
	if (!ret)
		ret = co_disk_flush(q->disk.file);
	if (ret) {
		q->no_ahead = true;
		if (ret != -ENOSPC && !q->disk.failed)
			disk_fail(&q->disk, ret, "qcow2: reserving clusters");
		else if (ret == -ENOSPC)
			co_untake(q, &f);
		return ret;
	}
	q->no_ahead = f.got < f.want;
	for (unsigned i = 0; i < f.n; i++) {
		struct q2_run *last = q->nreserve ? &q->reserve[q->nreserve - 1] : NULL;

		q->reserved += f.run[i].n;
		fresh_add(q, f.run[i].first, f.run[i].n);
		if (last && last->first + last->n == f.run[i].first)
			last->n += f.run[i].n;
		else if (q->nreserve < Q2_RUNS)
			q->reserve[q->nreserve++] = f.run[i];
		else
			q2_free(q, f.run[i].first << q->g.cluster_bits, f.run[i].n);
	}
	q2_tidy_later(q);
	return 0;
}

co_fn int co_q2_refill(struct qcow2 *q)
{
	int ret = 0;

	co_mutex_lock(&q->alloc_lock);
	if (!q->nreserve)
		ret = co_refill_locked(q);
	co_mutex_unlock(&q->alloc_lock);
	return ret;
}

static co_fn void co_refill_ahead(void *arg)
{
	struct qcow2 *q = arg;

	co_mutex_lock(&q->alloc_lock);
	if (q->reserved < q2_reserve_wanted(q) / 2 && !q->disk.failed)
		co_refill_locked(q);	/* who needs a cluster meets the error */
	co_mutex_unlock(&q->alloc_lock);
	q->refilling = false;
	co_queue_wake_all(&q->background);
}

void q2_refill_ahead(struct qcow2 *q)
{
	if (q->refilling || q->reserved >= q2_reserve_wanted(q) / 4 || q->no_ahead)
		return;
	q->refilling = !co_spawn("qcow2 reserve", co_refill_ahead, q);
}

/* --- Freed --- */

void q2_free(struct qcow2 *q, uint64_t off, uint64_t clusters)
{
	uint64_t first = off >> q->g.cluster_bits;
	struct q2_freed *last = q->nfreed ? &q->freed[(q->freed_at + q->nfreed - 1) % Q2_FREED_MAX] : NULL;

	/* Together they wait for the later one. */
	if (last && last->first + last->n == first && last->n + clusters <= Q2_FREED_RUN) {
		last->n += clusters;
		last->gen = q->meta_gen;
		last->seq = q->seq;
		return;
	}
	if (q->nfreed == Q2_FREED_MAX) {
		q->count.leaked += clusters;
		if (!q->warned_leak)
			log_warn("%s: clusters are leaked, since too many are being freed at once; \"weir image check --repair=leaks\" gets them back", q->disk.name);
		q->warned_leak = true;
		return;
	}
	q->freed[(q->freed_at + q->nfreed++) % Q2_FREED_MAX] = (struct q2_freed){ first, clusters, q->meta_gen, q->seq };
	q2_tidy_later(q);
}

void q2_free_entry(struct qcow2 *q, struct qcow2_l2e e)
{
	uint64_t off;
	uint32_t len;

	if (q->has_data_file)
		return;
	if (e.entry & QCOW2_COMPRESSED) {
		qcow2_l2_compressed(&q->g, e.entry, &off, &len);
		q2_free(q, off, ((off + len - 1) >> q->g.cluster_bits) - (off >> q->g.cluster_bits) + 1);
	} else if (qcow2_l2_host(e.entry)) {
		q2_free(q, qcow2_l2_host(e.entry), 1);
	}
}

static bool may_reclaim(const struct qcow2 *q, const struct q2_freed *f)
{
	const struct q2_req *oldest = list_first(&q->reqs, struct q2_req, node);

	return f->gen < q->durable_gen && (!oldest || oldest->seq > f->seq);
}

static co_fn int co_reclaim_run(struct qcow2 *q, uint64_t first, uint64_t n)
{
	uint64_t value, hole = 0;
	int ret = 0;

	for (uint64_t c = first; c < first + n && !ret; c++) {
		/* A damaged entry may have called anything its own. */
		if (q2_meta_has(q, c << q->g.cluster_bits))
			ret = co_q2_corrupt(q, "the table at %llu was also in use as guest data", (unsigned long long)(c << q->g.cluster_bits));
		else
			ret = co_q2_refcount_add(q, c, -1, &value);
		if (!ret && !value) {
			q->free_hint = min(q->free_hint, c);
			hole++;
		}
		/* Adjacent holes in one piece. It is advice: the reserve makes sure of zeroes. */
		if (hole && (ret || value || c + 1 == first + n)) {
			uint64_t end = !ret && !value ? c + 1 : c;

			co_disk_discard(q->disk.file, (end - hole) << q->g.cluster_bits, hole << q->g.cluster_bits, 0);
			hole = 0;
		}
	}
	return ret;
}

co_fn int co_q2_reclaim(struct qcow2 *q, unsigned most)
{
	int ret = 0;

	while (!ret && most-- && q->nfreed && may_reclaim(q, &q->freed[q->freed_at])) {
		struct q2_freed f = q->freed[q->freed_at];

		q->freed_at = (q->freed_at + 1) % Q2_FREED_MAX;
		q->nfreed--;
		ret = co_reclaim_run(q, f.first, f.n);
	}
	return ret;
}

/*
 * An open fill frees a cluster and a table at most, and each cluster that a request changes the same, or opens a fill. So what is promised here
 * never exceeds the ring.
 */
static bool freed_has_room(const struct qcow2 *q, uint32_t frees)
{
	return q->nfreed + 2 * (q->nfills + q->promised + frees) <= Q2_FREED_MAX - Q2_FREED_SPARE;
}

static co_fn int co_make_freed_room(struct qcow2 *q)
{
	int ret = co_q2_flush_tables(q);

	if (ret)
		return ret;
	co_mutex_lock(&q->alloc_lock);
	ret = co_q2_reclaim(q, UINT_MAX);
	co_mutex_unlock(&q->alloc_lock);
	return ret;
}

co_fn int co_q2_req_begin_change(struct qcow2 *q, struct q2_req *r, uint32_t clusters)
{
	uint32_t frees = clusters + clusters / (1u << q->g.l2_bits) + 2;

	while (!freed_has_room(q, frees)) {
		int ret = co_make_freed_room(q);

		if (ret)
			return ret;
		if (!freed_has_room(q, frees) && !list_empty(&q->reqs))
			co_queue_wait(&q->freed_room, "qcow2: room for clusters that are freed");
	}
	q2_req_begin(q, r);
	r->frees = frees;
	q->promised += frees;
	return 0;
}

/* --- The end --- */

/* That the storage refuses to shrink the file is no reason to stop serving it. */
static co_fn int co_trim_file(struct qcow2 *q)
{
	struct err err = ERR_INIT;
	uint64_t size, value = 0;
	int ret = 0;

	while (q->frontier > 1 && !ret) {
		ret = co_q2_refcount(q, q->frontier - 1, &value);
		if (ret || value)
			break;
		q->frontier--;
	}
	q->free_hint = min(q->free_hint, q->frontier);
	size = q->frontier << q->g.cluster_bits;
	if (ret || !q->growable || size >= q->disk.file->size)
		return ret ? ret : co_disk_flush(q->disk.file);
	/* Durable when it returns, and so are the refcounts then; a cut before leaves refcounts behind the end. */
	ret = co_disk_resize(q->disk.file, size, &err);
	if (ret && ret != -ENOTSUP && !q->shrink_told) {
		log_warn("%s: what is free at its end is not given back: %s", q->disk.name, err.msg);
		q->shrink_told = true;
	}
	return ret ? co_disk_flush(q->disk.file) : 0;
}

co_fn int co_q2_release(struct qcow2 *q, uint64_t keep)
{
	uint64_t value;
	int ret;

	co_mutex_lock(&q->alloc_lock);
	ret = co_q2_reclaim(q, UINT_MAX);
	while (!ret && q->reserved > keep) {
		struct q2_run *last = &q->reserve[q->nreserve - 1];
		uint64_t n = min(last->n, q->reserved - keep), first = last->first + last->n - n;

		last->n -= n;
		q->nreserve -= !last->n;
		q->reserved -= n;
		q->free_hint = min(q->free_hint, first);
		/* What lies at the end is cut off below. */
		if (first + n != q->frontier)
			co_disk_discard(q->disk.file, first << q->g.cluster_bits, n << q->g.cluster_bits, 0);
		for (uint64_t i = 0; i < n && !ret; i++)
			ret = co_q2_refcount_add(q, first + i, -1, &value);
	}
	if (!ret)
		ret = co_q2_refcounts_write(q);
	if (!ret)
		ret = co_trim_file(q);
	co_mutex_unlock(&q->alloc_lock);
	return ret;
}

co_fn int co_q2_find_frontier(struct qcow2 *q)
{
	uint64_t i = q->rt_entries, per_block = 1ull << q->g.rb_bits, limit = qcow2_clusters(&q->g, q->disk.file->size), value;
	int ret = 0;

	q->frontier = 1;
	co_mutex_lock(&q->alloc_lock);
	while (i && !ret && q->frontier == 1) {
		if (!(get_be64(q->rt + --i * 8) & QCOW2_RT_OFFSET_MASK))
			continue;
		/* Refcounts of what lies beyond the end are wrong anyway. */
		for (uint64_t c = min((i + 1) * per_block, limit); c > i * per_block && !ret; c--) {
			ret = co_q2_refcount(q, c - 1, &value);
			if (!ret && value) {
				q->frontier = c;
				break;
			}
		}
	}
	co_mutex_unlock(&q->alloc_lock);
	return ret;
}
