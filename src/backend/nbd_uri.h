/* SPDX-License-Identifier: MIT */
/*
 * NBD URIs (doc/uri.md of the nbd project).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct err;

/* What nbds:// asks for; NULL: not given. */
struct nbd_tls_options {
	char *certificates;	/* a directory: see tls_client_config */
	char *psk_file, *user;
	char *hostname;		/* that the server's certificate must have, if it is not the URI's host */
	bool no_verify;
	bool any;		/* something was given */
};

struct nbd_uri {
	bool is_unix, is_tls;
	char *host, *port;	/* TCP */
	char *path;		/* Unix: the socket; an abstract name begins with a NUL byte */
	size_t path_len;
	char *export;		/* "" is the server's default export */
	struct nbd_tls_options tls;
};

/*
 * nbd://HOST[:PORT][/EXPORT], nbd+unix:///[EXPORT]?socket=PATH; with TLS nbds://[USER@]HOST..., nbds+unix://[USER@]/..., and the parameters below.
 * Untrusted text. -EINVAL. nbd_uri_fini() takes what a failed parse left too.
 */
int nbd_uri_parse(const char *text, struct nbd_uri *ret, struct err *err);
/* The same parameters from elsewhere: a key of nbd_tls_keys, which ends with NULL. */
extern const char *const nbd_tls_keys[];
int nbd_uri_set_tls(struct nbd_uri *u, const char *key, const char *val, const char *text, struct err *err);
/* When all of them are there: do they go together? */
int nbd_uri_check_tls(const struct nbd_uri *u, const char *text, struct err *err);
void nbd_uri_fini(struct nbd_uri *u);
