/* SPDX-License-Identifier: MIT */
/*
 * Many writers of any alignment on a disk with large units never lose each other's updates.
 *
 * Each writer owns some byte ranges, which share units with those of others, and writes, zeroes, discards and reads them in its own order;
 * after each step its bytes must be what it wrote last. Some change whole units of which another one changes a part at the same
 * time: only the rest is theirs then, and must not fall back to what the other one read. A slow disk below gives every op a random time, so that reads, merges and writes
 * of different requests interleave in all ways.
 */
#include "backend/drivers.h"
#include "blk/disk.h"
#include "rt/buf.h"
#include "unit/test_rt.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/rng.h"

#define WRITERS 24
#define STEPS 60
#define SIZE 300003u

struct world {
	struct disk *slow;	/* aligns; sits over a disk that takes its time */
	uint8_t model[SIZE], contested[SIZE];
	uint32_t align;
	uint64_t seed;
};

/* A driver that needs alignment and is slow: what the ops see is what the choke point made of it. */
struct slow {
	struct disk disk;
	uint8_t *data;
	struct rng rng;
};

static co_fn void co_dawdle(struct slow *s)
{
	if (rng_below(&s->rng, 3))
		co_sleep_ns(1 + rng_below(&s->rng, 20000));
}

static co_fn int slow_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct slow *s = container_of(d, struct slow, disk);

	CHECK(is_aligned(off | len, d->limits.align) && iov_is_aligned(iov, niov, 512));
	co_dawdle(s);
	iov_copy_in(iov, niov, 0, s->data + off, len);
	co_dawdle(s);
	return 0;
}

static co_fn int slow_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct slow *s = container_of(d, struct slow, disk);

	CHECK(is_aligned(off | len, d->limits.align) && iov_is_aligned(iov, niov, 512));
	co_dawdle(s);
	iov_copy_out(iov, niov, 0, s->data + off, len);
	co_dawdle(s);
	return 0;
}

static co_fn int slow_co_clear(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct slow *s = container_of(d, struct slow, disk);

	CHECK(is_aligned(off | len, d->limits.align));
	co_dawdle(s);
	memset(s->data + off, 0, len);
	co_dawdle(s);
	return 0;
}

static co_fn void slow_co_close(struct disk *d)
{
	free(container_of(d, struct slow, disk)->data);
	disk_fini(d);
	free(d);
}

static const struct disk_ops slow_ops = {
	.driver = "slow",
	.co_read = slow_co_read,
	.co_write = slow_co_write,
	.co_discard = slow_co_clear,
	.co_zero = slow_co_clear,
	.co_close = slow_co_close,
};

static struct disk *open_slow(uint32_t align, uint64_t seed)
{
	struct slow *s = calloc(1, sizeof(*s));

	CHECK_EQ(disk_init(&s->disk, &slow_ops, "slow", NULL), 0);
	s->data = calloc(1, SIZE + 65536);
	rng_seed(&s->rng, seed);
	s->disk.size = SIZE;
	s->disk.limits.align = align;
	s->disk.limits.mem_align = 512;
	s->disk.limits.discard_gran = align;
	s->disk.limits.discard_zeroes = true;
	s->disk.limits.max_io = 5 * align;
	return &s->disk;
}

struct writer {
	struct world *w;
	struct rng rng;
	uint64_t off, len;	/* what it changes */
	uint64_t own;		/* so many of the first bytes nobody else changes */
};

static co_fn void co_step(struct writer *me, uint8_t *buf)
{
	struct disk *d = me->w->slow;
	uint64_t len = 1 + rng_below(&me->rng, me->len), off = me->off + rng_below(&me->rng, me->len - len + 1);

	if (me->own < me->len || rng_below(&me->rng, 3) == 0) {
		off = me->off;
		len = me->len;
	}
	switch (rng_below(&me->rng, 8)) {
	case 0:
		CHECK_EQ(co_disk_zero(d, off, len, 0), 0);
		memset(me->w->model + off, 0, len);
		break;
	case 1:
		CHECK_EQ(co_disk_discard(d, off, len, 0), 0);
		memset(me->w->model + off, 0, len);
		break;
	default:
		rng_fill(&me->rng, me->w->model + off, len);
		memcpy(buf, me->w->model + off, len);
		CHECK_EQ(co_disk_write(d, off, buf, len, 0), 0);
	}
	CHECK_EQ(co_disk_read(d, me->off, buf, me->len, 0), 0);
	for (uint64_t i = 0; i < me->own; i++)
		if (buf[i] != me->w->model[me->off + i])
			test_fail("align %u, seed %" PRIu64 ": byte %" PRIu64 " of the writer of %" PRIu64 "+%" PRIu64 " was lost",
				  me->w->align, me->w->seed, me->off + i, me->off, me->len);
}

static co_fn int co_write_for_a_while(void *arg)
{
	struct writer *me = arg;
	uint8_t *buf = malloc(me->len);

	for (unsigned i = 0; i < STEPS; i++)
		co_step(me, buf);
	free(buf);
	return 0;
}

static co_fn void co_add_writer(struct world *w, struct writer *me, struct co_group *g, uint64_t off, uint64_t len, uint64_t own)
{
	*me = (struct writer){ .w = w, .off = off, .len = len, .own = own };
	rng_seed(&me->rng, w->seed * 100000 + off);
	co_group_start(g, "writer", co_write_for_a_while, me);
}

static co_fn void co_run_world(void *arg)
{
	struct world *w = arg;
	struct writer writers[2 * WRITERS];
	unsigned n = 0;
	static uint8_t got[SIZE];
	struct co_group g;
	struct rng rng;
	uint64_t at = 0;
	unsigned count;

	rng_seed(&rng, w->seed);
	/* A few alone leave times when nothing is read, modified and written. */
	count = w->seed % 2 ? WRITERS : 1 + rng_below(&rng, 3);
	w->slow = open_slow(w->align, w->seed);
	co_group_init(&g);
	for (unsigned i = 0; i < count; i++) {
		uint64_t left = SIZE - at, len = 1 + rng_below(&rng, rng_below(&rng, 3) ? w->align : 4 * w->align);

		/* Some ranges are whole units, some end with the disk. */
		if (rng_below(&rng, 4) == 0)
			at = align_up(at, w->align), len = align_up(len, w->align);
		if (i == WRITERS - 1 && left > 10)
			at = SIZE - 1 - rng_below(&rng, min(left - 1, 3ull * w->align)), len = SIZE - at;
		if (at + len > SIZE)
			break;
		co_add_writer(w, &writers[n++], &g, at, len, len);
		if (is_aligned(at | len, w->align) && rng_below(&rng, 3)) {
			uint64_t part = 1 + rng_below(&rng, w->align - 1);

			writers[n - 1].own -= part;
			memset(w->contested + at + len - part, 1, part);
			co_add_writer(w, &writers[n++], &g, at + len - part, part, 0);
		}
		at += len;
	}
	CHECK_EQ(co_group_wait(&g), 0);
	CHECK_EQ(co_disk_read(w->slow, 0, got, SIZE, 0), 0);
	for (uint64_t i = 0; i < SIZE; i++)
		CHECK(got[i] == w->model[i] || w->contested[i]);
	CHECK_EQ(w->slow->rmw_active, 0);
	CHECK(list_empty(&w->slow->writes));
	co_disk_close(w->slow);
}

int main(void)
{
	static const uint32_t aligns[] = { 512, 4096, 4096, 16384 };
	uint64_t seed = test_seed();

	for (uint64_t i = 0; i < test_scale(160); i++) {
		struct world *w = calloc(1, sizeof(*w));
		struct rt *rt = make_sim(seed + i);
		struct rt_bufpool *bufs = NULL;

		w->align = aligns[i % ARRAY_SIZE(aligns)];
		w->seed = seed + i;
		if (i % 3) {
			CHECK_EQ(rt_bufpool_create(rt, RT_BUF_MAX, &bufs, NULL), 0);
			rt_set_bufs(rt, bufs);
		}
		CHECK_EQ(rt_run(rt, co_run_world, w), 0);
		rt_bufpool_destroy(bufs);
		rt_destroy(rt);
		free(w);
	}
	return 0;
}
