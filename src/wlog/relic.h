/* SPDX-License-Identifier: MIT */
/*
 * Write log: what of the memory ring outlives a killed process.
 *
 * A write that was acknowledged from memory lies in a batch that is open, or sealed and not written. The ring, the descriptors of the open batch and a small
 * head lie in one file of a tmpfs, weir-log-UUID, which outlives the process and not the machine. The next open for writing writes those batches to the log,
 * each at the place that it had, seals the one that was open, and only then does recovery look at the log: it finds what it would have found had the
 * committer finished its work.
 *
 * SIGKILL falls between any two instructions, so what counts is the order of the stores (shm_publish64()):
 *  (1) a record counts once the word `fill` says so (how many, bytes of payload, and a check of the descriptors), which is stored behind its data and its
 *      descriptor;
 *  (2) the open batch is `last`, stored behind its slot and the fields open_*; it is sealed once its slot has a length, which is stored behind all of the
 *      batch; only then are open_* used again;
 *  (3) `written` follows the device, before anything else learns of it, so a place that the log has used again is never written from here;
 *  (4) while an atomic group is being put in, `group_seq` is the batch that it began in and `group_fill` what that held before: a group without its end is
 *      left out, and nothing else is;
 *  (5) it counts for one generation of the log. A newer one is durable before the file is used again;
 *  (6) within it, for one state of the device: `super` is a superblock that was durable, and `super_next` is stored before a newer one is begun, so the device's
 *      number is one of these or between them; and batch `written` is on the device, where and with the random number that its slot says. A copy, or a side of the mirror that was
 *      left behind, lacks one of the two, unless it is as the device was.
 * It is untrusted input all the same: everything is within bounds, follows what the device has, and every checksum matches before anything is written.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rt/shm.h"
#include "util/bytes.h"
#include "util/uuid.h"

#define WL_RELIC_VERSION 2u
#define WL_RELIC_CHECK 0xfffffffu
#define WL_RELIC_CHUNK (2u << 20)	/* of the ring, that memory is taken for at a time */

/* In the order of this machine: it never leaves it. The first four fields are of all versions. */
struct wl_relic_head {
	char magic[8];		/* "WEIRRLIC", stored last */
	uint32_t version, slots;
	struct uuid log;
	char boot[40];		/* /proc/sys/kernel/random/boot_id */
	uint64_t generation, mem_size;
	uint64_t super, super_next;	/* numbers of superblocks */
	uint64_t written, last;
	uint64_t fill, open_prev;
	uint32_t open_index, open_index_crc;
	uint64_t group_seq, group_fill;	/* group_seq 0: none */
};

/* Of batch n: slot n mod slots. */
struct wl_relic_slot {
	uint64_t pos;		/* on the device; 0: of `written`, nothing of the log was there when this generation began */
	uint64_t nonce;		/* once it is sealed */
	uint32_t off;		/* in the ring, in blocks */
	uint32_t length;	/* bytes; 0: open */
};

/* Where the parts lie. */
struct wl_relic_layout {
	uint64_t desc, ring, size;
	uint32_t slots;
};

struct wl_relic {
	int fd;			/* -1: none */
	bool completing;	/* recovery has not looked at the log yet */
	bool kept, told;
	char path[256];
	struct wl_relic_head *head;	/* NULL: the ring is ordinary memory */
	struct wl_relic_slot *slot;
	uint32_t slots;
	uint64_t size;
	uint64_t reserved;	/* of the ring, from its start: backed by memory */
	uint64_t floor, limit;	/* of it, what is never given back, and where it ends as far as there is room */
	void (*step)(void *arg, const char *where);
	void *arg;
};

struct wl_relic_layout wl_relic_layout(uint64_t mem_size);
/* Bytes that wlog_config.relic_mem needs for a log with that much memory (0: the default). */
uint64_t wl_relic_size(uint64_t memory);

static inline void wl_relic_tell(struct wl_relic *k, const char *where)
{
	if (k->step)
		k->step(k->arg, where);
}

/* 15 bits, 21 bits, 28 bits: none needs more (WL_MAX_BATCH), but for the checksum, of which that much is kept. */
static inline uint64_t wl_relic_fill(uint32_t count, uint32_t payload, uint32_t desc_crc)
{
	return (uint64_t)count << 49 | (uint64_t)payload << 28 | (desc_crc & WL_RELIC_CHECK);
}

static inline uint32_t wl_relic_count(uint64_t fill)
{
	return (uint32_t)(fill >> 49);
}

static inline uint32_t wl_relic_payload(uint64_t fill)
{
	return (uint32_t)(fill >> 28) & 0x1fffff;
}

static inline void wl_relic_open(struct wl_relic *k, uint64_t seq, uint64_t pos, uint64_t off, uint64_t prev, uint32_t index, uint32_t index_crc)
{
	if (!k->head)
		return;
	k->slot[seq % k->slots] = (struct wl_relic_slot){ .pos = pos, .off = (uint32_t)(off / 4096) };
	k->head->open_prev = prev;
	k->head->open_index = index;
	k->head->open_index_crc = index_crc;
	k->head->fill = wl_relic_fill(0, index, 0);
	wl_relic_tell(k, "a batch half open");
	shm_publish64(&k->head->last, seq);
	wl_relic_tell(k, "a batch open");
}

static inline void wl_relic_put(struct wl_relic *k, uint32_t count, uint32_t payload, uint32_t desc_crc)
{
	if (!k->head)
		return;
	wl_relic_tell(k, "a record half in");
	shm_publish64(&k->head->fill, wl_relic_fill(count, payload, desc_crc));
	wl_relic_tell(k, "a record in");
}

static inline void wl_relic_seal(struct wl_relic *k, uint64_t seq, uint64_t nonce, uint32_t length)
{
	if (!k->head)
		return;
	k->slot[seq % k->slots].nonce = nonce;
	wl_relic_tell(k, "a batch half sealed");
	shm_publish32(&k->slot[seq % k->slots].length, length);
	wl_relic_tell(k, "a batch sealed");
}

static inline void wl_relic_written(struct wl_relic *k, uint64_t seq)
{
	if (!k->head)
		return;
	wl_relic_tell(k, "a batch on the device");
	shm_publish64(&k->head->written, seq);
	wl_relic_tell(k, "a batch written");
}

static inline void wl_relic_group(struct wl_relic *k, uint64_t seq, uint32_t count, uint32_t payload, uint32_t desc_crc)
{
	if (!k->head)
		return;
	wl_relic_tell(k, seq ? "a group before" : "a group all in");
	if (seq)
		k->head->group_fill = wl_relic_fill(count, payload, desc_crc);
	shm_publish64(&k->head->group_seq, seq);
	wl_relic_tell(k, seq ? "a group begun" : "a group ended");
}

/* --- Between relic.c and relic_complete.c --- */

struct wlog;

extern const char wl_relic_magic[8];
void wl_relic_boot_id(char *buf, size_t size);
/* From the file; whole, or an error. */
int wl_relic_fetch(struct wlog *w, uint64_t off, void *buf, uint64_t len);
int wl_relic_store64(struct wlog *w, uint64_t off, uint64_t value);
