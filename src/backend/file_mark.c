/* SPDX-License-Identifier: MIT */
/*
 * File backend: the identity mark that a write log leaves on its image, and the stamp.
 *
 * Where the mark is kept
 *  - a regular file: the extended attribute user.weir.mark, which goes where the file goes (mv; cp --preserve=xattr; tar --xattrs), and is not
 *    copied by a plain cp;
 *  - on a file system without user attributes: the file IMAGE.weir-mark beside it. It must be moved along by hand: an image without it looks unmarked,
 *    and another image put in its place looks marked;
 *  - a block device: a file in $WEIR_STATE_DIR/marks, or /var/lib/weir/marks, named after the device: its WWID or serial number and, of a partition, where it
 *    begins; device-mapper's and md's UUID; of a loop device the file behind it. Where there is none of these, major and minor number and size, which may
 *    name another device after a reboot. Such a mark stays on this host: it does not protect a device that is moved to another one.
 *
 * A mark file is two lines, "weir-mark 1" and the mark. It is replaced by rename, so that there is the old or the new one; file and directory are
 * synced before set returns.
 *
 * The stamp is the file's mtime. The kernel takes it from its coarse clock, or from the fine one if somebody has looked at it in the meantime (Linux 6.13), and the
 * file system keeps of it what it has room for: ext3, ext4 with inodes of 128 bytes and FAT whole seconds. -EAGAIN says that a write at this instant may be given
 * the same. On a network file system the stamp is the server's clock, and this holds only as far as the two clocks agree. With lazytime, all times of a file may be as of a day ago
 * after a power cut.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "backend/file.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

#define XATTR_NAME "user.weir.mark"
#define MARK_HEAD "weir-mark 1\n"
#define SIDECAR_SUFFIX ".weir-mark"
#define STATE_DIR "/var/lib/weir"
#define PATH_SIZE 4096

struct mark_call {
	struct file_disk *f;
	char *get;		/* to be filled in, or NULL */
	size_t size;
	const char *set;
	struct err *err;
	int sync_error;		/* of the image itself: then the disk has failed */
};

/* --- A mark in a file of its own --- */

static int sync_dir_of(const char *path)
{
	char dir[PATH_SIZE], *slash;
	int fd, rc;

	snprintf(dir, sizeof(dir), "%s", path);
	slash = strrchr(dir, '/');
	if (slash)
		slash[slash == dir] = '\0';
	else
		strcpy(dir, ".");
	fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	rc = fsync(fd) ? -errno : 0;
	close(fd);
	return rc;
}

/* The text at `path` without its head, "" if there is no such file. */
static int read_mark_file(const char *path, char *buf, size_t size)
{
	char text[sizeof(MARK_HEAD) + DISK_MARK_MAX + 1], *end;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t head = strlen(MARK_HEAD);
	ssize_t n;
	int rc;

	buf[0] = '\0';
	if (fd < 0)
		return errno == ENOENT ? 0 : -errno;
	n = read(fd, text, sizeof(text) - 1);
	rc = n < 0 ? -errno : 0;
	close(fd);
	if (rc)
		return rc;
	text[n] = '\0';
	if (strncmp(text, MARK_HEAD, head))
		return -EBADMSG;
	end = strchr(text + head, '\n');
	if (!end || end[1])
		return -EBADMSG;
	*end = '\0';
	if (strlen(text + head) >= size)
		return -ERANGE;
	strcpy(buf, text + head);
	return 0;
}

static int remove_mark_file(const char *path)
{
	if (unlink(path))
		return errno == ENOENT ? 0 : -errno;
	return sync_dir_of(path);
}

static int write_all(int fd, const char *text)
{
	size_t left = strlen(text);

	while (left) {
		ssize_t n = write(fd, text, left);

		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0) {
			text += n;
			left -= (size_t)n;
		}
	}
	return 0;
}

static int write_mark_file(const char *path, const char *mark)
{
	char tmp[PATH_SIZE + 8];
	int fd, rc;

	snprintf(tmp, sizeof(tmp), "%s.tmp", path);
	fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
	if (fd < 0)
		return -errno;
	rc = write_all(fd, MARK_HEAD);
	if (!rc)
		rc = write_all(fd, mark);
	if (!rc)
		rc = write_all(fd, "\n");
	if (!rc && fsync(fd))
		rc = -errno;
	if (close(fd) && !rc)
		rc = -errno;
	if (!rc && rename(tmp, path))
		rc = -errno;
	if (rc)
		unlink(tmp);
	return rc ? rc : sync_dir_of(path);
}

static int set_mark_file(const char *path, const char *mark)
{
	return mark[0] ? write_mark_file(path, mark) : remove_mark_file(path);
}

/* --- Devices --- */

/* Appends "-TEXT" with all but letters and digits turned into '_'. */
static void append_name(char *buf, size_t size, const char *text)
{
	size_t n = strlen(buf);

	if (n + 1 < size)
		buf[n++] = '-';
	for (; *text && n + 1 < size; text++)
		buf[n++] = isalnum((unsigned char)*text) ? *text : '_';
	buf[n] = '\0';
}

/* A name for the device that is the same after a reboot, where there is one. */
static void device_identity(const struct file_disk *f, dev_t dev, char *buf, size_t size)
{
	static const char *const sources[] = { "wwid", "device/wwid", "serial", "device/serial", "dm/uuid", "md/uuid" };
	struct loop_info64 loop;
	char text[256];

	snprintf(buf, size, "device");
	if (!ioctl(f->fd, LOOP_GET_STATUS64, &loop)) {
		snprintf(text, sizeof(text), "loop-%llx-%llu-%llu", (unsigned long long)loop.lo_device,
			 (unsigned long long)loop.lo_inode, (unsigned long long)loop.lo_offset);
		append_name(buf, size, text);
		return;
	}
	for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
		if (file_sysfs_read(dev, sources[i], text, sizeof(text)) || !text[0])
			continue;
		append_name(buf, size, text);
		if (!file_sysfs_read(dev, "start", text, sizeof(text))) {
			append_name(buf, size, "part");
			append_name(buf, size, text);
		}
		return;
	}
	snprintf(text, sizeof(text), "%u-%u-%llu", major(dev), minor(dev), (unsigned long long)f->d.size);
	append_name(buf, size, text);
}

static int make_dir(const char *path)
{
	if (!mkdir(path, 0755))
		return sync_dir_of(path);
	return errno == EEXIST ? 0 : -errno;
}

static int device_mark_path(const struct file_disk *f, bool create, char *path, size_t size)
{
	const char *state = getenv("WEIR_STATE_DIR");
	char name[NAME_MAX - 16];
	struct stat st;
	int rc = 0;

	if (fstat(f->fd, &st))
		return -errno;
	if (!state || !state[0])
		state = STATE_DIR;
	device_identity(f, st.st_rdev, name, sizeof(name));
	snprintf(path, size, "%s/marks", state);
	if (create)
		rc = make_dir(state);
	if (create && !rc)
		rc = make_dir(path);
	if (snprintf(path, size, "%s/marks/%s", state, name) >= (int)size)
		return -ENAMETOOLONG;
	return rc;
}

/* --- Regular files --- */

static bool has_no_xattrs(int error)
{
	return error == ENOTSUP || error == ENOSYS;
}

static int get_file_mark(struct mark_call *c, const char *sidecar)
{
	ssize_t n = fgetxattr(c->f->fd, XATTR_NAME, c->get, c->size - 1);

	if (n >= 0) {
		c->get[n] = '\0';
		return 0;
	}
	if (errno != ENODATA && !has_no_xattrs(errno))
		return -errno;
	return read_mark_file(sidecar, c->get, c->size);
}

/* Returns with the mark in the attribute and no file beside, or the other way round. */
static int set_file_mark(struct mark_call *c, const char *sidecar)
{
	int rc;

	if (c->set[0])
		rc = fsetxattr(c->f->fd, XATTR_NAME, c->set, strlen(c->set), 0);
	else
		rc = fremovexattr(c->f->fd, XATTR_NAME);
	if (rc && has_no_xattrs(errno))
		return set_mark_file(sidecar, c->set);
	if (rc && errno != ENODATA)
		return -errno;
	if (fsync(c->f->fd)) {
		c->sync_error = -errno;
		return c->sync_error;
	}
	return remove_mark_file(sidecar);
}

static int mark_blocking(void *arg)
{
	struct mark_call *c = arg;
	char path[PATH_SIZE];
	int rc;

	if (c->f->is_device)
		rc = device_mark_path(c->f, c->set && c->set[0], path, sizeof(path));
	else
		rc = snprintf(path, sizeof(path), "%s" SIDECAR_SUFFIX, c->f->path) >= (int)sizeof(path) ? -ENAMETOOLONG : 0;
	if (rc)
		goto out;
	if (c->f->is_device)
		rc = c->set ? set_mark_file(path, c->set) : read_mark_file(path, c->get, c->size);
	else
		rc = c->set ? set_file_mark(c, path) : get_file_mark(c, path);
out:
	if (rc && c->set)
		err_errno(c->err, rc, "%s: the mark of its write log cannot be stored (%s)", c->f->path,
			  c->f->is_device ? path : "attribute " XATTR_NAME " or file " SIDECAR_SUFFIX);
	return rc;
}

co_fn int co_file_mark_get(struct disk *d, char *buf, size_t size)
{
	struct mark_call c = { .f = file_of(d), .get = buf, .size = size };

	return co_offload(mark_blocking, &c);
}

co_fn int co_file_mark_set(struct disk *d, const char *mark, struct err *err)
{
	struct file_disk *f = file_of(d);
	struct mark_call c = { .f = f, .set = mark, .err = err };
	int rc;

	if (strlen(mark) > DISK_MARK_MAX || strchr(mark, '\n'))
		return err_set(err, -EINVAL, "%s: a mark is one line of at most %d bytes", d->name, DISK_MARK_MAX);
	/* Its fsync may meet an error of write-back that a flush then does not: file_io.c, invariant (2). */
	co_mutex_lock(&f->sync_lock);
	rc = co_offload(mark_blocking, &c);
	if (c.sync_error)
		rc = disk_fail(d, c.sync_error, "fsync");
	co_mutex_unlock(&f->sync_lock);
	return rc;
}

#define SECOND_NS 1000000000u

struct stamp_call {
	int fd;
	uint64_t stamp_ns;
	bool fat;
};

static uint64_t ns_of(const struct timespec *t)
{
	return (uint64_t)t->tv_sec * SECOND_NS + (uint64_t)t->tv_nsec;
}

static int stamp_blocking(void *arg)
{
	struct stamp_call *c = arg;
	struct statfs fs;
	struct stat st;

	if (fstat(c->fd, &st))
		return -errno;
	c->stamp_ns = ns_of(&st.st_mtim);
	if (c->stamp_ns % SECOND_NS == 0)
		c->fat = !fstatfs(c->fd, &fs) && fs.f_type == MSDOS_SUPER_MAGIC;
	return 0;
}

/* What times of files on this file system are multiples of, as far as one of them tells. */
static uint64_t step_of(uint64_t time_ns)
{
	uint64_t step = 1;

	while (step < SECOND_NS && time_ns % (step * 10) == 0)
		step *= 10;
	return step;
}

int file_stamp_tells(uint64_t stamp_ns, bool fat, uint64_t before_ns, uint64_t after_ns)
{
	uint64_t step = step_of(stamp_ns);

	/* Set to a time that has not come, or by another clock: nothing tells what a write would give. */
	if (stamp_ns > after_ns)
		return 0;
	if (step == SECOND_NS && fat)
		step = 2 * SECOND_NS;
	return stamp_ns + step > before_ns ? -EAGAIN : 0;
}

static void tell_lazytime(struct file_disk *f)
{
	if (f->facts.lazytime && !f->lazytime_told)
		log_warn("%s: its file system is mounted with lazytime: if another program writes to it, and the power is cut within a day, this goes unnoticed by a write log that has "
			 "data for it, and such data is mixed with it; mount without, or let nobody else write to it", f->d.name);
	f->lazytime_told = true;
}

co_fn int co_file_stamp(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns)
{
	struct file_disk *f = file_of(d);
	struct stamp_call c = { .fd = f->fd };
	struct timespec before, after;
	int rc;

	if (f->is_device)
		return -ENOTSUP;
	tell_lazytime(f);
	clock_gettime(CLOCK_REALTIME_COARSE, &before);
	rc = co_offload(stamp_blocking, &c);
	if (rc)
		return rc;
	clock_gettime(CLOCK_REALTIME, &after);
	*ret_stamp_ns = c.stamp_ns;
	*ret_now_ns = max(ns_of(&before), c.stamp_ns);
	return file_stamp_tells(c.stamp_ns, c.fat, ns_of(&before), ns_of(&after));
}

/* --- Identity: inode number, size, mtime and ctime, which nobody can set --- */

struct identity_call {
	int fd;
	struct stat st;
};

int file_times_tell(uint64_t mtime_ns, uint64_t ctime_ns, uint64_t now_ns)
{
	uint64_t step = step_of(ctime_ns);

	/* Whole seconds (ext3, ext4 with small inodes, FAT): a clock that is set comes by one of them again. */
	if (step == SECOND_NS)
		return -ENOTSUP;
	/* A change within this tick of the clock, or this step of the file system's times, would be given the same ones. */
	return max(mtime_ns, ctime_ns) >= now_ns || ctime_ns + step > now_ns ? -EAGAIN : 0;
}

static int identity_blocking(void *arg)
{
	struct identity_call *c = arg;

	return fstat(c->fd, &c->st) ? -errno : 0;
}

co_fn int co_file_identity(struct disk *d, struct disk_identity *ret)
{
	struct file_disk *f = file_of(d);
	struct identity_call c = { .fd = f->fd };
	struct timespec now;
	int rc;

	/* With lazytime, what changed it may leave no trace for a day. */
	if (f->is_device || f->facts.lazytime)
		return -ENOTSUP;
	/* Before its times are looked at: what changes it meanwhile is not missed. */
	clock_gettime(CLOCK_REALTIME_COARSE, &now);
	rc = co_offload(identity_blocking, &c);
	if (rc)
		return rc;
	*ret = (struct disk_identity){ { c.st.st_ino, (uint64_t)c.st.st_size, ns_of(&c.st.st_mtim), ns_of(&c.st.st_ctim) } };
	return file_times_tell(ret->word[2], ret->word[3], ns_of(&now));
}

static int touch_blocking(void *arg)
{
	struct identity_call *c = arg;
	const struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_nsec = UTIME_NOW } };

	if (futimens(c->fd, times))
		return -errno;
	return fsync(c->fd) ? -errno : 0;
}

co_fn int co_file_touch(struct disk *d)
{
	struct file_disk *f = file_of(d);
	struct identity_call c = { .fd = f->fd };

	return f->is_device ? -ENOTSUP : co_offload(touch_blocking, &c);
}
