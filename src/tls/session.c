/* SPDX-License-Identifier: MIT */
/*
 * TLS: sessions.
 *
 *   co_tls_recv ──▶ gnutls_record_recv ──▶ pull ──▶ in  ◀── io.co_recv
 *   co_tls_send ──▶ gnutls_record_send ──▶ push ──▶ out ──▶ io.co_send
 *
 * GnuTLS never does I/O: it reads from `in` and writes to `out`, both in memory, and what moves bytes between them and the stream stands outside.
 *
 * Invariants
 *  (1) No coroutine suspends inside GnuTLS. It has locks and its own idea of who calls it, and a handshake needs more stack than a coroutine has: each of its
 *      steps runs on a worker thread, between two steps all I/O is done, and nobody else touches the session meanwhile.
 *  (2) A session has two buffers, a record in the making, and what GnuTLS keeps: a record, and messages of a handshake up to HANDSHAKE_MAX.
 *  (3) A record is made only if `out` has room for it as a whole, so that GnuTLS never has to try a push again.
 *  (4) The end of the stream is not told to GnuTLS, which would then send nothing any more: who receives no more may still be owed replies.
 *      A stream that is cut short is an end like any other; a request of which a part is missing is never carried out.
 *  (5) Each call of GnuTLS on received bytes consumes some or is the last before more are received: nothing turns for ever.
 *  (6) After `failed` is set the session gives nothing any more.
 *
 * GnuTLS allocates for each record and frees it at once. Nobody renegotiates: a client that wants to is refused.
 */
#include "tls/internal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gnutls/x509.h>

#include "rt/rt.h"
#include "util/bytes.h"

#define RECORD 16384u
#define RECORD_ROOM (RECORD + 512u)	/* with header, tag and a message that GnuTLS puts in front */
#define IN_SIZE (64u << 10)
#define OUT_SIZE (8 * RECORD_ROOM)
#define HANDSHAKE_MAX (64u << 10)

struct tls {
	gnutls_session_t s;
	struct tls_creds *creds;
	struct tls_io io;
	uint8_t *in, *out, *stage;
	uint32_t in_pos, in_end, out_pos, out_end;
	gnutls_typed_vdata_st want[2]; /* of the peer's certificate; GnuTLS keeps a pointer to it */
	bool ready, failed, ended;
	bool unsent;		/* the stream takes nothing any more; what has come may still say why */
	int result;		/* of a step on a worker thread, a GnuTLS code */
	char why[200], description[120], peer[160];
};

/* --- The ends of GnuTLS --- */

static ssize_t pull(gnutls_transport_ptr_t ptr, void *buf, size_t len)
{
	struct tls *t = ptr;
	size_t n = min(len, (size_t)(t->in_end - t->in_pos));

	if (!n) {
		gnutls_transport_set_errno(t->s, EAGAIN);
		return -1;
	}
	memcpy(buf, t->in + t->in_pos, n);
	t->in_pos += n;
	return n;
}

static ssize_t push(gnutls_transport_ptr_t ptr, const void *buf, size_t len)
{
	struct tls *t = ptr;
	size_t n = min(len, (size_t)(OUT_SIZE - t->out_end));

	if (!n) {
		gnutls_transport_set_errno(t->s, EAGAIN);
		return -1;
	}
	memcpy(t->out + t->out_end, buf, n);
	t->out_end += n;
	return n;
}

/* --- Set up --- */

static bool is_address(const char *host)
{
	struct in6_addr a;

	return inet_pton(AF_INET, host, &a) == 1 || inet_pton(AF_INET6, host, &a) == 1;
}

static int set_up(struct tls *t)
{
	struct tls_creds *c = t->creds;
	int r = gnutls_init(&t->s, (c->server ? GNUTLS_SERVER : GNUTLS_CLIENT) | GNUTLS_NONBLOCK | GNUTLS_NO_SIGNAL | GNUTLS_NO_TICKETS);

	if (r < 0)
		return r;
	gnutls_session_set_ptr(t->s, c);
	gnutls_transport_set_ptr(t->s, t);
	gnutls_transport_set_pull_function(t->s, pull);
	gnutls_transport_set_push_function(t->s, push);
	gnutls_handshake_set_max_packet_length(t->s, HANDSHAKE_MAX);
	r = gnutls_priority_set(t->s, c->priority);
	if (r >= 0 && (c->has_cert || !c->server))
		r = gnutls_credentials_set(t->s, GNUTLS_CRD_CERTIFICATE, c->cert);
	if (r >= 0 && c->psk)
		r = gnutls_credentials_set(t->s, GNUTLS_CRD_PSK, c->server ? (void *)c->psk_server : (void *)c->psk_client);
	if (r >= 0 && c->hostname && !is_address(c->hostname))
		r = gnutls_server_name_set(t->s, GNUTLS_NAME_DNS, c->hostname, strlen(c->hostname));
	if (r < 0)
		return r;
	if (c->server)
		gnutls_certificate_server_set_request(t->s, c->verify_peer && c->has_cert ? GNUTLS_CERT_REQUIRE : GNUTLS_CERT_IGNORE);
	t->want[0] = (gnutls_typed_vdata_st){ GNUTLS_DT_KEY_PURPOSE_OID, (void *)(c->server ? GNUTLS_KP_TLS_WWW_CLIENT : GNUTLS_KP_TLS_WWW_SERVER), 0 };
	t->want[1] = (gnutls_typed_vdata_st){ GNUTLS_DT_DNS_HOSTNAME, (void *)c->hostname, 0 };
	if (c->verify_peer)
		gnutls_session_set_verify_cert2(t->s, t->want, c->hostname ? 2 : 1, 0);
	return 0;
}

int tls_create(struct tls_creds *creds, const struct tls_io *io, struct tls **ret)
{
	struct tls *t = calloc(1, sizeof(*t));

	if (!t)
		return -ENOMEM;
	t->creds = creds;
	rt_ref_get(&creds->refs);
	t->io = *io;
	t->in = malloc(IN_SIZE);
	t->out = malloc(OUT_SIZE);
	t->stage = malloc(RECORD);
	if (!t->in || !t->out || !t->stage || set_up(t) < 0) {
		tls_free(t);
		return -ENOMEM;
	}
	*ret = t;
	return 0;
}

void tls_free(struct tls *t)
{
	if (!t)
		return;
	if (t->s)
		gnutls_deinit(t->s);
	tls_creds_free(t->creds);
	free(t->in);
	free(t->out);
	if (t->stage)
		explicit_bzero(t->stage, RECORD);
	free(t->stage);
	free(t);
}

/* --- Errors --- */

static void make_printable(char *s)
{
	size_t len = strlen(s);

	while (len && s[len - 1] == ' ')
		s[--len] = '\0';
	for (; *s; s++)
		if (*s < ' ' || *s > '~')
			*s = '?';
}

/* Which alert, which certificate: what gnutls_strerror() does not say. */
static void explain(struct tls *t, int code)
{
	gnutls_datum_t text = { NULL, 0 };
	const char *alert = code == GNUTLS_E_FATAL_ALERT_RECEIVED ? gnutls_alert_get_name(gnutls_alert_get(t->s)) : NULL;

	if (alert) {
		snprintf(t->why, sizeof(t->why), "TLS: the other side refuses: %s", alert);
	} else if (code == GNUTLS_E_CERTIFICATE_VERIFICATION_ERROR &&
		   !gnutls_certificate_verification_status_print(gnutls_session_get_verify_cert_status(t->s), GNUTLS_CRT_X509, &text, 0)) {
		snprintf(t->why, sizeof(t->why), "TLS: %s", (const char *)text.data);
		gnutls_free(text.data);
	} else if (code == GNUTLS_E_REHANDSHAKE) {
		snprintf(t->why, sizeof(t->why), "TLS: the other side wants to renegotiate, which is not done here");
	} else if (code == GNUTLS_E_UNEXPECTED_PACKET_LENGTH || code == GNUTLS_E_UNSUPPORTED_VERSION_PACKET) {
		snprintf(t->why, sizeof(t->why), "TLS: %s (is that TLS at all?)", gnutls_strerror(code));
	} else {
		snprintf(t->why, sizeof(t->why), "TLS: %s", gnutls_strerror(code));
	}
	make_printable(t->why);
}

static int fail(struct tls *t, int code)
{
	t->failed = true;
	explain(t, code);
	switch (code) {
	case GNUTLS_E_CERTIFICATE_VERIFICATION_ERROR:
	case GNUTLS_E_CERTIFICATE_ERROR:
	case GNUTLS_E_NO_CERTIFICATE_FOUND:
	case GNUTLS_E_CERTIFICATE_REQUIRED:
		return -EACCES;
	case GNUTLS_E_FATAL_ALERT_RECEIVED:
		return -EPERM;
	case GNUTLS_E_MEMORY_ERROR:
		return -ENOMEM;
	default:
		return -EPROTO;
	}
}

/* --- Moving bytes --- */

/* Sends all of `out`, with what is added meanwhile. */
static co_fn int co_flush(struct tls *t)
{
	while (t->out_pos < t->out_end) {
		struct iovec iov = { t->out + t->out_pos, t->out_end - t->out_pos };
		ssize_t n = t->io.co_send(t->io.arg, &iov, 1);

		if (n < 0) {
			t->unsent = true;
			return n;
		}
		t->out_pos += n;
	}
	t->out_pos = t->out_end = 0;
	return 0;
}

/* More into `in`, which is empty. 1, 0 at the end of the stream, -errno. */
static co_fn int co_more(struct tls *t)
{
	struct iovec iov = { t->in, IN_SIZE };
	ssize_t n = t->io.co_recv(t->io.arg, &iov, 1);

	if (n <= 0) {
		t->ended = true;
		return n;
	}
	t->in_pos = 0;
	t->in_end = n;
	return 1;
}

/* --- Handshake --- */

/* On a worker thread: as far as it goes with what is in `in`. */
static int handshake_step(void *arg)
{
	struct tls *t = arg;
	uint32_t before;

	do {
		before = t->in_pos;
		t->result = gnutls_handshake(t->s);
	} while (t->result < 0 && t->result != GNUTLS_E_AGAIN && !gnutls_error_is_fatal(t->result) && t->in_pos != before);	/* (5) */
	if (t->result < 0 && t->result != GNUTLS_E_AGAIN)
		gnutls_alert_send_appropriate(t->s, t->result);
	return 0;
}

static void describe_certificate(struct tls *t)
{
	const gnutls_datum_t *certs = gnutls_certificate_get_peers(t->s, NULL);
	size_t len = sizeof(t->peer) - 1;
	gnutls_x509_crt_t crt;

	if (!certs || gnutls_x509_crt_init(&crt) < 0)
		return;
	if (gnutls_x509_crt_import(crt, certs, GNUTLS_X509_FMT_DER) < 0 || gnutls_x509_crt_get_dn(crt, t->peer, &len) < 0)
		snprintf(t->peer, sizeof(t->peer), "a certificate whose name is too long");
	gnutls_x509_crt_deinit(crt);
}

static void describe(struct tls *t)
{
	char *text = gnutls_session_get_desc(t->s);
	const char *user = t->creds->server && gnutls_auth_get_type(t->s) == GNUTLS_CRD_PSK ? gnutls_psk_server_get_username(t->s) : NULL;

	snprintf(t->description, sizeof(t->description), "%s", text ? text : "?");
	gnutls_free(text);
	if (user)
		snprintf(t->peer, sizeof(t->peer), "%s", user);
	else if (gnutls_auth_get_type(t->s) == GNUTLS_CRD_CERTIFICATE)
		describe_certificate(t);
	make_printable(t->peer);
	make_printable(t->description);
}

/* The handshake has checked this already, by the callback that gnutls_session_set_verify_cert2() sets; twice is safe. */
static bool is_verified(struct tls *t)
{
	if (!t->creds->verify_peer || gnutls_auth_get_type(t->s) == GNUTLS_CRD_PSK)
		return true;
	return gnutls_certificate_get_peers(t->s, NULL) && !gnutls_session_get_verify_cert_status(t->s);
}

co_fn int co_tls_handshake(struct tls *t)
{
	int r;

	for (;;) {
		co_sem_take(&t->creds->slots, "a worker for a TLS handshake");
		co_offload(handshake_step, t);
		co_sem_give(&t->creds->slots);
		r = co_flush(t);
		if (t->result < 0 && t->result != GNUTLS_E_AGAIN)
			return fail(t, t->result);
		if (!r && t->result == GNUTLS_E_SUCCESS)
			break;
		/* With `out` full it is to be called again; with bytes left it consumes them. */
		if (!r && !gnutls_record_get_direction(t->s) && t->in_pos == t->in_end) {
			r = co_more(t);
			r = r > 0 ? 0 : r ? r : -ECONNRESET;
		}
		if (r < 0) {
			t->failed = true;
			return r;
		}
	}
	if (!is_verified(t))
		return fail(t, GNUTLS_E_CERTIFICATE_VERIFICATION_ERROR);
	describe(t);
	t->ready = true;
	return 0;
}

/* --- Data --- */

/* One piece: bytes, 0: `in` is empty, -errno; `ended` when the other side has said good-bye. */
static ssize_t open_record(struct tls *t, void *buf, size_t len)
{
	for (;;) {
		uint32_t before = t->in_pos;
		ssize_t n = gnutls_record_recv(t->s, buf, len);

		if (n > 0)
			return n;
		if (!n) {
			t->ended = true;
			return 0;
		}
		if (n == GNUTLS_E_REHANDSHAKE || gnutls_error_is_fatal(n))
			return fail(t, n);
		if (t->in_pos == t->in_end)
			return 0;
		if (t->in_pos == before)
			return fail(t, GNUTLS_E_UNEXPECTED_PACKET);	/* (5) */
	}
}

/* What is in `in` and in GnuTLS; 0: nothing. */
static ssize_t take(struct tls *t, struct iovec *iov, int n)
{
	size_t total = 0, off = 0;

	for (int i = 0; i < n && !t->ended;) {
		ssize_t got;

		if (off == iov[i].iov_len) {
			off = 0;
			i++;
			continue;
		}
		got = open_record(t, (char *)iov[i].iov_base + off, iov[i].iov_len - off);
		if (got < 0)
			return got;
		if (!got)
			break;
		off += got;
		total += got;
	}
	return total;
}

co_fn ssize_t co_tls_recv(struct tls *t, struct iovec *iov, int n)
{
	for (;;) {
		ssize_t got;
		int r;

		if (t->failed)
			return -ECONNRESET;
		got = t->ended ? 0 : take(t, iov, n);
		if (got || t->ended)
			return got;
		r = co_more(t);
		if (r <= 0)
			return r;
	}
}

struct cursor {
	const struct iovec *iov;
	int n;
	size_t off;
};

/* The next record's bytes: where they are if they lie together, else copied into the stage. */
static const void *gather(struct tls *t, struct cursor *c, size_t max, size_t *ret_len)
{
	size_t n = 0;

	while (c->n && c->off == c->iov->iov_len) {
		c->iov++;
		c->n--;
		c->off = 0;
	}
	if (c->n && (c->iov->iov_len - c->off >= max || c->n == 1)) {
		const char *p = (const char *)c->iov->iov_base + c->off;

		*ret_len = min(max, c->iov->iov_len - c->off);
		c->off += *ret_len;
		return p;
	}
	while (c->n && n < max) {
		size_t k = min(max - n, c->iov->iov_len - c->off);

		memcpy(t->stage + n, (const char *)c->iov->iov_base + c->off, k);
		n += k;
		c->off += k;
		if (c->off == c->iov->iov_len) {
			c->iov++;
			c->n--;
			c->off = 0;
		}
	}
	*ret_len = n;
	return t->stage;
}

/* Encrypts into `out` what fits. Bytes, or -errno. */
static ssize_t seal(struct tls *t, struct cursor *c)
{
	size_t max = min((size_t)RECORD, gnutls_record_get_max_size(t->s)), total = 0;

	while (OUT_SIZE - t->out_end >= RECORD_ROOM) {	/* (3) */
		size_t len;
		const void *p = gather(t, c, max, &len);
		ssize_t n;

		if (!len)
			break;
		n = gnutls_record_send(t->s, p, len);
		if (n != (ssize_t)len)
			return fail(t, n < 0 ? (int)n : GNUTLS_E_INTERNAL_ERROR);
		total += len;
	}
	return total;
}

co_fn ssize_t co_tls_send(struct tls *t, const struct iovec *iov, int n)
{
	struct cursor c = { iov, n, 0 };
	ssize_t sealed;
	int r;

	if (t->failed || t->unsent)
		return -EPIPE;
	sealed = seal(t, &c);
	if (sealed < 0)
		return sealed;
	r = co_flush(t);
	if (r < 0)
		return r;
	/* Encrypting is work: a long reply lets others run between two of its parts. */
	if (t->out_end == 0 && sealed >= (ssize_t)(OUT_SIZE / 2))
		co_yield();
	return sealed;
}

co_fn void co_tls_bye(struct tls *t)
{
	if (t->unsent)
		return;
	if (t->ready && !t->failed)
		gnutls_bye(t->s, GNUTLS_SHUT_WR);
	co_flush(t);	/* also the alert that says why it failed */
}

const void *tls_last_words(struct tls *t, const void *data, size_t len, size_t *ret_len)
{
	struct iovec iov = { (void *)(uintptr_t)data, len };
	struct cursor c = { &iov, 1, 0 };

	*ret_len = 0;
	if (!t->ready || t->failed || t->unsent || OUT_SIZE - t->out_end < 2 * RECORD_ROOM || (len && seal(t, &c) < 0))
		return NULL;
	gnutls_bye(t->s, GNUTLS_SHUT_WR);
	t->failed = true;
	*ret_len = t->out_end - t->out_pos;
	return t->out + t->out_pos;
}

const char *tls_why(const struct tls *t)
{
	return t->why;
}

const char *tls_description(const struct tls *t)
{
	return t->description;
}

const char *tls_peer(const struct tls *t)
{
	return t->peer;
}
