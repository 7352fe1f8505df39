/* SPDX-License-Identifier: MIT */
/*
 * The cache's figures agree with a recount from a trace of the same run.
 *
 * The trace is what goes in at the top and what comes out below, as the choke points of the disks see it (disk->trace): it knows nothing of the cache. From the requests at the
 * top a naive ARC, arrays and the paper's figure 4, says for each block what it must have been; from those below follow misses, read-ahead and hits of the second level.
 */
#include <jansson.h>

#include "blk/spec.h"
#include "cache/internal.h"
#include "rt/buf.h"
#include "test_rt.h"
#include "util/rng.h"
#include "wlog/format.h"
#include "wlog/wlog.h"

#define BLOCK CACHE_BLOCK
#define DATA 400u	/* blocks of data; tables lie behind */
#define TABLES 4u

/* --- The trace --- */

struct event {
	enum disk_op op;
	bool below, device;
	uint64_t off, len;
	unsigned flags;
};

static struct event events[100000];
static unsigned n_events;
static struct disk *below, *device;

static int note(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	CHECK(n_events < ARRAY_SIZE(events));
	events[n_events++] = (struct event){ op, d == below, d == device, off, len, flags };
	return 0;
}

static void watch(struct disk *d)
{
	d->trace = note;
}

/* Blocks that were read where `what` says. */
static uint64_t blocks_read(bool is_below, bool is_device)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < n_events; i++)
		if (events[i].op == DISK_OP_READ && events[i].below == is_below && events[i].device == is_device)
			n += events[i].len / BLOCK;
	return n;
}

/* --- A naive ARC: lists[k][0] is the oldest --- */

struct arc {
	uint32_t list[4][2 * DATA], n[4], size;
	uint64_t p;		/* with POLICY_TARGET_BITS, as the cache's */
};

enum { T1, T2, B1, B2 };

static bool take_out(struct arc *a, unsigned k, uint32_t key)
{
	for (uint32_t i = 0; i < a->n[k]; i++) {
		if (a->list[k][i] != key)
			continue;
		memmove(&a->list[k][i], &a->list[k][i + 1], (--a->n[k] - i) * sizeof(key));
		return true;
	}
	return false;
}

static void put_in(struct arc *a, unsigned k, uint32_t key)
{
	a->list[k][a->n[k]++] = key;
}

struct counts {
	uint64_t requests, reads, hits, misses, ghosts, evicted, dropped, updated, recent, frequent, ghosts_recent, ghosts_frequent;
};

static void replace(struct arc *a, struct counts *c, bool in_b2)
{
	uint64_t t1 = (uint64_t)a->n[T1] << POLICY_TARGET_BITS;
	unsigned from = a->n[T1] && (t1 > a->p || (in_b2 && t1 == a->p) || !a->n[T2]) ? T1 : T2;
	uint32_t key = a->list[from][0];

	take_out(a, from, key);
	put_in(a, from == T1 ? B1 : B2, key);
	c->evicted++;
}

static void access_block(struct arc *a, struct counts *c, uint32_t key)
{
	uint64_t one = 1ull << POLICY_TARGET_BITS, b1 = a->n[B1], b2 = a->n[B2];
	bool in_b1, in_b2;

	c->reads++;
	if (take_out(a, T1, key) ? ++c->recent : take_out(a, T2, key) ? ++c->frequent : 0) {
		c->hits++;
		put_in(a, T2, key);
		return;
	}
	c->misses++;
	in_b1 = take_out(a, B1, key);
	in_b2 = !in_b1 && take_out(a, B2, key);
	if (in_b1)
		a->p = min(a->p + max((b2 << POLICY_TARGET_BITS) / b1, one), a->size * one);
	if (in_b2)
		a->p -= min(a->p, max((b1 << POLICY_TARGET_BITS) / b2, one));
	c->ghosts_recent += in_b1;
	c->ghosts_frequent += in_b2;
	if (a->n[T1] + a->n[T2] == a->size)
		replace(a, c, in_b2);
	put_in(a, in_b1 || in_b2 ? T2 : T1, key);
	while (a->n[B1] && a->n[T1] + a->n[B1] > a->size)
		take_out(a, B1, a->list[B1][0]);
	while (a->n[T1] + a->n[T2] + a->n[B1] + a->n[B2] > 2 * a->size)
		take_out(a, a->n[B2] ? B2 : B1, a->list[a->n[B2] ? B2 : B1][0]);
}

/* What the figures must be: of data, and of tables, which all fit. */
static void recount(struct arc *a, struct counts *data, struct counts *tables)
{
	struct arc all = { .size = TABLES };

	for (unsigned i = 0; i < n_events; i++) {
		const struct event *e = &events[i];
		struct counts *c = e->flags & DISK_METADATA ? tables : data;
		uint32_t key = (uint32_t)(e->off / BLOCK);

		if (e->below || e->device)
			continue;
		if (e->op == DISK_OP_READ) {
			c->requests++;
			access_block(c == data ? a : &all, c, key);
		} else if (e->op == DISK_OP_WRITE) {
			for (unsigned k = T1; k <= T2; k++)
				for (uint32_t at = 0; at < a->n[k]; at++)
					data->updated += a->list[k][at] == key;
		} else if (e->op == DISK_OP_DISCARD) {
			data->dropped += take_out(a, T1, key) || take_out(a, T2, key);
		}
	}
}

/* --- The runs --- */

static uint64_t number(json_t *obj, const char *key)
{
	json_t *v = json_object_get(obj, key);

	CHECK(json_is_integer(v));
	return (uint64_t)json_integer_value(v);
}

static void compare(json_t *status, const char *class, const struct counts *want)
{
	json_t *v = json_object_get(json_object_get(json_object_get(status, "volumes"), "vol"), class), *p = json_object_get(status, class);

	CHECK_EQ(number(v, "requests"), want->requests);
	CHECK_EQ(number(v, "reads"), want->reads);
	CHECK_EQ(number(v, "hits"), want->hits);
	CHECK_EQ(number(v, "misses"), want->misses);
	CHECK_EQ(number(v, "joined"), 0);
	CHECK_EQ(number(v, "ghost_hits"), want->ghosts_recent + want->ghosts_frequent);
	CHECK_EQ(number(v, "evicted"), want->evicted);
	CHECK_EQ(number(v, "dropped"), want->dropped);
	CHECK_EQ(number(v, "updated"), want->updated);
	CHECK_EQ(number(p, "hits_recent"), want->recent);
	CHECK_EQ(number(p, "hits_frequent"), want->frequent);
	CHECK_EQ(number(p, "ghost_hits_recent"), want->ghosts_recent);
	CHECK_EQ(number(p, "ghost_hits_frequent"), want->ghosts_frequent);
}

/* What there is now, of the class whose lists the trace gave. */
static void compare_lists(struct cache *c, json_t *status, const char *class, const struct arc *a)
{
	json_t *p = json_object_get(status, class);
	uint64_t mapped = 0;

	CHECK_EQ(number(p, "blocks"), a->n[T1] + a->n[T2]);
	CHECK_EQ(number(p, "bytes"), (a->n[T1] + a->n[T2]) * BLOCK);
	CHECK_EQ(number(p, "recent"), a->n[T1]);
	CHECK_EQ(number(p, "frequent"), a->n[T2]);
	CHECK_EQ(number(p, "ghosts"), a->n[B1] + a->n[B2]);
	CHECK_EQ(number(p, "target_recent"), a->p >> POLICY_TARGET_BITS);
	for (uint32_t i = 0; i < c->mem.chunks; i++)
		mapped += c->mem.chunk[i].mapped;
	CHECK_EQ(number(status, "memory"), number(status, "index") + number(status, "curves") + mapped * c->config.chunk);
	CHECK_EQ(number(status, "size"), c->config.size);
}

static co_fn struct disk *co_disk(const char *text)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	return d;
}

static co_fn struct disk *co_start(struct cache *c, struct rng *rng)
{
	static uint8_t fill[(DATA + TABLES) * BLOCK];
	struct err err = ERR_INIT;
	struct disk *top;

	for (size_t i = 0; i < sizeof(fill); i++)
		fill[i] = (uint8_t)(rng_u64(rng) | 1);
	below = co_disk("mem:2M");
	CHECK_EQ(co_disk_write(below, 0, fill, sizeof(fill), 0), 0);
	CHECK_EQ(co_cache_attach(c, "vol", below, CACHE_ALL, &top, &err), 0);
	watch(top);
	watch(below);
	n_events = 0;
	return top;
}

/* A few blocks often, others seldom, and scans. */
static uint32_t pick(struct rng *rng, unsigned i)
{
	if (i % 1000 < 150)
		return i % DATA;
	return (uint32_t)(rng_below(rng, 3) ? rng_below(rng, 1 + rng_below(rng, 60)) : rng_below(rng, DATA));
}

static co_fn void co_random_reads(void *arg)
{
	struct cache_config o = { .size = 700000, .chunk = 16384, .curve_samples = 16, .metadata_floor_pct = 10, .no_read_ahead = true };
	struct counts data = { 0 }, tables = { 0 };
	struct arc arc = { 0 };
	static uint8_t buf[BLOCK];
	struct err err = ERR_INIT;
	struct cache *c;
	struct rng rng;
	struct disk *top;
	json_t *status;

	rng_seed(&rng, test_seed());
	CHECK_EQ(cache_create(&o, &c, &err), 0);
	top = co_start(c, &rng);
	CHECK(c->floor >= TABLES);
	arc.size = c->mem.allowed * c->mem.per_chunk - c->floor;
	CHECK(arc.size > 20 && arc.size < DATA / 2);
	for (unsigned i = 0, before = DATA; i < 15000; i++) {
		uint32_t b = pick(&rng, i);

		/* To the policy a block that is read twice in a row may be one access. */
		b = b == before ? (b + 1) % DATA : b;

		memset(buf, (int)(i % 255) + 1, BLOCK);
		if (i % 40 == 7)
			CHECK_EQ(co_disk_read(top, (DATA + rng_below(&rng, TABLES)) * BLOCK, buf, BLOCK, DISK_METADATA), 0);
		else if (i % 15 == 3)
			CHECK_EQ(co_disk_write(top, b * BLOCK, buf, BLOCK, 0), 0);
		else if (i % 100 == 50)
			CHECK(!co_disk_discard(top, b * BLOCK, BLOCK, 0) && !co_disk_write(top, b * BLOCK, buf, BLOCK, 0));
		else
			CHECK_EQ(co_disk_read(top, (before = b) * BLOCK, buf, BLOCK, 0), 0);
	}
	recount(&arc, &data, &tables);
	status = cache_status(c);
	compare(status, "data", &data);
	compare(status, "metadata", &tables);
	compare_lists(c, status, "data", &arc);
	CHECK_EQ(blocks_read(true, false), data.misses + tables.misses);
	CHECK(data.ghosts_recent > 100 && data.ghosts_frequent > 10 && data.dropped > 10 && data.updated > 100 && data.recent > 100);
	json_decref(status);
	co_disk_close(top);
	cache_destroy(c);
}

static void reads_hits_ghosts_and_evictions_are_what_the_trace_says(void)
{
	on_sim(1, co_random_reads, NULL);
}

static co_fn void co_sequential_reads(void *arg)
{
	struct cache_config o = { .size = 1200000, .chunk = 16384, .curve_samples = 16 };
	static uint8_t buf[8 * BLOCK];
	struct err err = ERR_INIT;
	uint64_t unused = 0, reads = 0;
	json_t *status, *v, *d, *ahead;
	struct cache *c;
	struct rng rng;
	struct disk *top;

	rng_seed(&rng, test_seed());
	CHECK_EQ(cache_create(&o, &c, &err), 0);
	top = co_start(c, &rng);
	for (unsigned round = 0; round < 60; round++) {
		uint64_t from = rng_below(&rng, DATA - 100) * BLOCK, n = 1 + rng_below(&rng, 8);

		for (unsigned i = 0; i < 10; i++, from += n * BLOCK)
			CHECK_EQ(co_disk_read(top, from, buf, n * BLOCK, 0), 0);
		co_sleep_ns(1000000);
	}
	for (uint32_t r = 0; r < c->rec_touched; r++)
		unused += c->rec[r].entry != REC_NONE && (c->rec[r].slot & REC_AHEAD);
	for (unsigned i = 0; i < n_events; i++)
		reads += !events[i].below ? events[i].len / BLOCK : 0;
	status = cache_status(c);
	v = json_object_get(json_object_get(status, "volumes"), "vol");
	d = json_object_get(v, "data");
	ahead = json_object_get(v, "read_ahead");
	CHECK_EQ(number(d, "reads"), reads);
	CHECK_EQ(number(d, "hits") + number(d, "joined") + number(d, "misses"), reads);
	CHECK_EQ(number(d, "misses") + number(ahead, "blocks"), blocks_read(true, false));
	CHECK_EQ(number(ahead, "used") + number(ahead, "wasted") + unused, number(ahead, "blocks"));
	CHECK(number(ahead, "used") > 100 && number(ahead, "wasted") > 10);
	json_decref(status);
	co_disk_close(top);
	cache_destroy(c);
}

static void so_is_what_was_read_ahead(void)
{
	on_sim(1, co_sequential_reads, NULL);
}

static co_fn void co_two_levels(void *arg)
{
	struct cache_config o = { .size = 12 << 20, .chunk = 16384, .curve_samples = 16, .no_read_ahead = true };
	static uint8_t buf[BLOCK];
	uint64_t before, dev_blocks = 0;
	struct err err = ERR_INIT;
	json_t *status, *second, *d;
	struct cache *c;
	struct rng rng;
	struct disk *top;

	rng_seed(&rng, test_seed());
	CHECK_EQ(cache_create(&o, &c, &err), 0);
	device = co_disk("mem:8M");
	CHECK_EQ(co_cache_device_format(device, 65536, &err), 0);
	if (co_cache_add_device(c, device, &(struct cache_device_config){ .rate = 1 << 30 }, &err))
		test_fail("%s", err.msg);
	c->budget = c->fixed + second_memory(c->second) + 3 * 16384 + 65536;
	cache_recompute(c);
	top = co_start(c, &rng);
	co_cache_start_device(c);
	while (c->second->scanning)
		co_sleep_ns(1000000);
	for (unsigned i = 0; i < 1000; i++) {
		CHECK_EQ(co_disk_read(top, rng_below(&rng, DATA) * BLOCK, buf, BLOCK, 0), 0);
		if (i % 10 == 0)
			co_sleep_ns(1000000);
	}
	co_sleep_ns(100000000);
	status = cache_status(c);
	before = number(json_object_get(status, "second"), "hits");
	json_decref(status);
	n_events = 0;
	watch(device);
	d = json_object_get(json_object_get(json_object_get(status = cache_status(c), "volumes"), "vol"), "data");

	uint64_t misses = number(d, "misses"), hits = number(d, "hits");

	json_decref(status);
	for (unsigned i = 0; i < 1000; i++)
		CHECK_EQ(co_disk_read(top, rng_below(&rng, DATA) * BLOCK, buf, BLOCK, 0), 0);
	for (unsigned i = 0; i < n_events; i++)
		dev_blocks += events[i].device && events[i].op == DISK_OP_READ && !(events[i].flags & DISK_BACKGROUND) ? events[i].len / BLOCK : 0;
	status = cache_status(c);
	second = json_object_get(status, "second");
	d = json_object_get(json_object_get(json_object_get(status, "volumes"), "vol"), "data");
	misses = number(d, "misses") - misses;
	hits = number(d, "hits") - hits;
	CHECK_EQ(hits + misses, 1000);
	/* What memory missed and the image was not asked for. Some of it has not been written to the device yet. */
	CHECK_EQ(number(second, "hits") - before, misses - blocks_read(true, false));
	CHECK(dev_blocks > 100 && dev_blocks <= number(second, "hits") - before);
	json_decref(status);
	co_disk_close(top);
	co_cache_close_device(c);
	cache_destroy(c);
	device = NULL;
}

static void and_what_the_second_level_had(void)
{
	on_sim(1, co_two_levels, NULL);
}

/* --- The log's columns --- */

#define COMMITS 400u

/* Device writes of batches: when they were submitted, as seen above what makes the device slow, and when they were done, as seen below it. */
static struct {
	uint64_t begin, took[2 * COMMITS];
	unsigned n;
} commits;

static int note_begin(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	if (op == DISK_OP_WRITE && off >= WL_FIRST_SEGMENT)
		commits.begin = rt_now_ns();
	return 0;
}

static int note_end(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	if (op != DISK_OP_WRITE || off < WL_FIRST_SEGMENT)
		return 0;
	CHECK(commits.n < ARRAY_SIZE(commits.took));
	commits.took[commits.n++] = rt_now_ns() - commits.begin;
	return 0;
}

static int by_value(const void *a, const void *b)
{
	return *(const uint64_t *)a < *(const uint64_t *)b ? -1 : *(const uint64_t *)a > *(const uint64_t *)b;
}

/* Within what a bucket of the histogram is wide. */
static void check_quantile(uint64_t says, unsigned permille)
{
	uint64_t want = commits.took[(commits.n * permille + 999) / 1000 - 1];

	CHECK(says >= want && says <= want + want / 31);
}

static co_fn void co_log_figures(void *arg)
{
	struct wlog_format_opts lo = { .segment_size = 1 << 20, .small = true, .no_prewrite = true };
	struct wlog_config lc = { .memory = 4 << 20, .no_destage = true };
	struct wlog_volume_config vc = { .mode = WLOG_MODE_FLUSH };
	static bool written[512];
	static uint8_t buf[8 * BLOCK];
	struct disk *log = co_disk("delay:write=1ms,jitter=4ms:mem:24M"), *d;
	struct err err = ERR_INIT;
	json_t *status, *v;
	uint64_t bytes = 0;
	struct wlog *w;
	struct rng rng;

	rng_seed(&rng, test_seed());
	memset(buf, 7, sizeof(buf));
	CHECK_EQ(co_wlog_format(&log, 1, &lo, &err), 0);
	CHECK_EQ(co_wlog_open(&log, 1, &lc, &w, &err), 0);
	CHECK_EQ(co_wlog_attach(w, "vol", co_disk("mem:2M"), &vc, &d, &err), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	log->trace = note_begin;
	log->file->trace = note_end;
	commits.n = 0;

	json_t *before = wlog_status(w);

	for (unsigned i = 0; i < COMMITS; i++) {
		for (unsigned k = rng_below(&rng, 4); k > 0; k--) {
			uint64_t first = rng_below(&rng, ARRAY_SIZE(written) - 8), n = 1 + rng_below(&rng, 8);

			CHECK_EQ(co_disk_write(d, first * BLOCK, buf, n * BLOCK, 0), 0);
			memset(written + first, true, n);
		}
		CHECK_EQ(co_disk_flush(d), 0);
		co_sleep_ns(1 + rng_below(&rng, 1000000));
	}
	for (unsigned i = 0; i < ARRAY_SIZE(written); i++)
		bytes += written[i] * BLOCK;
	qsort(commits.took, commits.n, sizeof(uint64_t), by_value);
	status = wlog_status(w);
	v = json_array_get(json_object_get(status, "volumes"), 0);
	CHECK_EQ(number(v, "dirty_bytes"), bytes);
	CHECK_EQ(number(v, "volatile_bytes"), 0);
	CHECK_EQ(number(status, "commits") - number(before, "commits"), commits.n);
	CHECK(commits.n > COMMITS / 2);
	check_quantile(number(status, "commit_p50_ns"), 500);
	check_quantile(number(status, "commit_p99_ns"), 990);
	json_decref(before);
	json_decref(status);
	co_disk_close(d);
	CHECK_EQ(co_wlog_close(w), 0);
}

static void and_what_is_dirty_in_the_log_and_how_long_its_commits_take(void)
{
	struct rt *rt = make_sim(1);
	struct rt_bufpool *bufs;

	CHECK_EQ(rt_bufpool_create(rt, 32 << 20, &bufs, NULL), 0);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, co_log_figures, NULL), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
}

int main(void)
{
	backends_register();
	RUN(reads_hits_ghosts_and_evictions_are_what_the_trace_says);
	RUN(so_is_what_was_read_ahead);
	RUN(and_what_the_second_level_had);
	RUN(and_what_is_dirty_in_the_log_and_how_long_its_commits_take);
	return 0;
}
