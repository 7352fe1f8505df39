/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: a vhost-user-blk front end and its guest, both hostile.
 *
 * The input is a list of steps: messages with any content and descriptors, bytes for the guest's memory, requests that are almost right, indexes, kicks, a file
 * that is cut, pauses. Nothing that the server does may reach the memory beyond the region that it was given, and it must come to an end.
 */
#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "export_fuzz.h"
#include "export/vhost/proto.h"
#include "export/vhost/server.h"
#include "util/bytes.h"

#define FILE_LEN 65536u
#define REGION_LEN 49152u	/* what the server gets of it */
#define GPA 0x10000u
#define NUM 16u
#define DESC 0u
#define AVAIL 4096u
#define USED 8192u
#define HEAD 12288u
#define CANARY 0xa5

struct front {
	struct fuzz_input in;
	int fd, mem_fd, event;
	uint8_t *mem;
	bool cut;
	uint16_t avail;
};

static uint16_t next16(struct front *f)
{
	uint16_t lo = next8(&f->in);

	return (uint16_t)(lo | next8(&f->in) << 8);
}

static void next_bytes(struct front *f, void *dst, size_t len)
{
	for (size_t i = 0; i < len; i++)
		((uint8_t *)dst)[i] = next8(&f->in);
}

static void message(struct front *f, uint32_t request, uint32_t flags, const void *payload, uint32_t len, const int *fds, unsigned nfds)
{
	struct vhost_user_hdr hdr = { request, VHOST_USER_VERSION | flags, len };
	struct iovec iov[2] = { { &hdr, sizeof(hdr) }, { (void *)payload, len } };
	char control[CMSG_SPACE(16 * sizeof(int))] = { 0 };
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = 2 };

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
	(void)!sendmsg(f->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* A message of the input's. */
static void any_message(struct front *f)
{
	uint8_t request = next8(&f->in), flags = next8(&f->in), n = next8(&f->in), payload[512];
	int fds[16];

	next_bytes(f, payload, n);
	for (unsigned i = 0; i < 16; i++)
		fds[i] = flags & 0x20 ? f->mem_fd : flags & 0x40 ? f->fd : f->event;
	message(f, request, flags & 0x0f & ~VHOST_USER_VERSION, payload, n, fds, flags >> 4 & 1 ? (flags & 0x80 ? 9 : 1) : 0);
}

/* What makes the device run. */
static void set_up(struct front *f)
{
	uint8_t how = next8(&f->in);
	uint64_t features = (how & 1 ? VHOST_USER_F_PROTOCOL_FEATURES : 0) | (how & 2 ? VIRTIO_F_EVENT_IDX : 0) | (how & 4 ? VIRTIO_F_INDIRECT_DESC : 0) |
			    VIRTIO_F_VERSION_1_BIT | 0x7200, v = 0x1b22b;
	struct vhost_user_memory m = { .n = 1, .region[0] = { GPA, REGION_LEN, 0x500000, 0 } };
	struct vhost_user_vring_state s = { 0, NUM };
	struct vhost_user_vring_addr a = { .desc = 0x500000 + DESC, .avail = 0x500000 + AVAIL, .used = 0x500000 + USED };

	message(f, VHOST_USER_SET_PROTOCOL_FEATURES, 0, &v, 8, NULL, 0);
	message(f, VHOST_USER_SET_FEATURES, 0, &features, 8, NULL, 0);
	message(f, VHOST_USER_SET_MEM_TABLE, 0, &m, 40, &f->mem_fd, 1);
	if (how & 8) {
		struct vhost_user_inflight d = { .mmap_size = 320, .mmap_offset = FILE_LEN - 4096, .queues = 1, .queue_size = NUM };

		message(f, VHOST_USER_SET_INFLIGHT_FD, 0, &d, 20, &f->mem_fd, 1);
	}
	message(f, VHOST_USER_SET_VRING_NUM, 0, &s, 8, NULL, 0);
	message(f, VHOST_USER_SET_VRING_ADDR, 0, &a, 40, NULL, 0);
	v = 0;
	message(f, VHOST_USER_SET_VRING_KICK, 0, &v, 8, &f->event, 1);
	message(f, VHOST_USER_SET_VRING_CALL, 0, &v, 8, &f->event, 1);
	s.num = 1;
	message(f, VHOST_USER_SET_VRING_ENABLE, 0, &s, 8, NULL, 0);
}

static void put_desc(struct front *f, unsigned i, uint64_t addr, uint32_t len, uint16_t flags, uint16_t next)
{
	put_le64(f->mem + DESC + 16 * i, addr);
	put_le32(f->mem + DESC + 16 * i + 8, len);
	put_le16(f->mem + DESC + 16 * i + 12, flags);
	put_le16(f->mem + DESC + 16 * i + 14, next);
}

/* A request that the input makes wrong in some place, if it does. */
static void request(struct front *f)
{
	uint8_t type = next8(&f->in), wrong = next8(&f->in), what = next8(&f->in), head = next8(&f->in) % 5 * 3;
	uint16_t flags = type == 0 || type == 8 ? VRING_F_WRITE : 0;

	memset(f->mem + HEAD, 0, 16);
	f->mem[HEAD] = type;
	f->mem[HEAD + 8] = what;
	put_desc(f, head, GPA + HEAD, 16, VRING_F_NEXT, head + 1);
	put_desc(f, head + 1u, GPA + HEAD + 4096, 512u * (what % 8 + 1), VRING_F_NEXT | flags, head + 2);
	put_desc(f, head + 2u, GPA + HEAD + 64, 1, VRING_F_WRITE, 0);
	if (wrong)
		f->mem[DESC + 16 * head + wrong % 48] ^= what;
	put_le16(f->mem + AVAIL + 4 + 2 * (f->avail % NUM), head);
	put_le16(f->mem + AVAIL + 2, ++f->avail);
}

static co_fn void co_step(struct front *f)
{
	uint64_t one = 1;
	uint16_t at;
	char drop[4096];

	switch (next8(&f->in) % 8) {
	case 0:
		any_message(f);
		break;
	case 1:
		set_up(f);
		break;
	case 2:
		at = next16(f);
		if (!f->cut)
			next_bytes(f, f->mem + at % (REGION_LEN - 256), next8(&f->in));
		break;
	case 3:
	case 4:
		if (!f->cut)
			request(f);
		/* fall through */
	case 5:
		(void)!write(f->event, &one, 8);
		break;
	case 6:
		f->cut = true;
		must(!ftruncate(f->mem_fd, next8(&f->in) * 256));
		break;
	case 7:
		co_sleep_ns(next8(&f->in) * 100u);
		while (recv(f->fd, drop, sizeof(drop), MSG_DONTWAIT) > 0)
			;
		break;
	}
}

static co_fn void co_front_main(void *arg)
{
	struct front *f = arg;

	for (unsigned steps = 0; f->in.pos < f->in.len && steps < 200; steps++) {
		co_step(f);
		co_yield();
	}
	co_sleep_ns(100000);
	close(f->fd);
}

static co_fn void co_fuzz_main(void *arg)
{
	struct front *f = arg;
	struct vhost_device_config c = { .path = "fuzz", .queues = 2 };
	struct vhost_server *s;
	struct err err = ERR_INIT;
	int pair[2];

	c.volume = co_fuzz_volume();
	must(!vhost_server_create(&s, &err) && !socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
	f->fd = pair[0];
	must(!co_spawn("front end", co_front_main, f));
	must(!co_vhost_server_serve(s, &c, pair[1], &err));
	vhost_server_destroy(s);
	co_volume_destroy(c.volume);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct front f = { .in = { data, size, 0 } };

	f.mem_fd = memfd_create("guest", MFD_CLOEXEC);
	f.event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	must(f.mem_fd >= 0 && f.event >= 0 && !ftruncate(f.mem_fd, FILE_LEN));
	f.mem = mmap(NULL, FILE_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, f.mem_fd, 0);
	must(f.mem != MAP_FAILED);
	memset(f.mem + REGION_LEN, CANARY, FILE_LEN - REGION_LEN - 4096);
	fuzz_run(co_fuzz_main, &f);
	for (size_t i = REGION_LEN; i < FILE_LEN - 4096 && !f.cut; i++)
		must(f.mem[i] == CANARY);
	munmap(f.mem, FILE_LEN);
	close(f.mem_fd);
	close(f.event);
	return 0;
}
