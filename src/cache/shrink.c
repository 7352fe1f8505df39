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
#define RETRIES 2000u	/* of a chunk in which a read is in flight */

/* Evicts until no more slots are used than allowed. What reads in flight hold comes later, when they have ended. */
static co_fn void co_evict_surplus(struct cache *c)
{
	unsigned n = 0, tries = 0;

	while (c->mem.used > c->mem.allowed * c->mem.per_chunk) {
		enum cache_class class = c->slots[CACHE_METADATA] > c->ceiling || !c->policy[CACHE_DATA].resident ? CACHE_METADATA : CACHE_DATA;

		if (!record_evict(c, NULL, class, POLICY_UNKNOWN) && !record_evict(c, NULL, !class, POLICY_UNKNOWN)) {
			/* A read that hangs is no reason to hang as well. */
			if (++tries == RETRIES)
				return;
			co_sleep_ns(RETRY_NS);
			continue;
		}
		if (++n % STEP == 0)
			co_yield();
	}
}

/* Moves what is in the chunk to lower ones. False if a read in flight holds a slot of it, or the lower ones are full. */
static bool empty_chunk(struct cache *c, uint32_t chunk)
{
	struct cache_mem *m = &c->mem;

	for (uint32_t i = 0; i < m->per_chunk && m->chunk[chunk].used; i++) {
		uint32_t slot = chunk * m->per_chunk + i, to, r = m->owner[slot];

		if (!mem_is_used(m, slot))
			continue;
		if (r == MEM_HELD)
			return false;
		to = mem_get_below(m, chunk);
		if (to == MEM_NONE)
			return false;
		memcpy(mem_addr(m, to), mem_addr(m, slot), m->block);
		m->owner[to] = r;
		c->rec[r].slot = (c->rec[r].slot & ~REC_SLOT) | to;
		mem_put(m, slot);
	}
	return true;
}

/* More is mapped than is allowed, or much more than is used. */
static bool too_much(const struct cache *c)
{
	const struct cache_mem *m = &c->mem;
	uint32_t need = (m->used + m->per_chunk - 1) / m->per_chunk;

	return m->mapped > m->allowed || m->mapped > need + 1 + need / 8;
}

co_fn void co_shrink(struct cache *c)
{
	unsigned tries = 0;

	if (!too_much(c) && c->mem.used <= c->mem.allowed * c->mem.per_chunk)
		return;
	co_mutex_lock(&c->shrink_lock);
	co_evict_surplus(c);
	mem_release(&c->mem, 1);
	while (too_much(c) && tries < RETRIES) {
		uint32_t chunk = mem_last_chunk(&c->mem);

		if (chunk != MEM_NONE && !empty_chunk(c, chunk)) {
			/* While the budget is kept, what is left over can wait for another time. */
			if (c->mem.mapped <= c->mem.allowed)
				break;
			tries++;
			co_sleep_ns(RETRY_NS);
			co_evict_surplus(c);
		}
		mem_release(&c->mem, c->mem.mapped <= c->mem.allowed);
		co_yield();
	}
	co_mutex_unlock(&c->shrink_lock);
}

co_fn int co_cache_resize(struct cache *c, uint64_t size, struct err *err)
{
	uint64_t least = cache_least(c), taken = least - c->config.chunk;
	char a[16], b[16];

	if (size > c->config.size)
		return err_set(err, -EINVAL, "the cache was started with %s, which is the most it can have; start with more to have more", size_format(c->config.size, a));
	if (size < least)
		return err_set(err, -EINVAL, "the cache's index alone takes %s: a size of at least %s is possible; primarycache=none caches nothing",
			       size_format(taken, a), size_format(least, b));
	c->budget = size;
	cache_hold(c);
	cache_recompute(c);
	co_shrink(c);
	cache_release(c);
	return 0;
}
