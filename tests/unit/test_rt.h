/* SPDX-License-Identifier: MIT */
/* What the tests of the runtime share. */
#pragma once

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

#include "lib/test.h"
#include "rt/rt.h"
#include "util/err.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#if __has_include(<valgrind/valgrind.h>)
#include <valgrind/valgrind.h>
#else
#define RUNNING_ON_VALGRIND 0
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

static inline struct rt *make_rt(const struct rt_config *c)
{
	struct err err = ERR_INIT;
	struct rt *rt;

	if (rt_create(c, &rt, &err) < 0) {
		if (err.code == -EPERM || err.code == -ENOSYS)
			test_skip("%s", err.msg);
		test_fail("rt_create: %s", err.msg);
	}
	return rt;
}

static inline struct rt *make_sim(uint64_t seed)
{
	struct err err = ERR_INIT;
	struct rt *rt;

	if (rt_create_sim(NULL, seed, &rt, &err) < 0)
		test_fail("rt_create_sim: %s", err.msg);
	return rt;
}

/* Runs one function as the main coroutine of a fresh reactor. */
static inline void on_real(co_entry *fn, void *arg)
{
	struct rt *rt = make_rt(NULL);

	CHECK_EQ(rt_run(rt, fn, arg), 0);
	rt_destroy(rt);
}

static inline void on_sim(uint64_t seed, co_entry *fn, void *arg)
{
	struct rt *rt = make_sim(seed);

	CHECK_EQ(rt_run(rt, fn, arg), 0);
	rt_destroy(rt);
}

/* From now on the system call `nr` fails with `error`; if `arg2` is not 0, only where its third argument is that. */
static inline bool forbid_syscall(int nr, unsigned arg2, int error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)nr, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, arg2 ? offsetof(struct seccomp_data, args[2]) : offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, arg2 ? arg2 : (unsigned)nr, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { .len = 6, .filter = code };

	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0;
}
