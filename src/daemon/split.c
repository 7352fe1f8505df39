/* SPDX-License-Identifier: MIT */
/* Volumes and their exports spread over reactors. */
#include "daemon/split.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/chain.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/opts.h"

/* The value of "volume" among the options behind a path; NULL if there is none, or the text is wrong, which is told when it is used. */
static bool names_volume(const char *text, char name[static WLOG_NAME_MAX + 1])
{
	char path[PATH_MAX];
	const char *rest = opts_split_path(text, path, sizeof(path)), *value;
	struct opts o;
	bool found = false;

	if (!rest || opts_parse(&o, rest, path, NULL) < 0)
		return false;
	value = opts_str(&o, "volume");
	if (value && strlen(value) <= WLOG_NAME_MAX) {
		strcpy(name, value);
		found = true;
	}
	opts_free(&o);
	return found;
}

/* A reactor's cache may grow to so many times its part: its hash table is made for that, two thousandths of it. */
#define CACHE_LENT 8u

static struct split_volume *find(struct split *s, const char *name)
{
	for (unsigned i = 0; i < s->nvolumes; i++)
		if (!strcmp(s->volume[i].name, name))
			return &s->volume[i];
	return NULL;
}

/* What is wrong with a name is told when the graph is opened, but for what only shows with all of them. */
static int name_volumes(struct split *s, const struct graph_config *c, struct err *err)
{
	for (unsigned i = 0; i < c->ndisks; i++) {
		struct split_volume *v = &s->volume[s->nvolumes];
		int ret = 0;

		if (i < c->nnames)
			strncpy(v->name, c->names[i], sizeof(v->name) - 1);
		else
			ret = graph_default_name(c->disks[i], v->name, sizeof(v->name), err);
		if (ret < 0)
			return ret;
		if (find(s, v->name))
			return err_set(err, -EEXIST, "two volumes are called '%s'; tell them apart with one --name for each disk, in their order", v->name);
		s->nvolumes++;
	}
	return 0;
}

/* Volumes that stand on the same file get the same group: the number of the first of them. */
static int find_groups(struct split *s, const struct graph_config *c, unsigned group[], struct err *err)
{
	struct chain *chain = calloc(s->nvolumes, sizeof(*chain));

	if (!chain && s->nvolumes)
		return err_set(err, -ENOMEM, "out of memory");
	for (unsigned i = 0; i < s->nvolumes; i++) {
		group[i] = i;
		chain_look(c->disks[i], &chain[i]);
		for (unsigned k = 0; k < i; k++) {
			unsigned old = group[i], new = group[k];

			if (old == new || !chain_share(&chain[i], &chain[k]))
				continue;
			for (unsigned m = 0; m <= i; m++)
				group[m] = group[m] == old || group[m] == new ? min(old, new) : group[m];
		}
	}
	free(chain);
	return 0;
}

/* One group after the other in turn. */
static int place_volumes(struct split *s, const struct serve_config *c, struct err *err)
{
	unsigned group[GRAPH_MAX_VOLUMES], groups = 0, limit = min(c->reactors, (unsigned)SPLIT_MAX);
	int ret = find_groups(s, &c->graph, group, err);

	if (ret < 0)
		return ret;
	if (s->nvolumes > 1 && c->graph.nlogs)
		s->together = "the volumes share a write log";
	else if (s->nvolumes > 1 && c->graph.cache_device)
		s->together = "the volumes share a cache device";
	if (s->together)
		limit = 1;
	for (unsigned i = 0; i < s->nvolumes; i++)
		s->volume[i].part = group[i] == i ? groups++ % limit : s->volume[group[i]].part;
	s->n = max(min(groups, limit), 1u);
	return 0;
}

/* Each export goes where its volume is; one that names none takes the next in order. */
static void place_exports(struct split *s, const char *const *texts, unsigned n, const char **to[], unsigned count[])
{
	unsigned next = 0;

	for (unsigned i = 0; i < n; i++) {
		char name[WLOG_NAME_MAX + 1];
		struct split_volume *v;
		unsigned part = 0;

		if (names_volume(texts[i], name)) {
			v = find(s, name);
			part = v ? v->part : 0;
		} else if (next < s->nvolumes) {
			part = s->volume[next++].part;
		}
		to[part][count[part]++] = texts[i];
	}
}

static void fill_part(struct split *s, unsigned p, const struct serve_config *c, const char **disks, const char **names)
{
	struct graph_config *g = &s->part[p].graph;

	g->disks = disks;
	g->names = names;
	g->ndisks = g->nnames = 0;
	for (unsigned i = 0; i < s->nvolumes; i++) {
		if (s->volume[i].part != p)
			continue;
		disks[g->ndisks++] = c->graph.disks[i];
		if (i < c->graph.nnames)
			names[g->nnames++] = c->graph.names[i];
	}
	/* The one budget, by the number of volumes. */
	g->cache_size = s->nvolumes ? c->graph.cache_size / s->nvolumes * g->ndisks : c->graph.cache_size;
	/* Too little to be of use; what all take together the budget of memory bounds. */
	g->cache_size = max(g->cache_size, min(c->graph.cache_size, CACHE_SMALLEST));
	g->cache_most = s->n > 1 ? min(c->graph.cache_size, g->cache_size * CACHE_LENT) : 0;
	if (!p)
		return;
	s->part[p].nnbd = 0;
	s->part[p].control = NULL;
}

int split_init(struct split *s, const struct serve_config *c, struct err *err)
{
	unsigned nvhost[SPLIT_MAX] = { 0 }, nfuse[SPLIT_MAX] = { 0 };
	const char **vhost[SPLIT_MAX], **fuse[SPLIT_MAX];
	size_t each = 2 * GRAPH_MAX_VOLUMES + c->nvhost + c->nfuse;
	int ret;

	memset(s, 0, sizeof(*s));
	s->whole = c;
	if (c->graph.ndisks > GRAPH_MAX_VOLUMES || c->reactors <= 1) {
		/* As it is. What is wrong with it is told when it is opened. */
		s->n = 1;
		s->part[0] = *c;
		return 0;
	}
	if (c->graph.nnames > c->graph.ndisks)
		return err_set(err, -EINVAL, "there are more names (--name) than disks");
	ret = name_volumes(s, &c->graph, err);
	if (ret < 0)
		return ret;
	ret = place_volumes(s, c, err);
	if (ret < 0)
		return ret;
	s->owned = calloc(s->n * each, sizeof(*s->owned));
	if (!s->owned)
		return err_set(err, -ENOMEM, "out of memory");
	for (unsigned p = 0; p < s->n; p++) {
		const char **at = s->owned + p * each;

		s->part[p] = *c;
		fill_part(s, p, c, at, at + GRAPH_MAX_VOLUMES);
		vhost[p] = at + 2 * GRAPH_MAX_VOLUMES;
		fuse[p] = vhost[p] + c->nvhost;
	}
	place_exports(s, c->vhost, c->nvhost, vhost, nvhost);
	place_exports(s, c->fuse, c->nfuse, fuse, nfuse);
	for (unsigned p = 0; p < s->n; p++) {
		s->part[p].vhost = vhost[p];
		s->part[p].nvhost = nvhost[p];
		s->part[p].fuse = fuse[p];
		s->part[p].nfuse = nfuse[p];
	}
	return 0;
}

void split_fini(struct split *s)
{
	free(s->owned);
	s->owned = NULL;
}
