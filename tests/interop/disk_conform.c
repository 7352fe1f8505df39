/* SPDX-License-Identifier: MIT */
/*
 * Checks the disk contract on any DISK, for scripts that start the server behind it first.
 *
 * usage: disk_conform DISK [slow|short|no-resize ...]
 */
#include "blk/spec.h"
#include "lib/disk_conformance.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "rt/rt.h"
#include "util/err.h"

static const char *text;
static unsigned flags;

static co_fn void co_main(void *arg)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	co_disk_conform(d, flags, test_seed());
	co_disk_close(d);
}

int main(int argc, char **argv)
{
	struct err err = ERR_INIT;
	struct rt_bufpool *pool;
	struct rt *rt;

	CHECK(argc >= 2);
	text = argv[1];
	for (int i = 2; i < argc; i++)
		flags |= !strcmp(argv[i], "slow") ? CONFORM_SLOW : !strcmp(argv[i], "short") ? CONFORM_SHORT : CONFORM_NO_RESIZE;
	backends_register();
	if (rt_create(NULL, &rt, &err))
		test_fail("%s", err.msg);
	CHECK_EQ(rt_bufpool_create(rt, 64 << 20, &pool, &err), 0);
	rt_set_bufs(rt, pool);
	CHECK_EQ(rt_run(rt, co_main, NULL), 0);
	rt_bufpool_destroy(pool);
	rt_destroy(rt);
	return 0;
}
