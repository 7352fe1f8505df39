/* SPDX-License-Identifier: MIT */
/*
 * NBD server: inside.
 *
 * One coroutine per connection is its receiver: it does the handshake (handshake.c) and then cuts the byte stream into requests (receive.c). Each
 * request is a coroutine of its own (request.c). Replies are queued at the connection; the first to queue one becomes the sender: it lets all other
 * ready coroutines run first, so that what completes in the same turn goes out in one system call (send.c).
 *
 * Many small requests arrive in one recv into the connection's buffer. What a write's payload lacks there is received straight into the
 * request's own aligned buffer, together with what follows it.
 *
 * Invariants
 *  (1) The stream stays in step: for every request whose header was accepted exactly the announced payload is consumed, whatever its fate; where
 *      that would take more than DISCARD_MAX the connection ends.
 *  (2) A connection has at most config.max_in_flight requests; an export has its own pools of request structs and memory, so that a volume that
 *      hangs pins only its own. Who lacks any of them waits in the receiver and reads no further: the client is slowed by its own socket. How the
 *      connections of an export share its memory is in memory.c.
 *  (3) Only the receiver waits for request memory, and it holds none then, so waiting ends when requests end. A request waits only for its volume and its
 *      client; a client that takes or sends nothing loses the connection when others wait for memory (watchdog in memory.c).
 *      A client that has sent a part of a request sends the rest within client_ns and the time that 64 KiB a second take, or loses the connection;
 *      between two requests it may be silent for ever.
 *  (4) A connection is freed by its receiver after in_flight has fallen to 0; so requests never see a connection go away.
 *  (5) After the first send error `dead` is set, replies are dropped and the receiver ends.
 *  (6) Nothing that was said before TLS counts after it: what a client has negotiated is forgotten, and one that sends anything between its STARTTLS and the
 *      reply loses the connection, since those bytes may be somebody else's.
 *  (7) A connection belongs to one reactor at a time. It is handed over between handshake and transmission, with nothing in flight and no timer armed; from then on
 *      its first server has it on the list `away`, looks at nothing of it but `client`, and frees it when it comes back at its end.
 *
 * Runs on one reactor, or, with volumes of others, one server on each: remote.c.
 */
#pragma once

#include "blk/volume.h"
#include "export/nbd/server.h"
#include "rt/budget.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "rt/rt.h"
#include "rt/sync.h"
#include "util/access.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/list.h"
#include "util/nbd_proto.h"
#include "util/opts.h"
#include "util/unixsock.h"

#define RBUF_SIZE (64u << 10)	/* receive buffer of a connection, and the longest option that is looked at */
#define OPTION_SKIP_MAX (1u << 20) /* a longer option ends the connection */
#define OPTIONS_MAX 1024	/* options of one handshake */
#define DISCARD_MAX (2 * NBD_MAX_PAYLOAD)
#define STATUS_EXTENTS 1024	/* descriptors of one block status reply */
#define META_ALLOCATION 1	/* the context ID of base:allocation */

struct nbd_conn;
struct tls;

/* What the handshake says about an export. */
struct nbd_facts {
	uint64_t size;
	uint32_t block;		/* preferred */
	bool read_only, rotational;
};

struct nbd_export {
	struct list node;
	struct nbd_server *s;
	char *name;
	struct volume *v;	/* NULL: of another reactor, and then all below is empty */
	struct nbd_server *there; /* of such a volume */
	struct rt *home;
	struct nbd_request *slab;
	struct list free;	/* requests */
	struct rt_bufpool *pool;
	struct co_queue wait;	/* receivers that found no free request */
	struct list mem_waiters; /* struct mem_waiter, in order of arrival */
	struct co_queue mem_wait;
	struct rt_timer watchdog; /* armed while there are mem_waiters */
};

/* What "unix:/run/vm.sock,mode=0660" says. All strings lie in it. */
struct nbd_address {
	char text[300];		/* without the options */
	char split[300];
	bool is_unix;
	const char *path;	/* Unix */
	const char *host, *port; /* TCP; host NULL: none is given */
	struct file_access access;
	const char *export;	/* NULL: all */
	struct opts opts;
};

struct nbd_listener {
	struct list node;
	struct nbd_server *s;
	struct unix_listener sock; /* TCP: only its fd */
	struct nbd_export *only; /* the one export of this address; NULL: all */
	bool is_unix, stop;
	bool told;		/* that there is no memory for a client */
	char addr[300];		/* for messages and status, with the real port */
};

struct nbd_request {
	struct list node;	/* free list, or the send queue of conn */
	struct nbd_conn *conn;
	uint16_t type, flags;
	uint64_t cookie, off, len;
	uint32_t payload;	/* bytes in buf that came with the request */
	int refuse;		/* the receiver's verdict, an enum nbd_error; 0: to be carried out */
	const char *why;	/* for the error reply; static text */
	void *buf;
	uint32_t buf_charge;	/* what buf counts in conn->mem_used */
	/* the reply */
	uint32_t head_len, data_len;
	uint8_t head[128];
};

struct nbd_conn {
	struct list node;
	struct nbd_server *s;
	struct nbd_transport *t;
	struct tls *tls;	/* inside t, after its handshake; NULL: plain */
	char peer[64];
	char client[64];	/* what is the same for all connections of one client; "": no client at all */
	struct nbd_export *only; /* of the listener */
	struct nbd_server *origin; /* (7), NULL: this one */
	struct rt *origin_rt;
	struct rt_msg back;
	struct list away_node;
	struct rt_timer timer;	/* handshake; then: the rest of a request */
	struct rt_timer idle_timer;
	uint64_t since_ns, last_ns; /* of the connection; of the last request */
	/* negotiated */
	bool transmission, fixed, no_zeroes, structured, extended;
	struct nbd_export *meta; /* base:allocation was selected for this one */
	struct nbd_export *exp;	/* in transmission */
	bool block_status;	/* meta fits exp */
	unsigned options;
	/* receiving */
	uint8_t *rbuf;
	uint32_t rpos, rend;
	/* requests */
	unsigned in_flight;
	uint64_t mem_used;
	struct co_queue idle;	/* the receiver waits here for in_flight to fall */
	/* sending */
	struct list sendq;
	bool sending;
	bool dead;		/* (5) */
	bool closing;		/* no further requests */
	uint64_t send_since_ns;	/* since when the client takes nothing, 0: it does */
	uint64_t recv_since_ns;	/* since when it sends nothing of a payload */
	/* figures */
	uint64_t requests, errors, bytes_in, bytes_out, sends, recvs;
};

struct nbd_server {
	struct nbd_server_config config;
	struct list exports, listeners, conns;
	struct list away;	/* connections that other reactors serve: (7) */
	unsigned nconns;	/* with those */
	bool stopping;
	struct co_queue stop_q;	/* co_nbd_server_stop() waits for connections and acceptors */
	unsigned acceptors;
	uint64_t accepted, refused, stalled;
	struct budget_user conn_user; /* memory of connections that is no request's */
	uint64_t tls_failed, tls_told_ns;
	unsigned tls_told;	/* since tls_told_ns */
};

/* handshake.c: 0 when transmission begins; otherwise the connection ends. */
co_fn int co_conn_handshake(struct nbd_conn *c);
/* The export of that name, or NULL: of the server, and as far as this client is concerned. */
struct nbd_export *export_find(struct nbd_server *s, const void *name, size_t len);
struct nbd_export *conn_export(struct nbd_conn *c, const void *name, size_t len);

/* receive.c: until the client leaves, or an error. Returns with nothing in flight. */
co_fn void co_conn_receive(struct nbd_conn *c);
/* At least `need` (<= RBUF_SIZE) bytes at rbuf + rpos: 0, -ECONNRESET at end of file, -errno. */
co_fn int co_conn_fill(struct nbd_conn *c, uint32_t need);
/* Consumes `len` bytes unseen. */
co_fn int co_conn_skip(struct nbd_conn *c, uint64_t len);
/* The whole list or -errno; `iov` is consumed. */
co_fn int co_conn_send(struct nbd_conn *c, struct iovec *iov, int n);

/* request.c: coroutine entry, `arg` is a struct nbd_request. Carries out, replies and frees. */
co_fn void co_request_main(void *arg);

/* send.c */
co_fn void co_request_reply(struct nbd_request *r);	/* queues head and data, and sends if nobody else does */

/* tls.c: the client has its reply to STARTTLS. Replaces c->t; 0, or -errno: the connection ends. */
co_fn int co_conn_starttls(struct nbd_conn *c);
/* Counts, and tells the operator; not more often than the log stays readable, since anybody can make it happen. */
void conn_refused_tls(struct nbd_conn *c, const char *why);

/* memory.c */
void export_memory_init(struct nbd_export *e);
co_fn struct nbd_request *co_request_get(struct nbd_conn *c); /* NULL: the connection is dead */
co_fn void *co_request_buf(struct nbd_request *r, uint32_t len); /* sets r->buf; NULL: the connection is dead */
void request_put(struct nbd_request *r);

/* server.c */
void conn_kill(struct nbd_conn *c);	/* (5) */
/* Waits until the budget has room for a connection, for a second or until *stop; in a burst of them the caches give way meanwhile. */
co_fn void co_conn_room(struct nbd_server *s, const bool *stop);
int server_adopt(struct nbd_server *s, struct nbd_transport *t, const char *peer, const char *client, struct nbd_export *only);
/* The time for the next option begins. */
void conn_handshake_clock(struct nbd_conn *c);
/* In transmission: the client has begun a request of which `len` bytes are missing; it has so long until rt_timer_cancel(&c->timer). Goes on if it runs already. */
void conn_request_clock(struct nbd_conn *c, uint64_t len);

/* A connection in transmission, until it ends and everything of it but `c` is gone. */
co_fn void co_conn_transmit(struct nbd_conn *c);
/* Frees it, and gives its place away. */
void conn_free(struct nbd_conn *c);

/* remote.c */
co_fn int co_export_facts(const struct nbd_export *e, struct nbd_facts *ret);
/* Moves the connection to the reactor of its export. On failure it stays. */
co_fn int co_conn_hand_over(struct nbd_conn *c);

/* address.c */
int nbd_address_parse(struct nbd_address *a, const char *text, struct err *err);
void nbd_address_fini(struct nbd_address *a);

/* listen.c */
void listener_close(struct nbd_listener *l);	/* frees; after its acceptor has ended */
