/* SPDX-License-Identifier: MIT */
/*
 * weir image resize: another size for an image that nobody has open.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/image.h"
#include "cli/image_qcow2.h"
#include "util/bytes.h"
#include "util/log.h"
#include "util/size.h"

struct resize_args {
	const char *image, *format, *text;
	bool shrink, json, quiet;
	bool bitmaps;		/* that are to be kept */
	uint64_t size;
};

/* "10G", or by how much: "+1G", "-512M". */
static int find_size(struct resize_args *a, uint64_t have, struct err *err)
{
	uint64_t by;

	if (*a->text != '+' && *a->text != '-')
		return 0;
	size_parse(a->text + 1, &by);
	if (*a->text == '-' && by > have)
		return err_set(err, -EINVAL, "%s: has %" PRIu64 " bytes, from which %s cannot be taken", a->image, have, a->text + 1);
	if (*a->text == '+' && by > DISK_MAX_SIZE - have)
		return err_set(err, -EFBIG, "%s: cannot have more than %llu bytes", a->image, DISK_MAX_SIZE);
	a->size = *a->text == '+' ? have + by : have - by;
	return 0;
}

/* What cannot be resized though the driver could: as QEMU refuses it. */
static co_fn int co_refuse_qcow2(struct resize_args *a, struct image_job *job, struct err *err)
{
	struct resize_args want = *a;
	enum image_format format;
	struct qcow2_img img = { 0 };
	struct disk *file;
	int64_t used;
	int rc = co_image_open_file(a->image, a->format, DISK_OPEN_RDWR, &format, &file, &used, err);

	if (rc || format != IMAGE_QCOW2) {
		if (!rc)
			co_disk_close(file);
		return rc;
	}
	rc = co_qcow2_img_open(&img, file, a->image, 0, err);
	if (!rc)
		a->size = align_up(a->size, 512);
	if (!rc && img.h.nb_snapshots && img.h.version < 3)
		rc = err_set(err, -ENOTSUP, "%s: has snapshots, and version 2 of the format does not note their sizes; delete them, or make it version 3 with "
			     "\"qemu-img amend -o compat=1.1\"", a->image);
	if (!rc)
		rc = co_qcow2_img_read_bitmaps(&img, err);
	a->bitmaps = !rc && img.n_bm;
	if (!rc)
		rc = find_size(&want, img.h.size, err);
	if (!rc)
		rc = co_qcow2_bitmaps_can_fit(&img, align_up(want.size, 512), &job->cancelled, err);
	qcow2_img_close(&img);
	co_disk_close(file);
	return rc;
}

/* The size has changed, or that has failed. Not to be interrupted: the bitmaps would be lost. */
static co_fn int co_keep_bitmaps(struct resize_args *a, uint64_t old, struct err *err)
{
	enum image_format format;
	struct qcow2_img img = { 0 };
	struct disk *file;
	int64_t used;
	int rc = co_image_open_file(a->image, a->format, DISK_OPEN_RDWR, &format, &file, &used, err);

	if (rc)
		return rc;
	rc = co_qcow2_img_open(&img, file, a->image, QCOW2_PARSE_LAX, err);
	/* Where nothing was written they are as they were. */
	if (!rc && !(img.h.autoclear & QCOW2_AUTOCLEAR_BITMAPS))
		rc = co_qcow2_bitmaps_fit(&img, old, NULL, err);
	qcow2_img_close(&img);
	co_disk_close(file);
	return rc;
}

static co_fn int co_change(struct resize_args *a, struct disk *d, uint64_t *ret_old, struct err *err)
{
	uint64_t old = *ret_old = d->size;
	int rc = find_size(a, old, err);

	if (rc)
		return rc;
	if (a->size < old && !a->shrink)
		return err_set(err, -EINVAL, "%s: has %" PRIu64 " bytes; making it smaller loses what lies behind the new end, and --shrink says that this is meant",
			       a->image, old);
	rc = co_disk_resize(d, a->size, err);
	if (!rc)
		rc = co_disk_flush(d) ? err_set(err, -EIO, "%s: cannot be flushed", a->image) : 0;
	return rc;
}

static co_fn int co_resize(struct image_job *job, struct err *err)
{
	struct resize_args *a = job->arg;
	struct disk_spec *spec;
	enum image_format format;
	struct disk *d = NULL;
	struct err keep = ERR_INIT;
	uint64_t old = 0;
	char text[16];
	int rc = disk_spec_parse(a->image, &spec, err);

	if (rc)
		return rc;
	rc = image_take_format(spec, a->format, &format, err);
	if (!rc)
		rc = co_refuse_qcow2(a, job, err);
	if (!rc)
		rc = image_set_format(spec, format, err);
	/* The driver would warn that it does not keep them. */
	if (!rc && a->bitmaps)
		log_set_level(LOG_ERROR);
	if (!rc)
		rc = co_disk_open_spec(spec, DISK_OPEN_RDWR, &d, err);
	if (!rc)
		rc = co_change(a, d, &old, err);
	co_disk_close(d);
	disk_spec_free(spec);
	if (old && a->bitmaps && co_keep_bitmaps(a, old, &keep) < 0)
		rc = rc ? err_prefix(err, "its bitmaps were lost (%s)", keep.msg) :
		     err_set(err, keep.code, "the size was changed, and its bitmaps were lost: %s", keep.msg);
	if (!rc && a->json)
		return image_print_json(json_pack("{s:s, s:s, s:I, s:I}", "filename", a->image, "format", image_format_names[format], "virtual-size",
						  (json_int_t)a->size, "former-size", (json_int_t)old));
	if (!rc && !a->quiet)
		printf("%s: %s\n", a->image, size_format(a->size, text));
	return rc;
}

int cli_image_resize(int argc, char **argv)
{
	struct resize_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_FLAG("shrink", 0, &a.shrink),
		CLI_FLAG("quiet", 'q', &a.quiet),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image resize", .co_work = co_resize, .arg = &a };
	char **operand;

	/* "-1G" is a size and no option. */
	for (int i = 1; i < argc; i++) {
		if (argv[i][0] == '-' && argv[i][1] >= '0' && argv[i][1] <= '9' && !a.text) {
			a.text = argv[i];
			memmove(&argv[i], &argv[i + 1], (size_t)(argc - i) * sizeof(*argv));
			argc--;
		}
	}
	operand = cli_parse(job.verb, opts, a.text ? "IMAGE" : "IMAGE SIZE", argc, argv);
	a.image = operand[0];
	a.text = a.text ? a.text : operand[1];
	if (size_parse(a.text + (*a.text == '+' || *a.text == '-'), &a.size))
		cli_usage(job.verb, "%s: must be a size such as 10G, +1G or -512M", a.text);
	return image_job_run(&job);
}
