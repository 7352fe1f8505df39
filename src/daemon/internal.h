/* SPDX-License-Identifier: MIT */
/*
 * The state of a serving process, as its control socket sees it.
 */
#pragma once

#include "daemon/confine.h"
#include "daemon/graph.h"
#include "daemon/memory.h"
#include "daemon/pressure.h"
#include "rt/rt.h"
#include "rt/sync.h"

struct control;
struct fuse_server;
struct nbd_server;
struct serve_config;
struct tls_creds;
struct vhost_server;

struct serve {
	const struct serve_config *config;
	struct rt *rt;
	struct err *err;
	struct graph graph;
	struct nbd_server *nbd;	/* NULL: not served */
	struct tls_creds *tls;	/* NULL: no TLS */
	struct vhost_server *vhost; /* NULL: not served */
	struct fuse_server *fuse; /* NULL: not served */
	struct control *control;
	struct confined confined;
	struct co_queue stop_q;	/* main waits for `stop`, and for `closed` */
	bool sizing;		/* images are being looked at, for a size that changed outside */
	bool opened, stop, drain, draining, cut_short, closed;
	int error;
	uint64_t drain_done, drain_total, drain_told_ns;
	struct pressure pressure;
	struct memory memory;
};

/* Gives up what is not needed any more, once all is open. An error ends the process. */
int serve_confine(struct serve *s, struct err *err);
/* Begins the end, or if that has begun cuts its drain short. Plain function. */
void serve_stop(struct serve *s, bool drain);
