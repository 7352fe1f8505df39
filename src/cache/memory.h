/* SPDX-License-Identifier: MIT */
/*
 * Data memory of a cache: slots of one block each, in chunks that are taken from and given back to the kernel as wholes. Never
 * allocates after the start: one mapping is reserved, and a chunk costs memory from its first slot's use to mem_release().
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MEM_NONE UINT32_MAX
#define MEM_CHUNK (2u << 20)	/* a huge page */
#define MEM_HELD 0x7fffffffu	/* owner of a used slot that no record has (yet) */
#define MEM_FREE 0x80000000u	/* set in the owner of a free slot */

struct budget_user;
struct rt_bufpool;

/* Whether another layer of the same cache keeps what was read into the slot, and how it came by it. */
enum mem_note { MEM_OWN, MEM_BELOW, MEM_BELOW_HIT };

struct mem_chunk {
	uint32_t used;
	uint32_t free;		/* the first free slot of the chunk, or MEM_NONE */
	bool mapped;
};

struct cache_mem {
	char *base;
	void *map;
	uint64_t map_bytes;
	uint32_t block, chunk_bytes, per_chunk;
	uint32_t chunks;	/* reserved */
	uint32_t allowed;	/* mapped at most */
	uint32_t mapped, used;	/* chunks, slots */
	struct mem_chunk *chunk;
	uint32_t *owner;	/* of a used slot: a record, or MEM_HELD. Of a free one: MEM_FREE, and the next free slot of its chunk */
	uint8_t *note;		/* of a slot that is MEM_HELD: an enum mem_note */
	uint64_t *roomy;	/* a bit for each mapped chunk with a free slot */
	struct rt_bufpool *area; /* known to the ring; NULL: not */
	uint32_t hint;		/* no roomy chunk in a word below */
	uint64_t looks;		/* at a chunk or a slot, of what goes through many: for tests */
	struct budget_user *user; /* chunks come out of its budget; NULL: of none */
};

/* Bytes of bookkeeping for so many chunks, and how many of them are touched whatever is used. */
uint64_t mem_bytes(uint32_t chunks, uint32_t block, uint32_t chunk_bytes);
uint64_t mem_table_bytes(uint32_t chunks);
/* `book` is zeroed memory of mem_bytes(). -ENOMEM. */
int mem_init(struct cache_mem *m, void *book, uint32_t chunks, uint32_t block, uint32_t chunk_bytes);
void mem_fini(struct cache_mem *m);
/* A slot that is MEM_HELD; MEM_NONE if the chunks that are allowed are full. */
uint32_t mem_get(struct cache_mem *m);
/* One of a chunk below `chunk` that is mapped, whatever is allowed. */
uint32_t mem_get_below(struct cache_mem *m, uint32_t chunk);
void mem_put(struct cache_mem *m, uint32_t slot);
/* Gives empty chunks back, but for `keep` of them. Each costs a system call. */
void mem_release(struct cache_mem *m, uint32_t keep);
/* One that is mapped and empty. */
void mem_release_chunk(struct cache_mem *m, uint32_t chunk);
/* The highest chunk in use below this one (MEM_NONE: of all), the next to empty when there is too much; MEM_NONE if there is none. */
uint32_t mem_chunk_below(struct cache_mem *m, uint32_t chunk);

static inline char *mem_addr(const struct cache_mem *m, uint32_t slot)
{
	return m->base + (uint64_t)slot * m->block;
}

/* The slot that begins there; MEM_NONE if it is not in this memory, or no slot's beginning. */
static inline uint32_t mem_slot_at(const struct cache_mem *m, const char *p)
{
	uint64_t at = (uint64_t)(p - m->base);

	return p >= m->base && at < (uint64_t)m->chunks * m->chunk_bytes && at % m->block == 0 ? (uint32_t)(at / m->block) : MEM_NONE;
}

static inline bool mem_is_used(const struct cache_mem *m, uint32_t slot)
{
	return !(m->owner[slot] & MEM_FREE);
}

/* Slots that could be had without taking one from somebody. */
static inline uint64_t mem_free(const struct cache_mem *m)
{
	uint64_t all = (uint64_t)m->allowed * m->per_chunk;

	return all > m->used ? all - m->used : 0;
}
