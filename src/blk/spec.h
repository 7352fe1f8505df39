/* SPDX-License-Identifier: MIT */
/*
 * DISK strings, and the table of drivers that opens them.
 *
 *   DISK    := PATH [,OPTS] | SCHEME:REST | NBD-URI [,OPTS]
 *   wrapper := ("delay"|"fault") ":" OPTS ":" DISK         options of the wrapper, then the disk that it wraps
 *
 *   vm.raw,aio=native,cache=none           file:/dev/sdb         mem:1G         null:1T
 *   nbd://host/export  nbd+unix:///name?socket=PATH              delay:read=4ms,flush=8ms:vm.raw
 *
 * A comma inside a PATH is doubled. Options after the path belong to the innermost disk. `format=raw` is accepted everywhere, and is
 * what a disk has whose name does not end in .qcow2. Contents are never probed. A PATH that begins with a known scheme and a colon is written "./mem:1G" or "file:mem:1G".
 */
#pragma once

#include <stdbool.h>

#include "blk/disk.h"
#include "util/opts.h"

struct disk_spec {
	char *text;		/* the whole string, for messages */
	char *driver;		/* "file", "mem", "null", "nbd", "delay", "fault" */
	char *rest;		/* path, size or URI, with the commas undoubled */
	struct opts opts;	/* this layer's options */
	struct disk_spec *inner; /* wrappers: what is wrapped */
};

enum disk_open_flags {
	DISK_OPEN_RDWR = 1 << 0,
	DISK_OPEN_LOG = 1 << 1,	/* holds a write log: O_DIRECT if the file system can, exclusive lock, stable writes */
	DISK_OPEN_NOLOCK = 1 << 2, /* takes no image lock (read-only tools on a live image) */
	DISK_OPEN_CHAIN = 1 << 8, /* times how many images are above this one in a chain of backing files */
};

struct disk_driver {
	const char *name;
	const char *options;	/* comma separated, for messages and `--help` */
	bool wraps;
	bool any_option;	/* beside `options` it takes those of a library that it calls, and leaves unused what nobody knows */
	/* Opens spec; spec->opts are consumed by opts_*() and checked by the caller. On success *ret is ready, at its size. */
	int (*co_open)(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err);
};

/*
 * A format over a disk: what `format=NAME` says or, over a file and without the option, the name's suffix. Its options are in the same list as those of the
 * driver below, which has opened `file` with its own.
 */
struct disk_format {
	const char *name, *suffix;
	const char *options;
	/* Takes over `file` on success. */
	int (*co_open)(struct disk_spec *spec, struct disk *file, unsigned flags, struct disk **ret, struct err *err);
};

/* Parses without touching anything. Untrusted input: bounded depth (8 wrappers), precise messages. Free with disk_spec_free(). */
int disk_spec_parse(const char *text, struct disk_spec **ret, struct err *err);
void disk_spec_free(struct disk_spec *s);	/* NULL is fine */

/* Opens the whole string. Nothing stays open on failure. */
co_fn int co_disk_open(const char *text, unsigned flags, struct disk **ret, struct err *err);
co_fn int co_disk_open_spec(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err);

/*
 * Defaults that the command line sets for every file below (--aio, --cache); an option in the string wins. `cache` is for images
 * and leaves logs (DISK_OPEN_LOG) alone. NULL leaves one as it is.
 */
void disk_set_default(const char *key, const char *val);

/* Drivers register here, before the first open (src/backend/drivers.c holds the list). */
void disk_register_driver(const struct disk_driver *drv);
const struct disk_driver *disk_find_driver(const char *name);
/*
 * Called with the disk below each format (qcow2) that is opened from now on, and may put a layer over it: *d is replaced, and closed with the format. A failure is
 * not one of the disk. NULL: nothing. There is one such function.
 */
void disk_set_below_format(int (*co_wrap)(void *arg, struct disk **d), void *arg);
/*
 * Called instead of co_disk_open() for each backing file that an image names from now on; it may give a disk that others use as well (blk/share.h). NULL: nothing.
 */
void disk_set_backing_open(int (*co_open)(void *arg, const char *text, unsigned flags, struct disk **ret, struct err *err), void *arg);
co_fn int co_disk_open_backing(const char *text, unsigned flags, struct disk **ret, struct err *err);
void disk_register_format(const struct disk_format *format);
/* Registers every backend of this build. Call once at start. */
void backends_register(void);
