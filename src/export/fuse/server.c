/* SPDX-License-Identifier: MIT */
/*
 * FUSE server: exports, their receivers, the end. Design note in internal.h.
 *
 * The receiver waits with a poll on the ring, and reads without one. Where requests come one by one it polls again at once; where several are in flight it
 * reads on until there is none.
 */
#include "export/fuse/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"

#define IN_FLIGHT 64u
#define STARVED_NS 2000000ull
#define BURST 16u		/* requests read in one turn */

int fuse_server_create(struct fuse_server **ret, struct err *err)
{
	struct fuse_server *s = calloc(1, sizeof(*s));

	if (!s)
		return err_set(err, -ENOMEM, "FUSE server: out of memory");
	list_init(&s->exports);
	co_queue_init(&s->stop_q);
	s->unmounter = FUSE_UNGUARDED;
	*ret = s;
	return 0;
}

static void export_free(struct fuse_export *e)
{
	list_del(&e->node);
	if (e->mount.fd >= 0)
		close(e->mount.fd);
	rt_bufpool_destroy(e->pool);
	free(e->mount.path);
	free((char *)e->config.path);
	free(e->slab);
	free(e);
}

void fuse_server_destroy(struct fuse_server *s)
{
	if (!s)
		return;
	list_for_each_safe(&s->exports, n)
		export_free(container_of(n, struct fuse_export, node));
	if (s->unmounter >= 0)
		close(s->unmounter);
	free(s);
}

static struct fuse_export *export_new(struct fuse_server *s, const struct fuse_export_config *c, struct err *err)
{
	struct fuse_export *e = calloc(1, sizeof(*e));
	unsigned n = c->max_in_flight ? c->max_in_flight : IN_FLIGHT;

	if (!e) {
		err_errno(err, -ENOMEM, "%s", c->path);
		return NULL;
	}
	list_init(&e->node);
	list_init(&e->free);
	co_queue_init(&e->idle);
	e->s = s;
	e->config = *c;
	e->config.max_in_flight = n;
	e->config.path = strdup(c->path);
	e->v = c->volume;
	e->mount.fd = -1;
	e->number = UINT_MAX;	/* the unmounter does not know it */
	e->mode = c->access.mode ? c->access.mode : e->v->read_only ? 0400 : 0600;
	e->uid = c->access.uid == (uid_t)-1 ? geteuid() : c->access.uid;
	e->gid = c->access.gid == (gid_t)-1 ? getegid() : c->access.gid;
	e->mtime_ns = rt_wall_ns();
	e->slab = calloc(n, sizeof(*e->slab));
	if (!e->config.path || !e->slab || rt_bufpool_create(rt_self(), (uint64_t)n * FUSE_DATA_MAX, &e->pool, err) < 0) {
		err_errno(err, -ENOMEM, "%s", c->path);
		export_free(e);
		return NULL;
	}
	if (rt_bufpool_account(e->pool, "FUSE requests", err) < 0) {
		export_free(e);
		return NULL;
	}
	for (unsigned i = 0; i < n; i++)
		list_add_tail(&e->free, &e->slab[i].node);
	return e;
}

/* --- Requests --- */

static struct fuse_request *request_get(struct fuse_export *e)
{
	struct fuse_request *r = list_first(&e->free, struct fuse_request, node);

	r->data = rt_buf_tryget(e->pool, FUSE_DATA_MAX);
	if (!r->data)
		return NULL;
	list_del(&r->node);
	r->e = e;
	e->in_flight++;
	return r;
}

void fuse_request_put(struct fuse_request *r)
{
	struct fuse_export *e = r->e;

	rt_buf_put(e->pool, r->data);
	list_add_head(&e->free, &r->node);
	e->in_flight--;
	if (!co_queue_is_empty(&e->idle))
		co_queue_wake_all(&e->idle);
}

/* Reads one request. Its length, 0 at the end, or -errno: -EAGAIN if there is none. */
static ssize_t read_request(struct fuse_request *r)
{
	struct iovec iov[2] = { { r->message, FUSE_WRITE_HEAD }, { r->data, FUSE_DATA_MAX } };
	ssize_t got;

	do
		got = readv(r->e->mount.fd, iov, 2);
	while (got < 0 && (errno == EINTR || errno == ENOENT));
	if (got < 0)
		return errno == ENODEV || errno == ECONNABORTED ? 0 : -errno;
	if (got >= (ssize_t)sizeof(r->in) && got > (ssize_t)FUSE_WRITE_HEAD && r->in.opcode != FUSE_WRITE)
		memcpy(r->message + FUSE_WRITE_HEAD, r->data, min((size_t)got, sizeof(r->message)) - FUSE_WRITE_HEAD);
	r->len = (uint32_t)got;
	return got;
}

static co_fn void co_dispatch(struct fuse_request *r)
{
	if (r->len < sizeof(r->in)) {
		log_warn("%s: a request of %u bytes has no header", r->e->config.path, r->len);
		fuse_request_put(r);
	} else if (co_spawn("fuse request", co_fuse_request_main, r) < 0) {
		co_fuse_request_main(r);
	}
}

/* Takes requests until there is none (-EAGAIN), or the end (0), or -errno. */
static co_fn int co_take_requests(struct fuse_export *e)
{
	for (unsigned burst = 0;; burst++) {
		struct fuse_request *r;
		ssize_t got;

		while (!e->stopping && e->in_flight >= e->config.max_in_flight)
			co_queue_wait(&e->idle, "in-flight limit of the file");
		while (!(r = e->stopping ? NULL : request_get(e)) && !e->stopping)
			co_sleep_ns(STARVED_NS);	/* the budget refuses: others are giving memory back */
		if (!r)
			return 0;
		got = read_request(r);
		if (got <= 0) {
			fuse_request_put(r);
			return (int)got;
		}
		co_dispatch(r);
		if (!burst && e->in_flight <= 1)
			return -EAGAIN;	/* likely */
		if (burst % BURST == BURST - 1)
			co_yield();
	}
}

static co_fn int co_receive(struct fuse_export *e)
{
	int ret = -EAGAIN;

	while (ret == -EAGAIN && !e->stopping) {
		e->polls++;
		ret = co_io_poll(e->mount.fd, POLLIN, 0);
		if (ret >= 0)
			ret = co_take_requests(e);
	}
	return e->stopping ? 0 : ret;
}

static co_fn void co_receive_until_end(struct fuse_export *e)
{
	int ret = co_receive(e);

	if (ret < 0)
		log_error("%s: reading requests failed: %s; the file is dead", e->config.path, strerror(-ret));
	while (e->in_flight)
		co_queue_wait(&e->idle, "the file's last requests");
	e->ended = true;
}

static co_fn void co_export_main(void *arg)
{
	struct fuse_export *e = arg;
	struct fuse_server *s = e->s;

	co_receive_until_end(e);
	if (!e->stopping) {
		log_info("%s: was unmounted", e->config.path);
		fuse_export_detach(e, rt_now_exact_ns() + FUSE_DETACH_NS);
		if (e->config.unmounted)
			e->config.unmounted(e->config.unmounted_arg);
	}
	s->receivers--;
	co_queue_wake_all(&s->stop_q);
}

/* --- Begin --- */

struct attach {
	struct fuse_mount_config config;
	struct fuse_mount *mount;
	struct err *err;
};

static int attach_blocking(void *arg)
{
	struct attach *a = arg;

	return fuse_mount_attach(&a->config, a->mount, a->err);
}

/* Those that were unmounted stay in the list only for `status`. */
static void forget_ended(struct fuse_server *s)
{
	list_for_each_safe(&s->exports, n) {
		struct fuse_export *e = container_of(n, struct fuse_export, node);

		if (e->ended)
			export_free(e);
	}
}

co_fn int co_fuse_server_add(struct fuse_server *s, const struct fuse_export_config *config, struct err *err)
{
	struct fuse_export *e;
	char source[256];
	struct attach a = { .err = err };
	int ret;

	forget_ended(s);
	e = s->stopping ? NULL : export_new(s, config, err);
	if (!e) {
		err_set(err, -ESHUTDOWN, "%s: the server is stopping", config->path);
		return err_prefix(err, "FUSE");
	}
	snprintf(source, sizeof(source), "weir:%s", config->volume->name);
	a.config = (struct fuse_mount_config){
		.path = config->path, .source = source, .read_only = e->v->read_only, .allow_other = config->allow_other, .mode = e->mode,
	};
	a.mount = &e->mount;
	s->receivers++;	/* from now on: the end waits for it */
	ret = co_offload(attach_blocking, &a);
	if (!ret) {
		/* The end may have begun meanwhile. */
		ret = s->stopping ? -ESHUTDOWN : co_spawn("fuse receiver", co_export_main, e);
		if (ret < 0)
			fuse_mount_detach(&e->mount);
	}
	if (ret < 0) {
		export_free(e);
		s->receivers--;
		co_queue_wake_all(&s->stop_q);
		err_errno(err, ret, "%s", config->path);
		return err_prefix(err, "FUSE");
	}
	list_add_tail(&s->exports, &e->node);
	return 0;
}

co_fn int co_fuse_server_serve(struct fuse_server *s, const struct fuse_export_config *config, int fd, struct err *err)
{
	struct fuse_export *e = export_new(s, config, err);

	if (!e) {
		close(fd);
		return err->code;
	}
	fcntl(fd, F_SETFL, O_RDWR | O_NONBLOCK);
	e->mount.fd = fd;
	co_receive_until_end(e);
	export_free(e);
	return 0;
}

/* --- The end --- */

co_fn int co_fuse_server_stop(struct fuse_server *s, uint64_t deadline_ns)
{
	uint64_t until = min(deadline_ns, rt_now_exact_ns() + FUSE_DETACH_NS);

	s->stopping = true;
	list_for_each(&s->exports, n) {
		struct fuse_export *e = container_of(n, struct fuse_export, node);

		if (e->ended)
			continue;
		e->stopping = true;
		/* Not on a worker thread: those may all hang with an image. Nothing of this waits for the server itself. */
		if (!fuse_export_detach(e, until))
			log_warn("%s: cannot be unmounted; the next start on it does that, or: umount -l %s", e->config.path, e->mount.path);
		rt_io_shutdown(e->mount.fd);
		co_queue_wake_all(&e->idle);
	}
	while (s->receivers && co_queue_wait_until(&s->stop_q, deadline_ns, "the last requests of files"))
		;
	return s->receivers ? -ETIMEDOUT : 0;
}

/* --- What is there --- */

static json_t *export_status(const struct fuse_export *e)
{
	return json_pack("{s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "path", e->mount.path, "volume", e->v->name,
			 "mounted", e->initialised && !e->ended, "open", (json_int_t)e->opens, "in_flight", (json_int_t)e->in_flight,
			 "requests", (json_int_t)e->requests, "errors", (json_int_t)e->errors, "bytes_in", (json_int_t)e->bytes_in,
			 "bytes_out", (json_int_t)e->bytes_out, "flushes", (json_int_t)e->flushes, "durable_writes", (json_int_t)e->durable_writes);
}

void *fuse_server_status(struct fuse_server *s)
{
	json_t *list = json_array();

	list_for_each(&s->exports, n)
		json_array_append_new(list, export_status(container_of(n, struct fuse_export, node)));
	return list;
}

const char *fuse_server_path(struct fuse_server *s, unsigned i)
{
	list_for_each(&s->exports, n) {
		if (!i--)
			return container_of(n, struct fuse_export, node)->mount.path;
	}
	return NULL;
}

unsigned fuse_server_mounted(const struct fuse_server *s)
{
	unsigned n = 0;

	list_for_each(&s->exports, node)
		n += !container_of(node, struct fuse_export, node)->ended;
	return n;
}
