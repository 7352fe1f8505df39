/* SPDX-License-Identifier: MIT */
/* Read cache: figures. Bytes and counts are exact, taken at one instant. */
#include <jansson.h>
#include <string.h>

#include "cache/internal.h"

#define CURVE_POINTS 32u

static json_t *counters(const struct cache_counters *n)
{
	return json_pack("{sI sI sI sI sI sI sI sI sI sI sI}", "requests", (json_int_t)n->requests, "reads", (json_int_t)n->blocks,
			 "hits", (json_int_t)n->hits, "joined", (json_int_t)n->joined, "misses", (json_int_t)n->misses,
			 "bypassed", (json_int_t)n->bypassed, "shared", (json_int_t)n->shared, "ghost_hits", (json_int_t)n->ghost_hits, "evicted", (json_int_t)n->evicted,
			 "dropped", (json_int_t)n->dropped, "updated", (json_int_t)n->updated);
}

static json_t *second_of_volume(const struct cache_volume *v)
{
	if (v->second.rec < 0)
		return json_null();
	return json_pack("{ss sI sI sI sb sb}", "secondarycache", cache_mode_name(v->second.mode), "blocks", (json_int_t)v->second.blocks,
			 "hits", (json_int_t)v->second.hits, "misses", (json_int_t)v->second.misses,
			 "settled", v->second.settled, "kept", v->second.kept);
}

static json_t *second_figures(const struct second *s)
{
	const struct second_counters *n = &s->count;
	json_t *o = json_pack("{ss ss sI sI sI sI sI sI}", "device", s->dev->name, "state", s->off ? "off" : s->scanning ? "rebuilding" : "on",
			      "size", (json_int_t)s->slots * SECOND_BLOCK, "used", (json_int_t)s->used * SECOND_BLOCK,
			      "memory", (json_int_t)second_memory(s), "rate", (json_int_t)s->rate,
			      "scanned", (json_int_t)s->scanned * s->entries * SECOND_BLOCK, "dirty_headers", (json_int_t)s->n_dirty);

	if (s->off)
		json_object_set_new(o, "error", json_sprintf("%s: %s", s->why, strerror(-s->error)));
	json_object_update_new(o, json_pack("{sI sI sI sI sI sI sI sI sI sI sI sI}", "hits", (json_int_t)n->hits, "misses", (json_int_t)n->misses,
			       "fed", (json_int_t)n->fed, "skipped", (json_int_t)n->skipped, "written_bytes", (json_int_t)n->written_bytes,
			       "overwritten", (json_int_t)n->overwritten, "checksum_errors", (json_int_t)n->checksum_errors,
			       "errors", (json_int_t)n->errors, "timeouts", (json_int_t)n->timeouts, "kept", (json_int_t)n->kept,
			       "settles", (json_int_t)n->settles, "touches", (json_int_t)n->touches));
	return o;
}

static json_t *volume_figures(const struct cache_volume *v)
{
	return json_pack("{ss sb sb so sI sI sI sI sI so so s{sI sI sI sb}}", "primarycache", cache_mode_name(v->mode), "tables", v->tables, "shared", v->shared,
			 "second", second_of_volume(v),
			 "bytes", (json_int_t)v->slots * v->c->block,
			 "data_blocks", (json_int_t)v->records[CACHE_DATA], "metadata_blocks", (json_int_t)v->records[CACHE_METADATA],
			 "share", (json_int_t)v->share * v->c->block, "limit", (json_int_t)v->limit * v->c->block,
			 "data", counters(&v->count[CACHE_DATA]), "metadata", counters(&v->count[CACHE_METADATA]),
			 "read_ahead", "blocks", (json_int_t)v->ahead_read, "used", (json_int_t)v->ahead_used,
			 "wasted", (json_int_t)v->ahead_wasted, "paused", v->ahead_pause != 0);
}

void cache_volume_status(struct disk *d, void *obj)
{
	json_object_set_new(obj, "cache", volume_figures(volume_of(d)));
}

static json_t *policy_figures(const struct cache *c, enum cache_class class)
{
	const struct policy *p = &c->policy[class];
	uint32_t block = c->block;

	return json_pack("{sI sI sI sI sI sI sI sI sI sI sI}", "bytes", (json_int_t)c->slots[class] * block,
			 "blocks", (json_int_t)p->resident, "zero_blocks", (json_int_t)c->zeros[class],
			 "recent", (json_int_t)p->list[p->ops->recent].n, "frequent", (json_int_t)p->list[p->ops->frequent].n,
			 "ghosts", (json_int_t)p->ghosts, "target_recent", (json_int_t)(p->target >> POLICY_TARGET_BITS),
			 "hits_recent", (json_int_t)p->count.hits_recent, "hits_frequent", (json_int_t)p->count.hits_frequent,
			 "ghost_hits_recent", (json_int_t)p->count.ghost_recent, "ghost_hits_frequent", (json_int_t)p->count.ghost_frequent);
}

/* [size, miss ratio] for sizes up to what the volume has read. */
void *cache_curve(struct disk *d)
{
	struct cache_volume *v = volume_of(d);
	uint64_t distinct = v->shards ? shards_distinct(v->shards) : 0;
	json_t *points = json_array();

	for (unsigned i = 1; i <= CURVE_POINTS && distinct; i++) {
		uint64_t blocks = max(distinct * i / CURVE_POINTS, (uint64_t)1);

		json_array_append_new(points, json_pack("[I, f]", (json_int_t)(blocks << v->c->shift), shards_miss_ratio(v->shards, blocks)));
	}
	return json_pack("{sI sI so}", "reads", (json_int_t)(v->shards ? v->shards->accesses : 0),
			 "distinct_bytes", (json_int_t)(distinct << v->c->shift), "points", points);
}

void *cache_status(struct cache *c)
{
	json_t *volumes = json_object();

	for (unsigned i = 0; i < CACHE_MAX_VOLUMES; i++)
		if (c->vol[i])
			json_object_set_new(volumes, c->vol[i]->name, volume_figures(c->vol[i]));
	return json_pack("{ss sI sI sI sI sI sI sI so so so so}", "policy", c->policy[CACHE_DATA].ops->name, "block", (json_int_t)c->block,
			 "size", (json_int_t)c->budget, "size_max", (json_int_t)c->config.size, "memory", (json_int_t)cache_memory(c),
			 "index", (json_int_t)c->fixed, "curves", (json_int_t)c->curves, "reads_in_flight", (json_int_t)c->n_flying,
			 "data", policy_figures(c, CACHE_DATA), "metadata", policy_figures(c, CACHE_METADATA), "volumes", volumes,
			 "second", c->second ? second_figures(c->second) : json_null());
}
