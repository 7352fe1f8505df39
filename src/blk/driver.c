/* SPDX-License-Identifier: MIT */
/*
 * The table of drivers, the defaults of the command line, and opening a parsed DISK string.
 *
 * The tables are filled at start, before the first open, and are only read afterwards.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "blk/spec.h"
#include "util/bytes.h"
#include "util/err.h"

#define MAX_DRIVERS 32
#define MAX_FORMATS 8
#define MAX_DEFAULTS 16

static const struct disk_driver *drivers[MAX_DRIVERS];
static unsigned n_drivers;

static const struct disk_format *formats[MAX_FORMATS];
static unsigned n_formats;

static struct {
	char *key, *val;
} defaults[MAX_DEFAULTS];
static unsigned n_defaults;

void disk_register_driver(const struct disk_driver *drv)
{
	if (disk_find_driver(drv->name))
		return;
	assert(n_drivers < MAX_DRIVERS);
	drivers[n_drivers++] = drv;
}

const struct disk_driver *disk_find_driver(const char *name)
{
	for (unsigned i = 0; i < n_drivers; i++)
		if (!strcmp(drivers[i]->name, name))
			return drivers[i];
	return NULL;
}

static const struct disk_format *find_format(const char *name)
{
	for (unsigned i = 0; i < n_formats; i++)
		if (!strcmp(formats[i]->name, name))
			return formats[i];
	return NULL;
}

void disk_register_format(const struct disk_format *format)
{
	if (find_format(format->name))
		return;
	assert(n_formats < MAX_FORMATS);
	formats[n_formats++] = format;
}

void disk_set_default(const char *key, const char *val)
{
	unsigned i;
	char *copy;

	if (!val)
		return;
	for (i = 0; i < n_defaults && strcmp(defaults[i].key, key); i++)
		;
	assert(i < MAX_DEFAULTS);
	copy = strdup(val);
	if (!copy)
		abort();
	if (i == n_defaults) {
		defaults[i].key = strdup(key);
		if (!defaults[i].key)
			abort();
		n_defaults++;
	}
	free(defaults[i].val);
	defaults[i].val = copy;
}

/* `list` is "aio=io_uring|native,cache,lock": names, perhaps with what they take. */
static bool list_has(const char *list, const char *key)
{
	size_t len = strlen(key);

	for (const char *p = list ? list : ""; *p; p += strcspn(p, ",")) {
		p += strspn(p, ", ");
		if (!strncmp(p, key, len) && (!p[len] || strchr(",= ", p[len])))
			return true;
	}
	return false;
}

/* The cache mode is chosen for images: a log's is its own, and one that loses data is refused there. */
static bool default_applies(const char *key, unsigned flags)
{
	return !(flags & DISK_OPEN_LOG) || strcmp(key, "cache");
}

static int add_defaults(struct disk_spec *spec, const struct disk_driver *drv, unsigned flags, struct err *err)
{
	int ret;

	for (unsigned i = 0; i < n_defaults; i++) {
		bool given = false;

		for (size_t k = 0; k < spec->opts.n; k++)
			given |= !strcmp(spec->opts.v[k].key, defaults[i].key);
		if (given || !default_applies(defaults[i].key, flags) || !list_has(drv->options, defaults[i].key))
			continue;
		ret = opts_add(&spec->opts, defaults[i].key, defaults[i].val);
		if (ret)
			return err_errno(err, ret, "%.200s: cannot take the default %s=%s", spec->text, defaults[i].key, defaults[i].val);
	}
	return 0;
}

static const char *const other_formats[] = { "qcow2", "qcow", "vmdk", "vhdx", "vdi", "vpc", "luks", NULL };

/* *ret is NULL for raw. Without the option only the suffix of a file says something. */
static int choose_format(struct disk_spec *spec, const struct disk_format **ret, struct err *err)
{
	const char *name = opts_str(&spec->opts, "format"), *dot;

	*ret = NULL;
	if (name) {
		*ret = find_format(name);
		if (*ret || !strcmp(name, "raw"))
			return 0;
		for (int i = 0; other_formats[i]; i++)
			if (!strcmp(name, other_formats[i]))
				return err_set(err, -ENOTSUP, "%.200s: format=%s: this program opens raw %simages only; convert it with "
					       "\"qemu-img convert -O raw\"", spec->text, name, n_formats ? "and qcow2 " : "");
		return err_set(err, -EINVAL, "%.200s: format=%.40s: no such format; write format=raw", spec->text, name);
	}
	dot = strrchr(spec->rest, '.');
	if (strcmp(spec->driver, "file") || !dot)
		return 0;
	for (unsigned i = 0; i < n_formats; i++)
		if (!strcmp(dot, formats[i]->suffix))
			*ret = formats[i];
	if (!*ret && !strcmp(dot, ".qcow2"))
		return err_set(err, -ENOTSUP, "%.200s: is a qcow2 image by its name, and this program opens raw images only; convert it with "
			       "\"qemu-img convert -O raw\", or say format=raw if its bytes are the disk", spec->text);
	return 0;
}

static int check_options(struct disk_spec *spec, const struct disk_driver *drv, const struct disk_format *format, struct err *err)
{
	for (size_t i = 0; i < spec->opts.n; i++) {
		const struct opt *o = &spec->opts.v[i];

		if (!drv->any_option && strcmp(o->key, "format") && !list_has(drv->options, o->key) && !(format && list_has(format->options, o->key)))
			return err_set(err, -EINVAL, "%.200s: unknown option \"%.40s\"; driver %s knows: %s%sformat%s%s", spec->text, o->key,
				       drv->name, drv->options ? drv->options : "", drv->options && *drv->options ? "," : "",
				       format ? ", and format=" : "", format ? format->name : "");
	}
	return 0;
}

static struct {
	int (*co_wrap)(void *arg, struct disk **d);
	void *arg;
} below_format;

void disk_set_below_format(int (*co_wrap)(void *arg, struct disk **d), void *arg)
{
	below_format.co_wrap = co_wrap;
	below_format.arg = arg;
}

static struct {
	int (*co_open)(void *arg, const char *text, unsigned flags, struct disk **ret, struct err *err);
	void *arg;
} backing_open;

void disk_set_backing_open(int (*co_open)(void *arg, const char *text, unsigned flags, struct disk **ret, struct err *err), void *arg)
{
	backing_open.co_open = co_open;
	backing_open.arg = arg;
}

co_fn int co_disk_open_backing(const char *text, unsigned flags, struct disk **ret, struct err *err)
{
	return backing_open.co_open ? backing_open.co_open(backing_open.arg, text, flags, ret, err) : co_disk_open(text, flags, ret, err);
}

/* Puts the format over the disk that was opened. */
static co_fn int co_open_format(const struct disk_format *format, struct disk_spec *spec, unsigned flags, struct disk **d, struct err *err)
{
	struct disk *file = *d;
	int r;

	if (below_format.co_wrap)
		below_format.co_wrap(below_format.arg, &file);
	r = format->co_open(spec, file, flags, d, err);

	if (r)
		co_disk_close(file);
	return r;
}

co_fn int co_disk_open_spec(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	const struct disk_driver *drv = disk_find_driver(spec->driver);
	const struct disk_format *format;
	struct disk *d;
	int r;

	if (!drv)
		return err_set(err, -ENOTSUP, "%.200s: this build has no driver \"%s\"", spec->text, spec->driver);
	r = choose_format(spec, &format, err);
	if (!r)
		r = check_options(spec, drv, format, err);
	if (!r)
		r = add_defaults(spec, drv, flags, err);
	if (!r)
		r = drv->co_open(spec, flags, &d, err);
	if (!r && format)
		r = co_open_format(format, spec, flags, &d, err);
	if (r)
		return r;
	r = opts_finish(&spec->opts, spec->text, drv->options ? drv->options : "", err);
	if (r) {
		co_disk_close(d);
		return r;
	}
	*ret = d;
	return 0;
}

co_fn int co_disk_open(const char *text, unsigned flags, struct disk **ret, struct err *err)
{
	struct disk_spec *spec;
	int r = disk_spec_parse(text, &spec, err);

	if (r)
		return r;
	r = co_disk_open_spec(spec, flags, ret, err);
	disk_spec_free(spec);
	return r;
}
