/* SPDX-License-Identifier: MIT */
/*
 * `weir perf`: the order of the parts, the verdict, and what is doubtful about the path.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "bench/perf.h"
#include "rt/buf.h"
#include "rt/rt.h"
#include "util/err.h"
#include "util/size.h"

#define NO_DEVICE_NS 8000u	/* a write with its flush in less: no device is as fast */
#define NO_DISK_NS 2000000u	/* a spinning disk needs a turn, 4 ms on average at 7200 a minute */
#define NO_FLUSH_NS 2000u	/* a command to the device takes more */
#define BUFFERS (64u << 20)

uint64_t perf_now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void perf_part(const struct perf_opts *o, const char *part)
{
	if (o->progress && !perf_stopped(o))
		o->progress(o->arg, part);
}

bool perf_goes_on(const struct perf_opts *o, uint64_t start)
{
	return !perf_stopped(o) && perf_now_ns() - start < o->part_ns;
}

/* --- The verdict --- */

__attribute__((format(printf, 2, 3)))
static void warn(struct perf_result *r, const char *fmt, ...)
{
	va_list ap;

	if (r->n_warnings == PERF_WARNINGS)
		return;
	va_start(ap, fmt);
	vsnprintf(r->warning[r->n_warnings++], sizeof(r->warning[0]), fmt, ap);
	va_end(ap);
}

/* What the path says of itself. */
static void judge_path(struct perf_result *r)
{
	const struct perf_path *p = &r->path;

	if (!strcmp(p->driver, "mem") || !strcmp(p->driver, "null"))
		warn(r, "%s: is memory of this process: nothing survives its end", p->driver);
	else if (p->in_memory)
		warn(r, "the data is in memory (%s): nothing survives a power cut", p->fs[0] ? p->fs : p->device);
	if (p->flush_ignored)
		warn(r, "cache=%s ignores flushes: a crash of the host loses data", p->cache);
	if (p->barriers == 0)
		warn(r, "the file system is mounted without barriers: fsync does not flush the device's write cache");
	if (p->write_cache == 1 && p->fua == 0)
		warn(r, "%s has a volatile write cache and no FUA: each stable write costs a flush of the whole cache", p->device);
	if (p->write_cache == 0 && !strncmp(p->device, "vd", 2))
		warn(r, "%s is a virtual disk that says it has no volatile write cache: true only if its host writes through", p->device);
	if (p->o_direct == 0 && !p->in_memory)
		warn(r, "O_DIRECT is not possible or not asked for: data passes through the host's page cache (cache=%s)", p->cache);
}

/* Whether the time that a flush takes can be true. */
static void judge_cost(struct perf_result *r)
{
	const struct perf_path *p = &r->path;
	uint64_t sync = hist_quantile(&r->flush, 500), write = hist_quantile(&r->write, 500);
	char took[16];

	if (!r->flush.count || p->in_memory || p->flush_ignored)
		return;
	duration_format(sync, took);
	if (sync < NO_DEVICE_NS)
		warn(r, "a write and its flush take %s: no device is that fast, something answers without writing", took);
	else if (p->rotational == 1 && sync < NO_DISK_NS)
		warn(r, "%s says that it rotates, yet a write and its flush take %s: a cache in between answers; make sure it survives a power cut",
		     p->device, took);
	else if (p->write_cache == 1 && p->o_direct == 1 && sync < write + NO_FLUSH_NS)
		warn(r, "%s says that it has a volatile write cache, yet a flush costs nothing: it may be ignored below", p->device);
}

void perf_judge(struct perf_result *r)
{
	r->n_warnings = 0;
	r->verdict = !r->etcd.count ? PERF_NOT_MEASURED :
		     hist_quantile(&r->etcd, 990) < PERF_ETCD_LIMIT_NS ? PERF_OK : PERF_SLOW;
	judge_path(r);
	judge_cost(r);
}

/* --- Running --- */

struct run {
	const struct perf_opts *o;
	struct perf_result *r;
	struct err *err;
	int rc;
};

static co_fn void co_run(void *arg)
{
	struct run *run = arg;
	const struct perf_opts *o = run->o;
	struct stat st;

	if (!stat(o->target, &st) && S_ISDIR(st.st_mode))
		run->rc = co_perf_dir(o, run->r, run->err);
	else
		run->rc = co_perf_disk(o, run->r, run->err);
}

int perf_run(const struct perf_opts *o, struct perf_result *r, struct err *err)
{
	struct run run = { o, r, err, 0 };
	struct rt_bufpool *bufs = NULL;
	struct rt *rt;
	int rc;

	memset(r, 0, sizeof(*r));
	rc = rt_create(NULL, &rt, err);
	if (rc)
		return rc;
	rc = rt_bufpool_create(rt, BUFFERS, &bufs, err);
	if (rc) {
		rt_destroy(rt);
		return rc;
	}
	rt_set_bufs(rt, bufs);
	/* The place first: what is wrong with it should be told at once. */
	rc = rt_run(rt, co_run, &run);
	if (rc)
		err_errno(err, rc, "the reactor failed");
	else
		rc = run.rc;
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	if (rc)
		return rc;
	perf_host(o, r);
	perf_dns(o, r);
	perf_judge(r);
	return perf_stopped(o) ? err_set(err, -ECANCELED, "interrupted") : 0;
}
