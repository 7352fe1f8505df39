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
#include "util/pid_file.h"

struct control;
struct fuse_server;
struct nbd_server;
struct rt_bufpool;
struct rt_thread;
struct serve_config;
struct split;
struct tls_creds;
struct vhost_server;

#define SERVE_REQUESTS_MAX 16384u /* coroutines for requests; a stack costs two memory maps and a process has 65,530 */

/* What one reactor serves: see peers.h. */
struct serve {
	const struct serve_config *config; /* its part */
	const struct split *split; /* NULL: there is only this one */
	struct serve *main;	/* NULL: this is it */
	struct serve *peers;	/* of main */
	unsigned npeers, number;
	struct rt_thread *thread; /* of a peer */
	struct rt_bufpool *bounce;
	struct rt *rt;
	struct err *err;
	struct graph graph;
	struct nbd_server *nbd;	/* NULL: not served */
	struct tls_creds *tls;	/* NULL: no TLS */
	struct vhost_server *vhost; /* NULL: not served */
	struct fuse_server *fuse; /* NULL: not served */
	struct control *control;
	struct confined confined;
	struct pid_file pid_file; /* of main */
	struct co_queue stop_q;	/* main waits for `stop`, and for `closed` */
	unsigned sizing;	/* who may change the size of a volume: none is closed meanwhile */
	bool opened, stop, drain, draining, cut_short, closed;
	bool served;
	bool ending;		/* no drain goes on, or not any more */
	int error;
	uint64_t drain_done, drain_total, drain_told_ns;
	struct pressure pressure;
	struct memory memory;
	/* The end, in steps */
	uint64_t end_ns;
	int clients, files, flushed;
	const char *hung;
};

/* Gives up what is not needed any more, once all is open. An error ends the process. */
co_fn int co_serve_confine(struct serve *s, struct err *err);
/* Begins the end, or if that has begun cuts its drain short. Plain function. */
void serve_stop(struct serve *s, bool drain);
