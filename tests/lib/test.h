/* SPDX-License-Identifier: MIT */
/*
 * What every test program uses. A failed check prints where and what, and ends the program with 1.
 *
 *	int main(void)
 *	{
 *		RUN(a_flush_covers_all_earlier_writes);
 *		return 0;
 *	}
 */
#pragma once

#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEST_SKIPPED 77

__attribute__((format(printf, 1, 2), noreturn))
static inline void test_fail(const char *fmt, ...)
{
	va_list ap;

	fflush(stdout);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	/* Not exit(): a leak report would hide the message, and threads may still run. */
	_exit(1);
}

/* Ends the program as skipped. The reason says what is missing, and is the last line. */
__attribute__((format(printf, 1, 2), noreturn))
static inline void test_skip(const char *fmt, ...)
{
	va_list ap;

	printf("skipped: ");
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	putchar('\n');
	fflush(stdout);
	_exit(TEST_SKIPPED);
}

#define CHECK(cond) \
	do { \
		if (!(cond)) \
			test_fail("%s:%d: %s: not true: %s", __FILE__, __LINE__, __func__, #cond); \
	} while (0)

/* Integers or pointers; a negative errno is best compared with `-EINVAL` and so on. */
#define CHECK_EQ(a, b) \
	do { \
		__auto_type check_a_ = (a); \
		__auto_type check_b_ = (b); \
		if (!(check_a_ == check_b_)) \
			test_fail("%s:%d: %s: %s is %lld (0x%llx), wanted %s = %lld (0x%llx)", \
				  __FILE__, __LINE__, __func__, #a, (long long)check_a_, (long long)check_a_, \
				  #b, (long long)check_b_, (long long)check_b_); \
	} while (0)

#define CHECK_STR(a, b) \
	do { \
		const char *check_a_ = (a), *check_b_ = (b); \
		if (!check_a_ || !check_b_ || strcmp(check_a_, check_b_)) \
			test_fail("%s:%d: %s: %s is \"%s\", wanted \"%s\"", __FILE__, __LINE__, __func__, #a, \
				  check_a_ ? check_a_ : "(null)", check_b_ ? check_b_ : "(null)"); \
	} while (0)

#define RUN(fn) \
	do { \
		printf("%s\n", #fn); \
		fflush(stdout); \
		fn(); \
	} while (0)

static inline uint64_t test_env_u64(const char *name, uint64_t fallback)
{
	const char *s = getenv(name);

	return s && *s ? strtoull(s, NULL, 0) : fallback;
}

/* The seed of a random test: WEIR_SEED, or the same one each time. Printed, so that a failure can be repeated. */
static inline uint64_t test_seed(void)
{
	uint64_t seed = test_env_u64("WEIR_SEED", 20260101);

	printf("WEIR_SEED=%" PRIu64 "\n", seed);
	fflush(stdout);
	return seed;
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

/* Memory that malloc() gives back comes back with a page fault for each page: half of them in the tests of the write log. */
#if defined(__GLIBC__) && !TEST_SANITIZED
#include <malloc.h>

__attribute__((constructor))
static void test_keep_memory(void)
{
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	mallopt(M_MMAP_THRESHOLD, 32 << 20);
	mallopt(M_TOP_PAD, 4 << 20);
}
#endif

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_SLOWER 20
#endif
#endif
#ifndef TEST_SLOWER
#define TEST_SLOWER (TEST_SANITIZED ? 8 : 1)
#endif

/*
 * How many rounds a random test does: `n`, an eighth of it under ASan and a twentieth under TSan, which make everything as much slower,
 * times WEIR_SCALE (a number, 1 if not set).
 */
static inline uint64_t test_scale(uint64_t n)
{
	return (TEST_SANITIZED ? n / TEST_SLOWER + 1 : n) * test_env_u64("WEIR_SCALE", 1);
}
