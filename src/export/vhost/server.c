/* SPDX-License-Identifier: MIT */
/*
 * vhost-user-blk server: devices, their sockets, the end. Design note in internal.h.
 */
#include "export/vhost/internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"

#define BACKLOG 16

int vhost_server_create(struct vhost_server **ret, struct err *err)
{
	struct vhost_server *s = calloc(1, sizeof(*s));

	if (!s)
		return err_set(err, -ENOMEM, "vhost-user server: out of memory");
	list_init(&s->devices);
	co_queue_init(&s->stop_q);
	*ret = s;
	return 0;
}

static void device_free(struct vhost_device *d)
{
	list_del(&d->node);
	free((char *)d->config.path);
	free(d);
}

void vhost_server_destroy(struct vhost_server *s)
{
	if (!s)
		return;
	list_for_each_safe(&s->devices, n)
		device_free(container_of(n, struct vhost_device, node));
	free(s);
}

/* --- Connections, one after the other --- */

static void name_peer(struct vhost_device *d)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);

	if (!getsockopt(d->fd, SOL_SOCKET, SO_PEERCRED, &cred, &len))
		snprintf(d->peer, sizeof(d->peer), "pid %d, uid %u", (int)cred.pid, (unsigned)cred.uid);
	else
		snprintf(d->peer, sizeof(d->peer), "unknown");
}

static co_fn void co_connection(struct vhost_device *d)
{
	name_peer(d);
	d->since_ns = rt_now_ns();
	d->connections++;
	d->losses_seen = rt_shm_losses();
	err_clear(&d->err);
	log_debug("%s: front end %s", d->config.path, d->peer);
	rt_poller_add(&d->poller);
	co_device_serve(d);
	co_device_stop(d);
	rt_poller_del(&d->poller);
	rt_timer_cancel(&d->tick);
	d->ticking = false;
	co_device_forget(d);
	co_io_close(d->fd);
	d->fd = -1;
	log_debug("%s: front end %s is gone", d->config.path, d->peer);
}

static co_fn void co_device_main(void *arg)
{
	struct vhost_device *d = arg;
	struct vhost_server *s = d->s;
	bool told = false;

	while (!s->stopping) {
		int fd = co_io_accept(d->sock.fd, NULL, NULL);

		if (fd >= 0) {
			told = false;
			d->fd = fd;
			if (s->stopping)
				rt_io_shutdown(fd);
			co_connection(d);
		} else if (!s->stopping && fd != -ECONNABORTED) {
			if (!told)
				log_warn("%s: cannot accept a front end: %s", d->config.path, strerror(-fd));
			told = true;
			co_sleep_ns(100 * 1000000ull);
		}
	}
	s->acceptors--;
	co_queue_wake_all(&s->stop_q);
}

/* All devices of the volume; its callback has place for one server. */
static void volume_resized(struct volume *v, void *arg)
{
	struct vhost_server *s = arg;

	list_for_each(&s->devices, n) {
		struct vhost_device *d = container_of(n, struct vhost_device, node);

		if (d->config.volume == v)
			device_config_changed(d);
	}
}

static void device_init(struct vhost_device *d, struct vhost_server *s, const struct vhost_device_config *c)
{
	d->s = s;
	d->config = *c;
	if (!d->config.queues || d->config.queues > VHOST_QUEUES_MAX)
		d->config.queues = VHOST_QUEUES_MAX;
	if (!d->config.max_in_flight)
		d->config.max_in_flight = 512;
	if (!d->config.block_size)
		d->config.block_size = 512;
	d->fd = d->backend_fd = -1;
	d->poller = (struct rt_poller){ .poll = device_poll, .sleep = device_sleep };
	list_init(&d->poller.node);
	d->blk.v = c->volume;
	d->blk.queues = (uint16_t)d->config.queues;
	d->blk.block_size = d->config.block_size;
	snprintf(d->blk.serial, sizeof(d->blk.serial), "%s", c->serial ? c->serial : c->volume->name);
	d->config.serial = d->blk.serial;
	virtio_blk_reset(&d->blk);
}

co_fn int co_vhost_server_add(struct vhost_server *s, const struct vhost_device_config *config, struct err *err)
{
	struct vhost_device *d = calloc(1, sizeof(*d));
	int ret;

	if (!d)
		return err_set(err, -ENOMEM, "%s: out of memory", config->path);
	device_init(d, s, config);
	d->config.path = strdup(config->path);
	list_init(&d->node);
	ret = d->config.path ? unix_listen(d->config.path, config->access, BACKLOG, &d->sock, err) : err_set(err, -ENOMEM, "%s: out of memory", config->path);
	if (ret < 0) {
		device_free(d);
		err_prefix(err, "vhost-user");
		return ret;
	}
	ret = co_spawn("vhost device", co_device_main, d);
	if (ret < 0) {
		unix_unlisten(&d->sock);
		device_free(d);
		return err_errno(err, ret, "vhost-user: %s", config->path);
	}
	s->acceptors++;
	list_add_tail(&s->devices, &d->node);
	config->volume->resized = volume_resized;
	config->volume->resized_arg = s;
	return 0;
}

co_fn int co_vhost_server_serve(struct vhost_server *s, const struct vhost_device_config *config, int fd, struct err *err)
{
	struct vhost_device *d = calloc(1, sizeof(*d));

	if (!d) {
		close(fd);
		return err_set(err, -ENOMEM, "%s: out of memory", config->path);
	}
	device_init(d, s, config);
	d->fd = fd;
	co_connection(d);
	free(d);
	return 0;
}

/* --- The end --- */

co_fn int co_vhost_server_stop(struct vhost_server *s, uint64_t deadline_ns)
{
	s->stopping = true;
	list_for_each(&s->devices, n) {
		struct vhost_device *d = container_of(n, struct vhost_device, node);

		d->config.volume->resized = NULL;
		rt_io_shutdown(d->sock.fd);
		if (d->fd >= 0)
			rt_io_shutdown(d->fd);
		/* At once, though the connection's coroutine will do it as well: it may wait for a message's work. */
		for (unsigned i = 0; i < d->nqueues; i++)
			if (d->queues[i])
				d->queues[i]->stopping = true;
	}
	while (s->acceptors && co_queue_wait_until(&s->stop_q, deadline_ns, "the last requests of virtual machines"))
		;
	if (s->acceptors)
		return -ETIMEDOUT;
	list_for_each(&s->devices, n)
		unix_unlisten(&container_of(n, struct vhost_device, node)->sock);
	return 0;
}

/* --- What is there --- */

static json_t *queue_status(const struct vhost_queue *q)
{
	return json_pack("{s:I, s:s, s:I, s:I, s:I, s:I, s:s?}", "queue", (json_int_t)q->index,
			 "state", q->broken ? "broken" : q->running ? "running" : "stopped", "size", (json_int_t)q->ring.num,
			 "in_flight", (json_int_t)q->in_flight, "requests", (json_int_t)q->popped, "calls", (json_int_t)q->calls,
			 "error", q->broken ? q->err.msg : NULL);
}

static json_t *device_status(const struct vhost_device *d)
{
	json_t *queues = json_array();
	char features[24];

	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i] && d->queues[i]->ring.num)
			json_array_append_new(queues, queue_status(d->queues[i]));
	snprintf(features, sizeof(features), "0x%llx", (unsigned long long)d->features);
	return json_pack("{s:s, s:s, s:b, s:s?, s:I, s:s, s:s?, s:I, s:I, s:I, s:I, s:b, s:I, s:s?, s:o}", "path", d->config.path,
			 "volume", d->config.volume->name, "connected", d->fd >= 0, "peer", d->fd >= 0 ? d->peer : NULL,
			 "connections", (json_int_t)d->connections, "features", features,
			 "cache", d->fd < 0 ? NULL : virtio_blk_is_writeback(&d->blk) ? "writeback" : "writethrough",
			 "requests", (json_int_t)d->blk.requests, "errors", (json_int_t)d->blk.errors,
			 "flushes", (json_int_t)d->blk.flushes, "durable_writes", (json_int_t)d->blk.durable, "migration_log", d->log_all,
			 "memory_regions", (json_int_t)(d->memory ? d->memory->n : 0), "error", d->err.code ? d->err.msg : NULL, "queues", queues);
}

void *vhost_server_status(struct vhost_server *s)
{
	json_t *list = json_array();

	list_for_each(&s->devices, n)
		json_array_append_new(list, device_status(container_of(n, struct vhost_device, node)));
	return list;
}

const char *vhost_server_path(struct vhost_server *s, unsigned i)
{
	list_for_each(&s->devices, n) {
		if (!i--)
			return container_of(n, struct vhost_device, node)->config.path;
	}
	return NULL;
}

unsigned vhost_server_connections(const struct vhost_server *s)
{
	unsigned n = 0;

	list_for_each(&s->devices, node)
		n += container_of(node, struct vhost_device, node)->fd >= 0;
	return n;
}
