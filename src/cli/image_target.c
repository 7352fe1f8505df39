/* SPDX-License-Identifier: MIT */
/* The image that a command makes. */
#include "cli/image_target.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAMES 100		/* so many left-overs may be in the way */

/* Makes t->temp. */
static int make_temp(struct image_target *t, struct err *err)
{
	for (unsigned i = 0; i < NAMES; i++) {
		int fd;

		free(t->temp);
		if (asprintf(&t->temp, "%s.partial-%u-%u", t->path, (unsigned)getpid(), i) < 0) {
			t->temp = NULL;
			return err_errno(err, -ENOMEM, "%s", t->path);
		}
		fd = open(t->temp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
		if (fd >= 0) {
			if (t->exists)
				fchmod(fd, t->mode & 07777);
			close(fd);
			return 0;
		}
		if (errno != EEXIST)
			break;
	}
	err_errno(err, -errno, "%s: cannot be created", t->path);
	free(t->temp);
	t->temp = NULL;
	return err->code;
}

/* An existing `path`. */
static int look_at(struct image_target *t, const char *path, const struct stat *st, bool no_create, bool force, struct err *err)
{
	if (S_ISBLK(st->st_mode) || no_create) {
		t->in_place = true;
		return 0;
	}
	if (!S_ISREG(st->st_mode))
		return err_set(err, -EINVAL, "%s: is neither a file nor a block device, and cannot hold an image", path);
	if (!force)
		return err_set(err, -EEXIST, "%s: exists already; --force replaces it when the new image is complete", path);
	t->exists = true;
	t->mode = st->st_mode;
	return 0;
}

static int begin(struct image_target *t, const char *text, const char *format, bool no_create, bool force, struct err *err)
{
	const char *path;
	struct stat st;
	int rc = disk_spec_parse(text, &t->spec, err);

	if (!rc)
		rc = image_take_format(t->spec, format, &t->format, err);
	if (rc)
		return rc;
	path = image_path(t->spec);
	if (!path) {
		t->in_place = true;
		return 0;
	}
	if (!stat(path, &st))
		rc = look_at(t, path, &st, no_create, force, err);
	else if (errno != ENOENT)
		rc = err_errno(err, -errno, "%s", path);
	else if (no_create)
		rc = err_set(err, -ENOENT, "%s: does not exist, and is not to be created (-n)", path);
	if (rc)
		return rc;
	t->path = t->exists ? realpath(path, NULL) : strdup(path);
	if (!t->path)
		return err_errno(err, -errno, "%s", path);
	return t->in_place ? 0 : make_temp(t, err);
}

int image_target_begin(struct image_target *t, const char *text, const char *format, bool no_create, bool force, struct err *err)
{
	int rc;

	*t = (struct image_target){ 0 };
	rc = begin(t, text, format, no_create, force, err);
	if (rc)
		image_target_end(t);
	return rc;
}

co_fn int co_image_target_lock(struct image_target *t, struct err *err)
{
	enum image_format format;
	char *text;
	int64_t used;
	int rc;

	if (!t->exists)
		return 0;
	text = image_disk_text(t->path);
	rc = text ? co_image_open_file(text, "raw", DISK_OPEN_RDWR, &format, &t->old, &used, err) : err_errno(err, -ENOMEM, "%s", t->path);
	free(text);
	return rc;
}

co_fn void co_image_target_unlock(struct image_target *t)
{
	co_disk_close(t->old);
	t->old = NULL;
}

int image_target_spec(const struct image_target *t, struct disk_spec **ret, struct err *err)
{
	char *text = NULL;
	int rc;

	if (t->in_place)
		return disk_spec_parse(t->spec->text, ret, err);
	text = image_disk_text(t->temp);
	rc = text ? disk_spec_parse(text, ret, err) : err_errno(err, -ENOMEM, "%s", t->path);
	free(text);
	for (size_t i = 0; i < t->spec->opts.n && !rc; i++)
		rc = opts_add(&(*ret)->opts, t->spec->opts.v[i].key, t->spec->opts.v[i].val);
	return rc;
}

/* A name is as durable as its directory. */
static int sync_folder(const char *path)
{
	char *copy = strdup(path);
	int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1, rc;

	free(copy);
	if (fd < 0)
		return -errno;
	rc = fsync(fd) && errno != EINVAL ? -errno : 0;
	close(fd);
	return rc;
}

/* Somebody may have made a file of the name meanwhile. */
static int give_name(struct image_target *t, struct err *err)
{
	unsigned flags = t->exists ? 0 : RENAME_NOREPLACE;
	int rc = renameat2(AT_FDCWD, t->temp, AT_FDCWD, t->path, flags) ? -errno : 0;

	/* A file system without this call. */
	if (rc == -EINVAL && flags)
		rc = link(t->temp, t->path) ? -errno : unlink(t->temp) ? -errno : 0;
	if (rc == -EEXIST)
		return err_set(err, rc, "%s: was made by somebody else meanwhile, and is not replaced", t->path);
	return rc ? err_errno(err, rc, "%s: cannot get its name", t->path) : 0;
}

int image_target_commit(struct image_target *t, struct err *err)
{
	int rc;

	if (!t->temp)
		return 0;
	rc = give_name(t, err);
	if (rc)
		return rc;
	free(t->temp);
	t->temp = NULL;
	rc = sync_folder(t->path);
	return rc ? err_errno(err, rc, "%s: is complete, and its folder cannot be flushed: its name may not survive a crash", t->path) : 0;
}

void image_target_end(struct image_target *t)
{
	if (t->temp)
		unlink(t->temp);
	free(t->temp);
	free(t->path);
	disk_spec_free(t->spec);
	*t = (struct image_target){ 0 };
}
