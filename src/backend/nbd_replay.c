/* SPDX-License-Identifier: MIT */
/*
 * NBD client: the copy of what the server may lose. See nbd_replay.h for the invariants.
 */
#include <assert.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "backend/nbd_replay.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/list.h"
#include "util/rbtree.h"

#define ENTRIES_MAX 8192u	/* power of two; 4 KiB writes fill 32 MiB with as many */

struct entry {
	uint64_t off, len, pos;	/* pos: of the data, counted from the start of time, modulo the size of the ring */
	enum nbd_replay_kind kind;
	unsigned flags;
	/* The covered range that this entry stands for while a plan is made: merged ranges, disjoint, never adjacent. */
	struct rb_node node;
	uint64_t from, to;
};

struct nbd_replay {
	uint8_t *data;
	struct entry *entry;
	uint64_t size;
	uint64_t head, tail;	/* of the data: oldest byte, next byte; counted from the start of time */
	uint64_t reserved;
	uint64_t first, next;	/* entries, counted from the start of time */
	unsigned reserved_entries;
	/* plan */
	struct rb_tree covered;
	uint64_t plan, plan_pos; /* entries below `plan` are to be done; plan_pos is the offset inside entry plan - 1 */
};

static struct entry *entry_at(const struct nbd_replay *r, uint64_t i)
{
	return &r->entry[i % ENTRIES_MAX];
}

static void *map(uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

struct nbd_replay *nbd_replay_create(uint64_t bytes)
{
	struct nbd_replay *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	r->size = bytes;
	r->data = map(bytes);
	r->entry = map(ENTRIES_MAX * sizeof(struct entry));
	if (!r->data || !r->entry) {
		nbd_replay_destroy(r);
		return NULL;
	}
	return r;
}

void nbd_replay_destroy(struct nbd_replay *r)
{
	if (!r)
		return;
	if (r->data)
		munmap(r->data, r->size);
	if (r->entry)
		munmap(r->entry, ENTRIES_MAX * sizeof(struct entry));
	free(r);
}

bool nbd_replay_reserve(struct nbd_replay *r, uint64_t bytes)
{
	if (nbd_replay_bytes(r) + r->reserved + bytes > r->size || r->next - r->first + r->reserved_entries + 1 > ENTRIES_MAX)
		return false;
	r->reserved += bytes;
	r->reserved_entries++;
	return true;
}

void nbd_replay_release(struct nbd_replay *r, uint64_t bytes)
{
	assert(r->reserved >= bytes && r->reserved_entries);
	r->reserved -= bytes;
	r->reserved_entries--;
}

/* The `len` bytes at ring position `pos` as one or two parts. */
static int ring_iov(const struct nbd_replay *r, uint64_t pos, uint64_t len, struct iovec iov[2])
{
	uint64_t at = pos % r->size, first = min(len, r->size - at);

	iov[0] = (struct iovec){ r->data + at, first };
	iov[1] = (struct iovec){ r->data, len - first };
	return first < len ? 2 : 1;
}

void nbd_replay_add(struct nbd_replay *r, enum nbd_replay_kind kind, unsigned flags, uint64_t off, uint64_t len,
		    const struct iovec *iov, int niov, uint64_t reserved)
{
	struct entry *e = entry_at(r, r->next);

	nbd_replay_release(r, reserved);
	if (kind == NBD_REPLAY_DURABLE && r->next == r->first)
		return;		/* nothing older that it could cover */
	*e = (struct entry){ .off = off, .len = len, .pos = r->tail, .kind = kind, .flags = flags };
	if (kind == NBD_REPLAY_WRITE) {
		struct iovec to[2];
		size_t done = 0;

		assert(len <= reserved);
		for (int i = 0, n = ring_iov(r, r->tail, len, to); i < n; i++)
			done += iov_copy_out(iov, niov, done, to[i].iov_base, to[i].iov_len);
		r->tail += len;
	}
	r->next++;
}

uint64_t nbd_replay_mark(const struct nbd_replay *r)
{
	return r->next;
}

void nbd_replay_drop(struct nbd_replay *r, uint64_t mark)
{
	while (r->first < mark && r->first < r->next) {
		const struct entry *e = entry_at(r, r->first++);

		if (e->kind == NBD_REPLAY_WRITE)
			r->head = e->pos + e->len;
	}
	/* Durable entries in front cover nothing any more. */
	while (r->first < r->next && entry_at(r, r->first)->kind == NBD_REPLAY_DURABLE)
		r->first++;
	if (r->first == r->next)
		r->head = r->tail = 0;	/* so that small batches touch little memory */
}

bool nbd_replay_is_empty(const struct nbd_replay *r)
{
	return r->first == r->next;
}

uint64_t nbd_replay_bytes(const struct nbd_replay *r)
{
	return r->tail - r->head;
}

uint64_t nbd_replay_size(const struct nbd_replay *r)
{
	return r->size;
}

/* The first covered range that ends behind `off`, or NULL. */
static struct entry *covered_after(const struct nbd_replay *r, uint64_t off)
{
	struct rb_node *n = r->covered.root;
	struct entry *best = NULL;

	while (n) {
		struct entry *e = container_of(n, struct entry, node);

		if (e->to > off) {
			best = e;
			n = n->left;
		} else {
			n = n->right;
		}
	}
	return best;
}

/* Adds the entry's range to what is covered, and merges it with all that it overlaps or touches. */
static void cover(struct nbd_replay *r, struct entry *e)
{
	struct rb_node *parent = NULL, **link = &r->covered.root;
	struct entry *o;

	e->from = e->off;
	e->to = e->off + e->len;
	/* From one byte earlier on, so that a range that ends where this one begins is found too. */
	while ((o = covered_after(r, e->from ? e->from - 1 : 0)) && o->from <= e->to) {
		e->from = min(e->from, o->from);
		e->to = max(e->to, o->to);
		rb_erase(&r->covered, &o->node);
	}
	while (*link) {
		parent = *link;
		link = e->from < container_of(parent, struct entry, node)->from ? &parent->left : &parent->right;
	}
	rb_insert(&r->covered, &e->node, parent, link);
}

void nbd_replay_begin(struct nbd_replay *r)
{
	r->covered.root = NULL;
	r->plan = r->next;
	r->plan_pos = 0;
}

bool nbd_replay_next(struct nbd_replay *r, uint64_t max, struct nbd_replay_op *ret)
{
	while (r->plan > r->first) {
		struct entry *e = entry_at(r, r->plan - 1);
		uint64_t at = e->off + r->plan_pos, end = e->off + e->len;
		const struct entry *c = at < end ? covered_after(r, at) : NULL;

		if (at < end && c && c->from <= at) {
			r->plan_pos = min(c->to, end) - e->off;
			continue;
		}
		if (at == end || e->kind == NBD_REPLAY_DURABLE) {
			cover(r, e);
			r->plan--;
			r->plan_pos = 0;
			continue;
		}
		if (c)
			end = min(end, c->from);
		ret->kind = e->kind;
		ret->flags = e->flags;
		ret->off = at;
		ret->len = e->kind == NBD_REPLAY_WRITE ? min(end - at, max) : end - at;
		ret->niov = e->kind == NBD_REPLAY_WRITE ? ring_iov(r, e->pos + (at - e->off), ret->len, ret->iov) : 0;
		r->plan_pos += ret->len;
		return true;
	}
	return false;
}
