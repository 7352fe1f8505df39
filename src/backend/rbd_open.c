/* SPDX-License-Identifier: MIT */
/*
 * rbd: open and close.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/drivers.h"
#include "backend/rbd.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/size.h"

#define OPEN_TIMEOUT_NS 45000000000ull
#define MAX_ZERO (1u << 30)
#define CONFIG_MAX 512
#define ATOMIC 4096
#define DEPTH 64		/* of some 100 placement groups a write in flight finds a few that others do not hold up */

struct opening {
	struct rbd_disk *r;
	struct disk_spec *spec;
	const char *conf, *user;
	bool rdwr;
	uint64_t timeout_ns, discard_gran;
	struct err *err;
};

/* --- The name --- */

static int parse_name(struct rbd_disk *r, const char *rest, struct err *err)
{
	const char *slash = strchr(rest, '/'), *last = strrchr(rest, '/'), *at = last ? strchr(last, '@') : NULL, *end;

	end = at ? at : rest + strlen(rest);
	if (!slash || slash == rest || end == last + 1 || (at && !at[1]) || (slash != last && (last == slash + 1 || memchr(slash + 1, '/', last - slash - 1))))
		return err_set(err, -EINVAL, "rbd:%.200s: is no name of an image; write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE or rbd:POOL/IMAGE@SNAPSHOT", rest);
	r->pool = strndup(rest, slash - rest);
	r->ns = slash != last ? strndup(slash + 1, last - slash - 1) : NULL;
	r->image = strndup(last + 1, end - last - 1);
	r->snap = at ? strdup(at + 1) : NULL;
	if (!r->pool || !r->image || (slash != last && !r->ns) || (at && !r->snap))
		return err_errno(err, -ENOMEM, "rbd:%.200s", rest);
	return 0;
}

/* --- Connecting; on an offload thread --- */

static int read_conf(struct opening *o)
{
	struct rbd_disk *r = o->r;
	int ret = r->api->rados_create(&r->cluster, o->user);

	if (ret)
		return err_errno(o->err, ret, "%s: librados", r->disk.name);
	ret = r->api->rados_conf_read_file(r->cluster, o->conf);
	if (ret)
		return err_errno(o->err, ret, "%s: cannot read Ceph's configuration %s; say which it is with conf=FILE", r->disk.name,
				 o->conf ? o->conf : getenv("CEPH_CONF") ? getenv("CEPH_CONF") : "/etc/ceph/ceph.conf");
	ret = r->api->rados_conf_parse_env(r->cluster, NULL);
	return ret ? err_errno(o->err, ret, "%s: the environment's CEPH_ARGS", r->disk.name) : 0;
}

static int set_conf(struct opening *o, const char *key, const char *val)
{
	int ret = o->r->api->rados_conf_set(o->r->cluster, key, val);

	return ret ? err_errno(o->err, ret, "%s: Ceph does not take %s=%.80s", o->r->disk.name, key, val) : 0;
}

/* Ours first, then what the operator says. What Ceph does not know is left for others, who complain. */
static int set_options(struct opening *o)
{
	struct opts *opts = &o->spec->opts;
	char seconds[24], buf[1024];
	int ret = set_conf(o, "rbd_cache", "false");

	snprintf(seconds, sizeof(seconds), "%llu", (unsigned long long)(o->timeout_ns / 1000000000 + 1));
	if (!ret)
		ret = set_conf(o, "client_mount_timeout", seconds);
	for (size_t i = 0; i < opts->n && !ret; i++) {
		struct opt *opt = &opts->v[i];

		if (opt->used || o->r->api->rados_conf_get(o->r->cluster, opt->key, buf, sizeof(buf)) == -ENOENT)
			continue;
		opt->used = true;
		ret = set_conf(o, opt->key, opt->val);
	}
	/* A write may be given up while librbd still has it: see rbd.h, (3). */
	return ret ? ret : set_conf(o, "rbd_disable_zero_copy_writes", "true");
}

static int connect_cluster(struct opening *o)
{
	struct rbd_disk *r = o->r;
	const char *user = o->user ? o->user : "admin";
	int ret = r->api->rados_connect(r->cluster);

	if (ret == -EACCES || ret == -EPERM || ret == -ENOENT)
		return err_errno(o->err, ret, "%s: the cluster does not let client.%s in; give its name with id=USER and its key with keyring=FILE",
				 r->disk.name, user);
	if (ret)
		return err_errno(o->err, ret, "%s: cannot connect to the cluster as client.%s; are its monitors (mon_host) there?", r->disk.name, user);
	ret = r->api->rados_ioctx_create(r->cluster, r->pool, &r->io);
	if (ret == -ENOENT)
		return err_set(o->err, ret, "%s: the cluster has no pool \"%s\"", r->disk.name, r->pool);
	if (ret)
		return err_errno(o->err, ret, "%s: pool \"%s\"", r->disk.name, r->pool);
	if (r->ns)
		r->api->rados_ioctx_set_namespace(r->io, r->ns);
	return 0;
}

/* What holds for this image, wherever it is set: the image's and the pool's own configuration win over the client's. */
static int read_image_config(struct opening *o)
{
	struct rbd_disk *r = o->r;
	rbd_config_option_t *c = calloc(CONFIG_MAX, sizeof(*c));
	int n = CONFIG_MAX, ret = c ? r->api->rbd_config_image_list(r->img, c, &n) : -ENOMEM;
	bool plugin = false;

	if (ret) {
		free(c);
		return err_errno(o->err, ret, "%s: its configuration", r->disk.name);
	}
	for (int i = 0; i < n; i++) {
		if (!strcmp(c[i].name, "rbd_cache"))
			r->has_cache = !strcmp(c[i].value, "true");
		else if (!strcmp(c[i].name, "rbd_plugins"))
			plugin = *c[i].value;
		else if (!strcmp(c[i].name, "rbd_discard_granularity_bytes"))
			o->discard_gran = strtoull(c[i].value, NULL, 10);
	}
	r->api->rbd_config_image_list_cleanup(c, n);
	free(c);
	r->volatile_cache = r->has_cache || plugin || (r->features & RBD_FEATURE_JOURNALING);
	return 0;
}

static int open_image(struct opening *o)
{
	struct rbd_disk *r = o->r;
	rbd_image_info_t info;
	uint64_t unit, count;
	int ret = o->rdwr ? r->api->rbd_open(r->io, r->image, &r->img, NULL) : r->api->rbd_open_read_only(r->io, r->image, &r->img, r->snap);

	if (ret == -ENOENT)
		return err_set(o->err, ret, "%s: there is no such image%s in pool \"%s\"%s%s; `rbd create` makes one", r->disk.name,
			       r->snap ? " or snapshot" : "", r->pool, r->ns ? ", namespace " : "", r->ns ? r->ns : "");
	if (ret)
		return err_errno(o->err, ret, "%s: librbd cannot open it%s", r->disk.name, rbd_needs_caps(ret));
	ret = r->api->rbd_get_features(r->img, &r->features);
	if (!ret)
		ret = r->api->rbd_stat(r->img, &info, sizeof(info));
	if (!ret)
		ret = r->api->rbd_get_stripe_unit(r->img, &unit);
	if (!ret)
		ret = r->api->rbd_get_stripe_count(r->img, &count);
	if (ret)
		return err_errno(o->err, ret, "%s", r->disk.name);
	/* An image of the first format has no id, and no features. */
	if (r->api->rbd_get_id(r->img, r->id, sizeof(r->id)) < 0)
		r->id[0] = '\0';
	snprintf(r->header, sizeof(r->header), "rbd_header.%s", r->id);
	r->size = info.size;
	r->obj_size = info.obj_size;
	r->piece = count > 1 ? unit : info.obj_size;
	return read_image_config(o);
}

static int open_blocking(void *arg)
{
	struct opening *o = arg;
	int ret = rbd_api_load(&o->r->api, o->err);

	if (ret)
		return ret;
	ret = read_conf(o);
	if (!ret)
		ret = set_options(o);
	if (!ret)
		ret = connect_cluster(o);
	return ret ? ret : open_image(o);
}

static int close_blocking(void *arg)
{
	struct rbd_disk *r = arg;

	if (r->img)
		rbd_release(r);
	if (r->img)
		r->api->rbd_close(r->img);
	if (r->io)
		r->api->rados_ioctx_destroy(r->io);
	if (r->cluster)
		r->api->rados_shutdown(r->cluster);
	return 0;
}

/* --- Life --- */

co_fn void co_rbd_close(struct disk *d)
{
	struct rbd_disk *r = rbd_of(d);

	r->closing = true;
	rbd_tell_fence(r);
	rt_timer_cancel(&r->tick);
	co_queue_wake_all(&r->watch_wait);
	while (r->watching || !list_empty(&r->busy))
		co_queue_wait(&r->idle, "the Ceph cluster, to close an image");
	rt_watch_stop(r->watch);
	co_rbd_call(r, close_blocking, r);
	if (r->efd >= 0)
		close(r->efd);
	rt_bufpool_destroy(r->bounces);
	free(r->pool);
	free(r->ns);
	free(r->image);
	free(r->snap);
	disk_fini(d);
	free(r);
}

static void set_limits(struct rbd_disk *r, const struct opening *o)
{
	struct disk_limits *l = &r->disk.limits;
	uint32_t object = is_pow2(r->piece) && r->piece <= 1u << 30 ? (uint32_t)r->piece : 0, max_io = r->error_after_ns ? 4u << 20 : RT_BUF_MAX;

	r->disk.size = r->size;
	r->disk.read_only = !o->rdwr;
	*l = (struct disk_limits){
		.align = 1, .mem_align = 1, .atomic_unit = ATOMIC, .opt_io = (uint32_t)min(r->obj_size, (uint64_t)1 << 30),
		.object = object, .opt_depth = DEPTH, .max_io = max_io, .max_zero = MAX_ZERO,
		/* One write of librbd's within an object is one operation of RADOS, which is applied whole; but its cache, or a journal, does with a write what it likes. */
		.atomic_write = r->volatile_cache ? 0 : min(object, max_io),
		.discard_gran = (uint32_t)min(o->discard_gran, (uint64_t)1 << 30),
		/* Without DISK_UNMAP each byte of zeroes is written: nothing fast can be promised for all. */
		.fast_zero = false,
		/* Where nothing is volatile nothing needs FUA: the choke point takes it away. */
		.volatile_cache = r->volatile_cache, .multi_conn = true, .sole_writer = r->locked,
	};
}

static int check_flags(const struct rbd_disk *r, unsigned flags, struct err *err)
{
	if (flags & DISK_OPEN_LOG)
		return err_set(err, -ENOTSUP, "%s: a write log belongs on a fast device of this machine, or on an NBD server's, and not into the cluster it is to "
			       "make fast", r->disk.name);
	if (r->snap && (flags & DISK_OPEN_RDWR))
		return err_set(err, -EROFS, "%s: a snapshot cannot be written; open it with --read-only, or make a clone of it (rbd clone)", r->disk.name);
	return 0;
}

static co_fn int co_start(struct rbd_disk *r, struct opening *o, struct err *err)
{
	int ret = co_offload(open_blocking, o);

	if (ret)
		return ret;
	if (o->rdwr && r->locking && !(r->features & RBD_FEATURE_EXCLUSIVE_LOCK))
		return err_set(err, -ENOTSUP, "%s: the image has no exclusive lock, so nothing keeps a second writer away; give it one with `rbd feature enable "
			       "%s/%s exclusive-lock`, or open it with locking=off if you see to that yourself", r->disk.name, r->pool, r->image);
	if (o->rdwr && r->locking) {
		ret = co_rbd_take_lock(r, o->timeout_ns, err);
		if (ret)
			return ret;
	}
	set_limits(r, o);
	ret = rbd_start_io(r, err);
	if (ret)
		return ret;
	ret = co_spawn("rbd watcher", co_rbd_watcher, r);
	if (ret)
		return err_set(err, ret, "%s: too many coroutines are in use to open it; try again when less is going on", r->disk.name);
	r->watching = true;
	rbd_arm_tick(r);
	return 0;
}

/* With what it takes to find it: a log notes the name and opens the image by it. */
static void format_name(char *buf, size_t size, const struct opening *o)
{
	bool conf = o->conf && !strchr(o->conf, ','), user = o->user && !strchr(o->user, ',');

	snprintf(buf, size, "rbd:%s%s%s%s%s", o->spec->rest, conf ? ",conf=" : "", conf ? o->conf : "", user ? ",id=" : "", user ? o->user : "");
}

static co_fn int rbd_co_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	char name[256];
	struct rbd_disk *r = calloc(1, sizeof(*r));
	struct opening o = { .r = r, .spec = spec, .rdwr = flags & DISK_OPEN_RDWR, .timeout_ns = OPEN_TIMEOUT_NS, .err = err };
	int error;

	o.conf = opts_str(&spec->opts, "conf");
	o.user = opts_str(&spec->opts, "id");
	format_name(name, sizeof(name), &o);
	error = r ? disk_init(&r->disk, &rbd_ops, name, NULL) : -ENOMEM;
	if (error) {
		free(r);
		return err_errno(err, error, "%.200s", spec->text);
	}
	r->efd = -1;
	r->locking = true;
	list_init(&r->free);
	list_init(&r->busy);
	co_queue_init(&r->slot_wait);
	co_queue_init(&r->buf_wait);
	co_queue_init(&r->idle);
	co_queue_init(&r->watch_wait);
	co_mutex_init(&r->call_lock);
	error = opts_bool(&spec->opts, "locking", &r->locking, err);
	if (!error)
		error = opts_duration(&spec->opts, "error-after", &r->error_after_ns, err);
	if (!error)
		error = opts_duration(&spec->opts, "open-timeout", &o.timeout_ns, err);
	opts_str(&spec->opts, "format");
	if (!error)
		error = parse_name(r, spec->rest, err);
	if (!error)
		error = check_flags(r, flags, err);
	if (!error)
		error = co_start(r, &o, err);
	if (error) {
		co_rbd_close(&r->disk);
		return error;
	}
	*ret = &r->disk;
	return 0;
}

const struct disk_driver rbd_driver = {
	.name = "rbd",
	.options = "conf,id,locking,error-after,open-timeout",
	.any_option = true,
	.co_open = rbd_co_open,
};
