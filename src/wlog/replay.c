/* SPDX-License-Identifier: MIT */
/*
 * Write log: recovery.
 *
 * From the tail that the superblock names, batch by batch: the next one lies right behind the last or at the start of the next segment, has the next number
 * and names its predecessor's nonce. Where the following segment's first batch carries an index of this one, the index is taken instead, so that
 * a gigabyte of dirty log is known after reading some megabytes. Records are applied by the same function as in normal running.
 *
 * Where the chain ends
 *  - at the torn end: nothing valid follows. Normal; what was there had not been acknowledged.
 *  - at damage: the batch had been durable, because the superblock says so, or because a valid batch with a higher number and this generation exists
 *    (invariant 1: it would not have been written otherwise). Refused, unless the operator chose to give up what follows.
 * Data of a batch that a later one proves is not read here: its damage shows when it is read. The last batch has no such witness and is verified.
 * An atomic group whose end is missing is left out: the scan is then done again up to where the group began.
 */
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "util/crc32c.h"
#include "wlog/internal.h"

#define WINDOW (2u << 20)

struct scan {
	struct wlog *w;
	uint64_t pos, seq, prev;	/* where the next batch is expected */
	uint64_t limit;			/* do not take batches from this number on */
	uint64_t group_seq;		/* first batch of the atomic group that is open, 0: none */
	uint32_t seg;
	uint64_t carrier_seq, carrier_nonce; /* header of the batch that carried the last index, 0: none */
	/* the last batch taken */
	uint64_t last_pos;
	uint32_t last_len;
	bool last_verified;
	/* window */
	uint8_t *buf;
	uint64_t win_pos, win_len;
	uint64_t ahead;			/* how much to read with a header: WINDOW while batches are taken one by one */
	int win_side;
	int error;			/* of the device */
	bool gave_up;			/* what follows the chain though it had been durable, as the operator chose */
};

/* `need` bytes at `pos` of one side, reading up to `ahead` with them; NULL if they cannot be read. */
static co_fn const uint8_t *co_read_at(struct scan *s, int side, uint64_t pos, uint64_t need, uint64_t ahead)
{
	struct wlog *w = s->w;
	uint64_t seg_end = wl_segment_pos(w, wl_segment_of(w, pos)) + w->sb.seg_size;
	uint64_t len = min(max(need, ahead), seg_end - pos);

	if (need > len)
		return NULL;
	if (side != s->win_side || pos < s->win_pos || pos + need > s->win_pos + s->win_len) {
		int r = co_wl_dev_read(w, side, pos, &s->buf, WINDOW, len);

		s->win_len = 0;
		if (r < 0 && len > need)	/* what is bad may lie behind it */
			r = co_wl_dev_read(w, side, pos, &s->buf, WINDOW, len = need);
		if (r < 0) {
			s->error = r;
			return NULL;
		}
		s->win_pos = pos;
		s->win_len = len;
		s->win_side = side;
	}
	return s->buf + (pos - s->win_pos);
}

static co_fn const uint8_t *co_window(struct scan *s, int side, uint64_t pos, uint64_t need)
{
	return co_read_at(s, side, pos, need, s->ahead);
}

static bool descs_are_sane(const struct wl_bhead *h, const uint8_t *desc)
{
	for (uint32_t i = 0; i < h->count; i++) {
		struct wl_desc d;

		wl_desc_decode(desc + i * WL_D_SIZE, &d);
		if (!wl_desc_is_sane(&d, h))
			return false;
	}
	return true;
}

/* The checksum over the descriptors, and what it does not say. */
static bool descs_are_good(const struct wl_bhead *h, const uint8_t *desc)
{
	return crc32c(0, desc, h->count * WL_D_SIZE) == h->desc_crc && descs_are_sane(h, desc);
}

static bool payload_is_good(const struct wl_bhead *h, const uint8_t *p)
{
	if (crc32c(0, p + WL_B_HEADER, h->index_len) != h->index_crc)
		return false;
	for (uint32_t i = 0; i < h->count; i++) {
		struct wl_desc d;

		wl_desc_decode(p + wl_batch_desc_off(h) + i * WL_D_SIZE, &d);
		if (d.type == WL_WRITE && crc32c(0, p + d.data, d.len) != d.crc)
			return false;
	}
	return true;
}

enum found { NONE, UNVERIFIED, WHOLE };

/* Is the batch at `pos` the one that is expected there? *ret_desc are its descriptors, until the next read. UNVERIFIED: all but the data is good. */
static co_fn enum found co_batch_at(struct scan *s, int side, uint64_t pos, struct wl_bhead *h, const uint8_t **ret_desc)
{
	struct wlog *w = s->w;
	uint64_t log_end = wl_segment_pos(w, w->sb.seg_count);

	if (pos + WL_BLOCK > log_end)
		return NONE;
	uint64_t room = wl_segment_pos(w, wl_segment_of(w, pos)) + w->sb.seg_size - pos;
	const uint8_t *p = co_window(s, side, pos, WL_BLOCK);

	if (!p || wl_bhead_decode(p, room, &w->sb.uuid, h) < 0)
		return NONE;
	if (h->seq != s->seq || h->prev != s->prev || h->segment != wl_segment_of(w, pos))
		return NONE;
	p = co_window(s, side, pos, h->length);
	if (p) {
		*ret_desc = p + wl_batch_desc_off(h);
		if (!descs_are_good(h, *ret_desc))
			return NONE;
		return payload_is_good(h, p) ? WHOLE : UNVERIFIED;
	}
	/* A sector of it cannot be read: if it is one of the data, the records are known all the same. */
	uint64_t at = align_down(wl_batch_desc_off(h), WL_BLOCK);

	p = co_read_at(s, side, pos + at, h->length - at, 0);
	if (!p)
		return NONE;
	s->error = 0;
	*ret_desc = p + (wl_batch_desc_off(h) - at);
	return descs_are_good(h, *ret_desc) ? UNVERIFIED : NONE;
}

/* Takes the batch that the scan stands at into the list and its records into the maps. */
static int take(struct scan *s, uint64_t pos, const struct wl_bhead *h, const uint8_t *desc)
{
	struct wlog *w = s->w;
	struct wl_batch *b = wl_batch_get(w);

	if (!b)
		return -ENOMEM;
	b->seq = h->seq;
	b->pos = pos;
	b->prev = s->prev;
	b->nonce = h->nonce;
	b->wall = h->wall;
	b->length = h->length;
	b->more = h->flags & WL_B_FLAG_MORE;
	b->written = b->applied = true;
	list_add_tail(&w->batches, &b->node);
	for (uint32_t i = 0; i < h->count; i++) {
		struct wl_desc d;

		wl_desc_decode(desc + i * WL_D_SIZE, &d);
		int r = wl_apply_desc(w, b, &d);

		/* The log may hold more than was live at once: what is in the image, but lies behind the tail. */
		while (r == -ENOSPC && (r = wl_pool_grow(&w->pool, wl_pool_left(&w->pool) + WL_POOL_RESERVE)) == 0)
			r = wl_apply_desc(w, b, &d);
		if (r < 0)
			return r;
	}
	if (b->more && !s->group_seq)
		s->group_seq = b->seq;
	if (!b->more)
		s->group_seq = 0;
	s->last_pos = pos;
	s->last_len = h->length;
	s->seq = h->seq + 1;
	s->prev = h->nonce;
	s->pos = pos + h->length;
	s->seg = wl_segment_of(w, pos);
	if (w->head_seg != s->seg) {
		w->head_seg = s->seg;
		w->index_len = 0;
		w->index_full = false;
	}
	wl_index_add(w, pos, h, desc);
	return 0;
}

/* One batch by its own header. 1: taken; 0: there is none; -errno. */
static co_fn int co_take_one(struct scan *s)
{
	struct wlog *w = s->w;
	uint64_t next = wl_segment_pos(w, (s->seg + 1) % w->sb.seg_count);
	uint64_t place[2] = { s->pos, next };
	struct wl_bhead h;
	const uint8_t *desc;
	uint64_t found_pos = 0;
	int found_side = -1, error = 0, r;

	/* Right behind the last one a position at the segment's end is the next place, or beyond the log. */
	for (unsigned k = 0; k < (next == s->pos ? 1 : 2); k++) {
		int place_error = 0;
		bool readable = false;

		for (unsigned side = 0; side < w->dev.n; side++) {
			if (!w->dev.in_sync[side])
				continue;
			s->error = 0;
			enum found found = co_batch_at(s, side, place[k], &h, &desc);

			readable |= s->error == 0;
			place_error = s->error ? s->error : place_error;
			if (found == NONE)
				continue;
			if (found == WHOLE) {
				s->error = 0;
				s->last_verified = true;
				r = take(s, place[k], &h, desc);
				return r < 0 ? r : 1;
			}
			found_pos = place[k];
			found_side = side;
		}
		if (!readable)
			error = place_error;
	}
	s->error = error;	/* what no side could read may have been a batch */
	if (found_side < 0)
		return 0;
	/* Header and descriptors are good, data is not: the torn end, or damage if something proves the batch durable. */
	if (co_batch_at(s, found_side, found_pos, &h, &desc) == NONE)
		return s->error ? s->error : -EIO;
	s->error = 0;
	s->last_verified = false;
	r = take(s, found_pos, &h, desc);
	return r < 0 ? r : 1;
}

/* Takes the rest of the current segment from the index that the next one carries. 1: done; 0: no usable index; -errno. */
static co_fn int co_take_index(struct scan *s)
{
	struct wlog *w = s->w;
	uint32_t seg = s->seg, next = (seg + 1) % w->sb.seg_count;
	uint64_t next_pos = wl_segment_pos(w, next), seg_pos = wl_segment_pos(w, seg);
	struct wl_bhead h;
	const uint8_t *p = NULL;

	for (unsigned side = 0; side < w->dev.n && !p; side++) {
		if (!w->dev.in_sync[side] || next == wl_segment_of(w, w->sb.tail_pos))
			continue;
		p = co_read_at(s, side, next_pos, WL_BLOCK, 0);
		if (!p || wl_bhead_decode(p, w->sb.seg_size, &w->sb.uuid, &h) < 0 || h.index_len == 0 ||
		    h.seq <= s->seq || h.segment != next || h.seq > s->limit) {
			p = NULL;
			continue;
		}
		/* The index, and not the data behind it. */
		p = co_read_at(s, side, next_pos, align_up(WL_B_HEADER + h.index_len, WL_BLOCK), 0);
		if (p && crc32c(0, p + WL_B_HEADER, h.index_len) != h.index_crc)
			p = NULL;
	}
	if (!p)
		return 0;

	/* First pass: is it the chain that we are on, complete, and within bounds? */
	const uint8_t *index = p + WL_B_HEADER;
	uint64_t seq = 0, nonce = 0, end = 0;
	uint32_t first = UINT32_MAX;

	for (uint32_t at = 0; at < h.index_len;) {
		const uint8_t *e = index + at;

		if (h.index_len - at < WL_I_HEAD)
			return 0;
		struct wl_bhead bh = { .seq = get_le64(e + WL_I_SEQ), .length = get_le32(e + WL_I_LENGTH),
				       .count = get_le32(e + WL_I_COUNT), .payload = get_le32(e + WL_I_PAYLOAD) };
		uint32_t offset = get_le32(e + WL_I_OFFSET);

		if (bh.count > (h.index_len - at - WL_I_HEAD) / WL_D_SIZE || (seq && bh.seq != seq + 1) ||
		    offset < end || (uint64_t)offset + bh.length > w->sb.seg_size || bh.length > WL_MAX_BATCH ||
		    (uint64_t)WL_B_HEADER + bh.payload + (uint64_t)bh.count * WL_D_SIZE > bh.length ||
		    !descs_are_sane(&bh, e + WL_I_HEAD))
			return 0;
		if (bh.seq == s->seq) {
			if (seq ? nonce != s->prev : bh.seq == s->carrier_seq && get_le64(e + WL_I_NONCE) != s->carrier_nonce)
				return 0;
			first = at;
		}
		seq = bh.seq;
		nonce = get_le64(e + WL_I_NONCE);
		end = offset + bh.length;
		at += WL_I_HEAD + bh.count * WL_D_SIZE;
	}
	if (first == UINT32_MAX || seq + 1 != h.seq || nonce != h.prev)
		return 0;
	for (uint32_t at = first; at < h.index_len;) {
		const uint8_t *e = index + at;
		struct wl_bhead bh = { .seq = get_le64(e + WL_I_SEQ), .nonce = get_le64(e + WL_I_NONCE),
				       .wall = get_le64(e + WL_I_WALL), .length = get_le32(e + WL_I_LENGTH),
				       .count = get_le32(e + WL_I_COUNT), .flags = get_le32(e + WL_I_FLAGS),
				       .payload = get_le32(e + WL_I_PAYLOAD) };
		int r = take(s, seg_pos + get_le32(e + WL_I_OFFSET), &bh, e + WL_I_HEAD);

		if (r < 0)
			return r;
		at += WL_I_HEAD + bh.count * WL_D_SIZE;
	}
	s->last_verified = true;	/* proven by the batch that carries the index */
	/* On with the next segment, whose first batch may be in an index, too. */
	s->seg = next;
	s->pos = next_pos;
	s->carrier_seq = h.seq;
	s->carrier_nonce = h.nonce;
	return 1;
}

/* A valid header of this generation with a number above `seq` in [pos, end) of one segment, on a block boundary up to `last`. */
static co_fn bool co_find_header(struct scan *s, int side, uint64_t pos, uint64_t last, uint64_t *ret_seq)
{
	struct wlog *w = s->w;
	uint64_t seg_end = wl_segment_pos(w, wl_segment_of(w, pos)) + w->sb.seg_size;
	struct wl_bhead h;

	for (; pos <= last; pos += WL_BLOCK) {
		const uint8_t *p = co_window(s, side, pos, WL_BLOCK);

		if (p && wl_bhead_decode(p, seg_end - pos, &w->sb.uuid, &h) == 0 && h.seq > s->seq &&
		    h.generation >= w->sb.generation) {
			*ret_seq = h.seq;
			return true;
		}
	}
	return false;
}

/*
 * A batch that is later than the missing one and proves it, anywhere it could be: the missing one lies behind the chain's end or at the start of the
 * next segment, so its successors lie in these two, or begin a later segment.
 */
static co_fn bool co_find_witness(struct scan *s, uint64_t *ret_seq)
{
	struct wlog *w = s->w;
	uint64_t seg_end = wl_segment_pos(w, s->seg) + w->sb.seg_size;
	bool found = false;
	int error = s->error;

	for (unsigned side = 0; side < w->dev.n && !found; side++) {
		if (!w->dev.in_sync[side])
			continue;
		s->ahead = WINDOW;
		if (s->pos < seg_end)	/* not at the end of the segment */
			found = co_find_header(s, side, s->pos, seg_end - WL_BLOCK, ret_seq);
		for (uint32_t i = 1; i < w->sb.seg_count && !found; i++) {
			uint64_t pos = wl_segment_pos(w, (s->seg + i) % w->sb.seg_count);

			s->ahead = i == 1 ? WINDOW : 0;
			found = co_find_header(s, side, pos, i == 1 ? pos + w->sb.seg_size - WL_BLOCK : pos, ret_seq);
		}
	}
	s->error = error;
	return found;
}

/* The chain has ended at s->seq: torn end (0) or damage (-EBADMSG, told)? */
static co_fn int co_judge_end(struct scan *s, struct err *err)
{
	struct wlog *w = s->w;
	uint64_t witness = 0;
	const char *how = NULL;

	if (s->seq <= w->sb.durable_seq || s->seq < w->sb.gen_start) {
		witness = max(w->sb.durable_seq, w->sb.gen_start - 1);
		how = "the superblock";
	} else if (!(w->sb.flags & WL_SB_FLAG_CLEAN) && co_find_witness(s, &witness)) {
		how = "a later batch";
	}
	s->gave_up |= s->error && w->config.ignore_damage;
	if (!how && s->error && !w->config.ignore_damage)
		return err_errno(err, s->error, "write log: byte %llu, where batch %llu is expected, cannot be read on any side; restore the device, or give up "
				 "what follows with --ignore-damage", (unsigned long long)s->pos, (unsigned long long)s->seq);
	if (!how)
		return 0;
	if (w->config.ignore_damage) {
		log_warn("write log: batch %llu at %llu is damaged; giving up what follows it, as was asked for",
			 (unsigned long long)s->seq, (unsigned long long)s->pos);
		s->gave_up = true;
		return 0;
	}
	return err_set(err, -EBADMSG, "write log: batch %llu at byte %llu is damaged, though %s shows that it had been durable (up to batch %llu); "
		       "see `weir log check`, restore the device, or give up what follows with --ignore-damage",
		       (unsigned long long)s->seq, (unsigned long long)s->pos, how, (unsigned long long)witness);
}

static co_fn int co_scan(struct scan *s, struct err *err)
{
	struct wlog *w = s->w;
	bool tried_index = false;
	uint32_t seg = UINT32_MAX;
	int r = 1;

	s->pos = w->sb.tail_pos;
	s->seq = w->sb.tail_seq;
	s->prev = w->sb.tail_prev;
	s->seg = s->pos == wl_segment_pos(w, w->sb.seg_count) ? w->sb.seg_count - 1 : wl_segment_of(w, s->pos);
	if (s->pos > WL_FIRST_SEGMENT && is_aligned(s->pos - WL_FIRST_SEGMENT, w->sb.seg_size))
		s->seg = (uint32_t)((s->pos - WL_FIRST_SEGMENT) / w->sb.seg_size) - 1;
	w->head_seg = s->seg;
	w->index_full = false;
	while (s->seq < s->limit) {
		if (seg != s->seg) {
			seg = s->seg;
			tried_index = false;
			s->ahead = 0;
		}
		if (!tried_index) {
			tried_index = true;
			r = co_take_index(s);
			if (r < 0)
				break;
			if (r > 0)
				continue;
			s->ahead = WINDOW;
		}
		r = co_take_one(s);
		if (r <= 0)
			break;
	}
	if (r < 0)
		return err_errno(err, r, "write log: batch %llu cannot be taken in", (unsigned long long)s->seq);
	return 0;
}

static void forget(struct wlog *w)
{
	list_for_each(&w->volumes, l) {
		struct wlog_volume *v = container_of(l, struct wlog_volume, node);

		wl_map_clear(&v->map, &w->pool);
		wl_fifo_clear(v);
		v->dirty_since = 0;
		v->records = 0;
	}
	while (!list_empty(&w->batches)) {
		struct wl_batch *b = list_first(&w->batches, struct wl_batch, node);

		list_del(&b->node);
		wl_batch_put(w, b);
	}
	w->index_len = 0;
}

/* What is on one side only is brought to all: the last batch may have reached just one. */
static co_fn int co_level_sides(struct scan *s)
{
	struct wlog *w = s->w;

	if (w->dev.n < 2 || s->last_len == 0 || w->config.read_only)
		return 0;
	bool found = false;

	for (unsigned side = 0; side < w->dev.n && !found; side++) {
		struct wl_bhead h;

		if (!w->dev.in_sync[side] || co_wl_dev_read(w, side, s->last_pos, &s->buf, WINDOW, s->last_len) < 0)
			continue;
		if (wl_bhead_decode(s->buf, s->last_len, &w->sb.uuid, &h) == 0 && h.seq == s->seq - 1 &&
		    descs_are_good(&h, s->buf + wl_batch_desc_off(&h)) && payload_is_good(&h, s->buf))
			found = true;
	}
	/* A batch that is whole on no side was proven durable, and has been damaged since: reads tell. */
	return found ? co_wl_dev_write(w, s->last_pos, s->buf, s->last_len) : 0;
}

/* True if a batch that recovery has given up begins at `pos` on some side. */
static co_fn bool co_is_given_up(struct scan *s, uint64_t pos)
{
	struct wlog *w = s->w;
	uint64_t room = wl_segment_pos(w, wl_segment_of(w, pos)) + w->sb.seg_size - pos;
	struct wl_bhead h;

	for (unsigned side = 0; side < w->dev.n; side++) {
		if (w->dev.in_sync[side] && co_wl_dev_read(w, side, pos, &s->buf, WINDOW, WL_BLOCK) == 0 &&
		    wl_bhead_decode(s->buf, room, &w->sb.uuid, &h) == 0 && h.seq >= w->next_seq)
			return true;
	}
	return false;
}

static co_fn int co_wipe_block(struct scan *s, uint64_t pos)
{
	memset(s->buf, 0, WL_BLOCK);
	return co_wl_dev_write(s->w, pos, s->buf, WL_BLOCK);
}

/*
 * Batches of an unfinished group may lie behind the new head, valid but given up. The one at the head must not be taken for the next batch, which may go
 * to the next segment instead and has the same number and predecessor; the segments' first blocks must not be taken for carriers of an index when the
 * numbers come round to them again. From the farthest on, so that a crash in between leaves a state that is found again. (None of them proves anything from
 * now on: their generation is an older one.) Where what had been durable was given up, damage may lie between them, and every segment is looked at.
 */
static co_fn int co_scrub_given_up(struct scan *s)
{
	struct wlog *w = s->w;
	uint32_t n = 0;
	int r = 0;

	if (w->config.read_only)
		return 0;
	while (n + 1 < w->sb.seg_count &&
	       (s->gave_up || co_is_given_up(s, wl_segment_pos(w, (w->head_seg + n + 1) % w->sb.seg_count))))
		n++;
	for (; n > 0 && r == 0; n--) {
		uint64_t pos = wl_segment_pos(w, (w->head_seg + n) % w->sb.seg_count);

		if (co_is_given_up(s, pos))
			r = co_wipe_block(s, pos);
	}
	if (r == 0 && w->head_pos < wl_segment_pos(w, w->head_seg) + w->sb.seg_size && co_is_given_up(s, w->head_pos))
		r = co_wipe_block(s, w->head_pos);
	return r;
}

/* Floors may lie above the numbers that come next when batches were given up; what is below the next number is still in the image. */
static void lower_floors(struct wlog *w)
{
	for (unsigned i = 0; i < w->sb.nvols; i++)
		w->sb.vol[i].floor_seq = min(w->sb.vol[i].floor_seq, w->next_seq);
}

co_fn int co_wl_recover(struct wlog *w, struct err *err)
{
	bool gave_up = false;
	struct scan s = { .w = w, .limit = UINT64_MAX, .win_side = -1 };
	int r;

	s.buf = co_buf_get(rt_bufs(), WINDOW);
	for (;;) {
		r = co_scan(&s, err);
		if (r < 0)
			goto out;
		/* Where a part was left out already, that part's header proves what is the last one now. */
		bool torn = s.limit == UINT64_MAX && s.seq > w->sb.tail_seq && !s.last_verified &&
			    s.seq - 1 > w->sb.durable_seq && s.seq - 1 >= w->sb.gen_start;
		if (s.limit == UINT64_MAX) {
			/* Judged where the chain breaks, before what must not be kept is left out. */
			if (torn) {
				struct scan t = s;

				t.seq = s.seq - 1;
				uint64_t witness;
				if (co_find_witness(&t, &witness) && witness != t.seq)
					torn = false;
				s.buf = t.buf;
				s.win_len = 0;
			}
			if (!torn) {
				r = co_judge_end(&s, err);
				if (r < 0)
					goto out;
				gave_up = s.gave_up;
			}
			s.win_len = 0;
		}
		if (!torn && !s.group_seq)
			break;
		s = (struct scan){ .w = w, .limit = s.group_seq ? s.group_seq : s.seq - 1, .buf = s.buf, .win_side = -1 };
		forget(w);
	}
	s.gave_up = gave_up;
	w->next_seq = s.seq;
	r = wl_pool_grow(&w->pool, WL_POOL_RESERVE);
	if (r < 0)
		goto out;
	lower_floors(w);
	w->last_nonce = s.prev;
	w->head_pos = s.pos;
	w->head_seg = s.seg;
	w->applied_seq = w->durable_seq = w->next_seq - 1;
	w->durable_tail_seg = list_empty(&w->batches) ? w->head_seg :
			      wl_segment_of(w, list_first(&w->batches, struct wl_batch, node)->pos);
	r = co_level_sides(&s);
	if (r == 0)
		r = co_scrub_given_up(&s);
	if (r < 0)
		err_errno(err, r, "write log: its end cannot be put in order");
out:
	rt_buf_put(rt_bufs(), s.buf);
	return r;
}
