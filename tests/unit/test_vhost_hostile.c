/* SPDX-License-Identifier: MIT */
/*
 * Hostile and faulty front ends and guests: whatever they do, the server lives, says why it refuses, leaks nothing, and serves the next one.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "lib/test.h"
#include "lib/vhost_front.h"
#include "lib/vhost_serve.h"
#include "util/bytes.h"

static struct vs server;
static struct vf front;

static void connect_with(const struct vf_config *c)
{
	struct vf_config config = c ? *c : (struct vf_config){ 0 };

	config.path = server.path;
	vf_open(&front, &config);
}

/* The next front end is served, whatever the last one did. */
static void still_serves(void)
{
	char buf[4096];

	vf_free(&front);
	connect_with(NULL);
	CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_IN, 0, buf, sizeof(buf)), VIRTIO_BLK_S_OK);
	CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_OUT, 0, buf, sizeof(buf)), VIRTIO_BLK_S_OK);
}

/* In the end: what is asked over another socket may be answered before the ring was looked at. */
static void status_says(const char *text)
{
	for (int ms = 0;; ms++) {
		char *status = vs_status(&server);
		bool said = strstr(status, text);

		if (!said && ms == 20000)
			test_fail("the status does not say \"%s\": %s", text, status);
		free(status);
		if (said)
			return;
		usleep(1000);
	}
}

/* --- Messages --- */

static void malformed_messages_end_the_connection(void)
{
	static const struct {
		uint32_t request, flags, len;
	} bad[] = {
		{ 0, 0, 0 }, { 200, 0, 0 }, { UINT32_MAX, 0, 0 }, { VHOST_USER_SET_FEATURES, 0, 0 }, { VHOST_USER_SET_FEATURES, 0, 4 },
		{ VHOST_USER_SET_FEATURES, 0, 9 }, { VHOST_USER_GET_FEATURES, 0, 8 }, { VHOST_USER_SET_VRING_ADDR, 0, 39 },
		{ VHOST_USER_SET_MEM_TABLE, 0, 8 + 9 * 32 }, { VHOST_USER_SET_MEM_TABLE, 0, 7 }, { VHOST_USER_SET_VRING_KICK, 0, 0 },
		{ VHOST_USER_SET_FEATURES, VHOST_USER_REPLY, 8 }, { VHOST_USER_SET_FEATURES, 3, 8 }, { VHOST_USER_SET_INFLIGHT_FD, 0, 20 },
		{ VHOST_USER_SET_BACKEND_REQ_FD, 0, 0 }, { VHOST_USER_ADD_MEM_REG, 0, 40 }, { 20, 0, 8 }, { 19, 0, 8 }, { 33, 0, 0 },
	};
	uint8_t payload[512] = { 0 };

	payload[0] = 1;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		CHECK_EQ(vf_send(&front, bad[i].request, bad[i].flags, payload, bad[i].len, NULL, 0), 0);
		if (!vf_is_closed(&front, 5000))
			test_fail("message %zu was taken", i);
		still_serves();
	}
	/* A length beyond any message is not waited for. */
	CHECK_EQ(send(front.fd, (uint32_t[]){ VHOST_USER_SET_FEATURES, 1, 1 << 30 }, 12, 0), 12);
	CHECK(vf_is_closed(&front, 5000));
	still_serves();
}

static void with_need_reply_they_are_refused(void)
{
	struct vhost_user_vring_state s = { 64, 1 };
	struct vhost_user_vring_addr a = { .index = 1, .desc = (uintptr_t)front.mem + 1 };
	uint64_t v;

	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_NUM, &s, sizeof(s), NULL, 0), 1);
	s.index = UINT32_MAX;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ENABLE, &s, sizeof(s), NULL, 0), 1);
	for (uint32_t num = 0; num < 70000; num = num * 2 + 3) {
		s = (struct vhost_user_vring_state){ 1, num };
		CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_NUM, &s, sizeof(s), NULL, 0), 1);
	}
	s = (struct vhost_user_vring_state){ 1, 128 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_NUM, &s, sizeof(s), NULL, 0), 0);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ADDR, &a, sizeof(a), NULL, 0), 1);
	s = (struct vhost_user_vring_state){ 1, 65536 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_BASE, &s, sizeof(s), NULL, 0), 1);
	/* the running ring stays what it is and where it is */
	s = (struct vhost_user_vring_state){ 0, 64 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_NUM, &s, sizeof(s), NULL, 0), 1);
	a.index = 0;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ADDR, &a, sizeof(a), NULL, 0), 1);
	v = 1ull << 40;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_FEATURES, &v, sizeof(v), NULL, 0), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_PROTOCOL_FEATURES, &v, sizeof(v), NULL, 0), 1);
	v = 1ull << 33;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_STATUS, &v, sizeof(v), NULL, 0), 1);
	CHECK_EQ(vf_ack(&front, 200, NULL, 0, NULL, 0), 1);
	still_serves();
}

static void descriptors_that_are_none_are_refused(void)
{
	uint64_t zero = 0, nofd = VHOST_VRING_NOFD;
	int file = open("/dev/zero", O_RDWR), pair[2], many[20];

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_CALL, &zero, 8, &file, 1), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_KICK, &zero, 8, &pair[0], 1), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_CALL, &zero, 8, NULL, 0), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ERR, &nofd, 8, &file, 1), 1);
	for (unsigned i = 0; i < ARRAY_SIZE(many); i++)
		many[i] = file;
	/* more than fit: cut off by the kernel, and the message refused */
	CHECK_EQ(vf_send(&front, VHOST_USER_SET_MEM_TABLE, 0, &zero, 8, many, 20), 0);
	CHECK(vf_is_closed(&front, 5000));
	still_serves();
	/* without a kick descriptor the ring is looked at now and then; without a call descriptor nobody is called until there is one */
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_KICK, &nofd, 8, NULL, 0), 0);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_CALL, &nofd, 8, NULL, 0), 0);
	vf_submit(&front, &front.ring[0], 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
	front.ring[0].avail[2 + front.ring[0].num] = front.ring[0].last_used;
	__atomic_store_n(front.ring[0].avail + 1, front.ring[0].avail_idx, __ATOMIC_RELEASE);
	for (int i = 0; __atomic_load_n(front.ring[0].used + 1, __ATOMIC_ACQUIRE) == front.ring[0].last_used; i++) {
		CHECK(i < 5000);
		usleep(1000);
	}
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_CALL, &zero, 8, &front.ring[0].call, 1), 0);
	CHECK_EQ(poll(&(struct pollfd){ .fd = front.ring[0].call, .events = POLLIN }, 1, 5000), 1);
	close(file);
	close(pair[0]);
	close(pair[1]);
	still_serves();
}

static void memory_that_is_none_is_refused(void)
{
	struct vhost_user_single_region one = { .region = { 0x10000000, 1 << 20, 0x10000000, 0 } };
	struct vhost_user_memory m = { .n = 2 };
	int small = memfd_create("small", 0), zero = open("/dev/zero", O_RDONLY), fds[2] = { small, small };

	CHECK(!ftruncate(small, 4096));
	CHECK_EQ(vf_ack(&front, VHOST_USER_ADD_MEM_REG, &one, sizeof(one), &small, 1), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_ADD_MEM_REG, &one, sizeof(one), &zero, 1), 1);
	one.region.size = 4096;
	CHECK_EQ(vf_ack(&front, VHOST_USER_ADD_MEM_REG, &one, sizeof(one), &small, 1), 0);
	CHECK_EQ(vf_ack(&front, VHOST_USER_ADD_MEM_REG, &one, sizeof(one), &small, 1), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_REM_MEM_REG, &one, sizeof(one), &small, 1), 0);
	CHECK_EQ(vf_ack(&front, VHOST_USER_REM_MEM_REG, &one, sizeof(one), NULL, 0), 1);
	/* fewer descriptors than regions; more regions than the message says; regions that overlap */
	m.region[0] = m.region[1] = one.region;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_MEM_TABLE, &m, 8 + 64, fds, 1), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_MEM_TABLE, &m, 8 + 32, fds, 2), 1);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_MEM_TABLE, &m, 8 + 64, fds, 2), 1);
	m.n = UINT32_MAX;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_MEM_TABLE, &m, 8 + 64, fds, 2), 1);
	close(small);
	close(zero);
	still_serves();
}

static void inflight_regions_that_are_none_are_refused(void)
{
	struct vhost_user_inflight d = { .queues = 0, .queue_size = 128 };
	int fd = memfd_create("region", 0);

	CHECK(!ftruncate(fd, 4096));
	CHECK_EQ(vf_ack(&front, VHOST_USER_GET_INFLIGHT_FD, &d, 20, NULL, 0), 1);
	d = (struct vhost_user_inflight){ .queues = 65, .queue_size = 128 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_GET_INFLIGHT_FD, &d, 20, NULL, 0), 1);
	d = (struct vhost_user_inflight){ .queues = 1, .queue_size = 40000 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_GET_INFLIGHT_FD, &d, 20, NULL, 0), 1);
	vf_stop_ring(&front, &front.ring[0]);
	d = (struct vhost_user_inflight){ .mmap_size = 4096, .queues = 2, .queue_size = 128 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_INFLIGHT_FD, &d, 20, &fd, 1), 1);
	d = (struct vhost_user_inflight){ .mmap_size = 2112, .mmap_offset = 4096, .queues = 1, .queue_size = 128 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_INFLIGHT_FD, &d, 20, &fd, 1), 1);
	d = (struct vhost_user_inflight){ .mmap_size = 2112, .mmap_offset = UINT64_MAX - 7, .queues = 1, .queue_size = 128 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_INFLIGHT_FD, &d, 20, &fd, 1), 1);
	close(fd);
	still_serves();
}

/* --- Guests --- */

static void hostile_chain_stops_the_queue(void)
{
	struct vf_ring *r = &front.ring[0];
	uint64_t zero = 0, value;
	int err_fd = eventfd(0, EFD_CLOEXEC);
	char buf[512];

	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ERR, &zero, 8, &err_fd, 1), 0);
	vf_submit(&front, r, 0, VIRTIO_BLK_T_OUT, 0, 0, 4096);
	r->desc[1].addr = 0;
	vf_kick_always(&front, r);
	CHECK_EQ(poll(&(struct pollfd){ .fd = err_fd, .events = POLLIN }, 1, 5000), 1);
	CHECK_EQ(read(err_fd, &value, 8), 8);
	status_says("not in the guest's memory");
	status_says("broken");
	CHECK_EQ(vf_wait(&front, r, 50), -1);
	/* the driver resets its device, and goes on */
	CHECK_EQ(vf_ack(&front, VHOST_USER_RESET_DEVICE, NULL, 0, NULL, 0), 0);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_FEATURES, &front.features, 8, NULL, 0), 0);
	memset(r->avail, 0, 4096);
	memset(r->used, 0, 4096);
	r->avail_idx = r->last_used = r->kicked = 0;
	vf_start_ring(&front, r, 0);
	CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_IN, 0, buf, 512), VIRTIO_BLK_S_OK);
	close(err_fd);
	still_serves();
}

static void requests_that_are_none_stop_the_queue(void)
{
	for (int i = 0; i < 5; i++) {
		struct vf_ring *r = &front.ring[0];
		static const char *const why[] = { "without room for its status", "header is shorter", "jumps", "names descriptor", "loop" };

		vf_submit(&front, r, 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
		switch (i) {
		case 0:
			r->desc[0].flags = 0;
			break;
		case 1:
			r->desc[0].len = 15;
			break;
		case 2:
			r->avail_idx += 5000;
			break;
		case 3:
			r->avail[2 + ((r->avail_idx - 1) & (r->num - 1))] = 9999;
			break;
		case 4:
			r->desc[0].next = 0;
			break;
		}
		vf_kick_always(&front, r);
		CHECK_EQ(vf_wait(&front, r, 100), -1);
		status_says(why[i]);
		still_serves();
	}
}

/* The file behind the guest's memory is cut while the server uses it. */
static void memory_that_vanishes_stops_the_queue(void)
{
	for (int i = 0; i < 3; i++) {
		struct vf_ring *r = &front.ring[0];

		vf_submit(&front, r, 0, VIRTIO_BLK_T_OUT, 0, 0, 65536);
		/* all of it; or only what lies behind the ring and the request's header */
		CHECK(!ftruncate(front.mem_fd, i == 0 ? 0 : i == 1 ? 4096 : 5 * 4096));
		if (i == 0) {
			uint64_t one = 1;

			CHECK_EQ(write(r->kick, &one, 8), 8);
			usleep(20000);
		} else if (i == 2) {
			vf_kick_always(&front, r);
			usleep(20000);
		} else {
			uint64_t one = 1;

			CHECK_EQ(write(r->kick, &one, 8), 8);
			usleep(20000);
		}
		if (i < 2)
			status_says("made shorter");
		else
			free(vs_status(&server));
		CHECK(vs_is_alive(&server));
		vf_drop(&front);
		CHECK(!ftruncate(front.mem_fd, (off_t)front.mem_len));
		still_serves();
	}
}

/* A durable write from memory that is gone fails; the disk, which others may use as well, does not. */
static void a_vanished_buffer_does_not_fail_the_disk(void)
{
	char file[] = "/tmp/weir-vhost-file-XXXXXX", disk[64], buf[4096] = { 1 };
	struct vf_ring *r = &front.ring[0];
	int fd = mkstemp(file);
	uint8_t off = 0;

	CHECK(fd >= 0 && !ftruncate(fd, 1 << 20));
	vf_free(&front);
	vs_stop(&server);
	vs_fini(&server);
	for (int direct = 0; direct < 2; direct++) {
		snprintf(disk, sizeof(disk), "%s,cache=%s", file, direct ? "none" : "writeback");
		vs_start(&server, disk, false);
		connect_with(NULL);
		CHECK_EQ(vf_set_config(&front, 32, &off, 1), 0);
		vf_submit(&front, r, 0, VIRTIO_BLK_T_OUT, 0, 0, 65536);
		CHECK(!ftruncate(front.mem_fd, (off_t)(vf_data(&front, r, 0) - front.mem)));
		vf_kick_always(&front, r);
		CHECK_EQ(vf_wait(&front, r, 10000), 0);
		CHECK_EQ(*vf_status(&front, r, 0), VIRTIO_BLK_S_IOERR);
		vf_drop(&front);
		CHECK(!ftruncate(front.mem_fd, (off_t)front.mem_len));
		vf_free(&front);
		connect_with(NULL);
		CHECK_EQ(vf_set_config(&front, 32, &off, 1), 0);
		CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_OUT, 0, buf, sizeof(buf)), VIRTIO_BLK_S_OK);
		CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_FLUSH, 0, NULL, 0), VIRTIO_BLK_S_OK);
		vf_free(&front);
		vs_stop(&server);
		vs_fini(&server);
	}
	close(fd);
	unlink(file);
	vs_start(&server, "mem:16M", false);
	connect_with(NULL);
}

static void memory_taken_away_stops_the_queue(void)
{
	struct vhost_user_memory m = { .n = 0 };

	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_MEM_TABLE, &m, 8, NULL, 0), 0);
	status_says("took away");
	vf_submit(&front, &front.ring[0], 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
	vf_kick_always(&front, &front.ring[0]);
	CHECK_EQ(vf_wait(&front, &front.ring[0], 50), -1);
	still_serves();
}

/* The peer turns its eventfd into one that blocks, and fills it. */
static void a_full_call_eventfd_blocks_nobody(void)
{
	struct vf_ring *r = &front.ring[0];
	uint64_t most, empty;
	uint8_t wce;

	if (read(r->call, &empty, 8) < 0)
		CHECK_EQ(errno, EAGAIN);
	most = UINT64_MAX - 1;
	CHECK_EQ(write(r->call, &most, 8), 8);
	fcntl(r->call, F_SETFL, fcntl(r->call, F_GETFL) & ~O_NONBLOCK);
	for (int i = 0; i < 10; i++) {
		vf_submit(&front, r, 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
		r->avail[2 + r->num] = r->last_used;
		vf_kick_always(&front, r);
		while (vf_poll(r, NULL) < 0)
			usleep(100);
	}
	CHECK_EQ(vf_get_config(&front, 32, &wce, 1), 0);
	CHECK_EQ(read(r->call, &most, 8), 8);
	still_serves();
}

static void a_stop_leaves_no_kick_behind(void)
{
	struct vf_ring *r = &front.ring[0];
	uint64_t value;

	vf_submit(&front, r, 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
	vf_kick_always(&front, r);
	CHECK_EQ(vf_wait(&front, r, 5000), 0);
	vf_stop_ring(&front, r);
	CHECK_EQ(read(r->kick, &value, 8), -1);
	CHECK_EQ(errno, EAGAIN);
	still_serves();
}

/* --- Order --- */

static void a_stop_waits_for_what_is_in_flight(void)
{
	struct vf_config c = { 0 };
	struct vf_ring *r = &front.ring[0];

	vf_free(&front);
	vs_stop(&server);
	vs_fini(&server);
	vs_start(&server, "delay:write=200ms:mem:16M", false);
	c.path = server.path;
	for (int how = 0; how < 4; how++) {
		struct vhost_user_vring_state s = { 0, 0 };
		uint64_t zero = 0;

		vf_open(&front, &c);
		for (unsigned i = 0; i < 5; i++)
			vf_submit(&front, r, i, VIRTIO_BLK_T_OUT, i * 8, 0, 4096);
		vf_kick_always(&front, r);
		while (__atomic_load_n(&server.shared->ops[DISK_OP_WRITE], __ATOMIC_RELAXED) < 5u * (unsigned)(how + 1))
			usleep(1000);
		if (how == 0)
			CHECK_EQ(vf_stop_ring(&front, r), 5);
		else if (how == 1)
			CHECK_EQ(vf_ack(&front, VHOST_USER_RESET_DEVICE, NULL, 0, NULL, 0), 0);
		else if (how == 2)
			CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ENABLE, &s, sizeof(s), NULL, 0), 0);
		else
			CHECK_EQ(vf_ack(&front, VHOST_USER_SET_STATUS, &zero, 8, NULL, 0), 0);
		for (unsigned i = 0; i < 5; i++)
			CHECK_EQ(*vf_status(&front, r, i), VIRTIO_BLK_S_OK);
		CHECK_EQ(r->used[1], 5);
		vf_free(&front);
	}
	/* the next front end waits until the last one's requests have ended */
	vf_open(&front, &c);
	vf_submit(&front, r, 0, VIRTIO_BLK_T_OUT, 0, 0, 4096);
	vf_kick_always(&front, r);
	while (__atomic_load_n(&server.shared->ops[DISK_OP_WRITE], __ATOMIC_RELAXED) < 21)
		usleep(1000);
	still_serves();
}

static void memory_changes_under_requests_in_flight(void)
{
	struct vhost_user_single_region one = { 0 };
	struct vf_ring *r = &front.ring[0];
	int fd = memfd_create("more", 0);
	uint64_t before;
	char *more;

	CHECK(!ftruncate(fd, 1 << 20));
	more = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	memset(more, 5, 1 << 20);
	one.region = (struct vhost_user_region){ 0x10000000, 1 << 20, (uintptr_t)more, 0 };
	CHECK_EQ(vf_ack(&front, VHOST_USER_ADD_MEM_REG, &one, sizeof(one), &fd, 1), 0);
	vf_submit(&front, r, 1, VIRTIO_BLK_T_OUT, 800, 0, 4096);
	r->desc[5].addr = 0x10000000 + 8192;
	before = __atomic_load_n(&server.shared->ops[DISK_OP_WRITE], __ATOMIC_RELAXED);
	vf_kick_always(&front, r);
	while (__atomic_load_n(&server.shared->ops[DISK_OP_WRITE], __ATOMIC_RELAXED) == before)
		usleep(1000);
	CHECK_EQ(vf_ack(&front, VHOST_USER_REM_MEM_REG, &one, sizeof(one), NULL, 0), 0);
	CHECK_EQ(vf_wait(&front, r, 10000), 1);
	CHECK_EQ(*vf_status(&front, r, 1), VIRTIO_BLK_S_OK);
	vf_submit(&front, r, 1, VIRTIO_BLK_T_IN, 800, 0, 4096);
	vf_kick_always(&front, r);
	CHECK_EQ(vf_wait(&front, r, 10000), 1);
	CHECK_EQ(vf_data(&front, r, 1)[4095], 5);
	munmap(more, 1 << 20);
	close(fd);
	still_serves();
}

static void dirty_pages_are_logged(void)
{
	struct vf_ring *r = &front.ring[0];
	struct vhost_user_log log = { .size = 0x200000 };
	struct vhost_user_vring_addr a = { .index = 0, .flags = VHOST_VRING_F_LOG_USED, .desc = (uintptr_t)r->desc, .used = (uintptr_t)r->used,
					   .avail = (uintptr_t)r->avail, .log = vf_gpa(&front, r->used) };
	uint64_t features = front.features | VHOST_F_LOG_ALL, page, v;
	int fd = memfd_create("log", 0);
	uint8_t *bits;

	CHECK(!ftruncate(fd, 0x200000));
	bits = mmap(NULL, 0x200000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK_EQ(vf_send(&front, VHOST_USER_SET_LOG_BASE, 0, &log, sizeof(log), &fd, 1), 0);
	CHECK_EQ(vf_recv(&front, VHOST_USER_SET_LOG_BASE, &v, 8, NULL), 8);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_FEATURES, &features, 8, NULL, 0), 0);
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ADDR, &a, sizeof(a), NULL, 0), 0);
	vf_submit(&front, r, 3, VIRTIO_BLK_T_IN, 0, 4096, 12288);
	vf_kick_always(&front, r);
	CHECK_EQ(vf_wait(&front, r, 10000), 3);
	for (page = vf_gpa(&front, front.mem) / 4096; page < vf_gpa(&front, front.mem + front.mem_len) / 4096; page++) {
		uint64_t data = vf_gpa(&front, vf_data(&front, r, 3) + 4096) / 4096;
		bool want = (page >= data && page < data + 3) || page == vf_gpa(&front, vf_status(&front, r, 3)) / 4096 ||
			    page == vf_gpa(&front, r->used) / 4096;

		CHECK_EQ(bits[page / 8] >> page % 8 & 1, want);
	}
	munmap(bits, 0x200000);
	close(fd);
	still_serves();
}

static void the_status_is_kept_and_shows_that_a_reset_is_needed(void)
{
	uint64_t v = 15;

	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_STATUS, &v, 8, NULL, 0), 0);
	CHECK_EQ(vf_get_u64(&front, VHOST_USER_GET_STATUS), 15);
	vf_submit(&front, &front.ring[0], 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
	front.ring[0].desc[0].addr = 0;
	vf_kick_always(&front, &front.ring[0]);
	for (int ms = 0; vf_get_u64(&front, VHOST_USER_GET_STATUS) != (15 | 0x40); ms++) {
		CHECK(ms < 20000);
		usleep(1000);
	}
	CHECK_EQ(vf_wait(&front, &front.ring[0], 50), -1);
	v = 0;
	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_STATUS, &v, 8, NULL, 0), 0);
	CHECK_EQ(vf_get_u64(&front, VHOST_USER_GET_STATUS), 0);
	still_serves();
}

static void connections_leave_nothing_behind(void)
{
	unsigned before;
	char buf[512];

	still_serves();
	before = vs_descriptors(&server);
	for (uint64_t i = 0; i < test_scale(400); i++) {
		vf_drop(&front);
		vf_free(&front);
		connect_with(&(struct vf_config){ .num = 16, .data = 4096, .queues = 2, .inflight = i % 2, .slots = i % 3 == 0 });
		CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_IN, 0, buf, 512), VIRTIO_BLK_S_OK);
		if (i % 5 == 0) {
			CHECK_EQ(vf_ack(&front, VHOST_USER_RESET_DEVICE, NULL, 0, NULL, 0), 0);
		} else if (i % 7 == 0) {
			vf_submit(&front, &front.ring[0], 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
			vf_kick_always(&front, &front.ring[0]);
		}
	}
	still_serves();
	CHECK_EQ(vs_descriptors(&server), before);
}

int main(void)
{
	vs_start(&server, "mem:16M", false);
	connect_with(NULL);
	RUN(malformed_messages_end_the_connection);
	RUN(with_need_reply_they_are_refused);
	RUN(descriptors_that_are_none_are_refused);
	RUN(memory_that_is_none_is_refused);
	RUN(inflight_regions_that_are_none_are_refused);
	RUN(hostile_chain_stops_the_queue);
	RUN(requests_that_are_none_stop_the_queue);
	RUN(memory_that_vanishes_stops_the_queue);
	RUN(a_vanished_buffer_does_not_fail_the_disk);
	RUN(memory_taken_away_stops_the_queue);
	RUN(a_full_call_eventfd_blocks_nobody);
	RUN(a_stop_leaves_no_kick_behind);
	RUN(dirty_pages_are_logged);
	RUN(the_status_is_kept_and_shows_that_a_reset_is_needed);
	RUN(connections_leave_nothing_behind);
	RUN(a_stop_waits_for_what_is_in_flight);
	RUN(memory_changes_under_requests_in_flight);
	vf_close(&front);
	vs_stop(&server);
	vs_fini(&server);
	return 0;
}
