/* SPDX-License-Identifier: MIT */
/* What cannot be read from the log, and what the operator gives up: the rest goes on, and what is lost is named. */
#include "wlog_env.h"

#define HELD 48u

/* Reads of one range of the log's device fail. */
struct bad {
	struct powercut_dev *dev;
	uint64_t off, len, reads;
};

static int on_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct bad *b = arg;
	bool hit = dev == b->dev && op == DISK_OP_READ && b->len && off < b->off + b->len && b->off < off + len;

	b->reads += hit;
	return hit ? -EIO : 0;
}

struct lost {
	unsigned n;
	uint64_t off[8], len[8];
};

static void on_lost(void *arg, const char *volume, uint64_t rno, uint64_t off, uint64_t len)
{
	struct lost *l = arg;

	CHECK_STR(volume, "vol0");
	CHECK(l->n < ARRAY_SIZE(l->off));
	l->off[l->n] = off;
	l->len[l->n++] = len;
}

static struct wlog_volume_info info_of(struct env *e, unsigned i)
{
	struct wlog_volume_info info;

	CHECK_EQ(wlog_get_volume(e->w, i, &info), 0);
	return info;
}

/*
 * HELD dirty blocks of volume 0, of which block 1 is a record of its own that cannot be read; in `c` as after a restart, when nothing of it is
 * in memory.
 */
static co_fn void co_make_unreadable(struct env *e, struct env *c, struct bad *bad, const struct wlog_volume_config *vc)
{
	struct wl_bhead h;

	co_env_start(e, 1, vc);
	co_put(e, 0, 0, 1, 1);
	co_put(e, 0, 1, 1, 1);
	co_put(e, 0, 2, HELD - 2, 1);
	co_flush(e, 0);
	env_fork(e, c, 1);
	co_env_close(e);
	*bad = (struct bad){ .dev = c->log[0], .off = env_find_batch(c, 0, 2, &h) + 4096, .len = 512 };
	CHECK(bad->off > 4096);
	powercut_set_hook(c->p, on_io, bad);
	c->c.log.no_destage = false;
}

static co_fn void co_rest(struct env *e)
{
	struct bad bad;
	struct env c;
	int r;

	co_make_unreadable(e, &c, &bad, NULL);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_env_attach(&c, 1, NULL);
	co_sleep_ns(5 * SEC);
	/* All but the one is in the image, and status says which one is not. */
	CHECK_EQ(env_image(&c, 0, 0), 1);
	CHECK_EQ(env_image(&c, 0, 1), 0);
	for (uint64_t i = 2; i < HELD; i++)
		CHECK_EQ(env_image(&c, 0, i), 1);
	CHECK(info_of(&c, 0).stalled && info_of(&c, 0).bad_off == ENV_BLOCK && info_of(&c, 0).bad_len == ENV_BLOCK);
	CHECK_EQ(info_of(&c, 0).dirty_bytes, ENV_BLOCK);
	CHECK(bad.reads < 20);	/* it is not hammered */
	co_env_get(c.vol[0], 1, &r);
	CHECK_EQ(r, -EIO);
	/* Later writes of both volumes go their way. */
	co_put(&c, 0, 100, 4, 2);
	co_put(&c, 1, 0, 4, 2);
	co_flush(&c, 0);
	co_sleep_ns(4 * SEC);
	CHECK_EQ(env_image(&c, 0, 100), 2);
	CHECK_EQ(env_image(&c, 1, 0), 2);
	CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), -EIO);
	/* The device recovers. */
	bad.len = 0;
	co_sleep_ns(3 * SEC);
	CHECK_EQ(env_image(&c, 0, 1), 1);
	CHECK(!info_of(&c, 0).stalled && !info_of(&c, 0).bad_len);
	CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), 0);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static void what_cannot_be_read_keeps_nothing_else_from_the_image(void)
{
	env_run(&(struct env_config){ .log.no_destage = true }, co_rest);
}

static co_fn void co_anew(struct env *e)
{
	struct bad bad;
	struct env c;

	co_make_unreadable(e, &c, &bad, NULL);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_sleep_ns(3 * SEC);
	co_put(&c, 0, 1, 1, 5);
	co_flush(&c, 0);
	CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), 0);
	CHECK_EQ(env_image(&c, 0, 1), 5);
	CHECK(!info_of(&c, 0).bad_len);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static void what_cannot_be_read_is_whole_again_when_it_is_written_anew(void)
{
	env_run(&(struct env_config){ .log.no_destage = true }, co_anew);
}

/* Volume 1 goes many times around the ring, whose tail the bad place holds. */
static co_fn void co_around(struct env *e)
{
	for (unsigned mode = 0; mode < 2; mode++) {
		const struct wlog_volume_config vc = { .destage = mode ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };
		uint64_t longest = 0;
		struct bad bad;
		struct env c;
		int r;

		env_fini(e);
		env_init(e, &(struct env_config){ .log_size = WL_FIRST_SEGMENT + (32 * 64 << 10), .log.no_destage = true });
		co_make_unreadable(e, &c, &bad, &vc);
		co_env_open(&c);
		co_env_attach(&c, 1, NULL);
		for (uint64_t i = 0; i < 1000; i++) {
			uint64_t began = rt_now_ns();

			co_put(&c, 1, i * 4 % 64, 4, 1 + i);
			co_flush(&c, 1);
			longest = max(longest, rt_now_ns() - began);
		}
		CHECK(longest > 5 * SEC && longest < 20 * SEC);	/* it was in the way, and has been given time */
		co_env_attach(&c, 0, &vc);
		EXPECT_BLOCKS(&c, 0, 0, 1, 1);
		EXPECT_BLOCKS(&c, 0, 2, HELD - 2, 1);
		co_env_get(c.vol[0], 1, &r);
		CHECK_EQ(r, -EIO);
		co_env_close(&c);
		env_fini(&c);
	}
}

static void what_cannot_be_read_does_not_hold_the_ring_for_ever(void)
{
	env_run(NULL, co_around);
}

static co_fn void co_give_up(struct env *e)
{
	for (unsigned mode = 0; mode < 4; mode++) {
		const struct wlog_volume_config vc = { .destage = mode & 1 ? WLOG_DESTAGE_ORDERED : WLOG_DESTAGE_MERGED };
		struct lost lost = { 0 };
		struct bad bad;
		struct env c;

		env_fini(e);
		env_init(e, &(struct env_config){ .log.no_destage = true });
		co_make_unreadable(e, &c, &bad, &vc);
		c.c.log.no_destage = true;
		if (mode & 2) {	/* rotten instead of unreadable */
			env_flip(&c, 0, bad.off + 7);
			bad.len = 0;
		}
		co_env_open(&c);
		c.w->config.on_lost = on_lost;
		c.w->config.on_lost_arg = &lost;
		co_env_attach(&c, 0, &vc);
		CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), -EIO);
		CHECK_EQ(lost.n, 0);
		/* As the operator asks for. */
		wlog_ignore_damage(c.vol[0], true);
		CHECK_EQ(co_wlog_drain_volume(c.vol[0], NULL), 0);
		wlog_ignore_damage(c.vol[0], false);
		CHECK(lost.n == 1 && lost.off[0] == ENV_BLOCK && lost.len[0] == ENV_BLOCK);
		CHECK_EQ(info_of(&c, 0).lost_bytes, ENV_BLOCK);
		EXPECT_BLOCKS(&c, 0, 0, 1, 1);
		EXPECT_BLOCKS(&c, 0, 1, 1, 0);
		EXPECT_BLOCKS(&c, 0, 2, HELD - 2, 1);
		/* The volume is as good as any. */
		co_put(&c, 0, 1, 1, 3);
		co_flush(&c, 0);
		CHECK_EQ(co_wlog_drain(c.w, NULL, NULL, NULL), 0);
		CHECK_EQ(env_image(&c, 0, 1), 3);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
	}
}

static void what_the_operator_gives_up_is_named_and_the_rest_is_there(void)
{
	env_run(NULL, co_give_up);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
#define TEST(fn) do { if (argc < 2 || strstr(#fn, argv[1])) RUN(fn); } while (0)
	TEST(what_cannot_be_read_keeps_nothing_else_from_the_image);
	TEST(what_cannot_be_read_is_whole_again_when_it_is_written_anew);
	TEST(what_cannot_be_read_does_not_hold_the_ring_for_ever);
	TEST(what_the_operator_gives_up_is_named_and_the_rest_is_there);
	return 0;
}
