/* SPDX-License-Identifier: MIT */
/*
 * Write log: space. Quotas, the throttle, the tail, and copying forward.
 *
 * The ring is freed from its tail only. A volume whose image hangs would hold the tail, and with it everybody's space; so when free
 * segments run short while more than one volume has dirty data, what is still needed of the oldest segment is copied to the
 * head, with its record numbers and epochs, and the tail moves on. Each volume's dirty data is bounded by its quota, so what is copied is, too.
 *
 * The throttle follows ZFS's write throttle (OpenZFS, "ZFS Transaction Delay", module/zfs/dmu_tx.c): no delay below the high
 * watermark, then delay = scale * (fill - high) / (full - fill), so that the time per write rises smoothly to what the image takes. Differences: the
 * fill is the worse of the ring's and the volume's quota, and the cap is 20 ms.
 */
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "util/size.h"
#include "wlog/internal.h"

#define THROTTLE_SCALE_NS 200000ull
#define THROTTLE_CAP_NS 20000000ull

uint32_t wl_free_segments(const struct wlog *w)
{
	uint32_t n = w->sb.seg_count;

	return n - 1 - (w->head_seg - w->durable_tail_seg + n) % n;
}

/*
 * What is shared: the ring's bytes, and the index's entries. Of each, half an equal share is kept for every attached volume, whatever the others hold; the rest is
 * for whoever comes first. So volumes whose images hang cannot take what the others need, however many they are.
 */
enum share { BYTES, ENTRIES };

static uint64_t share_total(const struct wlog *w, enum share s)
{
	uint64_t usable = (uint64_t)(w->sb.seg_count - WL_SEG_RESERVE - 1) * w->sb.seg_size;

	/* The ends of segments that no batch fits are lost. */
	return s == BYTES ? usable - usable / 8 : w->pool.cap - WL_POOL_RESERVE;
}

static uint64_t share_held(const struct wlog_volume *v, enum share s)
{
	uint64_t entries = v->map.entries + v->fresh.entries;

	return s == BYTES ? wl_dirty_bytes(v) + v->fresh_bytes + entries * WL_D_SIZE : entries + v->fifo_entries;
}

/* The most that `v` may hold now. */
static uint64_t share_limit(const struct wlog_volume *v, enum share s)
{
	const struct wlog *w = v->w;
	uint64_t total = share_total(w, s), kept, taken = 0;
	unsigned n = 0;

	list_for_each(&w->volumes, l)
		n += container_of(l, struct wlog_volume, node)->attached;
	kept = total / (n ? 2 * n : 1);
	list_for_each(&w->volumes, l) {
		const struct wlog_volume *o = container_of(l, struct wlog_volume, node);

		if (o != v)
			taken += o->attached ? max(share_held(o, s), kept) : share_held(o, s);
	}
	return max(kept, total - min(taken, total));
}

uint64_t wl_quota(const struct wlog_volume *v)
{
	uint64_t quota = v->w->sb.vol[v->slot].quota, limit = share_limit(v, BYTES);

	return quota ? min(quota, limit) : limit;
}

uint64_t wl_dirty_bytes(const struct wlog_volume *v)
{
	return max(v->map.bytes, v->fifo_bytes);
}

bool wl_is_dirty(const struct wlog_volume *v)
{
	return v->map.entries > 0 || !list_empty(&v->fifo);
}

const char *wl_dirty_text(uint64_t bytes, char buf[static 16])
{
	return bytes ? size_format(bytes, buf) : strcpy(buf, "zeroes");
}

unsigned wl_fill_permille(const struct wlog_volume *v)
{
	const struct wlog *w = v->w;
	uint64_t by_quota = share_held(v, BYTES) * 1000 / max(wl_quota(v), (uint64_t)1);
	uint64_t by_index = share_held(v, ENTRIES) * 1000 / max(share_limit(v, ENTRIES), (uint64_t)1);
	uint64_t usable = w->sb.seg_count - WL_SEG_RESERVE;
	uint64_t taken = w->sb.seg_count - wl_free_segments(w);
	uint64_t by_ring = taken <= 2 ? 0 : (taken - 2) * 1000 / usable;
	uint64_t by_share = max(by_quota, by_index), fill = max(by_share, by_ring);

	return min(fill, (uint64_t)1000);
}

/* True if the ring can take `bytes` more and leave enough for the cleaner. */
static bool ring_has_room(const struct wlog *w, uint64_t bytes)
{
	uint64_t segs = wl_free_segments(w);
	uint64_t free = segs > WL_SEG_RESERVE ? (segs - WL_SEG_RESERVE) * w->sb.seg_size : 0;

	return free >= w->admitted + bytes + bytes / 16;
}

/* True if applying what is appended and one record more might not find its entries. */
static bool index_is_short(const struct wlog *w)
{
	return wl_pool_free(&w->pool) < 4 * w->unapplied_records + WL_POOL_RESERVE;
}

/* True if the volume's own share is exhausted. A volume that holds nothing may always begin. */
static bool over_share(const struct wlog_volume *v, uint64_t bytes)
{
	uint64_t held = share_held(v, BYTES);

	return (held && held + bytes > wl_quota(v)) || (held && share_held(v, ENTRIES) >= share_limit(v, ENTRIES)) ||
	       index_is_short(v->w);
}

bool wl_room_is_wanted(const struct wlog_volume *v)
{
	return !co_queue_is_empty(&v->room) || (v->w->room_waiters && index_is_short(v->w));
}

static void kick_all(struct wlog *w)
{
	list_for_each(&w->volumes, l)
		wl_destage_kick(container_of(l, struct wlog_volume, node));
}

void wl_want_space(struct wlog *w, uint64_t need)
{
	w->space_wanted = true;
	w->space_need = max(w->space_need, need);
	kick_all(w);
	wl_kick_ticker(w);
}

void wl_wake_space(struct wlog *w)
{
	co_queue_wake_all(&w->space);
	if (w->room_waiters == 0)
		return;
	list_for_each(&w->volumes, l)
		co_queue_wake_all(&container_of(l, struct wlog_volume, node)->room);
}

static co_fn void co_throttle(struct wlog_volume *v)
{
	unsigned fill = wl_fill_permille(v), high = v->w->config.high_pct * 10;

	if (fill <= high || v->w->failed)
		return;
	uint64_t delay = THROTTLE_SCALE_NS * (fill - high) / max(1000 - fill, 1u);

	wl_destage_kick(v);
	wl_kick_ticker(v->w);
	co_sleep_ns(min(delay, THROTTLE_CAP_NS));
}

/* What is open and not committed cannot be destaged: nobody else may come to commit it. */
static void want_commit(struct wlog *w)
{
	if (w->open && w->open_count)
		w->want_seq = max(w->want_seq, w->open->seq);
	co_queue_wake_one(&w->commit_wake);
}

/*
 * First come, first served, so that a large request is not overtaken by small ones for ever: within the volume while its share is exhausted,
 * and among all while the ring is full. Nobody waits for a volume's share with the ring's lock.
 */
co_fn int co_wl_admit(struct wlog_volume *v, uint64_t bytes)
{
	struct wlog *w = v->w;
	bool waited = false;

	co_throttle(v);
	co_mutex_lock(&v->admit_lock);
	while (!w->failed && !v->cancelled && over_share(v, bytes)) {
		want_commit(w);
		kick_all(w);	/* of a short index it may be another volume that holds the most */
		w->room_waiters++;
		co_queue_wait(&v->room, "the volume's share of the write log");
		w->room_waiters--;
	}
	co_mutex_lock(&w->admit_lock);
	while (!w->failed && !v->cancelled && !ring_has_room(w, bytes)) {
		want_commit(w);
		wl_want_space(w, bytes);
		co_queue_wait(&w->space, "room in the write log");
		waited = true;
	}
	int r = w->failed ? w->failed : v->cancelled ? -ESHUTDOWN : 0;

	if (r == 0)
		w->admitted += bytes;
	if (r == 0 && waited)
		w->clean_spent = 0;
	co_mutex_unlock(&w->admit_lock);
	co_mutex_unlock(&v->admit_lock);
	return r;
}

void wl_advance_tail(struct wlog *w)
{
	bool moved = false;

	for (;;) {
		struct wl_batch *b = list_first(&w->batches, struct wl_batch, node);

		if (!b || !b->applied || b->pins || !list_empty(&b->entries))
			break;
		if (w->mem_first == b)
			w->mem_first = b->node.next == &w->batches ? NULL :
				       container_of(b->node.next, struct wl_batch, node);
		list_del(&b->node);
		wl_batch_put(w, b);
		moved = true;
	}
	if (moved) {
		w->sb_dirty = true;
		if (w->space_wanted)
			wl_kick_ticker(w);
	}
}

/* --- Copying forward --- */

struct victim {
	struct wlog_volume *v;
	struct wl_entry e;	/* a copy */
	bool fifo;
};

#define VICTIMS 64

/* Copying twice around the ring has made no room for anybody: it is full of data that only its images can take. */
#define CLEAN_ROUNDS 2u

static bool worth_cleaning(struct wlog *w)
{
	uint64_t dirty = 0;
	unsigned volumes = 0;

	if (w->failed || w->clean_spent > CLEAN_ROUNDS * w->seg_bytes)
		return false;
	if (wl_free_segments(w) > max(WL_SEG_RESERVE + 1, w->sb.seg_count / 8) && ring_has_room(w, w->space_need))
		return false;
	list_for_each(&w->volumes, l) {
		struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		dirty += wl_dirty_bytes(v) + v->fresh_bytes;
		/* Zeroes pin the tail though they take no bytes; and a volume that waits for room counts though it holds nothing. */
		volumes += share_held(v, ENTRIES) > 0 || v->attached;
	}
	return volumes > 1 && dirty < w->seg_bytes - w->seg_bytes / 8;
}

/* Up to VICTIMS live entries of the oldest batches in the tail's segment. */
static unsigned collect_victims(struct wlog *w, struct victim *out)
{
	struct wl_batch *tail = list_first(&w->batches, struct wl_batch, node);
	unsigned n = 0;

	if (!tail || !tail->applied)
		return 0;
	uint32_t seg = wl_segment_of(w, tail->pos);

	if (seg == w->head_seg)
		return 0;
	list_for_each(&w->batches, l) {
		struct wl_batch *b = container_of(l, struct wl_batch, node);

		if (wl_segment_of(w, b->pos) != seg || !b->applied)
			break;
		list_for_each(&b->entries, m) {
			struct wl_entry *e = container_of(m, struct wl_entry, on_batch);
			struct wlog_volume *v = w->by_slot[e->volume];

			if (!v)
				continue;
			/* What is destaged in order is copied by whole records of the queue, which takes the map's pieces along. */
			if (e->map && (e->map != &v->map || e->epoch <= v->ordered_upto))
				continue;
			if (n == VICTIMS)
				return n;
			out[n++] = (struct victim){ v, *e, !e->map };
		}
	}
	return n;
}

/* Its volume may have been dropped, its data discarded or destaged, while something was waited for. Its batch is pinned. */
static bool is_still_there(struct wlog *w, const struct victim *c)
{
	if (w->by_slot[c->e.volume] != c->v)
		return false;
	if (!c->fifo)
		return true;	/* copy_current() looks at the map */
	list_for_each(&c->e.batch->entries, l) {
		const struct wl_entry *e = container_of(l, struct wl_entry, on_batch);

		if (!e->map && e->volume == c->e.volume && e->rno == c->e.rno && e->off == c->e.off && e->len == c->e.len)
			return true;
	}
	return false;
}

/* Appends what is still current of [off, end) of the victim, whose bytes are at `data` (NULL: damaged). */
static int copy_current(struct wlog *w, struct victim *c, const uint8_t *data)
{
	struct wlog_volume *v = c->v;
	uint64_t off = c->e.off, end = c->e.off + c->e.len;
	int r = 0;

	if (c->fifo)
		return wl_append_copy(v, &c->e, off, c->e.len, data);
	while (off < end && r == 0) {
		struct wl_entry *e = wl_map_find(&v->map, off), *f = wl_map_find(&v->fresh, off);

		if (!e || e->off >= end)
			break;
		uint64_t from = max(off, e->off), to = min(end, e->off + e->len);

		if (e->rno != c->e.rno || e->batch->seq != c->e.batch->seq) {
			off = to;
			continue;
		}
		if (f && f->off < to) {	/* a newer version is on its way into the log */
			if (f->off <= from) {
				off = min(to, f->off + f->len);
				continue;
			}
			to = f->off;
		}
		r = wl_append_copy(v, &c->e, from, to - from, data ? data + (from - c->e.off) : NULL);
		off = to;
	}
	return r;
}

/* A record that cannot be read for long enough is lost, or its segment, and with it the ring, would be held for ever. */
static bool is_lost(struct wlog *w, const struct wl_entry *e)
{
	uint64_t pos = e->batch->pos + e->rec_data, now = rt_now_ns();
	bool same = w->clean_bad_since && pos - w->clean_bad_pos < w->sb.seg_size && now - w->clean_bad_last < WL_UNREADABLE_NS;

	if (!same) {	/* another place, or one that could be read meanwhile */
		w->clean_bad_since = now;
		w->clean_bad_pos = pos;
	}
	w->clean_bad_last = now;
	return now - w->clean_bad_since >= WL_UNREADABLE_NS;
}

co_fn void co_wl_clean(struct wlog *w)
{
	static const unsigned max_rounds = 4096;
	struct victim victims[VICTIMS];

	for (unsigned round = 0; round < max_rounds && w->space_wanted && worth_cleaning(w); round++) {
		unsigned n = collect_victims(w, victims);

		if (n == 0)
			break;
		/* The batches must stay where they are while their data is read. */
		for (unsigned i = 0; i < n; i++)
			victims[i].e.batch->pins++;
		int r = 0;

		for (unsigned i = 0; i < n && r == 0; i++) {
			struct wl_entry *e = &victims[i].e;

			w->clean_spent += WL_D_SIZE + e->rec_len;
			if (e->type == WL_WRITE)
				r = co_wl_read_piece(w, e->batch, e, e->off, e->len, w->clean_buf);
			if (!is_still_there(w, &victims[i])) {
				r = 0;
				continue;
			}
			const uint8_t *data = r == 0 ? w->clean_buf : NULL;

			if (r < 0 && (r == -EBADMSG || is_lost(w, e))) {	/* goes on as lost, and pins nobody's space */
				wl_report_damage(victims[i].v, e->rno, e->off, e->len);
				r = 0;
			}
			if (r == 0)
				r = copy_current(w, &victims[i], data);
			if (r == -EAGAIN)
				r = co_wl_commit_all(w);
		}
		for (unsigned i = 0; i < n; i++)
			victims[i].e.batch->pins--;
		if (r == 0)
			r = co_wl_commit_all(w);
		wl_advance_tail(w);
		if (r < 0)
			break;
		struct wl_batch *tail = list_first(&w->batches, struct wl_batch, node);

		if (!tail || wl_segment_of(w, tail->pos) != w->durable_tail_seg) {
			if (co_wl_checkpoint(w) < 0)
				break;
			w->space_wanted = false;
			w->space_need = 0;
		}
	}
}
