/* SPDX-License-Identifier: MIT */
/*
 * Write log: which image belongs to which volume.
 *
 * The log's volume table and a mark on the image name each other: the mark holds the log's and the volume's UUID and the generation, which
 * each attach advances, first in the log and then on the image. So
 *
 *   an image marked by another log                its dirty data is elsewhere: refused
 *   a log whose generation is below the mark's    it is an old copy: refused
 *   dirty data, but no mark or another volume's   the image was replaced: refused
 *   dirty data, and an image whose stamp is later than what this log last saw: somebody else wrote to it: refused
 *
 * The generation is advanced, too, when a side of the log's mirror is dropped, so that the image tells the side that was left behind.
 *
 * Each refusal says what would be lost and names the option that overrides it. The stamp (a file's modification time) is on record whenever the
 * image rests, and only once a later write would be given another: not within the tick of the clock, or the second where a file system counts those. While weir
 * destages, it is known to within the heartbeat, and STAMP_SLACK_NS are allowed.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/size.h"
#include "wlog/internal.h"

#define STAMP_SLACK_NS 60000000000ull
#define NS_PER_S 1000000000ull

struct mark {
	struct uuid log, volume;
	uint64_t generation;
	char host[65];
	uint64_t at, since;	/* wall clock, seconds: when the mark was written; of the oldest dirty data */
	int64_t dirty;		/* bytes when the log was closed; -1: it is open, or was not closed */
	bool present;
};

static void mark_format(const struct mark *m, char buf[static DISK_MARK_MAX])
{
	char log[37], volume[37];

	snprintf(buf, DISK_MARK_MAX, "weir-log-1 log=%s volume=%s generation=%llu host=%s at=%llu dirty=%lld since=%llu", uuid_format(&m->log, log),
		 uuid_format(&m->volume, volume), (unsigned long long)m->generation, m->host, (unsigned long long)m->at, (long long)m->dirty,
		 (unsigned long long)m->since);
}

/* Untrusted text: -EBADMSG if it is not a mark of ours. */
static int mark_parse(const char *s, struct mark *m)
{
	char log[37], volume[37];
	unsigned long long generation, at = 0, since = 0;
	long long dirty = -1;

	memset(m, 0, sizeof(*m));
	if (!*s)
		return 0;
	/* The first marks ended with the host. */
	if (sscanf(s, "weir-log-1 log=%36[0-9a-f-] volume=%36[0-9a-f-] generation=%llu host=%64s at=%llu dirty=%lld since=%llu", log, volume,
		   &generation, m->host, &at, &dirty, &since) < 4 || uuid_parse(log, &m->log) < 0 || uuid_parse(volume, &m->volume) < 0)
		return -EBADMSG;
	m->generation = generation;
	m->at = at;
	m->dirty = dirty;
	m->since = since;
	m->present = true;
	return 0;
}

/* -ENOTSUP is no error: *ret_has_place says so. */
static co_fn int co_mark_read(struct disk *image, struct mark *m, bool *ret_has_place, struct err *err)
{
	char text[DISK_MARK_MAX];
	int r = co_disk_mark_get(image, text, sizeof(text));

	*ret_has_place = r != -ENOTSUP && r != -EOPNOTSUPP;
	memset(m, 0, sizeof(*m));
	if (!*ret_has_place)
		return 0;
	if (r < 0)
		return err_errno(err, r, "%s: cannot read the mark that a write log leaves on an image", image->name);
	if (mark_parse(text, m) < 0)
		return err_set(err, -EBUSY, "%s: is marked by a write log of another version (\"%.60s\"); open it with the weir that "
			       "wrote it, or give up its log with --discard-log", image->name, text);
	return 0;
}

/* "on host h, which was closed 2 h ago with 12 MiB not in the image (the oldest 3 h old)" */
static const char *describe_mark(const struct mark *m, char buf[static 192])
{
	uint64_t now = rt_wall_ns() / NS_PER_S;
	char size[16], at[16], since[16];

	duration_format(now > m->at ? (now - m->at) * NS_PER_S : 0, at);
	duration_format(now > m->since ? (now - m->since) * NS_PER_S : 0, since);
	if (!m->at)
		snprintf(buf, 192, "on host %s", m->host);
	else if (m->dirty < 0)
		snprintf(buf, 192, "on host %s, which has it open, or did not close it: since %s, how much is dirty only that log tells", m->host, at);
	else
		snprintf(buf, 192, "on host %s, which was closed %s ago with %s not in the image (the oldest %s old)", m->host, at,
			 wl_dirty_text(m->dirty, size), since);
	return buf;
}

co_fn int co_wlog_check_unlogged(struct disk *image, bool discard, struct err *err)
{
	char uuid[37], where[192];
	struct mark m;
	bool has_place;
	int r = co_mark_read(image, &m, &has_place, discard ? NULL : err);

	if (discard) {
		if (r == 0 && !m.present)
			return 0;
		return has_place && !image->read_only ? co_disk_mark_set(image, "", err) : 0;
	}
	if (r < 0 || !m.present)
		return r;
	return err_set(err, -EBUSY, "%s: its newest data may be in write log %s %s; serve it with that log (--log), drain "
		       "that with `weir log drain`, or give it up with --discard-log", image->name, uuid_format(&m.log, uuid), describe_mark(&m, where));
}

uint32_t wl_volume_flags(const struct wlog_volume *v)
{
	return (v->destaging ? WL_VOL_FLAG_DESTAGING : 0) | (v->ordered_upto ? WL_VOL_FLAG_ORDERED : 0);
}

void wl_volume_snapshot(struct wlog_volume *v, struct wl_volrec *rec)
{
	/* Never back: what is below it may be another volume's, or discarded, and on its way into the log as a copy. */
	if (!wl_is_dirty(v))
		rec->floor_seq = max(rec->floor_seq, v->w->applied_seq + 1);
	rec->dirty = wl_dirty_bytes(v);
	rec->dirty_since = v->dirty_since;
	/* Of a volume that is not attached the flags say what its last process knew. */
	if (v->attached)
		rec->flags = WL_VOL_FLAG_ATTACHED | wl_volume_flags(v);
	if (v->destaging)
		rec->stamp_wall = rt_wall_ns();
}

/* "12 MiB not in the image (the oldest 3 min old)" */
static const char *describe_dirty(const struct wlog_volume *v, char buf[static 96])
{
	char size[16], age[16];
	uint64_t now = rt_wall_ns();

	snprintf(buf, 96, "%s not in the image (the oldest %s old)", wl_dirty_text(wl_dirty_bytes(v), size),
		 duration_format(v->dirty_since && now > v->dirty_since ? now - v->dirty_since : 0, age));
	return buf;
}

static struct wlog_volume *find_named(struct wlog *w, const char *name)
{
	list_for_each(&w->volumes, l) {
		struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		if (!strcmp(w->sb.vol[v->slot].name, name))
			return v;
	}
	return NULL;
}

/* The volume that this image is: by its mark, else by its name. NULL: a new one. */
static struct wlog_volume *find_volume(struct wlog *w, const char *name, const struct mark *m)
{
	if (m->present && uuid_equal(&m->log, &w->sb.uuid)) {
		list_for_each(&w->volumes, l) {
			struct wlog_volume *v = container_of(l, struct wlog_volume, node);

			if (uuid_equal(&w->sb.vol[v->slot].uuid, &m->volume))
				return v;
		}
	}
	return find_named(w, name);
}

/* From here on, no record that is in the log or on its way is the volume's. */
static void raise_floor(struct wlog_volume *v)
{
	wl_seal(v->w);	/* its next record must not be put into a batch below */
	v->w->sb.vol[v->slot].floor_seq = v->w->next_seq;
}

static void release_volume(struct wlog_volume *v)
{
	struct wlog *w = v->w;

	wl_map_clear(&v->map, &w->pool);
	wl_map_clear(&v->fresh, &w->pool);
	wl_fifo_clear(v);
	v->dirty_since = 0;
}

/* Forgets what the volume has in the log: its records stay on the device below the floor. */
static void discard_dirty(struct wlog_volume *v)
{
	release_volume(v);
	raise_floor(v);
	v->damaged = false;
	wl_advance_tail(v->w);
}

static void free_slot(struct wlog_volume *v)
{
	struct wlog *w = v->w;

	release_volume(v);
	memset(&w->sb.vol[v->slot], 0, sizeof(w->sb.vol[v->slot]));
	w->by_slot[v->slot] = NULL;
	list_del(&v->node);
	free(v);
	wl_advance_tail(w);
}

static struct wlog_volume *new_volume(struct wlog *w, const char *name, struct disk *image, struct err *err)
{
	unsigned slot = 0;

	while (slot < WLOG_MAX_VOLUMES && w->by_slot[slot])
		slot++;
	if (slot == WLOG_MAX_VOLUMES) {
		/* A clean volume that nobody has attached gives its place up. */
		for (slot = 0; slot < WLOG_MAX_VOLUMES; slot++) {
			if (!w->by_slot[slot]->attached && !wl_is_dirty(w->by_slot[slot])) {
				free_slot(w->by_slot[slot]);
				break;
			}
		}
	}
	if (slot == WLOG_MAX_VOLUMES) {
		err_set(err, -ENOSPC, "volume %s: the write log holds %u volumes already; drain one, or use another log", name,
			WLOG_MAX_VOLUMES);
		return NULL;
	}
	struct wlog_volume *v = wl_volume_new(w, slot);
	struct wl_volrec *rec = &w->sb.vol[slot];

	if (!v) {
		err_set(err, -ENOMEM, "volume %s: out of memory", name);
		return NULL;
	}
	memset(rec, 0, sizeof(*rec));
	uuid_random(&rec->uuid);
	rec->size = image->size;
	rec->epoch = rec->rno = 1;
	raise_floor(v);
	w->sb.nvols = max(w->sb.nvols, slot + 1);
	return v;
}

static int changed(const struct disk *image, const char *what, struct err *err)
{
	return err_set(err, -ESTALE, "%s: was changed by something else after the write log last wrote to it, and the log holds %s for it: "
		       "replaying would mix the two; give up the log's data with --discard-log, or apply it all the same with "
		       "--force-replay", image->name, what);
}

/* All that can speak against replaying `v` over `image`. */
static co_fn int co_check_dirty(struct wlog_volume *v, struct disk *image, const struct mark *m, bool has_place,
				struct err *err)
{
	struct wlog *w = v->w;
	struct wl_volrec *rec = &w->sb.vol[v->slot];
	uint64_t stamp, now;
	char what[96];

	describe_dirty(v, what);
	if (image->size != rec->size)
		return err_set(err, -EINVAL, "%s: has %llu bytes, but the log holds %s for volume %s of %llu bytes; restore the image's "
			       "size, or give the data up with --discard-log", image->name, (unsigned long long)image->size, what,
			       rec->name, (unsigned long long)rec->size);
	if (has_place && !m->present)
		return err_set(err, -ESTALE, "%s: carries no mark of this write log, which holds %s for volume %s (%s): it is another image, or a "
			       "copy; give up the data with --discard-log, or apply it with --force-replay", image->name, what, rec->name,
			       rec->image);
	if (has_place && !uuid_equal(&m->volume, &rec->uuid))
		return err_set(err, -ESTALE, "%s: is marked as another volume than %s, for which the log holds %s; use another --name, "
			       "or give up the data with --discard-log", image->name, rec->name, what);
	if (co_disk_writers(image, &stamp) == 0) {
		if (rec->stamp && stamp > rec->stamp)
			return changed(image, what, err);
		return 0;
	}
	/* Also one that would be the same for a write at this instant: it may be that of a write a moment ago. */
	stamp = 0;
	int r = co_disk_stamp(image, &stamp, &now);

	if ((r < 0 && r != -EAGAIN) || rec->stamp == 0)
		return 0;
	uint64_t latest = rec->flags & WL_VOL_FLAG_DESTAGING ? rec->stamp_wall + STAMP_SLACK_NS : rec->stamp;

	if (stamp > latest)
		return changed(image, what, err);
	return 0;
}

/* A volume that was found by its mark may come under another name, but not under one that another volume needs. */
static int take_name(struct wlog *w, const struct wlog_volume *v, const char *name, struct err *err)
{
	for (unsigned slot = 0; slot < WLOG_MAX_VOLUMES; slot++) {
		struct wlog_volume *o = w->by_slot[slot];

		if (!o || o == v || strcmp(w->sb.vol[slot].name, name))
			continue;
		if (o->attached || wl_is_dirty(o))
			return err_set(err, -EEXIST, "volume %s: the write log has data of another image, %s, under this name; use another --name", name,
				       w->sb.vol[slot].image);
		free_slot(o);
	}
	return 0;
}

static co_fn int co_identify(struct wlog *w, const char *name, struct disk *image, const struct wlog_volume_config *config,
			     struct wlog_volume **ret, bool *ret_has_place, struct err *err)
{
	struct err mark_err = ERR_INIT;
	char uuid[37], where[192];
	struct mark m;
	int r = co_mark_read(image, &m, ret_has_place, &mark_err);

	if (r < 0 && !config->discard_log)
		return err_set(err, r, "%s", mark_err.msg);
	if (config->no_mark)
		*ret_has_place = false;
	if (m.present && !uuid_equal(&m.log, &w->sb.uuid) && !config->discard_log)
		return err_set(err, -EBUSY, "%s: its newest data may be in another write log (%s, %s); drain that first with "
			       "`weir log drain`, or give it up with --discard-log", image->name, uuid_format(&m.log, uuid), describe_mark(&m, where));

	struct wlog_volume *v = find_volume(w, name, &m);

	if (v && v->attached)
		return err_set(err, -EBUSY, "volume %s: is in use in this process already; give the disks different names with --name",
			       w->sb.vol[v->slot].name);
	r = take_name(w, v, name, err);
	if (r < 0)
		return r;
	if (v && config->discard_log)
		discard_dirty(v);
	if (v && m.present && uuid_equal(&m.log, &w->sb.uuid) && uuid_equal(&m.volume, &w->sb.vol[v->slot].uuid) &&
	    m.generation > w->sb.vol[v->slot].generation && !config->discard_log && !config->force_replay)
		return err_set(err, -ESTALE, "%s: was written through a newer state of this write log (generation %llu, this one is at %llu): "
			       "the log device is an old copy or a mirror side that was left behind; use the newer one, or give it up with "
			       "--discard-log", image->name, (unsigned long long)m.generation,
			       (unsigned long long)w->sb.vol[v->slot].generation);
	if (v && wl_is_dirty(v) && !config->force_replay) {
		r = co_check_dirty(v, image, &m, *ret_has_place, err);
		if (r < 0)
			return r;
	}
	/* What --force-replay cannot mean: bytes beyond the image. */
	if (v && wl_is_dirty(v) && w->sb.vol[v->slot].size > image->size)
		return err_set(err, -EINVAL, "%s: is smaller than the %llu bytes that the write log's volume %s has", image->name,
			       (unsigned long long)w->sb.vol[v->slot].size, w->sb.vol[v->slot].name);
	if (!v)
		v = new_volume(w, name, image, err);
	if (!v)
		return err ? err->code : -ENOSPC;
	*ret = v;
	return 0;
}

static int by_number(const void *a, const void *b)
{
	const struct wl_entry *x = *(struct wl_entry *const *)a, *y = *(struct wl_entry *const *)b;

	if (x->rno != y->rno)
		return x->rno < y->rno ? -1 : 1;
	return x->off < y->off ? -1 : x->off > y->off;
}

/* Queues what a merged volume has in its map, in the order of its records. */
static int queue_pieces(struct wlog_volume *v)
{
	struct wl_pool *pool = &v->w->pool;
	struct wl_entry **e = malloc(max(v->map.entries, (uint64_t)1) * sizeof(*e));
	uint64_t n = 0;

	if (!e || wl_pool_grow(pool, v->map.entries + WL_POOL_RESERVE) < 0) {
		free(e);
		return -ENOMEM;
	}
	for (struct wl_entry *p = wl_map_find(&v->map, 0); p; p = wl_map_next(p)) {
		if (p->epoch > v->ordered_upto)
			e[n++] = p;
	}
	qsort(e, n, sizeof(*e), by_number);
	for (uint64_t i = 0; i < n; i++) {
		struct wl_entry *q = wl_entry_clone(pool, e[i]);

		list_add_tail(&v->fifo, &q->fifo);
		v->fifo_bytes += q->type == WL_WRITE ? q->len : 0;
		v->fifo_entries++;
	}
	free(e);
	return 0;
}

/*
 * What recovery found was queued in order if the volume had been destaged in order. A volume that is merged from now on works that off first: a
 * record that was brought forward whole would otherwise come back, after a crash, over a newer one that has left the map.
 */
static int set_order(struct wlog_volume *v)
{
	int r = 0;

	if (v->config.destage == WLOG_DESTAGE_ORDERED) {
		r = queue_pieces(v);
		if (r == 0)
			v->ordered_upto = UINT64_MAX;
	} else if (list_empty(&v->fifo)) {
		v->ordered_upto = 0;
	} else {
		v->ordered_upto = min(v->ordered_upto, v->w->sb.vol[v->slot].epoch - 1);
	}
	return r;
}

static int init_layer(struct wlog_volume *v, struct disk *image)
{
	struct wlog *w = v->w;
	uint64_t usable = (uint64_t)(w->sb.seg_count - WL_SEG_RESERVE - 1) * w->sb.seg_size;
	/*
	 * A request is whole in memory until it is durable, with what the ends of batches and of the ring cost; and it must fit what is kept in the
	 * ring for a volume whatever the others hold (space.c). Small logs are of use for few volumes only.
	 */
	uint64_t in_memory = w->mem_end / 8 * 7 - 2 * WL_MAX_BATCH;
	uint64_t in_ring = usable / 16 >= 1 << 20 ? min(usable / 16, (uint64_t)64 << 20) : min(usable / 4, (uint64_t)1 << 20);
	int r = disk_init(&v->disk, &wl_volume_ops, image->name, image);

	if (r < 0)
		return r;
	r = wl_runs_init(v);
	if (r < 0) {
		disk_fini(&v->disk);
		return r;
	}
	v->disk.size = image->size;
	v->disk.read_only = image->read_only || w->config.read_only;
	v->disk.limits.align = 1;
	v->disk.limits.mem_align = 1;
	v->disk.limits.atomic_unit = UINT32_MAX;
	v->disk.limits.max_io = align_down(min(in_ring, in_memory), WL_BLOCK);
	v->disk.limits.max_zero = 0;
	v->disk.limits.discard_gran = image->limits.discard_gran ? 1 : 0;
	v->disk.limits.discard_zeroes = true;
	v->disk.limits.fast_zero = true;
	v->disk.limits.fua = true;
	v->disk.limits.volatile_cache = true;
	return 0;
}

static co_fn int co_mark_write(struct wlog_volume *v, struct disk *image, int64_t dirty, struct err *err)
{
	const struct wl_volrec *rec = &v->w->sb.vol[v->slot];
	struct mark m = {
		.log = v->w->sb.uuid, .volume = rec->uuid, .generation = rec->generation, .at = rt_wall_ns() / NS_PER_S,
		.dirty = dirty, .since = v->dirty_since / NS_PER_S,
	};
	char text[DISK_MARK_MAX];

	if (gethostname(m.host, sizeof(m.host) - 1) < 0 || !m.host[0])
		strcpy(m.host, "unknown");
	mark_format(&m, text);
	return co_disk_mark_set(image, text, err);
}

co_fn int co_wl_remark(struct wlog_volume *v, struct err *err)
{
	if (v->w->config.read_only)
		return 0;
	v->w->sb.vol[v->slot].generation++;
	int r = co_wl_checkpoint(v->w);

	if (r == 0 && v->has_mark)
		r = co_mark_write(v, v->disk.file, -1, err);
	return r;
}

co_fn void co_wl_leave_dirty(struct wlog_volume *v)
{
	struct disk *image = v->disk.file;

	if (v->has_mark && !v->stalled && !disk_is_fenced(image))
		co_mark_write(v, image, wl_dirty_bytes(v), NULL);
}

/* The coroutines of a volume. */
static co_fn int co_start(struct wlog_volume *v)
{
	int r = 0;

	if (v->has_mark) {
		v->marking = true;
		r = co_spawn("marker", co_wl_marker, v);
		v->marking = r == 0;
	}
	if (r == 0) {
		v->running = true;
		r = co_spawn("destager", co_wl_destager, v);
		v->running = r == 0;
	}
	if (r < 0)
		co_wl_stop_volume(v);
	return r;
}

co_fn void co_wl_stop_volume(struct wlog_volume *v)
{
	v->stop = true;
	wl_destage_kick(v);
	co_queue_wake_all(&v->mark_wake);
	while (v->running || v->marking)
		co_queue_wait(&v->destage_done, "the destager to stop");
}

static co_fn int co_attach(struct wlog *w, const char *name, struct disk *image, const struct wlog_volume_config *config,
			   struct disk **ret, struct err *err)
{
	struct wlog_volume *v;
	bool has_place;

	if (!*name || strlen(name) > WLOG_NAME_MAX)
		return err_set(err, -EINVAL, "volume \"%.80s\": a name has 1 to %d bytes", name, WLOG_NAME_MAX);
	if (w->failed)
		return err_set(err, w->failed, "volume %s: the write log has failed", name);
	int r = co_identify(w, name, image, config, &v, &has_place, err);
	if (r < 0)
		return r;

	struct wl_volrec *rec = &w->sb.vol[v->slot];

	snprintf(rec->name, sizeof(rec->name), "%s", name);
	snprintf(rec->image, sizeof(rec->image), "%s", image->name);
	rec->size = image->size;
	rec->quota = config->quota;
	rec->epoch++;	/* what recovery found is an epoch of its own */
	v->config = *config;
	v->attached = true;
	v->stop = v->stalled = v->cancelled = false;
	v->flushed_once = config->volatile_from_start;
	v->damaged = v->log_unreadable = false;
	v->ignore_damage = w->config.ignore_damage;
	v->bad_len = v->nkept = 0;
	r = set_order(v);
	if (r == 0)
		r = init_layer(v, image);
	if (r < 0) {
		v->attached = false;
		return err_errno(err, r, "volume %s", name);
	}
	v->has_writers = co_disk_writers(image, &rec->stamp) == 0;
	r = v->has_writers ? -ENOTSUP : co_disk_stamp(image, &rec->stamp, &rec->stamp_wall);
	v->has_stamp = r == 0 || r == -EAGAIN;
	v->destaging = r == -EAGAIN;	/* the destager takes it */
	v->has_mark = has_place && !v->disk.read_only;
	v->mark_has = v->mark_wanted;
	r = co_wl_remark(v, err);
	if (r == 0 && !v->disk.read_only)
		r = co_start(v);
	if (r < 0) {
		err_errno(err, r, "volume %s: cannot be attached to the write log", name);
		v->attached = false;
		v->disk.file = NULL;
		wl_runs_fini(v);
		disk_fini(&v->disk);
		return r;
	}
	*ret = &v->disk;
	return 0;
}

co_fn int co_wlog_attach(struct wlog *w, const char *name, struct disk *image, const struct wlog_volume_config *config,
			 struct disk **ret, struct err *err)
{
	co_mutex_lock(&w->attach_lock);
	int r = co_attach(w, name, image, config, ret, err);
	co_mutex_unlock(&w->attach_lock);
	return r;
}

static uint64_t left_to_drain(const struct wlog_volume *v)
{
	return wl_dirty_bytes(v) + v->fresh_bytes + (v->map.entries > 0);
}

static co_fn int co_drain(struct wlog_volume *v, void (*progress)(void *, uint64_t, uint64_t), void *arg, uint64_t done,
			  uint64_t total, const bool *cancel)
{
	uint64_t failures = v->failures, mine = left_to_drain(v);
	int r = 0;

	v->draining++;
	for (;;) {
		/* What is brought forward just now is no longer needed when it is applied, and back in the map all the same. */
		r = co_wl_commit_upto(v->w, v->last_seq);
		if (r < 0 || !(wl_is_dirty(v) || v->fresh.entries))
			break;
		if (cancel && *cancel)
			r = -ECANCELED;
		else if (v->w->failed || v->damaged || v->failures != failures || v->stop || !v->running)
			r = -EIO;
		if (r < 0)
			break;
		wl_destage_kick(v);
		co_queue_wait_until(&v->destage_done, rt_now_ns() + 100000000, "a drain");
		uint64_t left = left_to_drain(v);

		if (progress)
			progress(arg, done + (mine > left ? mine - left : 0), total);
	}
	v->draining--;
	return r;
}

co_fn int co_wlog_drain_volume(struct disk *d, const bool *cancel)
{
	return co_drain(container_of(d, struct wlog_volume, disk), NULL, NULL, 0, 0, cancel);
}

void wlog_ignore_damage(struct disk *d, bool on)
{
	struct wlog_volume *v = container_of(d, struct wlog_volume, disk);

	v->ignore_damage = on;
	if (on)
		v->damaged = false;
	wl_destage_kick(v);
}

co_fn int co_wlog_drain(struct wlog *w, void (*progress)(void *arg, uint64_t done, uint64_t total), void *arg, const bool *cancel)
{
	uint64_t total = 0, done = 0;
	int r = 0;

	/* All at once, though they are waited for one after the other. Volumes may come and go meanwhile: by their place in the table. */
	w->draining++;
	list_for_each(&w->volumes, l) {
		struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		total += v->attached ? left_to_drain(v) : 0;
		wl_destage_kick(v);
	}
	for (unsigned slot = 0; slot < WLOG_MAX_VOLUMES; slot++) {
		struct wlog_volume *v = w->by_slot[slot];

		if (!v || !v->attached)
			continue;
		uint64_t mine = left_to_drain(v);
		int res = co_drain(v, progress, arg, done, total, cancel);

		if (r == 0)
			r = res;
		done += mine;
	}
	w->draining--;
	if (r == 0 && !w->config.read_only)
		r = co_wl_checkpoint(w);
	return r;
}

co_fn int co_wlog_drop_volume(struct wlog *w, const char *name, struct err *err)
{
	int r = 0;

	if (w->config.read_only)
		return err_set(err, -EROFS, "write log: is open read-only");
	co_mutex_lock(&w->attach_lock);
	struct wlog_volume *v = find_named(w, name);

	if (!v)
		r = err_set(err, -ENOENT, "volume %s: the write log knows no such volume", name);
	else if (v->attached)
		r = err_set(err, -EBUSY, "volume %s: is attached; stop serving it first", name);
	if (r == 0) {
		free_slot(v);
		r = co_wl_checkpoint(w);
		if (r < 0)
			err_errno(err, r, "volume %s: cannot be dropped", name);
	}
	co_mutex_unlock(&w->attach_lock);
	return r;
}
