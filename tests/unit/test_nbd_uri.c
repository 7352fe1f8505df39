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

static void tls_uris_give_what_it_takes(void)
{
	struct err err = ERR_INIT;
	struct nbd_uri u;

	CHECK_EQ(nbd_uri_parse("nbds://h/x?tls-certificates=/a%2Cb&tls-hostname=server&tls-verify-peer=true", &u, &err), 0);
	CHECK(u.is_tls && !u.is_unix && !u.tls.no_verify);
	CHECK_STR(u.tls.certificates, "/a,b");
	CHECK_STR(u.tls.hostname, "server");
	CHECK_EQ(nbd_uri_check_tls(&u, "", &err), 0);
	nbd_uri_fini(&u);
	CHECK_EQ(nbd_uri_parse("nbds://al%20ice@h:1/x?tls-psk-file=/k", &u, &err), 0);
	CHECK_STR(u.tls.user, "al ice");
	CHECK_STR(u.tls.psk_file, "/k");
	CHECK_STR(u.port, "1");
	CHECK_EQ(nbd_uri_check_tls(&u, "", &err), 0);
	nbd_uri_fini(&u);
	CHECK_EQ(nbd_uri_parse("NBDS+UNIX://bob@/x?socket=s&tls-psk-file=/k", &u, &err), 0);
	CHECK(u.is_tls && u.is_unix);
	CHECK_STR(u.tls.user, "bob");
	CHECK_STR(u.export, "x");
	nbd_uri_fini(&u);
	CHECK_EQ(nbd_uri_parse("nbds+unix:///?socket=s&tls-verify-peer=off", &u, &err), 0);
	CHECK(u.tls.no_verify && !u.host);
	nbd_uri_fini(&u);
}

/* Alone each is fine. */
static void does_not_go_together(const char *text, const char *words)
{
	struct err err = ERR_INIT;
	struct nbd_uri u;

	CHECK_EQ(nbd_uri_parse(text, &u, &err), 0);
	CHECK_EQ(nbd_uri_check_tls(&u, text, &err), -EINVAL);
	nbd_uri_fini(&u);
	if (!strstr(err.msg, words))
		test_fail("%s: the message is \"%s\", wanted \"%s\" in it", text, err.msg, words);
}

static void tls_parameters_that_say_two_things_are_refused(void)
{
	does_not_go_together("nbd://h/x?tls-certificates=/c", "not encrypted");
	does_not_go_together("nbds://h/x?tls-certificates=/c&tls-psk-file=/k", "pre-shared key");
	does_not_go_together("nbds://h/x?tls-psk-file=/k&tls-verify-peer=off", "pre-shared key");
	does_not_go_together("nbds://me@h/x", "tls-psk-file=FILE");
	does_not_go_together("nbds://h/x?tls-hostname=h&tls-verify-peer=0", "of no use");
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

	bad("nbd://me@h/x", -EINVAL, "user name");
	bad("nbds://@h/x", -EINVAL, "user's name is empty");
	bad("nbds://me@/x", -EINVAL, "no host");
	bad("nbds://h/x?tls-certificates=", -EINVAL, "empty");
	bad("nbds://h/x?tls-certificates", -EINVAL, "no value");
	bad("nbds://h/x?tls-hostname=a%4", -EINVAL, "badly encoded");
	bad("nbds://h/x?tls-psk-file=a&tls-psk-file=b", -EINVAL, "twice");
	bad("nbds://me@h/x?tls-username=you", -EINVAL, "twice");
	bad("nbds://h/x?tls-verify-peer=maybe", -EINVAL, "on or off");
	bad("nbds://h/x?tls-type=psk", -EINVAL, "not a parameter of TLS");
	bad("nbds+unix://me@h/x?socket=s", -EINVAL, "three slashes");
	bad("nb", -EINVAL, "not an NBD URI");
	bad("nbdsx://h", -EINVAL, "not an NBD URI");
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
	RUN(tls_uris_give_what_it_takes);
	RUN(tls_parameters_that_say_two_things_are_refused);
	RUN(what_is_wrong_is_refused_with_the_reason);
	return 0;
}
