/* SPDX-License-Identifier: MIT */
/*
 * Memory of somebody else's that I/O goes to: registered with the ring as it is used, like a buffer pool's (rt/buf.h), so that the
 * kernel need not pin its pages for each transfer.
 */
#pragma once

#include "rt/rt.h"

struct rt_bufpool;

#define RT_AREA_PIECE (2u << 20)

/* `base` and `bytes` are multiples of RT_AREA_PIECE. NULL if there is no memory for it, or nothing to be gained (a simulated reactor). */
struct rt_bufpool *rt_area_create(struct rt *rt, void *base, uint64_t bytes);
/* Before this memory goes back to the kernel: the ring forgets it, until it is used again. Whole pieces, with no I/O in flight. */
void rt_area_forget(struct rt_bufpool *area, uint64_t off, uint64_t len);
void rt_area_destroy(struct rt_bufpool *area);	/* NULL is fine; before the reactor */
