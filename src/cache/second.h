/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache, inside: a log-structured cache on a device of its own, fed by what leaves memory.
 *
 *   second_format.c	what lies on the device; pure
 *   second_index.c	which block lies where
 *   second_feed.c	what leaves memory: staging, and writing segments
 *   second_read.c	reading back
 *   second_scan.c	the index at start
 *   second_settle.c	what makes contents outlast the process
 *   second.c		life
 *
 * Nothing stale
 *
 *  (1) The index holds a block only if what lies at its place is what the image holds. A change takes the block out of the index before it goes to the
 *      image, and no block that a change in flight covers is taken in.
 *  (2) A volume is *settled* when the superblock says so together with the image's identity (struct disk_identity). What is on the device of a volume counts
 *      after a start only if it is settled there with the identity that the image has now.
 *  (3) To settle: the image is flushed, its identity taken; the headers of all segments that have lost blocks are written anew; the device is flushed;
 *      and if no change has begun meanwhile, the superblock is written. So on the device there is, of a settled volume, nothing that is not in the index.
 *  (4) The first change of a settled volume changes the image's identity, durably, before it goes to the image (co_disk_touch()). Where that fails, the
 *      superblock is told instead; where that fails as well, so does the change. So (2) holds at every instant, and no cut can leave
 *      a settled record over an image that has changed. So does the first change after a start, settled or not: no cut leaves what a process has
 *      written with an identity that the image had before, in a snapshot for instance.
 *  (5) An epoch is a random number. It belongs to one volume from the attach at which nothing was kept to the day that its contents are dropped.
 *  (6) A block's checksum covers its data, its number and its epoch, and is verified on each read.
 *  (7) Before a segment is written, both superblock slots say that volumes which have changed are not settled any more. So what is on the device of a
 *      settled volume is what the image held with that identity, also if a snapshot of its file system brings that one back.
 *
 * s->lock is held by who writes to the device (a segment, headers, the superblock). Nobody waits for the device but who reads from it, and that no longer
 * than READ_TIMEOUT_NS: then, or at the first error, the device is not used any more (`off`). Settled volumes keep (4) even then.
 */
#pragma once

#include "blk/disk.h"
#include "cache/cache.h"
#include "cache/second_format.h"
#include "rt/sync.h"

struct cache_fill;
struct cache_volume;

#define SECOND_NONE UINT32_MAX
#define SECOND_FREE 0ull	/* so that untouched memory is an empty index */
#define SECOND_STAGES 2u
#define SECOND_RUN 8u		/* blocks of one read */
#define SECOND_OPS 64u		/* reads in flight */
#define SECOND_FILTER (1u << 17) /* bits */

/* A place for a block, on the device or in a stage. */
struct second_slot {
	uint64_t key;		/* record number and block; SECOND_FREE */
	uint32_t chain;		/* the next of the bucket, plus one; 0: none */
	uint32_t crc;
};

#define SECOND_SLOT_BYTES (sizeof(struct second_slot) + sizeof(uint32_t))

enum stage_state { STAGE_FREE, STAGE_FILLING, STAGE_FULL, STAGE_WRITING };

/* A segment in the making. */
struct second_stage {
	char *mem;
	enum stage_state state;
	uint32_t n, target;
};

/* A read. Its memory stays with it when nobody waits any more. */
struct second_op {
	struct second *s;
	struct second_op *next;	/* free */
	char *buf;
	unsigned n;
	uint32_t slot[SECOND_RUN];
	int error;
	bool done, abandoned;
	struct co_queue q;
};

struct second_counters {
	uint64_t hits, misses;	/* blocks looked for */
	uint64_t fed, skipped, written_bytes, overwritten;
	uint64_t checksum_errors, errors, timeouts;
	uint64_t kept, settles, touches;
};

struct second {
	struct cache *c;
	struct disk *dev;
	struct second_super sb;
	uint32_t segments, entries;	/* used; blocks of a segment */
	uint32_t slots;		/* on the device; those of the stages follow */
	struct second_slot *slot;
	uint32_t *bucket;
	uint32_t shift;
	uint64_t *seq;		/* of each segment; 0: nothing of use there */
	uint8_t *dirty;		/* of each segment: its header still lists what has left the index */
	uint32_t n_dirty, used;
	uint32_t head;		/* the segment to be written next */
	uint64_t last_seq;
	struct second_stage stage[SECOND_STAGES];
	struct second_stage *filling;
	struct second_op op[SECOND_OPS], *op_free;
	unsigned ops;		/* in use */
	uint8_t *super_buf, *header_buf, *scan_buf;
	uint64_t filter[SECOND_FILTER / 64]; /* hashes of what changed during the scan */
	struct cache_volume *vol[SECOND_RECORDS];
	struct co_mutex lock;
	struct co_queue wake, idle;
	unsigned running;	/* coroutines of its own */
	uint64_t rate, tokens, tokens_ns;
	uint64_t settle_ns;
	bool started, scanning, stop, off;
	bool untold;		/* a volume is not settled any more, and the superblock may say that it is */
	uint32_t scanned;
	int error;
	const char *why;	/* it is off */
	void *map;
	uint64_t map_bytes;
	struct second_counters count;
};

/* Of a volume. */
struct second_volume {
	int rec;		/* its record; -1: it has no second level */
	enum cache_mode mode;
	bool settled;		/* the superblock may say so */
	bool touched;		/* since it was attached */
	bool lost;		/* what the scan has not found yet does not count */
	bool kept;
	bool has_identity;
	struct disk_identity identity;	/* when it was attached, or last settled */
	uint64_t changes;	/* begun */
	unsigned changing;
	uint64_t changed_ns;	/* the last one's end */
	uint32_t blocks;
	uint64_t hits, misses;
	struct co_mutex lock;	/* of the transition from settled */
};

/* --- second_index.c --- */
uint32_t second_find(const struct second *s, uint64_t key);
void second_insert(struct second *s, uint32_t slot, uint64_t key, uint32_t crc);
void second_remove(struct second *s, uint32_t slot);
/* No longer what the image holds, or not readable. */
void second_drop(struct second *s, uint32_t slot);
void second_mark_dirty(struct second *s, uint32_t segment);
bool second_is_filtered(const struct second *s, uint64_t key);
/* Takes blocks out of the index before they change; may suspend. */
co_fn void co_second_drop_range(struct cache_volume *v, uint64_t first, uint64_t last);

static inline uint64_t second_key(unsigned rec, uint64_t block)
{
	return ((uint64_t)rec << 44 | block) + 1;
}

static inline unsigned second_key_rec(uint64_t key)
{
	return (unsigned)((key - 1) >> 44);
}

static inline uint64_t second_key_block(uint64_t key)
{
	return (key - 1) & ((1ull << 44) - 1);
}

/* --- second_feed.c --- */
/* The block is about to leave memory. Plain: copies it, or does not. */
void second_feed(struct cache_volume *v, enum cache_class class, uint64_t block, const char *data);
co_fn void co_second_writer(void *arg);

/* --- second_read.c --- */
bool second_allows(const struct cache_volume *v, enum cache_class class);
bool second_has(const struct cache_volume *v, uint64_t block);
/* Reads all blocks of the fill. An error says nothing about them: the image has them. */
co_fn int co_second_read(struct cache_fill *f);

/* --- second_scan.c --- */
co_fn void co_second_scan(void *arg);

/* --- second_settle.c --- */
/* The superblock says of no volume that it is settled which is not any more. With s->lock. */
co_fn int co_second_tell_unsettled(struct second *s);
/* A change begins: what it covers leaves the index. An error is the change's. */
co_fn int co_second_change_begin(struct cache_volume *v, uint64_t first, uint64_t last);
void second_change_end(struct cache_volume *v);
/* Somebody may have changed the image's identity, and no contents. */
co_fn void co_second_note_identity(struct cache_volume *v);
co_fn int co_second_identity(struct cache_volume *v, struct disk_identity *ret);
co_fn void co_second_keeper(void *arg);
co_fn void co_second_detach(struct cache_volume *v);

/* --- second.c --- */
void second_fail(struct second *s, int error, const char *what);
co_fn void co_second_attach(struct cache_volume *v);
uint64_t second_memory(const struct second *s);
