/* SPDX-License-Identifier: MIT */
/*
 * The other reactors of a serving process. Each is a struct serve of its own, with its part of the configuration, on a thread of its own, and knows nothing of the rest; the
 * first one, on the thread that the process began with, has signals, the control socket and the NBD listeners, and speaks to the others through their mailboxes:
 * docs/decisions/050-reactors.md.
 */
#pragma once

#include <stdbool.h>

#include "rt/role.h"

struct err;
struct serve;
struct serve_config;

/* Its reactor with all that belongs to that; see serve_reactor_destroy(). `ndisks` of all parts. */
int serve_reactor_create(struct serve *s, const struct serve_config *whole, unsigned parts, struct err *err);
/* On the reactor's thread, after its loop. */
void serve_reactor_destroy(struct serve *s);

/* Starts the threads of s->split's parts but the first. On failure those that run are ended by peers_end(). */
int peers_start(struct serve *s, struct err *err);
/* Waits until they are idle, and ends them. On no reactor. */
void peers_end(struct serve *s);

/* fn(t) on the reactor of `t`; as co_call(), but with some patience while that reactor has no free coroutine. */
co_fn int co_serve_call(struct serve *t, int (*fn)(void *arg), void *arg);
/* fn(t) for `s` and each of its peers, at the same time, each on its own reactor. The first error. */
co_fn int co_everywhere(struct serve *s, int (*fn)(void *arg));
/* The one of them that has the volume; NULL. */
struct serve *serve_of_volume(struct serve *s, const char *name);
