/* SPDX-License-Identifier: MIT */
/* Scatter-gather lists. */
#include "util/iov.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "util/bytes.h"

/* A position in a list; iov_chunk() hands out one contiguous piece after the other. */
struct iov_pos {
	const struct iovec *iov;
	int n;
	size_t off, left;
};

static struct iov_pos iov_start(const struct iovec *iov, int n, size_t off, size_t len)
{
	for (; n > 0 && off >= iov->iov_len; n--)
		off -= iov++->iov_len;
	return (struct iov_pos){ iov, n, off, len };
}

/* The next piece, at most `left` bytes; false at the end. No piece is empty. */
static bool iov_chunk(struct iov_pos *p, struct iovec *piece)
{
	size_t len;

	for (; p->n > 0 && p->off == p->iov->iov_len; p->n--) {
		p->iov++;
		p->off = 0;
	}
	if (p->n <= 0 || !p->left)
		return false;
	len = min(p->left, p->iov->iov_len - p->off);
	*piece = (struct iovec){ (char *)p->iov->iov_base + p->off, len };
	p->off += len;
	p->left -= len;
	return true;
}

size_t iov_len(const struct iovec *iov, int n)
{
	size_t len = 0;

	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	return len;
}

size_t iov_copy_out(const struct iovec *iov, int n, size_t off, void *dst, size_t len)
{
	struct iov_pos p = iov_start(iov, n, off, len);
	struct iovec piece;
	size_t done = 0;

	for (; iov_chunk(&p, &piece); done += piece.iov_len)
		memcpy((char *)dst + done, piece.iov_base, piece.iov_len);
	return done;
}

size_t iov_copy_in(const struct iovec *iov, int n, size_t off, const void *src, size_t len)
{
	struct iov_pos p = iov_start(iov, n, off, len);
	struct iovec piece;
	size_t done = 0;

	for (; iov_chunk(&p, &piece); done += piece.iov_len)
		memcpy(piece.iov_base, (const char *)src + done, piece.iov_len);
	return done;
}

size_t iov_set(const struct iovec *iov, int n, size_t off, int byte, size_t len)
{
	struct iov_pos p = iov_start(iov, n, off, len);
	struct iovec piece;
	size_t done = 0;

	for (; iov_chunk(&p, &piece); done += piece.iov_len)
		memset(piece.iov_base, byte, piece.iov_len);
	return done;
}

bool iov_is_zero(const struct iovec *iov, int n, size_t off, size_t len)
{
	struct iov_pos p = iov_start(iov, n, off, len);
	struct iovec piece;

	while (iov_chunk(&p, &piece))
		if (!bytes_are_zero(piece.iov_base, piece.iov_len))
			return false;
	return true;
}

int iov_slice(const struct iovec *iov, int n, size_t off, size_t len, struct iovec *dst, int max)
{
	struct iov_pos p = iov_start(iov, n, off, len);
	struct iovec piece;
	int count = 0;

	while (iov_chunk(&p, &piece)) {
		if (count == max)
			return -E2BIG;
		dst[count++] = piece;
	}
	return count;
}

bool iov_is_aligned(const struct iovec *iov, int n, size_t align)
{
	for (int i = 0; i < n; i++)
		if (!is_aligned((uintptr_t)iov[i].iov_base | iov[i].iov_len, align))
			return false;
	return true;
}
