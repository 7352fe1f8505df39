/* SPDX-License-Identifier: MIT */
/*
 * The graph of the volumes that one process serves: images, the read cache and the write log that they share, volumes.
 * The one place where layers meet.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "blk/volume.h"
#include "cache/cache.h"
#include "daemon/shared.h"
#include "wlog/wlog.h"

#define GRAPH_MAX_VOLUMES WLOG_MAX_VOLUMES
#define GRAPH_MAX_TABLES 8

struct graph_config {
	const char *const *disks;	/* DISK strings */
	unsigned ndisks;
	const char *const *names;	/* in the order of the disks; the rest get the base name of the path */
	unsigned nnames;
	const char *const *logs;	/* none, one, or two that mirror each other */
	unsigned nlogs;
	bool read_only;
	enum volume_sync sync;
	struct wlog_config log;
	struct wlog_volume_config volume;
	uint64_t cache_size;		/* of the read cache; 0: none */
	uint64_t cache_most;		/* what other reactors may lend it, all in all; 0: nothing */
	enum cache_mode primarycache;
	const char *cache_device;	/* its second level, a DISK string; NULL: none */
	struct cache_device_config cache_device_config;
	enum cache_mode secondarycache;
};

struct graph {
	struct wlog *log;		/* NULL without */
	struct cache *cache;		/* NULL without */
	struct shared_images shared;	/* backing images, in common */
	struct volume *volumes[GRAPH_MAX_VOLUMES];
	struct disk *tables[GRAPH_MAX_VOLUMES][GRAPH_MAX_TABLES]; /* and those below its format */
	struct disk *opened[GRAPH_MAX_VOLUMES]; /* what its DISK string says, below cache and log */
	struct disk *cached[GRAPH_MAX_VOLUMES]; /* the cache's layer of each, inside its graph; NULL without */
	unsigned n;
};

/* Opens everything, in the order of the configuration. Nothing stays open on failure. `budget`: that the cache's memory comes out of; NULL: of none. */
co_fn int co_graph_open(struct graph *g, const struct graph_config *config, struct budget *budget, struct err *err);
/* Commits what is in memory and closes. Nothing must be in flight. Returns the first error, which is logged. */
co_fn int co_graph_close(struct graph *g);

/*
 * Makes durable what clients were told is written: a flush of each volume, all at once, until `deadline_ns`. -ETIMEDOUT if a volume has not
 * come back by then (`hung` names it): nothing below it may be closed.
 */
co_fn int co_graph_commit(struct graph *g, uint64_t deadline_ns, const char **hung);
/* Gives the log's mirror `device` (a DISK string; NULL: the side that is out) as a new side, as co_wlog_rebuild() does. */
co_fn int co_graph_rebuild_log(struct graph *g, const char *device, bool force, struct err *err);
/* Sets what is cached of volume `i`. */
co_fn void co_graph_set_primarycache(struct graph *g, unsigned i, enum cache_mode mode);
void graph_set_secondarycache(struct graph *g, unsigned i, enum cache_mode mode);
/* The size of volume `i` if its image was made larger from outside, else 0. */
uint64_t graph_grown(const struct graph *g, unsigned i);
/* Lets layers that wait for something give up. */
void graph_cancel(struct graph *g);

/* The name of a volume if none is given, from its DISK string: the last part of the path, or the driver's name. -EINVAL if the string is none. */
int graph_default_name(const char *disk, char *buf, size_t size, struct err *err);
struct volume *graph_find(const struct graph *g, const char *name);
