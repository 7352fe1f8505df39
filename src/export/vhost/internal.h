/* SPDX-License-Identifier: MIT */
/*
 * vhost-user-blk server: inside.
 *
 * A device has one listening socket and serves one connection after the other. The connection's coroutine reads messages (message.c) and carries
 * them out one at a time (handlers.c). The rings are looked at by a poller of the reactor (queue.c): it publishes what has completed, and starts a coroutine for
 * each new request, which walks its descriptors and calls co_virtio_blk_request() on the guest's own memory. So while the reactor is busy
 * neither side makes a system call for a request: the poller finds it in memory, and the guest is called once for all that completed in a turn.
 *
 * States of a queue
 *
 *	STOPPED ──SET_VRING_KICK──▶ started ──and enabled, mapped──▶ RUNNING ──GET_VRING_BASE, disable, reset, the end──▶ STOPPED
 *	                                                               └──a request that is none──▶ BROKEN (until it is started anew)
 *
 * Invariants
 *  (1) Whoever stops a queue takes nothing more from its ring, and waits until its requests have ended and their completions are published. Only then
 *      the message that asked for it is answered, or the next connection accepted: no request of an earlier guest lands behind one of a later.
 *  (2) A request holds a reference to the table of memory that its buffers were found in, so a buffer stays mapped until the request has ended.
 *  (3) Nothing is trusted that comes from the rings, from messages or with them: a queue that breaks the rules is BROKEN, with the reason in its
 *      `err`, logged once and shown by `status`; a message that does is refused, and ends the connection where it cannot be.
 *  (4) A device has at most config.max_in_flight requests; what exceeds that, or finds no coroutine, waits in the ring.
 *
 * Runs on one reactor, that of the volume.
 */
#pragma once

#include "blk/volume.h"
#include "export/vhost/proto.h"
#include "export/vhost/ring.h"
#include "export/vhost/server.h"
#include "export/virtio_blk.h"
#include "rt/io.h"
#include "rt/watch.h"
#include "util/err.h"
#include "util/unixsock.h"

#define VHOST_QUEUES_MAX 64u

struct vhost_device;
struct vhost_queue;

struct vhost_request {
	struct vhost_queue *q;
	uint16_t head;
};

struct vhost_queue {
	struct vhost_device *d;
	unsigned index;
	struct vring ring;
	struct vhost_request *requests; /* by head, ring.num of them while it runs */
	int kick_fd, call_fd, err_fd; /* -1: none */
	struct rt_watch *watch;
	bool started, enabled;	/* told by the front end */
	bool running, broken, stopping;
	unsigned in_flight;
	struct co_queue idle;	/* waits for in_flight to fall to 0 */
	struct err err;		/* why it is broken */
	uint64_t popped, calls;
};

struct vhost_message {
	struct vhost_user_hdr hdr;
	union vhost_user_payload p;
	int fd[VHOST_USER_MAX_FDS]; /* -1: taken by the handler */
	unsigned nfds;
	/* the reply, if there is one */
	bool reply;
	uint32_t reply_len;
	int reply_fd;		/* -1: none; closed when sent */
};

struct vhost_device {
	struct list node;
	struct vhost_server *s;
	struct vhost_device_config config;
	struct unix_listener sock;
	struct virtio_blk blk;
	/* the connection */
	int fd;			/* -1: none */
	char peer[64];
	uint64_t since_ns, connections;
	uint64_t features, protocol;
	uint8_t status;
	bool status_used;
	int backend_fd;		/* for messages to the front end, -1: none */
	struct vhost_memory *memory; /* NULL: none yet */
	bool memory_lost;
	unsigned losses_seen;
	struct vhost_log log;
	bool log_all;
	struct rt_shm inflight;
	size_t inflight_stride;
	char *inflight_base;
	unsigned inflight_queues;
	uint32_t inflight_num;
	struct vhost_queue *queues[VHOST_QUEUES_MAX]; /* made when first named */
	unsigned nqueues;	/* one more than the highest */
	unsigned in_flight;
	struct rt_poller poller;
	struct rt_timer tick;	/* for queues without a kick descriptor */
	bool ticking;
	struct err err;		/* why the last connection ended, or a queue broke */
};

struct vhost_server {
	struct list devices;
	bool stopping;
	unsigned acceptors;
	struct co_queue stop_q;
};

/* queue.c */
struct vhost_queue *queue_get(struct vhost_device *d, unsigned index, struct err *err);
/* Starts the queue if all that it needs is there. */
void queue_update(struct vhost_queue *q);
void device_update(struct vhost_device *d);
co_fn void co_queue_stop(struct vhost_queue *q);
co_fn void co_device_stop(struct vhost_device *d);	/* all queues, at once */
/* Finds the rings again after the table of memory has changed. */
void device_remap(struct vhost_device *d);
void queue_break(struct vhost_queue *q);		/* q->err says why */
void queue_set_kick(struct vhost_queue *q, int fd);	/* takes fd; -1 is polling */
co_fn void co_queue_set_call(struct vhost_queue *q, int fd);
co_fn void co_queue_free(struct vhost_queue *q);
bool device_poll(struct rt_poller *p);
void device_sleep(struct rt_poller *p);

/* message.c: until the front end leaves, or an error. */
co_fn void co_device_serve(struct vhost_device *d);
/* Tells the front end that the config space has changed. */
void device_config_changed(struct vhost_device *d);

/* handlers.c: 0, or an error that is told to the front end if it has asked for a reply, and else ends the connection. */
co_fn int co_handle_message(struct vhost_device *d, struct vhost_message *m, struct err *err);
/* The name of a request, NULL if it is not known here; its limits for payload and descriptors. */
const char *message_name(uint32_t request);
int check_message(const struct vhost_message *m, struct err *err);
/* Forgets what belongs to the connection; all queues are stopped. */
co_fn void co_device_forget(struct vhost_device *d);

/* inflight.c */
int inflight_create(struct vhost_device *d, struct vhost_user_inflight *desc, int *ret_fd, struct err *err);
int inflight_attach(struct vhost_device *d, const struct vhost_user_inflight *desc, int fd, struct err *err);
/* The region of one queue with that ring size, or NULL. */
struct vring_inflight *inflight_of(struct vhost_device *d, unsigned queue, uint32_t num);
