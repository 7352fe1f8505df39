/* SPDX-License-Identifier: MIT */
/* Guarded stacks: an overflow is caught at once, and named; stacks cost memory only when used. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "test_rt.h"

__attribute__((noinline))
static unsigned without_end(volatile char *above)
{
	volatile char frame[512];

	frame[0] = above ? above[0] : 1;
	if (!frame[0])
		return 0;
	return without_end(frame) + (unsigned)frame[0];
}

static co_fn void co_overflows(void *arg)
{
	exit((int)(without_end(NULL) & 1));
}

static co_fn void co_has_neighbours(void *arg)
{
	for (int i = 0; i < 3; i++)
		CHECK_EQ(co_spawn("glutton", co_overflows, NULL), 0);
	co_yield();
}

/* The child's exit status; what it wrote to stderr goes to `text`. */
static int in_child(struct rt *rt, co_entry *fn, char *text, size_t size)
{
	int fd[2], status;
	size_t n = 0;
	ssize_t r;
	pid_t pid;

	CHECK_EQ(pipe(fd), 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
		dup2(fd[1], STDERR_FILENO);
		close(fd[0]);
		close(fd[1]);
		rt_run(rt, fn, (void *)16);
		_exit(0);
	}
	close(fd[1]);
	while (n < size - 1 && (r = read(fd[0], text + n, size - 1 - n)) > 0)
		n += (size_t)r;
	text[n] = 0;
	close(fd[0]);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	return status;
}

static void check_overflow(struct rt *rt)
{
	char text[65536];
	int status = in_child(rt, co_has_neighbours, text, sizeof(text));

	if (SANITIZED || RUNNING_ON_VALGRIND) {
		/* The tool has a report and an exit status of its own. */
		CHECK(status != 0);
		return;
	}
	CHECK(WIFSIGNALED(status));
	CHECK_EQ(WTERMSIG(status), SIGSEGV);
	CHECK_STR(text, "weir: the stack of coroutine \"glutton\" has overflowed; this is a bug in weir\n");
}

static void an_overflow_is_caught_and_names_the_coroutine(void)
{
	struct rt *rt = make_sim(1);

	check_overflow(rt);
	rt_destroy(rt);
}

static co_fn void co_overflows_without_guard_install(void *arg)
{
	/* As before Linux 6.13: madvise() does not know MADV_GUARD_INSTALL. */
	if (!forbid_syscall(__NR_madvise, 102, EINVAL))
		_exit(0);
	co_has_neighbours(NULL);
}

static void an_overflow_is_caught_on_older_kernels_too(void)
{
	char text[65536];
	struct rt *rt = make_sim(1);
	int status = in_child(rt, co_overflows_without_guard_install, text, sizeof(text));

	if (!SANITIZED && !RUNNING_ON_VALGRIND && !WIFEXITED(status))
		CHECK(strstr(text, "\"glutton\" has overflowed"));
	rt_destroy(rt);
}

static co_fn void co_writes_wild(void *arg)
{
	*(volatile int *)arg = 1;
}

static void a_plain_crash_is_still_a_crash(void)
{
	char text[65536];
	struct rt *rt = make_sim(1);
	int status = in_child(rt, co_writes_wild, text, sizeof(text));

	CHECK(status != 0);
	CHECK(!strstr(text, "overflowed"));
	rt_destroy(rt);
}

static long resident_pages(void)
{
	long size, resident;
	FILE *f = fopen("/proc/self/statm", "r");

	CHECK(f && fscanf(f, "%ld %ld", &size, &resident) == 2);
	fclose(f);
	return resident;
}

static void unused_stacks_cost_no_memory(void)
{
	struct rt *rt;
	struct err err = ERR_INIT;
	long before = resident_pages();

	CHECK_EQ(rt_create_sim(&(struct rt_config){ .coroutines = 20000 }, 1, &rt, &err), 0);
	/* 1.25 GiB of stacks. */
	if (!SANITIZED && !RUNNING_ON_VALGRIND)
		CHECK(resident_pages() - before < 512);
	rt_destroy(rt);
}

static co_fn void co_rests(void *arg)
{
	co_sleep_ns(1000);
}

static co_fn void co_starts_thousands(void *arg)
{
	while (co_available())
		CHECK_EQ(co_spawn("rests", co_rests, NULL), 0);
	co_sleep_ns(10000);
}

static void thousands_of_stacks_fit_the_process(void)
{
	struct rt *rt;
	struct err err = ERR_INIT;
	long before = resident_pages();

	CHECK_EQ(rt_create_sim(&(struct rt_config){ .coroutines = SANITIZED ? 4000 : RUNNING_ON_VALGRIND ? 500 : 20000 }, 1, &rt, &err), 0);
	CHECK_EQ(rt_run(rt, co_starts_thousands, NULL), 0);
	/* One page of stack, and what goes with it. */
	if (!SANITIZED && !RUNNING_ON_VALGRIND)
		CHECK(resident_pages() - before < 20000 * 5 / 4 + 1000);
	rt_destroy(rt);
}

int main(void)
{
	RUN(an_overflow_is_caught_and_names_the_coroutine);
	RUN(an_overflow_is_caught_on_older_kernels_too);
	RUN(a_plain_crash_is_still_a_crash);
	RUN(unused_stacks_cost_no_memory);
	RUN(thousands_of_stacks_fit_the_process);
	return 0;
}
