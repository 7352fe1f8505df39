/* SPDX-License-Identifier: MIT */
/*
 * qcow2: blocks of L2 tables as runs.
 *
 * An image that was written in order has tables in which one cluster follows the other: a few runs describe a block of 512 entries. What the cache of tables
 * gives up is kept like this if it can be, 64 bytes for 4 KiB, so that the tables of a large image stay in memory where the cache itself holds a small part. A
 * place for each block, found by its offset; who comes later takes it.
 *
 * Of entries of 8 bytes only. A block is here or in a slot of the cache, never in both.
 */
#include <errno.h>
#include <string.h>

#include "format/qcow2/internal.h"

enum kind { NOTHING, OWN, SHARED };	/* unallocated; a cluster, with QCOW2_COPIED or without */

/* A run: kind, then 14 bits of the first entry, then the number of the first entry's cluster. */
#define KIND_BITS 2
#define START_BITS 14

int q2_dense_init(struct q2_cache *c, uint64_t blocks, unsigned cluster_bits)
{
	uint64_t n = 16;

	/* Tables lie among data and refcounts: in twice the room few of them meet. */
	while (n < 2 * blocks && n < Q2_DENSE_MAX)
		n *= 2;
	c->dense_mask = (uint32_t)n - 1;
	c->cluster_bits = cluster_bits;
	c->dense = q2_untouched(n * sizeof(*c->dense));
	return c->dense ? 0 : -ENOMEM;
}

void q2_dense_fini(struct q2_cache *c)
{
	q2_untouched_free(c->dense, (c->dense_mask + 1ull) * sizeof(*c->dense));
	c->dense = NULL;
}

static struct q2_dense *place(const struct q2_cache *c, uint64_t off)
{
	return &c->dense[off / c->block & c->dense_mask];
}

static bool is_at(const struct q2_dense *d, uint64_t off)
{
	return (d->off_n & ~(uint64_t)Q2_DENSE_RUNS) == off && d->off_n;
}

static enum kind kind_of(uint64_t entry, bool *ret_other)
{
	uint64_t rest = entry & ~(QCOW2_OFFSET_MASK | QCOW2_COPIED);

	*ret_other = rest || (!(entry & QCOW2_OFFSET_MASK) && entry);
	return !entry ? NOTHING : entry & QCOW2_COPIED ? OWN : SHARED;
}

bool q2_dense_put(struct q2_cache *c, uint64_t off, const uint8_t *block)
{
	struct q2_dense d = { 0 };
	uint64_t want = 0, step = 1ull << c->cluster_bits;
	unsigned n = 0;

	if (!c->dense)
		return false;
	for (uint32_t i = 0; i < c->block / 8; i++, want += want ? step : 0) {
		uint64_t entry = get_be64(block + i * 8);
		bool other;
		enum kind kind;

		if (i && entry == want)
			continue;
		kind = kind_of(entry, &other);
		if (other || n == Q2_DENSE_RUNS || !is_aligned(entry & QCOW2_OFFSET_MASK, step))
			return false;
		d.run[n++] = kind | (uint64_t)i << KIND_BITS | (entry & QCOW2_OFFSET_MASK) >> c->cluster_bits << (KIND_BITS + START_BITS);
		want = entry;
	}
	d.off_n = off | n;
	*place(c, off) = d;
	return true;
}

bool q2_dense_take(struct q2_cache *c, uint64_t off, uint8_t *block)
{
	struct q2_dense *d = c->dense ? place(c, off) : NULL;
	unsigned n;

	if (!d || !is_at(d, off))
		return false;
	n = d->off_n & Q2_DENSE_RUNS;
	for (unsigned k = 0; k < n; k++) {
		uint32_t i = d->run[k] >> KIND_BITS & ((1u << START_BITS) - 1);
		uint32_t end = k + 1 < n ? d->run[k + 1] >> KIND_BITS & ((1u << START_BITS) - 1) : c->block / 8;
		enum kind kind = d->run[k] & ((1u << KIND_BITS) - 1);
		uint64_t entry = (d->run[k] >> (KIND_BITS + START_BITS) << c->cluster_bits) | (kind == OWN ? QCOW2_COPIED : 0);

		for (; i < end; i++, entry += kind == NOTHING ? 0 : 1ull << c->cluster_bits)
			put_be64(block + i * 8, entry);
	}
	d->off_n = 0;
	return true;
}

bool q2_dense_has(const struct q2_cache *c, uint64_t off)
{
	return c->dense && is_at(place(c, off), off);
}

void q2_dense_drop(struct q2_cache *c, uint64_t off)
{
	if (q2_dense_has(c, off))
		place(c, off)->off_n = 0;
}
