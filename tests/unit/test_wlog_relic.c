/* SPDX-License-Identifier: MIT */
/* What a killed process left in memory: it is believed only where it can be true, and nothing of it is lost on the way to the log. */
#include <sys/stat.h>
#include <unistd.h>

#include "util/rng.h"
#include "wlog_env.h"

#define MEM (8u << 20)

static uint8_t *memory, *saved;

static const struct env_config *config(unsigned sides)
{
	static struct env_config c;

	if (!memory) {
		memory = calloc(1, wl_relic_size(MEM));
		saved = calloc(1, wl_relic_size(MEM));
		CHECK(memory && saved);
	}
	memset(memory, 0, WL_BLOCK);
	c = (struct env_config){ .sides = sides, .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (16 << 20),
				 .log = { .memory = MEM, .no_destage = true, .relic_mem = memory } };
	return &c;
}

/* What the tests below use of it: the head, the slots, some descriptors, and the start of the ring. */
static void copy_used(uint8_t *to, const uint8_t *from)
{
	struct wl_relic_layout l = wl_relic_layout(MEM);

	memcpy(to, from, l.desc + (64 << 10));
	memcpy(to + l.ring, from + l.ring, 2 << 20);
}

/* The process is gone; the devices are as they were, and so is the memory. */
static void kill_it(struct env *e, struct env *after)
{
	copy_used(saved, memory);
	env_fork(e, after, 1);
}

static void bring_back(void)
{
	copy_used(memory, saved);
}

#define FLUSHED 8	/* blocks from 0 on, version 1 */

/* Some batches that are sealed and not written, one of them a part of a group, and an open one. */
static co_fn void co_leave_something(struct env *e)
{
	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, FLUSHED, 1);
	co_flush(e, 0);
	powercut_dev_stall(e->log[0], true);
	co_put(e, 0, 20, 3, 2);
	wl_seal(e->w);
	co_put(e, 0, 100, 200, 3);
	co_put(e, 0, 30, 1, 4);
	CHECK_EQ(co_disk_zero(e->vol[0], 31 * ENV_BLOCK, ENV_BLOCK, 0), 0);
}

static co_fn void co_check_all(struct env *e)
{
	EXPECT_BLOCKS(e, 0, 0, FLUSHED, 1);
	EXPECT_BLOCKS(e, 0, 20, 3, 2);
	EXPECT_BLOCKS(e, 0, 100, 200, 3);
	EXPECT_BLOCKS(e, 0, 30, 1, 4);
	EXPECT_BLOCKS(e, 0, 31, 1, 0);
}

static co_fn void co_end(struct env *e)
{
	powercut_dev_stall(e->log[0], false);
	CHECK_EQ(co_env_close(e), 0);
}

static co_fn void co_all_there(struct env *e)
{
	struct env c;

	co_leave_something(e);
	CHECK(e->w->relic.head->last - e->w->relic.head->written >= 3);
	kill_it(e, &c);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_check_all(&c);
	CHECK_EQ(co_env_close(&c), 0);
	/* It is in the log. */
	memset(memory, 0, WL_BLOCK);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_check_all(&c);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	/* What still runs has had its memory used by the other one. */
	bring_back();
	co_end(e);
}

static void what_was_left_in_memory_is_in_the_log_behind_the_next_open(void)
{
	env_run(config(1), co_all_there);
}

/* --- Whose it is --- */

static co_fn void co_not_ours(struct env *e)
{
	struct env c;

	co_leave_something(e);
	kill_it(e, &c);
	for (unsigned how = 0; how < 4; how++) {
		struct wl_relic_head *h = (void *)memory;

		env_fini(&c);
		bring_back();
		env_fork(e, &c, 1);
		if (how == 0)
			h->generation--;
		if (how == 1)
			h->generation++;
		if (how == 2)
			h->log.b[3] ^= 1;
		if (how == 3)
			h->boot[2] ^= 1;
		if (how == 1) {
			/* A device that is behind who was killed gets nothing, and who has the right one finds all. */
			CHECK_EQ(co_env_try_open(&c), -ESTALE);
			h->generation--;
			co_env_open(&c);
			co_env_attach(&c, 0, NULL);
			co_check_all(&c);
			CHECK_EQ(co_env_close(&c), 0);
			continue;
		}
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, FLUSHED, 1);
		EXPECT_BLOCKS(&c, 0, 20, 3, 0);
		EXPECT_BLOCKS(&c, 0, 30, 1, 0);
		CHECK_EQ(co_env_close(&c), 0);
	}
	env_fini(&c);
	bring_back();
	co_end(e);
}

static void what_is_of_another_time_or_log_is_not_used(void)
{
	env_run(config(1), co_not_ours);
}

static co_fn void co_only_read(struct env *e)
{
	struct env c;

	co_leave_something(e);
	kill_it(e, &c);
	c.c.log.read_only = true;
	uint64_t writes = env_log_writes(&c, 0);

	co_env_open(&c);
	CHECK_EQ(co_env_close(&c), 0);
	CHECK_EQ(env_log_writes(&c, 0), writes);
	CHECK(!memcmp(memory, saved, WL_BLOCK));
	c.c.log.read_only = false;
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_check_all(&c);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	bring_back();
	co_end(e);
}

static void who_only_reads_leaves_it_for_who_writes(void)
{
	env_run(config(1), co_only_read);
}

/* --- Damage --- */

static void spoil(struct rng *r)
{
	struct wl_relic_layout l = wl_relic_layout(MEM);
	struct wl_relic_head *h = (void *)memory;
	static const uint64_t odd[] = { 0, 1, 2, 3, 0xffffffff, 1ull << 32, 1ull << 40, 1ull << 63, UINT64_MAX, UINT64_MAX - 1, MEM };
	uint64_t value = rng_below(r, 3) ? odd[rng_below(r, ARRAY_SIZE(odd))] : rng_u64(r), seq = h->written + 1 + rng_below(r, 5);
	uint64_t *field[] = { &h->mem_size, &h->written, &h->last, &h->fill, &h->open_prev, &h->open_index, &h->group_seq, &h->group_fill };
	struct wl_relic_slot *s = (struct wl_relic_slot *)(void *)(memory + WL_BLOCK) + seq % l.slots;

	switch (rng_below(r, 8)) {
	case 0:
	case 1:
		*field[rng_below(r, ARRAY_SIZE(field))] = value;
		break;
	case 2:
		h->slots = (uint32_t)value;
		break;
	case 3:
		s->pos = rng_below(r, 2) ? value : s->pos + (value & 0xfffff) * WL_BLOCK;
		break;
	case 4:
		s->off = rng_below(r, 2) ? (uint32_t)value : s->off ^ 1;
		break;
	case 5:
		s->length = rng_below(r, 2) ? (uint32_t)value : s->length + WL_BLOCK;
		break;
	case 6:
		memory[l.ring + rng_below(r, 1200 << 10)] ^= 1u << rng_below(r, 8);
		break;
	default:
		memory[l.desc + rng_below(r, 256)] ^= 1u << rng_below(r, 8);
		break;
	}
}

static co_fn void co_spoiled(struct env *e)
{
	unsigned refused = 0, rounds = (unsigned)test_scale(400);
	struct rng r;
	struct env c;

	rng_seed(&r, test_env_u64("WEIR_SEED", 7));
	co_leave_something(e);
	kill_it(e, &c);
	for (unsigned i = 0; i < rounds; i++) {
		env_fini(&c);
		bring_back();
		env_fork(e, &c, 1);
		for (unsigned n = 1 + rng_below(&r, 3); n; n--)
			spoil(&r);
		c.c.log.ignore_damage = false;
		int ret = co_env_try_open(&c);

		CHECK(ret == 0 || ret == -EBADMSG);
		if (ret < 0) {
			refused++;
			if (!strstr(c.err.msg, "damaged"))
				test_fail("round %u: %s", i, c.err.msg);
			c.c.log.ignore_damage = true;
			ret = co_env_try_open(&c);
			if (ret < 0)
				test_fail("round %u: given up, and yet: %s", i, c.err.msg);
		}
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, FLUSHED, 1);
		CHECK_EQ(co_env_close(&c), 0);
	}
	CHECK(refused > rounds / 3);
	env_fini(&c);
	bring_back();
	co_end(e);
}

static void damage_is_refused_or_without_effect(void)
{
	env_run(config(1), co_spoiled);
}

/* --- Errors and mirrors --- */

static co_fn void co_failing(struct env *e)
{
	struct env c;

	co_leave_something(e);
	kill_it(e, &c);
	for (uint64_t n = 0; n < 3; n++) {
		powercut_dev_fail(c.log[0], n ? -ENOSPC : -EIO);
		CHECK(co_env_try_open(&c) < 0);
		powercut_dev_fail(c.log[0], 0);
	}
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	co_check_all(&c);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	bring_back();
	co_end(e);
}

static void a_device_that_fails_meanwhile_loses_nothing(void)
{
	env_run(config(1), co_failing);
}

static int fail_superblocks(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	return op == DISK_OP_WRITE && off < WL_FIRST_SEGMENT ? -EIO : 0;
}

/* Killed while a group was put in behind `records` others, and then a start that has written what was left goes no further. */
static co_fn void co_failing_later(struct env *e)
{
	for (unsigned records = 0; records <= 2; records += 2) {
		struct wl_relic_head *h = (void *)memory;
		struct env c;

		env_fini(e);
		env_init(e, config(1));
		co_leave_something(e);
		kill_it(e, &c);
		h->group_seq = h->last;
		h->group_fill = records ? h->fill : 0;
		powercut_set_hook(c.p, fail_superblocks, NULL);
		CHECK_EQ(co_env_try_open(&c), -EIO);
		CHECK_EQ(h->written, h->last);
		powercut_set_hook(c.p, NULL, NULL);
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, FLUSHED, 1);
		EXPECT_BLOCKS(&c, 0, 20, 3, 2);
		EXPECT_BLOCKS(&c, 0, 100, 200, 3);
		EXPECT_BLOCKS(&c, 0, 30, 1, records ? 4 : 0);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
		bring_back();
		co_end(e);
	}
}

static void a_start_that_goes_no_further_is_like_a_kill(void)
{
	env_run(config(1), co_failing_later);
}

static struct env *fork_of;	/* taken at a write to the first side */
static unsigned writes_left;

static int on_write(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct env *e = arg;

	if (op == DISK_OP_WRITE && off >= WL_FIRST_SEGMENT && writes_left && --writes_left == 0)
		env_fork(e, fork_of, 3);
	return 0;
}

/*
 * One side is away, and the machine goes down while the other one gets what was left. Whatever then is there with both sides, is there with the side that was
 * away alone: it has all batches, or it counts as left behind.
 */
static co_fn void co_one_side(struct env *e)
{
	struct env c, d;
	int ret;

	for (unsigned nth = 2; nth <= 4; nth++) {
		env_fini(e);
		env_init(e, config(2));
		co_env_start(e, 1, NULL);
		co_put(e, 0, 0, FLUSHED, 1);
		co_flush(e, 0);
		powercut_dev_stall(e->log[0], true);
		powercut_dev_stall(e->log[1], true);
		for (unsigned i = 0; i < 6; i++) {
			co_put(e, 0, 20 + i, 1, 2);
			wl_seal(e->w);
		}
		kill_it(e, &c);
		c.missing = 2;
		fork_of = &d;
		writes_left = nth;
		powercut_set_hook(c.p, on_write, &c);
		co_env_open(&c);
		CHECK_EQ(writes_left, 0);
		powercut_set_hook(c.p, NULL, NULL);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 20, 6, 2);
		CHECK_EQ(co_env_close(&c), 0);
		env_fini(&c);
		memset(memory, 0, WL_BLOCK);
		d.missing = 0;
		co_env_open(&d);
		CHECK(!d.w->dev.in_sync[1]);
		co_env_attach(&d, 0, NULL);
		EXPECT_BLOCKS(&d, 0, 20, nth - 1, 2);
		CHECK_EQ(co_env_close(&d), 0);
		d.missing = 1;
		ret = co_env_try_open(&d);
		if (ret == 0 && co_env_try_attach(&d, 0, NULL) == 0)
			EXPECT_BLOCKS(&d, 0, 20, nth - 1, 2);
		if (ret == 0)
			CHECK_EQ(co_env_close(&d), 0);
		env_fini(&d);
		bring_back();
		powercut_dev_stall(e->log[0], false);
		powercut_dev_stall(e->log[1], false);
		CHECK_EQ(co_env_close(e), 0);
	}
}

static void a_side_that_was_away_does_not_pass_for_one_that_has_it(void)
{
	env_run(config(2), co_one_side);
}

/* --- The file --- */

static char folder[] = "/dev/shm/weir-test-XXXXXX";

static uint64_t bytes_of(const struct env *e)
{
	struct stat st;

	return stat(e->w->relic.path, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static co_fn void co_memory(struct env *e)
{
	char path[256];

	co_env_start(e, 1, NULL);
	CHECK(e->w->relic.kept && bytes_of(e) < 4 << 20);
	for (unsigned round = 1; round <= 2; round++) {
		for (unsigned i = 0; i < 1000; i += 20)
			co_put(e, 0, i, 20, round);
		CHECK(bytes_of(e) > 4 << 20);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		EXPECT_BLOCKS(e, 0, 0, 1000, round);
		co_sleep_ns(20 * SEC);
		CHECK(bytes_of(e) < 4 << 20);
	}
	strcpy(path, e->w->relic.path);
	CHECK_EQ(co_env_close(e), 0);
	CHECK(access(path, F_OK) < 0);
}

static void memory_goes_back_when_nothing_is_dirty(void)
{
	struct env_config c = *config(1);

	if (!mkdtemp(folder)) {
		printf("not tested: no /dev/shm\n");
		return;
	}
	c.log.relic_mem = NULL;
	c.log.no_destage = false;
	c.log.relic_dir = folder;
	env_run(&c, co_memory);
	CHECK_EQ(rmdir(folder), 0);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
	RUN(what_was_left_in_memory_is_in_the_log_behind_the_next_open);
	RUN(what_is_of_another_time_or_log_is_not_used);
	RUN(who_only_reads_leaves_it_for_who_writes);
	RUN(damage_is_refused_or_without_effect);
	RUN(a_device_that_fails_meanwhile_loses_nothing);
	RUN(a_start_that_goes_no_further_is_like_a_kill);
	RUN(a_side_that_was_away_does_not_pass_for_one_that_has_it);
	RUN(memory_goes_back_when_nothing_is_dirty);
	return 0;
}
