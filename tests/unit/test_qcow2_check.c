/* SPDX-License-Identifier: MIT */
/* A check of a qcow2 image takes time that is bounded by what the file holds, whatever its tables say. Counted in bytes read, not in seconds. */
#include <errno.h>

#include "backend/fault.h"
#include "format/qcow2/create.h"
#include "format/qcow2/tools.h"
#include "lib/test.h"
#include "util/bytes.h"
#include "util/err.h"

#define MIB (1ull << 20)
#define CLUSTER 4096u
#define SNAPSHOTS 1000u

static struct powercut *p;
static struct powercut_dev *dev;
static unsigned most_refs;

/* A disk of 64 MiB with all its tables: 32 L2 tables of 512 entries. */
static co_fn struct disk *co_make(void)
{
	struct qcow2_create c = { .size = 64 * MIB, .cluster_size = CLUSTER, .refcount_bits = 16, .version = 3, .prealloc = QCOW2_PREALLOC_METADATA };
	struct powercut_dev_config config = { .align = 512 };
	struct err err = ERR_INIT;
	struct disk *file;

	p = powercut_create(1);
	dev = powercut_dev_create(p, "image", 4096, &config);
	CHECK_EQ(powercut_dev_open(dev, &file), 0);
	if (qcow2_create_check(&c, "image", &err) || co_qcow2_create(file, NULL, &c, &err))
		test_fail("%s", err.msg);
	return file;
}

static void on_finding(void *arg, const struct qcow2_finding *f)
{
	const char *at = strstr(f->text, ", ");
	unsigned refs;

	if (f->kind == QCOW2_FOUND_REFCOUNT && at && sscanf(at, ", %u reference", &refs) == 1)
		most_refs = max(most_refs, refs);
}

/* Bytes that a check reads. */
static co_fn uint64_t co_check(struct disk *file)
{
	struct qcow2_check c = { .finding = on_finding };
	uint64_t before = powercut_dev_counters(dev)->bytes[DISK_OP_READ];
	struct err err = ERR_INIT;
	struct qcow2_img img;

	most_refs = 0;
	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_check(&img, &c, &err))
		test_fail("%s", err.msg);
	qcow2_img_close(&img);
	return powercut_dev_counters(dev)->bytes[DISK_OP_READ] - before;
}

static co_fn void co_end(struct disk *file)
{
	co_disk_close(file);
	powercut_destroy(p);
}

/* Appends snapshots that have L1 tables of their own and all L2 tables in common. Returns the bytes that this took. */
static co_fn uint64_t co_add_snapshots(struct disk *file)
{
	uint64_t end = align_up(file->size, CLUSTER), table = end + SNAPSHOTS * CLUSTER, at = table;
	uint8_t head[512], l1[CLUSTER] = { 0 };
	uint64_t l1_off;

	CHECK_EQ(co_disk_resize(file, table + align_up(SNAPSHOTS * 72, CLUSTER), NULL), 0);
	CHECK_EQ(co_disk_read(file, 0, head, sizeof(head), 0), 0);
	l1_off = get_be64(head + 40);
	CHECK_EQ(co_disk_read(file, l1_off, l1, sizeof(l1), 0), 0);
	for (unsigned i = 0; i < SNAPSHOTS; i++, at += 72) {
		struct { struct qcow2_raw_snapshot s; uint8_t extra[24], id[5], name[3]; } x = { 0 };

		put_be64(x.s.l1_off, end + i * CLUSTER);
		put_be32(x.s.l1_size, 32);
		put_be16(x.s.id_len, 5);
		put_be16(x.s.name_len, 3);
		put_be32(x.s.extra_len, 24);
		put_be64(x.extra + 8, 64 * MIB);
		snprintf((char *)x.id, sizeof(x.id), "%04u", i);
		x.id[4] = 'i';
		memcpy(x.name, "nam", 3);
		static_assert(sizeof(x) == 72, "");
		powercut_dev_poke(dev, end + i * CLUSTER, l1, sizeof(l1), false);
		powercut_dev_poke(dev, at, &x, sizeof(x), false);
	}
	put_be32(head + 60, SNAPSHOTS);
	put_be64(head + 64, table);
	powercut_dev_poke(dev, 0, head, sizeof(head), false);
	return SNAPSHOTS * CLUSTER + SNAPSHOTS * 72;
}

static co_fn void co_tables_that_many_snapshots_share_are_read_once(void)
{
	struct disk *file = co_make();
	uint64_t plain = co_check(file), more = co_add_snapshots(file), all = co_check(file);

	if (all > 2 * plain + 2 * more)
		test_fail("read %" PRIu64 " bytes, %" PRIu64 " without the snapshots, which take %" PRIu64, all, plain, more);
	CHECK_EQ(most_refs, SNAPSHOTS + 1);
	co_end(file);
}

/* An L1 table that leads to the same few tables again and again. */
static co_fn void co_an_l1_table_that_repeats_costs_no_more_than_itself(void)
{
	enum { ENTRIES = 1 << 20 };
	struct disk *file = co_make();
	uint64_t plain = co_check(file), end = align_up(file->size, CLUSTER), all;
	uint8_t head[512], l1[CLUSTER] = { 0 };

	CHECK_EQ(co_disk_resize(file, end + ENTRIES * 8, NULL), 0);
	CHECK_EQ(co_disk_read(file, 0, head, sizeof(head), 0), 0);
	CHECK_EQ(co_disk_read(file, get_be64(head + 40), l1, sizeof(l1), 0), 0);
	for (uint64_t i = 0; i < ENTRIES / 32; i++)
		powercut_dev_poke(dev, end + i * 256, l1, 256, false);
	put_be32(head + 36, ENTRIES);
	put_be64(head + 40, end);
	powercut_dev_poke(dev, 0, head, sizeof(head), false);
	all = co_check(file);
	if (all > 2 * plain + 2 * ENTRIES * 8)
		test_fail("read %" PRIu64 " bytes, %" PRIu64 " with the table that was there", all, plain);
	co_end(file);
}

static co_fn void co_repair(struct disk *file, struct qcow2_check *c)
{
	struct err err = ERR_INIT;
	struct qcow2_img img;

	*c = (struct qcow2_check){ .repair = QCOW2_REPAIR_ALL };
	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_check(&img, c, &err))
		test_fail("%s", err.msg);
	qcow2_img_close(&img);
}

/* `snapshot`: the entry is in the L1 table of one, otherwise in the active one. */
static co_fn void co_try_stray_table(bool snapshot)
{
	struct disk *file = co_make();
	uint8_t head[512], l1[CLUSTER] = { 0 }, l2[CLUSTER], data[CLUSTER], buf[CLUSTER];
	uint64_t l1_off, l2_off, data_off;
	struct qcow2_check c;

	if (snapshot)
		co_add_snapshots(file);
	CHECK_EQ(co_disk_read(file, 0, head, sizeof(head), 0), 0);
	l1_off = get_be64(head + 40);
	CHECK_EQ(co_disk_read(file, l1_off, l1, sizeof(l1), 0), 0);
	l2_off = get_be64(l1) & QCOW2_OFFSET_MASK;
	CHECK_EQ(co_disk_read(file, l2_off, l2, sizeof(l2), 0), 0);
	data_off = get_be64(l2) & QCOW2_OFFSET_MASK;
	/* What as entries would be impossible, lies on the L1 table, or has a flag that is wrong. */
	for (unsigned i = 0; i < CLUSTER / 8; i++)
		put_be64(data + i * 8, i % 4 == 0 ? 0x3fffffffffffffff : i % 4 == 1 ? l1_off : i % 4 == 2 ? data_off : (get_be64(l2 + i * 8) ^ QCOW2_COPIED));
	powercut_dev_poke(dev, data_off, data, sizeof(data), false);
	put_be64(head, data_off | QCOW2_COPIED);
	/* As co_add_snapshots() places it: the first snapshot's L1 table is right behind the image. */
	powercut_dev_poke(dev, (snapshot ? get_be64(head + 64) - SNAPSHOTS * CLUSTER : l1_off) + 31 * 8, head, 8, false);
	co_repair(file, &c);
	CHECK(c.damage > 0);
	CHECK_EQ(co_disk_read(file, data_off, buf, sizeof(buf), 0), 0);
	CHECK(!memcmp(buf, data, sizeof(data)));
	CHECK_EQ(co_disk_read(file, l2_off, buf, sizeof(buf), 0), 0);
	CHECK_EQ(get_be64(buf) & QCOW2_OFFSET_MASK, data_off);
	co_end(file);
}

static co_fn void co_a_stray_entry_of_an_l1_table_costs_no_data(void)
{
	co_try_stray_table(true);
	co_try_stray_table(false);
}

static co_fn void co_main(void *arg)
{
	RUN(co_a_stray_entry_of_an_l1_table_costs_no_data);
	RUN(co_tables_that_many_snapshots_share_are_read_once);
	RUN(co_an_l1_table_that_repeats_costs_no_more_than_itself);
}

int main(void)
{
	static const struct rt_config config = { .coroutines = 16 };
	struct err err = ERR_INIT;
	struct rt *rt;

	CHECK_EQ(rt_create_sim(&config, 1, &rt, &err), 0);
	CHECK_EQ(rt_run(rt, co_main, NULL), 0);
	rt_destroy(rt);
	return 0;
}
