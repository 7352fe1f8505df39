/* SPDX-License-Identifier: MIT */
/*
 * Write log: bringing a side of the mirror back, or giving a log that has one device a second one.
 *
 * From the moment the side is taken in, every new batch and superblock goes to it, too; meanwhile what lies between tail and head is
 * copied piece by piece under the device lock, so that a copy never meets a write. Only when all is copied does a superblock call the side in
 * sync; a crash before that leaves it out, and without a superblock of its own.
 *
 * A new side that hangs fails the rebuild, as one whose writes fail does. The log's own writes wait for it no longer than for any side.
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
		if (d->disk[i] && !d->in_sync[i] && wl_side_owes(d->side[i]) && (!dev || !strcmp(dev->name, d->disk[i]->name)))
			return err_set(err, -EBUSY, "%s: has not answered yet to what it was asked before it was given up; wait until it has (`status` "
				       "says \"hanging\"), or name another device", d->disk[i]->name);
		if (!d->disk[i] || !d->in_sync[i])
			return dev || d->disk[i] ? (int)i : err_set(err, -EINVAL, "write log: the missing side needs a device");
	}
	if (d->n == WLOG_MAX_DEVICES)
		return err_set(err, -EINVAL, "write log: both sides of the mirror are in sync; nothing is to be rebuilt");
	return dev ? (int)d->n : err_set(err, -EINVAL, "write log: a second side needs a device");
}

/* No superblock on the new side may look valid before it is. */
static co_fn int co_wipe_superblocks(struct wlog *w, struct wl_side *side)
{
	memset(wl_side_buf(side), 0, WL_SB_SLOT);
	for (unsigned i = 0; i < WL_SB_SLOTS; i++) {
		int r = co_wl_side_write(side, i * WL_SB_SLOT, NULL, WL_SB_SLOT, DISK_FUA);
		if (r < 0)
			return r;
	}
	return 0;
}

static int stopped(const struct wlog *w)
{
	return w->stop || w->rebuild_cancel ? -ECANCELED : 0;
}

static co_fn int co_copy_piece(struct wlog *w, unsigned side, uint64_t pos, uint64_t len, uint8_t **buf)
{
	int r = -EIO;

	co_mutex_lock(&w->dev.lock);
	if (w->dev.rebuilding)
		r = co_wl_dev_read(w, -1, pos, buf, len, len);
	if (r == 0)
		r = co_wl_side_write(w->dev.side[side], pos, *buf, len, DISK_FUA | DISK_BACKGROUND);
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

	for (uint32_t i = n; i < count && r == 0; i++) {
		uint32_t s = (seg + i) % count;

		co_mutex_lock(&w->dev.lock);
		bool is_free = (s + count - w->head_seg - 1) % count < wl_free_segments(w);
		r = w->dev.rebuilding ? stopped(w) : -EIO;
		if (r < 0)
			;
		else if (is_free)
			r = co_wl_side_write(w->dev.side[side], wl_segment_pos(w, s), zero, WL_BLOCK, DISK_BACKGROUND);
		co_mutex_unlock(&w->dev.lock);
	}
	co_mutex_lock(&w->dev.lock);
	if (r == 0)
		r = w->dev.rebuilding ? co_wl_side_write(w->dev.side[side], 0, NULL, 0, 0) : -EIO;
	co_mutex_unlock(&w->dev.lock);
	return r;
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
			r = stopped(w);
			if (r == 0)
				r = co_copy_piece(w, side, pos + at, piece, &buf);
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
		if (r == 0 && !w->dev.in_sync[side])
			r = -EIO;
		if (r == 0)
			log_info("%s: the write log's mirror is complete again", w->dev.disk[side]->name);
	} else {
		if (w->dev.error[side])	/* of a write of the log that it missed */
			r = w->dev.error[side];
		r = r ? r : -EIO;
		if (r == -ECANCELED)
			log_warn("%s: bringing it into the write log's mirror was stopped; it is not used", w->dev.disk[side]->name);
		else
			log_error("%s: the write log's mirror could not be rebuilt (%s)", w->dev.disk[side]->name, strerror(-r));
	}
	w->rebuild_error = r;
	w->dev.rebuilding = false;
	w->rebuild_running = false;
	co_mutex_unlock(&w->dev.lock);
	co_queue_wake_all(&w->commit_done);
}

/* A log that has no mirror yet asks its one device in the way of a side from now on. */
static int make_sides(struct wlog *w, struct disk *dev, struct wl_side **ret)
{
	struct wl_dev *d = &w->dev;

	if (!d->side[0] && d->disk[0])
		d->side[0] = wl_side_create(w, d->disk[0]);
	*ret = wl_side_create(w, dev);
	return *ret && (d->side[0] || !d->disk[0]) ? 0 : -ENOMEM;
}

/* Makes `new`, whose superblocks are gone, the side that gets all new writes; under dev.lock. On failure all is as before. */
static co_fn int co_take_in(struct wlog *w, unsigned side, struct wl_side *new, struct disk *dev)
{
	struct wl_dev *d = &w->dev;
	struct disk *old = d->disk[side];
	struct wl_side *old_side = d->side[side];

	d->disk[side] = dev;
	d->side[side] = new;
	d->n = max(d->n, side + 1);
	d->in_sync[side] = false;
	d->error[side] = 0;
	d->rebuilding = true;
	uuid_random(&w->sb.side_uuid[side]);
	w->sb.nsides = d->n;
	w->rebuild_side = side;
	w->rebuild_running = true;
	w->rebuild_cancel = false;
	w->rebuild_error = 0;
	w->rebuild_done = w->rebuild_total = 0;
	int r = co_wl_super_write(w);

	if (r == 0)
		r = co_spawn("log rebuild", co_rebuilder, w);
	if (r < 0) {
		d->rebuilding = w->rebuild_running = false;
		d->disk[side] = old;
		d->side[side] = old_side;
	}
	return r;
}

/* Under dev.lock. *ret_old: what has been replaced. */
static co_fn int co_begin(struct wlog *w, struct disk *dev, struct wl_side **ret_old_side, struct disk **ret_old, struct err *err)
{
	struct wl_dev *d = &w->dev;
	struct wl_side *new = NULL;
	int side = w->failed || w->stop ? err_set(err, -EIO, "write log: has failed; nothing can be rebuilt from it") : pick_side(w, dev, err);

	if (side < 0)
		return side;
	struct disk *disk = dev ? dev : d->disk[side];
	struct disk *old = dev && (unsigned)side < d->n ? d->disk[side] : NULL;
	struct wl_side *old_side = d->side[side];
	int r = make_sides(w, disk, &new);

	if (r == 0)
		r = co_wipe_superblocks(w, new);
	if (r == 0)
		r = co_take_in(w, side, new, disk);
	if (r < 0) {
		err_errno(err, r, "%s: cannot be taken into the write log's mirror", disk->name);
		*ret_old_side = new;
		*ret_old = dev;
		/* A side that was there before stays, and is not asked again before it has answered. */
		if (!dev && new) {
			d->side[side] = new;
			wl_side_free(old_side);
		}
		return r;
	}
	*ret_old_side = old ? old_side : NULL;
	*ret_old = old;
	if (!old)
		wl_side_free(old_side);
	return 0;
}

co_fn int co_wlog_rebuild(struct wlog *w, struct disk *dev, struct err *err)
{
	struct wl_dev *d = &w->dev;
	struct wl_side *old_side = NULL;
	struct disk *old = dev;
	int r;

	if (w->config.read_only) {
		r = err_set(err, -EROFS, "write log: is open read-only");
	} else if (dev && dev->size < w->sb.dev_size) {
		r = err_set(err, -ENOSPC, "%s: has %llu bytes; this write log needs %llu", dev->name, (unsigned long long)dev->size,
			    (unsigned long long)w->sb.dev_size);
	} else {
		co_mutex_lock(&d->lock);
		r = co_begin(w, dev, &old_side, &old, err);
		co_mutex_unlock(&d->lock);
	}
	/* Nobody asks it any more; what was asked before may take its time, or hang. */
	if (old)
		co_wl_side_retire(w, old_side, old);
	return r;
}

bool wlog_is_out(const struct wlog *w, const char *device)
{
	bool out = false;

	for (unsigned i = 0; i < w->dev.n; i++)
		out |= w->dev.disk[i] && !w->dev.in_sync[i] && !strcmp(w->dev.disk[i]->name, device);
	return out;
}

co_fn int co_wlog_check_blank(struct disk *dev, struct err *err)
{
	uint64_t len = min(dev->size, WL_FIRST_SEGMENT);
	uint8_t *buf = co_buf_get(rt_bufs(), WL_FIRST_SEGMENT);
	int r = co_disk_read(dev, 0, buf, len, 0);

	if (r < 0)
		err_errno(err, r, "%s: cannot be read", dev->name);
	else if (!bytes_are_zero(buf, len))
		r = err_set(err, -EEXIST, "%s: holds something; --force overwrites it with the other side of the log", dev->name);
	rt_buf_put(rt_bufs(), buf);
	return r;
}

void wlog_rebuild_cancel(struct wlog *w)
{
	w->rebuild_cancel = true;
}
