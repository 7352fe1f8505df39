/* SPDX-License-Identifier: MIT */
/*
 * weir log create: makes files where there are none, refuses what is not a log, formats.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "blk/spec.h"
#include "cli/log.h"
#include "util/bytes.h"
#include "util/size.h"

#define LOOK_AT (256u << 10)	/* bytes at the start that tell what is there */

struct create_args {
	uint64_t size, segment_size; /* 0: not given */
	bool force;
	bool made[WLOG_MAX_DEVICES]; /* this run has created the file */
	char *path[WLOG_MAX_DEVICES]; /* NULL: not a file */
};

/* The path of a plain file or device, NULL for other drivers. */
static int path_of(const char *device, char **ret, struct err *err)
{
	struct disk_spec *spec;
	int rc = disk_spec_parse(device, &spec, err);

	if (rc)
		return rc;
	*ret = strcmp(spec->driver, "file") ? NULL : strdup(spec->rest);
	disk_spec_free(spec);
	return 0;
}

static int no_space(const char *path, uint64_t size, struct err *err)
{
	struct statvfs fs;
	char want[16], have[16];

	if (statvfs(path, &fs))
		return err_set(err, -ENOSPC, "%s: no space for %s", path, size_format(size, want));
	return err_set(err, -ENOSPC, "%s: no space: the log needs %s, the file system has %s free; make room or give a smaller --size",
		       path, size_format(size, want), size_format((uint64_t)fs.f_bavail * fs.f_frsize, have));
}

/* Gives the file its size and its space: a log that grows while it is written pays for the file system's journal. */
static int preallocate(int fd, const char *path, uint64_t size, struct err *err)
{
	struct statvfs fs;
	int ret;

	/* To find out by taking all there is would be felt by everybody else on it. */
	if (!statvfs(path, &fs) && fs.f_frsize && size / fs.f_frsize > fs.f_bfree)
		return no_space(path, size, err);
	ret = ftruncate(fd, size) ? -errno : 0;
	if (!ret && fallocate(fd, 0, 0, size) && errno != EOPNOTSUPP)
		ret = -errno;
	if (ret == -ENOSPC || ret == -EDQUOT)
		return no_space(path, size, err);
	if (ret == -EFBIG)
		return err_errno(err, ret, "%s: is larger than this process (ulimit -f) or the file system may make a file; raise that, or give a smaller --size", path);
	return ret ? err_errno(err, ret, "%s: cannot be preallocated", path) : 0;
}

/* Creates the file if there is none. */
static int make_file(struct create_args *a, int i, struct err *err)
{
	const char *path = a->path[i];
	struct stat st;
	int fd, ret;

	if (!stat(path, &st)) {
		if (S_ISBLK(st.st_mode) && a->size)
			return err_set(err, -EINVAL, "%s: is a block device, whose size is what it is; leave --size away", path);
		if (S_ISREG(st.st_mode) && !st.st_size && !a->size)
			return err_set(err, -EINVAL, "%s: is empty; say how large the log is to be with --size", path);
		return 0;
	}
	if (errno != ENOENT)
		return err_errno(err, -errno, "%s", path);
	if (!a->size)
		return err_set(err, -ENOENT, "%s: does not exist; say how large it is to be with --size", path);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s: cannot be created", path);
	a->made[i] = true;
	ret = preallocate(fd, path, a->size, err);
	close(fd);
	return ret;
}

enum content { CONTENT_NOTHING, CONTENT_LOG, CONTENT_FOREIGN };

/* One of the two slots of docs/format-wlog.md. */
static bool has_superblock(const uint8_t *buf, uint64_t len)
{
	for (uint64_t slot = 0; slot <= 64 << 10 && slot + 8 <= len; slot += 64 << 10)
		if (!memcmp(buf + slot, "WEIRWLOG", 8))
			return true;
	return false;
}

static co_fn int co_look(struct disk *d, enum content *ret, struct err *err)
{
	uint64_t len = min(d->size, (uint64_t)LOOK_AT);
	uint8_t *buf = aligned_alloc(4096, LOOK_AT);
	int rc = buf ? co_disk_read(d, 0, buf, len, 0) : -ENOMEM;

	if (rc)
		err_errno(err, rc, "%s: cannot be read", d->name);
	else if (bytes_are_zero(buf, len))
		*ret = CONTENT_NOTHING;
	else
		*ret = has_superblock(buf, len) ? CONTENT_LOG : CONTENT_FOREIGN;
	free(buf);
	return rc;
}

static int resize_file(const char *path, uint64_t size, struct err *err)
{
	int fd = open(path, O_RDWR | O_CLOEXEC), ret;

	if (fd < 0)
		return err_errno(err, -errno, "%s: cannot be opened", path);
	ret = preallocate(fd, path, size, err);
	close(fd);
	return ret;
}

/* Opened (and so locked) before anything is looked at or changed. */
static co_fn int co_prepare(struct log_job *job, int i, struct err *err)
{
	struct create_args *a = job->arg;
	struct disk *d = job->dev[i];
	enum content content;
	char have[16];
	int ret;

	if (a->made[i])
		return 0;
	ret = co_look(d, &content, err);
	if (ret)
		return ret;
	if (content == CONTENT_FOREIGN && !a->force)
		return err_set(err, -EEXIST, "%s: holds something that is not a write log; --force overwrites it", d->name);
	if (!a->size || a->size == d->size)
		return 0;
	if (!a->path[i])
		return err_set(err, -EINVAL, "%s: has %s, which --size cannot change", d->name, size_format(d->size, have));
	if (content == CONTENT_LOG && !a->force)
		return err_set(err, -EEXIST, "%s: is a write log of %s; --force makes it anew with the size that was given", d->name,
			       size_format(d->size, have));
	ret = resize_file(a->path[i], a->size, err);
	if (ret)
		return ret;
	/* The size is read when a disk is opened. */
	co_disk_close(d);
	return co_disk_open(job->device[i], DISK_OPEN_RDWR | DISK_OPEN_LOG, &job->dev[i], err);
}

static co_fn int co_create_log(struct log_job *job, struct err *err)
{
	struct create_args *a = job->arg;
	struct wlog_format_opts opts = { .segment_size = a->segment_size, .force = a->force, .relic_dir = wlog_relic_dir(), .progress = log_progress,
					 .progress_arg = (void *)job->verb };
	int ret = co_log_job_open_devices(job, DISK_OPEN_RDWR | DISK_OPEN_LOG, err);

	if (ret)
		return ret;
	for (int i = 0; i < job->ndev && !ret; i++)
		ret = co_prepare(job, i, err);
	if (!ret)
		ret = co_wlog_format(job->dev, job->ndev, &opts, err);
	co_log_job_close_devices(job);
	return ret;
}

static co_fn int co_create(struct log_job *job, struct err *err)
{
	struct create_args *a = job->arg;
	char size[16];
	int ret = 0;

	for (int i = 0; i < job->ndev && !ret; i++) {
		ret = path_of(job->device[i], &a->path[i], err);
		if (!ret && a->path[i])
			ret = make_file(a, i, err);
	}
	if (!ret)
		ret = co_create_log(job, err);
	for (int i = 0; i < job->ndev; i++) {
		if (ret && a->made[i])
			unlink(a->path[i]);
		if (!ret && a->size)
			printf("%s: created, %s\n", job->device[i], size_format(a->size, size));
		else if (!ret)
			printf("%s: formatted\n", job->device[i]);
		free(a->path[i]);
	}
	return ret;
}

int cli_log_create(int argc, char **argv)
{
	struct create_args a = { 0 };
	const struct cli_opt opts[] = {
		CLI_SIZE("size", 0, "SIZE", &a.size, WLOG_MIN_SIZE, DISK_MAX_SIZE),
		CLI_SIZE("segment-size", 0, "SIZE", &a.segment_size, 1 << 20, 64 << 20),
		CLI_FLAG("force", 'f', &a.force),
		CLI_END
	};
	struct log_job job = { .verb = "log create", .co_work = co_create, .arg = &a };
	char **operands = cli_parse(job.verb, opts, "DEVICE...", argc, argv);

	if (a.segment_size && !is_pow2(a.segment_size))
		cli_usage(job.verb, "--segment-size: must be a power of two");
	return log_job_run(&job, operands);
}
