/* SPDX-License-Identifier: MIT */
/*
 * Disks that are mapped on this host: found anew each time from what the kernel says (mounts, loop devices), so that there is no record that could be wrong after a crash.
 *
 * `weir map` starts a server of its own for a disk: it shows the disk as DIR/NAME and has its control socket at DIR/NAME.sock, its messages go to
 * DIR/NAME.log, and it ends when the file is unmounted. A loop device sits on the file.
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct err;

#define MAP_DIR "/run/weir"
#define MAP_PATH_MAX (PATH_MAX + 16) /* of what lies beside a file */

struct mapping {
	char file[PATH_MAX];
	char volume[256];
	char device[32];	/* "/dev/loop0"; "" if none sits on the file */
	uint64_t size;		/* of the disk; 0: not known */
	bool read_only, dead, own; /* own: its server was started by `weir map` */
	pid_t pid;		/* of that server, 0: not known */
};

/* All files of weir that are mounted, one for each loop device on them. The count, or -errno; free *ret. */
int mapping_list(struct mapping **ret, struct err *err);

/* A loop device on `file`, with direct I/O; its path in `device`. 0 or -errno. */
int loop_attach(const char *file, uint32_t block_size, bool read_only, char device[32], struct err *err);
/* Writes back what the kernel has of it, and takes it away. -EBUSY if it is in use. `dead`: what cannot be written is lost already. */
int loop_detach(const char *device, bool dead, struct err *err);
/* The file below a loop device. False if it is none, or free. */
bool loop_backing(const char *device, char file[PATH_MAX]);

/* The path of a socket or of messages beside `file`. */
void mapping_path(char *buf, size_t size, const char *file, const char *suffix);
/* Starts a server for `disk` behind this process, with `file` as its file, and waits until it is ready. `argv` are further arguments of `weir serve`, up to a NULL. */
int map_server_start(const char *disk, const char *file, const char *name, const char *const *argv, struct err *err);
/* Unmounts the file, and waits for the server to have written what it has to. */
int map_server_stop(const struct mapping *m, struct err *err);
