/* SPDX-License-Identifier: MIT */
/*
 * weir image check: what is wrong with an image, and repair.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/image.h"
#include "format/qcow2/tools.h"
#include "util/size.h"

#define EXIT_LEAKS 3
#define EXIT_DAMAGE 4
#define SHOWN 1000		/* findings; the counts are exact */

static const char *const repair_names[] = { "none", "leaks", "all", NULL };

struct check_args {
	const char *image, *format;
	int repair;
	bool json, quiet, share, progress;
	struct image_job *job;
	struct qcow2_check c;
	json_t *findings;
	uint64_t shown;
};

static void on_progress(void *arg, uint64_t done, uint64_t total)
{
	struct check_args *a = arg;

	if (!a->quiet)
		image_progress(a->job->verb, a->progress, done, total);
}

static void on_finding(void *arg, const struct qcow2_finding *f)
{
	struct check_args *a = arg;

	if (a->shown++ >= SHOWN)
		return;
	if (a->json) {
		json_array_append_new(a->findings, json_pack("{s:s, s:I, s:I, s:b, s:o}", "kind", qcow2_finding_name(f->kind), "offset",
			(json_int_t)f->off, "count", (json_int_t)f->clusters, "repaired", f->fixed, "text", image_json_text(f->text)));
	} else if (!a->quiet) {
		image_progress_end();
		printf("%s: %s%s\n", f->kind == QCOW2_FOUND_LEAK ? "LEAK" : "DAMAGE", f->text, f->fixed ? " (repaired)" : "");
	}
}

static int print_json(const struct check_args *a)
{
	const struct qcow2_check *c = &a->c;

	return image_print_json(json_pack("{s:s, s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:O}", "filename", a->image,
		"format", "qcow2", "check-errors", 0, "image-end-offset", (json_int_t)c->image_end, "total-clusters", (json_int_t)c->total,
		"allocated-clusters", (json_int_t)c->allocated, "compressed-clusters", (json_int_t)c->compressed, "fragmented-clusters",
		(json_int_t)c->fragmented, "leaks", (json_int_t)(c->leaks - c->leaks_fixed), "leaks-fixed", (json_int_t)c->leaks_fixed,
		"corruptions", (json_int_t)(c->damage - c->damage_fixed), "corruptions-fixed", (json_int_t)c->damage_fixed,
		"findings-not-shown", (json_int_t)(a->shown > SHOWN ? a->shown - SHOWN : 0), "findings", a->findings));
}

static void print_report(const struct check_args *a)
{
	const struct qcow2_check *c = &a->c;
	char end[16];

	if (a->shown > SHOWN)
		printf("... and %" PRIu64 " more\n", a->shown - SHOWN);
	if (!c->leaks && !c->damage)
		printf("%s: no leaks and no damage\n", a->image);
	else
		printf("%s: %" PRIu64 " damaged, %" PRIu64 " of them repaired; %" PRIu64 " clusters leaked, %" PRIu64 " of them freed\n", a->image,
		       c->damage, c->damage_fixed, c->leaks, c->leaks_fixed);
	printf("%" PRIu64 " of %" PRIu64 " clusters allocated, %" PRIu64 " compressed, %" PRIu64 " fragmented; the image ends at %s (%" PRIu64 ")\n",
	       c->allocated, c->total, c->compressed, c->fragmented, size_format(c->image_end, end), c->image_end);
}

static co_fn int co_check_image(struct image_job *job, struct disk *file, struct err *err)
{
	struct check_args *a = job->arg;
	struct qcow2_check *c = &a->c;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, a->image, 0, err);

	*c = (struct qcow2_check){ .repair = (enum qcow2_repair)a->repair, .finding = on_finding, .arg = a, .progress = on_progress,
				   .progress_arg = a, .stop = &job->cancelled };
	a->job = job;
	if (!rc)
		rc = co_qcow2_check(&img, c, err);
	qcow2_img_close(&img);
	image_progress_end();
	if (rc)
		return rc;
	if (c->damage > c->damage_fixed)
		job->status = EXIT_DAMAGE;
	else if (c->leaks > c->leaks_fixed)
		job->status = EXIT_LEAKS;
	if (a->json)
		return print_json(a);
	if (!a->quiet)
		print_report(a);
	return 0;
}

static co_fn int co_check(struct image_job *job, struct err *err)
{
	struct check_args *a = job->arg;
	unsigned flags = a->share ? DISK_OPEN_NOLOCK : a->repair != QCOW2_REPAIR_NONE ? DISK_OPEN_RDWR : 0;
	enum image_format format;
	struct disk *file;
	int64_t used;
	int rc = co_image_open_file(a->image, a->format, flags, &format, &file, &used, err);

	if (rc)
		return rc;
	a->findings = json_array();
	if (!a->findings)
		rc = err_errno(err, -ENOMEM, "%s", a->image);
	else if (format != IMAGE_QCOW2)
		rc = err_set(err, -ENOTSUP, "%s: is raw, and nothing in it can be checked; if it is qcow2, say -f qcow2", a->image);
	else
		rc = co_check_image(job, file, err);
	json_decref(a->findings);
	co_disk_close(file);
	return rc;
}

int cli_image_check(int argc, char **argv)
{
	struct check_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_ENUM("repair", 'r', repair_names, &a.repair),
		CLI_FLAG("force-share", 'U', &a.share),
		CLI_FLAG("progress", 'p', &a.progress),
		CLI_FLAG("quiet", 'q', &a.quiet),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image check", .co_work = co_check, .arg = &a };

	a.image = *cli_parse(job.verb, opts, "IMAGE", argc, argv);
	if (a.share && a.repair)
		cli_usage(job.verb, "--force-share: an image in use cannot be repaired");
	return image_job_run(&job);
}
