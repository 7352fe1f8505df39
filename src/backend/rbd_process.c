/* SPDX-License-Identifier: MIT */
/*
 * rbd: which process of this host a client of the cluster was, and whether that process is certainly dead.
 *
 * A name is "BOOT/PIDNS/TIMENS/PID/START": the boot of this machine, the namespaces in which process ids and start times mean something, the process, and when it was
 * started. Only a name whose first three parts are our own says anything here. The process is dead if there is none of that id, or one that was
 * started at another time. Whatever cannot be read makes it alive: then the cluster's own time-out decides, as it does between hosts.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/rbd.h"

#define STAT_START 22	/* the field of /proc/PID/stat; the second one may contain anything and ends with the last ')' */

static bool read_line(const char *path, char *buf, size_t size)
{
	FILE *f = fopen(path, "re");
	bool ok = f && fgets(buf, (int)size, f);

	if (f)
		fclose(f);
	if (ok)
		buf[strcspn(buf, "\n")] = '\0';
	return ok && *buf;
}

static bool start_of(int pid, unsigned long long *ret)
{
	char path[48], buf[1024];
	const char *p;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	p = read_line(path, buf, sizeof(buf)) ? strrchr(buf, ')') : NULL;
	for (int field = 2; p && field < STAT_START; field++)
		p = strchr(p + 1, ' ');
	return p && sscanf(p, "%llu", ret) == 1;
}

/* The number of a namespace, from "pid:[4026531836]"; 0 where the kernel has none of the kind. */
static unsigned long namespace_of(const char *path)
{
	char link[64];
	ssize_t n = readlink(path, link, sizeof(link) - 1);
	const char *number;

	link[n < 0 ? 0 : n] = '\0';
	number = strchr(link, '[');
	return number ? strtoul(number + 1, NULL, 10) : 0;
}

/* "BOOT/PIDNS/TIMENS"; false where that cannot be told, or /proc is that of other processes. */
static bool name_place(char *buf, size_t size)
{
	unsigned long pidns = namespace_of("/proc/self/ns/pid");
	char boot[64], self[16];
	ssize_t n = readlink("/proc/self", self, sizeof(self) - 1);

	self[n < 0 ? 0 : n] = '\0';
	if (atoi(self) != getpid() || !pidns || !read_line("/proc/sys/kernel/random/boot_id", boot, sizeof(boot)))
		return false;
	return snprintf(buf, size, "%s/%lu/%lu", boot, pidns, namespace_of("/proc/self/ns/time")) < (int)size;
}

void rbd_process_name(char *buf, size_t size)
{
	unsigned long long start;
	char place[RBD_PROCESS_MAX];

	if (!name_place(place, sizeof(place)) || !start_of(getpid(), &start) ||
	    snprintf(buf, size, "%s/%d/%llu", place, (int)getpid(), start) >= (int)size)
		snprintf(buf, size, "unknown");
}

int rbd_process_is_dead(const char *name)
{
	unsigned long long start, now;
	char place[RBD_PROCESS_MAX];
	size_t len;
	int pid, end = 0;

	if (!name_place(place, sizeof(place)))
		return 0;
	len = strlen(place);
	if (strncmp(name, place, len) || sscanf(name + len, "/%d/%llu%n", &pid, &start, &end) != 2 || name[len + end] || pid <= 0)
		return 0;
	if (kill(pid, 0) && errno == ESRCH)
		return pid;
	return start_of(pid, &now) && now != start ? pid : 0;
}
