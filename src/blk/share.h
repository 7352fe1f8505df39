/* SPDX-License-Identifier: MIT */
/*
 * One disk under several: a backing image of more than one clone, opened once.
 *
 * Each user gets a disk of its own, which passes everything on; the disk itself is closed with the last of them. It must be read-only: nobody tells one user what
 * another one has changed.
 */
#pragma once

#include "blk/disk.h"

struct disk_shared {
	struct disk *disk;
	unsigned users;
	void (*gone)(struct disk_shared *s);	/* the last user has closed, and so is the disk; may free it. Plain function */
};

/* A disk for one more user. -ENOMEM. */
int disk_share(struct disk_shared *s, struct disk **ret);
