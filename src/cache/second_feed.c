/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache: what leaves memory goes to the device, a segment at a time.
 *
 *	FREE ──second_feed()──▶ FILLING ──full──▶ FULL ──writer: seal()──▶ WRITING ──▶ FREE
 *
 * A stage begins to fill only if the rate allows a whole segment; while there is none, what leaves memory is gone. Blocks in a stage are in the index and
 * are read from there. seal() moves them to their places on the device, and takes out of the index what is about to be overwritten, at one instant.
 */
#include <errno.h>
#include <string.h>

#include "cache/internal.h"
#include "util/log.h"

static uint32_t stage_slot(const struct second *s, const struct second_stage *st)
{
	return s->slots + (uint32_t)(st - s->stage) * s->entries;
}

/* A token bucket: bytes that may be written. It holds a second's worth, and a segment at least. */
static bool rate_allows(struct second *s)
{
	uint64_t now = rt_now_ns(), most = max(s->rate, (uint64_t)s->sb.segment_size), ns = min(now - s->tokens_ns, (uint64_t)1000000000);

	if (!s->rate)
		return true;
	s->tokens = min(s->tokens + (uint64_t)((double)s->rate * (double)ns / 1e9), most);
	s->tokens_ns = now;
	if (s->tokens < s->sb.segment_size)
		return false;
	s->tokens -= s->sb.segment_size;
	return true;
}

static struct second_stage *begin_stage(struct second *s)
{
	for (unsigned i = 0; i < SECOND_STAGES; i++) {
		struct second_stage *st = &s->stage[i];

		if (st->state != STAGE_FREE || !rate_allows(s))
			continue;
		st->state = STAGE_FILLING;
		st->n = 0;
		return s->filling = st;
	}
	return NULL;
}

void second_feed(struct cache_volume *v, enum cache_class class, uint64_t block, const char *data)
{
	struct second *s = v->c->second;
	struct second_stage *st;
	uint64_t key;

	if (!second_allows(v, class) || s->scanning || s->stop || v->c->ending || v->closing || change_in_flight(v, block))
		return;
	key = second_key((unsigned)v->second.rec, block);
	if (second_find(s, key) != SECOND_NONE)
		return;
	st = s->filling ? s->filling : begin_stage(s);
	if (!st) {
		s->count.skipped++;
		return;
	}
	memcpy(st->mem + SECOND_HEADER + (uint64_t)st->n * SECOND_BLOCK, data, SECOND_BLOCK);
	second_insert(s, stage_slot(s, st) + st->n, key, second_crc(block, s->sb.rec[v->second.rec].epoch, data));
	s->count.fed++;
	if (++st->n < s->entries)
		return;
	st->state = STAGE_FULL;
	s->filling = NULL;
	co_queue_wake_all(&s->wake);
}

/* A block that lost its place in the stage meanwhile, or is about to change, is dead from the start. */
static void move_entry(struct second *s, uint32_t from, uint32_t to, struct second_entry *e)
{
	struct second_slot slot = s->slot[from];

	*e = (struct second_entry){ .dead = true };
	if (slot.key == SECOND_FREE)
		return;
	second_remove(s, from);
	if (s->vol[second_key_rec(slot.key)] && change_in_flight(s->vol[second_key_rec(slot.key)], second_key_block(slot.key)))
		return;
	second_insert(s, to, slot.key, slot.crc);
	*e = (struct second_entry){ .block = second_key_block(slot.key), .epoch = s->sb.rec[second_key_rec(slot.key)].epoch, .crc = slot.crc };
}

static void seal(struct second *s, struct second_stage *st)
{
	static struct second_header h;	/* no suspension in here */
	uint32_t first = s->head * s->entries;

	for (uint32_t i = 0; i < s->entries; i++) {
		if (s->slot[first + i].key == SECOND_FREE)
			continue;
		second_remove(s, first + i);
		s->count.overwritten++;
	}
	s->n_dirty -= s->dirty[s->head];
	s->dirty[s->head] = 0;
	for (uint32_t i = 0; i < st->n; i++)
		move_entry(s, stage_slot(s, st) + i, first + i, &h.entry[i]);
	h.index = s->head;
	h.count = st->n;
	h.seq = s->seq[s->head] = ++s->last_seq;
	second_header_encode(&h, &s->sb.uuid, (uint8_t *)st->mem);
	st->target = s->head;
	st->state = STAGE_WRITING;
	s->head = (s->head + 1) % s->segments;
}

static co_fn void co_write_stage(struct second *s, struct second_stage *st)
{
	uint64_t len = SECOND_HEADER + (uint64_t)st->n * SECOND_BLOCK;
	int r;

	co_mutex_lock(&s->lock);
	if (!s->off && !co_second_tell_unsettled(s)) {
		seal(s, st);
		r = co_disk_write(s->dev, second_segment_at(s->sb.segment_size, st->target), st->mem, len, DISK_BACKGROUND);
		if (r < 0)
			second_fail(s, r, "cannot be written");
		else
			s->count.written_bytes += len;
	}
	st->state = STAGE_FREE;
	co_mutex_unlock(&s->lock);
}

static struct second_stage *full_stage(struct second *s)
{
	for (unsigned i = 0; i < SECOND_STAGES; i++) {
		struct second_stage *st = &s->stage[i];

		if (st->state == STAGE_FULL || (s->stop && st->state == STAGE_FILLING && st->n))
			return st;
	}
	return NULL;
}

/* At the end what is left in a stage is written as well: its volumes have settled by then. */
co_fn void co_second_writer(void *arg)
{
	struct second *s = arg;

	while (!s->off) {
		struct second_stage *st = full_stage(s);

		if (st)
			co_write_stage(s, st);
		else if (s->stop)
			break;
		else
			co_queue_wait(&s->wake, "a segment for the second level");
	}
	s->running--;
	co_queue_wake_all(&s->idle);
}
