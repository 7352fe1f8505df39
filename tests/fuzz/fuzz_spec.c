/* SPDX-License-Identifier: MIT */
/*
 * DISK strings from anybody: parsing ends in a disk or in one message, and what is parsed can be opened where opening does no I/O.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/drivers.h"
#include "rt/rt.h"
#include "util/err.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Drivers that touch nothing but memory. */
static bool is_harmless(const struct disk_spec *s)
{
	static const char *const names[] = { "mem", "null", "delay", "fault" };
	unsigned depth = 0;
	bool known = true;

	for (; s; s = s->inner) {
		known = false;
		for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
			known |= !strcmp(s->driver, names[i]);
		if (++depth > 9)
			abort();
		if (!known)
			return false;
	}
	return known;
}

static co_fn void co_try_to_open(void *arg)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open_spec(arg, DISK_OPEN_RDWR, &d, &err)) {
		if (!err.code || !err.msg[0])
			abort();
		return;
	}
	if (d->size > DISK_MAX_SIZE)
		abort();
	co_disk_close(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct rt *rt;
	struct err err = ERR_INIT;
	struct disk_spec *spec = NULL;
	char *text = strndup((const char *)data, size);

	if (!rt) {
		backends_register();
		if (rt_create_sim(NULL, 1, &rt, &err))
			abort();
	}
	if (disk_spec_parse(text, &spec, &err)) {
		if (spec || !err.code || !err.msg[0])
			abort();
	} else if (is_harmless(spec)) {
		rt_run(rt, co_try_to_open, spec);
	}
	disk_spec_free(spec);
	free(text);
	return 0;
}
