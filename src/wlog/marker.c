/* SPDX-License-Identifier: MIT */
/*
 * Write log: the marks on images after the log has lost a side of its mirror.
 *
 * What is acknowledged from then on is not on the lost side. Whoever should serve from that one alone is refused because the image's mark names a newer generation of the
 * log than it has: so the commit that lost the side waits for the marks before it acknowledges anything. A second at most, since a log is there for images that hang;
 * then it is said which image does not know yet.
 *
 * Each attached volume with a mark has a coroutine for it: the destager may be in the middle of a long round, or wait for the very commit that waits for the mark.
 *
 * Invariants
 *  (1) mark_wanted counts the losses since the attach, mark_has is what it was before the last mark that was written; equal: the image knows all;
 *  (2) a mark that could not be written is tried again until the volume is closed, and the close takes a new generation if it is still wanted.
 */
#include <string.h>

#include "util/err.h"
#include "wlog/internal.h"

void wl_want_marks(struct wlog *w)
{
	w->mark_deadline_ns = rt_now_ns() + WL_MARK_WAIT_NS;
	list_for_each(&w->volumes, l) {
		struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		v->mark_wanted++;
		co_queue_wake_all(&v->mark_wake);
	}
}

bool wl_mark_is_wanted(const struct wlog_volume *v)
{
	return v->mark_wanted != v->mark_has;
}

co_fn void co_wl_marker(void *arg)
{
	struct wlog_volume *v = arg;
	struct wlog *w = v->w;
	bool told = false;

	while (!v->stop) {
		uint64_t wanted = v->mark_wanted;
		struct err err = ERR_INIT;

		if (!wl_mark_is_wanted(v) || w->failed) {
			co_queue_wait(&v->mark_wake, "a mirror to be lost");
			continue;
		}
		if (co_wl_remark(v, &err) == 0) {
			v->mark_has = wanted;
			told = false;
			co_queue_wake_all(&w->marked);
			continue;
		}
		if (!told)
			log_warn("volume %s: the mark on its image cannot be renewed (%s); it is tried again every second", w->sb.vol[v->slot].name,
				 err.msg);
		told = true;
		co_queue_wait_until(&v->mark_wake, rt_now_ns() + WL_RETRY_NS, "an image that cannot be marked, to try it again");
	}
	v->marking = false;
	co_queue_wake_all(&v->destage_done);
	co_queue_wake_all(&w->marked);
}

static const struct wlog_volume *find_unmarked(struct wlog *w)
{
	list_for_each(&w->volumes, l) {
		const struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		if (v->attached && v->marking && wl_mark_is_wanted(v))
			return v;
	}
	return NULL;
}

co_fn void co_wl_wait_for_marks(struct wlog *w)
{
	const struct wlog_volume *v;

	while ((v = find_unmarked(w)) && !w->failed && rt_now_ns() < w->mark_deadline_ns)
		co_queue_wait_until(&w->marked, w->mark_deadline_ns, "the images' marks, after a mirror was lost");
	w->mark_deadline_ns = 0;
	if (v && !w->failed)
		log_warn("%s: volume %s: its mark could not be renewed within a second; if this host is lost now, the mirror's other side does not know "
			 "that it is old: do not serve from that one before the mark says so", v->disk.file->name, w->sb.vol[v->slot].name);
}
