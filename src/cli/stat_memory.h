/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;

/* Prints who has how much of a server's memory, after setting its limit to `size` if that is not 0. */
int stat_memory(const char *control, uint64_t size, bool json, struct err *err);
