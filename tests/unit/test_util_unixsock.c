/* SPDX-License-Identifier: MIT */
/* Listening sockets in the place of others: of a process that lives, that has ended, and whose socket outlives it for a while. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "lib/test.h"
#include "util/err.h"
#include "util/unixsock.h"

static char folder[] = "/tmp/weir-unixsock-XXXXXX", path[64];

/* A socket that another process has made, which has ended if `gone`. Nobody accepts, and one connection fills its backlog. */
static int listener_of_another(bool gone, pid_t *pid)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), ready[2];
	char c;

	strcpy(sun.sun_path, path);
	CHECK(fd >= 0 && !pipe(ready));
	fflush(stdout);
	*pid = fork();
	if (!*pid) {
		/* Who listens is whoever calls listen(2). */
		if (bind(fd, (struct sockaddr *)&sun, sizeof(sun)) || listen(fd, 0) || write(ready[1], "r", 1) != 1)
			_exit(1);
		if (!gone)
			pause();
		_exit(0);
	}
	CHECK_EQ(read(ready[0], &c, 1), 1);
	close(ready[0]);
	close(ready[1]);
	if (gone)
		CHECK_EQ(waitpid(*pid, NULL, 0), *pid);
	return fd;
}

static int listen_there(void)
{
	struct unix_listener l;
	struct err err = ERR_INIT;
	int ret = unix_listen(path, NULL, 4, &l, &err);

	if (!ret)
		unix_unlisten(&l);
	else
		CHECK(strstr(err.msg, "another process listens there"));
	return ret;
}

static void a_socket_of_a_living_process_is_left_alone(void)
{
	pid_t pid;
	int fd = listener_of_another(false, &pid);

	CHECK_EQ(listen_there(), -EADDRINUSE);
	CHECK_EQ(listen_there(), -EADDRINUSE);
	kill(pid, SIGKILL);
	CHECK_EQ(waitpid(pid, NULL, 0), pid);
	close(fd);
	CHECK_EQ(listen_there(), 0);
}

/* As the kernel keeps it for an io_uring that it has not taken down yet; long enough to be asked often. */
static void one_that_outlives_its_process_is_waited_for(void)
{
	pid_t owner, pid;
	int fd = listener_of_another(true, &owner), status;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		close(fd);
		_exit(listen_there() != 0);
	}
	usleep(200000);
	CHECK_EQ(waitpid(pid, &status, WNOHANG), 0);
	close(fd);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
}

int main(void)
{
	CHECK(mkdtemp(folder));
	snprintf(path, sizeof(path), "%s/s", folder);
	RUN(a_socket_of_a_living_process_is_left_alone);
	RUN(one_that_outlives_its_process_is_waited_for);
	rmdir(folder);
	return 0;
}
