/* SPDX-License-Identifier: MIT */
/*
 * NBD server: the transport that encrypts. It stands on the transport that the connection began with, from NBD_OPT_STARTTLS on.
 */
#include "export/nbd/internal.h"

#include <errno.h>
#include <stdlib.h>

#include "tls/tls.h"
#include "util/log.h"

#define BYE_NS 500000000ull	/* for the client to take the last bytes */
#define TELL_NS 10000000000ull	/* so many lines about failed handshakes in so much time */
#define TELL_MAX 20u

struct tls_transport {
	struct nbd_transport t;
	struct nbd_transport *inner;
	struct nbd_conn *conn;	/* lives longer */
	struct tls *tls;
	struct rt_timer timer;	/* of the good-bye */
	bool told;
};

static struct tls_transport *of(struct nbd_transport *t)
{
	return container_of(t, struct tls_transport, t);
}

static co_fn ssize_t co_inner_recv(void *arg, struct iovec *iov, int n)
{
	struct nbd_transport *inner = arg;

	return inner->ops->co_recv(inner, iov, n);
}

static co_fn ssize_t co_inner_send(void *arg, struct iovec *iov, int n)
{
	struct nbd_transport *inner = arg;

	return inner->ops->co_send(inner, iov, n);
}

static co_fn ssize_t co_recv(struct nbd_transport *t, struct iovec *iov, int n)
{
	return co_tls_recv(of(t)->tls, iov, n);
}

static co_fn ssize_t co_send(struct nbd_transport *t, struct iovec *iov, int n)
{
	return co_tls_send(of(t)->tls, iov, n);
}

static void tls_shutdown(struct nbd_transport *t, int how)
{
	of(t)->inner->ops->shutdown(of(t)->inner, how);
}

static void bye_timeout(struct rt_timer *t)
{
	tls_shutdown(&container_of(t, struct tls_transport, timer)->t, SHUT_RDWR);
}

static co_fn void co_close(struct nbd_transport *t)
{
	struct tls_transport *x = of(t);

	rt_timer_arm(&x->timer, rt_now_ns() + BYE_NS, bye_timeout);
	co_tls_bye(x->tls);
	rt_timer_cancel(&x->timer);
	if (tls_why(x->tls)[0] && !x->told)
		conn_refused_tls(x->conn, tls_why(x->tls));
	tls_free(x->tls);
	x->inner->ops->co_close(x->inner);
	free(x);
}

static const struct nbd_transport_ops tls_ops = {
	.co_recv = co_recv,
	.co_send = co_send,
	.shutdown = tls_shutdown,
	.co_close = co_close,
};

void conn_refused_tls(struct nbd_conn *c, const char *why)
{
	struct nbd_server *s = c->s;
	uint64_t now = rt_now_ns();

	s->tls_failed++;
	if (now - s->tls_told_ns > TELL_NS) {
		if (s->tls_told > TELL_MAX)
			log_warn("NBD: %u more clients were refused for reasons of TLS", s->tls_told - TELL_MAX);
		s->tls_told_ns = now;
		s->tls_told = 0;
	}
	if (s->tls_told++ < TELL_MAX)
		log_warn("NBD client %s: %s", c->peer, why);
}

co_fn int co_conn_starttls(struct nbd_conn *c)
{
	struct tls_transport *x = calloc(1, sizeof(*x));
	struct tls_io io = { co_inner_recv, co_inner_send, c->t };
	int ret = x ? tls_create(c->s->config.creds, &io, &x->tls) : -ENOMEM;

	if (ret < 0) {
		free(x);
		return ret;
	}
	x->t.ops = &tls_ops;
	x->conn = c;
	x->inner = c->t;
	c->t = &x->t;
	ret = co_tls_handshake(x->tls);
	if (ret < 0) {
		const char *why = tls_why(x->tls);

		x->told = true;
		conn_refused_tls(c, c->dead ? "TLS: the handshake was not finished in time" : why[0] ? why : "TLS: the client hung up in the handshake");
		return ret;
	}
	c->tls = x->tls;
	log_debug("NBD client %s: %s, %s", c->peer, tls_description(c->tls), tls_peer(c->tls)[0] ? tls_peer(c->tls) : "anonymous");
	return 0;
}
