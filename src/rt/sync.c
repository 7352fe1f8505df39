/* SPDX-License-Identifier: MIT */
/*
 * Wait queue, mutex, semaphore and group. Whoever gives something up hands it to the first waiter at once, so
 * nobody overtakes.
 */
#include <assert.h>
#include <errno.h>

#include "rt/rt_int.h"
#include "rt/sync.h"

struct waiter {
	struct list node;
	struct co *co;
	struct rt_timer timer;
	bool woken, expired;
};

/* Wait queue */

void co_queue_init(struct co_queue *q)
{
	list_init(&q->waiters);
}

void co_queue_wait(struct co_queue *q, const char *why)
{
	struct waiter w = { .co = co_self() };

	list_add_tail(&q->waiters, &w.node);
	while (!w.woken)
		co_park(why);
}

static void waiter_expired(struct rt_timer *t)
{
	struct waiter *w = container_of(t, struct waiter, timer);

	if (w->woken)
		return;
	list_del(&w->node);
	w->woken = w->expired = true;
	co_wake(w->co);
}

bool co_queue_wait_until(struct co_queue *q, uint64_t deadline_ns, const char *why)
{
	struct waiter w = { .co = co_self() };

	list_add_tail(&q->waiters, &w.node);
	rt_timer_arm(&w.timer, deadline_ns, waiter_expired);
	while (!w.woken)
		co_park(why);
	rt_timer_cancel(&w.timer);
	return !w.expired;
}

/* The coroutine that was woken, or NULL. */
static struct co *wake_first(struct co_queue *q)
{
	struct waiter *w = list_first(&q->waiters, struct waiter, node);

	if (!w)
		return NULL;
	list_del(&w->node);
	w->woken = true;
	co_wake(w->co);
	return w->co;
}

bool co_queue_wake_one(struct co_queue *q)
{
	return wake_first(q) != NULL;
}

void co_queue_wake_all(struct co_queue *q)
{
	while (wake_first(q))
		;
}

bool co_queue_is_empty(const struct co_queue *q)
{
	return list_empty(&q->waiters);
}

/* Mutex */

void co_mutex_init(struct co_mutex *m)
{
	m->owner = NULL;
	co_queue_init(&m->q);
}

bool co_mutex_trylock(struct co_mutex *m)
{
	if (m->owner)
		return false;
	m->owner = co_self();
	return true;
}

void co_mutex_lock(struct co_mutex *m)
{
	assert(m->owner != co_self());
	if (!co_mutex_trylock(m))
		co_queue_wait(&m->q, "a mutex");
}

void co_mutex_unlock(struct co_mutex *m)
{
	assert(m->owner);
	m->owner = wake_first(&m->q);
}

/* Semaphore */

void co_sem_init(struct co_sem *s, unsigned count)
{
	s->count = count;
	co_queue_init(&s->q);
}

void co_sem_take(struct co_sem *s, const char *why)
{
	if (s->count > 0)
		s->count--;
	else
		co_queue_wait(&s->q, why);
}

void co_sem_give(struct co_sem *s)
{
	if (!wake_first(&s->q))
		s->count++;
}

/* Group */

void co_group_init(struct co_group *g)
{
	*g = (struct co_group){ 0 };
}

static void note_result(struct co_group *g, int result)
{
	if (result && !g->error)
		g->error = result;
}

void co_group_child_done(struct co_group *g, int result)
{
	note_result(g, result);
	if (--g->running == 0 && g->waiter)
		co_wake(g->waiter);
}

void co_group_start(struct co_group *g, const char *name, int (*fn)(void *arg), void *arg)
{
	if (co_spawn_child(name, g, fn, arg) == 0)
		g->running++;
	else
		note_result(g, fn(arg));
}

int co_group_wait(struct co_group *g)
{
	g->waiter = co_self();
	while (g->running)
		co_park("its children");
	g->waiter = NULL;
	return g->error;
}
