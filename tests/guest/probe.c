// SPDX-License-Identifier: MIT
// What scripts in a guest would need a process for each step of: to start one costs user-mode-linux a tenth of a second.
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

/* Asks a control socket, and prints the answer. What came last of it is in buf. */
static int ask(const char *path, const char *text, FILE *out)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	ssize_t n;

	strncpy(sun.sun_path, path, sizeof(sun.sun_path) - 1);
	if (fd < 0 || connect(fd, (struct sockaddr *)&sun, sizeof(sun)) || dprintf(fd, "%s\n", text) < 0)
		return 1;
	do {
		n = read(fd, buf, CHUNK - 1);
		if (n <= 0 || (out && fwrite(buf, 1, (size_t)n, out) != (size_t)n))
			return 1;
		buf[n] = '\0';
	} while (buf[n - 1] != '\n');
	return 0;
}

/* 0 if the answer is that it is done. */
static int told(const char *path, const char *text)
{
	return ask(path, text, NULL) || !strstr(buf, "\"ok\":true");
}

/* Waits until there is no such process. */
static int gone(pid_t pid)
{
	while (!kill(pid, 0))
		usleep(20000);
	return 0;
}

/* Each word of a patterned file says where it belongs. */
static uint64_t word(unsigned long page, unsigned i)
{
	return (uint64_t)0x77656972 << 32 | (uint64_t)page << 9 | i;
}

static int fill(int fd, unsigned long pages)
{
	uint64_t *w = (uint64_t *)buf;

	for (unsigned long at = 0; at < pages; at += CHUNK / BLOCK) {
		for (unsigned i = 0; i < CHUNK / 8; i++)
			w[i] = word(at + i / 512, i % 512);
		if (pwrite(fd, buf, CHUNK, (off_t)at * BLOCK) != CHUNK)
			return 2;
	}
	return fsync(fd) ? 3 : 0;
}

/* The first word of a page that is not the one it should be, or 512. */
static unsigned differs(const void *p, unsigned long page)
{
	const uint64_t *w = p;
	unsigned i = 0;

	while (i < 512 && w[i] == word(page, i))
		i++;
	return i;
}

/* The physical page behind a page of the page cache, 0 if it cannot be told. */
static unsigned long frame(int fd, unsigned long page)
{
	volatile char *p = mmap(NULL, BLOCK, PROT_READ, MAP_SHARED, fd, (off_t)page * BLOCK);
	int map = open("/proc/self/pagemap", O_RDONLY);
	uint64_t entry = 0;

	if (p == MAP_FAILED || map < 0)
		return 0;
	(void)*p;
	if (pread(map, &entry, 8, (off_t)((uintptr_t)p / BLOCK * 8)) != 8 || !(entry >> 63))
		entry = 0;
	close(map);
	munmap((void *)p, BLOCK);
	return (unsigned long)(entry & ((1ull << 55) - 1));
}

/* All that may tell why a page is wrong: what it holds, where it lies in memory, and whether the disk has it right. */
static void explain(const char *path, int fd, unsigned long page, unsigned at, const void *have)
{
	static _Alignas(BLOCK) char own[BLOCK], now[BLOCK];
	int direct = open(path, O_RDONLY | O_DIRECT);
	unsigned on_disk = 512, cached = 512;
	uint64_t w[2];

	memcpy(w, (const char *)have + at * 8 - (at == 511) * 8, sizeof(w));
	if (pread(fd, now, BLOCK, (off_t)page * BLOCK) == BLOCK)
		cached = differs(now, page);
	if (direct >= 0 && pread(direct, own, BLOCK, (off_t)page * BLOCK) == BLOCK)
		on_disk = differs(own, page);
	close(direct);
	printf("bad page=%lu word=%u holds=%016llx,%016llx frame=%lu again=%s direct=%s\n", page, at, (unsigned long long)w[0],
	       (unsigned long long)w[1], frame(fd, page), cached == 512 ? "right" : "wrong", on_disk == 512 ? "right" : "wrong");
}

/* 0 if the file is as fill() made it, 1 if not. */
static int verify(const char *path, int fd, unsigned long pages)
{
	static _Alignas(BLOCK) char kept[BLOCK];
	unsigned bad = 0;

	for (unsigned long at = 0; at < pages; at += CHUNK / BLOCK) {
		if (pread(fd, buf, CHUNK, (off_t)at * BLOCK) != CHUNK)
			return 2;
		for (unsigned long i = 0; i < CHUNK / BLOCK; i++) {
			unsigned word = differs(buf + i * BLOCK, at + i);

			if (word == 512)
				continue;
			memcpy(kept, buf + i * BLOCK, BLOCK);
			if (bad++ < 16)
				explain(path, fd, at + i, word, kept);
		}
	}
	if (bad)
		printf("bad pages: %u of %lu\n", bad, pages);
	return bad != 0;
}

int main(int argc, char **argv)
{
	bool whole = argc > 3 && (!strcmp(argv[1], "fill") || !strcmp(argv[1], "verify"));
	int fd;

	if (argc > 3 && !strcmp(argv[1], "ask"))
		return ask(argv[2], argv[3], stdout);
	if (argc > 3 && !strcmp(argv[1], "told"))
		return told(argv[2], argv[3]);
	if (argc > 2 && !strcmp(argv[1], "gone"))
		return gone((pid_t)atoi(argv[2]));
	fd = argc > 3 ? open(argv[2], whole ? O_RDWR | O_CREAT : O_RDWR | O_DIRECT, 0600) : -1;
	if (fd < 0) {
		fprintf(stderr, "usage: probe fsyncs|writes DEVICE N (blocks of 4 KiB), probe zero DEVICE FROM TO (MiB), probe fill|verify FILE PAGES, "
				"probe ask|told SOCKET JSON, probe gone PID\n");
		return 9;
	}
	if (!strcmp(argv[1], "fsyncs"))
		return fsyncs(fd, strtoul(argv[3], NULL, 10));
	if (!strcmp(argv[1], "writes"))
		return writes(fd, strtoul(argv[3], NULL, 10));
	if (!strcmp(argv[1], "fill"))
		return fill(fd, strtoul(argv[3], NULL, 10));
	if (!strcmp(argv[1], "verify"))
		return verify(argv[2], fd, strtoul(argv[3], NULL, 10));
	if (!strcmp(argv[1], "zero") && argc > 4)
		return zero(fd, (off_t)strtoul(argv[3], NULL, 10) << 20, (off_t)strtoul(argv[4], NULL, 10) << 20);
	return 9;
}
