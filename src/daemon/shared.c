/* SPDX-License-Identifier: MIT */
/*
 * Backing images in common.
 *
 * Two volumes have an image in common if it is the same file (device and inode), to be opened with the same options. Only plain files: an RBD image's parent is librbd's
 * business, and what lies behind an NBD server is not known.
 *
 * The cache's layer over such an image begins to keep blocks when the second volume comes: for one volume alone the layer above its format does, which is faster.
 */
#include "daemon/shared.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "blk/spec.h"
#include "util/err.h"

void shared_init(struct shared_images *all, struct cache *cache)
{
	list_init(&all->list);
	all->cache = cache;
	all->opening = NULL;
}

/* NULL: it is shared with nobody. */
static char *make_key(const char *text, unsigned flags)
{
	struct disk_spec *spec;
	char *key = NULL, *more;
	struct stat st;

	if (disk_spec_parse(text, &spec, NULL) < 0)
		return NULL;
	if (!spec->inner && !strcmp(spec->driver, "file") && !stat(spec->rest, &st) && S_ISREG(st.st_mode) &&
	    asprintf(&key, "%llx:%llx,%u", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino, flags & DISK_OPEN_NOLOCK) < 0)
		key = NULL;
	for (size_t i = 0; key && i < spec->opts.n; i++) {
		if (asprintf(&more, "%s,%s=%s", key, spec->opts.v[i].key, spec->opts.v[i].val) < 0)
			more = NULL;
		free(key);
		key = more;
	}
	disk_spec_free(spec);
	return key;
}

static void gone(struct disk_shared *share)
{
	struct shared_image *s = container_of(share, struct shared_image, share);

	list_del(&s->node);
	free(s->key);
	free(s);
}

static co_fn int co_open_new(struct shared_images *all, struct shared_image *s, const char *text, unsigned flags, struct err *err)
{
	struct shared_image *outer = all->opening;
	struct disk *d, *layer;
	char name[300];
	int r;

	all->opening = s;
	r = co_disk_open(text, flags, &d, err);
	all->opening = outer;
	if (r < 0)
		return r;
	snprintf(name, sizeof(name), "base %.280s", d->name);
	if (all->cache && !co_cache_attach_shared(all->cache, name, d, &layer, NULL))
		d = s->cached = layer;
	s->share = (struct disk_shared){ .disk = d, .gone = gone };
	return 0;
}

co_fn int co_shared_open(void *arg, const char *text, unsigned flags, struct disk **ret, struct err *err)
{
	struct shared_images *all = arg;
	char *key = make_key(text, flags);
	struct shared_image *s;
	int r;

	if (!key)
		return co_disk_open(text, flags, ret, err);
	list_for_each(&all->list, n) {
		s = container_of(n, struct shared_image, node);
		if (strcmp(s->key, key))
			continue;
		free(key);
		r = disk_share(&s->share, ret);
		if (!r && s->cached)
			co_cache_set_mode(s->cached, CACHE_ALL);
		return r ? err_errno(err, r, "%s", text) : 0;
	}
	s = calloc(1, sizeof(*s));
	r = s ? co_open_new(all, s, text, flags, err) : err_errno(err, -ENOMEM, "%s", text);
	if (r < 0) {
		free(key);
		free(s);
		return r;
	}
	s->key = key;
	list_add_tail(&all->list, &s->node);
	r = disk_share(&s->share, ret);
	if (r < 0) {
		co_disk_close(s->share.disk);
		gone(&s->share);
		err_errno(err, r, "%s", text);
	}
	return r;
}

co_fn void co_shared_cache_tables(struct shared_images *all, struct disk **d)
{
	struct shared_image *s = all->opening;
	struct disk *layer;
	char name[300];
	unsigned i = 0;

	while (i < SHARED_TABLES && s->tables[i])
		i++;
	snprintf(name, sizeof(name), "base %.280s: tables", (*d)->name);
	if (i < SHARED_TABLES && !co_cache_attach_tables(all->cache, name, *d, CACHE_ALL, &layer, NULL))
		*d = s->tables[i] = layer;
}

void shared_set_secondarycache(struct shared_images *all, enum cache_mode mode)
{
	list_for_each(&all->list, n) {
		struct shared_image *s = container_of(n, struct shared_image, node);

		if (s->cached)
			cache_set_secondary(s->cached, mode);
		for (unsigned i = 0; i < SHARED_TABLES && s->tables[i]; i++)
			cache_set_secondary(s->tables[i], mode);
	}
}
