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
#include "util/bytes.h"
#include "util/err.h"
#include "util/nbd_proto.h"

#define EXAMPLES "nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH, with TLS nbds://..."

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

	host = s;
	if (at) {
		u->tls.user = unescape_text(s, at - s, 255);
		if (!u->is_tls)
			return err_set(err, -EINVAL, "%s: a user name in the address serves TLS only; write nbds:// or leave it out", text);
		if (!u->tls.user || !*u->tls.user)
			return err_set(err, -EINVAL, "%s: the user's name is empty or badly encoded", text);
		u->tls.any = true;
		host = at + 1;
	}
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
	if (u->is_unix && host == end)
		return 0;
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

/* --- TLS --- */

const char *const nbd_tls_keys[] = { "tls-certificates", "tls-psk-file", "tls-username", "tls-hostname", "tls-verify-peer", NULL };

static int set_verify(struct nbd_uri *u, const char *val, const char *text, struct err *err)
{
	static const char *const yes[] = { "on", "true", "yes", "1" }, *const no[] = { "off", "false", "no", "0" };

	for (size_t i = 0; i < ARRAY_SIZE(yes); i++) {
		if (!strcasecmp(val, yes[i]) || !strcasecmp(val, no[i])) {
			u->tls.no_verify = !strcasecmp(val, no[i]);
			return 0;
		}
	}
	return err_set(err, -EINVAL, "%s: tls-verify-peer is on or off", text);
}

int nbd_uri_set_tls(struct nbd_uri *u, const char *key, const char *val, const char *text, struct err *err)
{
	char **const to[] = { &u->tls.certificates, &u->tls.psk_file, &u->tls.user, &u->tls.hostname };
	unsigned i = 0;

	u->tls.any = true;
	while (nbd_tls_keys[i] && strcmp(nbd_tls_keys[i], key))
		i++;
	if (!nbd_tls_keys[i])
		return err_set(err, -EINVAL, "%s: \"%s\" is not a parameter of TLS; there are tls-certificates, tls-psk-file, tls-username, tls-hostname and "
			       "tls-verify-peer", text, key);
	if (i >= ARRAY_SIZE(to))
		return set_verify(u, val, text, err);
	if (*to[i])
		return err_set(err, -EINVAL, "%s: %s is given twice", text, key);
	if (!*val)
		return err_set(err, -EINVAL, "%s: %s is empty", text, key);
	*to[i] = strdup(val);
	return *to[i] ? 0 : err_errno(err, -ENOMEM, "%s", text);
}

int nbd_uri_check_tls(const struct nbd_uri *u, const char *text, struct err *err)
{
	const struct nbd_tls_options *t = &u->tls;

	if (!u->is_tls)
		return t->any ? err_set(err, -EINVAL, "%s: has parameters of TLS, but nbd:// is not encrypted; write nbds:// or nbds+unix://", text) : 0;
	if (t->psk_file && (t->certificates || t->hostname || t->no_verify))
		return err_set(err, -EINVAL, "%s: tls-psk-file goes with tls-username only: a pre-shared key takes the place of certificates", text);
	if (t->user && !t->psk_file)
		return err_set(err, -EINVAL, "%s: the user's name says which key of tls-psk-file=FILE is used, which is not given", text);
	if (t->no_verify && t->hostname)
		return err_set(err, -EINVAL, "%s: tls-hostname is of no use with tls-verify-peer=off", text);
	return 0;
}

/* "KEY=VALUE" of a query. */
static int parse_tls(const char *s, size_t len, struct nbd_uri *u, const char *text, struct err *err)
{
	size_t key_len = strcspn(s, "=&");
	char *key = strndup(s, key_len), *val = key_len < len ? unescape_text(s + key_len + 1, len - key_len - 1, 4096) : NULL;
	int ret = key && val ? nbd_uri_set_tls(u, key, val, text, err)
			     : err_set(err, -EINVAL, "%s: \"%.*s\" has no value, or one that is badly encoded", text, (int)key_len, s);

	free(key);
	free(val);
	return ret;
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
			int ret = parse_tls(q, len, u, text, err);

			if (ret)
				return ret;
		} else if (len) {
			return err_set(err, -EINVAL, "%s: \"%.*s\" is not a parameter of an NBD URI; socket=PATH and those of TLS are known", text,
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
	ret->is_tls = !strncasecmp(text, "nbds", 4);
	p = text + (strncasecmp(text, "nbd", 3) ? 0 : 3 + ret->is_tls);
	ret->is_unix = p != text && !strncasecmp(p, "+unix", 5);
	p += ret->is_unix ? 5 : 0;
	if (p == text || strncmp(p, "://", 3))
		return err_set(err, -EINVAL, "%s: is not an NBD URI; write " EXAMPLES, text);
	p += 3;
	if (strchr(p, '#'))
		return err_set(err, -EINVAL, "%s: an NBD URI has no fragment (\"#...\"); write %%23 for a # in a name", text);

	auth_len = strcspn(p, "/?");
	if (ret->is_unix && auth_len && !(ret->is_tls && p[auth_len - 1] == '@'))
		return err_set(err, -EINVAL, "%s: a Unix socket has no host: three slashes, as in nbd+unix:///EXPORT?socket=PATH", text);
	if (!ret->is_unix || auth_len) {
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
	free(u->tls.certificates);
	free(u->tls.psk_file);
	free(u->tls.user);
	free(u->tls.hostname);
	memset(u, 0, sizeof(*u));
}
