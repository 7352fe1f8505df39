/* SPDX-License-Identifier: MIT */
/*
 * Write log: the log device, one or a mirror of two.
 *
 * Invariants
 *  (1) a write that returned 0 is durable on every side that the newest superblock calls in sync;
 *  (2) a side that missed a write is called out by a durable superblock of the others before that write returns;
 *  (3) the last side in sync is never dropped: its error is the log's.
 */
#include <errno.h>
#include <string.h>

#include "wlog/internal.h"

void wl_drop_side(struct wlog *w, unsigned i, int error)
{
	struct wl_dev *d = &w->dev;

	d->errors++;
	d->error[i] = error;
	if (d->in_sync[i] && error == -ETIMEDOUT)
		log_error("%s: write log device does not answer; the log goes on without its mirror: replace it and run `weir log rebuild`",
			  d->disk[i]->name);
	else if (d->in_sync[i])
		log_error("%s: write log device failed (%s); the log goes on without its mirror: replace it and run "
			  "`weir log rebuild`", d->disk[i]->name, strerror(-error));
	if (d->in_sync[i])
		wl_want_marks(w);
	d->in_sync[i] = false;
	d->rebuilding = false;
}

void wl_fail(struct wlog *w, int error, const char *what)
{
	if (!w->failed) {
		w->failed = -EIO;
		w->dev.errors++;
		log_error("write log: %s could not be written (%s): writes fail from now on; what was flushed before is in "
			  "the log or the image", what, strerror(-error));
	}
	co_queue_wake_all(&w->commit_done);
	co_queue_wake_all(&w->commit_wake);
	wl_wake_space(w);
	list_for_each(&w->volumes, n)
		wl_destage_kick(container_of(n, struct wlog_volume, node));
	wl_kick_ticker(w);
}

/* One write to all sides, under dev.lock. */
static co_fn int co_write_all(struct wlog *w, uint64_t pos, const void *buf, uint64_t len, bool *ret_dropped)
{
	struct wl_dev *d = &w->dev;
	int result[WLOG_MAX_DEVICES] = { -ENODEV, -ENODEV }, first_error = -EIO;
	unsigned sides = 0;

	*ret_dropped = false;
	if (d->n == 1)
		return co_disk_write(d->disk[0], pos, buf, len, DISK_FUA);

	for (unsigned i = 0; i < d->n; i++) {
		if (!d->disk[i] || !(d->in_sync[i] || d->rebuilding))
			continue;
		co_wl_side_start(d->side[i], pos, buf, len, DISK_FUA);
		sides |= 1u << i;
	}
	co_wl_sides_wait(w, sides, result);

	unsigned good = 0;
	for (unsigned i = 0; i < d->n; i++) {
		good += d->in_sync[i] && result[i] == 0;
		if (d->in_sync[i] && result[i] < 0)
			first_error = result[i];
	}
	if (!good)
		return first_error;
	for (unsigned i = 0; i < d->n; i++) {
		if (sides >> i & 1 && result[i] < 0 && (d->in_sync[i] || d->rebuilding)) {
			*ret_dropped |= d->in_sync[i];
			wl_drop_side(w, i, result[i]);
		}
	}
	return 0;
}

co_fn int co_wl_dev_write(struct wlog *w, uint64_t pos, const void *buf, uint64_t len)
{
	bool dropped;

	if (w->config.read_only)
		return -EROFS;
	co_mutex_lock(&w->dev.lock);
	w->dev.write_since = rt_now_ns();
	int r = co_write_all(w, pos, buf, len, &dropped);
	if (r == 0 && dropped) {
		/* Invariant (2) */
		r = co_wl_super_write(w);
	}
	w->dev.write_since = 0;
	co_mutex_unlock(&w->dev.lock);
	return r;
}

static co_fn int co_read_side(struct wlog *w, unsigned side, uint64_t pos, uint8_t **buf, uint64_t cap, uint64_t len)
{
	struct wl_dev *d = &w->dev;

	if (!d->disk[side])
		return -EIO;
	return d->side[side] ? co_wl_side_read(d->side[side], pos, buf, cap, len) :
			       co_disk_read(d->disk[side], pos, *buf, len, DISK_BACKGROUND);
}

co_fn int co_wl_dev_read(struct wlog *w, int side, uint64_t pos, uint8_t **buf, uint64_t cap, uint64_t len)
{
	unsigned tried = 0;
	int r = -EIO, one;

	if (side >= 0)
		return co_read_side(w, side, pos, buf, cap, len);
	while (r < 0 && (one = co_wl_pick_side(w, tried)) >= 0) {
		r = co_read_side(w, one, pos, buf, cap, len);
		if (r != -ETIMEDOUT)	/* one that hangs is asked again when it has answered */
			tried |= 1u << one;
	}
	return r;
}
