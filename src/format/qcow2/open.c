/* SPDX-License-Identifier: MIT */
/*
 * qcow2: open and close, and what the disk says about itself.
 *
 * Opening reads the header, the L1 table and the refcount table, and writes nothing: autoclear bits are cleared, and the file is rounded up to a cluster, with the first change.
 * So an image that a write log knows by its stamp keeps it until the log writes to it. For the same reason a look at the stamp first settles everything:
 * the reserve is given back and the tables are written, and closing finds nothing left to do. While that depends on requests in flight, which may hang in
 * the backing file, there is no stamp: who asks does not wait for them.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/internal.h"
#include "format/qcow2/tools.h"
#include "util/err.h"
#include "util/log.h"

#define TABLE_CACHE (32ull << 20)
#define RC_BLOCKS 256
#define FILL_DEBT (256ull << 20)
#define RUN_AHEAD (64ull << 20)
#define RUN_AHEAD_CLUSTERS 128ull /* or so many, if they are large: a deep queue takes one with each of its first writes */
#define TIDY_NS 2000000000ull
#define NOTE_MOST (1u << 20)	/* clusters of snapshots' L1 tables that are watched over: no image that is well has as many */

/* --- Close --- */

static co_fn void co_wait_background(struct qcow2 *q)
{
	while (q->refilling || q->fillers || q->tidying)
		co_queue_wait(&q->background, "qcow2: what runs in the background");
}

/* What was freed last is free when the requests that were in flight then have ended. New ones do not count. */
static bool freed_waits(const struct qcow2 *q)
{
	const struct q2_req *oldest = list_first(&q->reqs, struct q2_req, node);

	return q->nfreed && oldest && oldest->seq <= q->freed[(q->freed_at + q->nfreed - 1) % Q2_FREED_MAX].seq;
}

/* Nothing is left to be written afterwards, unless somebody writes meanwhile; -EAGAIN: not while certain requests are in flight. Not within a request. */
static co_fn int co_settle(struct qcow2 *q)
{
	int ret = 0;

	if (q->disk.read_only || !q->header_ready)
		return 0;
	co_wait_background(q);
	if (!q->disk.failed)
		ret = co_q2_flush(&q->disk);
	if (!ret && freed_waits(q))
		return -EAGAIN;
	if (!ret && !q->disk.failed)
		ret = co_q2_release(q, 0);
	return ret;
}

/* For who asks now and then: without writing anything if it is in vain. */
static co_fn int co_settle_if_possible(struct qcow2 *q)
{
	return q->fillers || freed_waits(q) ? -EAGAIN : co_settle(q);
}

static void q2_free_all(struct qcow2 *q)
{
	q2_inflater_destroy(q);
	q2_cache_fini(&q->l2);
	q2_cache_fini(&q->rc);
	q2_fills_fini(q);
	qcow2_header_fini(&q->h);
	free(q->l1);
	free(q->l1_shadow);
	free(q->l1_dirty);
	free(q->rt);
	free(q->meta);
	q2_untouched_free(q->freed, Q2_FREED_MAX * sizeof(*q->freed));
	disk_fini(&q->disk);
	free(q);
}

static co_fn void co_q2_close(struct disk *d)
{
	struct qcow2 *q = q2_of(d);

	rt_timer_cancel(&q->idle_timer);
	q2_tidy_end(q);
	if (co_settle(q) && !q->disk.failed)
		log_warn("%s: could not be closed cleanly; clusters may be leaked (\"weir image check --repair=leaks\" gets them back)", d->name);
	co_wait_background(q);
	co_disk_close(q->backing);
	if (q->data != d->file)
		co_disk_close(q->data);
	co_disk_close(d->file);
	q2_free_all(q);
}

static co_fn int co_q2_stamp(struct disk *d, uint64_t *ret_stamp_ns, uint64_t *ret_now_ns)
{
	int ret = co_settle_if_possible(q2_of(d));

	return ret ? ret : co_disk_stamp(d->file, ret_stamp_ns, ret_now_ns);
}

static co_fn int co_mix_identity(struct disk *file, struct disk_identity *id, int r)
{
	struct disk_identity other;
	int r2 = co_disk_identity(file, &other);

	if (r2 && r2 != -EAGAIN)
		return r2;
	disk_identity_mix(id, &other);
	return r ? r : r2;
}

/* Of all files that it reads from; also if they are still going to change. */
static co_fn int co_q2_identity(struct disk *d, struct disk_identity *ret)
{
	struct qcow2 *q = q2_of(d);
	int r = co_settle_if_possible(q), r2;

	if (r && r != -EAGAIN)
		return r;
	r2 = co_disk_identity(d->file, ret);
	r = r2 ? r2 : r;
	if ((!r || r == -EAGAIN) && q->data != d->file)
		r = co_mix_identity(q->data, ret, r);
	if ((!r || r == -EAGAIN) && q->backing)
		r = co_mix_identity(q->backing, ret, r);
	return r;
}

static co_fn int co_q2_mark_get(struct disk *d, char *buf, size_t size)
{
	return co_disk_mark_get(d->file, buf, size);
}

static void q2_status(struct disk *d, void *arg)
{
	struct qcow2 *q = q2_of(d);
	json_t *obj = arg;

	json_object_set_new(obj, "version", json_integer(q->h.version));
	json_object_set_new(obj, "cluster_size", json_integer(q->g.cluster_size));
	json_object_set_new(obj, "subcluster_size", json_integer(q->g.sub_size));
	json_object_set_new(obj, "refcount_bits", json_integer(1 << q->g.refcount_order));
	json_object_set_new(obj, "backing_file", q->h.backing_file ? json_string(q->h.backing_file) : json_null());
	json_object_set_new(obj, "table_cache", json_integer((json_int_t)q->l2.cap * q->l2.block));
	json_object_set_new(obj, "table_loads", json_integer(q->count.l2_loads));
	json_object_set_new(obj, "table_writes", json_integer(q->count.table_writes));
	json_object_set_new(obj, "writes", json_pack("{sI sI sI}", "in_place", (json_int_t)q->count.in_place, "fresh", (json_int_t)q->count.fresh,
			    "copied", (json_int_t)q->count.filled));
	json_object_set_new(obj, "copied_bytes", json_integer(q->count.pad_bytes));
	json_object_set_new(obj, "copies_owed", json_integer(q->nfills));
	json_object_set_new(obj, "flushes", json_integer(q->count.flushes));
	json_object_set_new(obj, "barriers", json_integer(q->count.barriers));
	json_object_set_new(obj, "clusters_leaked", json_integer(q->count.leaked));
	if (q->backing)
		json_object_set_new(obj, "backing", disk_status(q->backing));
}

static const struct disk_ops qcow2_ops = {
	.driver = "qcow2",
	.co_read = co_q2_read,
	.co_write = co_q2_write,
	.co_flush = co_q2_flush,
	.co_discard = co_q2_discard,
	.co_zero = co_q2_zero,
	.co_extent = co_q2_extent,
	.co_resize = co_q2_resize,
	.co_mark_get = co_q2_mark_get,
	.co_stamp = co_q2_stamp,
	.co_identity = co_q2_identity,
	.co_close = co_q2_close,
	.status = q2_status,
};

/* --- Open --- */

static co_fn int co_read_header(struct qcow2 *q, struct disk *file, const char *name, struct err *err)
{
	uint8_t small[512];
	uint64_t n = min(file->size, (uint64_t)sizeof(small));
	uint8_t *buf;
	uint32_t need;
	int ret = n ? co_disk_read(file, 0, small, n, 0) : 0;

	if (ret)
		return err_errno(err, ret, "%s: its header cannot be read", name);
	ret = qcow2_header_probe(small, n, name, &need, err);
	if (ret)
		return ret;
	n = min(file->size, (uint64_t)need);
	buf = malloc(n);
	if (!buf)
		return err_errno(err, -ENOMEM, "%s", name);
	ret = co_disk_read(file, 0, buf, n, 0);
	if (ret)
		err_errno(err, ret, "%s: its header cannot be read", name);
	else
		ret = qcow2_header_parse(buf, n, name, 0, &q->h, err);
	free(buf);
	q->g = q->h.geo;
	return ret;
}

static int check_bits(struct qcow2 *q, unsigned flags, struct err *err)
{
	if (!(flags & DISK_OPEN_RDWR))
		return 0;
	if (q->h.incompat & QCOW2_INCOMPAT_CORRUPT)
		return err_set(err, -EROFS, "%s: is marked as corrupt and can be opened read-only; repair it with \"weir image check --repair=all\"", q->disk.name);
	return 0;
}

/* An image that was not closed by a program that uses lazy refcounts: they are put right first, as QEMU does. */
static co_fn int co_repair(struct qcow2 *q, struct disk *file, const char *name, struct err *err)
{
	struct qcow2_check c = { .repair = QCOW2_REPAIR_ALL };
	struct qcow2_img img = { 0 };
	int ret;

	log_warn("%s: was not closed by the program that wrote to it with lazy refcounts; they are repaired now, which takes a while", name);
	ret = co_qcow2_img_open(&img, file, name, 0, err);
	if (!ret)
		ret = co_qcow2_check(&img, &c, err);
	qcow2_img_close(&img);
	if (ret)
		return ret;
	if (c.damage > c.damage_fixed)
		return err_set(err, -EUCLEAN, "%s: its refcounts cannot be repaired; \"weir image check\" tells what is wrong; it can be opened read-only", name);
	qcow2_header_fini(&q->h);
	ret = co_read_header(q, file, name, err);
	if (!ret && (q->h.incompat & QCOW2_INCOMPAT_DIRTY))
		ret = err_set(err, -EUCLEAN, "%s: could not be repaired; it can be opened read-only", name);
	return ret;
}

/* The disk that a snapshot holds, in place of the present one. */
static co_fn int co_take_snapshot(struct qcow2 *q, struct disk *file, const char *which, struct err *err)
{
	struct qcow2_img img = { 0 };
	int i, ret = q->disk.read_only ? 0 : err_set(err, -EROFS, "%s: snapshot=%.200s: a snapshot can be opened read-only", q->disk.name, which);

	if (!ret)
		ret = co_qcow2_img_open(&img, file, q->disk.name, 0, err);
	if (!ret)
		ret = co_qcow2_img_read_snapshots(&img, err);
	if (!ret) {
		i = qcow2_snap_find(&img, which);
		if (i < 0)
			ret = err_set(err, -ENOENT, "%s: has no snapshot \"%.200s\"; \"weir image snapshot --list\" tells which there are", q->disk.name, which);
	}
	if (!ret && (img.snap[i].l1_size * 8ull > QCOW2_MAX_L1_BYTES || qcow2_l1_entries(&q->g, img.snap[i].disk_size) * 8 > QCOW2_MAX_L1_BYTES))
		ret = err_set(err, -EFBIG, "%s: the snapshot \"%.200s\" claims a size beyond the limit", q->disk.name, which);
	if (!ret) {
		q->h.l1_off = img.snap[i].l1_off;
		q->h.l1_size = img.snap[i].l1_size;
		q->h.size = img.snap[i].disk_size;
	}
	qcow2_img_close(&img);
	return ret;
}

/* A table that is in memory as a whole. What lies beyond the end of the image is damage. */
static co_fn int co_read_table(struct qcow2 *q, const char *what, uint64_t off, uint64_t bytes, uint64_t room, uint8_t **ret, struct err *err)
{
	int r = 0;

	if (bytes && (off >= q->disk.file->size || bytes > align_up(q->disk.file->size, q->g.cluster_size) - off))
		return err_set(err, -EINVAL, "%s: its %s (%llu bytes at %llu) lies beyond its end at %llu; the image was cut off", q->disk.name, what,
			       (unsigned long long)bytes, (unsigned long long)off, (unsigned long long)q->disk.file->size);
	*ret = calloc(1, max(room, 1ull));
	if (!*ret)
		return err_errno(err, -ENOMEM, "%s: %s", q->disk.name, what);
	if (bytes)
		r = co_q2_read_image(q, off, *ret, bytes);
	return r ? err_errno(err, r, "%s: its %s cannot be read", q->disk.name, what) : 0;
}

static co_fn int co_read_tables(struct qcow2 *q, struct err *err)
{
	uint64_t l1 = (uint64_t)q->h.l1_size * 8, rt = (uint64_t)q->h.rt_clusters << q->g.cluster_bits;
	uint64_t room = align_up(max(l1, 1ull), max(q->g.cluster_size, Q2_L1_CHUNK));
	int ret = co_read_table(q, "L1 table", q->h.l1_off, l1, room, &q->l1, err);

	if (ret || q->disk.read_only)
		return ret;
	q->l1_chunks = room / Q2_L1_CHUNK;
	q->l1_shadow = calloc(1, room);
	q->l1_dirty = calloc((q->l1_chunks + 63) / 64, sizeof(*q->l1_dirty));
	if (!q->l1_shadow || !q->l1_dirty)
		return err_errno(err, -ENOMEM, "%s", q->disk.name);
	q->rt_entries = rt / 8;
	return co_read_table(q, "refcount table", q->h.rt_off, rt, rt, &q->rt, err);
}

/* A table that nobody else may have a part of. */
static int note_table(struct qcow2 *q, uint64_t off, uint64_t clusters)
{
	for (uint64_t i = 0; i < clusters && !q->overlap; i++)
		if (q2_meta_has(q, off + (i << q->g.cluster_bits)))
			q->overlap = off + (i << q->g.cluster_bits);
	return q2_meta_add(q, off, clusters);
}

/* The snapshot table, and the snapshots' L1 tables. */
static co_fn int co_note_snapshots(struct qcow2 *q, struct err *err)
{
	struct err why = ERR_INIT;
	uint64_t room = NOTE_MOST, n;
	struct qcow2_img img;
	int ret = co_qcow2_img_open(&img, q->disk.file, q->disk.name, 0, &why);

	if (!ret)
		ret = co_qcow2_img_read_snapshots(&img, &why);
	if (ret)
		err_set(err, ret, "%.400s; it can be served with --read-only, and \"weir image check\" tells what is damaged", why.msg);
	if (!ret && note_table(q, q->h.snapshots_off, qcow2_clusters(&q->g, img.snap_bytes)))
		ret = err_errno(err, -ENOMEM, "%s: memory for its tables", q->disk.name);
	for (unsigned i = 0; i < img.n_snap && !ret; i++) {
		n = qcow2_clusters(&q->g, (uint64_t)img.snap[i].l1_size * 8);
		if (n > room)
			break;
		room -= n;
		if (note_table(q, img.snap[i].l1_off, n))
			ret = err_errno(err, -ENOMEM, "%s: memory for its tables", q->disk.name);
	}
	qcow2_img_close(&img);
	return ret;
}

/* The L2 tables. Two entries may have one in common if neither claims it for its own. */
static int note_l2(struct qcow2 *q)
{
	uint64_t entry, off;
	int ret = 0;

	for (uint32_t i = 0; i < q->h.l1_size && !q->overlap; i++)
		if ((off = get_be64(q->l1 + (size_t)i * 8) & QCOW2_OFFSET_MASK) && q2_meta_has(q, off))
			q->overlap = off;
	for (uint32_t i = 0; i < q->h.l1_size && !ret; i++) {
		entry = get_be64(q->l1 + (size_t)i * 8);
		off = entry & QCOW2_OFFSET_MASK;
		if (off)
			ret = entry & QCOW2_COPIED ? note_table(q, off, 1) : q2_meta_add(q, off, 1);
	}
	return ret;
}

/* Every cluster that guest data must not be written to. Where two tables are in one place nothing can be written. */
static co_fn int co_note_metadata(struct qcow2 *q, struct err *err)
{
	uint64_t l1 = qcow2_clusters(&q->g, (uint64_t)q->h.l1_size * 8), off;
	int ret = q2_meta_add(q, 0, 1);

	if (!ret)
		ret = note_table(q, q->h.l1_off, l1);
	if (!ret)
		ret = note_table(q, q->h.rt_off, q->h.rt_clusters);
	if (!ret && q->h.nb_snapshots) {
		ret = co_note_snapshots(q, err);
		if (ret)
			return ret;
	}
	for (uint64_t i = 0; i < q->rt_entries && !ret; i++)
		if ((off = get_be64(q->rt + i * 8) & QCOW2_RT_OFFSET_MASK))
			ret = note_table(q, off, 1);
	if (!ret)
		ret = note_l2(q);
	return ret ? err_errno(err, ret, "%s: memory for its tables", q->disk.name) : 0;
}

static void set_limits(struct qcow2 *q)
{
	struct disk_limits *l = &q->disk.limits, *f = &q->disk.file->limits;
	uint32_t align = max(f->align, q->data->limits.align), mem_align = max(f->mem_align, q->data->limits.mem_align);
	uint32_t atomic = max(q->data->limits.atomic_unit, 512u);

	align = max(align, 512u);
	*l = (struct disk_limits){
		/* Also 512: a unit of a fill; and above 1 so that no segment is less. */
		.align = min(align, q->g.sub_size),
		.mem_align = max(mem_align, 8u),
		.atomic_unit = min(atomic, q->g.sub_size),
		.opt_io = q->data->limits.opt_io,
		.opt_depth = q->data->limits.opt_depth,
		/* What is freed at once must fit into the ring. */
		.max_zero = max((uint64_t)1 << 30, (uint64_t)q->g.cluster_size * 1024),
		.discard_gran = f->discard_gran ? q->g.sub_size : 0,
		.fast_zero = q->h.version >= 3 || !q->backing,
		.fua = true,
		.volatile_cache = true,
		.multi_conn = true,
		.rotational = q->data->limits.rotational,
	};
}

static int make_caches(struct qcow2 *q, const struct qcow2_opts *o, struct err *err)
{
	uint32_t block = min(q->g.cluster_size, 4096u);
	uint64_t all = (qcow2_clusters(&q->g, q->h.size) * q->g.l2_entry_size + block - 1) / block + 16;
	uint64_t cap = min((o->table_cache ? o->table_cache : TABLE_CACHE) / block, all + all / 4);
	int ret = q2_cache_init(&q->l2, max(cap, 32ull), block);

	if (!ret && q->g.l2_entry_size == 8)
		ret = q2_dense_init(&q->l2, all, q->g.cluster_bits);
	if (!ret && !q->disk.read_only)
		ret = q2_cache_init(&q->rc, RC_BLOCKS, block);
	if (!ret && !q->disk.read_only) {
		q->freed = q2_untouched(Q2_FREED_MAX * sizeof(*q->freed));
		ret = q->freed ? q2_fills_init(q, o->fill_debt ? o->fill_debt : FILL_DEBT) : -ENOMEM;
	}
	return ret ? err_errno(err, ret, "%s: memory for its tables", q->disk.name) : 0;
}

static co_fn int co_open(struct qcow2 *q, const struct qcow2_opts *o, unsigned flags, struct err *err)
{
	uint64_t ahead = o->run_ahead ? o->run_ahead : max(RUN_AHEAD, RUN_AHEAD_CLUSTERS << q->g.cluster_bits);
	int ret = check_bits(q, flags, err);

	if (!ret)
		ret = co_read_tables(q, err);
	if (!ret)
		ret = co_q2_open_others(q, o, flags, err);
	if (ret)
		return ret;
	set_limits(q);
	ret = make_caches(q, o, err);
	if (ret || q->disk.read_only)
		return ret;
	q->run_ahead = min(ahead, max(q->h.size / 8, 16ull << q->g.cluster_bits));
	q->tidy_ns = o->tidy_ns ? o->tidy_ns : TIDY_NS;
	q->growable = true;
	ret = co_note_metadata(q, err);
	if (ret)
		return ret;
	ret = co_q2_find_frontier(q);
	return ret ? err_set(err, ret, "%s: its refcounts cannot be read; repair it with \"weir image check --repair=all\", or open it read-only", q->disk.name) : 0;
}

co_fn int co_qcow2_open(struct disk *file, const char *name, const struct qcow2_opts *o, unsigned flags, struct disk **ret, struct err *err)
{
	struct qcow2 *q = calloc(1, sizeof(*q));
	int r = q ? disk_init(&q->disk, &qcow2_ops, name, file) : -ENOMEM;

	if (r) {
		free(q);
		return err_errno(err, r, "%s", name);
	}
	q->meta_gen = q->durable_gen = 1;
	q->data = file;
	q->disk.read_only = !(flags & DISK_OPEN_RDWR) || file->read_only;
	list_init(&q->reqs);
	co_mutex_init(&q->header_lock);
	co_mutex_init(&q->alloc_lock);
	co_mutex_init(&q->flush_lock);
	co_mutex_init(&q->table_lock);
	co_queue_init(&q->background);
	co_queue_init(&q->freed_room);
	r = co_read_header(q, file, name, err);
	if (!r && !q->disk.read_only && (q->h.incompat & (QCOW2_INCOMPAT_DIRTY | QCOW2_INCOMPAT_CORRUPT)) == QCOW2_INCOMPAT_DIRTY)
		r = co_repair(q, file, name, err);
	if (!r) {
		q->has_data_file = q->h.incompat & QCOW2_INCOMPAT_DATA_FILE;
		q->raw_data_file = q->has_data_file && (q->h.autoclear & QCOW2_AUTOCLEAR_DATA_FILE_RAW);
		if (o->snapshot)
			r = co_take_snapshot(q, file, o->snapshot, err);
		q->disk.size = q->h.size;
		if (!r)
			r = co_open(q, o, flags, err);
	}
	if (r) {
		if (q->backing != o->backing)
			co_disk_close(q->backing);
		if (q->data != file)
			co_disk_close(q->data);
		q2_free_all(q);
		return r;
	}
	*ret = &q->disk;
	return 0;
}
