/* SPDX-License-Identifier: MIT */
/* Option lists as QEMU writes them. */
#include "util/opts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/err.h"
#include "util/size.h"

static struct opt *opts_find(const struct opts *o, const char *key)
{
	for (size_t i = 0; i < o->n; i++)
		if (!strcmp(o->v[i].key, key))
			return &o->v[i];
	return NULL;
}

/* Takes `key` and `val`, also when it fails. */
static int opts_append(struct opts *o, char *key, char *val)
{
	int rc = -ENOMEM;

	if (!key || !val)
		goto fail;
	rc = -E2BIG;
	if (o->n == OPTS_MAX)
		goto fail;
	if (!o->v) {
		rc = -ENOMEM;
		o->v = calloc(OPTS_MAX, sizeof(*o->v));
		if (!o->v)
			goto fail;
	}
	o->v[o->n++] = (struct opt){ .key = key, .val = val };
	return 0;
fail:
	free(key);
	free(val);
	return rc;
}

/* Reads a value up to a single comma; moves *s behind it. NULL if out of memory. */
static char *value_parse(const char **s)
{
	const char *p = *s;
	char *val = malloc(strlen(p) + 1), *w = val;

	if (!val)
		return NULL;
	for (; *p && !(p[0] == ',' && p[1] != ','); p++) {
		if (*p == ',')
			p++;
		*w++ = *p;
	}
	*w = '\0';
	*s = p;
	return val;
}

static int opts_parse_one(struct opts *o, const char **s, const char *what, struct err *err)
{
	size_t len = strcspn(*s, "=,");
	char *key, *val;
	int rc;

	if (!len)
		return err_set(err, -EINVAL, "%s: an option has no name (at \"%.32s\"); write NAME=VALUE,NAME=VALUE "
			       "and double a comma inside a value", what, *s);
	key = strndup(*s, len);
	*s += len;
	if (key && opts_find(o, key)) {
		err_set(err, -EINVAL, "%s: option \"%.64s\" is given twice", what, key);
		free(key);
		return -EINVAL;
	}
	if (**s == '=') {
		(*s)++;
		val = value_parse(s);
	} else {
		val = strdup("on");
	}
	rc = opts_append(o, key, val);
	if (rc == -E2BIG)
		return err_set(err, -EINVAL, "%s: more than %d options", what, OPTS_MAX);
	if (rc)
		return err_errno(err, rc, "%s", what);
	return 0;
}

int opts_parse(struct opts *o, const char *s, const char *what, struct err *err)
{
	int rc;

	*o = (struct opts){ 0 };
	if (!s || !*s)
		return 0;
	for (;;) {
		rc = opts_parse_one(o, &s, what, err);
		if (rc) {
			opts_free(o);
			return rc;
		}
		if (!*s)
			return 0;
		s++;
	}
}

void opts_free(struct opts *o)
{
	for (size_t i = 0; i < o->n; i++) {
		free(o->v[i].key);
		free(o->v[i].val);
	}
	free(o->v);
	*o = (struct opts){ 0 };
}

int opts_add(struct opts *o, const char *key, const char *val)
{
	struct opt *old = opts_find(o, key);
	char *copy;

	if (!old)
		return opts_append(o, strdup(key), strdup(val));
	copy = strdup(val);
	if (!copy)
		return -ENOMEM;
	free(old->val);
	old->val = copy;
	old->used = false;
	return 0;
}

const char *opts_str(struct opts *o, const char *key)
{
	struct opt *opt = opts_find(o, key);

	if (!opt)
		return NULL;
	opt->used = true;
	return opt->val;
}

static int bad_value(struct err *err, int rc, const char *key, const char *val, const char *wanted)
{
	if (rc == -ERANGE)
		return err_set(err, -EINVAL, "%s=%.64s: too large; must be %s", key, val, wanted);
	return err_set(err, -EINVAL, "%s=%.64s: must be %s", key, val, wanted);
}

int opts_size(struct opts *o, const char *key, uint64_t *val, struct err *err)
{
	const char *s = opts_str(o, key);
	int rc = s ? size_parse(s, val) : 0;

	return rc ? bad_value(err, rc, key, s, "a size such as 4096, 64K or 10G") : 0;
}

int opts_duration(struct opts *o, const char *key, uint64_t *val_ns, struct err *err)
{
	const char *s = opts_str(o, key);
	int rc = s ? duration_parse(s, val_ns) : 0;

	return rc ? bad_value(err, rc, key, s, "a duration such as 100us, 8ms or 2s") : 0;
}

int opts_u64(struct opts *o, const char *key, uint64_t min, uint64_t max, uint64_t *val, struct err *err)
{
	const char *s = opts_str(o, key);
	char wanted[80];
	uint64_t v;
	int rc;

	if (!s)
		return 0;
	rc = u64_parse(s, &v);
	if (!rc && v >= min && v <= max) {
		*val = v;
		return 0;
	}
	snprintf(wanted, sizeof(wanted), "a number from %" PRIu64 " to %" PRIu64, min, max);
	return bad_value(err, -EINVAL, key, s, wanted);
}

int opts_bool(struct opts *o, const char *key, bool *val, struct err *err)
{
	const char *s = opts_str(o, key);
	int v;

	if (!s)
		return 0;
	if (bool_parse(s, &v))
		return bad_value(err, -EINVAL, key, s, "on or off");
	*val = v;
	return 0;
}

int opts_enum(struct opts *o, const char *key, const char *const *names, int *val, struct err *err)
{
	const char *s = opts_str(o, key);
	char list[256] = "one of";
	size_t len;

	if (!s)
		return 0;
	for (int i = 0; names[i]; i++) {
		if (!strcmp(s, names[i])) {
			*val = i;
			return 0;
		}
		len = strlen(list);
		snprintf(list + len, sizeof(list) - len, "%s %s", i ? "," : "", names[i]);
	}
	return bad_value(err, -EINVAL, key, s, list);
}

int opts_finish(const struct opts *o, const char *what, const char *known, struct err *err)
{
	for (size_t i = 0; i < o->n; i++)
		if (!o->v[i].used)
			return err_set(err, -EINVAL, "%s: unknown option \"%.64s\"; known are: %s", what, o->v[i].key, known);
	return 0;
}

const char *opts_split_path(const char *text, char *path, size_t size)
{
	size_t n = 0;

	while (*text) {
		if (*text == ',') {
			if (text[1] != ',')
				break;
			text++;
		}
		if (n + 1 >= size)
			return NULL;
		path[n++] = *text++;
	}
	path[n] = '\0';
	return *text ? text + 1 : text;
}
