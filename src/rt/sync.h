/* SPDX-License-Identifier: MIT */
/*
 * Synchronisation between coroutines of one reactor. No atomics, no locks: a coroutine is never pre-empted.
 * All are fair (first come, first served) and live in place; waiters are kept on their own stacks.
 */
#pragma once

#include "rt/rt.h"

/* Wait queue: a condition without a predicate; callers loop on theirs. */
struct co_queue {
	struct list waiters;
};
void co_queue_init(struct co_queue *q);
co_fn void co_queue_wait(struct co_queue *q, const char *why);
/* False if `deadline_ns` (rt_now_ns() time) passed first. */
co_fn bool co_queue_wait_until(struct co_queue *q, uint64_t deadline_ns, const char *why);
bool co_queue_wake_one(struct co_queue *q);	/* false if nobody waits */
void co_queue_wake_all(struct co_queue *q);
bool co_queue_is_empty(const struct co_queue *q);

struct co_mutex {
	struct co *owner;
	struct co_queue q;
};
void co_mutex_init(struct co_mutex *m);
co_fn void co_mutex_lock(struct co_mutex *m);
bool co_mutex_trylock(struct co_mutex *m);
void co_mutex_unlock(struct co_mutex *m);

/* Counting semaphore: bounds parallelism. */
struct co_sem {
	unsigned count;
	struct co_queue q;
};
void co_sem_init(struct co_sem *s, unsigned count);
co_fn void co_sem_take(struct co_sem *s, const char *why);
void co_sem_give(struct co_sem *s);

/*
 * Fan-out: start children, wait for all, the first error wins. When the pool of coroutines is empty,
 * the child runs in the caller, so that fan-out never fails and never deadlocks.
 */
struct co_group {
	unsigned running;
	int error;		/* first non-zero result */
	struct co *waiter;
};
void co_group_init(struct co_group *g);
/* fn(arg) returns 0 or -errno. `arg` must live until co_group_wait(). */
co_fn void co_group_start(struct co_group *g, const char *name, int (*fn)(void *arg), void *arg);
co_fn int co_group_wait(struct co_group *g);

/*
 * Range lock: exclusive or shared over byte ranges. Fair: a request waits for every earlier
 * conflicting one, so a stream of readers does not starve a writer.
 */
struct co_rangelock {
	struct list ranges;	/* held and waiting, in order of arrival */
	unsigned n;
};
struct co_range {
	struct list node;
	uint64_t off, len;
	bool shared;
	unsigned blockers;	/* earlier conflicting ranges; 0: held */
	struct co *waiter;
};
void co_rangelock_init(struct co_rangelock *l);
/* `r` lives in the caller until unlock. A length of 0 conflicts with nothing. */
co_fn void co_range_lock(struct co_rangelock *l, struct co_range *r, uint64_t off, uint64_t len, bool shared);
void co_range_unlock(struct co_rangelock *l, struct co_range *r);
