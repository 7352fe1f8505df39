/* SPDX-License-Identifier: MIT */
/*
 * qcow2: reads, and what lies where.
 *
 * A read goes run by run: as far as the same kind goes on, over clusters that are adjacent in the image, so that sequential reads are
 * passed on whole. Fills (fill.c) lie over what the tables say.
 */
#include <errno.h>

#include "format/qcow2/internal.h"
#include "util/iov.h"

/* A stretch of the guest's disk that is all of one kind. */
struct run {
	enum qcow2_kind kind;
	uint64_t host;		/* NORMAL: of its first byte */
	uint64_t entry;		/* COMPRESSED_DATA */
	uint64_t len;
};

uint64_t q2_slice(const struct iovec *iov, int niov, uint64_t skip, uint64_t len, struct iovec v[Q2_IOV], const struct iovec **ret, int *ret_n)
{
	uint64_t total = 0;
	int n = 0, i = 0;

	while (skip && skip >= iov[i].iov_len)
		skip -= iov[i++].iov_len;
	if (!skip && niov - i > 1 && niov - i <= DISK_MAX_IOV && iov_len(iov + i, niov - i) == len) {
		*ret = iov + i;
		*ret_n = niov - i;
		return len;
	}
	for (; i < niov && n < Q2_IOV && total < len; i++, skip = 0) {
		v[n] = (struct iovec){ (char *)iov[i].iov_base + skip, min((uint64_t)iov[i].iov_len - skip, len - total) };
		total += v[n++].iov_len;
	}
	*ret = v;
	*ret_n = n;
	return total;
}

/* Reads from a disk, zeroes beyond its end. */
static co_fn int co_read_disk(struct disk *from, uint64_t at, const struct iovec *iov, int niov, uint64_t skip, uint64_t len, unsigned flags)
{
	uint64_t have = at < from->size ? min(len, from->size - at) : 0, done = 0;
	int ret = 0;

	while (done < have && !ret) {
		struct iovec v[Q2_IOV];
		const struct iovec *use;
		int n;
		uint64_t piece = q2_slice(iov, niov, skip + done, have - done, v, &use, &n);

		ret = co_disk_readv(from, at + done, use, n, flags);
		done += piece;
	}
	if (!ret && have < len)
		iov_set(iov, niov, skip + have, 0, len - have);
	return ret;
}

static uint64_t host_of(const struct qcow2 *q, struct qcow2_l2e e, uint64_t guest)
{
	return qcow2_l2_host(e.entry) + (guest & (q->g.cluster_size - 1));
}

/* Goes on over `n` entries from `at` on, at most `len` bytes; a cluster with a fill ends the run unless `raw`. */
static void map_run(struct qcow2 *q, const uint8_t *at, uint32_t n, uint64_t guest, uint64_t len, bool raw, struct run *r)
{
	uint32_t cs = q->g.cluster_size;
	struct qcow2_l2e e = qcow2_l2_get(&q->g, at, 0);
	uint64_t pos = guest & (cs - 1), sub;

	*r = (struct run){ .kind = q2_kind(q, e, pos >> q->g.sub_bits), .entry = e.entry };
	r->host = host_of(q, e, guest);
	if (r->kind == QCOW2_COMPRESSED_DATA || r->kind == QCOW2_INVALID) {
		r->len = min(len, cs - pos);
		return;
	}
	for (uint32_t i = 0; r->len < len; ) {
		sub = min(q->g.sub_size - (pos & (q->g.sub_size - 1)), len - r->len);
		r->len += sub;
		pos += sub;
		if (pos == cs) {
			pos = 0;
			if (++i == n || r->len == len)
				return;
			e = qcow2_l2_get(&q->g, at, i);
			if (!raw && q2_fill_find(q, (guest + r->len) >> q->g.cluster_bits))
				return;
			if (r->kind == QCOW2_NORMAL && qcow2_l2_host(e.entry) != r->host + r->len)
				return;
		}
		if (r->len < len && q2_kind(q, e, pos >> q->g.sub_bits) != r->kind)
			return;
	}
}

/* What lies at `off`. *ret_fill: the run is there in this fill; host and len are set. */
static co_fn int co_look(struct qcow2 *q, uint64_t off, uint64_t len, bool raw, struct run *r)
{
	const struct q2_fill *f;
	bool there = false;
	uint8_t *at;
	uint32_t n;
	int ret = co_q2_l2(q, off, &at, &n);

	if (ret)
		return ret;
	f = raw ? NULL : q2_fill_find(q, off >> q->g.cluster_bits);
	if (f) {
		len = q2_fill_run(q, f, off, len, &there);
		if (there) {
			*r = (struct run){ .kind = QCOW2_NORMAL, .host = f->host + (off & (q->g.cluster_size - 1)), .len = len };
			return 0;
		}
	}
	if (at) {
		map_run(q, at, n, off, len, raw, r);
		return 0;
	}
	/* No table: up to the next table, or the next fill. */
	*r = (struct run){ .kind = QCOW2_UNALLOCATED };
	r->len = min(len, ((uint64_t)n << q->g.cluster_bits) - (off & (q->g.cluster_size - 1)));
	if (!raw && q->nfills)
		r->len = min(r->len, q->g.cluster_size - (off & (q->g.cluster_size - 1)));
	return 0;
}

static co_fn int co_read_run(struct qcow2 *q, uint64_t off, const struct run *r, const struct iovec *iov, int niov, uint64_t skip, unsigned flags)
{
	switch (r->kind) {
	case QCOW2_NORMAL:
		if (!is_aligned(r->host - (off & (q->g.cluster_size - 1)), q->g.cluster_size) || (q->has_data_file && r->host != off))
			break;
		return co_read_disk(q->data, r->host, iov, niov, skip, r->len, flags);
	case QCOW2_UNALLOCATED:
		if (q->backing)
			return co_read_disk(q->backing, off, iov, niov, skip, r->len, flags);
		/* fall through */
	case QCOW2_ZERO_PLAIN:
	case QCOW2_ZERO_ALLOCATED:
		iov_set(iov, niov, skip, 0, r->len);
		return 0;
	case QCOW2_COMPRESSED_DATA:
		return co_q2_inflate(q, r->entry, off & (q->g.cluster_size - 1), iov, niov, skip, r->len);
	case QCOW2_INVALID:
		break;
	}
	return co_q2_corrupt(q, "the L2 entry of guest offset %llu (%llx) means nothing", (unsigned long long)off, (unsigned long long)r->entry);
}

static co_fn int co_read_range(struct qcow2 *q, uint64_t off, uint64_t len, const struct iovec *iov, int niov, bool raw, unsigned flags)
{
	uint64_t done = 0;
	int ret = 0;

	while (done < len && !ret) {
		struct run r;

		ret = co_look(q, off + done, len - done, raw, &r);
		if (!ret)
			ret = co_read_run(q, off + done, &r, iov, niov, done, flags);
		done += r.len;
	}
	return ret;
}

co_fn int co_q2_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct qcow2 *q = q2_of(d);
	struct q2_req req;
	int ret;

	q2_req_begin(q, &req);
	ret = co_read_range(q, off, len, iov, niov, false, flags);
	q2_req_end(q, &req);
	if (!ret && off + len > d->size)
		iov_set(iov, niov, d->size - off, 0, off + len - d->size);
	return ret;
}

co_fn int co_q2_read_old(struct qcow2 *q, uint64_t off, void *buf, uint64_t len)
{
	uint64_t size = q->disk.size, have = off < size ? min(len, size - off) : 0;
	struct iovec iov = { buf, have };
	int ret = have ? co_read_range(q, off, have, &iov, 1, true, DISK_BACKGROUND) : 0;

	if (!ret && have < len)
		memset((uint8_t *)buf + have, 0, len - have);
	return ret;
}

static co_fn int co_backing_extent(struct qcow2 *q, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	if (!q->backing || off >= q->backing->size) {
		*ret = (struct disk_extent){ len, true, true };
		return 0;
	}
	return co_disk_extent(q->backing, off, min(len, q->backing->size - off), ret);
}

co_fn int co_q2_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	struct qcow2 *q = q2_of(d);
	struct q2_req req;
	struct run r;
	int rc;

	q2_req_begin(q, &req);
	rc = co_look(q, off, len, false, &r);
	if (!rc && r.kind == QCOW2_UNALLOCATED)
		rc = co_backing_extent(q, off, r.len, ret);
	else if (!rc)
		*ret = (struct disk_extent){ r.len, r.kind == QCOW2_ZERO_PLAIN, r.kind == QCOW2_ZERO_PLAIN || r.kind == QCOW2_ZERO_ALLOCATED };
	q2_req_end(q, &req);
	return rc;
}
