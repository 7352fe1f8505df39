/* SPDX-License-Identifier: MIT */
/*
 * Read cache: giving memory back. One at a time; others run between the steps.
 *
 * Eviction leaves holes in all chunks. So the highest chunk in use is emptied into the holes of lower ones, and then given back as a whole, huge page
 * and all: copying 4 KiB is cheaper than what the kernel does to give back and fault in a page.
 */
#include <errno.h>
#include <string.h>

#include "cache/internal.h"
#include "util/err.h"
#include "util/size.h"

#define STEP 256u
#define RETRY_NS 1000000ull
#define PATIENCE_NS (200 * 1000000ull)	/* for all reads in flight together */

/* Evicts until no more slots are used than allowed. What reads in flight hold comes later, when they have ended. */
static co_fn void co_evict_surplus(struct cache *c, uint64_t deadline)
{
	unsigned n = 0;

	while (c->mem.used > c->mem.allowed * c->mem.per_chunk) {
		enum cache_class class = c->slots[CACHE_METADATA] > c->ceiling || !c->policy[CACHE_DATA].resident ? CACHE_METADATA : CACHE_DATA;

		if (!record_evict(c, NULL, class, POLICY_UNKNOWN) && !record_evict(c, NULL, !class, POLICY_UNKNOWN)) {
			if (rt_now_ns() >= deadline)
				return;
			co_sleep_ns(RETRY_NS);
			continue;
		}
		if (++n % STEP == 0)
			co_yield();
	}
}

enum emptied { EMPTIED, HELD /* by a read in flight */, LOWER_FULL };

/* Moves what is in the chunk to lower ones. */
static enum emptied empty_chunk(struct cache *c, uint32_t chunk)
{
	struct cache_mem *m = &c->mem;

	for (uint32_t i = 0; i < m->per_chunk && m->chunk[chunk].used; i++) {
		uint32_t slot = chunk * m->per_chunk + i, to, r = m->owner[slot];

		m->looks++;
		if (!mem_is_used(m, slot))
			continue;
		if (r == MEM_HELD)
			return HELD;
		to = mem_get_below(m, chunk);
		if (to == MEM_NONE)
			return LOWER_FULL;
		memcpy(mem_addr(m, to), mem_addr(m, slot), m->block);
		m->owner[to] = r;
		c->rec[r].slot = (c->rec[r].slot & ~REC_SLOT) | to;
		mem_put(m, slot);
	}
	return EMPTIED;
}

/* More is mapped than is allowed, or much more than is used. */
static bool too_much(const struct cache *c)
{
	const struct cache_mem *m = &c->mem;
	uint32_t need = (m->used + m->per_chunk - 1) / m->per_chunk;

	return m->mapped > m->allowed || m->mapped > need + 1 + need / 8;
}

/*
 * Empties chunks from the highest on and gives them back. What a read in flight holds is passed over, so that it keeps one chunk. Each chunk is looked at
 * once; those below one that has no room below it are full.
 */
static co_fn void co_compact(struct cache *c, uint64_t deadline)
{
	struct cache_mem *m = &c->mem;

	for (uint32_t chunk = mem_chunk_below(m, MEM_NONE); too_much(c) && chunk != MEM_NONE; chunk = mem_chunk_below(m, chunk)) {
		enum emptied r = empty_chunk(c, chunk);

		if (r == EMPTIED)
			mem_release_chunk(m, chunk);
		/* While the budget is kept, what is left over can wait for another time. */
		else if (r == LOWER_FULL || m->mapped <= m->allowed || rt_now_ns() >= deadline)
			return;
		co_yield();
	}
}

/* One pass. What reads in flight hold is waited for until `patience`. With shrink_lock. */
static co_fn void co_give_back(struct cache *c, uint64_t patience, uint64_t deadline)
{
	co_evict_surplus(c, patience);
	c->fills_seen = c->fills_ended;
	mem_release(&c->mem, 1);
	co_compact(c, deadline);
}

/* A read that hangs is no reason to hang as well: its chunk stays until co_cache_keep_budget() finds it free. */
co_fn void co_shrink(struct cache *c)
{
	uint64_t deadline = rt_now_ns() + PATIENCE_NS;

	if (!too_much(c) && c->mem.used <= c->mem.allowed * c->mem.per_chunk)
		return;
	co_mutex_lock(&c->shrink_lock);
	for (;;) {
		co_give_back(c, deadline, deadline);
		if (c->mem.mapped <= c->mem.allowed || rt_now_ns() >= deadline)
			break;
		/* Reads in flight are all that stands in the way. */
		while (c->fills_ended == c->fills_seen && rt_now_ns() < deadline)
			co_sleep_ns(RETRY_NS);
	}
	co_mutex_unlock(&c->shrink_lock);
}

/* Asked for again and again, while a read hangs as well: then it looks at nothing, and else it waits for nothing. */
co_fn void co_cache_keep_budget(struct cache *c)
{
	if (cache_memory(c) <= c->budget || c->fills_ended == c->fills_seen)
		return;
	cache_hold(c);
	co_mutex_lock(&c->shrink_lock);
	co_give_back(c, 0, rt_now_ns() + PATIENCE_NS);
	co_mutex_unlock(&c->shrink_lock);
	cache_release(c);
}

static int check_size(const struct cache *c, uint64_t size, uint64_t most, struct err *err)
{
	uint64_t least = cache_least(c), taken = least - c->config.chunk;
	char a[16], b[16];

	if (size > most)
		return err_set(err, -EINVAL, "the cache was started with %s, which is the most it can have; start with more to have more", size_format(most, a));
	if (size < least)
		return err_set(err, -EINVAL, "the cache's index alone takes %s: a size of at least %s is possible; primarycache=none caches nothing",
			       size_format(taken, a), size_format(least, b));
	return 0;
}

int cache_check_size(const struct cache *c, uint64_t size, struct err *err)
{
	return check_size(c, size, c->config.size, err);
}

co_fn int co_cache_resize(struct cache *c, uint64_t size, struct err *err)
{
	int r = check_size(c, size, c->config.most, err);

	if (r < 0)
		return r;
	cache_grow_index(c, size);
	c->budget = size;
	cache_hold(c);
	cache_recompute(c);
	co_shrink(c);
	cache_release(c);
	return 0;
}
