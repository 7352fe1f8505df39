/* SPDX-License-Identifier: MIT */
/* weir stat: what the read cache of a server does, a line for each interval, in the manner of arcstat. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cli/ask.h"
#include "cli/cli.h"
#include "cli/stat_memory.h"
#include "cli/stat_prometheus.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/size.h"

#define SECOND 1000000000ull
#define HEADER_EVERY 20

/* Sums over the volumes. Those that count events only grow. */
struct figures {
	uint64_t reads[2], hits[2];	/* blocks: data, metadata. What was joined hits */
	uint64_t recent, frequent, ghosts, ahead;
	uint64_t memory, size, target;
	bool second, log;
	uint64_t second_hits, second_misses, second_used;
	uint64_t dirty, commit_p50, commit_p99;
	const char *kill;
};

static uint64_t number(json_t *obj, const char *key)
{
	return (uint64_t)json_integer_value(json_object_get(obj, key));
}

static void take_log(json_t *log, struct figures *f)
{
	json_t *v;
	size_t i;

	f->log = json_is_object(log);
	json_array_foreach(json_object_get(log, "volumes"), i, v)
		f->dirty += number(v, "dirty_bytes");
	f->commit_p50 = number(log, "commit_p50_ns");
	f->commit_p99 = number(log, "commit_p99_ns");
	v = json_object_get(log, "survives_kill");
	f->kill = json_is_boolean(v) ? json_is_true(v) ? "safe" : "LOST" : "-";
}

static void take(json_t *stats, struct figures *f)
{
	static const char *const class[] = { "data", "metadata" };
	json_t *cache = json_object_get(stats, "cache"), *second = json_object_get(cache, "second"), *v;
	const char *name;

	memset(f, 0, sizeof(*f));
	take_log(json_object_get(stats, "log"), f);
	f->second = json_is_object(second);
	f->second_hits = number(second, "hits");
	f->second_misses = number(second, "misses");
	f->second_used = number(second, "used");
	json_object_foreach(json_object_get(cache, "volumes"), name, v) {
		/* What clones read of their base is among their own reads. */
		for (int i = 0; i < 2 && !json_is_true(json_object_get(v, "shared")); i++) {
			json_t *c = json_object_get(v, class[i]);

			f->reads[i] += number(c, "reads");
			f->hits[i] += number(c, "hits") + number(c, "joined") + number(c, "shared");
		}
		f->ahead += number(json_object_get(v, "read_ahead"), "blocks");
	}
	for (int i = 0; i < 2; i++) {
		json_t *c = json_object_get(cache, class[i]);

		f->recent += number(c, "hits_recent");
		f->frequent += number(c, "hits_frequent");
		f->ghosts += number(c, "ghost_hits_recent") + number(c, "ghost_hits_frequent");
	}
	f->memory = number(cache, "memory");
	f->size = number(cache, "size");
	f->target = number(json_object_get(cache, "data"), "target_recent") * number(cache, "block");
}

/* Volumes may have gone since: then nothing is better than nonsense. */
static uint64_t grown(uint64_t now, uint64_t before)
{
	return now > before ? now - before : 0;
}

static const char *percent(uint64_t part, uint64_t all, char buf[static 8])
{
	if (all)
		snprintf(buf, 8, "%.1f", 100.0 * (double)min(part, all) / (double)all);
	else
		strcpy(buf, "-");
	return buf;
}

static const char *or_dash(bool there, const char *text)
{
	return there ? text : "-";
}

static void print_header(void)
{
	printf("%-8s %9s %6s %6s %6s %8s %8s %7s %7s %10s %10s %10s %6s %10s %10s %8s %8s %5s\n", "time", "reads/s", "hit%", "data%", "meta%", "recent",
	       "frequent", "ghosts", "ahead", "memory", "size", "target", "2nd%", "2nd", "dirty", "commit50", "commit99", "kill");
}

static void print_line(const struct figures *a, const struct figures *b, double seconds, unsigned n)
{
	char clock[16], p[4][8], size[5][16], commit[2][16];
	uint64_t reads[2], hits[2], second_hits = grown(b->second_hits, a->second_hits), second_misses = grown(b->second_misses, a->second_misses);
	time_t now = time(NULL);
	struct tm tm;

	for (int i = 0; i < 2; i++) {
		reads[i] = grown(b->reads[i], a->reads[i]);
		hits[i] = grown(b->hits[i], a->hits[i]);
	}
	snprintf(commit[0], 16, "%.0fus", (double)b->commit_p50 / 1000);
	snprintf(commit[1], 16, "%.0fus", (double)b->commit_p99 / 1000);
	if (n % HEADER_EVERY == 0)
		print_header();
	strftime(clock, sizeof(clock), "%H:%M:%S", localtime_r(&now, &tm));
	printf("%-8s %9.0f %6s %6s %6s %8.0f %8.0f %7.0f %7.0f %10s %10s %10s %6s %10s %10s %8s %8s %5s\n", clock, (double)(reads[0] + reads[1]) / seconds,
	       percent(hits[0] + hits[1], reads[0] + reads[1], p[0]), percent(hits[0], reads[0], p[1]), percent(hits[1], reads[1], p[2]),
	       (double)grown(b->recent, a->recent) / seconds, (double)grown(b->frequent, a->frequent) / seconds,
	       (double)grown(b->ghosts, a->ghosts) / seconds, (double)grown(b->ahead, a->ahead) / seconds, size_format(b->memory, size[0]),
	       size_format(b->size, size[1]), size_format(b->target, size[2]), percent(second_hits, second_hits + second_misses, p[3]),
	       or_dash(b->second, size_format(b->second_used, size[3])), or_dash(b->log, size_format(b->dirty, size[4])),
	       or_dash(b->log, commit[0]), or_dash(b->log, commit[1]), b->kill);
	fflush(stdout);
}

static json_t *ask_stats(const char *path, bool any, struct err *err)
{
	json_t *stats = ask_server(path, json_pack("{s:s}", "command", "stats"), err);

	if (!stats || any || json_is_object(json_object_get(stats, "cache")))
		return stats;
	json_decref(stats);
	err_set(err, -2, "%s: the server has no read cache; it comes with --cache-size", path);
	return NULL;
}

int cli_stat(int argc, char **argv)
{
	uint64_t interval = SECOND, count = UINT64_MAX;
	struct figures a = { 0 }, b;
	struct err err = ERR_INIT;
	bool json = false, prometheus = false, memory = false;
	uint64_t set_memory = 0;
	const struct cli_opt opts[] = {
		CLI_DURATION("interval", 'i', "DURATION", &interval, SECOND / 100, 3600 * SECOND),
		CLI_U64("count", 'n', "N", &count, 1, UINT32_MAX),
		CLI_FLAG("json", 'j', &json),
		CLI_FLAG("prometheus", 0, &prometheus),
		CLI_FLAG("memory", 'm', &memory),
		CLI_SIZE("set-memory", 0, "SIZE", &set_memory, 1 << 20, INT64_MAX),
		CLI_END
	};
	const char *path = cli_parse("stat", opts, "CONTROL", argc, argv)[0];
	struct timespec pause = { (time_t)(interval / SECOND), (long)(interval % SECOND) };

	if (memory || set_memory)
		return stat_memory(path, set_memory, json, &err) < 0 ? cli_fail("stat", &err) : 0;
	for (uint64_t n = 0; n < count || (!json && n == count); n++) {
		json_t *stats = ask_stats(path, prometheus, &err);

		if (!stats)
			return cli_fail("stat", &err);
		if (prometheus) {
			stat_prometheus(stats);
			json_decref(stats);
			return 0;
		}
		if (json) {
			json_dumpf(json_object_get(stats, "cache"), stdout, JSON_COMPACT);
			putchar('\n');
			fflush(stdout);
		} else {
			take(stats, &b);
			if (n)
				print_line(&a, &b, (double)interval / SECOND, (unsigned)(n - 1));
			a = b;
		}
		json_decref(stats);
		if (n + json < count)
			nanosleep(&pause, NULL);
	}
	return 0;
}
