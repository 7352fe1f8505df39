/* SPDX-License-Identifier: MIT */
/*
 * qcow2: blocks of tables in memory.
 *
 * Two caches of the same kind, for L2 tables and for refcount blocks, in blocks of 4 KiB (or a cluster, if that is less), so that a random
 * write costs one small block and not a table of 2 MiB. A fixed number of slots, whose memory is touched when it is first used; a hash by offset; eviction of
 * clean blocks by a clock (Corbato 1968). L2 blocks that were given up, and the neighbours of one that is loaded, are kept as runs where that is
 * short (dense.c).
 *
 * Invariants
 *  (1) a block that is dirty, being loaded or being written stays;
 *  (2) a pointer to a block is valid until its user suspends;
 *  (3) when no block can be evicted, L2 blocks are flushed in their order (flush.c) and refcount blocks are just written: a
 *      refcount in memory is never lower than what stable media need (internal.h, (1) and (3));
 *  (4) a block that was read beside another one is kept only if nothing has changed in the cache since, and it is in no slot.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "format/qcow2/internal.h"
#include "rt/buf.h"
#include "util/err.h"

#define WIDE 65536u		/* of a table, read at once; never more than a cluster */
#define BARREN_MAX 8u
#define BARREN_TRY 64u		/* one load of so many is a wide one, where the tables are not dense */
#define RUN_BLOCKS 64
#define RUNS 16

static void *map_pages(uint64_t len)
{
	void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

int q2_cache_init(struct q2_cache *c, uint32_t cap, uint32_t block)
{
	uint32_t buckets = 16;

	while (buckets < cap)
		buckets *= 2;
	memset(c, 0, sizeof(*c));
	c->cap = cap;
	c->block = block;
	c->mask = buckets - 1;
	c->gen = 1;
	list_init(&c->dirty);
	co_queue_init(&c->wait);
	c->slot = calloc(cap, sizeof(*c->slot));
	c->hash = calloc(buckets, sizeof(*c->hash));
	c->order = calloc(cap, sizeof(*c->order));
	c->data = map_pages((uint64_t)cap * block);
	c->shadow = map_pages((uint64_t)cap * block);
	if (c->slot && c->hash && c->order && c->data && c->shadow)
		return 0;
	q2_cache_fini(c);
	return -ENOMEM;
}

void q2_cache_fini(struct q2_cache *c)
{
	free(c->slot);
	free(c->hash);
	free(c->order);
	if (c->dense)
		q2_dense_fini(c);
	if (c->data)
		munmap(c->data, (uint64_t)c->cap * c->block);
	if (c->shadow)
		munmap(c->shadow, (uint64_t)c->cap * c->block);
	memset(c, 0, sizeof(*c));
}

static uint32_t *bucket(struct q2_cache *c, uint64_t off)
{
	return &c->hash[(off / c->block * 0x9e3779b97f4a7c15ull >> 32) & c->mask];
}

static struct q2_slot *find(struct q2_cache *c, uint64_t off)
{
	for (uint32_t i = *bucket(c, off); i; i = c->slot[i - 1].next)
		if (c->slot[i - 1].off == off)
			return &c->slot[i - 1];
	return NULL;
}

static void *block_of(struct q2_cache *c, const struct q2_slot *s)
{
	return c->data + (uint64_t)(s - c->slot) * c->block;
}

void *q2_table_find(struct q2_cache *c, uint64_t off)
{
	struct q2_slot *s = find(c, off);

	if (!s || s->loading)
		return NULL;
	s->used = true;
	return block_of(c, s);
}

static void unlink_slot(struct q2_cache *c, struct q2_slot *s)
{
	uint32_t *link = bucket(c, s->off), self = s - c->slot + 1;

	while (*link != self)
		link = &c->slot[*link - 1].next;
	*link = s->next;
	s->off = 0;
}

static void link_slot(struct q2_cache *c, struct q2_slot *s, uint64_t off)
{
	uint32_t *link = bucket(c, off);

	s->off = off;
	s->next = *link;
	s->used = true;
	s->gen = c->gen - 1;
	*link = s - c->slot + 1;
}

/* A slot that is free now; NULL if all must stay. */
static struct q2_slot *evict(struct q2_cache *c)
{
	for (uint32_t n = 0; n < 2 * c->cap; n++) {
		struct q2_slot *s = &c->slot[c->hand];

		c->hand = (c->hand + 1) % c->cap;
		if (!s->off && !s->loading)
			return s;
		if (s->dirty || s->loading || s->writing)
			continue;
		if (s->used) {
			s->used = false;
			continue;
		}
		q2_dense_put(c, s->off, block_of(c, s));
		unlink_slot(c, s);
		return s;
	}
	return NULL;
}

bool q2_table_zero(struct q2_cache *c, uint64_t off)
{
	struct q2_slot *s = find(c, off);

	c->changes++;
	if (s)
		return !s->loading;
	s = evict(c);
	q2_dense_drop(c, off);
	if (!s)
		return false;
	link_slot(c, s, off);
	memset(block_of(c, s), 0, c->block);
	return true;
}

void q2_table_dirty(struct q2_cache *c, void *block)
{
	struct q2_slot *s = &c->slot[((uint8_t *)block - c->data) / c->block];

	c->changes++;
	s->used = true;
	s->gen = c->gen;
	if (s->dirty)
		return;
	s->dirty = true;
	c->ndirty++;
	list_add_tail(&c->dirty, &s->dirty_node);
}

uint64_t q2_table_gen(const struct q2_cache *c, const void *at)
{
	return c->slot[((const uint8_t *)at - c->data) / c->block].gen;
}

void q2_table_forget(struct q2_cache *c, uint64_t off, uint64_t len)
{
	for (uint64_t at = off; at < off + len; at += c->block) {
		struct q2_slot *s = find(c, at);

		c->changes++;
		q2_dense_drop(c, at);
		if (s && !s->dirty && !s->loading && !s->writing)
			unlink_slot(c, s);
	}
}

static co_fn int co_make_room(struct qcow2 *q, struct q2_cache *c)
{
	uint32_t n;
	int ret;

	if (c == &q->l2) {
		if (c->ndirty)
			return co_q2_flush_tables(q);
		co_queue_wait(&c->wait, "qcow2: a block of the table cache");
		return 0;
	}
	n = q2_cache_snapshot(c, false);
	ret = n ? co_q2_cache_write(q, c, n, c->data) : 0;
	q2_cache_written(c, n);
	return ret ? disk_fail(&q->disk, ret, "qcow2: writing refcounts") : 0;
}

/* Invariant (4). `buf` was read from `from` on. */
static void keep_neighbours(struct q2_cache *c, const uint8_t *buf, uint64_t from, uint64_t len)
{
	bool any = false;

	for (uint64_t at = 0; at < len; at += c->block)
		if (!find(c, from + at))
			any |= q2_dense_has(c, from + at) || q2_dense_put(c, from + at, buf + at);
	c->barren = any ? 0 : c->barren + 1;
}

static co_fn int co_read_block(struct qcow2 *q, struct q2_cache *c, struct q2_slot *s, uint64_t off)
{
	uint64_t len = min(q->g.cluster_size, WIDE), from = align_down(off, len), changes = c->changes;
	bool wide = c->dense && len > c->block && (c->barren < BARREN_MAX || q->count.l2_loads % BARREN_TRY == 0);
	uint8_t *buf = wide && rt_bufs() ? rt_buf_tryget(rt_bufs(), len) : NULL;
	int ret;

	if (!buf)
		return co_q2_read_image(q, off, block_of(c, s), c->block);
	ret = co_q2_read_image(q, from, buf, len);
	if (!ret)
		memcpy(block_of(c, s), buf + (off - from), c->block);
	if (!ret && changes == c->changes)
		keep_neighbours(c, buf, from, len);
	rt_buf_put(rt_bufs(), buf);
	return ret;
}

static co_fn int co_load(struct qcow2 *q, struct q2_cache *c, struct q2_slot *s, uint64_t off)
{
	int ret;

	link_slot(c, s, off);
	if (c->dense && q2_dense_take(c, off, block_of(c, s)))
		return 0;
	s->loading = true;
	q->count.l2_loads++;
	ret = co_read_block(q, c, s, off);
	s->loading = false;
	if (ret)
		unlink_slot(c, s);
	co_queue_wake_all(&c->wait);
	return ret;
}

co_fn int co_q2_table_get(struct qcow2 *q, struct q2_cache *c, uint64_t off, void **ret, bool *suspended)
{
	for (;;) {
		struct q2_slot *s = find(c, off);
		int r = 0;

		if (s && !s->loading) {
			s->used = true;
			*ret = block_of(c, s);
			return 0;
		}
		if (suspended)
			*suspended = true;
		if (s) {
			co_queue_wait(&c->wait, "qcow2: a table block that is being read");
			continue;
		}
		s = evict(c);
		r = s ? co_load(q, c, s, off) : co_make_room(q, c);
		if (r)
			return r;
	}
}

/* --- Writing --- */

static int by_offset(const void *a, const void *b, void *cache)
{
	const struct q2_cache *c = cache;
	uint64_t x = c->slot[*(const uint32_t *)a].off, y = c->slot[*(const uint32_t *)b].off;

	return x < y ? -1 : x > y;
}

uint32_t q2_cache_snapshot(struct q2_cache *c, bool shadow)
{
	uint32_t n = 0;

	c->changes++;
	list_for_each_safe(&c->dirty, node) {
		struct q2_slot *s = container_of(node, struct q2_slot, dirty_node);
		uint32_t i = s - c->slot;

		list_del(node);
		s->dirty = false;
		s->writing = true;
		c->order[n++] = i;
		if (shadow)
			memcpy(c->shadow + (uint64_t)i * c->block, c->data + (uint64_t)i * c->block, c->block);
	}
	c->ndirty = 0;
	qsort_r(c->order, n, sizeof(*c->order), by_offset, c);
	return n;
}

void q2_cache_written(struct q2_cache *c, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		c->slot[c->order[i]].writing = false;
	c->changes++;
	if (n)
		co_queue_wake_all(&c->wait);
}

struct run_write {
	struct qcow2 *q;
	struct q2_cache *c;
	const uint8_t *from;
	uint32_t at, n;
};

static co_fn int co_write_run(void *arg)
{
	struct run_write *w = arg;
	struct iovec iov[RUN_BLOCKS];

	for (uint32_t i = 0; i < w->n; i++)
		iov[i] = (struct iovec){ (void *)(uintptr_t)(w->from + (uint64_t)w->c->order[w->at + i] * w->c->block), w->c->block };
	w->q->count.table_writes++;
	return co_disk_writev(w->q->disk.file, w->c->slot[w->c->order[w->at]].off, iov, w->n, 0);
}

co_fn int co_q2_cache_write(struct qcow2 *q, struct q2_cache *c, uint32_t n, const uint8_t *from)
{
	uint32_t i = 0;
	int ret = 0;

	while (i < n && !ret) {
		struct run_write run[RUNS];
		struct co_group group;
		unsigned runs = 0;

		co_group_init(&group);
		while (i < n && runs < RUNS) {
			struct run_write *w = &run[runs++];

			*w = (struct run_write){ q, c, from, i, 1 };
			while (i + w->n < n && w->n < RUN_BLOCKS &&
			       c->slot[c->order[i + w->n]].off == c->slot[c->order[i]].off + (uint64_t)w->n * c->block)
				w->n++;
			i += w->n;
			/* The last, which is often the only one, needs no coroutine of its own. */
			if (i < n && runs < RUNS) {
				co_group_start(&group, "qcow2 tables", co_write_run, w);
			} else {
				int r = co_write_run(w);

				ret = ret ? ret : r;
			}
		}
		int r = co_group_wait(&group);

		ret = ret ? ret : r;
	}
	return ret;
}
