/* SPDX-License-Identifier: MIT */
/*
 * qcow2: the other files that an image names.
 *
 * A guest or whoever made the image chose these names, and the operator's process opens them. So only a plain name is followed, relative to the image's folder, without
 * "..", unless the operator says backing=allow; the format is the one that the header names, or backing_fmt= does, and is never guessed; and
 * nothing that looks like a protocol or an option is one. A loop ends at the limit of depth, or at the lock of a file that is being written.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/internal.h"
#include "util/err.h"

static bool is_within(const char *name)
{
	if (*name == '/')
		return false;
	for (const char *p = name; *p; p += strcspn(p, "/"), p += strspn(p, "/"))
		if (p[0] == '.' && p[1] == '.' && (p[2] == '/' || !p[2]))
			return false;
	return true;
}

static bool is_printable(const char *name)
{
	for (const char *p = name; *p; p++)
		if ((unsigned char)*p < ' ' || *p == 0x7f)
			return false;
	return true;
}

static int check_name(struct qcow2 *q, const struct qcow2_opts *o, const char *what, const char *name, struct err *err)
{
	const char *image = q->disk.name;

	if (o->outside == QCOW2_NO_OTHER_FILE)
		return err_set(err, -EPERM, "%s: names a %s, which backing=none forbids", image, what);
	if (!o->path)
		return err_set(err, -ENOTSUP, "%s: names a %s, and is no file itself, so there is no folder to look for it", image, what);
	if (!*name || !is_printable(name))
		return err_set(err, -EINVAL, "%s: the name of its %s is empty or has control characters", image, what);
	if (!strncmp(name, "json:", 5))
		return err_set(err, -EPERM, "%s: its %s is a \"json:\" description, which is never followed; name a file with \"qemu-img rebase -u\"", image, what);
	if (o->outside != QCOW2_OUTSIDE_ALLOWED && !is_within(name))
		return err_set(err, -EPERM, "%s: its %s \"%.300s\" is not below the folder of the image; if that is meant to be, say backing=allow", image,
			       what, name);
	return 0;
}

/* The DISK string for a name: commas are doubled, and it is a path whatever it looks like. */
static int make_text(const struct qcow2_opts *o, const char *name, const char *format, char **ret)
{
	const char *slash = strrchr(o->path, '/');
	size_t folder = *name == '/' || !slash ? 0 : slash - o->path + 1, max = 2 * (folder + strlen(name)) + 64;
	char *text, *w;

	max += o->file_opts ? strlen(o->file_opts) : 0;
	text = malloc(max);
	if (!text)
		return -ENOMEM;
	w = text + sprintf(text, "file:");
	for (size_t i = 0; i < folder + strlen(name); i++) {
		char c = i < folder ? o->path[i] : name[i - folder];

		*w++ = c;
		if (c == ',')
			*w++ = c;
	}
	sprintf(w, ",format=%s%s", format, o->file_opts ? o->file_opts : "");
	*ret = text;
	return 0;
}

/* Adds what a chain needs to be followed to the options of the file below. */
static int make_opts(const struct qcow2_opts *o, const char *format, char **ret)
{
	bool chain = !strcmp(format, "qcow2");

	return asprintf(ret, "%s%s%s%s", o->file_opts ? o->file_opts : "",
			chain && o->outside == QCOW2_OUTSIDE_ALLOWED ? ",backing=allow" : "",
			chain && o->backing_format ? ",backing_fmt=" : "", chain && o->backing_format ? o->backing_format : "") < 0 ? -ENOMEM : 0;
}

static co_fn int co_open_named(struct qcow2 *q, const struct qcow2_opts *o, const char *what, const char *name, const char *format, unsigned flags,
			       bool backing, struct disk **ret, struct err *err)
{
	struct qcow2_opts with = *o;
	char *opts = NULL, *text = NULL;
	int r = check_name(q, o, what, name, err);

	if (r)
		return r;
	r = make_opts(o, format, &opts);
	with.file_opts = opts;
	if (!r)
		r = make_text(&with, name, format, &text);
	if (r)
		err_errno(err, r, "%s", q->disk.name);
	else
		r = backing ? co_disk_open_backing(text, flags, ret, err) : co_disk_open(text, flags, ret, err);
	if (r && text)
		err_prefix(err, "%.100s: %s", q->disk.name, what);
	free(opts);
	free(text);
	return r;
}

static co_fn int co_open_backing(struct qcow2 *q, const struct qcow2_opts *o, unsigned flags, struct err *err)
{
	const char *format = q->h.backing_format ? q->h.backing_format : o->backing_format;

	if (!q->h.backing_file)
		return 0;
	if (o->depth + 1 >= Q2_MAX_DEPTH)
		return err_set(err, -ELOOP, "%s: is the %uth image of a chain of backing files; at most %d are opened, or the chain is a loop (\"qemu-img info --backing-chain\" shows it)",
			       q->disk.name, o->depth + 1, Q2_MAX_DEPTH);
	if (!format)
		return err_set(err, -EINVAL, "%s: does not say which format its backing file \"%.300s\" has, and it is not guessed; say backing_fmt=raw or backing_fmt=qcow2",
			       q->disk.name, q->h.backing_file);
	if (strcmp(format, "raw") && strcmp(format, "qcow2"))
		return err_set(err, -ENOTSUP, "%s: its backing file has format \"%.20s\"; raw and qcow2 can be opened", q->disk.name, format);
	return co_open_named(q, o, "backing file", q->h.backing_file, format, (flags & DISK_OPEN_NOLOCK) | (o->depth + 1) * DISK_OPEN_CHAIN, true,
			     &q->backing, err);
}

static co_fn int co_open_data_file(struct qcow2 *q, const struct qcow2_opts *o, unsigned flags, struct err *err)
{
	struct disk *data;
	int ret;

	if (!q->has_data_file)
		return 0;
	if (!q->h.data_file)
		return err_set(err, -EINVAL, "%s: has a data file and does not name it", q->disk.name);
	ret = co_open_named(q, o, "data file", q->h.data_file, "raw", flags & (DISK_OPEN_RDWR | DISK_OPEN_NOLOCK), false, &data, err);
	if (ret)
		return ret;
	if (data->size < q->h.size && (flags & DISK_OPEN_RDWR)) {
		ret = err_set(err, -EINVAL, "%s: its data file has %llu bytes, and must have %llu; enlarge it with truncate", q->disk.name,
			      (unsigned long long)data->size, (unsigned long long)q->h.size);
		co_disk_close(data);
		return ret;
	}
	q->data = data;
	return 0;
}

co_fn int co_q2_open_others(struct qcow2 *q, const struct qcow2_opts *o, unsigned flags, struct err *err)
{
	int ret = co_open_data_file(q, o, flags, err);

	if (ret)
		return ret;
	if (o->backing) {
		q->backing = o->backing;
		return 0;
	}
	return co_open_backing(q, o, flags, err);
}
