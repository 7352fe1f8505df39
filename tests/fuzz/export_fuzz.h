/* SPDX-License-Identifier: MIT */
/* What the fuzz targets of exports on a real reactor share: the input, a reactor that stays, and a small volume. */
#pragma once

#include <stdlib.h>

#include "blk/spec.h"
#include "blk/volume.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "util/err.h"
#include "util/log.h"

struct fuzz_input {
	const uint8_t *in;
	size_t len, pos;
};

static inline void must(bool ok)
{
	if (!ok)
		abort();
}

/* Zeroes behind its end. */
static inline uint8_t next8(struct fuzz_input *f)
{
	return f->pos < f->len ? f->in[f->pos++] : 0;
}

static inline co_fn struct volume *co_fuzz_volume(void)
{
	struct volume *v = NULL;
	struct err err;
	struct disk *d;

	err_clear(&err);
	must(!co_disk_open("mem:64K", DISK_OPEN_RDWR, &d, &err) && !volume_create("fuzz", d, &v, &err));
	return v;
}

static inline void fuzz_run(co_entry *co_main, void *arg)
{
	static struct rt *rt;
	static struct rt_bufpool *bufs;
	struct err err = ERR_INIT;

	if (!rt) {
		struct rt_config config = { .coroutines = 64 };

		log_set_level(LOG_NONE);
		backends_register();
		must(!rt_create(&config, &rt, &err) && !rt_bufpool_create(rt, RT_BUF_MAX, &bufs, &err));
		rt_set_bufs(rt, bufs);
	}
	must(!rt_run(rt, co_main, arg));
}
