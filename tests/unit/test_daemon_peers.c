/* SPDX-License-Identifier: MIT */
/* Calls between the reactors of a serving process: what the function returns is its own, and it runs once. */
#include <errno.h>

#include "daemon/internal.h"
#include "daemon/peers.h"
#include "lib/test.h"
#include "rt/rt.h"
#include "util/err.h"

static unsigned calls;

static int cannot_now(void *arg)
{
	calls++;
	return -EAGAIN;
}

static co_fn void co_main(void *arg)
{
	struct serve s = { .rt = arg };

	CHECK_EQ(co_serve_call(&s, cannot_now, NULL), -EAGAIN);
	CHECK_EQ(calls, 1);
}

int main(void)
{
	static const struct rt_config config = { .coroutines = 4 };
	struct err err = ERR_INIT;
	struct rt *rt;

	CHECK_EQ(rt_create_sim(&config, 1, &rt, &err), 0);
	CHECK_EQ(rt_run(rt, co_main, rt), 0);
	rt_destroy(rt);
	return 0;
}
