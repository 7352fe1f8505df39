/* SPDX-License-Identifier: MIT */
/*
 * Write log: the disk layer that a volume's exports use.
 *
 * Byte granular: records hold any offset and length, so a guest's sector is never read, modified and written above the log, and no
 * write is torn whatever its size and alignment (atomic_unit says so). The image's own alignment is dealt with at destage.
 *
 * A foreseen flush. A database or a journal that writes n times, flushes, and does so again and again, one request at a time, waits for its flush from the
 * moment when the last of the n writes is acknowledged. Once HABIT_RUNS flushes in a row had the same n before them, the commit begins behind the n-th write
 * instead of at the flush, which then finds it under way: a round trip to the client and back is no longer part of it. It is the same one
 * device write; only a habit that ends costs one commit more, and must be learnt again. Never while another request of the volume is in flight or a
 * batch is being written: there the group commit does better.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "util/bytes.h"
#include "wlog/internal.h"

#define HABIT_RUNS 4u

static struct wlog_volume *volume_of(struct disk *d)
{
	return container_of(d, struct wlog_volume, disk);
}

static co_fn int co_layer_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct wlog_volume *v = volume_of(d);

	v->last_io_ns = rt_now_ns();
	return co_wl_read(v, off, len, iov, niov, flags);
}

/* Contract 8: until the guest's first flush it may not know that there is a cache. */
static bool is_durable_write(const struct wlog_volume *v, unsigned flags)
{
	return (flags & DISK_FUA) || v->config.mode == WLOG_MODE_WRITE || !v->flushed_once;
}

/*
 * Behind record `seq` of a volume with a volatile write: begins the commit that the next request is going to ask for. The device has it before the
 * write is acknowledged, or sending that would delay what the client then waits for.
 */
static co_fn void co_foresee_flush(struct wlog_volume *v, uint64_t seq)
{
	struct wlog *w = v->w;

	if (v->habit_runs < HABIT_RUNS || v->unflushed != v->habit || w->commit_next != w->open || w->applied_seq >= seq)
		return;
	w->foreseen++;
	w->want_seq = max(w->want_seq, seq);
	co_queue_wake_one(&w->commit_wake);
	co_yield();
	rt_submit();
}

static void learn_habit(struct wlog_volume *v)
{
	if (v->unflushed == 0)
		return;
	if (v->disk.in_flight > 1 || v->unflushed != v->habit)
		v->habit_runs = 0;
	else if (v->habit_runs < HABIT_RUNS)
		v->habit_runs++;
	v->habit = v->unflushed;
	v->unflushed = 0;
}

static co_fn int co_record(struct disk *d, uint8_t type, uint64_t off, uint64_t len, const struct iovec *iov, int niov,
			   unsigned flags)
{
	struct wlog_volume *v = volume_of(d);
	uint64_t seq;

	v->last_io_ns = rt_now_ns();
	if (v->damaged)
		return -EIO;
	int r = co_wl_append(v, type, off, len, iov, niov, &seq);

	if (r < 0)
		return r;
	v->unflushed += v->unflushed < UINT32_MAX;
	if (is_durable_write(v, flags))
		return co_wl_commit_upto(v->w, seq);
	if (d->in_flight > 1)
		v->habit_runs = 0;
	co_foresee_flush(v, seq);
	return 0;
}

static co_fn int co_layer_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	return co_record(d, WL_WRITE, off, len, iov, niov, flags);
}

static co_fn int co_layer_flush(struct disk *d)
{
	struct wlog_volume *v = volume_of(d);
	struct wl_volrec *rec = &v->w->sb.vol[v->slot];

	v->last_io_ns = rt_now_ns();
	v->flushed_once = true;
	learn_habit(v);
	if (v->w->failed)
		return -EIO;
	rec->epoch++;
	int r = co_wl_commit_upto(v->w, v->last_seq);

	/* What is in the log is safe there, but the guest must not go on as if the image were still its own. */
	return r == 0 && disk_is_fenced(d) ? -ESHUTDOWN : r;
}

/* A discard reads as zeroes from now on, like everything that is recorded. Where the image cannot use it, it is not worth a record. */
static co_fn int co_layer_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	if (d->file->limits.discard_gran == 0)
		return 0;
	return co_record(d, WL_DISCARD, off, len, NULL, 0, flags);
}

static co_fn int co_layer_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_record(d, flags & DISK_UNMAP ? WL_DISCARD : WL_ZERO, off, len, NULL, 0, flags);
}

static co_fn int co_layer_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	struct wlog_volume *v = volume_of(d);
	struct wl_map *maps[2] = { &v->fresh, &v->map };
	uint64_t end = off + len;

	for (unsigned i = 0; i < 2; i++) {
		struct wl_entry *e = wl_map_find(maps[i], off);

		if (e && e->off <= off) {
			*ret = (struct disk_extent){ .len = min(end, e->off + e->len) - off, .zero = wl_is_zeroes(e->type),
						     .hole = e->type == WL_DISCARD };
			return 0;
		}
		if (e)
			end = min(end, e->off);
	}
	return co_disk_extent(d->file, off, end - off, ret);
}

/* With the gate closed: nothing is in flight above. */
static co_fn int co_layer_resize(struct disk *d, uint64_t size)
{
	struct wlog_volume *v = volume_of(d);
	struct wl_volrec *rec = &v->w->sb.vol[v->slot];

	/* Records of the old size must not outlive it: the floor is durable before it changes. */
	int r = co_wlog_drain_volume(d, NULL);
	if (r == 0)
		r = co_wl_checkpoint(v->w);
	if (r == 0)
		r = co_disk_resize(d->file, size, NULL);
	if (r < 0)
		return r;
	rec->size = d->size = size;
	/* The stamp moved, and nobody else did it. The destager takes it if it cannot be had yet. */
	if (v->has_stamp && co_disk_stamp(d->file, &rec->stamp, &rec->stamp_wall) < 0) {
		v->destaging = true;
		wl_destage_kick(v);
	}
	return co_wl_checkpoint(v->w);
}

static void layer_cancel(struct disk *d)
{
	struct wlog_volume *v = volume_of(d);

	v->cancelled = true;
	wl_wake_space(v->w);
	disk_cancel(d->file);
}

static void layer_status(struct disk *d, void *obj)
{
	struct wlog_volume *v = volume_of(d);

	json_object_set_new(obj, "logmode", json_string(v->config.mode == WLOG_MODE_WRITE || !v->flushed_once ? "write" : "flush"));
	json_object_set_new(obj, "destage", json_string(v->config.destage == WLOG_DESTAGE_ORDERED ? "ordered" : "merged"));
	json_object_set_new(obj, "dirty_bytes", json_integer(wl_dirty_bytes(v)));
	json_object_set_new(obj, "epochs_joined", json_integer((json_int_t)v->joined));
	json_object_set_new(obj, "stalled", json_boolean(v->stalled));
	json_object_set_new(obj, "damaged", json_boolean(v->damaged));
}

static co_fn void co_layer_close(struct disk *d);

const struct disk_ops wl_volume_ops = {
	.driver = "log",
	.co_read = co_layer_read,
	.co_write = co_layer_write,
	.co_flush = co_layer_flush,
	.co_discard = co_layer_discard,
	.co_zero = co_layer_zero,
	.co_extent = co_layer_extent,
	.co_resize = co_layer_resize,
	.cancel = layer_cancel,
	.co_close = co_layer_close,
	.status = layer_status,
};

struct wlog_volume *wl_volume_new(struct wlog *w, unsigned slot)
{
	struct wlog_volume *v = calloc(1, sizeof(*v));

	if (!v)
		return NULL;
	v->w = w;
	v->slot = slot;
	wl_map_init(&v->map);
	wl_map_init(&v->fresh);
	wl_map_init(&v->round);
	list_init(&v->fifo);
	co_mutex_init(&v->admit_lock);
	co_queue_init(&v->room);
	co_queue_init(&v->destage_wake);
	co_queue_init(&v->destage_done);
	co_queue_init(&v->mark_wake);
	co_queue_init(&v->run_done);
	list_add_tail(&w->volumes, &v->node);
	w->by_slot[slot] = v;
	return v;
}

/*
 * Commits, stops the destager, and leaves the volume known to the log: clean, with no mark on the image, or dirty, with the image's
 * stamp on record. The volume's structure stays until the log is closed.
 */
static co_fn void co_layer_close(struct disk *d)
{
	struct wlog_volume *v = volume_of(d);
	struct wlog *w = v->w;
	struct disk *image = d->file;

	co_wl_commit_upto(w, v->last_seq);
	co_wl_stop_volume(v);
	/* Nobody attaches it again before its layer is gone. */
	co_mutex_lock(&w->attach_lock);
	/* A copy that was appended before its original was in the image makes the volume dirty once more. */
	co_wl_commit_upto(w, v->last_seq);
	bool clean = v->map.entries == 0 && v->fresh.entries == 0 && !w->failed;

	v->attached = false;
	w->sb.vol[v->slot].flags = wl_volume_flags(v);
	int r;
	do {
		/* A side was lost, and the image does not know it: the mark that is written now tells it. */
		if (wl_mark_is_wanted(v))
			w->sb.vol[v->slot].generation++;
		v->mark_has = v->mark_wanted;
		r = co_wl_checkpoint(w);
	} while (r == 0 && wl_mark_is_wanted(v));
	if (r == 0 && clean && v->has_mark)
		co_disk_mark_set(image, "", NULL);
	else if (r == 0 && !clean)
		co_wl_leave_dirty(v);
	wl_runs_fini(v);
	/* The layer is done with; what the log knows of the volume lives on. */
	disk_fini(d);
	memset(d, 0, sizeof(*d));
	co_mutex_unlock(&w->attach_lock);
	co_disk_close(image);
}
