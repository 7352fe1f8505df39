/* SPDX-License-Identifier: MIT */
/* Latency histogram: log-linear buckets. */
#include "util/hist.h"

#include <string.h>

#include "util/bytes.h"

/* Values below HIST_SUB have a bucket each; above, a power of two is cut into HIST_SUB buckets. */
static unsigned bucket_of(uint64_t ns)
{
	unsigned exp;

	if (ns < HIST_SUB)
		return ns;
	exp = 63 - __builtin_clzll(ns) - HIST_SUB_BITS;
	return min((exp + 1) * HIST_SUB + (unsigned)((ns >> exp) - HIST_SUB), HIST_BUCKETS - 1u);
}

/* The largest value that counts in bucket `i`. */
static uint64_t bucket_edge(unsigned i)
{
	if (i < HIST_SUB)
		return i;
	return ((uint64_t)(HIST_SUB + i % HIST_SUB + 1) << (i / HIST_SUB - 1)) - 1;
}

void hist_init(struct hist *h)
{
	memset(h, 0, sizeof(*h));
}

void hist_add(struct hist *h, uint64_t ns)
{
	h->min = h->count ? min(h->min, ns) : ns;
	h->max = max(h->max, ns);
	h->count++;
	h->sum += ns;
	h->bucket[bucket_of(ns)]++;
}

void hist_merge(struct hist *to, const struct hist *from)
{
	if (!from->count)
		return;
	to->min = to->count ? min(to->min, from->min) : from->min;
	to->max = max(to->max, from->max);
	to->count += from->count;
	to->sum += from->sum;
	for (int i = 0; i < HIST_BUCKETS; i++)
		to->bucket[i] += from->bucket[i];
}

uint64_t hist_quantile_10k(const struct hist *h, unsigned permyriad)
{
	uint64_t rank = ((unsigned __int128)h->count * permyriad + 9999) / 10000, seen = 0;

	for (int i = 0; i < HIST_BUCKETS - 1; i++) {
		seen += h->bucket[i];
		if (seen && seen >= rank)
			return min(bucket_edge(i), h->max);
	}
	return h->max;
}

uint64_t hist_quantile(const struct hist *h, unsigned permille)
{
	return hist_quantile_10k(h, permille * 10);
}
