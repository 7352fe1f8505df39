/* SPDX-License-Identifier: MIT */
/* What a killed process left in memory: it is believed only where it can be true, and nothing of it is lost on the way to the log. */
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

static struct wl_relic_head *head(void)
{
	return (struct wl_relic_head *)(void *)memory;
}

static struct wl_relic_slot *slot_of(uint64_t seq)
{
	return (struct wl_relic_slot *)(void *)(memory + WL_BLOCK) + seq % wl_relic_layout(MEM).slots;
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

/* The server dies; what it leaves is in `c`. */
static co_fn void co_leave_and_die(struct env *e, struct env *c)
{
	co_leave_something(e);
	kill_it(e, c);
}

/* Once more as it was left. */
static void left_again(const struct env *e, struct env *c)
{
	env_fini(c);
	bring_back();
	env_fork(e, c, 1);
}

/* Opens it and finds all that was acknowledged. */
static co_fn void co_finds_all(struct env *c)
{
	co_env_open(c);
	co_env_attach(c, 0, NULL);
	co_check_all(c);
	CHECK_EQ(co_env_close(c), 0);
}

/* Opens it and finds what was flushed, and nothing else. */
static co_fn void co_finds_flushed_only(struct env *c)
{
	co_env_open(c);
	co_env_attach(c, 0, NULL);
	EXPECT_BLOCKS(c, 0, 0, FLUSHED, 1);
	EXPECT_BLOCKS(c, 0, 20, 3, 0);
	EXPECT_BLOCKS(c, 0, 30, 1, 0);
	CHECK_EQ(co_env_close(c), 0);
}

#define EXPECT_REFUSED(c, code, text) \
	do { \
		uint64_t er_writes = env_log_writes(c, 0); \
		CHECK_EQ(co_env_try_open(c), code); \
		if (!strstr((c)->err.msg, text)) \
			test_fail("%s:%d: the message does not say \"%s\": %s", __FILE__, __LINE__, text, (c)->err.msg); \
		CHECK_EQ(env_log_writes(c, 0), er_writes); \
	} while (0)

/* `c` is done with. What still runs, whose memory others have used, ends. */
static co_fn void co_end(struct env *e, struct env *c)
{
	env_fini(c);
	bring_back();
	for (unsigned i = 0; i < e->c.sides; i++)
		powercut_dev_stall(e->log[i], false);
	CHECK_EQ(co_env_close(e), 0);
}

static co_fn void co_all_there(struct env *e)
{
	struct env c;

	co_leave_and_die(e, &c);
	CHECK(head()->last - head()->written >= 3);
	co_finds_all(&c);
	/* It is in the log. */
	memset(memory, 0, WL_BLOCK);
	co_finds_all(&c);
	co_end(e, &c);
}

static void what_was_left_in_memory_is_in_the_log_behind_the_next_open(void)
{
	env_run(config(1), co_all_there);
}

/* --- Whose it is --- */

static co_fn void co_not_ours(struct env *e)
{
	struct env c;

	co_leave_and_die(e, &c);
	for (unsigned how = 0; how < 3; how++) {
		left_again(e, &c);
		if (how == 0)
			head()->generation--;
		if (how == 1)
			head()->log.b[3] ^= 1;
		if (how == 2)
			head()->boot[2] ^= 1;
		co_finds_flushed_only(&c);
	}
	/* A device that is behind who was killed gets nothing, and who has the right one finds all. */
	left_again(e, &c);
	head()->generation++;
	EXPECT_REFUSED(&c, -ESTALE, "older than the server");
	head()->generation--;
	co_finds_all(&c);
	co_end(e, &c);
}

static void what_is_of_another_time_or_log_is_not_used(void)
{
	env_run(config(1), co_not_ours);
}

static co_fn void co_other_version(struct env *e)
{
	struct env c;

	co_leave_and_die(e, &c);
	head()->version--;
	EXPECT_REFUSED(&c, -ENOTSUP, "another version");
	head()->version++;
	co_finds_all(&c);
	left_again(e, &c);
	head()->version++;
	c.c.log.ignore_damage = true;
	co_finds_flushed_only(&c);
	co_end(e, &c);
}

static void what_another_version_left_is_not_thrown_away(void)
{
	env_run(config(1), co_other_version);
}

/* --- Copies and sides, within one generation --- */

/* A copy of the device that was made while the server ran, `batches` and `superblocks` before it was killed. */
static co_fn void co_copy(struct env *e, unsigned batches, unsigned superblocks, bool same)
{
	struct env copy, c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, FLUSHED, 1);
	co_flush(e, 0);
	env_fork(e, &copy, 1);
	for (unsigned i = 0; i < superblocks; i++)
		CHECK_EQ(co_wl_checkpoint(e->w), 0);
	for (unsigned i = 0; i < batches; i++) {
		co_put(e, 0, 40, 1, 7 + i);
		co_flush(e, 0);
	}
	powercut_dev_stall(e->log[0], true);
	co_put(e, 0, 20, 3, 2);
	kill_it(e, &c);
	if (!same)
		EXPECT_REFUSED(&copy, -ESTALE, "it is a copy");
	for (unsigned right = 0; right < 2; right++) {
		struct env *d = right ? &c : &copy;

		/* Who gives up what was left may have the copy. */
		bring_back();
		d->c.log.ignore_damage = !right && !same;
		co_env_open(d);
		co_env_attach(d, 0, NULL);
		EXPECT_BLOCKS(d, 0, 0, FLUSHED, 1);
		EXPECT_BLOCKS(d, 0, 20, 3, right || same ? 2 : 0);
		EXPECT_BLOCKS(d, 0, 40, 1, right && batches ? 6 + batches : 0);
		CHECK_EQ(co_env_close(d), 0);
	}
	env_fini(&copy);
	co_end(e, &c);
}

static co_fn void co_copies(struct env *e)
{
	static const struct { unsigned batches, superblocks; bool same; } kind[] = { { 1, 0 }, { 3, 0 }, { 0, 1 }, { 0, 2 }, { 2, 2 }, { 0, 0, true } };

	for (unsigned i = 0; i < ARRAY_SIZE(kind); i++) {
		env_fini(e);
		env_init(e, config(1));
		co_copy(e, kind[i].batches, kind[i].superblocks, kind[i].same);
	}
}

static void a_copy_that_was_made_before_gets_nothing(void)
{
	env_run(config(1), co_copies);
}

/* The state before the first batch of a generation is compared, too: what an earlier one had written, or that the log was empty. */
static co_fn void co_first_batch(struct env *e)
{
	struct wl_relic_slot *s;
	struct env c;

	for (unsigned dirty = 0; dirty < 2; dirty++) {
		env_fini(e);
		env_init(e, config(1));
		co_env_start(e, 1, NULL);
		if (dirty) {
			co_put(e, 0, 0, FLUSHED, 1);
			co_flush(e, 0);
		}
		CHECK_EQ(co_env_close(e), 0);
		memset(memory, 0, wl_relic_layout(MEM).desc);	/* as the file would be */
		co_env_open(e);
		co_env_attach(e, 0, NULL);
		/* The first flush is over, so that writes are acknowledged from memory. */
		co_flush(e, 0);
		powercut_dev_stall(e->log[0], true);
		co_put(e, 0, 20, 3, 2);
		kill_it(e, &c);
		s = slot_of(head()->written);
		CHECK_EQ(s->pos != 0, dirty);
		CHECK_EQ(head()->written + 1, e->w->sb.gen_start);
		if (dirty) {
			s->nonce ^= 1;
			EXPECT_REFUSED(&c, -ESTALE, "it is a copy");
			s->nonce ^= 1;
			s->pos = 0;
			EXPECT_REFUSED(&c, -EBADMSG, "where the log ends");
		} else {
			head()->written += 1ull << 40;
			head()->last += 1ull << 40;
			EXPECT_REFUSED(&c, -EBADMSG, "damaged");
		}
		bring_back();
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, FLUSHED, dirty);
		EXPECT_BLOCKS(&c, 0, 20, 3, 2);
		CHECK_EQ(co_env_close(&c), 0);
		co_end(e, &c);
	}
}

static void the_first_batch_of_a_generation_follows_what_is_there(void)
{
	env_run(config(1), co_first_batch);
}

static co_fn void co_superblocks(struct env *e)
{
	struct env c;

	co_leave_and_die(e, &c);
	/* Killed while one was written: it is there, or it is not. */
	head()->super_next++;
	co_finds_all(&c);
	left_again(e, &c);
	head()->super--;
	co_finds_all(&c);
	left_again(e, &c);
	head()->super++;
	head()->super_next++;
	EXPECT_REFUSED(&c, -ESTALE, "it is a copy");
	left_again(e, &c);
	head()->super--;
	head()->super_next--;
	EXPECT_REFUSED(&c, -EBADMSG, "older than the log");
	left_again(e, &c);
	head()->super_next = head()->super - 1;
	EXPECT_REFUSED(&c, -EBADMSG, "impossible numbers");
	co_end(e, &c);
}

static void a_superblock_that_was_on_its_way_is_no_other_state(void)
{
	env_run(config(1), co_superblocks);
}

/* One side fails and is left behind, and the server, which goes on with the other one, is killed. */
static co_fn void co_left_behind(struct env *e)
{
	struct env c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, FLUSHED, 1);
	co_flush(e, 0);
	powercut_dev_fail(e->log[1], -EIO);
	co_put(e, 0, 50, 1, 3);
	co_flush(e, 0);
	powercut_dev_stall(e->log[0], true);
	co_put(e, 0, 20, 3, 2);
	kill_it(e, &c);
	powercut_dev_fail(c.log[1], 0);
	c.missing = 1;
	EXPECT_REFUSED(&c, -ESTALE, "the other side");
	CHECK_EQ(env_log_writes(&c, 1), 0);
	c.missing = 0;
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, FLUSHED, 1);
	EXPECT_BLOCKS(&c, 0, 20, 3, 2);
	EXPECT_BLOCKS(&c, 0, 50, 1, 3);
	CHECK(!c.w->dev.in_sync[1]);
	CHECK_EQ(co_env_close(&c), 0);
	co_end(e, &c);
}

static void a_side_that_was_left_behind_gets_nothing(void)
{
	env_run(config(2), co_left_behind);
}

/* One side is put back to an earlier state under the same superblock: the other one counts, and says so. */
static co_fn void co_side_of_old(struct env *e)
{
	struct powercut_snapshot *snap;
	struct env c;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, FLUSHED, 1);
	co_flush(e, 0);
	snap = powercut_dev_snapshot(e->log[1]);
	co_put(e, 0, 50, 1, 3);
	co_flush(e, 0);
	powercut_dev_stall(e->log[0], true);
	powercut_dev_stall(e->log[1], true);
	co_put(e, 0, 20, 3, 2);
	kill_it(e, &c);
	powercut_dev_rollback(c.log[1], snap);
	powercut_snapshot_free(snap);
	co_env_open(&c);
	CHECK(c.w->dev.in_sync[0] && !c.w->dev.in_sync[1]);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 20, 3, 2);
	EXPECT_BLOCKS(&c, 0, 50, 1, 3);
	CHECK_EQ(co_env_close(&c), 0);
	/* Alone, it is refused by its own superblock from now on. */
	c.missing = 0;
	co_env_open(&c);
	CHECK(!c.w->dev.in_sync[1]);
	CHECK_EQ(co_env_close(&c), 0);
	co_end(e, &c);
}

static void a_side_that_was_put_back_is_left_out(void)
{
	env_run(config(2), co_side_of_old);
}

/* --- Who only looks --- */

static co_fn void co_only_read(struct env *e)
{
	struct env c;

	co_leave_and_die(e, &c);
	c.c.log.read_only = true;
	uint64_t writes = env_log_writes(&c, 0);

	co_env_open(&c);
	CHECK_EQ(co_env_close(&c), 0);
	CHECK_EQ(env_log_writes(&c, 0), writes);
	CHECK(!memcmp(memory, saved, WL_BLOCK));
	c.c.log.read_only = false;
	co_finds_all(&c);
	co_end(e, &c);
}

static void who_only_reads_leaves_it_for_who_writes(void)
{
	env_run(config(1), co_only_read);
}

/* --- Damage --- */

static void spoil(struct rng *r)
{
	struct wl_relic_layout l = wl_relic_layout(MEM);
	struct wl_relic_head *h = head();
	static const uint64_t odd[] = { 0, 1, 2, 3, 0xffffffff, 1ull << 32, 1ull << 40, 1ull << 63, UINT64_MAX, UINT64_MAX - 1, MEM };
	uint64_t value = rng_below(r, 3) ? odd[rng_below(r, ARRAY_SIZE(odd))] : rng_u64(r), seq = h->written + rng_below(r, 6);
	uint64_t *field[] = { &h->mem_size, &h->super, &h->super_next, &h->written, &h->last, &h->fill, &h->open_prev, &h->group_seq, &h->group_fill };
	struct wl_relic_slot *s = slot_of(seq);

	switch (rng_below(r, 9)) {
	case 0:
	case 1:
		*field[rng_below(r, ARRAY_SIZE(field))] = value;
		break;
	case 2:
		*(rng_below(r, 2) ? &h->slots : rng_below(r, 2) ? &h->open_index : &h->open_index_crc) = (uint32_t)value;
		break;
	case 8:
		s->nonce = value;
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
	co_leave_and_die(e, &c);
	for (unsigned i = 0; i < rounds; i++) {
		left_again(e, &c);
		for (unsigned n = 1 + rng_below(&r, 3); n; n--)
			spoil(&r);
		int ret = co_env_try_open(&c);

		CHECK(ret == 0 || ret == -EBADMSG || ret == -ESTALE);
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
	CHECK(refused > rounds / 2);
	co_end(e, &c);
}

static void damage_is_refused_or_without_effect(void)
{
	env_run(config(1), co_spoiled);
}

/* Of a record without data only its descriptor says anything. */
static co_fn void co_descriptors(struct env *e)
{
	struct wl_relic_layout l = wl_relic_layout(MEM);
	static const unsigned at[] = { WL_D_TYPE, WL_D_OFF, WL_D_OFF + 1, WL_D_LEN + 1, WL_D_RNO, WL_D_EPOCH };
	uint32_t count;
	struct env c;

	co_leave_and_die(e, &c);
	count = wl_relic_count(head()->fill);
	CHECK(count >= 1);
	for (unsigned i = 0; i < ARRAY_SIZE(at); i++) {
		memory[l.desc + (count - 1) * WL_D_SIZE + at[i]] ^= at[i] == WL_D_TYPE ? WL_ZERO ^ WL_DISCARD : 0x10;
		EXPECT_REFUSED(&c, -EBADMSG, "damaged");
		bring_back();
	}
	co_finds_all(&c);
	co_end(e, &c);
}

static void a_descriptor_of_the_open_batch_that_changed_is_refused(void)
{
	env_run(config(1), co_descriptors);
}

/* The batch that is open is the first of its segment, with the index of the one before. */
static co_fn void co_index(struct env *e)
{
	struct wl_relic_layout l = wl_relic_layout(MEM);
	struct env c;

	co_env_start(e, 1, NULL);
	co_flush(e, 0);
	powercut_dev_stall(e->log[0], true);
	for (unsigned i = 0; !e->w->open || !e->w->open_index_len; i++)
		co_put(e, 0, 100 + i * 60, 60, 3);
	kill_it(e, &c);
	CHECK(head()->open_index > 0);
	memory[l.ring + (uint64_t)slot_of(head()->last)->off * WL_BLOCK + WL_B_HEADER + 5] ^= 1;
	EXPECT_REFUSED(&c, -EBADMSG, "damaged");
	bring_back();
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 100, 60, 3);
	CHECK_EQ(co_env_close(&c), 0);
	co_end(e, &c);
}

static void an_index_of_the_open_batch_that_changed_is_refused(void)
{
	env_run(config(1), co_index);
}

/* Part of a request whose rest is not there: recovery would leave it out, and nobody be told. */
static co_fn void co_half_a_group(struct env *e)
{
	struct wl_bhead h;
	struct env c;

	co_leave_and_die(e, &c);
	head()->last--;
	uint8_t *p = memory + wl_relic_layout(MEM).ring + (uint64_t)slot_of(head()->last)->off * WL_BLOCK;

	CHECK_EQ(wl_bhead_decode(p, WL_MAX_BATCH, &e->w->sb.uuid, &h), 0);
	h.flags |= WL_B_FLAG_MORE;
	wl_bhead_encode(&h, &e->w->sb.uuid, p);
	EXPECT_REFUSED(&c, -EBADMSG, "a part of a request");
	co_end(e, &c);
}

static void a_part_of_a_request_is_not_the_last_that_is_left(void)
{
	env_run(config(1), co_half_a_group);
}

/* Whole, with good checksums, each behind the one before, and round the ring into what the log needs. */
static co_fn void co_round_the_ring(struct env *e)
{
	struct wl_relic_layout l = wl_relic_layout(MEM);
	struct env c;

	for (unsigned more = 0; more < 2; more++) {
		env_fini(e);
		env_init(e, config(1));
		co_env_start(e, 1, NULL);
		co_put(e, 0, 0, FLUSHED, 1);
		co_flush(e, 0);
		powercut_dev_stall(e->log[0], true);
		uint32_t segments = e->w->sb.seg_count;

		for (unsigned i = 0; i < segments - 1 + more; i++) {
			co_put(e, 0, 20 + i, 1, 2);
			wl_seal(e->w);
		}
		kill_it(e, &c);
		for (uint64_t seq = head()->written + 1, n = 1; seq <= head()->last; seq++, n++) {
			uint8_t *p = memory + l.ring + (uint64_t)slot_of(seq)->off * WL_BLOCK;
			struct wl_bhead h;

			CHECK_EQ(wl_bhead_decode(p, WL_MAX_BATCH, &e->w->sb.uuid, &h), 0);
			h.segment = (uint32_t)n % segments;
			wl_bhead_encode(&h, &e->w->sb.uuid, p);
			slot_of(seq)->pos = wl_segment_pos(e->w, h.segment);
		}
		if (more)
			EXPECT_REFUSED(&c, -EBADMSG, "what it needs");
		else
			co_env_open(&c);
		if (!more)
			CHECK_EQ(co_env_close(&c), 0);
		co_end(e, &c);
	}
}

static void what_the_log_needs_is_never_written_over(void)
{
	env_run(config(1), co_round_the_ring);
}

/* --- Errors and mirrors --- */

static co_fn void co_failing(struct env *e)
{
	struct env c;

	co_leave_and_die(e, &c);
	for (uint64_t n = 0; n < 3; n++) {
		powercut_dev_fail(c.log[0], n ? -ENOSPC : -EIO);
		CHECK(co_env_try_open(&c) < 0);
		powercut_dev_fail(c.log[0], 0);
	}
	co_finds_all(&c);
	co_end(e, &c);
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
		struct env c;

		env_fini(e);
		env_init(e, config(1));
		co_leave_and_die(e, &c);
		head()->group_seq = head()->last;
		head()->group_fill = records ? head()->fill : 0;
		powercut_set_hook(c.p, fail_superblocks, NULL);
		CHECK_EQ(co_env_try_open(&c), -EIO);
		CHECK_EQ(head()->written, head()->last);
		powercut_set_hook(c.p, NULL, NULL);
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, FLUSHED, 1);
		EXPECT_BLOCKS(&c, 0, 20, 3, 2);
		EXPECT_BLOCKS(&c, 0, 100, 200, 3);
		EXPECT_BLOCKS(&c, 0, 30, 1, records ? 4 : 0);
		CHECK_EQ(co_env_close(&c), 0);
		co_end(e, &c);
	}
}

static void a_start_that_goes_no_further_is_like_a_kill(void)
{
	env_run(config(1), co_failing_later);
}

/* A batch that was opened only, or a group that had only begun, behind batches that are on the device. */
static co_fn void co_nothing_left(struct env *e)
{
	for (unsigned group = 0; group < 2; group++) {
		struct env c;

		env_fini(e);
		env_init(e, config(1));
		co_env_start(e, 1, NULL);
		co_put(e, 0, 0, FLUSHED, 1);
		co_flush(e, 0);
		kill_it(e, &c);
		CHECK_EQ(head()->written, head()->last);
		head()->last++;
		head()->fill = 0;
		*slot_of(head()->last) = (struct wl_relic_slot){ .pos = slot_of(head()->written)->pos + slot_of(head()->written)->length };
		head()->group_seq = group ? head()->last : 0;
		head()->group_fill = 0;
		powercut_set_hook(c.p, fail_superblocks, NULL);
		CHECK_EQ(co_env_try_open(&c), -EIO);
		CHECK_EQ(head()->written, head()->last);
		powercut_set_hook(c.p, NULL, NULL);
		co_env_open(&c);
		co_env_attach(&c, 0, NULL);
		EXPECT_BLOCKS(&c, 0, 0, FLUSHED, 1);
		CHECK_EQ(co_env_close(&c), 0);
		co_end(e, &c);
	}
}

static void the_next_start_does_not_wonder_at_a_batch_that_was_opened_only(void)
{
	env_run(config(1), co_nothing_left);
}

static struct env *fork_of;	/* taken at a write to the first side */
static unsigned writes_left;
static unsigned superblocks;	/* before the first batch */
static bool begun;

static int on_write(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct env *e = arg;

	begun |= op == DISK_OP_WRITE && off >= WL_FIRST_SEGMENT;
	superblocks += op == DISK_OP_WRITE && !begun;

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
		superblocks = 0;
		begun = false;
		powercut_set_hook(c.p, on_write, &c);
		co_env_open(&c);
		CHECK_EQ(writes_left, 0);
		CHECK_EQ(superblocks, 1);
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
		co_end(e, &d);
	}
}

static void a_side_that_was_away_does_not_pass_for_one_that_has_it(void)
{
	env_run(config(2), co_one_side);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
	RUN(what_was_left_in_memory_is_in_the_log_behind_the_next_open);
	RUN(what_is_of_another_time_or_log_is_not_used);
	RUN(what_another_version_left_is_not_thrown_away);
	RUN(a_copy_that_was_made_before_gets_nothing);
	RUN(the_first_batch_of_a_generation_follows_what_is_there);
	RUN(a_superblock_that_was_on_its_way_is_no_other_state);
	RUN(a_side_that_was_left_behind_gets_nothing);
	RUN(a_side_that_was_put_back_is_left_out);
	RUN(who_only_reads_leaves_it_for_who_writes);
	RUN(damage_is_refused_or_without_effect);
	RUN(a_descriptor_of_the_open_batch_that_changed_is_refused);
	RUN(an_index_of_the_open_batch_that_changed_is_refused);
	RUN(a_part_of_a_request_is_not_the_last_that_is_left);
	RUN(what_the_log_needs_is_never_written_over);
	RUN(a_device_that_fails_meanwhile_loses_nothing);
	RUN(a_start_that_goes_no_further_is_like_a_kill);
	RUN(the_next_start_does_not_wonder_at_a_batch_that_was_opened_only);
	RUN(a_side_that_was_away_does_not_pass_for_one_that_has_it);
	return 0;
}
