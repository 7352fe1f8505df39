/* SPDX-License-Identifier: MIT */
/*
 * What the runtime costs: the figures that comments in src/rt quote. Not a test: nothing is checked.
 * Prints the best and the median of several rounds, in nanoseconds of processor time for one operation.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>

#include "lib/test.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "rt/sync.h"

#define ROUNDS 7

static uint64_t n_ops;

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static struct rt *make(bool ucontext, uint64_t spin_ns)
{
	struct rt *rt;

	CHECK_EQ(rt_create(&(struct rt_config){ .ucontext = ucontext, .spin_ns = spin_ns }, &rt, NULL), 0);
	return rt;
}

static uint64_t spent;

static const char *only;

static void measure(const char *what, struct rt *rt, co_entry *fn, void *arg, uint64_t n)
{
	double ns[ROUNDS];

	if (only && !strstr(what, only))
		return;
	for (int i = 0; i < ROUNDS; i++) {
		n_ops = n;
		CHECK_EQ(rt_run(rt, fn, arg), 0);
		ns[i] = (double)spent / (double)n;
	}
	qsort(ns, ROUNDS, sizeof(ns[0]), by_value);
	printf("%-44s %9.1f %9.1f\n", what, ns[0], ns[ROUNDS / 2]);
	fflush(stdout);
}

/* Processor time of this thread, so that a busy machine does little harm. */
static uint64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void start(void)
{
	spent = cpu_ns();
}

static void stop(void)
{
	spent = cpu_ns() - spent;
}

/* Two coroutines that wake each other; a switch each. */
static struct co *pair[2];
static uint64_t left;

static co_fn void co_pairs(void *arg)
{
	unsigned me = (unsigned)(uintptr_t)arg;

	pair[me] = co_self();
	while (left > 0) {
		left--;
		co_yield();
	}
}

static co_fn void co_switches(void *arg)
{
	left = n_ops;
	for (uintptr_t i = 0; i < 16; i++)
		CHECK_EQ(co_spawn("pair", co_pairs, (void *)(i & 1)), 0);
	start();
	co_pairs(NULL);
	stop();
}

static co_fn void co_done(void *arg)
{
}

static co_fn void co_spawns(void *arg)
{
	start();
	for (uint64_t i = 0; i < n_ops; i += 64) {
		for (int k = 0; k < 64; k++)
			co_spawn("done", co_done, NULL);
		co_yield();
	}
	stop();
}

static void ignore(struct rt_timer *t)
{
}

static co_fn void co_arms(void *arg)
{
	static struct rt_timer t[512];
	uint64_t now = rt_now_ns() + 3600ull * 1000000000u;

	for (int i = 0; i < 512; i++)
		rt_timer_arm(&t[i], now + rt_rand64() % 1000000, ignore);
	start();
	for (uint64_t i = 0; i < n_ops; i++) {
		rt_timer_cancel(&t[i % 512]);
		rt_timer_arm(&t[i % 512], now + i * 7919 % 1000000, ignore);
	}
	stop();
	for (int i = 0; i < 512; i++)
		rt_timer_cancel(&t[i]);
}

static co_fn void co_buffers(void *arg)
{
	struct rt_bufpool *p;

	CHECK_EQ(rt_bufpool_create(rt_self(), RT_BUF_MAX, &p, NULL), 0);
	start();
	for (uint64_t i = 0; i < n_ops; i++)
		rt_buf_put(p, co_buf_get(p, (size_t)arg));
	stop();
	rt_bufpool_destroy(p);
}

static co_fn void co_ranges(void *arg)
{
	static struct co_range held[512];
	struct co_rangelock l;
	struct co_range r;
	unsigned n = (unsigned)(uintptr_t)arg;

	co_rangelock_init(&l);
	for (unsigned i = 0; i < n; i++)
		co_range_lock(&l, &held[i], i * 1000003ull % 512 * 8192, 4096, false);
	start();
	for (uint64_t i = 0; i < n_ops; i++) {
		co_range_lock(&l, &r, i % 512 * 8192 + 4096, 4096, false);
		co_range_unlock(&l, &r);
	}
	stop();
	for (unsigned i = 0; i < n; i++)
		co_range_unlock(&l, &held[i]);
}

static int nothing(void *arg)
{
	return 0;
}

static co_fn void co_offloads(void *arg)
{
	start();
	for (uint64_t i = 0; i < n_ops; i++)
		co_offload(nothing, NULL);
	stop();
}

static co_fn void co_sleeps(void *arg)
{
	uint64_t late = 0;

	for (uint64_t i = 0; i < n_ops; i++) {
		uint64_t t = rt_now_exact_ns();

		co_sleep_ns(200000);
		late += rt_now_exact_ns() - t - 200000;
	}
	spent = late;
}

/* Round trips: a client thread with blocking calls, and this server. 28 bytes in, 16 out, as NBD's smallest. */
enum how { BY_RING, RECV_FIRST };

static int sock[2];

static void *client(void *arg)
{
	char buf[28] = { 0 };

	for (uint64_t i = 0; i < n_ops; i++) {
		CHECK_EQ(send(sock[1], buf, 28, 0), 28);
		CHECK_EQ(recv(sock[1], buf, 16, MSG_WAITALL), 16);
	}
	close(sock[1]);
	return NULL;
}

static co_fn void co_serves(void *arg)
{
	enum how how = (enum how)(uintptr_t)arg;
	pthread_t t;
	char buf[28];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock), 0);
	CHECK_EQ(pthread_create(&t, NULL, client, NULL), 0);
	start();
	while (co_io_recv(sock[0], buf, 28, how == RECV_FIRST ? MSG_DONTWAIT : 0) == 28)
		CHECK_EQ(co_io_send(sock[0], buf, 16, 0), 16);
	stop();
	pthread_join(t, NULL);
	close(sock[0]);
}

/* 4 KiB reads with O_DIRECT, 32 at one time. */
struct reading {
	struct rt_bufpool *pool;
	int fd;
	uint64_t left;
};

static co_fn int co_reads(void *arg)
{
	struct reading *r = arg;
	void *buf = r->pool ? co_buf_get(r->pool, 4096) : aligned_alloc(4096, 4096);

	while (r->left > 0) {
		r->left--;
		CHECK_EQ(co_io_read(r->fd, buf, 4096, rt_rand64() % 4096 * 4096), 4096);
	}
	if (r->pool)
		rt_buf_put(r->pool, buf);
	else
		free(buf);
	return 0;
}

static co_fn void co_reads_file(void *arg)
{
	char path[] = "rt_perf-XXXXXX";
	struct reading r = { .fd = mkostemp(path, O_DIRECT), .left = n_ops };
	static char block[1 << 20] __attribute__((aligned(4096)));
	struct co_group g;

	CHECK(r.fd >= 0);
	unlink(path);
	if (arg)
		CHECK_EQ(rt_bufpool_create(rt_self(), RT_BUF_MAX, &r.pool, NULL), 0);
	/* Written, not only allocated. */
	for (uint64_t off = 0; off < 16 << 20; off += sizeof(block))
		CHECK_EQ(co_io_write(r.fd, block, sizeof(block), off, 0), (ssize_t)sizeof(block));
	co_group_init(&g);
	start();
	for (int i = 0; i < 32; i++)
		co_group_start(&g, "reads", co_reads, &r);
	co_group_wait(&g);
	stop();
	rt_bufpool_destroy(r.pool);
	close(r.fd);
}

int main(int argc, char **argv)
{
	struct rt *rt = make(false, 0), *uc = make(true, 0), *spin = make(false, 50000);

	only = argc > 1 ? argv[1] : NULL;
	printf("%-44s %9s %9s\n", "nanoseconds", "best", "median");
	measure("switch and requeue", rt, co_switches, NULL, 1000000);
	measure("switch and requeue, swapcontext", uc, co_switches, NULL, 100000);
	measure("spawn and finish", rt, co_spawns, NULL, 640000);
	measure("timer: cancel and arm, 512 armed", rt, co_arms, NULL, 500000);
	measure("buffer of 4 KiB: get and put", rt, co_buffers, (void *)4096, 500000);
	measure("buffer of 128 KiB: get and put", rt, co_buffers, (void *)131072, 500000);
	measure("range lock, none held", rt, co_ranges, (void *)0, 500000);
	measure("range lock, 32 held", rt, co_ranges, (void *)32, 100000);
	measure("range lock, 512 held", rt, co_ranges, (void *)512, 20000);
	measure("offload", rt, co_offloads, NULL, 3000);
	measure("sleep of 200 us: how late", rt, co_sleeps, NULL, 300);
	measure("socket round trip", rt, co_serves, (void *)BY_RING, 20000);
	measure("socket round trip, recv(2) tried first", rt, co_serves, (void *)RECV_FIRST, 20000);
	measure("socket round trip, spinning 50 us", spin, co_serves, (void *)BY_RING, 20000);
	measure("direct read of 4 KiB, 32 at one time", rt, co_reads_file, NULL, 20000);
	measure("direct read of 4 KiB, registered buffers", rt, co_reads_file, (void *)1, 20000);
	rt_destroy(rt);
	rt_destroy(uc);
	rt_destroy(spin);
	return 0;
}
