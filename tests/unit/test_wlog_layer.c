/* SPDX-License-Identifier: MIT */
/* What a volume's layer promises: how many device writes a flush costs, when a write is durable, what an error becomes. */
#include "wlog_env.h"

static const struct env_config quiet = { .log = { .no_destage = true } };

static const struct powercut_counters *log_counters(const struct env *e)
{
	return powercut_dev_counters(e->log[0]);
}

/* --- Counting --- */

static co_fn void co_counts(struct env *e)
{
	struct powercut_counters before;
	uint64_t writes;

	for (unsigned mode = 0; mode < 2; mode++) {
		const struct wlog_volume_config vc = { .mode = mode ? WLOG_MODE_WRITE : WLOG_MODE_FLUSH };

		CHECK_EQ(co_env_try_format(e, true), 0);
		co_env_open(e);
		co_env_attach(e, mode, &vc);
		co_flush(e, mode);
		before = *log_counters(e);
		for (uint64_t i = 0; i < 100; i++) {
			co_put(e, mode, i, 1, 1);
			co_flush(e, mode);
		}
		/* One durable device write each, whatever the mode, and never a flush. */
		CHECK_EQ(log_counters(e)->fua_writes - before.fua_writes, 100);
		CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE] - before.ops[DISK_OP_WRITE], 100);
		CHECK_EQ(log_counters(e)->ops[DISK_OP_FLUSH] - before.ops[DISK_OP_FLUSH], 0);
		/* Nothing new: nothing is written. */
		writes = log_counters(e)->ops[DISK_OP_WRITE];
		for (unsigned i = 0; i < 50; i++)
			co_flush(e, mode);
		CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE], writes);
		/* Several writes and a flush: one in flush mode, and once one more where a flush behind the first was foreseen; one each in write mode. */
		for (unsigned round = 0; round < 3; round++) {
			writes = log_counters(e)->ops[DISK_OP_WRITE];
			for (uint64_t i = 0; i < 10; i++)
				co_put(e, mode, 200 + i, 1, 1);
			co_flush(e, mode);
			CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE] - writes, mode ? 10 : round ? 1 : 2);
		}
		/* FUA is a commit of its own. */
		writes = log_counters(e)->ops[DISK_OP_WRITE];
		CHECK_EQ(co_env_put(e->vol[mode], 300, 1, 1, DISK_FUA), 0);
		CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE] - writes, 1);
		co_flush(e, mode);
		CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE] - writes, 1);
		CHECK_EQ(co_env_close(e), 0);
	}
}

/* Where flushes are ignored above the log, no write waits for it; time makes it durable all the same. */
static co_fn void co_never_flushed(struct env *e)
{
	const struct wlog_volume_config vc = { .volatile_from_start = true };
	uint64_t writes;

	CHECK_EQ(co_env_try_format(e, true), 0);
	co_env_open(e);
	co_env_attach(e, 0, &vc);
	writes = log_counters(e)->ops[DISK_OP_WRITE];
	for (uint64_t i = 0; i < 10; i++)
		co_put(e, 0, i, 1, 1);
	CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE], writes);
	co_sleep_ns(3000000000);
	CHECK_EQ(log_counters(e)->ops[DISK_OP_WRITE] - writes, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_volume_whose_flushes_are_ignored_is_acknowledged_from_memory(void)
{
	env_run(&quiet, co_never_flushed);
}

static void n_flushes_with_a_write_before_each_are_n_device_writes(void)
{
	struct env_config c = quiet;

	c.log_size = WL_FIRST_SEGMENT + (8 << 20);
	c.segment = 1 << 20;
	env_run(&c, co_counts);
}

static uint64_t commits(const struct env *e)
{
	struct wlog_info info;

	wlog_get_info(e->w, &info);
	return info.commits;
}

/* Nothing but time passes between the last write and the look at the counter. */
static co_fn void co_expect_commit(struct env *e, uint64_t block, bool want)
{
	uint64_t before = commits(e);

	co_put(e, 0, block, 1, 1);
	co_sleep_ns(100000000);
	CHECK_EQ(commits(e) - before, want);
}

static co_fn void co_foreseen(struct env *e)
{
	struct wlog_info info;

	co_env_start(e, 2, NULL);
	co_flush(e, 0);
	co_flush(e, 1);
	for (unsigned per_flush = 1; per_flush <= 3; per_flush++) {
		/* Learnt from the fifth in a row on; the writes before the last one of a habit begin nothing. */
		for (unsigned flushes = 0; flushes < 8; flushes++) {
			uint64_t before = commits(e);

			for (unsigned i = 0; i < per_flush; i++)
				co_expect_commit(e, i, i + 1 == per_flush && flushes >= 5);
			co_flush(e, 0);
			CHECK_EQ(commits(e) - before, 1);
		}
		/* The habit ends. */
		for (unsigned i = 0; i < per_flush; i++)
			co_expect_commit(e, i, i + 1 == per_flush);
		co_expect_commit(e, 7, false);
		co_expect_commit(e, 8, false);
		co_flush(e, 0);
		co_flush(e, 0);
	}
	wlog_get_info(e->w, &info);
	CHECK_EQ(info.commits_foreseen, 3 * 4);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_flush_that_always_follows_is_foreseen(void)
{
	struct env_config c = quiet;

	c.log_size = WL_FIRST_SEGMENT + (8 << 20);
	c.segment = 1 << 20;
	env_run(&c, co_foreseen);
}

struct client {
	struct env *e;
	unsigned vol, n;
	unsigned *left;
	struct co_queue *q;
};

static co_fn void co_client(void *arg)
{
	struct client *k = arg;

	for (unsigned i = 0; i < k->n; i++) {
		co_put(k->e, k->vol, i, 1, 1);
		co_flush(k->e, k->vol);
	}
	if (!--*k->left)
		co_queue_wake_all(k->q);
}

static co_fn void co_group(struct env *e)
{
	struct client k[ENV_VOLUMES * 4];
	struct co_queue q;
	unsigned left = ARRAY_SIZE(k);
	uint64_t writes;

	co_queue_init(&q);
	co_env_start(e, ENV_VOLUMES, NULL);
	for (unsigned i = 0; i < ENV_VOLUMES; i++)
		co_flush(e, i);
	writes = log_counters(e)->ops[DISK_OP_WRITE];
	for (unsigned i = 0; i < ARRAY_SIZE(k); i++) {
		k[i] = (struct client){ e, i % ENV_VOLUMES, 50, &left, &q };
		CHECK_EQ(co_spawn("client", co_client, &k[i]), 0);
	}
	while (left)
		co_queue_wait(&q, "clients");
	/* 800 flushes of 16 clients on 4 volumes share commits: two in turn hold all. */
	writes = log_counters(e)->ops[DISK_OP_WRITE] - writes;
	CHECK(writes <= 800 / 4);
	CHECK_EQ(co_env_close(e), 0);
}

static void clients_of_several_volumes_share_commits(void)
{
	struct env_config c = quiet;

	c.log_size = WL_FIRST_SEGMENT + (16 << 20);
	c.segment = 1 << 20;
	env_run(&c, co_group);
}

/* --- When a write is durable --- */

static co_fn void co_first_flush(struct env *e)
{
	struct wlog_volume_info info;
	struct env c;

	/* Contract 8: who has not flushed yet may not know that there is a cache. */
	co_env_start(e, 1, NULL);
	for (unsigned i = 0; i < 5; i++) {
		co_put(e, 0, i, 1, 1);
		CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
		CHECK_EQ(info.volatile_bytes, 0);
	}
	env_fork(e, &c, 1);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 5, 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	co_flush(e, 0);
	co_put(e, 0, 5, 1, 1);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK_EQ(info.volatile_bytes, ENV_BLOCK);
	env_fork(e, &c, 1);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 5, 1);
	EXPECT_BLOCKS(&c, 0, 5, 1, 0);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	/* A new attachment is a new guest. */
	co_env_detach(e, 0);
	co_env_attach(e, 0, NULL);
	co_put(e, 0, 6, 1, 1);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK_EQ(info.volatile_bytes, 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void until_the_first_flush_each_write_is_durable(void)
{
	env_run(&quiet, co_first_flush);
}

/* --- Sizes --- */

static co_fn void co_sizes(struct env *e)
{
	struct env c;

	co_env_start(e, 1, NULL);
	uint64_t blocks = e->vol[0]->limits.max_io / ENV_BLOCK;

	CHECK(blocks >= 16);
	co_flush(e, 0);
	/* Around the sizes at which a request becomes a group, and the largest, from each state of the segment. */
	for (uint64_t n = 1; n <= blocks; n += n < 24 ? 1 : blocks - n ? min(blocks - n, TEST_SANITIZED ? 41ul : 13ul) : 1) {
		co_put(e, 0, 0, n, n);
		co_put(e, 0, n, 1, 1000 + n);
		co_flush(e, 0);
		if (n % 5 == 0 || n == blocks) {
			env_fork(e, &c, n);
			co_env_open(&c);
			co_env_attach(&c, 0, NULL);
			EXPECT_BLOCKS(&c, 0, 0, n, n);
			EXPECT_BLOCKS(&c, 0, n, 1, 1000 + n);
			CHECK_EQ(co_env_close(&c), 0);
			env_fini(&c);
		}
	}
	EXPECT_BLOCKS(e, 0, 0, blocks, blocks);
	CHECK_EQ(co_env_close(e), 0);
	for (uint64_t i = 0; i < blocks; i++)
		CHECK(env_image(e, 0, i) == blocks);
}

static void requests_of_any_size_up_to_the_largest_are_whole(void)
{
	env_run(&(struct env_config){ .log.destage_delay_ns = 1 }, co_sizes);
	env_run(&(struct env_config){ .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .log.destage_delay_ns = 1,
				      .image_size = 16 << 20 }, co_sizes);
}

/* --- Errors --- */

static co_fn void co_log_fails(struct env *e)
{
	co_env_start(e, 2, NULL);
	co_put(e, 0, 0, 1, 1);
	co_flush(e, 0);
	co_put(e, 0, 1, 1, 1);
	powercut_dev_fail(e->log[0], -EIO);
	CHECK_EQ(co_disk_flush(e->vol[0]), -EIO);
	powercut_dev_fail(e->log[0], 0);
	/* Never a success afterwards, on no volume, though the device is well again. */
	for (unsigned i = 0; i < 2; i++) {
		CHECK(co_disk_flush(e->vol[i]) < 0);
		CHECK(co_env_put(e->vol[i], 5, 1, 2, 0) < 0);
		CHECK(co_env_put(e->vol[i], 5, 1, 2, DISK_FUA) < 0);
		CHECK(co_disk_flush(e->vol[i]) < 0);
	}
	CHECK(co_wlog_commit(e->w) < 0);
	CHECK(co_wlog_drain(e->w, NULL, NULL, NULL) < 0);
	EXPECT_BLOCKS(e, 0, 0, 1, 1);
	CHECK(co_env_close(e) < 0);
	/* What was flushed before is there. */
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 0, 1, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_failed_log_reaches_every_flush(void)
{
	env_run(&quiet, co_log_fails);
}

static int fail_flush(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	return op == DISK_OP_FLUSH && dev == arg ? -EIO : 0;
}

static co_fn void co_image_fails(struct env *e)
{
	struct wlog_volume_info info;

	co_env_start(e, 1, NULL);
	powercut_set_hook(e->p, fail_flush, e->image[0]);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);		/* in the log: the image does not matter */
	co_sleep_ns(10 * SEC);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK(info.stalled);
	CHECK_EQ(info.dirty_bytes, 4 * ENV_BLOCK);
	/* The image was not flushed, so nothing may count as destaged, and a drain must not say so. */
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), -EIO);
	powercut_set_hook(e->p, NULL, NULL);
	/* The disk cannot know what of it is stable: a later flush of it proves nothing. */
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), -EIO);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK_EQ(info.dirty_bytes, 4 * ENV_BLOCK);
	CHECK_EQ(co_env_close(e), 0);
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 0, 4, 1);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	CHECK_EQ(env_image(e, 0, 3), 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void an_image_whose_flush_failed_is_not_believed(void)
{
	env_run(NULL, co_image_fails);
}

/* --- What status says --- */

static co_fn void co_oldest(struct env *e)
{
	struct wlog_volume_info info;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 1, 1);
	co_flush(e, 0);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	uint64_t since = info.dirty_since_wall_ns;

	CHECK(since && since <= rt_wall_ns());
	/* More than a round takes: when the first round is through, the oldest data is still the oldest. */
	for (uint64_t i = 0; i < 5; i++) {
		co_sleep_ns(1 * SEC);
		co_put(e, 0, 1 + i, 1, 1);
		co_flush(e, 0);
	}
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK_EQ(info.dirty_since_wall_ns, since);
	e->w->config.no_destage = false;
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	CHECK_EQ(info.dirty_since_wall_ns, 0);
	CHECK_EQ(co_env_close(e), 0);
}

static co_fn void co_oldest_of_rounds(struct env *e)
{
	struct wlog_volume_info info;
	uint64_t since;

	co_env_start(e, 1, NULL);
	co_flush(e, 0);
	for (uint64_t i = 0; i < (WL_ROUND_MAX >> 20) + 2; i++)	/* a MiB each */
		co_put(e, 0, i * 256, 256, 1);
	co_flush(e, 0);
	CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	since = info.dirty_since_wall_ns;
	co_sleep_ns(5 * SEC);
	e->w->config.no_destage = false;
	wl_destage_kick(container_of(e->vol[0], struct wlog_volume, disk));
	for (unsigned i = 0; info.destaged_bytes == 0; i++) {
		CHECK(i < 100000);
		co_sleep_ns(MS);
		CHECK_EQ(wlog_get_volume(e->w, 0, &info), 0);
	}
	/* A round has ended, and not all could be in it. */
	CHECK(info.dirty_bytes > 0);
	CHECK_EQ(info.dirty_since_wall_ns, since);
	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void status_tells_the_age_of_the_oldest_dirty_data(void)
{
	env_run(&quiet, co_oldest);
	env_run(&(struct env_config){ .segment = 4 << 20, .log_size = WL_FIRST_SEGMENT + (256 << 20), .image_size = 96 << 20,
				      .image_dev.latency_ns = 20 * MS, .log.no_destage = true }, co_oldest_of_rounds);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
#define TEST(fn) do { if (argc < 2 || strstr(#fn, argv[1])) RUN(fn); } while (0)
	TEST(a_volume_whose_flushes_are_ignored_is_acknowledged_from_memory);
	TEST(n_flushes_with_a_write_before_each_are_n_device_writes);
	TEST(a_flush_that_always_follows_is_foreseen);
	TEST(clients_of_several_volumes_share_commits);
	TEST(until_the_first_flush_each_write_is_durable);
	TEST(requests_of_any_size_up_to_the_largest_are_whole);
	TEST(a_failed_log_reaches_every_flush);
	TEST(an_image_whose_flush_failed_is_not_believed);
	TEST(status_tells_the_age_of_the_oldest_dirty_data);
	return 0;
}
