/* SPDX-License-Identifier: MIT */
/* Messages for the operator. */
#include "util/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "util/bytes.h"

static enum log_level max_level = LOG_INFO;

void log_set_level(enum log_level level)
{
	__atomic_store_n(&max_level, level, __ATOMIC_RELAXED);
}

void log_msg(enum log_level level, const char *fmt, ...)
{
	static const char prefix[] = "weir: ";
	const int start = sizeof(prefix) - 1;
	int saved_errno = errno, len;
	char line[2048];
	va_list ap;

	if (level > __atomic_load_n(&max_level, __ATOMIC_RELAXED))
		return;
	memcpy(line, prefix, start);
	va_start(ap, fmt);
	len = vsnprintf(line + start, sizeof(line) - start, fmt, ap);
	va_end(ap);
	len = start + min(max(len, 0), (int)sizeof(line) - start - 1);
	/* Names come from clients and images: none of them writes a second line or an escape sequence. */
	for (int i = start; i < len; i++)
		if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
			line[i] = '?';
	line[len++] = '\n';
	/* There is nobody to tell if standard error is gone. */
	(void)!write(STDERR_FILENO, line, len);
	errno = saved_errno;
}
