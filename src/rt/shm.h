/* SPDX-License-Identifier: MIT */
/*
 * Memory that another process shares with us and may change, or take away, at any moment.
 *
 * Every value is read once, with the functions below, and checked in the copy. Who shares a file can shrink it, and then each access
 * beyond its end raises SIGBUS: for a mapping made here the whole mapping is replaced by zeroed memory of our own, `lost` is
 * set, and the program goes on. The kernel's own accesses (read(2) into such memory) just fail with -EFAULT.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct err;

struct rt_shm {
	char *base;		/* NULL: not mapped */
	size_t len;
	bool lost;		/* set by the signal handler; read with rt_shm_lost() */
	unsigned slot;
};

/*
 * Maps `len` bytes at `off` of `fd` for reading and writing; both must be multiples of the file's page. Refuses what lies beyond the end of
 * a regular file and what a FUSE server backs (it could make every access wait). -EINVAL, -EACCES, -ENOMEM, -ENOSPC (1024 mappings).
 */
int rt_shm_map(struct rt_shm *m, int fd, uint64_t off, size_t len, struct err *err);
void rt_shm_unmap(struct rt_shm *m);	/* does nothing if it is not mapped */
/* The page size of what `fd` is: that of the huge pages on hugetlbfs. */
size_t rt_shm_page(int fd);

static inline bool rt_shm_lost(const struct rt_shm *m)
{
	return __atomic_load_n(&m->lost, __ATOMIC_RELAXED);
}

/* How many mappings were lost so far in this process: a cheap check whether to look closer. */
unsigned rt_shm_losses(void);

/* Copies from shared memory, each byte read once: a function of its own, so that no compiler reads the source again later. */
void rt_shm_read(void *dst, const void *src, size_t len);

static inline uint16_t shm_load16(const void *p)
{
	return __atomic_load_n((const uint16_t *)p, __ATOMIC_RELAXED);
}

static inline uint16_t shm_load16_acquire(const void *p)
{
	return __atomic_load_n((const uint16_t *)p, __ATOMIC_ACQUIRE);
}

static inline uint32_t shm_load32(const void *p)
{
	return __atomic_load_n((const uint32_t *)p, __ATOMIC_RELAXED);
}

static inline void shm_store32(void *p, uint32_t v)
{
	__atomic_store_n((uint32_t *)p, v, __ATOMIC_RELAXED);
}

static inline uint64_t shm_load64(const void *p)
{
	return __atomic_load_n((const uint64_t *)p, __ATOMIC_RELAXED);
}

static inline uint8_t shm_load8(const void *p)
{
	return __atomic_load_n((const uint8_t *)p, __ATOMIC_RELAXED);
}

static inline void shm_store8_release(void *p, uint8_t v)
{
	__atomic_store_n((uint8_t *)p, v, __ATOMIC_RELEASE);
}

static inline void shm_store16(void *p, uint16_t v)
{
	__atomic_store_n((uint16_t *)p, v, __ATOMIC_RELAXED);
}

static inline void shm_store16_release(void *p, uint16_t v)
{
	__atomic_store_n((uint16_t *)p, v, __ATOMIC_RELEASE);
}

static inline void shm_store64(void *p, uint64_t v)
{
	__atomic_store_n((uint64_t *)p, v, __ATOMIC_RELAXED);
}

static inline void shm_or8_release(void *p, uint8_t bits)
{
	__atomic_fetch_or((uint8_t *)p, bits, __ATOMIC_RELEASE);
}

/*
 * For memory that outlives this process: all stores that come before in the program are made before this one, and all later ones behind it, wherever
 * SIGKILL falls. (What a killed thread has executed is visible to who comes after it; only the compiler's order is in question.)
 */
static inline void shm_publish64(uint64_t *p, uint64_t v)
{
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(p, v, __ATOMIC_RELAXED);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static inline void shm_publish32(uint32_t *p, uint32_t v)
{
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(p, v, __ATOMIC_RELAXED);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* Orders all earlier stores before all later loads. */
static inline void shm_fence(void)
{
#if defined(__SANITIZE_THREAD__)
	static int order;

	__atomic_fetch_add(&order, 1, __ATOMIC_SEQ_CST);
#else
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
