/* SPDX-License-Identifier: MIT */
/*
 * qcow2: another size.
 *
 * Growing: a larger L1 table if it is needed, then zeroes over what would come to light (the rest of the last cluster, and a backing file that
 * is longer), and when all that is stable the new size. Shrinking: first the new size, then the clusters behind it are given up; a cut between leaves them mapped
 * behind the end, where the next growing removes them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/internal.h"

static co_fn int co_header(struct qcow2 *q)
{
	int ret;

	co_mutex_lock(&q->header_lock);
	ret = co_q2_write_header(q);
	co_mutex_unlock(&q->header_lock);
	return ret;
}

static uint64_t l1_bytes(const struct qcow2 *q, uint64_t entries)
{
	return align_up(max(entries * 8, 1ull), max(q->g.cluster_size, Q2_L1_CHUNK));
}

/* A larger L1 table somewhere else. Nothing is in flight that holds a pointer into the old one. */
static co_fn int co_grow_l1(struct qcow2 *q, uint64_t entries)
{
	uint64_t clusters = qcow2_clusters(&q->g, entries * 8), bytes = l1_bytes(q, entries), off, old_off = q->h.l1_off;
	uint64_t old_clusters = qcow2_clusters(&q->g, (uint64_t)q->h.l1_size * 8), chunks = bytes / Q2_L1_CHUNK, *dirty;
	uint8_t *l1, *shadow;
	int ret = co_q2_flush_tables(q);

	if (!ret)
		ret = co_q2_alloc_adjacent(q, clusters, &off);
	if (!ret)
		ret = q2_meta_add(q, off, clusters);
	if (ret)
		return ret;
	l1 = calloc(1, bytes);
	shadow = calloc(1, bytes);
	dirty = calloc((chunks + 63) / 64, sizeof(*dirty));
	if (!l1 || !shadow || !dirty) {
		ret = -ENOMEM;
		goto fail;
	}
	memcpy(l1, q->l1, (size_t)q->h.l1_size * 8);
	ret = co_disk_write(q->disk.file, off, l1, min(bytes, clusters << q->g.cluster_bits), 0);
	if (!ret)
		ret = co_disk_flush(q->disk.file);
	if (ret)
		goto fail;
	free(q->l1);
	free(q->l1_shadow);
	free(q->l1_dirty);
	q->l1 = l1;
	q->l1_shadow = shadow;
	q->l1_dirty = dirty;
	q->l1_chunks = chunks;
	q->h.l1_off = off;
	q->h.l1_size = entries;
	ret = co_header(q);
	if (ret)
		return disk_fail(&q->disk, ret, "qcow2: a larger L1 table");
	q2_meta_del(q, old_off, old_clusters);
	if (old_off)
		q2_free(q, old_off, old_clusters);
	return 0;
fail:
	q2_meta_del(q, off, clusters);
	q2_free(q, off, clusters);
	free(l1);
	free(shadow);
	free(dirty);
	return ret;
}

static co_fn int co_grow(struct qcow2 *q, uint64_t size)
{
	uint64_t old = q->disk.size, entries = qcow2_l1_entries(&q->g, size), cs = q->g.cluster_size, edge = min(align_up(old, cs), align_up(size, cs));
	uint64_t mapped = min(align_up(size, cs), (uint64_t)q->h.l1_size << (q->g.cluster_bits + q->g.l2_bits));
	int ret = 0;

	/* Left behind by a cut while it was shrunk. */
	if (mapped > edge)
		ret = co_q2_drop(q, edge, mapped - edge);
	if (!ret && entries > q->h.l1_size)
		ret = co_grow_l1(q, entries);
	q->disk.size = size;
	if (!ret && !is_aligned(old, cs))
		ret = co_disk_zero(&q->disk, old, min(edge, size) - old, 0);
	if (!ret && q->backing && q->backing->size > edge && size > edge)
		ret = co_q2_zero(&q->disk, edge, min(align_up(q->backing->size, cs), align_up(size, cs)) - edge, DISK_UNMAP);
	if (!ret)
		ret = co_q2_flush(&q->disk);
	if (!ret) {
		q->h.size = size;
		ret = co_header(q);
	}
	if (ret)
		q->disk.size = old;
	return ret;
}

static co_fn int co_shrink(struct qcow2 *q, uint64_t size)
{
	uint64_t cs = q->g.cluster_size, from = align_up(size, cs), to = align_up(q->disk.size, cs);
	int ret = co_q2_flush(&q->disk);

	if (ret)
		return ret;
	q->h.size = size;
	ret = co_header(q);
	if (ret)
		return disk_fail(&q->disk, ret, "qcow2: shrinking");
	q->disk.size = size;
	if (to > from)
		ret = co_q2_drop(q, from, to - from);
	return ret ? ret : co_q2_flush_tables(q);
}

co_fn int co_q2_resize(struct disk *d, uint64_t size)
{
	struct qcow2 *q = q2_of(d);
	int ret;

	/* Nothing is written, and no bitmap is lost, before all that can be refused is. */
	if (size == d->size)
		return 0;
	if (size > qcow2_max_size(&q->g))
		return -EFBIG;
	/* QEMU would not see the rest of a sector. */
	if (!is_aligned(size, 512))
		return -ENOTSUP;
	if (q->h.nb_snapshots && q->h.version < 3)
		return -ENOTSUP;
	ret = co_q2_ready(q);
	if (ret)
		return ret;
	if (q->has_data_file && size > q->data->size) {
		ret = co_disk_resize(q->data, size, NULL);
		if (ret)
			return ret;
	}
	return size > d->size ? co_grow(q, size) : co_shrink(q, size);
}
