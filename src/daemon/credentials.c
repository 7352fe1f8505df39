/* SPDX-License-Identifier: MIT */
/*
 * The NBD server's certificates and keys: read at the start, and again on demand (SIGHUP, the control socket's `tls-reload`).
 *
 * New ones take the place of the old between two clients: whoever has shaken hands keeps what he began with, and whoever comes gets all of the new. Files that are
 * not good change nothing.
 */
#include "daemon/credentials.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

#include "daemon/internal.h"
#include "daemon/serve.h"
#include "export/nbd/server.h"
#include "rt/mark.h"
#include "rt/rt.h"
#include "tls/tls.h"
#include "util/err.h"
#include "util/log.h"

struct loading {
	const struct serve_config *config;
	struct tls_creds *creds;
	struct err err;
};

static int load(void *arg)
{
	struct loading *l = arg;

	return tls_creds_load_server(l->config->tls_creds, !l->config->tls_any_client, &l->creds, &l->err);
}

co_fn int co_load_credentials(struct serve *s, struct err *err)
{
	struct loading l = { .config = s->config, .err = ERR_INIT };
	int ret = co_offload(load, &l);

	if (ret < 0)
		return err_set(err, ret, "%s", l.err.msg);
	ret = tls_creds_check_fresh(s->tls, l.creds, s->config->tls_creds, err);
	if (ret < 0) {
		tls_creds_free(l.creds);
		return ret;
	}
	if (s->nbd)
		nbd_server_set_creds(s->nbd, l.creds);
	tls_creds_free(s->tls);
	s->tls = l.creds;
	return 0;
}

co_fn int co_reload_credentials(struct serve *s, struct err *err)
{
	int ret;

	if (!s->tls || s->stop)
		return err_set(err, -ENOTSUP, "there are no certificates or keys to be read again: this process was started without --tls-creds");
	ret = co_load_credentials(s, err);
	if (ret < 0)
		return ret;
	log_info("TLS: %s was read again; clients that come from now on get it", s->config->tls_creds);
	return 0;
}

/* --- SIGHUP: the handler only posts to the reactor --- */

static struct serve *reloading;
static struct rt_msg message;
static struct rt_mark posted;

static co_fn void co_reload(void *arg)
{
	struct err err = ERR_INIT;

	if (co_reload_credentials(arg, &err) < 0)
		log_error("TLS: %s; what was read before stays in use", err.msg);
}

static void hangup_arrived(struct rt_msg *m)
{
	rt_mark_clear(&posted);
	if (co_spawn("reload", co_reload, reloading) < 0)
		log_error("TLS: SIGHUP: too much is going on to read the certificates again; what was read before stays in use");
}

static void handle_hangup(int sig)
{
	if (rt_mark_set(&posted))
		return;
	rt_post(reloading->rt, &message);
}

void watch_hangup(struct serve *s)
{
	struct sigaction hup = { .sa_handler = handle_hangup, .sa_flags = SA_RESTART };

	reloading = s;
	message.fn = hangup_arrived;
	sigaction(SIGHUP, &hup, NULL);
}

void ignore_hangup(void)
{
	struct sigaction ign = { .sa_handler = SIG_IGN };

	sigaction(SIGHUP, &ign, NULL);
}
