/* SPDX-License-Identifier: MIT */
/*
 * The file backend where it needs a file system or a device of its own: full, without O_DIRECT, read-only, mounted, failing.
 *
 * Runs as root in a mount namespace, so that nothing is left however it ends.
 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <linux/fs.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "blk/spec.h"
#include "rt/buf.h"
#include "test_loop.h"
#include "test_rt.h"
#include "util/bytes.h"

#define MIB (1u << 20)

static char dir[] = "test-file-mounts-XXXXXX";
static char full[256];		/* dir, from the root */
static char *buf;		/* 1 MiB */

static co_fn struct disk *co_open(const char *text, unsigned flags)
{
	struct err err = ERR_INIT;
	struct disk *d = NULL;

	if (co_disk_open(text, flags, &d, &err))
		test_fail("%s: %s", text, err.msg);
	return d;
}

static co_fn void co_refused(const char *text, unsigned flags, int code, const char *part)
{
	struct err err = ERR_INIT;
	struct disk *d = NULL;
	int rc = co_disk_open(text, flags, &d, &err);

	if (rc != code || !strstr(err.msg, part))
		test_fail("%s: returned %d, \"%s\"; wanted %d, \"%s\"", text, rc, err.msg, code, part);
}

static const char *in(const char *folder, const char *rest)
{
	static char path[4][400];
	static unsigned n;
	char *p = path[n++ % 4];

	snprintf(p, sizeof(path[0]), "%s/%s%s", full, folder, rest);
	return p;
}

static const char *mount_new(const char *folder, const char *type, const char *source, const char *options)
{
	const char *path = in(folder, "");

	CHECK(!mkdir(path, 0755) || errno == EEXIST);
	if (mount(source, path, type, 0, options))
		test_fail("mount -t %s -o %s %s: %s", type, options, source, strerror(errno));
	return path;
}

static void make_file(const char *path, uint64_t size)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	CHECK(fd >= 0 && !ftruncate(fd, (off_t)size));
	close(fd);
}

/* Writes MiB by MiB until there is no space left; returns how many fitted. */
static co_fn unsigned co_fill(struct disk *d, unsigned flags)
{
	unsigned n = 0;
	int rc;

	while ((n + 1) * (uint64_t)MIB <= d->size && !(rc = co_disk_write(d, n * (uint64_t)MIB, buf, MIB, flags)))
		n++;
	CHECK_EQ(rc, -ENOSPC);
	return n;
}

/* --- No space: an error like any other, and the disk goes on --- */

static co_fn void co_check_full(const char *text, unsigned flags)
{
	struct disk *d = co_open(text, DISK_OPEN_RDWR);
	char one;
	unsigned n;

	n = co_fill(d, flags);
	CHECK(n >= 2);
	CHECK(!d->failed);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK_EQ(co_disk_write(d, 0, buf, MIB, flags), 0);
	CHECK_EQ(co_disk_write(d, (n + 1) * (uint64_t)MIB, buf, MIB, flags), -ENOSPC);
	/* Space that a discard gives back can be written to. */
	CHECK_EQ(co_disk_discard(d, 0, 2 * MIB, 0), 0);
	CHECK_EQ(co_disk_write(d, (n + 1) * (uint64_t)MIB, buf, MIB / 2, flags), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK_EQ(co_disk_read(d, (n + 1) * (uint64_t)MIB, &one, 1, 0), 0);
	CHECK_EQ(one, buf[0]);
	CHECK_EQ(co_disk_discard(d, 0, d->size, 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	co_disk_close(d);
}

static co_fn void co_a_full_file_system_fails_the_write_and_nothing_else(void)
{
	static const char *const modes[] = { "cache=writeback", "cache=writethrough", "cache=writeback,aio=threads" };
	char text[400];

	mount_new("tmpfs", "tmpfs", "none", "size=8m");
	make_file(in("tmpfs", "/disk"), 16 * MIB);
	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		snprintf(text, sizeof(text), "%s,%s", in("tmpfs", "/disk"), modes[i]);
		co_check_full(text, 0);
		co_check_full(text, DISK_FUA);
	}
}

static co_fn void co_a_full_ext4_fails_the_write_and_nothing_else(void)
{
	static const char *const modes[] = { "cache=none", "cache=directsync", "cache=none,aio=native", "cache=writeback", "cache=writethrough" };
	char text[500], dev[64];
	int fd;

	make_file(in("ext4.img", ""), 24 * MIB);
	snprintf(text, sizeof(text), "mkfs.ext4 -q -F %s 2>/dev/null", in("ext4.img", ""));
	if (system(text)) {
		printf("left out: mkfs.ext4 is not installed\n");
		return;
	}
	fd = loop_attach(in("ext4.img", ""), 512, dev, sizeof(dev));
	CHECK(fd >= 0);
	mount_new("ext4", "ext4", dev, NULL);
	make_file(in("ext4", "/disk"), 32 * MIB);
	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		snprintf(text, sizeof(text), "%s,%s", in("ext4", "/disk"), modes[i]);
		co_check_full(text, 0);
		co_check_full(text, DISK_FUA);
	}
	/* A mounted device is not to be written to; a look at it does no harm. */
	co_refused(dev, DISK_OPEN_RDWR, -EBUSY, "is mounted, or belongs to md");
	co_disk_close(co_open(dev, 0));
	CHECK_EQ(umount(in("ext4", "")), 0);
	co_disk_close(co_open(dev, DISK_OPEN_RDWR));
	close(fd);
}

/* --- Stable writes reach the device --- */

/* Flush requests that the loop device has completed: the 16th figure of its stat. */
static uint64_t flushes_of(const char *dev)
{
	unsigned long long n = 0;
	char path[128];
	FILE *in;

	snprintf(path, sizeof(path), "/sys/block/%s/stat", dev + strlen("/dev/"));
	in = fopen(path, "r");
	CHECK(in && fscanf(in, "%*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &n) == 1);
	fclose(in);
	return n;
}

static co_fn void co_count_flushes(const char *what, const char *disk, const char *dev)
{
	static const char *const modes[] = {
		"cache=none", "cache=none,aio=native", "cache=none,aio=threads", "cache=writeback", "cache=directsync", "cache=writethrough",
	};
	enum { N = 10 };
	char text[500];

	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		bool stable = i >= 4;
		struct disk *d;
		uint64_t before;

		snprintf(text, sizeof(text), "%s,%s", disk, modes[i]);
		d = co_open(text, DISK_OPEN_RDWR);
		CHECK_EQ(co_disk_write(d, 0, buf, MIB, 0), 0);
		CHECK_EQ(co_disk_flush(d), 0);
		before = flushes_of(dev);
		for (unsigned k = 0; k < N; k++)
			CHECK_EQ(co_disk_write(d, k * 8192, buf, 4096, stable ? 0 : DISK_FUA), 0);
		if (flushes_of(dev) < before + N)
			test_fail("%s, %s: %u stable writes gave %llu flushes of the device", what, modes[i], N,
				  (unsigned long long)(flushes_of(dev) - before));
		before = flushes_of(dev);
		for (unsigned k = 0; k < N; k++) {
			CHECK_EQ(co_disk_write(d, k * 8192, buf, 4096, 0), 0);
			CHECK_EQ(co_disk_flush(d), 0);
		}
		if (flushes_of(dev) < before + N)
			test_fail("%s, %s: %u flushes gave %llu flushes of the device", what, modes[i], N,
				  (unsigned long long)(flushes_of(dev) - before));
		co_disk_close(d);
	}
}

/* What `status` says of the place. */
static co_fn void co_check_facts(const char *disk, const char *dev, const char *fs, const char *journal)
{
	struct disk *d = co_open(disk, 0);
	json_t *s = disk_status(d);

	CHECK_STR(json_string_value(json_object_get(s, "file_system")), fs);
	CHECK_STR(json_string_value(json_object_get(s, "journal")), journal);
	CHECK_STR(json_string_value(json_object_get(s, "source")), dev);
	CHECK_STR(json_string_value(json_object_get(s, "device")), dev + strlen("/dev/"));
	CHECK(json_is_true(json_object_get(s, "barriers")) && json_is_false(json_object_get(s, "lazytime")));
	CHECK(json_is_true(json_object_get(s, "write_cache")));
	CHECK(json_is_false(json_object_get(s, "fua")));
	CHECK_EQ(json_integer_value(json_object_get(s, "logical_block")), 512);
	json_decref(s);
	co_disk_close(d);
}

static co_fn void co_each_stable_write_and_flush_reaches_the_device(void)
{
	static const struct {
		const char *fs, *mkfs, *journal;
	} kinds[] = {
		{ "ext2", "mkfs.ext2 -q -F", "none" }, { "ext3", "mkfs.ext3 -q -F", "jbd2" },
		{ "ext4", "mkfs.ext4 -q -F", "jbd2" }, { "ext4", "mkfs.ext4 -q -F -O ^has_journal", "none" },
		{ "xfs", "mkfs.xfs -q -f", "log" }, { "btrfs", "mkfs.btrfs -q -f", "copy on write" },
	};
	char text[500], dev[64];
	int fd;

	make_file(in("fs.img", ""), 4 * MIB);
	fd = loop_attach(in("fs.img", ""), 512, dev, sizeof(dev));
	CHECK(fd >= 0);
	co_count_flushes("a device", dev, dev);
	close(fd);
	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		make_file(in("fs.img", ""), 0);
		make_file(in("fs.img", ""), 400ull * MIB);
		snprintf(text, sizeof(text), "%s %s >/dev/null 2>&1", kinds[i].mkfs, in("fs.img", ""));
		if (system(text)) {
			printf("left out: %s\n", kinds[i].mkfs);
			continue;
		}
		fd = loop_attach(in("fs.img", ""), 512, dev, sizeof(dev));
		CHECK(fd >= 0);
		CHECK(!mkdir(in("fs", ""), 0755) || errno == EEXIST);
		if (mount(dev, in("fs", ""), kinds[i].fs, 0, NULL)) {
			printf("left out: mount -t %s: %s\n", kinds[i].fs, strerror(errno));
			close(fd);
			continue;
		}
		make_file(in("fs", "/disk"), 2 * MIB);
		co_check_facts(in("fs", "/disk"), dev, kinds[i].fs, kinds[i].journal);
		co_count_flushes(kinds[i].mkfs, in("fs", "/disk"), dev);
		CHECK_EQ(umount(in("fs", "")), 0);
		close(fd);
	}
}

/* --- A failed flush --- */

static int free_space(void *arg)
{
	return truncate(arg, 0) ? -errno : 0;
}

/* Writes to `path` until its file system is full. */
static void fill_up(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);

	CHECK(fd >= 0);
	while (write(fd, buf, MIB) > 0)
		;
	CHECK_EQ(errno, ENOSPC);
	close(fd);
}

/* A loop device over a sparse file in a full file system: what the page cache took cannot be written back. */
static co_fn void co_a_failed_flush_is_never_followed_by_a_good_one(void)
{
	static const char *const modes[] = { "cache=writeback", "cache=writeback,aio=threads", "cache=writethrough", "cache=none", "cache=directsync" };
	char text[128], dev[64], filler[400];
	int fd;

	mount_new("small", "tmpfs", "none", "size=4m");
	make_file(in("small", "/image"), 8 * MIB);
	strcpy(filler, in("small", "/filler"));
	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		bool direct = i >= 3;
		struct disk *d;
		int rc;

		fd = loop_attach(in("small", "/image"), 512, dev, sizeof(dev));
		CHECK(fd >= 0);
		snprintf(text, sizeof(text), "%s,%s", dev, modes[i]);
		d = co_open(text, DISK_OPEN_RDWR);
		CHECK_EQ(co_disk_write(d, 0, buf, MIB, 0), 0);
		CHECK_EQ(co_disk_flush(d), 0);
		fill_up(filler);
		rc = co_disk_write(d, 4 * MIB, buf, MIB, 0);
		if (direct) {
			/* Who writes directly is told at once, and nothing that was promised is lost. */
			CHECK_EQ(rc, -ENOSPC);
			CHECK_EQ(co_disk_write(d, 4 * MIB, buf, MIB, DISK_FUA), -ENOSPC);
			CHECK_EQ(free_space(filler), 0);
			CHECK_EQ(co_disk_write(d, 4 * MIB, buf, MIB, DISK_FUA), 0);
			CHECK_EQ(co_disk_flush(d), 0);
			goto next;
		}
		CHECK_EQ(rc, i == 2 ? -EIO : 0);
		if (i != 2)
			CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK(d->failed);
		/* There is room again, the kernel would flush with success now; the data is lost all the same. */
		CHECK_EQ(free_space(filler), 0);
		CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK_EQ(co_disk_write(d, 0, buf, 4096, 0), -EIO);
		CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK_EQ(co_disk_read(d, 0, buf, 4096, 0), 0);
next:
		co_disk_close(d);
		close(fd);
		make_file(in("small", "/image"), 0);
		make_file(in("small", "/image"), 8 * MIB);
	}
}

/* ext2 on a loop device on a full file system: what the page cache took of the file cannot be written back. */
static co_fn void co_an_error_of_write_back_is_not_forgotten_whoever_meets_it(void)
{
	enum { MARK, RESIZE, FUA, FLUSH, OPS };
	char text[500], dev[64], filler[400];
	struct err err = ERR_INIT;
	struct disk *d;
	int fd;

	snprintf(text, sizeof(text), "mkfs.ext2 -q -F -m 0 %s 2>/dev/null", in("tight", "/fs.img"));
	for (int op = MARK; op < OPS; op++) {
		mount_new("tight", "tmpfs", "none", "size=8m");
		make_file(in("tight", "/fs.img"), 16 * MIB);
		if (system(text)) {
			printf("left out: mkfs.ext2 is not installed\n");
			return;
		}
		fd = loop_attach(in("tight", "/fs.img"), 512, dev, sizeof(dev));
		CHECK(fd >= 0);
		mount_new("ext2", "ext2", dev, "user_xattr");
		make_file(in("ext2", "/disk"), 4 * MIB);
		snprintf(filler, sizeof(filler), "%s,cache=writeback", in("ext2", "/disk"));
		d = co_open(filler, DISK_OPEN_RDWR);
		strcpy(filler, in("tight", "/filler"));
		CHECK_EQ(co_disk_write(d, 0, buf, 4096, 0), 0);
		CHECK_EQ(co_disk_flush(d), 0);
		fill_up(filler);
		for (unsigned i = 0; i < 3; i++)
			CHECK_EQ(co_disk_write(d, i * MIB, buf, MIB, 0), 0);
		err_clear(&err);
		/* The kernel says "no space" here, too late for it to be a write's own affair. */
		if (op == MARK)
			CHECK_EQ(co_disk_mark_set(d, "a log", &err), -EIO);
		else if (op == RESIZE)
			CHECK_EQ(co_disk_resize(d, 5 * MIB, &err), -EIO);
		else if (op == FUA)
			CHECK_EQ(co_disk_write(d, MIB, buf, MIB, DISK_FUA), -EIO);
		else
			CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK(d->failed);
		CHECK_EQ(free_space(filler), 0);
		CHECK_EQ(co_disk_flush(d), -EIO);
		co_disk_close(d);
		umount(in("ext2", ""));
		close(fd);
		umount2(in("tight", ""), MNT_DETACH);
	}
}

/* Of a file system with times in whole seconds: a stamp that a write would be given, too, is not taken for one that tells. */
static co_fn void co_check_coarse_stamp(struct disk *d)
{
	uint64_t stamp, after, now;
	int ret;

	CHECK_EQ(co_disk_write(d, 0, buf, 4096, DISK_FUA), 0);
	while ((ret = co_disk_stamp(d, &stamp, &now)) == -EAGAIN)
		co_sleep_ns(20000000);
	CHECK_EQ(ret, 0);
	CHECK_EQ(stamp % 1000000000, 0);
	CHECK_EQ(co_disk_write(d, 0, buf, 4096, DISK_FUA), 0);
	CHECK(co_disk_stamp(d, &after, &now) != -ENOTSUP);
	CHECK(after > stamp);
}

static co_fn void co_a_mount_without_barriers_or_with_coarse_times_is_noticed(void)
{
	char text[500], dev[64];
	struct disk *d;
	json_t *s;
	int fd;

	make_file(in("fs.img", ""), 0);
	make_file(in("fs.img", ""), 16 * MIB);
	snprintf(text, sizeof(text), "mkfs.ext4 -q -F -I 128 %s >/dev/null 2>&1", in("fs.img", ""));
	if (system(text)) {
		printf("left out: mkfs.ext4 is not installed\n");
		return;
	}
	fd = loop_attach(in("fs.img", ""), 512, dev, sizeof(dev));
	CHECK(fd >= 0);
	mount_new("fs", "ext4", dev, "barrier=0");
	make_file(in("fs", "/disk"), MIB);
	d = co_open(in("fs", "/disk"), DISK_OPEN_RDWR);
	s = disk_status(d);
	CHECK(json_is_false(json_object_get(s, "barriers")));
	json_decref(s);
	co_check_coarse_stamp(d);
	co_disk_close(d);
	CHECK_EQ(umount(in("fs", "")), 0);
	close(fd);
}

/* After a power cut times of files may be as of a day ago there: they vouch for nothing. */
static co_fn void co_a_mount_with_late_times_is_noticed(void)
{
	struct disk_identity id;
	struct disk *d;
	json_t *s;
	int ret;

	for (unsigned late = 0; late < 2; late++) {
		mount_new("late", "tmpfs", "none", late ? "size=4M,lazytime" : "size=4M");
		make_file(in("late", "/disk"), MIB);
		d = co_open(in("late", "/disk"), DISK_OPEN_RDWR);
		s = disk_status(d);
		CHECK_EQ(json_is_true(json_object_get(s, "lazytime")), late);
		json_decref(s);
		while ((ret = co_disk_identity(d, &id)) == -EAGAIN)
			co_sleep_ns(2000000);
		CHECK_EQ(ret, late ? -ENOTSUP : 0);
		co_disk_close(d);
		CHECK_EQ(umount(in("late", "")), 0);
	}
}

/* What an I/O error in its journal does to a file system: here by its own ioctl. */
#define FS_IOC_SHUTDOWN _IOR('X', 125, uint32_t)

static co_fn void co_a_flush_to_a_file_system_that_gave_up_fails(void)
{
	static const char *const modes[] = { "cache=none", "cache=none,aio=threads", "cache=writeback", "cache=writethrough", "cache=directsync" };
	uint32_t how = 2;	/* without flushing the journal */
	char text[500], dev[64];
	struct disk *d;
	int fd, fs;

	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		make_file(in("fs.img", ""), 0);
		make_file(in("fs.img", ""), 16 * MIB);
		snprintf(text, sizeof(text), "mkfs.ext4 -q -F %s 2>/dev/null", in("fs.img", ""));
		if (system(text)) {
			printf("left out: mkfs.ext4 is not installed\n");
			return;
		}
		fd = loop_attach(in("fs.img", ""), 512, dev, sizeof(dev));
		CHECK(fd >= 0);
		fs = open(mount_new("fs", "ext4", dev, NULL), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		make_file(in("fs", "/disk"), MIB);
		snprintf(text, sizeof(text), "%s,%s", in("fs", "/disk"), modes[i]);
		d = co_open(text, DISK_OPEN_RDWR);
		CHECK_EQ(co_disk_write(d, 0, buf, 65536, 0), 0);
		CHECK_EQ(ioctl(fs, FS_IOC_SHUTDOWN, &how), 0);
		/* Where all was stable before, a flush has nothing to do; a write has. */
		if (i >= 3)
			CHECK(co_disk_write(d, 4096, buf, 4096, 0) < 0);
		else
			CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK(d->failed);
		co_disk_close(d);
		close(fs);
		CHECK_EQ(umount(in("fs", "")), 0);
		close(fd);
	}
}

/* --- A file system that can little: ramfs has no O_DIRECT, no attributes, no holes --- */

static co_fn void co_a_file_system_without_o_direct_is_cached(void)
{
	struct disk_extent e;
	char text[400], mark[64];
	struct err err = ERR_INIT;
	struct disk *d;
	json_t *s;

	mount_new("ramfs", "ramfs", "none", NULL);
	make_file(in("ramfs", "/disk"), MIB);
	strcpy(text, in("ramfs", "/disk"));
	d = co_open(text, DISK_OPEN_RDWR);
	s = disk_status(d);
	CHECK_STR(json_string_value(json_object_get(s, "cache")), "writeback");
	CHECK(json_is_false(json_object_get(s, "o_direct")));
	CHECK_STR(json_string_value(json_object_get(s, "file_system")), "ramfs");
	CHECK(json_is_true(json_object_get(s, "in_memory")));
	json_decref(s);
	CHECK_EQ(d->limits.discard_gran, 0u);
	memset(buf, 7, MIB);
	CHECK_EQ(co_disk_write(d, 0, buf, MIB, 0), 0);
	CHECK_EQ(co_disk_zero(d, 1000, 5000, 0), 0);
	CHECK_EQ(co_disk_zero(d, 1000, 5000, DISK_FAST), -EOPNOTSUPP);
	CHECK_EQ(co_disk_read(d, 0, buf, 8192, 0), 0);
	CHECK(buf[999] == 7 && bytes_are_zero(buf + 1000, 5000) && buf[6000] == 7);
	CHECK_EQ(co_disk_extent(d, 0, MIB, &e), 0);
	CHECK(!e.hole && e.len == MIB);
	CHECK_EQ(co_disk_mark_set(d, "a log has it", &err), 0);
	CHECK_EQ(access(in("ramfs", "/disk.weir-mark"), R_OK), 0);
	CHECK(access(in("ramfs", "/disk.weir-mark.tmp"), R_OK) != 0);
	CHECK_EQ(co_disk_mark_get(d, mark, sizeof(mark)), 0);
	CHECK_STR(mark, "a log has it");
	CHECK_EQ(co_disk_mark_set(d, "", &err), 0);
	CHECK(access(in("ramfs", "/disk.weir-mark"), R_OK) != 0);
	co_disk_close(d);

	d = co_open(text, DISK_OPEN_RDWR | DISK_OPEN_LOG);
	CHECK(!d->limits.volatile_cache);
	co_disk_close(d);
	snprintf(text, sizeof(text), "%s,cache=none", in("ramfs", "/disk"));
	co_refused(text, DISK_OPEN_RDWR, -ENOTSUP, "use cache=writeback");
	snprintf(text, sizeof(text), "%s,aio=native", in("ramfs", "/disk"));
	co_refused(text, DISK_OPEN_RDWR, -ENOTSUP, "use aio=io_uring");
}

/* --- File systems whose times say little --- */

static co_fn int co_identity_of(const char *path, struct disk_identity *ret)
{
	struct disk *d;
	int r = -EAGAIN;

	make_file(path, MIB);
	d = co_open(path, DISK_OPEN_RDWR);
	for (unsigned i = 0; i < 100 && r == -EAGAIN; i++) {
		r = co_disk_identity(d, ret);
		co_sleep_ns(1000000);
	}
	co_disk_close(d);
	return r;
}

static co_fn void co_times_in_whole_seconds_vouch_for_nothing(void)
{
	struct disk_identity id;
	char text[500], dev[64];
	int fd;

	CHECK_EQ(co_identity_of(in("fine", ""), &id), 0);
	make_file(in("coarse.img", ""), 8 * MIB);
	snprintf(text, sizeof(text), "mkfs.ext4 -q -F -I 128 -O ^has_journal %s 2>/dev/null", in("coarse.img", ""));
	if (system(text)) {
		printf("left out: mkfs.ext4 is not installed\n");
		return;
	}
	fd = loop_attach(in("coarse.img", ""), 512, dev, sizeof(dev));
	CHECK(fd >= 0);
	mount_new("coarse", "ext4", dev, NULL);
	CHECK_EQ(co_identity_of(in("coarse", "/disk"), &id), -ENOTSUP);
	CHECK_EQ(umount(in("coarse", "")), 0);
	close(fd);
}

/* --- Read-only places --- */

static co_fn void co_what_cannot_be_written_says_why(void)
{
	char dev[64], path[400];
	int fd, on = 1, off = 0;

	mount_new("ro", "tmpfs", "none", NULL);
	make_file(in("ro", "/disk"), MIB);
	CHECK_EQ(mount("none", in("ro", ""), "tmpfs", MS_REMOUNT | MS_RDONLY, NULL), 0);
	strcpy(path, in("ro", "/disk"));
	co_refused(path, DISK_OPEN_RDWR, -EROFS, "is on a read-only file system; open it read-only");
	co_disk_close(co_open(path, 0));

	make_file(in("loop.img", ""), MIB);
	fd = loop_attach(in("loop.img", ""), 4096, dev, sizeof(dev));
	CHECK(fd >= 0);
	CHECK_EQ(ioctl(fd, BLKROSET, &on), 0);
	co_refused(dev, DISK_OPEN_RDWR, -EROFS, "the device is read-only");
	co_disk_close(co_open(dev, 0));
	CHECK_EQ(ioctl(fd, BLKROSET, &off), 0);	/* or the next who gets this loop device finds it so */
	close(fd);
}

/* --- Devices --- */

static co_fn void co_a_device_tells_its_sectors_and_keeps_a_mark_on_this_host(void)
{
	char dev[64], again[64], mark[64];
	struct err err = ERR_INIT;
	struct disk *d;
	uint64_t a, b;
	json_t *s;
	int fd;

	make_file(in("loop.img", ""), 2 * MIB);
	fd = loop_attach(in("loop.img", ""), 4096, dev, sizeof(dev));
	CHECK(fd >= 0);
	d = co_open(dev, DISK_OPEN_RDWR);
	CHECK_EQ(d->size, 2u * MIB);
	CHECK_EQ(d->limits.align, 4096u);
	CHECK_EQ(d->limits.atomic_unit, 4096u);
	CHECK(!d->limits.discard_zeroes);
	s = disk_status(d);
	CHECK_STR(json_string_value(json_object_get(s, "kind")), "device");
	CHECK_STR(json_string_value(json_object_get(s, "device")), dev + strlen("/dev/"));
	CHECK_EQ(json_integer_value(json_object_get(s, "logical_block")), 4096);
	json_decref(s);
	CHECK_EQ(co_disk_stamp(d, &a, &b), -ENOTSUP);
	CHECK_EQ(co_disk_resize(d, 4 * MIB, &err), -ENOTSUP);
	err_clear(&err);
	CHECK_EQ(co_disk_mark_set(d, "the log", &err), 0);
	co_disk_close(d);
	close(fd);
	/* Under another number it is the same device. */
	fd = loop_attach(in("loop.img", ""), 512, again, sizeof(again));
	CHECK(fd >= 0);
	d = co_open(again, DISK_OPEN_RDWR);
	CHECK_EQ(co_disk_mark_get(d, mark, sizeof(mark)), 0);
	CHECK_STR(mark, "the log");
	CHECK_EQ(co_disk_mark_set(d, "", &err), 0);
	CHECK_EQ(co_disk_mark_get(d, mark, sizeof(mark)), 0);
	CHECK_STR(mark, "");
	co_disk_close(d);
	close(fd);
}

static co_fn void co_main(void *arg)
{
	RUN(co_a_full_file_system_fails_the_write_and_nothing_else);
	RUN(co_a_full_ext4_fails_the_write_and_nothing_else);
	RUN(co_each_stable_write_and_flush_reaches_the_device);
	RUN(co_a_mount_without_barriers_or_with_coarse_times_is_noticed);
	RUN(co_a_mount_with_late_times_is_noticed);
	RUN(co_a_failed_flush_is_never_followed_by_a_good_one);
	RUN(co_an_error_of_write_back_is_not_forgotten_whoever_meets_it);
	RUN(co_a_flush_to_a_file_system_that_gave_up_fails);
	RUN(co_a_file_system_without_o_direct_is_cached);
	RUN(co_times_in_whole_seconds_vouch_for_nothing);
	RUN(co_what_cannot_be_written_says_why);
	RUN(co_a_device_tells_its_sectors_and_keeps_a_mark_on_this_host);
}

/* A namespace has copies of all mounts. One of a test that runs beside this one would outlast its end there, and that test would wait for it. */
static void drop_foreign_mounts(void)
{
	FILE *f = fopen("/proc/self/mountinfo", "r");
	char line[4096], where[1024];

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "%*u %*u %*s %*s %1023s", where) == 1 && !strncmp(where, "/tmp/", 5))
			(void)umount2(where, MNT_DETACH);
	if (f)
		fclose(f);
}

int main(void)
{
	struct rt_bufpool *bufs;
	struct err err = ERR_INIT;
	struct rt *rt;
	char command[600];

	if (geteuid() || unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		test_skip("mounting needs root");
	drop_foreign_mounts();
	if (access("/dev/loop-control", R_OK | W_OK))
		test_skip("there are no loop devices");
	CHECK(mkdtemp(dir) && realpath(dir, full));
	setenv("WEIR_STATE_DIR", full, 1);
	buf = malloc(MIB);
	CHECK(buf);
	memset(buf, 0x5a, MIB);
	backends_register();
	rt = make_rt(NULL);
	if (rt_bufpool_create(rt, RT_BUF_MAX, &bufs, &err))
		test_fail("%s", err.msg);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, co_main, NULL), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	free(buf);
	snprintf(command, sizeof(command), "umount %s/*/ 2>/dev/null; rm -rf %s", full, full);
	if (system(command))
		test_fail("%s is left", dir);
	return 0;
}
