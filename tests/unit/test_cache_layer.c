/* SPDX-License-Identifier: MIT */
/* The read cache as a disk: the contract, and what it promises beyond. */
#include <sys/mman.h>

#include "backend/fault.h"
#include "blk/spec.h"
#include "cache/internal.h"
#include "lib/disk_conformance.h"
#include "rt/buf.h"
#include "test_rt.h"
#include "util/rng.h"
#include "wlog/wlog.h"

#define KIB 1024u
#define BLOCK CACHE_BLOCK

static uint64_t seed;

static struct cache *cache_of_size(struct cache_config o, uint64_t size)
{
	struct cache *c = NULL;
	struct err err = ERR_INIT;

	o.size = size;
	cache_create(&o, &c, &err);
	err_clear(&err);
	return c;
}

static bool has_room(const struct cache *c, uint32_t blocks)
{
	return c && c->mem.allowed * c->mem.per_chunk >= blocks;
}

/* The smallest cache, in steps of 4 KiB, with room for `blocks` of data, in chunks of 16 KiB. */
static struct cache *make_cache(uint32_t blocks, struct cache_config o)
{
	uint64_t base = (uint64_t)blocks * BLOCK, from = 0, to = 1, step;
	struct cache *c = NULL, *smaller;

	o.chunk = 16 * KIB;
	o.curve_samples = o.curve_samples ? o.curve_samples : 16;
	for (; !has_room(c, blocks); from = to, to *= 2) {
		cache_destroy(c);
		c = cache_of_size(o, base + to * 4096);
	}
	/* The last step found room, and the one before it did not. */
	for (to /= 2, from /= 2; from < to; ) {
		step = (from + to) / 2;
		smaller = cache_of_size(o, base + step * 4096);
		if (has_room(smaller, blocks)) {
			cache_destroy(c);
			c = smaller;
			to = step;
		} else {
			cache_destroy(smaller);
			from = step + 1;
		}
	}
	return c;
}

static co_fn struct disk *co_open(const char *text)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	return d;
}

static co_fn struct disk *co_cached(struct cache *c, const char *text)
{
	struct err err = ERR_INIT;
	struct disk *top;

	CHECK_EQ(co_cache_attach(c, text, co_open(text), CACHE_ALL, &top, &err), 0);
	return top;
}

static uint64_t ops_below(struct disk *d)
{
	return d->file->count.ops[DISK_OP_READ];
}

/* --- The contract --- */

static co_fn void co_conform_one(void *arg)
{
	struct cache *c = make_cache(40, (struct cache_config){ .block = BLOCK });
	struct disk *d = co_cached(c, arg);

	co_disk_conform(d, CONFORM_SLOW, seed);
	co_disk_close(d);
	CHECK_EQ(c->mem.used, 0);
	cache_destroy(c);
}

static void the_layer_keeps_the_disk_contract(void)
{
	static const char *const disks[] = {
		"mem:2097155,align=512", "mem:3000001,align=4096", "delay:read=1ms,write=2ms,jitter=5ms:mem:1200001",
	};

	for (unsigned i = 0; i < ARRAY_SIZE(disks); i++)
		on_sim(seed + i, co_conform_one, (void *)disks[i]);
}

/* --- Reads --- */

struct reader {
	struct disk *d;
	uint64_t off;
	char buf[3 * BLOCK];
	int ret;
};

static co_fn int co_read_one(void *arg)
{
	struct reader *r = arg;

	return r->ret = co_disk_read(r->d, r->off, r->buf, sizeof(r->buf), 0);
}

static co_fn void co_shared(void *arg)
{
	struct cache *c = make_cache(40, (struct cache_config){ .no_read_ahead = true });
	struct disk *d = co_cached(c, "delay:read=5ms:mem:1M");
	static struct reader readers[20];
	struct co_group g;

	memset(readers, 1, sizeof(readers));
	memset(readers[0].buf, 7, sizeof(readers[0].buf));
	CHECK_EQ(co_disk_write(d, 8 * BLOCK, readers[0].buf, sizeof(readers[0].buf), 0), 0);
	co_group_init(&g);
	for (unsigned i = 0; i < ARRAY_SIZE(readers); i++) {
		readers[i].d = d;
		readers[i].off = 8 * BLOCK;
		memset(readers[i].buf, 0, sizeof(readers[i].buf));
		co_group_start(&g, "reader", co_read_one, &readers[i]);
	}
	CHECK_EQ(co_group_wait(&g), 0);
	for (unsigned i = 0; i < ARRAY_SIZE(readers); i++)
		CHECK(readers[i].buf[0] == 7 && !memcmp(readers[i].buf, readers[i].buf + 1, sizeof(readers[i].buf) - 1));
	CHECK_EQ(ops_below(d), 1);
	/* And from now on it costs none. */
	CHECK_EQ(co_disk_read(d, 9 * BLOCK + 17, readers[0].buf, 1000, 0), 0);
	CHECK_EQ(ops_below(d), 1);
	/* Partly: only what is missing is read. */
	uint64_t bytes = d->file->count.bytes[DISK_OP_READ];
	CHECK_EQ(co_disk_read(d, 10 * BLOCK, readers[0].buf, 2 * BLOCK, 0), 0);
	CHECK_EQ(d->file->count.bytes[DISK_OP_READ], bytes + BLOCK);
	co_disk_close(d);
	cache_destroy(c);
}

static void a_block_in_flight_is_read_once_for_all_who_wait(void)
{
	on_sim(seed, co_shared, NULL);
}

static co_fn void co_failed(void *arg)
{
	struct cache *c = make_cache(40, (struct cache_config){ .no_read_ahead = true });
	struct disk *d = co_cached(c, "fault:op=read,nth=1:delay:read=5ms:mem:1M");
	static struct reader readers[5];
	struct co_group g;

	co_group_init(&g);
	for (unsigned i = 0; i < ARRAY_SIZE(readers); i++) {
		readers[i] = (struct reader){ .d = d };
		co_group_start(&g, "reader", co_read_one, &readers[i]);
	}
	CHECK_EQ(co_group_wait(&g), -EIO);
	/* It is not remembered, and holds nothing. */
	CHECK_EQ(c->mem.used, 0);
	CHECK_EQ(co_read_one(&readers[0]), 0);
	co_disk_close(d);
	cache_destroy(c);
}

static void a_read_that_fails_is_reported_and_not_remembered(void)
{
	on_sim(seed, co_failed, NULL);
}

static co_fn void co_zeroes(void *arg)
{
	struct cache *c = make_cache(40, (struct cache_config){ .no_read_ahead = true });
	struct disk *d = co_cached(c, "mem:1M");
	static char buf[30 * BLOCK];

	for (unsigned i = 0; i < 4; i++)
		CHECK_EQ(co_disk_read(d, 0, buf, sizeof(buf), 0), 0);
	CHECK_EQ(volume_of(d)->records[CACHE_DATA], 30);
	CHECK_EQ(volume_of(d)->slots, 0);
	CHECK_EQ(ops_below(d), 1);
	/* Written to, they are no zeroes any more. */
	memset(buf, 3, 5000);
	CHECK_EQ(co_disk_write(d, 100, buf, 5000, 0), 0);
	CHECK_EQ(co_disk_read(d, 0, buf, sizeof(buf), 0), 0);
	CHECK(buf[99] == 0 && buf[100] == 3 && buf[5099] == 3 && buf[5100] == 0);
	CHECK_EQ(volume_of(d)->slots, 2);
	co_disk_close(d);
	cache_destroy(c);
}

static void blocks_of_zeroes_take_no_data_memory(void)
{
	on_sim(seed, co_zeroes, NULL);
}

static co_fn void co_huge(void *arg)
{
	struct cache *c = make_cache(40, (struct cache_config){ .no_read_ahead = true });
	struct disk *huge = co_cached(c, "null:200P"), *d = co_cached(c, "mem:1M");
	uint64_t behind = ((1ull << KEY_BLOCK_BITS) * volume_of(d)->id + 5) * BLOCK;
	static char buf[BLOCK];

	memset(buf, 6, sizeof(buf));
	CHECK_EQ(co_disk_write(d, 5 * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_read(d, 5 * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_read(huge, 0, buf, BLOCK, 0), 0);
	memset(buf, 7, sizeof(buf));
	CHECK_EQ(co_disk_write(huge, behind, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_zero(huge, behind - BLOCK, 1 << 20, 0), 0);
	CHECK_EQ(co_disk_read(huge, behind, buf, BLOCK, 0), 0);
	CHECK_EQ(volume_of(huge)->records[CACHE_DATA], 1);
	CHECK_EQ(co_disk_read(d, 5 * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(buf[0], 6);
	CHECK_EQ(volume_of(d)->count[CACHE_DATA].hits, 1);
	co_disk_close(huge);
	co_disk_close(d);
	cache_destroy(c);
}

static void a_disk_beyond_the_index_is_not_cached_and_disturbs_nobody(void)
{
	on_sim(seed, co_huge, NULL);
}

/* --- Read-ahead --- */

static co_fn void co_fill(struct disk *d, uint64_t bytes)
{
	static char buf[64 * KIB];

	memset(buf, 9, sizeof(buf));
	for (uint64_t off = 0; off < bytes; off += sizeof(buf))
		CHECK_EQ(co_disk_write(d, off, buf, min((uint64_t)sizeof(buf), bytes - off), 0), 0);
}

static co_fn void co_sequential(void *arg)
{
	struct cache *c = make_cache(1024, (struct cache_config){ .block = BLOCK });
	struct disk *d = co_cached(c, "delay:read=2ms:mem:4M");
	static char buf[BLOCK];
	uint64_t start, end;

	co_fill(d, 4 << 20);
	start = rt_now_ns();
	for (uint64_t off = 0; off < 3 << 20; off += BLOCK) {
		CHECK_EQ(co_disk_read(d, off, buf, BLOCK, 0), 0);
		CHECK_EQ(buf[5], 9);
		co_sleep_ns(100000);
	}
	end = rt_now_ns();
	/* 768 reads of 2 ms each, without. */
	printf("  3 MiB in 4 KiB: %u reads below, %u ms\n", (unsigned)ops_below(d), (unsigned)((end - start) / 1000000));
	CHECK(ops_below(d) < 100);
	CHECK(end - start < 768 * 2000000ull / 4);
	CHECK_EQ(volume_of(d)->ahead_wasted, 0);
	co_disk_close(d);
	cache_destroy(c);
}

static void sequential_reads_are_read_ahead(void)
{
	on_sim(seed, co_sequential, NULL);
}

#define OBJECT (1u << 20)

struct borders {
	unsigned reads, crossing;
	uint64_t bytes, begun[24];	/* of each object: where the reader was when the first read of it began */
	uint64_t reader;
};

static int watch_borders(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct borders *b = arg;

	if (op != DISK_OP_READ)
		return 0;
	b->reads++;
	b->bytes += len;
	b->crossing += off / OBJECT != (off + len - 1) / OBJECT;
	if (!b->begun[off / OBJECT])
		b->begun[off / OBJECT] = b->reader + 1;
	return 0;
}

static co_fn void co_by_objects(void *arg)
{
	struct cache *c = make_cache(8192, (struct cache_config){ .block = BLOCK });
	struct disk *file = co_open("delay:read=2ms:mem:16M"), *d;
	struct err err = ERR_INIT;
	struct borders b = { 0 };
	static char buf[BLOCK];

	file->limits.object = OBJECT;
	CHECK_EQ(co_cache_attach(c, "v", file, CACHE_ALL, &d, &err), 0);
	co_fill(d, 16 << 20);
	file->trace = watch_borders;
	file->trace_arg = &b;
	/* Beginning in the middle of one. */
	for (b.reader = OBJECT / 2 + 5 * BLOCK; b.reader < 16 << 20; b.reader += BLOCK) {
		CHECK_EQ(co_disk_read(d, b.reader, buf, BLOCK, 0), 0);
		CHECK_EQ(buf[5], 9);
		co_sleep_ns(50000);
	}
	printf("  15.5 MiB: %u reads below\n", b.reads);
	CHECK_EQ(b.crossing, 0);
	CHECK_EQ(b.bytes, (16 << 20) - (OBJECT / 2 + 5 * BLOCK));
	/* As soon as half of the one before has been used. */
	for (unsigned i = 4; i < 16; i++)
		CHECK(b.begun[i] && b.begun[i] <= i * OBJECT - OBJECT / 2 + BLOCK + 1);
	co_disk_close(d);
	cache_destroy(c);
}

static void read_ahead_goes_from_object_to_object(void)
{
	on_sim(seed, co_by_objects, NULL);
}

static co_fn void co_not_sequential(void *arg)
{
	struct cache *c = make_cache(128, (struct cache_config){ .block = BLOCK });
	struct disk *d = co_cached(c, "mem:64M");
	static char buf[BLOCK];
	uint64_t ahead, off;
	struct rng r;

	/* Not all zeroes: those would not be evicted. */
	co_fill(d, 64 << 20);
	rng_seed(&r, seed);
	/* Three in a row, and then elsewhere: what is read ahead is never used. */
	for (unsigned i = 0; i < 2000; i++) {
		off = rng_below(&r, 16000) * BLOCK;
		for (unsigned k = 0; k < 3; k++)
			CHECK_EQ(co_disk_read(d, off + k * BLOCK, buf, BLOCK, 0), 0);
		co_yield();
	}
	ahead = volume_of(d)->ahead_read;
	printf("  2000 runs of three: %u blocks read ahead in vain\n", (unsigned)ahead);
	CHECK(ahead < 2000);
	co_disk_close(d);
	cache_destroy(c);
}

static void read_ahead_that_does_not_pay_stops(void)
{
	on_sim(seed, co_not_sequential, NULL);
}

/* --- Memory --- */

static co_fn void co_bounds(void *arg)
{
	struct cache *c = make_cache(64, (struct cache_config){ .no_read_ahead = true });
	struct disk *a = co_cached(c, "mem:4M"), *b = co_cached(c, "mem:8M");
	struct err err = ERR_INIT;
	static char buf[BLOCK];

	uint64_t hits;

	co_fill(a, 4 << 20);
	co_fill(b, 8 << 20);
	/* Without a share the one is pushed out by the other. */
	for (unsigned i = 0; i < 20; i++)
		CHECK_EQ(co_disk_read(a, i * BLOCK, buf, BLOCK, 0), 0);
	for (unsigned i = 0; i < 200; i++)
		CHECK_EQ(co_disk_read(b, i * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(volume_of(a)->slots, 0);
	CHECK_EQ(co_cache_set_limits(a, 16 * BLOCK, 0, &err), 0);
	for (unsigned i = 0; i < 20; i++)
		CHECK_EQ(co_disk_read(a, i * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(volume_of(a)->slots, 20);
	for (unsigned i = 0; i < 1000; i++) {
		CHECK_EQ(co_disk_read(b, i * BLOCK, buf, BLOCK, 0), 0);
		CHECK(cache_memory(c) <= c->budget);
	}
	/* The other one takes what is above the share, and no more: the rest hits. */
	CHECK_EQ(volume_of(a)->slots, 16);
	hits = volume_of(a)->count[CACHE_DATA].hits;
	for (unsigned i = 4; i < 20; i++)
		CHECK_EQ(co_disk_read(a, i * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(volume_of(a)->count[CACHE_DATA].hits, hits + 16);
	CHECK_EQ(co_cache_set_limits(b, 0, 8 * BLOCK, &err), 0);
	CHECK_EQ(volume_of(b)->slots, 8);
	for (unsigned i = 0; i < 100; i++)
		CHECK_EQ(co_disk_read(b, i * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(volume_of(b)->slots, 8);
	/* Nor does who has a limit push out anybody, share or none. */
	CHECK_EQ(co_cache_set_limits(a, 0, 0, &err), 0);
	for (unsigned i = 0; i < 40; i++)
		CHECK_EQ(co_disk_read(a, i * BLOCK, buf, BLOCK, 0), 0);
	for (unsigned i = 0; i < 1000; i++)
		CHECK_EQ(co_disk_read(b, i * BLOCK, buf, BLOCK, 0), 0);
	CHECK(volume_of(a)->slots == 40 && volume_of(b)->slots == 8);
	CHECK_EQ(co_cache_set_limits(b, 9 * BLOCK, 8 * BLOCK, &err), -EINVAL);
	err_clear(&err);
	CHECK_EQ(co_cache_set_limits(b, 60 * BLOCK, 0, &err), -EINVAL);
	co_disk_close(a);
	co_disk_close(b);
	cache_destroy(c);
}

static void a_share_is_kept_and_a_limit_is_one(void)
{
	on_sim(seed, co_bounds, NULL);
}

/* All of it counted: entries of both policies and their hash tables, records, owners and notes of slots. What does not grow with the cache is apart. */
static void a_block_costs_96_bytes_of_index_and_a_ghost_32(void)
{
	static const struct {
		uint64_t size;
		uint32_t block;
		bool s3fifo;
	} how[] = { { 64 << 20, 4096, false }, { 1500ull << 20, 4096, false }, { 3ull << 30, 4096, true }, { 24 << 20, 512, false } };

	for (unsigned i = 0; i < ARRAY_SIZE(how); i++) {
		struct cache *c = cache_of_size((struct cache_config){ .block = how[i].block, .s3fifo = how[i].s3fifo }, how[i].size);
		uint64_t blocks = (uint64_t)c->mem.chunks * c->mem.per_chunk, ghosts = blocks, fixed = FILLS * sizeof(struct cache_fill) + sizeof(*c) + 4096;

		printf("  %u MiB in blocks of %u: %.1f bytes for a block and a ghost\n", (unsigned)(how[i].size >> 20), how[i].block,
		       (double)(c->fixed - fixed) / (double)blocks);
		CHECK(c->fixed - fixed <= 96 * blocks + 32 * ghosts);
		/* So many there can be at once. */
		CHECK(c->policy[CACHE_DATA].max >= blocks && c->policy[CACHE_DATA].entries >= blocks + ghosts && c->rec_max >= blocks);
		cache_destroy(c);
	}
	/* A policy by itself: of blocks, and of ghosts. */
	for (uint32_t n = 1; n < 3000000; n = n * 3 + 1) {
		CHECK(policy_bytes(n, 0) <= 32ull * (n + 1) + 64);
		CHECK(policy_bytes(1, n) <= 32ull * (n + 2) + 64);
	}
}

static uint64_t resident_of(const void *at, size_t bytes)
{
	static unsigned char page[1 << 16];
	char *from = (char *)align_down((uintptr_t)at, 4096);
	size_t n = (align_up((uintptr_t)at + bytes, 4096) - (uintptr_t)from) / 4096, sum = 0;

	CHECK(n <= sizeof(page));
	CHECK_EQ(mincore(from, n * 4096, page), 0);
	for (size_t i = 0; i < n; i++)
		sum += page[i] & 1;
	return sum * 4096;
}

/* Blocks and ghosts, as many as it can have. */
static co_fn void co_use_all(struct cache *c, struct disk *d)
{
	uint64_t blocks = (uint64_t)c->mem.allowed * c->mem.per_chunk * 3, word;
	struct rng r;

	rng_seed(&r, seed);
	for (uint64_t i = 0; i < 4 * blocks; i++)
		CHECK_EQ(co_disk_read(d, (i & 1 ? i / 2 % blocks : rng_below(&r, blocks)) * c->block, &word, 8, i % 4 == 3 ? DISK_METADATA : 0), 0);
	CHECK(cache_memory(c) <= c->budget);
}

/* What it may be lent some day costs little before, and is counted when it comes. */
static co_fn void co_lent(void *arg)
{
	struct cache_config o = { .size = 1 << 20, .most = 32 << 20, .block = 512, .chunk = 16 * KIB, .curve_samples = 16, .no_read_ahead = true };
	struct cache *own = cache_of_size(o, 1 << 20), *c, *large;
	struct err err = ERR_INIT;
	struct disk *d;
	uint64_t fixed = own->fixed;

	cache_destroy(own);
	o.most = 0;
	own = cache_of_size(o, 1 << 20);
	large = cache_of_size(o, 32 << 20);
	o.most = 32 << 20;
	c = cache_of_size(o, 1 << 20);
	CHECK(fixed == c->fixed && fixed - own->fixed < (32 << 20) / 40 && fixed < large->fixed / 3);
	CHECK_EQ(cache_check_size(c, 2 << 20, &err), -EINVAL);
	err_clear(&err);
	d = co_cached(c, "mem:8M");
	co_fill(d, 6 << 20);
	co_use_all(c, d);
	printf("  index of 1 MiB: %u KiB counted, %u resident, of %u\n", (unsigned)(c->fixed >> 10), (unsigned)(resident_of(c->index, c->index_bytes) >> 10),
	       (unsigned)(c->index_bytes >> 10));
	CHECK(TEST_SANITIZED || resident_of(c->index, c->index_bytes) <= c->fixed);
	CHECK_EQ(co_cache_resize(c, 2 << 20, &err), 0);
	CHECK(c->fixed > fixed);
	co_use_all(c, d);
	CHECK(TEST_SANITIZED || resident_of(c->index, c->index_bytes) <= c->fixed);
	CHECK_EQ(co_cache_resize(c, cache_least(c) + o.chunk, &err), 0);
	co_use_all(c, d);
	CHECK_EQ(co_cache_resize(c, 32 << 20, &err), 0);
	CHECK(c->fixed <= large->fixed + 4096 && c->mem.allowed + 1 >= large->mem.allowed);
	CHECK_EQ(co_cache_resize(c, (32 << 20) + 1, &err), -EINVAL);
	err_clear(&err);
	co_disk_close(d);
	cache_destroy(c);
	cache_destroy(own);
	cache_destroy(large);
}

static void what_a_cache_may_be_lent_costs_when_it_comes(void)
{
	on_sim(seed, co_lent, NULL);
}

static co_fn void co_curve_memory(void *arg)
{
	struct cache *c = cache_of_size((struct cache_config){ 0 }, 64 << 20);
	struct disk *d = co_cached(c, "mem:1M");

	printf("  %u KiB\n", (unsigned)(c->curves >> 10));
	CHECK(c->curves > 0 && c->curves <= 1 << 20 && c->curves == volume_of(d)->shards_bytes);
	co_disk_close(d);
	cache_destroy(c);
}

static void the_curve_of_a_volume_takes_less_than_a_mebibyte(void)
{
	on_sim(seed, co_curve_memory, NULL);
}

/* --- With a log above --- */

static uint64_t dirty(const struct wlog *w)
{
	struct wlog_volume_info info;

	CHECK_EQ(wlog_get_volume(w, 0, &info), 0);
	return info.dirty_bytes + info.volatile_bytes;
}

static co_fn void co_read_is(struct disk *d, uint64_t first, unsigned n, char value)
{
	static char buf[BLOCK];

	for (unsigned i = 0; i < n; i++) {
		CHECK_EQ(co_disk_read(d, (first + i) * BLOCK, buf, BLOCK, 0), 0);
		CHECK(buf[0] == value && buf[BLOCK - 1] == value);
	}
}

static co_fn void co_write_all(struct disk *d, uint64_t first, unsigned n, char value)
{
	static char buf[BLOCK];

	memset(buf, value, sizeof(buf));
	for (unsigned i = 0; i < n; i++)
		CHECK_EQ(co_disk_write(d, (first + i) * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
}

/* Of what is written the log has a copy, and the cache has none: not by the write, not by reading it, not by the destage. What it had before is brought up to date. */
static co_fn void co_one_copy(void *arg)
{
	struct powercut *p = powercut_create(seed);
	struct powercut_dev *log_dev = powercut_dev_create(p, "log", 4 << 20, NULL), *image_dev = powercut_dev_create(p, "image", 1 << 20, NULL);
	struct wlog_format_opts lo = { .segment_size = 64 << 10, .small = true, .no_prewrite = true };
	struct wlog_config lc = { .memory = 1 << 20, .no_destage = true };
	struct wlog_volume_config vc = { .mode = WLOG_MODE_FLUSH };
	struct cache *c = make_cache(64, (struct cache_config){ .no_read_ahead = true });
	struct disk *log, *image, *layer, *d;
	struct cache_counters *n;
	struct err err = ERR_INIT;
	struct wlog *w;
	uint64_t memory, below;

	CHECK_EQ(powercut_dev_open(log_dev, &log), 0);
	CHECK_EQ(co_wlog_format(&log, 1, &lo, &err), 0);
	CHECK_EQ(powercut_dev_open(image_dev, &image), 0);
	CHECK_EQ(co_wlog_open(&log, 1, &lc, &w, &err), 0);
	CHECK_EQ(co_cache_attach(c, "v", image, CACHE_ALL, &layer, &err), 0);
	co_fill(layer, 128 * BLOCK);
	CHECK_EQ(co_wlog_attach(w, "v", layer, &vc, &d, &err), 0);
	n = &volume_of(layer)->count[CACHE_DATA];

	/* Never read before. */
	memory = cache_memory(c);
	co_write_all(d, 0, 20, 2);
	for (unsigned i = 0; i < 3; i++)
		co_read_is(d, 0, 20, 2);
	CHECK_EQ(dirty(w), 20 * BLOCK);
	CHECK(volume_of(layer)->slots == 0 && cache_memory(c) == memory && n->blocks == 0);
	CHECK_EQ(co_wlog_drain(w, NULL, NULL, NULL), 0);
	CHECK(dirty(w) == 0 && volume_of(layer)->slots == 0 && cache_memory(c) == memory);

	/* In the cache before: it takes no second slot, and what is destaged is there without another read of the image. */
	co_read_is(d, 0, 10, 2);
	CHECK_EQ(volume_of(layer)->slots, 10);
	memory = cache_memory(c);
	below = image->count.ops[DISK_OP_READ];
	co_write_all(d, 0, 30, 3);
	co_read_is(d, 0, 30, 3);
	CHECK_EQ(dirty(w), 30 * BLOCK);
	CHECK(volume_of(layer)->slots == 10 && cache_memory(c) == memory);
	CHECK_EQ(co_wlog_drain(w, NULL, NULL, NULL), 0);
	CHECK(dirty(w) == 0 && volume_of(layer)->slots == 10 && cache_memory(c) == memory);
	co_read_is(d, 0, 10, 3);
	CHECK_EQ(image->count.ops[DISK_OP_READ], below);
	CHECK_EQ(n->updated, 10);
	/* While the log shadows them nothing hits them: what is in use pushes them out. */
	co_write_all(d, 0, 10, 4);
	for (unsigned i = 0; i < 6; i++) {
		co_read_is(d, i < 3 ? 30 : 78, 50, 9);
		co_read_is(d, 0, 10, 4);
	}
	CHECK_EQ(record_find(c, cache_key(volume_of(layer), 0)), REC_NONE);
	co_read_is(d, 0, 10, 4);
	CHECK_EQ(co_wlog_drain(w, NULL, NULL, NULL), 0);
	co_read_is(d, 0, 10, 4);
	co_disk_close(d);
	CHECK_EQ(co_wlog_close(w), 0);
	cache_destroy(c);
	powercut_destroy(p);
}

static void what_is_dirty_in_the_log_is_in_the_cache_not_a_second_time(void)
{
	struct rt *rt = make_sim(seed);
	struct rt_bufpool *bufs;

	CHECK_EQ(rt_bufpool_create(rt, 32 << 20, &bufs, NULL), 0);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, co_one_copy, NULL), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
}

static co_fn void co_classes(void *arg)
{
	struct cache *c = make_cache(80, (struct cache_config){ .no_read_ahead = true, .metadata_floor_pct = 10, .metadata_ceiling_pct = 20 });
	struct disk *d = co_cached(c, "mem:8M");
	static char buf[BLOCK];
	uint64_t below;

	co_fill(d, 8 << 20);
	for (unsigned i = 0; i < 40; i++)
		CHECK_EQ(co_disk_read(d, i * BLOCK, buf, BLOCK, DISK_METADATA), 0);
	CHECK_EQ(volume_of(d)->records[CACHE_METADATA], c->ceiling);
	for (unsigned i = 100; i < 1100; i++)
		CHECK_EQ(co_disk_read(d, i * BLOCK, buf, BLOCK, 0), 0);
	/* Data does not push metadata out, whoever comes last. */
	CHECK(volume_of(d)->records[CACHE_METADATA] >= c->floor);
	co_cache_set_mode(d, CACHE_ONLY_METADATA);
	CHECK_EQ(volume_of(d)->records[CACHE_DATA], 0);
	CHECK_EQ(volume_of(d)->slots, volume_of(d)->records[CACHE_METADATA]);
	CHECK_EQ(co_disk_read(d, 500 * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(volume_of(d)->records[CACHE_DATA], 0);
	co_cache_set_mode(d, CACHE_NONE);
	CHECK_EQ(c->mem.used, 0);
	CHECK(cache_memory(c) <= c->fixed + c->curves + c->config.chunk);
	below = ops_below(d);
	CHECK_EQ(co_disk_read(d, 39 * BLOCK, buf, BLOCK, DISK_METADATA), 0);
	CHECK_EQ(ops_below(d), below + 1);
	co_disk_close(d);
	cache_destroy(c);
}

static void classes_keep_their_bounds_and_what_is_not_wanted_is_freed_at_once(void)
{
	on_sim(seed, co_classes, NULL);
}

static co_fn void co_small(void *arg)
{
	/* A quarter of it under sanitizers, whose shadow memory is several times as large. */
	const uint64_t mib = TEST_SANITIZED ? 256 * KIB : 1024 * KIB, size = 300 * mib;
	struct cache_config o = { .size = 256 * mib, .no_read_ahead = true };
	struct err err = ERR_INIT;
	struct cache *c;
	static char buf[128 * KIB];
	uint64_t start, hits;
	struct disk *d;

	CHECK_EQ(cache_create(&o, &c, &err), 0);
	CHECK(c->fixed < o.size / 25);
	d = co_cached(c, TEST_SANITIZED ? "mem:75M" : "mem:300M");
	memset(buf, 1, sizeof(buf));
	for (uint64_t off = 0; off < size; off += sizeof(buf))
		CHECK_EQ(co_disk_write(d, off, buf, sizeof(buf), 0), 0);
	for (uint64_t off = 0; off < size; off += sizeof(buf)) {
		CHECK_EQ(co_disk_read(d, off, buf, sizeof(buf), 0), 0);
		CHECK(cache_memory(c) <= o.size);
	}
	/* All but the floor of the metadata. */
	CHECK(cache_memory(c) > o.size / 100 * 94);
	start = rt_now_exact_ns();
	CHECK_EQ(co_cache_resize(c, 64 * mib, &err), 0);
	printf("  from %u to %u MiB in %u us\n", (unsigned)(o.size >> 20), (unsigned)(64 * mib >> 20), (unsigned)((rt_now_exact_ns() - start) / 1000));
	CHECK(cache_memory(c) <= 64 * mib);
	/* What was moved is still right. */
	hits = volume_of(d)->count[0].hits;
	for (uint64_t off = size; off > 0; off -= sizeof(buf)) {
		CHECK_EQ(co_disk_read(d, off - sizeof(buf), buf, sizeof(buf), 0), 0);
		CHECK(buf[0] == 1 && !memcmp(buf, buf + 1, sizeof(buf) - 1));
	}
	CHECK(volume_of(d)->count[0].hits > hits);
	CHECK_EQ(co_cache_resize(c, 257 * mib, &err), -EINVAL);
	err_clear(&err);
	CHECK_EQ(co_cache_resize(c, mib, &err), -EINVAL);
	err_clear(&err);
	CHECK_EQ(co_cache_resize(c, 256 * mib, &err), 0);
	co_disk_close(d);
	cache_destroy(c);
}

static void the_budget_is_kept_and_made_smaller_when_told(void)
{
	struct rt *rt = make_rt(NULL);

	CHECK_EQ(rt_run(rt, co_small, NULL), 0);
	rt_destroy(rt);
}

#define STUCK 6u

static unsigned chunks_held(const struct cache *c)
{
	unsigned n = 0;

	for (uint32_t i = 0; i < c->mem.chunks; i++) {
		unsigned held = 0;

		for (uint32_t k = 0; k < c->mem.per_chunk && c->mem.chunk[i].mapped; k++)
			held += c->mem.owner[i * c->mem.per_chunk + k] == MEM_HELD;
		n += held > 0;
	}
	return n;
}

/* `arg`: how many reads hang. One in each chunk if they are few; more than the cache is to have at all if they are many. */
static co_fn void co_stuck(void *arg)
{
	unsigned n = *(unsigned *)arg;
	struct cache *c = make_cache(120, (struct cache_config){ .no_read_ahead = true });
	struct disk *d = co_cached(c, "mem:1M"), *slow = co_cached(c, "delay:read=100s:mem:1M");
	static struct reader readers[30];
	uint64_t small = cache_least(c) + (n > STUCK ? 4 : 15) * c->config.chunk, start;
	struct err err = ERR_INIT;
	struct co_group g;
	static char buf[BLOCK];

	co_fill(d, 1 << 20);
	co_fill(slow, 1 << 20);
	co_group_init(&g);
	/* The second time in another order: those that go first lie in chunks all over the cache. */
	for (unsigned i = 0; i < 120; i++)
		CHECK_EQ(co_disk_read(d, i * BLOCK, buf, BLOCK, 0), 0);
	for (unsigned i = 0; i < 120; i++)
		CHECK_EQ(co_disk_read(d, (i * 37 + 119) % 120 * BLOCK, buf, BLOCK, 0), 0);
	for (unsigned i = 0; i < n; i++) {
		readers[i] = (struct reader){ .d = slow, .off = i * sizeof(readers[0].buf) };
		co_group_start(&g, "reader", co_read_one, &readers[i]);
		co_sleep_ns(1000000);
	}
	start = rt_now_ns();
	CHECK_EQ(co_cache_resize(c, small, &err), 0);
	printf("  %u reads hang: %u ms, %" PRIu64 " KiB of %" PRIu64 "\n", n, (unsigned)((rt_now_ns() - start) / 1000000), cache_memory(c) >> 10, small >> 10);
	CHECK(rt_now_ns() - start < 500000000);
	CHECK(cache_memory(c) <= small + (uint64_t)chunks_held(c) * c->config.chunk);
	CHECK(c->mem.mapped <= c->mem.allowed + chunks_held(c) / 2 || n > STUCK);
	/* It goes on, as well as it can, and so do settings. */
	for (unsigned i = 0; i < 240; i++)
		CHECK_EQ(co_disk_read(d, i % 120 * BLOCK, buf, BLOCK, 0), 0);
	co_cache_keep_budget(c);
	CHECK(rt_now_ns() - start < 1000000000);
	CHECK_EQ(co_group_wait(&g), 0);
	CHECK(readers[0].buf[0] == 9 && readers[n - 1].buf[3 * BLOCK - 1] == 9);
	co_cache_keep_budget(c);
	CHECK(cache_memory(c) <= small);
	co_disk_close(slow);
	co_disk_close(d);
	cache_destroy(c);
}

static void reads_that_hang_do_not_keep_the_cache_from_shrinking(void)
{
	unsigned few = STUCK, many = 30;

	on_sim(seed, co_stuck, &few);
	on_sim(seed, co_stuck, &many);
}

/* One hangs alone in the highest chunk, and all that is allowed besides is full: what is too much cannot be given back. */
static co_fn void co_stuck_high(void *arg)
{
	const uint32_t blocks = 2400;
	struct cache *c = make_cache(blocks, (struct cache_config){ .no_read_ahead = true });
	struct disk *d = co_cached(c, "mem:12M"), *slow = co_cached(c, "delay:read=100s:mem:1M");
	static struct reader reader;
	uint64_t looks, small;
	struct err err = ERR_INIT;
	struct co_group g;
	static char buf[BLOCK];

	co_fill(d, 12 << 20);
	co_fill(slow, 1 << 20);
	for (uint32_t i = 0; i < blocks / 5 * 4 || c->mem.used % c->mem.per_chunk; i++)
		CHECK_EQ(co_disk_read(d, i * BLOCK, buf, BLOCK, 0), 0);
	co_group_init(&g);
	reader = (struct reader){ .d = slow };
	co_group_start(&g, "reader", co_read_one, &reader);
	co_sleep_ns(1000000);
	CHECK_EQ(chunks_held(c), 1);
	small = cache_least(c) + blocks / 2 * BLOCK;
	looks = c->mem.looks;
	CHECK_EQ(co_cache_resize(c, small, &err), 0);
	printf("  %u chunks: %" PRIu64 " looks\n", c->mem.chunks, c->mem.looks - looks);
	CHECK_EQ(c->mem.mapped, c->mem.allowed + 1);
	CHECK(c->mem.looks - looks <= 16ull * c->mem.chunks);
	/* As long as it hangs there is nothing to look for. */
	looks = c->mem.looks;
	for (unsigned i = 0; i < 100; i++)
		co_cache_keep_budget(c);
	CHECK_EQ(c->mem.looks - looks, 0);
	/* When others end meanwhile, that is one look and no waiting. */
	for (uint32_t i = 0; i < 100; i++) {
		uint64_t start = rt_now_ns();

		CHECK_EQ(co_disk_read(d, (blocks + i) * BLOCK, buf, BLOCK, 0), 0);
		co_cache_keep_budget(c);
		CHECK(rt_now_ns() - start < 1000000);
	}
	CHECK(c->mem.looks - looks <= 100 * 4ull * c->mem.chunks);
	CHECK_EQ(co_group_wait(&g), 0);
	co_cache_keep_budget(c);
	CHECK(cache_memory(c) <= small);
	co_disk_close(slow);
	co_disk_close(d);
	cache_destroy(c);
}

static void a_read_that_hangs_makes_no_work(void)
{
	on_sim(seed, co_stuck_high, NULL);
}

static co_fn void co_end(void *arg)
{
	struct cache *c = make_cache(64, (struct cache_config){ .no_read_ahead = true });
	struct disk *a = co_cached(c, "mem:1M"), *b = co_cached(c, "mem:1M");
	static char buf[40 * BLOCK];

	co_fill(a, 1 << 20);
	co_fill(b, 1 << 20);
	CHECK_EQ(co_disk_read(a, 0, buf, sizeof(buf), 0), 0);
	CHECK_EQ(co_disk_read(b, 0, buf, 20 * BLOCK, 0), 0);
	cache_end(c);
	co_disk_close(a);
	/* What is still open goes on, with what it has. */
	memset(buf, 2, sizeof(buf));
	CHECK_EQ(co_disk_write(b, 0, buf, sizeof(buf), 0), 0);
	for (unsigned i = 0; i < 200; i++)
		CHECK_EQ(co_disk_read(b, i * BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_read(b, 0, buf, sizeof(buf), 0), 0);
	for (unsigned i = 0; i < sizeof(buf); i++)
		CHECK_EQ(buf[i], 2);
	co_disk_close(b);
	cache_destroy(c);
}

static void the_end_does_not_wait_for_a_large_cache(void)
{
	on_sim(seed, co_end, NULL);
}

int main(void)
{
	seed = test_seed();
	backends_register();
	RUN(the_layer_keeps_the_disk_contract);
	RUN(a_block_in_flight_is_read_once_for_all_who_wait);
	RUN(a_read_that_fails_is_reported_and_not_remembered);
	RUN(blocks_of_zeroes_take_no_data_memory);
	RUN(a_disk_beyond_the_index_is_not_cached_and_disturbs_nobody);
	RUN(sequential_reads_are_read_ahead);
	RUN(read_ahead_goes_from_object_to_object);
	RUN(read_ahead_that_does_not_pay_stops);
	RUN(a_share_is_kept_and_a_limit_is_one);
	RUN(a_block_costs_96_bytes_of_index_and_a_ghost_32);
	RUN(what_a_cache_may_be_lent_costs_when_it_comes);
	RUN(the_curve_of_a_volume_takes_less_than_a_mebibyte);
	RUN(what_is_dirty_in_the_log_is_in_the_cache_not_a_second_time);
	RUN(classes_keep_their_bounds_and_what_is_not_wanted_is_freed_at_once);
	RUN(reads_that_hang_do_not_keep_the_cache_from_shrinking);
	RUN(a_read_that_hangs_makes_no_work);
	RUN(the_end_does_not_wait_for_a_large_cache);
	RUN(the_budget_is_kept_and_made_smaller_when_told);
	return 0;
}
