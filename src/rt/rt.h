/* SPDX-License-Identifier: MIT */
/*
 * Reactors and coroutines.
 *
 * One reactor is one thread, one io_uring, one timer queue and one mailbox. A coroutine lives and dies on
 * one reactor; coroutines of a reactor never run at the same time, and control passes only where a function
 * declared co_fn is called. After such a call all that is not local may have changed.
 *
 * A simulated reactor has the same interface with a virtual clock and no I/O: time jumps to the next timer
 * when nothing is ready, and what is ready runs in an order that the seed decides.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "rt/role.h"
#include "util/list.h"

struct err;
struct co;
struct rt;

struct rt_config {
	unsigned coroutines;	/* how many may exist at once; 0: 1024 */
	size_t stack_size;	/* usable bytes of each, a multiple of the page; 0: 64 KiB (256 KiB under a sanitizer) */
	unsigned ring_entries;	/* 0: 512 */
	unsigned offload_threads; /* 0: 4; started when first needed */
	uint64_t spin_ns;	/* how long to poll for completions before sleeping; 0: never */
	bool ucontext;		/* switch with swapcontext(3) instead of the assembly (tests) */
};

/*
 * Creates a reactor; `config` may be NULL. The ring is set up with SINGLE_ISSUER and DEFER_TASKRUN where the
 * kernel has them and without where not. Errors: -EPERM or -ENOSYS with the reason (sysctl
 * kernel.io_uring_disabled, a container's seccomp filter) and the way out, -ENOMEM.
 * rt_run() is called on the thread that is to be the reactor.
 */
int rt_create(const struct rt_config *config, struct rt **ret, struct err *err);
int rt_create_sim(const struct rt_config *config, uint64_t seed, struct rt **ret, struct err *err);
void rt_destroy(struct rt *rt);	/* NULL is fine */

/*
 * The budget that this reactor's memory comes out of (rt/budget.h): its coroutines' stacks from now on, and what others account for. Before the first coroutine.
 * -ENOMEM if the floor for stacks does not fit.
 */
struct budget;
int rt_set_budget(struct rt *rt, struct budget *b);
struct budget *rt_budget(void);	/* of this reactor; NULL: none */
/* Free buffers and stacks go back to the kernel. On the reactor. */
void rt_trim(struct rt *rt);

typedef void co_entry(void *arg);

/*
 * Runs `main_fn` as the first coroutine, and the loop until main_fn and all other coroutines have returned.
 * Returns 0; -EDEADLK on a simulated reactor where coroutines are left but nothing can ever wake one (they
 * are listed on stderr); -errno if the ring fails. May be called again afterwards, on the same thread.
 */
int rt_run(struct rt *rt, co_entry *main_fn, void *arg);

/*
 * For crash tests on a simulated reactor. rt_sim_stop() makes rt_run() return -ECANCELED as soon as the calling
 * coroutine suspends or returns, with the others where they are, as a power cut would. Coroutines left by that or by a deadlock are
 * forgotten, with what they own in the heap, by rt_sim_reseed(), the next rt_run() or rt_destroy(). rt_sim_reseed() also forgets
 * timers and messages and puts the clock back to its fixed start.
 */
void rt_sim_stop(void);
void rt_sim_reseed(struct rt *rt, uint64_t seed);

/* The reactor that this thread runs, or NULL. */
struct rt *rt_self(void);
bool rt_is_sim(const struct rt *rt);

/* Monotonic nanoseconds; virtual on a simulated reactor. Read once a turn of the loop: see rt_now_exact_ns(). */
uint64_t rt_now_ns(void);
/* Reads the clock anew. */
uint64_t rt_now_exact_ns(void);
/* Wall clock, nanoseconds since 1970; on a simulated reactor the virtual clock. */
uint64_t rt_wall_ns(void);
/* Random, not for secrets; decided by the seed on a simulated reactor. */
uint64_t rt_rand64(void);

/*
 * Creates a coroutine on this reactor; it starts on the loop's next turn. `name` is static text. -EAGAIN
 * when the pool is empty: admission control belongs to the caller. Callable from plain functions.
 */
int co_spawn(const char *name, co_entry *fn, void *arg);

/* How many more co_spawn() would succeed now. */
unsigned co_available(void);

struct co *co_self(void);
/* Goes to the end of the ready queue. */
co_fn void co_yield(void);
/*
 * Hands the I/O that is queued to the kernel now and not at the end of this turn. It costs a system call, so it is for a device that is to
 * work while this thread does something else. Never suspends; nothing in a simulated reactor.
 */
void rt_submit(void);
/* Suspends until co_wake(). `why` is static text, shown by rt_dump_tasks(). A wake before the park is not remembered. */
co_fn void co_park(const char *why);
/* Makes a parked coroutine of this reactor ready. */
void co_wake(struct co *co);
co_fn void co_sleep_ns(uint64_t ns);

/* One parked or ready coroutine, for the `tasks` command. */
struct rt_task_info {
	const char *name, *why;
	uint64_t since_ns;	/* how long it has been waiting */
};
/* Calls `fn` for each coroutine but the caller. */
void rt_for_each_task(struct rt *rt, void (*fn)(const struct rt_task_info *, void *), void *arg);
void rt_dump_tasks(struct rt *rt, FILE *out);

/* Timers. The callback is a plain function on the reactor; it may co_wake() and co_spawn(). */
struct rt_timer {
	uint64_t at_ns;
	void (*fn)(struct rt_timer *t);
	unsigned heap_pos;	/* 0: not armed */
};
#define RT_TIMER_INIT { 0, NULL, 0 }
/* Arms at an absolute rt_now_ns() time, again if it is armed. Never fails (the heap grows when a coroutine or timer is created beyond it; -ENOMEM aborts). */
void rt_timer_arm(struct rt_timer *t, uint64_t at_ns, void (*fn)(struct rt_timer *t));
void rt_timer_cancel(struct rt_timer *t);

/* Mailbox: the one way to cross reactors or to come from a foreign thread or signal handler. */
struct rt_msg {
	struct rt_msg *next;
	void (*fn)(struct rt_msg *m);	/* plain function, run on the target reactor */
};
/* Any thread, async-signal-safe, lock-free. `m` belongs to the target until fn is called. */
void rt_post(struct rt *target, struct rt_msg *m);
/* Runs fn(arg) as a coroutine on `target` and returns its result; -EAGAIN if the pool there is empty. */
co_fn int co_call(struct rt *target, int (*fn)(void *arg), void *arg);
/* Keeps rt_run() from returning while a foreign thread may still post: a count. */
void rt_hold(struct rt *rt);
void rt_release(struct rt *rt);

/*
 * A reactor on a thread of its own, which runs until rt_thread_end(). The thread takes no signals but those that a fault raises. `at_end(arg)` is called on it after the
 * loop: what belongs to the reactor is given back there, and the reactor destroyed, also if the thread was never started. A loop that fails ends the process. -EAGAIN.
 */
struct rt_thread;
int rt_thread_start(struct rt *rt, const char *name, void (*at_end)(void *arg), void *arg, struct rt_thread **ret);
/* Waits until all coroutines there have returned. On no reactor. NULL is fine. */
void rt_thread_end(struct rt_thread *t);

/* Runs the blocking function fn(arg) on a worker thread and returns its result. On a simulated reactor it runs in place after a virtual delay. */
co_fn int co_offload(int (*fn)(void *arg), void *arg);

/* Worker threads end as soon as they have done what they have; later work is done by new ones, which inherit what binds the caller by then. On the reactor. -ENOMEM. */
int rt_renew_workers(struct rt *rt);

/* Counters of the loop, for `stats`. */
struct rt_stats {
	uint64_t turns, switches, ring_enters, sqes, cqes, posts, offloads, spawned;
	unsigned coroutines_now, coroutines_peak;
};
void rt_get_stats(const struct rt *rt, struct rt_stats *ret);
