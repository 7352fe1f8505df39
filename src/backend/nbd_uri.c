/* SPDX-License-Identifier: MIT */
/*
 * NBD URIs: parsing.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/un.h>

#include "backend/nbd_uri.h"
#include "util/err.h"
#include "util/nbd_proto.h"

#define EXAMPLES "nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH"

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Undoes percent encoding. A NUL follows the result, which may hold NULs itself. NULL: bad encoding, or no memory. */
static char *unescape(const char *s, size_t len, size_t *ret_len)
{
	char *out = malloc(len + 1);
	size_t n = 0;

	if (!out)
		return NULL;
	for (size_t i = 0; i < len; i++) {
		if (s[i] != '%') {
			out[n++] = s[i];
			continue;
		}
		int hi = i + 2 < len ? hex_digit(s[i + 1]) : -1;
		int lo = hi >= 0 ? hex_digit(s[i + 2]) : -1;

		if (lo < 0) {
			free(out);
			return NULL;
		}
		out[n++] = (char)(hi << 4 | lo);
		i += 2;
	}
	out[n] = '\0';
	*ret_len = n;
	return out;
}

/* As unescape(), for parts that are C strings and at most `max` long. */
static char *unescape_text(const char *s, size_t len, size_t max)
{
	size_t n;
	char *out = unescape(s, len, &n);

	if (out && (memchr(out, '\0', n) || n > max)) {
		free(out);
		return NULL;
	}
	return out;
}

/* [USER@]HOST[:PORT], the host perhaps an IPv6 address in brackets. */
static int parse_authority(const char *s, size_t len, struct nbd_uri *u, const char *text, struct err *err)
{
	const char *end = s + len, *at = memchr(s, '@', len), *host, *host_end, *port = NULL;

	if (at)
		return err_set(err, -EINVAL, "%s: a user name in the address serves TLS only, which weir does not speak yet; leave it out", text);
	host = s;
	if (host < end && *host == '[') {
		host++;
		host_end = memchr(host, ']', end - host);
		if (!host_end || (host_end + 1 < end && host_end[1] != ':'))
			return err_set(err, -EINVAL, "%s: the IPv6 address has no closing bracket; write nbd://[ADDRESS]:PORT/EXPORT", text);
		if (host_end + 1 < end)
			port = host_end + 2;
	} else {
		host_end = memchr(host, ':', end - host);
		if (host_end)
			port = host_end + 1;
		else
			host_end = end;
	}
	if (host == host_end)
		return err_set(err, -EINVAL, "%s: has no host; write " EXAMPLES, text);
	u->host = unescape_text(host, host_end - host, 255);
	u->port = port && port < end ? strndup(port, end - port) : strdup(NBD_DEFAULT_PORT);
	if (!u->host || !u->port)
		return err_set(err, -EINVAL, "%s: the host is not a valid name", text);
	if (strspn(u->port, "0123456789") != strlen(u->port) || strlen(u->port) > 5 || atoi(u->port) < 1 || atoi(u->port) > 65535)
		return err_set(err, -EINVAL, "%s: \"%s\" is not a port; give a number from 1 to 65535", text, u->port);
	return 0;
}

static int parse_socket(const char *s, size_t len, struct nbd_uri *u, const char *text, struct err *err)
{
	if (!u->is_unix)
		return err_set(err, -EINVAL, "%s: socket= goes with nbd+unix://, not with nbd://", text);
	if (u->path)
		return err_set(err, -EINVAL, "%s: socket= is given twice", text);
	u->path = unescape(s, len, &u->path_len);
	if (!u->path || !u->path_len)
		return err_set(err, -EINVAL, "%s: socket= is empty or badly encoded", text);
	if (u->path_len >= sizeof(((struct sockaddr_un *)0)->sun_path))
		return err_set(err, -EINVAL, "%s: the path of the socket is longer than the %zu bytes that the kernel takes", text,
			       sizeof(((struct sockaddr_un *)0)->sun_path) - 1);
	if (u->path[0] && memchr(u->path, '\0', u->path_len))
		return err_set(err, -EINVAL, "%s: the path of the socket holds a NUL byte", text);
	return 0;
}

static int parse_query(const char *q, struct nbd_uri *u, const char *text, struct err *err)
{
	while (*q) {
		size_t len = strcspn(q, "&");

		if (!strncmp(q, "socket=", 7) && len >= 7) {
			int ret = parse_socket(q + 7, len - 7, u, text, err);

			if (ret)
				return ret;
		} else if (!strncmp(q, "tls-", 4)) {
			return err_set(err, -ENOTSUP, "%s: asks for TLS, which weir does not speak yet; leave the tls-... parameters out, "
				       "or put a tunnel in front", text);
		} else if (len) {
			return err_set(err, -EINVAL, "%s: \"%.*s\" is not a parameter of an NBD URI; only socket=PATH is known", text,
				       (int)strcspn(q, "=&"), q);
		}
		q += len + (q[len] == '&');
	}
	return 0;
}

int nbd_uri_parse(const char *text, struct nbd_uri *ret, struct err *err)
{
	const char *p, *query;
	size_t auth_len, path_len;
	int r;

	memset(ret, 0, sizeof(*ret));
	if (!strncasecmp(text, "nbds:", 5) || !strncasecmp(text, "nbds+unix:", 10))
		return err_set(err, -ENOTSUP, "%s: asks for TLS, which weir does not speak yet; use nbd:// inside a trusted network or a tunnel", text);
	if (!strncasecmp(text, "nbd://", 6)) {
		p = text + 6;
	} else if (!strncasecmp(text, "nbd+unix://", 11)) {
		p = text + 11;
		ret->is_unix = true;
	} else {
		return err_set(err, -EINVAL, "%s: is not an NBD URI; write " EXAMPLES, text);
	}
	if (strchr(p, '#'))
		return err_set(err, -EINVAL, "%s: an NBD URI has no fragment (\"#...\"); write %%23 for a # in a name", text);

	auth_len = strcspn(p, "/?");
	if (ret->is_unix && auth_len)
		return err_set(err, -EINVAL, "%s: a Unix socket has no host: three slashes, as in nbd+unix:///EXPORT?socket=PATH", text);
	if (!ret->is_unix) {
		r = parse_authority(p, auth_len, ret, text, err);
		if (r)
			return r;
	}
	p += auth_len;
	if (*p == '/')
		p++;
	path_len = strcspn(p, "?");
	ret->export = unescape_text(p, path_len, NBD_STRING_MAX);
	if (!ret->export)
		return err_set(err, -EINVAL, "%s: the export's name is badly encoded or longer than %d bytes", text, NBD_STRING_MAX);
	query = p[path_len] ? p + path_len + 1 : "";
	r = parse_query(query, ret, text, err);
	if (r)
		return r;
	if (ret->is_unix && !ret->path)
		return err_set(err, -EINVAL, "%s: lacks the socket; write nbd+unix:///EXPORT?socket=PATH", text);
	return 0;
}

void nbd_uri_fini(struct nbd_uri *u)
{
	free(u->host);
	free(u->port);
	free(u->path);
	free(u->export);
	memset(u, 0, sizeof(*u));
}
