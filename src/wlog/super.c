/* SPDX-License-Identifier: MIT */
/*
 * Write log: superblocks and the ticker that writes them.
 *
 * Invariants
 *  (1) two slots alternate, so that a torn write leaves the older one valid;
 *  (2) the tail that other code may rely on for reuse of segments is that of the last superblock that is durable (durable_tail_seg).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"
#include "wlog/internal.h"

static void snapshot(struct wlog *w, uint32_t *ret_tail_seg)
{
	struct wl_batch *tail = list_first(&w->batches, struct wl_batch, node);

	w->sb.seq++;
	w->sb.wall = rt_wall_ns();
	for (unsigned i = 0; i < w->dev.n; i++)
		w->sb.side_state[i] = w->dev.in_sync[i] ? WL_SIDE_IN_SYNC : WL_SIDE_OUT;
	if (w->relic.completing) {	/* the scan has yet to tell all else */
		*ret_tail_seg = wl_segment_of(w, w->sb.tail_pos);
		return;
	}
	w->sb.durable_seq = w->applied_seq;
	if (tail) {
		w->sb.tail_seq = tail->seq;
		w->sb.tail_pos = tail->pos;
		w->sb.tail_prev = tail->prev;
		*ret_tail_seg = wl_segment_of(w, tail->pos);
	} else {
		w->sb.tail_seq = w->next_seq;
		w->sb.tail_pos = w->head_pos;
		w->sb.tail_prev = w->last_nonce;
		*ret_tail_seg = w->head_seg;
	}
	list_for_each(&w->volumes, n) {
		struct wlog_volume *v = container_of(n, struct wlog_volume, node);

		wl_volume_snapshot(v, &w->sb.vol[v->slot]);
	}
}

static co_fn int co_write_single(struct wlog *w, uint64_t pos)
{
	w->sb.side = 0;
	wl_super_encode(&w->sb, w->sb_buf);
	return co_disk_write(w->dev.disk[0], pos, w->sb_buf, WL_SB_SLOT, DISK_FUA);
}

/* One pass over the sides in sync; *ret_dropped if one failed and another did not. */
static co_fn int co_write_sides(struct wlog *w, bool *ret_dropped)
{
	struct wl_dev *d = &w->dev;
	uint64_t pos = (w->sb.seq % WL_SB_SLOTS) * WL_SB_SLOT;
	int result[WLOG_MAX_DEVICES] = { 0 }, first_error = -EIO;
	unsigned sides = 0, good = 0;

	*ret_dropped = false;
	if (d->n == 1)
		return co_write_single(w, pos);
	/* All are encoded before anything suspends: the same state for each. */
	for (unsigned i = 0; i < d->n; i++) {
		if (!d->disk[i] || !d->in_sync[i])
			continue;
		w->sb.side = i;
		wl_super_encode(&w->sb, wl_side_buf(d->side[i]));
		sides |= 1u << i;
	}
	for (unsigned i = 0; i < d->n; i++) {
		if (sides >> i & 1)
			co_wl_side_start(d->side[i], pos, NULL, WL_SB_SLOT, DISK_FUA);
	}
	co_wl_sides_wait(w, sides, result);
	for (unsigned i = 0; i < d->n; i++) {
		if (result[i] < 0)
			first_error = result[i];
		else
			good += sides >> i & 1;
	}
	if (!good)
		return first_error;
	for (unsigned i = 0; i < d->n; i++) {
		if (result[i] < 0) {
			wl_drop_side(w, i, result[i]);
			*ret_dropped = true;
		}
	}
	return 0;
}

co_fn int co_wl_super_write(struct wlog *w)
{
	bool dropped = false;
	uint32_t tail_seg;

	if (w->failed)
		return w->failed;
	if (w->config.read_only)
		return -EROFS;
	do {
		snapshot(w, &tail_seg);
		w->sb_dirty = false;
		int r = wl_relic_super(w, false);

		if (r == 0)
			r = co_write_sides(w, &dropped);
		if (r == 0)
			r = wl_relic_super(w, true);
		if (r < 0) {
			wl_fail(w, r, "superblock");
			return w->failed;
		}
	} while (dropped);
	w->durable_tail_seg = tail_seg;
	w->sb_written_ns = rt_now_ns();
	wl_wake_space(w);
	return 0;
}

co_fn int co_wl_checkpoint(struct wlog *w)
{
	co_mutex_lock(&w->dev.lock);
	w->dev.write_since = rt_now_ns();
	int r = co_wl_super_write(w);
	w->dev.write_since = 0;
	co_mutex_unlock(&w->dev.lock);
	return r;
}

co_fn int co_wl_super_read(struct disk *d, struct wl_super *ret, bool *ret_half, struct err *err)
{
	uint8_t *slot = rt_bufs() ? co_buf_get(rt_bufs(), WL_SB_SLOT) : aligned_alloc(WL_BLOCK, WL_SB_SLOT);
	struct wl_super *sb = malloc(sizeof(*sb));
	struct err slot_err[WL_SB_SLOTS] = { ERR_INIT, ERR_INIT };
	int result[WL_SB_SLOTS], found = -ENOMEM;

	if (!slot || !sb)
		goto out;
	found = -1;
	for (unsigned i = 0; i < WL_SB_SLOTS; i++) {
		result[i] = co_disk_read(d, i * WL_SB_SLOT, slot, WL_SB_SLOT, 0);
		if (result[i] < 0)
			err_errno(&slot_err[i], result[i], "reading the superblock");
		else
			result[i] = wl_super_decode(slot, sb, &slot_err[i]);
		if (result[i] == 0 && (found < 0 || sb->seq > ret->seq)) {
			*ret = *sb;
			found = 0;
		}
	}
	if (ret_half)
		*ret_half = (result[0] && result[0] != -EINVAL) || (result[1] && result[1] != -EINVAL);
	if (found == 0)
		goto out;
	/* Of two bad slots the more telling one is reported: damage rather than "not a log". */
	unsigned tell = result[0] == -EINVAL ? 1 : 0;
	found = err_set(err, result[tell], "%s: %s", d->name, slot_err[tell].msg);
out:
	if (rt_bufs())
		rt_buf_put(rt_bufs(), slot);
	else
		free(slot);
	free(sb);
	return found;
}

void wl_kick_ticker(struct wlog *w)
{
	w->ticker_kicked = true;
	co_queue_wake_all(&w->ticker_wake);
}

static bool any_destaging(struct wlog *w)
{
	list_for_each(&w->volumes, n) {
		if (container_of(n, struct wlog_volume, node)->destaging)
			return true;
	}
	return false;
}

static bool wants_checkpoint(struct wlog *w)
{
	struct wl_batch *tail = list_first(&w->batches, struct wl_batch, node);
	uint32_t tail_seg = tail ? wl_segment_of(w, tail->pos) : w->head_seg;
	uint64_t age = rt_now_ns() - w->sb_written_ns;

	if (w->failed)
		return false;
	/* The tail has left segments that are wanted, or soon will be. */
	if (tail_seg != w->durable_tail_seg && (w->space_wanted || wl_free_segments(w) < w->sb.seg_count / 2))
		return true;
	if (any_destaging(w) && age >= WL_HEARTBEAT_NS)
		return true;
	return w->sb_dirty && age >= WL_COMMIT_IDLE_NS;
}

co_fn void co_wl_ticker(void *arg)
{
	struct wlog *w = arg;

	while (!w->stop) {
		w->ticker_kicked = false;
		if (co_queue_is_empty(&w->space)) {
			w->space_wanted = false;
			w->space_need = 0;
		}
		if (!w->failed && !w->config.read_only) {
			if (w->open && w->open_count && rt_now_ns() - w->open_since_ns >= WL_COMMIT_IDLE_NS)
				co_queue_wake_one(&w->commit_wake);
			if (wants_checkpoint(w))
				co_wl_checkpoint(w);
			co_wl_clean(w);
			wl_mem_trim(w);
		}
		/* A kick while it was busy may be about something that it did not see. */
		if (!w->stop && !w->ticker_kicked)
			co_queue_wait_until(&w->ticker_wake, rt_now_ns() + WL_COMMIT_IDLE_NS, "log upkeep");
	}
	w->ticker_running = false;
	co_queue_wake_all(&w->commit_done);
}
