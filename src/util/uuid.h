/* SPDX-License-Identifier: MIT */
/*
 * UUIDs, version 4 (RFC 9562).
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct uuid {
	uint8_t b[16];
};

void uuid_random(struct uuid *u);
bool uuid_equal(const struct uuid *a, const struct uuid *b);
bool uuid_is_null(const struct uuid *u);
const char *uuid_format(const struct uuid *u, char buf[static 37]);
/* 0 or -EINVAL. */
int uuid_parse(const char *s, struct uuid *ret);
