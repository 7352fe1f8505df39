/* SPDX-License-Identifier: MIT */
/*
 * The image that a command makes. A file is made under another name beside its own, and takes its name when it is complete: what is called
 * by the name is never a part. Devices and servers are written in place.
 */
#pragma once

#include "cli/image.h"

struct image_target {
	struct disk_spec *spec;
	enum image_format format;
	bool in_place;		/* it exists and is written as it is */
	bool exists;		/* a file that is replaced */
	char *path;		/* of the file, symbolic links resolved; NULL if it is none */
	char *temp;		/* the name until it is complete; NULL if in_place */
	unsigned mode;
	struct disk *old;	/* the file that is replaced, locked meanwhile */
};

/*
 * Looks at what `text` names, and makes an empty file beside it unless that is a device, a server, or `no_create`. `force` allows to replace
 * a file. Nothing is left behind on failure.
 */
int image_target_begin(struct image_target *t, const char *text, const char *format, bool no_create, bool force, struct err *err);
/* Locks the file that is to be replaced: one that somebody uses is not. */
co_fn int co_image_target_lock(struct image_target *t, struct err *err);
co_fn void co_image_target_unlock(struct image_target *t);
/* The DISK string of what is to be written, for co_disk_open_spec(). */
int image_target_spec(const struct image_target *t, struct disk_spec **ret, struct err *err);
/* Everything is written and flushed: gives the file its name, durably. */
int image_target_commit(struct image_target *t, struct err *err);
/* Removes what is not complete, and frees. Always call it. */
void image_target_end(struct image_target *t);
