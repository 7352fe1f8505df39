/* SPDX-License-Identifier: MIT */
/* Disks that are mapped on this host: mounts of weir's files and the loop devices on them; NBD devices are map_nbd.c's. */
#include "cli/mapping.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "util/err.h"
#include "util/mountinfo.h"
#include "util/nbd_device.h"

#define FSTYPE "fuse.weir"
#define MAPPINGS_MAX 4096
#define ATTEMPTS 64		/* for a loop device that nobody else takes at the same moment */

void mapping_path(char *buf, size_t size, const char *file, const char *suffix)
{
	snprintf(buf, size, "%s%s", file, suffix);
}

/* --- Loop devices --- */

/* A line of /sys/block/loopN/NAME without its end. */
static bool read_sys(const char *loop, const char *name, char *buf, size_t size)
{
	char path[128];
	FILE *f;
	bool ok;

	snprintf(path, sizeof(path), "/sys/block/%.32s/%s", loop, name);
	f = fopen(path, "re");
	ok = f && fgets(buf, (int)size, f);
	if (f)
		fclose(f);
	if (ok)
		buf[strcspn(buf, "\n")] = '\0';
	return ok;
}

bool loop_backing(const char *device, char file[PATH_MAX])
{
	return !strncmp(device, "/dev/loop", 9) && !strchr(device + 5, '/') && read_sys(device + 5, "loop/backing_file", file, PATH_MAX);
}

static int configure(int ctl, int fd, struct loop_config *c, char device[32], struct err *err)
{
	int n = ioctl(ctl, LOOP_CTL_GET_FREE), dev, ret;

	if (n < 0)
		return err_errno(err, -errno, "no loop device is free");
	snprintf(device, 32, "/dev/loop%d", n);
	dev = open(device, O_RDWR | O_CLOEXEC);
	if (dev < 0)
		return err_errno(err, -errno, "%s", device);
	c->fd = (uint32_t)fd;
	ret = ioctl(dev, LOOP_CONFIGURE, c) < 0 ? -errno : 0;
	close(dev);
	return ret;
}

int loop_attach(const char *file, uint32_t block_size, bool read_only, char device[32], struct err *err)
{
	struct loop_config c = { .block_size = block_size, .info.lo_flags = LO_FLAGS_DIRECT_IO | (read_only ? LO_FLAGS_READ_ONLY : 0) };
	int ctl = open("/dev/loop-control", O_RDWR | O_CLOEXEC), fd, ret = -EBUSY;

	if (ctl < 0)
		return err_set(err, -errno, "/dev/loop-control: %s; this host has no loop devices (modprobe loop), but --file maps without one",
			       strerror(errno));
	fd = open(file, (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_DIRECT);
	if (fd < 0) {
		ret = err_errno(err, -errno, "%s", file);
		close(ctl);
		return ret;
	}
	snprintf((char *)c.info.lo_file_name, sizeof(c.info.lo_file_name), "%s", file);
	for (int i = 0; i < ATTEMPTS && ret == -EBUSY; i++)
		ret = configure(ctl, fd, &c, device, err);
	close(fd);
	close(ctl);
	return ret < 0 ? err_errno(err, ret, "%s: cannot be put on %s", device, file) : 0;
}

int loop_detach(const char *device, bool dead, struct err *err)
{
	static const struct timespec pause = { .tv_nsec = 5000000 };
	int fd = open(device, O_RDONLY | O_EXCL | O_CLOEXEC), ret = 0;
	char file[PATH_MAX];

	if (fd < 0 && errno == EBUSY)
		return err_set(err, -EBUSY, "%s: is in use; unmount what is on it (findmnt %s), and stop what holds it", device, device);
	if (fd < 0)
		return err_errno(err, -errno, "%s", device);
	if (fsync(fd) < 0 && !dead)
		ret = err_errno(err, -errno, "%s: not everything could be written; it stays mapped", device);
	if (!ret && ioctl(fd, LOOP_CLR_FD) < 0)
		ret = err_errno(err, -errno, "%s: cannot be taken away", device);
	close(fd);
	/* The kernel takes it away when the last who has it open goes; udev looks at it now and then. */
	for (int i = 0; !ret && i < 1000 && loop_backing(device, file); i++)
		nanosleep(&pause, NULL);
	if (!ret && loop_backing(device, file))
		ret = err_set(err, -EBUSY, "%s: somebody still has it open; it goes when they close it", device);
	return ret;
}

/* --- What is there --- */

pid_t mapping_server_pid(const char *path)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	struct ucred cred = { 0 };
	socklen_t len = sizeof(cred);
	int fd;

	if (strlen(path) >= sizeof(sun.sun_path))
		return 0;
	strcpy(sun.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return 0;
	if (connect(fd, (struct sockaddr *)&sun, sizeof(sun)) < 0 || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		cred.pid = 0;
	close(fd);
	return cred.pid;
}

static void fill(struct mapping *m, const struct mountinfo *info)
{
	char path[MAP_PATH_MAX];
	struct stat st;

	snprintf(m->file, sizeof(m->file), "%s", info->point);
	snprintf(m->volume, sizeof(m->volume), "%s", strncmp(info->source, "weir:", 5) ? info->source : info->source + 5);
	m->read_only = info->read_only;
	m->dead = stat(m->file, &st) < 0;
	m->size = m->dead ? 0 : (uint64_t)st.st_size;
	mapping_path(path, sizeof(path), m->file, ".log");
	m->own = !lstat(path, &st);
	mapping_path(path, sizeof(path), m->file, ".sock");
	m->pid = m->own ? mapping_server_pid(path) : 0;
}

/* Adds a copy of *m; the list grows by doubling. */
static int add(struct mapping **list, int n, const struct mapping *m)
{
	struct mapping *more;

	if (n >= MAPPINGS_MAX)
		return -E2BIG;
	if (!(n & (n - 1))) {
		more = realloc(*list, (n ? 2 * (size_t)n : 1) * sizeof(**list));
		if (!more)
			return -ENOMEM;
		*list = more;
	}
	(*list)[n] = *m;
	return n + 1;
}

/* Every loop device on the file, or the file alone. The new count. */
static int add_devices(struct mapping **list, int n, struct mapping *m)
{
	DIR *d = opendir("/sys/block");
	char backing[PATH_MAX], size[32];
	struct dirent *e;
	int before = n;

	while (d && n >= 0 && (e = readdir(d))) {
		snprintf(m->device, sizeof(m->device), "/dev/%.26s", e->d_name);
		if (!loop_backing(m->device, backing) || strcmp(backing, m->file))
			continue;
		if (m->dead && read_sys(e->d_name, "size", size, sizeof(size)))
			m->size = strtoull(size, NULL, 10) * 512;
		n = add(list, n, m);
	}
	if (d)
		closedir(d);
	m->device[0] = '\0';
	return n == before ? add(list, n, m) : n;
}

struct gathered {
	struct mapping **list, *m;
	int n;
};

static void add_nbd(void *arg, unsigned index, const char *backend)
{
	struct gathered *g = arg;
	char name[32], size[32];

	memset(g->m, 0, sizeof(*g->m));
	if (g->n < 0 || !map_nbd_parse(g->m, index, backend))
		return;
	snprintf(name, sizeof(name), "nbd%u", index);
	if (read_sys(name, "size", size, sizeof(size)))
		g->m->size = strtoull(size, NULL, 10) * 512;
	g->m->read_only = read_sys(name, "ro", size, sizeof(size)) && *size == '1';
	g->n = add(g->list, g->n, g->m);
}

int mapping_list(struct mapping **ret, struct err *err)
{
	FILE *f = fopen("/proc/self/mountinfo", "re");
	struct mountinfo *info = malloc(sizeof(*info));
	struct mapping *m = malloc(sizeof(*m));
	int n = f && info && m ? 0 : err_errno(err, f ? -ENOMEM : -errno, "/proc/self/mountinfo");

	*ret = NULL;
	while (n >= 0 && mountinfo_next(f, info)) {
		if (strcmp(info->type, FSTYPE))
			continue;
		memset(m, 0, sizeof(*m));
		fill(m, info);
		n = add_devices(ret, n, m);
		if (n < 0)
			err_errno(err, n, "mappings");
	}
	if (n >= 0) {
		struct gathered g = { ret, m, n };

		nbd_device_for_each(add_nbd, &g);
		n = g.n < 0 ? err_errno(err, g.n, "mappings") : g.n;
	}
	if (f)
		fclose(f);
	free(info);
	free(m);
	if (n < 0) {
		free(*ret);
		*ret = NULL;
	}
	return n;
}
