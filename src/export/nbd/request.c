/* SPDX-License-Identifier: MIT */
/*
 * NBD server: what a request does, and its reply.
 */
#include "export/nbd/internal.h"

#include <errno.h>

#define HOLE_MIN 4096		/* shorter reads of zeroes are sent as data */
#define ERROR_TEXT_MAX 80	/* of an error chunk; see nbd_request.head */

static enum nbd_error to_nbd_error(int error)
{
	switch (-error) {
	case EPERM: case EROFS: case EACCES:
		return NBD_EPERM;
	case EINVAL:
		return NBD_EINVAL;
	case ENOSPC: case EDQUOT: case EFBIG:
		return NBD_ENOSPC;
	case ENOMEM:
		return NBD_ENOMEM;
	case ESHUTDOWN: case ECANCELED:
		return NBD_ESHUTDOWN;
	default:
		return NBD_EIO;
	}
}

/* --- Reply headers --- */

/* A structured or extended header for one chunk at `p`; returns its length. */
static uint32_t put_chunk(const struct nbd_conn *c, uint8_t *p, const struct nbd_request *r, uint16_t flags, uint16_t type, uint64_t len)
{
	put_be16(p + 4, flags);
	put_be16(p + 6, type);
	memcpy(p + 8, &r->cookie, 8);
	if (!c->extended) {
		put_be32(p, NBD_STRUCTURED_REPLY_MAGIC);
		put_be32(p + 16, len);
		return NBD_STRUCTURED_REPLY_LEN;
	}
	put_be32(p, NBD_EXT_REPLY_MAGIC);
	put_be64(p + 16, r->off);
	put_be64(p + 24, len);
	return NBD_EXT_REPLY_LEN;
}

static void reply_simple(struct nbd_request *r, uint32_t error)
{
	put_be32(r->head, NBD_SIMPLE_REPLY_MAGIC);
	put_be32(r->head + 4, error);
	memcpy(r->head + 8, &r->cookie, 8);
	r->head_len = NBD_SIMPLE_REPLY_LEN;
}

static void reply_error(struct nbd_request *r, enum nbd_error error, const char *why)
{
	struct nbd_conn *c = r->conn;
	size_t text = why ? min(strlen(why), (size_t)ERROR_TEXT_MAX) : 0;
	uint32_t n;

	c->errors++;
	r->data_len = 0;
	if (!c->structured && !c->extended) {
		reply_simple(r, error);
		return;
	}
	n = put_chunk(c, r->head, r, NBD_REPLY_FLAG_DONE, NBD_CHUNK_ERROR, 6 + text);
	put_be32(r->head + n, error);
	put_be16(r->head + n + 4, text);
	if (text)
		memcpy(r->head + n + 6, why, text);
	r->head_len = n + 6 + text;
}

/* Success without data. A simple reply is shorter, and allowed to all but reads. */
static void reply_ok(struct nbd_request *r)
{
	struct nbd_conn *c = r->conn;

	if (c->extended || (c->structured && r->type == NBD_CMD_READ))
		r->head_len = put_chunk(c, r->head, r, NBD_REPLY_FLAG_DONE, NBD_CHUNK_NONE, 0);
	else
		reply_simple(r, 0);
}

/* --- Commands: each builds the reply --- */

static void reply_result(struct nbd_request *r, int ret)
{
	if (ret < 0)
		reply_error(r, to_nbd_error(ret), strerror(-ret));
	else
		reply_ok(r);
}

static co_fn void co_read(struct nbd_request *r)
{
	struct nbd_conn *c = r->conn;
	struct iovec iov = { r->buf, r->len };
	uint32_t n;
	int ret = r->len ? co_volume_readv(c->exp->v, r->off, &iov, 1) : 0;

	if (ret < 0 || !r->len) {
		reply_result(r, ret);
		return;
	}
	if (!c->structured && !c->extended) {
		reply_simple(r, 0);
		r->data_len = r->len;
		return;
	}
	/* To find the first byte that is not zero costs nothing, and a hole saves two copies and the socket's work. */
	if (r->len >= HOLE_MIN && bytes_are_zero(r->buf, r->len)) {
		n = put_chunk(c, r->head, r, NBD_REPLY_FLAG_DONE, NBD_CHUNK_OFFSET_HOLE, 12);
		put_be64(r->head + n, r->off);
		put_be32(r->head + n + 8, r->len);
		r->head_len = n + 12;
		return;
	}
	n = put_chunk(c, r->head, r, NBD_REPLY_FLAG_DONE, NBD_CHUNK_OFFSET_DATA, 8 + r->len);
	put_be64(r->head + n, r->off);
	r->head_len = n + 8;
	r->data_len = r->len;
}

static co_fn void co_write(struct nbd_request *r)
{
	struct iovec iov = { r->buf, r->payload };

	reply_result(r, co_volume_writev(r->conn->exp->v, r->off, &iov, r->payload ? 1 : 0,
					 r->flags & NBD_CMD_FLAG_FUA ? DISK_FUA : 0));
}

static co_fn void co_zero(struct nbd_request *r)
{
	unsigned flags = 0;
	int ret;

	if (r->flags & NBD_CMD_FLAG_FUA)
		flags |= DISK_FUA;
	if (!(r->flags & NBD_CMD_FLAG_NO_HOLE))
		flags |= DISK_UNMAP;
	if (r->flags & NBD_CMD_FLAG_FAST_ZERO)
		flags |= DISK_FAST;
	ret = co_volume_zero(r->conn->exp->v, r->off, r->len, flags);
	if ((ret == -EOPNOTSUPP || ret == -ENOTSUP) && (flags & DISK_FAST))
		reply_error(r, NBD_ENOTSUP, "not faster than writing");
	else
		reply_result(r, ret);
}

static co_fn void co_trim(struct nbd_request *r)
{
	reply_result(r, co_volume_discard(r->conn->exp->v, r->off, r->len, r->flags & NBD_CMD_FLAG_FUA ? DISK_FUA : 0));
}

/* One descriptor, as collected. */
struct extent {
	uint64_t len, state;
};

/* Collects the extents from r->off on, neighbours of one state merged; returns the count or -errno. */
static co_fn int co_collect_extents(struct nbd_request *r, struct extent *x, int max_extents)
{
	uint64_t off = r->off, end = r->off + r->len;
	int n = 0;

	for (int lookups = 0; off < end && lookups < STATUS_EXTENTS; lookups++) {
		struct disk_extent found;
		uint64_t state;
		int ret = co_volume_extent(r->conn->exp->v, off, end - off, &found);

		if (ret < 0)
			return ret;
		state = (found.hole ? NBD_STATE_HOLE : 0) | (found.zero ? NBD_STATE_ZERO : 0);
		found.len = min(found.len, end - off);
		if (n && x[n - 1].state == state) {
			x[n - 1].len += found.len;
		} else {
			if (n == max_extents)
				break;
			x[n++] = (struct extent){ found.len, state };
		}
		off += found.len;
	}
	return n;
}

static co_fn void co_block_status(struct nbd_request *r)
{
	struct nbd_conn *c = r->conn;
	struct extent *x = r->buf;
	uint8_t *out = r->buf;
	int n = co_collect_extents(r, x, r->flags & NBD_CMD_FLAG_REQ_ONE ? 1 : STATUS_EXTENTS);
	uint32_t h;

	if (n < 0) {
		reply_result(r, n);
		return;
	}
	/* In place: a descriptor on the wire is no longer than a collected one. */
	for (int i = 0; i < n; i++) {
		struct extent e = x[i];

		if (c->extended) {
			put_be64(out + 16 * i, e.len);
			put_be64(out + 16 * i + 8, e.state);
		} else {
			put_be32(out + 8 * i, e.len);
			put_be32(out + 8 * i + 4, e.state);
		}
	}
	if (c->extended) {
		r->data_len = 16 * n;
		h = put_chunk(c, r->head, r, NBD_REPLY_FLAG_DONE, NBD_CHUNK_BLOCK_STATUS_EXT, 8 + r->data_len);
		put_be32(r->head + h + 4, n);
		r->head_len = h + 8;
	} else {
		r->data_len = 8 * n;
		h = put_chunk(c, r->head, r, NBD_REPLY_FLAG_DONE, NBD_CHUNK_BLOCK_STATUS, 4 + r->data_len);
		r->head_len = h + 4;
	}
	put_be32(r->head + h, META_ALLOCATION);
}

/* --- Checks --- */

/* The flags that each command knows; FUA is allowed everywhere. */
static const uint16_t known_flags[] = {
	[NBD_CMD_READ] = NBD_CMD_FLAG_DF,
	[NBD_CMD_WRITE] = NBD_CMD_FLAG_PAYLOAD_LEN,
	[NBD_CMD_WRITE_ZEROES] = NBD_CMD_FLAG_NO_HOLE | NBD_CMD_FLAG_FAST_ZERO,
	[NBD_CMD_BLOCK_STATUS] = NBD_CMD_FLAG_REQ_ONE | NBD_CMD_FLAG_PAYLOAD_LEN,
};

static int refused(struct nbd_request *r, enum nbd_error error, const char *why)
{
	r->refuse = error;
	r->why = why;
	return error;
}

/* 0, or the error that the request is refused with. Reads were checked by the receiver. */
static int check(struct nbd_request *r)
{
	struct nbd_conn *c = r->conn;
	struct volume *v = c->exp->v;
	bool writes = r->type == NBD_CMD_WRITE || r->type == NBD_CMD_WRITE_ZEROES || r->type == NBD_CMD_TRIM;
	bool df = c->structured || c->extended;

	if (r->refuse)
		return r->refuse;
	if (r->type > NBD_CMD_BLOCK_STATUS)
		return refused(r, NBD_EINVAL, "unknown command");
	if (r->flags & ~(NBD_CMD_FLAG_FUA | known_flags[r->type]) || (r->type == NBD_CMD_READ && !df && (r->flags & NBD_CMD_FLAG_DF)))
		return refused(r, NBD_EINVAL, "a flag that does not go with this command");
	if (writes && v->read_only)
		return refused(r, NBD_EPERM, "the export is read-only");
	if (r->type == NBD_CMD_FLUSH)
		return r->off || r->len ? refused(r, NBD_EINVAL, "offset and length of a flush must be 0") : 0;
	if (r->off > v->disk->size || r->len > v->disk->size - r->off)
		return refused(r, writes && r->type != NBD_CMD_TRIM ? NBD_ENOSPC : NBD_EINVAL, "beyond the end of the export");
	if (r->type == NBD_CMD_BLOCK_STATUS) {
		if (!c->block_status)
			return refused(r, NBD_EINVAL, "no metadata context was negotiated for this export");
		if (!r->len)
			return refused(r, NBD_EINVAL, "the status of 0 bytes");
	}
	return 0;
}

co_fn void co_request_main(void *arg)
{
	struct nbd_request *r = arg;

	if (check(r)) {
		reply_error(r, r->refuse, r->why);
		co_request_reply(r);
		return;
	}
	switch (r->type) {
	case NBD_CMD_READ:
		co_read(r);
		break;
	case NBD_CMD_WRITE:
		co_write(r);
		break;
	case NBD_CMD_FLUSH:
		reply_result(r, co_volume_flush(r->conn->exp->v));
		break;
	case NBD_CMD_TRIM:
		co_trim(r);
		break;
	case NBD_CMD_CACHE:
		reply_result(r, co_volume_prefetch(r->conn->exp->v, r->off, r->len));
		break;
	case NBD_CMD_WRITE_ZEROES:
		co_zero(r);
		break;
	case NBD_CMD_BLOCK_STATUS:
		co_block_status(r);
		break;
	}
	co_request_reply(r);
}
