/* SPDX-License-Identifier: MIT */
/*
 * virtio-blk requests: config space, and what each request does.
 */
#include "export/virtio_blk.h"

#include <assert.h>
#include <errno.h>
#include <linux/virtio_blk.h>
#include <stddef.h>
#include <string.h>

#include "rt/shm.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/iov.h"

#define SECTOR 512u
#define RANGES_MAX 32u		/* of one discard or write-zeroes */
#define RANGE_SECTORS_MAX ((1u << 30) / SECTOR * 2) /* 2 GiB each */
#define BIT(n) (1ull << (n))

static_assert(offsetof(struct virtio_blk_config, wce) == VIRTIO_BLK_CONFIG_WCE, "the writeback field");
static_assert(offsetof(struct virtio_blk_config, write_zeroes_may_unmap) + 4 == VIRTIO_BLK_CONFIG_LEN, "the part of the config space that is used");

uint64_t virtio_blk_features(const struct virtio_blk *b)
{
	uint64_t f = BIT(VIRTIO_BLK_F_SEG_MAX) | BIT(VIRTIO_BLK_F_BLK_SIZE) | BIT(VIRTIO_BLK_F_FLUSH) | BIT(VIRTIO_BLK_F_TOPOLOGY) |
		     BIT(VIRTIO_BLK_F_CONFIG_WCE) | BIT(VIRTIO_BLK_F_MQ);

	if (b->v->read_only)
		return f | BIT(VIRTIO_BLK_F_RO);
	return f | BIT(VIRTIO_BLK_F_DISCARD) | BIT(VIRTIO_BLK_F_WRITE_ZEROES);
}

void virtio_blk_reset(struct virtio_blk *b)
{
	b->features = 0;
	b->writeback = true;
}

bool virtio_blk_is_writeback(const struct virtio_blk *b)
{
	if (!(b->features & BIT(VIRTIO_BLK_F_FLUSH)))
		return false;
	return b->writeback || !(b->features & BIT(VIRTIO_BLK_F_CONFIG_WCE));
}

/* The unit in which the image likes to be written. */
static uint32_t physical_size(const struct virtio_blk *b)
{
	const struct disk_limits *l = &b->v->disk->limits;
	uint32_t size = max(b->block_size, l->align);

	/* A preferred size beyond a page is an optimum and no unit. */
	if (is_pow2(l->opt_io) && l->opt_io <= 4096)
		size = max(size, l->opt_io);
	return size;
}

void virtio_blk_config(const struct virtio_blk *b, uint8_t config[VIRTIO_BLK_CONFIG_LEN])
{
	const struct disk_limits *l = &b->v->disk->limits;
	uint32_t physical = physical_size(b), gran = max(l->discard_gran, b->block_size);

	memset(config, 0, VIRTIO_BLK_CONFIG_LEN);
	put_le64(config + offsetof(struct virtio_blk_config, capacity), b->v->disk->size / SECTOR);
	put_le32(config + offsetof(struct virtio_blk_config, seg_max), VIRTIO_BLK_SEG_MAX);
	put_le32(config + offsetof(struct virtio_blk_config, blk_size), b->block_size);
	config[offsetof(struct virtio_blk_config, physical_block_exp)] = __builtin_ctz(physical / b->block_size);
	put_le16(config + offsetof(struct virtio_blk_config, min_io_size), physical / b->block_size);
	put_le32(config + offsetof(struct virtio_blk_config, opt_io_size), l->opt_io / b->block_size);
	config[VIRTIO_BLK_CONFIG_WCE] = b->writeback;
	put_le16(config + offsetof(struct virtio_blk_config, num_queues), b->queues);
	if (b->v->read_only)
		return;
	put_le32(config + offsetof(struct virtio_blk_config, max_discard_sectors), RANGE_SECTORS_MAX);
	put_le32(config + offsetof(struct virtio_blk_config, max_discard_seg), RANGES_MAX);
	put_le32(config + offsetof(struct virtio_blk_config, discard_sector_alignment), gran / SECTOR);
	put_le32(config + offsetof(struct virtio_blk_config, max_write_zeroes_sectors), RANGE_SECTORS_MAX);
	put_le32(config + offsetof(struct virtio_blk_config, max_write_zeroes_seg), RANGES_MAX);
	config[offsetof(struct virtio_blk_config, write_zeroes_may_unmap)] = 1;
}

co_fn int co_virtio_blk_set_config(struct virtio_blk *b, uint32_t off, const void *data, uint32_t len)
{
	bool on, was = virtio_blk_is_writeback(b);

	if (off != VIRTIO_BLK_CONFIG_WCE || len != 1)
		return -EINVAL;
	on = *(const uint8_t *)data != 0;
	b->writeback = on;
	/* From here on new writes are durable; those that completed before get a flush. */
	if (was && !virtio_blk_is_writeback(b) && !b->v->read_only)
		return co_volume_flush(b->v);
	return 0;
}

/* --- Requests --- */

/* One request, cut into its parts. */
struct request {
	uint32_t type;
	uint64_t sector;
	struct iovec *out, *in;	/* data only */
	int nout, nin;
	uint64_t out_len, in_len;
};

static uint8_t to_status(int ret)
{
	if (!ret)
		return VIRTIO_BLK_S_OK;
	return ret == -ENOTSUP || ret == -EOPNOTSUPP ? VIRTIO_BLK_S_UNSUPP : VIRTIO_BLK_S_IOERR;
}

/* Copies the first `len` bytes of the readable segments, each once, and cuts them off. False if there are fewer. */
static bool take_out(struct iovec **iov, int *n, void *dst, size_t len)
{
	char *to = dst;

	while (len && *n) {
		size_t part = min(len, (*iov)->iov_len);

		rt_shm_read(to, (*iov)->iov_base, part);
		to += part;
		len -= part;
		(*iov)->iov_base = (char *)(*iov)->iov_base + part;
		(*iov)->iov_len -= part;
		if (!(*iov)->iov_len) {
			(*iov)++;
			(*n)--;
		}
	}
	return !len;
}

static unsigned write_flags(const struct virtio_blk *b)
{
	return virtio_blk_is_writeback(b) ? 0 : DISK_FUA;
}

/* A change has succeeded that began with these flags. If the cache was switched off meanwhile, it is still to be made durable. */
static co_fn int co_changed(struct virtio_blk *b, unsigned flags)
{
	b->durable += write_flags(b) != 0;
	return flags == write_flags(b) || (flags & DISK_FUA) ? 0 : co_volume_flush(b->v);
}

/* The range in bytes, or -EIO: it must lie within the disk as it is now. */
static int check_range(const struct virtio_blk *b, uint64_t sector, uint64_t len, uint64_t *off)
{
	uint64_t capacity = b->v->disk->size / SECTOR;

	if (len % SECTOR || sector > capacity || len / SECTOR > capacity - sector)
		return -EIO;
	*off = sector * SECTOR;
	return 0;
}

static co_fn int co_read(struct virtio_blk *b, struct request *r)
{
	uint64_t off;
	int ret = check_range(b, r->sector, r->in_len, &off);

	return ret || !r->in_len ? ret : co_volume_readv(b->v, off, r->in, r->nin);
}

static co_fn int co_write(struct virtio_blk *b, struct request *r)
{
	uint64_t off;
	unsigned flags = write_flags(b);
	int ret = check_range(b, r->sector, r->out_len, &off);

	if (ret || !r->out_len)
		return ret;
	ret = co_volume_writev(b->v, off, r->out, r->nout, flags);
	return ret ? ret : co_changed(b, flags);
}

static int get_id(struct virtio_blk *b, struct request *r)
{
	char id[VIRTIO_BLK_ID_BYTES] = { 0 };

	if (r->in_len < sizeof(id))
		return -EIO;
	memcpy(id, b->serial, strnlen(b->serial, sizeof(id)));
	iov_copy_in(r->in, r->nin, 0, id, sizeof(id));
	return 0;
}

static co_fn int co_one_range(struct virtio_blk *b, bool zero, const struct virtio_blk_discard_write_zeroes *range)
{
	uint32_t flags = le32toh(range->flags), n = le32toh(range->num_sectors);
	unsigned durable = write_flags(b);
	uint64_t off, len = (uint64_t)n * SECTOR;
	int ret;

	if (flags & (zero ? ~VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP : ~0u))
		return -ENOTSUP;
	ret = check_range(b, le64toh(range->sector), len, &off);
	if (ret || !len)
		return ret;
	if (zero)
		ret = co_volume_zero(b->v, off, len, durable | (flags ? DISK_UNMAP : 0));
	else
		ret = co_volume_discard(b->v, off, len, durable);
	return ret ? ret : co_changed(b, durable);
}

static co_fn int co_ranges(struct virtio_blk *b, struct request *r)
{
	struct virtio_blk_discard_write_zeroes range[RANGES_MAX];
	bool zero = r->type == VIRTIO_BLK_T_WRITE_ZEROES;
	uint32_t n = r->out_len / sizeof(*range);
	int ret = 0;

	if (!(b->features & BIT(zero ? VIRTIO_BLK_F_WRITE_ZEROES : VIRTIO_BLK_F_DISCARD)))
		return -ENOTSUP;
	if (!n || r->out_len % sizeof(*range) || n > RANGES_MAX)
		return -EIO;
	take_out(&r->out, &r->nout, range, r->out_len);
	for (uint32_t i = 0; i < n && !ret; i++)
		ret = co_one_range(b, zero, &range[i]);
	return ret;
}

static co_fn int co_run(struct virtio_blk *b, struct request *r, uint64_t *written)
{
	bool writes = r->type == VIRTIO_BLK_T_OUT || r->type == VIRTIO_BLK_T_DISCARD || r->type == VIRTIO_BLK_T_WRITE_ZEROES;
	int ret;

	*written = 0;
	if (writes && b->v->read_only)
		return -EIO;
	switch (r->type) {
	case VIRTIO_BLK_T_IN:
		ret = co_read(b, r);
		/* A read that fails may have scribbled on all of it. */
		*written = r->in_len;
		return ret;
	case VIRTIO_BLK_T_OUT:
		return co_write(b, r);
	case VIRTIO_BLK_T_FLUSH:
		b->flushes++;
		return co_volume_flush(b->v);
	case VIRTIO_BLK_T_GET_ID:
		ret = get_id(b, r);
		*written = ret ? 0 : VIRTIO_BLK_ID_BYTES;
		return ret;
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		return co_ranges(b, r);
	default:
		return -ENOTSUP;
	}
}

co_fn int64_t co_virtio_blk_request(struct virtio_blk *b, struct iovec *iov, int nout, int nin, struct err *err)
{
	struct virtio_blk_outhdr head;
	struct request r = { .out = iov, .nout = nout, .in = iov + nout, .nin = nin };
	struct iovec *last;
	uint64_t written;
	char *status;
	int ret;

	if (!nin)
		return err_set(err, -EPROTO, "a request without room for its status");
	if (!take_out(&r.out, &r.nout, &head, sizeof(head)))
		return err_set(err, -EPROTO, "a request whose header is shorter than %zu bytes", sizeof(head));
	r.type = le32toh(head.type);
	r.sector = le64toh(head.sector);
	last = &iov[nout + nin - 1];
	status = (char *)last->iov_base + last->iov_len - 1;
	if (!--last->iov_len)
		r.nin--;
	r.in_len = iov_len(r.in, r.nin);
	r.out_len = iov_len(r.out, r.nout);
	ret = co_run(b, &r, &written);
	b->requests++;
	b->errors += ret != 0;
	shm_store8_release(status, to_status(ret));
	last->iov_len++;
	/* The count is of the front part without gaps: where the status lies behind bytes that were not written it cannot be in it. */
	return written == r.in_len ? (int64_t)written + 1 : max((int64_t)written, (int64_t)1);
}
