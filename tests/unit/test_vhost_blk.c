/* SPDX-License-Identifier: MIT */
/* virtio-blk over vhost-user, seen from the front end. */
#include <errno.h>
#include <linux/virtio_blk.h>

#include "lib/test.h"
#include "lib/vhost_front.h"
#include "lib/vhost_serve.h"
#include "util/bytes.h"

static struct vs server;
static struct vf front;

static void open_on(const char *disk, const struct vf_config *c)
{
	struct vf_config config = c ? *c : (struct vf_config){ 0 };

	vs_start(&server, disk, false);
	config.path = server.path;
	vf_open(&front, &config);
}

static void end(void)
{
	vf_close(&front);
	vs_stop(&server);
	vs_fini(&server);
}

static void what_is_written_is_read(void)
{
	static const struct vf_config configs[] = {
		{ 0 }, { .indirect = true }, { .regions = 2, .data = 1 << 20 }, { .slots = true, .regions = 3 }, { .num = 4 }, { .num = 1024, .data = 4096 },
		{ .mask = VIRTIO_F_EVENT_IDX }, { .mask = VIRTIO_F_EVENT_IDX, .indirect = true }, { .mask = VHOST_USER_F_PROTOCOL_FEATURES },
		{ .protocol_mask = VHOST_USER_PROTOCOL_F_REPLY_ACK }, { .inflight = true }, { .ask_early = true },
	};
	char out[4096], in[4096];

	for (size_t i = 0; i < ARRAY_SIZE(configs); i++) {
		open_on("mem:16M", &configs[i]);
		for (unsigned k = 0; k < 300; k++) {
			memset(out, (int)(k + 1), sizeof(out));
			CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_OUT, k * 8, out, sizeof(out)), VIRTIO_BLK_S_OK);
			CHECK_EQ(vf_request(&front, VIRTIO_BLK_T_IN, k * 8, in, sizeof(in)), VIRTIO_BLK_S_OK);
			CHECK(!memcmp(in, out, sizeof(in)));
		}
		end();
	}
}


#define SECTORS (16u << 11)	/* of mem:16M */

static int request(uint32_t type, uint64_t sector, void *buf, uint32_t len)
{
	return vf_request(&front, type, sector, buf, len);
}

static void requests_beyond_the_end_or_of_odd_length_fail(void)
{
	static char buf[65536];

	open_on("mem:16M", NULL);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, SECTORS, buf, 512), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, SECTORS - 1, buf, 1024), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, SECTORS - 1, buf, 1024), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, UINT64_MAX, buf, 512), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, UINT64_MAX / 512, buf, 4096), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, 0, buf, 511), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 513), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, SECTORS - 1, buf, 512), VIRTIO_BLK_S_OK);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, SECTORS - 1, buf, 512), VIRTIO_BLK_S_OK);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, 0, NULL, 0), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->ops[DISK_OP_WRITE], 1);
	CHECK_EQ(server.shared->ops[DISK_OP_READ], 1);
	end();
}

static void unknown_requests_are_unsupported(void)
{
	char buf[512] = { 0 };

	open_on("mem:16M", NULL);
	CHECK_EQ(request(2, 0, buf, 512), VIRTIO_BLK_S_UNSUPP);
	CHECK_EQ(request(VIRTIO_BLK_T_SECURE_ERASE, 0, buf, 16), VIRTIO_BLK_S_UNSUPP);
	CHECK_EQ(request(0xffffffff, 0, buf, 512), VIRTIO_BLK_S_UNSUPP);
	end();
}

static void the_id_is_the_volume_s_name(void)
{
	char id[20];

	open_on("mem:16M", NULL);
	CHECK_EQ(request(VIRTIO_BLK_T_GET_ID, 0, id, sizeof(id)), VIRTIO_BLK_S_OK);
	CHECK_STR(id, "test");
	CHECK_EQ(request(VIRTIO_BLK_T_GET_ID, 0, id, 19), VIRTIO_BLK_S_IOERR);
	end();
}

static int ranges(uint32_t type, const struct virtio_blk_discard_write_zeroes *r, unsigned n)
{
	return request(type, 0, (void *)r, n * sizeof(*r));
}

static void discards_and_zeroes(void)
{
	struct virtio_blk_discard_write_zeroes r[33] = { 0 };
	static char buf[65536];

	open_on("mem:16M", NULL);
	memset(buf, 7, sizeof(buf));
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, sizeof(buf)), VIRTIO_BLK_S_OK);
	r[0] = (struct virtio_blk_discard_write_zeroes){ .sector = 8, .num_sectors = 8 };
	r[1] = (struct virtio_blk_discard_write_zeroes){ .sector = 32, .num_sectors = 1, .flags = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP };
	CHECK_EQ(ranges(VIRTIO_BLK_T_WRITE_ZEROES, r, 2), VIRTIO_BLK_S_OK);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, 0, buf, sizeof(buf)), VIRTIO_BLK_S_OK);
	for (unsigned i = 0; i < sizeof(buf); i++)
		CHECK_EQ(buf[i], (i / 512 >= 8 && i / 512 < 16) || i / 512 == 32 ? 0 : 7);
	CHECK_EQ(server.shared->ops[DISK_OP_ZERO], 2);
	r[0].num_sectors = 128;
	r[0].sector = 0;
	CHECK_EQ(ranges(VIRTIO_BLK_T_DISCARD, r, 1), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->ops[DISK_OP_DISCARD], 1);
	/* flags that do not go with it, ranges beyond the end, too many of them, half of one */
	CHECK_EQ(ranges(VIRTIO_BLK_T_DISCARD, r + 1, 1), VIRTIO_BLK_S_UNSUPP);
	r[1].flags = 2;
	CHECK_EQ(ranges(VIRTIO_BLK_T_WRITE_ZEROES, r + 1, 1), VIRTIO_BLK_S_UNSUPP);
	r[1] = (struct virtio_blk_discard_write_zeroes){ .sector = SECTORS - 1, .num_sectors = 2 };
	CHECK_EQ(ranges(VIRTIO_BLK_T_WRITE_ZEROES, r + 1, 1), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(ranges(VIRTIO_BLK_T_DISCARD, r, 33), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(ranges(VIRTIO_BLK_T_DISCARD, r, 0), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_DISCARD, 0, r, 15), VIRTIO_BLK_S_IOERR);
	end();
	open_on("mem:16M", &(struct vf_config){ .mask = 1ull << VIRTIO_BLK_F_DISCARD });
	r[0] = (struct virtio_blk_discard_write_zeroes){ .sector = 8, .num_sectors = 8 };
	CHECK_EQ(ranges(VIRTIO_BLK_T_DISCARD, r, 1), VIRTIO_BLK_S_UNSUPP);
	end();
}

static void a_read_only_disk_refuses_changes(void)
{
	struct vf_config c = { 0 };
	char buf[512] = { 0 };

	vs_start(&server, "mem:16M", true);
	c.path = server.path;
	vf_open(&front, &c);
	CHECK(front.offered & 1ull << VIRTIO_BLK_F_RO);
	CHECK(!(front.offered & (1ull << VIRTIO_BLK_F_DISCARD | 1ull << VIRTIO_BLK_F_WRITE_ZEROES)));
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 512), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(request(VIRTIO_BLK_T_IN, 0, buf, 512), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->ops[DISK_OP_WRITE], 0);
	end();
}

static void set_wce(bool on)
{
	uint8_t v = on;

	CHECK_EQ(vf_set_config(&front, 32, &v, 1), 0);
	CHECK_EQ(vf_get_config(&front, 32, &v, 1), 0);
	CHECK_EQ(v, on);
}

static void the_cache_mode_is_honoured_both_ways(void)
{
	struct virtio_blk_discard_write_zeroes r = { .sector = 8, .num_sectors = 8 };
	char buf[4096] = { 0 };
	uint8_t wce;

	open_on("mem:16M", NULL);
	CHECK_EQ(vf_get_config(&front, 32, &wce, 1), 0);
	CHECK_EQ(wce, 1);
	for (int i = 0; i < 10; i++)
		CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 4096), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->fua, 0);
	CHECK_EQ(server.shared->ops[DISK_OP_FLUSH], 0);
	CHECK_EQ(request(VIRTIO_BLK_T_FLUSH, 0, NULL, 0), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->ops[DISK_OP_FLUSH], 1);
	/* off: what was written before is made durable, and each later change by itself */
	set_wce(false);
	CHECK_EQ(server.shared->ops[DISK_OP_FLUSH], 2);
	for (int i = 0; i < 10; i++)
		CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 4096), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->fua, 10);
	CHECK_EQ(ranges(VIRTIO_BLK_T_WRITE_ZEROES, &r, 1), VIRTIO_BLK_S_OK);
	CHECK_EQ(ranges(VIRTIO_BLK_T_DISCARD, &r, 1), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->fua, 12);
	set_wce(true);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 4096), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->fua, 12);
	CHECK_EQ(vf_set_config(&front, 0, buf, 8), 1);
	CHECK_EQ(vf_set_config(&front, 32, buf, 2), 1);
	/* the next front end finds it as it was at first */
	set_wce(false);
	vf_close(&front);
	vf_open(&front, &(struct vf_config){ .path = server.path });
	CHECK_EQ(vf_get_config(&front, 32, &wce, 1), 0);
	CHECK_EQ(wce, 1);
	end();
}

static void without_flush_each_write_is_durable(void)
{
	char buf[4096] = { 0 };

	open_on("mem:16M", &(struct vf_config){ .mask = 1ull << VIRTIO_BLK_F_FLUSH | 1ull << VIRTIO_BLK_F_CONFIG_WCE });
	for (int i = 0; i < 10; i++)
		CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 4096), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->fua, 10);
	end();
	/* with it, but without the config field, the cache is on */
	open_on("mem:16M", &(struct vf_config){ .mask = 1ull << VIRTIO_BLK_F_CONFIG_WCE });
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 4096), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->fua, 0);
	end();
}

/* A write that is under way when the cache is switched off completes durable: there is a flush behind it. */
static void a_write_in_flight_when_the_cache_goes_off_is_durable(void)
{
	struct vf_ring *r = &front.ring[0];
	uint64_t flushes;
	int slot;

	open_on("delay:write=300ms:mem:16M", NULL);
	slot = vf_slot_get(r);
	vf_submit(&front, r, (unsigned)slot, VIRTIO_BLK_T_OUT, 0, 0, 4096);
	vf_kick_always(&front, r);
	while (!__atomic_load_n(&server.shared->ops[DISK_OP_WRITE], __ATOMIC_RELAXED))
		usleep(1000);
	set_wce(false);
	flushes = server.shared->ops[DISK_OP_FLUSH];
	CHECK_EQ(vf_wait(&front, r, 10000), slot);
	CHECK_EQ(*vf_status(&front, r, (unsigned)slot), VIRTIO_BLK_S_OK);
	CHECK_EQ(server.shared->ops[DISK_OP_FLUSH], flushes + 1);
	end();
}

static void errors_of_the_disk_reach_the_guest(void)
{
	char buf[512] = { 0 };

	open_on("mem:16M", NULL);
	server.shared->fail[DISK_OP_READ] = -EIO;
	CHECK_EQ(request(VIRTIO_BLK_T_IN, 0, buf, 512), VIRTIO_BLK_S_IOERR);
	server.shared->fail[DISK_OP_READ] = 0;
	CHECK_EQ(request(VIRTIO_BLK_T_IN, 0, buf, 512), VIRTIO_BLK_S_OK);
	server.shared->fail[DISK_OP_WRITE] = -ENOSPC;
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, 0, buf, 512), VIRTIO_BLK_S_IOERR);
	server.shared->fail[DISK_OP_WRITE] = 0;
	server.shared->fail[DISK_OP_FLUSH] = -EIO;
	CHECK_EQ(request(VIRTIO_BLK_T_FLUSH, 0, NULL, 0), VIRTIO_BLK_S_IOERR);
	/* a flush that failed is never retried and then called a success */
	server.shared->fail[DISK_OP_FLUSH] = 0;
	CHECK_EQ(request(VIRTIO_BLK_T_FLUSH, 0, NULL, 0), VIRTIO_BLK_S_IOERR);
	end();
}

static void the_config_space_tells_the_truth(void)
{
	struct virtio_blk_config c;
	uint8_t all[256];

	open_on("mem:16M", NULL);
	CHECK_EQ(vf_get_config(&front, 0, &c, 60), 0);
	CHECK_EQ(c.capacity, SECTORS);
	CHECK_EQ(c.blk_size, 512);
	CHECK_EQ(c.seg_max, 126);
	CHECK_EQ(c.num_queues, 64);
	CHECK_EQ(vf_get_u64(&front, VHOST_USER_GET_QUEUE_NUM), 64);
	CHECK(c.max_discard_sectors && c.max_discard_seg && c.max_write_zeroes_sectors && c.max_write_zeroes_seg && c.write_zeroes_may_unmap);
	/* what lies behind reads as zeroes; beyond the largest there is nothing */
	CHECK_EQ(vf_get_config(&front, 0, all, 256), 0);
	CHECK(!memcmp(all, &c, 60) && bytes_are_zero(all + 60, 196));
	CHECK_EQ(vf_get_config(&front, 200, all, 57), -EINVAL);
	end();
}

static void a_resize_reaches_the_guest(void)
{
	struct vhost_user_hdr hdr;
	uint64_t capacity;
	char buf[512] = { 0 };

	open_on("mem:16M", NULL);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, SECTORS, buf, 512), VIRTIO_BLK_S_IOERR);
	CHECK_EQ(vs_resize(&server, 32 << 20), 0);
	CHECK_EQ(read(front.backend_fd, &hdr, sizeof(hdr)), (ssize_t)sizeof(hdr));
	CHECK_EQ(hdr.request, VHOST_USER_BACKEND_CONFIG_CHANGE);
	CHECK_EQ(hdr.size, 0);
	CHECK_EQ(vf_get_config(&front, 0, &capacity, 8), 0);
	CHECK_EQ(capacity, 2 * SECTORS);
	CHECK_EQ(request(VIRTIO_BLK_T_OUT, SECTORS, buf, 512), VIRTIO_BLK_S_OK);
	end();
}

static void several_queues_work_at_once(void)
{
	open_on("mem:16M", &(struct vf_config){ .queues = 4, .indirect = true });
	for (unsigned round = 0; round < 50; round++) {
		for (unsigned q = 0; q < 4; q++) {
			struct vf_ring *r = &front.ring[q];

			for (unsigned s = 0; s < r->slots; s++) {
				memset(vf_data(&front, r, s), (int)(q * 50 + s), 4096);
				vf_submit(&front, r, s, VIRTIO_BLK_T_OUT, (q * 32 + s) * 8, 0, 4096);
			}
			vf_kick(&front, r);
		}
		for (unsigned q = 0; q < 4; q++)
			for (unsigned s = 0; s < front.ring[q].slots; s++)
				CHECK(vf_wait(&front, &front.ring[q], 10000) >= 0);
	}
	for (unsigned q = 0; q < 4; q++) {
		struct vf_ring *r = &front.ring[q];

		for (unsigned s = 0; s < r->slots; s++) {
			vf_submit(&front, r, 0, VIRTIO_BLK_T_IN, (q * 32 + s) * 8, 0, 4096);
			vf_kick(&front, r);
			CHECK_EQ(vf_wait(&front, r, 10000), 0);
			CHECK_EQ(vf_data(&front, r, 0)[17], (char)(q * 50 + s));
		}
	}
	end();
}

/* Under load neither side signals: the server looks at the ring by itself, and calls once for many completions. */
static void signals_are_few_under_load(void)
{
	struct vf_ring *r = &front.ring[0];
	unsigned done = 0;

	open_on("mem:16M", NULL);
	for (unsigned round = 0; round < 100; round++) {
		for (unsigned s = 0; s < r->slots; s++)
			vf_submit(&front, r, s, VIRTIO_BLK_T_OUT, s * 8, 0, 4096);
		vf_kick(&front, r);
		for (unsigned s = 0; s < r->slots; s++)
			done += vf_wait(&front, r, 10000) >= 0;
	}
	CHECK_EQ(done, 100 * r->slots);
	CHECK(r->kicks <= 100);
	end();
}

int main(void)
{
	RUN(what_is_written_is_read);
	RUN(requests_beyond_the_end_or_of_odd_length_fail);
	RUN(unknown_requests_are_unsupported);
	RUN(the_id_is_the_volume_s_name);
	RUN(discards_and_zeroes);
	RUN(a_read_only_disk_refuses_changes);
	RUN(the_cache_mode_is_honoured_both_ways);
	RUN(without_flush_each_write_is_durable);
	RUN(a_write_in_flight_when_the_cache_goes_off_is_durable);
	RUN(errors_of_the_disk_reach_the_guest);
	RUN(the_config_space_tells_the_truth);
	RUN(a_resize_reaches_the_guest);
	RUN(several_queues_work_at_once);
	RUN(signals_are_few_under_load);
	return 0;
}
