/* SPDX-License-Identifier: MIT */
/*
 * qcow2: where the bytes of an open disk lie, through its chain of backing files. For `weir image map`.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "rt/role.h"

struct disk;

/* What QEMU's block status tells. */
struct qcow2_where {
	uint64_t len;
	unsigned depth;		/* images above the one that decides */
	bool present;		/* allocated there */
	bool zero, data;	/* reads as zeroes; holds data */
	bool compressed, has_offset;
	uint64_t offset;	/* in `file` */
	struct disk *file;	/* NULL if there is no offset */
};

/* The first stretch at `off`, at most `len` bytes, which lie within the size. `d` may be of any driver; nobody writes to it. */
co_fn int co_qcow2_where(struct disk *d, uint64_t off, uint64_t len, struct qcow2_where *ret);
