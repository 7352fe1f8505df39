/* SPDX-License-Identifier: MIT */
/*
 * Live migration without a virtual machine: a copier follows the log of dirty pages, as QEMU does, while random requests are in flight. It empties
 * the log, copies the pages that were marked, does so again, gets another log, starts and stops logging; at a random moment the device is stopped and the
 * rest copied. Then the copy must be the memory, byte for byte, and the device goes on with the next front end where it was.
 *
 * What the driver itself writes it marks itself, when it writes: so a mark of the device's is the only thing that has a page copied that was
 * copied between the request and its completion.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>
#include <sys/mman.h>

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
#define PAGE VHOST_LOG_PAGE
#define PAGES_MAX 1024u

struct request {
	bool busy;
	uint32_t type, len, at;
	uint64_t off;
};

struct log {
	int fd;
	char *map;
	size_t map_len;
	uint64_t *bits, words;
};

static struct vs server;
static struct vf front;
static struct rng rng;
static uint8_t model[SIZE], copy[PAGES_MAX * PAGE];
static bool dirty[PAGES_MAX];
static struct request requests[QUEUES][SLOTS];
static struct log dirty_log = { .fd = -1 };
static bool logging;
static uint64_t moves, passes, logs, marked;

/* --- The copier --- */

static void mark(const void *p, size_t len)
{
	size_t first = (size_t)((const char *)p - front.mem) / PAGE, last = ((size_t)((const char *)p - front.mem) + len - 1) / PAGE;

	for (size_t i = first; i <= last; i++)
		dirty[i] = true;
}

static void log_create(struct log *l)
{
	uint64_t skip = rng_below(&rng, 3) * PAGE;
	/* In words that cover all pages up to the last, not one byte more: the first one without a page is not the device's. */
	uint64_t size = align_up((front.gpa + front.mem_len) / PAGE, 64) / 8;
	struct vhost_user_log m = { .size = size, .offset = skip };
	uint64_t v;

	l->map_len = skip + size + PAGE;
	l->fd = memfd_create("log", MFD_CLOEXEC);
	CHECK(l->fd >= 0 && !ftruncate(l->fd, (off_t)l->map_len));
	l->map = mmap(NULL, l->map_len, PROT_READ | PROT_WRITE, MAP_SHARED, l->fd, 0);
	CHECK(l->map != MAP_FAILED);
	l->bits = (uint64_t *)(l->map + skip);
	l->words = size / 8;
	CHECK_EQ(vf_send(&front, VHOST_USER_SET_LOG_BASE, 0, &m, sizeof(m), &l->fd, 1), 0);
	CHECK_EQ(vf_recv(&front, VHOST_USER_SET_LOG_BASE, &v, 8, NULL), 8);
	logs++;
}

/* Takes the marks out. */
static void log_empty(struct log *l)
{
	uint64_t first = front.gpa / PAGE;

	for (uint64_t w = first / 64; w < l->words; w++) {
		uint64_t bits = __atomic_exchange_n(&l->bits[w], 0, __ATOMIC_ACQ_REL);

		for (unsigned i = 0; i < 64; i++) {
			if (!(bits >> i & 1))
				continue;
			CHECK(w * 64 + i >= first && w * 64 + i - first < front.mem_len / PAGE);
			dirty[w * 64 + i - first] = true;
			marked++;
		}
	}
}

/* Nobody else has bits there. */
static void log_destroy(struct log *l)
{
	for (uint64_t w = 0; w < front.gpa / PAGE / 64; w += 61)
		CHECK_EQ(l->bits[w], 0);
	munmap(l->map, l->map_len);
	close(l->fd);
	l->fd = -1;
}

static void set_logging(bool on)
{
	uint64_t features = front.features | (on ? VHOST_F_LOG_ALL : 0);

	CHECK_EQ(vf_ack(&front, VHOST_USER_SET_FEATURES, &features, 8, NULL, 0), 0);
	for (unsigned q = 0; q < QUEUES; q++) {
		struct vf_ring *r = &front.ring[q];
		struct vhost_user_vring_addr a = { .index = q, .flags = on ? VHOST_VRING_F_LOG_USED : 0, .desc = (uintptr_t)r->desc,
						   .used = (uintptr_t)r->used, .avail = (uintptr_t)r->avail, .log = vf_gpa(&front, r->used) };

		CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ADDR, &a, sizeof(a), NULL, 0), 0);
	}
	logging = on;
}

static void begin_logging(void)
{
	log_create(&dirty_log);
	set_logging(true);
	memset(dirty, true, sizeof(dirty));
}

static void end_logging(void)
{
	set_logging(false);
	log_destroy(&dirty_log);
}

/* The marks that came into the old log until the device had the new one must not be lost. */
static void replace_log(void)
{
	struct log old = dirty_log;

	log_create(&dirty_log);
	log_empty(&old);
	log_destroy(&old);
}

static void copy_pages(bool all)
{
	for (unsigned q = 0; q < QUEUES; q++)
		mark(front.ring[q].avail, VRING_AVAIL_LEN(front.ring[q].num));
	log_empty(&dirty_log);
	for (size_t i = 0; i < front.mem_len / PAGE; i++) {
		if (!dirty[i] || (!all && !rng_below(&rng, 4)))
			continue;
		dirty[i] = false;
		memcpy(copy + i * PAGE, front.mem + i * PAGE, PAGE);
	}
	passes++;
}

/* --- Requests --- */

static void begin(unsigned q, unsigned slot)
{
	static const uint32_t types[] = { VIRTIO_BLK_T_IN, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID };
	struct vf_ring *r = &front.ring[q];
	struct request *x = &requests[q][slot];
	uint64_t slice = (q * SLOTS + slot) * SLICE;
	uint32_t sectors = 1 + (uint32_t)rng_below(&rng, 32), first = (uint32_t)rng_below(&rng, SLICE / SECTOR - sectors);
	char *data = vf_data(&front, r, slot);

	*x = (struct request){ .busy = true, .type = types[rng_below(&rng, ARRAY_SIZE(types))], .off = slice + first * SECTOR,
			       .len = sectors * SECTOR, .at = (uint32_t)rng_below(&rng, 64) * SECTOR };
	if (x->type == VIRTIO_BLK_T_OUT) {
		rng_fill(&rng, data + x->at, x->len);
		memcpy(model + x->off, data + x->at, x->len);
	} else if (x->type == VIRTIO_BLK_T_IN) {
		memset(data + x->at, 0x55, x->len);
	} else if (x->type == VIRTIO_BLK_T_GET_ID) {
		x->len = VIRTIO_BLK_ID_BYTES;
		memset(data + x->at, 0x55, x->len);
	} else {
		x->len = 0;
	}
	vf_submit(&front, r, slot, x->type, x->type <= VIRTIO_BLK_T_OUT ? x->off / SECTOR : 0, x->at, x->len);
	/* From the slot's first page, which has header, status and indirect table, to the end of the data. */
	mark(data - PAGE, PAGE);
	if (x->len)
		mark(data + x->at, x->len);
	mark(r->desc + slot * VF_SLOT_DESCS, VF_SLOT_DESCS * 16);
}

static void complete(unsigned q, unsigned slot)
{
	struct request *x = &requests[q][slot];
	const char *data = vf_data(&front, &front.ring[q], slot) + x->at;

	CHECK(x->busy);
	x->busy = false;
	if (*vf_status(&front, &front.ring[q], slot) != VIRTIO_BLK_S_OK)
		test_fail("request %u at %" PRIu64 " of %u bytes has status %u", x->type, x->off, x->len, *vf_status(&front, &front.ring[q], slot));
	if (x->type == VIRTIO_BLK_T_IN && memcmp(data, model + x->off, x->len))
		test_fail("a read at %" PRIu64 " of %u bytes differs", x->off, x->len);
	if (x->type == VIRTIO_BLK_T_GET_ID)
		CHECK(!strcmp(data, "test"));
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

/* --- The move --- */

static const char *what_is_at(size_t page)
{
	static char text[128];

	for (unsigned q = 0; q < QUEUES; q++) {
		struct vf_ring *r = &front.ring[q];

		if (page == (size_t)((char *)r->used - front.mem) / PAGE)
			return "a used ring";
		for (unsigned s = 0; s < SLOTS; s++) {
			size_t data = (size_t)(vf_data(&front, r, s) - front.mem) / PAGE;

			if (page == data - 1)
				return "a status byte";
			if (page >= data && page < data + front.c.data / PAGE) {
				snprintf(text, sizeof(text), "page %zu of the data of a request of type %u: %u bytes at %u", page - data, requests[q][s].type,
					 requests[q][s].len, requests[q][s].at);
				return text;
			}
		}
	}
	return "something else";
}

static void move(void)
{
	uint64_t none = 0;

	/* In both orders that front ends have. */
	if (rng_below(&rng, 2))
		CHECK_EQ(vf_ack(&front, VHOST_USER_SET_STATUS, &none, 8, NULL, 0), 0);
	for (unsigned q = 0; q < QUEUES; q++) {
		struct vhost_user_vring_state s = { q, 0 };

		if (rng_below(&rng, 2))
			CHECK_EQ(vf_ack(&front, VHOST_USER_SET_VRING_ENABLE, &s, sizeof(s), NULL, 0), 0);
	}
	for (unsigned q = 0; q < QUEUES; q++) {
		uint16_t base = vf_stop_ring(&front, &front.ring[q]);

		CHECK_EQ(base, front.ring[q].used[1]);
	}
	copy_pages(true);
	for (size_t i = 0; i < front.mem_len / PAGE; i++)
		if (memcmp(copy + i * PAGE, front.mem + i * PAGE, PAGE))
			test_fail("page %zu of the copy is not as in the memory: %s", i, what_is_at(i));
	log_destroy(&dirty_log);
	logging = false;
	vf_reconnect(&front);
	moves++;
}

static void step(void)
{
	for (unsigned q = 0; q < QUEUES; q++) {
		for (unsigned s = 0; s < SLOTS; s++)
			if (!requests[q][s].busy && rng_below(&rng, 2))
				begin(q, s);
		vf_kick(&front, &front.ring[q]);
	}
	if (!logging && !rng_below(&rng, 4))
		begin_logging();
	if (logging) {
		switch (rng_below(&rng, 16)) {
		case 0:
		case 1:
			move();
			break;
		case 2:
			replace_log();
			break;
		case 3:
			end_logging();
			break;
		case 4:
			if (!front.c.slots)
				vf_set_memory(&front);
			break;
		default:
			copy_pages(false);
		}
	}
	/* Now and then in the middle of completions as well. */
	some_complete(false);
	if (logging && rng_below(&rng, 2))
		copy_pages(false);
}

static void round_of(uint64_t steps)
{
	struct vf_config c = { .path = server.path, .queues = QUEUES, .num = SLOTS * VF_SLOT_DESCS, .data = 65536 };

	c.inflight = rng_below(&rng, 2);
	c.regions = 1 + (unsigned)rng_below(&rng, 4);
	c.slots = rng_below(&rng, 2);
	c.indirect = rng_below(&rng, 2);
	c.mask = rng_below(&rng, 2) ? VIRTIO_F_EVENT_IDX : 0;
	vf_open(&front, &c);
	CHECK(front.mem_len <= sizeof(copy));
	for (uint64_t i = 0; i < steps; i++)
		step();
	if (!logging)
		begin_logging();
	move();
	some_complete(true);
	vf_close(&front);
}

static void what_was_marked_and_copied_is_the_memory(void)
{
	vs_start(&server, "delay:read=300us,write=300us:mem:2M", false);
	for (uint64_t i = 0; i < test_scale(8); i++)
		round_of(100);
	vs_stop(&server);
	vs_fini(&server);
	printf("%" PRIu64 " moves, %" PRIu64 " passes, %" PRIu64 " logs, %" PRIu64 " pages marked\n", moves, passes, logs, marked);
}

int main(void)
{
	rng_seed(&rng, test_seed());
	RUN(what_was_marked_and_copied_is_the_memory);
	return 0;
}
