/* SPDX-License-Identifier: MIT */
/*
 * Write log: completing what a killed process left. relic.h has the invariants.
 *
 * First everything is read and verified, then written: batch by batch, in order, each durable before the next, which is invariant (1) of the log. A kill in
 * between is like the first one. `written` follows, so that nothing is left by the time the new generation begins.
 *
 * Nothing is written to a device that is not in the state in which the killed process had it, by its superblock and by the last batch that it wrote, nor beyond
 * where the log may be written: the first batch follows the one that is there, each follows the one before, and none reaches the tail.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "util/crc32c.h"
#include "wlog/internal.h"

struct completion {
	struct wlog *w;
	struct wl_relic_head head;
	struct wl_relic_layout layout;
	uint64_t first, last;	/* batches that are to be written */
	bool cut;		/* the last one is what it was before a group began in it */
	uint64_t nonce;		/* of the batch before */
	uint64_t end;		/* where that one ended on the device */
	uint32_t barrier;	/* the segment that may not be entered: what it holds is needed */
	const char *what;	/* what is wrong */
};

static int bad(struct completion *c, const char *what)
{
	c->what = what;
	return -EBADMSG;
}

static int fetch_slot(struct completion *c, uint64_t seq, struct wl_relic_slot *ret)
{
	return wl_relic_fetch(c->w, WL_BLOCK + seq % c->head.slots * sizeof(*ret), ret, sizeof(*ret));
}

/* --- One batch --- */

static bool is_inside(const struct wlog *w, uint64_t pos)
{
	return pos >= WL_FIRST_SEGMENT && pos < wl_segment_pos(w, w->sb.seg_count) && is_aligned(pos, WL_BLOCK);
}

static int check_place(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint64_t len)
{
	const struct wlog *w = c->w;

	if (!is_inside(w, s->pos))
		return bad(c, "has a place outside the log");
	uint32_t seg = wl_segment_of(w, s->pos), before = c->end > WL_FIRST_SEGMENT ? wl_segment_of(w, c->end - 1) : 0;

	if (len > WL_MAX_BATCH || len > wl_segment_pos(w, seg) + w->sb.seg_size - s->pos)
		return bad(c, "is longer than its segment");
	if ((uint64_t)s->off * WL_BLOCK + len > c->head.mem_size)
		return bad(c, "lies outside the memory");
	if (s->pos != c->end && s->pos != wl_segment_pos(w, (before + 1) % w->sb.seg_count))
		return bad(c, "does not follow the batch before it");
	if (seq == w->sb.tail_seq)	/* the log was empty */
		c->barrier = seg;
	else if (seg != before && seg == c->barrier)
		return bad(c, "lies where the log has what it needs");
	return 0;
}

/* All that has checksums: descriptors, data and index. */
static int check_content(struct completion *c, const struct wl_bhead *h, const uint8_t *p)
{
	const uint8_t *desc = p + wl_batch_desc_off(h);

	if (crc32c(0, p + WL_B_HEADER, h->index_len) != h->index_crc || crc32c(0, desc, h->count * WL_D_SIZE) != h->desc_crc)
		return bad(c, "does not match its checksum");
	for (uint32_t i = 0; i < h->count; i++) {
		struct wl_desc d;

		wl_desc_decode(desc + i * WL_D_SIZE, &d);
		if (!wl_desc_is_sane(&d, h) || (c->w->by_slot[d.volume] && d.off + d.len > align_up(c->w->sb.vol[d.volume].size, 65536)))
			return bad(c, "has an impossible record");
		if (d.type == WL_WRITE && crc32c(0, p + d.data, d.len) != d.crc)
			return bad(c, "has a record that does not match its checksum");
	}
	return 0;
}

static int load_sealed(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint8_t *p, struct wl_bhead *h)
{
	const struct wlog *w = c->w;
	int r = check_place(c, seq, s, s->length);

	if (r == 0 && (s->length < WL_BLOCK || !is_aligned(s->length, WL_BLOCK)))
		r = bad(c, "has an impossible length");
	if (r == 0)
		r = wl_relic_fetch(c->w, c->layout.ring + (uint64_t)s->off * WL_BLOCK, p, s->length);
	if (r < 0)
		return r;
	if (wl_bhead_decode(p, s->length, &w->sb.uuid, h) < 0 || h->length != s->length || h->seq != seq || h->nonce != s->nonce ||
	    h->generation != w->sb.generation || h->segment != wl_segment_of(w, s->pos))
		return bad(c, "has a damaged header");
	if (h->prev != c->nonce)
		return bad(c, "does not name the batch before it");
	return check_content(c, h, p);
}

/* Makes a whole batch of `fill` at `p`, with the descriptors in the buffer `desc`. */
static int seal(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint64_t fill, uint8_t *p, const uint8_t *desc, struct wl_bhead *h)
{
	uint32_t count = wl_relic_count(fill), payload = wl_relic_payload(fill), used = WL_B_HEADER + payload + count * WL_D_SIZE;

	*h = (struct wl_bhead){
		.seq = seq, .generation = c->w->sb.generation, .prev = h->prev, .nonce = rt_rand64(), .wall = rt_wall_ns(),
		.length = align_up(used, WL_BLOCK), .payload = payload, .count = count, .index_len = h->index_len,
		.desc_crc = crc32c(0, desc, count * WL_D_SIZE), .index_crc = h->index_crc,
		.segment = wl_segment_of(c->w, s->pos),
	};
	if (wl_relic_fill(count, payload, h->desc_crc) != fill)
		return bad(c, "has descriptors that do not match their checksum");
	memmove(p + wl_batch_desc_off(h), desc, count * WL_D_SIZE);
	memset(p + used, 0, h->length - used);
	wl_bhead_encode(h, &c->w->sb.uuid, p);
	return check_content(c, h, p);
}

/* The batch that was open, or what one held before a group began in it. */
static int load_open(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint8_t *p, struct wl_bhead *h)
{
	struct wlog *w = c->w;
	uint64_t fill = c->cut ? c->head.group_fill : c->head.fill;
	uint64_t count = wl_relic_count(fill), payload = wl_relic_payload(fill), most = min(w->sb.seg_size, WL_MAX_BATCH);
	int r = 0;

	if (count > WL_MAX_BATCH / WL_D_SIZE || WL_B_HEADER + payload + count * WL_D_SIZE > most)
		return bad(c, "is larger than a batch");
	r = check_place(c, seq, s, align_up(WL_B_HEADER + payload + count * WL_D_SIZE, WL_BLOCK));
	if (r < 0)
		return r;
	if (s->length) {
		/* Sealed since, as a part of the group: its descriptors are behind its data. */
		r = load_sealed(c, seq, s, p, h);
		if (r == 0 && (h->count < count || h->payload < payload || h->index_len > payload))
			r = bad(c, "has fewer records than it had");
		return r < 0 ? r : seal(c, seq, s, fill, p, p + wl_batch_desc_off(h), h);
	}
	if (c->head.open_index > payload || c->head.open_index > WL_MAX_INDEX)
		return bad(c, "has an impossible index");
	if (c->head.open_prev != c->nonce)
		return bad(c, "does not name the batch before it");
	h->index_len = c->head.open_index;
	h->index_crc = c->head.open_index_crc;
	h->prev = c->head.open_prev;
	r = wl_relic_fetch(w, c->layout.ring + (uint64_t)s->off * WL_BLOCK, p, WL_B_HEADER + payload);
	if (r == 0)
		r = wl_relic_fetch(w, c->layout.desc, w->desc, count * WL_D_SIZE);
	return r < 0 ? r : seal(c, seq, s, fill, p, w->desc, h);
}

static int load(struct completion *c, uint64_t seq, uint8_t *p, struct wl_relic_slot *ret, struct wl_bhead *h)
{
	int r = fetch_slot(c, seq, ret);

	c->what = "cannot be read";
	if (r == 0)
		r = seq == c->last && (c->cut || !ret->length) ? load_open(c, seq, ret, p, h) : load_sealed(c, seq, ret, p, h);
	if (r < 0)
		return r;
	if (seq < c->last && !ret->length)
		return bad(c, "is not whole");
	if (seq == c->last && h->flags & WL_B_FLAG_MORE)
		return bad(c, "is the last one, and a part of a request");
	c->nonce = h->nonce;
	c->end = ret->pos + h->length;
	return 0;
}

/* --- Which there are, and for which device --- */

/* From the head alone. Nothing: `first` is above `last`. */
static int find_range(struct completion *c, uint64_t size)
{
	const struct wl_relic_head *h = &c->head;

	c->first = 1;
	c->last = 0;
	if (h->mem_size < WL_MEM_MIN || h->mem_size > 1ull << 40 || !is_aligned(h->mem_size, WL_BLOCK))
		return bad(c, "says an impossible size");
	c->layout = wl_relic_layout(h->mem_size);
	if (h->slots != c->layout.slots || size < c->layout.size)
		return bad(c, "says a size that it does not have");
	if (h->last < h->written || h->last - h->written >= h->slots || h->last == UINT64_MAX)
		return bad(c, "says impossible numbers");
	c->first = h->written + 1;
	c->last = h->last;
	if (h->written == h->last)
		return 0;	/* nothing, or it is in the log since an open that went no further */
	if (h->group_seq && h->group_seq <= h->last) {
		if (h->group_seq <= h->written)
			return bad(c, "says that a group began where it cannot have");
		c->cut = wl_relic_count(h->group_fill) != 0;
		c->last = c->cut ? h->group_seq : h->group_seq - 1;
	} else {
		struct wl_relic_slot s;
		int r = fetch_slot(c, h->last, &s);

		if (r < 0)
			return r;
		c->last -= !s.length && wl_relic_count(h->fill) == 0;	/* opened, and nothing put in */
	}
	return 0;
}

/* Is batch `written` at `pos` of this side? 1: yes, with its length; 0: no; -errno: it cannot be read. */
static co_fn int co_side_has(struct completion *c, unsigned side, const struct wl_relic_slot *s, uint32_t *ret_length)
{
	struct wlog *w = c->w;
	uint8_t *buf = co_buf_get(rt_bufs(), WL_BLOCK);
	uint64_t room = wl_segment_pos(w, wl_segment_of(w, s->pos)) + w->sb.seg_size - s->pos;
	struct wl_bhead h;
	int r = co_wl_dev_read(w, (int)side, s->pos, &buf, WL_BLOCK, WL_BLOCK);

	if (r == 0)
		r = wl_bhead_decode(buf, room, &w->sb.uuid, &h) == 0 && h.seq == c->head.written && h.nonce == s->nonce;
	if (r == 1)
		*ret_length = h.length;
	rt_buf_put(rt_bufs(), buf);
	return r;
}

/* -ESTALE: no side has the last batch that was written. A side that lacks it while the other one has it is out. */
static co_fn int co_check_written(struct completion *c, const struct wl_relic_slot *s)
{
	struct wlog *w = c->w;
	uint32_t length = 0;
	unsigned lack = 0;
	int error = 0;

	for (unsigned side = 0; side < w->dev.n; side++) {
		if (!w->dev.in_sync[side])
			continue;
		int r = co_side_has(c, side, s, &length);

		lack |= r == 0 ? 1u << side : 0;
		error = r < 0 ? r : error;
	}
	if (!length)
		return lack ? -ESTALE : error;
	for (unsigned side = 0; side < w->dev.n; side++) {
		if (!(lack >> side & 1))
			continue;
		log_warn("%s: this side of the log's mirror does not have what a killed server had written to it; it is a copy, or was damaged, and is not used; bring "
			 "it back with `weir log rebuild`", w->dev.disk[side]->name);
		w->dev.in_sync[side] = false;
	}
	c->end = s->pos + length;
	c->nonce = s->nonce;
	return 0;
}

/* Is the device as the killed server had it? -ESTALE: no. Invariant (6). */
static co_fn int co_check_device(struct completion *c)
{
	struct wlog *w = c->w;
	const struct wl_relic_head *h = &c->head;
	struct wl_relic_slot s;

	if (h->super > h->super_next)
		return bad(c, "says impossible numbers");
	if (w->sb.seq < h->super)
		return -ESTALE;
	if (w->sb.seq > h->super_next || w->sb.durable_seq > h->written || w->sb.gen_start > h->written + 1 || w->sb.tail_seq > h->written + 1)
		return bad(c, "is older than the log");
	c->barrier = wl_segment_of(w, w->sb.tail_pos);
	int r = fetch_slot(c, h->written, &s);

	if (r < 0)
		return r;
	if (s.pos)
		return is_inside(w, s.pos) ? co_check_written(c, &s) : bad(c, "has a place outside the log");
	if (w->sb.tail_seq != h->written + 1)
		return bad(c, "does not say where the log ends");
	c->end = w->sb.tail_pos;
	c->nonce = w->sb.tail_prev;
	return 0;
}

/* --- Writing --- */

/* A side that was in sync until now and is not there must not pass for one that has these batches. */
static co_fn int co_tell_missing_sides(struct wlog *w)
{
	for (unsigned i = 0; i < w->dev.n; i++) {
		if (!w->dev.in_sync[i] && w->sb.side_state[i] == WL_SIDE_IN_SYNC)
			return co_wl_checkpoint(w);
	}
	return 0;
}

static int store_written(struct wlog *w, uint64_t seq)
{
	return wl_relic_store64(w, offsetof(struct wl_relic_head, written), seq);
}

static co_fn int co_write_batches(struct completion *c, struct err *err)
{
	struct wlog *w = c->w;
	struct wl_relic_slot s;
	struct wl_bhead h;
	int r = co_tell_missing_sides(w);

	for (uint64_t seq = c->first; seq <= c->last && r == 0; seq++) {
		r = load(c, seq, w->clean_buf, &s, &h);
		if (r == 0)
			r = co_wl_dev_write(w, s.pos, w->clean_buf, h.length);
		/* What is left out stays so: with the last one in the same store, or the next open would not understand what it finds. */
		if (r == 0)
			r = store_written(w, seq == c->last ? c->head.last : seq);
	}
	if (r < 0)
		return err_errno(err, r, "write log: what a killed server had acknowledged and not written yet cannot be written to the log; it stays in %s, and is "
				 "written when the log is opened next", w->relic.path);
	log_info("write log: %llu batches that a killed server had not written yet are in the log now", (unsigned long long)(c->last + 1 - c->first));
	return 0;
}

/* Refused, unless the operator gives it up. */
static int refuse(struct completion *c, int r, uint64_t seq, struct err *err)
{
	struct wlog *w = c->w;

	if (w->config.ignore_damage) {
		log_warn("write log: %s, where a killed server kept what it had not written yet, is %s; it is given up, as was asked for", w->relic.path,
			 r == -ESTALE ? "of another state of the log" : "damaged");
		return 0;
	}
	if (r == -ESTALE)
		return err_set(err, r, "write log: this device is not as the server that was killed on this host had it, whose last writes are in %s: it is a copy, or a side of "
			       "the mirror that was left behind (or its last batch, %llu, was damaged). Name the device that it had, or the other side. To lose them, remove "
			       "the file or say --ignore-damage", w->relic.path, (unsigned long long)c->head.written);
	return err_set(err, r, "write log: %s, where a killed server kept what it had acknowledged and not written yet, is damaged: %s%s. To lose it (guests that were not "
		       "started anew may then hold what the disk does not have), remove the file or say --ignore-damage", w->relic.path, seq ? "a batch " : "it ", c->what);
}

static co_fn int co_complete(struct completion *c, struct err *err)
{
	struct wlog *w = c->w;
	struct completion begin;
	struct wl_relic_slot s;
	struct wl_bhead h = { 0 };
	int r;

	/* Nothing is left, and the next start is not to wonder: of what was left out, and of a batch that was opened only. */
	if (c->first > c->last) {
		r = c->head.written == c->head.last ? 0 : store_written(w, c->head.last);
		return r < 0 ? err_errno(err, r, "write log: %s", w->relic.path) : 0;
	}
	c->what = "cannot be compared with the log";
	r = co_check_device(c);
	if (r < 0)
		return refuse(c, r, 0, err);
	begin = *c;
	for (uint64_t seq = c->first; seq <= c->last; seq++) {
		r = load(c, seq, w->clean_buf, &s, &h);
		if (r < 0)
			return refuse(c, r, seq, err);
	}
	return co_write_batches(&begin, err);
}

/* --- Whose it is --- */

enum verdict { OURS, NOT_USED, REFUSED };

/* Does it belong to the log as it is now? What is not used and holds something is told. */
static enum verdict judge(struct completion *c, bool holds, struct err *err)
{
	struct wlog *w = c->w;
	const struct wl_relic_head *h = &c->head;
	const char *path = w->relic.path, *why = NULL;
	char boot[sizeof(h->boot)];

	wl_relic_boot_id(boot, sizeof(boot));
	if (!uuid_equal(&h->log, &w->sb.uuid)) {
		why = "is of another log";
	} else if (memcmp(h->boot, boot, sizeof(boot))) {
		why = "is from before this machine was started";
	} else if (h->version != WL_RELIC_VERSION) {
		if (!w->config.ignore_damage) {
			err_set(err, -ENOTSUP, "write log: %s was left by a server of another version of weir, which was killed, and may hold its last writes (version %u; this "
				"is %u): start that version once, which takes them from there. To lose them, remove the file or say --ignore-damage", path, h->version,
				WL_RELIC_VERSION);
			return REFUSED;
		}
		why = "is of another version of weir";
	} else if (h->generation > w->sb.generation && holds && !w->config.ignore_damage) {
		/* To go on would leave that server's work to nobody. */
		err_set(err, -ESTALE, "write log: this device is older than the server that was killed on this host, whose last writes are in %s: name the other side of "
			"the mirror, or the device that it had. To lose them, remove the file or say --ignore-damage", path);
		return REFUSED;
	} else if (h->generation != w->sb.generation) {
		why = "is from another time than the log, which was opened elsewhere or restored since";
	} else if (w->sb.flags & WL_SB_FLAG_CLEAN) {
		why = "is older than the log, which was stopped in order since";
	}
	if (why && holds)
		log_warn("write log: %s %s: what it holds is not used. Guests that were not started anew since then may hold what the disk does not have", path, why);
	return why ? NOT_USED : OURS;
}

co_fn int co_wl_relic_complete(struct wlog *w, uint64_t size, struct err *err)
{
	struct completion c = { .w = w };
	int r = size < sizeof(c.head) ? 0 : wl_relic_fetch(w, 0, &c.head, sizeof(c.head));

	if (r < 0)
		return err_errno(err, r, "write log: %s, where a killed server may have left something, cannot be read", w->relic.path);
	if (size < sizeof(c.head) || memcmp(c.head.magic, wl_relic_magic, sizeof(wl_relic_magic)))
		return 0;
	int found = c.head.version == WL_RELIC_VERSION ? find_range(&c, size) : -ENOTSUP;

	switch (judge(&c, found < 0 || c.first <= c.last, err)) {
	case OURS:
		break;
	case NOT_USED:
		return 0;
	case REFUSED:
		return err ? err->code : -ESTALE;
	}
	if (found < 0)
		return refuse(&c, found, 0, err);
	w->relic.completing = true;
	r = co_complete(&c, err);
	w->relic.completing = false;
	return r;
}
