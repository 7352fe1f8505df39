/* SPDX-License-Identifier: MIT */
/*
 * weir image info: what an image says of itself. Opens nothing but the image.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/image.h"
#include "util/bytes.h"
#include "util/size.h"

struct info_args {
	const char *image, *format;
	bool json, share;
	enum image_format fmt;
	struct disk *file;
	int64_t used;		/* bytes that it takes, -1 if unknown */
};

/* Another format's header in a disk that is raw by its name: worth a word, never believed. */
static co_fn const char *co_looks_like(struct disk *file)
{
	uint8_t head[4];

	if (file->size < sizeof(head) || co_disk_read(file, 0, head, sizeof(head), 0))
		return NULL;
	return get_be32(head) == 0x514649fb ? "qcow2" : NULL;
}

static co_fn int co_info_raw(struct info_args *a, struct err *err)
{
	const char *like = co_looks_like(a->file);
	char size[16], used[16];
	json_t *obj;

	if (like)
		fprintf(stderr, "weir image info: %s: is raw by its name, and begins as a %s image does; if it is one, say -f %s\n", a->image,
			like, like);
	if (!a->json) {
		printf("image: %s\nfile format: raw\nvirtual size: %s (%" PRIu64 " bytes)\n", a->image, size_format(a->file->size, size),
		       a->file->size);
		if (a->used >= 0)
			printf("disk size: %s\n", size_format((uint64_t)a->used, used));
		return 0;
	}
	obj = json_pack("{s:s, s:s, s:I, s:b}", "filename", a->image, "format", "raw", "virtual-size", (json_int_t)a->file->size,
			"dirty-flag", false);
	if (obj && a->used >= 0)
		json_object_set_new(obj, "actual-size", json_integer(a->used));
	return image_print_json(obj);
}

static co_fn int co_info(struct image_job *job, struct err *err)
{
	struct info_args *a = job->arg;
	int rc = co_image_open_file(a->image, a->format, a->share ? DISK_OPEN_NOLOCK : 0, &a->fmt, &a->file, &a->used, err);

	if (rc)
		return rc;
	rc = a->fmt == IMAGE_RAW ? co_info_raw(a, err) : err_set(err, -ENOTSUP, "%s: qcow2 is not there yet", a->image);
	co_disk_close(a->file);
	return rc;
}

int cli_image_info(int argc, char **argv)
{
	struct info_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_FLAG("force-share", 'U', &a.share),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image info", .co_work = co_info, .arg = &a };

	a.image = *cli_parse(job.verb, opts, "IMAGE", argc, argv);
	return image_job_run(&job);
}
