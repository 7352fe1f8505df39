/* SPDX-License-Identifier: MIT */
/* qcow2: blocks of L2 tables as runs: what comes back is what was kept, and what cannot be kept is refused. */
#include "format/qcow2/internal.h"
#include "lib/test.h"
#include "util/rng.h"

#define BLOCK 4096u
#define ENTRIES (BLOCK / 8)
#define CLUSTER_BITS 16

static struct q2_cache c = { .block = BLOCK };
static struct rng rng;

/* Runs of entries of a kind, and how many there are. */
static unsigned make(uint8_t *block, unsigned runs)
{
	unsigned n = 0;

	for (uint32_t i = 0, end; i < ENTRIES; n++) {
		uint64_t entry = (rng_below(&rng, 1u << 20) * 1024) << CLUSTER_BITS;

		end = n + 1 == runs ? ENTRIES : i + 1 + (uint32_t)rng_below(&rng, ENTRIES / runs);
		if (n % 3)
			entry |= QCOW2_COPIED;
		else if (n)
			entry = 0;
		for (; i < end && i < ENTRIES; i++, entry += entry & QCOW2_OFFSET_MASK ? 1ull << CLUSTER_BITS : 0)
			put_be64(block + i * 8, entry & QCOW2_OFFSET_MASK ? entry : 0);
	}
	return n;
}

static void what_comes_back_is_what_was_kept(void)
{
	uint8_t block[BLOCK], back[BLOCK];

	for (unsigned i = 0; i < 2000; i++) {
		uint64_t off = (1 + rng_below(&rng, 1u << 20)) * BLOCK;
		unsigned n = make(block, 1 + (unsigned)rng_below(&rng, 8));
		bool kept = q2_dense_put(&c, off, block);

		CHECK(kept || n > Q2_DENSE_RUNS);
		CHECK_EQ(q2_dense_has(&c, off), kept);
		CHECK(!q2_dense_has(&c, off + BLOCK * (c.dense_mask + 1ull)));
		CHECK(!kept || q2_dense_take(&c, off, back));
		CHECK(!kept || !memcmp(block, back, BLOCK));
		CHECK(!q2_dense_take(&c, off, back));
	}
}

/* Each kind of entry, at each end of a block. */
static void what_is_no_run_of_clusters_is_refused(void)
{
	static const uint64_t other[] = { QCOW2_COMPRESSED | 0x10000, 1, QCOW2_COPIED, QCOW2_COPIED | 0x10001, 0x10200, 1ull << 60 | 0x10000, 1ull << 56 };
	uint8_t block[BLOCK];

	for (unsigned i = 0; i < ARRAY_SIZE(other); i++)
		for (unsigned at = 0; at < ENTRIES; at += ENTRIES - 1) {
			make(block, 1);
			CHECK(q2_dense_put(&c, BLOCK, block));
			put_be64(block + at * 8, other[i]);
			q2_dense_drop(&c, BLOCK);
			CHECK(!q2_dense_put(&c, BLOCK, block));
			CHECK(!q2_dense_has(&c, BLOCK));
		}
	for (unsigned i = 0; i < ENTRIES; i++)
		put_be64(block + i * 8, (uint64_t)(1000 - i) << CLUSTER_BITS);
	CHECK(!q2_dense_put(&c, BLOCK, block));
}

static void who_comes_later_takes_the_place(void)
{
	uint8_t block[BLOCK], back[BLOCK];
	uint64_t far = BLOCK + BLOCK * (c.dense_mask + 1ull);

	make(block, 2);
	CHECK(q2_dense_put(&c, BLOCK, block));
	make(block, 3);
	CHECK(q2_dense_put(&c, far, block));
	CHECK(!q2_dense_take(&c, BLOCK, back));
	CHECK(q2_dense_take(&c, far, back));
	CHECK(!memcmp(block, back, BLOCK));
}

int main(void)
{
	rng_seed(&rng, test_seed());
	CHECK_EQ(q2_dense_init(&c, 100, CLUSTER_BITS), 0);
	CHECK_EQ(c.dense_mask, 255);
	RUN(what_comes_back_is_what_was_kept);
	RUN(what_is_no_run_of_clusters_is_refused);
	RUN(who_comes_later_takes_the_place);
	q2_dense_fini(&c);
	return 0;
}
