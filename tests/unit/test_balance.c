/* SPDX-License-Identifier: MIT */
/* The reactors' caches lend each other memory: never more than there is, never from who needs it, and back to who is owed it. */
#include "cache/internal.h"
#include "daemon/balance.h"
#include "test_rt.h"
#include "util/rng.h"

#define MIB (1ull << 20)

static uint64_t target(const struct balance *b, unsigned i)
{
	return balance_target(b, i);
}

/* A second in which the parts miss so much. */
static bool second(struct balance *b, uint64_t m0, uint64_t m1)
{
	b->part[0].misses += m0;
	b->part[1].misses += m1;
	balance_told(b);
	return balance_step(b);
}

static struct balance two(uint64_t own)
{
	struct balance b = { .n = 2 };

	for (unsigned i = 0; i < 2; i++)
		b.part[i] = (struct balance_part){ .own = own, .least = own / 8, .most = 2 * own };
	second(&b, 0, 0);
	return b;
}

static void an_idle_one_lends_all_but_a_quarter_and_gets_it_back_when_it_misses(void)
{
	struct balance b = two(32 * MIB);
	unsigned n;

	CHECK(!second(&b, 0, 0));
	CHECK(!second(&b, BALANCE_MISSES - 1, 0));
	CHECK_EQ(target(&b, 0), 32 * MIB);
	for (n = 0; n < 20 && second(&b, 1000, 0); n++)
		CHECK(target(&b, 0) + target(&b, 1) <= 64 * MIB);
	CHECK(target(&b, 1) >= 8 * MIB && target(&b, 1) < 8 * MIB + 4096 && target(&b, 0) > 56 * MIB - 4096);
	CHECK(n <= 7);
	/* The other one goes on missing as much: that is no reason to keep what is not its own. */
	for (n = 0; n < 20 && target(&b, 1) < 32 * MIB - 200; n++)
		CHECK(second(&b, 1000, 100));
	CHECK(n <= 7);
	/* Both miss, each has its own. */
	for (n = 0; n < 100; n++)
		second(&b, 1000, 1000);
	CHECK(target(&b, 0) >= 32 * MIB - 200 && target(&b, 1) >= 32 * MIB - 200);
}

/* Who has all its hits from its part misses as soon as it lends. It does not lend again for a minute. */
static void one_whose_part_is_just_enough_is_tried_once_a_minute(void)
{
	struct balance b = two(32 * MIB);
	unsigned without = 0;

	for (unsigned n = 0; n < 600; n++) {
		second(&b, 1000, target(&b, 1) < 32 * MIB - 200 ? 500 : 0);
		without += target(&b, 1) < 32 * MIB - 200;
		CHECK(target(&b, 1) >= 28 * MIB - 200);
	}
	CHECK(without <= 11);
}

static void ghost_hits_say_who_gets_it(void)
{
	struct balance b = { .n = 3 };

	for (unsigned i = 0; i < 3; i++)
		b.part[i] = (struct balance_part){ .own = 32 * MIB, .most = 96 * MIB };
	for (unsigned n = 0; n < 4; n++) {
		b.part[1].misses += 5000;
		b.part[2].misses += 200;
		b.part[2].ghost_hits += 100;
		balance_step(&b);
	}
	CHECK(target(&b, 2) > 32 * MIB && target(&b, 1) <= 32 * MIB && target(&b, 0) < 32 * MIB);
}

static void check_all(const struct balance *b)
{
	uint64_t own = 0, sum = 0;

	for (unsigned i = 0; i < b->n; i++) {
		own += b->part[i].own;
		sum += target(b, i);
		CHECK(b->lent || target(b, i) == b->part[i].own);
		uint64_t keep = max(b->part[i].own / 4, b->part[i].least);

		CHECK(!b->lent || target(b, i) + 4096 >= min(keep, b->part[i].own));
		CHECK(target(b, i) <= max(b->part[i].most, b->part[i].own));
	}
	CHECK(sum <= own);
}

static void whatever_happens_no_more_is_given_than_there_is(void)
{
	struct rng r;
	uint64_t moves = 0;

	rng_seed(&r, test_seed());
	for (unsigned round = 0; round < test_scale(100); round++) {
		struct balance b = { .n = 1 + rng_below(&r, BALANCE_PARTS) };

		for (unsigned step = 0; step < 100; step++) {
			for (unsigned i = 0; i < b.n; i++) {
				struct balance_part *p = &b.part[i];

				if (!step || rng_below(&r, 200) == 0) {
					p->own = rng_below(&r, 16) ? 4 * MIB + rng_below(&r, 100 * MIB) : 0;
					p->least = rng_below(&r, p->own + MIB);
					p->most = rng_below(&r, 300 * MIB);
				}
				p->misses += rng_below(&r, 4) ? 0 : rng_below(&r, 300);
				p->ghost_hits += rng_below(&r, 4) ? 0 : rng_below(&r, 50);
			}
			balance_told(&b);
			check_all(&b);
			balance_step(&b);
			check_all(&b);
		}
		moves += b.moves;
	}
	printf("  %" PRIu64 " moves\n", moves);
	CHECK(moves > test_scale(100));
}

/* --- With caches, in virtual time --- */

/* A disk without memory of its own: each block of 4 KiB begins with its number. */
static co_fn int numbers_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	for (int i = 0; i < niov; i++) {
		for (uint64_t at = 0; at < iov[i].iov_len; at += 4096) {
			uint64_t word = (off + at) / 4096 + 1;

			memcpy((char *)iov[i].iov_base + at, &word, min(iov[i].iov_len - at, sizeof(word)));
		}
		off += iov[i].iov_len;
	}
	return 0;
}

static co_fn int numbers_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	return 0;
}

static const struct disk_ops numbers_ops = { .driver = "numbers", .co_read = numbers_co_read, .co_write = numbers_co_write };

#define PART (8 * MIB)
#define LARGE 65536u	/* blocks of the caches: few of them make the test quick */

struct server {
	struct cache *c[2];
	struct disk *d[2];
	struct balance b;
};

static co_fn void co_open_cache(struct server *s, unsigned i)
{
	struct cache_config o = { .size = PART, .most = 2 * PART, .block = LARGE, .chunk = 1 << 20, .curve_samples = 16, .no_read_ahead = true };
	struct disk *file = calloc(1, sizeof(*file));
	struct err err = ERR_INIT;

	CHECK_EQ(disk_init(file, &numbers_ops, "numbers", NULL), 0);
	file->size = 64 * MIB;
	CHECK_EQ(cache_create(&o, &s->c[i], &err), 0);
	CHECK_EQ(co_cache_attach(s->c[i], "v", file, CACHE_ALL, &s->d[i], &err), 0);
}

/* Reads `mib` in a loop. How much of it hit, in percent. */
static co_fn unsigned co_loop(struct server *s, unsigned i, uint64_t mib)
{
	const struct cache_counters *n = &volume_of(s->d[i])->count[CACHE_DATA];
	uint64_t hits = n->hits, word;

	for (uint64_t off = 0; off < mib * MIB; off += LARGE) {
		CHECK_EQ(co_disk_read(s->d[i], off, &word, sizeof(word), 0), 0);
		CHECK_EQ(word, off / 4096 + 1);
	}
	return (unsigned)(100 * (n->hits - hits) / (mib * MIB / LARGE));
}

static co_fn void co_apply(struct server *s)
{
	struct err err = ERR_INIT;

	for (unsigned pass = 0; pass < 2; pass++) {
		for (unsigned i = 0; i < 2; i++) {
			uint64_t want = balance_target(&s->b, i), now = cache_size(s->c[i]);

			if (pass ? want > now : want < now)
				CHECK_EQ(co_cache_resize(s->c[i], want, &err), 0);
			CHECK(cache_size(s->c[0]) + cache_size(s->c[1]) <= 2 * PART);
			CHECK(cache_memory(s->c[0]) + cache_memory(s->c[1]) <= 2 * PART);
		}
	}
}

static co_fn void co_second(struct server *s)
{
	for (unsigned i = 0; i < 2; i++) {
		struct cache_use use;

		cache_get_use(s->c[i], &use);
		s->b.part[i].own = PART;
		s->b.part[i].least = cache_least(s->c[i]);
		s->b.part[i].most = cache_most(s->c[i]);
		s->b.part[i].misses = use.misses;
		s->b.part[i].ghost_hits = use.ghost_hits;
	}
	balance_told(&s->b);
	balance_step(&s->b);
	co_apply(s);
	co_sleep_ns(1000000000);
}

static co_fn void co_two_caches(void *arg)
{
	struct server s = { .b.n = 2 };
	unsigned hot = 0, other = 0;

	co_open_cache(&s, 0);
	co_open_cache(&s, 1);
	CHECK(co_loop(&s, 1, 5) == 0 && co_loop(&s, 1, 5) == 100);
	/* Twelve MiB in eight: a loop misses always. Then in what the idle one lends. */
	for (unsigned n = 0; n < 10; n++) {
		hot = co_loop(&s, 0, 12);
		CHECK(n || hot < 10);
		co_second(&s);
	}
	printf("  a loop of 12 MiB with a part of 8: %u %% hits\n", hot);
	CHECK(hot >= 95);
	/* The idle one begins again, with what fits its own part. */
	for (unsigned n = 0; n < 10; n++) {
		co_loop(&s, 0, 16);
		for (unsigned k = 0; k < 4; k++)
			other = co_loop(&s, 1, 5);
		co_second(&s);
	}
	printf("  then one of 5 MiB in what was lent: %u %% hits\n", other);
	CHECK(other >= 95);
	for (unsigned i = 0; i < 2; i++) {
		co_disk_close(s.d[i]);
		cache_destroy(s.c[i]);
	}
}

static void a_hot_cache_hits_by_what_an_idle_one_lends(void)
{
	on_sim(1, co_two_caches, NULL);
}

int main(void)
{
	RUN(an_idle_one_lends_all_but_a_quarter_and_gets_it_back_when_it_misses);
	RUN(one_whose_part_is_just_enough_is_tried_once_a_minute);
	RUN(ghost_hits_say_who_gets_it);
	RUN(whatever_happens_no_more_is_given_than_there_is);
	RUN(a_hot_cache_hits_by_what_an_idle_one_lends);
	return 0;
}
