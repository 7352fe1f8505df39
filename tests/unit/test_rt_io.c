/* SPDX-License-Identifier: MIT */
/* I/O on the ring: files, sockets, polling, shutdown. */
#include <fcntl.h>
#include <poll.h>
#include <sys/un.h>

#include "rt/io.h"
#include "rt/sync.h"
#include "test_rt.h"

static int temp_file(void)
{
	char path[] = "/tmp/weir-test-XXXXXX";
	int fd = mkstemp(path);

	CHECK(fd >= 0);
	unlink(path);
	return fd;
}

static co_fn void co_uses_a_file(void *arg)
{
	char a[4096], b[8192];
	struct iovec iov[2] = { { b, 1000 }, { b + 1000, sizeof(b) - 1000 } };
	int fd = temp_file();

	memset(a, 'a', sizeof(a));
	CHECK_EQ(co_io_write(fd, a, sizeof(a), 4096, RWF_DSYNC), 4096);
	CHECK_EQ(co_io_readv(fd, iov, 2, 0, 0), 8192);
	for (int i = 0; i < 8192; i++)
		CHECK_EQ(b[i], i < 4096 ? 0 : 'a');
	memset(b, 'b', 4096);
	CHECK_EQ(co_io_writev(fd, iov, 2, 0, 0), 8192);
	CHECK_EQ(co_io_writev(fd, iov, 1, 8192, 0), 1000);
	CHECK_EQ(co_io_read(fd, a, sizeof(a), 2), 4096);
	CHECK_EQ(a[4093], 'b');
	CHECK_EQ(a[4094], 'a');
	CHECK_EQ(co_io_read(fd, a, sizeof(a), 9000), 192);
	CHECK_EQ(co_io_read(fd, a, sizeof(a), 1 << 20), 0);
	CHECK_EQ(co_io_fsync(fd, true), 0);
	CHECK_EQ(co_io_fsync(fd, false), 0);
	CHECK_EQ(co_io_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
	CHECK_EQ(co_io_read(fd, a, 100, 0), 100);
	CHECK_EQ(a[50], 0);
	CHECK_EQ(co_io_close(fd), 0);
	CHECK_EQ(co_io_read(fd, a, 100, 0), -EBADF);
	CHECK_EQ(co_io_fsync(fd, true), -EBADF);
}

static void file_operations_do_what_the_system_calls_do(void)
{
	on_real(co_uses_a_file, NULL);
}

#define PAIR_BYTES (4u << 20)

static co_fn void co_echoes(void *arg)
{
	int fd = (int)(intptr_t)arg;
	static char buf[PAIR_BYTES];

	CHECK_EQ(co_io_recv_all(fd, buf, PAIR_BYTES), 0);
	CHECK_EQ(co_io_send_all(fd, buf, PAIR_BYTES), 0);
	CHECK_EQ(co_io_recv(fd, buf, 1, 0), 0);
	CHECK_EQ(co_io_recv_all(fd, buf, 1), -ECONNRESET);
	co_io_close(fd);
}

static co_fn int co_sends_pattern(void *arg)
{
	static char buf[PAIR_BYTES];
	struct iovec iov[5];

	for (unsigned i = 0; i < PAIR_BYTES; i++)
		buf[i] = (char)(i * 7 + i / 251);
	for (unsigned i = 0, at = 0; i < 5; i++) {
		unsigned n = i < 4 ? i * 1000 : PAIR_BYTES - at;

		iov[i] = (struct iovec){ buf + at, n };
		at += n;
	}
	return co_io_sendv_all((int)(intptr_t)arg, iov, 5);
}

static co_fn void co_talks_to_echo(void *arg)
{
	static char back[PAIR_BYTES];
	struct co_group g;
	int flags = arg ? SOCK_NONBLOCK : 0, fd[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0, fd), 0);
	CHECK_EQ(co_spawn("echo", co_echoes, (void *)(intptr_t)fd[1]), 0);
	co_group_init(&g);
	co_group_start(&g, "sender", co_sends_pattern, (void *)(intptr_t)fd[0]);
	CHECK_EQ(co_io_recv_all(fd[0], back, PAIR_BYTES), 0);
	CHECK_EQ(co_group_wait(&g), 0);
	for (unsigned i = 0; i < PAIR_BYTES; i++)
		CHECK_EQ(back[i], (char)(i * 7 + i / 251));
	CHECK_EQ(co_io_close(fd[0]), 0);
}

static void megabytes_cross_a_socket_whole(void)
{
	on_real(co_talks_to_echo, NULL);
}

static void nonblocking_sockets_are_waited_for(void)
{
	on_real(co_talks_to_echo, (void *)1);
}

static co_fn void co_sends_into_closed(void *arg)
{
	int fd[2];
	struct msghdr msg = { 0 };

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	close(fd[1]);
	CHECK_EQ(co_io_send(fd[0], "x", 1, 0), -EPIPE);
	CHECK_EQ(co_io_sendmsg(fd[0], &msg, 0), -EPIPE);
	close(fd[0]);
}

static void sending_to_a_closed_socket_is_an_error_and_no_signal(void)
{
	on_real(co_sends_into_closed, NULL);
}

/* Listening */

struct listener {
	int fd, accepted, result;
	struct sockaddr_un addr;
	bool done;
};

static void listen_on(struct listener *l)
{
	*l = (struct listener){ .addr.sun_family = AF_UNIX };
	l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* Autobind: an abstract name of the kernel's choice. */
	CHECK_EQ(bind(l->fd, (void *)&l->addr, sizeof(sa_family_t)), 0);
	CHECK_EQ(listen(l->fd, 10), 0);
}

static co_fn void co_accepts(void *arg)
{
	struct listener *l = arg;

	for (;;) {
		l->result = co_io_accept(l->fd, NULL, NULL);
		if (l->result < 0)
			break;
		CHECK(fcntl(l->result, F_GETFD) & FD_CLOEXEC);
		CHECK_EQ(co_io_send_all(l->result, "hi", 2), 0);
		co_io_close(l->result);
		l->accepted++;
	}
	l->done = true;
}

static co_fn void co_connects_twice_then_stops_listener(void *arg)
{
	struct listener l;
	struct sockaddr_un addr;
	socklen_t len = sizeof(addr);
	char buf[2];

	listen_on(&l);
	CHECK_EQ(getsockname(l.fd, (void *)&addr, &len), 0);
	CHECK_EQ(co_spawn("accept", co_accepts, &l), 0);
	for (int i = 0; i < 2; i++) {
		int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		CHECK_EQ(co_io_connect(fd, (void *)&addr, len), 0);
		CHECK_EQ(co_io_recv_all(fd, buf, 2), 0);
		CHECK(memcmp(buf, "hi", 2) == 0);
		close(fd);
	}
	co_sleep_ns(1000000);
	CHECK(!l.done);
	rt_io_shutdown(l.fd);
	while (!l.done)
		co_sleep_ns(100000);
	CHECK(l.result < 0);
	CHECK_EQ(l.accepted, 2);
	close(l.fd);
}

static void shutdown_ends_a_waiting_accept(void)
{
	on_real(co_connects_twice_then_stops_listener, NULL);
}

static co_fn void co_connects_to_nobody(void *arg)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX, .sun_path = "/nonexistent/socket" };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK_EQ(co_io_connect(fd, (void *)&addr, sizeof(addr)), -ENOENT);
	close(fd);
}

static void connect_reports_the_error(void)
{
	on_real(co_connects_to_nobody, NULL);
}

struct receiver {
	int fd;
	ssize_t result;
	bool done;
};

static co_fn void co_receives(void *arg)
{
	struct receiver *r = arg;
	char c;

	r->result = co_io_recv(r->fd, &c, 1, 0);
	r->done = true;
}

static co_fn void co_stops_receiver(void *arg)
{
	struct receiver r = { 0 };
	int fd[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	r.fd = fd[0];
	CHECK_EQ(co_spawn("receiver", co_receives, &r), 0);
	co_sleep_ns(1000000);
	CHECK(!r.done);
	rt_io_shutdown(fd[0]);
	while (!r.done)
		co_sleep_ns(100000);
	CHECK_EQ(r.result, 0);
	close(fd[0]);
	close(fd[1]);
}

static void shutdown_ends_a_waiting_receive_with_end_of_file(void)
{
	on_real(co_stops_receiver, NULL);
}

struct poller {
	int fd, result;
	bool done;
};

static co_fn void co_polls_for_ever(void *arg)
{
	struct poller *p = arg;

	p->result = co_io_poll(p->fd, POLLIN, 0);
	p->done = true;
}

static co_fn void co_stops_pollers(void *arg)
{
	struct poller p[2] = { 0 };
	int fd[2];

	/* Of two operations on one descriptor that knows no shutdown(2). */
	CHECK_EQ(pipe2(fd, O_CLOEXEC), 0);
	for (int i = 0; i < 2; i++) {
		p[i].fd = fd[0];
		CHECK_EQ(co_spawn("poller", co_polls_for_ever, &p[i]), 0);
	}
	co_sleep_ns(1000000);
	CHECK(!p[0].done && !p[1].done);
	rt_io_shutdown(fd[0]);
	while (!p[0].done || !p[1].done)
		co_sleep_ns(100000);
	CHECK_EQ(p[0].result, -ECANCELED);
	CHECK_EQ(p[1].result, -ECANCELED);
	close(fd[0]);
	close(fd[1]);
}

static void shutdown_ends_every_wait_on_a_descriptor(void)
{
	on_real(co_stops_pollers, NULL);
}

/* Polling */

static co_fn void co_polls(void *arg)
{
	uint64_t start = rt_now_exact_ns();
	int fd[2];

	CHECK_EQ(pipe2(fd, O_CLOEXEC), 0);
	CHECK_EQ(co_io_poll(fd[0], POLLIN, 3000000), -ETIMEDOUT);
	CHECK(rt_now_exact_ns() - start >= 3000000);
	CHECK_EQ(co_io_poll(fd[1], POLLOUT, 0), POLLOUT);
	CHECK_EQ(write(fd[1], "x", 1), 1);
	CHECK_EQ(co_io_poll(fd[0], POLLIN, UINT64_MAX), POLLIN);
	close(fd[1]);
	CHECK_EQ(co_io_poll(fd[0], POLLIN, 1), POLLIN | POLLHUP);
	close(fd[0]);
	CHECK_EQ(co_io_poll(fd[0], POLLIN, 1000000), -EBADF);
	/* Timers and operations that reuse one address do not meet. */
	CHECK_EQ(pipe2(fd, O_CLOEXEC), 0);
	for (int i = 0; i < 200; i++)
		CHECK_EQ(co_io_poll(fd[0], POLLIN, 1 + (uint64_t)i * 50), -ETIMEDOUT);
	close(fd[0]);
	close(fd[1]);
}

static void poll_waits_for_events_or_a_time(void)
{
	on_real(co_polls, NULL);
}

static co_fn void co_tries_io(void *arg)
{
	char c;

	CHECK_EQ(co_io_read(0, &c, 1, 0), -ENOSYS);
	CHECK_EQ(co_io_write(0, &c, 1, 0, 0), -ENOSYS);
	CHECK_EQ(co_io_fsync(0, true), -ENOSYS);
	CHECK_EQ(co_io_recv(0, &c, 1, 0), -ENOSYS);
	CHECK_EQ(co_io_send(0, &c, 1, 0), -ENOSYS);
	CHECK_EQ(co_io_poll(0, POLLIN, 0), -ENOSYS);
}

static void a_simulated_reactor_does_no_io(void)
{
	on_sim(1, co_tries_io, NULL);
}

int main(void)
{
	RUN(file_operations_do_what_the_system_calls_do);
	RUN(megabytes_cross_a_socket_whole);
	RUN(nonblocking_sockets_are_waited_for);
	RUN(sending_to_a_closed_socket_is_an_error_and_no_signal);
	RUN(shutdown_ends_a_waiting_accept);
	RUN(connect_reports_the_error);
	RUN(shutdown_ends_a_waiting_receive_with_end_of_file);
	RUN(shutdown_ends_every_wait_on_a_descriptor);
	RUN(poll_waits_for_events_or_a_time);
	RUN(a_simulated_reactor_does_no_io);
	return 0;
}
