/* SPDX-License-Identifier: MIT */
/*
 * NBD client: a connected socket.
 */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/nbd.h"
#include "rt/io.h"
#include "util/bytes.h"

#define ADDRS_MAX 8
#define DIAL_NS 10000000000ull	/* for one address */
#define DEAD_PEER_MS 30000	/* a peer that acknowledges nothing for so long is gone */

struct addrs {
	const char *host, *port;
	int flags;
	unsigned n;
	struct sockaddr_storage addr[ADDRS_MAX];
	socklen_t len[ADDRS_MAX];
	const char *why;
};

/* Blocking, unless `flags` has AI_NUMERICHOST. */
static int resolve(void *arg)
{
	struct addrs *a = arg;
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = a->flags | AI_NUMERICSERV }, *list = NULL;
	int ret = getaddrinfo(a->host, a->port, &hints, &list);

	if (ret) {
		a->why = gai_strerror(ret);
		return -EADDRNOTAVAIL;
	}
	for (struct addrinfo *i = list; i && a->n < ADDRS_MAX; i = i->ai_next) {
		if (i->ai_addrlen > sizeof(a->addr[0]))
			continue;
		memcpy(&a->addr[a->n], i->ai_addr, i->ai_addrlen);
		a->len[a->n++] = i->ai_addrlen;
	}
	freeaddrinfo(list);
	return 0;
}

static void tune(int fd)
{
	static const struct { int option, value; } tcp[] = {
		{ TCP_NODELAY, 1 }, { TCP_KEEPIDLE, 10 }, { TCP_KEEPINTVL, 5 }, { TCP_KEEPCNT, 4 }, { TCP_USER_TIMEOUT, DEAD_PEER_MS },
	};
	int on = 1;

	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	for (unsigned i = 0; i < ARRAY_SIZE(tcp); i++)
		setsockopt(fd, IPPROTO_TCP, tcp[i].option, &tcp[i].value, sizeof(int));
}

/* A blocking socket that is connected, or -errno. */
static co_fn int co_dial_one(struct nbd *n, const struct sockaddr *addr, socklen_t len)
{
	int fd = socket(addr->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), ret;
	socklen_t size = sizeof(ret);

	if (fd < 0)
		return -errno;
	ret = connect(fd, addr, len) ? -errno : 0;
	if (ret == -EINPROGRESS) {
		n->dial_fd = fd;
		ret = co_io_poll(fd, POLLOUT, DIAL_NS);
		n->dial_fd = -1;
		if (ret >= 0 && !getsockopt(fd, SOL_SOCKET, SO_ERROR, &ret, &size))
			ret = -ret;
		if (!ret && (n->dead || n->closing))
			ret = -ESHUTDOWN;
	}
	if (ret) {
		close(fd);
		return ret;
	}
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	if (addr->sa_family != AF_UNIX)
		tune(fd);
	return fd;
}

static co_fn int co_dial_unix(struct nbd *n, struct err *err)
{
	const struct nbd_uri *u = &n->config.uri;
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	socklen_t len = offsetof(struct sockaddr_un, sun_path) + u->path_len + (u->path[0] != '\0');
	int fd;

	memcpy(addr.sun_path, u->path, u->path_len);
	fd = co_dial_one(n, (struct sockaddr *)&addr, len);
	if (fd == -ENOENT)
		return err_set(err, fd, "%s: there is no socket %s; start the NBD server first, or wait for it with open-timeout=30", n->disk.name, u->path);
	if (fd == -ECONNREFUSED)
		return err_set(err, fd, "%s: nobody listens on %s; start the NBD server again", n->disk.name, u->path);
	return fd < 0 ? err_errno(err, fd, "%s: cannot connect to %s%s", n->disk.name, u->path[0] ? "" : "@", u->path + !u->path[0]) : fd;
}

static co_fn int co_dial_tcp(struct nbd *n, struct err *err)
{
	const struct nbd_uri *u = &n->config.uri;
	struct addrs a = { .host = u->host, .port = u->port, .flags = AI_NUMERICHOST };
	int ret = resolve(&a);

	if (ret) {
		a.flags = 0;
		ret = co_offload(resolve, &a);
	}
	if (ret)
		return err_set(err, ret, "%s: the host %s is not known: %s", n->disk.name, u->host, a.why);
	ret = -EADDRNOTAVAIL;
	for (unsigned i = 0; i < a.n && !n->dead && !n->closing; i++) {
		ret = co_dial_one(n, (struct sockaddr *)&a.addr[i], a.len[i]);
		if (ret >= 0)
			return ret;
	}
	if (ret == -ECONNREFUSED)
		return err_set(err, ret, "%s: nobody listens on port %s of %s; start the NBD server, or correct the port", n->disk.name, u->port, u->host);
	return err_errno(err, ret, "%s: cannot connect to port %s of %s", n->disk.name, u->port, u->host);
}

co_fn int co_nbd_dial(struct nbd *n, struct err *err)
{
	if (n->config.dial) {
		int fd = n->config.dial(n->config.dial_arg);

		return fd < 0 ? err_errno(err, fd, "%s: cannot connect", n->disk.name) : fd;
	}
	return n->config.uri.is_unix ? co_dial_unix(n, err) : co_dial_tcp(n, err);
}
