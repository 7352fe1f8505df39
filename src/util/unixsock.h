/* SPDX-License-Identifier: MIT */
/*
 * Listening Unix sockets: a stale one is replaced, a live one is not.
 */
#pragma once

#include <stdint.h>
#include <sys/types.h>

struct err;
struct file_access;

struct unix_listener {
	int fd;			/* listening, close-on-exec */
	char path[108];
	uint64_t dev, ino;	/* so that only our own socket is removed */
};

/*
 * Listens on `path`; `access` may be NULL, and its mode 0 is what the umask leaves. A socket on which nobody answers is
 * replaced. -EADDRINUSE: somebody listens there, or it is not a socket. -ENAMETOOLONG; -errno. Messages begin with the path.
 */
int unix_listen(const char *path, const struct file_access *access, int backlog, struct unix_listener *ret, struct err *err);
/* Removes the path if it is still ours, and closes. */
void unix_unlisten(struct unix_listener *l);
