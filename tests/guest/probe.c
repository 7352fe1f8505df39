// SPDX-License-Identifier: MIT
// What scripts in a guest would need a process for each step of: to start one costs user-mode-linux a tenth of a second.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BLOCK = 4096, CHUNK = 1 << 20 };

static _Alignas(BLOCK) char buf[CHUNK];

static int fsyncs(int fd, unsigned long n)
{
	for (unsigned long i = 0; i < n; i++)
		if (pwrite(fd, buf, BLOCK, (off_t)(i * BLOCK)) != BLOCK || fsync(fd))
			return 1;
	return 0;
}

static int writes(int fd, unsigned long n)
{
	for (unsigned long i = 0; i < n; i++)
		if (pwrite(fd, buf, BLOCK, (off_t)(i * BLOCK)) != BLOCK)
			return 1;
	return 0;
}

/* 0 if it is all zeroes, 1 if not. */
static int zero(int fd, off_t at, off_t end)
{
	for (; at < end; at += CHUNK) {
		if (pread(fd, buf, CHUNK, at) != CHUNK)
			return 2;
		if (buf[0] || memcmp(buf, buf + 1, CHUNK - 1))
			return 1;
	}
	return 0;
}

/* Asks a control socket, and prints the answer. */
static int ask(const char *path, const char *text)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	ssize_t n;

	strncpy(sun.sun_path, path, sizeof(sun.sun_path) - 1);
	if (fd < 0 || connect(fd, (struct sockaddr *)&sun, sizeof(sun)) || dprintf(fd, "%s\n", text) < 0)
		return 1;
	do {
		n = read(fd, buf, CHUNK);
		if (n <= 0 || fwrite(buf, 1, (size_t)n, stdout) != (size_t)n)
			return 1;
	} while (buf[n - 1] != '\n');
	return 0;
}

int main(int argc, char **argv)
{
	int fd;

	if (argc > 3 && !strcmp(argv[1], "ask"))
		return ask(argv[2], argv[3]);
	fd = argc > 3 ? open(argv[2], O_RDWR | O_DIRECT) : -1;
	if (fd < 0) {
		fprintf(stderr, "usage: probe fsyncs|writes DEVICE N (blocks of 4 KiB), probe zero DEVICE FROM TO (MiB), probe ask SOCKET JSON\n");
		return 9;
	}
	if (!strcmp(argv[1], "fsyncs"))
		return fsyncs(fd, strtoul(argv[3], NULL, 10));
	if (!strcmp(argv[1], "writes"))
		return writes(fd, strtoul(argv[3], NULL, 10));
	if (!strcmp(argv[1], "zero") && argc > 4)
		return zero(fd, (off_t)strtoul(argv[3], NULL, 10) << 20, (off_t)strtoul(argv[4], NULL, 10) << 20);
	return 9;
}
