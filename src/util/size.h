/* SPDX-License-Identifier: MIT */
/*
 * Sizes and durations as people write them.
 */
#pragma once

#include <stdint.h>

/*
 * "4096", "4K", "10G", "1.5T": powers of two; the suffixes K M G T P E, with or without "iB" or "B", in either case.
 * A fraction (of at most 18 digits) is accepted where the result is a whole number of bytes.
 * Returns 0, -EINVAL (not a size) or -ERANGE (does not fit 63 bits).
 */
int size_parse(const char *s, uint64_t *ret);

/* "4 KiB", "1.5 GiB", "1023 B": three significant digits, no trailing zeros. */
const char *size_format(uint64_t bytes, char buf[static 16]);

/* "8ms", "4us", "1.5s", "100ns", "2m", "1h"; a bare number is seconds. Nanoseconds. 0, -EINVAL or -ERANGE. */
int duration_parse(const char *s, uint64_t *ret_ns);

/* "81 us", "1.42 ms", "2 s", "20 min", "3.5 h", "4 d": three significant digits, no trailing zeros. */
const char *duration_format(uint64_t ns, char buf[static 16]);

/* Unsigned integer, decimal or 0x; the whole string. 0, -EINVAL or -ERANGE. */
int u64_parse(const char *s, uint64_t *ret);

/* "on|off|yes|no|true|false|1|0". 0 or -EINVAL. */
int bool_parse(const char *s, int *ret);
