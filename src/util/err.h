/* SPDX-License-Identifier: MIT */
/*
 * The control path's error message.
 *
 * A function that can fail for a reason worth telling takes `struct err *err` as its last parameter.
 * The message is built where the facts are and printed once at the edge. It names the thing, the
 * reason and the way out: "disk0.raw: is in use by another process (lock on byte 201); stop it, or
 * open with lock=off".
 */
#pragma once

#include <stdarg.h>

struct err {
	int code;		/* -errno of the first error set, 0 if none */
	char msg[768];
};

#define ERR_INIT { 0, "" }

/*
 * Sets the message, unless one is set already (the first error is the cause), and returns `code`, a
 * negative errno, so that callers can write `return err_set(err, -EINVAL, ...)`. `err` may be NULL.
 */
int err_set(struct err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int err_vset(struct err *err, int code, const char *fmt, va_list ap);

/* As err_set(), with ": " and strerror(-code) behind the text. */
int err_errno(struct err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "TEXT: " in front of the message that is set. Returns err->code. */
int err_prefix(struct err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void err_clear(struct err *err);
