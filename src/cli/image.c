/* SPDX-License-Identifier: MIT */
/*
 * weir image: what its commands share.
 */
#include "cli/image.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/qcow2/qcow2.h"
#include "rt/buf.h"
#include "rt/rt.h"
#include "util/bytes.h"

#define IMAGE_BUFS (64u << 20)
#define EXIT_BY_SIGNAL 128

const char *const image_format_names[] = { "raw", "qcow2", NULL };

/* --- The job, and signals --- */

static struct image_job *current;
static struct rt *current_rt;
static struct rt_msg stop_msg;

static void on_stop(struct rt_msg *m)
{
	if (!current)
		return;
	current->cancelled = true;
	for (int i = 0; i < IMAGE_JOB_DISKS; i++)
		if (current->cancel[i])
			disk_cancel(current->cancel[i]);
}

/* The second signal ends at once. */
static void on_signal(int sig)
{
	signal(sig, SIG_DFL);
	if (!current || current->signal)
		return;
	current->signal = sig;
	rt_post(current_rt, &stop_msg);
}

static void catch_signals(struct image_job *job, struct rt *rt)
{
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction sa = { .sa_handler = on_signal };

	current = job;
	current_rt = rt;
	stop_msg.fn = on_stop;
	sigemptyset(&sa.sa_mask);
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		sigaction(signals[i], &sa, NULL);
}

static co_fn void co_job(void *arg)
{
	struct image_job *job = arg;

	job->ret = job->co_work(job, &job->err);
}

int image_job_run(struct image_job *job)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	struct rt_config config = { .offload_threads = (unsigned)min(max(2 * cpus, 4l), 16l) };
	struct rt_bufpool *bufs = NULL;
	struct rt *rt = NULL;
	int ret = rt_create(&config, &rt, &job->err);

	if (!ret)
		ret = rt_bufpool_create(rt, IMAGE_BUFS, &bufs, &job->err);
	if (!ret) {
		rt_set_bufs(rt, bufs);
		backends_register();
		disk_register_format(&qcow2_format);
		catch_signals(job, rt);
		ret = rt_run(rt, co_job, job);
		if (ret)
			err_errno(&job->err, ret, "the reactor failed");
		current = NULL;
	}
	if (!ret)
		ret = job->ret;
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	image_progress_end();
	if (!ret)
		return job->status;
	if (job->err.code)
		cli_fail(job->verb, &job->err);
	return job->signal && job->cancelled ? EXIT_BY_SIGNAL + job->signal : job->status > 1 ? job->status : 1;
}

/* --- DISK strings --- */

static int parse_format(const char *name, enum image_format *ret, const char *text, struct err *err)
{
	for (int i = 0; image_format_names[i]; i++) {
		if (!strcmp(name, image_format_names[i])) {
			*ret = (enum image_format)i;
			return 0;
		}
	}
	return err_set(err, -EINVAL, "%.200s: format %.40s is not known; known are raw and qcow2 (qemu-img convert reads others)", text, name);
}

int image_take_format(struct disk_spec *spec, const char *option, enum image_format *ret, struct err *err)
{
	struct disk_spec *s = spec;
	const char *own = NULL, *dot;
	int rc;

	while (s->inner)
		s = s->inner;
	for (size_t i = 0; i < s->opts.n; i++)
		if (!strcmp(s->opts.v[i].key, "format"))
			own = s->opts.v[i].val;
	if (option && own && strcmp(option, own))
		return err_set(err, -EINVAL, "%.200s: the option says format %.40s, the name says %.40s; leave one away", spec->text, option, own);
	dot = strrchr(s->rest, '.');
	*ret = IMAGE_RAW;
	if (option || own)
		rc = parse_format(option ? option : own, ret, spec->text, err);
	else {
		rc = 0;
		if (!strcmp(s->driver, "file") && dot && !strcmp(dot, ".qcow2"))
			*ret = IMAGE_QCOW2;
	}
	if (rc)
		return rc;
	return image_set_format(spec, IMAGE_RAW, err);
}

int image_set_format(struct disk_spec *spec, enum image_format format, struct err *err)
{
	struct disk_spec *s = spec;
	int rc;

	while (s->inner)
		s = s->inner;
	rc = opts_add(&s->opts, "format", image_format_names[format]);
	return rc ? err_errno(err, rc, "%.200s", spec->text) : 0;
}

const char *image_path(const struct disk_spec *spec)
{
	return strcmp(spec->driver, "file") ? NULL : spec->rest;
}

char *image_beside(const char *image, const char *name)
{
	const char *slash = strrchr(image, '/');
	char *path;

	if (*name == '/' || !slash)
		return strdup(name);
	return asprintf(&path, "%.*s/%s", (int)(slash - image), image, name) < 0 ? NULL : path;
}

char *image_disk_text(const char *path)
{
	char *text = malloc(2 * strlen(path) + 6), *w = text;

	if (!text)
		return NULL;
	w = stpcpy(w, "file:");
	for (; *path; path++) {
		if (*path == ',')
			*w++ = ',';
		*w++ = *path;
	}
	*w = '\0';
	return text;
}

/* What is freed goes back to the file system, unless the operator says something else. */
static int free_for_good(struct disk_spec *spec, struct err *err)
{
	int rc;

	while (spec->inner)
		spec = spec->inner;
	if (strcmp(spec->driver, "file"))
		return 0;
	for (size_t i = 0; i < spec->opts.n; i++)
		if (!strcmp(spec->opts.v[i].key, "discard"))
			return 0;
	rc = opts_add(&spec->opts, "discard", "unmap");
	return rc ? err_errno(err, rc, "%s", spec->text) : 0;
}

/* Options that only the format's driver knows: the tables are read by hand here. */
static void drop_format_options(struct disk_spec *spec)
{
	static const char *const names[] = { "backing", "backing_fmt", "l2-cache-size", "cow-debt" };
	struct opts *o;

	while (spec->inner)
		spec = spec->inner;
	o = &spec->opts;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		for (size_t k = 0; k < o->n; k++) {
			if (strcmp(o->v[k].key, names[i]))
				continue;
			free(o->v[k].key);
			free(o->v[k].val);
			memmove(&o->v[k], &o->v[k + 1], (o->n - k - 1) * sizeof(o->v[0]));
			o->n--;
			break;
		}
	}
}

co_fn int co_image_open_file(const char *text, const char *format, unsigned flags, enum image_format *ret_format, struct disk **ret,
			     int64_t *ret_used, struct err *err)
{
	struct disk_spec *spec;
	struct stat st;
	int rc = disk_spec_parse(text, &spec, err);

	if (rc)
		return rc;
	rc = image_take_format(spec, format, ret_format, err);
	if (!rc && *ret_format == IMAGE_QCOW2)
		drop_format_options(spec);
	if (!rc && (flags & DISK_OPEN_RDWR))
		rc = free_for_good(spec, err);
	if (!rc)
		rc = co_disk_open_spec(spec, flags, ret, err);
	*ret_used = !rc && image_path(spec) && !stat(spec->rest, &st) && S_ISREG(st.st_mode) ? (int64_t)st.st_blocks * 512 : -1;
	disk_spec_free(spec);
	return rc;
}

/* --- Output --- */

static bool progress_shown;

void image_progress(const char *verb, bool always, uint64_t done, uint64_t total)
{
	static unsigned last = UINT32_MAX;
	unsigned permille = total ? (unsigned)((double)done * 1000.0 / (double)total) : 1000;

	if (permille == last || !(always || isatty(STDERR_FILENO)))
		return;
	last = permille;
	progress_shown = true;
	fprintf(stderr, "\rweir %s: %u.%u %%", verb, permille / 10, permille % 10);
}

void image_progress_end(void)
{
	if (progress_shown)
		fputc('\n', stderr);
	progress_shown = false;
}

int image_print_json(void *obj)
{
	int ret = obj ? json_dumpf(obj, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : -1;

	putchar('\n');
	json_decref(obj);
	return ret ? -ENOMEM : 0;
}

void *image_json_text(const char *text)
{
	json_t *j = json_string(text);
	char *copy;

	if (j)
		return j;
	copy = strdup(text);
	if (!copy)
		return NULL;
	for (char *p = copy; *p; p++)
		if ((unsigned char)*p >= 0x80)
			*p = '?';
	j = json_string(copy);
	free(copy);
	return j;
}

void image_print_text(const char *text, FILE *out)
{
	for (; *text; text++)
		putc((unsigned char)*text < ' ' || *text == 0x7f ? '?' : *text, out);
}

int cli_image(int argc, char **argv)
{
	static const struct cli_verb verbs[] = {
		{ "create", cli_image_create },
		{ "info", cli_image_info },
		{ "check", cli_image_check },
		{ "map", cli_image_map },
		{ "resize", cli_image_resize },
		{ "snapshot", cli_image_snapshot },
		{ "convert", cli_image_convert },
		{ NULL, NULL }
	};

	return cli_dispatch("image", verbs, argc, argv);
}
