/* SPDX-License-Identifier: MIT */
/*
 * Write log: the on-disk format, as docs/format-wlog.md states it. Pure code: no I/O, no allocation.
 *
 * All integers are little-endian. Nothing read from a device is trusted before its checksum matched, and after that every
 * length and offset is still checked against its bounds.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "util/uuid.h"
#include "wlog/wlog.h"

#define WL_BLOCK 4096u
#define WL_SB_SLOT (64u << 10)		/* one superblock with its volume table */
#define WL_SB_SLOTS 2u
#define WL_FIRST_SEGMENT (256ull << 10)
#define WL_SEGMENT_MIN (64u << 10)	/* what the format allows */
#define WL_SEGMENT_MIN_MADE (1u << 20)	/* what we make, but for tests */
#define WL_SEGMENT_MAX (64u << 20)
#define WL_MIN_SEGMENTS 8u
#define WL_MAX_BATCH (1u << 20)		/* bytes of one batch, header and padding included */
#define WL_MAX_INDEX (256u << 10)	/* a segment whose index would be larger has none */
#define WL_VERSION 1u

/* --- Superblock --- */

enum {				/* byte offsets in a slot */
	WL_SB_MAGIC = 0,	/* 8 "WEIRWLOG" */
	WL_SB_CRC = 8,		/* 4 crc32c of the slot with this field zero */
	WL_SB_VERSION = 12,	/* 4 */
	WL_SB_INCOMPAT = 16,	/* 8 feature bits: unknown ones forbid opening */
	WL_SB_COMPAT = 24,	/* 8 */
	WL_SB_UUID = 32,	/* 16 */
	WL_SB_SEQ = 48,		/* 8 the slot with the higher one counts */
	WL_SB_DEV_SIZE = 56,	/* 8 bytes */
	WL_SB_SEG_SIZE = 64,	/* 4 bytes */
	WL_SB_SEG_COUNT = 68,	/* 4 */
	WL_SB_FLAGS = 72,	/* 4 */
	WL_SB_NVOLS = 76,	/* 4 slots of the table that are used or were */
	WL_SB_GENERATION = 80,	/* 8 opens for writing */
	WL_SB_GEN_START = 88,	/* 8 first sequence of this generation */
	WL_SB_TAIL_SEQ = 96,	/* 8 oldest batch that is needed */
	WL_SB_TAIL_POS = 104,	/* 8 where it is */
	WL_SB_TAIL_PREV = 112,	/* 8 nonce that it names as its predecessor's */
	WL_SB_DURABLE_SEQ = 120, /* 8 batches up to here are known to be durable (0: none) */
	WL_SB_WALL = 128,	/* 8 nanoseconds since 1970 */
	WL_SB_NSIDES = 136,	/* 4 */
	WL_SB_SIDE = 140,	/* 4 which side this device is */
	WL_SB_SIDE_UUID = 144,	/* 2 x 16 */
	WL_SB_SIDE_STATE = 176,	/* 2 x 4 */
	WL_SB_VOLUMES = 4096,	/* the volume table */
};

#define WL_SB_FLAG_CLEAN 1u	/* stopped in order: nothing follows WL_SB_DURABLE_SEQ */

enum wl_side_state { WL_SIDE_IN_SYNC, WL_SIDE_OUT };

enum {				/* byte offsets in a volume's entry */
	WL_VOL_UUID = 0,	/* 16, null: the slot is free */
	WL_VOL_NAME = 16,	/* 64 NUL padded */
	WL_VOL_IMAGE = 80,	/* 256 NUL padded */
	WL_VOL_SIZE = 336,	/* 8 */
	WL_VOL_QUOTA = 344,	/* 8 */
	WL_VOL_GENERATION = 352, /* 8 attaches */
	WL_VOL_FLOOR_SEQ = 360,	/* 8 records in older batches are in the image */
	WL_VOL_FLOOR_EPOCH = 368, /* 8 records of older epochs are in the image */
	WL_VOL_EPOCH = 376,	/* 8 next epoch at the time of writing */
	WL_VOL_RNO = 384,	/* 8 next record number at the time of writing */
	WL_VOL_STAMP = 392,	/* 8 the image's modification stamp, 0: none */
	WL_VOL_STAMP_WALL = 400, /* 8 when it was taken, by the image's store's clock */
	WL_VOL_FLAGS = 408,	/* 4 */
	WL_VOL_DIRTY = 416,	/* 8 bytes dirty at the time of writing: for messages */
	WL_VOL_DIRTY_SINCE = 424, /* 8 wall clock */
	WL_VOL_ENTRY = 512,
};

#define WL_VOL_FLAG_DESTAGING 1u /* weir may be writing to the image: its stamp moves */
#define WL_VOL_FLAG_ATTACHED 2u	/* was attached when this was written */
#define WL_VOL_FLAG_ORDERED 4u	/* its records are to be destaged in order, and are brought forward whole */

struct wl_volrec {
	struct uuid uuid;
	char name[WLOG_NAME_MAX + 1];
	char image[256];
	uint64_t size, quota, generation;
	uint64_t floor_seq, floor_epoch, epoch, rno;
	uint64_t stamp, stamp_wall;
	uint64_t dirty, dirty_since;
	uint32_t flags;
};

struct wl_super {
	struct uuid uuid;
	uint64_t incompat, compat;
	uint64_t seq, dev_size, generation, gen_start;
	uint64_t tail_seq, tail_pos, tail_prev, durable_seq, wall;
	uint32_t seg_size, seg_count, flags;
	uint32_t nsides, side;
	struct uuid side_uuid[WLOG_MAX_DEVICES];
	uint32_t side_state[WLOG_MAX_DEVICES];
	uint32_t nvols;
	struct wl_volrec vol[WLOG_MAX_VOLUMES];
};

/* Fills the slot (WL_SB_SLOT bytes). */
void wl_super_encode(const struct wl_super *sb, uint8_t *slot);
/* 0; -EINVAL: not a superblock; -EBADMSG: a damaged one; -ENOTSUP: other version or unknown incompatible bit. `err` may be NULL. */
int wl_super_decode(const uint8_t *slot, struct wl_super *sb, struct err *err);

/* --- Batch --- */

enum {				/* byte offsets in a batch */
	WL_B_MAGIC = 0,		/* 4 */
	WL_B_CRC = 4,		/* 4 crc32c of bytes 8..127 */
	WL_B_SEQ = 8,		/* 8 */
	WL_B_GENERATION = 16,	/* 8 */
	WL_B_PREV = 24,		/* 8 nonce of the batch before */
	WL_B_NONCE = 32,	/* 8 random */
	WL_B_WALL = 40,		/* 8 */
	WL_B_LENGTH = 48,	/* 4 whole batch, multiple of WL_BLOCK */
	WL_B_PAYLOAD = 52,	/* 4 bytes of index and data behind the header */
	WL_B_COUNT = 56,	/* 4 records; their descriptors follow the payload */
	WL_B_DESC_CRC = 60,	/* 4 */
	WL_B_INDEX_LEN = 64,	/* 4 bytes at the start of the payload: index of the segment before; 0: none */
	WL_B_INDEX_CRC = 68,	/* 4 */
	WL_B_FLAGS = 72,	/* 4 */
	WL_B_SEGMENT = 76,	/* 4 which segment this lies in */
	WL_B_UUID = 80,		/* 16 the log's */
	WL_B_HEADER = 128,
};

#define WL_B_MAGIC_VALUE 0x42574c57u	/* "WLWB" */
#define WL_B_FLAG_MORE 1u	/* an atomic group goes on in the next batch */

struct wl_bhead {
	uint64_t seq, generation, prev, nonce, wall;
	uint32_t length, payload, count, desc_crc, index_len, index_crc, flags, segment;
};

enum wl_type {
	WL_WRITE = 1,
	WL_ZERO = 2,
	WL_DISCARD = 3,
	WL_LOST = 4,		/* a write whose data was damaged when it was brought forward: reads of it fail */
};

static inline bool wl_is_zeroes(uint8_t type)
{
	return type == WL_ZERO || type == WL_DISCARD;
}

enum {				/* byte offsets in a record's descriptor */
	WL_D_TYPE = 0,		/* 1 */
	WL_D_FLAGS = 1,		/* 1 */
	WL_D_VOLUME = 2,	/* 2 slot in the volume table */
	WL_D_CRC = 4,		/* 4 crc32c of the data */
	WL_D_OFF = 8,		/* 8 bytes */
	WL_D_LEN = 16,		/* 8 bytes */
	WL_D_DATA = 24,		/* 4 where the data is, from the start of the batch */
	WL_D_RNO = 32,		/* 8 record number of the volume */
	WL_D_EPOCH = 40,	/* 8 */
	WL_D_SIZE = 48,
};

#define WL_D_FLAG_COPY 1u	/* brought forward from an older batch, with its number and epoch */

struct wl_desc {
	uint8_t type, flags;
	uint16_t volume;
	uint32_t crc, data;
	uint64_t off, len, rno, epoch;
};

void wl_bhead_encode(const struct wl_bhead *h, const struct uuid *log, uint8_t *p);
/* Checks magic, checksum, the log's identity and that the lengths fit `room` bytes. 0 or -EBADMSG. */
int wl_bhead_decode(const uint8_t *p, uint64_t room, const struct uuid *log, struct wl_bhead *h);
void wl_desc_encode(const struct wl_desc *d, uint8_t *p);
void wl_desc_decode(const uint8_t *p, struct wl_desc *d);
/* True if the record can be one of a batch with header h (data inside the payload, range sane). */
bool wl_desc_is_sane(const struct wl_desc *d, const struct wl_bhead *h);

static inline uint32_t wl_batch_desc_off(const struct wl_bhead *h)
{
	return WL_B_HEADER + h->payload;
}

/* --- Index of a segment: for each of its batches this head, then its descriptors --- */

enum {
	WL_I_SEQ = 0,		/* 8 */
	WL_I_NONCE = 8,		/* 8 */
	WL_I_WALL = 16,		/* 8 */
	WL_I_OFFSET = 24,	/* 4 in the segment */
	WL_I_LENGTH = 28,	/* 4 */
	WL_I_COUNT = 32,	/* 4 */
	WL_I_FLAGS = 36,	/* 4 */
	WL_I_PAYLOAD = 40,	/* 4 */
	WL_I_HEAD = 48,
};
