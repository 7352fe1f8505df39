/* SPDX-License-Identifier: MIT */
/* The generator: its published sequence, and its ranges. */
#include "lib/test.h"
#include "util/rng.h"

static void the_sequence_is_that_of_the_paper(void)
{
	/* By hand from the definition: result = rotl(s1 * 5, 7) * 9. */
	struct rng r = { .s = { 1, 2, 3, 4 } };

	CHECK_EQ(rng_u64(&r), 11520u);
	CHECK_EQ(rng_u64(&r), 0u);
	CHECK_EQ(rng_u64(&r), 1509978240u);
	CHECK_EQ(rng_u64(&r), 1215971899390074240u);
}

static void the_seed_is_spread_by_splitmix64(void)
{
	struct rng r;

	rng_seed(&r, 0);
	CHECK_EQ(r.s[0], 0xe220a8397b1dcdaf);
	CHECK_EQ(r.s[1], 0x6e789e6aa1b965f4);
}

static void equal_seeds_give_equal_sequences(void)
{
	uint8_t x[37], y[37];
	struct rng a, b;

	rng_seed(&a, 42);
	rng_seed(&b, 42);
	rng_fill(&a, x, sizeof(x));
	rng_fill(&b, y, sizeof(y));
	CHECK(!memcmp(x, y, sizeof(x)));
	rng_seed(&b, 43);
	rng_fill(&b, y, sizeof(y));
	CHECK(memcmp(x, y, sizeof(x)));
}

static void every_value_below_n_is_drawn_equally_often(void)
{
	struct rng r;
	int seen[7] = { 0 };

	rng_seed(&r, test_seed());
	for (int i = 0; i < 70000; i++)
		seen[rng_below(&r, 7)]++;
	for (int i = 0; i < 7; i++)
		CHECK(seen[i] > 9500 && seen[i] < 10500);
	CHECK_EQ(rng_below(&r, 1), 0u);
	for (int i = 0; i < 100; i++)
		CHECK(rng_below(&r, UINT64_MAX) < UINT64_MAX);
}

int main(void)
{
	RUN(the_sequence_is_that_of_the_paper);
	RUN(the_seed_is_spread_by_splitmix64);
	RUN(equal_seeds_give_equal_sequences);
	RUN(every_value_below_n_is_drawn_equally_often);
	return 0;
}
