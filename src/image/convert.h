/* SPDX-License-Identifier: MIT */
/*
 * Copying one disk to another: holes stay holes, zeroes become holes, several pieces are in flight.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "rt/role.h"

struct disk;
struct err;

#define IMAGE_COPY_PARALLEL_MAX 16
#define IMAGE_COPY_PIECE (2u << 20)

struct image_copy {
	struct disk *src, *dst;
	uint64_t size;		/* bytes to copy; what dst has beyond is left alone */
	bool dst_zero;		/* dst reads as zeroes wherever nothing is written */
	struct disk *base;	/* dst reads as this one does (zeroes behind its end) wherever nothing is written; only what differs is. May be NULL */
	bool head_last;		/* dst holds something: its first bytes are zeroed first and written last, so that a part never looks whole */
	uint32_t sparse;	/* zeroes are looked for in blocks of it, a power of two; 0: everything is written */
	uint32_t unit;		/* pieces begin and end at multiples of it (a power of two), but for the last one; 0: no matter */
	unsigned parallel;	/* pieces in flight, 1..IMAGE_COPY_PARALLEL_MAX */
	/* In place of co_disk_write(), where set: a piece of at most `unit` bytes. */
	int (*co_write)(void *arg, uint64_t off, const void *buf, uint64_t len);
	/* And in place of co_disk_zero(): whole units. */
	int (*co_zero)(void *arg, uint64_t off, uint64_t len);
	void *write_arg;
	void (*progress)(void *arg, uint64_t done, uint64_t total); /* may be NULL */
	void *progress_arg;
	const bool *stop;	/* may be NULL; once true, it ends with -ECANCELED at the next chance */
};

struct image_copy_result {
	uint64_t data, zero, same; /* bytes that were written, that were zeroes, and that the base has */
};

/*
 * Copies and flushes. When it fails, dst holds a part. Buffers come from rt_bufs(): at least `parallel` of IMAGE_COPY_PIECE bytes must be free in it,
 * twice as many with a base.
 */
co_fn int co_image_copy(const struct image_copy *c, struct image_copy_result *ret, struct err *err);
