/* SPDX-License-Identifier: MIT */
/* qcow2 tools: the directory of persistent bitmaps. Its contents count only while the autoclear bit is set. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "format/qcow2/tools.h"
#include "util/err.h"

#define NAME_MAX_LEN 1023

void qcow2_bms_free(struct qcow2_img *img)
{
	for (unsigned i = 0; i < img->n_bm; i++)
		free(img->bm[i].name);
	free(img->bm);
	img->bm = NULL;
	img->n_bm = 0;
}

/* One entry from the `left` bytes at p. Its length, 0 if it does not fit. */
static uint64_t take_one(struct qcow2_bm *b, const uint8_t *p, uint64_t left)
{
	const struct qcow2_raw_bitmap *raw = (const void *)p;
	uint64_t len, extra, name_len;

	if (left < sizeof(*raw))
		return 0;
	extra = get_be32(raw->extra_len);
	name_len = get_be16(raw->name_len);
	len = align_up(sizeof(*raw) + extra + name_len, 8);
	if (len > left || name_len > NAME_MAX_LEN)
		return 0;
	*b = (struct qcow2_bm){ .table_off = get_be64(raw->table_off), .table_size = get_be32(raw->table_size), .flags = get_be32(raw->flags),
				.granularity_bits = raw->granularity_bits[0],
				.name = strndup((const char *)p + sizeof(*raw) + extra, name_len) };
	return b->name ? len : 0;
}

co_fn int co_qcow2_img_read_bitmaps(struct qcow2_img *img, struct err *err)
{
	const struct qcow2_header *h = &img->h;
	uint64_t at = 0;
	uint8_t *buf;
	int rc;

	qcow2_bms_free(img);
	if (!(h->autoclear & QCOW2_AUTOCLEAR_BITMAPS) || !h->bitmaps.count)
		return 0;
	if (h->bitmaps.dir_off > img->end || h->bitmaps.dir_size > img->end - h->bitmaps.dir_off ||
	    h->bitmaps.dir_size / sizeof(struct qcow2_raw_bitmap) < h->bitmaps.count)
		return err_set(err, -EINVAL, "%s: its bitmap directory (%u bitmaps in %" PRIu64 " bytes at 0x%" PRIx64 ") is too small or reaches beyond the file",
			       img->name, h->bitmaps.count, h->bitmaps.dir_size, h->bitmaps.dir_off);
	buf = qcow2_img_alloc(h->bitmaps.dir_size);
	img->bm = calloc(h->bitmaps.count, sizeof(*img->bm));
	rc = buf && img->bm ? co_qcow2_img_read(img, h->bitmaps.dir_off, buf, h->bitmaps.dir_size, err) : err_errno(err, -ENOMEM, "%s", img->name);
	while (!rc && img->n_bm < h->bitmaps.count) {
		uint64_t len = take_one(&img->bm[img->n_bm], buf + at, h->bitmaps.dir_size - at);

		if (!len) {
			rc = err_set(err, -EINVAL, "%s: the bitmap at 0x%" PRIx64 " does not fit into the bitmap directory", img->name, h->bitmaps.dir_off + at);
			break;
		}
		img->n_bm++;
		at += len;
	}
	free(buf);
	return rc;
}
