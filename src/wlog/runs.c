/* SPDX-License-Identifier: MIT */
/*
 * Write log: runs, the image writes of destage.
 *
 * A run is a range of adjacent pieces of one kind that goes to the image in one write. Its end is where the pieces end, or
 *   - where the store keeps objects, at the next multiple of WL_RUN_MAX, or of an object if it is smaller: no write touches two, and a whole one is a few
 *     large writes that are in flight together (one write for all of it costs Ceph's OSD several times as much, see docs/decisions/047);
 *   - else about WL_RUN_MAX bytes on, at a multiple of what the image likes best, so that no write is cut in the middle of a unit.
 *
 * Where the store keeps objects, and we are the only one who writes to it, a run goes on over small holes: all of it is read, what is dirty is put into it, and all of it is
 * written. Two requests then do what dozens of small writes would have done, each of which costs such a store as much as a write of many times its size.
 *
 * How many at once: WL_DEPTH_USUAL, or as many as the image says it needs (opt_depth). What decides the rate at which small dirty pieces leave the log is not the time that
 * the store takes for one write, but how many are in flight meanwhile. When, and how many of them while the guest works, is pace.c's.
 *
 * Invariants
 *  (1) runs in flight together do not overlap, and belong to one volume; the offset only grows;
 *  (2) what is newer than the round is passed over once: nothing that is not can come up behind `off` meanwhile, since what the cleaner brings forward is in the
 *      map, or in the image, already. Between the look at the map that makes a run and its start nothing suspends;
 *  (3) a chunk of run_mem belongs to one run in flight, or its bit in run_taken is clear;
 *  (4) between the moment when a hole is read and the one when it is written back nobody writes to it: the image has limits.sole_writer, which is us, all that we
 *      write to it are runs, and a run includes its holes, for (1). What the guest writes there meanwhile goes to the log, and stays there for a later round.
 */
#include <assert.h>
#include <errno.h>
#include <sys/mman.h>

#include "util/bytes.h"
#include "wlog/internal.h"

#define PAUSE_MAX_NS 5000000ull
#define CO_SPARE 64u		/* coroutines that stay for requests of guests */
#define KEEP_CHUNKS 16u		/* stay when the destager rests */
#define WALK_MAX 4096u		/* pieces that are looked at before others have a turn */
#define HOLE_MAX (32u << 10)	/* a hole that is filled */
#define HOLES_MIN 3u		/* of them that are worth a read */

static_assert(WL_DEPTH_MAX <= 64, "a bit of run_free for each");
static_assert(WL_RUN_MAX / WL_RUN_CHUNK * 2 <= WL_RUN_CHUNKS, "one run in flight leaves room for the next");

struct run {
	struct wlog_volume *v;
	const struct wl_map *src;
	uint64_t cap_rno;
	uint64_t off, len;
	bool zero, unmap, holes;
	unsigned slot, chunk, chunks;
	int *error;
};

/* --- Places for runs --- */

int wl_runs_init(struct wlog_volume *v)
{
	unsigned depth = v->w->config.destage_parallel;

	if (!depth)
		depth = max(v->disk.file->limits.opt_depth, WL_DEPTH_USUAL);
	v->depth = min(depth, WL_DEPTH_MAX);
	v->run_free = v->depth == 64 ? UINT64_MAX : (1ull << v->depth) - 1;
	v->run_mem = mmap(NULL, WL_RUN_MEM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (v->run_mem == MAP_FAILED) {
		v->run_mem = NULL;
		return -ENOMEM;
	}
	v->run_high = 0;
	budget_join(rt_budget(), &v->run_user, "destage buffers", 0);
	return 0;
}

void wl_runs_fini(struct wlog_volume *v)
{
	munmap(v->run_mem, WL_RUN_MEM);
	budget_leave(&v->run_user);
	v->run_mem = NULL;
}

bool wl_runs_hold_memory(const struct wlog_volume *v)
{
	return v->run_high > KEEP_CHUNKS;
}

void wl_runs_trim(struct wlog_volume *v)
{
	madvise(v->run_mem + KEEP_CHUNKS * WL_RUN_CHUNK, WL_RUN_MEM - KEEP_CHUNKS * WL_RUN_CHUNK, MADV_DONTNEED);
	v->run_high = KEEP_CHUNKS;
	budget_set_held(&v->run_user, (uint64_t)v->run_high * WL_RUN_CHUNK);
}

static bool is_taken(const struct wlog_volume *v, unsigned chunk)
{
	return v->run_taken[chunk / 64] >> (chunk % 64) & 1;
}

static void mark_chunks(struct run *r, bool taken)
{
	for (unsigned i = r->chunk; i < r->chunk + r->chunks; i++) {
		if (taken)
			r->v->run_taken[i / 64] |= 1ull << (i % 64);
		else
			r->v->run_taken[i / 64] &= ~(1ull << (i % 64));
	}
}

/* Memory up to `high` chunks. Refused while another run is in flight, which will end; one there must be. */
static bool reach(struct wlog_volume *v, unsigned high)
{
	uint64_t more = high > v->run_high ? (uint64_t)(high - v->run_high) * WL_RUN_CHUNK : 0;

	if (more && !budget_take(&v->run_user, more)) {
		if (v->runs)
			return false;
		budget_force(&v->run_user, more);
	}
	v->run_high = max(v->run_high, high);
	return true;
}

/* First fit: what is used little stays low. */
static bool take_chunks(struct run *r)
{
	unsigned n = 0;

	r->chunk = 0;
	r->chunks = r->zero ? 0 : (unsigned)((r->len + WL_RUN_CHUNK - 1) / WL_RUN_CHUNK);
	for (unsigned i = 0; n < r->chunks && i < WL_RUN_CHUNKS; i++)
		n = is_taken(r->v, i) ? 0 : (n ? n + 1 : (r->chunk = i, 1));
	if (n < r->chunks || !reach(r->v, r->chunk + r->chunks))
		return false;
	mark_chunks(r, true);
	return true;
}

static bool take_place(struct run *r)
{
	struct wlog_volume *v = r->v;

	if (!wl_may_start_run(v, r->zero ? 0 : r->len) || (v->runs >= WL_DEPTH_USUAL && co_available() < CO_SPARE) || !take_chunks(r))
		return false;
	r->slot = __builtin_ctzll(v->run_free);
	v->run_free &= ~(1ull << r->slot);
	v->runs++;
	v->run_bytes += r->zero ? 0 : r->len;
	return true;
}

static void give_place(struct run *r)
{
	struct wlog_volume *v = r->v;

	mark_chunks(r, false);
	v->run_free |= 1ull << r->slot;
	v->runs--;
	v->run_bytes -= r->zero ? 0 : r->len;
	co_queue_wake_one(&v->run_done);
}

/* --- One run --- */

static void tell_lost(struct wlog_volume *v, uint64_t rno, uint64_t off, uint64_t len)
{
	const struct wlog_config *c = &v->w->config;
	const char *name = v->w->sb.vol[v->slot].name;

	v->lost_bytes += len;
	if (c->on_lost)
		c->on_lost(c->on_lost_arg, name, rno, off, len);
	else
		log_error("volume %s: bytes %llu+%llu are lost: record %llu of the write log is damaged and left out, as was asked for; the image keeps "
			  "what it held there", name, (unsigned long long)off, (unsigned long long)len, (unsigned long long)rno);
}

/* [off, off+len) of record `rno` cannot be had from the log (`error`). 0: the round goes on without it. */
static int leave_out(struct run *r, uint64_t rno, uint64_t off, uint64_t len, int error)
{
	struct wlog_volume *v = r->v;

	if (v->ignore_damage) {
		/* Not where a newer record will follow (ordered destage). */
		for (const struct wl_entry *e = wl_map_find(&v->map, off); e && e->off < off + len; e = wl_map_next(e)) {
			if (e->rno == rno)
				tell_lost(v, rno, max(off, e->off), min(off + len, e->off + e->len) - max(off, e->off));
		}
		return 0;
	}
	v->bad_off = off;
	v->bad_len = len;
	if (error == -EBADMSG)
		return error;
	v->log_unreadable = true;
	if (r->src != &v->map || v->nkept == WL_KEPT_MAX)
		return error;
	v->kept[v->nkept].off = off;
	v->kept[v->nkept++].len = len;
	return 0;
}

/* The image's own bytes with what is dirty put over them, newest durable version each. -errno: nothing was written. */
static co_fn int co_fill_holes(struct run *r, uint8_t *buf)
{
	uint64_t off = r->off, end = r->off + r->len;
	int res = co_disk_read(r->v->disk.file, off, buf, r->len, DISK_BACKGROUND);

	while (res == 0 && off < end) {
		struct wl_entry *e = wl_map_find(r->src, off);

		if (!e || e->off >= end)
			break;
		off = max(off, e->off);
		uint64_t n = min(end, e->off + e->len) - off;

		/* Something newer of another kind: what it covers is left as it is, since that goes to the image later. */
		if (!wl_is_zeroes(e->type))
			res = co_wl_read_piece(r->v->w, e->batch, e, off, n, buf + (off - r->off));
		off += n;
	}
	return res;
}

/* Writes the run's pieces, newest durable version each, in as few writes as holes and what must be left out allow. */
static co_fn int co_write_pieces(struct run *r, uint8_t *buf)
{
	struct wlog_volume *v = r->v;
	struct disk *image = v->disk.file;
	uint64_t off = r->off, end = r->off + r->len, from = off;

	while (off < end) {
		struct wl_entry *e = wl_map_find(r->src, off);
		uint64_t hole = !e || e->off >= end ? end - off : e->off > off ? e->off - off : 0, n = hole, rno = 0;
		int res = -ENODATA;

		if (hole && !r->holes)
			return -EIO;	/* cannot be: pieces leave the map only behind this round */
		if (!hole) {
			n = min(end, e->off + e->len) - off;
			rno = e->rno;
			res = co_wl_read_piece(v->w, e->batch, e, off, n, buf + (off - r->off));
		}
		if (res == 0) {
			off += n;
			if (off < end)
				continue;
		}
		if (res < 0 && !hole && v->whole)
			return leave_out(r, rno, off, n, res);
		int written = off > from ? co_disk_write(image, from, buf + (from - r->off), off - from, DISK_BACKGROUND) : 0;

		if (written == 0 && res < 0 && !hole)
			written = leave_out(r, rno, off, n, res);
		if (written < 0)
			return written;
		off += res < 0 ? n : 0;
		from = off;
	}
	return 0;
}

static co_fn int co_write_data(struct run *r, uint8_t *buf)
{
	/* If anything of it cannot be read, each piece goes its own way. */
	if (r->holes && co_fill_holes(r, buf) == 0)
		return co_disk_write(r->v->disk.file, r->off, buf, r->len, DISK_BACKGROUND);
	return co_write_pieces(r, buf);
}

static co_fn int co_destage_run(void *arg)
{
	struct run *r = arg;
	struct wlog_volume *v = r->v;
	uint64_t start = rt_now_ns();
	int res;

	if (r->zero)
		res = co_disk_zero(v->disk.file, r->off, r->len, DISK_BACKGROUND | (r->unmap ? DISK_UNMAP : 0));
	else
		res = co_write_data(r, v->run_mem + (uint64_t)r->chunk * WL_RUN_CHUNK);
	if (res < 0 && *r->error == 0)
		*r->error = res;
	v->run_ns = rt_now_ns() - start;
	give_place(r);
	return 0;
}

/* --- Many of them --- */

/* Where a run that begins at `off` ends at the latest. */
static uint64_t last_end(const struct disk *image, uint64_t off)
{
	const struct disk_limits *l = &image->limits;

	if (l->object) {
		uint64_t unit = min(l->object, WL_RUN_MAX);

		return align_down(off, unit) + unit;
	}
	return align_down(off + WL_RUN_MAX, is_pow2(l->opt_io) && l->opt_io <= WL_RUN_MAX ? l->opt_io : 1);
}

/* How far a run of writes that begins with the piece `e` can go over holes that are worth filling; else where it ends without. */
static uint64_t end_behind_holes(struct run *r, const struct wl_entry *e, uint64_t end, uint64_t last)
{
	const struct disk_limits *l = &r->v->disk.file->limits;
	uint64_t far = e->off + e->len, data = far - r->off, empty = 0;
	unsigned holes = 0;

	if (!l->sole_writer || !l->object)
		return end;
	for (const struct wl_entry *n = wl_map_next(e); n && n->off < last && !wl_is_zeroes(n->type); n = wl_map_next(n)) {
		uint64_t hole = n->off - far;

		if (hole > HOLE_MAX || empty + hole > data)
			break;
		holes += hole > 0;
		empty += hole;
		data += n->len;
		far = n->off + n->len;
	}
	r->holes = holes >= (r->v->w->config.destage_holes ? r->v->w->config.destage_holes : HOLES_MIN);
	return r->holes ? far : end;
}

/* The first piece at or behind *off that is not newer than the round. NULL: there is none; with *ret_more it is not known yet, and *off is where to go on. */
static const struct wl_entry *find_piece(struct run *r, uint64_t *off, bool *ret_more)
{
	const struct wl_entry *e = wl_map_find(r->src, *off);
	unsigned n = 0;

	for (; e && e->rno > r->cap_rno && n < WALK_MAX; n++)
		e = wl_map_next(e);
	r->v->passed_over += n;
	*ret_more = e && e->rno > r->cap_rno;
	if (e)
		*off = max(*off, e->off);	/* a run ended in the middle of a piece */
	return *ret_more ? NULL : e;
}

/* The run that begins with the piece `e`, at `off`. */
static void make_run(struct run *r, const struct wl_entry *e, uint64_t off)
{
	unsigned left = WALK_MAX;

	r->off = off;
	r->zero = wl_is_zeroes(e->type);
	r->unmap = e->type == WL_DISCARD;

	uint64_t end = e->off + e->len, last = r->zero ? UINT64_MAX : last_end(r->v->disk.file, r->off);

	for (const struct wl_entry *n = wl_map_next(e); end < last && n && left; n = wl_map_next(n), left--) {
		if (n->off != end || n->rno > r->cap_rno || wl_is_zeroes(n->type) != r->zero || (n->type == WL_DISCARD) != r->unmap)
			break;
		end += n->len;
	}
	if (!r->zero && end < last)
		end = end_behind_holes(r, e, end, last);
	r->len = min(end, last) - r->off;
}

/* Beside a guest merged destage stops behind a burst; an epoch is finished. */
static bool is_enough(struct wlog_volume *v, const struct wl_map *src, uint64_t total)
{
	return total >= v->w->config.destage_round || (total && src == &v->map && wl_burst_is_over(v));
}

co_fn int co_wl_write_runs(struct wlog_volume *v, const struct wl_map *src, uint64_t cap_rno, uint64_t off, uint64_t *ret_end, bool *ret_all)
{
	struct run run[WL_DEPTH_MAX];
	struct co_group g;
	uint64_t total = 0;
	int error = 0;
	bool more;

	co_group_init(&g);
	*ret_all = false;
	while (error == 0 && !v->stop && !is_enough(v, src, total)) {
		struct run r = { .v = v, .src = src, .cap_rno = cap_rno, .error = &error };

		const struct wl_entry *e = find_piece(&r, &off, &more);

		if (more) {
			co_yield();
			continue;
		}
		if (!e) {
			*ret_all = true;
			break;
		}
		make_run(&r, e, off);
		if (!take_place(&r)) {
			co_queue_wait(&v->run_done, "destage writes in flight");
			continue;
		}
		off = r.off + r.len;
		total += r.zero ? WL_BLOCK : r.len;
		run[r.slot] = r;
		co_group_start(&g, "destage", co_destage_run, &run[r.slot]);
		if (!wl_is_far(v) && wl_guest_comes_first(v))
			co_sleep_ns(min(v->run_ns + 50000, PAUSE_MAX_NS));
	}
	co_group_wait(&g);
	*ret_end = off;
	return error ? error : v->stop ? -ECANCELED : 0;
}
