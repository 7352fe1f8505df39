/* SPDX-License-Identifier: MIT */
/*
 * qcow2 tools: snapshots of a closed image: create, apply, delete.
 *
 * Each is one step from an old state to a new one (check_commit.c). The new state is counted by a walk over the old one, in which each tree weighs as much as
 * it will: a created snapshot takes over the active L1 table as it is, and the active tree gets a new one; an applied one lends its tree to the
 * active one; a deleted one weighs nothing. Then the tree that the active one will have is gone through: an L2 table whose COPIED flags stay true is
 * shared, another one is copied with new flags. So no table that the old state uses is changed.
 *
 * Space: new L1 table, snapshot table, refcount table and blocks, and copies of L2 tables, which the next writes to these areas would have made.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "util/err.h"

#define NAME_MAX_LEN 255

struct edit {
	struct qcow2_commit c;
	struct qcow2_img *img;
	enum qcow2_snap_op op;
	int which;		/* of the table: applied or deleted */
	uint64_t l1_off;	/* of the tree that the active one will have */
	uint64_t l1_size, new_size;	/* entries: now, and then */
	uint64_t *l1;		/* new L1 table, host order */
	uint8_t *l2;
};

/* --- The new state, counted --- */

/* Of a tree's data. */
static unsigned weight_of_tree(const struct qcow2_walk *w, int snap)
{
	const struct edit *e = w->arg;

	if (snap < 0)
		return e->op == QCOW2_SNAP_CREATE ? 2 : e->op == QCOW2_SNAP_APPLY ? 0 : 1;
	if (snap != e->which || e->op == QCOW2_SNAP_CREATE)
		return 1;
	return e->op == QCOW2_SNAP_APPLY ? 2 : 0;
}

static unsigned weight_of(const struct edit *e, const struct qcow2_ref *r)
{
	switch (r->kind) {
	case QCOW2_REF_RT:
	case QCOW2_REF_RB:
	case QCOW2_REF_SNAPSHOTS:
		return 0;
	case QCOW2_REF_HEADER:
		return 1;
	case QCOW2_REF_BITMAP:
	case QCOW2_REF_BITMAP_TABLE:
	case QCOW2_REF_BITMAP_DIR:
		/* They tell about the contents that go. */
		return e->op != QCOW2_SNAP_APPLY;
	case QCOW2_REF_DATA:
	case QCOW2_REF_COMPRESSED:
		return r->weight;
	default:
		break;
	}
	/* L1 and L2 tables. The active tree's are the new snapshot's from now on; what the active tree shares is counted when that is known. */
	if (r->snap < 0)
		return e->op == QCOW2_SNAP_CREATE;
	if (r->snap != e->which || e->op == QCOW2_SNAP_CREATE)
		return 1;
	return e->op != QCOW2_SNAP_DELETE;
}

static bool count_ref(struct qcow2_walk *w, const struct qcow2_ref *r)
{
	struct edit *e = w->arg;

	qcow2_commit_use_old(&e->c, r);
	qcow2_count_add(&e->c.count, &e->img->h.geo, r, weight_of(e, r));
	return false;
}

/* --- The active tree --- */

/* Gives the entries the flags that they will need. True if one of them has changed. */
static bool set_flags(struct edit *e)
{
	const struct qcow2_geo *g = &e->img->h.geo;
	bool changed = false;

	for (uint32_t i = 0; i < 1u << g->l2_bits; i++) {
		uint8_t *p = e->l2 + (size_t)i * g->l2_entry_size;
		uint64_t entry = get_be64(p), host = qcow2_l2_host(entry);
		bool alone;

		if ((entry & QCOW2_COMPRESSED) || !host)
			continue;
		alone = qcow2_count_get(&e->c.count, host >> g->cluster_bits) == 1;
		if (alone == !!(entry & QCOW2_COPIED))
			continue;
		put_be64(p, entry ^ QCOW2_COPIED);
		changed = true;
	}
	return changed;
}

static co_fn int co_take_l2(struct edit *e, uint64_t index, uint64_t off, struct err *err)
{
	const struct qcow2_geo *g = &e->img->h.geo;
	struct qcow2_ref r = { .kind = QCOW2_REF_L2, .off = off, .len = g->cluster_size };
	int rc = co_qcow2_img_read(e->img, off, e->l2, g->cluster_size, err);

	if (rc)
		return rc;
	e->l1[index] = off;
	if (!set_flags(e)) {
		qcow2_count_add(&e->c.count, g, &r, 1);
		return 0;
	}
	e->l1[index] = co_qcow2_commit_alloc(&e->c, 1, err);
	return e->l1[index] ? co_qcow2_img_write(e->img, e->l1[index], e->l2, g->cluster_size, err) : err->code;
}

static co_fn int co_take_tree(struct edit *e, const bool *stop, struct err *err)
{
	uint8_t *buf = qcow2_img_alloc(QCOW2_L1_PIECE * 8);
	int rc = buf ? 0 : err_errno(err, -ENOMEM, "%s", e->img->name);

	for (uint64_t first = 0, n; first < e->l1_size && !rc; first += n) {
		n = min(e->l1_size - first, (uint64_t)QCOW2_L1_PIECE);
		rc = co_qcow2_img_read(e->img, e->l1_off + first * 8, buf, n * 8, err);
		for (uint64_t i = 0; i < n && !rc; i++) {
			uint64_t off = get_be64(buf + i * 8) & QCOW2_OFFSET_MASK;

			if (off)
				rc = stop && *stop ? err_set(err, -ECANCELED, "%s: interrupted; it is as it was", e->img->name) :
						     co_take_l2(e, first + i, off, err);
		}
	}
	free(buf);
	return rc;
}

static co_fn int co_write_l1(struct edit *e, struct err *err)
{
	const struct qcow2_geo *g = &e->img->h.geo;
	uint64_t clusters = qcow2_clusters(g, e->new_size * 8), off;
	uint8_t *buf;
	int rc;

	e->img->h.l1_size = (uint32_t)e->new_size;
	e->img->h.l1_off = 0;
	if (!clusters)
		return 0;
	off = co_qcow2_commit_alloc(&e->c, clusters, err);
	if (!off)
		return err->code;
	buf = qcow2_img_alloc(clusters << g->cluster_bits);
	if (!buf)
		return err_errno(err, -ENOMEM, "%s", e->img->name);
	for (uint64_t i = 0; i < e->new_size; i++) {
		bool alone = e->l1[i] && qcow2_count_get(&e->c.count, e->l1[i] >> g->cluster_bits) == 1;

		put_be64(buf + i * 8, e->l1[i] | (alone ? QCOW2_COPIED : 0));
	}
	rc = co_qcow2_img_write(e->img, off, buf, clusters << g->cluster_bits, err);
	free(buf);
	e->img->h.l1_off = off;
	return rc;
}

/* --- The snapshot table --- */

static int add_snapshot(struct qcow2_img *img, const char *name, uint64_t now_ns, struct err *err)
{
	struct qcow2_snap *v = realloc(img->snap, (img->n_snap + 1) * sizeof(*v)), *s;
	struct qcow2_raw_snapshot_extra *x;
	uint64_t id = 0;
	char text[24];

	if (!v)
		return err_errno(err, -ENOMEM, "%s", img->name);
	img->snap = v;
	for (unsigned i = 0; i < img->n_snap; i++)
		id = max(id, (uint64_t)strtoull(v[i].id, NULL, 10));
	snprintf(text, sizeof(text), "%" PRIu64, id < UINT32_MAX ? id + 1 : img->n_snap + 1);
	s = &v[img->n_snap];
	*s = (struct qcow2_snap){ .l1_off = img->h.l1_off, .l1_size = img->h.l1_size, .date_sec = (uint32_t)(now_ns / 1000000000),
				  .date_nsec = (uint32_t)(now_ns % 1000000000), .disk_size = img->h.size, .icount = UINT64_MAX, .extra_len = sizeof(*x) };
	x = calloc(1, sizeof(*x));
	s->extra = (uint8_t *)x;
	s->id = strdup(text);
	s->name = strdup(name);
	if (!x || !s->id || !s->name) {
		qcow2_snap_fini(s);
		return err_errno(err, -ENOMEM, "%s", img->name);
	}
	put_be64(x->disk_size, img->h.size);
	put_be64(x->icount, UINT64_MAX);
	img->n_snap++;
	return 0;
}

static co_fn int co_write_snapshots(struct edit *e, struct err *err)
{
	struct qcow2_img *img = e->img;
	uint64_t len, off;
	uint8_t *buf;
	int rc;

	img->h.nb_snapshots = img->n_snap;
	img->h.snapshots_off = 0;
	if (!img->n_snap)
		return 0;
	buf = qcow2_snaps_serialise(img, &len);
	if (!buf)
		return err_errno(err, -ENOMEM, "%s", img->name);
	off = len > QCOW2_MAX_SNAPSHOT_TABLE ? 0 : co_qcow2_commit_alloc(&e->c, qcow2_clusters(&img->h.geo, len), err);
	if (!off)
		rc = err_set(err, -EFBIG, "%s: its snapshot table would be too large; delete a snapshot first", img->name);
	else
		rc = co_qcow2_img_write(img, off, buf, align_up(len, img->h.geo.cluster_size), err);
	free(buf);
	img->h.snapshots_off = off;
	return rc;
}

/* --- All of it --- */

static int prepare(struct edit *e, const char *which, struct err *err)
{
	struct qcow2_img *img = e->img;
	const struct qcow2_snap *s;

	e->l1_off = img->h.l1_off;
	e->l1_size = e->new_size = img->h.l1_size;
	e->which = qcow2_snap_find(img, which);
	if (e->op == QCOW2_SNAP_CREATE) {
		if (e->which >= 0)
			return err_set(err, -EEXIST, "%s: has a snapshot \"%.100s\" already; choose another name", img->name, which);
		if (!*which || strlen(which) > NAME_MAX_LEN)
			return err_set(err, -EINVAL, "%s: a snapshot's name has 1 to %d bytes", img->name, NAME_MAX_LEN);
		if (img->n_snap >= QCOW2_MAX_SNAPSHOTS)
			return err_set(err, -EFBIG, "%s: has %d snapshots, which is the limit; delete one first", img->name, QCOW2_MAX_SNAPSHOTS);
		return 0;
	}
	if (e->which < 0)
		return err_set(err, -ENOENT, "%s: has no snapshot \"%.100s\"; weir image snapshot -l shows those it has", img->name, which);
	if (e->op == QCOW2_SNAP_DELETE)
		return 0;
	s = &img->snap[e->which];
	e->l1_off = s->l1_off;
	e->l1_size = s->l1_size;
	if (qcow2_l1_entries(&img->h.geo, s->disk_size) * 8 > QCOW2_MAX_L1_BYTES)
		return err_set(err, -EFBIG, "%s: the snapshot claims a size of %" PRIu64 " bytes, which is beyond the limit", img->name, s->disk_size);
	e->new_size = max(e->l1_size, qcow2_l1_entries(&img->h.geo, s->disk_size));
	return 0;
}

/* Nothing is built on damage: it would spread. */
static co_fn int co_refuse_damage(struct qcow2_img *img, const bool *stop, struct err *err)
{
	struct qcow2_check c = { .stop = stop };
	int rc;

	if (img->h.incompat & QCOW2_INCOMPAT_DATA_FILE)
		return err_set(err, -ENOTSUP, "%s: keeps its data in another file, which snapshots cannot cover", img->name);
	if (img->h.incompat & QCOW2_INCOMPAT_CORRUPT)
		return err_set(err, -EINVAL, "%s: is marked as corrupt; weir image check --repair=all first", img->name);
	rc = co_qcow2_check(img, &c, err);
	if (!rc && c.damage)
		rc = err_set(err, -EINVAL, "%s: is damaged (%" PRIu64 " findings); weir image check shows them, --repair=all repairs them", img->name, c.damage);
	return rc;
}

static co_fn int co_change(struct edit *e, const char *which, uint64_t now_ns, const bool *stop, struct err *err)
{
	struct qcow2_img *img = e->img;
	struct qcow2_walk w = { .img = img, .arg = e, .ref = count_ref, .tree_weight = weight_of_tree, .stop = stop };
	int rc = co_qcow2_walk(&w, err);

	if (!rc)
		rc = qcow2_commit_check(&e->c, err);
	if (!rc)
		rc = co_take_tree(e, stop, err);
	if (rc)
		return rc;
	if (e->op == QCOW2_SNAP_CREATE) {
		rc = add_snapshot(img, which, now_ns, err);
	} else if (e->op == QCOW2_SNAP_APPLY) {
		img->h.size = img->snap[e->which].disk_size;
		img->h.autoclear &= ~(uint64_t)QCOW2_AUTOCLEAR_BITMAPS;
	} else {
		qcow2_snap_fini(&img->snap[e->which]);
		img->n_snap--;
		memmove(&img->snap[e->which], &img->snap[e->which + 1], (img->n_snap - e->which) * sizeof(*img->snap));
	}
	if (!rc)
		rc = co_write_l1(e, err);
	if (!rc)
		rc = co_write_snapshots(e, err);
	return rc ? rc : co_qcow2_commit(&e->c, err);
}

co_fn int co_qcow2_snapshot(struct qcow2_img *img, enum qcow2_snap_op op, const char *which, uint64_t now_ns, const bool *stop, struct err *err)
{
	struct edit e = { .img = img, .op = op };
	int rc = co_refuse_damage(img, stop, err);

	if (!rc)
		rc = prepare(&e, which, err);
	if (!rc)
		rc = qcow2_commit_init(&e.c, img, err);
	if (rc)
		return rc;
	e.l1 = calloc(max(e.new_size, 1ull), sizeof(*e.l1));
	e.l2 = qcow2_img_alloc(img->h.geo.cluster_size);
	rc = e.l1 && e.l2 ? co_change(&e, which, now_ns, stop, err) : err_errno(err, -ENOMEM, "%s", img->name);
	if (rc)
		co_qcow2_commit_undo(&e.c);
	free(e.l1);
	free(e.l2);
	qcow2_commit_fini(&e.c);
	return rc;
}
