/* SPDX-License-Identifier: MIT */
/* Pollers, watched eventfds, signals to eventfds. */
#include "rt/watch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "rt/rt_int.h"

#ifndef IORING_FEAT_CQE_SKIP
#define IORING_FEAT_CQE_SKIP (1u << 11)
#endif
#ifndef IOSQE_CQE_SKIP_SUCCESS
#define IOSQE_CQE_SKIP_SUCCESS (1u << 6)
#endif

/* Pollers */

void rt_poller_add(struct rt_poller *p)
{
	list_add_tail(&rt_current->pollers, &p->node);
}

void rt_poller_del(struct rt_poller *p)
{
	list_del(&p->node);
}

bool pollers_poll(struct rt *rt)
{
	bool found = false;

	list_for_each(&rt->pollers, n) {
		struct rt_poller *p = container_of(n, struct rt_poller, node);

		found |= p->poll(p);
	}
	return found;
}

bool pollers_sleep(struct rt *rt)
{
	if (list_empty(&rt->pollers))
		return true;
	list_for_each(&rt->pollers, n) {
		struct rt_poller *p = container_of(n, struct rt_poller, node);

		p->sleep(p);
	}
	atomic_thread_fence(memory_order_seq_cst);
	return !pollers_poll(rt);
}

/* Watches */

struct rt_watch {
	struct rt_op op;
	struct list node;
	int fd;
	bool once, stopped;
	void (*fn)(void *arg);
	void *arg;
};

static void watch_arm(struct rt *rt, struct rt_watch *w)
{
	struct io_uring_sqe *sqe = ring_sqe(rt);

	if (w->once)
		io_uring_prep_poll_add(sqe, w->fd, POLLIN);
	else
		io_uring_prep_poll_multishot(sqe, w->fd, POLLIN);
	io_uring_sqe_set_data(sqe, &w->op);
}

static void watch_event(struct rt *rt, struct rt_op *op)
{
	struct rt_watch *w = container_of(op, struct rt_watch, op);
	bool more = op->flags & IORING_CQE_F_MORE;
	uint64_t value;

	if (w->stopped) {
		if (!more) {
			list_del(&w->node);
			free(w);
		}
		return;
	}
	if (op->res == -EINVAL && !w->once) {
		w->once = true;
		watch_arm(rt, w);
		return;
	}
	/* Only POLLIN is there: the wait above ended with it, so this does not block unless somebody else reads as well. */
	if (w->once && op->res > 0 && read(w->fd, &value, sizeof(value)) < 0 && errno != EAGAIN)
		op->res = -errno;
	if (op->res < 0 || op->res & (POLLERR | POLLHUP | POLLNVAL)) {
		/* Not an eventfd, or no memory: it stays silent, and its owner polls or is polled by others. */
		w->stopped = !more;
		if (!more) {
			w->fd = -1;
			return;
		}
	} else if (!more) {
		watch_arm(rt, w);
	}
	if (w->fn)
		w->fn(w->arg);
}

struct rt_watch *rt_watch_start(int fd, void (*fn)(void *arg), void *arg)
{
	struct rt *rt = rt_current;
	struct rt_watch *w = calloc(1, sizeof(*w));

	if (!w)
		return NULL;
	w->op.fn = watch_event;
	w->fd = fd;
	w->fn = fn;
	w->arg = arg;
	list_add_tail(&rt->watches, &w->node);
	if (!rt->sim)
		watch_arm(rt, w);
	return w;
}

void rt_watch_stop(struct rt_watch *w)
{
	struct rt *rt = rt_current;
	struct io_uring_sqe *sqe;

	if (!w)
		return;
	if (w->stopped || rt->sim) {
		list_del(&w->node);
		free(w);
		return;
	}
	w->stopped = true;
	sqe = ring_sqe(rt);
	io_uring_prep_cancel(sqe, &w->op, 0);
	io_uring_sqe_set_data(sqe, NULL);
}

/* After the ring is gone. */
void watches_fini(struct rt *rt)
{
	list_for_each_safe(&rt->watches, n) {
		list_del(n);
		free(container_of(n, struct rt_watch, node));
	}
}

/* Signals */

void rt_event_signal(int fd)
{
	static const uint64_t one = 1;
	struct rt *rt = rt_current;
	struct io_uring_sqe *sqe;

	if (rt->sim)
		return;
	sqe = ring_sqe(rt);
	io_uring_prep_write(sqe, fd, &one, sizeof(one), 0);
	io_uring_sqe_set_data(sqe, NULL);
	if (rt->ring.features & IORING_FEAT_CQE_SKIP)
		sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
}
