/* SPDX-License-Identifier: MIT */
/*
 * NBD server: addresses, listening sockets, accept, and the socket transport.
 */
#include "export/nbd/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <unistd.h>

#include "util/log.h"

#define BACKLOG 1024

/* --- Socket transport --- */

struct socket_transport {
	struct nbd_transport t;
	int fd;
};

static co_fn ssize_t co_socket_recv(struct nbd_transport *t, struct iovec *iov, int n)
{
	struct socket_transport *st = container_of(t, struct socket_transport, t);
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = n };

	if (n == 1)
		return co_io_recv(st->fd, iov->iov_base, iov->iov_len, 0);
	return co_io_recvmsg(st->fd, &msg, 0);
}

/* Tried at once, which saves a turn through the ring: a reply seldom finds the socket full. */
static co_fn ssize_t co_socket_send(struct nbd_transport *t, struct iovec *iov, int n)
{
	struct socket_transport *st = container_of(t, struct socket_transport, t);
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = n };
	ssize_t ret = sendmsg(st->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (ret >= 0)
		return ret;
	if (errno != EAGAIN && errno != EINTR)
		return -errno;
	return co_io_sendmsg(st->fd, &msg, MSG_NOSIGNAL);
}

static void socket_shutdown(struct nbd_transport *t, int how)
{
	struct socket_transport *st = container_of(t, struct socket_transport, t);

	if (how == SHUT_RDWR)
		rt_io_shutdown(st->fd);
	else
		shutdown(st->fd, how);
}

static co_fn void co_socket_close(struct nbd_transport *t)
{
	struct socket_transport *st = container_of(t, struct socket_transport, t);

	close(st->fd);
	free(st);
}

static const struct nbd_transport_ops socket_ops = {
	.co_recv = co_socket_recv,
	.co_send = co_socket_send,
	.shutdown = socket_shutdown,
	.co_close = co_socket_close,
};

struct nbd_transport *nbd_transport_socket(int fd)
{
	struct socket_transport *st = calloc(1, sizeof(*st));

	if (!st)
		return NULL;
	st->t.ops = &socket_ops;
	st->fd = fd;
	return &st->t;
}

/* --- Accept --- */

static void name_address(const struct sockaddr_storage *sa, socklen_t len, char *buf, size_t size)
{
	char host[NI_MAXHOST], port[NI_MAXSERV];

	if (getnameinfo((const void *)sa, len, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV))
		snprintf(buf, size, "?");
	else
		snprintf(buf, size, sa->ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

/* `peer` is for messages, `client` what limits count by; both have `size` bytes. */
static void prepare_socket(int fd, const struct sockaddr_storage *sa, socklen_t len, char *peer, char *client, size_t size)
{
	struct ucred cred;
	socklen_t cred_len = sizeof(cred);
	int one = 1;

	if (sa->ss_family != AF_UNIX) {
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
		name_address(sa, len, peer, size);
		getnameinfo((const void *)sa, len, client, size, NULL, 0, NI_NUMERICHOST);
	} else if (!getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_len)) {
		snprintf(peer, size, "unix, pid %d, uid %u", (int)cred.pid, (unsigned)cred.uid);
		snprintf(client, size, "uid %u", (unsigned)cred.uid);
	} else {
		snprintf(peer, size, "unix");
	}
}

static void accepted(struct nbd_listener *l, int fd, const struct sockaddr_storage *sa, socklen_t len)
{
	struct nbd_server *s = l->s;
	struct nbd_transport *t = nbd_transport_socket(fd);
	char peer[64], client[sizeof(peer)] = "";
	int ret;

	if (!t) {
		close(fd);
		s->refused++;
		return;
	}
	prepare_socket(fd, sa, len, peer, client, sizeof(peer));
	ret = server_adopt(s, t, peer, client, l->only);
	if (ret == -ENOMEM && !l->told)
		log_warn("NBD client %s: refused: no memory is left for it; give a larger --memory, or a smaller --log-memory", peer);
	else if (ret < 0)
		log_debug("NBD client %s: refused: %s", peer, strerror(-ret));
	l->told = ret == -ENOMEM;
}

static co_fn void co_accept_main(void *arg)
{
	struct nbd_listener *l = arg;
	struct nbd_server *s = l->s;
	bool told = false;

	while (!l->stop) {
		struct sockaddr_storage sa = { .ss_family = AF_UNIX };
		socklen_t len = sizeof(sa);
		int fd = co_io_accept(l->sock.fd, (struct sockaddr *)&sa, &len);

		if (fd >= 0) {
			told = false;
			co_conn_room(s, &l->stop);
			accepted(l, fd, &sa, len);
		} else if (!l->stop && fd != -ECONNABORTED) {
			/* Out of descriptors or memory: it may pass. */
			if (!told)
				log_warn("%s: cannot accept a client: %s", l->addr, strerror(-fd));
			told = true;
			co_sleep_ns(100 * 1000000ull);
		}
	}
	s->acceptors--;
	co_queue_wake_all(&s->stop_q);
}

/* --- Listen --- */

void listener_close(struct nbd_listener *l)
{
	if (l->is_unix)
		unix_unlisten(&l->sock);
	else
		close(l->sock.fd);
	list_del(&l->node);
	free(l);
}

/* Takes the listening socket over, also on failure. */
static int start_listener(struct nbd_server *s, const struct unix_listener *sock, const struct nbd_address *a, const char *name, struct err *err)
{
	struct nbd_listener *l = calloc(1, sizeof(*l));
	int ret;

	if (!l) {
		close(sock->fd);
		return err_errno(err, -ENOMEM, "NBD: %s: cannot listen", name);
	}
	l->s = s;
	l->sock = *sock;
	l->is_unix = a->is_unix;
	snprintf(l->addr, sizeof(l->addr), "%s", name);
	l->only = a->export ? export_find(s, a->export, strlen(a->export)) : NULL;
	list_init(&l->node);
	ret = co_spawn("nbd accept", co_accept_main, l);
	if (ret < 0) {
		listener_close(l);
		return err_errno(err, ret, "NBD: %s: cannot listen", name);
	}
	s->acceptors++;
	list_add_tail(&s->listeners, &l->node);
	return 0;
}

struct resolve {
	const char *host, *port;
	struct addrinfo *list;
};

static int resolve(void *arg)
{
	struct resolve *r = arg;
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };

	return getaddrinfo(r->host, r->port, &hints, &r->list);
}

static bool is_loopback(const struct sockaddr *sa)
{
	const struct in6_addr *six = &((const struct sockaddr_in6 *)sa)->sin6_addr;

	if (sa->sa_family == AF_INET)
		return ntohl(((const struct sockaddr_in *)sa)->sin_addr.s_addr) >> 24 == 127;
	return sa->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(six);
}

static int bind_tcp(struct nbd_server *s, const struct addrinfo *ai, const struct nbd_address *a, struct err *err)
{
	int one = 1, fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_storage sa;
	socklen_t len = sizeof(sa);
	char name[300];

	if (fd < 0)
		return -errno;
	if (!is_loopback(ai->ai_addr) && s->config.tls != NBD_TLS_REQUIRE && !s->config.insecure) {
		close(fd);
		return err_set(err, -EACCES, "NBD: %s: without TLS whoever reaches this address can read and write; give --tls-creds DIR (with --tls require), "
			       "or say --insecure", a->text);
	}
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (ai->ai_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
	if (bind(fd, ai->ai_addr, ai->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0) {
		int ret = -errno;

		close(fd);
		return ret;
	}
	if (getsockname(fd, (struct sockaddr *)&sa, &len) < 0)
		snprintf(name, sizeof(name), "%s", a->text);
	else
		name_address(&sa, len, name, sizeof(name));
	return start_listener(s, &(struct unix_listener){ .fd = fd }, a, name, err);
}

static co_fn int co_listen_tcp(struct nbd_server *s, const struct nbd_address *a, struct err *err)
{
	struct resolve r = { a->host, a->port, NULL };
	int ret, failed = 0, n = 0;

	if (!r.host) {
		r.host = "localhost";
	} else if (!strcmp(r.host, "*")) {
		r.host = NULL;
	}
	ret = co_offload(resolve, &r);
	if (ret)
		return err_set(err, -EADDRNOTAVAIL, "NBD: %s: cannot resolve '%s': %s", a->text, r.host ? r.host : "*", gai_strerror(ret));
	/* A name may have addresses that this host lacks (::1 where IPv6 is off): one that works is enough, a port in use is not. */
	for (struct addrinfo *ai = r.list; ai && !ret; ai = ai->ai_next) {
		ret = bind_tcp(s, ai, a, err);
		if (!ret) {
			n++;
		} else if (ret == -EADDRNOTAVAIL || ret == -EAFNOSUPPORT) {
			failed = ret;
			ret = 0;
		} else if (ret == -EADDRINUSE) {
			err_set(err, ret, "NBD: %s: the port is in use; stop the other server or choose another port", a->text);
		}
	}
	freeaddrinfo(r.list);
	if (!ret && !n)
		ret = failed ? failed : -EADDRNOTAVAIL;
	return ret < 0 && !err->code ? err_errno(err, ret, "NBD: %s: cannot bind", a->text) : ret;
}

static co_fn int co_listen_unix(struct nbd_server *s, const struct nbd_address *a, struct err *err)
{
	struct unix_listener sock;
	int ret = unix_listen(a->path, &a->access, BACKLOG, &sock, err);

	return ret < 0 ? err_prefix(err, "NBD") : start_listener(s, &sock, a, a->text, err);
}

co_fn int co_nbd_server_listen(struct nbd_server *s, const char *addr, struct err *err)
{
	struct nbd_address a;
	int ret = nbd_address_parse(&a, addr, err);

	if (ret < 0)
		return ret;
	if (a.export && !export_find(s, a.export, strlen(a.export)))
		ret = err_set(err, -ENOENT, "NBD: %s: there is no volume '%s' to be served here", a.text, a.export);
	else
		ret = a.is_unix ? co_listen_unix(s, &a, err) : co_listen_tcp(s, &a, err);
	nbd_address_fini(&a);
	return ret;
}

const char *nbd_server_address(struct nbd_server *s, unsigned i)
{
	list_for_each(&s->listeners, n) {
		if (!i--)
			return container_of(n, struct nbd_listener, node)->addr;
	}
	return NULL;
}
