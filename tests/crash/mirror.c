/* SPDX-License-Identifier: MIT */
/*
 * Variants of a mirrored log: a side dies or hangs, is missing, comes back stale, is rebuilt.
 *
 * Devices log0 and log1 are the sides; log2, where there is one, replaces the side that died.
 *
 * A side that hangs does so for good, or comes back before or after it is given up, with all that it had been asked: what it then does must
 * harm nobody. Or both hang, and come back one after the other.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "util/bytes.h"
#include "util/err.h"
#include "variants.h"

#define DIES_WITHIN 150u
#define HANGS_LONGEST_NS 12000000000ull	/* more than twice the limit */

struct mirror {
	struct world *w;
	unsigned victim, loser;	/* it dies or hangs; it may have been given up: of two that hang the one that comes back later */
	uint64_t n, seen;	/* it dies at its n-th I/O */
	bool dead, rebuild, rebuilt;
	uint64_t dead_at;	/* tick */
	uint64_t rebuilt_at;
	/* hang */
	bool hang, both;
	uint64_t back_ns[2];	/* how long each side hangs; 0: until the log is closed */
};

struct back {
	struct powercut_dev *dev;
	uint64_t after_ns;
};

static co_fn void co_come_back(void *arg)
{
	struct back *b = arg;

	co_sleep_ns(b->after_ns);
	powercut_dev_stall(b->dev, false);
	free(b);
}

static void begin_hang(struct mirror *m)
{
	for (unsigned side = 0; side < 2; side++) {
		struct powercut_dev *dev = world_log_dev(m->w, side);

		if (side != m->victim && !m->both)
			continue;
		powercut_dev_stall(dev, true);
		if (!m->back_ns[side])
			continue;
		struct back *b = malloc(sizeof(*b));

		*b = (struct back){ dev, m->back_ns[side] };
		if (co_spawn("comes back", co_come_back, b))
			abort();
	}
}

static void end_hang(struct mirror *m)
{
	for (unsigned side = 0; side < 2; side++)
		powercut_dev_stall(world_log_dev(m->w, side), false);
}

static int on_mirror_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct mirror *m = arg;

	if (m->dead || dev != world_log_dev(m->w, m->victim) || ++m->seen != m->n)
		return 0;
	m->dead = true;
	m->dead_at = m->w->clock;
	if (m->hang) {
		begin_hang(m);
		return 0;
	}
	powercut_dev_fail(dev, -EIO);
	return -EIO;
}

static co_fn void co_rebuild(struct mirror *m)
{
	struct world *w = m->w;
	struct wlog_info info;
	struct err err = ERR_INIT;
	struct disk *d;

	if (powercut_dev_open(world_log_dev(w, 2), &d))
		abort();
	if (co_wlog_rebuild(w->log, d, &err))
		crash_fail("rebuild", "%s", err.msg);
	/* Goes on working while it copies. */
	co_work(w, w->sc->work.ops, w->sc->seed + 1, 0);
	for (;;) {
		wlog_get_info(w->log, &info);
		if (!info.rebuilding)
			break;
		co_sleep_ns(10000000);
	}
	if (info.degraded)
		crash_fail("rebuild", "the log is still degraded after the rebuild");
	m->rebuilt = true;
	m->rebuilt_at = w->clock;
	co_work(w, w->sc->work.ops / 2 + 1, w->sc->seed + 2, 0);
}

/* Of one that hung for good nobody waits; one that came back in time lost nothing; of two no more than one is ever given up. */
static void check_hang(const struct mirror *m, const struct wlog_info *info)
{
	uint64_t limit = m->w->sc->log.side_timeout_ns, back = m->back_ns[m->victim];

	if (!m->both && !back && !info->degraded)
		crash_fail("degraded", "a side hangs, and the log says that it is well");
	if (!m->both && back && back < limit && info->degraded)
		crash_fail("degraded", "a side hung for less than the limit, and was given up");
}

static co_fn void co_run_mirror(void *arg)
{
	struct mirror *m = arg;
	struct world *w = m->w;
	struct err err = ERR_INIT;
	struct wlog_info info;

	if (co_world_format(w, &err) || co_world_open(w, &err))
		crash_fail("open", "a new log: %s", err.msg);
	co_warm_up(w);
	w->hook = on_mirror_io;
	w->hook_arg = m;
	world_arm(w, m->rebuild ? 3 : 1, 1, crash_opts.cut);
	co_work(w, w->sc->work.ops, w->sc->seed, 0);
	if (m->rebuild && m->dead)
		co_rebuild(m);
	if (m->dead)
		co_sleep_ns(1000000000);	/* the write that finds it dead may be under way on the other side */
	wlog_get_info(w->log, &info);
	if (m->hang && m->dead) {
		co_work(w, w->sc->work.ops, w->sc->seed + 1, 0);
		co_sleep_ns(HANGS_LONGEST_NS);
		wlog_get_info(w->log, &info);
		check_hang(m, &info);
		end_hang(m);
	} else if (info.degraded != (m->dead && !m->rebuilt))
		crash_fail("degraded", "a side is %s, and the log says it is %s", m->dead && !m->rebuilt ? "dead" : "well",
			   info.degraded ? "degraded" : "well");
	if (m->hang)
		m->n = 0;	/* a close waits for one that hangs for good */
	if (co_world_close(w))
		crash_fail("close", "closing the log failed");
	w->hook = NULL;
	world_disarm(w);
}

/* Which devices the operator names after the crash. */
static unsigned pick_sides(const struct mirror *m, const struct snap *s, struct rng *r)
{
	unsigned good = 1u << !m->loser, both = 3;

	if (m->rebuilt && s->at > m->rebuilt_at) {
		/* The new side is worth as much as the old one. */
		both = good | 4;
		return rng_below(r, 2) ? both : rng_below(r, 2) ? good : 4;
	}
	if (m->dead && s->at >= m->dead_at)
		return rng_below(r, 2) ? both : good;
	return 1 + rng_below(r, 3);
}

static unsigned then_alone(struct rng *r)
{
	unsigned dice = rng_below(r, 8);

	return dice < 3 ? THEN_CLOSE : dice < 6 ? THEN_ALONE | THEN_WORK : THEN_ALONE;
}

static void run_mirror_variant(const struct scenario *sc, bool rebuild, bool hang)
{
	struct mirror m = { .w = world_create(sc), .victim = sc->seed & 1, .n = 1 + sc->seed * 31 % DIES_WITHIN,
			    .rebuild = rebuild, .hang = hang };
	struct world *w = m.w;
	unsigned first, step;
	struct rng how;

	rng_seed(&how, sc->seed * 104729);
	m.both = rng_below(&how, 4) == 0;
	for (unsigned side = 0; side < 2; side++)
		m.back_ns[side] = m.both || rng_below(&how, 2) ? 1 + rng_below(&how, HANGS_LONGEST_NS) : 0;
	m.loser = hang && m.both ? m.back_ns[1] > m.back_ns[0] : m.victim;
	crash_run(0, sc->seed, co_run_mirror, &m);
	step = verify_step(w, w->snaps.n, &first);
	for (unsigned i = first; i < w->snaps.n; i += step) {
		struct rng r;

		rng_seed(&r, sc->seed * 7919 + w->snaps.v[i].n);
		w->sides = pick_sides(&m, &w->snaps.v[i], &r);
		verify_snap(w, &w->snaps.v[i], then_alone(&r));
	}
	world_destroy(w);
}

void run_mirror(const struct scenario *sc)
{
	run_mirror_variant(sc, false, false);
}

void run_hang(const struct scenario *sc)
{
	run_mirror_variant(sc, false, true);
}

void run_rebuild(const struct scenario *sc)
{
	run_mirror_variant(sc, true, false);
}

void adjust_mirror(struct scenario *sc, struct rng *r)
{
	sc->nsides = 2;
}

void adjust_hang(struct scenario *sc, struct rng *r)
{
	sc->nsides = 2;
	sc->work.ops = sc->work.ops / 2 + 1;
	sc->log.side_timeout_ns = 5000000000ull;
}

void adjust_rebuild(struct scenario *sc, struct rng *r)
{
	sc->nsides = 2;
	sc->spare = true;
	sc->work.ops /= 2;
	if (rng_below(r, 2)) {
		sc->log.no_destage = true;
		sc->warm_up = 0;
		sc->log_size = (256 << 10) + (16 << 20);
	}
}
