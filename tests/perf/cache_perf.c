/* SPDX-License-Identifier: MIT */
/*
 * What the read cache costs and saves in processor time, apart from any client: random requests of 4 KiB on a disk in memory. CPU time of the thread; each way
 * is measured next to the disk itself at the same places, in many short rounds, so that other processes disturb both alike. Medians, with quartiles.
 */
#include <time.h>

#include "blk/spec.h"
#include "cache/cache.h"
#include "cache/shards.h"
#include "unit/test_rt.h"
#include "util/bytes.h"
#include "util/rng.h"

#define BLOCK 4096u
#define SIZE (512ull << 20)
#define HOT (256ull << 20)
#define REQUESTS 5000u
#define ROUNDS 25

static uint64_t cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct way {
	const char *name;
	uint64_t size;		/* of the range that is read */
	bool write;
	struct disk *d, *against;	/* measured, and what its cost is compared with */
	double ns[ROUNDS], more[ROUNDS];
};

static co_fn double co_measure(struct way *w, struct disk *d, uint64_t seed)
{
	static char buf[BLOCK] __attribute__((aligned(BLOCK)));
	uint64_t start;
	struct rng r;

	rng_seed(&r, seed);
	start = cpu_ns();
	for (unsigned i = 0; i < REQUESTS; i++) {
		uint64_t off = rng_below(&r, w->size / BLOCK) * BLOCK;

		CHECK_EQ(w->write ? co_disk_write(d, off, buf, BLOCK, 0) : co_disk_read(d, off, buf, BLOCK, 0), 0);
	}
	return (double)(cpu_ns() - start) / REQUESTS;
}

static int by_value(const void *a, const void *b)
{
	return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b;
}

static void print_way(struct way *w)
{
	qsort(w->ns, ROUNDS, sizeof(double), by_value);
	qsort(w->more, ROUNDS, sizeof(double), by_value);
	printf("%-44s %6.0f ns (%.0f to %.0f)", w->name, w->ns[ROUNDS / 2], w->ns[ROUNDS / 4], w->ns[3 * ROUNDS / 4]);
	if (w->against)
		printf(", over the disk itself %+5.0f (%+.0f to %+.0f)", w->more[ROUNDS / 2], w->more[ROUNDS / 4], w->more[3 * ROUNDS / 4]);
	printf("\n");
}

/* What the miss-ratio curve adds to each of these: it is part of a hit, and of a miss. */
static void print_curve(void)
{
	struct shards *s = shards_init(calloc(1, shards_bytes(2048)), 2048);
	double ns[ROUNDS];
	struct rng r;

	rng_seed(&r, 1);
	for (unsigned k = 0; k < ROUNDS; k++) {
		uint64_t start = cpu_ns();

		for (unsigned i = 0; i < 100 * REQUESTS; i++)
			shards_access(s, rng_below(&r, SIZE / BLOCK));
		ns[k] = (double)(cpu_ns() - start) / (100 * REQUESTS);
	}
	qsort(ns, ROUNDS, sizeof(double), by_value);
	printf("%-44s %6.1f ns (%.1f to %.1f), %.2f %% of them sampled\n", "the curve, of an access (and a random number)", ns[ROUNDS / 2], ns[ROUNDS / 4], ns[3 * ROUNDS / 4],
	       100.0 * (double)s->sampled / (double)s->accesses);
	free(s);
}

static co_fn struct disk *co_layer(struct cache *c, struct disk *mem, enum cache_mode mode)
{
	struct err err = ERR_INIT;
	struct disk *d;

	CHECK_EQ(co_cache_attach(c, mode == CACHE_NONE ? "none" : "all", mem, mode, &d, &err), 0);
	return d;
}

static co_fn void co_main(void *arg)
{
	struct cache_config large = { .size = 300 << 20, .no_read_ahead = true }, small = { .size = 16 << 20, .no_read_ahead = true };
	struct cache *big, *little;
	struct err err = ERR_INIT;
	struct disk *mem, *hit, *miss, *none;
	static char chunk[1 << 20];

	CHECK_EQ(co_disk_open("mem:512M", DISK_OPEN_RDWR, &mem, &err), 0);
	memset(chunk, 7, sizeof(chunk));
	for (uint64_t off = 0; off < SIZE; off += sizeof(chunk))
		CHECK_EQ(co_disk_write(mem, off, chunk, sizeof(chunk), 0), 0);
	CHECK(!cache_create(&large, &big, &err) && !cache_create(&small, &little, &err));
	hit = co_layer(big, mem, CACHE_ALL);
	miss = co_layer(little, mem, CACHE_ALL);
	none = co_layer(little, mem, CACHE_NONE);
	for (uint64_t off = 0; off < HOT; off += sizeof(chunk))
		CHECK_EQ(co_disk_read(hit, off, chunk, sizeof(chunk), 0), 0);

	static struct way way[] = {
		{ "the disk itself", SIZE },
		{ "primarycache=none", SIZE },
		{ "97 % miss", SIZE },
		{ "hits of 256 MiB", HOT },
		{ "hits of 1 MiB", 1 << 20 },
		{ "writes of what is cached", HOT, true },
	};
	struct disk *const of[] = { mem, none, miss, hit, hit, hit };

	for (unsigned i = 0; i < ARRAY_SIZE(way); i++) {
		way[i].d = of[i];
		way[i].against = i ? mem : NULL;
	}
	for (unsigned k = 0; k < ROUNDS; k++) {
		for (unsigned i = 0; i < ARRAY_SIZE(way); i++) {
			struct way *w = &way[i];
			double first, second;

			/* The same places, in turns, when both have been there before. */
			co_measure(w, mem, k);
			co_measure(w, w->d, k);
			first = co_measure(w, k % 2 ? mem : w->d, k);
			second = co_measure(w, k % 2 ? w->d : mem, k);
			w->ns[k] = k % 2 ? second : first;
			w->more[k] = w->ns[k] - (k % 2 ? first : second);
		}
	}
	for (unsigned i = 0; i < ARRAY_SIZE(way); i++)
		print_way(&way[i]);
	hit->file = miss->file = none->file = NULL;	/* one disk */
	co_disk_close(hit);
	co_disk_close(miss);
	co_disk_close(none);
	cache_destroy(big);
	cache_destroy(little);
	co_disk_close(mem);
}

int main(void)
{
	backends_register();
	print_curve();
	on_real(co_main, NULL);
	return 0;
}
