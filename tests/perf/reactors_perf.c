/* SPDX-License-Identifier: MIT */
/*
 * What several reactors gain, without clients: the disk stack is driven from within, by 32 requests of 4 KiB in flight on each volume.
 *
 * usage: reactors_perf [DISK] [cache=SIZE] [volumes=N] [reactors=N] [rounds=N] [ms=N] [rw=read|write]
 *
 * All volumes on one reactor, then spread over N reactors of one process, then over N processes of one reactor each: the last is what the machine itself can do.
 * Prints operations per second (medians, and the spread), and the ratios. A volume is the choke points, latency figures, with `cache` the read cache, filled, and DISK:
 * "null:1G" is the stack alone.
 */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "blk/spec.h"
#include "blk/volume.h"
#include "cache/cache.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "rt/sync.h"
#include "util/err.h"
#include "util/rng.h"
#include "util/size.h"

#define BLOCK 4096u
#define DEPTH 32u
#define SPAN (16u << 20)
#define MAX 16u

static const char *disk = "null:1G";
static uint64_t cache_bytes, n_volumes = 2, n_reactors = 2, rounds = 7, ms = 300;
static bool writes;

/* Shared by threads and processes; a cache line or two for each. */
static struct shared {
	unsigned ready, go;
	struct { uint64_t ops, ns; char pad[112]; } of[MAX];
} *sh;

struct user {
	struct worker *w;
	struct volume *v;
};

struct worker {
	unsigned number, volumes;
	struct volume *v[MAX];
	uint64_t ops, end_ns, seed;
	struct co_group g;
	struct user user[MAX * DEPTH];
};

static co_fn int co_user(void *arg)
{
	struct user *u = arg;
	struct worker *w = u->w;
	uint64_t span = u->v->disk->size < SPAN ? u->v->disk->size : SPAN;
	void *buf = co_buf_get(rt_bufs(), BLOCK);
	struct iovec iov = { buf, BLOCK };
	struct rng rng;
	unsigned n = 0;

	rng_seed(&rng, w->seed++);
	while (n++ % 16 || rt_now_exact_ns() < w->end_ns) {
		uint64_t off = rng_below(&rng, span / BLOCK) * BLOCK;

		CHECK_EQ(writes ? co_volume_writev(u->v, off, &iov, 1, 0) : co_volume_readv(u->v, off, &iov, 1), 0);
		w->ops++;
		if (n % 16 == 0)
			co_yield();
	}
	rt_buf_put(rt_bufs(), buf);
	return 0;
}

static co_fn void co_open(struct worker *w, struct cache *cache, unsigned i)
{
	struct err err = ERR_INIT;
	struct disk *d, *top;
	char name[16], text[256];
	char *mark;

	/* A "%d" in the string is the volume's number. */
	snprintf(text, sizeof(text), "%s", disk);
	mark = strstr(text, "%d");
	if (mark) {
		mark[0] = (char)('0' + w->number);
		mark[1] = (char)('0' + i);
	}
	snprintf(name, sizeof(name), "v%u", i);
	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	if (cache) {
		CHECK_EQ(co_cache_attach(cache, name, d, CACHE_ALL, &top, &err), 0);
		d = top;
	}
	CHECK_EQ(volume_create(name, d, &w->v[i], &err), 0);
	for (uint64_t off = 0; cache && off < SPAN && off < d->size; off += 1 << 20) {
		void *buf = co_buf_get(rt_bufs(), 1 << 20);
		struct iovec iov = { buf, 1 << 20 };

		CHECK_EQ(co_volume_readv(w->v[i], off, &iov, 1), 0);
		rt_buf_put(rt_bufs(), buf);
	}
}

static co_fn void co_work(void *arg)
{
	struct worker *w = arg;
	struct cache *cache = NULL;
	struct err err = ERR_INIT;
	uint64_t start;

	if (cache_bytes && cache_create(&(struct cache_config){ .size = cache_bytes / n_volumes * w->volumes }, &cache, &err))
		test_fail("%s", err.msg);
	for (unsigned i = 0; i < w->volumes; i++)
		co_open(w, cache, i);
	__atomic_add_fetch(&sh->ready, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&sh->go, __ATOMIC_SEQ_CST))
		co_sleep_ns(1000000);
	start = rt_now_exact_ns();
	w->end_ns = start + ms * 1000000;
	co_group_init(&w->g);
	for (unsigned i = 0; i < w->volumes * DEPTH; i++) {
		w->user[i].w = w;
		w->user[i].v = w->v[i % w->volumes];
		co_group_start(&w->g, "user", co_user, &w->user[i]);
	}
	CHECK_EQ(co_group_wait(&w->g), 0);
	sh->of[w->number].ops = w->ops;
	sh->of[w->number].ns = rt_now_exact_ns() - start;
	for (unsigned i = 0; i < w->volumes; i++)
		co_volume_destroy(w->v[i]);
	cache_destroy(cache);
}

static void *work(void *arg)
{
	struct rt_bufpool *bounce;
	struct err err = ERR_INIT;
	struct rt *rt;

	CHECK_EQ(rt_create(NULL, &rt, &err), 0);
	CHECK_EQ(rt_bufpool_create(rt, 64 << 20, &bounce, &err), 0);
	rt_set_bufs(rt, bounce);
	CHECK_EQ(rt_run(rt, co_work, arg), 0);
	rt_bufpool_destroy(bounce);
	rt_destroy(rt);
	return NULL;
}

/* Operations per second of all volumes together, over `n` threads or processes. */
static double measure(unsigned n, bool processes)
{
	static struct worker workers[MAX];
	pthread_t thread[MAX];
	pid_t pid[MAX];
	double rate = 0;

	memset(sh, 0, sizeof(*sh));
	for (unsigned i = 0; i < n; i++) {
		struct worker *w = &workers[i];

		memset(w, 0, sizeof(*w));
		w->number = i;
		w->volumes = (unsigned)(n_volumes / n + (i < n_volumes % n));
		w->seed = 1 + i * 1000;
		if (!processes) {
			CHECK_EQ(pthread_create(&thread[i], NULL, work, w), 0);
			continue;
		}
		pid[i] = fork();
		if (!pid[i]) {
			work(w);
			_exit(0);
		}
	}
	while (__atomic_load_n(&sh->ready, __ATOMIC_SEQ_CST) < n)
		usleep(1000);
	__atomic_store_n(&sh->go, 1, __ATOMIC_SEQ_CST);
	for (unsigned i = 0; i < n; i++) {
		int status = 0;

		if (processes)
			CHECK(waitpid(pid[i], &status, 0) == pid[i] && !status);
		else
			pthread_join(thread[i], NULL);
		rate += (double)sh->of[i].ops * 1e9 / (double)sh->of[i].ns;
	}
	return rate;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(const char *what, double *v)
{
	qsort(v, rounds, sizeof(*v), by_value);
	printf("%-40s %12.0f  (%.0f to %.0f)\n", what, v[rounds / 2], v[0], v[rounds - 1]);
	return v[rounds / 2];
}

static void take_argument(const char *arg)
{
	const char *eq = strchr(arg, '=');
	uint64_t v = 0;

	if (!strcmp(arg, "rw=write") || !strcmp(arg, "rw=read"))
		writes = arg[3] == 'w';
	else if (!eq || strchr(arg, ':') || size_parse(eq + 1, &v))
		disk = arg;
	else if (!strncmp(arg, "cache=", 6))
		cache_bytes = v;
	else if (!strncmp(arg, "volumes=", 8))
		n_volumes = v;
	else if (!strncmp(arg, "reactors=", 9))
		n_reactors = v;
	else if (!strncmp(arg, "rounds=", 7))
		rounds = v;
	else if (!strncmp(arg, "ms=", 3))
		ms = v;
}

int main(int argc, char **argv)
{
	double one[64], threads[64], processes[64], m[3];

	for (int i = 1; i < argc; i++)
		take_argument(argv[i]);
	if (!rounds || rounds > 64 || !n_volumes || n_volumes > MAX || !n_reactors || n_reactors > n_volumes)
		test_fail("1 to 64 rounds, 1 to %u volumes, no more reactors than volumes", MAX);
	backends_register();
	sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (unsigned i = 0; i < rounds; i++) {
		one[i] = measure(1, false);
		threads[i] = measure((unsigned)n_reactors, false);
		processes[i] = measure((unsigned)n_reactors, true);
	}
	printf("%s, cache %llu, %llu volumes, %s of 4 KiB, %u in flight on each\n", disk, (unsigned long long)cache_bytes, (unsigned long long)n_volumes,
	       writes ? "writes" : "reads", DEPTH);
	m[0] = median("one reactor", one);
	m[1] = median("several reactors", threads);
	m[2] = median("as many processes of one", processes);
	printf("several to one %.2f, processes to one %.2f: %.2f of what the machine can do\n", m[1] / m[0], m[2] / m[0], m[1] / m[2]);
	return 0;
}
