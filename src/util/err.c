/* SPDX-License-Identifier: MIT */
/* The control path's error message. */
#include "util/err.h"

#include <stdio.h>
#include <string.h>

int err_vset(struct err *err, int code, const char *fmt, va_list ap)
{
	if (err && !err->code) {
		err->code = code;
		vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
	}
	return code;
}

int err_set(struct err *err, int code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	err_vset(err, code, fmt, ap);
	va_end(ap);
	return code;
}

int err_errno(struct err *err, int code, const char *fmt, ...)
{
	char reason[128];
	va_list ap;
	size_t len;

	if (!err || err->code)
		return code;
	va_start(ap, fmt);
	err_vset(err, code, fmt, ap);
	va_end(ap);
	len = strlen(err->msg);
	snprintf(err->msg + len, sizeof(err->msg) - len, ": %s", strerror_r(-code, reason, sizeof(reason)));
	return code;
}

int err_prefix(struct err *err, const char *fmt, ...)
{
	char old[sizeof(err->msg)];
	va_list ap;
	size_t len;

	if (!err || !err->code)
		return 0;
	memcpy(old, err->msg, sizeof(old));
	va_start(ap, fmt);
	vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
	va_end(ap);
	len = strlen(err->msg);
	snprintf(err->msg + len, sizeof(err->msg) - len, ": %s", old);
	return err->code;
}

void err_clear(struct err *err)
{
	if (err) {
		err->code = 0;
		err->msg[0] = '\0';
	}
}
