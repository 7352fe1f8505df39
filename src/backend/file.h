/* SPDX-License-Identifier: MIT */
/*
 * The file backend, inside: what its source files share.
 *
 *   file.c         driver: options, open, ops table, status
 *   file_open.c    opening and probing (blocking; runs on a worker)
 *   file_io.c      read, write, flush
 *   file_space.c   discard, write zeroes, extents, resize
 *   file_native.c  the kernel's AIO
 *   file_lock.c    image locks
 *   file_mark.c    identity mark and stamp
 *   file_facts.c   what lies below
 */
#pragma once

#include "backend/file_facts.h"
#include "blk/disk.h"
#include "rt/sync.h"

enum file_aio { FILE_AIO_IO_URING, FILE_AIO_NATIVE, FILE_AIO_THREADS };

/* QEMU's names and meanings, in QEMU's order. */
enum file_cache { FILE_CACHE_NONE, FILE_CACHE_DIRECTSYNC, FILE_CACHE_WRITEBACK, FILE_CACHE_WRITETHROUGH, FILE_CACHE_UNSAFE };

enum file_locking { FILE_LOCKING_AUTO, FILE_LOCKING_ON, FILE_LOCKING_OFF };

/* What the file system or device refused once, and is not asked for again. */
enum file_refused {
	FILE_NO_DSYNC = 1 << 0,	/* or is not to be believed: write and fdatasync instead */
	FILE_NO_PUNCH = 1 << 1,
	FILE_NO_ZERO_RANGE = 1 << 2,
	FILE_NO_DISCARD = 1 << 3,
	FILE_NO_SEEK = 1 << 4,
};

struct file_native;

struct file_disk {
	struct disk d;
	char *path;
	int fd;			/* O_DIRECT in the direct modes; holds the locks */
	int tail_fd;		/* buffered, for what lies at tail_off and beyond; -1 if there is never a tail */
	uint64_t tail_off;	/* UINT64_MAX if there is no tail */
	struct co_mutex tail_lock;

	enum file_aio aio;
	enum file_cache cache;
	bool direct;		/* O_DIRECT */
	bool stable;		/* each write is stable when it completes */
	bool no_flush;		/* cache=unsafe */
	bool is_device;
	bool discard;		/* discard=unmap */
	bool locked, excl;
	bool shrunk_logged, lazytime_told;
	unsigned refused;	/* enum file_refused */
	struct file_facts facts;
	struct file_native *native;

	/* Flush: see file_io.c. */
	struct co_mutex sync_lock;
	uint64_t write_gen, flushed_gen;

	/* The last extent that was looked up; empty if ext_end is 0. */
	uint64_t ext_off, ext_end, ext_gen;
	bool ext_hole;
};

static inline struct file_disk *file_of(struct disk *d)
{
	return (struct file_disk *)d;
}

/* Options as given, and what became of them. */
struct file_config {
	const char *path;
	enum file_aio aio;
	enum file_cache cache;
	bool cache_given;
	bool discard;
	enum file_locking locking;
	unsigned flags;		/* enum disk_open_flags */
};

/* --- file_open.c --- */

/* Opens, probes and locks; fills in everything of `f` that needs no reactor, with `size` and `limits` of the disk. Blocks. */
int file_open_blocking(struct file_disk *f, const struct file_config *c, struct err *err);
void file_close_blocking(struct file_disk *f);
/* Sets tail_off for the present size. */
void file_set_tail(struct file_disk *f);
const char *file_aio_name(enum file_aio a);
const char *file_cache_name(enum file_cache c);

/* --- file_io.c --- */

co_fn int co_file_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_file_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_file_flush(struct disk *d);
co_fn int co_file_prefetch(struct disk *d, uint64_t off, uint64_t len);
/* After a change other than a write: counts it, and flushes if `flags` has DISK_FUA or the mode is a stable one. Returns `rc` or the flush's error. */
co_fn int co_file_changed(struct file_disk *f, int rc, unsigned flags);
/* The contract's error for a system call's. */
int file_errno(int error);

/* --- file_space.c --- */

co_fn int co_file_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_file_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_file_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret);
co_fn int co_file_resize(struct disk *d, uint64_t size);
/* The range is about to change or has changed: what was looked up about it is void. */
void file_extent_forget(struct file_disk *f, uint64_t off, uint64_t len);

/* --- file_native.c --- */

co_fn int co_file_native_create(struct file_native **ret, struct err *err);
co_fn void co_file_native_destroy(struct file_native *n);	/* NULL is fine */
/* As preadv2 and pwritev2: a count or -errno. */
co_fn ssize_t co_file_native_rw(struct file_native *n, bool write, int fd, const struct iovec *iov, int niov,
				uint64_t off, int rwf);

/* --- file_lock.c --- */

/*
 * Takes QEMU's byte-range locks on the open file. *ret_locked is false where locking=auto and there are no such locks.
 * -EBUSY with who holds what.
 */
int file_lock(int fd, const char *path, unsigned open_flags, enum file_locking mode, bool *ret_locked, struct err *err);

/* --- file_mark.c --- */

co_fn int co_file_mark_get(struct disk *d, char *buf, size_t size);
co_fn int co_file_mark_set(struct disk *d, const char *mark, struct err *err);
co_fn int co_file_stamp(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns);
/* 0: a write from now on gives another stamp; -EAGAIN: not yet. What the clocks said before (the coarse one) and after the file was looked at. */
int file_stamp_tells(uint64_t stamp_ns, bool fat, uint64_t before_ns, uint64_t after_ns);
/* Whether a change at `now_ns` would change the file's times: 0, -EAGAIN (not yet), -ENOTSUP (the file system's times are too coarse to tell). */
int file_times_tell(uint64_t mtime_ns, uint64_t ctime_ns, uint64_t now_ns);
co_fn int co_file_identity(struct disk *d, struct disk_identity *ret);
co_fn int co_file_touch(struct disk *d);
