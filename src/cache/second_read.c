/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache: reading back.
 *
 * A read of the device goes to memory of its own in a coroutine of its own: when the device hangs, who waits goes to the image, and the memory stays behind.
 */
#include <errno.h>
#include <string.h>

#include "cache/internal.h"

#define READ_TIMEOUT_NS 1000000000ull

bool second_allows(const struct cache_volume *v, enum cache_class class)
{
	if (v->second.rec < 0 || v->c->second->off)
		return false;
	return class == CACHE_METADATA ? v->second.mode != CACHE_NONE : v->second.mode == CACHE_ALL;
}

bool second_has(const struct cache_volume *v, uint64_t block)
{
	return v->second.blocks && second_find(v->c->second, second_key((unsigned)v->second.rec, block)) != SECOND_NONE;
}

/* Where the block is in memory: in a stage, or in a segment that is being written. */
static const char *staged(const struct second *s, uint32_t slot)
{
	if (slot >= s->slots) {
		uint32_t i = slot - s->slots;

		return s->stage[i / s->entries].mem + SECOND_HEADER + (uint64_t)(i % s->entries) * SECOND_BLOCK;
	}
	for (unsigned i = 0; i < SECOND_STAGES; i++) {
		const struct second_stage *st = &s->stage[i];

		if (st->state == STAGE_WRITING && st->target == slot / s->entries)
			return st->mem + SECOND_HEADER + (uint64_t)(slot % s->entries) * SECOND_BLOCK;
	}
	return NULL;
}

static uint64_t slot_at(const struct second *s, uint32_t slot)
{
	return second_segment_at(s->sb.segment_size, slot / s->entries) + SECOND_HEADER + (uint64_t)(slot % s->entries) * SECOND_BLOCK;
}

static void op_put(struct second_op *op)
{
	struct second *s = op->s;

	op->next = s->op_free;
	s->op_free = op;
	if (!--s->ops)
		co_queue_wake_all(&s->idle);
}

/* Neighbours in one read. */
static co_fn void co_op_main(void *arg)
{
	struct second_op *op = arg;
	struct second *s = op->s;

	op->error = 0;
	for (unsigned i = 0, n; i < op->n && !op->error; i += n) {
		n = 1;
		while (i + n < op->n && op->slot[i + n] == op->slot[i] + n && op->slot[i + n] % s->entries)
			n++;
		op->error = co_disk_read(s->dev, slot_at(s, op->slot[i]), op->buf + i * SECOND_BLOCK, (uint64_t)n * SECOND_BLOCK, 0);
	}
	op->done = true;
	if (op->abandoned)
		op_put(op);
	else
		co_queue_wake_all(&op->q);
}

/* -EAGAIN: too many are reading. */
static co_fn int co_op_run(struct second_op *op)
{
	struct second *s = op->s;
	uint64_t deadline = rt_now_ns() + READ_TIMEOUT_NS;

	op->done = op->abandoned = false;
	co_queue_init(&op->q);
	if (co_spawn("second level read", co_op_main, op) < 0)
		return -EAGAIN;
	while (!op->done && co_queue_wait_until(&op->q, deadline, "the second level of the cache"))
		;
	if (!op->done) {
		op->abandoned = true;
		s->count.timeouts++;
		second_fail(s, -ETIMEDOUT, "does not answer");
		return -ETIMEDOUT;
	}
	if (op->error)
		second_fail(s, op->error, "cannot be read");
	return op->error;
}

/* Copies block i of the read to the fill, if it is what it should be. */
static bool take_block(struct second_op *op, unsigned i, uint64_t key, uint32_t crc, uint64_t epoch, char *to)
{
	struct second *s = op->s;
	const char *data = op->buf + i * SECOND_BLOCK;

	if (second_crc(second_key_block(key), epoch, data) == crc) {
		memcpy(to, data, SECOND_BLOCK);
		return true;
	}
	/* Unless it was overwritten meanwhile, as it may be. */
	if (s->slot[op->slot[i]].key == key && s->slot[op->slot[i]].crc == crc) {
		s->count.checksum_errors++;
		second_drop(s, op->slot[i]);
	}
	return false;
}

static co_fn int co_read_places(struct cache_fill *f, struct second_op *op, const unsigned *which)
{
	struct second *s = op->s;
	struct cache_volume *v = f->v;
	uint64_t epoch = s->sb.rec[v->second.rec].epoch;
	uint32_t crc[SECOND_RUN];
	int r;

	for (unsigned i = 0; i < op->n; i++)
		crc[i] = s->slot[op->slot[i]].crc;
	r = co_op_run(op);
	for (unsigned i = 0; i < op->n && !r; i++)
		if (!take_block(op, i, second_key((unsigned)v->second.rec, f->first + which[i]), crc[i], epoch,
				mem_addr(&v->c->mem, f->slot[which[i]])))
			r = -EBADMSG;
	if (!op->abandoned)
		op_put(op);
	return r;
}

co_fn int co_second_read(struct cache_fill *f)
{
	struct cache_volume *v = f->v;
	struct second *s = v->c->second;
	struct second_op *op = s->op_free;
	unsigned which[SECOND_RUN], n = 0;
	int r = 0;

	if (s->off || !op || f->n > SECOND_RUN)
		return -EAGAIN;
	for (uint32_t i = 0; i < f->n; i++) {
		uint32_t slot = second_find(s, second_key((unsigned)v->second.rec, f->first + i));
		const char *mem = slot == SECOND_NONE ? NULL : staged(s, slot);

		if (slot == SECOND_NONE)
			return -ENOENT;
		if (mem) {
			memcpy(mem_addr(&v->c->mem, f->slot[i]), mem, SECOND_BLOCK);
		} else {
			which[n] = i;
			op->slot[n++] = slot;
		}
	}
	if (n) {
		s->op_free = op->next;
		s->ops++;
		op->n = n;
		r = co_read_places(f, op, which);
	}
	if (!r) {
		s->count.hits += f->n;
		v->second.hits += f->n;
	}
	return r;
}
