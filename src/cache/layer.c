/* SPDX-License-Identifier: MIT */
/*
 * Read cache: the disk.
 *
 * Any offset and length is taken as it comes; what is read from below are whole blocks, what is written below is the caller's own range.
 *
 * While nothing of a volume can be cached (mode none) and nothing is, requests go straight through. A change that began then was not announced, so
 * caching begins only when the last of those has ended (v->untracked).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cache/internal.h"
#include "util/err.h"
#include "util/iov.h"

#define SLICE 64

struct read {
	struct cache_volume *v;
	enum cache_class class;
	uint64_t off, end;	/* of the request */
	const struct iovec *iov;
	int niov;
	unsigned flags;
	bool goes_on;
};

/* Invariant (6): a whole block was copied, from `pos` on of the request. */
static void note_copy(struct read *q, uint64_t pos, enum mem_note note)
{
	struct cache *c = q->v->c;
	uint64_t skip = pos - q->off;
	int i = 0;

	while (skip && skip >= q->iov[i].iov_len)
		skip -= q->iov[i++].iov_len;
	if (q->iov[i].iov_len - skip < c->block)
		return;

	uint32_t slot = mem_slot_at(&c->mem, (char *)q->iov[i].iov_base + skip);

	if (slot != MEM_NONE && c->mem.owner[slot] == MEM_HELD)
		c->mem.note[slot] = (uint8_t)note;
}

/* Copies what the block holds of the request from `pos` on. Returns where it ends. */
static uint64_t copy_block(struct read *q, uint64_t pos, const char *data, enum mem_note note)
{
	struct cache *c = q->v->c;
	uint64_t start = align_down(pos, c->block), stop = min(start + c->block, q->end);

	if (!data)
		iov_set(q->iov, q->niov, pos - q->off, 0, stop - pos);
	else if (likely(q->niov == 1))
		memcpy((char *)q->iov->iov_base + (pos - q->off), data + (pos - start), stop - pos);
	else
		iov_copy_in(q->iov, q->niov, pos - q->off, data + (pos - start), stop - pos);
	if (unlikely(q->v->shared) && stop - pos == c->block)
		note_copy(q, pos, note);
	return stop;
}

static uint64_t copy_record(struct read *q, uint64_t pos, uint32_t r)
{
	struct cache *c = q->v->c;
	uint64_t block = pos >> c->shift;

	record_hit(c, r, q->goes_on && block == q->v->last_block);
	q->v->last_block = block;
	return copy_block(q, pos, record_is_zero(&c->rec[r]) ? NULL : mem_addr(&c->mem, c->rec[r].slot & REC_SLOT), MEM_BELOW_HIT);
}

/* From a fill that is done. */
static uint64_t copy_fill(struct read *q, uint64_t pos, struct cache_fill *f)
{
	struct cache *c = q->v->c;

	for (uint64_t i = (pos >> c->shift) - f->first; i < f->n && pos < q->end; i++)
		pos = copy_block(q, pos, mem_addr(&c->mem, f->slot[i]), MEM_BELOW);
	q->v->last_block = (pos - 1) >> c->shift;
	return pos;
}

/* Uncached, up to `stop` or as far as the list can be sliced. */
static co_fn int co_bypass(struct read *q, uint64_t *pos, uint64_t stop)
{
	struct iovec sub[SLICE];
	uint64_t len = stop - *pos;
	int n, r;

	while ((n = iov_slice(q->iov, q->niov, *pos - q->off, len, sub, SLICE)) < 0)
		len = (len + 1) / 2;
	r = co_disk_readv(q->v->disk.file, *pos, sub, n, q->flags);
	*pos += len;
	return r;
}

/* Waits for a fill of somebody else's. A read-ahead that failed says nothing about this read: it goes below itself. */
static co_fn int co_join(struct read *q, uint64_t *pos, struct cache_fill *f)
{
	struct cache *c = q->v->c;
	uint64_t first = (*pos >> c->shift) - f->first, last = min(((q->end - 1) >> c->shift) - f->first, (uint64_t)f->n - 1);
	bool own;
	int r;

	for (uint64_t i = first; i <= last; i++) {
		/* From a block on that is doomed the read must look again: it may have begun after the change. */
		if (f->state[i] & FILL_DOOMED) {
			last = i - 1;
			break;
		}
		f->state[i] |= FILL_AGAIN;
	}
	f->users++;
	q->v->count[q->class].joined += last - first + 1;
	while (!f->done)
		co_queue_wait(&f->q, "a read of the same block");
	r = f->error;
	own = r && f->ahead;
	for (uint64_t i = first; i <= last && !r; i++)
		*pos = copy_block(q, *pos, mem_addr(&c->mem, f->slot[i]), MEM_BELOW_HIT);
	fill_put(f);
	return own ? co_bypass(q, pos, min(q->end, align_down(*pos, c->block) + c->block)) : r;
}

static co_fn int co_miss(struct read *q, uint64_t *pos)
{
	struct cache_volume *v = q->v;
	struct cache *c = v->c;
	uint64_t block = *pos >> c->shift, want = ((q->end - 1) >> c->shift) - block + 1;
	struct cache_fill *f = fill_start(v, q->class, block, want, true);
	int r;

	if (unlikely(!f)) {
		v->count[q->class].misses++;
		v->count[q->class].bypassed++;
		return co_bypass(q, pos, min(q->end, (block + 1) << c->shift));
	}
	v->count[q->class].misses += f->n;
	co_fill_run(f, q->flags);
	r = f->error;
	if (!r)
		*pos = copy_fill(q, *pos, f);
	fill_put(f);
	return r;
}

static co_fn int co_read_cached(struct read *q)
{
	struct cache_volume *v = q->v;
	struct cache *c = v->c;
	uint64_t pos = q->off;
	int r = 0;

	while (pos < q->end && !r) {
		uint32_t rec = record_find(c, cache_key(v, pos >> c->shift));
		struct cache_fill *f;

		if (likely(rec != REC_NONE)) {
			v->count[q->class].hits++;
			pos = copy_record(q, pos, rec);
			continue;
		}
		f = v->fills ? fill_find(v, pos >> c->shift) : NULL;
		r = f ? co_join(q, &pos, f) : co_miss(q, &pos);
	}
	return r;
}

static co_fn int cache_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct cache_volume *v = volume_of(d);
	struct cache *c = v->c;
	enum cache_class class = flags & DISK_METADATA ? CACHE_METADATA : CACHE_DATA;
	struct read q = { v, class, off, off + len, iov, niov, flags, false };
	uint64_t first = off >> c->shift, last = (off + len - 1) >> c->shift;

	if (!cache_allows(v, class) || (flags & (DISK_BACKGROUND | DISK_NOCACHE)) || unlikely(last >> KEY_BLOCK_BITS)) {
		/* The volume's data is not to be cached, whoever would. A layer of tables or one that is not in use has no say in that. */
		if (class == CACHE_DATA && v->mode != CACHE_ALL && !v->tables && !v->shared)
			flags |= DISK_NOCACHE;
		return co_disk_readv(d->file, off, iov, niov, flags);
	}
	v->count[class].requests++;
	v->count[class].blocks += last - first + 1;
	if (class == CACHE_DATA) {
		for (uint64_t b = first; v->shards && b <= last; b++)
			shards_access(v->shards, b);
		q.goes_on = ahead_note(v, off, len);
	}
	return co_read_cached(&q);
}

/* --- Changes --- */

/* Whether the change need not be announced: nothing of the volume is cached, and nothing will be while it is in flight. */
static bool is_untracked(struct cache_volume *v)
{
	return v->mode == CACHE_NONE && v->second.rec < 0 && !v->starting && !v->fills && !v->records[0] && !v->records[1];
}

static void untracked_end(struct cache_volume *v)
{
	if (!--v->untracked)
		co_queue_wake_all(&v->idle);
}

/* What is cached will be different soon. An error is the change's: it must not begin. */
static co_fn int co_announce(struct cache_volume *v, struct cache_change *ch, uint64_t off, uint64_t len)
{
	change_begin(v, ch, off, len);
	return v->second.rec < 0 ? 0 : co_second_change_begin(v, ch->first, ch->last);
}

static co_fn int co_conclude(struct cache_volume *v, struct cache_change *ch, uint64_t off, uint64_t len, int ret, const struct iovec *iov, int niov)
{
	co_change_end(v, ch, off, len, ret, iov, niov);
	if (v->second.rec >= 0)
		second_change_end(v);
	return ret;
}

static co_fn int cache_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct cache_volume *v = volume_of(d);
	struct cache_change ch;
	int r;

	if (is_untracked(v)) {
		v->untracked++;
		r = co_disk_writev(d->file, off, iov, niov, flags);
		untracked_end(v);
		return r;
	}
	r = co_announce(v, &ch, off, len);
	if (!r)
		r = co_disk_writev(d->file, off, iov, niov, flags);
	return co_conclude(v, &ch, off, len, r, iov, niov);
}

static co_fn int co_clear(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool zero)
{
	return zero ? co_disk_zero(d->file, off, len, flags) : co_disk_discard(d->file, off, len, flags);
}

static co_fn int co_change_clear(struct disk *d, uint64_t off, uint64_t len, unsigned flags, bool zero)
{
	struct cache_volume *v = volume_of(d);
	struct cache_change ch;
	int r;

	if (is_untracked(v)) {
		v->untracked++;
		r = co_clear(d, off, len, flags, zero);
		untracked_end(v);
		return r;
	}
	r = co_announce(v, &ch, off, len);
	if (!r)
		r = co_clear(d, off, len, flags, zero);
	return co_conclude(v, &ch, off, len, r, NULL, 0);
}

static co_fn int cache_co_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_change_clear(d, off, len, flags, false);
}

static co_fn int cache_co_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_change_clear(d, off, len, flags, true);
}

/* --- The rest --- */

static co_fn int cache_co_prefetch(struct disk *d, uint64_t off, uint64_t len)
{
	struct cache_volume *v = volume_of(d);
	struct cache *c = v->c;
	uint64_t b = off >> c->shift, end = (off + len - 1) >> c->shift;

	if (v->mode != CACHE_ALL || end >> KEY_BLOCK_BITS)
		return co_disk_prefetch(d->file, off, len);
	/* Not more than half of the cache for a piece of advice. */
	end = min(end, b + (uint64_t)c->mem.allowed * c->mem.per_chunk / 2);
	while (b <= end) {
		struct cache_fill *f;

		if (record_find(c, cache_key(v, b)) != REC_NONE || fill_find(v, b)) {
			b++;
			continue;
		}
		f = fill_start(v, CACHE_DATA, b, end - b + 1, false);
		if (!f)
			break;
		b += f->n;
		co_fill_run(f, 0);
		fill_put(f);
	}
	return 0;
}

static co_fn void co_wait_idle(struct cache_volume *v)
{
	while (v->fills || v->untracked)
		co_queue_wait(&v->idle, "reads of the cache in flight");
}

static co_fn void co_drop_all(struct cache_volume *v)
{
	for (unsigned i = 0; i < CACHE_CLASSES; i++)
		co_drop_class(v, i);
}

/* A change of all from the smaller size on, the block in which that ends included. A format may grow its file with other requests in flight. */
static co_fn int cache_co_resize(struct disk *d, uint64_t size)
{
	struct cache_volume *v = volume_of(d);
	uint64_t from = min(size, d->size), to = max(size, d->size);
	struct cache_change ch;
	int r;

	if (to == d->size)	/* what lies behind the end is nowhere else */
		to = UINT64_MAX;
	if (is_untracked(v)) {
		v->untracked++;
		r = co_disk_resize(d->file, size, NULL);
		untracked_end(v);
		return r;
	}
	r = co_announce(v, &ch, from, to - from);
	if (!r)
		r = co_disk_resize(d->file, size, NULL);
	return co_conclude(v, &ch, from, to - from, r, NULL, 0);
}

/* No contents, but it may be part of the image's identity. */
static co_fn int cache_co_mark_set(struct disk *d, const char *mark, struct err *err)
{
	struct cache_volume *v = volume_of(d);
	int r = co_disk_mark_set(d->file, mark, err);

	if (v->second.rec >= 0)
		co_second_note_identity(v);
	return r;
}

co_fn void co_cache_set_mode(struct disk *d, enum cache_mode mode)
{
	struct cache_volume *v = volume_of(d);

	cache_hold(v->c);
	v->starting = mode != CACHE_NONE;
	while (v->starting && v->mode == CACHE_NONE && v->untracked)
		co_queue_wait(&v->idle, "changes that began without the cache");
	v->starting = false;
	v->mode = mode;
	for (unsigned i = 0; i < CACHE_CLASSES; i++)
		if (!cache_allows(v, i))
			co_drop_class(v, i);
	co_shrink(v->c);
	cache_release(v->c);
}

static uint32_t to_slots(const struct cache *c, uint64_t bytes)
{
	return (uint32_t)min((bytes + c->block - 1) >> c->shift, (uint64_t)REC_SLOT);
}

co_fn int co_cache_set_limits(struct disk *d, uint64_t share, uint64_t limit, struct err *err)
{
	struct cache_volume *v = volume_of(d);
	struct cache *c = v->c;
	uint32_t s = to_slots(c, share), l = to_slots(c, limit);

	if (l && s > l)
		return err_set(err, -EINVAL, "%s: the share of the cache is above the limit", v->name);
	if ((uint64_t)c->share_sum - v->share + s > (uint64_t)c->mem.allowed * c->mem.per_chunk / 4 * 3)
		return err_set(err, -EINVAL, "%s: all shares together would be more than three quarters of the cache", v->name);
	cache_hold(v->c);
	c->share_sum += s - v->share;
	v->share = s;
	v->limit = l;
	for (unsigned n = 1; l && v->slots > l && v->records[0] + v->records[1]; n++) {
		record_drop(c, v->tail[v->records[CACHE_DATA] ? CACHE_DATA : CACHE_METADATA], true);
		if (n % 256 == 0)
			co_yield();
	}
	co_shrink(c);
	cache_release(v->c);
	return 0;
}

void cache_get_limits(struct disk *d, uint64_t *ret_share, uint64_t *ret_limit)
{
	struct cache_volume *v = volume_of(d);

	*ret_share = (uint64_t)v->share << v->c->shift;
	*ret_limit = (uint64_t)v->limit << v->c->shift;
}

static co_fn void cache_co_close(struct disk *d)
{
	struct cache_volume *v = volume_of(d);
	struct cache *c = v->c;
	struct disk *file = d->file;

	v->closing = true;
	while (c->busy)
		co_sleep_ns(1000000);
	co_wait_idle(v);
	if (v->second.rec >= 0)
		co_second_detach(v);
	if (!c->ending)
		co_drop_all(v);
	c->share_sum -= v->share;
	c->vol[v->id] = NULL;
	free(v->shards);
	c->curves -= v->shards_bytes;
	cache_recompute(c);
	if (!c->ending)
		co_shrink(c);
	disk_fini(d);
	free(v->name);
	free(v);
	co_disk_close(file);
}

const struct disk_ops cache_ops = {
	.driver = "cache",
	.co_read = cache_co_read,
	.co_write = cache_co_write,
	.co_discard = cache_co_discard,
	.co_zero = cache_co_zero,
	.co_prefetch = cache_co_prefetch,
	.co_resize = cache_co_resize,
	.co_mark_set = cache_co_mark_set,
	.co_close = cache_co_close,
	.status = cache_volume_status,
};

/* Without the memory for it there is no curve. */
static void make_curve(struct cache_volume *v)
{
	struct cache *c = v->c;
	size_t bytes = align_up(shards_bytes(c->config.curve_samples), 4096);
	void *mem = bytes <= c->budget / 16 ? calloc(1, bytes) : NULL;

	if (!mem)
		return;
	v->shards = shards_init(mem, c->config.curve_samples);
	v->shards_bytes = bytes;
	c->curves += bytes;
	cache_recompute(c);
}

enum over { OVER_VOLUME, OVER_TABLES, OVER_SHARED };

static co_fn int co_attach(struct cache *c, const char *name, struct disk *file, enum cache_mode mode, enum over over,
			   struct disk **ret, struct err *err)
{
	struct cache_volume *v;
	unsigned id = 0;

	while (id < CACHE_MAX_VOLUMES && c->vol[id])
		id++;
	if (id == CACHE_MAX_VOLUMES)
		return err_set(err, -E2BIG, "%s: a cache has at most %d volumes", name, CACHE_MAX_VOLUMES);
	v = calloc(1, sizeof(*v));
	if (!v || !(v->name = strdup(name)) || disk_init(&v->disk, &cache_ops, file->name, file)) {
		if (v)
			free(v->name);
		free(v);
		return err_errno(err, -ENOMEM, "%s: cache", name);
	}
	v->c = c;
	v->id = id;
	v->mode = mode;
	v->tables = over == OVER_TABLES;
	v->shared = over == OVER_SHARED;
	v->last_block = UINT64_MAX;
	for (unsigned i = 0; i < CACHE_CLASSES; i++)
		v->head[i] = v->tail[i] = REC_NONE;
	co_queue_init(&v->idle);
	list_init(&v->wide);
	/* The layer below cuts and aligns. */
	v->disk.limits.atomic_write = v->disk.limits.align == 1 ? v->disk.limits.atomic_write : 0;	/* what is aligned there goes in pieces */
	v->disk.limits.align = v->disk.limits.mem_align = 1;
	v->disk.limits.max_io = 0;
	v->disk.limits.max_zero = 0;
	c->vol[id] = v;
	if (over == OVER_VOLUME)
		make_curve(v);
	co_second_attach(v);
	co_shrink(c);
	*ret = &v->disk;
	return 0;
}

co_fn int co_cache_attach(struct cache *c, const char *name, struct disk *file, enum cache_mode mode, struct disk **ret, struct err *err)
{
	return co_attach(c, name, file, mode, OVER_VOLUME, ret, err);
}

co_fn int co_cache_attach_shared(struct cache *c, const char *name, struct disk *file, struct disk **ret, struct err *err)
{
	return co_attach(c, name, file, CACHE_NONE, OVER_SHARED, ret, err);
}

co_fn int co_cache_attach_tables(struct cache *c, const char *name, struct disk *file, enum cache_mode mode, struct disk **ret, struct err *err)
{
	return co_attach(c, name, file, mode, OVER_TABLES, ret, err);
}
