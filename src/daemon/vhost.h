/* SPDX-License-Identifier: MIT */
/* The --vhost-user options of a serving process: PATH[,volume=NAME][,queues=N][,block-size=N][,serial=TEXT]. */
#pragma once

#include "rt/role.h"

struct err;
struct serve;

/* Only the syntax. 0 or -EINVAL. */
int vhost_check_option(const char *text, struct err *err);
/* Makes the server with its devices: those that name no volume take the volumes in their order. */
co_fn int co_start_vhost(struct serve *s, struct err *err);
