/* SPDX-License-Identifier: MIT */
/*
 * Disks that are mapped by the kernel's NBD client.
 *
 * Invariants
 *  (1) A device has one connection, and no time-out for requests. With several, or with one, the kernel takes a slow server for a lost connection and sends what waits
 *      again elsewhere; the older copy could then be carried out behind a newer write.
 *  (2) A device goes on with another server only when the one before has made safe what it had acknowledged, and ended, and with the same disk (map_disk.c). One that was
 *      killed, or could not, leaves its pid file behind; its device can only be taken away.
 *  (3) "weir:map:VOLUME@FILE.sock" is the backend's name of a device whose server `weir map` has started, "weir:use:VOLUME@CONTROL" that of another's. The server
 *      knows them too, and tells them of a new size (daemon/devices.c).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/mapping.h"
#include "cli/nbd_dial.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/nbd_device.h"
#include "util/nbd_proto.h"

#define DIAL_MS 10000
#define GONE_TRIES 1000
#define GONE_NS 5000000

static int backend_name(const struct map_nbd *n, char buf[NBD_BACKEND_MAX], struct err *err)
{
	int len = snprintf(buf, NBD_BACKEND_MAX, "weir:%s:%s@%s%s", n->own ? "map" : "use", n->volume, n->file, n->own ? ".sock" : "");

	if (strstr(n->volume, "@/") || strchr(n->volume, '\n') || strchr(n->file, '\n'))
		return err_set(err, -EINVAL, "'%s' cannot be the name of a mapped volume; give another", n->volume);
	return len < NBD_BACKEND_MAX ? 0 : err_set(err, -ENAMETOOLONG, "%s: the path is too long", n->file);
}

bool map_nbd_parse(struct mapping *m, unsigned index, const char *backend)
{
	const char *volume = backend + 9, *at;
	char path[MAP_PATH_MAX];
	size_t len;

	m->nbd = true;
	m->index = index;
	m->own = !strncmp(backend, "weir:map:", 9);
	if (!m->own && strncmp(backend, "weir:use:", 9))
		return false;
	at = strstr(volume, "@/");
	len = at ? strlen(at + 1) : 0;
	if (!at || (size_t)(at - volume) >= sizeof(m->volume) || (m->own && (len < 6 || strcmp(at + 1 + len - 5, ".sock"))))
		return false;
	snprintf(m->volume, sizeof(m->volume), "%.*s", (int)(at - volume), volume);
	snprintf(m->file, sizeof(m->file), "%.*s", (int)(len - (m->own ? 5 : 0)), at + 1);
	snprintf(m->device, sizeof(m->device), "/dev/nbd%u", index);
	mapping_path(path, sizeof(path), m->file, m->own ? ".sock" : "");
	m->pid = mapping_server_pid(path);
	m->dead = !m->pid;
	return true;
}

/* Free with close(c->fd). */
static int prepare(const struct map_nbd *n, struct nbd_device_config *c, char backend[NBD_BACKEND_MAX], struct err *err)
{
	struct nbd_dialled d;
	int ret = backend_name(n, backend, err);

	if (!ret)
		ret = nbd_dial(n->socket, n->volume, DIAL_MS, &d, err);
	if (ret < 0)
		return ret;
	if (d.min_block > n->block_size) {
		close(d.fd);
		return err_set(err, -EINVAL, "%s: its blocks have %u bytes; give --block-size %u", n->volume, d.min_block, d.min_block);
	}
	*c = (struct nbd_device_config){
		.fd = d.fd, .size = align_down(d.size, n->block_size), .block_size = n->block_size, .wait_s = n->wait_s, .backend = backend,
		.flags = (uint16_t)(d.flags | (n->read_only ? NBD_FLAG_READ_ONLY : 0)),
	};
	return 0;
}

int map_nbd_attach(const struct map_nbd *n, char device[32], struct err *err)
{
	char backend[NBD_BACKEND_MAX];
	struct nbd_device_config c;
	unsigned index = 0;
	int ret = prepare(n, &c, backend, err);

	if (ret < 0)
		return ret;
	ret = nbd_device_connect(&c, &index, err);
	close(c.fd);
	snprintf(device, 32, "/dev/nbd%u", index);
	return ret;
}

int map_nbd_attach_again(const struct map_nbd *n, const struct mapping *m, struct err *err)
{
	char backend[NBD_BACKEND_MAX];
	struct nbd_device_config c;
	int ret = prepare(n, &c, backend, err);

	if (ret < 0)
		return ret;
	if (c.size < m->size)
		ret = err_set(err, -EINVAL, "%s: has %llu bytes and the device %llu; it cannot go on with a disk that is smaller", n->volume,
			      (unsigned long long)c.size, (unsigned long long)m->size);
	else if (m->read_only != !!(c.flags & NBD_FLAG_READ_ONLY))
		ret = err_set(err, -EINVAL, "%s: was mapped %s, and can only go on so", m->device, m->read_only ? "read-only" : "to be written");
	if (!ret)
		ret = nbd_device_reconnect(m->index, &c, err);
	close(c.fd);
	return ret < 0 ? ret : nbd_device_check_alive(m->device, n->block_size, err);
}

/* Is it unused, and is all written? */
static int settle(const char *device, bool dead, struct err *err)
{
	int fd = open(device, O_RDONLY | O_EXCL | O_CLOEXEC), ret = 0;

	if (fd < 0 && errno == EBUSY)
		return err_set(err, -EBUSY, "%s: is in use; unmount what is on it (findmnt %s), and stop what holds it%s", device, device,
			       dead ? "; --force takes it away from them" : "");
	if (fd < 0)
		return err_errno(err, -errno, "%s", device);
	if (!dead && fsync(fd) < 0)
		ret = err_errno(err, -errno, "%s: not everything could be written; it stays mapped (--force takes it away all the same)", device);
	close(fd);
	return ret;
}

int map_nbd_detach(const struct mapping *m, bool force, struct err *err)
{
	static const struct timespec pause = { .tv_nsec = GONE_NS };
	char backend[NBD_BACKEND_MAX];
	int ret = force ? 0 : settle(m->device, m->dead, err);

	if (!ret)
		ret = nbd_device_disconnect(m->index, err);
	if (!ret && force && nbd_device_backend(m->index, backend))
		log_warn("%s: is cut off; it is free when the last who has it open closes it", m->device);
	for (int i = 0; !ret && !force && i < GONE_TRIES && nbd_device_backend(m->index, backend); i++)
		nanosleep(&pause, NULL);
	if (!ret && !force && nbd_device_backend(m->index, backend))
		ret = err_set(err, -EBUSY, "%s: somebody still has it open; it goes when they close it", m->device);
	return ret;
}
