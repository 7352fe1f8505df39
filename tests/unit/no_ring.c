/* SPDX-License-Identifier: MIT */
/* Stands in for src/rt/ring.c and io.c where liburing is not to be had: only simulated reactors work. */
#include <errno.h>
#include <stdlib.h>

#include "rt/rt_int.h"

int ring_init(struct rt *rt, unsigned entries, struct err *err)
{
	return err_set(err, -ENOSYS, "no ring in this build");
}

int ring_enable(struct rt *rt)
{
	return -ENOSYS;
}

void ring_fini(struct rt *rt)
{
}

struct io_uring_sqe *ring_sqe(struct rt *rt)
{
	abort();
}

void ring_reap(struct rt *rt)
{
}

void ring_poll(struct rt *rt)
{
}

void ring_wait(struct rt *rt)
{
}

int io_uring_submit(struct io_uring *ring)
{
	return -ENOSYS;
}

int io_uring_register_buffers_sparse(struct io_uring *ring, unsigned n)
{
	return -ENOSYS;
}

int io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned off, const struct iovec *iov, const __u64 *tags, unsigned n)
{
	return -ENOSYS;
}
