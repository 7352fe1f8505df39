/* SPDX-License-Identifier: MIT */
/*
 * Clones over one base: nothing stale is read, nothing of one clone is seen in another, and the cache's memory is accounted to the byte.
 *
 * Three qcow2 images lie over one raw base, which is opened once, with a layer of the cache over each image, over the tables of each, and over the base. Workers read, write, zero
 * and discard at random ranges that no other worker of the same clone has at the moment, so that each byte that is read is known; blocks and clusters they share. Meanwhile
 * modes, limits and the size of the cache change, the base's mode too.
 */
#include "blk/share.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "format/qcow2/where.h"
#include "prop/cache_accounts.h"
#include "rt/buf.h"
#include "unit/test_rt.h"
#include "util/iov.h"
#include "util/rng.h"

#define SECTOR 512u
#define SIZE (256u << 10)
#define BOX (4u << 20)
#define CLONES 3
#define WORKERS 3

struct world;

struct clone {
	struct world *w;
	struct disk *top, *image, *tables;
	uint8_t model[SIZE];
	struct range {
		uint64_t first, end;
	} busy[WORKERS];
};

struct world {
	struct rng rng;
	struct cache *c;
	struct disk *base_layer;
	struct disk_shared base;
	struct clone clone[CLONES];
	uint64_t seed, reads, shared, only;
	bool roomy;		/* all fits */
	unsigned running;
};

/* --- Where images lie: memory that takes its time --- */

struct box {
	struct disk disk;
	struct world *w;
	uint8_t *data;
};

static co_fn void co_dawdle(struct box *b)
{
	if (rng_below(&b->w->rng, 3) == 0)
		co_sleep_ns(1 + rng_below(&b->w->rng, 20000));
}

static co_fn int box_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct box *b = container_of(d, struct box, disk);

	co_dawdle(b);
	iov_copy_in(iov, niov, 0, b->data + off, len);
	co_dawdle(b);
	return 0;
}

static co_fn int box_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct box *b = container_of(d, struct box, disk);

	co_dawdle(b);
	iov_copy_out(iov, niov, 0, b->data + off, len);
	co_dawdle(b);
	return 0;
}

static co_fn int box_co_flush(struct disk *d)
{
	return 0;
}

static co_fn int box_co_resize(struct disk *d, uint64_t size)
{
	return size <= BOX ? 0 : -ENOSPC;
}

static co_fn void box_co_close(struct disk *d)
{
	free(container_of(d, struct box, disk)->data);
	disk_fini(d);
	free(d);
}

static const struct disk_ops box_ops = {
	.driver = "box", .co_read = box_co_read, .co_write = box_co_write, .co_flush = box_co_flush, .co_resize = box_co_resize, .co_close = box_co_close,
};

static struct box *open_box(struct world *w, uint64_t size)
{
	struct box *b = calloc(1, sizeof(*b));

	CHECK_EQ(disk_init(&b->disk, &box_ops, "box", NULL), 0);
	b->w = w;
	b->data = calloc(1, BOX);
	b->disk.size = size;
	return b;
}

/* --- Making the graph --- */

static co_fn void co_make_base(struct world *w)
{
	uint64_t size = SIZE - rng_below(&w->rng, 3) * 65536 - rng_below(&w->rng, 2) * 1536;
	struct box *b = open_box(w, size);
	struct err err = ERR_INIT;

	for (uint64_t i = 0; i < size; i += SECTOR)
		memset(b->data + i, rng_below(&w->rng, 4) || i % 65536 < 8192 ? (int)rng_below(&w->rng, 256) : 0, SECTOR);
	for (unsigned i = 0; i < CLONES; i++)
		memcpy(w->clone[i].model, b->data, size);
	b->disk.read_only = true;
	CHECK_EQ(co_cache_attach_shared(w->c, "base", &b->disk, &w->base_layer, &err), 0);
	w->base.disk = w->base_layer;
	co_cache_set_mode(w->base_layer, CACHE_ALL);
}

static co_fn void co_make_clone(struct world *w, struct clone *c, const char *name)
{
	static const uint64_t sizes[] = { 4096, 16384, 65536, 512 };
	struct qcow2_create how = { .size = SIZE, .cluster_size = sizes[rng_below(&w->rng, 4)], .refcount_bits = 16, .version = 3,
				    .backing_file = "base", .backing_format = "raw" };
	struct qcow2_opts o = { .fill_debt = rng_below(&w->rng, 2) ? 0 : 65536, .run_ahead = 65536, .table_cache = 1 };
	struct box *b = open_box(w, 65536);
	struct err err = ERR_INIT;
	struct disk *d;

	how.ext_l2 = how.cluster_size >= 16384 && rng_below(&w->rng, 2);
	if (qcow2_create_check(&how, name, &err) || co_qcow2_create(&b->disk, NULL, &how, &err))
		test_fail("%s", err.msg);
	CHECK_EQ(co_cache_attach_tables(w->c, name, &b->disk, CACHE_ALL, &c->tables, &err), 0);
	CHECK_EQ(disk_share(&w->base, &o.backing), 0);
	if (co_qcow2_open(c->tables, name, &o, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	c->image = d;
	CHECK_EQ(co_cache_attach(w->c, name, d, CACHE_ALL, &c->top, &err), 0);
	c->w = w;
}

/* --- Workers --- */

struct worker {
	struct clone *c;
	unsigned me, steps;
	struct rng rng;
};

/* A range that nobody else of the clone has. False if there is none just now. */
static bool take_range(struct worker *w, struct range *r)
{
	uint64_t n = 1 + rng_below(&w->rng, rng_below(&w->rng, 8) ? 40 : SIZE / SECTOR);

	r->first = rng_below(&w->rng, SIZE / SECTOR - n + 1) * SECTOR;
	r->end = r->first + n * SECTOR;
	for (unsigned i = 0; i < WORKERS; i++)
		if (i != w->me && w->c->busy[i].first < r->end && r->first < w->c->busy[i].end)
			return false;
	w->c->busy[w->me] = *r;
	return true;
}

static co_fn void co_check(struct clone *c, unsigned me, uint64_t first, uint64_t end, unsigned flags)
{
	static uint8_t bufs[CLONES][WORKERS][SIZE];
	uint8_t *buf = bufs[c - c->w->clone][me];
	uint64_t len = end - first, cut = len / 3;
	struct iovec iov[2] = { { buf, cut }, { buf + cut, len - cut } };

	memset(buf, 0xdd, len);
	CHECK_EQ(co_disk_readv(c->top, first, iov, 2, flags), 0);
	for (uint64_t i = 0; i < len; i++)
		if (buf[i] != c->model[first + i])
			test_fail("seed %" PRIu64 ": clone %d, byte %" PRIu64 " is %02x, wanted %02x", c->w->seed, (int)(c - c->w->clone), first + i, buf[i],
				  c->model[first + i]);
	c->w->reads++;
}

/* What is discarded may read as zeroes or as before. */
static co_fn void co_take_discarded(struct clone *c, uint64_t first, uint64_t end)
{
	uint8_t *buf = malloc(end - first);

	CHECK_EQ(co_disk_read(c->top, first, buf, end - first, 0), 0);
	for (uint64_t i = 0; i < end - first; i++) {
		CHECK(buf[i] == 0 || buf[i] == c->model[first + i]);
		c->model[first + i] = buf[i];
	}
	free(buf);
}

static co_fn void co_change(struct worker *w, uint64_t first, uint64_t end)
{
	struct clone *c = w->c;
	unsigned kind = rng_below(&w->rng, 10);

	if (kind == 0) {
		CHECK_EQ(co_disk_discard(c->top, first, end - first, 0), 0);
		co_take_discarded(c, first, end);
		return;
	}
	if (kind == 1) {
		CHECK_EQ(co_disk_zero(c->top, first, end - first, rng_below(&w->rng, 2) ? DISK_UNMAP : 0), 0);
		memset(c->model + first, 0, end - first);
		return;
	}
	for (uint64_t at = first; at < end; at += SECTOR)
		memset(c->model + at, (int)rng_below(&w->rng, 256), SECTOR);
	CHECK_EQ(co_disk_write(c->top, first, c->model + first, end - first, 0), 0);
}

static co_fn int co_work(void *arg)
{
	struct worker *w = arg;

	for (unsigned i = 0; i < w->steps; i++) {
		struct range r;

		if (!take_range(w, &r)) {
			co_sleep_ns(1 + rng_below(&w->rng, 20000));
			continue;
		}
		if (rng_below(&w->rng, 10) < 7)
			co_check(w->c, w->me, r.first, r.end, rng_below(&w->rng, 8) ? 0 : DISK_BACKGROUND);
		else
			co_change(w, r.first, r.end);
		w->c->busy[w->me] = (struct range){ 0, 0 };
		check_accounts(w->c->w->c);
	}
	w->c->w->running--;
	return 0;
}

static co_fn int co_meddle(void *arg)
{
	struct world *w = arg;

	while (w->running) {
		struct clone *c = &w->clone[rng_below(&w->rng, CLONES)];
		struct err err = ERR_INIT;
		uint64_t least = cache_least(w->c);

		switch (rng_below(&w->rng, 6)) {
		case 0:
			co_cache_resize(w->c, least + rng_below(&w->rng, w->c->config.size - least + 1), &err);
			break;
		case 1:
			co_cache_set_limits(c->top, 0, rng_below(&w->rng, 2) * (3 + rng_below(&w->rng, 20)) * CACHE_BLOCK, &err);
			break;
		case 2:
			co_cache_set_mode(w->base_layer, rng_below(&w->rng, 3) ? CACHE_ALL : CACHE_NONE);
			break;
		case 3:
			co_cache_set_mode(c->top, rng_below(&w->rng, 2) ? CACHE_ALL : rng_below(&w->rng, 3));
			break;
		case 4:
			co_cache_set_mode(c->tables, rng_below(&w->rng, 3));
		}
		check_accounts(w->c);
		co_sleep_ns(1 + rng_below(&w->rng, 300000));
	}
	return 0;
}

static co_fn void co_phase(struct world *w, unsigned steps)
{
	struct worker workers[CLONES * WORKERS];
	struct co_group g;

	co_group_init(&g);
	w->running = CLONES * WORKERS;
	for (unsigned i = 0; i < CLONES * WORKERS; i++) {
		workers[i] = (struct worker){ .c = &w->clone[i / WORKERS], .me = i % WORKERS, .steps = steps };
		rng_seed(&workers[i].rng, rng_u64(&w->rng));
		co_group_start(&g, "worker", co_work, &workers[i]);
	}
	co_group_start(&g, "meddler", co_meddle, w);
	CHECK_EQ(co_group_wait(&g), 0);
}

/* A block of the base that nobody has changed is in memory once, and only where all read it from. */
static co_fn void co_check_once(struct world *w)
{
	struct err err = ERR_INIT;
	unsigned only = 0;

	if (!w->roomy)
		return;
	CHECK_EQ(co_cache_resize(w->c, w->c->config.size, &err), 0);
	/* What was kept above while the base's layer was not in use goes. */
	for (unsigned i = 0; i < CLONES; i++) {
		uint64_t stamp, now;

		/* Ends what is copied in the background: co_qcow2_where() does not see it. */
		(void)co_disk_stamp(w->clone[i].image, &stamp, &now);
		co_cache_set_mode(w->clone[i].top, CACHE_NONE);
		co_cache_set_mode(w->clone[i].top, CACHE_ALL);
		CHECK_EQ(co_cache_set_limits(w->clone[i].top, 0, 0, &err), 0);
	}
	co_cache_set_mode(w->base_layer, CACHE_ALL);
	for (unsigned i = 0; i < CLONES; i++)
		co_check(&w->clone[i], 0, 0, SIZE, 0);
	for (uint64_t b = 0; b < SIZE / CACHE_BLOCK; b++) {
		uint32_t r = record_find(w->c, cache_key(volume_of(w->base_layer), b));

		for (unsigned i = 0; i < CLONES && r != REC_NONE; i++) {
			uint32_t mine = record_find(w->c, cache_key(volume_of(w->clone[i].top), b));

			struct qcow2_where at;

			CHECK_EQ(co_qcow2_where(w->clone[i].image, b * CACHE_BLOCK, CACHE_BLOCK, &at), 0);
			if (at.depth == 0 || at.len < CACHE_BLOCK || (b + 1) * CACHE_BLOCK > w->base.disk->size)
				continue;
			CHECK_EQ(mine, REC_NONE);
			only++;
		}
	}
	w->only += only;
}

static co_fn void co_world(void *arg)
{
	struct world *w = arg;
	struct cache_config o = { .chunk = 16384, .s3fifo = w->seed % 3 == 0, .curve_samples = 16, .metadata_floor_pct = 10 };
	struct err err = ERR_INIT;

	w->roomy = w->seed % 4 == 1;
	o.size = w->roomy ? 3000000 : 420000 + rng_below(&w->rng, 300000);
	if (cache_create(&o, &w->c, &err) < 0)
		test_fail("%s", err.msg);
	co_make_base(w);
	for (unsigned i = 0; i < CLONES; i++) {
		char name[8];

		snprintf(name, sizeof(name), "c%u", i);
		co_make_clone(w, &w->clone[i], name);
	}
	co_check_once(w);
	for (unsigned phase = 0; phase < 3; phase++) {
		co_phase(w, 60);
		for (unsigned i = 0; i < CLONES; i++)
			co_check(&w->clone[i], 0, 0, SIZE, 0);
		co_check_once(w);
		check_accounts(w->c);
	}
	for (unsigned i = 0; i < CLONES; i++) {
		w->shared += volume_of(w->clone[i].top)->count[CACHE_DATA].shared;
		co_disk_close(w->clone[i].top);
	}
	CHECK_EQ(w->base.users, 0);
	CHECK_EQ(w->c->mem.used, 0);
	cache_destroy(w->c);
}

int main(void)
{
	uint64_t seed = test_seed(), reads = 0, shared = 0, only = 0;

	for (uint64_t i = 0; i < test_scale(16); i++) {
		struct world *w = calloc(1, sizeof(*w));
		struct rt_bufpool *bufs;
		struct rt *rt = make_sim(seed + i);
		struct err err = ERR_INIT;

		w->seed = seed + i;
		rng_seed(&w->rng, w->seed);
		CHECK_EQ(rt_bufpool_create(rt, 32u << 20, &bufs, &err), 0);
		rt_set_bufs(rt, bufs);
		CHECK_EQ(rt_run(rt, co_world, w), 0);
		rt_bufpool_destroy(bufs);
		rt_destroy(rt);
		reads += w->reads;
		shared += w->shared;
		only += w->only;
		free(w);
	}
	printf("%" PRIu64 " reads, %" PRIu64 " blocks were in memory for another clone\n", reads, shared);
	CHECK(shared > reads / 10 && only);
	return 0;
}
