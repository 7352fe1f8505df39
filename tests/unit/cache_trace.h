/* SPDX-License-Identifier: MIT */
/* Traces for tests of the cache: a generated one, the one that WEIR_TRACE names, and a policy driven by one. */
#pragma once

#include <errno.h>

#include "cache/policy.h"
#include "lib/test.h"
#include "util/rng.h"

struct trace {
	uint64_t *key;
	uint64_t n, distinct;
};

static int compare_keys(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

static inline void trace_count(struct trace *t)
{
	uint64_t *copy = malloc(t->n * sizeof(*copy));

	memcpy(copy, t->key, t->n * sizeof(*copy));
	qsort(copy, t->n, sizeof(*copy), compare_keys);
	t->distinct = t->n > 0;
	for (uint64_t i = 1; i < t->n; i++)
		t->distinct += copy[i] != copy[i - 1];
	free(copy);
}

/* Columns version, time, op, size, lbn: one request one access to `lbn`. False if WEIR_TRACE is not set. */
static inline bool trace_load(struct trace *t)
{
	const char *path = getenv("WEIR_TRACE");
	uint64_t room = 1 << 20, lbn;
	char line[256];
	FILE *f;

	if (!path || !*path)
		return false;
	f = fopen(path, "r");
	if (!f)
		test_fail("WEIR_TRACE: %s: %s", path, strerror(errno));
	*t = (struct trace){ .key = malloc(room * sizeof(uint64_t)) };
	while (fgets(line, sizeof(line), f))
		if (t->n < room && sscanf(line, "%*[^,],%*[^,],%*[^,],%*[^,],%" SCNu64, &lbn) == 1)
			t->key[t->n++] = lbn;
	fclose(f);
	trace_count(t);
	return true;
}

/* What a guest does, roughly: a skewed hot set that moves, sequential runs, and loops over a range. */
static inline void trace_generate(struct trace *t, uint64_t n, uint64_t space, uint64_t seed)
{
	uint64_t run = 0, left = 0, kind = 0, base = 0;
	struct rng r;

	*t = (struct trace){ .key = malloc(n * sizeof(uint64_t)), .n = n };
	rng_seed(&r, seed);
	for (uint64_t i = 0; i < n; i++) {
		if (!left) {
			kind = rng_below(&r, 4);
			left = 1 + rng_below(&r, kind == 1 ? space / 4 : space / 16);
			run = rng_below(&r, space);
			if (rng_below(&r, 8) == 0)
				base = rng_below(&r, space);
		}
		left--;
		if (kind == 1)
			t->key[i] = run++ % space;
		else if (kind == 2)
			t->key[i] = (run + left % (space / 20 + 1)) % space;
		else	/* the product of three uniform numbers is skewed to the small ones */
			t->key[i] = (base + rng_below(&r, 1 + rng_below(&r, 1 + rng_below(&r, space)))) % space;
	}
	trace_count(t);
}

static inline void trace_free(struct trace *t)
{
	free(t->key);
}

struct driven {
	struct policy p;
	void *mem;
	uint64_t hits, misses;
	uint64_t evicted;	/* by the last access; UINT64_MAX: nothing */
};

static inline void driven_init(struct driven *d, const struct policy_ops *ops, uint32_t capacity)
{
	*d = (struct driven){ .mem = calloc(1, policy_bytes(capacity, capacity)) };
	policy_init(&d->p, ops, d->mem, capacity, capacity, capacity);
}

static inline void driven_fini(struct driven *d)
{
	free(d->mem);
}

/* As a cache does it. True: a hit. */
static inline bool driven_access(struct driven *d, uint64_t key)
{
	uint32_t e = policy_find(&d->p, key), v;
	enum policy_ghost ghost;

	d->evicted = UINT64_MAX;
	if (e != POLICY_NONE) {
		policy_hit(&d->p, e);
		d->hits++;
		return true;
	}
	d->misses++;
	ghost = policy_miss(&d->p, key);
	if (d->p.resident >= d->p.capacity) {
		v = policy_victim(&d->p, ghost);
		d->evicted = policy_key(&d->p, v);
		policy_evict(&d->p, v);
	}
	policy_add(&d->p, key, ghost, 0);
	return false;
}

static inline double driven_run(const struct policy_ops *ops, uint32_t capacity, const struct trace *t)
{
	struct driven d;
	double ratio;

	driven_init(&d, ops, capacity);
	for (uint64_t i = 0; i < t->n; i++)
		driven_access(&d, t->key[i]);
	ratio = (double)d.misses / (double)t->n;
	driven_fini(&d);
	return ratio;
}
