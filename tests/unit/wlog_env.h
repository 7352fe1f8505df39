/* SPDX-License-Identifier: MIT */
/*
 * What the tests of the write log share: a simulated reactor, log devices and images on one power supply.
 *
 * Data is checked by stamps: block number b of version v is filled with one word made of both, so that one read tells which
 * write is seen. Everything runs in one coroutine, the test's; a crash is a fork of the supply that is opened beside what still runs.
 */
#pragma once

#include <errno.h>

#include "backend/fault.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "wlog/format.h"
#include "wlog/internal.h"
#include "wlog/wlog.h"

#define ENV_VOLUMES 4
#define ENV_BLOCK 4096u
#define MS 1000000ull
#define SEC (1000 * MS)

struct env_config {
	unsigned sides;		/* 0: 1 */
	uint64_t log_size;	/* 0: 16 segments */
	uint32_t segment;	/* 0: 64 KiB */
	uint64_t image_size;	/* 0: 4 MiB */
	struct powercut_dev_config log_dev, image_dev;
	struct wlog_config log;
};

struct env {
	struct env_config c;
	struct powercut *p;
	struct powercut_dev *log[WLOG_MAX_DEVICES], *image[ENV_VOLUMES];
	unsigned missing;	/* bit mask: sides that are not named at open */
	struct wlog *w;
	struct disk *vol[ENV_VOLUMES];
	struct err err;		/* of the last open or attach that failed */
};

static inline void env_init(struct env *e, const struct env_config *c)
{
	char name[16];

	memset(e, 0, sizeof(*e));
	if (c)
		e->c = *c;
	if (!e->c.sides)
		e->c.sides = 1;
	if (!e->c.segment)
		e->c.segment = 64 << 10;
	if (!e->c.log_size)
		e->c.log_size = WL_FIRST_SEGMENT + 16 * (uint64_t)e->c.segment;
	if (!e->c.log.memory)
		e->c.log.memory = 8 << 20;	/* many times the log: what a larger one would add is fresh pages */
	if (!e->c.image_size)
		e->c.image_size = 4 << 20;
	e->p = powercut_create(1);
	for (unsigned i = 0; i < e->c.sides; i++) {
		snprintf(name, sizeof(name), "log%u", i);
		e->log[i] = powercut_dev_create(e->p, name, e->c.log_size, &e->c.log_dev);
	}
	for (unsigned i = 0; i < ENV_VOLUMES; i++) {
		snprintf(name, sizeof(name), "image%u", i);
		e->image[i] = powercut_dev_create(e->p, name, e->c.image_size, &e->c.image_dev);
	}
}

static inline void env_fini(struct env *e)
{
	powercut_destroy(e->p);
}

static inline struct disk *env_open_dev(struct powercut_dev *dev)
{
	struct disk *d;

	CHECK_EQ(powercut_dev_open(dev, &d), 0);
	return d;
}

/* The world as a power cut at this instant would leave it; `to` has nothing open. */
static inline void env_fork(const struct env *e, struct env *to, uint64_t seed)
{
	memset(to, 0, sizeof(*to));
	to->c = e->c;
	to->missing = e->missing;
	to->p = powercut_fork(e->p, seed);
	for (unsigned i = 0; i < e->c.sides; i++)
		to->log[i] = powercut_dev_find(to->p, powercut_dev_name(e->log[i]));
	for (unsigned i = 0; i < ENV_VOLUMES; i++)
		to->image[i] = powercut_dev_find(to->p, powercut_dev_name(e->image[i]));
}

static inline co_fn unsigned co_env_devices(struct env *e, struct disk **dev)
{
	unsigned n = 0;

	for (unsigned i = 0; i < e->c.sides; i++)
		if (!(e->missing >> i & 1))
			dev[n++] = env_open_dev(e->log[i]);
	return n;
}

static inline co_fn int co_env_try_format(struct env *e, bool force)
{
	struct wlog_format_opts o = { .segment_size = e->c.segment, .small = true, .no_prewrite = true, .force = force };
	struct disk *dev[WLOG_MAX_DEVICES] = { NULL };
	unsigned n = co_env_devices(e, dev);

	e->err = (struct err)ERR_INIT;
	int r = co_wlog_format(dev, n, &o, &e->err);

	while (n)
		co_disk_close(dev[--n]);
	return r;
}

static inline co_fn int co_env_try_open(struct env *e)
{
	struct disk *dev[WLOG_MAX_DEVICES] = { NULL };
	unsigned n = co_env_devices(e, dev);

	e->err = (struct err)ERR_INIT;
	int r = co_wlog_open(dev, n, &e->c.log, &e->w, &e->err);

	while (r < 0 && n)
		co_disk_close(dev[--n]);
	return r;
}

static inline co_fn void co_env_open(struct env *e)
{
	if (co_env_try_open(e) < 0)
		test_fail("the log cannot be opened: %s", e->err.msg);
}

static inline co_fn int co_env_try_attach_as(struct env *e, unsigned i, const char *name, const struct wlog_volume_config *vc)
{
	static const struct wlog_volume_config plain;
	struct disk *image = env_open_dev(e->image[i]);

	e->err = (struct err)ERR_INIT;
	int r = co_wlog_attach(e->w, name, image, vc ? vc : &plain, &e->vol[i], &e->err);

	if (r < 0) {
		e->vol[i] = NULL;
		co_disk_close(image);
	}
	return r;
}

static inline co_fn int co_env_try_attach(struct env *e, unsigned i, const struct wlog_volume_config *vc)
{
	char name[16];

	snprintf(name, sizeof(name), "vol%u", i);
	return co_env_try_attach_as(e, i, name, vc);
}

static inline co_fn void co_env_attach(struct env *e, unsigned i, const struct wlog_volume_config *vc)
{
	if (co_env_try_attach(e, i, vc) < 0)
		test_fail("volume %u cannot be attached: %s", i, e->err.msg);
}

static inline co_fn void co_env_detach(struct env *e, unsigned i)
{
	co_disk_close(e->vol[i]);
	e->vol[i] = NULL;
}

static inline co_fn int co_env_close(struct env *e)
{
	int r = 0;

	for (unsigned i = 0; i < ENV_VOLUMES; i++)
		co_env_detach(e, i);
	if (e->w)
		r = co_wlog_close(e->w);
	e->w = NULL;
	return r;
}

/* A formatted log that is open, with `n` volumes. */
static inline co_fn void co_env_start(struct env *e, unsigned n, const struct wlog_volume_config *vc)
{
	if (co_env_try_format(e, false) < 0)
		test_fail("format: %s", e->err.msg);
	co_env_open(e);
	for (unsigned i = 0; i < n; i++)
		co_env_attach(e, i, vc);
}

/* --- Data --- */

static inline uint64_t env_word(uint64_t block, uint64_t version)
{
	return version ? version << 40 | (block + 1) : 0;
}

static inline co_fn int co_env_put(struct disk *d, uint64_t block, uint64_t blocks, uint64_t version, unsigned flags)
{
	uint64_t *buf = malloc(blocks * ENV_BLOCK);

	for (uint64_t i = 0; i < blocks * ENV_BLOCK / 8; i++)
		buf[i] = env_word(block + i * 8 / ENV_BLOCK, version);
	int r = co_disk_write(d, block * ENV_BLOCK, buf, blocks * ENV_BLOCK, flags);

	free(buf);
	return r;
}

/* Writes blocks of a version; must succeed. */
static inline co_fn void co_put(struct env *e, unsigned vol, uint64_t block, uint64_t blocks, uint64_t version)
{
	CHECK_EQ(co_env_put(e->vol[vol], block, blocks, version, 0), 0);
}

static inline co_fn void co_flush(struct env *e, unsigned vol)
{
	CHECK_EQ(co_disk_flush(e->vol[vol]), 0);
}

/* The version that the whole block shows; UINT64_MAX: something else. -errno of the read in *ret. */
static inline co_fn uint64_t co_env_get(struct disk *d, uint64_t block, int *ret)
{
	static uint64_t buf[ENV_BLOCK / 8];
	uint64_t mine[ENV_BLOCK / 8];

	(void)buf;
	*ret = co_disk_read(d, block * ENV_BLOCK, mine, ENV_BLOCK, 0);
	if (*ret < 0)
		return UINT64_MAX;
	uint64_t version = mine[0] >> 40;

	for (unsigned i = 0; i < ENV_BLOCK / 8; i++)
		if (mine[i] != env_word(block, version))
			return UINT64_MAX;
	return version;
}

#define EXPECT_BLOCKS(e, vol_, block, blocks, version) \
	do { \
		for (uint64_t eb_ = (block); eb_ < (block) + (blocks); eb_++) { \
			int er_; \
			uint64_t ev_ = co_env_get((e)->vol[vol_], eb_, &er_); \
			if (er_ < 0) \
				test_fail("%s:%d: %s: volume %u, block %llu cannot be read: %s", __FILE__, __LINE__, __func__, vol_, \
					  (unsigned long long)eb_, strerror(-er_)); \
			if (ev_ != (uint64_t)(version)) \
				test_fail("%s:%d: %s: volume %u, block %llu shows version %lld, not %llu", __FILE__, __LINE__, \
					  __func__, vol_, (unsigned long long)eb_, (long long)ev_, (unsigned long long)(version)); \
		} \
	} while (0)

/* What the image holds by itself, as reads of it would see it. */
static inline uint64_t env_image(const struct env *e, unsigned vol, uint64_t block)
{
	uint64_t buf[ENV_BLOCK / 8];

	media_read(powercut_dev_view(e->image[vol]), block * ENV_BLOCK, buf, ENV_BLOCK);
	for (unsigned i = 0; i < ENV_BLOCK / 8; i++)
		if (buf[i] != env_word(block, buf[0] >> 40))
			return UINT64_MAX;
	return buf[0] >> 40;
}

/* --- The device from outside --- */

static inline void env_super(const struct env *e, unsigned side, struct wl_super *ret)
{
	struct wl_super *sb = malloc(sizeof(*sb));
	uint8_t *slot = malloc(WL_SB_SLOT);
	bool found = false;

	for (unsigned i = 0; i < WL_SB_SLOTS; i++) {
		media_read(powercut_dev_view(e->log[side]), i * WL_SB_SLOT, slot, WL_SB_SLOT);
		if (wl_super_decode(slot, sb, NULL) == 0 && (!found || sb->seq > ret->seq)) {
			*ret = *sb;
			found = true;
		}
	}
	CHECK(found);
	free(slot);
	free(sb);
}

/* Where batch `seq` is on the device (the highest generation of it); 0: nowhere. */
static inline uint64_t env_find_batch(const struct env *e, unsigned side, uint64_t seq, struct wl_bhead *ret)
{
	struct wl_super *sb = malloc(sizeof(*sb));
	uint8_t block[WL_BLOCK];
	uint64_t found = 0, end;
	struct wl_bhead h;

	env_super(e, side, sb);
	end = WL_FIRST_SEGMENT + (uint64_t)sb->seg_size * sb->seg_count;
	for (uint64_t pos = WL_FIRST_SEGMENT; pos < end; pos += WL_BLOCK) {
		media_read(powercut_dev_view(e->log[side]), pos, block, WL_BLOCK);
		if (wl_bhead_decode(block, WL_MAX_BATCH, &sb->uuid, &h) == 0 && h.seq == seq && (!found || h.generation > ret->generation)) {
			*ret = h;
			found = pos;
		}
	}
	free(sb);
	return found;
}

static inline void env_flip(const struct env *e, unsigned side, uint64_t pos)
{
	uint8_t b;

	media_read(powercut_dev_view(e->log[side]), pos, &b, 1);
	b ^= 0x10;
	powercut_dev_poke(e->log[side], pos, &b, 1, false);
}

static inline uint64_t env_log_writes(const struct env *e, unsigned side)
{
	return powercut_dev_counters(e->log[side])->ops[DISK_OP_WRITE];
}

/* --- Running --- */

struct env_run {
	void (*fn)(struct env *e);
	struct env *e;
	struct rt_timer watchdog;
};

static inline void env_on_hang(struct rt_timer *t)
{
	rt_dump_tasks(rt_self(), stderr);
	test_fail("hang: nothing has ended in 600 s of virtual time");
}

static inline co_fn void co_env_main(void *arg)
{
	struct env_run *r = arg;

	rt_timer_arm(&r->watchdog, rt_now_ns() + 600 * SEC, env_on_hang);
	r->fn(r->e);
	rt_timer_cancel(&r->watchdog);
}

/* Runs `fn` as a coroutine with an environment of that configuration. */
static inline void env_run(const struct env_config *c, void (*fn)(struct env *e))
{
	static struct rt *rt;
	static struct rt_bufpool *bufs;
	struct err err = ERR_INIT;
	struct env e;

	if (!rt) {
		CHECK_EQ(rt_create_sim(NULL, 1, &rt, &err), 0);
		CHECK_EQ(rt_bufpool_create(rt, 64 << 20, &bufs, &err), 0);
		rt_set_bufs(rt, bufs);
	}
	rt_sim_reseed(rt, test_env_u64("WEIR_SEED", 7));
	env_init(&e, c);
	struct env_run run = { fn, &e, RT_TIMER_INIT };
	int r = rt_run(rt, co_env_main, &run);

	if (r < 0) {
		rt_dump_tasks(rt, stderr);
		test_fail("the reactor ended with %s", strerror(-r));
	}
	CHECK_EQ(rt_bufpool_used(bufs), 0);
	env_fini(&e);
}
