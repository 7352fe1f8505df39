/* SPDX-License-Identifier: MIT */
/*
 * File backend: regular files and block devices. What is where: backend/file.h.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "backend/drivers.h"
#include "backend/file.h"
#include "rt/rt.h"
#include "util/err.h"
#include "util/log.h"

#define FILE_OPTIONS "aio,cache,discard,locking"

static int close_blocking(void *arg)
{
	file_close_blocking(arg);
	return 0;
}

static co_fn void co_file_close(struct disk *d)
{
	struct file_disk *f = file_of(d);

	co_file_native_destroy(f->native);
	co_offload(close_blocking, f);
	disk_fini(d);
	free(f->path);
	free(f);
}

static void set_fact(json_t *obj, const char *key, enum fact fact)
{
	if (fact == FACT_UNKNOWN)
		json_object_set_new(obj, key, json_null());
	else
		json_object_set_new(obj, key, json_boolean(fact == FACT_YES));
}

static void file_status(struct disk *d, void *arg)
{
	struct file_disk *f = file_of(d);
	json_t *obj = arg;

	json_object_set_new(obj, "path", json_string(f->path) ?: json_string("(not UTF-8)"));
	json_object_set_new(obj, "kind", json_string(f->is_device ? "device" : "file"));
	json_object_set_new(obj, "aio", json_string(file_aio_name(f->aio)));
	json_object_set_new(obj, "cache", json_string(file_cache_name(f->cache)));
	json_object_set_new(obj, "o_direct", json_boolean(f->direct));
	json_object_set_new(obj, "lock", json_boolean(f->locked));
	json_object_set_new(obj, "discard", json_string(f->discard ? "unmap" : "ignore"));
	json_object_set_new(obj, "flush_ignored", json_boolean(f->no_flush));
	json_object_set_new(obj, "fua_by", json_string(f->no_flush ? "nothing" : f->refused & FILE_NO_DSYNC ? "fdatasync" : "dsync"));
	json_object_set_new(obj, "logical_block", json_integer(f->facts.logical_block));
	json_object_set_new(obj, "physical_block", json_integer(f->facts.physical_block));
	json_object_set_new(obj, "device", json_string(f->facts.device));
	set_fact(obj, "write_cache", f->facts.write_cache);
	set_fact(obj, "fua", f->facts.fua);
	set_fact(obj, "rotational", f->facts.rotational);
	json_object_set_new(obj, "in_memory", json_boolean(f->facts.in_memory));
	if (!f->is_device) {
		json_object_set_new(obj, "file_system", json_string(f->facts.fs));
		json_object_set_new(obj, "journal", json_string(f->facts.journal));
		json_object_set_new(obj, "source", json_string(f->facts.source));
		json_object_set_new(obj, "barriers", json_boolean(!f->facts.no_barriers));
		json_object_set_new(obj, "lazytime", json_boolean(f->facts.lazytime));
	}
}

static const struct disk_ops file_ops = {
	.driver = "file",
	.co_read = co_file_read,
	.co_write = co_file_write,
	.co_flush = co_file_flush,
	.co_discard = co_file_discard,
	.co_zero = co_file_zero,
	.co_extent = co_file_extent,
	.co_prefetch = co_file_prefetch,
	.co_resize = co_file_resize,
	.co_mark_get = co_file_mark_get,
	.co_mark_set = co_file_mark_set,
	.co_stamp = co_file_stamp,
	.co_identity = co_file_identity,
	.co_touch = co_file_touch,
	.co_close = co_file_close,
	.status = file_status,
};

static int read_options(struct disk_spec *spec, struct file_config *c, struct err *err)
{
	static const char *const aio[] = { "io_uring", "native", "threads", NULL };
	static const char *const cache[] = { "none", "directsync", "writeback", "writethrough", "unsafe", NULL };
	static const char *const discard[] = { "ignore", "unmap", NULL };
	static const char *const locking[] = { "auto", "on", "off", NULL };
	int a = FILE_AIO_IO_URING, k = -1, t = 1, l = FILE_LOCKING_AUTO;
	int rc = opts_enum(&spec->opts, "aio", aio, &a, err);

	if (!rc)
		rc = opts_enum(&spec->opts, "cache", cache, &k, err);
	if (!rc)
		rc = opts_enum(&spec->opts, "discard", discard, &t, err);
	if (!rc)
		rc = opts_enum(&spec->opts, "locking", locking, &l, err);
	if (rc) {
		err_prefix(err, "%.200s", c->path);
		return rc;
	}
	c->aio = (enum file_aio)a;
	c->cache_given = k >= 0;
	c->cache = k >= 0 ? (enum file_cache)k : FILE_CACHE_NONE;
	c->discard = t == 1;
	c->locking = (enum file_locking)l;
	if (c->aio == FILE_AIO_NATIVE && c->cache_given && c->cache != FILE_CACHE_NONE && c->cache != FILE_CACHE_DIRECTSYNC)
		return err_set(err, -EINVAL, "%s: aio=native needs O_DIRECT, which cache=%s is not; use cache=none, or aio=io_uring",
			       c->path, file_cache_name(c->cache));
	if ((c->flags & DISK_OPEN_LOG) && c->cache_given && c->cache == FILE_CACHE_UNSAFE)
		return err_set(err, -EINVAL, "%s: cache=unsafe on a write log would lose what it is there to keep; use cache=directsync",
			       c->path);
	return 0;
}

struct open_call {
	struct file_disk *f;
	const struct file_config *config;
	struct err *err;
};

static int open_blocking(void *arg)
{
	const struct open_call *c = arg;

	return file_open_blocking(c->f, c->config, c->err);
}

static co_fn int co_file_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	struct file_config config = { .path = spec->rest, .flags = flags };
	struct file_disk *f;
	struct open_call call = { .config = &config, .err = err };
	int rc;

	rc = read_options(spec, &config, err);
	if (rc)
		return rc;
	f = calloc(1, sizeof(*f));
	if (!f)
		return err_set(err, -ENOMEM, "%s: out of memory", spec->rest);
	f->fd = f->tail_fd = -1;
	f->path = strdup(spec->rest);
	rc = f->path ? disk_init(&f->d, &file_ops, spec->rest, NULL) : -ENOMEM;
	if (rc) {
		free(f->path);
		free(f);
		return err_set(err, rc, "%s: out of memory", spec->rest);
	}
	co_mutex_init(&f->tail_lock);
	co_mutex_init(&f->sync_lock);
	f->write_gen = 1;
	f->aio = config.aio;
	f->discard = config.discard;
	f->d.read_only = !(flags & DISK_OPEN_RDWR);
	call.f = f;
	rc = co_offload(open_blocking, &call);
	if (!rc && f->aio == FILE_AIO_NATIVE)
		rc = co_file_native_create(&f->native, err);
	if (rc) {
		co_file_close(&f->d);
		return rc;
	}
	if (f->no_flush)
		log_warn("%s: cache=unsafe: flushes are ignored, a crash of this host loses data", f->d.name);
	*ret = &f->d;
	return 0;
}

const struct disk_driver file_driver = {
	.name = "file",
	.options = FILE_OPTIONS,
	.co_open = co_file_open,
};
