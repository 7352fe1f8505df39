/* SPDX-License-Identifier: MIT */
/*
 * weir log rebuild: a new side for a mirror that has lost one.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blk/spec.h"
#include "cli/log.h"
#include "util/bytes.h"

#define POLL_NS 100000000ull
#define LOOK_AT (256u << 10)

struct rebuild_args {
	bool force;
	const char *new_device;
};

static co_fn int co_refuse_contents(struct disk *d, struct err *err)
{
	uint64_t len = min(d->size, (uint64_t)LOOK_AT);
	uint8_t *buf = malloc(LOOK_AT);
	int ret = buf ? co_disk_read(d, 0, buf, len, 0) : -ENOMEM;

	if (ret)
		err_errno(err, ret, "%s: cannot be read", d->name);
	else if (!bytes_are_zero(buf, len))
		ret = err_set(err, -EEXIST, "%s: holds something; --force overwrites it with the other side of the log", d->name);
	free(buf);
	return ret;
}

static co_fn int co_copy(struct log_job *job, struct err *err)
{
	struct rebuild_args *a = job->arg;
	struct wlog_info info;
	struct disk *d;
	int ret = co_disk_open(a->new_device, DISK_OPEN_RDWR | DISK_OPEN_LOG, &d, err);

	if (ret)
		return ret;
	if (!a->force)
		ret = co_refuse_contents(d, err);
	if (!ret)
		ret = co_wlog_rebuild(job->log, d, err);
	if (ret) {
		co_disk_close(d);
		return ret;
	}
	do {
		co_sleep_ns(POLL_NS);
		wlog_get_info(job->log, &info);
	} while (info.rebuilding && !info.failed);
	if (info.failed || info.degraded)
		return err_set(err, -EIO, "%s: could not be written; the log on %s is as it was, without a mirror", a->new_device,
			       job->device[0]);
	printf("%s: mirrors %s\n", a->new_device, job->device[0]);
	return 0;
}

static co_fn int co_rebuild(struct log_job *job, struct err *err)
{
	int ret = co_log_job_open(job, err), closed;

	if (ret)
		return ret;
	ret = co_copy(job, err);
	closed = co_log_job_close(job);
	return !ret && closed ? err_errno(err, closed, "%s: cannot be closed in order", job->device[0]) : ret;
}

int cli_log_rebuild(int argc, char **argv)
{
	struct rebuild_args a = { 0 };
	const struct cli_opt opts[] = { CLI_FLAG("force", 'f', &a.force), CLI_END };
	struct log_job job = { .verb = "log rebuild", .config = { .no_destage = true }, .co_work = co_rebuild, .arg = &a };
	char **operands = cli_parse(job.verb, opts, "DEVICE NEW", argc, argv);

	a.new_device = operands[1];
	operands[1] = NULL;
	return log_job_run(&job, operands);
}
