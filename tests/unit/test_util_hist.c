/* SPDX-License-Identifier: MIT */
/* Quantiles of the histogram against sorted samples. */
#include "lib/test.h"
#include "util/hist.h"
#include "util/rng.h"

#define SAMPLES 5000

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void an_empty_histogram_is_all_zero(void)
{
	struct hist h;

	hist_init(&h);
	CHECK_EQ(h.count, 0u);
	CHECK_EQ(h.min, 0u);
	CHECK_EQ(hist_quantile(&h, 500), 0u);
	CHECK_EQ(hist_quantile_10k(&h, 9999), 0u);
}

static void quantiles_are_within_a_thirtieth_of_the_truth(void)
{
	static uint64_t v[SAMPLES];
	static const unsigned permyriads[] = { 1, 10, 1000, 5000, 9000, 9900, 9990, 9999, 10000 };
	struct hist h;
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (int round = 0; round < 20; round++) {
		hist_init(&h);
		for (int i = 0; i < SAMPLES; i++) {
			v[i] = rng_below(&rng, 1ull << (2 + rng_below(&rng, 36)));
			hist_add(&h, v[i]);
		}
		qsort(v, SAMPLES, sizeof(v[0]), by_value);
		CHECK_EQ(h.min, v[0]);
		CHECK_EQ(h.max, v[SAMPLES - 1]);
		for (size_t i = 0; i < sizeof(permyriads) / sizeof(permyriads[0]); i++) {
			uint64_t rank = (SAMPLES * permyriads[i] + 9999) / 10000;
			uint64_t want = v[rank - 1], got = hist_quantile_10k(&h, permyriads[i]);

			CHECK(got >= want);
			CHECK(got <= want + want / 31);
			CHECK(got <= h.max);
		}
		CHECK_EQ(hist_quantile(&h, 990), hist_quantile_10k(&h, 9900));
	}
}

static void a_small_value_is_exact(void)
{
	struct hist h;

	for (uint64_t ns = 0; ns < 64; ns++) {
		hist_init(&h);
		hist_add(&h, ns);
		hist_add(&h, 1000);
		CHECK_EQ(hist_quantile(&h, 500), ns);
	}
}

static void the_last_bucket_takes_what_is_larger(void)
{
	struct hist h;

	hist_init(&h);
	hist_add(&h, 1);
	hist_add(&h, UINT64_MAX);
	CHECK_EQ(h.bucket[HIST_BUCKETS - 1], 1u);
	CHECK_EQ(hist_quantile(&h, 1000), UINT64_MAX);
	CHECK_EQ(hist_quantile(&h, 500), 1u);
}

static void merging_is_adding_both(void)
{
	struct hist a, b, both, empty;

	hist_init(&a);
	hist_init(&b);
	hist_init(&both);
	hist_init(&empty);
	for (uint64_t i = 1; i < 1000; i++) {
		hist_add(i & 1 ? &a : &b, i * i);
		hist_add(&both, i * i);
	}
	hist_merge(&a, &b);
	hist_merge(&a, &empty);
	CHECK(!memcmp(&a, &both, sizeof(a)));
	hist_merge(&empty, &a);
	CHECK(!memcmp(&empty, &both, sizeof(a)));
}

int main(void)
{
	RUN(an_empty_histogram_is_all_zero);
	RUN(quantiles_are_within_a_thirtieth_of_the_truth);
	RUN(a_small_value_is_exact);
	RUN(the_last_bucket_takes_what_is_larger);
	RUN(merging_is_adding_both);
	return 0;
}
