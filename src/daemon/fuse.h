/* SPDX-License-Identifier: MIT */
/* The --fuse options of a serving process: FILE[,volume=NAME][,allow-other][,mode=OCTAL][,owner=USER][,group=GROUP]. */
#pragma once

#include "rt/role.h"

struct err;
struct serve;
struct serve_config;
struct volume;

/* Only the syntax. 0 or -EINVAL. */
int fuse_check_option(const char *text, struct err *err);
/* Takes away what killed servers have left mounted on the files: before the images are opened, since one of them may be below. Blocks. */
int fuse_clear_paths(const struct serve_config *c, struct err *err);
/* Makes the server with its files: those that name no volume take the volumes in their order. */
co_fn int co_start_fuse(struct serve *s, struct err *err);
/* One more file while serving. */
co_fn int co_add_file(struct serve *s, struct volume *v, const char *path, struct err *err);
