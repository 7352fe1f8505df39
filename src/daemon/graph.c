/* SPDX-License-Identifier: MIT */
/* The graph of the volumes that one process serves. */
#include "daemon/graph.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blk/spec.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/size.h"

int graph_default_name(const char *disk, char *buf, size_t size, struct err *err)
{
	struct disk_spec *spec, *s;
	const char *base;
	int ret = disk_spec_parse(disk, &spec, err);

	if (ret < 0)
		return ret;
	for (s = spec; s->inner; s = s->inner)
		;
	base = strrchr(s->rest, '/');
	base = base ? base + 1 : s->rest;
	/* "mem:1G" has no path: its rest is a size. */
	if (!strcmp(s->driver, "mem") || !strcmp(s->driver, "null") || !*base)
		base = s->driver;
	snprintf(buf, size, "%.*s", (int)min(size - 1, (size_t)WLOG_NAME_MAX), base);
	disk_spec_free(spec);
	return 0;
}

struct volume *graph_find(const struct graph *g, const char *name)
{
	for (unsigned i = 0; i < g->n; i++)
		if (!strcmp(g->volumes[i]->name, name))
			return g->volumes[i];
	return NULL;
}

#define MAKE_ONE "weir log create makes one"

static co_fn int co_open_log_device(const char *text, struct disk **ret, struct err *err)
{
	char size[16], least[16];
	int r = co_disk_open(text, DISK_OPEN_RDWR | DISK_OPEN_LOG, ret, err);

	if (r == -ENOENT) {
		err_clear(err);
		return err_set(err, r, "log: %s: there is no such file; " MAKE_ONE, text);
	}
	if (r < 0) {
		err_prefix(err, "log");
		return r;
	}
	if ((*ret)->size >= WLOG_MIN_SIZE)
		return 0;
	err_set(err, -EINVAL, "log: %s: %s is no size for a log, it has at least %s; " MAKE_ONE, text,
		size_format((*ret)->size, size), size_format(WLOG_MIN_SIZE, least));
	co_disk_close(*ret);
	*ret = NULL;
	return -EINVAL;
}

static co_fn int co_open_log(struct graph *g, const struct graph_config *c, struct err *err)
{
	struct disk *dev[WLOG_MAX_DEVICES] = { NULL };
	unsigned n = 0;
	int ret = 0;

	while (n < c->nlogs && !ret) {
		ret = co_open_log_device(c->logs[n], &dev[n], err);
		if (!ret)
			n++;
	}
	if (!ret) {
		ret = co_wlog_open(dev, n, &c->log, &g->log, err);
		if (ret < 0)
			err_prefix(err, "log");
	}
	if (ret < 0)
		while (n)
			co_disk_close(dev[--n]);
	return ret;
}

co_fn int co_graph_rebuild_log(struct graph *g, const char *device, bool force, struct err *err)
{
	struct disk *d = NULL;

	if (device && wlog_is_out(g->log, device))
		device = NULL;
	int ret = device ? co_open_log_device(device, &d, err) : 0;

	if (!ret && d && !force)
		ret = co_wlog_check_blank(d, err);
	/* A device may take its time, and the log may be closed meanwhile. */
	if (!ret && !g->log)
		ret = err_set(err, -ESHUTDOWN, "the server is stopping");
	if (ret < 0) {
		co_disk_close(d);
		return ret;
	}
	return co_wlog_rebuild(g->log, d, err);
}

/* A name goes into messages, the log and the protocol. */
static int check_name(const struct graph *g, const char *name, struct err *err)
{
	if (!*name || strlen(name) > WLOG_NAME_MAX)
		return err_set(err, -EINVAL, "'%s': a volume's name has 1 to %d bytes; choose one with --name", name, WLOG_NAME_MAX);
	for (const char *p = name; *p; p++)
		if ((unsigned char)*p < ' ' || *p == 0x7f)
			return err_set(err, -EINVAL, "a volume's name has no control characters; choose one with --name");
	if (graph_find(g, name))
		return err_set(err, -EEXIST, "two volumes are called '%s'; tell them apart with one --name for each disk, in their order", name);
	return 0;
}

struct below {
	struct graph *g;
	const char *name;
	enum cache_mode mode;
};

/* A layer for the tables of the format that is about to be opened. Without one it works as well. */
static co_fn int co_cache_tables(void *arg, struct disk **d)
{
	struct below *b = arg;
	struct graph *g = b->g;
	char name[WLOG_NAME_MAX + 16];
	struct disk *layer;
	unsigned i = 0;

	if (g->shared.opening) {
		co_shared_cache_tables(&g->shared, d);
		return 0;
	}
	while (i < GRAPH_MAX_TABLES && g->tables[g->n][i])
		i++;
	snprintf(name, sizeof(name), "%s: tables %u", b->name, i);
	if (i == GRAPH_MAX_TABLES || co_cache_attach_tables(g->cache, name, *d, b->mode, &layer, NULL) < 0)
		return 0;
	*d = g->tables[g->n][i] = layer;
	return 0;
}

co_fn void co_graph_set_primarycache(struct graph *g, unsigned i, enum cache_mode mode)
{
	cache_hold(g->cache);
	co_cache_set_mode(g->cached[i], mode);
	for (unsigned k = 0; k < GRAPH_MAX_TABLES && g->tables[i][k]; k++)
		co_cache_set_mode(g->tables[i][k], mode);
	cache_release(g->cache);
}

void graph_set_secondarycache(struct graph *g, unsigned i, enum cache_mode mode)
{
	cache_set_secondary(g->cached[i], mode);
	for (unsigned k = 0; k < GRAPH_MAX_TABLES && g->tables[i][k]; k++)
		cache_set_secondary(g->tables[i][k], mode);
}

static co_fn int co_open_cache(struct graph *g, const struct graph_config *c, struct budget *budget, struct err *err)
{
	struct disk *dev;
	int ret = cache_create(&(struct cache_config){ .size = c->cache_size, .most = c->cache_most, .budget = budget }, &g->cache, err);

	if (ret < 0 || !c->cache_device)
		return ret;
	ret = co_disk_open(c->cache_device, DISK_OPEN_RDWR | DISK_OPEN_LOG, &dev, err);
	if (!ret) {
		ret = co_cache_add_device(g->cache, dev, &c->cache_device_config, err);
		if (ret < 0)
			co_disk_close(dev);
	}
	if (ret < 0)
		err_prefix(err, "cache device");
	return ret;
}

static co_fn int co_open_volume(struct graph *g, const struct graph_config *c, unsigned i, struct err *err)
{
	char name[WLOG_NAME_MAX + 1];
	struct disk *disk = NULL, *top;
	struct below below;
	int ret;

	if (i < c->nnames)
		ret = check_name(g, c->names[i], err) ? err->code : snprintf(name, sizeof(name), "%s", c->names[i]);
	else
		ret = graph_default_name(c->disks[i], name, sizeof(name), err);
	if (ret >= 0 && i >= c->nnames)
		ret = check_name(g, name, err);
	memset(g->tables[g->n], 0, sizeof(g->tables[g->n]));
	below = (struct below){ g, name, c->primarycache };
	disk_set_below_format(g->cache ? co_cache_tables : NULL, &below);
	disk_set_backing_open(co_shared_open, &g->shared);
	if (ret >= 0)
		ret = co_disk_open(c->disks[i], c->read_only ? 0 : DISK_OPEN_RDWR, &disk, err);
	disk_set_below_format(NULL, NULL);
	disk_set_backing_open(NULL, NULL);
	if (ret < 0)
		return ret;
	g->opened[g->n] = disk;
	g->cached[g->n] = NULL;
	if (g->cache) {
		ret = co_cache_attach(g->cache, name, disk, c->primarycache, &top, err);
		if (ret < 0)
			goto fail;
		disk = g->cached[g->n] = top;
	}
	/* An image whose newest data is in a log is never served without it. */
	if (!g->log) {
		ret = co_wlog_check_unlogged(disk, c->volume.discard_log, err);
	} else {
		ret = co_wlog_attach(g->log, name, disk, &c->volume, &top, err);
		if (!ret)
			disk = top;
	}
	if (ret < 0)
		goto fail;
	ret = volume_create(name, disk, &g->volumes[g->n], err);
	if (ret < 0)
		goto fail;
	g->volumes[g->n]->sync = c->sync;
	g->volumes[g->n]->read_only = c->read_only || disk->read_only;
	g->n++;
	return 0;
fail:
	co_disk_close(disk);
	return ret;
}

co_fn int co_graph_open(struct graph *g, const struct graph_config *c, struct budget *budget, struct err *err)
{
	int ret = 0;

	*g = (struct graph){ 0 };
	if (c->ndisks > GRAPH_MAX_VOLUMES)
		return err_set(err, -E2BIG, "at most %d disks can be served by one process", GRAPH_MAX_VOLUMES);
	if (c->nnames > c->ndisks)
		return err_set(err, -EINVAL, "there are more names (--name) than disks");
	if (c->nlogs > WLOG_MAX_DEVICES)
		return err_set(err, -EINVAL, "at most %d log devices can be given; two mirror each other", WLOG_MAX_DEVICES);
	if (c->nlogs)
		ret = co_open_log(g, c, err);
	if (!ret && c->cache_size)
		ret = co_open_cache(g, c, budget, err);
	shared_init(&g->shared, g->cache);
	for (unsigned i = 0; i < c->ndisks && !ret; i++)
		ret = co_open_volume(g, c, i, err);
	if (ret < 0) {
		co_graph_close(g);
		return ret;
	}
	for (unsigned i = 0; i < g->n && c->cache_device; i++)
		graph_set_secondarycache(g, i, c->secondarycache);
	if (c->cache_device)
		shared_set_secondarycache(&g->shared, c->secondarycache);
	if (g->cache)
		co_cache_start_device(g->cache);
	return 0;
}

co_fn int co_graph_close(struct graph *g)
{
	int ret = 0;

	if (g->cache)
		cache_end(g->cache);
	while (g->n) {
		co_volume_destroy(g->volumes[--g->n]);
		g->volumes[g->n] = NULL;
	}
	if (g->log) {
		ret = co_wlog_close(g->log);
		if (ret < 0)
			log_error("the log could not be closed: %s; it is recovered when it is opened next", strerror(-ret));
		g->log = NULL;
	}
	if (g->cache)
		co_cache_close_device(g->cache);
	cache_destroy(g->cache);
	g->cache = NULL;
	return ret;
}

uint64_t graph_grown(const struct graph *g, unsigned i)
{
	struct disk *d = g->opened[i];
	uint64_t size = d->ops->store_size ? d->ops->store_size(d) : 0;

	return size > g->volumes[i]->disk->size && !g->volumes[i]->read_only ? size : 0;
}

void graph_cancel(struct graph *g)
{
	for (unsigned i = 0; i < g->n; i++)
		disk_cancel(g->volumes[i]->disk);
}

/* --- Commit --- */

/* On the heap: a volume that hangs comes back after the caller has given up, or never. */
struct commit {
	unsigned users, pending;
	bool done[GRAPH_MAX_VOLUMES];
	int error;
	struct co_queue q;
	struct commit_one {
		struct commit *c;
		struct volume *v;
		unsigned i;
	} one[GRAPH_MAX_VOLUMES];
};

static void commit_put(struct commit *c)
{
	if (!--c->users)
		free(c);
}

static co_fn void co_commit_one(void *arg)
{
	struct commit_one *o = arg;
	struct commit *c = o->c;
	int ret = o->v->read_only ? 0 : co_disk_flush(o->v->disk);

	/* The store has shut us out, and said so; what its log holds was committed. */
	if (ret == -ESHUTDOWN && disk_is_fenced(o->v->disk))
		ret = 0;
	if (ret < 0) {
		log_error("volume '%s': the last flush failed: %s", o->v->name, strerror(-ret));
		c->error = c->error ? c->error : ret;
	}
	c->done[o->i] = true;
	c->pending--;
	co_queue_wake_all(&c->q);
	commit_put(c);
}

co_fn int co_graph_commit(struct graph *g, uint64_t deadline_ns, const char **hung)
{
	struct commit *c = calloc(1, sizeof(*c));
	int ret;

	if (!c)
		return -ENOMEM;
	co_queue_init(&c->q);
	c->users = 1;
	for (unsigned i = 0; i < g->n; i++) {
		c->one[i] = (struct commit_one){ c, g->volumes[i], i };
		c->users++;
		c->pending++;
		if (co_spawn("commit", co_commit_one, &c->one[i]) < 0)
			co_commit_one(&c->one[i]);
	}
	while (c->pending && co_queue_wait_until(&c->q, deadline_ns, "the volumes' last flush"))
		;
	ret = c->pending ? -ETIMEDOUT : c->error;
	for (unsigned i = 0; i < g->n && ret == -ETIMEDOUT; i++)
		if (!c->done[i])
			*hung = g->volumes[i]->name;
	commit_put(c);
	return ret;
}
