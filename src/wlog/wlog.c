/* SPDX-License-Identifier: MIT */
/*
 * Write log: format, open, close, and what is reported.
 */
#include "wlog/wlog.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"
#include "util/size.h"
#include "wlog/internal.h"

#define ZERO_CHUNK (1u << 20)

/* --- Format --- */

/* Refuses to lose dirty data. */
static co_fn int co_check_unused(struct disk *d, struct err *err)
{
	struct wl_super *sb = malloc(sizeof(*sb));
	uint64_t dirty = 0, since = 0;
	char size[16], age[16];
	struct err why = ERR_INIT;
	bool half = false;

	if (!sb)
		return err_set(err, -ENOMEM, "%s: out of memory", d->name);
	int r = co_wl_super_read(d, sb, &half, &why);

	if (r == -EBADMSG || r == -ENOTSUP) {
		r = err_set(err, -EEXIST, "%s; it may hold dirty data: restore it, or overwrite it with --force", why.msg);
		goto out;
	}
	if (r == 0 && half) {
		r = err_set(err, -EEXIST, "%s: holds a write log one of whose superblocks is damaged, so it may hold dirty data; drain it with `weir "
			    "log drain`, or overwrite it with --force", d->name);
		goto out;
	}
	if (r < 0 && r != -EINVAL) {
		err_set(err, r, "%s", why.msg);
		goto out;
	}
	if (r == 0 && !(sb->flags & WL_SB_FLAG_CLEAN)) {
		r = err_set(err, -EEXIST, "%s: holds a write log that was not stopped in order, so it may hold dirty data; drain it with `weir log "
			    "drain`, or overwrite it with --force", d->name);
		goto out;
	}
	for (unsigned i = 0; r == 0 && i < sb->nvols; i++) {
		dirty += uuid_is_null(&sb->vol[i].uuid) ? 0 : sb->vol[i].dirty;
		if (sb->vol[i].dirty_since && (!since || sb->vol[i].dirty_since < since))
			since = sb->vol[i].dirty_since;
	}
	if (r == 0 && since)
		r = err_set(err, -EEXIST, "%s: holds a write log with %s not in an image (the oldest %s old); drain it with `weir log drain`, or give it up "
			    "with --force", d->name, wl_dirty_text(dirty, size), duration_format(rt_wall_ns() - since, age));
	else
		r = 0;
out:
	free(sb);
	return r;
}

static uint32_t choose_segment(uint64_t size)
{
	return size >= (128ull << 20) ? 4u << 20 : 1u << 20;
}

/* Every block is written once, so that later writes cost no allocation. */
static co_fn int co_prewrite(struct disk *d, const struct wlog_format_opts *opts, uint64_t base, uint64_t total,
			     struct err *err)
{
	uint8_t *zero = co_buf_get(rt_bufs(), ZERO_CHUNK);
	int r = 0;

	memset(zero, 0, ZERO_CHUNK);
	for (uint64_t off = 0; off < d->size && r == 0; off += ZERO_CHUNK) {
		r = co_disk_write(d, off, zero, min((uint64_t)ZERO_CHUNK, d->size - off), 0);
		if (opts->progress)
			opts->progress(opts->progress_arg, base + min(d->size, off + ZERO_CHUNK), total);
	}
	rt_buf_put(rt_bufs(), zero);
	if (r == 0)
		r = co_disk_flush(d);
	return r < 0 ? err_errno(err, r, "%s: cannot be written", d->name) : 0;
}

/* The old log is gone before anything of it is overwritten: a crash leaves it whole, or none, or the new one. */
static co_fn int co_forget_old(struct disk *d, const char *relic_dir)
{
	struct wl_super *old = relic_dir ? malloc(sizeof(*old)) : NULL;
	bool known = old && co_wl_super_read(d, old, NULL, &(struct err)ERR_INIT) == 0;
	int r = co_disk_zero(d, 0, WL_FIRST_SEGMENT, 0);

	if (r == 0)
		r = co_disk_flush(d);
	if (r == 0 && known)
		wl_relic_forget(relic_dir, &old->uuid);
	free(old);
	return r;
}

/* The blocks that recovery looks at first, when the whole is not written. */
static co_fn int co_wipe_heads(struct disk *d, uint32_t seg_size, uint32_t seg_count)
{
	uint8_t zero[WL_BLOCK] = { 0 };
	int r = 0;

	for (uint32_t i = 0; i < seg_count && r == 0; i++)
		r = co_disk_write(d, WL_FIRST_SEGMENT + (uint64_t)i * seg_size, zero, WL_BLOCK, 0);
	return r == 0 ? co_disk_flush(d) : r;
}

co_fn int co_wlog_format(struct disk *const *dev, int ndev, const struct wlog_format_opts *opts, struct err *err)
{
	uint64_t size = UINT64_MAX;
	char min_size[16], got[16];
	int r = 0;

	for (int i = 0; i < ndev; i++) {
		size = min(size, dev[i]->size);
		if (dev[i]->size < WLOG_MIN_SIZE && !opts->small)
			return err_set(err, -EINVAL, "%s: has %s; a write log needs at least %s", dev[i]->name,
				       size_format(dev[i]->size, got), size_format(WLOG_MIN_SIZE, min_size));
		r = opts->force ? 0 : co_check_unused(dev[i], err);
		if (r < 0)
			return r;
	}
	struct wl_super *sb = calloc(1, sizeof(*sb));
	uint8_t *slot = co_buf_get(rt_bufs(), WL_SB_SLOT);

	if (!sb) {
		r = err_set(err, -ENOMEM, "out of memory");
		goto out;
	}
	sb->seg_size = opts->segment_size ? opts->segment_size : choose_segment(size);
	sb->seg_count = size < WL_FIRST_SEGMENT ? 0 : min((size - WL_FIRST_SEGMENT) / sb->seg_size, (uint64_t)1 << 20);
	if (!is_pow2(sb->seg_size) || sb->seg_size < (opts->small ? WL_SEGMENT_MIN : WL_SEGMENT_MIN_MADE) ||
	    sb->seg_size > WL_SEGMENT_MAX || sb->seg_count < WL_MIN_SEGMENTS) {
		r = err_set(err, -EINVAL, "%s: %u segments of %u bytes: a write log needs at least %u of 1 to 64 MiB", dev[0]->name,
			    sb->seg_count, sb->seg_size, WL_MIN_SEGMENTS);
		goto out;
	}
	uuid_random(&sb->uuid);
	sb->dev_size = size;
	sb->generation = 1;
	sb->gen_start = sb->tail_seq = 1;
	sb->tail_pos = WL_FIRST_SEGMENT;
	sb->flags = WL_SB_FLAG_CLEAN;
	sb->wall = rt_wall_ns();
	sb->nsides = ndev;
	for (int i = 0; i < ndev; i++)
		uuid_random(&sb->side_uuid[i]);
	for (int i = 0; i < ndev && r == 0; i++)
		r = co_forget_old(dev[i], opts->relic_dir);
	for (int i = 0; i < ndev && r == 0; i++) {
		r = opts->no_prewrite ? co_wipe_heads(dev[i], sb->seg_size, sb->seg_count) :
					co_prewrite(dev[i], opts, size * i, size * ndev, err);
	}
	for (int i = 0; i < ndev && r == 0; i++) {
		sb->side = i;
		sb->seq = 1;
		wl_super_encode(sb, slot);
		r = co_disk_write(dev[i], WL_SB_SLOT, slot, WL_SB_SLOT, DISK_FUA);
	}
	if (r < 0)
		err_errno(err, r, "%s: cannot be formatted", dev[0]->name);
out:
	rt_buf_put(rt_bufs(), slot);
	free(sb);
	return r;
}

/* --- Open --- */

static void apply_defaults(struct wlog_config *c)
{
	if (!c->memory)
		c->memory = WL_MEM_DEFAULT;
	c->destage_parallel = min(c->destage_parallel, WL_DEPTH_MAX);
	if (!c->destage_round)
		c->destage_round = WL_ROUND_MAX;
	if (!c->destage_delay_ns)
		c->destage_delay_ns = 1000000000ull;
	if (!c->low_pct)
		c->low_pct = 25;
	if (!c->side_timeout_ns)
		c->side_timeout_ns = 5000000000ull;
	if (!c->high_pct)
		c->high_pct = 60;
}

/*
 * Sorts the devices into their sides: the newest superblock decides who belongs and who is in sync. result[i] is what reading the superblock of
 * dev[i] gave; a device without one takes the place of a missing side, unused until it is rebuilt.
 */
static int assemble(struct wlog *w, struct disk *const *dev, int ndev, const struct wl_super *sb, const int *result,
		    struct err *err)
{
	int best = -1;

	for (int i = 0; i < ndev; i++) {
		if (result[i] == 0 && (best < 0 || sb[i].seq > sb[best].seq))
			best = i;
	}
	w->sb = sb[best];
	w->dev.n = w->sb.nsides;
	if (ndev > (int)w->dev.n)
		return err_set(err, -EINVAL, "%s: this write log has one device and is not a mirror; give it a second side with `weir log rebuild`, or "
			       "name one --log", dev[best]->name);
	for (int i = 0; i < ndev; i++) {
		unsigned side = sb[i].side;

		if (result[i] < 0)
			continue;
		if (!uuid_equal(&sb[i].uuid, &w->sb.uuid))
			return err_set(err, -EINVAL, "%s and %s belong to different write logs; name the two sides of one mirror", dev[best]->name,
				       dev[i]->name);
		if (w->dev.disk[side])
			return err_set(err, -EINVAL, "%s and %s are the same side of the mirror: one is a copy", w->dev.disk[side]->name,
				       dev[i]->name);
		if (dev[i]->size < w->sb.dev_size)
			return err_set(err, -EINVAL, "%s: has %llu bytes, but its superblock says %llu: it was cut off or is a partial copy; restore "
				       "it whole", dev[i]->name, (unsigned long long)dev[i]->size, (unsigned long long)w->sb.dev_size);
		w->dev.disk[side] = dev[i];
		/* A side that the newest superblock calls out, or that missed more than the last superblock, is stale. */
		w->dev.in_sync[side] = w->sb.side_state[side] == WL_SIDE_IN_SYNC && sb[i].seq + 1 >= w->sb.seq;
	}
	for (int i = 0; i < ndev; i++) {
		for (unsigned side = 0; result[i] < 0 && side < w->dev.n; side++) {
			if (!w->dev.disk[side]) {
				w->dev.disk[side] = dev[i];
				break;
			}
		}
	}
	unsigned in_sync = 0;

	for (unsigned i = 0; i < w->dev.n; i++)
		in_sync += w->dev.in_sync[i];
	if (in_sync == 0)
		return err_set(err, -EBADMSG, "%s: none of the sides that are named is in sync; name the other side of the mirror", dev[best]->name);
	for (unsigned i = 0; i < w->dev.n; i++) {
		if (!w->dev.disk[i])
			log_warn("write log: one side of its mirror is missing; it goes on without it");
		else if (!w->dev.in_sync[i])
			log_warn("%s: this side of the log's mirror is out of date and not used; bring it back with `weir log rebuild`",
				 w->dev.disk[i]->name);
	}
	return 0;
}

struct super_read {
	struct disk *dev;
	struct co_queue *answered;
	struct wl_super *sb;
	struct err *err;
	int result;
	bool done;
};

static co_fn void co_super_reader(void *arg)
{
	struct super_read *r = arg;

	r->result = co_wl_super_read(r->dev, r->sb, NULL, r->err);
	r->done = true;
	co_queue_wake_all(r->answered);
}

/*
 * Both sides at once. Here one that hangs is waited for: the other one may have been left behind before, and does not know it. Only the operator can say that
 * it was not, by naming it alone.
 */
static co_fn void co_read_both(struct disk *const *dev, uint64_t limit, struct wl_super *sb, int *result, struct err *each)
{
	struct super_read r[WLOG_MAX_DEVICES];
	struct co_queue answered;
	uint64_t tell = rt_now_ns() + min(limit, UINT64_MAX / 2);

	co_queue_init(&answered);
	for (int i = 0; i < 2; i++) {
		r[i] = (struct super_read){ .dev = dev[i], .answered = &answered, .sb = &sb[i], .err = &each[i] };
		if (co_spawn("log superblock", co_super_reader, &r[i]) < 0)
			co_super_reader(&r[i]);
	}
	while (!(r[0].done && r[1].done)) {
		if (tell == UINT64_MAX) {
			co_queue_wait(&answered, "the log's superblocks");
		} else if (!co_queue_wait_until(&answered, tell, "the log's superblocks")) {
			for (int i = 0; i < 2; i++) {
				if (!r[i].done)
					log_warn("%s: write log device does not answer; it is waited for, since the other side may have been left behind. To "
						 "start without it, name only the other --log", dev[i]->name);
			}
			tell = UINT64_MAX;
		}
	}
	for (int i = 0; i < 2; i++)
		result[i] = r[i].result;
}

/* One readable superblock is enough. */
static co_fn int co_read_supers(struct disk *const *dev, int ndev, uint64_t limit, struct wl_super *sb, int *result, struct err *err)
{
	struct err each[WLOG_MAX_DEVICES] = { ERR_INIT, ERR_INIT };
	bool found = false;

	if (ndev == 1)
		result[0] = co_wl_super_read(dev[0], &sb[0], NULL, &each[0]);
	else
		co_read_both(dev, limit, sb, result, each);
	for (int i = 0; i < ndev; i++)
		found |= result[i] == 0;
	if (!found)
		return err_set(err, result[0], "%s", each[0].msg);
	for (int i = 0; i < ndev; i++) {
		if (result[i] < 0)
			log_warn("%s", each[i].msg);
	}
	return 0;
}

static int make_volumes(struct wlog *w)
{
	for (unsigned i = 0; i < w->sb.nvols; i++) {
		if (uuid_is_null(&w->sb.vol[i].uuid))
			continue;
		struct wlog_volume *v = wl_volume_new(w, i);

		if (!v)
			return -ENOMEM;
		v->ordered_upto = w->sb.vol[i].flags & WL_VOL_FLAG_ORDERED ? UINT64_MAX : 0;
	}
	return 0;
}

static int make_sides(struct wlog *w)
{
	for (unsigned i = 0; i < w->dev.n && w->dev.n > 1; i++) {
		if (w->dev.disk[i])
			w->dev.side[i] = wl_side_create(w, w->dev.disk[i]);
		if (w->dev.disk[i] && !w->dev.side[i])
			return -ENOMEM;
	}
	return 0;
}

static void free_log(struct wlog *w)
{
	list_for_each_safe(&w->volumes, l)
		free(container_of(l, struct wlog_volume, node));
	wl_append_fini(w);
	free(w);
}

static struct wlog *alloc_log(const struct wlog_config *config)
{
	struct wlog *w = calloc(1, sizeof(*w));

	if (!w)
		return NULL;
	if (config)
		w->config = *config;
	apply_defaults(&w->config);
	list_init(&w->batches);
	list_init(&w->volumes);
	co_mutex_init(&w->dev.lock);
	co_mutex_init(&w->group_lock);
	co_mutex_init(&w->admit_lock);
	co_mutex_init(&w->attach_lock);
	co_queue_init(&w->dev.answered);
	co_queue_init(&w->commit_wake);
	co_queue_init(&w->commit_done);
	co_queue_init(&w->marked);
	co_queue_init(&w->space);
	co_queue_init(&w->ticker_wake);
	hist_init(&w->commit_latency);
	w->opened_wall = rt_wall_ns();
	w->relic.fd = -1;
	return w;
}

/* Recovery is over: from here on the log is written. */
static co_fn int co_start(struct wlog *w, struct err *err)
{
	w->sb.generation++;
	w->sb.gen_start = w->next_seq;
	w->sb.flags &= ~WL_SB_FLAG_CLEAN;
	int r = co_wl_checkpoint(w);

	if (r == 0) {
		wl_relic_begin(w);
		w->commit_running = true;
		r = co_spawn("log committer", co_wl_committer, w);
		w->commit_running = r == 0;
	}
	if (r == 0) {
		w->ticker_running = true;
		r = co_spawn("log upkeep", co_wl_ticker, w);
		w->ticker_running = r == 0;
	}
	return r < 0 ? err_errno(err, r, "write log: cannot be opened for writing") : 0;
}

static co_fn void co_stop(struct wlog *w)
{
	w->stop = true;
	co_queue_wake_all(&w->commit_wake);
	wl_kick_ticker(w);
	while (w->commit_running || w->ticker_running || w->rebuild_running)
		co_queue_wait(&w->commit_done, "the log to stop");
}

co_fn int co_wlog_open(struct disk *const *dev, int ndev, const struct wlog_config *config, struct wlog **ret, struct err *err)
{
	struct wl_super *sb = calloc(WLOG_MAX_DEVICES, sizeof(*sb));
	struct wlog *w = alloc_log(config);
	int result[WLOG_MAX_DEVICES], r;

	if (!sb || !w) {
		r = err_set(err, -ENOMEM, "write log: out of memory");
		goto out;
	}
	r = co_read_supers(dev, ndev, w->config.side_timeout_ns, sb, result, err);
	if (r == 0)
		r = assemble(w, dev, ndev, sb, result, err);
	if (r < 0)
		goto out;
	w->seg_bytes = (uint64_t)w->sb.seg_size * w->sb.seg_count;
	r = make_sides(w);
	if (r == 0)
		r = wl_append_init(w);
	if (r == 0)
		r = make_volumes(w);
	if (r < 0) {
		err_set(err, r, "%s: out of memory for the log's index", dev[0]->name);
		goto out;
	}
	r = w->config.read_only ? 0 : co_wl_relic_take(w, err);
	if (r == 0)
		r = co_wl_recover(w, err);
	if (r < 0)
		goto out;
	wl_advance_tail(w);
	if (!w->config.read_only)
		r = co_start(w, err);
	if (r < 0)
		co_stop(w);
out:
	free(sb);
	if (r < 0) {
		/* What hangs cannot be given back. */
		for (unsigned i = 0; w && i < w->dev.n; i++) {
			co_wl_side_settle(w->dev.side[i]);
			wl_side_free(w->dev.side[i]);
		}
		for (int i = 0; i < ndev; i++) {
			while (dev[i]->in_flight)
				co_sleep_ns(1000000);
		}
		if (w)
			free_log(w);
		return r;
	}
	*ret = w;
	return 0;
}

co_fn int co_wlog_close(struct wlog *w)
{
	int r = w->config.read_only ? 0 : co_wl_commit_all(w);

	if (!w->config.read_only) {
		co_stop(w);
		if (r == 0) {
			w->sb.flags |= WL_SB_FLAG_CLEAN;
			r = co_wl_checkpoint(w);
			if (r == 0)
				wl_relic_end(w);
		}
	}
	/* One that hangs is waited for last of all: everything is in order without it. */
	for (unsigned i = 0; i < w->dev.n; i++) {
		if (w->dev.disk[i])
			co_wl_side_retire(w, w->dev.side[i], w->dev.disk[i]);
		w->dev.disk[i] = NULL;
		w->dev.side[i] = NULL;
	}
	while (w->dev.retiring)
		co_queue_wait(&w->commit_done, "log devices that have not answered");
	free_log(w);
	return r;
}

co_fn int co_wlog_commit(struct wlog *w)
{
	return co_wl_commit_all(w);
}

/* --- Figures --- */

static bool is_hanging(const struct wlog *w, unsigned side)
{
	return w->dev.disk[side] && !w->dev.in_sync[side] && !w->dev.rebuilding && wl_side_owes(w->dev.side[side]);
}

static const char *hanging_device(const struct wlog *w)
{
	for (unsigned i = 0; i < w->dev.n; i++) {
		if (is_hanging(w, i))
			return w->dev.disk[i]->name;
	}
	return w->dev.retiring && *w->dev.retired ? w->dev.retired : NULL;
}

void wlog_memory(const struct wlog *w, uint64_t *ret_buffers, uint64_t *ret_index)
{
	*ret_buffers = w->mem_size + wl_relic_overhead(w) + (2 + w->dev.n) * WL_MAX_BATCH + WL_MAX_INDEX;
	*ret_index = w->pool.fresh * sizeof(struct wl_entry) + w->batch_fresh * sizeof(struct wl_batch);
}

void wlog_get_info(const struct wlog *w, struct wlog_info *ret)
{
	unsigned in_sync = 0, volumes = 0;

	for (unsigned i = 0; i < w->dev.n; i++)
		in_sync += w->dev.disk[i] && w->dev.in_sync[i];
	list_for_each(&w->volumes, l)
		volumes += l != NULL;
	*ret = (struct wlog_info){
		.uuid = w->sb.uuid,
		.size = w->sb.dev_size,
		.segment_size = w->sb.seg_size,
		.used_bytes = (uint64_t)(w->sb.seg_count - 1 - wl_free_segments(w)) * w->sb.seg_size,
		.memory_bytes = w->pool.fresh * sizeof(struct wl_entry) + w->batch_fresh * sizeof(struct wl_batch),
		.memory_limit = w->mem_end,
		.sequence = w->next_seq,
		.clean = w->sb.flags & WL_SB_FLAG_CLEAN,
		.failed = w->failed,
		.survives_kill = w->relic.kept,
		.degraded = in_sync < w->dev.n,
		.rebuilding = w->rebuild_running,
		.rebuild_error = w->rebuild_running ? 0 : w->rebuild_error,
		.rebuild_done = w->rebuild_done,
		.rebuild_total = w->rebuild_total,
		.write_waits_ns = w->dev.write_since ? rt_now_ns() - w->dev.write_since : 0,
		.hanging = hanging_device(w),
		.commits = w->commits,
		.commit_bytes = w->commit_bytes,
		.commits_foreseen = w->foreseen,
		.device_errors = w->dev.errors,
		.devices = w->dev.n,
		.volumes = volumes,
		.commit_latency = &w->commit_latency,
	};
}

int wlog_get_volume(const struct wlog *w, unsigned index, struct wlog_volume_info *ret)
{
	list_for_each(&w->volumes, l) {
		const struct wlog_volume *v = container_of(l, struct wlog_volume, node);
		const struct wl_volrec *rec = &w->sb.vol[v->slot];

		if (index--)
			continue;
		*ret = (struct wlog_volume_info){
			.uuid = rec->uuid,
			.size = rec->size,
			.attached = v->attached,
			.stalled = v->stalled,
			.damaged = v->damaged,
			.bad_off = v->bad_off,
			.bad_len = v->bad_len,
			.lost_bytes = v->lost_bytes,
			.destage = v->config.destage,
			.mode = v->config.mode,
			.dirty = wl_is_dirty(v),
			.dirty_bytes = wl_dirty_bytes(v),
			.volatile_bytes = v->fresh_bytes,
			.dirty_since_wall_ns = v->dirty_since,
			.quota = wl_quota(v),
			.records = v->records,
			.epochs = rec->epoch,
			.destaged_bytes = v->destaged_bytes,
		};
		memcpy(ret->name, rec->name, sizeof(ret->name));
		memcpy(ret->image, rec->image, sizeof(ret->image));
		return 0;
	}
	return -ENOENT;
}

static json_t *volume_json(const struct wlog_volume_info *v)
{
	char uuid[37];

	return json_pack("{s:s, s:s, s:s, s:I, s:b, s:b, s:b, s:o, s:I, s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:s}",
		"name", v->name, "uuid", uuid_format(&v->uuid, uuid), "image", v->image, "size", (json_int_t)v->size,
		"attached", v->attached, "stalled", v->stalled, "damaged", v->damaged,
		"unreadable", v->bad_len ? json_pack("{s:I, s:I}", "offset", (json_int_t)v->bad_off, "length", (json_int_t)v->bad_len) : json_null(),
		"lost_bytes", (json_int_t)v->lost_bytes,
		"destage", v->destage == WLOG_DESTAGE_ORDERED ? "ordered" : "merged",
		"logmode", v->mode == WLOG_MODE_WRITE ? "write" : "flush",
		"dirty", v->dirty, "dirty_bytes", (json_int_t)v->dirty_bytes, "volatile_bytes", (json_int_t)v->volatile_bytes,
		"dirty_since_ns", (json_int_t)v->dirty_since_wall_ns, "quota", (json_int_t)v->quota,
		"records", (json_int_t)v->records, "destaged_bytes", (json_int_t)v->destaged_bytes,
		"if_log_lost", !v->dirty ? "nothing is lost" :
			v->destage == WLOG_DESTAGE_ORDERED ? "the image is as of a completed flush" :
							     "the image may be a mixture of old and new");
}

void *wlog_status(struct wlog *w)
{
	struct wlog_info i;
	struct wlog_volume_info v;
	char uuid[37];

	wlog_get_info(w, &i);
	json_t *vols = json_array(), *devs = json_array();

	for (unsigned n = 0; wlog_get_volume(w, n, &v) == 0; n++)
		json_array_append_new(vols, volume_json(&v));
	for (unsigned n = 0; n < w->dev.n; n++)
		json_array_append_new(devs, json_pack("{s:s, s:s}", "device", w->dev.disk[n] ? w->dev.disk[n]->name : "",
			"state", !w->dev.disk[n] ? "missing" : w->dev.in_sync[n] ? "in sync" :
				 w->dev.rebuilding ? "rebuilding" : is_hanging(w, n) ? "hanging" : "out"));
	return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:b, s:b, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}",
		"uuid", uuid_format(&i.uuid, uuid), "size", (json_int_t)i.size, "segment_size", (json_int_t)i.segment_size,
		"used_bytes", (json_int_t)i.used_bytes, "memory_limit", (json_int_t)i.memory_limit,
		"index_bytes", (json_int_t)i.memory_bytes, "sequence", (json_int_t)i.sequence, "failed", i.failed,
		"degraded", i.degraded, "rebuilding", i.rebuilding, "survives_kill", w->config.read_only ? json_null() : json_boolean(i.survives_kill), "commits", (json_int_t)i.commits,
		"commit_bytes", (json_int_t)i.commit_bytes, "write_waits_ns", (json_int_t)i.write_waits_ns,
		"commits_foreseen", (json_int_t)i.commits_foreseen,
		"rebuild_done", (json_int_t)w->rebuild_done, "rebuild_total", (json_int_t)w->rebuild_total,
		"commit_p50_ns", (json_int_t)hist_quantile(&w->commit_latency, 500),
		"commit_p99_ns", (json_int_t)hist_quantile(&w->commit_latency, 990), "devices", devs, "volumes", vols);
}
