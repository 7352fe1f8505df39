/* SPDX-License-Identifier: MIT */
/*
 * qcow2: copy-on-write.
 *
 * A write into a cluster whose old content is not zeroes (a backing file's, a snapshot's, a compressed one's) goes to a new cluster, which must hold all of
 * the old content around it before anybody may see it on disk. That padding is put off: the guest's data goes to its place in the
 * new cluster at once, and a fill remembers which units of it are there. More writes to the same cluster add to them; a read takes from the fill
 * what is there, and the rest from where the tables still say it is. The padding is read and written when a flush asks, when the fills
 * become too many, when nothing new has been copied for half a second, or never, because the guest has written it all. Then the new cluster is entered in the L2 table.
 *
 *	(none) --write--> open --flush, too many, all there--> padding --> L2 entry --> (none)
 *	                    ^                                     |
 *	                    +------------- an error --------------+
 *
 * So a 4 KiB write costs 4 KiB, whatever the size of a cluster, and many of them into one cluster pay for its copy once; and a cut shows the
 * old cluster or the complete new one. What can be owed is bounded (fill_debt), because a flush has to wait for it.
 *
 * From half of that on a copy that is put off makes another one due: then it is cheaper to copy at once. The first write to a subcluster, or to a cluster
 * without them, is merged: the old content is read, and written together with the guest's data, which is two requests where padding later makes four. A write that
 * begins at its start is not: more may follow, and spare the copy.
 *
 * With extended L2 entries only subclusters that were touched are padded (and those copied that a shared cluster had).
 *
 * Invariants
 *  (1) a bit is set when the write of its unit has returned;
 *  (2) nobody writes into a fill that is being padded: writers wait, and padding waits for the writers that came before;
 *  (3) the L2 entry of a cluster with a fill does not change but by its fill (internal.h, (5));
 *  (4) units of a fill beyond the size of the disk are padded with zeroes;
 *  (5) a subcluster is merged only by the first write to it, and all others wait until that has ended. Nobody wrote to its place before: it was not in the
 *      old cluster, or the cluster is new.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "format/qcow2/internal.h"
#include "rt/buf.h"
#include "util/iov.h"

#define PAD_CHUNK (1u << 20)
#define PAD_RESERVE 65536u
#define MERGE_MAX (128u << 10)	/* more is put off whatever is owed: its bytes cost, and not its requests */
#define FILLERS 8
#define IDLE_NS 500000000ull
#define MAX_FILLS 16384u
#define MIN_FILLS 4u

/* Zeroes that cost nothing until they are used: calloc() writes them under a sanitizer, and where the heap had the memory before. */
void *q2_untouched(size_t len)
{
	void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

void q2_untouched_free(void *p, size_t len)
{
	if (p)
		munmap(p, len);
}

int q2_fills_init(struct qcow2 *q, uint64_t debt)
{
	uint32_t words, buckets = 16;

	q->unit_bits = __builtin_ctz(q->disk.limits.align);
	q->units = q->g.cluster_size >> q->unit_bits;
	words = (q->units + 63) / 64;
	q->fill_cap = max(min(debt >> q->g.cluster_bits, (uint64_t)MAX_FILLS), (uint64_t)MIN_FILLS);
	while (buckets < q->fill_cap)
		buckets *= 2;
	q->fill_mask = buckets - 1;
	list_init(&q->fills);
	list_init(&q->idle_fills);
	co_queue_init(&q->fill_room);
	co_mutex_init(&q->pad_lock);
	q->fill = q2_untouched(q->fill_cap * sizeof(*q->fill));
	q->fill_hash = calloc(buckets, sizeof(*q->fill_hash));
	q->fill_bits = q2_untouched((size_t)q->fill_cap * words * sizeof(*q->fill_bits));
	q->pad_reserve = q2_untouched(PAD_RESERVE);
	return q->fill && q->fill_hash && q->fill_bits && q->pad_reserve ? 0 : -ENOMEM;
}

void q2_fills_fini(struct qcow2 *q)
{
	uint32_t words = (q->units + 63) / 64;

	q2_untouched_free(q->fill, q->fill_cap * sizeof(*q->fill));
	free(q->fill_hash);
	q2_untouched_free(q->fill_bits, (size_t)q->fill_cap * words * sizeof(*q->fill_bits));
	q2_untouched_free(q->pad_reserve, PAD_RESERVE);
}

static uint32_t *bucket(struct qcow2 *q, uint64_t cluster)
{
	return &q->fill_hash[(cluster * 0x9e3779b97f4a7c15ull >> 32) & q->fill_mask];
}

struct q2_fill *q2_fill_find_slow(struct qcow2 *q, uint64_t cluster)
{
	for (uint32_t i = *bucket(q, cluster); i; i = q->fill[i - 1].next)
		if (q->fill[i - 1].cluster == cluster)
			return &q->fill[i - 1];
	return NULL;
}

static bool unit_is_there(const struct q2_fill *f, uint32_t unit)
{
	return f->bits[unit / 64] >> (unit % 64) & 1;
}

/* The end of the run of units, from `unit` on and before `end`, that are all there or all not. */
static uint32_t run_end(const struct q2_fill *f, uint32_t unit, uint32_t end)
{
	bool there = unit_is_there(f, unit);

	for (unit++; unit < end; unit++) {
		uint64_t word = f->bits[unit / 64];

		if (!(unit % 64) && word == (there ? UINT64_MAX : 0) && unit + 64 <= end) {
			unit += 63;
			continue;
		}
		if (unit_is_there(f, unit) != there)
			break;
	}
	return unit;
}

uint64_t q2_fill_run(struct qcow2 *q, const struct q2_fill *f, uint64_t off, uint64_t len, bool *ret_there)
{
	uint32_t pos = off & (q->g.cluster_size - 1);
	uint64_t end = min((uint64_t)pos + len, (uint64_t)q->g.cluster_size);
	uint32_t unit = pos >> q->unit_bits, stop = (end + (1u << q->unit_bits) - 1) >> q->unit_bits;

	*ret_there = unit_is_there(f, unit);
	return min((uint64_t)run_end(f, unit, stop) << q->unit_bits, end) - pos;
}

static void set_bits(struct qcow2 *q, struct q2_fill *f, uint32_t pos, uint64_t len)
{
	for (uint32_t u = pos >> q->unit_bits; u < (pos + len) >> q->unit_bits; u++) {
		f->present += !unit_is_there(f, u);
		f->bits[u / 64] |= 1ull << (u % 64);
	}
}

/* --- Life --- */

static void on_idle(struct rt_timer *t);

/* There is one: who asks has looked at nfills. */
static struct q2_fill *take_idle(struct qcow2 *q)
{
	struct q2_fill *f;

	if (q->fill_used < q->fill_cap) {
		f = &q->fill[q->fill_used];
		f->bits = q->fill_bits + (size_t)q->fill_used++ * ((q->units + 63) / 64);
		co_queue_init(&f->q);
	} else {
		f = list_first(&q->idle_fills, struct q2_fill, node);
		list_del(&f->node);
	}
	return f;
}

static struct q2_fill *fill_new(struct qcow2 *q, uint64_t cluster, uint64_t host, bool own, bool zeroed)
{
	struct q2_fill *f = take_idle(q);
	uint32_t *link = bucket(q, cluster);

	list_add_tail(&q->fills, &f->node);
	memset(f->bits, 0, (q->units + 63) / 64 * sizeof(*f->bits));
	f->cluster = cluster;
	f->host = host;
	f->own = own;
	f->zeroed = zeroed;
	f->present = f->writers = 0;
	f->started = f->merging = 0;
	f->sparse = false;
	f->padding = false;
	f->next = *link;
	*link = f - q->fill + 1;
	q->nfills++;
	q->fills_made++;
	if (!q->idle_timer.heap_pos)
		rt_timer_arm(&q->idle_timer, rt_now_ns() + IDLE_NS, on_idle);
	return f;
}

static void fill_end(struct qcow2 *q, struct q2_fill *f)
{
	uint32_t *link = bucket(q, f->cluster), self = f - q->fill + 1;

	while (*link != self)
		link = &q->fill[*link - 1].next;
	*link = f->next;
	f->cluster = UINT64_MAX;
	list_del(&f->node);
	list_add_tail(&q->idle_fills, &f->node);
	q->nfills--;
	co_queue_wake_all(&f->q);
	co_queue_wake_all(&q->fill_room);
}

/* --- Padding --- */

static enum qcow2_kind old_kind(struct qcow2 *q, struct qcow2_l2e e, uint32_t sub)
{
	return e.entry & QCOW2_COMPRESSED ? QCOW2_COMPRESSED_DATA : q2_kind(q, e, q->g.ext ? sub : 0);
}

static bool sub_touched(const struct qcow2 *q, const struct q2_fill *f, uint32_t sub)
{
	uint32_t units = q->g.sub_size >> q->unit_bits;
	uint32_t first = sub * units;

	if (q->g.sub_size < 1u << q->unit_bits)
		return unit_is_there(f, (sub << q->g.sub_bits) >> q->unit_bits);
	return unit_is_there(f, first) || run_end(f, first, first + units) < first + units;
}

/* Whether the subcluster belongs to the new cluster when the fill is done. */
static bool sub_needed(struct qcow2 *q, const struct q2_fill *f, struct qcow2_l2e e, uint32_t sub)
{
	enum qcow2_kind kind = old_kind(q, e, sub);

	if (!q->g.ext || kind == QCOW2_COMPRESSED_DATA)
		return true;
	if (kind == QCOW2_NORMAL)
		return !f->own;
	return sub_touched(q, f, sub);
}

static co_fn int co_write_gap(struct qcow2 *q, struct q2_fill *f, uint8_t *buf, uint32_t pos, uint32_t len)
{
	/* Zeroes need not be written over zeroes: a sparse backing file makes a sparse image. */
	if (f->zeroed && bytes_are_zero(buf, len))
		return 0;
	/* A data file ends where the guest's disk does, perhaps within a cluster. */
	if (q->has_data_file && f->host + pos + len > q->data->size) {
		if (f->host + pos >= q->data->size)
			return 0;
		len = (uint32_t)(q->data->size - f->host - pos);
	}
	q->count.pad_bytes += len;
	return co_disk_write(q->data, f->host + pos, buf, len, DISK_BACKGROUND);
}

/* Writes what is missing of [pos, pos + len), whose old content is in `buf`. */
static co_fn int co_write_gaps(struct qcow2 *q, struct q2_fill *f, uint8_t *buf, uint32_t pos, uint32_t len)
{
	uint32_t unit = pos >> q->unit_bits, end = (pos + len) >> q->unit_bits, stop;
	int ret = 0;

	for (; unit < end && !ret; unit = stop) {
		stop = run_end(f, unit, end);
		if (!unit_is_there(f, unit))
			ret = co_write_gap(q, f, buf + ((unit << q->unit_bits) - pos), unit << q->unit_bits, (stop - unit) << q->unit_bits);
	}
	return ret;
}

static bool any_gap(struct qcow2 *q, const struct q2_fill *f, uint32_t pos, uint32_t len)
{
	uint32_t unit = pos >> q->unit_bits, end = (pos + len) >> q->unit_bits;

	return !unit_is_there(f, unit) || run_end(f, unit, end) < end;
}

static co_fn int co_pad_range(struct qcow2 *q, struct q2_fill *f, uint8_t *buf, uint32_t size, uint32_t pos, uint32_t end)
{
	int ret = 0;

	for (uint32_t len; pos < end && !ret; pos += len) {
		len = min(size, end - pos);
		if (!any_gap(q, f, pos, len))
			continue;
		ret = co_q2_read_old(q, (f->cluster << q->g.cluster_bits) + pos, buf, len);
		if (!ret)
			ret = co_write_gaps(q, f, buf, pos, len);
	}
	return ret;
}

/* All that was written to is complete, and nothing else has to be. */
static bool owes_nothing(const struct qcow2 *q, const struct q2_fill *f)
{
	uint32_t units = q->g.sub_size >> q->unit_bits, first = 0;

	if (!f->sparse)
		return false;
	for (uint32_t sub = 0; sub < q->g.subs; sub++, first += units)
		if ((f->started >> sub & 1) && (!unit_is_there(f, first) || run_end(f, first, first + units) != first + units))
			return false;
	return true;
}

/* Reads and writes all that the new cluster lacks. */
static co_fn int co_pad(struct qcow2 *q, struct q2_fill *f, struct qcow2_l2e e)
{
	uint32_t size = min(q->g.cluster_size, PAD_CHUNK);
	uint8_t *buf;
	bool reserve;
	int ret = 0;

	if (f->present == q->units || owes_nothing(q, f))
		return 0;
	buf = rt_bufs() ? rt_buf_tryget(rt_bufs(), size) : NULL;
	reserve = !buf;
	if (reserve) {
		co_mutex_lock(&q->pad_lock);
		buf = q->pad_reserve;
		size = min(size, PAD_RESERVE);
	}
	/* Subclusters that are needed and adjacent go together. */
	for (uint32_t sub = 0, next; sub < q->g.subs && !ret; sub = next) {
		bool needed = sub_needed(q, f, e, sub);

		for (next = sub + 1; next < q->g.subs && sub_needed(q, f, e, next) == needed; next++)
			;
		if (needed)
			ret = co_pad_range(q, f, buf, size, sub << q->g.sub_bits, next << q->g.sub_bits);
	}
	if (reserve)
		co_mutex_unlock(&q->pad_lock);
	else
		rt_buf_put(rt_bufs(), buf);
	return ret;
}

static struct qcow2_l2e merged_entry(struct qcow2 *q, const struct q2_fill *f, struct qcow2_l2e old)
{
	struct qcow2_l2e e = { f->host | QCOW2_COPIED, 0 };

	if (!q->g.ext)
		return e;
	if (!(old.entry & QCOW2_COMPRESSED))
		e.bitmap = old.bitmap;
	for (uint32_t sub = 0; sub < q->g.subs; sub++)
		if (sub_needed(q, f, old, sub))
			e.bitmap = (e.bitmap | 1ull << sub) & ~(1ull << (32 + sub));
	return e;
}

static co_fn int co_fill_complete(struct qcow2 *q, struct q2_fill *f)
{
	uint64_t guest = f->cluster << q->g.cluster_bits;
	bool suspended = false;
	struct qcow2_l2e old;
	uint8_t *at;
	uint32_t n;
	int ret;

	f->padding = true;
	while (f->writers)
		co_queue_wait(&f->q, "qcow2: writes into a cluster that is to be padded");
	ret = f->present ? co_q2_l2_own(q, guest, &at, &n, &suspended) : 0;
	if (!f->present) {
		/* Its only write failed. */
		if (!f->own)
			q2_free(q, f->host, 1);
		fill_end(q, f);
		return 0;
	}
	if (!ret) {
		old = qcow2_l2_get(&q->g, at, 0);
		ret = co_pad(q, f, old);
	}
	if (!ret)
		ret = co_q2_l2_own(q, guest, &at, &n, &suspended);
	if (ret) {
		f->padding = false;
		co_queue_wake_all(&f->q);
		return ret;
	}
	old = qcow2_l2_get(&q->g, at, 0);
	if (!f->own)
		q2_free_entry(q, old);
	q2_l2_set(q, at, merged_entry(q, f, old));
	q->barrier = true;
	q->count.filled++;
	fill_end(q, f);
	return 0;
}

/* Finishes it, or waits until whoever does has done so. */
static co_fn int co_finish_one(struct qcow2 *q, struct q2_fill *f)
{
	uint64_t cluster = f->cluster;

	if (!f->padding)
		return co_fill_complete(q, f);
	while (q2_fill_find(q, cluster) == f && f->padding)
		co_queue_wait(&f->q, "qcow2: the padding of a cluster");
	return q2_fill_find(q, cluster) == f ? -EIO : 0;
}

static struct q2_fill *oldest_open(struct qcow2 *q)
{
	list_for_each(&q->fills, node) {
		struct q2_fill *f = container_of(node, struct q2_fill, node);

		if (!f->padding)
			return f;
	}
	return NULL;
}

/* --- In the background --- */

/* Between half and this new copies are merged, and nothing that waits is hurried. */
static uint32_t fillers_from(const struct qcow2 *q)
{
	return q->fill_cap / 4 * 3;
}

static co_fn void co_filler(void *arg)
{
	struct qcow2 *q = arg;
	struct q2_fill *f;

	while ((q->nfills > fillers_from(q) || q->fills_made == q->fills_seen) && !q->disk.failed && (f = oldest_open(q)))
		if (co_fill_complete(q, f))
			break;
	q->fillers--;
	co_queue_wake_all(&q->background);
}

static void start_fillers(struct qcow2 *q)
{
	unsigned want = q->nfills > fillers_from(q) ? FILLERS : q->nfills && q->fills_made == q->fills_seen ? 1 : 0;

	while (q->fillers < want && !co_spawn("qcow2 copy-on-write", co_filler, q))
		q->fillers++;
}

static void on_idle(struct rt_timer *t)
{
	struct qcow2 *q = container_of(t, struct qcow2, idle_timer);

	if (!q->nfills || q->disk.failed)
		return;
	start_fillers(q);
	q->fills_seen = q->fills_made;
	rt_timer_arm(t, rt_now_ns() + IDLE_NS, on_idle);
}

/* --- Writes --- */

/* A fill for the cluster. -EAGAIN: something changed, look again. */
static co_fn int co_fill_open(struct qcow2 *q, uint64_t off, struct q2_fill **ret)
{
	uint64_t cluster = off >> q->g.cluster_bits, host = 0, got;
	struct qcow2_l2e e = { 0, 0 };
	struct q2_fill *f;
	uint8_t *at;
	uint32_t n;
	bool own;
	int r;

	while (q->nfills >= q->fill_cap) {
		f = oldest_open(q);
		if (!f) {
			co_queue_wait(&q->fill_room, "qcow2: copy-on-write that is owed");
			return -EAGAIN;
		}
		r = co_fill_complete(q, f);
		return r ? r : -EAGAIN;
	}
	r = co_q2_l2(q, off, &at, &n);
	if (r)
		return r;
	if (q2_fill_find(q, cluster))
		return -EAGAIN;
	if (at)
		e = qcow2_l2_get(&q->g, at, 0);
	/* It may have got a cluster of its own in the meantime, into which others are writing: it must not be copied. */
	if (!q2_needs_fill(q, e, off))
		return -EAGAIN;
	if (q2_kind(q, e, (off & (q->g.cluster_size - 1)) >> q->g.sub_bits) == QCOW2_INVALID)
		return co_q2_corrupt(q, "the L2 entry of guest offset %llu (%llx) means nothing", (unsigned long long)off, (unsigned long long)e.entry);
	own = q->has_data_file || (q->g.ext && !(e.entry & QCOW2_COMPRESSED) && qcow2_l2_host(e.entry) && (e.entry & QCOW2_COPIED));
	if (q->has_data_file) {
		host = cluster << q->g.cluster_bits;
	} else if (own) {
		host = qcow2_l2_host(e.entry);
		r = co_q2_check_host(q, host, off);
		if (r)
			return r;
	} else {
		host = q2_alloc(q, 1, &got);
		if (!host) {
			r = co_q2_refill(q);
			return r ? r : -EAGAIN;
		}
		q2_refill_ahead(q);
	}
	*ret = fill_new(q, cluster, host, own, !q->has_data_file && (!own || q2_is_fresh(q, host)));
	(*ret)->sparse = q->g.ext && !(e.entry & QCOW2_COMPRESSED) && (own || !(uint32_t)e.bitmap);
	start_fillers(q);
	return 0;
}

/* --- Merging --- */

static bool is_pressed(const struct qcow2 *q)
{
	return q->nfills > q->fill_cap / 2;
}

/* The subclusters that [pos, pos + len) of a cluster touches. */
static uint64_t stretches(const struct qcow2 *q, uint32_t pos, uint64_t len)
{
	return (2ull << ((pos + len - 1) >> q->g.sub_bits)) - (1ull << (pos >> q->g.sub_bits));
}

static bool may_start_merge(struct qcow2 *q, const struct q2_fill *f, uint32_t pos, uint64_t len)
{
	return is_pressed(q) && !q->has_data_file && q->g.sub_size <= MERGE_MAX && !is_aligned(pos, q->g.sub_size) &&
	       pos >> q->g.sub_bits == (pos + len - 1) >> q->g.sub_bits && !(f->started & stretches(q, pos, len));
}

/* Invariant (5). -EAGAIN: the fill has changed, look again. */
static co_fn int co_may_merge(struct qcow2 *q, const struct q2_fill *f, uint64_t off, uint64_t len, bool *ret)
{
	uint32_t pos = off & (q->g.cluster_size - 1), n;
	uint8_t *at;
	int r;

	*ret = may_start_merge(q, f, pos, len);
	if (!*ret || !f->own)
		return 0;
	r = co_q2_l2(q, off, &at, &n);
	if (r)
		return r;
	if (q2_fill_find(q, off >> q->g.cluster_bits) != f || f->padding || !may_start_merge(q, f, pos, len))
		return -EAGAIN;
	*ret = at && old_kind(q, qcow2_l2_get(&q->g, at, 0), pos >> q->g.sub_bits) != QCOW2_NORMAL;
	return 0;
}

/* Writes the whole subcluster, in `buf`. */
static co_fn int co_merge(struct qcow2 *q, struct q2_fill *f, uint8_t *buf, uint32_t pos, uint64_t len, const struct iovec *iov, int niov, uint64_t skip,
			  unsigned flags)
{
	uint32_t size = q->g.sub_size, start = align_down(pos, size), head = pos - start, tail = head + (uint32_t)len;
	struct iovec whole = { buf, size };
	int ret = co_q2_read_old(q, (f->cluster << q->g.cluster_bits) + start, buf, tail == size ? head : size);

	if (ret)
		return ret;
	/* As padding does not write zeroes over zeroes. */
	if (f->zeroed && bytes_are_zero(buf, head) && bytes_are_zero(buf + tail, size - tail))
		return co_q2_write_data(q, f->host + pos, iov, niov, skip, len, flags);
	iov_copy_out(iov, niov, skip, buf + head, len);
	q->count.pad_bytes += size - len;
	return co_q2_write_data(q, f->host + start, &whole, 1, 0, size, flags);
}

static co_fn int co_write_into(struct qcow2 *q, struct q2_fill *f, bool merge, uint32_t pos, uint64_t len, const struct iovec *iov, int niov, uint64_t skip,
			       unsigned flags)
{
	uint64_t mask = stretches(q, pos, len);
	uint8_t *buf = merge && rt_bufs() ? rt_buf_tryget(rt_bufs(), q->g.sub_size) : NULL;
	int ret;

	f->started |= mask;
	f->writers++;
	if (buf) {
		f->merging |= mask;
		ret = co_merge(q, f, buf, pos, len, iov, niov, skip, flags);
		f->merging &= ~mask;
		rt_buf_put(rt_bufs(), buf);
		if (!ret) {
			pos = align_down(pos, q->g.sub_size);
			len = q->g.sub_size;
		}
	} else {
		ret = co_q2_write_data(q, f->host + pos, iov, niov, skip, len, flags);
	}
	f->writers--;
	if (!ret)
		set_bits(q, f, pos, len);
	else
		f->zeroed = false;
	if (buf)
		co_queue_wake_all(&f->q);
	return ret;
}

/* --- Into a fill --- */

co_fn int co_q2_fill_write(struct qcow2 *q, uint64_t off, uint64_t len, const struct iovec *iov, int niov, uint64_t skip, unsigned flags)
{
	uint32_t pos = off & (q->g.cluster_size - 1);
	struct q2_fill *f = q2_fill_find(q, off >> q->g.cluster_bits);
	bool merge;
	int ret;

	if (!f) {
		ret = co_fill_open(q, off, &f);
		if (ret)
			return ret;
	}
	if (f->padding || (f->merging & stretches(q, pos, len))) {
		co_queue_wait(&f->q, "qcow2: the padding of a cluster");
		return -EAGAIN;
	}
	ret = co_may_merge(q, f, off, len, &merge);
	if (ret)
		return ret;
	ret = co_write_into(q, f, merge, pos, len, iov, niov, skip, flags);
	if (f->padding) {
		co_queue_wake_all(&f->q);
		return ret;
	}
	if (!f->writers && (f->present == q->units || !f->present || (is_pressed(q) && owes_nothing(q, f)))) {
		int r = co_fill_complete(q, f);

		ret = ret ? ret : r;
	}
	return ret;
}

/* --- For those who need them done --- */

struct finish {
	struct qcow2 *q;
	uint64_t cluster;
};

static co_fn int co_finish_child(void *arg)
{
	struct finish *x = arg;
	struct q2_fill *f = q2_fill_find(x->q, x->cluster);

	return f ? co_finish_one(x->q, f) : 0;
}

/* The fills that exist now, several at a time; later ones are not waited for. */
static co_fn int co_finish_all(struct qcow2 *q)
{
	int ret = 0;

	for (uint32_t left = q->nfills; left && q->nfills && !ret; ) {
		struct finish one[FILLERS];
		struct co_group group;
		unsigned n = 0;

		co_group_init(&group);
		list_for_each(&q->fills, node) {
			if (n == FILLERS || n == left)
				break;
			one[n++] = (struct finish){ q, container_of(node, struct q2_fill, node)->cluster };
		}
		for (unsigned i = 1; i < n; i++)
			co_group_start(&group, "qcow2 copy-on-write", co_finish_child, &one[i]);
		ret = co_finish_child(&one[0]);
		if (co_group_wait(&group))
			ret = ret ? ret : group.error;
		left -= min(left, n);
	}
	return ret;
}

co_fn int co_q2_fill_finish(struct qcow2 *q, uint64_t off, uint64_t len)
{
	uint64_t first = off >> q->g.cluster_bits;
	int ret = 0;

	if (len == UINT64_MAX)
		return co_finish_all(q);
	while (q->nfills && !ret) {
		struct q2_fill *f = NULL;

		list_for_each(&q->fills, node) {
			struct q2_fill *x = container_of(node, struct q2_fill, node);

			if (x->cluster >= first && x->cluster <= (off + len - 1) >> q->g.cluster_bits) {
				f = x;
				break;
			}
		}
		if (!f)
			break;
		ret = co_finish_one(q, f);
	}
	return ret;
}
