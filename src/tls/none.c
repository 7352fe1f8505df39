/* SPDX-License-Identifier: MIT */
/* TLS: a build without GnuTLS. No credentials can be loaded, so no session ever exists. */
#include "tls/tls.h"

#include <errno.h>
#include <stddef.h>

#include "util/err.h"

bool tls_is_built_in(void)
{
	return false;
}

static int none(struct err *err)
{
	return err_set(err, -ENOTSUP, "TLS: this weir was built without GnuTLS; install libgnutls28-dev and build it again");
}

int tls_creds_load_server(const char *dir, bool verify_peer, struct tls_creds **ret, struct err *err)
{
	return none(err);
}

int tls_creds_load_client(const struct tls_client_config *config, struct tls_creds **ret, struct err *err)
{
	return none(err);
}

int tls_creds_check_fresh(const struct tls_creds *old, const struct tls_creds *fresh, const char *what, struct err *err)
{
	return 0;
}

void tls_creds_free(struct tls_creds *c)
{
}

int tls_create(struct tls_creds *creds, const struct tls_io *io, struct tls **ret)
{
	return -ENOTSUP;
}

void tls_free(struct tls *t)
{
}

co_fn int co_tls_handshake(struct tls *t)
{
	return -ENOTSUP;
}

co_fn ssize_t co_tls_recv(struct tls *t, struct iovec *iov, int n)
{
	return -ENOTSUP;
}

co_fn ssize_t co_tls_send(struct tls *t, const struct iovec *iov, int n)
{
	return -ENOTSUP;
}

co_fn void co_tls_bye(struct tls *t)
{
}

const void *tls_last_words(struct tls *t, const void *data, size_t len, size_t *ret_len)
{
	*ret_len = 0;
	return NULL;
}

const char *tls_why(const struct tls *t)
{
	return "";
}

const char *tls_description(const struct tls *t)
{
	return "";
}

const char *tls_peer(const struct tls *t)
{
	return "";
}
