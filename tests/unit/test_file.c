/* SPDX-License-Identifier: MIT */
/* The file backend on the file system of the working directory. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/xattr.h>

#include "backend/file.h"
#include "blk/spec.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"

static char dir[64];
static struct rt *rt;
static struct rng rng;

static co_fn struct disk *co_open(unsigned flags, const char *fmt, ...)
{
	struct err err = ERR_INIT;
	struct disk *d = NULL;
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (co_disk_open(text, flags, &d, &err))
		test_fail("%s: %s", text, err.msg);
	return d;
}

/* Opens and wants to be refused with `code` and a message that has `part`. */
static co_fn void co_refused(unsigned flags, const char *text, int code, const char *part)
{
	struct err err = ERR_INIT;
	struct disk *d = NULL;
	int rc = co_disk_open(text, flags, &d, &err);

	if (rc != code)
		test_fail("%s: returned %d (%s), wanted %d", text, rc, rc ? err.msg : "opened", code);
	if (!strstr(err.msg, part))
		test_fail("%s: says \"%s\", wanted \"%s\"", text, err.msg, part);
	CHECK(!strchr(err.msg, '\n'));
	CHECK(strncmp(err.msg, text, strcspn(text, ",")) == 0);
}

static const char *make_file(const char *name, uint64_t size)
{
	static char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	CHECK(fd >= 0);
	CHECK_EQ(ftruncate(fd, (off_t)size), 0);
	close(fd);
	return path;
}

static struct stat stat_of(const char *path)
{
	struct stat st;

	CHECK_EQ(stat(path, &st), 0);
	return st;
}

static json_t *status_of(struct disk *d)
{
	json_t *obj = disk_status(d);

	CHECK(obj);
	return obj;
}

/* --- Every mode against a model --- */

#define SPAN (1u << 20)

struct model {
	struct disk *d;
	unsigned char *bytes;
	uint64_t size;
};

static void fill(unsigned char *p, size_t n)
{
	static unsigned char salt;

	salt++;
	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)(i * 7 + salt);
}

static co_fn void co_one_op(struct model *m, unsigned char *buf)
{
	uint64_t off = rng_below(&rng, m->size), len;
	unsigned flags = rng_below(&rng, 4) ? 0 : DISK_FUA;

	/* The tail is where it is hard. */
	if (!rng_below(&rng, 3))
		off = m->size - 1 - rng_below(&rng, min(m->size, (uint64_t)10000));
	len = 1 + rng_below(&rng, min(m->size - off, rng_below(&rng, 8) ? (uint64_t)9000 : (uint64_t)200000));
	if (!rng_below(&rng, 3))
		off = align_down(off, 4096), len = min(align_up(len, 4096), m->size - off);
	switch (rng_below(&rng, 10)) {
	case 0:
		CHECK_EQ(co_disk_flush(m->d), 0);
		return;
	case 1:
		CHECK_EQ(co_disk_zero(m->d, off, len, flags | (rng_below(&rng, 2) ? DISK_UNMAP : 0)), 0);
		memset(m->bytes + off, 0, len);
		return;
	case 2:
		CHECK_EQ(co_disk_discard(m->d, off, len, flags), 0);
		if (m->d->limits.discard_zeroes)
			memset(m->bytes + off, 0, len);
		else
			CHECK_EQ(co_disk_read(m->d, off, m->bytes + off, len, 0), 0);
		return;
	case 3:
	case 4:
	case 5:
		CHECK_EQ(co_disk_read(m->d, off, buf, len, 0), 0);
		CHECK(!memcmp(buf, m->bytes + off, len));
		return;
	default:
		fill(buf, len);
		memcpy(m->bytes + off, buf, len);
		CHECK_EQ(co_disk_write(m->d, off, buf, len, flags), 0);
	}
}

static void check_file(const char *path, const struct model *m)
{
	unsigned char *map;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	CHECK(fd >= 0);
	CHECK_EQ((uint64_t)stat_of(path).st_size, m->size);
	map = mmap(NULL, m->size, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(map != MAP_FAILED);
	for (uint64_t i = 0; i < m->size; i++)
		if (map[i] != m->bytes[i])
			test_fail("%s differs at byte %llu of %llu", path, (unsigned long long)i, (unsigned long long)m->size);
	munmap(map, m->size);
	close(fd);
}

static co_fn void co_try_mode(const char *aio, const char *cache, uint64_t size)
{
	struct model m = { .size = size };
	unsigned char *buf = malloc(SPAN + 8192);
	char path[128];

	strcpy(path, make_file("model", size));
	m.bytes = calloc(1, size);
	CHECK(m.bytes && buf);
	m.d = co_open(DISK_OPEN_RDWR, "%s,aio=%s,cache=%s", path, aio, cache);
	CHECK_EQ(m.d->size, size);
	for (uint64_t i = test_scale(60); i; i--)
		co_one_op(&m, buf);
	CHECK_EQ(co_disk_read(m.d, 0, buf, size, 0), 0);
	CHECK(!memcmp(buf, m.bytes, size));
	CHECK_EQ(co_disk_flush(m.d), 0);
	co_disk_close(m.d);
	check_file(path, &m);
	free(m.bytes);
	free(buf);
}

static const char *const aios[] = { "io_uring", "native", "threads" };
static const char *const caches[] = { "none", "directsync", "writeback", "writethrough", "unsafe" };

static co_fn void co_every_mode_reads_what_it_wrote(void)
{
	static const uint64_t sizes[] = { SPAN, SPAN - 1, SPAN - 1000, SPAN - 512 * 3, 1000, 5000 };

	for (size_t a = 0; a < ARRAY_SIZE(aios); a++)
		for (size_t c = 0; c < ARRAY_SIZE(caches); c++)
			for (size_t s = 0; s < ARRAY_SIZE(sizes); s++)
				if (a != 1 || c < 2)
					co_try_mode(aios[a], caches[c], sizes[s]);
}

static co_fn void co_native_without_o_direct_is_refused(void)
{
	char text[256];

	for (size_t c = 2; c < ARRAY_SIZE(caches); c++) {
		snprintf(text, sizeof(text), "%s,aio=native,cache=%s", make_file("f", 4096), caches[c]);
		co_refused(DISK_OPEN_RDWR, text, -EINVAL, "use cache=none, or aio=io_uring");
	}
}

/* Many requests at once, so that the kernel AIO's queue fills, and the reaper and the submitter take turns. */
struct parallel {
	struct disk *d;
	unsigned n;
	unsigned char *buf;
};

static co_fn int co_parallel_write(void *arg)
{
	struct parallel *p = arg;

	memset(p->buf, (int)p->n, 4096);
	return co_disk_write(p->d, p->n * 4096ull, p->buf, 4096, p->n % 3 ? 0 : DISK_FUA);
}

static co_fn int co_parallel_read(void *arg)
{
	struct parallel *p = arg;

	return co_disk_read(p->d, p->n * 4096ull, p->buf, 4096, 0);
}

static co_fn void co_many_requests_at_once(void)
{
	enum { N = 700 };
	struct parallel *p = calloc(N, sizeof(*p));
	unsigned char *buf;
	struct co_group g;

	CHECK(p && !posix_memalign((void **)&buf, 4096, N * 4096));
	for (size_t a = 0; a < ARRAY_SIZE(aios); a++) {
		struct disk *d = co_open(DISK_OPEN_RDWR, "%s,cache=none,aio=%s", make_file("f", N * 4096), aios[a]);

		co_group_init(&g);
		for (unsigned i = 0; i < N; i++) {
			p[i] = (struct parallel){ d, i, buf + i * 4096ul };
			co_group_start(&g, "write", co_parallel_write, &p[i]);
		}
		CHECK_EQ(co_group_wait(&g), 0);
		memset(buf, 0xee, N * 4096);
		co_group_init(&g);
		for (unsigned i = 0; i < N; i++)
			co_group_start(&g, "read", co_parallel_read, &p[i]);
		CHECK_EQ(co_group_wait(&g), 0);
		for (unsigned i = 0; i < N; i++)
			CHECK(p[i].buf[0] == (unsigned char)i && p[i].buf[4095] == (unsigned char)i);
		co_disk_close(d);
	}
	free(buf);
	free(p);
}

static co_fn int co_reader(void *arg)
{
	struct parallel *p = arg;

	for (unsigned i = 0; i < 100; i++)
		CHECK_EQ(co_disk_read(p->d, (i + p->n) % 64 * 4096ull, p->buf, 4096, 0), 0);
	return 0;
}

static co_fn void co_a_request_is_one_submission_and_batches_share_a_call(void)
{
	struct disk *d = co_open(DISK_OPEN_RDWR, "%s,cache=none", make_file("f", 64 * 4096));
	struct rt_stats before, after;
	struct parallel p[16];
	unsigned char *buf;
	struct co_group g;

	CHECK(!posix_memalign((void **)&buf, 4096, ARRAY_SIZE(p) * 4096));
	p[0] = (struct parallel){ d, 0, buf };
	rt_get_stats(rt_self(), &before);
	CHECK_EQ(co_reader(&p[0]), 0);
	rt_get_stats(rt_self(), &after);
	/* The reactor may have one of its own to arm. */
	CHECK(after.sqes - before.sqes <= 102);
	CHECK(after.ring_enters - before.ring_enters <= 110);
	before = after;
	co_group_init(&g);
	for (unsigned i = 0; i < ARRAY_SIZE(p); i++) {
		p[i] = (struct parallel){ d, i, buf + i * 4096 };
		co_group_start(&g, "reader", co_reader, &p[i]);
	}
	CHECK_EQ(co_group_wait(&g), 0);
	rt_get_stats(rt_self(), &after);
	CHECK(after.sqes - before.sqes <= 100 * ARRAY_SIZE(p) + 2);
	CHECK(after.ring_enters - before.ring_enters < 100 * ARRAY_SIZE(p));
	free(buf);
	co_disk_close(d);
}

/* --- The end of the file --- */

static co_fn void co_a_file_that_was_cut_reads_as_an_error(void)
{
	static const char *const modes[] = { "cache=none", "cache=writeback", "cache=none,aio=threads" };
	char path[128], buf[8192];

	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		struct disk *d;

		strcpy(path, make_file("cut", 100000));
		d = co_open(DISK_OPEN_RDWR, "%s,%s", path, modes[i]);
		CHECK_EQ(truncate(path, 50000), 0);
		CHECK_EQ(co_disk_read(d, 0, buf, 8192, 0), 0);
		CHECK_EQ(co_disk_read(d, 49000, buf, 8192, 0), -EIO);
		CHECK_EQ(co_disk_read(d, 99000, buf, 1000, 0), -EIO);
		co_disk_close(d);
	}
}

static co_fn void co_resize_keeps_what_is_there_and_adds_zeroes(void)
{
	static const uint64_t sizes[] = { 10000, 20000, 1 << 20, 70001, 4096, 5000, 512 * 9 };
	char path[128];
	unsigned char buf[5000], back[8192];
	struct err err = ERR_INIT;
	uint64_t filled = 3000;

	for (int direct = 0; direct < 2; direct++) {
		struct disk *d;

		strcpy(path, make_file("resize", 3000));
		d = co_open(DISK_OPEN_RDWR, "%s,cache=%s", path, direct ? "none" : "writeback");
		fill(buf, sizeof(buf));
		CHECK_EQ(co_disk_write(d, 0, buf, 3000, 0), 0);
		for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
			CHECK_EQ(co_disk_resize(d, sizes[i], &err), 0);
			CHECK_EQ(d->size, sizes[i]);
			CHECK_EQ((uint64_t)stat_of(path).st_size, sizes[i]);
			CHECK_EQ(co_disk_read(d, 0, back, filled, 0), 0);
			CHECK(!memcmp(buf, back, filled));
			CHECK_EQ(co_disk_read(d, sizes[i] - 500, back, 500, 0), 0);
			CHECK(bytes_are_zero(back, 500));
			CHECK_EQ(co_disk_write(d, sizes[i] - 10, buf, 10, 0), 0);
			CHECK_EQ(co_disk_zero(d, sizes[i] - 10, 10, 0), 0);
		}
		co_disk_close(d);
	}
}

/* --- Space --- */

static co_fn void co_holes_and_data_are_told_apart(void)
{
	static char buf[65536];
	char path[128];
	struct disk_extent e;
	struct disk *d;

	strcpy(path, make_file("extents", (1 << 20) + 100));
	d = co_open(DISK_OPEN_RDWR, "%s", path);
	memset(buf, 1, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 262144, buf, 65536, 0), 0);
	CHECK_EQ(co_disk_extent(d, 0, d->size, &e), 0);
	CHECK(e.hole && e.zero && e.len == 262144);
	CHECK_EQ(co_disk_extent(d, 1000, 1000, &e), 0);
	CHECK(e.hole && e.len == 1000);
	CHECK_EQ(co_disk_extent(d, 262144, d->size - 262144, &e), 0);
	CHECK(!e.hole && !e.zero && e.len == 65536);
	CHECK_EQ(co_disk_extent(d, 262144 + 65536, d->size - 262144 - 65536, &e), 0);
	CHECK(e.hole && e.len == d->size - 262144 - 65536);
	/* What was looked up is void after a write, also by one that only touches it. */
	CHECK_EQ(co_disk_write(d, 524288, buf, 4096, 0), 0);
	CHECK_EQ(co_disk_extent(d, 524288, 4096, &e), 0);
	CHECK(!e.hole);
	CHECK_EQ(co_disk_extent(d, 0, 4096, &e), 0);
	CHECK(e.hole);
	CHECK_EQ(co_disk_write(d, 0, buf, 1, 0), 0);
	CHECK_EQ(co_disk_extent(d, 0, 1, &e), 0);
	CHECK(!e.hole);
	CHECK_EQ(co_disk_discard(d, 0, 4096, 0), 0);
	CHECK_EQ(co_disk_extent(d, 0, 4096, &e), 0);
	CHECK(e.hole);
	/* The partial last unit */
	CHECK_EQ(co_disk_write(d, d->size - 1, buf, 1, 0), 0);
	CHECK_EQ(co_disk_extent(d, d->size - 100, 100, &e), 0);
	CHECK(!e.hole && e.len == 100);
	co_disk_close(d);
}

static co_fn void co_space_is_kept_or_freed_as_asked(void)
{
	static char buf[1 << 20];
	char path[128];
	struct disk *d;
	blkcnt_t full;

	strcpy(path, make_file("space", 1 << 20));
	d = co_open(DISK_OPEN_RDWR, "%s", path);
	memset(buf, 1, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), DISK_FUA), 0);
	full = stat_of(path).st_blocks;
	CHECK(full >= 2048);
	CHECK_EQ(co_disk_zero(d, 0, 262144, 0), 0);
	CHECK_EQ(stat_of(path).st_blocks, full);
	CHECK_EQ(co_disk_zero(d, 0, 262144, DISK_UNMAP | DISK_FAST), 0);
	CHECK(stat_of(path).st_blocks <= full - 500);
	full = stat_of(path).st_blocks;
	CHECK_EQ(co_disk_discard(d, 524288, 262144, 0), 0);
	CHECK(stat_of(path).st_blocks <= full - 500);
	co_disk_close(d);

	d = co_open(DISK_OPEN_RDWR, "%s,discard=ignore", path);
	full = stat_of(path).st_blocks;
	CHECK_EQ(d->limits.discard_gran, 0u);
	CHECK_EQ(co_disk_discard(d, 786432, 262144, 0), 0);
	CHECK_EQ(co_disk_read(d, 786432, buf, 1, 0), 0);
	CHECK_EQ(buf[0], 1);
	CHECK_EQ(co_disk_zero(d, 786432, 262144, DISK_UNMAP), 0);
	CHECK_EQ(stat_of(path).st_blocks, full);
	CHECK_EQ(co_disk_read(d, 786432, buf, 1, 0), 0);
	CHECK_EQ(buf[0], 0);
	co_disk_close(d);
}

/* --- Modes and limits --- */

static co_fn void co_limits_are_what_the_mode_promises(void)
{
	for (size_t c = 0; c < ARRAY_SIZE(caches); c++) {
		struct disk *d = co_open(DISK_OPEN_RDWR, "%s,cache=%s", make_file("f", 8192), caches[c]);
		json_t *s = status_of(d);
		bool stable = c == 1 || c == 3;

		CHECK(d->limits.fua);
		CHECK_EQ(d->limits.volatile_cache, !stable);
		CHECK(c < 2 ? d->limits.align >= 512 : d->limits.align == 1);
		CHECK_STR(json_string_value(json_object_get(s, "cache")), caches[c]);
		CHECK_EQ(json_is_true(json_object_get(s, "o_direct")), c < 2);
		CHECK_EQ(json_is_true(json_object_get(s, "flush_ignored")), c == 4);
		CHECK(json_is_true(json_object_get(s, "lock")));
		json_decref(s);
		co_disk_close(d);
	}
}

static co_fn void co_a_log_gets_stable_writes_and_nobody_else_in(void)
{
	char path[128], text[256];
	struct disk *d, *r;
	json_t *s;

	strcpy(path, make_file("log", 1 << 20));
	d = co_open(DISK_OPEN_RDWR | DISK_OPEN_LOG, "%s", path);
	s = status_of(d);
	CHECK(!d->limits.volatile_cache);
	CHECK_STR(json_string_value(json_object_get(s, "cache")), "directsync");
	json_decref(s);
	co_refused(0, path, -EBUSY, "is held by this process (it was given twice)");
	co_refused(DISK_OPEN_RDWR, path, -EBUSY, "lock on byte 200");
	r = co_open(DISK_OPEN_NOLOCK, "%s", path);
	co_disk_close(r);
	co_disk_close(d);
	snprintf(text, sizeof(text), "%s,cache=unsafe", path);
	co_refused(DISK_OPEN_RDWR | DISK_OPEN_LOG, text, -EINVAL, "cache=unsafe on a write log");
	/* Also the other way round. */
	r = co_open(0, "%s", path);
	co_refused(DISK_OPEN_RDWR | DISK_OPEN_LOG, path, -EBUSY, "is held against writers by");
	co_disk_close(r);
}

static co_fn void co_one_writer_or_many_readers(void)
{
	char path[128];
	struct disk *a, *b;

	strcpy(path, make_file("lock", 1 << 20));
	a = co_open(DISK_OPEN_RDWR, "%s", path);
	co_refused(DISK_OPEN_RDWR, path, -EBUSY, "stop it first");
	co_refused(0, path, -EBUSY, "read all the same with locking=off");
	b = co_open(0, "%s,locking=off", path);
	co_disk_close(b);
	co_disk_close(a);
	a = co_open(0, "%s", path);
	b = co_open(0, "%s,locking=on", path);
	co_refused(DISK_OPEN_RDWR, path, -EBUSY, "byte 201");
	co_disk_close(a);
	co_refused(DISK_OPEN_RDWR, path, -EBUSY, "byte 201");
	co_disk_close(b);
	a = co_open(DISK_OPEN_RDWR, "%s", path);
	co_disk_close(a);
}

/* --- Mark and stamp --- */

static co_fn void co_check_mark(const char *path)
{
	struct err err = ERR_INIT;
	char buf[DISK_MARK_MAX + 1], big[DISK_MARK_MAX + 2];
	struct disk *d = co_open(DISK_OPEN_RDWR, "%s", path);

	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, "");
	CHECK_EQ(co_disk_mark_set(d, "", &err), 0);
	CHECK_EQ(co_disk_mark_set(d, "log 1234 dirty", &err), 0);
	CHECK_EQ(co_disk_mark_set(d, "log 1234 clean", &err), 0);
	co_disk_close(d);

	d = co_open(DISK_OPEN_RDWR, "%s", path);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, "log 1234 clean");
	CHECK_EQ(co_disk_mark_get(d, buf, 5), -ERANGE);
	memset(big, 'x', DISK_MARK_MAX + 1);
	big[DISK_MARK_MAX + 1] = '\0';
	CHECK_EQ(co_disk_mark_set(d, big, &err), -EINVAL);
	big[DISK_MARK_MAX] = '\0';
	err_clear(&err);
	CHECK_EQ(co_disk_mark_set(d, big, &err), 0);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, big);
	CHECK_EQ(co_disk_mark_set(d, "", &err), 0);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, "");
	co_disk_close(d);
}

static co_fn void co_a_mark_stays_with_the_file(void)
{
	char path[128], moved[140], buf[64];
	struct err err = ERR_INIT;
	struct disk *d;

	strcpy(path, make_file("mark", 4096));
	co_check_mark(path);
	d = co_open(DISK_OPEN_RDWR, "%s", path);
	CHECK_EQ(co_disk_mark_set(d, "mine", &err), 0);
	snprintf(moved, sizeof(moved), "%s.moved", path);
	if (getxattr(path, "user.weir.mark", buf, sizeof(buf)) > 0)
		CHECK_EQ(rename(path, moved), 0);
	else
		strcpy(moved, path);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, "mine");
	co_disk_close(d);
	d = co_open(0, "%s", moved);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, "mine");
	err_clear(&err);
	CHECK_EQ(co_disk_mark_set(d, "", &err), -EROFS);
	co_disk_close(d);
}

static co_fn void co_a_mark_file_is_read_where_there_is_no_attribute(void)
{
	char path[128], side[160], buf[64];
	struct err err = ERR_INIT;
	struct disk *d;
	int fd;

	strcpy(path, make_file("side", 4096));
	snprintf(side, sizeof(side), "%s.weir-mark", path);
	fd = open(side, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
	CHECK_EQ(write(fd, "weir-mark 1\nbeside\n", 19), 19);
	close(fd);
	d = co_open(DISK_OPEN_RDWR, "%s", path);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), 0);
	CHECK_STR(buf, "beside");
	CHECK_EQ(co_disk_mark_set(d, "", &err), 0);
	CHECK(access(side, F_OK) != 0);
	/* Damaged is not absent. */
	fd = open(side, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
	CHECK_EQ(write(fd, "weir-mark 1\nbesi", 16), 16);
	close(fd);
	CHECK_EQ(co_disk_mark_get(d, buf, sizeof(buf)), -EBADMSG);
	unlink(side);
	co_disk_close(d);
}

/* The stamp, once a write would change it. */
static co_fn uint64_t co_stamp_of(struct disk *d, uint64_t *ret_now)
{
	uint64_t stamp = 0;
	int ret;

	while ((ret = co_disk_stamp(d, &stamp, ret_now)) == -EAGAIN)
		co_sleep_ns(2000000);
	CHECK_EQ(ret, 0);
	return stamp;
}

static co_fn void co_a_write_by_anybody_changes_the_stamp(void)
{
	uint64_t before, after, now;
	char path[128], byte = 1;
	struct disk *d;
	int fd;

	strcpy(path, make_file("stamp", 4096));
	d = co_open(DISK_OPEN_RDWR, "%s", path);
	for (unsigned i = 0; i < 3; i++) {
		before = co_stamp_of(d, &now);
		CHECK(before <= now);
		fd = open(path, O_WRONLY | O_CLOEXEC);
		CHECK_EQ(pwrite(fd, &byte, 1, 0), 1);
		close(fd);
		/* It is there also while it may be that of a later write, too. */
		CHECK(co_disk_stamp(d, &after, &now) != -ENOTSUP);
		CHECK(after > before && after <= now);
	}
	co_disk_close(d);
}

/* Times in steps: 1 ns, 100 ns, 10 ms, whole seconds, and every other second. */
static co_fn void co_a_stamp_counts_only_if_a_write_now_would_be_given_another(void)
{
	const uint64_t second = 1000000000;
	const struct {
		uint64_t step, time;
		bool fat;
	} fs[] = { { 1, 1790000000123456789 }, { 100, 1790000000123456700 }, { 10000000, 1790000000120000000 }, { second, 1790000001 * second },
		   { 2 * second, 1790000002 * second, true } };

	for (size_t i = 0; i < ARRAY_SIZE(fs); i++) {
		for (uint64_t now = fs[i].time; now < fs[i].time + 2 * fs[i].step; now += max(fs[i].step / 50, (uint64_t)1)) {
			bool would_be_the_same = now / fs[i].step * fs[i].step == fs[i].time;

			CHECK_EQ(file_stamp_tells(fs[i].time, fs[i].fat, now, now + 5), would_be_the_same ? -EAGAIN : 0);
		}
		/* Written between the looks at the clocks, the first of which is coarse. */
		CHECK_EQ(file_stamp_tells(fs[i].time, fs[i].fat, fs[i].time - 3, fs[i].time), -EAGAIN);
		/* Set to a time that has not come yet: it is not waited for. */
		CHECK_EQ(file_stamp_tells(fs[i].time, fs[i].fat, fs[i].time - 3, fs[i].time - 2), 0);
	}
}

/* --- What is no disk --- */

/* The write log takes a later stamp for somebody else's write: all that is not one must leave it alone. */
static co_fn void co_what_is_no_write_leaves_the_stamp(void)
{
	uint64_t before = 0, after, now;
	char path[128], buf[4096];
	struct disk *d;

	strcpy(path, make_file("no-write", 1 << 20));
	for (unsigned round = 0; round < 3; round++) {
		d = co_open(DISK_OPEN_RDWR, "%s", path);
		after = co_stamp_of(d, &now);
		if (!round)
			before = after;
		CHECK_EQ(after, before);
		CHECK_EQ(co_disk_read(d, 0, buf, sizeof(buf), 0), 0);
		CHECK_EQ(co_disk_flush(d), 0);
		CHECK_EQ(co_disk_mark_set(d, round % 2 ? "" : "a mark", NULL), 0);
		co_disk_close(d);
		co_sleep_ns(20000000);	/* the kernel's clock for files is coarse */
	}
}

/* Times in steps: 1 ns, 100 ns, 10 ms; whole seconds never tell. */
static co_fn void co_an_identity_counts_only_if_a_write_now_would_change_it(void)
{
	static const struct {
		uint64_t step, time;
	} fs[] = { { 1, 1790000000123456789 }, { 100, 1790000000123456700 }, { 10000000, 1790000000120000000 } };
	const uint64_t second = 1000000000;

	for (size_t i = 0; i < ARRAY_SIZE(fs); i++) {
		for (uint64_t now = fs[i].time - 3; now < fs[i].time + 2 * fs[i].step; now += max(fs[i].step / 50, (uint64_t)1)) {
			bool would_be_the_same = now <= fs[i].time || now / fs[i].step * fs[i].step == fs[i].time;

			CHECK_EQ(file_times_tell(5, fs[i].time, now), would_be_the_same ? -EAGAIN : 0);
		}
		CHECK_EQ(file_times_tell(fs[i].time, fs[i].time, fs[i].time + fs[i].step), 0);
		/* Set to a time that has not come yet. */
		CHECK_EQ(file_times_tell(fs[i].time + second, fs[i].time, fs[i].time + fs[i].step), -EAGAIN);
	}
	CHECK_EQ(file_times_tell(5, 1790000000 * second, 1790000000 * second + 1), -ENOTSUP);
	CHECK_EQ(file_times_tell(5, 1790000000 * second, 1890000000 * second + 1), -ENOTSUP);
}

static co_fn void co_what_is_no_disk_is_refused_in_one_line(void)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	char text[256];
	int fd;

	co_refused(DISK_OPEN_RDWR, dir, -EISDIR, "is a directory");
	co_refused(0, dir, -EISDIR, "is a directory");
	snprintf(text, sizeof(text), "%s/missing", dir);
	co_refused(DISK_OPEN_RDWR, text, -ENOENT, "create it first");
	snprintf(text, sizeof(text), "%s/fifo", dir);
	CHECK_EQ(mkfifo(text, 0600), 0);
	co_refused(DISK_OPEN_RDWR, text, -EINVAL, "is a FIFO");
	co_refused(0, text, -EINVAL, "is a FIFO");
	snprintf(text, sizeof(text), "%s/socket", dir);
	strcpy(addr.sun_path, text);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK_EQ(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	co_refused(DISK_OPEN_RDWR, text, -EINVAL, "is a socket");
	close(fd);
	co_refused(DISK_OPEN_RDWR, "/dev/zero", -EINVAL, "is a character device");
	snprintf(text, sizeof(text), "%s,aio=fast", make_file("f", 512));
	co_refused(DISK_OPEN_RDWR, text, -EINVAL, "io_uring");
	snprintf(text, sizeof(text), "%s,cahce=none", make_file("f", 512));
	co_refused(DISK_OPEN_RDWR, text, -EINVAL, "cahce");
}

static co_fn void co_a_read_only_file_opens_to_read(void)
{
	char path[128], buf[512];
	struct disk *d;

	strcpy(path, make_file("ro", 4096));
	CHECK_EQ(chmod(path, 0444), 0);
	if (geteuid() != 0)
		co_refused(DISK_OPEN_RDWR, path, -EACCES, "or open it read-only");
	d = co_open(0, "%s", path);
	CHECK_EQ(co_disk_read(d, 0, buf, 512, 0), 0);
	CHECK_EQ(co_disk_write(d, 0, buf, 512, 0), -EROFS);
	CHECK_EQ(co_disk_flush(d), 0);
	co_disk_close(d);
}

static co_fn void co_an_empty_file_is_an_empty_disk(void)
{
	struct disk *d = co_open(DISK_OPEN_RDWR, "%s", make_file("empty", 0));
	char byte;

	CHECK_EQ(d->size, 0u);
	CHECK_EQ(co_disk_read(d, 0, &byte, 1, 0), -EINVAL);
	CHECK_EQ(co_disk_flush(d), 0);
	co_disk_close(d);
}

static co_fn void co_main(void *arg)
{
	RUN(co_every_mode_reads_what_it_wrote);
	RUN(co_native_without_o_direct_is_refused);
	RUN(co_many_requests_at_once);
	RUN(co_a_request_is_one_submission_and_batches_share_a_call);
	RUN(co_a_file_that_was_cut_reads_as_an_error);
	RUN(co_resize_keeps_what_is_there_and_adds_zeroes);
	RUN(co_holes_and_data_are_told_apart);
	RUN(co_space_is_kept_or_freed_as_asked);
	RUN(co_limits_are_what_the_mode_promises);
	RUN(co_a_log_gets_stable_writes_and_nobody_else_in);
	RUN(co_one_writer_or_many_readers);
	RUN(co_a_mark_stays_with_the_file);
	RUN(co_a_mark_file_is_read_where_there_is_no_attribute);
	RUN(co_a_write_by_anybody_changes_the_stamp);
	RUN(co_what_is_no_write_leaves_the_stamp);
	RUN(co_a_stamp_counts_only_if_a_write_now_would_be_given_another);
	RUN(co_an_identity_counts_only_if_a_write_now_would_change_it);
	RUN(co_what_is_no_disk_is_refused_in_one_line);
	RUN(co_a_read_only_file_opens_to_read);
	RUN(co_an_empty_file_is_an_empty_disk);
}

/* Needs O_DIRECT where it runs. */
static void make_dir(void)
{
	char path[96];
	int fd;

	snprintf(dir, sizeof(dir), "test-file-XXXXXX");
	CHECK(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/probe", dir);
	fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
	if (fd < 0) {
		rmdir(dir);
		test_skip("the file system of the working directory has no O_DIRECT");
	}
	close(fd);
}

static void remove_dir(void)
{
	char command[128];

	snprintf(command, sizeof(command), "rm -rf ./%s", dir);
	if (system(command))
		test_fail("%s is left", dir);
}

int main(void)
{
	struct rt_bufpool *bufs;
	struct err err = ERR_INIT;

	rng_seed(&rng, test_seed());
	make_dir();
	backends_register();
	if (rt_create(NULL, &rt, &err) || rt_bufpool_create(rt, 64u << 20, &bufs, &err))
		test_fail("%s", err.msg);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, co_main, NULL), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	remove_dir();
	return 0;
}
