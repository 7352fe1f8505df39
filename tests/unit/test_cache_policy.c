/* SPDX-License-Identifier: MIT */
/*
 * The policies decide, access by access, as slow and obvious implementations of the papers' algorithms do; and their index stays sound
 * under whatever a cache may do to it.
 */
#include "cache/arc.h"
#include "cache/s3fifo.h"
#include "cache_trace.h"
#include "lru_yardstick.h"
#include "util/bytes.h"

/* --- Slow and obvious: a list is an array, newest first --- */

struct slow_list {
	uint64_t *key;
	unsigned *hits;
	uint64_t n;
};

static void slow_init(struct slow_list *l, uint64_t room)
{
	*l = (struct slow_list){ calloc(room, sizeof(*l->key)), calloc(room, sizeof(*l->hits)), 0 };
}

static void slow_fini(struct slow_list *l)
{
	free(l->key);
	free(l->hits);
}

static int64_t slow_find(const struct slow_list *l, uint64_t key)
{
	for (uint64_t i = 0; i < l->n; i++)
		if (l->key[i] == key)
			return (int64_t)i;
	return -1;
}

static bool slow_remove(struct slow_list *l, uint64_t key)
{
	int64_t at = slow_find(l, key);

	if (at < 0)
		return false;
	l->n--;
	memmove(l->key + at, l->key + at + 1, (l->n - at) * sizeof(*l->key));
	memmove(l->hits + at, l->hits + at + 1, (l->n - at) * sizeof(*l->hits));
	return true;
}

static void slow_push(struct slow_list *l, uint64_t key, unsigned hits)
{
	memmove(l->key + 1, l->key, l->n * sizeof(*l->key));
	memmove(l->hits + 1, l->hits, l->n * sizeof(*l->hits));
	l->key[0] = key;
	l->hits[0] = hits;
	l->n++;
}

static uint64_t slow_pop(struct slow_list *l)
{
	return l->key[--l->n];
}

struct slow {
	struct slow_list l[4];
	uint64_t c, evicted;
	uint64_t p;	/* in 1/2^POLICY_TARGET_BITS */
	bool hit;
};

#define ONE (1ull << POLICY_TARGET_BITS)

/* Figure 4 of the paper on ARC, line by line. */
static void slow_replace(struct slow *s, bool in_b2)
{
	struct slow_list *t1 = &s->l[0], *t2 = &s->l[1], *b1 = &s->l[2], *b2 = &s->l[3];

	if (t1->n >= 1 && ((in_b2 && t1->n * ONE == s->p) || t1->n * ONE > s->p))
		slow_push(b1, s->evicted = slow_pop(t1), 0);
	else
		slow_push(b2, s->evicted = slow_pop(t2), 0);
}

static void slow_arc(struct slow *s, uint64_t x)
{
	struct slow_list *t1 = &s->l[0], *t2 = &s->l[1], *b1 = &s->l[2], *b2 = &s->l[3];
	uint64_t delta;

	s->evicted = UINT64_MAX;
	s->hit = false;
	if (slow_remove(t1, x) || slow_remove(t2, x)) {		/* case I */
		s->hit = true;
		slow_push(t2, x, 0);
	} else if (slow_find(b1, x) >= 0) {			/* case II */
		delta = b1->n >= b2->n ? ONE : b2->n * ONE / b1->n;
		s->p = s->p + delta < s->c * ONE ? s->p + delta : s->c * ONE;
		slow_replace(s, false);
		slow_remove(b1, x);
		slow_push(t2, x, 0);
	} else if (slow_find(b2, x) >= 0) {			/* case III */
		delta = b2->n >= b1->n ? ONE : b1->n * ONE / b2->n;
		s->p = s->p > delta ? s->p - delta : 0;
		slow_replace(s, true);
		slow_remove(b2, x);
		slow_push(t2, x, 0);
	} else {						/* case IV */
		uint64_t total = t1->n + t2->n + b1->n + b2->n;

		if (t1->n + b1->n == s->c) {
			if (t1->n < s->c) {
				slow_pop(b1);
				slow_replace(s, false);
			} else {
				s->evicted = slow_pop(t1);
			}
		} else if (total >= s->c) {
			if (total == 2 * s->c)
				slow_pop(b2);
			slow_replace(s, false);
		}
		slow_push(t1, x, 0);
	}
}

/* Algorithm 1 of the paper on S3-FIFO; l[0] is S, l[1] is M, l[2] is G. */
static void slow_s3_evict_main(struct slow *s)
{
	struct slow_list *m = &s->l[1];

	for (;;) {
		unsigned hits = m->hits[m->n - 1];
		uint64_t key = slow_pop(m);

		if (!hits) {
			s->evicted = key;
			return;
		}
		slow_push(m, key, hits - 1);
	}
}

static void slow_s3_evict(struct slow *s)
{
	struct slow_list *small = &s->l[0], *m = &s->l[1], *g = &s->l[2];
	uint64_t room = s->c / 10 ? s->c / 10 : 1;

	while (small->n && (small->n >= room || !m->n)) {
		unsigned hits = small->hits[small->n - 1];
		uint64_t key = slow_pop(small);

		if (hits < 2) {
			slow_push(g, s->evicted = key, 0);
			if (g->n > s->c - room)
				slow_pop(g);
			return;
		}
		slow_push(m, key, 0);
	}
	slow_s3_evict_main(s);
}

static void slow_s3(struct slow *s, uint64_t x)
{
	s->evicted = UINT64_MAX;
	s->hit = false;
	for (int i = 0; i < 2; i++) {
		int64_t at = slow_find(&s->l[i], x);

		if (at >= 0) {
			s->hit = true;
			s->l[i].hits[at] += s->l[i].hits[at] < 3;
			return;
		}
	}

	bool ghost = slow_remove(&s->l[2], x);

	if (s->l[0].n + s->l[1].n >= s->c)
		slow_s3_evict(s);
	slow_push(&s->l[ghost], x, 0);
}

static void equal_decisions(const struct policy_ops *ops, void (*slow_access)(struct slow *, uint64_t))
{
	static const uint32_t capacities[] = { 1, 2, 3, 10, 57, 200, 700 };
	struct trace t;

	for (unsigned i = 0; i < ARRAY_SIZE(capacities); i++) {
		struct slow s = { .c = capacities[i] };
		struct driven d;

		trace_generate(&t, test_scale(30000), 1500, test_env_u64("WEIR_SEED", 20260101) + i);
		driven_init(&d, ops, capacities[i]);
		for (unsigned j = 0; j < 4; j++)
			slow_init(&s.l[j], 2 * s.c + 2);
		for (uint64_t k = 0; k < t.n; k++) {
			bool hit = driven_access(&d, t.key[k]);

			slow_access(&s, t.key[k]);
			if (hit != s.hit || d.evicted != s.evicted)
				test_fail("%s, capacity %u, access %" PRIu64 " (key %" PRIu64 "): hit %d, evicted %" PRId64
					  "; the reference says %d, %" PRId64, ops->name, capacities[i], k, t.key[k], hit,
					  (int64_t)d.evicted, s.hit, (int64_t)s.evicted);
		}
		for (unsigned j = 0; j < 4; j++) {
			CHECK_EQ(d.p.list[j].n, s.l[j].n);
			slow_fini(&s.l[j]);
		}
		driven_fini(&d);
		trace_free(&t);
	}
}

static void arc_decides_as_the_paper_says(void)
{
	equal_decisions(&arc_ops, slow_arc);
}

static void s3fifo_decides_as_the_paper_says(void)
{
	equal_decisions(&s3fifo_ops, slow_s3);
}

/* --- Scans --- */

/* The share of hits on a hot set of eight tenths of the cache, without and with a scan of ten times the cache among its accesses. */
static double hot_hits(const struct policy_ops *ops, bool scan)
{
	enum { CAPACITY = 2000, HOT = CAPACITY * 8 / 10, ROUNDS = 60 };
	uint64_t hits = 0, accesses = 0, next = 1 << 20;
	struct driven d;
	struct rng r;

	driven_init(&d, ops, CAPACITY);
	rng_seed(&r, 7);
	for (unsigned i = 0; i < HOT * 20; i++)
		driven_access(&d, rng_below(&r, HOT));
	for (unsigned i = 0; i < ROUNDS * HOT / 20; i++) {
		bool in_scan = scan && i >= HOT && i < HOT + CAPACITY;

		hits += driven_access(&d, rng_below(&r, HOT));
		accesses++;
		for (unsigned j = 0; in_scan && j < 10; j++)
			driven_access(&d, next++);
	}
	driven_fini(&d);
	return (double)hits / (double)accesses;
}

static void a_scan_of_ten_times_the_cache_costs_the_hot_set_little(void)
{
	const struct policy_ops *ops[] = { &arc_ops, &s3fifo_ops, &lru_ops };
	double lost[3];

	for (unsigned i = 0; i < 3; i++) {
		double before = hot_hits(ops[i], false), after = hot_hits(ops[i], true);

		lost[i] = (before - after) / before;
		printf("  %s: %.4f of the hot set's accesses hit, %.4f with a scan\n", ops[i]->name, before, after);
	}
	CHECK(lost[0] <= 0.02);
	CHECK(lost[1] <= 0.02);
	CHECK(lost[2] > 0.1);	/* LRU loses it all */
}

/* --- Whatever a cache may do --- */

static void check_sound(const struct policy *p)
{
	uint64_t residents = 0, ghosts = 0;

	for (unsigned i = 0; i < POLICY_LISTS; i++) {
		uint32_t n = 0, prev = POLICY_NONE;

		for (uint32_t e = p->list[i].head; e != POLICY_NONE; prev = e, e = p->entry[e].next, n++) {
			CHECK(n < p->entries);
			CHECK_EQ(p->entry[e].prev, prev);
			CHECK_EQ(policy_list_of(p, e), i);
			CHECK_EQ(policy_lookup(p, policy_key(p, e)), e);
			if (p->ops->is_ghost(p, e))
				ghosts++;
			else
				residents++;
		}
		CHECK_EQ(p->list[i].tail, prev);
		CHECK_EQ(p->list[i].n, n);
	}
	CHECK_EQ(residents, p->resident);
	CHECK_EQ(ghosts, p->ghosts);
	CHECK(residents + ghosts <= p->entries);
}

static void abuse(const struct policy_ops *ops, uint64_t seed)
{
	enum { MAX = 150, GHOSTS = 100 };
	void *mem = calloc(1, policy_bytes(MAX, GHOSTS));
	struct { uint64_t key; enum policy_ghost ghost; } reading[8];
	unsigned n = 0;
	struct policy p;
	struct rng r;

	rng_seed(&r, seed);
	policy_init(&p, ops, mem, MAX, GHOSTS, 100);
	for (unsigned i = 0; i < test_scale(40000); i++) {
		uint64_t key = rng_below(&r, 1 + rng_below(&r, 400)) | 77ull << 44;
		uint32_t e = policy_find(&p, key), what = rng_below(&r, 40);

		if (what == 0)
			policy_set_capacity(&p, 1 + rng_below(&r, MAX));
		while (p.resident > p.capacity)
			policy_evict(&p, policy_victim(&p, POLICY_UNKNOWN));
		if (e != POLICY_NONE && policy_find(&p, key) == e) {
			CHECK_EQ(p.entry[e].user, (uint32_t)key * 3);
			if (what < 4)
				policy_remove(&p, e);
			else if (what < 8)
				policy_evict(&p, e);
			else
				policy_hit(&p, e);
		} else if (n < ARRAY_SIZE(reading)) {
			reading[n].key = key;
			reading[n++].ghost = policy_miss(&p, key);
		}
		/* What was read arrives late, and in any order. */
		while (n && rng_below(&r, 3)) {
			unsigned at = rng_below(&r, n);

			if (p.resident >= p.capacity)
				policy_evict(&p, policy_victim(&p, reading[at].ghost));
			if (policy_find(&p, reading[at].key) == POLICY_NONE)
				policy_add(&p, reading[at].key, reading[at].ghost, (uint32_t)reading[at].key * 3);
			reading[at] = reading[--n];
		}
		CHECK(p.resident <= p.max);
		if (i % 16 == 0)
			check_sound(&p);
	}
	free(mem);
}

static void removals_and_late_arrivals_keep_the_index_sound(void)
{
	for (uint64_t seed = 0; seed < 4; seed++) {
		abuse(&arc_ops, seed);
		abuse(&s3fifo_ops, seed);
		abuse(&lru_ops, seed);
	}
}

/* --- Which one --- */

static void hit_ratios_of_the_generated_trace(void)
{
	const struct policy_ops *ops[] = { &arc_ops, &s3fifo_ops, &lru_ops };
	struct trace t;

	trace_generate(&t, 200000, 20000, 1);
	for (unsigned pct = 1; pct <= 40; pct *= 2) {
		printf("  %2u %% of %" PRIu64 ":", pct, t.distinct);
		for (unsigned i = 0; i < 3; i++)
			printf("  %s %.4f", ops[i]->name, 1 - driven_run(ops[i], (uint32_t)(t.distinct * pct / 100), &t));
		printf("\n");
	}
	trace_free(&t);
}

int main(void)
{
	test_seed();
	RUN(arc_decides_as_the_paper_says);
	RUN(s3fifo_decides_as_the_paper_says);
	RUN(a_scan_of_ten_times_the_cache_costs_the_hot_set_little);
	RUN(removals_and_late_arrivals_keep_the_index_sound);
	RUN(hit_ratios_of_the_generated_trace);
	return 0;
}
