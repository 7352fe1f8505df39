/* SPDX-License-Identifier: MIT */
/*
 * CRC-32C (Castagnoli, RFC 3720 appendix B.4), by ISA-L, with a scalar form as the tests' oracle.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* crc32c(0, "123456789", 9) == 0xe3069283; feed the result in again to go on. */
uint32_t crc32c(uint32_t crc, const void *buf, size_t len);
uint32_t crc32c_scalar(uint32_t crc, const void *buf, size_t len);
