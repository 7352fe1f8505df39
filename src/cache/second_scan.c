/* SPDX-License-Identifier: MIT */
/*
 * Second level of the read cache: the index at start, in the background. What was found is of use at once; nothing is fed until all has been
 * looked at.
 *
 * A change that comes before its block is found leaves a bit in the filter, or for a wide one a word about the whole volume. What is on the device of a
 * volume that counts, and does not get into the index, makes its header dirty.
 */
#include <errno.h>
#include <string.h>

#include "cache/internal.h"
#include "util/log.h"

static struct cache_volume *volume_of_epoch(struct second *s, uint64_t epoch, unsigned *ret_rec)
{
	for (unsigned i = 0; i < SECOND_RECORDS; i++) {
		if (s->sb.rec[i].epoch == epoch && s->vol[i]) {
			*ret_rec = i;
			return s->vol[i];
		}
	}
	return NULL;
}

static void take_entry(struct second *s, uint32_t slot, uint64_t seq, const struct second_entry *e)
{
	unsigned rec;
	struct cache_volume *v = e->dead || e->block >= KEY_BLOCKS ? NULL : volume_of_epoch(s, e->epoch, &rec);
	uint32_t other;
	uint64_t key;

	if (!v)
		return;
	key = second_key(rec, e->block);
	if (v->second.lost || second_is_filtered(s, key) || change_in_flight(v, e->block)) {
		second_mark_dirty(s, slot / s->entries);
		return;
	}
	/* There is no second one, but for a bug; then the newer counts. */
	other = second_find(s, key);
	if (other != SECOND_NONE && s->seq[other / s->entries] > seq) {
		second_mark_dirty(s, slot / s->entries);
		return;
	}
	if (other != SECOND_NONE)
		second_drop(s, other);
	second_insert(s, slot, key, e->crc);
	s->count.kept++;
}

static co_fn int co_scan_segment(struct second *s, uint32_t i)
{
	static struct second_header h;	/* no suspension behind the read */
	int r = co_disk_read(s->dev, second_segment_at(s->sb.segment_size, i), s->scan_buf, SECOND_HEADER, DISK_BACKGROUND);

	if (r < 0)
		return r;
	if (!second_header_decode(s->scan_buf, &s->sb.uuid, i, s->entries, &h))
		return 0;
	s->seq[i] = h.seq;
	if (h.seq > s->last_seq) {
		s->last_seq = h.seq;
		s->head = (i + 1) % s->segments;
	}
	for (uint32_t k = 0; k < h.count; k++)
		take_entry(s, i * s->entries + k, h.seq, &h.entry[k]);
	return 0;
}

co_fn void co_second_scan(void *arg)
{
	struct second *s = arg;
	int r = 0;

	for (; s->scanned < s->segments && !s->stop && !s->off && !r; s->scanned++)
		r = co_scan_segment(s, s->scanned);
	if (r < 0)
		second_fail(s, r, "cannot be read");
	if (s->scanned == s->segments && !s->off)
		s->scanning = false;
	s->running--;
	co_queue_wake_all(&s->idle);
}
