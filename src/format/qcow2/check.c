/* SPDX-License-Identifier: MIT */
/*
 * qcow2 tools: what is wrong with an image, and repair.
 *
 * For each window of clusters: count the references by a walk, compare with the refcounts, then look at the COPIED flags of the active tree. Refcounts
 * are compared with what refers to a cluster, and flags with the same, so that a repaired image needs no second round.
 *
 * Repair works in place where one write makes one thing right, and in an order in which each step leaves less damage than there was:
 *  (1) entries that cannot be followed are cleared, and that is flushed;
 *  (2) refcounts are corrected, and that is flushed;
 *  (3) flags are corrected, and that is flushed;
 *  (4) where blocks of refcounts are missing or impossible, all refcounts are written anew beside the old ones (check_commit.c);
 *  (5) when a second check finds no damage, the dirty and corrupt bits go.
 * What is both an L2 table and somebody's data is one of the two, and nobody can tell which: both references stay, and nothing is written into that cluster. A look
 * before the repair finds them.
 * Leaks are not freed while there is damage that is not repaired: what a damaged table no longer refers to may be worth something.
 * Where there is no damage at all, the space of what was leaked goes back as well: holes are punched when the refcounts are stable, and in the end the file is cut
 * behind the last cluster in use.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "util/err.h"

const char *qcow2_finding_name(enum qcow2_finding_kind kind)
{
	static const char *const names[] = { "leak", "refcount", "overlap", "entry", "flag", "refcount-block", "snapshots", "bitmaps", "bit" };

	return names[kind];
}

uint64_t qcow2_check_window = QCOW2_WINDOW;

#define HOLES_MAX 65536u	/* of a window; the space of more is kept */
#define DOUBTS_MAX 1024u	/* when there are more, no entry of an L2 table is repaired */

/* Clusters that are L2 tables and data. */
struct doubts {
	unsigned n;
	uint64_t off[DOUBTS_MAX];
};

/* Clusters that are free now. */
struct hole {
	uint64_t first, n;
};

struct state {
	struct qcow2_img *img;
	struct qcow2_check *c;
	struct doubts *doubts;
	struct qcow2_count count;
	uint64_t windows, walk;	/* walk: two for each window */
	uint8_t *marks;		/* windows that something refers to */
	bool first;		/* the window that tells about entries */
	bool incomplete;	/* damage that stays: leaks may be none */
	bool rebuild;		/* refcounts cannot be corrected in place */
	uint64_t next_host;	/* where the next data cluster would be if it were not fragmented */
	/* neighbours with the same refcount and references, told together */
	uint64_t run, run_len;
	uint64_t run_stored;
	unsigned run_refs;
	bool run_fixed;
	struct hole *hole;
	unsigned nholes, room;
};

__attribute__((format(printf, 6, 7)))
static void found(struct state *s, enum qcow2_finding_kind kind, uint64_t off, uint64_t clusters, bool fixed, const char *fmt, ...)
{
	struct qcow2_check *c = s->c;
	struct qcow2_finding f = { .kind = kind, .off = off, .clusters = clusters, .fixed = fixed };
	va_list ap;

	*(kind == QCOW2_FOUND_LEAK ? &c->leaks : &c->damage) += clusters;
	if (fixed)
		*(kind == QCOW2_FOUND_LEAK ? &c->leaks_fixed : &c->damage_fixed) += clusters;
	if (!fixed && kind != QCOW2_FOUND_LEAK)
		s->incomplete = true;
	if (!c->finding)
		return;
	va_start(ap, fmt);
	vsnprintf(f.text, sizeof(f.text), fmt, ap);
	va_end(ap);
	c->finding(c->arg, &f);
}

/* "L2 table of guest offset 0x20000000, in snapshot 2" */
static const char *describe(const struct state *s, const struct qcow2_ref *r, char *buf, size_t size)
{
	int len = snprintf(buf, size, "%s", qcow2_ref_name(r->kind));

	if (r->kind == QCOW2_REF_L2 || r->kind == QCOW2_REF_DATA || r->kind == QCOW2_REF_COMPRESSED)
		len += snprintf(buf + len, size - len, " of guest offset 0x%" PRIx64, r->guest);
	if (r->snap >= 0)
		snprintf(buf + len, size - len, ", snapshot %d of %u", r->snap + 1, s->img->n_snap);
	return buf;
}

/* --- References --- */

static void note_statistics(struct state *s, const struct qcow2_ref *r)
{
	struct qcow2_check *c = s->c;
	uint64_t window = qcow2_check_window << s->img->h.geo.cluster_bits;

	for (uint64_t i = r->off / window; i <= (r->off + r->len - 1) / window && i < s->windows; i++)
		s->marks[i / 8] |= 1 << i % 8;
	c->image_end = max(c->image_end, align_up(r->off + r->len, s->img->h.geo.cluster_size));
	if (r->snap >= 0 || (r->kind != QCOW2_REF_DATA && r->kind != QCOW2_REF_COMPRESSED))
		return;
	c->allocated++;
	if (r->kind == QCOW2_REF_COMPRESSED) {
		c->compressed++;
		c->fragmented++;
		return;
	}
	c->fragmented += s->next_host && s->next_host != r->off;
	s->next_host = r->off + r->len;
}

static bool is_doubtful(const struct state *s, uint64_t table)
{
	unsigned i = 0;

	if (s->doubts->n == DOUBTS_MAX)
		return true;
	while (i < s->doubts->n && s->doubts->off[i] != table)
		i++;
	return i < s->doubts->n;
}

static void doubt(struct state *s, const struct qcow2_ref *r)
{
	uint64_t cs = s->img->h.geo.cluster_size;

	for (uint64_t at = r->off & ~(cs - 1); at < r->off + r->len; at += cs)
		if (!is_doubtful(s, at))
			s->doubts->off[s->doubts->n++] = at;
}

/* Whether the entry that refers may be cleared: not if it lies in what may be data. */
static bool may_clear(const struct state *s, const struct qcow2_ref *r)
{
	return (r->kind != QCOW2_REF_DATA && r->kind != QCOW2_REF_COMPRESSED) || !is_doubtful(s, r->entry_off & ~(s->img->h.geo.cluster_size - 1ull));
}

/* What lies on a table. An entry that leads there leads to nothing, and goes; where it cannot be told which of the two is right, both stay. */
static bool on_overlap(struct state *s, const struct qcow2_ref *r, uint64_t where)
{
	unsigned v = s->count.v[(where >> s->img->h.geo.cluster_bits) - s->count.first];
	uint64_t table = r->entry_off & ~(s->img->h.geo.cluster_size - 1ull);
	/* If a table says of itself that it is data, there is only its own word for it. */
	bool sure = (v & QCOW2_COUNT_FIXED) || (r->kind > QCOW2_REF_L2 && where == table && r->off == table);
	bool fix = s->c->repair == QCOW2_REPAIR_ALL && may_clear(s, r);
	char what[128];

	if (r->kind == QCOW2_REF_RB || r->kind == QCOW2_REF_RT)
		s->rebuild = true;
	else
		fix &= r->kind >= QCOW2_REF_L2 && r->kind != QCOW2_REF_BITMAP && sure;
	if (r->kind >= QCOW2_REF_L2 && !sure)
		doubt(s, r);
	found(s, QCOW2_FOUND_OVERLAP, where, 1, fix, "the %s (entry at 0x%" PRIx64 ") lies at 0x%" PRIx64 ", where %s is", describe(s, r, what, sizeof(what)),
	      r->entry_off, where, v & QCOW2_COUNT_FIXED ? "another table" : v & QCOW2_COUNT_L2 ? "an L2 table" : "guest data");
	return r->kind == QCOW2_REF_L1 || (fix && r->kind >= QCOW2_REF_L2);
}

static bool on_ref(struct qcow2_walk *w, const struct qcow2_ref *r)
{
	struct state *s = w->arg;
	uint64_t where;

	if (s->first)
		note_statistics(s, r);
	if (qcow2_count_conflicts(&s->count, &s->img->h.geo, r, &where) && on_overlap(s, r, where))
		return true;
	qcow2_count_add(&s->count, &s->img->h.geo, r, r->weight);
	return false;
}

/* QEMU counts what is fragmented from L2 table to L2 table. */
static bool on_l2(struct qcow2_walk *w, const struct qcow2_ref *table, uint8_t *buf)
{
	struct state *s = w->arg;

	s->next_host = 0;
	return false;
}

static bool on_bad(struct qcow2_walk *w, const struct qcow2_ref *r, const char *why)
{
	struct state *s = w->arg;
	bool tree = r->kind == QCOW2_REF_L2 || r->kind == QCOW2_REF_DATA || r->kind == QCOW2_REF_COMPRESSED;
	bool fix = s->c->repair == QCOW2_REPAIR_ALL && may_clear(s, r) && (tree || r->kind == QCOW2_REF_RB || r->kind == QCOW2_REF_RT);
	char what[128];

	if (!s->first)
		return false;
	if (r->kind == QCOW2_REF_RB || r->kind == QCOW2_REF_RT)
		s->rebuild = true;
	found(s, r->kind == QCOW2_REF_RB ? QCOW2_FOUND_BLOCK : QCOW2_FOUND_ENTRY, r->entry_off, 1, fix, "the entry 0x%" PRIx64 " at 0x%" PRIx64 ", %s, %s",
	      r->entry, r->entry_off, describe(s, r, what, sizeof(what)), why);
	return fix && tree;
}

/* --- Refcounts --- */

/* Of the run. That it is forgotten when there is no memory costs space, and no more. */
static void note_hole(struct state *s)
{
	struct hole *more;

	if (s->nholes == s->room) {
		more = s->room < HOLES_MAX ? realloc(s->hole, (s->room + 64) * 2 * sizeof(*more)) : NULL;
		if (!more)
			return;
		s->hole = more;
		s->room = (s->room + 64) * 2;
	}
	s->hole[s->nholes++] = (struct hole){ s->run, s->run_len };
}

static co_fn void co_punch_holes(struct state *s)
{
	unsigned bits = s->img->h.geo.cluster_bits;

	for (unsigned i = 0; i < s->nholes && !s->c->damage; i++)
		co_disk_discard(s->img->file, s->hole[i].first << bits, min(s->hole[i].n << bits, s->img->file->size - (s->hole[i].first << bits)), 0);
	s->nholes = 0;
}

static void end_run(struct state *s)
{
	unsigned bits = s->img->h.geo.cluster_bits;
	bool leak = s->run_stored > s->run_refs;

	if (!s->run_len)
		return;
	found(s, leak ? QCOW2_FOUND_LEAK : QCOW2_FOUND_REFCOUNT, s->run << bits, s->run_len, s->run_fixed,
	      "%" PRIu64 " cluster%s from 0x%" PRIx64 " on: refcount %" PRIu64 ", %u reference%s", s->run_len, s->run_len > 1 ? "s" : "",
	      s->run << bits, s->run_stored, s->run_refs, s->run_refs == 1 ? "" : "s");
	if (leak && s->run_fixed && !s->run_refs && s->run << bits < s->img->file->size)
		note_hole(s);
	s->run_len = 0;
}

static void add_to_run(struct state *s, uint64_t cluster, uint64_t stored, unsigned refs, bool fixed)
{
	if (s->run_len && (s->run + s->run_len != cluster || s->run_stored != stored || s->run_refs != refs || s->run_fixed != fixed))
		end_run(s);
	if (!s->run_len) {
		s->run = cluster;
		s->run_stored = stored;
		s->run_refs = refs;
		s->run_fixed = fixed;
	}
	s->run_len++;
}

/* Whether a wrong refcount is to be corrected; `have` tells whether its block is there. */
static bool to_fix(struct state *s, uint64_t stored, unsigned refs, bool have)
{
	if (stored > refs)
		return s->c->repair != QCOW2_REPAIR_NONE && !s->incomplete && have;
	if (s->c->repair != QCOW2_REPAIR_ALL || refs > s->img->h.geo.refcount_max)
		return false;
	if (!have)
		s->rebuild = true;
	return true;
}

/* One block's part of the window; `buf` is the block, zeroes if there is none. True if it was changed. */
static bool compare_block(struct state *s, uint8_t *buf, uint64_t first, bool have)
{
	const struct qcow2_geo *g = &s->img->h.geo;
	bool changed = false;

	for (uint32_t i = 0; i < 1u << g->rb_bits; i++) {
		uint64_t cluster = first + i, stored = have ? qcow2_refcount_get(g->refcount_order, buf, i) : 0;
		unsigned refs;
		bool fix;

		if (cluster - s->count.first >= s->count.n)
			continue;
		refs = qcow2_count_get(&s->count, cluster);
		if (stored == refs || (refs == QCOW2_COUNT_MAX && stored >= refs))
			continue;
		fix = to_fix(s, stored, refs, have);
		add_to_run(s, cluster, stored, refs, fix);
		/* A block that may lie on something else is not written to. */
		if (fix && have && !s->rebuild) {
			qcow2_refcount_set(g->refcount_order, buf, i, refs);
			changed = true;
		}
	}
	return changed;
}

/* A block that can be read: where it is, else 0. */
static uint64_t block_at(const struct state *s, uint64_t index)
{
	uint64_t e = index < s->img->rt_entries ? s->img->rt[index] : 0, off = e & QCOW2_RT_OFFSET_MASK;

	return !(e & QCOW2_RT_RESERVED) && is_aligned(off, s->img->h.geo.cluster_size) && off < s->img->end ? off : 0;
}

static co_fn int co_compare(struct state *s, struct err *err)
{
	const struct qcow2_geo *g = &s->img->h.geo;
	uint64_t last = s->count.first + s->count.n - 1;
	uint8_t *buf = qcow2_img_alloc(g->cluster_size);
	bool changed = false;
	int rc = buf ? 0 : err_errno(err, -ENOMEM, "%s", s->img->name);

	for (uint64_t i = s->count.first >> g->rb_bits; i <= last >> g->rb_bits && !rc; i++) {
		uint64_t off = block_at(s, i);

		if (!off && qcow2_count_is_empty(&s->count, i << g->rb_bits, 1ull << g->rb_bits))
			continue;
		if (off)
			rc = co_qcow2_img_read(s->img, off, buf, g->cluster_size, err);
		if (rc || !compare_block(s, buf, i << g->rb_bits, off != 0))
			continue;
		rc = co_qcow2_img_write(s->img, off, buf, g->cluster_size, err);
		changed = true;
	}
	end_run(s);
	free(buf);
	if (!rc && changed)
		rc = co_qcow2_img_flush(s->img, err);
	if (!rc)
		co_punch_holes(s);
	return rc;
}

/* --- COPIED flags --- */

/* Corrects the flag of an entry whose cluster is in the window. True if it was changed. */
static bool look_at_flag(struct state *s, uint8_t *p, uint64_t entry_off, const char *what, uint64_t guest)
{
	uint64_t entry = get_be64(p), host = entry & QCOW2_OFFSET_MASK;
	unsigned bits = s->img->h.geo.cluster_bits, refs;
	bool copied = entry & QCOW2_COPIED, fix = s->c->repair == QCOW2_REPAIR_ALL;

	if (!host || !is_aligned(host, s->img->h.geo.cluster_size) || (host >> bits) - s->count.first >= s->count.n)
		return false;
	refs = qcow2_count_get(&s->count, host >> bits);
	if (copied == (refs == 1))
		return false;
	found(s, QCOW2_FOUND_FLAG, entry_off, 1, fix, "the entry at 0x%" PRIx64 ", %s of guest offset 0x%" PRIx64 ", says that its cluster at 0x%" PRIx64
	      " is %s, and it has %u reference%s", entry_off, what, guest, host, copied ? "not shared" : "shared", refs, refs == 1 ? "" : "s");
	if (fix)
		put_be64(p, entry ^ QCOW2_COPIED);
	return fix;
}

static bool flags_of_l1(struct qcow2_walk *w, uint64_t first, uint64_t n, uint8_t *buf)
{
	struct state *s = w->arg;
	const struct qcow2_geo *g = &s->img->h.geo;
	bool changed = false;

	for (uint64_t i = 0; i < n; i++)
		if (!(get_be64(buf + i * 8) & QCOW2_L1_RESERVED))
			changed |= look_at_flag(s, buf + i * 8, s->img->h.l1_off + (first + i) * 8, "L2 table",
						(first + i) << (g->cluster_bits + g->l2_bits));
	return changed;
}

static bool flags_of_l2(struct qcow2_walk *w, const struct qcow2_ref *table, uint8_t *buf)
{
	struct state *s = w->arg;
	const struct qcow2_geo *g = &s->img->h.geo;
	bool changed = false;

	/* In a data file nothing is shared, and its clusters are not counted. */
	if ((s->img->h.incompat & QCOW2_INCOMPAT_DATA_FILE) || is_doubtful(s, table->off))
		return false;
	for (uint32_t i = 0; i < 1u << g->l2_bits; i++) {
		uint8_t *p = buf + (size_t)i * g->l2_entry_size;

		if (get_be64(p) & (QCOW2_COMPRESSED | QCOW2_L2_RESERVED))
			continue;
		changed |= look_at_flag(s, p, table->off + (uint64_t)i * g->l2_entry_size, "data cluster", table->guest + ((uint64_t)i << g->cluster_bits));
	}
	return changed;
}

/* --- All of it --- */

/* Of a walk, as a part of all that is done. */
static void on_walked(void *arg, uint64_t done, uint64_t total)
{
	const struct state *s = arg;
	uint64_t walks = 2 * s->windows, here = total ? done * 1000 / total : 1000;

	s->c->progress(s->c->progress_arg, (s->c->pass * walks + s->walk) * 1000 + here, s->c->passes * walks * 1000);
}

static struct qcow2_walk make_walk(struct state *s)
{
	return (struct qcow2_walk){ .img = s->img, .arg = s, .progress = s->c->progress ? on_walked : NULL, .progress_arg = s, .stop = s->c->stop };
}

static co_fn int co_look_at_window(struct state *s, uint64_t index, struct err *err)
{
	struct qcow2_walk w = make_walk(s);
	uint64_t all = s->img->end >> s->img->h.geo.cluster_bits, first = index * qcow2_check_window;
	uint64_t fixed = s->c->damage_fixed;
	int rc = qcow2_count_init(&s->count, first, min(all - first, qcow2_check_window));

	if (rc)
		return err_errno(err, rc, "%s", s->img->name);
	s->first = !index;
	s->walk = 2 * index;
	w.ref = on_ref;
	w.bad = on_bad;
	w.l2 = on_l2;
	rc = co_qcow2_walk(&w, err);
	if (!rc && s->c->damage_fixed != fixed)
		rc = co_qcow2_img_flush(s->img, err);
	if (!rc)
		rc = co_compare(s, err);
	if (!rc) {
		fixed = s->c->damage_fixed;
		s->walk++;
		w = make_walk(s);
		w.active_only = true;
		w.l1 = flags_of_l1;
		w.l2 = flags_of_l2;
		rc = co_qcow2_walk(&w, err);
	}
	if (!rc && s->c->damage_fixed != fixed)
		rc = co_qcow2_img_flush(s->img, err);
	qcow2_count_fini(&s->count);
	return rc;
}

/* Whether there may be refcounts in a window, or references to it. */
static bool window_matters(const struct state *s, uint64_t index)
{
	unsigned bits = s->img->h.geo.rb_bits;
	uint64_t first = index * qcow2_check_window;

	if (!index || (s->marks[index / 8] & 1 << index % 8))
		return true;
	for (uint64_t i = first >> bits; i < s->img->rt_entries && i << bits < first + qcow2_check_window; i++)
		if (s->img->rt[i])
			return true;
	return false;
}

static bool commit_ref(struct qcow2_walk *w, const struct qcow2_ref *r)
{
	struct qcow2_commit *c = w->arg;

	qcow2_commit_use_old(c, r);
	if (r->kind != QCOW2_REF_RT && r->kind != QCOW2_REF_RB)
		qcow2_count_add(&c->count, &c->img->h.geo, r, r->weight);
	return false;
}

static co_fn int co_rebuild(struct state *s, struct err *err)
{
	struct qcow2_walk w = make_walk(s);
	struct qcow2_commit c;
	int rc = qcow2_commit_init(&c, s->img, err);

	if (rc)
		return rc;
	w.arg = &c;
	w.ref = commit_ref;
	rc = co_qcow2_walk(&w, err);
	if (!rc)
		rc = co_qcow2_commit(&c, err);
	if (rc)
		co_qcow2_commit_undo(&c);
	qcow2_commit_fini(&c);
	if (!rc)
		s->img->end = align_up(s->img->file->size, s->img->h.geo.cluster_size);
	return rc ? rc : co_qcow2_img_read_rt(s->img, err);
}

/* Tables that have to be there before there is anything to count. */
static co_fn int co_read_tables(struct state *s, struct err *err)
{
	struct err why = ERR_INIT;
	int rc = co_qcow2_img_read_rt(s->img, err);

	if (rc)
		return rc;
	if (s->img->rt_entries != (uint64_t)s->img->h.rt_clusters << s->img->h.geo.cluster_bits >> 3)
		s->rebuild = true;
	rc = co_qcow2_img_read_snapshots(s->img, &why);
	if (rc == -ENOMEM || rc == -EIO)
		return err_set(err, rc, "%s", why.msg);
	if (rc)
		found(s, QCOW2_FOUND_SNAPSHOTS, s->img->h.snapshots_off, 1, false, "%s", why.msg);
	err_clear(&why);
	rc = co_qcow2_img_read_bitmaps(s->img, &why);
	if (rc == -ENOMEM || rc == -EIO)
		return err_set(err, rc, "%s", why.msg);
	if (rc)
		found(s, QCOW2_FOUND_BITMAPS, s->img->h.bitmaps.dir_off, 1, false, "%s", why.msg);
	return 0;
}

static co_fn int co_check_once(struct qcow2_img *img, struct qcow2_check *c, struct doubts *doubts, bool *ret_rebuild, struct err *err)
{
	struct state s = { .img = img, .c = c, .doubts = doubts, .windows = (img->end >> img->h.geo.cluster_bits) / qcow2_check_window + 1 };
	int rc;

	c->total = qcow2_clusters(&img->h.geo, img->h.size);
	s.marks = calloc(s.windows / 8 + 1, 1);
	if (!s.marks)
		return err_errno(err, -ENOMEM, "%s", img->name);
	rc = co_read_tables(&s, err);
	/* Where a later window may show that a block lies on something else, nothing is written before that is known. */
	s.rebuild |= *ret_rebuild;
	for (uint64_t i = 0; i < s.windows && !rc; i++)
		if (i * qcow2_check_window < img->end >> img->h.geo.cluster_bits && window_matters(&s, i))
			rc = co_look_at_window(&s, i, err);
	free(s.marks);
	free(s.hole);
	*ret_rebuild = s.rebuild;
	if (!rc && s.rebuild && c->repair == QCOW2_REPAIR_ALL)
		rc = co_rebuild(&s, err);
	return rc;
}

/* A look, which says nothing, at what is left. */
static co_fn int co_look_again(struct qcow2_img *img, const struct qcow2_check *c, enum qcow2_repair repair, struct qcow2_check *ret, struct doubts *doubts,
			       bool *rebuild, struct err *err)
{
	*ret = (struct qcow2_check){ .repair = repair, .progress = c->progress, .progress_arg = c->progress_arg, .pass = c->pass, .passes = c->passes,
				      .stop = c->stop };
	return co_check_once(img, ret, doubts, rebuild, err);
}

static co_fn int co_check(struct qcow2_img *img, struct qcow2_check *c, struct doubts *doubts, struct err *err)
{
	const uint64_t bits = QCOW2_INCOMPAT_DIRTY | QCOW2_INCOMPAT_CORRUPT;
	struct qcow2_check again;
	bool rebuild = false, ignored = false;
	int rc = 0;

	c->leaks = c->damage = c->leaks_fixed = c->damage_fixed = 0;
	c->allocated = c->compressed = c->fragmented = c->image_end = 0;
	c->pass = 0;
	c->passes = c->repair == QCOW2_REPAIR_NONE ? 1 : 3;
	if (c->repair != QCOW2_REPAIR_NONE) {
		rc = co_look_again(img, c, QCOW2_REPAIR_NONE, &again, doubts, &rebuild, err);
		c->pass++;
	}
	/* Of one window all is known before the first refcount is written. */
	if (c->repair == QCOW2_REPAIR_ALL && img->end >> img->h.geo.cluster_bits <= qcow2_check_window)
		rebuild = false;
	if (!rc && c->repair == QCOW2_REPAIR_LEAKS && again.damage)
		c->repair = QCOW2_REPAIR_NONE;
	if (!rc)
		rc = co_check_once(img, c, doubts, &rebuild, err);
	if (rc || c->repair == QCOW2_REPAIR_NONE)
		return rc;
	c->pass++;
	rc = co_look_again(img, c, QCOW2_REPAIR_NONE, &again, doubts, &ignored, err);
	/* What was shared with a table that is elsewhere now is not shared any more, and the like. */
	for (int i = 0; i < 2 && !rc && c->repair == QCOW2_REPAIR_ALL && again.leaks + again.damage; i++) {
		ignored = false;
		rc = co_look_again(img, c, QCOW2_REPAIR_ALL, &again, doubts, &ignored, err);
		ignored = false;
		if (!rc)
			rc = co_look_again(img, c, QCOW2_REPAIR_NONE, &again, doubts, &ignored, err);
	}
	if (rc)
		return rc;
	c->leaks_fixed = c->leaks > again.leaks ? c->leaks - again.leaks : 0;
	c->damage_fixed = c->damage > again.damage ? c->damage - again.damage : 0;
	c->leaks = again.leaks + c->leaks_fixed;
	c->damage = again.damage + c->damage_fixed;
	c->image_end = again.image_end;
	/* A device has the size that it has. */
	if (c->leaks_fixed && !c->damage && !again.leaks && img->file->size > c->image_end)
		co_disk_resize(img->file, c->image_end, NULL);
	if (again.damage || c->repair != QCOW2_REPAIR_ALL || !(img->h.incompat & bits))
		return 0;
	img->h.incompat &= ~bits;
	return co_qcow2_img_write_header(img, err);
}

co_fn int co_qcow2_check(struct qcow2_img *img, struct qcow2_check *c, struct err *err)
{
	struct doubts *doubts = calloc(1, sizeof(*doubts));
	int rc = doubts ? co_check(img, c, doubts, err) : err_errno(err, -ENOMEM, "%s", img->name);

	if (!rc && c->progress)
		c->progress(c->progress_arg, 1, 1);
	free(doubts);
	return rc;
}
