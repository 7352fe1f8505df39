/* SPDX-License-Identifier: MIT */
/*
 * The NBD client's copy of unflushed writes against a model: two images, what clients see and what the server has on stable media. At a random moment the
 * server restarts with any part of the unflushed changes, and the plan must turn every such image into what clients saw, never write to
 * what was durable and not changed since, and never cover the same byte twice.
 */
#include "backend/nbd_replay.h"
#include "lib/test.h"
#include "util/bytes.h"
#include "util/rng.h"

#define UNIT 16u
#define UNITS 128u
#define IMAGE (UNIT * UNITS)
#define RING 1024u

struct model {
	struct rng rng;
	struct nbd_replay *r;
	uint8_t seen[IMAGE], stable[IMAGE];
	bool dirty[UNITS];	/* changed since the last flush by something that is not durable */
	uint64_t stamp, last[UNITS]; /* changes are counted; the last one of each unit */
};

static void change(struct model *m)
{
	uint64_t off = rng_below(&m->rng, UNITS), n = 1 + rng_below(&m->rng, min(UNITS - off, (uint64_t)20));
	enum nbd_replay_kind kind = rng_below(&m->rng, 3);
	uint8_t data[20 * UNIT];
	uint64_t len = n * UNIT, split = rng_below(&m->rng, len + 1), bytes = kind == NBD_REPLAY_WRITE ? len : 0;
	struct iovec iov[2] = { { data, split }, { data + split, len - split } };

	if (kind == NBD_REPLAY_ZERO)
		memset(data, 0, len);
	else
		rng_fill(&m->rng, data, len);
	if (!nbd_replay_reserve(m->r, bytes))
		return;
	if (rng_below(&m->rng, 10) == 0) {
		nbd_replay_release(m->r, bytes);	/* the request failed */
		return;
	}
	nbd_replay_add(m->r, kind, 0, off * UNIT, len, iov, 2, bytes);
	memcpy(m->seen + off * UNIT, data, len);
	m->stamp++;
	for (uint64_t i = off; i < off + n; i++) {
		m->dirty[i] = kind != NBD_REPLAY_DURABLE;
		m->last[i] = m->stamp;
	}
	if (kind == NBD_REPLAY_DURABLE)
		memcpy(m->stable + off * UNIT, data, len);
}

static void flush(struct model *m)
{
	uint64_t mark = nbd_replay_mark(m->r), stamp = m->stamp;
	uint8_t then[IMAGE];

	memcpy(then, m->seen, IMAGE);
	for (uint64_t n = rng_below(&m->rng, 3); n; n--)
		change(m);		/* completed while the flush was on its way: not covered */
	nbd_replay_drop(m->r, mark);
	for (unsigned i = 0; i < UNITS; i++) {
		if (m->last[i] <= stamp) {
			memcpy(m->stable + i * UNIT, m->seen + i * UNIT, UNIT);
			m->dirty[i] = false;
		} else if (m->dirty[i]) {
			memcpy(m->stable + i * UNIT, then + i * UNIT, UNIT);
		}
	}
}

static void restart(struct model *m)
{
	uint64_t max = UNIT * (1 + rng_below(&m->rng, 8));
	uint8_t image[IMAGE];
	bool sent[UNITS] = { false };
	struct nbd_replay_op op;

	/* The server has kept some of the unflushed changes, and garbage in between stands for versions in the middle. */
	for (unsigned i = 0; i < UNITS; i++) {
		const uint8_t *from = rng_below(&m->rng, 2) ? m->stable : m->seen;

		memcpy(image + i * UNIT, from + i * UNIT, UNIT);
		if (m->dirty[i] && rng_below(&m->rng, 3) == 0)
			rng_fill(&m->rng, image + i * UNIT, UNIT);
	}
	nbd_replay_begin(m->r);
	while (nbd_replay_next(m->r, max, &op)) {
		CHECK(op.len && is_aligned(op.off, UNIT) && is_aligned(op.len, UNIT) && op.off + op.len <= IMAGE);
		CHECK(op.kind == NBD_REPLAY_WRITE || op.kind == NBD_REPLAY_ZERO);
		CHECK(op.kind == NBD_REPLAY_ZERO || op.len <= max);
		for (uint64_t i = op.off / UNIT; i < (op.off + op.len) / UNIT; i++) {
			CHECK(!sent[i]);
			sent[i] = true;
		}
		if (op.kind == NBD_REPLAY_ZERO) {
			memset(image + op.off, 0, op.len);
			continue;
		}
		uint64_t at = op.off;

		for (int i = 0; i < op.niov; i++) {
			memcpy(image + at, op.iov[i].iov_base, op.iov[i].iov_len);
			at += op.iov[i].iov_len;
		}
		CHECK_EQ(at, op.off + op.len);
	}
	for (unsigned i = 0; i < UNITS; i++) {
		if (memcmp(image + i * UNIT, m->seen + i * UNIT, UNIT))
			test_fail("unit %u is not what clients saw", i);
		CHECK_EQ(sent[i], m->dirty[i]);
	}
}

static void a_replay_restores_what_clients_saw(void)
{
	struct model m = { 0 };

	rng_seed(&m.rng, test_seed());
	for (uint64_t round = 0; round < test_scale(300); round++) {
		m.r = nbd_replay_create(RING);
		CHECK(m.r);
		memset(m.dirty, 0, sizeof(m.dirty));
		memcpy(m.stable, m.seen, IMAGE);
		for (int i = 0; i < 200; i++) {
			uint64_t dice = rng_below(&m.rng, 20);

			if (dice == 0)
				flush(&m);
			else if (dice <= 2)
				restart(&m);
			else
				change(&m);
			CHECK(nbd_replay_bytes(m.r) <= RING);
		}
		nbd_replay_drop(m.r, nbd_replay_mark(m.r));
		CHECK(nbd_replay_is_empty(m.r));
		CHECK_EQ(nbd_replay_bytes(m.r), 0);
		nbd_replay_destroy(m.r);
	}
}

static void reservations_bound_bytes_and_entries(void)
{
	struct nbd_replay *r = nbd_replay_create(1 << 20);
	uint8_t byte = 1;
	struct iovec iov = { &byte, 1 };
	unsigned n = 0;

	CHECK(r);
	CHECK(nbd_replay_reserve(r, 1 << 20));
	CHECK(!nbd_replay_reserve(r, 1));
	CHECK(nbd_replay_reserve(r, 0));
	nbd_replay_release(r, 0);
	nbd_replay_release(r, 1 << 20);
	while (nbd_replay_reserve(r, 1)) {
		nbd_replay_add(r, NBD_REPLAY_WRITE, 0, n++ * 2, 1, &iov, 1, 1);
		CHECK(n < 1 << 20);
	}
	CHECK_EQ(nbd_replay_bytes(r), n);
	nbd_replay_drop(r, nbd_replay_mark(r) - 1);
	CHECK_EQ(nbd_replay_bytes(r), 1);
	CHECK(!nbd_replay_is_empty(r));
	nbd_replay_destroy(r);
}

static void fua_alone_keeps_nothing(void)
{
	struct nbd_replay *r = nbd_replay_create(1 << 20);

	CHECK(r);
	for (int i = 0; i < 100000; i++) {
		CHECK(nbd_replay_reserve(r, 0));
		nbd_replay_add(r, NBD_REPLAY_DURABLE, 0, i * 512, 512, NULL, 0, 0);
		CHECK(nbd_replay_is_empty(r));
	}
	nbd_replay_destroy(r);
}

int main(void)
{
	RUN(a_replay_restores_what_clients_saw);
	RUN(reservations_bound_bytes_and_entries);
	RUN(fua_alone_keeps_nothing);
	return 0;
}
