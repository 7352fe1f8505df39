/* SPDX-License-Identifier: MIT */
/*
 * `weir perf`: how fast, and how honestly, a place syncs.
 *
 * The parts are pveperf's (what each measures is read from its description, the code is our own), etcd's write pattern, and the
 * cost of a flush.
 *
 *   perf.c         order of the parts, the verdict, what is doubtful
 *   perf_host.c    processor, regular expressions, name look-ups
 *   perf_dir.c     a directory: file system calls on files made for it
 *   perf_disk.c    a disk: through its driver
 *   perf_report.c  text and JSON
 */
#pragma once

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "rt/role.h"
#include "util/hist.h"

struct disk;
struct err;

#define PERF_ETCD_BYTES 8000u		/* what etcd's guide tells to write */
#define PERF_ETCD_LIMIT_NS 10000000u	/* its p99 limit */
#define PERF_SPACE (100u << 20)		/* at most that much is written at a time */
#define PERF_FSYNC_BYTES 4001u		/* pveperf's */
#define PERF_FSYNC_FILES 300
#define PERF_WARNINGS 12

struct perf_opts {
	const char *target;	/* directory or DISK */
	bool write;		/* a DISK may be written to */
	uint64_t part_ns;	/* how long each part takes */
	const char *dns;	/* domain for look-ups, or NULL */
	const volatile sig_atomic_t *stop; /* set by a signal handler: end at the next chance */
	void (*progress)(void *arg, const char *part); /* may be NULL */
	void *arg;
};

enum perf_verdict { PERF_NOT_MEASURED, PERF_OK, PERF_SLOW };

/* What the driver tells of the path. -1: unknown. */
struct perf_path {
	char driver[32], fs[32], source[128], device[64], journal[32], cache[32], aio[32];
	int write_cache, fua, rotational, o_direct, barriers;
	bool flush_ignored, in_memory;
	uint32_t logical_block, physical_block;
	/* as a guest sees it */
	bool guest_flush, guest_fua, guest_discard;
	uint32_t guest_block;
};

struct perf_result {
	bool directory, wrote;
	/* host */
	double bogomips, regex_per_s;
	uint64_t dns_ns;	/* 0: not measured */
	unsigned dns_count;
	/* reads */
	uint64_t size;
	char read_from[160];	/* device, file or disk that was read */
	double read_bytes_per_s;
	uint64_t seek_ns;	/* mean; 0: not measured */
	/* syncs */
	uint64_t fsyncs, fsync_ns; /* count and time of it */
	struct hist etcd;	/* one write with its flush */
	uint64_t etcd_ns;
	struct hist write, stable, flush; /* 4 KiB: a plain write, one with FUA, one with a flush behind */
	struct perf_path path;
	enum perf_verdict verdict;
	unsigned n_warnings;
	char warning[PERF_WARNINGS][240];
};

/* -ECANCELED if `stop` was set; everything it made is removed then too. */
int perf_run(const struct perf_opts *o, struct perf_result *r, struct err *err);

void perf_print(const struct perf_opts *o, const struct perf_result *r, FILE *out);
/* 0, or -errno if it could not be written. */
int perf_print_json(const struct perf_opts *o, const struct perf_result *r, FILE *out);

/* --- Between the parts --- */

uint64_t perf_now_ns(void);
static inline bool perf_stopped(const struct perf_opts *o)
{
	return o->stop && *o->stop;
}
void perf_part(const struct perf_opts *o, const char *part);
/* True while a part that began at `start` goes on. */
bool perf_goes_on(const struct perf_opts *o, uint64_t start);

void perf_host(const struct perf_opts *o, struct perf_result *r);
void perf_dns(const struct perf_opts *o, struct perf_result *r);

/* Makes a folder in the directory, measures, and removes it. */
co_fn int co_perf_dir(const struct perf_opts *o, struct perf_result *r, struct err *err);
co_fn int co_perf_disk(const struct perf_opts *o, struct perf_result *r, struct err *err);
/* The three kinds of write, 4 KiB each, on the first bytes of `d`. */
co_fn int co_perf_flush_cost(const struct perf_opts *o, struct perf_result *r, struct disk *d, struct err *err);
/* Fills in r->path from what the disk and the layers below tell. */
void perf_read_path(struct disk *d, struct perf_result *r);
/* Adds what is doubtful, and the verdict. Plain arithmetic on `r`. */
void perf_judge(struct perf_result *r);
