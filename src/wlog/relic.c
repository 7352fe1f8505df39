/* SPDX-License-Identifier: MIT */
/*
 * Write log: keeping the memory ring for who comes after a kill. relic.h has the invariants; relic_complete.c is who comes after.
 *
 * Where there is less room than the ring wants, the ring ends where the room does (w->mem_end), from the start or later, when others have taken it. A request that does not fit such a
 * ring ends it: the rest of the ring is then memory of our own, and nothing survives a kill any more.
 */
#include "wlog/relic.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "util/size.h"
#include "wlog/internal.h"

#define LOCK_WAIT_NS 10000000000ull
#define LOCK_POLL_NS 20000000ull
#define REST_NS 10000000000ull	/* without a write, before memory is given back: its pages are small, and dear to get again */

const char wl_relic_magic[8] = { 'W', 'E', 'I', 'R', 'R', 'L', 'I', 'C' };

struct wl_relic_layout wl_relic_layout(uint64_t mem_size)
{
	struct wl_relic_layout l = { .slots = mem_size / WL_BLOCK + 2 };

	l.desc = align_up(WL_BLOCK + (uint64_t)l.slots * sizeof(struct wl_relic_slot), WL_BLOCK);
	l.ring = l.desc + WL_MAX_BATCH;
	l.size = l.ring + mem_size;
	return l;
}

static uint64_t ring_size(uint64_t memory)
{
	return align_up(max(memory, WL_MEM_MIN), WL_BLOCK);
}

uint64_t wl_relic_size(uint64_t memory)
{
	return wl_relic_layout(ring_size(memory ? memory : WL_MEM_DEFAULT)).size;
}

uint64_t wl_relic_overhead(const struct wlog *w)
{
	return w->relic.head ? wl_relic_layout(w->mem_size).desc : 0;
}

uint64_t wlog_shared_memory(const struct wlog *w)
{
	return w->relic.kept && w->relic.fd >= 0 ? WL_BLOCK + w->relic.reserved : 0;
}

const char *wlog_relic_dir(void)
{
	const char *dir = getenv("WEIR_SHM_DIR");

	return dir && *dir ? dir : "/dev/shm";
}

void wl_relic_boot_id(char *buf, size_t size)
{
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, buf, size - 1);

	memset(buf + max(n, (ssize_t)0), 0, size - max(n, (ssize_t)0));
	if (fd >= 0)
		close(fd);
}

static void make_path(char *buf, size_t size, const char *dir, const struct uuid *log)
{
	char uuid[37];

	snprintf(buf, size, "%s/weir-log-%s", dir, uuid_format(log, uuid));
}

bool wlog_relic_left(const char *dir, const struct uuid *log, char *path, size_t size)
{
	struct stat st;

	make_path(path, size, dir, log);
	return lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0;
}

void wl_relic_forget(const char *dir, const struct uuid *log)
{
	char path[256];

	make_path(path, sizeof(path), dir, log);
	unlink(path);
}

/* Once for a log: that it goes on without, why, and the way out. */
static void go_without(struct wlog *w, const struct err *why)
{
	struct wl_relic *k = &w->relic;

	if (!k->told)
		log_warn("write log: %s: %s. Without it, what was acknowledged and not flushed is lost if this server is killed, also for a guest that lives on: stop it in "
			 "order", k->path, why->msg);
	k->told = true;
	k->kept = false;
	w->mem_end = w->mem_size;
	/* The lock stays as long as any of the file is mapped: who had it would empty the file, and our next store be the end of the process. */
	if (k->fd >= 0 && !k->head) {
		close(k->fd);
		k->fd = -1;
	}
}

/* --- The file --- */

/* Ours alone: who else could write it would write our log. */
static int check_ours(const struct stat *st, struct err *why)
{
	unsigned mode = st->st_mode & 07777, us = geteuid();

	if (S_ISLNK(st->st_mode))
		return err_set(why, -EPERM, "is a symbolic link, which is not followed; remove it");
	if (!S_ISREG(st->st_mode))
		return err_set(why, -EPERM, "is not a file, and is not used; remove it");
	if (st->st_uid != us)
		return err_set(why, -EPERM, "belongs to user %u, and this server runs as user %u: it is not used. If a server that ran as user %u was killed, its last writes are "
			       "in it: start this one as that user to have them, or remove the file to lose them", st->st_uid, us, st->st_uid);
	if (mode != 0600)
		return err_set(why, -EPERM, "has mode %04o where ours have 0600, so that others may have written to it: it is not used; remove it", mode);
	if (st->st_nlink > 1)
		return err_set(why, -EPERM, "has %u names where ours have one: it is not used; remove it", (unsigned)st->st_nlink);
	return 0;
}

static int cannot_open(const char *path, int error, struct err *why)
{
	struct stat st;
	int r = lstat(path, &st) == 0 ? check_ours(&st, why) : 0;

	if (r < 0)
		return r;
	if (error == -EACCES || error == -EPERM)
		return err_set(why, error, "cannot be opened by user %u (%s); let that user make files in this folder", geteuid(), strerror(-error));
	if (error == -ENOENT)
		return err_set(why, error, "there is no such folder; make one in memory (tmpfs)");
	return err_errno(why, error, "cannot be opened");
}

static int open_file(const char *path, struct err *why)
{
	struct stat st;
	/* Not O_CREAT alone: of another user's file in such a folder the kernel then says EACCES, even to root. */
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

	if (fd >= 0) {
		(void)fchmod(fd, 0600);		/* whatever the umask */
	} else if (errno == EEXIST) {
		fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		if (fd < 0 && errno == ENOENT)
			return -EAGAIN;
	}
	if (fd < 0)
		return cannot_open(path, -errno, why);
	int r = fstat(fd, &st) < 0 ? err_errno(why, -errno, "cannot be looked at") : st.st_nlink == 0 ? -EAGAIN : check_ours(&st, why);

	if (r < 0) {
		close(fd);
		return r;
	}
	return fd;
}

/* A process that was killed a moment ago may still hold it. */
static co_fn int co_lock_file(struct wlog *w, struct err *why)
{
	struct wl_relic *k = &w->relic;
	uint64_t deadline = rt_now_ns() + LOCK_WAIT_NS;
	struct stat st;

	for (;;) {
		int fd = open_file(k->path, why);

		if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) {
			/* Nobody has removed it meanwhile. */
			if (fstat(fd, &st) == 0 && st.st_nlink == 1) {
				k->fd = fd;
				return 0;
			}
		} else if (fd >= 0 && errno != EWOULDBLOCK) {
			int r = err_errno(why, -errno, "cannot be locked");

			close(fd);
			return r;
		} else if (fd < 0 && fd != -EAGAIN) {
			return fd;
		}
		if (fd >= 0)
			close(fd);
		if (rt_now_ns() >= deadline)
			return -EBUSY;
		co_sleep_ns(LOCK_POLL_NS);
	}
}

int wl_relic_fetch(struct wlog *w, uint64_t off, void *buf, uint64_t len)
{
	if (w->config.relic_mem) {
		memcpy(buf, (uint8_t *)w->config.relic_mem + off, len);
		return 0;
	}
	ssize_t n = pread(w->relic.fd, buf, len, off);

	return n < 0 ? -errno : (uint64_t)n == len ? 0 : -EBADMSG;
}

int wl_relic_store64(struct wlog *w, uint64_t off, uint64_t value)
{
	if (w->config.relic_mem) {
		memcpy((uint8_t *)w->config.relic_mem + off, &value, sizeof(value));
		return 0;
	}
	return pwrite(w->relic.fd, &value, sizeof(value), off) == sizeof(value) ? 0 : -EIO;
}

co_fn int co_wl_relic_take(struct wlog *w, struct err *err)
{
	struct wl_relic *k = &w->relic;
	struct err why = ERR_INIT;
	struct stat st;

	if (w->config.relic_mem) {
		snprintf(k->path, sizeof(k->path), "memory of the test");
		return co_wl_relic_complete(w, wl_relic_size(w->config.memory), err);
	}
	if (!w->config.relic_dir)
		return 0;
	make_path(k->path, sizeof(k->path), w->config.relic_dir, &w->sb.uuid);
	int r = co_lock_file(w, &why);

	if (r == -EBUSY)
		return err_set(err, r, "write log: %s is in use by another process; is a copy of this log open? Stop the other one", k->path);
	if (r < 0) {
		go_without(w, &why);
		return 0;
	}
	if (fstat(k->fd, &st) < 0)
		return err_errno(err, -errno, "write log: %s", k->path);
	return co_wl_relic_complete(w, (uint64_t)st.st_size, err);
}

/* --- Keeping --- */

/* Memory for bytes [from, to) of the file, now: later there might be none, and a store would be the end of the process. */
static int take_memory(struct wl_relic *k, uint64_t from, uint64_t to)
{
	if (k->fd < 0)
		return 0;
	int r;

	do
		r = fallocate(k->fd, 0, from, to - from) < 0 ? -errno : 0;
	while (r == -EINTR);	/* work of io_uring for this thread is enough for that */
	return r;
}

/* The same for the ring, with its pages: a hundred faults cost more than one call. */
static int take_ring(struct wlog *w, uint64_t from, uint64_t to)
{
	struct wl_relic *k = &w->relic;
	uint64_t ring = wl_relic_layout(w->mem_size).ring;
	int r = take_memory(k, ring + from, ring + to);

	if (r == 0 && k->fd >= 0)
		(void)madvise((uint8_t *)k->head + ring + from, to - from, MADV_POPULATE_WRITE);
	return r;
}

static int map_file(struct wl_relic *k, uint64_t size, uint8_t **ret)
{
	/* What it held is in the log. */
	if (ftruncate(k->fd, 0) < 0 || ftruncate(k->fd, size) < 0)
		return -errno;
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, k->fd, 0);

	if (p == MAP_FAILED)
		return -errno;
	*ret = p;
	return 0;
}

/* Of the folder that `fd` lies in, as it is now. */
static uint64_t room_left(int fd)
{
	struct statvfs st;

	if (fd < 0 || fstatvfs(fd, &st) < 0 || st.f_blocks == 0)	/* no limit */
		return UINT64_MAX;
	return (uint64_t)st.f_bavail * st.f_frsize;
}

/* Once for a log. */
static void tell_smaller(struct wlog *w)
{
	struct wl_relic *k = &w->relic;
	char has[16], would[16];

	if (!k->told)
		log_warn("write log: %s: there is memory for %s of the %s that the log would use there, and it goes on with that: what was acknowledged survives a kill of this "
			 "server as ever, and writes that come faster than the log's device takes them wait for it sooner. To have all, make that folder larger (of a "
			 "container: --shm-size)", k->path, size_format(w->mem_end, has), size_format(w->mem_size, would));
	k->told = true;
}

/* How much of the ring there is room for, and the first of it. */
static int take_first(struct wlog *w)
{
	struct wl_relic *k = &w->relic;
	uint64_t ring = wl_relic_layout(w->mem_size).ring, room = room_left(k->fd);

	k->limit = room < ring + w->mem_size ? align_down(room - min(room, ring), WL_BLOCK) : w->mem_size;
	k->floor = min(k->limit < w->mem_size ? WL_MEM_MIN : (uint64_t)WL_RELIC_CHUNK, w->mem_size);
	if (k->limit < k->floor)
		return -ENOSPC;
	int r = take_memory(k, 0, ring);

	if (r == 0)
		r = take_ring(w, 0, k->floor);
	k->reserved = k->floor;
	return r;
}

static int map_relic(struct wlog *w, uint64_t size, uint8_t **ret)
{
	struct wl_relic *k = &w->relic;
	int r = 0;

	*ret = w->config.relic_mem;
	if (!*ret)
		r = map_file(k, size, ret);
	if (r < 0)
		return r;
	k->head = (struct wl_relic_head *)*ret;
	if (k->fd >= 0)
		(void)madvise(*ret + wl_relic_layout(w->mem_size).ring, w->mem_size, MADV_HUGEPAGE);
	r = take_first(w);
	if (r < 0) {
		munmap(*ret, size);
		k->head = NULL;
	}
	return r;
}

/* The last batch that is on the device, for who compares: invariant (6). */
static void note_last(struct wlog *w)
{
	struct wl_relic *k = &w->relic;
	const struct wl_batch *b = list_empty(&w->batches) ? NULL : list_last(&w->batches, struct wl_batch, node);

	if (b)
		k->slot[b->seq % k->slots] = (struct wl_relic_slot){ .pos = b->pos, .nonce = b->nonce, .length = b->length };
	else
		k->slot[(w->next_seq - 1) % k->slots] = (struct wl_relic_slot){ 0 };
}

void wl_relic_begin(struct wlog *w)
{
	struct wl_relic *k = &w->relic;
	struct wl_relic_layout l = wl_relic_layout(w->mem_size);
	struct err why = ERR_INIT;
	char room[16], need[16];
	uint8_t *p;

	if (!w->config.relic_mem && k->fd < 0)
		return;
	int r = map_relic(w, l.size, &p);

	if (r < 0) {
		(void)!ftruncate(k->fd, 0);
		unlink(k->path);
		if (r == -ENOSPC)
			err_set(&why, r, "there is no memory for it: %s are left in that folder, and %s are the least; make room there", size_format(room_left(k->fd), room),
				size_format(l.ring + WL_MEM_MIN, need));
		else if (r == -EFBIG)
			err_set(&why, r, "it would be larger than this process may make a file (ulimit -f, LimitFSIZE=); raise that");
		else
			err_errno(&why, r, "there is no memory for it");
		go_without(w, &why);
		return;
	}
	munmap(w->mem, w->mem_size);
	munmap(w->desc, WL_MAX_BATCH);
	w->mem = p + l.ring;
	w->desc = p + l.desc;
	w->mem_end = k->limit;
	k->slot = (struct wl_relic_slot *)(p + WL_BLOCK);
	k->slots = l.slots;
	k->size = l.size;
	k->kept = true;
	k->step = w->config.relic_step;
	k->arg = w->config.relic_arg;
	if (w->mem_end < w->mem_size)
		tell_smaller(w);
	memset(k->head, 0, sizeof(*k->head));
	k->head->version = WL_RELIC_VERSION;
	k->head->slots = l.slots;
	k->head->log = w->sb.uuid;
	wl_relic_boot_id(k->head->boot, sizeof(k->head->boot));
	k->head->generation = w->sb.generation;
	k->head->mem_size = w->mem_size;
	k->head->super = k->head->super_next = w->sb.seq;
	k->head->written = k->head->last = w->next_seq - 1;
	note_last(w);
	uint64_t word;

	memcpy(&word, wl_relic_magic, sizeof(word));
	shm_publish64((uint64_t *)(void *)k->head->magic, word);
}

/* The rest of the ring is memory of our own; what the file holds is not to be believed any more. */
static bool give_up(struct wlog *w, const struct err *why)
{
	struct wl_relic *k = &w->relic;

	shm_publish64((uint64_t *)(void *)k->head->magic, 0);
	unlink(k->path);
	if (mmap(w->mem + k->reserved, w->mem_size - k->reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
		wl_fail(w, -ENOMEM, "the memory of the log");
		return false;
	}
	k->reserved = w->mem_size;
	k->told = false;	/* that it had less was told, perhaps; this is worse */
	go_without(w, why);
	return true;
}

bool wl_relic_reserve(struct wlog *w, uint64_t end)
{
	struct wl_relic *k = &w->relic;
	struct err why = ERR_INIT;

	if (!k->head || k->fd < 0 || end <= k->reserved)
		return true;
	uint64_t upto = min(align_up(end, WL_RELIC_CHUNK), w->mem_end);
	int r = take_ring(w, k->reserved, upto);

	if (r == 0) {
		k->reserved = upto;
		return true;
	}
	if (k->reserved >= WL_MEM_MIN) {
		w->mem_end = k->reserved;
		tell_smaller(w);
		return false;
	}
	err_errno(&why, r, "there is no more memory for it; make room in that folder");
	return give_up(w, &why);
}

bool wl_relic_outgrow(struct wlog *w, uint64_t need)
{
	struct err why = ERR_INIT;
	char size[16], ring[16];

	if (!w->relic.kept || w->mem_end == w->mem_size || need <= w->mem_end)
		return true;
	err_set(&why, -ENOSPC, "there is memory for %s there, and a request of %s has come that needs more; make room in that folder", size_format(w->mem_end, ring),
		size_format(need, size));
	return give_up(w, &why);
}

int wl_relic_super(struct wlog *w, bool durable)
{
	struct wl_relic *k = &w->relic;
	uint64_t off = durable ? offsetof(struct wl_relic_head, super) : offsetof(struct wl_relic_head, super_next);

	if (k->completing)
		return wl_relic_store64(w, off, w->sb.seq);
	if (!k->head)
		return 0;
	wl_relic_tell(k, durable ? "a superblock on the device" : "a superblock half made");
	shm_publish64((uint64_t *)(void *)((uint8_t *)k->head + off), w->sb.seq);
	wl_relic_tell(k, durable ? "a superblock written" : "a superblock begun");
	return 0;
}

void wl_relic_trim(struct wlog *w)
{
	struct wl_relic *k = &w->relic;

	if (!k->kept || k->fd < 0 || k->reserved <= k->floor || rt_now_ns() - w->open_since_ns < REST_NS)
		return;
	if (madvise(w->mem + k->floor, k->reserved - k->floor, MADV_REMOVE) < 0)
		return;
	k->reserved = k->floor;
	w->mem_end = k->limit;	/* others may have given back, too */
}

void wl_relic_end(struct wlog *w)
{
	struct wl_relic *k = &w->relic;

	if (!k->kept)
		return;
	shm_publish64((uint64_t *)(void *)k->head->magic, 0);
	if (k->fd < 0)
		return;
	/* Confined, the file cannot be removed, but emptied. */
	(void)!ftruncate(k->fd, 0);
	unlink(k->path);
}

void wl_relic_fini(struct wlog *w)
{
	struct wl_relic *k = &w->relic;

	if (k->head) {
		if (!w->config.relic_mem)
			munmap(k->head, k->size);
		w->mem = w->desc = NULL;
		k->head = NULL;
		/* Given up on the way: nobody is to believe what it holds, and its memory goes back. */
		if (!k->kept && k->fd >= 0)
			(void)!ftruncate(k->fd, 0);
	}
	if (k->fd >= 0)
		close(k->fd);
	k->fd = -1;
}
