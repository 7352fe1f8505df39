/* SPDX-License-Identifier: MIT */
/*
 * The life of a serving process: open, serve, stop.
 */
#pragma once

#include "daemon/graph.h"

struct err;

#define SERVE_REACTORS_MAX 32

struct serve_config {
	struct graph_config graph;
	const char *const *nbd;	/* addresses */
	unsigned nnbd;
	const char *const *vhost; /* sockets, with options: see vhost.h */
	unsigned nvhost;
	const char *const *fuse; /* files, with options: see fuse.h */
	unsigned nfuse;
	bool exit_unmounted;	/* end when the last of these files was unmounted */
	uint64_t client_ns;	/* how long a client may take for an option or a request: see nbd_server_config; 0: the default */
	const char *const *allow; /* volumes that NBD offers; none: all */
	unsigned nallow;
	uint64_t nbd_conns, client_conns, client_requests, idle_ns; /* as in nbd_server_config */
	bool insecure;
	int tls;		/* an enum nbd_tls */
	const char *tls_creds;	/* a directory, or NULL with NBD_TLS_OFF */
	bool tls_any_client;	/* clients need no certificate */
	const char *user;	/* to become, or NULL */
	bool no_sandbox;
	const char *const *allow_paths; /* what may be opened later */
	unsigned nallow_paths;
	const char *control;	/* path of the control socket, or NULL */
	const char *pid_file;	/* there from the start to an end with all written, or NULL */
	const char *aio, *cache; /* defaults for files, or NULL */
	uint64_t memory;	/* of the process: see memory.h */
	bool drain;		/* empty the log before the end */
	uint64_t poll_ns;	/* how long a reactor polls before it sleeps */
	unsigned reactors;	/* that the volumes are spread over; 0: 1 */
};

/* Serves until SIGTERM, SIGINT or the control socket's `shutdown`. 0, or -errno with a message. May not return when an image hangs: it ends the process itself. */
int serve_run(const struct serve_config *config, struct err *err);
