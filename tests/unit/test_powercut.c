/* SPDX-License-Identifier: MIT */
/* The power-cut simulator does what backend/fault.h says: the crash tests stand on it. */
#include "backend/fault.h"
#include "test_rt.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/log.h"

#define SIZE (1u << 20)

static struct disk *open_dev(struct powercut_dev *dev)
{
	struct disk *d;

	CHECK_EQ(powercut_dev_open(dev, &d), 0);
	return d;
}

static co_fn void co_put(struct disk *d, uint64_t sector, unsigned n, uint8_t v, unsigned flags)
{
	static uint8_t buf[65536];

	memset(buf, v, n * 512);
	CHECK_EQ(co_disk_write(d, sector * 512, buf, n * 512, flags), 0);
}

/* A sector is torn if its bytes differ. */
static uint8_t sector_of(const struct media *m, uint64_t sector)
{
	uint8_t buf[512];

	media_read(m, sector * 512, buf, sizeof(buf));
	for (unsigned i = 1; i < sizeof(buf); i++)
		CHECK_EQ(buf[i], buf[0]);
	return buf[0];
}

static co_fn void co_what_was_flushed_survives_every_cut(void *arg)
{
	for (uint64_t seed = 1; seed <= 300; seed++) {
		struct powercut *p = powercut_create(seed);
		struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
		struct disk *d = open_dev(dev);

		co_put(d, 0, 8, 1, 0);
		CHECK_EQ(co_disk_flush(d), 0);
		co_put(d, 8, 8, 2, DISK_FUA);
		co_put(d, 16, 8, 3, 0);
		powercut_cut(p);
		CHECK_EQ(co_disk_read(d, 0, (char[512]){ 0 }, 512, 0), -ESHUTDOWN);
		co_disk_close(d);
		powercut_restart(p, seed);
		for (unsigned s = 0; s < 16; s++)
			CHECK_EQ(sector_of(powercut_dev_stable(dev), s), s < 8 ? 1 : 2);
		for (unsigned s = 16; s < 24; s++)
			CHECK(sector_of(powercut_dev_stable(dev), s) % 3 == 0);
		powercut_destroy(p);
	}
}

/* Over many seeds each state that may be, is; and none that may not. */
static co_fn void co_a_cut_leaves_any_version_since_the_last_flush(void *arg)
{
	struct powercut *p = powercut_create(7);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
	struct disk *d = open_dev(dev);
	unsigned seen[6] = { 0 }, torn = 0, swapped = 0;

	co_put(d, 0, 2, 1, 0);
	CHECK_EQ(co_disk_flush(d), 0);
	co_put(d, 0, 2, 2, 0);
	co_put(d, 0, 1, 3, 0);
	co_put(d, 5, 1, 4, 0);
	co_put(d, 6, 1, 5, 0);
	for (uint64_t seed = 0; seed < 2000; seed++) {
		struct powercut *q = powercut_fork(p, seed);
		const struct media *m = powercut_dev_stable(powercut_dev_find(q, "dev"));
		uint8_t a = sector_of(m, 0), b = sector_of(m, 1), e = sector_of(m, 5), f = sector_of(m, 6);

		CHECK(a >= 1 && a <= 3);
		CHECK(b >= 1 && b <= 2);
		CHECK(e == 0 || e == 4);
		CHECK(f == 0 || f == 5);
		seen[a]++;
		seen[e]++;
		seen[f]++;
		torn += a == 2 && b == 1;
		swapped += e == 0 && f == 5;
		powercut_destroy(q);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(seen); i++)
		CHECK(seen[i] > 20);
	CHECK(torn > 20);
	CHECK(swapped > 20);
	CHECK_EQ(sector_of(powercut_dev_view(dev), 0), 3);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 0), 1);
	CHECK_EQ(powercut_dev_volatile(dev), 5 * 512);
	co_disk_close(d);
	powercut_destroy(p);
}

struct fork_ctx {
	struct powercut *p;
	unsigned none, whole, torn;
};

/* In flight, and a log device besides that has nothing in flight. */
static int fork_in_flight(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct fork_ctx *x = arg;

	for (uint64_t seed = 0; seed < 300 && op == DISK_OP_WRITE; seed++) {
		struct powercut *q = powercut_fork(x->p, seed);
		const struct media *m = powercut_dev_stable(powercut_dev_find(q, "dev"));
		unsigned n = 0;

		for (unsigned s = 0; s < 8; s++)
			n += sector_of(m, s) == 9;
		x->none += n == 0;
		x->whole += n == 8;
		x->torn += n > 0 && n < 8;
		powercut_destroy(q);
	}
	return 0;
}

static co_fn void co_a_write_in_flight_may_be_there_torn_or_missing_even_with_fua(void *arg)
{
	for (unsigned flags = 0; flags <= DISK_FUA; flags += DISK_FUA) {
		struct fork_ctx x = { .p = powercut_create(3) };
		struct powercut_dev *dev = powercut_dev_create(x.p, "dev", SIZE, NULL);
		struct disk *d = open_dev(dev);

		powercut_set_hook(x.p, fork_in_flight, &x);
		co_put(d, 0, 8, 9, flags);
		CHECK(x.none > 20);
		CHECK(x.whole > 20);
		CHECK(x.torn > 20);
		co_disk_close(d);
		powercut_destroy(x.p);
	}
}

static co_fn void co_a_later_flush_does_not_bring_back_what_fua_replaced(void *arg)
{
	struct powercut *p = powercut_create(5);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
	struct disk *d = open_dev(dev);

	co_put(d, 0, 4, 1, 0);
	co_put(d, 1, 2, 2, DISK_FUA);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 1), 2);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 0), 1);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 1), 2);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 2), 2);
	CHECK_EQ(sector_of(powercut_dev_stable(dev), 3), 1);
	CHECK_EQ(powercut_dev_volatile(dev), 0);
	co_disk_close(d);
	powercut_destroy(p);
}

static co_fn void co_devices_of_one_supply_are_cut_at_the_same_write(void *arg)
{
	struct powercut *p = powercut_create(5);
	struct powercut_dev *a = powercut_dev_create(p, "a", SIZE, NULL), *b = powercut_dev_create(p, "b", SIZE, NULL);
	struct disk *da = open_dev(a), *db = open_dev(b);
	char buf[512] = { 0 };

	powercut_cut_at(p, 4);
	co_put(da, 0, 1, 1, DISK_FUA);
	co_put(db, 0, 1, 1, 0);
	CHECK_EQ(co_disk_read(da, 0, buf, 512, 0), 0);
	CHECK_EQ(co_disk_flush(db), 0);
	CHECK(!powercut_is_off(p));
	CHECK_EQ(co_disk_write(da, 0, buf, 512, 0), -ESHUTDOWN);
	CHECK(powercut_is_off(p));
	CHECK_EQ(co_disk_write(db, 0, buf, 512, 0), -ESHUTDOWN);
	CHECK_EQ(co_disk_flush(db), -ESHUTDOWN);
	CHECK_EQ(powercut_ios(p), 5);
	CHECK_EQ(powercut_writes(p), 4);
	CHECK_EQ(powercut_dev_counters(a)->fua_writes, 1);
	CHECK_EQ(powercut_dev_counters(b)->ops[DISK_OP_FLUSH], 1);
	co_disk_close(da);
	co_disk_close(db);
	powercut_restart(p, 6);
	CHECK_EQ(powercut_ios(p), 0);
	CHECK_EQ(sector_of(powercut_dev_stable(b), 0), 1);
	da = open_dev(a);
	co_put(da, 0, 1, 7, 0);
	co_disk_close(da);
	powercut_destroy(p);
}

static co_fn int co_write_job(void *arg)
{
	return co_disk_write(arg, 4096, "in flight when the power goes", 29, 0);
}

static co_fn void co_a_cut_ends_what_is_in_flight_at_once(void *arg)
{
	struct powercut_dev_config slow = { .latency_ns = 1000000000ull, .align = 1 };
	struct powercut *p = powercut_create(11);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, &slow);
	struct disk *d = open_dev(dev);
	struct co_group g;
	uint64_t start = rt_now_ns();

	co_group_init(&g);
	powercut_dev_stall(dev, true);
	for (unsigned i = 0; i < 20; i++)
		co_group_start(&g, "write", co_write_job, d);
	co_sleep_ns(1000);
	powercut_cut(p);
	CHECK_EQ(co_group_wait(&g), -ESHUTDOWN);
	CHECK(rt_now_ns() - start < 1000000);
	co_disk_close(d);
	powercut_destroy(p);
}

static co_fn void co_a_stalled_device_goes_on_when_it_is_told(void *arg)
{
	struct powercut *p = powercut_create(11);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
	struct disk *d = open_dev(dev);
	struct co_group g;

	co_group_init(&g);
	powercut_dev_stall(dev, true);
	co_group_start(&g, "write", co_write_job, d);
	co_sleep_ns(10000000000ull);
	CHECK_EQ(d->in_flight, 1);
	powercut_dev_stall(dev, false);
	CHECK_EQ(co_group_wait(&g), 0);
	co_disk_close(d);
	powercut_destroy(p);
}

static co_fn void co_an_io_can_be_failed_by_its_number(void *arg)
{
	struct powercut *p = powercut_create(2);
	struct powercut_dev *a = powercut_dev_create(p, "a", SIZE, NULL), *b = powercut_dev_create(p, "b", SIZE, NULL);
	struct disk *da = open_dev(a), *db = open_dev(b);
	char buf[512] = { 0 };

	powercut_fail_at(p, NULL, 2, -EIO);
	CHECK_EQ(co_disk_read(da, 0, buf, 512, 0), 0);
	CHECK_EQ(co_disk_read(db, 0, buf, 512, 0), -EIO);
	CHECK_EQ(co_disk_read(db, 0, buf, 512, 0), 0);
	powercut_fail_at(p, a, 2, -ETIMEDOUT);
	CHECK_EQ(co_disk_read(db, 0, buf, 512, 0), 0);
	CHECK_EQ(co_disk_write(da, 0, buf, 512, 0), -ETIMEDOUT);
	powercut_dev_fail(a, -EIO);
	CHECK_EQ(co_disk_read(da, 0, buf, 512, 0), -EIO);
	CHECK_EQ(co_disk_read(db, 0, buf, 512, 0), 0);
	powercut_dev_fail(a, -ENOSPC);
	CHECK_EQ(co_disk_read(da, 0, buf, 512, 0), 0);
	CHECK_EQ(co_disk_write(da, 0, buf, 512, 0), -ENOSPC);
	powercut_dev_fail(a, 0);
	CHECK_EQ(co_disk_write(da, 0, buf, 512, 0), 0);
	co_disk_close(da);
	co_disk_close(db);
	powercut_destroy(p);
}

/* The disk above is failed for good; the device forgets, and would call the next flush a success. */
static co_fn void co_a_failed_flush_drops_data_that_a_second_flush_does_not_bring_back(void *arg)
{
	unsigned lost = 0;

	for (uint64_t seed = 0; seed < 50; seed++) {
		struct powercut *p = powercut_create(seed);
		struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
		struct disk *d = open_dev(dev), *again = open_dev(dev);

		co_put(d, 0, 1, 1, 0);
		powercut_fail_at(p, NULL, 2, -EIO);
		CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK_EQ(co_disk_flush(d), -EIO);
		CHECK_EQ(co_disk_flush(again), 0);
		CHECK_EQ(sector_of(powercut_dev_view(dev), 0), 1);
		lost += sector_of(powercut_dev_stable(dev), 0) == 0;
		co_disk_close(d);
		co_disk_close(again);
		powercut_destroy(p);
	}
	CHECK(lost > 10 && lost < 50);
}

static co_fn void co_a_killed_process_loses_nothing_that_completed(void *arg)
{
	struct powercut *p = powercut_create(4);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
	struct disk *d = open_dev(dev);
	uint8_t buf[512];

	co_put(d, 3, 1, 8, 0);
	co_disk_close(d);
	d = open_dev(dev);
	CHECK_EQ(co_disk_read(d, 3 * 512, buf, 512, 0), 0);
	CHECK_EQ(buf[0], 8);
	CHECK_EQ(powercut_dev_volatile(dev), 512);
	co_disk_close(d);
	powercut_destroy(p);
}

static int cut_now(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	return len == 0 && op == DISK_OP_WRITE ? POWERCUT_NOW : 0;
}

static co_fn void co_a_mark_is_the_old_or_the_new_one_and_a_stamp_may_go_back(void *arg)
{
	unsigned old = 0, back = 0;

	for (uint64_t seed = 0; seed < 100; seed++) {
		struct powercut *p = powercut_create(seed);
		struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
		struct disk *d = open_dev(dev);
		uint64_t stable, last, now, after;
		char mark[64];

		CHECK_EQ(co_disk_mark_set(d, "old", NULL), 0);
		co_put(d, 0, 1, 1, DISK_FUA);
		CHECK_EQ(co_disk_stamp(d, &stable, &now), 0);
		co_put(d, 0, 1, 2, 0);
		CHECK_EQ(co_disk_stamp(d, &last, &now), 0);
		CHECK(last > stable && now > last);
		powercut_set_hook(p, cut_now, NULL);
		CHECK_EQ(co_disk_mark_set(d, "new", NULL), -ESHUTDOWN);
		co_disk_close(d);
		powercut_restart(p, seed);
		d = open_dev(dev);
		CHECK_EQ(co_disk_mark_get(d, mark, sizeof(mark)), 0);
		CHECK(!strcmp(mark, "old") || !strcmp(mark, "new"));
		old += !strcmp(mark, "old");
		CHECK_EQ(co_disk_stamp(d, &after, &now), 0);
		CHECK(after == stable || after == last);
		back += after == stable;
		co_put(d, 0, 1, 3, 0);
		CHECK_EQ(co_disk_stamp(d, &after, &now), 0);
		CHECK(after > last);
		co_disk_close(d);
		powercut_destroy(p);
	}
	CHECK(old > 10 && old < 90);
	CHECK(back > 10 && back < 90);
}

static co_fn void co_be_stopped_with_a_write_in_flight(void *arg)
{
	struct powercut_dev *dev = arg;
	struct co_group g;

	powercut_dev_stall(dev, true);
	co_group_init(&g);
	co_group_start(&g, "write", co_write_job, open_dev(dev));
	co_sleep_ns(1000);
	rt_sim_stop();
	co_yield();
	CHECK(!"reached after the stop");
}

static void abandoned_coroutines_can_be_forgotten(void)
{
	struct powercut *p = powercut_create(1);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
	struct rt *rt = make_sim(1);

	CHECK_EQ(rt_run(rt, co_be_stopped_with_a_write_in_flight, dev), -ECANCELED);
	powercut_cut(p);
	powercut_abandon(p);
	rt_sim_reseed(rt, 2);
	powercut_restart(p, 2);
	rt_destroy(rt);
	powercut_destroy(p);
}

/* The same seeds, the same run: else no failure of a crash test can be repeated. */
static uint64_t digest;

static co_fn int co_random_job(void *arg)
{
	struct disk *d = arg;
	uint8_t buf[2048];

	for (unsigned i = 0; i < 20; i++) {
		memset(buf, (int)rt_rand64(), sizeof(buf));
		int ret = co_disk_write(d, rt_rand64() % (SIZE - 2048), buf, 1 + rt_rand64() % 2048, i % 5 ? 0 : DISK_FUA);

		digest = digest * 31 + rt_now_ns() + (unsigned)ret;
		if (ret)
			return 0;
		if (i % 7 == 0)
			co_disk_flush(d);
	}
	return 0;
}

static co_fn void co_random_run(void *arg)
{
	struct powercut *p = powercut_create(77);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", SIZE, NULL);
	struct disk *d = open_dev(dev);
	struct co_group g;

	digest = 0;
	powercut_cut_at(p, 100);
	co_group_init(&g);
	for (unsigned i = 0; i < 8; i++)
		co_group_start(&g, "writer", co_random_job, d);
	co_group_wait(&g);
	co_disk_close(d);
	CHECK(powercut_is_off(p));
	for (unsigned s = 0; s < SIZE / 512; s++) {
		uint8_t buf[512];

		media_read(powercut_dev_stable(dev), s * 512, buf, 512);
		for (unsigned i = 0; i < 512; i++)
			digest = digest * 31 + buf[i];
	}
	powercut_destroy(p);
}

static void the_same_seeds_give_the_same_run(void)
{
	uint64_t first;

	on_sim(3, co_random_run, NULL);
	first = digest;
	on_sim(3, co_random_run, NULL);
	CHECK_EQ(digest, first);
	on_sim(4, co_random_run, NULL);
	CHECK(digest != first);
}

#define RUN_CO(fn) \
	do { \
		printf("%s\n", &#fn[3]); \
		fflush(stdout); \
		on_sim(1, fn, NULL); \
	} while (0)

int main(void)
{
	log_set_level(LOG_NONE);
	RUN_CO(co_what_was_flushed_survives_every_cut);
	RUN_CO(co_a_cut_leaves_any_version_since_the_last_flush);
	RUN_CO(co_a_write_in_flight_may_be_there_torn_or_missing_even_with_fua);
	RUN_CO(co_a_later_flush_does_not_bring_back_what_fua_replaced);
	RUN_CO(co_devices_of_one_supply_are_cut_at_the_same_write);
	RUN_CO(co_a_cut_ends_what_is_in_flight_at_once);
	RUN_CO(co_a_stalled_device_goes_on_when_it_is_told);
	RUN_CO(co_an_io_can_be_failed_by_its_number);
	RUN_CO(co_a_failed_flush_drops_data_that_a_second_flush_does_not_bring_back);
	RUN_CO(co_a_killed_process_loses_nothing_that_completed);
	RUN_CO(co_a_mark_is_the_old_or_the_new_one_and_a_stamp_may_go_back);
	RUN(abandoned_coroutines_can_be_forgotten);
	RUN(the_same_seeds_give_the_same_run);
	return 0;
}
