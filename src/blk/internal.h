/* SPDX-License-Identifier: MIT */
/*
 * Choke points: what their files share.
 *
 * disk.c checks, counts and passes on; rw.c cuts reads and writes into pieces that the ops accept; zero.c does the same for
 * discards and write-zeroes.
 *
 * Invariants of read-modify-write (only disks with limits.align > 1)
 *  (1) Who writes part of a unit excludes everybody else who writes any of that unit, from before it reads the unit until its
 *      write has returned.
 *  (2) An op that changes whole units is either on d->writes, if d->rmw_active was 0 when it started, or holds a shared range of
 *      d->rmw_lock. So it costs two list operations when nobody does read-modify-write.
 *  (3) A read-modify-write first raises d->rmw_active, then takes its units exclusively, then waits until nothing on
 *      d->writes overlaps them. New ops take the lock meanwhile, so the list only drains.
 *  (4) Nobody waits for a range while holding another, or while holding a buffer.
 *
 * Bounce buffers come from rt_bufs() if one is free at once, and otherwise from the disk's own reserve, one request at a time. Who
 * holds the reserve of a disk waits only for what is below that disk. So the pool is never waited for here, and no order of layers and
 * requests can deadlock on it.
 */
#pragma once

#include <errno.h>

#include "blk/disk.h"
#include "util/bytes.h"

#define BLK_PIECE_IOV 64	/* segments of one piece: bounds the stack */
#define BLK_BOUNCE_ONE 65536u	/* up to here one bounced op beats several direct ones */
#define BLK_BOUNCE_MAX (1u << 20)
#define BLK_RESERVE 65536u

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define noinline __attribute__((noinline)) /* keeps the arrays of the slow path off the fast path's stack */

/* An op that changes whole units, in flight: invariant (2). */
struct blk_change {
	struct list node;
	uint64_t off, len;
	struct co_range range;
	enum { BLK_FREE, BLK_LISTED, BLK_SHARED, BLK_EXCLUSIVE } how;
};

co_fn void co_blk_change_begin_slow(struct disk *d, struct blk_change *c);
void blk_change_end_slow(struct disk *d, struct blk_change *c);
co_fn void co_blk_rmw_begin(struct disk *d, struct blk_change *c, uint64_t off, uint64_t len);

static inline co_fn void co_blk_change_begin(struct disk *d, struct blk_change *c, uint64_t off, uint64_t len)
{
	c->how = BLK_FREE;
	if (d->limits.align == 1)
		return;
	c->off = off;
	c->len = len;
	if (unlikely(d->rmw_active)) {
		co_blk_change_begin_slow(d, c);
		return;
	}
	c->how = BLK_LISTED;
	list_add_tail(&d->writes, &c->node);
}

static inline void blk_change_end(struct disk *d, struct blk_change *c)
{
	if (c->how == BLK_FREE)
		return;
	if (likely(c->how == BLK_LISTED && !d->rmw_active))
		list_del(&c->node);
	else
		blk_change_end_slow(d, c);
}

/* Calls the hook and the op; the disk has it. */
co_fn int co_blk_op_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_blk_op_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);

/* Reads or writes any range within the size. `*flush` is set if DISK_FUA was left out and a flush must follow. */
co_fn int co_blk_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_blk_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags, bool *flush);
co_fn int co_blk_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool *flush);
co_fn int co_blk_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool *flush);

/* What a write gets on a disk in the failed state. */
static inline int blk_failed(const struct disk *d)
{
	return d->failed == -ESHUTDOWN ? -ESHUTDOWN : -EIO;
}

/* Whether this error of a flush-like request puts the disk into the failed state: one that was refused before it did anything does not. */
static inline bool blk_spoils_stability(int error)
{
	return error != -ENOSPC && error != -EINVAL && error != -EROFS && error != -ENOTSUP && error != -EOPNOTSUPP;
}
