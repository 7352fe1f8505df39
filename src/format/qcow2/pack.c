/* SPDX-License-Identifier: MIT */
/*
 * qcow2: filling a new image with compressed clusters.
 *
 * Compressed clusters are packed one behind the other, at any byte, into a stretch of the file that is put together in memory and written when it is full. L2
 * tables are in memory while they are filled; the one of the lowest offset goes to the file when there is no room, and comes back if it is needed again. All
 * of it lies behind the empty image that was there at first, and co_qcow2_commit() puts it in force.
 *
 * Memory: a stretch of 4 MiB or 16 clusters, L2 tables of 1 MiB or 8 clusters, the L1 table, two bytes for each cluster of the file, and a
 * compressor with a cluster for each worker.
 *
 * A compressed cluster is raw deflate with a window of 4 KiB, or a zstd frame, of a whole cluster, zeroes behind the end of the disk (QEMU's qcow2.rst).
 */
#include "format/qcow2/pack.h"

#include <errno.h>
#include <stdlib.h>
#include <zlib.h>
#include <zstd.h>

#include "blk/disk.h"
#include "format/qcow2/tools.h"
#include "rt/sync.h"
#include "util/err.h"

#define STRETCH (4u << 20)
#define TABLES (1u << 20)
#define MAX_WORKERS 32
#define WINDOW_BITS (-12)	/* raw */

struct job {
	struct job *next;
	enum qcow2_compression type;
	z_stream z;
	ZSTD_CCtx *zstd;
	const uint8_t *in;
	uint8_t *out;
	uint32_t size, out_len;	/* of a cluster; out_len 0: it does not get smaller */
};

struct table {
	uint64_t index;		/* of the L1 table */
	uint8_t *data;		/* NULL: free */
};

struct qcow2_packer {
	struct qcow2_img img;
	struct qcow2_commit c;
	bool committing;
	enum qcow2_compression type;
	struct job job[MAX_WORKERS], *idle;
	struct co_sem jobs;
	struct co_mutex lock;	/* everything below */
	uint8_t *stretch, *short_in, *zeroes;
	uint64_t at;		/* the stretch's offset in the file; 0: none */
	uint32_t used, room;
	uint64_t *l1;		/* host order, offsets */
	struct table *table;
	unsigned ntables;
};

/* --- Compression --- */

static int job_init(struct job *j, enum qcow2_compression type, uint32_t size)
{
	j->type = type;
	j->size = size;
	j->out = qcow2_img_alloc(size);
	if (!j->out)
		return -ENOMEM;
	if (type == QCOW2_ZSTD) {
		j->zstd = ZSTD_createCCtx();
		return j->zstd ? 0 : -ENOMEM;
	}
	if (deflateInit2(&j->z, Z_DEFAULT_COMPRESSION, Z_DEFLATED, WINDOW_BITS, 9, Z_DEFAULT_STRATEGY) != Z_OK) {
		free(j->out);
		j->out = NULL;
		return -ENOMEM;
	}
	return 0;
}

static void job_fini(struct job *j)
{
	if (j->out && j->type == QCOW2_ZLIB)
		deflateEnd(&j->z);
	ZSTD_freeCCtx(j->zstd);
	free(j->out);
}

/*
 * Whether the bytes are spread as random ones are: then deflate would only find out slowly that they do not get smaller. The sum of squares of n random bytes'
 * counts is about n * n / 256 + n, with a deviation of 0.09 n; what repeats is above, what counts up evenly is below.
 */
static bool looks_random(const uint8_t *p, uint32_t n)
{
	uint32_t count[4][256] = { 0 };
	int64_t sum = 0, even = (int64_t)n * n / 256 + n;

	for (uint32_t i = 0; i < n; i += 4)
		for (unsigned k = 0; k < 4; k++)
			count[k][p[i + k]]++;
	for (unsigned i = 0; i < 256; i++) {
		int64_t c = (int64_t)count[0][i] + count[1][i] + count[2][i] + count[3][i];

		sum += c * c;
	}
	return n >= 4096 && sum > even - n / 3 && sum < even + n / 3;
}

static int compress_blocking(void *arg)
{
	struct job *j = arg;

	j->out_len = 0;
	if (j->type == QCOW2_ZLIB && looks_random(j->in, j->size))
		return 0;
	if (j->type == QCOW2_ZSTD) {
		size_t n = ZSTD_compressCCtx(j->zstd, j->out, j->size - 1, j->in, j->size, ZSTD_CLEVEL_DEFAULT);

		j->out_len = ZSTD_isError(n) ? 0 : (uint32_t)n;
		return 0;
	}
	if (deflateReset(&j->z) != Z_OK)
		return -EIO;
	j->z.next_in = (uint8_t *)j->in;
	j->z.avail_in = j->size;
	j->z.next_out = j->out;
	j->z.avail_out = j->size - 1;
	if (deflate(&j->z, Z_FINISH) == Z_STREAM_END)
		j->out_len = j->size - 1 - j->z.avail_out;
	return 0;
}

/* --- Space --- */

/* Clusters behind everything else; their refcounts are the caller's to set. */
static co_fn int co_append(struct qcow2_packer *p, uint64_t clusters, uint64_t *ret_off)
{
	*ret_off = co_qcow2_commit_append(&p->c, clusters, NULL);
	return *ret_off ? 0 : -ENOSPC;
}

static void refer(struct qcow2_packer *p, uint64_t off, uint32_t len, bool table)
{
	struct qcow2_ref r = { .kind = table ? QCOW2_REF_L2 : QCOW2_REF_DATA, .off = off, .len = len };

	qcow2_count_add(&p->c.count, &p->img.h.geo, &r, 1);
}

static co_fn int co_end_stretch(struct qcow2_packer *p)
{
	uint32_t len = (uint32_t)align_up(p->used, 4096);
	int rc;

	if (!p->at || !p->used)
		return 0;
	memset(p->stretch + p->used, 0, len - p->used);
	rc = co_disk_write(p->img.file, p->at, p->stretch, len, 0);
	p->at = 0;
	return rc;
}

/* Where the cluster at p->used may not have another reference, the rest of it is left free. */
static void skip_full_cluster(struct qcow2_packer *p)
{
	const struct qcow2_geo *g = &p->img.h.geo;

	if ((p->used & (g->cluster_size - 1)) && qcow2_count_get(&p->c.count, (p->at + p->used) >> g->cluster_bits) >= min(g->refcount_max, 16000ull)) {
		memset(p->stretch + p->used, 0, align_up(p->used, g->cluster_size) - p->used);
		p->used = (uint32_t)align_up(p->used, g->cluster_size);
	}
}

/* Puts compressed data behind what is there. */
static co_fn int co_put(struct qcow2_packer *p, const struct job *j, uint64_t *ret_off)
{
	int rc = 0;

	if (p->at)
		skip_full_cluster(p);
	if (!p->at || p->room - p->used < j->out_len) {
		rc = co_end_stretch(p);
		if (!rc)
			rc = co_append(p, p->room >> p->img.h.geo.cluster_bits, &p->at);
		p->used = 0;
	}
	if (rc)
		return rc;
	memcpy(p->stretch + p->used, j->out, j->out_len);
	*ret_off = p->at + p->used;
	p->used += j->out_len;
	refer(p, *ret_off, j->out_len, false);
	return 0;
}

/* --- L2 tables --- */

static co_fn int co_write_table(struct qcow2_packer *p, struct table *t)
{
	uint32_t cs = p->img.h.geo.cluster_size;
	int rc = 0;

	if (!p->l1[t->index]) {
		rc = co_append(p, 1, &p->l1[t->index]);
		if (!rc)
			refer(p, p->l1[t->index], cs, true);
	}
	return rc ? rc : co_disk_write(p->img.file, p->l1[t->index], t->data, cs, 0);
}

/* The table for an index, from memory, from the file, or new. */
static co_fn int co_table(struct qcow2_packer *p, uint64_t index, struct table **ret)
{
	struct table *free_slot = NULL, *lowest = NULL;
	uint32_t cs = p->img.h.geo.cluster_size;
	int rc = 0;

	for (unsigned i = 0; i < p->ntables; i++) {
		struct table *t = &p->table[i];

		if (t->data && t->index == index) {
			*ret = t;
			return 0;
		}
		if (!t->data && !free_slot)
			free_slot = t;
		if (t->data && (!lowest || t->index < lowest->index))
			lowest = t;
	}
	if (free_slot) {
		free_slot->data = qcow2_img_alloc(cs);
		if (!free_slot->data)
			return -ENOMEM;
	} else {
		rc = co_write_table(p, lowest);
		free_slot = lowest;
		memset(free_slot->data, 0, cs);
	}
	free_slot->index = index;
	if (!rc && p->l1[index])
		rc = co_disk_read(p->img.file, p->l1[index], free_slot->data, cs, 0);
	*ret = free_slot;
	return rc;
}

static co_fn int co_set_entry(struct qcow2_packer *p, uint64_t guest, uint64_t entry)
{
	const struct qcow2_geo *g = &p->img.h.geo;
	struct table *t;
	int rc = co_table(p, qcow2_l1_index(g, guest), &t);

	if (!rc)
		qcow2_l2_put(g, t->data, qcow2_l2_index(g, guest), (struct qcow2_l2e){ entry, entry & QCOW2_COMPRESSED || !g->ext ? 0 : UINT32_MAX });
	return rc;
}

static co_fn int co_set_zero(struct qcow2_packer *p, uint64_t guest)
{
	const struct qcow2_geo *g = &p->img.h.geo;
	struct table *t;
	int rc = co_table(p, qcow2_l1_index(g, guest), &t);

	if (!rc)
		qcow2_l2_put(g, t->data, qcow2_l2_index(g, guest), g->ext ? (struct qcow2_l2e){ 0, (uint64_t)UINT32_MAX << 32 } : (struct qcow2_l2e){ QCOW2_ZERO, 0 });
	return rc;
}

/* --- Writing --- */

/* What does not get smaller is an ordinary cluster. */
static co_fn int co_put_plain(struct qcow2_packer *p, uint64_t off, const uint8_t *buf)
{
	const struct qcow2_geo *g = &p->img.h.geo;
	uint64_t host;
	int rc;

	co_mutex_lock(&p->lock);
	rc = co_append(p, 1, &host);
	if (!rc) {
		refer(p, host, g->cluster_size, false);
		rc = co_set_entry(p, off, host | QCOW2_COPIED);
	}
	co_mutex_unlock(&p->lock);
	return rc ? rc : co_disk_write(p->img.file, host, buf, g->cluster_size, 0);
}

static co_fn int co_put_packed(struct qcow2_packer *p, uint64_t off, const struct job *j)
{
	uint64_t host, entry;
	int rc;

	co_mutex_lock(&p->lock);
	rc = co_put(p, j, &host);
	if (!rc) {
		entry = qcow2_l2_make_compressed(&p->img.h.geo, host, j->out_len);
		rc = entry ? co_set_entry(p, off, entry) : -EFBIG;
	}
	co_mutex_unlock(&p->lock);
	return rc;
}

co_fn int co_qcow2_pack_write(void *packer, uint64_t off, const void *buf, uint64_t len)
{
	struct qcow2_packer *p = packer;
	uint32_t cs = p->img.h.geo.cluster_size;
	struct job *j;
	int rc;

	if (len < cs) {
		memset(p->short_in, 0, cs);
		memcpy(p->short_in, buf, len);
		buf = p->short_in;
	}
	co_sem_take(&p->jobs, "a compressor");
	j = p->idle;
	p->idle = j->next;
	j->in = buf;
	rc = co_offload(compress_blocking, j);
	if (!rc)
		rc = j->out_len ? co_put_packed(p, off, j) : co_put_plain(p, off, buf);
	j->next = p->idle;
	p->idle = j;
	co_sem_give(&p->jobs);
	return rc;
}

co_fn int co_qcow2_pack_zero(void *packer, uint64_t off, uint64_t len)
{
	struct qcow2_packer *p = packer;
	uint32_t cs = p->img.h.geo.cluster_size;
	int rc = 0;

	for (uint64_t at = off; at < off + len && !rc; at += cs) {
		/* Version 2 cannot say it. */
		if (p->img.h.version < 3) {
			rc = co_qcow2_pack_write(p, at, p->zeroes, cs);
			continue;
		}
		co_mutex_lock(&p->lock);
		rc = co_set_zero(p, at);
		co_mutex_unlock(&p->lock);
	}
	return rc;
}

/* --- Begin and end --- */

static bool keep_ref(struct qcow2_walk *w, const struct qcow2_ref *r)
{
	struct qcow2_packer *p = w->arg;

	qcow2_commit_use_old(&p->c, r);
	if (r->kind == QCOW2_REF_HEADER)
		qcow2_count_add(&p->c.count, &p->img.h.geo, r, 1);
	return false;
}

static co_fn int co_begin(struct qcow2_packer *p, struct disk *file, const struct qcow2_create *c, unsigned workers, struct err *err)
{
	struct qcow2_walk w = { .img = &p->img, .arg = p, .ref = keep_ref };
	uint32_t cs = (uint32_t)c->cluster_size;
	int rc = co_qcow2_create(file, NULL, c, err);

	if (!rc)
		rc = co_qcow2_img_open(&p->img, file, file->name, 0, err);
	if (!rc)
		rc = co_qcow2_img_read_rt(&p->img, err);
	if (!rc)
		rc = qcow2_commit_init(&p->c, &p->img, err);
	if (!rc)
		rc = co_qcow2_walk(&w, err);
	if (rc)
		return rc;
	p->room = max(STRETCH, 16 * cs);
	p->ntables = max(8u, TABLES / cs);
	p->stretch = qcow2_img_alloc(p->room);
	p->short_in = qcow2_img_alloc(cs);
	p->zeroes = qcow2_img_alloc(cs);
	p->l1 = calloc(max(p->img.h.l1_size, 1u), sizeof(*p->l1));
	p->table = calloc(p->ntables, sizeof(*p->table));
	rc = p->stretch && p->short_in && p->zeroes && p->l1 && p->table ? 0 : -ENOMEM;
	for (unsigned i = 0; i < workers && !rc; i++) {
		rc = job_init(&p->job[i], c->compression, cs);
		p->job[i].next = p->idle;
		p->idle = &p->job[i];
	}
	return rc ? err_errno(err, rc, "%s", file->name) : 0;
}

static co_fn void co_destroy(struct qcow2_packer *p)
{
	for (unsigned i = 0; i < MAX_WORKERS; i++)
		job_fini(&p->job[i]);
	for (unsigned i = 0; i < p->ntables && p->table; i++)
		free(p->table[i].data);
	free(p->table);
	free(p->l1);
	free(p->stretch);
	free(p->short_in);
	free(p->zeroes);
	qcow2_commit_fini(&p->c);
	qcow2_img_close(&p->img);
	free(p);
}

co_fn int co_qcow2_pack_begin(struct qcow2_packer **ret, struct disk *file, const struct qcow2_create *c, unsigned workers, struct err *err)
{
	struct qcow2_packer *p;
	int rc;

	if (c->data_file || c->prealloc != QCOW2_PREALLOC_OFF)
		return err_set(err, -ENOTSUP, "%s: a compressed image has no data file and no preallocation; leave them away, or do not compress", file->name);
	p = calloc(1, sizeof(*p));
	if (!p)
		return err_errno(err, -ENOMEM, "%s", file->name);
	workers = min(workers, (unsigned)MAX_WORKERS);
	co_sem_init(&p->jobs, workers);
	co_mutex_init(&p->lock);
	rc = co_begin(p, file, c, workers, err);
	if (rc)
		co_destroy(p);
	else
		*ret = p;
	return rc;
}

static co_fn int co_finish(struct qcow2_packer *p, struct err *err)
{
	const struct qcow2_geo *g = &p->img.h.geo;
	uint64_t clusters = qcow2_clusters(g, (uint64_t)p->img.h.l1_size * 8), off = 0;
	struct qcow2_ref r = { .kind = QCOW2_REF_L1 };
	uint8_t *buf = qcow2_img_alloc(max(clusters, 1ull) << g->cluster_bits);
	int rc = buf ? co_end_stretch(p) : -ENOMEM;

	for (unsigned i = 0; i < p->ntables && !rc; i++)
		if (p->table[i].data)
			rc = co_write_table(p, &p->table[i]);
	for (uint32_t i = 0; i < p->img.h.l1_size && !rc; i++)
		put_be64(buf + (size_t)i * 8, p->l1[i] ? p->l1[i] | QCOW2_COPIED : 0);
	if (!rc && clusters)
		rc = co_append(p, clusters, &off);
	if (!rc && clusters)
		rc = co_disk_write(p->img.file, off, buf, clusters << g->cluster_bits, 0);
	free(buf);
	if (rc)
		return rc == -ENOSPC ? err_set(err, rc, "%s: no space left; make room and start again", p->img.name) :
				       err_errno(err, rc, "%s: cannot be written", p->img.name);
	r.off = off;
	r.len = clusters << g->cluster_bits;
	if (clusters)
		qcow2_count_add(&p->c.count, g, &r, 1);
	p->img.h.l1_off = off;
	return co_qcow2_commit(&p->c, err);
}

co_fn int co_qcow2_pack_end(struct qcow2_packer *p, bool ok, struct err *err)
{
	int rc = ok ? co_finish(p, err) : 0;

	co_destroy(p);
	return rc;
}
