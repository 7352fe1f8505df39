/* SPDX-License-Identifier: MIT */
/*
 * delay:OPTS:DISK — makes a disk slow.
 *
 * Options: read, write, flush, discard, zero, fua (durations; fua is what a write with FUA waits, by default write + flush), jitter (up to so
 * much more, at random), parallel (how many requests are served at once; the others queue, first come, first served).
 * A request waits first and goes to the disk then, and holds its place meanwhile.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>

#include "backend/drivers.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/opts.h"

#define FAR_NS 1000000ull	/* from so slow a write on it is one of those disks that need many in flight */
#define FAR_DEPTH 64u

struct delay {
	struct disk disk;
	uint64_t ns[DISK_OPS], fua_ns, jitter_ns;
	bool bounded;
	struct co_sem slots;
};

static struct delay *to_delay(struct disk *d)
{
	return container_of(d, struct delay, disk);
}

static co_fn void co_serve(struct delay *l, uint64_t ns)
{
	if (l->bounded)
		co_sem_take(&l->slots, "delay: a place in the queue of the slow disk");
	if (ns && l->jitter_ns)
		ns += rt_rand64() % (l->jitter_ns + 1);
	if (ns)
		co_sleep_ns(ns);
}

static int served(struct delay *l, int ret)
{
	if (l->bounded)
		co_sem_give(&l->slots);
	return ret;
}

static uint64_t change_ns(const struct delay *l, enum disk_op op, unsigned flags)
{
	return flags & DISK_FUA ? l->ns[op] + l->fua_ns : l->ns[op];
}

static co_fn int delay_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	co_serve(to_delay(d), to_delay(d)->ns[DISK_OP_READ]);
	return served(to_delay(d), co_disk_readv(d->file, off, iov, niov, flags));
}

static co_fn int delay_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	co_serve(to_delay(d), change_ns(to_delay(d), DISK_OP_WRITE, flags));
	return served(to_delay(d), co_disk_writev(d->file, off, iov, niov, flags));
}

static co_fn int delay_co_flush(struct disk *d)
{
	co_serve(to_delay(d), to_delay(d)->ns[DISK_OP_FLUSH]);
	return served(to_delay(d), co_disk_flush(d->file));
}

static co_fn int delay_co_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	co_serve(to_delay(d), change_ns(to_delay(d), DISK_OP_DISCARD, flags));
	return served(to_delay(d), co_disk_discard(d->file, off, len, flags));
}

static co_fn int delay_co_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	co_serve(to_delay(d), change_ns(to_delay(d), DISK_OP_ZERO, flags));
	return served(to_delay(d), co_disk_zero(d->file, off, len, flags));
}

static void delay_status(struct disk *d, void *obj)
{
	struct delay *l = to_delay(d);

	json_object_set_new(obj, "delay_ns", json_pack("{sI sI sI sI sI sI sI}",
		"read", (json_int_t)l->ns[DISK_OP_READ], "write", (json_int_t)l->ns[DISK_OP_WRITE],
		"flush", (json_int_t)l->ns[DISK_OP_FLUSH], "discard", (json_int_t)l->ns[DISK_OP_DISCARD],
		"zero", (json_int_t)l->ns[DISK_OP_ZERO], "fua", (json_int_t)l->fua_ns, "jitter", (json_int_t)l->jitter_ns));
}

static const struct disk_ops delay_ops = {
	.driver = "delay",
	.co_read = delay_co_read,
	.co_write = delay_co_write,
	.co_flush = delay_co_flush,
	.co_discard = delay_co_discard,
	.co_zero = delay_co_zero,
	.status = delay_status,
};

static int parse_options(struct delay *l, struct opts *o, struct err *err)
{
	uint64_t parallel = 0, fua;
	int r = opts_duration(o, "read", &l->ns[DISK_OP_READ], err);

	if (!r)
		r = opts_duration(o, "write", &l->ns[DISK_OP_WRITE], err);
	if (!r)
		r = opts_duration(o, "flush", &l->ns[DISK_OP_FLUSH], err);
	if (!r)
		r = opts_duration(o, "discard", &l->ns[DISK_OP_DISCARD], err);
	if (!r)
		r = opts_duration(o, "zero", &l->ns[DISK_OP_ZERO], err);
	fua = l->ns[DISK_OP_WRITE] + l->ns[DISK_OP_FLUSH];
	if (!r)
		r = opts_duration(o, "fua", &fua, err);
	if (!r)
		r = opts_duration(o, "jitter", &l->jitter_ns, err);
	if (!r)
		r = opts_u64(o, "parallel", 1, 65536, &parallel, err);
	if (r)
		return r;
	/* What FUA costs more than the operation itself. */
	l->fua_ns = fua > l->ns[DISK_OP_WRITE] ? fua - l->ns[DISK_OP_WRITE] : 0;
	l->bounded = parallel != 0;
	co_sem_init(&l->slots, parallel);
	return 0;
}

static co_fn int delay_co_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	struct disk *file = NULL;
	struct delay opt = { 0 }, *l;
	int r = parse_options(&opt, &spec->opts, err);

	if (r)
		return err_prefix(err, "%.200s", spec->text);
	r = co_disk_open_spec(spec->inner, flags, &file, err);
	if (r)
		return r;
	l = calloc(1, sizeof(*l));
	if (!l || (r = disk_init(&l->disk, &delay_ops, spec->text, file))) {
		co_disk_close(file);
		free(l);
		return err_errno(err, -ENOMEM, "%.200s", spec->text);
	}
	for (int i = 0; i < DISK_OPS; i++)
		l->ns[i] = opt.ns[i];
	l->fua_ns = opt.fua_ns;
	l->jitter_ns = opt.jitter_ns;
	l->bounded = opt.bounded;
	co_sem_init(&l->slots, opt.slots.count);
	/* The disk below cuts and aligns. */
	l->disk.limits.atomic_write = l->disk.limits.align == 1 ? l->disk.limits.atomic_write : 0;	/* what is aligned there goes in pieces */
	l->disk.limits.align = l->disk.limits.mem_align = 1;
	l->disk.limits.max_io = 0;
	l->disk.limits.max_zero = 0;
	/* A flush takes its time even where there is nothing volatile. */
	l->disk.limits.volatile_cache = true;
	if (l->ns[DISK_OP_WRITE] >= FAR_NS)
		l->disk.limits.opt_depth = opt.bounded ? min(opt.slots.count, FAR_DEPTH) : FAR_DEPTH;
	*ret = &l->disk;
	return 0;
}

const struct disk_driver delay_driver = {
	.name = "delay",
	.options = "read,write,flush,discard,zero,fua,jitter,parallel",
	.wraps = true,
	.co_open = delay_co_open,
};
