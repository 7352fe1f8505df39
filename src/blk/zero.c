/* SPDX-License-Identifier: MIT */
/*
 * Choke points: discard and write-zeroes, cut into pieces that the ops accept.
 *
 * Whole units go to the op; the edges of a write-zeroes, and of a discard on a disk that promises zeroes, are written. Where
 * there is no op, or it says -EOPNOTSUPP, zeroes are written from a shared buffer.
 */
#include "blk/internal.h"

/* Never written: it costs no memory. */
static char zero_buf[65536] __attribute__((aligned(4096)));

#define ZERO_SEGMENTS 16

static co_fn int co_write_zeroes(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool *flush)
{
	struct iovec iov[ZERO_SEGMENTS];
	uint64_t piece;
	int ret = 0;

	while (len && !ret) {
		int n = 0;

		if (unlikely(d->failed))
			return blk_failed(d);
		piece = min(len, (uint64_t)sizeof(zero_buf) * ZERO_SEGMENTS);
		for (uint64_t done = 0; done < piece; done += iov[n++].iov_len)
			iov[n] = (struct iovec){ zero_buf, min((uint64_t)sizeof(zero_buf), piece - done) };
		if (piece < len && (flags & DISK_FUA)) {
			flags &= ~DISK_FUA;
			*flush = true;
		}
		ret = co_blk_write(d, off, piece, iov, n, flags & (DISK_FUA | DISK_BACKGROUND), flush);
		off += piece;
		len -= piece;
	}
	return ret;
}

typedef int change_op(struct disk *d, uint64_t off, uint64_t len, unsigned flags);

/* Whole units through `op`, a limit at a time. *done is how far it came. */
static co_fn int co_change_units(struct disk *d, enum disk_op kind, change_op *op, uint64_t off, uint64_t len, unsigned flags, uint64_t *done)
{
	uint64_t limit = d->limits.max_zero ? align_down(d->limits.max_zero, d->limits.align) : UINT64_MAX;
	struct blk_change change;
	uint64_t piece;
	int ret = 0;

	*done = 0;
	limit = max(limit, (uint64_t)d->limits.align);
	while (*done < len) {
		if (unlikely(d->failed))
			return blk_failed(d);
		piece = min(len - *done, limit);
		co_blk_change_begin(d, &change, off + *done, piece);
		if (unlikely(d->trace != NULL))
			ret = d->trace(d->trace_arg, d, kind, off + *done, piece, flags);
		if (!ret)
			ret = op(d, off + *done, piece, flags);
		blk_change_end(d, &change);
		if (ret)
			break;
		*done += piece;
	}
	return ret;
}

/* The whole units within a range; the last unit of the disk counts as whole if the range reaches the size. */
static uint64_t whole_units(const struct disk *d, uint64_t off, uint64_t len, uint64_t *ret_start)
{
	uint64_t start = align_up(off, d->limits.align), end = off + len;

	end = end == d->size ? align_up(end, d->limits.align) : align_down(end, d->limits.align);
	*ret_start = start;
	return end > start ? end - start : 0;
}

static bool one_op(const struct disk *d, uint64_t off, uint64_t len, uint64_t start, uint64_t body)
{
	return start == off && body >= len && (!d->limits.max_zero || body <= d->limits.max_zero);
}

/* What lies around the whole units. */
static co_fn int co_zero_edges(struct disk *d, uint64_t off, uint64_t len, uint64_t start, uint64_t body, unsigned flags, bool *flush)
{
	uint64_t end = off + len;
	int ret = 0;

	if (off < start)
		ret = co_write_zeroes(d, off, start - off, flags, flush);
	if (!ret && start + body < end)
		ret = co_write_zeroes(d, start + body, end - (start + body), flags, flush);
	return ret;
}

static bool is_unsupported(int ret)
{
	return ret == -EOPNOTSUPP || ret == -ENOTSUP;
}

static int fua_failed(struct disk *d, int ret, unsigned flags)
{
	if (unlikely(ret) && (flags & DISK_FUA) && blk_spoils_stability(ret))
		return disk_fail(d, ret, "an operation with FUA");
	return ret;
}

co_fn int co_blk_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool *flush)
{
	uint64_t start, done = 0, body = whole_units(d, off, len, &start);
	int ret;

	if (!d->ops->co_zero || !body)
		return co_write_zeroes(d, off, len, flags, flush);
	if ((flags & DISK_FUA) && !one_op(d, off, len, start, body)) {
		flags &= ~DISK_FUA;
		*flush = true;
	}
	ret = co_change_units(d, DISK_OP_ZERO, d->ops->co_zero, start, body, flags, &done);
	if (is_unsupported(ret)) {
		if (flags & DISK_FAST)
			return -EOPNOTSUPP;
		/* The rest of the units may end beyond the size, in the last one. */
		ret = co_write_zeroes(d, start + done, min(start + body, off + len) - (start + done), flags, flush);
	}
	if (!ret)
		ret = co_zero_edges(d, off, len, start, body, flags, flush);
	return fua_failed(d, ret, flags);
}

co_fn int co_blk_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool *flush)
{
	uint64_t start, done, body = whole_units(d, off, len, &start);
	int ret = 0;

	if (!d->limits.discard_gran) {
		*flush = false;
		return 0;
	}
	if ((flags & DISK_FUA) && !one_op(d, off, len, start, body)) {
		flags &= ~DISK_FUA;
		*flush = true;
	}
	if (body)
		ret = co_change_units(d, DISK_OP_DISCARD, d->ops->co_discard, start, body, flags, &done);
	if (is_unsupported(ret))
		return 0;
	if (!ret && d->limits.discard_zeroes)
		ret = body ? co_zero_edges(d, off, len, start, body, flags, flush) : co_write_zeroes(d, off, len, flags, flush);
	return fua_failed(d, ret, flags);
}
