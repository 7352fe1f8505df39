/* SPDX-License-Identifier: MIT */
/*
 * A closed qcow2 image of any content: described, checked, repaired, given snapshots, mapped, given another size with its bitmaps. Whatever it holds, that
 * ends in an error with a message or in success, in bounded time and memory; what only looks writes nothing, and bitmaps that were kept fit.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/qcow2.h"
#include "format/qcow2/tools.h"
#include "format/qcow2/where.h"
#include "fuzz/disk_fuzz.h"
#include "util/bytes.h"

#define HANG_NS (3600ull * 1000000000)	/* of virtual time */
#define FILE_MAX (1u << 20)
#define ROWS 2000
#define RESIZE_MAX (1ull << 30)

static void on_finding(void *arg, const struct qcow2_finding *f)
{
	if (strlen(f->text) >= sizeof(f->text) || !f->text[0])
		abort();
}

static co_fn void co_describe(struct powercut *p)
{
	struct disk *file = co_fuzz_device(p, "image");
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", QCOW2_PARSE_LAX, &err);

	if (!rc)
		rc = co_qcow2_img_read_snapshots(&img, &err);
	if (!rc)
		rc = co_qcow2_img_read_bitmaps(&img, &err);
	fuzz_told(rc, &err);
	qcow2_img_close(&img);
	co_disk_close(file);
}

/* The damage that is left. */
static co_fn uint64_t co_check(struct powercut *p, enum qcow2_repair repair)
{
	struct disk *file = co_fuzz_device(p, "image");
	struct qcow2_check c = { .repair = repair, .finding = on_finding };
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", 0, &err);

	if (!rc)
		rc = co_qcow2_check(&img, &c, &err);
	fuzz_told(rc, &err);
	qcow2_img_close(&img);
	co_disk_close(file);
	return c.damage - c.damage_fixed;
}

/* The name of the first snapshot, if there is one. */
static co_fn bool co_snapshot(struct powercut *p, enum qcow2_snap_op op, const char *which)
{
	struct disk *file = co_fuzz_device(p, "image");
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", 0, &err);

	if (!rc)
		rc = co_qcow2_snapshot(&img, op, which, 1, NULL, &err);
	fuzz_told(rc, &err);
	qcow2_img_close(&img);
	co_disk_close(file);
	return !rc;
}

/* The disk, or what a snapshot holds. */
static co_fn void co_map(struct powercut *p, const char *snapshot)
{
	const struct qcow2_opts opts = { .outside = QCOW2_NO_OTHER_FILE, .snapshot = snapshot };
	struct disk *file = co_fuzz_device(p, "image"), *d;
	struct err err = ERR_INIT;
	struct qcow2_where w;
	uint8_t buf[4096];
	int rc = co_qcow2_open(file, "image", &opts, 0, &d, &err);

	fuzz_told(rc, &err);
	if (rc) {
		co_disk_close(file);
		return;
	}
	for (uint64_t at = 0, n = 0; at < d->size && n < ROWS; at += w.len, n++) {
		if (n < 64)
			co_disk_read(d, at, buf, min(d->size - at, (uint64_t)sizeof(buf)), 0);
		if (co_qcow2_where(d, at, d->size - at, &w))
			break;
		if (!w.len || w.len > d->size - at)
			abort();
	}
	co_disk_close(d);
}

/* As "weir image resize" does it: whether they can be kept, another size, and then they are made to fit. */
static co_fn void co_resize(struct powercut *p, uint64_t by)
{
	const struct qcow2_opts opts = { .outside = QCOW2_NO_OTHER_FILE, .table_cache = 1, .run_ahead = 1, .fill_debt = 1 };
	struct disk *file = co_fuzz_device(p, "image"), *d;
	struct err err = ERR_INIT;
	struct qcow2_img img;
	uint64_t old = 0, size = 0;
	bool bitmaps = false;
	int rc = co_qcow2_img_open(&img, file, "image", 0, &err);

	if (!rc)
		rc = co_qcow2_img_read_bitmaps(&img, &err);
	if (!rc) {
		bitmaps = img.n_bm;
		old = img.h.size;
		size = align_up(by & 1 ? old / 2 : old + by % RESIZE_MAX, 512);
		rc = co_qcow2_bitmaps_can_fit(&img, size, NULL, &err);
	}
	fuzz_told(rc, &err);
	qcow2_img_close(&img);
	rc = rc || old > RESIZE_MAX ? -EINVAL : co_qcow2_open(file, "image", &opts, DISK_OPEN_RDWR, &d, &err);
	if (rc) {
		co_disk_close(file);
		return;
	}
	rc = co_disk_resize(d, size, &err);
	if (!rc && co_disk_flush(d))
		rc = -EIO;
	co_disk_close(d);
	if (!bitmaps)
		return;
	file = co_fuzz_device(p, "image");
	err = (struct err)ERR_INIT;
	if (!co_qcow2_img_open(&img, file, "image", QCOW2_PARSE_LAX, &err) && !(img.h.autoclear & QCOW2_AUTOCLEAR_BITMAPS)) {
		int kept = co_qcow2_bitmaps_fit(&img, old, NULL, &err);

		fuzz_told(kept, &err);
		rc = rc ? rc : kept;
	}
	qcow2_img_close(&img);
	co_disk_close(file);
	if (!rc && co_check(p, QCOW2_REPAIR_NONE))
		abort();
}

static uint64_t writes(struct powercut *p)
{
	const struct powercut_counters *c = powercut_dev_counters(powercut_dev_find(p, "image"));

	return c->ops[DISK_OP_WRITE] + c->ops[DISK_OP_DISCARD] + c->ops[DISK_OP_ZERO];
}

static co_fn void co_work(struct powercut *p, void *arg)
{
	co_describe(p);
	co_check(p, QCOW2_REPAIR_NONE);
	co_map(p, NULL);
	co_map(p, "1");
	if (writes(p))
		abort();
	co_resize(p, rt_rand64());
	co_check(p, QCOW2_REPAIR_LEAKS);
	co_check(p, QCOW2_REPAIR_ALL);
	if (co_snapshot(p, QCOW2_SNAP_CREATE, "new")) {
		co_map(p, "new");
		co_snapshot(p, QCOW2_SNAP_APPLY, "1");
		co_snapshot(p, QCOW2_SNAP_DELETE, "new");
	}
	co_resize(p, rt_rand64());
	co_map(p, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct powercut_dev_config config = { .latency_ns = 1000 };

	if (size && size <= FILE_MAX)
		fuzz_run(data, size, &config, co_work, NULL, HANG_NS);
	return 0;
}
