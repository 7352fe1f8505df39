/* SPDX-License-Identifier: MIT */
/*
 * Buffer pool: a buddy allocator (Knowlton, CACM 1965) over one mapping.
 *
 * Block sizes are RT_BUF_ALIGN << order. All bookkeeping is beside the memory, in one entry for each smallest block, so that
 * free memory is never touched. A freed block merges with its buddy as long as that is free as well.
 *
 * For I/O a pool is cut into pieces of 2 MiB, which no buffer up to that size crosses. A piece is registered with the ring when
 * the first transfer uses it, so that the kernel need not pin its pages each time; that stops where RLIMIT_MEMLOCK says so.
 *
 * Invariants
 *  (1) a free block is on the list of its order, and its first entry says so (`free`, `order`);
 *  (2) two free buddies of one order exist only at the top order;
 *  (3) nobody is served while somebody waits who came earlier;
 *  (4) of a pool that is accounted for, memory is handed out only in pieces that were taken from the budget (`touched`).
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "rt/area.h"
#include "rt/buf.h"
#include "rt/rt_int.h"
#include "util/bytes.h"

#define ORDERS 14u			/* 4 KiB .. 32 MiB */
#define NONE UINT32_MAX
#define HUGE_PAGE (2u << 20)
#define PIECE HUGE_PAGE
#define PIECE_ORDER 9u
#define KEEP PIECE			/* stays when the pool is idle for a short while */
#define FIXED_SLOTS 1024u
#define FIXED_SPARE 256u		/* for pools: an area takes none of the last ones */
#define NOT_REGISTERED UINT16_MAX
#define IDLE_NS 1000000000ull
#define IDLE_LONG 8u			/* times IDLE_NS: all of it goes back */
#define RETRY_NS 1000000ull		/* while somebody waits and the budget refuses */

static_assert((uint64_t)RT_BUF_ALIGN << PIECE_ORDER == PIECE, "a block is in one piece, or of whole ones");
static_assert(((uint64_t)RT_BUF_ALIGN << (ORDERS - 1)) == RT_BUF_MAX, "the top order is the largest buffer");

struct block {
	uint32_t next, prev;
	uint8_t order;
	bool free;
};

struct buf_waiter {
	struct list node;
	struct co *co;
	unsigned order;
	void *buf;
};

struct rt_bufpool {
	struct list node;		/* rt->pools */
	struct rt *rt;
	char *map, *base;
	size_t map_len;
	uint64_t size, used;
	uint64_t gets, gets_seen;
	unsigned idle_for;		/* times that idle_check() found nothing */
	bool starved;			/* the budget refused */
	struct budget_user user;
	struct rt_timer retry;
	uint8_t *touched;		/* of each piece */
	size_t n_touched;
	struct block *blocks;
	uint16_t *slots;		/* of each piece: its place in the ring's table, or NOT_REGISTERED */
	uint32_t heads[ORDERS];
	struct list waiters;
	struct rt_timer idle;
	bool area;			/* memory of somebody else's: nothing but `slots` is used */
};

/* Free lists */

static void push(struct rt_bufpool *p, uint32_t i, unsigned order)
{
	struct block *b = &p->blocks[i];

	*b = (struct block){ .next = p->heads[order], .prev = NONE, .order = (uint8_t)order, .free = true };
	if (b->next != NONE)
		p->blocks[b->next].prev = i;
	p->heads[order] = i;
}

static void unlink_block(struct rt_bufpool *p, uint32_t i)
{
	struct block *b = &p->blocks[i];

	if (b->prev != NONE)
		p->blocks[b->prev].next = b->next;
	else
		p->heads[b->order] = b->next;
	if (b->next != NONE)
		p->blocks[b->next].prev = b->prev;
	b->free = false;
}

static unsigned order_of(size_t len)
{
	return len <= RT_BUF_ALIGN ? 0 : 64 - (unsigned)__builtin_clzll((len - 1) / RT_BUF_ALIGN);
}

static void merge(struct rt_bufpool *p, uint32_t i, unsigned order)
{
	for (; order < ORDERS - 1; order++) {
		uint32_t buddy = i ^ (1u << order);

		if (!p->blocks[buddy].free || p->blocks[buddy].order != order)
			break;
		unlink_block(p, buddy);
		i &= ~(1u << order);
	}
	push(p, i, order);
}

/* Memory of the budget */

static void unregister_range(struct rt_bufpool *p, size_t first, size_t end);

/* Pieces first..end - 1, which are free, go back to the kernel. */
static void drop_pieces(struct rt_bufpool *p, size_t first, size_t end)
{
	size_t n = 0;

	for (size_t i = first; i < end; i++) {
		n += p->touched[i];
		p->touched[i] = 0;
	}
	if (!n)
		return;
	unregister_range(p, first, end);
	madvise(p->base + first * PIECE, (end - first) * PIECE, MADV_DONTNEED);
	p->n_touched -= n;
	budget_give(&p->user, n * PIECE);
}

static void trim(struct rt_bufpool *p)
{
	for (unsigned o = PIECE_ORDER; o < ORDERS; o++)
		for (uint32_t i = p->heads[o]; i != NONE; i = p->blocks[i].next)
			drop_pieces(p, i >> PIECE_ORDER, (i + (1u << o)) >> PIECE_ORDER);
}

/* Block `i`, which is on no list, is about to be used. False: there is no memory for it. */
static bool touch(struct rt_bufpool *p, uint32_t i, unsigned order)
{
	size_t first = i >> PIECE_ORDER, end = (i + (1u << order) + (1u << PIECE_ORDER) - 1) >> PIECE_ORDER, n = 0;

	for (size_t k = first; k < end; k++)
		n += !p->touched[k];
	if (likely(!n))
		return true;
	/* Before it is refused, which costs the caches. */
	if (n * PIECE > budget_room(p->user.b))
		trim(p);
	if (!budget_take(&p->user, n * PIECE))
		return false;
	memset(p->touched + first, 1, end - first);
	p->n_touched += n;
	return true;
}

static void *take_block(struct rt_bufpool *p, unsigned order)
{
	unsigned o = order;
	uint32_t i;

	while (o < ORDERS && p->heads[o] == NONE)
		o++;
	if (o == ORDERS)
		return NULL;
	i = p->heads[o];
	unlink_block(p, i);
	while (o > order) {
		o--;
		push(p, i + (1u << o), o);
	}
	p->starved = !touch(p, i, order);
	if (unlikely(p->starved)) {
		merge(p, i, order);
		return NULL;
	}
	p->blocks[i].order = (uint8_t)order;
	p->used += (uint64_t)RT_BUF_ALIGN << order;
	p->gets++;
	return p->base + (uint64_t)i * RT_BUF_ALIGN;
}

static void give_back(struct rt_bufpool *p, uint32_t i)
{
	unsigned order = p->blocks[i].order;

	p->used -= (uint64_t)RT_BUF_ALIGN << order;
	merge(p, i, order);
}

/* Puts whole top blocks on the list, lowest address first. */
static void reset_lists(struct rt_bufpool *p)
{
	for (unsigned o = 0; o < ORDERS; o++)
		p->heads[o] = NONE;
	for (uint64_t at = p->size; at > 0; at -= RT_BUF_MAX)
		push(p, (uint32_t)((at - RT_BUF_MAX) / RT_BUF_ALIGN), ORDERS - 1);
}

/* Registered pieces */

static bool make_fixed_table(struct rt *rt)
{
	rt->fixed_tried = true;
	rt->fixed_free = malloc(FIXED_SLOTS * sizeof(*rt->fixed_free));
	if (!rt->fixed_free || io_uring_register_buffers_sparse(&rt->ring, FIXED_SLOTS) < 0)
		return false;
	for (unsigned i = 0; i < FIXED_SLOTS; i++)
		rt->fixed_free[i] = (uint16_t)(FIXED_SLOTS - 1 - i);
	rt->fixed_free_n = FIXED_SLOTS;
	return true;
}

static int set_slot(struct rt *rt, unsigned slot, void *base, size_t len)
{
	struct iovec iov = { base, len };

	return io_uring_register_buffers_update_tag(&rt->ring, slot, &iov, NULL, 1);
}

static int register_piece(struct rt_bufpool *p, size_t piece)
{
	struct rt *rt = p->rt;
	uint16_t slot;

	if (!rt->fixed_free_n && (rt->fixed_tried || !make_fixed_table(rt)))
		return -1;
	if (p->area && rt->fixed_free_n <= FIXED_SPARE)
		return -1;
	slot = rt->fixed_free[rt->fixed_free_n - 1];
	if (set_slot(rt, slot, p->base + piece * PIECE, PIECE) < 0) {
		/* The limit is reached; it would be again. */
		rt->fixed_free_n = 0;
		return -1;
	}
	rt->fixed_free_n--;
	p->slots[piece] = slot;
	return slot;
}

static void unregister_range(struct rt_bufpool *p, size_t first, size_t end)
{
	struct rt *rt = p->rt;

	for (size_t i = first; i < end; i++) {
		if (p->slots[i] == NOT_REGISTERED)
			continue;
		if (set_slot(rt, p->slots[i], NULL, 0) >= 0)
			rt->fixed_free[rt->fixed_free_n++] = p->slots[i];
		p->slots[i] = NOT_REGISTERED;
	}
}

static void unregister_pieces(struct rt_bufpool *p, size_t first)
{
	unregister_range(p, first, p->size / PIECE);
}

static bool pool_has(const struct rt_bufpool *p, const char *addr)
{
	return addr >= p->base && addr < p->base + p->size;
}

static struct rt_bufpool *pool_of(struct rt *rt, const char *addr)
{
	if (rt->last_pool && pool_has(rt->last_pool, addr))
		return rt->last_pool;
	list_for_each(&rt->pools, n) {
		struct rt_bufpool *p = container_of(n, struct rt_bufpool, node);

		if (pool_has(p, addr))
			return rt->last_pool = p;
	}
	return NULL;
}

int bufs_fixed_index(struct rt *rt, const void *addr, size_t len)
{
	struct rt_bufpool *p = pool_of(rt, addr);
	size_t at, piece;

	if (!p || len == 0)
		return -1;
	at = (size_t)((const char *)addr - p->base);
	piece = at / PIECE;
	if ((at + len - 1) / PIECE != piece)
		return -1;
	return p->slots[piece] != NOT_REGISTERED ? p->slots[piece] : register_piece(p, piece);
}

/* Memory goes back to the kernel after a second without use, and what is kept of it a few seconds later. */

static void idle_check(struct rt_timer *t)
{
	struct rt_bufpool *p = container_of(t, struct rt_bufpool, idle);

	if (p->used > 0)
		return;
	if (p->gets != p->gets_seen) {
		p->gets_seen = p->gets;
		p->idle_for = 0;
	} else if (p->idle_for++ == 0) {
		reset_lists(p);
		drop_pieces(p, KEEP / PIECE, p->size / PIECE);
	} else if (p->idle_for > IDLE_LONG) {
		drop_pieces(p, 0, KEEP / PIECE);
	}
	if (p->n_touched)
		rt_timer_arm(&p->idle, rt_now_ns() + IDLE_NS, idle_check);
}

static void note_idle(struct rt_bufpool *p)
{
	if (p->idle.heap_pos || p->rt->sim || rt_self() != p->rt)
		return;
	p->gets_seen = p->gets;
	p->idle_for = 0;
	rt_timer_arm(&p->idle, rt_now_ns() + IDLE_NS, idle_check);
}

/* The pool */

int rt_bufpool_create(struct rt *rt, uint64_t bytes, struct rt_bufpool **ret, struct err *err)
{
	struct rt_bufpool *p = calloc(1, sizeof(*p));
	uint64_t size = RT_BUF_MAX;

	while (size < bytes)
		size *= 2;
	if (!p)
		return err_set(err, -ENOMEM, "no memory for a buffer pool");
	p->rt = rt;
	p->size = size;
	p->map_len = size + HUGE_PAGE;
	p->map = mmap(NULL, p->map_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	p->blocks = calloc(size / RT_BUF_ALIGN, sizeof(*p->blocks));
	p->slots = malloc(size / PIECE * sizeof(*p->slots));
	p->touched = calloc(size / PIECE, 1);
	if (p->map == MAP_FAILED || !p->blocks || !p->slots || !p->touched) {
		if (p->map != MAP_FAILED)
			munmap(p->map, p->map_len);
		free(p->blocks);
		free(p->slots);
		free(p->touched);
		free(p);
		return err_set(err, -ENOMEM, "no memory for a buffer pool of %llu MiB", (unsigned long long)size >> 20);
	}
	p->base = (char *)(((uintptr_t)p->map + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
	madvise(p->base, size, MADV_HUGEPAGE);
	memset(p->slots, 0xff, size / PIECE * sizeof(*p->slots));	/* NOT_REGISTERED */
	list_init(&p->waiters);
	list_add_tail(&rt->pools, &p->node);
	reset_lists(p);
	*ret = p;
	return 0;
}

void rt_bufpool_destroy(struct rt_bufpool *p)
{
	if (!p)
		return;
	assert(p->used == 0 && list_empty(&p->waiters));
	timer_cancel(p->rt, &p->idle);
	timer_cancel(p->rt, &p->retry);
	budget_leave(&p->user);
	unregister_pieces(p, 0);
	list_del(&p->node);
	if (p->rt->last_pool == p)
		p->rt->last_pool = NULL;
	munmap(p->map, p->map_len);
	free(p->blocks);
	free(p->slots);
	free(p->touched);
	free(p);
}

int rt_bufpool_account(struct rt_bufpool *p, const char *name, struct err *err)
{
	if (!p->rt->budget)
		return 0;
	assert(!p->n_touched);
	if (budget_join(p->rt->budget, &p->user, name, PIECE))
		return 0;
	return err_set(err, -ENOMEM, "no memory is left in the budget for %s: give a larger --memory", name);
}

bool rt_bufpool_starved(const struct rt_bufpool *p)
{
	return p->starved;
}

void rt_trim(struct rt *rt)
{
	list_for_each(&rt->pools, n) {
		struct rt_bufpool *p = container_of(n, struct rt_bufpool, node);

		if (!p->area)
			trim(p);
	}
	cos_trim(rt);
}

void *rt_buf_tryget(struct rt_bufpool *p, size_t len)
{
	assert(len > 0 && len <= RT_BUF_MAX);
	return list_empty(&p->waiters) ? take_block(p, order_of(len)) : NULL;
}

static void serve_waiters(struct rt_bufpool *p)
{
	struct buf_waiter *w;

	while ((w = list_first(&p->waiters, struct buf_waiter, node))) {
		w->buf = take_block(p, w->order);
		if (!w->buf)
			break;
		list_del(&w->node);
		co_wake(w->co);
	}
}

/* Nobody says when the budget has room again. */
static void retry(struct rt_timer *t)
{
	struct rt_bufpool *p = container_of(t, struct rt_bufpool, retry);

	serve_waiters(p);
	if (!list_empty(&p->waiters) && p->starved)
		rt_timer_arm(t, rt_now_ns() + RETRY_NS, retry);
}

void *co_buf_get(struct rt_bufpool *p, size_t len)
{
	struct buf_waiter w = { .co = co_self(), .order = order_of(len), .buf = rt_buf_tryget(p, len) };

	if (w.buf)
		return w.buf;
	list_add_tail(&p->waiters, &w.node);
	if (p->starved && !p->retry.heap_pos)
		rt_timer_arm(&p->retry, rt_now_ns() + RETRY_NS, retry);
	while (!w.buf)
		co_park("a buffer");
	return w.buf;
}

void rt_buf_put(struct rt_bufpool *p, void *buf)
{
	if (!buf)
		return;
	assert((char *)buf >= p->base && (char *)buf < p->base + p->size);
	give_back(p, (uint32_t)(((char *)buf - p->base) / RT_BUF_ALIGN));
	serve_waiters(p);
	if (p->starved && !list_empty(&p->waiters) && !p->retry.heap_pos)
		rt_timer_arm(&p->retry, rt_now_ns() + RETRY_NS, retry);
	if (p->used == 0)
		note_idle(p);
}

uint64_t rt_bufpool_used(const struct rt_bufpool *p)
{
	return p->used;
}

uint64_t rt_bufpool_size(const struct rt_bufpool *p)
{
	return p->size;
}

uint64_t rt_bufpool_left(const struct rt_bufpool *p)
{
	uint64_t more = budget_obtainable(p->user.b), own = max((uint64_t)p->n_touched * PIECE, p->user.floor), free = p->size - p->used;

	own -= min(own, p->used);
	return more >= p->size ? free : min(free, own + more);
}

struct rt_bufpool *rt_bufs(void)
{
	return rt_current->bufs;
}

void rt_set_bufs(struct rt *rt, struct rt_bufpool *p)
{
	rt->bufs = p;
}

/* Areas */

static_assert(RT_AREA_PIECE == PIECE, "one table of pieces");

struct rt_bufpool *rt_area_create(struct rt *rt, void *base, uint64_t bytes)
{
	struct rt_bufpool *p = rt->sim ? NULL : calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->rt = rt;
	p->base = base;
	p->size = bytes;
	p->area = true;
	p->slots = malloc(bytes / PIECE * sizeof(*p->slots));
	if (!p->slots) {
		free(p);
		return NULL;
	}
	memset(p->slots, 0xff, bytes / PIECE * sizeof(*p->slots));	/* NOT_REGISTERED */
	list_add_tail(&rt->pools, &p->node);
	return p;
}

void rt_area_forget(struct rt_bufpool *p, uint64_t off, uint64_t len)
{
	unregister_range(p, off / PIECE, (off + len) / PIECE);
}

void rt_area_destroy(struct rt_bufpool *p)
{
	if (!p)
		return;
	unregister_pieces(p, 0);
	list_del(&p->node);
	if (p->rt->last_pool == p)
		p->rt->last_pool = NULL;
	free(p->slots);
	free(p);
}
