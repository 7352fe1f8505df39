/* SPDX-License-Identifier: MIT */
/*
 * Shared memory that may go away.
 *
 * The handler of SIGBUS looks the address up in a table that all threads share. A slot is filled before its length is
 * set and emptied in the opposite order, so the handler, which takes no lock, never sees half an entry; a thread faults
 * only in a mapping that it uses, and nobody unmaps what is in use.
 */
#include "rt/shm.h"

#include <errno.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/err.h"

#ifndef FUSE_SUPER_MAGIC
#define FUSE_SUPER_MAGIC 0x65735546
#endif

#define SLOTS 1024u

static struct slot {
	_Atomic(char *) base;
	_Atomic(size_t) len;	/* 0: free */
	_Atomic(bool *) lost;
} slots[SLOTS];
static _Atomic(unsigned) losses;
static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static bool watching;

static void handle_sigbus(int sig, siginfo_t *info, void *context)
{
	char *at = info->si_addr;
	int saved = errno;

	for (unsigned i = 0; i < SLOTS; i++) {
		struct slot *s = &slots[i];
		size_t len = atomic_load(&s->len);
		char *base = atomic_load(&s->base);

		if (!len || at < base || at >= base + len)
			continue;
		if (mmap(base, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
			break;
		atomic_store((_Atomic bool *)atomic_load(&s->lost), true);
		atomic_fetch_add(&losses, 1);
		errno = saved;
		return;
	}
	/* Not ours: the access faults again, and whoever was there before gets it. */
	sigaction(SIGBUS, &before, NULL);
	errno = saved;
}

static void watch(void)
{
	struct sigaction sa = { .sa_sigaction = handle_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK };

	if (!watching)
		sigaction(SIGBUS, &sa, &before);
	watching = true;
}

static int take_slot(struct rt_shm *m)
{
	int ret = -ENOSPC;

	pthread_mutex_lock(&slots_lock);
	watch();
	for (unsigned i = 0; i < SLOTS && ret < 0; i++) {
		struct slot *s = &slots[i];

		if (atomic_load(&s->len))
			continue;
		atomic_store(&s->base, m->base);
		atomic_store(&s->lost, &m->lost);
		atomic_store(&s->len, m->len);
		m->slot = i;
		ret = 0;
	}
	pthread_mutex_unlock(&slots_lock);
	return ret;
}

size_t rt_shm_page(int fd)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct statfs fs;

	if (!fstatfs(fd, &fs) && fs.f_type == HUGETLBFS_MAGIC && fs.f_bsize > 0)
		page = max(page, (size_t)fs.f_bsize);
	return page;
}

int rt_shm_map(struct rt_shm *m, int fd, uint64_t off, size_t len, struct err *err)
{
	struct stat st;
	struct statfs fs;
	void *p;

	*m = (struct rt_shm){ 0 };
	if (fstat(fd, &st) || fstatfs(fd, &fs))
		return err_errno(err, -errno, "shared memory");
	if ((uint32_t)fs.f_type == FUSE_SUPER_MAGIC)
		return err_set(err, -EACCES, "shared memory on a FUSE file system is refused: its server could stop this process");
	if (!len || off > INT64_MAX || len > INT64_MAX - off)
		return err_set(err, -EINVAL, "shared memory of %zu bytes at %llu", len, (unsigned long long)off);
	if (S_ISREG(st.st_mode) && (uint64_t)st.st_size < off + len)
		return err_set(err, -EINVAL, "shared memory of %llu bytes is shorter than the %llu that are to be mapped",
			       (unsigned long long)st.st_size, (unsigned long long)(off + len));
	p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)off);
	if (p == MAP_FAILED)
		return err_errno(err, -errno, "shared memory of %zu bytes cannot be mapped", len);
	madvise(p, len, MADV_DONTDUMP);
	m->base = p;
	m->len = len;
	if (!take_slot(m))
		return 0;
	munmap(p, len);
	m->base = NULL;
	return err_set(err, -ENOSPC, "too many pieces of shared memory (%u)", SLOTS);
}

void rt_shm_unmap(struct rt_shm *m)
{
	if (!m->base)
		return;
	pthread_mutex_lock(&slots_lock);
	atomic_store(&slots[m->slot].len, 0);
	pthread_mutex_unlock(&slots_lock);
	munmap(m->base, m->len);
	*m = (struct rt_shm){ 0 };
}

unsigned rt_shm_losses(void)
{
	return atomic_load_explicit(&losses, memory_order_relaxed);
}

void rt_shm_read(void *dst, const void *src, size_t len)
{
	memcpy(dst, src, len);
	__asm__ volatile("" : : "r"(dst) : "memory");
}
