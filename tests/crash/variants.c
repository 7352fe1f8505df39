/* SPDX-License-Identifier: MIT */
/*
 * The variants that need no more than a scenario, a workload and cuts.
 */
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "util/err.h"
#include "variants.h"

static co_fn void co_run(void *arg)
{
	struct world *w = arg;
	struct err err = ERR_INIT;

	if (co_world_format(w, &err) || co_world_open(w, &err))
		crash_fail("open", "a new log: %s", err.msg);
	co_warm_up(w);
	world_arm(w, w->cut_every, 1, crash_opts.cut);
	co_work(w, w->sc->work.ops, w->sc->seed, 0);
	if (co_world_close(w))
		crash_fail("close", "closing the log failed");
	world_disarm(w);
}

static co_fn void co_reopen(void *arg)
{
	struct world *w = arg;

	co_verify_closed(w);
}

co_fn void co_verify_closed(struct world *w)
{
	struct world *before = world_take_histories(w);
	struct err err = ERR_INIT;

	if (co_world_open(w, &err))
		crash_fail("open", "after a clean close: %s", err.msg);
	co_verify_and_know(w, before, w->clock, true, "after a clean close");
	if (w->log)
		co_drain_and_verify(w);
	co_world_close(w);
	world_destroy(before);
}

/* Runs the workload once, with a snapshot at each `every`-th instant. */
static struct world *run_with_cuts(const struct scenario *sc, unsigned every)
{
	struct world *w = world_create(sc);

	w->cut_every = every;
	crash_run(0, sc->seed, co_run, w);
	return w;
}

static unsigned then_mostly_close(uint64_t n, struct rng *r)
{
	unsigned dice = rng_below(r, 100), then = THEN_IMAGE;

	if (dice < 15)
		then |= THEN_DRAIN;
	if (dice >= 10 && dice < 25)
		then |= THEN_WORK;
	if (dice < 20)
		then |= THEN_REOPEN;
	return then;
}

static void run_cut(const struct scenario *sc)
{
	struct world *w = run_with_cuts(sc, 1);

	verify_snaps(w, then_mostly_close);
	crash_run(w->time_ns, ~sc->seed, co_reopen, w);
	world_destroy(w);
}

/* Stores are instants, too, so that there are many: fewer of each seed, and more seeds. */
static void run_kill(const struct scenario *sc)
{
	static const unsigned primes[] = { 5, 7, 11, 13 };
	struct world *w = run_with_cuts(sc, primes[sc->seed % 4]);

	verify_snaps(w, then_mostly_close);
	crash_run(w->time_ns, ~sc->seed, co_reopen, w);
	world_destroy(w);
}

static unsigned then_cut_again(uint64_t n, struct rng *r)
{
	unsigned then = THEN_CUT;

	if (rng_below(r, 2))
		then |= THEN_DRAIN;
	if (rng_below(r, 3) == 0)
		then |= THEN_WORK;
	return then;
}

static void run_recut(const struct scenario *sc)
{
	static const unsigned primes[] = { 23, 29, 31, 37 }, far[] = { 101, 127, 149, 181 };
	struct world *w = run_with_cuts(sc, (sc->kill ? far : primes)[sc->seed % 4]);

	verify_snaps(w, then_cut_again);
	world_destroy(w);
}

/* Quotas of a few writes or a ring of a few segments, and images that cannot keep up. */
static void adjust_full(struct scenario *sc, struct rng *r)
{
	sc->log.no_destage = false;
	sc->log.high_pct = 20 + rng_below(r, 60);
	sc->log.low_pct = 5 + rng_below(r, 15);
	sc->image_dev.latency_ns = 1000000 << rng_below(r, 6);
	sc->work.max_write = 65536;
	if (rng_below(r, 2)) {
		for (unsigned i = 0; i < sc->nvols; i++)
			sc->vol[i].quota = 32768 << rng_below(r, 5);
		return;
	}
	/* Or the ring itself, which is written around and around. */
	sc->format.segment_size = 65536;
	sc->log_size = (256 << 10) + 65536 * (9 + rng_below(r, 4));
	sc->work.max_write = 8192;
	sc->bulk = sc->log_size;
}

static void adjust_bare(struct scenario *sc, struct rng *r)
{
	sc->logged = false;
	sc->warm_up = 0;
}

static void adjust_qcow2(struct scenario *sc, struct rng *r)
{
	sc->qcow2 = true;
	sc->cluster_bits = 9 + rng_below(r, 8);
	sc->ext_l2 = sc->cluster_bits >= 14 && rng_below(r, 2);
	for (unsigned i = 0; i < sc->nvols; i++)
		sc->size[i] &= ~511ull;
}

static void adjust_qcow2_bare(struct scenario *sc, struct rng *r)
{
	adjust_bare(sc, r);
	adjust_qcow2(sc, r);
}

/* A few blocks up to more than the volumes, and reads enough to fill it. */
static void adjust_cache(struct scenario *sc, struct rng *r)
{
	sc->cache = (520 << 10) + rng_below(r, 500 << 10);
	sc->work.read_pct = 20 + rng_below(r, 40);
}

static void adjust_cache_bare(struct scenario *sc, struct rng *r)
{
	adjust_bare(sc, r);
	adjust_cache(sc, r);
}

static void adjust_perfect(struct scenario *sc, struct rng *r)
{
	adjust_bare(sc, r);
	sc->perfect = true;
	sc->image_dev.sector = sc->image_dev.align = 4096;
	for (unsigned i = 0; i < sc->nvols; i++)
		sc->size[i] &= ~4095ull;
}

static void adjust_lying(struct scenario *sc, struct rng *r)
{
	adjust_perfect(sc, r);
	sc->lying = true;
}

static void adjust_lying_bare(struct scenario *sc, struct rng *r)
{
	adjust_bare(sc, r);
	sc->lying = true;
	sc->work.flush_pct = 30;
}

const struct variant crash_variants[] = {
	{ "cut", "a cut at any write leaves a prefix that covers the last flush", run_cut, NULL },
	{ "kill", "a killed process loses nothing that it had acknowledged, flushed or not", run_kill, adjust_kill },
	{ "kill-again", "the same if the process is killed again while it recovers, or a side of the mirror is missing", run_recut, adjust_kill },
	{ "recut", "a second cut during recovery, drain or later work is like the first", run_recut, NULL },
	{ "full", "the same while the quota is exhausted and writers wait", run_cut, adjust_full },
	{ "clean", "the same while data of a hanging volume is brought forward in a full ring", run_clean, adjust_clean },
	{ "qcow2", "the same over a qcow2 image, which stays consistent", run_cut, adjust_qcow2 },
	{ "qcow2-bare", "a qcow2 image without a log is as good as any disk", run_cut, adjust_qcow2_bare },
	{ "cache", "the same with a read cache below the log", run_cut, adjust_cache },
	{ "cache-bare", "with a read cache and no log, flushed data is there", run_cut, adjust_cache_bare },
	{ "bare", "without a log, flushed data is there", run_cut, adjust_bare },
	{ "mirror", "a side of the mirror dies: nobody notices; a stale side is never believed", run_mirror, adjust_mirror },
	{ "hang", "a side of the mirror hangs, for a while or for good, or both do: nothing is lost, and nobody waits for ever", run_hang, adjust_hang },
	{ "rebuild", "a side is replaced under load", run_rebuild, adjust_rebuild },
	{ "error", "an I/O error is reported, and nothing that was flushed is lost", run_error, NULL },
	{ "dead", "the same for a device that fails for good", run_dead, NULL },
	{ "stall", "a hanging image stalls only its own volume", run_stall, adjust_stall },
	{ "format", "a cut while formatting leaves the old log, a new one, or none", run_reformat, adjust_reformat },
	{ "rot", "bits that rot in the log are reported, and never given out", run_rot, adjust_rot },
	{ "perfect", "self-test: a disk whose every write is FUA passes", run_cut, adjust_perfect },
	{ "lying", "(self-test: must fail: writes that are not FUA after all)", run_cut, adjust_lying },
	{ "lying-bare", "(self-test: must fail: flushes that never reach the disk)", run_cut, adjust_lying_bare },
	{ 0 },
};
