// SPDX-License-Identifier: MIT
/*
 * Starts a program of somebody else a hundred times for the price of a few: preloaded into it, this waits in front of its main(), where it is loaded and linked,
 * and a child calls main() for each request. To be found by the dynamic linker is three quarters of what a `qemu-img check` of a small image costs.
 *
 * Standard input is a socket (SOCK_SEQPACKET) of the script that wants the program run, and its end is the end of this process. A request is the arguments,
 * each with a zero byte, together with four descriptors: the current folder and the three standard streams. The answers are the child's process id and, when
 * it has ended, what waitpid() says of it, each a native int.
 *
 * Or it is a socket that listens, for tools/quick_cc.c: then each connection has one request, and many are served at a time.
 *
 * Invariants:
 *  1. What main() sees differs in nothing from an ordinary start but its parent: the streams, folder and arguments of its own, no other descriptor, and an
 *     environment without this library.
 *  2. One request at a time, on one connection.
 *  3. A compiler (of a socket that listens) that was to make an object file ends with its main(), without what C++ destroys behind it: that takes as long as
 *     what is saved, and what it has to say it has written by then.
 *  4. Of a socket that listens: a child gets SIGTERM when its connection ends, or this process does.
 */
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BYTES = 128 << 10, MAX_ARGS = 8192, FDS = 4, MAX_CLIENTS = 256 };

static int (*real_main)(int argc, char **argv, char **envp);
static char request[MAX_BYTES + 1];
static char *args[MAX_ARGS + 1];

static int fail(const char *what)
{
	(void)!write(STDERR_FILENO, what, strlen(what));
	return 99;
}

/* The length of a request in `request`, with its descriptors; 0 at the end. */
static ssize_t receive(int from, int fds[FDS])
{
	char room[CMSG_SPACE(FDS * sizeof(int))];
	struct iovec iov = { request, MAX_BYTES };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *c;
	ssize_t n;

	do
		n = recvmsg(from, &msg, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return n;
	c = CMSG_FIRSTHDR(&msg);
	if (!c || c->cmsg_len != CMSG_LEN(FDS * sizeof(int)) || msg.msg_flags & MSG_TRUNC)
		return -1;
	memcpy(fds, CMSG_DATA(c), FDS * sizeof(int));
	request[n] = 0;
	return n;
}

static int parse(ssize_t length)
{
	int n = 0;

	for (char *p = request; p < request + length && n < MAX_ARGS; p += strlen(p) + 1)
		args[n++] = p;
	args[n] = NULL;
	return n;
}

static void enter(const int fds[FDS])
{
	if (fchdir(fds[0]))
		_exit(fail("quick_start: fchdir\n"));
	for (int i = 0; i < 3; i++)
		if (dup2(fds[1 + i], i) < 0)
			_exit(fail("quick_start: dup2\n"));
	for (int i = 0; i < FDS; i++)
		close(fds[i]);
}

/* --- A socket that listens --- */

static struct { pid_t pid; int fd, gone; } client[MAX_CLIENTS];
static int clients;
static sigset_t plain_mask;

static void nothing(int sig)
{
	(void)sig;
}

static void reap(void)
{
	int status, i;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		for (i = 0; i < clients && client[i].pid != pid; i++)
			;
		if (i == clients)
			continue;
		send(client[i].fd, &status, sizeof(status), MSG_NOSIGNAL);
		close(client[i].fd);
		client[i] = client[--clients];
	}
}

/* What it makes, nobody waits for any more. It is still to be reaped, so the process id is its own. */
static void end(int i)
{
	client[i].gone = 1;
	kill(client[i].pid, SIGTERM);
}

static int makes_object(char **argv)
{
	while (*argv && strcmp(*argv, "-c"))
		argv++;
	return *argv != NULL;
}

/* Runs main() in a child. Who cannot be served sees the end of the connection. */
static int begin(int s, char **envp)
{
	pid_t server = getpid();
	int fds[FDS], n, status;
	ssize_t length = receive(s, fds);
	pid_t pid = length > 0 ? fork() : -1;

	if (pid == 0) {
		close(STDIN_FILENO);
		close(s);
		for (int i = 0; i < clients; i++)
			close(client[i].fd);
		enter(fds);
		signal(SIGCHLD, SIG_DFL);
		sigprocmask(SIG_SETMASK, &plain_mask, NULL);
		prctl(PR_SET_PDEATHSIG, SIGTERM);
		if (getppid() != server)
			_exit(1);
		n = parse(length);
		status = real_main(n, args, envp);
		if (makes_object(args))
			_exit(status);
		exit(status);
	}
	for (int i = 0; i < FDS && length > 0; i++)
		close(fds[i]);
	if (pid < 0)
		return -1;
	send(s, &pid, sizeof(pid), MSG_NOSIGNAL);
	client[clients].pid = pid;
	client[clients].gone = 0;
	client[clients++].fd = s;
	return 0;
}

static int listens(void)
{
	int yes = 0;
	socklen_t len = sizeof(yes);

	return !getsockopt(STDIN_FILENO, SOL_SOCKET, SO_ACCEPTCONN, &yes, &len) && yes;
}

/* Ends with its parent. */
__attribute__((noreturn))
static void serve_all(char **envp)
{
	static struct pollfd p[1 + MAX_CLIENTS];
	sigset_t chld;
	int s;

	prctl(PR_SET_PDEATHSIG, SIGTERM);
	signal(SIGCHLD, nothing);
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, &plain_mask);
	for (;;) {
		reap();
		p[0] = (struct pollfd){ .fd = STDIN_FILENO, .events = clients < MAX_CLIENTS ? POLLIN : 0 };
		for (int i = 0; i < clients; i++)
			p[1 + i] = (struct pollfd){ .fd = client[i].gone ? -1 : client[i].fd };
		if (ppoll(p, 1 + clients, NULL, &plain_mask) < 1)
			continue;
		for (int i = 0; i < clients; i++)
			if (p[1 + i].revents)
				end(i);
		if (!(p[0].revents & POLLIN))
			continue;
		s = accept4(STDIN_FILENO, NULL, NULL, SOCK_CLOEXEC);
		if (s >= 0 && begin(s, envp) < 0)
			close(s);
	}
}

static int serve(int argc, char **argv, char **envp)
{
	int fds[FDS], status;
	ssize_t length;
	pid_t pid;

	(void)argc, (void)argv;
	unsetenv("LD_PRELOAD");
	unsetenv("LD_BIND_NOW");
	if (listens())
		serve_all(envp);
	while ((length = receive(STDIN_FILENO, fds)) > 0) {
		pid = fork();
		if (pid < 0)
			return fail("quick_start: fork\n");
		if (pid == 0) {
			enter(fds);
			return real_main(parse(length), args, envp);
		}
		for (int i = 0; i < FDS; i++)
			close(fds[i]);
		if (send(STDIN_FILENO, &pid, sizeof(pid), MSG_NOSIGNAL) < 0)
			return fail("quick_start: nobody waits for the program\n");
		while (waitpid(pid, &status, 0) < 0)
			if (errno != EINTR)
				return fail("quick_start: waitpid\n");
		send(STDIN_FILENO, &status, sizeof(status), MSG_NOSIGNAL);
	}
	return length ? fail("quick_start: a request is not understood\n") : 0;
}

int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
		      void (*rtld_fini)(void), void *stack_end);

/* What a program's first instructions call, in place of the C library's. */
int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
		      void (*rtld_fini)(void), void *stack_end)
{
	__typeof__(__libc_start_main) *real = dlsym(RTLD_NEXT, "__libc_start_main");

	real_main = main;
	return real(serve, argc, argv, init, fini, rtld_fini, stack_end);
}
