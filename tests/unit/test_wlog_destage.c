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
#define GUEST (60ull << 20)	/* where a guest works meanwhile, behind all records */
#define MiB (1ull << 20)

/* TSan, under which each round takes many times as long, sees in a third what it would in all of them. */
static unsigned rounds(unsigned n)
{
	return TEST_SLOWER >= 20 ? n / 3 : n;
}

/* A log and a volume on disks whose every request takes the same time. */
struct world {
	struct wlog *w;
	struct disk *image, *vol;
	unsigned peak, writes, reads;
	unsigned guests;	/* of the writes: what a guest wrote meanwhile */
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
	k->guests += off == GUEST;
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
	const unsigned n = rounds(1024);

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
	const unsigned n = rounds(1000);
	struct world k;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
	for (unsigned i = 0; i < n; i++)
		co_record(&k, (uint64_t)i * RECORD, RECORD);
	co_drain_ns(&k);
	CHECK_EQ(k.write_bytes, n * RECORD);
	CHECK_EQ(k.writes, (n * RECORD + (1 << 20) - 1) >> 20);
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

static struct wlog_volume_config fill_config;

static co_fn void co_begin_fill(struct env *e, struct world *k, bool sole_writer)
{
	co_env_start(e, 1, &fill_config);
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

/* Zeroes (0) or a discard (DISK_UNMAP). */
static co_fn void co_clear(struct world *k, uint64_t off, uint64_t len, unsigned flags)
{
	memset(model + off, 0, len);
	CHECK_EQ(co_disk_zero(k->vol, off, len, flags), 0);
}

/* Into the hole behind piece `i` of 8 KiB and over its end; over the piece's middle; or all of the hole. */
static co_fn void co_meddle(struct world *k, unsigned i, uint8_t byte)
{
	static const struct { uint64_t off, len; } place[] = { { 6144, 4096 }, { 2048, 4096 }, { 8192, 4096 } };
	uint64_t off = i * 12288 + place[i % 3].off, len = place[i % 3].len;

	if (i / 3 % 3 == 0)
		co_set(k, off, len, byte);
	else
		co_clear(k, off, len, i / 3 % 3 == 1 ? 0 : DISK_UNMAP);
}

static co_fn void co_volume_holds_model(struct world *k)
{
	CHECK_EQ(co_disk_read(k->vol, 0, held, 384 << 10, 0), 0);
	CHECK(memcmp(held, model, 384 << 10) == 0);
}

/* The guest writes, zeroes and discards in holes and over pieces at every moment of a drain: what it did is there in the end, and all the time. */
static co_fn void co_fill_race(struct env *e)
{
	struct world k;

	co_begin_fill(e, &k, true);
	/* Two requests of 50 us to 200 us make a round. */
	for (unsigned step = 0; step < 24; step += TEST_SLOWER >= 20 ? 3 : 1) {
		struct drain d = { .k = &k };

		for (unsigned i = 0; i < 27; i++)
			co_set(&k, i * 12288, 8192, (uint8_t)(step * 4 + i));
		CHECK_EQ(co_disk_flush(k.vol), 0);
		k.reads = 0;
		CHECK_EQ(co_spawn("drain", co_drainer, &d), 0);
		co_sleep_ns(step * 16000);
		for (unsigned i = 0; i < 27; i += 1 + step % 2)
			co_meddle(&k, i, (uint8_t)(0x90 + step));
		CHECK_EQ(co_disk_flush(k.vol), 0);
		co_volume_holds_model(&k);
		while (!d.done)
			co_sleep_ns(100000);
		CHECK(k.reads > 0);	/* holes were filled */
		co_volume_holds_model(&k);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		co_holds_model(&k, 384 << 10);
	}
	CHECK_EQ(co_env_close(e), 0);
}

static void what_the_guest_does_in_a_hole_meanwhile_is_not_lost(void)
{
	struct env_config c = fill_env;

	c.image_dev.latency_ns = 200000;
	for (unsigned destage = 0; destage < 2; destage++) {
		fill_config.destage = destage ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED;
		env_run(&c, co_fill_race);
	}
	fill_config.destage = WLOG_DESTAGE_MERGED;
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
			CHECK_EQ(co_disk_read(g->k->vol, GUEST, block, sizeof(block), 0), 0);
		else
			co_record(g->k, GUEST, 512);
		co_sleep_ns(1 * MS);
	}
	g->reads = g->stop = false;
}

/* The most image writes at once while a guest does this. */
static co_fn unsigned co_peak(bool busy, bool reads)
{
	const struct wlog_config c = { .no_destage = true, .low_pct = 90 };
	const unsigned n = rounds(600);
	struct guest g;
	struct world k;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
	co_scatter(&k, n, false);
	g = (struct guest){ .k = &k, .reads = reads };
	if (busy)
		CHECK_EQ(co_spawn("guest", co_guest, &g), 0);
	co_sleep_ns(2 * SEC);	/* the data has rested */
	k.w->config.no_destage = false;
	wl_destage_kick(container_of(k.vol, struct wlog_volume, disk));
	co_sleep_ns(1 * SEC);
	if (!reads)
		CHECK_EQ(k.writes - k.guests, n);
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
	unsigned unexplained;	/* of those: no superblock was written meanwhile */
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
		if (rt_now_ns() - began > 101 * MS / 1000) {
			b->slow++;
			b->unexplained += k->w->sb_written_ns < began;
		}
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
	co_commit_on(&k, &b, rounds(3) * 16 * MiB / RECORD, RECORD);
	printf("  neighbours: %u of %u commits had an image write beside them, %u were slowed; the log was up to %u permille full\n", b.disturbed, b.commits, b.slow, b.fullest);
	CHECK(b.disturbed < b.commits / 3);
	CHECK(b.slow < b.commits / 500);
	CHECK_EQ(b.unexplained, 0);
	CHECK(b.fullest < 600);
	/* In a log with room, too, where it is age that counts. */
	co_end_world(&k);
	co_begin_world(&k, LOG "256M", SLOW, &(struct wlog_config){ .destage_delay_ns = 50 * MS, .memory = 4 << 20 }, WLOG_DESTAGE_MERGED);
	b = (struct beside){ 0 };
	co_commit_on(&k, &b, rounds(6) * 1000, STRIDE);
	struct wlog_volume *v = container_of(k.vol, struct wlog_volume, disk);

	printf("  scattered: %u of %u, %u slowed, up to %u permille; the oldest is %llu ms old\n", b.disturbed, b.commits, b.slow, b.fullest,
	       (unsigned long long)((rt_wall_ns() - v->dirty_since) / MS));
	CHECK(b.disturbed < b.commits / 2);
	CHECK(b.slow < b.commits / 500);
	CHECK_EQ(b.unexplained, 0);
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

/* --- Rests --- */

static struct wlog_volume *volume_of(struct world *k)
{
	return container_of(k->vol, struct wlog_volume, disk);
}

static bool is_resting(struct world *k)
{
	return volume_of(k)->burst_ns >= 20 * MS;
}

/* A guest that reads from the image, and destage that has just begun to rest for seven times a burst of 20 ms. */
static co_fn void co_begin_rest(struct world *k, struct guest *g)
{
	static const struct wlog_config c = { .no_destage = true };

	co_begin_world(k, LOG "256M", SLOW, &c, WLOG_DESTAGE_MERGED);
	co_scatter(k, 300, false);
	co_sleep_ns(2 * SEC);	/* the data has rested */
	*g = (struct guest){ .k = k, .reads = true };
	CHECK_EQ(co_spawn("guest", co_guest, g), 0);
	k->w->config.no_destage = false;
	wl_destage_kick(volume_of(k));
	while (!is_resting(k))
		co_sleep_ns(MS / 10);
	/* Nothing ends it by itself. */
	unsigned writes = k->writes;

	co_sleep_ns(20 * MS);
	CHECK(is_resting(k));
	CHECK_EQ(k->writes, writes);
	CHECK(volume_of(k)->map.entries > WL_DEPTH_MAX);
	k->peak = 0;
}

static co_fn void co_end_guest(struct guest *g)
{
	g->stop = true;
	while (g->stop)
		co_sleep_ns(1 * MS);
}

static co_fn void co_end_of_rest(struct env *e)
{
	struct world k;
	struct guest g;
	struct drain d = { .k = &k };

	co_begin_rest(&k, &g);
	CHECK_EQ(co_spawn("drain", co_drainer, &d), 0);
	co_sleep_ns(1 * MS);
	CHECK(!is_resting(&k));
	CHECK(k.peak >= WL_DEPTH_MAX);
	while (!d.done)
		co_sleep_ns(1 * MS);
	co_end_guest(&g);
	co_end_world(&k);

	/* The guest falls silent. */
	co_begin_rest(&k, &g);
	co_end_guest(&g);
	co_sleep_ns(12 * MS);
	CHECK(!is_resting(&k));
	CHECK_EQ(k.peak, WL_DEPTH_MAX);
	co_end_world(&k);

	/* The volume stops; the last read of the guest was a moment ago. */
	co_begin_rest(&k, &g);
	co_end_guest(&g);
	CHECK(is_resting(&k));
	uint64_t began = rt_now_ns();

	co_disk_close(k.vol);
	CHECK(rt_now_ns() - began < 7 * MS);
	CHECK_EQ(k.peak, 0);
	CHECK_EQ(co_wlog_close(k.w), 0);
}

static void a_rest_ends_with_a_drain_a_stop_and_a_silent_guest(void)
{
	env_run(NULL, co_end_of_rest);
}

static co_fn void co_large_writer(void *arg)
{
	struct drain *d = arg;
	const uint64_t len = 7 << 20;
	uint8_t *data = calloc(1, len);

	CHECK_EQ(co_disk_write(d->k->vol, 48 << 20, data, len, 0), 0);
	free(data);
	d->done = true;
}

/* One client writes what its volume's share has no room for, far below the high watermark, and another one reads. */
static co_fn void co_room_waiter(struct env *e)
{
	struct world k;
	struct guest g;
	struct drain d = { .k = &k };

	co_begin_rest(&k, &g);
	struct wlog_volume *v = volume_of(&k);

	k.w->sb.vol[v->slot].quota = 8 << 20;
	CHECK(wl_fill_permille(v) < 300);
	CHECK_EQ(co_spawn("writer", co_large_writer, &d), 0);
	co_sleep_ns(MS / 10);
	CHECK(!co_queue_is_empty(&v->room));
	while (!co_queue_is_empty(&v->room)) {
		CHECK(!is_resting(&k));
		co_sleep_ns(MS / 10);
	}
	CHECK(k.peak >= WL_DEPTH_MAX);
	while (!d.done)
		co_sleep_ns(1 * MS);
	co_end_guest(&g);
	co_end_world(&k);
}

static void for_who_waits_for_the_volumes_share_there_is_no_rest_and_all_of_the_depth(void)
{
	env_run(NULL, co_room_waiter);
}

/* The index is short, and what is in it is not all of those who wait. */
static co_fn void co_index_waiter(struct env *e)
{
	const struct wlog_config c = { .no_destage = true };
	struct world k;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
	co_scatter(&k, 10, false);
	struct wlog_volume *v = volume_of(&k);
	uint64_t used = k.w->pool.used;

	k.w->pool.used = k.w->pool.cap - WL_POOL_RESERVE + 1;
	CHECK(!wl_is_urgent(v));
	CHECK(wl_guest_comes_first(v));
	k.w->room_waiters++;	/* of another volume */
	CHECK(wl_is_urgent(v));
	CHECK(!wl_guest_comes_first(v));
	/* For the share of another volume it need not hurry. */
	k.w->pool.used = used;
	CHECK(!wl_is_urgent(v));
	CHECK(wl_guest_comes_first(v));
	k.w->room_waiters--;
	co_end_world(&k);
}

static void for_who_waits_for_a_short_index_all_volumes_hurry(void)
{
	env_run(NULL, co_index_waiter);
}

static co_fn void co_hang(struct env *e)
{
	struct guest g;

	co_env_start(e, 1, NULL);
	struct world k = { .w = e->w, .image = e->vol[0]->file, .vol = e->vol[0] };

	k.image->limits.sole_writer = false;	/* each piece is a run */
	co_flush(e, 0);
	co_scatter(&k, 300, false);
	powercut_dev_stall(e->image[0], true);
	co_sleep_ns(2 * SEC);
	e->w->config.no_destage = false;
	wl_destage_kick(volume_of(&k));
	co_sleep_ns(60 * SEC);
	g = (struct guest){ .k = &k };
	CHECK_EQ(co_spawn("guest", co_guest, &g), 0);
	co_sleep_ns(2 * MS);
	powercut_dev_stall(e->image[0], false);
	while (!is_resting(&k))
		co_sleep_ns(MS / 10);
	uint64_t began = rt_now_ns();

	while (is_resting(&k) && rt_now_ns() - began < 2 * SEC)
		co_sleep_ns(1 * MS);
	printf("  a rest of %llu ms behind a hang of 60 s\n", (unsigned long long)((rt_now_ns() - began) / MS));
	CHECK(rt_now_ns() - began <= 1 * SEC + 10 * MS);
	co_end_guest(&g);
	CHECK_EQ(co_env_close(e), 0);
}

static void behind_a_store_that_hung_destage_rests_for_a_second_at_most(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .image_size = 64 << 20, .log.no_destage = true,
				      .image_dev = { .object = 4 << 20, .opt_depth = 64 } }, co_hang);
}

static co_fn void co_ordered_beside(struct env *e)
{
	const struct wlog_config c = { .no_destage = true };
	struct world k;
	struct guest g;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_ORDERED);
	co_scatter(&k, 100, true);
	co_sleep_ns(2 * SEC);
	g = (struct guest){ .k = &k, .reads = true };
	CHECK_EQ(co_spawn("guest", co_guest, &g), 0);
	k.w->config.no_destage = false;
	wl_destage_kick(volume_of(&k));
	uint64_t began = rt_now_ns();

	while (wl_is_dirty(volume_of(&k)))
		co_sleep_ns(1 * MS);
	/* A write, a flush, and the floor in the superblock. */
	CHECK(rt_now_ns() - began <= 100 * (2 * SLOW_NS + 1 * MS));
	co_end_guest(&g);
	co_end_world(&k);
}

static void between_ordered_epochs_there_are_no_rests(void)
{
	env_run(NULL, co_ordered_beside);
}

/* --- What is newer than a round --- */

static co_fn void co_take_turn(void *arg)
{
	++*(unsigned *)arg;
}

static co_fn void co_newer(struct env *e)
{
	const struct wlog_config c = { .no_destage = true };
	const unsigned newer = TEST_SLOWER >= 20 ? 9000 : 20000, n = 200;
	struct world k;
	uint64_t end;
	bool all;

	co_begin_world(&k, LOG "64M", SLOW, &c, WLOG_DESTAGE_MERGED);
	struct wlog_volume *v = volume_of(&k);

	/* Old pieces at both ends, at the bottom as many as go at once; many more newer ones between. */
	for (unsigned i = 0; i < n; i++)
		co_record(&k, (i < WL_DEPTH_MAX ? 0 : 32 << 20) + (uint64_t)i * STRIDE, 512);
	CHECK_EQ(co_disk_flush(k.vol), 0);
	uint64_t cap = v->applied_rno;

	for (unsigned i = 0; i < newer; i++)
		co_record(&k, 4 * MiB + (uint64_t)i * 1024, 512);
	CHECK_EQ(co_disk_flush(k.vol), 0);
	CHECK_EQ(v->map.entries, newer + n);
	co_sleep_ns(20 * MS);	/* the guest rests */
	k.writes = k.peak = 0;
	CHECK_EQ(co_wl_write_runs(v, &v->map, cap, 0, &end, &all), 0);
	CHECK(all);
	CHECK_EQ(k.writes, n);
	CHECK_EQ(k.peak, WL_DEPTH_MAX);	/* so none was free for the one behind them */
	CHECK_EQ(v->passed_over, newer);

	/* All of it is newer, and nothing has to be waited for: of 32 that are ready, which come in any order, some have a turn at one of the occasions. */
	unsigned turns = 0;

	for (unsigned i = 0; i < 32; i++)
		CHECK_EQ(co_spawn("other", co_take_turn, &turns), 0);
	CHECK_EQ(co_wl_write_runs(v, &v->map, 0, 0, &end, &all), 0);
	CHECK(all);
	CHECK_EQ(k.writes, n);
	CHECK(turns > 0);
	while (turns < 32)
		co_sleep_ns(1);
	co_end_world(&k);
}

static void what_is_newer_than_a_round_is_passed_over_once_and_with_turns_for_others(void)
{
	env_run(NULL, co_newer);
}

/* --- What the guest notices --- */

static co_fn void co_think(struct env *e)
{
	struct world k;

	for (unsigned destage = 0; destage < 2; destage++) {
		/* Destage follows at once: after each pause the log is clean again. */
		const struct wlog_config c = { .destage_delay_ns = 1 };

		co_begin_world(&k, LOG "64M", SLOW, &c, destage ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED);
		uint64_t without = co_median_ns(&k, rounds(COMMITS), 0), with = co_median_ns(&k, rounds(COMMITS), 2 * MS);
		uint64_t longer = co_median_ns(&k, rounds(COMMITS / 4), 10 * MS);

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
		const unsigned n = rounds(4000);

		co_scatter(&k, n, false);
		co_sleep_ns(150 * MS);
		uint64_t began = rt_now_ns();

		/* No flush of the image has ended: nothing that was written is clean. */
		CHECK_EQ(wl_dirty_bytes(container_of(k.vol, struct wlog_volume, disk)), (uint64_t)n * RECORD);
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
	RUN(what_the_guest_does_in_a_hole_meanwhile_is_not_lost);
	RUN(without_hurry_destage_gives_way_to_the_guest);
	RUN(beside_a_guest_destage_works_in_bursts_and_the_log_does_not_fill);
	RUN(a_guest_that_is_faster_than_the_store_gets_all_of_the_store);
	RUN(a_rest_ends_with_a_drain_a_stop_and_a_silent_guest);
	RUN(for_who_waits_for_the_volumes_share_there_is_no_rest_and_all_of_the_depth);
	RUN(for_who_waits_for_a_short_index_all_volumes_hurry);
	RUN(behind_a_store_that_hung_destage_rests_for_a_second_at_most);
	RUN(between_ordered_epochs_there_are_no_rests);
	RUN(what_is_newer_than_a_round_is_passed_over_once_and_with_turns_for_others);
	RUN(think_time_costs_nothing);
	RUN(a_log_more_than_half_full_keeps_its_speed);
	RUN(closing_with_a_dirty_log_takes_less_than_a_second);
	return 0;
}
