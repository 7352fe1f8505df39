/* SPDX-License-Identifier: MIT */
/*
 * Data memory of a cache. See memory.h.
 *
 * Invariants
 *  (1) a slot is free, on its chunk's list, or used; m->used and chunk->used count the used ones;
 *  (2) `roomy` has the bit of a chunk iff it is mapped and has a free slot;
 *  (3) m->mapped chunks cost memory; it grows only while it is below m->allowed.
 *
 * The lowest chunk with room is taken, so that the higher ones empty themselves.
 */
#include "cache/memory.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#include "rt/area.h"
#include "rt/budget.h"
#include "util/bytes.h"

static uint32_t words(uint32_t chunks)
{
	return (chunks + 63) / 64;
}

uint64_t mem_bytes(uint32_t chunks, uint32_t block, uint32_t chunk_bytes)
{
	return mem_table_bytes(chunks) + (uint64_t)chunks * (chunk_bytes / block) * (sizeof(uint32_t) + 1) + 64;
}

uint64_t mem_table_bytes(uint32_t chunks)
{
	return chunks * sizeof(struct mem_chunk) + words(chunks) * sizeof(uint64_t);
}

int mem_init(struct cache_mem *m, void *book, uint32_t chunks, uint32_t block, uint32_t chunk_bytes)
{
	*m = (struct cache_mem){ .block = block, .chunk_bytes = chunk_bytes, .per_chunk = chunk_bytes / block, .chunks = chunks, .allowed = chunks };
	m->map_bytes = (uint64_t)chunks * chunk_bytes + MEM_CHUNK;
	m->map = mmap(NULL, m->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m->map == MAP_FAILED)
		return -ENOMEM;
	m->base = (char *)align_up((uintptr_t)m->map, MEM_CHUNK);
	if (chunk_bytes >= MEM_CHUNK)
		madvise(m->base, (uint64_t)chunks * chunk_bytes, MADV_HUGEPAGE);
	madvise(m->map, m->map_bytes, MADV_DONTDUMP);
	/* In pieces that are given back as wholes: what the ring knows stays in memory. */
	if (chunk_bytes % RT_AREA_PIECE == 0 && rt_self())
		m->area = rt_area_create(rt_self(), m->base, (uint64_t)chunks * chunk_bytes);
	m->roomy = book;
	m->chunk = (struct mem_chunk *)(m->roomy + words(chunks));
	m->owner = (uint32_t *)(m->chunk + chunks);
	m->note = (uint8_t *)(m->owner + (uint64_t)chunks * m->per_chunk);
	return 0;
}

void mem_fini(struct cache_mem *m)
{
	rt_area_destroy(m->area);
	m->area = NULL;
	if (m->map)
		munmap(m->map, m->map_bytes);
	m->map = NULL;
}

static void set_roomy(struct cache_mem *m, uint32_t chunk, bool on)
{
	uint64_t bit = 1ull << chunk % 64;

	if (on) {
		m->roomy[chunk / 64] |= bit;
		m->hint = min(m->hint, chunk / 64);
	} else {
		m->roomy[chunk / 64] &= ~bit;
	}
}

/* The lowest chunk that is mapped and has room, or after that the lowest that is not mapped. */
static uint32_t find_room(struct cache_mem *m)
{
	while (m->hint < words(m->chunks) && !m->roomy[m->hint])
		m->hint++;
	if (m->hint < words(m->chunks))
		return m->hint * 64 + (uint32_t)__builtin_ctzll(m->roomy[m->hint]);
	if (m->mapped >= m->allowed)
		return MEM_NONE;
	for (uint32_t i = 0; i < m->chunks; i++)
		if (!m->chunk[i].mapped)
			return i;
	return MEM_NONE;
}

static void map_chunk(struct cache_mem *m, uint32_t i)
{
	struct mem_chunk *c = &m->chunk[i];
	uint32_t first = i * m->per_chunk;

	for (uint32_t s = 0; s < m->per_chunk; s++)
		m->owner[first + s] = s + 1 < m->per_chunk ? (first + s + 1) | MEM_FREE : MEM_NONE;
	*c = (struct mem_chunk){ .free = first, .mapped = true };
	m->mapped++;
	set_roomy(m, i, true);
}

static uint32_t take(struct cache_mem *m, uint32_t i)
{
	uint32_t slot = m->chunk[i].free;

	m->chunk[i].free = m->owner[slot] == MEM_NONE ? MEM_NONE : m->owner[slot] & ~MEM_FREE;
	m->chunk[i].used++;
	m->used++;
	m->owner[slot] = MEM_HELD;
	m->note[slot] = MEM_OWN;
	if (m->chunk[i].free == MEM_NONE)
		set_roomy(m, i, false);
	return slot;
}

uint32_t mem_get(struct cache_mem *m)
{
	uint32_t i;

	if (!mem_free(m) || (i = find_room(m)) == MEM_NONE)
		return MEM_NONE;
	if (!m->chunk[i].mapped) {
		if (m->user && !budget_take(m->user, m->chunk_bytes))
			return MEM_NONE;
		map_chunk(m, i);
	}
	return take(m, i);
}

uint32_t mem_get_below(struct cache_mem *m, uint32_t chunk)
{
	while (m->hint < words(m->chunks) && !m->roomy[m->hint])
		m->hint++;
	if (m->hint == words(m->chunks))
		return MEM_NONE;

	uint32_t i = m->hint * 64 + (uint32_t)__builtin_ctzll(m->roomy[m->hint]);

	return i < chunk ? take(m, i) : MEM_NONE;
}

void mem_put(struct cache_mem *m, uint32_t slot)
{
	uint32_t i = slot / m->per_chunk;

	m->owner[slot] = m->chunk[i].free | MEM_FREE;	/* MEM_NONE stays what it is */
	m->chunk[i].free = slot;
	m->chunk[i].used--;
	m->used--;
	set_roomy(m, i, true);
}

void mem_release_chunk(struct cache_mem *m, uint32_t chunk)
{
	uint64_t at = (uint64_t)chunk * m->chunk_bytes;

	if (m->area)
		rt_area_forget(m->area, at, m->chunk_bytes);
	madvise(m->base + at, m->chunk_bytes, MADV_DONTNEED);
	m->chunk[chunk].mapped = false;
	m->mapped--;
	set_roomy(m, chunk, false);
	if (m->user)
		budget_give(m->user, m->chunk_bytes);
}

void mem_release(struct cache_mem *m, uint32_t keep)
{
	for (uint32_t i = m->chunks; i-- > 0 && m->mapped;) {
		const struct mem_chunk *c = &m->chunk[i];

		m->looks++;
		if (!c->mapped || c->used)
			continue;
		if (keep && m->mapped <= m->allowed) {
			keep--;
			continue;
		}
		mem_release_chunk(m, i);
	}
}

uint32_t mem_chunk_below(struct cache_mem *m, uint32_t chunk)
{
	for (uint32_t i = min(chunk, m->chunks); i-- > 0;) {
		m->looks++;
		if (m->chunk[i].mapped && m->chunk[i].used)
			return i;
	}
	return MEM_NONE;
}
