/* SPDX-License-Identifier: MIT */
/*
 * A closed qcow2 image of any content: described, checked, repaired, given snapshots, mapped. Whatever it holds, that ends in an error with a
 * message or in success, in bounded time and memory; and what only looks writes nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/fault.h"
#include "format/qcow2/qcow2.h"
#include "format/qcow2/tools.h"
#include "format/qcow2/where.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

#define HANG_NS (3600ull * 1000000000)	/* of virtual time */
#define FILE_MAX (1u << 20)
#define ROWS 2000

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void on_hang(struct rt_timer *t)
{
	abort();
}

static co_fn struct disk *co_device(struct powercut *p)
{
	struct disk *d;

	if (powercut_dev_open(powercut_dev_find(p, "image"), &d))
		abort();
	return d;
}

/* Each refusal has its message. */
static void told(int rc, const struct err *err)
{
	if (rc && (!err->code || !err->msg[0]))
		abort();
}

static void on_finding(void *arg, const struct qcow2_finding *f)
{
	if (strlen(f->text) >= sizeof(f->text) || !f->text[0])
		abort();
}

static co_fn void co_describe(struct powercut *p)
{
	struct disk *file = co_device(p);
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", QCOW2_PARSE_LAX, &err);

	if (!rc)
		rc = co_qcow2_img_read_snapshots(&img, &err);
	if (!rc)
		rc = co_qcow2_img_read_bitmaps(&img, &err);
	told(rc, &err);
	qcow2_img_close(&img);
	co_disk_close(file);
}

static co_fn void co_check(struct powercut *p, enum qcow2_repair repair)
{
	struct disk *file = co_device(p);
	struct qcow2_check c = { .repair = repair, .finding = on_finding };
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", 0, &err);

	if (!rc)
		rc = co_qcow2_check(&img, &c, &err);
	told(rc, &err);
	qcow2_img_close(&img);
	co_disk_close(file);
}

/* The name of the first snapshot, if there is one. */
static co_fn bool co_snapshot(struct powercut *p, enum qcow2_snap_op op, const char *which)
{
	struct disk *file = co_device(p);
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", 0, &err);

	if (!rc)
		rc = co_qcow2_snapshot(&img, op, which, 1, NULL, &err);
	told(rc, &err);
	qcow2_img_close(&img);
	co_disk_close(file);
	return !rc;
}

static co_fn void co_map(struct powercut *p)
{
	static const struct qcow2_opts opts = { .outside = QCOW2_NO_OTHER_FILE };
	struct disk *file = co_device(p), *d;
	struct err err = ERR_INIT;
	struct qcow2_where w;

	if (co_qcow2_open(file, "image", &opts, 0, &d, &err)) {
		co_disk_close(file);
		return;
	}
	for (uint64_t at = 0, n = 0; at < d->size && n < ROWS; at += w.len, n++) {
		if (co_qcow2_where(d, at, d->size - at, &w))
			break;
		if (!w.len || w.len > d->size - at)
			abort();
	}
	co_disk_close(d);
}

static uint64_t writes(struct powercut *p)
{
	const struct powercut_counters *c = powercut_dev_counters(powercut_dev_find(p, "image"));

	return c->ops[DISK_OP_WRITE] + c->ops[DISK_OP_DISCARD] + c->ops[DISK_OP_ZERO];
}

static co_fn void co_main(void *arg)
{
	struct rt_timer watchdog = RT_TIMER_INIT;
	struct powercut *p = arg;

	rt_timer_arm(&watchdog, rt_now_ns() + HANG_NS, on_hang);
	co_describe(p);
	co_check(p, QCOW2_REPAIR_NONE);
	co_map(p);
	if (writes(p))
		abort();
	co_check(p, QCOW2_REPAIR_LEAKS);
	co_check(p, QCOW2_REPAIR_ALL);
	if (co_snapshot(p, QCOW2_SNAP_CREATE, "new")) {
		co_snapshot(p, QCOW2_SNAP_APPLY, "1");
		co_snapshot(p, QCOW2_SNAP_DELETE, "new");
	}
	co_map(p);
	rt_timer_cancel(&watchdog);
}

static struct rt *the_reactor(void)
{
	static struct rt_config config = { .coroutines = 64 };
	static struct rt_bufpool *bufs;
	static struct rt *rt;

	if (rt)
		return rt;
	log_set_level(LOG_NONE);
	if (rt_create_sim(&config, 1, &rt, NULL) || rt_bufpool_create(rt, 1, &bufs, NULL))
		abort();
	rt_set_bufs(rt, bufs);
	return rt;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct powercut_dev_config config = { .latency_ns = 1000 };
	struct rt *rt = the_reactor();
	struct powercut *p;

	if (!size || size > FILE_MAX)
		return 0;
	p = powercut_create(1);
	powercut_dev_poke(powercut_dev_create(p, "image", align_up(size, 512), &config), 0, data, size, false);
	rt_sim_reseed(rt, 1);
	if (rt_run(rt, co_main, p))
		abort();
	powercut_destroy(p);
	return 0;
}
