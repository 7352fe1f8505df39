/* SPDX-License-Identifier: MIT */
/*
 * Variants in which a device fails or hangs, rather than the power.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "util/bytes.h"
#include "util/err.h"
#include "variants.h"

#define GIVE_UP_NS (120ull * 1000000000)
#define STALL_NS (30ull * 1000000000)

struct failure {
	struct world *w;
	uint64_t n, seen;	/* the n-th I/O since the log was opened */
	bool forever, stall;
	struct powercut_dev *dev; /* that was hit */
	bool ended;		/* the workload did */
	int closed;
};

static int on_failure_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct failure *f = arg;

	if (++f->seen != f->n)
		return 0;
	f->dev = dev;
	if (f->forever)
		powercut_dev_fail(dev, -EIO);
	return -EIO;
}

static bool is_image(const struct failure *f, unsigned *ret_vol)
{
	for (unsigned i = 0; i < f->w->sc->nvols; i++) {
		if (f->dev == world_image_dev(f->w, i)) {
			*ret_vol = i;
			return true;
		}
	}
	return false;
}

static co_fn void co_run_failure(void *arg)
{
	struct failure *f = arg;
	struct world *w = f->w;
	struct err err = ERR_INIT;

	if (co_world_format(w, &err) || co_world_open(w, &err))
		crash_fail("open", "a new log: %s", err.msg);
	co_warm_up(w);
	w->hook = on_failure_io;
	w->hook_arg = f;
	w->errors_expected = true;
	world_arm(w, 0, 1, 0);
	f->ended = co_work(w, w->sc->work.ops, w->sc->seed, GIVE_UP_NS);
	/* Writers may wait for ever for room that a dead image does not make; the operator gives up on the volume. */
	for (unsigned i = 0; !f->ended && i < w->sc->nvols; i++)
		disk_cancel(w->vol[i]);
	if (!f->ended)
		f->ended = co_work_wait(w, GIVE_UP_NS);
	if (!f->ended)
		crash_fail("hang", "requests wait for ever after an I/O error, though the volumes were cancelled");
	w->hook = NULL;
	world_take(w, "the end");
	f->closed = co_world_close(w);
	world_disarm(w);
}

static co_fn void co_after_failure(void *arg)
{
	struct failure *f = arg;
	struct world *w = f->w, *before = world_take_histories(w);
	struct err err = ERR_INIT;

	if (co_world_open(w, &err))
		crash_fail("open", "after an I/O error and a close: %s", err.msg);
	/* A close that said all is well has to be believed. */
	co_verify_content(w, before, w->clock, !f->closed && !w->errors, "after an I/O error, a close and a new start");
	co_world_close(w);
	world_destroy(before);
}

static unsigned then_close(uint64_t n, struct rng *r)
{
	return rng_below(r, 3) ? THEN_CLOSE : THEN_DRAIN;
}

/* False if the run was over before I/O number n. */
static bool run_failure(const struct scenario *sc, uint64_t n, bool forever)
{
	struct failure f = { .w = world_create(sc), .n = n, .forever = forever };
	unsigned vol;

	crash_at_cut = n;
	crash_run(0, sc->seed, co_run_failure, &f);
	if (f.dev && is_image(&f, &vol)) {
		for (unsigned i = 0; i < sc->nvols; i++)
			if (i != vol && f.w->failed[i])
				crash_fail("innocent", "volume %u got an error because the image of volume %u failed", i, vol);
	}
	verify_snaps(f.w, then_close);
	crash_at_cut = n;
	if (f.dev)
		powercut_dev_fail(f.dev, 0);
	crash_run(f.w->time_ns, ~sc->seed, co_after_failure, &f);
	crash_at_cut = 0;
	world_destroy(f.w);
	return f.dev != NULL;
}

static void run_failures(const struct scenario *sc, bool forever)
{
	struct rng r;
	uint64_t n = crash_opts.cut;

	if (n) {
		run_failure(sc, n, forever);
		return;
	}
	rng_seed(&r, sc->seed);
	do
		n += 1 + rng_below(&r, 6);
	while (run_failure(sc, n, forever));
}

void run_error(const struct scenario *sc)
{
	run_failures(sc, false);
}

void run_dead(const struct scenario *sc)
{
	run_failures(sc, true);
}

/* --- A hanging image --- */

struct stall {
	struct world *w;
	uint64_t n, seen;
	struct rt_timer end;
};

static void on_stall_end(struct rt_timer *t)
{
	struct stall *s = container_of(t, struct stall, end);

	powercut_dev_stall(world_image_dev(s->w, 0), false);
}

static int on_stall_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct stall *s = arg;

	if (dev != world_image_dev(s->w, 0) || ++s->seen != s->n)
		return 0;
	powercut_dev_stall(dev, true);
	rt_timer_arm(&s->end, rt_now_ns() + STALL_NS, on_stall_end);
	return 0;
}

static co_fn void co_run_stall(void *arg)
{
	struct stall *s = arg;
	struct world *w = s->w;
	struct err err = ERR_INIT;

	if (co_world_format(w, &err) || co_world_open(w, &err))
		crash_fail("open", "a new log: %s", err.msg);
	co_warm_up(w);
	w->hook = on_stall_io;
	w->hook_arg = s;
	world_arm(w, 61, 1, 0);
	co_work(w, w->sc->work.ops, w->sc->seed, 0);
	for (unsigned i = 1; i < w->sc->nvols; i++)
		if (w->longest_ns[i] > STALL_NS / 2)
			crash_fail("stalled", "volume %u waited %llu ms because the image of volume 0 hung", i,
				   (unsigned long long)w->longest_ns[i] / 1000000);
	if (co_world_close(w))
		crash_fail("close", "closing the log failed");
	w->hook = NULL;
	world_disarm(w);
	rt_timer_cancel(&s->end);
}

static co_fn void co_after_stall(void *arg)
{
	struct stall *s = arg;

	co_verify_closed(s->w);
}

void run_stall(const struct scenario *sc)
{
	struct stall s = { .w = world_create(sc), .n = 1 + sc->seed % 40, .end = RT_TIMER_INIT };

	crash_run(0, sc->seed, co_run_stall, &s);
	verify_snaps(s.w, then_close);
	crash_run(s.w->time_ns, ~sc->seed, co_after_stall, &s);
	world_destroy(s.w);
}

/* --- A hanging image in a ring that others fill --- */

static co_fn void co_run_clean(void *arg)
{
	struct world *w = arg;
	struct err err = ERR_INIT;

	if (co_world_format(w, &err) || co_world_open(w, &err))
		crash_fail("open", "a new log: %s", err.msg);
	powercut_dev_stall(world_image_dev(w, 0), true);
	/* The hanging volume's dirty data is somewhere in the ring; the last volume drives the ring around. */
	world_arm(w, crash_opts.cut ? 1 : 5 + w->sc->seed % 8, 1, crash_opts.cut);
	if (!co_work(w, w->sc->work.ops, w->sc->seed, GIVE_UP_NS)) {
		for (unsigned i = 1; i < w->sc->nvols; i++)
			if (w->running_of[i])
				crash_fail("stalled", "volume %u cannot go on because the image of volume 0 hangs", i);
	}
	/* Volume 0 may have filled its quota. */
	powercut_dev_stall(world_image_dev(w, 0), false);
	if (!co_work_wait(w, GIVE_UP_NS))
		crash_fail("hang", "the image of volume 0 has come back, and requests wait for ever");
	if (co_world_close(w))
		crash_fail("close", "closing the log failed");
	world_disarm(w);
}

static co_fn void co_after_clean(void *arg)
{
	co_verify_closed(arg);
}

void run_clean(const struct scenario *sc)
{
	struct world *w = world_create(sc);

	crash_run(0, sc->seed, co_run_clean, w);
	verify_snaps(w, then_close);
	crash_run(w->time_ns, ~sc->seed, co_after_clean, w);
	world_destroy(w);
}

void adjust_clean(struct scenario *sc, struct rng *r)
{
	adjust_stall(sc, r);
	sc->warm_up = 0;
	sc->work.ops /= 4;
	sc->work.read_pct = 0;
	/* The ring has to go around within a few hundred requests. */
	sc->format.segment_size = 65536;
	sc->log_size = (256 << 10) + 65536 * (16 + rng_below(r, 12));
	sc->work.max_write = 16384;
	sc->bulk = sc->log_size / 2 + rng_below(r, sc->log_size);
	sc->vol[0].quota = sc->log_size / 4;
}

void adjust_stall(struct scenario *sc, struct rng *r)
{
	sc->nvols = 2;
	sc->size[1] = 300 << 10;
	sc->vol[1].destage = WLOG_DESTAGE_MERGED;
	sc->log.no_destage = false;
	sc->log.destage_delay_ns = 1;
	sc->work.ops *= 4;
	sc->work.unaligned_pct = 0;
	/* Requests as large as a segment of such a small log could never be promised room. */
	sc->work.max_write = min(sc->work.max_write, (uint64_t)sc->format.segment_size / 4);
}
