/* SPDX-License-Identifier: MIT */
/*
 * Write log: interval map from ranges of a volume to records of the log. Pure code.
 *
 * Invariants
 *  (1) entries of one map do not overlap; they lie in a red-black tree by offset;
 *  (2) a later insertion takes its range from what was there, so the map holds the newest version of each byte;
 *  (3) each entry is on the list of its batch, so a batch with an empty list is not needed by any map.
 *
 * Entries come from a pool of fixed size, so that an insertion can fail (-ENOSPC) and never allocates.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "util/list.h"
#include "util/rbtree.h"

/* One batch of the log, from the moment it is opened for appending until the tail has passed it. */
struct wl_batch {
	struct list node;	/* wlog.batches, in ring order */
	struct list entries;	/* wl_entry.on_batch */
	uint64_t seq, pos, prev, nonce, wall;
	uint8_t *buf;		/* the whole batch in memory, or NULL */
	uint32_t length;
	uint32_t pins;		/* readers of its place on the device */
	bool more, written, applied;
};

struct wl_map;

struct wl_entry {
	struct rb_node node;
	struct list on_batch;
	struct list fifo;	/* ordered destage: wlog_volume.fifo; else unused */
	struct wl_map *map;	/* NULL: on a fifo */
	struct wl_batch *batch;
	uint64_t off, len;	/* bytes of the volume */
	uint64_t rno, epoch;
	uint32_t data;		/* where the bytes of `off` are, from the start of the batch */
	uint32_t rec_data, rec_len, rec_crc; /* the whole record, for its checksum */
	uint16_t volume;	/* slot */
	uint8_t type;		/* enum wl_type */
};

struct wl_map {
	struct rb_tree tree;
	uint64_t bytes;		/* covered by writes (zeroes and discards count as 0) */
	uint64_t entries;
};

struct wl_pool {
	struct wl_entry *base;
	struct wl_entry *free;	/* linked through node.right */
	struct wl_chunk *chunks; /* what wl_pool_grow() added */
	uint64_t cap, extra, used, fresh; /* fresh: entries of `base` never used yet, so their memory is untouched */
};

int wl_pool_init(struct wl_pool *p, uint64_t cap);
void wl_pool_fini(struct wl_pool *p);
struct wl_entry *wl_pool_get(struct wl_pool *p);	/* NULL when empty */
void wl_pool_put(struct wl_pool *p, struct wl_entry *e);
/* Sees to it that `n` entries can be had, beyond `cap` if need be: for recovery, which must take in whatever the log holds. -ENOMEM. */
int wl_pool_grow(struct wl_pool *p, uint64_t n);
/* Entries that can be had. */
static inline uint64_t wl_pool_left(const struct wl_pool *p)
{
	return p->cap + p->extra - p->used;
}
/* Entries below the cap. */
static inline uint64_t wl_pool_free(const struct wl_pool *p)
{
	return p->used < p->cap ? p->cap - p->used : 0;
}

void wl_map_init(struct wl_map *m);
/* The first entry that ends behind `off`, or NULL. */
struct wl_entry *wl_map_find(const struct wl_map *m, uint64_t off);
struct wl_entry *wl_map_next(const struct wl_entry *e);

/*
 * Inserts a range; `tmpl` gives off, len, batch, data, type, rno, epoch and the record. What it overlaps is cut away; with `only_newer` pieces whose rno is
 * higher stay, and the new range fills in around them. -ENOSPC when the pool is empty: the map is then unchanged, except with
 * `only_newer`, where a part may be in.
 */
int wl_map_insert(struct wl_map *m, struct wl_pool *p, const struct wl_entry *tmpl, bool only_newer);

/*
 * Removes from [off, off+len) what lies in batches up to `max_seq` and has record numbers up to `max_rno`. A piece whose removal needs an entry that the pool does not
 * have stays. Returns the bytes of data removed.
 */
uint64_t wl_map_remove(struct wl_map *m, struct wl_pool *p, uint64_t off, uint64_t len, uint64_t max_seq,
		       uint64_t max_rno);
/* A copy on no map, but on its batch's list; NULL when the pool is empty. Give it back with wl_pool_put(). */
struct wl_entry *wl_entry_clone(struct wl_pool *p, const struct wl_entry *from);
void wl_map_erase(struct wl_map *m, struct wl_pool *p, struct wl_entry *e);
void wl_map_clear(struct wl_map *m, struct wl_pool *p);
/* True if the whole range is covered by nothing of this map. */
bool wl_map_is_clear(const struct wl_map *m, uint64_t off, uint64_t len);
