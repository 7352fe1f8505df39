/* SPDX-License-Identifier: MIT */
/* vhost-user at length: many connections leave nothing behind, and many requests take no system call each while the reactor polls. */
#include <errno.h>
#include <linux/virtio_blk.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "lib/test.h"
#include "lib/vhost_front.h"
#include "lib/vhost_serve.h"
#include "util/bytes.h"

static struct vs server;
static struct vf front;

static void open_front(const struct vf_config *c)
{
	struct vf_config config = *c;

	config.path = server.path;
	vf_open(&front, &config);
}

/* Says the first `len` bytes of GET_FEATURES, waits for the answer if that is all, and leaves. */
static void knock(unsigned len)
{
	const uint32_t get_features[3] = { VHOST_USER_GET_FEATURES, 1, 0 };
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char reply[20];

	strcpy(addr.sun_path, server.path);
	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&addr, sizeof(addr)));
	if (len)
		CHECK_EQ(send(fd, get_features, len, MSG_NOSIGNAL), (ssize_t)len);
	if (len == sizeof(get_features))
		CHECK_EQ(recv(fd, reply, sizeof(reply), MSG_WAITALL), (ssize_t)sizeof(reply));
	close(fd);
}

/* A driver that works, and goes in one of three ways. */
static void session(unsigned i)
{
	char buf[512];

	open_front(&(struct vf_config){ .num = 16, .data = 4096, .queues = 1 + i % 2, .inflight = i % 3 == 0, .slots = i % 4 == 0 });
	CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_IN, 0, buf, sizeof(buf)), VIRTIO_BLK_S_OK);
	if (i % 3 == 1) {
		CHECK_EQ(vf_ack(&front, VHOST_USER_RESET_DEVICE, NULL, 0, NULL, 0), 0);
	} else if (i % 3 == 2) {
		vf_submit(&front, &front.ring[0], 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
		vf_kick_always(&front, &front.ring[0]);
	}
	vf_drop(&front);
	vf_free(&front);
}

static void come_and_go(uint64_t n)
{
	static const unsigned lengths[] = { 0, 0, 5, 12, 0, 11, 12, 1, 0 };

	for (unsigned i = 0; i < n; i++) {
		if (i % 27 == 26)
			session(i / 27);
		else
			knock(lengths[i % 9]);
	}
	/* One that stays until it is served: those before it are gone then. */
	open_front(&(struct vf_config){ .num = 16, .data = 4096 });
	CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_FLUSH, 0, NULL, 0), VIRTIO_BLK_S_OK);
	vf_close(&front);
	knock(12);
}

static void ten_thousand_connections_leave_no_descriptor_and_no_byte_behind(void)
{
	struct vs_figures before, after;
	unsigned fds, mappings;

	vs_start(&server, "mem:16M", false);
	fds = vs_descriptors(&server);
	come_and_go(200);
	mappings = vs_mappings(&server);
	vs_get_figures(&server, &before);
	come_and_go(test_scale(10000));
	/* The last one is being closed while we look. */
	for (unsigned i = 0; i < 1000 && vs_descriptors(&server) > fds; i++)
		usleep(1000);
	CHECK_EQ(vs_descriptors(&server), fds);
	/* Guests' memory and in-flight regions: hundreds came. A stack that had not been in use before may be one more. */
	if (!TEST_SANITIZED && vs_mappings(&server) > mappings + 8)
		test_fail("the server has %u mappings, and had %u", vs_mappings(&server), mappings);
	vs_get_figures(&server, &after);
	/* What a connection has is more than this. */
	if (after.heap > before.heap + 1024)
		test_fail("the heap has grown from %llu to %llu bytes", (unsigned long long)before.heap, (unsigned long long)after.heap);
	vs_stop(&server);
	vs_fini(&server);
}

/* `n` reads with 32 in flight, of a driver that polls as well. */
static void load(uint64_t n)
{
	struct vf_ring *r = &front.ring[0];
	uint64_t begun = 0, done = 0;
	int slot;

	while (done < n) {
		bool some = false;

		while (begun < n && begun - done < 32 && (slot = vf_slot_get(r)) >= 0) {
			vf_submit(&front, r, (unsigned)slot, VIRTIO_BLK_T_IN, begun++ % 1024 * 8, 0, 4096);
			some = true;
		}
		if (some)
			vf_kick(&front, r);
		some = false;
		while ((slot = vf_poll(r, NULL)) >= 0) {
			CHECK_EQ(*vf_status(&front, r, (unsigned)slot), VIRTIO_BLK_S_OK);
			vf_slot_put(r, (unsigned)slot);
			done++;
			some = true;
		}
		if (!some)
			sched_yield();
	}
}

static void while_it_polls_no_request_takes_a_system_call(void)
{
	uint64_t n = test_scale(20000);
	struct vs_figures before, after;

	/* Longer than any pause of this program. */
	vs_start_polling(&server, "mem:16M", 5000000000ull);
	open_front(&(struct vf_config){ .num = 128, .data = 4096 });
	load(100);
	vs_get_figures(&server, &before);
	load(n);
	vs_get_figures(&server, &after);
	/* To ask for the figures is a few, and once in 65536 completions the driver is called. */
	if (after.enters - before.enters > 20)
		test_fail("%llu system calls for %llu requests", (unsigned long long)(after.enters - before.enters), (unsigned long long)n);
	CHECK(front.ring[0].kicks <= 2);
	vf_close(&front);
	vs_stop(&server);
	vs_fini(&server);
}

int main(void)
{
	RUN(ten_thousand_connections_leave_no_descriptor_and_no_byte_behind);
	RUN(while_it_polls_no_request_takes_a_system_call);
	return 0;
}
