/* SPDX-License-Identifier: MIT */
/* What a qcow2 image says of itself: QEMU's keys. */
#include "cli/image_qcow2.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/image.h"
#include "util/bytes.h"
#include "util/size.h"

/* --- Snapshots --- */

void *image_snapshots_json(const struct qcow2_img *img)
{
	json_t *all = json_array();

	for (unsigned i = 0; all && i < img->n_snap; i++) {
		const struct qcow2_snap *s = &img->snap[i];
		json_t *o = json_pack("{s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I}", "id", image_json_text(s->id), "name", image_json_text(s->name),
			"vm-state-size", (json_int_t)s->vm_state_size, "date-sec", (json_int_t)s->date_sec, "date-nsec", (json_int_t)s->date_nsec,
			"vm-clock-sec", (json_int_t)(s->clock_nsec / 1000000000), "vm-clock-nsec", (json_int_t)(s->clock_nsec % 1000000000),
			"virtual-size", (json_int_t)s->disk_size);

		if (o && s->icount != UINT64_MAX)
			json_object_set_new(o, "icount", json_integer((json_int_t)s->icount));
		if (!o || json_array_append_new(all, o)) {
			json_decref(all);
			return NULL;
		}
	}
	return all;
}

void image_snapshots_print(const struct qcow2_img *img)
{
	char size[16], state[16], date[32];

	if (!img->n_snap)
		return;
	printf("%-8s %-19s %-10s %-10s %s\n", "ID", "DATE", "SIZE", "VM STATE", "NAME");
	for (unsigned i = 0; i < img->n_snap; i++) {
		const struct qcow2_snap *s = &img->snap[i];
		time_t t = s->date_sec;
		struct tm tm;

		strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S", localtime_r(&t, &tm));
		image_print_text(s->id, stdout);
		printf("%*s %-19s %-10s %-10s ", (int)(strlen(s->id) < 8 ? 8 - strlen(s->id) : 0), "", date, size_format(s->disk_size, size),
		       size_format(s->vm_state_size, state));
		image_print_text(s->name, stdout);
		putchar('\n');
	}
}

/* --- Info --- */

static json_t *bitmaps_json(const struct qcow2_img *img)
{
	json_t *all = json_array();

	for (unsigned i = 0; i < img->n_bm; i++) {
		const struct qcow2_bm *b = &img->bm[i];
		json_t *flags = json_array();

		if (b->flags & QCOW2_BM_IN_USE)
			json_array_append_new(flags, json_string("in-use"));
		if (b->flags & QCOW2_BM_AUTO)
			json_array_append_new(flags, json_string("auto"));
		json_array_append_new(all, json_pack("{s:o, s:o, s:I}", "name", image_json_text(b->name), "flags", flags, "granularity",
						     b->granularity_bits < 63 ? (json_int_t)1 << b->granularity_bits : 0));
	}
	return all;
}

static json_t *specific_json(const struct qcow2_img *img)
{
	const struct qcow2_header *h = &img->h;
	json_t *d = json_pack("{s:s, s:i}", "compat", h->version < 3 ? "0.10" : "1.1", "refcount-bits", 1 << h->geo.refcount_order);

	json_object_set_new(d, "compression-type", json_string(h->compression_type == QCOW2_ZSTD ? "zstd" : "zlib"));
	if (h->version >= 3) {
		json_object_set_new(d, "lazy-refcounts", json_boolean(h->compat & QCOW2_COMPAT_LAZY_REFCOUNTS));
		json_object_set_new(d, "corrupt", json_boolean(h->incompat & QCOW2_INCOMPAT_CORRUPT));
		json_object_set_new(d, "extended-l2", json_boolean(h->incompat & QCOW2_INCOMPAT_EXTL2));
	}
	if (h->incompat & QCOW2_INCOMPAT_DATA_FILE) {
		if (h->data_file)
			json_object_set_new(d, "data-file", image_json_text(h->data_file));
		json_object_set_new(d, "data-file-raw", json_boolean(h->autoclear & QCOW2_AUTOCLEAR_DATA_FILE_RAW));
	}
	if (img->n_bm)
		json_object_set_new(d, "bitmaps", bitmaps_json(img));
	return d;
}

static json_t *info_json(const struct qcow2_img *img, int64_t used)
{
	const struct qcow2_header *h = &img->h;
	json_t *o = json_pack("{s:o, s:s, s:I, s:I, s:b}", "filename", image_json_text(img->name), "format", "qcow2", "virtual-size", (json_int_t)h->size,
			      "cluster-size", (json_int_t)h->geo.cluster_size, "dirty-flag", !!(h->incompat & QCOW2_INCOMPAT_DIRTY));

	if (!o)
		return NULL;
	if (used >= 0)
		json_object_set_new(o, "actual-size", json_integer(used));
	if (h->crypt_method)
		json_object_set_new(o, "encrypted", json_true());
	if (h->backing_file)
		json_object_set_new(o, "backing-filename", image_json_text(h->backing_file));
	if (h->backing_format)
		json_object_set_new(o, "backing-filename-format", image_json_text(h->backing_format));
	if (img->n_snap)
		json_object_set_new(o, "snapshots", image_snapshots_json(img));
	json_object_set_new(o, "format-specific", json_pack("{s:s, s:o}", "type", "qcow2", "data", specific_json(img)));
	return o;
}

static void print_named(const char *what, const char *text)
{
	if (!text)
		return;
	printf("%s: ", what);
	image_print_text(text, stdout);
	putchar('\n');
}

static const char *yes_no(bool b)
{
	return b ? "true" : "false";
}

static void print_specific(const struct qcow2_img *img)
{
	const struct qcow2_header *h = &img->h;
	char name[64];

	printf("Format specific information:\n    compat: %s\n    compression type: %s\n", h->version < 3 ? "0.10" : "1.1",
	       h->compression_type == QCOW2_ZSTD ? "zstd" : "zlib");
	if (h->version >= 3)
		printf("    lazy refcounts: %s\n", yes_no(h->compat & QCOW2_COMPAT_LAZY_REFCOUNTS));
	printf("    refcount bits: %u\n", 1u << h->geo.refcount_order);
	if (h->version >= 3)
		printf("    dirty: %s\n    corrupt: %s\n    extended l2: %s\n", yes_no(h->incompat & QCOW2_INCOMPAT_DIRTY),
		       yes_no(h->incompat & QCOW2_INCOMPAT_CORRUPT), yes_no(h->incompat & QCOW2_INCOMPAT_EXTL2));
	if (h->incompat & QCOW2_INCOMPAT_DATA_FILE) {
		print_named("    data file", h->data_file ? h->data_file : "not named");
		printf("    data file raw: %s\n", yes_no(h->autoclear & QCOW2_AUTOCLEAR_DATA_FILE_RAW));
	}
	for (unsigned bit = 0; bit < 64; bit++) {
		const char *what = qcow2_feature_name(h, 0, bit, name, sizeof(name));

		if (h->incompat & ~(uint64_t)QCOW2_INCOMPAT_KNOWN & 1ull << bit)
			printf("    unknown incompatible feature: bit %u (%s)\n", bit, what ? what : "without a name");
	}
	for (unsigned i = 0; i < img->n_bm; i++) {
		print_named("    bitmap", img->bm[i].name);
		printf("        granularity: %" PRIu64 "%s%s\n", img->bm[i].granularity_bits < 63 ? (uint64_t)1 << img->bm[i].granularity_bits : 0,
		       img->bm[i].flags & QCOW2_BM_AUTO ? ", auto" : "", img->bm[i].flags & QCOW2_BM_IN_USE ? ", IN USE: inconsistent" : "");
	}
}

static void print_info(const struct qcow2_img *img, int64_t used)
{
	const struct qcow2_header *h = &img->h;
	char size[16];

	print_named("image", img->name);
	printf("file format: qcow2\nvirtual size: %s (%" PRIu64 " bytes)\n", size_format(h->size, size), h->size);
	if (used >= 0)
		printf("disk size: %s\n", size_format((uint64_t)used, size));
	printf("cluster_size: %u\n", h->geo.cluster_size);
	if (h->crypt_method)
		printf("encrypted: yes, which is not supported\n");
	print_named("backing file", h->backing_file);
	print_named("backing file format", h->backing_format);
	if (img->n_snap)
		printf("Snapshot list:\n");
	image_snapshots_print(img);
	print_specific(img);
}

co_fn int co_image_qcow2_info(struct disk *file, const char *name, int64_t used, void **ret, struct err *err)
{
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, name, QCOW2_PARSE_LAX, err);

	if (!rc)
		rc = co_qcow2_img_read_snapshots(&img, err);
	if (!rc)
		rc = co_qcow2_img_read_bitmaps(&img, err);
	if (!rc && ret) {
		*ret = info_json(&img, used);
		rc = *ret ? 0 : err_errno(err, -ENOMEM, "%s", name);
	} else if (!rc) {
		print_info(&img, used);
	}
	qcow2_img_close(&img);
	return rc;
}

/* No way out of the image's folder: the name was chosen by whoever made the image. */
static bool stays_below(const char *name)
{
	if (*name == '/')
		return false;
	for (const char *p = name; *p; p += strcspn(p, "/"), p += strspn(p, "/"))
		if (!strncmp(p, "..", 2) && (p[2] == '/' || !p[2]))
			return false;
	return true;
}

co_fn int co_image_backing(struct disk *file, const char *text, char **ret, char **ret_format, struct err *err)
{
	struct qcow2_img img;
	struct disk_spec *spec = NULL;
	char *path = NULL;
	int rc = co_qcow2_img_open(&img, file, text, QCOW2_PARSE_LAX, err);

	if (!rc && img.h.backing_file) {
		const char *name = img.h.backing_file;

		rc = disk_spec_parse(text, &spec, err);
		if (!rc && (name[strcspn(name, ":/")] == ':' || !image_path(spec)))
			rc = err_set(err, -EINVAL, "%s: the name of its backing file is no path, and is not followed", text);
		if (!rc && !stays_below(name))
			rc = err_set(err, -EPERM, "%s: its backing file is not below the folder of the image, and is not followed; ask for it by its own name", text);
		if (!rc && !img.h.backing_format)
			rc = err_set(err, -EINVAL, "%s: does not say which format its backing file has; qemu-img rebase -u -F FORMAT -b FILE writes it down", text);
		if (!rc) {
			path = image_beside(image_path(spec), name);
			*ret = path ? image_disk_text(path) : NULL;
			*ret_format = strdup(img.h.backing_format);
			rc = *ret && *ret_format ? 0 : err_errno(err, -ENOMEM, "%s", text);
		}
	}
	free(path);
	disk_spec_free(spec);
	qcow2_img_close(&img);
	return rc;
}
