/* SPDX-License-Identifier: MIT */
/*
 * NBD client: inside. The driver's operations are in nbd.c, sessions (connect, lose, replay, resume) in nbd_session.c, the way of requests over
 * one connection in nbd_conn.c, replies in nbd_reply.c, the handshake in nbd_handshake.c, bytes in the plain and over TLS in nbd_stream.c, the copy of what
 * may be lost in nbd_replay.c.
 *
 * A request is a coroutine that is parked until its reply is complete. Each connection has a sender coroutine, which gathers all that is queued into
 * one system call, and a receiver coroutine, which reads replies into a small buffer and large payloads straight into the requests' memory. One
 * manager coroutine opens the session and brings it back when a connection is lost.
 *
 *             nbd_dispatch                co_send_loop            co_receive_replies
 *   request ───────────────▶ conn.txq ───────────────▶ sent ──────────────────────────▶ nbd_complete
 *      │ session down                                   │ connection lost
 *      ▼                                                ▼
 *   nbd.pending ◀────────────────────────────────── session_collect      (session up again: all of pending is dispatched)
 *
 * Invariants
 *  (1) A request completes once, after the sender and the receiver have let go of its memory: nbd_complete() waits for `sending`, and
 *      requests of a lost connection are touched only when the connection is quiet.
 *  (2) A cookie names a request on one connection for one sending. Anything else that arrives is a violation.
 *  (3) A read completes well only if chunks that do not overlap have covered every byte of it: nobody sees what was in the buffer before.
 *  (4) Each violation of the protocol ends the disk (nbd_die): a server that sends one is not trusted with anything after it.
 *  (5) A flush succeeds only if the server has flushed all that had been completed before, in one session with it: what was completed since the last flush
 *      and may have been lost with a connection is sent again before anything else (docs/decisions/010-nbd-reconnect.md), or the
 *      disk fails.
 *  (6) Writes that overlap are never in flight together, while a copy is kept: the order of completion is the order of effect.
 *  (7) A change whose fate is unknown, and whose server may be alive and get to it later, is never followed by another change: where the client breaks a
 *      connection by itself (timeout), the disk fails if changes were in flight.
 *
 * Runs on the home reactor of the disk.
 */
#pragma once

#include "backend/nbd_replay.h"
#include "backend/nbd_uri.h"
#include "blk/disk.h"
#include "blk/spec.h"
#include "rt/rt.h"
#include "rt/sync.h"
#include "util/err.h"
#include "util/list.h"
#include "util/nbd_proto.h"

#define NBD_SLOTS 256u		/* requests at once; more wait */
#define NBD_REPLAYS 16u		/* more, for the manager while it replays */
#define NBD_CONNS_MAX 8u
#define NBD_RX_SIZE (64u << 10)
#define NBD_TX_BATCH 64u	/* requests in one system call */
#define NBD_TX_IOV (DISK_MAX_IOV + NBD_TX_BATCH)
#define NBD_SPANS 32u		/* pieces of a read that arrive out of order */
#define NBD_HANDSHAKE_NS 10000000000ull

struct nbd;
struct nbd_conn;
struct tls;
struct tls_creds;

struct nbd_span {
	uint32_t off, end;	/* inside the request */
};

/* One request: lives on the stack of the coroutine that issued it, or in nbd.replays. */
struct nbd_req {
	struct list node;	/* nbd.pending or conn.txq; on neither once it is being sent */
	struct nbd *n;
	struct nbd_conn *conn;	/* NULL: pending */
	struct co *co;		/* NULL: the manager waits on nbd.changed */
	uint16_t type, flags, slot;
	uint64_t off, len, cookie, since_ns;
	const struct iovec *iov;
	int niov;
	bool sending, sent;	/* the sender has its memory; some of it may have reached the server */
	bool answered, done;	/* the reply is complete but `sending` delays it; complete */
	bool expired;
	bool got_extent;
	int error, chunk_error;
	struct disk_extent *extent;
	unsigned nspans;
	struct nbd_span span[NBD_SPANS];
};

/* What a handshake found out. */
struct nbd_facts {
	uint64_t size;
	uint16_t flags;		/* NBD_FLAG_SEND_FLUSH and so on */
	uint32_t min_block, opt_block, max_payload; /* 0: not told */
	bool structured, extended;
	bool has_context;	/* base:allocation */
	uint32_t context;
};

struct nbd_conn {
	struct nbd *n;
	unsigned index;
	int fd;			/* -1: none */
	struct tls *tls;	/* NULL: in the plain */
	char tls_why[200];	/* what went wrong with TLS on this connection, or the last one; "": nothing */
	bool up;		/* requests may be queued here */
	bool receiving, sending; /* the coroutines are busy with fd */
	int lost;		/* why it went down, -errno */
	const char *why;	/* the same for people, static text or tls_why; NULL: strerror(lost) */
	unsigned in_flight;	/* requests with conn == this */
	struct nbd_facts info;
	struct list txq;
	struct co_queue tx_wait, rx_wait;
	/* receiver */
	uint8_t *rx;		/* NBD_RX_SIZE */
	unsigned rx_head, rx_tail;
	struct iovec rx_iov[DISK_MAX_IOV];
	/* sender */
	struct nbd_req *tx_req[NBD_TX_BATCH];
	uint8_t tx_head[NBD_TX_BATCH][NBD_EXT_REQUEST_LEN];
	struct iovec tx_iov[NBD_TX_IOV];
	uint64_t replies;
};

struct nbd_config {
	struct nbd_uri uri;
	unsigned connections;
	uint64_t timeout_ns;	/* of one request; 0: none */
	uint64_t reconnect_ns;	/* how long to try; UINT64_MAX: for ever; 0: never */
	uint64_t open_timeout_ns; /* how long to try at open */
	uint64_t replay;	/* bytes; 0: no copy is kept */
	/* Tests: gives a connected socket instead of dialling, or -errno. */
	int (*dial)(void *arg);
	void *dial_arg;
};

enum nbd_session { NBD_DOWN, NBD_UP };

struct nbd {
	struct disk disk;	/* first */
	struct disk_ops ops;	/* of this server: what it lacks is NULL */
	struct nbd_config config;
	struct nbd_facts info;	/* of the first handshake: what later ones must match */
	struct tls_creds *creds; /* of the connection to be made; NULL: none are loaded */
	enum nbd_session session;
	int dead;		/* -errno that every request gets; 0: alive */
	bool closing;
	unsigned nconns;	/* in use, <= config.connections */
	unsigned tasks;		/* coroutines of this disk */
	struct nbd_conn *conn;	/* config.connections of them */
	int dial_fd;		/* being connected, for cancel; -1 */
	struct co_queue changed; /* the manager, and close, wait here for anything to change */
	struct list pending;
	/* requests */
	uint64_t serial;
	struct co_sem slots;
	uint16_t free_slot[NBD_SLOTS + NBD_REPLAYS];
	unsigned nfree;
	struct nbd_req *slot[NBD_SLOTS + NBD_REPLAYS];
	struct rt_timer tick;
	/* what may be lost */
	struct nbd_replay *replay; /* NULL: none is kept */
	struct nbd_req replays[NBD_REPLAYS];
	struct iovec replay_iov[NBD_REPLAYS][2];
	struct co_rangelock lock;
	struct co_queue room;
	bool self_flushing;
	bool always_fua;	/* the server has FUA but no flush */
	uint64_t changes, flushed; /* changes completed; those that a flush has covered */
	uint64_t max_zero;	/* one trim or write zeroes, as the server was seen to take */
	/* figures */
	uint64_t reconnects, replayed, resent, self_flushes;
	uint64_t down_since_ns, backoff_ns;
};

static inline bool nbd_is_change(const struct nbd_req *r)
{
	return r->type == NBD_CMD_WRITE || r->type == NBD_CMD_WRITE_ZEROES || r->type == NBD_CMD_TRIM;
}

/* --- nbd.c --- */
/* Takes config->uri, also on failure. */
co_fn int co_nbd_open_config(struct nbd_config *config, const char *name, unsigned flags, struct disk **ret, struct err *err);
extern const struct disk_driver nbd_driver;

/* --- nbd_conn.c --- */
int nbd_conn_init(struct nbd *n, struct nbd_conn *c, unsigned index);
void nbd_conn_fini(struct nbd_conn *c);
/* Takes a connected and greeted socket into use, or (plain) ends its use for `error`; `why` may be NULL. The second may be called at any time. */
void nbd_conn_start(struct nbd_conn *c);
void nbd_conn_break(struct nbd_conn *c, int error, const char *why);
/* Neither coroutine uses the socket. */
static inline bool nbd_conn_is_quiet(const struct nbd_conn *c)
{
	return !c->up && !c->receiving && !c->sending;
}
/* Queues the request at a connection, or as pending. */
void nbd_dispatch(struct nbd *n, struct nbd_req *r);
/* Queues it at this connection, whatever the session is. */
void nbd_queue(struct nbd_conn *c, struct nbd_req *r);
/* Says that the client leaves, if nothing is being sent. */
void nbd_goodbye(struct nbd_conn *c);
/* The request has its result. Waits for the sender, if that still has its memory. */
void nbd_complete(struct nbd_req *r, int error);
co_fn void co_nbd_sender(void *conn);
co_fn void co_nbd_receiver(void *conn);

/* --- nbd_reply.c --- */
/* At least `len` bytes are in the buffer from rx_head on; len <= NBD_RX_SIZE. */
co_fn int co_nbd_need(struct nbd_conn *c, unsigned len);
co_fn int co_nbd_skip(struct nbd_conn *c, uint64_t len);
/* Until the connection ends. -EPROTO with c->why set for a violation. */
co_fn int co_nbd_receive_replies(struct nbd_conn *c);
static inline const uint8_t *nbd_rx(const struct nbd_conn *c)
{
	return c->rx + c->rx_head;
}

/* --- nbd_stream.c: the bytes of a connection, over TLS once that is up --- */
/* As co_io_recvmsg() and co_io_sendv_all(); -ECONNRESET with tls_why set for what TLS refuses. One caller each at a time. */
co_fn ssize_t co_nbd_recv(struct nbd_conn *c, struct iovec *iov, int n);
co_fn int co_nbd_send(struct nbd_conn *c, struct iovec *iov, int n);
/* Plain, without waiting; the last that is sent. */
void nbd_send_last(struct nbd_conn *c, const void *data, size_t len);
/* The server has acknowledged STARTTLS. */
co_fn int co_nbd_starttls(struct nbd_conn *c, struct err *err);
/* Reads the credentials that the URI names, anew if there are some; those stay if the files are not good. */
co_fn int co_nbd_load_creds(struct nbd *n, struct err *err);
/* Closes the socket, if there is one. The connection is quiet. */
void nbd_hang_up(struct nbd_conn *c);

/* --- nbd_handshake.c --- */
/* On the connected c->fd; fills in c->info. Bounded by NBD_HANDSHAKE_NS. */
co_fn int co_nbd_handshake(struct nbd_conn *c, struct err *err);

/* --- nbd_dial.c --- */
/* A connected socket or -errno. nbd.dial_fd is set while it waits. */
co_fn int co_nbd_dial(struct nbd *n, struct err *err);

/* --- nbd_session.c --- */
/* Dials and shakes hands; c->fd is -1 after a failure. */
co_fn int co_nbd_connect(struct nbd_conn *c, struct err *err);
/* The other connections, if the server takes several; returns how many there are with the first. */
co_fn unsigned co_nbd_connect_more(struct nbd *n);
co_fn void co_nbd_manager(void *nbd);
/* Plain: ends the disk for good. Every request fails with `error`. The message is logged, unless it is NULL. */
void nbd_die(struct nbd *n, int error, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void nbd_tick(struct rt_timer *t);
