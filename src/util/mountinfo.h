/* SPDX-License-Identifier: MIT */
/*
 * The mounts that this process sees, from /proc/self/mountinfo: nobody has to be asked for it, so it works also where a file system hangs or is dead.
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>

struct mountinfo {
	unsigned id, major, minor;
	char point[PATH_MAX];	/* where it is mounted */
	char type[64], source[256]; /* cut if longer */
	bool read_only;
};

/* The next mount in `f`, later ones above earlier ones; false at the end. Lines that are none are left out. */
bool mountinfo_next(FILE *f, struct mountinfo *ret);
/* The topmost mount at exactly `path` (absolute, without links). False if there is none. */
bool mountinfo_find(const char *path, struct mountinfo *ret);
