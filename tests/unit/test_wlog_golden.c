/* SPDX-License-Identifier: MIT */
/*
 * A log that version 1 wrote is read by every later one: tests/golden/wlog-v1.chunks holds a device with two volumes, several segments with indexes, a
 * group of several batches, zeroes and discards, all of it dirty.
 *
 * `test_wlog_golden FILE --make` writes a new one: only when the format's version changes, as another file.
 *
 * The file is a list of the blocks that are not zero: offset and length (64 bits each, little-endian), then the bytes.
 */
#include <errno.h>

#include "blk/spec.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"
#include "wlog/wlog.h"

#define LOG_SIZE (4u << 20)
#define IMAGE_SIZE (1u << 20)
#define VOLUMES 2
#define OPS 60

static const char *path;
static uint8_t model[VOLUMES][IMAGE_SIZE];
static uint8_t data[IMAGE_SIZE], block[4096], got[IMAGE_SIZE];
static uint64_t blocks_loaded;

static co_fn struct disk *co_must_open(const char *text)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err) < 0)
		test_fail("%s: %s", text, err.msg);
	return d;
}

/* The same operations each time; with `vol` NULL on the model only. */
static co_fn void co_operate(struct disk **vol)
{
	struct rng r;

	rng_seed(&r, 42);
	for (unsigned i = 0; i < OPS; i++) {
		unsigned v = rng_below(&r, VOLUMES), kind = rng_below(&r, 8);
		uint64_t off = rng_below(&r, IMAGE_SIZE - 1), len = 1 + rng_below(&r, min(IMAGE_SIZE - off, i == 30 ? 150000ul : 3000ul));

		if (kind < 5) {
			rng_fill(&r, data, len);
			memcpy(model[v] + off, data, len);
			if (vol)
				CHECK_EQ(co_disk_write(vol[v], off, data, len, 0), 0);
		} else if (kind < 7) {
			memset(model[v] + off, 0, len);
			if (vol)
				CHECK_EQ(kind == 5 ? co_disk_zero(vol[v], off, len, 0) : co_disk_discard(vol[v], off, len, 0), 0);
		} else if (vol) {
			CHECK_EQ(co_disk_flush(vol[v]), 0);
		}
	}
	for (unsigned v = 0; vol && v < VOLUMES; v++)
		CHECK_EQ(co_disk_flush(vol[v]), 0);
}

static co_fn struct wlog *co_open(struct disk *dev, struct disk **vol, bool destage)
{
	struct wlog_config config = { .no_destage = !destage };
	struct wlog_volume_config vc = { .no_mark = true };
	struct err err = ERR_INIT;
	struct wlog *w;
	char name[8];

	if (co_wlog_open(&dev, 1, &config, &w, &err) < 0)
		test_fail("open: %s", err.msg);
	for (unsigned v = 0; v < VOLUMES; v++) {
		snprintf(name, sizeof(name), "vol%u", v);
		if (co_wlog_attach(w, name, co_must_open("mem:1M"), &vc, &vol[v], &err) < 0)
			test_fail("attach: %s", err.msg);
	}
	return w;
}

static co_fn void co_close(struct wlog *w, struct disk **vol)
{
	for (unsigned v = 0; v < VOLUMES; v++)
		co_disk_close(vol[v]);
	CHECK_EQ(co_wlog_close(w), 0);
}

/* A device that outlives its log: the log closes what it is given, so it gets a copy. */
static co_fn void co_copy(struct disk *from, struct disk *to)
{
	for (uint64_t off = 0; off < LOG_SIZE; off += sizeof(block)) {
		CHECK_EQ(co_disk_read(from, off, block, sizeof(block), 0), 0);
		CHECK_EQ(co_disk_write(to, off, block, sizeof(block), 0), 0);
	}
}

static co_fn void co_make(void *arg)
{
	struct wlog_format_opts opts = { .segment_size = 64 << 10, .small = true, .no_prewrite = true };
	struct disk *dev = co_must_open("mem:4M"), *keep = co_must_open("mem:4M"), *vol[VOLUMES];
	struct err err = ERR_INIT;
	FILE *f = fopen(path, "wb");

	CHECK(f);
	if (co_wlog_format(&dev, 1, &opts, &err) < 0)
		test_fail("format: %s", err.msg);
	struct wlog *w = co_open(dev, vol, false);

	co_operate(vol);
	co_copy(dev, keep);	/* not stopped in order */
	co_close(w, vol);
	for (uint64_t off = 0; off < LOG_SIZE; off += sizeof(block)) {
		uint8_t head[16];

		CHECK_EQ(co_disk_read(keep, off, block, sizeof(block), 0), 0);
		if (bytes_are_zero(block, sizeof(block)))
			continue;
		put_le64(head, off);
		put_le64(head + 8, sizeof(block));
		CHECK(fwrite(head, 16, 1, f) == 1 && fwrite(block, sizeof(block), 1, f) == 1);
	}
	CHECK_EQ(fclose(f), 0);
	co_disk_close(keep);
}

static co_fn void co_load(struct disk *dev)
{
	FILE *f = fopen(path, "rb");
	uint8_t head[16];

	if (!f)
		test_fail("%s: cannot be opened", path);
	while (fread(head, 16, 1, f) == 1) {
		uint64_t len = get_le64(head + 8);

		CHECK(len <= sizeof(block) && fread(block, len, 1, f) == 1);
		CHECK_EQ(co_disk_write(dev, get_le64(head), block, len, 0), 0);
		blocks_loaded++;
	}
	fclose(f);
	CHECK(blocks_loaded > 20);
}

static co_fn void co_compare(struct disk *d, unsigned v, const char *when)
{
	CHECK_EQ(co_disk_read(d, 0, got, IMAGE_SIZE, 0), 0);
	for (uint64_t i = 0; i < IMAGE_SIZE; i++)
		if (got[i] != model[v][i])
			test_fail("volume %u, byte %" PRIu64 " is %#x and not %#x %s", v, i, got[i], model[v][i], when);
}

static co_fn void co_check(void *arg)
{
	struct disk *dev = co_must_open("mem:4M"), *vol[VOLUMES];
	struct wlog_check_report rep;
	struct err err = ERR_INIT;

	co_operate(NULL);
	co_load(dev);
	if (co_wlog_check(&dev, 1, true, NULL, NULL, &rep, &err) < 0)
		test_fail("check: %s", err.msg);
	CHECK(rep.records > 30 && rep.damaged == 0);
	struct wlog *w = co_open(dev, vol, false);

	for (unsigned v = 0; v < VOLUMES; v++)
		co_compare(vol[v], v, "before a drain");
	CHECK_EQ(co_wlog_drain(w, NULL, NULL, NULL), 0);
	for (unsigned v = 0; v < VOLUMES; v++) {
		co_compare(vol[v], v, "after a drain");
		co_compare(vol[v]->file, v, "in the image");
	}
	co_close(w, vol);
}

int main(int argc, char **argv)
{
	struct err err = ERR_INIT;
	struct rt_bufpool *bufs;
	struct rt *rt;

	CHECK(argc >= 2);
	path = argv[1];
	backends_register();
	CHECK_EQ(rt_create_sim(NULL, 1, &rt, &err), 0);
	CHECK_EQ(rt_bufpool_create(rt, 64 << 20, &bufs, &err), 0);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, argc > 2 && !strcmp(argv[2], "--make") ? co_make : co_check, NULL), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	return 0;
}
