/* SPDX-License-Identifier: MIT */
/*
 * Write log: commits, and what makes a durable record part of the map.
 *
 * One coroutine per log writes batches in order, one at a time (invariant 1). While a write is in flight the next batch collects
 * what arrives: the group commit. Who waits for durability waits for applied_seq.
 */
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "wlog/internal.h"

/* Puts a durable record of an ordered volume into its queue. */
static int put_fifo(struct wlog *w, struct wlog_volume *v, const struct wl_entry *t)
{
	struct wl_entry *e = wl_entry_clone(&w->pool, t);
	struct list *at = v->fifo.prev;

	if (!e)
		return -ENOSPC;
	while (at != &v->fifo && container_of(at, struct wl_entry, fifo)->rno > t->rno)
		at = at->prev;
	list_insert(at, &e->fifo);
	v->fifo_bytes += t->type == WL_WRITE ? t->len : 0;
	v->fifo_entries++;
	return 0;
}

void wl_fifo_drop(struct wlog_volume *v, struct wl_entry *e)
{
	v->fifo_bytes -= e->type == WL_WRITE ? e->len : 0;
	v->fifo_entries--;
	wl_pool_put(&v->w->pool, e);
}

void wl_fifo_clear(struct wlog_volume *v)
{
	while (!list_empty(&v->fifo))
		wl_fifo_drop(v, list_first(&v->fifo, struct wl_entry, fifo));
}

static void move_entry(struct wl_entry *e, const struct wl_entry *t)
{
	list_del(&e->on_batch);
	list_add_tail(&t->batch->entries, &e->on_batch);
	e->batch = t->batch;
	e->type = t->type;	/* a write may have been found lost */
	e->rec_data = t->rec_data;
	e->rec_len = t->rec_len;
	e->rec_crc = t->rec_crc;
}

/* The record `t` lies somewhere else now: so do its pieces in the round that is being written, or they would pin its old batch. */
static void move_pieces(struct wl_map *m, const struct wl_entry *t)
{
	for (struct wl_entry *e = wl_map_find(m, t->off); e && e->off < t->off + t->len; e = wl_map_next(e)) {
		if (e->rno != t->rno)
			continue;
		m->bytes -= e->type != t->type ? e->len : 0;
		e->data = t->type == WL_WRITE ? e->data - e->rec_data + t->rec_data : 0;
		move_entry(e, t);
	}
}

static int apply_fifo(struct wlog *w, struct wlog_volume *v, const struct wl_entry *t, bool copy)
{
	if (copy) {
		list_for_each(&v->fifo, n) {
			struct wl_entry *e = container_of(n, struct wl_entry, fifo);

			if (e->rno > t->rno)
				break;
			if (e->rno == t->rno && e->off == t->off && e->len == t->len) {
				v->fifo_bytes -= e->type != t->type ? e->len : 0;
				e->data = t->data;
				move_entry(e, t);
				move_pieces(&v->round, t);
				return 0;
			}
		}
	}
	return put_fifo(w, v, t);
}

int wl_apply_desc(struct wlog *w, struct wl_batch *b, const struct wl_desc *d)
{
	struct wlog_volume *v = w->by_slot[d->volume];
	struct wl_volrec *rec = &w->sb.vol[d->volume];
	bool copy = d->flags & WL_D_FLAG_COPY;
	struct wl_entry t = { .batch = b, .off = d->off, .len = d->len, .rno = d->rno,   .epoch = d->epoch,
			      .volume = d->volume, .type = d->type, .data = d->data, .rec_data = d->data,
			      .rec_len = d->type == WL_WRITE ? d->len : 0, .rec_crc = d->crc };

	if (!v || b->seq < rec->floor_seq || d->epoch < rec->floor_epoch)
		return 0;
	if (d->off + d->len > align_up(rec->size, 65536))
		return -EBADMSG;
	int r = wl_map_insert(&v->map, &w->pool, &t, copy);
	if (r == 0 && d->epoch <= v->ordered_upto)
		r = apply_fifo(w, v, &t, copy);
	if (r < 0)
		return r;
	if (!v->dirty_since)
		v->dirty_since = copy && rec->dirty_since ? min(rec->dirty_since, b->wall) : b->wall;
	if (d->rno >= rec->rno)
		rec->rno = d->rno + 1;
	if (d->epoch >= rec->epoch)
		rec->epoch = d->epoch;
	v->records += !copy;
	v->applied_rno = max(v->applied_rno, d->rno);
	return 0;
}

static void erase_fresh(struct wlog *w, struct wl_batch *b)
{
	while (!list_empty(&b->entries)) {
		struct wl_entry *e = list_first(&b->entries, struct wl_entry, on_batch);

		wl_map_erase(e->map, &w->pool, e);
	}
}

void wl_apply_batch(struct wlog *w, struct wl_batch *b)
{
	uint32_t count = get_le32(b->buf + WL_B_COUNT);
	const uint8_t *p = b->buf + WL_B_HEADER + get_le32(b->buf + WL_B_PAYLOAD);

	erase_fresh(w, b);
	for (uint32_t i = 0; i < count; i++, p += WL_D_SIZE) {
		struct wl_desc d;

		wl_desc_decode(p, &d);
		int r = wl_apply_desc(w, b, &d);
		if (r < 0) {	/* admission keeps entries in reserve: our own fault */
			wl_fail(w, r, "the index");
			return;
		}
		struct wlog_volume *v = w->by_slot[d.volume];

		if (v && d.type == WL_WRITE && !(d.flags & WL_D_FLAG_COPY))
			v->fresh_bytes -= d.len;
		if (v)
			wl_destage_kick(v);
	}
	w->unapplied_records -= count;
	b->applied = true;
	w->applied_seq = b->seq;
}

static struct wl_batch *next_of(struct wlog *w, struct wl_batch *b)
{
	return b->node.next == &w->batches ? NULL : container_of(b->node.next, struct wl_batch, node);
}

/* A group is applied when its last batch is durable: invariant (2). */
static void apply_durable(struct wlog *w, struct wl_batch *last)
{
	struct wl_batch *b = last;

	if (last->more)
		return;
	while (b->node.prev != &w->batches) {
		struct wl_batch *p = container_of(b->node.prev, struct wl_batch, node);

		if (p->applied)
			break;
		b = p;
	}
	for (; b && !w->failed; b = b == last ? NULL : next_of(w, b))
		wl_apply_batch(w, b);
}

/* sealed -> written (-> applied) */
static co_fn void co_commit_one(struct wlog *w, struct wl_batch *b)
{
	uint64_t start = rt_now_exact_ns();
	int r = co_wl_dev_write(w, b->pos, b->buf, b->length);

	if (r < 0) {
		wl_fail(w, r, "a batch");
		return;
	}
	wl_relic_written(&w->relic, b->seq);
	if (w->mark_deadline_ns)
		co_wl_wait_for_marks(w);
	if (w->failed)
		return;
	hist_add(&w->commit_latency, rt_now_exact_ns() - start);
	w->commits++;
	w->commit_bytes += b->length;
	b->written = true;
	w->durable_seq = b->seq;
	w->commit_next = next_of(w, b);
	apply_durable(w, b);
	wl_advance_tail(w);
	co_queue_wake_all(&w->commit_done);
	wl_wake_space(w);	/* what overwrites takes less room once it is applied */
}

static bool wants_commit(const struct wlog *w, uint64_t *ret_deadline)
{
	const struct wl_batch *b = w->commit_next;

	*ret_deadline = UINT64_MAX;
	if (!b || w->failed)
		return false;
	if (b != w->open || w->want_seq >= b->seq)
		return true;
	if (w->open_count == 0)
		return false;
	*ret_deadline = w->open_since_ns + WL_COMMIT_IDLE_NS;
	return rt_now_ns() >= *ret_deadline || w->stop;
}

co_fn void co_wl_committer(void *arg)
{
	struct wlog *w = arg;
	uint64_t deadline;

	for (;;) {
		if (wants_commit(w, &deadline)) {
			if (w->commit_next == w->open)
				wl_seal(w);
			co_commit_one(w, w->commit_next);
			continue;
		}
		if (w->stop)
			break;
		if (deadline == UINT64_MAX)
			co_queue_wait(&w->commit_wake, "records to commit");
		else
			co_queue_wait_until(&w->commit_wake, deadline, "records to commit");
	}
	w->commit_running = false;
	co_queue_wake_all(&w->commit_done);
}

co_fn int co_wl_commit_upto(struct wlog *w, uint64_t seq)
{
	while (w->applied_seq < seq && !w->failed) {
		w->want_seq = max(w->want_seq, seq);
		co_queue_wake_one(&w->commit_wake);
		co_queue_wait(&w->commit_done, "a commit of the write log");
	}
	return w->applied_seq >= seq ? 0 : w->failed;
}

co_fn int co_wl_commit_all(struct wlog *w)
{
	uint64_t seq = w->next_seq - 1;

	return co_wl_commit_upto(w, seq);
}
