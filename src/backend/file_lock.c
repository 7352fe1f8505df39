/* SPDX-License-Identifier: MIT */
/*
 * File backend: image locks, the same as QEMU's.
 *
 * Each permission has two bytes in the file's lock space (nothing is written there): byte 100 + i is share-locked by whoever uses
 * permission i, byte 200 + i by whoever does not let others use it. To open is to take one's own bytes first and then
 * to look whether somebody else holds a byte that conflicts: 200 + i for what one uses, 100 + i for what one does not share. Of two that
 * open at the same time at least one sees the other. The locks are open file description locks (fcntl(2)); they live as long as
 * the descriptor, whatever else this process opens or closes.
 *
 *	permission	i	who opens to read	who opens to write
 *	consistent read	0	uses			uses, not shared
 *	write		1	not shared		uses, not shared
 *	write unchanged	2				not shared
 *	resize		3	not shared		uses, not shared
 *
 * Several readers share an image, a writer shares with nobody. QEMU's own writers let others read; but what a write log has not yet
 * brought into the image is missing there, so that a copy of it would be wrong without a word. Who must read it all the same tells QEMU file.locking=off.
 *
 * A process that was killed lets go of its locks a little after it is gone: the kernel takes its io_uring apart behind its back. So a lock
 * that no process holds is waited for, up to LINGER_MS.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/file.h"
#include "blk/spec.h"
#include "util/err.h"

#define BYTE_USED 100
#define BYTE_UNSHARED 200

enum perm { PERM_READ = 1 << 0, PERM_WRITE = 1 << 1, PERM_WRITE_UNCHANGED = 1 << 2, PERM_RESIZE = 1 << 3 };
#define PERMS 4
#define LINGER_MS 2000u
#define LINGER_STEP_MS 10u
#define PERM_ALL (PERM_READ | PERM_WRITE | PERM_WRITE_UNCHANGED | PERM_RESIZE)

static int lock_byte(int fd, int cmd, short type, off_t byte, bool *ret_free)
{
	struct flock fl = { .l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1 };

	if (fcntl(fd, cmd, &fl))
		return -errno;
	if (ret_free)
		*ret_free = fl.l_type == F_UNLCK;
	return 0;
}

static int take_bytes(int fd, unsigned perms, off_t base, off_t *ret_byte)
{
	for (int i = 0; i < PERMS; i++) {
		int rc;

		if (!(perms & 1u << i))
			continue;
		*ret_byte = base + i;
		rc = lock_byte(fd, F_OFD_SETLK, F_RDLCK, base + i, NULL);
		if (rc)
			return rc;
	}
	return 0;
}

/* 0, or -EBUSY and the byte that somebody else holds. */
static int look_at_bytes(int fd, unsigned perms, off_t base, off_t *ret_byte)
{
	for (int i = 0; i < PERMS; i++) {
		bool is_free = false;
		int rc;

		if (!(perms & 1u << i))
			continue;
		*ret_byte = base + i;
		rc = lock_byte(fd, F_OFD_GETLK, F_WRLCK, base + i, &is_free);
		if (rc)
			return rc;
		if (!is_free)
			return -EBUSY;
	}
	return 0;
}

/* --- Who holds it --- */

/* True if descriptor `fd` of process `pid` holds a lock on `byte`: lines "lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 201 201". */
static bool descriptor_locks(const char *pid, const char *fd, off_t byte)
{
	char path[560], line[256];
	bool found = false;
	FILE *in;

	snprintf(path, sizeof(path), "/proc/%s/fdinfo/%s", pid, fd);
	in = fopen(path, "re");
	if (!in)
		return false;
	while (!found && fgets(line, sizeof(line), in)) {
		char *end, *last = strrchr(line, ' '), *first;
		long long from;

		if (strncmp(line, "lock:", 5) || !last)
			continue;
		*last = '\0';
		first = strrchr(line, ' ');
		if (!first)
			continue;
		from = strtoll(first, &end, 10);
		found = from <= byte && (!strncmp(last + 1, "EOF", 3) || strtoll(last + 1, NULL, 10) >= byte);
	}
	fclose(in);
	return found;
}

static bool process_locks(const char *pid, const struct stat *st, off_t byte, int own_fd)
{
	char path[300];
	struct dirent *e;
	bool found = false;
	struct stat st2;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%s/fd", pid);
	dir = opendir(path);
	if (!dir)
		return false;
	while (!found && (e = readdir(dir))) {
		if (!isdigit((unsigned char)e->d_name[0]))
			continue;
		if (atoi(pid) == getpid() && atoi(e->d_name) == own_fd)
			continue;
		if (fstatat(dirfd(dir), e->d_name, &st2, 0) || st2.st_ino != st->st_ino || st2.st_dev != st->st_dev)
			continue;
		found = descriptor_locks(pid, e->d_name, byte);
	}
	closedir(dir);
	return found;
}

/*
 * "qemu-img (process 4711)"; or false, and "another process", where /proc does not tell (another user's, another host's, one that
 * is just ending).
 */
static bool find_holder(int fd, off_t byte, char *buf, size_t size)
{
	DIR *dir = opendir("/proc");
	bool found = false;
	struct dirent *e;
	struct stat st;

	snprintf(buf, size, "another process");
	while (dir && !fstat(fd, &st) && (e = readdir(dir))) {
		char path[300], comm[32] = "?";
		FILE *in;

		if (!isdigit((unsigned char)e->d_name[0]) || !process_locks(e->d_name, &st, byte, fd))
			continue;
		found = true;
		if (atoi(e->d_name) == getpid()) {
			snprintf(buf, size, "this process (it was given twice)");
			break;
		}
		snprintf(path, sizeof(path), "/proc/%s/comm", e->d_name);
		in = fopen(path, "re");
		if (in && fgets(comm, sizeof(comm), in))
			comm[strcspn(comm, "\n")] = '\0';
		if (in)
			fclose(in);
		snprintf(buf, size, "%s (process %.16s)", comm, e->d_name);
		break;
	}
	if (dir)
		closedir(dir);
	return found;
}

static int busy(int fd, const char *path, off_t byte, unsigned open_flags, struct err *err)
{
	static const char *const used[PERMS] = { "is being read by", "is being written by", "is being written by", "can be resized by" };
	static const char *const unshared[PERMS] = {
		"is held by", "is held against writers by", "is held against writers by", "is held against resizing by",
	};
	char holder[96];
	const char *how;

	find_holder(fd, byte, holder, sizeof(holder));
	how = byte >= BYTE_UNSHARED ? unshared[byte - BYTE_UNSHARED] : used[byte - BYTE_USED];
	return err_set(err, -EBUSY, "%s: %s %s (lock on byte %d); stop it first%s", path, how, holder, (int)byte,
		       open_flags & DISK_OPEN_RDWR ? "" : ", or read all the same with locking=off");
}

static int try_lock(int fd, unsigned use, unsigned unshare, off_t *ret_byte)
{
	int rc = take_bytes(fd, use, BYTE_USED, ret_byte);

	if (!rc)
		rc = take_bytes(fd, unshare, BYTE_UNSHARED, ret_byte);
	if (!rc)
		rc = look_at_bytes(fd, use, BYTE_UNSHARED, ret_byte);
	if (!rc)
		rc = look_at_bytes(fd, unshare, BYTE_USED, ret_byte);
	return rc == -EAGAIN || rc == -EACCES ? -EBUSY : rc;
}

int file_lock(int fd, const char *path, unsigned open_flags, enum file_locking mode, bool *ret_locked, struct err *err)
{
	bool rdwr = open_flags & (DISK_OPEN_RDWR | DISK_OPEN_LOG);
	unsigned use = rdwr ? PERM_READ | PERM_WRITE | PERM_RESIZE : PERM_READ;
	unsigned unshare = rdwr ? PERM_ALL : PERM_WRITE | PERM_RESIZE;
	char holder[96];
	off_t byte = 0;
	int rc;

	*ret_locked = false;
	if (mode == FILE_LOCKING_OFF || (open_flags & DISK_OPEN_NOLOCK))
		return 0;
	rc = try_lock(fd, use, unshare, &byte);
	for (unsigned ms = 0; rc == -EBUSY && ms < LINGER_MS && !find_holder(fd, byte, holder, sizeof(holder)); ms += LINGER_STEP_MS) {
		usleep(LINGER_STEP_MS * 1000);
		rc = try_lock(fd, use, unshare, &byte);
	}
	if (!rc) {
		*ret_locked = true;
		return 0;
	}
	if (rc == -EBUSY)
		return busy(fd, path, byte, open_flags, err);
	if (mode == FILE_LOCKING_AUTO)
		return 0;
	return err_errno(err, rc, "%s: locking=on, but its file system has no such locks; use locking=auto, and see to it that nobody else opens it", path);
}
