/* SPDX-License-Identifier: MIT */
/*
 * NBD client: replies.
 *
 * The stream is read through a buffer of NBD_RX_SIZE. What is there of a payload is copied out of it, and the rest is received straight into the
 * request's memory, with the buffer as the last segment so that the same system call brings the header that follows.
 *
 * Nothing here trusts the server. Each length is bounded by the request that it belongs to or by a constant before a byte of it is read; a reply that
 * the protocol does not allow returns -EPROTO with c->why set.
 */
#include <errno.h>
#include <string.h>

#include "backend/nbd.h"
#include "util/bytes.h"
#include "util/iov.h"

#define ERROR_CHUNK_MAX (NBD_STRING_MAX + 64u)
#define STATUS_CHUNK_MAX ((16u << 20) + 8)	/* 2^20 descriptors of 16 bytes */

struct chunk {
	uint16_t flags, type;
	uint64_t cookie, off, len;
};

static int reply_violation(struct nbd_conn *c, const char *why)
{
	c->why = why;
	return -EPROTO;
}

static co_fn int co_receive(struct nbd_conn *c, int niov)
{
	ssize_t n = co_nbd_recv(c, c->rx_iov, niov);

	return n > 0 ? (int)n : n ? (int)n : -ECONNRESET;
}

co_fn int co_nbd_need(struct nbd_conn *c, unsigned len)
{
	while (c->rx_tail - c->rx_head < len) {
		if (c->rx_head == c->rx_tail) {
			c->rx_head = c->rx_tail = 0;
		} else if (NBD_RX_SIZE - c->rx_head < len) {
			memmove(c->rx, c->rx + c->rx_head, c->rx_tail - c->rx_head);
			c->rx_tail -= c->rx_head;
			c->rx_head = 0;
		}
		c->rx_iov[0] = (struct iovec){ c->rx + c->rx_tail, NBD_RX_SIZE - c->rx_tail };
		int n = co_receive(c, 1);

		if (n < 0)
			return n;
		c->rx_tail += n;
	}
	return 0;
}

co_fn int co_nbd_skip(struct nbd_conn *c, uint64_t len)
{
	while (len) {
		int ret = co_nbd_need(c, 1);
		uint64_t n;

		if (ret)
			return ret;
		n = min(len, (uint64_t)(c->rx_tail - c->rx_head));
		c->rx_head += n;
		len -= n;
	}
	return 0;
}

/* `len` bytes of the stream go to offset `at` of the request's memory. */
static co_fn int co_payload(struct nbd_conn *c, struct nbd_req *r, uint64_t at, uint64_t len)
{
	uint64_t n = min(len, (uint64_t)(c->rx_tail - c->rx_head));

	iov_copy_in(r->iov, r->niov, at, nbd_rx(c), n);
	c->rx_head += n;
	while (n < len) {
		int niov = iov_slice(r->iov, r->niov, at + n, len - n, c->rx_iov, DISK_MAX_IOV), got;

		if (niov < 0)
			return niov;
		/* The buffer is empty here. */
		c->rx_head = c->rx_tail = 0;
		if (niov < DISK_MAX_IOV)
			c->rx_iov[niov++] = (struct iovec){ c->rx, NBD_RX_SIZE };
		got = co_receive(c, niov);
		if (got < 0)
			return got;
		if ((uint64_t)got > len - n)
			c->rx_tail = got - (len - n);
		n += min((uint64_t)got, len - n);
	}
	return 0;
}

/* Notes that the bytes have arrived. -EPROTO: some had before. -EIO: in more pieces than are kept track of. */
static int span_add(struct nbd_req *r, uint64_t at, uint64_t len)
{
	uint32_t off = at, end = at + len;
	unsigned i = r->nspans;

	while (i && r->span[i - 1].off > off)
		i--;
	/* The new one comes before span i. */
	if ((i && r->span[i - 1].end > off) || (i < r->nspans && r->span[i].off < end))
		return -EPROTO;
	bool left = i && r->span[i - 1].end == off, right = i < r->nspans && r->span[i].off == end;

	if (left && right) {
		r->span[i - 1].end = r->span[i].end;
		memmove(&r->span[i], &r->span[i + 1], (--r->nspans - i) * sizeof(r->span[0]));
	} else if (left) {
		r->span[i - 1].end = end;
	} else if (right) {
		r->span[i].off = off;
	} else if (r->nspans == NBD_SPANS) {
		return -EIO;
	} else {
		memmove(&r->span[i + 1], &r->span[i], (r->nspans++ - i) * sizeof(r->span[0]));
		r->span[i] = (struct nbd_span){ off, end };
	}
	return 0;
}

static bool is_covered(const struct nbd_req *r)
{
	return r->nspans == 1 && !r->span[0].off && r->span[0].end == r->len;
}

static int errno_of(const struct nbd_req *r, uint32_t error)
{
	switch (error) {
	case NBD_EPERM:
		return nbd_is_change(r) ? -EROFS : -EIO;
	case NBD_ENOSPC:
		return -ENOSPC;
	case NBD_ENOMEM:
		return -ENOMEM;
	case NBD_EINVAL:
		return -EINVAL;
	case NBD_EOVERFLOW:
		return -EOVERFLOW;
	case NBD_ENOTSUP:
		return r->flags & NBD_CMD_FLAG_FAST_ZERO ? -EOPNOTSUPP : -EIO;
	case NBD_ESHUTDOWN:
		return -ESHUTDOWN;
	default:
		return -EIO;
	}
}

/*
 * The reply is complete. -ESHUTDOWN leaves the request to be sent again: the server is to be left, and may be back later.
 */
static int answer(struct nbd_conn *c, struct nbd_req *r, int error)
{
	c->replies++;
	if (error == -ESHUTDOWN) {
		c->why = "the server is shutting down";
		return error;
	}
	nbd_complete(r, error);
	return 0;
}

/* The request that a reply belongs to, or NULL. */
static struct nbd_req *find(struct nbd_conn *c, uint64_t cookie)
{
	uint64_t slot = cookie & 0xffff;
	struct nbd_req *r = slot < NBD_SLOTS + NBD_REPLAYS ? c->n->slot[slot] : NULL;

	if (!r || r->cookie != cookie || r->conn != c || r->answered || !r->sent)
		return NULL;
	return r;
}

static co_fn int co_simple_reply(struct nbd_conn *c)
{
	const uint8_t *p = nbd_rx(c);
	uint32_t error = get_be32(p + 4);
	struct nbd_req *r = find(c, get_be64(p + 8));
	int ret;

	c->rx_head += NBD_SIMPLE_REPLY_LEN;
	if (c->info.extended)
		return reply_violation(c, "a simple reply, though extended headers are in use");
	if (!r)
		return reply_violation(c, "a reply to no request");
	if (r->type == NBD_CMD_READ && c->info.structured)
		return reply_violation(c, "a simple reply to a read, though structured replies are in use");
	if (error)
		return answer(c, r, errno_of(r, error));
	if (r->type == NBD_CMD_BLOCK_STATUS)
		return reply_violation(c, "a block status without an extent");
	if (r->type == NBD_CMD_READ) {
		ret = co_payload(c, r, 0, r->len);
		if (ret)
			return ret;
	}
	return answer(c, r, 0);
}

static co_fn int co_error_chunk(struct nbd_conn *c, struct nbd_req *r, const struct chunk *k)
{
	uint32_t error;
	int ret;

	if (k->len < 6 || k->len > ERROR_CHUNK_MAX)
		return reply_violation(c, "an error chunk of a wrong length");
	ret = co_nbd_need(c, 6);
	if (ret)
		return ret;
	error = get_be32(nbd_rx(c));
	if (!error)
		return reply_violation(c, "an error chunk without an error");
	if (get_be16(nbd_rx(c) + 4) > k->len - 6)
		return reply_violation(c, "an error message longer than its chunk");
	if (!r->chunk_error)
		r->chunk_error = errno_of(r, error);
	return co_nbd_skip(c, k->len);
}

/* Of a read: `at` is in the request's range, and the bytes are new. Sets *ret_at to the offset inside the request. */
static int claim(struct nbd_conn *c, struct nbd_req *r, uint64_t off, uint64_t len, uint64_t *ret_at)
{
	int ret;

	if (r->type != NBD_CMD_READ)
		return reply_violation(c, "data in a reply to something else than a read");
	if (off < r->off || len > r->len || off - r->off > r->len - len)
		return reply_violation(c, "data outside of what was asked for");
	*ret_at = off - r->off;
	ret = span_add(r, *ret_at, len);
	if (ret == -EPROTO)
		return reply_violation(c, "the same data twice in one reply");
	if (ret && !r->chunk_error)
		r->chunk_error = ret;
	return 0;
}

static co_fn int co_data_chunk(struct nbd_conn *c, struct nbd_req *r, const struct chunk *k)
{
	uint64_t at;
	int ret;

	if (k->len < 9)
		return reply_violation(c, "a data chunk without data");
	ret = co_nbd_need(c, 8);
	if (!ret)
		ret = claim(c, r, get_be64(nbd_rx(c)), k->len - 8, &at);
	if (ret)
		return ret;
	c->rx_head += 8;
	return co_payload(c, r, at, k->len - 8);
}

static co_fn int co_hole_chunk(struct nbd_conn *c, struct nbd_req *r, const struct chunk *k)
{
	uint64_t len, at;
	int ret;

	if (k->len != 12)
		return reply_violation(c, "a hole chunk of a wrong length");
	ret = co_nbd_need(c, 12);
	if (ret)
		return ret;
	len = get_be32(nbd_rx(c) + 8);
	if (!len)
		return reply_violation(c, "an empty hole");
	ret = claim(c, r, get_be64(nbd_rx(c)), len, &at);
	if (ret)
		return ret;
	c->rx_head += 12;
	iov_set(r->iov, r->niov, at, 0, len);
	return 0;
}

/* Only the first descriptor counts: one was asked for. */
static co_fn int co_status_chunk(struct nbd_conn *c, struct nbd_req *r, const struct chunk *k)
{
	bool ext = k->type == NBD_CHUNK_BLOCK_STATUS_EXT;
	unsigned head = ext ? 8 : 4, each = ext ? 16 : 8;
	uint64_t len, state;
	const uint8_t *p;
	int ret;

	if (r->type != NBD_CMD_BLOCK_STATUS || ext != c->info.extended)
		return reply_violation(c, "a block status that nobody asked for");
	if (k->len < head + each || (k->len - head) % each || k->len > STATUS_CHUNK_MAX)
		return reply_violation(c, "a block status of a wrong length");
	ret = co_nbd_need(c, head + each);
	if (ret)
		return ret;
	p = nbd_rx(c);
	if (get_be32(p) != c->info.context)
		return reply_violation(c, "a block status of an unknown context");
	if (ext && get_be32(p + 4) != (k->len - head) / each)
		return reply_violation(c, "a block status whose count and length differ");
	if (r->got_extent)
		return reply_violation(c, "two block states in one reply");
	len = ext ? get_be64(p + head) : get_be32(p + head);
	state = ext ? get_be64(p + head + 8) : get_be32(p + head + 4);
	if (!len)
		return reply_violation(c, "an empty extent");
	r->got_extent = true;
	*r->extent = (struct disk_extent){ min(len, r->len), state & NBD_STATE_HOLE, state & NBD_STATE_ZERO };
	return co_nbd_skip(c, k->len);
}

static co_fn int co_chunk(struct nbd_conn *c, const struct chunk *k)
{
	struct nbd_req *r = find(c, k->cookie);
	int ret;

	if (!r)
		return reply_violation(c, "a chunk of a reply to no request");
	if (c->info.extended && k->off != r->off)
		return reply_violation(c, "a chunk whose offset is not its request's");
	switch (k->type) {
	case NBD_CHUNK_NONE:
		if (k->len || !(k->flags & NBD_REPLY_FLAG_DONE))
			return reply_violation(c, "an empty chunk that does not end its reply");
		ret = 0;
		break;
	case NBD_CHUNK_OFFSET_DATA:
		ret = co_data_chunk(c, r, k);
		break;
	case NBD_CHUNK_OFFSET_HOLE:
		ret = co_hole_chunk(c, r, k);
		break;
	case NBD_CHUNK_BLOCK_STATUS:
	case NBD_CHUNK_BLOCK_STATUS_EXT:
		ret = co_status_chunk(c, r, k);
		break;
	default:
		if (!(k->type & NBD_CHUNK_ERROR_BIT))
			return reply_violation(c, "a chunk of an unknown type");
		ret = co_error_chunk(c, r, k);
	}
	if (ret || !(k->flags & NBD_REPLY_FLAG_DONE))
		return ret;
	if (!r->chunk_error && r->type == NBD_CMD_READ && !is_covered(r))
		return reply_violation(c, "a read that ends without all of its data");
	if (!r->chunk_error && r->type == NBD_CMD_BLOCK_STATUS && !r->got_extent)
		return reply_violation(c, "a block status without an extent");
	return answer(c, r, r->chunk_error);
}

static co_fn int co_structured_reply(struct nbd_conn *c)
{
	struct chunk k;
	const uint8_t *p;
	int ret;

	if (!c->info.structured)
		return reply_violation(c, "a structured reply that was not negotiated");
	ret = co_nbd_need(c, NBD_STRUCTURED_REPLY_LEN);
	if (ret)
		return ret;
	p = nbd_rx(c);
	k = (struct chunk){ get_be16(p + 4), get_be16(p + 6), get_be64(p + 8), 0, get_be32(p + 16) };
	c->rx_head += NBD_STRUCTURED_REPLY_LEN;
	return co_chunk(c, &k);
}

static co_fn int co_extended_reply(struct nbd_conn *c)
{
	struct chunk k;
	const uint8_t *p;
	int ret;

	if (!c->info.extended)
		return reply_violation(c, "an extended reply that was not negotiated");
	ret = co_nbd_need(c, NBD_EXT_REPLY_LEN);
	if (ret)
		return ret;
	p = nbd_rx(c);
	k = (struct chunk){ get_be16(p + 4), get_be16(p + 6), get_be64(p + 8), get_be64(p + 16), get_be64(p + 24) };
	c->rx_head += NBD_EXT_REPLY_LEN;
	return co_chunk(c, &k);
}

co_fn int co_nbd_receive_replies(struct nbd_conn *c)
{
	for (;;) {
		int ret = co_nbd_need(c, NBD_SIMPLE_REPLY_LEN);

		if (ret)
			return ret;
		switch (get_be32(nbd_rx(c))) {
		case NBD_SIMPLE_REPLY_MAGIC:
			ret = co_simple_reply(c);
			break;
		case NBD_STRUCTURED_REPLY_MAGIC:
			ret = co_structured_reply(c);
			break;
		case NBD_EXT_REPLY_MAGIC:
			ret = co_extended_reply(c);
			break;
		default:
			ret = reply_violation(c, "a reply with a wrong magic number");
		}
		if (ret)
			return ret;
	}
}
