/* SPDX-License-Identifier: MIT */
/*
 * Variant: a cut while a log is formatted, on new devices and over an old dirty log.
 *
 * Afterwards there is the old log with all it held, or a new empty one, or none: never a mixture.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "util/bytes.h"
#include "util/err.h"
#include "variants.h"

struct reformat {
	struct world *w;
	struct scenario *sc;
	bool over_old;		/* there is a dirty log already */
	struct snap *snap;
};

static co_fn void co_run_reformat(void *arg)
{
	struct reformat *f = arg;
	struct world *w = f->w;
	struct err err = ERR_INIT;

	if (f->over_old) {
		if (co_world_format(w, &err) || co_world_open(w, &err))
			crash_fail("open", "a new log: %s", err.msg);
		co_work(w, w->sc->work.ops, w->sc->seed, 0);
		if (co_world_close(w))
			crash_fail("close", "closing the log failed");
		if (co_world_format(w, &err) != -EEXIST)
			crash_fail("refusal", "a log with dirty data was formatted without force");
		err_clear(&err);
	}
	world_arm(w, 1, 2, crash_opts.cut);
	f->sc->format.force = f->over_old;
	if (co_world_format(w, &err))
		crash_fail("format", "%s", err.msg);
	world_disarm(w);
}

/* True if the volumes hold what the histories say. */
static co_fn bool co_holds_everything(struct world *w, const struct world *before, uint64_t at)
{
	bool same = true;
	char why[400];

	for (unsigned i = 0; i < w->sc->nvols; i++) {
		uint8_t *content = co_world_read(w, i);

		if (!content)
			crash_fail("unreadable", "volume %u after a cut while formatting: a read failed", i);
		same &= !model_check(before->model[i], at, MODEL_ALL, content, why, sizeof(why));
		free(content);
	}
	return same;
}

static co_fn bool co_shows_the_images(struct world *w)
{
	bool same = true;

	for (unsigned i = 0; i < w->sc->nvols; i++) {
		uint8_t *content = co_world_read(w, i), *image = world_image(w, i);

		if (!content)
			crash_fail("unreadable", "volume %u after a cut while formatting: a read failed", i);
		same &= !memcmp(content, image, w->sc->size[i]);
		free(content);
		free(image);
	}
	return same;
}

static co_fn void co_after_reformat(void *arg)
{
	struct reformat *f = arg;
	struct world *w = world_on(f->w->sc, f->snap->p, f->snap->time_ns);
	struct err err = ERR_INIT;

	f->snap->p = NULL;
	/* No log, or one whose images are marked by the old one, is refused; the operator formats again. */
	if (!co_world_open(w, &err)) {
		if (!co_holds_everything(w, f->w, f->snap->at) && !co_shows_the_images(w))
			crash_fail("mixture", "after a cut while formatting the volumes are neither the old log's nor the images'");
		co_world_close(w);
	}
	err_clear(&err);
	if (co_world_format(w, &err))
		crash_fail("format", "again after a cut while formatting: %s", err.msg);
	world_destroy(w);
}

void run_reformat(const struct scenario *given)
{
	struct scenario sc = *given;
	struct reformat f = { .w = world_create(&sc), .sc = &sc, .over_old = sc.seed & 1 };

	crash_run(0, sc.seed, co_run_reformat, &f);
	sc.format.force = true;
	for (unsigned i = 0; i < f.w->snaps.n; i++) {
		f.snap = &f.w->snaps.v[i];
		crash_at_cut = f.snap->n;
		crash_run(f.snap->time_ns, sc.seed ^ f.snap->n, co_after_reformat, &f);
		crash_cuts++;
	}
	crash_at_cut = 0;
	world_destroy(f.w);
}

void adjust_reformat(struct scenario *sc, struct rng *r)
{
	sc->log.no_destage = true;
	sc->warm_up = 0;
	sc->log_size = (256 << 10) + (8 << 20);
	sc->work.flush_pct = max(sc->work.flush_pct, 10);
	for (unsigned i = 0; i < sc->nvols; i++)
		sc->vol[i].no_mark |= rng_below(r, 2);
}
