/* SPDX-License-Identifier: MIT */
/*
 * qcow2: flush.
 *
 * A flush finishes the copy-on-write that was put off, and then writes the tables:
 *
 *	copy what is dirty of L1 and L2            from here on nothing changes what is being written
 *	flush                                      only if a copied entry needs its data to be there: q->barrier
 *	write the copies                           adjacent blocks together
 *	flush                                      covers them, and all data that was written before
 *
 * So what overwrites data in place, or goes to fresh clusters of an image without a backing file, costs one device flush, and copy-on-write
 * costs two. Refcounts cost none (alloc.c). Those who come while a flush runs share the next one.
 *
 * A failed write of a table or a failed flush makes the disk failed: what is on stable media is consistent, and stays so.
 */
#include <errno.h>
#include <string.h>

#include "format/qcow2/internal.h"

void q2_l1_set(struct qcow2 *q, uint64_t index, uint64_t entry)
{
	uint64_t chunk = index * 8 / Q2_L1_CHUNK;

	put_be64(q->l1 + index * 8, entry);
	q->l1_dirty[chunk / 64] |= 1ull << (chunk % 64);
	q->any_l1_dirty = true;
	q->l1_gen = q->meta_gen;
}

/* Copies the dirty chunks of L1; they stay marked until written. */
static void l1_snapshot(struct qcow2 *q)
{
	for (uint64_t i = 0; i < q->l1_chunks; i++)
		if (q->l1_dirty[i / 64] >> (i % 64) & 1)
			memcpy(q->l1_shadow + i * Q2_L1_CHUNK, q->l1 + i * Q2_L1_CHUNK, Q2_L1_CHUNK);
}

static co_fn int co_write_l1(struct qcow2 *q, uint64_t *dirty)
{
	uint64_t bytes = align_up((uint64_t)q->h.l1_size * 8, q->g.cluster_size);
	int ret = 0;

	for (uint64_t i = 0; i < q->l1_chunks && !ret; i++) {
		uint64_t at = i * Q2_L1_CHUNK;

		if (dirty[i / 64] >> (i % 64) & 1)
			ret = co_disk_write(q->disk.file, q->h.l1_off + at, q->l1_shadow + at, min((uint64_t)Q2_L1_CHUNK, bytes - at), 0);
	}
	return ret;
}

static co_fn int co_write_tables(struct qcow2 *q)
{
	uint64_t dirty[QCOW2_MAX_L1_BYTES / Q2_L1_CHUNK / 64], words = (q->l1_chunks + 63) / 64;
	bool l1 = q->any_l1_dirty, barrier = q->barrier;
	uint32_t n = q2_cache_snapshot(&q->l2, true);
	int ret = 0;

	if (l1) {
		l1_snapshot(q);
		memcpy(dirty, q->l1_dirty, words * 8);
		memset(q->l1_dirty, 0, words * 8);
	}
	q->any_l1_dirty = q->barrier = false;
	if (barrier && (n || l1)) {
		q->count.barriers++;
		ret = co_disk_flush(q->data);
		if (!ret && q->data != q->disk.file)
			ret = co_disk_flush(q->disk.file);
	}
	if (!ret && n)
		ret = co_q2_cache_write(q, &q->l2, n, q->l2.shadow);
	if (!ret && l1)
		ret = co_write_l1(q, dirty);
	q2_cache_written(&q->l2, n);
	return ret;
}

static co_fn int co_flush_now(struct qcow2 *q)
{
	uint64_t gen = q->meta_gen++;
	int ret;

	q->l2.gen = q->meta_gen;
	ret = co_write_tables(q);

	q->count.flushes++;
	if (!ret && q->data != q->disk.file)
		ret = co_disk_flush(q->data);
	if (!ret)
		ret = co_disk_flush(q->disk.file);
	if (ret)
		return disk_fail(&q->disk, ret, "qcow2: a flush of tables");
	q->durable_gen = gen + 1;
	return 0;
}

co_fn int co_q2_flush_tables(struct qcow2 *q)
{
	uint64_t ticket = ++q->flush_ticket;
	int ret = 0;

	co_mutex_lock(&q->flush_lock);
	if (q->disk.failed) {
		ret = -EIO;
	} else if (q->flush_covered < ticket) {
		uint64_t covers = q->flush_ticket;

		ret = co_flush_now(q);
		if (!ret)
			q->flush_covered = covers;
	}
	co_mutex_unlock(&q->flush_lock);
	return ret;
}

co_fn int co_q2_flush(struct disk *d)
{
	struct qcow2 *q = q2_of(d);
	int ret = co_q2_fill_finish(q, 0, UINT64_MAX);

	return ret ? ret : co_q2_flush_tables(q);
}
