/* SPDX-License-Identifier: MIT */
/* An NBD client's handshake, blocking: fixed newstyle, NBD_OPT_GO. */
#include "cli/nbd_dial.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/err.h"
#include "util/nbd_proto.h"

#define REPLIES_MAX 64		/* to one option */
#define MIN_BLOCK_MAX (64u << 10)	/* the protocol's own limit */
#define MS 1000000ull

struct talk {
	int fd;
	uint64_t until_ns;
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 * MS + (uint64_t)ts.tv_nsec;
}

/* How long a call on the socket waits; 0: forever. */
static int set_patience(int fd, uint64_t ns)
{
	struct timeval t = { .tv_sec = (time_t)(ns / (1000 * MS)), .tv_usec = (suseconds_t)(ns % (1000 * MS) / 1000) };

	return setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof(t)) < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof(t)) < 0 ? -errno : 0;
}

/* The next call waits for no longer than what is left of the time for all of them. */
static int go_on(const struct talk *t)
{
	uint64_t now = now_ns();

	return now + 1000 < t->until_ns ? set_patience(t->fd, t->until_ns - now) : -ETIMEDOUT;
}

static int dial(struct talk *t, const char *path)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int ret;

	if (strlen(path) >= sizeof(sun.sun_path))
		return -ENAMETOOLONG;
	strcpy(sun.sun_path, path);
	t->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (t->fd < 0)
		return -errno;
	ret = go_on(t);
	/* It waits, too, for a place in the queue of who accepts nobody. */
	if (!ret && connect(t->fd, (struct sockaddr *)&sun, sizeof(sun)) < 0)
		ret = errno == EAGAIN ? -ETIMEDOUT : -errno;
	return ret;
}

static int receive_all(const struct talk *t, void *buf, size_t len)
{
	for (size_t at = 0; at < len;) {
		int ret = go_on(t);
		ssize_t n = ret < 0 ? ret : recv(t->fd, (char *)buf + at, len - at, MSG_WAITALL);

		if (ret < 0)
			return ret;
		if (n <= 0)
			return !n ? -ECONNRESET : errno == EAGAIN ? -ETIMEDOUT : -errno;
		at += (size_t)n;
	}
	return 0;
}

static int send_all(const struct talk *t, const void *buf, size_t len)
{
	for (size_t at = 0; at < len;) {
		int ret = go_on(t);
		ssize_t n = ret < 0 ? ret : send(t->fd, (const char *)buf + at, len - at, MSG_NOSIGNAL);

		if (ret < 0)
			return ret;
		if (n < 0)
			return errno == EAGAIN ? -ETIMEDOUT : -errno;
		at += (size_t)n;
	}
	return 0;
}

static int greet(const struct talk *t, struct err *err)
{
	uint8_t hello[18], flags[4];
	int ret = receive_all(t, hello, sizeof(hello));

	if (ret < 0)
		return ret;
	if (get_be64(hello) != NBD_MAGIC || get_be64(hello + 8) != NBD_OPT_MAGIC || !(get_be16(hello + 16) & NBD_FLAG_FIXED_NEWSTYLE))
		return err_set(err, -EPROTO, "is no NBD server");
	put_be32(flags, NBD_FLAG_FIXED_NEWSTYLE | (get_be16(hello + 16) & NBD_FLAG_NO_ZEROES));
	return send_all(t, flags, sizeof(flags));
}

static int ask(const struct talk *t, const char *export)
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
	return send_all(t, msg, 24 + name);
}

static int violation(struct err *err, const char *what)
{
	return err_set(err, -EPROTO, "breaks the NBD protocol: %s", what);
}

static int take_info(const uint8_t *data, uint32_t len, struct nbd_dialled *d, struct err *err)
{
	if (len < 2)
		return violation(err, "an information that is none");
	switch (get_be16(data)) {
	case NBD_INFO_EXPORT:
		if (len != 12)
			return violation(err, "the export's information has a wrong length");
		d->size = get_be64(data + 2);
		d->flags = get_be16(data + 10);
		break;
	case NBD_INFO_BLOCK_SIZE:
		if (len != 14)
			return violation(err, "the block sizes have a wrong length");
		d->min_block = get_be32(data + 2);
		break;
	}
	return 1;
}

/* All is said. */
static int check_export(const struct nbd_dialled *d, uint32_t len, struct err *err)
{
	if (len)
		return violation(err, "an acknowledgement with something in it");
	if (!(d->flags & NBD_FLAG_HAS_FLAGS))
		return err_set(err, -EPROTO, "does not say what the export is like");
	if (!is_pow2(d->min_block) || d->min_block > MIN_BLOCK_MAX)
		return err_set(err, -EPROTO, "breaks the NBD protocol: its smallest block is to have %u bytes", d->min_block);
	if (d->size > INT64_MAX)
		return err_set(err, -EPROTO, "says that the export has %llu bytes, which no disk has", (unsigned long long)d->size);
	return 0;
}

/* 1: there are more. */
static int take_reply(const struct talk *t, struct nbd_dialled *d, struct err *err)
{
	uint8_t head[NBD_OPTION_REPLY_LEN], data[NBD_STRING_MAX + 64];
	uint32_t type, len;
	int ret = receive_all(t, head, sizeof(head));

	if (ret < 0)
		return ret;
	type = get_be32(head + 12);
	len = get_be32(head + 16);
	if (get_be64(head) != NBD_REP_MAGIC || get_be32(head + 8) != NBD_OPT_GO || len >= sizeof(data))
		return violation(err, "a reply to an option that is none");
	ret = receive_all(t, data, len);
	if (ret < 0)
		return ret;
	data[len] = '\0';
	if (type == NBD_REP_ACK)
		return check_export(d, len, err);
	if (type == NBD_REP_INFO)
		return take_info(data, len, d, err);
	if (type == NBD_REP_ERR_TLS_REQD)
		return err_set(err, -EACCES, "wants TLS, which the kernel's client does not do here");
	if (type & 0x80000000u)
		return err_set(err, -ENOENT, "refuses%s%.200s", len ? ": " : "", (const char *)data);
	return violation(err, "a reply of another kind than the option has");
}

static int shake_hands(const struct talk *t, const char *export, struct nbd_dialled *d, struct err *err)
{
	int ret = greet(t, err), more = 1;

	if (!ret)
		ret = ask(t, export);
	for (int i = 0; !ret && more; i++) {
		more = i < REPLIES_MAX ? take_reply(t, d, err) : err_set(err, -EPROTO, "does not come to an end");
		ret = min(more, 0);
	}
	/* The kernel would end a connection on which nothing comes for a while. */
	return ret < 0 ? ret : set_patience(t->fd, 0);
}

int nbd_dial(const char *path, const char *export, unsigned patience_ms, struct nbd_dialled *ret, struct err *err)
{
	struct talk t = { .fd = -1, .until_ns = now_ns() + patience_ms * MS };
	struct nbd_dialled d = { .min_block = 1 };
	int r = dial(&t, path);

	if (!r)
		r = shake_hands(&t, export, &d, err);
	if (r < 0) {
		if (t.fd >= 0)
			close(t.fd);
		return err->code ? err_prefix(err, "%s", path) : err_errno(err, r, "%s", path);
	}
	d.fd = t.fd;
	*ret = d;
	return 0;
}
