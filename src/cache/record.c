/* SPDX-License-Identifier: MIT */
/*
 * Read cache: resident blocks, and who has to go.
 *
 * The policy of a class names the victim. Three rules come before it:
 *  - metadata has at most `ceiling` slots, and data leaves it at least `floor`;
 *  - a volume at its limit takes a slot from itself;
 *  - a volume at or below its share loses nothing to another one: who has most above its share does instead.
 * Where a volume has to give, its oldest block goes, by order of arrival with a second chance for what was hit: no policy of its own.
 */
#include "cache/internal.h"

#define CHANCES 8u

/* --- Chains --- */

static void chain_add(struct cache *c, struct cache_volume *v, uint32_t r)
{
	struct cache_record *x = &c->rec[r];
	enum cache_class class = record_class(x);

	x->prev = REC_NONE;
	x->next = v->head[class];
	if (v->head[class] == REC_NONE)
		v->tail[class] = r;
	else
		c->rec[v->head[class]].prev = r;
	v->head[class] = r;
}

static void chain_del(struct cache *c, struct cache_volume *v, uint32_t r)
{
	struct cache_record *x = &c->rec[r];
	enum cache_class class = record_class(x);

	if (x->prev == REC_NONE)
		v->head[class] = x->next;
	else
		c->rec[x->prev].next = x->next;
	if (x->next == REC_NONE)
		v->tail[class] = x->prev;
	else
		c->rec[x->next].prev = x->prev;
}

/* --- Records --- */

uint32_t record_find(struct cache *c, uint64_t key)
{
	for (unsigned i = 0; i < CACHE_CLASSES; i++) {
		uint32_t e;

		if (!c->policy[i].resident)
			continue;
		e = policy_find(&c->policy[i], key);
		if (e != POLICY_NONE)
			return c->policy[i].entry[e].user;
	}
	return REC_NONE;
}

static uint32_t take_record(struct cache *c)
{
	uint32_t r = c->rec_free;

	if (r != REC_NONE)
		c->rec_free = c->rec[r].next;
	else if (c->rec_touched < c->rec_max)
		r = c->rec_touched++;
	return r;
}

/* A full table: a block of zeroes takes a record without a slot, so it is possible. */
static uint32_t make_record(struct cache_volume *v, enum cache_class class)
{
	struct cache *c = v->c;
	struct policy *p = &c->policy[class];
	uint32_t r;

	if (p->resident >= p->max && !record_evict(c, v, class, POLICY_UNKNOWN))
		return REC_NONE;
	r = take_record(c);
	if (r == REC_NONE && record_evict(c, v, class, POLICY_UNKNOWN))
		r = take_record(c);
	if (r != REC_NONE && p->resident >= p->max) {
		c->rec[r] = (struct cache_record){ .entry = REC_NONE, .next = c->rec_free };
		c->rec_free = r;
		return REC_NONE;
	}
	return r;
}

bool record_add(struct cache_volume *v, enum cache_class class, uint64_t block, enum policy_ghost ghost, uint32_t slot, unsigned flags)
{
	struct cache *c = v->c;
	uint32_t r = make_record(v, class);

	if (r == REC_NONE)
		return false;
	c->rec[r].slot = slot | flags | (class == CACHE_METADATA ? REC_METADATA : 0);
	c->rec[r].entry = policy_add(&c->policy[class], cache_key(v, block), ghost, r);
	chain_add(c, v, r);
	v->records[class]++;
	if (slot == REC_ZERO) {
		c->zeros[class]++;
		cache_recompute(c);
	} else {
		c->mem.owner[slot] = r;
	}
	return true;
}

void record_drop(struct cache *c, uint32_t r, bool ghost)
{
	struct cache_record *x = &c->rec[r];
	enum cache_class class = record_class(x);
	struct cache_volume *v = key_volume(c, record_key(c, x));
	struct policy *p = &c->policy[class];

	if (x->slot & REC_AHEAD)
		ahead_wasted(v);
	else if (ghost && c->second && !record_is_zero(x))
		second_feed(v, class, key_block(record_key(c, x)), mem_addr(&c->mem, x->slot & REC_SLOT));
	if (ghost)
		policy_evict(p, x->entry);
	else
		policy_remove(p, x->entry);
	v->count[class].evicted += ghost;
	v->count[class].dropped += !ghost;
	chain_del(c, v, r);
	v->records[class]--;
	if (record_is_zero(x)) {
		c->zeros[class]--;
		cache_recompute(c);
	} else {
		slot_put(v, class, x->slot & REC_SLOT);
	}
	*x = (struct cache_record){ .entry = REC_NONE, .next = c->rec_free };
	c->rec_free = r;
}

void record_hit(struct cache *c, uint32_t r, bool same_as_before)
{
	struct cache_record *x = &c->rec[r];

	if (unlikely(x->slot & REC_AHEAD)) {
		x->slot &= ~REC_AHEAD;
		ahead_used(key_volume(c, record_key(c, x)));
		return;
	}
	x->slot |= REC_USED;
	/* Small reads of one block in a row are one access. */
	if (!same_as_before)
		policy_hit(&c->policy[record_class(x)], x->entry);
}

/* --- Eviction --- */

/* The volume's own oldest. */
static bool evict_own(struct cache_volume *v, enum cache_class class)
{
	struct cache *c = v->c;

	if (v->tail[class] == REC_NONE)
		class = class == CACHE_DATA ? CACHE_METADATA : CACHE_DATA;
	if (v->tail[class] == REC_NONE)
		return false;
	for (unsigned i = 0; i < CHANCES && (c->rec[v->tail[class]].slot & REC_USED); i++) {
		uint32_t r = v->tail[class];

		chain_del(c, v, r);
		c->rec[r].slot &= ~REC_USED;
		chain_add(c, v, r);
	}
	record_drop(c, v->tail[class], true);
	return true;
}

/* Who has most above its share and something that can go. */
static struct cache_volume *greediest(struct cache *c)
{
	struct cache_volume *best = NULL;

	for (unsigned i = 0; i < CACHE_MAX_VOLUMES; i++) {
		struct cache_volume *v = c->vol[i];

		if (!v || v->slots <= v->share || !(v->records[0] + v->records[1]))
			continue;
		if (!best || v->slots - v->share > best->slots - best->share)
			best = v;
	}
	return best;
}

bool record_evict(struct cache *c, struct cache_volume *v, enum cache_class class, enum policy_ghost ghost)
{
	uint32_t e = policy_victim(&c->policy[class], ghost), r;
	struct cache_volume *w;

	if (e == POLICY_NONE)
		return false;
	r = c->policy[class].entry[e].user;
	w = key_volume(c, record_key(c, &c->rec[r]));
	if (likely(!v || w == v || !w->share || w->slots > w->share || record_is_zero(&c->rec[r]))) {
		record_drop(c, r, true);
		return true;
	}
	w = greediest(c);
	if (!w && v->records[0] + v->records[1])
		w = v;
	return w && evict_own(w, class);
}

/* One step towards a free slot for the volume. True if it may be tried; false if something was evicted or, *stuck, nothing can be. */
static bool may_take(struct cache_volume *v, enum cache_class class, enum policy_ghost ghost, bool *stuck)
{
	struct cache *c = v->c;
	uint32_t all = c->mem.allowed * c->mem.per_chunk, data = c->slots[CACHE_DATA], metadata = c->slots[CACHE_METADATA];
	enum cache_class from = class;

	if (unlikely(v->limit && v->slots >= v->limit)) {
		*stuck = !evict_own(v, class);
		return false;
	}
	if (class == CACHE_METADATA && metadata < c->ceiling) {
		if (data + metadata < all)
			return true;
		from = c->policy[CACHE_DATA].resident ? CACHE_DATA : CACHE_METADATA;
	} else if (class == CACHE_DATA && data + max(c->floor, metadata) < all) {
		return true;
	} else if (!c->policy[class].resident) {
		*stuck = true;	/* all of it is being read */
		return false;
	}
	*stuck = !record_evict(c, v, from, ghost);
	return false;
}

uint32_t slot_get(struct cache_volume *v, enum cache_class class, enum policy_ghost ghost)
{
	struct cache *c = v->c;
	uint32_t slot;

	for (unsigned i = 0; i < EVICT_TRIES; i++) {
		bool stuck = false;

		if (may_take(v, class, ghost, &stuck)) {
			slot = mem_get(&c->mem);
			if (slot != MEM_NONE) {
				v->slots++;
				c->slots[class]++;
				if (class == CACHE_METADATA)
					cache_recompute(c);
				return slot;
			}
			stuck = !record_evict(c, v, class, ghost);
		}
		if (stuck)
			return MEM_NONE;
		ghost = POLICY_UNKNOWN;
	}
	return MEM_NONE;
}

void slot_put(struct cache_volume *v, enum cache_class class, uint32_t slot)
{
	struct cache *c = v->c;

	mem_put(&c->mem, slot);
	v->slots--;
	c->slots[class]--;
	if (class == CACHE_METADATA)
		cache_recompute(c);
}
