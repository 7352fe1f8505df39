/* SPDX-License-Identifier: MIT */
/*
 * NBD server: exports whose volumes live on another reactor. The handshake is done where the client was accepted, and asks there for what it has to say; then the
 * connection moves: invariant (7) of internal.h.
 */
#include "export/nbd/internal.h"

#include <errno.h>

#include "util/log.h"

#define TRIES 1000u		/* ms */

/* A power of two of at least 4096: below that, page caches and sectors make every disk work twice. */
static uint32_t preferred_block(const struct disk_limits *limits)
{
	uint32_t want = max(limits->opt_io, limits->align), block = 4096;

	while (block < want && block < NBD_MAX_PAYLOAD)
		block <<= 1;
	return block;
}

struct asking {
	const struct nbd_export *e;
	struct nbd_facts *facts;
};

static int take_facts(const struct volume *v, struct nbd_facts *f)
{
	*f = (struct nbd_facts){
		.size = v->disk->size, .block = preferred_block(&v->disk->limits),
		.read_only = v->read_only, .rotational = v->disk->limits.rotational,
	};
	return 0;
}

/* At home. */
static co_fn int co_tell(void *arg)
{
	struct asking *a = arg;
	const struct nbd_export *e = export_find(a->e->there, a->e->name, strlen(a->e->name));

	return e && !a->e->there->stopping ? take_facts(e->v, a->facts) : -ESHUTDOWN;
}

co_fn int co_export_facts(const struct nbd_export *e, struct nbd_facts *ret)
{
	struct asking a = { e, ret };
	int r;

	if (e->v)
		return take_facts(e->v, ret);
	r = co_call(e->home, co_tell, &a);
	for (unsigned i = 0; r == -EAGAIN && i < TRIES && !e->s->stopping; i++) {
		co_sleep_ns(1000000);
		r = co_call(e->home, co_tell, &a);
	}
	return r;
}

/* --- The way there and back --- */

static void came_back(struct rt_msg *m)
{
	struct nbd_conn *c = container_of(m, struct nbd_conn, back);

	list_del(&c->away_node);
	conn_free(c);
}

static co_fn void co_serve_away(void *arg)
{
	struct nbd_conn *c = arg;
	struct nbd_server *s = c->s;

	co_conn_transmit(c);
	s->nconns--;
	co_queue_wake_all(&s->stop_q);
	c->s = c->origin;
	c->back.fn = came_back;
	rt_post(c->origin_rt, &c->back);
}

/* At home. */
static co_fn int co_arrive(void *arg)
{
	struct nbd_conn *c = arg;
	struct nbd_export *from = c->exp, *e = export_find(from->there, from->name, strlen(from->name));
	int ret;

	if (!e || from->there->stopping)
		return -ESHUTDOWN;
	c->s = from->there;
	c->exp = e;
	ret = co_spawn("nbd connection", co_serve_away, c);
	if (ret < 0) {
		c->s = c->origin;
		c->exp = from;
		return ret;
	}
	list_add_tail(&c->s->conns, &c->node);
	c->s->nconns++;
	return 0;
}

static co_fn int co_try_hand_over(struct nbd_conn *c)
{
	struct nbd_server *s = c->s;
	int ret;

	list_del(&c->node);
	list_add_tail(&s->away, &c->away_node);
	c->origin = s;
	c->origin_rt = rt_self();
	c->only = c->meta = NULL;
	ret = co_call(c->exp->home, co_arrive, c);
	/* If all went well it may have ended there by now, and be gone. */
	if (ret < 0) {
		list_del(&c->away_node);
		list_add_tail(&s->conns, &c->node);
	}
	return ret;
}

/* With patience while that reactor has no free coroutine: its requests end. Meanwhile the connection is here like any other. */
co_fn int co_conn_hand_over(struct nbd_conn *c)
{
	struct nbd_server *s = c->s;
	int ret = co_try_hand_over(c);

	for (unsigned i = 0; ret == -EAGAIN && i < TRIES && !s->stopping && !c->dead; i++) {
		co_sleep_ns(1000000);
		ret = co_try_hand_over(c);
	}
	return ret;
}
