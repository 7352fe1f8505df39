/* SPDX-License-Identifier: MIT */
/*
 * Guarded stacks for coroutines.
 *
 * One mapping holds all: guard page, stack, guard page, stack, ... so that the guard below a stack is also the end of the one below it.
 * Memory is touched when a stack is first used. Linux 6.13 has guards that cost no memory map (MADV_GUARD_INSTALL);
 * before it each stack in use costs two of the process's 65,530.
 */
#include <errno.h>
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
