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

struct side_write {
	struct disk *disk;
	uint64_t pos, len;
	const void *buf;
	int result;
};

static co_fn int co_side_write(void *arg)
{
	struct side_write *s = arg;

	s->result = co_disk_write(s->disk, s->pos, s->buf, s->len, DISK_FUA);
	return 0;
}


void wl_drop_side(struct wlog *w, unsigned i, int error)
{
	struct wl_dev *d = &w->dev;

	d->errors++;
	d->error[i] = error;
	if (d->in_sync[i])
		log_error("%s: write log device failed (%s); the log goes on without its mirror: replace it and run "
			  "`weir log rebuild`", d->disk[i]->name, strerror(-error));
	/* The images learn it as soon as their destagers can tell them: see attach.c. */
	list_for_each(&w->volumes, l) {
		struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		v->remark |= d->in_sync[i];
		wl_destage_kick(v);
	}
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
	struct side_write sw[WLOG_MAX_DEVICES];
	struct co_group g;
	int first_error = -EIO;

	*ret_dropped = false;
	if (d->n == 1)
		return co_disk_write(d->disk[0], pos, buf, len, DISK_FUA);

	co_group_init(&g);
	for (unsigned i = 0; i < d->n; i++) {
		sw[i] = (struct side_write){ d->disk[i], pos, len, buf, -ENODEV };
		if (d->disk[i] && (d->in_sync[i] || d->rebuilding))
			co_group_start(&g, "log mirror write", co_side_write, &sw[i]);
	}
	co_group_wait(&g);

	unsigned good = 0;
	for (unsigned i = 0; i < d->n; i++) {
		good += d->in_sync[i] && sw[i].result == 0;
		if (d->in_sync[i] && sw[i].result < 0)
			first_error = sw[i].result;
	}
	if (!good)
		return first_error;
	for (unsigned i = 0; i < d->n; i++) {
		if (sw[i].disk && sw[i].result < 0 && (d->in_sync[i] || d->rebuilding)) {
			*ret_dropped |= d->in_sync[i];
			wl_drop_side(w, i, sw[i].result);
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
	int r = co_write_all(w, pos, buf, len, &dropped);
	if (r == 0 && dropped) {
		/* Invariant (2) */
		r = co_wl_super_write(w);
	}
	co_mutex_unlock(&w->dev.lock);
	return r;
}

co_fn int co_wl_dev_read(struct wlog *w, int side, uint64_t pos, void *buf, uint64_t len)
{
	struct wl_dev *d = &w->dev;
	int r = -EIO;

	for (unsigned i = 0; i < d->n; i++) {
		if (!d->disk[i] || (side < 0 ? !d->in_sync[i] : side != (int)i))
			continue;
		r = co_disk_read(d->disk[i], pos, buf, len, DISK_BACKGROUND);
		if (r == 0)
			return 0;
	}
	return r;
}
