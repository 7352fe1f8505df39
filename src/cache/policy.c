/* SPDX-License-Identifier: MIT */
/*
 * Replacement policies: the index that they share.
 *
 * Invariants
 *  (1) a key has at most one entry: resident, or ghost;
 *  (2) an entry is on the free list, or in its bucket and on one of the policy's lists;
 *  (3) resident + ghosts <= entries, and resident <= max; where no entry is free, a ghost gives way.
 *
 * The free list is a stack of what was used before; entries above `touched` were never used, so that their pages cost nothing yet.
 */
#include "cache/policy.h"

#include "util/bytes.h"

static uint32_t buckets_shift(uint32_t entries)
{
	uint32_t bits = 4;

	/* At most one bucket per entry: it counts as four bytes of each. */
	while (bits < 31 && (2u << bits) <= entries)
		bits++;
	return 64 - bits;
}

/* One more: a policy trims its ghosts behind an insertion. */
static uint32_t entries_for(uint32_t max, uint32_t ghosts)
{
	return max + ghosts + 1;
}

size_t policy_bytes(uint32_t max, uint32_t ghosts)
{
	return entries_for(max, ghosts) * sizeof(struct policy_entry) + policy_hash_bytes(max, ghosts);
}

size_t policy_hash_bytes(uint32_t max, uint32_t ghosts)
{
	return sizeof(uint32_t) << (64 - buckets_shift(entries_for(max, ghosts)));
}

void policy_init(struct policy *p, const struct policy_ops *ops, void *mem, uint32_t max, uint32_t ghosts, uint32_t capacity)
{
	*p = (struct policy){ .ops = ops, .max = max, .entries = entries_for(max, ghosts), .capacity = capacity, .free = POLICY_NONE };
	assert(max && capacity <= max && max + ghosts < POLICY_NONE);
	p->shift = buckets_shift(p->entries);
	p->entry = mem;
	p->bucket = (uint32_t *)(p->entry + p->entries);
	for (unsigned i = 0; i < POLICY_LISTS; i++)
		p->list[i] = (struct policy_list){ POLICY_NONE, POLICY_NONE, 0 };
}

void policy_set_room(struct policy *p, uint32_t max, uint32_t ghosts)
{
	p->max = max;
	p->entries = entries_for(max, ghosts);
}

void policy_set_capacity(struct policy *p, uint32_t capacity)
{
	assert(capacity <= p->max);
	p->capacity = capacity;
	p->target = min(p->target, (uint64_t)capacity << POLICY_TARGET_BITS);
}

/* --- Hash table: 0 is an empty bucket, so that a zeroed table is an empty one --- */

static uint32_t *bucket_of(const struct policy *p, uint64_t key)
{
	/* Fibonacci hashing (Knuth, TAOCP 6.4), after a mix so that the upper bits of a key count. */
	key ^= key >> 29;
	key *= 0xbf58476d1ce4e5b9ull;
	key ^= key >> 32;
	return &p->bucket[key * 0x9e3779b97f4a7c15ull >> p->shift];
}

uint32_t policy_lookup(const struct policy *p, uint64_t key)
{
	uint32_t at = *bucket_of(p, key);

	while (at && policy_key(p, at - 1) != key)
		at = p->entry[at - 1].chain;
	return at - 1;	/* 0 becomes POLICY_NONE */
}

static void hash_remove(struct policy *p, uint32_t e)
{
	uint32_t *at = bucket_of(p, policy_key(p, e));

	while (*at != e + 1)
		at = &p->entry[*at - 1].chain;
	*at = p->entry[e].chain;
}

/* --- Lists --- */

void policy_unlink(struct policy *p, uint32_t e)
{
	struct policy_entry *x = &p->entry[e];
	struct policy_list *l = &p->list[policy_list_of(p, e)];

	if (x->prev == POLICY_NONE)
		l->head = x->next;
	else
		p->entry[x->prev].next = x->next;
	if (x->next == POLICY_NONE)
		l->tail = x->prev;
	else
		p->entry[x->next].prev = x->prev;
	l->n--;
}

void policy_link(struct policy *p, uint32_t e, unsigned list)
{
	struct policy_list *l = &p->list[list];

	policy_set_tag(p, e, list);
	p->entry[e].prev = POLICY_NONE;
	p->entry[e].next = l->head;
	if (l->head == POLICY_NONE)
		l->tail = e;
	else
		p->entry[l->head].prev = e;
	l->head = e;
	l->n++;
}

void policy_drop(struct policy *p, uint32_t e)
{
	if (p->ops->is_ghost(p, e))
		p->ghosts--;
	else
		p->resident--;
	policy_unlink(p, e);
	hash_remove(p, e);
	p->entry[e].chain = p->free;
	p->free = e;
}

/* --- What caches call --- */

uint32_t policy_find(const struct policy *p, uint64_t key)
{
	uint32_t e = policy_lookup(p, key);

	return e != POLICY_NONE && !p->ops->is_ghost(p, e) ? e : POLICY_NONE;
}

void policy_hit(struct policy *p, uint32_t e)
{
	p->ops->hit(p, e);
}

enum policy_ghost policy_miss(struct policy *p, uint64_t key)
{
	enum policy_ghost ghost = p->ops->miss(p, key);

	p->count.misses++;
	p->count.ghost_recent += ghost == POLICY_GHOST_RECENT;
	p->count.ghost_frequent += ghost == POLICY_GHOST_FREQUENT;
	return ghost;
}

uint32_t policy_victim(struct policy *p, enum policy_ghost ghost)
{
	return p->resident ? p->ops->victim(p, ghost) : POLICY_NONE;
}

void policy_evict(struct policy *p, uint32_t e)
{
	p->resident--;
	p->ghosts++;
	p->count.evictions++;
	p->ops->evict(p, e);
}

/* An entry for a new key: one that is free, was never used, or was the oldest ghost. */
static uint32_t take_entry(struct policy *p)
{
	uint32_t e = p->free;

	if (e == POLICY_NONE && p->resident + p->ghosts < p->entries)
		return p->resident + p->ghosts;
	if (e == POLICY_NONE) {
		const struct policy_list *a = &p->list[p->ops->ghost_recent], *b = &p->list[p->ops->ghost_frequent];

		policy_drop(p, a->n >= b->n ? a->tail : b->tail);
		e = p->free;
	}
	p->free = p->entry[e].chain;
	return e;
}

uint32_t policy_add(struct policy *p, uint64_t key, enum policy_ghost ghost, uint32_t user)
{
	uint32_t *bucket = bucket_of(p, key), e = policy_lookup(p, key);

	assert(p->resident < p->max);
	/* It became a ghost since policy_miss(): that one was of an access in between. */
	if (e != POLICY_NONE)
		policy_drop(p, e);
	e = take_entry(p);
	p->entry[e] = (struct policy_entry){ .key = key & POLICY_KEY_MASK, .chain = *bucket, .user = user };
	*bucket = e + 1;
	p->resident++;
	p->ops->add(p, e, ghost);
	return e;
}

void policy_remove(struct policy *p, uint32_t e)
{
	policy_drop(p, e);
}
