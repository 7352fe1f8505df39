/* SPDX-License-Identifier: MIT */
/* A small vhost-user-blk front end. */
#include "lib/vhost_front.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "lib/test.h"
#include "util/bytes.h"

#define GPA 0x100000000ull
#define HEAD_AREA 4096u		/* of a slot, before its data: header, status, indirect table */
#define STATUS_AT 64u
#define TABLE_AT 128u

static uint16_t load(const uint16_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

/* --- Messages --- */

int vf_send(struct vf *f, uint32_t request, uint32_t flags, const void *payload, uint32_t len, const int *fds, unsigned nfds)
{
	struct vhost_user_hdr hdr = { request, VHOST_USER_VERSION | flags, len };
	struct iovec iov[2] = { { &hdr, sizeof(hdr) }, { (void *)payload, len } };
	char control[CMSG_SPACE(64 * sizeof(int))] = { 0 };
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = len ? 2 : 1 };

	if (nfds) {
		struct cmsghdr *c;

		msg.msg_control = control;
		msg.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nfds * sizeof(int));
	}
	return sendmsg(f->fd, &msg, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int recv_all(int fd, void *buf, size_t len)
{
	for (char *p = buf; len;) {
		ssize_t n = recv(fd, p, len, 0);

		if (n <= 0)
			return n < 0 ? -errno : -ECONNRESET;
		p += n;
		len -= (size_t)n;
	}
	return 0;
}

int vf_recv(struct vf *f, uint32_t request, void *payload, uint32_t size, int *fd)
{
	struct vhost_user_hdr hdr;
	struct iovec iov = { &hdr, sizeof(hdr) };
	char control[CMSG_SPACE(sizeof(int))];
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	ssize_t n = recvmsg(f->fd, &msg, MSG_WAITALL | MSG_CMSG_CLOEXEC);
	struct cmsghdr *c;
	int ret;

	if (n <= 0)
		return n < 0 ? -errno : -ECONNRESET;
	CHECK_EQ(n, (ssize_t)sizeof(hdr));
	CHECK_EQ(hdr.request, request);
	CHECK_EQ(hdr.flags & 7, VHOST_USER_VERSION | VHOST_USER_REPLY);
	CHECK(hdr.size <= size);
	c = CMSG_FIRSTHDR(&msg);
	if (fd)
		*fd = -1;
	if (c && c->cmsg_type == SCM_RIGHTS && fd)
		memcpy(fd, CMSG_DATA(c), sizeof(int));
	ret = hdr.size ? recv_all(f->fd, payload, hdr.size) : 0;
	return ret ? ret : (int)hdr.size;
}

int vf_ack(struct vf *f, uint32_t request, const void *payload, uint32_t len, const int *fds, unsigned nfds)
{
	uint64_t verdict;
	int ret = vf_send(f, request, VHOST_USER_NEED_REPLY, payload, len, fds, nfds);

	if (ret < 0)
		return ret;
	ret = vf_recv(f, request, &verdict, sizeof(verdict), NULL);
	return ret < 0 ? ret : verdict != 0;
}

/* For what must work: with an answer where the server gives one. */
static void must(struct vf *f, uint32_t request, const void *payload, uint32_t len, const int *fds, unsigned nfds)
{
	int ret = f->protocol & VHOST_USER_PROTOCOL_F_REPLY_ACK ? vf_ack(f, request, payload, len, fds, nfds)
								: vf_send(f, request, 0, payload, len, fds, nfds);

	if (ret)
		test_fail("message %u: %s", request, ret < 0 ? strerror(-ret) : "refused");
}

uint64_t vf_get_u64(struct vf *f, uint32_t request)
{
	uint64_t v = 0;

	CHECK_EQ(vf_send(f, request, 0, NULL, 0, NULL, 0), 0);
	CHECK_EQ(vf_recv(f, request, &v, sizeof(v), NULL), 8);
	return v;
}

int vf_get_config(struct vf *f, uint32_t off, void *buf, uint32_t len)
{
	struct vhost_user_config c = { .offset = off, .size = len };
	int ret = vf_send(f, VHOST_USER_GET_CONFIG, 0, &c, 12 + len, NULL, 0);

	if (ret)
		return ret;
	ret = vf_recv(f, VHOST_USER_GET_CONFIG, &c, sizeof(c), NULL);
	if (ret < 12)
		return ret < 0 ? ret : -EINVAL;
	memcpy(buf, c.data, len);
	return 0;
}

int vf_set_config(struct vf *f, uint32_t off, const void *buf, uint32_t len)
{
	struct vhost_user_config c = { .offset = off, .size = len };

	memcpy(c.data, buf, len);
	return vf_ack(f, VHOST_USER_SET_CONFIG, &c, 12 + len, NULL, 0);
}

bool vf_is_closed(struct vf *f, int timeout_ms)
{
	struct pollfd p = { .fd = f->fd, .events = POLLIN | POLLRDHUP };

	return poll(&p, 1, timeout_ms) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR);
}

/* --- Set-up --- */

uint64_t vf_gpa(struct vf *f, const void *p)
{
	return f->gpa + (uint64_t)((const char *)p - f->mem);
}

static size_t ring_bytes(unsigned num)
{
	return align_up(16 * num, 4096) + align_up(VRING_AVAIL_LEN(num), 4096) + align_up(VRING_USED_LEN(num), 4096);
}

static void layout(struct vf *f)
{
	size_t slot = HEAD_AREA + f->c.data, per_ring;
	char *p;

	per_ring = ring_bytes(f->c.num) + slot * (f->c.num / VF_SLOT_DESCS);
	f->mem_len = align_up(per_ring * f->c.queues, 2 << 20);
	f->mem_fd = memfd_create("guest", MFD_CLOEXEC);
	CHECK(f->mem_fd >= 0 && !ftruncate(f->mem_fd, (off_t)f->mem_len));
	f->mem = mmap(NULL, f->mem_len, PROT_READ | PROT_WRITE, MAP_SHARED, f->mem_fd, 0);
	CHECK(f->mem != MAP_FAILED);
	f->gpa = GPA;
	p = f->mem;
	for (unsigned i = 0; i < f->c.queues; i++) {
		struct vf_ring *r = &f->ring[i];

		*r = (struct vf_ring){ .index = i, .num = f->c.num, .slots = f->c.num / VF_SLOT_DESCS, .kick = -1, .call = -1 };
		r->desc = (void *)p;
		r->avail = (void *)(p + align_up(16 * r->num, 4096));
		r->used = (void *)((char *)r->avail + align_up(VRING_AVAIL_LEN(r->num), 4096));
		r->slot_mem = p + ring_bytes(r->num);
		r->free = calloc(r->slots, sizeof(*r->free));
		r->nfree = r->slots;
		for (unsigned s = 0; s < r->slots; s++)
			r->free[s] = (uint16_t)(r->slots - 1 - s);
		p += per_ring;
	}
}

static void dial(struct vf *f)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };

	CHECK(strlen(f->c.path) < sizeof(sa.sun_path));
	strcpy(sa.sun_path, f->c.path);
	f->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* A server that was just started may not listen yet. */
	for (int i = 0; connect(f->fd, (void *)&sa, sizeof(sa)); i++) {
		if (i == 1000)
			test_fail("%s: %s", f->c.path, strerror(errno));
		usleep(10000);
	}
}

void vf_set_memory(struct vf *f)
{
	unsigned n = f->c.regions;
	uint64_t part = f->mem_len / n / 4096 * 4096;
	struct vhost_user_memory m = { .n = n };
	int fds[VHOST_USER_MAX_FDS];

	for (unsigned i = 0; i < n; i++) {
		uint64_t at = i * part, len = i + 1 == n ? f->mem_len - at : part;
		struct vhost_user_single_region one = { .region = { f->gpa + at, len, (uint64_t)(uintptr_t)f->mem + at, at } };

		m.region[i] = one.region;
		fds[i] = f->mem_fd;
		if (f->c.slots)
			must(f, VHOST_USER_ADD_MEM_REG, &one, sizeof(one), &f->mem_fd, 1);
	}
	if (!f->c.slots)
		must(f, VHOST_USER_SET_MEM_TABLE, &m, 8 + n * sizeof(m.region[0]), fds, n);
}

void vf_start_ring(struct vf *f, struct vf_ring *r, uint16_t base)
{
	struct vhost_user_vring_state s = { r->index, r->num };
	struct vhost_user_vring_addr a = { .index = r->index, .desc = (uintptr_t)r->desc, .used = (uintptr_t)r->used, .avail = (uintptr_t)r->avail };
	uint64_t index = r->index;

	must(f, VHOST_USER_SET_VRING_NUM, &s, sizeof(s), NULL, 0);
	s.num = base;
	must(f, VHOST_USER_SET_VRING_BASE, &s, sizeof(s), NULL, 0);
	must(f, VHOST_USER_SET_VRING_ADDR, &a, sizeof(a), NULL, 0);
	if (r->kick < 0)
		r->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (r->call < 0)
		r->call = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	must(f, VHOST_USER_SET_VRING_KICK, &index, sizeof(index), &r->kick, 1);
	must(f, VHOST_USER_SET_VRING_CALL, &index, sizeof(index), &r->call, 1);
	s.num = 1;
	if (f->features & VHOST_USER_F_PROTOCOL_FEATURES)
		must(f, VHOST_USER_SET_VRING_ENABLE, &s, sizeof(s), NULL, 0);
}

static void set_backend_fd(struct vf *f)
{
	int pair[2];

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
	must(f, VHOST_USER_SET_BACKEND_REQ_FD, NULL, 0, &pair[1], 1);
	close(pair[1]);
	f->backend_fd = pair[0];
}

static void negotiate(struct vf *f)
{
	uint64_t v;

	f->offered = vf_get_u64(f, VHOST_USER_GET_FEATURES);
	f->features = f->offered & ~f->c.mask & ~VHOST_F_LOG_ALL;
	if (!f->c.indirect)
		f->features &= ~VIRTIO_F_INDIRECT_DESC;
	f->protocol = 0;
	if (f->offered & VHOST_USER_F_PROTOCOL_FEATURES) {
		uint64_t known = VHOST_USER_PROTOCOL_F_MQ | VHOST_USER_PROTOCOL_F_REPLY_ACK | VHOST_USER_PROTOCOL_F_BACKEND_REQ |
				 VHOST_USER_PROTOCOL_F_CONFIG | VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD | VHOST_USER_PROTOCOL_F_RESET_DEVICE |
				 VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS | VHOST_USER_PROTOCOL_F_STATUS | VHOST_USER_PROTOCOL_F_LOG_SHMFD;

		f->protocol_offered = vf_get_u64(f, VHOST_USER_GET_PROTOCOL_FEATURES);
		v = f->protocol_offered & known & ~f->c.protocol_mask;
		/* Linux' own front end asks for an answer to this very message, QEMU does not. */
		if (v & VHOST_USER_PROTOCOL_F_REPLY_ACK && f->c.ask_early)
			CHECK_EQ(vf_ack(f, VHOST_USER_SET_PROTOCOL_FEATURES, &v, sizeof(v), NULL, 0), 0);
		else
			CHECK_EQ(vf_send(f, VHOST_USER_SET_PROTOCOL_FEATURES, 0, &v, sizeof(v), NULL, 0), 0);
		f->protocol = v;
	}
	CHECK_EQ(vf_send(f, VHOST_USER_SET_OWNER, 0, NULL, 0, NULL, 0), 0);
	must(f, VHOST_USER_SET_FEATURES, &f->features, sizeof(f->features), NULL, 0);
	if (f->protocol & VHOST_USER_PROTOCOL_F_BACKEND_REQ)
		set_backend_fd(f);
}

static void set_inflight(struct vf *f)
{
	f->inflight.queues = (uint16_t)f->c.queues;
	f->inflight.queue_size = (uint16_t)f->c.num;
	if (f->inflight_fd < 0) {
		CHECK_EQ(vf_send(f, VHOST_USER_GET_INFLIGHT_FD, 0, &f->inflight, VHOST_USER_INFLIGHT_LEN, NULL, 0), 0);
		CHECK(vf_recv(f, VHOST_USER_GET_INFLIGHT_FD, &f->inflight, sizeof(f->inflight), &f->inflight_fd) > 0);
		CHECK(f->inflight_fd >= 0);
	}
	must(f, VHOST_USER_SET_INFLIGHT_FD, &f->inflight, VHOST_USER_INFLIGHT_LEN, &f->inflight_fd, 1);
}

static void set_up(struct vf *f)
{
	dial(f);
	negotiate(f);
	if (f->c.inflight)
		set_inflight(f);
	vf_set_memory(f);
}

void vf_open(struct vf *f, const struct vf_config *c)
{
	*f = (struct vf){ .c = *c, .fd = -1, .backend_fd = -1, .inflight_fd = -1 };
	f->c.queues = c->queues ? c->queues : 1;
	f->c.num = c->num ? c->num : 128;
	f->c.data = c->data ? c->data : 65536;
	f->c.regions = c->regions ? c->regions : 1;
	layout(f);
	set_up(f);
	for (unsigned i = 0; i < f->c.queues && !c->no_start; i++)
		vf_start_ring(f, &f->ring[i], 0);
}

void vf_reconnect(struct vf *f)
{
	vf_drop(f);
	set_up(f);
	for (unsigned i = 0; i < f->c.queues; i++)
		vf_start_ring(f, &f->ring[i], load(f->ring[i].used + 1));
}

uint16_t vf_stop_ring(struct vf *f, struct vf_ring *r)
{
	struct vhost_user_vring_state s = { r->index, 0 };

	CHECK_EQ(vf_send(f, VHOST_USER_GET_VRING_BASE, 0, &s, sizeof(s), NULL, 0), 0);
	CHECK_EQ(vf_recv(f, VHOST_USER_GET_VRING_BASE, &s, sizeof(s), NULL), (int)sizeof(s));
	return (uint16_t)s.num;
}

void vf_drop(struct vf *f)
{
	if (f->fd >= 0)
		close(f->fd);
	if (f->backend_fd >= 0)
		close(f->backend_fd);
	f->fd = f->backend_fd = -1;
}

void vf_free(struct vf *f)
{
	vf_drop(f);
	if (f->inflight_fd >= 0)
		close(f->inflight_fd);
	for (unsigned i = 0; i < f->c.queues; i++) {
		if (f->ring[i].kick >= 0)
			close(f->ring[i].kick);
		if (f->ring[i].call >= 0)
			close(f->ring[i].call);
		free(f->ring[i].free);
	}
	munmap(f->mem, f->mem_len);
	close(f->mem_fd);
}

void vf_close(struct vf *f)
{
	for (unsigned i = 0; i < f->c.queues; i++)
		vf_stop_ring(f, &f->ring[i]);
	vf_free(f);
}

/* --- Requests --- */

static char *slot_at(struct vf *f, struct vf_ring *r, unsigned slot)
{
	return r->slot_mem + (size_t)slot * (HEAD_AREA + f->c.data);
}

char *vf_data(struct vf *f, struct vf_ring *r, unsigned slot)
{
	return slot_at(f, r, slot) + HEAD_AREA;
}

uint8_t *vf_status(struct vf *f, struct vf_ring *r, unsigned slot)
{
	return (uint8_t *)slot_at(f, r, slot) + STATUS_AT;
}

int vf_slot_get(struct vf_ring *r)
{
	return r->nfree ? r->free[--r->nfree] : -1;
}

void vf_slot_put(struct vf_ring *r, unsigned slot)
{
	r->free[r->nfree++] = (uint16_t)slot;
}

void vf_submit(struct vf *f, struct vf_ring *r, unsigned slot, uint32_t type, uint64_t sector, uint32_t off, uint32_t len)
{
	char *s = slot_at(f, r, slot);
	struct virtio_blk_outhdr *head = (void *)s;
	bool to_us = type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID;
	uint16_t first = (uint16_t)(slot * VF_SLOT_DESCS), base = f->c.indirect ? 0 : first;
	struct vf_desc *d = f->c.indirect ? (void *)(s + TABLE_AT) : r->desc + first;
	unsigned n = 0;

	head->type = htole32(type);
	head->ioprio = 0;
	head->sector = htole64(sector);
	*vf_status(f, r, slot) = 0xff;
	d[n++] = (struct vf_desc){ vf_gpa(f, s), sizeof(*head), VRING_F_NEXT, (uint16_t)(base + 1) };
	if (len) {
		d[n] = (struct vf_desc){ vf_gpa(f, vf_data(f, r, slot) + off), len, (uint16_t)(VRING_F_NEXT | (to_us ? VRING_F_WRITE : 0)),
					 (uint16_t)(base + 2) };
		n++;
	}
	d[n++] = (struct vf_desc){ vf_gpa(f, vf_status(f, r, slot)), 1, VRING_F_WRITE, 0 };
	if (f->c.indirect)
		r->desc[first] = (struct vf_desc){ vf_gpa(f, d), 16 * n, VRING_F_INDIRECT, 0 };
	r->avail[2 + (r->avail_idx & (r->num - 1))] = first;
	r->avail_idx++;
}

static void signal_kick(struct vf_ring *r)
{
	uint64_t one = 1;

	r->kicks++;
	if (write(r->kick, &one, sizeof(one)) < 0 && errno != EAGAIN)
		test_fail("kick: %s", strerror(errno));
}

void vf_kick(struct vf *f, struct vf_ring *r)
{
	uint16_t old = r->kicked, event;

	if (r->avail_idx == old)
		return;
	__atomic_store_n(r->avail + 1, r->avail_idx, __ATOMIC_RELEASE);
	r->kicked = r->avail_idx;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (f->features & VIRTIO_F_EVENT_IDX) {
		event = load(r->used + 2 + 4 * r->num);
		if ((uint16_t)(r->avail_idx - event - 1) < (uint16_t)(r->avail_idx - old))
			signal_kick(r);
	} else if (!(load(r->used) & VRING_NO_NOTIFY)) {
		signal_kick(r);
	}
}

void vf_kick_always(struct vf *f, struct vf_ring *r)
{
	__atomic_store_n(r->avail + 1, r->avail_idx, __ATOMIC_RELEASE);
	r->kicked = r->avail_idx;
	signal_kick(r);
}

int vf_poll(struct vf_ring *r, uint32_t *len)
{
	const uint32_t *elem;

	if (load(r->used + 1) == r->last_used)
		return -1;
	elem = (const uint32_t *)(r->used + 2) + 2 * (r->last_used & (r->num - 1));
	r->last_used++;
	if (len)
		*len = elem[1];
	CHECK(elem[0] % VF_SLOT_DESCS == 0 && elem[0] < r->num);
	return (int)(elem[0] / VF_SLOT_DESCS);
}

static uint64_t now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

int vf_wait(struct vf *f, struct vf_ring *r, int timeout_ms)
{
	uint64_t end = now_ms() + (uint64_t)timeout_ms, value;
	int slot;

	for (;;) {
		struct pollfd p[2] = { { .fd = r->call, .events = POLLIN }, { .fd = f->fd, .events = POLLRDHUP } };
		int left = timeout_ms < 0 ? -1 : now_ms() >= end ? 0 : (int)(end - now_ms());

		slot = vf_poll(r, NULL);
		if (slot >= 0)
			return slot;
		/* used_event: call me for the next one; then look once more. */
		r->avail[2 + r->num] = r->last_used;
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
		slot = vf_poll(r, NULL);
		if (slot >= 0)
			return slot;
		if (!left || poll(p, 2, left) < 0)
			return -1;
		if (p[0].revents && read(r->call, &value, sizeof(value)) > 0)
			r->calls++;
		if (p[1].revents && !p[0].revents)
			return vf_poll(r, NULL);
	}
}

int vf_request(struct vf *f, uint32_t type, uint64_t sector, void *buf, uint32_t len)
{
	struct vf_ring *r = &f->ring[0];
	bool to_us = type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID;
	int slot = vf_slot_get(r), done, status;

	CHECK(slot >= 0);
	CHECK(len <= f->c.data);
	if (len && !to_us)
		memcpy(vf_data(f, r, (unsigned)slot), buf, len);
	vf_submit(f, r, (unsigned)slot, type, sector, 0, len);
	vf_kick(f, r);
	done = vf_wait(f, r, 20000);
	if (done < 0)
		return -1;
	CHECK_EQ(done, slot);
	status = *vf_status(f, r, (unsigned)slot);
	if (len && to_us)
		memcpy(buf, vf_data(f, r, (unsigned)slot), len);
	vf_slot_put(r, (unsigned)slot);
	return status;
}
