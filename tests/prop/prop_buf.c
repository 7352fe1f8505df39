/* SPDX-License-Identifier: MIT */
/* The buffer pool: random sizes in random order never overlap, are never lost, and always grow together again. */
#include "lib/test.h"
#include "rt/buf.h"
#include "util/rng.h"

#define HELD 2000
#define PAGES (2u * RT_BUF_MAX / RT_BUF_ALIGN)

struct held {
	char *buf;
	size_t len;
};

static struct held held[HELD];
static unsigned held_n;
static uint16_t owner[PAGES];	/* 0: free */
static char *base;
static struct rng rng;
static struct rt_bufpool *pool;

static size_t random_len(unsigned bias)
{
	size_t max = (size_t)RT_BUF_ALIGN << rng_below(&rng, 2 + bias);

	return 1 + rng_below(&rng, max > RT_BUF_MAX ? RT_BUF_MAX : max);
}

static void claim(const struct held *h, uint16_t from, uint16_t to)
{
	size_t first = (size_t)(h->buf - base) / RT_BUF_ALIGN, last = (size_t)(h->buf + h->len - 1 - base) / RT_BUF_ALIGN;

	CHECK(h->buf >= base && last < PAGES);
	for (size_t i = first; i <= last; i++) {
		CHECK_EQ(owner[i], from);
		owner[i] = to;
	}
}

static void get(size_t len)
{
	struct held h = { .buf = rt_buf_tryget(pool, len), .len = len };

	if (!h.buf) {
		/* With half of it free, a small one always fits. */
		CHECK(len > RT_BUF_ALIGN || rt_bufpool_used(pool) == rt_bufpool_size(pool));
		return;
	}
	CHECK((uintptr_t)h.buf % RT_BUF_ALIGN == 0);
	claim(&h, 0, 1);
	held[held_n++] = h;
}

static void put(void)
{
	unsigned i = (unsigned)rng_below(&rng, held_n);

	claim(&held[i], 1, 0);
	rt_buf_put(pool, held[i].buf);
	held[i] = held[--held_n];
}

static void check_used(void)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < held_n; i++) {
		uint64_t block = RT_BUF_ALIGN;

		while (block < held[i].len)
			block *= 2;
		sum += block;
	}
	CHECK_EQ(rt_bufpool_used(pool), sum);
}

int main(void)
{
	uint64_t seed = test_seed(), n = test_scale(200000);
	struct rt *rt;
	void *whole[2];

	CHECK_EQ(rt_create_sim(&(struct rt_config){ .coroutines = 1 }, seed, &rt, NULL), 0);
	CHECK_EQ(rt_bufpool_create(rt, 2u * RT_BUF_MAX, &pool, NULL), 0);
	for (int i = 0; i < 2; i++)
		CHECK(whole[i] = rt_buf_tryget(pool, RT_BUF_MAX));
	base = whole[0] < whole[1] ? whole[0] : whole[1];
	for (int i = 0; i < 2; i++)
		rt_buf_put(pool, whole[i]);
	rng_seed(&rng, seed);
	for (uint64_t i = 0; i < n; i++) {
		/* Phases that fill and phases that empty, of small and of large buffers. */
		bool fill = rng_below(&rng, 100) < (i / 3000 % 2 ? 40 : 60);

		if (fill && held_n < HELD)
			get(random_len(i / 7000 % 13));
		else if (held_n)
			put();
		if (i % 1000 == 0)
			check_used();
	}
	while (held_n)
		put();
	CHECK_EQ(rt_bufpool_used(pool), 0u);
	for (int i = 0; i < 2; i++)
		CHECK(whole[i] = rt_buf_tryget(pool, RT_BUF_MAX));
	for (int i = 0; i < 2; i++)
		rt_buf_put(pool, whole[i]);
	rt_bufpool_destroy(pool);
	rt_destroy(rt);
	return 0;
}
