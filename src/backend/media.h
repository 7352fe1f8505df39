/* SPDX-License-Identifier: MIT */
/*
 * Sparse copy-on-write RAM media, for simulated devices.
 *
 * A two-level table of 4 KiB chunks, each counted by reference: a clone costs one pointer per 256 KiB of size, a write costs
 * what it writes, and comparing two clones skips what they still share. What was never written reads as zeroes.
 * Single-threaded, never suspends. Out of memory aborts: media are for tests.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MEDIA_CHUNK 4096u

struct media;

struct media *media_create(uint64_t size);
struct media *media_clone(const struct media *m);
void media_destroy(struct media *m);	/* NULL is fine */
uint64_t media_size(const struct media *m);
void media_resize(struct media *m, uint64_t size);
/* Any alignment; off + len must not exceed the size. */
void media_read(const struct media *m, uint64_t off, void *buf, uint64_t len);
void media_write(struct media *m, uint64_t off, const void *buf, uint64_t len);
void media_zero(struct media *m, uint64_t off, uint64_t len);
/* True if the range is equal in both; if not and `ret_off` is given, the offset of the first byte that differs. */
bool media_equal(const struct media *a, const struct media *b, uint64_t off, uint64_t len, uint64_t *ret_off);
/* Bytes that take memory here, shared chunks included. */
uint64_t media_allocated(const struct media *m);
/* The length of the run from `off` on (at most `len`) that has memory, or that has none. */
uint64_t media_extent(const struct media *m, uint64_t off, uint64_t len, bool *ret_hole);
