/* SPDX-License-Identifier: MIT */
/*
 * Copying one disk to another.
 *
 * One cursor walks over the source and asks it for extents; a fixed number of coroutines take the next piece from it, read it, look for
 * zeroes and write what is left. So reading, writing and looking overlap, and no more is in flight than there are coroutines.
 *
 * Invariants
 *  (1) each byte of the size belongs to one piece, and a piece to one coroutine;
 *  (2) with `head_last`, the head of dst is zero on stable media before anything else is written, and stays so until everything else is stable;
 *  (3) the first error stops the cursor, and everything that is in flight comes back before co_image_copy() returns.
 */
#include "image/convert.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "blk/disk.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"

#define HEAD (1u << 20)
#define ASK (1ull << 30)	/* bytes that one look at the extents covers: bounds how long it takes to stop */

struct copy {
	const struct image_copy *c;
	struct image_copy_result *result;
	struct err *err;
	struct co_mutex cursor_lock;
	uint64_t cursor, end, done;
	uint64_t unit;
	struct disk *base;
	bool dst_zero;
	bool failed;
};

struct piece {
	uint64_t off, len;
	bool zero;
};

static bool stopped(const struct copy *y)
{
	return y->c->stop && *y->c->stop;
}

static int fail(struct copy *y, int rc, const char *what, const struct disk *d, uint64_t off)
{
	y->failed = true;
	/* A disk that was cancelled fails with an error of its own. */
	if (stopped(y))
		return err_set(y->err, -ECANCELED, "interrupted after %" PRIu64 " of %" PRIu64 " bytes", y->done, y->c->size);
	if (rc == -ENOSPC)
		return err_set(y->err, rc, "%s: no space left at offset %" PRIu64 "; make room and start again", d->name, off);
	return err_errno(y->err, rc, "%s: cannot be %s at offset %" PRIu64, d->name, what, off);
}

static void count(struct copy *y, uint64_t *kind, uint64_t len)
{
	*kind += len;
	y->done += len;
	if (y->c->progress)
		y->c->progress(y->c->progress_arg, y->done, y->c->size);
}

/* The extent at the cursor as a piece. */
static co_fn int co_look(struct copy *y, struct piece *p)
{
	uint64_t left = y->end - y->cursor;
	struct disk_extent e = { .len = left };
	int rc = co_disk_extent(y->c->src, y->cursor, min(left, ASK), &e);

	if (rc)
		return fail(y, rc, "asked for its extents", y->c->src, y->cursor);
	*p = (struct piece){ y->cursor, e.len, e.zero };
	if (p->zero && p->len < left) {
		p->len = align_down(p->len, y->unit);
		p->zero = p->len > 0;
	}
	if (!p->zero) {
		p->len = min(align_up(max(p->len, 1ull), y->unit), left);
		p->len = min(p->len, (uint64_t)IMAGE_COPY_PIECE);
	}
	return 0;
}

/* The next piece that has something to do; a length of 0 at the end. */
static co_fn int co_next(struct copy *y, struct piece *p)
{
	int rc = 0;

	co_mutex_lock(&y->cursor_lock);
	*p = (struct piece){ 0 };
	while (!rc && y->cursor < y->end && !y->failed) {
		rc = stopped(y) ? fail(y, -ECANCELED, "", y->c->src, 0) : co_look(y, p);
		if (rc)
			break;
		y->cursor += p->len;
		if (!p->zero || !y->dst_zero)
			break;
		count(y, &y->result->zero, p->len);
		*p = (struct piece){ 0 };
	}
	co_mutex_unlock(&y->cursor_lock);
	return rc;
}

/* How much from `off` on is zeroes in the base (*zero) or has to be written as such, in whole units. */
static co_fn int co_base_zeroes(struct copy *y, uint64_t off, uint64_t len, bool *zero, uint64_t *ret)
{
	uint64_t have = off < y->base->size ? min(len, y->base->size - off) : 0;
	struct disk_extent e = { .len = len, .zero = true };
	int rc = have ? co_disk_extent(y->base, off, min(have, ASK), &e) : 0;

	if (rc)
		return fail(y, rc, "asked for its extents", y->base, off);
	*zero = e.zero && (e.len == len || e.len >= y->unit);
	*ret = e.len == len ? len : *zero ? align_down(e.len, y->unit) : min(align_up(e.len, y->unit), len);
	return 0;
}

static co_fn int co_put_zero_run(struct copy *y, uint64_t off, uint64_t len)
{
	int rc = y->c->co_zero ? y->c->co_zero(y->c->write_arg, off, len) : co_disk_zero(y->c->dst, off, len, y->c->sparse ? DISK_UNMAP : 0);

	return rc ? fail(y, rc, "written", y->c->dst, off) : 0;
}

static co_fn int co_put_zeroes(struct copy *y, uint64_t off, uint64_t len)
{
	bool there = y->dst_zero;
	int rc = 0;

	for (uint64_t at = off, n = len; at < off + len && !rc && !there; at += n) {
		bool same = false;

		n = off + len - at;
		if (y->base)
			rc = co_base_zeroes(y, at, n, &same, &n);
		if (!rc && !same)
			rc = co_put_zero_run(y, at, n);
	}
	if (rc)
		return rc;
	count(y, &y->result->zero, len);
	return 0;
}

static co_fn int co_put_data(struct copy *y, uint64_t off, const void *buf, uint64_t len)
{
	int rc = y->c->co_write ? y->c->co_write(y->c->write_arg, off, buf, len) : co_disk_write(y->c->dst, off, buf, len, 0);

	if (rc)
		return fail(y, rc, "written", y->c->dst, off);
	count(y, &y->result->data, len);
	return 0;
}

enum content { DATA, ZEROES, SAME };

static enum content content_of(const uint8_t *buf, const uint8_t *base, uint64_t len)
{
	if (base && !memcmp(buf, base, len))
		return SAME;
	return bytes_are_zero(buf, len) ? ZEROES : DATA;
}

/* How many of the first bytes are of one kind, in whole blocks. `base` may be NULL. */
static uint64_t run_length(const struct copy *y, const uint8_t *buf, const uint8_t *base, uint64_t len, enum content *kind)
{
	uint64_t block = y->c->co_write ? y->unit : y->c->sparse, n;

	if (!y->c->sparse) {
		*kind = DATA;
		return y->c->co_write ? min(y->unit, len) : len;
	}
	n = min(block, len);
	*kind = content_of(buf, base, n);
	/* Hooks take a unit at a time. */
	if (y->c->co_write && *kind == DATA)
		return n;
	while (n < len && content_of(buf + n, base ? base + n : NULL, min(block, len - n)) == *kind)
		n += min(block, len - n);
	return n;
}

static co_fn int co_put(struct copy *y, const struct piece *p, uint8_t *buf, const uint8_t *base)
{
	enum content kind;
	int rc = 0;

	for (uint64_t at = 0, n; at < p->len && !rc && !y->failed; at += n) {
		n = run_length(y, buf + at, base ? base + at : NULL, p->len - at, &kind);
		if (kind == SAME)
			count(y, &y->result->same, n);
		else
			rc = kind == ZEROES ? co_put_zeroes(y, p->off + at, n) : co_put_data(y, p->off + at, buf + at, n);
	}
	return rc;
}

static co_fn int co_read_base(struct copy *y, const struct piece *p, uint8_t *buf)
{
	uint64_t have = p->off < y->base->size ? min(p->len, y->base->size - p->off) : 0;
	int rc = have ? co_disk_read(y->base, p->off, buf, have, 0) : 0;

	memset(buf + have, 0, p->len - have);
	return rc ? fail(y, rc, "read", y->base, p->off) : 0;
}

static co_fn int co_piece(struct copy *y, const struct piece *p, uint8_t *buf, uint8_t *base)
{
	int rc;

	if (p->zero)
		return co_put_zeroes(y, p->off, p->len);
	rc = co_disk_read(y->c->src, p->off, buf, p->len, 0);
	if (rc)
		return fail(y, rc, "read", y->c->src, p->off);
	rc = base ? co_read_base(y, p, base) : 0;
	return rc ? rc : co_put(y, p, buf, base);
}

static co_fn int co_worker(void *arg)
{
	struct copy *y = arg;
	uint8_t *buf = co_buf_get(rt_bufs(), IMAGE_COPY_PIECE), *base = y->base ? co_buf_get(rt_bufs(), IMAGE_COPY_PIECE) : NULL;
	struct piece p;
	int rc;

	do {
		rc = co_next(y, &p);
		if (!rc && p.len)
			rc = co_piece(y, &p, buf, base);
	} while (!rc && p.len);
	rt_buf_put(rt_bufs(), buf);
	rt_buf_put(rt_bufs(), base);
	return rc;
}

static co_fn int co_copy_range(struct copy *y, uint64_t from, uint64_t to)
{
	struct co_group group;

	if (from >= to)
		return 0;
	y->cursor = from;
	y->end = to;
	co_group_init(&group);
	for (unsigned i = 0; i < y->c->parallel; i++)
		co_group_start(&group, "copy", co_worker, y);
	return co_group_wait(&group);
}

static co_fn int co_flush(struct copy *y)
{
	int rc = co_disk_flush(y->c->dst);

	return rc ? fail(y, rc, "flushed", y->c->dst, 0) : 0;
}

/* What dst holds goes at once where it can; else its head goes. */
static co_fn int co_prepare(struct copy *y)
{
	const struct image_copy *c = y->c;
	uint64_t head = min((uint64_t)HEAD, c->size);
	int rc;

	if (!y->dst_zero && !y->base && c->sparse && !co_disk_zero(c->dst, 0, c->size, DISK_UNMAP | DISK_FAST))
		y->dst_zero = true;
	if (!c->head_last || !head)
		return 0;
	rc = y->dst_zero ? 0 : co_disk_zero(c->dst, 0, head, DISK_UNMAP);
	return rc ? fail(y, rc, "written", c->dst, 0) : co_flush(y);
}

co_fn int co_image_copy(const struct image_copy *c, struct image_copy_result *ret, struct err *err)
{
	struct copy y = { .c = c, .result = ret, .err = err, .unit = max(c->unit, 1u), .dst_zero = c->dst_zero && c->sparse,
			  .base = c->sparse ? c->base : NULL };
	uint64_t head = c->head_last ? align_up(HEAD, y.unit) : 0;
	int rc;

	*ret = (struct image_copy_result){ 0 };
	co_mutex_init(&y.cursor_lock);
	head = min(head, c->size);
	rc = co_prepare(&y);
	if (!rc)
		rc = co_copy_range(&y, head, c->size);
	if (!rc)
		rc = co_flush(&y);
	if (!rc && head) {
		rc = co_copy_range(&y, 0, head);
		if (!rc)
			rc = co_flush(&y);
	}
	return rc;
}
