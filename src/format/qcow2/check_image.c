/* SPDX-License-Identifier: MIT */
/* qcow2 tools: an image that nobody has open. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "util/err.h"

void *qcow2_img_alloc(size_t len)
{
	void *p = aligned_alloc(4096, align_up(max(len, (size_t)1), 4096));

	if (p)
		memset(p, 0, align_up(max(len, (size_t)1), 4096));
	return p;
}

co_fn int co_qcow2_img_read(struct qcow2_img *img, uint64_t off, void *buf, uint64_t len, struct err *err)
{
	uint64_t there = off < img->file->size ? min(len, img->file->size - off) : 0;
	int rc = there ? co_disk_read(img->file, off, buf, there, 0) : 0;

	if (rc)
		return err_errno(err, rc, "%s: cannot be read at 0x%" PRIx64, img->name, off);
	memset((uint8_t *)buf + there, 0, len - there);
	return 0;
}

co_fn int co_qcow2_img_write(struct qcow2_img *img, uint64_t off, const void *buf, uint64_t len, struct err *err)
{
	int rc = co_disk_write(img->file, off, buf, len, 0);

	if (rc == -ENOSPC)
		return err_set(err, rc, "%s: no space left at 0x%" PRIx64 "; make room and start again", img->name, off);
	return rc ? err_errno(err, rc, "%s: cannot be written at 0x%" PRIx64, img->name, off) : 0;
}

co_fn int co_qcow2_img_flush(struct qcow2_img *img, struct err *err)
{
	int rc = co_disk_flush(img->file);

	return rc ? err_errno(err, rc, "%s: cannot be flushed", img->name) : 0;
}

co_fn int co_qcow2_img_write_header(struct qcow2_img *img, struct err *err)
{
	uint8_t buf[512];
	int rc = co_qcow2_img_read(img, 0, buf, sizeof(buf), err);

	if (rc)
		return rc;
	qcow2_header_update(&img->h, buf);
	rc = co_qcow2_img_write(img, 0, buf, sizeof(buf), err);
	return rc ? rc : co_qcow2_img_flush(img, err);
}

co_fn int co_qcow2_img_open(struct qcow2_img *img, struct disk *file, const char *name, unsigned flags, struct err *err)
{
	uint8_t head[512] = { 0 };
	uint32_t need;
	void *buf;
	int rc;

	*img = (struct qcow2_img){ .file = file, .name = name };
	rc = co_qcow2_img_read(img, 0, head, sizeof(head), err);
	if (!rc)
		rc = qcow2_header_probe(head, min((uint64_t)sizeof(head), file->size), name, &need, err);
	if (rc)
		return rc;
	buf = qcow2_img_alloc(need);
	if (!buf)
		return err_errno(err, -ENOMEM, "%s", name);
	rc = co_qcow2_img_read(img, 0, buf, need, err);
	if (!rc)
		rc = qcow2_header_parse(buf, min((uint64_t)need, file->size), name, flags, &img->h, err);
	free(buf);
	if (!rc)
		img->end = align_up(file->size, img->h.geo.cluster_size);
	return rc;
}

void qcow2_img_close(struct qcow2_img *img)
{
	qcow2_snaps_free(img);
	qcow2_bms_free(img);
	qcow2_header_fini(&img->h);
	free(img->rt);
	*img = (struct qcow2_img){ 0 };
}

co_fn int co_qcow2_img_read_rt(struct qcow2_img *img, struct err *err)
{
	uint64_t len = (uint64_t)img->h.rt_clusters << img->h.geo.cluster_bits, there;
	uint8_t *buf;
	int rc;

	free(img->rt);
	img->rt = NULL;
	img->rt_entries = 0;
	if (img->h.rt_off >= img->end)
		return 0;
	/* No more than the file has. */
	there = min(len, img->end - img->h.rt_off);
	buf = qcow2_img_alloc(there);
	img->rt = calloc(there / 8, 8);
	if (!buf || !img->rt) {
		free(buf);
		return err_errno(err, -ENOMEM, "%s", img->name);
	}
	rc = co_qcow2_img_read(img, img->h.rt_off, buf, there, err);
	if (!rc)
		img->rt_entries = there / 8;
	for (uint64_t i = 0; i < img->rt_entries; i++)
		img->rt[i] = get_be64(buf + i * 8);
	free(buf);
	return rc;
}
