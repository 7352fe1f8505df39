/* SPDX-License-Identifier: MIT */
/* A mirrored log: sides that fail, are stale, hang while they are replaced; and volumes that change their way of destaging over crashes. */
#include "wlog_env.h"

static co_fn void co_wait_rebuilt(struct env *e)
{
	struct wlog_info info;

	for (;;) {
		wlog_get_info(e->w, &info);
		if (!info.rebuilding)
			break;
		co_sleep_ns(10 * MS);
	}
	CHECK(!info.degraded);
}

/* Kills side 1, with the log going on. */
static co_fn void co_lose_side(struct env *e)
{
	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);
	powercut_dev_fail(e->log[1], -EIO);
	co_put(e, 0, 4, 4, 1);
	co_flush(e, 0);
	powercut_dev_fail(e->log[1], 0);
}

static co_fn void co_refused(struct env *e)
{
	struct powercut_dev *spare = powercut_dev_create(e->p, "spare", e->c.log_size, NULL);
	struct disk *d;

	co_lose_side(e);
	/* A device that cannot be written is closed: it could be opened again. */
	d = env_open_dev(spare);
	powercut_dev_fail(spare, -EIO);
	e->err = (struct err)ERR_INIT;
	CHECK(co_wlog_rebuild(e->w, d, &e->err) < 0);
	CHECK(e->err.msg[0]);
	powercut_dev_fail(spare, 0);
	/* So is one when the log itself fails at that moment. */
	d = env_open_dev(spare);
	powercut_dev_fail(e->log[0], -EIO);
	e->err = (struct err)ERR_INIT;
	CHECK(co_wlog_rebuild(e->w, d, &e->err) < 0);
	CHECK(e->err.msg[0]);
	powercut_dev_fail(e->log[0], 0);
	CHECK(co_env_close(e) < 0);
}

static const struct env_config two_sides = { .sides = 2, .log.no_destage = true };

static void a_device_that_a_rebuild_refuses_is_closed(void)
{
	env_run(&two_sides, co_refused);
}

struct second {
	struct env *e;
	struct disk *d;
	int result;
	bool ended;
};

static co_fn void co_second(void *arg)
{
	struct second *s = arg;

	s->result = co_wlog_rebuild(s->e->w, s->d, NULL);
	s->ended = true;
}

static co_fn void co_twice(struct env *e)
{
	struct powercut_dev *a = powercut_dev_create(e->p, "spare0", e->c.log_size, NULL);
	struct powercut_dev *b = powercut_dev_create(e->p, "spare1", e->c.log_size, NULL);
	struct second s = { .e = e, .d = env_open_dev(b) };
	struct env c;

	co_lose_side(e);
	CHECK_EQ(co_spawn("second rebuild", co_second, &s), 0);
	int r = co_wlog_rebuild(e->w, env_open_dev(a), &e->err);

	while (!s.ended)
		co_sleep_ns(MS);
	/* One of them, and the other is told. */
	CHECK_EQ(r, 0);
	CHECK(s.result == -EBUSY || s.result == -EINVAL);
	co_wait_rebuilt(e);
	co_put(e, 0, 8, 4, 1);
	co_flush(e, 0);
	/* The new side alone has it all. */
	env_fork(e, &c, 1);
	CHECK_EQ(co_env_close(e), 0);
	c.log[1] = powercut_dev_find(c.p, "spare0");
	c.missing = 1;
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 12, 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static void of_two_rebuilds_at_once_one_is_refused(void)
{
	env_run(&two_sides, co_twice);
}

static co_fn void co_reader(void *arg)
{
	struct second *s = arg;
	uint8_t buf[ENV_BLOCK];

	s->result = co_disk_read(s->d, WL_FIRST_SEGMENT, buf, sizeof(buf), 0);
	s->ended = true;
}

/* A read that the failing side has not answered yet when it is replaced. */
static co_fn void co_busy(struct env *e)
{
	struct powercut_dev *spare = powercut_dev_create(e->p, "spare", e->c.log_size, NULL);
	struct second s = { .e = e }, q = { .e = e };

	co_lose_side(e);
	s.d = e->w->dev.disk[1];
	powercut_dev_stall(e->log[1], true);
	CHECK_EQ(co_spawn("reader", co_reader, &s), 0);
	co_sleep_ns(MS);
	CHECK(s.d->in_flight > 0);
	q.d = env_open_dev(spare);
	CHECK_EQ(co_spawn("rebuild", co_second, &q), 0);
	co_sleep_ns(2 * SEC);
	/* The log has gone on meanwhile. */
	co_put(e, 0, 8, 4, 1);
	co_flush(e, 0);
	co_wait_rebuilt(e);
	powercut_dev_stall(e->log[1], false);
	while (!s.ended || !q.ended)
		co_sleep_ns(MS);
	CHECK_EQ(q.result, 0);
	EXPECT_BLOCKS(e, 0, 0, 12, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_side_that_is_still_read_is_closed_when_it_is_idle(void)
{
	env_run(&two_sides, co_busy);
}

/* With the side alone that was left behind, nothing is served; with the other one all is there. */
static co_fn void co_check_left_behind(struct env *e, unsigned blocks)
{
	struct env c;

	env_fork(e, &c, 1);
	CHECK_EQ(co_env_close(e), 0);
	c.missing = 1;
	if (co_env_try_open(&c) == 0) {
		CHECK_EQ(co_env_try_attach(&c, 0, NULL), -ESTALE);
		co_env_close(&c);
	}
	c.missing = 0;
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, blocks, 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static co_fn void co_left_behind(struct env *e)
{
	/* The image knows that a side is gone before anything is acknowledged that is not on it. */
	co_lose_side(e);
	co_check_left_behind(e, 8);
}

/* The same in the middle of a long round of destage. */
static co_fn void co_left_behind_busy(struct env *e, enum wlog_destage destage)
{
	const struct wlog_volume_config config = { .destage = destage };
	uint64_t start;

	co_env_start(e, 1, &config);
	for (unsigned i = 0; i < 40; i++) {
		co_put(e, 0, 2 * i, 1, 1);
		co_flush(e, 0);
	}
	co_sleep_ns(100 * MS);	/* a round has begun */
	powercut_dev_fail(e->log[1], -EIO);
	co_put(e, 0, 1, 1, 1);
	start = rt_now_ns();
	co_flush(e, 0);
	CHECK(rt_now_ns() - start < 900 * MS);
	powercut_dev_fail(e->log[1], 0);
	co_check_left_behind(e, 3);
}

static co_fn void co_busy_merged(struct env *e)
{
	co_left_behind_busy(e, WLOG_DESTAGE_MERGED);
}

static co_fn void co_busy_ordered(struct env *e)
{
	co_left_behind_busy(e, WLOG_DESTAGE_ORDERED);
}

/* Nor when the volume is closed before the image could be told. */
static co_fn void co_left_behind_closed(struct env *e)
{
	struct env c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);
	powercut_dev_fail(e->log[1], -EIO);
	co_put(e, 0, 4, 4, 1);
	CHECK_EQ(co_env_close(e), 0);	/* its commit loses the side */
	powercut_dev_fail(e->log[1], 0);
	env_fork(e, &c, 1);
	c.missing = 1;
	if (co_env_try_open(&c) == 0) {
		CHECK_EQ(co_env_try_attach(&c, 0, NULL), -ESTALE);
		co_env_close(&c);
	}
	env_fini(&c);
}

static void a_side_that_was_left_behind_in_a_round_or_at_the_close_is_not_believed(void)
{
	struct env_config slow = { .sides = 2, .log.destage_delay_ns = 1, .log.destage_parallel = 1, .image_dev.latency_ns = 200 * MS };

	env_run(&slow, co_busy_merged);
	env_run(&slow, co_busy_ordered);
	env_run(&two_sides, co_left_behind_closed);
}

static void a_side_that_was_left_behind_is_not_believed(void)
{
	env_run(&two_sides, co_left_behind);
}

static co_fn void co_torn_supers(struct env *e)
{
	struct env c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);
	CHECK_EQ(co_wl_checkpoint(e->w), 0);
	/* Any one of the four superblocks may be damaged; all of one side, too. */
	for (unsigned i = 0; i < 6; i++) {
		env_fork(e, &c, i);
		if (i < 4)
			env_flip(&c, i / 2, i % 2 * WL_SB_SLOT + 200);
		else
			env_flip(&c, i % 2, 200), env_flip(&c, i % 2, WL_SB_SLOT + 200);
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, 4, 1);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
	}
	env_fork(e, &c, 9);
	for (unsigned i = 0; i < 4; i++)
		env_flip(&c, i / 2, i % 2 * WL_SB_SLOT + 200);
	CHECK_EQ(co_env_try_open(&c), -EBADMSG);
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_damaged_superblock_is_replaced_by_any_other(void)
{
	env_run(&two_sides, co_torn_supers);
}

/* --- Ordered and merged by turns --- */

#define BLOCKS 40u

/* One life of the log: random writes of two volumes in a small ring, then a crash. Flushed versions must be there in the next. */
static co_fn void co_life(struct env *e, struct rng *r, uint64_t least[2][BLOCKS], uint64_t most[2][BLOCKS], uint64_t *version)
{
	static const uint64_t delay[] = { 1, 5 * MS, 200 * MS };

	e->c.log.destage_delay_ns = delay[rng_below(r, 3)];
	e->c.log.no_destage = rng_below(r, 4) == 0;
	co_env_open(e);
	for (unsigned v = 0; v < 2; v++) {
		const struct wlog_volume_config vc = { .destage = rng_below(r, 2) ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };

		/* One of them may stay away for a life: its data goes forward without it. */
		if (rng_below(r, 4) == 0)
			continue;
		co_env_attach(e, v, &vc);
		for (unsigned b = 0; b < BLOCKS; b++) {
			int ret;
			uint64_t got = co_env_get(e->vol[v], b, &ret);

			CHECK_EQ(ret, 0);
			if (got < least[v][b] || got > most[v][b])
				test_fail("volume %u, block %u shows version %lld; flushed was %llu, written at most %llu", v, b, (long long)got,
					  (unsigned long long)least[v][b], (unsigned long long)most[v][b]);
			least[v][b] = most[v][b] = got;
		}
		co_flush(e, v);
	}
	for (unsigned i = 0, n = rng_below(r, 120); i < n; i++) {
		unsigned v = rng_below(r, 2), b = rng_below(r, BLOCKS), len = 1 + rng_below(r, min(12u, BLOCKS - b));

		if (!e->vol[v])
			continue;
		if (e->c.log.no_destage && wl_fill_permille(container_of(e->vol[v], struct wlog_volume, disk)) > 500)
			break;
		co_put(e, v, b, len, ++*version);
		for (unsigned k = b; k < b + len; k++)
			most[v][k] = *version;
		if (rng_below(r, 3) == 0) {
			co_flush(e, v);
			memcpy(least[v], most[v], sizeof(least[v]));
		}
		if (rng_below(r, 8) == 0)
			co_sleep_ns(rng_below(r, 20) * MS);
	}
}

static co_fn void co_turns(struct env *e)
{
	uint64_t seed = test_env_u64("WEIR_SEED", 1);

	for (uint64_t k = 0; k < test_scale(40); k++) {
		uint64_t least[2][BLOCKS] = { 0 }, most[2][BLOCKS] = { 0 }, version = 0;
		struct rng r;

		env_fini(e);
		env_init(e, &(struct env_config){ .log_size = WL_FIRST_SEGMENT + (24 * 64 << 10) });
		CHECK_EQ(co_env_try_format(e, true), 0);
		rng_seed(&r, seed * 1000 + k);
		for (unsigned life = 0; life < 8; life++) {
			struct env next;

			co_life(e, &r, least, most, &version);
			env_fork(e, &next, seed * 1000 + k * 8 + life);
			for (unsigned i = 0; i < e->c.sides; i++)
				CHECK(!e->w->failed);
			co_env_close(e);
			env_fini(e);
			*e = next;
		}
	}
}

static void volumes_may_be_ordered_and_merged_by_turns(void)
{
	env_run(NULL, co_turns);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
#define TEST(fn) do { if (argc < 2 || strstr(#fn, argv[1])) RUN(fn); } while (0)
	TEST(a_device_that_a_rebuild_refuses_is_closed);
	TEST(of_two_rebuilds_at_once_one_is_refused);
	TEST(a_side_that_is_still_read_is_closed_when_it_is_idle);
	TEST(a_side_that_was_left_behind_is_not_believed);
	TEST(a_side_that_was_left_behind_in_a_round_or_at_the_close_is_not_believed);
	TEST(a_damaged_superblock_is_replaced_by_any_other);
	TEST(volumes_may_be_ordered_and_merged_by_turns);
	return 0;
}
