/* SPDX-License-Identifier: MIT */
/*
 * The read cache: one in a process, shared by its volumes, within one memory budget.
 *
 * Each volume has a layer of it, a disk over the image that serves reads from memory and reads what is missing from below in whole blocks. Writes go to the
 * image and, once they have succeeded, into the blocks that are cached; nothing dirty is ever held here. So a flush is the image's, and to lose the
 * cache loses nothing. Writes bring nothing in: where a write log lies above, what is dirty there is not cached a second time, and a block
 * that was cached before it was written is brought up to date by the destage.
 *
 * Reads with DISK_METADATA are of class metadata (a format's own tables); all others are data. Background reads are not cached.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "blk/disk.h"
#include "util/uuid.h"

struct budget;
struct cache;
struct err;

#define CACHE_MAX_VOLUMES 128
#define CACHE_BLOCK 4096u

enum cache_mode { CACHE_NONE, CACHE_ONLY_METADATA, CACHE_ALL };
enum cache_class { CACHE_DATA, CACHE_METADATA, CACHE_CLASSES };

struct cache_config {
	uint64_t size;		/* bytes of memory, all included */
	uint64_t most;		/* what others may leave it later, beyond `size`; 0: no more than that */
	uint32_t block;		/* 0: CACHE_BLOCK; a power of two, 512..65536 */
	uint32_t chunk;		/* unit in which memory is taken and given back; 0: 2 MiB */
	bool s3fifo;		/* instead of ARC */
	bool no_read_ahead;
	unsigned curve_samples;	/* of each volume's miss-ratio curve; 0: 2048 */
	unsigned metadata_floor_pct, metadata_ceiling_pct; /* 0: 3 and 25 */
	struct budget *budget;	/* that its memory comes out of, within `size`; NULL: none (rt/budget.h) */
};

#define CACHE_SMALLEST (4ull << 20)	/* that works with chunks of the usual size */

/* -EINVAL if the size is too small to be of use. */
int cache_create(const struct cache_config *config, struct cache **ret, struct err *err);
void cache_destroy(struct cache *c);	/* NULL is fine; no layer may be left */

/* All layers are about to be closed: none need give its blocks back one by one. Nothing is cached any more. Plain function. */
void cache_end(struct cache *c);

/* A layer over `file`, which it takes over on success. The name is for figures. */
co_fn int co_cache_attach(struct cache *c, const char *name, struct disk *file, enum cache_mode mode, struct disk **ret, struct err *err);

/*
 * The same below an image format, where its tables are read (DISK_METADATA): they are cached unless the mode is none, and data, which the layer above the
 * format caches, never is.
 */
co_fn int co_cache_attach_tables(struct cache *c, const char *name, struct disk *file, enum cache_mode mode, struct disk **ret, struct err *err);

/*
 * A layer over an image that several layers of this cache read from, directly or through formats (disk_share()). Those do not keep what it keeps, so that it is in
 * memory once, and count as `shared` what they found there. It begins with mode none.
 */
co_fn int co_cache_attach_shared(struct cache *c, const char *name, struct disk *file, struct disk **ret, struct err *err);

/* What is cached of the disk (a layer) from now on; what no longer may be is freed before it returns. */
co_fn void co_cache_set_mode(struct disk *d, enum cache_mode mode);
/*
 * `share`: bytes that others cannot take from the volume once it has them. `limit`: bytes that it has at most; 0: no limit. -EINVAL if all shares together are
 * more than three quarters of the cache, or the share is above the limit.
 */
co_fn int co_cache_set_limits(struct disk *d, uint64_t share, uint64_t limit, struct err *err);
/* No layer is closed between the two: who holds one by its address and may suspend. Plain functions. */
void cache_hold(struct cache *c);
void cache_release(struct cache *c);
void cache_get_limits(struct disk *d, uint64_t *ret_share, uint64_t *ret_limit);
/*
 * A new budget, at most `most` of its configuration. Evicts and gives memory back before it returns, within a fraction of a second: a read from below that hangs
 * keeps the chunk of memory (2 MiB) that it goes to.
 */
co_fn int co_cache_resize(struct cache *c, uint64_t size, struct err *err);
/* Whether an operator may ask for it: at most what it was started with. -EINVAL. */
int cache_check_size(const struct cache *c, uint64_t size, struct err *err);
/* Gives back what such reads have kept, once they have ended. */
co_fn void co_cache_keep_budget(struct cache *c);

/* --- The second level: see docs/format-cache.md and second.h --- */

struct cache_device_config {
	uint64_t rate;		/* bytes written per second; 0: 64 MiB */
	uint64_t settle_ns;	/* how long a volume rests before its contents are made to outlast a crash; 0: 5 s */
};

struct cache_device_info {
	struct uuid uuid;
	uint64_t size, wall_ns;
	uint32_t segment_size, segments;
	unsigned volumes;
	struct cache_device_volume {
		char name[64];
		uint64_t size, wall_ns;
		bool settled;
	} volume[120];
};

/* What is on the device is lost. segment_size 0: 1 MiB. */
co_fn int co_cache_device_format(struct disk *dev, uint32_t segment_size, struct err *err);
/* -EINVAL if it is none, -EBADMSG if it is damaged. */
co_fn int co_cache_device_read(struct disk *dev, struct cache_device_info *ret, struct err *err);
/* Takes `dev` over on success. Before any layer is attached. */
co_fn int co_cache_add_device(struct cache *c, struct disk *dev, const struct cache_device_config *config, struct err *err);
/* All layers are attached: those that come later have no second level. */
co_fn void co_cache_start_device(struct cache *c);
/* All layers are closed. Waits for what the device owes. */
co_fn void co_cache_close_device(struct cache *c);
/* What of the disk (a layer) goes to the second level, and comes from there. Plain functions. */
void cache_set_secondary(struct disk *d, enum cache_mode mode);
bool cache_has_device(const struct cache *c);

/* What it is allowed to take now, and the least and the most that co_cache_resize() would accept. */
uint64_t cache_size(const struct cache *c);
uint64_t cache_least(const struct cache *c);
uint64_t cache_most(const struct cache *c);
/* What its volumes were promised, and how it is used: blocks looked for, those that were not there (read ahead or not), and those of them that a larger cache would have had. */
uint64_t cache_shares(const struct cache *c);
struct cache_use {
	uint64_t reads, misses, ghost_hits;
};
void cache_get_use(const struct cache *c, struct cache_use *ret);
/* What of the budget is its own: what it takes, or its floor. */
uint64_t cache_committed(const struct cache *c);
/* Bytes of memory that the cache takes now, all included; never above its budget but while co_cache_resize() is making it smaller. */
uint64_t cache_memory(const struct cache *c);
/* json_t objects, new references. */
void *cache_status(struct cache *c);
void *cache_curve(struct disk *d);

const char *cache_mode_name(enum cache_mode mode);
/* -EINVAL if it is none. */
int cache_mode_parse(const char *name, enum cache_mode *ret);
