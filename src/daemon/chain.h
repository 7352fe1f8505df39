/* SPDX-License-Identifier: MIT */
/*
 * Which files a DISK string leads to, before anything is opened: an image and the backing files below it.
 */
#pragma once

#include <sys/stat.h>

#define CHAIN_MAX 16

struct chain {
	struct { dev_t dev; ino_t ino; } file[CHAIN_MAX];
	unsigned n;
};

/* What cannot be found out is left out: the opening will say what is wrong. Blocks. */
void chain_look(const char *disk, struct chain *ret);
/* Do both stand on a file? */
int chain_share(const struct chain *a, const struct chain *b);
