/* SPDX-License-Identifier: MIT */
/* Second level of the read cache: what lies on its device. See docs/format-cache.md. */
#include "cache/second_format.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "util/crc32c.h"

#define SUPER_MAGIC "WEIRCACH"
#define HEADER_MAGIC "WEIRCSEG"

enum super_offset {
	SB_MAGIC = 0, SB_CRC = 8, SB_VERSION = 12, SB_INCOMPAT = 16, SB_COMPAT = 24, SB_UUID = 32, SB_SEQ = 48, SB_SIZE = 56, SB_BLOCK = 64,
	SB_SEGMENT_SIZE = 68, SB_SEGMENTS = 72, SB_WALL = 80, SB_RECORDS = 128, SB_RECORD_SIZE = 128,
};

enum record_offset { REC_EPOCH = 0, REC_FLAGS = 8, REC_IDENTITY = 16, REC_SIZE = 48, REC_WALL = 56, REC_NAME = 64 };
#define REC_FLAG_SETTLED 1u

enum header_offset { H_MAGIC = 0, H_CRC = 8, H_INDEX = 12, H_UUID = 16, H_SEQ = 32, H_COUNT = 40, H_ENTRIES = 64, H_ENTRY_SIZE = 32 };
enum entry_offset { E_BLOCK = 0, E_EPOCH = 8, E_CRC = 16, E_FLAGS = 20 };
#define E_FLAG_DEAD 1u

static_assert(SB_RECORDS + SECOND_RECORDS * SB_RECORD_SIZE <= SECOND_SUPER, "the records fit the superblock");
static_assert(REC_NAME + SECOND_NAME == SB_RECORD_SIZE, "the name ends the record");
static_assert(H_ENTRIES + SECOND_ENTRIES * H_ENTRY_SIZE == SECOND_HEADER, "the entries fill the header");
static_assert(SECOND_HEADER + SECOND_ENTRIES * SECOND_BLOCK == SECOND_SEGMENT, "the blocks fill the segment");

/* With the field itself taken for zero. */
static uint32_t crc_of(const uint8_t *buf, uint32_t len, uint32_t at)
{
	static const uint8_t zero[4];
	uint32_t crc = crc32c(0, buf, at);

	crc = crc32c(crc, zero, 4);
	return crc32c(crc, buf + at + 4, len - at - 4);
}

static void encode_record(const struct second_record *r, uint8_t *p)
{
	put_le64(p + REC_EPOCH, r->epoch);
	put_le32(p + REC_FLAGS, r->settled ? REC_FLAG_SETTLED : 0);
	for (unsigned i = 0; i < 4; i++)
		put_le64(p + REC_IDENTITY + 8 * i, r->identity.word[i]);
	put_le64(p + REC_SIZE, r->size);
	put_le64(p + REC_WALL, r->wall_ns);
	memcpy(p + REC_NAME, r->name, strnlen(r->name, SECOND_NAME - 1));
}

static void decode_record(const uint8_t *p, struct second_record *r)
{
	*r = (struct second_record){ .epoch = get_le64(p + REC_EPOCH), .settled = get_le32(p + REC_FLAGS) & REC_FLAG_SETTLED,
				     .size = get_le64(p + REC_SIZE), .wall_ns = get_le64(p + REC_WALL) };
	for (unsigned i = 0; i < 4; i++)
		r->identity.word[i] = get_le64(p + REC_IDENTITY + 8 * i);
	memcpy(r->name, p + REC_NAME, SECOND_NAME - 1);
}

void second_super_encode(const struct second_super *sb, uint8_t *buf)
{
	memset(buf, 0, SECOND_SUPER);
	memcpy(buf + SB_MAGIC, SUPER_MAGIC, 8);
	put_le32(buf + SB_VERSION, SECOND_VERSION);
	put_le64(buf + SB_COMPAT, sb->compatible);
	memcpy(buf + SB_UUID, sb->uuid.b, 16);
	put_le64(buf + SB_SEQ, sb->seq);
	put_le64(buf + SB_SIZE, sb->size);
	put_le32(buf + SB_BLOCK, SECOND_BLOCK);
	put_le32(buf + SB_SEGMENT_SIZE, sb->segment_size);
	put_le32(buf + SB_SEGMENTS, sb->segments);
	put_le64(buf + SB_WALL, sb->wall_ns);
	for (unsigned i = 0; i < SECOND_RECORDS; i++)
		encode_record(&sb->rec[i], buf + SB_RECORDS + i * SB_RECORD_SIZE);
	put_le32(buf + SB_CRC, crc_of(buf, SECOND_SUPER, SB_CRC));
}

static int fail(const char **why, int error, const char *text)
{
	*why = text;
	return error;
}

static bool is_sane(const struct second_super *sb)
{
	if (!is_pow2(sb->segment_size) || sb->segment_size < SECOND_SEGMENT_MIN || sb->segment_size > SECOND_SEGMENT)
		return false;
	return sb->segments >= SECOND_MIN_SEGMENTS && second_segment_at(sb->segment_size, sb->segments) <= sb->size && sb->size <= DISK_MAX_SIZE;
}

int second_super_decode(const uint8_t *buf, struct second_super *ret, const char **why)
{
	struct second_super sb = { .compatible = get_le64(buf + SB_COMPAT), .seq = get_le64(buf + SB_SEQ), .size = get_le64(buf + SB_SIZE),
				   .segment_size = get_le32(buf + SB_SEGMENT_SIZE), .segments = get_le32(buf + SB_SEGMENTS),
				   .wall_ns = get_le64(buf + SB_WALL) };

	if (memcmp(buf + SB_MAGIC, SUPER_MAGIC, 8))
		return fail(why, -EINVAL, "is no cache device");
	if (get_le32(buf + SB_CRC) != crc_of(buf, SECOND_SUPER, SB_CRC))
		return fail(why, -EBADMSG, "its superblock is damaged");
	if (get_le32(buf + SB_VERSION) != SECOND_VERSION || get_le64(buf + SB_INCOMPAT) || get_le32(buf + SB_BLOCK) != SECOND_BLOCK)
		return fail(why, -ENOTSUP, "is of a version that this program does not know");
	memcpy(sb.uuid.b, buf + SB_UUID, 16);
	for (unsigned i = 0; i < SECOND_RECORDS; i++)
		decode_record(buf + SB_RECORDS + i * SB_RECORD_SIZE, &sb.rec[i]);
	if (!is_sane(&sb))
		return fail(why, -EBADMSG, "the numbers in its superblock contradict each other");
	*ret = sb;
	return 0;
}

void second_header_encode(const struct second_header *h, const struct uuid *uuid, uint8_t *buf)
{
	memset(buf, 0, SECOND_HEADER);
	memcpy(buf + H_MAGIC, HEADER_MAGIC, 8);
	put_le32(buf + H_INDEX, h->index);
	memcpy(buf + H_UUID, uuid->b, 16);
	put_le64(buf + H_SEQ, h->seq);
	put_le32(buf + H_COUNT, h->count);
	for (uint32_t i = 0; i < h->count; i++) {
		uint8_t *p = buf + H_ENTRIES + i * H_ENTRY_SIZE;

		put_le64(p + E_BLOCK, h->entry[i].block);
		put_le64(p + E_EPOCH, h->entry[i].epoch);
		put_le32(p + E_CRC, h->entry[i].crc);
		put_le32(p + E_FLAGS, h->entry[i].dead ? E_FLAG_DEAD : 0);
	}
	put_le32(buf + H_CRC, crc_of(buf, SECOND_HEADER, H_CRC));
}

bool second_header_decode(const uint8_t *buf, const struct uuid *uuid, uint32_t index, uint32_t entries, struct second_header *ret)
{
	if (memcmp(buf + H_MAGIC, HEADER_MAGIC, 8) || memcmp(buf + H_UUID, uuid->b, 16) || get_le32(buf + H_INDEX) != index ||
	    get_le32(buf + H_CRC) != crc_of(buf, SECOND_HEADER, H_CRC))
		return false;
	ret->seq = get_le64(buf + H_SEQ);
	ret->index = index;
	ret->count = min(get_le32(buf + H_COUNT), entries);
	for (uint32_t i = 0; i < ret->count; i++) {
		const uint8_t *p = buf + H_ENTRIES + i * H_ENTRY_SIZE;

		ret->entry[i] = (struct second_entry){ .block = get_le64(p + E_BLOCK), .epoch = get_le64(p + E_EPOCH),
						       .crc = get_le32(p + E_CRC), .dead = get_le32(p + E_FLAGS) & E_FLAG_DEAD };
	}
	return true;
}

uint32_t second_crc(uint64_t block, uint64_t epoch, const void *data)
{
	uint8_t head[16];

	put_le64(head, block);
	put_le64(head + 8, epoch);
	return crc32c(crc32c(0, head, sizeof(head)), data, SECOND_BLOCK);
}
