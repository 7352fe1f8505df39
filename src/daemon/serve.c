/* SPDX-License-Identifier: MIT */
/*
 * The life of a serving process.
 *
 * The end (SIGTERM, SIGINT, `shutdown`) has a second:
 *
 *	signal ── clients' last replies ── [drain] ── commit of every volume ── close ── exit
 *	          until +200 ms                       until +500 ms             until +650 ms
 *
 * An image that hangs never comes back from one of these steps. What its clients were told is durable is in the log after the commit, so the process
 * then exits without closing, which is what a crash would be, and the log is recovered at the next start. If even the reactor hangs, the alarm that the
 * signal handler sets ends the process. A drain stops these clocks; a second signal cuts it short.
 */
#include "daemon/serve.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "blk/spec.h"
#include "daemon/control.h"
#include "daemon/credentials.h"
#include "daemon/fuse.h"
#include "daemon/notify.h"
#include "daemon/internal.h"
#include "daemon/vhost.h"
#include "export/fuse/server.h"
#include "export/nbd/server.h"
#include "export/vhost/server.h"
#include "format/qcow2/qcow2.h"
#include "rt/buf.h"
#include "tls/tls.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/size.h"

#define MS 1000000ull
#define SIZES_MS 1000
#define CLIENTS_MS 200
#define COMMIT_MS 500
#define CLOSE_MS 650
#define ALARM_MS 900
#define BOUNCE_BYTES (64ull << 20)
#define VHOST_REQUESTS 512u	/* of one device */
#define FUSE_REQUESTS 64u	/* of one file */
#define REQUESTS_MAX 16384u	/* coroutines for requests; a stack costs two memory maps and a process has 65,530 */

/* --- Signals: the handler only posts to the reactor --- */

static struct serve *the_serve;
static struct rt_msg signal_msg[2];
static volatile sig_atomic_t signals;

static void signal_arrived(struct rt_msg *m)
{
	serve_stop(the_serve, false);
}

static void set_alarm(void)
{
	struct itimerval t = { .it_value.tv_usec = ALARM_MS * 1000 };

	setitimer(ITIMER_REAL, &t, NULL);
}

static void handle_stop(int sig)
{
	int n = signals;

	if (n >= (int)ARRAY_SIZE(signal_msg))
		return;
	signals = n + 1;
	/* With --drain the first signal starts it, and the clock runs from the second one on. */
	if (!the_serve->config->drain || n)
		set_alarm();
	rt_post(the_serve->rt, &signal_msg[n]);
}

static void handle_alarm(int sig)
{
	static const char text[] = "weir: stopping takes too long; exiting at once, the log is recovered at the next start\n";

	(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
	_exit(1);
}

static void watch_signals(struct serve *s)
{
	struct sigaction stop = { .sa_handler = handle_stop }, alrm = { .sa_handler = handle_alarm }, ign = { .sa_handler = SIG_IGN };

	the_serve = s;
	for (size_t i = 0; i < ARRAY_SIZE(signal_msg); i++)
		signal_msg[i].fn = signal_arrived;
	sigaddset(&stop.sa_mask, SIGTERM);
	sigaddset(&stop.sa_mask, SIGINT);
	sigaction(SIGALRM, &alrm, NULL);
	sigaction(SIGPIPE, &ign, NULL);
	sigaction(SIGTERM, &stop, NULL);
	sigaction(SIGINT, &stop, NULL);
}

void serve_stop(struct serve *s, bool drain)
{
	if (s->stop)
		s->cut_short = true;
	s->stop = true;
	s->drain |= drain;
	co_queue_wake_all(&s->stop_q);
	co_queue_wake_all(&s->memory.q);
}

/* --- Start --- */

static bool is_allowed(const struct serve_config *c, const char *name)
{
	unsigned i = 0;

	while (i < c->nallow && strcmp(c->allow[i], name))
		i++;
	return !c->nallow || i < c->nallow;
}

static int check_allowed(const struct serve *s, struct err *err)
{
	for (unsigned i = 0; i < s->config->nallow; i++)
		if (!graph_find(&s->graph, s->config->allow[i]))
			return err_set(err, -ENOENT, "there is no volume '%s' to be allowed (--allow-export)", s->config->allow[i]);
	return 0;
}

static co_fn int co_start_nbd(struct serve *s, struct err *err)
{
	struct nbd_server_config nc = {
		.max_requests = min(1024u, REQUESTS_MAX / s->graph.n),
		.client_ns = s->config->client_ns,
		.max_conns = s->config->nbd_conns,
		.client_conns = s->config->client_conns,
		.max_in_flight = s->config->client_requests,
		.idle_ns = s->config->idle_ns,
		.insecure = s->config->insecure,
		.tls = s->config->tls,
	};
	int ret = check_allowed(s, err);

	if (!ret && nc.tls != NBD_TLS_OFF)
		ret = co_load_credentials(s, err);
	nc.creds = s->tls;
	if (!ret)
		ret = nbd_server_create(&nc, &s->nbd, err);
	for (unsigned i = 0; i < s->graph.n && !ret; i++)
		if (is_allowed(s->config, s->graph.volumes[i]->name))
			ret = nbd_server_add_volume(s->nbd, s->graph.volumes[i], err);
	for (unsigned i = 0; i < s->config->nnbd && !ret; i++)
		ret = co_nbd_server_listen(s->nbd, s->config->nbd[i], err);
	return ret;
}

static void announce(struct serve *s)
{
	char size[16];
	const char *addr;

	for (unsigned i = 0; i < s->graph.n; i++) {
		struct volume *v = s->graph.volumes[i];

		log_info("volume '%s': %s%s%s%s", v->name, size_format(v->disk->size, size), s->graph.log ? ", with a write log" : "",
			 v->read_only ? ", read-only" : "", v->sync == VOLUME_SYNC_DISABLED ? ", flushes are ignored (--sync disabled): "
			 "a crash loses what was written last" : "");
	}
	for (unsigned i = 0; s->nbd && (addr = nbd_server_address(s->nbd, i)); i++)
		log_info("NBD on %s%s", addr, s->tls ? s->config->tls == NBD_TLS_REQUIRE ? ", TLS required" : ", TLS allowed" : "");
	for (unsigned i = 0; s->vhost && (addr = vhost_server_path(s->vhost, i)); i++)
		log_info("vhost-user on %s", addr);
	for (unsigned i = 0; s->fuse && (addr = fuse_server_path(s->fuse, i)); i++)
		log_info("file %s", addr);
	log_info("ready");
	notify_send("READY=1\nSTATUS=serving %u volume%s", s->graph.n, s->graph.n == 1 ? "" : "s");
}

/* --- Images that grow outside --- */

static co_fn void co_take_size(struct serve *s, unsigned i)
{
	uint64_t size = graph_grown(&s->graph, i);
	struct volume *v = s->graph.volumes[i];
	struct err err = ERR_INIT;
	char text[16];

	if (!size)
		return;
	if (co_volume_resize(v, size, &err) < 0)
		log_error("volume '%s': its image has grown to %s, but the volume cannot: %s", v->name, size_format(size, text), err.msg);
	else
		log_info("volume '%s': its image has grown, and so has the volume, to %s", v->name, size_format(size, text));
}

static co_fn void co_watch_sizes(void *arg)
{
	struct serve *s = arg;

	while (!s->stop) {
		co_queue_wait_until(&s->stop_q, rt_now_ns() + SIZES_MS * MS, "the next look at the sizes of images");
		for (unsigned i = 0; i < s->graph.n && !s->stop; i++)
			co_take_size(s, i);
	}
	s->sizing = false;
	co_queue_wake_all(&s->stop_q);
}

/* Only where there is such an image. */
static int watch_sizes(struct serve *s, struct err *err)
{
	unsigned i = 0;
	int ret;

	while (i < s->graph.n && !s->graph.opened[i]->ops->store_size)
		i++;
	if (i == s->graph.n)
		return 0;
	ret = co_spawn("sizes", co_watch_sizes, s);
	s->sizing = !ret;
	return ret ? err_errno(err, ret, "cannot watch the sizes of images") : 0;
}

/* --- Stop --- */

static void drain_progress(void *arg, uint64_t done, uint64_t total)
{
	struct serve *s = arg;
	char a[16], b[16];

	s->drain_done = done;
	s->drain_total = total;
	if (rt_now_ns() - s->drain_told_ns < 1000 * MS && done < total)
		return;
	s->drain_told_ns = rt_now_ns();
	log_info("draining: %s of %s", size_format(done, a), size_format(total, b));
	notify_send("STATUS=draining: %s of %s\nEXTEND_TIMEOUT_USEC=30000000", a, b);
}

static co_fn void co_drain_at_end(struct serve *s)
{
	int ret;

	s->draining = true;
	ret = co_wlog_drain(s->graph.log, drain_progress, s, &s->cut_short);
	s->draining = false;
	if (ret == -ECANCELED)
		log_warn("draining was cut short; what is left stays safe in the log");
	else if (ret < 0)
		log_error("draining failed: %s; what is left stays safe in the log", strerror(-ret));
	else
		log_info("drained: the images are complete without the log");
}

static co_fn void co_close_all(void *arg)
{
	struct serve *s = arg;

	while (s->sizing)
		co_queue_wait(&s->stop_q, "a volume that is being resized");
	s->error = co_graph_close(&s->graph);
	s->closed = true;
	co_queue_wake_all(&s->stop_q);
}

/* Leaves at once; sockets are gone already. */
static void exit_hung(struct serve *s, const char *what, bool safe)
{
	if (safe)
		log_warn("%s hangs; exiting without it: all that was written is safe in the log", what);
	else
		log_error("%s hangs; exiting without it: what was not flushed may be lost", what);
	_exit(safe ? 0 : 1);
}

static co_fn void co_stop(struct serve *s)
{
	uint64_t start = rt_now_exact_ns();
	const char *hung = NULL;
	char what[128] = "the image";
	int clients = 0, files = 0, ret;

	notify_send("STOPPING=1\nSTATUS=stopping");
	if (s->fuse)
		files = co_fuse_server_stop(s->fuse, start + CLIENTS_MS * MS);
	if (s->vhost)
		clients = co_vhost_server_stop(s->vhost, start + CLIENTS_MS * MS);
	if (s->nbd) {
		ret = co_nbd_server_stop(s->nbd, start + CLIENTS_MS * MS);
		clients = clients ? clients : ret;
	}
	if (s->drain && s->graph.log && !s->cut_short)
		co_drain_at_end(s);
	control_stop(s->control);
	/* A drain may have taken long. */
	start = max(start, rt_now_exact_ns() - CLIENTS_MS * MS);
	ret = co_graph_commit(&s->graph, start + COMMIT_MS * MS, &hung);
	if (hung)
		snprintf(what, sizeof(what), "volume '%s'", hung);
	if (ret == -ETIMEDOUT)
		exit_hung(s, what, false);
	if (clients < 0 || files < 0)
		exit_hung(s, what, s->graph.log && !ret);
	s->error = ret;
	graph_cancel(&s->graph);
	if (co_spawn("close", co_close_all, s) < 0)
		co_close_all(s);
	while (!s->closed && co_queue_wait_until(&s->stop_q, start + CLOSE_MS * MS, "the volumes to close"))
		;
	if (!s->closed && s->graph.log) {
		struct wlog_info info;

		wlog_get_info(s->graph.log, &info);
		if (info.hanging)
			snprintf(what, sizeof(what), "write log device %.100s", info.hanging);
	}
	/* All but the cache's device is closed: nothing is lost with it. */
	if (!s->closed && !s->graph.n && !s->graph.log && !ret) {
		log_warn("the cache device hangs; exiting without it");
		_exit(0);
	}
	if (!s->closed)
		exit_hung(s, what, s->graph.log && !ret);
	s->error = s->error ? s->error : ret;
}

static co_fn void co_serve_main(void *arg)
{
	struct serve *s = arg;
	struct err *err = s->err;
	int ret = fuse_clear_paths(s->config, err);

	if (!ret)
		ret = co_graph_open(&s->graph, &s->config->graph, s->memory.b, err);
	s->opened = !ret;
	if (!ret && s->config->nnbd)
		ret = co_start_nbd(s, err);
	if (!ret && s->config->nvhost)
		ret = co_start_vhost(s, err);
	if (!ret && s->config->nfuse)
		ret = co_start_fuse(s, err);
	if (!ret && s->config->control)
		ret = control_start(s, s->config->control, &s->control, err);
	if (!ret)
		ret = watch_sizes(s, err);
	if (!ret)
		ret = memory_start(s, err);
	if (!ret)
		ret = serve_confine(s, err);
	if (!ret) {
		if (s->tls)
			watch_hangup(s);
		announce(s);
		pressure_start(s);
		while (!s->stop)
			co_queue_wait(&s->stop_q, "the end");
	}
	if (s->tls)
		ignore_hangup();
	/* Who works until the end is told also where the start has failed. */
	if (!s->stop)
		serve_stop(s, false);
	if (s->opened)
		co_stop(s);
	if (!ret && s->error)
		ret = err_errno(err, s->error, "not everything could be written at the end");
	s->error = ret;
	nbd_server_destroy(s->nbd);
	tls_creds_free(s->tls);
	vhost_server_destroy(s->vhost);
	fuse_server_destroy(s->fuse);
}

int serve_run(const struct serve_config *config, struct err *err)
{
	struct serve s = { .config = config, .err = err, .drain = config->drain };
	unsigned ndisks = max(config->graph.ndisks, 1u);
	struct rt_config rc = {
		.coroutines = min(1024u * ndisks * (config->nnbd > 0) + VHOST_REQUESTS * config->nvhost +
				  FUSE_REQUESTS * config->nfuse, REQUESTS_MAX) + 1024 + config->nbd_conns,
		.spin_ns = config->poll_ns,
		/* An image on a cluster that hangs may hold one of them. */
		.offload_threads = 4 + ndisks,
	};
	struct rt_bufpool *bounce = NULL;
	int ret;

	backends_register();
	disk_register_format(&qcow2_format);
	if (config->aio)
		disk_set_default("aio", config->aio);
	if (config->cache)
		disk_set_default("cache", config->cache);
	co_queue_init(&s.stop_q);
	ret = rt_create(&rc, &s.rt, err);
	if (ret < 0)
		return ret;
	ret = memory_init(&s, err);
	if (!ret)
		ret = rt_bufpool_create(s.rt, BOUNCE_BYTES, &bounce, err);
	if (!ret)
		ret = rt_bufpool_account(bounce, "bounce buffers", err);
	if (!ret) {
		rt_set_bufs(s.rt, bounce);
		watch_signals(&s);
		ret = rt_run(s.rt, co_serve_main, &s);
		if (ret < 0)
			err_errno(err, ret, "the event loop failed");
		else
			ret = s.error;
	}
	memory_fini(&s);
	rt_bufpool_destroy(bounce);
	rt_destroy(s.rt);
	budget_destroy(s.memory.b);
	return ret;
}
