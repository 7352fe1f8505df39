/* SPDX-License-Identifier: MIT */
/*
 * The disk contract.
 *
 * A disk is anything that reads and writes bytes at offsets and can flush: an image file, a log, a cache, a
 * format, a wrapper for tests. Layers meet here and nowhere else. Who uses a disk calls the co_disk_*()
 * choke points below; a layer implements struct disk_ops and gets clean input from them.
 *
 * What a disk promises
 *
 *  (1) Write. When co_disk_write() returns 0, every later read of the range returns the data, on every path to this
 *      disk. The data may be volatile. When it fails, the range holds, sector by sector, the old or the new data.
 *  (2) Flush. When co_disk_flush() returns 0, every write, discard and write-zeroes that had *completed* before the
 *      flush was issued is on stable media; the device's own volatile cache is flushed or bypassed. Operations that were in
 *      flight at that moment may or may not be.
 *  (3) FUA. An operation with DISK_FUA is on stable media when it completes; nothing is said about others. A disk whose ops
 *      lack `fua` gets a flush behind the operation from the choke point.
 *  (4) Flush errors are sticky. After a failed flush (or a failed FUA or DSYNC write) the disk cannot know what is stable:
 *      it enters a failed state in which every later flush, FUA and write fails with -EIO until it is opened again. A flush
 *      is never retried and then called a success. -EOPNOTSUPP of a flush below means "nothing volatile": success. A write that finds
 *      no space (-ENOSPC) or is refused (-EINVAL, -EROFS) is no such failure. A disk that is gone stays -ESHUTDOWN.
 *  (5) Order. Requests in flight together have no order. Overlapping writes in flight together leave each sector with one or
 *      the other; who cares orders them with a range lock. Two requests are ordered only if one was issued after the
 *      other had completed. A read in flight with a write of the same sector may see some of both (the kernel's page cache gives that).
 *  (6) Tearing. After a crash a write that was not flushed may be partly there: any subset of its sectors (of `atomic_unit` bytes).
 *      A layer that promises more (the write log does) says so in `atomic_unit`: UINT32_MAX is "whole requests". A store of objects may promise it for a
 *      write that lies within one, is aligned to `align`, and is not flushed, or failed: `atomic_write`.
 *  (7) Discard. The range reads as zeroes or as before (`discard_zeroes` tells which is certain), and costs no space if the
 *      disk can do it. It is advice: a disk that cannot do it succeeds without an effect.
 *  (8) Write zeroes. The range reads as zeroes. With DISK_UNMAP space may be freed; without, it stays allocated. With
 *      DISK_FAST it fails with -EOPNOTSUPP at once where it would be as slow as writing. Where a disk lacks the op, the choke
 *      point writes zeroes from a buffer.
 *  (9) Errors. -EIO media; -ENOSPC no space (the disk goes on working); -EROFS; -EINVAL range; -ESHUTDOWN the disk is gone for good;
 *      -ENOTSUP. Never a partial success.
 *
 * Buffers belong to the caller and stay untouched by it until return. A read may scribble on the buffer even if it fails.
 * The iovec array and the memory may be of any alignment: the choke point bounces if ops need more (`mem_align`).
 *
 * Alignment. `align` is the unit that ops need for offset and length (1, 512 or 4096). The choke point turns anything else
 * into read-modify-write of the edges under a range lock against other writes that touch the same units. Without a log below that is
 * not atomic across a crash for more than a unit. `size` needs no alignment: the last unit may be partial, ops then see a length that is
 * rounded up to `align`, and must read zeroes beyond `size` and ignore what is written there.
 *
 * Threads. A disk lives on its home reactor; all ops are called there, as coroutines, any number at once. open and close are called
 * with nothing in flight.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "rt/sync.h"

struct err;
struct disk;
struct disk_spec;

#define DISK_MAX_IOV 1024
#define DISK_MAX_SIZE ((uint64_t)INT64_MAX & ~4095ull)

enum disk_flags {
	DISK_FUA = 1 << 0,	/* write, write zeroes, discard: on stable media at completion */
	DISK_UNMAP = 1 << 1,	/* write zeroes: may free space */
	DISK_FAST = 1 << 2,	/* write zeroes: only if fast */
	DISK_BACKGROUND = 1 << 3, /* destage, scrub, rebuild: not the guest's, yields to it */
	DISK_NOCACHE = 1 << 5,	/* read: no cache below keeps it; whoever asks was told not to */
	DISK_METADATA = 1 << 4,	/* read: a format's own tables, which a cache keeps apart from what the guest stores */
};

enum disk_op { DISK_OP_READ, DISK_OP_WRITE, DISK_OP_FLUSH, DISK_OP_DISCARD, DISK_OP_ZERO, DISK_OP_EXTENT, DISK_OPS };

/* What lies at an offset. */
struct disk_extent {
	uint64_t len;		/* from the offset asked for, >= 1 */
	bool hole;		/* costs no space here */
	bool zero;		/* reads as zeroes */
};

struct disk_limits {
	uint32_t align;		/* power of two, 1..65536 */
	uint32_t mem_align;	/* of each segment's base, power of two, 1..4096; above 1 each length is a multiple of `align` too */
	uint32_t atomic_unit;	/* (6) */
	uint32_t atomic_write;	/* (6): a write within so many bytes, from a multiple of it on, is there whole or not at all. Power of two, at most max_io; 0: nothing beyond atomic_unit */
	uint32_t opt_io;	/* preferred size and alignment of a request; 0: none known */
	uint32_t object;	/* what the store keeps as one: a request within one costs one round trip, whatever its size. Power of two; 0: nothing of the kind */
	uint32_t opt_depth;	/* requests in flight that a store far away needs to be fast; 0: a few will do */
	uint32_t max_io;	/* bytes of one op; the choke point splits. 0: no limit */
	uint64_t max_zero;	/* the same for discard and write zeroes */
	uint32_t discard_gran;	/* discards are cut to whole multiples of it by the driver; 0: no discard */
	bool discard_zeroes;	/* the choke point then zeroes edges that are not aligned to `align` */
	bool fast_zero;		/* write zeroes with DISK_FAST will succeed; if false it is refused above the ops */
	bool fua;		/* ops honour DISK_FUA themselves */
	bool volatile_cache;	/* false: every completed write is stable, flush costs nothing */
	bool multi_conn;	/* informational: always true within one process */
	bool rotational;
	bool sole_writer;	/* while it is open, what was read stays what is there unless it is changed through this disk: the store keeps others from writing */
};

/*
 * Of an image: which one it is, and a state of it. Whoever writes to it, by whatever program, changes it; as long as it is the same,
 * so are the contents of the disk that was opened by the same DISK string. It may change without need. Layers mix in what they are.
 */
struct disk_identity {
	uint64_t word[4];
};

/* Identity mark that a write log leaves on an image: opaque text of at most DISK_MARK_MAX bytes. */
#define DISK_MARK_MAX 1024

/*
 * Members whose names begin with co_ may suspend (a pointer cannot carry co_fn). Ops that are NULL: read and write are mandatory unless
 * `file` is set, in which case every missing op is passed on to disk->file with the same arguments. All return 0 or -errno; `len` is
 * iov_len(iov, niov), within limits, never 0, never beyond the size rounded up to align.
 */
struct disk_ops {
	const char *driver;
	int (*co_read)(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
	int (*co_write)(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);
	int (*co_flush)(struct disk *d);
	int (*co_discard)(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
	int (*co_zero)(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
	int (*co_extent)(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret);
	/* Advice that the range will be read soon. */
	int (*co_prefetch)(struct disk *d, uint64_t off, uint64_t len);
	/* Durable when it returns. -ENOTSUP if the disk cannot change its size. */
	int (*co_resize)(struct disk *d, uint64_t size);
	/*
	 * The identity mark: durable, survives the process, moves with the image where its store can hold it. get returns 0 and a
	 * NUL-terminated text ("" if there is none); set with "" removes it. -ENOTSUP where there is no place for one.
	 */
	int (*co_mark_get)(struct disk *d, char *buf, size_t size);
	int (*co_mark_set)(struct disk *d, const char *mark, struct err *err);
	/*
	 * A stamp that changes whenever anybody writes to the image (size and mtime of a file). -ENOTSUP where there is none; -EAGAIN, with nothing else, while this
	 * disk will itself write something more, once requests in flight have ended, and, with the stamp, if a write at this instant would leave it as it is: ask again later.
	 */
	int (*co_stamp)(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns);
	/*
	 * What tells the present contents from any other: see struct disk_identity. -ENOTSUP where there is nothing of the kind, -EAGAIN, with *ret, if a
	 * change at this instant would leave it as it is, or for the reason that co_stamp has: ask again in a few milliseconds. touch changes it, durably, and no contents; then also the stamp.
	 */
	int (*co_identity)(struct disk *d, struct disk_identity *ret);
	int (*co_touch)(struct disk *d);
	/*
	 * Of a store that keeps writers apart by a lock, for a disk that is open to be written: a number that tells whether anybody else has had the lock since. If so it is
	 * above what this op gave under an earlier open; if not it is the same. Only for an image that carries a mark. -ENOTSUP.
	 */
	int (*co_writers)(struct disk *d, uint64_t *ret);
	/* The size that the store knows now, where it can be changed from outside. Plain function. */
	uint64_t (*store_size)(struct disk *d);
	/* Stops accepting I/O at the first chance, with nothing flushed: a layer that waits (for a server to come back) gives up with -ESHUTDOWN. Plain function. */
	void (*cancel)(struct disk *d);
	/* Flushes nothing by itself. Frees the layer and closes d->file; never fails. */
	void (*co_close)(struct disk *d);
	/* Adds driver-specific facts for `status` to the json_t object `obj`. Plain function. */
	void (*status)(struct disk *d, void *obj);
};

struct disk_counters {
	uint64_t ops[DISK_OPS], bytes[DISK_OPS], errors[DISK_OPS];
	uint64_t rmw;		/* writes that read their edges first */
	uint64_t bounced;	/* pieces that went through a buffer, for their memory or their edges */
};

/* A layer embeds this as its first member, and fills in ops, name, size, limits (and file) at open by disk_init(). */
struct disk {
	const struct disk_ops *ops;
	struct disk *file;	/* the layer below, owned; NULL for a backend */
	char *name;		/* for messages: what the operator wrote, cut to the layer */
	uint64_t size;		/* bytes */
	struct disk_limits limits;
	bool read_only;
	int failed;		/* sticky -errno of promise (4), 0 if well */
	bool fenced;		/* a backend: others may write to it from now on, so that nothing may here, nor be promised above: see disk_is_fenced() */
	unsigned in_flight;
	struct disk_counters count;
	/* read-modify-write, see blk/internal.h */
	struct co_rangelock rmw_lock;
	struct list writes;
	unsigned rmw_active;
	struct co_queue rmw_drain;
	void *reserve;		/* bounce buffer of last resort */
	struct co_mutex reserve_lock;
	void *trace_arg;	/* test hook: called before an op is handed to the driver; what it returns but 0 is the op's result */
	int (*trace)(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags);
};

/* --- Choke points: check range, read-only and the failed state, split, align, bounce, count, trace. --- */

/* -EINVAL if off+len exceeds the size. len 0 succeeds. */
co_fn int co_disk_readv(struct disk *d, uint64_t off, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_disk_writev(struct disk *d, uint64_t off, const struct iovec *iov, int niov, unsigned flags);
co_fn int co_disk_read(struct disk *d, uint64_t off, void *buf, uint64_t len, unsigned flags);
co_fn int co_disk_write(struct disk *d, uint64_t off, const void *buf, uint64_t len, unsigned flags);
co_fn int co_disk_flush(struct disk *d);
co_fn int co_disk_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
co_fn int co_disk_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags);
/* The first extent at `off`; ret->len <= len. Without an op: data. */
co_fn int co_disk_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret);
co_fn int co_disk_prefetch(struct disk *d, uint64_t off, uint64_t len);
co_fn int co_disk_resize(struct disk *d, uint64_t size, struct err *err);
co_fn int co_disk_mark_get(struct disk *d, char *buf, size_t size);
co_fn int co_disk_mark_set(struct disk *d, const char *mark, struct err *err);
co_fn int co_disk_stamp(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns);
co_fn int co_disk_writers(struct disk *d, uint64_t *ret);
co_fn int co_disk_identity(struct disk *d, struct disk_identity *ret);
co_fn int co_disk_touch(struct disk *d);
/* Makes one identity of two, in order. */
void disk_identity_mix(struct disk_identity *id, const struct disk_identity *other);
bool disk_identity_equal(const struct disk_identity *a, const struct disk_identity *b);
/*
 * True if the store has shut this process out (or given the image to another). Changes fail with -ESHUTDOWN on every layer, so that a log takes no more writes for
 * an image that another host may have taken over; reads go on as far as the store allows.
 */
bool disk_is_fenced(const struct disk *d);
void disk_cancel(struct disk *d);
co_fn void co_disk_close(struct disk *d);	/* NULL is fine */
/* A json_t object (new reference, as void * so that this header needs no jansson) that describes d and what is below it. */
void *disk_status(struct disk *d);

/* For drivers. Copies `name`; limits are the file's where there is one, else {align 1, mem_align 1, atomic_unit 512}. */
int disk_init(struct disk *d, const struct disk_ops *ops, const char *name, struct disk *file);
void disk_fini(struct disk *d);
/* Records the sticky failure and logs it once with `what`; returns -EIO. */
int disk_fail(struct disk *d, int error, const char *what);
/* --- Drivers and DISK strings: see blk/spec.h --- */
