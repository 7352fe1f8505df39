/* SPDX-License-Identifier: MIT */
/* The log's interval map against an array with one cell a byte, under random insertions and removals. */
#include <errno.h>

#include "lib/test.h"
#include "util/bytes.h"
#include "util/rng.h"
#include "wlog/format.h"
#include "wlog/map.h"

#define SPACE 600u
#define BATCHES 8u

struct cell {
	uint64_t rno, seq;	/* 0: nothing */
	uint32_t data;
	uint8_t type;
};

static struct cell model[SPACE];
static struct wl_batch batch[BATCHES];

static void compare(const struct wl_map *m)
{
	uint64_t bytes = 0, entries = 0, at = 0;
	unsigned on_batches = 0;

	for (const struct wl_entry *e = wl_map_find(m, 0); e; e = wl_map_next(e)) {
		CHECK(e->off >= at && e->len > 0);
		for (; at < e->off; at++)
			CHECK_EQ(model[at].rno, 0);
		for (; at < e->off + e->len; at++) {
			CHECK(at < SPACE);
			CHECK_EQ(model[at].rno, e->rno);
			CHECK_EQ(model[at].seq, e->batch->seq);
			CHECK_EQ(model[at].type, e->type);
			if (e->type == WL_WRITE)
				CHECK_EQ(model[at].data, e->data + (at - e->off));
			bytes += e->type == WL_WRITE;
		}
		entries++;
	}
	for (; at < SPACE; at++)
		CHECK_EQ(model[at].rno, 0);
	CHECK_EQ(m->bytes, bytes);
	CHECK_EQ(m->entries, entries);
	for (unsigned i = 0; i < BATCHES; i++)
		list_for_each(&batch[i].entries, n)
			on_batches += n != NULL;
	CHECK_EQ(on_batches, entries);
}

static void random_range(struct rng *r, uint64_t *off, uint64_t *len)
{
	*off = rng_below(r, SPACE);
	*len = 1 + rng_below(r, min(SPACE - *off, (uint64_t)(rng_below(r, 4) ? 30 : SPACE)));
}

static void the_map_agrees_with_an_array(void)
{
	struct rng r;
	struct wl_pool pool;
	struct wl_map m;
	uint64_t seed = test_seed();

	rng_seed(&r, seed);
	CHECK_EQ(wl_pool_init(&pool, 4 * SPACE), 0);
	wl_map_init(&m);
	for (unsigned i = 0; i < BATCHES; i++) {
		batch[i].seq = i + 1;
		list_init(&batch[i].entries);
	}
	for (uint64_t step = 1; step <= 30000; step++) {
		uint64_t off, len;

		random_range(&r, &off, &len);
		if (rng_below(&r, 3)) {
			bool only_newer = rng_below(&r, 3) == 0;
			struct wl_entry t = { .batch = &batch[rng_below(&r, BATCHES)], .off = off, .len = len,
					      .rno = only_newer ? 1 + rng_below(&r, step) : step, .data = 128 + rng_below(&r, 1000),
					      .type = 1 + rng_below(&r, 3) };

			CHECK_EQ(wl_map_insert(&m, &pool, &t, only_newer), 0);
			for (uint64_t i = off; i < off + len; i++)
				if (!only_newer || model[i].rno <= t.rno)
					model[i] = (struct cell){ t.rno, t.batch->seq, t.data + (uint32_t)(i - off), t.type };
		} else {
			uint64_t max_seq = 1 + rng_below(&r, BATCHES), max_rno = rng_below(&r, 2) ? UINT64_MAX : rng_below(&r, step);

			wl_map_remove(&m, &pool, off, len, max_seq, max_rno);
			for (uint64_t i = off; i < off + len; i++)
				if (model[i].seq <= max_seq && model[i].rno <= max_rno)
					model[i] = (struct cell){ 0 };
		}
		if (step % 7 == 0)
			compare(&m);
	}
	wl_map_clear(&m, &pool);
	CHECK_EQ(pool.used, 0);
	wl_pool_fini(&pool);
}

static void an_empty_pool_fails_and_changes_nothing(void)
{
	struct wl_pool pool;
	struct wl_map m;
	struct wl_entry t = { .batch = &batch[0], .len = 10, .rno = 1, .type = WL_WRITE, .data = 128 };

	CHECK_EQ(wl_pool_init(&pool, 4), 0);
	wl_map_init(&m);
	memset(model, 0, sizeof(model));
	for (unsigned i = 0; i < 3; i++, t.off += 20)
		CHECK_EQ(wl_map_insert(&m, &pool, &t, false), i < 3 ? 0 : -ENOSPC);
	CHECK_EQ(wl_map_insert(&m, &pool, &t, false), -ENOSPC);
	CHECK_EQ(m.entries, 3);
	/* A removal from the middle of a piece takes the last entry; another one finds none, and leaves its piece. */
	CHECK_EQ(wl_map_remove(&m, &pool, 3, 2, 1, 1), 2);
	CHECK_EQ(wl_map_remove(&m, &pool, 23, 2, 1, 1), 0);
	CHECK_EQ(m.bytes, 28);
	wl_map_clear(&m, &pool);
	wl_pool_fini(&pool);
}

int main(void)
{
	RUN(the_map_agrees_with_an_array);
	RUN(an_empty_pool_fails_and_changes_nothing);
	return 0;
}
