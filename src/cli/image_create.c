/* SPDX-License-Identifier: MIT */
/*
 * weir image create: a new, empty image.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/image_new.h"
#include "util/bytes.h"
#include "util/size.h"

#define LOOK_AT (1u << 20)	/* bytes at the start that tell whether there is something */

struct create_args {
	const char *image, *format, *options, *backing, *backing_format;
	uint64_t size;
	bool size_given, force, quiet, json, progress, unsafe;
	struct image_target target;
	struct image_new new;
	struct disk *file;
};

static void on_progress(void *arg, uint64_t done, uint64_t total)
{
	struct image_job *job = arg;
	struct create_args *a = job->arg;

	if (!a->quiet)
		image_progress(job->verb, a->progress, done, total);
}

static int report(const struct create_args *a)
{
	char size[16];

	if (a->json)
		return image_print_json(json_pack("{s:s, s:s, s:I}", "filename", a->image, "format", image_format_names[a->target.format],
						  "virtual-size", (json_int_t)a->new.q.size));
	if (!a->quiet)
		printf("%s: created, %s, %s\n", a->image, image_format_names[a->target.format], size_format(a->new.q.size, size));
	return 0;
}

static co_fn int co_make(struct image_job *job, struct err *err)
{
	struct create_args *a = job->arg;
	struct image_new *n = &a->new;
	int rc = image_new_options(n, &a->target, a->options, a->backing, a->backing_format, err);

	if (rc)
		return rc;
	if (a->size_given)
		n->q.size = a->size;
	rc = co_image_new_backing(n, &a->target, a->unsafe, a->size_given || n->size_given, err);
	if (rc)
		return rc;
	n->q.progress = on_progress;
	n->q.progress_arg = job;
	n->q.stop = &job->cancelled;
	rc = co_image_new_make(n, &a->target, err);
	if (!rc)
		rc = image_target_commit(&a->target, err);
	return rc ? rc : report(a);
}

/* A device or a server is written in place: not over something. */
static co_fn int co_refuse_contents(struct create_args *a, struct err *err)
{
	uint8_t *buf;
	enum image_format format;
	struct disk *d;
	int64_t used;
	uint64_t len;
	int rc;

	if (!a->target.in_place || a->force)
		return 0;
	rc = co_image_open_file(a->image, a->format, 0, &format, &d, &used, err);
	if (rc)
		return rc;
	len = min(d->size, (uint64_t)LOOK_AT);
	buf = aligned_alloc(4096, LOOK_AT);
	rc = buf ? co_disk_read(d, 0, buf, len, 0) : -ENOMEM;
	if (rc)
		err_errno(err, rc, "%s: cannot be read", a->image);
	else if (!bytes_are_zero(buf, len))
		rc = err_set(err, -EEXIST, "%s: holds something; --force makes an image over it", a->image);
	free(buf);
	co_disk_close(d);
	return rc;
}

static co_fn int co_create(struct image_job *job, struct err *err)
{
	struct create_args *a = job->arg;
	int rc = image_target_begin(&a->target, a->image, a->format, false, a->force, err);

	if (!rc)
		rc = co_image_target_lock(&a->target, err);
	if (!rc)
		rc = co_refuse_contents(a, err);
	if (!rc)
		rc = co_make(job, err);
	if (rc == -ECANCELED)
		err_set(err, rc, "%s: interrupted; nothing is left of it", a->image);
	co_image_target_unlock(&a->target);
	image_new_fini(&a->new, rc == 0);
	image_target_end(&a->target);
	return rc;
}

int cli_image_create(int argc, char **argv)
{
	struct create_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_STR("options", 'o', "OPTIONS", &a.options),
		CLI_STR("backing", 'b', "FILE", &a.backing),
		CLI_STR("backing-format", 'F', "FORMAT", &a.backing_format),
		CLI_FLAG("unsafe", 'u', &a.unsafe),
		CLI_FLAG("force", 0, &a.force),
		CLI_FLAG("progress", 'p', &a.progress),
		CLI_FLAG("quiet", 'q', &a.quiet),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image create", .co_work = co_create, .arg = &a };
	char **operand = cli_parse(job.verb, opts, "IMAGE [SIZE]", argc, argv);

	a.image = operand[0];
	if (operand[1] && operand[2])
		cli_usage(job.verb, "\"%s\" is one operand too many", operand[2]);
	a.size_given = operand[1] != NULL;
	if (operand[1] && size_parse(operand[1], &a.size))
		cli_usage(job.verb, "%s: must be a size such as 512M or 10G", operand[1]);
	return image_job_run(&job);
}
