/* SPDX-License-Identifier: MIT */
/* The service manager's readiness protocol. */
#include "daemon/notify.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "util/bytes.h"

void notify_send(const char *fmt, ...)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	char text[512];
	va_list ap;
	int fd, len;

	if (!path || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof(sun.sun_path))
		return;
	strcpy(sun.sun_path, path);
	if (path[0] == '@')
		sun.sun_path[0] = '\0';	/* the abstract name space */
	va_start(ap, fmt);
	len = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	(void)!sendto(fd, text, min(len, (int)sizeof(text) - 1), MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&sun,
		      offsetof(struct sockaddr_un, sun_path) + strlen(path));
	close(fd);
}
