/* SPDX-License-Identifier: MIT */
/*
 * What a seed decides.
 */
#include <stdio.h>
#include <string.h>

#include "crash.h"
#include "util/bytes.h"

static uint64_t pick(struct rng *r, const uint64_t *v, unsigned n)
{
	return v[rng_below(r, n)];
}

static void pick_device(struct powercut_dev_config *d, struct rng *r)
{
	static const uint64_t latency[] = { 20000, 100000, 1000000 };

	d->sector = chance(r, 20) ? 4096 : 512;
	d->align = d->sector;
	d->latency_ns = pick(r, latency, ARRAY_SIZE(latency));
	d->no_fua = chance(r, 20);
}

static void pick_workload(struct workload *k, struct rng *r)
{
	static const uint64_t largest[] = { 4096, 16384, 65536, 140000 };
	static const uint64_t think[] = { 0, 50000, 2000000 };

	k->workers = 1 + rng_below(r, 5);
	k->ops = 60 / k->workers;
	k->max_write = pick(r, largest, ARRAY_SIZE(largest));
	k->hot_size = 4096 << rng_below(r, 5);
	k->think_ns = pick(r, think, ARRAY_SIZE(think));
	k->flush_pct = chance(r, 15) ? 0 : 5 + rng_below(r, 25);
	k->fua_pct = chance(r, 50) ? 0 : rng_below(r, 30);
	k->zero_pct = rng_below(r, 15);
	k->discard_pct = rng_below(r, 15);
	k->read_pct = rng_below(r, 25);
	k->unaligned_pct = chance(r, 50) ? 0 : rng_below(r, 60);
	k->hot_pct = rng_below(r, 90);
}

void scenario_init(struct scenario *sc, const char *variant, uint64_t seed)
{
	static const uint64_t delay[] = { 1, 1000000, 100000000 }, object[] = { 0, 16384, 65536, 4 << 20 };
	struct rng r;

	memset(sc, 0, sizeof(*sc));
	sc->variant = variant;
	sc->seed = seed;
	rng_seed(&r, seed);
	sc->logged = true;
	sc->filled = chance(&r, 70);
	sc->nvols = chance(&r, 60) ? 1 : 2 + rng_below(&r, CRASH_VOLUMES - 1);
	sc->nsides = 1;
	pick_device(&sc->log_dev, &r);
	pick_device(&sc->image_dev, &r);
	sc->image_dev.no_discard = chance(&r, 20);
	sc->image_dev.no_zero = chance(&r, 20);
	sc->image_dev.discard_keeps = chance(&r, 20);
	sc->image_dev.no_mark = chance(&r, 20);
	sc->image_dev.max_io = chance(&r, 20) ? 65536 : 0;
	sc->format.segment_size = 65536 << rng_below(&r, 3);
	sc->format.no_prewrite = sc->format.small = true;
	sc->log_size = (256 << 10) + sc->format.segment_size * (12 + rng_below(&r, 20));
	sc->log.memory = chance(&r, 30) ? 256 << 10 : 0;
	sc->log.destage_parallel = chance(&r, 30) ? 1 + rng_below(&r, 4) : 0;
	sc->log.destage_delay_ns = pick(&r, delay, ARRAY_SIZE(delay));
	sc->log.no_destage = chance(&r, 10);
	/* Nothing ever leaves: then there must be room. */
	if (sc->log.no_destage)
		sc->log_size = (256 << 10) + (16 << 20);
	sc->warm_up = chance(&r, 60) || sc->log.no_destage ? 0 : rng_below(&r, 2 * sc->log_size);
	pick_workload(&sc->work, &r);
	for (unsigned i = 0; i < sc->nvols; i++) {
		sc->size[i] = (64 << 10) + 4096 * rng_below(&r, 48);
		/* Sometimes a last sector that is not whole. */
		if (chance(&r, 15))
			sc->size[i] -= rng_below(&r, 4096);
		sc->vol[i].mode = chance(&r, 70) ? WLOG_MODE_FLUSH : WLOG_MODE_WRITE;
		sc->vol[i].destage = chance(&r, 50) ? WLOG_DESTAGE_MERGED : WLOG_DESTAGE_ORDERED;
		sc->vol[i].no_mark = chance(&r, 20);
	}
	/* A store far away. Drawn last, as it came last. */
	if (chance(&r, 40)) {
		sc->image_dev.object = pick(&r, object, ARRAY_SIZE(object));
		sc->image_dev.opt_depth = 64;
	}
	sc->log.destage_round = chance(&r, 40) ? 16384 : 0;
	sc->log.destage_holes = chance(&r, 70) ? 1 : 0;
	/* Whose writes are not torn within an object, nor volatile, if it is Ceph. */
	sc->image_dev.whole = sc->image_dev.object && chance(&r, 70);
	sc->image_dev.write_through = sc->image_dev.whole && chance(&r, 50);
	/* And which is given what touches, with many flushes, so that epochs go together. */
	if (sc->image_dev.whole && chance(&r, 70)) {
		sc->image_dev.latency_ns = 1000000;
		sc->work.flush_pct = 40;
		sc->work.hot_pct = 95;
		sc->work.zero_pct = sc->work.discard_pct = sc->work.unaligned_pct = 0;
		for (unsigned i = 0; i < sc->nvols; i++)
			sc->vol[i].destage = WLOG_DESTAGE_ORDERED;
	}
}

void scenario_print(const struct scenario *sc)
{
	const struct workload *k = &sc->work;

	printf("log: %u side(s) of %llu, segments %u, sector %u%s; memory %llu, destage after %llu ns, %u at once, rounds of %llu%s\n", sc->nsides,
	       (unsigned long long)sc->log_size, sc->format.segment_size, sc->log_dev.sector, sc->log_dev.no_fua ? ", no FUA" : "",
	       (unsigned long long)sc->log.memory, (unsigned long long)sc->log.destage_delay_ns, sc->log.destage_parallel, (unsigned long long)sc->log.destage_round,
	       sc->log.no_destage ? ", no destage" : "");
	printf("images: sector %u, max_io %u, object %u, depth %u%s%s%s%s%s%s%s%s\n", sc->image_dev.sector, sc->image_dev.max_io, sc->image_dev.object, sc->image_dev.opt_depth,
	       sc->image_dev.whole ? ", never torn" : "", sc->image_dev.write_through ? ", write-through" : "",
	       sc->image_dev.no_fua ? ", no FUA" : "", sc->image_dev.no_discard ? ", no discard" : "",
	       sc->image_dev.no_zero ? ", no zero" : "", sc->image_dev.discard_keeps ? ", discard keeps" : "",
	       sc->image_dev.no_mark ? ", no mark" : "", sc->filled ? ", filled" : "");
	for (unsigned i = 0; i < sc->nvols; i++)
		printf("volume %u: %llu bytes, logmode=%s, destage=%s, quota %llu\n", i, (unsigned long long)sc->size[i],
		       sc->vol[i].mode == WLOG_MODE_WRITE ? "write" : "flush",
		       sc->vol[i].destage == WLOG_DESTAGE_ORDERED ? "ordered" : "merged", (unsigned long long)sc->vol[i].quota);
	printf("work: %u workers of %u requests per volume, writes up to %llu, hot %llu (%u %%), think %llu ns, "
	       "flush %u fua %u zero %u discard %u read %u unaligned %u %%\n", k->workers, k->ops,
	       (unsigned long long)k->max_write, (unsigned long long)k->hot_size, k->hot_pct, (unsigned long long)k->think_ns,
	       k->flush_pct, k->fua_pct, k->zero_pct, k->discard_pct, k->read_pct, k->unaligned_pct);
	printf("warm-up %llu, bulk %llu\n", (unsigned long long)sc->warm_up, (unsigned long long)sc->bulk);
}
