/* SPDX-License-Identifier: MIT */
/*
 * weir log rebuild: a new side for a mirror that has lost one.
 */
#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "blk/spec.h"
#include "cli/log.h"
#include "util/bytes.h"

#define POLL_NS 100000000ull
#define ANSWER_MAX 65536

struct rebuild_args {
	bool force;
	const char *control, *new_device;
};

/* --- By a server that has the log open --- */

static int connect_to(const char *path, FILE **ret, struct err *err)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), r = 0;

	if (strlen(path) >= sizeof(addr.sun_path))
		r = -ENAMETOOLONG;
	else
		strcpy(addr.sun_path, path);
	if (fd < 0 || (!r && connect(fd, (struct sockaddr *)&addr, sizeof(addr))))
		r = -errno;
	*ret = r ? NULL : fdopen(fd, "r+");
	if (*ret)
		return 0;
	if (fd >= 0)
		close(fd);
	return err_errno(err, r ? r : -ENOMEM, "%s: no server answers on this control socket", path);
}

/* One line of the answer. 1: progress; 0: the end; -errno. */
static int take_answer(struct log_job *job, const char *line, struct err *err)
{
	struct rebuild_args *a = job->arg;
	json_t *obj = json_loads(line, 0, NULL), *progress = json_object_get(obj, "progress");
	const char *text = json_string_value(json_object_get(obj, "error"));
	int ret = 1;

	if (progress)
		log_progress((void *)job->verb, json_integer_value(json_object_get(progress, "done")),
			     json_integer_value(json_object_get(progress, "total")));
	else
		ret = json_is_true(json_object_get(obj, "ok")) ? 0 :
		      err_set(err, -EIO, "%s: %s", a->control, text ? text : "the server gave no answer that makes sense");
	json_decref(obj);
	return ret;
}

/* The server's own folder is another one. */
static char *absolute(const char *device)
{
	char cwd[PATH_MAX], *ret;

	if (*device == '/' || strchr(device, ':') || !getcwd(cwd, sizeof(cwd)))
		return strdup(device);
	return asprintf(&ret, "%s/%s", cwd, device) < 0 ? NULL : ret;
}

static int ask_server(struct log_job *job, struct err *err)
{
	struct rebuild_args *a = job->arg;
	static char line[ANSWER_MAX];
	FILE *f;
	int ret = connect_to(a->control, &f, err);
	json_t *request = json_pack("{s:s, s:b}", "command", "log-rebuild", "force", a->force);
	char *device = a->new_device ? absolute(a->new_device) : NULL;

	if (device)
		json_object_set_new(request, "device", json_string(device));
	if (!ret && (json_dumpf(request, f, JSON_COMPACT) || fputc('\n', f) == EOF || fflush(f)))
		ret = err_errno(err, -EIO, "%s", a->control);
	for (int r = 1; !ret && r == 1;) {
		r = fgets(line, sizeof(line), f) ? take_answer(job, line, err) : err_set(err, -EPIPE, "%s: the server is gone", a->control);
		ret = r < 0 ? r : 0;
	}
	if (!ret)
		printf("%s: the mirror is complete\n", a->control);
	json_decref(request);
	free(device);
	if (f)
		fclose(f);
	return ret;
}

/* --- By itself --- */


static co_fn int co_copy(struct log_job *job, struct err *err)
{
	struct rebuild_args *a = job->arg;
	struct wlog_info info;
	struct disk *d;
	int ret = co_disk_open(a->new_device, DISK_OPEN_RDWR | DISK_OPEN_LOG, &d, err);

	if (ret)
		return ret;
	if (!a->force)
		ret = co_wlog_check_blank(d, err);
	if (ret) {
		co_disk_close(d);
		return ret;
	}
	ret = co_wlog_rebuild(job->log, d, err);
	if (ret)
		return ret;
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
	const struct cli_opt opts[] = { CLI_FLAG("force", 'f', &a.force), CLI_STR("control", 0, "PATH", &a.control), CLI_END };
	struct log_job job = { .verb = "log rebuild", .config = { .no_destage = true }, .co_work = co_rebuild, .arg = &a };
	char **operands = cli_parse(job.verb, opts, "[DEVICE] [NEW]", argc, argv);

	if (a.control) {
		a.new_device = operands[0];
		if (a.new_device && operands[1])
			cli_usage(job.verb, "with --control the server knows DEVICE; give only NEW");
		return ask_server(&job, &job.err) < 0 ? cli_fail(job.verb, &job.err) : 0;
	}
	if (!operands[0] || !operands[1])
		cli_usage(job.verb, "needs DEVICE and NEW, or --control PATH of the server that has the log open");
	a.new_device = operands[1];
	operands[1] = NULL;
	return log_job_run(&job, operands);
}
