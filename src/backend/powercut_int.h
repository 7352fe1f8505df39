/* SPDX-License-Identifier: MIT */
/* The power-cut simulator: what its files share. powercut.c does the I/O, powercut_cut.c the supply and the cuts. */
#pragma once

#include "backend/fault.h"
#include "util/list.h"

#define POWERCUT_MAX_DEVICES 16
#define POWERCUT_SPARES 27	/* the largest request is 32 MiB, and its edges */

/* What one write changed: whole sectors. */
struct version {
	struct list node;
	uint64_t seq, stamp;
	uint64_t off, len;
	bool pinned;		/* belongs to a FUA write in flight */
	uint8_t *dead;		/* bit per sector; NULL: none is */
	uint8_t *data;		/* NULL: zeroes */
};

/* A change that has not taken effect; lives on the stack of its coroutine. */
struct flight {
	struct list node;
	uint64_t off, len;
	const struct iovec *iov; /* NULL: zeroes */
	int niov;
	bool stable;
};

struct powercut_dev {
	struct powercut *power;
	char *name;
	struct powercut_dev_config config;
	uint64_t size, latency_ns;
	uint32_t sector, unit;	/* unit: the larger of sector and alignment */
	struct list handles;	/* open disks */
	struct media *stable, *view;
	struct list versions;	/* that took effect, oldest first */
	struct list flights;
	uint64_t seq;		/* of the last effect */
	uint64_t stamp, stable_stamp, opened_stamp, highest_stamp;
	char mark[DISK_MARK_MAX + 1];
	const char *new_mark;	/* being set */
	int error;		/* every I/O fails with it */
	bool stalled;
	uint64_t ios;
	struct powercut_counters count;
};

struct powercut {
	struct rng rng;
	bool off;
	uint64_t ios, writes;
	uint64_t cut_at, fail_at, cut_seed;
	bool has_cut_seed;
	struct powercut_dev *fail_dev;
	int fail_error;
	powercut_hook *hook;
	void *hook_arg;
	struct co_queue waiting;
	struct powercut_dev *dev[POWERCUT_MAX_DEVICES];
	unsigned n_dev;
	struct spare *spare[POWERCUT_SPARES];	/* by the logarithm of their size */
};

/* Memory of versions that are gone. Fresh memory costs page faults, under sanitizers also those of its shadow. */
struct spare {
	struct spare *next;
};

struct handle {
	struct disk disk;
	struct powercut_dev *dev;
	struct list node;
};

uint32_t powercut_atomic_write(const struct powercut_dev *dev);
/* (9) of fault.h holds for it. */
bool powercut_is_whole(const struct powercut_dev *dev, uint64_t off, uint64_t len);
void *powercut_must(void *p);	/* aborts on NULL */
/* What `fl` would change if it took effect now. On no list. Its data is of the supply's, which has no lock: one reactor uses it. */
struct version *powercut_version_of(const struct powercut_dev *dev, const struct flight *fl);
/* Writes sector number i of a version, unless it is dead. */
void powercut_write_sector(const struct powercut_dev *dev, struct media *to, const struct version *v, uint64_t i);
void powercut_version_free(const struct powercut_dev *dev, struct version *v);
void powercut_handle_free(struct handle *h);
void powercut_versions_free(struct powercut_dev *dev);
