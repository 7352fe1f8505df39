/* SPDX-License-Identifier: MIT */
/*
 * qcow2: writes.
 *
 * A write goes piece by piece. A piece is one of
 *
 *   in place   the cluster is the guest's alone: the data goes where it lies
 *   fresh      what was there reads as zeroes: clusters are taken from the reserve and mapped at once, and the data goes there. They read as zeroes
 *              until then, as before, so nobody waits and nothing is padded (internal.h, invariant (2))
 *   fill       anything else: copy-on-write, see fill.c
 *
 * In the first two cases the data goes straight from the caller's memory to its place with one write, whatever the size of a cluster.
 */
#include <errno.h>

#include "format/qcow2/internal.h"

enum how { IN_PLACE, FRESH, FILL };

struct piece {
	enum how how;
	uint64_t host, len;
};

static enum how how_to(struct qcow2 *q, struct qcow2_l2e e, uint64_t guest)
{
	unsigned sub = (guest & (q->g.cluster_size - 1)) >> q->g.sub_bits;
	enum qcow2_kind kind = q2_kind(q, e, sub);
	uint64_t host = qcow2_l2_host(e.entry);

	switch (kind) {
	case QCOW2_NORMAL:
		return e.entry & QCOW2_COPIED || q->has_data_file ? IN_PLACE : FILL;
	case QCOW2_UNALLOCATED:
		if (!q2_unallocated_is_zero(q, guest & ~(uint64_t)(q->g.sub_size - 1)))
			return FILL;
		break;
	case QCOW2_ZERO_PLAIN:
	case QCOW2_ZERO_ALLOCATED:
		break;
	default:
		return FILL;
	}
	if (q->has_data_file)
		return FILL;
	if (!q->g.ext)
		return FRESH;
	/* Subclusters are added to the cluster that is there, if what they have of it is zeroes. */
	if (!host)
		return FRESH;
	return (e.entry & QCOW2_COPIED) && q2_is_fresh(q, host) ? FRESH : FILL;
}

bool q2_needs_fill(struct qcow2 *q, struct qcow2_l2e e, uint64_t guest)
{
	return how_to(q, e, guest) == FILL;
}

/* Clusters of one kind from `guest` on, whose data (if it is in place) is adjacent. */
static void measure(struct qcow2 *q, const uint8_t *at, uint32_t n, uint64_t guest, uint64_t len, struct piece *p)
{
	uint32_t cs = q->g.cluster_size, pos = guest & (cs - 1);
	struct qcow2_l2e e = qcow2_l2_get(&q->g, at, 0);
	uint64_t first = qcow2_l2_host(e.entry);

	p->how = how_to(q, e, guest);
	p->host = first + pos;
	p->len = 0;
	for (uint32_t i = 0; i < n && p->len < len; i++, pos = 0) {
		if (i) {
			e = qcow2_l2_get(&q->g, at, i);
			if (q2_fill_find(q, (guest + p->len) >> q->g.cluster_bits))
				return;
			if (p->how == IN_PLACE && qcow2_l2_host(e.entry) != first + (uint64_t)i * cs)
				return;
			/* Subclusters in a cluster of their own cannot go with others. */
			if (p->how == FRESH && q->g.ext && (first || qcow2_l2_host(e.entry)))
				return;
		}
		while (pos < cs && p->len < len) {
			uint64_t step = min((uint64_t)(q->g.sub_size - (pos & (q->g.sub_size - 1))), len - p->len);

			if (how_to(q, e, guest + p->len) != p->how)
				return;
			p->len += step;
			pos += step;
		}
		if (p->how == FILL)
			return;
	}
}

co_fn int co_q2_write_data(struct qcow2 *q, uint64_t host, const struct iovec *iov, int niov, uint64_t skip, uint64_t len, unsigned flags)
{
	uint64_t done = 0;
	int ret = 0;

	while (done < len && !ret) {
		struct iovec v[Q2_IOV];
		const struct iovec *use;
		int n;
		uint64_t piece = q2_slice(iov, niov, skip + done, len - done, v, &use, &n);

		ret = co_disk_writev(q->data, host + done, use, n, flags);
		done += piece;
	}
	if (ret)
		q2_forget_fresh(q);
	return ret;
}

/* Whether the entry in memory, and the way to it, are on stable media. */
static bool mapping_is_stable(const struct qcow2 *q, const uint8_t *at)
{
	return q2_table_gen(&q->l2, at) < q->durable_gen && q->l1_gen < q->durable_gen;
}

static co_fn int co_in_place(struct qcow2 *q, uint64_t guest, const struct piece *p, const struct iovec *iov, int niov, uint64_t skip, unsigned flags)
{
	uint64_t cs = q->g.cluster_size;

	for (uint64_t at = align_down(p->host, cs); at < p->host + p->len; at += cs) {
		int ret = co_q2_check_host(q, at, align_down(guest, cs) + (at - align_down(p->host, cs)));

		if (ret)
			return ret;
	}
	q->count.in_place++;
	return co_q2_write_data(q, p->host, iov, niov, skip, p->len, flags);
}

/* The bits of the subclusters that [pos, pos + len) of a cluster touches. */
static uint64_t sub_mask(const struct qcow2 *q, uint32_t pos, uint64_t len)
{
	unsigned first = pos >> q->g.sub_bits, last = (pos + len - 1) >> q->g.sub_bits;

	return (last == 31 ? 0xffffffffull : (1ull << (last + 1)) - 1) & ~((1ull << first) - 1);
}

static void map_fresh(struct qcow2 *q, uint8_t *at, uint32_t index, uint32_t pos, uint64_t len, uint64_t host)
{
	uint8_t *p = at + (size_t)index * q->g.l2_entry_size;
	struct qcow2_l2e e = qcow2_l2_get(&q->g, p, 0);
	uint64_t subs;

	if (!q->g.ext) {
		q2_free_entry(q, e);
		e.entry = host | QCOW2_COPIED;
	} else {
		subs = sub_mask(q, pos, len);
		if (!qcow2_l2_host(e.entry))
			e.entry = host | QCOW2_COPIED;
		e.bitmap = (e.bitmap | subs) & ~(subs << 32);
	}
	q2_l2_set(q, p, e);
}

/* Maps as much of the piece as adjacent clusters can be had for. Sets its place and its length. Plain: nothing changes meanwhile. */
static bool map_piece(struct qcow2 *q, uint8_t *at, uint64_t guest, struct piece *p)
{
	uint32_t cs = q->g.cluster_size, pos = guest & (cs - 1);
	struct qcow2_l2e e = qcow2_l2_get(&q->g, at, 0);
	uint64_t n = (pos + p->len + cs - 1) >> q->g.cluster_bits, got = 1, host = q->g.ext ? qcow2_l2_host(e.entry) : 0;

	if (!host)
		host = q2_alloc(q, n, &got);
	if (!host)
		return false;
	p->host = host + pos;
	p->len = min(p->len, got * cs - pos);
	for (uint64_t i = 0, done = 0; done < p->len; i++) {
		uint64_t len = min((uint64_t)cs - pos, p->len - done);

		map_fresh(q, at, i, pos, len, host + i * cs);
		done += len;
		pos = 0;
	}
	return true;
}

/* Leaves p->len as the length that was written; 0: look again. */
static co_fn int co_fresh(struct qcow2 *q, uint64_t guest, struct piece *p, const struct iovec *iov, int niov, uint64_t skip, unsigned flags)
{
	bool suspended = false;
	uint8_t *at;
	uint32_t n;
	int ret = co_q2_l2_own(q, guest, &at, &n, &suspended);

	if (ret || suspended) {
		p->len = 0;
		return ret;
	}
	if (!map_piece(q, at, guest, p)) {
		p->len = 0;
		return co_q2_refill(q);
	}
	q2_refill_ahead(q);
	q->count.fresh++;
	return co_q2_write_data(q, p->host, iov, niov, skip, p->len, flags);
}

co_fn int co_q2_write_piece(struct qcow2 *q, uint64_t off, uint64_t len, const struct iovec *iov, int niov, uint64_t skip, unsigned flags,
			    uint64_t *ret_done, bool *fua)
{
	uint64_t cs = q->g.cluster_size, in_cluster = min(len, cs - (off & (cs - 1)));
	struct piece p = { FILL, 0, in_cluster };
	uint8_t *at;
	uint32_t n;
	int ret = co_q2_l2(q, off, &at, &n);

	if (ret)
		return ret;
	if (q2_fill_find(q, off >> q->g.cluster_bits)) {
		p.how = FILL;
	} else if (at) {
		measure(q, at, n, off, len, &p);
	} else if (!q->has_data_file && q2_unallocated_is_zero(q, align_down(off, q->g.sub_size))) {
		/* No table yet: it is made, and then looked at. */
		bool suspended;

		*ret_done = 0;
		return co_q2_l2_own(q, off, &at, &n, &suspended);
	}
	/* A part of a write waits for the others, and then for one flush. */
	*fua = *fua && p.how == IN_PLACE && !skip && p.len == len && mapping_is_stable(q, at);
	flags = (flags & ~DISK_FUA) | (*fua ? DISK_FUA : 0);
	switch (p.how) {
	case IN_PLACE:
		ret = co_in_place(q, off, &p, iov, niov, skip, flags);
		break;
	case FRESH:
		ret = co_fresh(q, off, &p, iov, niov, skip, flags);
		break;
	case FILL:
		p.len = min(p.len, in_cluster);
		ret = co_q2_fill_write(q, off, p.len, iov, niov, skip, flags);
		if (ret == -EAGAIN)
			p.len = ret = 0;
		break;
	}
	*ret_done = p.len;
	return ret;
}

/* *fua as for a piece. */
static co_fn int co_write_step(struct qcow2 *q, uint64_t off, uint64_t len, const struct iovec *iov, int niov, uint64_t skip, unsigned flags, bool *fua)
{
	uint64_t cs = q->g.cluster_size, done = 0, n = 0;
	struct q2_req req;
	int ret = co_q2_req_begin_change(q, &req, (uint32_t)((align_up(off + len, cs) - align_down(off, cs)) >> q->g.cluster_bits));

	if (ret)
		return ret;
	while (done < len && !ret) {
		bool stable = *fua;

		ret = q->disk.failed ? -EIO : co_q2_write_piece(q, off + done, len - done, iov, niov, skip + done, flags, &n, &stable);
		*fua = n ? stable : *fua;
		done += ret ? 0 : n;
	}
	q2_req_end(q, &req);
	return ret;
}

/*
 * With FUA: a write in place, whose mapping is stable, is passed on as one. All others cost a flush of tables, and pay for the copies of their own
 * clusters only.
 */
co_fn int co_q2_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct qcow2 *q = q2_of(d);
	uint64_t most = (uint64_t)(Q2_STEP - 1) << q->g.cluster_bits;
	bool fua = flags & DISK_FUA && len <= most;
	int ret = co_q2_ready(q);

	for (uint64_t done = 0, n; done < len && !ret; done += n) {
		n = min(len - done, most);
		ret = co_write_step(q, off + done, n, iov, niov, done, flags & DISK_BACKGROUND, &fua);
	}
	if (ret || !(flags & DISK_FUA) || fua)
		return ret;
	ret = co_q2_fill_finish(q, off, len);
	return ret ? ret : co_q2_flush_tables(q);
}
