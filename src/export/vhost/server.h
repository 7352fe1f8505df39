/* SPDX-License-Identifier: MIT */
/*
 * vhost-user-blk server: each Unix socket is one virtio-blk device for one virtual machine. The design note is in internal.h.
 */
#pragma once

#include <stdint.h>

#include "blk/volume.h"

struct file_access;
struct vhost_server;

struct vhost_device_config {
	const char *path;	/* of the socket */
	const struct file_access *access; /* only while it is added; NULL: as the umask leaves it */
	struct volume *volume;	/* the caller's; outlives the server */
	unsigned queues;	/* offered at most; 0: 64 */
	uint32_t block_size;	/* logical; 0: 512 */
	const char *serial;	/* NULL: the volume's name */
	unsigned max_in_flight;	/* requests; 0: 512 */
};

int vhost_server_create(struct vhost_server **ret, struct err *err);
/* After co_vhost_server_stop(). NULL is fine. */
void vhost_server_destroy(struct vhost_server *s);

/* Adds a device and listens. A stale socket is replaced, a live one is -EADDRINUSE. */
co_fn int co_vhost_server_add(struct vhost_server *s, const struct vhost_device_config *config, struct err *err);

/* Serves one front end on a socket that is connected already, until it leaves; closes `fd`. The device is none of the server's list. */
co_fn int co_vhost_server_serve(struct vhost_server *s, const struct vhost_device_config *config, int fd, struct err *err);

/*
 * Takes no more requests from the rings; those in flight are completed until `deadline_ns` (rt_now_ns() time), and the connections end. What is still in
 * the rings waits for the next server. -ETIMEDOUT if requests are still in flight, because a volume hangs: the server must not be destroyed then.
 */
co_fn int co_vhost_server_stop(struct vhost_server *s, uint64_t deadline_ns);

/* json_t array, new reference: a device each. */
void *vhost_server_status(struct vhost_server *s);
/* The path of the i-th socket; NULL beyond the last. */
const char *vhost_server_path(struct vhost_server *s, unsigned i);
/* Whether a front end is connected to any. */
unsigned vhost_server_connections(const struct vhost_server *s);
