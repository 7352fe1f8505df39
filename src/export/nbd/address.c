/* SPDX-License-Identifier: MIT */
/* NBD server: what the text of an address says. */
#include "export/nbd/internal.h"

#include <errno.h>
#include <stdlib.h>

#define KNOWN "export"
#define KNOWN_UNIX KNOWN ", " FILE_ACCESS_OPTIONS

/* Cuts "HOST:PORT", "[IPV6]:PORT", ":PORT" and "PORT" up in place. */
static int split_address(char *text, const char **host, const char **port)
{
	char *colon = strrchr(text, ':'), *end;
	unsigned long n;

	*host = NULL;
	*port = text;
	if (colon) {
		*colon = 0;
		*port = colon + 1;
		*host = text;
		if (text[0] == '[') {
			if (colon[-1] != ']')
				return -EINVAL;
			colon[-1] = 0;
			*host = text + 1;
		} else if (strchr(text, ':')) {
			return -EINVAL;
		}
		if (!**host)
			*host = NULL;
	}
	if (**port < '0' || **port > '9')
		return -EINVAL;
	n = strtoul(*port, &end, 10);
	return *end || n > 65535 ? -EINVAL : 0;
}

static int bad_address(const char *text, struct err *err)
{
	return err_set(err, -EINVAL, "'%.100s' is no address; write unix:PATH, HOST:PORT, [IPV6]:PORT or PORT", text);
}

int nbd_address_parse(struct nbd_address *a, const char *text, struct err *err)
{
	const char *rest;
	int ret;

	*a = (struct nbd_address){ .is_unix = !strncmp(text, "unix:", 5), .access = FILE_ACCESS_INIT };
	rest = opts_split_path(text, a->text, sizeof(a->text));
	if (!rest || strlen(a->text) >= sizeof(a->split))
		return bad_address(text, err);
	strcpy(a->split, a->text);
	a->path = a->split + 5;
	if (a->is_unix ? !*a->path : split_address(a->split, &a->host, &a->port))
		return bad_address(text, err);
	ret = opts_parse(&a->opts, rest, a->text, err);
	if (ret < 0)
		return ret;
	a->export = opts_str(&a->opts, "export");
	if (a->is_unix)
		ret = file_access_parse(&a->opts, a->text, &a->access, err);
	if (!ret)
		ret = opts_finish(&a->opts, a->text, a->is_unix ? KNOWN_UNIX : KNOWN, err);
	if (ret < 0)
		opts_free(&a->opts);
	return ret;
}

void nbd_address_fini(struct nbd_address *a)
{
	opts_free(&a->opts);
}

int nbd_server_check_address(const char *addr, struct err *err)
{
	struct nbd_address a;
	int ret = nbd_address_parse(&a, addr, err);

	if (!ret)
		nbd_address_fini(&a);
	return ret;
}
