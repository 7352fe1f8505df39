/* SPDX-License-Identifier: MIT */
/*
 * vhost-user-blk server: queues and their requests.
 *
 * A turn of the reactor: requests whose I/O has ended push their completion; then the poller publishes them all, with at most one call of the guest for
 * each queue, and takes what is new. When the reactor is about to sleep it asks the drivers for kicks, and looks once more.
 */
#include "export/vhost/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"

#define TICK_NS 200000u		/* how often a ring without a kick descriptor is looked at */

/* --- Completion --- */

static void call_driver(struct vhost_queue *q)
{
	q->calls++;
	if (q->call_fd >= 0)
		rt_event_signal(q->call_fd);
	else
		q->ring.call_owed = true;
}

static struct vhost_log *log_of(struct vhost_device *d)
{
	return d->log_all ? &d->log : NULL;
}

static void publish(struct vhost_queue *q)
{
	if (vring_publish(&q->ring, log_of(q->d)))
		call_driver(q);
}

/* Whether somebody has cut a file that is mapped here. */
static bool memory_is_lost(struct vhost_device *d)
{
	if (__builtin_expect(d->losses_seen != rt_shm_losses(), 0)) {
		d->losses_seen = rt_shm_losses();
		d->memory_lost |= vhost_memory_lost(d->memory) || (d->inflight_base && rt_shm_lost(&d->inflight)) ||
				  (d->log.bits && rt_shm_lost(&d->log.shm));
	}
	return d->memory_lost;
}

void queue_break(struct vhost_queue *q)
{
	struct vhost_device *d = q->d;

	if (q->broken)
		return;
	q->broken = true;
	/* Zeroes in the place of a ring make no sense; that is not the reason. */
	if (memory_is_lost(d)) {
		err_clear(&q->err);
		err_set(&q->err, -EFAULT, "the file behind the memory that is shared was made shorter while it was in use");
	}
	log_error("%s: queue %u is stopped: the guest's driver is faulty or hostile: %s", d->config.path, q->index, q->err.msg);
	err_clear(&d->err);
	err_set(&d->err, -EPROTO, "queue %u: %s", q->index, q->err.msg);
	if (q->err_fd >= 0)
		rt_event_signal(q->err_fd);
	/* A driver that looks at its device's status finds that it must reset it. */
	if (d->status_used)
		device_config_changed(d);
}

/* --- Requests --- */

static void log_written(struct vhost_device *d, struct vhost_memory *m, const struct iovec *iov, int n)
{
	for (int i = 0; i < n; i++)
		vhost_log_mark(&d->log, vhost_memory_guest(m, iov[i].iov_base), iov[i].iov_len);
}

static co_fn void co_request_main(void *arg)
{
	struct vhost_request *r = arg;
	struct vhost_queue *q = r->q;
	struct vhost_device *d = q->d;
	struct vhost_memory *m = vhost_memory_get(d->memory);
	struct iovec iov[VRING_SEGMENTS_MAX];
	struct err err;
	int nout, nin;
	int64_t written = -EPROTO;

	err.code = 0;
	err.msg[0] = '\0';
	if (!q->broken && !vring_chain(&q->ring, m, r->head, iov, &nout, &nin, &err))
		written = co_virtio_blk_request(&d->blk, iov, nout, nin, &err);
	if (written >= 0 && !q->broken) {
		if (d->log_all)
			log_written(d, m, iov + nout, nin);
		vring_push(&q->ring, r->head, (uint32_t)min(written, (int64_t)UINT32_MAX));
	} else if (!q->broken) {
		q->err = err;
		queue_break(q);
	}
	vhost_memory_put(m);
	d->in_flight--;
	if (!--q->in_flight && q->stopping)
		co_queue_wake_all(&q->idle);
}

/* Starts what is in the ring. True if it has started something. */
static bool take(struct vhost_queue *q)
{
	struct vhost_device *d = q->d;
	bool found = false;
	uint16_t head;

	while (vring_has_work(&q->ring) && d->in_flight < d->config.max_in_flight && co_available()) {
		struct vhost_request *r;
		int ret = vring_pop(&q->ring, &head, &q->err);

		if (ret <= 0) {
			if (ret < 0)
				queue_break(q);
			break;
		}
		r = &q->requests[head];
		r->q = q;
		r->head = head;
		if (co_spawn("vhost request", co_request_main, r) < 0) {
			/* co_available() said otherwise. */
			err_set(&q->err, -EAGAIN, "no coroutine");
			queue_break(q);
			break;
		}
		q->popped++;
		q->in_flight++;
		d->in_flight++;
		found = true;
	}
	if (found)
		vring_disarm(&q->ring);
	return found;
}

static void break_all(struct vhost_device *d)
{
	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i] && d->queues[i]->running)
			queue_break(d->queues[i]);
}

bool device_poll(struct rt_poller *p)
{
	struct vhost_device *d = container_of(p, struct vhost_device, poller);
	bool found = false;

	/* Before anything is told: what was written from memory that is gone were zeroes. */
	if (__builtin_expect(memory_is_lost(d), 0)) {
		break_all(d);
		return false;
	}
	for (unsigned i = 0; i < d->nqueues; i++) {
		struct vhost_queue *q = d->queues[i];

		if (!q || !q->running || q->broken)
			continue;
		if (q->ring.used_next != q->ring.used_idx)
			publish(q);
		if (!q->stopping)
			found |= take(q);
	}
	return found;
}

void device_sleep(struct rt_poller *p)
{
	struct vhost_device *d = container_of(p, struct vhost_device, poller);

	for (unsigned i = 0; i < d->nqueues; i++) {
		struct vhost_queue *q = d->queues[i];

		if (q && q->running && !q->broken && !q->stopping)
			vring_arm(&q->ring);
	}
}

/* --- Queues without a kick descriptor are looked at now and then --- */

static void tick(struct rt_timer *t)
{
	struct vhost_device *d = container_of(t, struct vhost_device, tick);

	d->ticking = false;
	for (unsigned i = 0; i < d->nqueues && !d->ticking; i++)
		d->ticking = d->queues[i] && d->queues[i]->running && !d->queues[i]->broken && d->queues[i]->kick_fd < 0;
	/* The loop polls after each turn, so that nothing is left to do here. */
	if (d->ticking)
		rt_timer_arm(&d->tick, rt_now_ns() + TICK_NS, tick);
}

static void start_ticking(struct vhost_device *d)
{
	if (d->ticking)
		return;
	d->ticking = true;
	rt_timer_arm(&d->tick, rt_now_ns() + TICK_NS, tick);
}

/* --- Start and stop --- */

struct vhost_queue *queue_get(struct vhost_device *d, unsigned index, struct err *err)
{
	struct vhost_queue *q;

	if (index >= d->config.queues) {
		err_set(err, -EINVAL, "queue %u; there are %u", index, d->config.queues);
		return NULL;
	}
	if (d->queues[index])
		return d->queues[index];
	q = calloc(1, sizeof(*q));
	if (!q) {
		err_set(err, -ENOMEM, "no memory for queue %u", index);
		return NULL;
	}
	q->d = d;
	q->index = index;
	q->kick_fd = q->call_fd = q->err_fd = -1;
	co_queue_init(&q->idle);
	d->queues[index] = q;
	d->nqueues = max(d->nqueues, index + 1);
	return q;
}

static bool is_enabled(const struct vhost_queue *q)
{
	return q->enabled || !(q->d->features & VHOST_USER_F_PROTOCOL_FEATURES);
}

static int start(struct vhost_queue *q)
{
	struct vhost_device *d = q->d;
	struct vring *r = &q->ring;
	int ret;

	r->event_idx = d->features & VIRTIO_F_EVENT_IDX;
	r->indirect = d->features & VIRTIO_F_INDIRECT_DESC;
	r->inflight = inflight_of(d, q->index, r->num);
	ret = vring_map(r, d->memory, &q->err);
	if (ret < 0)
		return ret;
	free(q->requests);
	q->requests = calloc(r->num, sizeof(*q->requests));
	if (!q->requests)
		return err_set(&q->err, -ENOMEM, "no memory for %u requests", r->num);
	ret = vring_start(r, &q->err);
	if (ret < 0)
		return ret;
	if (r->resubmit_n)
		log_info("%s: queue %u: %u requests that were in flight are done again", d->config.path, q->index, r->resubmit_n);
	return 0;
}

void queue_update(struct vhost_queue *q)
{
	struct vhost_device *d = q->d;

	if (q->running || !q->started || !is_enabled(q) || !d->memory || d->s->stopping)
		return;
	q->stopping = false;
	q->broken = false;
	err_clear(&q->err);
	q->running = true;
	if (d->memory_lost || start(q) < 0) {
		queue_break(q);
		return;
	}
	if (q->kick_fd < 0)
		start_ticking(d);
}

void device_update(struct vhost_device *d)
{
	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i])
			queue_update(d->queues[i]);
}

static void stop_begin(struct vhost_queue *q)
{
	q->stopping = true;
}

static co_fn void co_stop_end(struct vhost_queue *q)
{
	if (!q->running)
		return;
	while (q->in_flight)
		co_queue_wait(&q->idle, "requests of a queue that is to stop");
	if (!q->broken)
		publish(q);
	vring_stop(&q->ring, log_of(q->d));
	q->running = q->stopping = false;
}

co_fn void co_queue_stop(struct vhost_queue *q)
{
	stop_begin(q);
	co_stop_end(q);
}

co_fn void co_device_stop(struct vhost_device *d)
{
	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i])
			stop_begin(d->queues[i]);
	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i])
			co_stop_end(d->queues[i]);
}

void device_remap(struct vhost_device *d)
{
	for (unsigned i = 0; i < d->nqueues; i++) {
		struct vhost_queue *q = d->queues[i];

		if (q && q->running && !q->broken && (!d->memory || vring_map(&q->ring, d->memory, &q->err) < 0)) {
			err_set(&q->err, -EFAULT, "its ring was in memory that the front end took away");
			queue_break(q);
		}
	}
}

/* --- Descriptors --- */

/* Kicks that were seen are taken out, so that nobody who looks at the eventfd later takes them for new. Without waiting, whatever its flags. */
static void drain_kicks(int fd)
{
	uint64_t value;
	struct iovec iov = { &value, sizeof(value) };

	(void)!preadv2(fd, &iov, 1, -1, RWF_NOWAIT);
}

void queue_set_kick(struct vhost_queue *q, int fd)
{
	rt_watch_stop(q->watch);
	q->watch = NULL;
	if (q->kick_fd >= 0) {
		drain_kicks(q->kick_fd);
		close(q->kick_fd);
	}
	q->kick_fd = fd;
	if (fd >= 0)
		q->watch = rt_watch_start(fd, NULL, NULL);
	else if (q->running)
		start_ticking(q->d);
}

co_fn void co_queue_set_call(struct vhost_queue *q, int fd)
{
	int old = q->call_fd;

	q->call_fd = fd;
	/* Behind the signals that are on their way to it. */
	if (old >= 0)
		co_io_close(old);
	if (fd >= 0 && q->ring.call_owed) {
		q->ring.call_owed = false;
		call_driver(q);
	}
}

co_fn void co_queue_free(struct vhost_queue *q)
{
	queue_set_kick(q, -1);
	co_queue_set_call(q, -1);
	if (q->err_fd >= 0)
		co_io_close(q->err_fd);
	vring_fini(&q->ring);
	free(q->requests);
	free(q);
}
