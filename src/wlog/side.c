/* SPDX-License-Identifier: MIT */
/*
 * Write log: I/O on the sides of a mirror, either of which may hang.
 *
 * What is asked of a side is done by a coroutine of its own, out of memory that belongs to the request until the device has answered, be it
 * long after everybody has stopped waiting. A log of one device does without: there is nobody to go on with.
 *
 * When a side is late: the clock runs from the moment the other side has answered, so that a host that was suspended, or a network that
 * takes both away, costs no side. A side whose write is late by `side_timeout_ns` has failed (-ETIMEDOUT). A read that is late is asked of the other side, and
 * the silent one is left in peace until it has answered: it missed no write, so it stays in sync.
 *
 * Invariants
 *  (1) a side has at most one write in flight; its bytes are in wbuf, which nothing touches meanwhile;
 *  (2) a read that is given up owns the buffer that its caller had, and puts it back when it returns;
 *  (3) no write begins on a side that owes the answer to another one: it is out, and is not taken in again before it has answered.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "util/bytes.h"
#include "wlog/internal.h"

#define SPAWN_AGAIN_NS 1000000ull
#define SETTLE_NS 1000000ull
#define READS 8u	/* at once; each may keep a buffer of two MiB for as long as the side hangs */

struct wl_side_read {
	struct wl_side *side;
	uint64_t pos, len;
	uint8_t *buf;
	int result;
	bool busy, answered, given_up;
};

struct wl_side {
	struct wlog *w;
	struct disk *disk;
	/* the write in flight, or the last one */
	bool writing;
	uint64_t pos, len;	/* len 0: a flush */
	unsigned flags;
	int result;
	uint8_t *wbuf;		/* WL_MAX_BATCH */
	unsigned silent;	/* reads that were given up and have not returned */
	struct wl_side_read read[READS];
};

struct wl_side *wl_side_create(struct wlog *w, struct disk *disk)
{
	struct wl_side *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	s->wbuf = mmap(NULL, WL_MAX_BATCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (s->wbuf == MAP_FAILED) {
		free(s);
		return NULL;
	}
	s->w = w;
	s->disk = disk;
	for (unsigned i = 0; i < READS; i++)
		s->read[i].side = s;
	return s;
}

static bool is_busy(const struct wl_side *s)
{
	bool busy = s->writing;

	for (unsigned i = 0; i < READS; i++)
		busy |= s->read[i].busy;
	return busy;
}

bool wl_side_owes(const struct wl_side *s)
{
	return s && (is_busy(s) || s->disk->in_flight);
}

void wl_side_free(struct wl_side *s)
{
	if (!s)
		return;
	munmap(s->wbuf, WL_MAX_BATCH);
	free(s);
}

co_fn void co_wl_side_settle(struct wl_side *s)
{
	while (wl_side_owes(s))
		co_sleep_ns(SETTLE_NS);
}

struct retired {
	struct wlog *w;
	struct wl_side *side;	/* may be NULL */
	struct disk *disk;
};

static co_fn void co_retire(void *arg)
{
	struct retired *r = arg;

	while (wl_side_owes(r->side) || r->disk->in_flight)
		co_sleep_ns(SETTLE_NS);
	wl_side_free(r->side);
	co_disk_close(r->disk);
	r->w->dev.retiring--;
	co_queue_wake_all(&r->w->commit_done);
	free(r);
}

co_fn void co_wl_side_retire(struct wlog *w, struct wl_side *side, struct disk *disk)
{
	struct retired *r = malloc(sizeof(*r));

	disk_cancel(disk);
	w->dev.retiring++;
	if (wl_side_owes(side) || disk->in_flight)
		snprintf(w->dev.retired, sizeof(w->dev.retired), "%s", disk->name);
	if (r)
		*r = (struct retired){ w, side, disk };
	if (r && co_spawn("log device that is given back", co_retire, r) == 0)
		return;
	/* No memory: without ever waiting for a device that hangs it cannot be closed. */
	if (!wl_side_owes(side) && !disk->in_flight) {
		wl_side_free(side);
		co_disk_close(disk);
	}
	free(r);
	w->dev.retiring--;
}

static uint64_t limit_of(const struct wlog *w)
{
	return w->config.side_timeout_ns;
}

static uint64_t later(uint64_t ns)
{
	uint64_t now = rt_now_ns();

	return ns > UINT64_MAX - now ? UINT64_MAX : now + ns;
}

static co_fn void co_wait_answer(struct wlog *w, uint64_t deadline, const char *why)
{
	if (deadline == UINT64_MAX)
		co_queue_wait(&w->dev.answered, why);
	else
		co_queue_wait_until(&w->dev.answered, deadline, why);
}

/* --- Writes --- */

static co_fn void co_side_writer(void *arg)
{
	struct wl_side *s = arg;

	s->result = s->len ? co_disk_write(s->disk, s->pos, s->wbuf, s->len, s->flags) : co_disk_flush(s->disk);
	s->writing = false;
	co_queue_wake_all(&s->w->dev.answered);
}

uint8_t *wl_side_buf(struct wl_side *s)
{
	return s->wbuf;
}

co_fn void co_wl_side_start(struct wl_side *s, uint64_t pos, const void *buf, uint64_t len, unsigned flags)
{
	if (buf && buf != s->wbuf)
		memcpy(s->wbuf, buf, len);
	s->pos = pos;
	s->len = len;
	s->flags = flags;
	s->writing = true;
	while (co_spawn("log mirror write", co_side_writer, s) < 0)
		co_sleep_ns(SPAWN_AGAIN_NS);
}

/* Says once that nobody can go on, and when that is over. */
static void tell_waiting(struct wlog *w, bool waits)
{
	if (waits && !w->dev.told_waiting)
		log_warn("write log: none of its devices answers; writes wait until one does");
	else if (!waits && w->dev.told_waiting)
		log_info("write log: its devices answer again");
	w->dev.told_waiting = waits;
}

co_fn void co_wl_sides_wait(struct wlog *w, unsigned sides, int *result)
{
	struct wl_dev *d = &w->dev;
	uint64_t began = rt_now_ns(), deadline = UINT64_MAX;

	for (;;) {
		unsigned busy = 0, good = 0;

		for (unsigned i = 0; i < d->n; i++) {
			if (!(sides >> i & 1))
				continue;
			busy += d->side[i]->writing;
			good += !d->side[i]->writing && d->in_sync[i] && d->side[i]->result == 0;
		}
		if (good && deadline == UINT64_MAX)
			deadline = later(limit_of(w));
		if (!busy || (good && rt_now_ns() >= deadline))
			break;
		if (good) {
			co_wait_answer(w, deadline, "the other side of the log's mirror");
			continue;
		}
		uint64_t tell = began + min(limit_of(w), UINT64_MAX - began);

		co_wait_answer(w, d->told_waiting ? UINT64_MAX : tell, "a side of the log's mirror");
		if (rt_now_ns() >= tell)
			tell_waiting(w, true);
	}
	for (unsigned i = 0; i < d->n; i++) {
		if (sides >> i & 1)
			result[i] = d->side[i]->writing ? -ETIMEDOUT : d->side[i]->result;
	}
	tell_waiting(w, false);
}

co_fn int co_wl_side_write(struct wl_side *s, uint64_t pos, const void *buf, uint64_t len, unsigned flags)
{
	uint64_t deadline = later(limit_of(s->w));

	co_wl_side_start(s, pos, buf, len, flags);
	while (s->writing && rt_now_ns() < deadline)
		co_wait_answer(s->w, deadline, "the new side of the log's mirror");
	return s->writing ? -ETIMEDOUT : s->result;
}

/* --- Reads --- */

static co_fn void co_side_reader(void *arg)
{
	struct wl_side_read *r = arg;
	struct wl_side *s = r->side;

	r->result = co_disk_read(s->disk, r->pos, r->buf, r->len, DISK_BACKGROUND);
	r->answered = true;
	if (r->given_up) {
		rt_buf_put(rt_bufs(), r->buf);
		r->busy = false;
		s->silent--;
	}
	co_queue_wake_all(&s->w->dev.answered);
}

static struct wl_side_read *free_read(struct wl_side *s)
{
	for (unsigned i = 0; i < READS; i++) {
		if (!s->read[i].busy)
			return &s->read[i];
	}
	return NULL;
}

co_fn int co_wl_side_read(struct wl_side *s, uint64_t pos, uint8_t **buf, uint64_t cap, uint64_t len)
{
	uint64_t deadline = later(limit_of(s->w));
	struct wl_side_read *r;

	while (!(r = free_read(s)) && !s->silent && rt_now_ns() < deadline)
		co_wait_answer(s->w, deadline, "a read of the log");
	if (!r || s->silent)
		return -ETIMEDOUT;
	*r = (struct wl_side_read){ .side = s, .pos = pos, .len = len, .buf = *buf, .busy = true };
	while (co_spawn("log mirror read", co_side_reader, r) < 0)
		co_sleep_ns(SPAWN_AGAIN_NS);
	while (!r->answered && rt_now_ns() < deadline)
		co_wait_answer(s->w, deadline, "a read of the log");
	if (r->answered) {
		r->busy = false;
		co_queue_wake_all(&s->w->dev.answered);	/* who waits for a free one */
		return r->result;
	}
	if (!s->silent)
		log_warn("%s: write log device does not answer; it is read from the other side", s->disk->name);
	r->given_up = true;
	s->silent++;
	*buf = co_buf_get(rt_bufs(), cap);
	return -ETIMEDOUT;
}

co_fn int co_wl_pick_side(struct wlog *w, unsigned tried)
{
	struct wl_dev *d = &w->dev;

	for (;;) {
		bool wait = false;

		for (unsigned i = 0; i < d->n; i++) {
			if (!d->disk[i] || !d->in_sync[i] || tried >> i & 1)
				continue;
			if (!d->side[i] || !d->side[i]->silent)
				return i;
			wait = true;
		}
		if (!wait)
			return -1;
		co_queue_wait(&d->answered, "a side of the log's mirror that can be read");
	}
}
