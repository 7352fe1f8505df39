/* SPDX-License-Identifier: MIT */
/*
 * What the commands of `weir log` share.
 */
#pragma once

#include "cli/cli.h"
#include "util/err.h"
#include "wlog/wlog.h"

/* One command at work on the devices that were named. */
struct log_job {
	const char *verb;	/* "log create", for messages */
	char **device;		/* as the operator wrote them, NULL after the last */
	int ndev;
	struct disk *dev[WLOG_MAX_DEVICES];
	struct wlog *log;
	struct wlog_config config;
	co_fn int (*co_work)(struct log_job *job, struct err *err);
	void *arg;		/* the command's own */
	int ret;
	struct err err;
};

/* Runs job->co_work() on a reactor with all drivers registered; prints its error. The exit status. */
int log_job_run(struct log_job *job, char **operands);
/* Opens the named devices into job->dev. Nothing stays open on failure. */
co_fn int co_log_job_open_devices(struct log_job *job, unsigned disk_flags, struct err *err);
co_fn void co_log_job_close_devices(struct log_job *job);
/* The devices, and the log on them by job->config. */
co_fn int co_log_job_open(struct log_job *job, struct err *err);
co_fn int co_log_job_close(struct log_job *job);
/* `name` is "" for any: -ENOENT with a message if the log has no such volume. */
int log_job_find_volume(struct log_job *job, const char *name, struct err *err);

/* Also where nothing is dirty but zeroes, which count no bytes. */
bool log_is_dirty(const struct wlog_volume_info *v);
/* "12.3 MiB dirty since 2026-11-30 10:12:01 (5 h ago)" */
const char *log_dirty_text(const struct wlog_volume_info *v, char *buf, size_t size);
/* A bar on a terminal, nothing elsewhere. `arg` is the verb. */
void log_progress(void *arg, uint64_t done, uint64_t total);
/* Set by the first SIGINT or SIGTERM, once log_catch_signals() was called. */
extern bool log_cancelled;
void log_catch_signals(void);

int cli_log_create(int argc, char **argv);
int cli_log_drain(int argc, char **argv);
int cli_log_rebuild(int argc, char **argv);
int cli_log_discard(int argc, char **argv);
