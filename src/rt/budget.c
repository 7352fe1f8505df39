/* SPDX-License-Identifier: MIT */
/* A budget of memory. See budget.h. */
#include "rt/budget.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"

struct budget {
	_Atomic(uint64_t) committed, limit, headroom, refused, wanted;
	_Atomic(uint64_t) yielding;	/* of `committed`, beyond floors */
	pthread_mutex_t lock;	/* of `users` */
	struct list users;
	struct rt *keeper;
	void (*fn)(void *arg);
	void *arg;
	struct rt_msg bell;
	atomic_bool rung;
};

int budget_create(uint64_t limit, struct budget **ret)
{
	struct budget *b = calloc(1, sizeof(*b));

	if (!b)
		return -ENOMEM;
	atomic_init(&b->limit, limit);
	pthread_mutex_init(&b->lock, NULL);
	list_init(&b->users);
	*ret = b;
	return 0;
}

void budget_destroy(struct budget *b)
{
	if (!b)
		return;
	pthread_mutex_destroy(&b->lock);
	free(b);
}

static void bell_rung(struct rt_msg *m)
{
	struct budget *b = container_of(m, struct budget, bell);

	atomic_store_explicit(&b->rung, false, memory_order_release);
	if (b->fn)
		b->fn(b->arg);
}

void budget_set_keeper(struct budget *b, struct rt *keeper, void (*fn)(void *arg), void *arg)
{
	b->bell.fn = bell_rung;
	b->fn = fn;
	b->arg = arg;
	b->keeper = keeper;
}

static void ring(struct budget *b)
{
	if (b->keeper && !atomic_exchange_explicit(&b->rung, true, memory_order_acquire))
		rt_post(b->keeper, &b->bell);
}

void budget_want(struct budget *b, uint64_t bytes)
{
	uint64_t now;

	if (!b)
		return;
	now = atomic_load_explicit(&b->wanted, memory_order_relaxed);
	while (now < bytes && !atomic_compare_exchange_weak_explicit(&b->wanted, &now, bytes, memory_order_relaxed, memory_order_relaxed))
		;
	ring(b);
}

uint64_t budget_wanted(struct budget *b)
{
	return atomic_exchange_explicit(&b->wanted, 0, memory_order_relaxed);
}

/* --- Counting --- */

static uint64_t commitment(const struct budget_user *u, uint64_t held)
{
	return max(held, u->floor);
}

static bool commit(struct budget *b, uint64_t bytes, bool force)
{
	uint64_t limit = atomic_load_explicit(&b->limit, memory_order_relaxed);
	uint64_t headroom = atomic_load_explicit(&b->headroom, memory_order_relaxed);
	uint64_t now = atomic_load_explicit(&b->committed, memory_order_relaxed);

	do {
		if (!force && (now > limit || bytes > limit - now)) {
			atomic_fetch_add_explicit(&b->refused, 1, memory_order_relaxed);
			budget_want(b, bytes);
			return false;
		}
	} while (!atomic_compare_exchange_weak_explicit(&b->committed, &now, now + bytes, memory_order_relaxed, memory_order_relaxed));
	if (now + bytes + headroom > limit)
		ring(b);
	return true;
}

static void held_set(struct budget_user *u, uint64_t held)
{
	/* Others read it for figures. */
	__atomic_store_n(&u->held, held, __ATOMIC_RELAXED);
	if (held > u->peak)
		__atomic_store_n(&u->peak, held, __ATOMIC_RELAXED);
}

static bool take(struct budget_user *u, uint64_t bytes, bool force)
{
	uint64_t more;

	if (!u->b)
		return true;
	more = commitment(u, u->held + bytes) - commitment(u, u->held);
	if (more && !commit(u->b, more, force))
		return false;
	if (u->yields)
		atomic_fetch_add_explicit(&u->b->yielding, more, memory_order_relaxed);
	held_set(u, u->held + bytes);
	return true;
}

bool budget_take(struct budget_user *u, uint64_t bytes)
{
	return take(u, bytes, false);
}

void budget_force(struct budget_user *u, uint64_t bytes)
{
	take(u, bytes, true);
}

void budget_give(struct budget_user *u, uint64_t bytes)
{
	uint64_t less;

	if (!u->b)
		return;
	assert(bytes <= u->held);
	less = commitment(u, u->held) - commitment(u, u->held - bytes);
	held_set(u, u->held - bytes);
	if (u->yields)
		atomic_fetch_sub_explicit(&u->b->yielding, less, memory_order_relaxed);
	atomic_fetch_sub_explicit(&u->b->committed, less, memory_order_relaxed);
}

void budget_set_held(struct budget_user *u, uint64_t bytes)
{
	if (bytes > u->held)
		budget_force(u, bytes - u->held);
	else
		budget_give(u, u->held - bytes);
}

/* --- Users --- */

bool budget_join(struct budget *b, struct budget_user *u, const char *name, uint64_t floor)
{
	*u = (struct budget_user){ .name = name, .floor = floor };
	if (!b)
		return true;
	if (!commit(b, floor, false))
		return false;
	u->b = b;
	pthread_mutex_lock(&b->lock);
	list_add_tail(&b->users, &u->node);
	pthread_mutex_unlock(&b->lock);
	return true;
}

void budget_set_yielding(struct budget_user *u)
{
	assert(!u->held);
	u->yields = true;
}

void budget_leave(struct budget_user *u)
{
	struct budget *b = u->b;

	if (!b)
		return;
	pthread_mutex_lock(&b->lock);
	list_del(&u->node);
	pthread_mutex_unlock(&b->lock);
	if (u->yields)
		atomic_fetch_sub_explicit(&b->yielding, commitment(u, u->held) - u->floor, memory_order_relaxed);
	atomic_fetch_sub_explicit(&b->committed, commitment(u, u->held), memory_order_relaxed);
	u->b = NULL;
	u->held = 0;
}

/* --- Limits and figures --- */

uint64_t budget_limit(const struct budget *b)
{
	return atomic_load_explicit(&b->limit, memory_order_relaxed);
}

void budget_set_limit(struct budget *b, uint64_t limit)
{
	atomic_store_explicit(&b->limit, limit, memory_order_relaxed);
}

uint64_t budget_headroom(const struct budget *b)
{
	return atomic_load_explicit(&b->headroom, memory_order_relaxed);
}

void budget_set_headroom(struct budget *b, uint64_t headroom)
{
	atomic_store_explicit(&b->headroom, headroom, memory_order_relaxed);
}

uint64_t budget_committed(const struct budget *b)
{
	return atomic_load_explicit(&b->committed, memory_order_relaxed);
}

uint64_t budget_room(const struct budget *b)
{
	uint64_t limit, now;

	if (!b)
		return UINT64_MAX;
	limit = budget_limit(b);
	now = budget_committed(b);
	return limit > now ? limit - now : 0;
}

uint64_t budget_obtainable(const struct budget *b)
{
	uint64_t limit, yielding, now;

	if (!b)
		return UINT64_MAX;
	limit = budget_limit(b);
	yielding = atomic_load_explicit(&b->yielding, memory_order_relaxed);
	now = budget_committed(b);
	now = now > yielding ? now - yielding : 0;
	return limit > now ? limit - now : 0;
}

uint64_t budget_refused(const struct budget *b)
{
	return atomic_load_explicit(&b->refused, memory_order_relaxed);
}

unsigned budget_parts(struct budget *b, struct budget_part *part, unsigned max)
{
	unsigned n = 0;

	pthread_mutex_lock(&b->lock);
	list_for_each(&b->users, l) {
		const struct budget_user *u = container_of(l, struct budget_user, node);
		unsigned i = 0;

		while (i < n && strcmp(part[i].name, u->name))
			i++;
		if (i == max)
			continue;
		if (i == n)
			part[n++] = (struct budget_part){ .name = u->name };
		part[i].held += __atomic_load_n(&u->held, __ATOMIC_RELAXED);
		part[i].peak += __atomic_load_n(&u->peak, __ATOMIC_RELAXED);
		part[i].floor += u->floor;
		part[i].users++;
	}
	pthread_mutex_unlock(&b->lock);
	return n;
}
