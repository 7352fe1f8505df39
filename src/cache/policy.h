/* SPDX-License-Identifier: MIT */
/*
 * Replacement policies: which blocks stay in a cache. Pure code, no I/O, no allocation after policy_init().
 *
 * A policy knows entries by a key of POLICY_KEY_BITS. An entry is resident (the cache holds the block; `user` is the cache's own word) or a ghost (only
 * the key is remembered). Who uses it decides when to evict; a cache that accesses `key` does this:
 *
 *	e = policy_find(p, key);
 *	if (e != POLICY_NONE) {
 *		policy_hit(p, e);
 *	} else {
 *		ghost = policy_miss(p, key);
 *		if (p->resident >= p->capacity)
 *			policy_evict(p, policy_victim(p, ghost));
 *		policy_add(p, key, ghost, user);
 *	}
 *
 * policy_miss() and policy_add() may be far apart, with other accesses between them: the block is being read meanwhile. All are constant
 * in time, S3-FIFO's policy_victim() amortised and bounded.
 */
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define POLICY_NONE UINT32_MAX
#define POLICY_KEY_BITS 60
#define POLICY_KEY_MASK ((1ull << POLICY_KEY_BITS) - 1)
#define POLICY_LISTS 4
#define POLICY_TARGET_BITS 20

enum policy_ghost { POLICY_UNKNOWN, POLICY_GHOST_RECENT, POLICY_GHOST_FREQUENT };

struct policy_entry {
	uint64_t key;		/* the policy's own tag in the upper 4 bits */
	uint32_t chain;		/* of the hash bucket, or of the free list */
	uint32_t prev, next;
	uint32_t user;		/* of the cache, while resident */
};

/* A queue: head is the newest (most recent), tail the oldest. */
struct policy_list {
	uint32_t head, tail, n;
};

/* Per entry: the entry and its share of the hash table. */
#define POLICY_ENTRY_BYTES (sizeof(struct policy_entry) + sizeof(uint32_t))
static_assert(POLICY_ENTRY_BYTES <= 32, "a ghost costs at most 32 bytes");

struct policy;

struct policy_ops {
	const char *name;
	void (*hit)(struct policy *p, uint32_t e);
	enum policy_ghost (*miss)(struct policy *p, uint64_t key);
	uint32_t (*victim)(struct policy *p, enum policy_ghost ghost);
	void (*evict)(struct policy *p, uint32_t e);
	void (*add)(struct policy *p, uint32_t e, enum policy_ghost ghost);
	bool (*is_ghost)(const struct policy *p, uint32_t e);
	/* The list and the ghosts of what was seen once (recent), or again (frequent); for figures. */
	unsigned recent, frequent, ghost_recent, ghost_frequent;
};

struct policy_counters {
	uint64_t hits_recent, hits_frequent, misses, ghost_recent, ghost_frequent, evictions;
};

struct policy {
	const struct policy_ops *ops;
	struct policy_entry *entry;
	uint32_t *bucket;
	uint32_t entries, shift, free;
	uint32_t max;		/* residents at most: capacity never exceeds it */
	uint32_t capacity;	/* residents now */
	uint32_t resident, ghosts;
	uint64_t target;	/* ARC: of T1, in 1/2^POLICY_TARGET_BITS of an entry. S3-FIFO: not used */
	struct policy_list list[POLICY_LISTS];
	struct policy_counters count;
};

extern const struct policy_ops arc_ops, s3fifo_ops;

/* Bytes for a policy of at most `max` residents and `ghosts` ghosts, and how many of them are its hash table, which is touched all over. */
size_t policy_bytes(uint32_t max, uint32_t ghosts);
size_t policy_hash_bytes(uint32_t max, uint32_t ghosts);
/* `mem` is aligned to 8 and zeroed, as from mmap(2); pages of entries that were never used are not touched. max >= 1, capacity <= max. */
void policy_init(struct policy *p, const struct policy_ops *ops, void *mem, uint32_t max, uint32_t ghosts, uint32_t capacity);
/* Room for fewer than it was made for: what lies behind is not touched. It only grows; capacity <= max. */
void policy_set_room(struct policy *p, uint32_t max, uint32_t ghosts);
/* Evicting what is too much is up to the caller. */
void policy_set_capacity(struct policy *p, uint32_t capacity);

/* The resident entry of the key, or POLICY_NONE. Changes nothing. */
uint32_t policy_find(const struct policy *p, uint64_t key);
/* The resident `e` was accessed. */
void policy_hit(struct policy *p, uint32_t e);
/* The key, which is not resident, was accessed: adapts, and forgets its ghost. */
enum policy_ghost policy_miss(struct policy *p, uint64_t key);
/* The resident that is to make room, for a block about which policy_miss() said `ghost`; POLICY_NONE if there is none. */
uint32_t policy_victim(struct policy *p, enum policy_ghost ghost);
/* Makes any resident a ghost. */
void policy_evict(struct policy *p, uint32_t e);
/* The key becomes resident; it must not be, and p->resident must be below p->max. Returns its entry. */
uint32_t policy_add(struct policy *p, uint64_t key, enum policy_ghost ghost, uint32_t user);
/* Forgets a resident as if it had never been there. */
void policy_remove(struct policy *p, uint32_t e);

static inline uint64_t policy_key(const struct policy *p, uint32_t e)
{
	return p->entry[e].key & POLICY_KEY_MASK;
}

/* --- For policies --- */

static inline unsigned policy_tag(const struct policy *p, uint32_t e)
{
	return (unsigned)(p->entry[e].key >> POLICY_KEY_BITS);
}

static inline void policy_set_tag(struct policy *p, uint32_t e, unsigned tag)
{
	p->entry[e].key = policy_key(p, e) | (uint64_t)tag << POLICY_KEY_BITS;
}

/* The low two bits of the tag are the number of the list that the entry is on. */
static inline unsigned policy_list_of(const struct policy *p, uint32_t e)
{
	return policy_tag(p, e) & 3;
}

/* Entry or ghost of the key. */
uint32_t policy_lookup(const struct policy *p, uint64_t key);
void policy_unlink(struct policy *p, uint32_t e);
/* At the head of the list, with tag bits 2 and 3 zero. */
void policy_link(struct policy *p, uint32_t e, unsigned list);
/* Unlinks the entry and forgets its key. */
void policy_drop(struct policy *p, uint32_t e);
