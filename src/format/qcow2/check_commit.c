/* SPDX-License-Identifier: MIT */
/*
 * qcow2 tools: a new state of the image beside the old one.
 *
 * Invariants
 *  (1) nothing that the old state refers to is written;
 *  (2) all of the new state is on stable media before the header is written, and the header is written as one sector;
 *  (3) so a crash leaves the old state or the new one, and clusters that only the other one used are free in either.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "util/err.h"

#define GROW_BYTES (4ull << 20)

int qcow2_commit_init(struct qcow2_commit *c, struct qcow2_img *img, struct err *err)
{
	uint64_t n = img->end >> img->h.geo.cluster_bits;

	*c = (struct qcow2_commit){ .img = img, .end = n, .room = n + 1024, .old_size = img->file->size };
	if (n > QCOW2_WINDOW)
		return err_set(err, -EFBIG, "%s: has more than %llu clusters, which is too many to do this; copy it into an image with larger clusters",
			       img->name, QCOW2_WINDOW);
	c->old = calloc(c->room / 8 + 1, 1);
	if (!c->old || qcow2_count_init(&c->count, 0, c->room)) {
		qcow2_commit_fini(c);
		return err_errno(err, -ENOMEM, "%s", img->name);
	}
	return 0;
}

void qcow2_commit_fini(struct qcow2_commit *c)
{
	free(c->old);
	qcow2_count_fini(&c->count);
	*c = (struct qcow2_commit){ 0 };
}

co_fn void co_qcow2_commit_undo(struct qcow2_commit *c)
{
	if (!c->in_force && c->img->file->size > c->old_size)
		co_disk_resize(c->img->file, c->old_size, NULL);
}

void qcow2_commit_use_old(struct qcow2_commit *c, const struct qcow2_ref *r)
{
	unsigned bits = c->img->h.geo.cluster_bits;

	for (uint64_t i = r->off >> bits; i <= (r->off + r->len - 1) >> bits && i < c->room; i++)
		c->old[i / 8] |= 1 << i % 8;
}

static bool is_free(const struct qcow2_commit *c, uint64_t i)
{
	return i >= c->end || (!c->count.v[i] && !(c->old[i / 8] & 1 << i % 8));
}

/* Room in the arrays for clusters below `n`. */
static int make_room(struct qcow2_commit *c, uint64_t n)
{
	uint64_t room = n + n / 2;
	uint16_t *v;
	uint8_t *old;

	if (n <= c->room)
		return 0;
	v = realloc(c->count.v, room * sizeof(*v));
	if (!v)
		return -ENOMEM;
	c->count.v = v;
	old = realloc(c->old, room / 8 + 1);
	if (!old)
		return -ENOMEM;
	c->old = old;
	memset(v + c->room, 0, (room - c->room) * sizeof(*v));
	memset(old + c->room / 8 + 1, 0, room / 8 - c->room / 8);
	c->room = c->count.n = room;
	return 0;
}

static co_fn int co_grow_file(struct qcow2_commit *c, struct err *err)
{
	unsigned bits = c->img->h.geo.cluster_bits;
	uint64_t need = c->end << bits;
	int rc;

	if (need <= c->img->file->size)
		return 0;
	/* Ends where no block of the file system is shared with what somebody else may be writing. */
	rc = co_disk_resize(c->img->file, align_up(need + GROW_BYTES, 1 << 20), err);
	if (rc == -ENOTSUP) {
		err_clear(err);
		return err_set(err, -ENOSPC, "%s: needs %" PRIu64 " bytes and cannot grow; copy it to a larger place", c->img->name, need);
	}
	return rc;
}

co_fn uint64_t co_qcow2_commit_alloc(struct qcow2_commit *c, uint64_t n, struct err *err)
{
	unsigned bits = c->img->h.geo.cluster_bits;
	uint64_t at = n == 1 ? c->cursor : 1, run = 0;
	int rc;

	/* What is beyond the end is free, so this ends there at the latest. */
	for (; run < n; at++)
		run = is_free(c, at) ? run + 1 : 0;
	if (n == 1)
		c->cursor = at;
	rc = make_room(c, at + 1);
	if (rc)
		return err_errno(err, rc, "%s", c->img->name), 0;
	for (uint64_t i = at - n; i < at; i++)
		c->count.v[i] = QCOW2_COUNT_FIXED | 1;
	c->end = max(c->end, at);
	return co_grow_file(c, err) ? 0 : (at - n) << bits;
}

co_fn uint64_t co_qcow2_commit_append(struct qcow2_commit *c, uint64_t n, struct err *err)
{
	uint64_t at = c->end;
	int rc = make_room(c, at + n);

	if (rc)
		return err_errno(err, rc, "%s", c->img->name), 0;
	c->end += n;
	return co_grow_file(c, err) ? 0 : at << c->img->h.geo.cluster_bits;
}

/* --- Refcounts --- */

struct blocks {
	uint64_t *off;		/* of each block; 0: none needed */
	uint64_t n;
};

static bool range_is_used(const struct qcow2_commit *c, uint64_t first, uint64_t n)
{
	for (uint64_t i = first; i < first + n && i < c->end; i++)
		if (c->count.v[i])
			return true;
	return false;
}

/* Blocks for all that is used, blocks included. */
static co_fn int co_place_blocks(struct qcow2_commit *c, struct blocks *b, struct err *err)
{
	const struct qcow2_geo *g = &c->img->h.geo;
	bool placed;

	do {
		placed = false;
		for (uint64_t i = 0; i < b->n; i++) {
			if (b->off[i] || !range_is_used(c, i << g->rb_bits, 1ull << g->rb_bits))
				continue;
			b->off[i] = co_qcow2_commit_alloc(c, 1, err);
			if (!b->off[i])
				return err->code;
			placed = true;
		}
	} while (placed);
	if (c->end > b->n << g->rb_bits)
		return err_set(err, -EFBIG, "%s: its refcounts need a larger table than there can be; copy it into an image with larger clusters", c->img->name);
	return 0;
}

int qcow2_commit_check(const struct qcow2_commit *c, struct err *err)
{
	const struct qcow2_geo *g = &c->img->h.geo;

	for (uint64_t i = 0; i < c->end; i++) {
		unsigned v = c->count.v[i] & QCOW2_COUNT_MAX;

		if (v > g->refcount_max || v == QCOW2_COUNT_MAX)
			return err_set(err, -ERANGE, "%s: the cluster at 0x%" PRIx64 " would have %u references, and its refcounts have %u bits; copy it into an image "
				       "with wider ones (refcount_bits)", c->img->name, i << g->cluster_bits, v, 1u << g->refcount_order);
	}
	return 0;
}

static void fill_block(const struct qcow2_commit *c, uint8_t *buf, uint64_t first)
{
	const struct qcow2_geo *g = &c->img->h.geo;

	memset(buf, 0, g->cluster_size);
	for (uint64_t i = 0; i < 1ull << g->rb_bits && first + i < c->end; i++)
		qcow2_refcount_set(g->refcount_order, buf, (uint32_t)i, c->count.v[first + i] & QCOW2_COUNT_MAX);
}

static co_fn int co_write_blocks(struct qcow2_commit *c, const struct blocks *b, uint64_t rt_off, uint64_t rt_clusters, struct err *err)
{
	const struct qcow2_geo *g = &c->img->h.geo;
	uint8_t *buf = qcow2_img_alloc(max(rt_clusters << g->cluster_bits, (uint64_t)g->cluster_size));
	int rc = buf ? 0 : err_errno(err, -ENOMEM, "%s", c->img->name);

	for (uint64_t i = 0; i < b->n && !rc; i++) {
		if (!b->off[i])
			continue;
		fill_block(c, buf, i << g->rb_bits);
		rc = co_qcow2_img_write(c->img, b->off[i], buf, g->cluster_size, err);
	}
	if (!rc) {
		memset(buf, 0, rt_clusters << g->cluster_bits);
		for (uint64_t i = 0; i < b->n; i++)
			put_be64(buf + i * 8, b->off[i]);
		rc = co_qcow2_img_write(c->img, rt_off, buf, rt_clusters << g->cluster_bits, err);
	}
	free(buf);
	return rc;
}

co_fn int co_qcow2_commit(struct qcow2_commit *c, struct err *err)
{
	struct qcow2_img *img = c->img;
	const struct qcow2_geo *g = &img->h.geo;
	uint64_t most = max(QCOW2_MAX_RT_BYTES, g->cluster_size) >> g->cluster_bits, need, rt_off;
	/* Twice what there is now: the new tables are never as large as the image itself. */
	uint64_t entries = ((2 * c->end + 4096) >> g->rb_bits) + 2;
	struct blocks b = { 0 };
	int rc;

	need = max(qcow2_clusters(g, entries * 8), (uint64_t)img->h.rt_clusters);
	need = min(need, most);
	b.n = need << g->cluster_bits >> 3;
	b.off = calloc(b.n, sizeof(*b.off));
	if (!b.off)
		return err_errno(err, -ENOMEM, "%s", img->name);
	rt_off = co_qcow2_commit_alloc(c, need, err);
	rc = rt_off ? co_place_blocks(c, &b, err) : err->code;
	if (!rc)
		rc = qcow2_commit_check(c, err);
	if (!rc)
		rc = co_write_blocks(c, &b, rt_off, need, err);
	if (!rc && img->file->size > c->end << g->cluster_bits && img->file->size > img->end)
		rc = co_disk_resize(img->file, max(c->end << g->cluster_bits, img->end), err);
	if (!rc)
		rc = co_qcow2_img_flush(img, err);
	free(b.off);
	if (rc)
		return rc;
	img->h.rt_off = rt_off;
	img->h.rt_clusters = (uint32_t)need;
	c->in_force = true;
	return co_qcow2_img_write_header(img, err);
}
