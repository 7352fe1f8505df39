/* SPDX-License-Identifier: MIT */
/*
 * After a cut: recover, read everything, compare with the histories; then drain, go on working, cut again.
 */
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "util/err.h"

struct verify {
	struct world *w;	/* after the cut */
	const struct world *before;
	struct snap *snap;
	unsigned then;
};

static enum model_promise promise_of(const struct world *w, unsigned vol, bool all)
{
	const struct scenario *sc = w->sc;

	if (sc->kill && !w->forgetful)
		return MODEL_ALL;
	if (all || sc->perfect)
		return sc->logged || sc->perfect ? MODEL_ALL : MODEL_VISIBLE;
	if (!sc->logged)
		return MODEL_DISK;
	return sc->vol[vol].mode == WLOG_MODE_WRITE ? MODEL_ALL : MODEL_PREFIX;
}

static void compare(const struct model *m, uint64_t at, enum model_promise promise, const uint8_t *content, const char *where)
{
	char why[500];
	const char *what = model_check(m, at, promise, content, why, sizeof(why));

	if (what)
		crash_fail(what, "volume %u, %s: %s", m->vol, where, why);
}

static co_fn uint8_t *co_read_or_fail(struct world *w, unsigned vol, const char *where)
{
	uint8_t *content = co_world_read(w, vol);

	if (!content)
		crash_fail("unreadable", "volume %u, %s: a read failed", vol, where);
	return content;
}

static co_fn void co_verify_volume(struct world *w, unsigned i, const struct model *m, uint64_t at, bool all, bool know,
				   const char *where)
{
	uint8_t *content = co_read_or_fail(w, i, where);

	compare(m, at, promise_of(w, i, all), content, where);
	if (know)
		world_know(w, i, m, content);
	free(content);
}

co_fn void co_verify_content(struct world *w, const struct world *before, uint64_t at, bool all, const char *where)
{
	for (unsigned i = 0; i < w->sc->nvols; i++)
		co_verify_volume(w, i, before->model[i], at, all, false, where);
}

co_fn void co_verify_and_know(struct world *w, const struct world *before, uint64_t at, bool all, const char *where)
{
	for (unsigned i = 0; i < w->sc->nvols; i++)
		co_verify_volume(w, i, before->model[i], at, all, true, where);
	w->known = true;
}

/* The same content as the world's histories say, with nothing left out. */
static co_fn void co_verify_same(struct world *w, const char *where)
{
	for (unsigned i = 0; i < w->sc->nvols; i++)
		co_verify_volume(w, i, w->model[i], w->clock, true, false, where);
}

static void verify_images(struct world *w, enum model_promise promise, const struct model *const *model, uint64_t at,
			  const char *where)
{
	for (unsigned i = 0; i < w->sc->nvols; i++) {
		uint8_t *content;

		if (promise == MODEL_EPOCH && w->sc->vol[i].destage != WLOG_DESTAGE_ORDERED)
			continue;
		content = world_image(w, i);
		compare(model[i], at, promise, content, where);
		free(content);
	}
}

static co_fn void co_open_or_fail(struct world *w, const char *where)
{
	struct err err = ERR_INIT;

	if (co_world_open(w, &err))
		crash_fail("open", "%s: %s", where, err.msg);
}

co_fn void co_drain_and_verify(struct world *w)
{
	bool cancel = false;
	int ret = co_wlog_drain(w->log, NULL, NULL, &cancel);

	if (ret)
		crash_fail("drain", "draining after recovery: %s", strerror(-ret));
	verify_images(w, MODEL_ALL, (const struct model *const *)w->model, w->clock, "the image after a drain");
	co_verify_same(w, "after a drain");
}

static co_fn void co_verify(void *arg)
{
	struct verify *v = arg;
	struct world *w = v->w;

	if ((v->then & THEN_CUT) || crash_opts.verbose)
		world_arm(w, v->then & THEN_CUT ? 1 : 0, 1, crash_opts.cut2);
	co_open_or_fail(w, "recovery");
	if (v->then & ~THEN_IMAGE)
		co_verify_and_know(w, v->before, v->snap->at, false, "after recovery");
	else
		co_verify_content(w, v->before, v->snap->at, false, "after recovery");
	if (v->then & THEN_WORK) {
		co_work(w, w->sc->work.ops / 3 + 1, w->sc->seed + v->snap->n, 0);
		co_verify_same(w, "after more work");
	}
	if ((v->then & THEN_DRAIN) && w->log)
		co_drain_and_verify(w);
	if (co_world_close(w))
		crash_fail("close", "closing the log after recovery failed");
	world_disarm(w);
	if ((v->then & THEN_ALONE) && w->complete && __builtin_popcount(w->sides) > 1) {
		w->sides &= rt_rand64() & 1 ? w->sides - 1 : -w->sides;
		co_open_or_fail(w, "opening one side of a mirror that had been complete");
		co_verify_same(w, "on one side of a mirror that had been complete");
		co_world_close(w);
	} else if (v->then & THEN_REOPEN) {
		co_open_or_fail(w, "opening again after a clean close");
		co_verify_same(w, "after a clean close");
		co_world_close(w);
	}
}

static co_fn void co_verify_again(void *arg)
{
	struct verify *v = arg;

	co_open_or_fail(v->w, "second recovery");
	co_verify_content(v->w, v->before, v->snap->at, false, "after a second recovery");
	co_world_close(v->w);
}

/* The cuts that were taken while a cut was being recovered from. */
static void verify_second_cuts(struct world *w, const struct world *before, uint64_t at)
{
	unsigned from, step = verify_step(w, w->snaps.n, &from);

	for (unsigned i = from; i < w->snaps.n; i += step) {
		struct snap *s = &w->snaps.v[i];
		struct snap first = { .at = at };
		struct world *w2 = world_on(w->sc, s->p, s->time_ns);
		struct verify v = { .w = w2, .before = s->recovering ? before : w, .snap = s->recovering ? &first : s };

		s->p = NULL;
		w2->relic = s->relic;
		s->relic = NULL;
		/* Or the machine went down as well: what was flushed before, and what recovery had found, is there without it. */
		w2->forgetful = w->sc->kill && s->n % 3 == 0;
		if (w2->forgetful) {
			relic_free(w2->relic);
			w2->relic = NULL;
		}
		crash_at_cut2 = s->n;
		/* Nobody has written since the first cut, but destage may have gone on from where it was. */
		if (s->recovering && w->sc->logged)
			verify_images(w2, MODEL_EPOCH, (const struct model *const *)before->model, at, "the image without its log, after a second cut");
		crash_run(w2->time_ns, w->sc->seed ^ s->n << 32, co_verify_again, &v);
		world_destroy(w2);
		crash_cuts++;
	}
	crash_at_cut2 = 0;
}

void verify_snap(struct world *w, struct snap *s, unsigned then)
{
	struct world *after = world_on(w->sc, s->p, s->time_ns);
	struct verify v = { .w = after, .before = w, .snap = s, .then = then };

	s->p = NULL;
	after->relic = s->relic;
	s->relic = NULL;
	after->sides = w->sides;
	/* A side of the mirror may be gone for a while. */
	if (w->sc->kill && w->sc->nsides > 1 && s->n % 3)
		after->sides &= s->n % 3;
	crash_at_cut = s->n;
	if ((then & THEN_IMAGE) && w->sc->logged)
		verify_images(after, MODEL_EPOCH, (const struct model *const *)w->model, s->at, "the image without its log");
	crash_run(after->time_ns, w->sc->seed ^ s->n, co_verify, &v);
	crash_cuts++;
	verify_second_cuts(after, w, s->at);
	crash_at_cut = 0;
	world_destroy(after);
}

unsigned verify_step(const struct world *w, unsigned n, unsigned *ret_first)
{
	uint64_t missing = crash_until > crash_cuts ? crash_until - crash_cuts : 1;
	unsigned step = crash_until && n > missing ? (n + missing - 1) / missing : 1;

	*ret_first = w->sc->seed % step;
	return step;
}

void verify_snaps(struct world *w, unsigned (*then)(uint64_t n, struct rng *r))
{
	unsigned first, step = verify_step(w, w->snaps.n, &first);

	for (unsigned i = first; i < w->snaps.n; i += step) {
		struct snap *s = &w->snaps.v[i];
		struct rng r;

		rng_seed(&r, w->sc->seed * 7919 + s->n);
		verify_snap(w, s, then(s->n, &r));
	}
	world_drop_snaps(w);
}
