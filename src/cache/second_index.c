/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache: which block lies where.
 *
 * A slot is a place: of segment i they are i * entries and so on; those of the stages follow behind the last segment's. What leaves the index while it is
 * on the device makes its segment's header dirty.
 */
#include "cache/internal.h"

#define STEP 1024u

static uint64_t hash(uint64_t key)
{
	key ^= key >> 29;
	key *= 0xbf58476d1ce4e5b9ull;
	key ^= key >> 32;
	return key * 0x9e3779b97f4a7c15ull;
}

static uint32_t *bucket_of(const struct second *s, uint64_t key)
{
	return &s->bucket[hash(key) >> s->shift];
}

uint32_t second_find(const struct second *s, uint64_t key)
{
	uint32_t at = *bucket_of(s, key);

	while (at && s->slot[at - 1].key != key)
		at = s->slot[at - 1].chain;
	return at - 1;	/* 0 becomes SECOND_NONE */
}

static struct cache_volume *volume_at(const struct second *s, uint64_t key)
{
	return s->vol[second_key_rec(key)];
}

void second_insert(struct second *s, uint32_t slot, uint64_t key, uint32_t crc)
{
	uint32_t *bucket = bucket_of(s, key);

	s->slot[slot] = (struct second_slot){ key, *bucket, crc };
	*bucket = slot + 1;
	s->used++;
	if (volume_at(s, key))
		volume_at(s, key)->second.blocks++;
}

void second_remove(struct second *s, uint32_t slot)
{
	uint64_t key = s->slot[slot].key;
	uint32_t *at = bucket_of(s, key);

	while (*at != slot + 1)
		at = &s->slot[*at - 1].chain;
	*at = s->slot[slot].chain;
	s->slot[slot].key = SECOND_FREE;
	s->used--;
	if (volume_at(s, key))
		volume_at(s, key)->second.blocks--;
}

void second_mark_dirty(struct second *s, uint32_t segment)
{
	s->n_dirty += !s->dirty[segment];
	s->dirty[segment] = 1;
}

void second_drop(struct second *s, uint32_t slot)
{
	second_remove(s, slot);
	if (slot < s->slots)
		second_mark_dirty(s, slot / s->entries);
}

bool second_is_filtered(const struct second *s, uint64_t key)
{
	uint64_t bit = hash(key) % SECOND_FILTER;

	return s->filter[bit / 64] >> bit % 64 & 1;
}

/* What the scan has not come to must not be taken for valid when it does. */
static void filter(struct cache_volume *v, uint64_t first, uint64_t last)
{
	struct second *s = v->c->second;

	if (last - first >= SECOND_FILTER / 256) {
		v->second.lost = true;
		return;
	}
	for (uint64_t b = first; b <= last; b++) {
		uint64_t bit = hash(second_key((unsigned)v->second.rec, b)) % SECOND_FILTER;

		s->filter[bit / 64] |= 1ull << bit % 64;
	}
}

static co_fn void co_drop_by_table(struct cache_volume *v, uint64_t first, uint64_t last)
{
	struct second *s = v->c->second;
	uint64_t a = second_key((unsigned)v->second.rec, first), b = second_key((unsigned)v->second.rec, last);

	for (uint32_t i = 0; i < s->slots + SECOND_STAGES * s->entries && v->second.blocks; i++) {
		if (s->slot[i].key >= a && s->slot[i].key <= b)
			second_drop(s, i);
		if (i % STEP == STEP - 1)
			co_yield();
	}
}

co_fn void co_second_drop_range(struct cache_volume *v, uint64_t first, uint64_t last)
{
	struct second *s = v->c->second;

	if (s->scanning)
		filter(v, first, last);
	if (!v->second.blocks)
		return;
	if (last - first > s->slots) {
		co_drop_by_table(v, first, last);
		return;
	}
	for (uint64_t b = first; b <= last && v->second.blocks; b++) {
		uint32_t slot = second_find(s, second_key((unsigned)v->second.rec, b));

		if (slot != SECOND_NONE)
			second_drop(s, slot);
		if (b % STEP == STEP - 1)
			co_yield();
	}
}
