/* SPDX-License-Identifier: MIT */
/*
 * Write log: when destage works, and how much of it at once.
 *
 * When there is no hurry the guest comes first. A disk of this machine is shared with it: one run at a time, with a pause as long as the run took (runs.c).
 *
 * A store far away (one that wants depth) is not what a writing guest waits for, who waits for the log. But what talks to it, and perhaps the store itself, is on the
 * processors that the guest's commits need. So destage works in bursts, and rests between them: each commit that falls into a rest takes as long as one in an empty log, and
 * as long as that are most, the median is undisturbed. A trickle that never ends would slow every one.
 *
 * The share of the time that bursts may take is SHARE_LEAST while the log has room and what is dirty is young. It rises to all between the middle of the two
 * watermarks and the high one, where writers begin to be slowed, as the cube of the way: little at first, since a guest that pauses leaves the store to itself and is
 * worth waiting for. A guest that does not pause fills the log up to where what leaves is what comes; if the store cannot take that much, up to the high watermark. It
 * also rises with the age of what is dirty, to SHARE_OLD, so that what is in a large log does not grow old because there is room.
 *
 * How many at once rises from the low watermark to the high one: from a quarter of the depth, a sixteenth while the guest reads from the image and waits for the
 * store, too; and from BYTES_LEAST, since what is large keeps a processor busy where what is small waits for the store.
 *
 * Invariants
 *  (1) for a drain, for who waits for space in the ring or in the volume's share, and from the high watermark on there is no rest and all of the depth;
 *  (2) a rest ends as soon as (1) holds, the guest does nothing for GUEST_ACTIVE_NS, or the volume stops;
 *  (3) a rest takes REST_MAX_NS at most: what a store hangs counts as work, and is when there is most to catch up.
 */
#include "util/bytes.h"
#include "wlog/internal.h"

#define GUEST_ACTIVE_NS 10000000ull
#define BURST_NS 20000000ull
#define REST_MAX_NS 1000000000ull
#define SHARE_LEAST 125u	/* permille */
#define SHARE_OLD 500u
#define OLD_DELAYS 10u		/* delays of destage after which it is that */
#define BYTES_LEAST (2u << 20)

/* Somebody waits for what only destage brings, however full the log is. */
static bool is_waited_for(const struct wlog_volume *v)
{
	return v->draining || v->w->draining || v->w->space_wanted || wl_room_is_wanted(v);
}

bool wl_is_urgent(const struct wlog_volume *v)
{
	return is_waited_for(v) || wl_fill_permille(v) > v->w->config.low_pct * 10;
}

bool wl_is_far(const struct wlog_volume *v)
{
	return v->disk.file->limits.opt_depth > WL_DEPTH_USUAL;
}

/* How far it is from the low to the high watermark, permille. */
static unsigned pressure(const struct wlog_volume *v)
{
	unsigned low = v->w->config.low_pct * 10, high = max(v->w->config.high_pct * 10, low + 1), fill = wl_fill_permille(v);

	if (is_waited_for(v) || fill >= high)
		return 1000;
	return fill <= low ? 0 : (fill - low) * 1000 / (high - low);
}

static bool is_active(const struct wlog_volume *v)
{
	return rt_now_ns() - v->last_io_ns < GUEST_ACTIVE_NS;
}

bool wl_guest_comes_first(const struct wlog_volume *v)
{
	return is_active(v) && (wl_is_far(v) ? pressure(v) < 1000 : !wl_is_urgent(v));
}

bool wl_may_start_run(const struct wlog_volume *v, uint64_t len)
{
	if (!wl_is_far(v) || !wl_guest_comes_first(v) || v->runs == 0)
		return v->runs < v->depth;
	bool reads = rt_now_ns() - v->last_miss_ns < GUEST_ACTIVE_NS;
	uint64_t p = pressure(v), least = max(v->depth / (reads ? 16 : 4), 1u);

	return v->runs < least + (v->depth - least) * p / 1000 && v->run_bytes + len <= BYTES_LEAST + (WL_RUN_MEM - BYTES_LEAST) * p / 1000;
}

bool wl_burst_is_over(const struct wlog_volume *v)
{
	return wl_is_far(v) && rt_now_ns() - v->round_began_ns >= BURST_NS && wl_guest_comes_first(v);
}

/* Permille of the time that a burst may take of it and the rest behind it. */
static uint64_t share(const struct wlog_volume *v)
{
	uint64_t p = pressure(v), q = p > 500 ? (p - 500) * 2 : 0, by_fill = SHARE_LEAST + (1000 - SHARE_LEAST) * (q * q * q / 1000000) / 1000;
	uint64_t now = rt_wall_ns(), old = OLD_DELAYS * v->w->config.destage_delay_ns, age = v->dirty_since && now > v->dirty_since ? min(now - v->dirty_since, old) : 0;
	uint64_t by_age = SHARE_LEAST + (SHARE_OLD - SHARE_LEAST) * (age / 1000) / max(old / 1000, (uint64_t)1);

	return max(by_fill, by_age);
}

static uint64_t rest_ns(const struct wlog_volume *v)
{
	return min(v->burst_ns * (1000 - share(v)) / share(v), REST_MAX_NS);
}

co_fn void co_wl_pace(struct wlog_volume *v)
{
	uint64_t now = rt_now_ns(), end = now;

	/* Epochs that go one by one are slow enough. */
	if (!wl_is_far(v) || v->config.destage == WLOG_DESTAGE_ORDERED)
		return;
	v->burst_ns = wl_is_dirty(v) ? v->burst_ns + (now - v->round_began_ns) : 0;
	if (v->burst_ns < BURST_NS)
		return;
	while (!v->stop && !v->w->failed && wl_guest_comes_first(v) && (now = rt_now_ns()) < end + rest_ns(v))
		co_queue_wait_until(&v->destage_wake, min(end + rest_ns(v), v->last_io_ns + GUEST_ACTIVE_NS), "the guest, which comes first");
	v->burst_ns = 0;
}
