/* SPDX-License-Identifier: MIT */
/*
 * Mailbox: how other threads and signal handlers reach a reactor.
 *
 * `mail` is a stack that posters push to with one compare-and-swap; the reactor takes all of it at once and turns it
 * round. While the reactor waits in the kernel the word says MAIL_ASLEEP instead of NULL, and the poster that
 * replaces it writes to `wake_fd`, on which the ring has a read armed. So a post to a busy reactor costs no system
 * call, and of many posts to a sleeping one only the first.
 *
 * Invariants
 *  (1) After its swap a poster touches nothing of the reactor but the descriptor's number: the message may have
 *      been handled, and the reactor destroyed, before the poster's next instruction. Therefore
 *  (2) rt_run() does not return while a poster still owes its write (`wake_owed`), and
 *  (3) rt_release() is nothing but a write to `wake_fd`: its upper 32 bits count releases, the lower ones wakes.
 */
#include <errno.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rt/rt_int.h"

#define MAIL_ASLEEP ((struct rt_msg *)1)
#define WAKE_ONE 1u
#define RELEASE_ONE (1ull << 32)

static void signal_wake_fd(int fd, uint64_t value)
{
	int saved = errno;

	/* Not write(2): TSan would take the close in rt_destroy(), which this very value allows, for a race. */
	while (syscall(SYS_write, fd, &value, sizeof(value)) < 0 && errno == EINTR)
		;
	errno = saved;
}

void rt_post(struct rt *target, struct rt_msg *m)
{
	int fd = target->wake_fd;
	struct rt_msg *old = atomic_load_explicit(&target->mail, memory_order_relaxed);

	do {
		m->next = old == MAIL_ASLEEP ? NULL : old;
	} while (!atomic_compare_exchange_weak_explicit(&target->mail, &old, m, memory_order_acq_rel, memory_order_relaxed));
	if (old == MAIL_ASLEEP)
		signal_wake_fd(fd, WAKE_ONE);
}

bool mail_deliver(struct rt *rt)
{
	struct rt_msg *m, *next, *in_order = NULL;

	if (likely(!atomic_load_explicit(&rt->mail, memory_order_relaxed)))
		return false;
	for (m = atomic_exchange_explicit(&rt->mail, NULL, memory_order_acq_rel); m; m = next) {
		next = m->next;
		m->next = in_order;
		in_order = m;
	}
	for (m = in_order; m; m = next) {
		next = m->next;
		rt->stats.posts++;
		m->fn(m);
	}
	return true;
}

bool mail_sleep(struct rt *rt)
{
	struct rt_msg *none = NULL;

	return atomic_compare_exchange_strong_explicit(&rt->mail, &none, MAIL_ASLEEP, memory_order_acq_rel, memory_order_relaxed);
}

void mail_awake(struct rt *rt)
{
	struct rt_msg *asleep = MAIL_ASLEEP;

	if (!atomic_compare_exchange_strong_explicit(&rt->mail, &asleep, NULL, memory_order_acq_rel, memory_order_relaxed))
		rt->wake_owed = true;
}

static void wake_fd_read(struct rt *rt, struct rt_op *op)
{
	rt->wake_armed = false;
	if (op->res != sizeof(rt->wake_value))
		return;
	if ((uint32_t)rt->wake_value)
		rt->wake_owed = false;
	rt->holds_released += rt->wake_value >> 32;
	/* Pairs with rt_release(): what its thread did before it has happened. */
	if (rt->wake_value >> 32)
		atomic_load_explicit(&rt->releasing, memory_order_acquire);
}

void mail_arm(struct rt *rt)
{
	struct io_uring_sqe *sqe;

	if (likely(rt->wake_armed))
		return;
	sqe = ring_sqe(rt);
	io_uring_prep_read(sqe, rt->wake_fd, &rt->wake_value, sizeof(rt->wake_value), 0);
	io_uring_sqe_set_data(sqe, &rt->wake_op);
	rt->wake_armed = true;
}

bool mail_is_quiet(struct rt *rt)
{
	return !rt->wake_owed && !atomic_load_explicit(&rt->mail, memory_order_relaxed) &&
	       rt->holds_released == atomic_load_explicit(&rt->holds_taken, memory_order_relaxed);
}

int mail_init(struct rt *rt, struct err *err)
{
	rt->wake_op.fn = wake_fd_read;
	rt->wake_fd = -1;
	if (rt->sim)
		return 0;
	rt->wake_fd = eventfd(0, EFD_CLOEXEC);
	if (rt->wake_fd < 0)
		return err_errno(err, -errno, "eventfd for a reactor's mailbox");
	return 0;
}

void mail_fini(struct rt *rt)
{
	if (rt->wake_fd >= 0)
		close(rt->wake_fd);
}

void rt_hold(struct rt *rt)
{
	atomic_fetch_add_explicit(&rt->holds_taken, 1, memory_order_relaxed);
}

void rt_release(struct rt *rt)
{
	int fd = rt->wake_fd;

	if (rt->sim) {
		rt->holds_released++;
		return;
	}
	atomic_fetch_add_explicit(&rt->releasing, 1, memory_order_release);
	signal_wake_fd(fd, RELEASE_ONE);
}

/* A call that travels to `target` and back; it lives on the caller's stack. */
struct call {
	struct rt_msg msg;
	struct rt *home;
	struct co *co;
	int (*fn)(void *arg);
	void *arg;
	int result;
	bool done;
};

static void call_returned(struct rt_msg *m)
{
	struct call *c = container_of(m, struct call, msg);

	c->done = true;
	co_wake(c->co);
}

static void call_return(struct call *c, int result)
{
	c->result = result;
	c->msg.fn = call_returned;
	rt_post(c->home, &c->msg);
}

static void call_run(void *arg)
{
	struct call *c = arg;

	call_return(c, c->fn(c->arg));
}

static void call_arrived(struct rt_msg *m)
{
	struct call *c = container_of(m, struct call, msg);
	int r = co_spawn("call", call_run, c);

	if (r < 0)
		call_return(c, r);
}

int co_call(struct rt *target, int (*fn)(void *arg), void *arg)
{
	struct call c = { .msg.fn = call_arrived, .home = rt_self(), .co = co_self(), .fn = fn, .arg = arg };

	if (target == c.home)
		return fn(arg);
	rt_post(target, &c.msg);
	while (!c.done)
		co_park("another reactor");
	return c.result;
}
