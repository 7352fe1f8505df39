/* SPDX-License-Identifier: MIT */
/*
 * NBD server: request structs and request memory.
 *
 * How connections share an export's memory: a connection may take more as long as it then has no more than is left free (dynamic thresholds, after
 * Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). One busy connection gets half, n get 1/(n + 1) each, and 1/(n + 1)
 * stays free for who comes next: clients that take no replies never pin all. So that large requests do not starve, who has waited for PATIENCE_NS needs only
 * that there is room, and until then only connections that are content with SMALL pass it.
 *
 * What is left free is what the budget of the process has as well, once the caches have given way (rt_bufpool_left()): of a small one, a client of this or of
 * another export gets no more than that share.
 *
 * Who takes or sends nothing for config.stall_ns while others wait is cut off; where the budget refuses, clients of all exports of the server are looked at.
 */
#include "export/nbd/internal.h"

#include "util/log.h"

#define PATIENCE_NS 1000000000ull
#define SMALL (1u << 20)
#define STARVED_NS 2000000ull	/* the budget refuses: others are giving memory back */
#define STARVED_REST_NS 10000000ull	/* of those who are not the first in the queue */

/* Lives on the receiver's stack. */
struct mem_waiter {
	struct list node;
	uint64_t since_ns;
};

void export_memory_init(struct nbd_export *e)
{
	list_init(&e->free);
	list_init(&e->mem_waiters);
	co_queue_init(&e->wait);
	co_queue_init(&e->mem_wait);
}

co_fn struct nbd_request *co_request_get(struct nbd_conn *c)
{
	struct nbd_export *e = c->exp;
	struct nbd_request *r;

	for (;;) {
		if (c->dead)
			return NULL;
		if (c->in_flight >= c->s->config.max_in_flight)
			co_queue_wait(&c->idle, "in-flight limit of the connection");
		else if (list_empty(&e->free))
			co_queue_wait(&e->wait, "in-flight limit of the export");
		else
			break;
	}
	r = list_first(&e->free, struct nbd_request, node);
	list_del(&r->node);
	r->conn = c;
	r->buf = NULL;
	r->buf_charge = r->payload = r->head_len = r->data_len = 0;
	r->refuse = 0;
	r->why = NULL;
	c->in_flight++;
	return r;
}

/* The budget is what there is too little of: memory comes back without a request of this export ending. */
static bool is_starved(const struct nbd_export *e)
{
	return rt_bufpool_starved(e->pool) || rt_bufpool_left(e->pool) < rt_bufpool_size(e->pool) - rt_bufpool_used(e->pool);
}

static void watchdog_arm(struct nbd_export *e);

static void watchdog_fired(struct rt_timer *t)
{
	struct nbd_export *e = container_of(t, struct nbd_export, watchdog);
	uint64_t now = rt_now_ns();
	bool all = is_starved(e);

	list_for_each_safe(&e->s->conns, n) {
		struct nbd_conn *c = container_of(n, struct nbd_conn, node);
		uint64_t since = c->send_since_ns ? c->send_since_ns : c->recv_since_ns;

		if ((c->exp != e && !all) || c->dead || !c->mem_used || !since || now - since < e->s->config.stall_ns)
			continue;
		log_warn("NBD client %s: cut off; it %s nothing for %u s while others wait for request memory of '%s'", c->peer,
			 c->send_since_ns ? "takes" : "sends", (unsigned)((now - since) / 1000000000), e->v->name);
		e->s->stalled++;
		conn_kill(c);
	}
	watchdog_arm(e);
}

static void watchdog_arm(struct nbd_export *e)
{
	if (!list_empty(&e->mem_waiters))
		rt_timer_arm(&e->watchdog, rt_now_ns() + max(e->s->config.stall_ns / 4, 1000000ull), watchdog_fired);
}

/* May `c` take `charge` bytes now? `w` is its place in the queue, NULL if it has none yet. */
static bool admissible(const struct nbd_conn *c, uint64_t charge, const struct mem_waiter *w)
{
	const struct nbd_export *e = c->exp;
	const struct mem_waiter *first = list_first(&e->mem_waiters, struct mem_waiter, node);
	uint64_t unused = rt_bufpool_left(e->pool);
	bool impatient = first && rt_now_ns() - first->since_ns >= PATIENCE_NS;

	/* Who has some already leaves a little to those who come new: it may be one that takes nothing. */
	if (impatient && first == w)
		return charge + (c->mem_used ? SMALL : 0) <= unused;
	if (impatient && c->mem_used + charge > SMALL)
		return false;
	/* Alone it may have all, for one. */
	if (!rt_bufpool_used(e->pool))
		return charge <= unused;
	return c->mem_used + 2 * charge <= unused;
}

/* How long to wait for `charge` bytes when no request ends. */
static uint64_t patience(const struct nbd_export *e, const struct mem_waiter *w, uint64_t charge)
{
	if (!is_starved(e))
		return PATIENCE_NS;
	if (list_first(&e->mem_waiters, struct mem_waiter, node) != w)
		return STARVED_REST_NS;
	/* What others have free and touched comes back only if somebody says so. */
	if (rt_bufpool_left(e->pool) < charge)
		budget_want(rt_budget(), charge);
	return STARVED_NS;
}

co_fn void *co_request_buf(struct nbd_request *r, uint32_t len)
{
	struct nbd_conn *c = r->conn;
	struct nbd_export *e = c->exp;
	uint32_t charge = RT_BUF_ALIGN;

	while (charge < len)
		charge <<= 1;
	if (admissible(c, charge, NULL))
		r->buf = rt_buf_tryget(e->pool, len);
	if (!r->buf) {
		struct mem_waiter w = { .since_ns = rt_now_ns() };

		list_add_tail(&e->mem_waiters, &w.node);
		watchdog_arm(e);
		while (!r->buf && !c->dead) {
			/* The deadline: the first in the queue becomes impatient without anybody's doing. */
			co_queue_wait_until(&e->mem_wait, rt_now_ns() + patience(e, &w, charge), "request memory of the export");
			if (!c->dead && admissible(c, charge, &w))
				r->buf = rt_buf_tryget(e->pool, len);
		}
		list_del(&w.node);
	}
	if (!r->buf)
		return NULL;
	r->buf_charge = charge;
	c->mem_used += charge;
	return r->buf;
}

void request_put(struct nbd_request *r)
{
	struct nbd_conn *c = r->conn;
	struct nbd_export *e = c->exp;

	if (r->buf) {
		rt_buf_put(e->pool, r->buf);
		r->buf = NULL;
		c->mem_used -= r->buf_charge;
		if (!list_empty(&e->mem_waiters))
			co_queue_wake_all(&e->mem_wait);
	}
	list_add_head(&e->free, &r->node);
	c->in_flight--;
	if (!co_queue_is_empty(&c->idle))
		co_queue_wake_all(&c->idle);
	if (!co_queue_is_empty(&e->wait))
		co_queue_wake_one(&e->wait);
}
