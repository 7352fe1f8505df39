/* SPDX-License-Identifier: MIT */
/*
 * Simulated reactor: the same coroutines, timers and mailbox, but a virtual clock and an order that a seed decides.
 *
 * Every choice (which ready coroutine runs next, which of several timers due at one time fires first, how long an
 * offloaded function takes) comes from one generator, so a seed gives one order of events. Time stands still
 * while something is ready and then jumps to the next timer.
 */
#include <errno.h>
#include <stdio.h>

#include "rt/rt_int.h"

void sim_ready_push(struct rt *rt, struct co *co)
{
	rt->sim_ready[rt->ready_n++] = co;
}

static struct co *take_any(struct rt *rt)
{
	unsigned i = rt->ready_n > 1 ? (unsigned)rng_below(&rt->rng, rt->ready_n) : 0;
	struct co *co = rt->sim_ready[i];

	rt->sim_ready[i] = rt->sim_ready[--rt->ready_n];
	return co;
}

static int report_deadlock(struct rt *rt)
{
	fprintf(stderr, "deadlock: %u coroutines are left and nothing can wake one\n", rt->cos_live);
	rt_dump_tasks(rt, stderr);
	return -EDEADLK;
}

int sim_loop(struct rt *rt)
{
	while (!rt->stop) {
		rt->stats.turns++;
		mail_deliver(rt);
		if (rt->heap_n && rt->heap[0].at_ns <= rt->now_ns)
			timers_fire(rt);
		if (rt->ready_n) {
			co_resume(rt, take_any(rt));
			continue;
		}
		if (!rt->cos_live)
			return 0;
		if (!rt->heap_n)
			return report_deadlock(rt);
		rt->now_ns = rt->heap[0].at_ns;
	}
	return -ECANCELED;
}

/* Touches no timer and no message: their memory may be gone. */
void sim_forget(struct rt *rt)
{
	cos_abandon_all(rt);
	rt->heap_n = 0;
	rt->stop = false;
	atomic_store_explicit(&rt->mail, NULL, memory_order_relaxed);
}

void rt_sim_stop(void)
{
	rt_current->stop = true;
}

void rt_sim_reseed(struct rt *rt, uint64_t seed)
{
	sim_forget(rt);
	rt->now_ns = RT_SIM_START_NS;
	rng_seed(&rt->rng, seed);
}
