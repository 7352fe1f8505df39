/* SPDX-License-Identifier: MIT */
/*
 * NBD server: the receiver. Cuts the byte stream into requests and starts them; invariants (1) to (4) of internal.h.
 */
#include "export/nbd/internal.h"

#include <errno.h>
#include <sys/socket.h>

static co_fn ssize_t co_recv(struct nbd_conn *c, struct iovec *iov, int n)
{
	ssize_t got;

	if (c->dead)
		return -ECONNRESET;
	got = c->t->ops->co_recv(c->t, iov, n);
	if (got > 0) {
		c->bytes_in += got;
		c->recvs++;
	}
	return got ? got : -ECONNRESET;
}

co_fn int co_conn_fill(struct nbd_conn *c, uint32_t need)
{
	if (c->rend - c->rpos >= need)
		return 0;
	/* Room for the rest, and for more that may be there already: one recv takes many requests. */
	if (c->rpos == c->rend) {
		c->rpos = c->rend = 0;
	} else if (RBUF_SIZE - c->rpos < max(need, RBUF_SIZE / 2)) {
		memmove(c->rbuf, c->rbuf + c->rpos, c->rend - c->rpos);
		c->rend -= c->rpos;
		c->rpos = 0;
	}
	while (c->rend - c->rpos < need) {
		struct iovec iov = { c->rbuf + c->rend, RBUF_SIZE - c->rend };

		if (c->rend > c->rpos)
			conn_request_clock(c, 0);
		ssize_t got = co_recv(c, &iov, 1);

		if (got < 0)
			return got;
		c->rend += got;
	}
	return 0;
}

/* In transmission: a request is there as a whole. */
static void got_all(struct nbd_conn *c)
{
	if (c->timer.heap_pos)
		rt_timer_cancel(&c->timer);
}

co_fn int co_conn_skip(struct nbd_conn *c, uint64_t len)
{
	while (len) {
		uint32_t n;
		int ret = co_conn_fill(c, 1);

		if (ret < 0)
			return ret;
		n = min(len, (uint64_t)(c->rend - c->rpos));
		c->rpos += n;
		len -= n;
	}
	return 0;
}

/* Receives a payload into the request's buffer: what the receive buffer holds is copied, the rest comes straight from the socket, and what follows it fills the receive buffer. */
static co_fn int co_receive_payload(struct nbd_conn *c, void *buf, uint32_t len)
{
	uint32_t have = min(len, c->rend - c->rpos);

	memcpy(buf, c->rbuf + c->rpos, have);
	c->rpos += have;
	if (have < len) {
		c->rpos = c->rend = 0;
		conn_request_clock(c, len - have);
	}
	while (have < len) {
		struct iovec iov[2] = { { (char *)buf + have, len - have }, { c->rbuf, RBUF_SIZE } };
		ssize_t got;

		c->recv_since_ns = rt_now_ns();
		got = co_recv(c, iov, 2);
		c->recv_since_ns = 0;
		if (got < 0)
			return got;
		if (got > len - have) {
			c->rend = got - (len - have);
			have = len;
		} else {
			have += got;
		}
	}
	got_all(c);
	return 0;
}

static void refuse(struct nbd_request *r, enum nbd_error error, const char *why)
{
	r->refuse = error;
	r->why = why;
}

/* Parses a header at `p`. False: the stream is out of step. */
static bool parse_header(struct nbd_request *r, const uint8_t *p, bool extended)
{
	if (get_be32(p) != (extended ? NBD_EXT_REQUEST_MAGIC : NBD_REQUEST_MAGIC))
		return false;
	r->flags = get_be16(p + 4);
	r->type = get_be16(p + 6);
	memcpy(&r->cookie, p + 8, 8);	/* opaque */
	r->off = get_be64(p + 16);
	r->len = extended ? get_be64(p + 24) : get_be32(p + 24);
	return true;
}

/* How many bytes follow the header, and what is wrong with the request if that alone shows it. */
static uint64_t payload_length(const struct nbd_conn *c, struct nbd_request *r)
{
	bool announced = r->flags & NBD_CMD_FLAG_PAYLOAD_LEN;

	if (!c->extended) {
		if (announced)
			refuse(r, NBD_EINVAL, "a payload length needs extended headers");
		return r->type == NBD_CMD_WRITE ? r->len : 0;
	}
	if (!announced) {
		if (r->type == NBD_CMD_WRITE)
			refuse(r, NBD_EINVAL, "with extended headers a write must announce its payload");
		return 0;
	}
	if (r->type != NBD_CMD_WRITE && (r->type != NBD_CMD_BLOCK_STATUS || !c->block_status))
		refuse(r, NBD_EINVAL, "this command takes no payload");
	return r->len;
}

/* The form of NBD_CMD_BLOCK_STATUS with a payload: effect length 8, then context IDs. Ours is the only one there is. */
static void parse_status_payload(struct nbd_request *r, const uint8_t *p, uint32_t len)
{
	if (len != 12 || get_be32(p + 8) != META_ALLOCATION)
		refuse(r, NBD_EINVAL, "the payload must be a length and the negotiated context ID");
	else
		r->len = get_be64(p);
}

/* Takes the payload off the stream, whatever the request's fate: (1). */
static co_fn int co_take_payload(struct nbd_conn *c, struct nbd_request *r, uint64_t len)
{
	int ret;

	if (len > NBD_MAX_PAYLOAD) {
		if (len > DISCARD_MAX || c->extended)
			return -EPROTO;
		refuse(r, NBD_EINVAL, "the request is longer than the maximum payload");
	}
	if (!r->refuse && r->type == NBD_CMD_BLOCK_STATUS && len <= 12) {
		conn_request_clock(c, len);
		ret = co_conn_fill(c, len);
		got_all(c);
		if (ret < 0)
			return ret;
		parse_status_payload(r, c->rbuf + c->rpos, len);
		c->rpos += len;
		return 0;
	}
	if (!r->refuse && r->type == NBD_CMD_BLOCK_STATUS)
		refuse(r, NBD_EINVAL, "the payload must be a length and the negotiated context ID");
	if (r->refuse) {
		conn_request_clock(c, len);
		ret = co_conn_skip(c, len);
		got_all(c);
		return ret;
	}
	if (!co_request_buf(r, len))
		return -ECONNRESET;
	r->payload = len;
	return co_receive_payload(c, r->buf, len);
}

/* A read gets its memory here, so that only receivers ever wait for it: (3). */
static co_fn int co_prepare(struct nbd_conn *c, struct nbd_request *r)
{
	uint64_t size = c->exp->v->disk->size;
	uint32_t len = 0;

	if (r->refuse)
		return 0;
	if (r->type == NBD_CMD_READ) {
		if (r->off > size || r->len > size - r->off)
			refuse(r, NBD_EINVAL, "the read goes beyond the end of the export");
		else if (r->len > NBD_MAX_PAYLOAD)
			refuse(r, c->structured || c->extended ? NBD_EOVERFLOW : NBD_EINVAL, "the request is longer than the maximum payload");
		else
			len = r->len;
	} else if (r->type == NBD_CMD_BLOCK_STATUS) {
		len = 16 * STATUS_EXTENTS;	/* struct extent of request.c */
	}
	return !len || r->refuse || co_request_buf(r, len) ? 0 : -ECONNRESET;
}

/* Receives one request and starts it. 0, or -errno: the connection ends. */
static co_fn int co_next_request(struct nbd_conn *c)
{
	uint32_t head = c->extended ? NBD_EXT_REQUEST_LEN : NBD_REQUEST_LEN;
	struct nbd_request *r;
	uint64_t payload;
	int ret = co_conn_fill(c, head);

	got_all(c);
	if (ret < 0)
		return ret;
	r = co_request_get(c);
	if (!r)
		return -ECONNRESET;
	ret = -EPROTO;
	if (!parse_header(r, c->rbuf + c->rpos, c->extended))
		goto fail;
	c->rpos += head;
	c->requests++;
	c->last_ns = rt_now_ns();
	if (r->type == NBD_CMD_DISC) {
		ret = -ECANCELED;
		goto fail;
	}
	payload = payload_length(c, r);
	ret = payload ? co_take_payload(c, r, payload) : 0;
	if (!ret)
		ret = co_prepare(c, r);
	if (ret < 0)
		goto fail;

	/* An empty pool of coroutines: wait for one of our own requests to end. The last resort keeps a connection going that has none. */
	while (co_spawn("nbd request", co_request_main, r) < 0) {
		if (c->in_flight == 1) {
			co_request_main(r);
			break;
		}
		co_queue_wait(&c->idle, "a free coroutine");
	}
	return 0;
fail:
	request_put(r);
	return ret;
}

co_fn void co_conn_receive(struct nbd_conn *c)
{
	while (!c->closing && !co_next_request(c))
		;
	c->closing = true;
	while (c->in_flight)
		co_queue_wait(&c->idle, "the connection's last requests");
}
