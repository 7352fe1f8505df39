/* SPDX-License-Identifier: MIT */
/*
 * rbd:POOL[/NAMESPACE]/IMAGE[@SNAP] — an image in a Ceph cluster, through librbd.
 *
 * Reads and changes use librbd's asynchronous calls. Completions are announced on an eventfd, which the reactor watches, and taken by
 * rbd_poll_io_events() on the reactor: no thread of librbd's ever runs code of ours. Calls that have no asynchronous form (connecting, opening, the
 * lock, metadata, resize, differences) run on the offload threads, one at a time for each image, so that a cluster that hangs holds one of them.
 *
 * Invariants
 *  (1) An open for writing holds the image's exclusive lock, unless locking=off. It is not taken from anybody alive: a client that holds it and answers a
 *      notification is left alone, whatever its policy. One that does not answer is waited for until the cluster gives it up, unless it was a process of
 *      this host that is dead.
 *  (2) Once the lock is known to be lost, or the client is fenced, or the image is gone, disk.fenced is set: no change is sent any more, by this
 *      disk or a layer above it. That is final until the disk is opened again.
 *  (3) A slot is busy from its submission until librbd has given its completion back, whether or not somebody still waits. What librbd may
 *      still write into belongs to the slot if its owner may leave: with error-after, reads go through a buffer of the slot's. Writes are copied by librbd.
 *  (4) Nothing is cached by librbd unless the operator asked for it. Without its cache a completed write is stable on all replicas: there is
 *      nothing volatile, and a flush costs nothing. With its cache, or its journal, or a plugin, each flush is a call to librbd.
 *  (5) Nothing is read or written beyond the size that librbd knows now: it would cut such a write short and call that success.
 *
 * The data path allocates nothing here: slots and buffers are there from the open on. (librbd allocates for each request.)
 */
#pragma once

#include "backend/rbd_api.h"
#include "blk/disk.h"
#include "rt/watch.h"

#define RBD_SLOTS 256
#define RBD_MAP_EXTENTS 128
#define RBD_MARK_KEY "weir.mark"
#define RBD_PROCESS_MAX 128

struct rbd_disk;

struct rbd_wait {
	struct co *co;
	bool done, given_up;
	ssize_t result;
};

struct rbd_slot {
	struct rbd_disk *r;
	struct list node;	/* r->free, or r->busy in the order of submission */
	struct rbd_wait *wait;	/* on the stack of who waits; NULL: nobody does any more */
	uint64_t since_ns;
	void *bounce;		/* invariant (3); from r->bounces */
	struct iovec iov;
};

/* What is allocated in [off, end), as of `changes`. */
struct rbd_map {
	bool valid;
	uint64_t off, end, changes;
	unsigned n;
	struct { uint64_t off, len; } data[RBD_MAP_EXTENTS];
};

struct rbd_disk {
	struct disk disk;	/* first */
	struct disk_ops ops;
	const struct rbd_api *api;
	char *pool, *ns, *image, *snap; /* ns and snap may be NULL */
	char id[64], header[96]; /* of the image; its header object */
	rados_t cluster;
	rados_ioctx_t io;
	rbd_image_t img;
	int efd;
	struct rt_watch *watch;
	struct rbd_slot slot[RBD_SLOTS];
	struct list free, busy;
	struct co_queue slot_wait, buf_wait, idle;	/* who waits for a place, for a buffer of a read that may be given up, for the end of all */
	struct rt_bufpool *bounces;
	struct rbd_map map;
	uint64_t changes;	/* submitted */
	uint64_t size;		/* invariant (5); disk.size is what the layers above know */
	uint64_t obj_size, features;
	uint64_t piece;		/* so many bytes, from a multiple of it on, lie in one object: less than obj_size in an image that is striped */
	/* who had the lock: rbd_writer.c */
	bool marked;		/* the image carries a mark */
	uint64_t writers, generation;
	char witness[96];	/* the object that remembers it */
	bool locking, locked, volatile_cache, has_cache;
	/* the cluster hangs */
	uint64_t error_after_ns; /* 0: pause */
	bool told_hang;
	uint64_t given_up;	/* requests that were */
	struct rt_timer tick;
	/* the watch over lock and size */
	struct co_mutex call_lock;
	struct co_queue call_wait;
	uint64_t call_since_ns;	/* a blocking call is running since; 0: none */
	bool closing, watching, told_size;
	struct co_queue watch_wait;
	uint64_t checked_changes;
	unsigned ticks;
	char why[160];		/* fenced: what happened */
	bool untold;		/* and nobody has been told yet */
};

static inline struct rbd_disk *rbd_of(struct disk *d)
{
	return container_of(d, struct rbd_disk, disk);
}

/* rbd.c */
extern const struct disk_ops rbd_ops;
int rbd_start_io(struct rbd_disk *r, struct err *err);	/* after the open: slots, eventfd */
void rbd_arm_tick(struct rbd_disk *r);
/* How long the oldest request or call has been waiting; 0: none. */
uint64_t rbd_waiting_ns(const struct rbd_disk *r);

/* rbd_call.c: one blocking call at a time */
co_fn int co_rbd_call(struct rbd_disk *r, int (*fn)(void *arg), void *arg);
co_fn int co_rbd_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret);
co_fn int co_rbd_resize(struct disk *d, uint64_t size);
co_fn int co_rbd_mark_get(struct disk *d, char *buf, size_t size);
co_fn int co_rbd_mark_set(struct disk *d, const char *mark, struct err *err);
/* Looks now and then whether the lock is still there and the size is the same. */
co_fn void co_rbd_watcher(void *arg);
/* Invariant (2): `error` of a change, or why it is known. At once; what is said about -EROFS, which is also what is left of an image that has been removed, waits for a look at it. */
void rbd_fence(struct rbd_disk *r, int error);
/* What is still to be said. */
void rbd_tell_fence(struct rbd_disk *r);

/* rbd_lock.c */
/* For behind a message about `error`: what the user would need, if it is that it may not. */
const char *rbd_needs_caps(int error);
co_fn int co_rbd_take_lock(struct rbd_disk *r, uint64_t timeout_ns, struct err *err);

/* rbd_writer.c; the plain functions block, and belong on an offload thread */
co_fn int co_rbd_writers(struct disk *d, uint64_t *ret);
int rbd_look_at_writers(struct rbd_disk *r, const char *owner);	/* before the lock is taken; `owner`: who dead has it, or "" */
/* The process id, if `owner` was a process of this host that is certainly dead; else 0. */
int rbd_owner_died_here(struct rbd_disk *r, const char *owner);
int rbd_sign(struct rbd_disk *r);	/* with the lock, or when the mark is set */
int rbd_unsign(struct rbd_disk *r);	/* the mark is removed */
void rbd_release(struct rbd_disk *r);	/* gives the lock up, before the close */

/* rbd_process.c */
void rbd_process_name(char *buf, size_t size);	/* of this one; RBD_PROCESS_MAX suffice */
int rbd_process_is_dead(const char *name);	/* its id; 0: alive, or cannot be told */

/* rbd_open.c */
co_fn void co_rbd_close(struct disk *d);
