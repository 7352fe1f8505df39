/* SPDX-License-Identifier: MIT */
/*
 * weir stat --prometheus: the figures of a server for a scrape. Names follow the conventions: base units, _total for what only grows. A family is printed as
 * a whole, which the format wants.
 */
#include "cli/stat_prometheus.h"

#include <stdio.h>
#include <string.h>

#include "util/bytes.h"

struct metric {
	const char *name, *help, *type;
	const char *key;	/* in the JSON */
	double scale;		/* 0: 1 */
};

static void begin(const struct metric *m)
{
	printf("# HELP %s %s\n# TYPE %s %s\n", m->name, m->help, m->name, m->type);
}

/* A label's value: backslash, quote and newline are escaped. */
static void print_label(const char *text)
{
	for (; *text; text++) {
		if (*text == '\\' || *text == '"')
			printf("\\%c", *text);
		else if (*text == '\n')
			printf("\\n");
		else
			putchar(*text);
	}
}

static void print_value(const struct metric *m, json_t *obj)
{
	json_t *v = json_object_get(obj, m->key);

	if (m->scale > 0)
		printf(" %.9g\n", json_number_value(v) * m->scale);
	else
		printf(" %lld\n", json_is_boolean(v) ? (long long)json_is_true(v) : (long long)json_integer_value(v));
}

static void print_plain(const struct metric *m, size_t n, json_t *obj)
{
	for (size_t i = 0; i < n && json_is_object(obj); i++) {
		if (json_is_null(json_object_get(obj, m[i].key)))	/* it does not apply */
			continue;
		begin(&m[i]);
		printf("%s", m[i].name);
		print_value(&m[i], obj);
	}
}

static const char *const classes[] = { "data", "metadata" };

static void print_cache_volumes(json_t *volumes)
{
	static const struct metric per_class[] = {
		{ "weir_cache_reads_total", "Blocks read through the cache.", "counter", "reads", 0 },
		{ "weir_cache_hits_total", "Blocks found in memory.", "counter", "hits", 0 },
		{ "weir_cache_joined_total", "Blocks that were on their way for another read.", "counter", "joined", 0 },
		{ "weir_cache_misses_total", "Blocks that were not in memory.", "counter", "misses", 0 },
		{ "weir_cache_shared_total", "Of them, in memory for another volume over the same image.", "counter", "shared", 0 },
		{ "weir_cache_bypassed_total", "Misses that were not cached for want of room.", "counter", "bypassed", 0 },
		{ "weir_cache_evicted_total", "Blocks that had to make room.", "counter", "evicted", 0 },
	}, per_volume[] = {
		{ "weir_cache_volume_bytes", "Memory that the volume's blocks take.", "gauge", "bytes", 0 },
	}, per_second[] = {
		{ "weir_cache_second_volume_hits_total", "Blocks of the volume found in the second level.", "counter", "hits", 0 },
		{ "weir_cache_second_volume_misses_total", "Blocks of the volume found in neither level.", "counter", "misses", 0 },
		{ "weir_cache_second_volume_blocks", "Blocks of the volume in the second level.", "gauge", "blocks", 0 },
	};
	const char *name;
	json_t *v;

	for (size_t i = 0; i < ARRAY_SIZE(per_class); i++) {
		begin(&per_class[i]);
		json_object_foreach(volumes, name, v)
			for (size_t k = 0; k < ARRAY_SIZE(classes); k++) {
				printf("%s{volume=\"", per_class[i].name);
				print_label(name);
				printf("\",class=\"%s\"}", classes[k]);
				print_value(&per_class[i], json_object_get(v, classes[k]));
			}
	}
	for (size_t i = 0; i < ARRAY_SIZE(per_volume) + ARRAY_SIZE(per_second); i++) {
		bool second = i >= ARRAY_SIZE(per_volume);
		const struct metric *m = second ? &per_second[i - ARRAY_SIZE(per_volume)] : &per_volume[i];

		begin(m);
		json_object_foreach(volumes, name, v) {
			json_t *obj = second ? json_object_get(v, "second") : v;

			if (!json_is_object(obj))
				continue;
			printf("%s{volume=\"", m->name);
			print_label(name);
			printf("\"}");
			print_value(m, obj);
		}
	}
}

static void print_cache(json_t *cache)
{
	static const struct metric of_all[] = {
		{ "weir_cache_size_bytes", "Memory that the cache may take.", "gauge", "size", 0 },
		{ "weir_cache_memory_bytes", "Memory that the cache takes.", "gauge", "memory", 0 },
	}, of_class[] = {
		{ "weir_cache_resident_blocks", "Blocks in memory.", "gauge", "blocks", 0 },
		{ "weir_cache_recent_blocks", "Of them, seen once (MRU).", "gauge", "recent", 0 },
		{ "weir_cache_frequent_blocks", "Of them, seen again (MFU).", "gauge", "frequent", 0 },
		{ "weir_cache_target_recent_blocks", "What ARC means to give to those seen once.", "gauge", "target_recent", 0 },
		{ "weir_cache_hits_recent_total", "Hits on blocks seen once.", "counter", "hits_recent", 0 },
		{ "weir_cache_hits_frequent_total", "Hits on blocks seen again.", "counter", "hits_frequent", 0 },
		{ "weir_cache_ghost_hits_recent_total", "Misses of what had been seen once and evicted.", "counter", "ghost_hits_recent", 0 },
		{ "weir_cache_ghost_hits_frequent_total", "Misses of what had been seen again and evicted.", "counter", "ghost_hits_frequent", 0 },
	}, of_second[] = {
		{ "weir_cache_second_size_bytes", "What of the cache device is used.", "gauge", "size", 0 },
		{ "weir_cache_second_used_bytes", "What of it holds blocks.", "gauge", "used", 0 },
		{ "weir_cache_second_hits_total", "Blocks found there.", "counter", "hits", 0 },
		{ "weir_cache_second_misses_total", "Blocks looked for and not found there.", "counter", "misses", 0 },
		{ "weir_cache_second_fed_total", "Blocks taken in.", "counter", "fed", 0 },
		{ "weir_cache_second_skipped_total", "Blocks not taken in, for the rate or a busy device.", "counter", "skipped", 0 },
		{ "weir_cache_second_written_bytes_total", "Written to the device.", "counter", "written_bytes", 0 },
		{ "weir_cache_second_checksum_errors_total", "Blocks that were damaged.", "counter", "checksum_errors", 0 },
		{ "weir_cache_second_errors_total", "Errors of the device.", "counter", "errors", 0 },
	};

	print_plain(of_all, ARRAY_SIZE(of_all), cache);
	for (size_t i = 0; i < ARRAY_SIZE(of_class); i++) {
		begin(&of_class[i]);
		for (size_t k = 0; k < ARRAY_SIZE(classes); k++) {
			printf("%s{class=\"%s\"}", of_class[i].name, classes[k]);
			print_value(&of_class[i], json_object_get(cache, classes[k]));
		}
	}
	print_plain(of_second, ARRAY_SIZE(of_second), json_object_get(cache, "second"));
	print_cache_volumes(json_object_get(cache, "volumes"));
}

static void print_log(json_t *log)
{
	static const struct metric of_log[] = {
		{ "weir_log_size_bytes", "Size of the write log.", "gauge", "size", 0 },
		{ "weir_log_used_bytes", "What of it is in use.", "gauge", "used_bytes", 0 },
		{ "weir_log_commits_total", "Commits.", "counter", "commits", 0 },
		{ "weir_log_commit_bytes_total", "Bytes committed.", "counter", "commit_bytes", 0 },
		{ "weir_log_commit_p50_seconds", "Half of the commits took at most this long.", "gauge", "commit_p50_ns", 1e-9 },
		{ "weir_log_commit_p99_seconds", "99 of 100 commits took at most this long.", "gauge", "commit_p99_ns", 1e-9 },
		{ "weir_log_failed", "1 if the log has failed.", "gauge", "failed", 0 },
		{ "weir_log_degraded", "1 if a side of the mirror is out.", "gauge", "degraded", 0 },
		{ "weir_log_survives_kill", "1 if what was acknowledged from memory outlives a server that is killed.", "gauge", "survives_kill", 0 },
	}, dirty = { "weir_log_dirty_bytes", "In the log and not in the image.", "gauge", "dirty_bytes", 0 };
	json_t *v;
	size_t i;

	if (!json_is_object(log))
		return;
	print_plain(of_log, ARRAY_SIZE(of_log), log);
	begin(&dirty);
	json_array_foreach(json_object_get(log, "volumes"), i, v) {
		const char *name = json_string_value(json_object_get(v, "name"));

		printf("%s{volume=\"", dirty.name);
		print_label(name ? name : "");
		printf("\"}");
		print_value(&dirty, v);
	}
}

static void print_volumes(json_t *volumes, json_t *names)
{
	static const struct metric of_op[] = {
		{ "weir_volume_requests_total", "Requests of clients.", "counter", "ops", 0 },
		{ "weir_volume_bytes_total", "Bytes of them.", "counter", "bytes", 0 },
		{ "weir_volume_errors_total", "Requests that failed.", "counter", "errors", 0 },
		{ "weir_volume_latency_p50_seconds", "Half of the requests took at most this long.", "gauge", "p50_ns", 1e-9 },
		{ "weir_volume_latency_p99_seconds", "99 of 100 requests took at most this long.", "gauge", "p99_ns", 1e-9 },
	};
	const char *op, *name;
	json_t *v, *figures;
	size_t k;

	for (size_t i = 0; i < ARRAY_SIZE(of_op); i++) {
		begin(&of_op[i]);
		json_array_foreach(volumes, k, v) {
			name = json_string_value(json_array_get(names, k));
			json_object_foreach(v, op, figures) {
				printf("%s{volume=\"", of_op[i].name);
				print_label(name ? name : "");
				printf("\",op=\"%s\"}", op);
				print_value(&of_op[i], figures);
			}
		}
	}
}

static void print_memory(json_t *memory)
{
	static const struct metric of_all[] = {
		{ "weir_memory_limit_bytes", "Memory that the process may take.", "gauge", "limit", 0 },
		{ "weir_memory_committed_bytes", "Memory taken, or kept for who cannot do with less.", "gauge", "committed", 0 },
		{ "weir_memory_resident_bytes", "Memory that the kernel counted last; 0 if it is not asked.", "gauge", "resident", 0 },
		{ "weir_memory_refused_total", "How often somebody had to wait for memory, or do with less.", "counter", "refused", 0 },
	}, of_part[] = {
		{ "weir_memory_bytes", "Memory taken by a part of the process.", "gauge", "bytes", 0 },
		{ "weir_memory_floor_bytes", "What is kept for it.", "gauge", "floor", 0 },
	};
	const char *name;
	json_t *part;

	print_plain(of_all, ARRAY_SIZE(of_all), memory);
	for (size_t i = 0; i < ARRAY_SIZE(of_part); i++) {
		begin(&of_part[i]);
		json_object_foreach(json_object_get(memory, "parts"), name, part) {
			printf("%s{part=\"%s\"}", of_part[i].name, name);
			print_value(&of_part[i], part);
		}
	}
}

void stat_prometheus(json_t *stats)
{
	static const struct metric pressure = { "weir_memory_pressure_events_total", "How often the cache gave memory back because the host was short of it.",
						"counter", "events", 0 };

	print_volumes(json_object_get(stats, "volumes"), json_object_get(stats, "names"));
	if (json_is_object(json_object_get(stats, "cache"))) {
		print_cache(json_object_get(stats, "cache"));
		print_plain(&pressure, 1, json_object_get(stats, "memory_pressure"));
	}
	print_log(json_object_get(stats, "log"));
	print_memory(json_object_get(stats, "memory"));
}
