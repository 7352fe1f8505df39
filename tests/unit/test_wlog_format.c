/* SPDX-License-Identifier: MIT */
/* The write log's format: what is encoded is decoded, and what is damaged or impossible is refused. */
#include <errno.h>

#include "lib/test.h"
#include "util/bytes.h"
#include "util/crc32c.h"
#include "util/err.h"
#include "util/rng.h"
#include "wlog/format.h"

static uint8_t slot[WL_SB_SLOT];

static struct wl_super *a_super(void)
{
	static struct wl_super sb;

	memset(&sb, 0, sizeof(sb));
	uuid_random(&sb.uuid);
	sb.seq = 7;
	sb.dev_size = 64 << 20;
	sb.seg_size = 1 << 20;
	sb.seg_count = 60;
	sb.generation = 3;
	sb.gen_start = 11;
	sb.tail_seq = 5;
	sb.tail_pos = WL_FIRST_SEGMENT + 8 * WL_BLOCK;
	sb.tail_prev = 0x1122334455667788;
	sb.durable_seq = 10;
	sb.nsides = 2;
	sb.side = 1;
	sb.side_state[1] = WL_SIDE_OUT;
	sb.nvols = 2;
	uuid_random(&sb.vol[1].uuid);
	strcpy(sb.vol[1].name, "vm-112");
	strcpy(sb.vol[1].image, "/images/vm-112.raw");
	sb.vol[1].size = 10ull << 30;
	sb.vol[1].floor_epoch = 4;
	sb.vol[1].flags = WL_VOL_FLAG_DESTAGING;
	return &sb;
}

static void recrc(void)
{
	put_le32(slot + WL_SB_CRC, 0);
	put_le32(slot + WL_SB_CRC, crc32c(0, slot, WL_SB_SLOT));
}

static void a_superblock_comes_back_as_it_was(void)
{
	static struct wl_super got;
	struct wl_super *sb = a_super();

	wl_super_encode(sb, slot);
	CHECK_EQ(wl_super_decode(slot, &got, NULL), 0);
	CHECK(!memcmp(&got, sb, sizeof(got)));
}

static void every_flipped_bit_of_a_superblock_is_found(void)
{
	static struct wl_super got;

	wl_super_encode(a_super(), slot);
	for (uint32_t i = 0; i < WL_SB_SLOT; i += i < 256 ? 1 : 97) {
		slot[i] ^= 1 << (i % 8);
		CHECK(wl_super_decode(slot, &got, NULL) < 0);
		slot[i] ^= 1 << (i % 8);
	}
	CHECK_EQ(wl_super_decode(slot, &got, NULL), 0);
}

static void an_unknown_feature_and_another_version_are_named(void)
{
	static struct wl_super got;
	struct err err = ERR_INIT;

	wl_super_encode(a_super(), slot);
	put_le64(slot + WL_SB_INCOMPAT, 0x40);
	recrc();
	CHECK_EQ(wl_super_decode(slot, &got, &err), -ENOTSUP);
	CHECK(strstr(err.msg, "0x40"));
	err_clear(&err);
	wl_super_encode(a_super(), slot);
	put_le32(slot + WL_SB_VERSION, 9);
	recrc();
	CHECK_EQ(wl_super_decode(slot, &got, &err), -ENOTSUP);
	CHECK(strstr(err.msg, "version 9"));
}

static void impossible_geometry_is_refused_though_its_checksum_is_good(void)
{
	static const struct { uint32_t off, len; uint64_t val; } bad[] = {
		{ WL_SB_SEG_SIZE, 4, 0 }, { WL_SB_SEG_SIZE, 4, 3 << 20 }, { WL_SB_SEG_SIZE, 4, 128 << 20 },
		{ WL_SB_SEG_COUNT, 4, 0 }, { WL_SB_SEG_COUNT, 4, UINT32_MAX }, { WL_SB_SEG_COUNT, 4, 7 },
		{ WL_SB_NVOLS, 4, 65 }, { WL_SB_NSIDES, 4, 0 }, { WL_SB_NSIDES, 4, 3 }, { WL_SB_SIDE, 4, 2 },
		{ WL_SB_TAIL_POS, 8, 0 }, { WL_SB_TAIL_POS, 8, UINT64_MAX - 4095 }, { WL_SB_TAIL_POS, 8, WL_FIRST_SEGMENT + 1 },
		{ WL_SB_TAIL_SEQ, 8, 0 }, { WL_SB_DEV_SIZE, 8, 1 << 20 },
	};
	static struct wl_super got;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		wl_super_encode(a_super(), slot);
		if (bad[i].len == 4)
			put_le32(slot + bad[i].off, bad[i].val);
		else
			put_le64(slot + bad[i].off, bad[i].val);
		recrc();
		CHECK_EQ(wl_super_decode(slot, &got, NULL), -EBADMSG);
	}
}

static void a_batch_header_comes_back_and_damage_is_found(void)
{
	struct wl_bhead h = { .seq = 9, .generation = 2, .prev = 3, .nonce = 4, .wall = 5, .length = 8192, .payload = 4096,
			      .count = 1, .desc_crc = 6, .flags = WL_B_FLAG_MORE, .segment = 7 }, got;
	struct uuid log, other;
	uint8_t p[WL_BLOCK];

	memset(p, 0, sizeof(p));
	uuid_random(&log);
	uuid_random(&other);
	wl_bhead_encode(&h, &log, p);
	CHECK_EQ(wl_bhead_decode(p, 1 << 20, &log, &got), 0);
	CHECK(got.seq == 9 && got.prev == 3 && got.nonce == 4 && got.length == 8192 && got.flags == WL_B_FLAG_MORE &&
	      got.segment == 7);
	CHECK_EQ(wl_bhead_decode(p, 1 << 20, &other, &got), -EBADMSG);
	CHECK_EQ(wl_bhead_decode(p, 4096, &log, &got), -EBADMSG);	/* longer than the room */
	for (unsigned i = 0; i < WL_B_HEADER * 8; i++) {
		p[i / 8] ^= 1 << (i % 8);
		CHECK_EQ(wl_bhead_decode(p, 1 << 20, &log, &got), -EBADMSG);
		p[i / 8] ^= 1 << (i % 8);
	}
}

static void a_batch_whose_parts_exceed_it_is_refused(void)
{
	struct wl_bhead ok = { .seq = 1, .length = 8192, .payload = 4096, .count = 1 }, got;
	struct wl_bhead bad[] = { ok, ok, ok, ok, ok, ok, ok };
	struct uuid log;
	uint8_t p[WL_BLOCK];

	memset(p, 0, sizeof(p));
	uuid_random(&log);
	bad[0].length = 8191;
	bad[1].length = 2 << 20;
	bad[2].payload = 8192;
	bad[3].count = UINT32_MAX;
	bad[4].index_len = 4097;
	bad[5].seq = 0;
	bad[6].payload = UINT32_MAX;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		wl_bhead_encode(&bad[i], &log, p);
		CHECK_EQ(wl_bhead_decode(p, 4 << 20, &log, &got), -EBADMSG);
	}
}

static void a_record_must_lie_in_its_batch_and_its_volume(void)
{
	struct wl_bhead h = { .length = 8192, .payload = 4096, .count = 1, .index_len = 100 };
	struct wl_desc ok = { .type = WL_WRITE, .off = 512, .len = 1000, .data = WL_B_HEADER + 100 }, got, bad;
	uint8_t p[WL_D_SIZE];

	wl_desc_encode(&ok, p);
	wl_desc_decode(p, &got);
	CHECK(!memcmp(&ok, &got, sizeof(ok)));
	CHECK(wl_desc_is_sane(&ok, &h));
	bad = ok, bad.data = WL_B_HEADER + 99;		/* in the index */
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.len = 3997;			/* one byte beyond the payload */
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.data = UINT32_MAX;
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.len = 0;
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.off = UINT64_MAX;
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.type = 9;
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.volume = WLOG_MAX_VOLUMES;
	CHECK(!wl_desc_is_sane(&bad, &h));
	bad = ok, bad.type = WL_ZERO, bad.len = DISK_MAX_SIZE;
	CHECK(!wl_desc_is_sane(&bad, &h));
}

int main(void)
{
	RUN(a_superblock_comes_back_as_it_was);
	RUN(every_flipped_bit_of_a_superblock_is_found);
	RUN(an_unknown_feature_and_another_version_are_named);
	RUN(impossible_geometry_is_refused_though_its_checksum_is_good);
	RUN(a_batch_header_comes_back_and_damage_is_found);
	RUN(a_batch_whose_parts_exceed_it_is_refused);
	RUN(a_record_must_lie_in_its_batch_and_its_volume);
	return 0;
}
