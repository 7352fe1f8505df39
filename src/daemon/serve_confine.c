/* SPDX-License-Identifier: MIT */
/* What this serving process may still need after its start, so that all else can be given up. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "backend/nbd_uri.h"
#include "blk/spec.h"
#include "daemon/confine.h"
#include "daemon/internal.h"
#include "daemon/peers.h"
#include "daemon/serve.h"
#include "export/fuse/server.h"
#include "daemon/split.h"
#include "export/nbd/server.h"
#include "export/vhost/server.h"
#include "util/bytes.h"
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
	unsigned i = 0;

	if (!folder || *count == CONFINE_PATHS - 1) {
		free(folder);
		return;	/* less is allowed */
	}
	if (!slash)
		strcpy(folder, *path ? "." : "");
	else
		slash[slash == folder] = '\0';
	while (i < *count && strcmp(list[i], folder))
		i++;
	if (i < *count) {
		free(folder);
		return;
	}
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

/* A file that is read again and may be a symbolic link, as renewal scripts make them: the folder that it leads to now. */
static void keep_target(struct needs *n, const char *path)
{
	char *real = realpath(path, NULL);

	if (real)
		add_folder_of(n, n->c.read, &n->nread, real);
	free(real);
}

/* A directory of certificates and keys, and where they lie if they are links. */
static void keep_creds(struct needs *n, const char *dir)
{
	static const char *const names[] = { "ca-cert.pem", "ca-crl.pem", "server-cert.pem", "server-key.pem", "client-cert.pem", "client-key.pem", "keys.psk" };
	char path[PATH_MAX];
	struct stat st;

	keep(n, n->c.read, &n->nread, dir);
	for (size_t i = 0; dir && i < ARRAY_SIZE(names); i++)
		if (snprintf(path, sizeof(path), "%s/%s", dir, names[i]) < (int)sizeof(path) && !lstat(path, &st) && S_ISLNK(st.st_mode))
			keep_target(n, path);
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

		keep_creds(n, u.tls.certificates ? u.tls.certificates : dir);
		psk = u.tls.psk_file ? u.tls.psk_file : psk;
		if (psk) {
			add_folder_of(n, n->c.read, &n->nread, psk);
			keep_target(n, psk);
		}
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

/* The sockets of one reactor, which are removed at the end. */
static void collect_sockets(const struct serve *s, struct needs *n)
{
	const char *path;

	for (unsigned i = 0; s->nbd && (path = nbd_server_address(s->nbd, i)); i++)
		if (!strncmp(path, "unix:", 5))
			add_folder_of(n, n->c.remove, &n->nremove, path + 5);
	for (unsigned i = 0; s->vhost && (path = vhost_server_path(s->vhost, i)); i++)
		add_folder_of(n, n->c.remove, &n->nremove, path);
}

static void collect(struct serve *s, struct needs *n)
{
	const struct serve_config *c = s->split->whole;
	const char *path = getenv("WEIR_PRESSURE_FILE");

	if (path)
		add_folder_of(n, n->c.read, &n->nread, path);
	for (unsigned i = 0; i < c->graph.ndisks; i++)
		need_creds(n, c->graph.disks[i]);
	for (unsigned i = 0; i < c->graph.nlogs; i++)
		need_creds(n, c->graph.logs[i]);
	need_creds(n, c->graph.cache_device);
	keep_creds(n, s->tls ? c->tls_creds : NULL);
	n->c.user = c->user;
	/* librbd has threads of its own, which block SIGSYS and open files when they like. */
	n->c.deny_list = !c->no_sandbox && mentions(c, "rbd:");
	n->c.sandbox = !c->no_sandbox && !n->c.deny_list;
	/* To reconnect is to look a host up and to connect. */
	n->c.connects = mentions(c, "nbd");
	for (unsigned i = 0; i < c->nallow_paths && n->nwrite < CONFINE_PATHS / 2; i++)
		n->c.write[n->nwrite++] = c->allow_paths[i];
	for (unsigned i = 0; c->control && i < c->graph.nlogs; i++)
		need_log(n, c->graph.logs[i]);
	if (c->control)
		add_folder_of(n, n->c.remove, &n->nremove, c->control);
	if (c->pid_file)
		add_folder_of(n, n->c.remove, &n->nremove, c->pid_file);
	collect_sockets(s, n);
	for (unsigned i = 0; i < s->npeers; i++)
		collect_sockets(&s->peers[i], n);
}

/* On one of the reactors. */
struct step {
	struct serve *s;
	const struct confine_config *c;
	struct err *err;
	int (*fn)(struct step *t);
};

/* Files are unmounted by root, or by a program that has to be started, and neither is possible from inside. */
static int guard_files(struct step *t)
{
	return t->s->fuse && (t->c->sandbox || t->c->deny_list || t->c->user) ? fuse_server_guard(t->s->fuse, t->err) : 0;
}

static int drop_capabilities(struct step *t)
{
	return confine_capabilities(t->c, t->err);
}

static int restrict_files(struct step *t)
{
	return confine_files(t->s->rt, t->c, NULL, t->err);
}

static int take_step(void *arg)
{
	struct step *t = arg;

	return t->fn(t);
}

static co_fn int co_peers_step(struct serve *s, const struct confine_config *c, int (*fn)(struct step *t), struct err *err)
{
	int ret = 0;

	for (unsigned i = 0; i < s->npeers && !ret; i++) {
		struct step t = { &s->peers[i], c, err, fn };

		ret = co_serve_call(t.s, take_step, &t);
		if (ret < 0 && !err->code)
			err_errno(err, ret, "sandbox: a reactor does not answer");
	}
	return ret;
}

co_fn int co_serve_confine(struct serve *s, struct err *err)
{
	struct needs n = { 0 };
	struct step own;
	int ret;

	collect(s, &n);
	own = (struct step){ s, &n.c, err, guard_files };
	ret = guard_files(&own);
	if (!ret)
		ret = co_peers_step(s, &n.c, guard_files, err);
	/* What is a thread's own is given up on each; the user and the filter of system calls are the process's, and the filter comes last. */
	if (!ret)
		ret = co_peers_step(s, &n.c, drop_capabilities, err);
	if (!ret)
		ret = confine_user(&n.c, err);
	s->confined = (struct confined){ 0 };
	if (!ret)
		ret = confine_files(s->rt, &n.c, &s->confined, err);
	if (!ret)
		ret = co_peers_step(s, &n.c, restrict_files, err);
	if (!ret)
		ret = confine_calls(&n.c, &s->confined, err);
	for (unsigned i = 0; i < s->npeers && !ret; i++)
		s->peers[i].confined = s->confined;
	while (n.nowned)
		free(n.owned[--n.nowned]);
	return ret;
}
