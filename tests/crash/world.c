/* SPDX-License-Identifier: MIT */
/*
 * Devices, what is open on them, and the snapshots of a run.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "lib/qcow2_verify.h"
#include "util/bytes.h"
#include "util/err.h"

#define READ_CHUNK (192u << 10)

static const char *const log_name[] = { "log0", "log1", "log2" };
static const char *const image_name[CRASH_VOLUMES] = { "image0", "image1", "image2" };

struct powercut_dev *world_log_dev(struct world *w, unsigned side)
{
	return powercut_dev_find(w->p, log_name[side]);
}

struct powercut_dev *world_image_dev(struct world *w, unsigned vol)
{
	return powercut_dev_find(w->p, image_name[vol]);
}

struct world *world_on(const struct scenario *sc, struct powercut *p, uint64_t time_ns)
{
	struct world *w = calloc(1, sizeof(*w));

	if (!w)
		abort();
	w->sc = sc;
	w->p = p;
	w->time_ns = time_ns;
	w->sides = (1u << sc->nsides) - 1;
	co_queue_init(&w->idle);
	return w;
}

struct world *world_create(const struct scenario *sc)
{
	struct world *w = world_on(sc, powercut_create(sc->seed), 0);

	for (unsigned i = 0; i < sc->nsides + sc->spare; i++)
		powercut_dev_create(w->p, log_name[i], sc->log_size, &sc->log_dev);
	for (unsigned i = 0; i < sc->nvols; i++) {
		uint64_t size = sc->qcow2 ? 3 * sc->size[i] + (64ull << sc->cluster_bits) : sc->size[i];
		struct powercut_dev *d = powercut_dev_create(w->p, image_name[i], size, &sc->image_dev);

		w->model[i] = model_create(i, sc->size[i], &w->clock);
		if (sc->filled) {
			model_fill_base(w->model[i]);
			if (!sc->qcow2)
				powercut_dev_poke(d, 0, w->model[i]->base, sc->size[i], false);
		}
		w->model[i]->weak_discard = !sc->logged && (sc->qcow2 || sc->image_dev.no_discard || sc->image_dev.discard_keeps);
	}
	w->known = true;
	return w;
}

void world_drop_snaps(struct world *w)
{
	for (unsigned i = 0; i < w->snaps.n; i++) {
		powercut_destroy(w->snaps.v[i].p);
		relic_free(w->snaps.v[i].relic);
	}
	w->snaps.n = 0;
}

void world_destroy(struct world *w)
{
	if (!w)
		return;
	world_drop_snaps(w);
	free(w->snaps.v);
	for (unsigned i = 0; i < CRASH_VOLUMES; i++)
		model_destroy(w->model[i]);
	powercut_destroy(w->p);
	relic_free(w->relic);
	free(w);
}

struct world *world_take_histories(struct world *w)
{
	struct world *to = world_on(w->sc, NULL, w->time_ns);

	for (unsigned i = 0; i < w->sc->nvols; i++) {
		to->model[i] = w->model[i];
		w->model[i] = NULL;
	}
	return to;
}

void world_know(struct world *w, unsigned vol, const struct model *before, const uint8_t *content)
{
	struct model *m = model_create(vol, before->size, &w->clock);

	memcpy(m->base, content, m->size);
	m->first_id = before->first_id + before->nops;
	m->weak_discard = before->weak_discard;
	model_destroy(w->model[vol]);
	w->model[vol] = m;
}

/* --- Snapshots --- */

static void take(struct world *w, uint64_t n, uint64_t seed, const char *where)
{
	struct snaps *s = &w->snaps;

	if (s->n == s->max) {
		s->max = s->max ? s->max * 2 : 64;
		s->v = realloc(s->v, s->max * sizeof(*s->v));
		if (!s->v)
			abort();
	}
	s->v[s->n++] = (struct snap){ .p = powercut_fork(w->p, w->sc->seed * 1000003 + seed), .at = w->clock, .n = n,
				      .relic = relic_copy(w), .time_ns = rt_now_ns(), .recovering = !w->known, .where = where };
}

void world_take(struct world *w, const char *where)
{
	take(w, w->snaps.seen, ~w->snaps.seen, where);
}

void world_instant(struct world *w, const char *where)
{
	struct snaps *s = &w->snaps;
	uint64_t n;

	if (!s->every || powercut_is_off(w->p))
		return;
	n = ++s->seen;
	if (crash_opts.verbose)
		printf("  cut %llu: at %s\n", (unsigned long long)n, where);
	if (s->want ? n != s->want : n % s->every != 0)
		return;
	for (unsigned k = 0; k < s->per_cut; k++)
		take(w, n, n * 16 + k, where);
}

static int on_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct world *w = arg;

	if (crash_opts.verbose)
		printf("    io %s %s [%llu,+%llu)%s\n", powercut_dev_name(dev),
		       op == DISK_OP_READ ? "read" : op == DISK_OP_FLUSH ? "flush" : op == DISK_OP_ZERO ? "zero" :
		       op == DISK_OP_DISCARD ? "discard" : "write", (unsigned long long)off, (unsigned long long)len,
		       flags & DISK_FUA ? " fua" : "");
	if (op != DISK_OP_READ && op != DISK_OP_EXTENT)
		world_instant(w, powercut_dev_name(dev));
	return w->hook ? w->hook(w->hook_arg, dev, op, off, len, flags) : 0;
}

void world_arm(struct world *w, unsigned every, unsigned per_cut, uint64_t want)
{
	w->snaps.every = every;
	w->snaps.per_cut = per_cut;
	w->snaps.want = want;
	powercut_set_hook(w->p, on_io, w);
}

void world_disarm(struct world *w)
{
	w->snaps.every = 0;
	if (!w->hook && !crash_opts.verbose)
		powercut_set_hook(w->p, NULL, NULL);
}

void world_answered(struct world *w)
{
	world_instant(w, "an answer");
}

/* --- Open and close --- */

static co_fn void co_close_all(struct disk **d, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		co_disk_close(d[i]);
		d[i] = NULL;
	}
}

/* The log devices of w->sides; returns their number, 0 if the power is off. */
static co_fn unsigned co_open_sides(struct world *w, struct disk **dev)
{
	unsigned n = 0;

	for (unsigned i = 0; i < ARRAY_SIZE(log_name); i++) {
		if (!(w->sides >> i & 1))
			continue;
		if (powercut_dev_open(world_log_dev(w, i), &dev[n])) {
			co_close_all(dev, n);
			return 0;
		}
		n++;
	}
	return n;
}

/* --- qcow2 images --- */

/* Puts the driver over the image's disk, if it is a qcow2 image. */
static co_fn int co_open_image(struct world *w, struct disk *file, struct disk **ret, struct err *err)
{
	static const struct qcow2_opts opts = { .table_cache = 1, .run_ahead = 1 };
	int r;

	*ret = file;
	if (!w->sc->qcow2)
		return 0;
	r = co_qcow2_open(file, "image", &opts, DISK_OPEN_RDWR, ret, err);
	if (r)
		co_disk_close(file);
	return r;
}

static co_fn int co_make_image(struct world *w, unsigned i, struct err *err)
{
	struct qcow2_create c = { .size = w->sc->size[i], .cluster_size = 1ull << w->sc->cluster_bits, .refcount_bits = 16, .version = 3,
				  .ext_l2 = w->sc->ext_l2 };
	struct disk *file, *image;
	int ret = powercut_dev_open(world_image_dev(w, i), &file);

	if (!ret)
		ret = qcow2_create_check(&c, "image", err);
	if (!ret)
		ret = co_qcow2_create(file, NULL, &c, err);
	if (!ret)
		ret = co_open_image(w, file, &image, err);
	if (ret)
		return ret;
	if (w->sc->filled)
		ret = co_disk_write(image, 0, w->model[i]->base, w->sc->size[i], 0);
	if (!ret)
		ret = co_disk_flush(image);
	co_disk_close(image);
	return ret;
}

static void check_image(struct world *w, unsigned i)
{
	struct qcow2_verdict v;

	if (!w->sc->qcow2)
		return;
	qcow2_keep(powercut_dev_view(world_image_dev(w, i)));
	qcow2_verify(powercut_dev_view(world_image_dev(w, i)), &v);
	if (v.wrong[0])
		crash_fail("corrupt", "image %u: %s", i, v.wrong);
}

co_fn int co_world_format(struct world *w, struct err *err)
{
	struct disk *dev[WLOG_MAX_DEVICES];
	unsigned n;
	int ret = 0;

	for (unsigned i = 0; i < w->sc->nvols && w->sc->qcow2 && !ret; i++)
		ret = co_make_image(w, i, err);
	if (ret || !w->sc->logged)
		return ret;
	n = co_open_sides(w, dev);
	if (!n)
		return err_set(err, -ESHUTDOWN, "the power is off");
	ret = co_wlog_format(dev, n, &w->sc->format, err);
	co_close_all(dev, n);
	return ret;
}

static co_fn int co_open_log(struct world *w, struct err *err)
{
	struct disk *dev[WLOG_MAX_DEVICES];
	unsigned n = co_open_sides(w, dev);
	int ret;

	if (!n)
		return err_set(err, -ESHUTDOWN, "the power is off");
	struct wlog_config config = w->sc->log;

	relic_open(w, &config);
	ret = co_wlog_open(dev, n, &config, &w->log, err);
	if (ret) {
		w->log = NULL;
		co_close_all(dev, n);
	}
	return ret;
}

static co_fn int co_open_volume(struct world *w, unsigned i, struct err *err)
{
	struct disk *image;
	char name[8];
	int ret = powercut_dev_open(world_image_dev(w, i), &image);

	if (ret)
		return err_set(err, ret, "the power is off");
	check_image(w, i);
	ret = co_open_image(w, image, &image, err);
	if (ret)
		return ret;
	snprintf(name, sizeof(name), "vol%u", i);
	if (w->cache) {
		struct disk *file = image;

		ret = co_cache_attach(w->cache, name, file, CACHE_ALL, &image, err);
		if (ret) {
			co_disk_close(file);
			return ret;
		}
	}
	if (!w->sc->logged) {
		w->vol[i] = image;
		return 0;
	}
	ret = co_wlog_attach(w->log, name, image, &w->sc->vol[i], &w->vol[i], err);
	if (ret) {
		w->vol[i] = NULL;
		co_disk_close(image);
	}
	return ret;
}

co_fn int co_world_open(struct world *w, struct err *err)
{
	struct cache_config o = { .size = w->sc->cache, .chunk = 16384 };
	int ret = w->sc->logged ? co_open_log(w, err) : 0;

	if (o.size && !ret)
		ret = cache_create(&o, &w->cache, err);
	for (unsigned i = 0; i < w->sc->nvols && !ret; i++)
		ret = co_open_volume(w, i, err);
	if (ret)
		co_world_close(w);
	return ret;
}

co_fn int co_world_close(struct world *w)
{
	struct wlog_info info;
	int ret = 0;

	co_close_all(w->vol, w->sc->nvols);
	if (w->log) {
		wlog_get_info(w->log, &info);
		w->complete = !info.degraded && !info.failed;
	}
	if (w->log)
		ret = co_wlog_close(w->log);
	w->log = NULL;
	cache_destroy(w->cache);
	w->cache = NULL;
	w->time_ns = rt_now_ns();
	return ret;
}

co_fn uint8_t *co_world_read(struct world *w, unsigned vol)
{
	uint64_t size = w->sc->size[vol], n;
	uint8_t *buf = malloc(size);

	if (!buf)
		abort();
	for (uint64_t off = 0; off < size; off += n) {
		n = min(size - off, (uint64_t)READ_CHUNK);
		if (co_disk_read(w->vol[vol], off, buf + off, n, 0)) {
			free(buf);
			return NULL;
		}
	}
	return buf;
}

uint8_t *world_image(struct world *w, unsigned vol)
{
	uint8_t *buf = malloc(w->sc->size[vol]);

	if (!buf)
		abort();
	if (w->sc->qcow2)
		qcow2_verify_read(powercut_dev_view(world_image_dev(w, vol)), buf, w->sc->size[vol]);
	else
		media_read(powercut_dev_view(world_image_dev(w, vol)), 0, buf, w->sc->size[vol]);
	return buf;
}
