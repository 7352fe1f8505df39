/* SPDX-License-Identifier: MIT */
/*
 * Nothing stale comes from the second level of the cache, whatever happened in between.
 *
 * Rounds of work on images and a cache device that share one power supply. A round ends with a clean stop, a killed process, or a power cut at any write; in
 * between other programs change an image, bits of the cache device flip, or it is put back to what it was at some moment of the round; so are images, times
 * and all, as by a snapshot of their file system. At the begin of
 * each round, while the index is being rebuilt and afterwards, what the cache says must be what the image holds. During the round each worker has blocks of its
 * own, so that it knows what it must read. The device fails in some rounds; that must not be noticed. In half of the worlds a write log lies over the cache: then
 * images change by destage and recovery, and carry marks.
 */
#include <errno.h>

#include "backend/fault.h"
#include "cache/internal.h"
#include "rt/buf.h"
#include "unit/test_rt.h"
#include "util/rng.h"
#include "wlog/wlog.h"

#define BLOCK CACHE_BLOCK
#define VOLUMES 2u
#define WORKERS 3u
#define SPAN 24u			/* blocks of a worker */
#define BLOCKS (WORKERS * SPAN)
#define SEGMENT (64u << 10)

enum end { END_CLEAN, END_KILL, END_CUT, ENDS };

struct world {
	struct rng rng;
	struct powercut *power;
	struct powercut_dev *image[VOLUMES], *dev;
	struct cache *c;
	struct disk *layer[VOLUMES], *top[VOLUMES];	/* the cache's, and what is worked on */
	struct powercut_dev *log_dev;	/* NULL: without a log */
	struct wlog *log;
	uint8_t model[VOLUMES][BLOCKS][BLOCK];
	unsigned running, rounds;
	uint64_t seed;
	struct media *old;		/* of the cache device */
	struct powercut_snapshot *snap[VOLUMES]; /* of the images' file systems */
	bool faulty;
	uint64_t hits, kept, hits_at_start, touches, cuts, checksum_errors, hung, rollbacks;
};

static bool is_off(const struct world *w)
{
	return powercut_is_off(w->power);
}

/* --- A round's work --- */

struct worker {
	struct world *w;
	unsigned vol, me;
	struct rng rng;
	uint8_t buf[SPAN * BLOCK];
};

static co_fn void co_check_range(struct world *w, unsigned vol, uint64_t first, uint64_t n, uint8_t *buf, const char *when)
{
	if (co_disk_read(w->top[vol], first * BLOCK, buf, n * BLOCK, 0)) {
		CHECK(is_off(w));
		return;
	}
	for (uint64_t i = 0; i < n && !is_off(w); i++)
		if (memcmp(buf + i * BLOCK, w->model[vol][first + i], BLOCK))
			test_fail("seed %" PRIu64 ", round %u: volume %u, block %" PRIu64 " is stale %s", w->seed, w->rounds, vol, first + i, when);
}

static co_fn void co_change(struct worker *me)
{
	struct world *w = me->w;
	uint64_t n = 1 + rng_below(&me->rng, rng_below(&me->rng, 4) ? 3 : SPAN), first = me->me * SPAN + rng_below(&me->rng, SPAN - n + 1);
	uint64_t cut_off = rng_below(&me->rng, 2) ? 512 * rng_below(&me->rng, 8) : 0, off = first * BLOCK + cut_off, len = n * BLOCK - cut_off;
	unsigned kind = rng_below(&me->rng, 6);
	uint8_t *flat = w->model[me->vol][0];
	unsigned flags = rng_below(&me->rng, 8) ? 0 : DISK_FUA;
	int ret;

	if (kind < 4)
		rng_fill(&me->rng, me->buf, len);
	else
		memset(me->buf, 0, len);
	memcpy(flat + off, me->buf, len);
	if (kind < 4)
		ret = co_disk_write(w->top[me->vol], off, me->buf, len, flags);
	else if (kind == 4)
		ret = co_disk_zero(w->top[me->vol], off, len, flags);
	else
		ret = co_disk_discard(w->top[me->vol], off, len, flags);
	CHECK(!ret || is_off(w));
}

static co_fn int co_work(void *arg)
{
	struct worker *me = arg;
	struct world *w = me->w;
	unsigned steps = 10 + rng_below(&me->rng, 70), changes = 1 + rng_below(&me->rng, 20);

	for (unsigned i = 0; i < steps && !is_off(w); i++) {
		unsigned what = rng_below(&me->rng, 40);

		if (what < changes)
			co_change(me);
		else if (what < 33)
			co_check_range(w, me->vol, me->me * SPAN + rng_below(&me->rng, SPAN), 1, me->buf, "while at work");
		else if (what < 35)
			co_check_range(w, me->vol, me->me * SPAN, SPAN, me->buf, "while at work");
		else if (what < 37)
			co_disk_flush(w->top[me->vol]);
		else
			co_sleep_ns(1 + rng_below(&me->rng, 20000000));
	}
	w->running--;
	return 0;
}

static co_fn int co_meddle(void *arg)
{
	struct world *w = arg;

	while (w->running && !is_off(w)) {
		struct disk *top = w->layer[rng_below(&w->rng, VOLUMES)];
		unsigned i;

		co_sleep_ns(1 + rng_below(&w->rng, 8000000));
		switch (rng_below(&w->rng, 10)) {
		case 0:
			co_cache_set_mode(top, rng_below(&w->rng, 4) ? CACHE_ALL : CACHE_NONE);
			break;
		case 1:
			cache_set_secondary(top, rng_below(&w->rng, 4) ? CACHE_ALL : CACHE_NONE);
			break;
		case 2:
			if (w->log)
				break;
			co_disk_mark_set(top, rng_below(&w->rng, 2) ? "a mark" : "", NULL);
			break;
		case 3:
			media_destroy(w->old);
			w->old = media_clone(powercut_dev_stable(w->dev));
			break;
		case 5:
		case 6:
			i = rng_below(&w->rng, VOLUMES);
			if (w->snap[i] && rng_below(&w->rng, 2))
				break;
			powercut_snapshot_free(w->snap[i]);
			w->snap[i] = powercut_dev_snapshot(w->image[i]);
			break;
		case 4:
			if (w->faulty)
				powercut_dev_fail(w->dev, -EIO);
			break;
		}
		CHECK(cache_memory(w->c) <= w->c->budget || w->c->shrink_lock.owner);
	}
	return 0;
}

/* --- Begin and end --- */

static co_fn void co_open_all(struct world *w, enum end end)
{
	struct cache_config o = { .chunk = 16384, .curve_samples = 16, .size = 12 << 20, .no_read_ahead = rng_below(&w->rng, 2) };
	struct cache_device_config dc = { .rate = UINT64_MAX / 4, .settle_ns = 1 + rng_below(&w->rng, 10000000) };
	struct err err = ERR_INIT;
	struct disk *dev, *image;

	CHECK_EQ(cache_create(&o, &w->c, &err), 0);
	CHECK_EQ(powercut_dev_open(w->dev, &dev), 0);
	if (co_cache_add_device(w->c, dev, &dc, &err) < 0) {
		/* Both superblocks are damaged. */
		CHECK_EQ(err.code, -EBADMSG);
		CHECK_EQ(co_cache_device_format(dev, SEGMENT, &err), 0);
		err_clear(&err);
		if (co_cache_add_device(w->c, dev, &dc, &err) < 0)
			test_fail("%s", err.msg);
	}
	/* Little memory, so that most comes from the second level. */
	w->c->budget = w->c->fixed + second_memory(w->c->second) + (uint64_t)(2 + rng_below(&w->rng, 3)) * o.chunk + 65536;
	for (unsigned i = 0; i < VOLUMES; i++) {
		char name[4] = { 'v', (char)('0' + i), 0 };

		CHECK_EQ(powercut_dev_open(w->image[i], &image), 0);
		CHECK_EQ(co_cache_attach(w->c, name, image, CACHE_ALL, &w->layer[i], &err), 0);
		w->top[i] = w->layer[i];
	}
	cache_recompute(w->c);
	if (end == END_CUT && rng_below(&w->rng, 4))
		powercut_cut_at(w->power, 1 + rng_below(&w->rng, rng_below(&w->rng, 2) ? 30 : 300));
	co_cache_start_device(w->c);
}

static void take_model(struct world *w)
{
	for (unsigned i = 0; i < VOLUMES; i++)
		media_read(powercut_dev_view(w->image[i]), 0, w->model[i], sizeof(w->model[i]));
}

/* Twice: while the index is being rebuilt, and when it is there. */
static co_fn void co_check_all(struct world *w)
{
	static uint8_t buf[BLOCKS * BLOCK];

	for (unsigned round = 0; round < 3; round++) {
		for (unsigned i = 0; i < VOLUMES; i++)
			for (uint64_t b = 0; b < BLOCKS; b++)
				co_check_range(w, i, b, 1, buf, "at the start");
		co_sleep_ns(1000000);
	}
	w->hits_at_start += w->c->second->count.hits;
}

/* What the volumes hold then is the log's business, and tested elsewhere. */
static co_fn void co_open_log(struct world *w)
{
	struct wlog_config lc = { .memory = 8 << 20, .destage_delay_ns = 1 + rng_below(&w->rng, 20000000), .destage_parallel = 4 };
	struct wlog_volume_config vc = { .force_replay = true, .mode = WLOG_MODE_FLUSH };
	struct err err = ERR_INIT;
	struct disk *dev;
	int r;

	if (powercut_dev_open(w->log_dev, &dev))
		return;
	r = co_wlog_open(&dev, 1, &lc, &w->log, &err);
	if (r < 0) {
		if (!is_off(w))
			test_fail("log: %s", err.msg);
		co_disk_close(dev);
		return;
	}
	for (unsigned i = 0; i < VOLUMES; i++) {
		char name[4] = { 'v', (char)('0' + i), 0 };

		if (co_wlog_attach(w->log, name, w->layer[i], &vc, &w->top[i], &err) < 0 && !is_off(w))
			test_fail("log: %s", err.msg);
		if (co_disk_read(w->top[i], 0, w->model[i], sizeof(w->model[i]), 0))
			CHECK(is_off(w));
	}
}

static co_fn void co_close_all(struct world *w)
{
	if (rng_below(&w->rng, 2))
		cache_end(w->c);
	for (unsigned i = 0; i < VOLUMES; i++)
		co_disk_close(w->top[i]);
	if (w->log)
		co_wlog_close(w->log);
	w->log = NULL;
	w->hits += w->c->second->count.hits;
	w->kept += w->c->second->count.kept;
	w->touches += w->c->second->count.touches;
	w->checksum_errors += w->c->second->count.checksum_errors;
	co_cache_close_device(w->c);
	cache_destroy(w->c);
}

static co_fn void co_round(void *arg)
{
	struct world *w = arg;
	static struct worker workers[VOLUMES * WORKERS];
	enum end end = (enum end)rng_below(&w->rng, ENDS);
	struct co_group g;

	take_model(w);
	co_open_all(w, end);
	w->faulty = rng_below(&w->rng, 8) == 0;
	if (rng_below(&w->rng, 3))
		co_check_all(w);
	if (w->log_dev && !is_off(w))
		co_open_log(w);
	co_group_init(&g);
	w->running = VOLUMES * WORKERS;
	for (unsigned i = 0; i < VOLUMES * WORKERS; i++) {
		workers[i].w = w;
		workers[i].vol = i / WORKERS;
		workers[i].me = i % WORKERS;
		rng_seed(&workers[i].rng, rng_u64(&w->rng));
		co_group_start(&g, "worker", co_work, &workers[i]);
	}
	co_group_start(&g, "meddler", co_meddle, w);
	co_group_wait(&g);
	if (end == END_CUT)
		powercut_cut(w->power);
	if (end == END_KILL)
		w->c->second->off = true;
	co_close_all(w);
	w->cuts += end == END_CUT;
}

/* --- Between two rounds --- */

static void poke_some(struct world *w)
{
	uint8_t data[600];

	if (rng_below(&w->rng, 6) == 0) {
		rng_fill(&w->rng, data, sizeof(data));
		powercut_dev_poke(w->image[rng_below(&w->rng, VOLUMES)], rng_below(&w->rng, BLOCKS * BLOCK - sizeof(data)), data, sizeof(data), true);
	}
	for (unsigned i = 0; i < VOLUMES; i++) {
		if (!w->snap[i] || rng_below(&w->rng, 3))
			continue;
		powercut_dev_rollback(w->image[i], w->snap[i]);
		w->rollbacks++;
	}
	if (w->old && rng_below(&w->rng, 4) == 0) {
		uint64_t size = media_size(w->old);
		uint8_t *all = malloc(size);

		media_read(w->old, 0, all, size);
		powercut_dev_poke(w->dev, 0, all, size, true);
		free(all);
	}
	media_destroy(w->old);
	w->old = NULL;
	for (unsigned n = rng_below(&w->rng, 6) ? 0 : 1 + rng_below(&w->rng, 200); n > 0; n--) {
		uint64_t size = media_size(powercut_dev_view(w->dev)), at = rng_below(&w->rng, 3) ? SECOND_FIRST + rng_below(&w->rng, size - SECOND_FIRST) :
			rng_below(&w->rng, SECOND_FIRST / 8);

		media_read(powercut_dev_view(w->dev), at, data, 1);
		data[0] ^= (uint8_t)(1u << rng_below(&w->rng, 8));
		powercut_dev_poke(w->dev, at, data, 1, true);
	}
}

static co_fn void co_format(void *arg)
{
	struct world *w = arg;
	struct err err = ERR_INIT;
	struct disk *dev;

	CHECK_EQ(powercut_dev_open(w->dev, &dev), 0);
	CHECK_EQ(co_cache_device_format(dev, SEGMENT, &err), 0);
	co_disk_close(dev);
	if (!w->log_dev)
		return;
	CHECK_EQ(powercut_dev_open(w->log_dev, &dev), 0);
	CHECK_EQ(co_wlog_format(&dev, 1, &(struct wlog_format_opts){ .segment_size = 64 << 10, .small = true, .no_prewrite = true }, &err), 0);
	co_disk_close(dev);
}

static void run_world(struct world *w)
{
	struct rt *rt = make_sim(w->seed);
	struct rt_bufpool *bufs;

	CHECK_EQ(rt_bufpool_create(rt, 32 << 20, &bufs, NULL), 0);
	rt_set_bufs(rt, bufs);
	rng_seed(&w->rng, w->seed);
	w->power = powercut_create(rng_u64(&w->rng));
	for (unsigned i = 0; i < VOLUMES; i++) {
		struct powercut_dev_config pc = { .lazy_stamp = rng_below(&w->rng, 2), .no_fua = rng_below(&w->rng, 2), .no_mark = rng_below(&w->rng, 8) == 0 };
		char name[4] = { 'v', (char)('0' + i), 0 };

		w->image[i] = powercut_dev_create(w->power, name, BLOCKS * BLOCK, &pc);
	}
	w->dev = powercut_dev_create(w->power, "cache", SECOND_FIRST + (4 + rng_below(&w->rng, 10)) * SEGMENT, NULL);
	if (w->seed % 2)
		w->log_dev = powercut_dev_create(w->power, "log", 4 << 20, NULL);
	CHECK_EQ(rt_run(rt, co_format, w), 0);
	for (w->rounds = 0; w->rounds < 8; w->rounds++) {
		CHECK_EQ(rt_run(rt, co_round, w), 0);
		powercut_restart(w->power, rng_u64(&w->rng));
		poke_some(w);
	}
	media_destroy(w->old);
	for (unsigned i = 0; i < VOLUMES; i++)
		powercut_snapshot_free(w->snap[i]);
	powercut_destroy(w->power);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
}

int main(void)
{
	uint64_t seed = test_seed(), worlds = test_scale(40), hits = 0, kept = 0, touches = 0, at_start = 0, bad = 0, rollbacks = 0;

	for (uint64_t i = 0; i < worlds; i++) {
		struct world *w = calloc(1, sizeof(*w));

		w->seed = seed + i;
		run_world(w);
		hits += w->hits;
		kept += w->kept;
		touches += w->touches;
		at_start += w->hits_at_start;
		bad += w->checksum_errors;
		rollbacks += w->rollbacks;
		free(w);
	}
	printf("%" PRIu64 " blocks from the second level, %" PRIu64 " of them at starts; %" PRIu64 " kept, %" PRIu64 " touches, %" PRIu64 " checksum errors, %" PRIu64
	       " images rolled back\n", hits, at_start, kept, touches, bad, rollbacks);
	CHECK(hits > 25 * worlds && 2 * kept > 5 * worlds && 2 * at_start > 5 * worlds && 4 * touches > worlds && rollbacks > worlds / 2);
	return 0;
}
