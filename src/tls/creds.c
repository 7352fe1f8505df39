/* SPDX-License-Identifier: MIT */
/* TLS: credentials, as files that QEMU, libvirt and nbdkit know too. */
#include "tls/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <gnutls/x509.h>

#include "util/err.h"
#include "util/log.h"

#define FILE_MAX (16u << 20)
#define HANDSHAKE_SLOTS 2	/* of the worker threads, so that clients that shake hands leave some */

/* TLS 1.2 is the oldest that the protocol demands; a key that is shared for years needs forward secrecy. */
#define PRIORITY "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"
#define PRIORITY_PSK PRIORITY ":+ECDHE-PSK:+DHE-PSK"

bool tls_is_built_in(void)
{
	return true;
}

/* --- Files --- */

static int read_whole(int fd, size_t size, gnutls_datum_t *ret)
{
	size_t n = 0;
	char *buf = malloc(size + 1);

	if (!buf)
		return -ENOMEM;
	while (n < size) {
		ssize_t got = read(fd, buf + n, size - n);

		if (got <= 0) {
			int error = got ? -errno : 0;

			if (!got)
				break;
			explicit_bzero(buf, n);
			free(buf);
			return error;
		}
		n += got;
	}
	buf[n] = '\0';
	ret->data = (unsigned char *)buf;
	ret->size = n;
	return 0;
}

int tls_file_read(const char *path, bool secret, gnutls_datum_t *ret, struct err *err)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), r;
	struct stat st;

	if (fd < 0)
		return errno == ENOENT ? -ENOENT : err_errno(err, -errno, "%s", path);
	r = fstat(fd, &st) ? -errno : !S_ISREG(st.st_mode) ? -EINVAL : st.st_size > FILE_MAX ? -EFBIG : 0;
	if (!r)
		r = read_whole(fd, st.st_size, ret);
	close(fd);
	if (r < 0)
		return err_errno(err, r, "%s: cannot read it", path);
	if (secret && st.st_mode & 0077)
		log_warn("%s: others than its owner can read this secret; chmod 0600 it", path);
	return 0;
}

void tls_file_free(gnutls_datum_t *d)
{
	if (d->data)
		explicit_bzero(d->data, d->size);
	free(d->data);
	*d = (gnutls_datum_t){ NULL, 0 };
}

/* 1: read; 0: there is none. */
static int read_part(const char *dir, const char *name, bool secret, char *path, gnutls_datum_t *ret, struct err *err)
{
	int r;

	*ret = (gnutls_datum_t){ NULL, 0 };
	if (snprintf(path, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX)
		return err_set(err, -ENAMETOOLONG, "%.200s...: the path is too long", dir);
	r = tls_file_read(path, secret, ret, err);
	return r == -ENOENT ? 0 : r < 0 ? r : 1;
}

/* --- Certificates --- */

static int bad_file(struct err *err, const char *path, int r)
{
	return err_set(err, -EINVAL, "%s: %s", path, r ? gnutls_strerror(r) : "there is nothing of this kind in it");
}

static int load_ca(struct tls_creds *c, const char *dir, struct err *err)
{
	char path[PATH_MAX];
	gnutls_datum_t file;
	int r = read_part(dir, "ca-cert.pem", false, path, &file, err);

	c->has_ca = r > 0;
	if (r <= 0)
		return r;
	r = gnutls_certificate_set_x509_trust_mem(c->cert, &file, GNUTLS_X509_FMT_PEM);
	tls_file_free(&file);
	if (r <= 0)
		return bad_file(err, path, r);
	r = read_part(dir, "ca-crl.pem", false, path, &file, err);
	c->has_crl = r > 0;
	if (r <= 0)
		return r;
	r = gnutls_certificate_set_x509_crl_mem(c->cert, &file, GNUTLS_X509_FMT_PEM);
	tls_file_free(&file);
	return r <= 0 ? bad_file(err, path, r) : 0;
}

/* Not an error: others that this process serves shall come up again, and clients tell what they think of it. */
static void warn_of_dates(const char *path, const gnutls_datum_t *pem)
{
	gnutls_x509_crt_t crt;
	time_t now = time(NULL);

	if (gnutls_x509_crt_init(&crt) < 0)
		return;
	if (!gnutls_x509_crt_import(crt, pem, GNUTLS_X509_FMT_PEM)) {
		if (gnutls_x509_crt_get_expiration_time(crt) < now)
			log_warn("%s: this certificate has expired; the other side will refuse it", path);
		else if (gnutls_x509_crt_get_activation_time(crt) > now)
			log_warn("%s: this certificate is not valid yet; the other side will refuse it", path);
	}
	gnutls_x509_crt_deinit(crt);
}

static int load_pair(struct tls_creds *c, const char *dir, const char *cert_name, const char *key_name, struct err *err)
{
	char cert_path[PATH_MAX], key_path[PATH_MAX];
	gnutls_datum_t cert, key = { NULL, 0 };
	int r = read_part(dir, cert_name, false, cert_path, &cert, err), k;

	if (r < 0)
		return r;
	k = read_part(dir, key_name, true, key_path, &key, err);
	if (k < 0) {
		tls_file_free(&cert);
		return k;
	}
	if (r != k) {
		r = err_set(err, -ENOENT, "%s: there is no such file, and %s goes with it", r ? key_path : cert_path, r ? cert_name : key_name);
	} else if (r) {
		r = gnutls_certificate_set_x509_key_mem2(c->cert, &cert, &key, GNUTLS_X509_FMT_PEM, NULL, 0);
		if (r == GNUTLS_E_CERTIFICATE_KEY_MISMATCH)
			err_set(err, -EINVAL, "%s: does not belong to the certificate %s", key_path, cert_path);
		if (r < 0)
			r = err_set(err, -EINVAL, "%s, %s: cannot be used as certificate and key: %s", cert_path, key_path, gnutls_strerror(r));
		else
			warn_of_dates(cert_path, &cert);
		c->has_cert = r >= 0;
		r = r < 0 ? r : 0;
	}
	tls_file_free(&cert);
	tls_file_free(&key);
	return r;
}

/* --- Together --- */

static struct tls_creds *creds_new(bool server, struct err *err)
{
	struct tls_creds *c = calloc(1, sizeof(*c));

	if (!c || gnutls_certificate_allocate_credentials(&c->cert) < 0) {
		free(c);
		err_set(err, -ENOMEM, "TLS: out of memory");
		return NULL;
	}
	c->refs = (struct rt_ref)RT_REF_INIT;
	c->server = server;
	co_sem_init(&c->slots, HANDSHAKE_SLOTS);
	return c;
}

static int finish(struct tls_creds *c, struct err *err)
{
	const char *at;
	int r = gnutls_priority_init(&c->priority, c->psk ? PRIORITY_PSK : PRIORITY, &at);

	return r < 0 ? err_set(err, -EINVAL, "TLS: this GnuTLS cannot do what weir wants (%s): %s", at, gnutls_strerror(r)) : 0;
}

static int load_server(struct tls_creds *c, const char *dir, struct err *err)
{
	char path[PATH_MAX];
	int r = load_ca(c, dir, err);

	if (!r)
		r = load_pair(c, dir, "server-cert.pem", "server-key.pem", err);
	if (r < 0)
		return r;
	if (snprintf(path, sizeof(path), "%s/keys.psk", dir) < (int)sizeof(path)) {
		r = tls_psk_load(path, &c->psk, err);
		if (r < 0 && r != -ENOENT)
			return r;
	}
	if (!c->has_cert && !c->psk)
		return err_set(err, -ENOENT, "%s: has neither server-cert.pem with server-key.pem nor keys.psk; weir-serve(1) tells how to make them", dir);
	if (c->has_cert && c->verify_peer && !c->has_ca)
		return err_set(err, -ENOENT, "%s: has no ca-cert.pem to check clients with; add it, or let everybody in with --tls-verify-peer off", dir);
	if (c->psk) {
		if (gnutls_psk_allocate_server_credentials(&c->psk_server) < 0)
			return err_set(err, -ENOMEM, "TLS: out of memory");
		gnutls_psk_set_server_credentials_function2(c->psk_server, tls_psk_find);
	}
	return finish(c, err);
}

int tls_creds_load_server(const char *dir, bool verify_peer, struct tls_creds **ret, struct err *err)
{
	struct tls_creds *c = creds_new(true, err);
	int r;

	if (!c)
		return -ENOMEM;
	c->verify_peer = verify_peer;
	r = load_server(c, dir, err);
	if (r < 0)
		tls_creds_free(c);
	else
		*ret = c;
	return r;
}

static int choose_key(struct tls_creds *c, const struct tls_client_config *config, struct err *err)
{
	const char *user = config->user ? config->user : getenv("LOGNAME");
	const struct tls_psk *k = c->psk;
	gnutls_datum_t name, key;

	if (!user)
		return err_set(err, -EINVAL, "%s: which key of %s? say it with tls-username=NAME", config->name, config->psk_file);
	while (k && strcmp(k->user, user))
		k = k->next;
	if (!k)
		return err_set(err, -ENOENT, "%s: %s has no key for '%s'; say which one with tls-username=NAME", config->name, config->psk_file, user);
	name = (gnutls_datum_t){ (void *)k->user, strlen(k->user) };
	key = (gnutls_datum_t){ (void *)k->key, k->key_len };
	if (gnutls_psk_allocate_client_credentials(&c->psk_client) < 0 ||
	    gnutls_psk_set_client_credentials2(c->psk_client, &name, &key, GNUTLS_PSK_KEY_RAW) < 0)
		return err_set(err, -ENOMEM, "TLS: out of memory");
	return 0;
}

/* A name that is spelt wrong shall not look like a directory with nothing in it. */
static int check_dir(const struct tls_client_config *config, struct err *err)
{
	struct stat st;
	int r = stat(config->dir, &st) ? -errno : S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;

	return r ? err_errno(err, r, "%s: tls-certificates=%s", config->name, config->dir) : 0;
}

static int load_client(struct tls_creds *c, const struct tls_client_config *config, struct err *err)
{
	int r = 0;

	c->verify_peer = !config->no_verify;
	if (config->hostname && !(c->hostname = strdup(config->hostname)))
		return err_set(err, -ENOMEM, "TLS: out of memory");
	if (config->psk_file) {
		r = tls_psk_load(config->psk_file, &c->psk, err);
		if (r == -ENOENT)
			err_set(err, r, "%s: %s: there is no such file", config->name, config->psk_file);
		if (!r)
			r = choose_key(c, config, err);
	} else if (config->dir) {
		r = check_dir(config, err);
		if (!r)
			r = load_ca(c, config->dir, err);
		if (!r)
			r = load_pair(c, config->dir, "client-cert.pem", "client-key.pem", err);
	}
	if (!r && !c->has_ca && !config->psk_file)
		r = gnutls_certificate_set_x509_system_trust(c->cert) < 0 && c->verify_peer ?
		    err_set(err, -ENOENT, "%s: there is no CA to check the server with; put ca-cert.pem into a directory and give it as tls-certificates=DIR", config->name) : 0;
	return r < 0 ? r : finish(c, err);
}

int tls_creds_load_client(const struct tls_client_config *config, struct tls_creds **ret, struct err *err)
{
	struct tls_creds *c = creds_new(false, err);
	int r;

	if (!c)
		return -ENOMEM;
	r = load_client(c, config, err);
	if (r < 0)
		tls_creds_free(c);
	else
		*ret = c;
	return r;
}

int tls_creds_check_fresh(const struct tls_creds *old, const struct tls_creds *fresh, const char *what, struct err *err)
{
	const char *gone = NULL;

	if (old && old->has_cert && !fresh->has_cert)
		gone = fresh->server ? "server-cert.pem" : "client-cert.pem";
	else if (old && old->has_ca && !fresh->has_ca)
		gone = "ca-cert.pem";
	else if (old && old->has_crl && !fresh->has_crl)
		gone = "ca-crl.pem";
	else if (old && old->psk && !fresh->psk)
		gone = "keys.psk";
	return gone ? err_set(err, -ENOENT, "%s/%s: was there when it was read before, and is not any more; put it back, or start anew to do without it", what, gone) : 0;
}

void tls_creds_free(struct tls_creds *c)
{
	if (!c || !rt_ref_put(&c->refs))
		return;
	if (c->priority)
		gnutls_priority_deinit(c->priority);
	if (c->psk_server)
		gnutls_psk_free_server_credentials(c->psk_server);
	if (c->psk_client)
		gnutls_psk_free_client_credentials(c->psk_client);
	gnutls_certificate_free_credentials(c->cert);
	tls_psk_free(c->psk);
	free(c->hostname);
	free(c);
}
