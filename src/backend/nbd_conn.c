/* SPDX-License-Identifier: MIT */
/*
 * NBD client: one connection. Its sender, its receiver, and how requests come to it and leave it.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "backend/nbd.h"
#include "rt/io.h"
#include "util/bytes.h"

int nbd_conn_init(struct nbd *n, struct nbd_conn *c, unsigned index)
{
	c->n = n;
	c->index = index;
	c->fd = -1;
	list_init(&c->txq);
	co_queue_init(&c->tx_wait);
	co_queue_init(&c->rx_wait);
	c->rx = malloc(NBD_RX_SIZE);
	return c->rx ? 0 : -ENOMEM;
}

void nbd_conn_fini(struct nbd_conn *c)
{
	nbd_hang_up(c);
	free(c->rx);
	c->rx = NULL;
}

void nbd_conn_start(struct nbd_conn *c)
{
	c->up = true;
	c->lost = 0;
	c->why = NULL;
	c->replies = 0;
	co_queue_wake_all(&c->rx_wait);
}

void nbd_conn_break(struct nbd_conn *c, int error, const char *why)
{
	struct nbd *n = c->n;

	if (!c->up)
		return;
	c->up = false;
	c->lost = error;
	c->why = why;
	if (n->session == NBD_UP)
		n->down_since_ns = rt_now_ns();
	n->session = NBD_DOWN;
	rt_io_shutdown(c->fd);
	co_queue_wake_all(&c->tx_wait);
	co_queue_wake_all(&c->rx_wait);
	co_queue_wake_all(&n->changed);
}

void nbd_dispatch(struct nbd *n, struct nbd_req *r)
{
	struct nbd_conn *c = &n->conn[0];

	if (n->session != NBD_UP) {
		r->conn = NULL;
		list_add_tail(&n->pending, &r->node);
		return;
	}
	for (unsigned i = 1; i < n->nconns; i++) {
		if (n->conn[i].in_flight < c->in_flight)
			c = &n->conn[i];
	}
	nbd_queue(c, r);
}

void nbd_queue(struct nbd_conn *c, struct nbd_req *r)
{
	r->conn = c;
	r->cookie = ++c->n->serial << 16 | r->slot;
	c->in_flight++;
	list_add_tail(&c->txq, &r->node);
	co_queue_wake_one(&c->tx_wait);
}

void nbd_complete(struct nbd_req *r, int error)
{
	struct nbd *n = r->n;

	if (r->sending) {
		r->answered = true;
		r->error = error;
		return;
	}
	assert(!r->done && n->slot[r->slot] == r);
	list_del(&r->node);
	if (r->conn)
		r->conn->in_flight--;
	n->slot[r->slot] = NULL;
	n->free_slot[n->nfree++] = r->slot;
	r->error = error;
	r->done = true;
	if (r->co)
		co_wake(r->co);
	if (!r->co || n->session != NBD_UP)
		co_queue_wake_all(&n->changed);
}

static unsigned put_request(const struct nbd_conn *c, const struct nbd_req *r, uint8_t *p)
{
	bool payload = r->type == NBD_CMD_WRITE;

	put_be32(p, c->info.extended ? NBD_EXT_REQUEST_MAGIC : NBD_REQUEST_MAGIC);
	put_be16(p + 4, r->flags | (payload && c->info.extended ? NBD_CMD_FLAG_PAYLOAD_LEN : 0));
	put_be16(p + 6, r->type);
	put_be64(p + 8, r->cookie);
	put_be64(p + 16, r->off);
	if (c->info.extended) {
		put_be64(p + 24, r->len);
		return NBD_EXT_REQUEST_LEN;
	}
	put_be32(p + 24, r->len);
	return NBD_REQUEST_LEN;
}

/* Takes requests off the queue; returns how many, and the segments in *ret_niov. */
static unsigned gather(struct nbd_conn *c, int *ret_niov)
{
	unsigned n = 0;
	int niov = 0;

	while (n < NBD_TX_BATCH && !list_empty(&c->txq)) {
		struct nbd_req *r = list_first(&c->txq, struct nbd_req, node);
		int data = r->type == NBD_CMD_WRITE ? r->niov : 0;

		if (niov + 1 + data > (int)NBD_TX_IOV)
			break;
		list_del(&r->node);
		r->sending = r->sent = true;
		c->tx_iov[niov++] = (struct iovec){ c->tx_head[n], put_request(c, r, c->tx_head[n]) };
		for (int i = 0; i < data; i++)
			c->tx_iov[niov++] = r->iov[i];
		c->tx_req[n++] = r;
	}
	*ret_niov = niov;
	return n;
}

static co_fn int co_send_batch(struct nbd_conn *c)
{
	int niov, ret;
	unsigned n = gather(c, &niov);

	ret = co_nbd_send(c, c->tx_iov, niov);
	for (unsigned i = 0; i < n; i++) {
		struct nbd_req *r = c->tx_req[i];

		r->sending = false;
		if (r->answered)
			nbd_complete(r, r->error);
	}
	return ret;
}

co_fn void co_nbd_sender(void *arg)
{
	struct nbd_conn *c = arg;
	struct nbd *n = c->n;

	for (;;) {
		while (!n->closing && !(c->up && !c->sending && !list_empty(&c->txq)))
			co_queue_wait(&c->tx_wait, "NBD requests to send");
		if (n->closing)
			break;
		c->sending = true;
		int ret = co_send_batch(c);

		c->sending = false;
		if (ret)
			nbd_conn_break(c, ret, c->why);
		if (!c->up)
			co_queue_wake_all(&n->changed);
	}
	n->tasks--;
	co_queue_wake_all(&n->changed);
}

void nbd_goodbye(struct nbd_conn *c)
{
	const struct nbd_req r = { .type = NBD_CMD_DISC };
	uint8_t head[NBD_EXT_REQUEST_LEN];

	/* Best effort: a server that takes nothing any more shall not hold us up. */
	if (c->up && !c->sending)
		nbd_send_last(c, head, put_request(c, &r, head));
}

co_fn void co_nbd_receiver(void *arg)
{
	struct nbd_conn *c = arg;
	struct nbd *n = c->n;

	for (;;) {
		while (!n->closing && !c->up)
			co_queue_wait(&c->rx_wait, "the NBD connection to come up");
		if (n->closing)
			break;
		c->receiving = true;
		int ret = co_nbd_receive_replies(c);

		if (ret == -EPROTO && c->up)
			nbd_die(n, -EIO, "breaks the NBD protocol: %s", c->why);
		if (ret == -ESHUTDOWN)
			nbd_goodbye(c);
		nbd_conn_break(c, ret, c->why);
		c->receiving = false;
		co_queue_wake_all(&n->changed);
	}
	n->tasks--;
	co_queue_wake_all(&n->changed);
}
