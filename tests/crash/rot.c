/* SPDX-License-Identifier: MIT */
/*
 * Variant: bits rot in the log while it is not in use. The log is refused, or a read fails, or the data is right: wrong data is never
 * given out, and records that had been durable are never left out in silence.
 *
 * Then, of a log that was stopped in order, the operator has the rest: a drain that ignores damage leaves in the images what the log held, but for the
 * ranges that it names as lost, where they are as they were before (or, destaged in order, as an older record left them).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "model_impl.h"
#include "util/bytes.h"
#include "util/err.h"
#include "variants.h"

#define ROTS_PER_RUN 60u

struct rot {
	struct world *w;
	struct snap *snap;
	uint64_t off;
	uint64_t refused, unreadable, fine, lost;
	/* the drain that ignores damage */
	struct scenario sc;
	uint8_t *want[CRASH_VOLUMES];	/* what the log held over the images, with holes as they are */
	uint8_t *old[CRASH_VOLUMES], *is_lost[CRASH_VOLUMES];
	uint64_t lost_of[CRASH_VOLUMES];
};

/* What a guest wrote, as against the log's own headers and descriptors. */
static bool is_data(const struct media *m, uint64_t off)
{
	uint8_t word[8];
	uint64_t value;

	media_read(m, off & ~7ull, word, 8);
	value = get_le64(word);
	return !value || model_word_is_any(value);
}

/* A place that was written, by preference one behind the superblocks; half of the time one that is no guest's data. */
static uint64_t pick_place(const struct media *m, struct rng *r)
{
	bool hole, own = rng_below(r, 2);
	uint64_t off = 0;

	for (int tries = 0; tries < 20000; tries++) {
		off = rng_below(r, media_size(m));
		media_extent(m, off, 1, &hole);
		if (!hole && (off >= 128 << 10 || tries > 10000) && (!own || !is_data(m, off)))
			break;
	}
	return off;
}

static void rot(struct rot *x, struct powercut *p, struct rng *r)
{
	struct powercut_dev *dev = powercut_dev_find(p, "log0");
	uint8_t buf[64];
	uint64_t len = 1 + rng_below(r, sizeof(buf));

	x->off = pick_place(powercut_dev_view(dev), r);
	len = min(len, media_size(powercut_dev_view(dev)) - x->off);
	media_read(powercut_dev_view(dev), x->off, buf, len);
	if (rng_below(r, 2))
		memset(buf, 0, len);
	else
		buf[rng_below(r, len)] ^= 1 << rng_below(r, 8);
	powercut_dev_poke(dev, x->off, buf, len, false);
}

static void on_lost(void *arg, const char *volume, uint64_t rno, uint64_t off, uint64_t len)
{
	struct rot *x = arg;
	unsigned i = volume[3] - '0';

	if (off + len > x->sc.size[i] && off + len > align_up(x->sc.size[i], 65536))
		crash_fail("lost", "volume %u: a lost range outside of it: %llu+%llu", i, (unsigned long long)off, (unsigned long long)len);
	len = off < x->sc.size[i] ? min(len, x->sc.size[i] - off) : 0;
	memset(x->is_lost[i] + off, 1, len);
	memcpy(x->want[i] + off, x->old[i] + off, len);
	x->lost_of[i] += len;
	x->lost++;
}

/* `p` before it rots: what the volumes and the images hold. */
static co_fn void co_note(struct rot *x, struct powercut *p)
{
	struct world *w = world_on(x->w->sc, powercut_fork(p, 1), x->snap->time_ns);
	struct err err = ERR_INIT;

	for (unsigned i = 0; i < w->sc->nvols; i++) {
		x->old[i] = world_image(w, i);
		x->is_lost[i] = calloc(1, w->sc->size[i]);
	}
	if (co_world_open(w, &err))
		crash_fail("open", "the log before it rots: %s", err.msg);
	for (unsigned i = 0; i < w->sc->nvols; i++)
		x->want[i] = co_world_read(w, i);
	co_world_close(w);
	world_destroy(w);
}

static co_fn void co_ignore_damage(struct rot *x, struct powercut *p, const bool *bad)
{
	x->sc = *x->w->sc;
	x->sc.log.ignore_damage = true;
	x->sc.log.on_lost = on_lost;
	x->sc.log.on_lost_arg = x;

	struct world *w = world_on(&x->sc, p, x->snap->time_ns);
	struct err err = ERR_INIT;

	w->errors_expected = true;
	if (co_world_open(w, &err))
		crash_fail("open", "ignoring damage, a log that can be opened without: %s", err.msg);
	memset(x->lost_of, 0, sizeof(x->lost_of));
	if (co_wlog_drain(w->log, NULL, NULL, NULL))
		crash_fail("drain", "the log could not be drained though damage is ignored (rotted at %llu)", (unsigned long long)x->off);
	for (unsigned i = 0; i < w->sc->nvols; i++) {
		uint8_t *image = world_image(w, i);

		for (uint64_t at = 0; at < w->sc->size[i]; at++) {
			/* Where it was destaged in order, an older record may have come before the one that is lost. */
			if (x->is_lost[i][at] && x->sc.vol[i].destage == WLOG_DESTAGE_ORDERED)
				continue;
			if (image[at] != x->want[i][at])
				crash_fail("drain", "volume %u: byte %llu is wrong after a drain that ignored damage (%s, %llu bytes are named as lost; it is %02x, was %02x, the log has %02x)",
					   i, (unsigned long long)at, bad[i] ? "damaged" : "not damaged", (unsigned long long)x->lost_of[i], image[at],
					   x->old[i][at], x->want[i][at]);
		}
		if (bad[i] && !x->lost_of[i])
			crash_fail("lost", "volume %u: was damaged, and nothing is named as lost", i);
		free(image);
	}
	if (co_world_close(w))
		crash_fail("close", "closing the log failed");
	world_destroy(w);
}

static co_fn void co_after_rot(void *arg)
{
	struct rot *x = arg;
	struct world *w = world_on(x->w->sc, x->snap->p, x->snap->time_ns);
	struct powercut *again = powercut_fork(x->snap->p, 2);
	bool bad[CRASH_VOLUMES] = { false };
	struct err err = ERR_INIT;
	char why[400];

	x->snap->p = NULL;
	w->errors_expected = true;
	if (co_world_open(w, &err)) {
		x->refused++;
		world_destroy(w);
		powercut_destroy(again);
		return;
	}
	for (unsigned i = 0; i < w->sc->nvols; i++) {
		uint8_t *content = co_world_read(w, i);
		/* Of a log that was stopped in order everything is accounted for. */
		enum model_promise promise = x->w->sc->seed & 1 ? MODEL_ANY_PREFIX : MODEL_ALL;
		const char *what = content ? model_check(x->w->model[i], x->snap->at, promise, content, why, sizeof(why)) : NULL;

		if (what)
			crash_fail(what, "volume %u after the log rotted at %llu: %s", i, (unsigned long long)x->off, why);
		x->unreadable += !content;
		bad[i] = !content;
		x->fine += content != NULL;
		free(content);
	}
	co_world_close(w);
	world_destroy(w);
	if (x->w->sc->seed & 1)
		powercut_destroy(again);
	else
		co_ignore_damage(x, again, bad);
}

static co_fn void co_before_rot(void *arg)
{
	struct rot *x = arg;

	co_note(x, x->snap->p);
}

static co_fn void co_run_rot(void *arg)
{
	struct rot *x = arg;
	struct world *w = x->w;
	struct err err = ERR_INIT;

	if (co_world_format(w, &err) || co_world_open(w, &err))
		crash_fail("open", "a new log: %s", err.msg);
	co_work(w, w->sc->work.ops, w->sc->seed, 0);
	for (unsigned i = 0; i < w->sc->nvols; i++)
		if (co_disk_flush(w->vol[i]))
			crash_fail("error", "a flush failed");
	/* Half of the logs were stopped in order. */
	if (w->sc->seed & 1)
		for (unsigned i = 0; i < ROTS_PER_RUN; i++)
			world_take(w, "running");
	if (co_world_close(w))
		crash_fail("close", "closing the log failed");
	if (!(w->sc->seed & 1))
		for (unsigned i = 0; i < ROTS_PER_RUN; i++)
			world_take(w, "stopped");
}

void run_rot(const struct scenario *sc)
{
	struct rot x = { .w = world_create(sc) };

	crash_run(0, sc->seed, co_run_rot, &x);
	for (unsigned i = 0; i < x.w->snaps.n; i++) {
		struct rng r;

		x.snap = &x.w->snaps.v[i];
		if (crash_opts.cut && crash_opts.cut != i + 1)
			continue;
		crash_at_cut = i + 1;
		rng_seed(&r, sc->seed * 1000 + i);
		crash_run(x.snap->time_ns, sc->seed ^ i, co_before_rot, &x);
		rot(&x, x.snap->p, &r);
		crash_run(x.snap->time_ns, sc->seed ^ i, co_after_rot, &x);
		crash_cuts++;
		for (unsigned v = 0; v < sc->nvols; v++) {
			free(x.want[v]);
			free(x.old[v]);
			free(x.is_lost[v]);
		}
	}
	crash_at_cut = 0;
	if (crash_opts.verbose)
		printf("refused %llu, unreadable %llu, unharmed %llu; lost %llu ranges\n", (unsigned long long)x.refused,
		       (unsigned long long)x.unreadable, (unsigned long long)x.fine, (unsigned long long)x.lost);
	world_destroy(x.w);
}

void adjust_rot(struct scenario *sc, struct rng *r)
{
	sc->log.no_destage = true;
	sc->warm_up = 0;
	sc->log_size = (256 << 10) + (8 << 20);
}
