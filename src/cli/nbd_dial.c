/* SPDX-License-Identifier: MIT */
/* An NBD client's handshake, blocking: fixed newstyle, NBD_OPT_GO. */
#include "cli/nbd_dial.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/err.h"
#include "util/nbd_proto.h"

#define PATIENCE_S 10
#define REPLIES_MAX 64		/* to one option */

static int dial(const char *path)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	struct timeval patience = { .tv_sec = PATIENCE_S };
	int fd;

	if (strlen(path) >= sizeof(sun.sun_path))
		return -ENAMETOOLONG;
	strcpy(sun.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) < 0 || connect(fd, (struct sockaddr *)&sun, sizeof(sun)) < 0) {
		int ret = -errno;

		close(fd);
		return ret;
	}
	return fd;
}

static int get(int fd, void *buf, size_t len)
{
	/* To receive nothing waits for something. */
	ssize_t n = len ? recv(fd, buf, len, MSG_WAITALL) : 0;

	return n == (ssize_t)len ? 0 : n < 0 ? -errno : -ECONNRESET;
}

static int put(int fd, const void *buf, size_t len)
{
	ssize_t n = send(fd, buf, len, MSG_NOSIGNAL);

	return n == (ssize_t)len ? 0 : n < 0 ? -errno : -EPIPE;
}

static int greet(int fd, struct err *err)
{
	uint8_t hello[18], flags[4];
	int ret = get(fd, hello, sizeof(hello));

	if (ret < 0)
		return ret;
	if (get_be64(hello) != NBD_MAGIC || get_be64(hello + 8) != NBD_OPT_MAGIC || !(get_be16(hello + 16) & NBD_FLAG_FIXED_NEWSTYLE))
		return err_set(err, -EPROTO, "is no NBD server");
	put_be32(flags, NBD_FLAG_FIXED_NEWSTYLE | (get_be16(hello + 16) & NBD_FLAG_NO_ZEROES));
	return put(fd, flags, sizeof(flags));
}

static int ask(int fd, const char *export)
{
	uint32_t name = (uint32_t)strlen(export);
	uint8_t msg[NBD_OPTION_LEN + 4 + NBD_STRING_MAX + 4];

	if (name > NBD_STRING_MAX)
		return -ENAMETOOLONG;
	put_be64(msg, NBD_OPT_MAGIC);
	put_be32(msg + 8, NBD_OPT_GO);
	put_be32(msg + 12, 4 + name + 4);
	put_be32(msg + 16, name);
	memcpy(msg + 20, export, name);
	put_be16(msg + 20 + name, 1);
	put_be16(msg + 22 + name, NBD_INFO_BLOCK_SIZE);
	return put(fd, msg, 24 + name);
}

static void take_info(const uint8_t *data, uint32_t len, struct nbd_dialled *d)
{
	unsigned type = len >= 2 ? get_be16(data) : UINT16_MAX;

	if (type == NBD_INFO_EXPORT && len == 12) {
		d->size = get_be64(data + 2);
		d->flags = get_be16(data + 10);
	} else if (type == NBD_INFO_BLOCK_SIZE && len == 14) {
		d->min_block = get_be32(data + 2);
	}
}

/* 1: there are more. */
static int take_reply(int fd, struct nbd_dialled *d, struct err *err)
{
	uint8_t head[NBD_OPTION_REPLY_LEN], data[NBD_STRING_MAX + 64];
	uint32_t type, len;
	int ret = get(fd, head, sizeof(head));

	if (ret < 0)
		return ret;
	type = get_be32(head + 12);
	len = get_be32(head + 16);
	if (get_be64(head) != NBD_REP_MAGIC || get_be32(head + 8) != NBD_OPT_GO || len >= sizeof(data))
		return err_set(err, -EPROTO, "breaks the NBD protocol");
	ret = get(fd, data, len);
	if (ret < 0)
		return ret;
	data[len] = '\0';
	if (type == NBD_REP_ACK)
		return d->flags & NBD_FLAG_HAS_FLAGS ? 0 : err_set(err, -EPROTO, "does not say what the export is like");
	if (type == NBD_REP_ERR_TLS_REQD)
		return err_set(err, -EACCES, "wants TLS, which the kernel's client does not do here");
	if (type & 0x80000000u)
		return err_set(err, -ENOENT, "refuses%s%.200s", len ? ": " : "", (const char *)data);
	if (type == NBD_REP_INFO)
		take_info(data, len, d);
	return 1;
}

static int shake_hands(int fd, const char *export, struct nbd_dialled *d, struct err *err)
{
	struct timeval forever = { 0 };
	int ret = greet(fd, err);

	if (!ret)
		ret = ask(fd, export);
	for (int i = 0; !ret; i++) {
		ret = i < REPLIES_MAX ? take_reply(fd, d, err) : err_set(err, -EPROTO, "does not come to an end");
		if (!ret)
			break;
		ret = ret > 0 ? 0 : ret;
	}
	/* The kernel would end a connection on which nothing comes for a while. */
	if (!ret && setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof(forever)) < 0)
		ret = -errno;
	return ret;
}

int nbd_dial(const char *path, const char *export, struct nbd_dialled *ret, struct err *err)
{
	struct nbd_dialled d = { .min_block = 1 };
	int r;

	d.fd = dial(path);
	r = d.fd < 0 ? d.fd : shake_hands(d.fd, export, &d, err);
	if (r < 0) {
		if (d.fd >= 0)
			close(d.fd);
		return err->code ? err_prefix(err, "%s", path) : err_errno(err, r, "%s", path);
	}
	*ret = d;
	return 0;
}
