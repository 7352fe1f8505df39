/* SPDX-License-Identifier: MIT */
/*
 * NBD server: sending.
 *
 * Replies queue at the connection. Who finds nobody sending becomes the sender: it goes to the end of the ready queue once, so that all requests that
 * completed in this turn queue theirs, and then sends until the queue is empty, many replies a system call.
 */
#include "export/nbd/internal.h"

#include <errno.h>

#define SEND_IOV 128		/* pieces of one system call: up to 64 replies with data */

/* Drops the first `sent` bytes of a list; returns how many pieces are gone altogether. */
static int advance(struct iovec *iov, int n, size_t sent)
{
	int i = 0;

	while (i < n && sent >= iov[i].iov_len)
		sent -= iov[i++].iov_len;
	if (i < n) {
		iov[i].iov_base = (char *)iov[i].iov_base + sent;
		iov[i].iov_len -= sent;
	}
	return i;
}

co_fn int co_conn_send(struct nbd_conn *c, struct iovec *iov, int n)
{
	int i = advance(iov, n, 0);

	while (i < n && !c->dead) {
		ssize_t ret;

		c->send_since_ns = rt_now_ns();
		ret = c->t->ops->co_send(c->t, iov + i, n - i);
		c->send_since_ns = 0;
		if (ret < 0) {
			conn_kill(c);
			break;
		}
		c->sends++;
		c->bytes_out += ret;
		i += advance(iov + i, n - i, ret);
	}
	return c->dead ? -ECONNRESET : 0;
}

/* Takes replies off the queue into `batch` and describes them; returns the count of pieces. */
static int gather(struct nbd_conn *c, struct list *batch, struct iovec *iov)
{
	int n = 0;

	while (!list_empty(&c->sendq) && n + 2 <= SEND_IOV) {
		struct nbd_request *r = list_first(&c->sendq, struct nbd_request, node);

		list_del(&r->node);
		list_add_tail(batch, &r->node);
		iov[n++] = (struct iovec){ r->head, r->head_len };
		if (r->data_len)
			iov[n++] = (struct iovec){ r->buf, r->data_len };
	}
	return n;
}

co_fn void co_request_reply(struct nbd_request *r)
{
	struct nbd_conn *c = r->conn;
	struct iovec iov[SEND_IOV];

	list_add_tail(&c->sendq, &r->node);
	if (c->sending)
		return;
	c->sending = true;
	if (c->in_flight > 1)
		co_yield();
	while (!list_empty(&c->sendq)) {
		struct list batch = LIST_INIT(batch);
		int n = gather(c, &batch, iov);

		co_conn_send(c, iov, n);
		list_for_each_safe(&batch, node) {
			list_del(node);
			request_put(container_of(node, struct nbd_request, node));
		}
	}
	c->sending = false;
}
