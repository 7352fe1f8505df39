/* SPDX-License-Identifier: MIT */
/* Pid files: locked by the process that they name, for as long as it lives. */
#pragma once

#include <stdbool.h>

struct err;

struct pid_file {
	const char *path;
	int fd;			/* holds the lock; -1: not taken */
	bool found;		/* left by a process that was killed */
	bool written;
};

#define PID_FILE_INIT { .fd = -1 }

/* Takes one that is there already, and leaves it as it is. -EBUSY: its process lives. */
int pid_file_claim(struct pid_file *p, const char *path, struct err *err);
/* Takes it, makes it if need be, and writes this process's number. */
int pid_file_write(struct pid_file *p, const char *path, struct err *err);
/* Removes it if this process has written it and nobody has replaced it. 0 or -errno. `p` may be used no more. */
int pid_file_remove(struct pid_file *p);
/* Lets go of it, and leaves it. */
void pid_file_leave(struct pid_file *p);
/* Does a living process hold it? */
bool pid_file_is_held(const char *path);
