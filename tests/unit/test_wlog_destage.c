/* SPDX-License-Identifier: MIT */
/* How fast what is dirty leaves the log for a slow store, and what the guest notices of it. In virtual time, so to the nanosecond. */
#include <stdlib.h>

#include "blk/spec.h"
#include "wlog_env.h"

#define SLOW "delay:write=2ms,flush=2ms,read=2ms:mem:64M"
#define SLOW_NS (2 * MS)
#define LOG "delay:write=70us,flush=30us,fua=100us:mem:"
#define RECORD 8000u
#define STRIDE 12288u	/* no two records are neighbours */
#define COMMITS 400u
#define MiB (1ull << 20)

/* A log and a volume on disks whose every request takes the same time. */
struct world {
	struct wlog *w;
	struct disk *image, *vol;
	unsigned peak, writes, reads;
	uint64_t write_bytes, longest;
	int read_error;		/* of the image */
};

/* Of the image: before a request goes to the driver. */
static int watch(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct world *k = arg;

	if (op == DISK_OP_READ) {
		k->reads++;
		return k->read_error;
	}
	if (op != DISK_OP_WRITE)
		return 0;
	k->writes++;
	k->write_bytes += len;
	k->longest = max(k->longest, len);
	k->peak = max(k->peak, d->in_flight);
	return 0;
}

static co_fn struct disk *co_disk_of(const char *text)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err) < 0)
		test_fail("%s: %s", text, err.msg);
	return d;
}

static co_fn void co_begin_world(struct world *k, const char *log, const char *image, const struct wlog_config *c, enum wlog_destage destage)
{
	const struct wlog_format_opts o = { .small = true, .no_prewrite = true };
	const struct wlog_volume_config vc = { .destage = destage };
	struct disk *dev = co_disk_of(log);
	struct err err = ERR_INIT;

	*k = (struct world){ .image = co_disk_of(image) };
	if (co_wlog_format(&dev, 1, &o, &err) < 0 || co_wlog_open(&dev, 1, c, &k->w, &err) < 0 ||
	    co_wlog_attach(k->w, "v", k->image, &vc, &k->vol, &err) < 0)
		test_fail("%s", err.msg);
	k->image->trace = watch;
	k->image->trace_arg = k;
	CHECK_EQ(co_disk_flush(k->vol), 0);	/* from now on writes are acknowledged from memory */
}

static co_fn void co_end_world(struct world *k)
{
	co_disk_close(k->vol);
	CHECK_EQ(co_wlog_close(k->w), 0);
}

static co_fn void co_record(struct world *k, uint64_t off, uint64_t len)
{
	static uint8_t data[1 << 20];

	CHECK_EQ(co_disk_write(k->vol, off, data, len, 0), 0);
}

/* `n` records that are no neighbours, each with a flush behind it if `sync`. */
static co_fn void co_scatter(struct world *k, unsigned n, bool sync)
{
	for (unsigned i = 0; i < n; i++) {
		co_record(k, (uint64_t)i * STRIDE, RECORD);
		if (sync)
			CHECK_EQ(co_disk_flush(k->vol), 0);
	}
	CHECK_EQ(co_disk_flush(k->vol), 0);
}

static co_fn uint64_t co_drain_ns(struct world *k)
{
	uint64_t began = rt_now_ns();

	k->w->config.no_destage = false;
	CHECK_EQ(co_wlog_drain(k->w, NULL, NULL, NULL), 0);
	return rt_now_ns() - began;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* The median time of a record and its flush, with a pause before each. */
static co_fn uint64_t co_median_ns(struct world *k, unsigned n, uint64_t think)
{
	static uint64_t took[COMMITS];

	for (unsigned i = 0; i < n; i++) {
		if (think)
			co_sleep_ns(think);
		uint64_t began = rt_now_ns();

		co_record(k, (uint64_t)i * STRIDE, RECORD);
		CHECK_EQ(co_disk_flush(k->vol), 0);
		took[i] = rt_now_ns() - began;
	}
	qsort(took, n, sizeof(*took), compare);
	return took[n / 2];
}

/* --- The rate at which it drains --- */

static co_fn void co_drain_rate(struct env *e)
{
	const struct wlog_config c = { .no_destage = true };
	const unsigned n = 1024;

	/* Each record is an epoch of its own: destage=merged does not care. */
	for (unsigned sync = 0; sync < 2; sync++) {
		struct world k;

		co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
		co_scatter(&k, n, sync);
		uint64_t ns = co_drain_ns(&k);

		CHECK_EQ(k.writes, n);
		printf("  %u scattered records: %.0f times as fast as one by one\n", n, (double)n * SLOW_NS / ns);
		CHECK(ns <= n * SLOW_NS / 10);
		CHECK_EQ(k.peak, WL_DEPTH_MAX);
		co_end_world(&k);
	}
}

static void small_synchronous_writes_drain_ten_times_as_fast_as_the_store_takes_them_one_by_one(void)
{
	env_run(NULL, co_drain_rate);
}

static co_fn void co_drain_epoch(struct env *e)
{
	const struct wlog_config c = { .no_destage = true };
	const unsigned n = 512;
	struct world k;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_ORDERED);
	co_scatter(&k, n, false);
	CHECK(co_drain_ns(&k) <= n * SLOW_NS / 10);
	CHECK_EQ(k.writes, n);
	/* Epochs go one by one: each with a flush of the image behind it. */
	k.peak = 0;
	k.w->config.no_destage = true;
	co_scatter(&k, 20, true);
	CHECK(co_drain_ns(&k) >= 20 * 2 * SLOW_NS);
	CHECK_EQ(k.peak, 1);
	co_end_world(&k);
}

static void one_epoch_drains_as_fast_and_two_never_at_once(void)
{
	env_run(NULL, co_drain_epoch);
}

static co_fn void co_neighbours(struct env *e)
{
	const struct wlog_config c = { .no_destage = true };
	struct world k;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
	for (unsigned i = 0; i < 1000; i++)
		co_record(&k, (uint64_t)i * RECORD, RECORD);
	co_drain_ns(&k);
	CHECK_EQ(k.write_bytes, 1000 * RECORD);
	CHECK_EQ(k.writes, (1000 * RECORD + (1 << 20) - 1) >> 20);
	co_end_world(&k);
}

static void neighbours_become_one_write(void)
{
	env_run(NULL, co_neighbours);
}

/* --- Objects --- */

static co_fn void co_objects(struct env *e)
{
	const uint64_t object = 4 << 20, step = 64 << 10;

	co_env_start(e, 1, NULL);
	struct disk *image = e->vol[0]->file;
	struct world k = { .w = e->w, .image = image, .vol = e->vol[0] };

	image->trace = watch;
	image->trace_arg = &k;
	co_flush(e, 0);
	/* The second object, and the end of the first and the beginning of the third. */
	for (uint64_t off = object - 2 * step; off < 2 * object + step; off += step)
		co_record(&k, off, step);
	co_flush(e, 0);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	CHECK_EQ(k.writes, 1 + object / WL_RUN_MAX + 1);
	CHECK_EQ(k.longest, WL_RUN_MAX);
	CHECK_EQ(k.peak, k.writes);	/* all at once */
	/* All but a little of one: one more. */
	k.writes = 0;
	for (uint64_t off = 0; off < object; off += step)
		if (off != 7 * step)
			co_record(&k, off, step);
	co_flush(e, 0);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	CHECK_EQ(k.writes, 1 + object / WL_RUN_MAX);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_whole_object_is_few_writes_at_once_and_no_write_touches_two(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .image_size = 16 << 20, .log.no_destage = true,
				      .image_dev = { .object = 4 << 20, .opt_depth = 64 } }, co_objects);
}

/* --- Holes --- */

#define FILL_IMAGE (4u << 20)

/* What the image should hold, byte by byte. */
static uint8_t model[FILL_IMAGE], held[FILL_IMAGE];

static co_fn void co_set(struct world *k, uint64_t off, uint64_t len, uint8_t byte)
{
	memset(model + off, byte, len);
	CHECK_EQ(co_disk_write(k->vol, off, model + off, len, 0), 0);
}

static co_fn void co_holds_model(struct world *k, uint64_t len)
{
	k->image->trace = NULL;
	CHECK_EQ(co_disk_read(k->image, 0, held, len, 0), 0);
	CHECK(memcmp(held, model, len) == 0);
	k->image->trace = watch;
	k->image->trace_arg = k;
}

/* `n` pieces of 8 KiB, each with `hole` bytes behind it; they are drained. */
static co_fn void co_drain_pieces(struct world *k, unsigned n, uint64_t hole)
{
	for (unsigned i = 0; i < n; i++)
		co_set(k, i * (8192 + hole), 8192, (uint8_t)(1 + i));
	CHECK_EQ(co_disk_flush(k->vol), 0);
	k->reads = k->writes = 0;
	CHECK_EQ(co_wlog_drain(k->w, NULL, NULL, NULL), 0);
	unsigned reads = k->reads, writes = k->writes;

	co_holds_model(k, FILL_IMAGE);
	k->reads = reads;
	k->writes = writes;
}

static co_fn void co_begin_fill(struct env *e, struct world *k, bool sole_writer)
{
	co_env_start(e, 1, NULL);
	struct disk *image = e->vol[0]->file;

	*k = (struct world){ .w = e->w, .image = image, .vol = e->vol[0] };
	image->limits.sole_writer = sole_writer;
	co_flush(e, 0);
	for (uint64_t off = 0; off < FILL_IMAGE; off += 1 << 20)
		co_set(k, off, 1 << 20, (uint8_t)(0x80 + (off >> 20)));
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	co_holds_model(k, FILL_IMAGE);
}

static co_fn void co_fill(struct env *e)
{
	const uint64_t step = 12288;
	struct world k;

	co_begin_fill(e, &k, true);
	/* 300 pieces in four pieces of an object: a read and a write of each. */
	co_drain_pieces(&k, 300, step - 8192);
	CHECK_EQ(k.writes, (300 * step + WL_RUN_MAX - 1) / WL_RUN_MAX);
	CHECK_EQ(k.reads, k.writes);
	CHECK_EQ(k.longest, WL_RUN_MAX);
	/* Too few to be worth a read; holes as large as what is dirty; larger. */
	co_drain_pieces(&k, 3, 4096);
	CHECK_EQ(k.writes, 3);
	CHECK_EQ(k.reads, 0);
	co_drain_pieces(&k, 8, 8192);
	CHECK_EQ(k.writes, 1);
	co_drain_pieces(&k, 8, 8192 + 512);
	CHECK_EQ(k.writes, 8);
	/* Zeroes are no hole, and are not written over. */
	for (unsigned i = 0; i < 32; i++)
		co_set(&k, 1 * MiB + i * step, 8192, 0x55);
	memset(model + MiB + 15 * step, 0, step);
	CHECK_EQ(co_disk_zero(k.vol, MiB + 15 * step, step, 0), 0);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	co_holds_model(&k, FILL_IMAGE);
	CHECK_EQ(co_env_close(e), 0);
}

static const struct env_config fill_env = { .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .image_size = FILL_IMAGE, .log.no_destage = true,
					    .image_dev = { .object = 4 << 20, .opt_depth = 64 } };

static void what_is_dirty_is_written_together_with_the_small_holes_between(void)
{
	env_run(&fill_env, co_fill);
}

static co_fn void co_fill_shared(struct env *e)
{
	struct world k;

	co_begin_fill(e, &k, false);
	co_drain_pieces(&k, 80, 4096);
	CHECK_EQ(k.writes, 80);
	CHECK_EQ(k.reads, 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_hole_that_somebody_else_might_write_to_is_left_alone(void)
{
	env_run(&fill_env, co_fill_shared);
}

static co_fn void co_fill_unreadable(struct env *e)
{
	struct world k;

	co_begin_fill(e, &k, true);
	k.read_error = -EIO;
	co_drain_pieces(&k, 80, 4096);
	CHECK_EQ(k.writes, 80);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_hole_that_cannot_be_read_holds_nothing_up(void)
{
	env_run(&fill_env, co_fill_unreadable);
}

struct drain {
	struct world *k;
	bool done;
};

static co_fn void co_drainer(void *arg)
{
	struct drain *d = arg;

	CHECK_EQ(co_wlog_drain(d->k->w, NULL, NULL, NULL), 0);
	d->done = true;
}

/* The guest writes into holes and over pieces at every moment of a drain: what it wrote is there in the end, and all the time. */
static co_fn void co_fill_race(struct env *e)
{
	struct world k;

	co_begin_fill(e, &k, true);
	for (unsigned step = 0; step < 24; step++) {
		struct drain d = { .k = &k };

		for (unsigned i = 0; i < 20; i++)
			co_set(&k, i * 12288, 8192, (uint8_t)(step * 4 + i));
		CHECK_EQ(co_disk_flush(k.vol), 0);
		CHECK_EQ(co_spawn("drain", co_drainer, &d), 0);
		co_sleep_ns(step * 16000);
		for (unsigned i = 0; i < 20; i += 3)
			co_set(&k, i * 12288 + 6144, 4096, (uint8_t)(0x90 + step));
		CHECK_EQ(co_disk_flush(k.vol), 0);
		CHECK_EQ(co_disk_read(k.vol, 0, held, 256 << 10, 0), 0);
		CHECK(memcmp(held, model, 256 << 10) == 0);
		while (!d.done)
			co_sleep_ns(100000);
		CHECK_EQ(co_disk_read(k.vol, 0, held, 256 << 10, 0), 0);
		CHECK(memcmp(held, model, 256 << 10) == 0);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		co_holds_model(&k, 256 << 10);
	}
	CHECK_EQ(co_env_close(e), 0);
}

static void what_the_guest_writes_into_a_hole_meanwhile_is_not_lost(void)
{
	struct env_config c = fill_env;

	c.image_dev.latency_ns = 200000;
	env_run(&c, co_fill_race);
}

/* --- The guest comes first --- */

struct guest {
	struct world *k;
	bool reads, stop;
};

static co_fn void co_guest(void *arg)
{
	struct guest *g = arg;
	uint8_t block[512];

	while (!g->stop) {
		if (g->reads)
			CHECK_EQ(co_disk_read(g->k->vol, 60 << 20, block, sizeof(block), 0), 0);
		else
			co_record(g->k, 60 << 20, 512);
		co_sleep_ns(1 * MS);
	}
	g->reads = g->stop = false;
}

/* The most image writes at once while a guest does this. */
static co_fn unsigned co_peak(bool busy, bool reads)
{
	const struct wlog_config c = { .no_destage = true, .low_pct = 90 };
	struct guest g;
	struct world k;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
	co_scatter(&k, 600, false);
	g = (struct guest){ .k = &k, .reads = reads };
	if (busy)
		CHECK_EQ(co_spawn("guest", co_guest, &g), 0);
	co_sleep_ns(2 * SEC);	/* the data has rested */
	k.w->config.no_destage = false;
	wl_destage_kick(container_of(k.vol, struct wlog_volume, disk));
	co_sleep_ns(1 * SEC);
	if (!reads)
		CHECK(k.writes >= 600);
	unsigned peak = k.peak;

	g.stop = busy;
	while (g.stop)
		co_sleep_ns(1 * MS);
	co_end_world(&k);
	return peak;
}

static co_fn void co_back_off(struct env *e)
{
	CHECK_EQ(co_peak(false, false), WL_DEPTH_MAX);
	CHECK_EQ(co_peak(true, false), WL_DEPTH_MAX / 4);
	/* The read is in flight as well. */
	unsigned reading = co_peak(true, true);

	CHECK(reading >= WL_DEPTH_MAX / 16 && reading <= WL_DEPTH_MAX / 16 + 1);
}

static void without_hurry_destage_gives_way_to_the_guest(void)
{
	env_run(NULL, co_back_off);
}

/* Beside a guest that writes and flushes without a pause. */
struct beside {
	unsigned commits, disturbed; /* commits with an image write in flight */
	unsigned slow;		/* that did not take what they take on an idle machine */
	unsigned fullest;	/* permille */
};

static co_fn void co_commit_on(struct world *k, struct beside *b, unsigned n, uint64_t stride)
{
	struct wlog_volume *v = container_of(k->vol, struct wlog_volume, disk);
	static unsigned at;

	for (unsigned i = 0; i < n; i++, at++) {
		uint64_t began = rt_now_ns();
		bool busy = k->image->in_flight;

		co_record(k, at * stride % (60 * MiB), RECORD);
		CHECK_EQ(co_disk_flush(k->vol), 0);
		b->commits++;
		b->disturbed += busy || k->image->in_flight;
		b->slow += rt_now_ns() - began > 101 * MS / 1000;
		unsigned fill = wl_fill_permille(v);

		b->fullest = max(b->fullest, fill);
	}
}

static co_fn void co_bursts(struct env *e)
{
	struct world k;
	struct beside b = { 0 };

	/* The log is written around three times, by neighbours, with the usual delay and watermarks. */
	co_begin_world(&k, LOG "16M", SLOW, &(struct wlog_config){ .memory = 4 << 20 }, WLOG_DESTAGE_MERGED);
	co_commit_on(&k, &b, 3 * 16 * MiB / RECORD, RECORD);
	printf("  neighbours: %u of %u commits had an image write beside them, %u were slowed; the log was up to %u permille full\n", b.disturbed, b.commits, b.slow, b.fullest);
	CHECK(b.disturbed < b.commits / 3);
	CHECK(b.slow < b.commits / 500);	/* those behind a superblock */
	CHECK(b.fullest < 600);
	/* In a log with room, too, where it is age that counts. */
	co_end_world(&k);
	co_begin_world(&k, LOG "256M", SLOW, &(struct wlog_config){ .destage_delay_ns = 50 * MS, .memory = 4 << 20 }, WLOG_DESTAGE_MERGED);
	b = (struct beside){ 0 };
	co_commit_on(&k, &b, 6000, STRIDE);
	struct wlog_volume *v = container_of(k.vol, struct wlog_volume, disk);

	printf("  scattered: %u of %u, %u slowed, up to %u permille; the oldest is %llu ms old\n", b.disturbed, b.commits, b.slow, b.fullest,
	       (unsigned long long)((rt_wall_ns() - v->dirty_since) / MS));
	CHECK(b.disturbed < b.commits / 2);
	CHECK(b.slow < b.commits / 500);
	/* The guest pauses: what is left goes at full depth. */
	uint64_t records = v->map.entries, began = rt_now_ns();

	CHECK(records > 100);
	k.peak = 0;
	while (wl_is_dirty(v))
		co_sleep_ns(1 * MS);
	CHECK_EQ(k.peak, WL_DEPTH_MAX);
	CHECK(rt_now_ns() - began < 200 * MS + records * SLOW_NS / 10);
	co_end_world(&k);
}

static void beside_a_guest_destage_works_in_bursts_and_the_log_does_not_fill(void)
{
	env_run(NULL, co_bursts);
}

static co_fn void co_no_room(struct env *e)
{
	struct world k;
	struct beside b = { 0 };

	/* Scattered records come four times as fast as the store takes them at its full depth: then that is what it does, and the guest gets its rate. */
	co_begin_world(&k, LOG "16M", "delay:write=25ms,flush=2ms,read=2ms:mem:64M", &(struct wlog_config){ 0 }, WLOG_DESTAGE_MERGED);
	uint64_t began = rt_now_ns();

	co_commit_on(&k, &b, 3000, STRIDE);
	printf("  a store that is too slow: %u of %u commits slowed, %.2f of its rate reached\n", b.slow, b.commits,
	       3000.0 / WL_DEPTH_MAX * 25 * MS / (rt_now_ns() - began));
	CHECK(b.fullest >= 600);
	CHECK_EQ(k.peak, WL_DEPTH_MAX);
	CHECK(3000 / WL_DEPTH_MAX * 25 * MS >= (rt_now_ns() - began) / 2);
	co_end_world(&k);
}

static void a_guest_that_is_faster_than_the_store_gets_all_of_the_store(void)
{
	env_run(NULL, co_no_room);
}

/* --- What the guest notices --- */

static co_fn void co_think(struct env *e)
{
	struct world k;

	for (unsigned destage = 0; destage < 2; destage++) {
		/* Destage follows at once: after each pause the log is clean again. */
		const struct wlog_config c = { .destage_delay_ns = 1 };

		co_begin_world(&k, LOG "64M", SLOW, &c, destage ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED);
		uint64_t without = co_median_ns(&k, COMMITS, 0), with = co_median_ns(&k, COMMITS, 2 * MS);
		uint64_t longer = co_median_ns(&k, COMMITS / 4, 10 * MS);

		printf("  median of a write and its flush: %llu ns; with 2 ms between %llu, with 10 ms %llu\n", (unsigned long long)without,
		       (unsigned long long)with, (unsigned long long)longer);
		CHECK(with <= without + without / 10);
		CHECK(longer <= without + without / 10);
		co_end_world(&k);
	}
}

static void think_time_costs_nothing(void)
{
	env_run(NULL, co_think);
}

static co_fn void co_half_full(struct env *e)
{
	for (unsigned destage = 0; destage < 2; destage++) {
		struct world k;

		co_begin_world(&k, LOG "16M", SLOW, &(struct wlog_config){ .no_destage = true }, destage ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED);
		struct wlog_volume *v = container_of(k.vol, struct wlog_volume, disk);
		uint64_t empty = co_median_ns(&k, 100, 0), at = 32 << 20;
		unsigned destaged = 0;

		while (wl_fill_permille(v) < 520) {
			co_record(&k, at, RECORD);
			at += STRIDE;
		}
		CHECK_EQ(co_disk_flush(k.vol), 0);
		k.w->config.no_destage = false;
		wl_destage_kick(v);
		co_sleep_ns(1);
		uint64_t full = co_median_ns(&k, 100, 0);

		destaged = k.writes;
		printf("  median of a write and its flush: %llu ns in an empty log; %llu in one that is %u permille full, with %u image writes meanwhile\n",
		       (unsigned long long)empty, (unsigned long long)full, wl_fill_permille(v), destaged);
		CHECK(wl_fill_permille(v) > 500);
		CHECK(destaged > (destage ? 1 : 100));	/* an epoch of one record after the other */
		CHECK(full <= empty + empty / 100);
		co_end_world(&k);
	}
}

static void a_log_more_than_half_full_keeps_its_speed(void)
{
	env_run(NULL, co_half_full);
}

static co_fn void co_close_dirty(struct env *e)
{
	for (unsigned destage = 0; destage < 2; destage++) {
		struct world k;

		co_begin_world(&k, LOG "64M", "delay:write=100ms,flush=100ms:mem:64M", &(struct wlog_config){ .destage_delay_ns = 1 },
			       destage ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED);
		co_scatter(&k, 4000, false);
		co_sleep_ns(150 * MS);
		uint64_t began = rt_now_ns();

		CHECK(wl_dirty_bytes(container_of(k.vol, struct wlog_volume, disk)) > 16 << 20);
		co_end_world(&k);
		printf("  closed after %llu ms\n", (unsigned long long)((rt_now_ns() - began) / MS));
		CHECK(rt_now_ns() - began < 1 * SEC);
	}
}

static void closing_with_a_dirty_log_takes_less_than_a_second(void)
{
	env_run(NULL, co_close_dirty);
}

int main(void)
{
	backends_register();
	log_set_level(LOG_NONE);
	RUN(small_synchronous_writes_drain_ten_times_as_fast_as_the_store_takes_them_one_by_one);
	RUN(one_epoch_drains_as_fast_and_two_never_at_once);
	RUN(neighbours_become_one_write);
	RUN(a_whole_object_is_few_writes_at_once_and_no_write_touches_two);
	RUN(what_is_dirty_is_written_together_with_the_small_holes_between);
	RUN(a_hole_that_somebody_else_might_write_to_is_left_alone);
	RUN(a_hole_that_cannot_be_read_holds_nothing_up);
	RUN(what_the_guest_writes_into_a_hole_meanwhile_is_not_lost);
	RUN(without_hurry_destage_gives_way_to_the_guest);
	RUN(beside_a_guest_destage_works_in_bursts_and_the_log_does_not_fill);
	RUN(a_guest_that_is_faster_than_the_store_gets_all_of_the_store);
	RUN(think_time_costs_nothing);
	RUN(a_log_more_than_half_full_keeps_its_speed);
	RUN(closing_with_a_dirty_log_takes_less_than_a_second);
	return 0;
}
