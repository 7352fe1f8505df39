/* SPDX-License-Identifier: MIT */
/*
 * The reactor's io_uring: set-up, submission and completion.
 *
 * Submissions collect in the ring's memory while coroutines run; one io_uring_enter() at the end of a turn hands all of
 * them over and, when nothing is ready, waits as well. While coroutines keep the reactor busy the ring is entered
 * at most every BUSY_ENTER_NS, or when many entries wait.
 *
 * With DEFER_TASKRUN completions are posted only inside io_uring_enter(), so they never interrupt a coroutine; the
 * kernel raises IORING_SQ_TASKRUN in shared memory when there are any.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rt/rt_int.h"
#include "util/bytes.h"
#include "util/log.h"

#if __has_include(<valgrind/valgrind.h>)
#include <valgrind/valgrind.h>
#else
#define RUNNING_ON_VALGRIND 0
#endif

#define BUSY_ENTER_NS 5000u
#define BUSY_ENTER_SQES 32u

/* Set-up */

/* From the best to what every kernel with io_uring has. */
static const unsigned flag_sets[] = {
	IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,	/* 6.1 */
	IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,	/* 5.19 */
	0,
};

static int read_sysctl(const char *path)
{
	char c = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	if (read(fd, &c, 1) != 1)
		c = 0;
	close(fd);
	return c >= '0' && c <= '9' ? c - '0' : -1;
}

static int explain(int r, struct err *err)
{
	int disabled = read_sysctl("/proc/sys/kernel/io_uring_disabled");

	if (r == -EPERM && disabled > 0)
		return err_set(err, r, "io_uring is switched off on this host: the sysctl kernel.io_uring_disabled is %d; set it to 0%s", disabled,
			       disabled == 1 ? ", or run as a member of the group in kernel.io_uring_group" : "");
	if (r == -EPERM || r == -EACCES)
		return err_set(err, r, "io_uring is forbidden here, probably by a container's seccomp filter; allow the system calls io_uring_setup, "
			       "io_uring_enter and io_uring_register (docker: --security-opt seccomp=FILE)");
	if (r == -ENOSYS)
		return err_set(err, r, "this kernel has no io_uring; weir needs Linux 5.11 or later, and outside of a sandbox that hides io_uring_setup");
	if (r == -ENOMEM)
		return err_set(err, r, "no memory for io_uring; before Linux 5.12 it counts as locked memory: raise the limit (ulimit -l, LimitMEMLOCK=)");
	return err_errno(err, r, "io_uring_setup");
}

/*
 * What the ring takes, from now on to its end: what src/rt submits. A seccomp filter does not see what is submitted; so nobody opens files or starts anything by way
 * of the ring. A kernel that refuses the list (before 5.10, or one that does not know an entry) does without.
 */
static void restrict_ring(struct rt *rt)
{
	static const uint8_t ops[] = {
		IORING_OP_READ, IORING_OP_READV, IORING_OP_READ_FIXED, IORING_OP_WRITE, IORING_OP_WRITEV, IORING_OP_WRITE_FIXED, IORING_OP_FSYNC,
		IORING_OP_FALLOCATE, IORING_OP_RECV, IORING_OP_RECVMSG, IORING_OP_SEND, IORING_OP_SENDMSG, IORING_OP_ACCEPT, IORING_OP_CONNECT,
		IORING_OP_CLOSE, IORING_OP_POLL_ADD, IORING_OP_POLL_REMOVE, IORING_OP_ASYNC_CANCEL, IORING_OP_NOP,
	};
	static const uint8_t registers[] = {
		IORING_REGISTER_ENABLE_RINGS, IORING_REGISTER_BUFFERS2, IORING_REGISTER_BUFFERS_UPDATE, IORING_UNREGISTER_BUFFERS,
		IORING_REGISTER_RING_FDS, IORING_UNREGISTER_RING_FDS,
	};
	struct io_uring_restriction r[ARRAY_SIZE(ops) + ARRAY_SIZE(registers) + 1] = { 0 };
	unsigned n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(ops); i++)
		r[n++] = (struct io_uring_restriction){ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = ops[i] };
	for (size_t i = 0; i < ARRAY_SIZE(registers); i++)
		r[n++] = (struct io_uring_restriction){ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = registers[i] };
	r[n++] = (struct io_uring_restriction){ .opcode = IORING_RESTRICTION_SQE_FLAGS_ALLOWED, .sqe_flags = 1u << 6 }; /* IOSQE_CQE_SKIP_SUCCESS */
	syscall(__NR_io_uring_register, rt->ring.ring_fd, IORING_REGISTER_RESTRICTIONS, r, n);
}

int ring_init(struct rt *rt, unsigned entries, struct err *err)
{
	const char *hook = getenv("WEIR_RING");
	int r = -EINVAL;

	/* WEIR_RING=basic: as on an old kernel; coop: as before 6.1. For tests. */
	for (unsigned i = !hook ? 0 : strcmp(hook, "basic") == 0 ? 2 : strcmp(hook, "coop") == 0; r == -EINVAL && i < 3; i++) {
		struct io_uring_params p = { .flags = flag_sets[i] | IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE | IORING_SETUP_R_DISABLED };

		p.cq_entries = entries * 4;
		r = io_uring_queue_init_params(entries, &rt->ring, &p);
	}
	if (r < 0)
		return explain(r, err);
	restrict_ring(rt);
	rt->ring_up = true;
	rt->under_valgrind = RUNNING_ON_VALGRIND;
	if (!(rt->ring.features & IORING_FEAT_EXT_ARG) || !(rt->ring.features & IORING_FEAT_NODROP))
		return err_set(err, -ENOSYS, "the io_uring of this kernel is too old; weir needs Linux 5.11 or later");
	return 0;
}

/* On the thread that is to submit: SINGLE_ISSUER ties the ring to it. */
int ring_enable(struct rt *rt)
{
	int r;

	if (rt->ring_enabled)
		return 0;
	/* By hand: Debian's liburing 2.3 declares io_uring_enable_rings() and does not export it. */
	r = (int)syscall(__NR_io_uring_register, rt->ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
	if (r < 0)
		return -errno;
	io_uring_register_ring_fd(&rt->ring);	/* saves a lookup for each enter; not in every kernel */
	rt->ring_enabled = true;
	return 0;
}

void ring_fini(struct rt *rt)
{
	if (rt->ring_up)
		io_uring_queue_exit(&rt->ring);
}

/* Completions */

void ring_reap(struct rt *rt)
{
	struct io_uring_cqe *cqe;
	unsigned head, n = 0;

	io_uring_for_each_cqe(&rt->ring, head, cqe) {
		struct rt_op *op = io_uring_cqe_get_data(cqe);

		n++;
		if (!op)
			continue;
		op->res = cqe->res;
		op->flags = cqe->flags;
		op->done = true;
		if (likely(op->co))
			co_wake(op->co);
		else
			op->fn(rt, op);
	}
	if (n)
		io_uring_cq_advance(&rt->ring, n);
	rt->stats.cqes += n;
}

static unsigned sq_flags(struct rt *rt)
{
	return __atomic_load_n(rt->ring.sq.kflags, __ATOMIC_RELAXED);
}

static void note_result(struct rt *rt, int r)
{
	if (r >= 0 || r == -EINTR || r == -ETIME || r == -EAGAIN || r == -EBUSY)
		return;
	if (!rt->ring_error)
		log_error("io_uring_enter: %s; the reactor stops", strerror(-r));
	rt->ring_error = r;
}

static void enter(struct rt *rt)
{
	rt->stats.ring_enters++;
	note_result(rt, io_uring_submit_and_get_events(&rt->ring));
}

/* Submission */

void rt_submit(void)
{
	struct rt *rt = rt_self();

	if (!rt->sim && io_uring_sq_ready(&rt->ring))
		note_result(rt, io_uring_submit(&rt->ring));
}

struct io_uring_sqe *ring_sqe(struct rt *rt)
{
	struct io_uring_sqe *sqe;

	while (unlikely(!(sqe = io_uring_get_sqe(&rt->ring)))) {
		enter(rt);
		if (rt->ring_error)
			abort();
		/* The kernel takes no more while completions wait to be read. */
		ring_reap(rt);
	}
	rt->stats.sqes++;
	return sqe;
}

void ring_poll(struct rt *rt)
{
	unsigned queued = io_uring_sq_ready(&rt->ring);

	if (queued < BUSY_ENTER_SQES) {
		if (rt->now_ns - rt->last_enter_ns < BUSY_ENTER_NS)
			return;
		if (!queued && !(sq_flags(rt) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)))
			return;
	}
	enter(rt);
	rt->last_enter_ns = rt->now_ns;
	ring_reap(rt);
}

/* Waiting */

static bool something_to_do(struct rt *rt)
{
	return io_uring_cq_ready(&rt->ring) || (sq_flags(rt) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW));
}

/* Polls for `spin_ns` where waits have been about that short lately. True if there is something to do. */
static bool spin(struct rt *rt, uint64_t start_ns)
{
	if (rt->spin_ewma_ns > rt->spin_ns)
		return false;
	if (io_uring_sq_ready(&rt->ring))
		enter(rt);
	do {
		if (something_to_do(rt) || atomic_load_explicit(&rt->mail, memory_order_relaxed) || pollers_poll(rt))
			return true;
#if defined(__x86_64__)
		__builtin_ia32_pause();
#endif
	} while (rt_clock_ns(CLOCK_MONOTONIC) - start_ns < rt->spin_ns);
	return false;
}

/*
 * valgrind 3.19 holds all threads while one is in io_uring_enter(), so there the waiting is done in ppoll(); for
 * a millisecond at most, since deferred completions do not always wake it.
 */
static void wait_under_valgrind(struct rt *rt, const struct timespec *timeout)
{
	struct pollfd p = { .fd = rt->ring.ring_fd, .events = POLLIN };
	struct timespec ts = { .tv_nsec = 1000000 };

	if (timeout && timeout->tv_sec == 0 && timeout->tv_nsec < ts.tv_nsec)
		ts = *timeout;
	enter(rt);
	if (!something_to_do(rt))
		ppoll(&p, 1, &ts, NULL);
	enter(rt);
}

static void wait_in_kernel(struct rt *rt)
{
	struct timespec ts = { 0 }, *timeout = NULL;
	struct io_uring_cqe *cqe;

	if (rt->heap_n) {
		uint64_t now = rt_clock_ns(CLOCK_MONOTONIC), at = rt->heap[0].at_ns;
		uint64_t ns = at > now ? at - now : 0;

		ts.tv_sec = (time_t)(ns / 1000000000u);
		ts.tv_nsec = (long)(ns % 1000000000u);
		timeout = &ts;
	}
	if (!pollers_sleep(rt) || !mail_sleep(rt))
		return;
	if (unlikely(rt->under_valgrind)) {
		wait_under_valgrind(rt, timeout);
	} else {
		struct __kernel_timespec kts = { ts.tv_sec, ts.tv_nsec };

		rt->stats.ring_enters++;
		note_result(rt, io_uring_submit_and_wait_timeout(&rt->ring, &cqe, 1, timeout ? &kts : NULL, NULL));
	}
	mail_awake(rt);
}

void ring_wait(struct rt *rt)
{
	uint64_t start_ns = 0;

	mail_arm(rt);
	if (rt->spin_ns) {
		start_ns = rt_clock_ns(CLOCK_MONOTONIC);
		if (!spin(rt, start_ns))
			wait_in_kernel(rt);
		else if (sq_flags(rt) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW))
			enter(rt);
	} else {
		wait_in_kernel(rt);
	}
	rt->now_ns = rt->last_enter_ns = rt_clock_ns(CLOCK_MONOTONIC);
	if (rt->spin_ns)
		rt->spin_ewma_ns += (int64_t)(rt->now_ns - start_ns - rt->spin_ewma_ns) / 8;
	ring_reap(rt);
}
