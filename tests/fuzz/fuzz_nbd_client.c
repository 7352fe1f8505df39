/* SPDX-License-Identifier: MIT */
/*
 * The NBD client, fed with bytes as from a server. Two bytes (big-endian) say how many of those behind them are for the handshake; the rest is
 * sent once a fixed set of requests is on its way, and then the server's end says no more. The data of a read that succeeds must have come
 * from the stream or be zero: the memory is filled with a pattern first that the client may never hand out.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/nbd.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

#define INPUT_MAX (128u << 10)
#define READ_LEN 12288u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct rt *rt;
static struct disk *disk;
static const uint8_t *input;
static size_t input_len, greeting;
static int server = -1;

static void say(const uint8_t *data, size_t len)
{
	if (len && send(server, data, len, MSG_NOSIGNAL) != (ssize_t)len && errno != EPIPE)
		abort();
}

static int dial(void *arg)
{
	int sv[2], bytes = 4 * INPUT_MAX;

	if (server >= 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv))
		return -ECONNREFUSED;
	setsockopt(sv[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	fcntl(sv[0], F_SETFL, O_NONBLOCK);
	server = sv[0];
	say(input, greeting);
	if (greeting == input_len)
		shutdown(server, SHUT_WR);
	return sv[1];
}

static co_fn int co_reads(void *arg)
{
	static const uint8_t pattern[16] = "never from here";
	uint8_t buf[READ_LEN];
	struct iovec iov[3] = { { buf, 4000 }, { buf + 4000, 1 }, { buf + 4001, READ_LEN - 4001 } };
	int ret;

	for (unsigned i = 0; i < READ_LEN; i += sizeof(pattern))
		memcpy(buf + i, pattern, sizeof(pattern));
	ret = co_disk_readv(disk, (uintptr_t)arg, iov, 3, 0);
	for (unsigned i = 0; !ret && i + sizeof(pattern) <= READ_LEN; i += sizeof(pattern)) {
		if (!memcmp(buf + i, pattern, sizeof(pattern)) && !memmem(input, input_len, pattern, sizeof(pattern)))
			abort();
	}
	return 0;
}

static co_fn int co_writes(void *arg)
{
	static const uint8_t buf[4096] = { 1 };

	co_disk_write(disk, 0, buf, sizeof(buf), (uintptr_t)arg);
	return 0;
}

static co_fn int co_flushes(void *arg)
{
	co_disk_flush(disk);
	return 0;
}

static co_fn int co_zeroes(void *arg)
{
	co_disk_zero(disk, 4096, 8192, DISK_UNMAP);
	return 0;
}

static co_fn int co_asks(void *arg)
{
	struct disk_extent e;

	if (!co_disk_extent(disk, 0, disk->size, &e) && (!e.len || e.len > disk->size))
		abort();
	return 0;
}

static bool opening;

/* A greeting that leaves the handshake waiting for more is all that comes. */
static co_fn void co_hangs_up(void *arg)
{
	for (int i = 0; i < 100 && opening; i++)
		co_yield();
	if (opening && server >= 0)
		shutdown(server, SHUT_WR);
}

static co_fn void co_main(void *arg)
{
	struct nbd_config config = { .connections = 1, .replay = 1 << 20, .dial = dial };
	struct err err = ERR_INIT;
	struct co_group g;

	config.uri.export = strdup("");
	opening = true;
	if (co_spawn("hang up", co_hangs_up, NULL))
		abort();
	int ret = co_nbd_open_config(&config, "fuzz", DISK_OPEN_RDWR, &disk, &err);

	opening = false;
	if (ret) {
		if (!err.code || !err.msg[0])
			abort();
		return;
	}
	if (disk->size >= 1 << 20) {
		co_group_init(&g);
		co_group_start(&g, "read", co_reads, (void *)0);
		co_group_start(&g, "read", co_reads, (void *)65536);
		co_group_start(&g, "write", co_writes, (void *)0);
		co_group_start(&g, "write", co_writes, (void *)DISK_FUA);
		co_group_start(&g, "zero", co_zeroes, NULL);
		co_group_start(&g, "extent", co_asks, NULL);
		co_group_start(&g, "flush", co_flushes, NULL);
		for (int i = 0; i < 4; i++)
			co_yield();
		say(input + greeting, input_len - greeting);
		shutdown(server, SHUT_WR);
		co_group_wait(&g);
		/* What comes after the loss of the connection. */
		co_reads(NULL);
		co_flushes(NULL);
	}
	shutdown(server, SHUT_WR);
	co_disk_close(disk);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (!rt) {
		struct rt_bufpool *pool;

		if (!getenv("VERBOSE"))
			log_set_level((enum log_level)-1);
		if (rt_create(NULL, &rt, NULL) || rt_bufpool_create(rt, 64 << 20, &pool, NULL))
			abort();
		rt_set_bufs(rt, pool);
	}
	if (size < 2)
		return 0;
	input = data + 2;
	input_len = min(size - 2, (size_t)INPUT_MAX);
	greeting = min((size_t)get_be16(data), input_len);
	if (rt_run(rt, co_main, NULL))
		abort();
	if (server >= 0)
		close(server);
	server = -1;
	return 0;
}
