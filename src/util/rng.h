/* SPDX-License-Identifier: MIT */
/*
 * A seedable generator for tests, simulation and jitter: xoshiro256** seeded by splitmix64
 * (Blackman and Vigna, "Scrambled linear pseudorandom number generators", 2018). Not for secrets.
 */
#pragma once

#include <stdint.h>

struct rng {
	uint64_t s[4];
};

void rng_seed(struct rng *r, uint64_t seed);
uint64_t rng_u64(struct rng *r);
/* Uniform in [0, n); n > 0. */
uint64_t rng_below(struct rng *r, uint64_t n);
void rng_fill(struct rng *r, void *buf, uint64_t len);
