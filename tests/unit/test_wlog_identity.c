/* SPDX-License-Identifier: MIT */
/* Which log belongs to which image: what is refused, what a refusal leaves alone, and that no volume ever sees another one's data. */
#include "blk/spec.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "wlog_env.h"

static const struct env_config quiet = { .log = { .no_destage = true } };

#define EXPECT_REFUSED(e, r, code, text) \
	do { \
		CHECK_EQ(r, code); \
		if (!strstr((e)->err.msg, text)) \
			test_fail("%s:%d: %s: the message does not say \"%s\": %s", __FILE__, __LINE__, __func__, text, (e)->err.msg); \
	} while (0)

/* Images have a past. */
static void touch(struct env *e)
{
	static const uint8_t zero[512];

	for (unsigned i = 0; i < ENV_VOLUMES; i++)
		powercut_dev_poke(e->image[i], 0, zero, sizeof(zero), true);
}

/* A log with one dirty volume, closed. */
static co_fn void co_dirty(struct env *e)
{
	touch(e);
	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 8, 1);
	co_flush(e, 0);
	CHECK_EQ(co_env_close(e), 0);
}

/* --- Refusals --- */

/* An image that another log left its mark on. */
static co_fn void co_other_log(struct env *e)
{
	const struct wlog_volume_config discard = { .discard_log = true };
	struct disk *image;
	struct err err = ERR_INIT;

	co_dirty(e);
	CHECK_EQ(co_env_try_format(e, false), -EEXIST);
	CHECK(strstr(e->err.msg, "32K") || strstr(e->err.msg, "32 K"));
	CHECK_EQ(co_env_try_format(e, true), 0);
	co_env_open(e);
	EXPECT_REFUSED(e, co_env_try_attach(e, 0, NULL), -EBUSY, "another write log");
	/* Without a log, too. */
	image = env_open_dev(e->image[0]);
	CHECK_EQ(co_wlog_check_unlogged(image, false, &err), -EBUSY);
	co_disk_close(image);
	CHECK_EQ(co_env_try_attach(e, 0, &discard), 0);
	CHECK_EQ(co_env_close(e), 0);
}

static void an_image_whose_data_is_in_another_log_is_refused(void)
{
	env_run(&quiet, co_other_log);
}

static co_fn void co_old_copy(struct env *e)
{
	uint8_t *copy = malloc(e->c.log_size);

	co_dirty(e);
	media_read(powercut_dev_view(e->log[0]), 0, copy, e->c.log_size);
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	co_put(e, 0, 4, 8, 2);
	co_flush(e, 0);
	CHECK_EQ(co_env_close(e), 0);
	powercut_dev_poke(e->log[0], 0, copy, e->c.log_size, false);
	co_env_open(e);
	EXPECT_REFUSED(e, co_env_try_attach(e, 0, NULL), -ESTALE, "old copy");
	/* A refusal has changed nothing: it is refused again. */
	CHECK_EQ(co_env_close(e), 0);
	co_env_open(e);
	EXPECT_REFUSED(e, co_env_try_attach(e, 0, NULL), -ESTALE, "old copy");
	CHECK_EQ(co_env_close(e), 0);
	free(copy);
}

static void an_old_copy_of_a_log_is_refused(void)
{
	env_run(&quiet, co_old_copy);
}

static co_fn void co_replaced(struct env *e)
{
	const struct wlog_volume_config replay = { .force_replay = true };

	co_dirty(e);
	co_env_open(e);
	EXPECT_REFUSED(e, co_env_try_attach_as(e, 1, "vol0", NULL), -ESTALE, "no mark");
	/* The right one is still taken, under any name, and keeps it. */
	CHECK_EQ(co_env_try_attach_as(e, 0, "renamed", NULL), 0);
	EXPECT_BLOCKS(e, 0, 0, 8, 1);
	CHECK_EQ(co_env_close(e), 0);
	co_env_open(e);
	CHECK_EQ(co_env_try_attach_as(e, 1, "renamed", &replay), 0);
	EXPECT_BLOCKS(e, 1, 0, 8, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void an_image_that_was_replaced_is_refused(void)
{
	env_run(&quiet, co_replaced);
}

static co_fn void co_stamp(struct env *e)
{
	const struct wlog_volume_config replay = { .force_replay = true };
	uint8_t data[512] = { 7 };

	co_dirty(e);
	powercut_dev_poke(e->image[0], 1 << 20, data, sizeof(data), true);
	co_env_open(e);
	EXPECT_REFUSED(e, co_env_try_attach(e, 0, NULL), -ESTALE, "changed by something else");
	CHECK_EQ(co_env_try_attach(e, 0, &replay), 0);
	EXPECT_BLOCKS(e, 0, 0, 8, 1);
	CHECK_EQ(co_env_close(e), 0);
	/* From there on it is the log's again. */
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 0, 8, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void an_image_that_changed_since_is_refused(void)
{
	env_run(&quiet, co_stamp);
}

/*
 * The file system has times in whole seconds, and somebody writes to the image right behind our end, within the second in which it was last written: by a log that
 * has only just taken it (0), that has just written to it (1), or that did so some time ago (2).
 */
static co_fn void co_coarse(struct env *e)
{
	uint8_t data[512] = { 7 };

	for (unsigned how = 0; how < 3; how++) {
		env_fini(e);
		env_init(e, &(struct env_config){ .log = { .no_destage = true }, .image_dev = { .stamp_step = SEC } });
		co_sleep_ns(SEC - rt_wall_ns() % SEC + 500 * MS);	/* the end of the second is not far, nor near */
		touch(e);
		co_env_start(e, 1, NULL);
		if (how >= 1) {
			co_put(e, 0, 50, 8, 3);
			CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		}
		if (how == 2)
			co_sleep_ns(5 * SEC);
		co_put(e, 0, 0, 8, 1);
		co_flush(e, 0);
		CHECK_EQ(co_env_close(e), 0);
		/* Nobody else: it is taken at once. */
		co_env_open(e);
		co_env_attach(e, 0, NULL);
		CHECK_EQ(co_env_close(e), 0);
		powercut_dev_poke(e->image[0], 1 << 20, data, sizeof(data), true);
		co_env_open(e);
		EXPECT_REFUSED(e, co_env_try_attach(e, 0, NULL), -ESTALE, "changed by something else");
		CHECK_EQ(co_env_close(e), 0);
	}
}

static void an_image_that_changed_within_the_same_second_is_refused(void)
{
	env_run(NULL, co_coarse);
}

static co_fn void co_two_names(struct env *e)
{
	co_env_start(e, 1, NULL);
	struct disk *again = env_open_dev(e->image[0]), *v;
	struct wlog_volume_config vc = { 0 };

	e->err = (struct err)ERR_INIT;
	EXPECT_REFUSED(e, co_wlog_attach(e->w, "other", again, &vc, &v, &e->err), -EBUSY, "in use");
	/* The same name for another image, while the first is served. */
	e->err = (struct err)ERR_INIT;
	co_disk_close(again);
	again = env_open_dev(e->image[1]);
	EXPECT_REFUSED(e, co_wlog_attach(e->w, "vol0", again, &vc, &v, &e->err), -EBUSY, "in use");
	co_disk_close(again);
	CHECK_EQ(co_env_close(e), 0);
}

static void two_names_for_one_image_and_two_images_of_one_name_are_refused(void)
{
	env_run(&quiet, co_two_names);
}

/* A name that another, dirty volume has: whoever drops or drains by name must not hit the wrong one. */
static co_fn void co_taken_name(struct env *e)
{
	co_env_start(e, 2, NULL);
	co_put(e, 0, 0, 1, 1);
	co_put(e, 1, 0, 1, 2);
	co_flush(e, 0);
	co_flush(e, 1);
	CHECK_EQ(co_env_close(e), 0);
	co_env_open(e);
	EXPECT_REFUSED(e, co_env_try_attach_as(e, 0, "vol1", NULL), -EEXIST, "vol1");
	co_env_attach(e, 0, NULL);
	co_env_attach(e, 1, NULL);
	EXPECT_BLOCKS(e, 0, 0, 1, 1);
	EXPECT_BLOCKS(e, 1, 0, 1, 2);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_volume_cannot_take_another_ones_name(void)
{
	env_run(&quiet, co_taken_name);
}

/* --- Formatting --- */

static co_fn void co_format_over(struct env *e)
{
	uint8_t *slot = malloc(WL_SB_SLOT);
	struct wl_super *sb = malloc(sizeof(*sb));

	co_dirty(e);
	env_super(e, 0, sb);
	/* A damaged superblock may hide dirty data. */
	env_flip(e, 0, 100);
	env_flip(e, 0, WL_SB_SLOT + 100);
	EXPECT_REFUSED(e, co_env_try_format(e, false), -EEXIST, "--force");
	env_flip(e, 0, 100);
	env_flip(e, 0, WL_SB_SLOT + 100);
	/* So does one that a later version wrote. */
	sb->incompat = 1ull << 40;
	wl_super_encode(sb, slot);
	powercut_dev_poke(e->log[0], 0, slot, WL_SB_SLOT, false);
	powercut_dev_poke(e->log[0], WL_SB_SLOT, slot, WL_SB_SLOT, false);
	EXPECT_REFUSED(e, co_env_try_format(e, false), -EEXIST, "--force");
	CHECK_EQ(co_env_try_format(e, true), 0);
	CHECK_EQ(co_env_try_format(e, false), 0);
	free(slot);
	free(sb);
}

static void a_log_that_cannot_be_understood_is_not_formatted_over(void)
{
	env_run(&quiet, co_format_over);
}

static int refuse_reads(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	return op == DISK_OP_READ ? -EIO : 0;
}

static co_fn void co_format_unread(struct env *e)
{
	co_dirty(e);
	powercut_set_hook(e->p, refuse_reads, NULL);
	CHECK(co_env_try_format(e, false) < 0);
	powercut_set_hook(e->p, NULL, NULL);
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 0, 8, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_device_that_cannot_be_read_is_not_formatted(void)
{
	env_run(&quiet, co_format_unread);
}

/* --- Read-only --- */

static co_fn void co_read_only(struct env *e)
{
	uint8_t data[512] = { 1 };
	uint64_t writes, marks;

	co_dirty(e);
	writes = env_log_writes(e, 0);
	marks = powercut_dev_counters(e->image[0])->marks;
	e->c.log.read_only = true;
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 0, 8, 1);
	CHECK_EQ(co_disk_write(e->vol[0], 0, data, sizeof(data), 0), -EROFS);
	CHECK_EQ(co_disk_flush(e->vol[0]), 0);
	/* A volume that the log does not know has nothing in it. */
	CHECK_EQ(co_env_try_attach(e, 1, NULL), 0);
	EXPECT_BLOCKS(e, 1, 0, 1, 0);
	co_sleep_ns(10 * SEC);
	CHECK(co_wlog_drain(e->w, NULL, NULL, NULL) < 0);
	CHECK(co_wlog_drop_volume(e->w, "vol1", &e->err) < 0);
	CHECK(co_wlog_rebuild(e->w, NULL, &e->err) < 0);
	CHECK_EQ(co_env_close(e), 0);
	CHECK_EQ(env_log_writes(e, 0), writes);
	CHECK_EQ(powercut_dev_counters(e->image[0])->marks, marks);
	CHECK_EQ(powercut_dev_counters(e->image[0])->ops[DISK_OP_WRITE], 0);
	e->c.log.read_only = false;
	co_env_open(e);
	co_env_attach(e, 0, NULL);
	EXPECT_BLOCKS(e, 0, 0, 8, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_log_that_is_opened_to_read_is_not_written(void)
{
	env_run(&quiet, co_read_only);
}

/* --- Places in the volume table --- */

/* What the cleaner has copied and not committed yet, when its volume is dropped and its place is taken by another, or its data discarded. */
static co_fn void co_reused(struct env *e, bool discard)
{
	static uint8_t data[ENV_BLOCK];
	const struct wlog_volume_config vc = { .discard_log = discard };
	struct env c;

	memset(data, 0xee, sizeof(data));
	co_dirty(e);
	co_env_open(e);
	struct wlog_volume *v = e->w->by_slot[0];

	CHECK_EQ(wl_append_copy(v, wl_map_find(&v->map, 0), 0, ENV_BLOCK, data), 0);
	if (!discard)
		CHECK_EQ(co_wlog_drop_volume(e->w, "vol0", &e->err), 0);
	CHECK_EQ(co_env_try_attach_as(e, discard ? 0 : 1, "vol0", &vc), 0);
	e->vol[0] = e->vol[0] ? e->vol[0] : e->vol[1];
	e->vol[1] = NULL;
	EXPECT_BLOCKS(e, 0, 0, 8, 0);
	CHECK_EQ(co_wlog_commit(e->w), 0);
	EXPECT_BLOCKS(e, 0, 0, 8, 0);
	co_put(e, 0, 20, 1, 5);
	co_flush(e, 0);
	env_fork(e, &c, 1);
	CHECK_EQ(co_env_close(e), 0);
	co_env_open(&c);
	co_env_attach(&c, 0, discard ? NULL : &(struct wlog_volume_config){ .force_replay = true });
	EXPECT_BLOCKS(&c, 0, 0, 8, 0);
	EXPECT_BLOCKS(&c, 0, 20, 1, 5);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
}

static co_fn void co_dropped(struct env *e)
{
	co_reused(e, false);
}

static co_fn void co_discarded(struct env *e)
{
	co_reused(e, true);
}

static void what_was_dropped_or_discarded_never_comes_back(void)
{
	env_run(&quiet, co_dropped);
	env_run(&quiet, co_discarded);
}

/* --- Size --- */

static co_fn void co_resized(struct env *e)
{
	struct env c;

	touch(e);
	co_env_start(e, 1, NULL);
	co_put(e, 0, 0, 8, 1);
	co_flush(e, 0);
	/* Another volume's data keeps the tail where the old records are. */
	co_env_attach(e, 1, NULL);
	e->w->config.no_destage = true;
	co_put(e, 1, 0, 8, 1);
	co_flush(e, 1);
	CHECK_EQ(co_disk_resize(e->vol[0], 8 * ENV_BLOCK, NULL), 0);
	co_put(e, 0, 1, 1, 2);
	co_flush(e, 0);
	/* A resize moved the image's stamp: nobody else did. */
	env_fork(e, &c, 1);
	co_env_open(&c);
	co_env_attach(&c, 0, NULL);
	EXPECT_BLOCKS(&c, 0, 0, 1, 1);
	EXPECT_BLOCKS(&c, 0, 1, 1, 2);
	CHECK_EQ(co_env_close(&c), 0);
	env_fini(&c);
	e->w->config.no_destage = false;
	CHECK_EQ(co_env_close(e), 0);
}

static void a_resize_is_not_taken_for_a_foreign_change(void)
{
	env_run(NULL, co_resized);
}

/* --- An image whose stamp cannot be had while a request is in flight --- */

#define CLUSTER 65536u

/* Below an overlay: its reads hang while `held`. */
static struct {
	bool held;
	unsigned waiting;
	struct co_queue q;
} base;

static co_fn int base_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	base.waiting++;
	while (base.held)
		co_queue_wait(&base.q, "the test");
	base.waiting--;
	return co_disk_readv(d->file, off, iov, niov, flags);
}

static const struct disk_ops base_ops = { .driver = "base", .co_read = base_co_read };

static co_fn void co_attach_overlay(struct env *e, bool make)
{
	struct qcow2_create c = { .size = 8 << 20, .cluster_size = CLUSTER, .refcount_bits = 16, .version = 3, .backing_file = "base", .backing_format = "raw" };
	static const struct wlog_volume_config vc;
	struct disk *file = env_open_dev(e->image[0]), *image, *mem, *below = calloc(1, sizeof(*below));
	struct err err = ERR_INIT;

	CHECK_EQ(co_disk_open("mem:8M", DISK_OPEN_RDWR, &mem, &err), 0);
	CHECK_EQ(disk_init(below, &base_ops, "base", mem), 0);
	if (make && (qcow2_create_check(&c, "image", &err) || co_qcow2_create(file, NULL, &c, &err)))
		test_fail("%s", err.msg);
	if (co_qcow2_open(file, "image", &(struct qcow2_opts){ .backing = below }, DISK_OPEN_RDWR, &image, &err) ||
	    co_wlog_attach(e->w, "vol0", image, &vc, &e->vol[0], &err))
		test_fail("%s", err.msg);
}

struct hung {
	struct disk *d;
	bool done;
};

static co_fn void co_hung_read(void *arg)
{
	struct hung *h = arg;
	static uint8_t buf[ENV_BLOCK];

	CHECK_EQ(co_disk_read(h->d, 100 * CLUSTER, buf, sizeof(buf), 0), 0);
	h->done = true;
}

static co_fn void co_hung_close(void *arg)
{
	struct hung *h = arg;

	co_disk_close(h->d);
	h->done = true;
}

static struct wlog_volume *volume(struct env *e)
{
	return container_of(e->vol[0], struct wlog_volume, disk);
}

/* A read of `d` hangs in the backing file, and a cluster that is freed waits for it. */
static co_fn void co_hang(struct env *e, struct hung *h, struct disk *d)
{
	co_put(e, 0, 0, 16, 1);
	CHECK_EQ(co_wlog_drain_volume(e->vol[0], NULL), 0);
	*h = (struct hung){ .d = d };
	base.held = true;
	CHECK_EQ(co_spawn("reader", co_hung_read, h), 0);
	while (!base.waiting)
		co_sleep_ns(MS);
	CHECK_EQ(co_disk_discard(e->vol[0], 0, CLUSTER, 0), 0);
	CHECK_EQ(co_wlog_drain_volume(e->vol[0], NULL), 0);
	co_sleep_ns(3 * SEC);
	CHECK(!h->done);
}

static void let_go(void)
{
	base.held = false;
	co_queue_wake_all(&base.q);
}

static co_fn void co_check_stamp(struct env *e)
{
	struct wl_super *sb = malloc(sizeof(*sb));
	struct disk *d = env_open_dev(e->image[0]);
	uint64_t stamp, now;

	CHECK_EQ(co_disk_stamp(d, &stamp, &now), 0);
	env_super(e, 0, sb);
	CHECK(!(sb->vol[0].flags & WL_VOL_FLAG_DESTAGING));
	CHECK_EQ(sb->vol[0].stamp, stamp);
	co_disk_close(d);
	free(sb);
}

static co_fn void co_backing_hangs(struct env *e)
{
	struct wl_super *sb = malloc(sizeof(*sb));
	struct hung h;

	base.held = false;
	co_queue_init(&base.q);
	co_env_start(e, 0, NULL);
	co_attach_overlay(e, true);
	co_hang(e, &h, e->vol[0]);
	/* Many times what the log holds. */
	for (uint64_t round = 2; round < 6; round++) {
		for (uint64_t b = 0; b < 1024; b += 16)
			co_put(e, 0, b, 16, round);
		co_flush(e, 0);
	}
	CHECK_EQ(co_wlog_drain_volume(e->vol[0], NULL), 0);
	CHECK(!h.done && !wl_is_dirty(volume(e)));
	/* The image is still going to be written: a superblock says so. */
	co_sleep_ns(10 * SEC);
	env_super(e, 0, sb);
	CHECK(volume(e)->destaging && (sb->vol[0].flags & WL_VOL_FLAG_DESTAGING));
	let_go();
	while (!h.done)
		co_sleep_ns(MS);
	/* Nobody asks for it. */
	co_sleep_ns(5 * SEC);
	CHECK(!volume(e)->destaging);
	EXPECT_BLOCKS(e, 0, 0, 1024, 5);
	CHECK_EQ(co_env_close(e), 0);
	co_check_stamp(e);
	free(sb);
}

static void a_read_that_hangs_in_a_backing_file_stops_neither_writes_nor_destage(void)
{
	env_run(NULL, co_backing_hangs);
}

/* Below the log, as the read-ahead of a cache. */
static co_fn void co_closed_under_a_read(struct env *e)
{
	struct hung reader, closer;

	base.held = false;
	co_queue_init(&base.q);
	co_env_start(e, 0, NULL);
	co_attach_overlay(e, true);
	co_hang(e, &reader, e->vol[0]->file);
	closer = (struct hung){ .d = e->vol[0] };
	e->vol[0] = NULL;
	CHECK_EQ(co_spawn("closer", co_hung_close, &closer), 0);
	co_sleep_ns(5 * SEC);
	CHECK(!closer.done);
	let_go();
	while (!reader.done || !closer.done)
		co_sleep_ns(MS);
	CHECK_EQ(co_env_close(e), 0);
	co_check_stamp(e);
}

static void a_stamp_is_taken_when_the_last_request_has_ended(void)
{
	env_run(NULL, co_closed_under_a_read);
}

int main(int argc, char **argv)
{
	backends_register();
	log_set_level(LOG_NONE);
#define TEST(fn) do { if (argc < 2 || strstr(#fn, argv[1])) RUN(fn); } while (0)
	TEST(an_image_whose_data_is_in_another_log_is_refused);
	TEST(an_old_copy_of_a_log_is_refused);
	TEST(an_image_that_was_replaced_is_refused);
	TEST(an_image_that_changed_since_is_refused);
	TEST(an_image_that_changed_within_the_same_second_is_refused);
	TEST(two_names_for_one_image_and_two_images_of_one_name_are_refused);
	TEST(a_volume_cannot_take_another_ones_name);
	TEST(a_log_that_cannot_be_understood_is_not_formatted_over);
	TEST(a_device_that_cannot_be_read_is_not_formatted);
	TEST(a_log_that_is_opened_to_read_is_not_written);
	TEST(what_was_dropped_or_discarded_never_comes_back);
	TEST(a_resize_is_not_taken_for_a_foreign_change);
	TEST(a_read_that_hangs_in_a_backing_file_stops_neither_writes_nor_destage);
	TEST(a_stamp_is_taken_when_the_last_request_has_ended);
	return 0;
}
