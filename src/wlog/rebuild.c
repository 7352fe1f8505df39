/* SPDX-License-Identifier: MIT */
/*
 * Write log: bringing a side of the mirror back, or giving a log that has one device a second one.
 *
 * From the moment the side is taken in, every new batch and superblock goes to it, too; meanwhile what lies between tail and head is
 * copied piece by piece under the device lock, so that a copy never meets a write. Only when all is copied does a superblock call the side in
 * sync; a crash before that leaves it out, and without a superblock of its own.
 */
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "wlog/internal.h"

static int pick_side(struct wlog *w, struct disk *dev, struct err *err)
{
	struct wl_dev *d = &w->dev;

	if (d->rebuilding)
		return err_set(err, -EBUSY, "write log: a side is being rebuilt already");
	for (unsigned i = 0; i < d->n; i++) {
		if (!d->disk[i] || !d->in_sync[i])
			return dev || d->disk[i] ? (int)i : err_set(err, -EINVAL, "write log: the missing side needs a device");
	}
	if (d->n == WLOG_MAX_DEVICES)
		return err_set(err, -EINVAL, "write log: both sides of the mirror are in sync; nothing is to be rebuilt");
	return dev ? (int)d->n : err_set(err, -EINVAL, "write log: a second side needs a device");
}

/* No superblock on the new side may look valid before it is. */
static co_fn int co_wipe_superblocks(struct wlog *w, struct disk *d)
{
	memset(w->sb_buf, 0, WL_SB_SLOT);
	for (unsigned i = 0; i < WL_SB_SLOTS; i++) {
		int r = co_disk_write(d, i * WL_SB_SLOT, w->sb_buf, WL_SB_SLOT, DISK_FUA);
		if (r < 0)
			return r;
	}
	return 0;
}

static co_fn int co_copy_piece(struct wlog *w, unsigned side, uint64_t pos, uint64_t len, uint8_t *buf)
{
	int r = -EIO;

	co_mutex_lock(&w->dev.lock);
	if (w->dev.rebuilding)
		r = co_wl_dev_read(w, -1, pos, buf, len);
	if (r == 0)
		r = co_disk_write(w->dev.disk[side], pos, buf, len, DISK_FUA | DISK_BACKGROUND);
	co_mutex_unlock(&w->dev.lock);
	return r;
}

/*
 * A side that comes back may hold batches at the heads of segments that are free, which the other side has given up since: see co_scrub_given_up(). The
 * segments from the n-th behind `seg` on were free when the rebuild began; those that the head has reached meanwhile were written anew.
 */
static co_fn int co_wipe_free(struct wlog *w, unsigned side, uint32_t seg, uint32_t n)
{
	static const uint8_t zero[WL_BLOCK];
	uint32_t count = w->sb.seg_count;
	int r = 0;

	for (uint32_t i = n; i < count && r == 0 && !w->stop; i++) {
		uint32_t s = (seg + i) % count;

		co_mutex_lock(&w->dev.lock);
		bool is_free = (s + count - w->head_seg - 1) % count < wl_free_segments(w);
		if (!w->dev.rebuilding)
			r = -EIO;
		else if (is_free)
			r = co_disk_write(w->dev.disk[side], wl_segment_pos(w, s), zero, WL_BLOCK, DISK_BACKGROUND);
		co_mutex_unlock(&w->dev.lock);
	}
	return r == 0 ? co_disk_flush(w->dev.disk[side]) : r;
}

static co_fn int co_copy_live(struct wlog *w, unsigned side)
{
	uint32_t seg = w->durable_tail_seg, n = w->sb.seg_count - wl_free_segments(w);
	uint64_t piece = min((uint64_t)w->sb.seg_size, (uint64_t)WL_MAX_BATCH);
	uint8_t *buf = co_buf_get(rt_bufs(), piece);
	int r = 0;

	w->rebuild_total = (uint64_t)n * w->sb.seg_size;
	w->rebuild_done = 0;
	for (uint32_t i = 0; i < n && r == 0; i++) {
		uint64_t pos = wl_segment_pos(w, (seg + i) % w->sb.seg_count);

		for (uint64_t at = 0; at < w->sb.seg_size && r == 0; at += piece) {
			r = w->stop ? -ECANCELED : co_copy_piece(w, side, pos + at, piece, buf);
			w->rebuild_done += piece;
		}
	}
	rt_buf_put(rt_bufs(), buf);
	return r == 0 ? co_wipe_free(w, side, seg, n) : r;
}

static co_fn void co_rebuilder(void *arg)
{
	struct wlog *w = arg;
	unsigned side = w->rebuild_side;
	int r = co_copy_live(w, side);

	co_mutex_lock(&w->dev.lock);
	if (r == 0 && w->dev.rebuilding) {
		w->dev.rebuilding = false;
		w->dev.in_sync[side] = true;
		r = co_wl_super_write(w);
		if (r == 0 && w->dev.in_sync[side])
			log_info("%s: the write log's mirror is complete again", w->dev.disk[side]->name);
	} else {
		log_error("%s: the write log's mirror could not be rebuilt (%s)", w->dev.disk[side]->name, strerror(r ? -r : EIO));
	}
	w->dev.rebuilding = false;
	w->rebuild_running = false;
	co_mutex_unlock(&w->dev.lock);
	co_queue_wake_all(&w->commit_done);
}

/* Takes `dev` (NULL: what is there) in as the side that gets all new writes; under dev.lock. On failure all is as before. */
static co_fn int co_take_in(struct wlog *w, unsigned side, struct disk *dev)
{
	struct wl_dev *d = &w->dev;
	struct disk *old = d->disk[side];
	int r = co_wipe_superblocks(w, dev ? dev : old);

	if (r < 0)
		return r;
	if (dev)
		d->disk[side] = dev;
	d->n = max(d->n, side + 1);
	d->in_sync[side] = false;
	d->error[side] = 0;
	d->rebuilding = true;
	uuid_random(&w->sb.side_uuid[side]);
	w->sb.nsides = d->n;
	w->rebuild_side = side;
	w->rebuild_running = true;
	r = co_wl_super_write(w);
	if (r == 0)
		r = co_spawn("log rebuild", co_rebuilder, w);
	if (r < 0) {
		d->rebuilding = w->rebuild_running = false;
		d->disk[side] = old;
	}
	return r;
}

co_fn int co_wlog_rebuild(struct wlog *w, struct disk *dev, struct err *err)
{
	struct wl_dev *d = &w->dev;
	struct disk *old = NULL;

	if (w->config.read_only)
		return err_set(err, -EROFS, "write log: is open read-only");
	if (dev && dev->size < w->sb.dev_size)
		return err_set(err, -ENOSPC, "%s: has %llu bytes; this write log needs %llu", dev->name, (unsigned long long)dev->size,
			       (unsigned long long)w->sb.dev_size);
	co_mutex_lock(&d->lock);
	int side = w->failed || w->stop ? err_set(err, -EIO, "write log: has failed; nothing can be rebuilt from it") : pick_side(w, dev, err);
	int r = side;

	if (side >= 0) {
		old = dev && (unsigned)side < d->n ? d->disk[side] : NULL;
		r = co_take_in(w, side, dev);
		if (r < 0)
			err_errno(err, r, "%s: cannot be taken into the write log's mirror", dev ? dev->name : d->disk[side]->name);
	}
	co_mutex_unlock(&d->lock);
	if (r < 0 || !old)
		return r < 0 ? r : 0;
	/* Nobody asks it any more; what was asked before may take its time, or hang. */
	disk_cancel(old);
	while (old->in_flight)
		co_sleep_ns(1000000);
	co_disk_close(old);
	return 0;
}
