/* SPDX-License-Identifier: MIT */
/* The ring: fallbacks, refusals, a full queue, how often the kernel is entered. */
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "rt/io.h"
#include "rt/sync.h"
#include "test_rt.h"

/* Refusals */

static void check_refusal(unsigned error, const char *reason, const char *way_out)
{
	struct err err = ERR_INIT;
	struct rt *rt = NULL;
	int status;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0) {
		if (!forbid_syscall(__NR_io_uring_setup, 0, (int)error))
			_exit(TEST_SKIPPED);
		CHECK_EQ(rt_create(NULL, &rt, &err), -(int)error);
		CHECK(rt == NULL);
		CHECK_EQ(err.code, -(int)error);
		if (!strstr(err.msg, reason) || !strstr(err.msg, way_out))
			test_fail("the message is: %s", err.msg);
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status));
	if (WEXITSTATUS(status) != TEST_SKIPPED)
		CHECK_EQ(WEXITSTATUS(status), 0);
}

static void a_forbidden_ring_says_why_and_what_to_do(void)
{
	check_refusal(EPERM, "forbidden", "seccomp");
	check_refusal(ENOSYS, "no io_uring", "Linux 5.11");
}

/* A full queue */

static int zero_fd;
static unsigned finished;

static co_fn void co_reads_thrice(void *arg)
{
	char buf[16];

	for (int i = 0; i < 3; i++)
		CHECK_EQ(co_io_read(zero_fd, buf, sizeof(buf), 0), 16);
	finished++;
}

static co_fn void co_floods(void *arg)
{
	for (int i = 0; i < 500; i++)
		CHECK_EQ(co_spawn("reader", co_reads_thrice, NULL), 0);
}

static void a_full_queue_loses_nothing(void)
{
	struct rt *rt = make_rt(&(struct rt_config){ .ring_entries = 2, .coroutines = 600 });
	struct rt_stats s;

	zero_fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	finished = 0;
	CHECK_EQ(rt_run(rt, co_floods, NULL), 0);
	CHECK_EQ(finished, 500u);
	rt_get_stats(rt, &s);
	CHECK(s.sqes >= 1500);
	close(zero_fd);
	rt_destroy(rt);
}

struct late {
	int fd;
	unsigned got;
};

static co_fn void co_waits_for_byte(void *arg)
{
	struct late *l = arg;
	char c;

	CHECK_EQ(co_io_recv(l->fd, &c, 1, 0), 1);
	l->got++;
}

/* More completions at one time than the completion queue holds. */
static co_fn void co_completes_all_at_once(void *arg)
{
	struct late l = { 0 };
	int fd[2];
	char bytes[400] = { 0 };

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	l.fd = fd[0];
	for (int i = 0; i < 400; i++)
		CHECK_EQ(co_spawn("late", co_waits_for_byte, &l), 0);
	co_sleep_ns(1000000);
	CHECK_EQ(l.got, 0u);
	CHECK_EQ(send(fd[1], bytes, sizeof(bytes), 0), 400);
	while (l.got < 400)
		co_sleep_ns(1000000);
	close(fd[0]);
	close(fd[1]);
}

static void a_flood_of_completions_loses_nothing(void)
{
	struct rt *rt = make_rt(&(struct rt_config){ .ring_entries = 2, .coroutines = 600 });

	CHECK_EQ(rt_run(rt, co_completes_all_at_once, NULL), 0);
	rt_destroy(rt);
}

/* Entering the kernel */

static co_fn void co_answers(void *arg)
{
	int fd = (int)(intptr_t)arg;
	char c;

	while (co_io_recv(fd, &c, 1, 0) == 1)
		CHECK_EQ(co_io_send(fd, &c, 1, 0), 1);
	close(fd);
}

static co_fn void co_asks(void *arg)
{
	int fd[2];
	char c = 'x';

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	CHECK_EQ(co_spawn("answers", co_answers, (void *)(intptr_t)fd[1]), 0);
	for (int i = 0; i < 1000; i++) {
		CHECK_EQ(co_io_send(fd[0], &c, 1, 0), 1);
		CHECK_EQ(co_io_recv(fd[0], &c, 1, 0), 1);
	}
	close(fd[0]);
}

static void one_enter_both_submits_and_waits(void)
{
	struct rt *rt = make_rt(NULL);
	struct rt_stats s;

	CHECK_EQ(rt_run(rt, co_asks, NULL), 0);
	rt_get_stats(rt, &s);
	CHECK(s.sqes >= 2000);
	/* Each direction of a round trip waits once. */
	if (!RUNNING_ON_VALGRIND)
		CHECK(s.ring_enters <= 2010);
	rt_destroy(rt);
}

static co_fn void co_reads_zero(void *arg)
{
	char buf[16];

	CHECK_EQ(co_io_read(zero_fd, buf, sizeof(buf), 0), 16);
}

static co_fn void co_batches(void *arg)
{
	for (int i = 0; i < 100; i++)
		CHECK_EQ(co_spawn("reader", co_reads_zero, NULL), 0);
}

static void operations_of_one_turn_share_an_enter(void)
{
	struct rt *rt = make_rt(NULL);
	struct rt_stats s;

	zero_fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	CHECK_EQ(rt_run(rt, co_batches, NULL), 0);
	rt_get_stats(rt, &s);
	CHECK(s.sqes >= 100);
	CHECK(s.ring_enters <= 10);
	close(zero_fd);
	rt_destroy(rt);
}

static co_fn void co_keeps_busy(void *arg)
{
	struct late l = { 0 };
	int fd[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	l.fd = fd[0];
	CHECK_EQ(co_spawn("late", co_waits_for_byte, &l), 0);
	co_sleep_ns(1000000);
	/* From here on something is always ready, and nothing is submitted. */
	CHECK_EQ(send(fd[1], "x", 1, 0), 1);
	while (!l.got)
		co_yield();
	close(fd[0]);
	close(fd[1]);
}

static void a_busy_reactor_still_sees_completions(void)
{
	on_real(co_keeps_busy, NULL);
}

static void spinning_changes_nothing_but_time(void)
{
	struct rt *rt = make_rt(&(struct rt_config){ .spin_ns = 20000 });

	CHECK_EQ(rt_run(rt, co_asks, NULL), 0);
	CHECK_EQ(rt_run(rt, co_completes_all_at_once, NULL), 0);
	rt_destroy(rt);
}

int main(void)
{
	RUN(a_forbidden_ring_says_why_and_what_to_do);
	RUN(a_full_queue_loses_nothing);
	RUN(a_flood_of_completions_loses_nothing);
	RUN(one_enter_both_submits_and_waits);
	RUN(operations_of_one_turn_share_an_enter);
	RUN(a_busy_reactor_still_sees_completions);
	RUN(spinning_changes_nothing_but_time);
	return 0;
}
