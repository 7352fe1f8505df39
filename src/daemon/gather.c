/* SPDX-License-Identifier: MIT */
/* Control socket: commands that concern other reactors. */
#include "daemon/gather.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/internal.h"
#include "daemon/peers.h"
#include "daemon/serve.h"
#include "daemon/split.h"
#include "rt/rt.h"
#include "util/bytes.h"
#include "util/size.h"

/* --- Merging --- */

static bool is_no_sum(const char *key)
{
	static const char *const keys[] = { "pid", "uid", "block", "max_connections", "events", "reactor" };

	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (!strcmp(keys[i], key))
			return true;
	return false;
}

static void merge_member(json_t *into, const char *key, json_t *from)
{
	json_t *have = json_object_get(into, key);

	if (!have || json_is_null(have))
		json_object_set(into, key, from);
	else if (json_is_integer(have) && json_is_integer(from) && !is_no_sum(key))
		json_object_set_new(into, key, json_integer(json_integer_value(have) + json_integer_value(from)));
	else if (json_is_array(have) && json_is_array(from))
		json_array_extend(have, from);
	else if (json_is_object(have) && json_is_object(from))
		gather_merge(have, from);
}

void gather_merge(json_t *into, json_t *from)
{
	const char *key;
	json_t *value;

	json_object_foreach(from, key, value)
		merge_member(into, key, value);
}

/* --- Order --- */

/* The elements of `list`, those of name names[i] in the order of the command line. */
static json_t *in_order(const struct split *sp, json_t *list, json_t *names)
{
	json_t *sorted = json_array();

	for (unsigned i = 0; i < sp->nvolumes; i++) {
		size_t k = 0;

		while (k < json_array_size(names) && strcmp(json_string_value(json_array_get(names, k)) ?: "", sp->volume[i].name))
			k++;
		if (k < json_array_size(list))
			json_array_append(sorted, json_array_get(list, k));
	}
	return sorted;
}

static json_t *names_in(json_t *volumes)
{
	json_t *names = json_array(), *v;
	size_t i;

	json_array_foreach(volumes, i, v)
		json_array_append(names, json_object_get(v, "name") ?: v);
	return names;
}

/* `volumes`, and `names` beside it if there is one. */
static void sort_volumes(const struct split *sp, json_t *result)
{
	json_t *volumes = json_object_get(result, "volumes"), *given = json_object_get(result, "names"), *names, *sorted;

	if (!json_is_array(volumes))
		return;
	names = given ? json_incref(given) : names_in(volumes);
	sorted = in_order(sp, volumes, names);
	if (given)
		json_object_set_new(result, "names", in_order(sp, given, names));
	json_object_set_new(result, "volumes", sorted);
	json_decref(names);
}

/* --- Asking --- */

struct asked {
	struct serve *t;
	json_t *req;
	char *text;	/* the last line */
};

static co_fn int co_keep(void *arg, const char *text, size_t len)
{
	struct asked *q = arg;

	free(q->text);
	q->text = strndup(text, len);
	return q->text ? 0 : -ENOMEM;
}

static co_fn int co_answer_there(void *arg)
{
	struct asked *q = arg;

	return co_control_own(q->t, q->req, co_keep, q);
}

static json_t *error_answer(const char *text)
{
	return json_pack("{s:b, s:s}", "ok", 0, "error", text);
}

/* `req` belongs to the other reactor meanwhile. */
static co_fn json_t *co_ask(struct serve *t, json_t *req)
{
	struct asked q = { .t = t, .req = req };
	int ret = co_serve_call(t, co_answer_there, &q);
	json_t *answer = ret < 0 || !q.text ? NULL : json_loads(q.text, 0, NULL);

	free(q.text);
	return answer ? answer : error_answer(ret == -EAGAIN ? "too much is going on; try again" : "out of memory");
}

bool gather_elsewhere(struct serve *s, const json_t *req)
{
	struct serve *t = serve_of_volume(s, json_string_value(json_object_get(req, "volume")));

	return t && t != s;
}

/* The request as it is for one of several: of a size, its part. */
static json_t *part_of(const struct serve *s, const struct serve *t, const json_t *req)
{
	const json_t *size = json_object_get(req, "size");
	json_t *part = json_deep_copy(req);
	uint64_t bytes = 0;

	json_object_del(part, "id");
	if (json_is_integer(size) && json_integer_value(size) > 0)
		bytes = (uint64_t)json_integer_value(size);
	else if (json_is_string(size) && size_parse(json_string_value(size), &bytes) < 0)
		bytes = 0;
	if (bytes)
		json_object_set_new(part, "size", json_integer((json_int_t)(bytes / s->split->nvolumes * t->config->graph.ndisks)));
	return part;
}

co_fn json_t *co_gather(struct serve *s, const json_t *req, bool all)
{
	struct serve *one = all ? NULL : serve_of_volume(s, json_string_value(json_object_get(req, "volume")));
	json_t *sum = NULL;

	/* The last has the smallest part: if that is refused, nothing has changed. */
	for (unsigned i = s->npeers + 1; i-- > 0;) {
		struct serve *t = i ? &s->peers[i - 1] : s;
		json_t *part, *answer;

		if (one && t != one)
			continue;
		part = one ? json_deep_copy(req) : part_of(s, t, req);
		json_object_del(part, "id");
		answer = co_ask(t, part);
		json_decref(part);
		if (!json_is_true(json_object_get(answer, "ok"))) {
			json_decref(sum);
			return answer;
		}
		/* The first one's come first. */
		if (sum)
			gather_merge(answer, sum);
		json_decref(sum);
		sum = answer;
	}
	sort_volumes(s->split, json_object_get(sum, "result"));
	return sum;
}
