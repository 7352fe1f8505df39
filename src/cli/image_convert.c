/* SPDX-License-Identifier: MIT */
/*
 * weir image convert: copies a disk into a new image, or into one that exists.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/image.h"
#include "cli/image_new.h"
#include "format/qcow2/pack.h"
#include "image/convert.h"
#include "rt/rt.h"
#include "util/bytes.h"
#include "util/size.h"

static const char *const cache_names[] = { "none", "writeback", "writethrough", "directsync", "unsafe", NULL };

struct convert_args {
	const char *src, *dst, *src_format, *dst_format, *options, *snapshot;
	int src_cache, dst_cache; /* index of cache_names, -1: not given */
	uint64_t sparse, parallel;
	bool no_create, force, progress, quiet, json, share;
	bool full;		/* zeroes are written, too */
	bool compress;
	struct qcow2_packer *packer;
	struct image_new new;
	struct image_target target;
	struct disk *in, *out, *base;
};

static void on_copied(void *arg, uint64_t done, uint64_t total)
{
	struct image_job *job = arg;
	struct convert_args *a = job->arg;

	if (!a->quiet)
		image_progress(job->verb, a->progress, done, total);
}

/* The innermost disk's cache mode, unless its own options have one. */
static int set_cache(struct disk_spec *spec, const char *mode, struct err *err)
{
	int rc;

	while (spec->inner)
		spec = spec->inner;
	for (size_t i = 0; i < spec->opts.n; i++)
		if (!strcmp(spec->opts.v[i].key, "cache"))
			return 0;
	if (strcmp(spec->driver, "file"))
		return 0;
	rc = opts_add(&spec->opts, "cache", mode);
	return rc ? err_errno(err, rc, "%s", spec->text) : 0;
}

static co_fn int co_open_source(struct convert_args *a, struct err *err)
{
	unsigned flags = a->share ? DISK_OPEN_NOLOCK : 0;
	struct disk_spec *spec;
	enum image_format format;
	int rc = disk_spec_parse(a->src, &spec, err);

	if (rc)
		return rc;
	rc = image_take_format(spec, a->src_format, &format, err);
	if (!rc)
		rc = image_set_format(spec, format, err);
	if (!rc)
		rc = set_cache(spec, a->src_cache < 0 ? "writeback" : cache_names[a->src_cache], err);
	if (!rc && a->snapshot && format != IMAGE_QCOW2)
		rc = err_set(err, -EINVAL, "%s: is raw and has no snapshots; if it is qcow2, say -f qcow2", a->src);
	if (!rc && a->snapshot && opts_add(&spec->opts, "snapshot", a->snapshot))
		rc = err_errno(err, -ENOMEM, "%s", a->src);
	if (!rc)
		rc = co_disk_open_spec(spec, flags, &a->in, err);
	disk_spec_free(spec);
	return rc;
}

/* A new image of the source's size. */
static co_fn int co_make_target(struct image_job *job, struct err *err)
{
	struct convert_args *a = job->arg;
	struct image_new *n = &a->new;
	int rc;

	if (n->size_given && n->q.size != a->in->size)
		return err_set(err, -EINVAL, "-o size: the copy has the size of its source; resize it afterwards");
	n->q.size = a->in->size;
	n->q.stop = &job->cancelled;
	/* The copy itself writes them. */
	a->full = a->target.format == IMAGE_RAW && n->q.prealloc == QCOW2_PREALLOC_FULL;
	if (a->full)
		n->q.prealloc = QCOW2_PREALLOC_FALLOC;
	rc = co_image_new_backing(n, &a->target, false, true, err);
	if (!rc && n->q.backing_file)
		rc = co_image_new_open_backing(n, &a->target, &a->base, err);
	if (rc)
		return rc;
	return a->compress ? qcow2_create_check(&n->q, a->dst, err) : co_image_new_make(n, &a->target, err);
}

static co_fn int co_open_target(struct convert_args *a, struct err *err)
{
	struct image_target *t = &a->target;
	struct disk_spec *spec;
	char want[16], have[16];
	int rc = image_target_spec(t, &spec, err);

	if (rc)
		return rc;
	rc = image_set_format(spec, a->compress ? IMAGE_RAW : t->format, err);
	/* The operator has named them on this very command line. */
	if (!rc && !a->compress && (a->new.q.backing_file || a->new.q.data_file) && opts_add(&spec->opts, "backing", "allow"))
		rc = err_errno(err, -ENOMEM, "%s", a->dst);
	if (!rc && a->dst_cache >= 0)
		rc = set_cache(spec, cache_names[a->dst_cache], err);
	if (!rc)
		rc = co_disk_open_spec(spec, DISK_OPEN_RDWR, &a->out, err);
	disk_spec_free(spec);
	if (!rc && a->compress)
		return co_qcow2_pack_begin(&a->packer, a->out, &a->new.q, (unsigned)a->parallel, err);
	/* A qcow2 image of a source that is no whole number of sectors is a little larger. */
	if (!rc && a->out->size < a->in->size)
		rc = err_set(err, -ENOSPC, "%s: has %s, the source has %s; make it larger first", a->dst, size_format(a->out->size, have),
			     size_format(a->in->size, want));
	return rc;
}

static int refuse_same_file(const struct convert_args *a, struct err *err)
{
	struct disk_spec *src;
	struct stat s, d;
	int rc = disk_spec_parse(a->src, &src, err);

	if (rc)
		return rc;
	if (image_path(src) && a->target.path && !stat(src->rest, &s) && !stat(a->target.path, &d) && s.st_dev == d.st_dev &&
	    s.st_ino == d.st_ino)
		rc = err_set(err, -EINVAL, "%s: is the source and the target; name another target", a->dst);
	disk_spec_free(src);
	return rc;
}

static int parse_options(struct convert_args *a, struct err *err)
{
	if (a->compress && (a->target.in_place || a->target.format != IMAGE_QCOW2))
		return err_set(err, -EINVAL, "%s: only a new qcow2 image can be compressed; -O qcow2 makes one", a->dst);
	if (!a->target.in_place)
		return image_new_options(&a->new, &a->target, a->options, NULL, NULL, err);
	if (a->options)
		return err_set(err, -EINVAL, "%s: exists and is written as it is; -o is for images that are created", a->dst);
	return 0;
}

static int report(const struct convert_args *a, const struct image_copy_result *r, uint64_t ns)
{
	char data[16], zero[16], time[16];

	if (a->json)
		return image_print_json(json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "source", a->src, "target", a->dst, "format",
			image_format_names[a->target.format], "virtual-size", (json_int_t)a->in->size, "data-bytes", (json_int_t)r->data,
			"zero-bytes", (json_int_t)r->zero, "backing-bytes", (json_int_t)r->same, "duration-ns", (json_int_t)ns));
	if (!a->quiet)
		printf("%s: %s of data, %s of zeroes in %s\n", a->dst, size_format(r->data, data), size_format(r->zero, zero),
		       duration_format(ns, time));
	return 0;
}

static co_fn int co_copy(struct image_job *job, struct err *err)
{
	struct convert_args *a = job->arg;
	struct image_copy_result result;
	uint64_t start = rt_now_exact_ns();
	struct image_copy copy = {
		.src = a->in, .dst = a->out, .size = a->in->size, .dst_zero = a->target.temp && !a->base, .base = a->base,
		.head_last = a->target.in_place, .unit = (uint32_t)a->new.q.cluster_size, .sparse = a->full ? 0 : (uint32_t)a->sparse, .parallel = (unsigned)a->parallel,
		.progress = on_copied, .progress_arg = job, .stop = &job->cancelled,
	};
	int rc;

	/* Each piece takes two buffers. */
	if (a->base)
		copy.parallel = min(copy.parallel, IMAGE_COPY_PARALLEL_MAX / 2u);
	job->cancel[0] = a->in;
	job->cancel[1] = a->out;
	if (a->compress) {
		copy.co_write = co_qcow2_pack_write;
		copy.co_zero = co_qcow2_pack_zero;
		copy.write_arg = a->packer;
	}
	rc = co_image_copy(&copy, &result, err);
	if (a->compress) {
		int end = co_qcow2_pack_end(a->packer, !rc, err);

		a->packer = NULL;
		rc = rc ? rc : end;
	}
	job->cancel[0] = job->cancel[1] = NULL;
	image_progress_end();
	if (rc && a->target.in_place)
		err_prefix(err, "%s: IS INCOMPLETE now", a->dst);
	if (rc)
		return rc;
	co_disk_close(a->out);
	a->out = NULL;
	rc = image_target_commit(&a->target, err);
	return rc ? rc : report(a, &result, rt_now_exact_ns() - start);
}

static co_fn int co_convert(struct image_job *job, struct err *err)
{
	struct convert_args *a = job->arg;
	int rc = image_target_begin(&a->target, a->dst, a->dst_format, a->no_create, a->force, err);

	if (!rc)
		rc = refuse_same_file(a, err);
	if (!rc)
		rc = co_image_target_lock(&a->target, err);
	if (!rc)
		rc = parse_options(a, err);
	if (!rc)
		rc = co_open_source(a, err);
	if (!rc && a->target.temp)
		rc = co_make_target(job, err);
	if (!rc)
		rc = co_open_target(a, err);
	if (!rc)
		rc = co_copy(job, err);
	co_disk_close(a->in);
	co_disk_close(a->out);
	co_disk_close(a->base);
	co_image_target_unlock(&a->target);
	image_new_fini(&a->new, rc == 0);
	image_target_end(&a->target);
	return rc;
}

int cli_image_convert(int argc, char **argv)
{
	struct convert_args a = { .src_cache = -1, .dst_cache = -1, .sparse = 4096, .parallel = 8 };
	const struct cli_opt opts[] = {
		CLI_STR("source-format", 'f', "FORMAT", &a.src_format),
		CLI_STR("target-format", 'O', "FORMAT", &a.dst_format),
		CLI_STR("options", 'o', "OPTIONS", &a.options),
		CLI_STR("snapshot", 'l', "SNAPSHOT", &a.snapshot),
		CLI_FLAG("compress", 'c', &a.compress),
		CLI_FLAG("no-create", 'n', &a.no_create),
		CLI_FLAG("force", 0, &a.force),
		CLI_SIZE("sparse", 'S', "SIZE", &a.sparse, 0, 1 << 20),
		CLI_U64("parallel", 'm', "N", &a.parallel, 1, IMAGE_COPY_PARALLEL_MAX),
		CLI_ENUM("source-cache", 'T', cache_names, &a.src_cache),
		CLI_ENUM("target-cache", 't', cache_names, &a.dst_cache),
		CLI_FLAG("force-share", 'U', &a.share),
		CLI_FLAG("progress", 'p', &a.progress),
		CLI_FLAG("quiet", 'q', &a.quiet),
		CLI_FLAG("json", 'j', &a.json),
		CLI_END
	};
	struct image_job job = { .verb = "image convert", .co_work = co_convert, .arg = &a };
	char **operand = cli_parse(job.verb, opts, "SOURCE TARGET", argc, argv);

	if (a.sparse && (a.sparse < 512 || !is_pow2(a.sparse)))
		cli_usage(job.verb, "--sparse: must be 0 or a power of two from 512 bytes on");
	a.src = operand[0];
	a.dst = operand[1];
	return image_job_run(&job);
}
