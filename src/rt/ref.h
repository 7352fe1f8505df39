/* SPDX-License-Identifier: MIT */
/*
 * A count of owners that may be on several threads, for what all of them only read.
 */
#pragma once

#include <stdbool.h>

struct rt_ref {
	unsigned n;
};

#define RT_REF_INIT { 1 }

/* By one who owns it already. */
static inline void rt_ref_get(struct rt_ref *r)
{
	__atomic_add_fetch(&r->n, 1, __ATOMIC_RELAXED);
}

/* True: that was the last, and what it counts is to be freed. */
static inline bool rt_ref_put(struct rt_ref *r)
{
	return !__atomic_sub_fetch(&r->n, 1, __ATOMIC_ACQ_REL);
}
