/* SPDX-License-Identifier: MIT */
/*
 * A volume: a named virtual disk as exports see it. Gate, sync mode, latency figures.
 *
 * Every request of every export of a volume passes here. The gate counts requests in flight and can be closed
 * (resize, detach, shutdown): new ones wait, the closer waits until the rest are done.
 */
#pragma once

#include "blk/disk.h"
#include "util/hist.h"

enum volume_sync {
	VOLUME_SYNC_STANDARD,	/* as the guest asks */
	VOLUME_SYNC_ALWAYS,	/* each write is FUA */
	VOLUME_SYNC_DISABLED,	/* flushes and FUA are ignored: said wherever the volume is shown */
};

struct volume {
	struct list node;
	char *name;
	char *description;	/* may be NULL */
	struct disk *disk;	/* the top of the graph, owned */
	bool read_only;
	enum volume_sync sync;
	/* gate */
	bool closed;
	unsigned in_flight;
	struct co_queue gate, idle;
	/* figures */
	struct hist latency[DISK_OPS];
	uint64_t opened_ns;
	void (*resized)(struct volume *v, void *arg); /* exports that can tell their clients */
	void *resized_arg;
};

int volume_create(const char *name, struct disk *disk, struct volume **ret, struct err *err);
co_fn void co_volume_destroy(struct volume *v);	/* closes the disk */

co_fn int co_volume_readv(struct volume *v, uint64_t off, const struct iovec *iov, int niov);
co_fn int co_volume_writev(struct volume *v, uint64_t off, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_volume_flush(struct volume *v);
co_fn int co_volume_discard(struct volume *v, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_volume_zero(struct volume *v, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_volume_extent(struct volume *v, uint64_t off, uint64_t len, struct disk_extent *ret);
co_fn int co_volume_prefetch(struct volume *v, uint64_t off, uint64_t len);

/* Closes the gate and waits until nothing is in flight; open lets the waiting requests go on. */
co_fn void co_volume_gate_close(struct volume *v);
void volume_gate_open(struct volume *v);
/* Grows or shrinks with the gate closed, and tells the exports. */
co_fn int co_volume_resize(struct volume *v, uint64_t size, struct err *err);
/* json_t object, new reference. */
void *volume_status(struct volume *v);
void *volume_stats(struct volume *v);
