/* SPDX-License-Identifier: MIT */
/*
 * Write log: encoding and decoding of the on-disk format.
 */
#include "wlog/format.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "util/bytes.h"
#include "util/crc32c.h"
#include "util/err.h"

static const char sb_magic[8] = { 'W', 'E', 'I', 'R', 'W', 'L', 'O', 'G' };

static_assert(WL_SB_VOLUMES + WLOG_MAX_VOLUMES * WL_VOL_ENTRY <= WL_SB_SLOT, "the table fits its slot");
static_assert(WL_SB_SLOTS * WL_SB_SLOT <= WL_FIRST_SEGMENT, "the slots fit before the segments");
static_assert(WL_SB_SIDE_STATE == WL_SB_SIDE_UUID + 16 * WLOG_MAX_DEVICES, "sides do not overlap");
static_assert(WL_VOL_IMAGE == WL_VOL_NAME + WLOG_NAME_MAX + 1, "name and image do not overlap");
static_assert(WL_B_UUID + 16 <= WL_B_HEADER, "the header holds its fields");
static_assert(WL_D_EPOCH + 8 == WL_D_SIZE, "a descriptor has no gap at its end");

static void vol_encode(const struct wl_volrec *v, uint8_t *p)
{
	memcpy(p + WL_VOL_UUID, v->uuid.b, 16);
	memcpy(p + WL_VOL_NAME, v->name, sizeof(v->name));
	memcpy(p + WL_VOL_IMAGE, v->image, sizeof(v->image));
	put_le64(p + WL_VOL_SIZE, v->size);
	put_le64(p + WL_VOL_QUOTA, v->quota);
	put_le64(p + WL_VOL_GENERATION, v->generation);
	put_le64(p + WL_VOL_FLOOR_SEQ, v->floor_seq);
	put_le64(p + WL_VOL_FLOOR_EPOCH, v->floor_epoch);
	put_le64(p + WL_VOL_EPOCH, v->epoch);
	put_le64(p + WL_VOL_RNO, v->rno);
	put_le64(p + WL_VOL_STAMP, v->stamp);
	put_le64(p + WL_VOL_STAMP_WALL, v->stamp_wall);
	put_le32(p + WL_VOL_FLAGS, v->flags);
	put_le64(p + WL_VOL_DIRTY, v->dirty);
	put_le64(p + WL_VOL_DIRTY_SINCE, v->dirty_since);
}

static void vol_decode(const uint8_t *p, struct wl_volrec *v)
{
	memcpy(v->uuid.b, p + WL_VOL_UUID, 16);
	memcpy(v->name, p + WL_VOL_NAME, sizeof(v->name));
	v->name[sizeof(v->name) - 1] = 0;
	memcpy(v->image, p + WL_VOL_IMAGE, sizeof(v->image));
	v->image[sizeof(v->image) - 1] = 0;
	v->size = get_le64(p + WL_VOL_SIZE);
	v->quota = get_le64(p + WL_VOL_QUOTA);
	v->generation = get_le64(p + WL_VOL_GENERATION);
	v->floor_seq = get_le64(p + WL_VOL_FLOOR_SEQ);
	v->floor_epoch = get_le64(p + WL_VOL_FLOOR_EPOCH);
	v->epoch = get_le64(p + WL_VOL_EPOCH);
	v->rno = get_le64(p + WL_VOL_RNO);
	v->stamp = get_le64(p + WL_VOL_STAMP);
	v->stamp_wall = get_le64(p + WL_VOL_STAMP_WALL);
	v->flags = get_le32(p + WL_VOL_FLAGS);
	v->dirty = get_le64(p + WL_VOL_DIRTY);
	v->dirty_since = get_le64(p + WL_VOL_DIRTY_SINCE);
}

void wl_super_encode(const struct wl_super *sb, uint8_t *slot)
{
	memset(slot, 0, WL_SB_SLOT);
	memcpy(slot + WL_SB_MAGIC, sb_magic, 8);
	put_le32(slot + WL_SB_VERSION, WL_VERSION);
	put_le64(slot + WL_SB_INCOMPAT, sb->incompat);
	put_le64(slot + WL_SB_COMPAT, sb->compat);
	memcpy(slot + WL_SB_UUID, sb->uuid.b, 16);
	put_le64(slot + WL_SB_SEQ, sb->seq);
	put_le64(slot + WL_SB_DEV_SIZE, sb->dev_size);
	put_le32(slot + WL_SB_SEG_SIZE, sb->seg_size);
	put_le32(slot + WL_SB_SEG_COUNT, sb->seg_count);
	put_le32(slot + WL_SB_FLAGS, sb->flags);
	put_le32(slot + WL_SB_NVOLS, sb->nvols);
	put_le64(slot + WL_SB_GENERATION, sb->generation);
	put_le64(slot + WL_SB_GEN_START, sb->gen_start);
	put_le64(slot + WL_SB_TAIL_SEQ, sb->tail_seq);
	put_le64(slot + WL_SB_TAIL_POS, sb->tail_pos);
	put_le64(slot + WL_SB_TAIL_PREV, sb->tail_prev);
	put_le64(slot + WL_SB_DURABLE_SEQ, sb->durable_seq);
	put_le64(slot + WL_SB_WALL, sb->wall);
	put_le32(slot + WL_SB_NSIDES, sb->nsides);
	put_le32(slot + WL_SB_SIDE, sb->side);
	for (unsigned i = 0; i < WLOG_MAX_DEVICES; i++) {
		memcpy(slot + WL_SB_SIDE_UUID + 16 * i, sb->side_uuid[i].b, 16);
		put_le32(slot + WL_SB_SIDE_STATE + 4 * i, sb->side_state[i]);
	}
	for (unsigned i = 0; i < sb->nvols; i++)
		vol_encode(&sb->vol[i], slot + WL_SB_VOLUMES + i * WL_VOL_ENTRY);
	put_le32(slot + WL_SB_CRC, crc32c(0, slot, WL_SB_SLOT));
}

static uint32_t slot_crc(const uint8_t *slot)
{
	static const uint8_t zero[4];
	uint32_t crc = crc32c(0, slot, WL_SB_CRC);

	crc = crc32c(crc, zero, 4);
	return crc32c(crc, slot + WL_SB_CRC + 4, WL_SB_SLOT - WL_SB_CRC - 4);
}

/* What the checksum does not say: that the numbers fit together. */
static int super_check(const struct wl_super *sb, struct err *err)
{
	uint64_t end = WL_FIRST_SEGMENT + (uint64_t)sb->seg_size * sb->seg_count;

	if (!is_pow2(sb->seg_size) || sb->seg_size < WL_SEGMENT_MIN || sb->seg_size > WL_SEGMENT_MAX ||
	    sb->seg_count < WL_MIN_SEGMENTS || end > sb->dev_size)
		return err_set(err, -EBADMSG, "the superblock's geometry is impossible (%u segments of %u bytes on %llu)",
			       sb->seg_count, sb->seg_size, (unsigned long long)sb->dev_size);
	if (sb->nvols > WLOG_MAX_VOLUMES || sb->nsides < 1 || sb->nsides > WLOG_MAX_DEVICES || sb->side >= sb->nsides)
		return err_set(err, -EBADMSG, "the superblock counts %u volumes and side %u of %u", sb->nvols, sb->side,
			       sb->nsides);
	if (sb->tail_pos < WL_FIRST_SEGMENT || sb->tail_pos > end || !is_aligned(sb->tail_pos, WL_BLOCK) ||
	    sb->tail_seq == 0)
		return err_set(err, -EBADMSG, "the superblock's tail (batch %llu at %llu) is outside the log",
			       (unsigned long long)sb->tail_seq, (unsigned long long)sb->tail_pos);
	return 0;
}

int wl_super_decode(const uint8_t *slot, struct wl_super *sb, struct err *err)
{
	uint32_t version = get_le32(slot + WL_SB_VERSION);

	if (memcmp(slot + WL_SB_MAGIC, sb_magic, 8))
		return err_set(err, -EINVAL, "no write log here");
	if (get_le32(slot + WL_SB_CRC) != slot_crc(slot))
		return err_set(err, -EBADMSG, "the superblock's checksum does not match");
	if (version != WL_VERSION)
		return err_set(err, -ENOTSUP, "write log version %u; this weir reads version %u", version, WL_VERSION);

	memset(sb, 0, sizeof(*sb));
	sb->incompat = get_le64(slot + WL_SB_INCOMPAT);
	sb->compat = get_le64(slot + WL_SB_COMPAT);
	if (sb->incompat)
		return err_set(err, -ENOTSUP, "the write log needs feature bits %#llx, which this weir does not know",
			       (unsigned long long)sb->incompat);
	memcpy(sb->uuid.b, slot + WL_SB_UUID, 16);
	sb->seq = get_le64(slot + WL_SB_SEQ);
	sb->dev_size = get_le64(slot + WL_SB_DEV_SIZE);
	sb->seg_size = get_le32(slot + WL_SB_SEG_SIZE);
	sb->seg_count = get_le32(slot + WL_SB_SEG_COUNT);
	sb->flags = get_le32(slot + WL_SB_FLAGS);
	sb->nvols = get_le32(slot + WL_SB_NVOLS);
	sb->generation = get_le64(slot + WL_SB_GENERATION);
	sb->gen_start = get_le64(slot + WL_SB_GEN_START);
	sb->tail_seq = get_le64(slot + WL_SB_TAIL_SEQ);
	sb->tail_pos = get_le64(slot + WL_SB_TAIL_POS);
	sb->tail_prev = get_le64(slot + WL_SB_TAIL_PREV);
	sb->durable_seq = get_le64(slot + WL_SB_DURABLE_SEQ);
	sb->wall = get_le64(slot + WL_SB_WALL);
	sb->nsides = get_le32(slot + WL_SB_NSIDES);
	sb->side = get_le32(slot + WL_SB_SIDE);
	for (unsigned i = 0; i < WLOG_MAX_DEVICES; i++) {
		memcpy(sb->side_uuid[i].b, slot + WL_SB_SIDE_UUID + 16 * i, 16);
		sb->side_state[i] = get_le32(slot + WL_SB_SIDE_STATE + 4 * i);
	}
	int r = super_check(sb, err);
	if (r < 0)
		return r;
	for (unsigned i = 0; i < sb->nvols; i++)
		vol_decode(slot + WL_SB_VOLUMES + i * WL_VOL_ENTRY, &sb->vol[i]);
	return 0;
}

void wl_bhead_encode(const struct wl_bhead *h, const struct uuid *log, uint8_t *p)
{
	memset(p, 0, WL_B_HEADER);
	put_le32(p + WL_B_MAGIC, WL_B_MAGIC_VALUE);
	put_le64(p + WL_B_SEQ, h->seq);
	put_le64(p + WL_B_GENERATION, h->generation);
	put_le64(p + WL_B_PREV, h->prev);
	put_le64(p + WL_B_NONCE, h->nonce);
	put_le64(p + WL_B_WALL, h->wall);
	put_le32(p + WL_B_LENGTH, h->length);
	put_le32(p + WL_B_PAYLOAD, h->payload);
	put_le32(p + WL_B_COUNT, h->count);
	put_le32(p + WL_B_DESC_CRC, h->desc_crc);
	put_le32(p + WL_B_INDEX_LEN, h->index_len);
	put_le32(p + WL_B_INDEX_CRC, h->index_crc);
	put_le32(p + WL_B_FLAGS, h->flags);
	put_le32(p + WL_B_SEGMENT, h->segment);
	memcpy(p + WL_B_UUID, log->b, 16);
	put_le32(p + WL_B_CRC, crc32c(0, p + WL_B_SEQ, WL_B_HEADER - WL_B_SEQ));
}

int wl_bhead_decode(const uint8_t *p, uint64_t room, const struct uuid *log, struct wl_bhead *h)
{
	if (room < WL_BLOCK || get_le32(p + WL_B_MAGIC) != WL_B_MAGIC_VALUE || memcmp(p + WL_B_UUID, log->b, 16))
		return -EBADMSG;
	if (get_le32(p + WL_B_CRC) != crc32c(0, p + WL_B_SEQ, WL_B_HEADER - WL_B_SEQ))
		return -EBADMSG;
	h->seq = get_le64(p + WL_B_SEQ);
	h->generation = get_le64(p + WL_B_GENERATION);
	h->prev = get_le64(p + WL_B_PREV);
	h->nonce = get_le64(p + WL_B_NONCE);
	h->wall = get_le64(p + WL_B_WALL);
	h->length = get_le32(p + WL_B_LENGTH);
	h->payload = get_le32(p + WL_B_PAYLOAD);
	h->count = get_le32(p + WL_B_COUNT);
	h->desc_crc = get_le32(p + WL_B_DESC_CRC);
	h->index_len = get_le32(p + WL_B_INDEX_LEN);
	h->index_crc = get_le32(p + WL_B_INDEX_CRC);
	h->flags = get_le32(p + WL_B_FLAGS);
	h->segment = get_le32(p + WL_B_SEGMENT);

	uint64_t need = WL_B_HEADER + (uint64_t)h->payload + (uint64_t)h->count * WL_D_SIZE;
	if (!is_aligned(h->length, WL_BLOCK) || h->length > WL_MAX_BATCH || h->length > room || need > h->length ||
	    h->index_len > h->payload || h->seq == 0)
		return -EBADMSG;
	return 0;
}

void wl_desc_encode(const struct wl_desc *d, uint8_t *p)
{
	memset(p, 0, WL_D_SIZE);
	p[WL_D_TYPE] = d->type;
	p[WL_D_FLAGS] = d->flags;
	put_le16(p + WL_D_VOLUME, d->volume);
	put_le32(p + WL_D_CRC, d->crc);
	put_le64(p + WL_D_OFF, d->off);
	put_le64(p + WL_D_LEN, d->len);
	put_le32(p + WL_D_DATA, d->data);
	put_le64(p + WL_D_RNO, d->rno);
	put_le64(p + WL_D_EPOCH, d->epoch);
}

void wl_desc_decode(const uint8_t *p, struct wl_desc *d)
{
	d->type = p[WL_D_TYPE];
	d->flags = p[WL_D_FLAGS];
	d->volume = get_le16(p + WL_D_VOLUME);
	d->crc = get_le32(p + WL_D_CRC);
	d->off = get_le64(p + WL_D_OFF);
	d->len = get_le64(p + WL_D_LEN);
	d->data = get_le32(p + WL_D_DATA);
	d->rno = get_le64(p + WL_D_RNO);
	d->epoch = get_le64(p + WL_D_EPOCH);
}

bool wl_desc_is_sane(const struct wl_desc *d, const struct wl_bhead *h)
{
	uint64_t data_end = (uint64_t)WL_B_HEADER + h->payload;

	if (d->volume >= WLOG_MAX_VOLUMES || d->len == 0 || d->off > DISK_MAX_SIZE || d->len > DISK_MAX_SIZE - d->off)
		return false;
	switch (d->type) {
	case WL_WRITE:
		return d->data >= WL_B_HEADER + h->index_len && d->len <= WL_MAX_BATCH && d->data + d->len <= data_end;
	case WL_ZERO:
	case WL_DISCARD:
	case WL_LOST:
		return true;
	default:
		return false;
	}
}
