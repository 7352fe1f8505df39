/* SPDX-License-Identifier: MIT */
/* Sizes, durations, UUIDs and option lists from anybody. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "util/err.h"
#include "util/opts.h"
#include "util/size.h"
#include "util/uuid.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const char *const names[] = { "on", "off", NULL };
	char *text = strndup((const char *)data, size), buf[37];
	struct err err = ERR_INIT;
	struct opts o;
	struct uuid u;
	uint64_t v;
	bool flag;
	int choice;

	if (!size_parse(text, &v) && v > INT64_MAX)
		abort();
	if (!duration_parse(text, &v) && v > INT64_MAX)
		abort();
	u64_parse(text, &v);
	if (!uuid_parse(text, &u) && strcasecmp(uuid_format(&u, buf), text))
		abort();
	if (!opts_parse(&o, text, "input", &err)) {
		opts_size(&o, "size", &v, &err);
		opts_duration(&o, "read", &v, &err);
		opts_u64(&o, "n", 1, 10, &v, &err);
		opts_bool(&o, "b", &flag, &err);
		opts_enum(&o, "e", names, &choice, &err);
		opts_finish(&o, "input", "size, read, n, b, e", &err);
		opts_free(&o);
	}
	free(text);
	return 0;
}
