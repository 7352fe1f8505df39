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
 *  (1) a record counts once the word `fill` (records << 32 | bytes of payload) says so, which is stored behind its data and its descriptor;
 *  (2) the open batch is `last`, stored behind its slot and the fields open_*; it is sealed once its slot has a length, which is stored behind all of the
 *      batch; only then are open_* used again;
 *  (3) `written` follows the device, before anything else learns of it, so a place that the log has used again is never written from here;
 *  (4) while an atomic group is being put in, `group_seq` is the batch that it began in and `group_fill` what that held before: a group without its end is
 *      left out, and nothing else is;
 *  (5) it counts for one generation of the log. A newer one is durable before the file is used again.
 * It is untrusted input all the same: everything is within bounds and every checksum matches before anything is written.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "rt/shm.h"
#include "util/bytes.h"
#include "util/uuid.h"

#define WL_RELIC_VERSION 1u
#define WL_RELIC_CHUNK (2u << 20)	/* of the ring, that memory is taken for at a time */

/* In the order of this machine: it never leaves it. */
struct wl_relic_head {
	char magic[8];		/* "WEIRRLIC", stored last */
	uint32_t version, slots;
	struct uuid log;
	char boot[40];		/* /proc/sys/kernel/random/boot_id */
	uint64_t generation, mem_size;
	uint64_t written, last;
	uint64_t fill, open_prev, open_index;
	uint64_t group_seq, group_fill;	/* group_seq 0: none */
};

/* Of batch n: slot n mod slots. */
struct wl_relic_slot {
	uint64_t pos;		/* on the device */
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
	uint64_t size, reserved;	/* of the ring, from its start: backed by memory */
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

static inline uint64_t wl_relic_fill(uint32_t count, uint32_t payload)
{
	return (uint64_t)count << 32 | payload;
}

static inline void wl_relic_open(struct wl_relic *k, uint64_t seq, uint64_t pos, uint64_t off, uint64_t prev, uint32_t index)
{
	if (!k->head)
		return;
	k->slot[seq % k->slots] = (struct wl_relic_slot){ .pos = pos, .off = (uint32_t)(off / 4096) };
	k->head->open_prev = prev;
	k->head->open_index = index;
	k->head->fill = wl_relic_fill(0, index);
	wl_relic_tell(k, "a batch half open");
	shm_publish64(&k->head->last, seq);
	wl_relic_tell(k, "a batch open");
}

static inline void wl_relic_put(struct wl_relic *k, uint32_t count, uint32_t payload)
{
	if (!k->head)
		return;
	wl_relic_tell(k, "a record half in");
	shm_publish64(&k->head->fill, wl_relic_fill(count, payload));
	wl_relic_tell(k, "a record in");
}

static inline void wl_relic_seal(struct wl_relic *k, uint64_t seq, uint32_t length)
{
	if (!k->head)
		return;
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

static inline void wl_relic_group(struct wl_relic *k, uint64_t seq, uint32_t count, uint32_t payload)
{
	if (!k->head)
		return;
	wl_relic_tell(k, seq ? "a group before" : "a group all in");
	if (seq)
		k->head->group_fill = wl_relic_fill(count, payload);
	shm_publish64(&k->head->group_seq, seq);
	wl_relic_tell(k, seq ? "a group begun" : "a group ended");
}
