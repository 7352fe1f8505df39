/* SPDX-License-Identifier: MIT */
/*
 * Pid files: locked by the process that they name, for as long as it lives.
 *
 * Invariants
 *  (1) Only who holds the lock writes or removes the file. The lock ends with the process, however that ends; a file without a lock was left by one that was killed.
 *  (2) A lock counts only if the file is still at its path: the one before may have removed it while this process opened it.
 *  (3) A file that was found is not changed before pid_file_write(): a start that fails leaves what it says of the process before.
 */
#include "util/pid_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/err.h"

static struct flock whole(void)
{
	return (struct flock){ .l_type = F_WRLCK, .l_whence = SEEK_SET };
}

static bool is_at(int fd, const char *path)
{
	struct stat mine, there;

	return !fstat(fd, &mine) && !stat(path, &there) && mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

/* What it says, for messages; 0: nothing. */
static int number_of(int fd)
{
	char text[16] = "";
	int pid = 0;

	if (pread(fd, text, sizeof(text) - 1, 0) > 0 && sscanf(text, "%d", &pid) != 1)
		pid = 0;
	return pid;
}

static int held(int fd, const char *path, struct err *err)
{
	int pid = number_of(fd);

	if (pid > 0)
		return err_set(err, -EBUSY, "--pid-file: %s: belongs to process %d, which is running; give another file, or end that one first", path, pid);
	return err_set(err, -EBUSY, "--pid-file: %s: belongs to another process, which is starting; give another file", path);
}

/* -ENOENT without a message if it is not there and `flags` does not make it. */
static int take_file(struct pid_file *p, const char *path, int flags, struct err *err)
{
	for (;;) {
		struct flock lock = whole();
		int fd = open(path, O_RDWR | O_CLOEXEC | flags, 0666), ret = fd < 0 ? -errno : 0;

		if (ret == -EEXIST) {
			flags &= ~(O_CREAT | O_EXCL);
			continue;
		}
		if (ret == -ENOENT && !(flags & O_CREAT) && !p->path)
			return ret;
		if (ret == -ENOENT && !(flags & O_CREAT)) {
			flags |= O_CREAT | O_EXCL;
			continue;
		}
		if (ret < 0)
			return err_errno(err, ret, "--pid-file: %s", path);
		if (fcntl(fd, F_OFD_SETLK, &lock) < 0) {
			ret = errno == EAGAIN || errno == EACCES ? held(fd, path, err) : err_errno(err, -errno, "--pid-file: %s: cannot be locked", path);
			close(fd);
			return ret;
		}
		if (is_at(fd, path)) {
			p->fd = fd;
			p->found = !(flags & O_CREAT);
			return 0;
		}
		close(fd);
	}
}

int pid_file_claim(struct pid_file *p, const char *path, struct err *err)
{
	int ret = take_file(p, path, 0, err);

	return ret == -ENOENT ? 0 : ret;
}

int pid_file_write(struct pid_file *p, const char *path, struct err *err)
{
	char text[16];
	int ret = 0, len = snprintf(text, sizeof(text), "%d\n", (int)getpid());

	p->path = path;
	if (p->fd < 0)
		ret = take_file(p, path, O_CREAT | O_EXCL, err);
	if (ret < 0)
		return ret;
	p->written = true;
	if (ftruncate(p->fd, 0) < 0 || pwrite(p->fd, text, (size_t)len, 0) != len)
		return err_errno(err, errno ? -errno : -EIO, "--pid-file: %s", path);
	return 0;
}

int pid_file_remove(struct pid_file *p)
{
	int ret = 0;

	if (p->written && is_at(p->fd, p->path) && unlink(p->path) < 0 && errno != ENOENT)
		ret = -errno;
	pid_file_leave(p);
	return ret;
}

void pid_file_leave(struct pid_file *p)
{
	if (p->fd >= 0)
		close(p->fd);
	p->fd = -1;
	p->written = false;
}

bool pid_file_is_held(const char *path)
{
	struct flock lock = whole();
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	bool is = fd >= 0 && !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;

	if (fd >= 0)
		close(fd);
	return is;
}
