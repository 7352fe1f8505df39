/* SPDX-License-Identifier: MIT */
/*
 * qcow2: discard and write zeroes.
 *
 * Whole clusters and subclusters are marked in the tables, and what they had is freed (alloc.c); where write-zeroes shall keep the space, and at edges, the
 * zeroes go into the cluster. Version 2 cannot say that a cluster over a backing file is zeroes: there it is written.
 *
 * A subcluster that is given up while its cluster stays is punched first and marked then: either shows the zeroes, and what is not
 * allocated of a cluster that is `fresh` (alloc.c) stays zeroes.
 */
#include <errno.h>

#include "format/qcow2/internal.h"

enum mode {
	KEEP,		/* zeroes, and what is allocated stays so */
	UNMAP,		/* zeroes */
	DISCARD,	/* zeroes or as before */
	DROP,		/* unallocated */
};

#define ZERO_PAGE 65536u

static char zero_page[ZERO_PAGE] __attribute__((aligned(4096)));

/* Writes zeroes by the ordinary way; `len` is at most a cluster. */
static co_fn int co_write_zeroes(struct qcow2 *q, uint64_t off, uint64_t len)
{
	struct iovec iov = { zero_page, 0 };
	int ret = 0;

	while (len && !ret) {
		uint64_t n = 0;

		iov.iov_len = min(len, (uint64_t)ZERO_PAGE);
		ret = co_q2_write_piece(q, off, iov.iov_len, &iov, 1, 0, DISK_BACKGROUND, &n, &(bool){ false });
		off += n;
		len -= n;
	}
	return ret;
}

/* A range within one subcluster, or one whose cluster keeps its place. */
static co_fn int co_part(struct qcow2 *q, uint64_t off, uint64_t len, enum mode mode)
{
	uint32_t pos = off & (q->g.cluster_size - 1);
	struct qcow2_l2e e = { 0, 0 };
	enum qcow2_kind kind;
	uint64_t host;
	uint8_t *at;
	uint32_t n;
	int ret = co_q2_l2(q, off, &at, &n);

	if (ret)
		return ret;
	if (q2_fill_find(q, off >> q->g.cluster_bits))
		return mode == DISCARD ? 0 : co_write_zeroes(q, off, len);
	if (at)
		e = qcow2_l2_get(&q->g, at, 0);
	kind = q2_kind(q, e, pos >> q->g.sub_bits);
	if (kind == QCOW2_ZERO_PLAIN || kind == QCOW2_ZERO_ALLOCATED ||
	    (kind == QCOW2_UNALLOCATED && q2_unallocated_is_zero(q, align_down(off, q->g.sub_size))))
		return 0;
	host = qcow2_l2_host(e.entry) + pos;
	if (kind == QCOW2_NORMAL && ((e.entry & QCOW2_COPIED) || q->has_data_file)) {
		ret = co_q2_check_host(q, host - pos, off - pos);
		if (ret)
			return ret;
		if (mode == DISCARD)
			return co_disk_discard(q->data, host, len, DISK_BACKGROUND);
		return co_disk_zero(q->data, host, len, mode == UNMAP ? DISK_UNMAP : 0);
	}
	return mode == DISCARD ? 0 : co_write_zeroes(q, off, len);
}

/* The new entry for subclusters `subs` of a cluster. */
static struct qcow2_l2e given_up(struct qcow2 *q, struct qcow2_l2e e, uint64_t subs, uint64_t guest, enum mode mode)
{
	bool plain = mode == DROP || q2_unallocated_is_zero(q, guest);

	if (!q->g.ext)
		return (struct qcow2_l2e){ plain ? 0 : QCOW2_ZERO, 0 };
	if (e.entry & QCOW2_COMPRESSED)
		e = (struct qcow2_l2e){ 0, 0 };
	e.bitmap = (e.bitmap & ~(subs | subs << 32)) | (plain ? 0 : subs << 32);
	if (!(e.bitmap & 0xffffffff))
		e.entry = 0;
	return e;
}

static bool is_nothing_new(struct qcow2 *q, struct qcow2_l2e e, struct qcow2_l2e to)
{
	return e.entry == to.entry && e.bitmap == to.bitmap;
}

/* Punches what the subclusters have, if their cluster goes on being used. *suspended if so. */
static co_fn int co_punch_subs(struct qcow2 *q, struct qcow2_l2e e, uint64_t subs, uint64_t guest, bool *suspended)
{
	uint64_t have = e.bitmap & subs, host = qcow2_l2_host(e.entry);
	unsigned first, n;
	int ret;

	if (!q->g.ext || (e.entry & QCOW2_COMPRESSED) || !have || !(e.entry & QCOW2_COPIED) || !(e.bitmap & 0xffffffff & ~subs))
		return 0;
	*suspended = true;
	ret = co_q2_check_host(q, host, guest);
	while (have && !ret) {
		first = __builtin_ctzll(have);
		n = __builtin_ctzll(~(have >> first));
		ret = co_disk_zero(q->data, host + ((uint64_t)first << q->g.sub_bits), (uint64_t)n << q->g.sub_bits, DISK_UNMAP);
		have &= ~(((1ull << n) - 1) << first);
	}
	return ret;
}

/* Gives up subclusters [pos, pos + len) of one cluster. */
static co_fn int co_give_up(struct qcow2 *q, uint64_t guest, uint32_t pos, uint64_t len, enum mode mode)
{
	unsigned first = pos >> q->g.sub_bits, count = len >> q->g.sub_bits;
	uint64_t subs = q->g.ext ? ((1ull << count) - 1) << first : 1;
	bool punched = false;

	for (;;) {
		struct qcow2_l2e e, to;
		bool suspended = false;
		uint8_t *at;
		uint32_t n;
		int ret = co_q2_l2(q, guest, &at, &n);

		if (ret)
			return ret;
		if (q2_fill_find(q, guest >> q->g.cluster_bits)) {
			ret = co_q2_fill_finish(q, guest, 1);
			if (ret)
				return ret;
			continue;
		}
		e = at ? qcow2_l2_get(&q->g, at, 0) : (struct qcow2_l2e){ 0, 0 };
		to = given_up(q, e, subs, guest + pos, mode);
		if (is_nothing_new(q, e, to))
			return 0;
		if (!punched) {
			punched = true;
			ret = co_punch_subs(q, e, subs, guest, &suspended);
			if (ret)
				return ret;
			if (suspended)
				continue;
		}
		ret = co_q2_l2_own(q, guest, &at, &n, &suspended);
		if (ret)
			return ret;
		if (suspended)
			continue;
		if (!to.entry || (e.entry & QCOW2_COMPRESSED) || !q->g.ext)
			q2_free_entry(q, e);
		q2_l2_set(q, at, to);
		return 0;
	}
}

/* Whether the subclusters from `pos` on must keep their place, or their zeroes cannot be expressed. `whole`: it is about all of the cluster. */
static co_fn int co_is_kept(struct qcow2 *q, uint64_t guest, uint32_t pos, bool whole, enum mode mode, bool *ret)
{
	struct qcow2_l2e e;
	uint8_t *at;
	uint32_t n;
	int r;

	*ret = q->has_data_file && mode != DROP;
	if (*ret || mode == DROP)
		return 0;
	/* "Unallocated" is all that version 2 can say. */
	*ret = q->h.version < 3 && !q2_unallocated_is_zero(q, guest);
	if (*ret || (mode != KEEP && whole))
		return 0;
	r = co_q2_l2(q, guest, &at, &n);
	if (!r && at) {
		e = qcow2_l2_get(&q->g, at, 0);
		if (e.entry & QCOW2_COMPRESSED)
			*ret = !whole;
		else if (mode == KEEP)
			*ret = q2_kind(q, e, pos >> q->g.sub_bits) == QCOW2_NORMAL && (e.entry & QCOW2_COPIED);
	}
	return r;
}

/* Within one cluster. */
static co_fn int co_change_cluster(struct qcow2 *q, uint64_t off, uint64_t len, enum mode mode)
{
	uint64_t guest = align_down(off, q->g.cluster_size), sub = q->g.sub_size;
	uint64_t pos = off - guest, end = pos + len, from = align_up(pos, sub), to = align_down(end, sub);
	bool kept = false;
	int ret = 0;

	/* All within one subcluster. */
	if (from > to)
		return co_part(q, off, len, mode);
	if (pos < from)
		ret = co_part(q, off, from - pos, mode);
	if (!ret && end > to)
		ret = co_part(q, guest + to, end - to, mode);
	/* With subclusters, each may be kept or not. */
	while (from < to && !ret) {
		uint64_t step = q->g.ext && (mode == KEEP || q->has_data_file) ? sub : to - from;

		ret = co_is_kept(q, guest, from, step == q->g.cluster_size, mode, &kept);
		if (!ret && kept)
			ret = co_part(q, guest + from, step, mode);
		else if (!ret)
			ret = co_give_up(q, guest, from, step, mode);
		from += step;
	}
	return ret;
}

/* How much from `off` on has no table and needs none; 0: look at the cluster. */
static co_fn int co_nothing_there(struct qcow2 *q, uint64_t off, uint64_t len, enum mode mode, uint64_t *ret)
{
	uint8_t *at;
	uint32_t n;
	int r = co_q2_l2(q, off, &at, &n);

	*ret = 0;
	if (r || at || q->nfills || (mode != DROP && !q2_unallocated_is_zero(q, off)))
		return r;
	*ret = min(len, ((uint64_t)n << q->g.cluster_bits) - (off & (q->g.cluster_size - 1)));
	return 0;
}

static co_fn int co_change(struct qcow2 *q, uint64_t off, uint64_t len, enum mode mode)
{
	uint64_t cs = q->g.cluster_size, end = off + len, n;
	int ret = co_q2_ready(q);

	/* What lies behind the size belongs to nobody. A data file ends there. */
	if (end >= q->disk.size && mode != DROP && !q->has_data_file)
		end = align_up(end, cs);
	if (!ret)
		ret = co_q2_fill_finish(q, off, end - off);
	while (off < end && !ret) {
		struct q2_req req;

		if (q->disk.failed)
			return -EIO;
		ret = co_q2_req_begin_change(q, &req, 1);
		if (ret)
			break;
		ret = co_nothing_there(q, off, end - off, mode, &n);
		if (!ret && !n) {
			n = min(end - off, cs - (off & (cs - 1)));
			ret = co_change_cluster(q, off, n, mode);
		}
		q2_req_end(q, &req);
		off += n;
	}
	return ret;
}

static co_fn int co_change_fua(struct qcow2 *q, uint64_t off, uint64_t len, enum mode mode, unsigned flags)
{
	int ret = co_change(q, off, len, mode);

	/* Zeroes may have gone into a fill. */
	if (!ret && flags & DISK_FUA)
		ret = co_q2_fill_finish(q, off, len);
	return !ret && flags & DISK_FUA ? co_q2_flush_tables(q) : ret;
}

co_fn int co_q2_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_change_fua(q2_of(d), off, len, DISCARD, flags);
}

co_fn int co_q2_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_change_fua(q2_of(d), off, len, flags & DISK_UNMAP ? UNMAP : KEEP, flags);
}

co_fn int co_q2_drop(struct qcow2 *q, uint64_t off, uint64_t len)
{
	return co_change(q, off, len, DROP);
}
