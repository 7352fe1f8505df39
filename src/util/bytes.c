/* SPDX-License-Identifier: MIT */
/* Byte helpers that are too long for the header. */
#include "util/bytes.h"

bool bytes_are_zero(const void *p, size_t len)
{
	const unsigned char *b = p;

	/* Sixteen zero bytes, and each byte equal to the one sixteen before it: memcmp() does the rest at full speed. */
	for (size_t i = 0; i < 16; i++) {
		if (i == len)
			return true;
		if (b[i])
			return false;
	}
	return memcmp(b, b + 16, len - 16) == 0;
}
