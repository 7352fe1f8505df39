/* SPDX-License-Identifier: MIT */
/* What this serving process may still need after its start, so that all else can be given up. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "backend/nbd_uri.h"
#include "blk/spec.h"
#include "daemon/confine.h"
#include "daemon/internal.h"
#include "daemon/serve.h"
#include "export/fuse/server.h"
#include "export/nbd/server.h"
#include "export/vhost/server.h"
#include "util/err.h"
#include "util/log.h"
#include "util/opts.h"

struct needs {
	struct confine_config c;
	char *owned[3 * CONFINE_PATHS];	/* to be freed */
	unsigned nowned, nread, nwrite, nremove;
};

static void add_folder_of(struct needs *n, const char **list, unsigned *count, const char *path)
{
	char *folder = strdup(path), *slash = folder ? strrchr(folder, '/') : NULL;

	if (!folder || *count == CONFINE_PATHS - 1) {
		free(folder);
		return;	/* less is allowed */
	}
	if (!slash)
		strcpy(folder, *path ? "." : "");
	else
		slash[slash == folder] = '\0';
	n->owned[n->nowned++] = folder;
	list[(*count)++] = folder;
}

/*
 * `log-rebuild` may be asked for a new side: one that lies where a side lies now, if that is a regular file. Beside a device lie other devices; they need
 * --allow-path.
 */
static void need_log(struct needs *n, const char *text)
{
	struct disk_spec *spec, *s;
	struct stat st;

	if (disk_spec_parse(text, &spec, NULL) < 0)
		return;
	for (s = spec; s->inner; s = s->inner)
		;
	if (!stat(s->rest, &st) && S_ISREG(st.st_mode))
		add_folder_of(n, n->c.write, &n->nwrite, s->rest);
	disk_spec_free(spec);
}

static void keep(struct needs *n, const char **list, unsigned *count, const char *path)
{
	char *copy = path && *count < CONFINE_PATHS - 1 ? strdup(path) : NULL;

	if (copy)
		list[(*count)++] = n->owned[n->nowned++] = copy;
}

/* Certificates and keys of an NBD server are read again before its connection is made anew. */
static void need_creds(struct needs *n, const char *text)
{
	struct disk_spec *spec, *s;
	struct nbd_uri u = { 0 };

	if (!text || disk_spec_parse(text, &spec, NULL) < 0)
		return;
	for (s = spec; s->inner; s = s->inner)
		;
	if (!strcmp(s->driver, "nbd") && !nbd_uri_parse(s->rest, &u, NULL)) {
		const char *dir = opts_str(&s->opts, "tls-certificates"), *psk = opts_str(&s->opts, "tls-psk-file");

		keep(n, n->c.read, &n->nread, u.tls.certificates ? u.tls.certificates : dir);
		psk = u.tls.psk_file ? u.tls.psk_file : psk;
		if (psk)
			add_folder_of(n, n->c.read, &n->nread, psk);
	}
	nbd_uri_fini(&u);
	disk_spec_free(spec);
}

/* Is it in any of the DISK strings? Rather once too often than once too seldom. */
static bool mentions(const struct serve_config *c, const char *word)
{
	bool found = c->graph.cache_device && strstr(c->graph.cache_device, word);

	for (unsigned i = 0; i < c->graph.ndisks; i++)
		found |= strstr(c->graph.disks[i], word) != NULL;
	for (unsigned i = 0; i < c->graph.nlogs; i++)
		found |= strstr(c->graph.logs[i], word) != NULL;
	return found;
}

static void collect(struct serve *s, struct needs *n)
{
	const struct serve_config *c = s->config;
	const char *path = getenv("WEIR_PRESSURE_FILE");

	if (path)
		add_folder_of(n, n->c.read, &n->nread, path);
	for (unsigned i = 0; i < c->graph.ndisks; i++)
		need_creds(n, c->graph.disks[i]);
	for (unsigned i = 0; i < c->graph.nlogs; i++)
		need_creds(n, c->graph.logs[i]);
	need_creds(n, c->graph.cache_device);
	keep(n, n->c.read, &n->nread, s->tls ? c->tls_creds : NULL);
	n->c.user = c->user;
	/* librbd has threads of its own, which block SIGSYS and make whatever calls they like. */
	n->c.sandbox = !c->no_sandbox && !mentions(c, "rbd:");
	/* To reconnect is to look a host up and to connect. */
	n->c.connects = mentions(c, "nbd");
	for (unsigned i = 0; i < c->nallow_paths && n->nwrite < CONFINE_PATHS / 2; i++)
		n->c.write[n->nwrite++] = c->allow_paths[i];
	for (unsigned i = 0; c->control && i < c->graph.nlogs; i++)
		need_log(n, c->graph.logs[i]);
	/* Sockets are removed at the end. */
	if (c->control)
		add_folder_of(n, n->c.remove, &n->nremove, c->control);
	for (unsigned i = 0; s->nbd && (path = nbd_server_address(s->nbd, i)); i++)
		if (!strncmp(path, "unix:", 5))
			add_folder_of(n, n->c.remove, &n->nremove, path + 5);
	for (unsigned i = 0; s->vhost && (path = vhost_server_path(s->vhost, i)); i++)
		add_folder_of(n, n->c.remove, &n->nremove, path);
}

int serve_confine(struct serve *s, struct err *err)
{
	struct needs n = { 0 };
	int ret;

	collect(s, &n);
	/* Files are unmounted by root, or by a program that has to be started, and neither is possible from inside. */
	ret = s->fuse && (n.c.sandbox || n.c.user) ? fuse_server_guard(s->fuse, err) : 0;
	if (!ret)
		ret = confine(s->rt, &n.c, &s->confined, err);
	while (n.nowned)
		free(n.owned[--n.nowned]);
	return ret;
}
