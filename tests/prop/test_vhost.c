/* SPDX-License-Identifier: MIT */
/*
 * Random requests over vhost-user against a model: several queues at once, any chain layout that the front end has, the server killed or stopped and started
 * at random moments, memory given in several ways. Requests in flight together never overlap, so the model is an array of bytes.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>

#include "lib/test.h"
#include "lib/vhost_front.h"
#include "lib/vhost_serve.h"
#include "util/bytes.h"
#include "util/rng.h"

#define SIZE (2u << 20)
#define SECTOR 512u
#define SLICE 65536u		/* each slot has its own part of the disk: no overlap in flight */
#define QUEUES 2u
#define SLOTS 8u

struct request {
	bool busy;
	uint32_t type, len;
	uint64_t off;
	struct virtio_blk_discard_write_zeroes range;
};

static struct vs server;
static struct vf front;
static struct rng rng;
static uint8_t model[SIZE];
static struct request requests[QUEUES][SLOTS];
static char file[96], disk[160];

static void begin(unsigned q, unsigned slot)
{
	static const uint32_t types[] = { VIRTIO_BLK_T_IN, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_FLUSH,
					  VIRTIO_BLK_T_WRITE_ZEROES };
	struct vf_ring *r = &front.ring[q];
	struct request *x = &requests[q][slot];
	uint64_t slice = (q * SLOTS + slot) * SLICE;
	uint32_t sectors = 1 + (uint32_t)rng_below(&rng, 64), first = (uint32_t)rng_below(&rng, SLICE / SECTOR - sectors);
	uint32_t at = (uint32_t)rng_below(&rng, 8) * SECTOR;
	char *data = vf_data(&front, r, slot);

	x->busy = true;
	x->type = types[rng_below(&rng, ARRAY_SIZE(types))];
	x->off = slice + first * SECTOR;
	x->len = sectors * SECTOR;
	if (x->type == VIRTIO_BLK_T_OUT) {
		rng_fill(&rng, data + at, x->len);
		memcpy(model + x->off, data + at, x->len);
		vf_submit(&front, r, slot, x->type, x->off / SECTOR, at, x->len);
	} else if (x->type == VIRTIO_BLK_T_WRITE_ZEROES) {
		x->range = (struct virtio_blk_discard_write_zeroes){ x->off / SECTOR, sectors, (uint32_t)rng_below(&rng, 2) };
		memcpy(data, &x->range, sizeof(x->range));
		memset(model + x->off, 0, x->len);
		vf_submit(&front, r, slot, x->type, 0, 0, sizeof(x->range));
	} else if (x->type == VIRTIO_BLK_T_IN) {
		memset(data, 0x55, x->len);
		vf_submit(&front, r, slot, x->type, x->off / SECTOR, 0, x->len);
	} else {
		vf_submit(&front, r, slot, x->type, 0, 0, 0);
	}
}

static void complete(unsigned q, unsigned slot)
{
	struct request *x = &requests[q][slot];

	CHECK(x->busy);
	x->busy = false;
	if (*vf_status(&front, &front.ring[q], slot) != VIRTIO_BLK_S_OK)
		test_fail("request %u at %" PRIu64 " of %u bytes has status %u", x->type, x->off, x->len, *vf_status(&front, &front.ring[q], slot));
	if (x->type == VIRTIO_BLK_T_IN && memcmp(vf_data(&front, &front.ring[q], slot), model + x->off, x->len))
		test_fail("a read at %" PRIu64 " of %u bytes differs", x->off, x->len);
}

static void some_complete(bool all)
{
	for (unsigned q = 0; q < QUEUES; q++) {
		unsigned busy = 0;

		for (unsigned s = 0; s < SLOTS; s++)
			busy += requests[q][s].busy;
		while (busy && (all || rng_below(&rng, 4))) {
			int slot = vf_wait(&front, &front.ring[q], 20000);

			if (slot < 0)
				test_fail("queue %u: %u requests are lost", q, busy);
			complete(q, (unsigned)slot);
			busy--;
		}
	}
}

static void round_of(uint64_t steps)
{
	struct vf_config c = { .path = server.path, .queues = QUEUES, .num = SLOTS * VF_SLOT_DESCS, .data = 65536, .inflight = true };

	c.regions = 1 + (unsigned)rng_below(&rng, 4);
	c.slots = rng_below(&rng, 2);
	c.indirect = rng_below(&rng, 2);
	c.mask = (rng_below(&rng, 2) ? VIRTIO_F_EVENT_IDX : 0) | (rng_below(&rng, 3) ? 0 : 1ull << VIRTIO_BLK_F_FLUSH);
	vf_open(&front, &c);
	for (uint64_t i = 0; i < steps; i++) {
		for (unsigned q = 0; q < QUEUES; q++) {
			for (unsigned s = 0; s < SLOTS; s++)
				if (!requests[q][s].busy && rng_below(&rng, 2))
					begin(q, s);
			if (rng_below(&rng, 8))
				vf_kick(&front, &front.ring[q]);
		}
		if (rng_below(&rng, 25) == 0) {
			if (rng_below(&rng, 3))
				vs_kill(&server);
			else
				vs_stop(&server);
			vs_restart(&server);
			vf_reconnect(&front);
		}
		for (unsigned q = 0; q < QUEUES; q++)
			vf_kick(&front, &front.ring[q]);
		some_complete(false);
	}
	some_complete(true);
	vf_close(&front);
}

static void what_is_on_the_disk_is_the_model(void)
{
	static uint8_t buf[SIZE];
	const char *tmp = getenv("TMPDIR");
	int fd;

	snprintf(file, sizeof(file), "%s/weir-vhost-disk-XXXXXX", tmp && *tmp && strlen(tmp) < 60 ? tmp : "/tmp");
	fd = mkstemp(file);
	CHECK(fd >= 0 && !ftruncate(fd, SIZE));
	snprintf(disk, sizeof(disk), "%s,cache=writeback", file);
	vs_start(&server, disk, false);
	for (uint64_t i = 0; i < test_scale(8); i++)
		round_of(100);
	vs_stop(&server);
	vs_fini(&server);
	CHECK_EQ(pread(fd, buf, SIZE, 0), SIZE);
	CHECK(!memcmp(buf, model, SIZE));
	close(fd);
	unlink(file);
}

int main(void)
{
	rng_seed(&rng, test_seed());
	RUN(what_is_on_the_disk_is_the_model);
	return 0;
}
