/* SPDX-License-Identifier: MIT */
/*
 * rbd: calls that block, on the offload threads; and the watch over the lock and the size.
 */
#include "backend/rbd.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/size.h"

#define MAP_OBJECTS 64	/* that one difference looks at */
#define CHECK_TICKS 5	/* an image that is not written to: between two looks at its lock */

co_fn int co_rbd_call(struct rbd_disk *r, int (*fn)(void *arg), void *arg)
{
	int ret;

	co_mutex_lock(&r->call_lock);
	r->call_since_ns = rt_now_ns();
	ret = co_offload(fn, arg);
	r->call_since_ns = 0;
	co_mutex_unlock(&r->call_lock);
	return ret;
}

/* --- Extents --- */

struct diff {
	struct rbd_disk *r;
	struct rbd_map map;
};

static int add_data(uint64_t off, size_t len, int exists, void *arg)
{
	struct rbd_map *m = arg;

	if (!exists)
		return 0;
	if (m->n && m->data[m->n - 1].off + m->data[m->n - 1].len == off) {
		m->data[m->n - 1].len += len;
		return 0;
	}
	if (m->n == RBD_MAP_EXTENTS) {
		m->end = off;
		return -E2BIG;
	}
	m->data[m->n].off = off;
	m->data[m->n++].len = len;
	return 0;
}

static int diff_blocking(void *arg)
{
	struct diff *d = arg;
	int ret = d->r->api->rbd_diff_iterate2(d->r->img, NULL, d->map.off, d->map.end - d->map.off, 1, 0, add_data, &d->map);

	return ret == -E2BIG ? 0 : ret;
}

static co_fn int co_make_map(struct rbd_disk *r, uint64_t off)
{
	struct diff d = { .r = r };
	uint64_t changes = r->changes;
	int ret;

	d.map.off = align_down(off, r->obj_size);
	d.map.end = min(r->size, d.map.off + MAP_OBJECTS * r->obj_size);
	ret = co_rbd_call(r, diff_blocking, &d);
	if (ret)
		return ret;
	r->map = d.map;
	r->map.changes = changes;
	r->map.valid = true;
	return 0;
}

static bool map_has(const struct rbd_disk *r, uint64_t off)
{
	/* Of an image that is open without its lock others may change what is there. */
	return r->map.valid && (r->locked || r->snap) && r->map.changes == r->changes && off >= r->map.off && off < r->map.end;
}

co_fn int co_rbd_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	struct rbd_disk *r = rbd_of(d);
	uint64_t end;

	if (off >= r->size)
		return -EIO;
	if (!map_has(r, off)) {
		int error = co_make_map(r, off);

		if (error)
			return error == -ENOENT ? -EIO : error;
	}
	end = min(off + len, r->map.end);
	*ret = (struct disk_extent){ .len = end - off, .hole = true, .zero = true };
	for (unsigned i = 0; i < r->map.n; i++) {
		uint64_t from = r->map.data[i].off, to = from + r->map.data[i].len;

		if (to <= off)
			continue;
		if (from > off)
			ret->len = min(ret->len, from - off);
		else
			*ret = (struct disk_extent){ .len = min(end, to) - off };
		break;
	}
	return 0;
}

/* --- Size --- */

struct resize {
	struct rbd_disk *r;
	uint64_t size;
};

static int resize_blocking(void *arg)
{
	struct resize *c = arg;

	return c->r->api->rbd_resize(c->r->img, c->size);
}

co_fn int co_rbd_resize(struct disk *d, uint64_t size)
{
	struct rbd_disk *r = rbd_of(d);
	struct resize c = { r, size };
	int ret = 0;

	if (d->fenced)
		return -ESHUTDOWN;
	/* An image that was resized with Ceph's tools has the size already. */
	if (size != r->size)
		ret = co_rbd_call(r, resize_blocking, &c);
	if (ret)
		return ret;
	r->size = size;
	r->told_size = false;
	r->changes++;
	return 0;
}

/* --- The mark --- */

struct mark {
	struct rbd_disk *r;
	char *get;
	const char *set;
	size_t size;
};

static int mark_blocking(void *arg)
{
	struct mark *m = arg;
	const struct rbd_api *a = m->r->api;
	char text[DISK_MARK_MAX + 1];
	size_t len = sizeof(text);
	int ret;

	/* The witness is there as long as the mark is. */
	ret = m->set && *m->set && !m->r->marked ? rbd_sign(m->r) : 0;
	if (ret)
		return ret;
	if (m->set)
		ret = *m->set ? a->rbd_metadata_set(m->r->img, RBD_MARK_KEY, m->set) : a->rbd_metadata_remove(m->r->img, RBD_MARK_KEY);
	else
		ret = a->rbd_metadata_get(m->r->img, RBD_MARK_KEY, text, &len);
	if (m->set && !*m->set)
		return ret && ret != -ENOENT ? ret : rbd_unsign(m->r);
	if (m->set)
		return ret;
	m->get[0] = '\0';
	if (ret < 0)
		return ret == -ENOENT ? 0 : ret == -ERANGE ? -EBADMSG : ret;
	text[min(len, sizeof(text) - 1)] = '\0';
	if (strlen(text) >= m->size)
		return -ERANGE;
	strcpy(m->get, text);
	return 0;
}

co_fn int co_rbd_mark_get(struct disk *d, char *buf, size_t size)
{
	struct mark m = { .r = rbd_of(d), .get = buf, .size = size };

	return co_rbd_call(m.r, mark_blocking, &m);
}

co_fn int co_rbd_mark_set(struct disk *d, const char *mark, struct err *err)
{
	struct mark m = { .r = rbd_of(d), .set = mark };
	int ret;

	if (d->fenced)
		return err_set(err, -ESHUTDOWN, "%s: %s", d->name, m.r->why);
	ret = co_rbd_call(m.r, mark_blocking, &m);
	if (ret)
		return err_errno(err, ret, "%s: the mark of its write log cannot be stored in the image's metadata (%s)", d->name, RBD_MARK_KEY);
	return 0;
}

/* --- The watch over lock and size --- */

static void set_why(struct rbd_disk *r, int error)
{
	switch (error) {
	case -ESHUTDOWN:
		snprintf(r->why, sizeof(r->why), "the cluster has blocklisted this client, which has lost the image's exclusive lock");
		break;
	case -ENOENT:
		snprintf(r->why, sizeof(r->why), "the image has been removed");
		break;
	default:
		snprintf(r->why, sizeof(r->why), "the image's exclusive lock has been taken away from this client");
	}
}

void rbd_tell_fence(struct rbd_disk *r)
{
	if (!r->untold)
		return;
	r->untold = false;
	log_error("%s: %s. Nothing is written to it any more, and what is dirty stays in the write log. `rbd status %s%s%s/%s` tells who has the image "
		  "now: if somebody has written to it, start again with --discard-log; if nobody has, just start again", r->disk.name, r->why,
		  r->pool, r->ns ? "/" : "", r->ns ? r->ns : "", r->image);
}

void rbd_fence(struct rbd_disk *r, int error)
{
	if (r->disk.fenced)
		return;
	r->disk.fenced = r->untold = true;
	set_why(r, error);
	if (error == -EROFS && r->watching)
		co_queue_wake_all(&r->watch_wait);
	else
		rbd_tell_fence(r);
}

struct look {
	struct rbd_disk *r;
	bool at_lock;
	int owner;
	uint64_t size;
	int lock_error, size_error;
};

static int look_blocking(void *arg)
{
	struct look *l = arg;
	const struct rbd_api *a = l->r->api;
	uint64_t bytes;
	time_t when;

	if (l->at_lock)
		l->lock_error = a->rbd_is_exclusive_lock_owner(l->r->img, &l->owner);
	/* An image that is gone is nobody's, says librbd. */
	if (l->at_lock && !l->lock_error && !l->owner && a->rados_stat(l->r->io, l->r->header, &bytes, &when) == -ENOENT)
		l->lock_error = -ENOENT;
	l->size_error = a->rbd_get_size(l->r->img, &l->size);
	return 0;
}

static void take_size(struct rbd_disk *r, uint64_t size)
{
	char now[16], before[16];

	if (size == r->size)
		return;
	r->size = size;
	r->changes++;
	size_format(size, now);
	size_format(r->disk.size, before);
	if (size < r->disk.size && !r->told_size)
		log_error("%s: the image has been shrunk to %s under a disk of %s: what was behind that is lost, and reads and writes there fail; "
			  "resize the image to %s again, or the volume to %s", r->disk.name, now, before, before, now);
	r->told_size = size < r->disk.size;
}

co_fn void co_rbd_watcher(void *arg)
{
	struct rbd_disk *r = arg;

	while (!r->closing) {
		struct look l = { .r = r };

		co_queue_wait(&r->watch_wait, "the next look at an image's lock");
		if (r->closing || r->call_lock.owner)
			continue;
		l.at_lock = r->untold || (r->locked && !r->disk.fenced && (r->changes != r->checked_changes || ++r->ticks % CHECK_TICKS == 0));
		r->checked_changes = r->changes;
		co_rbd_call(r, look_blocking, &l);
		if (l.at_lock && (l.lock_error == -ESHUTDOWN || l.lock_error == -ENOENT || (!l.lock_error && !l.owner)))
			rbd_fence(r, l.lock_error ? l.lock_error : -EROFS);
		if (l.at_lock && r->untold) {
			if (l.lock_error == -ENOENT || l.lock_error == -ESHUTDOWN)
				set_why(r, l.lock_error);
			rbd_tell_fence(r);
		}
		if (!l.size_error)
			take_size(r, l.size);
	}
	r->watching = false;
	co_queue_wake_all(&r->idle);
}
