/* SPDX-License-Identifier: MIT */
/*
 * Read cache: sequential read-ahead.
 *
 * A volume has a few streams: each remembers where a read ended. A read that begins there goes on with the stream; from the third one on, blocks
 * are read ahead of it, in a window that begins at AHEAD_MIN and doubles each time the reader has used half of it. What is read ahead is not yet an access to
 * the policy: it counts as seen once when it is used first.
 *
 * Where the store keeps objects the window grows up to one of them, if memory allows, and from then on read-ahead goes from border to border: a whole object is
 * asked for as soon as half of the one before has been used, and no read touches two.
 *
 * It must pay: each block that was used counts for it, each that was evicted unused counts twice against it. Where that goes below AHEAD_FLOOR, the next
 * AHEAD_PAUSE occasions pass unused, and then it has to prove itself anew.
 */
#include "cache/internal.h"

#define AHEAD_RUNS 2u
#define AHEAD_MIN (128u << 10)
#define AHEAD_MAX (2u << 20)
#define AHEAD_OBJECT (4u << 20)	/* the largest that is read in one step */
#define AHEAD_FLYING 8u
#define AHEAD_SCORE 256
#define AHEAD_FLOOR (-64)
#define AHEAD_PAUSE 256
#define AHEAD_SPARE 64u		/* coroutines that stay for requests */

void ahead_used(struct cache_volume *v)
{
	v->ahead_used++;
	v->ahead_score = min(v->ahead_score + 1, AHEAD_SCORE);
}

void ahead_wasted(struct cache_volume *v)
{
	v->ahead_wasted++;
	v->ahead_score -= 2;
	if (v->ahead_score < AHEAD_FLOOR) {
		v->ahead_score = 0;
		v->ahead_pause = AHEAD_PAUSE;
	}
}

static co_fn void co_ahead_main(void *arg)
{
	struct cache_fill *f = arg;
	struct cache_volume *v = f->v;

	co_fill_run(f, 0);
	v->ahead_flying--;
	fill_put(f);
}

/* Starts to read blocks first..last in the background, as far as there is room, by at most `step` bytes up to the next multiple of it. Returns where it stopped. */
static uint64_t start(struct cache_volume *v, uint64_t first, uint64_t last, uint64_t step)
{
	uint64_t unit = max(step >> v->c->shift, 1ull);

	while (first <= last && v->ahead_flying < AHEAD_FLYING && co_available() > AHEAD_SPARE) {
		struct cache_fill *f;

		if (record_find(v->c, cache_key(v, first)) != REC_NONE || fill_find(v, first)) {
			first++;
			continue;
		}
		f = fill_start(v, CACHE_DATA, first, min(last - first + 1, step ? unit - first % unit : UINT64_MAX), false);
		if (!f)
			break;
		first += f->n;
		v->ahead_read += f->n;
		v->ahead_flying++;
		if (co_spawn("read ahead", co_ahead_main, f) < 0) {
			v->ahead_flying--;
			fill_abort(f);
			break;
		}
	}
	return first;
}

/* The stream that a read at `off` goes on with, or the one that was used least recently, made new. */
static struct cache_stream *stream_of(struct cache_volume *v, uint64_t off)
{
	struct cache_stream *oldest = &v->stream[0];

	for (unsigned i = 0; i < STREAMS; i++) {
		struct cache_stream *s = &v->stream[i];

		if (s->stamp && s->next == off)
			return s;
		if (s->stamp < oldest->stamp)
			oldest = s;
	}
	*oldest = (struct cache_stream){ .next = UINT64_MAX };
	return oldest;
}

bool ahead_note(struct cache_volume *v, uint64_t off, uint64_t len)
{
	struct cache *c = v->c;
	struct cache_stream *s = stream_of(v, off);
	bool goes_on = s->next == off;
	uint64_t end = off + len, stop;
	uint64_t memory = (uint64_t)c->mem.allowed * c->config.chunk / 16, step = min(v->disk.file->limits.object, AHEAD_OBJECT);
	uint32_t most = (uint32_t)min(max(step, (uint64_t)AHEAD_MAX), memory);

	s->next = end;
	s->stamp = ++v->stream_clock;
	if (!goes_on || ++s->runs < AHEAD_RUNS || c->config.no_read_ahead || v->mode != CACHE_ALL)
		return goes_on;
	if (v->ahead_pause) {
		v->ahead_pause--;
		return true;
	}
	if (!s->window)
		s->window = min(AHEAD_MIN, most);
	s->ahead = max(s->ahead, end);
	if (s->ahead - end > s->window / 2)
		return true;
	stop = step && s->window >= step ? align_up(end + s->window / 2, step) : end + s->window;
	stop = min(stop, v->disk.size);
	stop = min(stop, KEY_BLOCKS << c->shift);
	if (s->ahead < stop)
		s->ahead = max(start(v, s->ahead >> c->shift, (stop - 1) >> c->shift, step) << c->shift, s->ahead);
	s->window = min(s->window * 2, most);
	return true;
}
