/* SPDX-License-Identifier: MIT */
/* Making an image: options, backing file, data file. */
#include "cli/image_new.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/size.h"

#define RAW_OPTIONS "size,preallocation"

/* --- Options --- */

static int raw_options(struct image_new *n, const struct image_target *t, struct err *err)
{
	static const char *const names[] = { "off", "falloc", "full", NULL };
	static const enum qcow2_prealloc modes[] = { QCOW2_PREALLOC_OFF, QCOW2_PREALLOC_FALLOC, QCOW2_PREALLOC_FULL };
	int mode = 0, rc = opts_size(&n->opts, "size", &n->q.size, err);

	if (!rc)
		rc = opts_enum(&n->opts, "preallocation", names, &mode, err);
	n->q.prealloc = modes[mode];
	return rc ? rc : opts_finish(&n->opts, t->spec->text, RAW_OPTIONS, err);
}

static int add(struct opts *o, const char *key, const char *val, const char *option, struct err *err)
{
	int rc;

	if (!val)
		return 0;
	for (size_t i = 0; i < o->n; i++)
		if (!strcmp(o->v[i].key, key) && strcmp(o->v[i].val, val))
			return err_set(err, -EINVAL, "%s says %.100s, %s=%.100s something else; leave one away", option, val, key, o->v[i].val);
	rc = opts_add(o, key, val);
	return rc ? err_errno(err, rc, "%s", key) : 0;
}

/* Only what is opened as a path by everybody is one: QEMU takes what has a colon before the first slash for a protocol. */
static int check_plain(const char *name, const char *what, struct err *err)
{
	size_t colon = name ? strcspn(name, ":/") : 0;

	if (name && name[colon] == ':')
		return err_set(err, -EINVAL, "%.200s: a %s is named by a path, relative to the image, and not by a protocol; if it is a path, write ./%.200s",
			       name, what, name);
	return 0;
}

int image_new_options(struct image_new *n, const struct image_target *t, const char *options, const char *backing, const char *backing_format,
		      struct err *err)
{
	int rc = opts_parse(&n->opts, options, "-o", err);

	for (size_t i = 0; i < n->opts.n && !rc; i++)
		n->size_given |= !strcmp(n->opts.v[i].key, "size");
	if (!rc)
		rc = add(&n->opts, "backing_file", backing, "-b", err);
	if (!rc)
		rc = add(&n->opts, "backing_fmt", backing_format, "-F", err);
	if (rc)
		return rc;
	if (t->format == IMAGE_RAW)
		return raw_options(n, t, err);
	rc = qcow2_create_options(&n->q, &n->opts, t->spec->text, err);
	if (!rc)
		rc = check_plain(n->q.backing_file, "backing file", err);
	if (!rc)
		rc = check_plain(n->q.data_file, "data file", err);
	if (!rc && n->q.backing_format && strcmp(n->q.backing_format, "raw") && strcmp(n->q.backing_format, "qcow2"))
		rc = err_set(err, -ENOTSUP, "%s: backing_fmt=%.40s: a backing file is raw or qcow2", t->spec->text, n->q.backing_format);
	return rc;
}

/* --- Names beside the image --- */

/* The size of the disk that is in `file`. */
static co_fn int co_disk_size(struct disk *file, enum image_format format, uint64_t *ret, struct err *err)
{
	struct qcow2_header h;
	uint8_t *buf;
	size_t len = min(file->size, (uint64_t)1 << QCOW2_MAX_CLUSTER_BITS);
	int rc;

	*ret = file->size;
	if (format == IMAGE_RAW)
		return 0;
	buf = aligned_alloc(4096, align_up(max(len, (size_t)1), 4096));
	rc = buf ? co_disk_read(file, 0, buf, len, 0) : -ENOMEM;
	if (rc)
		err_errno(err, rc, "%s: cannot be read", file->name);
	else
		rc = qcow2_header_parse(buf, len, file->name, 0, &h, err);
	free(buf);
	if (rc)
		return rc;
	*ret = h.size;
	qcow2_header_fini(&h);
	return 0;
}

co_fn int co_image_new_backing(struct image_new *n, const struct image_target *t, bool unsafe, bool has_size, struct err *err)
{
	char *path = NULL, *text = NULL;
	enum image_format format;
	struct disk *d = NULL;
	uint64_t size;
	int64_t used;
	int rc = 0;

	if (!has_size && (!n->q.backing_file || unsafe))
		return err_set(err, -EINVAL, "%s: its size is missing; give it behind the name", t->spec->text);
	if (!n->q.backing_file || unsafe)
		return 0;
	path = image_beside(t->path ? t->path : "", n->q.backing_file);
	text = path ? image_disk_text(path) : NULL;
	rc = text ? co_image_open_file(text, n->q.backing_format ? n->q.backing_format : "raw", DISK_OPEN_NOLOCK, &format, &d, &used, err) :
		    err_errno(err, -ENOMEM, "%s", n->q.backing_file);
	if (!rc)
		rc = co_disk_size(d, format, &size, err);
	if (rc)
		err_prefix(err, "backing file");
	else if (!has_size)
		n->q.size = size;
	co_disk_close(d);
	free(path);
	free(text);
	return rc;
}

co_fn int co_image_new_open_backing(struct image_new *n, const struct image_target *t, struct disk **ret, struct err *err)
{
	bool chain = n->q.backing_format && !strcmp(n->q.backing_format, "qcow2");
	char *path = image_beside(t->path ? t->path : "", n->q.backing_file), *text = path ? image_disk_text(path) : NULL;
	struct disk_spec *spec = NULL;
	int rc = text ? disk_spec_parse(text, &spec, err) : err_errno(err, -ENOMEM, "%s", n->q.backing_file);

	if (!rc)
		rc = image_set_format(spec, chain ? IMAGE_QCOW2 : IMAGE_RAW, err);
	/* As the image itself will follow it. */
	if (!rc && (opts_add(&spec->opts, "cache", "writeback") || (chain && opts_add(&spec->opts, "backing", "allow"))))
		rc = err_errno(err, -ENOMEM, "%s", n->q.backing_file);
	if (!rc)
		rc = co_disk_open_spec(spec, DISK_OPEN_NOLOCK, ret, err);
	if (rc)
		err_prefix(err, "backing file");
	disk_spec_free(spec);
	free(path);
	free(text);
	return rc;
}

/* --- Making --- */

static co_fn int co_open_data(struct image_new *n, const struct image_target *t, struct disk **ret, struct err *err)
{
	char *path = image_beside(t->path ? t->path : "", n->q.data_file), *text = path ? image_disk_text(path) : NULL;
	enum image_format format;
	int64_t used;
	int fd, rc = text ? 0 : err_errno(err, -ENOMEM, "%s", n->q.data_file);
	struct stat st;

	if (!rc && (stat(path, &st) || !S_ISBLK(st.st_mode))) {
		fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
		if (fd < 0 && errno == EEXIST)
			rc = err_set(err, -EEXIST, "data file: %s: exists already; remove it or choose another name", path);
		else if (fd < 0)
			rc = err_errno(err, -errno, "data file: %s: cannot be created", path);
		else {
			close(fd);
			n->made_data = strdup(path);
		}
	}
	if (!rc)
		rc = co_image_open_file(text, "raw", DISK_OPEN_RDWR, &format, ret, &used, err);
	free(path);
	free(text);
	return rc;
}

static co_fn int co_make_raw(struct image_new *n, struct disk *d, struct err *err)
{
	static const uint64_t step = 64ull << 20;
	uint8_t *zero = n->q.prealloc == QCOW2_PREALLOC_FULL ? aligned_alloc(4096, 1 << 20) : NULL;
	uint64_t len;
	int rc = d->size < n->q.size ? co_disk_resize(d, n->q.size, err) : 0;

	if (!zero && n->q.prealloc == QCOW2_PREALLOC_FULL)
		return err_errno(err, -ENOMEM, "%s", d->name);
	if (zero)
		memset(zero, 0, 1 << 20);
	for (uint64_t at = 0; at < n->q.size && !rc && n->q.prealloc != QCOW2_PREALLOC_OFF; at += len) {
		len = min(n->q.size - at, zero ? 1ull << 20 : step);
		rc = n->q.stop && *n->q.stop ? -ECANCELED : zero ? co_disk_write(d, at, zero, len, 0) : co_disk_zero(d, at, len, 0);
		if (rc == -ENOSPC)
			err_set(err, rc, "%s: no space left; make room, or leave preallocation away", d->name);
		else if (rc)
			err_errno(err, rc, "%s: cannot be written", d->name);
		else if (n->q.progress)
			n->q.progress(n->q.progress_arg, at + len, n->q.size);
	}
	free(zero);
	if (rc)
		return rc;
	rc = co_disk_flush(d);
	return rc ? err_errno(err, rc, "%s: cannot be flushed", d->name) : 0;
}

co_fn int co_image_new_make(struct image_new *n, const struct image_target *t, struct err *err)
{
	struct disk_spec *spec;
	struct disk *file = NULL, *data = NULL;
	int rc = t->format == IMAGE_QCOW2 ? qcow2_create_check(&n->q, t->spec->text, err) : 0;

	if (rc)
		return rc;
	rc = image_target_spec(t, &spec, err);
	if (rc)
		return rc;
	rc = image_set_format(spec, IMAGE_RAW, err);
	if (!rc)
		rc = co_disk_open_spec(spec, DISK_OPEN_RDWR, &file, err);
	disk_spec_free(spec);
	if (!rc && n->q.data_file)
		rc = co_open_data(n, t, &data, err);
	if (!rc)
		rc = t->format == IMAGE_RAW ? co_make_raw(n, file, err) : co_qcow2_create(file, data, &n->q, err);
	co_disk_close(data);
	co_disk_close(file);
	return rc;
}

void image_new_fini(struct image_new *n, bool keep)
{
	if (n->made_data && !keep)
		unlink(n->made_data);
	free(n->made_data);
	opts_free(&n->opts);
	*n = (struct image_new){ 0 };
}
