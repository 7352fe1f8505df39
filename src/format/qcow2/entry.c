/* SPDX-License-Identifier: MIT */
/* qcow2: geometry, table entries and refcounts. */
#include "format/qcow2/format.h"

void qcow2_geo_init(struct qcow2_geo *g, unsigned cluster_bits, bool ext, unsigned refcount_order)
{
	*g = (struct qcow2_geo){
		.cluster_bits = cluster_bits,
		.l2_entry_size = ext ? 16 : 8,
		.l2_bits = cluster_bits - (ext ? 4 : 3),
		.sub_bits = ext ? cluster_bits - 5 : cluster_bits,
		.subs = ext ? QCOW2_SUBCLUSTERS : 1,
		.refcount_order = refcount_order,
		.rb_bits = cluster_bits + 3 - refcount_order,
		.ext = ext,
		.cluster_size = 1u << cluster_bits,
		.refcount_max = refcount_order == 6 ? UINT64_MAX : (1ull << (1u << refcount_order)) - 1,
	};
	g->sub_size = 1u << g->sub_bits;
}

uint64_t qcow2_l1_entries(const struct qcow2_geo *g, uint64_t size)
{
	unsigned bits = g->cluster_bits + g->l2_bits;

	return (size >> bits) + !!(size & ((1ull << bits) - 1));
}

uint64_t qcow2_max_size(const struct qcow2_geo *g)
{
	unsigned bits = g->cluster_bits + g->l2_bits;

	return bits + 22 >= 63 ? (uint64_t)INT64_MAX & ~511ull : (uint64_t)(QCOW2_MAX_L1_BYTES / 8) << bits;
}

static enum qcow2_kind ext_kind(struct qcow2_l2e e, unsigned sub, bool has_host)
{
	bool alloc = e.bitmap >> sub & 1, zero = e.bitmap >> (32 + sub) & 1;

	if (alloc && (zero || !has_host))
		return QCOW2_INVALID;
	if (alloc)
		return QCOW2_NORMAL;
	if (zero)
		return has_host ? QCOW2_ZERO_ALLOCATED : QCOW2_ZERO_PLAIN;
	return QCOW2_UNALLOCATED;
}

enum qcow2_kind qcow2_l2_kind(const struct qcow2_geo *g, struct qcow2_l2e e, unsigned sub, bool data_file)
{
	uint64_t host = qcow2_l2_host(e.entry);
	bool has_host = host || (data_file && (e.entry & QCOW2_COPIED));

	if (e.entry & QCOW2_COMPRESSED)
		return data_file ? QCOW2_INVALID : QCOW2_COMPRESSED_DATA;
	if (!is_aligned(host, g->cluster_size))
		return QCOW2_INVALID;
	if (g->ext)
		return ext_kind(e, sub, has_host);
	if (e.entry & QCOW2_ZERO)
		return has_host ? QCOW2_ZERO_ALLOCATED : QCOW2_ZERO_PLAIN;
	return has_host ? QCOW2_NORMAL : QCOW2_UNALLOCATED;
}

void qcow2_l2_compressed(const struct qcow2_geo *g, uint64_t entry, uint64_t *ret_off, uint32_t *ret_len)
{
	unsigned x = 62 - (g->cluster_bits - 8);
	uint64_t off = entry & ((1ull << x) - 1), sectors = (entry & (QCOW2_COMPRESSED - 1)) >> x;

	/* Bits beyond 55 must be 0 where the field is wider. */
	off &= (1ull << 56) - 1;
	*ret_off = off;
	*ret_len = (sectors + 1) * 512 - (off & 511);
}

uint64_t qcow2_l2_make_compressed(const struct qcow2_geo *g, uint64_t off, uint32_t len)
{
	unsigned x = 62 - (g->cluster_bits - 8);
	uint64_t sectors;

	if (!len || off >> (x < 56 ? x : 56))
		return 0;
	sectors = (off + len - 1) / 512 - off / 512;
	if (sectors >> (g->cluster_bits - 8))
		return 0;
	return QCOW2_COMPRESSED | sectors << x | off;
}

uint64_t qcow2_refcount_get(unsigned order, const void *block, uint32_t index)
{
	const uint8_t *p = block;

	switch (order) {
	case 0:
	case 1:
	case 2:
		return p[index >> (3 - order)] >> ((index << order) & 7) & ((1u << (1u << order)) - 1);
	case 3:
		return p[index];
	case 4:
		return get_be16(p + (size_t)index * 2);
	case 5:
		return get_be32(p + (size_t)index * 4);
	default:
		return get_be64(p + (size_t)index * 8);
	}
}

void qcow2_refcount_set(unsigned order, void *block, uint32_t index, uint64_t value)
{
	uint8_t *p = block, mask;
	unsigned shift;

	switch (order) {
	case 0:
	case 1:
	case 2:
		shift = (index << order) & 7;
		mask = (uint8_t)(((1u << (1u << order)) - 1) << shift);
		p += index >> (3 - order);
		*p = (uint8_t)((*p & ~mask) | (value << shift & mask));
		break;
	case 3:
		p[index] = (uint8_t)value;
		break;
	case 4:
		put_be16(p + (size_t)index * 2, (uint16_t)value);
		break;
	case 5:
		put_be32(p + (size_t)index * 4, (uint32_t)value);
		break;
	default:
		put_be64(p + (size_t)index * 8, value);
	}
}
