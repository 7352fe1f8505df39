/* SPDX-License-Identifier: MIT */
/* The server is killed under a running guest and started again: what was in flight is completed exactly once, in order. */
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>

#include "lib/test.h"
#include "lib/vhost_front.h"
#include "lib/vhost_serve.h"
#include "util/bytes.h"

static struct vs server;
static struct vf front;
static char file[96], disk[160];

static void start(const char *prefix, const struct vf_config *c)
{
	struct vf_config config = *c;
	const char *tmp = getenv("TMPDIR");
	int fd;

	snprintf(file, sizeof(file), "%s/weir-vhost-disk-XXXXXX", tmp && *tmp && strlen(tmp) < 60 ? tmp : "/tmp");
	fd = mkstemp(file);
	CHECK(fd >= 0 && !ftruncate(fd, 4 << 20));
	close(fd);
	snprintf(disk, sizeof(disk), "%s%s,cache=writeback", prefix, file);
	vs_start(&server, disk, false);
	config.path = server.path;
	config.inflight = true;
	vf_open(&front, &config);
}

static void end(void)
{
	vf_close(&front);
	vs_stop(&server);
	vs_fini(&server);
	unlink(file);
}

static void wait_for_writes(uint64_t n)
{
	for (int i = 0; __atomic_load_n(&server.shared->ops[DISK_OP_WRITE], __ATOMIC_RELAXED) < n; i++) {
		CHECK(i < 10000);
		usleep(1000);
	}
}

static void submit_writes(struct vf_ring *r, unsigned from, unsigned n, int value)
{
	for (unsigned s = from; s < from + n; s++) {
		memset(vf_data(&front, r, s), value + (int)s, 4096);
		vf_submit(&front, r, s, VIRTIO_BLK_T_OUT, (r->index * 64 + s) * 8, 0, 4096);
	}
	vf_kick_always(&front, r);
}

/* Every slot completes once, with success. */
static void all_complete_once(struct vf_ring *r, unsigned n)
{
	bool seen[1024] = { false };

	for (unsigned i = 0; i < n; i++) {
		int slot = vf_wait(&front, r, 20000);

		if (slot < 0)
			test_fail("queue %u: %u of %u requests completed", r->index, i, n);
		CHECK(!seen[slot]);
		seen[slot] = true;
		CHECK_EQ(*vf_status(&front, r, (unsigned)slot), VIRTIO_BLK_S_OK);
	}
	CHECK_EQ(vf_wait(&front, r, 20), -1);
}

static void data_is(struct vf_ring *r, unsigned from, unsigned n, int value)
{
	char buf[4096], want[4096];
	int fd = open(file, O_RDONLY);

	for (unsigned s = from; s < from + n; s++) {
		memset(want, value + (int)s, sizeof(want));
		CHECK_EQ(pread(fd, buf, 4096, (r->index * 64 + s) * 4096), 4096);
		CHECK(!memcmp(buf, want, 4096));
	}
	close(fd);
}

/* The delay comes before the write: at the kill nothing has completed, and the very first request has index 0. */
static void requests_of_which_none_had_completed(void)
{
	for (unsigned n = 1; n <= 8; n += 7) {
		struct vf_ring *r = &front.ring[0];

		start("delay:write=500ms:", &(struct vf_config){ 0 });
		submit_writes(r, 0, n, 65);
		wait_for_writes(n);
		CHECK_EQ(vf_poll(r, NULL), -1);
		vs_kill(&server);
		memset(server.shared, 0, sizeof(*server.shared));
		vs_restart(&server);
		vf_reconnect(&front);
		all_complete_once(r, n);
		CHECK_EQ(server.shared->writes, n);
		for (unsigned i = 0; i < n; i++)
			CHECK_EQ(server.shared->order[i], i * 4096ull);
		data_is(r, 0, n, 65);
		end();
	}
}

static void more_kills_than_one_and_requests_that_wait(void)
{
	struct vf_ring *r = &front.ring[0];

	start("delay:write=150ms:", &(struct vf_config){ .indirect = true });
	submit_writes(r, 0, 10, 65);
	for (int i = 0; i < 4; i++) {
		wait_for_writes(10);
		vs_kill(&server);
		memset(server.shared, 0, sizeof(*server.shared));
		/* the guest goes on while nobody serves it */
		if (i == 1)
			submit_writes(r, 10, 5, 65);
		vs_restart(&server);
		vf_reconnect(&front);
	}
	all_complete_once(r, 15);
	data_is(r, 0, 15, 65);
	end();
}

/* Some had completed, others not, out of order: reads are faster than writes. */
static void requests_of_which_some_had_completed(void)
{
	struct vf_ring *r = &front.ring[0];

	start("delay:write=400ms:", &(struct vf_config){ .queues = 1 });
	for (unsigned s = 0; s < 20; s++) {
		memset(vf_data(&front, r, s), 66 + (int)s, 4096);
		vf_submit(&front, r, s, s % 2 ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_IN, s * 8, 0, 4096);
	}
	vf_kick_always(&front, r);
	wait_for_writes(10);
	for (unsigned i = 0; i < 10; i++)
		CHECK_EQ(vf_wait(&front, r, 5000) % 2, 0);
	CHECK_EQ(vf_poll(r, NULL), -1);
	vs_kill(&server);
	memset(server.shared, 0, sizeof(*server.shared));
	vs_restart(&server);
	vf_reconnect(&front);
	all_complete_once(r, 10);
	CHECK_EQ(server.shared->writes, 10);
	CHECK_EQ(server.shared->ops[DISK_OP_READ], 0);
	for (unsigned s = 1; s < 20; s += 2)
		data_is(r, s, 1, 66);
	end();
}

static void several_queues(void)
{
	start("delay:write=300ms:", &(struct vf_config){ .queues = 3 });
	for (unsigned q = 0; q < 3; q++)
		submit_writes(&front.ring[q], 0, 6, 70);
	wait_for_writes(18);
	vs_kill(&server);
	vs_restart(&server);
	vf_reconnect(&front);
	for (unsigned q = 0; q < 3; q++) {
		all_complete_once(&front.ring[q], 6);
		data_is(&front.ring[q], 0, 6, 70);
	}
	end();
}

/* A storm: kills at random moments while requests go round. Each is completed once, and a last round finds every byte. */
static void kills_under_load(void)
{
	struct vf_ring *r = &front.ring[0];
	unsigned outstanding = 0, round = 0;
	static uint8_t value[32];
	bool busy[32] = { false };

	start("", &(struct vf_config){ 0 });
	for (uint64_t kill = 0; kill < test_scale(16);) {
		for (unsigned s = 0; s < r->slots; s++) {
			if (busy[s])
				continue;
			value[s]++;
			memset(vf_data(&front, r, s), value[s], 4096);
			vf_submit(&front, r, s, VIRTIO_BLK_T_OUT, s * 8, 0, 4096);
			busy[s] = true;
			outstanding++;
		}
		vf_kick(&front, r);
		if (++round % 20 == 0) {
			usleep(round * 7 % 300);
			vs_kill(&server);
			vs_restart(&server);
			vf_reconnect(&front);
			kill++;
		}
		for (unsigned n = outstanding / 2 + 1; n; n--) {
			int slot = vf_wait(&front, r, 20000);

			if (slot < 0)
				test_fail("%u requests are lost", outstanding);
			CHECK(busy[slot]);
			CHECK_EQ(*vf_status(&front, r, (unsigned)slot), VIRTIO_BLK_S_OK);
			busy[slot] = false;
			outstanding--;
		}
	}
	while (outstanding--) {
		int slot = vf_wait(&front, r, 20000);

		CHECK(slot >= 0 && busy[slot]);
		busy[slot] = false;
	}
	for (unsigned s = 0; s < r->slots; s++)
		data_is(r, s, 1, (int)(value[s] - s));
	end();
}

static void an_orderly_end_leaves_nothing_in_flight(void)
{
	struct vf_ring *r = &front.ring[0];

	start("delay:write=100ms:", &(struct vf_config){ 0 });
	submit_writes(r, 0, 5, 65);
	wait_for_writes(5);
	vs_stop(&server);
	for (unsigned i = 0; i < 5; i++)
		CHECK(vf_poll(r, NULL) >= 0);
	submit_writes(r, 5, 5, 65);
	memset(server.shared, 0, sizeof(*server.shared));
	vs_restart(&server);
	vf_reconnect(&front);
	all_complete_once(r, 5);
	CHECK_EQ(server.shared->writes, 5);
	data_is(r, 0, 10, 65);
	end();
}

int main(void)
{
	RUN(requests_of_which_none_had_completed);
	RUN(more_kills_than_one_and_requests_that_wait);
	RUN(requests_of_which_some_had_completed);
	RUN(several_queues);
	RUN(kills_under_load);
	RUN(an_orderly_end_leaves_nothing_in_flight);
	return 0;
}
