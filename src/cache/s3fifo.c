/* SPDX-License-Identifier: MIT */
/* S3-FIFO. See s3fifo.h. Bits 2 and 3 of an entry's tag count its hits. */
#include "cache/s3fifo.h"

#include "util/bytes.h"

static unsigned hits_of(const struct policy *p, uint32_t e)
{
	return policy_tag(p, e) >> 2;
}

static void set_hits(struct policy *p, uint32_t e, unsigned hits)
{
	policy_set_tag(p, e, policy_list_of(p, e) | hits << 2);
}

static uint32_t small_size(const struct policy *p)
{
	return max(p->capacity / 10, 1u);
}

static void s3_hit(struct policy *p, uint32_t e)
{
	if (policy_list_of(p, e) == S3_SMALL)
		p->count.hits_recent++;
	else
		p->count.hits_frequent++;
	set_hits(p, e, min(hits_of(p, e) + 1, 3u));
}

static enum policy_ghost s3_miss(struct policy *p, uint64_t key)
{
	uint32_t e = policy_lookup(p, key);

	if (e == POLICY_NONE)
		return POLICY_UNKNOWN;
	policy_drop(p, e);
	return POLICY_GHOST_RECENT;
}

/* The oldest of the main queue that was not hit since its last chance. */
static uint32_t victim_main(struct policy *p, unsigned *steps)
{
	struct policy_list *m = &p->list[S3_MAIN];
	uint32_t e = m->tail;

	for (unsigned hits; e != POLICY_NONE && (hits = hits_of(p, e)) && (*steps)++ < S3_STEPS; e = m->tail) {
		policy_unlink(p, e);
		policy_link(p, e, S3_MAIN);
		set_hits(p, e, hits - 1);
	}
	return e;
}

static uint32_t s3_victim(struct policy *p, enum policy_ghost ghost)
{
	struct policy_list *s = &p->list[S3_SMALL], *m = &p->list[S3_MAIN];
	unsigned steps = 0;

	while (s->n && (s->n >= small_size(p) || !m->n)) {
		uint32_t e = s->tail;

		if (hits_of(p, e) < 2 || steps++ >= S3_STEPS)
			return e;
		policy_unlink(p, e);
		policy_link(p, e, S3_MAIN);
	}
	return victim_main(p, &steps);
}

/* What leaves the main queue is not remembered. */
static void s3_evict(struct policy *p, uint32_t e)
{
	bool small = policy_list_of(p, e) == S3_SMALL;

	policy_unlink(p, e);
	policy_link(p, e, S3_GHOST);
	if (!small)
		policy_drop(p, e);
	for (int i = 0; i < 4 && p->list[S3_GHOST].n > p->capacity - small_size(p); i++)
		policy_drop(p, p->list[S3_GHOST].tail);
}

static void s3_add(struct policy *p, uint32_t e, enum policy_ghost ghost)
{
	policy_link(p, e, ghost == POLICY_UNKNOWN ? S3_SMALL : S3_MAIN);
}

static bool s3_is_ghost(const struct policy *p, uint32_t e)
{
	return policy_list_of(p, e) == S3_GHOST;
}

const struct policy_ops s3fifo_ops = {
	.name = "s3fifo",
	.hit = s3_hit,
	.miss = s3_miss,
	.victim = s3_victim,
	.evict = s3_evict,
	.add = s3_add,
	.is_ghost = s3_is_ghost,
	.recent = S3_SMALL, .frequent = S3_MAIN, .ghost_recent = S3_GHOST, .ghost_frequent = S3_GHOST,
};
