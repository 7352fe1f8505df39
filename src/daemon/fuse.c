/* SPDX-License-Identifier: MIT */
/* The FUSE files of a serving process. */
#include "daemon/fuse.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/internal.h"
#include "daemon/peers.h"
#include "daemon/serve.h"
#include "export/fuse/server.h"
#include "util/access.h"
#include "util/err.h"
#include "util/opts.h"

#define KNOWN "volume, allow-other, " FILE_ACCESS_OPTIONS

struct fuse_option {
	char path[PATH_MAX];
	struct opts opts;
	const char *volume;
	bool allow_other;
	struct file_access access;
};

/* Free with opts_free(&o->opts). */
static int parse(const char *text, struct fuse_option *o, struct err *err)
{
	const char *rest;
	int ret;

	memset(o, 0, sizeof(*o));
	rest = opts_split_path(text, o->path, sizeof(o->path));
	if (!rest || !o->path[0])
		return err_set(err, -EINVAL, "'%.120s' begins with no path of a file (1 to %zu bytes)", text, sizeof(o->path) - 1);
	ret = opts_parse(&o->opts, rest, o->path, err);
	if (ret < 0)
		return ret;
	o->volume = opts_str(&o->opts, "volume");
	ret = opts_bool(&o->opts, "allow-other", &o->allow_other, err);
	if (!ret)
		ret = file_access_parse(&o->opts, o->path, &o->access, err);
	if (!ret)
		ret = opts_finish(&o->opts, o->path, KNOWN, err);
	if (ret < 0)
		opts_free(&o->opts);
	return ret;
}

int fuse_check_option(const char *text, struct err *err)
{
	struct fuse_option o;
	int ret = parse(text, &o, err);

	if (!ret)
		opts_free(&o.opts);
	return ret;
}

int fuse_clear_paths(const struct serve_config *c, struct err *err)
{
	char path[PATH_MAX];
	int ret = 0;

	for (unsigned i = 0; i < c->nfuse && !ret; i++)
		if (opts_split_path(c->fuse[i], path, sizeof(path)))
			ret = fuse_clear_dead(path, err);
	return ret < 0 ? err_prefix(err, "FUSE") : 0;
}

static struct volume *choose_volume(struct serve *s, const struct fuse_option *o, unsigned *next, struct err *err)
{
	struct volume *v;

	if (o->volume) {
		v = graph_find(&s->graph, o->volume);
		if (!v)
			err_set(err, -ENOENT, "FUSE: %s: there is no volume '%s'", o->path, o->volume);
		return v;
	}
	if (*next < s->graph.n)
		return s->graph.volumes[(*next)++];
	err_set(err, -EINVAL, "FUSE: %s: there are more files than disks; a second one for the same disk names it with volume=NAME", o->path);
	return NULL;
}

static int count_mounted(void *arg)
{
	struct serve *s = arg;

	return s->fuse ? (int)fuse_server_mounted(s->fuse) : 0;
}

/* On the first reactor. */
static co_fn int co_stop_if_none(void *arg)
{
	struct serve *s = arg;
	int left = 0;

	if (s->stop)
		return 0;
	left = s->fuse ? (int)fuse_server_mounted(s->fuse) : 0;
	for (unsigned i = 0; i < s->npeers && !left; i++)
		left = co_serve_call(&s->peers[i], count_mounted, &s->peers[i]);
	if (!left)
		serve_stop(s, false);
	return 0;
}

static co_fn void co_tell_main(void *arg)
{
	co_serve_call(arg, co_stop_if_none, arg);
}

static void unmounted(void *arg)
{
	struct serve *s = arg, *first = s->main ? s->main : s;

	if (!s->config->exit_unmounted || fuse_server_mounted(s->fuse))
		return;
	if (first->npeers)
		co_spawn("the last file", co_tell_main, first);
	else
		serve_stop(s, false);
}

static co_fn int co_start_file(struct serve *s, const char *text, struct fuse_option *o, unsigned *next, struct err *err)
{
	struct fuse_export_config c;
	int ret = parse(text, o, err);

	if (ret < 0)
		return ret;
	c = (struct fuse_export_config){
		.path = o->path, .allow_other = o->allow_other, .access = o->access,
		.unmounted = unmounted, .unmounted_arg = s,
	};
	c.volume = choose_volume(s, o, next, err);
	ret = c.volume ? co_fuse_server_add(s->fuse, &c, err) : err->code;
	opts_free(&o->opts);
	return ret;
}

co_fn int co_add_file(struct serve *s, struct volume *v, const char *path, struct err *err)
{
	struct fuse_export_config c = {
		.path = path, .volume = v, .access = FILE_ACCESS_INIT, .unmounted = unmounted, .unmounted_arg = s,
	};
	int ret = s->fuse ? 0 : fuse_server_create(&s->fuse, err);

	return ret < 0 ? ret : co_fuse_server_add(s->fuse, &c, err);
}

co_fn int co_start_fuse(struct serve *s, struct err *err)
{
	struct fuse_option *o = malloc(sizeof(*o));
	unsigned next = 0;
	int ret = o ? fuse_server_create(&s->fuse, err) : err_errno(err, -ENOMEM, "FUSE");

	for (unsigned i = 0; i < s->config->nfuse && !ret; i++)
		ret = co_start_file(s, s->config->fuse[i], o, &next, err);
	free(o);
	return ret;
}
