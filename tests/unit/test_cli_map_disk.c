/* SPDX-License-Identifier: MIT */
/* What disk a device is of: it goes on with that one only. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "cli/map_disk.h"
#include "lib/test.h"
#include "util/err.h"
#include "util/nbd_device.h"

static char folder[] = "/tmp/weir-map-disk-XXXXXX";
static struct err err;

static void touch(const char *path)
{
	int fd = open(path, O_CREAT | O_WRONLY, 0600);

	CHECK(fd >= 0 && !close(fd));
}

static int describe(struct map_disk *d, const char *disk, const char *log, const char *mirror, uint64_t block_size)
{
	const char *logs[] = { log, mirror };

	err_clear(&err);
	return map_disk_describe(d, disk, logs, log ? mirror ? 2 : 1 : 0, block_size, &err);
}

static void keep(const char *disk, const char *log, const char *mirror)
{
	struct map_disk d;

	CHECK_EQ(describe(&d, disk, log, mirror, 512), 0);
	CHECK_EQ(map_disk_keep(&d, "name", &err), 0);
	map_disk_free(&d);
}

static int check(const char *disk, const char *log, const char *mirror)
{
	struct map_disk d;
	int ret;

	CHECK_EQ(describe(&d, disk, log, mirror, 512), 0);
	ret = map_disk_check(&d, "name", "/dev/nbd7", &err);
	map_disk_free(&d);
	return ret;
}

static void a_disk_of_the_same_name_in_another_folder_is_another(void)
{
	char path[200];

	keep("a/disk.raw", NULL, NULL);
	CHECK_EQ(check("a/disk.raw", NULL, NULL), 0);
	CHECK_EQ(check("b/disk.raw", NULL, NULL), -EBUSY);
	CHECK(strstr(err.msg, "/dev/nbd7: waits for file:") && strstr(err.msg, "/a/disk.raw") && strstr(err.msg, "/b/disk.raw") &&
	      strstr(err.msg, "another --name, or weir unmap /dev/nbd7 first"));
	snprintf(path, sizeof(path), "%s/a/../a/disk.raw", folder);
	CHECK_EQ(check(path, NULL, NULL), 0);
	CHECK_EQ(check("link/disk.raw", NULL, NULL), 0);
	CHECK_EQ(chdir("a"), 0);
	CHECK_EQ(describe(&(struct map_disk){ NULL }, "nosuch:,", NULL, NULL, 512), -EINVAL);
	CHECK_EQ(chdir(".."), 0);
	CHECK_EQ(check("a/absent", NULL, NULL), -EBUSY);
}

static void the_same_path_from_another_folder_is_another(void)
{
	CHECK_EQ(chdir("a"), 0);
	keep("disk.raw", NULL, NULL);
	CHECK_EQ(rename("name.disk", "../b/name.disk"), 0);
	CHECK_EQ(chdir("../b"), 0);
	CHECK_EQ(check("disk.raw", NULL, NULL), -EBUSY);
	CHECK_EQ(check("../a/disk.raw", NULL, NULL), 0);
	keep("nbd+unix:///x?socket=s", NULL, NULL);
	CHECK_EQ(check("nbd+unix:///x?socket=s", NULL, NULL), 0);
	CHECK_EQ(rename("name.disk", "../name.disk"), 0);
	CHECK_EQ(chdir(".."), 0);
	CHECK_EQ(check("nbd+unix:///x?socket=s", NULL, NULL), -EBUSY);
}

static void other_options_or_layers_are_another(void)
{
	keep("a/disk.raw,offset=1M", NULL, NULL);
	CHECK_EQ(check("a/disk.raw,offset=1M", NULL, NULL), 0);
	CHECK_EQ(check("a/disk.raw,offset=2M", NULL, NULL), -EBUSY);
	CHECK_EQ(check("a/disk.raw", NULL, NULL), -EBUSY);
	CHECK_EQ(check("a/disk.raw,offset=1M,format=raw", NULL, NULL), -EBUSY);
	CHECK_EQ(check("delay:read=1ms:a/disk.raw,offset=1M", NULL, NULL), -EBUSY);
	CHECK_EQ(check("a/disk.raw,,offset=1M", NULL, NULL), -EBUSY);
}

static void other_logs_are_another(void)
{
	keep("a/disk.raw", "a/log", NULL);
	CHECK_EQ(check("a/disk.raw", "a/log", NULL), 0);
	CHECK_EQ(check("a/disk.raw", "b/log", NULL), -EBUSY);
	CHECK_EQ(check("a/disk.raw", NULL, NULL), -EBUSY);
	CHECK_EQ(check("a/disk.raw", "a/log", "b/log"), -EBUSY);
	keep("a/disk.raw", "a/log", "b/log");
	CHECK_EQ(check("a/disk.raw", "b/log", "a/log"), 0);
}

static void a_file_that_has_taken_the_place_is_another(void)
{
	keep("a/disk.raw", NULL, NULL);
	touch("a/new");
	CHECK_EQ(rename("a/new", "a/disk.raw"), 0);
	CHECK_EQ(check("a/disk.raw", NULL, NULL), -EBUSY);
}

static void other_blocks_are_another(void)
{
	struct map_disk d;

	keep("a/disk.raw", NULL, NULL);
	CHECK_EQ(describe(&d, "a/disk.raw", NULL, NULL, 4096), 0);
	CHECK_EQ(map_disk_check(&d, "name", "/dev/nbd7", &err), -EBUSY);
	map_disk_free(&d);
}

static void what_was_in_memory_or_is_not_known_is_not_the_same(void)
{
	keep("delay:read=1ms:mem:1M", NULL, NULL);
	CHECK_EQ(check("delay:read=1ms:mem:1M", NULL, NULL), -EBUSY);
	CHECK(strstr(err.msg, "in the memory of its server"));
	CHECK_EQ(truncate("name.disk", 0), 0);
	CHECK_EQ(check("a/disk.raw", NULL, NULL), -EBUSY);
	CHECK_EQ(unlink("name.disk"), 0);
	CHECK_EQ(check("a/disk.raw", NULL, NULL), -EBUSY);
	CHECK(strstr(err.msg, "does not say which that is"));
}

/* A file stands for the device. */
static void a_device_that_is_taken_on_again_gives_a_whole_block_or_is_refused(void)
{
	static const char block[8192];
	int fd = open("device", O_CREAT | O_RDWR, 0600);

	CHECK(fd >= 0 && write(fd, block, sizeof(block)) == sizeof(block));
	err_clear(&err);
	CHECK_EQ(nbd_device_check_alive("device", 4096, &err), 0);
	for (off_t size = 0; size <= 1024; size += 512) {
		CHECK_EQ(ftruncate(fd, size), 0);
		err_clear(&err);
		errno = 0;
		CHECK_EQ(nbd_device_check_alive("device", 4096, &err), -EIO);
		CHECK(strstr(err.msg, "device: does not work"));
		/* Whatever failed before. */
		errno = EAGAIN;
		CHECK_EQ(nbd_device_check_alive("device", 4096, NULL), -EIO);
	}
	if (!TEST_SANITIZED) {
		err_clear(&err);
		CHECK_EQ(nbd_device_check_alive("device", SIZE_MAX / 2, &err), -ENOMEM);
	}
	err_clear(&err);
	CHECK_EQ(nbd_device_check_alive("nowhere", 4096, &err), -ENOENT);
	close(fd);
}

int main(void)
{
	char command[64];

	CHECK(mkdtemp(folder) && !chdir(folder) && !mkdir("a", 0700) && !mkdir("b", 0700) && !symlink("a", "link"));
	touch("a/disk.raw");
	touch("b/disk.raw");
	touch("a/log");
	touch("b/log");
	RUN(a_disk_of_the_same_name_in_another_folder_is_another);
	RUN(the_same_path_from_another_folder_is_another);
	RUN(other_options_or_layers_are_another);
	RUN(other_logs_are_another);
	RUN(a_file_that_has_taken_the_place_is_another);
	RUN(other_blocks_are_another);
	RUN(what_was_in_memory_or_is_not_known_is_not_the_same);
	RUN(a_device_that_is_taken_on_again_gives_a_whole_block_or_is_refused);
	snprintf(command, sizeof(command), "rm -r %s", folder);
	return system(command) != 0;
}
