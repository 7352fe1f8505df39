/* SPDX-License-Identifier: MIT */
/* A mirrored log one of whose sides, or both, hang: nobody waits for ever, and what comes late does no harm. */
#include <jansson.h>

#include "wlog_env.h"

static const struct env_config two_sides = { .sides = 2, .log.no_destage = true };

static const char *state_of(struct env *e, unsigned side)
{
	static char state[32];
	json_t *st = wlog_status(e->w);

	snprintf(state, sizeof(state), "%s",
		 json_string_value(json_object_get(json_array_get(json_object_get(st, "devices"), side), "state")));
	json_decref(st);
	return state;
}

static struct wlog_info info_of(struct env *e)
{
	struct wlog_info info;

	wlog_get_info(e->w, &info);
	return info;
}

static co_fn void co_wait_rebuilt(struct env *e)
{
	while (info_of(e).rebuilding)
		co_sleep_ns(10 * MS);
}

static co_fn void co_given_up(struct env *e)
{
	struct env c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);
	powercut_dev_stall(e->log[1], true);
	uint64_t began = rt_now_ns();

	co_put(e, 0, 4, 4, 1);
	co_flush(e, 0);
	CHECK(rt_now_ns() - began >= 5 * SEC && rt_now_ns() - began < 6 * SEC);
	CHECK(info_of(e).degraded);
	CHECK_STR(state_of(e, 1), "hanging");
	CHECK(info_of(e).hanging && strstr(info_of(e).hanging, "log1"));
	/* Only once. */
	began = rt_now_ns();
	co_put(e, 0, 8, 4, 1);
	co_flush(e, 0);
	CHECK(rt_now_ns() - began < SEC);
	/* It is not taken in again before it has answered; then it may be. */
	e->err = (struct err)ERR_INIT;
	CHECK_EQ(co_wlog_rebuild(e->w, NULL, &e->err), -EBUSY);
	powercut_dev_stall(e->log[1], false);
	co_sleep_ns(SEC);
	CHECK_STR(state_of(e, 1), "out");
	CHECK_EQ(co_wlog_rebuild(e->w, NULL, &e->err), 0);
	co_wait_rebuilt(e);
	CHECK_STR(state_of(e, 1), "in sync");
	env_fork(e, &c, 1);
	CHECK_EQ(co_env_close(e), 0);
	c.missing = 1;
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 12, 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static void a_side_that_hangs_is_given_up_and_can_come_back(void)
{
	env_run(&two_sides, co_given_up);
}

static co_fn void co_late(struct env *e)
{
	struct env c;

	co_env_start(e, 1, NULL);
	powercut_dev_stall(e->log[1], true);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);
	/* Some times around in memory and on the surviving device; then the other one does what it was asked. */
	for (uint64_t i = 0; i < 400; i++) {
		co_put(e, 0, i % 16, 4, 2 + i);
		co_flush(e, 0);
	}
	powercut_dev_stall(e->log[1], false);
	co_sleep_ns(SEC);
	for (unsigned missing = 0; missing < 2; missing++) {
		env_fork(e, &c, 1 + missing);
		c.missing = missing ? 2 : 0;
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 15, 4, 2 + 399);
		CHECK_STR(state_of(&c, 1), missing ? "missing" : "out");
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
	}
	/* Alone it is an old copy, and the image says so. */
	env_fork(e, &c, 3);
	c.missing = 1;
	co_env_open(&c);
	CHECK_EQ(co_env_try_attach(&c, 0, NULL), -ESTALE);
	co_env_close(&c);
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static void what_a_side_does_late_is_not_believed(void)
{
	env_run(&two_sides, co_late);
}

struct flusher {
	struct env *e;
	int result;
	bool ended;
};

static co_fn void co_flusher(void *arg)
{
	struct flusher *f = arg;

	f->result = co_disk_flush(f->e->vol[0]);
	f->ended = true;
}

static co_fn void co_both(struct env *e)
{
	struct flusher f = { .e = e };

	co_env_start(e, 1, NULL);
	co_flush(e, 0);
	co_put(e, 0, 0, 4, 1);
	powercut_dev_stall(e->log[0], true);
	powercut_dev_stall(e->log[1], true);
	CHECK_EQ(co_spawn("flusher", co_flusher, &f), 0);
	co_sleep_ns(60 * SEC);
	CHECK(!f.ended);
	CHECK(info_of(e).write_waits_ns > 50 * SEC);
	/* One comes back; the other has its time from then on. */
	powercut_dev_stall(e->log[1], false);
	co_sleep_ns(4 * SEC);
	CHECK(!f.ended);
	powercut_dev_stall(e->log[0], false);
	co_sleep_ns(SEC);
	CHECK(f.ended && f.result == 0);
	CHECK(!info_of(e).degraded && !info_of(e).failed);
	CHECK_EQ(info_of(e).write_waits_ns, 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void while_both_hang_writes_wait_and_neither_is_given_up(void)
{
	env_run(&two_sides, co_both);
}

static co_fn void co_no_limit(struct env *e)
{
	struct flusher f = { .e = e };

	co_env_start(e, 1, NULL);
	co_flush(e, 0);
	co_put(e, 0, 0, 4, 1);
	powercut_dev_stall(e->log[0], true);
	CHECK_EQ(co_spawn("flusher", co_flusher, &f), 0);
	co_sleep_ns(100 * SEC);
	CHECK(!f.ended);
	powercut_dev_stall(e->log[0], false);
	co_sleep_ns(SEC);
	CHECK(f.ended && f.result == 0 && !info_of(e).degraded);
	CHECK_EQ(co_env_close(e), 0);
}

static void without_a_limit_it_waits(void)
{
	env_run(&(struct env_config){ .sides = 2, .log.side_timeout_ns = UINT64_MAX }, co_no_limit);
}

static co_fn void co_reads(struct env *e)
{
	co_env_start(e, 1, NULL);
	for (uint64_t i = 0; i < 128; i++)
		co_put(e, 0, i * 16, 16, 1);
	co_flush(e, 0);
	CHECK(info_of(e).memory_limit < 128 * 16 * ENV_BLOCK);
	powercut_dev_stall(e->log[0], true);
	uint64_t began = rt_now_ns();

	EXPECT_BLOCKS(e, 0, 0, 64, 1);
	CHECK(rt_now_ns() - began < 6 * SEC);	/* one read waited, the others knew */
	CHECK(!info_of(e).degraded);
	powercut_dev_stall(e->log[0], false);
	co_sleep_ns(SEC);
	/* Now it is the other one's turn. */
	powercut_dev_stall(e->log[1], true);
	EXPECT_BLOCKS(e, 0, 0, 64, 1);
	powercut_dev_stall(e->log[1], false);
	co_put(e, 0, 0, 1, 2);
	co_flush(e, 0);
	CHECK(!info_of(e).degraded);
	co_sleep_ns(SEC);
	CHECK_EQ(co_env_close(e), 0);
}

static void reads_go_to_the_side_that_answers(void)
{
	env_run(&(struct env_config){ .sides = 2, .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .image_size = 16 << 20,
				      .log = { .memory = 4 << 20, .no_destage = true } }, co_reads);
}

static co_fn void co_new_side(struct env *e)
{
	struct powercut_dev *spare = powercut_dev_create(e->p, "spare", e->c.log_size, NULL);
	struct disk *d;

	co_env_start(e, 1, NULL);
	powercut_dev_fail(e->log[1], -EIO);
	for (uint64_t i = 0; i < 40; i++) {
		co_put(e, 0, 4 * (i % 8), 4, 1);
		co_flush(e, 0);
	}
	powercut_dev_fail(e->log[1], 0);
	CHECK(info_of(e).degraded);
	/* From the first write on: refused, and nobody else waits for it for longer than the limit. */
	powercut_dev_stall(spare, true);
	CHECK_EQ(co_wlog_rebuild(e->w, env_open_dev(spare), &e->err), -ETIMEDOUT);
	co_put(e, 0, 200, 4, 1);
	co_flush(e, 0);
	powercut_dev_stall(spare, false);
	co_sleep_ns(SEC);
	/* In the middle of the copy. */
	d = env_open_dev(spare);
	CHECK_EQ(co_wlog_rebuild(e->w, d, &e->err), 0);
	powercut_dev_stall(spare, true);
	co_put(e, 0, 204, 4, 1);
	co_flush(e, 0);
	co_wait_rebuilt(e);
	CHECK(info_of(e).degraded && info_of(e).rebuild_error == -ETIMEDOUT);
	co_put(e, 0, 208, 4, 1);
	co_flush(e, 0);
	powercut_dev_stall(spare, false);
	co_sleep_ns(SEC);
	/* Stopped by the operator. */
	CHECK_EQ(co_wlog_rebuild(e->w, NULL, &e->err), 0);
	wlog_rebuild_cancel(e->w);
	co_wait_rebuilt(e);
	co_sleep_ns(SEC);
	CHECK(info_of(e).degraded && info_of(e).rebuild_error == -ECANCELED);
	CHECK_EQ(co_wlog_rebuild(e->w, NULL, &e->err), 0);
	co_wait_rebuilt(e);
	CHECK(!info_of(e).degraded && info_of(e).rebuild_error == 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_new_side_that_hangs_fails_the_rebuild_only(void)
{
	env_run(&two_sides, co_new_side);
}

/* A log of one device gets a mirror: from then on either side will do. */
static co_fn void co_second_side(struct env *e)
{
	struct powercut_dev *spare = powercut_dev_create(e->p, "spare", e->c.log_size, NULL);
	struct env c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 8, 1);
	co_flush(e, 0);
	CHECK_EQ(co_wlog_rebuild(e->w, env_open_dev(spare), &e->err), 0);
	co_put(e, 0, 8, 8, 1);
	co_flush(e, 0);
	co_wait_rebuilt(e);
	CHECK(!info_of(e).degraded);
	powercut_dev_stall(e->log[0], true);
	co_put(e, 0, 16, 8, 1);
	co_flush(e, 0);
	CHECK_STR(state_of(e, 0), "hanging");
	env_fork(e, &c, 1);
	powercut_dev_stall(e->log[0], false);
	CHECK_EQ(co_env_close(e), 0);
	c.log[0] = powercut_dev_find(c.p, "spare");
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 24, 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static void a_log_of_one_device_gets_a_mirror(void)
{
	env_run(&(struct env_config){ .log.no_destage = true }, co_second_side);
}

struct opener {
	struct env *e;
	bool ended;
};

static co_fn void co_opener(void *arg)
{
	struct opener *o = arg;

	co_env_open(o->e);
	o->ended = true;
}

/* The newest data may be on the one that hangs. */
static co_fn void co_at_open(struct env *e)
{
	struct opener o = { .e = e };
	struct env c;

	co_env_start(e, 1, NULL);
	powercut_dev_fail(e->log[1], -EIO);
	co_put(e, 0, 0, 8, 1);
	co_flush(e, 0);
	env_fork(e, &c, 1);
	co_env_close(e);
	o.e = &c;
	powercut_dev_stall(c.log[0], true);
	CHECK_EQ(co_spawn("opener", co_opener, &o), 0);
	co_sleep_ns(60 * SEC);
	CHECK(!o.ended);
	powercut_dev_stall(c.log[0], false);
	co_sleep_ns(SEC);
	CHECK(o.ended);
	CHECK_STR(state_of(&c, 0), "in sync");
	CHECK_STR(state_of(&c, 1), "out");
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 8, 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static void a_side_that_hangs_at_the_start_is_waited_for(void)
{
	env_run(&two_sides, co_at_open);
}

/* Reads of recovery, once both sides have said what they are: the one that answers is enough. */
static int on_recovery(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	if (dev == arg && op == DISK_OP_READ && off >= WL_FIRST_SEGMENT)
		powercut_dev_stall(dev, true);
	return 0;
}

static co_fn void co_in_recovery(struct env *e)
{
	for (unsigned side = 0; side < 2; side++) {
		struct env c;

		env_fini(e);
		env_init(e, &two_sides);
		co_env_start(e, 1, NULL);
		co_put(e, 0, 0, 8, 1);
		co_flush(e, 0);
		env_fork(e, &c, 1);
		CHECK_EQ(co_env_close(e), 0);
		powercut_set_hook(c.p, on_recovery, c.log[side]);
		uint64_t began = rt_now_ns();

		co_env_open(&c);
		CHECK(rt_now_ns() - began < 12 * SEC);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, 8, 1);
		co_put(&c, 0, 8, 1, 1);
		co_flush(&c, 0);
		CHECK(info_of(&c).degraded);
		powercut_set_hook(c.p, NULL, NULL);
		powercut_dev_stall(c.log[side], false);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
	}
}

static void a_side_that_hangs_in_recovery_is_done_without(void)
{
	env_run(&two_sides, co_in_recovery);
}

struct closer {
	struct env *e;
	int result;
	bool ended;
};

static co_fn void co_closer(void *arg)
{
	struct closer *k = arg;

	k->result = co_env_close(k->e);
	k->ended = true;
}

/* All but the hanging device is in order long before it answers: whoever must go may. */
static co_fn void co_at_close(struct env *e)
{
	struct closer k = { .e = e };
	struct wl_super *sb = malloc(sizeof(*sb));

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 4, 1);
	co_flush(e, 0);
	powercut_dev_stall(e->log[0], true);
	co_put(e, 0, 0, 4, 2);
	co_flush(e, 0);
	CHECK_EQ(co_spawn("closer", co_closer, &k), 0);
	co_sleep_ns(20 * SEC);
	CHECK(!k.ended);
	env_super(e, 1, sb);
	CHECK(sb->flags & WL_SB_FLAG_CLEAN);
	powercut_dev_stall(e->log[0], false);
	co_sleep_ns(SEC);
	CHECK(k.ended && k.result == 0);
	free(sb);
}

static void a_close_waits_for_a_hanging_side_last(void)
{
	env_run(&two_sides, co_at_close);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
#define TEST(fn) do { if (argc < 2 || strstr(#fn, argv[1])) RUN(fn); } while (0)
	TEST(a_side_that_hangs_is_given_up_and_can_come_back);
	TEST(what_a_side_does_late_is_not_believed);
	TEST(while_both_hang_writes_wait_and_neither_is_given_up);
	TEST(without_a_limit_it_waits);
	TEST(reads_go_to_the_side_that_answers);
	TEST(a_new_side_that_hangs_fails_the_rebuild_only);
	TEST(a_log_of_one_device_gets_a_mirror);
	TEST(a_side_that_hangs_at_the_start_is_waited_for);
	TEST(a_side_that_hangs_in_recovery_is_done_without);
	TEST(a_close_waits_for_a_hanging_side_last);
	return 0;
}
