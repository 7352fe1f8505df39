/* SPDX-License-Identifier: MIT */
/* ARC. See arc.h. */
#include "cache/arc.h"

#include "util/bytes.h"

#define ONE (1ull << POLICY_TARGET_BITS)

static void arc_hit(struct policy *p, uint32_t e)
{
	if (policy_list_of(p, e) == ARC_T1)
		p->count.hits_recent++;
	else
		p->count.hits_frequent++;
	policy_unlink(p, e);
	policy_link(p, e, ARC_T2);
}

static enum policy_ghost arc_miss(struct policy *p, uint64_t key)
{
	uint64_t b1 = p->list[ARC_B1].n, b2 = p->list[ARC_B2].n;
	uint32_t e = policy_lookup(p, key);
	bool recent;

	if (e == POLICY_NONE)
		return POLICY_UNKNOWN;
	recent = policy_list_of(p, e) == ARC_B1;
	if (recent)
		p->target = min(p->target + max((b2 << POLICY_TARGET_BITS) / b1, ONE), p->capacity * ONE);
	else
		p->target -= min(p->target, max((b1 << POLICY_TARGET_BITS) / b2, ONE));
	policy_drop(p, e);
	return recent ? POLICY_GHOST_RECENT : POLICY_GHOST_FREQUENT;
}

/* The paper's REPLACE. */
static uint32_t arc_victim(struct policy *p, enum policy_ghost ghost)
{
	const struct policy_list *t1 = &p->list[ARC_T1], *t2 = &p->list[ARC_T2];
	uint64_t n = t1->n * ONE;

	if (n && (n > p->target || (ghost == POLICY_GHOST_FREQUENT && n == p->target) || !t2->n))
		return t1->tail;
	return t2->tail;
}

static void arc_evict(struct policy *p, uint32_t e)
{
	unsigned ghost = policy_list_of(p, e) == ARC_T1 ? ARC_B1 : ARC_B2;

	policy_unlink(p, e);
	policy_link(p, e, ghost);
}

/* At most so many ghosts go at once: a capacity that shrank must not make one access long. */
#define TRIM_MAX 4

static void arc_add(struct policy *p, uint32_t e, enum policy_ghost ghost)
{
	struct policy_list *t1 = &p->list[ARC_T1], *b1 = &p->list[ARC_B1], *b2 = &p->list[ARC_B2];

	policy_link(p, e, ghost == POLICY_UNKNOWN ? ARC_T1 : ARC_T2);
	for (int i = 0; i < TRIM_MAX && b1->n && t1->n + b1->n > p->capacity; i++)
		policy_drop(p, b1->tail);
	for (int i = 0; i < TRIM_MAX && p->ghosts && p->resident + p->ghosts > 2ull * p->capacity; i++)
		policy_drop(p, b2->n ? b2->tail : b1->tail);
}

static bool arc_is_ghost(const struct policy *p, uint32_t e)
{
	return policy_list_of(p, e) >= ARC_B1;
}

const struct policy_ops arc_ops = {
	.name = "arc",
	.hit = arc_hit,
	.miss = arc_miss,
	.victim = arc_victim,
	.evict = arc_evict,
	.add = arc_add,
	.is_ghost = arc_is_ghost,
	.recent = ARC_T1, .frequent = ARC_T2, .ghost_recent = ARC_B1, .ghost_frequent = ARC_B2,
};
