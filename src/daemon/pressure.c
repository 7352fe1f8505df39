/* SPDX-License-Identifier: MIT */
/*
 * The read cache under memory pressure.
 *
 * The kernel's pressure stall information says how long tasks have waited for memory. It is read once a second: its triggers (a poll on the file) need a
 * privilege, and are not there everywhere. A second in which somebody waited for more than a tenth of it costs the cache a quarter of what it has, down to an eighth
 * of what it was given; half a minute of calm gives a sixteenth back, each five seconds.
 */
#include "daemon/pressure.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/internal.h"
#include "daemon/serve.h"
#include "rt/io.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/size.h"

#define SECOND 1000000000ull
#define GROW_EVERY 5u

bool pressure_parse(const char *text, uint64_t *ret_total_us)
{
	const char *line = strstr(text, "some "), *total = line ? strstr(line, "total=") : NULL;
	char *end;

	if (!total || memchr(line, '\n', (size_t)(total - line)))
		return false;
	*ret_total_us = strtoull(total + 6, &end, 10);
	return end != total + 6;
}

uint64_t pressure_step(struct pressure *p, uint64_t total_us)
{
	bool pressed = p->total_us && total_us > p->total_us + PRESSURE_US;

	p->total_us = total_us;
	if (pressed) {
		p->calm = 0;
		p->events++;
		p->size = min(p->size, max(p->size / 4 * 3, p->least));
		return p->size;
	}
	if (++p->calm >= PRESSURE_CALM && p->calm % GROW_EVERY == 0 && p->size < p->wanted)
		p->size = min(p->size + p->wanted / 16, p->wanted);
	return p->size;
}

static co_fn void co_look_at_pressure(struct serve *s, int fd)
{
	struct pressure *p = &s->pressure;
	char text[256], a[16], b[16];
	ssize_t n = co_io_read(fd, text, sizeof(text) - 1, 0);
	uint64_t total, before = p->size;

	if (n <= 0)
		return;
	text[n] = '\0';
	if (!pressure_parse(text, &total) || s->stop || pressure_step(p, total) == before)
		return;
	if (p->size < before)
		log_info("the host is short of memory: the cache goes from %s to %s", size_format(before, a), size_format(p->size, b));
	co_memory_apply(s);
}

static co_fn void co_pressure(void *arg)
{
	const char *path = getenv("WEIR_PRESSURE_FILE") ?: "/proc/pressure/memory";
	struct serve *s = arg;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	while (fd >= 0 && !s->stop) {
		co_look_at_pressure(s, fd);
		if (!s->stop)
			co_queue_wait_until(&s->stop_q, rt_now_ns() + SECOND, "memory pressure");
	}
	if (fd >= 0)
		close(fd);
}

void pressure_set(struct serve *s, uint64_t size)
{
	s->pressure.wanted = s->pressure.size = size;
	s->pressure.least = size / 8;
}

void pressure_start(struct serve *s)
{
	if (!s->graph.cache)
		return;
	co_spawn("memory pressure", co_pressure, s);
}
