/* SPDX-License-Identifier: MIT */
/*
 * weir image snapshot: lists, makes, applies and deletes the snapshots inside an image that nobody has open.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/image.h"
#include "cli/image_qcow2.h"
#include "rt/rt.h"

struct snapshot_args {
	const char *image, *format, *create, *apply, *del;
	bool list, json, quiet, share;
};

static co_fn int co_list(struct snapshot_args *a, struct qcow2_img *img, struct err *err)
{
	int rc = co_qcow2_img_read_snapshots(img, err);

	if (rc)
		return rc;
	if (a->json)
		return image_print_json(image_snapshots_json(img));
	image_snapshots_print(img);
	return 0;
}

static co_fn int co_work_on(struct image_job *job, struct disk *file, struct err *err)
{
	struct snapshot_args *a = job->arg;
	const char *which = a->create ? a->create : a->apply ? a->apply : a->del;
	enum qcow2_snap_op op = a->create ? QCOW2_SNAP_CREATE : a->apply ? QCOW2_SNAP_APPLY : QCOW2_SNAP_DELETE;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, a->image, which ? 0 : QCOW2_PARSE_LAX, err);

	if (!rc && !which)
		rc = co_list(a, &img, err);
	else if (!rc)
		rc = co_qcow2_snapshot(&img, op, which, rt_wall_ns(), &job->cancelled, err);
	if (!rc && which && !a->quiet && !a->json) {
		printf("%s: snapshot ", a->image);
		image_print_text(which, stdout);
		printf(" %s\n", a->create ? "created" : a->apply ? "applied" : "deleted");
	}
	if (!rc && which && a->json)
		rc = image_print_json(json_pack("{s:s, s:s, s:o}", "filename", a->image, "done", a->create ? "create" : a->apply ? "apply" : "delete",
						"snapshot", image_json_text(which)));
	qcow2_img_close(&img);
	return rc;
}

static co_fn int co_snapshot(struct image_job *job, struct err *err)
{
	struct snapshot_args *a = job->arg;
	bool change = a->create || a->apply || a->del;
	enum image_format format;
	struct disk *file;
	int64_t used;
	int rc = co_image_open_file(a->image, a->format, change ? DISK_OPEN_RDWR : a->share ? DISK_OPEN_NOLOCK : 0, &format, &file, &used, err);

	if (rc)
		return rc;
	if (format != IMAGE_QCOW2)
		rc = err_set(err, -ENOTSUP, "%s: is raw and has no snapshots; if it is qcow2, say -f qcow2", a->image);
	else
		rc = co_work_on(job, file, err);
	co_disk_close(file);
	return rc;
}

int cli_image_snapshot(int argc, char **argv)
{
	struct snapshot_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_FLAG("list", 'l', &a.list),
		CLI_STR("create", 'c', "NAME", &a.create),
		CLI_STR("apply", 'a', "SNAPSHOT", &a.apply),
		CLI_STR("delete", 'd', "SNAPSHOT", &a.del),
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_FLAG("force-share", 'U', &a.share),
		CLI_FLAG("quiet", 'q', &a.quiet),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image snapshot", .co_work = co_snapshot, .arg = &a };

	a.image = *cli_parse(job.verb, opts, "IMAGE", argc, argv);
	if (a.list + !!a.create + !!a.apply + !!a.del > 1)
		cli_usage(job.verb, "only one of --list, --create, --apply and --delete is possible");
	if (a.share && (a.create || a.apply || a.del))
		cli_usage(job.verb, "--force-share: an image in use cannot be changed");
	return image_job_run(&job);
}
