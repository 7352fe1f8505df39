/* SPDX-License-Identifier: MIT */
/*
 * What each reactor of a serving process has to do: its part of the configuration.
 *
 * A volume lives on one reactor with all that belongs to it: exports, format, cache, backend. So disks that share something that cannot be on two of them stay
 * together: those that stand on the same backing file; and with a write log or a cache device all of them.
 */
#pragma once

#include "daemon/serve.h"
#include "util/list.h"

#define SPLIT_MAX SERVE_REACTORS_MAX

struct split_volume {
	char name[WLOG_NAME_MAX + 1];
	unsigned part;
};

struct split {
	const struct serve_config *whole;
	unsigned n;		/* parts, at least 1: not more than have something to do */
	struct serve_config part[SPLIT_MAX]; /* the first listens, and has the control socket */
	struct split_volume volume[GRAPH_MAX_VOLUMES]; /* in the order of the command line */
	unsigned nvolumes;
	const char *together;	/* why all are on one reactor though more were asked for; NULL */
	const char **owned;
};

/* -EINVAL, -EEXIST, -ENOMEM. `config` outlives it. */
int split_init(struct split *s, const struct serve_config *config, struct err *err);
void split_fini(struct split *s);
