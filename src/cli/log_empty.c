/* SPDX-License-Identifier: MIT */
/*
 * weir log drain and weir log discard: two ways to get rid of dirty data.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blk/spec.h"
#include "cli/log.h"
#include "util/bytes.h"
#include "util/size.h"

struct empty_args {
	const char *volume;	/* "": all */
	struct cli_list image;	/* NAME=DISK: where the image is now */
	bool force, ignore_damage;
};

static bool is_chosen(const struct empty_args *a, const struct wlog_volume_info *v)
{
	return !*a->volume || !strcmp(a->volume, v->name);
}

/* The chosen dirty volumes, noted before anything changes. The count, or -ENOENT. */
static int list_dirty(struct log_job *job, struct wlog_volume_info v[static WLOG_MAX_VOLUMES], struct err *err)
{
	struct empty_args *a = job->arg;
	int ret = log_job_find_volume(job, a->volume, err), n = 0;

	if (ret)
		return ret;
	for (unsigned i = 0; n < WLOG_MAX_VOLUMES && !wlog_get_volume(job->log, i, &v[n]); i++)
		if (log_is_dirty(&v[n]) && is_chosen(a, &v[n]))
			n++;
	if (!n)
		printf("%s: nothing is dirty\n", job->device[0]);
	return n;
}

static co_fn int co_close_in_order(struct log_job *job, int ret, struct err *err)
{
	int closed = co_log_job_close(job);

	return !ret && closed ? err_errno(err, closed, "%s: cannot be closed in order", job->device[0]) : ret;
}

/* Where the image is: what the log has noted, or what --image says. */
static const char *image_of(const struct empty_args *a, const struct wlog_volume_info *v)
{
	size_t len = strlen(v->name);

	for (int i = 0; i < a->image.n; i++)
		if (!strncmp(a->image.v[i], v->name, len) && a->image.v[i][len] == '=')
			return a->image.v[i] + len + 1;
	return v->image;
}

static co_fn int co_attach(struct log_job *job, const struct wlog_volume_info *v, bool discard, struct disk **ret, struct err *err)
{
	struct wlog_volume_config config = { .destage = v->destage, .discard_log = discard };
	struct disk *image;
	int rc = co_disk_open(image_of(job->arg, v), DISK_OPEN_RDWR, &image, err);

	if (rc)
		return rc;
	rc = co_wlog_attach(job->log, v->name, image, &config, ret, err);
	if (rc)
		co_disk_close(image);
	return rc;
}

/* --- drain --- */

static void on_lost(void *arg, const char *volume, uint64_t rno, uint64_t off, uint64_t len)
{
	uint64_t *lost = arg;

	*lost += len;
	printf("%s: LOST: bytes %llu+%llu (record %llu)\n", volume, (unsigned long long)off, (unsigned long long)len, (unsigned long long)rno);
}

static co_fn int co_drain_one(struct log_job *job, const struct wlog_volume_info *v, struct err *err)
{
	struct disk *volume;
	char amount[16];
	int ret = co_attach(job, v, false, &volume, err);

	if (ret)
		return err_prefix(err, "volume %s", v->name);
	ret = co_wlog_drain(job->log, log_progress, (void *)job->verb, &log_cancelled);
	if (ret == -ECANCELED)
		err_set(err, ret, "stopped; what is not in %s yet stays safe in the log", v->image);
	else if (ret)
		err_set(err, ret, "volume %s: the image %s could not be written, or a record of the log is damaged (said above); what is not in "
			"the image yet stays in the log. See `weir log check`; --ignore-damage writes all but what is damaged", v->name, v->image);
	else
		printf("%s: %s written to %s\n", v->name, v->dirty_bytes ? size_format(v->dirty_bytes, amount) : "zeroes", image_of(job->arg, v));
	co_disk_close(volume);
	return ret;
}

/* One volume after the other: each one's image is opened only while it is written. */
static co_fn int co_drain(struct log_job *job, struct err *err)
{
	static struct wlog_volume_info v[WLOG_MAX_VOLUMES]; /* too much for the stack of a coroutine */
	int ret = co_log_job_open(job, err), n;

	if (ret)
		return ret;
	n = list_dirty(job, v, err);
	log_catch_signals();
	for (int i = 0; i < n && !ret; i++)
		ret = co_drain_one(job, &v[i], err);
	return co_close_in_order(job, n < 0 ? n : ret, err);
}

int cli_log_drain(int argc, char **argv)
{
	struct empty_args a = { .volume = "" };
	uint64_t lost = 0;
	char amount[16];
	const struct cli_opt opts[] = {
		CLI_STR("volume", 0, "NAME", &a.volume),
		CLI_LIST("image", 0, "NAME=DISK", &a.image),
		CLI_FLAG("ignore-damage", 0, &a.ignore_damage),
		CLI_END
	};
	struct log_job job = { .verb = "log drain", .co_work = co_drain, .arg = &a };
	char **operands = cli_parse(job.verb, opts, "DEVICE...", argc, argv);

	job.config = (struct wlog_config){ .no_destage = true, .ignore_damage = a.ignore_damage, .on_lost = on_lost, .on_lost_arg = &lost };
	int status = log_job_run(&job, operands);

	if (lost)
		printf("%s are lost; the images hold there what they held before\n", size_format(lost, amount));
	return status;
}

/* --- discard --- */

/* Through the image where it can be opened, so that its mark goes too. */
static co_fn int co_discard_one(struct log_job *job, const struct wlog_volume_info *v, struct err *err)
{
	struct err why = ERR_INIT;
	struct disk *volume;
	char text[128];
	int ret = co_attach(job, v, true, &volume, &why);

	log_dirty_text(v, text, sizeof(text));
	if (!ret) {
		co_disk_close(volume);
	} else {
		fprintf(stderr, "weir %s: %s: %s; if the image carries this log's mark, it keeps it\n", job->verb, v->name, why.msg);
		ret = co_wlog_drop_volume(job->log, v->name, err);
	}
	if (!ret)
		printf("%s: dropped, was %s\n", v->name, text);
	return ret;
}

static co_fn int co_discard(struct log_job *job, struct err *err)
{
	struct empty_args *a = job->arg;
	static struct wlog_volume_info v[WLOG_MAX_VOLUMES]; /* too much for the stack of a coroutine */
	int ret = co_log_job_open(job, err), n;
	char text[128];

	if (ret)
		return ret;
	n = list_dirty(job, v, err);
	for (int i = 0; i < n && !ret; i++) {
		if (a->force)
			ret = co_discard_one(job, &v[i], err);
		else
			printf("%s: %s, of %s\n", v[i].name, log_dirty_text(&v[i], text, sizeof(text)), v[i].image);
	}
	if (n > 0 && !a->force)
		ret = err_set(err, -EEXIST, "%s: nothing was dropped; what is listed would be lost, --force drops it", job->device[0]);
	return co_close_in_order(job, n < 0 ? n : ret, err);
}

int cli_log_discard(int argc, char **argv)
{
	struct empty_args a = { .volume = "" };
	const struct cli_opt opts[] = {
		CLI_STR("volume", 0, "NAME", &a.volume),
		CLI_FLAG("force", 'f', &a.force),
		CLI_FLAG("ignore-damage", 0, &a.ignore_damage),
		CLI_END
	};
	struct log_job job = { .verb = "log discard", .co_work = co_discard, .arg = &a };
	char **operands = cli_parse(job.verb, opts, "DEVICE...", argc, argv);

	job.config = (struct wlog_config){ .no_destage = true, .read_only = !a.force, .ignore_damage = a.ignore_damage };
	return log_job_run(&job, operands);
}
