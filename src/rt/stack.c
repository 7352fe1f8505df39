/* SPDX-License-Identifier: MIT */
/*
 * Guarded stacks for coroutines.
 *
 * One mapping holds all: guard page, stack, guard page, stack, ... so that the guard below a stack is also the end of the one below it.
 * Memory is touched when a stack is first used. Linux 6.13 has guards that cost no memory map (MADV_GUARD_INSTALL);
 * before it each stack in use costs two of the process's 65,530.
 *
 * A write into a guard page ends the process, after a message that names the coroutine: a handler for SIGSEGV on a
 * stack of its own writes it, unless somebody else (a sanitizer) has one.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rt/rt_int.h"

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

int stacks_init(struct stacks *s, unsigned n, size_t usable, struct err *err)
{
	s->page = (size_t)sysconf(_SC_PAGESIZE);
	s->usable = usable;
	s->n = n;
	s->map_len = n * (usable + s->page);
	s->map = mmap(NULL, s->map_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
	if (s->map == MAP_FAILED) {
		s->map = NULL;
		return err_errno(err, -ENOMEM, "%u coroutine stacks of %zu KiB", n, usable >> 10);
	}
	/* A huge page would make one touched stack cost as much as thirty. */
	madvise(s->map, s->map_len, MADV_NOHUGEPAGE);
	s->madvise_guards = true;
	return 0;
}

void stacks_fini(struct stacks *s)
{
	if (s->map)
		munmap(s->map, s->map_len);
	s->map = NULL;
	free(s->signal_stack);
}

void *stacks_prepare(struct stacks *s, unsigned i)
{
	char *guard = s->map + i * (s->usable + s->page);

	if (s->madvise_guards && madvise(guard, s->page, MADV_GUARD_INSTALL) == 0)
		return guard + s->page;
	s->madvise_guards = false;
	if (mprotect(guard, s->page, PROT_NONE) < 0)
		return NULL;
	return guard + s->page;
}

/* Overflow */

static void say(const char *text)
{
	if (write(STDERR_FILENO, text, strlen(text)) < 0)
		return;
}

static void report_overflow(int sig, siginfo_t *info, void *context)
{
	struct rt *rt = rt_current;

	if (rt) {
		const struct stacks *s = &rt->stacks;
		size_t at = (size_t)((char *)info->si_addr - s->map);

		if ((char *)info->si_addr >= s->map && at < s->map_len && at % (s->usable + s->page) < s->page) {
			say("weir: the stack of coroutine \"");
			say(rt->current->name);
			say("\" has overflowed; this is a bug in weir\n");
		}
	}
	/* Returning faults again, now with the default action. */
	signal(SIGSEGV, SIG_DFL);
}

void stacks_watch(struct stacks *s)
{
	struct sigaction sa = { .sa_sigaction = report_overflow, .sa_flags = SA_SIGINFO | SA_ONSTACK }, old;
	stack_t ss = { .ss_size = (size_t)SIGSTKSZ + 8192 };

	if (sigaction(SIGSEGV, NULL, &old) < 0 || (old.sa_sigaction != report_overflow && old.sa_handler != SIG_DFL))
		return;
	if (!s->signal_stack)
		s->signal_stack = malloc(ss.ss_size);
	ss.ss_sp = s->signal_stack;
	if (!ss.ss_sp || sigaltstack(&ss, &s->signal_stack_before) < 0)
		return;
	s->watching = true;
	sigaction(SIGSEGV, &sa, NULL);
}

void stacks_unwatch(struct stacks *s)
{
	if (s->watching)
		sigaltstack(&s->signal_stack_before, NULL);
	s->watching = false;
}
