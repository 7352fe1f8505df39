/* SPDX-License-Identifier: MIT */
/*
 * qcow2 tools: persistent bitmaps of an image that gets another size.
 *
 * As with QEMU they are kept: what is new is not marked, what is gone is forgotten. The length of a bitmap's table follows from the size of the disk, and
 * the two cannot change with one write. So the driver changes the size, which switches the autoclear bit off, as any change by who does not keep bitmaps
 * does; then the bitmaps are made to fit, and the bit is set again together with the refcounts that go with it (check_commit.c). A crash between leaves an
 * image without bitmaps.
 *
 * The directory, and bits behind the end of a disk that shrank, are written in place: nobody believes them while the bit is off.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "util/err.h"

#define MAX_BYTES (512ull << 20)	/* of one bitmap; QEMU takes no larger one */

struct fit {
	struct qcow2_img *img;
	struct qcow2_commit c;
	uint64_t from, to;		/* sizes of the disk */
	uint8_t *buf;			/* a cluster */
};

/* Bytes of a bitmap over a disk of that size, and clusters. */
static uint64_t bitmap_bytes(const struct qcow2_bm *b, uint64_t size)
{
	uint64_t bits = (size >> b->granularity_bits) + !is_aligned(size, 1ull << b->granularity_bits);

	return (bits + 7) / 8;
}

co_fn int co_qcow2_bitmaps_can_fit(struct qcow2_img *img, uint64_t size, const bool *stop, struct err *err)
{
	struct qcow2_check c = { .stop = stop };
	int rc;

	for (unsigned i = 0; i < img->n_bm; i++) {
		const struct qcow2_bm *b = &img->bm[i];

		if (b->flags & QCOW2_BM_IN_USE)
			return err_set(err, -EINVAL, "%s: its bitmap \"%.60s\" is inconsistent; remove it with \"qemu-img bitmap --remove\"", img->name, b->name);
		if (b->granularity_bits < 9 || b->granularity_bits > 31 || !size || bitmap_bytes(b, size) > MAX_BYTES)
			return err_set(err, -ENOTSUP, "%s: its bitmap \"%.60s\" cannot have the new size; remove it with \"qemu-img bitmap --remove\"",
				       img->name, b->name);
		if (b->table_size != qcow2_clusters(&img->h.geo, bitmap_bytes(b, img->h.size)))
			return err_set(err, -EINVAL, "%s: the table of its bitmap \"%.60s\" does not fit the disk's size; remove it with \"qemu-img bitmap "
				       "--remove\"", img->name, b->name);
	}
	if (!img->n_bm)
		return 0;
	rc = co_qcow2_check(img, &c, err);
	if (!rc && c.damage)
		rc = err_set(err, -EINVAL, "%s: is damaged (%" PRIu64 " findings); weir image check shows them, --repair=all repairs them", img->name, c.damage);
	return rc;
}

/* --- One bitmap --- */

/* Only bits of [0, keep) stay in the last cluster of what is kept. */
static co_fn int co_cut_cluster(struct fit *f, uint8_t *entry, uint64_t keep, struct err *err)
{
	uint32_t cs = f->img->h.geo.cluster_size;
	uint64_t e = get_be64(entry), off = e & QCOW2_OFFSET_MASK;
	int rc = 0;

	if (!off && !(e & QCOW2_BITMAP_ALL_ONES))
		return 0;
	if (off)
		rc = co_qcow2_img_read(f->img, off, f->buf, cs, err);
	else
		memset(f->buf, 0xff, cs);
	if (!off && !rc) {
		off = co_qcow2_commit_alloc(&f->c, 1, err);
		rc = off ? 0 : err->code;
		put_be64(entry, off);
	}
	if (keep % 8)
		f->buf[keep / 8] &= (uint8_t)((1 << keep % 8) - 1);
	memset(f->buf + (keep + 7) / 8, 0, cs - (keep + 7) / 8);
	return rc ? rc : co_qcow2_img_write(f->img, off, f->buf, cs, err);
}

/* A new table; `raw` is the directory's entry. */
static co_fn int co_fit_one(struct fit *f, const struct qcow2_bm *b, struct qcow2_raw_bitmap *raw, struct err *err)
{
	const struct qcow2_geo *g = &f->img->h.geo;
	uint64_t n = qcow2_clusters(g, bitmap_bytes(b, f->to)), kept = min(n, (uint64_t)b->table_size), len = align_up(n * 8, g->cluster_size);
	uint64_t size = min(f->from, f->to), bits = (size >> b->granularity_bits) + !is_aligned(size, 1ull << b->granularity_bits);
	uint64_t per = (uint64_t)g->cluster_size * 8, off;
	uint8_t *table = qcow2_img_alloc(max(len, align_up((uint64_t)b->table_size * 8, g->cluster_size)));
	int rc = table ? co_qcow2_img_read(f->img, b->table_off, table, kept * 8, err) : err_errno(err, -ENOMEM, "%s", f->img->name);

	for (uint64_t i = 0; i < kept && !rc; i++) {
		struct qcow2_ref r = { .kind = QCOW2_REF_BITMAP, .off = get_be64(table + i * 8) & QCOW2_OFFSET_MASK, .len = g->cluster_size };

		if (r.off)
			qcow2_count_add(&f->c.count, g, &r, 1);
	}
	if (!rc && kept && bits < kept * per)
		rc = co_cut_cluster(f, table + (kept - 1) * 8, bits - (kept - 1) * per, err);
	off = rc ? 0 : co_qcow2_commit_alloc(&f->c, len >> g->cluster_bits, err);
	if (!rc)
		rc = off ? co_qcow2_img_write(f->img, off, table, len, err) : err->code;
	free(table);
	put_be64(raw->table_off, off);
	put_be32(raw->table_size, (uint32_t)n);
	return rc;
}

/* --- All of them --- */

static bool count_ref(struct qcow2_walk *w, const struct qcow2_ref *r)
{
	struct fit *f = w->arg;

	qcow2_commit_use_old(&f->c, r);
	if (r->kind != QCOW2_REF_RT && r->kind != QCOW2_REF_RB && r->kind != QCOW2_REF_BITMAP_TABLE && r->kind != QCOW2_REF_BITMAP)
		qcow2_count_add(&f->c.count, &f->img->h.geo, r, r->weight);
	return false;
}

static co_fn int co_fit(struct fit *f, const bool *stop, struct err *err)
{
	struct qcow2_img *img = f->img;
	struct qcow2_walk w = { .img = img, .arg = f, .ref = count_ref, .stop = stop };
	uint8_t *dir = qcow2_img_alloc(align_up(img->h.bitmaps.dir_size, img->h.geo.cluster_size));
	uint64_t at = 0;
	int rc = co_qcow2_walk(&w, err);

	if (!rc && !dir)
		rc = err_errno(err, -ENOMEM, "%s", img->name);
	if (!rc)
		rc = co_qcow2_img_read(img, img->h.bitmaps.dir_off, dir, align_up(img->h.bitmaps.dir_size, img->h.geo.cluster_size), err);
	for (unsigned i = 0; i < img->n_bm && !rc; i++) {
		struct qcow2_raw_bitmap *raw = (void *)(dir + at);

		rc = co_fit_one(f, &img->bm[i], raw, err);
		at += align_up(sizeof(*raw) + get_be32(raw->extra_len) + get_be16(raw->name_len), 8);
	}
	if (!rc)
		rc = co_qcow2_img_write(img, img->h.bitmaps.dir_off, dir, align_up(img->h.bitmaps.dir_size, img->h.geo.cluster_size), err);
	free(dir);
	return rc ? rc : co_qcow2_commit(&f->c, err);
}

co_fn int co_qcow2_bitmaps_fit(struct qcow2_img *img, uint64_t old_size, const bool *stop, struct err *err)
{
	struct fit f = { .img = img, .from = old_size, .to = img->h.size };
	int rc;

	/* What is written in place would be believed. */
	if (img->h.autoclear & QCOW2_AUTOCLEAR_BITMAPS)
		return err_set(err, -EINVAL, "%s: its bitmaps are in use", img->name);
	if (!img->h.bitmaps.count)
		return err_set(err, -EINVAL, "%s: its header does not name its bitmaps any more", img->name);
	img->h.autoclear |= QCOW2_AUTOCLEAR_BITMAPS;
	rc = co_qcow2_img_read_bitmaps(img, err);
	/* They fit as they are: a change of the size that failed. */
	if (!rc && f.from == f.to)
		return co_qcow2_img_write_header(img, err);
	if (!rc)
		rc = co_qcow2_img_read_rt(img, err);
	if (!rc)
		rc = co_qcow2_img_read_snapshots(img, err);
	if (!rc)
		rc = qcow2_commit_init(&f.c, img, err);
	if (rc)
		return rc;
	f.buf = qcow2_img_alloc(img->h.geo.cluster_size);
	rc = f.buf ? co_fit(&f, stop, err) : err_errno(err, -ENOMEM, "%s", img->name);
	if (rc)
		co_qcow2_commit_undo(&f.c);
	free(f.buf);
	qcow2_commit_fini(&f.c);
	return rc;
}
