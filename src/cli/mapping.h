/* SPDX-License-Identifier: MIT */
/*
 * Disks that are mapped on this host: found anew each time from what the kernel says (mounts, loop and NBD devices), so that there is no record that could be wrong
 * after a crash.
 *
 * `weir map` starts a server of its own for a disk, which has its control socket at DIR/NAME.sock and its pid file at DIR/NAME.pid, and whose messages go to
 * DIR/NAME.log. Then either
 *  - it shows the disk as the file DIR/NAME, on which a loop device sits, and ends when the file is unmounted; or
 *  - the kernel's NBD client connects to it at DIR/NAME.nbd, and it is ended by its control socket. The device's "backend" says whose it is (map_nbd.c),
 *    and DIR/NAME.disk, for as long as there is a device, of what disk (map_disk.c).
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
	char file[PATH_MAX];	/* of NBD: beside which its server's sockets lie, or the control socket of a server that was there before */
	char volume[256];
	char device[32];	/* "/dev/loop0"; "" if none sits on the file */
	bool nbd;		/* and no file */
	unsigned index;		/* of /dev/nbdN */
	uint64_t size;		/* of the disk; 0: not known */
	bool read_only, dead, own; /* own: its server was started by `weir map` */
	bool waits;		/* the device outlasts this server, and goes on with another of the same disk */
	pid_t pid;		/* of that server, 0: not known */
};

/* All NBD devices, and all files that are mounted, one for each loop device on them. The count, or -errno; free *ret. */
int mapping_list(struct mapping **ret, struct err *err);

/* A loop device on `file`, with direct I/O; its path in `device`. 0 or -errno. */
int loop_attach(const char *file, uint32_t block_size, bool read_only, char device[32], struct err *err);
/* Writes back what the kernel has of it, and takes it away. -EBUSY if it is in use. `dead`: what cannot be written is lost already. */
int loop_detach(const char *device, bool dead, struct err *err);
/* The file below a loop device. False if it is none, or free. */
bool loop_backing(const char *device, char file[PATH_MAX]);

/* The path of a socket or of messages beside `file`. */
void mapping_path(char *buf, size_t size, const char *file, const char *suffix);
/* The process that answers on a control socket, 0: none. */
pid_t mapping_server_pid(const char *control);
/*
 * Starts a server for `disk` behind this process, with `file` as its file or beside it a socket for NBD, and waits until it is ready. `argv` are further arguments of
 * `weir serve`, up to a NULL.
 */
int map_server_start(const char *disk, const char *file, bool nbd, const char *name, const char *const *argv, struct err *err);
/* Unmounts the file, or tells the server, and waits for it to have written what it has to. */
int map_server_stop(const struct mapping *m, struct err *err);

/* map_nbd.c: by the kernel's NBD client. `own`: of the server at `file`, else of the one whose control socket that is. */
struct map_nbd {
	const char *file, *socket, *volume;
	uint32_t block_size, wait_s;
	bool own, read_only;
};

int map_nbd_attach(const struct map_nbd *n, char device[32], struct err *err);
/* The same for a device that has lost its server. */
int map_nbd_attach_again(const struct map_nbd *n, const struct mapping *m, struct err *err);
/* As loop_detach(), but `force` takes it away from who uses it, who gets errors. */
int map_nbd_detach(const struct mapping *m, bool force, struct err *err);
/* Fills in what is mapped so. False: the backend's name is not of weir's making. */
bool map_nbd_parse(struct mapping *m, unsigned index, const char *backend);
