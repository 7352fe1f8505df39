/* SPDX-License-Identifier: MIT */
/* What the commands of `weir image` tell about a qcow2 image. */
#pragma once

#include "format/qcow2/tools.h"

/* A json_t array, NULL without memory. */
void *image_snapshots_json(const struct qcow2_img *img);
void image_snapshots_print(const struct qcow2_img *img);
/* Reads snapshots and bitmaps, and tells all that an image says of itself: a json_t object in *ret, or text if ret is NULL. `used` is -1 if unknown. */
co_fn int co_image_qcow2_info(struct disk *file, const char *name, int64_t used, void **ret, struct err *err);
/*
 * The DISK string and the format of the backing file of the image `text`; NULL if it has none. Refuses names that are no plain paths, and a
 * missing format.
 */
co_fn int co_image_backing(struct disk *file, const char *text, char **ret, char **ret_format, struct err *err);
