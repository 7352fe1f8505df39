/* SPDX-License-Identifier: MIT */
/* Who may use a file or socket that is about to be made: options mode=, owner= and group=; and looking users up. */
#pragma once

#include <sys/types.h>

struct err;
struct opts;

struct file_access {
	mode_t mode;	/* 0: the default of whoever makes the file */
	uid_t uid;	/* (uid_t)-1: who makes it */
	gid_t gid;	/* (gid_t)-1: likewise */
};

#define FILE_ACCESS_INIT { 0, (uid_t)-1, (gid_t)-1 }
#define FILE_ACCESS_OPTIONS "mode, owner, group"

/* -EINVAL; `what` begins the message. */
int file_access_parse(struct opts *o, const char *what, struct file_access *ret, struct err *err);
/* A name or a number. For a number that no account has, *gid is untouched. -EINVAL. */
int user_find(const char *text, uid_t *uid, gid_t *gid, struct err *err);
