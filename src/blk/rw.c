/* SPDX-License-Identifier: MIT */
/*
 * Choke points: reads and writes cut into pieces that the ops accept.
 *
 * What is aligned in offset, length and memory and within the limits goes to the op as it stands. The rest is cut into pieces, one
 * after the other: direct ones of up to BLK_PIECE_IOV segments, and bounced ones, whose whole units pass through an aligned
 * buffer. A bounced write that covers some unit in part reads that unit first (see the invariants in internal.h).
 *
 * Suspends wherever an op does, and for ranges and buffers.
 */
#include "blk/internal.h"

#include "rt/buf.h"
#include "util/iov.h"

/* --- Changes of whole units against read-modify-write --- */

co_fn void co_blk_change_begin_slow(struct disk *d, struct blk_change *c)
{
	c->how = BLK_SHARED;
	co_range_lock(&d->rmw_lock, &c->range, c->off, c->len, true);
}

void blk_change_end_slow(struct disk *d, struct blk_change *c)
{
	if (c->how == BLK_LISTED) {
		list_del(&c->node);
		co_queue_wake_all(&d->rmw_drain);
		return;
	}
	co_range_unlock(&d->rmw_lock, &c->range);
	if (c->how == BLK_EXCLUSIVE)
		d->rmw_active--;
}

static bool listed_overlap(const struct disk *d, uint64_t off, uint64_t len)
{
	list_for_each(&d->writes, n) {
		const struct blk_change *c = container_of(n, struct blk_change, node);

		if (c->off < off + len && off < c->off + c->len)
			return true;
	}
	return false;
}

co_fn void co_blk_rmw_begin(struct disk *d, struct blk_change *c, uint64_t off, uint64_t len)
{
	c->how = BLK_EXCLUSIVE;
	c->off = off;
	c->len = len;
	d->rmw_active++;
	co_range_lock(&d->rmw_lock, &c->range, off, len, false);
	while (listed_overlap(d, off, len))
		co_queue_wait(&d->rmw_drain, "read-modify-write: earlier writes of the unit");
}

/* --- A place in the caller's list --- */

struct cursor {
	const struct iovec *iov;
	int n;
	size_t skip;		/* bytes of iov[0] that are done */
};

static void cursor_advance(struct cursor *c, uint64_t len)
{
	while (len) {
		size_t left = c->iov->iov_len - c->skip;

		if (len < left) {
			c->skip += len;
			return;
		}
		len -= left;
		c->iov++;
		c->n--;
		c->skip = 0;
	}
}

static void cursor_copy(const struct cursor *c, bool to_buf, void *buf, uint64_t len)
{
	if (to_buf)
		iov_copy_out(c->iov, c->n, c->skip, buf, len);
	else
		iov_copy_in(c->iov, c->n, c->skip, buf, len);
}

/* --- Direct pieces --- */

static bool memory_is_aligned(const struct disk *d, const struct iovec *iov, int niov)
{
	uintptr_t base = 0, len = 0;

	if (d->limits.mem_align == 1)
		return true;
	for (int i = 0; i < niov; i++) {
		base |= (uintptr_t)iov[i].iov_base;
		len |= iov[i].iov_len;
	}
	return is_aligned(base, d->limits.mem_align) && is_aligned(len, d->limits.align);
}

static inline bool is_direct(const struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov)
{
	return is_aligned(off | len, d->limits.align) && (!d->limits.max_io || len <= d->limits.max_io) &&
	       niov <= DISK_MAX_IOV && memory_is_aligned(d, iov, niov);
}

static uint64_t piece_limit(const struct disk *d)
{
	uint64_t limit = d->limits.max_io ? align_down(d->limits.max_io, d->limits.align) : UINT64_MAX;

	return limit ? limit : d->limits.align;
}

/* Cuts bytes off the end of a list so that its length becomes a multiple of `align`. */
static uint64_t trim(struct iovec *v, int *n, uint64_t len, uint64_t align)
{
	uint64_t excess = len - align_down(len, align);

	len -= excess;
	while (excess) {
		struct iovec *last = &v[*n - 1];
		uint64_t cut = min(excess, (uint64_t)last->iov_len);

		last->iov_len -= cut;
		excess -= cut;
		if (!last->iov_len)
			(*n)--;
	}
	return len;
}

/*
 * Describes in `v` as much as can go to the op as it stands, at most `want` bytes, a multiple of `align`. Returns its length; 0 if the
 * memory needs a bounce.
 */
static uint64_t direct_prefix(const struct disk *d, const struct cursor *c, uint64_t want, struct iovec v[BLK_PIECE_IOV], int *n)
{
	uint64_t align = d->limits.align, total = 0;
	size_t skip = c->skip;

	*n = 0;
	for (int i = 0; i < c->n && total < want && *n < BLK_PIECE_IOV; i++) {
		char *base = (char *)c->iov[i].iov_base + skip;
		uint64_t len = min((uint64_t)c->iov[i].iov_len - skip, want - total), whole = len;

		skip = 0;
		if (!len)
			continue;
		if (d->limits.mem_align > 1) {
			whole = align_down(len, align);
			if (!whole || !is_aligned((uintptr_t)base, d->limits.mem_align))
				break;
		}
		v[(*n)++] = (struct iovec){ base, whole };
		total += whole;
		if (whole != len)
			break;
	}
	return trim(v, n, total, align);
}

/* The length of the direct piece at `off`, described in `v`; 0: bounce. */
static uint64_t direct_piece(const struct disk *d, const struct cursor *c, uint64_t off, uint64_t end,
			     struct iovec v[BLK_PIECE_IOV], int *n)
{
	uint64_t len = end - off, body = align_down(len, d->limits.align);

	if (!is_aligned(off, d->limits.align) || !body)
		return 0;
	if (body != len && len <= BLK_BOUNCE_ONE)
		return 0;
	return direct_prefix(d, c, min(body, piece_limit(d)), v, n);
}

/* --- Bounced pieces --- */

struct bounce {
	uint64_t off, end;	/* what the caller wants of it */
	uint64_t start, len;	/* the units around, and the length of the buffer */
	char *buf;
	bool reserve;
};

static void bounce_cut(const struct disk *d, struct bounce *b, uint64_t limit)
{
	b->end = min(b->end, b->start + limit);
	b->len = align_up(b->end, d->limits.align) - b->start;
}

/* Only the head unit, if all that follows can go without a bounce and is long enough to be worth an op of its own. */
static bool head_alone(const struct disk *d, const struct cursor *c, const struct bounce *b)
{
	uint64_t next = b->start + d->limits.align;
	struct cursor rest = *c;
	struct iovec v[BLK_PIECE_IOV];
	int n;

	if (b->off == b->start || b->end <= next || b->end - b->start <= BLK_BOUNCE_ONE)
		return false;
	cursor_advance(&rest, next - b->off);
	return direct_piece(d, &rest, next, b->end, v, &n);
}

static void bounce_plan(const struct disk *d, const struct cursor *c, uint64_t off, uint64_t end, struct bounce *b)
{
	*b = (struct bounce){ .off = off, .end = end, .start = align_down(off, d->limits.align) };
	if (head_alone(d, c, b))
		bounce_cut(d, b, d->limits.align);
	else
		bounce_cut(d, b, min(piece_limit(d), (uint64_t)BLK_BOUNCE_MAX));
}

/* May shorten the piece to what the reserve holds. */
static co_fn void co_bounce_get(struct disk *d, struct bounce *b)
{
	struct rt_bufpool *pool = rt_bufs();

	b->buf = pool ? rt_buf_tryget(pool, b->len) : NULL;
	b->reserve = !b->buf;
	if (b->reserve) {
		co_mutex_lock(&d->reserve_lock);
		b->buf = d->reserve;
		bounce_cut(d, b, BLK_RESERVE);
	}
}

static void bounce_put(struct disk *d, struct bounce *b)
{
	if (b->reserve)
		co_mutex_unlock(&d->reserve_lock);
	else
		rt_buf_put(rt_bufs(), b->buf);
}

static co_fn int co_read_units(struct disk *d, struct bounce *b, uint64_t at, uint64_t len, unsigned flags)
{
	struct iovec iov = { b->buf + at, len };

	return co_blk_op_read(d, b->start + at, len, &iov, 1, flags & (DISK_BACKGROUND | DISK_METADATA | DISK_NOCACHE));
}

static co_fn int co_read_bounced(struct disk *d, struct cursor *c, struct bounce *b, unsigned flags)
{
	int ret;

	co_bounce_get(d, b);
	ret = co_read_units(d, b, 0, b->len, flags);
	if (!ret)
		cursor_copy(c, false, b->buf + (b->off - b->start), b->end - b->off);
	bounce_put(d, b);
	return ret;
}

static bool head_is_partial(const struct bounce *b)
{
	return b->off != b->start;
}

/* The last unit of the disk is whole when it is written up to the size. */
static bool tail_is_partial(const struct disk *d, const struct bounce *b)
{
	return b->end != b->start + b->len && b->end != d->size;
}

static co_fn int co_read_edges(struct disk *d, struct bounce *b, unsigned flags)
{
	uint64_t align = d->limits.align;
	bool head = head_is_partial(b), tail = tail_is_partial(d, b);
	int ret = 0;

	if (b->len <= 2 * align && head && tail)
		return co_read_units(d, b, 0, b->len, flags);
	if (head)
		ret = co_read_units(d, b, 0, align, flags);
	if (!ret && tail)
		ret = co_read_units(d, b, b->len - align, align, flags);
	return ret;
}

static co_fn int co_write_bounced(struct disk *d, struct cursor *c, struct bounce *b, unsigned flags)
{
	struct blk_change change;
	struct iovec iov;
	uint64_t used;
	int ret;

	if (head_is_partial(b) || tail_is_partial(d, b)) {
		d->count.rmw++;
		co_blk_rmw_begin(d, &change, b->start, b->len);
	} else {
		co_blk_change_begin(d, &change, b->start, b->len);
	}
	co_bounce_get(d, b);
	ret = co_read_edges(d, b, flags);
	if (!ret && unlikely(d->failed))
		ret = blk_failed(d);
	if (!ret) {
		cursor_copy(c, true, b->buf + (b->off - b->start), b->end - b->off);
		used = b->end - b->start;
		if (b->end == d->size && used != b->len)
			memset(b->buf + used, 0, b->len - used);
		iov = (struct iovec){ b->buf, b->len };
		ret = co_blk_op_write(d, b->start, b->len, &iov, 1, flags);
	}
	bounce_put(d, b);
	blk_change_end(d, &change);
	return ret;
}

/* --- Requests --- */

static co_fn int co_write_direct(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct blk_change change;
	int ret;

	co_blk_change_begin(d, &change, off, len);
	ret = co_blk_op_write(d, off, len, iov, niov, flags);
	blk_change_end(d, &change);
	return ret;
}

static noinline co_fn int co_read_pieces(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct cursor c = { iov, niov, 0 };
	uint64_t end = off + len, piece;
	int ret, n;

	while (off < end) {
		struct iovec v[BLK_PIECE_IOV];
		struct bounce b;

		piece = direct_piece(d, &c, off, end, v, &n);
		if (piece) {
			ret = co_blk_op_read(d, off, piece, v, n, flags);
		} else {
			bounce_plan(d, &c, off, end, &b);
			ret = co_read_bounced(d, &c, &b, flags);
			piece = b.end - off;
			d->count.bounced++;
		}
		if (ret)
			return ret;
		cursor_advance(&c, piece);
		off += piece;
	}
	return 0;
}

static noinline co_fn int co_write_pieces(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags,
					  bool *flush)
{
	struct cursor c = { iov, niov, 0 };
	uint64_t start = off, end = off + len, piece;
	int ret = 0, n;

	while (off < end) {
		struct iovec v[BLK_PIECE_IOV];
		struct bounce b;
		bool direct;

		if (unlikely(d->failed))
			return blk_failed(d);
		piece = direct_piece(d, &c, off, end, v, &n);
		direct = piece != 0;
		if (!direct) {
			bounce_plan(d, &c, off, end, &b);
			piece = b.end - off;
		}
		/* One flush at the end instead of one with each piece. */
		if (off == start && piece != len && (flags & DISK_FUA)) {
			flags &= ~DISK_FUA;
			*flush = true;
		}
		if (direct) {
			ret = co_write_direct(d, off, piece, v, n, flags);
		} else {
			ret = co_write_bounced(d, &c, &b, flags);
			piece = b.end - off;
			d->count.bounced++;
		}
		if (ret)
			return ret;
		cursor_advance(&c, piece);
		off += piece;
	}
	return 0;
}

co_fn int co_blk_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	if (likely(is_direct(d, off, len, iov, niov)))
		return co_blk_op_read(d, off, len, iov, niov, flags);
	return co_read_pieces(d, off, len, iov, niov, flags);
}

co_fn int co_blk_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags, bool *flush)
{
	if (likely(is_direct(d, off, len, iov, niov)))
		return co_write_direct(d, off, len, iov, niov, flags);
	return co_write_pieces(d, off, len, iov, niov, flags, flush);
}
