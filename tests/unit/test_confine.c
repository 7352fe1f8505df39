/* SPDX-License-Identifier: MIT */
/* What a process that has given up its rights cannot do any more. Each test gives them up in a child of its own. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "daemon/confine.h"
#include "lib/test.h"
#include "rt/rt_int.h"
#include "util/err.h"
#include "util/log.h"

static char folder[] = "/tmp/weir-confine-XXXXXX", file[64], unix_path[64];

/* fn() in a child; what it says on standard error goes to `said`. */
static void in_child(void (*fn)(void), char *said, size_t size)
{
	int p[2], status;
	size_t n = 0;
	ssize_t got;
	pid_t pid;

	CHECK(!pipe(p));
	fflush(stdout);
	pid = fork();
	if (!pid) {
		dup2(p[1], STDERR_FILENO);
		close(p[0]);
		close(p[1]);
		fn();
		_exit(0);
	}
	close(p[1]);
	while (n < size - 1 && (got = read(p[0], said + n, size - 1 - n)) > 0)
		n += got;
	said[n] = '\0';
	close(p[0]);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	if (status)
		test_fail("a child ended with status 0x%x: %s", status, said);
}

static int try_open(void *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	close(fd);
	return 0;
}

static int fails_with(long ret)
{
	return ret < 0 ? -errno : 0;
}

/* What comes to the ring behind the back of the filter. */
static void the_ring_opens_nothing(struct rt *rt)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&rt->ring);
	struct io_uring_cqe *cqe;

	io_uring_prep_openat(sqe, AT_FDCWD, file, O_RDONLY, 0);
	io_uring_sqe_set_data(sqe, NULL);
	CHECK(io_uring_submit_and_wait(&rt->ring, 1) >= 0);
	CHECK(!io_uring_peek_cqe(&rt->ring, &cqe));
	CHECK_EQ(cqe->res, -EACCES);
	io_uring_cqe_seen(&rt->ring, cqe);
}

static void no_call_that_is_not_on_the_list(void)
{
	char *argv[] = { (char *)"true", NULL }, *env[] = { NULL };
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int s = socket(AF_UNIX, SOCK_STREAM, 0);

	CHECK_EQ(fails_with(execve("/bin/true", argv, env)), -EPERM);
	CHECK_EQ(fails_with(fork()), -EPERM);
	CHECK_EQ(fails_with(ptrace(PTRACE_TRACEME, 0, 0, 0)), -EPERM);
	CHECK_EQ(fails_with(syscall(__NR_io_uring_setup, 8, NULL)), -EPERM);
	CHECK_EQ(fails_with(unshare(CLONE_NEWUSER)), -EPERM);
	CHECK_EQ(fails_with(socket(AF_PACKET, SOCK_RAW, 0)), -EPERM);
	CHECK_EQ(fails_with(chmod(file, 0777)), -EPERM);
	strcpy(sun.sun_path, unix_path);
	CHECK(s >= 0);
	CHECK_EQ(fails_with(listen(s, 1)), -EPERM);
	close(s);
}

static co_fn void co_confined(void *arg)
{
	struct rt *rt = rt_self();
	struct confine_config c = { .sandbox = true, .write = { folder } };
	struct err err = ERR_INIT;
	struct confined done;

	/* A worker that is there already, and is not bound by what comes. */
	CHECK_EQ(co_offload(try_open, (void *)"/dev/null"), 0);
	if (confine(rt, &c, &done, &err) < 0)
		test_fail("%s", err.msg);
	if (done.landlock) {
		CHECK_EQ(try_open((void *)"/dev/null"), -EACCES);
		CHECK_EQ(fails_with(open("/etc/passwd", O_RDONLY)), -EACCES);
		for (int i = 0; i < 5; i++)
			CHECK_EQ(co_offload(try_open, (void *)"/dev/null"), -EACCES);
		CHECK_EQ(fails_with(open(unix_path, O_CREAT | O_WRONLY, 0600)), -EACCES);
		CHECK_EQ(fails_with(unlink(file)), -EACCES);
	}
	CHECK_EQ(try_open(file), 0);
	CHECK_EQ(co_offload(try_open, file), 0);
	the_ring_opens_nothing(rt);
	if (done.seccomp)
		no_call_that_is_not_on_the_list();
}

static void run_confined(void)
{
	struct err err = ERR_INIT;
	struct rt *rt;

	CHECK(!rt_create(NULL, &rt, &err));
	CHECK_EQ(rt_run(rt, co_confined, NULL), 0);
	rt_destroy(rt);
}

static void in_the_sandbox_nothing_else_is_opened_started_or_listened_on(void)
{
	char said[4096], want[64];

	in_child(run_confined, said, sizeof(said));
	snprintf(want, sizeof(want), "system call %d is refused", (int)SYS_execve);
	if (!strstr(said, "no Landlock") && !strstr(said, "without libseccomp") && !strstr(said, want))
		test_fail("no '%s' in: %s", want, said);
}

static int try_program(void *arg)
{
	char *argv[] = { (char *)"true", NULL }, *env[] = { NULL };

	return fails_with(execve("/bin/true", argv, env));
}

static int try_process(void *arg)
{
	return fails_with(fork());
}

static co_fn void co_beside_a_library(void *arg)
{
	struct confine_config c = { .deny_list = true };
	struct err err = ERR_INIT;
	struct confined done;

	/* The library's thread, which was there before. */
	CHECK_EQ(co_offload(try_open, (void *)"/dev/null"), 0);
	if (confine(NULL, &c, &done, &err) < 0)
		test_fail("%s", err.msg);
	CHECK_EQ(done.landlock, 0);
	CHECK_EQ(co_offload(try_open, (void *)"/etc/passwd"), 0);
	if (!done.seccomp)
		return;
	CHECK_EQ(co_offload(try_program, NULL), -EPERM);
	CHECK_EQ(co_offload(try_process, NULL), -EPERM);
	CHECK_EQ(fails_with(ptrace(PTRACE_TRACEME, 0, 0, 0)), -EPERM);
	CHECK_EQ(fails_with(unshare(CLONE_NEWUSER)), -EPERM);
	CHECK_EQ(fails_with(syscall(__NR_io_uring_setup, 8, NULL)), -EPERM);
	CHECK_EQ(fails_with(chmod(file, 0600)), 0);
	CHECK(!rt_renew_workers(rt_self()));
	CHECK_EQ(co_offload(try_program, NULL), -EPERM);	/* a thread that was started since */
}

static void run_beside_a_library(void)
{
	struct err err = ERR_INIT;
	struct rt *rt;

	CHECK(!rt_create(NULL, &rt, &err));
	CHECK_EQ(rt_run(rt, co_beside_a_library, NULL), 0);
	rt_destroy(rt);
}

static void beside_a_library_with_threads_no_program_is_started_by_any_thread(void)
{
	char said[4096];

	in_child(run_beside_a_library, said, sizeof(said));
	if (strstr(said, "refused"))
		test_fail("told: %s", said);
}

static void become_nobody(void)
{
	struct confine_config c = { .user = "65534" };
	struct err err = ERR_INIT;
	struct confined done;
	char line[256];
	gid_t groups[64];
	FILE *f;

	if (confine(NULL, &c, &done, &err) < 0)
		test_fail("%s", err.msg);
	CHECK_EQ(getuid(), 65534);
	CHECK(setuid(0) < 0 && seteuid(0) < 0 && setgid(0) < 0);
	for (int i = getgroups(64, groups); i > 0; i--)
		CHECK(groups[i - 1] != 0);
	f = fopen("/proc/self/status", "r");
	while (f && fgets(line, sizeof(line), f)) {
		if (!strncmp(line, "Cap", 3))
			CHECK(strstr(line, "0000000000000000"));
		if (!strncmp(line, "NoNewPrivs", 10))
			CHECK(strstr(line, "1"));
	}
	fclose(f);
	/* And it is not root who could take another user. */
	c.user = "root";
	CHECK_EQ(confine(NULL, &c, &done, &err), -EPERM);
	CHECK(strstr(err.msg, "only root"));
}

static void another_user_is_taken_for_good(void)
{
	char said[1024];

	if (!geteuid())
		in_child(become_nobody, said, sizeof(said));
}

static void what_cannot_be_had_is_an_error(void)
{
	struct confine_config c = { .user = "no-such-user" }, d = { .sandbox = true, .write = { "/nowhere/at/all" } };
	struct err err = ERR_INIT;
	struct confined done;

	CHECK_EQ(confine(NULL, &c, &done, &err), -EINVAL);
	CHECK(strstr(err.msg, "no-such-user"));
	err_clear(&err);
	if (syscall(SYS_landlock_create_ruleset, NULL, 0, 1) > 0) {
		CHECK_EQ(confine(NULL, &d, &done, &err), -ENOENT);
		CHECK(strstr(err.msg, "/nowhere/at/all"));
	}
}

int main(void)
{
	int fd;

	CHECK(mkdtemp(folder) != NULL);
	snprintf(file, sizeof(file), "%s/file", folder);
	snprintf(unix_path, sizeof(unix_path), "%s/new", folder);
	fd = open(file, O_CREAT | O_RDWR, 0600);
	CHECK(fd >= 0);
	close(fd);
	RUN(in_the_sandbox_nothing_else_is_opened_started_or_listened_on);
	RUN(beside_a_library_with_threads_no_program_is_started_by_any_thread);
	RUN(another_user_is_taken_for_good);
	RUN(what_cannot_be_had_is_an_error);
	unlink(file);
	rmdir(folder);
	return 0;
}
