/* SPDX-License-Identifier: MIT */
/*
 * Option lists as QEMU writes them: "format=raw,aio=native,cache=none". A comma inside a value is doubled.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;

struct opt {
	char *key, *val;	/* val is "on" for a bare key */
	bool used;
};

struct opts {
	struct opt *v;
	size_t n;
};

#define OPTS_MAX 64

/*
 * Splits `s` (may be NULL or ""). `what` names the thing in messages.
 * -EINVAL: an empty key, a key given twice, more than OPTS_MAX keys. Free with opts_free().
 */
int opts_parse(struct opts *o, const char *s, const char *what, struct err *err);
void opts_free(struct opts *o);
/*
 * For "PATH,key=value": copies the path, which ends at the first comma that is not doubled. Returns the options behind it, "" if there are none, or NULL: the
 * path does not fit.
 */
const char *opts_split_path(const char *text, char *path, size_t size);
/* Adds one; replaces an earlier value of the same key. -ENOMEM or -E2BIG. */
int opts_add(struct opts *o, const char *key, const char *val);

/* Each marks the key as used. NULL or the default if absent; the getters return 0, or -EINVAL with a message that names the key. */
const char *opts_str(struct opts *o, const char *key);
int opts_size(struct opts *o, const char *key, uint64_t *val, struct err *err);
int opts_duration(struct opts *o, const char *key, uint64_t *val_ns, struct err *err);
int opts_u64(struct opts *o, const char *key, uint64_t min, uint64_t max, uint64_t *val, struct err *err);
int opts_bool(struct opts *o, const char *key, bool *val, struct err *err);
/* `names` ends with NULL; *val is the index of the one that was given. The message lists the names. */
int opts_enum(struct opts *o, const char *key, const char *const *names, int *val, struct err *err);

/* -EINVAL with a message that names the first key nobody asked for, and `known` (a comma separated list). */
int opts_finish(const struct opts *o, const char *what, const char *known, struct err *err);
