/* SPDX-License-Identifier: MIT */
/*
 * Write log: interval map.
 */
#include "wlog/map.h"

#include <errno.h>
#include <sys/mman.h>

#include "util/bytes.h"
#include "wlog/format.h"

#define CHUNK 16384u

struct wl_chunk {
	struct wl_chunk *next;
	struct wl_entry entry[CHUNK];
};

int wl_pool_init(struct wl_pool *p, uint64_t cap)
{
	/* Reserved, and touched entry by entry as the log fills. */
	void *m = mmap(NULL, cap * sizeof(struct wl_entry), PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (m == MAP_FAILED)
		return -ENOMEM;
	*p = (struct wl_pool){ .base = m, .cap = cap };
	return 0;
}

void wl_pool_fini(struct wl_pool *p)
{
	while (p->chunks) {
		struct wl_chunk *c = p->chunks;

		p->chunks = c->next;
		munmap(c, sizeof(*c));
	}
	if (p->base)
		munmap(p->base, p->cap * sizeof(struct wl_entry));
	*p = (struct wl_pool){ 0 };
}

int wl_pool_grow(struct wl_pool *p, uint64_t n)
{
	while (wl_pool_left(p) < n) {
		struct wl_chunk *c = mmap(NULL, sizeof(*c), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (c == MAP_FAILED)
			return -ENOMEM;
		c->next = p->chunks;
		p->chunks = c;
		for (unsigned i = 0; i < CHUNK; i++) {
			c->entry[i].node.right = p->free ? &p->free->node : NULL;
			p->free = &c->entry[i];
		}
		p->extra += CHUNK;
	}
	return 0;
}

struct wl_entry *wl_pool_get(struct wl_pool *p)
{
	struct wl_entry *e = p->free;

	if (e)
		p->free = e->node.right ? container_of(e->node.right, struct wl_entry, node) : NULL;
	else if (p->fresh < p->cap)
		e = &p->base[p->fresh++];
	else
		return NULL;
	p->used++;
	*e = (struct wl_entry){ 0 };
	list_init(&e->on_batch);
	list_init(&e->fifo);
	return e;
}

void wl_pool_put(struct wl_pool *p, struct wl_entry *e)
{
	list_del(&e->on_batch);
	list_del(&e->fifo);
	e->node.right = p->free ? &p->free->node : NULL;
	p->free = e;
	p->used--;
}

void wl_map_init(struct wl_map *m)
{
	*m = (struct wl_map){ 0 };
}

static struct wl_entry *entry_of(struct rb_node *n)
{
	return n ? container_of(n, struct wl_entry, node) : NULL;
}

struct wl_entry *wl_map_find(const struct wl_map *m, uint64_t off)
{
	struct wl_entry *found = NULL;

	for (struct rb_node *n = m->tree.root; n;) {
		struct wl_entry *e = entry_of(n);

		if (e->off + e->len > off) {
			found = e;
			n = n->left;
		} else {
			n = n->right;
		}
	}
	return found;
}

struct wl_entry *wl_map_next(const struct wl_entry *e)
{
	return entry_of(rb_next(&e->node));
}

/* What `n` bytes of the entry count as data: zeroes take no room in the log. */
static uint64_t data_len(const struct wl_entry *e, uint64_t n)
{
	return e->type == WL_WRITE ? n : 0;
}

/* Counts `e` in, linked at a place that the caller has found. */
static void link_at(struct wl_map *m, struct wl_entry *e, struct rb_node *parent, struct rb_node **link)
{
	rb_insert(&m->tree, &e->node, parent, link);
	e->map = m;
	m->bytes += data_len(e, e->len);
	m->entries++;
	list_add_tail(&e->batch->entries, &e->on_batch);
}

static void link_entry(struct wl_map *m, struct wl_entry *e)
{
	struct rb_node **link = &m->tree.root, *parent = NULL;

	while (*link) {
		parent = *link;
		link = e->off < entry_of(parent)->off ? &parent->left : &parent->right;
	}
	link_at(m, e, parent, link);
}

void wl_map_erase(struct wl_map *m, struct wl_pool *p, struct wl_entry *e)
{
	rb_erase(&m->tree, &e->node);
	m->bytes -= data_len(e, e->len);
	m->entries--;
	wl_pool_put(p, e);
}

/* Cuts `n` bytes off the front. */
static void trim_front(struct wl_map *m, struct wl_entry *e, uint64_t n)
{
	e->off += n;
	e->len -= n;
	if (e->type == WL_WRITE)
		e->data += n;
	m->bytes -= data_len(e, n);
}

/* Makes `e`, which is new, describe [off, end) of `from`. */
static void copy_part(struct wl_entry *e, const struct wl_entry *from, uint64_t off, uint64_t end)
{
	e->batch = from->batch;
	e->off = off;
	e->len = end - off;
	e->rno = from->rno;
	e->epoch = from->epoch;
	e->volume = from->volume;
	e->type = from->type;
	e->data = from->type == WL_WRITE ? from->data + (uint32_t)(off - from->off) : 0;
	e->rec_data = from->rec_data;
	e->rec_len = from->rec_len;
	e->rec_crc = from->rec_crc;
}

/* Takes [off, end) away from `e`, which overlaps it. False if that needs an entry and there is none. */
static bool cut(struct wl_map *m, struct wl_pool *p, struct wl_entry *e, uint64_t off, uint64_t end)
{
	uint64_t e_end = e->off + e->len;

	if (e->off < off && e_end > end) {
		struct wl_entry *tail = wl_pool_get(p);

		if (!tail)
			return false;
		copy_part(tail, e, end, e_end);
		m->bytes -= data_len(e, e_end - off);
		e->len = off - e->off;
		link_entry(m, tail);
	} else if (e->off < off) {
		m->bytes -= data_len(e, e_end - off);
		e->len = off - e->off;
	} else if (e_end > end) {
		trim_front(m, e, end - e->off);
	} else {
		wl_map_erase(m, p, e);
	}
	return true;
}

struct wl_entry *wl_entry_clone(struct wl_pool *p, const struct wl_entry *from)
{
	struct wl_entry *e = wl_pool_get(p);

	if (e) {
		copy_part(e, from, from->off, from->off + from->len);
		list_add_tail(&e->batch->entries, &e->on_batch);
	}
	return e;
}

static int insert_piece(struct wl_map *m, struct wl_pool *p, const struct wl_entry *t, uint64_t off, uint64_t end)
{
	struct wl_entry *e = wl_pool_get(p);

	if (!e)
		return -ENOSPC;
	copy_part(e, t, off, end);
	link_entry(m, e);
	return 0;
}

static int insert_around_newer(struct wl_map *m, struct wl_pool *p, const struct wl_entry *t)
{
	uint64_t off = t->off, end = t->off + t->len;

	while (off < end) {
		struct wl_entry *e = wl_map_find(m, off);

		if (e && e->off < end && e->rno > t->rno) {
			uint64_t e_off = e->off, e_end = e->off + e->len;

			if (off < e_off) {
				int r = insert_piece(m, p, t, off, e_off);
				if (r < 0)
					return r;
			}
			off = e_end;
			continue;
		}
		uint64_t stop = end;

		if (e && e->off < end) {
			stop = min(end, e->off + e->len);
			if (!cut(m, p, e, off, stop))
				return -ENOSPC;
		}
		int r = insert_piece(m, p, t, off, stop);
		if (r < 0)
			return r;
		off = stop;
	}
	return 0;
}

/* One descent for what is most common: a range that overlaps nothing. -EEXIST: it does. */
static int insert_into_gap(struct wl_map *m, struct wl_pool *p, const struct wl_entry *t)
{
	struct rb_node **link = &m->tree.root, *parent = NULL;

	while (*link) {
		struct wl_entry *e = entry_of(*link);

		parent = *link;
		if (t->off + t->len <= e->off)
			link = &parent->left;
		else if (e->off + e->len <= t->off)
			link = &parent->right;
		else
			return -EEXIST;
	}
	struct wl_entry *e = wl_pool_get(p);

	copy_part(e, t, t->off, t->off + t->len);
	link_at(m, e, parent, link);
	return 0;
}

int wl_map_insert(struct wl_map *m, struct wl_pool *p, const struct wl_entry *t, bool only_newer)
{
	uint64_t end = t->off + t->len;

	if (wl_pool_left(p) < 2)
		return -ENOSPC;
	if (insert_into_gap(m, p, t) == 0)
		return 0;
	if (only_newer)
		return insert_around_newer(m, p, t);

	for (struct wl_entry *e = wl_map_find(m, t->off); e && e->off < end; e = wl_map_find(m, t->off))
		cut(m, p, e, t->off, end);
	return insert_piece(m, p, t, t->off, end);
}

uint64_t wl_map_remove(struct wl_map *m, struct wl_pool *p, uint64_t off, uint64_t len, uint64_t max_seq,
		       uint64_t max_rno)
{
	uint64_t end = off + len, before = m->bytes;

	while (off < end) {
		struct wl_entry *e = wl_map_find(m, off);

		if (!e || e->off >= end)
			break;
		uint64_t from = max(off, e->off), to = min(end, e->off + e->len);

		if (e->batch->seq <= max_seq && e->rno <= max_rno)
			cut(m, p, e, from, to);
		off = to;
	}
	return before - m->bytes;
}

void wl_map_clear(struct wl_map *m, struct wl_pool *p)
{
	for (struct wl_entry *e = wl_map_find(m, 0); e; e = wl_map_find(m, 0))
		wl_map_erase(m, p, e);
}

bool wl_map_is_clear(const struct wl_map *m, uint64_t off, uint64_t len)
{
	const struct wl_entry *e = wl_map_find(m, off);

	return !e || e->off >= off + len;
}
