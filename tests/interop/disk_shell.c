/* SPDX-License-Identifier: MIT */
/*
 * Drives any disk from a script: commands on standard input, one a line, each a coroutine of its own; answers on standard output as they come.
 *
 *	usage: disk_shell DISK [read-only|log|unlocked]
 *
 *	TAG read OFF LEN            TAG ok HEX           (up to 64 bytes), or the byte that all of it is, as "all XX", or "crc XXXXXXXX"
 *	TAG write OFF LEN BYTE [fua]
 *	TAG zero|discard OFF LEN [fua|unmap|fast ...]
 *	TAG flush                   TAG ok
 *	TAG extent OFF LEN          TAG ok LEN [hole] [zero]
 *	TAG prefetch OFF LEN
 *	TAG status|limits           TAG ok JSON|NAME=VALUE ...
 *	TAG cancel                  disk_cancel()
 *
 * An error is answered with "TAG -ERRNO NAME". The first line is "open ok SIZE" or "open -ERRNO MESSAGE". At the end of its input it waits for what is in
 * flight, closes the disk, and prints "closed".
 */
#include <errno.h>
#include <jansson.h>

#include "blk/disk.h"
#include "blk/spec.h"
#include "format/qcow2/qcow2.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "rt/sync.h"
#include "util/bytes.h"
#include "util/crc32c.h"
#include "util/err.h"

#define LINE_MAX_LEN 512

static struct disk *disk;
static unsigned running;
static struct co_queue idle;
static const char *text, *mode;

struct command {
	char line[LINE_MAX_LEN];
};

static void answer(const char *tag, int error, const char *words)
{
	if (error)
		printf("%s %d %s\n", tag, error, strerror(-error));
	else
		printf("%s ok%s%s\n", tag, *words ? " " : "", words);
	fflush(stdout);
}

static unsigned flags_of(const char *s)
{
	return (strstr(s, "fua") ? DISK_FUA : 0) | (strstr(s, "unmap") ? DISK_UNMAP : 0) | (strstr(s, "fast") ? DISK_FAST : 0);
}

static void describe(const uint8_t *buf, size_t len, char *words)
{
	if (len && !memcmp(buf, buf + 1, len - 1)) {
		sprintf(words, "all %02x", buf[0]);
	} else if (len <= 64) {
		for (size_t i = 0; i < len; i++)
			sprintf(words + 2 * i, "%02x", buf[i]);
	} else {
		sprintf(words, "crc %08x", crc32c(0, buf, len));
	}
}

static co_fn int co_io(const char *verb, uint64_t off, uint64_t len, const char *rest, char *words)
{
	uint8_t *buf = malloc(len + 1);
	int ret;

	CHECK(buf);
	if (*verb == 'r') {
		ret = co_disk_read(disk, off, buf, len, 0);
		if (!ret)
			describe(buf, len, words);
	} else {
		memset(buf, strtoul(rest, NULL, 16), len);
		ret = co_disk_write(disk, off, buf, len, flags_of(rest));
	}
	free(buf);
	return ret;
}

static void limits(char *words)
{
	const struct disk_limits *l = &disk->limits;

	sprintf(words, "size=%llu align=%u max_io=%u opt_io=%u discard_gran=%u fua=%d volatile_cache=%d fast_zero=%d multi_conn=%d read_only=%d",
		(unsigned long long)disk->size, l->align, l->max_io, l->opt_io, l->discard_gran, l->fua, l->volatile_cache, l->fast_zero,
		l->multi_conn, disk->read_only);
}

static co_fn void co_command(void *arg)
{
	struct command *c = arg;
	char tag[32] = "", verb[32] = "", words[4096] = "";
	unsigned long long off = 0, len = 0;
	int ret = 0, at = 0;

	sscanf(c->line, "%31s %31s %n%llu %llu %n", tag, verb, &at, &off, &len, &at);
	const char *rest = c->line + at;

	if (!strcmp(verb, "read") || !strcmp(verb, "write")) {
		ret = co_io(verb, off, len, rest, words);
	} else if (!strcmp(verb, "zero")) {
		ret = co_disk_zero(disk, off, len, flags_of(rest));
	} else if (!strcmp(verb, "discard")) {
		ret = co_disk_discard(disk, off, len, flags_of(rest));
	} else if (!strcmp(verb, "flush")) {
		ret = co_disk_flush(disk);
	} else if (!strcmp(verb, "prefetch")) {
		ret = co_disk_prefetch(disk, off, len);
	} else if (!strcmp(verb, "extent")) {
		struct disk_extent e;

		ret = co_disk_extent(disk, off, len, &e);
		if (!ret)
			sprintf(words, "%llu%s%s", (unsigned long long)e.len, e.hole ? " hole" : "", e.zero ? " zero" : "");
	} else if (!strcmp(verb, "limits")) {
		limits(words);
	} else if (!strcmp(verb, "status")) {
		json_t *obj = disk_status(disk);
		char *s = json_dumps(obj, JSON_COMPACT);

		snprintf(words, sizeof(words), "%s", s);
		free(s);
		json_decref(obj);
	} else if (!strcmp(verb, "cancel")) {
		disk_cancel(disk);
	} else {
		ret = -EINVAL;
	}
	answer(tag, ret, words);
	free(c);
	running--;
	co_queue_wake_all(&idle);
}

static co_fn void co_read_commands(void)
{
	static char buf[64 << 10];
	size_t have = 0;

	for (;;) {
		ssize_t n = co_io_read(0, buf + have, sizeof(buf) - have, -1);
		char *line = buf, *end;

		if (n <= 0)
			return;
		have += n;
		while ((end = memchr(line, '\n', buf + have - line))) {
			struct command *c = malloc(sizeof(*c));

			CHECK(c && end - line < LINE_MAX_LEN);
			memcpy(c->line, line, end - line);
			c->line[end - line] = '\0';
			while (co_spawn("command", co_command, c))
				co_queue_wait(&idle, "a free coroutine");
			running++;
			line = end + 1;
		}
		have -= line - buf;
		memmove(buf, line, have);
		CHECK(have < sizeof(buf));
	}
}

static co_fn void co_main(void *arg)
{
	unsigned flags = !strcmp(mode, "read-only") ? 0 : !strcmp(mode, "unlocked") ? DISK_OPEN_NOLOCK :
			 DISK_OPEN_RDWR | (!strcmp(mode, "log") ? DISK_OPEN_LOG : 0);
	struct err err = ERR_INIT;
	int ret = co_disk_open(text, flags, &disk, &err);

	if (ret) {
		printf("open %d %s\n", ret, err.msg);
		return;
	}
	printf("open ok %llu\n", (unsigned long long)disk->size);
	fflush(stdout);
	co_queue_init(&idle);
	co_read_commands();
	while (running)
		co_queue_wait(&idle, "commands in flight");
	co_disk_close(disk);
	printf("closed\n");
}

int main(int argc, char **argv)
{
	struct rt_bufpool *pool;
	struct err err = ERR_INIT;
	struct rt *rt;

	CHECK(argc >= 2);
	text = argv[1];
	mode = argc > 2 ? argv[2] : "";
	backends_register();
	disk_register_format(&qcow2_format);
	if (rt_create(NULL, &rt, &err))
		test_fail("%s", err.msg);
	CHECK_EQ(rt_bufpool_create(rt, 64 << 20, &pool, &err), 0);
	rt_set_bufs(rt, pool);
	CHECK_EQ(rt_run(rt, co_main, NULL), 0);
	rt_bufpool_destroy(pool);
	rt_destroy(rt);
	return 0;
}
