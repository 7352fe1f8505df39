/* SPDX-License-Identifier: MIT */
/*
 * The read cache gets smaller by itself when the host is short of memory, and grows back.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct serve;

/* What to make of the cache; pure, a step for each second. */
struct pressure {
	uint64_t wanted;	/* by the operator */
	uint64_t size;		/* now */
	uint64_t least;
	uint64_t total_us;	/* how long tasks have waited for memory, ever; 0: not known yet */
	unsigned calm;		/* seconds since that last grew by more than PRESSURE_US */
	uint64_t events;
};

#define PRESSURE_US 100000u	/* of a second */
#define PRESSURE_CALM 30u	/* seconds before it grows again */

/* Returns the new size. */
uint64_t pressure_step(struct pressure *p, uint64_t total_us);
/* The `some` line's total of /proc/pressure/memory. False if there is none. */
bool pressure_parse(const char *text, uint64_t *ret_total_us);

/* Runs until the server stops. $WEIR_PRESSURE_FILE is read instead of /proc/pressure/memory (tests). */
void pressure_start(struct serve *s);
/* The operator has said another size. */
void pressure_set(struct serve *s, uint64_t size);
