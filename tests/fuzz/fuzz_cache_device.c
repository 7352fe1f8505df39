/* SPDX-License-Identifier: MIT */
/*
 * A cache device's superblock and segment header from anybody. The input is a list of changes (offset, two bytes; value, one byte) to good ones; their
 * checksums are then made good, so that what lies behind them is looked at. What is accepted must fit together, and be the same when it is written again.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "cache/second_format.h"
#include "util/bytes.h"
#include "util/crc32c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t buf[SECOND_SUPER + SECOND_HEADER], again[SECOND_SUPER];
static struct second_super sb, sb2;
static struct second_header h;

static void fix(uint8_t *p, size_t len)
{
	put_le32(p + 8, 0);
	put_le32(p + 8, crc32c(0, p, len));
}

static void make_good(struct uuid *uuid)
{
	memset(uuid, 7, sizeof(*uuid));
	sb = (struct second_super){ .uuid = *uuid, .seq = 3, .size = 64 << 20, .segment_size = SECOND_SEGMENT, .segments = 63 };
	sb.rec[1] = (struct second_record){ .epoch = 77, .settled = true, .name = "volume" };
	second_super_encode(&sb, buf);
	h = (struct second_header){ .seq = 9, .index = 5, .count = 2, .entry = { { 1, 77, 2, false }, { 3, 77, 4, true } } };
	second_header_encode(&h, uuid, buf + SECOND_SUPER);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *why = NULL;
	struct uuid uuid;

	make_good(&uuid);
	for (size_t i = 0; i + 3 <= size; i += 3)
		buf[get_le16(data + i) % sizeof(buf)] = data[i + 2];
	if (size % 3 != 2) {
		fix(buf, SECOND_SUPER);
		fix(buf + SECOND_SUPER, SECOND_HEADER);
	}
	if (second_super_decode(buf, &sb, &why)) {
		assert(why);
	} else {
		assert(second_segment_at(sb.segment_size, sb.segments) <= sb.size && is_pow2(sb.segment_size));
		for (unsigned i = 0; i < SECOND_RECORDS; i++)
			assert(memchr(sb.rec[i].name, 0, SECOND_NAME));
		second_super_encode(&sb, again);
		assert(!second_super_decode(again, &sb2, &why) && sb2.seq == sb.seq && sb2.segments == sb.segments);
	}
	if (second_header_decode(buf + SECOND_SUPER, &uuid, 5, 14, &h))
		assert(h.count <= 14 && h.index == 5);
	return 0;
}
