// SPDX-License-Identifier: MIT
/*
 * `quick_cc clang ARGUMENT...` is `clang ARGUMENT...`, run by a process in which clang is loaded and linked already (quick_start.c, which says how the two speak).
 * WEIR_QUICK_CC is where that listens; where there is none, clang is started the ordinary way. tools/run-checks has the reason and the figures.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BYTES = 128 << 10, FDS = 4 };

static int connect_to(const char *path)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int s;

	if (!path || strlen(path) >= sizeof(to.sun_path))
		return -1;
	strcpy(to.sun_path, path);
	s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (s >= 0 && connect(s, (struct sockaddr *)&to, sizeof(to)) < 0) {
		close(s);
		return -1;
	}
	return s;
}

/* The arguments, each with its zero byte; 0 if there are too many. */
static size_t pack(char **argv, char *to)
{
	size_t n = 0, len;

	for (; *argv; argv++, n += len) {
		len = strlen(*argv) + 1;
		if (len > MAX_BYTES - n)
			return 0;
		memcpy(to + n, *argv, len);
	}
	return n;
}

static int ask(int s, char **argv)
{
	static char request[MAX_BYTES];
	int fds[FDS] = { open(".", O_PATH | O_DIRECTORY | O_CLOEXEC), STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO };
	char room[CMSG_SPACE(sizeof(fds))] = { 0 };
	struct iovec iov = { request, pack(argv, request) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

	if (fds[0] < 0 || !iov.iov_len)
		return -1;
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(c), fds, sizeof(fds));
	return sendmsg(s, &msg, MSG_NOSIGNAL) == (ssize_t)iov.iov_len ? 0 : -1;
}

int main(int argc, char **argv)
{
	int s, number;

	if (argc < 2) {
		fprintf(stderr, "usage: %s COMPILER [ARGUMENT...]\n", argv[0]);
		return 2;
	}
	s = connect_to(getenv("WEIR_QUICK_CC"));
	/* The first answer says that it has begun: until then nothing has been done. */
	if (s < 0 || ask(s, argv + 1) < 0 || recv(s, &number, sizeof(number), 0) != sizeof(number)) {
		execvp(argv[1], argv + 1);
		perror(argv[1]);
		return 127;
	}
	if (recv(s, &number, sizeof(number), 0) != sizeof(number)) {
		fprintf(stderr, "%s: the process that runs it is gone\n", argv[1]);
		return 1;
	}
	return WIFEXITED(number) ? WEXITSTATUS(number) : 128 + WTERMSIG(number);
}
