/* SPDX-License-Identifier: MIT */
/*
 * Choke points: checks, counters, the failed state, and what is passed on to the layer below.
 *
 * Invariants
 *  (1) ops see only ranges within the size rounded up to `align`, only flags that they honour, and no change while the disk is read-only or failed;
 *  (2) a flush or FUA that failed once is never followed by one that succeeds: d->failed is set before the failure is returned, and looked
 *      at again after every flush, because the kernel tells an error of write-back to one of two concurrent flushes only;
 *  (3) an op that is missing goes to d->file's choke point with the caller's own arguments, so that the layer that has it does the aligning.
 */
#include "blk/internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "util/err.h"
#include "util/iov.h"
#include "util/log.h"

int disk_init(struct disk *d, const struct disk_ops *ops, const char *name, struct disk *file)
{
	memset(d, 0, sizeof(*d));
	assert(file || (ops->co_read && ops->co_write));
	d->name = strdup(name);
	if (!d->name)
		return -ENOMEM;
	/* Address space only, until it is used. */
	d->reserve = mmap(NULL, BLK_RESERVE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (d->reserve == MAP_FAILED) {
		free(d->name);
		d->name = NULL;
		d->reserve = NULL;
		return -ENOMEM;
	}
	d->ops = ops;
	d->file = file;
	if (file) {
		d->size = file->size;
		d->limits = file->limits;
		d->read_only = file->read_only;
	} else {
		d->limits = (struct disk_limits){ .align = 1, .mem_align = 1, .atomic_unit = 512 };
	}
	co_rangelock_init(&d->rmw_lock);
	list_init(&d->writes);
	co_queue_init(&d->rmw_drain);
	co_mutex_init(&d->reserve_lock);
	return 0;
}

void disk_fini(struct disk *d)
{
	if (d->reserve)
		munmap(d->reserve, BLK_RESERVE);
	d->reserve = NULL;
	free(d->name);
	d->name = NULL;
}

int disk_fail(struct disk *d, int error, const char *what)
{
	if (!d->failed) {
		d->failed = error;
		/* The layer below has said it already; and a disk that was shut down is nobody's fault. */
		if (error != -ESHUTDOWN && !(d->file && d->file->failed))
			log_error("%s: %s failed: %s; what was not flushed before may be lost, and every later write and flush fails until it is opened again",
				  d->name, what, strerror(-error));
	}
	return blk_failed(d);
}

bool disk_is_fenced(const struct disk *d)
{
	while (d->file)
		d = d->file;
	return d->fenced;
}

static int trace(struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	return unlikely(d->trace != NULL) ? d->trace(d->trace_arg, d, op, off, len, flags) : 0;
}

co_fn int co_blk_op_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	int ret = trace(d, DISK_OP_READ, off, len, flags);

	return ret ? ret : d->ops->co_read(d, off, len, iov, niov, flags);
}

co_fn int co_blk_op_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	int ret = trace(d, DISK_OP_WRITE, off, len, flags);

	if (likely(!ret))
		ret = d->ops->co_write(d, off, len, iov, niov, flags);
	if (unlikely(ret) && (flags & DISK_FUA) && blk_spoils_stability(ret))
		return disk_fail(d, ret, "a write with FUA");
	return ret;
}

static inline bool in_range(const struct disk *d, uint64_t off, uint64_t len)
{
	return len <= d->size && off <= d->size - len;
}

static inline int check_change(const struct disk *d, uint64_t off, uint64_t len)
{
	if (unlikely(!in_range(d, off, len)))
		return -EINVAL;
	if (unlikely(d->read_only))
		return -EROFS;
	if (unlikely(disk_is_fenced(d)))
		return -ESHUTDOWN;
	return unlikely(d->failed) ? blk_failed(d) : 0;
}

static inline void begin(struct disk *d, enum disk_op op, uint64_t len)
{
	d->in_flight++;
	d->count.ops[op]++;
	d->count.bytes[op] += len;
}

static inline int end(struct disk *d, enum disk_op op, int ret)
{
	d->in_flight--;
	if (unlikely(ret))
		d->count.errors[op]++;
	return ret;
}

static int refuse(struct disk *d, enum disk_op op, int ret)
{
	d->count.errors[op]++;
	return ret;
}

co_fn int co_disk_readv(struct disk *d, uint64_t off, const struct iovec *iov, int niov, unsigned flags)
{
	uint64_t len = likely(niov == 1) ? iov->iov_len : iov_len(iov, niov);
	int ret;

	if (unlikely(!in_range(d, off, len)))
		return refuse(d, DISK_OP_READ, -EINVAL);
	if (!len)
		return 0;
	flags &= DISK_BACKGROUND | DISK_METADATA | DISK_NOCACHE;
	begin(d, DISK_OP_READ, len);
	if (d->ops->co_read)
		ret = co_blk_read(d, off, len, iov, niov, flags);
	else if (!(ret = trace(d, DISK_OP_READ, off, len, flags)))
		ret = co_disk_readv(d->file, off, iov, niov, flags);
	return end(d, DISK_OP_READ, ret);
}

/* The flush behind a change with FUA on a disk that lacks it. */
static co_fn int co_flush_op(struct disk *d)
{
	int ret;

	if (unlikely(d->failed))
		return blk_failed(d);
	ret = trace(d, DISK_OP_FLUSH, 0, 0, 0);
	if (!ret && d->ops->co_flush)
		ret = d->ops->co_flush(d);
	if (ret == -EOPNOTSUPP)
		ret = 0;
	if (unlikely(ret))
		return disk_fail(d, ret, "a flush");
	return unlikely(d->failed) ? blk_failed(d) : 0;
}

co_fn int co_disk_flush(struct disk *d)
{
	int ret;

	begin(d, DISK_OP_FLUSH, 0);
	if (d->ops->co_flush || !d->file)
		ret = co_flush_op(d);
	else if (d->failed)
		ret = blk_failed(d);
	else if (!(ret = trace(d, DISK_OP_FLUSH, 0, 0, 0)))
		ret = co_disk_flush(d->file);
	return end(d, DISK_OP_FLUSH, ret);
}

/* Ends a change: with the flush that it needs, if it does. */
static co_fn int co_settle(struct disk *d, int ret, bool flush)
{
	if (ret || !flush || !d->limits.volatile_cache)
		return ret;
	return co_disk_flush(d);
}

/* Takes DISK_FUA away from ops that lack it. */
static inline unsigned own_flags(const struct disk *d, unsigned flags, bool *flush)
{
	*flush = (flags & DISK_FUA) && !d->limits.fua;
	return *flush ? flags & ~DISK_FUA : flags;
}

co_fn int co_disk_writev(struct disk *d, uint64_t off, const struct iovec *iov, int niov, unsigned flags)
{
	uint64_t len = likely(niov == 1) ? iov->iov_len : iov_len(iov, niov);
	int ret = check_change(d, off, len);
	bool flush;

	if (unlikely(ret))
		return refuse(d, DISK_OP_WRITE, ret);
	if (!len)
		return 0;
	flags &= DISK_FUA | DISK_BACKGROUND;
	begin(d, DISK_OP_WRITE, len);
	if (d->ops->co_write) {
		flags = own_flags(d, flags, &flush);
		ret = co_blk_write(d, off, len, iov, niov, flags, &flush);
		if (unlikely(flush))
			ret = co_settle(d, ret, flush);
	} else if (!(ret = trace(d, DISK_OP_WRITE, off, len, flags))) {
		ret = co_disk_writev(d->file, off, iov, niov, flags);
	}
	return end(d, DISK_OP_WRITE, ret);
}

co_fn int co_disk_read(struct disk *d, uint64_t off, void *buf, uint64_t len, unsigned flags)
{
	struct iovec iov = { buf, len };

	return co_disk_readv(d, off, &iov, 1, flags);
}

co_fn int co_disk_write(struct disk *d, uint64_t off, const void *buf, uint64_t len, unsigned flags)
{
	struct iovec iov = { (void *)(uintptr_t)buf, len };

	return co_disk_writev(d, off, &iov, 1, flags);
}

co_fn int co_disk_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	int ret = check_change(d, off, len);
	bool flush;

	if (unlikely(ret))
		return refuse(d, DISK_OP_DISCARD, ret);
	if (!len)
		return 0;
	flags &= DISK_FUA | DISK_BACKGROUND;
	begin(d, DISK_OP_DISCARD, len);
	if (d->ops->co_discard) {
		flags = own_flags(d, flags, &flush);
		ret = co_blk_discard(d, off, len, flags, &flush);
		ret = co_settle(d, ret, flush);
	} else if (d->file && !(ret = trace(d, DISK_OP_DISCARD, off, len, flags))) {
		ret = co_disk_discard(d->file, off, len, flags);
	}
	return end(d, DISK_OP_DISCARD, ret);
}

co_fn int co_disk_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	int ret = check_change(d, off, len);
	bool flush;

	if (unlikely(ret))
		return refuse(d, DISK_OP_ZERO, ret);
	if (!len)
		return 0;
	flags &= DISK_FUA | DISK_BACKGROUND | DISK_UNMAP | DISK_FAST;
	if ((flags & DISK_FAST) && !d->limits.fast_zero)
		return -EOPNOTSUPP;
	begin(d, DISK_OP_ZERO, len);
	if (d->ops->co_zero || !d->file) {
		flags = own_flags(d, flags, &flush);
		ret = co_blk_zero(d, off, len, flags, &flush);
		ret = co_settle(d, ret, flush);
	} else if (!(ret = trace(d, DISK_OP_ZERO, off, len, flags))) {
		ret = co_disk_zero(d->file, off, len, flags);
	}
	return end(d, DISK_OP_ZERO, ret);
}

/* Asks the op about whole units, and cuts the answer to what was asked. */
static co_fn int co_extent_op(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	uint64_t start = align_down(off, d->limits.align);
	uint64_t stop = align_up(off + len, d->limits.align);
	struct disk_extent e = { 0 };
	int r = trace(d, DISK_OP_EXTENT, off, len, 0);

	if (!r)
		r = d->ops->co_extent(d, start, stop - start, &e);
	if (r)
		return r;
	assert(e.len);
	if (e.len <= off - start)
		e = (struct disk_extent){ .len = d->limits.align };
	e.len = min(e.len - (off - start), len);
	*ret = e;
	return 0;
}

co_fn int co_disk_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	int r = 0;

	if (!len || !in_range(d, off, len))
		return refuse(d, DISK_OP_EXTENT, -EINVAL);
	begin(d, DISK_OP_EXTENT, len);
	if (d->ops->co_extent)
		r = co_extent_op(d, off, len, ret);
	else if (!d->file)
		*ret = (struct disk_extent){ .len = len };
	else if (!(r = trace(d, DISK_OP_EXTENT, off, len, 0)))
		r = co_disk_extent(d->file, off, len, ret);
	return end(d, DISK_OP_EXTENT, r);
}

co_fn int co_disk_prefetch(struct disk *d, uint64_t off, uint64_t len)
{
	int ret = 0;

	if (!in_range(d, off, len))
		return -EINVAL;
	if (!len)
		return 0;
	d->in_flight++;
	if (d->ops->co_prefetch)
		ret = d->ops->co_prefetch(d, off, len);
	else if (d->file)
		ret = co_disk_prefetch(d->file, off, len);
	d->in_flight--;
	return ret;
}

co_fn int co_disk_resize(struct disk *d, uint64_t size, struct err *err)
{
	int ret;

	if (d->read_only)
		return err_set(err, -EROFS, "%s: is read-only and cannot be resized", d->name);
	if (d->failed)
		return err_set(err, blk_failed(d), "%s: has failed and cannot be resized; open it again", d->name);
	if (size > DISK_MAX_SIZE)
		return err_set(err, -EINVAL, "%s: cannot be larger than %llu bytes", d->name, (unsigned long long)DISK_MAX_SIZE);
	if (d->ops->co_resize) {
		ret = d->ops->co_resize(d, size);
		if (ret == -ENOTSUP)
			err_set(err, ret, "%s: cannot change its size", d->name);
		else if (ret)
			err_errno(err, ret, "%s: cannot be resized", d->name);
	} else if (d->file) {
		ret = co_disk_resize(d->file, size, err);
	} else {
		ret = err_set(err, -ENOTSUP, "%s: disks of driver '%s' cannot change their size", d->name, d->ops->driver);
	}
	if (!ret)
		d->size = size;
	return ret;
}

co_fn int co_disk_mark_get(struct disk *d, char *buf, size_t size)
{
	if (d->ops->co_mark_get)
		return d->ops->co_mark_get(d, buf, size);
	return d->file ? co_disk_mark_get(d->file, buf, size) : -ENOTSUP;
}

co_fn int co_disk_mark_set(struct disk *d, const char *mark, struct err *err)
{
	if (strlen(mark) > DISK_MARK_MAX)
		return err_set(err, -EINVAL, "%s: identity mark is longer than %d bytes", d->name, DISK_MARK_MAX);
	if (d->read_only)
		return err_set(err, -EROFS, "%s: is read-only and cannot be marked", d->name);
	if (d->ops->co_mark_set)
		return d->ops->co_mark_set(d, mark, err);
	if (d->file)
		return co_disk_mark_set(d->file, mark, err);
	return err_set(err, -ENOTSUP, "%s: has no place for an identity mark", d->name);
}

co_fn int co_disk_stamp(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns)
{
	if (d->ops->co_stamp)
		return d->ops->co_stamp(d, ret_stamp_ns, ret_now_ns);
	return d->file ? co_disk_stamp(d->file, ret_stamp_ns, ret_now_ns) : -ENOTSUP;
}

/* One step of a mixer (Steele, Lea and Flood, OOPSLA '14): no two inputs that differ in one word give the same output. */
static uint64_t mix(uint64_t a, uint64_t b)
{
	a = (a ^ b) + 0x9e3779b97f4a7c15ull;
	a = (a ^ a >> 30) * 0xbf58476d1ce4e5b9ull;
	a = (a ^ a >> 27) * 0x94d049bb133111ebull;
	return a ^ a >> 31;
}

void disk_identity_mix(struct disk_identity *id, const struct disk_identity *other)
{
	for (unsigned i = 0; i < 4; i++)
		id->word[i] = mix(id->word[i], other->word[i] + i);
}

bool disk_identity_equal(const struct disk_identity *a, const struct disk_identity *b)
{
	return !memcmp(a, b, sizeof(*a));
}

static void mix_text(struct disk_identity *id, const char *text)
{
	for (; *text; text++)
		for (unsigned i = 0; i < 4; i++)
			id->word[i] = mix(id->word[i], (unsigned char)*text + i * 256u);
}

co_fn int co_disk_writers(struct disk *d, uint64_t *ret)
{
	if (d->ops->co_writers)
		return d->ops->co_writers(d, ret);
	return d->file ? co_disk_writers(d->file, ret) : -ENOTSUP;
}

co_fn int co_disk_identity(struct disk *d, struct disk_identity *ret)
{
	int r;

	if (d->ops->co_identity)
		r = d->ops->co_identity(d, ret);
	else
		r = d->file ? co_disk_identity(d->file, ret) : -ENOTSUP;
	if (!r || r == -EAGAIN) {
		mix_text(ret, d->ops->driver);
		mix_text(ret, d->name);
		ret->word[0] = mix(ret->word[0], d->size);
	}
	return r;
}

co_fn int co_disk_touch(struct disk *d)
{
	if (d->read_only)
		return -EROFS;
	if (d->ops->co_touch)
		return d->ops->co_touch(d);
	return d->file ? co_disk_touch(d->file) : -ENOTSUP;
}

void disk_cancel(struct disk *d)
{
	if (d->ops->cancel)
		d->ops->cancel(d);
	if (d->file)
		disk_cancel(d->file);
}

co_fn void co_disk_close(struct disk *d)
{
	if (!d)
		return;
	assert(!d->in_flight);
	if (d->ops->co_close) {
		d->ops->co_close(d);
		return;
	}
	co_disk_close(d->file);
	disk_fini(d);
	free(d);
}
