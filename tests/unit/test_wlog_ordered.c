/* SPDX-License-Identifier: MIT */
/* Ordered destage to a store that applies a write within an object whole: which epochs go in one write, and that they do so again after a crash. */
#include "wlog_env.h"

#define UNIT_BLOCKS (WL_RUN_MAX / ENV_BLOCK)

static const struct env_config ceph = { .segment = 1 << 20, .log_size = WL_FIRST_SEGMENT + (32 << 20), .log.no_destage = true,
					.image_dev = { .object = 4 << 20, .opt_depth = 64, .whole = true, .write_through = true } };
static const struct wlog_volume_config ordered = { .destage = WLOG_DESTAGE_ORDERED };

/* How many writes of the image it takes to drain what is there. */
static co_fn unsigned co_drain_writes(struct env *e)
{
	const uint64_t *writes = &powercut_dev_counters(e->image[0])->ops[DISK_OP_WRITE], before = *writes;

	CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
	return *writes - before;
}

/* The same for `n` epochs: the k-th is `blocks` from `from` + k * `step` on. */
static co_fn unsigned co_epochs(struct env *e, unsigned n, uint64_t from, uint64_t blocks, uint64_t step)
{
	for (unsigned i = 0; i < n; i++) {
		co_put(e, 0, from + i * step, blocks, i + 1);
		co_flush(e, 0);
	}
	return co_drain_writes(e);
}

static co_fn void co_bytes(struct env *e, uint64_t off, uint64_t len)
{
	uint8_t data[1024] = { 7 };

	CHECK_EQ(co_disk_write(e->vol[0], off, data, len, 0), 0);
	co_flush(e, 0);
}

static co_fn void co_joined(struct env *e)
{
	co_env_start(e, 1, &ordered);
	co_flush(e, 0);
	struct wlog_volume *v = container_of(e->vol[0], struct wlog_volume, disk);
	struct disk_limits *l = &v->disk.file->limits;
	uint32_t whole = l->atomic_write;

	l->atomic_write = 0;
	CHECK_EQ(co_epochs(e, 60, 0, 2, 2), 60);	/* it tears its writes */
	l->atomic_write = whole;
	CHECK_EQ(co_epochs(e, 60, 0, 2, 2), 1);		/* appended */
	CHECK_EQ(co_epochs(e, 60, 9, 2, 0), 1);		/* the same place */
	CHECK_EQ(co_epochs(e, 60, 0, 2, 1), 1);
	CHECK_EQ(v->joined, 3 * 59);
	CHECK_EQ(co_epochs(e, 60, 0, 2, 3), 60);	/* with holes */
	/* Two units, and between them an epoch that lies in both, which goes alone, in two writes. */
	CHECK_EQ(co_epochs(e, 200, 1, 2, 2), 4);
	CHECK_EQ(v->joined, 3 * 59 + 200 - 3);
	CHECK_EQ(co_epochs(e, 3, 0, UNIT_BLOCKS, UNIT_BLOCKS / 2), 4);
	/* Nothing is read to fill up a sector. */
	co_bytes(e, 0, 700);
	co_bytes(e, 700, 324);
	CHECK_EQ(co_drain_writes(e), 1);
	co_bytes(e, 0, 512);
	co_bytes(e, 512, 300);
	CHECK_EQ(co_drain_writes(e), 2);
	CHECK_EQ(co_env_close(e), 0);
}

static void epochs_go_in_one_write_if_they_touch_within_an_object(void)
{
	env_run(&ceph, co_joined);
}

static co_fn void co_kept_out(struct env *e)
{
	co_env_start(e, 1, &ordered);
	co_flush(e, 0);
	/* Zeroes are a request of another kind. */
	co_put(e, 0, 0, 2, 1);
	co_flush(e, 0);
	CHECK_EQ(co_disk_zero(e->vol[0], 2 * ENV_BLOCK, ENV_BLOCK, 0), 0);
	CHECK_EQ(co_epochs(e, 1, 0, 1, 0), 2);
	/* One record that does not fit keeps all of its epoch out. */
	for (unsigned i = 0; i < 6; i++) {
		co_put(e, 0, i, 1, 1);
		if (i == 4)
			co_put(e, 0, 2 * UNIT_BLOCKS, 1, 1);
		co_flush(e, 0);
	}
	CHECK_EQ(co_drain_writes(e), 1 + 2 + 1);
	/* What nobody has flushed yet is an epoch of its own. */
	co_put(e, 0, 0, 1, 2);
	co_flush(e, 0);
	co_put(e, 0, 1, 1, 2);
	CHECK_EQ(co_wlog_commit(e->w), 0);
	CHECK_EQ(co_drain_writes(e), 2);
	CHECK_EQ(co_env_close(e), 0);
}

static void what_does_not_fit_goes_by_itself(void)
{
	env_run(&ceph, co_kept_out);
}

/* --- After a crash --- */

struct joined_cut {
	struct env *e, *c;	/* c: as a cut leaves it when that write is on its way, and no superblock says so */
	uint64_t off, len;	/* the image's first write */
};

static int on_joined(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct joined_cut *j = arg;

	if (op != DISK_OP_WRITE || !len || dev != j->e->image[0] || j->len)
		return 0;
	j->off = off;
	j->len = len;
	if (j->c)
		env_fork(j->e, j->c, 7);
	return 0;
}

/* Each with the second half of the one before. */
static co_fn void co_overlapping_epochs(struct env *e, uint64_t from, uint64_t n)
{
	for (uint64_t i = from; i < from + n; i++) {
		co_put(e, 0, i, 2, i + 1);
		co_flush(e, 0);
	}
}

static co_fn void co_drain_joined(struct joined_cut *j)
{
	powercut_set_hook(j->e->p, on_joined, j);
	CHECK_EQ(co_wlog_drain(j->e->w, NULL, NULL, NULL), 0);
	powercut_set_hook(j->e->p, NULL, NULL);
}

/* `n` epochs; those that followed each other into the image go together again when a crash has forgotten that they are there, whatever came meanwhile. */
static co_fn void co_joined_again(struct env *e, uint64_t n, uint64_t more)
{
	struct env c;
	struct joined_cut first = { .e = e, .c = &c }, again = { .e = &c };

	co_env_start(e, 1, &ordered);
	co_flush(e, 0);
	co_overlapping_epochs(e, 0, n);
	co_drain_joined(&first);
	CHECK(first.len > 2 * ENV_BLOCK);
	co_env_open(&c);
	co_env_attach(&c, 0, &ordered);
	co_flush(&c, 0);
	EXPECT_BLOCKS(&c, 0, n, 1, n);
	co_overlapping_epochs(&c, n, more);
	co_drain_joined(&again);
	CHECK_EQ(again.off, first.off);
	if (more && first.len == (n + 1) * ENV_BLOCK)
		CHECK_EQ(again.len, min((n + more + 1) * ENV_BLOCK, (uint64_t)WL_RUN_MAX));
	else
		CHECK_EQ(again.len, first.len);
	for (uint64_t i = 0; i < n + more; i++)
		EXPECT_BLOCKS(&c, 0, i, 1, i + 1);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	co_env_close(e);
}

static co_fn void co_joined_cuts(struct env *e)
{
	const struct env_config c = e->c;

	/* The second number: within the object; to its end, and beyond. */
	for (unsigned i = 0; i < 5; i++) {
		env_fini(e);
		env_init(e, &c);
		co_joined_again(e, (unsigned[]){ 5, 100, 100, 254, 400 }[i], (unsigned[]){ 0, 0, 50, 30, 9 }[i]);
	}
}

static void epochs_that_went_together_go_together_again_after_a_crash(void)
{
	env_run(&ceph, co_joined_cuts);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
	RUN(epochs_go_in_one_write_if_they_touch_within_an_object);
	RUN(what_does_not_fit_goes_by_itself);
	RUN(epochs_that_went_together_go_together_again_after_a_crash);
	return 0;
}
