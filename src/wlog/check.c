/* SPDX-License-Identifier: MIT */
/*
 * Write log: the offline check and dump.
 *
 * Reads the chain from the tail as recovery does, but every byte of it, from each side by itself, and then looks through the rest of the
 * device for batches that prove damage. It does not share recovery's code on purpose: it is its witness.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"
#include "util/crc32c.h"
#include "util/size.h"
#include "wlog/internal.h"

struct check {
	struct disk *d;
	const struct wl_super *sb;
	bool dump;
	void (*line)(void *arg, const char *text);
	void *arg;
	struct wlog_check_report *rep;
	uint8_t *buf;		/* one batch */
};

static void say(struct check *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void say(struct check *c, const char *fmt, ...)
{
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (c->line)
		c->line(c->arg, text);
}

static uint64_t seg_pos(const struct check *c, uint32_t seg)
{
	return WL_FIRST_SEGMENT + (uint64_t)(seg % c->sb->seg_count) * c->sb->seg_size;
}

static uint32_t seg_of(const struct check *c, uint64_t pos)
{
	return (uint32_t)((pos - WL_FIRST_SEGMENT) / c->sb->seg_size) % c->sb->seg_count;
}

static void dump_super(struct check *c)
{
	const struct wl_super *sb = c->sb;
	char uuid[37], size[16];

	say(c, "superblock  seq %" PRIu64 "  log %s  side %u of %u  %s", sb->seq, uuid_format(&sb->uuid, uuid), sb->side, sb->nsides,
	    sb->flags & WL_SB_FLAG_CLEAN ? "stopped in order" : "not stopped in order");
	say(c, "geometry    %u segments of %s from byte %llu on", sb->seg_count, size_format(sb->seg_size, size),
	    WL_FIRST_SEGMENT);
	say(c, "progress    generation %" PRIu64 " from batch %" PRIu64 "  tail: batch %" PRIu64 " at %" PRIu64 "  durable up to %" PRIu64,
	    sb->generation, sb->gen_start, sb->tail_seq, sb->tail_pos, sb->durable_seq);
	for (unsigned i = 0; i < sb->nvols; i++) {
		const struct wl_volrec *v = &sb->vol[i];

		if (uuid_is_null(&v->uuid))
			continue;
		say(c, "volume %-4u %s  %s  %s  size %" PRIu64 "  generation %" PRIu64 "  floor: batch %" PRIu64 ", epoch %" PRIu64 "  dirty %" PRIu64,
		    i, v->name, uuid_format(&v->uuid, uuid), v->image, v->size, v->generation, v->floor_seq, v->floor_epoch, v->dirty);
	}
}

static const char *type_name(uint8_t type)
{
	return type == WL_WRITE ? "write" : type == WL_ZERO ? "zero" : type == WL_DISCARD ? "discard" :
	       type == WL_LOST ? "lost" : "unknown";
}

/* The batch at pos as it must be: header of number `seq` behind `prev`. */
static co_fn bool co_is_next(struct check *c, uint64_t pos, uint64_t seq, uint64_t prev, struct wl_bhead *h)
{
	if (pos + WL_BLOCK > WL_FIRST_SEGMENT + (uint64_t)c->sb->seg_size * c->sb->seg_count)
		return false;
	uint64_t room = seg_pos(c, seg_of(c, pos)) + c->sb->seg_size - pos;

	return co_disk_read(c->d, pos, c->buf, WL_BLOCK, 0) == 0 && wl_bhead_decode(c->buf, room, &c->sb->uuid, h) == 0 &&
	       h->seq == seq && h->prev == prev && h->segment == seg_of(c, pos) &&
	       co_disk_read(c->d, pos, c->buf, h->length, 0) == 0;
}

/* Every checksum of the batch in c->buf. Returns how many are wrong. */
static unsigned check_batch(struct check *c, uint64_t pos, const struct wl_bhead *h)
{
	const uint8_t *desc = c->buf + wl_batch_desc_off(h);
	unsigned bad = 0;

	if (c->dump)
		say(c, "batch %-8" PRIu64 " at %-12" PRIu64 " %7u bytes  generation %" PRIu64 "  %u records%s%s", h->seq, pos, h->length,
		    h->generation, h->count, h->index_len ? "  index" : "", h->flags & WL_B_FLAG_MORE ? "  more" : "");
	if (crc32c(0, desc, h->count * WL_D_SIZE) != h->desc_crc) {
		say(c, "DAMAGED: batch %" PRIu64 " at byte %" PRIu64 ": descriptors", h->seq, pos);
		return 1;
	}
	if (crc32c(0, c->buf + WL_B_HEADER, h->index_len) != h->index_crc) {
		say(c, "DAMAGED: batch %" PRIu64 " at byte %" PRIu64 ": index of the segment before", h->seq, pos);
		bad++;
	}
	for (uint32_t i = 0; i < h->count; i++) {
		struct wl_desc d;
		bool ok;

		wl_desc_decode(desc + i * WL_D_SIZE, &d);
		ok = wl_desc_is_sane(&d, h) && d.type != WL_LOST && (d.type != WL_WRITE || crc32c(0, c->buf + d.data, d.len) == d.crc);
		if (c->dump)
			say(c, "  record %-8" PRIu64 " volume %-2u epoch %-6" PRIu64 " %-7s %" PRIu64 "+%" PRIu64 "%s%s", d.rno, d.volume, d.epoch,
			    type_name(d.type), d.off, d.len, d.flags & WL_D_FLAG_COPY ? "  copy" : "", ok ? "" : "  DAMAGED");
		if (!ok) {
			const char *vol = d.volume < c->sb->nvols ? c->sb->vol[d.volume].name : "?";

			say(c, "DAMAGED: batch %" PRIu64 " at byte %" PRIu64 ": record %" PRIu64 " of volume %s, bytes %" PRIu64 "+%" PRIu64, h->seq, pos,
			    d.rno, vol, d.off, d.len);
			bad++;
		}
		if (d.type == WL_WRITE)
			c->rep->bytes += d.len;
	}
	c->rep->records += h->count;
	return bad;
}

/* The highest number of this generation anywhere on the device. */
static co_fn uint64_t co_highest(struct check *c)
{
	uint64_t end = WL_FIRST_SEGMENT + (uint64_t)c->sb->seg_size * c->sb->seg_count, highest = 0;

	for (uint64_t pos = WL_FIRST_SEGMENT; pos < end; pos += WL_MAX_BATCH) {
		uint64_t n = min((uint64_t)WL_MAX_BATCH, end - pos);

		if (co_disk_read(c->d, pos, c->buf, n, 0) < 0) {
			say(c, "UNREADABLE: bytes %" PRIu64 "+%" PRIu64, pos, n);
			continue;
		}
		for (uint64_t at = 0; at < n; at += WL_BLOCK) {
			struct wl_bhead h;

			/* Only the header: the batch may end behind this window. */
			if (wl_bhead_decode(c->buf + at, WL_MAX_BATCH, &c->sb->uuid, &h) == 0 && h.generation == c->sb->generation)
				highest = max(highest, h.seq);
		}
	}
	return highest;
}

static co_fn void co_check_chain(struct check *c)
{
	uint64_t pos = c->sb->tail_pos, seq = c->sb->tail_seq, prev = c->sb->tail_prev, group = 0;
	uint32_t seg = pos > WL_FIRST_SEGMENT ? (uint32_t)((pos - 1 - WL_FIRST_SEGMENT) / c->sb->seg_size) : 0;
	unsigned last_bad = 0;
	struct wl_bhead h;

	if (is_aligned(pos - WL_FIRST_SEGMENT, c->sb->seg_size) && co_is_next(c, pos, seq, prev, &h))
		seg = seg_of(c, pos);
	for (;;) {
		uint64_t next = seg_pos(c, seg + 1);

		if (!co_is_next(c, pos, seq, prev, &h)) {
			if (!co_is_next(c, next, seq, prev, &h))
				break;
			pos = next;
		}
		c->rep->damaged += last_bad;
		last_bad = check_batch(c, pos, &h);
		c->rep->batches++;
		group = h.flags & WL_B_FLAG_MORE ? group + h.length : 0;
		seg = seg_of(c, pos);
		pos += h.length;
		prev = h.nonce;
		seq++;
	}
	uint64_t highest = co_highest(c), durable = max(c->sb->durable_seq, c->sb->gen_start - 1);

	if (highest < seq)
		highest = 0;
	if (last_bad && seq - 1 > durable) {
		say(c, "torn end: batch %" PRIu64 " was being written (normal after a crash)", seq - 1);
		c->rep->torn_tail_bytes += h.length;
	} else {
		c->rep->damaged += last_bad;
	}
	if (seq <= durable || highest) {
		say(c, "DAMAGED: batch %" PRIu64 ", expected at byte %" PRIu64 ", is missing though batch %" PRIu64 " shows that it had been durable",
		    seq, pos, max(highest, durable));
		c->rep->damaged++;
	}
	if (group) {
		say(c, "unfinished group of %" PRIu64 " bytes at the end (normal after a crash)", group);
		c->rep->torn_tail_bytes += group;
	}
}

co_fn int co_wlog_check(struct disk *const *dev, int ndev, bool dump, void (*line)(void *arg, const char *text), void *arg,
			struct wlog_check_report *ret, struct err *err)
{
	struct wl_super *sb = malloc(sizeof(*sb));
	uint8_t *buf = co_buf_get(rt_bufs(), WL_MAX_BATCH);
	int r = sb ? 0 : -ENOMEM;

	memset(ret, 0, sizeof(*ret));
	for (int i = 0; i < ndev && r == 0; i++) {
		struct check c = { .d = dev[i], .sb = sb, .dump = dump, .line = line, .arg = arg, .rep = ret, .buf = buf };

		r = co_wl_super_read(dev[i], sb, NULL, err);
		if (r < 0)
			break;
		if (dev[i]->size < sb->dev_size) {
			r = err_set(err, -EINVAL, "%s: has %" PRIu64 " bytes, but its superblock says %" PRIu64 ": it was cut off or is a partial copy; "
				    "restore it whole", dev[i]->name, dev[i]->size, sb->dev_size);
			break;
		}
		if (ndev > 1 || dump)
			say(&c, "%s:", dev[i]->name);
		if (dump)
			dump_super(&c);
		co_check_chain(&c);
	}
	rt_buf_put(rt_bufs(), buf);
	free(sb);
	if (r == 0 && ret->damaged)
		r = err_set(err, -EBADMSG, "%s: %" PRIu64 " damaged place%s in the write log; what is undamaged can still be served", dev[0]->name,
			    ret->damaged, ret->damaged == 1 ? "" : "s");
	return r;
}
