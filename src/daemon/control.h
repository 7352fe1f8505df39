/* SPDX-License-Identifier: MIT */
/*
 * Control socket: one JSON object per line in each direction, on a Unix socket of mode 0600.
 *
 *	{"command": "status"}	{"ok": true, "result": {...}}	{"ok": false, "error": "TEXT"}
 *
 * A request may carry an "id", which its answers repeat. `drain` answers with lines {"progress": {"done": N, "total": N}} before its
 * result. No command but `drain` waits for a volume, so the socket answers also when an image hangs.
 */
#pragma once

#include <stddef.h>

#include "rt/rt.h"

struct control;
struct err;
struct serve;

/* Call on the reactor. Takes the place; nobody is answered before control_accept(), and who connects before waits. */
int control_start(struct serve *s, const char *path, struct control **ret, struct err *err);
int control_accept(struct control *c, struct err *err);
/* Closes the socket and its clients; they and `c` are freed when the last of their coroutines has ended. NULL is fine. Plain function. */
void control_stop(struct control *c);

/*
 * Answers one request line. `co_send` is called with each line of the answer, without its end, and returns 0, or -errno if the client is gone. Returns 0, or what
 * `co_send` returned. Untrusted input.
 */
co_fn int co_control_request(struct serve *s, const char *line, size_t len, int (*co_send)(void *arg, const char *text, size_t len), void *arg);
