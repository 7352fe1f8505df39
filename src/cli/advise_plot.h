/* SPDX-License-Identifier: MIT */
#pragma once

#include <jansson.h>

struct err;

/* Draws the curves (an object: volume -> what `cache-curve` answers) as an SVG. -errno with a message. */
int advise_plot(const char *path, json_t *curves, struct err *err);
