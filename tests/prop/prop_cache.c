/* SPDX-License-Identifier: MIT */
/*
 * Nothing stale is ever read through the cache, and its memory is accounted to the byte.
 *
 * Several volumes share a small cache. Workers read, write, zero, discard and prefetch at random, overlapping each other, on images that take a random
 * time for each op and fail some; meanwhile somebody changes what is cached, limits, shares and the size of the cache, and between the phases the sizes
 * of the volumes.
 *
 * The model knows for each cell of 64 bytes which versions a read may see: those whose writing had not been overwritten by something that began after its end
 * and had ended when the read began. And where no write was in flight, what one read saw all later ones must see.
 */
#include "prop/cache_accounts.h"
#include "rt/buf.h"
#include "unit/test_rt.h"
#include "util/iov.h"
#include "util/rng.h"

#define CELL 64u
#define CELLS 8192u	/* of a volume, at most */
#define VOLUMES 3
#define WORKERS 5
#define STEPS 42u	/* of a worker, in a phase */
#define VERSIONS 24
#define LIVE UINT64_MAX

struct version {
	uint64_t value, start, end;	/* end LIVE: in flight */
	uint64_t gone;			/* when it was overwritten for sure; LIVE: it was not */
};

struct cell {
	struct version v[VERSIONS];
	unsigned n;
	uint64_t changed;	/* when a write of it last began or ended */
};

struct world;

struct vol {
	struct world *w;
	struct disk *top, *image;
	struct cell cell[CELLS];
	uint64_t cells;
	uint64_t active[WORKERS];	/* when the worker's read began; LIVE: none */
};

struct world {
	struct rng rng;
	struct cache *c;
	struct vol vol[VOLUMES];
	uint64_t clock, next_value;
	unsigned error_permille;
	bool stop;
	unsigned running, steps_left;
	uint64_t seed, reads, hits_before;
};

/* --- The image: takes its time, has its effect at one instant, and fails some --- */

struct shaky {
	struct disk disk;
	struct world *w;
	uint8_t *data;
};

static co_fn void co_dawdle(struct world *w)
{
	if (rng_below(&w->rng, 3))
		co_sleep_ns(1 + rng_below(&w->rng, 30000));
}

static bool fails(struct world *w)
{
	return rng_below(&w->rng, 1000) < w->error_permille;
}

static co_fn int shaky_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct shaky *s = container_of(d, struct shaky, disk);
	bool fail = fails(s->w);

	co_dawdle(s->w);
	iov_copy_in(iov, niov, 0, s->data + off, len);
	if (fail)
		iov_set(iov, niov, 0, 0xee, len);
	co_dawdle(s->w);
	return fail ? -EIO : 0;
}

/* Changes the sectors, all or, if it fails, some of them. */
static co_fn int co_effect(struct shaky *s, uint64_t off, uint64_t len, const struct iovec *iov, int niov)
{
	bool fail = fails(s->w);

	co_dawdle(s->w);
	for (uint64_t at = 0; at < len; at += 512) {
		if (fail && rng_below(&s->w->rng, 2))
			continue;
		if (iov)
			iov_copy_out(iov, niov, at, s->data + off + at, 512);
		else
			memset(s->data + off + at, 0, 512);
	}
	co_dawdle(s->w);
	return fail ? -EIO : 0;
}

static co_fn int shaky_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	return co_effect(container_of(d, struct shaky, disk), off, len, iov, niov);
}

static co_fn int shaky_co_clear(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_effect(container_of(d, struct shaky, disk), off, len, NULL, 0);
}

static co_fn int shaky_co_resize(struct disk *d, uint64_t size)
{
	struct shaky *s = container_of(d, struct shaky, disk);

	/* What comes into being reads as zeroes. */
	memset(s->data + min(size, d->size), 0, CELLS * CELL + 4096 - min(size, d->size));
	return 0;
}

static co_fn void shaky_co_close(struct disk *d)
{
	free(container_of(d, struct shaky, disk)->data);
	disk_fini(d);
	free(d);
}

static const struct disk_ops shaky_ops = {
	.driver = "shaky",
	.co_read = shaky_co_read,
	.co_write = shaky_co_write,
	.co_discard = shaky_co_clear,
	.co_zero = shaky_co_clear,
	.co_resize = shaky_co_resize,
	.co_close = shaky_co_close,
};

static struct disk *open_shaky(struct world *w, uint64_t size)
{
	struct shaky *s = calloc(1, sizeof(*s));

	CHECK_EQ(disk_init(&s->disk, &shaky_ops, "shaky", NULL), 0);
	s->w = w;
	s->data = calloc(1, CELLS * CELL + 4096);
	s->disk.size = size;
	s->disk.limits.align = s->disk.limits.mem_align = 512;
	s->disk.limits.discard_gran = 512;
	s->disk.limits.discard_zeroes = true;
	s->disk.limits.max_io = rng_below(&w->rng, 2) ? 0 : 8192;
	return &s->disk;
}

/* --- The model --- */

static void forget_old(struct vol *vol, struct cell *c)
{
	uint64_t oldest = vol->w->clock;
	unsigned n = 0;

	for (unsigned i = 0; i < WORKERS; i++)
		oldest = min(oldest, vol->active[i]);
	for (unsigned i = 0; i < c->n; i++)
		if (c->v[i].gone >= oldest)
			c->v[n++] = c->v[i];
	c->n = n;
}

static uint64_t begin_change(struct vol *vol, uint64_t first, uint64_t n, uint64_t value)
{
	uint64_t now = ++vol->w->clock;

	for (uint64_t i = first; i < first + n; i++) {
		struct cell *c = &vol->cell[i];

		if (c->n == VERSIONS)
			forget_old(vol, c);
		CHECK(c->n < VERSIONS);
		c->v[c->n++] = (struct version){ value, now, LIVE, LIVE };
		c->changed = now;
	}
	return now;
}

static void end_change(struct vol *vol, uint64_t first, uint64_t n, uint64_t start, bool ok)
{
	uint64_t now = ++vol->w->clock;

	for (uint64_t i = first; i < first + n; i++) {
		struct cell *c = &vol->cell[i];
		struct version *mine = NULL;

		for (unsigned k = c->n; k-- > 0 && !mine;)
			if (c->v[k].start == start)
				mine = &c->v[k];
		CHECK(mine);
		mine->end = now;
		c->changed = now;
		for (unsigned k = 0; ok && k < c->n; k++)
			if (c->v[k].end < mine->start && c->v[k].gone == LIVE)
				c->v[k].gone = now;
	}
}

static bool in_flight(const struct cell *c)
{
	for (unsigned i = 0; i < c->n; i++)
		if (c->v[i].end == LIVE)
			return true;
	return false;
}

static void check_cell(struct vol *vol, uint64_t i, const uint8_t *data, uint64_t began)
{
	struct cell *c = &vol->cell[i];
	uint64_t value, word;

	memcpy(&value, data, 8);
	for (unsigned k = 8; k < CELL; k += 8) {
		memcpy(&word, data + k, 8);
		if (word != value)
			test_fail("seed %" PRIu64 ": cell %" PRIu64 " is torn", vol->w->seed, i);
	}
	for (unsigned k = 0; k < c->n; k++) {
		if (c->v[k].value != value || c->v[k].gone < began)
			continue;
		/* Nobody was writing: this is the one from now on. */
		for (unsigned j = 0; j < c->n && c->changed < began && !in_flight(c); j++)
			if (c->v[j].value != value && c->v[j].gone == LIVE)
				c->v[j].gone = vol->w->clock;
		return;
	}
	test_fail("seed %" PRIu64 ": volume %d, cell %" PRIu64 " (block %" PRIu64 ") has version %" PRIu64 ", which is stale",
		  vol->w->seed, (int)(vol - vol->w->vol), i, i * CELL / CACHE_BLOCK, value);
}

/* --- Workers --- */

static co_fn void co_read_and_check(struct vol *vol, unsigned me, struct rng *r, uint64_t first, uint64_t n)
{
	static uint8_t bufs[VOLUMES][WORKERS][CELLS * CELL + 4096];
	uint8_t *buf = bufs[vol - vol->w->vol][me];
	uint64_t off = first * CELL, len = n * CELL;
	struct iovec iov[3];
	int ret;

	memset(buf, 0xdd, len);
	iov[0] = (struct iovec){ buf, len / 3 };
	iov[1] = (struct iovec){ buf + len / 3, len / 5 };
	iov[2] = (struct iovec){ buf + len / 3 + len / 5, len - len / 3 - len / 5 };
	vol->active[me] = ++vol->w->clock;
	ret = co_disk_readv(vol->top, off, iov, 3, rng_below(r, 4) ? 0 : rng_below(r, 2) ? DISK_METADATA : DISK_BACKGROUND);
	for (uint64_t i = 0; i < n && !ret; i++)
		check_cell(vol, first + i, buf + i * CELL, vol->active[me]);
	CHECK(!ret || ret == -EIO);
	vol->active[me] = LIVE;
	vol->w->reads++;
}

/* Somewhere, and there once more. */
static co_fn void co_read_twice(struct vol *vol, unsigned me, struct rng *r)
{
	uint64_t n = min(1 + rng_below(r, rng_below(r, 6) ? 80 : vol->cells), vol->cells), first = rng_below(r, vol->cells - n + 1);

	for (unsigned i = 0; i < 2; i++)
		co_read_and_check(vol, me, r, first, n);
}

static co_fn void co_change(struct vol *vol, unsigned me, struct rng *r)
{
	uint64_t n = min(1 + rng_below(r, rng_below(r, 8) ? 100 : vol->cells), vol->cells), first = rng_below(r, vol->cells - n + 1);
	unsigned kind = rng_below(r, 10);
	uint64_t value = kind < 2 ? 0 : ++vol->w->next_value, start;
	uint64_t *data = malloc(n * CELL);
	int ret;

	for (uint64_t i = 0; i < n * CELL / 8; i++)
		data[i] = value;
	start = begin_change(vol, first, n, value);
	if (kind == 0)
		ret = co_disk_zero(vol->top, first * CELL, n * CELL, 0);
	else if (kind == 1)
		ret = co_disk_discard(vol->top, first * CELL, n * CELL, 0);
	else
		ret = co_disk_write(vol->top, first * CELL, data, n * CELL, 0);
	CHECK(!ret || ret == -EIO);
	end_change(vol, first, n, start, !ret);
	free(data);
}

struct worker {
	struct vol *vol;
	unsigned me;
	struct rng rng;
};

static co_fn int co_work(void *arg)
{
	struct worker *me = arg;
	struct vol *vol = me->vol;

	for (unsigned i = 0; i < STEPS; i++) {
		unsigned what = rng_below(&me->rng, 14);

		if (what < 6)
			co_read_twice(vol, me->me, &me->rng);
		else if (what < 12)
			co_change(vol, me->me, &me->rng);
		else if (what < 13)
			co_disk_prefetch(vol->top, 0, rng_below(&me->rng, vol->cells * CELL) + 1);
		else
			co_sleep_ns(1 + rng_below(&me->rng, 50000));
		check_accounts(vol->w->c);
		vol->w->steps_left--;
	}
	vol->w->running--;
	return 0;
}

/* All is cached, by a cache of its full size. */
static co_fn void co_begin_warm(struct world *w)
{
	struct err err = ERR_INIT;

	CHECK_EQ(co_cache_resize(w->c, w->c->config.size, &err), 0);
	for (unsigned i = 0; i < VOLUMES; i++) {
		CHECK_EQ(co_cache_set_limits(w->vol[i].top, 0, 0, &err), 0);
		co_cache_set_mode(w->vol[i].top, CACHE_ALL);
	}
}

static co_fn int co_meddle(void *arg)
{
	struct world *w = arg;
	uint64_t least = w->c->fixed + w->c->curves + w->c->config.chunk;

	/* Not before a third is done: so each world has hits, however it goes on. */
	while (w->steps_left > STEPS * VOLUMES * WORKERS * 2 / 3)
		co_sleep_ns(10000);
	while (w->running) {
		struct vol *vol = &w->vol[rng_below(&w->rng, VOLUMES)];
		struct err err = ERR_INIT;

		switch (rng_below(&w->rng, 4)) {
		case 0:
			co_cache_resize(w->c, least + rng_below(&w->rng, w->c->config.size - least + 1), &err);
			CHECK(cache_memory(w->c) <= w->c->budget || w->c->shrink_lock.owner);
			break;
		case 1:
			co_cache_set_limits(vol->top, rng_below(&w->rng, 3) * CACHE_BLOCK, rng_below(&w->rng, 2) * (3 + rng_below(&w->rng, 9)) * CACHE_BLOCK, &err);
			break;
		default:
			co_cache_set_mode(vol->top, rng_below(&w->rng, 3));
		}
		check_accounts(w->c);
		co_sleep_ns(1 + rng_below(&w->rng, 400000));
	}
	return 0;
}

static co_fn void co_phase(struct world *w)
{
	struct worker workers[VOLUMES * WORKERS];
	struct co_group g;

	co_begin_warm(w);
	co_group_init(&g);
	w->running = VOLUMES * WORKERS;
	w->steps_left = STEPS * VOLUMES * WORKERS;
	for (unsigned i = 0; i < VOLUMES * WORKERS; i++) {
		struct worker *me = &workers[i];

		*me = (struct worker){ .vol = &w->vol[i / WORKERS], .me = i % WORKERS };
		rng_seed(&me->rng, rng_u64(&w->rng));
		co_group_start(&g, "worker", co_work, me);
	}
	co_group_start(&g, "meddler", co_meddle, w);
	CHECK_EQ(co_group_wait(&g), 0);
}

static co_fn void co_resize_volume(struct vol *vol, uint64_t cells)
{
	CHECK_EQ(co_disk_resize(vol->top, cells * CELL, NULL), 0);
	for (uint64_t i = min(cells, vol->cells); i < CELLS; i++) {
		vol->cell[i].v[0] = (struct version){ 0, 0, 0, LIVE };
		vol->cell[i].n = 1;
	}
	vol->cells = cells;
}

/* What the cache says, twice, and what the image says must be one. */
static co_fn void co_compare(struct vol *vol)
{
	uint8_t *a = malloc(vol->cells * CELL), *b = malloc(vol->cells * CELL);
	struct shaky *s = container_of(vol->image, struct shaky, disk);

	vol->w->error_permille = 0;
	for (unsigned round = 0; round < 2; round++) {
		vol->active[0] = ++vol->w->clock;
		CHECK_EQ(co_disk_read(vol->top, 0, a, vol->cells * CELL, 0), 0);
		CHECK(!memcmp(a, s->data, vol->cells * CELL));
		for (uint64_t i = 0; i < vol->cells; i++)
			check_cell(vol, i, a + i * CELL, vol->active[0]);
	}
	vol->active[0] = LIVE;
	free(a);
	free(b);
}

static co_fn void co_world(void *arg)
{
	struct world *w = arg;
	struct cache_config o = { .chunk = 16384, .s3fifo = w->seed % 3 == 0, .curve_samples = 16, .metadata_floor_pct = 10 };
	struct err err = ERR_INIT;

	/* The index with its fills is most of it: 40 to 76 blocks of data, until somebody makes it smaller. */
	o.size = 550000 + rng_below(&w->rng, 150000);
	if (cache_create(&o, &w->c, &err) < 0)
		test_fail("%s", err.msg);
	for (unsigned i = 0; i < VOLUMES; i++) {
		struct vol *vol = &w->vol[i];
		char name[8];

		snprintf(name, sizeof(name), "v%u", i);
		vol->w = w;
		vol->cells = CELLS / 2 + rng_below(&w->rng, CELLS / 2);
		vol->image = open_shaky(w, vol->cells * CELL);
		for (unsigned k = 0; k < CELLS; k++) {
			vol->cell[k].v[0] = (struct version){ 0, 0, 0, LIVE };
			vol->cell[k].n = 1;
		}
		for (unsigned k = 0; k < WORKERS; k++)
			vol->active[k] = LIVE;
		CHECK_EQ(co_cache_attach(w->c, name, vol->image, CACHE_ALL, &vol->top, &err), 0);
	}
	for (unsigned phase = 0; phase < 4; phase++) {
		w->error_permille = phase % 2 ? 30 : 0;
		co_phase(w);
		for (unsigned i = 0; i < VOLUMES; i++) {
			struct vol *vol = &w->vol[i];

			/* What was on its way when the mode changed has ended, or will not stay. */
			for (unsigned k = 0; k < CACHE_CLASSES; k++)
				CHECK(cache_allows(volume_of(vol->top), k) || !volume_of(vol->top)->records[k]);
			w->error_permille = 0;
			for (unsigned k = rng_below(&w->rng, 3); k > 0; k--)
				co_resize_volume(vol, vol->cells - rng_below(&w->rng, 100) * (vol->cells > CELLS / 2 + 100));
			co_resize_volume(vol, CELLS / 2 + rng_below(&w->rng, CELLS / 2));
			co_compare(vol);
		}
		check_accounts(w->c);
	}
	for (unsigned i = 0; i < VOLUMES; i++) {
		w->hits_before += volume_of(w->vol[i].top)->count[0].hits;
		co_cache_set_mode(w->vol[i].top, CACHE_NONE);
		CHECK_EQ(volume_of(w->vol[i].top)->slots, volume_of(w->vol[i].top)->fills ? volume_of(w->vol[i].top)->slots : 0);
	}
	for (unsigned i = 0; i < VOLUMES; i++)
		co_disk_close(w->vol[i].top);
	CHECK_EQ(w->c->mem.used, 0);
	CHECK_EQ(w->c->curves, 0);
	cache_destroy(w->c);
}

int main(void)
{
	uint64_t seed = test_seed(), reads = 0, hits = 0;

	for (uint64_t i = 0; i < test_scale(16); i++) {
		struct world *w = calloc(1, sizeof(*w));
		struct rt *rt = make_sim(seed + i);

		w->seed = seed + i;
		rng_seed(&w->rng, w->seed);
		CHECK_EQ(rt_run(rt, co_world, w), 0);
		rt_destroy(rt);
		reads += w->reads;
		hits += w->hits_before;
		free(w);
	}
	printf("%" PRIu64 " reads, %" PRIu64 " blocks hit\n", reads, hits);
	/* It is a cache that is tested. Of 512 worlds the coldest has twice as many, and half of them seven times. */
	CHECK(hits > reads / 10);
	return 0;
}
