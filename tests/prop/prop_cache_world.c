/* SPDX-License-Identifier: MIT */
/*
 * All that the read cache does, in one world: nothing stale is ever read, and its memory is accounted to the byte at each step.
 *
 * Two clones over one base, which is cached once, and a raw volume share a small cache with a second level. In half of the worlds a write log lies above. Workers read, write, zero, discard,
 * prefetch and flush; meanwhile modes, shares, limits and the size of the cache change, and the cache device fails or hangs; between two phases volumes get another size. A round ends with a
 * clean stop, a process that is gone, or a power cut at any write. Then the cache device is as it was, torn by the cut, bit-flipped, or an old copy of itself, and a clone may have been made anew.
 *
 * The model knows what each sector holds, since no two workers have it at once, and what a cut may leave of it: what the last flush covers, or anything later. Content is
 * a number that no other write has, and the sector's own, so that what is read says where it comes from.
 */
#include <errno.h>

#include "backend/fault.h"
#include "blk/share.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "prop/cache_accounts.h"
#include "rt/buf.h"
#include "unit/test_rt.h"
#include "util/rng.h"
#include "wlog/wlog.h"

#define SECTOR 512u
#define SECTORS 320u		/* of a volume, at most */
#define BASE_SECTORS 232u	/* its last block is half of one */
#define CLONES 2u
#define VOLUMES 3u
#define WORKERS 2u
#define VERSIONS 8u
#define SEGMENT (64u << 10)
#define SECOND 1000000000ull
#define ID_BITS 40
#define ID_MASK ((1ull << ID_BITS) - 1)
#define BASE_ID 1u		/* 0 is zeroes */

enum end { END_CLEAN, END_KILL, END_CUT, ENDS };

struct version {
	uint64_t id, or_id;	/* or_id: what was discarded may be there again, or not */
	uint64_t done;		/* UINT64_MAX: in flight */
};

/* Oldest first. The last is what is read; a cut may leave any. */
struct cell {
	struct version v[VERSIONS];
	unsigned n;
};

struct world;

struct vol {
	struct world *w;
	char name[16], tables_name[16];
	bool clone;
	struct powercut_dev *dev;
	struct disk *top, *layer, *tables;
	struct cell cell[SECTORS];
	uint64_t sectors, or_sectors;	/* the other one if a cut came in between */
	struct range {
		uint64_t first, end;
	} busy[WORKERS];
};

struct world {
	struct rng rng;
	uint64_t seed, tick, id;
	unsigned round, running;
	struct powercut *power;
	struct powercut_dev *base_dev, *dev, *log_dev;
	struct cache *c;
	struct wlog *log;
	struct disk_shared base;
	struct disk *base_layer;
	struct vol vol[VOLUMES];
	struct media *old;	/* of the cache device */
	bool faulty, exact;	/* exact: the last end was a clean one */
	uint64_t reads, hits, kept, shared, cuts, resizes, anew, bad, off;
};

static bool is_off(const struct world *w)
{
	return powercut_is_off(w->power);
}

/* --- Content --- */

static uint64_t word_of(uint64_t id, uint64_t sector)
{
	return id ? sector << ID_BITS | id : 0;
}

static void fill(uint8_t *buf, uint64_t first, uint64_t n, uint64_t id)
{
	for (uint64_t i = 0; i < n; i++) {
		uint64_t word = word_of(id, first + i);

		for (unsigned k = 0; k < SECTOR; k += 8)
			memcpy(buf + i * SECTOR + k, &word, 8);
	}
}

/* What the sector holds; it must be whole, and its own. */
static uint64_t id_in(const struct vol *vol, uint64_t sector, const uint8_t *buf, const char *when)
{
	uint64_t word, other;

	memcpy(&word, buf, 8);
	for (unsigned k = 8; k < SECTOR; k += 8) {
		memcpy(&other, buf + k, 8);
		if (other != word)
			test_fail("seed %" PRIu64 ", round %u: %s, sector %" PRIu64 " is torn %s", vol->w->seed, vol->w->round, vol->name, sector, when);
	}
	if (word != word_of(word & ID_MASK, sector))
		test_fail("seed %" PRIu64 ", round %u: %s, sector %" PRIu64 " holds that of %" PRIu64 " %s", vol->w->seed, vol->w->round, vol->name, sector,
			  word >> ID_BITS, when);
	return word & ID_MASK;
}

/* --- The model --- */

static struct version *newest(struct vol *vol, uint64_t sector)
{
	return &vol->cell[sector].v[vol->cell[sector].n - 1];
}

static void set_only(struct vol *vol, uint64_t sector, uint64_t id, uint64_t or_id)
{
	vol->cell[sector].v[0] = (struct version){ id, or_id, ++vol->w->tick };
	vol->cell[sector].n = 1;
}

static void begin_change(struct vol *vol, uint64_t first, uint64_t end, uint64_t id)
{
	for (uint64_t s = first; s < end; s++) {
		CHECK(vol->cell[s].n < VERSIONS);
		vol->cell[s].v[vol->cell[s].n++] = (struct version){ id, id, UINT64_MAX };
	}
}

static void end_change(struct vol *vol, uint64_t first, uint64_t end)
{
	for (uint64_t s = first; s < end; s++)
		newest(vol, s)->done = ++vol->w->tick;
}

/* A flush that began at `tick` has returned. */
static void covered(struct vol *vol, uint64_t tick)
{
	for (uint64_t s = 0; s < vol->sectors; s++) {
		struct cell *c = &vol->cell[s];
		unsigned k = c->n;

		while (k-- > 1 && c->v[k].done > tick)
			;
		memmove(c->v, c->v + k, (c->n - k) * sizeof(c->v[0]));
		c->n -= k;
	}
}

/* --- Reading and flushing --- */

static co_fn void co_check(struct vol *vol, uint64_t first, uint64_t end, unsigned flags, const char *when)
{
	uint8_t *buf = malloc((end - first) * SECTOR);

	memset(buf, 0xdd, (end - first) * SECTOR);
	if (co_disk_read(vol->top, first * SECTOR, buf, (end - first) * SECTOR, flags)) {
		CHECK(is_off(vol->w));
		end = first;
	}
	for (uint64_t s = first; s < end; s++) {
		uint64_t id = id_in(vol, s, buf + (s - first) * SECTOR, when);

		if (id != newest(vol, s)->id)
			test_fail("seed %" PRIu64 ", round %u: %s, sector %" PRIu64 " is stale %s: %" PRIu64 ", wanted %" PRIu64, vol->w->seed, vol->w->round, vol->name, s,
				  when, id, newest(vol, s)->id);
	}
	vol->w->reads++;
	free(buf);
}

static co_fn void co_flush(struct vol *vol)
{
	uint64_t tick = vol->w->tick;

	if (co_disk_flush(vol->top))
		CHECK(is_off(vol->w));
	else
		covered(vol, tick);
}

/* After a start: what is there is one of what may be, and is it from now on. */
static co_fn void co_adopt(struct vol *vol)
{
	struct world *w = vol->w;
	uint8_t *buf = malloc(SECTORS * SECTOR);
	uint64_t size = vol->top->size / SECTOR;

	if (size != vol->sectors && size != vol->or_sectors)
		test_fail("seed %" PRIu64 ", round %u: %s has %" PRIu64 " sectors, wanted %" PRIu64, w->seed, w->round, vol->name, size, vol->sectors);
	vol->sectors = vol->or_sectors = size;
	if (co_disk_read(vol->top, 0, buf, size * SECTOR, 0)) {
		CHECK(is_off(w));
		size = 0;
	}
	for (uint64_t s = 0; s < size; s++) {
		uint64_t id = id_in(vol, s, buf + s * SECTOR, "at the start");
		struct cell *c = &vol->cell[s];
		unsigned k = c->n;

		while (k-- > 0 && c->v[k].id != id && c->v[k].or_id != id)
			;
		if (k >= c->n || (w->exact && k != c->n - 1))
			test_fail("seed %" PRIu64 ", round %u: %s, sector %" PRIu64 " is stale at the start: %" PRIu64 ", wanted %" PRIu64 "%s", w->seed, w->round,
				  vol->name, s, id, newest(vol, s)->id, w->exact ? "" : " or another since the last flush");
		set_only(vol, s, id, c->v[k].id == id ? c->v[k].or_id : c->v[k].id);
	}
	free(buf);
}

/* --- Workers --- */

struct worker {
	struct vol *vol;
	unsigned me;
	struct rng rng;
};

static bool take_range(struct worker *w, struct range *r)
{
	uint64_t all = w->vol->sectors, n = min(1 + rng_below(&w->rng, rng_below(&w->rng, 6) ? 24 : all), all);

	r->first = rng_below(&w->rng, all - n + 1);
	r->end = r->first + n;
	for (unsigned i = 0; i < WORKERS; i++)
		if (i != w->me && w->vol->busy[i].first < r->end && r->first < w->vol->busy[i].end)
			return false;
	w->vol->busy[w->me] = *r;
	return true;
}

/* What is discarded reads as zeroes or as before, from now on as one of these. */
static co_fn void co_discard(struct vol *vol, const struct range *r)
{
	uint8_t *buf = malloc((r->end - r->first) * SECTOR);

	begin_change(vol, r->first, r->end, 0);
	if (co_disk_discard(vol->top, r->first * SECTOR, (r->end - r->first) * SECTOR, 0) ||
	    co_disk_read(vol->top, r->first * SECTOR, buf, (r->end - r->first) * SECTOR, 0)) {
		CHECK(is_off(vol->w));
		free(buf);
		return;
	}
	for (uint64_t s = r->first; s < r->end; s++) {
		uint64_t id = id_in(vol, s, buf + (s - r->first) * SECTOR, "after a discard");
		struct version *v = newest(vol, s);

		CHECK(id == 0 || id == v[-1].id);
		*v = (struct version){ id, id ? 0 : v[-1].id, v->done };
	}
	end_change(vol, r->first, r->end);
	free(buf);
}

static co_fn void co_change(struct worker *w, const struct range *r)
{
	struct vol *vol = w->vol;
	uint64_t off = r->first * SECTOR, len = (r->end - r->first) * SECTOR, id = 0;
	unsigned kind = rng_below(&w->rng, 8), flags = rng_below(&w->rng, 8) ? 0 : DISK_FUA;
	uint8_t *buf = NULL;
	int ret;

	for (uint64_t s = r->first; s < r->end; s++)
		if (vol->cell[s].n >= VERSIONS - 1) {
			co_flush(vol);
			break;
		}
	if (is_off(vol->w))
		return;
	if (kind == 0) {
		co_discard(vol, r);
		return;
	}
	if (kind == 1) {
		begin_change(vol, r->first, r->end, 0);
		ret = co_disk_zero(vol->top, off, len, flags | (rng_below(&w->rng, 2) ? DISK_UNMAP : 0));
	} else {
		id = ++vol->w->id;
		buf = malloc(len);
		fill(buf, r->first, r->end - r->first, id);
		begin_change(vol, r->first, r->end, id);
		ret = co_disk_write(vol->top, off, buf, len, flags);
	}
	CHECK(!ret || is_off(vol->w));
	if (!ret)
		end_change(vol, r->first, r->end);
	free(buf);
}

static co_fn int co_work(void *arg)
{
	struct worker *w = arg;
	struct world *world = w->vol->w;
	unsigned steps = 10 + rng_below(&w->rng, 30), changes = 1 + rng_below(&w->rng, 14);

	for (unsigned i = 0; i < steps && !is_off(world); i++) {
		unsigned what = rng_below(&w->rng, 32);
		struct range r;

		if (what >= 30) {
			co_sleep_ns(1 + rng_below(&w->rng, 20000000));
		} else if (what >= 28) {
			co_flush(w->vol);
		} else if (what == 27) {
			co_disk_prefetch(w->vol->top, 0, w->vol->sectors * SECTOR);
		} else if (!take_range(w, &r)) {
			co_sleep_ns(1 + rng_below(&w->rng, 1000000));
		} else {
			if (what < changes)
				co_change(w, &r);
			else
				co_check(w->vol, r.first, r.end, rng_below(&w->rng, 8) ? 0 : DISK_BACKGROUND, "while at work");
			w->vol->busy[w->me] = (struct range){ 0, 0 };
		}
		check_accounts(world->c);
	}
	world->running--;
	return 0;
}

/* --- What changes meanwhile --- */

static enum cache_mode some_mode(struct world *w)
{
	return rng_below(&w->rng, 3) ? CACHE_ALL : (enum cache_mode)rng_below(&w->rng, 3);
}

static co_fn void co_hang(struct world *w)
{
	powercut_dev_stall(w->dev, true);
	co_sleep_ns(rng_below(&w->rng, 3 * SECOND));
	powercut_dev_stall(w->dev, false);
}

static co_fn int co_meddle(void *arg)
{
	struct world *w = arg;

	while (w->running && !is_off(w)) {
		struct vol *vol = &w->vol[rng_below(&w->rng, VOLUMES)];
		uint64_t least = cache_least(w->c);
		struct err err = ERR_INIT;

		co_sleep_ns(1 + rng_below(&w->rng, 8000000));
		switch (rng_below(&w->rng, 10)) {
		case 0:
			co_cache_set_mode(vol->layer, some_mode(w));
			break;
		case 1:
			if (vol->clone)
				co_cache_set_mode(vol->tables, some_mode(w));
			break;
		case 2:
			co_cache_set_mode(w->base_layer, rng_below(&w->rng, 4) ? CACHE_ALL : CACHE_NONE);
			break;
		case 3:
			cache_set_secondary(rng_below(&w->rng, 3) ? vol->layer : w->base_layer, some_mode(w));
			break;
		case 4:
			co_cache_set_limits(vol->layer, rng_below(&w->rng, 3) * CACHE_BLOCK, rng_below(&w->rng, 2) * (3 + rng_below(&w->rng, 9)) * CACHE_BLOCK, &err);
			break;
		case 5:
			/* Seldom what others lend it, with a larger index. */
			CHECK_EQ(co_cache_resize(w->c, rng_below(&w->rng, 16) ? least + rng_below(&w->rng, 6) * 16384 : w->c->config.most - rng_below(&w->rng, 4 << 20), &err), 0);
			break;
		case 6:
			media_destroy(w->old);
			w->old = media_clone(powercut_dev_stable(w->dev));
			break;
		case 7:
			if (w->faulty)
				co_hang(w);
			break;
		case 8:
			if (w->faulty && rng_below(&w->rng, 3) == 0)
				powercut_dev_fail(w->dev, -EIO);
			break;
		}
		err_clear(&err);
		check_accounts(w->c);
	}
	return 0;
}

static co_fn void co_phase(struct world *w)
{
	struct worker workers[VOLUMES * WORKERS];
	struct co_group g;

	co_group_init(&g);
	w->running = VOLUMES * WORKERS;
	for (unsigned i = 0; i < VOLUMES * WORKERS; i++) {
		workers[i] = (struct worker){ .vol = &w->vol[i / WORKERS], .me = i % WORKERS };
		rng_seed(&workers[i].rng, rng_u64(&w->rng));
		co_group_start(&g, "worker", co_work, &workers[i]);
	}
	co_group_start(&g, "meddler", co_meddle, w);
	CHECK_EQ(co_group_wait(&g), 0);
}

/* With nothing in flight, as a volume's gate sees to it. What lay behind the smaller size is never seen again. */
static co_fn void co_resize(struct vol *vol)
{
	struct world *w = vol->w;
	uint64_t size = SECTORS / 2 + rng_below(&w->rng, SECTORS / 2 + 1), old = vol->sectors;
	struct err err = ERR_INIT;

	if (is_off(w))
		return;
	if (!co_disk_resize(vol->top, size * SECTOR, &err)) {
		for (uint64_t s = min(size, old); s < SECTORS; s++)
			set_only(vol, s, 0, 0);
		vol->sectors = vol->or_sectors = size;
		w->resizes++;
		return;
	}
	if (!is_off(w))
		test_fail("seed %" PRIu64 ": %s", w->seed, err.msg);
	err_clear(&err);
	vol->or_sectors = size;
	for (uint64_t s = min(size, old); s < SECTORS; s++) {
		/* What was there, as long as it is; zeroes, where it comes to light. */
		if (s >= old) {
			set_only(vol, s, 0, 0);
		} else {
			begin_change(vol, s, s + 1, 0);
			end_change(vol, s, s + 1);
		}
	}
}

/* --- Begin and end --- */

static co_fn void co_open_cache(struct world *w)
{
	struct cache_config o = { .chunk = 16384, .curve_samples = 16, .size = 12 << 20, .most = 16 << 20, .metadata_floor_pct = 10, .s3fifo = w->seed % 3 == 0 };
	struct cache_device_config dc = { .rate = UINT64_MAX / 4, .settle_ns = 1 + rng_below(&w->rng, 10000000) };
	struct err err = ERR_INIT;
	struct disk *dev;

	o.no_read_ahead = rng_below(&w->rng, 2);
	CHECK_EQ(cache_create(&o, &w->c, &err), 0);
	CHECK_EQ(powercut_dev_open(w->dev, &dev), 0);
	if (co_cache_add_device(w->c, dev, &dc, &err) < 0) {
		/* Both superblocks are damaged. */
		if (err.code != -EBADMSG)
			test_fail("seed %" PRIu64 ", round %u: %s", w->seed, w->round, err.msg);
		err_clear(&err);
		CHECK_EQ(co_cache_device_format(dev, SEGMENT, &err), 0);
		CHECK_EQ(co_cache_add_device(w->c, dev, &dc, &err), 0);
	}
}

static co_fn void co_open_base(struct world *w)
{
	struct err err = ERR_INIT;
	struct disk *d;

	CHECK_EQ(powercut_dev_open(w->base_dev, &d), 0);
	d->read_only = true;
	CHECK_EQ(co_cache_attach_shared(w->c, "base", d, &w->base_layer, &err), 0);
	w->base = (struct disk_shared){ .disk = w->base_layer };
	co_cache_set_mode(w->base_layer, CACHE_ALL);
}

static co_fn void co_open_volume(struct vol *vol)
{
	struct world *w = vol->w;
	struct qcow2_opts o = { .fill_debt = rng_below(&w->rng, 2) ? 0 : 65536, .run_ahead = 65536, .table_cache = 1 };
	struct err err = ERR_INIT;
	struct disk *d;

	CHECK_EQ(powercut_dev_open(vol->dev, &d), 0);
	if (vol->clone) {
		CHECK_EQ(co_cache_attach_tables(w->c, vol->tables_name, d, CACHE_ALL, &vol->tables, &err), 0);
		CHECK_EQ(disk_share(&w->base, &o.backing), 0);
		if (co_qcow2_open(vol->tables, vol->name, &o, DISK_OPEN_RDWR, &d, &err))
			test_fail("seed %" PRIu64 ", round %u: %s: %s", w->seed, w->round, vol->name, err.msg);
	}
	CHECK_EQ(co_cache_attach(w->c, vol->name, d, CACHE_ALL, &vol->layer, &err), 0);
	vol->top = vol->layer;
}

static co_fn void co_open_log(struct world *w)
{
	struct wlog_config lc = { .memory = 4 << 20, .destage_delay_ns = 1 + rng_below(&w->rng, 20000000), .destage_parallel = 4 };
	struct wlog_volume_config vc = { .mode = WLOG_MODE_FLUSH };
	struct err err = ERR_INIT;
	struct disk *dev;

	if (powercut_dev_open(w->log_dev, &dev))
		return;
	if (co_wlog_open(&dev, 1, &lc, &w->log, &err) < 0) {
		if (!is_off(w))
			test_fail("seed %" PRIu64 ", round %u: log: %s", w->seed, w->round, err.msg);
		co_disk_close(dev);
		err_clear(&err);
		return;
	}
	for (unsigned i = 0; i < VOLUMES; i++) {
		struct vol *vol = &w->vol[i];

		if (co_wlog_attach(w->log, vol->name, vol->layer, &vc, &vol->top, &err) < 0 && !is_off(w))
			test_fail("seed %" PRIu64 ", round %u: log: %s", w->seed, w->round, err.msg);
		err_clear(&err);
	}
}

static co_fn void co_open_all(struct world *w, enum end end)
{
	struct err err = ERR_INIT;

	co_open_cache(w);
	co_open_base(w);
	for (unsigned i = 0; i < VOLUMES; i++)
		co_open_volume(&w->vol[i]);
	/* Little memory, so that much comes from the second level. */
	CHECK_EQ(co_cache_resize(w->c, cache_least(w->c) + rng_below(&w->rng, 4) * 16384, &err), 0);
	if (end == END_CUT)
		powercut_cut_at(w->power, 1 + rng_below(&w->rng, rng_below(&w->rng, 2) ? 60 : 600));
	co_cache_start_device(w->c);
	if (w->log_dev)
		co_open_log(w);
	for (unsigned i = 0; i < VOLUMES && !is_off(w); i++)
		co_adopt(&w->vol[i]);
	check_accounts(w->c);
}

/* What the cache says, and what the images say without it. */
static co_fn void co_compare(struct world *w)
{
	for (unsigned i = 0; i < VOLUMES; i++)
		co_check(&w->vol[i], 0, w->vol[i].sectors, 0, "at the end");
	check_accounts(w->c);
	co_cache_set_mode(w->base_layer, CACHE_NONE);
	cache_set_secondary(w->base_layer, CACHE_NONE);
	for (unsigned i = 0; i < VOLUMES; i++) {
		struct vol *vol = &w->vol[i];

		for (unsigned k = 0; k <= vol->clone; k++) {
			co_cache_set_mode(k ? vol->tables : vol->layer, CACHE_NONE);
			cache_set_secondary(k ? vol->tables : vol->layer, CACHE_NONE);
		}
	}
	for (unsigned i = 0; i < VOLUMES; i++)
		co_check(&w->vol[i], 0, w->vol[i].sectors, 0, "without the cache");
	check_accounts(w->c);
}

static co_fn void co_close_all(struct world *w)
{
	const struct second_counters *n = &w->c->second->count;

	for (unsigned i = 0; i < CLONES; i++)
		w->shared += volume_of(w->vol[i].layer)->count[CACHE_DATA].shared;
	w->hits += n->hits;
	bool ended = rng_below(&w->rng, 2);

	if (ended)
		cache_end(w->c);
	for (unsigned i = 0; i < VOLUMES; i++)
		co_disk_close(w->vol[i].top);
	CHECK_EQ(w->base.users, 0);
	if (w->log)
		co_wlog_close(w->log);
	w->log = NULL;
	w->kept += n->kept;
	w->bad += n->checksum_errors;
	CHECK(ended || !w->c->mem.used);
	co_cache_close_device(w->c);
	CHECK_EQ(w->c->curves, 0);
	cache_destroy(w->c);
}

static co_fn void co_round(void *arg)
{
	struct world *w = arg;
	enum end end = (enum end)rng_below(&w->rng, ENDS);

	w->faulty = rng_below(&w->rng, 6) == 0;
	co_open_all(w, end);
	for (unsigned phase = 0; phase < 2 && !is_off(w); phase++) {
		co_phase(w);
		for (unsigned i = 0; i < VOLUMES; i++)
			if (rng_below(&w->rng, 2))
				co_resize(&w->vol[i]);
		check_accounts(w->c);
	}
	if (end == END_CUT)
		powercut_cut(w->power);
	for (unsigned i = 0; i < VOLUMES && end == END_CLEAN; i++)
		co_flush(&w->vol[i]);
	if (!is_off(w))
		co_compare(w);
	w->off += w->c->second->off && !is_off(w);
	if (end == END_KILL)
		w->c->second->off = true;
	co_close_all(w);
	w->exact = end == END_CLEAN;
	w->cuts += end == END_CUT;
}

/* --- Between two rounds --- */

static void spoil_device(struct world *w)
{
	uint8_t byte;

	if (w->old && rng_below(&w->rng, 4) == 0) {
		uint64_t size = media_size(w->old);
		uint8_t *all = malloc(size);

		media_read(w->old, 0, all, size);
		powercut_dev_poke(w->dev, 0, all, size, true);
		free(all);
	}
	media_destroy(w->old);
	w->old = NULL;
	for (unsigned n = rng_below(&w->rng, 5) ? 0 : 1 + rng_below(&w->rng, 200); n > 0; n--) {
		uint64_t size = media_size(powercut_dev_view(w->dev)), at = rng_below(&w->rng, 3) ? SECOND_FIRST + rng_below(&w->rng, size - SECOND_FIRST) :
			rng_below(&w->rng, SECOND_FIRST / 8);

		media_read(powercut_dev_view(w->dev), at, &byte, 1);
		byte ^= (uint8_t)(1u << rng_below(&w->rng, 8));
		powercut_dev_poke(w->dev, at, &byte, 1, true);
	}
}

/* Empty, over the base. */
static co_fn void co_make_clone(struct vol *vol)
{
	static const uint64_t sizes[] = { 4096, 16384, 65536, 512 };
	struct rng *r = &vol->w->rng;
	struct qcow2_create how = { .cluster_size = sizes[rng_below(r, 4)], .refcount_bits = 16, .version = 3, .backing_file = "base", .backing_format = "raw" };
	struct err err = ERR_INIT;
	struct disk *d;

	how.size = (SECTORS / 2 + rng_below(r, SECTORS / 2)) * SECTOR;
	how.ext_l2 = how.cluster_size >= 16384 && rng_below(r, 2);
	CHECK_EQ(powercut_dev_open(vol->dev, &d), 0);
	if (qcow2_create_check(&how, vol->name, &err) || co_qcow2_create(d, NULL, &how, &err))
		test_fail("%s", err.msg);
	co_disk_close(d);
	vol->sectors = vol->or_sectors = how.size / SECTOR;
	for (uint64_t s = 0; s < SECTORS; s++)
		set_only(vol, s, s < min(vol->sectors, (uint64_t)BASE_SECTORS) ? BASE_ID : 0, s < min(vol->sectors, (uint64_t)BASE_SECTORS) ? BASE_ID : 0);
	vol->w->anew++;
}

static co_fn void co_between(void *arg)
{
	struct world *w = arg;

	/* What a log holds of the old one would be lost, so that is refused. */
	if (!w->log_dev && rng_below(&w->rng, 4) == 0)
		co_make_clone(&w->vol[rng_below(&w->rng, CLONES)]);
}

static co_fn void co_make_all(void *arg)
{
	struct world *w = arg;
	struct wlog_format_opts lo = { .segment_size = 64 << 10, .small = true, .no_prewrite = true };
	uint8_t *base = malloc(BASE_SECTORS * SECTOR);
	struct err err = ERR_INIT;
	struct disk *d;

	fill(base, 0, BASE_SECTORS, BASE_ID);
	powercut_dev_poke(w->base_dev, 0, base, BASE_SECTORS * SECTOR, true);
	free(base);
	for (unsigned i = 0; i < CLONES; i++)
		co_make_clone(&w->vol[i]);
	CHECK_EQ(powercut_dev_open(w->dev, &d), 0);
	CHECK_EQ(co_cache_device_format(d, SEGMENT, &err), 0);
	co_disk_close(d);
	if (!w->log_dev)
		return;
	CHECK_EQ(powercut_dev_open(w->log_dev, &d), 0);
	CHECK_EQ(co_wlog_format(&d, 1, &lo, &err), 0);
	co_disk_close(d);
}

static void make_world(struct world *w)
{
	struct powercut_dev_config pc = { .lazy_stamp = rng_below(&w->rng, 2), .no_fua = rng_below(&w->rng, 2) };

	w->power = powercut_create(rng_u64(&w->rng));
	w->id = BASE_ID;
	w->exact = true;
	w->base_dev = powercut_dev_create(w->power, "base", BASE_SECTORS * SECTOR, NULL);
	w->dev = powercut_dev_create(w->power, "cache", SECOND_FIRST + (4 + rng_below(&w->rng, 10)) * SEGMENT, NULL);
	if (w->seed % 2)
		w->log_dev = powercut_dev_create(w->power, "log", 4 << 20, NULL);
	for (unsigned i = 0; i < VOLUMES; i++) {
		struct vol *vol = &w->vol[i];

		vol->w = w;
		vol->clone = i < CLONES;
		vol->sectors = vol->or_sectors = SECTORS;
		snprintf(vol->name, sizeof(vol->name), "v%u", i);
		snprintf(vol->tables_name, sizeof(vol->tables_name), "v%u tables", i);
		vol->dev = powercut_dev_create(w->power, vol->name, vol->clone ? 65536 : SECTORS * SECTOR, &pc);
		for (uint64_t s = 0; s < SECTORS; s++)
			set_only(vol, s, 0, 0);
	}
}

static void run_world(struct world *w)
{
	struct rt *rt = make_sim(w->seed);
	struct rt_bufpool *bufs;

	CHECK_EQ(rt_bufpool_create(rt, 32 << 20, &bufs, NULL), 0);
	rt_set_bufs(rt, bufs);
	rng_seed(&w->rng, w->seed);
	make_world(w);
	CHECK_EQ(rt_run(rt, co_make_all, w), 0);
	powercut_restart(w->power, rng_u64(&w->rng));
	for (w->round = 0; w->round < (TEST_SANITIZED ? 3 : 6); w->round++) {
		CHECK_EQ(rt_run(rt, co_round, w), 0);
		powercut_restart(w->power, rng_u64(&w->rng));
		spoil_device(w);
		CHECK_EQ(rt_run(rt, co_between, w), 0);
	}
	media_destroy(w->old);
	powercut_destroy(w->power);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
}

int main(void)
{
	uint64_t seed = test_seed(), worlds = test_scale(8);
	struct world all = { 0 };

	for (uint64_t i = 0; i < worlds; i++) {
		struct world *w = calloc(1, sizeof(*w));

		w->seed = seed + i;
		run_world(w);
		all.reads += w->reads;
		all.hits += w->hits;
		all.kept += w->kept;
		all.shared += w->shared;
		all.cuts += w->cuts;
		all.resizes += w->resizes;
		all.anew += w->anew;
		all.bad += w->bad;
		all.off += w->off;
		free(w);
	}
	printf("%" PRIu64 " reads, %" PRIu64 " blocks from the second level, %" PRIu64 " shared by clones, %" PRIu64 " kept, %" PRIu64 " checksum errors, %" PRIu64
	       " devices given up, %" PRIu64 " cuts, %" PRIu64 " resizes, %" PRIu64 " clones\n", all.reads, all.hits, all.shared, all.kept, all.bad, all.off, all.cuts,
	       all.resizes, all.anew);
	/* All of it has happened. One world alone, which is what a sanitizer has time for, may lack something. */
	CHECK(worlds < 4 || (all.hits > 10 * worlds && all.shared > worlds && all.resizes > worlds && all.cuts > worlds / 2 && all.kept && all.bad && all.off));
	return 0;
}
