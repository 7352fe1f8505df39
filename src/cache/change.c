/* SPDX-License-Identifier: MIT */
/*
 * Read cache: changes (writes, zeroes, discards) against what is cached.
 *
 * A change is announced before it goes to the image, and applied to what is resident when it has returned. In between, reads of resident blocks give the old
 * content, which nobody can object to: the two have no order. Fills of the same blocks, in flight or started meanwhile, are doomed.
 *
 * Two changes of one block in flight together leave the image with one or the other, and only the image knows which. So a block is updated only if no other
 * change of it was in flight at its end; the one that ends first drops it, and the later one finds it gone. Narrow changes are counted in a table by a hash of
 * their blocks (two that collide only drop what they could have updated); wide ones are on a list of the volume.
 */
#include <string.h>

#include "cache/internal.h"
#include "util/iov.h"

#define STEP 256u	/* blocks between two chances for others to run */

static uint16_t *count_of(struct cache_volume *v, uint64_t block)
{
	return &v->c->changes[(cache_key(v, block) * 0x9e3779b97f4a7c15ull) >> 52];
}

static_assert(CHANGE_COUNTS == 1u << (64 - 52), "count_of() says 52");

static bool wide_overlaps(struct cache_volume *v, uint64_t block, const struct cache_change *but)
{
	list_for_each(&v->wide, n) {
		const struct cache_change *w = container_of(n, struct cache_change, node);

		if (w != but && w->first <= block && block <= w->last)
			return true;
	}
	return false;
}

bool change_in_flight(struct cache_volume *v, uint64_t block)
{
	return *count_of(v, block) || wide_overlaps(v, block, NULL);
}

static void doom_fills(struct cache_volume *v, uint64_t first, uint64_t last)
{
	struct cache *c = v->c;
	uint64_t a = cache_key(v, first), b = cache_key(v, last);

	for (unsigned i = 0; i < c->n_flying; i++) {
		const struct cache_flying *x = &c->flying[i];

		for (uint64_t key = max(a, x->first); key <= b && key < x->first + x->n; key++)
			c->fill[x->fill].state[key - x->first] |= FILL_DOOMED;
	}
}

void change_begin(struct cache_volume *v, struct cache_change *ch, uint64_t off, uint64_t len)
{
	ch->first = off >> v->c->shift;
	ch->last = (off + len - 1) >> v->c->shift;
	ch->wide = false;
	if (ch->last >= KEY_BLOCKS) {
		ch->last = KEY_BLOCKS - 1;
		if (ch->first > ch->last)
			return;
	}
	ch->wide = ch->last - ch->first >= NARROW;
	if (ch->wide)
		list_add_tail(&v->wide, &ch->node);
	for (uint64_t b = ch->first; !ch->wide && b <= ch->last; b++)
		++*count_of(v, b);
	if (v->fills)
		doom_fills(v, ch->first, ch->last);
}

/* The part of a resident block that a write covers. */
static void update(struct cache *c, uint32_t r, uint64_t block, uint64_t off, uint64_t len, const struct iovec *iov, int niov)
{
	uint64_t start = block << c->shift, from = max(start, off), to = min(start + c->block, off + len);

	iov_copy_out(iov, niov, from - off, mem_addr(&c->mem, c->rec[r].slot & REC_SLOT) + (from - start), to - from);
}

static void apply(struct cache_volume *v, struct cache_change *ch, uint64_t block, uint64_t off, uint64_t len, const struct iovec *iov, int niov)
{
	struct cache *c = v->c;
	uint32_t r = record_find(c, cache_key(v, block));

	if (r == REC_NONE)
		return;
	if (!iov || record_is_zero(&c->rec[r]) || *count_of(v, block) > !ch->wide || wide_overlaps(v, block, ch)) {
		record_drop(c, r, false);
		return;
	}
	update(c, r, block, off, len, iov, niov);
	v->count[record_class(&c->rec[r])].updated++;
}

co_fn void co_change_end(struct cache_volume *v, struct cache_change *ch, uint64_t off, uint64_t len, int ret, const struct iovec *iov, int niov)
{
	bool any = v->records[0] + v->records[1];

	if (ret < 0)
		iov = NULL;
	if (!ch->wide) {
		for (uint64_t b = ch->first; b <= ch->last; b++) {
			if (any)
				apply(v, ch, b, off, len, iov, niov);
			--*count_of(v, b);
		}
		return;
	}
	if (!iov) {
		co_drop_range(v, ch->first, ch->last);
	} else {
		for (uint64_t b = ch->first; any && b <= ch->last; b++) {
			apply(v, ch, b, off, len, iov, niov);
			if (b % STEP == 0)
				co_yield();
		}
	}
	list_del(&ch->node);
}

/* --- Dropping --- */

/* Looks at every record of the cache, a step at a time. */
static co_fn void co_drop_by_table(struct cache_volume *v, uint64_t first, uint64_t last)
{
	struct cache *c = v->c;

	for (uint32_t r = 0; r < c->rec_touched; r++) {
		if (r % (8 * STEP) == 8 * STEP - 1)
			co_yield();
		if (c->rec[r].entry == REC_NONE)
			continue;

		uint64_t key = record_key(c, &c->rec[r]);

		if (key >= cache_key(v, first) && key <= cache_key(v, last))
			record_drop(c, r, false);
	}
}

co_fn void co_drop_range(struct cache_volume *v, uint64_t first, uint64_t last)
{
	struct cache *c = v->c;

	if (!(v->records[0] + v->records[1]))
		return;
	if (last - first > c->rec_touched) {
		co_drop_by_table(v, first, last);
		return;
	}
	for (uint64_t b = first; b <= last && v->records[0] + v->records[1]; b++) {
		uint32_t r = record_find(c, cache_key(v, b));

		if (r != REC_NONE)
			record_drop(c, r, false);
		if (b % STEP == 0)
			co_yield();
	}
}

co_fn void co_drop_class(struct cache_volume *v, enum cache_class class)
{
	unsigned n = 0;

	while (v->tail[class] != REC_NONE) {
		record_drop(v->c, v->tail[class], false);
		if (++n % STEP == 0)
			co_yield();
	}
}
