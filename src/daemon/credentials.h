/* SPDX-License-Identifier: MIT */
/* The NBD server's certificates and keys, at the start and when they are renewed. */
#pragma once

#include "rt/role.h"

struct err;
struct serve;

/* Reads them from config->tls_creds into s->tls, for clients that come from now on. After a failure those from before stay. */
co_fn int co_load_credentials(struct serve *s, struct err *err);
/* The same for a process that serves; says so. -ENOTSUP without TLS. */
co_fn int co_reload_credentials(struct serve *s, struct err *err);
/* SIGHUP does it, until the reactor is about to go. */
void watch_hangup(struct serve *s);
void ignore_hangup(void);
