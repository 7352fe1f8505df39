/* SPDX-License-Identifier: MIT */
/*
 * Read cache: budget and life.
 *
 * All of the index (policies, records, slots' owners, fills) is one piece of memory, made for the largest number of blocks that there may ever be. Its pages cost
 * memory when they are first used, and are used from the lower end on (but for the hash tables): so what it takes for the largest budget so far is counted, in full. The rest of
 * the budget is chunks of data.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cache/internal.h"
#include "util/err.h"
#include "util/size.h"

static const char *const mode_names[] = { "none", "metadata", "all" };

const char *cache_mode_name(enum cache_mode mode)
{
	return mode_names[mode];
}

int cache_mode_parse(const char *name, enum cache_mode *ret)
{
	for (unsigned i = 0; i < ARRAY_SIZE(mode_names); i++)
		if (!strcmp(name, mode_names[i])) {
			*ret = i;
			return 0;
		}
	return -EINVAL;
}

/* How large the index is for so many chunks. */
struct layout {
	uint32_t slots, records, metadata, metadata_slots;
	size_t policy[CACHE_CLASSES], rec, mem, fills, all;
	size_t tables;	/* of these, what is touched all over */
};

#define PAGES_MORE 8u	/* where a part that is in use ends within a page */

static uint32_t some_more(uint32_t slots)
{
	return slots + slots / 8 + 16;	/* an eighth may be blocks of zeroes, beyond the slots */
}

static void lay_out(const struct cache_config *o, uint32_t chunks, struct layout *l)
{
	l->slots = chunks * (o->chunk / o->block);
	l->records = some_more(l->slots);
	l->metadata_slots = max((uint32_t)((uint64_t)l->slots * o->metadata_ceiling_pct / 100), 1u);
	l->metadata = some_more(l->metadata_slots);
	l->policy[CACHE_DATA] = align_up(policy_bytes(l->records, l->slots), 64);
	l->policy[CACHE_METADATA] = align_up(policy_bytes(l->metadata, l->metadata_slots), 64);
	l->rec = align_up((uint64_t)l->records * sizeof(struct cache_record), 64);
	l->mem = align_up(mem_bytes(chunks, o->block, o->chunk), 64);
	l->fills = align_up(FILLS * sizeof(struct cache_fill), 64);
	l->all = l->policy[0] + l->policy[1] + l->rec + l->mem + l->fills;
	l->tables = policy_hash_bytes(l->records, l->slots) + policy_hash_bytes(l->metadata, l->metadata_slots) + mem_table_bytes(chunks);
}

/* In use for `l`, in tables that were made for `most`. */
static uint64_t cost(const struct layout *l, const struct layout *most)
{
	uint64_t more = most->all > l->all ? most->tables - l->tables + PAGES_MORE * 4096 : 0;

	return align_up(l->all + more, 4096) + sizeof(struct cache);
}

/* As many chunks as `size` has room for; 0: none. With `most` NULL in tables that are made for these. */
static uint32_t plan(const struct cache_config *o, uint64_t size, const struct layout *most, struct layout *l)
{
	uint32_t chunks = (uint32_t)min(size / o->chunk, (uint64_t)(REC_SLOT / 2) / (o->chunk / o->block));

	for (; chunks; chunks -= max(chunks / 1024, 1u)) {
		lay_out(o, chunks, l);
		if (cost(l, most ? most : l) + (uint64_t)chunks * o->chunk <= size)
			break;
	}
	return chunks;
}

static int check_config(struct cache_config *o, struct err *err)
{
	o->block = o->block ? o->block : CACHE_BLOCK;
	o->chunk = o->chunk ? o->chunk : MEM_CHUNK;
	o->most = max(o->most, o->size);
	o->curve_samples = o->curve_samples ? o->curve_samples : 2048;
	o->metadata_floor_pct = o->metadata_floor_pct ? o->metadata_floor_pct : 3;
	o->metadata_ceiling_pct = o->metadata_ceiling_pct ? o->metadata_ceiling_pct : 25;
	if (!is_pow2(o->block) || o->block < 512 || o->block > 65536)
		return err_set(err, -EINVAL, "cache: blocks of %u bytes: a power of two from 512 to 65536 is possible", o->block);
	if (!is_pow2(o->chunk) || o->chunk < o->block || o->metadata_ceiling_pct > 100 || o->metadata_floor_pct > o->metadata_ceiling_pct)
		return err_set(err, -EINVAL, "cache: metadata has a floor of %u %% and a ceiling of %u %%: they contradict each other",
			       o->metadata_floor_pct, o->metadata_ceiling_pct);
	return 0;
}

void cache_recompute(struct cache *c)
{
	uint64_t taken = c->fixed + c->curves + second_memory(c->second);
	uint32_t all, keep;

	if (taken > c->counted)
		budget_force(&c->user, taken - c->counted);
	else
		budget_give(&c->user, c->counted - taken);
	c->counted = taken;
	c->mem.allowed = c->budget > taken ? (uint32_t)min((c->budget - taken) / c->config.chunk, (uint64_t)c->chunks) : 0;
	all = c->mem.allowed * c->mem.per_chunk;
	c->floor = (uint32_t)((uint64_t)all * c->config.metadata_floor_pct / 100);
	c->ceiling = max((uint32_t)((uint64_t)all * c->config.metadata_ceiling_pct / 100), 1u);
	keep = max(c->floor, c->slots[CACHE_METADATA]);
	policy_set_capacity(&c->policy[CACHE_DATA], min((all > keep ? all - keep : 1) + c->zeros[CACHE_DATA], c->policy[CACHE_DATA].max));
	policy_set_capacity(&c->policy[CACHE_METADATA], min(c->ceiling + c->zeros[CACHE_METADATA], c->policy[CACHE_METADATA].max));
}

static int make_index(struct cache *c, const struct layout *l, uint32_t chunks)
{
	const struct policy_ops *ops = c->config.s3fifo ? &s3fifo_ops : &arc_ops;
	char *at;

	c->index_bytes = align_up(l->all, 4096);
	if (c->config.most > c->config.size) {
		/* Only what is in use is to take memory: neither what was used before for something else, nor huge pages. */
		c->index = mmap(NULL, c->index_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (c->index == MAP_FAILED)
			c->index = NULL;
		else
			madvise(c->index, c->index_bytes, MADV_NOHUGEPAGE);
	} else {
		c->index = calloc(1, c->index_bytes);
	}
	if (!c->index)
		return -ENOMEM;
	at = c->index;
	policy_init(&c->policy[CACHE_DATA], ops, at, l->records, l->slots, l->slots);
	at += l->policy[CACHE_DATA];
	policy_init(&c->policy[CACHE_METADATA], ops, at, l->metadata, l->metadata_slots, l->metadata_slots);
	at += l->policy[CACHE_METADATA];
	c->rec = (struct cache_record *)at;
	c->rec_max = l->records;
	c->rec_free = REC_NONE;
	at += l->rec;
	c->fill = (struct cache_fill *)at;
	at += l->fills;
	for (unsigned i = 0; i < FILLS; i++)
		c->fill[i].at = i + 1;
	return mem_init(&c->mem, at, chunks, c->block, c->config.chunk);
}

static void use_index(struct cache *c, const struct layout *l, const struct layout *most, uint32_t chunks)
{
	policy_set_room(&c->policy[CACHE_DATA], l->records, l->slots);
	policy_set_room(&c->policy[CACHE_METADATA], l->metadata, l->metadata_slots);
	c->rec_max = l->records;
	c->chunks = chunks;
	c->fixed = cost(l, most);
}

void cache_grow_index(struct cache *c, uint64_t size)
{
	struct layout most, l;
	uint32_t chunks;

	if (c->chunks == c->mem.chunks)
		return;
	lay_out(&c->config, c->mem.chunks, &most);
	chunks = min(plan(&c->config, size, &most, &l), c->mem.chunks);
	if (chunks <= c->chunks)
		return;
	lay_out(&c->config, chunks, &l);
	use_index(c, &l, &most, chunks);
}

int cache_create(const struct cache_config *config, struct cache **ret, struct err *err)
{
	struct cache_config o = *config;
	struct layout l = { 0 }, most = { 0 };
	char size[16], least[16];
	struct cache *c;
	uint32_t chunks, most_chunks;
	int r = check_config(&o, err);

	if (r < 0)
		return r;
	most_chunks = plan(&o, o.most, NULL, &most);
	chunks = o.most > o.size ? plan(&o, o.size, &most, &l) : most_chunks;
	if (!chunks)
		return err_set(err, -EINVAL, "a cache of %s is too small to be of use: give at least %s, or 0 for none",
			       size_format(o.size, size), size_format(2ull * o.chunk, least));
	c = calloc(1, sizeof(*c));
	if (!c)
		return err_errno(err, -ENOMEM, "cache");
	c->config = o;
	c->budget = o.size;
	c->block = o.block;
	c->shift = (uint32_t)__builtin_ctz(o.block);
	co_mutex_init(&c->shrink_lock);
	r = make_index(c, &most, most_chunks);
	if (r < 0) {
		cache_destroy(c);
		return err_errno(err, r, "cache: no address space for %s", size_format(o.most, size));
	}
	lay_out(&o, chunks, &l);
	c->policy[CACHE_DATA].capacity = l.slots;
	c->policy[CACHE_METADATA].capacity = l.metadata_slots;
	use_index(c, &l, &most, chunks);
	if (!budget_join(o.budget, &c->user, "read cache", c->fixed + o.chunk)) {
		cache_destroy(c);
		return err_set(err, -ENOMEM, "no memory is left in the budget for a cache of %s: give a larger --memory", size_format(o.size, size));
	}
	budget_set_yielding(&c->user);
	c->mem.user = &c->user;
	cache_recompute(c);
	*ret = c;
	return 0;
}

void cache_destroy(struct cache *c)
{
	if (!c)
		return;
	for (unsigned i = 0; i < CACHE_MAX_VOLUMES; i++)
		assert(!c->vol[i]);
	assert(!c->second);
	mem_fini(&c->mem);
	budget_leave(&c->user);
	if (c->config.most > c->config.size && c->index)
		munmap(c->index, c->index_bytes);
	else
		free(c->index);
	free(c);
}

void cache_end(struct cache *c)
{
	c->ending = true;
}

void cache_hold(struct cache *c)
{
	c->busy++;
}

void cache_release(struct cache *c)
{
	c->busy--;
}

uint64_t cache_size(const struct cache *c)
{
	return c->budget;
}

uint64_t cache_least(const struct cache *c)
{
	return c->fixed + c->curves + second_memory(c->second) + c->config.chunk;
}

uint64_t cache_most(const struct cache *c)
{
	return c->config.most;
}

uint64_t cache_shares(const struct cache *c)
{
	return (uint64_t)c->share_sum * c->block;
}

void cache_get_use(const struct cache *c, struct cache_use *ret)
{
	*ret = (struct cache_use){ 0 };
	for (unsigned i = 0; i < CACHE_CLASSES; i++) {
		const struct policy_counters *n = &c->policy[i].count;

		ret->reads += n->hits_recent + n->hits_frequent + n->misses;
		ret->misses += n->misses;
		ret->ghost_hits += n->ghost_recent + n->ghost_frequent;
	}
	for (unsigned i = 0; i < CACHE_MAX_VOLUMES; i++)
		ret->misses += c->vol[i] ? c->vol[i]->ahead_read : 0;
}

uint64_t cache_committed(const struct cache *c)
{
	return max(c->user.held, c->user.floor);
}

uint64_t cache_memory(const struct cache *c)
{
	return c->fixed + c->curves + second_memory(c->second) + (uint64_t)c->mem.mapped * c->config.chunk;
}
