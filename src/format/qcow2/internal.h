/* SPDX-License-Identifier: MIT */
/*
 * qcow2 driver, inside: what its files share.
 *
 *   open.c     open and close; backing.c: the files that an image names; driver.c: DISK strings
 *   table.c    blocks of L2 tables and refcount blocks in memory; dense.c: L2 tables as runs
 *   map.c      L1, L2: where a guest cluster lies
 *   alloc.c    reserve of free clusters, refcounts, what was freed; refcount.c: growing the refcount structures
 *   tidy.c     giving back in time what a crash would leak
 *   read.c     reads and extents; inflate.c: compressed clusters
 *   write.c    writes; fill.c: copy-on-write
 *   space.c    discard and write zeroes; resize.c
 *   flush.c    flush, and its order
 *
 * Crash safety rests on these invariants, at every instant, whatever a cut leaves:
 *
 *  (1) Every cluster of the reserve has refcount 1 on stable media, nothing refers to it, and it reads as zeroes there.
 *      New clusters come only from the reserve. So a cut leaks at most the reserve, and what was freed and waits for (3); and no reference without
 *      a refcount ever reaches the disk.
 *  (2) Where the old content of a cluster is zeroes, its L2 entry may reach the disk before its data: what is not there yet reads as
 *      the old content. Where it is not (copy-on-write), data and padding are complete, and then on stable media, before the entry is
 *      written: such entries raise q->barrier, and the next flush of tables begins with a flush of the data.
 *  (3) A refcount is lowered, and a hole punched, only when the table that has lost the reference is on stable media and every request
 *      that was in flight when it was lost has ended.
 *  (4) Table blocks go to disk only in flush.c, from copies made at one instant: what changes meanwhile waits for the next flush.
 *
 * In memory:
 *
 *  (5) The mapping of a cluster with a fill (fill.c) is changed by the fill alone; who wants to change it otherwise finishes the fill first.
 *  (6) Between a look at a table block and the change that follows from it nothing suspends.
 *  (7) Locks: alloc_lock (refcounts) before nothing; flush_lock (tables to disk) and table loads are never waited for with alloc_lock held.
 */
#pragma once

#include "blk/disk.h"
#include "format/qcow2/format.h"
#include "format/qcow2/qcow2.h"
#include "rt/sync.h"

#define Q2_FREED_MAX 65536u
#define Q2_FREED_SPARE 256u	/* for what is not a request: growing a table */
#define Q2_FREED_RUN 4096u
#define Q2_STEP 4096u		/* clusters that a request may change at once */
#define Q2_RUNS 64u
#define Q2_FRESH 128u
#define Q2_L1_CHUNK 4096u
#define Q2_IOV 32
#define Q2_MAX_DEPTH 16

/* --- Tables: table.c --- */

struct q2_slot {
	uint64_t off;		/* in the image; 0: free */
	uint32_t next;		/* in its hash chain, + 1 */
	uint64_t gen;		/* the flush of tables that covers its last change */
	struct list dirty_node;	/* on the cache's dirty list, if dirty */
	bool dirty, loading, writing, used;
};

#define Q2_DENSE_RUNS 7u
#define Q2_DENSE_MAX 65536u	/* places, 4 MiB: twice what 1 TiB in clusters of 64 KiB has */

struct q2_dense {
	uint64_t off_n;		/* where the block lies, and in the low bits how many runs it has; 0: free */
	uint64_t run[Q2_DENSE_RUNS];
};

struct q2_cache {
	struct q2_slot *slot;
	uint32_t *hash, *order;	/* order: room for sorting */
	uint8_t *data, *shadow;	/* cap blocks each; the shadow is touched by flushes only */
	uint32_t cap, mask, hand, block, ndirty;
	uint64_t gen;		/* the next flush of tables */
	struct list dirty;
	struct co_queue wait;
	uint64_t changes;	/* of what the image has, or is going to have */
	struct q2_dense *dense;	/* NULL: not of these tables */
	uint32_t dense_mask, cluster_bits, barren; /* barren: loads with neighbours of which none was dense, in a row */
};

/* --- Runs of clusters --- */

struct q2_run {
	uint64_t first, n;	/* clusters of the image */
};

struct q2_freed {
	uint64_t first, n;
	uint64_t gen, seq;	/* the flush of tables, and the requests, that must have ended: invariant (3) */
};

/* A request in flight that looks at mappings. On the stack of the request. */
struct q2_req {
	struct list node;
	uint64_t seq;
	uint32_t frees;		/* that it may cause, which there is room for */
};

/* --- Fills: fill.c --- */

struct q2_fill {
	struct list node;	/* in order of creation, or on the free list */
	struct co_queue q;
	uint64_t cluster;	/* of the guest */
	uint64_t host;		/* where it is being put together */
	uint64_t *bits;		/* units that are there */
	uint32_t next;		/* in its hash chain, + 1 */
	uint32_t present, writers;
	uint64_t started;	/* a bit for each subcluster (without them: one) that was written to */
	uint64_t merging;	/* of these: which are written whole, together with their old content */
	bool sparse;		/* nothing but what is written has to be there */
	bool own;		/* host is the cluster of the present entry: only subclusters are added */
	bool zeroed;		/* what is not there reads as zeroes at host */
	bool padding;
};

/* --- Decompression: inflate.c --- */

struct q2_inflater;

struct qcow2 {
	struct disk disk;	/* disk.file is the image */
	struct qcow2_header h;
	struct qcow2_geo g;
	struct disk *backing;
	struct disk *data;	/* the data file, or disk.file */
	bool has_data_file, raw_data_file, growable;
	uint64_t run_ahead;

	uint8_t *l1, *l1_shadow; /* as on disk, h.l1_size entries, padded to whole chunks */
	uint64_t l1_chunks, *l1_dirty;
	bool any_l1_dirty;
	uint8_t *rt;		/* the refcount table, as on disk */
	uint64_t rt_entries;
	struct q2_cache l2, rc;
	uint64_t *meta;		/* set of clusters that hold metadata: open addressing, cluster + 1 */
	uint64_t meta_cap, meta_n;
	uint64_t overlap;	/* where two tables lie, 0: nowhere */

	/* requests */
	struct list reqs;
	uint64_t seq;
	bool header_ready;	/* autoclear bits are cleared: writing may begin */
	struct co_mutex header_lock;

	/* alloc.c */
	struct co_mutex alloc_lock;
	struct q2_run reserve[Q2_RUNS];
	unsigned nreserve;
	uint64_t reserved, frontier, free_hint;
	uint64_t demand;	/* clusters that were taken from the reserve lately: tidy.c */
	struct q2_run fresh[Q2_FRESH];
	unsigned nfresh, fresh_next;
	bool shrink_told;
	struct q2_freed *freed;	/* a ring */
	unsigned freed_at, nfreed, promised;
	struct co_queue freed_room;
	bool refilling, warned_leak;
	bool no_ahead;		/* space is short: clusters are reserved when they are needed */
	struct co_queue background;

	/* tidy.c */
	struct rt_timer tidy_timer;
	uint64_t tidy_ns, tidy_gen; /* meta_gen when the timer looked last */
	bool tidying, closing;

	/* fill.c */
	struct q2_fill *fill;
	uint32_t *fill_hash, fill_mask, fill_cap, fill_used, nfills, units, unit_bits, fillers;
	uint64_t *fill_bits;
	struct list fills, idle_fills;
	struct rt_timer idle_timer;
	uint64_t fills_made, fills_seen; /* now, and when the timer looked last */
	struct co_queue fill_room;
	void *pad_reserve;
	struct co_mutex pad_lock;

	/* flush.c */
	struct co_mutex flush_lock, table_lock;
	uint64_t meta_gen, durable_gen, l1_gen, flush_ticket, flush_covered;
	bool barrier;

	struct q2_inflater *inflater;
	struct {
		uint64_t in_place, fresh, filled, pad_bytes, flushes, barriers, table_writes, l2_loads, leaked;
	} count;
};

static inline struct qcow2 *q2_of(struct disk *d)
{
	return (struct qcow2 *)d;
}

/* --- table.c --- */

int q2_cache_init(struct q2_cache *c, uint32_t cap, uint32_t block);
void q2_cache_fini(struct q2_cache *c);
/* NULL if it is not there (or being loaded). */
void *q2_table_find(struct q2_cache *c, uint64_t off);
/* Loads the block at `off` of the image; a block beyond its end is zeroes. *ret is valid until the next suspension. *suspended is set if it suspended. */
co_fn int co_q2_table_get(struct qcow2 *q, struct q2_cache *c, uint64_t off, void **ret, bool *suspended);
/* A block known to be all zeroes on disk: not read. Fails (false) where there is no room without waiting. */
bool q2_table_zero(struct q2_cache *c, uint64_t off);
void q2_table_dirty(struct q2_cache *c, void *block);
/* The gen of the block that `at` points into. */
uint64_t q2_table_gen(const struct q2_cache *c, const void *at);
/* Forgets the clean blocks of a range. */
void q2_table_forget(struct q2_cache *c, uint64_t off, uint64_t len);
/* Writes all dirty blocks as they are (from=data) or as they were when q2_cache_snapshot() was called. */
co_fn int co_q2_cache_write(struct qcow2 *q, struct q2_cache *c, uint32_t n, const uint8_t *from);
/* Moves the dirty blocks to c->order, sorted; they are clean then, and `writing`, copied to the shadow if asked. Returns their number. */
uint32_t q2_cache_snapshot(struct q2_cache *c, bool shadow);
void q2_cache_written(struct q2_cache *c, uint32_t n);

/* --- dense.c --- */

int q2_dense_init(struct q2_cache *c, uint64_t blocks, unsigned cluster_bits);
void q2_dense_fini(struct q2_cache *c);
/* Keeps a block that is as on disk and in no slot. False: it has too many runs. */
bool q2_dense_put(struct q2_cache *c, uint64_t off, const uint8_t *block);
/* Makes the block of it, which is not kept here any more. */
bool q2_dense_take(struct q2_cache *c, uint64_t off, uint8_t *block);
bool q2_dense_has(const struct q2_cache *c, uint64_t off);
void q2_dense_drop(struct q2_cache *c, uint64_t off);

/* --- map.c --- */

/* Reads of the image, where beyond its end there are zeroes. */
co_fn int co_q2_read_image(struct qcow2 *q, uint64_t off, void *buf, uint64_t len);
/*
 * The entries of the L2 table for `guest`: *ret points at the entry of its cluster in a block that holds *ret_n entries from there on, NULL if there is no table.
 * Valid until the next suspension.
 */
co_fn int co_q2_l2(struct qcow2 *q, uint64_t guest, uint8_t **ret, uint32_t *ret_n);
/* The same for a change: there is a table, and it is the active one's own. */
co_fn int co_q2_l2_own(struct qcow2 *q, uint64_t guest, uint8_t **ret, uint32_t *ret_n, bool *suspended);
void q2_l2_set(struct qcow2 *q, uint8_t *at, struct qcow2_l2e e);
enum qcow2_kind q2_kind(struct qcow2 *q, struct qcow2_l2e e, unsigned sub);
/* Whether what is unallocated at `guest` reads as zeroes, up to *ret_end. */
bool q2_unallocated_is_zero(struct qcow2 *q, uint64_t guest);
/* 0 if the cluster may be written in place as guest data; else the image is marked corrupt. */
co_fn int co_q2_check_host(struct qcow2 *q, uint64_t host, uint64_t guest);
/* Says why, sets the corrupt bit where that is possible, and fails the disk. Returns -EIO. */
co_fn int co_q2_corrupt(struct qcow2 *q, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int q2_meta_add(struct qcow2 *q, uint64_t off, uint64_t clusters);
void q2_meta_del(struct qcow2 *q, uint64_t off, uint64_t clusters);
bool q2_meta_has(const struct qcow2 *q, uint64_t off);
/* Writes the header's first fields anew, and flushes. */
co_fn int co_q2_write_header(struct qcow2 *q);
/* What must happen before the first change. */
co_fn int co_q2_ready_slow(struct qcow2 *q);
static inline co_fn int co_q2_ready(struct qcow2 *q)
{
	return q->header_ready ? 0 : co_q2_ready_slow(q);
}

static inline void q2_req_begin(struct qcow2 *q, struct q2_req *r)
{
	r->seq = ++q->seq;
	r->frees = 0;
	list_add_tail(&q->reqs, &r->node);
}

static inline void q2_req_end(struct qcow2 *q, struct q2_req *r)
{
	q->promised -= r->frees;
	list_del(&r->node);
	co_queue_wake_all(&q->freed_room);
}

/* --- alloc.c --- */

/* Up to `want` adjacent clusters of the reserve; 0 if it is empty. *ret_got >= 1. */
uint64_t q2_alloc(struct qcow2 *q, uint64_t want, uint64_t *ret_got);
/* Fills the reserve until it has something. */
co_fn int co_q2_refill(struct qcow2 *q);
/* Fills it in the background when it runs low. */
void q2_refill_ahead(struct qcow2 *q);
/* The references to these clusters are gone from a dirty table (or were never there). */
void q2_free(struct qcow2 *q, uint64_t off, uint64_t clusters);
void q2_free_entry(struct qcow2 *q, struct qcow2_l2e e);
/* Begins a request that changes `clusters` (at most Q2_STEP), when there is room for all that it and those before it may free. Not within a request. */
co_fn int co_q2_req_begin_change(struct qcow2 *q, struct q2_req *r, uint32_t clusters);
bool q2_is_fresh(const struct qcow2 *q, uint64_t host);
void q2_forget_fresh(struct qcow2 *q);
/* Lowers refcounts and punches holes where that is safe, for at most `most` runs. With alloc_lock held. */
co_fn int co_q2_reclaim(struct qcow2 *q, unsigned most);
/* Gives back all but `keep` clusters of the reserve, and cuts the file behind the last cluster. */
co_fn int co_q2_release(struct qcow2 *q, uint64_t keep);
/* How many clusters are kept in reserve: at rest, and now. */
uint64_t q2_reserve_least(const struct qcow2 *q);
uint64_t q2_reserve_wanted(const struct qcow2 *q);
co_fn int co_q2_find_frontier(struct qcow2 *q);
/* Makes a run that nobody uses read as zeroes. */
co_fn int co_q2_make_zero(struct qcow2 *q, uint64_t first, uint64_t n);

/* --- tidy.c --- */

/* There is something that a crash would leak. */
void q2_tidy_later(struct qcow2 *q);
void q2_tidy_end(struct qcow2 *q);

/* --- refcount.c; all with alloc_lock held --- */

co_fn int co_q2_refcount(struct qcow2 *q, uint64_t cluster, uint64_t *ret);
bool q2_has_block(const struct qcow2 *q, uint64_t cluster);
/* Adds `delta` (1 or -1). -EIO (and corrupt) below 0 or above the maximum. *ret_new is the last one's. */
co_fn int co_q2_refcount_add(struct qcow2 *q, uint64_t cluster, int delta, uint64_t *ret_new);
co_fn int co_q2_refcounts_write(struct qcow2 *q);
/* There is a refcount block for the cluster at q->frontier; the frontier moves on if that took clusters. */
co_fn int co_q2_cover_frontier(struct qcow2 *q);
/* Adjacent clusters with refcount 1, on stable media, that read as zeroes. */
co_fn int co_q2_alloc_adjacent(struct qcow2 *q, uint64_t clusters, uint64_t *ret_off);
/* The file reaches to the end of this many clusters. */
co_fn int co_q2_grow_file(struct qcow2 *q, uint64_t clusters);

/* --- read.c --- */

co_fn int co_q2_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_q2_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret);
/* What the tables say, without the fills. Within one cluster, up to its end (beyond the size there are zeroes). */
co_fn int co_q2_read_old(struct qcow2 *q, uint64_t off, void *buf, uint64_t len);
/* Describes [skip, skip + len) of a list; *ret_n entries of `v`, or the list itself if it is all of it. Returns the length that fits. */
uint64_t q2_slice(const struct iovec *iov, int niov, uint64_t skip, uint64_t len, struct iovec v[Q2_IOV], const struct iovec **ret, int *ret_n);

/* --- inflate.c --- */

co_fn int co_q2_inflate(struct qcow2 *q, uint64_t entry, uint32_t skip, const struct iovec *iov, int niov, uint64_t at, uint32_t len);
void q2_inflater_destroy(struct qcow2 *q);

/* --- write.c --- */

co_fn int co_q2_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_q2_write_data(struct qcow2 *q, uint64_t host, const struct iovec *iov, int niov, uint64_t skip, uint64_t len, unsigned flags);

/* Whether a write at `guest`, whose cluster has this entry, has to go into a fill. */
bool q2_needs_fill(struct qcow2 *q, struct qcow2_l2e e, uint64_t guest);
/* Some of a write, within a request; *ret_done may be 0: go on. *fua: it is to be on stable media; false then if it is not yet. */
co_fn int co_q2_write_piece(struct qcow2 *q, uint64_t off, uint64_t len, const struct iovec *iov, int niov, uint64_t skip, unsigned flags,
			    uint64_t *ret_done, bool *fua);

/* --- fill.c --- */

void *q2_untouched(size_t len);
void q2_untouched_free(void *p, size_t len);
int q2_fills_init(struct qcow2 *q, uint64_t debt);
void q2_fills_fini(struct qcow2 *q);
struct q2_fill *q2_fill_find_slow(struct qcow2 *q, uint64_t cluster);
static inline struct q2_fill *q2_fill_find(struct qcow2 *q, uint64_t cluster)
{
	return q->nfills ? q2_fill_find_slow(q, cluster) : NULL;
}
/* How long the run from `off` is (at most len) that is there, or is not. Within one cluster. */
uint64_t q2_fill_run(struct qcow2 *q, const struct q2_fill *f, uint64_t off, uint64_t len, bool *ret_there);
/* Writes within one cluster, into its fill, which is made if there is none. -EAGAIN: look at the mapping again. */
co_fn int co_q2_fill_write(struct qcow2 *q, uint64_t off, uint64_t len, const struct iovec *iov, int niov, uint64_t skip, unsigned flags);
/* Finishes the fills of a range of the guest; all of those that exist now if len is UINT64_MAX. */
co_fn int co_q2_fill_finish(struct qcow2 *q, uint64_t off, uint64_t len);

/* --- space.c, resize.c --- */

co_fn int co_q2_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_q2_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_q2_resize(struct disk *d, uint64_t size);
/* Makes the clusters of a range unallocated, whatever is below. Whole clusters. */
co_fn int co_q2_drop(struct qcow2 *q, uint64_t off, uint64_t len);

/* --- flush.c --- */

co_fn int co_q2_flush(struct disk *d);
/* The tables as they are now, in an order that is safe, and everything before them, on stable media. */
co_fn int co_q2_flush_tables(struct qcow2 *q);
void q2_l1_set(struct qcow2 *q, uint64_t index, uint64_t entry);

/* --- backing.c --- */

co_fn int co_q2_open_others(struct qcow2 *q, const struct qcow2_opts *o, unsigned flags, struct err *err);
