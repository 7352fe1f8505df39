/* SPDX-License-Identifier: MIT */
/*
 * weir image map: which parts of a disk hold data, and where in the file they lie.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/image.h"
#include "format/qcow2/where.h"
#include "util/bytes.h"

struct map_args {
	const char *image, *format;
	uint64_t start, length;
	bool json, share;
	struct disk *disk;
};

/* One line of the map: `length` bytes of one kind. */
struct map_row {
	uint64_t start, length;
	unsigned depth;		/* of the image in the backing chain that decides */
	bool present, zero, data, compressed;
	bool has_offset;
	uint64_t offset;	/* in `file` */
	const char *file;
};

struct map_print {
	bool json, first;
	struct map_row row;	/* not printed yet; length 0: none */
};

static void print_row(struct map_print *p)
{
	const struct map_row *r = &p->row;

	if (!r->length)
		return;
	if (!p->json) {
		if (r->data && r->has_offset)
			printf("%#-16" PRIx64 "%#-16" PRIx64 "%#-16" PRIx64 "%s\n", r->start, r->length, r->offset, r->file);
		else if (r->compressed)
			printf("%#-16" PRIx64 "%#-16" PRIx64 "%-16s\n", r->start, r->length, "compressed");
		return;
	}
	printf("%s{ \"start\": %" PRIu64 ", \"length\": %" PRIu64 ", \"depth\": %u, \"present\": %s, \"zero\": %s, \"data\": %s, "
	       "\"compressed\": %s", p->first ? "[" : ",\n", r->start, r->length, r->depth, r->present ? "true" : "false",
	       r->zero ? "true" : "false", r->data ? "true" : "false", r->compressed ? "true" : "false");
	if (r->has_offset)
		printf(", \"offset\": %" PRIu64, r->offset);
	printf("}");
	p->first = false;
}

static bool continues(const struct map_row *a, const struct map_row *b)
{
	return a->length && a->depth == b->depth && a->present == b->present && a->zero == b->zero && a->data == b->data &&
	       a->compressed == b->compressed && a->has_offset == b->has_offset && a->file == b->file &&
	       (!a->has_offset || a->offset + a->length == b->offset);
}

static void add_row(struct map_print *p, const struct map_row *r)
{
	if (continues(&p->row, r)) {
		p->row.length += r->length;
		return;
	}
	print_row(p);
	p->row = *r;
}

static co_fn int co_rows(struct map_args *a, struct map_print *p, const bool *stop, struct err *err)
{
	struct disk *d = a->disk;
	uint64_t start = min(a->start, d->size);
	uint64_t end = a->length < d->size - start ? start + a->length : d->size;

	for (uint64_t at = start; at < end;) {
		struct qcow2_where w;
		int rc = *stop ? -ECANCELED : co_qcow2_where(d, at, end - at, &w);

		if (rc)
			return err_errno(err, rc, "%s: cannot be asked what lies at offset %" PRIu64, a->image, at);
		add_row(p, &(struct map_row){ .start = at, .length = w.len, .depth = w.depth, .present = w.present, .zero = w.zero, .data = w.data,
					      .compressed = w.compressed, .has_offset = w.has_offset, .offset = w.offset,
					      .file = w.file ? w.file->name : NULL });
		at += w.len;
	}
	return 0;
}

static co_fn int co_open(struct map_args *a, struct err *err)
{
	struct disk_spec *spec;
	enum image_format format;
	int rc = disk_spec_parse(a->image, &spec, err);

	if (rc)
		return rc;
	rc = image_take_format(spec, a->format, &format, err);
	if (!rc)
		rc = image_set_format(spec, format, err);
	if (!rc)
		rc = co_disk_open_spec(spec, a->share ? DISK_OPEN_NOLOCK : 0, &a->disk, err);
	disk_spec_free(spec);
	return rc;
}

static co_fn int co_map(struct image_job *job, struct err *err)
{
	struct map_args *a = job->arg;
	struct map_print p = { .json = a->json, .first = true };
	int rc = co_open(a, err);

	if (rc)
		return rc;
	if (!a->json)
		printf("%-16s%-16s%-16s%s\n", "Offset", "Length", "Mapped to", "File");
	rc = co_rows(a, &p, &job->cancelled, err);
	print_row(&p);
	if (a->json)
		printf("%s]\n", p.first ? "[" : "");
	co_disk_close(a->disk);
	return rc;
}

int cli_image_map(int argc, char **argv)
{
	struct map_args a = { .length = UINT64_MAX };
	const struct cli_opt opts[] = {
		CLI_STR("format", 'f', "FORMAT", &a.format),
		CLI_SIZE("start-offset", 's', "SIZE", &a.start, 0, DISK_MAX_SIZE),
		CLI_SIZE("max-length", 'l', "SIZE", &a.length, 0, DISK_MAX_SIZE),
		CLI_FLAG("force-share", 'U', &a.share),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image map", .co_work = co_map, .arg = &a };

	a.image = *cli_parse(job.verb, opts, "IMAGE", argc, argv);
	return image_job_run(&job);
}
