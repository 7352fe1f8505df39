/* SPDX-License-Identifier: MIT */
/*
 * The reactors' read caches lend each other memory. Pure: one step for each second; who calls it gives the caches what it says.
 *
 * By the number of its volumes each reactor has a part of --cache-size of its own. One whose cache misses may have more than that while others do without: those that
 * miss nothing. Whoever misses gets its own part back, whatever the others make of it. So nobody loses by this for longer than it takes to give back.
 *
 * Invariants
 *  (1) the targets together are never more than the parts together;
 *  (2) a target is at least a quarter of the part, what its volumes were promised (`least`), or the part itself, and at most `most` or the part;
 *  (3) as long as nothing has been lent, each target is its part, to the byte; and so it is again when parts have changed so that (2) cannot be kept.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define BALANCE_PARTS 32
#define BALANCE_ONE (1u << 20)
#define BALANCE_MISSES 64u	/* blocks in a second: it would make use of more */
#define BALANCE_FEW 16u		/* it can do with less */
#define BALANCE_HOLD 60u	/* seconds for which nothing is lent by who has just taken back */
#define BALANCE_STEP_LEAST (2ull << 20)

struct balance_part {
	/* What the caller says */
	uint64_t own;		/* its part, as told and as memory pressure leaves it */
	uint64_t least, most;
	uint64_t misses, ghost_hits; /* since the start */
	/* Its own */
	uint32_t weight;	/* of BALANCE_ONE, in what all have together */
	unsigned hold;
	uint64_t misses_before, ghost_hits_before;
	uint64_t missed, ghosts; /* in the last second */
};

struct balance {
	unsigned n;		/* parts; may be set at any time before the first step */
	bool begun, lent;
	uint64_t moves;
	struct balance_part part[BALANCE_PARTS];
};

/* After that has changed, but for the counts. */
void balance_told(struct balance *b);
/* A second later. True if a target has changed. */
bool balance_step(struct balance *b);
uint64_t balance_target(const struct balance *b, unsigned part);
