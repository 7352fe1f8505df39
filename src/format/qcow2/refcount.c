/* SPDX-License-Identifier: MIT */
/*
 * qcow2: refcounts, and growing the structures that hold them.
 *
 * Everything here runs with alloc_lock held. Refcount blocks in memory may be written at any time (table.c, (3)).
 *
 * A new refcount block lies in the first cluster that it covers and counts itself: it is written, flushed, and only then entered in the
 * refcount table; until then the cluster is free. A refcount table that is too small is replaced by a larger one, which lies at the frontier together with
 * the blocks that cover both: written, flushed, and then the header points to it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/internal.h"
#include "util/err.h"

bool q2_has_block(const struct qcow2 *q, uint64_t cluster)
{
	uint64_t i = cluster >> q->g.rb_bits;

	return i < q->rt_entries && (get_be64(q->rt + i * 8) & QCOW2_RT_OFFSET_MASK);
}

/* The block that holds the refcount, and its number within. */
static co_fn int co_block(struct qcow2 *q, uint64_t cluster, void **ret, uint32_t *ret_index)
{
	uint64_t off = get_be64(q->rt + (cluster >> q->g.rb_bits) * 8) & QCOW2_RT_OFFSET_MASK;
	uint32_t index = cluster & ((1ull << q->g.rb_bits) - 1), byte = (uint64_t)index << q->g.refcount_order >> 3;

	if (!is_aligned(off, q->g.cluster_size) || off >= align_up(q->disk.file->size, q->g.cluster_size))
		return co_q2_corrupt(q, "a refcount block lies at %llu, which is not at a cluster of the image", (unsigned long long)off);
	byte = align_down(byte, q->rc.block);
	*ret_index = index - (uint32_t)((uint64_t)byte * 8 >> q->g.refcount_order);
	return co_q2_table_get(q, &q->rc, off + byte, ret, NULL);
}

co_fn int co_q2_refcount(struct qcow2 *q, uint64_t cluster, uint64_t *ret)
{
	uint32_t index;
	void *block;
	int r;

	*ret = 0;
	if (!q2_has_block(q, cluster))
		return 0;
	r = co_block(q, cluster, &block, &index);
	if (!r)
		*ret = qcow2_refcount_get(q->g.refcount_order, block, index);
	return r;
}

co_fn int co_q2_refcount_add(struct qcow2 *q, uint64_t cluster, int delta, uint64_t *ret_new)
{
	uint32_t index;
	uint64_t value;
	void *block;
	int r;

	if (!q2_has_block(q, cluster))
		return co_q2_corrupt(q, "cluster %llu is in use and has no refcount", (unsigned long long)cluster);
	r = co_block(q, cluster, &block, &index);
	if (r)
		return r;
	value = qcow2_refcount_get(q->g.refcount_order, block, index);
	if (delta < 0 ? !value : value == q->g.refcount_max)
		return co_q2_corrupt(q, "cluster %llu is in use and has refcount %llu", (unsigned long long)cluster, (unsigned long long)value);
	value += delta;
	qcow2_refcount_set(q->g.refcount_order, block, index, value);
	q2_table_dirty(&q->rc, q->rc.data + align_down((uint8_t *)block - q->rc.data, q->rc.block));
	*ret_new = value;
	return 0;
}

co_fn int co_q2_refcounts_write(struct qcow2 *q)
{
	uint32_t n = q2_cache_snapshot(&q->rc, false);
	int ret = n ? co_q2_cache_write(q, &q->rc, n, q->rc.data) : 0;

	q2_cache_written(&q->rc, n);
	return ret;
}

co_fn int co_q2_grow_file(struct qcow2 *q, uint64_t clusters)
{
	struct disk *file = q->disk.file;
	uint64_t need = clusters << q->g.cluster_bits, step, size;
	int ret;

	if (need <= file->size)
		return 0;
	if (need > DISK_MAX_SIZE >> 1 || need > QCOW2_OFFSET_MASK)
		return -ENOSPC;
	if (!q->growable)
		return -ENOSPC;
	step = min(max(file->size / 8, 1ull << 20), 1ull << 30);
	size = align_up(max(need, file->size + step), q->g.cluster_size);
	ret = co_disk_resize(file, size, NULL);
	if (ret && size != need && !file->failed)
		ret = co_disk_resize(file, need, NULL);
	return ret == -ENOTSUP || ret == -EFBIG || ret == -EINVAL ? -ENOSPC : ret;
}

/* Writes the part of the refcount table that holds the entry, and flushes. */
static co_fn int co_write_rt(struct qcow2 *q, uint64_t i)
{
	uint64_t at = align_down(i * 8, 512);
	int ret = co_disk_write(q->disk.file, q->h.rt_off + at, q->rt + at, 512, 0);

	return ret ? ret : co_disk_flush(q->disk.file);
}

/* Block `i`, at the frontier, which it covers itself or which is covered. The refcount table reaches that far. */
static co_fn int co_new_block(struct qcow2 *q, uint64_t i)
{
	uint64_t c = q->frontier, off = c << q->g.cluster_bits, value;
	int ret = co_q2_grow_file(q, c + 1);

	if (!ret)
		ret = co_q2_make_zero(q, c, 1);
	if (!ret)
		ret = q2_meta_add(q, off, 1);
	if (ret)
		return ret;
	q2_table_forget(&q->rc, off, q->g.cluster_size);
	put_be64(q->rt + i * 8, off);
	ret = co_q2_refcount_add(q, c, 1, &value);
	if (!ret)
		ret = co_q2_refcounts_write(q);
	if (!ret)
		ret = co_disk_flush(q->disk.file);
	if (!ret)
		ret = co_write_rt(q, i);
	if (ret)
		return disk_fail(&q->disk, ret, "qcow2: a new refcount block");
	q->frontier++;
	return 0;
}

/* Replaces the refcount table by a larger one. */
static co_fn int co_grow_rt(struct qcow2 *q)
{
	uint64_t per = 1ull << q->g.rb_bits, s = q->frontier, first = s >> q->g.rb_bits, k, m = 1, entries, old_off = q->h.rt_off;
	uint64_t old_k = q->h.rt_clusters, value, c;
	uint8_t *rt;
	int ret;

	entries = max(q->rt_entries + q->rt_entries / 2, first + 2);
	k = (entries * 8 + q->g.cluster_size - 1) >> q->g.cluster_bits;
	while ((s + k + m + per - 1) / per - first > m)
		m++;
	k = max(k, ((first + m + 1) * 8 + q->g.cluster_size - 1) >> q->g.cluster_bits);
	while ((s + k + m + per - 1) / per - first > m)
		m++;
	if ((k << q->g.cluster_bits) > QCOW2_MAX_RT_BYTES)
		return -ENOSPC;
	ret = co_q2_grow_file(q, s + k + m);
	if (!ret)
		ret = co_q2_make_zero(q, s, k + m);
	rt = ret ? NULL : calloc(k, q->g.cluster_size);
	if (!ret && !rt)
		ret = -ENOMEM;
	if (!ret)
		ret = q2_meta_add(q, s << q->g.cluster_bits, k + m);
	if (ret) {
		free(rt);
		return ret;
	}
	memcpy(rt, q->rt, q->rt_entries * 8);
	for (uint64_t i = 0; i < m; i++)
		put_be64(rt + (first + i) * 8, (s + k + i) << q->g.cluster_bits);
	q2_table_forget(&q->rc, s << q->g.cluster_bits, (k + m) << q->g.cluster_bits);
	free(q->rt);
	q->rt = rt;
	q->rt_entries = (k << q->g.cluster_bits) / 8;
	for (c = s; c < s + k + m && !ret; c++)
		ret = co_q2_refcount_add(q, c, 1, &value);
	if (!ret)
		ret = co_q2_refcounts_write(q);
	if (!ret)
		ret = co_disk_write(q->disk.file, s << q->g.cluster_bits, rt, k << q->g.cluster_bits, 0);
	if (!ret)
		ret = co_disk_flush(q->disk.file);
	q->h.rt_off = s << q->g.cluster_bits;
	q->h.rt_clusters = k;
	co_mutex_lock(&q->header_lock);
	if (!ret)
		ret = co_q2_write_header(q);
	co_mutex_unlock(&q->header_lock);
	if (ret)
		return disk_fail(&q->disk, ret, "qcow2: a larger refcount table");
	q->frontier = s + k + m;
	q2_meta_del(q, old_off, old_k);
	for (c = old_off >> q->g.cluster_bits; old_k && !ret; c++, old_k--)
		ret = co_q2_refcount_add(q, c, -1, &value);
	return ret;
}

co_fn int co_q2_cover_frontier(struct qcow2 *q)
{
	int ret = 0;

	while (!ret && !q2_has_block(q, q->frontier)) {
		if (q->frontier >> q->g.rb_bits >= q->rt_entries)
			ret = co_grow_rt(q);
		else
			ret = co_new_block(q, q->frontier >> q->g.rb_bits);
	}
	return ret;
}

co_fn int co_q2_alloc_adjacent(struct qcow2 *q, uint64_t clusters, uint64_t *ret_off)
{
	uint64_t first, value, i;
	int ret = 0;

	co_mutex_lock(&q->alloc_lock);
	for (;;) {
		ret = co_q2_cover_frontier(q);
		for (i = q->frontier >> q->g.rb_bits; !ret && i <= (q->frontier + clusters - 1) >> q->g.rb_bits; i++)
			if (i >= q->rt_entries || !(get_be64(q->rt + i * 8) & QCOW2_RT_OFFSET_MASK))
				break;
		if (ret || i > (q->frontier + clusters - 1) >> q->g.rb_bits)
			break;
		ret = i >= q->rt_entries ? co_grow_rt(q) : co_new_block(q, i);
		if (ret)
			break;
	}
	first = q->frontier;
	if (!ret)
		ret = co_q2_grow_file(q, first + clusters);
	if (!ret)
		ret = co_q2_make_zero(q, first, clusters);
	if (!ret)
		q->frontier = first + clusters;
	for (i = 0; i < clusters && !ret; i++)
		ret = co_q2_refcount_add(q, first + i, 1, &value);
	if (!ret)
		ret = co_q2_refcounts_write(q);
	if (!ret)
		ret = co_disk_flush(q->disk.file);
	co_mutex_unlock(&q->alloc_lock);
	*ret_off = first << q->g.cluster_bits;
	return ret;
}
