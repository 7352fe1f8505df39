/* SPDX-License-Identifier: MIT */
/*
 * The power-cut simulator: supply, devices, and what a cut leaves. See fault.h for the contract; its numbers are cited here.
 *
 * A device has two media: `stable`, and `view`, a copy-on-write clone with everything that took effect. Between the two
 * lies the list of versions: what each write changed, in the order in which they took effect.
 *
 * Invariants
 *  (a) view = stable with all live sectors of dev->versions applied in order, and with those that a failed flush dropped;
 *  (b) versions are whole sectors with the content that the view had, so that any one of them alone is a valid sector;
 *  (c) a sector of a version is dead once a newer version of it is stable (FUA): a later flush must not bring the old one back;
 *  (d) an I/O is on dev->flights from its submission until it takes effect, so that a cut finds each in-flight change exactly once.
 */
#include "backend/powercut_int.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"
#include "util/iov.h"

void *powercut_must(void *p)
{
	if (!p)
		abort();
	return p;
}

/* --- Versions --- */

static bool is_dead(const struct version *v, uint64_t sector)
{
	return v->dead && (v->dead[sector / 8] >> (sector % 8) & 1);
}

static void set_dead(struct powercut_dev *dev, struct version *v, uint64_t sector)
{
	if (!v->dead)
		v->dead = powercut_must(calloc(1, v->len / dev->sector / 8 + 1));
	v->dead[sector / 8] |= 1u << (sector % 8);
}

static unsigned spare_class(uint64_t len)
{
	return 64 - __builtin_clzll(max(len, (uint64_t)2) - 1);
}

static uint8_t *data_get(struct powercut *p, uint64_t len)
{
	unsigned k = spare_class(len);
	struct spare *s = k < POWERCUT_SPARES ? p->spare[k] : NULL;

	if (!s)
		return powercut_must(malloc(k < POWERCUT_SPARES ? 1ull << k : len));
	p->spare[k] = s->next;
	return (uint8_t *)s;
}

static void data_put(struct powercut *p, uint8_t *data, uint64_t len)
{
	unsigned k = spare_class(len);
	struct spare *s = (struct spare *)data;

	if (!data || k >= POWERCUT_SPARES) {
		free(data);
		return;
	}
	s->next = p->spare[k];
	p->spare[k] = s;
}

void powercut_version_free(const struct powercut_dev *dev, struct version *v)
{
	list_del(&v->node);
	free(v->dead);
	data_put(dev->power, v->data, v->len);
	free(v);
}

void powercut_write_sector(const struct powercut_dev *dev, struct media *to, const struct version *v, uint64_t i)
{
	uint64_t at = i * dev->sector;

	if (is_dead(v, i))
		return;
	if (v->data)
		media_write(to, v->off + at, v->data + at, dev->sector);
	else
		media_zero(to, v->off + at, dev->sector);
}

static void write_version(const struct powercut_dev *dev, struct media *to, const struct version *v)
{
	if (!v->dead && v->data) {
		media_write(to, v->off, v->data, v->len);
	} else if (!v->dead) {
		media_zero(to, v->off, v->len);
	} else {
		for (uint64_t i = 0; i < v->len / dev->sector; i++)
			powercut_write_sector(dev, to, v, i);
	}
}

/* What `fl` would change, over the view as it is: (b). */
struct version *powercut_version_of(const struct powercut_dev *dev, const struct flight *fl)
{
	struct version *v = powercut_must(calloc(1, sizeof(*v)));
	uint64_t end = align_up(fl->off + fl->len, dev->sector);

	list_init(&v->node);
	v->off = align_down(fl->off, dev->sector);
	v->len = end - v->off;
	if (!fl->iov && v->off == fl->off && v->len == fl->len)
		return v;
	v->data = data_get(dev->power, v->len);
	if (v->off != fl->off || v->len != fl->len)
		media_read(dev->view, v->off, v->data, v->len);
	if (fl->iov)
		iov_copy_out(fl->iov, fl->niov, 0, v->data + (fl->off - v->off), fl->len);
	else
		memset(v->data + (fl->off - v->off), 0, fl->len);
	return v;
}

/* Sectors of `off, len` in versions older than `seq` are superseded: (c). */
static void kill_older(struct powercut_dev *dev, uint64_t seq, uint64_t off, uint64_t len)
{
	list_for_each(&dev->versions, n) {
		struct version *v = container_of(n, struct version, node);
		uint64_t from = max(off, v->off), to = min(off + len, v->off + v->len);

		if (v->seq >= seq)
			break;
		for (uint64_t at = from; at < to; at += dev->sector)
			set_dead(dev, v, (at - v->off) / dev->sector);
	}
}

static uint64_t next_stamp(struct powercut_dev *dev)
{
	if (dev->config.stamp_step) {
		dev->highest_stamp = max(dev->highest_stamp, (rt_self() ? rt_wall_ns() : 0) / dev->config.stamp_step * dev->config.stamp_step);
		return dev->highest_stamp;
	}
	dev->highest_stamp = max(dev->highest_stamp + 1, rt_self() ? rt_wall_ns() : 0);
	return dev->highest_stamp;
}

/* (1): the change becomes visible, whole or with some sectors left out. Returns its sequence. */
static uint64_t take_effect(struct powercut_dev *dev, struct flight *fl, unsigned keep_pct)
{
	struct version *v = powercut_version_of(dev, fl);

	if (keep_pct < 100 && fl->iov && powercut_is_whole(dev, fl->off, fl->len))
		keep_pct = rng_below(&dev->power->rng, 100) < keep_pct ? 100 : 0;
	list_del(&fl->node);
	for (uint64_t i = 0; keep_pct < 100 && i < v->len / dev->sector; i++)
		if (rng_below(&dev->power->rng, 100) >= keep_pct)
			set_dead(dev, v, i);
	v->seq = ++dev->seq;
	v->stamp = dev->stamp = next_stamp(dev);
	v->pinned = fl->stable;
	write_version(dev, dev->view, v);
	list_add_tail(&dev->versions, &v->node);
	return v->seq;
}

/* NULL: a flush has made it stable already. */
static struct version *find_version(struct powercut_dev *dev, uint64_t seq)
{
	for (struct list *n = dev->versions.prev; n != &dev->versions; n = n->prev) {
		struct version *v = container_of(n, struct version, node);

		if (v->seq <= seq)
			return v->seq == seq ? v : NULL;
	}
	return NULL;
}

/* (3): makes one version stable and nothing else; or lets go of it, if its write failed. */
static void promote(struct powercut_dev *dev, uint64_t seq, bool failed)
{
	struct version *v = find_version(dev, seq);

	if (!v)
		return;
	v->pinned = false;
	if (failed)
		return;
	for (uint64_t i = 0; i < v->len / dev->sector; i++)
		if (!is_dead(v, i))
			kill_older(dev, seq, v->off + i * dev->sector, dev->sector);
	write_version(dev, dev->stable, v);
	dev->stable_stamp = max(dev->stable_stamp, v->stamp);
	powercut_version_free(dev, v);
}

/* (2): all that took effect up to `seq`. */
static void flush_versions(struct powercut_dev *dev, uint64_t seq)
{
	list_for_each_safe(&dev->versions, n) {
		struct version *v = container_of(n, struct version, node);

		if (v->seq > seq)
			break;
		write_version(dev, dev->stable, v);
		dev->stable_stamp = max(dev->stable_stamp, v->stamp);
		powercut_version_free(dev, v);
	}
}

/* (6): they stay visible and will never be stable. */
static void drop_versions(struct powercut_dev *dev, uint64_t seq)
{
	unsigned pct = (unsigned[]){ 100, 50, 10 }[rng_below(&dev->power->rng, 3)];

	list_for_each_safe(&dev->versions, n) {
		struct version *v = container_of(n, struct version, node);

		if (v->seq <= seq && !v->pinned && rng_below(&dev->power->rng, 100) < pct)
			powercut_version_free(dev, v);
	}
}

uint32_t powercut_atomic_write(const struct powercut_dev *dev)
{
	const struct powercut_dev_config *c = &dev->config;

	return c->whole ? min(c->object, c->max_io ? c->max_io : UINT32_MAX) : 0;
}

bool powercut_is_whole(const struct powercut_dev *dev, uint64_t off, uint64_t len)
{
	uint64_t unit = powercut_atomic_write(dev);

	return unit && off / unit == (off + len - 1) / unit;
}

/* --- I/O --- */

static bool fails_with(const struct powercut_dev *dev, enum disk_op op)
{
	if (dev->error == -ENOSPC)
		return op == DISK_OP_WRITE || op == DISK_OP_ZERO;
	return dev->error != 0;
}

/* Counts an I/O, asks the hook, cuts if it is time. 0, or the error that the I/O must end with. */
static int submit(struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct powercut *p = dev->power;
	bool change = op != DISK_OP_READ && op != DISK_OP_EXTENT;
	int ret = 0;

	p->ios++;
	dev->ios++;
	p->writes += change;
	if (op == DISK_OP_WRITE && !len)
		dev->count.marks++;
	else
		dev->count.ops[op]++;
	dev->count.bytes[op] += len;
	if ((op == DISK_OP_WRITE || op == DISK_OP_ZERO) && (flags & DISK_FUA))
		dev->count.fua_writes++;
	if (p->hook)
		ret = p->hook(p->hook_arg, dev, op, off, len, flags);
	if (ret == POWERCUT_NOW || (change && p->cut_at && p->writes == p->cut_at))
		powercut_cut(p);
	if (p->off)
		return -ESHUTDOWN;
	if (!ret && p->fail_at && (p->fail_dev ? p->fail_dev == dev && dev->ios == p->fail_at : p->ios == p->fail_at))
		ret = p->fail_error;
	if (!ret && fails_with(dev, op))
		ret = dev->error;
	return ret;
}

/* Spends up to `ns`; -ESHUTDOWN as soon as the power goes. */
static co_fn int co_spend(struct powercut_dev *dev, uint64_t ns)
{
	struct powercut *p = dev->power;

	while (dev->stalled && !p->off)
		co_queue_wait(&p->waiting, "powercut: stalled device");
	if (ns && !p->off)
		co_queue_wait_until(&p->waiting, rt_now_ns() + ns, "powercut: I/O");
	/* Who unstalls a device wakes all; a little early does not matter. */
	return p->off ? -ESHUTDOWN : 0;
}

struct instants {
	uint64_t before, after;	/* the effect */
};

static struct instants draw(struct powercut_dev *dev)
{
	struct rng *r = &dev->power->rng;
	uint64_t total = rng_below(r, 4) ? 1 + rng_below(r, dev->latency_ns) : 1;
	uint64_t before = (uint64_t[]){ 0, total, rng_below(r, total + 1) }[rng_below(r, 3)];

	return (struct instants){ before, total - before };
}

/* A write, discard or write-zeroes from submission to completion. */
static co_fn int co_change(struct powercut_dev *dev, enum disk_op op, struct flight *fl, unsigned flags)
{
	struct instants t = draw(dev);
	uint64_t seq;
	int ret, error;

	if (dev->power->off)
		return -ESHUTDOWN;
	fl->stable = (flags & DISK_FUA) || dev->config.write_through;
	list_add_tail(&dev->flights, &fl->node);
	error = submit(dev, op, fl->off, fl->len, flags);
	ret = error == -ESHUTDOWN ? error : co_spend(dev, t.before);
	if (ret) {
		list_del(&fl->node);
		return ret;
	}
	/* A failed one is torn; a discard may keep anything if it promises nothing. */
	if (op == DISK_OP_DISCARD && dev->config.discard_keeps && !error)
		seq = take_effect(dev, fl, (unsigned[]){ 0, 50, 100 }[rng_below(&dev->power->rng, 3)]);
	else
		seq = take_effect(dev, fl, error ? 50 : 100);
	ret = co_spend(dev, t.after);
	if (ret)
		return ret;
	if (!error && fails_with(dev, op))
		error = dev->error;
	if (fl->stable)
		promote(dev, seq, error != 0);
	return error;
}

static struct powercut_dev *to_dev(struct disk *d)
{
	return container_of(d, struct handle, disk)->dev;
}

static co_fn int powercut_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct powercut_dev *dev = to_dev(d);
	struct instants t = draw(dev);
	int ret, error;

	if (dev->power->off)
		return -ESHUTDOWN;
	error = submit(dev, DISK_OP_READ, off, len, flags);
	ret = error == -ESHUTDOWN ? error : co_spend(dev, t.before);
	if (ret)
		return ret;
	for (int i = 0; i < niov && !error; i++) {
		media_read(dev->view, off, iov[i].iov_base, iov[i].iov_len);
		off += iov[i].iov_len;
	}
	ret = co_spend(dev, t.after);
	if (!ret && !error && fails_with(dev, DISK_OP_READ))
		error = dev->error;
	return ret ? ret : error;
}

static co_fn int powercut_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct flight fl = { .off = off, .len = len, .iov = iov, .niov = niov };

	return co_change(to_dev(d), DISK_OP_WRITE, &fl, flags);
}

static co_fn int powercut_co_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct flight fl = { .off = off, .len = len };

	return co_change(to_dev(d), DISK_OP_DISCARD, &fl, flags);
}

static co_fn int powercut_co_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct flight fl = { .off = off, .len = len };

	if (to_dev(d)->config.no_zero)
		return -EOPNOTSUPP;
	return co_change(to_dev(d), DISK_OP_ZERO, &fl, flags);
}

static co_fn int powercut_co_flush(struct disk *d)
{
	struct powercut_dev *dev = to_dev(d);
	struct instants t = draw(dev);
	uint64_t seq = dev->seq;
	int ret, error;

	if (dev->power->off)
		return -ESHUTDOWN;
	error = submit(dev, DISK_OP_FLUSH, 0, 0, 0);
	ret = error == -ESHUTDOWN ? error : co_spend(dev, t.before + t.after);
	if (ret)
		return ret;
	if (!error && fails_with(dev, DISK_OP_FLUSH))
		error = dev->error;
	if (error)
		drop_versions(dev, seq);
	else
		flush_versions(dev, seq);
	return error;
}

static co_fn int powercut_co_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	struct powercut_dev *dev = to_dev(d);
	int r;

	if (dev->power->off)
		return -ESHUTDOWN;
	r = submit(dev, DISK_OP_EXTENT, off, len, 0);
	if (r)
		return r;
	ret->len = media_extent(dev->view, off, len, &ret->hole);
	ret->zero = ret->hole;
	return 0;
}

/* What lay beyond the smaller of the sizes must not show again. */
static void resize_media(const struct powercut_dev *dev, struct media *m, uint64_t size)
{
	uint64_t keep = min(size, dev->size);

	media_zero(m, keep, media_size(m) - keep);
	media_resize(m, align_up(size, dev->unit));
}

static co_fn int powercut_co_resize(struct disk *d, uint64_t size)
{
	struct powercut_dev *dev = to_dev(d);
	int ret = dev->power->off ? -ESHUTDOWN : co_spend(dev, 1 + rng_below(&dev->power->rng, dev->latency_ns));

	if (ret)
		return ret;
	flush_versions(dev, dev->seq);
	resize_media(dev, dev->stable, size);
	resize_media(dev, dev->view, size);
	dev->size = size;
	dev->stable_stamp = dev->stamp = next_stamp(dev);
	return 0;
}

static co_fn int powercut_co_mark_get(struct disk *d, char *buf, size_t size)
{
	struct powercut_dev *dev = to_dev(d);

	if (dev->power->off)
		return -ESHUTDOWN;
	if (dev->config.no_mark)
		return -ENOTSUP;
	if (strlen(dev->mark) >= size)
		return -ENOSPC;
	strcpy(buf, dev->mark);
	return 0;
}

/* (8) */
static co_fn int powercut_co_mark_set(struct disk *d, const char *mark, struct err *err)
{
	struct powercut_dev *dev = to_dev(d);
	int ret;

	if (dev->power->off)
		return -ESHUTDOWN;
	if (dev->config.no_mark)
		return -ENOTSUP;
	dev->new_mark = mark;
	ret = submit(dev, DISK_OP_WRITE, 0, 0, 0);
	if (!ret)
		ret = co_spend(dev, 1 + rng_below(&dev->power->rng, dev->latency_ns));
	dev->new_mark = NULL;
	if (ret)
		return ret;
	strcpy(dev->mark, mark);
	return 0;
}

static co_fn int powercut_co_stamp(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns)
{
	struct powercut_dev *dev = to_dev(d);

	if (dev->power->off)
		return -ESHUTDOWN;
	if (dev->config.no_mark)
		return -ENOTSUP;
	*ret_stamp_ns = dev->stamp;
	*ret_now_ns = max(dev->highest_stamp + 1, rt_wall_ns());
	return dev->stamp + dev->config.stamp_step > rt_wall_ns() && dev->config.stamp_step ? -EAGAIN : 0;
}

static co_fn int powercut_co_identity(struct disk *d, struct disk_identity *ret)
{
	struct powercut_dev *dev = to_dev(d);

	if (dev->power->off)
		return -ESHUTDOWN;
	if (dev->config.no_mark)
		return -ENOTSUP;
	*ret = (struct disk_identity){ { 1, dev->size, dev->stamp, 0 } };
	return 0;
}

/* Counts as a change of the mark: it is stable when it returns, and in flight until then. */
static co_fn int powercut_co_touch(struct disk *d)
{
	struct powercut_dev *dev = to_dev(d);
	int ret;

	if (dev->power->off)
		return -ESHUTDOWN;
	if (dev->config.no_mark)
		return -ENOTSUP;
	ret = submit(dev, DISK_OP_WRITE, 0, 0, 0);
	if (!ret)
		ret = co_spend(dev, 1 + rng_below(&dev->power->rng, dev->latency_ns));
	if (ret)
		return ret;
	dev->opened_stamp = dev->stable_stamp = dev->stamp = next_stamp(dev);
	return 0;
}

void powercut_handle_free(struct handle *h)
{
	list_del(&h->node);
	disk_fini(&h->disk);
	free(h);
}

static co_fn void powercut_co_close(struct disk *d)
{
	powercut_handle_free(container_of(d, struct handle, disk));
}

static const struct disk_ops powercut_ops = {
	.driver = "powercut",
	.co_read = powercut_co_read,
	.co_write = powercut_co_write,
	.co_flush = powercut_co_flush,
	.co_discard = powercut_co_discard,
	.co_zero = powercut_co_zero,
	.co_extent = powercut_co_extent,
	.co_resize = powercut_co_resize,
	.co_mark_get = powercut_co_mark_get,
	.co_mark_set = powercut_co_mark_set,
	.co_stamp = powercut_co_stamp,
	.co_identity = powercut_co_identity,
	.co_touch = powercut_co_touch,
	.co_close = powercut_co_close,
};

int powercut_dev_open(struct powercut_dev *dev, struct disk **ret)
{
	struct handle *h;

	if (dev->power->off)
		return -ESHUTDOWN;
	h = powercut_must(calloc(1, sizeof(*h)));
	if (disk_init(&h->disk, &powercut_ops, dev->name, NULL))
		abort();
	h->dev = dev;
	h->disk.size = dev->size;
	h->disk.limits = (struct disk_limits){
		.align = dev->config.align ? dev->config.align : 512, .mem_align = 1, .atomic_unit = dev->sector,
		.atomic_write = powercut_atomic_write(dev),
		.object = dev->config.object, .opt_depth = dev->config.opt_depth, .sole_writer = dev->config.object != 0,
		.max_io = dev->config.max_io, .discard_gran = dev->config.no_discard ? 0 : dev->sector,
		.discard_zeroes = !dev->config.no_discard && !dev->config.discard_keeps, .fast_zero = !dev->config.no_zero,
		.fua = !dev->config.no_fua, .volatile_cache = !dev->config.write_through, .multi_conn = true,
	};
	list_add_tail(&dev->handles, &h->node);
	*ret = &h->disk;
	return 0;
}

void powercut_dev_poke(struct powercut_dev *dev, uint64_t off, const void *buf, uint64_t len, bool stamp)
{
	uint64_t from = align_down(off, dev->sector), to = align_up(off + len, dev->sector);

	kill_older(dev, UINT64_MAX, from, to - from);
	media_write(dev->stable, off, buf, len);
	media_write(dev->view, off, buf, len);
	if (stamp)
		dev->stable_stamp = dev->stamp = next_stamp(dev);
}

struct powercut_snapshot {
	struct media *media;
	uint64_t size, stamp;
	char mark[DISK_MARK_MAX + 1];
};

struct powercut_snapshot *powercut_dev_snapshot(const struct powercut_dev *dev)
{
	struct powercut_snapshot *snap = powercut_must(calloc(1, sizeof(*snap)));

	snap->media = powercut_must(media_clone(dev->view));
	snap->size = dev->size;
	snap->stamp = dev->stamp;
	strcpy(snap->mark, dev->mark);
	return snap;
}

void powercut_dev_rollback(struct powercut_dev *dev, const struct powercut_snapshot *snap)
{
	powercut_versions_free(dev);
	media_destroy(dev->stable);
	media_destroy(dev->view);
	dev->stable = powercut_must(media_clone(snap->media));
	dev->view = powercut_must(media_clone(snap->media));
	dev->size = snap->size;
	dev->opened_stamp = dev->stable_stamp = dev->stamp = snap->stamp;
	strcpy(dev->mark, snap->mark);
}

void powercut_snapshot_free(struct powercut_snapshot *snap)
{
	if (!snap)
		return;
	media_destroy(snap->media);
	free(snap);
}

void powercut_versions_free(struct powercut_dev *dev)
{
	list_for_each_safe(&dev->versions, n)
		powercut_version_free(dev, container_of(n, struct version, node));
}
