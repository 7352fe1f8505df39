/* SPDX-License-Identifier: MIT */
/*
 * The second level of the read cache, one promise at a time; tests/prop/prop_cache_second.c has the rest.
 *
 * tests/golden/cache-v1.chunks is a device that version 1 wrote, in the form that test_wlog_golden.c describes. `test_cache_second FILE --make` writes a new
 * one: only when the format's version changes, as another file.
 */
#include <errno.h>

#include "backend/powercut_int.h"
#include "cache/internal.h"
#include "test_rt.h"
#include "util/crc32c.h"

#define BLOCK CACHE_BLOCK
#define BLOCKS 40u
#define SEGMENT (64u << 10)
#define DEVICE (SECOND_FIRST + 6 * SEGMENT)

static const char *golden;
static uint8_t buf[BLOCK];

/* An image, a cache device and a little cache over them. */
struct env {
	struct powercut *power;
	struct powercut_dev *image, *dev;
	struct cache *c;
	struct disk *top;
};

static void pattern(uint64_t block, uint8_t *to)
{
	for (unsigned i = 0; i < BLOCK; i++)
		to[i] = (uint8_t)(block * 7 + i / 64 + 1);
}

static void make_env(struct env *e)
{
	e->power = powercut_create(7);
	e->image = powercut_dev_create(e->power, "golden", BLOCKS * BLOCK, NULL);
	e->dev = powercut_dev_create(e->power, "device", DEVICE, NULL);
	for (uint64_t b = 0; b < BLOCKS; b++) {
		pattern(b, buf);
		powercut_dev_poke(e->image, b * BLOCK, buf, BLOCK, false);
	}
}

static co_fn void co_format(struct env *e)
{
	struct err err = ERR_INIT;
	struct disk *d;

	CHECK_EQ(powercut_dev_open(e->dev, &d), 0);
	CHECK_EQ(co_cache_device_format(d, SEGMENT, &err), 0);
	co_disk_close(d);
}

static unsigned failing_touches;	/* of the image */

static co_fn int co_touch(struct disk *d)
{
	if (!failing_touches)
		return co_disk_touch(d->file);
	failing_touches--;
	return -EIO;
}

static const struct disk_ops touch_ops = { .driver = "touch", .co_touch = co_touch };

static co_fn void co_start(struct env *e, struct cache_device_config dc)
{
	struct cache_config o = { .chunk = 16384, .curve_samples = 16, .size = 12 << 20, .no_read_ahead = true };
	struct disk *d, *image, *file;
	struct err err = ERR_INIT;

	CHECK_EQ(cache_create(&o, &e->c, &err), 0);
	CHECK_EQ(powercut_dev_open(e->dev, &d), 0);
	if (co_cache_add_device(e->c, d, &dc, &err) < 0)
		test_fail("%s", err.msg);
	e->c->budget = e->c->fixed + second_memory(e->c->second) + 3 * 16384 + 65536;
	cache_recompute(e->c);
	CHECK_EQ(powercut_dev_open(e->image, &file), 0);
	image = file;
	if (failing_touches) {
		image = calloc(1, sizeof(*image));
		CHECK_EQ(disk_init(image, &touch_ops, file->name, file), 0);
	}
	CHECK_EQ(co_cache_attach(e->c, "vol", image, CACHE_ALL, &e->top, &err), 0);
	co_cache_start_device(e->c);
	while (e->c->second->scanning && !e->c->second->off)
		co_sleep_ns(1000000);
}

static co_fn void co_stop(struct env *e)
{
	co_disk_close(e->top);
	co_cache_close_device(e->c);
	cache_destroy(e->c);
}

static co_fn void co_read_all(struct env *e)
{
	uint8_t want[BLOCK];

	for (uint64_t b = 0; b < BLOCKS; b++) {
		pattern(b, want);
		CHECK_EQ(co_disk_read(e->top, b * BLOCK, buf, BLOCK, 0), 0);
		if (memcmp(buf, want, BLOCK))
			test_fail("block %" PRIu64 " is not what the image holds", b);
	}
	CHECK(cache_memory(e->c) <= e->c->budget);
}

static void in_env(co_entry *fn, void *arg)
{
	struct env e = { .power = NULL };

	make_env(&e);
	*(struct env **)arg = &e;
	on_sim(test_seed(), fn, &e);
	powercut_destroy(e.power);
}

/* --- */

static co_fn void co_outlasts(void *arg)
{
	struct env *e = arg;
	uint64_t reads;

	co_format(e);
	co_start(e, (struct cache_device_config){ 0 });
	co_read_all(e);
	co_stop(e);
	co_start(e, (struct cache_device_config){ 0 });
	CHECK(e->c->second->count.kept >= BLOCKS / 2);
	reads = powercut_dev_counters(e->image)->ops[DISK_OP_READ];
	co_read_all(e);
	CHECK(e->c->second->count.hits >= BLOCKS / 2);
	CHECK(powercut_dev_counters(e->image)->ops[DISK_OP_READ] - reads <= BLOCKS / 2);
	/* At rest it settles by itself: a process that is killed then loses nothing. */
	pattern(5, buf);
	CHECK_EQ(co_disk_write(e->top, 5 * BLOCK, buf, BLOCK, 0), 0);
	CHECK(!volume_of(e->top)->second.settled);
	co_sleep_ns(20000000000ull);
	CHECK(volume_of(e->top)->second.settled);
	e->c->second->off = true;
	co_stop(e);
	co_start(e, (struct cache_device_config){ 0 });
	CHECK(e->c->second->count.kept >= BLOCKS / 4);
	CHECK(!second_has(volume_of(e->top), 5));
	co_read_all(e);
	co_stop(e);
}

static void what_was_kept_is_used_by_the_next_process(void)
{
	struct env *e;

	in_env(co_outlasts, &e);
}

static co_fn void co_foreign(void *arg)
{
	struct env *e = arg;

	co_format(e);
	co_start(e, (struct cache_device_config){ 0 });
	co_read_all(e);
	co_stop(e);
	pattern(9, buf);
	powercut_dev_poke(e->image, 9 * BLOCK, buf, BLOCK, true);
	co_start(e, (struct cache_device_config){ 0 });
	CHECK_EQ(e->c->second->count.kept, 0);
	CHECK(!volume_of(e->top)->second.kept);
	co_stop(e);
}

static void an_image_that_another_program_touched_begins_anew(void)
{
	struct env *e;

	in_env(co_foreign, &e);
}

static co_fn void co_failing(void *arg)
{
	struct env *e = arg;

	for (unsigned n = 1; n < 40; n++) {
		co_format(e);
		co_start(e, (struct cache_device_config){ 0 });
		powercut_fail_at(e->power, e->dev, e->dev->ios + n, -EIO);
		for (unsigned i = 0; i < 3; i++)
			co_read_all(e);
		powercut_fail_at(e->power, NULL, 0, 0);
		CHECK(n > 12 || e->c->second->off);
		co_stop(e);
	}
	co_start(e, (struct cache_device_config){ 0 });
	powercut_dev_fail(e->dev, -EIO);
	co_read_all(e);
	co_stop(e);
}

static void a_device_that_fails_costs_nothing_but_speed(void)
{
	struct env *e;

	in_env(co_failing, &e);
}

static co_fn void co_hanging(void *arg)
{
	struct env *e = arg;
	uint64_t start;

	co_format(e);
	co_start(e, (struct cache_device_config){ 0 });
	co_read_all(e);
	co_read_all(e);
	CHECK(e->c->second->count.hits);
	powercut_dev_stall(e->dev, true);
	start = rt_now_ns();
	co_read_all(e);
	CHECK(rt_now_ns() - start < 2000000000ull);
	CHECK(e->c->second->off && e->c->second->count.timeouts);
	co_read_all(e);
	powercut_dev_stall(e->dev, false);
	co_stop(e);
}

static void a_device_that_hangs_is_given_up(void)
{
	struct env *e;

	in_env(co_hanging, &e);
}

static co_fn void co_limited(void *arg)
{
	struct env *e = arg;
	uint64_t start = rt_now_ns(), seconds, written;

	co_format(e);
	co_start(e, (struct cache_device_config){ .rate = SEGMENT });
	for (unsigned i = 0; i < 50; i++) {
		co_read_all(e);
		pattern(1, buf);
		for (uint64_t b = 0; b < BLOCKS; b++) {
			pattern(b, buf);
			CHECK_EQ(co_disk_write(e->top, b * BLOCK, buf, BLOCK, 0), 0);
		}
		co_sleep_ns(100000000);
	}
	seconds = (rt_now_ns() - start) / 1000000000 + 1;
	written = e->c->second->count.written_bytes;
	CHECK(written >= (seconds - 2) * SEGMENT && written <= (seconds + 1) * SEGMENT);
	CHECK(e->c->second->count.skipped);
	co_stop(e);
}

static void no_more_is_written_than_the_rate_allows(void)
{
	struct env *e;

	in_env(co_limited, &e);
}

static co_fn void co_change(struct env *e, uint64_t touches)
{
	memset(buf, 3, sizeof(buf));
	CHECK_EQ(co_disk_write(e->top, 0, buf, BLOCK, 0), 0);
	CHECK_EQ(e->c->second->count.touches, touches);
}

/* Nothing was kept: the change goes on all the same. */
static co_fn void co_untouched(void *arg)
{
	struct env *e = arg;
	struct disk_identity was, now;

	co_format(e);
	failing_touches = 2;
	co_start(e, (struct cache_device_config){ 0 });
	CHECK(!volume_of(e->top)->second.settled);
	CHECK_EQ(co_disk_identity(e->top->file, &was), 0);
	co_change(e, 1);
	co_change(e, 2);
	co_change(e, 3);
	CHECK_EQ(co_disk_identity(e->top->file, &now), 0);
	CHECK(!disk_identity_equal(&was, &now));
	co_change(e, 3);
	co_stop(e);
}

static void a_touch_that_fails_is_tried_again_at_the_next_change(void)
{
	struct env *e;

	in_env(co_untouched, &e);
}

/* --- A format between two layers: what it holds goes to its file with a flush --- */

struct format {
	struct disk disk;
	bool dirty;
	uint8_t held[BLOCK];
};

static co_fn int format_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	container_of(d, struct format, disk)->dirty = true;
	return 0;
}

static co_fn int format_co_flush(struct disk *d)
{
	struct format *f = container_of(d, struct format, disk);
	int r = f->dirty ? co_disk_write(d->file, 0, f->held, BLOCK, 0) : 0;

	f->dirty = false;
	return r ? r : co_disk_flush(d->file);
}

static const struct disk_ops format_ops = { .driver = "format", .co_write = format_co_write, .co_flush = format_co_flush };

/* The upper layer settles, and has the image flushed. The lower one is settled, and has to say that it is not any more; that its image cannot be touched must not stop it. */
static co_fn void co_nested(void *arg)
{
	struct cache_device_config dc = { .settle_ns = 1000000 };
	struct format *f = calloc(1, sizeof(*f));
	struct disk *below = calloc(1, sizeof(*below)), *file, *tables;
	struct env *e = arg;
	struct err err = ERR_INIT;

	co_format(e);
	failing_touches = 0;
	CHECK_EQ(cache_create(&(struct cache_config){ .chunk = 16384, .curve_samples = 16, .size = 12 << 20 }, &e->c, &err), 0);
	CHECK_EQ(powercut_dev_open(e->dev, &file), 0);
	CHECK_EQ(co_cache_add_device(e->c, file, &dc, &err), 0);
	CHECK_EQ(powercut_dev_open(e->image, &file), 0);
	CHECK_EQ(disk_init(below, &touch_ops, file->name, file), 0);
	CHECK_EQ(co_cache_attach_tables(e->c, "tables", below, CACHE_ALL, &tables, &err), 0);
	CHECK_EQ(disk_init(&f->disk, &format_ops, "format", tables), 0);
	CHECK_EQ(co_cache_attach(e->c, "vol", &f->disk, CACHE_ALL, &e->top, &err), 0);
	co_cache_start_device(e->c);
	co_sleep_ns(5000000000);
	CHECK(volume_of(tables)->second.settled && volume_of(e->top)->second.settled);
	failing_touches = 1000;
	CHECK_EQ(co_disk_write(e->top, 0, buf, BLOCK, 0), 0);
	CHECK(volume_of(tables)->second.settled && !volume_of(e->top)->second.settled);
	co_sleep_ns(5000000000);
	CHECK(!f->dirty && failing_touches < 1000 && !e->c->second->off);
	media_read(powercut_dev_view(e->image), 0, buf, BLOCK);
	CHECK(bytes_are_zero(buf, BLOCK));
	failing_touches = 0;
	co_stop(e);
}

static void a_format_may_write_while_the_layer_above_it_settles(void)
{
	struct env *e;

	in_env(co_nested, &e);
}

/* --- What is no cache device --- */

static co_fn int co_try(struct env *e, struct err *err)
{
	struct cache_device_info info;
	struct disk *d;
	int r;

	CHECK_EQ(powercut_dev_open(e->dev, &d), 0);
	r = co_cache_device_read(d, &info, err);
	co_disk_close(d);
	return r;
}

static void poke_le32(struct env *e, uint64_t at, uint32_t value, bool fix)
{
	uint8_t *sb = malloc(SECOND_SUPER);

	for (unsigned i = 0; i < 2; i++) {
		media_read(powercut_dev_view(e->dev), i * SECOND_SUPER_STRIDE, sb, SECOND_SUPER);
		put_le32(sb + at, value);
		put_le32(sb + 8, fix ? 0 : get_le32(sb + 8));
		if (fix)
			put_le32(sb + 8, crc32c(0, sb, SECOND_SUPER));
		powercut_dev_poke(e->dev, i * SECOND_SUPER_STRIDE, sb, SECOND_SUPER, true);
	}
	free(sb);
}

static co_fn void co_refused(void *arg)
{
	static const struct {
		uint32_t at, value;
		bool fix;
		int error;
		const char *text;
	} cases[] = {
		{ 0, 0x12345678, true, -EINVAL, "is no cache device" },
		{ 200, 77, false, -EBADMSG, "damaged" },
		{ 12, 2, true, -ENOTSUP, "version" },
		{ 16, 1, true, -ENOTSUP, "version" },
		{ 64, 512, true, -ENOTSUP, "version" },
		{ 68, 100, true, -EBADMSG, "contradict" },
		{ 72, 1u << 30, true, -EBADMSG, "contradict" },
	};
	struct env *e = arg;

	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		struct err err = ERR_INIT;

		co_format(e);
		CHECK_EQ(co_try(e, &err), 0);
		poke_le32(e, cases[i].at, cases[i].value, cases[i].fix);
		CHECK_EQ(co_try(e, &err), cases[i].error);
		if (!strstr(err.msg, cases[i].text))
			test_fail("case %u says: %s", i, err.msg);
	}
}

static void what_is_no_cache_device_is_refused(void)
{
	struct env *e;

	in_env(co_refused, &e);
}

/* --- The golden device --- */

static co_fn void co_make(void *arg)
{
	struct env *e = arg;
	FILE *f = fopen(golden, "wb");

	CHECK(f);
	co_format(e);
	co_start(e, (struct cache_device_config){ 0 });
	co_read_all(e);
	co_stop(e);
	for (uint64_t off = 0; off < DEVICE; off += BLOCK) {
		uint8_t head[16];

		media_read(powercut_dev_view(e->dev), off, buf, BLOCK);
		if (bytes_are_zero(buf, BLOCK))
			continue;
		put_le64(head, off);
		put_le64(head + 8, BLOCK);
		CHECK(fwrite(head, 16, 1, f) == 1 && fwrite(buf, BLOCK, 1, f) == 1);
	}
	CHECK_EQ(fclose(f), 0);
}

static co_fn void co_golden(void *arg)
{
	struct env *e = arg;
	uint64_t hits;

	co_start(e, (struct cache_device_config){ 0 });
	CHECK(volume_of(e->top)->second.kept);
	CHECK(e->c->second->count.kept >= BLOCKS / 2);
	co_read_all(e);
	hits = e->c->second->count.hits;
	CHECK(hits >= BLOCKS / 2);
	CHECK_EQ(e->c->second->count.checksum_errors, 0);
	co_stop(e);
}

static void a_device_of_version_1_is_of_use(void)
{
	struct env e = { .power = NULL };
	FILE *f = fopen(golden, "rb");
	uint8_t head[16];

	if (!f)
		test_fail("%s: cannot be opened", golden);
	make_env(&e);
	while (fread(head, 16, 1, f) == 1) {
		CHECK(get_le64(head + 8) == BLOCK && fread(buf, BLOCK, 1, f) == 1);
		powercut_dev_poke(e.dev, get_le64(head), buf, BLOCK, false);
	}
	fclose(f);
	on_sim(test_seed(), co_golden, &e);
	powercut_destroy(e.power);
}

int main(int argc, char **argv)
{
	struct env *e;

	CHECK(argc >= 2);
	golden = argv[1];
	if (argc > 2 && !strcmp(argv[2], "--make")) {
		in_env(co_make, &e);
		return 0;
	}
	RUN(what_was_kept_is_used_by_the_next_process);
	RUN(an_image_that_another_program_touched_begins_anew);
	RUN(a_device_that_fails_costs_nothing_but_speed);
	RUN(a_device_that_hangs_is_given_up);
	RUN(no_more_is_written_than_the_rate_allows);
	RUN(a_touch_that_fails_is_tried_again_at_the_next_change);
	RUN(a_format_may_write_while_the_layer_above_it_settles);
	RUN(what_is_no_cache_device_is_refused);
	RUN(a_device_of_version_1_is_of_use);
	return 0;
}
