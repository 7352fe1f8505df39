/* SPDX-License-Identifier: MIT */
/*
 * Loads and stores of fixed-width integers at any alignment.
 */
#pragma once

#include <endian.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define BYTES_ACCESSORS(bits) \
	static inline uint##bits##_t get_le##bits(const void *p) \
	{ uint##bits##_t v; memcpy(&v, p, sizeof(v)); return le##bits##toh(v); } \
	static inline uint##bits##_t get_be##bits(const void *p) \
	{ uint##bits##_t v; memcpy(&v, p, sizeof(v)); return be##bits##toh(v); } \
	static inline void put_le##bits(void *p, uint##bits##_t v) \
	{ v = htole##bits(v); memcpy(p, &v, sizeof(v)); } \
	static inline void put_be##bits(void *p, uint##bits##_t v) \
	{ v = htobe##bits(v); memcpy(p, &v, sizeof(v)); }

BYTES_ACCESSORS(16)
BYTES_ACCESSORS(32)
BYTES_ACCESSORS(64)
#undef BYTES_ACCESSORS

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

#define min(a, b) ({ __typeof__(a) min_a_ = (a); __typeof__(b) min_b_ = (b); min_a_ < min_b_ ? min_a_ : min_b_; })
#define max(a, b) ({ __typeof__(a) max_a_ = (a); __typeof__(b) max_b_ = (b); max_a_ > max_b_ ? max_a_ : max_b_; })

static inline bool is_pow2(uint64_t v)
{
	return v && !(v & (v - 1));
}

/* `a` is a power of two. align_up() of a value within `a` of UINT64_MAX wraps to 0. */
static inline uint64_t align_down(uint64_t v, uint64_t a)
{
	return v & ~(a - 1);
}

static inline uint64_t align_up(uint64_t v, uint64_t a)
{
	return (v + a - 1) & ~(a - 1);
}

static inline bool is_aligned(uint64_t v, uint64_t a)
{
	return !(v & (a - 1));
}

/* True if the `len` bytes from `p` on are all zero. */
bool bytes_are_zero(const void *p, size_t len);
