/* SPDX-License-Identifier: MIT */
/*
 * Read cache, inside: what its files share.
 *
 *   policy.h, arc.c, s3fifo.c, shards.c	pure: which blocks stay, what another size would do
 *   memory.c	slots of data memory
 *   cache.c	budget, life
 *   record.c	resident blocks: classes, shares, limits, eviction
 *   fill.c	reads in flight from below
 *   change.c	writes, zeroes and discards against what is cached
 *   ahead.c	sequential read-ahead
 *   layer.c	the disk
 *   shrink.c	giving memory back
 *   status.c	figures
 *   second.h	the second level
 *
 * Invariants
 *  (1) A block is resident in at most one class. Its record is on the chain of its volume and class, and owns a slot unless it is all zeroes.
 *  (2) What a resident block holds is what the image holds, as far as anybody can tell: a change goes to the image first, and when it returns the block
 *      is updated, or dropped if the change failed, overlapped another one in flight, or was not a plain write.
 *  (3) A fill that was in flight together with a change of one of its blocks never makes that block resident (it is doomed): it may hold
 *      either state. No read that begins later joins a doomed block.
 *  (4) Slots of a fill are MEM_HELD from its start until its last user has left; then they go to records or back. So nobody waits with a pointer
 *      into memory that could move.
 *  (5) A copy to or from a slot never suspends.
 *  (6) A slot that another layer's block was copied to as a whole carries a note (mem_note) until it is handed out again, and is not kept: that layer has it.
 *  (7) Nothing here waits for a slot: where none can be had, a read goes below uncached.
 */
#pragma once

#include "cache/cache.h"
#include "cache/memory.h"
#include "cache/policy.h"
#include "cache/second.h"
#include "cache/shards.h"
#include "rt/budget.h"
#include "rt/sync.h"
#include "util/bytes.h"

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#define KEY_BLOCK_BITS 44
#define KEY_BLOCKS (1ull << KEY_BLOCK_BITS)	/* of a disk; what lies behind them is not cached */
#define FILL_MAX 128u		/* blocks of one read from below */
#define FILLS 256u		/* in flight */
#define NARROW 64u		/* blocks of a change that is counted block by block */
#define CHANGE_COUNTS 4096u
#define STREAMS 8u
#define EVICT_TRIES 64u		/* for one slot: bounded */

/* --- Resident blocks --- */

#define REC_NONE UINT32_MAX
#define REC_SLOT 0x0fffffffu
#define REC_ZERO REC_SLOT	/* all zeroes, no slot */
#define REC_METADATA (1u << 31)
#define REC_AHEAD (1u << 30)	/* read ahead, and not used yet */
#define REC_USED (1u << 29)	/* hit since it was last looked at for its volume's limit */

struct cache_record {
	uint32_t entry;		/* of the policy; REC_NONE: free */
	uint32_t prev, next;	/* chain: head is the newest. Free: `next` is the next free one */
	uint32_t slot;		/* with the flags above */
};

/* With its entry in the policy, its share of the hash table, and the owner of its slot and the note on it. */
static_assert(sizeof(struct cache_record) + POLICY_ENTRY_BYTES + sizeof(uint32_t) + 1 <= 96, "a cached block costs at most 96 bytes");

/* --- Reads in flight --- */

struct cache_fill {
	struct cache_volume *v;
	uint64_t first;		/* block */
	uint32_t n;
	unsigned users;
	bool done, ahead;
	bool second;		/* its blocks come from the second level */
	int error;
	enum cache_class class;
	unsigned at;		/* its place in c->flying; of a free one: the next free */
	struct co_queue q;
	uint32_t slot[FILL_MAX];
	uint8_t state[FILL_MAX];	/* enum policy_ghost, and: */
};

#define FILL_GHOST 3u
#define FILL_DOOMED 4u		/* must not become resident */
#define FILL_AGAIN 8u		/* somebody joined */

/* What is in flight, in one place: looked through for each miss and each change. */
struct cache_flying {
	uint64_t first;		/* key */
	uint32_t n;
	uint32_t fill;
};

/* --- Changes in flight: on the stack of the request --- */

struct cache_change {
	struct list node;	/* on v->wide, if it is wide */
	uint64_t first, last;
	bool wide;
};

/* --- Volumes --- */

struct cache_stream {
	uint64_t next;		/* where the next read begins if it is sequential */
	uint64_t ahead;		/* up to where it was read ahead */
	uint64_t stamp;
	uint32_t window, runs;
};

struct cache_counters {
	uint64_t requests;	/* reads of the layer */
	uint64_t blocks;	/* that they touched */
	uint64_t hits, joined, misses;	/* of these */
	uint64_t bypassed;	/* misses that found no room and were not cached */
	uint64_t shared;	/* misses that another layer had in memory: see co_cache_attach_shared() */
	uint64_t ghost_hits, evicted, dropped, updated;
};

struct cache_volume {
	struct disk disk;
	struct cache *c;
	char *name;
	unsigned id;
	enum cache_mode mode;
	bool tables;		/* lies below a format: only metadata is ever cached */
	bool shared;		/* lies below several others, which do not keep what it keeps */
	bool closing;
	bool starting;		/* caching is about to begin: changes are announced */
	uint32_t slots;		/* held by records and fills */
	uint32_t share, limit;	/* slots */
	uint32_t records[CACHE_CLASSES], head[CACHE_CLASSES], tail[CACHE_CLASSES];
	unsigned fills;
	unsigned untracked;	/* changes in flight that began while nothing could be cached */
	struct co_queue idle;	/* fills or untracked became 0 */
	struct list wide;
	uint64_t last_block;	/* of the last read */
	struct cache_stream stream[STREAMS];
	uint64_t stream_clock;
	unsigned ahead_flying;
	int ahead_score, ahead_pause;
	uint64_t ahead_read, ahead_used, ahead_wasted; /* blocks */
	struct shards *shards;
	size_t shards_bytes;
	struct cache_counters count[CACHE_CLASSES];
	struct second_volume second;
};

struct cache {
	struct cache_config config;
	uint32_t chunks;	/* that the index is in use for: what lies behind costs no memory yet */
	uint64_t budget, fixed, curves;	/* bytes */
	struct budget_user user;
	uint64_t counted;	/* of what it holds: all but the chunks of data */
	uint32_t block, shift;
	struct policy policy[CACHE_CLASSES];
	struct cache_mem mem;
	struct cache_record *rec;
	uint32_t rec_max, rec_touched, rec_free;
	uint32_t slots[CACHE_CLASSES], zeros[CACHE_CLASSES];
	uint32_t floor, ceiling;	/* slots of metadata */
	uint32_t share_sum;
	struct cache_fill *fill;
	uint32_t fill_free;
	struct cache_flying flying[FILLS];
	unsigned n_flying;
	uint16_t changes[CHANGE_COUNTS];
	struct cache_volume *vol[CACHE_MAX_VOLUMES];
	struct co_mutex shrink_lock;
	uint64_t fills_ended, fills_seen; /* now, and when memory was last given back: their slots are MEM_HELD no more */
	bool ending;		/* records are left as they are, also those of volumes that are gone: nothing may be evicted */
	unsigned busy;		/* calls that change settings: no layer is closed under them */
	void *index;
	size_t index_bytes;
	struct second *second;	/* NULL: none */
};

static inline struct cache_volume *volume_of(struct disk *d)
{
	return container_of(d, struct cache_volume, disk);
}

static inline uint64_t cache_key(const struct cache_volume *v, uint64_t block)
{
	return (uint64_t)v->id << KEY_BLOCK_BITS | block;
}

static inline uint64_t key_block(uint64_t key)
{
	return key & ((1ull << KEY_BLOCK_BITS) - 1);
}

static inline struct cache_volume *key_volume(struct cache *c, uint64_t key)
{
	return c->vol[key >> KEY_BLOCK_BITS];
}

static inline bool cache_allows(const struct cache_volume *v, enum cache_class class)
{
	if (class == CACHE_METADATA)
		return v->mode != CACHE_NONE;
	return v->mode == CACHE_ALL && !v->tables;
}

/* --- cache.c --- */

/* After a change of what is allowed: floor, ceiling, the policies' capacities. */
void cache_recompute(struct cache *c);
/* The index is to be good for so many bytes. It never gets smaller. */
void cache_grow_index(struct cache *c, uint64_t size);

/* --- record.c --- */

/* The record of a resident block, whichever its class; REC_NONE. */
uint32_t record_find(struct cache *c, uint64_t key);
/* The block becomes resident with what `slot` (held; or REC_ZERO) holds. False if there is no room for a record. */
bool record_add(struct cache_volume *v, enum cache_class class, uint64_t block, enum policy_ghost ghost, uint32_t slot, unsigned flags);
/* No longer resident; its slot is free. `ghost`: it was evicted, and may be remembered. */
void record_drop(struct cache *c, uint32_t r, bool ghost);
/* A hit: tells the policy, unless it is the first use of a block that was read ahead. */
void record_hit(struct cache *c, uint32_t r, bool same_as_before);
/* A slot for the volume, evicting what must go; MEM_NONE if that is not possible. */
uint32_t slot_get(struct cache_volume *v, enum cache_class class, enum policy_ghost ghost);
void slot_put(struct cache_volume *v, enum cache_class class, uint32_t slot);
/* Evicts something, preferably of this class, for the volume (NULL: for nobody, shares do not count). False if nothing can go. */
bool record_evict(struct cache *c, struct cache_volume *v, enum cache_class class, enum policy_ghost ghost);

static inline enum cache_class record_class(const struct cache_record *r)
{
	return r->slot & REC_METADATA ? CACHE_METADATA : CACHE_DATA;
}

static inline bool record_is_zero(const struct cache_record *r)
{
	return (r->slot & REC_SLOT) == REC_ZERO;
}

static inline uint64_t record_key(const struct cache *c, const struct cache_record *r)
{
	return policy_key(&c->policy[record_class(r)], r->entry);
}

/* --- fill.c --- */

/* The fill in flight that will bring this block, not doomed; NULL. */
struct cache_fill *fill_find(struct cache_volume *v, uint64_t block);
/*
 * Prepares to read the longest run of at most `max` blocks from `first` on that are neither resident nor in flight, the first being so. NULL if no
 * memory can be had. `access`: somebody wants them now.
 */
struct cache_fill *fill_start(struct cache_volume *v, enum cache_class class, uint64_t first, uint64_t max, bool access);
/* Reads it from below and wakes who waits. */
co_fn void co_fill_run(struct cache_fill *f, unsigned flags);
/* Without having read: with an error. */
void fill_abort(struct cache_fill *f);
/* One user less; the last one makes its blocks resident. */
void fill_put(struct cache_fill *f);

/* --- change.c --- */

void change_begin(struct cache_volume *v, struct cache_change *ch, uint64_t off, uint64_t len);
/* `iov` is what was written if ret is 0; NULL: not a write. */
co_fn void co_change_end(struct cache_volume *v, struct cache_change *ch, uint64_t off, uint64_t len, int ret, const struct iovec *iov, int niov);
/* Whether a change of the block is in flight. */
bool change_in_flight(struct cache_volume *v, uint64_t block);
/* Drops resident blocks first..last; may suspend between two. */
co_fn void co_drop_range(struct cache_volume *v, uint64_t first, uint64_t last);
co_fn void co_drop_class(struct cache_volume *v, enum cache_class class);

/* --- ahead.c --- */

/* Notes a read of the guest and reads ahead if that seems worth it. True if it goes on where an earlier one ended. */
bool ahead_note(struct cache_volume *v, uint64_t off, uint64_t len);
void ahead_used(struct cache_volume *v);
void ahead_wasted(struct cache_volume *v);

/* --- shrink.c --- */

/* Evicts down to what is allowed, and gives memory back that is much more than needed. */
co_fn void co_shrink(struct cache *c);

extern const struct disk_ops cache_ops;
/* --- status.c --- */
void cache_volume_status(struct disk *d, void *obj);
