/* SPDX-License-Identifier: MIT */
/* Space in the ring, in memory and in the index: who may take it, who waits for it, and that nobody waits for ever. */
#include "rt/sync.h"
#include "wlog_env.h"

static struct wlog_volume *volume(struct env *e, unsigned i)
{
	return container_of(e->vol[i], struct wlog_volume, disk);
}

/* --- Writers in the background --- */

struct writer {
	struct env *e;
	unsigned vol;
	uint64_t first, blocks, each;	/* writes `each` blocks at a time, round and round over [first, first + blocks) */
	uint64_t count, done, version;	/* writes to do; done */
	unsigned flush_every;
	uint64_t longest_ns;
	bool ended, stop;
	int error;
	struct co_queue q;
};

static co_fn void co_writer(void *arg)
{
	struct writer *k = arg;

	for (; k->done < k->count && !k->stop && !k->error; k->done++) {
		uint64_t began = rt_now_ns(), at = k->done * k->each % (k->blocks - k->blocks % k->each);

		k->error = co_env_put(k->e->vol[k->vol], k->first + at, k->each, k->version + k->done * k->each / k->blocks, 0);
		if (!k->error && k->flush_every && k->done % k->flush_every == 0)
			k->error = co_disk_flush(k->e->vol[k->vol]);
		k->longest_ns = max(k->longest_ns, rt_now_ns() - began);
		co_yield();
	}
	k->ended = true;
	co_queue_wake_all(&k->q);
}

static void start_writer(struct writer *k, struct env *e, unsigned vol, uint64_t first, uint64_t blocks, uint64_t each, uint64_t count)
{
	*k = (struct writer){ .e = e, .vol = vol, .first = first, .blocks = blocks, .each = each, .count = count, .version = 1,
			      .flush_every = 16 };
	co_queue_init(&k->q);
	CHECK_EQ(co_spawn("writer", co_writer, k), 0);
}

/* True if it ended within `limit` of virtual time. */
static co_fn bool co_ends(struct writer *k, uint64_t limit)
{
	uint64_t deadline = rt_now_ns() + limit;

	while (!k->ended && co_queue_wait_until(&k->q, deadline, "a writer"))
		;
	return k->ended;
}

static co_fn void co_join(struct writer *k)
{
	if (!co_ends(k, 300 * SEC)) {
		rt_dump_tasks(rt_self(), stderr);
		test_fail("volume %u: a writer hangs after %llu of %llu writes", k->vol, (unsigned long long)k->done,
			  (unsigned long long)k->count);
	}
	CHECK_EQ(k->error, 0);
}

/* --- Memory --- */

static co_fn void co_large_write(struct env *e)
{
	uint64_t max_io, blocks;
	struct writer k, s;

	co_env_start(e, 2, NULL);
	max_io = e->vol[0]->limits.max_io;
	CHECK(max_io >= 1 << 20);
	blocks = max_io / ENV_BLOCK;
	/* Small writers in the same batches make it no worse. */
	start_writer(&s, e, 1, 0, 512, 8, 2000);
	start_writer(&k, e, 0, 0, 2 * blocks, blocks, 6);
	co_join(&k);
	s.stop = true;
	co_join(&s);
	EXPECT_BLOCKS(e, 0, 0, blocks, 3);
	CHECK_EQ(co_env_close(e), 0);
}

static void the_largest_request_fits_a_small_memory(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (64 << 20), .image_size = 64 << 20,
				      .log.memory = 4 << 20 }, co_large_write);
}

/* Dirty data that does not fit memory is read back from the log. */
static co_fn void co_spilled(struct env *e)
{
	struct wlog_info info;
	struct env c;
	struct wl_bhead h;
	uint64_t pos;
	int r;

	co_env_start(e, 1, NULL);
	for (uint64_t i = 0; i < 128; i++)
		co_put(e, 0, i * 16, 16, 1);
	co_flush(e, 0);
	wlog_get_info(e->w, &info);
	CHECK(info.memory_limit < 128 * 16 * ENV_BLOCK);
	EXPECT_BLOCKS(e, 0, 0, 2048, 1);
	/* Rot in the log: never wrong data. */
	env_fork(e, &c, 1);
	co_env_close(e);
	pos = env_find_batch(&c, 0, 3, &h);
	CHECK(pos);
	env_flip(&c, 0, pos + WL_B_HEADER + 5 * 4096 + 77);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	unsigned bad = 0;

	for (uint64_t i = 0; i < 2048; i++) {
		uint64_t version = co_env_get(c.vol[0], i, &r);

		bad += r == -EIO;
		CHECK(r == -EIO || (r == 0 && version == 1));
	}
	if (e->c.sides == 1)
		CHECK_EQ(bad, 16);	/* the record, no more */
	else
		CHECK_EQ(bad, 0);	/* the other side has it */
	struct wlog_check_report rep;
	struct disk *dev = env_open_dev(c.log[0]);

	CHECK_EQ(co_wlog_check(&dev, 1, false, NULL, NULL, &rep, NULL), -EBADMSG);
	CHECK_EQ(rep.damaged, 1);
	co_disk_close(dev);
	co_env_close(&c);
	env_fini(&c);
}

static void what_does_not_fit_memory_is_read_from_the_log_and_verified(void)
{
	struct env_config c = { .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .image_size = 16 << 20,
				.log = { .memory = 4 << 20, .no_destage = true } };

	env_run(&c, co_spilled);
	c.sides = 2;
	env_run(&c, co_spilled);
}

/* --- Commit of what nobody flushes --- */

static co_fn void co_idle(struct env *e)
{
	struct wlog_volume_info info;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 1, 1);
	co_flush(e, 0);
	co_sleep_ns(5 * SEC);
	co_put(e, 0, 1, 1, 1);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK(info.volatile_bytes > 0);
	co_sleep_ns(3 * SEC);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK_EQ(info.volatile_bytes, 0);
	co_sleep_ns(3 * SEC);
	CHECK_EQ(env_image(e, 0, 1), 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void what_nobody_flushes_is_committed_and_destaged_soon(void)
{
	env_run(NULL, co_idle);
}

/* --- Copying forward --- */

/* Volume 0 holds half its share, dirty, at the tail; volume 1 writes many times around the ring. */
static co_fn void co_write_around(struct env *e, uint64_t blocks)
{
	uint64_t n = test_scale(4000);
	struct writer k;

	start_writer(&k, e, 1, 0, 64, 4, n);
	co_join(&k);
	EXPECT_BLOCKS(e, 1, 0, 4, 1 + (n - 1) / 16);
}

#define HELD 48u

static co_fn void co_detached(struct env *e)
{
	for (unsigned mode = 0; mode < 2; mode++) {
		const struct wlog_volume_config vc = { .destage = mode ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };

		CHECK_EQ(co_env_try_format(e, true), 0);
		co_env_open(e);
		co_env_attach(e, 0, &vc);
		powercut_dev_fail(e->image[0], -EIO);
		co_put(e, 0, 0, HELD, 1);
		co_put(e, 0, 4, 8, 2);
		co_flush(e, 0);
		co_sleep_ns(2 * SEC);
		co_env_detach(e, 0);
		powercut_dev_fail(e->image[0], 0);
		co_env_attach(e, 1, NULL);
		co_write_around(e, HELD);
		co_env_attach(e, 0, &vc);
		EXPECT_BLOCKS(e, 0, 0, 4, 1);
		EXPECT_BLOCKS(e, 0, 4, 8, 2);
		EXPECT_BLOCKS(e, 0, 12, HELD - 12, 1);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		CHECK_EQ(env_image(e, 0, 5), 2);
		CHECK_EQ(env_image(e, 0, HELD - 1), 1);
		CHECK_EQ(co_env_close(e), 0);
	}
}

static void a_volume_that_was_detached_dirty_does_not_stop_the_others(void)
{
	env_run(&(struct env_config){ .log_size = WL_FIRST_SEGMENT + (32 * 64 << 10) }, co_detached);
}

/* Zeroes and discards take no bytes, and pin the tail like everything else. */
static co_fn void co_detached_zeroes(struct env *e)
{
	for (unsigned mode = 0; mode < 4; mode++) {
		const struct wlog_volume_config vc = { .destage = mode & 1 ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };

		CHECK_EQ(co_env_try_format(e, true), 0);
		co_env_open(e);
		co_env_attach(e, 0, &vc);
		co_put(e, 0, 0, HELD, 1);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		powercut_dev_fail(e->image[0], -EIO);
		CHECK_EQ(co_disk_zero(e->vol[0], 4 * ENV_BLOCK, 8 * ENV_BLOCK, mode & 2 ? DISK_UNMAP : 0), 0);
		co_flush(e, 0);
		co_env_detach(e, 0);
		powercut_dev_fail(e->image[0], 0);
		co_env_attach(e, 1, NULL);
		co_write_around(e, HELD);
		co_env_attach(e, 0, &vc);
		EXPECT_BLOCKS(e, 0, 0, 4, 1);
		EXPECT_BLOCKS(e, 0, 4, 8, 0);
		EXPECT_BLOCKS(e, 0, 12, HELD - 12, 1);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		CHECK_EQ(env_image(e, 0, 5), 0);
		CHECK_EQ(co_env_close(e), 0);
	}
}

static void a_volume_that_was_detached_with_zeroes_only_does_not_stop_the_others(void)
{
	env_run(&(struct env_config){ .log_size = WL_FIRST_SEGMENT + (32 * 64 << 10) }, co_detached_zeroes);
}

static co_fn void co_unattached(struct env *e)
{
	for (unsigned mode = 0; mode < 4; mode++) {
		const struct wlog_volume_config vc = { .destage = mode & 1 ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };
		const struct wlog_volume_config then = { .destage = mode & 2 ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };
		struct env c;

		env_fini(e);
		env_init(e, &(struct env_config){ .log_size = WL_FIRST_SEGMENT + (32 * 64 << 10), .log.no_destage = true });
		co_env_start(e, 1, &vc);
		co_put(e, 0, 0, HELD, 1);
		co_flush(e, 0);
		co_put(e, 0, 4, 8, 2);
		co_flush(e, 0);
		env_fork(e, &c, mode);
		co_env_close(e);
		c.c.log.no_destage = false;
		co_env_open(&c);
		co_env_attach(&c, 1, NULL);
		co_write_around(&c, HELD);
		for (unsigned again = 0; again < 2; again++) {
			struct env d;

			co_env_attach(&c, 0, &then);
			EXPECT_BLOCKS(&c, 0, 0, 4, 1);
			EXPECT_BLOCKS(&c, 0, 4, 8, 2);
			EXPECT_BLOCKS(&c, 0, 12, HELD - 12, 1);
			if (again)
				break;
			co_put(&c, 0, 6, 2, 3);
			co_flush(&c, 0);
			EXPECT_BLOCKS(&c, 0, 6, 2, 3);
			co_put(&c, 0, 6, 2, 2);
			co_flush(&c, 0);
			env_fork(&c, &d, 3);
			co_env_close(&c);
			env_fini(&c);
			c = d;
			co_env_open(&c);
		}
		CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), 0);
		CHECK_EQ(env_image(&c, 0, 5), 2);
		CHECK_EQ(env_image(&c, 0, HELD - 1), 1);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
	}
}

static void a_volume_that_nobody_attached_yet_does_not_stop_the_others(void)
{
	env_run(&(struct env_config){ .log_size = WL_FIRST_SEGMENT + (32 * 64 << 10) }, co_unattached);
}

/* A record that has rotted goes forward as lost: it stalls nobody, and is still no data. */
static co_fn void co_rotten(struct env *e)
{
	for (unsigned mode = 0; mode < 2; mode++) {
		const struct wlog_volume_config vc = { .destage = mode ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };
		struct wl_bhead h;
		struct env c, d;
		int r;

		env_fini(e);
		env_init(e, &(struct env_config){ .log_size = WL_FIRST_SEGMENT + (32 * 64 << 10), .log.no_destage = true });
		co_env_start(e, 1, &vc);
		co_put(e, 0, 0, 1, 1);
		co_put(e, 0, 1, 1, 1);
		co_put(e, 0, 2, HELD - 2, 1);
		co_flush(e, 0);
		env_fork(e, &c, 1);
		co_env_close(e);
		env_flip(&c, 0, env_find_batch(&c, 0, 2, &h) + WL_B_HEADER + 99);
		c.c.log.no_destage = false;
		co_env_open(&c);
		co_env_attach(&c, 1, NULL);
		co_write_around(&c, HELD);
		env_fork(&c, &d, 2);
		co_env_close(&c);
		env_fini(&c);
		co_env_open(&d);
		co_env_attach(&d, 0, &vc);
		EXPECT_BLOCKS(&d, 0, 0, 1, 1);
		CHECK(co_env_get(d.vol[0], 1, &r) == UINT64_MAX);
		CHECK_EQ(r, -EIO);
		EXPECT_BLOCKS(&d, 0, 2, HELD - 2, 1);
		CHECK_EQ(co_wlog_drain(d.w, NULL, NULL, NULL), -EIO);
		co_env_close(&d);
		env_fini(&d);
	}
}

static void a_rotten_record_does_not_stop_the_others(void)
{
	env_run(NULL, co_rotten);
}

/* --- Stalled images --- */

static co_fn void co_stalled(struct env *e, unsigned stalled, unsigned small)
{
	struct writer k[ENV_VOLUMES];

	co_env_start(e, stalled + 1, NULL);
	for (unsigned i = 0; i < stalled; i++) {
		powercut_dev_stall(e->image[i], true);
		start_writer(&k[i], e, i, 0, 12288, small ? 1 : 8, 100000);
		k[i].flush_every = small ? 1 : 64;
	}
	co_sleep_ns(20 * SEC);
	for (unsigned i = 0; i < stalled; i++)
		CHECK(!k[i].ended && k[i].done > 4);
	start_writer(&k[stalled], e, stalled, 0, 64, 2, test_scale(3000));
	co_join(&k[stalled]);
	CHECK(k[stalled].longest_ns < 2 * SEC);
	/* The largest request, too. */
	uint64_t blocks = e->vol[stalled]->limits.max_io / ENV_BLOCK;

	start_writer(&k[stalled], e, stalled, 0, blocks, blocks, test_scale(20));
	co_join(&k[stalled]);
	for (unsigned i = 0; i < stalled; i++) {
		k[i].stop = true;
		powercut_dev_stall(e->image[i], false);
	}
	for (unsigned i = 0; i < stalled; i++)
		co_join(&k[i]);
	CHECK_EQ(co_env_close(e), 0);
}

static co_fn void co_stalled_one(struct env *e)
{
	co_stalled(e, 1, 0);
}

static co_fn void co_stalled_three(struct env *e)
{
	co_stalled(e, 3, 0);
}

static co_fn void co_stalled_small(struct env *e)
{
	co_stalled(e, 2, 1);
}

static void stalled_images_stall_only_their_own_volumes(void)
{
	struct env_config c = { .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .image_size = 64 << 20 };

	env_run(&c, co_stalled_one);
	env_run(&c, co_stalled_three);
	env_run(&c, co_stalled_small);
}

/* --- The index --- */

static co_fn void co_hog_index(void *arg)
{
	struct writer *k = arg;
	uint8_t data[16] = { 1 };

	/* Records that do not touch, of next to no data: they take entries, not bytes. */
	for (; !k->stop && !k->error; k->done++) {
		uint64_t off = k->done * 64 % k->e->c.image_size;

		k->error = k->done & 1 ? co_disk_zero(k->e->vol[0], off, 32, 0) : co_disk_write(k->e->vol[0], off, data, sizeof(data), 0);
		if (k->done % 256 == 0 && !k->error)
			k->error = co_disk_flush(k->e->vol[0]);
	}
	k->ended = true;
	co_queue_wake_all(&k->q);
}

static co_fn void co_index(struct env *e)
{
	struct writer hog = { .e = e }, k;

	co_queue_init(&hog.q);
	co_env_start(e, 2, NULL);
	powercut_dev_stall(e->image[0], true);
	CHECK_EQ(co_spawn("hog", co_hog_index, &hog), 0);
	co_sleep_ns(30 * SEC);
	CHECK(!hog.ended);
	start_writer(&k, e, 1, 0, 64, 1, 2000);
	k.flush_every = 1;
	co_join(&k);
	hog.stop = true;
	powercut_dev_stall(e->image[0], false);
	co_join(&hog);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_stalled_volume_cannot_take_all_of_the_index(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (16 << 20), .image_size = 16 << 20 }, co_index);
}

/* --- Waking --- */

/* A writer that waits for its quota goes on when a commit makes room, though nothing is destaged. */
static co_fn void co_quota(struct env *e)
{
	const struct wlog_volume_config vc = { .quota = 256 << 10 };
	struct writer k;

	co_env_start(e, 1, &vc);
	co_put(e, 0, 0, 1, 1);
	co_flush(e, 0);
	powercut_dev_stall(e->image[0], true);
	/* Rewrites the same few blocks: dirty stays far below the quota, what is not committed yet does not. */
	start_writer(&k, e, 0, 0, 16, 16, 400);
	k.flush_every = 0;
	co_join(&k);
	powercut_dev_stall(e->image[0], false);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_commit_makes_room_in_the_quota(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20) }, co_quota);
}

/* A volume that holds its quota waits for its image; the others and its own later writes go on. */
static co_fn void co_quota_bounds(struct env *e)
{
	struct wlog_volume_config vc = { .quota = 256 << 10 };
	struct wlog_volume_info info;
	struct writer k, o;

	co_env_start(e, 1, &vc);
	co_env_attach(e, 1, NULL);
	powercut_dev_stall(e->image[0], true);
	start_writer(&k, e, 0, 0, 1024, 4, 1024);
	co_sleep_ns(10 * SEC);
	CHECK(!k.ended);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK(info.dirty_bytes + info.volatile_bytes <= vc.quota);
	CHECK(info.dirty_bytes + info.volatile_bytes > vc.quota / 2);
	CHECK(info.dirty_since_wall_ns && rt_wall_ns() - info.dirty_since_wall_ns > 9 * SEC);
	start_writer(&o, e, 1, 0, 512, 4, 500);
	co_join(&o);
	powercut_dev_stall(e->image[0], false);
	co_join(&k);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_quota_bounds_its_volume_and_no_other(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20) }, co_quota_bounds);
}

/* --- Fairness --- */

static co_fn void co_large_among_small(struct env *e)
{
	uint64_t blocks;
	struct writer s[6], k;

	co_env_start(e, 3, NULL);
	blocks = e->vol[0]->limits.max_io / ENV_BLOCK;
	for (unsigned i = 0; i < 6; i++) {
		start_writer(&s[i], e, 1 + i % 2, 2048 * (i / 2), 2048, 2, 1000000);
		s[i].flush_every = 4;
	}
	co_sleep_ns(2 * SEC);
	start_writer(&k, e, 1, 0, blocks, blocks, test_scale(10));
	CHECK(co_ends(&k, 100 * SEC));
	CHECK_EQ(k.error, 0);
	for (unsigned i = 0; i < 6; i++)
		s[i].stop = true;
	for (unsigned i = 0; i < 6; i++)
		co_join(&s[i]);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_large_request_is_not_starved_by_small_ones(void)
{
	/* Images much slower than the log, and no throttle: the small ones' volumes are always full. */
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20),
				      .image_dev.latency_ns = 400 * MS, .log.destage_parallel = 1, .log.high_pct = 100, .image_size = 32 << 20 }, co_large_among_small);
}

/* --- The throttle --- */

static co_fn void co_throttle(struct env *e)
{
	uint64_t last = 0, longest = 0, fill = 0;

	co_env_start(e, 1, NULL);
	co_flush(e, 0);
	for (uint64_t i = 0; i < 4000 && fill < 980; i++) {
		uint64_t began = rt_now_ns(), took;

		fill = wl_fill_permille(volume(e, 0));
		co_put(e, 0, i, 1, 1);
		took = rt_now_ns() - began;
		if (fill <= 600)
			CHECK(took < 1 * MS);
		else
			CHECK(took + 1 * MS >= last);	/* it never falls while the fill rises */
		last = took;
		longest = max(longest, took);
	}
	CHECK(fill >= 900);
	CHECK(longest > 1 * MS && longest < 40 * MS);
	e->w->config.no_destage = false;
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	/* What was full is forgotten: the next data rests for the destage delay again. */
	co_sleep_ns(3 * SEC);
	co_put(e, 0, 0, 1, 2);
	co_flush(e, 0);
	co_sleep_ns(500 * MS);
	CHECK_EQ(env_image(e, 0, 0), 1);
	co_sleep_ns(3 * SEC);
	CHECK_EQ(env_image(e, 0, 0), 2);
	CHECK_EQ(co_env_close(e), 0);
}

static void the_throttle_rises_smoothly_from_the_watermark(void)
{
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (16 << 20), .image_size = 16 << 20,
				      .log.no_destage = true }, co_throttle);
}

static co_fn void co_full_then_calm(struct env *e)
{
	struct writer k;

	co_env_start(e, 1, NULL);
	start_writer(&k, e, 0, 0, 1024, 8, 2000);	/* waits for room again and again */
	co_join(&k);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	co_sleep_ns(3 * SEC);
	co_put(e, 0, 1500, 1, 7);
	co_flush(e, 0);
	co_sleep_ns(500 * MS);
	CHECK_EQ(env_image(e, 0, 1500), 0);
	co_sleep_ns(3 * SEC);
	CHECK_EQ(env_image(e, 0, 1500), 7);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_log_that_was_full_once_is_calm_again_afterwards(void)
{
	env_run(&(struct env_config){ .image_size = 8 << 20 }, co_full_then_calm);
}

/* --- Copies in flight --- */

/*
 * What the cleaner does for a volume whose data pins the tail, at the one moment that matters: the destager has written the piece and flushes the
 * image, so the piece is about to leave the map, and its copy is in the open batch.
 */
static co_fn void co_copy_late(void *arg)
{
	struct env *e = arg;
	struct wlog_volume *v = volume(e, 0);
	uint64_t flushes = powercut_dev_counters(e->image[0])->ops[DISK_OP_FLUSH];
	uint8_t data[ENV_BLOCK];
	struct wl_entry *p;

	while (powercut_dev_counters(e->image[0])->ops[DISK_OP_FLUSH] == flushes)
		co_sleep_ns(10000);
	p = wl_map_find(&v->map, 0);
	CHECK(p && p->off == 100 * ENV_BLOCK && p->len == ENV_BLOCK);
	CHECK_EQ(co_wl_read_piece(e->w, p->batch, p, p->off, p->len, data), 0);
	CHECK_EQ(wl_append_copy(v, p, p->off, p->len, data), 0);
}

static co_fn void co_one_dirty_block(struct env *e)
{
	co_put(e, 0, 100, 1, 7);
	co_flush(e, 0);
	CHECK_EQ(co_spawn("cleaner", co_copy_late, e), 0);
}

static co_fn void co_copy_and_resize(struct env *e)
{
	co_env_start(e, 2, NULL);
	co_one_dirty_block(e);
	/* The copy lies behind the new end. */
	CHECK_EQ(co_disk_resize(e->vol[0], 64 * ENV_BLOCK, NULL), 0);
	CHECK_EQ(volume(e, 0)->map.entries, 0);
	CHECK_EQ(co_wlog_commit(e->w), 0);
	co_put(e, 0, 1, 1, 8);
	co_flush(e, 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_copy_under_way_does_not_outlive_a_resize(void)
{
	env_run(&(struct env_config){ .log.no_destage = true, .image_dev.latency_ns = 5 * MS }, co_copy_and_resize);
}

static co_fn void co_copy_and_drain(struct env *e)
{
	co_env_start(e, 2, NULL);
	co_one_dirty_block(e);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	CHECK_EQ(co_wlog_commit(e->w), 0);
	CHECK_EQ(volume(e, 0)->map.entries, 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void what_was_drained_stays_drained(void)
{
	env_run(&(struct env_config){ .log.no_destage = true, .image_dev.latency_ns = 5 * MS }, co_copy_and_drain);
}

static co_fn void co_copy_and_detach(struct env *e)
{
	char mark[DISK_MARK_MAX + 1];
	struct disk *image;
	uint64_t flushes;

	co_env_start(e, 2, NULL);
	flushes = powercut_dev_counters(e->image[0])->ops[DISK_OP_FLUSH];
	co_one_dirty_block(e);
	e->w->draining++;	/* a drain that is cut short by the end */
	wl_destage_kick(volume(e, 0));
	while (powercut_dev_counters(e->image[0])->ops[DISK_OP_FLUSH] == flushes)
		co_sleep_ns(1000);
	co_env_detach(e, 0);
	co_sleep_ns(2 * SEC);
	/* Dirty, and then marked; or clean, and then without a mark. */
	image = env_open_dev(e->image[0]);
	CHECK_EQ(co_disk_mark_get(image, mark, sizeof(mark)), 0);
	co_disk_close(image);
	CHECK_EQ(e->w->by_slot[0]->map.entries > 0, mark[0] != 0);
	e->w->draining--;
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 100, 1, 7);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_volume_that_is_detached_clean_stays_clean(void)
{
	env_run(&(struct env_config){ .log.no_destage = true, .image_dev.latency_ns = 5 * MS }, co_copy_and_detach);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
#define TEST(fn) do { if (argc < 2 || strstr(#fn, argv[1])) RUN(fn); } while (0)
	TEST(the_largest_request_fits_a_small_memory);
	TEST(what_does_not_fit_memory_is_read_from_the_log_and_verified);
	TEST(what_nobody_flushes_is_committed_and_destaged_soon);
	TEST(a_volume_that_was_detached_dirty_does_not_stop_the_others);
	TEST(a_volume_that_was_detached_with_zeroes_only_does_not_stop_the_others);
	TEST(a_volume_that_nobody_attached_yet_does_not_stop_the_others);
	TEST(a_rotten_record_does_not_stop_the_others);
	TEST(stalled_images_stall_only_their_own_volumes);
	TEST(a_stalled_volume_cannot_take_all_of_the_index);
	TEST(a_commit_makes_room_in_the_quota);
	TEST(a_quota_bounds_its_volume_and_no_other);
	TEST(a_large_request_is_not_starved_by_small_ones);
	TEST(the_throttle_rises_smoothly_from_the_watermark);
	TEST(a_log_that_was_full_once_is_calm_again_afterwards);
	TEST(a_copy_under_way_does_not_outlive_a_resize);
	TEST(what_was_drained_stays_drained);
	TEST(a_volume_that_is_detached_clean_stays_clean);
	return 0;
}
