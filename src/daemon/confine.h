/* SPDX-License-Identifier: MIT */
/*
 * What a serving process gives up once all is open: root's rights, files that it has no business with, system calls that it never makes.
 * What that covers and what not: docs/decisions/041-confined-after-opening.md.
 */
#pragma once

#include <stdbool.h>

struct err;
struct rt;

#define CONFINE_PATHS 64

struct confine_config {
	const char *user;	/* to become, a name or a number; NULL: stay who we are */
	bool sandbox;
	bool deny_list;		/* instead of that: a library has threads of its own, so only what nobody needs is forbidden, and files are not */
	bool connects;		/* may connect to TCP ports and look hosts up, later on too */
	/* What may be opened later on: to read and write, to read; and folders from which files may be removed. */
	const char *write[CONFINE_PATHS], *read[CONFINE_PATHS], *remove[CONFINE_PATHS];
};

/* What came of it. */
struct confined {
	int landlock;		/* the version of its interface; 0: not in effect */
	bool seccomp;
};

/*
 * On the reactor's thread. Worker threads of `rt` (may be NULL) are replaced by new ones. What the kernel or the build does not have is left out, with
 * a warning; anything else that fails is an error, after which the process must not go on.
 */
int confine(struct rt *rt, const struct confine_config *config, struct confined *ret, struct err *err);

/*
 * The same in steps, for a process with several reactors, in this order: capabilities on each but one of them, the user on that one, files on each (`rt` is that reactor; `ret`
 * NULL: what the kernel does not have was told already), and at last system calls, for all threads at once.
 */
int confine_capabilities(const struct confine_config *config, struct err *err);
int confine_user(const struct confine_config *config, struct err *err);
int confine_files(struct rt *rt, const struct confine_config *config, struct confined *ret, struct err *err);
int confine_calls(const struct confine_config *config, struct confined *ret, struct err *err);
