/* SPDX-License-Identifier: MIT */
/*
 * Work that arrives in shared memory, and eventfds: what an export needs whose clients write rings instead of sockets.
 */
#pragma once

#include "rt/rt.h"

/*
 * A poller looks at memory for work. The loop calls `poll` once a turn, and again and again while it spins (rt_config.spin_ns), so a client need
 * not signal a reactor that is awake. Before the reactor sleeps, `sleep` says "signal me from now on" in the shared memory; `poll` is then called once
 * more, behind a full fence. Both are plain functions on the reactor; `poll` returns true if it found work (spawned or woke something).
 * Nothing of the kind happens on a simulated reactor.
 */
struct rt_poller {
	struct list node;
	bool (*poll)(struct rt_poller *p);
	void (*sleep)(struct rt_poller *p);
};
void rt_poller_add(struct rt_poller *p);
void rt_poller_del(struct rt_poller *p);	/* not from within a poller */

/*
 * Wakes the reactor whenever the eventfd `fd` is signalled, and calls `fn` if it is not NULL. The eventfd's counter is left alone where the kernel
 * can watch for edges (5.13), else read. Returns NULL if there is no memory. `fd` must stay open until rt_watch_stop(), after which fn is not called any more.
 */
struct rt_watch;
struct rt_watch *rt_watch_start(int fd, void (*fn)(void *arg), void *arg);
void rt_watch_stop(struct rt_watch *w);	/* NULL is fine */

/*
 * Adds 1 to the eventfd `fd` with the next submission to the ring: together with what else is submitted, and without ever blocking the
 * reactor, whatever state the peer has put the eventfd into. `fd` must stay open until then: close it with co_io_close().
 */
void rt_event_signal(int fd);
