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

/* Asks for the export, with simple replies. Waits a while for a server that does not answer, and believes nothing. 0 or -errno. */
int nbd_dial(const char *path, const char *export, struct nbd_dialled *ret, struct err *err);
