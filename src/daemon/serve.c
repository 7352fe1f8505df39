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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "blk/spec.h"
#include "daemon/control.h"
#include "daemon/credentials.h"
#include "daemon/devices.h"
#include "daemon/fuse.h"
#include "daemon/notify.h"
#include "daemon/internal.h"
#include "daemon/peers.h"
#include "daemon/split.h"
#include "daemon/vhost.h"
#include "export/fuse/server.h"
#include "export/nbd/server.h"
#include "export/vhost/server.h"
#include "format/qcow2/qcow2.h"
#include "tls/tls.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/pid_file.h"
#include "util/size.h"

#define MS 1000000ull
#define SIZES_MS 1000
#define CLIENTS_MS 200
#define COMMIT_MS 500
#define CLOSE_MS 650
#define ALARM_MS 900

/* --- Signals: the handler only posts to the reactor --- */

static struct serve *the_serve;
static struct rt_msg signal_msg[2];
static volatile sig_atomic_t signals;
/* What the alarm says: `last_words` once all that was written is safe and only closing is left, which is no failure. */
static char last_words[192];
static volatile sig_atomic_t all_safe;

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

	if (!all_safe) {
		(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
		_exit(1);
	}
	(void)!write(STDERR_FILENO, last_words, strlen(last_words));
	pid_file_remove(&the_serve->pid_file);	/* system calls only */
	_exit(0);
}

/* From here on nothing is lost, whatever hangs; and on a busy machine the alarm may well come before this thread has given up. */
static void prepare_alarm(const struct serve *s)
{
	struct wlog_info info;

	wlog_get_info(s->graph.log, &info);
	snprintf(last_words, sizeof(last_words), "weir: %s%.100s hangs until the last moment; exiting without it: all that was written is safe in the log\n",
		 info.hanging ? "write log device " : "what is being closed", info.hanging ? info.hanging : "");
	all_safe = 1;
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
		if (!graph_find(&s->graph, s->config->allow[i]) && !serve_of_volume((struct serve *)s, s->config->allow[i]))
			return err_set(err, -ENOENT, "there is no volume '%s' to be allowed (--allow-export)", s->config->allow[i]);
	return 0;
}

/* A server is made for the volumes of all reactors and knows only its own requests: none may be promised more than each of them has. */
static unsigned most_volumes(const struct serve *s)
{
	unsigned n[SPLIT_MAX] = { 0 }, most = 1;

	for (unsigned i = 0; i < s->split->nvolumes; i++) {
		unsigned part = s->split->volume[i].part;

		most = max(most, ++n[part]);
	}
	return most;
}

static int make_nbd(struct serve *s, struct err *err)
{
	const struct serve_config *c = s->config;
	struct nbd_server_config nc = {
		.max_requests = min(1024u, SERVE_REQUESTS_MAX / (s->split->n > 1 ? most_volumes(s) * s->split->n : s->graph.n)),
		.client_ns = c->client_ns,
		.max_conns = c->nbd_conns,
		.client_conns = c->client_conns,
		.max_in_flight = c->client_requests,
		.idle_ns = c->idle_ns,
		.insecure = c->insecure,
		.tls = c->tls,
		.creds = s->tls,
	};

	return nbd_server_create(&nc, &s->nbd, err);
}

/* All that are allowed, wherever they are, in the order of the command line. */
static int add_exports(struct serve *s, struct err *err)
{
	const struct split *sp = s->split;
	unsigned own = 0, n = sp->n > 1 ? sp->nvolumes : s->graph.n;
	int ret = 0;

	for (unsigned i = 0; i < n && !ret; i++) {
		unsigned part = sp->n > 1 ? sp->volume[i].part : 0;
		const char *name = sp->n > 1 ? sp->volume[i].name : s->graph.volumes[i]->name;
		struct serve *p = part && s->peers ? &s->peers[part - 1] : s;
		struct volume *v = part == s->number ? s->graph.volumes[own++] : NULL;

		if (!is_allowed(s->config, name) || (s->main && !v))
			continue;
		ret = v ? nbd_server_add_volume(s->nbd, v, err) : nbd_server_add_remote(s->nbd, p->nbd, p->rt, name, err);
	}
	return ret;
}

static co_fn int co_start_nbd(struct serve *s, struct err *err)
{
	int ret = check_allowed(s, err);

	if (!ret && s->config->tls != NBD_TLS_OFF)
		ret = co_load_credentials(s, err);
	if (!ret)
		ret = make_nbd(s, err);
	if (!ret)
		ret = add_exports(s, err);
	for (unsigned i = 0; i < s->config->nnbd && !ret; i++)
		ret = co_nbd_server_listen(s->nbd, s->config->nbd[i], err);
	return ret;
}

static int announce_volumes(void *arg)
{
	struct serve *s = arg;
	char size[16];

	for (unsigned i = 0; i < s->graph.n; i++) {
		struct volume *v = s->graph.volumes[i];

		log_info("volume '%s': %s%s%s%s", v->name, size_format(v->disk->size, size), s->graph.log ? ", with a write log" : "",
			 v->read_only ? ", read-only" : "", v->sync == VOLUME_SYNC_DISABLED ? ", flushes are ignored (--sync disabled): "
			 "a crash loses what was written last" : "");
	}
	return 0;
}

static int announce_exports(void *arg)
{
	struct serve *s = arg;
	const char *addr;

	for (unsigned i = 0; s->config->nnbd && (addr = nbd_server_address(s->nbd, i)); i++)
		log_info("NBD on %s%s", addr, s->tls ? s->config->tls == NBD_TLS_REQUIRE ? ", TLS required" : ", TLS allowed" : "");
	for (unsigned i = 0; s->vhost && (addr = vhost_server_path(s->vhost, i)); i++)
		log_info("vhost-user on %s", addr);
	for (unsigned i = 0; s->fuse && (addr = fuse_server_path(s->fuse, i)); i++)
		log_info("file %s", addr);
	return 0;
}

static co_fn void co_announce(struct serve *s)
{
	unsigned n = s->split->n > 1 ? s->split->nvolumes : s->graph.n;

	announce_volumes(s);
	for (unsigned i = 0; i < s->npeers; i++)
		co_serve_call(&s->peers[i], announce_volumes, &s->peers[i]);
	announce_exports(s);
	for (unsigned i = 0; i < s->npeers; i++)
		co_serve_call(&s->peers[i], announce_exports, &s->peers[i]);
	if (s->split->together)
		log_warn("--reactors: all on one; %s", s->split->together);
	log_info("ready");
	notify_send("READY=1\nSTATUS=serving %u volume%s", n, n == 1 ? "" : "s");
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
	co_devices_resize(s, v);
}

static co_fn void co_watch_sizes(void *arg)
{
	struct serve *s = arg;

	while (!s->stop) {
		co_queue_wait_until(&s->stop_q, rt_now_ns() + SIZES_MS * MS, "the next look at the sizes of images");
		for (unsigned i = 0; i < s->graph.n && !s->stop; i++)
			co_take_size(s, i);
	}
	s->sizing--;
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
	s->sizing += !ret;
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

/* All is safe. Whoever finds the file later knows: that process was killed, or could not write all it had. */
static void remove_pid_file(struct serve *s)
{
	int ret = pid_file_remove(&s->pid_file);

	if (ret < 0)
		log_warn("--pid-file: %s: cannot be removed: %s", s->config->pid_file, strerror(-ret));
}

/* Leaves at once; sockets are gone already. */
static void exit_hung(struct serve *s, const char *what, bool safe)
{
	if (safe)
		log_warn("%s hangs; exiting without it: all that was written is safe in the log", what);
	else
		log_error("%s hangs; exiting without it: what was not flushed may be lost", what);
	if (safe)
		remove_pid_file(s);
	_exit(safe ? 0 : 1);
}

static co_fn int co_end_clients(void *arg)
{
	struct serve *s = arg;
	int ret;

	s->stop = true;
	co_queue_wake_all(&s->stop_q);
	if (s->fuse)
		s->files = co_fuse_server_stop(s->fuse, s->end_ns);
	if (s->vhost)
		s->clients = co_vhost_server_stop(s->vhost, s->end_ns);
	if (s->nbd) {
		ret = co_nbd_server_stop(s->nbd, s->end_ns);
		s->clients = s->clients ? s->clients : ret;
	}
	return 0;
}

static co_fn int co_end_writes(void *arg)
{
	struct serve *s = arg;

	s->ending = true;
	co_queue_wake_all(&s->memory.q);
	s->flushed = co_graph_commit(&s->graph, s->end_ns, &s->hung);
	return 0;
}

static co_fn int co_end_graph(void *arg)
{
	struct serve *s = arg;

	graph_cancel(&s->graph);
	if (co_spawn("close", co_close_all, s) < 0)
		co_close_all(s);
	while (!s->closed && co_queue_wait_until(&s->stop_q, s->end_ns, "the volumes to close"))
		;
	return 0;
}

/* A step of the end, on all reactors until the same time. A reactor that does not answer at all is what the alarm is for. */
static co_fn void co_end_step(struct serve *s, uint64_t until, int (*fn)(void *arg))
{
	s->end_ns = until;
	for (unsigned i = 0; i < s->npeers; i++)
		s->peers[i].end_ns = until;
	co_everywhere(s, fn);
}

/* What came of a step on the other reactors, in the first's place. */
static void take_results(struct serve *s)
{
	for (unsigned i = 0; i < s->npeers; i++) {
		const struct serve *p = &s->peers[i];

		s->files = s->files ? s->files : p->files;
		s->clients = s->clients ? s->clients : p->clients;
		if (p->flushed == -ETIMEDOUT || !s->flushed)
			s->flushed = p->flushed;
		s->hung = s->hung ? s->hung : p->hung;
		s->error = s->error ? s->error : p->error;
	}
}

static bool all_closed(const struct serve *s)
{
	for (unsigned i = 0; i < s->npeers; i++)
		if (!s->peers[i].closed)
			return false;
	return s->closed;
}

static co_fn void co_stop(struct serve *s)
{
	uint64_t start = rt_now_exact_ns();
	char what[128] = "the image";
	int ret;

	notify_send("STOPPING=1\nSTATUS=stopping");
	co_end_step(s, start + CLIENTS_MS * MS, co_end_clients);
	take_results(s);
	if (s->drain && s->graph.log && !s->cut_short)
		co_drain_at_end(s);
	control_stop(s->control);
	/* A drain may have taken long. */
	start = max(start, rt_now_exact_ns() - CLIENTS_MS * MS);
	co_end_step(s, start + COMMIT_MS * MS, co_end_writes);
	take_results(s);
	ret = s->flushed;
	if (s->hung)
		snprintf(what, sizeof(what), "volume '%s'", s->hung);
	if (ret == -ETIMEDOUT)
		exit_hung(s, what, false);
	if (s->clients < 0 || s->files < 0)
		exit_hung(s, what, s->graph.log && !ret);
	if (s->served && s->graph.log && !ret)
		prepare_alarm(s);
	co_end_step(s, start + CLOSE_MS * MS, co_end_graph);
	take_results(s);
	if (s->error)
		all_safe = 0;
	if (!s->closed && s->graph.log) {
		struct wlog_info info;

		wlog_get_info(s->graph.log, &info);
		if (info.hanging)
			snprintf(what, sizeof(what), "write log device %.100s", info.hanging);
	}
	/* All but the cache's device is closed: nothing is lost with it. */
	if (!s->closed && !s->npeers && !s->graph.n && !s->graph.log && !ret) {
		log_warn("the cache device hangs; exiting without it");
		remove_pid_file(s);
		_exit(0);
	}
	if (!all_closed(s))
		exit_hung(s, what, s->graph.log && !ret);
	s->error = s->error ? s->error : ret;
}

/* --- All of it --- */

/* What a reactor serves by itself; on it. */
static co_fn int co_open_part(void *arg)
{
	struct serve *s = arg;
	struct err *err = s->err;
	int ret = co_graph_open(&s->graph, &s->config->graph, s->memory.b, err);

	s->opened = !ret;
	/* One that listens comes last: it offers what the others have. */
	if (!ret && s->main && s->split->whole->nnbd)
		ret = make_nbd(s, err);
	if (!ret && s->main && s->nbd)
		ret = add_exports(s, err);
	if (!ret && s->config->nvhost)
		ret = co_start_vhost(s, err);
	if (!ret && s->config->nfuse)
		ret = co_start_fuse(s, err);
	if (!ret)
		ret = watch_sizes(s, err);
	if (!ret && s->main && s->graph.cache)
		pressure_set(s, s->config->graph.cache_size);
	return ret;
}

static co_fn int co_open_peers(struct serve *s, struct err *err)
{
	int ret = 0;

	for (unsigned i = 0; i < s->npeers && !ret; i++) {
		s->peers[i].err = err;
		ret = co_serve_call(&s->peers[i], co_open_part, &s->peers[i]);
		if (ret < 0 && !err->code)
			err_errno(err, ret, "cannot open the volumes of a reactor");
	}
	return ret;
}

static int start_pressure(void *arg)
{
	pressure_start(arg);
	return 0;
}

static co_fn int co_destroy_servers(void *arg)
{
	struct serve *s = arg;

	nbd_server_destroy(s->nbd);
	vhost_server_destroy(s->vhost);
	fuse_server_destroy(s->fuse);
	s->nbd = NULL;
	s->vhost = NULL;
	s->fuse = NULL;
	return 0;
}

static bool any_opened(const struct serve *s)
{
	bool opened = s->opened;

	for (unsigned i = 0; i < s->npeers; i++)
		opened |= s->peers[i].opened;
	return opened;
}

static co_fn void co_serve_main(void *arg)
{
	struct serve *s = arg;
	struct err *err = s->err;
	int ret = fuse_clear_paths(s->split->whole, err);

	if (!ret)
		ret = co_open_part(s);
	if (!ret)
		ret = co_open_peers(s, err);
	if (!ret && s->config->nnbd)
		ret = co_start_nbd(s, err);
	if (!ret && s->config->control)
		ret = control_start(s, s->config->control, &s->control, err);
	if (!ret)
		ret = memory_start(s, err);
	if (!ret && s->config->pid_file)
		ret = pid_file_write(&s->pid_file, s->config->pid_file, err);
	if (!ret)
		ret = co_serve_confine(s, err);
	/* Its place was taken with the rights of before; commands are carried out with those that are left. */
	if (!ret && s->control)
		ret = control_accept(s->control, err);
	if (!ret) {
		if (s->tls)
			watch_hangup(s);
		s->served = true;
		co_announce(s);
		co_everywhere(s, start_pressure);
		while (!s->stop)
			co_queue_wait(&s->stop_q, "the end");
	}
	if (s->tls)
		ignore_hangup();
	/* Who works until the end is told also where the start has failed. */
	if (!s->stop)
		serve_stop(s, false);
	if (any_opened(s))
		co_stop(s);
	if (!ret && s->error)
		ret = err_errno(err, s->error, "not everything could be written at the end");
	s->error = ret;
	co_everywhere(s, co_destroy_servers);
	tls_creds_free(s->tls);
	s->tls = NULL;
}

static int run(struct serve *s, struct err *err)
{
	int ret = serve_reactor_create(s, s->split->whole, s->split->n, err);

	if (!ret)
		ret = peers_start(s, err);
	if (!ret) {
		watch_signals(s);
		ret = rt_run(s->rt, co_serve_main, s);
		if (ret < 0 && s->npeers) {
			/* The others have volumes open, and nobody is left who would end them: as if the process had been killed. */
			log_error("the event loop failed: %s", strerror(-ret));
			_exit(1);
		}
		ret = ret < 0 ? err_errno(err, ret, "the event loop failed") : s->error;
		/* A signal finds no reactor from now on. The alarm stays, for the rest of the end. */
		signal(SIGTERM, SIG_IGN);
		signal(SIGINT, SIG_IGN);
	}
	peers_end(s);
	memory_fini(s);
	serve_reactor_destroy(s);
	budget_destroy(s->memory.b);
	/* One that a killed process has left goes only after this one has served, and ended well. */
	if (!ret || (!s->served && !s->pid_file.found))
		remove_pid_file(s);
	else
		pid_file_leave(&s->pid_file);
	return ret;
}

int serve_run(const struct serve_config *config, struct err *err)
{
	struct split *split = malloc(sizeof(*split));
	struct serve s = { .err = err, .drain = config->drain, .split = split, .pid_file = PID_FILE_INIT };
	int ret;

	if (!split)
		return err_set(err, -ENOMEM, "out of memory");
	backends_register();
	disk_register_format(&qcow2_format);
	if (config->aio)
		disk_set_default("aio", config->aio);
	if (config->cache)
		disk_set_default("cache", config->cache);
	co_queue_init(&s.stop_q);
	ret = split_init(split, config, err);
	s.config = &split->part[0];
	/* Before anything is touched of another process that has this file. */
	if (!ret && config->pid_file)
		ret = pid_file_claim(&s.pid_file, config->pid_file, err);
	if (!ret)
		ret = run(&s, err);
	split_fini(split);
	free(split);
	return ret;
}
