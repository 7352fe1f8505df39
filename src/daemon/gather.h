/* SPDX-License-Identifier: MIT */
/*
 * Control socket with several reactors: a command is carried out where its volume is, or on all, whose answers are then made one.
 *
 * What crosses are texts: each reactor answers for itself, as if it were alone.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>

#include "rt/role.h"

struct serve;

/* Does the request name a volume of another reactor? */
bool gather_elsewhere(struct serve *s, const json_t *req);
/* The answer, a new reference, without the request's "id"; NULL: out of memory. `all`: of all reactors, else of the one that has the volume. */
co_fn json_t *co_gather(struct serve *s, const json_t *req, bool all);

/*
 * Adds `from` to `into`: numbers are added, lists put together, what is missing or null is taken over, and the rest stays. Those numbers that are the same for all, or no
 * sums, stay, too.
 */
void gather_merge(json_t *into, json_t *from);

/* commands.c: the command of a request that was checked, on the reactor of `s`. */
co_fn int co_control_own(struct serve *s, json_t *req, int (*co_send)(void *arg, const char *text, size_t len), void *arg);
