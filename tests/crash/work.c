/* SPDX-License-Identifier: MIT */
/*
 * The workload: coroutines that write, zero, discard, flush and read, and note it in the volumes' histories.
 *
 * While it runs, it checks what can be seen without a crash: reads show nothing older than what had returned before, no request fails for
 * no reason, and after a failed flush none succeeds.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "util/bytes.h"

struct worker {
	struct world *w;
	unsigned vol, ops;
	struct rng rng;
};

struct request {
	enum model_kind kind;
	bool read, unmap, fua;
	uint64_t off, len;
};

static uint64_t pick_len(const struct workload *k, struct rng *r)
{
	uint64_t limit = chance(r, 60) ? 8192 : chance(r, 60) ? 65536 : k->max_write;

	return 1 + rng_below(r, min(limit, k->max_write));
}

/* A range of the volume: most in whole sectors, many within the hot spot. */
static void pick_range(struct worker *k, struct request *q, uint64_t grain)
{
	const struct workload *load = &k->w->sc->work;
	uint64_t size = k->w->sc->size[k->vol], span = chance(&k->rng, load->hot_pct) ? min(load->hot_size, size) : size;

	q->len = pick_len(load, &k->rng);
	q->off = rng_below(&k->rng, span);
	if (!chance(&k->rng, load->unaligned_pct) || grain > 512) {
		q->off = align_down(q->off, grain);
		q->len = align_up(q->len, grain);
	}
	q->len = min(q->len, size - q->off);
}

static void pick_request(struct worker *k, struct request *q)
{
	const struct workload *load = &k->w->sc->work;
	const struct disk *d = k->w->vol[k->vol];
	unsigned dice = rng_below(&k->rng, 100), at = 0;

	*q = (struct request){ .kind = MODEL_WRITE, .fua = chance(&k->rng, load->fua_pct), .unmap = chance(&k->rng, 50) };
	if (dice < (at += load->flush_pct)) {
		q->kind = MODEL_FLUSH;
		return;
	}
	if (dice < (at += load->read_pct))
		q->read = true;
	else if (dice < (at += load->zero_pct))
		q->kind = MODEL_ZERO;
	else if (dice < (at += load->discard_pct) && d->limits.discard_gran)
		q->kind = MODEL_DISCARD;
	pick_range(k, q, q->kind == MODEL_DISCARD ? max(512u, d->limits.discard_gran) : k->w->sc->perfect ? 4096 : 512);
	if (k->w->sc->perfect) {
		q->fua = !k->w->sc->lying;
		q->kind = MODEL_WRITE;
		q->len = min(4096, k->w->sc->size[k->vol] - q->off);
	}
}

static co_fn void co_read_and_check(struct worker *k, const struct request *q)
{
	struct world *w = k->w;
	uint8_t *buf = malloc(q->len);
	uint64_t issued = ++w->clock;
	const char *what = NULL;
	char why[400];
	int ret;

	if (!buf)
		abort();
	ret = co_disk_read(w->vol[k->vol], q->off, buf, q->len, 0);
	++w->clock;
	if (!ret)
		what = model_check_read(w->model[k->vol], issued, w->clock, q->off, q->len, buf, why, sizeof(why));
	if (what)
		crash_fail(what, "volume %u, a read of [%llu,+%llu) during the run: %s", k->vol, (unsigned long long)q->off,
			   (unsigned long long)q->len, why);
	if (ret && !w->errors_expected)
		crash_fail("error", "volume %u: a read failed: %s", k->vol, strerror(-ret));
	free(buf);
}

static co_fn int co_submit(struct worker *k, const struct request *q, unsigned op)
{
	struct world *w = k->w;
	struct disk *d = w->vol[k->vol];
	unsigned flags = q->fua ? DISK_FUA : 0;
	uint8_t *buf;
	int ret;

	switch (q->kind) {
	case MODEL_FLUSH:
		return w->sc->lying ? 0 : co_disk_flush(d);
	case MODEL_ZERO:
		return co_disk_zero(d, q->off, q->len, flags | (q->unmap ? DISK_UNMAP : 0));
	case MODEL_DISCARD:
		return co_disk_discard(d, q->off, q->len, flags);
	default:
		break;
	}
	buf = malloc(q->len);
	if (!buf)
		abort();
	model_data(w->model[k->vol], op, q->off, buf, q->len);
	ret = co_disk_write(d, q->off, buf, q->len, flags);
	/* The caller may do as it likes with the buffer once the request has returned. */
	memset(buf, 0xa5, q->len);
	free(buf);
	return ret;
}

static void note_result(struct worker *k, const struct request *q, bool was_sticky, uint64_t began, int ret)
{
	struct world *w = k->w;

	w->longest_ns[k->vol] = max(w->longest_ns[k->vol], rt_now_ns() - began);
	w->done[k->vol]++;
	if (!ret) {
		if (was_sticky && (q->kind == MODEL_FLUSH || q->fua))
			crash_fail("sticky", "volume %u: a %s succeeded after a flush had failed", k->vol,
				   q->kind == MODEL_FLUSH ? "flush" : "FUA request");
		if (q->kind == MODEL_FLUSH || q->fua || w->sc->kill || w->sc->vol[k->vol].mode == WLOG_MODE_WRITE)
			world_answered(w);
		return;
	}
	if (!w->errors_expected)
		crash_fail("error", "volume %u: a request failed: %s", k->vol, strerror(-ret));
	w->errors++;
	w->failed[k->vol]++;
	if (q->kind == MODEL_FLUSH || q->fua)
		w->sticky[k->vol] |= ret == -EIO;
}

static co_fn void co_request(struct worker *k)
{
	struct world *w = k->w;
	bool was_sticky = w->sticky[k->vol];
	uint64_t began = rt_now_ns();
	struct request q;
	unsigned op;
	int ret;

	pick_request(k, &q);
	if (q.read) {
		co_read_and_check(k, &q);
		return;
	}
	op = model_issue(w->model[k->vol], q.kind, q.off, q.len, q.fua);
	if (crash_opts.verbose)
		printf("  vol%u issue #%u kind %d [%llu,+%llu)%s\n", k->vol, w->model[k->vol]->ops[op].id, q.kind,
		       (unsigned long long)q.off, (unsigned long long)q.len, q.fua ? " fua" : "");
	ret = co_submit(k, &q, op);
	model_complete(w->model[k->vol], op, ret);
	if (crash_opts.verbose)
		printf("  vol%u done #%u: %d at %llu ns\n", k->vol, w->model[k->vol]->ops[op].id, ret,
		       (unsigned long long)rt_now_ns());
	note_result(k, &q, was_sticky, began, ret);
}

static void end_worker(struct worker *k)
{
	struct world *w = k->w;

	w->running--;
	w->running_of[k->vol]--;
	co_queue_wake_all(&w->idle);
	free(k);
}

static co_fn void co_worker(void *arg)
{
	struct worker *k = arg;
	struct world *w = k->w;
	uint64_t think = w->sc->work.think_ns;

	for (unsigned i = 0; i < k->ops && !w->stop; i++) {
		co_request(k);
		if (think)
			co_sleep_ns(rng_below(&k->rng, think));
		else
			co_yield();
	}
	end_worker(k);
}

/* Large writes to one volume, one after the other. */
static co_fn void co_bulk(struct world *w, unsigned vol, uint64_t bytes, struct rng *r)
{
	uint64_t most = min(140000u, w->sc->work.max_write * 2);
	uint64_t size = w->sc->size[vol];
	struct worker k = { .w = w, .vol = vol };

	while (bytes && !w->stop) {
		uint64_t pick = 1 + rng_below(r, most), len = min(pick, size);
		struct request q = { .off = rng_below(r, size - len + 1), .len = len };
		unsigned op = model_issue(w->model[vol], MODEL_WRITE, q.off, len, false);
		int ret = co_submit(&k, &q, op);

		model_complete(w->model[vol], op, ret);
		note_result(&k, &q, false, rt_now_ns(), ret);
		bytes -= min(bytes, len);
	}
}

co_fn void co_warm_up(struct world *w)
{
	struct rng r;

	rng_seed(&r, w->sc->seed + 99);
	for (unsigned v = 0; v < w->sc->nvols && w->sc->warm_up; v++) {
		uint8_t *content;

		co_bulk(w, v, w->sc->warm_up / w->sc->nvols, &r);
		model_issue(w->model[v], MODEL_FLUSH, 0, 0, false);
		content = co_world_read(w, v);
		if (!content || co_disk_flush(w->vol[v]))
			crash_fail("error", "volume %u: warming up failed", v);
		model_rebase(w->model[v], content);
		free(content);
	}
	/* The histories that begin now are those of the images, too. */
	if (w->sc->warm_up && co_wlog_drain(w->log, NULL, NULL, NULL))
		crash_fail("drain", "after warming up");
}

static co_fn void co_bulk_worker(void *arg)
{
	struct worker *k = arg;
	struct world *w = k->w;

	co_bulk(w, k->vol, w->sc->bulk, &k->rng);
	end_worker(k);
}

static void start_worker(struct world *w, unsigned vol, unsigned ops, uint64_t seed, co_entry *fn)
{
	struct worker *k = malloc(sizeof(*k));

	if (!k)
		abort();
	*k = (struct worker){ .w = w, .vol = vol, .ops = ops };
	rng_seed(&k->rng, seed);
	w->running++;
	w->running_of[vol]++;
	if (co_spawn("worker", fn, k))
		abort();
}

co_fn bool co_work_wait(struct world *w, uint64_t limit_ns)
{
	uint64_t deadline = rt_now_ns() + limit_ns;

	while (w->running) {
		if (!limit_ns) {
			co_queue_wait(&w->idle, "workers");
		} else if (!co_queue_wait_until(&w->idle, deadline, "workers") && w->running) {
			w->stop = true;
			return false;
		}
	}
	return true;
}

co_fn bool co_work(struct world *w, unsigned ops, uint64_t seed, uint64_t limit_ns)
{
	unsigned workers = w->sc->perfect ? 1 : w->sc->work.workers;

	w->stop = false;
	for (unsigned v = 0; v < w->sc->nvols; v++)
		for (unsigned i = 0; i < workers; i++)
			start_worker(w, v, ops, seed * 64 + v * 16 + i, co_worker);
	if (w->sc->bulk)
		start_worker(w, w->sc->nvols - 1, 0, seed * 64 + 63, co_bulk_worker);
	return co_work_wait(w, limit_ns);
}
