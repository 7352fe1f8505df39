/* SPDX-License-Identifier: MIT */
/*
 * Aligned I/O buffers from a fixed pool of this reactor: no heap on the data path.
 *
 * The pool is one mapping (huge pages where the kernel gives them), cut into power-of-two sizes by a buddy allocator
 * (Knowlton, CACM 1965). Memory is touched when first used, in pieces of 2 MiB; all but the first piece goes back to the
 * kernel after a second without use, and that one after ten. A piece is registered with the ring when co_io_read() and the like first
 * use it, where the limit on locked memory allows: 10 to 18 % less processor time for a direct read of 4 KiB.
 *
 * Against deadlock: who holds a buffer of a pool does not wait for another one of the same pool. So exports have
 * a pool of their own for request data, and each layer takes at most one bounce buffer per request from rt_bufs().
 */
#pragma once

#include "rt/rt.h"

#define RT_BUF_ALIGN 4096u
#define RT_BUF_MAX (32u << 20)	/* one buffer at most */

struct rt_bufpool;

/* `bytes` is rounded up to a power of two of at least RT_BUF_MAX. -ENOMEM. */
int rt_bufpool_create(struct rt *rt, uint64_t bytes, struct rt_bufpool **ret, struct err *err);
void rt_bufpool_destroy(struct rt_bufpool *p);	/* NULL is fine; all buffers must be back, and the reactor still there */
/* `len` in 1..RT_BUF_MAX; waits (first come, first served) until memory is free. Contents undefined. */
co_fn void *co_buf_get(struct rt_bufpool *p, size_t len);
/* NULL if none is free. */
void *rt_buf_tryget(struct rt_bufpool *p, size_t len);
void rt_buf_put(struct rt_bufpool *p, void *buf);	/* NULL is fine */
/* From now on its memory comes out of the reactor's budget (rt/budget.h), as a user of this name with a floor of one piece. Before its first use. -ENOMEM. */
int rt_bufpool_account(struct rt_bufpool *p, const char *name, struct err *err);
/* The last buffer that could not be had was refused by the budget: it may be there any time, without a buffer coming back. */
bool rt_bufpool_starved(const struct rt_bufpool *p);
uint64_t rt_bufpool_used(const struct rt_bufpool *p);
uint64_t rt_bufpool_size(const struct rt_bufpool *p);
/* What is unused of it, or less: what the budget has for it once the caches have given way. */
uint64_t rt_bufpool_left(const struct rt_bufpool *p);
/* The pool that rt_run()'s owner set for this reactor; every layer takes its bounce buffers there. */
struct rt_bufpool *rt_bufs(void);
void rt_set_bufs(struct rt *rt, struct rt_bufpool *p);
