/* SPDX-License-Identifier: MIT */
/*
 * qcow2 tools: every reference to a cluster.
 *
 * First the tables of fixed places, so that what lies on top of one is noticed; then the trees, each L1 table in pieces and one L2 table at a
 * time; then the bitmaps, and the refcount structures. An entry that cannot be followed is told to `bad` and not followed.
 */
#include <errno.h>
#include <stdlib.h>

#include "format/qcow2/tools.h"
#include "util/err.h"

const char *qcow2_ref_name(enum qcow2_ref_kind kind)
{
	static const char *const names[] = { "header", "refcount table", "refcount block", "L1 table", "snapshot table", "bitmap directory",
					     "bitmap table", "L2 table", "data cluster", "compressed cluster", "bitmap" };

	return names[kind];
}

/* Why the reference cannot be followed, or NULL. */
static const char *look(const struct qcow2_img *img, const struct qcow2_ref *r)
{
	if (r->kind != QCOW2_REF_COMPRESSED && !is_aligned(r->off, img->h.geo.cluster_size))
		return "is not at a cluster's begin";
	if (!r->off && r->kind != QCOW2_REF_HEADER)
		return "is the header's cluster";
	if (r->off >= img->end || r->len > img->end - r->off)
		return "lies beyond the end of the file";
	return NULL;
}

/* False if it cannot be followed; *ret_clear tells whether its entry is to go. */
static bool tell(struct qcow2_walk *w, const struct qcow2_ref *r, const char *why, bool *ret_clear)
{
	*ret_clear = false;
	if (!why)
		why = look(w->img, r);
	if (why)
		*ret_clear = w->bad && w->bad(w, r, why);
	else if (w->ref)
		*ret_clear = w->ref(w, r);
	return !why && !*ret_clear;
}

static int go_on(struct qcow2_walk *w, uint64_t done, struct err *err)
{
	w->done += done;
	if (w->progress)
		w->progress(w->progress_arg, min(w->done, w->total), w->total);
	return w->stop && *w->stop ? err_set(err, -ECANCELED, "%s: interrupted", w->img->name) : 0;
}

/* --- Tables of fixed places --- */

/* True if what it leads to is to be followed. */
static bool tell_fixed(struct qcow2_walk *w, enum qcow2_ref_kind kind, uint64_t off, uint64_t len, int snap, uint64_t entry_off)
{
	struct qcow2_ref r = { .kind = kind, .off = off, .len = len, .snap = snap, .entry_off = entry_off, .entry = off };
	bool clear;

	return !len || tell(w, &r, NULL, &clear);
}

static void walk_fixed(struct qcow2_walk *w)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_header *h = &img->h;

	tell_fixed(w, QCOW2_REF_HEADER, 0, h->geo.cluster_size, -1, 0);
	tell_fixed(w, QCOW2_REF_L1, h->l1_off, (uint64_t)h->l1_size * 8, -1, 0);
	tell_fixed(w, QCOW2_REF_SNAPSHOTS, h->snapshots_off, h->nb_snapshots ? img->snap_bytes : 0, -1, 0);
	for (unsigned i = 0; i < img->n_snap; i++)
		img->snap[i].lost |= !tell_fixed(w, QCOW2_REF_L1, img->snap[i].l1_off, (uint64_t)img->snap[i].l1_size * 8, (int)i, h->snapshots_off);
	if (img->n_bm)
		tell_fixed(w, QCOW2_REF_BITMAP_DIR, h->bitmaps.dir_off, h->bitmaps.dir_size, -1, 0);
	for (unsigned i = 0; i < img->n_bm; i++)
		tell_fixed(w, QCOW2_REF_BITMAP_TABLE, img->bm[i].table_off, (uint64_t)img->bm[i].table_size * 8, -1, h->bitmaps.dir_off);
}

/*
 * They come last: what lies where a block of refcounts is said to be is found on the block's account, since blocks can be made anew, and guest data cannot.
 */
static void walk_refcounts(struct qcow2_walk *w)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_header *h = &img->h;
	uint32_t cs = h->geo.cluster_size;

	tell_fixed(w, QCOW2_REF_RT, h->rt_off, (uint64_t)h->rt_clusters * cs, -1, 0);
	for (uint64_t i = 0; i < img->rt_entries; i++) {
		struct qcow2_ref r = { .kind = QCOW2_REF_RB, .off = img->rt[i] & QCOW2_RT_OFFSET_MASK, .len = cs, .snap = -1,
				       .entry_off = h->rt_off + i * 8, .entry = img->rt[i] };
		bool clear;

		if (r.entry)
			tell(w, &r, r.entry & QCOW2_RT_RESERVED ? "has reserved bits set" : NULL, &clear);
	}
}

/* --- Trees --- */

static const char *look_entry(const struct qcow2_img *img, struct qcow2_l2e e)
{
	const struct qcow2_geo *g = &img->h.geo;
	bool data_file = img->h.incompat & QCOW2_INCOMPAT_DATA_FILE;

	if (e.entry & QCOW2_COMPRESSED)
		return data_file ? "is compressed, and the data is in another file" : e.bitmap ? "is compressed and has subclusters" : NULL;
	if (e.entry & (QCOW2_L2_RESERVED | (g->ext || img->h.version < 3 ? QCOW2_ZERO : 0)))
		return "has reserved bits set";
	for (unsigned i = 0; g->ext && i < g->subs; i++)
		if (qcow2_l2_kind(g, e, i, data_file) == QCOW2_INVALID)
			return is_aligned(qcow2_l2_host(e.entry), g->cluster_size) ? "has impossible subclusters" : "is not at a cluster's begin";
	return NULL;
}

/* What reads as zeroes, or is not there where the format has no such thing. */
static void clear_l2_entry(const struct qcow2_img *img, uint8_t *table, uint32_t i)
{
	bool v3 = img->h.version >= 3, ext = img->h.geo.ext;

	qcow2_l2_put(&img->h.geo, table, i, (struct qcow2_l2e){ v3 && !ext ? QCOW2_ZERO : 0, ext ? 0xffffffffull << 32 : 0 });
}

/* One entry; true if it was cleared. */
static bool walk_entry(struct qcow2_walk *w, const struct qcow2_ref *table, uint8_t *buf, uint32_t i)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_geo *g = &img->h.geo;
	struct qcow2_l2e e = qcow2_l2_get(g, buf, i);
	struct qcow2_ref r = { .kind = QCOW2_REF_DATA, .off = qcow2_l2_host(e.entry), .len = g->cluster_size, .snap = table->snap,
			       .guest = table->guest + ((uint64_t)i << g->cluster_bits), .entry_off = table->off + (uint64_t)i * g->l2_entry_size,
			       .entry = e.entry };
	const char *why = look_entry(img, e);
	bool clear = false;

	if (e.entry & QCOW2_COMPRESSED) {
		uint32_t len;

		qcow2_l2_compressed(g, e.entry, &r.off, &len);
		r.kind = QCOW2_REF_COMPRESSED;
		r.len = len;
	} else if (!why && (!r.off || (img->h.incompat & QCOW2_INCOMPAT_DATA_FILE))) {
		/* What lies in a data file is nobody's but its entry's. */
		if (is_aligned(r.off, g->cluster_size))
			return false;
		why = "is not at a cluster's begin";
	}
	tell(w, &r, why, &clear);
	if (clear)
		clear_l2_entry(img, buf, i);
	return clear;
}

static co_fn int co_walk_l2(struct qcow2_walk *w, const struct qcow2_ref *table, struct err *err)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_geo *g = &img->h.geo;
	bool changed = false;
	int rc = co_qcow2_img_read(img, table->off, w->l2_buf, g->cluster_size, err);

	if (rc)
		return rc;
	if (w->l2 && table->snap < 0)
		changed = w->l2(w, table, w->l2_buf);
	for (uint32_t i = 0; i < 1u << g->l2_bits; i++)
		if (get_be64(w->l2_buf + (size_t)i * g->l2_entry_size) || (g->ext && get_be64(w->l2_buf + (size_t)i * 16 + 8)))
			changed |= walk_entry(w, table, w->l2_buf, i);
	return changed ? co_qcow2_img_write(img, table->off, w->l2_buf, g->cluster_size, err) : 0;
}

#define SEEN (4 * QCOW2_L1_PIECE)
#define TWINS 64

/*
 * Whether an L2 table was met before in this piece. No program makes such images; one made on purpose could keep us reading for days, so that a few of a
 * tree are followed.
 */
static bool seen(struct qcow2_walk *w, uint64_t off, uint64_t mask)
{
	uint64_t i = (off / 512 * 0x9e3779b97f4a7c15ull >> 40) & mask;

	while (w->seen[i] && w->seen[i] != off)
		i = (i + 1) & mask;
	if (w->seen[i])
		return true;
	w->seen[i] = off;
	return false;
}

/* `n` entries of an L1 table, from `first` on. */
static co_fn int co_walk_l1(struct qcow2_walk *w, int snap, uint64_t l1_off, uint64_t first, uint64_t n, uint8_t *buf, struct err *err)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_geo *g = &img->h.geo;
	bool changed = false, clear;
	uint64_t mask = 1;
	int rc = 0;

	while (mask < 2 * n)
		mask = 2 * mask + 1;
	memset(w->seen, 0, (mask + 1) * sizeof(*w->seen));
	if (w->l1 && snap < 0)
		changed = w->l1(w, first, n, buf);
	for (uint64_t i = 0; i < n && !rc; i++) {
		uint64_t entry = get_be64(buf + i * 8);
		struct qcow2_ref r = { .kind = QCOW2_REF_L2, .off = entry & QCOW2_OFFSET_MASK, .len = g->cluster_size, .snap = snap,
				       .guest = (first + i) << (g->cluster_bits + g->l2_bits), .entry_off = l1_off + (first + i) * 8, .entry = entry };

		if (!entry)
			continue;
		rc = go_on(w, 1, err);
		if (rc)
			break;
		if (!(entry & QCOW2_L1_RESERVED) && !r.off)
			continue;
		w->twins += seen(w, r.off, mask);
		if (tell(w, &r, entry & QCOW2_L1_RESERVED ? "has reserved bits set" : w->twins > TWINS ? "is the L2 table of many others" : NULL, &clear))
			rc = co_walk_l2(w, &r, err);
		if (clear)
			put_be64(buf + i * 8, 0);
		changed |= clear;
	}
	if (changed && !rc)
		rc = co_qcow2_img_write(img, l1_off + first * 8, buf, n * 8, err);
	return rc;
}

static co_fn int co_walk_tree(struct qcow2_walk *w, int snap, uint64_t l1_off, uint64_t l1_size, uint8_t *buf, struct err *err)
{
	struct qcow2_img *img = w->img;
	int rc = 0;

	w->twins = 0;
	/* Told already. */
	if (!is_aligned(l1_off, img->h.geo.cluster_size) || l1_off >= img->end || l1_size * 8 > img->end - l1_off ||
	    l1_size * 8 > QCOW2_MAX_L1_BYTES)
		return 0;
	for (uint64_t first = 0, n; first < l1_size && !rc; first += n) {
		n = min(l1_size - first, (uint64_t)QCOW2_L1_PIECE);
		rc = co_qcow2_img_read(img, l1_off + first * 8, buf, n * 8, err);
		if (!rc)
			rc = co_walk_l1(w, snap, l1_off, first, n, buf, err);
	}
	return rc;
}

/* --- Bitmaps --- */

static co_fn int co_walk_bitmap(struct qcow2_walk *w, const struct qcow2_bm *b, uint8_t *buf, struct err *err)
{
	struct qcow2_img *img = w->img;
	uint64_t len = (uint64_t)b->table_size * 8;
	int rc = 0;

	if (!is_aligned(b->table_off, img->h.geo.cluster_size) || b->table_off >= img->end || len > img->end - b->table_off)
		return 0;
	for (uint64_t at = 0, n; at < len && !rc; at += n) {
		n = min(len - at, (uint64_t)QCOW2_L1_PIECE * 8);
		rc = co_qcow2_img_read(img, b->table_off + at, buf, n, err);
		for (uint64_t i = 0; i < n && !rc; i += 8) {
			struct qcow2_ref r = { .kind = QCOW2_REF_BITMAP, .entry = get_be64(buf + i), .len = img->h.geo.cluster_size, .snap = -1,
					       .entry_off = b->table_off + at + i };
			bool clear;

			r.off = r.entry & QCOW2_OFFSET_MASK;
			if (r.off || (r.entry & QCOW2_BITMAP_RESERVED))
				tell(w, &r, r.entry & (QCOW2_BITMAP_RESERVED | QCOW2_BITMAP_ALL_ONES) ? "has reserved bits set" : NULL, &clear);
		}
		if (!rc)
			rc = go_on(w, 0, err);
	}
	return rc;
}

co_fn int co_qcow2_walk(struct qcow2_walk *w, struct err *err)
{
	struct qcow2_img *img = w->img;
	uint8_t *buf = qcow2_img_alloc(QCOW2_L1_PIECE * 8);
	int rc = 0;

	w->l2_buf = qcow2_img_alloc(img->h.geo.cluster_size);
	w->seen = calloc(SEEN, sizeof(*w->seen));
	if (!buf || !w->l2_buf || !w->seen)
		rc = err_errno(err, -ENOMEM, "%s", img->name);
	w->done = 0;
	w->total = qcow2_l1_entries(&img->h.geo, img->h.size);
	for (unsigned i = 0; i < img->n_snap && !w->active_only; i++)
		w->total += img->snap[i].l1_size;
	if (!rc && !w->active_only)
		walk_fixed(w);
	if (!rc)
		rc = co_walk_tree(w, -1, img->h.l1_off, img->h.l1_size, buf, err);
	for (unsigned i = 0; i < img->n_snap && !rc && !w->active_only; i++)
		rc = img->snap[i].lost ? 0 : co_walk_tree(w, (int)i, img->snap[i].l1_off, img->snap[i].l1_size, buf, err);
	for (unsigned i = 0; i < img->n_bm && !rc && !w->active_only; i++)
		rc = co_walk_bitmap(w, &img->bm[i], buf, err);
	if (!rc && !w->active_only)
		walk_refcounts(w);
	free(buf);
	free(w->l2_buf);
	free(w->seen);
	w->l2_buf = NULL;
	w->seen = NULL;
	return rc;
}
