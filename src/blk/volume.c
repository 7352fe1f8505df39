/* SPDX-License-Identifier: MIT */
/*
 * Volumes: gate, sync mode, latency figures.
 *
 * Invariants
 *  (1) while the gate is closed no new request reaches the disk, and v->in_flight only falls;
 *  (2) requests that waited at the gate go on in the order in which they came;
 *  (3) with VOLUME_SYNC_DISABLED no flush and no FUA reaches the disk; with ALWAYS every change has FUA.
 *
 * Runs on the home reactor of the disk. Every co_volume_*() may suspend at the gate.
 */
#include "blk/volume.h"

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "util/err.h"

static const char *const sync_names[] = { "standard", "always", "disabled" };

static const char *const op_names[DISK_OPS] = {
	[DISK_OP_READ] = "read", [DISK_OP_WRITE] = "write", [DISK_OP_FLUSH] = "flush",
	[DISK_OP_DISCARD] = "discard", [DISK_OP_ZERO] = "zero", [DISK_OP_EXTENT] = "extent",
};

int volume_create(const char *name, struct disk *disk, struct volume **ret, struct err *err)
{
	struct volume *v = calloc(1, sizeof(*v));

	if (!v || !(v->name = strdup(name))) {
		free(v);
		return err_errno(err, -ENOMEM, "volume %.200s", name);
	}
	list_init(&v->node);
	v->disk = disk;
	v->read_only = disk->read_only;
	co_queue_init(&v->gate);
	co_queue_init(&v->idle);
	for (int i = 0; i < DISK_OPS; i++)
		hist_init(&v->latency[i]);
	v->opened_ns = rt_now_ns();
	*ret = v;
	return 0;
}

co_fn void co_volume_destroy(struct volume *v)
{
	if (!v)
		return;
	co_volume_gate_close(v);
	co_disk_close(v->disk);
	free(v->name);
	free(v->description);
	free(v);
}

/*
 * Passes the gate; returns the time for leave(). That of the turn: the requests of one turn came together, and the clock is a tenth of what a request costs that
 * needs no I/O.
 */
static co_fn uint64_t co_enter(struct volume *v)
{
	uint64_t start = rt_now_ns();

	while (__builtin_expect(v->closed, 0))
		co_queue_wait(&v->gate, "gate of the volume");
	v->in_flight++;
	return start;
}

static int leave(struct volume *v, enum disk_op op, uint64_t start, int ret)
{
	if (!ret)
		hist_add(&v->latency[op], rt_now_exact_ns() - start);
	v->in_flight--;
	if (__builtin_expect(v->closed, 0) && !v->in_flight)
		co_queue_wake_all(&v->idle);
	return ret;
}

static inline unsigned sync_flags(const struct volume *v, unsigned flags)
{
	if (v->sync == VOLUME_SYNC_STANDARD)
		return flags;
	return v->sync == VOLUME_SYNC_ALWAYS ? flags | DISK_FUA : flags & ~DISK_FUA;
}

co_fn int co_volume_readv(struct volume *v, uint64_t off, const struct iovec *iov, int niov)
{
	uint64_t start = co_enter(v);

	return leave(v, DISK_OP_READ, start, co_disk_readv(v->disk, off, iov, niov, 0));
}

co_fn int co_volume_writev(struct volume *v, uint64_t off, const struct iovec *iov, int niov, unsigned flags)
{
	uint64_t start = co_enter(v);
	int ret = v->read_only ? -EROFS : co_disk_writev(v->disk, off, iov, niov, sync_flags(v, flags));

	return leave(v, DISK_OP_WRITE, start, ret);
}

co_fn int co_volume_flush(struct volume *v)
{
	uint64_t start = co_enter(v);
	int ret = v->sync == VOLUME_SYNC_DISABLED ? 0 : co_disk_flush(v->disk);

	return leave(v, DISK_OP_FLUSH, start, ret);
}

co_fn int co_volume_discard(struct volume *v, uint64_t off, uint64_t len, unsigned flags)
{
	uint64_t start = co_enter(v);
	int ret = v->read_only ? -EROFS : co_disk_discard(v->disk, off, len, sync_flags(v, flags));

	return leave(v, DISK_OP_DISCARD, start, ret);
}

co_fn int co_volume_zero(struct volume *v, uint64_t off, uint64_t len, unsigned flags)
{
	uint64_t start = co_enter(v);
	int ret = v->read_only ? -EROFS : co_disk_zero(v->disk, off, len, sync_flags(v, flags));

	return leave(v, DISK_OP_ZERO, start, ret);
}

co_fn int co_volume_extent(struct volume *v, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	uint64_t start = co_enter(v);

	return leave(v, DISK_OP_EXTENT, start, co_disk_extent(v->disk, off, len, ret));
}

co_fn int co_volume_prefetch(struct volume *v, uint64_t off, uint64_t len)
{
	int ret;

	(void)co_enter(v);
	ret = co_disk_prefetch(v->disk, off, len);
	v->in_flight--;
	if (v->closed && !v->in_flight)
		co_queue_wake_all(&v->idle);
	return ret;
}

co_fn void co_volume_gate_close(struct volume *v)
{
	/* Another closer has it: wait as a request does. */
	while (v->closed)
		co_queue_wait(&v->gate, "gate of the volume");
	v->closed = true;
	while (v->in_flight)
		co_queue_wait(&v->idle, "requests of the volume");
}

void volume_gate_open(struct volume *v)
{
	assert(v->closed);
	v->closed = false;
	co_queue_wake_all(&v->gate);
}

co_fn int co_volume_resize(struct volume *v, uint64_t size, struct err *err)
{
	int ret;

	if (v->read_only)
		return err_set(err, -EROFS, "%s: is read-only and cannot be resized", v->name);
	co_volume_gate_close(v);
	ret = co_disk_resize(v->disk, size, err);
	volume_gate_open(v);
	if (!ret && v->resized)
		v->resized(v, v->resized_arg);
	return ret;
}

void *volume_status(struct volume *v)
{
	json_t *obj = json_pack("{ss ss? sI sb ss sb sI sI}", "name", v->name, "description", v->description,
				"size", (json_int_t)v->disk->size, "read_only", v->read_only, "sync", sync_names[v->sync],
				"gate_closed", v->closed, "in_flight", (json_int_t)v->in_flight,
				"open_ns", (json_int_t)(rt_now_ns() - v->opened_ns));

	if (!obj)
		obj = json_pack("{sI sb ss}", "size", (json_int_t)v->disk->size, "read_only", v->read_only, "sync", sync_names[v->sync]);
	if (v->sync == VOLUME_SYNC_DISABLED)
		json_object_set_new(obj, "warning", json_string("sync=disabled: flushes are ignored, a crash loses what was acknowledged"));
	json_object_set_new(obj, "disk", disk_status(v->disk));
	return obj;
}

void *volume_stats(struct volume *v)
{
	json_t *obj = json_object();

	for (int i = 0; i < DISK_OPS; i++) {
		const struct hist *h = &v->latency[i];

		json_object_set_new(obj, op_names[i], json_pack("{sI sI sI sI sI sI sI sI sI}",
			"ops", (json_int_t)h->count, "bytes", (json_int_t)v->disk->count.bytes[i],
			"errors", (json_int_t)v->disk->count.errors[i],
			"mean_ns", (json_int_t)(h->count ? h->sum / h->count : 0), "p50_ns", (json_int_t)hist_quantile(h, 500),
			"p99_ns", (json_int_t)hist_quantile(h, 990), "p999_ns", (json_int_t)hist_quantile_10k(h, 9990),
			"p9999_ns", (json_int_t)hist_quantile_10k(h, 9999), "max_ns", (json_int_t)h->max));
	}
	return obj;
}
