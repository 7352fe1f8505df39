/* SPDX-License-Identifier: MIT */
/*
 * qcow2: the format, apart from all I/O.
 *
 * What lies where in an image, and conversion between bytes and values. The layout is QEMU's docs/interop/qcow2.rst; the limits that are stricter
 * than the format's are QEMU's as well, so that an image that one of the two accepts is accepted by the other. All of it is pure: no
 * reactor, no disk. Input is untrusted: nothing here asserts what it reads, and no table is larger than its limit.
 *
 * All integers on disk are big-endian.
 *
 * Words: a cluster is the unit of allocation; a host offset is an offset in the image file (or the data file), a guest offset one in the virtual disk;
 * a table is an L1 table, L2 table, refcount table or refcount block. A subcluster is a 32nd of a cluster where L2 entries are extended,
 * else the cluster itself.
 */
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "util/bytes.h"

struct err;

#define QCOW2_MAGIC 0x514649fbu
#define QCOW2_MIN_CLUSTER_BITS 9
#define QCOW2_MAX_CLUSTER_BITS 21
#define QCOW2_MIN_EXT_CLUSTER_BITS 14	/* with extended L2 entries */
#define QCOW2_MAX_REFCOUNT_ORDER 6
#define QCOW2_MAX_L1_BYTES (32u << 20)
#define QCOW2_MAX_RT_BYTES (8u << 20)
#define QCOW2_MAX_BACKING_NAME 1023
#define QCOW2_MAX_SNAPSHOTS 65536
#define QCOW2_MAX_SNAPSHOT_TABLE (64u << 20)	/* bytes of the snapshot table */
#define QCOW2_MAX_SNAPSHOT_EXTRA 1024
#define QCOW2_MAX_BITMAPS 65535
#define QCOW2_MAX_BITMAP_DIR (65535ull * 1112)	/* bytes of the bitmap directory */
#define QCOW2_MAX_EXTENSIONS 64
#define QCOW2_V2_HEADER_LEN 72
#define QCOW2_V3_HEADER_LEN 104
#define QCOW2_FULL_HEADER_LEN 112		/* with compression_type: what new images have */
#define QCOW2_SUBCLUSTERS 32

enum qcow2_incompat {
	QCOW2_INCOMPAT_DIRTY = 1 << 0,
	QCOW2_INCOMPAT_CORRUPT = 1 << 1,
	QCOW2_INCOMPAT_DATA_FILE = 1 << 2,
	QCOW2_INCOMPAT_COMPRESSION = 1 << 3,
	QCOW2_INCOMPAT_EXTL2 = 1 << 4,
	QCOW2_INCOMPAT_KNOWN = (1 << 5) - 1,
};
enum qcow2_compat { QCOW2_COMPAT_LAZY_REFCOUNTS = 1 << 0 };
enum qcow2_autoclear {
	QCOW2_AUTOCLEAR_BITMAPS = 1 << 0,
	QCOW2_AUTOCLEAR_DATA_FILE_RAW = 1 << 1,
	QCOW2_AUTOCLEAR_KNOWN = (1 << 2) - 1,
};

enum qcow2_ext_type {
	QCOW2_EXT_END = 0,
	QCOW2_EXT_BACKING_FORMAT = 0xe2792aca,
	QCOW2_EXT_FEATURE_NAMES = 0x6803f857,
	QCOW2_EXT_BITMAPS = 0x23852875,
	QCOW2_EXT_CRYPTO = 0x0537be77,
	QCOW2_EXT_DATA_FILE = 0x44415441,
};

enum qcow2_compression { QCOW2_ZLIB = 0, QCOW2_ZSTD = 1 };

/* --- Layouts. Members are bytes: a pointer into any buffer will do. Read with get_be32(x->member) and so on. --- */

struct qcow2_raw_header {
	uint8_t magic[4], version[4], backing_off[8], backing_len[4], cluster_bits[4], size[8], crypt_method[4], l1_size[4], l1_off[8],
		rt_off[8], rt_clusters[4], nb_snapshots[4], snapshots_off[8];
	/* version 3 */
	uint8_t incompat[8], compat[8], autoclear[8], refcount_order[4], header_len[4];
	uint8_t compression_type[1], padding[7];
};
static_assert(offsetof(struct qcow2_raw_header, version) == 4, "");
static_assert(offsetof(struct qcow2_raw_header, backing_off) == 8, "");
static_assert(offsetof(struct qcow2_raw_header, backing_len) == 16, "");
static_assert(offsetof(struct qcow2_raw_header, cluster_bits) == 20, "");
static_assert(offsetof(struct qcow2_raw_header, size) == 24, "");
static_assert(offsetof(struct qcow2_raw_header, crypt_method) == 32, "");
static_assert(offsetof(struct qcow2_raw_header, l1_size) == 36, "");
static_assert(offsetof(struct qcow2_raw_header, l1_off) == 40, "");
static_assert(offsetof(struct qcow2_raw_header, rt_off) == 48, "");
static_assert(offsetof(struct qcow2_raw_header, rt_clusters) == 56, "");
static_assert(offsetof(struct qcow2_raw_header, nb_snapshots) == 60, "");
static_assert(offsetof(struct qcow2_raw_header, snapshots_off) == 64, "");
static_assert(offsetof(struct qcow2_raw_header, incompat) == QCOW2_V2_HEADER_LEN, "");
static_assert(offsetof(struct qcow2_raw_header, compat) == 80, "");
static_assert(offsetof(struct qcow2_raw_header, autoclear) == 88, "");
static_assert(offsetof(struct qcow2_raw_header, refcount_order) == 96, "");
static_assert(offsetof(struct qcow2_raw_header, header_len) == 100, "");
static_assert(offsetof(struct qcow2_raw_header, compression_type) == QCOW2_V3_HEADER_LEN, "");
static_assert(sizeof(struct qcow2_raw_header) == QCOW2_FULL_HEADER_LEN, "");

/* Entry of the snapshot table; extra data, id and name follow, padded to 8 bytes. */
struct qcow2_raw_snapshot {
	uint8_t l1_off[8], l1_size[4], id_len[2], name_len[2], date_sec[4], date_nsec[4], clock_nsec[8], vm_state_size[4], extra_len[4];
};
static_assert(offsetof(struct qcow2_raw_snapshot, id_len) == 12, "");
static_assert(offsetof(struct qcow2_raw_snapshot, date_sec) == 16, "");
static_assert(offsetof(struct qcow2_raw_snapshot, clock_nsec) == 24, "");
static_assert(offsetof(struct qcow2_raw_snapshot, extra_len) == 36, "");
static_assert(sizeof(struct qcow2_raw_snapshot) == 40, "");

/* Extra data of a snapshot, as far as it is known; version 3 has at least the first two. */
struct qcow2_raw_snapshot_extra {
	uint8_t vm_state_size[8], disk_size[8], icount[8];
};
static_assert(sizeof(struct qcow2_raw_snapshot_extra) == 24, "");

/* The bitmaps header extension. */
struct qcow2_raw_bitmaps {
	uint8_t nb_bitmaps[4], reserved[4], dir_size[8], dir_off[8];
};
static_assert(offsetof(struct qcow2_raw_bitmaps, dir_off) == 16, "");
static_assert(sizeof(struct qcow2_raw_bitmaps) == 24, "");

/* Entry of the bitmap directory; extra data and name follow, padded to 8 bytes. */
struct qcow2_raw_bitmap {
	uint8_t table_off[8], table_size[4], flags[4], type[1], granularity_bits[1], name_len[2], extra_len[4];
};
static_assert(offsetof(struct qcow2_raw_bitmap, flags) == 12, "");
static_assert(offsetof(struct qcow2_raw_bitmap, type) == 16, "");
static_assert(offsetof(struct qcow2_raw_bitmap, name_len) == 18, "");
static_assert(sizeof(struct qcow2_raw_bitmap) == 24, "");

struct qcow2_raw_feature_name {
	uint8_t type[1], bit[1], name[46];
};
static_assert(sizeof(struct qcow2_raw_feature_name) == 48, "");

/* --- Geometry: what follows from cluster size, L2 entry size and refcount width --- */

struct qcow2_geo {
	uint8_t cluster_bits;
	uint8_t l2_entry_size;	/* 8, or 16 if extended */
	uint8_t l2_bits;	/* log2 of the entries of an L2 table */
	uint8_t sub_bits;	/* log2 of the bytes of a subcluster */
	uint8_t subs;		/* subclusters per cluster: 1 or 32 */
	uint8_t refcount_order;
	uint8_t rb_bits;	/* log2 of the entries of a refcount block */
	bool ext;		/* extended L2 entries */
	uint32_t cluster_size;
	uint32_t sub_size;
	uint64_t refcount_max;
};

void qcow2_geo_init(struct qcow2_geo *g, unsigned cluster_bits, bool ext, unsigned refcount_order);
/* Entries of the L1 table for a virtual size; may exceed the limit. */
uint64_t qcow2_l1_entries(const struct qcow2_geo *g, uint64_t size);
/* The largest virtual size that an L1 table within the limit can map. */
uint64_t qcow2_max_size(const struct qcow2_geo *g);

static inline uint64_t qcow2_l1_index(const struct qcow2_geo *g, uint64_t guest_off)
{
	return guest_off >> (g->cluster_bits + g->l2_bits);
}

static inline uint32_t qcow2_l2_index(const struct qcow2_geo *g, uint64_t guest_off)
{
	return (guest_off >> g->cluster_bits) & ((1u << g->l2_bits) - 1);
}

static inline uint64_t qcow2_clusters(const struct qcow2_geo *g, uint64_t bytes)
{
	return (bytes >> g->cluster_bits) + !!(bytes & (g->cluster_size - 1));
}

/* --- Entries --- */

#define QCOW2_COPIED (1ull << 63)
#define QCOW2_COMPRESSED (1ull << 62)
#define QCOW2_ZERO 1ull			/* only version 3 without extended L2 entries */
#define QCOW2_OFFSET_MASK 0x00fffffffffffe00ull
#define QCOW2_L1_RESERVED 0x7f000000000001ffull
#define QCOW2_L2_RESERVED 0x3f000000000001feull	/* of a standard cluster; and bit 0 where QCOW2_ZERO does not exist */
#define QCOW2_RT_OFFSET_MASK 0xfffffffffffffe00ull
#define QCOW2_RT_RESERVED 0x1ffull
#define QCOW2_BITMAP_ALL_ONES 1ull	/* of a bitmap table entry without an offset */
#define QCOW2_BITMAP_RESERVED 0xff000000000001feull

enum qcow2_kind {
	QCOW2_UNALLOCATED,	/* the backing file, or zeroes */
	QCOW2_ZERO_PLAIN,
	QCOW2_ZERO_ALLOCATED,	/* reads as zeroes, keeps a host cluster */
	QCOW2_NORMAL,
	QCOW2_COMPRESSED_DATA,
	QCOW2_INVALID,		/* an entry that the format does not allow */
};

/* An L2 entry. `bitmap` is 0 where entries are not extended. */
struct qcow2_l2e {
	uint64_t entry, bitmap;
};

static inline struct qcow2_l2e qcow2_l2_get(const struct qcow2_geo *g, const void *table, uint32_t index)
{
	const uint8_t *p = (const uint8_t *)table + (size_t)index * g->l2_entry_size;

	return (struct qcow2_l2e){ get_be64(p), g->ext ? get_be64(p + 8) : 0 };
}

static inline void qcow2_l2_put(const struct qcow2_geo *g, void *table, uint32_t index, struct qcow2_l2e e)
{
	uint8_t *p = (uint8_t *)table + (size_t)index * g->l2_entry_size;

	put_be64(p, e.entry);
	if (g->ext)
		put_be64(p + 8, e.bitmap);
}

/* Host offset of a standard cluster; 0: none. */
static inline uint64_t qcow2_l2_host(uint64_t entry)
{
	return entry & QCOW2_OFFSET_MASK;
}

/* What subcluster `sub` (0 if entries are not extended) of the cluster is. `data_file`: host offset 0 with QCOW2_COPIED is a cluster. */
enum qcow2_kind qcow2_l2_kind(const struct qcow2_geo *g, struct qcow2_l2e e, unsigned sub, bool data_file);
/* Compressed cluster: where it lies, and how long it may be at most (to the end of its last 512-byte sector). */
void qcow2_l2_compressed(const struct qcow2_geo *g, uint64_t entry, uint64_t *ret_off, uint32_t *ret_len);
/* 0 if the offset or the length does not fit. `len` in bytes, from `off` on. */
uint64_t qcow2_l2_make_compressed(const struct qcow2_geo *g, uint64_t off, uint32_t len);

/* Refcount `index` of a block (or part of one) of 2^order bits each. */
uint64_t qcow2_refcount_get(unsigned order, const void *block, uint32_t index);
void qcow2_refcount_set(unsigned order, void *block, uint32_t index, uint64_t value);

/* --- Header --- */

struct qcow2_ext {
	uint32_t type, len;
	uint8_t *data;		/* len bytes, and a NUL that does not belong to it */
};

/*
 * All of the header's cluster in one value. The texts are NULL where the image has none. `ext` holds the other extensions in their order: unknown ones, the feature
 * names, the crypto header; so serialising what was parsed loses nothing.
 */
struct qcow2_header {
	struct qcow2_geo geo;
	uint32_t version, crypt_method, l1_size, rt_clusters, nb_snapshots, header_len;
	uint64_t size, l1_off, rt_off, snapshots_off;
	uint64_t incompat, compat, autoclear;
	uint8_t compression_type;	/* enum qcow2_compression */
	char *backing_file, *backing_format, *data_file;
	struct {
		uint32_t count;		/* 0: no bitmaps extension */
		uint64_t dir_size, dir_off;
	} bitmaps;
	struct qcow2_ext *ext;
	unsigned next;			/* number of ext */
	uint8_t *tail;			/* header fields behind those known here: header_len - QCOW2_FULL_HEADER_LEN bytes, or NULL */
};

enum qcow2_parse_flags {
	QCOW2_PARSE_LAX = 1 << 0,	/* describe what can be described (info, check): unknown incompatible bits, encryption and table positions are accepted */
};

/*
 * How many bytes from the image's start qcow2_header_parse() needs: a cluster. `buf` has at least QCOW2_V2_HEADER_LEN bytes, or `len` is less
 * and the image is too short. -EINVAL with the reason if these bytes are no qcow2 header.
 */
int qcow2_header_probe(const void *buf, size_t len, const char *name, uint32_t *ret_need, struct err *err);
/*
 * Parses and checks everything that can be checked without reading more. `len` bytes of `buf` are the start of the image, at least what
 * qcow2_header_probe() asked for or the whole image if that is shorter. -EINVAL or -ENOTSUP with what is wrong and what to do. Free with qcow2_header_fini().
 */
int qcow2_header_parse(const void *buf, size_t len, const char *name, unsigned flags, struct qcow2_header *ret, struct err *err);
void qcow2_header_fini(struct qcow2_header *h);	/* of a zeroed one, too */
/* Puts what may change while an image is in use (size, tables, snapshots, bits) into its first 512 bytes, which have the rest already. */
void qcow2_header_update(const struct qcow2_header *h, void *sector);
/* Writes the whole first cluster, zeroes where nothing is. -ENOSPC if it does not fit. */
int qcow2_header_serialise(const struct qcow2_header *h, void *cluster, const char *name, struct err *err);
/* Appends an extension; copies the data. -ENOMEM, -E2BIG. */
int qcow2_header_add_ext(struct qcow2_header *h, uint32_t type, const void *data, uint32_t len);
/* The table that tells older programs the names of the features this image may use. */
int qcow2_header_add_feature_names(struct qcow2_header *h);
/* The name of a feature bit for messages: the image's own table first, then the known ones. NULL if nobody knows it. `type`: 0 incompatible, 1 compatible, 2 autoclear. */
const char *qcow2_feature_name(const struct qcow2_header *h, unsigned type, unsigned bit, char *buf, size_t size);
