/* SPDX-License-Identifier: MIT */
/*
 * A vhost-user-blk server in a child process, for tests: one disk, one socket, and counters of what reached the disk in memory that both share.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "blk/disk.h"

struct vs_shared {
	uint64_t ops[DISK_OPS];	/* that reached the disk below the volume */
	uint64_t fua;		/* of these, writes, discards and zeroes that had to be durable */
	uint64_t last_off, last_len;
	int fail[DISK_OPS];	/* what an op is to return, 0: let it through */
	uint64_t order[1024];	/* offsets of the writes, as they came */
	uint64_t writes;
};

struct vs {
	pid_t pid;
	int control;
	char dir[64], path[96];
	const char *disk;
	bool read_only;
	uint64_t poll_ns;
	struct vs_shared *shared;
};

struct vs_figures {
	uint64_t heap;		/* bytes; 0 under a sanitizer, which has a heap of its own and looks for leaks itself */
	uint64_t enters;	/* of the ring: system calls of the reactor */
};

/* Starts it on `disk`; the socket is s->path. */
void vs_start(struct vs *s, const char *disk, bool read_only);
/* With a reactor that polls for so long before it sleeps. */
void vs_start_polling(struct vs *s, const char *disk, uint64_t poll_ns);
/* Starts it again on the same socket and disk. */
void vs_restart(struct vs *s);
/* Ends it in good order and checks that it was content. */
void vs_stop(struct vs *s);
/* SIGKILL. */
void vs_kill(struct vs *s);
/* Resizes the volume. */
int vs_resize(struct vs *s, uint64_t size);
/* How many descriptors it has. */
unsigned vs_descriptors(struct vs *s);
/* How many pieces of memory are mapped: not those of the heap. */
unsigned vs_mappings(struct vs *s);
void vs_get_figures(struct vs *s, struct vs_figures *ret);
/* The status of the server as JSON text; free(). */
char *vs_status(struct vs *s);
bool vs_is_alive(struct vs *s);
/* Removes the folder; s was stopped or killed. */
void vs_fini(struct vs *s);
