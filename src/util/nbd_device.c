/* SPDX-License-Identifier: MIT */
/* The kernel's NBD client, by generic netlink. */
#include "util/nbd_device.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/genetlink.h>
#include <linux/nbd-netlink.h>
#include <linux/netlink.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/err.h"

#define MESSAGE_MAX 2048u

/* --- Messages --- */

struct message {
	union {
		struct nlmsghdr h;
		uint8_t bytes[MESSAGE_MAX];
	};
	bool full;
};

static void begin(struct message *m, uint16_t family, uint8_t command, uint8_t version)
{
	struct genlmsghdr *g;

	memset(m, 0, sizeof(*m));
	m->h.nlmsg_type = family;
	m->h.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK;
	m->h.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN);
	g = NLMSG_DATA(&m->h);
	g->cmd = command;
	g->version = version;
}

/* Its place, so that end_nested() can write its length. */
static struct nlattr *put(struct message *m, uint16_t type, const void *data, size_t len)
{
	size_t at = NLMSG_ALIGN(m->h.nlmsg_len);
	struct nlattr *a = (struct nlattr *)(m->bytes + at);

	if (at + NLA_HDRLEN + NLA_ALIGN(len) > sizeof(m->bytes)) {
		m->full = true;
		return NULL;
	}
	a->nla_type = type;
	a->nla_len = (uint16_t)(NLA_HDRLEN + len);
	if (len)
		memcpy((uint8_t *)a + NLA_HDRLEN, data, len);
	m->h.nlmsg_len = (uint32_t)(at + NLA_HDRLEN + NLA_ALIGN(len));
	return a;
}

static void put_u32(struct message *m, uint16_t type, uint32_t value)
{
	put(m, type, &value, sizeof(value));
}

static void put_u64(struct message *m, uint16_t type, uint64_t value)
{
	put(m, type, &value, sizeof(value));
}

static void end_nested(struct message *m, struct nlattr *a)
{
	if (a)
		a->nla_len = (uint16_t)(m->bytes + m->h.nlmsg_len - (uint8_t *)a);
}

/* The attribute of that type in an answer, with at least `len` bytes of data. */
static const void *find(const struct nlmsghdr *h, uint16_t type, size_t len)
{
	size_t at = NLMSG_LENGTH(GENL_HDRLEN);

	while (at + NLA_HDRLEN <= h->nlmsg_len) {
		const struct nlattr *a = (const struct nlattr *)((const uint8_t *)h + at);

		if (a->nla_len < NLA_HDRLEN || a->nla_len > h->nlmsg_len - at)
			return NULL;
		if ((a->nla_type & NLA_TYPE_MASK) == type)
			return a->nla_len >= NLA_HDRLEN + len ? (const uint8_t *)a + NLA_HDRLEN : NULL;
		at += NLA_ALIGN(a->nla_len);
	}
	return NULL;
}

/* --- Talking to the kernel --- */

struct answer {
	uint16_t attr;		/* what is wanted of the answer */
	size_t len;		/* of it, at most 4 */
	uint32_t value;
	bool got;
};

/* One datagram. 1: more will come; 0 or -errno: that was the end. */
static int take(const uint8_t *buf, size_t len, struct answer *a)
{
	const struct nlmsghdr *h = (const struct nlmsghdr *)buf;

	while (len >= sizeof(*h) && h->nlmsg_len >= sizeof(*h) && h->nlmsg_len <= len) {
		const void *value;
		size_t step = NLMSG_ALIGN(h->nlmsg_len);

		if (h->nlmsg_type == NLMSG_ERROR)
			return h->nlmsg_len >= NLMSG_LENGTH(sizeof(struct nlmsgerr)) ? ((const struct nlmsgerr *)NLMSG_DATA(h))->error : -EPROTO;
		value = a && h->nlmsg_len >= NLMSG_LENGTH(GENL_HDRLEN) ? find(h, a->attr, a->len) : NULL;
		if (value) {
			memcpy(&a->value, value, a->len);
			a->got = true;
		}
		if (step >= len)
			break;
		h = (const struct nlmsghdr *)((const uint8_t *)h + step);
		len -= step;
	}
	return 1;
}

static int transact(int fd, const struct message *m, struct answer *a)
{
	_Alignas(struct nlmsghdr) uint8_t buf[8192];
	struct sockaddr_nl kernel = { .nl_family = AF_NETLINK }, from;
	int ret = 1;

	if (m->full)
		return -E2BIG;
	if (sendto(fd, m->bytes, m->h.nlmsg_len, 0, (struct sockaddr *)&kernel, sizeof(kernel)) < 0)
		return -errno;
	while (ret > 0) {
		socklen_t from_len = sizeof(from);
		ssize_t n = recvfrom(fd, buf, sizeof(buf), 0, (struct sockaddr *)&from, &from_len);

		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0 && from_len == sizeof(from) && !from.nl_pid)
			ret = take(buf, (size_t)n, a);
	}
	return ret;
}

/* A socket, and the number that the kernel gave to NBD. -ENOENT: it has no NBD. */
static int open_family(uint16_t *ret_family)
{
	struct answer a = { .attr = CTRL_ATTR_FAMILY_ID, .len = 2 };
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_GENERIC), ret;
	struct message m;
	uint16_t family;

	if (fd < 0)
		return -errno;
	begin(&m, GENL_ID_CTRL, CTRL_CMD_GETFAMILY, 1);
	put(&m, CTRL_ATTR_FAMILY_NAME, NBD_GENL_FAMILY_NAME, sizeof(NBD_GENL_FAMILY_NAME));
	ret = transact(fd, &m, &a);
	if (!ret && !a.got)
		ret = -ENOENT;
	if (ret < 0) {
		close(fd);
		return ret;
	}
	memcpy(&family, &a.value, sizeof(family));
	*ret_family = family;
	return fd;
}

bool nbd_device_possible(void)
{
	uint16_t family;
	int fd = open_family(&family);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static int run(struct message *m, struct answer *a)
{
	uint16_t family;
	int fd = open_family(&family), ret;

	if (fd < 0)
		return fd;
	m->h.nlmsg_type = family;
	ret = transact(fd, m, a);
	close(fd);
	return ret;
}

static int explain(struct err *err, int ret, const char *what)
{
	if (ret == -ENOENT)
		return err_set(err, ret, "%s: this kernel has no NBD client; modprobe nbd loads it", what);
	if (ret == -EPERM)
		return err_set(err, ret, "%s: only root, with CAP_SYS_ADMIN, may do that", what);
	return err_errno(err, ret, "%s", what);
}

/* --- Devices --- */

static void put_config(struct message *m, const struct nbd_device_config *c)
{
	struct nlattr *list, *item;

	put_u64(m, NBD_ATTR_SIZE_BYTES, c->size);
	put_u64(m, NBD_ATTR_BLOCK_SIZE_BYTES, c->block_size);
	put_u64(m, NBD_ATTR_SERVER_FLAGS, c->flags);
	put_u64(m, NBD_ATTR_DEAD_CONN_TIMEOUT, c->wait_s);
	/* None: a disk that is slow is not a connection that is lost, and a request that was sent twice may be carried out twice, late. */
	put_u64(m, NBD_ATTR_TIMEOUT, 0);
	put(m, NBD_ATTR_BACKEND_IDENTIFIER, c->backend, strlen(c->backend) + 1);
	list = put(m, NBD_ATTR_SOCKETS | NLA_F_NESTED, NULL, 0);
	item = put(m, NBD_SOCK_ITEM | NLA_F_NESTED, NULL, 0);
	put_u32(m, NBD_SOCK_FD, (uint32_t)c->fd);
	end_nested(m, item);
	end_nested(m, list);
}

int nbd_device_connect(const struct nbd_device_config *c, unsigned *ret_index, struct err *err)
{
	struct answer a = { .attr = NBD_ATTR_INDEX, .len = 4 };
	struct message m;
	int ret;

	begin(&m, 0, NBD_CMD_CONNECT, NBD_GENL_VERSION);
	put_config(&m, c);
	ret = run(&m, &a);
	if (!ret && !a.got)
		ret = -EPROTO;
	if (ret < 0)
		return explain(err, ret, "the kernel makes no NBD device");
	*ret_index = a.value;
	return 0;
}

int nbd_device_reconnect(unsigned index, const struct nbd_device_config *c, struct err *err)
{
	struct message m;
	char what[64];
	int ret;

	begin(&m, 0, NBD_CMD_RECONFIGURE, NBD_GENL_VERSION);
	put_u32(&m, NBD_ATTR_INDEX, index);
	put_config(&m, c);
	ret = run(&m, NULL);
	snprintf(what, sizeof(what), "/dev/nbd%u: cannot be connected again", index);
	return ret < 0 ? explain(err, ret, what) : 0;
}

int nbd_device_check_alive(const char *device, size_t block_size, struct err *err)
{
	void *buf = NULL;
	int fd = open(device, O_RDONLY | O_CLOEXEC | O_DIRECT), ret = fd < 0 ? -errno : -posix_memalign(&buf, 4096, block_size);

	if (!ret) {
		ssize_t n = pread(fd, buf, block_size, 0);

		/* One that comes short says nothing in errno. */
		ret = n < 0 ? -errno : (size_t)n == block_size ? 0 : -EIO;
	}
	if (ret < 0)
		err_errno(err, ret, "%s: does not work with its new server", device);
	free(buf);
	if (fd >= 0)
		close(fd);
	return ret;
}

int nbd_device_resize(unsigned index, const char *backend, uint64_t size, struct err *err)
{
	struct message m;
	char what[64];
	int ret;

	begin(&m, 0, NBD_CMD_RECONFIGURE, NBD_GENL_VERSION);
	put_u32(&m, NBD_ATTR_INDEX, index);
	put_u64(&m, NBD_ATTR_SIZE_BYTES, size);
	put(&m, NBD_ATTR_BACKEND_IDENTIFIER, backend, strlen(backend) + 1);
	ret = run(&m, NULL);
	snprintf(what, sizeof(what), "/dev/nbd%u: cannot be told its new size", index);
	return ret < 0 ? explain(err, ret, what) : 0;
}

int nbd_device_disconnect(unsigned index, struct err *err)
{
	struct message m;
	char what[64];
	int ret;

	begin(&m, 0, NBD_CMD_DISCONNECT, NBD_GENL_VERSION);
	put_u32(&m, NBD_ATTR_INDEX, index);
	ret = run(&m, NULL);
	snprintf(what, sizeof(what), "/dev/nbd%u: cannot be disconnected", index);
	return ret < 0 ? explain(err, ret, what) : 0;
}

/* --- What is there --- */

bool nbd_device_backend(unsigned index, char buf[NBD_BACKEND_MAX])
{
	char path[64];
	FILE *f;
	bool ok;

	snprintf(path, sizeof(path), "/sys/block/nbd%u/backend", index);
	f = fopen(path, "re");
	ok = f && fgets(buf, NBD_BACKEND_MAX, f);
	if (f)
		fclose(f);
	if (ok)
		buf[strcspn(buf, "\n")] = '\0';
	return ok && *buf;
}

void nbd_device_for_each(void (*fn)(void *arg, unsigned index, const char *backend), void *arg)
{
	char backend[NBD_BACKEND_MAX], *end;
	DIR *d = opendir("/sys/block");
	struct dirent *e;

	while (d && (e = readdir(d))) {
		unsigned long index = strncmp(e->d_name, "nbd", 3) ? 0 : strtoul(e->d_name + 3, &end, 10);

		if (strncmp(e->d_name, "nbd", 3) || end == e->d_name + 3 || *end || index > UINT32_MAX)
			continue;
		if (nbd_device_backend((unsigned)index, backend))
			fn(arg, (unsigned)index, backend);
	}
	if (d)
		closedir(d);
}
