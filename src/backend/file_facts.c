/* SPDX-License-Identifier: MIT */
/*
 * What lies below a file: file system, device, its write cache.
 */
#include "backend/file_facts.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "util/bytes.h"

const char *fact_text(enum fact f)
{
	return f == FACT_YES ? "yes" : f == FACT_NO ? "no" : "unknown";
}

static int read_text(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;
	int error;

	if (fd < 0)
		return -errno;
	n = read(fd, buf, size - 1);
	error = n < 0 ? -errno : 0;
	close(fd);
	if (error)
		return error;
	while (n > 0 && isspace((unsigned char)buf[n - 1]))
		n--;
	buf[n] = '\0';
	return 0;
}

int file_sysfs_read(dev_t dev, const char *name, char *buf, size_t size)
{
	char path[256];
	int rc;

	snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/%s", major(dev), minor(dev), name);
	rc = read_text(path, buf, size);
	if (rc != -ENOENT)
		return rc;
	/* Attributes of the disk belong to the partition's parent. */
	snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/partition", major(dev), minor(dev));
	if (access(path, F_OK))
		return -ENOENT;
	snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/../%s", major(dev), minor(dev), name);
	return read_text(path, buf, size);
}

static uint64_t sysfs_u64(dev_t dev, const char *name)
{
	char buf[64];

	return file_sysfs_read(dev, name, buf, sizeof(buf)) ? 0 : strtoull(buf, NULL, 10);
}

static enum fact sysfs_bool(dev_t dev, const char *name)
{
	char buf[64];

	if (file_sysfs_read(dev, name, buf, sizeof(buf)))
		return FACT_UNKNOWN;
	return strcmp(buf, "0") ? FACT_YES : FACT_NO;
}

/* mountinfo writes blanks and backslashes as \ooo. */
static void unescape_octal(char *s)
{
	char *to = s;

	for (; *s; s++) {
		if (s[0] == '\\' && s[1] >= '0' && s[1] <= '3' && s[2] && s[3]) {
			*to++ = (char)((s[1] - '0') << 6 | (s[2] - '0') << 3 | (s[3] - '0'));
			s += 3;
		} else {
			*to++ = *s;
		}
	}
	*to = '\0';
}

/* The id of the mount that `fd` lies on, from its fdinfo; -1 if unknown. */
static int mount_id(int fd)
{
	char path[64], text[1024], *p;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	if (read_text(path, text, sizeof(text)))
		return -1;
	p = strstr(text, "mnt_id:");
	return p ? atoi(p + strlen("mnt_id:")) : -1;
}

static bool has_option(const char *list, const char *name)
{
	size_t n = strlen(name);

	for (const char *p = list; p; p = strchr(p, ','), p = p ? p + 1 : NULL)
		if (!strncmp(p, name, n) && (!p[n] || p[n] == ','))
			return true;
	return false;
}

/*
 * File system and source of the mount of `fd`. By mount id, since st_dev of a btrfs subvolume is in no table.
 * A line is: id parent maj:min root mountpoint options [tags] - fstype source superoptions
 */
static void find_mount(int fd, struct file_facts *f)
{
	int id = mount_id(fd);
	char line[4096], fs[32], source[128], options[1024];
	FILE *in;

	if (id < 0)
		return;
	in = fopen("/proc/self/mountinfo", "re");
	if (!in)
		return;
	while (fgets(line, sizeof(line), in)) {
		const char *sep;

		if (atoi(line) != id)
			continue;
		sep = strstr(line, " - ");
		options[0] = '\0';
		if (sep && sscanf(sep, " - %31s %127s %1023s", fs, source, options) >= 2) {
			snprintf(f->fs, sizeof(f->fs), "%s", fs);
			unescape_octal(source);
			if (source[0] == '/')
				snprintf(f->source, sizeof(f->source), "%s", source);
			f->lazytime = has_option(options, "lazytime");
			f->no_barriers = has_option(options, "nobarrier") || has_option(options, "barrier=0");
		}
		break;
	}
	fclose(in);
}

static bool has_jbd2(const char *device)
{
	DIR *dir = opendir("/proc/fs/jbd2");
	size_t n = strlen(device);
	struct dirent *e;
	bool found = false;

	if (!dir)
		return false;
	/* "vda1-8": the journal's inode number follows the device. */
	while (!found && (e = readdir(dir)))
		found = !strncmp(e->d_name, device, n) && e->d_name[n] == '-';
	closedir(dir);
	return found;
}

static const char *journal_of(const char *fs, const char *partition)
{
	if (!strcmp(fs, "ext4") || !strcmp(fs, "ext3")) {
		if (!partition[0] || access("/proc/fs/jbd2", F_OK))
			return "unknown";
		return has_jbd2(partition) ? "jbd2" : "none";
	}
	if (!strcmp(fs, "ext2") || !strcmp(fs, "vfat") || !strcmp(fs, "exfat"))
		return "none";
	if (!strcmp(fs, "xfs") || !strcmp(fs, "jfs"))
		return "log";
	if (!strcmp(fs, "btrfs") || !strcmp(fs, "zfs") || !strcmp(fs, "bcachefs"))
		return "copy on write";
	if (!strcmp(fs, "tmpfs") || !strcmp(fs, "ramfs"))
		return "none";
	return "unknown";
}

/* The kernel's name of a block device: the last part of where its sysfs entry points, and the parent's for a partition. */
static void device_name(dev_t dev, bool whole, char *buf, size_t size)
{
	char path[128], target[512], *name;
	ssize_t n;

	buf[0] = '\0';
	snprintf(path, sizeof(path), "/sys/dev/block/%u:%u", major(dev), minor(dev));
	n = readlink(path, target, sizeof(target) - 1);
	if (n <= 0)
		return;
	target[n] = '\0';
	name = strrchr(target, '/');
	strncat(path, "/partition", sizeof(path) - strlen(path) - 1);
	if (whole && name && !access(path, F_OK)) {
		*name = '\0';
		name = strrchr(target, '/');
	}
	if (name)
		snprintf(buf, size, "%s", name + 1);
}

static void device_facts(dev_t dev, struct file_facts *f)
{
	char buf[64];

	device_name(dev, true, f->device, sizeof(f->device));
	if (!file_sysfs_read(dev, "queue/write_cache", buf, sizeof(buf)))
		f->write_cache = strcmp(buf, "write back") ? FACT_NO : FACT_YES;
	f->fua = sysfs_bool(dev, "queue/fua");
	f->rotational = sysfs_bool(dev, "queue/rotational");
	f->logical_block = (uint32_t)sysfs_u64(dev, "queue/logical_block_size");
	f->physical_block = (uint32_t)sysfs_u64(dev, "queue/physical_block_size");
	f->write_zeroes_max = sysfs_u64(dev, "queue/write_zeroes_max_bytes");
	if (sysfs_u64(dev, "queue/discard_max_bytes"))
		f->discard_gran = (uint32_t)sysfs_u64(dev, "queue/discard_granularity");
	f->in_memory = !strncmp(f->device, "zram", 4) || !strncmp(f->device, "ram", 3);
}

void file_facts_get(int fd, struct file_facts *ret)
{
	struct stat st, src;
	char partition[64] = "";
	dev_t dev = 0;

	*ret = (struct file_facts){ .write_cache = FACT_UNKNOWN, .fua = FACT_UNKNOWN, .rotational = FACT_UNKNOWN };
	if (fstat(fd, &st))
		return;
	if (S_ISBLK(st.st_mode)) {
		device_facts(st.st_rdev, ret);
		return;
	}
	find_mount(fd, ret);
	/* btrfs and others give files an anonymous device: then the mount's source tells. */
	if (major(st.st_dev))
		dev = st.st_dev;
	else if (ret->source[0] && !stat(ret->source, &src) && S_ISBLK(src.st_mode))
		dev = src.st_rdev;
	if (dev) {
		device_facts(dev, ret);
		device_name(dev, false, partition, sizeof(partition));
	}
	snprintf(ret->journal, sizeof(ret->journal), "%s", journal_of(ret->fs, partition));
	if (!strcmp(ret->fs, "tmpfs") || !strcmp(ret->fs, "ramfs"))
		ret->in_memory = true;
}

/*
 * By statx where the kernel knows (6.1); for devices by BLKSSZGET. The alternative, reading at ever larger
 * alignments until one works, is in file_open.c: it needs data to read.
 */
int file_dio_align(int fd, const struct stat *st, uint32_t *ret_offset, uint32_t *ret_memory)
{
	int block;

	*ret_offset = *ret_memory = 0;
#ifdef STATX_DIOALIGN
	struct statx stx = { 0 };

	if (!statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &stx) && (stx.stx_mask & STATX_DIOALIGN)) {
		if (!stx.stx_dio_offset_align)
			return -ENOTSUP;
		*ret_offset = stx.stx_dio_offset_align;
		*ret_memory = stx.stx_dio_mem_align;
	}
#endif
	if (S_ISBLK(st->st_mode) && !ioctl(fd, BLKSSZGET, &block) && block > 0) {
		*ret_offset = max(*ret_offset, (uint32_t)block);
		if (!*ret_memory)
			*ret_memory = (uint32_t)block;
	}
	return 0;
}
