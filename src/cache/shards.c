/* SPDX-License-Identifier: MIT */
/*
 * SHARDS. See shards.h.
 *
 * Invariants
 *  (1) each live sample has one position in `order`, and `fenwick` counts the positions that are taken;
 *  (2) every live sample's hash is below the threshold;
 *  (3) positions from `now` on are free; when none is left the live ones are moved together, in order.
 */
#include "cache/shards.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "util/bytes.h"

#define ORDER_FACTOR 4u		/* positions per sample: renumbering costs about one step per access */
#define NONE UINT32_MAX

static uint32_t shift_for(uint32_t samples)
{
	uint32_t bits = 4;

	while ((2u << bits) <= samples)
		bits++;
	return SHARDS_HASH_BITS - bits;
}

static uint32_t positions(uint32_t samples)
{
	return samples * ORDER_FACTOR;
}

size_t shards_bytes(uint32_t samples)
{
	return sizeof(struct shards) + samples * sizeof(struct shards_sample) +
	       sizeof(uint32_t) * ((1ull << (SHARDS_HASH_BITS - shift_for(samples))) + 2 * (positions(samples) + 1ull));
}

struct shards *shards_init(void *mem, uint32_t samples)
{
	struct shards *s = mem;

	s->max = samples;
	s->shift = shift_for(samples);
	s->free = NONE;
	s->threshold = 1ull << SHARDS_HASH_BITS;
	s->sample = (struct shards_sample *)(s + 1);
	s->bucket = (uint32_t *)(s->sample + samples);
	s->order = s->bucket + (1ull << (SHARDS_HASH_BITS - s->shift));
	s->fenwick = s->order + positions(samples) + 1;
	return s;
}

/* --- Order of last accesses: positions 1 .. max * ORDER_FACTOR --- */

static void fenwick_add(struct shards *s, uint32_t at, uint32_t n)
{
	for (; at <= positions(s->max); at += at & -at, s->steps++)
		s->fenwick[at] += n;
}

static uint32_t fenwick_sum(const struct shards *s, uint32_t at)
{
	uint32_t sum = 0;

	for (; at; at -= at & -at)
		sum += s->fenwick[at];
	return sum;
}

static void order_take(struct shards *s, uint32_t i)
{
	s->sample[i].at = ++s->now;
	s->order[s->now] = i + 1;
	fenwick_add(s, s->now, 1);
}

static void order_leave(struct shards *s, uint32_t i)
{
	s->order[s->sample[i].at] = 0;
	fenwick_add(s, s->sample[i].at, (uint32_t)-1);
}

static void order_renumber(struct shards *s)
{
	uint32_t n = 0, all = positions(s->max);

	for (uint32_t at = 1; at <= s->now; at++) {
		uint32_t i = s->order[at];

		if (!i)
			continue;
		s->order[at] = 0;
		s->order[++n] = i;
		s->sample[i - 1].at = n;
	}
	s->steps += s->now + all;
	s->now = n;
	/* Each node counts the taken positions of its range, and they are the first n. */
	for (uint32_t at = 1; at <= all; at++) {
		uint32_t start = at - (at & -at);

		s->fenwick[at] = n > start ? min(n, at) - start : 0;
	}
}

/* --- Samples --- */

static uint32_t *hash_bucket_of(struct shards *s, uint64_t hash)
{
	/* Sampled hashes are the small ones: their low bits are as good as any. */
	return &s->bucket[hash & ((1ull << (SHARDS_HASH_BITS - s->shift)) - 1)];
}

static void sample_drop(struct shards *s, uint32_t i, uint64_t hash)
{
	uint32_t *at = hash_bucket_of(s, hash);

	while (*at != i + 1)
		at = &s->sample[*at - 1].chain;
	*at = s->sample[i].chain;
	order_leave(s, i);
	s->sample[i].chain = s->free;
	s->free = i;
	s->live--;
}

/* Until one is free. With a good hash a pass drops a sixteenth of the samples; keys of equal hash could need more passes. */
static void lower_threshold(struct shards *s)
{
	while (s->live == s->max && s->threshold) {
		s->threshold -= s->threshold / 16 ? s->threshold / 16 : s->threshold;
		s->steps += s->now;
		for (uint32_t at = 1; at <= s->now; at++) {
			uint64_t hash;

			if (!s->order[at])
				continue;
			hash = shards_hash(s->sample[s->order[at] - 1].key);
			if (hash >= s->threshold)
				sample_drop(s, s->order[at] - 1, hash);
		}
	}
}

static uint32_t sample_new(struct shards *s, uint64_t key, uint64_t hash)
{
	uint32_t i = s->free;

	if (i == NONE)
		i = s->touched++;
	else
		s->free = s->sample[i].chain;
	s->sample[i] = (struct shards_sample){ .key = key, .chain = *hash_bucket_of(s, hash) };
	*hash_bucket_of(s, hash) = i + 1;
	s->live++;
	return i;
}

/* --- Histogram --- */

static unsigned bucket_index(uint64_t distance)
{
	unsigned exp;

	if (distance < SHARDS_SUB)
		return (unsigned)distance;
	exp = 63 - (unsigned)__builtin_clzll(distance) - 5;
	return min((exp + 1) * SHARDS_SUB + (unsigned)(distance >> exp) % SHARDS_SUB, SHARDS_BUCKETS - 1);
}

/* The smallest distance of a bucket. */
static double bucket_start(unsigned b)
{
	if (b < SHARDS_SUB)
		return b;
	return ldexp(SHARDS_SUB + b % SHARDS_SUB, (int)(b / SHARDS_SUB) - 1);
}

static_assert(SHARDS_SUB == 1u << 5, "bucket_index() says 5");

static double rate(const struct shards *s)
{
	return (double)s->threshold / (double)(1ull << SHARDS_HASH_BITS);
}

void shards_access_slow(struct shards *s, uint64_t key, uint64_t hash)
{
	uint32_t i = *hash_bucket_of(s, hash);
	double weight = 1 / rate(s);

	s->sampled++;
	for (; i && s->sample[i - 1].key != key; s->steps++)
		i = s->sample[i - 1].chain;
	if (s->now == positions(s->max))
		order_renumber(s);
	if (i) {
		/* How many others were accessed since. */
		uint32_t distance = s->live - fenwick_sum(s, s->sample[i - 1].at);

		s->reused += weight;
		s->weight[bucket_index((uint64_t)((double)distance * weight))] += weight;
		order_leave(s, i - 1);
		order_take(s, i - 1);
		return;
	}
	if (s->live == s->max)
		lower_threshold(s);
	if (hash < s->threshold)
		order_take(s, sample_new(s, key, hash));
}

double shards_miss_ratio(const struct shards *s, uint64_t keys)
{
	double all = (double)s->accesses, distinct = (double)shards_distinct(s), hits, at;

	if (!s->accesses || !keys)
		return 1;
	/* The sample stands for live / rate keys; distances are too long by as much as that is too many. */
	at = distinct > 0 ? (double)keys * ((double)s->live / rate(s)) / distinct : (double)keys;
	hits = max(all - distinct, 0.0) - s->reused;
	for (unsigned b = 0; b < SHARDS_BUCKETS && bucket_start(b) < at; b++) {
		double start = bucket_start(b), width = bucket_start(b + 1) - start;

		hits += s->weight[b] * min((at - start) / width, 1.0);
	}
	return min(max(1 - hits / all, 0.0), 1.0);
}

/* While all keys are sampled their number is known. */
uint64_t shards_distinct(const struct shards *s)
{
	double sum = 0, n = SHARDS_RANKS, estimate, sampled;
	unsigned empty = 0;

	if (s->threshold == 1ull << SHARDS_HASH_BITS)
		return s->live;
	for (unsigned i = 0; i < SHARDS_RANKS; i++) {
		sum += ldexp(1, -s->rank[i]);
		empty += !s->rank[i];
	}
	estimate = 0.7213 / (1 + 1.079 / n) * n * n / sum;
	/* Linear counting, where the other one is biased. */
	if (estimate < 2.5 * n && empty)
		estimate = n * log(n / empty);
	/* Two estimates with relative variances 1.08 / n and 1 / live: each counts by the other's. */
	sampled = s->threshold ? (double)s->live / rate(s) : estimate;
	return (uint64_t)((estimate * n / 1.08 + sampled * s->live) / (n / 1.08 + s->live));
}
