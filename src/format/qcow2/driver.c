/* SPDX-License-Identifier: MIT */
/* qcow2: options of a DISK string. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/internal.h"
#include "util/err.h"

/* What the image's file was opened with, its backing files are opened with, too. */
static int inherited(struct disk_spec *spec, char **ret)
{
	static const char *const keys[] = { "aio", "cache", "locking", "discard" };
	char *text = calloc(1, 1), *more;

	for (size_t i = 0; text && i < ARRAY_SIZE(keys); i++) {
		const char *val = opts_str(&spec->opts, keys[i]);

		if (!val)
			continue;
		if (asprintf(&more, "%s,%s=%s", text, keys[i], val) < 0)
			more = NULL;
		free(text);
		text = more;
	}
	*ret = text;
	return text ? 0 : -ENOMEM;
}

static co_fn int co_open_format(struct disk_spec *spec, struct disk *file, unsigned flags, struct disk **ret, struct err *err)
{
	static const char *const outside[] = { "inside", "allow", "none", NULL };
	static const char *const formats[] = { "raw", "qcow2", NULL };
	struct qcow2_opts o = { .path = !strcmp(spec->driver, "file") ? spec->rest : NULL };
	int out = 0, format = -1, r;
	char *opts = NULL;

	o.snapshot = opts_str(&spec->opts, "snapshot");
	r = opts_enum(&spec->opts, "backing", outside, &out, err);
	if (!r)
		r = opts_enum(&spec->opts, "backing_fmt", formats, &format, err);
	if (!r)
		r = opts_size(&spec->opts, "l2-cache-size", &o.table_cache, err);
	if (!r)
		r = opts_size(&spec->opts, "cow-debt", &o.fill_debt, err);
	if (r)
		return err_prefix(err, "%.200s", spec->text);
	if (flags & DISK_OPEN_LOG)
		return err_set(err, -EINVAL, "%.200s: is a qcow2 image; a write log is kept in a raw file or a device", spec->text);
	r = inherited(spec, &opts);
	if (r)
		return err_errno(err, r, "%.200s", spec->text);
	o.outside = out;
	o.backing_format = format >= 0 ? formats[format] : NULL;
	o.file_opts = opts;
	o.depth = flags / DISK_OPEN_CHAIN;
	r = co_qcow2_open(file, spec->rest, &o, flags, ret, err);
	free(opts);
	return r;
}

const struct disk_format qcow2_format = {
	.name = "qcow2",
	.suffix = ".qcow2",
	.options = "backing,backing_fmt,l2-cache-size,cow-debt,snapshot",
	.co_open = co_open_format,
};
