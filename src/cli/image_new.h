/* SPDX-License-Identifier: MIT */
/*
 * Making an image in an image_target: what create and convert share.
 */
#pragma once

#include "cli/image_target.h"
#include "format/qcow2/create.h"

struct image_new {
	struct opts opts;
	struct qcow2_create q;	/* of a raw image only size, prealloc, progress and stop count */
	bool size_given;	/* among the options */
	char *made_data;	/* a data file that this run has made; removed if all fails */
};

/* Takes -o, -b and -F (each may be NULL). */
int image_new_options(struct image_new *n, const struct image_target *t, const char *options, const char *backing, const char *backing_format,
		      struct err *err);
/* Looks at the backing file, unless `unsafe`: it must be there; the image gets its size if it has none. */
co_fn int co_image_new_backing(struct image_new *n, const struct image_target *t, bool unsafe, bool has_size, struct err *err);
/* The disk in the backing file, read-only. */
co_fn int co_image_new_open_backing(struct image_new *n, const struct image_target *t, struct disk **ret, struct err *err);
/* Makes it. */
co_fn int co_image_new_make(struct image_new *n, const struct image_target *t, struct err *err);
/* Of a zeroed one, too. */
void image_new_fini(struct image_new *n, bool keep);
