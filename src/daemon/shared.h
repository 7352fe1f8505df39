/* SPDX-License-Identifier: MIT */
/*
 * Backing images that several volumes of a process have in common: each is opened once, and cached once.
 */
#pragma once

#include "blk/share.h"
#include "cache/cache.h"
#include "util/list.h"

#define SHARED_TABLES 2

struct shared_image {
	struct disk_shared share;
	struct list node;
	char *key;
	struct disk *cached;	/* the cache's layer, what `share` holds; NULL: without a cache */
	struct disk *tables[SHARED_TABLES];
};

struct shared_images {
	struct list list;
	struct cache *cache;	/* NULL without */
	struct shared_image *opening; /* whose file is being opened; NULL: a volume's own */
};

void shared_init(struct shared_images *all, struct cache *cache);
/* For disk_set_backing_open(); `arg` is a struct shared_images. Formats below it that are opened meanwhile have all->opening set. */
co_fn int co_shared_open(void *arg, const char *text, unsigned flags, struct disk **ret, struct err *err);
/* A layer for the tables of the image that is being opened. */
co_fn void co_shared_cache_tables(struct shared_images *all, struct disk **d);
void shared_set_secondarycache(struct shared_images *all, enum cache_mode mode);
