/* SPDX-License-Identifier: MIT */
/*
 * Latency histogram: log-linear buckets, 32 per power of two, so that a quantile is within 3.2 % of
 * the true value from 1 ns to 4 minutes; larger values count in the last bucket. Fixed size, no
 * allocation. (Fine buckets between 0.1 and 10 ms are what a verdict on fsync latency needs.)
 */
#pragma once

#include <stdint.h>

#define HIST_SUB_BITS 5
#define HIST_SUB (1 << HIST_SUB_BITS)
#define HIST_BUCKETS ((38 - HIST_SUB_BITS + 1) * HIST_SUB)

struct hist {
	uint64_t count, sum, min, max;
	uint64_t bucket[HIST_BUCKETS];
};

void hist_init(struct hist *h);
void hist_add(struct hist *h, uint64_t ns);
void hist_merge(struct hist *to, const struct hist *from);
/* The value below or at which `permille`/1000 of the samples lie (a bucket's upper edge, capped at max); 0 if empty. */
uint64_t hist_quantile(const struct hist *h, unsigned permille);
/* permyriad: 9990 is p99.9, 9999 is p99.99. */
uint64_t hist_quantile_10k(const struct hist *h, unsigned permyriad);
