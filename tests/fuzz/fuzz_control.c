/* SPDX-License-Identifier: MIT */
/* Control socket: request lines from anybody. Each answer is one line of JSON that says ok or not. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "blk/spec.h"
#include "daemon/control.h"
#include "daemon/internal.h"
#include "util/err.h"
#include "util/log.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
	const char *data;
	size_t size;
};

static int check_answer(void *arg, const char *text, size_t len)
{
	json_t *obj = json_loadb(text, len, JSON_REJECT_DUPLICATES, NULL);

	if (!obj || memchr(text, '\n', len) || !json_is_boolean(json_object_get(obj, "ok")))
		abort();
	if (json_is_false(json_object_get(obj, "ok")) && !json_string_value(json_object_get(obj, "error")))
		abort();
	json_decref(obj);
	++*(int *)arg;
	return 0;
}

static co_fn void co_run(void *arg)
{
	struct input *in = arg;
	struct serve s = { .rt = rt_self() };
	struct err err = ERR_INIT;
	struct disk *d;
	size_t at = 0;

	co_queue_init(&s.stop_q);
	co_queue_init(&s.memory.q);
	if (budget_create(UINT64_MAX / 2, &s.memory.b))
		abort();
	if (co_disk_open("mem:1M", DISK_OPEN_RDWR, &d, &err) || volume_create("disk", d, &s.graph.volumes[0], &err))
		abort();
	s.graph.n = 1;
	while (at < in->size) {
		const char *line = in->data + at, *nl = memchr(line, '\n', in->size - at);
		size_t len = nl ? (size_t)(nl - line) : in->size - at;
		int answers = 0;

		if (co_control_request(&s, line, len, check_answer, &answers) < 0 || answers > 1)
			abort();
		at += len + 1;
	}
	co_volume_destroy(s.graph.volumes[0]);
	budget_destroy(s.memory.b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct rt *rt;
	struct input in = { (const char *)data, size };
	struct err err = ERR_INIT;

	if (!rt) {
		log_set_level(LOG_ERROR);
		backends_register();
		if (rt_create_sim(NULL, 1, &rt, &err))
			abort();
	}
	if (rt_run(rt, co_run, &in))
		abort();
	return 0;
}
