/* SPDX-License-Identifier: MIT */
/*
 * vhost-user-blk server: messages on the socket, in and out.
 */
#include "export/vhost/internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"

static void close_fds(struct vhost_message *m)
{
	for (unsigned i = 0; i < m->nfds; i++)
		if (m->fd[i] >= 0)
			close(m->fd[i]);
	m->nfds = 0;
}

/* Descriptors come with the first byte. More than there is room for are closed by the kernel, and the message is refused. */
static co_fn int co_receive_header(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(VHOST_USER_MAX_FDS * sizeof(int))];
	} control;
	struct iovec iov = { &m->hdr, sizeof(m->hdr) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof(control.buf) };
	ssize_t n = co_io_recvmsg(d->fd, &msg, MSG_CMSG_CLOEXEC);

	m->nfds = 0;
	if (n <= 0)
		return n < 0 ? (int)n : -ENOTCONN;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		unsigned k = c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;

		for (unsigned i = 0; i < k; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (m->nfds < VHOST_USER_MAX_FDS)
				m->fd[m->nfds++] = fd;
			else
				close(fd);
		}
	}
	if (msg.msg_flags & MSG_CTRUNC)
		return err_set(err, -EPROTO, "more than %u descriptors with one message", VHOST_USER_MAX_FDS);
	if ((size_t)n < sizeof(m->hdr))
		return co_io_recv_all(d->fd, (char *)&m->hdr + n, sizeof(m->hdr) - (size_t)n);
	return 0;
}

static co_fn int co_receive(struct vhost_device *d, struct vhost_message *m, struct err *err)
{
	int ret;

	memset(&m->p, 0, sizeof(m->p));
	m->reply = false;
	m->reply_len = 0;
	m->reply_fd = -1;
	ret = co_receive_header(d, m, err);
	if (ret < 0)
		return ret;
	if ((m->hdr.flags & VHOST_USER_VERSION_MASK) != VHOST_USER_VERSION || m->hdr.flags & VHOST_USER_REPLY)
		return err_set(err, -EPROTO, "message %u has flags 0x%x: this is not version 1 of vhost-user", m->hdr.request, m->hdr.flags);
	if (m->hdr.size > sizeof(m->p))
		return err_set(err, -EPROTO, "message %u of %u bytes", m->hdr.request, m->hdr.size);
	return m->hdr.size ? co_io_recv_all(d->fd, &m->p, m->hdr.size) : 0;
}

static co_fn int co_reply(struct vhost_device *d, struct vhost_message *m)
{
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(sizeof(int))];
	} control;
	struct vhost_user_hdr hdr = { m->hdr.request, VHOST_USER_VERSION | VHOST_USER_REPLY, m->reply_len };
	struct iovec iov[2] = { { &hdr, sizeof(hdr) }, { &m->p, m->reply_len } };
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = m->reply_len ? 2 : 1 };
	size_t total = sizeof(hdr) + m->reply_len;
	ssize_t n;

	if (m->reply_fd >= 0) {
		struct cmsghdr *c;

		memset(&control, 0, sizeof(control));
		msg.msg_control = control.buf;
		msg.msg_controllen = sizeof(control.buf);
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &m->reply_fd, sizeof(int));
	}
	n = co_io_sendmsg(d->fd, &msg, 0);
	if (m->reply_fd >= 0)
		close(m->reply_fd);
	if (n < 0)
		return (int)n;
	if ((size_t)n == total)
		return 0;
	/* A stream socket may take a part; only the first part carries the descriptor. */
	if ((size_t)n < sizeof(hdr)) {
		int ret = co_io_send_all(d->fd, (char *)&hdr + n, sizeof(hdr) - (size_t)n);

		if (ret < 0)
			return ret;
		n = sizeof(hdr);
	}
	return co_io_send_all(d->fd, (char *)&m->p + ((size_t)n - sizeof(hdr)), total - (size_t)n);
}

/* One message; an error ends the connection. */
static co_fn int co_one_message(struct vhost_device *d, struct err *err)
{
	struct vhost_message m;
	bool ack;
	int ret = co_receive(d, &m, err);

	if (ret < 0) {
		close_fds(&m);
		return ret;
	}
	log_debug("%s: %s, flags 0x%x, %u bytes, %u descriptors", d->config.path, message_name(m.hdr.request) ?: "?", m.hdr.flags, m.hdr.size, m.nfds);
	ret = check_message(&m, err);
	if (!ret)
		ret = co_handle_message(d, &m, err);
	close_fds(&m);
	/* As it is now: Linux' own front end asks for the answer to the very message that negotiates answers. */
	ack = (m.hdr.flags & VHOST_USER_NEED_REPLY) && (d->protocol & VHOST_USER_PROTOCOL_F_REPLY_ACK);
	if (ret < 0 && message_name(m.hdr.request))
		err_prefix(err, "%s", message_name(m.hdr.request));
	if (ret < 0 && !(ack && !m.reply))
		return ret;
	if (ret < 0)
		log_warn("%s: %s", d->config.path, err->msg);
	if (!m.reply && !ack)
		return 0;
	if (!m.reply) {
		m.p.u64 = ret < 0;
		m.reply_len = sizeof(m.p.u64);
		m.reply_fd = -1;
		err_clear(err);
	}
	return co_reply(d, &m);
}

co_fn void co_device_serve(struct vhost_device *d)
{
	struct err err = ERR_INIT;
	int ret;

	do {
		ret = co_one_message(d, &err);
	} while (!ret);
	if (err.code) {
		log_error("%s: the front end's connection is ended: %s", d->config.path, err.msg);
		d->err = err;
	} else if (ret != -ENOTCONN && ret != -ECONNRESET) {
		log_warn("%s: the connection to the front end ended: %s", d->config.path, strerror(-ret));
	}
}

/* A front end that does not read its messages loses this one: it then learns of the change when it looks by itself. */
void device_config_changed(struct vhost_device *d)
{
	struct vhost_user_hdr hdr = { VHOST_USER_BACKEND_CONFIG_CHANGE, VHOST_USER_VERSION, 0 };

	if (d->backend_fd < 0 || !(d->protocol & VHOST_USER_PROTOCOL_F_CONFIG))
		return;
	if (send(d->backend_fd, &hdr, sizeof(hdr), MSG_DONTWAIT | MSG_NOSIGNAL) != sizeof(hdr))
		log_warn("%s: the front end does not take the message that its disk has changed", d->config.path);
}
