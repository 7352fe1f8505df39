/* SPDX-License-Identifier: MIT */
/* weir advise: from the curves of a server's volumes, a line of advice for each. */
#include <stdio.h>
#include <string.h>

#include "cli/advise_plot.h"
#include "cli/ask.h"
#include "cli/cli.h"
#include "util/err.h"
#include "util/size.h"

#define ENOUGH 2000		/* reads, in blocks, below which nothing can be said */
#define USELESS 0.1		/* a cache with this share of hits at most */
#define MOST 0.9		/* of what could be had */

struct curve {
	uint64_t reads, distinct;	/* blocks; bytes */
	double best;		/* the share of hits with room for all of it */
	uint64_t enough;	/* bytes that give MOST of that */
	double with_enough;
};

static void take_curve(json_t *obj, struct curve *c)
{
	json_t *points = json_object_get(obj, "points"), *p;
	size_t i, n = json_array_size(points);

	*c = (struct curve){ .reads = (uint64_t)json_integer_value(json_object_get(obj, "reads")),
			     .distinct = (uint64_t)json_integer_value(json_object_get(obj, "distinct_bytes")) };
	if (n)
		c->best = 1 - json_real_value(json_array_get(json_array_get(points, n - 1), 1));
	json_array_foreach(points, i, p) {
		c->with_enough = 1 - json_real_value(json_array_get(p, 1));
		c->enough = (uint64_t)json_integer_value(json_array_get(p, 0));
		if (c->with_enough >= MOST * c->best)
			break;
	}
}

/* Of reads that were not read ahead: those would hit in a cache of any size. */
static double hit_share(json_t *v)
{
	json_t *d = json_object_get(v, "data");
	json_int_t reads = json_integer_value(json_object_get(d, "reads"));
	json_int_t hits = json_integer_value(json_object_get(d, "hits")) + json_integer_value(json_object_get(d, "joined")) + json_integer_value(json_object_get(d, "shared")) -
			  json_integer_value(json_object_get(json_object_get(v, "read_ahead"), "used"));

	return reads > 0 && hits > 0 ? (double)hits / (double)reads : 0;
}

static void print_advice(const char *name, json_t *v, uint64_t block, const struct curve *c)
{
	char has[16], enough[16], all[16];
	uint64_t bytes = (uint64_t)json_integer_value(json_object_get(v, "bytes")); /* blocks of zeroes take none */
	uint64_t cached = (uint64_t)json_integer_value(json_object_get(v, "data_blocks")) * block;

	size_format(bytes, has);
	size_format(c->enough, enough);
	size_format(c->distinct, all);
	if (c->reads < ENOUGH) {
		printf("%s: too few reads to tell\n", name);
	} else if (c->best < USELESS) {
		printf("%s: re-reads next to nothing (%.0f %% of its reads could hit): its guest caches for itself, or has no use for a cache; "
		       "primarycache=metadata would free %s\n", name, 100 * c->best, has);
	} else {
		double share = hit_share(v);

		printf("%s: %.0f %% of its reads hit (read-ahead apart), it has %s now; with %s of its own %.0f %% would, with %s (all it reads) %.0f %%%s\n",
		       name, 100 * share, has, enough, 100 * c->with_enough, all, 100 * c->best, cached >= c->enough / 10 * 9 ? "; more would change little" : "");
		if (bytes && !strcmp(json_string_value(json_object_get(v, "primarycache")) ?: "", "all"))
			printf("%s: primarycache=metadata instead of all would lose these %.0f %% and free %s\n", name, 100 * share, has);
	}
}

/* The file at the bottom of a volume, as `status` shows it; NULL if it is none. */
static json_t *bottom_file(json_t *disk)
{
	while (json_is_object(json_object_get(disk, "file")))
		disk = json_object_get(disk, "file");
	return !strcmp(json_string_value(json_object_get(disk, "driver")) ?: "", "file") ? disk : NULL;
}

/* What lies under the image caches as well: the page cache if it was not opened with O_DIRECT, and ZFS's ARC in any case. */
static void print_double(const char *name, json_t *status)
{
	json_t *v, *file;
	size_t i;

	json_array_foreach(json_object_get(status, "volumes"), i, v) {
		if (strcmp(json_string_value(json_object_get(v, "name")) ?: "", name))
			continue;
		file = bottom_file(json_object_get(v, "disk"));
		if (!file)
			return;
		if (json_is_false(json_object_get(file, "o_direct")))
			printf("%s: its image is read through the host's page cache, which keeps the same data once more; --cache none avoids that, or "
			       "primarycache=metadata here\n", name);
		if (!strcmp(json_string_value(json_object_get(file, "file_system")) ?: "", "zfs"))
			printf("%s: its image lies on ZFS, whose ARC keeps the same data once more; zfs set primarycache=metadata on its dataset, or "
			       "primarycache=metadata here\n", name);
	}
}

int cli_advise(int argc, char **argv)
{
	struct err err = ERR_INIT;
	bool json = false;
	const char *plot = NULL;
	const struct cli_opt opts[] = { CLI_FLAG("json", 'j', &json), CLI_STR("plot", 0, "FILE", &plot), CLI_END };
	const char *path = cli_parse("advise", opts, "CONTROL", argc, argv)[0], *name;
	json_t *stats = ask_server(path, json_pack("{s:s}", "command", "stats"), &err), *v, *out = json_object();
	json_t *status = stats && !json ? ask_server(path, json_pack("{s:s}", "command", "status"), &err) : NULL;
	int ret = 0;

	if (stats && !json_is_object(json_object_get(stats, "cache")))
		err_set(&err, -2, "%s: the server has no read cache; it comes with --cache-size", path);
	json_object_foreach(json_object_get(json_object_get(stats, "cache"), "volumes"), name, v) {
		struct curve c;
		json_t *obj;

		if (json_is_true(json_object_get(v, "tables")) || json_is_true(json_object_get(v, "shared")))
			continue;
		obj = ask_server(path, json_pack("{s:s, s:s}", "command", "cache-curve", "volume", name), &err);
		if (!obj)
			break;
		take_curve(obj, &c);
		json_object_set(out, name, obj);
		if (!json) {
			print_advice(name, v, (uint64_t)json_integer_value(json_object_get(json_object_get(stats, "cache"), "block")), &c);
			print_double(name, status);
		}
		json_decref(obj);
	}
	if (!err.code && plot)
		advise_plot(plot, out, &err);
	if (err.code) {
		ret = cli_fail("advise", &err);
	} else if (json) {
		json_dumpf(out, stdout, JSON_COMPACT);
		putchar('\n');
	}
	json_decref(status);
	json_decref(stats);
	json_decref(out);
	return ret;
}
