/* SPDX-License-Identifier: MIT */
/*
 * Opens a DISK and does what it is told: a client of the disk contract for scripts.
 *
 * usage: disk_tool r|w|l|u DISK [COMMAND ...]	read, write, write log, unlocked
 *
 *	w:OFF:LEN:BYTE[:f]	write, with FUA		z:OFF:LEN[:u]	write zeroes, may unmap
 *	r:OFF:LEN:BYTE		read and compare	d:OFF:LEN	discard
 *	f			flush			map		one line for each extent
 *	hold			print "ready", wait for end of file on standard input
 *	status			print the status as JSON
 *
 * Each operation that fails prints "COMMAND: ERRNO-NAME" and goes on; exit 0 if all went well, 1 if not.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blk/spec.h"
#include "rt/buf.h"
#include "util/err.h"

static char **args;
static int failed;

static co_fn int co_map(struct disk *d)
{
	struct disk_extent e;

	for (uint64_t off = 0; off < d->size; off += e.len) {
		int rc = co_disk_extent(d, off, d->size - off, &e);

		if (rc)
			return rc;
		printf("%" PRIu64 " %" PRIu64 " %s\n", off, e.len, e.zero ? "zero" : "data");
	}
	return 0;
}

static co_fn int co_compare(struct disk *d, uint64_t off, uint64_t len, int byte)
{
	unsigned char *buf = malloc(len);
	int rc = buf ? co_disk_read(d, off, buf, len, 0) : -ENOMEM;

	for (uint64_t i = 0; !rc && i < len; i++)
		if (buf[i] != byte)
			rc = -EILSEQ;
	free(buf);
	return rc;
}

static co_fn int co_write(struct disk *d, uint64_t off, uint64_t len, int byte, unsigned flags)
{
	char *buf = malloc(len);
	int rc;

	if (!buf)
		return -ENOMEM;
	memset(buf, byte, len);
	rc = co_disk_write(d, off, buf, len, flags);
	free(buf);
	return rc;
}

static co_fn int co_command(struct disk *d, const char *c)
{
	uint64_t off = 0, len = 0;
	char flag = 0, *text;
	int byte = 0, rest = 0;
	json_t *status;

	if (sscanf(c, "w:%" SCNu64 ":%" SCNu64 ":%i%n:%c", &off, &len, &byte, &rest, &flag) >= 3)
		return co_write(d, off, len, byte, flag == 'f' ? DISK_FUA : 0);
	if (sscanf(c, "r:%" SCNu64 ":%" SCNu64 ":%i", &off, &len, &byte) == 3)
		return co_compare(d, off, len, byte);
	if (sscanf(c, "z:%" SCNu64 ":%" SCNu64 ":%c", &off, &len, &flag) >= 2)
		return co_disk_zero(d, off, len, flag == 'u' ? DISK_UNMAP : 0);
	if (sscanf(c, "d:%" SCNu64 ":%" SCNu64, &off, &len) == 2)
		return co_disk_discard(d, off, len, 0);
	if (!strcmp(c, "f"))
		return co_disk_flush(d);
	if (!strcmp(c, "map"))
		return co_map(d);
	if (!strcmp(c, "status")) {
		status = disk_status(d);
		text = json_dumps(status, JSON_INDENT(1));
		puts(text);
		free(text);
		json_decref(status);
		return 0;
	}
	if (!strcmp(c, "hold")) {
		puts("ready");
		fflush(stdout);
		while (read(STDIN_FILENO, &flag, 1) > 0)
			;
		return 0;
	}
	return -EINVAL;
}

static co_fn void co_main(void *arg)
{
	static const unsigned modes[] = { ['r'] = 0, ['w'] = DISK_OPEN_RDWR, ['l'] = DISK_OPEN_RDWR | DISK_OPEN_LOG, ['u'] = DISK_OPEN_NOLOCK };
	struct err err = ERR_INIT;
	struct disk *d;
	int rc;

	if (co_disk_open(args[2], modes[args[1][0] & 127], &d, &err)) {
		fprintf(stderr, "%s\n", err.msg);
		failed = 1;
		return;
	}
	for (char **c = args + 3; *c; c++) {
		rc = co_command(d, *c);
		if (rc) {
			printf("%s: %s\n", *c, strerrorname_np(-rc));
			failed = 1;
		}
	}
	co_disk_close(d);
}

int main(int argc, char **argv)
{
	struct err err = ERR_INIT;
	struct rt_bufpool *bufs;
	struct rt *rt;

	if (argc < 3 || !strchr("rwlu", argv[1][0])) {
		fprintf(stderr, "usage: disk_tool r|w|l|u DISK [COMMAND ...]\n");
		return 2;
	}
	args = argv;
	backends_register();
	if (rt_create(NULL, &rt, &err) || rt_bufpool_create(rt, RT_BUF_MAX, &bufs, &err)) {
		fprintf(stderr, "%s\n", err.msg);
		return 1;
	}
	rt_set_bufs(rt, bufs);
	rt_run(rt, co_main, NULL);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	return failed;
}
