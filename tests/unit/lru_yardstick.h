/* SPDX-License-Identifier: MIT */
/* LRU, as a yardstick for tests only. */
#pragma once

#include "cache/policy.h"

static void lru_hit(struct policy *p, uint32_t e)
{
	policy_unlink(p, e);
	policy_link(p, e, 0);
}

static enum policy_ghost lru_miss(struct policy *p, uint64_t key)
{
	return POLICY_UNKNOWN;
}

static uint32_t lru_victim(struct policy *p, enum policy_ghost ghost)
{
	return p->list[0].tail;
}

static void lru_evict(struct policy *p, uint32_t e)
{
	policy_unlink(p, e);
	policy_link(p, e, 1);
	policy_drop(p, e);
}

static void lru_add(struct policy *p, uint32_t e, enum policy_ghost ghost)
{
	policy_link(p, e, 0);
}

static bool lru_is_ghost(const struct policy *p, uint32_t e)
{
	return policy_list_of(p, e) == 1;
}

static const struct policy_ops lru_ops = {
	.name = "lru", .hit = lru_hit, .miss = lru_miss, .victim = lru_victim, .evict = lru_evict, .add = lru_add,
	.is_ghost = lru_is_ghost, .recent = 0, .frequent = 0, .ghost_recent = 1, .ghost_frequent = 1,
};
