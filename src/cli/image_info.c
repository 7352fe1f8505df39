/* SPDX-License-Identifier: MIT */
/*
 * weir image info: what an image says of itself. Opens nothing but the image, unless it is asked for the backing chain.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/image.h"
#include "cli/image_qcow2.h"
#include "util/bytes.h"
#include "util/size.h"

#define MAX_CHAIN 200

struct info_args {
	const char *image, *format;
	bool json, share, chain;
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

static co_fn int co_info_raw(struct info_args *a, const char *text, void **ret, struct err *err)
{
	const char *like = co_looks_like(a->file);
	char size[16], used[16];
	json_t *obj;

	if (like)
		fprintf(stderr, "weir image info: %s: is raw by its name, and begins as a %s image does; if it is one, say -f %s\n", text,
			like, like);
	if (!ret) {
		printf("image: %s\nfile format: raw\nvirtual size: %s (%" PRIu64 " bytes)\n", text, size_format(a->file->size, size),
		       a->file->size);
		if (a->used >= 0)
			printf("disk size: %s\n", size_format((uint64_t)a->used, used));
		return 0;
	}
	obj = json_pack("{s:s, s:s, s:I, s:b}", "filename", text, "format", "raw", "virtual-size", (json_int_t)a->file->size,
			"dirty-flag", false);
	if (obj && a->used >= 0)
		json_object_set_new(obj, "actual-size", json_integer(a->used));
	*ret = obj;
	return obj ? 0 : err_errno(err, -ENOMEM, "%s", text);
}

/* One image. Fills *ret_backing with the path of its backing file, NULL if there is none or it is not asked for. */
static co_fn int co_info_one(struct info_args *a, const char *text, const char *format, json_t *list, char **ret_backing, char **ret_format,
			     struct err *err)
{
	int rc = co_image_open_file(text, format, a->share ? DISK_OPEN_NOLOCK : 0, &a->fmt, &a->file, &a->used, err);
	const char *name = strncmp(text, "file:", 5) ? text : text + 5;
	void *obj = NULL;

	if (rc)
		return rc;
	if (a->fmt == IMAGE_RAW)
		rc = co_info_raw(a, name, a->json ? &obj : NULL, err);
	else
		rc = co_image_qcow2_info(a->file, name, a->used, a->json ? &obj : NULL, err);
	if (!rc && a->fmt == IMAGE_QCOW2 && a->chain)
		rc = co_image_backing(a->file, text, ret_backing, ret_format, err);
	co_disk_close(a->file);
	if (obj && (rc || json_array_append_new(list, obj)))
		rc = rc ? rc : -ENOMEM;
	return rc;
}

static co_fn int co_info(struct image_job *job, struct err *err)
{
	struct info_args *a = job->arg;
	char *text = strdup(a->image), *format = a->format ? strdup(a->format) : NULL;
	json_t *list = json_array();
	int rc = text && list ? 0 : err_errno(err, -ENOMEM, "%s", a->image);

	for (unsigned depth = 0; text && !rc; depth++) {
		char *backing = NULL, *backing_format = NULL;

		if (depth == MAX_CHAIN)
			rc = err_set(err, -ELOOP, "%s: has more than %d images below it, or is below itself", a->image, MAX_CHAIN);
		if (depth && !a->json)
			putchar('\n');
		if (!rc)
			rc = co_info_one(a, text, format, list, &backing, &backing_format, err);
		free(text);
		free(format);
		text = backing;
		format = backing_format;
	}
	free(text);
	free(format);
	if (!rc && a->json)
		rc = image_print_json(a->chain ? json_incref(list) : json_incref(json_array_get(list, 0)));
	json_decref(list);
	return rc;
}

int cli_image_info(int argc, char **argv)
{
	struct info_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_FLAG("backing-chain", 0, &a.chain),
		CLI_FLAG("force-share", 'U', &a.share),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image info", .co_work = co_info, .arg = &a };

	a.image = *cli_parse(job.verb, opts, "IMAGE", argc, argv);
	return image_job_run(&job);
}
