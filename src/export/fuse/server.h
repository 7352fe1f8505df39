/* SPDX-License-Identifier: MIT */
/*
 * FUSE server: each export is a volume as a regular file of the host. The design note is in internal.h.
 */
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include "blk/volume.h"
#include "util/access.h"

struct fuse_server;

struct fuse_export_config {
	const char *path;	/* the file that is mounted over; made, and removed again at the end, if it is not there */
	struct volume *volume;	/* the caller's; outlives the server */
	bool allow_other;	/* users besides the own one, as far as owner and mode let them */
	struct file_access access; /* the file's; without a mode 0600, or 0400 if the volume is read-only */
	unsigned max_in_flight;	/* requests; 0: 64 */
	/* Called when the file was unmounted by somebody else. Plain function, may be NULL. */
	void (*unmounted)(void *arg);
	void *unmounted_arg;
};

int fuse_server_create(struct fuse_server **ret, struct err *err);
/* After co_fuse_server_stop(). NULL is fine. */
void fuse_server_destroy(struct fuse_server *s);

/* Mounts a volume. A dead mount that a killed server left there is cleared away; one that is served is -EADDRINUSE. */
co_fn int co_fuse_server_add(struct fuse_server *s, const struct fuse_export_config *config, struct err *err);

/* Serves requests from `fd` in place of /dev/fuse, a SOCK_SEQPACKET socket, until its end; closes it. For tests. */
co_fn int co_fuse_server_serve(struct fuse_server *s, const struct fuse_export_config *config, int fd, struct err *err);

/*
 * Detaches the mounts, also if files are open; requests in flight are answered until `deadline_ns` (rt_now_ns() time), later ones fail with ENOTCONN.
 * -ETIMEDOUT if requests are still in flight, because a volume hangs: the server must not be destroyed then.
 */
co_fn int co_fuse_server_stop(struct fuse_server *s, uint64_t deadline_ns);

/*
 * From now on another process takes the mounts away that there are; call it before this one gives up what that takes. No more can be added. That process is this
 * program again, with the verb FUSE_UNMOUNTER and a number, for which it calls fuse_unmounter_main(). -errno with a message.
 */
int fuse_server_guard(struct fuse_server *s, struct err *err);
bool fuse_server_guarded(const struct fuse_server *s);
#define FUSE_UNMOUNTER "fuse-unmounter"
int fuse_unmounter_main(int fd);

/* Takes away dead mounts that killed servers left at `path`. Blocks for a moment. 0, or -errno with a message; -EADDRINUSE if a server lives there. */
int fuse_clear_dead(const char *path, struct err *err);

/* json_t array, new reference: an export each. */
void *fuse_server_status(struct fuse_server *s);
/* The path of the i-th export; NULL beyond the last. */
const char *fuse_server_path(struct fuse_server *s, unsigned i);
/* Exports that are mounted. */
unsigned fuse_server_mounted(const struct fuse_server *s);
