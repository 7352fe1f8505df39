/* SPDX-License-Identifier: MIT */
/* What the tests of the runtime share. */
#pragma once

#include <errno.h>

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
