/* SPDX-License-Identifier: MIT */
/*
 * FUSE server: inside.
 *
 * An export is a file system that consists of its root, and the root is a regular file: the disk. It is mounted over a file. The kernel's requests are
 * read from /dev/fuse by the export's receiver (server.c), a coroutine that waits for the descriptor on the reactor's ring; each request becomes a coroutine of its own
 * (request.c), which answers with one writev(2). Layouts and numbers are those of <linux/fuse.h>; no library is between.
 *
 * The kernel caches nothing of the disk: files are opened with FOPEN_DIRECT_IO, attributes are valid for no time. So what other exports of the volume write
 * is seen at once, what was written is never only in the page cache, and a write with O_DSYNC or RWF_DSYNC arrives here with that flag. A shared mapping is
 * refused by the kernel for such a file; a private one sees the disk as of the page faults.
 *
 * Invariants
 *  (1) A request is read so that the data of a write begins at a page of the request's buffer, which goes to the volume as it stands.
 *  (2) An export has at most max_in_flight requests, each with one buffer of its own pool; what exceeds that waits in the kernel.
 *  (3) What is read is checked before use, as if it came from a stranger: a length that does not fit is answered with an error, and never
 *      read beyond. Only what cannot be answered (no header) is dropped.
 *  (4) fsync, and a write with O_DSYNC or O_SYNC, is answered when the data is durable. close(2) is no flush.
 *  (5) A hole that was punched reads as zeroes, always: discard promises less, so it is not used.
 *  (6) The size belongs to the volume: truncate(2) to any other size is refused, writes behind the end find no space.
 *
 * Runs on one reactor, that of the volume. mount.c blocks and is called on worker threads, but for detaching.
 */
#pragma once

#include <linux/fuse.h>

#include "blk/volume.h"
#include "export/fuse/server.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "util/err.h"
#include "util/list.h"

#ifndef FOPEN_PARALLEL_DIRECT_WRITES
#define FOPEN_PARALLEL_DIRECT_WRITES (1 << 6)	/* 6.2 */
#endif

#define FUSE_DATA_MAX (1u << 20)	/* of one read or write */
#define FUSE_WRITE_HEAD (sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in))
#define FUSE_MESSAGE_MAX 512u		/* of other requests that much is looked at */

struct fuse_request {
	struct list node;
	struct fuse_export *e;
	uint8_t *data;		/* FUSE_DATA_MAX bytes of the pool */
	uint32_t len;		/* of the message as it was read */
	union {
		struct fuse_in_header in;
		uint8_t message[FUSE_MESSAGE_MAX]; /* of a write only FUSE_WRITE_HEAD bytes, the rest is in data */
	};
	struct fuse_out_header out;
	union {
		struct fuse_attr_out attr;
		struct fuse_init_out init;
		struct fuse_open_out open;
		struct fuse_write_out write;
		struct fuse_statfs_out statfs;
		struct fuse_lseek_out lseek;
	} reply;
};

/* Where a file system is mounted. */
struct fuse_mount {
	char *path;		/* absolute, without links */
	int fd;			/* of /dev/fuse, not blocking; -1: none */
	unsigned major, minor;	/* of the mount, which tells it from others at the same place */
	bool created;		/* the file was made for it */
	uint64_t dev, ino;	/* the file below */
	bool has_dir;		/* `dir` is the folder, whatever its path leads to by now, and `path` only names the file in it */
	int dir;
};

struct fuse_mount_config {
	const char *path, *source;
	bool read_only, allow_other;
	mode_t mode;
};

struct fuse_export {
	struct list node;
	struct fuse_server *s;
	struct fuse_export_config config;
	struct fuse_mount mount;
	unsigned number;	/* at the unmounter */
	struct volume *v;
	struct rt_bufpool *pool;
	struct fuse_request *slab;
	struct list free;
	struct co_queue idle;	/* waits for requests to end */
	unsigned in_flight;
	bool initialised, stopping, ended;
	uint32_t minor;		/* of the kernel's protocol */
	mode_t mode;
	uid_t uid;
	gid_t gid;
	uint64_t mtime_ns;
	/* figures */
	unsigned opens;
	uint64_t requests, errors, bytes_in, bytes_out, flushes, durable_writes, polls;
};

struct fuse_server {
	struct list exports;
	bool stopping;
	unsigned receivers;
	int unmounter;		/* a socket, or: */
#define FUSE_UNGUARDED (-1)	/* the process unmounts by itself */
#define FUSE_UNMOUNTER_GONE (-2)
	unsigned guarded;
	struct co_queue stop_q;
};

/* request.c: coroutine entry, `arg` is a struct fuse_request. Carries out, answers and frees. */
co_fn void co_fuse_request_main(void *arg);
/* server.c */
void fuse_request_put(struct fuse_request *r);

/* mount.c: all block. */
int fuse_mount_attach(const struct fuse_mount_config *c, struct fuse_mount *ret, struct err *err);
/* Takes the mount away if it is still there, lazily, and the file if it was made; closes nothing. False: it is there and cannot be taken away. */
bool fuse_mount_detach(struct fuse_mount *m);
/* Holds on to the folder, for a detach with more rights than those who may rename it have. -errno. */
int fuse_mount_hold(struct fuse_mount *m);
/* The absolute path without links in all but its last part. Free it. */
int fuse_mount_path(const char *path, char **ret, struct err *err);

/* unmounter.c: fuse_mount_detach(), by whoever is able to; who does not answer until `until_ns` (rt_now_exact_ns() time) is not asked again. */
bool fuse_export_detach(struct fuse_export *e, uint64_t until_ns);
#define FUSE_DETACH_NS 150000000ull /* at most, for all of a server: the end has more to do */
