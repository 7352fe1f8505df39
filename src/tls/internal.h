/* SPDX-License-Identifier: MIT */
/* TLS: what credentials and sessions share. */
#pragma once

#include <gnutls/gnutls.h>

#include "rt/ref.h"
#include "rt/sync.h"
#include "tls/tls.h"

#define TLS_KEY_MAX 64u		/* bytes of a pre-shared key */
#define TLS_USER_MAX 128u

struct tls_psk {
	struct tls_psk *next;
	unsigned key_len;
	uint8_t key[TLS_KEY_MAX];
	char user[TLS_USER_MAX];
};

struct tls_creds {
	struct rt_ref refs;	/* the owner's and the sessions', which may have moved to other reactors */
	bool server, verify_peer;
	bool has_cert, has_ca, has_crl;
	char *hostname;
	gnutls_certificate_credentials_t cert;
	gnutls_psk_server_credentials_t psk_server;
	gnutls_psk_client_credentials_t psk_client;
	gnutls_priority_t priority;
	struct tls_psk *psk;
	struct co_sem slots;	/* handshakes that compute at the same time */
};

/* psk.c: a list of keys. -EINVAL names the line. */
int tls_psk_load(const char *path, struct tls_psk **ret, struct err *err);
void tls_psk_free(struct tls_psk *list);
/* A gnutls_psk_server_credentials_function2; the session's pointer is a struct tls_creds. */
int tls_psk_find(gnutls_session_t s, const gnutls_datum_t *user, gnutls_datum_t *key);

/* creds.c: a whole file, at most FILE_MAX bytes, behind which is a NUL. -ENOENT is without a message. Free with tls_file_free(), which wipes it. */
int tls_file_read(const char *path, bool secret, gnutls_datum_t *ret, struct err *err);
void tls_file_free(gnutls_datum_t *d);
