/* SPDX-License-Identifier: MIT */
/* What disk a device is of: kept beside its sockets, so that it goes on with no other. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;

struct map_disk {
	char *text;		/* the disk, its logs and its blocks, a line each; the same for the same, whatever folder they are named from */
	bool gone;		/* its contents were in the memory of its server */
};

/* Free with map_disk_free(), also on failure. */
int map_disk_describe(struct map_disk *d, const char *disk, const char *const *logs, int nlogs, uint64_t block_size, struct err *err);
void map_disk_free(struct map_disk *d);
/* Writes it to FILE.disk. */
int map_disk_keep(const struct map_disk *d, const char *file, struct err *err);
/* 0 if FILE.disk says that `device` is of this one. -EBUSY if not, or if that cannot be told. */
int map_disk_check(const struct map_disk *d, const char *file, const char *device, struct err *err);
