/* SPDX-License-Identifier: MIT */
/*
 * The operator's messages are noise where errors are made on purpose: shown with --verbose only. Replaces util/log.c.
 */
#include <stdarg.h>
#include <stdio.h>

#include "crash.h"
#include "util/log.h"

void log_set_level(enum log_level level)
{
}

void log_msg(enum log_level level, const char *fmt, ...)
{
	va_list ap;

	if (!crash_opts.verbose)
		return;
	va_start(ap, fmt);
	printf("  weir: ");
	vprintf(fmt, ap);
	putchar('\n');
	va_end(ap);
}
