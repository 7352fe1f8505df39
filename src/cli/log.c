/* SPDX-License-Identifier: MIT */
/*
 * weir log: what its commands share, and those that only read.
 */
#include "cli/log.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "blk/spec.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/size.h"

#define LOG_BUFS (64u << 20)

bool log_cancelled;

static void on_signal(int sig)
{
	log_cancelled = true;
	signal(sig, SIG_DFL);
}

void log_catch_signals(void)
{
	signal(SIGINT, on_signal);
	signal(SIGTERM, on_signal);
}

static co_fn void co_job(void *arg)
{
	struct log_job *job = arg;

	job->ret = job->co_work(job, &job->err);
}

int log_job_run(struct log_job *job, char **operands)
{
	struct rt_bufpool *bufs = NULL;
	struct rt *rt = NULL;
	int ret;

	job->device = operands;
	while (operands[job->ndev])
		job->ndev++;
	if (job->ndev > WLOG_MAX_DEVICES)
		cli_usage(job->verb, "\"%s\" is one device too many: a log has one, or two that mirror each other",
			  operands[WLOG_MAX_DEVICES]);
	ret = rt_create(NULL, &rt, &job->err);
	if (!ret)
		ret = rt_bufpool_create(rt, LOG_BUFS, &bufs, &job->err);
	if (!ret) {
		rt_set_bufs(rt, bufs);
		backends_register();
		ret = rt_run(rt, co_job, job);
		if (ret)
			err_errno(&job->err, ret, "the reactor failed");
	}
	if (!ret)
		ret = job->ret;
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	if (!ret)
		return 0;
	/* A command that has printed what is wrong has nothing to add. */
	return job->err.code ? cli_fail(job->verb, &job->err) : 1;
}

co_fn int co_log_job_open_devices(struct log_job *job, unsigned disk_flags, struct err *err)
{
	for (int i = 0; i < job->ndev; i++) {
		int ret = co_disk_open(job->device[i], disk_flags, &job->dev[i], err);

		if (ret) {
			job->dev[i] = NULL;
			co_log_job_close_devices(job);
			return ret;
		}
	}
	return 0;
}

co_fn void co_log_job_close_devices(struct log_job *job)
{
	for (int i = 0; i < job->ndev; i++) {
		co_disk_close(job->dev[i]);
		job->dev[i] = NULL;
	}
}

co_fn int co_log_job_open(struct log_job *job, struct err *err)
{
	unsigned flags = DISK_OPEN_LOG | (job->config.read_only ? 0 : DISK_OPEN_RDWR);
	int ret = co_log_job_open_devices(job, flags, err);

	if (ret)
		return ret;
	job->config.relic_dir = wlog_relic_dir();
	ret = co_wlog_open(job->dev, job->ndev, &job->config, &job->log, err);
	if (ret)
		co_log_job_close_devices(job);
	else
		memset(job->dev, 0, sizeof(job->dev));
	return ret;
}

co_fn int co_log_job_close(struct log_job *job)
{
	int ret = co_wlog_close(job->log);

	job->log = NULL;
	return ret;
}

int log_job_find_volume(struct log_job *job, const char *name, struct err *err)
{
	struct wlog_volume_info v;

	if (!*name)
		return 0;
	for (unsigned i = 0; !wlog_get_volume(job->log, i, &v); i++)
		if (!strcmp(v.name, name))
			return 0;
	return err_set(err, -ENOENT, "%s: has no volume \"%s\"; weir log status shows those it has", job->device[0], name);
}

static const char *wall_text(uint64_t wall_ns, char *buf, size_t size)
{
	time_t t = wall_ns / 1000000000;
	struct tm tm;

	strftime(buf, size, "%Y-%m-%d %H:%M:%S", localtime_r(&t, &tm));
	return buf;
}

bool log_is_dirty(const struct wlog_volume_info *v)
{
	return v->dirty;
}

const char *log_dirty_text(const struct wlog_volume_info *v, char *buf, size_t size)
{
	uint64_t now = rt_wall_ns();
	char amount[16], age[16], since[32];

	if (v->dirty_bytes)
		size_format(v->dirty_bytes, amount);
	else
		strcpy(amount, "zeroes");	/* or what a discard left, which takes no room in the log */
	if (!log_is_dirty(v))
		snprintf(buf, size, "clean");
	else if (!v->dirty_since_wall_ns)
		snprintf(buf, size, "%s dirty", amount);
	else
		snprintf(buf, size, "%s dirty since %s (%s ago)", amount, wall_text(v->dirty_since_wall_ns, since, sizeof(since)),
			 duration_format(now > v->dirty_since_wall_ns ? now - v->dirty_since_wall_ns : 0, age));
	return buf;
}

void log_progress(void *arg, uint64_t done, uint64_t total)
{
	static unsigned last = UINT32_MAX;
	unsigned permille = total ? done * 1000.0 / total : 1000;
	char a[16], b[16];

	if (!isatty(STDERR_FILENO) || permille == last)
		return;
	last = permille;
	fprintf(stderr, "\rweir %s: %s of %s, %u %% %s", (const char *)arg, size_format(done, a), size_format(total, b),
		permille / 10, permille == 1000 ? "\n" : "");
}

/* --- status --- */

struct read_args {
	bool json, dump;
	json_t *lines;
};

static int print_json(json_t *obj)
{
	int ret = obj ? json_dumpf(obj, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : -1;

	putchar('\n');
	json_decref(obj);
	return ret ? -ENOMEM : 0;
}

static void print_status(struct log_job *job)
{
	struct wlog_info i;
	struct wlog_volume_info v;
	char a[37], b[16], c[16], d[16], dirty[128], path[256];

	wlog_get_info(job->log, &i);
	printf("log      %s\n", uuid_format(&i.uuid, a));
	printf("device   %s%s%s\n", job->device[0], job->ndev > 1 ? ", mirrored by " : "", job->ndev > 1 ? job->device[1] : "");
	printf("state    %s%s%s\n", i.clean ? "stopped in order" : "not stopped in order",
	       i.degraded ? ", DEGRADED: one side of the mirror is missing or stale" : "", i.failed ? ", FAILED" : "");
	printf("space    %s, %s used, segments of %s\n", size_format(i.size, b), size_format(i.used_bytes, c), size_format(i.segment_size, d));
	if (wlog_relic_left(wlog_relic_dir(), &i.uuid, path, sizeof(path)))
		printf("memory   %s: a server was killed; what it had acknowledged and not written to the log is there, and is not in the figures below\n", path);
	printf("\n");
	if (wlog_get_volume(job->log, 0, &v)) {
		printf("no volumes\n");
		return;
	}
	printf("%-20s %-10s %-52s %s\n", "VOLUME", "SIZE", "DIRTY", "IMAGE");
	for (unsigned n = 0; !wlog_get_volume(job->log, n, &v); n++)
		printf("%-20s %-10s %-52s %s\n", v.name, size_format(v.size, b), log_dirty_text(&v, dirty, sizeof(dirty)), v.image);
}

static co_fn int co_status(struct log_job *job, struct err *err)
{
	struct read_args *a = job->arg;
	int ret = co_log_job_open(job, err);

	if (ret)
		return ret;
	if (a->json)
		ret = print_json(wlog_status(job->log));
	else
		print_status(job);
	co_log_job_close(job);
	return ret;
}

static int cli_log_status(int argc, char **argv)
{
	struct read_args a = { 0 };
	const struct cli_opt opts[] = { CLI_FLAG("json", 'j', &a.json), CLI_END };
	struct log_job job = { .verb = "log status", .config = { .read_only = true, .no_destage = true },
			       .co_work = co_status, .arg = &a };

	return log_job_run(&job, cli_parse(job.verb, opts, "DEVICE...", argc, argv));
}

/* --- check, dump --- */

static void on_line(void *arg, const char *text)
{
	struct read_args *a = arg;

	if (a->json)
		json_array_append_new(a->lines, json_string(text));
	else
		printf("%s\n", text);
}

static int print_report(const struct log_job *job, const struct wlog_check_report *r, int damage)
{
	struct read_args *a = job->arg;
	char bytes[16];

	if (a->json)
		return print_json(json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:b, s:O}", "device", job->device[0],
			"batches", (json_int_t)r->batches, "records", (json_int_t)r->records, "bytes", (json_int_t)r->bytes,
			"damaged", (json_int_t)r->damaged, "torn_tail_bytes", (json_int_t)r->torn_tail_bytes,
			"ok", !damage, a->dump ? "lines" : "findings", a->lines));
	printf("%s: %" PRIu64 " batches, %" PRIu64 " records, %s, ", job->device[0], r->batches, r->records,
	       size_format(r->bytes, bytes));
	if (r->damaged)
		printf("%" PRIu64 " DAMAGED\n", r->damaged);
	else
		printf("%s\n", damage ? "DAMAGED" : "no damage");
	return 0;
}

static co_fn int co_check(struct log_job *job, struct err *err)
{
	struct read_args *a = job->arg;
	struct wlog_check_report report = { 0 };
	int ret = co_log_job_open_devices(job, DISK_OPEN_LOG, err), printed;

	if (ret)
		return ret;
	a->lines = json_array();
	ret = a->lines ? co_wlog_check(job->dev, job->ndev, a->dump, on_line, a, &report, err) : -ENOMEM;
	co_log_job_close_devices(job);
	printed = !ret || ret == -EBADMSG ? print_report(job, &report, ret) : 0;
	json_decref(a->lines);
	return ret ? ret : printed;
}

static int check_or_dump(const char *verb, bool dump, int argc, char **argv)
{
	struct read_args a = { .dump = dump };
	const struct cli_opt opts[] = { CLI_FLAG("json", 'j', &a.json), CLI_END };
	struct log_job job = { .verb = verb, .co_work = co_check, .arg = &a };

	return log_job_run(&job, cli_parse(verb, opts, "DEVICE...", argc, argv));
}

static int cli_log_check(int argc, char **argv)
{
	return check_or_dump("log check", false, argc, argv);
}

static int cli_log_dump(int argc, char **argv)
{
	return check_or_dump("log dump", true, argc, argv);
}

int cli_log(int argc, char **argv)
{
	static const struct cli_verb verbs[] = {
		{ "create", cli_log_create },
		{ "status", cli_log_status },
		{ "check", cli_log_check },
		{ "dump", cli_log_dump },
		{ "drain", cli_log_drain },
		{ "rebuild", cli_log_rebuild },
		{ "discard", cli_log_discard },
		{ NULL, NULL }
	};

	return cli_dispatch("log", verbs, argc, argv);
}
