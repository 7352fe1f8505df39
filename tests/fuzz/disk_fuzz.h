/* SPDX-License-Identifier: MIT */
/* What the fuzz targets of what lies on disks share: simulated disks with any content, and a reactor that does not hang. */
#pragma once

#include <stdlib.h>

#include "backend/fault.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct fuzz_job {
	struct powercut *p;
	void (*co_work)(struct powercut *p, void *arg);
	void *arg;
	uint64_t hang_ns;	/* of virtual time */
};

static void fuzz_on_hang(struct rt_timer *t)
{
	abort();
}

static inline co_fn struct disk *co_fuzz_device(struct powercut *p, const char *name)
{
	struct disk *d;

	if (powercut_dev_open(powercut_dev_find(p, name), &d))
		abort();
	return d;
}

/* Each refusal has its message. */
static inline void fuzz_told(int rc, const struct err *err)
{
	if (rc && (!err->code || !err->msg[0]))
		abort();
}

static co_fn void co_fuzz_main(void *arg)
{
	struct fuzz_job *job = arg;
	struct rt_timer watchdog = RT_TIMER_INIT;

	rt_timer_arm(&watchdog, rt_now_ns() + job->hang_ns, fuzz_on_hang);
	job->co_work(job->p, job->arg);
	rt_timer_cancel(&watchdog);
}

static struct rt *fuzz_reactor(void)
{
	static struct rt_config config = { .coroutines = 64 };
	static struct rt_bufpool *bufs;
	static struct rt *rt;

	if (rt)
		return rt;
	log_set_level(LOG_NONE);
	if (rt_create_sim(&config, 1, &rt, NULL) || rt_bufpool_create(rt, 1, &bufs, NULL))
		abort();
	rt_set_bufs(rt, bufs);
	return rt;
}

/* co_work(p, arg). Destroys p. */
static inline void fuzz_run_on(struct powercut *p, void (*co_work)(struct powercut *p, void *arg), void *arg, uint64_t hang_ns)
{
	struct rt *rt = fuzz_reactor();
	struct fuzz_job job = { p, co_work, arg, hang_ns };

	rt_sim_reseed(rt, 1);
	if (rt_run(rt, co_fuzz_main, &job))
		abort();
	powercut_destroy(p);
}

/* The same with a device "image" that holds the data. `config` may be NULL. */
static inline void fuzz_run(const uint8_t *data, size_t size, const struct powercut_dev_config *config, void (*co_work)(struct powercut *p, void *arg),
			    void *arg, uint64_t hang_ns)
{
	struct powercut *p = powercut_create(1);
	struct powercut_dev *dev = powercut_dev_create(p, "image", align_up(size, 512), config);

	if (size)
		powercut_dev_poke(dev, 0, data, size, false);
	fuzz_run_on(p, co_work, arg, hang_ns);
}
