/* SPDX-License-Identifier: MIT */
/*
 * TLS over a byte stream of coroutines: credentials, and sessions of either side. Knows nothing about NBD.
 * The design note is in session.c.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "rt/role.h"

struct err;
struct tls;
struct tls_creds;

/* False: this build has no GnuTLS, and loading credentials is -ENOTSUP. */
bool tls_is_built_in(void);

/* --- Credentials: read once, then in memory only. All paths are read when this is called. --- */

/*
 * Server: `dir` holds server-cert.pem and server-key.pem with ca-cert.pem (needed with verify_peer) and ca-crl.pem
 * (optional), or keys.psk, or both. `verify_peer`: a client needs a certificate that the CA signed for clients.
 */
int tls_creds_load_server(const char *dir, bool verify_peer, struct tls_creds **ret, struct err *err);

struct tls_client_config {
	const char *name;	/* of the thing that connects, for messages */
	const char *dir;	/* ca-cert.pem, ca-crl.pem, client-cert.pem and client-key.pem, all optional; NULL: none, the system's CAs are trusted */
	const char *psk_file;	/* NAME:HEX lines; NULL: certificates */
	const char *user;	/* of psk_file; NULL: the login name */
	const char *hostname;	/* that the server's certificate must have; NULL: any */
	bool no_verify;		/* take any server for the right one */
};

int tls_creds_load_client(const struct tls_client_config *config, struct tls_creds **ret, struct err *err);
/*
 * `fresh` was read again in place of `old` (NULL: nothing was in use): -ENOENT if the CA, the list of revoked certificates, the own certificate or the keys
 * are gone, as in the middle of a renewal that removes and then writes. `what` names their directory.
 */
int tls_creds_check_fresh(const struct tls_creds *old, const struct tls_creds *fresh, const char *what, struct err *err);
/* Sessions that use them go on, and new ones may not be made. On the reactor; NULL is fine. */
void tls_creds_free(struct tls_creds *c);

/* --- Sessions --- */

/* What lies below a session: as the calls of nbd_transport_ops, with `arg` in front. */
struct tls_io {
	ssize_t (*co_recv)(void *arg, struct iovec *iov, int n);
	ssize_t (*co_send)(void *arg, struct iovec *iov, int n);
	void *arg;
};

/* A session in which nothing has been said. -ENOMEM. */
int tls_create(struct tls_creds *creds, const struct tls_io *io, struct tls **ret);
/* Who may suspend in the calls below is gone. NULL is fine. */
void tls_free(struct tls *t);

/*
 * Shakes hands, and checks the peer as the credentials ask. 0; -ECONNRESET: the stream ended; -EACCES: not whom we want; -EPERM: does not want us; -EPROTO.
 * There is no clock in here: who waits for ever is ended from outside, by making io fail.
 */
co_fn int co_tls_handshake(struct tls *t);
/* Bytes received, 0 at the end of the stream, -errno. One caller at a time. */
co_fn ssize_t co_tls_recv(struct tls *t, struct iovec *iov, int n);
/* Bytes taken, at least 1, or -errno; `iov` is not changed. One caller at a time, which may be another than that of co_tls_recv(). */
co_fn ssize_t co_tls_send(struct tls *t, const struct iovec *iov, int n);
/* Says good-bye, if the session got so far. Nobody sends. */
co_fn void co_tls_bye(struct tls *t);
/* The same from a plain function, with `len` bytes of data in front: what is to be sent, or NULL. Nothing may be sent afterwards. */
const void *tls_last_words(struct tls *t, const void *data, size_t len, size_t *ret_len);

/* Why the last call failed; "" if nothing is known. */
const char *tls_why(const struct tls *t);
/* After the handshake: version and ciphers; who the peer is ("" if it did not say). Printable ASCII. */
const char *tls_description(const struct tls *t);
const char *tls_peer(const struct tls *t);
