/* SPDX-License-Identifier: MIT */
/*
 * FUSE server: what a request does, and its answer. Suspends in the volume only.
 */
#include "export/fuse/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"

#define BLOCK 4096u
#define LOOKUPS_MAX 65536u	/* extents that one lseek(2) walks over */
#define LOOKUPS_TURN 64u
#define FALLOC_FL_KEEP_SIZE_ 0x01u
#define FALLOC_FL_PUNCH_HOLE_ 0x02u
#define FALLOC_FL_ZERO_RANGE_ 0x10u
#define ERRNO_MAX 511
#define MINOR_MIN 28u		/* max_pages: Linux 4.20 */
#define MINOR_OURS 36u

static const void *args(const struct fuse_request *r)
{
	return r->message + sizeof(struct fuse_in_header);
}

/* --- Attributes --- */

static void put_attr(const struct fuse_export *e, struct fuse_attr *a)
{
	uint64_t size = e->v->disk->size, sec = e->mtime_ns / 1000000000, nsec = e->mtime_ns % 1000000000;

	*a = (struct fuse_attr){
		.ino = FUSE_ROOT_ID, .size = size, .blocks = align_up(size, 512) / 512, .mode = S_IFREG | e->mode, .nlink = 1,
		.uid = e->uid, .gid = e->gid, .blksize = BLOCK,
		.atime = sec, .mtime = sec, .ctime = sec, .atimensec = (uint32_t)nsec, .mtimensec = (uint32_t)nsec, .ctimensec = (uint32_t)nsec,
	};
}

static int reply_attr(struct fuse_request *r)
{
	r->reply.attr = (struct fuse_attr_out){ .attr_valid = 0 };
	put_attr(r->e, &r->reply.attr.attr);
	return sizeof(r->reply.attr);
}

static co_fn int co_getattr(struct fuse_request *r)
{
	return reply_attr(r);
}

/* The kernel has checked who may do it (default_permissions). */
static co_fn int co_setattr(struct fuse_request *r)
{
	const struct fuse_setattr_in *in = args(r);
	struct fuse_export *e = r->e;

	if ((in->valid & FATTR_SIZE) && in->size != e->v->disk->size)
		return -EPERM;
	if (in->valid & FATTR_MODE) {
		if (in->mode & 07000)
			return -EPERM;
		e->mode = in->mode & 0777;
	}
	if (in->valid & FATTR_UID)
		e->uid = in->uid;
	if (in->valid & FATTR_GID)
		e->gid = in->gid;
	return reply_attr(r);
}

static co_fn int co_statfs(struct fuse_request *r)
{
	r->reply.statfs.st = (struct fuse_kstatfs){
		.blocks = align_up(r->e->v->disk->size, BLOCK) / BLOCK, .files = 1, .bsize = BLOCK, .frsize = BLOCK, .namelen = 255,
	};
	return sizeof(r->reply.statfs);
}

/* --- Begin --- */

static co_fn int co_init(struct fuse_request *r)
{
	const struct fuse_init_in *in = args(r);
	const uint32_t wanted = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_MAX_PAGES;
	struct fuse_export *e = r->e;
	unsigned depth = e->config.max_in_flight;

	if (in->major > FUSE_KERNEL_VERSION) {	/* it asks once more, with our version */
		r->reply.init = (struct fuse_init_out){ .major = FUSE_KERNEL_VERSION, .minor = MINOR_OURS };
		return sizeof(r->reply.init);
	}
	if (in->major < FUSE_KERNEL_VERSION || in->minor < MINOR_MIN || !(in->flags & FUSE_MAX_PAGES)) {
		log_error("%s: this kernel speaks FUSE %u.%u, and %u.%u (Linux 4.20) is the least", e->config.path, in->major, in->minor,
			  FUSE_KERNEL_VERSION, MINOR_MIN);
		return -EPROTO;
	}
	e->minor = in->minor;
	e->initialised = true;
	r->reply.init = (struct fuse_init_out){
		.major = FUSE_KERNEL_VERSION, .minor = MINOR_OURS, .max_readahead = in->max_readahead, .flags = in->flags & wanted,
		.max_background = (uint16_t)depth, .congestion_threshold = (uint16_t)(depth - depth / 4), .max_write = FUSE_DATA_MAX,
		.time_gran = 1, .max_pages = FUSE_DATA_MAX / BLOCK,
	};
	return sizeof(r->reply.init);
}

static co_fn int co_open(struct fuse_request *r)
{
	const struct fuse_open_in *in = args(r);

	if (r->e->v->read_only && (in->flags & O_ACCMODE) != O_RDONLY)
		return -EROFS;
	r->e->opens++;
	r->reply.open = (struct fuse_open_out){ .open_flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES };
	return sizeof(r->reply.open);
}

static co_fn int co_release(struct fuse_request *r)
{
	if (r->e->opens)
		r->e->opens--;
	return 0;
}

static co_fn int co_nothing(struct fuse_request *r)
{
	return 0;
}

/* --- Data --- */

static co_fn int co_read(struct fuse_request *r)
{
	const struct fuse_read_in *in = args(r);
	uint64_t size = r->e->v->disk->size;
	struct iovec iov = { r->data, in->size };
	int ret;

	if (in->size > FUSE_DATA_MAX)
		return -EINVAL;
	if (in->offset >= size || !in->size)
		return 0;
	iov.iov_len = min((uint64_t)in->size, size - in->offset);
	ret = co_volume_readv(r->e->v, in->offset, &iov, 1);
	r->e->bytes_out += ret < 0 ? 0 : iov.iov_len;
	return ret < 0 ? ret : (int)iov.iov_len;
}

static void changed(struct fuse_export *e)
{
	e->mtime_ns = rt_wall_ns();
}

static co_fn int co_write(struct fuse_request *r)
{
	const struct fuse_write_in *in = args(r);
	struct fuse_export *e = r->e;
	bool durable = in->flags & O_SYNC;
	uint64_t size = e->v->disk->size;
	struct iovec iov = { r->data, in->size };
	int ret;

	if (in->size != r->len - FUSE_WRITE_HEAD || in->offset > INT64_MAX)
		return -EINVAL;
	if (in->offset >= size && in->size)
		return e->v->read_only ? -EROFS : -ENOSPC;
	iov.iov_len = min((uint64_t)in->size, size - in->offset);
	ret = iov.iov_len ? co_volume_writev(e->v, in->offset, &iov, 1, durable ? DISK_FUA : 0) : 0;
	if (ret < 0)
		return ret;
	changed(e);
	e->bytes_in += iov.iov_len;
	e->durable_writes += durable;
	r->reply.write = (struct fuse_write_out){ .size = (uint32_t)iov.iov_len };
	return sizeof(r->reply.write);
}

static co_fn int co_fsync(struct fuse_request *r)
{
	r->e->flushes++;
	return co_volume_flush(r->e->v);
}

/* Within the size, or with KEEP_SIZE cut to it. Plain allocation is refused: what a disk would have to keep free for it nobody can tell. */
static co_fn int co_fallocate(struct fuse_request *r)
{
	const struct fuse_fallocate_in *in = args(r);
	uint64_t size = r->e->v->disk->size, len = in->length;
	uint32_t what = in->mode & ~FALLOC_FL_KEEP_SIZE_;
	int ret;

	if (r->e->v->read_only)
		return -EROFS;
	if (what != FALLOC_FL_ZERO_RANGE_ && in->mode != (FALLOC_FL_PUNCH_HOLE_ | FALLOC_FL_KEEP_SIZE_))
		return -EOPNOTSUPP;
	if (!len || in->offset > INT64_MAX || len > INT64_MAX)
		return -EINVAL;
	if (in->offset >= size || len > size - in->offset) {
		if (!(in->mode & FALLOC_FL_KEEP_SIZE_))
			return -ENOSPC;
		if (in->offset >= size)
			return 0;
		len = size - in->offset;
	}
	ret = co_volume_zero(r->e->v, in->offset, len, what == FALLOC_FL_PUNCH_HOLE_ ? DISK_UNMAP | DISK_FAST : 0);
	if (!ret)
		changed(r->e);
	return ret == -ENOTSUP ? -EOPNOTSUPP : ret;
}

/* Data where it is not certain that there is none, so a walk that gets long may end early: as data, or for a hole with the one behind the end. */
static co_fn int co_lseek(struct fuse_request *r)
{
	const struct fuse_lseek_in *in = args(r);
	struct volume *v = r->e->v;
	uint64_t off = in->offset;
	bool hole = in->whence == SEEK_HOLE;

	if (in->whence != SEEK_DATA && !hole)
		return -EINVAL;
	if (off >= v->disk->size)
		return -ENXIO;
	for (unsigned n = 0; off < v->disk->size; n++) {
		struct disk_extent x;
		int ret = co_volume_extent(v, off, v->disk->size - off, &x);

		if (ret < 0)
			return ret;
		if (x.zero == hole || (n >= LOOKUPS_MAX && !hole))
			break;
		off = n >= LOOKUPS_MAX ? v->disk->size : off + x.len;
		if (n % LOOKUPS_TURN == LOOKUPS_TURN - 1)
			co_yield();
	}
	if (off >= v->disk->size && !hole)
		return -ENXIO;
	r->reply.lseek = (struct fuse_lseek_out){ .offset = min(off, v->disk->size) };
	return sizeof(r->reply.lseek);
}

/* --- Which is which --- */

/* What is not here is ENOSYS; the kernel then asks no more for it where it can do without (access, xattr, flush at close, interrupt, poll, bmap). */
static const struct op {
	uint16_t args;		/* bytes that must be there */
	bool early;		/* before INIT, too */
	int (*co_run)(struct fuse_request *r); /* the length of the answer, or -errno */
} ops[] = {
	[FUSE_GETATTR] = { 0, false, co_getattr },
	[FUSE_SETATTR] = { sizeof(struct fuse_setattr_in), false, co_setattr },
	[FUSE_OPEN] = { sizeof(struct fuse_open_in), false, co_open },
	[FUSE_READ] = { sizeof(struct fuse_read_in), false, co_read },
	[FUSE_WRITE] = { sizeof(struct fuse_write_in), false, co_write },
	[FUSE_STATFS] = { 0, false, co_statfs },
	[FUSE_RELEASE] = { 0, false, co_release },
	[FUSE_FSYNC] = { 0, false, co_fsync },
	[FUSE_INIT] = { 16, true, co_init },
	[FUSE_DESTROY] = { 0, true, co_nothing },
	[FUSE_FALLOCATE] = { sizeof(struct fuse_fallocate_in), false, co_fallocate },
	[FUSE_LSEEK] = { sizeof(struct fuse_lseek_in), false, co_lseek },
};

/*
 * The errors that a file can have. The kernel takes ENOSYS for "never ask again, and call it done", for fsync as well; and an answer with an error beyond ERRNO_MAX it
 * does not take at all, so that who asked would wait for ever.
 */
static int to_file_error(int ret)
{
	return ret == -ENOSYS || ret == -ESHUTDOWN || ret == -ECANCELED || ret < -ERRNO_MAX ? -EIO : ret;
}

static co_fn int co_carry_out(struct fuse_request *r)
{
	const struct op *op = r->in.opcode < ARRAY_SIZE(ops) ? &ops[r->in.opcode] : NULL;

	if (r->in.len != r->len)
		return -EINVAL;
	if (!op || !op->co_run)
		return r->in.opcode == FUSE_LOOKUP ? -ENOTDIR : -ENOSYS;
	if (r->len - sizeof(r->in) < op->args)
		return -EINVAL;
	if (!r->e->initialised && !op->early)
		return -EPROTO;
	return to_file_error(op->co_run(r));
}

/* Nobody waits for these. */
static bool is_silent(const struct fuse_request *r)
{
	return r->in.opcode == FUSE_FORGET || r->in.opcode == FUSE_BATCH_FORGET || !r->in.unique;
}

/* An answer that is not wanted any more (ENOENT), or by nobody (the end), is none of ours to report. */
static void send_answer(struct fuse_request *r, int ret)
{
	struct iovec iov[2] = { { &r->out, sizeof(r->out) }, { &r->reply, 0 } };
	ssize_t sent;

	if (ret > 0) {
		iov[1].iov_len = (size_t)ret;
		if (r->in.opcode == FUSE_READ)
			iov[1].iov_base = r->data;
	}
	r->out = (struct fuse_out_header){ .len = (uint32_t)(sizeof(r->out) + iov[1].iov_len), .error = ret < 0 ? ret : 0, .unique = r->in.unique };
	do
		sent = writev(r->e->mount.fd, iov, iov[1].iov_len ? 2 : 1);
	while (sent < 0 && errno == EINTR);
	if (sent < 0 && errno != ENOENT && errno != ENODEV && errno != EPIPE)
		log_debug("%s: an answer of %u bytes was not taken: %s", r->e->config.path, r->out.len, strerror(errno));
}

co_fn void co_fuse_request_main(void *arg)
{
	struct fuse_request *r = arg;
	int ret = is_silent(r) ? 0 : co_carry_out(r);

	r->e->requests++;
	r->e->errors += ret < 0 && ret != -ENOSYS;
	if (!is_silent(r))
		send_answer(r, ret);
	fuse_request_put(r);
}
