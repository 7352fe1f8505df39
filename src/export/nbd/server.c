/* SPDX-License-Identifier: MIT */
/*
 * NBD server: exports, connections, request pools, the end of all that. Design note in internal.h.
 */
#include "export/nbd/internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>

#include "tls/tls.h"
#include "util/log.h"

#define AWAY_NS 1000000000ull
#define HANDSHAKE_LIMITS 10	/* all options together, as a multiple of the time for one */
#define SLOWEST_NS 15000u	/* for each byte of a payload: 64 KiB a second */
#define ROOM_NS 2000000ull	/* the budget refuses: others are giving memory back */
#define ROOM_TRIES 500u
#define HANDSHAKE_SPARE 16	/* connections beyond max_conns while the oldest handshakes are being ended */

int nbd_server_create(const struct nbd_server_config *config, struct nbd_server **ret, struct err *err)
{
	struct nbd_server *s = calloc(1, sizeof(*s));

	if (!s)
		return err_set(err, -ENOMEM, "NBD server: out of memory");
	if (config)
		s->config = *config;
	if (!s->config.max_conns)
		s->config.max_conns = 256;
	if (!s->config.client_conns)
		s->config.client_conns = s->config.max_conns;
	if (!s->config.max_in_flight)
		s->config.max_in_flight = 512;
	if (!s->config.max_requests)
		s->config.max_requests = 1024;
	if (!s->config.memory)
		s->config.memory = 128ull << 20;
	s->config.memory = max(s->config.memory, 2ull * RT_BUF_MAX);
	if (!s->config.client_ns)
		s->config.client_ns = 30 * 1000000000ull;
	if (!s->config.stall_ns)
		s->config.stall_ns = 10 * 1000000000ull;
	list_init(&s->exports);
	list_init(&s->listeners);
	list_init(&s->conns);
	list_init(&s->away);
	co_queue_init(&s->stop_q);
	budget_join(rt_budget(), &s->conn_user, "NBD connections", 0);
	*ret = s;
	return 0;
}

void nbd_server_set_creds(struct nbd_server *s, struct tls_creds *creds)
{
	s->config.creds = creds;
}

/* Our buffers of a session, and about 50 KiB of the library's own: an estimate, to be on the safe side. */
#define TLS_COST (272u << 10)

static uint64_t conn_cost(const struct nbd_server *s)
{
	return RBUF_SIZE + sizeof(struct nbd_conn) + (s->config.tls != NBD_TLS_OFF ? TLS_COST : 0);
}

static void export_free(struct nbd_export *e)
{
	rt_timer_cancel(&e->watchdog);
	rt_bufpool_destroy(e->pool);
	free(e->slab);
	list_del(&e->node);
	free(e->name);
	free(e);
}

void nbd_server_destroy(struct nbd_server *s)
{
	if (!s)
		return;
	list_for_each_safe(&s->exports, n)
		export_free(container_of(n, struct nbd_export, node));
	budget_leave(&s->conn_user);
	free(s);
}

static int export_new(struct nbd_server *s, const char *name, struct nbd_export **ret, struct err *err)
{
	struct nbd_export *e;

	if (export_find(s, name, strlen(name)))
		return err_set(err, -EEXIST, "export name '%s' is used twice; give each disk its own with --name", name);
	if (strlen(name) > NBD_STRING_MAX)
		return err_set(err, -EINVAL, "export name is longer than %d bytes", NBD_STRING_MAX);
	e = calloc(1, sizeof(*e));
	if (!e || !(e->name = strdup(name))) {
		free(e);
		return err_set(err, -ENOMEM, "export '%s': out of memory", name);
	}
	e->s = s;
	export_memory_init(e);
	list_init(&e->node);
	*ret = e;
	return 0;
}

int nbd_server_add_remote(struct nbd_server *s, struct nbd_server *there, struct rt *home, const char *name, struct err *err)
{
	struct nbd_export *e;
	int ret = export_new(s, name, &e, err);

	if (ret < 0)
		return ret;
	e->there = there;
	e->home = home;
	list_add_tail(&s->exports, &e->node);
	return 0;
}

int nbd_server_add_volume(struct nbd_server *s, struct volume *v, struct err *err)
{
	struct nbd_export *e;
	int ret = export_new(s, v->name, &e, err);

	if (ret < 0)
		return ret;
	e->v = v;
	e->slab = calloc(s->config.max_requests, sizeof(*e->slab));
	ret = e->slab ? rt_bufpool_create(rt_self(), s->config.memory, &e->pool, err)
		      : err_set(err, -ENOMEM, "export '%s': out of memory", v->name);
	if (!ret)
		ret = rt_bufpool_account(e->pool, "NBD requests", err);
	if (ret < 0) {
		export_free(e);
		return ret;
	}
	for (unsigned i = 0; i < s->config.max_requests; i++)
		list_add_tail(&e->free, &e->slab[i].node);
	list_add_tail(&s->exports, &e->node);
	return 0;
}

struct nbd_export *export_find(struct nbd_server *s, const void *name, size_t len)
{
	if (!len)
		return list_first(&s->exports, struct nbd_export, node);
	list_for_each(&s->exports, n) {
		struct nbd_export *e = container_of(n, struct nbd_export, node);

		if (strlen(e->name) == len && !memcmp(e->name, name, len))
			return e;
	}
	return NULL;
}

struct nbd_export *conn_export(struct nbd_conn *c, const void *name, size_t len)
{
	struct nbd_export *e = c->only && !len ? c->only : export_find(c->s, name, len);

	return c->only && e != c->only ? NULL : e;
}

/* --- Connections --- */

void conn_kill(struct nbd_conn *c)
{
	if (c->dead)
		return;
	c->dead = c->closing = true;
	c->t->ops->shutdown(c->t, SHUT_RDWR);
	co_queue_wake_all(&c->idle);
	if (c->exp) {
		co_queue_wake_all(&c->exp->wait);
		co_queue_wake_all(&c->exp->mem_wait);
	}
}

/* Whoever could not run for a while (a host that was suspended) has not looked at what clients sent meanwhile. */
static bool was_away(struct rt_timer *t, uint64_t again_ns)
{
	if (rt_now_ns() - t->at_ns < AWAY_NS)
		return false;
	rt_timer_arm(t, rt_now_ns() + again_ns, t->fn);
	return true;
}

static void handshake_timeout(struct rt_timer *t)
{
	struct nbd_conn *c = container_of(t, struct nbd_conn, timer);

	if (was_away(t, c->s->config.client_ns))
		return;
	log_debug("NBD client %s: cut off; it does not get on with the handshake", c->peer);
	conn_kill(c);
}

void conn_handshake_clock(struct nbd_conn *c)
{
	uint64_t limit = c->s->config.client_ns, now = rt_now_ns();

	if (limit <= UINT64_MAX / HANDSHAKE_LIMITS - now)
		rt_timer_arm(&c->timer, min(now + limit, c->since_ns + HANDSHAKE_LIMITS * limit), handshake_timeout);
}

static void request_timeout(struct rt_timer *t)
{
	struct nbd_conn *c = container_of(t, struct nbd_conn, timer);

	if (was_away(t, c->s->config.client_ns))
		return;
	log_warn("NBD client %s: cut off; it has sent a part of a request, and not the rest in time (--client-timeout)", c->peer);
	c->s->stalled++;
	conn_kill(c);
}

void conn_request_clock(struct nbd_conn *c, uint64_t len)
{
	uint64_t limit = c->s->config.client_ns;

	if (c->transmission && !c->timer.heap_pos && limit <= UINT64_MAX / 2)
		rt_timer_arm(&c->timer, rt_now_ns() + limit + len * SLOWEST_NS, request_timeout);
}

static void idle_check(struct rt_timer *t)
{
	struct nbd_conn *c = container_of(t, struct nbd_conn, idle_timer);
	uint64_t now = rt_now_ns(), limit = c->s->config.idle_ns;

	if (c->dead || was_away(t, limit))
		return;
	if (c->in_flight)
		c->last_ns = now;
	if (now - c->last_ns >= limit) {
		log_info("NBD client %s: cut off; it has been idle for %u s (--client-idle)", c->peer, (unsigned)((now - c->last_ns) / 1000000000));
		conn_kill(c);
		return;
	}
	rt_timer_arm(t, c->last_ns + limit, idle_check);
}

void conn_free(struct nbd_conn *c)
{
	struct nbd_server *s = c->s;

	free(c->rbuf);
	free(c);
	budget_give(&s->conn_user, conn_cost(s));
	s->nconns--;
	co_queue_wake_all(&s->stop_q);
}

static co_fn void co_conn_end(struct nbd_conn *c)
{
	rt_timer_cancel(&c->timer);
	rt_timer_cancel(&c->idle_timer);
	log_debug("NBD client %s: gone", c->peer);
	c->t->ops->co_close(c->t);
	list_del(&c->node);
}

co_fn void co_conn_transmit(struct nbd_conn *c)
{
	c->last_ns = rt_now_ns();
	if (c->s->config.idle_ns)
		rt_timer_arm(&c->idle_timer, c->last_ns + c->s->config.idle_ns, idle_check);
	co_conn_receive(c);
	co_conn_end(c);
}

static co_fn void co_conn_main(void *arg)
{
	struct nbd_conn *c = arg;
	int ret;

	if (c->s->stopping || co_conn_handshake(c)) {
		co_conn_end(c);
		conn_free(c);
		return;
	}
	rt_timer_cancel(&c->timer);
	c->transmission = true;
	log_debug("NBD client %s: uses '%s'", c->peer, c->exp->name);
	if (c->exp->v) {
		co_conn_transmit(c);
		conn_free(c);
	} else {
		ret = co_conn_hand_over(c);
		if (!ret)
			return;
		if (ret != -ESHUTDOWN)
			log_warn("NBD client %s: cut off; too much is going on for '%s'", c->peer, c->exp->name);
		co_conn_end(c);
		conn_free(c);
	}
}

/* Who has not got through the handshake for longest makes room for a newcomer. */
static bool evict_handshake(struct nbd_server *s)
{
	list_for_each(&s->conns, n) {
		struct nbd_conn *c = container_of(n, struct nbd_conn, node);

		if (!c->transmission && !c->dead) {
			conn_kill(c);
			return true;
		}
	}
	return false;
}

/* Closes `t` from a plain function. */
static co_fn void co_close_transport(void *arg)
{
	struct nbd_transport *t = arg;

	t->ops->co_close(t);
}

static unsigned connections_of(const struct nbd_server *s, const char *client)
{
	unsigned count = 0;

	list_for_each(&s->conns, n)
		count += !strcmp(container_of(n, struct nbd_conn, node)->client, client);
	list_for_each(&s->away, n)
		count += !strcmp(container_of(n, struct nbd_conn, away_node)->client, client);
	return count;
}

co_fn void co_conn_room(struct nbd_server *s, const bool *stop)
{
	for (unsigned i = 0; i < ROOM_TRIES && !*stop && budget_room(rt_budget()) < conn_cost(s); i++) {
		budget_want(rt_budget(), conn_cost(s));
		co_sleep_ns(ROOM_NS);
	}
}

int nbd_server_adopt(struct nbd_server *s, struct nbd_transport *t, const char *peer)
{
	return server_adopt(s, t, peer, "", NULL);
}

int server_adopt(struct nbd_server *s, struct nbd_transport *t, const char *peer, const char *client, struct nbd_export *only)
{
	struct nbd_conn *c = NULL;
	int ret;

	if (s->stopping) {
		ret = -ESHUTDOWN;
		goto refuse;
	}
	if (s->nconns >= s->config.max_conns + HANDSHAKE_SPARE || (s->nconns >= s->config.max_conns && !evict_handshake(s))) {
		ret = -EMFILE;
		goto refuse;
	}
	if (*client && s->config.client_conns < s->config.max_conns && connections_of(s, client) >= s->config.client_conns) {
		ret = -EMFILE;
		goto refuse;
	}
	if (!budget_take(&s->conn_user, conn_cost(s))) {
		ret = -ENOMEM;
		goto refuse;
	}
	c = calloc(1, sizeof(*c));
	if (c)
		c->rbuf = malloc(RBUF_SIZE);
	if (!c || !c->rbuf) {
		budget_give(&s->conn_user, conn_cost(s));
		ret = -ENOMEM;
		goto refuse;
	}
	c->s = s;
	c->t = t;
	c->only = only;
	strncpy(c->peer, peer, sizeof(c->peer) - 1);
	strncpy(c->client, client, sizeof(c->client) - 1);
	c->since_ns = rt_now_ns();
	co_queue_init(&c->idle);
	list_init(&c->sendq);
	list_init(&c->node);
	list_init(&c->away_node);
	ret = co_spawn("nbd connection", co_conn_main, c);
	if (ret < 0) {
		budget_give(&s->conn_user, conn_cost(s));
		goto refuse;
	}
	conn_handshake_clock(c);
	list_add_tail(&s->conns, &c->node);
	s->nconns++;
	s->accepted++;
	return 0;

refuse:
	s->refused++;
	if (c)
		free(c->rbuf);
	free(c);
	t->ops->shutdown(t, SHUT_RDWR);
	if (co_spawn("nbd refuse", co_close_transport, t) < 0)
		log_warn("NBD client %s: refused, and no coroutine is free to close its socket", peer);
	return ret;
}

/* --- The end --- */

co_fn int co_nbd_server_stop(struct nbd_server *s, uint64_t deadline_ns)
{
	s->stopping = true;
	list_for_each(&s->listeners, n) {
		struct nbd_listener *l = container_of(n, struct nbd_listener, node);

		l->stop = true;
		rt_io_shutdown(l->sock.fd);
	}
	/* What was started is answered; a receiver that waits sees the end of file. */
	list_for_each(&s->conns, n) {
		struct nbd_conn *c = container_of(n, struct nbd_conn, node);

		c->closing = true;
		c->t->ops->shutdown(c->t, SHUT_RD);
	}
	while ((s->nconns || s->acceptors) && co_queue_wait_until(&s->stop_q, deadline_ns, "NBD clients' last replies"))
		;
	list_for_each_safe(&s->conns, n)
		conn_kill(container_of(n, struct nbd_conn, node));
	/* What hangs now is the disk; a busy machine only needs a while. */
	deadline_ns += 250 * 1000000ull;
	while ((s->nconns || s->acceptors) && co_queue_wait_until(&s->stop_q, deadline_ns, "NBD connections to end"))
		;
	if (s->acceptors)
		return -ETIMEDOUT;
	list_for_each_safe(&s->listeners, n)
		listener_close(container_of(n, struct nbd_listener, node));
	return s->nconns ? -ETIMEDOUT : 0;
}

unsigned nbd_server_connections(const struct nbd_server *s)
{
	return s->nconns;
}

static json_t *conn_status(const struct nbd_conn *c)
{
	const char *headers = c->extended ? "extended" : c->structured ? "structured" : "simple";

	return json_pack("{s:s, s:s, s:s?, s:s?, s:s?, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
			 "peer", c->peer, "state", c->dead ? "ending" : c->transmission ? "transmission" : "handshake",
			 "tls", c->tls ? tls_description(c->tls) : NULL, "identity", c->tls && tls_peer(c->tls)[0] ? tls_peer(c->tls) : NULL,
			 "export", c->exp ? c->exp->name : NULL, "replies", headers,
			 "in_flight", (json_int_t)c->in_flight, "memory", (json_int_t)c->mem_used,
			 "requests", (json_int_t)c->requests, "errors", (json_int_t)c->errors,
			 "bytes_in", (json_int_t)c->bytes_in, "bytes_out", (json_int_t)c->bytes_out,
			 "age_ns", (json_int_t)(rt_now_ns() - c->since_ns));
}

static const char *const tls_modes[] = { "off", "allow", "require" };

void *nbd_server_status(struct nbd_server *s)
{
	json_t *addrs = json_array(), *conns = json_array();

	list_for_each(&s->listeners, n)
		json_array_append_new(addrs, json_string(container_of(n, struct nbd_listener, node)->addr));
	list_for_each(&s->conns, n)
		json_array_append_new(conns, conn_status(container_of(n, struct nbd_conn, node)));
	return json_pack("{s:o, s:s, s:I, s:I, s:I, s:I, s:I, s:o}", "addresses", addrs, "tls", tls_modes[s->config.tls], "max_connections", (json_int_t)s->config.max_conns,
			 "accepted", (json_int_t)s->accepted, "refused", (json_int_t)s->refused,
			 "stalled", (json_int_t)s->stalled, "tls_failed", (json_int_t)s->tls_failed, "connections", conns);
}
