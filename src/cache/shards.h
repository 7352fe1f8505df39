/* SPDX-License-Identifier: MIT */
/*
 * SHARDS: C. Waldspurger, N. Park, A. Garthwaite and I. Ahmad, "Efficient MRC Construction with SHARDS", FAST '15: the miss ratio that a volume would
 * have with any size of a cache, from sampled reuse distances. Pure code; the memory is the caller's.
 *
 * A key is sampled if its hash lies below a threshold, so that all accesses to it are, or none. Among the sampled keys the distance of a reuse (how many
 * others were accessed since) is the true one times the rate. When more keys are sampled than there is room for, the threshold falls and the keys
 * above it are forgotten. The curve is that of LRU, the one replacement whose hits follow from distances; ARC does better more often than worse.
 *
 * How it differs from the paper's fixed-size algorithm
 *  - The threshold falls by a sixteenth at a time, which drops a batch of keys in one pass, instead of to the largest hash in a priority queue.
 *  - An access counts as 1 / rate when it happens; the paper counts 1 and scales all counts whenever the rate changes, which comes to the same.
 *  - Distances come from a Fenwick tree over the order of the last accesses, which is renumbered when it is used up, instead of a balanced tree.
 *  - The histogram's buckets are log-linear, SHARDS_SUB for each power of two.
 *  - How many distinct keys there are is estimated apart, from all accesses (HyperLogLog; Flajolet et al., AofA '07), because it decides what no cache can
 *    hit and how distances scale. With few samples that halves the error.
 *  - The paper's correction (SHARDS-adj) is applied to the reuses only: what the sampling counted too much or too little of them goes to the shortest distance,
 *    because it is the few hottest keys that a sample misses, or has by chance.
 *
 * On the block trace of tests/unit/test_cache_oracle.c the mean error over all sizes is 0.2 % with 7840 samples, and with 489, a hundredth of its keys, 0.6 to 3 %
 * depending on which keys the hash picks (1.6 % on average over eight hashes, 1.9 % with ours). At a single size it may be off by more, where the curve has a step: that trace's falls by 4 to 5 % of
 * the ratio within 1 % of its keys, and there the worst is 8 % with 489 samples and with 2048, and 2.5 % with 7840. To one side or the other, within 2 % of the keys, the exact curve has a ratio
 * that is off by 3.7, 2.5 and 0.2 %.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SHARDS_SUB 32u
#define SHARDS_BUCKETS (50 * SHARDS_SUB)
#define SHARDS_HASH_BITS 48
#define SHARDS_RANKS 4096u

struct shards_sample {
	uint64_t key;
	uint32_t chain;		/* of the bucket, or of the free list */
	uint32_t at;		/* its last access: a position in `order` */
};

struct shards {
	uint64_t threshold;	/* of SHARDS_HASH_BITS */
	uint64_t accesses;	/* all of them, sampled or not */
	uint64_t sampled, steps; /* those that were sampled, and keys and positions that were passed for them: for tests */
	double weight[SHARDS_BUCKETS];	/* accesses whose distance falls into the bucket */
	double reused;		/* the sum of it */
	uint8_t rank[SHARDS_RANKS];	/* HyperLogLog: of all keys, sampled or not */
	uint32_t max, live, touched, free, shift, now;
	struct shards_sample *sample;
	uint32_t *bucket;	/* sample + 1 */
	uint32_t *order;	/* sample + 1 of each position, 0: none */
	uint32_t *fenwick;	/* how many positions are taken */
};

/* Bytes for `samples` keys: 8192 take 435 KiB. */
size_t shards_bytes(uint32_t samples);
/* `mem` is zeroed, aligned to 8, and holds the structure itself too. samples >= 16. */
struct shards *shards_init(void *mem, uint32_t samples);
void shards_access_slow(struct shards *s, uint64_t key, uint64_t hash);
/* The share of accesses that LRU with `keys` entries would have missed; 1 while nothing is known. */
double shards_miss_ratio(const struct shards *s, uint64_t keys);
/* Distinct keys seen, within about 2 %. */
uint64_t shards_distinct(const struct shards *s);

static inline uint64_t shards_mix(uint64_t key)
{
	key += 0x9e3779b97f4a7c15ull;	/* splitmix64 */
	key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9ull;
	key = (key ^ key >> 27) * 0x94d049bb133111ebull;
	return key ^ key >> 31;
}

static inline uint64_t shards_hash(uint64_t key)
{
	return shards_mix(key) >> (64 - SHARDS_HASH_BITS);
}

/* A few nanoseconds where the key is not sampled. */
static inline void shards_access(struct shards *s, uint64_t key)
{
	uint64_t mix = shards_mix(key), hash = mix >> (64 - SHARDS_HASH_BITS);
	uint8_t *rank = &s->rank[mix % SHARDS_RANKS], r = (uint8_t)__builtin_ctzll(mix / SHARDS_RANKS | 1ull << 50) + 1;

	s->accesses++;
	if (r > *rank)
		*rank = r;
	if (hash < s->threshold)
		shards_access_slow(s, key, hash);
}
