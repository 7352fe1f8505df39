/* SPDX-License-Identifier: MIT */
/*
 * qcow2: making a new image.
 *
 * The layout: header, refcount table, refcount blocks, L1 table, and with preallocation L2 tables and data clusters, each as one run. The refcount
 * table has room for the whole image fully allocated, so that a writer does not have to move it soon.
 *
 * Invariant: what was there is no image any more, on stable media, before anything else is written; the header's first sector is written last, after
 * a flush. So a file whose creation was cut short is the old image, or none.
 */
#include "format/qcow2/create.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "blk/disk.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/opts.h"

#define BUF (1u << 20)		/* at least a table; larger ones are one cluster */
#define SECTOR 512u
#define ZERO_STEP (64ull << 20)

/* --- Options --- */

static const char *const compat_names[] = { "0.10", "1.1", "v2", "v3", NULL };
static const char *const compression_names[] = { "zlib", "zstd", NULL };
static const char *const prealloc_names[] = { "off", "metadata", "falloc", "full", NULL };

/* Options that QEMU knows and weir does not. */
static int refuse_foreign(struct opts *o, const char *name, struct err *err)
{
	for (size_t i = 0; i < o->n; i++)
		if (!strncmp(o->v[i].key, "encrypt", 7))
			return err_set(err, -ENOTSUP, "%s: %.40s: encrypted images are not supported; encrypt the disk in the guest or the file system below",
				       name, o->v[i].key);
	return 0;
}

int qcow2_create_options(struct qcow2_create *c, struct opts *o, const char *name, struct err *err)
{
	int compat = 1, compression = QCOW2_ZLIB, prealloc = QCOW2_PREALLOC_OFF, rc = refuse_foreign(o, name, err);

	c->cluster_size = 65536;
	c->refcount_bits = 16;
	if (!rc)
		rc = opts_size(o, "size", &c->size, err);
	if (!rc)
		rc = opts_enum(o, "compat", compat_names, &compat, err);
	if (!rc)
		rc = opts_size(o, "cluster_size", &c->cluster_size, err);
	if (!rc)
		rc = opts_u64(o, "refcount_bits", 1, 64, &c->refcount_bits, err);
	if (!rc)
		rc = opts_bool(o, "extended_l2", &c->ext_l2, err);
	if (!rc)
		rc = opts_bool(o, "lazy_refcounts", &c->lazy_refcounts, err);
	if (!rc)
		rc = opts_enum(o, "compression_type", compression_names, &compression, err);
	if (!rc)
		rc = opts_enum(o, "preallocation", prealloc_names, &prealloc, err);
	if (!rc)
		rc = opts_bool(o, "data_file_raw", &c->data_file_raw, err);
	c->version = compat % 2 ? 3 : 2;
	c->compression = (enum qcow2_compression)compression;
	c->prealloc = (enum qcow2_prealloc)prealloc;
	c->backing_file = opts_str(o, "backing_file");
	c->backing_format = opts_str(o, "backing_fmt");
	c->data_file = opts_str(o, "data_file");
	return rc ? rc : opts_finish(o, name, QCOW2_CREATE_OPTIONS, err);
}

static int check_version(const struct qcow2_create *c, const char *name, struct err *err)
{
	const char *what = c->ext_l2 ? "extended_l2" : c->lazy_refcounts ? "lazy_refcounts" : c->data_file ? "data_file" :
			   c->compression != QCOW2_ZLIB ? "compression_type=zstd" : c->refcount_bits != 16 ? "refcount_bits other than 16" : NULL;

	if (c->version < 3 && what)
		return err_set(err, -EINVAL, "%s: %s needs version 3 of the format; leave compat=0.10 away", name, what);
	return 0;
}

static int check_files(const struct qcow2_create *c, const char *name, struct err *err)
{
	if (c->data_file_raw && !c->data_file)
		return err_set(err, -EINVAL, "%s: data_file_raw needs data_file=NAME", name);
	if (c->data_file_raw && c->backing_file)
		return err_set(err, -EINVAL, "%s: a raw data file holds everything, so that there can be no backing file; leave one of them away", name);
	if (c->backing_format && !c->backing_file)
		return err_set(err, -EINVAL, "%s: backing_fmt needs backing_file=NAME", name);
	if (c->backing_file && !c->backing_format)
		return err_set(err, -EINVAL, "%s: the format of the backing file must be said, contents are never probed: backing_fmt=raw or backing_fmt=qcow2",
			       name);
	if (c->backing_file && c->prealloc != QCOW2_PREALLOC_OFF && !c->ext_l2)
		return err_set(err, -EINVAL, "%s: preallocated clusters would hide the backing file; extended_l2=on makes both possible", name);
	if ((c->backing_file && (!*c->backing_file || strlen(c->backing_file) > QCOW2_MAX_BACKING_NAME)) ||
	    (c->data_file && (!*c->data_file || strlen(c->data_file) > QCOW2_MAX_BACKING_NAME)))
		return err_set(err, -ENAMETOOLONG, "%s: the names of the backing and the data file have 1 to %d bytes", name, QCOW2_MAX_BACKING_NAME);
	return 0;
}

int qcow2_create_check(struct qcow2_create *c, const char *name, struct err *err)
{
	struct qcow2_geo g;
	int rc;

	if (c->cluster_size < 1u << QCOW2_MIN_CLUSTER_BITS || c->cluster_size > 1u << QCOW2_MAX_CLUSTER_BITS || !is_pow2(c->cluster_size))
		return err_set(err, -EINVAL, "%s: cluster_size=%" PRIu64 ": must be a power of two from 512 to 2M", name, c->cluster_size);
	if (c->ext_l2 && c->cluster_size < 1u << QCOW2_MIN_EXT_CLUSTER_BITS)
		return err_set(err, -EINVAL, "%s: extended_l2 needs a cluster_size of at least 16K", name);
	if (!is_pow2(c->refcount_bits))
		return err_set(err, -EINVAL, "%s: refcount_bits=%" PRIu64 ": must be 1, 2, 4, 8, 16, 32 or 64", name, c->refcount_bits);
	rc = check_version(c, name, err);
	if (!rc)
		rc = check_files(c, name, err);
	if (rc)
		return rc;
	if (c->size > INT64_MAX - 511)
		return err_set(err, -EFBIG, "%s: is larger than any disk can be", name);
	c->size = align_up(c->size, 512);
	/* Whoever reads the raw data file must find the data at its own offset. */
	if (c->data_file_raw && c->prealloc == QCOW2_PREALLOC_OFF)
		c->prealloc = QCOW2_PREALLOC_METADATA;
	qcow2_geo_init(&g, (unsigned)__builtin_ctzll(c->cluster_size), c->ext_l2, (unsigned)__builtin_ctzll(c->refcount_bits));
	if (c->size > qcow2_max_size(&g))
		return err_set(err, -EFBIG, "%s: with clusters of %" PRIu64 " bytes an image has at most %" PRIu64 " bytes; choose a larger cluster_size", name,
			       c->cluster_size, qcow2_max_size(&g));
	return 0;
}

/* --- Layout --- */

struct create {
	const struct qcow2_create *c;
	struct disk *file, *data;
	struct qcow2_geo g;
	uint64_t rt, rb, l1, l2, host;		/* clusters of each kind; host: data clusters in the image itself */
	uint64_t rb_at, l1_at, l2_at, host_at, end;	/* cluster numbers */
	uint8_t *buf, *head;
	size_t buf_size;
};

static uint64_t div_up(uint64_t a, uint64_t b)
{
	return a / b + !!(a % b);
}

static void make_layout(struct create *y)
{
	const struct qcow2_geo *g = &y->g;
	uint64_t guest = qcow2_clusters(g, y->c->size), l1_entries = qcow2_l1_entries(g, y->c->size), all, before;
	bool prealloc = y->c->prealloc != QCOW2_PREALLOC_OFF;

	y->l1 = qcow2_clusters(g, l1_entries * 8);
	y->l2 = prealloc ? l1_entries : 0;
	y->host = prealloc && !y->data ? guest : 0;
	/* The refcounts of everything that the image can ever hold without snapshots decide the table's size; what it holds now, the blocks. */
	for (all = 1 + y->l1 + l1_entries + (y->data ? 0 : guest), before = 0; all != before;) {
		uint64_t blocks = div_up(all, 1ull << g->rb_bits);

		before = all;
		y->rt = min(qcow2_clusters(g, blocks * 8), (uint64_t)max(QCOW2_MAX_RT_BYTES, g->cluster_size) >> g->cluster_bits);
		all = 1 + y->l1 + l1_entries + (y->data ? 0 : guest) + y->rt + blocks;
	}
	for (y->rb = 1, before = 0; y->rb != before;) {
		before = y->rb;
		y->end = 1 + y->rt + y->rb + y->l1 + y->l2 + y->host;
		y->rb = max(y->rb, div_up(y->end, 1ull << g->rb_bits));
	}
	y->rb_at = 1 + y->rt;
	y->l1_at = y->rb_at + y->rb;
	y->l2_at = y->l1_at + y->l1;
	y->host_at = y->l2_at + y->l2;
}

/* --- Writing --- */

static int write_error(const struct create *y, const struct disk *d, int rc, struct err *err)
{
	if (rc == -ENOSPC)
		return err_set(err, rc, "%s: no space left; make room, or choose less preallocation", d->name);
	return err_errno(err, rc, "%s: cannot be written", d->name);
}

static bool stopped(const struct create *y)
{
	return y->c->stop && *y->c->stop;
}

typedef void fill_fn(const struct create *y, uint8_t *buf, uint64_t first, uint64_t n);

/* Writes `clusters` from cluster `at` on; `fill` makes n bytes from byte `first` of that run on, in a buffer of zeroes. */
static co_fn int co_write_run(struct create *y, uint64_t at, uint64_t clusters, fill_fn *fill, struct err *err)
{
	uint64_t bytes = clusters << y->g.cluster_bits, n;

	for (uint64_t done = 0; done < bytes; done += n) {
		int rc;

		n = min(bytes - done, (uint64_t)y->buf_size);
		memset(y->buf, 0, n);
		fill(y, y->buf, done, n);
		rc = stopped(y) ? -ECANCELED : co_disk_write(y->file, (at << y->g.cluster_bits) + done, y->buf, n, 0);
		if (rc)
			return write_error(y, y->file, rc, err);
	}
	return 0;
}

/* Entries of 8 bytes that name consecutive clusters, with `flags`. */
static void fill_table(uint8_t *buf, uint64_t first, uint64_t n, uint64_t entries, uint64_t at, unsigned bits, uint64_t flags)
{
	for (uint64_t i = first / 8, k = 0; k < n; i++, k += 8)
		if (i < entries)
			put_be64(buf + k, (at + i) << bits | flags);
}

static void fill_rt(const struct create *y, uint8_t *buf, uint64_t first, uint64_t n)
{
	fill_table(buf, first, n, y->rb, y->rb_at, y->g.cluster_bits, 0);
}

static void fill_l1(const struct create *y, uint8_t *buf, uint64_t first, uint64_t n)
{
	fill_table(buf, first, n, y->l2, y->l2_at, y->g.cluster_bits, QCOW2_COPIED);
}

/* first and n are whole clusters or powers of two larger than an entry's width. */
static void fill_rb(const struct create *y, uint8_t *buf, uint64_t first, uint64_t n)
{
	uint64_t index = (first * 8) >> y->g.refcount_order, count = (n * 8) >> y->g.refcount_order;

	for (uint64_t i = 0; i < count && index + i < y->end; i++)
		qcow2_refcount_set(y->g.refcount_order, buf, (uint32_t)i, 1);
}

static void fill_l2(const struct create *y, uint8_t *buf, uint64_t first, uint64_t n)
{
	uint64_t index = first / y->g.l2_entry_size, guest = qcow2_clusters(&y->g, y->c->size);

	for (uint64_t i = 0; i < n / y->g.l2_entry_size && index + i < guest; i++) {
		uint64_t host = (y->data ? index + i : y->host_at + index + i) << y->g.cluster_bits;

		/* Where entries are extended, subclusters stay unallocated: they read as zeroes, or from the backing file. */
		qcow2_l2_put(&y->g, buf, (uint32_t)i, (struct qcow2_l2e){ host | QCOW2_COPIED, 0 });
	}
}

static co_fn int co_write_full(struct create *y, struct disk *d, uint64_t off, uint64_t end, struct err *err)
{
	uint64_t start = off, n;

	memset(y->buf, 0, y->buf_size);
	for (; off < end; off += n) {
		int rc;

		n = min(end - off, (uint64_t)y->buf_size);
		rc = stopped(y) ? -ECANCELED : co_disk_write(d, off, y->buf, n, 0);
		if (rc)
			return write_error(y, d, rc, err);
		if (y->c->progress)
			y->c->progress(y->c->progress_arg, off + n - start, end - start);
	}
	return 0;
}

/* What the place held before shows nowhere. */
static co_fn int co_make_zero(struct create *y, struct disk *d, uint64_t off, uint64_t end, struct err *err)
{
	struct disk_extent e;
	int rc;

	for (; off < end; off += e.len) {
		rc = stopped(y) ? -ECANCELED : co_disk_extent(d, off, min(end - off, ZERO_STEP), &e);
		if (!rc && !e.zero)
			rc = co_disk_zero(d, off, e.len, DISK_UNMAP);
		if (rc)
			return write_error(y, d, rc, err);
	}
	return 0;
}

/* Space for the data clusters. */
static co_fn int co_preallocate(struct create *y, struct err *err)
{
	struct disk *d = y->data ? y->data : y->file;
	uint64_t off = y->data ? 0 : y->host_at << y->g.cluster_bits, end = y->data ? y->c->size : y->end << y->g.cluster_bits, n;

	if (y->c->prealloc == QCOW2_PREALLOC_FULL)
		return co_write_full(y, d, off, end, err);
	if (y->c->prealloc == QCOW2_PREALLOC_METADATA)
		return co_make_zero(y, d, off, end, err);
	for (; y->c->prealloc == QCOW2_PREALLOC_FALLOC && off < end; off += n) {
		int rc;

		n = min(end - off, ZERO_STEP);
		rc = stopped(y) ? -ECANCELED : co_disk_zero(d, off, n, 0);
		if (rc)
			return write_error(y, d, rc, err);
	}
	return 0;
}

static int add_names(struct qcow2_header *h, const struct qcow2_create *c)
{
	const char *const from[] = { c->backing_file, c->backing_format, c->data_file };
	char **const to[] = { &h->backing_file, &h->backing_format, &h->data_file };

	for (size_t i = 0; i < ARRAY_SIZE(from); i++) {
		*to[i] = from[i] ? strdup(from[i]) : NULL;
		if (from[i] && !*to[i])
			return -ENOMEM;
	}
	return c->version >= 3 ? qcow2_header_add_feature_names(h) : 0;
}

/* The header in y->head, of a cluster. */
static int make_header(struct create *y, struct err *err)
{
	const struct qcow2_create *c = y->c;
	struct qcow2_header h = {
		.geo = y->g, .version = c->version, .size = c->size, .l1_size = (uint32_t)qcow2_l1_entries(&y->g, c->size),
		.l1_off = y->l1 ? y->l1_at << y->g.cluster_bits : 0, .rt_off = y->g.cluster_size, .rt_clusters = (uint32_t)y->rt,
		.header_len = c->version < 3 ? QCOW2_V2_HEADER_LEN : QCOW2_FULL_HEADER_LEN, .compression_type = c->compression,
		.incompat = (c->ext_l2 ? QCOW2_INCOMPAT_EXTL2 : 0) | (c->data_file ? QCOW2_INCOMPAT_DATA_FILE : 0) |
			    (c->compression ? QCOW2_INCOMPAT_COMPRESSION : 0),
		.compat = c->lazy_refcounts ? QCOW2_COMPAT_LAZY_REFCOUNTS : 0,
		.autoclear = c->data_file_raw ? QCOW2_AUTOCLEAR_DATA_FILE_RAW : 0,
	};
	int rc = add_names(&h, c);

	y->head = aligned_alloc(4096, max(y->g.cluster_size, 4096u));
	rc = rc || !y->head ? err_errno(err, rc ? rc : -ENOMEM, "%s", y->file->name) : 0;
	if (!rc) {
		rc = qcow2_header_serialise(&h, y->head, y->file->name, err);
		/* The names of features are a courtesy: small clusters have no room for them. */
		if (rc == -ENOSPC && h.next) {
			free(h.ext[--h.next].data);
			err_clear(err);
			rc = qcow2_header_serialise(&h, y->head, y->file->name, err);
		}
	}
	qcow2_header_fini(&h);
	return rc;
}

/* What was an image is none while its clusters are overwritten. */
static co_fn int co_clear_old(struct create *y)
{
	uint8_t head[SECTOR];
	int rc = co_disk_read(y->file, 0, head, sizeof(head), 0);

	if (rc || bytes_are_zero(head, sizeof(head)))
		return rc;
	memset(head, 0, sizeof(head));
	rc = co_disk_write(y->file, 0, head, sizeof(head), 0);
	return rc ? rc : co_disk_flush(y->file);
}

/* Room for the image: a file gets it, a device must have it. */
static co_fn int co_make_room(struct create *y, struct err *err)
{
	uint64_t need = y->end << y->g.cluster_bits;
	int rc = 0;

	if (need > y->file->size)
		rc = co_disk_resize(y->file, need, err);
	if (rc == -ENOTSUP) {
		err_clear(err);
		return err_set(err, -ENOSPC, "%s: has %" PRIu64 " bytes, the new image needs %" PRIu64 "; choose a larger device", y->file->name,
			       y->file->size, need);
	}
	if (!rc && y->data && y->data->size < y->c->size)
		rc = co_disk_resize(y->data, y->c->size, err);
	return rc;
}

static co_fn int co_fill(struct create *y, struct err *err)
{
	int rc = co_make_room(y, err);

	if (!rc)
		rc = make_header(y, err);
	if (rc)
		return rc;
	rc = co_clear_old(y);
	if (rc)
		return write_error(y, y->file, rc, err);
	rc = co_write_run(y, 1, y->rt, fill_rt, err);
	if (!rc)
		rc = co_write_run(y, y->rb_at, y->rb, fill_rb, err);
	if (!rc)
		rc = co_write_run(y, y->l1_at, y->l1, fill_l1, err);
	if (!rc)
		rc = co_write_run(y, y->l2_at, y->l2, fill_l2, err);
	if (!rc)
		rc = co_preallocate(y, err);
	if (rc)
		return rc;
	rc = y->data ? co_disk_flush(y->data) : 0;
	if (rc)
		return write_error(y, y->data, rc, err);
	/* The first sector makes it an image: the rest of the header, and everything else, is stable before. */
	if (y->g.cluster_size > SECTOR)
		rc = co_disk_write(y->file, SECTOR, y->head + SECTOR, y->g.cluster_size - SECTOR, 0);
	if (!rc)
		rc = co_disk_flush(y->file);
	if (!rc)
		rc = co_disk_write(y->file, 0, y->head, SECTOR, 0);
	if (!rc)
		rc = co_disk_flush(y->file);
	return rc ? write_error(y, y->file, rc, err) : 0;
}

co_fn int co_qcow2_create(struct disk *file, struct disk *data, const struct qcow2_create *c, struct err *err)
{
	struct create y = { .c = c, .file = file, .data = data };
	int rc;

	qcow2_geo_init(&y.g, (unsigned)__builtin_ctzll(c->cluster_size), c->ext_l2, (unsigned)__builtin_ctzll(c->refcount_bits));
	make_layout(&y);
	if (y.end > (uint64_t)INT64_MAX >> y.g.cluster_bits)
		return err_set(err, -EFBIG, "%s: is too large to be preallocated", file->name);
	y.buf_size = max(BUF, y.g.cluster_size);
	y.buf = aligned_alloc(4096, y.buf_size);
	if (!y.buf)
		return err_errno(err, -ENOMEM, "%s", file->name);
	rc = co_fill(&y, err);
	free(y.buf);
	free(y.head);
	return rc;
}
