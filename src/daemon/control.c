/* SPDX-License-Identifier: MIT */
/*
 * Control socket: clients and their lines. What the commands do is in commands.c.
 *
 * Everything is bounded: CLIENTS_MAX clients (one more pushes out the one that has been silent for longest), LINE_MAX_BYTES of a request,
 * SEND_TIMEOUT_NS for a client to take an answer.
 */
#include "daemon/control.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/internal.h"
#include "rt/io.h"
#include "util/access.h"
#include "util/err.h"
#include "util/log.h"
#include "util/unixsock.h"

#define CLIENTS_MAX 32
#define LEAVE_TURNS 100u	/* ms */
#define LINE_MAX_BYTES 4096
#define SEND_TIMEOUT_NS (5 * 1000000000ull)

struct client {
	struct list node;
	struct control *c;
	int fd;
	bool leaving;		/* pushed out, and not gone yet */
	bool busy, skipping;	/* skipping: the rest of a line that is too long */
	struct rt_timer timer;	/* while sending */
	size_t len;
	char buf[LINE_MAX_BYTES + 1];
};

struct control {
	struct serve *s;
	struct unix_listener sock;
	struct list clients;	/* who spoke last is last */
	unsigned n, users;	/* users: coroutines that hold on to this */
	bool accepting, stop;
};

static void control_put(struct control *c)
{
	if (!--c->users)
		free(c);
}

static void send_timeout(struct rt_timer *t)
{
	rt_io_shutdown(container_of(t, struct client, timer)->fd);
}

static co_fn int co_send_line(void *arg, const char *text, size_t len)
{
	struct client *cl = arg;
	struct iovec iov[2] = { { (void *)text, len }, { (void *)"\n", 1 } };
	int ret;

	rt_timer_arm(&cl->timer, rt_now_ns() + SEND_TIMEOUT_NS, send_timeout);
	ret = co_io_sendv_all(cl->fd, iov, 2);
	rt_timer_cancel(&cl->timer);
	return ret;
}

static co_fn int co_refuse_long_line(struct client *cl)
{
	static const char text[] = "{\"ok\": false, \"error\": \"the line is longer than 4096 bytes\"}";

	cl->skipping = true;
	cl->len = 0;
	return co_send_line(cl, text, sizeof(text) - 1);
}

/* Answers the lines that are complete in the buffer. */
static co_fn int co_answer_lines(struct client *cl)
{
	char *nl;

	while ((nl = memchr(cl->buf, '\n', cl->len))) {
		size_t line = nl - cl->buf;
		int ret = 0;

		if (!cl->skipping)
			ret = co_control_request(cl->c->s, cl->buf, line, co_send_line, cl);
		cl->skipping = false;
		if (ret < 0)
			return ret;
		cl->len -= line + 1;
		memmove(cl->buf, nl + 1, cl->len);
	}
	if (cl->skipping)
		cl->len = 0;
	return cl->len > LINE_MAX_BYTES ? co_refuse_long_line(cl) : 0;
}

static co_fn void co_client_main(void *arg)
{
	struct client *cl = arg;
	struct control *c = cl->c;

	while (!c->stop) {
		ssize_t got = co_io_recv(cl->fd, cl->buf + cl->len, sizeof(cl->buf) - cl->len, 0);
		int ret;

		if (got <= 0)
			break;
		list_del(&cl->node);
		list_add_tail(&c->clients, &cl->node);
		cl->len += got;
		cl->busy = true;
		ret = co_answer_lines(cl);
		cl->busy = false;
		if (ret < 0)
			break;
	}
	list_del(&cl->node);
	c->n--;
	close(cl->fd);
	free(cl);
	control_put(c);
}

/* Who waits for the result of a command stays. */
static void push_out_silent(struct control *c)
{
	list_for_each(&c->clients, n) {
		struct client *cl = container_of(n, struct client, node);

		if (!cl->busy && !cl->leaving) {
			cl->leaving = true;
			rt_io_shutdown(cl->fd);
			return;
		}
	}
}

static void client_start(struct control *c, int fd)
{
	struct client *cl = NULL;

	/* Those that were pushed out need a turn to go. */
	if (c->n < 2 * CLIENTS_MAX)
		cl = calloc(1, sizeof(*cl));
	if (cl) {
		cl->c = c;
		cl->fd = fd;
	}
	if (!cl || co_spawn("control client", co_client_main, cl) < 0) {
		static const char text[] = "{\"ok\": false, \"error\": \"too many clients\"}\n";

		(void)!send(fd, text, sizeof(text) - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		close(fd);
		free(cl);
		return;
	}
	if (c->n >= CLIENTS_MAX)
		push_out_silent(c);
	list_add_tail(&c->clients, &cl->node);
	c->n++;
	c->users++;
}

static co_fn void co_accept_main(void *arg)
{
	struct control *c = arg;

	while (!c->stop) {
		int fd = co_io_accept(c->sock.fd, NULL, NULL);

		/* A burst of clients: those that were pushed out get their turn to go before anybody is refused. */
		for (unsigned i = 0; fd >= 0 && c->n >= 2 * CLIENTS_MAX && i < LEAVE_TURNS && !c->stop; i++)
			co_sleep_ns(1000000);
		if (fd >= 0)
			client_start(c, fd);
		else if (!c->stop)
			co_sleep_ns(100 * 1000000ull);
	}
	unix_unlisten(&c->sock);
	control_put(c);
}

int control_start(struct serve *s, const char *path, struct control **ret, struct err *err)
{
	static const struct file_access access = { .mode = 0600, .uid = (uid_t)-1, .gid = (gid_t)-1 };
	struct control *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return err_set(err, -ENOMEM, "control socket: out of memory");
	c->s = s;
	list_init(&c->clients);
	r = unix_listen(path, &access, CLIENTS_MAX, &c->sock, err);
	if (r < 0) {
		err_prefix(err, "control socket");
		free(c);
		return r;
	}
	c->users = 1;
	*ret = c;
	return 0;
}

int control_accept(struct control *c, struct err *err)
{
	int r = co_spawn("control accept", co_accept_main, c);

	if (r < 0)
		return err_errno(err, r, "control socket");
	c->accepting = true;
	return 0;
}

void control_stop(struct control *c)
{
	if (!c)
		return;
	c->stop = true;
	if (!c->accepting) {
		unix_unlisten(&c->sock);
		control_put(c);
		return;
	}
	rt_io_shutdown(c->sock.fd);
	list_for_each(&c->clients, n)
		rt_io_shutdown(container_of(n, struct client, node)->fd);
}
