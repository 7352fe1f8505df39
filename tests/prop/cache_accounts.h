/* SPDX-License-Identifier: MIT */
/* What a cache holds is what it says it holds, slot by slot and to the byte. */
#pragma once

#include "cache/internal.h"
#include "lib/test.h"
#include "util/bytes.h"

static inline void check_accounts(struct cache *c)
{
	uint64_t slots = 0, of_class[2] = { 0 }, zeros[2] = { 0 }, used = 0, mapped = 0;

	for (unsigned i = 0; i < CACHE_MAX_VOLUMES; i++) {
		struct cache_volume *v = c->vol[i];
		uint64_t mine = 0;

		for (unsigned k = 0; v && k < CACHE_CLASSES; k++) {
			uint64_t n = 0;

			for (uint32_t r = v->head[k]; r != REC_NONE; r = c->rec[r].next, n++) {
				CHECK_EQ(record_class(&c->rec[r]), k);
				CHECK_EQ(key_volume(c, record_key(c, &c->rec[r])), v);
				CHECK_EQ(record_find(c, record_key(c, &c->rec[r])), r);
				CHECK(cache_allows(v, k) || c->policy[k].resident);
				zeros[k] += record_is_zero(&c->rec[r]);
				if (record_is_zero(&c->rec[r]))
					continue;
				CHECK_EQ(c->mem.owner[c->rec[r].slot & REC_SLOT], r);
				mine++;
				of_class[k]++;
			}
			CHECK_EQ(n, v->records[k]);
		}
		for (unsigned k = 0; v && k < c->n_flying; k++) {
			struct cache_fill *f = &c->fill[c->flying[k].fill];

			mine += f->v == v ? f->n : 0;
			of_class[f->class] += f->v == v ? f->n : 0;
		}
		if (v)
			CHECK_EQ(mine, v->slots);
		if (v && v->limit)
			CHECK(v->slots <= v->limit || v->fills);	/* it was lowered while they were on their way */
		slots += mine;
	}
	CHECK_EQ(slots, c->mem.used);
	CHECK_EQ(of_class[0], c->slots[0]);
	CHECK_EQ(of_class[1], c->slots[1]);
	CHECK(zeros[0] == c->zeros[0] && zeros[1] == c->zeros[1]);
	for (uint32_t i = 0; i < c->mem.chunks; i++) {
		used += c->mem.chunk[i].mapped ? c->mem.chunk[i].used : 0;
		mapped += c->mem.chunk[i].mapped;
	}
	CHECK_EQ(used, c->mem.used);
	CHECK_EQ(mapped, c->mem.mapped);
	CHECK_EQ(cache_memory(c), c->fixed + c->curves + second_memory(c->second) + mapped * c->config.chunk);
	/* Of the index no more is in use than what is counted. */
	CHECK(c->rec_touched <= c->rec_max && c->mem.allowed <= c->chunks);
	for (unsigned k = 0; k < CACHE_CLASSES; k++)
		CHECK(c->policy[k].resident + c->policy[k].ghosts <= c->policy[k].entries && c->policy[k].resident <= c->policy[k].max);
	if (c->second) {
		uint32_t n = 0;

		for (uint32_t i = 0; i < c->second->slots + SECOND_STAGES * c->second->entries; i++)
			n += c->second->slot[i].key != SECOND_FREE;
		CHECK_EQ(n, c->second->used);
	}
	/* Never above the budget, but while it is made smaller. */
	CHECK(cache_memory(c) <= c->budget || c->shrink_lock.owner);
}
