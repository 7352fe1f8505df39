/* SPDX-License-Identifier: MIT */
/*
 * Write log: append path.
 *
 * Records are put into the open batch: data behind the header as it comes, descriptors aside until the batch is sealed. The batch lies
 * in the memory ring at the place where its data stays readable until newer batches need the room. Sealing fixes its length,
 * its number and its place; the committer (commit.c) writes it.
 *
 * A request larger than a quarter of a batch is an atomic group: its records go into consecutive batches, all but the last of
 * which say MORE, and recovery takes all or none. A group waits until all of it has room and is then put in without suspending, so
 * that nothing ever waits for the rest of a group: not the memory of its batches, not a commit, not the cleaner.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "util/bytes.h"
#include "util/crc32c.h"
#include "util/iov.h"
#include "wlog/internal.h"

#define PIECE_MIN (16u << 10)		/* no smaller piece of a group, but the last */

/* Requests above are split when a batch has no room for the whole. */
static uint64_t group_min(const struct wlog *w)
{
	return min(w->sb.seg_size, WL_MAX_BATCH) / 4;
}

uint32_t wl_segment_of(const struct wlog *w, uint64_t pos)
{
	return (uint32_t)((pos - WL_FIRST_SEGMENT) / w->sb.seg_size) % w->sb.seg_count;
}

uint64_t wl_segment_pos(const struct wlog *w, uint32_t seg)
{
	return WL_FIRST_SEGMENT + (uint64_t)seg * w->sb.seg_size;
}

static void *map_memory(uint64_t len)
{
	void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

int wl_append_init(struct wlog *w)
{
	w->mem_size = w->mem_end = align_up(max(w->config.memory, WL_MEM_MIN), WL_BLOCK);
	w->batch_cap = w->seg_bytes / WL_BLOCK + 64;
	w->mem = map_memory(w->mem_size);
	/* A record is copied to pages that nobody has touched yet, until the ring has been around once: in large pages there are few. */
	if (w->mem)
		(void)madvise(w->mem, w->mem_size, MADV_HUGEPAGE);
	w->desc = map_memory(WL_MAX_BATCH);
	w->index = map_memory(WL_MAX_INDEX);
	w->clean_buf = map_memory(WL_MAX_BATCH);
	w->sb_buf = map_memory(WL_SB_SLOT);
	w->batch_base = map_memory(w->batch_cap * sizeof(struct wl_batch));
	if (!w->mem || !w->desc || !w->index || !w->clean_buf || !w->sb_buf || !w->batch_base)
		return -ENOMEM;
	uint64_t cap = w->seg_bytes / 2048;

	return wl_pool_init(&w->pool, min(max(cap, 4ull * WL_POOL_RESERVE), 8ull << 20));
}

void wl_append_fini(struct wlog *w)
{
	wl_relic_fini(w);	/* has them instead */
	if (w->mem)
		munmap(w->mem, w->mem_size);
	if (w->desc)
		munmap(w->desc, WL_MAX_BATCH);
	if (w->index)
		munmap(w->index, WL_MAX_INDEX);
	if (w->clean_buf)
		munmap(w->clean_buf, WL_MAX_BATCH);
	if (w->sb_buf)
		munmap(w->sb_buf, WL_SB_SLOT);
	if (w->batch_base)
		munmap(w->batch_base, w->batch_cap * sizeof(struct wl_batch));
	wl_pool_fini(&w->pool);
}

struct wl_batch *wl_batch_get(struct wlog *w)
{
	struct wl_batch *b = w->batch_free;

	if (b)
		w->batch_free = b->node.next ? container_of(b->node.next, struct wl_batch, node) : NULL;
	else if (w->batch_fresh < w->batch_cap)
		b = &w->batch_base[w->batch_fresh++];
	else
		return NULL;
	w->batch_used++;
	*b = (struct wl_batch){ 0 };
	list_init(&b->node);
	list_init(&b->entries);
	return b;
}

/* `b` is on no list. */
void wl_batch_put(struct wlog *w, struct wl_batch *b)
{
	b->node.next = w->batch_free ? &w->batch_free->node : NULL;
	w->batch_free = b;
	w->batch_used--;
}

/* --- Memory ring --- */

static struct wl_batch *batch_next(struct wlog *w, struct wl_batch *b)
{
	return b->node.next == &w->batches ? NULL : container_of(b->node.next, struct wl_batch, node);
}

/* Forgets the memory of the oldest batches until [start, start+len) is nobody's. False: a batch there is not written yet. */
static bool evict(struct wlog *w, uint8_t *start, uint64_t len)
{
	while (w->mem_first) {
		struct wl_batch *b = w->mem_first;

		if (b->buf && (b->buf + b->length <= start || b->buf >= start + len))
			return true;
		if (b->buf && !b->applied)
			return false;
		b->buf = NULL;
		w->mem_first = batch_next(w, b);
	}
	return true;
}

/* Room for a batch of up to `cap` bytes, or NULL while older ones wait to be written. */
static uint8_t *mem_reserve(struct wlog *w, uint64_t cap)
{
	do {
		if (w->mem_head + cap > w->mem_end) {
			/* What lies behind the head must go first, for the ring's order. */
			if (!evict(w, w->mem + w->mem_head, w->mem_size - w->mem_head))
				return NULL;
			w->mem_head = 0;
		}
		if (!evict(w, w->mem + w->mem_head, cap))
			return NULL;
		if (wl_relic_reserve(w, w->mem_head + cap))
			return w->mem + w->mem_head;
	} while (!w->failed);	/* the ring ends before that now */
	return NULL;
}

void wl_mem_trim(struct wlog *w)
{
	if (!list_empty(&w->batches))
		return;
	if (w->relic.head)
		wl_relic_trim(w);
	else if (w->mem_head > 0)
		madvise(w->mem, w->mem_size, MADV_DONTNEED);
	w->mem_head = 0;
	w->mem_first = NULL;
}

/* --- The open batch --- */

void wl_index_add(struct wlog *w, uint64_t pos, const struct wl_bhead *h, const uint8_t *desc)
{
	uint32_t need = WL_I_HEAD + h->count * WL_D_SIZE;
	uint8_t *p = w->index + w->index_len;

	if (w->index_full || w->index_len + need > WL_MAX_INDEX) {
		w->index_full = true;
		return;
	}
	memset(p, 0, WL_I_HEAD);
	put_le64(p + WL_I_SEQ, h->seq);
	put_le64(p + WL_I_NONCE, h->nonce);
	put_le64(p + WL_I_WALL, h->wall);
	put_le32(p + WL_I_OFFSET, (uint32_t)(pos - wl_segment_pos(w, w->head_seg)));
	put_le32(p + WL_I_LENGTH, h->length);
	put_le32(p + WL_I_COUNT, h->count);
	put_le32(p + WL_I_FLAGS, h->flags);
	put_le32(p + WL_I_PAYLOAD, h->payload);
	memcpy(p + WL_I_HEAD, desc, h->count * WL_D_SIZE);
	w->index_len += need;
}

/* open -> sealed */
static void seal_open(struct wlog *w)
{
	struct wl_batch *b = w->open;
	uint32_t used = WL_B_HEADER + w->open_payload + w->open_count * WL_D_SIZE;
	struct wl_bhead h = {
		.seq = b->seq,
		.generation = w->sb.generation,
		.prev = b->prev,
		.nonce = rt_rand64(),
		.wall = rt_wall_ns(),
		.length = align_up(used, WL_BLOCK),
		.payload = w->open_payload,
		.count = w->open_count,
		.desc_crc = w->open_desc_crc,
		.index_len = w->open_index_len,
		.index_crc = w->open_index_crc,
		.flags = w->group_open ? WL_B_FLAG_MORE : 0,
		.segment = w->head_seg,
	};

	memcpy(b->buf + wl_batch_desc_off(&h), w->desc, w->open_count * WL_D_SIZE);
	memset(b->buf + used, 0, h.length - used);
	wl_bhead_encode(&h, &w->sb.uuid, b->buf);
	wl_relic_seal(&w->relic, b->seq, h.nonce, h.length);
	b->nonce = h.nonce;
	b->wall = h.wall;
	b->length = h.length;
	b->more = h.flags & WL_B_FLAG_MORE;
	wl_index_add(w, b->pos, &h, w->desc);
	w->last_nonce = h.nonce;
	w->head_pos += h.length;
	w->mem_head = b->buf + h.length - w->mem;
	w->open = NULL;
}

static bool fits(const struct wlog *w, uint64_t data)
{
	return WL_B_HEADER + w->open_payload + data + (uint64_t)(w->open_count + 1) * WL_D_SIZE <= w->open_cap;
}

/*
 * Opens a batch with room for `data` bytes in one record. -ENOSPC: no free segment; -EAGAIN: memory or batches are
 * taken until something was committed.
 */
static int open_batch(struct wlog *w, uint64_t data)
{
	uint64_t seg_end = wl_segment_pos(w, w->head_seg) + w->sb.seg_size;
	uint64_t need = align_up(WL_B_HEADER + data + WL_D_SIZE, WL_BLOCK);
	bool next_segment = seg_end - w->head_pos < need;
	uint64_t index = next_segment && !w->index_full ? w->index_len : 0;
	uint64_t cap = min((uint64_t)WL_MAX_BATCH, next_segment ? w->sb.seg_size : seg_end - w->head_pos);

	if (next_segment && wl_free_segments(w) == 0)
		return -ENOSPC;
	if (need + index > min(w->sb.seg_size, WL_MAX_BATCH))
		index = 0;
	uint8_t *buf = mem_reserve(w, cap);
	struct wl_batch *b = buf ? wl_batch_get(w) : NULL;

	if (!b)
		return -EAGAIN;
	if (next_segment) {
		w->head_seg = (w->head_seg + 1) % w->sb.seg_count;
		w->head_pos = wl_segment_pos(w, w->head_seg);
	}
	b->seq = w->next_seq++;
	b->pos = w->head_pos;
	b->prev = w->last_nonce;
	b->buf = buf;
	b->length = cap;	/* what it holds of the memory ring until it is sealed */
	list_add_tail(&w->batches, &b->node);
	if (!w->mem_first)
		w->mem_first = b;
	if (!w->commit_next)
		w->commit_next = b;
	memcpy(buf + WL_B_HEADER, w->index, index);
	if (next_segment) {
		w->index_len = 0;
		w->index_full = false;
	}
	w->open = b;
	w->open_cap = cap;
	w->open_count = 0;
	w->open_index_len = w->open_payload = index;
	w->open_index_crc = crc32c(0, buf + WL_B_HEADER, index);
	w->open_desc_crc = 0;
	w->open_since_ns = rt_now_ns();
	wl_relic_open(&w->relic, b->seq, b->pos, buf - w->mem, b->prev, index, w->open_index_crc);
	return 0;
}

/* Puts one record into the open batch, which has room, and into the fresh map. */
static int put_record(struct wlog_volume *v, struct wl_desc *d, const struct iovec *iov, int niov, uint64_t iov_off)
{
	struct wlog *w = v->w;
	uint8_t *data = w->open->buf + WL_B_HEADER + w->open_payload;
	struct wl_entry t = { .batch = w->open, .off = d->off, .len = d->len, .rno = d->rno, .epoch = d->epoch,
			      .volume = d->volume, .type = d->type };

	if (d->type == WL_WRITE) {
		iov_copy_out(iov, niov, iov_off, data, d->len);
		d->crc = crc32c(0, data, d->len);
		d->data = WL_B_HEADER + w->open_payload;
		t.data = t.rec_data = d->data;
		t.rec_len = d->len;
		t.rec_crc = d->crc;
	}
	/* A record brought forward is in the map already, at its old place, until it is applied. */
	if (!(d->flags & WL_D_FLAG_COPY)) {
		int r = wl_map_insert(&v->fresh, &w->pool, &t, false);
		if (r < 0)
			return r;
		if (d->type == WL_WRITE)
			v->fresh_bytes += d->len;
	}
	uint8_t *desc = w->desc + w->open_count * WL_D_SIZE;

	wl_desc_encode(d, desc);
	w->open_desc_crc = crc32c(w->open_desc_crc, desc, WL_D_SIZE);
	w->open_count++;
	if (d->type == WL_WRITE)
		w->open_payload += d->len;
	wl_relic_put(&w->relic, w->open_count, w->open_payload, w->open_desc_crc);
	w->unapplied_records++;
	v->last_seq = w->open->seq;
	return 0;
}

/* Waits until the open batch has room for a record of `data` bytes. */
static co_fn int co_room(struct wlog_volume *v, uint64_t data)
{
	struct wlog *w = v->w;

	for (;;) {
		if (w->failed)
			return w->failed;
		if (v->cancelled)
			return -ESHUTDOWN;
		if (w->group_waits) {
			co_queue_wait(&w->commit_done, "a large request that came first");
			continue;
		}
		if (w->open) {
			if (fits(w, data))
				return 0;
			seal_open(w);
			co_queue_wake_all(&w->commit_wake);
		}
		int r = open_batch(w, data);
		if (r == 0)
			continue;
		if (r == -ENOSPC) {
			wl_want_space(w, w->sb.seg_size);
			co_queue_wait(&w->space, "space in the write log");
		} else {
			co_queue_wait(&w->commit_done, "memory of the write log");
		}
	}
}

static struct wl_desc new_desc(struct wlog_volume *v, uint8_t type, uint64_t off, uint64_t len)
{
	struct wl_volrec *rec = &v->w->sb.vol[v->slot];

	return (struct wl_desc){ .type = type, .volume = v->slot, .off = off, .len = len, .rno = rec->rno++,
				 .epoch = rec->epoch };
}

/* What a group of `len` bytes will take: exactly what put_group() does from the present state on. */
struct group_plan {
	uint64_t mem;		/* of the memory ring, without what is lost at its end */
	uint32_t segments;	/* that it will begin */
};

static void plan_group(const struct wlog *w, uint64_t len, struct group_plan *plan)
{
	uint64_t left = wl_segment_pos(w, w->head_seg) + w->sb.seg_size - w->head_pos, index_len = w->index_len;
	uint64_t cap = w->open_cap, payload = w->open_payload, count = w->open_count, most = min(w->sb.seg_size, WL_MAX_BATCH);
	bool open = w->open, index_full = w->index_full;

	*plan = (struct group_plan){ 0 };
	while (len > 0) {
		uint64_t piece = min(len, (uint64_t)PIECE_MIN);

		if (open && WL_B_HEADER + payload + piece + (count + 1) * WL_D_SIZE > cap) {
			uint64_t length = align_up(WL_B_HEADER + payload + count * WL_D_SIZE, WL_BLOCK);

			plan->mem += length;
			left -= length;
			index_len += WL_I_HEAD + count * WL_D_SIZE;
			index_full |= index_len > WL_MAX_INDEX;
			open = false;
		}
		if (!open) {
			uint64_t need = align_up(WL_B_HEADER + piece + WL_D_SIZE, WL_BLOCK);
			bool next = left < need;

			payload = next && !index_full && need + index_len <= most ? index_len : 0;
			if (next) {
				plan->segments++;
				left = w->sb.seg_size;
				index_len = 0;
				index_full = false;
			}
			cap = min((uint64_t)WL_MAX_BATCH, left);
			count = 0;
			open = true;
		}
		uint64_t n = min(len, cap - WL_B_HEADER - payload - (count + 1) * WL_D_SIZE);

		payload += n;
		count++;
		len -= n;
	}
	plan->mem += cap;
}

/* True if `need` bytes of the memory ring from the open batch on, and what may be lost at the ring's end, hold nothing that waits to be applied. */
static bool mem_has_room(const struct wlog *w, uint64_t need)
{
	const struct wl_batch *b = w->commit_next;

	if (!b || b == w->open)
		return need + WL_MAX_BATCH <= w->mem_end;
	while (b->node.prev != &w->batches && !container_of(b->node.prev, struct wl_batch, node)->applied)
		b = container_of(b->node.prev, struct wl_batch, node);

	uint64_t first = b->buf - w->mem, taken = w->mem_head >= first ? w->mem_head - first : w->mem_head + w->mem_end - first;

	return taken > 0 && need + WL_MAX_BATCH <= w->mem_end - taken;
}

/* Waits until the whole group has room in the log and in memory, where all of it stays until its last batch is durable. */
static co_fn int co_group_room(struct wlog_volume *v, uint64_t len)
{
	struct wlog *w = v->w;
	struct group_plan plan;

	while (!w->failed && !v->cancelled) {
		plan_group(w, len, &plan);
		if (!wl_relic_outgrow(w, plan.mem + WL_MAX_BATCH))
			break;
		if (wl_free_segments(w) < plan.segments) {
			wl_want_space(w, (uint64_t)plan.segments * w->sb.seg_size);
			co_queue_wait(&w->space, "space in the write log for a large request");
		} else if (!mem_has_room(w, plan.mem)) {
			/* Nobody else takes of it meanwhile: see co_room(). */
			w->group_waits = true;
			if (w->open)
				w->want_seq = max(w->want_seq, w->open->seq);
			co_queue_wake_one(&w->commit_wake);
			co_queue_wait(&w->commit_done, "memory of the write log for a large request");
		} else if (wl_relic_reserve(w, min(w->mem_head + plan.mem + WL_MAX_BATCH, w->mem_end))) {
			break;
		}
	}
	if (w->group_waits) {
		w->group_waits = false;
		co_queue_wake_all(&w->commit_done);
	}
	return w->failed ? w->failed : v->cancelled ? -ESHUTDOWN : 0;
}

/* Without suspending, so that the group's batches hold nobody else's records but those of the first, and nobody waits for an unfinished group. */
static int put_group(struct wlog_volume *v, uint64_t off, uint64_t len, const struct iovec *iov, int niov)
{
	struct wlog *w = v->w;
	uint64_t done = 0;
	int r = 0;

	w->group_open = true;
	if (w->open)
		wl_relic_group(&w->relic, w->open->seq, w->open_count, w->open_payload, w->open_desc_crc);
	else
		wl_relic_group(&w->relic, w->next_seq, 0, 0, 0);
	while (done < len && r == 0) {
		uint64_t piece = min(len - done, (uint64_t)PIECE_MIN);

		if (w->open && !fits(w, piece))
			seal_open(w);
		r = w->open ? 0 : open_batch(w, piece);
		if (r < 0)
			break;
		uint64_t room = w->open_cap - WL_B_HEADER - w->open_payload - (w->open_count + 1) * WL_D_SIZE;
		uint64_t n = min(len - done, room);
		struct wl_desc d = new_desc(v, WL_WRITE, off + done, n);

		r = put_record(v, &d, iov, niov, done);
		done += n;
	}
	w->group_open = false;
	if (r < 0)
		wl_fail(w, r, "an atomic group");	/* our own fault: half of it is in the log, unfinished for ever */
	else
		wl_relic_group(&w->relic, 0, 0, 0, 0);
	if (w->open)
		seal_open(w);
	co_queue_wake_all(&w->commit_wake);
	return r;
}

static co_fn int co_append_group(struct wlog_volume *v, uint64_t off, uint64_t len, const struct iovec *iov, int niov)
{
	struct wlog *w = v->w;

	co_mutex_lock(&w->group_lock);
	int r = co_group_room(v, len);
	if (r == 0)
		r = put_group(v, off, len, iov, niov);
	co_mutex_unlock(&w->group_lock);
	return r;
}

co_fn int co_wl_append(struct wlog_volume *v, uint8_t type, uint64_t off, uint64_t len, const struct iovec *iov,
		       int niov, uint64_t *ret_seq)
{
	struct wlog *w = v->w;
	uint64_t data = type == WL_WRITE ? len : 0;
	uint64_t bytes = data + WL_D_SIZE + WL_B_HEADER;
	int r = co_wl_admit(v, bytes);

	if (r < 0)
		return r;
	if (data > group_min(w)) {
		r = co_append_group(v, off, len, iov, niov);
	} else {
		r = co_room(v, data);
		if (r == 0) {
			struct wl_desc d = new_desc(v, type, off, len);

			r = put_record(v, &d, iov, niov, 0);
		}
	}
	w->admitted -= bytes;
	wl_wake_space(w);
	*ret_seq = v->last_seq;
	return r;
}

int wl_append_copy(struct wlog_volume *v, const struct wl_entry *e, uint64_t off, uint64_t len, const void *data)
{
	struct wlog *w = v->w;
	uint8_t type = e->type == WL_WRITE && !data ? WL_LOST : e->type;
	uint64_t bytes = type == WL_WRITE ? len : 0;
	struct iovec iov = { (void *)data, len };
	struct wl_desc d = { .type = type, .flags = WL_D_FLAG_COPY, .volume = v->slot, .off = off, .len = len,
			     .rno = e->rno, .epoch = e->epoch };

	if (w->failed)
		return w->failed;
	if (w->open && !fits(w, bytes)) {
		seal_open(w);
		co_queue_wake_all(&w->commit_wake);
	}
	if (!w->open) {
		int r = open_batch(w, bytes);
		if (r < 0)
			return r;
	}
	return put_record(v, &d, &iov, 1, 0);
}

void wl_seal(struct wlog *w)
{
	if (w->open)
		seal_open(w);
	co_queue_wake_one(&w->commit_wake);
}
