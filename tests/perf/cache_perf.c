/* SPDX-License-Identifier: MIT */
/*
 * What the read cache costs and saves in processor time, apart from any client: random reads of 4 KiB on a disk in memory. The least of several
 * rounds, in CPU time of the thread, so that other processes disturb little.
 */
#include <time.h>

#include "blk/spec.h"
#include "cache/cache.h"
#include "unit/test_rt.h"
#include "util/rng.h"

#define BLOCK 4096u
#define SIZE (512ull << 20)
#define READS 100000u
#define ROUNDS 7

static uint64_t cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static co_fn double co_measure(struct disk *d, uint64_t size, bool write)
{
	static char buf[BLOCK] __attribute__((aligned(BLOCK)));
	double best = 1e9;
	struct rng r;

	rng_seed(&r, 1);
	for (unsigned k = 0; k < ROUNDS; k++) {
		uint64_t start = cpu_ns();

		for (unsigned i = 0; i < READS; i++) {
			uint64_t off = rng_below(&r, size / BLOCK) * BLOCK;
			int ret = write ? co_disk_write(d, off, buf, BLOCK, 0) : co_disk_read(d, off, buf, BLOCK, 0);

			CHECK_EQ(ret, 0);
		}
		best = (double)(cpu_ns() - start) / READS < best ? (double)(cpu_ns() - start) / READS : best;
	}
	return best;
}

static co_fn void co_main(void *arg)
{
	struct cache_config o = { .size = 300 << 20 };
	struct err err = ERR_INIT;
	struct disk *mem, *d;
	struct cache *c;
	static char chunk[1 << 20];

	CHECK_EQ(co_disk_open("mem:512M", DISK_OPEN_RDWR, &mem, &err), 0);
	memset(chunk, 7, sizeof(chunk));
	for (uint64_t off = 0; off < SIZE; off += sizeof(chunk))
		CHECK_EQ(co_disk_write(mem, off, chunk, sizeof(chunk), 0), 0);
	for (unsigned small = 0; small < 2; small++) {
		double direct = co_measure(mem, SIZE, false), write = co_measure(mem, SIZE, true);

		o.size = small ? 16 << 20 : 300 << 20;
		CHECK_EQ(cache_create(&o, &c, &err), 0);
		CHECK_EQ(co_cache_attach(c, "v", mem, CACHE_NONE, &d, &err), 0);
		printf("cache of %u MiB: direct %.0f ns, primarycache=none %+.0f ns", (unsigned)(o.size >> 20), direct, co_measure(d, SIZE, false) - direct);
		co_cache_set_mode(d, CACHE_ALL);
		if (small)
			printf(", 97 %% misses %+.0f ns\n", co_measure(d, SIZE, false) - direct);
		else
			printf(", hits of 256 MiB %.0f ns, of 1 MiB %.0f ns; writes %+.0f ns\n", co_measure(d, 256 << 20, false),
			       co_measure(d, 1 << 20, false), co_measure(d, 256 << 20, true) - write);
		d->file = NULL;	/* it is used again */
		co_disk_close(d);
		cache_destroy(c);
	}
	co_disk_close(mem);
}

int main(void)
{
	backends_register();
	on_real(co_main, NULL);
	return 0;
}
