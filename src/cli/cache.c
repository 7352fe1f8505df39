/* SPDX-License-Identifier: MIT */
/* weir cache: makes and shows devices for the second level of the read cache. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "blk/spec.h"
#include "cache/cache.h"
#include "cli/cli.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/size.h"

#define BUFS (32u << 20)
#define LOOK_AT (256u << 10)	/* bytes at the start that tell what is there */
#define LEAST (64ull << 20)

struct cache_job {
	const char *verb;
	const char *device;
	int (*co_work)(struct cache_job *job, struct err *err);
	uint64_t size;
	bool force, json, made;
	int ret;
	struct err err;
};

static co_fn void co_job(void *arg)
{
	struct cache_job *job = arg;

	job->ret = job->co_work(job, &job->err);
}

static int run(struct cache_job *job)
{
	struct rt_bufpool *bufs = NULL;
	struct rt *rt = NULL;
	int ret = rt_create(NULL, &rt, &job->err);

	if (!ret)
		ret = rt_bufpool_create(rt, BUFS, &bufs, &job->err);
	if (!ret) {
		rt_set_bufs(rt, bufs);
		backends_register();
		ret = rt_run(rt, co_job, job);
		if (ret)
			err_errno(&job->err, ret, "the reactor failed");
	}
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	ret = ret ? ret : job->ret;
	return ret ? cli_fail(job->verb, &job->err) : 0;
}

/* --- create --- */

/* The path of a plain file or device; NULL for other drivers. */
static int path_of(const char *device, char **ret, struct err *err)
{
	struct disk_spec *spec;
	int rc = disk_spec_parse(device, &spec, err);

	if (rc)
		return rc;
	*ret = strcmp(spec->driver, "file") ? NULL : strdup(spec->rest);
	disk_spec_free(spec);
	return 0;
}

/* Creates the file, with its space, if there is none. */
static int make_file(struct cache_job *job, const char *path, struct err *err)
{
	struct stat st;
	char size[16];
	int fd, ret = 0;

	if (!stat(path, &st)) {
		if (job->size && !(S_ISREG(st.st_mode) && (uint64_t)st.st_size == job->size))
			return err_set(err, -EEXIST, "%s: is there already, and --size does not change it; remove it, or leave --size away", path);
		return 0;
	}
	if (errno != ENOENT)
		return err_errno(err, -errno, "%s", path);
	if (!job->size)
		return err_set(err, -ENOENT, "%s: does not exist; say how large it is to be with --size", path);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s: cannot be created", path);
	job->made = true;
	if (ftruncate(fd, (off_t)job->size) || (fallocate(fd, 0, 0, (off_t)job->size) && errno != EOPNOTSUPP))
		ret = err_errno(err, -errno, "%s: %s cannot be preallocated", path, size_format(job->size, size));
	close(fd);
	return ret;
}

/* Nothing that somebody may want is overwritten: a cache device is, if it is no other one's in use (the lock says so). */
static co_fn int co_check_content(struct disk *d, struct err *err)
{
	uint64_t len = min(d->size, (uint64_t)LOOK_AT);
	uint8_t *buf = aligned_alloc(4096, LOOK_AT);
	int rc = buf ? co_disk_read(d, 0, buf, len, 0) : -ENOMEM;

	if (rc)
		err_errno(err, rc, "%s: cannot be read", d->name);
	else if (!bytes_are_zero(buf, len) && memcmp(buf, "WEIRCACH", 8) && memcmp(buf + len / 4, "WEIRCACH", 8))
		rc = err_set(err, -EEXIST, "%s: holds something that is no cache; --force overwrites it", d->name);
	free(buf);
	return rc;
}

static co_fn int co_create(struct cache_job *job, struct err *err)
{
	struct disk *d = NULL;
	char *path = NULL, size[16];
	int ret = path_of(job->device, &path, err);

	if (!ret && path)
		ret = make_file(job, path, err);
	if (!ret)
		ret = co_disk_open(job->device, DISK_OPEN_RDWR | DISK_OPEN_LOG, &d, err);
	if (!ret && !job->force)
		ret = co_check_content(d, err);
	if (!ret)
		ret = co_cache_device_format(d, 0, err);
	if (!ret)
		printf("%s: %s, %s\n", job->device, job->made ? "created" : "formatted", size_format(d->size, size));
	co_disk_close(d);
	if (ret && job->made)
		unlink(path);
	free(path);
	return ret;
}

static int cache_create_verb(int argc, char **argv)
{
	struct cache_job job = { .verb = "cache create", .co_work = co_create };
	const struct cli_opt opts[] = {
		CLI_SIZE("size", 0, "SIZE", &job.size, LEAST, DISK_MAX_SIZE),
		CLI_FLAG("force", 'f', &job.force),
		CLI_END
	};

	job.device = cli_parse(job.verb, opts, "DEVICE", argc, argv)[0];
	return run(&job);
}

/* --- status --- */

static void print_json(const struct cache_device_info *info)
{
	json_t *list = json_array(), *o;
	char uuid[37];

	for (unsigned i = 0; i < info->volumes; i++) {
		const struct cache_device_volume *v = &info->volume[i];
		json_t *name = json_string(v->name);

		json_array_append_new(list, json_pack("{so sb sI sI}", "name", name ? name : json_string("?"), "settled", v->settled,
						      "size", (json_int_t)v->size, "used_ns", (json_int_t)v->wall_ns));
	}
	o = json_pack("{ss sI sI sI sI so}", "uuid", uuid_format(&info->uuid, uuid), "size", (json_int_t)info->size,
		      "segment_size", (json_int_t)info->segment_size, "segments", (json_int_t)info->segments,
		      "written_ns", (json_int_t)info->wall_ns, "volumes", list);
	json_dumpf(o, stdout, JSON_COMPACT);
	putchar('\n');
	json_decref(o);
}

static const char *time_text(uint64_t ns, char buf[static 32])
{
	time_t t = (time_t)(ns / 1000000000);
	struct tm tm;

	strftime(buf, 32, "%Y-%m-%d %H:%M:%S", localtime_r(&t, &tm));
	return buf;
}

static co_fn int co_status(struct cache_job *job, struct err *err)
{
	struct cache_device_info info;
	struct disk *d;
	char uuid[37], size[16], when[32];
	int ret = co_disk_open(job->device, DISK_OPEN_LOG, &d, err);

	if (ret)
		return ret;
	ret = co_cache_device_read(d, &info, err);
	co_disk_close(d);
	if (ret)
		return ret;
	if (job->json) {
		print_json(&info);
		return 0;
	}
	printf("%s: cache device %s\n", job->device, uuid_format(&info.uuid, uuid));
	printf("  size      %s in %u segments\n", size_format(info.size, size), info.segments);
	printf("  written   %s\n", time_text(info.wall_ns, when));
	for (unsigned i = 0; i < info.volumes; i++)
		printf("  volume    %s, %s, last used %s: %s\n", info.volume[i].name, size_format(info.volume[i].size, size),
		       time_text(info.volume[i].wall_ns, when),
		       info.volume[i].settled ? "of use as long as its image stays as it was" : "of no use (it was written to until the end)");
	return 0;
}

static int cache_status_verb(int argc, char **argv)
{
	struct cache_job job = { .verb = "cache status", .co_work = co_status };
	const struct cli_opt opts[] = { CLI_FLAG("json", 'j', &job.json), CLI_END };

	job.device = cli_parse(job.verb, opts, "DEVICE", argc, argv)[0];
	return run(&job);
}

static const struct cli_verb cache_verbs[] = {
	{ "create", cache_create_verb },
	{ "status", cache_status_verb },
	{ NULL, NULL }
};

int cli_cache(int argc, char **argv)
{
	return cli_dispatch("cache", cache_verbs, argc, argv);
}
