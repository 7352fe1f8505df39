/* SPDX-License-Identifier: MIT */
/*
 * Devices of the kernel's NBD client on our volumes: found by the name that `weir map` gave them, which is made of our control socket (cli/map_nbd.c).
 *
 * The kernel may wait for requests in flight before it changes a size, and these are ours to answer: so a worker thread asks it.
 */
#include "daemon/devices.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blk/volume.h"
#include "daemon/internal.h"
#include "daemon/serve.h"
#include "daemon/split.h"
#include "util/err.h"
#include "util/log.h"
#include "util/nbd_device.h"

struct resize {
	const char *control, *volume;
	uint64_t size;
};

static bool is_ours(const struct resize *r, const char *backend)
{
	size_t len = strlen(r->volume);

	if (strncmp(backend, "weir:map:", 9) && strncmp(backend, "weir:use:", 9))
		return false;
	return !strncmp(backend + 9, r->volume, len) && backend[9 + len] == '@' && !strcmp(backend + 10 + len, r->control);
}

static void resize(void *arg, unsigned index, const char *backend)
{
	const struct resize *r = arg;
	struct err err = ERR_INIT;

	if (!is_ours(r, backend))
		return;
	if (nbd_device_resize(index, backend, r->size, &err) < 0)
		log_warn("volume '%s': %s; map it again to have it in full", r->volume, err.msg);
}

static int resize_all(void *arg)
{
	struct resize *r = arg;
	char *real = realpath(r->control, NULL);

	r->control = real;
	if (real)
		nbd_device_for_each(resize, r);
	free(real);
	return 0;
}

co_fn void co_devices_resize(struct serve *s, const struct volume *v)
{
	const struct serve_config *c = s->split ? s->split->whole : s->config;
	struct resize r = { c->control, v->name, v->disk->size };

	if (c->control)
		co_offload(resize_all, &r);
}
