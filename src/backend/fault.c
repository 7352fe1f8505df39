/* SPDX-License-Identifier: MIT */
/*
 * fault:OPTS:DISK — fails, stalls, tears or corrupts chosen requests of a disk.
 *
 * Which requests: op=read|write|flush|discard|zero|extent (else any), off=,len= (those that touch the range), nth=N (the N-th of them),
 * after=N (from the N-th on), prob=P,seed=N (each with probability P), once=on (no more than one).
 * What happens: stall=DURATION first; tear=on writes a random part of the sectors; corrupt=on flips bits in what was read; error=NAME is
 * returned (EIO if nothing else is chosen or with tear; error=none does not fail).
 *
 * Several faults are several wrappers around each other. The power-cut simulator of fault.h is in powercut.c.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "backend/drivers.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/iov.h"
#include "util/opts.h"
#include "util/rng.h"

#define SECTOR 512u
#define ANY_OP DISK_OPS

struct fault {
	struct disk disk;
	/* which */
	int op;
	uint64_t off, len;	/* len 0: everywhere */
	uint64_t nth, after;	/* 0: not given */
	double prob;		/* above 1: not given */
	bool once;
	/* what */
	int error;		/* 0: none */
	uint64_t stall_ns;
	bool tear, corrupt;

	struct rng rng;
	uint64_t matched, injected;
};

static struct fault *to_fault(struct disk *d)
{
	return container_of(d, struct fault, disk);
}

static bool is_chosen(struct fault *f, enum disk_op op, uint64_t off, uint64_t len)
{
	if (f->op != ANY_OP && f->op != (int)op)
		return false;
	if (f->len && (off >= f->off + f->len || f->off >= off + len))
		return false;
	if (f->once && f->injected)
		return false;
	f->matched++;
	if (f->nth && f->matched != f->nth)
		return false;
	if (f->after && f->matched < f->after)
		return false;
	return f->prob > 1 || (double)(rng_u64(&f->rng) >> 11) * 0x1p-53 < f->prob;
}

/* Decides about a request. True: *ret is its result, instead of the disk's. */
static co_fn bool co_inject(struct fault *f, bool chosen, int *ret)
{
	if (!chosen)
		return false;
	f->injected++;
	if (f->stall_ns)
		co_sleep_ns(f->stall_ns);
	*ret = -f->error;
	return f->error != 0;
}

static void flip_bits(struct fault *f, uint64_t len, const struct iovec *iov, int niov)
{
	for (uint64_t at = rng_below(&f->rng, min(len, (uint64_t)SECTOR)); at < len; at += 1 + rng_below(&f->rng, 8 * SECTOR)) {
		uint8_t byte;

		iov_copy_out(iov, niov, at, &byte, 1);
		byte ^= 1u << rng_below(&f->rng, 8);
		iov_copy_in(iov, niov, at, &byte, 1);
	}
}

static co_fn int fault_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct fault *f = to_fault(d);
	bool chosen = is_chosen(f, DISK_OP_READ, off, len);
	int ret;

	if (co_inject(f, chosen, &ret))
		return ret;
	ret = co_disk_readv(d->file, off, iov, niov, flags);
	if (!ret && chosen && f->corrupt)
		flip_bits(f, len, iov, niov);
	return ret;
}

/* Each sector with one chance in two. */
static co_fn void co_write_torn(struct fault *f, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	char buf[SECTOR];
	uint64_t n;

	for (uint64_t done = 0; done < len; done += n) {
		n = min(len - done, SECTOR - (off + done) % SECTOR);
		if (rng_below(&f->rng, 2))
			continue;
		iov_copy_out(iov, niov, done, buf, n);
		if (co_disk_write(f->disk.file, off + done, buf, n, flags & DISK_BACKGROUND))
			return;
	}
}

static co_fn int fault_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct fault *f = to_fault(d);
	bool chosen = is_chosen(f, DISK_OP_WRITE, off, len);
	int ret;

	if (co_inject(f, chosen, &ret)) {
		if (f->tear)
			co_write_torn(f, off, len, iov, niov, flags);
		return ret;
	}
	return co_disk_writev(d->file, off, iov, niov, flags);
}

static co_fn int fault_co_flush(struct disk *d)
{
	struct fault *f = to_fault(d);
	int ret;

	/* A flush touches everything. */
	return co_inject(f, is_chosen(f, DISK_OP_FLUSH, 0, UINT64_MAX), &ret) ? ret : co_disk_flush(d->file);
}

static co_fn int fault_co_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct fault *f = to_fault(d);
	int ret;

	return co_inject(f, is_chosen(f, DISK_OP_DISCARD, off, len), &ret) ? ret : co_disk_discard(d->file, off, len, flags);
}

static co_fn int fault_co_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct fault *f = to_fault(d);
	int ret;

	return co_inject(f, is_chosen(f, DISK_OP_ZERO, off, len), &ret) ? ret : co_disk_zero(d->file, off, len, flags);
}

static co_fn int fault_co_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret_extent)
{
	struct fault *f = to_fault(d);
	int ret;

	return co_inject(f, is_chosen(f, DISK_OP_EXTENT, off, len), &ret) ? ret : co_disk_extent(d->file, off, len, ret_extent);
}

static void fault_status(struct disk *d, void *obj)
{
	struct fault *f = to_fault(d);

	json_object_set_new(obj, "fault", json_pack("{sI sI}", "matched", (json_int_t)f->matched, "injected", (json_int_t)f->injected));
}

static const struct disk_ops fault_ops = {
	.driver = "fault",
	.co_read = fault_co_read,
	.co_write = fault_co_write,
	.co_flush = fault_co_flush,
	.co_discard = fault_co_discard,
	.co_zero = fault_co_zero,
	.co_extent = fault_co_extent,
	.status = fault_status,
};

static const char *const op_names[] = { "read", "write", "flush", "discard", "zero", "extent", "any", NULL };
static const char *const error_names[] = { "none", "EIO", "ENOSPC", "EROFS", "EINVAL", "ENOTSUP", "ESHUTDOWN", "ETIMEDOUT", "ENOMEM", NULL };
static const int errors[] = { 0, EIO, ENOSPC, EROFS, EINVAL, ENOTSUP, ESHUTDOWN, ETIMEDOUT, ENOMEM };

static int parse_which(struct fault *f, struct opts *o, struct err *err)
{
	const char *prob = opts_str(o, "prob");
	uint64_t seed = 1;
	char *end;
	int r;

	if (prob) {
		f->prob = strtod(prob, &end);
		if (end == prob || *end || !(f->prob >= 0 && f->prob <= 1))
			return err_set(err, -EINVAL, "prob=%.40s: must be a number from 0 to 1", prob);
	}
	r = opts_enum(o, "op", op_names, &f->op, err);
	if (!r)
		r = opts_size(o, "off", &f->off, err);
	if (!r && opts_str(o, "off"))
		f->len = INT64_MAX;
	if (!r)
		r = opts_size(o, "len", &f->len, err);
	if (!r)
		r = opts_u64(o, "nth", 1, UINT64_MAX, &f->nth, err);
	if (!r)
		r = opts_u64(o, "after", 1, UINT64_MAX, &f->after, err);
	if (!r)
		r = opts_u64(o, "seed", 0, UINT64_MAX, &seed, err);
	if (!r)
		r = opts_bool(o, "once", &f->once, err);
	rng_seed(&f->rng, seed);
	return r;
}

static int parse_what(struct fault *f, struct opts *o, struct err *err)
{
	int r, error;

	r = opts_duration(o, "stall", &f->stall_ns, err);
	if (!r)
		r = opts_bool(o, "tear", &f->tear, err);
	if (!r)
		r = opts_bool(o, "corrupt", &f->corrupt, err);
	error = f->tear || !(f->stall_ns || f->corrupt) ? 1 : 0;
	if (!r)
		r = opts_enum(o, "error", error_names, &error, err);
	if (!r && f->tear && !error)
		r = err_set(err, -EINVAL, "tear=on: a torn write must fail; leave error=none out");
	if (!r)
		f->error = errors[error];
	return r;
}

static co_fn int fault_co_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	struct fault *f = calloc(1, sizeof(*f));
	struct disk *file = NULL;
	int r;

	if (!f)
		return err_errno(err, -ENOMEM, "%.200s", spec->text);
	f->op = ANY_OP;
	f->prob = 2;
	r = parse_which(f, &spec->opts, err);
	if (!r)
		r = parse_what(f, &spec->opts, err);
	if (r) {
		err_prefix(err, "%.200s", spec->text);
	} else {
		r = co_disk_open_spec(spec->inner, flags, &file, err);
		if (!r && disk_init(&f->disk, &fault_ops, spec->text, file))
			r = err_errno(err, -ENOMEM, "%.200s", spec->text);
	}
	if (r) {
		co_disk_close(file);
		free(f);
		return r;
	}
	/* The disk below cuts and aligns; a request counts once. */
	/* What is aligned there goes in pieces, and what is torn as well. */
	f->disk.limits.atomic_write = f->disk.limits.align == 1 && !f->tear ? f->disk.limits.atomic_write : 0;
	f->disk.limits.align = f->disk.limits.mem_align = 1;
	f->disk.limits.max_io = 0;
	f->disk.limits.max_zero = 0;
	/* So that a flush can fail though the disk below needs none. */
	f->disk.limits.volatile_cache = true;
	*ret = &f->disk;
	return 0;
}

const struct disk_driver fault_driver = {
	.name = "fault",
	.options = "op,off,len,nth,after,prob,seed,once,error,stall,tear,corrupt",
	.wraps = true,
	.co_open = fault_co_open,
};
