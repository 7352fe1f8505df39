/* SPDX-License-Identifier: MIT */
/*
 * What the files of src/rt share; nobody else includes it.
 *
 * Control flow of a reactor
 *
 *	rt_run ── loop context ──switch──▶ first ready coroutine ──switch──▶ next one ... ──switch──▶ loop
 *
 * Invariants
 *  (1) A coroutine is in exactly one state: FREE (on the free list), READY (on `ready` or `run`), RUNNING (it is
 *      rt->current) or PARKED (somebody will co_wake() it).
 *  (2) `run` holds what was ready when the turn began; what becomes ready meanwhile goes to `ready`. So a turn ends, and
 *      the ring, the timers and the mailbox get their turn, however busy the coroutines are.
 *  (3) All fields belong to the reactor's thread but `mail`, `holds_taken` and `releasing`.
 */
#pragma once

#include <liburing.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "rt/budget.h"
#include "rt/role.h"
#include "rt/rt.h"
#include "util/err.h"
#include "util/rng.h"

#if defined(__SANITIZE_ADDRESS__)
#define RT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RT_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define RT_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RT_TSAN 1
#endif
#endif
#ifndef RT_ASAN
#define RT_ASAN 0
#endif
#ifndef RT_TSAN
#define RT_TSAN 0
#endif
#if defined(__x86_64__) || defined(__aarch64__)
#define RT_HAVE_ASM 1
#else
#define RT_HAVE_ASM 0
#endif

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#define RT_SIM_START_NS 1700000000000000000ull

struct co_group;
struct offload;

enum co_state { CO_FREE, CO_READY, CO_RUNNING, CO_PARKED };

struct co {
	struct list node;	/* free list, ready or run */
	void *sp;		/* saved stack pointer, or a ucontext */
	co_entry *fn;
	void *arg;
	struct co_group *group;	/* not NULL: group_fn(arg) runs, and its result goes there */
	int (*group_fn)(void *arg);
	const char *name, *why;
	uint64_t since_ns;
	enum co_state state;
	bool started;		/* the stack has a frame to switch to */
	bool counted;		/* in the budget: its stack may cost memory */
	unsigned ready_pos;	/* sim: index in rt->sim_ready */
	char *stack;		/* lowest usable address */
	size_t stack_len;
#if RT_ASAN
	void *fake_stack;
#endif
#if RT_TSAN
	void *fiber;
#endif
} __attribute__((aligned(64)));

struct heap_entry {
	uint64_t at_ns, key;	/* equal times: by key, which counts, or is random on a simulated reactor */
	struct rt_timer *t;
};

/* All stacks are one mapping: guard, stack, guard, stack ... */
struct stacks {
	char *map;
	size_t map_len, usable, page;
	unsigned n;
	bool madvise_guards, watching;
	void *signal_stack;
	stack_t signal_stack_before;
};

/* What a completion refers to. With `co` it is woken, else fn is called. */
struct rt_op {
	struct co *co;
	void (*fn)(struct rt *rt, struct rt_op *op);
	int res;
	unsigned flags;
	bool done;
};

struct rt {
	struct co *current;	/* &loop while the loop itself runs */
	struct co *prev;	/* who switched to `current` */
	struct list run, ready;
	uint64_t now_ns;
	bool sim, ucontext;
	unsigned ready_n;	/* on `ready`, or in sim_ready */
	struct co **sim_ready;
	struct co loop;

	struct co *cos;
	unsigned cos_max, cos_touched, cos_live;
	unsigned cos_counted;	/* of those touched. Free ones that are counted come first on the free list */
	struct budget *budget;	/* NULL: none */
	struct budget_user stack_user;
	struct list free;
	struct stacks stacks;

	struct heap_entry *heap;
	unsigned heap_n, heap_cap;
	uint64_t timer_seq;

	struct io_uring ring;
	bool ring_up, ring_enabled, under_valgrind;
	int ring_error;
	uint64_t last_enter_ns, spin_ns, spin_ewma_ns;

	_Atomic(struct rt_msg *) mail;	/* newest first; MAIL_ASLEEP: the reactor waits in the kernel */
	int wake_fd;
	bool wake_owed;		/* a poster has seen MAIL_ASLEEP, its write to wake_fd has not been read yet */
	bool wake_armed;
	uint64_t wake_value;
	struct rt_op wake_op;
	_Atomic(uint64_t) holds_taken, releasing;
	uint64_t holds_released;

	struct offload *offload;
	unsigned offload_threads;

	struct rng rng;
	struct rt_bufpool *bufs;
	struct list pools;
	struct rt_bufpool *last_pool;	/* where bufs_fixed_index() found an address last */
	uint16_t *fixed_free;	/* free places of the ring's table of buffers */
	unsigned fixed_free_n;
	bool fixed_tried;
	struct list pollers, watches;
	bool stop;		/* sim: rt_sim_stop() */
	struct rt_stats stats;
};

extern __thread struct rt *rt_current;

/* stack.c */
int stacks_init(struct stacks *s, unsigned n, size_t usable, struct err *err);
void stacks_fini(struct stacks *s);
/* Makes stack i usable (installs its guard); once for each. */
void *stacks_prepare(struct stacks *s, unsigned i);
/* On the reactor's thread while it runs: a stack overflow is reported by name. */
void stacks_watch(struct stacks *s);
void stacks_unwatch(struct stacks *s);

/* co.c */
int cos_init(struct rt *rt, unsigned n, size_t stack_size, struct err *err);
void cos_fini(struct rt *rt);
void rt_co_thread(struct rt *rt);
void cos_abandon_all(struct rt *rt);
/* Stacks that are free give their memory back. */
void cos_trim(struct rt *rt);
int co_spawn_child(const char *name, struct co_group *g, int (*fn)(void *arg), void *arg);
void rt_run_ready(struct rt *rt);
/* From the loop: switches to a ready coroutine that is on no list. */
void co_resume(struct rt *rt, struct co *co);
/* Switches away from a coroutine that has set its state. */
void co_suspend(struct rt *rt);
void co_group_child_done(struct co_group *g, int result);

/* timer.c */
int timers_reserve(struct rt *rt, unsigned n);
/* While the reactor does not run, too. */
void timer_cancel(struct rt *rt, struct rt_timer *t);
/* Calls what is due. */
void timers_fire(struct rt *rt);

/* mailbox.c */
int mail_init(struct rt *rt, struct err *err);
void mail_fini(struct rt *rt);
/* True if anything was delivered. */
bool mail_deliver(struct rt *rt);
/* False if there is mail: do not sleep. */
bool mail_sleep(struct rt *rt);
void mail_awake(struct rt *rt);
void mail_arm(struct rt *rt);
bool mail_is_quiet(struct rt *rt);

/* ring.c */
int ring_init(struct rt *rt, unsigned entries, struct err *err);
int ring_enable(struct rt *rt);
void ring_fini(struct rt *rt);
/* Never NULL; submits what is queued when the ring is full. */
struct io_uring_sqe *ring_sqe(struct rt *rt);
void ring_reap(struct rt *rt);
/* Submits without waiting if it is time to. */
void ring_poll(struct rt *rt);
/* Submits and waits for a completion, until the next timer at most. */
void ring_wait(struct rt *rt);

/* buf.c */
/* The place of the registered piece of a pool that holds the whole range, or -1. */
int bufs_fixed_index(struct rt *rt, const void *addr, size_t len);

/* watch.c */
/* True if one found work. */
bool pollers_poll(struct rt *rt);
/* False if there is work: do not sleep. */
bool pollers_sleep(struct rt *rt);
void watches_fini(struct rt *rt);

/* sim.c */
int sim_loop(struct rt *rt);
void sim_forget(struct rt *rt);
void sim_ready_push(struct rt *rt, struct co *co);

/* offload.c */
void offload_fini(struct rt *rt);

static inline uint64_t rt_clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
