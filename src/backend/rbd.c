/* SPDX-License-Identifier: MIT */
/*
 * rbd: requests. See rbd.h for the design.
 */
#include "backend/rbd.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/iov.h"
#include "util/log.h"
#include "util/size.h"

#define TICK_NS 1000000000ull
#define HANG_NS 5000000000ull	/* after this the operator is told */
#define REAP 64

enum rbd_verb { RBD_READ, RBD_WRITE, RBD_FLUSH, RBD_DISCARD, RBD_ZERO };

/* --- Completions --- */

static void slot_free(struct rbd_slot *s)
{
	struct rbd_disk *r = s->r;

	if (s->bounce)
		co_queue_wake_one(&r->buf_wait);
	rt_buf_put(r->bounces, s->bounce);
	s->bounce = NULL;
	s->wait = NULL;
	list_del(&s->node);
	list_add_tail(&r->free, &s->node);
	co_queue_wake_one(&r->slot_wait);
	if (list_empty(&r->busy))
		co_queue_wake_all(&r->idle);
	if (r->told_hang && !rbd_waiting_ns(r)) {
		r->told_hang = false;
		log_info("%s: the cluster answers again", r->disk.name);
	}
}

static void slot_completed(struct rbd_slot *s, ssize_t result)
{
	if (s->wait) {
		s->wait->result = result;
		s->wait->done = true;
		co_wake(s->wait->co);
	} else {
		slot_free(s);
	}
}

/* The eventfd was signalled. A plain function on the reactor. */
static void reap(void *arg)
{
	struct rbd_disk *r = arg;
	rbd_completion_t c[REAP];
	int n;

	while ((n = r->api->rbd_poll_io_events(r->img, c, REAP)) > 0) {
		for (int i = 0; i < n; i++) {
			struct rbd_slot *s = r->api->rbd_aio_get_arg(c[i]);
			ssize_t result = r->api->rbd_aio_get_return_value(c[i]);

			r->api->rbd_aio_release(c[i]);
			slot_completed(s, result);
		}
	}
}

/* --- A cluster that hangs --- */

uint64_t rbd_waiting_ns(const struct rbd_disk *r)
{
	const struct rbd_slot *oldest = list_first(&r->busy, struct rbd_slot, node);
	uint64_t since = oldest ? oldest->since_ns : UINT64_MAX;

	if (r->call_since_ns)
		since = min(since, r->call_since_ns);
	return since < rt_now_ns() ? rt_now_ns() - since : 0;
}

/* Those who wait for a request longer than error-after get an error; the request goes on without them. */
static void give_up(struct rbd_disk *r)
{
	uint64_t now = rt_now_ns();

	list_for_each(&r->busy, l) {
		struct rbd_slot *s = container_of(l, struct rbd_slot, node);

		if (s->since_ns + r->error_after_ns > now)
			break;
		if (!s->wait || s->wait->done)
			continue;
		s->wait->given_up = true;
		co_wake(s->wait->co);
		s->wait = NULL;
		r->given_up++;
	}
}

static void tick(struct rt_timer *t)
{
	struct rbd_disk *r = container_of(t, struct rbd_disk, tick);
	char age[16], after[16] = "";
	uint64_t waiting = rbd_waiting_ns(r);

	if (r->error_after_ns)
		give_up(r);
	if (waiting >= HANG_NS && !r->told_hang) {
		r->told_hang = true;
		if (r->error_after_ns)
			duration_format(r->error_after_ns, after);
		log_warn("%s: the cluster has not answered for %s (see `ceph -s`: monitors, OSDs, a full cluster or pool); requests %s%s",
			 r->disk.name, duration_format(waiting, age), *after ? "fail after " : "wait for it, as error-after= is not given", after);
	}
	co_queue_wake_all(&r->watch_wait);
	rbd_arm_tick(r);
}

void rbd_arm_tick(struct rbd_disk *r)
{
	uint64_t step = r->error_after_ns ? min(max(r->error_after_ns / 4, (uint64_t)10000000), (uint64_t)TICK_NS) : TICK_NS;

	rt_timer_arm(&r->tick, rt_now_ns() + step, tick);
}

/* --- Requests --- */

static co_fn int co_take_slot(struct rbd_disk *r, struct rbd_slot **ret)
{
	uint64_t deadline = rt_now_ns() + r->error_after_ns;

	while (list_empty(&r->free)) {
		if (!r->error_after_ns)
			co_queue_wait(&r->slot_wait, "a free place for a request to Ceph");
		else if (!co_queue_wait_until(&r->slot_wait, deadline, "a free place for a request to Ceph"))
			return -ETIMEDOUT;
	}
	*ret = list_first(&r->free, struct rbd_slot, node);
	return 0;
}

/* The place that was free is not used after all: the next one who waits may have it. Returns `ret`. */
static int pass_on(struct rbd_disk *r, int ret)
{
	co_queue_wake_one(&r->slot_wait);
	return ret;
}

static int submit(struct rbd_disk *r, enum rbd_verb verb, rbd_completion_t c, uint64_t off, uint64_t len, const struct iovec *iov, int niov,
		  unsigned flags)
{
	const struct rbd_api *a = r->api;

	switch (verb) {
	case RBD_READ:
		return a->rbd_aio_readv(r->img, iov, niov, off, c);
	case RBD_WRITE:
		return a->rbd_aio_writev(r->img, iov, niov, off, c);
	case RBD_FLUSH:
		return a->rbd_aio_flush(r->img, c);
	case RBD_DISCARD:
		return a->rbd_aio_discard(r->img, off, len, c);
	case RBD_ZERO:
		return a->rbd_aio_write_zeroes(r->img, off, len, c, flags & DISK_UNMAP ? 0 : RBD_WRITE_ZEROES_FLAG_THICK_PROVISION, 0);
	}
	return -EINVAL;
}

/* What librbd said about a request of `len` bytes. */
static int outcome(struct rbd_disk *r, enum rbd_verb verb, ssize_t result, uint64_t len)
{
	if (result < 0) {
		if (verb != RBD_READ && (result == -ESHUTDOWN || result == -EROFS))
			rbd_fence(r, (int)result);
		/* ENOENT is an image or a pool that is gone, EINVAL one that has shrunk. */
		return result == -ENOENT || result == -EINVAL ? -EIO : result == -EDQUOT ? -ENOSPC : (int)result;
	}
	return verb == RBD_READ && (uint64_t)result != len ? -EIO : 0;
}

static co_fn int co_request(struct rbd_disk *r, enum rbd_verb verb, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct rbd_wait wait = { .co = co_self() };
	rbd_completion_t c;
	struct rbd_slot *s;
	int ret = co_take_slot(r, &s);

	if (ret)
		return ret;
	if (off + len > r->size)
		return pass_on(r, -EIO);
	if (verb == RBD_READ && r->bounces) {
		s->bounce = rt_buf_tryget(r->bounces, len);
		if (!s->bounce)
			return pass_on(r, -EAGAIN);
		s->iov = (struct iovec){ s->bounce, len };
	}
	ret = r->api->rbd_aio_create_completion(s, NULL, &c);
	if (ret < 0) {
		rt_buf_put(r->bounces, s->bounce);
		s->bounce = NULL;
		pass_on(r, ret);
	} else {
		s->wait = &wait;
		s->since_ns = rt_now_ns();
		list_del(&s->node);
		list_add_tail(&r->busy, &s->node);
		ret = submit(r, verb, c, off, len, s->bounce ? &s->iov : iov, s->bounce ? 1 : niov, flags);
		if (ret < 0) {
			r->api->rbd_aio_release(c);
			slot_free(s);
		}
	}
	if (ret < 0)
		return outcome(r, verb, ret, len);
	while (!wait.done && !wait.given_up)
		co_park("the Ceph cluster");
	if (wait.given_up)
		return -ETIMEDOUT;	/* the slot is not ours any more */
	ret = outcome(r, verb, wait.result, len);
	if (!ret && s->bounce)
		iov_copy_in(iov, niov, 0, s->bounce, len);
	slot_free(s);
	return ret;
}

/* Of a read that may be given up: a buffer of the pool, which may all be in use. */
static co_fn int co_rbd_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct rbd_disk *r = rbd_of(d);
	uint64_t deadline = rt_now_ns() + r->error_after_ns;
	int ret;

	while ((ret = co_request(r, RBD_READ, off, len, iov, niov, flags)) == -EAGAIN)
		if (!co_queue_wait_until(&r->buf_wait, min(deadline, rt_now_ns() + TICK_NS), "a buffer for a read from Ceph") &&
		    rt_now_ns() >= deadline)
			return -ETIMEDOUT;
	return ret;
}

static co_fn int co_change(struct disk *d, enum rbd_verb verb, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct rbd_disk *r = rbd_of(d);
	int ret;

	if (d->fenced)
		return -ESHUTDOWN;
	r->changes++;
	ret = co_request(r, verb, off, len, iov, niov, flags);
	r->changes++;	/* a map that was made meanwhile does not count either */
	return ret;
}

static co_fn int co_rbd_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	return co_change(d, RBD_WRITE, off, len, iov, niov, flags);
}

static co_fn int co_rbd_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_change(d, RBD_DISCARD, off, len, NULL, 0, flags);
}

static co_fn int co_rbd_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_change(d, RBD_ZERO, off, len, NULL, 0, flags);
}

static co_fn int co_rbd_flush(struct disk *d)
{
	struct rbd_disk *r = rbd_of(d);

	if (!r->volatile_cache)
		return 0;
	return co_request(r, RBD_FLUSH, 0, 0, NULL, 0, 0);
}

/* --- Life --- */

static uint64_t rbd_store_size(struct disk *d)
{
	return rbd_of(d)->size;
}

static void rbd_status(struct disk *d, void *obj)
{
	struct rbd_disk *r = rbd_of(d);

	json_object_set_new(obj, "pool", json_string(r->pool));
	json_object_set_new(obj, "namespace", r->ns ? json_string(r->ns) : json_null());
	json_object_set_new(obj, "image", json_string(r->image));
	json_object_set_new(obj, "snapshot", r->snap ? json_string(r->snap) : json_null());
	json_object_set_new(obj, "image_id", json_string(r->id));
	json_object_set_new(obj, "object_size", json_integer((json_int_t)r->obj_size));
	json_object_set_new(obj, "cluster_size", json_integer((json_int_t)r->size));
	json_object_set_new(obj, "librbd_cache", json_boolean(r->has_cache));
	json_object_set_new(obj, "exclusive_lock", json_boolean(r->locked && !d->fenced));
	json_object_set_new(obj, "fenced", d->fenced ? json_string(r->why) : json_null());
	json_object_set_new(obj, "on_hang", json_string(r->error_after_ns ? "error" : "pause"));
	json_object_set_new(obj, "error_after_ns", json_integer((json_int_t)r->error_after_ns));
	json_object_set_new(obj, "waiting_ns", json_integer((json_int_t)rbd_waiting_ns(r)));
	json_object_set_new(obj, "requests_given_up", json_integer((json_int_t)r->given_up));
}

int rbd_start_io(struct rbd_disk *r, struct err *err)
{
	int ret;

	for (unsigned i = 0; i < RBD_SLOTS; i++) {
		r->slot[i].r = r;
		list_add_tail(&r->free, &r->slot[i].node);
	}
	if (r->error_after_ns) {
		ret = rt_bufpool_create(rt_self(), RT_BUF_MAX, &r->bounces, err);
		if (ret)
			return ret;
	}
	r->efd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (r->efd < 0)
		return err_errno(err, -errno, "%s: eventfd", r->disk.name);
	ret = r->api->rbd_set_image_notification(r->img, r->efd, EVENT_TYPE_EVENTFD);
	if (ret)
		return err_errno(err, ret, "%s: librbd cannot signal an eventfd", r->disk.name);
	r->watch = rt_watch_start(r->efd, reap, r);
	return r->watch ? 0 : err_errno(err, -ENOMEM, "%s", r->disk.name);
}

const struct disk_ops rbd_ops = {
	.driver = "rbd",
	.co_read = co_rbd_read,
	.co_write = co_rbd_write,
	.co_flush = co_rbd_flush,
	.co_discard = co_rbd_discard,
	.co_zero = co_rbd_zero,
	.co_extent = co_rbd_extent,
	.co_resize = co_rbd_resize,
	.co_mark_get = co_rbd_mark_get,
	.co_mark_set = co_rbd_mark_set,
	.co_writers = co_rbd_writers,
	.store_size = rbd_store_size,
	.co_close = co_rbd_close,
	.status = rbd_status,
};
