/* SPDX-License-Identifier: MIT */
/*
 * What the commands of `weir image` share.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "blk/spec.h"
#include "cli/cli.h"
#include "rt/role.h"
#include "util/err.h"

enum image_format { IMAGE_RAW, IMAGE_QCOW2 };
extern const char *const image_format_names[];

#define IMAGE_JOB_DISKS 2

/* One command at work, as a coroutine on a reactor with all drivers. */
struct image_job {
	const char *verb;	/* "image convert", for messages */
	co_fn int (*co_work)(struct image_job *job, struct err *err);
	void *arg;		/* the command's own */
	int status;		/* exit status if co_work() returns 0 */
	bool cancelled;		/* by a signal; the disks below have been cancelled then, too */
	struct disk *cancel[IMAGE_JOB_DISKS];
	int signal;
	int ret;
	struct err err;
};

/* Runs job->co_work() and prints its error. The exit status: 128 plus the signal's number if one ended it. */
int image_job_run(struct image_job *job);

/*
 * The format of a DISK: `option` (NULL if not given), else its own format=, else the suffix of the innermost name, else raw. Contents
 * are never looked at. Takes format= out of the DISK's options, so that what is opened then is the file itself. -EINVAL.
 */
int image_take_format(struct disk_spec *spec, const char *option, enum image_format *ret, struct err *err);
/* Has the innermost disk opened with this format. */
int image_set_format(struct disk_spec *spec, enum image_format format, struct err *err);
/* The path of a plain file or device, NULL for other drivers and below wrappers. Belongs to spec. */
const char *image_path(const struct disk_spec *spec);
/* `name` as seen from the folder of `image`. Free it; NULL without memory. */
char *image_beside(const char *image, const char *name);
/* `path` as a DISK string: commas doubled, no scheme to be seen. Free it; NULL without memory. */
char *image_disk_text(const char *path);

/*
 * Opens the bytes of an image, whatever its format, which *ret_format tells. *ret_used is what it takes of its file system, -1 if nobody knows.
 * Nothing that the contents name is opened.
 */
co_fn int co_image_open_file(const char *text, const char *format, unsigned flags, enum image_format *ret_format, struct disk **ret,
			     int64_t *ret_used, struct err *err);

/* "weir image convert: 12.3 %" on standard error, if that is a terminal or `always`. */
void image_progress(const char *verb, bool always, uint64_t done, uint64_t total);
/* Ends the line of image_progress(). */
void image_progress_end(void);
/* Prints and frees the json_t object `obj`. 0, or -ENOMEM if it is NULL or cannot be printed. */
int image_print_json(void *obj);

/* A json_t string of any bytes: what is no UTF-8 is replaced by question marks. */
void *image_json_text(const char *text);
/* Text from an image, for a terminal: without control characters. */
void image_print_text(const char *text, FILE *out);

int cli_image_create(int argc, char **argv);
int cli_image_convert(int argc, char **argv);
int cli_image_info(int argc, char **argv);
int cli_image_map(int argc, char **argv);
int cli_image_check(int argc, char **argv);
int cli_image_resize(int argc, char **argv);
int cli_image_snapshot(int argc, char **argv);
