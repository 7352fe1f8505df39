/* SPDX-License-Identifier: MIT */
/* The backends that need no kernel keep the disk contract. */
#include "backend/fault.h"
#include "blk/spec.h"
#include "lib/disk_conformance.h"
#include "rt/buf.h"
#include "test_rt.h"
#include "util/bytes.h"

static uint64_t seed;

struct plan {
	const char *disk;
	unsigned flags;
	uint32_t max_io;	/* narrower limits than the driver's own */
	uint64_t max_zero;
	uint32_t align;		/* of the top layer: units that are no multiple of those below */
};

static co_fn void co_conform_string(void *arg)
{
	const struct plan *p = arg;
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(p->disk, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s: %s", p->disk, err.msg);
	if (p->max_io)
		d->limits.max_io = p->max_io;
	if (p->max_zero)
		d->limits.max_zero = p->max_zero;
	if (p->align)
		d->limits.align = d->limits.mem_align = p->align;
	co_disk_conform(d, p->flags, seed);
	co_disk_close(d);
}

static const struct plan plans[] = {
	{ .disk = "mem:3M" },
	{ .disk = "mem:2097155,align=512" },
	{ .disk = "mem:3000001,align=4096" },
	{ .disk = "mem:3000001,align=4096", .max_io = 20000, .max_zero = 10000 },
	{ .disk = "mem:2M,align=65536" },
	{ .disk = "null:4M", .flags = CONFORM_NO_DATA },
	{ .disk = "delay:read=1ms,write=2ms,flush=3ms,jitter=5ms:mem:1200001", .flags = CONFORM_SLOW },
	{ .disk = "delay:write=2ms,zero=1ms,discard=1ms,parallel=2:mem:2M,align=4096", .flags = CONFORM_SLOW },
	{ .disk = "fault:op=flush,nth=1000000:mem:2000001,align=4096" },
	{ .disk = "delay:write=10us,jitter=9us:delay:read=9us:mem:2M,align=4096", .flags = CONFORM_SLOW | CONFORM_NO_RESIZE, .align = 1024 },
	{ .disk = "fault:stall=1ms,prob=0.1:delay:jitter=2ms,read=1us:mem:2M,align=512", .flags = CONFORM_SLOW },
};

/* Layers that merge within one another must not need the pool: whoever waited for it would wait for itself. */
static void *hog;

static void memory_backends_conform(bool pool, bool exhausted)
{
	for (unsigned i = 0; i < ARRAY_SIZE(plans); i++) {
		struct rt *rt = make_sim(seed + i);
		struct rt_bufpool *bufs = NULL;

		if (pool) {
			CHECK_EQ(rt_bufpool_create(rt, RT_BUF_MAX, &bufs, NULL), 0);
			rt_set_bufs(rt, bufs);
			hog = exhausted ? rt_buf_tryget(bufs, RT_BUF_MAX) : NULL;
			CHECK_EQ(hog != NULL, exhausted);
		}
		CHECK_EQ(rt_run(rt, co_conform_string, (void *)&plans[i]), 0);
		if (hog)
			rt_buf_put(bufs, hog);
		hog = NULL;
		if (pool)
			CHECK_EQ(rt_bufpool_used(bufs), 0);
		rt_bufpool_destroy(bufs);
		rt_destroy(rt);
	}
}

static void they_conform(void)
{
	memory_backends_conform(true, false);
}

static void they_conform_without_a_buffer_pool(void)
{
	memory_backends_conform(false, false);
}

static void they_conform_while_somebody_holds_the_whole_pool(void)
{
	memory_backends_conform(true, true);
}

static co_fn void co_conform_powercut(void *arg)
{
	struct powercut *p = powercut_create(seed);
	struct powercut_dev *dev = powercut_dev_create(p, "dev", 1500000, arg);
	struct disk *d;

	CHECK_EQ(powercut_dev_open(dev, &d), 0);
	co_disk_conform(d, CONFORM_SLOW, seed);
	co_disk_close(d);
	powercut_destroy(p);
}

static void power_cut_devices_conform(void)
{
	static struct powercut_dev_config configs[] = {
		{ 0 },
		{ .sector = 4096, .align = 512 },
		{ .sector = 4096, .align = 4096, .max_io = 65536, .no_fua = true },
		{ .sector = 512, .align = 4096, .discard_keeps = true, .no_zero = true, .no_mark = true },
		{ .align = 512, .no_discard = true, .write_through = true },
	};

	for (unsigned i = 0; i < ARRAY_SIZE(configs); i++)
		on_sim(seed + i, co_conform_powercut, &configs[i]);
}

int main(void)
{
	seed = test_seed();
	backends_register();
	RUN(they_conform);
	RUN(they_conform_without_a_buffer_pool);
	RUN(they_conform_while_somebody_holds_the_whole_pool);
	RUN(power_cut_devices_conform);
	return 0;
}
