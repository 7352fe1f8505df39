/* SPDX-License-Identifier: MIT */
/*
 * File backend: discard, write zeroes, extents, resize.
 *
 * Regular files. Discard punches a hole; the kernel zeroes what is not a whole block, so that the range reads as zeroes for certain.
 * Write zeroes makes unwritten extents (FALLOC_FL_ZERO_RANGE), which stay allocated, or punches with DISK_UNMAP. A file system without
 * ZERO_RANGE gets a hole that is then allocated again. As in `qemu-img map`, unwritten extents are holes to co_extent: that is what
 * SEEK_DATA says of them.
 *
 * Devices. Discard is BLKDISCARD of whole units, and promises nothing about what is read. Write zeroes is fallocate on the device,
 * the same as BLKZEROOUT; the kernel writes zeroes itself where the device has no command for it, which is why DISK_FAST is refused there.
 *
 * What is refused with EOPNOTSUPP is remembered and not tried again.
 *
 * Extent cache: one extent. Changes forget it before and after they are made (file_extent_forget), and a look-up that raced with a change
 * (ext_gen moved) is answered and not kept. Not used with locking=off, where somebody else may write.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/file.h"
#include "rt/io.h"
#include "util/bytes.h"

/* --- fallocate and ioctl --- */

struct space_call {
	int fd, mode;
	uint64_t off, len;
};

static int fallocate_blocking(void *arg)
{
	const struct space_call *c = arg;
	int rc;

	do {
		rc = fallocate(c->fd, c->mode, (off_t)c->off, (off_t)c->len);
	} while (rc && errno == EINTR);
	return rc ? -errno : 0;
}

static int discard_blocking(void *arg)
{
	const struct space_call *c = arg;
	uint64_t range[2] = { c->off, c->len };

	return ioctl(c->fd, BLKDISCARD, range) ? -errno : 0;
}

static co_fn int co_fallocate(struct file_disk *f, int mode, uint64_t off, uint64_t len)
{
	struct space_call c = { f->fd, mode | FALLOC_FL_KEEP_SIZE, off, len };

	if (f->aio == FILE_AIO_THREADS)
		return co_offload(fallocate_blocking, &c);
	return co_io_fallocate(c.fd, c.mode, off, len);
}

static bool is_refusal(int rc)
{
	return rc == -EOPNOTSUPP || rc == -ENOSYS || rc == -ENOTTY;
}

/* co_fallocate() that asks once only. -EOPNOTSUPP if `bit` is or becomes set. */
static co_fn int co_fallocate_once(struct file_disk *f, enum file_refused bit, int mode, uint64_t off, uint64_t len)
{
	int rc;

	if (f->refused & bit)
		return -EOPNOTSUPP;
	rc = co_fallocate(f, mode, off, len);
	if (!is_refusal(rc))
		return rc;
	f->refused |= bit;
	return -EOPNOTSUPP;
}

/* A hole that reaches the end may take the whole last block with it. */
static uint64_t punch_len(const struct file_disk *f, uint64_t off, uint64_t len)
{
	if (off + len < f->d.size || f->is_device)
		return len;
	return align_up(f->d.size, max(f->d.limits.discard_gran, 1u)) - off;
}

static co_fn int co_punch(struct file_disk *f, uint64_t off, uint64_t len)
{
	return co_fallocate_once(f, FILE_NO_PUNCH, FALLOC_FL_PUNCH_HOLE, off, punch_len(f, off, len));
}

/* --- Discard --- */

static co_fn int co_discard_device(struct file_disk *f, uint64_t off, uint64_t len)
{
	uint64_t gran = max(f->d.limits.discard_gran, 1u);
	uint64_t from = align_up(off, gran), to = align_down(off + len, gran);
	struct space_call c = { f->fd, 0, from, to - from };
	int rc;

	if (from >= to || (f->refused & FILE_NO_DISCARD))
		return 0;
	rc = co_offload(discard_blocking, &c);
	if (is_refusal(rc)) {
		f->refused |= FILE_NO_DISCARD;
		return 0;
	}
	return rc;
}

co_fn int co_file_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct file_disk *f = file_of(d);
	int rc;

	if (!f->discard)
		return 0;
	file_extent_forget(f, off, len);
	rc = f->is_device ? co_discard_device(f, off, len) : co_punch(f, off, len);
	if (rc == -EOPNOTSUPP)
		rc = 0;
	file_extent_forget(f, off, len);
	rc = co_file_changed(f, rc, flags);
	return rc ? file_errno(rc) : 0;
}

/* --- Write zeroes --- */

static co_fn int co_zero_file(struct file_disk *f, uint64_t off, uint64_t len, unsigned flags)
{
	int rc;

	len = min(len, f->d.size - off);
	if ((flags & DISK_UNMAP) && f->discard) {
		rc = co_punch(f, off, len);
		if (rc != -EOPNOTSUPP)
			return rc;
	}
	rc = co_fallocate_once(f, FILE_NO_ZERO_RANGE, FALLOC_FL_ZERO_RANGE, off, len);
	if (rc != -EOPNOTSUPP)
		return rc;
	rc = co_fallocate_once(f, FILE_NO_PUNCH, FALLOC_FL_PUNCH_HOLE, off, len);
	if (!rc)
		rc = co_fallocate(f, 0, off, len);
	if (rc == -EOPNOTSUPP)
		f->d.limits.fast_zero = false;
	return rc;
}

static co_fn int co_zero_device(struct file_disk *f, uint64_t off, uint64_t len, unsigned flags)
{
	int rc;

	/* PUNCH_HOLE on a device fails where it would have to write, so it is always the fast way. */
	if ((flags & DISK_UNMAP) && f->discard) {
		rc = co_punch(f, off, len);
		if (rc != -EOPNOTSUPP)
			return rc;
	}
	if ((flags & DISK_FAST) && !f->facts.write_zeroes_max)
		return -EOPNOTSUPP;
	return co_fallocate_once(f, FILE_NO_ZERO_RANGE, FALLOC_FL_ZERO_RANGE, off, len);
}

co_fn int co_file_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct file_disk *f = file_of(d);
	int rc;

	file_extent_forget(f, off, len);
	rc = f->is_device ? co_zero_device(f, off, len, flags) : co_zero_file(f, off, len, flags);
	file_extent_forget(f, off, len);
	if (rc == -EOPNOTSUPP)
		return rc;
	rc = co_file_changed(f, rc, flags);
	return rc ? file_errno(rc) : 0;
}

/* --- Extents --- */

void file_extent_forget(struct file_disk *f, uint64_t off, uint64_t len)
{
	f->ext_gen++;
	if (off < f->ext_end && off + len > f->ext_off)
		f->ext_off = f->ext_end = 0;
}

struct seek_call {
	int fd;
	uint64_t off, end;
	bool hole;
};

/* What lies at c->off, and where it ends. */
static int seek_blocking(void *arg)
{
	struct seek_call *c = arg;
	off_t data = lseek(c->fd, (off_t)c->off, SEEK_DATA), hole;

	if (data < 0 && errno == ENXIO) {
		c->hole = true;
		c->end = UINT64_MAX;
		return 0;
	}
	if (data < 0)
		return -errno;
	c->hole = (uint64_t)data > c->off;
	c->end = (uint64_t)data;
	if (c->hole)
		return 0;
	hole = lseek(c->fd, (off_t)c->off, SEEK_HOLE);
	if (hole < 0)
		return -errno;
	if ((uint64_t)hole <= c->off)
		return -EAGAIN;	/* changed in between */
	c->end = (uint64_t)hole;
	return 0;
}

static void set_extent(struct disk_extent *ret, uint64_t len, bool hole)
{
	*ret = (struct disk_extent){ .len = len, .hole = hole, .zero = hole };
}

co_fn int co_file_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	struct file_disk *f = file_of(d);
	struct seek_call c = { .fd = f->fd, .off = off };
	uint64_t gen;

	if (off >= f->ext_off && off < f->ext_end) {
		set_extent(ret, min(len, f->ext_end - off), f->ext_hole);
		return 0;
	}
	gen = f->ext_gen;
	/* In doubt it is data: that is always true. */
	if (f->is_device || (f->refused & FILE_NO_SEEK) || co_offload(seek_blocking, &c)) {
		set_extent(ret, len, false);
		return 0;
	}
	/* Beyond the size there is only padding, so what reaches the size goes on. */
	if (c.end >= d->size)
		c.end = UINT64_MAX;
	if (gen == f->ext_gen && f->locked) {
		f->ext_off = off;
		f->ext_end = c.end;
		f->ext_hole = c.hole;
	}
	set_extent(ret, min(len, c.end - off), c.hole);
	return 0;
}

/* --- Resize --- */

struct resize_call {
	struct file_disk *f;
	uint64_t size;
	int sync_error;
};

static int resize_blocking(void *arg)
{
	struct resize_call *c = arg;
	struct file_disk *f = c->f;
	uint64_t now;

	if (f->is_device) {
		/* A device has the size it has; it may have been grown meanwhile. */
		if (ioctl(f->fd, BLKGETSIZE64, &now))
			return -errno;
		return c->size <= now && is_aligned(c->size, f->d.limits.align) ? 0 : -ENOTSUP;
	}
	if (ftruncate(f->fd, (off_t)c->size))
		return -errno;
	if (fsync(f->fd)) {
		c->sync_error = -errno;
		return c->sync_error;
	}
	f->d.size = c->size;
	file_set_tail(f);
	return 0;
}

co_fn int co_file_resize(struct disk *d, uint64_t size)
{
	struct file_disk *f = file_of(d);
	struct resize_call c = { .f = f, .size = size };
	int rc;

	f->ext_gen++;
	f->ext_off = f->ext_end = 0;
	co_mutex_lock(&f->sync_lock);
	rc = co_offload(resize_blocking, &c);
	if (c.sync_error)
		rc = disk_fail(d, c.sync_error, "fsync");
	co_mutex_unlock(&f->sync_lock);
	if (rc == -ENOTSUP)
		return rc;
	return rc ? file_errno(rc) : 0;
}
