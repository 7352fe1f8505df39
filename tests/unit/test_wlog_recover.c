/* SPDX-License-Identifier: MIT */
/* What recovery believes, what it reports, and what it never loses silently. */
#include "wlog_env.h"

static const struct env_config quiet = { .log = { .no_destage = true } };

/* Each write is a batch of its own. */
static co_fn void co_put_batches(struct env *e, uint64_t block, uint64_t n, uint64_t version)
{
	for (uint64_t i = 0; i < n; i++) {
		co_put(e, 0, block + i, 1, version);
		co_flush(e, 0);
	}
}

/* --- Damage is not a torn end --- */

/* The batch at the start of the newest segment has no later segment behind it that could bear witness: those in its own must. */
static co_fn void co_first_header_of_newest_segment(struct env *e)
{
	struct env c;
	struct wl_bhead h;
	uint64_t pos = 0, seq;

	co_env_start(e, 1, NULL);
	co_put_batches(e, 0, 14, 1);
	for (seq = 1; seq <= 14; seq++) {
		pos = env_find_batch(e, 0, seq, &h);
		if (h.segment == 1)
			break;
	}
	CHECK(seq < 13 && pos);
	env_fork(e, &c, 1);
	env_flip(&c, 0, pos + WL_B_NONCE);
	CHECK_EQ(co_env_try_open(&c), -EBADMSG);
	CHECK(strstr(c.err.msg, "damaged"));
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_damaged_header_at_the_start_of_the_newest_segment_is_reported(void)
{
	env_run(&quiet, co_first_header_of_newest_segment);
}

static co_fn void co_damage_before_torn_end(struct env *e)
{
	struct wl_bhead h;
	struct env c;
	uint64_t pos;
	int r;

	co_env_start(e, 1, NULL);
	co_put_batches(e, 0, 3, 1);
	env_fork(e, &c, 1);
	/* The last batch is torn in its data; the one before it, which its header proves, has rotted. */
	pos = env_find_batch(&c, 0, 3, &h);
	CHECK(pos);
	env_flip(&c, 0, pos + WL_B_HEADER + 100);
	pos = env_find_batch(&c, 0, 2, &h);
	CHECK(pos);
	env_flip(&c, 0, pos + WL_B_HEADER + 100);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 1, 1);
	/* Not the old content, as if nothing had been written. */
	co_env_get(c.vol[0], 1, &r);
	CHECK_EQ(r, -EIO);
	EXPECT_BLOCKS(&c, 0, 2, 1, 0);
	co_env_close(&c);
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static void damage_right_before_a_torn_end_is_not_taken_for_a_torn_end(void)
{
	env_run(&quiet, co_damage_before_torn_end);
}

/* --- Giving up what is damaged --- */

static co_fn void co_ignored(struct env *e, uint64_t damaged)
{
	struct env c, d;
	struct wl_bhead h;
	uint64_t pos;

	co_env_start(e, 2, NULL);
	co_put_batches(e, 0, 40, 1);
	env_fork(e, &c, 1);
	pos = env_find_batch(&c, 0, damaged, &h);
	CHECK(pos);
	env_flip(&c, 0, pos + WL_B_NONCE);
	if (h.segment == 0) {	/* and the index that could stand for it */
		for (uint64_t i = damaged; i < 40; i++) {
			pos = env_find_batch(&c, 0, i, &h);
			if (pos && h.index_len)
				env_flip(&c, 0, pos + WL_B_HEADER);
		}
	}
	CHECK_EQ(co_env_try_open(&c), -EBADMSG);
	c.c.log.ignore_damage = true;
	co_env_open(&c);
	c.c.log.ignore_damage = false;
	co_env_attach(&c, 0, NULL);
	co_env_attach(&c, 1, NULL);
	EXPECT_BLOCKS(&c, 0, 0, damaged - 1, 1);
	EXPECT_BLOCKS(&c, 0, damaged - 1, 41 - damaged, 0);
	/* What is written from here on is as safe as ever, also of a volume that was clean. */
	for (uint64_t i = 0; i < 30; i++) {
		co_put(&c, 0, 100 + i, 1, 2);
		co_put(&c, 1, i, 1, 3);
		co_flush(&c, i & 1);
	}
	co_flush(&c, 0);
	env_fork(&c, &d, 2);
	co_env_close(&c);
	co_env_open(&d);
	co_env_attach(&d, 0, NULL);
	co_env_attach(&d, 1, NULL);
	EXPECT_BLOCKS(&d, 0, 0, damaged - 1, 1);
	EXPECT_BLOCKS(&d, 0, 100, 30, 2);
	EXPECT_BLOCKS(&d, 1, 0, 30, 3);
	co_env_close(&d);
	env_fini(&d);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_env_attach(&c, 1, NULL);
	EXPECT_BLOCKS(&c, 0, 100, 30, 2);
	EXPECT_BLOCKS(&c, 1, 0, 30, 3);
	co_env_close(&c);
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static co_fn void co_ignored_early(struct env *e)
{
	co_ignored(e, 3);
}

static co_fn void co_ignored_late(struct env *e)
{
	co_ignored(e, 38);
}

static void after_damage_was_given_up_new_writes_survive_a_crash(void)
{
	env_run(&quiet, co_ignored_early);
	env_run(&quiet, co_ignored_late);
}

/* --- Mirror --- */

struct bad_sector {
	struct powercut_dev *dev;
	uint64_t from, to;
};

static int on_bad_sector(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	const struct bad_sector *b = arg;

	return op == DISK_OP_READ && dev == b->dev && off < b->to && off + len > b->from ? -EIO : 0;
}

static co_fn void co_unreadable_side(struct env *e)
{
	struct wl_bhead h;
	struct env c;

	co_env_start(e, 1, NULL);
	co_put_batches(e, 0, 20, 1);
	for (uint64_t seq = 1; seq <= 20; seq += 4) {
		env_fork(e, &c, seq);
		uint64_t pos = env_find_batch(&c, 0, seq, &h);
		struct bad_sector b = { c.log[0], pos, pos + 512 };

		CHECK(pos);
		powercut_set_hook(c.p, on_bad_sector, &b);
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, 20, 1);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
	}
	CHECK_EQ(co_env_close(e), 0);
}

static void a_sector_that_one_side_cannot_read_is_read_from_the_other_at_open(void)
{
	struct env_config c = quiet;

	c.sides = 2;
	env_run(&c, co_unreadable_side);
}

static co_fn void co_rot_of_both(struct env *e)
{
	struct wl_bhead h;
	struct env c;
	int r;

	/* The last batch is proven by a superblock, and rotten on both sides: the log opens all the same. */
	co_env_start(e, 1, NULL);
	co_put_batches(e, 0, 5, 1);
	co_sleep_ns(3 * SEC);
	CHECK_EQ(co_wl_checkpoint(e->w), 0);
	env_fork(e, &c, 1);
	for (unsigned side = 0; side < 2; side++)
		env_flip(&c, side, env_find_batch(&c, side, 5, &h) + WL_B_HEADER + 64);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 4, 1);
	co_env_get(c.vol[0], 4, &r);
	CHECK_EQ(r, -EIO);
	co_env_close(&c);
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static void rot_of_the_last_batch_on_both_sides_does_not_keep_the_log_shut(void)
{
	struct env_config c = quiet;

	c.sides = 2;
	env_run(&c, co_rot_of_both);
}

/* --- What normal running could hold, recovery can --- */

static co_fn void co_many_small(struct env *e, const struct wlog_volume_config *vc)
{
	uint8_t data[512];
	uint64_t n = 0, blocks = e->c.image_size / 1024;
	struct env c;

	co_env_start(e, 1, vc);
	/* As many records that do not touch as the log takes without destaging: until the throttle begins to bite hard. */
	for (; n < blocks && wl_fill_permille(container_of(e->vol[0], struct wlog_volume, disk)) < 900 &&
	       wl_pool_free(&e->w->pool) > WL_POOL_RESERVE + 512; n++) {
		memset(data, (int)(1 + n % 255), sizeof(data));
		CHECK_EQ(co_disk_write(e->vol[0], n * 1024, data, sizeof(data), 0), 0);
		if (n % 64 == 63)
			co_flush(e, 0);
	}
	co_flush(e, 0);
	CHECK(n > 3000);
	env_fork(e, &c, 1);
	co_env_open(&c);
	co_env_attach(&c, 0, vc);
	for (uint64_t i = 0; i < n; i += 97) {
		CHECK_EQ(co_disk_read(c.vol[0], i * 1024, data, 512, 0), 0);
		CHECK(data[0] == 1 + i % 255 && data[511] == data[0]);
	}
	co_put(&c, 0, e->c.image_size / ENV_BLOCK - 1, 1, 9);
	CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), 0);
	EXPECT_BLOCKS(&c, 0, e->c.image_size / ENV_BLOCK - 1, 1, 9);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	CHECK_EQ(co_env_close(e), 0);
}

static co_fn void co_many_small_merged(struct env *e)
{
	co_many_small(e, NULL);
}

static co_fn void co_many_small_ordered(struct env *e)
{
	const struct wlog_volume_config vc = { .destage = WLOG_DESTAGE_ORDERED };

	co_many_small(e, &vc);
}

static void a_log_full_of_small_records_can_be_opened_again(void)
{
	struct env_config c = quiet;

	c.segment = 1 << 20;
	c.log_size = WL_FIRST_SEGMENT + (32 << 20);
	c.image_size = 64 << 20;
	env_run(&c, co_many_small_merged);
	env_run(&c, co_many_small_ordered);
}

/* --- What an unfinished group leaves --- */

struct group_cut {
	struct env *e, *c;
	unsigned writes, at;	/* the log's writes since it was armed; the one that is cut */
};

static int on_group_write(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct group_cut *g = arg;

	if (dev == g->e->log[0] && op == DISK_OP_WRITE && off >= WL_FIRST_SEGMENT && ++g->writes == g->at)
		env_fork(g->e, g->c, g->at);
	return 0;
}

/*
 * Most of a segment, then a group that is cut when its first batch, at the segment's end, is durable and its second is not, and then `then` blocks. They fit
 * where that batch lies, or go to the next segment: after another crash they are there, and nothing of the group is.
 */
static co_fn void co_after_group(struct env *e, uint64_t fill, uint64_t then)
{
	struct env c, d;
	struct group_cut g = { .e = e, .c = &c, .at = 2 };

	co_env_start(e, 1, NULL);
	for (uint64_t i = 0; i < 4; i++) {
		co_put(e, 0, 60 * i, i < 3 ? 60 : fill, 1);
		co_flush(e, 0);
	}
	powercut_set_hook(e->p, on_group_write, &g);
	co_put(e, 0, 300, 300, 1);
	co_flush(e, 0);
	powercut_set_hook(e->p, NULL, NULL);
	CHECK(g.writes >= 2);
	co_env_close(e);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 300, 300, 0);
	co_put(&c, 0, 700, then, 2);
	co_flush(&c, 0);
	env_fork(&c, &d, 5);
	co_env_close(&c);
	env_fini(&c);
	co_env_open(&d);
	co_env_attach(&d, 0, NULL);
	EXPECT_BLOCKS(&d, 0, 0, 180 + fill, 1);
	EXPECT_BLOCKS(&d, 0, 700, then, 2);
	EXPECT_BLOCKS(&d, 0, 300, 300, 0);
	CHECK_EQ(co_env_close(&d), 0);
	env_fini(&d);
}

static co_fn void co_after_groups(struct env *e)
{
	const struct env_config c = { .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (16 << 20), .log.no_destage = true };

	for (uint64_t fill = 20; fill <= 60; fill += 10) {
		for (uint64_t then = 1; then <= 61; then += 20) {
			env_fini(e);
			env_init(e, &c);
			co_after_group(e, fill, then);
		}
	}
}

static void what_an_unfinished_group_leaves_is_not_taken_for_what_comes_next(void)
{
	env_run(NULL, co_after_groups);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
	RUN(a_damaged_header_at_the_start_of_the_newest_segment_is_reported);
	RUN(damage_right_before_a_torn_end_is_not_taken_for_a_torn_end);
	RUN(after_damage_was_given_up_new_writes_survive_a_crash);
	RUN(a_sector_that_one_side_cannot_read_is_read_from_the_other_at_open);
	RUN(rot_of_the_last_batch_on_both_sides_does_not_keep_the_log_shut);
	RUN(a_log_full_of_small_records_can_be_opened_again);
	RUN(what_an_unfinished_group_leaves_is_not_taken_for_what_comes_next);
	return 0;
}
