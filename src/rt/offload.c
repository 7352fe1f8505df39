/* SPDX-License-Identifier: MIT */
/*
 * Offload: a few threads that run blocking or CPU-heavy functions for the coroutines of one reactor.
 *
 * A job lives on the stack of the coroutine that waits for it. Threads start when jobs wait and none is
 * idle, up to the configured number; they block all signals. Results come back through the mailbox.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "rt/rt_int.h"
#include "util/log.h"

struct offload {
	pthread_mutex_t lock;
	pthread_cond_t work;
	struct list queue;
	unsigned idle, started, max;
	bool stop;
	struct offload *older;	/* is ending */
	pthread_t threads[];
};

struct job {
	struct list node;
	struct rt_msg msg;
	struct rt *home;
	struct co *co;
	int (*fn)(void *arg);
	void *arg;
	int result;
	bool done;
};

static void job_done(struct rt_msg *m)
{
	struct job *j = container_of(m, struct job, msg);

	j->done = true;
	co_wake(j->co);
}

static struct job *take_job(struct offload *o)
{
	struct job *j;

	pthread_mutex_lock(&o->lock);
	o->idle++;
	while (list_empty(&o->queue) && !o->stop)
		pthread_cond_wait(&o->work, &o->lock);
	o->idle--;
	j = list_first(&o->queue, struct job, node);
	if (j)
		list_del(&j->node);
	pthread_mutex_unlock(&o->lock);
	return j;
}

static void *worker(void *arg)
{
	struct job *j;

	pthread_setname_np(pthread_self(), "weir-offload");
	while ((j = take_job(arg))) {
		j->result = j->fn(j->arg);
		rt_post(j->home, &j->msg);
	}
	return NULL;
}

static bool start_thread(struct offload *o)
{
	sigset_t all, old;
	int r;

	sigfillset(&all);
	sigdelset(&all, SIGSYS);	/* blocked it would end the process */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&o->threads[o->started], NULL, worker, o);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r != 0)
		return false;
	o->started++;
	return true;
}

static struct offload *offload_create(unsigned max)
{
	struct offload *o = calloc(1, sizeof(*o) + max * sizeof(o->threads[0]));

	if (!o)
		return NULL;
	pthread_mutex_init(&o->lock, NULL);
	pthread_cond_init(&o->work, NULL);
	list_init(&o->queue);
	o->max = max;
	return o;
}

static void stop_threads(struct offload *o)
{
	pthread_mutex_lock(&o->lock);
	o->stop = true;
	pthread_cond_broadcast(&o->work);
	pthread_mutex_unlock(&o->lock);
}

static void offload_free(struct offload *o)
{
	stop_threads(o);
	for (unsigned i = 0; i < o->started; i++)
		pthread_join(o->threads[i], NULL);
	pthread_cond_destroy(&o->work);
	pthread_mutex_destroy(&o->lock);
	free(o);
}

void offload_fini(struct rt *rt)
{
	while (rt->offload) {
		struct offload *o = rt->offload;

		rt->offload = o->older;
		offload_free(o);
	}
}

int rt_renew_workers(struct rt *rt)
{
	struct offload *o = rt->offload ? offload_create(rt->offload_threads) : NULL;

	if (!o)
		return rt->offload ? -ENOMEM : 0;
	stop_threads(rt->offload);
	o->older = rt->offload;
	rt->offload = o;
	return 0;
}

/* False if there is no thread to do it. */
static bool submit(struct rt *rt, struct job *j)
{
	struct offload *o = rt->offload;
	bool ok = true;

	if (!o)
		o = rt->offload = offload_create(rt->offload_threads);
	if (!o)
		return false;
	pthread_mutex_lock(&o->lock);
	list_add_tail(&o->queue, &j->node);
	if (!o->idle && o->started < o->max && !start_thread(o) && !o->started) {
		list_del(&j->node);
		ok = false;
	}
	pthread_cond_signal(&o->work);
	pthread_mutex_unlock(&o->lock);
	return ok;
}

int co_offload(int (*fn)(void *arg), void *arg)
{
	struct rt *rt = rt_self();
	struct job j = { .msg.fn = job_done, .home = rt, .co = co_self(), .fn = fn, .arg = arg };

	rt->stats.offloads++;
	if (rt->sim) {
		co_sleep_ns(1000 + rng_below(&rt->rng, 100000));
		return fn(arg);
	}
	if (!submit(rt, &j)) {
		log_warn("no thread for blocking work can be started; it runs on the reactor and delays the rest");
		return fn(arg);
	}
	while (!j.done)
		co_park("a worker thread");
	return j.result;
}
