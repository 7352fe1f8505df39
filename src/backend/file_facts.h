/* SPDX-License-Identifier: MIT */
/*
 * What lies below a file: file system, device, its write cache. For `status` and `weir perf`.
 *
 * All of it comes from statx, statfs, /proc and sysfs; what they do not tell is "unknown", never guessed.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

enum fact { FACT_NO, FACT_YES, FACT_UNKNOWN };

struct file_facts {
	char fs[32];		/* "ext4", "" for a block device */
	char source[128];	/* what the file system lies on: "/dev/vda2"; "" if not a device */
	char device[64];	/* kernel name of the disk, "vda"; "" if unknown */
	char journal[32];	/* "jbd2", "none", "log", "copy on write", "unknown"; "" for a block device */
	bool no_barriers;	/* mounted with nobarrier or barrier=0: fsync does not reach the medium */
	bool lazytime;		/* mounted so: times of files reach the medium as late as a day after the data */
	enum fact write_cache;	/* the device has a volatile write cache */
	enum fact fua;
	enum fact rotational;
	bool in_memory;		/* tmpfs, ramfs, zram, brd: nothing survives a power cut */
	uint32_t logical_block, physical_block; /* 0: unknown */
	uint32_t discard_gran;	/* of the device; 0: none */
	uint64_t write_zeroes_max; /* of the device, bytes; 0: it has no such command */
};

/* Fills in what can be found out about the open file `fd`. Blocks (run it on a worker). Never fails. */
void file_facts_get(int fd, struct file_facts *ret);
/* "yes", "no", "unknown" */
const char *fact_text(enum fact f);

/* Alignment that O_DIRECT needs on this file. Both 0: the kernel does not tell. Returns -ENOTSUP where it tells that O_DIRECT is impossible. */
int file_dio_align(int fd, const struct stat *st, uint32_t *ret_offset, uint32_t *ret_memory);
/* A regular file of sysfs of the disk that holds `dev`, the whole disk's where it is a partition: "queue/fua". 0 or -errno; no newline. */
int file_sysfs_read(dev_t dev, const char *name, char *buf, size_t size);
