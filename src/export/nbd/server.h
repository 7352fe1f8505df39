/* SPDX-License-Identifier: MIT */
/*
 * NBD server: serves volumes to NBD clients over Unix and TCP sockets. The design note is in internal.h.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "blk/volume.h"

struct nbd_server;
struct nbd_transport;
struct rt;
struct tls_creds;

enum nbd_tls { NBD_TLS_OFF, NBD_TLS_ALLOW, NBD_TLS_REQUIRE };

/* Every 0 stands for the default. */
struct nbd_server_config {
	unsigned max_conns;	/* 256 */
	unsigned client_conns;	/* of one client, which is an address or, on Unix sockets, a user: max_conns */
	unsigned max_in_flight;	/* requests of one connection: 512 */
	unsigned max_requests;	/* requests of one export: 1024 */
	uint64_t memory;	/* bytes of request data of one export: 128 MiB, at least 64 MiB */
	uint64_t client_ns;	/* a client must finish each option, and each request, of which it has sent a part, within: 30 s; UINT64_MAX: no limit */
	uint64_t stall_ns;	/* a client that takes or sends nothing for so long loses its connection if others wait for memory: 10 s */
	uint64_t idle_ns;	/* a client without a request for so long loses its connection: never */
	bool insecure;		/* listen beyond the loopback interface without NBD_TLS_REQUIRE */
	enum nbd_tls tls;
	struct tls_creds *creds; /* the caller's, see nbd_server_set_creds(); with NBD_TLS_OFF not looked at */
};

/* `config` may be NULL. Call on the reactor that is to serve. -ENOMEM. */
int nbd_server_create(const struct nbd_server_config *config, struct nbd_server **ret, struct err *err);
/* After co_nbd_server_stop(). NULL is fine. */
void nbd_server_destroy(struct nbd_server *s);

/* Others, for clients that begin with TLS from now on. The caller may free those from before: sessions keep what they use. */
void nbd_server_set_creds(struct nbd_server *s, struct tls_creds *creds);

/* The first one added is also the default export, "". `v` stays the caller's and outlives the server. -EEXIST. */
int nbd_server_add_volume(struct nbd_server *s, struct volume *v, struct err *err);

/*
 * Offers the volume `name` of `there`, a server on the reactor `home`, to whoever connects here: after the handshake the connection moves there, and its place here
 * stays taken until it ends. Both have the same configuration, and `there` outlives this server's stop. Order as for nbd_server_add_volume().
 */
int nbd_server_add_remote(struct nbd_server *s, struct nbd_server *there, struct rt *home, const char *name, struct err *err);

/*
 * Listens on "unix:PATH", "HOST:PORT", "[IPV6]:PORT", ":PORT" or "PORT". Without a host the address is loopback; "*" is every address.
 * A stale Unix socket is replaced, a live one is -EADDRINUSE. Port 0 takes a free one. Options follow behind commas: "export=NAME" is the only volume that is
 * there on this address; for a Unix socket, those of file_access_parse(). -EACCES: see config.insecure.
 */
co_fn int co_nbd_server_listen(struct nbd_server *s, const char *addr, struct err *err);
/* Only what it says by itself. 0 or -EINVAL. */
int nbd_server_check_address(const char *addr, struct err *err);

/*
 * Accepts nothing more and ends all connections. Requests in flight are answered until `deadline_ns` (rt_now_ns() time); what is left
 * then is cut. -ETIMEDOUT if requests are still in flight, because a volume hangs: the server must not be destroyed then.
 */
co_fn int co_nbd_server_stop(struct nbd_server *s, uint64_t deadline_ns);

/* Serves one client on a transport that is connected already. The server owns `t` from now on, also on failure. -EAGAIN, -EMFILE, -ENOMEM. */
int nbd_server_adopt(struct nbd_server *s, struct nbd_transport *t, const char *peer);

/* json_t object, new reference: addresses, limits, connections. */
void *nbd_server_status(struct nbd_server *s);
/* The actual address of the i-th listening socket in the syntax above, with the port that was taken; NULL beyond the last. */
const char *nbd_server_address(struct nbd_server *s, unsigned i);
unsigned nbd_server_connections(const struct nbd_server *s);

/* --- Transports: a byte stream to one client. The fuzz targets have their own. --- */

struct nbd_transport_ops {
	/* Bytes received into the list, 0 at end of file, -errno. */
	ssize_t (*co_recv)(struct nbd_transport *t, struct iovec *iov, int n);
	/* Bytes taken, at least 1, or -errno. Waits while the client takes nothing. */
	ssize_t (*co_send)(struct nbd_transport *t, struct iovec *iov, int n);
	/* Wakes who waits in the two above, which then see the end: `how` as in shutdown(2). Plain function. */
	void (*shutdown)(struct nbd_transport *t, int how);
	/* Closes and frees. */
	void (*co_close)(struct nbd_transport *t);
};

struct nbd_transport {
	const struct nbd_transport_ops *ops;
};

/* A connected stream socket. NULL: out of memory (`fd` stays open). */
struct nbd_transport *nbd_transport_socket(int fd);
