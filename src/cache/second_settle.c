/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache: what makes contents outlast the process. Invariants (2) to (5) of second.h.
 */
#include <errno.h>
#include <string.h>

#include "cache/internal.h"
#include "util/err.h"
#include "util/log.h"

#define SECOND_NS 1000000000ull
#define TICK_NS (10 * 1000000ull)	/* longer than a tick of the kernel's clock */
#define TICKS 10u
#define AT_END_NS (100 * 1000000ull)	/* for settling at the end */
#define AT_END_DIRTY 512u		/* headers */

static co_fn int co_ask(struct cache_volume *v, struct disk_identity *ret)
{
	/* What is cached of it: a format's file and what it makes of it are two things. */
	const struct disk_identity role = { { v->tables + 2u * v->shared, v->c->block, 0, 0 } };
	int r = co_disk_identity(v->disk.file, ret);

	disk_identity_mix(ret, &role);
	return r;
}

co_fn int co_second_identity(struct cache_volume *v, struct disk_identity *ret)
{
	int r = -EAGAIN;

	for (unsigned i = 0; i < TICKS && r == -EAGAIN; i++) {
		if (i)
			co_sleep_ns(TICK_NS);
		r = co_ask(v, ret);
	}
	return r;
}

static co_fn int co_write_slot(struct second *s)
{
	int r;

	s->sb.seq++;
	s->sb.wall_ns = rt_wall_ns();
	second_super_encode(&s->sb, s->super_buf);
	r = co_disk_write(s->dev, s->sb.seq % 2 * SECOND_SUPER_STRIDE, s->super_buf, SECOND_SUPER, DISK_FUA);
	if (r < 0)
		second_fail(s, r, "its superblock cannot be written");
	return r;
}

/* In both slots: if one is damaged later, the other one counts. */
static co_fn int co_super_write(struct second *s)
{
	int r = co_write_slot(s);

	return r ? r : co_write_slot(s);
}

/* Invariant (7). Whoever unsettles meanwhile is in the next round; none settles, for that takes the lock. */
co_fn int co_second_tell_unsettled(struct second *s)
{
	int r = 0;

	while (s->untold && !r) {
		s->untold = false;
		r = co_super_write(s);
	}
	return r;
}

/* --- Changes --- */

static void unsettle(struct cache_volume *v)
{
	struct second *s = v->c->second;

	v->second.settled = false;
	s->sb.rec[v->second.rec].settled = false;
	s->untold = true;
}

static co_fn int co_super_unsettled(struct second *s, int rec)
{
	int r;

	co_mutex_lock(&s->lock);
	s->sb.rec[rec].settled = false;
	r = co_super_write(s);
	co_mutex_unlock(&s->lock);
	return r;
}

/* Invariant (4). */
static co_fn int co_unsettle(struct cache_volume *v)
{
	struct second *s = v->c->second;
	int r = 0;

	co_mutex_lock(&v->second.lock);
	if (v->second.settled || !v->second.touched) {
		r = co_disk_touch(v->disk.file);
		s->count.touches++;
		/* One that failed leaves the identity as it was: the next change tries again. */
		v->second.touched |= !r || r == -ENOTSUP;
	}
	if (!v->second.settled)
		r = 0;	/* nothing counts on it */
	else if (r < 0)
		r = co_super_unsettled(s, v->second.rec);
	if (v->second.settled && !r)
		unsettle(v);
	co_mutex_unlock(&v->second.lock);
	return r;
}

co_fn int co_second_change_begin(struct cache_volume *v, uint64_t first, uint64_t last)
{
	int r = 0;

	v->second.changing++;
	v->second.changes++;
	if (v->second.settled || !v->second.touched)
		r = co_unsettle(v);
	if (!r && first <= last)
		co_second_drop_range(v, first, last);
	return r;
}

void second_change_end(struct cache_volume *v)
{
	v->second.changing--;
	v->second.changed_ns = rt_now_ns();
}

co_fn void co_second_note_identity(struct cache_volume *v)
{
	struct disk_identity id;
	int r;

	v->second.changing++;
	v->second.changes++;
	r = co_ask(v, &id);
	if (v->second.has_identity && (!r || r == -EAGAIN) && !disk_identity_equal(&id, &v->second.identity)) {
		v->second.identity = id;
		if (v->second.settled)
			unsettle(v);
	}
	second_change_end(v);
}

/* --- Settling --- */

static struct cache_volume *attached(struct second *s, uint64_t epoch, unsigned *ret_rec)
{
	for (unsigned i = 0; i < SECOND_RECORDS; i++) {
		if (s->sb.rec[i].epoch == epoch && s->vol[i]) {
			*ret_rec = i;
			return s->vol[i];
		}
	}
	return NULL;
}

/* What the index has not does not count any more. Entries of volumes that are not here stay as they are. */
static co_fn int co_rewrite_header(struct second *s, uint32_t i)
{
	static struct second_header h;	/* no suspension between reading and writing */
	uint64_t at = second_segment_at(s->sb.segment_size, i);
	int r = co_disk_read(s->dev, at, s->header_buf, SECOND_HEADER, DISK_BACKGROUND);

	if (r < 0)
		return r;
	s->n_dirty -= s->dirty[i];
	s->dirty[i] = 0;
	if (!second_header_decode(s->header_buf, &s->sb.uuid, i, s->entries, &h))
		return 0;
	for (uint32_t k = 0; k < h.count; k++) {
		unsigned rec;

		if (!h.entry[k].dead && attached(s, h.entry[k].epoch, &rec) &&
		    s->slot[i * s->entries + k].key != second_key(rec, h.entry[k].block))
			h.entry[k].dead = true;
	}
	second_header_encode(&h, &s->sb.uuid, s->header_buf);
	return co_disk_write(s->dev, at, s->header_buf, SECOND_HEADER, DISK_BACKGROUND);
}

/* False if it must not or need not be. */
static bool may_settle(const struct cache_volume *v)
{
	const struct second *s = v->c->second;

	return s->started && !s->off && !s->scanning && v->second.rec >= 0 && !v->second.settled && v->second.has_identity && !v->second.changing;
}

/* What was true of the image at one instant. */
struct state {
	uint64_t changes;
	struct disk_identity id;
};

/* Without s->lock: a format writes its tables for that, through another layer of the cache, whose changes may need the lock. */
static co_fn int co_look_at_image(struct cache_volume *v, struct state *st)
{
	int r;

	st->changes = v->second.changes;
	r = v->disk.read_only || v->disk.file->read_only ? 0 : co_disk_flush(v->disk.file);
	if (!r)
		r = co_second_identity(v, &st->id);
	if (r < 0)
		return r;
	if (!st->changes && !disk_identity_equal(&st->id, &v->second.identity)) {
		log_warn("%s: was changed by another program while it was open; the second level of the cache does not keep it", v->name);
		v->second.has_identity = false;
		return -ESTALE;
	}
	return 0;
}

/* With s->lock. */
static co_fn int co_settle_locked(struct cache_volume *v, const struct state *st)
{
	struct second *s = v->c->second;
	struct second_record *rec = &s->sb.rec[v->second.rec];
	int r = 0;

	if (!may_settle(v) || v->second.changes != st->changes)
		return -EBUSY;
	for (uint32_t i = 0; i < s->segments && s->n_dirty && !r; i++)
		if (s->dirty[i])
			r = co_rewrite_header(s, i);
	if (!r)
		r = co_disk_flush(s->dev);
	if (r < 0) {
		second_fail(s, r, "cannot be written");
		return r;
	}
	if (v->second.changes != st->changes || v->second.changing || s->off)
		return -EAGAIN;
	/* From here on the record may become durable: the next change sees it. */
	v->second.settled = true;
	v->second.identity = st->id;
	rec->settled = true;
	rec->identity = st->id;
	rec->size = v->disk.file->size;
	rec->wall_ns = rt_wall_ns();
	s->count.settles++;
	return co_super_write(s);
}

static co_fn void co_settle(struct cache_volume *v)
{
	struct second *s = v->c->second;
	struct state st;

	if (!may_settle(v) || co_look_at_image(v, &st) < 0)
		return;
	co_mutex_lock(&s->lock);
	co_settle_locked(v, &st);
	co_mutex_unlock(&s->lock);
}

co_fn void co_second_keeper(void *arg)
{
	struct second *s = arg;

	while (!s->stop && !s->off) {
		co_queue_wait_until(&s->wake, rt_now_ns() + SECOND_NS, "volumes at rest");
		cache_hold(s->c);
		for (unsigned i = 0; i < SECOND_RECORDS && !s->stop; i++) {
			struct cache_volume *v = s->vol[i];

			if (v && !v->closing && rt_now_ns() - v->second.changed_ns >= s->settle_ns)
				co_settle(v);
		}
		cache_release(s->c);
	}
	s->running--;
	co_queue_wake_all(&s->idle);
}

/* Nothing is in flight any more above. The end of the process does not wait long for the device. */
co_fn void co_second_detach(struct cache_volume *v)
{
	struct second *s = v->c->second;
	uint64_t deadline;
	bool may = may_settle(v) && s->n_dirty <= AT_END_DIRTY;
	struct state st;

	if (may)
		may = co_look_at_image(v, &st) == 0;
	deadline = rt_now_ns() + AT_END_NS;
	while (may && may_settle(v) && rt_now_ns() < deadline) {
		if (!co_mutex_trylock(&s->lock)) {
			co_sleep_ns(1000000);
			continue;
		}
		co_settle_locked(v, &st);
		co_mutex_unlock(&s->lock);
		break;
	}
	s->vol[v->second.rec] = NULL;
	v->second.rec = -1;
}
