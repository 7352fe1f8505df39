/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache: what lies on its device. Pure code. Normative: docs/format-cache.md.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "blk/disk.h"
#include "util/uuid.h"

#define SECOND_VERSION 1u
#define SECOND_BLOCK 4096u
#define SECOND_SUPER 16384u		/* bytes of a superblock */
#define SECOND_SUPER_STRIDE 65536u	/* from one of the two slots to the other */
#define SECOND_FIRST (1u << 20)		/* where the segments begin */
#define SECOND_HEADER 8192u		/* of a segment */
#define SECOND_SEGMENT (1u << 20)	/* by default, and at most */
#define SECOND_SEGMENT_MIN (64u << 10)
#define SECOND_ENTRIES 254u		/* of a segment, at most */
#define SECOND_RECORDS 120u
#define SECOND_NAME 64u
#define SECOND_MIN_SEGMENTS 4u

/* A volume, under one epoch. */
struct second_record {
	uint64_t epoch;		/* random; 0: the record is free */
	bool settled;		/* `identity` counts */
	struct disk_identity identity;
	uint64_t size;
	uint64_t wall_ns;	/* when it was last attached or settled */
	char name[SECOND_NAME];	/* NUL-terminated; for people */
};

struct second_super {
	uint64_t compatible;	/* features, kept as they are */
	struct uuid uuid;
	uint64_t seq;
	uint64_t size;		/* of the device at format */
	uint32_t segment_size, segments;
	uint64_t wall_ns;
	struct second_record rec[SECOND_RECORDS];
};

struct second_entry {
	uint64_t block, epoch;
	uint32_t crc;
	bool dead;
};

struct second_header {
	uint64_t seq;
	uint32_t index, count;
	struct second_entry entry[SECOND_ENTRIES];
};

void second_super_encode(const struct second_super *sb, uint8_t *buf);
/* -EINVAL: nothing of the kind; -ENOTSUP: of a later version; -EBADMSG: damaged. `why` is static text. */
int second_super_decode(const uint8_t *buf, struct second_super *ret, const char **why);
void second_header_encode(const struct second_header *h, const struct uuid *uuid, uint8_t *buf);
/* False if it is none of this device and place. */
bool second_header_decode(const uint8_t *buf, const struct uuid *uuid, uint32_t index, uint32_t entries, struct second_header *ret);
/* Of a block: it says whose it is. */
uint32_t second_crc(uint64_t block, uint64_t epoch, const void *data);

static inline uint64_t second_segment_at(uint32_t segment_size, uint32_t i)
{
	return SECOND_FIRST + (uint64_t)i * segment_size;
}
