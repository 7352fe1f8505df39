/* SPDX-License-Identifier: MIT */
/* Sparse copy-on-write RAM media. */
#include "backend/media.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"

#define NODE_CHUNKS 64u
#define NODE_BYTES ((uint64_t)MEDIA_CHUNK * NODE_CHUNKS)

struct chunk {
	unsigned refs;
	uint8_t data[MEDIA_CHUNK];
};

struct node {
	unsigned refs;
	struct chunk *chunk[NODE_CHUNKS];
};

struct media {
	uint64_t size, n_nodes;
	struct node **node;
};

static void *must(void *p)
{
	if (!p)
		abort();
	return p;
}

static uint64_t count_nodes(uint64_t size)
{
	return (size + NODE_BYTES - 1) / NODE_BYTES;
}

struct media *media_create(uint64_t size)
{
	struct media *m = must(calloc(1, sizeof(*m)));

	m->size = size;
	m->n_nodes = count_nodes(size);
	m->node = must(calloc(m->n_nodes + 1, sizeof(*m->node)));
	return m;
}

struct media *media_clone(const struct media *m)
{
	struct media *c = media_create(m->size);

	for (uint64_t i = 0; i < m->n_nodes; i++) {
		c->node[i] = m->node[i];
		if (c->node[i])
			c->node[i]->refs++;
	}
	return c;
}

static void chunk_put(struct chunk *c)
{
	if (c && !--c->refs)
		free(c);
}

static void node_put(struct node *n)
{
	if (!n || --n->refs)
		return;
	for (unsigned i = 0; i < NODE_CHUNKS; i++)
		chunk_put(n->chunk[i]);
	free(n);
}

void media_destroy(struct media *m)
{
	if (!m)
		return;
	for (uint64_t i = 0; i < m->n_nodes; i++)
		node_put(m->node[i]);
	free(m->node);
	free(m);
}

uint64_t media_size(const struct media *m)
{
	return m->size;
}

void media_resize(struct media *m, uint64_t size)
{
	uint64_t n = count_nodes(size);

	if (size < m->size)
		media_zero(m, size, m->size - size);
	for (uint64_t i = n; i < m->n_nodes; i++)
		node_put(m->node[i]);
	m->node = must(realloc(m->node, (n + 1) * sizeof(*m->node)));
	for (uint64_t i = m->n_nodes; i < n; i++)
		m->node[i] = NULL;
	m->n_nodes = n;
	m->size = size;
}

static const struct chunk *chunk_at(const struct media *m, uint64_t off)
{
	const struct node *n = m->node[off / NODE_BYTES];

	return n ? n->chunk[off % NODE_BYTES / MEDIA_CHUNK] : NULL;
}

/* The place of a chunk in a node that is not shared. */
static struct chunk **own_slot(struct media *m, uint64_t off)
{
	struct node **pn = &m->node[off / NODE_BYTES], *n = *pn;

	if (!n) {
		n = *pn = must(calloc(1, sizeof(*n)));
		n->refs = 1;
	} else if (n->refs > 1) {
		*pn = must(malloc(sizeof(*n)));
		**pn = *n;
		(*pn)->refs = 1;
		n->refs--;
		n = *pn;
		for (unsigned i = 0; i < NODE_CHUNKS; i++)
			if (n->chunk[i])
				n->chunk[i]->refs++;
	}
	return &n->chunk[off % NODE_BYTES / MEDIA_CHUNK];
}

/* A chunk that is not shared; what it holds is kept if `keep`. */
static struct chunk *own_chunk(struct media *m, uint64_t off, bool keep)
{
	struct chunk **slot = own_slot(m, off), *old = *slot;

	if (old && old->refs == 1)
		return old;
	*slot = must(malloc(sizeof(**slot)));
	(*slot)->refs = 1;
	if (keep && old)
		memcpy((*slot)->data, old->data, MEDIA_CHUNK);
	else if (keep)
		memset((*slot)->data, 0, MEDIA_CHUNK);
	chunk_put(old);
	return *slot;
}

static uint64_t in_chunk(uint64_t off, uint64_t len)
{
	return min(len, MEDIA_CHUNK - off % MEDIA_CHUNK);
}

void media_read(const struct media *m, uint64_t off, void *buf, uint64_t len)
{
	char *p = buf;

	assert(len <= m->size && off <= m->size - len);
	for (uint64_t n; len; off += n, p += n, len -= n) {
		const struct chunk *c = chunk_at(m, off);

		n = in_chunk(off, len);
		if (c)
			memcpy(p, c->data + off % MEDIA_CHUNK, n);
		else
			memset(p, 0, n);
	}
}

void media_write(struct media *m, uint64_t off, const void *buf, uint64_t len)
{
	const char *p = buf;

	assert(len <= m->size && off <= m->size - len);
	for (uint64_t n; len; off += n, p += n, len -= n) {
		n = in_chunk(off, len);
		memcpy(own_chunk(m, off, n != MEDIA_CHUNK)->data + off % MEDIA_CHUNK, p, n);
	}
}

void media_zero(struct media *m, uint64_t off, uint64_t len)
{
	assert(len <= m->size && off <= m->size - len);
	for (uint64_t n; len; off += n, len -= n) {
		n = in_chunk(off, len);
		if (!chunk_at(m, off))
			continue;
		if (n == MEDIA_CHUNK) {
			struct chunk **slot = own_slot(m, off);

			chunk_put(*slot);
			*slot = NULL;
		} else {
			memset(own_chunk(m, off, true)->data + off % MEDIA_CHUNK, 0, n);
		}
	}
}

bool media_equal(const struct media *a, const struct media *b, uint64_t off, uint64_t len, uint64_t *ret_off)
{
	static const uint8_t zeroes[MEDIA_CHUNK];

	for (uint64_t n; len; off += n, len -= n) {
		const struct chunk *ca, *cb;
		const uint8_t *pa, *pb;

		if (off % NODE_BYTES == 0 && len >= NODE_BYTES && a->node[off / NODE_BYTES] == b->node[off / NODE_BYTES]) {
			n = NODE_BYTES;
			continue;
		}
		n = in_chunk(off, len);
		ca = chunk_at(a, off);
		cb = chunk_at(b, off);
		if (ca == cb)
			continue;
		pa = (ca ? ca->data : zeroes) + off % MEDIA_CHUNK;
		pb = (cb ? cb->data : zeroes) + off % MEDIA_CHUNK;
		if (!memcmp(pa, pb, n))
			continue;
		while (*pa == *pb)
			pa++, pb++, off++;
		if (ret_off)
			*ret_off = off;
		return false;
	}
	return true;
}

uint64_t media_allocated(const struct media *m)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < m->n_nodes; i++)
		for (unsigned k = 0; m->node[i] && k < NODE_CHUNKS; k++)
			n += m->node[i]->chunk[k] ? MEDIA_CHUNK : 0;
	return n;
}

uint64_t media_extent(const struct media *m, uint64_t off, uint64_t len, bool *ret_hole)
{
	bool hole = !chunk_at(m, off);
	uint64_t done = in_chunk(off, len);

	while (done < len && !chunk_at(m, off + done) == hole)
		done += in_chunk(off + done, len - done);
	*ret_hole = hole;
	return done;
}
