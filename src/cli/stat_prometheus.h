/* SPDX-License-Identifier: MIT */
#pragma once

#include <jansson.h>

/* Prints the answer to `stats` in Prometheus's text format (version 0.0.4). Names and labels are stable. */
void stat_prometheus(json_t *stats);
