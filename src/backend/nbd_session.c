/* SPDX-License-Identifier: MIT */
/*
 * NBD client: sessions. What is done when a connection is lost.
 *
 *          ┌────────── lost, or died ──────────┐
 *          ▼                                   │
 *        DOWN ── quiesce ── collect ── connect ── replay ── UP ── dispatch what is pending
 *          ▲                  │           │         │
 *          │           died: all fail     │ not yet │ lost again
 *          └──────────────────────────────┴─ sleep ─┘
 *
 * quiesce  the other connections, if there are, finish what they have (their server may be alive, and what is not sent twice cannot be done
 *          twice); then all are closed, and nobody uses a request's memory any more.
 * collect  every request that has no result goes back to pending, or fails: all of them when the disk is dead, the expired ones, and the
 *          changes on a connection that the client broke by itself (invariant 7 of nbd.h).
 * replay   what had been completed and not flushed is sent again, newest version only, before anything else (invariant 5).
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "backend/nbd.h"
#include "rt/io.h"
#include "util/bytes.h"
#include "util/log.h"
#include "util/size.h"

#define BACKOFF_MIN_NS 50000000ull
#define BACKOFF_MAX_NS 5000000000ull

void nbd_die(struct nbd *n, int error, const char *fmt, ...)
{
	char msg[512];
	va_list ap;

	if (n->dead)
		return;
	n->dead = error;
	if (!n->disk.failed)
		n->disk.failed = error;	/* said here; the choke point need not say it again */
	if (fmt) {
		va_start(ap, fmt);
		vsnprintf(msg, sizeof(msg), fmt, ap);
		va_end(ap);
		log_error("%s: %s; every request fails until the disk is opened again", n->disk.name, msg);
	}
	if (n->dial_fd >= 0)
		rt_io_shutdown(n->dial_fd);
	for (unsigned i = 0; i < n->config.connections; i++) {
		struct nbd_conn *c = &n->conn[i];

		nbd_conn_break(c, error, NULL);
		if (c->fd >= 0)
			rt_io_shutdown(c->fd);
	}
	n->session = NBD_DOWN;
	while (!list_empty(&n->pending))
		nbd_complete(list_first(&n->pending, struct nbd_req, node), error);
	co_queue_wake_all(&n->room);
	co_queue_wake_all(&n->changed);
}

void nbd_tick(struct rt_timer *t)
{
	struct nbd *n = container_of(t, struct nbd, tick);
	uint64_t now = rt_now_ns();

	for (unsigned i = 0; i < ARRAY_SIZE(n->slot); i++) {
		struct nbd_req *r = n->slot[i];

		if (!r || now - r->since_ns < n->config.timeout_ns)
			continue;
		if (r->conn) {
			r->expired = true;
			nbd_conn_break(r->conn, -ETIMEDOUT, "a request got no answer in time");
		} else {
			nbd_complete(r, -ETIMEDOUT);
		}
	}
	rt_timer_arm(t, now + max(n->config.timeout_ns / 8, (uint64_t)1000000), nbd_tick);
}

/* --- Connecting --- */

co_fn int co_nbd_connect(struct nbd_conn *c, struct err *err)
{
	int ret = co_nbd_dial(c->n, err);

	if (ret < 0)
		return ret;
	c->fd = ret;
	ret = co_nbd_handshake(c, err);
	if (ret)
		nbd_hang_up(c);
	return ret;
}

/* A later connection must offer all that the first one did and that is in use. */
static int check_same(struct nbd *n, const struct nbd_facts *i, struct err *err)
{
	const struct nbd_facts *was = &n->info;
	uint16_t need = was->flags & (NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA | NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES |
				      NBD_FLAG_SEND_CACHE | NBD_FLAG_SEND_FAST_ZERO);

	if (i->size != was->size)
		return err_set(err, -EIO, "the export has another size than before (%llu bytes, had %llu)", (unsigned long long)i->size,
			       (unsigned long long)was->size);
	if ((i->flags & NBD_FLAG_READ_ONLY) && !n->disk.read_only)
		return err_set(err, -EIO, "the export has become read-only");
	if ((i->flags & need) != need || (was->has_context && !i->has_context))
		return err_set(err, -EIO, "the server offers less than before (transmission flags 0x%x, had 0x%x)", i->flags, was->flags);
	if (i->min_block > n->disk.limits.align || (i->max_payload && i->max_payload < n->disk.limits.max_io))
		return err_set(err, -EIO, "the server's block sizes have changed (from %u up to %u bytes, had %u and %u)", i->min_block,
			       i->max_payload, was->min_block, was->max_payload);
	return 0;
}

co_fn unsigned co_nbd_connect_more(struct nbd *n)
{
	unsigned up = 1;

	for (; up < n->config.connections && (n->info.flags & NBD_FLAG_CAN_MULTI_CONN) && !n->dead && !n->closing; up++) {
		struct nbd_conn *c = &n->conn[up];
		struct err err = ERR_INIT;

		if (co_nbd_connect(c, &err) || check_same(n, &c->info, &err)) {
			nbd_hang_up(c);
			log_warn("%s: uses %u of %u connections: %s", n->disk.name, up, n->config.connections, err.msg);
			break;
		}
	}
	return up;
}

/* --- Losing --- */

static bool wants_to_end(const struct nbd *n)
{
	return n->dead || n->closing;
}

/* Takes back what a living connection has not begun to send. */
static void unqueue(struct nbd_conn *c)
{
	while (!list_empty(&c->txq)) {
		struct nbd_req *r = list_first(&c->txq, struct nbd_req, node);

		list_del(&r->node);
		r->conn = NULL;
		c->in_flight--;
		list_add_tail(&c->n->pending, &r->node);
	}
}

static co_fn void co_quiesce(struct nbd *n)
{
	for (;;) {
		bool quiet = true;

		for (unsigned i = 0; i < n->config.connections; i++) {
			struct nbd_conn *c = &n->conn[i];

			if (c->up) {
				unqueue(c);
				if (!c->in_flight || wants_to_end(n)) {
					nbd_goodbye(c);
					nbd_conn_break(c, -ESHUTDOWN, NULL);
				}
			}
			quiet &= nbd_conn_is_quiet(c);
		}
		if (quiet)
			break;
		co_queue_wait(&n->changed, "lost NBD connections to become quiet");
	}
	for (unsigned i = 0; i < n->config.connections; i++)
		nbd_hang_up(&n->conn[i]);
}

static void collect_one(struct nbd *n, struct nbd_req *r)
{
	struct nbd_conn *c = r->conn;
	bool unsure = nbd_is_change(r) && c->lost == -ETIMEDOUT && r->sent;

	if (unsure && !n->dead)
		disk_fail(&n->disk, -ETIMEDOUT, "a write that the server did not answer in time");
	if (n->dead || !r->co) {
		nbd_complete(r, n->dead ? n->dead : -ECONNRESET);
		return;
	}
	if (r->expired || unsure) {
		nbd_complete(r, -ETIMEDOUT);
		return;
	}
	n->resent += r->sent;
	list_del(&r->node);
	c->in_flight--;
	r->conn = NULL;
	r->sent = r->got_extent = false;
	r->chunk_error = 0;
	r->nspans = 0;
	list_add_tail(&n->pending, &r->node);
}

static unsigned collect(struct nbd *n)
{
	unsigned waiting = 0;

	for (unsigned i = 0; i < ARRAY_SIZE(n->slot); i++) {
		if (n->slot[i] && n->slot[i]->conn)
			collect_one(n, n->slot[i]);
		waiting += n->slot[i] != NULL;
	}
	/* Those that were taken back to pending before the disk died. */
	while (n->dead && !list_empty(&n->pending))
		nbd_complete(list_first(&n->pending, struct nbd_req, node), n->dead);
	return waiting;
}

/* --- Coming back --- */

static void replay_send(struct nbd *n, struct nbd_conn *c, struct nbd_req *r, const struct nbd_replay_op *op)
{
	unsigned i = r - n->replays;

	memcpy(n->replay_iov[i], op->iov, sizeof(op->iov));
	*r = (struct nbd_req){
		.n = n,
		.type = op->kind == NBD_REPLAY_WRITE ? NBD_CMD_WRITE : NBD_CMD_WRITE_ZEROES,
		.flags = op->flags,
		.off = op->off, .len = op->len,
		.iov = n->replay_iov[i], .niov = op->niov,
		.since_ns = rt_now_ns(),
	};
	list_init(&r->node);
	r->slot = n->free_slot[--n->nfree];
	n->slot[r->slot] = r;
	nbd_queue(c, r);
	n->replayed++;
}

/* 0: all is there again, or the disk has failed; -ECONNRESET: the connection was lost meanwhile. */
static co_fn int co_replay(struct nbd *n, struct nbd_conn *c)
{
	struct nbd_replay_op op;
	bool more = true;
	int error = 0;

	nbd_replay_begin(n->replay);
	memset(n->replays, 0, sizeof(n->replays));	/* with what a lost attempt has left */
	for (;;) {
		unsigned busy = 0;

		for (unsigned i = 0; i < NBD_REPLAYS; i++) {
			struct nbd_req *r = &n->replays[i];

			if (r->done) {
				error = error ? error : r->error;
				r->done = false;
			}
			if (!r->conn || n->slot[r->slot] != r) {
				more = more && c->up && !error && nbd_replay_next(n->replay, n->disk.limits.max_io, &op);
				if (!more)
					continue;
				replay_send(n, c, r, &op);
			}
			busy++;
		}
		if (!c->up)
			return -ECONNRESET;
		if (!busy)
			break;
		co_queue_wait(&n->changed, "an NBD server to take again what it may have lost");
	}
	if (error) {
		disk_fail(&n->disk, error, "sending again what the server may have lost");
		nbd_replay_drop(n->replay, nbd_replay_mark(n->replay));
	}
	return 0;
}

/* One attempt. 0: a connection is up, and what was lost is there again. */
static co_fn int co_try(struct nbd *n, struct err *err)
{
	struct nbd_conn *c = &n->conn[0];
	int ret = co_nbd_connect(c, err);

	if (ret)
		return ret;
	if (check_same(n, &c->info, err)) {
		nbd_die(n, -EIO, "%s", err->msg);
		return -EIO;
	}
	nbd_conn_start(c);
	if (!n->replay) {
		if (n->changes != n->flushed && !n->disk.failed)
			disk_fail(&n->disk, -EIO, "the connection");
		return 0;
	}
	ret = co_replay(n, c);
	return ret ? err_errno(err, ret, "connection lost again") : 0;
}

static void resume(struct nbd *n)
{
	struct list waiting = LIST_INIT(waiting);

	n->session = NBD_UP;
	for (unsigned i = 1; i < n->nconns; i++)
		nbd_conn_start(&n->conn[i]);
	list_splice_tail(&waiting, &n->pending);
	while (!list_empty(&waiting)) {
		struct nbd_req *r = list_first(&waiting, struct nbd_req, node);

		list_del(&r->node);
		nbd_dispatch(n, r);
	}
}

static co_fn void co_pause(struct nbd *n, uint64_t ns)
{
	uint64_t until = rt_now_ns() + ns;

	while (!wants_to_end(n) && rt_now_ns() < until)
		co_queue_wait_until(&n->changed, until, "the NBD server to come back");
}

/* Certificates are renewed while a disk is open. Bad files leave it with those that it has. */
static co_fn void co_renew_creds(struct nbd *n, struct err *told)
{
	const struct nbd_tls_options *t = &n->config.uri.tls;
	struct err err = ERR_INIT;

	if ((t->certificates || t->psk_file) && co_nbd_load_creds(n, &err) < 0 && strcmp(told->msg, err.msg))
		log_warn("%s; those that were read before stay in use", err.msg);
	*told = err;
}

static co_fn void co_reconnect(struct nbd *n)
{
	uint64_t replayed = n->replayed, resent = n->resent;
	struct err told = ERR_INIT, creds_told = ERR_INIT;
	char buf[16];

	if (n->conn[0].replies)
		n->backoff_ns = 0;
	while (!wants_to_end(n)) {
		struct err err = ERR_INIT;

		co_pause(n, n->backoff_ns + n->backoff_ns * (rt_rand64() % 256) / 1024);
		if (wants_to_end(n))
			return;
		n->backoff_ns = n->backoff_ns ? min(2 * n->backoff_ns, BACKOFF_MAX_NS) : BACKOFF_MIN_NS;
		co_renew_creds(n, &creds_told);
		if (!co_try(n, &err)) {
			n->nconns = co_nbd_connect_more(n);
			if (n->conn[0].up && !wants_to_end(n))
				break;
		}
		co_quiesce(n);
		collect(n);
		if (n->dead || n->closing)
			return;
		if (n->config.reconnect_ns != UINT64_MAX && rt_now_ns() - n->down_since_ns >= n->config.reconnect_ns) {
			nbd_die(n, -ESHUTDOWN, "gave up after %s without the server (reconnect=): %s",
				duration_format(rt_now_ns() - n->down_since_ns, buf), err.msg);
			return;
		}
		/* A server that comes back and then has the wrong certificate is another matter. */
		if (strcmp(told.msg, err.msg))
			log_warn("%s; trying again", err.msg);
		told = err;
	}
	n->reconnects++;
	resume(n);
	log_info("%s: connected again after %s; %llu changes replayed, %llu requests sent again", n->disk.name,
		 duration_format(rt_now_ns() - n->down_since_ns, buf), (unsigned long long)(n->replayed - replayed),
		 (unsigned long long)(n->resent - resent));
}

/* The connection whose loss took the session down: the others were closed for its sake. */
static const char *reason(const struct nbd *n)
{
	for (unsigned i = 0; i < n->nconns; i++) {
		const struct nbd_conn *c = &n->conn[i];

		if (c->lost && c->lost != -ESHUTDOWN)
			return c->why ? c->why : c->lost == -ECONNRESET ? "closed by the server" : strerror(-c->lost);
	}
	return n->conn[0].why ? n->conn[0].why : "closed";
}

co_fn void co_nbd_manager(void *arg)
{
	struct nbd *n = arg;

	for (;;) {
		while (!n->closing && n->session == NBD_UP)
			co_queue_wait(&n->changed, "the NBD session to change");
		co_quiesce(n);
		unsigned waiting = collect(n);

		if (n->closing)
			break;
		if (!n->dead && !n->config.reconnect_ns)
			nbd_die(n, -ESHUTDOWN, "connection lost (%s), and reconnect=off", reason(n));
		if (n->dead) {
			collect(n);
			while (!n->closing)
				co_queue_wait(&n->changed, "a dead NBD disk to be closed");
			break;
		}
		log_warn("%s: connection lost (%s); %u requests wait for it to come back", n->disk.name, reason(n), waiting);
		co_reconnect(n);
	}
	n->tasks--;
	co_queue_wake_all(&n->changed);
}
