/* SPDX-License-Identifier: MIT */
/*
 * qcow2: from guest to host offsets, the header in use, and what is corrupt.
 *
 * The L1 table is in memory as a whole (at most 32 MiB), L2 tables by blocks (table.c). An L2 table that is missing, or shared with
 * a snapshot, gets a cluster of its own under table_lock; an L1 entry that points to a fresh table may reach the disk at any time, since
 * a fresh cluster is all zeroes there and so maps nothing.
 *
 * Metadata clusters that are in use (header, L1 tables, active L2 tables, refcount table and blocks, snapshot table) are in a set, and guest data is never
 * written to one of them, whatever a damaged table says: the corrupt bit is set instead, as QEMU does.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/internal.h"
#include "util/err.h"
#include "util/log.h"

/* --- The set of metadata clusters --- */

static uint64_t meta_slot(const struct qcow2 *q, uint64_t cluster)
{
	uint64_t i = (cluster * 0x9e3779b97f4a7c15ull >> 20) & (q->meta_cap - 1);

	while (q->meta[i] && q->meta[i] != cluster + 1)
		i = (i + 1) & (q->meta_cap - 1);
	return i;
}

static int meta_grow(struct qcow2 *q)
{
	uint64_t old_cap = q->meta_cap, *old = q->meta, *now = calloc(old_cap ? old_cap * 2 : 256, sizeof(*now));

	if (!now)
		return -ENOMEM;
	q->meta = now;
	q->meta_cap = old_cap ? old_cap * 2 : 256;
	for (uint64_t i = 0; i < old_cap; i++)
		if (old[i])
			q->meta[meta_slot(q, old[i] - 1)] = old[i];
	free(old);
	return 0;
}

int q2_meta_add(struct qcow2 *q, uint64_t off, uint64_t clusters)
{
	for (uint64_t c = off >> q->g.cluster_bits; clusters; clusters--, c++) {
		uint64_t i;

		if (q->meta_n * 2 >= q->meta_cap && meta_grow(q))
			return -ENOMEM;
		i = meta_slot(q, c);
		q->meta_n += !q->meta[i];
		q->meta[i] = c + 1;
	}
	return 0;
}

/* Takes one out and moves those up that its place had pushed away (Knuth, volume 3, 6.4, algorithm R). */
static void meta_remove(struct qcow2 *q, uint64_t cluster)
{
	uint64_t mask = q->meta_cap - 1, i = meta_slot(q, cluster), k;

	if (!q->meta[i])
		return;
	q->meta_n--;
	q->meta[i] = 0;
	for (k = (i + 1) & mask; q->meta[k]; k = (k + 1) & mask) {
		uint64_t v = q->meta[k];

		q->meta[k] = 0;
		q->meta[meta_slot(q, v - 1)] = v;
	}
}

void q2_meta_del(struct qcow2 *q, uint64_t off, uint64_t clusters)
{
	for (uint64_t c = off >> q->g.cluster_bits; clusters; clusters--, c++)
		meta_remove(q, c);
}

bool q2_meta_has(const struct qcow2 *q, uint64_t off)
{
	return q->meta[meta_slot(q, off >> q->g.cluster_bits)];
}

/* --- Header --- */

co_fn int co_q2_write_header(struct qcow2 *q)
{
	struct disk *file = q->disk.file;
	uint8_t buf[512] __attribute__((aligned(512)));
	int ret = co_disk_read(file, 0, buf, sizeof(buf), 0);

	if (ret)
		return ret;
	qcow2_header_update(&q->h, buf);
	ret = co_disk_write(file, 0, buf, sizeof(buf), 0);
	return ret ? ret : co_disk_flush(file);
}

static co_fn int co_make_ready(struct qcow2 *q)
{
	uint64_t keep = QCOW2_AUTOCLEAR_DATA_FILE_RAW, size = align_up(q->disk.file->size, q->g.cluster_size);
	int ret = 0;

	/* An image may end within its last cluster. */
	if (q->growable && size != q->disk.file->size)
		ret = co_disk_resize(q->disk.file, size, NULL);
	/* A device: what lies beyond its end is not reserved, and not written. */
	if (ret == -ENOTSUP)
		ret = 0;
	if (!ret && (q->h.autoclear & ~keep)) {
		if (q->h.autoclear & QCOW2_AUTOCLEAR_BITMAPS)
			log_warn("%s: its bitmaps are not kept up to date by this build: they are marked as inconsistent from now on", q->disk.name);
		q->h.autoclear &= keep;
		ret = co_q2_write_header(q);
	}
	return ret;
}

co_fn int co_q2_ready_slow(struct qcow2 *q)
{
	int ret = 0;

	if (q->overlap)
		return co_q2_corrupt(q, "two of its tables lie at %llu", (unsigned long long)q->overlap);
	co_mutex_lock(&q->header_lock);
	if (!q->header_ready)
		ret = co_make_ready(q);
	if (!ret)
		q->header_ready = true;
	co_mutex_unlock(&q->header_lock);
	return ret;
}

/* --- Corruption --- */

co_fn int co_q2_corrupt(struct qcow2 *q, const char *fmt, ...)
{
	bool mark = !q->disk.read_only && !q->disk.failed && q->h.version >= 3 && !(q->h.incompat & QCOW2_INCOMPAT_CORRUPT);
	char why[200];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	if (q->disk.read_only) {
		if (!(q->h.incompat & QCOW2_INCOMPAT_CORRUPT))
			log_error("%s: is corrupt: %s; see \"weir image check\"", q->disk.name, why);
		q->h.incompat |= QCOW2_INCOMPAT_CORRUPT;	/* in memory: said once */
		return -EIO;
	}
	if (!q->disk.failed)
		log_error("%s: is corrupt: %s%s; repair it with \"weir image check --repair=all\"", q->disk.name, why,
			  mark ? "; it is marked as such and no longer written to" : "");
	disk_fail(&q->disk, -EIO, "a look at its tables");
	if (mark) {
		q->h.incompat |= QCOW2_INCOMPAT_CORRUPT;
		co_mutex_lock(&q->header_lock);
		co_q2_write_header(q);
		co_mutex_unlock(&q->header_lock);
	}
	return -EIO;
}

static bool in_image(const struct qcow2 *q, uint64_t off)
{
	return off < align_up(q->disk.file->size, q->g.cluster_size);
}

co_fn int co_q2_check_host(struct qcow2 *q, uint64_t host, uint64_t guest)
{
	uint64_t cluster = align_down(host, q->g.cluster_size);

	if (q->has_data_file) {
		if (host != guest)
			return co_q2_corrupt(q, "offset %llu lies at %llu of the data file", (unsigned long long)guest, (unsigned long long)host);
		return 0;
	}
	if (!in_image(q, cluster))
		return co_q2_corrupt(q, "guest offset %llu lies at %llu, beyond the end of the image", (unsigned long long)guest, (unsigned long long)host);
	if (q2_meta_has(q, cluster))
		return co_q2_corrupt(q, "guest offset %llu lies at %llu, where the image has tables", (unsigned long long)guest, (unsigned long long)host);
	return 0;
}

/* --- Tables --- */

co_fn int co_q2_read_image(struct qcow2 *q, uint64_t off, void *buf, uint64_t len)
{
	uint64_t size = q->disk.file->size, n = off < size ? min(len, size - off) : 0;
	int ret = n ? co_disk_read(q->disk.file, off, buf, n, DISK_METADATA) : 0;

	if (!ret && n < len)
		memset((uint8_t *)buf + n, 0, len - n);
	return ret;
}

enum qcow2_kind q2_kind(struct qcow2 *q, struct qcow2_l2e e, unsigned sub)
{
	enum qcow2_kind k = qcow2_l2_kind(&q->g, e, sub, q->has_data_file);

	return q->h.version < 3 && (k == QCOW2_ZERO_PLAIN || k == QCOW2_ZERO_ALLOCATED) ? QCOW2_INVALID : k;
}

static uint64_t l1_get(const struct qcow2 *q, uint64_t guest)
{
	uint64_t i = qcow2_l1_index(&q->g, guest);

	return i < q->h.l1_size ? get_be64(q->l1 + i * 8) : 0;
}

static co_fn int co_check_l1(struct qcow2 *q, uint64_t entry)
{
	uint64_t off = entry & QCOW2_OFFSET_MASK;

	if (is_aligned(off, q->g.cluster_size) && in_image(q, off))
		return 0;
	return co_q2_corrupt(q, "an L2 table lies at %llu, which is not at a cluster of the image", (unsigned long long)off);
}

/* The block of `table` that maps `guest`, and the place within. */
static uint64_t block_off(const struct qcow2 *q, uint64_t table, uint64_t guest, uint32_t *ret_at, uint32_t *ret_n)
{
	uint32_t at = qcow2_l2_index(&q->g, guest) * q->g.l2_entry_size;

	*ret_at = at & (q->l2.block - 1);
	*ret_n = (q->l2.block - *ret_at) / q->g.l2_entry_size;
	return table + (at - *ret_at);
}

co_fn int co_q2_l2(struct qcow2 *q, uint64_t guest, uint8_t **ret, uint32_t *ret_n)
{
	for (;;) {
		uint64_t e = l1_get(q, guest), off;
		bool suspended = false;
		uint32_t at;
		void *block;
		int r;

		if (!(e & QCOW2_OFFSET_MASK)) {
			*ret = NULL;
			*ret_n = (1u << q->g.l2_bits) - qcow2_l2_index(&q->g, guest);
			return 0;
		}
		off = block_off(q, e & QCOW2_OFFSET_MASK, guest, &at, ret_n);
		block = q2_table_find(&q->l2, off);
		if (!block) {
			r = co_check_l1(q, e);
			if (!r)
				r = co_q2_table_get(q, &q->l2, off, &block, &suspended);
			if (r)
				return r;
			if (suspended && l1_get(q, guest) != e)
				continue;
		}
		*ret = (uint8_t *)block + at;
		return 0;
	}
}

void q2_l2_set(struct qcow2 *q, uint8_t *at, struct qcow2_l2e e)
{
	qcow2_l2_put(&q->g, at, 0, e);
	q2_table_dirty(&q->l2, q->l2.data + align_down(at - q->l2.data, q->l2.block));
}

static co_fn int co_copy_table(struct qcow2 *q, uint64_t from, uint64_t to)
{
	uint32_t chunk = min(q->g.cluster_size, 65536u);
	int ret = 0;

	co_mutex_lock(&q->pad_lock);
	for (uint32_t at = 0; at < q->g.cluster_size && !ret; at += chunk) {
		ret = co_q2_read_image(q, from + at, q->pad_reserve, chunk);
		if (!ret)
			ret = co_disk_write(q->disk.file, to + at, q->pad_reserve, chunk, 0);
	}
	co_mutex_unlock(&q->pad_lock);
	return ret;
}

/* The table for `guest` is missing, or shared: makes one. With table_lock held. */
static co_fn int co_make_table(struct qcow2 *q, uint64_t guest)
{
	uint64_t e = l1_get(q, guest), old = e & QCOW2_OFFSET_MASK, host, got;
	uint32_t at, n;
	int ret;

	if (old && (e & QCOW2_COPIED))
		return 0;
	ret = old ? co_check_l1(q, e) : 0;
	while (!ret && !(host = q2_alloc(q, 1, &got)))
		ret = co_q2_refill(q);
	if (ret)
		return ret;
	q2_table_forget(&q->l2, host, q->g.cluster_size);
	ret = q2_meta_add(q, host, 1);
	if (!ret && old)
		ret = co_copy_table(q, old, host);
	if (ret) {
		q2_meta_del(q, host, 1);
		q2_free(q, host, 1);
		return ret;
	}
	if (old) {
		q->barrier = true;	/* the copy is there before the L1 table says so */
		q2_meta_del(q, old, 1);
		q2_free(q, old, 1);
	} else {
		q2_table_zero(&q->l2, block_off(q, host, guest, &at, &n));
	}
	q2_l1_set(q, qcow2_l1_index(&q->g, guest), host | QCOW2_COPIED);
	return 0;
}

co_fn int co_q2_l2_own(struct qcow2 *q, uint64_t guest, uint8_t **ret, uint32_t *ret_n, bool *suspended)
{
	uint64_t e = l1_get(q, guest);
	int r;

	while (!(e & QCOW2_OFFSET_MASK) || !(e & QCOW2_COPIED)) {
		*suspended = true;
		co_mutex_lock(&q->table_lock);
		r = co_make_table(q, guest);
		co_mutex_unlock(&q->table_lock);
		if (r)
			return r;
		e = l1_get(q, guest);
	}
	{
		uint32_t at;
		uint64_t off = block_off(q, e & QCOW2_OFFSET_MASK, guest, &at, ret_n);
		void *block = q2_table_find(&q->l2, off);

		if (!block) {
			*suspended = true;
			r = co_check_l1(q, e);
			if (!r)
				r = co_q2_table_get(q, &q->l2, off, &block, NULL);
			if (r)
				return r;
		}
		*ret = (uint8_t *)block + at;
	}
	return 0;
}

bool q2_unallocated_is_zero(struct qcow2 *q, uint64_t guest)
{
	return !q->backing || guest >= q->backing->size;
}
