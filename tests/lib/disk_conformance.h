/* SPDX-License-Identifier: MIT */
/*
 * What blk/disk.h promises, checked on any disk. Each check prints its name; a broken promise ends the program with 1.
 *
 *	static co_fn void co_main(void *arg)
 *	{
 *		co_disk_open("mem:3M", DISK_OPEN_RDWR, &d, &err);
 *		co_disk_conform(d, 0, test_seed());
 *		co_disk_close(d);
 *	}
 *
 * The disk must be writable and 1 MiB to 64 MiB in size; what it holds is lost. Its size may be odd, which is a good test. Nobody else may use
 * it meanwhile. Works on simulated and on real reactors.
 */
#pragma once

#include "blk/disk.h"

enum conform_flags {
	CONFORM_NO_DATA = 1 << 0,	/* keeps nothing (null): only what can be said about it */
	CONFORM_SLOW = 1 << 1,		/* fewer rounds, smaller requests */
	CONFORM_NO_RESIZE = 1 << 2,	/* leave the size alone */
	CONFORM_TORN_READS = 1 << 3,	/* a page cache: a read in flight with a write of the same sector may see some of both */
	CONFORM_SHORT = 1 << 4,		/* smaller requests: for one more way of many to the same code, where bytes cost most */
};

co_fn void co_disk_conform(struct disk *d, unsigned flags, uint64_t seed);
