/* SPDX-License-Identifier: MIT */
/* weir stat --memory: who has how much of a server's memory. */
#include "cli/stat_memory.h"

#include <errno.h>
#include <stdio.h>

#include "cli/ask.h"
#include "util/size.h"

static const char *size_of(json_t *obj, const char *key, char buf[static 16])
{
	return size_format((uint64_t)json_integer_value(json_object_get(obj, key)), buf);
}

int stat_memory(const char *control, uint64_t size, bool json, struct err *err)
{
	json_t *m, *part, *request = json_pack("{s:s}", "command", "memory");
	char a[16], b[16], c[16];
	const char *name;

	if (size)
		json_object_set_new(request, "size", json_integer((json_int_t)size));
	m = ask_server(control, request, err);
	if (!m)
		return -EIO;
	if (json) {
		json_dumpf(m, stdout, JSON_COMPACT);
		putchar('\n');
	} else {
		printf("%-18s %12s %12s %12s\n", "", "now", "kept for it", "most");
		json_object_foreach(json_object_get(m, "parts"), name, part)
			printf("%-18s %12s %12s %12s\n", name, size_of(part, "bytes", a), size_of(part, "floor", b), size_of(part, "peak", c));
		printf("%-18s %12s of %s, resident %s\n", "all", size_of(m, "committed", a), size_of(m, "limit", b), size_of(m, "resident", c));
	}
	json_decref(m);
	return 0;
}
