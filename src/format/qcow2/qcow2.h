/* SPDX-License-Identifier: MIT */
/*
 * qcow2: the driver under the disk contract.
 *
 * From a DISK string ("vm.qcow2", or any disk with format=qcow2) by the format driver; or by hand over any disk:
 *
 *	co_qcow2_open(file, "vm.qcow2", &opts, DISK_OPEN_RDWR, &disk, &err)
 */
#pragma once

#include "blk/spec.h"

enum qcow2_outside {
	QCOW2_INSIDE_ONLY,	/* backing and data files by plain names relative to the image's folder, without ".." */
	QCOW2_OUTSIDE_ALLOWED,	/* any path */
	QCOW2_NO_OTHER_FILE,	/* an image that names another file is refused */
};

struct qcow2_opts {
	enum qcow2_outside outside;
	const char *path;	/* of the image, for names relative to it; NULL: it has none, and names no other file */
	const char *backing_format; /* for images whose header does not name it; NULL: those are refused */
	const char *file_opts;	/* options that backing and data files get as well: ",cache=none,aio=native"; NULL: none */
	const char *snapshot;	/* id or name: the disk as this snapshot has it, read-only; NULL: as it is now */
	unsigned depth;		/* images above this one */
	uint64_t table_cache;	/* bytes of L2 tables in memory; 0: 32 MiB */
	uint64_t fill_debt;	/* bytes of copy-on-write that may be put off; 0: 256 MiB */
	uint64_t run_ahead;	/* bytes of clusters that are reserved ahead at most; 0: 64 MiB, or 128 clusters */
	uint64_t tidy_ns;	/* how often is looked for what can be given back; 0: 2 s */
	struct disk *backing;	/* tests: the backing file, instead of the one that the header names. Owned on success */
};

/* Takes over `file` on success. */
co_fn int co_qcow2_open(struct disk *file, const char *name, const struct qcow2_opts *o, unsigned flags, struct disk **ret, struct err *err);

extern const struct disk_format qcow2_format;
