/* SPDX-License-Identifier: MIT */
/* NBD server: all that a client may say from its first byte on. */
#include "fuzz/nbd_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuzz_client c = { .in = data, .len = size };

	fuzz_serve(&c, false);
	return 0;
}
