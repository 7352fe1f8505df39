/* SPDX-License-Identifier: MIT */
/* Questions to the control socket of a `weir serve`. */
#pragma once

#include <jansson.h>

struct err;

/*
 * Sends `request`, of which it takes the reference, and returns the result of the answer as a new reference; NULL with a message if there is none. One
 * connection for each question.
 */
json_t *ask_server(const char *path, json_t *request, struct err *err);
