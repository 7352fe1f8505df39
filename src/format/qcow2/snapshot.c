/* SPDX-License-Identifier: MIT */
/* qcow2 tools: the snapshot table. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "format/qcow2/tools.h"
#include "util/err.h"

#define PIECE 65536u
#define MORE ((uint32_t)(sizeof(struct qcow2_raw_snapshot) + QCOW2_MAX_SNAPSHOT_EXTRA + 2 * 65536))

void qcow2_snap_fini(struct qcow2_snap *s)
{
	free(s->extra);
	free(s->id);
	free(s->name);
}

void qcow2_snaps_free(struct qcow2_img *img)
{
	for (unsigned i = 0; i < img->n_snap; i++)
		qcow2_snap_fini(&img->snap[i]);
	free(img->snap);
	img->snap = NULL;
	img->n_snap = 0;
}

/* The table goes by in a buffer: `len` bytes from `off` on are in it. */
struct reader {
	struct qcow2_img *img;
	uint64_t off;		/* in the file */
	uint8_t *buf;
	uint32_t at, len;
};

/* Makes `need` bytes readable at r->buf + r->at, which the file must have. */
static co_fn int co_fill_clusters(struct reader *r, uint32_t need, struct err *err)
{
	uint64_t next = r->off + r->len;
	uint32_t more;
	int rc;

	if (r->len - r->at >= need)
		return 0;
	if (r->off + r->at + need > r->img->end)
		return err_set(err, -EINVAL, "%s: its snapshot table reaches beyond the end of the file", r->img->name);
	memmove(r->buf, r->buf + r->at, r->len - r->at);
	r->off += r->at;
	r->len -= r->at;
	r->at = 0;
	more = (uint32_t)min((uint64_t)(PIECE + MORE - r->len), r->img->end - next);
	rc = co_qcow2_img_read(r->img, next, r->buf + r->len, more, err);
	r->len += more;
	return rc;
}

static int take_extra(struct qcow2_snap *s)
{
	const struct qcow2_raw_snapshot_extra *x = (const void *)s->extra;

	s->icount = UINT64_MAX;
	if (s->extra_len >= offsetof(struct qcow2_raw_snapshot_extra, disk_size))
		s->vm_state_size = get_be64(x->vm_state_size);
	if (s->extra_len >= offsetof(struct qcow2_raw_snapshot_extra, icount))
		s->disk_size = get_be64(x->disk_size);
	if (s->extra_len >= sizeof(*x))
		s->icount = get_be64(x->icount);
	return 0;
}

static co_fn int co_read_one(struct reader *r, struct qcow2_snap *s, struct err *err)
{
	const struct qcow2_raw_snapshot *raw;
	uint32_t id_len, name_len, len;
	const uint8_t *p;
	int rc = co_fill_clusters(r, sizeof(*raw), err);

	if (rc)
		return rc;
	raw = (const void *)(r->buf + r->at);
	id_len = get_be16(raw->id_len);
	name_len = get_be16(raw->name_len);
	*s = (struct qcow2_snap){ .l1_off = get_be64(raw->l1_off), .l1_size = get_be32(raw->l1_size), .date_sec = get_be32(raw->date_sec),
		.date_nsec = get_be32(raw->date_nsec), .clock_nsec = get_be64(raw->clock_nsec), .vm_state_size = get_be32(raw->vm_state_size),
		.extra_len = get_be32(raw->extra_len), .disk_size = r->img->h.size };
	if (s->extra_len > QCOW2_MAX_SNAPSHOT_EXTRA)
		return err_set(err, -EINVAL, "%s: a snapshot at 0x%" PRIx64 " claims %u bytes of extra data; at most %d are possible", r->img->name,
			       r->off + r->at, s->extra_len, QCOW2_MAX_SNAPSHOT_EXTRA);
	len = (uint32_t)align_up(sizeof(*raw) + s->extra_len + id_len + name_len, 8);
	rc = co_fill_clusters(r, len, err);
	if (rc)
		return rc;
	p = r->buf + r->at + sizeof(*raw);
	s->extra = malloc(max(s->extra_len, 1u));
	s->id = strndup((const char *)p + s->extra_len, id_len);
	s->name = strndup((const char *)p + s->extra_len + id_len, name_len);
	if (!s->extra || !s->id || !s->name) {
		qcow2_snap_fini(s);
		return err_errno(err, -ENOMEM, "%s", r->img->name);
	}
	memcpy(s->extra, p, s->extra_len);
	r->at += len;
	r->img->snap_bytes += len;
	return take_extra(s);
}

co_fn int co_qcow2_img_read_snapshots(struct qcow2_img *img, struct err *err)
{
	struct reader r = { .img = img, .off = img->h.snapshots_off };
	uint64_t room = img->end > r.off ? (img->end - r.off) / sizeof(struct qcow2_raw_snapshot) : 0;
	int rc = 0;

	qcow2_snaps_free(img);
	img->snap_bytes = 0;
	if (!img->h.nb_snapshots)
		return 0;
	if (img->h.nb_snapshots > room)
		return err_set(err, -EINVAL, "%s: its snapshot table (%u snapshots at 0x%" PRIx64 ") reaches beyond the end of the file", img->name,
			       img->h.nb_snapshots, r.off);
	img->snap = calloc(img->h.nb_snapshots, sizeof(*img->snap));
	r.buf = malloc(PIECE + MORE);
	if (!img->snap || !r.buf)
		rc = err_errno(err, -ENOMEM, "%s", img->name);
	while (!rc && img->n_snap < img->h.nb_snapshots) {
		rc = co_read_one(&r, &img->snap[img->n_snap], err);
		if (!rc)
			img->n_snap++;
		if (!rc && img->snap_bytes > QCOW2_MAX_SNAPSHOT_TABLE)
			rc = err_set(err, -EFBIG, "%s: its snapshot table has more than %u bytes", img->name, QCOW2_MAX_SNAPSHOT_TABLE);
	}
	free(r.buf);
	return rc;
}

uint8_t *qcow2_snaps_serialise(const struct qcow2_img *img, uint64_t *ret_len)
{
	uint64_t len = 0;
	uint8_t *buf, *p;

	for (unsigned i = 0; i < img->n_snap; i++)
		len += align_up(sizeof(struct qcow2_raw_snapshot) + img->snap[i].extra_len + strlen(img->snap[i].id) + strlen(img->snap[i].name), 8);
	*ret_len = len;
	buf = p = qcow2_img_alloc(align_up(len, img->h.geo.cluster_size));
	for (unsigned i = 0; buf && i < img->n_snap; i++) {
		const struct qcow2_snap *s = &img->snap[i];
		struct qcow2_raw_snapshot *raw = (void *)p;
		size_t id_len = strlen(s->id), name_len = strlen(s->name);

		put_be64(raw->l1_off, s->l1_off);
		put_be32(raw->l1_size, s->l1_size);
		put_be16(raw->id_len, (uint16_t)id_len);
		put_be16(raw->name_len, (uint16_t)name_len);
		put_be32(raw->date_sec, s->date_sec);
		put_be32(raw->date_nsec, s->date_nsec);
		put_be64(raw->clock_nsec, s->clock_nsec);
		put_be32(raw->vm_state_size, s->vm_state_size > UINT32_MAX ? UINT32_MAX : (uint32_t)s->vm_state_size);
		put_be32(raw->extra_len, s->extra_len);
		memcpy(p + sizeof(*raw), s->extra, s->extra_len);
		memcpy(p + sizeof(*raw) + s->extra_len, s->id, id_len);
		memcpy(p + sizeof(*raw) + s->extra_len + id_len, s->name, name_len);
		p += align_up(sizeof(*raw) + s->extra_len + id_len + name_len, 8);
	}
	return buf;
}

int qcow2_snap_find(const struct qcow2_img *img, const char *which)
{
	for (unsigned i = 0; i < img->n_snap; i++)
		if (!strcmp(img->snap[i].id, which))
			return (int)i;
	for (unsigned i = 0; i < img->n_snap; i++)
		if (!strcmp(img->snap[i].name, which))
			return (int)i;
	return -1;
}
