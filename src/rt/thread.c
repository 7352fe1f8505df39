/* SPDX-License-Identifier: MIT */
/*
 * Reactors on threads of their own, beside the one that the process began with.
 *
 * A hold keeps the loop going while it has nothing to do. Signals that are sent to the process go to the thread that began it; where the threads run is left to the
 * operator.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rt/rt_int.h"
#include "util/log.h"

struct rt_thread {
	pthread_t thread;
	struct rt *rt;
	char name[16];
	void (*at_end)(void *arg);
	void *arg;
};

static co_fn void co_nothing(void *arg)
{
}

static void *thread_main(void *arg)
{
	struct rt_thread *t = arg;
	int ret;

	pthread_setname_np(pthread_self(), t->name);
	ret = rt_run(t->rt, co_nothing, NULL);
	if (ret < 0) {
		/* Others wait for it: as if the process had been killed. */
		log_error("%s: the event loop failed: %s", t->name, strerror(-ret));
		_exit(1);
	}
	t->at_end(t->arg);
	return NULL;
}

static int start(struct rt_thread *t)
{
	static const int faults[] = { SIGSYS, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP };
	sigset_t set, old;
	int ret;

	sigfillset(&set);
	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
		sigdelset(&set, faults[i]);
	pthread_sigmask(SIG_SETMASK, &set, &old);
	ret = pthread_create(&t->thread, NULL, thread_main, t);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return -ret;
}

int rt_thread_start(struct rt *rt, const char *name, void (*at_end)(void *arg), void *arg, struct rt_thread **ret)
{
	struct rt_thread *t = calloc(1, sizeof(*t));
	int r = t ? 0 : -ENOMEM;

	if (t) {
		*t = (struct rt_thread){ .rt = rt, .at_end = at_end, .arg = arg };
		strncpy(t->name, name, sizeof(t->name) - 1);
		rt_hold(rt);
		r = start(t);
	}
	if (r < 0) {
		free(t);
		at_end(arg);
		return r;
	}
	*ret = t;
	return 0;
}

void rt_thread_end(struct rt_thread *t)
{
	if (!t)
		return;
	rt_release(t->rt);
	pthread_join(t->thread, NULL);
	free(t);
}
