// SPDX-License-Identifier: MIT
/*
 * Starts a program of somebody else a hundred times for the price of a few: preloaded into it, this waits in front of its main(), where it is loaded and linked,
 * and a child calls main() for each request. To be found by the dynamic linker is three quarters of what a `qemu-img check` of a small image costs.
 *
 * Standard input is a socket (SOCK_SEQPACKET) of the script that wants the program run, and its end is the end of this process. A request is the arguments,
 * each with a zero byte, together with four descriptors: the current folder and the three standard streams. The answers are the child's process id and, when
 * it has ended, what waitpid() says of it, each a native int.
 *
 * Invariants:
 *  1. What main() sees differs in nothing from an ordinary start but its parent: the streams, folder and arguments of its own, no other descriptor, and an
 *     environment without this library.
 *  2. One request at a time.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BYTES = 128 << 10, MAX_ARGS = 8192, FDS = 4 };

static int (*real_main)(int argc, char **argv, char **envp);
static char request[MAX_BYTES + 1];
static char *args[MAX_ARGS + 1];

static int fail(const char *what)
{
	(void)!write(STDERR_FILENO, what, strlen(what));
	return 99;
}

/* The length of a request in `request`, with its descriptors; 0 at the end. */
static ssize_t receive(int fds[FDS])
{
	char room[CMSG_SPACE(FDS * sizeof(int))];
	struct iovec iov = { request, MAX_BYTES };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *c;
	ssize_t n;

	do
		n = recvmsg(STDIN_FILENO, &msg, MSG_CMSG_CLOEXEC);
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

static int serve(int argc, char **argv, char **envp)
{
	int fds[FDS], status;
	ssize_t length;
	pid_t pid;

	(void)argc, (void)argv;
	unsetenv("LD_PRELOAD");
	while ((length = receive(fds)) > 0) {
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
