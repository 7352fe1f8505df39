/* SPDX-License-Identifier: MIT */
/* Buffer pool: sizes, waiting in order, memory given back. */
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "rt/area.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "test_rt.h"

static struct rt_bufpool *make_pool(struct rt *rt, uint64_t bytes)
{
	struct err err = ERR_INIT;
	struct rt_bufpool *p;

	CHECK_EQ(rt_bufpool_create(rt, bytes, &p, &err), 0);
	return p;
}

static void a_pool_is_a_power_of_two_of_at_least_one_buffer(void)
{
	struct rt *rt = make_sim(1);
	static const struct { uint64_t asked, got; } sizes[] = {
		{ 1, RT_BUF_MAX }, { RT_BUF_MAX, RT_BUF_MAX }, { RT_BUF_MAX + 1, 2ull * RT_BUF_MAX }, { 100ull << 20, 128ull << 20 },
	};

	for (unsigned i = 0; i < 4; i++) {
		struct rt_bufpool *p = make_pool(rt, sizes[i].asked);

		CHECK_EQ(rt_bufpool_size(p), sizes[i].got);
		CHECK_EQ(rt_bufpool_used(p), 0u);
		rt_bufpool_destroy(p);
	}
	rt_bufpool_destroy(NULL);
	rt_destroy(rt);
}

static void buffers_are_aligned_and_all_memory_can_be_used(void)
{
	struct rt *rt = make_sim(1);
	struct rt_bufpool *p = make_pool(rt, RT_BUF_MAX);
	static void *buf[RT_BUF_MAX / RT_BUF_ALIGN];

	for (size_t len = 1; len <= RT_BUF_MAX; len = len * 3 + 1) {
		void *b = rt_buf_tryget(p, len);

		CHECK(b && (uintptr_t)b % RT_BUF_ALIGN == 0);
		CHECK(rt_bufpool_used(p) >= len);
		CHECK(rt_bufpool_used(p) < 2 * len + RT_BUF_ALIGN);
		((char *)b)[0] = ((char *)b)[len - 1] = 1;
		rt_buf_put(p, b);
	}
	rt_buf_put(p, NULL);
	for (int round = 0; round < 2; round++) {
		for (unsigned i = 0; i < RT_BUF_MAX / RT_BUF_ALIGN; i++)
			CHECK(buf[i] = rt_buf_tryget(p, RT_BUF_ALIGN));
		CHECK_EQ(rt_bufpool_used(p), RT_BUF_MAX);
		CHECK(!rt_buf_tryget(p, 1));
		/* Whatever the order of return, it grows together again. */
		for (unsigned i = 0; i < RT_BUF_MAX / RT_BUF_ALIGN; i++)
			rt_buf_put(p, buf[round ? i : i * 4099 % (RT_BUF_MAX / RT_BUF_ALIGN)]);
		CHECK(buf[0] = rt_buf_tryget(p, RT_BUF_MAX));
		rt_buf_put(p, buf[0]);
	}
	rt_bufpool_destroy(p);
	rt_destroy(rt);
}

/* Waiting */

static struct rt_bufpool *pool;
static char trace[16];
static unsigned trace_n;

static co_fn void co_takes(void *arg)
{
	size_t len = (size_t)arg;
	char *b = co_buf_get(pool, len);

	CHECK(b);
	trace[trace_n++] = len > 20u << 20 ? 'L' : len > 4096 ? 'm' : 's';
	co_sleep_ns(10000);
	rt_buf_put(pool, b);
}

static co_fn void co_fills_then_waits(void *arg)
{
	static const size_t lens[] = { 32u << 20, 4096, 16u << 20, 32u << 20, 1 };
	char *b = co_buf_get(pool, 16u << 20);

	trace_n = 0;
	memset(trace, 0, sizeof(trace));
	for (unsigned i = 0; i < 5; i++) {
		CHECK_EQ(co_spawn("takes", co_takes, (void *)lens[i]), 0);
		co_sleep_ns(1000);
	}
	/* 16 MiB are free, but the first in the queue wants 32. */
	CHECK_STR(trace, "");
	CHECK(!rt_buf_tryget(pool, 1));
	rt_buf_put(pool, b);
	b = co_buf_get(pool, 4096);
	rt_buf_put(pool, b);
	co_sleep_ns(10000);
	CHECK_EQ(trace_n, 5u);
	CHECK_EQ(trace[0], 'L');
	CHECK_EQ(trace[3], 'L');
}

static void who_waits_is_served_in_order(void)
{
	struct rt *rt = make_sim(1);

	for (uint64_t seed = 0; seed < 20; seed++) {
		rt_sim_reseed(rt, seed);
		pool = make_pool(rt, RT_BUF_MAX);
		rt_set_bufs(rt, pool);
		CHECK_EQ(rt_run(rt, co_fills_then_waits, NULL), 0);
		rt_bufpool_destroy(pool);
	}
	rt_destroy(rt);
}

/* Memory */

static size_t resident(void *base, size_t len)
{
	size_t pages = len / 4096, n = 0;
	unsigned char *vec = malloc(pages);

	CHECK_EQ(mincore(base, len, vec), 0);
	for (size_t i = 0; i < pages; i++)
		n += vec[i] & 1;
	free(vec);
	return n * 4096;
}

static co_fn void co_uses_and_rests(void *arg)
{
	size_t len = RT_BUF_MAX;
	char *b;

	CHECK(rt_bufs() == pool);
	b = co_buf_get(pool, len);
	CHECK_EQ(resident(b, len), 0u);
	memset(b, 1, len);
	CHECK_EQ(resident(b, len), len);
	rt_buf_put(pool, b);
	/* Warm for a while ... */
	CHECK(resident(b, len) == len);
	for (int i = 0; i < 100 && resident(b, len) > 2u << 20; i++)
		co_sleep_ns(100000000);
	/* ... then cold but for a little. */
	CHECK(resident(b, len) <= 2u << 20);
	CHECK(co_buf_get(pool, len) == b);
	rt_buf_put(pool, b);
}

static void an_idle_pool_gives_its_memory_back(void)
{
	struct rt *rt = make_rt(NULL);

	pool = make_pool(rt, RT_BUF_MAX);
	rt_set_bufs(rt, pool);
	CHECK_EQ(rt_run(rt, co_uses_and_rests, NULL), 0);
	rt_bufpool_destroy(pool);
	rt_destroy(rt);
}

/* Input and output */

/* Word by word, since TSan looks at each access; another word at each place, and from each seed. */
static uint64_t word_at(size_t i, unsigned seed)
{
	return (i + 1) * 0x9e3779b97f4a7c15 + seed;
}

static void fill(char *b, size_t len, unsigned seed)
{
	uint64_t w;
	size_t i;

	for (i = 0; i + sizeof(w) <= len; i += sizeof(w)) {
		w = word_at(i, seed);
		memcpy(b + i, &w, sizeof(w));
	}
	w = word_at(i, seed);
	memcpy(b + i, &w, len - i);
}

static void check_filled(const char *b, size_t len, unsigned seed)
{
	uint64_t w, got;
	size_t i;

	for (i = 0; i + sizeof(w) <= len; i += sizeof(w)) {
		memcpy(&got, b + i, sizeof(got));
		if (got != word_at(i, seed))
			test_fail("bytes %zu to %zu are wrong", i, i + sizeof(w) - 1);
	}
	w = word_at(i, seed);
	if (memcmp(b + i, &w, len - i))
		test_fail("a byte from %zu on is wrong", i);
}

static co_fn void co_copies(int fd, size_t len, size_t skew)
{
	char *a = co_buf_get(pool, len), *b = co_buf_get(pool, len);

	fill(a + skew, len - skew, (unsigned)len);
	memset(b, 0, len);
	CHECK_EQ(co_io_write(fd, a + skew, len - skew, 0, 0), (ssize_t)(len - skew));
	CHECK_EQ(co_io_read(fd, b + skew, len - skew, 0), (ssize_t)(len - skew));
	check_filled(b + skew, len - skew, (unsigned)len);
	for (size_t i = 0; i < skew; i++)
		CHECK_EQ(b[i], 0);
	rt_buf_put(pool, a);
	rt_buf_put(pool, b);
}

static co_fn void co_does_io(void *arg)
{
	FILE *f = tmpfile();
	int fd = fileno(f);
	char *low, *b;

	for (int round = 0; round < 2; round++) {
		for (size_t len = 512; len <= 8u << 20; len *= 2) {
			co_copies(fd, len, 0);
			co_copies(fd, len, 3);
		}
		/* Memory that came back after a rest is the memory that the kernel fills. */
		low = co_buf_get(pool, 16u << 20);
		b = co_buf_get(pool, 4096);
		memset(b, 9, 4096);
		CHECK_EQ(co_io_write(fd, b, 4096, 0, 0), 4096);
		rt_buf_put(pool, low);
		rt_buf_put(pool, b);
		for (int i = 0; i < 100 && arg && resident(b, 4096); i++)
			co_sleep_ns(100000000);
		CHECK(!arg || resident(b, 4096) == 0);
		arg = NULL;
	}
	fclose(f);
}

static void transfers_use_the_pools_memory(void)
{
	struct rt *rt = make_rt(NULL);

	pool = make_pool(rt, RT_BUF_MAX);
	CHECK_EQ(rt_run(rt, co_does_io, &pool), 0);
	rt_bufpool_destroy(pool);
	/* A second pool on the same ring. */
	pool = make_pool(rt, RT_BUF_MAX);
	CHECK_EQ(rt_run(rt, co_does_io, NULL), 0);
	rt_bufpool_destroy(pool);
	rt_destroy(rt);
}

/* With a limit on locked memory as an ordinary user has it. */
static void without_locked_memory_transfers_work_the_same(void)
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){ 3u << 20, 3u << 20 });
		if (setgid(65534) < 0 || setuid(65534) < 0)
			_exit(geteuid() == 0);
		transfers_use_the_pools_memory();
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
}

/* What the ring has pinned must not be what I/O goes to when the memory behind the address is another. */
static co_fn void co_use_area(void *arg)
{
	uint64_t bytes = 4ull * RT_AREA_PIECE;
	char *map = mmap(NULL, bytes + RT_AREA_PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *base = (char *)(((uintptr_t)map + RT_AREA_PIECE - 1) & ~(uintptr_t)(RT_AREA_PIECE - 1)), want[4096];
	struct rt_bufpool *a = rt_area_create(rt_self(), base, bytes);
	FILE *f = tmpfile();
	int fd;

	CHECK(map != MAP_FAILED && f && a);
	fd = fileno(f);
	for (unsigned round = 0; round < 3; round++) {
		for (unsigned piece = 0; piece < 4; piece++) {
			char *at = base + piece * RT_AREA_PIECE + 8192 * round;

			memset(want, (int)(16 * round + piece + 1), sizeof(want));
			CHECK_EQ(pwrite(fd, want, sizeof(want), 0), sizeof(want));
			CHECK_EQ(co_io_read(fd, at, sizeof(want), 0), sizeof(want));
			CHECK(!memcmp(at, want, sizeof(want)));
			memset(at, 0x77, 4096);
			CHECK_EQ(co_io_write(fd, at, 4096, 0, 0), 4096);
			CHECK_EQ(pread(fd, want, sizeof(want), 0), sizeof(want));
			CHECK(want[0] == 0x77 && want[4095] == 0x77);
		}
		rt_area_forget(a, RT_AREA_PIECE, 2ull * RT_AREA_PIECE);
		CHECK_EQ(madvise(base + RT_AREA_PIECE, 2 * RT_AREA_PIECE, MADV_DONTNEED), 0);
		CHECK_EQ(base[RT_AREA_PIECE + 8192 * round], 0);
	}
	rt_area_destroy(a);
	fclose(f);
	munmap(map, bytes + RT_AREA_PIECE);
}

static void an_area_is_forgotten_before_its_memory_goes(void)
{
	on_real(co_use_area, NULL);
}

int main(void)
{
	RUN(a_pool_is_a_power_of_two_of_at_least_one_buffer);
	RUN(buffers_are_aligned_and_all_memory_can_be_used);
	RUN(who_waits_is_served_in_order);
	RUN(an_idle_pool_gives_its_memory_back);
	RUN(transfers_use_the_pools_memory);
	RUN(without_locked_memory_transfers_work_the_same);
	RUN(an_area_is_forgotten_before_its_memory_goes);
	return 0;
}
