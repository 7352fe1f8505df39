/* SPDX-License-Identifier: MIT */
/*
 * `weir perf` on a directory: file system calls on files made for it, in a folder of their own that is removed at the end, however it ends.
 *
 * Nothing else runs on this reactor, so that blocking calls block nobody.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "bench/perf.h"
#include "blk/spec.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"

#define READ_SIZE (2u << 20)
#define FILE_DATA "data"	/* written once; then read, and written again through the driver */
#define FILE_ETCD "etcd"
#define SMALLEST (4u << 20)

struct place {
	const struct perf_opts *o;
	struct perf_result *r;
	char path[4096];
	int dir_fd;
	uint64_t space;		/* size of the files */
};

static int failed(const struct place *p, int error, const char *what, struct err *err)
{
	return err_errno(err, error, "%s: %s", p->o->target, what);
}

static void remove_folder(struct place *p)
{
	DIR *dir = fdopendir(p->dir_fd);
	struct dirent *e;

	while (dir && (e = readdir(dir)))
		if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
			unlinkat(dirfd(dir), e->d_name, 0);
	if (dir)
		closedir(dir);
	else
		close(p->dir_fd);
	rmdir(p->path);
}

static int make_folder(struct place *p, struct err *err)
{
	struct statvfs vfs;
	int rc;

	if (statvfs(p->o->target, &vfs))
		return failed(p, -errno, "cannot be used", err);
	p->r->size = (uint64_t)vfs.f_blocks * vfs.f_frsize;
	p->space = align_down(min((uint64_t)vfs.f_bavail * vfs.f_frsize / 4, (uint64_t)PERF_SPACE), 4096);
	if (p->space < SMALLEST)
		return err_set(err, -ENOSPC, "%s: %llu MiB of free space are needed to measure there; make room or choose another directory",
			       p->o->target, SMALLEST * 4ull >> 20);
	if (snprintf(p->path, sizeof(p->path), "%s/weir-perf-XXXXXX", p->o->target) >= (int)sizeof(p->path))
		return failed(p, -ENAMETOOLONG, "cannot be used", err);
	if (!mkdtemp(p->path))
		return failed(p, -errno, "no folder for the test files can be made in it, choose a directory that you may write to", err);
	p->dir_fd = open(p->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (p->dir_fd >= 0)
		return 0;
	rc = failed(p, -errno, "the folder for the test files cannot be opened", err);
	rmdir(p->path);
	return rc;
}

static int write_full(int fd, const char *buf, size_t len)
{
	while (len) {
		ssize_t n = write(fd, buf, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		buf += n;
		len -= (size_t)n;
	}
	return 0;
}

/* A file of p->space random bytes, synced. */
static int make_file(struct place *p, const char *name, char *buf)
{
	int fd = openat(p->dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600), rc = 0;

	if (fd < 0)
		return -errno;
	for (uint64_t done = 0; !rc && done < p->space && !perf_stopped(p->o); done += READ_SIZE)
		rc = write_full(fd, buf, min((uint64_t)READ_SIZE, p->space - done));
	if (!rc && fsync(fd))
		rc = -errno;
	close(fd);
	return rc;
}

/* --- Reads: of the device as pveperf does if it may be opened, else of the file --- */

static int open_to_read(struct place *p, uint64_t *ret_size)
{
	const char *source = p->r->path.source;
	struct stat st;
	off_t end;
	int fd;

	if (source[0] && !stat(source, &st) && S_ISBLK(st.st_mode)) {
		fd = open(source, O_RDONLY | O_CLOEXEC);
		end = fd >= 0 ? lseek(fd, 0, SEEK_END) : 0;
		if (end > READ_SIZE) {
			snprintf(p->r->read_from, sizeof(p->r->read_from), "%s", source);
			*ret_size = (uint64_t)end;
			return fd;
		}
		if (fd >= 0)
			close(fd);
	}
	snprintf(p->r->read_from, sizeof(p->r->read_from), "a file of %llu MiB", (unsigned long long)p->space >> 20);
	*ret_size = p->space;
	fd = openat(p->dir_fd, FILE_DATA, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

static int measure_reads(struct place *p, char *buf)
{
	uint64_t size, start, done = 0, count = 0, elapsed;
	struct rng rng;
	int fd = open_to_read(p, &size), rc = 0;
	ssize_t n;

	if (fd < 0)
		return fd;
	perf_part(p->o, "buffered reads");
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	start = perf_now_ns();
	do {
		n = read(fd, buf, READ_SIZE);
		if (n > 0)
			done += (uint64_t)n;
	} while (n > 0 && perf_goes_on(p->o, start));
	elapsed = perf_now_ns() - start;
	p->r->read_bytes_per_s = elapsed ? (double)done * 1e9 / (double)elapsed : 0;
	if (n < 0)
		rc = -errno;
	perf_part(p->o, "seeks");
	/* Without read-ahead, and without the page cache where that is possible. */
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	if (!fcntl(fd, F_SETFL, O_DIRECT) && pread(fd, buf, 4096, 0) < 0)
		fcntl(fd, F_SETFL, 0);
	rng_seed(&rng, start);
	start = perf_now_ns();
	while (!rc && perf_goes_on(p->o, start)) {
		if (pread(fd, buf, 4096, (off_t)(rng_below(&rng, size / 4096) * 4096)) < 0)
			rc = -errno;
		count++;
	}
	p->r->seek_ns = count && !rc ? (perf_now_ns() - start) / count : 0;
	close(fd);
	return rc;
}

/* --- fsyncs as pveperf: one of 300 files in turn is made anew, written, synced and closed --- */

static int fsync_one(struct place *p, unsigned i, const char *buf)
{
	char name[16];
	int fd, rc;

	snprintf(name, sizeof(name), "%u", i % PERF_FSYNC_FILES);
	fd = openat(p->dir_fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	rc = write_full(fd, buf, PERF_FSYNC_BYTES);
	if (!rc && fsync(fd))
		rc = -errno;
	if (close(fd) && !rc)
		rc = -errno;
	return rc;
}

static int measure_fsyncs(struct place *p, const char *buf)
{
	uint64_t start;
	int rc = 0;

	perf_part(p->o, "fsyncs");
	start = perf_now_ns();
	while (!rc && perf_goes_on(p->o, start))
		rc = fsync_one(p, (unsigned)p->r->fsyncs++, buf);
	p->r->fsync_ns = perf_now_ns() - start;
	return rc;
}

/* --- etcd: 8000 bytes after the other into an allocated file, a fdatasync after each --- */

static int measure_etcd(struct place *p, const char *buf)
{
	int fd = openat(p->dir_fd, FILE_ETCD, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600), rc = 0;
	uint64_t start, before, pos = 0;

	if (fd < 0)
		return -errno;
	perf_part(p->o, "etcd's writes");
	/* What a file system without fallocate gets from the C library is written zeroes: as good. */
	rc = -posix_fallocate(fd, 0, (off_t)p->space);
	start = perf_now_ns();
	while (!rc && perf_goes_on(p->o, start)) {
		before = perf_now_ns();
		if (pwrite(fd, buf, PERF_ETCD_BYTES, (off_t)pos) != PERF_ETCD_BYTES || fdatasync(fd))
			rc = errno ? -errno : -EIO;
		hist_add(&p->r->etcd, perf_now_ns() - before);
		pos = pos + 2 * PERF_ETCD_BYTES <= p->space ? pos + PERF_ETCD_BYTES : 0;
	}
	p->r->etcd_ns = perf_now_ns() - start;
	close(fd);
	return rc;
}

/* --- The file through the driver: what a server would find there --- */

static co_fn int co_open_data(struct place *p, struct disk **ret, struct err *err)
{
	char text[2 * sizeof(p->path)], *to = text + snprintf(text, sizeof(text), "file:");

	for (const char *s = p->path; *s; s++) {
		*to++ = *s;
		if (*s == ',')
			*to++ = ',';
	}
	strcpy(to, "/" FILE_DATA);
	return co_disk_open(text, DISK_OPEN_RDWR, ret, err);
}

static co_fn int co_measure(struct place *p, char *buf, struct err *err)
{
	struct disk *d;
	int rc;

	perf_part(p->o, "writing a test file");
	rc = make_file(p, FILE_DATA, buf);
	if (rc)
		return failed(p, rc, "the test file cannot be written", err);
	rc = co_open_data(p, &d, err);
	if (rc)
		return rc;
	perf_read_path(d, p->r);
	rc = measure_reads(p, buf);
	if (rc)
		failed(p, rc, "reading failed", err);
	if (!rc && (rc = measure_fsyncs(p, buf)))
		failed(p, rc, "writing files and syncing them failed", err);
	if (!rc && (rc = measure_etcd(p, buf)))
		failed(p, rc, "writing and syncing failed", err);
	if (!rc)
		rc = co_perf_flush_cost(p->o, p->r, d, err);
	co_disk_close(d);
	p->r->wrote = true;
	return rc;
}

co_fn int co_perf_dir(const struct perf_opts *o, struct perf_result *r, struct err *err)
{
	struct place p = { .o = o, .r = r, .dir_fd = -1 };
	struct rng rng;
	void *buf;
	int rc;

	r->directory = true;
	if (posix_memalign(&buf, 4096, READ_SIZE))
		return err_set(err, -ENOMEM, "out of memory");
	rng_seed(&rng, 1);
	rng_fill(&rng, buf, READ_SIZE);
	rc = make_folder(&p, err);
	if (!rc) {
		rc = co_measure(&p, buf, err);
		remove_folder(&p);
	}
	free(buf);
	return rc;
}
