/* SPDX-License-Identifier: MIT */
/* CRC-32C by ISA-L (the CPU's crc32 or carry-less multiplication), and bit by bit. */
#include "util/crc32c.h"

#include <isa-l/crc.h>

#include "util/bytes.h"

#define POLY_REFLECTED 0x82f63b78

uint32_t crc32c(uint32_t crc, const void *buf, size_t len)
{
	unsigned char *p = (unsigned char *)buf;

	/* ISA-L leaves out the inversion before and after, and takes an int. */
	crc = ~crc;
	while (len) {
		int n = min(len, (size_t)1 << 30);

		crc = crc32_iscsi(p, n, crc);
		p += n;
		len -= n;
	}
	return ~crc;
}

uint32_t crc32c_scalar(uint32_t crc, const void *buf, size_t len)
{
	const unsigned char *p = buf;

	crc = ~crc;
	for (; len; len--) {
		crc ^= *p++;
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? POLY_REFLECTED : 0);
	}
	return ~crc;
}
