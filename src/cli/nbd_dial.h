/* SPDX-License-Identifier: MIT */
/* An NBD client's handshake on a Unix socket, up to where a kernel can take over. */
#pragma once

#include <stdint.h>

struct err;

struct nbd_dialled {
	int fd;			/* close it */
	uint64_t size;
	uint32_t min_block;
	uint16_t flags;
};

/*
 * Asks for the export, with simple replies. Believes nothing, and waits `patience_ms` for all of it, however slowly the server talks. 0, or -errno with a message,
 * which may have words of the server in it.
 */
int nbd_dial(const char *path, const char *export, unsigned patience_ms, struct nbd_dialled *ret, struct err *err);
