/* SPDX-License-Identifier: MIT */
/*
 * qcow2 tools: every reference to a cluster.
 *
 * First the tables of fixed places, so that what lies on top of one is noticed; then the trees; then the bitmaps, and the refcount structures. An entry that
 * cannot be followed is told to `bad` and not followed.
 *
 * L1 tables are read in pieces. The L2 tables that they lead to are gathered, and each is read once for all who refer to it, its references with their weight: so
 * the time is linear in what the file holds, however many snapshots share their tables, and whatever an image made on purpose repeats. Of L1 tables and of large
 * L2 tables holes are not read.
 */
#include <errno.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "util/err.h"

#define TWINS 64
#define HOLES_FROM 65536u
#define GATHERED 32768u			/* L2 tables; what is there once in a tree is not met again when they are more, which costs nothing */
#define GATHERED_SLOTS (2 * GATHERED)

struct qcow2_gathered {
	uint32_t n;
	uint32_t hash[GATHERED_SLOTS];	/* index + 1 */
	int last_snap[GATHERED];	/* the tree that met it last */
	struct qcow2_ref ref[GATHERED];	/* the first, with the weight of all */
};

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
	/* So that a huge file without contents does not have us go over it again and again. */
	if ((r->off + r->len - 1) >> img->h.geo.cluster_bits >= (uint64_t)QCOW2_MAX_RT_BYTES / 8 << img->h.geo.rb_bits)
		return "lies beyond what refcounts can count";
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
	struct qcow2_ref r = { .kind = kind, .off = off, .len = len, .snap = snap, .weight = 1, .entry_off = entry_off, .entry = off };
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
		struct qcow2_ref r = { .kind = QCOW2_REF_RB, .off = img->rt[i] & QCOW2_RT_OFFSET_MASK, .len = cs, .snap = -1, .weight = 1,
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
			       .weight = table->weight, .guest = table->guest + ((uint64_t)i << g->cluster_bits), .entry_off = table->off + (uint64_t)i * g->l2_entry_size,
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

/* How much of [off, off + len) is a hole: all of it, or 0. */
static co_fn uint64_t co_hole(const struct qcow2_img *img, uint64_t off, uint64_t len)
{
	struct disk_extent e;

	len = off < img->file->size ? min(len, img->file->size - off) : 0;
	return len && !co_disk_extent(img->file, off, len, &e) && e.zero ? e.len : 0;
}

static co_fn int co_walk_l2(struct qcow2_walk *w, const struct qcow2_ref *table, struct err *err)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_geo *g = &img->h.geo;
	bool changed = false;
	int rc;

	if (g->cluster_size > HOLES_FROM && co_hole(img, table->off, g->cluster_size) == g->cluster_size)
		return 0;
	rc = co_qcow2_img_read(img, table->off, w->l2_buf, g->cluster_size, err);
	if (rc)
		return rc;
	if (w->l2 && table->snap < 0)
		changed = w->l2(w, table, w->l2_buf);
	for (uint32_t i = 0; i < 1u << g->l2_bits; i++)
		if (get_be64(w->l2_buf + (size_t)i * g->l2_entry_size) || (g->ext && get_be64(w->l2_buf + (size_t)i * 16 + 8)))
			changed |= walk_entry(w, table, w->l2_buf, i);
	return changed ? co_qcow2_img_write(img, table->off, w->l2_buf, g->cluster_size, err) : 0;
}

/* All that were gathered. */
static co_fn int co_walk_gathered(struct qcow2_walk *w, struct err *err)
{
	struct qcow2_gathered *t = w->tables;
	int rc = 0;

	for (unsigned i = 0; i < t->n && !rc; i++) {
		rc = go_on(w, 0, err);
		if (!rc)
			rc = co_walk_l2(w, &t->ref[i], err);
	}
	/* At the end of a small image most of its pages have not been touched. */
	if (t->n == GATHERED)
		memset(t->hash, 0, sizeof(t->hash));
	t->n = 0;
	return rc;
}

static uint32_t *slot_of(struct qcow2_gathered *t, uint64_t off)
{
	uint32_t i = (uint32_t)(off / 512 * 0x9e3779b97f4a7c15ull >> 40) % GATHERED_SLOTS;

	while (t->hash[i] && t->ref[t->hash[i] - 1].off != off)
		i = (i + 1) % GATHERED_SLOTS;
	return &t->hash[i];
}

/* Whether the tree has the table already, as far as we remember. No program makes such images; a few of them are followed. */
static bool is_twin(const struct qcow2_walk *w, const struct qcow2_ref *r)
{
	uint32_t at = *slot_of(w->tables, r->off);

	return at && w->tables->last_snap[at - 1] == r->snap;
}

/* There is room. */
static void gather(struct qcow2_walk *w, const struct qcow2_ref *r)
{
	struct qcow2_gathered *t = w->tables;
	unsigned weight = w->tree_weight ? w->tree_weight(w, r->snap) : 1;
	uint32_t *slot = slot_of(t, r->off);

	if (!*slot) {
		t->ref[t->n] = *r;
		t->ref[t->n].weight = 0;
		*slot = ++t->n;
	}
	t->last_snap[*slot - 1] = r->snap;
	t->ref[*slot - 1].weight = min(t->ref[*slot - 1].weight + weight, 2 * QCOW2_COUNT_MAX);
}

/* `n` entries of an L1 table, from `first` on. */
static co_fn int co_walk_l1(struct qcow2_walk *w, int snap, uint64_t l1_off, uint64_t first, uint64_t n, uint8_t *buf, struct err *err)
{
	struct qcow2_img *img = w->img;
	const struct qcow2_geo *g = &img->h.geo;
	bool changed = false, clear;
	int rc = 0;

	if (w->l1 && snap < 0)
		changed = w->l1(w, first, n, buf);
	for (uint64_t i = 0; i < n && !rc; i++) {
		uint64_t entry = get_be64(buf + i * 8);
		struct qcow2_ref r = { .kind = QCOW2_REF_L2, .off = entry & QCOW2_OFFSET_MASK, .len = g->cluster_size, .snap = snap, .weight = 1,
				       .guest = (first + i) << (g->cluster_bits + g->l2_bits), .entry_off = l1_off + (first + i) * 8, .entry = entry };

		if (!entry)
			continue;
		rc = go_on(w, 1, err);
		if (!rc && w->tables->n == GATHERED)
			rc = co_walk_gathered(w, err);
		if (rc)
			break;
		if (!(entry & QCOW2_L1_RESERVED) && !r.off)
			continue;
		w->twins += is_twin(w, &r);
		if (tell(w, &r, entry & QCOW2_L1_RESERVED ? "has reserved bits set" : w->twins > TWINS ? "is the L2 table of many others" : NULL, &clear))
			gather(w, &r);
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
		n = l1_size - first > QCOW2_L1_PIECE ? co_hole(img, l1_off + first * 8, (l1_size - first) * 8) / 8 : 0;
		if (n)
			continue;
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
					       .weight = 1, .entry_off = b->table_off + at + i };
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
	w->tables = calloc(1, sizeof(*w->tables));
	if (!buf || !w->l2_buf || !w->tables)
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
	if (!rc)
		rc = co_walk_gathered(w, err);
	for (unsigned i = 0; i < img->n_bm && !rc && !w->active_only; i++)
		rc = co_walk_bitmap(w, &img->bm[i], buf, err);
	if (!rc && !w->active_only)
		walk_refcounts(w);
	free(buf);
	free(w->l2_buf);
	free(w->tables);
	w->l2_buf = NULL;
	w->tables = NULL;
	return rc;
}
