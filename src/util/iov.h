/* SPDX-License-Identifier: MIT */
/*
 * Scatter-gather lists.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/uio.h>

size_t iov_len(const struct iovec *iov, int n);
/* Copies up to `len` bytes from/to offset `off` of the list; returns the bytes copied (less at the list's end). */
size_t iov_copy_out(const struct iovec *iov, int n, size_t off, void *dst, size_t len);
size_t iov_copy_in(const struct iovec *iov, int n, size_t off, const void *src, size_t len);
size_t iov_set(const struct iovec *iov, int n, size_t off, int byte, size_t len);
bool iov_is_zero(const struct iovec *iov, int n, size_t off, size_t len);
/* Describes `len` bytes from `off` on in `dst` (room for `max`); returns the count, or -E2BIG if `max` is too small. */
int iov_slice(const struct iovec *iov, int n, size_t off, size_t len, struct iovec *dst, int max);
/* True if every base and length is a multiple of `align`. */
bool iov_is_aligned(const struct iovec *iov, int n, size_t align);
