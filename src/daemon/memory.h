/* SPDX-License-Identifier: MIT */
/*
 * The memory of a serving process: one budget for all its reactors, who takes from it, and who gives way. Design note in memory.c. Runs on the first reactor.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "daemon/balance.h"
#include "rt/budget.h"
#include "rt/sync.h"

struct err;
struct serve;
struct serve_config;

#define MEMORY_DEFAULT (256ull << 20)
#define MEMORY_PER_DISK (8ull << 20)	/* for each disk but the first */
#define MEMORY_CACHE (64ull << 20)	/* of the default that is the read cache's, and as much is the log's */
#define MEMORY_LEAST (48ull << 20)

struct memory {
	struct budget *b;
	struct budget_user program, log, index;
	int fd;			/* /proc/self/status; -1: not measured */
	uint64_t resident;	/* when it was last looked at */
	uint64_t trimmed_ns;
	uint64_t wanted, wanted_ns; /* what all but the caches would have, had not a take been refused lately; when that was */
	struct balance balance;	/* of the reactors' caches; of the first reactor */
	uint64_t balance_ns;	/* when it is looked at next */
	uint64_t committed[BALANCE_PARTS]; /* what each cache had when it was asked last */
	struct co_mutex sharing;
	uint64_t allowed, full;	/* what the first reactor leaves this one's cache, and would if nobody else wanted memory */
	uint64_t asked;		/* what it was told to have then */
	bool rung;
	struct co_queue q;	/* the keeper waits for the bell */
};

/* What the command line left open, in `c`: the sizes of the budget, the cache and the log's memory. */
void memory_defaults(struct serve_config *c, bool memory_given, bool cache_given);
/* Of the first reactor, before anything that counts. -ENOMEM. */
int memory_init(struct serve *s, struct err *err);
/* All is open: from now on the limit holds. -ENOMEM with what is too large if it cannot. */
int memory_start(struct serve *s, struct err *err);
void memory_fini(struct serve *s);

/* A new limit. Gives memory back before it returns, for a second at most; -EINVAL if it is below what cannot shrink. */
co_fn int co_memory_set(struct serve *s, uint64_t limit, struct err *err);
/* Gives the caches what they may have now: what it was told to (or pressure leaves it), and what the others leave. */
co_fn void co_memory_apply(struct serve *s);
/* json_t object, new reference. */
void *memory_status(struct serve *s);

/* Of the text of /proc/PID/status: anonymous memory and files' pages, without memory that is shared with others. False if it is none. */
bool memory_parse_status(const char *text, uint64_t *ret_bytes);
