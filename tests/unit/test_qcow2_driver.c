/* SPDX-License-Identifier: MIT */
/* The qcow2 driver: the disk contract on every kind of image, what requests cost, and that no cluster has two users. */
#include <errno.h>

#include "backend/fault.h"
#include "backend/media.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "format/qcow2/tools.h"
#include "lib/disk_conformance.h"
#include "lib/qcow2_verify.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"

#define MIB (1ull << 20)

static struct powercut *p;
static struct powercut_dev *dev;
static uint64_t cow_debt, table_cache;	/* 0: the default */

/* --- A disk in between, whose requests that touch `off` wait while `held`; or the first `any` writes, wherever they go --- */

static struct hold {
	struct disk disk;
	bool held;
	uint64_t off;
	unsigned any, waiting;
	struct co_queue q;
} *hold;

static co_fn void co_pass(uint64_t off, uint64_t len, bool write)
{
	if (!hold->held || (hold->any ? !write || hold->waiting >= hold->any : hold->off < off || hold->off >= off + len))
		return;
	hold->waiting++;
	while (hold->held)
		co_queue_wait(&hold->q, "the test");
	hold->waiting--;
}

static co_fn int hold_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	co_pass(off, len, false);
	return co_disk_readv(d->file, off, iov, niov, flags);
}

static co_fn int hold_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	co_pass(off, len, true);
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
	struct qcow2_opts o = { .backing = backing, .fill_debt = cow_debt, .table_cache = table_cache };
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
	unsigned n = TEST_SLOWER > 8 ? 2 : TEST_SANITIZED ? 5 : ARRAY_SIZE(kinds);

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

	for (unsigned bits = 14; bits <= 21; bits += TEST_SLOWER > 8 ? 4 : 1) {
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
	for (uint64_t off = 0; off < (TEST_SANITIZED ? 17 : 32) * MIB; off += sizeof(buf))
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

/* --- Tables --- */

/* 4 GiB have 128 blocks of L2 tables, the cache 32. */
static co_fn void co_tables_of_an_image_in_order_stay_in_memory(void)
{
	struct qcow2_create c = image(4096 * MIB, 65536, false);
	const uint64_t step = 32 * MIB, blocks = 128;
	static char buf[65536];
	struct disk *d;
	uint64_t n;

	c.prealloc = QCOW2_PREALLOC_METADATA;
	table_cache = 1;
	d = co_make(c, NULL);
	table_cache = 0;
	n = ops(DISK_OP_READ);
	for (unsigned round = 0; round < 2; round++)
		for (uint64_t i = 0; i < blocks; i++)
			CHECK_EQ(co_disk_read(d, i * 37 % blocks * step, buf, 512, 0), 0);
	/* A table of 64 KiB has 16 of them. */
	CHECK_EQ(ops(DISK_OP_READ) - n, 2 * blocks + blocks / 16);
	/* What was changed is not believed from before. */
	memset(buf, 7, sizeof(buf));
	for (uint64_t i = 0; i < blocks; i++) {
		CHECK_EQ(co_disk_write(d, i * step + 65536, buf, sizeof(buf), 0), 0);
		CHECK_EQ(co_disk_write(d, i * step + 3 * 65536, buf, sizeof(buf), 0), 0);
		CHECK_EQ(co_disk_discard(d, i * step + 65536, 65536, 0), 0);
	}
	CHECK_EQ(co_disk_flush(d), 0);
	for (unsigned round = 0; round < 2; round++)
		for (uint64_t i = 0; i < blocks; i++) {
			uint64_t at = i * 37 % blocks * step;

			CHECK_EQ(co_disk_read(d, at + 65536, buf, 512, 0), 0);
			CHECK(!buf[0] && !buf[511]);
			CHECK_EQ(co_disk_read(d, at + 3 * 65536, buf, 512, 0), 0);
			CHECK(buf[0] == 7 && buf[511] == 7);
		}
	co_end(d);
}

/* Tables in no order at all: what does not fit is read again, and right each time. */
static co_fn void co_the_cache_of_tables_takes_no_more_than_it_may(void)
{
	const uint64_t blocks = 96, step = 32 * MIB, cap = 32;
	static char buf[4096];
	struct disk *d;
	uint64_t n;

	table_cache = 1;
	d = co_make(image(blocks * step, 65536, false), NULL);
	table_cache = 0;
	/* Eight runs and more in each block: no neighbour follows the other. */
	for (uint64_t k = 0; k < 10; k++)
		for (uint64_t i = 0; i < blocks; i++) {
			memset(buf, (int)(1 + k * 23 + i), sizeof(buf));
			CHECK_EQ(co_disk_write(d, i * step + k * 131072, buf, sizeof(buf), 0), 0);
		}
	CHECK_EQ(co_disk_flush(d), 0);
	n = ops(DISK_OP_READ);
	for (unsigned round = 0; round < 2; round++)
		for (uint64_t i = 0; i < blocks; i++) {
			uint64_t k = (i + round) % 10;

			CHECK_EQ(co_disk_read(d, i * step + k * 131072, buf, sizeof(buf), 0), 0);
			CHECK_EQ((uint8_t)buf[4095], (uint8_t)(1 + k * 23 + i));
		}
	/* One for the data; and a table each, but for those that were in memory. */
	CHECK(ops(DISK_OP_READ) - n >= 2 * (2 * blocks - cap));
	co_end(d);
}

/* --- What a crash leaks --- */

/* If it came now: in clusters. A repair gives them back, and the file ends behind the last cluster in use. */
static co_fn uint64_t co_crash(void)
{
	struct powercut *q = powercut_fork(p, 1);
	struct powercut_dev *there = powercut_dev_find(q, "image");
	struct qcow2_check c = { .repair = QCOW2_REPAIR_LEAKS };
	struct err err = ERR_INIT;
	struct qcow2_verdict v;
	struct qcow2_img img;
	struct disk *file;
	uint64_t leaks;

	qcow2_verify(powercut_dev_view(there), &v);
	CHECK_STR(v.wrong, "");
	leaks = v.leaks;
	CHECK_EQ(powercut_dev_open(there, &file), 0);
	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_check(&img, &c, &err))
		test_fail("%s", err.msg);
	qcow2_img_close(&img);
	CHECK_EQ(c.damage, 0);
	CHECK_EQ(c.leaks, leaks);
	CHECK_EQ(c.leaks_fixed, leaks);
	CHECK(!leaks || file->size == c.image_end);
	co_disk_close(file);
	qcow2_verify(powercut_dev_view(there), &v);
	CHECK_STR(v.wrong, "");
	CHECK_EQ(v.leaks, 0);
	powercut_destroy(q);
	return leaks;
}

/* 16 clusters at rest; 128 at most, an eighth of the disk. */
static co_fn void co_a_crash_leaks_no_more_than_was_taken_lately(void)
{
	const uint64_t cs = 65536, least = 16, most = 128, n = 300;
	struct disk *d = co_make(image(1024 * cs, cs, false), NULL);
	static char buf[4096];
	uint64_t leaks = 0, holes;

	memset(buf, 1, sizeof(buf));
	for (uint64_t i = 0; i < n; i++) {
		CHECK_EQ(co_disk_write(d, i * cs, buf, sizeof(buf), 0), 0);
		if (i != 1 && i != 30 && i != n - 1)
			continue;
		CHECK_EQ(co_disk_flush(d), 0);
		leaks = co_crash();
		/* With the table. */
		CHECK(leaks <= max(least, min(i + 2, most)));
	}
	CHECK(leaks > least);
	/* Nobody has wanted any for a while. */
	co_sleep_ns(30000000000);
	CHECK(co_crash() <= least);
	/* What is discarded becomes free, though nobody flushes and nobody wants it. */
	holes = powercut_dev_counters(dev)->bytes[DISK_OP_DISCARD];
	CHECK_EQ(co_disk_discard(d, 0, n * cs, 0), 0);
	co_sleep_ns(10000000000);
	CHECK(co_crash() <= least);
	CHECK(powercut_dev_counters(dev)->bytes[DISK_OP_DISCARD] - holes >= n * cs);
	CHECK_EQ(co_disk_read(d, 7 * cs, buf, sizeof(buf), 0), 0);
	CHECK(!buf[0]);
	/* And at rest nothing more is done. */
	holes = ops(DISK_OP_WRITE) + ops(DISK_OP_FLUSH);
	co_sleep_ns(100000000000);
	CHECK_EQ(ops(DISK_OP_WRITE) + ops(DISK_OP_FLUSH) - holes, 0);
	co_end(d);
}

static const struct disk_ops *willing;
static unsigned refused;

static co_fn int co_refuse_to_shrink(struct disk *d, uint64_t size)
{
	refused += size < d->size;
	return size < d->size ? -EPERM : willing->co_resize(d, size);
}

/* As network file systems do, and quotas. */
static co_fn void co_a_file_that_cannot_be_shrunk_is_served_on(void)
{
	const uint64_t cs = 65536, n = 100;
	struct disk *d = co_make(image(1024 * cs, cs, false), NULL);
	struct disk *file = d->file;
	struct disk_ops ops;
	static char buf[4096];

	while (!file->ops->co_resize)
		file = file->file;
	willing = file->ops;
	ops = *willing;
	refused = 0;
	ops.co_resize = co_refuse_to_shrink;
	file->ops = &ops;
	memset(buf, 1, sizeof(buf));
	for (uint64_t i = 0; i < n; i++)
		CHECK_EQ(co_disk_write(d, i * cs, buf, sizeof(buf), 0), 0);
	/* The reserve of a burst goes back. */
	co_sleep_ns(30000000000);
	CHECK(refused > 0);
	CHECK_EQ(co_disk_write(d, n * cs, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK(co_crash() <= 17);
	file->ops = willing;
	co_end(d);
}

/* --- Copies when much is owed --- */

#define SUB 16384ull

/* Over a backing file of 9s, and with so many open copies (9 of at most 16) that a new one is made at once. */
static co_fn struct disk *co_make_pressed(uint64_t cluster_size, bool ext)
{
	static char buf[65536];
	struct disk *base, *d;
	struct err err = ERR_INIT;

	CHECK_EQ(co_disk_open("mem:16M", DISK_OPEN_RDWR, &base, &err), 0);
	memset(buf, 9, sizeof(buf));
	for (uint64_t off = 0; off < (TEST_SANITIZED ? 17 * cluster_size : 16 * MIB); off += sizeof(buf))
		CHECK_EQ(co_disk_write(base, off, buf, sizeof(buf), 0), 0);
	cow_debt = 16 * cluster_size;
	d = co_make(image(16 * MIB, cluster_size, ext), base);
	cow_debt = 0;
	memset(buf, 1, sizeof(buf));
	for (uint64_t i = 8; i < 17; i++)
		CHECK_EQ(co_disk_write(d, i * cluster_size, buf, 4096, 0), 0);
	return d;
}

static co_fn void co_check_bytes(struct disk *d, uint64_t off, uint64_t len, uint8_t value)
{
	static uint8_t buf[65536];

	for (uint64_t n; len; off += n, len -= n) {
		n = min(len, (uint64_t)sizeof(buf));
		CHECK_EQ(co_disk_read(d, off, buf, n, 0), 0);
		for (uint64_t i = 0; i < n; i++)
			CHECK_EQ(buf[i], value);
	}
}

static co_fn void co_a_copy_when_much_is_owed_is_one_write(void)
{
	static const struct { uint64_t cluster; bool ext; uint64_t part; } kinds[] = { { 65536, false, 65536 }, { 32 * SUB, true, SUB } };
	static char buf[4096];

	memset(buf, 2, sizeof(buf));
	for (unsigned i = 0; i < ARRAY_SIZE(kinds); i++) {
		struct disk *d = co_make_pressed(kinds[i].cluster, kinds[i].ext);
		uint64_t n = ops(DISK_OP_WRITE), bytes = written();

		CHECK_EQ(co_disk_write(d, 8192, buf, sizeof(buf), 0), 0);
		CHECK_EQ(ops(DISK_OP_WRITE) - n, 1);
		CHECK_EQ(written() - bytes, kinds[i].part);
		co_check_bytes(d, 0, 8192, 9);
		co_check_bytes(d, 8192, 4096, 2);
		co_check_bytes(d, 12288, kinds[i].cluster - 12288, 9);
		/* And another in the same place costs no copy. */
		bytes = written();
		CHECK_EQ(co_disk_write(d, 4096, buf, sizeof(buf), 0), 0);
		CHECK_EQ(written() - bytes, 4096);
		/* One that begins a subcluster may be the first of many. */
		bytes = written();
		CHECK_EQ(co_disk_write(d, 3 * kinds[i].cluster, buf, sizeof(buf), 0), 0);
		CHECK_EQ(written() - bytes, 4096);
		co_end(d);
	}
}

static struct beside {
	struct disk *d;
	uint64_t off;
	bool done;
	char buf[4096];
} beside[2];

static co_fn void co_beside(void *arg)
{
	struct beside *b = arg;

	CHECK_EQ(co_disk_write(b->d, b->off, b->buf, sizeof(b->buf), 0), 0);
	b->done = true;
}

static void start_beside(struct beside *b, struct disk *d, uint64_t off, char value)
{
	*b = (struct beside){ .d = d, .off = off };
	memset(b->buf, value, sizeof(b->buf));
	CHECK_EQ(co_spawn("beside", co_beside, b), 0);
}

static co_fn void co_finish_beside(unsigned n)
{
	let_go();
	hold->any = 0;
	for (unsigned i = 0; i < n; i++)
		while (!beside[i].done)
			co_sleep_ns(1000);
}

/* The copy is held up when it has read the old content: who writes beside the guest's data meanwhile is not written over. */
static co_fn void co_a_copy_takes_nothing_from_a_write_beside_it(void)
{
	struct disk *d = co_make_pressed(65536, false);

	hold->any = 1;
	hold->held = true;
	start_beside(&beside[0], d, 8192, 2);
	while (!hold->waiting)
		co_sleep_ns(1000);
	start_beside(&beside[1], d, 16384, 3);
	co_sleep_ns(1000000);
	co_finish_beside(2);
	co_check_bytes(d, 0, 8192, 9);
	co_check_bytes(d, 8192, 4096, 2);
	co_check_bytes(d, 12288, 4096, 9);
	co_check_bytes(d, 16384, 4096, 3);
	co_end(d);
}

/* A write in place is in flight when its cluster gets a copy of another subcluster: that does not make a copy of what is there already. */
static co_fn void co_what_a_cluster_has_is_not_copied_over_itself(void)
{
	struct disk *d = co_make_pressed(32 * SUB, true);
	static char buf[SUB];

	memset(buf, 4, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	for (uint64_t i = 8; i < 17; i++)
		CHECK_EQ(co_disk_write(d, (32 * i + 1) * SUB, buf, 4096, 0), 0);
	hold->any = 1;
	hold->held = true;
	start_beside(&beside[0], d, 4096, 5);
	while (!hold->waiting)
		co_sleep_ns(1000);
	/* The copy, of another subcluster: it is put off, since it begins there. */
	CHECK_EQ(co_disk_write(d, 4 * SUB, buf, 4096, 0), 0);
	hold->any = 2;
	start_beside(&beside[1], d, 8192, 6);
	while (hold->waiting < 2)
		co_sleep_ns(1000);
	co_finish_beside(2);
	co_check_bytes(d, 0, 4096, 4);
	co_check_bytes(d, 4096, 4096, 5);
	co_check_bytes(d, 8192, 4096, 6);
	co_check_bytes(d, 12288, 4096, 4);
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

/* Offset 4096 of the cluster of 64 KiB with these bytes: it lies behind the tables; all of the image is searched for it. */
static void hold_where(uint8_t value)
{
	for (uint64_t at = 0; at < media_size(powercut_dev_view(dev)); at += 65536) {
		uint8_t c;

		media_read(powercut_dev_view(dev), at, &c, 1);
		if (c == value)
			hold->off = at + 4096;
	}
	CHECK(hold->off);
}

/* A request to a cluster is held up, the cluster is discarded, and others write all over the image meanwhile. */
static co_fn struct disk *co_discard_under_a_request(bool write)
{
	const uint64_t size = (TEST_SANITIZED ? 4 : 16) * MIB;
	struct disk *d = co_make(image(size, 65536, false), NULL);
	static char buf[65536];

	memset(buf, 0x11, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	late = (struct late){ .d = d, .write = write, .off = 4096 };
	memset(late.buf, 0x22, sizeof(late.buf));
	hold_where(0x11);
	hold->held = true;
	CHECK_EQ(co_spawn("late", co_late, NULL), 0);
	while (!hold->waiting)
		co_sleep_ns(1000);
	CHECK_EQ(co_disk_discard(d, 0, 65536, 0), 0);
	memset(buf, 0x33, sizeof(buf));
	for (unsigned round = 0; round < 6; round++) {
		CHECK_EQ(co_disk_flush(d), 0);
		for (uint64_t off = MIB; off < size; off += 65536)
			CHECK_EQ(co_disk_write(d, off, buf, sizeof(buf), 0), 0);
		for (uint64_t off = MIB; off < size / 2 && round < 5; off += 65536)
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

	for (uint64_t off = MIB; off < d->size; off += 65536) {
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
	struct qcow2_create kind = image(68 * MIB, 512, false);
	char *buf = malloc(MIB);
	struct disk *d;

	/* Clusters that nobody wrote to are freed all the same, and cost no memory. */
	if (TEST_SANITIZED)
		kind.prealloc = QCOW2_PREALLOC_METADATA;
	d = co_make(kind, NULL);
	memset(buf, 0x11, MIB);
	for (uint64_t off = 0; off < (TEST_SANITIZED ? MIB : d->size); off += MIB)
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

static bool stamped;

static co_fn void co_stamp(void *arg)
{
	uint64_t stamp, now;

	while (co_disk_stamp(arg, &stamp, &now) == -EAGAIN)
		co_sleep_ns(1000000);
	stamped = true;
}

static uint64_t changes(void)
{
	return ops(DISK_OP_WRITE) + ops(DISK_OP_ZERO) + ops(DISK_OP_DISCARD);
}

/* Else a log over the image would take what closing writes for somebody else's. */
static co_fn void co_nothing_is_written_behind_a_stamp(void)
{
	struct disk *d = co_make(image(16 * MIB, 65536, false), NULL);
	struct disk_identity id, same;
	static char buf[65536];
	uint64_t n, stamp, now, start;

	memset(buf, 0x11, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 0, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	hold_where(0x11);
	late = (struct late){ .d = d, .off = 4096 };
	hold->held = true;
	CHECK_EQ(co_spawn("late", co_late, NULL), 0);
	while (!hold->waiting)
		co_sleep_ns(1000);
	CHECK_EQ(co_disk_discard(d, 0, 65536, 0), 0);
	/* Nobody waits for a request that may hang. */
	start = rt_now_ns();
	CHECK_EQ(co_disk_stamp(d, &stamp, &now), -EAGAIN);
	memset(&id, 1, sizeof(id));
	memset(&same, 2, sizeof(same));
	CHECK_EQ(co_disk_identity(d, &id), -EAGAIN);
	CHECK_EQ(co_disk_identity(d, &same), -EAGAIN);
	CHECK(disk_identity_equal(&id, &same));
	CHECK(rt_now_ns() - start < 1000000000);
	CHECK_EQ(co_spawn("stamp", co_stamp, d), 0);
	co_sleep_ns(1000000000);
	CHECK(!stamped);
	let_go();
	while (!late.done || !stamped)
		co_sleep_ns(1000);
	n = changes();
	co_disk_close(d);
	CHECK_EQ(changes() - n, 0);
	powercut_destroy(p);
}

static co_fn void co_main(void *arg)
{
	RUN(co_every_kind_keeps_the_disk_contract);
	RUN(co_a_write_costs_its_own_size_whatever_the_cluster);
	RUN(co_a_flush_costs_one_device_flush);
	RUN(co_fua_costs_no_flush_where_nothing_else_must_be_stable);
	RUN(co_sequential_writes_are_adjacent);
	RUN(co_writes_into_one_cluster_pay_for_its_copy_once);
	RUN(co_tables_of_an_image_in_order_stay_in_memory);
	RUN(co_the_cache_of_tables_takes_no_more_than_it_may);
	RUN(co_a_crash_leaks_no_more_than_was_taken_lately);
	RUN(co_a_file_that_cannot_be_shrunk_is_served_on);
	RUN(co_a_copy_when_much_is_owed_is_one_write);
	RUN(co_a_copy_takes_nothing_from_a_write_beside_it);
	RUN(co_what_a_cluster_has_is_not_copied_over_itself);
	RUN(co_a_late_read_never_sees_another_guests_cluster);
	RUN(co_a_late_write_never_hits_another_guests_cluster);
	RUN(co_nothing_leaks_however_much_is_freed_at_once);
	RUN(co_nothing_is_written_behind_a_stamp);
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
