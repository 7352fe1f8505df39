/* SPDX-License-Identifier: MIT */
/*
 * File backend: opening and probing.
 *
 * Everything here may block and runs on a worker thread, while the coroutine that opens waits.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/file.h"
#include "blk/spec.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

#define MAX_IO (1u << 30)	/* one system call takes a little less than 2 GiB */
#define MAX_ZERO (1ull << 30)	/* bounds how long one discard holds a worker */
#define PROBE_BUF 16384

const char *file_aio_name(enum file_aio a)
{
	static const char *const names[] = { "io_uring", "native", "threads" };

	return names[a];
}

/* QEMU's table: O_DIRECT, each write stable, flushes ignored. */
static const struct {
	const char *name;
	bool direct, stable, no_flush;
} cache_modes[] = {
	[FILE_CACHE_NONE] = { "none", true, false, false },
	[FILE_CACHE_DIRECTSYNC] = { "directsync", true, true, false },
	[FILE_CACHE_WRITEBACK] = { "writeback", false, false, false },
	[FILE_CACHE_WRITETHROUGH] = { "writethrough", false, true, false },
	[FILE_CACHE_UNSAFE] = { "unsafe", false, false, true },
};

const char *file_cache_name(enum file_cache c)
{
	return cache_modes[c].name;
}

/* --- Messages --- */

static int wrong_type(const char *path, mode_t mode, struct err *err)
{
	const char *what = S_ISDIR(mode) ? "a directory" : S_ISFIFO(mode) ? "a FIFO" : S_ISSOCK(mode) ? "a socket" :
			   S_ISCHR(mode) ? "a character device" : "of an unknown kind";

	return err_set(err, S_ISDIR(mode) ? -EISDIR : -EINVAL,
		       "%s: is %s; a disk is a regular file or a block device%s", path, what,
		       S_ISSOCK(mode) ? " (an NBD server is nbd+unix:///NAME?socket=PATH)" : "");
}

static int open_failed(const struct file_config *c, int rc, const struct stat *st, struct err *err)
{
	bool rdwr = c->flags & DISK_OPEN_RDWR;
	const char *ro = rdwr ? ", or open it read-only" : "";

	switch (rc) {
	case -ENOENT:
		return err_set(err, rc, "%s: there is no such file; create it first, for example with truncate -s 10G", c->path);
	case -EACCES:
		if (!st)
			break;
		return err_set(err, rc, "%s: permission denied for user %u (mode %04o, owner %u); change its mode or owner%s", c->path,
			       geteuid(), st->st_mode & 07777, st->st_uid, ro);
	case -EROFS:
		return err_set(err, rc, "%s: is on a read-only file system; open it read-only", c->path);
	case -EPERM:
		if (st && S_ISBLK(st->st_mode))
			return err_set(err, rc, "%s: the device may not be opened (a device cgroup or a security module forbids it, not its mode)",
				       c->path);
		return err_set(err, rc, "%s: is immutable or append-only (see lsattr); chattr -i -a it%s", c->path, ro);
	case -ETXTBSY:
		return err_set(err, rc, "%s: is in use as a swap file or a running program", c->path);
	case -EBUSY:
		return err_set(err, rc, "%s: is mounted, or belongs to md, LVM, swap or another program; release it first%s", c->path, ro);
	}
	return err_errno(err, rc, "%s: cannot be opened for %s", c->path, rdwr ? "writing" : "reading");
}

/* --- O_DIRECT --- */

/* Where `len` bytes of data begin at a page boundary, or -1: a hole would be read at any alignment. */
static off_t find_data(int fd, off_t len)
{
	off_t data = lseek(fd, 0, SEEK_DATA), end;

	if (data < 0)
		return -1;
	data = (off_t)align_up((uint64_t)data, 4096);
	end = lseek(fd, data, SEEK_HOLE);
	return end >= data + len ? data : -1;
}

/* The smallest unit that can be read: for kernels that do not tell. */
static uint32_t probe_align(int fd, const struct file_facts *facts, void *buf)
{
	off_t base = find_data(fd, PROBE_BUF);

	for (uint32_t unit = 512; base >= 0 && unit <= 4096; unit *= 2)
		if (pread(fd, buf, unit, base + unit) == (ssize_t)unit)
			return unit;
	return max(facts->logical_block, 4096u);
}

/* Finds the alignment that direct I/O needs. 0, or -errno with the reason why there is none. */
static int probe_direct(struct file_disk *f, const struct stat *st, const char **ret_why)
{
	struct disk_limits *l = &f->d.limits;
	void *buf;
	int rc;

	if (file_dio_align(f->fd, st, &l->align, &l->mem_align)) {
		*ret_why = "this file does not take O_DIRECT (encrypted, compressed or data-journalled)";
		return -ENOTSUP;
	}
	if (posix_memalign(&buf, 4096, PROBE_BUF))
		return -ENOMEM;
	if (!l->align)
		l->align = probe_align(f->fd, &f->facts, buf);
	if (!l->mem_align)
		l->mem_align = min(l->align, 4096u);
	rc = 0;
	if (!is_pow2(l->align) || l->align > 65536 || !is_pow2(l->mem_align) || l->mem_align > 4096) {
		*ret_why = "O_DIRECT needs an alignment that is out of the ordinary";
		rc = -ENOTSUP;
	} else if (pread(f->fd, buf, min(l->align, (uint32_t)PROBE_BUF), 0) < 0 && errno == EINVAL) {
		*ret_why = "O_DIRECT reads fail";
		rc = -ENOTSUP;
	}
	free(buf);
	return rc;
}

static int open_path(const struct file_config *c, const struct stat *st, bool direct)
{
	int flags = O_CLOEXEC | (c->flags & DISK_OPEN_RDWR ? O_RDWR : O_RDONLY) | (direct ? O_DIRECT : 0), fd;

	/* On a device O_EXCL is the kernel's claim against mounts, md, LVM and mkfs. */
	if (S_ISBLK(st->st_mode) && (c->flags & DISK_OPEN_RDWR) && !(c->flags & DISK_OPEN_NOLOCK) &&
	    c->locking != FILE_LOCKING_OFF)
		flags |= O_EXCL;
	do {
		fd = open(c->path, flags);
	} while (fd < 0 && errno == EINTR);
	return fd < 0 ? -errno : fd;
}

/* Opens f->fd, with O_DIRECT where that is asked for or (without cache=) possible. Sets f->cache and f->direct. */
static int open_mode(struct file_disk *f, const struct file_config *c, const struct stat *st, struct err *err)
{
	const char *why = "its file system does not know O_DIRECT";
	bool log = c->flags & DISK_OPEN_LOG, direct = !c->cache_given || cache_modes[c->cache].direct;
	int rc = open_path(c, st, direct);

	if (rc >= 0) {
		f->fd = rc;
		file_facts_get(f->fd, &f->facts);
		rc = direct ? probe_direct(f, st, &why) : 0;
	}
	f->direct = direct;
	f->cache = c->cache_given ? c->cache : log ? FILE_CACHE_DIRECTSYNC : FILE_CACHE_NONE;
	if (rc >= 0)
		return 0;
	if (!direct || (rc != -EINVAL && rc != -ENOTSUP))
		return open_failed(c, rc, st, err);
	if (c->cache_given || c->aio == FILE_AIO_NATIVE)
		return err_set(err, -ENOTSUP, "%s: %s=%s is not possible, %s; use %s", c->path,
			       c->cache_given ? "cache" : "aio", c->cache_given ? file_cache_name(c->cache) : "native", why,
			       c->cache_given ? "cache=writeback" : "aio=io_uring");
	if (f->fd >= 0)
		close(f->fd);
	f->fd = rc = open_path(c, st, false);
	if (rc < 0)
		return open_failed(c, rc, st, err);
	file_facts_get(f->fd, &f->facts);
	f->direct = false;
	f->cache = log ? FILE_CACHE_WRITETHROUGH : FILE_CACHE_WRITEBACK;
	log_warn("%s: cache=%s, since %s%s%s%s", c->path, file_cache_name(f->cache), why,
		 f->facts.fs[0] ? " (" : "", f->facts.fs, f->facts.fs[0] ? ")" : "");
	return 0;
}

void file_set_tail(struct file_disk *f)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	f->tail_off = UINT64_MAX;
	if (f->tail_fd >= 0 && !is_aligned(f->d.size, f->d.limits.align))
		f->tail_off = align_down(f->d.size, max(page, (uint64_t)f->d.limits.align));
}

/* The second descriptor, of the same file whatever has happened to its name. */
static int open_tail(struct file_disk *f, const struct file_config *c, struct err *err)
{
	char path[64];

	if (!f->direct || f->is_device)
		return 0;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", f->fd);
	f->tail_fd = open(path, O_CLOEXEC | (c->flags & DISK_OPEN_RDWR ? O_RDWR : O_RDONLY));
	if (f->tail_fd < 0)
		return err_errno(err, -errno, "%s: cannot be opened a second time, through %s, for its last bytes", c->path, path);
	posix_fadvise(f->tail_fd, 0, 0, POSIX_FADV_RANDOM);
	return 0;
}

/* --- Size and limits --- */

static int find_size(struct file_disk *f, const struct file_config *c, const struct stat *st, struct err *err)
{
	int ro = 0;

	f->d.size = (uint64_t)st->st_size;
	if (f->is_device) {
		if (ioctl(f->fd, BLKGETSIZE64, &f->d.size))
			return err_errno(err, -errno, "%s: the size of the device cannot be found out", c->path);
		f->d.size = align_down(f->d.size, max(f->d.limits.align, 512u));
		if ((c->flags & DISK_OPEN_RDWR) && !ioctl(f->fd, BLKROGET, &ro) && ro)
			return err_set(err, -EROFS, "%s: the device is read-only (blockdev --setrw changes that); open it read-only", c->path);
	}
	if (f->d.size > DISK_MAX_SIZE)
		return err_set(err, -EFBIG, "%s: is larger than any disk can be", c->path);
	return 0;
}

/*
 * Whether RWF_DSYNC can be believed where the kernel works asynchronously on a direct write. It is the file system that must sync at the completion; FUSE
 * for one just forgets it (seen on 6.18: the write succeeds, no fsync is sent). So only where a test has counted the flushes (test_file_mounts).
 */
static bool dsync_is_honest(const struct file_disk *f)
{
	static const char *const honest[] = { "ext2", "ext3", "ext4", "xfs", "btrfs" };

	if (f->is_device || !f->direct || f->aio == FILE_AIO_THREADS)
		return true;
	for (size_t i = 0; i < ARRAY_SIZE(honest); i++)
		if (!strcmp(f->facts.fs, honest[i]))
			return true;
	return false;
}

/*
 * Whether holes can be punched, found out far behind the end, where there is nothing. Even that sets the file's modification time, by which a
 * write log tells whether somebody else wrote to the image: it is set back, and not touched at all where the answer is known.
 */
static bool can_punch(const struct file_disk *f, const struct stat *st)
{
	static const char *const known[] = { "ext4", "xfs", "btrfs", "tmpfs", "f2fs" };
	off_t off = (off_t)align_up(f->d.size, 1u << 20);
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, st->st_mtim };

	for (size_t i = 0; i < ARRAY_SIZE(known); i++)
		if (!strcmp(f->facts.fs, known[i]))
			return true;
	bool can = !fallocate(f->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off, 4096) ||
		   (errno != EOPNOTSUPP && errno != ENOSYS);

	futimens(f->fd, times);
	return can;
}

static void set_limits(struct file_disk *f, const struct file_config *c, const struct stat *st)
{
	struct disk_limits *l = &f->d.limits;
	bool writable = c->flags & DISK_OPEN_RDWR;

	/* Through the page cache any range goes, save for discard and write zeroes on a device. */
	if (!f->direct) {
		l->align = f->is_device ? max(f->facts.logical_block, 512u) : 1;
		l->mem_align = 1;
	}
	l->atomic_unit = max(f->facts.logical_block, 512u);
	l->opt_io = max((uint32_t)st->st_blksize, f->facts.physical_block);
	if (!is_pow2(l->opt_io))
		l->opt_io = 0;
	l->max_io = MAX_IO;
	l->max_zero = MAX_ZERO;
	if (writable && !f->is_device && !can_punch(f, st))
		f->refused |= FILE_NO_PUNCH;
	if (writable && f->discard) {
		if (f->is_device)
			l->discard_gran = f->facts.discard_gran;
		else if (!(f->refused & FILE_NO_PUNCH))
			l->discard_gran = (uint32_t)st->st_blksize;
		l->discard_zeroes = l->discard_gran && !f->is_device;
	}
	l->fast_zero = f->is_device ? f->facts.write_zeroes_max > 0 : writable;
	l->fua = true;
	l->volatile_cache = !f->stable;
	l->multi_conn = true;
	l->rotational = f->facts.rotational == FACT_YES;
}

int file_open_blocking(struct file_disk *f, const struct file_config *c, struct err *err)
{
	struct stat st;
	int rc;

	/* Before open(2), which would wait on a FIFO and rewind a tape. */
	if (stat(c->path, &st))
		return open_failed(c, -errno, NULL, err);
	if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
		return wrong_type(c->path, st.st_mode, err);
	rc = open_mode(f, c, &st, err);
	if (rc)
		return rc;
	if (fstat(f->fd, &st) || (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode)))
		return wrong_type(c->path, st.st_mode, err);
	f->is_device = S_ISBLK(st.st_mode);
	rc = file_lock(f->fd, c->path, c->flags, c->locking, &f->locked, err);
	if (!rc)
		rc = find_size(f, c, &st, err);
	if (!rc)
		rc = open_tail(f, c, err);
	if (rc)
		return rc;
	f->stable = cache_modes[f->cache].stable;
	f->no_flush = cache_modes[f->cache].no_flush;
	if (!dsync_is_honest(f))
		f->refused |= FILE_NO_DSYNC;
	set_limits(f, c, &st);
	file_set_tail(f);
	return 0;
}

void file_close_blocking(struct file_disk *f)
{
	if (f->tail_fd >= 0)
		close(f->tail_fd);
	if (f->fd >= 0)
		close(f->fd);
}
