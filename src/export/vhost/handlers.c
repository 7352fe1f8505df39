/* SPDX-License-Identifier: MIT */
/*
 * vhost-user-blk server: what each message does. A handler gets a payload of the length that the table allows, and as many
 * descriptors; those it keeps it replaces by -1.
 */
#include "export/vhost/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"

#define STATUS_NEEDS_RESET 0x40u
#define STATUS_FEATURES_OK 0x08u

#define PROTOCOL_FEATURES (VHOST_USER_PROTOCOL_F_MQ | VHOST_USER_PROTOCOL_F_LOG_SHMFD | VHOST_USER_PROTOCOL_F_REPLY_ACK | \
			   VHOST_USER_PROTOCOL_F_BACKEND_REQ | VHOST_USER_PROTOCOL_F_CONFIG | VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD | \
			   VHOST_USER_PROTOCOL_F_RESET_DEVICE | VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS | VHOST_USER_PROTOCOL_F_STATUS)

static uint64_t offered(const struct vhost_device *d)
{
	return virtio_blk_features(&d->blk) | VHOST_F_LOG_ALL | VIRTIO_F_INDIRECT_DESC | VIRTIO_F_EVENT_IDX | VHOST_USER_F_PROTOCOL_FEATURES |
	       VIRTIO_F_VERSION_1_BIT;
}

static void reply(struct vhost_message *m, uint32_t len)
{
	m->reply = true;
	m->reply_len = len;
}

static void reply_u64(struct vhost_message *m, uint64_t v)
{
	m->p.u64 = v;
	reply(m, sizeof(m->p.u64));
}

static int take_fd(struct vhost_message *m, unsigned i)
{
	int fd = m->fd[i];

	m->fd[i] = -1;
	return fd;
}

/* --- Features, status --- */

static co_fn int co_get_features(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	reply_u64(m, offered(d));
	return 0;
}

static co_fn int co_set_features(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	uint64_t unknown = m->p.u64 & ~offered(d);

	if (unknown)
		return err_set(err, -EINVAL, "features 0x%llx were not offered", (unsigned long long)unknown);
	d->features = d->blk.features = m->p.u64;
	d->log_all = d->features & VHOST_F_LOG_ALL;
	device_update(d);
	return 0;
}

static co_fn int co_get_protocol_features(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	reply_u64(m, PROTOCOL_FEATURES);
	return 0;
}

static co_fn int co_set_protocol_features(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	if (m->p.u64 & ~PROTOCOL_FEATURES)
		return err_set(err, -EINVAL, "protocol features 0x%llx were not offered", (unsigned long long)(m->p.u64 & ~PROTOCOL_FEATURES));
	d->protocol = m->p.u64;
	return 0;
}

static co_fn int co_set_owner(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	return 0;
}

static co_fn void co_reset(struct vhost_device *d)
{
	co_device_stop(d);
	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i])
			d->queues[i]->started = d->queues[i]->enabled = d->queues[i]->broken = false;
	d->features = 0;
	d->log_all = false;
	d->status = 0;
	virtio_blk_reset(&d->blk);
}

static co_fn int co_reset_device(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	co_reset(d);
	return 0;
}

static co_fn int co_set_status(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	uint8_t status = (uint8_t)m->p.u64;

	if (m->p.u64 > 0xff)
		return err_set(err, -EINVAL, "status 0x%llx", (unsigned long long)m->p.u64);
	d->status_used = true;
	if (!status)
		co_reset(d);
	d->status = status;
	return 0;
}

static co_fn int co_get_status(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	bool broken = false;

	for (unsigned i = 0; i < d->nqueues; i++)
		broken |= d->queues[i] && d->queues[i]->broken;
	reply_u64(m, d->status | (broken ? STATUS_NEEDS_RESET : 0));
	return 0;
}

/* --- Memory --- */

/* Requests in flight keep the old table; rings are found anew in this one. */
static void use_memory(struct vhost_device *d, struct vhost_memory *m)
{
	struct vhost_memory *old = d->memory;

	d->memory = m;
	d->memory_lost = false;
	device_remap(d);
	vhost_memory_put(old);
	device_update(d);
}

static int add_region(struct vhost_memory **m, const struct vhost_user_region *d, int fd, struct err *err)
{
	struct vhost_memory *more;
	struct vhost_region *r;
	int ret = vhost_region_map(d, fd, &r, err);

	if (ret < 0)
		return ret;
	ret = vhost_memory_add(*m, r, &more, err);
	vhost_region_put(r);
	if (ret < 0)
		return ret;
	vhost_memory_put(*m);
	*m = more;
	return 0;
}

static co_fn int co_set_mem_table(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_memory *table = NULL;
	uint32_t n = m->p.memory.n;
	int ret = 0;

	if (n > VHOST_USER_MAX_FDS || m->nfds != n || m->hdr.size < 8 + n * sizeof(m->p.memory.region[0]))
		return err_set(err, -EINVAL, "%u regions with %u descriptors in %u bytes", n, m->nfds, m->hdr.size);
	for (uint32_t i = 0; i < n && !ret; i++)
		ret = add_region(&table, &m->p.memory.region[i], m->fd[i], err);
	if (ret < 0) {
		vhost_memory_put(table);
		return ret;
	}
	use_memory(d, table);
	return 0;
}

static co_fn int co_get_max_mem_slots(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	reply_u64(m, VHOST_REGIONS_MAX);
	return 0;
}

static co_fn int co_add_mem_reg(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_memory *table = d->memory ? vhost_memory_get(d->memory) : NULL;
	int ret = add_region(&table, &m->p.single.region, m->fd[0], err);

	if (ret < 0)
		vhost_memory_put(table);
	else
		use_memory(d, table);
	return ret;
}

static co_fn int co_rem_mem_reg(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_memory *table;
	int ret = vhost_memory_remove(d->memory, &m->p.single.region, &table, err);

	if (!ret)
		use_memory(d, table);
	return ret;
}

static co_fn int co_set_log_base(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	int ret;

	if (!(d->protocol & VHOST_USER_PROTOCOL_F_LOG_SHMFD) || m->nfds != 1 || m->hdr.size < sizeof(m->p.log))
		return err_set(err, -EINVAL, "a log of dirty pages comes as one descriptor (LOG_SHMFD)");
	ret = vhost_log_map(&d->log, &m->p.log, m->fd[0], err);
	if (ret < 0)
		return ret;
	reply_u64(m, 0);
	return 0;
}

/* Only a hint for the front end, which looks at the log by itself. */
static co_fn int co_set_log_fd(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	return 0;
}

/* --- Rings --- */

static co_fn int co_set_vring_num(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.state.index, err);
	uint32_t num = m->p.state.num;

	if (!q)
		return err->code;
	if (q->running)
		return err_set(err, -EBUSY, "queue %u is running", q->index);
	if (!is_pow2(num) || num > VRING_NUM_MAX)
		return err_set(err, -EINVAL, "a ring of %u; a power of two up to %u is needed", num, VRING_NUM_MAX);
	q->ring.num = num;
	queue_update(q);
	return 0;
}

/* While a ring runs it may stay where it is and switch its logging; that is what migration does. */
static co_fn int co_set_vring_addr(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	const struct vhost_user_vring_addr *a = &m->p.addr;
	struct vhost_queue *q = queue_get(d, a->index, err);
	struct vring *r, moved;
	int ret;

	if (!q)
		return err->code;
	r = &q->ring;
	if (q->running && (r->desc_uva != a->desc || r->used_uva != a->used || r->avail_uva != a->avail))
		return err_set(err, -EBUSY, "the ring of queue %u cannot move while it is running", q->index);
	moved = *r;
	moved.desc_uva = a->desc;
	moved.used_uva = a->used;
	moved.avail_uva = a->avail;
	/* A wrong address is told at once and not when the ring starts. */
	if (d->memory && moved.num && !q->running) {
		ret = vring_map(&moved, d->memory, err);
		if (ret < 0)
			return ret;
	}
	r->desc_uva = a->desc;
	r->used_uva = a->used;
	r->avail_uva = a->avail;
	r->log_used = a->flags & VHOST_VRING_F_LOG_USED;
	r->log_addr = a->log;
	queue_update(q);
	return 0;
}

static co_fn int co_set_vring_base(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.state.index, err);

	if (!q)
		return err->code;
	if (q->running)
		return err_set(err, -EBUSY, "queue %u is running", q->index);
	if (m->p.state.num > UINT16_MAX)
		return err_set(err, -EINVAL, "index %u", m->p.state.num);
	q->ring.last_avail = (uint16_t)m->p.state.num;
	return 0;
}

static co_fn int co_get_vring_base(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.state.index, err);

	if (!q)
		return err->code;
	co_queue_stop(q);
	q->started = false;
	queue_set_kick(q, -1);
	m->p.state.num = q->ring.last_avail;
	reply(m, sizeof(m->p.state));
	return 0;
}

/*
 * An eventfd, or where we only write a pipe or a socket (Linux' own front end has one), or -1 if there is none. -EINVAL if it is something
 * else, on which a signal might do anything.
 */
static int event_fd(struct vhost_message *m, bool write_only, int *ret, struct err *err)
{
	char path[64], what[32];
	ssize_t n;

	*ret = -1;
	if (m->p.u64 & VHOST_VRING_NOFD)
		return m->nfds ? err_set(err, -EINVAL, "a descriptor where none was announced") : 0;
	if (m->nfds != 1)
		return err_set(err, -EINVAL, "no descriptor");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", m->fd[0]);
	n = readlink(path, what, sizeof(what) - 1);
	if (n >= 0) {
		what[n] = '\0';
		if (!strstr(what, "[eventfd]") && !(write_only && (!strncmp(what, "pipe:", 5) || !strncmp(what, "socket:", 7))))
			return err_set(err, -EINVAL, "the descriptor is no eventfd");
	}
	*ret = take_fd(m, 0);
	/* The peer can take that back; signals go through the ring and never block the reactor. */
	fcntl(*ret, F_SETFL, fcntl(*ret, F_GETFL) | O_NONBLOCK);
	return 0;
}

static co_fn int co_set_vring_kick(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.u64 & VHOST_VRING_INDEX, err);
	int fd, ret;

	if (!q)
		return err->code;
	ret = event_fd(m, false, &fd, err);
	if (ret < 0)
		return ret;
	queue_set_kick(q, fd);
	q->started = true;
	queue_update(q);
	return 0;
}

static co_fn int co_set_vring_call(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.u64 & VHOST_VRING_INDEX, err);
	int fd, ret;

	if (!q)
		return err->code;
	ret = event_fd(m, true, &fd, err);
	if (!ret)
		co_queue_set_call(q, fd);
	return ret;
}

static co_fn int co_set_vring_err(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.u64 & VHOST_VRING_INDEX, err);
	int fd, ret;

	if (!q)
		return err->code;
	ret = event_fd(m, true, &fd, err);
	if (ret < 0)
		return ret;
	if (q->err_fd >= 0)
		co_io_close(q->err_fd);
	q->err_fd = fd;
	return 0;
}

static co_fn int co_set_vring_enable(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_queue *q = queue_get(d, m->p.state.index, err);

	if (!q)
		return err->code;
	if (m->p.state.num > 1)
		return err_set(err, -EINVAL, "neither on nor off: %u", m->p.state.num);
	q->enabled = m->p.state.num;
	if (!q->enabled && (d->features & VHOST_USER_F_PROTOCOL_FEATURES))
		co_queue_stop(q);
	queue_update(q);
	return 0;
}

static co_fn int co_get_queue_num(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	reply_u64(m, d->config.queues);
	return 0;
}

/* --- Config space, the channel back, requests in flight --- */

static co_fn int co_get_config(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	struct vhost_user_config *c = &m->p.config;
	uint8_t config[VHOST_USER_CONFIG_MAX] = { 0 };

	/* An error is a reply without payload. */
	if (m->hdr.size < 12 || c->size > sizeof(config) || c->offset > sizeof(config) - c->size || m->hdr.size < 12 + c->size) {
		reply(m, 0);
		return 0;
	}
	virtio_blk_config(&d->blk, config);
	memcpy(c->data, config + c->offset, c->size);
	reply(m, 12 + c->size);
	return 0;
}

static co_fn int co_set_config(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	const struct vhost_user_config *c = &m->p.config;
	uint32_t at = VIRTIO_BLK_CONFIG_WCE;
	int ret;

	if (m->hdr.size < 12 || c->size > sizeof(c->data) || m->hdr.size < 12 + c->size || c->offset > VHOST_USER_CONFIG_MAX)
		return err_set(err, -EINVAL, "%u bytes at %u", c->size, c->offset);
	/* Migration hands over all of it; only the cache mode is state. */
	if (c->flags == 1)
		return at >= c->offset && at - c->offset < c->size ?
		       co_virtio_blk_set_config(&d->blk, at, c->data + (at - c->offset), 1) : 0;
	ret = co_virtio_blk_set_config(&d->blk, c->offset, c->data, c->size);
	if (ret == -EINVAL)
		return err_set(err, ret, "%u bytes at %u: only the cache mode (1 byte at %u) can be written", c->size, c->offset, at);
	return ret < 0 ? err_errno(err, ret, "the cache could not be switched off") : 0;
}

static co_fn int co_set_backend_req_fd(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	if (d->backend_fd >= 0)
		close(d->backend_fd);
	d->backend_fd = take_fd(m, 0);
	return 0;
}

static co_fn int co_get_inflight_fd(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	int ret = inflight_create(d, &m->p.inflight, &m->reply_fd, err);

	if (!ret)
		reply(m, max(m->hdr.size, VHOST_USER_INFLIGHT_LEN));
	return ret;
}

static co_fn int co_set_inflight_fd(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	int ret = inflight_attach(d, &m->p.inflight, m->fd[0], err);

	if (!ret)
		device_update(d);
	return ret;
}

/* --- The table --- */

#define NONE 0, 0
#define U64 8, 8
#define STATE 8, 8

static const struct handler {
	const char *name;
	int (*co_run)(struct vhost_device *d, struct vhost_message *m, struct err *err);
	uint32_t least, most;	/* bytes of payload */
	uint8_t fds_least, fds_most;
} handlers[VHOST_USER_REQUESTS] = {
	[VHOST_USER_GET_FEATURES] = { "GET_FEATURES", co_get_features, NONE },
	[VHOST_USER_SET_FEATURES] = { "SET_FEATURES", co_set_features, U64 },
	[VHOST_USER_SET_OWNER] = { "SET_OWNER", co_set_owner, NONE },
	/* Deprecated; what it was meant to do, RESET_DEVICE does. */
	[VHOST_USER_RESET_OWNER] = { "RESET_OWNER", co_set_owner, NONE },
	[VHOST_USER_SET_MEM_TABLE] = { "SET_MEM_TABLE", co_set_mem_table, 8, sizeof(struct vhost_user_memory), 0, VHOST_USER_MAX_FDS },
	[VHOST_USER_SET_LOG_BASE] = { "SET_LOG_BASE", co_set_log_base, 8, sizeof(struct vhost_user_log), 0, 1 },
	[VHOST_USER_SET_LOG_FD] = { "SET_LOG_FD", co_set_log_fd, 0, 8, 0, 1 },
	[VHOST_USER_SET_VRING_NUM] = { "SET_VRING_NUM", co_set_vring_num, STATE },
	[VHOST_USER_SET_VRING_ADDR] = { "SET_VRING_ADDR", co_set_vring_addr, sizeof(struct vhost_user_vring_addr), sizeof(struct vhost_user_vring_addr) },
	[VHOST_USER_SET_VRING_BASE] = { "SET_VRING_BASE", co_set_vring_base, STATE },
	[VHOST_USER_GET_VRING_BASE] = { "GET_VRING_BASE", co_get_vring_base, STATE },
	[VHOST_USER_SET_VRING_KICK] = { "SET_VRING_KICK", co_set_vring_kick, U64, 0, 1 },
	[VHOST_USER_SET_VRING_CALL] = { "SET_VRING_CALL", co_set_vring_call, U64, 0, 1 },
	[VHOST_USER_SET_VRING_ERR] = { "SET_VRING_ERR", co_set_vring_err, U64, 0, 1 },
	[VHOST_USER_GET_PROTOCOL_FEATURES] = { "GET_PROTOCOL_FEATURES", co_get_protocol_features, NONE },
	[VHOST_USER_SET_PROTOCOL_FEATURES] = { "SET_PROTOCOL_FEATURES", co_set_protocol_features, U64 },
	[VHOST_USER_GET_QUEUE_NUM] = { "GET_QUEUE_NUM", co_get_queue_num, NONE },
	[VHOST_USER_SET_VRING_ENABLE] = { "SET_VRING_ENABLE", co_set_vring_enable, STATE },
	[VHOST_USER_SET_BACKEND_REQ_FD] = { "SET_BACKEND_REQ_FD", co_set_backend_req_fd, 0, 8, 1, 1 },
	[VHOST_USER_GET_CONFIG] = { "GET_CONFIG", co_get_config, 0, sizeof(struct vhost_user_config) },
	[VHOST_USER_SET_CONFIG] = { "SET_CONFIG", co_set_config, 0, sizeof(struct vhost_user_config) },
	[VHOST_USER_GET_INFLIGHT_FD] = { "GET_INFLIGHT_FD", co_get_inflight_fd, VHOST_USER_INFLIGHT_LEN, sizeof(struct vhost_user_inflight) },
	[VHOST_USER_SET_INFLIGHT_FD] = { "SET_INFLIGHT_FD", co_set_inflight_fd, VHOST_USER_INFLIGHT_LEN, sizeof(struct vhost_user_inflight), 1, 1 },
	[VHOST_USER_RESET_DEVICE] = { "RESET_DEVICE", co_reset_device, NONE },
	[VHOST_USER_GET_MAX_MEM_SLOTS] = { "GET_MAX_MEM_SLOTS", co_get_max_mem_slots, NONE },
	[VHOST_USER_ADD_MEM_REG] = { "ADD_MEM_REG", co_add_mem_reg, sizeof(struct vhost_user_single_region), sizeof(struct vhost_user_single_region), 1, 1 },
	/* Some front ends send a descriptor with it; it is closed. */
	[VHOST_USER_REM_MEM_REG] = { "REM_MEM_REG", co_rem_mem_reg, sizeof(struct vhost_user_single_region), sizeof(struct vhost_user_single_region), 0, 1 },
	[VHOST_USER_SET_STATUS] = { "SET_STATUS", co_set_status, U64 },
	[VHOST_USER_GET_STATUS] = { "GET_STATUS", co_get_status, NONE },
};

const char *message_name(uint32_t request)
{
	return request < VHOST_USER_REQUESTS ? handlers[request].name : NULL;
}

int check_message(const struct vhost_message *m, struct err *err)
{
	const struct handler *h;

	if (!message_name(m->hdr.request))
		return err_set(err, -EPROTO, "message %u is not known", m->hdr.request);
	h = &handlers[m->hdr.request];
	if (m->hdr.size < h->least || m->hdr.size > h->most)
		return err_set(err, -EPROTO, "%u bytes; it has %u to %u", m->hdr.size, h->least, h->most);
	if (m->nfds < h->fds_least || m->nfds > h->fds_most)
		return err_set(err, -EPROTO, "%u descriptors; it has %u to %u", m->nfds, h->fds_least, h->fds_most);
	return 0;
}

co_fn int co_handle_message(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	return handlers[m->hdr.request].co_run(d, m, err);
}

co_fn void co_device_forget(struct vhost_device *d)
{
	for (unsigned i = 0; i < d->nqueues; i++) {
		if (d->queues[i])
			co_queue_free(d->queues[i]);
		d->queues[i] = NULL;
	}
	d->nqueues = 0;
	vhost_memory_put(d->memory);
	d->memory = NULL;
	d->memory_lost = false;
	vhost_log_unmap(&d->log);
	rt_shm_unmap(&d->inflight);
	d->inflight_base = NULL;
	if (d->backend_fd >= 0)
		close(d->backend_fd);
	d->backend_fd = -1;
	d->features = d->protocol = 0;
	d->log_all = d->status_used = false;
	d->status = 0;
	virtio_blk_reset(&d->blk);
}
