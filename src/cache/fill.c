/* SPDX-License-Identifier: MIT */
/*
 * Read cache: reads in flight from below, shared by all who wait for their blocks.
 *
 *	fill_start ──▶ flying ──co_fill_run──▶ done ──last fill_put──▶ blocks resident, or slots free
 *	                 ▲ join                 ▲ join
 *
 * Who finds its block in a fill takes a use of it, waits until it is done, copies, and gives the use back. A fill that failed tells all of them.
 */
#include <errno.h>
#include <string.h>

#include "cache/internal.h"

struct cache_fill *fill_find(struct cache_volume *v, uint64_t block)
{
	struct cache *c = v->c;
	uint64_t key = cache_key(v, block);

	for (unsigned i = 0; i < c->n_flying; i++) {
		const struct cache_flying *x = &c->flying[i];

		struct cache_fill *f = &c->fill[x->fill];

		/* One that has failed already is not asked: the error was of an earlier read. */
		if (key - x->first < x->n && !(f->state[key - x->first] & FILL_DOOMED) && !f->error)
			return f;
	}
	return NULL;
}

static struct cache_fill *fill_alloc(struct cache *c)
{
	uint32_t i = c->fill_free;

	if (i >= FILLS || c->n_flying >= FILLS)
		return NULL;
	c->fill_free = c->fill[i].at;
	return &c->fill[i];
}

static void fill_free(struct cache *c, struct cache_fill *f)
{
	unsigned at = f->at;

	c->flying[at] = c->flying[--c->n_flying];
	c->fill[c->flying[at].fill].at = at;
	f->at = c->fill_free;
	c->fill_free = (uint32_t)(f - c->fill);
}

static bool is_missing(struct cache_volume *v, uint64_t block)
{
	return record_find(v->c, cache_key(v, block)) == REC_NONE && !fill_find(v, block);
}

static bool in_second(const struct cache_volume *v, enum cache_class class, uint64_t block)
{
	return second_allows(v, class) && second_has(v, block);
}

struct cache_fill *fill_start(struct cache_volume *v, enum cache_class class, uint64_t first, uint64_t max, bool access)
{
	struct cache *c = v->c;
	struct cache_fill *f = c->ending ? NULL : fill_alloc(c);

	if (!f)
		return NULL;
	f->n = 0;
	f->second = in_second(v, class, first);
	max = min(max, (uint64_t)(f->second ? SECOND_RUN : FILL_MAX));
	max = min(max, KEY_BLOCKS - first);
	while (f->n < max && (!f->n || (is_missing(v, first + f->n) && in_second(v, class, first + f->n) == f->second))) {
		enum policy_ghost ghost = access ? policy_miss(&c->policy[class], cache_key(v, first + f->n)) : POLICY_UNKNOWN;
		uint32_t slot = slot_get(v, class, ghost);

		v->count[class].ghost_hits += ghost != POLICY_UNKNOWN;
		if (slot == MEM_NONE)
			break;
		f->slot[f->n] = slot;
		f->state[f->n] = (uint8_t)(ghost | (change_in_flight(v, first + f->n) ? FILL_DOOMED : 0));
		f->n++;
	}
	if (!f->n) {
		f->at = c->fill_free;
		c->fill_free = (uint32_t)(f - c->fill);
		return NULL;
	}
	f->v = v;
	f->first = first;
	f->class = class;
	f->users = 1;
	f->done = false;
	f->ahead = !access;
	f->error = 0;
	co_queue_init(&f->q);
	f->at = c->n_flying;
	c->flying[c->n_flying++] = (struct cache_flying){ cache_key(v, first), f->n, (uint32_t)(f - c->fill) };
	v->fills++;
	return f;
}

static void fill_done(struct cache_fill *f, int error)
{
	f->error = error;
	f->done = true;
	co_queue_wake_all(&f->q);
}

static co_fn int co_fill_read(struct cache_fill *f, unsigned flags)
{
	struct cache_volume *v = f->v;
	struct cache *c = v->c;
	struct iovec iov[FILL_MAX];
	uint64_t off = f->first << c->shift, left = v->disk.size - off;
	int n = 0;

	if (f->second && co_second_read(f) == 0)
		return 0;
	if (second_allows(v, f->class)) {
		c->second->count.misses += f->n;
		v->second.misses += f->n;
	}
	for (uint32_t i = 0; i < f->n; i++) {
		char *p = mem_addr(&c->mem, f->slot[i]);
		uint64_t len = min(left, (uint64_t)c->block);

		/* Beyond the end of the disk there is nothing to read. */
		if (len < c->block)
			memset(p + len, 0, c->block - len);
		left -= len;
		if (n && (char *)iov[n - 1].iov_base + iov[n - 1].iov_len == p)
			iov[n - 1].iov_len += len;
		else
			iov[n++] = (struct iovec){ p, len };
	}
	return co_disk_readv(v->disk.file, off, iov, n, flags);
}

co_fn void co_fill_run(struct cache_fill *f, unsigned flags)
{
	fill_done(f, co_fill_read(f, flags));
}

void fill_abort(struct cache_fill *f)
{
	fill_done(f, -ECANCELED);
	fill_put(f);
}

/* One block of a fill that nobody uses any more. */
static void settle(struct cache_fill *f, uint32_t i)
{
	struct cache_volume *v = f->v;
	struct cache *c = v->c;
	uint64_t block = f->first + i;
	unsigned state = f->state[i];
	uint32_t slot = f->slot[i];
	bool used = !f->ahead || (state & FILL_AGAIN);

	if (f->ahead && used)
		ahead_used(v);
	else if (f->ahead && !f->error && c->mem.note[slot] != MEM_OWN)
		ahead_wasted(v);	/* who keeps it reads ahead as well */
	v->count[f->class].shared += !f->ahead && !f->error && c->mem.note[slot] == MEM_BELOW_HIT;
	if (f->error || (state & FILL_DOOMED) || c->mem.note[slot] != MEM_OWN || v->closing || c->ending || !cache_allows(v, f->class) || (v->limit && v->slots > v->limit) ||
	    record_find(c, cache_key(v, block)) != REC_NONE) {
		slot_put(v, f->class, slot);
		return;
	}
	if (bytes_are_zero(mem_addr(&c->mem, slot), c->block)) {
		slot_put(v, f->class, slot);
		slot = REC_ZERO;
	}
	if (!record_add(v, f->class, block, state & FILL_GHOST, slot, used ? 0 : REC_AHEAD)) {
		if (slot != REC_ZERO)
			slot_put(v, f->class, slot);
		return;
	}
	if (!f->ahead && (state & FILL_AGAIN))
		record_hit(c, record_find(c, cache_key(v, block)), false);
}

void fill_put(struct cache_fill *f)
{
	struct cache_volume *v = f->v;

	if (--f->users)
		return;
	fill_free(v->c, f);
	v->c->fills_ended++;
	for (uint32_t i = 0; i < f->n; i++)
		settle(f, i);
	if (!--v->fills)
		co_queue_wake_all(&v->idle);
}
