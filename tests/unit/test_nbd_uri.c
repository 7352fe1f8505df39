/* SPDX-License-Identifier: MIT */
/* NBD URIs: what is accepted, and that what is refused says why. */
#include <errno.h>

#include "backend/nbd_uri.h"
#include "lib/test.h"
#include "util/err.h"

static void good_tcp(const char *text, const char *host, const char *port, const char *export)
{
	struct err err = ERR_INIT;
	struct nbd_uri u;

	if (nbd_uri_parse(text, &u, &err))
		test_fail("%s: refused: %s", text, err.msg);
	CHECK(!u.is_unix);
	CHECK_STR(u.host, host);
	CHECK_STR(u.port, port);
	CHECK_STR(u.export, export);
	nbd_uri_fini(&u);
}

static void tcp_uris_give_host_port_and_export(void)
{
	good_tcp("nbd://example.com/disk", "example.com", "10809", "disk");
	good_tcp("nbd://example.com", "example.com", "10809", "");
	good_tcp("nbd://example.com/", "example.com", "10809", "");
	good_tcp("nbd://example.com:99//disk", "example.com", "99", "/disk");
	good_tcp("NBD://127.0.0.1:1/hello%20world", "127.0.0.1", "1", "hello world");
	good_tcp("nbd://[::1]:65535/a", "::1", "65535", "a");
	good_tcp("nbd://[fe80::1]/a", "fe80::1", "10809", "a");
	good_tcp("nbd://h:/a,b", "h", "10809", "a,b");
	good_tcp("nbd://h/%E2%82%AC", "h", "10809", "\xe2\x82\xac");
}

static void unix_uris_give_socket_and_export(void)
{
	struct err err = ERR_INIT;
	struct nbd_uri u;

	CHECK_EQ(nbd_uri_parse("nbd+unix:///vm?socket=/run/a%20b.sock", &u, &err), 0);
	CHECK(u.is_unix);
	CHECK_STR(u.path, "/run/a b.sock");
	CHECK_EQ(u.path_len, 13);
	CHECK_STR(u.export, "vm");
	nbd_uri_fini(&u);
	CHECK_EQ(nbd_uri_parse("nbd+unix://?socket=nbd.sock", &u, &err), 0);
	CHECK_STR(u.path, "nbd.sock");
	CHECK_STR(u.export, "");
	nbd_uri_fini(&u);
	CHECK_EQ(nbd_uri_parse("nbd+unix:///?socket=%00/abstract", &u, &err), 0);
	CHECK_EQ(u.path_len, 10);
	CHECK(!u.path[0]);
	CHECK_STR(u.path + 1, "/abstract");
	nbd_uri_fini(&u);
}

static void bad(const char *text, int error, const char *words)
{
	struct err err = ERR_INIT;
	struct nbd_uri u;
	int ret = nbd_uri_parse(text, &u, &err);

	nbd_uri_fini(&u);
	CHECK_EQ(ret, error);
	if (!strstr(err.msg, words) || strncmp(err.msg, text, strlen(text)))
		test_fail("%s: the message is \"%s\", wanted \"%s\" in it", text, err.msg, words);
}

static void what_is_wrong_is_refused_with_the_reason(void)
{
	char text[8192];

	bad("nbds://h/x", -ENOTSUP, "TLS");
	bad("nbds+unix:///x?socket=s", -ENOTSUP, "TLS");
	bad("nbd://h/x?tls-type=psk", -ENOTSUP, "TLS");
	bad("nbd://me@h/x", -EINVAL, "user name");
	bad("http://h/x", -EINVAL, "not an NBD URI");
	bad("nbd:h:10809", -EINVAL, "not an NBD URI");
	bad("nbd:///x", -EINVAL, "no host");
	bad("nbd://h:0/x", -EINVAL, "not a port");
	bad("nbd://h:65536/x", -EINVAL, "not a port");
	bad("nbd://h:12a/x", -EINVAL, "not a port");
	bad("nbd://h:9999999999999999999/x", -EINVAL, "not a port");
	bad("nbd://[::1/x", -EINVAL, "closing bracket");
	bad("nbd://[::1]5/x", -EINVAL, "closing bracket");
	bad("nbd://h/x?socket=s", -EINVAL, "nbd+unix");
	bad("nbd+unix:///x", -EINVAL, "lacks the socket");
	bad("nbd+unix:///x?socket=", -EINVAL, "empty");
	bad("nbd+unix:///x?socket=a&socket=b", -EINVAL, "twice");
	bad("nbd+unix:///x?socket=a&foo=b", -EINVAL, "\"foo\"");
	bad("nbd+unix://host/x?socket=a", -EINVAL, "three slashes");
	bad("nbd+unix:///x?socket=a%00b", -EINVAL, "NUL");
	bad("nbd+unix:///x?socket=%4", -EINVAL, "badly encoded");
	bad("nbd://h/%zz", -EINVAL, "badly encoded");
	bad("nbd://h/%4", -EINVAL, "badly encoded");
	bad("nbd://h/a%00b", -EINVAL, "badly encoded");
	bad("nbd://h/x#y", -EINVAL, "fragment");

	snprintf(text, sizeof(text), "nbd+unix:///x?socket=%0*d", 108, 0);
	bad(text, -EINVAL, "longer");
	memset(text, 0, sizeof(text));
	strcpy(text, "nbd://h/");
	memset(text + 8, 'x', 4097);
	struct nbd_uri u;
	CHECK_EQ(nbd_uri_parse(text, &u, NULL), -EINVAL);
	nbd_uri_fini(&u);
	text[8 + 4096] = '\0';
	CHECK_EQ(nbd_uri_parse(text, &u, NULL), 0);
	nbd_uri_fini(&u);
}

int main(void)
{
	RUN(tcp_uris_give_host_port_and_export);
	RUN(unix_uris_give_socket_and_export);
	RUN(what_is_wrong_is_refused_with_the_reason);
	return 0;
}
