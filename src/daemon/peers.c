/* SPDX-License-Identifier: MIT */
/* The other reactors of a serving process. */
#include "daemon/peers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/internal.h"
#include "daemon/serve.h"
#include "daemon/split.h"
#include "rt/buf.h"
#include "rt/rt.h"
#include "util/bytes.h"
#include "util/err.h"

#define BOUNCE_BYTES (64ull << 20)
#define VHOST_REQUESTS 512u	/* of one device */
#define FUSE_REQUESTS 64u	/* of one file */
#define TRIES 1000u		/* ms */

/* The budget is the process's. */
static int join_memory(struct serve *s, struct err *err)
{
	int ret;

	s->memory.b = s->main->memory.b;
	s->memory.fd = -1;
	s->memory.allowed = s->memory.full = UINT64_MAX;
	co_queue_init(&s->memory.q);
	ret = rt_set_budget(s->rt, s->memory.b);
	return ret < 0 ? err_errno(err, ret, "no memory is left in the budget for a reactor: give a larger --memory") : 0;
}

int serve_reactor_create(struct serve *s, const struct serve_config *whole, unsigned parts, struct err *err)
{
	const struct serve_config *c = s->config;
	unsigned ndisks = max(c->graph.ndisks, 1u);
	struct rt_config rc = {
		.coroutines = min(1024u * ndisks * (whole->nnbd > 0) + VHOST_REQUESTS * c->nvhost +
				  FUSE_REQUESTS * c->nfuse, SERVE_REQUESTS_MAX / parts) + (s->main ? 512 : 1024) + whole->nbd_conns,
		.spin_ns = c->poll_ns,
		/* An image on a cluster that hangs may hold one of them. */
		.offload_threads = 4 + ndisks,
	};
	int ret = rt_create(&rc, &s->rt, err);

	if (!ret)
		ret = s->main ? join_memory(s, err) : memory_init(s, err);
	if (!ret)
		ret = rt_bufpool_create(s->rt, BOUNCE_BYTES, &s->bounce, err);
	if (!ret)
		ret = rt_bufpool_account(s->bounce, "bounce buffers", err);
	if (!ret)
		rt_set_bufs(s->rt, s->bounce);
	return ret;
}

void serve_reactor_destroy(struct serve *s)
{
	rt_bufpool_destroy(s->bounce);
	rt_destroy(s->rt);
	s->bounce = NULL;
	s->rt = NULL;
}

static void peer_ends(void *arg)
{
	serve_reactor_destroy(arg);
}

int peers_start(struct serve *s, struct err *err)
{
	unsigned n = s->split->n;
	int ret = 0;

	s->peers = n > 1 ? calloc(n - 1, sizeof(*s->peers)) : NULL;
	if (n > 1 && !s->peers)
		return err_set(err, -ENOMEM, "out of memory");
	while (s->npeers < n - 1 && !ret) {
		struct serve *p = &s->peers[s->npeers];
		char name[16];

		*p = (struct serve){ .config = &s->split->part[s->npeers + 1], .main = s, .split = s->split, .number = s->npeers + 1 };
		co_queue_init(&p->stop_q);
		snprintf(name, sizeof(name), "weir-%u", p->number);
		ret = serve_reactor_create(p, s->split->whole, n, err);
		if (ret < 0) {
			serve_reactor_destroy(p);
		} else {
			ret = rt_thread_start(p->rt, name, peer_ends, p, &p->thread);
			if (ret < 0)
				err_errno(err, ret, "cannot start a thread for a reactor");
		}
		s->npeers += !ret;
	}
	return ret;
}

void peers_end(struct serve *s)
{
	for (unsigned i = 0; i < s->npeers; i++)
		rt_thread_end(s->peers[i].thread);
	free(s->peers);
	s->peers = NULL;
	s->npeers = 0;
}

/* What the function itself returns is not to be taken for the lack of a coroutine. */
struct attempt {
	int (*fn)(void *arg);
	void *arg;
	bool ran;
	int result;
};

static co_fn int co_attempt(void *arg)
{
	struct attempt *a = arg;

	a->ran = true;
	a->result = a->fn(a->arg);
	return 0;
}

co_fn int co_serve_call(struct serve *t, int (*fn)(void *arg), void *arg)
{
	struct attempt a = { .fn = fn, .arg = arg };
	int ret = co_call(t->rt, co_attempt, &a);

	for (unsigned i = 0; !a.ran && ret == -EAGAIN && i < TRIES; i++) {
		co_sleep_ns(1000000);
		ret = co_call(t->rt, co_attempt, &a);
	}
	return a.ran ? a.result : ret;
}

struct everywhere {
	struct serve *t;
	int (*fn)(void *arg);
};

static co_fn int co_one(void *arg)
{
	struct everywhere *e = arg;

	return co_serve_call(e->t, e->fn, e->t);
}

co_fn int co_everywhere(struct serve *s, int (*fn)(void *arg))
{
	struct everywhere e[SPLIT_MAX];
	struct co_group g;

	co_group_init(&g);
	for (unsigned i = 0; i < s->npeers; i++) {
		e[i] = (struct everywhere){ &s->peers[i], fn };
		co_group_start(&g, "another reactor", co_one, &e[i]);
	}
	e[s->npeers] = (struct everywhere){ s, fn };
	co_group_start(&g, "this reactor", co_one, &e[s->npeers]);
	return co_group_wait(&g);
}

struct serve *serve_of_volume(struct serve *s, const char *name)
{
	const struct split *sp = s->split;

	for (unsigned i = 0; sp && name && i < sp->nvolumes; i++)
		if (!strcmp(sp->volume[i].name, name))
			return sp->volume[i].part ? &s->peers[sp->volume[i].part - 1] : s;
	return NULL;
}
