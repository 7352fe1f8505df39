/* SPDX-License-Identifier: MIT */
/*
 * File backend: read, write, flush.
 *
 * Invariants
 *  (1) write_gen grows after each write that is not yet stable, also after a failed one, and before it completes. A flush that
 *      starts at write_gen g makes flushed_gen g when it succeeds; a flush that finds flushed_gen >= the write_gen of its
 *      own start has nothing to do. The first flush after open is never skipped.
 *  (2) One fdatasync at a time (sync_lock). The kernel reports an error of write-back once per open file: of two that
 *      run together only one would see it, and the other would be called a success. Those who come meanwhile share the next one.
 *      For the same reason a RWF_DSYNC write through the page cache, resize and the identity mark hold sync_lock. O_DIRECT writes get their own errors
 *      and run freely.
 *  (3) A failed fdatasync or RWF_DSYNC write makes the disk failed, and is not tried again. Where a stable write is a plain one with a flush
 *      behind it, a failure of the first is known to be its own, and spoils nothing. No space is not such a failure where the
 *      kernel says it before the data is in its hands: O_DIRECT always; for the page cache see co_dsync_no_space().
 *  (4) The tail. Where O_DIRECT needs a unit that the size is no multiple of, everything from the last page boundary before the end on
 *      (tail_off) goes through a second, buffered descriptor, one at a time, and nothing at tail_off and beyond ever goes
 *      through O_DIRECT: a dirty page and a direct write to the same page could overwrite each other. The size never changes.
 *      fdatasync works on the file, so that a flush covers the tail too.
 *
 * Suspends in all co_ functions. Runs on the home reactor of the disk.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "backend/file.h"
#include "rt/io.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/log.h"

int file_errno(int error)
{
	switch (error) {
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
		return -ENOSPC;
	case -EFAULT:	/* memory that a guest has taken away: its own request fails, and nothing else */
		return -EINVAL;
	case -EROFS:
	case -EINVAL:
	case -ENOMEM:
	case -EOPNOTSUPP:
	case -ECANCELED:
		return error;
	default:
		return -EIO;
	}
}

/* --- One system call --- */

struct rw_call {
	bool write;
	int fd, niov, rwf;
	const struct iovec *iov;
	uint64_t off;
};

static int rw_blocking(void *arg)
{
	const struct rw_call *c = arg;
	ssize_t n;

	do {
		n = c->write ? pwritev2(c->fd, c->iov, c->niov, (off_t)c->off, c->rwf)
			     : preadv2(c->fd, c->iov, c->niov, (off_t)c->off, c->rwf);
	} while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : (int)n;
}

static co_fn ssize_t co_rw(struct file_disk *f, const struct rw_call *c)
{
	switch (f->aio) {
	case FILE_AIO_THREADS:
		return co_offload(rw_blocking, (void *)c);
	case FILE_AIO_NATIVE:
		if (c->fd == f->fd)
			return co_file_native_rw(f->native, c->write, c->fd, c->iov, c->niov, c->off, c->rwf);
		break;
	case FILE_AIO_IO_URING:
		break;
	}
	return c->write ? co_io_writev(c->fd, c->iov, c->niov, c->off, c->rwf)
			: co_io_readv(c->fd, c->iov, c->niov, c->off, c->rwf);
}

/* --- The rare path: what is short, or touches the tail --- */

/* A read found the end of the file at `pos`. Beyond the size there are zeroes; before it somebody has cut the file. */
static int read_at_end(struct file_disk *f, uint64_t pos)
{
	if (pos >= f->d.size)
		return 0;
	if (!f->shrunk_logged)
		log_error("%s: ends at byte %llu, it had %llu when it was opened; somebody has truncated it", f->d.name,
			  (unsigned long long)pos, (unsigned long long)f->d.size);
	f->shrunk_logged = true;
	return -EIO;
}

/*
 * Transfers the bytes from `skip` to `end` of the list, buffer by buffer, until all is done.
 * The list begins at the disk's offset `off`.
 */
static co_fn int co_rw_rest(struct file_disk *f, struct rw_call c, size_t skip, size_t end)
{
	const struct iovec *iov = c.iov;
	uint64_t off = c.off;
	size_t base = 0;

	for (int i = 0; i < c.niov && base < end; base += iov[i].iov_len, i++) {
		while (skip < base + iov[i].iov_len && skip < end) {
			struct iovec part = { (char *)iov[i].iov_base + (skip - base), base + iov[i].iov_len - skip };
			struct rw_call one = c;
			ssize_t n;

			one.off = off + skip;
			one.fd = one.off >= f->tail_off ? f->tail_fd : f->fd;
			part.iov_len = min(part.iov_len, end - skip);
			if (one.off < f->tail_off)
				part.iov_len = min(part.iov_len, (size_t)(f->tail_off - one.off));
			one.iov = &part;
			one.niov = 1;
			/* What lies beyond the size is padding: zeroes to read, nothing to write. */
			if (one.off >= f->d.size) {
				if (!c.write)
					memset(part.iov_base, 0, part.iov_len);
				skip += part.iov_len;
				continue;
			}
			if (one.fd == f->tail_fd)
				part.iov_len = min(part.iov_len, (size_t)(f->d.size - one.off));
			n = co_rw(f, &one);
			if (n < 0)
				return (int)n;
			if (n == 0)
				return c.write ? -EIO : read_at_end(f, one.off);
			skip += (size_t)n;
		}
	}
	return 0;
}

static co_fn int co_rw_tail(struct file_disk *f, struct rw_call c, size_t len)
{
	int rc;

	co_mutex_lock(&f->tail_lock);
	rc = co_rw_rest(f, c, 0, len);
	co_mutex_unlock(&f->tail_lock);
	return rc;
}

/* Everything of one request. 0 or -errno. */
static co_fn int co_rw_all(struct file_disk *f, const struct rw_call *c, size_t len)
{
	ssize_t n;

	if (__builtin_expect(c->off + len > f->tail_off, 0))
		return co_rw_tail(f, *c, len);
	n = co_rw(f, c);
	if (__builtin_expect(n == (ssize_t)len, 1))
		return 0;
	if (n < 0)
		return (int)n;
	/* The file ends in the middle of a unit though its size, when opened, did not. */
	if (!c->write && !is_aligned((uint64_t)n, f->d.limits.align))
		return read_at_end(f, c->off + (uint64_t)n);
	return co_rw_rest(f, *c, (size_t)n, len);
}

co_fn int co_file_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct file_disk *f = file_of(d);
	struct rw_call c = { .write = false, .fd = f->fd, .iov = iov, .niov = niov, .off = off };
	int rc = co_rw_all(f, &c, len);

	return rc ? file_errno(rc) : 0;
}

/* --- Stable writes and flush --- */

static int sync_blocking(void *arg)
{
	const struct file_disk *f = arg;

	return fdatasync(f->fd) ? -errno : 0;
}

/* Makes everything stable that is written by now. Invariants (1), (2), (3). */
static co_fn int co_sync(struct file_disk *f)
{
	uint64_t target = f->write_gen, gen;
	int rc = 0;

	co_mutex_lock(&f->sync_lock);
	if (f->d.failed) {
		rc = -EIO;
	} else if (f->flushed_gen < target) {
		gen = f->write_gen;
		rc = f->aio == FILE_AIO_THREADS ? co_offload(sync_blocking, f) : co_io_fsync(f->fd, true);
		if (rc == -EOPNOTSUPP)
			rc = 0;	/* nothing here is volatile. Not so EROFS: a file system that gave up after an error says that */
		if (rc)
			rc = disk_fail(&f->d, rc, "flush");
		else
			f->flushed_gen = gen;
	}
	co_mutex_unlock(&f->sync_lock);
	return rc;
}

co_fn int co_file_flush(struct disk *d)
{
	struct file_disk *f = file_of(d);

	return f->no_flush ? 0 : co_sync(f);
}

co_fn int co_file_changed(struct file_disk *f, int rc, unsigned flags)
{
	int rc2;

	f->write_gen++;
	if (f->no_flush || !(f->stable || (flags & DISK_FUA)))
		return rc;
	rc2 = co_sync(f);
	return rc ? rc : rc2;
}

static co_fn int co_write_then_sync(struct file_disk *f, const struct rw_call *c, size_t len)
{
	int rc = co_rw_all(f, c, len);

	f->write_gen++;
	return rc ? rc : co_sync(f);
}

/*
 * A RWF_DSYNC write through the page cache said "no space". If the write proper said so, nothing is lost that was promised. If it
 * was write-back, data of this or of another write is gone: then writing it again succeeds. In doubt the disk has failed.
 */
static co_fn int co_dsync_no_space(struct file_disk *f, const struct rw_call *c, size_t len)
{
	struct rw_call plain = *c;
	int rc;

	plain.rwf = 0;
	rc = co_rw_all(f, &plain, len);
	f->write_gen++;
	if (file_errno(rc) == -ENOSPC)
		return rc;
	return disk_fail(&f->d, -ENOSPC, "stable write");
}

static co_fn int co_write_dsync(struct file_disk *f, struct rw_call *c, size_t len)
{
	bool buffered = !f->direct || c->off + len > f->tail_off;
	int rc;

	c->rwf = RWF_DSYNC;
	if (buffered) {
		co_mutex_lock(&f->sync_lock);
		rc = f->d.failed ? -EIO : co_rw_all(f, c, len);
	} else {
		rc = co_rw_all(f, c, len);
	}
	if (rc && rc != -EOPNOTSUPP && file_errno(rc) != -EINVAL && rc != -EROFS && file_errno(rc) != -ENOSPC)
		rc = disk_fail(&f->d, rc, "stable write");
	else if (buffered && file_errno(rc) == -ENOSPC)
		rc = co_dsync_no_space(f, c, len);
	if (buffered)
		co_mutex_unlock(&f->sync_lock);
	if (rc != -EOPNOTSUPP)
		return rc;
	f->refused |= FILE_NO_DSYNC;
	c->rwf = 0;
	return co_write_then_sync(f, c, len);
}

co_fn int co_file_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct file_disk *f = file_of(d);
	struct rw_call c = { .write = true, .fd = f->fd, .iov = iov, .niov = niov, .off = off };
	bool stable = (f->stable || (flags & DISK_FUA)) && !f->no_flush;
	int rc;

	file_extent_forget(f, off, len);
	if (!stable) {
		rc = co_rw_all(f, &c, len);
		f->write_gen++;
	} else if ((f->refused & FILE_NO_DSYNC) || f->cache == FILE_CACHE_WRITETHROUGH) {
		/* Through the page cache, and everything dirty is somebody's stable write: one flush serves all who wait. */
		rc = co_write_then_sync(f, &c, len);
	} else {
		rc = co_write_dsync(f, &c, len);
	}
	file_extent_forget(f, off, len);
	return rc ? file_errno(rc) : 0;
}

/* --- Prefetch --- */

struct fadvise_call {
	int fd;
	uint64_t off, len;
};

static int fadvise_blocking(void *arg)
{
	const struct fadvise_call *c = arg;

	return -posix_fadvise(c->fd, (off_t)c->off, (off_t)c->len, POSIX_FADV_WILLNEED);
}

co_fn int co_file_prefetch(struct disk *d, uint64_t off, uint64_t len)
{
	struct file_disk *f = file_of(d);
	struct fadvise_call c = { f->fd, off, len };

	return f->direct ? 0 : co_offload(fadvise_blocking, &c);
}
