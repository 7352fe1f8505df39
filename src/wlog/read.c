/* SPDX-License-Identifier: MIT */
/*
 * Write log: reads of a volume.
 *
 * A range is looked up piece by piece: fresh records, then the map, then the image. What is in memory is copied at once, so that
 * nothing can change under it; what must be read from the log has its batch pinned; gaps are read from the image.
 */
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "util/crc32c.h"
#include "util/iov.h"
#include "wlog/internal.h"

#define PIECES 24
#define GAP_IOV 64
#define CHUNK_MAX (1u << 20)

/* Reads and verifies the record from one side into *buf (from block `start` of the device on). */
static co_fn int co_read_record(struct wlog *w, int side, const struct wl_batch *b, const struct wl_entry *e, uint64_t start,
				uint8_t **buf, uint64_t span)
{
	int r = co_wl_dev_read(w, side, start, buf, span, span);

	if (r < 0)
		return r;
	return crc32c(0, *buf + (b->pos + e->rec_data - start), e->rec_len) == e->rec_crc ? 0 : -EBADMSG;
}

/* Reads the whole record of `e` from the log, from the first side that has it undamaged, and copies `len` bytes from `off` of the volume on. */
static co_fn int co_fetch(struct wlog *w, const struct wl_entry *e, uint64_t off, uint64_t len, const struct iovec *iov,
			  int niov, uint64_t iov_off)
{
	const struct wl_batch *b = e->batch;
	uint64_t start = align_down(b->pos + e->rec_data, WL_BLOCK);
	uint64_t span = align_up(b->pos + e->rec_data + e->rec_len, WL_BLOCK) - start;
	uint8_t *buf = co_buf_get(rt_bufs(), span);
	unsigned tried = 0;
	int r = -EIO, side;

	while (r < 0 && (side = co_wl_pick_side(w, tried)) >= 0) {
		r = co_read_record(w, side, b, e, start, &buf, span);
		if (r != -ETIMEDOUT)	/* one that hangs is asked again when it has answered */
			tried |= 1u << side;
	}
	if (r == 0)
		iov_copy_in(iov, niov, iov_off, buf + (b->pos + e->data + (off - e->off) - start), len);
	rt_buf_put(rt_bufs(), buf);
	return r;
}

co_fn int co_wl_read_piece(struct wlog *w, struct wl_batch *b, const struct wl_entry *piece, uint64_t off, uint64_t len,
			   uint8_t *dst)
{
	struct wl_entry e = *piece;
	struct iovec iov = { dst, len };

	if (e.type == WL_LOST)
		return -EBADMSG;
	if (e.type != WL_WRITE) {
		memset(dst, 0, len);
		return 0;
	}
	if (b->buf) {
		memcpy(dst, b->buf + e.data + (off - e.off), len);
		return 0;
	}
	b->pins++;
	int r = co_fetch(w, &e, off, len, &iov, 1, 0);

	b->pins--;
	return r;
}

/* What one look at the maps found and could not copy at once. */
struct plan {
	struct {
		uint64_t off, len;
		bool gap;
		struct wl_entry e;	/* a copy; e.batch is pinned */
	} piece[PIECES];
	unsigned n, gaps;
	uint64_t gap_off, gap_end;	/* from the first gap to the last */
};

/* The piece at `off`: its entry (NULL: the image) and where it ends, at most `end`. */
static struct wl_entry *look_up(struct wlog_volume *v, uint64_t off, uint64_t *end)
{
	struct wl_entry *f = wl_map_find(&v->fresh, off);

	if (f && f->off <= off) {
		*end = min(*end, f->off + f->len);
		return f;
	}
	if (f)
		*end = min(*end, f->off);

	struct wl_entry *e = wl_map_find(&v->map, off);

	if (e && e->off <= off) {
		*end = min(*end, e->off + e->len);
		return e;
	}
	if (e)
		*end = min(*end, e->off);
	return NULL;
}

/* Plans [off, end), copying what is in memory. Returns where it stopped: the plan may be full before `end`. */
static uint64_t make_plan(struct wlog_volume *v, uint64_t off, uint64_t end, uint64_t base, const struct iovec *iov, int niov,
			  struct plan *p)
{
	p->n = p->gaps = 0;
	while (off < end && p->n < PIECES) {
		uint64_t stop = end;
		struct wl_entry *e = look_up(v, off, &stop);

		if (e && wl_is_zeroes(e->type)) {
			iov_set(iov, niov, off - base, 0, stop - off);
		} else if (e && e->type == WL_WRITE && e->batch->buf) {
			iov_copy_in(iov, niov, off - base, e->batch->buf + e->data + (off - e->off), stop - off);
		} else {
			p->piece[p->n].off = off;
			p->piece[p->n].len = stop - off;
			p->piece[p->n].gap = !e;
			if (e) {
				p->piece[p->n].e = *e;
				e->batch->pins++;
			} else {
				if (!p->gaps++)
					p->gap_off = off;
				p->gap_end = stop;
			}
			p->n++;
		}
		off = stop;
	}
	return off;
}

static co_fn int co_read_gaps(struct wlog_volume *v, const struct plan *p, uint64_t base, const struct iovec *iov, int niov,
			      unsigned flags)
{
	struct iovec sub[GAP_IOV];
	int nsub = -1;

	v->last_miss_ns = rt_now_ns();
	if (p->gaps == 1)
		nsub = iov_slice(iov, niov, p->gap_off - base, p->gap_end - p->gap_off, sub, GAP_IOV);
	if (nsub > 0)
		return co_disk_readv(v->disk.file, p->gap_off, sub, nsub, flags);

	uint8_t *buf = co_buf_get(rt_bufs(), p->gap_end - p->gap_off);
	int r = co_disk_read(v->disk.file, p->gap_off, buf, p->gap_end - p->gap_off, flags);

	for (unsigned i = 0; i < p->n && r == 0; i++) {
		if (p->piece[i].gap)
			iov_copy_in(iov, niov, p->piece[i].off - base, buf + (p->piece[i].off - p->gap_off),
				    p->piece[i].len);
	}
	rt_buf_put(rt_bufs(), buf);
	return r;
}

void wl_report_damage(struct wlog_volume *v, uint64_t rno, uint64_t off, uint64_t len)
{
	struct wlog *w = v->w;

	if (!v->damaged)
		log_error("%s: write log record %llu of volume %s is damaged: reads of bytes %llu..%llu fail; see `weir log check`",
			  w->dev.disk[0] ? w->dev.disk[0]->name : "log", (unsigned long long)rno, w->sb.vol[v->slot].name,
			  (unsigned long long)off, (unsigned long long)(off + len));
	v->damaged = true;
	v->bad_off = off;
	v->bad_len = len;
}

static co_fn int co_run_plan(struct wlog_volume *v, struct plan *p, uint64_t base, const struct iovec *iov, int niov,
			     unsigned flags)
{
	struct wlog *w = v->w;
	int r = p->gaps ? co_read_gaps(v, p, base, iov, niov, flags) : 0;

	for (unsigned i = 0; i < p->n; i++) {
		struct wl_entry *e = &p->piece[i].e;

		if (p->piece[i].gap)
			continue;
		if (r == 0)
			r = e->type == WL_LOST ? -EBADMSG : co_fetch(w, e, p->piece[i].off, p->piece[i].len, iov, niov, p->piece[i].off - base);
		if (r == -EBADMSG) {
			wl_report_damage(v, e->rno, p->piece[i].off, p->piece[i].len);
			r = -EIO;
		}
		e->batch->pins--;
	}
	wl_advance_tail(w);
	return r;
}

co_fn int co_wl_read(struct wlog_volume *v, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	uint64_t base = off, end = off + len;
	int r = 0;

	if (v->map.entries == 0 && v->fresh.entries == 0)
		return co_disk_readv(v->disk.file, off, iov, niov, flags);
	while (off < end && r == 0) {
		struct plan p;

		off = make_plan(v, off, min(end, off + CHUNK_MAX), base, iov, niov, &p);
		if (p.n)
			r = co_run_plan(v, &p, base, iov, niov, flags);
	}
	return r;
}
