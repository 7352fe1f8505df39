/* SPDX-License-Identifier: MIT */
/* The qcow2 driver: the disk contract on every kind of image, what requests cost, and that no cluster has two users. */
#include <errno.h>

#include "backend/fault.h"
#include "backend/media.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "lib/disk_conformance.h"
#include "lib/qcow2_verify.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"

#define MIB (1ull << 20)

static struct powercut *p;
static struct powercut_dev *dev;

/* --- A disk in between, whose requests that touch `hold_off` wait while `held` --- */

static struct hold {
	struct disk disk;
	bool held;
	uint64_t off;
	unsigned waiting;
	struct co_queue q;
} *hold;

static co_fn void co_pass(uint64_t off, uint64_t len)
{
	if (!hold->held || hold->off < off || hold->off >= off + len)
		return;
	hold->waiting++;
	while (hold->held)
		co_queue_wait(&hold->q, "the test");
	hold->waiting--;
}

static co_fn int hold_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	co_pass(off, len);
	return co_disk_readv(d->file, off, iov, niov, flags);
}

static co_fn int hold_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	co_pass(off, len);
	return co_disk_writev(d->file, off, iov, niov, flags);
}

static const struct disk_ops hold_ops = { .driver = "hold", .co_read = hold_co_read, .co_write = hold_co_write };

static void let_go(void)
{
	hold->held = false;
	co_queue_wake_all(&hold->q);
}

/* --- Images --- */

static struct qcow2_create image(uint64_t size, uint64_t cluster_size, bool ext)
{
	return (struct qcow2_create){ .size = size, .cluster_size = cluster_size, .refcount_bits = 16, .version = 3, .ext_l2 = ext };
}

/* A new image; *backing is taken over. */
static co_fn struct disk *co_make(struct qcow2_create c, struct disk *backing)
{
	struct qcow2_opts o = { .backing = backing };
	struct powercut_dev_config config = { .align = 512 };
	struct err err = ERR_INIT;
	struct disk *file, *d;

	if (backing) {
		c.backing_file = "base";
		c.backing_format = "raw";
	}
	p = powercut_create(1);
	dev = powercut_dev_create(p, "image", 4096, &config);
	CHECK_EQ(powercut_dev_open(dev, &file), 0);
	if (qcow2_create_check(&c, "image", &err) || co_qcow2_create(file, NULL, &c, &err))
		test_fail("%s", err.msg);
	hold = calloc(1, sizeof(*hold));
	CHECK_EQ(disk_init(&hold->disk, &hold_ops, "hold", file), 0);
	co_queue_init(&hold->q);
	if (co_qcow2_open(&hold->disk, "image", &o, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	return d;
}

static co_fn void co_end(struct disk *d)
{
	struct qcow2_verdict v;

	co_disk_close(d);
	qcow2_verify(powercut_dev_view(dev), &v);
	if (v.wrong[0] || v.leaks)
		test_fail("after closing: %s, %" PRIu64 " leaks", v.wrong, v.leaks);
	powercut_destroy(p);
}

/* --- The contract --- */

static co_fn void co_every_kind_keeps_the_disk_contract(void)
{
	struct qcow2_create kinds[] = {
		image(3 * MIB + 512, 65536, false), image(2 * MIB, 4096, false), image(2 * MIB - 512, 512, false), image(5 * MIB, 2 * MIB, false),
		image(3 * MIB, 65536, true), image(2 * MIB + 1536, 16384, true), image(2 * MIB, 65536, false), image(2 * MIB, 65536, false),
	};
	unsigned n = TEST_SANITIZED ? 5 : ARRAY_SIZE(kinds);

	kinds[6].version = 2;
	kinds[7].refcount_bits = 1;
	for (unsigned i = 0; i < n; i++) {
		struct disk *d = co_make(kinds[i], NULL);

		co_disk_conform(d, CONFORM_SLOW, test_seed() + i);
		co_end(d);
	}
}

/* --- What it costs --- */

static uint64_t ops(enum disk_op op)
{
	return powercut_dev_counters(dev)->ops[op];
}

static uint64_t written(void)
{
	return powercut_dev_counters(dev)->bytes[DISK_OP_WRITE];
}

static co_fn void co_a_write_costs_its_own_size_whatever_the_cluster(void)
{
	static char buf[4096];

	for (unsigned bits = 14; bits <= 21; bits++) {
		for (int ext = 0; ext < 2; ext++) {
			struct disk *d = co_make(image(64 * MIB, 1ull << bits, ext), NULL);
			uint64_t bytes, n;

			memset(buf, 1, sizeof(buf));
			/* The first makes the L2 table and fills the reserve. */
			CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), 0), 0);
			co_sleep_ns(1000000000);
			bytes = written();
			n = ops(DISK_OP_WRITE);
			for (unsigned i = 1; i <= 8; i++)
				CHECK_EQ(co_disk_write(d, i * 7 * MIB + 8192, buf, sizeof(buf), 0), 0);
			/* A second table, where tables are small. */
			CHECK(written() - bytes <= 8 * 4096 + (bits == 14 ? 32 * 1024 : 0));
			CHECK(ops(DISK_OP_WRITE) - n <= 8 + (bits == 14 ? 8 : 0));
			co_end(d);
		}
	}
}

static co_fn void co_a_flush_costs_one_device_flush(void)
{
	struct disk *d = co_make(image(64 * MIB, 65536, false), NULL);
	static char buf[4096];
	uint64_t n;

	memset(buf, 1, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), 0), 0);
	co_sleep_ns(1000000000);
	for (unsigned i = 1; i < 10; i++) {
		n = ops(DISK_OP_FLUSH);
		CHECK_EQ(co_disk_write(d, i * MIB, buf, sizeof(buf), 0), 0);
		CHECK_EQ(co_disk_flush(d), 0);
		CHECK_EQ(ops(DISK_OP_FLUSH) - n, 1);
	}
	co_end(d);
}

static co_fn void co_fua_costs_no_flush_where_nothing_else_must_be_stable(void)
{
	struct disk *base, *d;
	struct err err = ERR_INIT;
	static char buf[65536];
	uint64_t n, bytes;

	CHECK_EQ(co_disk_open("mem:64M", DISK_OPEN_RDWR, &base, &err), 0);
	memset(buf, 5, sizeof(buf));
	for (uint64_t off = 0; off < 32 * MIB; off += sizeof(buf))
		CHECK_EQ(co_disk_write(base, off, buf, sizeof(buf), 0), 0);
	d = co_make(image(64 * MIB, 65536, false), base);
	CHECK_EQ(co_disk_write(d, 0, buf, 65536, 0), 0);
	co_sleep_ns(2000000000);
	/* A new entry takes one flush, with the data of the same write. */
	n = ops(DISK_OP_FLUSH);
	CHECK_EQ(co_disk_write(d, 65536, buf, 65536, DISK_FUA), 0);
	CHECK(ops(DISK_OP_FLUSH) - n <= 2);
	/* What is mapped for good is only written. */
	n = ops(DISK_OP_FLUSH);
	for (unsigned i = 0; i < 8; i++)
		CHECK_EQ(co_disk_write(d, i * 8192, buf, 4096, DISK_FUA), 0);
	CHECK_EQ(ops(DISK_OP_FLUSH) - n, 0);
	/* Nobody's copies are paid for but the own one. */
	for (unsigned i = 0; i < 64; i++)
		CHECK_EQ(co_disk_write(d, MIB + i * 65536, buf, 4096, 0), 0);
	bytes = written();
	CHECK_EQ(co_disk_write(d, 16 * MIB, buf, 4096, DISK_FUA), 0);
	CHECK(written() - bytes <= 65536 + 4 * 4096);
	co_end(d);
}

static co_fn void co_sequential_writes_are_adjacent(void)
{
	struct disk *d = co_make(image(8 * MIB, 65536, false), NULL);
	char *buf = calloc(1, 4 * MIB);
	uint64_t n;

	memset(buf, 7, 4 * MIB);
	for (uint64_t off = 0; off < 4 * MIB; off += 16384)
		CHECK_EQ(co_disk_write(d, off, buf, 16384, 0), 0);
	n = ops(DISK_OP_READ);
	CHECK_EQ(co_disk_read(d, 0, buf, 4 * MIB, 0), 0);
	CHECK_EQ(ops(DISK_OP_READ) - n, 1);
	free(buf);
	co_end(d);
}

static co_fn void co_writes_into_one_cluster_pay_for_its_copy_once(void)
{
	struct disk *base, *d;
	struct err err = ERR_INIT;
	static char buf[65536];
	uint64_t bytes;

	CHECK_EQ(co_disk_open("mem:8M", DISK_OPEN_RDWR, &base, &err), 0);
	memset(buf, 9, sizeof(buf));
	for (uint64_t off = 0; off < 8 * MIB; off += sizeof(buf))
		CHECK_EQ(co_disk_write(base, off, buf, sizeof(buf), 0), 0);
	d = co_make(image(8 * MIB, 2 * MIB, false), base);
	CHECK_EQ(co_disk_write(d, 0, buf, 4096, 0), 0);
	bytes = written();
	/* Nothing is padded before a flush. */
	memset(buf, 3, sizeof(buf));
	for (unsigned i = 1; i < 100; i++)
		CHECK_EQ(co_disk_write(d, i * 8192, buf, 4096, 0), 0);
	CHECK_EQ(written() - bytes, 99 * 4096);
	CHECK_EQ(co_disk_write(d, 2 * MIB, buf, 4096, 0), 0);
	co_sleep_ns(200000000);
	CHECK_EQ(written() - bytes, 100 * 4096);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK(written() - bytes <= 4 * MIB + 65536);
	CHECK_EQ(co_disk_read(d, 8192, buf, 8192, 0), 0);
	CHECK_EQ(buf[4095], 3);
	CHECK_EQ(buf[4096], 9);
	/* Nor is a flush needed when there is time. */
	CHECK_EQ(co_disk_write(d, 6 * MIB, buf, 4096, 0), 0);
	bytes = written();
	co_sleep_ns(3000000000);
	CHECK(written() - bytes >= 2 * MIB - 4096);
	/* A cluster that is all written is never read. */
	bytes = written();
	for (uint64_t off = 4 * MIB; off < 6 * MIB; off += sizeof(buf))
		CHECK_EQ(co_disk_write(d, off, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK(written() - bytes <= 2 * MIB + 65536);
	co_end(d);
}

/* --- No cluster has two users --- */

static struct late {
	struct disk *d;
	bool write, done;
	uint64_t off;
	int ret;
	char buf[4096];
} late;

static co_fn void co_late(void *arg)
{
	late.ret = late.write ? co_disk_write(late.d, late.off, late.buf, sizeof(late.buf), 0) : co_disk_read(late.d, late.off, late.buf, sizeof(late.buf), 0);
	late.done = true;
}

/* A request to a cluster is held up, the cluster is discarded, and others write all over the image meanwhile. */
static co_fn struct disk *co_discard_under_a_request(bool write)
{
	struct disk *d = co_make(image(16 * MIB, 65536, false), NULL);
	static char buf[65536];

	memset(buf, 0x11, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	late = (struct late){ .d = d, .write = write, .off = 4096 };
	memset(late.buf, 0x22, sizeof(late.buf));
	/* The first cluster of data lies behind the tables; all of the image is searched for it. */
	for (uint64_t at = 0; at < media_size(powercut_dev_view(dev)); at += 65536) {
		uint8_t c;

		media_read(powercut_dev_view(dev), at, &c, 1);
		if (c == 0x11)
			hold->off = at + 4096;
	}
	CHECK(hold->off);
	hold->held = true;
	CHECK_EQ(co_spawn("late", co_late, NULL), 0);
	while (!hold->waiting)
		co_sleep_ns(1000);
	CHECK_EQ(co_disk_discard(d, 0, 65536, 0), 0);
	memset(buf, 0x33, sizeof(buf));
	for (unsigned round = 0; round < 6; round++) {
		CHECK_EQ(co_disk_flush(d), 0);
		for (uint64_t off = MIB; off < 16 * MIB; off += 65536)
			CHECK_EQ(co_disk_write(d, off, buf, sizeof(buf), 0), 0);
		for (uint64_t off = MIB; off < 8 * MIB && round < 5; off += 65536)
			CHECK_EQ(co_disk_discard(d, off, 65536, 0), 0);
	}
	let_go();
	while (!late.done)
		co_sleep_ns(1000);
	CHECK_EQ(late.ret, 0);
	return d;
}

static co_fn void co_a_late_read_never_sees_another_guests_cluster(void)
{
	struct disk *d = co_discard_under_a_request(false);

	for (unsigned i = 0; i < sizeof(late.buf); i++)
		CHECK(late.buf[i] == 0x11 || !late.buf[i]);
	co_end(d);
}

static co_fn void co_a_late_write_never_hits_another_guests_cluster(void)
{
	struct disk *d = co_discard_under_a_request(true);
	static char buf[65536];

	for (uint64_t off = MIB; off < 16 * MIB; off += 65536) {
		CHECK_EQ(co_disk_read(d, off, buf, sizeof(buf), 0), 0);
		for (unsigned i = 0; i < sizeof(buf); i++)
			CHECK_EQ(buf[i], 0x33);
	}
	co_end(d);
}

static bool discarded;

static co_fn void co_discard_every_other(void *arg)
{
	struct disk *d = arg;

	for (uint64_t off = MIB; off < d->size; off += 1024)
		CHECK_EQ(co_disk_discard(d, off, 512, 0), 0);
	discarded = true;
}

/* More clusters than the list of freed ones holds, while a request that may look at them is in flight. */
static co_fn void co_nothing_leaks_however_much_is_freed_at_once(void)
{
	struct disk *d = co_make(image(68 * MIB, 512, false), NULL);
	char *buf = malloc(MIB);

	memset(buf, 0x11, MIB);
	for (uint64_t off = 0; off < d->size; off += MIB)
		CHECK_EQ(co_disk_write(d, off, buf, MIB, 0), 0);
	free(buf);
	CHECK_EQ(co_disk_flush(d), 0);
	late = (struct late){ .d = d };
	hold->off = 0;
	for (uint64_t at = 0; at < media_size(powercut_dev_view(dev)) && !hold->off; at += 512) {
		uint8_t c;

		media_read(powercut_dev_view(dev), at, &c, 1);
		if (c == 0x11)
			hold->off = at;
	}
	hold->held = true;
	CHECK_EQ(co_spawn("late", co_late, NULL), 0);
	while (!hold->waiting)
		co_sleep_ns(1000);
	CHECK_EQ(co_spawn("discard", co_discard_every_other, d), 0);
	co_sleep_ns(100000000000ull);
	/* It waits rather than to leak. */
	CHECK(!discarded);
	let_go();
	while (!late.done || !discarded)
		co_sleep_ns(1000000);
	co_end(d);
}

static co_fn void co_main(void *arg)
{
	RUN(co_every_kind_keeps_the_disk_contract);
	RUN(co_a_write_costs_its_own_size_whatever_the_cluster);
	RUN(co_a_flush_costs_one_device_flush);
	RUN(co_fua_costs_no_flush_where_nothing_else_must_be_stable);
	RUN(co_sequential_writes_are_adjacent);
	RUN(co_writes_into_one_cluster_pay_for_its_copy_once);
	RUN(co_a_late_read_never_sees_another_guests_cluster);
	RUN(co_a_late_write_never_hits_another_guests_cluster);
	RUN(co_nothing_leaks_however_much_is_freed_at_once);
}

int main(void)
{
	static const struct rt_config config = { .coroutines = 200 };
	struct rt_bufpool *bufs;
	struct err err = ERR_INIT;
	struct rt *rt;

	backends_register();
	CHECK_EQ(rt_create_sim(&config, 1, &rt, &err), 0);
	CHECK_EQ(rt_bufpool_create(rt, 1, &bufs, &err), 0);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, co_main, NULL), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	return 0;
}
