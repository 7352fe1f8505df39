/* SPDX-License-Identifier: MIT */
/* The vhost-user devices of a serving process. */
#include "daemon/vhost.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/internal.h"
#include "daemon/serve.h"
#include "export/vhost/server.h"
#include "util/access.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/opts.h"

#define KNOWN "volume, queues, block-size, serial, " FILE_ACCESS_OPTIONS

struct vhost_option {
	char path[108];
	struct opts opts;
	const char *volume, *serial;
	uint64_t queues, block_size;
	struct file_access access;
};

/* Free with opts_free(&o->opts). */
static int parse(const char *text, struct vhost_option *o, struct err *err)
{
	const char *rest;
	int ret;

	*o = (struct vhost_option){ .queues = 0, .block_size = 512 };
	rest = opts_split_path(text, o->path, sizeof(o->path));
	if (!rest || !o->path[0])
		return err_set(err, -EINVAL, "'%.120s' begins with no path of a socket (1 to %zu bytes)", text, sizeof(o->path) - 1);
	ret = opts_parse(&o->opts, rest, o->path, err);
	if (ret < 0)
		return ret;
	o->volume = opts_str(&o->opts, "volume");
	o->serial = opts_str(&o->opts, "serial");
	ret = opts_u64(&o->opts, "queues", 1, 64, &o->queues, err);
	if (!ret)
		ret = opts_size(&o->opts, "block-size", &o->block_size, err);
	if (!ret && (!is_pow2(o->block_size) || o->block_size < 512 || o->block_size > 4096))
		ret = err_set(err, -EINVAL, "%s: block-size is a power of two from 512 to 4096", o->path);
	if (!ret && o->serial && strlen(o->serial) > 20)
		ret = err_set(err, -EINVAL, "%s: a serial has at most 20 bytes", o->path);
	if (!ret)
		ret = file_access_parse(&o->opts, o->path, &o->access, err);
	if (!ret)
		ret = opts_finish(&o->opts, o->path, KNOWN, err);
	if (ret < 0)
		opts_free(&o->opts);
	return ret;
}

int vhost_check_option(const char *text, struct err *err)
{
	struct vhost_option o;
	int ret = parse(text, &o, err);

	if (!ret)
		opts_free(&o.opts);
	return ret;
}

static struct volume *choose_volume(struct serve *s, const struct vhost_option *o, unsigned *next, struct err *err)
{
	struct volume *v;

	if (o->volume) {
		v = graph_find(&s->graph, o->volume);
		if (!v)
			err_set(err, -ENOENT, "vhost-user: %s: there is no volume '%s'", o->path, o->volume);
		return v;
	}
	if (*next < s->graph.n)
		return s->graph.volumes[(*next)++];
	err_set(err, -EINVAL, "vhost-user: %s: there are more sockets than disks; a second one for the same disk names it with volume=NAME", o->path);
	return NULL;
}

co_fn int co_start_vhost(struct serve *s, struct err *err)
{
	unsigned next = 0;
	int ret = vhost_server_create(&s->vhost, err);

	for (unsigned i = 0; i < s->config->nvhost && !ret; i++) {
		struct vhost_option o;
		struct vhost_device_config c = { 0 };

		ret = parse(s->config->vhost[i], &o, err);
		if (ret < 0)
			break;
		c.path = o.path;
		c.access = &o.access;
		c.queues = (unsigned)o.queues;
		c.block_size = (uint32_t)o.block_size;
		c.serial = o.serial;
		c.volume = choose_volume(s, &o, &next, err);
		ret = c.volume ? co_vhost_server_add(s->vhost, &c, err) : err->code;
		opts_free(&o.opts);
	}
	return ret;
}
