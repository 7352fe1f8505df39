/* SPDX-License-Identifier: MIT */
/*
 * NBD URIs (doc/uri.md of the nbd project).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct err;

struct nbd_uri {
	bool is_unix;
	char *host, *port;	/* TCP */
	char *path;		/* Unix: the socket; an abstract name begins with a NUL byte */
	size_t path_len;
	char *export;		/* "" is the server's default export */
};

/*
 * nbd://HOST[:PORT][/EXPORT], nbd+unix:///[EXPORT]?socket=PATH. Untrusted text. -EINVAL, or -ENOTSUP for a URI that asks for TLS.
 * nbd_uri_fini() takes what a failed parse left too.
 */
int nbd_uri_parse(const char *text, struct nbd_uri *ret, struct err *err);
void nbd_uri_fini(struct nbd_uri *u);
