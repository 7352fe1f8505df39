/* SPDX-License-Identifier: MIT */
/*
 * DISK strings: the parser. Untrusted input; touches nothing but memory.
 */
#include "blk/spec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"
#include "util/err.h"

#define MAX_WRAPPERS 8
#define MAX_TEXT 16384

/* Schemes that are a driver's in every build, so that a build without it says so instead of looking for a file. */
static const char *const wrappers[] = { "delay", "fault" };
static const char *const schemes[] = { "file", "mem", "null", "rbd" };
static const char *const nbd_schemes[] = { "nbd", "nbds", "nbd+unix", "nbds+unix", "nbd+vsock", "nbds+vsock" };

static const char *find(const char *const *names, size_t n, const char *s, size_t len)
{
	for (size_t i = 0; i < n; i++)
		if (strlen(names[i]) == len && !memcmp(names[i], s, len))
			return names[i];
	return NULL;
}

/* Splits "REST,OPTS" at the first single comma, and undoubles the commas of REST. */
static int split_rest(struct disk_spec *s, const char *p, struct err *err)
{
	char *w = malloc(strlen(p) + 1);

	if (!w)
		return err_errno(err, -ENOMEM, "%.200s", s->text);
	s->rest = w;
	for (; *p && !(p[0] == ',' && p[1] != ','); p++) {
		if (*p == ',')
			p++;
		*w++ = *p;
	}
	*w = '\0';
	if (!*p)
		return 0;
	if (!p[1])
		return err_set(err, -EINVAL, "%.200s: ends with a comma; an option NAME=VALUE must follow, or double the comma "
			       "if it belongs to the name", s->text);
	return opts_parse(&s->opts, p + 1, s->text, err);
}

static int parse(const char *text, unsigned depth, struct disk_spec **ret, struct err *err);

/* "OPTS:DISK" */
static int parse_wrapper(struct disk_spec *s, const char *p, unsigned depth, struct err *err)
{
	const char *colon = strchr(p, ':');
	char *opts;
	int r;

	if (depth == MAX_WRAPPERS)
		return err_set(err, -EINVAL, "%.200s: more than %d wrappers around one disk", s->text, MAX_WRAPPERS);
	if (!colon)
		return err_set(err, -EINVAL, "%.200s: wraps no disk; write %s:NAME=VALUE,...:DISK", s->text, s->driver);
	opts = strndup(p, colon - p);
	s->rest = strdup("");
	if (!opts || !s->rest) {
		free(opts);
		return err_errno(err, -ENOMEM, "%.200s", s->text);
	}
	r = opts_parse(&s->opts, opts, s->text, err);
	free(opts);
	return r ? r : parse(colon + 1, depth + 1, &s->inner, err);
}

static int parse_scheme(struct disk_spec *s, const char *text, unsigned depth, struct err *err)
{
	size_t len = strcspn(text, ":");
	const char *name = NULL, *rest = text;

	if (text[len]) {
		name = find(wrappers, ARRAY_SIZE(wrappers), text, len);
		if (name) {
			s->driver = strdup(name);
			return s->driver ? parse_wrapper(s, text + len + 1, depth, err) : err_errno(err, -ENOMEM, "%.200s", text);
		}
		name = find(schemes, ARRAY_SIZE(schemes), text, len);
		if (name)
			rest = text + len + 1;
		else if ((name = find(nbd_schemes, ARRAY_SIZE(nbd_schemes), text, len)) != NULL) {
			if (strncmp(text + len, "://", 3))
				return err_set(err, -EINVAL, "%.200s: not an NBD address; write nbd://HOST/EXPORT or "
					       "nbd+unix:///EXPORT?socket=PATH", text);
			name = "nbd";
		}
	}
	s->driver = strdup(name ? name : "file");
	if (!s->driver)
		return err_errno(err, -ENOMEM, "%.200s", text);
	return split_rest(s, rest, err);
}

static int check_rest(const struct disk_spec *s, struct err *err)
{
	if (s->inner || *s->rest)
		return 0;
	if (!*s->text)
		return err_set(err, -EINVAL, "the name of a disk is empty");
	return err_set(err, -EINVAL, "%.200s: nothing is named; write %s", s->text,
		       !strcmp(s->driver, "mem") || !strcmp(s->driver, "null") ? "a size behind the colon, as in mem:1G" : "a path");
}

static int parse(const char *text, unsigned depth, struct disk_spec **ret, struct err *err)
{
	struct disk_spec *s = calloc(1, sizeof(*s));
	int r;

	if (!s || !(s->text = strdup(text))) {
		free(s);
		return err_errno(err, -ENOMEM, "%.200s", text);
	}
	r = parse_scheme(s, text, depth, err);
	if (!r)
		r = check_rest(s, err);
	if (r) {
		disk_spec_free(s);
		return r;
	}
	*ret = s;
	return 0;
}

int disk_spec_parse(const char *text, struct disk_spec **ret, struct err *err)
{
	if (strlen(text) > MAX_TEXT)
		return err_set(err, -EINVAL, "%.60s...: longer than %d bytes", text, MAX_TEXT);
	return parse(text, 0, ret, err);
}

void disk_spec_free(struct disk_spec *s)
{
	while (s) {
		struct disk_spec *inner = s->inner;

		opts_free(&s->opts);
		free(s->text);
		free(s->driver);
		free(s->rest);
		free(s);
		s = inner;
	}
}
