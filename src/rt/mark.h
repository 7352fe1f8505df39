/* SPDX-License-Identifier: MIT */
/*
 * Something that is posted once until it has arrived, whoever posts: several threads, or a signal's handler on any of them.
 */
#pragma once

#include <stdbool.h>

struct rt_mark {
	bool set;
};

/* True: it was set already. */
static inline bool rt_mark_set(struct rt_mark *m)
{
	return __atomic_exchange_n(&m->set, true, __ATOMIC_ACQ_REL);
}

static inline void rt_mark_clear(struct rt_mark *m)
{
	__atomic_store_n(&m->set, false, __ATOMIC_RELEASE);
}
