/* SPDX-License-Identifier: MIT */
/* qcow2: header, extensions, entries and table arithmetic. */
#include <errno.h>

#include "format/qcow2/format.h"
#include "lib/test.h"
#include "util/err.h"
#include "util/rng.h"

static uint8_t cluster[1 << 21], again[1 << 21];

static struct qcow2_header good(unsigned bits, unsigned version)
{
	struct qcow2_header h = { .version = version, .size = 1 << 30, .l1_off = 3ull << bits, .rt_off = 1ull << bits, .rt_clusters = 1 };

	qcow2_geo_init(&h.geo, bits, false, 4);
	h.l1_size = qcow2_l1_entries(&h.geo, h.size);
	h.header_len = version == 2 ? QCOW2_V2_HEADER_LEN : QCOW2_FULL_HEADER_LEN;
	return h;
}

static void serialise(const struct qcow2_header *h)
{
	struct err err = ERR_INIT;

	if (qcow2_header_serialise(h, cluster, "t", &err))
		test_fail("%s", err.msg);
}

static void what_was_serialised_is_parsed(void)
{
	for (unsigned bits = 9; bits <= 21; bits++) {
		for (unsigned version = 2; version <= 3; version++) {
			struct qcow2_header h = good(bits, version), g;
			struct err err = ERR_INIT;
			uint32_t need;

			h.backing_file = strdup("base.raw");
			h.backing_format = strdup("raw");
			qcow2_header_add_ext(&h, 0x12345678, "unknown", 7);
			if (bits > 9)
				qcow2_header_add_feature_names(&h);
			serialise(&h);
			CHECK_EQ(qcow2_header_probe(cluster, 512, "t", &need, &err), 0);
			CHECK_EQ(need, 1u << bits);
			CHECK_EQ(qcow2_header_parse(cluster, need, "t", 0, &g, &err), 0);
			CHECK_STR(g.backing_file, "base.raw");
			CHECK_STR(g.backing_format, "raw");
			CHECK_EQ(g.next, bits > 9 ? 2 : 1);
			CHECK_EQ(g.ext[0].type, 0x12345678);
			CHECK(g.ext[0].len == 7 && !memcmp(g.ext[0].data, "unknown", 7));
			CHECK_EQ(g.size, h.size);
			CHECK_EQ(g.l1_size, h.l1_size);
			memcpy(again, cluster, need);
			CHECK_EQ(qcow2_header_serialise(&g, cluster, "t", &err), 0);
			CHECK(!memcmp(again, cluster, need));
			qcow2_header_fini(&g);
			qcow2_header_fini(&h);
		}
	}
}

static void a_longer_header_keeps_its_unknown_fields(void)
{
	struct qcow2_header h = good(16, 3), g;
	struct err err = ERR_INIT;

	h.header_len = 128;
	h.tail = (uint8_t *)strdup("abcdefghijklmno");
	serialise(&h);
	CHECK_EQ(qcow2_header_parse(cluster, 65536, "t", 0, &g, &err), 0);
	CHECK_EQ(g.header_len, 128);
	CHECK(!memcmp(g.tail, "abcdefghijklmno", 16));
	qcow2_header_fini(&g);
	qcow2_header_fini(&h);
}

/* Changes bytes of a good header, and wants this error with this word. */
static void refused(unsigned at, unsigned bytes, uint64_t value, int code, const char *word)
{
	struct qcow2_header h = good(16, 3), g;
	struct err err = ERR_INIT;
	int ret;

	h.backing_file = strdup("x");
	serialise(&h);
	for (unsigned i = 0; i < bytes; i++)
		cluster[at + i] = value >> 8 * (bytes - 1 - i);
	ret = qcow2_header_parse(cluster, 65536, "t", 0, &g, &err);
	if (ret != code || !strstr(err.msg, word))
		test_fail("byte %u: %d \"%s\", wanted %d and \"%s\"", at, ret, err.msg, code, word);
	qcow2_header_fini(&h);
}

static void bad_headers_are_refused_with_the_reason(void)
{
	refused(0, 4, 0x514649fa, -EINVAL, "format=raw");
	refused(4, 4, 4, -ENOTSUP, "version 4");
	refused(8, 8, 16, -EINVAL, "backing file");
	refused(8, 8, UINT64_MAX, -EINVAL, "backing file");
	refused(16, 4, 1024, -EINVAL, "backing file");
	refused(20, 4, 8, -EINVAL, "clusters");
	refused(20, 4, 22, -EINVAL, "clusters");
	refused(24, 8, UINT64_MAX, -EFBIG, "size");
	refused(24, 8, 1ull << 60, -EFBIG, "size");
	refused(24, 8, 1ull << 40, -EINVAL, "L1 table");
	refused(32, 4, 2, -ENOTSUP, "LUKS");
	refused(36, 4, 1, -EINVAL, "L1 table");
	refused(36, 4, UINT32_MAX, -EFBIG, "L1 table");
	refused(40, 8, 512, -EINVAL, "L1 table");
	refused(40, 8, 0, -EINVAL, "L1 table");
	refused(40, 8, UINT64_MAX & ~65535ull, -EINVAL, "L1 table");
	refused(48, 8, 1, -EINVAL, "refcount table");
	refused(56, 4, 0, -EINVAL, "refcount table");
	refused(56, 4, UINT32_MAX, -EFBIG, "refcount table");
	refused(60, 4, 65537, -EFBIG, "snapshots");
	refused(60, 4, 1, -EINVAL, "snapshot table");
	refused(72, 8, 1 << 5, -ENOTSUP, "feature 5");
	refused(72, 8, 1ull << 63, -ENOTSUP, "feature 63");
	refused(72, 8, 1 << 3, -EINVAL, "compression");
	refused(88, 8, 1, -EINVAL, "bitmaps");
	refused(96, 4, 7, -EINVAL, "refcounts");
	refused(100, 4, 96, -EINVAL, "length");
	refused(100, 4, 113, -EINVAL, "length");
	refused(100, 4, 65544, -EINVAL, "length");
	refused(104, 1, 1, -EINVAL, "compression");
	refused(112, 8, 0x12345678ffffffffull, -EINVAL, "extension");
}

static void every_truncation_is_an_error_or_a_header(void)
{
	struct qcow2_header h = good(12, 3), g;

	qcow2_header_add_feature_names(&h);
	serialise(&h);
	for (size_t len = 0; len <= 4096; len++) {
		struct err err = ERR_INIT;
		uint8_t *copy = malloc(len + 1);	/* ASan sees what reads on */

		memcpy(copy, cluster, len);
		if (!qcow2_header_parse(copy, len, "t", 0, &g, &err))
			qcow2_header_fini(&g);
		else
			CHECK(err.msg[0]);
		free(copy);
	}
	qcow2_header_fini(&h);
}

static void random_bytes_never_crash_the_parser(void)
{
	struct qcow2_header h = good(12, 3), g;
	struct rng r;

	rng_seed(&r, test_seed());
	qcow2_header_add_feature_names(&h);
	for (uint64_t i = 0; i < test_scale(20000); i++) {
		struct err err = ERR_INIT;

		serialise(&h);
		for (unsigned n = rng_below(&r, 8); n; n--)
			cluster[rng_below(&r, rng_below(&r, 2) ? 112 : 600)] = rng_below(&r, 256);
		if (!qcow2_header_parse(cluster, 4096, "t", rng_below(&r, 2) ? QCOW2_PARSE_LAX : 0, &g, &err)) {
			qcow2_header_serialise(&g, again, "t", &err);
			qcow2_header_fini(&g);
		}
	}
	qcow2_header_fini(&h);
}

static void names_of_features_come_from_the_image(void)
{
	struct qcow2_raw_feature_name raw = { { 0 }, { 9 }, "nine\x1b" };
	struct qcow2_header h = good(16, 3);
	char buf[64];

	qcow2_header_add_ext(&h, QCOW2_EXT_FEATURE_NAMES, &raw, sizeof(raw));
	CHECK_STR(qcow2_feature_name(&h, 0, 9, buf, sizeof(buf)), "nine?");
	CHECK_STR(qcow2_feature_name(&h, 0, 1, buf, sizeof(buf)), "corrupt bit");
	CHECK(!qcow2_feature_name(&h, 1, 9, buf, sizeof(buf)));
	qcow2_header_fini(&h);
}

static void geometry_is_that_of_the_specification(void)
{
	struct qcow2_geo g;

	qcow2_geo_init(&g, 16, false, 4);
	CHECK_EQ(g.l2_bits, 13);
	CHECK_EQ(g.rb_bits, 15);
	CHECK_EQ(g.refcount_max, 65535);
	CHECK_EQ(qcow2_l1_entries(&g, 0), 0);
	CHECK_EQ(qcow2_l1_entries(&g, 512ull << 20), 1);
	CHECK_EQ(qcow2_l1_entries(&g, (512ull << 20) + 1), 2);
	CHECK_EQ(qcow2_l1_index(&g, (512ull << 20) + 65536), 1);
	CHECK_EQ(qcow2_l2_index(&g, (512ull << 20) + 65536), 1);
	CHECK_EQ(qcow2_max_size(&g), 2ull << 50);
	qcow2_geo_init(&g, 21, true, 6);
	CHECK_EQ(g.l2_bits, 17);
	CHECK_EQ(g.sub_size, 65536);
	CHECK_EQ(g.rb_bits, 18);
	CHECK_EQ(g.refcount_max, UINT64_MAX);
	qcow2_geo_init(&g, 9, false, 0);
	CHECK_EQ(g.rb_bits, 12);
	CHECK_EQ(g.refcount_max, 1);
	CHECK_EQ(qcow2_max_size(&g), 128ull << 30);
	for (unsigned bits = 9; bits <= 21; bits++) {
		qcow2_geo_init(&g, bits, false, 4);
		CHECK(qcow2_l1_entries(&g, qcow2_max_size(&g)) * 8 <= QCOW2_MAX_L1_BYTES);
	}
}

static enum qcow2_kind kind(unsigned bits, bool ext, uint64_t entry, uint64_t bitmap, unsigned sub)
{
	struct qcow2_l2e e = { entry, bitmap };
	struct qcow2_geo g;

	qcow2_geo_init(&g, bits, ext, 4);
	return qcow2_l2_kind(&g, e, sub, false);
}

static void l2_entries_have_their_kinds(void)
{
	struct qcow2_geo g;

	CHECK_EQ(kind(16, false, 0, 0, 0), QCOW2_UNALLOCATED);
	CHECK_EQ(kind(16, false, 1, 0, 0), QCOW2_ZERO_PLAIN);
	CHECK_EQ(kind(16, false, 0x10001 | QCOW2_COPIED, 0, 0), QCOW2_ZERO_ALLOCATED);
	CHECK_EQ(kind(16, false, 0x10000, 0, 0), QCOW2_NORMAL);
	CHECK_EQ(kind(16, false, 0x10200, 0, 0), QCOW2_INVALID);
	CHECK_EQ(kind(16, false, QCOW2_COMPRESSED | 0x12345, 0, 0), QCOW2_COMPRESSED_DATA);
	CHECK_EQ(kind(16, true, 0x10000, 1ull << 31, 31), QCOW2_NORMAL);
	CHECK_EQ(kind(16, true, 0x10000, 1ull << 31, 30), QCOW2_UNALLOCATED);
	CHECK_EQ(kind(16, true, 0x10000, 1ull << 63, 31), QCOW2_ZERO_ALLOCATED);
	CHECK_EQ(kind(16, true, 0, 1ull << 32, 0), QCOW2_ZERO_PLAIN);
	CHECK_EQ(kind(16, true, 0, 1, 0), QCOW2_INVALID);
	CHECK_EQ(kind(16, true, 0x10000, 1ull << 32 | 1, 0), QCOW2_INVALID);
	qcow2_geo_init(&g, 16, false, 4);
	CHECK_EQ(qcow2_l2_kind(&g, (struct qcow2_l2e){ QCOW2_COPIED, 0 }, 0, true), QCOW2_NORMAL);
	CHECK_EQ(qcow2_l2_kind(&g, (struct qcow2_l2e){ QCOW2_COPIED, 0 }, 0, false), QCOW2_UNALLOCATED);
}

static void compressed_entries_go_both_ways(void)
{
	struct rng r;

	rng_seed(&r, test_seed());
	for (unsigned bits = 9; bits <= 21; bits++) {
		struct qcow2_geo g;

		qcow2_geo_init(&g, bits, false, 4);
		for (int i = 0; i < 1000; i++) {
			uint64_t off = rng_below(&r, 1ull << min(62 - (bits - 8), 56u)), got;
			uint32_t len = 1 + rng_below(&r, g.cluster_size - 1), n;
			uint64_t entry = qcow2_l2_make_compressed(&g, off, len);

			CHECK(entry);
			qcow2_l2_compressed(&g, entry, &got, &n);
			CHECK_EQ(got, off);
			CHECK(n >= len && n < len + 512);
			CHECK(!((off + n) & 511));
		}
		CHECK(!qcow2_l2_make_compressed(&g, 1ull << 56, 100));
		CHECK(!qcow2_l2_make_compressed(&g, 0, g.cluster_size * 2 + 1));
	}
}

static void refcounts_of_every_width_are_independent(void)
{
	struct rng r;

	rng_seed(&r, test_seed());
	for (unsigned order = 0; order <= 6; order++) {
		uint64_t model[128] = { 0 }, most = order == 6 ? UINT64_MAX : (1ull << (1u << order)) - 1;
		uint8_t block[1024] = { 0 };

		for (int i = 0; i < 2000; i++) {
			uint32_t at = rng_below(&r, 128);

			model[at] = rng_u64(&r) & most;
			qcow2_refcount_set(order, block, at, model[at]);
			for (uint32_t k = 0; k < 128; k++)
				CHECK_EQ(qcow2_refcount_get(order, block, k), model[k]);
		}
	}
	/* Bit 0 is the least significant one. */
	uint8_t byte = 0;

	qcow2_refcount_set(1, &byte, 1, 3);
	CHECK_EQ(byte, 0x0c);
}

int main(void)
{
	RUN(what_was_serialised_is_parsed);
	RUN(a_longer_header_keeps_its_unknown_fields);
	RUN(bad_headers_are_refused_with_the_reason);
	RUN(every_truncation_is_an_error_or_a_header);
	RUN(random_bytes_never_crash_the_parser);
	RUN(names_of_features_come_from_the_image);
	RUN(geometry_is_that_of_the_specification);
	RUN(l2_entries_have_their_kinds);
	RUN(compressed_entries_go_both_ways);
	RUN(refcounts_of_every_width_are_independent);
	return 0;
}
