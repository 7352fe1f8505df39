/* SPDX-License-Identifier: MIT */
/*
 * NBD client: the bytes of a connection, in the plain or over TLS (nbds://). Who the server is and who we are is decided in the handshake of src/tls/session.c,
 * whose steps run on worker threads; records are opened and made by the connection's receiver and sender.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/nbd.h"
#include "rt/io.h"
#include "tls/tls.h"
#include "util/log.h"

/* A stream that TLS refuses was damaged on its way or is not the server's: like one that broke. Its reason outlives the session. */
static ssize_t broken(struct nbd_conn *c, ssize_t error)
{
	if (tls_why(c->tls)[0]) {
		snprintf(c->tls_why, sizeof(c->tls_why), "%s", tls_why(c->tls));
		c->why = c->tls_why;
	}
	return error == -EPROTO || error == -EACCES || error == -EPERM ? -ECONNRESET : error;
}

co_fn ssize_t co_nbd_recv(struct nbd_conn *c, struct iovec *iov, int n)
{
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = n };
	ssize_t got;

	if (!c->tls)
		return co_io_recvmsg(c->fd, &msg, 0);
	got = co_tls_recv(c->tls, iov, n);
	return got < 0 ? broken(c, got) : got;
}

co_fn int co_nbd_send(struct nbd_conn *c, struct iovec *iov, int n)
{
	if (!c->tls)
		return co_io_sendv_all(c->fd, iov, n);
	while (n) {
		ssize_t sent = co_tls_send(c->tls, iov, n);

		if (sent < 0)
			return broken(c, sent);
		while (n && (size_t)sent >= iov->iov_len) {
			sent -= iov->iov_len;
			iov++;
			n--;
		}
		if (n) {
			iov->iov_base = (char *)iov->iov_base + sent;
			iov->iov_len -= sent;
		}
	}
	return 0;
}

void nbd_send_last(struct nbd_conn *c, const void *data, size_t len)
{
	if (c->tls)
		data = tls_last_words(c->tls, data, len, &len);
	if (data)
		(void)!send(c->fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* --- TLS --- */

struct loading {
	struct tls_client_config config;
	struct tls_creds *creds;
	struct err err;
};

static int load(void *arg)
{
	struct loading *l = arg;

	return tls_creds_load_client(&l->config, &l->creds, &l->err);
}

co_fn int co_nbd_load_creds(struct nbd *n, struct err *err)
{
	const struct nbd_uri *u = &n->config.uri;
	struct loading l = {
		.config = { .name = n->disk.name, .dir = u->tls.certificates, .psk_file = u->tls.psk_file, .user = u->tls.user,
			    .hostname = u->tls.hostname ? u->tls.hostname : u->host, .no_verify = u->tls.no_verify },
		.err = ERR_INIT,
	};
	int ret;

	if (!u->is_tls)
		return 0;
	ret = co_offload(load, &l);
	if (ret < 0)
		return err_set(err, ret, "%s", l.err.msg);
	ret = tls_creds_check_fresh(n->creds, l.creds, l.config.dir, err);
	if (ret < 0) {
		tls_creds_free(l.creds);
		return err_prefix(err, "%s", n->disk.name);
	}
	tls_creds_free(n->creds);
	n->creds = l.creds;
	return 0;
}

static co_fn ssize_t co_plain_recv(void *arg, struct iovec *iov, int n)
{
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = n };
	struct nbd_conn *c = arg;

	return co_io_recvmsg(c->fd, &msg, 0);
}

static co_fn ssize_t co_plain_send(void *arg, struct iovec *iov, int n)
{
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = n };
	struct nbd_conn *c = arg;

	return co_io_sendmsg(c->fd, &msg, 0);
}

co_fn int co_nbd_starttls(struct nbd_conn *c, struct err *err)
{
	const struct tls_io io = { co_plain_recv, co_plain_send, c };
	const char *name = c->n->disk.name;
	struct tls *tls;
	int ret;

	c->tls_why[0] = '\0';
	/* What came too early was not said by whom we are going to check. */
	if (c->rx_head != c->rx_tail)
		return err_set(err, -EPROTO, "%s: sends something in the plain where TLS has to begin; somebody in between may have slipped it in", name);
	ret = tls_create(c->n->creds, &io, &tls);
	if (ret < 0)
		return err_errno(err, ret, "%s: TLS", name);
	ret = co_tls_handshake(tls);
	if (!ret) {
		c->tls = tls;
		log_debug("%s: %s, %s", name, tls_description(tls), tls_peer(tls)[0] ? tls_peer(tls) : "anonymous");
		return 0;
	}
	if (ret == -EACCES)
		err_set(err, ret, "%s: this is not the server that is wanted: %s (tls-certificates=DIR has the ca-cert.pem that is trusted, tls-hostname=NAME is the "
			"name that its certificate must have)", name, tls_why(tls));
	else if (tls_why(tls)[0])
		err_set(err, ret, "%s: %s%s", name, tls_why(tls), ret == -EPERM ? "; has it the certificate or key that the server wants (tls-certificates, "
			"tls-psk-file)?" : "");
	co_tls_bye(tls);
	tls_free(tls);
	return ret;
}

void nbd_hang_up(struct nbd_conn *c)
{
	tls_free(c->tls);
	c->tls = NULL;
	if (c->fd >= 0)
		close(c->fd);
	c->fd = -1;
}
