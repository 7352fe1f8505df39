/* SPDX-License-Identifier: MIT */
/*
 * Write log: destage, from the map into the image.
 *
 * One destager per attached volume works in rounds: write a number of runs, many at once (runs.c), flush the image, and only then take from the map what
 * was written (invariant 5). A round that fails anywhere takes nothing away and is repeated after a while: the data is safe in the log meanwhile.
 *
 * merged   The map itself, in order of offset, from where the last round ended (an elevator). A piece that came since the
 *          round began has a higher record number than `cap_rno` and stays; it is left out where it can be, or a round that follows a guest would write all that
 *          comes in front of it twice, and leave it behind for a whole lap. (Not the batch number: what the cleaner brings forward
 *          gets a new batch and keeps its record, and the two would otherwise work against each other for ever.)
 * ordered  The oldest epoch in the queue, merged within itself. The floor that recovery starts from is made durable before the next
 *          epoch begins, so that no epoch is ever written again after a newer one. Where one write to the image is there whole or not at all (limits.atomic_write),
 *          epochs that fit into one write go together: the image then skips the states between them.
 *
 * A round starts when the oldest dirty data has rested for destage_delay, when the volume or the ring is fuller than the low watermark,
 * when somebody waits for space, or for a drain.
 */
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "util/size.h"
#include "wlog/internal.h"

#define TRIM_NS 2000000000ull	/* memory of runs that was not needed for so long goes back */
#define END_RETRY_NS 10000000ull	/* longer than a tick of the kernel's clock */
#define END_WAIT_NS 300000000ull	/* for the end of a second: the process closes its volumes within 650 ms, or calls them hung */
#define ORDERED_RECORDS 2048u	/* of one round */
#define JOINED_RECORDS 1024u	/* of epochs that go in one write */

void wl_destage_kick(struct wlog_volume *v)
{
	co_queue_wake_all(&v->destage_wake);
}

/* Says in the superblock that the image's stamp is going to move, before it does. */
static co_fn int co_begin(struct wlog_volume *v)
{
	if (v->destaging)
		return 0;
	v->destaging = true;
	return v->has_stamp ? co_wl_checkpoint(v->w) : 0;
}

/*
 * The image rests: its stamp counts again. If it cannot be had yet, or would be the same for who writes now, v->destaging stays, and co_rest() comes back for it.
 * With `settle`, one that is there is taken as it is.
 */
static co_fn int co_end(struct wlog_volume *v, bool settle)
{
	struct wl_volrec *rec = &v->w->sb.vol[v->slot];
	uint64_t stamp = 0, wall = 0;
	int r = 0;

	if (!v->destaging)
		return 0;
	if (v->has_stamp)
		r = co_disk_stamp(v->disk.file, &stamp, &wall);
	if (r < 0 && !(settle && r == -EAGAIN && stamp))
		return r;
	if (v->has_stamp) {
		rec->stamp = stamp;
		rec->stamp_wall = wall;
	}
	v->destaging = false;
	v->w->sb_dirty = true;
	return 0;
}

/* Much of a ring that is half full is free as soon as a superblock says so: else it would look fuller than it is, and writers be slowed for it. */
static bool is_superblock_due(const struct wlog *w)
{
	const struct wl_batch *tail = list_first(&w->batches, struct wl_batch, node);
	uint32_t n = w->sb.seg_count, seg = tail ? wl_segment_of(w, tail->pos) : w->head_seg;

	return (seg + n - w->durable_tail_seg) % n > n / 8 && wl_free_segments(w) < n / 2;
}

/* `since`: nothing that is left is older than that. */
static void retired(struct wlog_volume *v, uint64_t bytes, uint64_t since)
{
	struct wlog *w = v->w;

	v->destaged_bytes += bytes;
	v->dirty_since = wl_is_dirty(v) ? max(v->dirty_since, since) : 0;
	w->clean_spent = 0;
	wl_advance_tail(w);
	wl_wake_space(w);
	if (w->space_wanted || is_superblock_due(w))
		wl_kick_ticker(w);
}

/* The log cannot be read at some place: told once, until all of it could be read again. */
static void report_unreadable(struct wlog_volume *v)
{
	v->failures++;
	if (!v->stalled)
		log_error("volume %s: the write log cannot be read where it holds bytes %llu+%llu; they stay in the log, and are tried again every second. If "
			  "its device does not recover, write them anew, or have the rest with `weir log drain --ignore-damage`",
			  v->w->sb.vol[v->slot].name, (unsigned long long)v->bad_off, (unsigned long long)v->bad_len);
	v->stalled = true;
}

static void report_stall(struct wlog_volume *v, int error)
{
	char size[16];

	v->failures++;
	if (error == -EBADMSG) {
		log_error("volume %s: a record of the write log is damaged; its destaging stops, and what is dirty (%s) stays "
			  "in the log: see `weir log check`; all but what is damaged can be had with `weir log drain --ignore-damage`",
			  v->w->sb.vol[v->slot].name, wl_dirty_text(wl_dirty_bytes(v), size));
		v->damaged = true;
	} else if (v->log_unreadable) {
		report_unreadable(v);
		return;
	} else if (!v->stalled) {
		log_error("%s: cannot destage volume %s (%s); %s stay in the write log, and it is tried again every second",
			  v->disk.file->name, v->w->sb.vol[v->slot].name, strerror(-error),
			  wl_dirty_text(wl_dirty_bytes(v), size));
	}
	v->stalled = true;
	wl_kick_ticker(v->w);
}

/* Takes [off, end) from the map but for what could not be read. Returns the bytes of data. */
static uint64_t remove_written(struct wlog_volume *v, uint64_t off, uint64_t end, uint64_t cap_rno)
{
	uint64_t bytes = 0;

	while (off < end) {
		uint64_t stop = end, next = end;

		for (unsigned i = 0; i < v->nkept; i++) {
			if (v->kept[i].off >= off && v->kept[i].off < stop) {
				stop = v->kept[i].off;
				next = stop + v->kept[i].len;
			}
		}
		if (stop > off)
			bytes += wl_map_remove(&v->map, &v->w->pool, off, stop - off, UINT64_MAX, cap_rno);
		off = next;
	}
	return bytes;
}

static co_fn int co_round_merged(struct wlog_volume *v)
{
	uint64_t cap_rno = v->applied_rno, start, end;
	struct wl_entry *first = wl_map_find(&v->map, v->cursor);

	if (!first)
		first = wl_map_find(&v->map, v->cursor = 0);
	if (v->cursor == 0)
		v->lap_since = rt_wall_ns();
	start = max(v->cursor, first->off);
	v->nkept = 0;
	bool all;
	int r = co_wl_write_runs(v, &v->map, cap_rno, start, &end, &all);

	if (r == 0)
		r = co_disk_flush(v->disk.file);
	if (r < 0)
		return r;
	uint64_t entries = v->map.entries, bytes = remove_written(v, start, end, cap_rno);

	/* What was there when the elevator began at the bottom is gone when it has reached the top of what is not newer than the round. */
	v->cursor = !all && wl_map_find(&v->map, end) ? end : 0;
	retired(v, bytes, v->cursor == 0 && !v->nkept ? v->lap_since : 0);
	if (v->nkept)
		report_unreadable(v);
	/* Nothing but what cannot be read: no hurry. */
	return v->nkept && v->map.entries >= entries ? -EREMOTEIO : 0;
}

/* Puts up to ORDERED_RECORDS records of `epoch` behind number `after` into v->round. *ret_last is the last one's number, 0: there are none. */
static int take_records(struct wlog_volume *v, uint64_t epoch, uint64_t after, uint64_t *ret_last)
{
	unsigned n = 0;

	*ret_last = 0;
	list_for_each(&v->fifo, l) {
		struct wl_entry *e = container_of(l, struct wl_entry, fifo);

		if (e->epoch > epoch)
			break;
		if (e->rno <= after && after)
			continue;
		/* Pieces of one record stay together. */
		if (n++ >= ORDERED_RECORDS && e->rno != *ret_last)
			break;
		int r = wl_map_insert(&v->round, &v->w->pool, e, false);
		if (r < 0)
			return r;
		*ret_last = e->rno;
	}
	return 0;
}

/* Writes one epoch, part by part in the order of its records. *ret_last is its last record. */
static co_fn int co_write_epoch(struct wlog_volume *v, uint64_t epoch, uint64_t *ret_last)
{
	uint64_t last, end;
	bool all;
	int r;

	*ret_last = 0;
	for (;;) {
		r = take_records(v, epoch, *ret_last, &last);
		end = 0;
		while (r == 0 && wl_map_find(&v->round, end))
			r = co_wl_write_runs(v, &v->round, UINT64_MAX, end, &end, &all);
		wl_map_clear(&v->round, &v->w->pool);
		if (r < 0 || last == 0)
			break;
		*ret_last = last;
	}
	return r;
}

/*
 * The last epoch that can go in one write with the oldest one, all before it too: all of them are writes, each of which touches what is there already, in one piece of limits.atomic_write.
 *
 * Who does it again, after an error or a crash, must not stop at an earlier one, or it would put old data over what a later one may have left in the image. So this looks at nothing but the
 * records, in order, and the image's limits: with more of them it comes as far, or further. Epochs from `open` on may still get records.
 */
static uint64_t last_epoch_of_one_write(const struct wlog_volume *v, uint64_t open)
{
	const struct disk_limits *l = &v->disk.file->limits;
	uint32_t whole = min(l->atomic_write, l->object), unit = min(whole, WL_RUN_MAX), n = 0;
	uint64_t from = UINT64_MAX, to = 0, last = list_first(&v->fifo, struct wl_entry, fifo)->epoch;

	if (!unit || v->ignore_damage)
		return last;
	list_for_each(&v->fifo, node) {
		const struct wl_entry *e = container_of(node, struct wl_entry, fifo);

		if (e->type != WL_WRITE || e->epoch >= open || ++n > JOINED_RECORDS || (to && (e->off > to || e->off + e->len < from)))
			break;
		from = min(from, e->off);
		to = max(to, e->off + e->len);
		if (from / unit != (to - 1) / unit)
			break;
		const struct wl_entry *next = node->next != &v->fifo ? container_of(node->next, struct wl_entry, fifo) : NULL;

		if ((!next || next->epoch != e->epoch) && !((from | to) & (l->align - 1)))
			last = e->epoch;
	}
	return last;
}

/* Of a volume that was ordered and is no longer as many as a round takes. */
static uint64_t last_epoch_of_round(const struct wlog_volume *v, uint64_t open)
{
	const struct wl_entry *first = list_first(&v->fifo, struct wl_entry, fifo);
	uint64_t epoch = first->epoch, bytes = 0;

	if (v->config.destage == WLOG_DESTAGE_ORDERED)
		return last_epoch_of_one_write(v, open);
	list_for_each(&v->fifo, l) {
		const struct wl_entry *e = container_of(l, struct wl_entry, fifo);

		if (bytes >= v->w->config.destage_round && e->epoch != epoch)
			break;
		bytes += e->type == WL_WRITE ? e->len : 0;
		epoch = e->epoch;
	}
	return epoch;
}

/*
 * Nothing of an epoch leaves the map before all of it is in the image, and the floor moves in the same superblock as the tail: a record
 * that was brought forward must not come back after a newer one of its epoch has gone.
 */
static co_fn int co_round_ordered(struct wlog_volume *v)
{
	struct wlog *w = v->w;
	struct wl_volrec *rec = &w->sb.vol[v->slot];
	uint64_t first = list_first(&v->fifo, struct wl_entry, fifo)->epoch, last = 0, bytes = 0;

	/* Closed, and every record of it applied: none may come behind the floor. */
	if (rec->epoch == first)
		rec->epoch++;
	uint64_t open = rec->epoch;
	int r = co_wl_commit_upto(w, v->last_seq);

	if (r < 0)
		return r;
	uint64_t epoch = last_epoch_of_round(v, open);

	v->whole = epoch > first && v->config.destage == WLOG_DESTAGE_ORDERED;
	r = co_write_epoch(v, epoch, &last);
	v->whole = false;
	if (r == 0)
		r = co_disk_flush(v->disk.file);
	if (r < 0)
		return r;
	list_for_each_safe(&v->fifo, l) {
		struct wl_entry *e = container_of(l, struct wl_entry, fifo);

		if (e->epoch > epoch)
			break;
		v->joined += e->epoch != first;
		first = e->epoch;
		bytes += wl_map_remove(&v->map, &w->pool, e->off, e->len, UINT64_MAX, last);
		wl_fifo_drop(v, e);
	}
	rec->floor_epoch = epoch + 1;
	const struct wl_entry *next = list_first(&v->fifo, struct wl_entry, fifo);

	retired(v, bytes, next ? next->batch->wall : 0);
	r = co_wl_checkpoint(w);
	/* Nothing that was brought forward whole can come back from here on. */
	if (r == 0 && v->config.destage == WLOG_DESTAGE_MERGED && list_empty(&v->fifo)) {
		v->ordered_upto = 0;
		w->sb_dirty = true;
	}
	return r;
}

/* True if a round is due; else *ret_at is when the oldest data will have rested long enough (UINT64_MAX: nothing is dirty). */
static bool is_due(struct wlog_volume *v, uint64_t *ret_at)
{
	struct wlog *w = v->w;
	uint64_t now = rt_wall_ns(), due = v->dirty_since + w->config.destage_delay_ns;

	*ret_at = UINT64_MAX;
	if (!wl_is_dirty(v) || w->failed || v->damaged || (w->config.no_destage && !v->draining && !w->draining))
		return false;
	if (wl_is_urgent(v) || now >= due || now < v->dirty_since)	/* a clock that was put back */
		return true;
	*ret_at = rt_now_ns() + (due - now);
	return false;
}

/* Until `at`, or until there is something to do. */
static co_fn void co_rest(struct wlog_volume *v, uint64_t at)
{
	static const char why[] = "dirty data to destage";
	bool trim = at == UINT64_MAX && wl_runs_hold_memory(v);

	if (trim)
		at = rt_now_ns() + TRIM_NS;
	if (v->destaging)
		at = min(at, rt_now_ns() + WL_RETRY_NS);
	if (at == UINT64_MAX)
		co_queue_wait(&v->destage_wake, why);
	else if (!co_queue_wait_until(&v->destage_wake, at, why) && trim)
		wl_runs_trim(v);
}

co_fn void co_wl_destager(void *arg)
{
	struct wlog_volume *v = arg;
	uint64_t at;

	while (!v->stop) {
		if (!is_due(v, &at)) {
			if (co_end(v, false) == -EAGAIN && !v->stop) {
				co_sleep_ns(END_RETRY_NS);
				co_end(v, false);
			}
			co_queue_wake_all(&v->destage_done);
			if (v->stop)
				break;
			if (is_due(v, &at))
				continue;
			co_rest(v, at);
			continue;
		}
		v->log_unreadable = false;
		v->round_began_ns = rt_now_ns();
		int r = co_begin(v);

		if (r == 0)
			r = !list_empty(&v->fifo) ? co_round_ordered(v) : v->map.entries ? co_round_merged(v) : 0;
		if (r < 0 && r != -ECANCELED) {
			uint64_t again = rt_now_ns() + WL_RETRY_NS;

			if (r != -EREMOTEIO)
				report_stall(v, r);
			co_queue_wake_all(&v->destage_done);
			while (!v->stop && !v->w->failed && rt_now_ns() < again)
				co_queue_wait_until(&v->destage_wake, again, "a failed image, to try it again");
		} else if (r == 0 && v->stalled && !v->nkept) {
			v->log_unreadable = false;
			v->bad_len = 0;
			log_info("%s: volume %s destages again", v->disk.file->name, v->w->sb.vol[v->slot].name);
			v->stalled = false;
		}
		if (r == 0)
			co_wl_pace(v);
	}
	/* What is still in flight below (read-ahead of a cache) ends before the image can be closed. */
	uint64_t until = rt_now_ns() + END_WAIT_NS;

	while (co_end(v, rt_now_ns() >= until) == -EAGAIN)
		co_sleep_ns(END_RETRY_NS);
	v->running = false;
	co_queue_wake_all(&v->destage_done);
}
