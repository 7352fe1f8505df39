/* SPDX-License-Identifier: MIT */
/* Copy-on-write media against plain arrays. */
#include "backend/media.h"
#include "lib/test.h"
#include "util/rng.h"

#define SIZE 1000000u
#define CLONES 6

struct pair {
	struct media *m;
	uint8_t *model;
};

static uint8_t buf[SIZE];

static void compare(const struct pair *p)
{
	media_read(p->m, 0, buf, SIZE);
	CHECK(!memcmp(buf, p->model, SIZE));
}

static void clones_share_but_never_show_each_others_writes(void)
{
	struct pair p[CLONES] = { { media_create(SIZE), calloc(1, SIZE) } };
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (unsigned i = 1; i < CLONES; i++)
		p[i] = (struct pair){ media_clone(p[0].m), calloc(1, SIZE) };
	for (unsigned round = 0; round < 3000; round++) {
		struct pair *a = &p[rng_below(&rng, CLONES)], *b = &p[rng_below(&rng, CLONES)];
		uint64_t len = rng_below(&rng, rng_below(&rng, 8) ? 9000 : 300000), off = rng_below(&rng, SIZE - len + 1), diff;

		switch (rng_below(&rng, 8)) {
		case 0:
			if (a == b)
				break;
			media_destroy(a->m);
			a->m = media_clone(b->m);
			memcpy(a->model, b->model, SIZE);
			break;
		case 1:
			media_zero(a->m, off, len);
			memset(a->model + off, 0, len);
			break;
		case 2:
			CHECK_EQ(media_equal(a->m, b->m, off, len, &diff), !memcmp(a->model + off, b->model + off, len));
			if (memcmp(a->model + off, b->model + off, len))
				CHECK(a->model[diff] != b->model[diff] && !memcmp(a->model + off, b->model + off, diff - off));
			break;
		case 3:
			media_read(a->m, off, buf, len);
			CHECK(!memcmp(buf, a->model + off, len));
			break;
		default:
			rng_fill(&rng, a->model + off, len);
			media_write(a->m, off, a->model + off, len);
		}
	}
	for (unsigned i = 0; i < CLONES; i++) {
		compare(&p[i]);
		media_destroy(p[i].m);
		free(p[i].model);
	}
}

static void what_was_never_written_costs_nothing(void)
{
	struct media *m = media_create(1ull << 40), *c;
	bool hole;

	CHECK_EQ(media_allocated(m), 0);
	media_write(m, (1ull << 39) + 5, "x", 1);
	CHECK_EQ(media_allocated(m), MEDIA_CHUNK);
	CHECK_EQ(media_extent(m, (1ull << 39) - 4096, 1 << 20, &hole), 4096);
	CHECK(hole);
	CHECK_EQ(media_extent(m, 1ull << 39, 1 << 20, &hole), 4096);
	CHECK(!hole);
	c = media_clone(m);
	media_zero(c, 1ull << 39, 4096);
	CHECK_EQ(media_allocated(c), 0);
	CHECK_EQ(media_allocated(m), MEDIA_CHUNK);
	media_destroy(c);
	media_destroy(m);
}

static void a_shrunk_and_grown_medium_is_zero_at_the_end(void)
{
	struct media *m = media_create(10000);
	uint8_t b[3];

	media_write(m, 5000, "abc", 3);
	media_resize(m, 5001);
	media_resize(m, 2000000);
	media_read(m, 5000, b, 3);
	CHECK_EQ(b[0], 'a');
	CHECK_EQ(b[1], 0);
	media_write(m, 1999999, "z", 1);
	CHECK_EQ(media_size(m), 2000000);
	media_destroy(m);
	media_destroy(NULL);
}

int main(void)
{
	RUN(clones_share_but_never_show_each_others_writes);
	RUN(what_was_never_written_costs_nothing);
	RUN(a_shrunk_and_grown_medium_is_zero_at_the_end);
	return 0;
}
