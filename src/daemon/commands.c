/* SPDX-License-Identifier: MIT */
/*
 * Control socket: the commands. Only `drain` and `log-rebuild` wait for a disk.
 */
#include "daemon/control.h"
#include "daemon/credentials.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/fuse.h"
#include "daemon/devices.h"
#include "daemon/gather.h"
#include "daemon/internal.h"
#include "export/fuse/server.h"
#include "export/nbd/server.h"
#include "export/vhost/server.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/size.h"

#define DEPTH_MAX 8		/* of a request; jansson recurses, and a coroutine's stack is small */
#define PROGRESS_NS (500 * 1000000ull)
#define POLL_NS (10 * 1000000ull)

/* Where the answers of one request go. */
struct answer {
	struct serve *s;
	const json_t *id;	/* NULL: the request has none */
	int (*co_send)(void *arg, const char *text, size_t len);
	void *arg;
};

/* Takes over `obj`, which may be NULL after a failed allocation. */
static co_fn int co_answer(struct answer *a, json_t *obj)
{
	char *text;
	int ret;

	if (obj && a->id)
		json_object_set(obj, "id", (json_t *)a->id);
	text = obj ? json_dumps(obj, JSON_COMPACT) : NULL;
	json_decref(obj);
	if (!text)
		return -ENOMEM;
	ret = a->co_send(a->arg, text, strlen(text));
	free(text);
	return ret;
}

static co_fn int co_answer_ok(struct answer *a, json_t *result)
{
	return co_answer(a, json_pack("{s:b, s:o}", "ok", 1, "result", result ? result : json_object()));
}

static co_fn int co_answer_error(struct answer *a, const char *fmt, const char *what)
{
	json_t *obj = json_pack("{s:b}", "ok", 0);
	json_t *text = what ? json_sprintf(fmt, what) : json_string(fmt);

	/* The text may hold what is no UTF-8. */
	json_object_set_new(obj, "error", text ? text : json_string("malformed request"));
	return co_answer(a, obj);
}

/* --- Facts --- */

static json_t *each_volume(struct serve *s, void *(*fn)(struct volume *))
{
	json_t *list = json_array();

	for (unsigned i = 0; i < s->graph.n; i++)
		json_array_append_new(list, fn(s->graph.volumes[i]));
	return list;
}

/* The first reactor counts for all. */
static json_t *process_memory(struct serve *s)
{
	return s->main ? json_null() : memory_status(s);
}

static json_t *volume_places(struct serve *s)
{
	json_t *list = each_volume(s, volume_status), *v;
	size_t i;

	json_array_foreach(list, i, v)
		json_object_set_new(v, "reactor", json_integer(s->number));
	return list;
}

static co_fn int co_status(struct answer *a, json_t *args)
{
	struct serve *s = a->s;
	json_t *r = json_pack("{s:s, s:I, s:s}", "version", WEIR_VERSION, "pid", (json_int_t)getpid(),
			      "state", s->draining ? "draining" : s->stop ? "stopping" : "serving");

	if (s->draining)
		json_object_set_new(r, "drain", json_pack("{s:I, s:I}", "done", (json_int_t)s->drain_done,
							  "total", (json_int_t)s->drain_total));
	json_object_set_new(r, "confined", json_pack("{s:i, s:b, s:b}", "uid", (int)geteuid(), "seccomp", s->confined.seccomp, "landlock", s->confined.landlock > 0));
	json_object_set_new(r, "volumes", volume_places(s));
	json_object_set_new(r, "log", s->graph.log ? wlog_status(s->graph.log) : json_null());
	json_object_set_new(r, "cache", s->graph.cache ? cache_status(s->graph.cache) : json_null());
	json_object_set_new(r, "memory", process_memory(s));
	json_object_set_new(r, "nbd", s->nbd ? nbd_server_status(s->nbd) : json_null());
	json_object_set_new(r, "vhost_user", s->vhost ? vhost_server_status(s->vhost) : json_null());
	json_object_set_new(r, "fuse", s->fuse ? fuse_server_status(s->fuse) : json_null());
	return co_answer_ok(a, r);
}

static json_t *names_of(struct serve *s)
{
	json_t *list = json_array();

	for (unsigned i = 0; i < s->graph.n; i++)
		json_array_append_new(list, json_string(s->graph.volumes[i]->name) ?: json_string("?"));
	return list;
}

/* The runtime's, and what the reactor's cache has of the memory that all have together. */
static json_t *reactor_figures(struct serve *s, json_t *runtime)
{
	json_t *r = json_copy(runtime);

	if (s->graph.cache)
		json_object_set_new(r, "cache_size", json_integer((json_int_t)cache_size(s->graph.cache)));
	return r;
}

static co_fn int co_stats(struct answer *a, json_t *args)
{
	struct rt_stats st;
	json_t *r = json_object();

	rt_get_stats(a->s->rt, &st);
	json_object_set_new(r, "volumes", each_volume(a->s, volume_stats));
	json_object_set_new(r, "cache", a->s->graph.cache ? cache_status(a->s->graph.cache) : json_null());
	json_object_set_new(r, "log", a->s->graph.log ? wlog_status(a->s->graph.log) : json_null());
	json_object_set_new(r, "memory", process_memory(a->s));
	json_object_set_new(r, "memory_pressure", json_pack("{s:I, s:I, s:I}", "events", (json_int_t)a->s->pressure.events,
		"cache_size", (json_int_t)a->s->pressure.size, "cache_wanted", (json_int_t)a->s->pressure.wanted));
	json_object_set_new(r, "names", names_of(a->s));
	json_object_set_new(r, "runtime", json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
		"turns", (json_int_t)st.turns, "switches", (json_int_t)st.switches, "ring_enters", (json_int_t)st.ring_enters,
		"sqes", (json_int_t)st.sqes, "cqes", (json_int_t)st.cqes, "posts", (json_int_t)st.posts,
		"offloads", (json_int_t)st.offloads, "spawned", (json_int_t)st.spawned,
		"coroutines", (json_int_t)st.coroutines_now, "coroutines_peak", (json_int_t)st.coroutines_peak));
	json_object_set_new(r, "reactors", json_pack("[o]", reactor_figures(a->s, json_object_get(r, "runtime"))));
	return co_answer_ok(a, r);
}

#define TASKS_MAX 4096

static void add_task(const struct rt_task_info *t, void *arg)
{
	if (json_array_size(arg) < TASKS_MAX)
		json_array_append_new(arg, json_pack("{s:s?, s:s?, s:I}", "name", t->name, "waits_for", t->why,
						     "since_ns", (json_int_t)t->since_ns));
}

/* What has an end, and how far it has got. */
static json_t *jobs(struct serve *s)
{
	json_t *list = json_array();
	struct wlog_info info = { 0 };

	if (s->graph.log)
		wlog_get_info(s->graph.log, &info);
	if (info.rebuilding)
		json_array_append_new(list, json_pack("{s:s, s:I, s:I}", "name", "log rebuild", "done", (json_int_t)info.rebuild_done,
						      "total", (json_int_t)info.rebuild_total));
	if (s->draining)
		json_array_append_new(list, json_pack("{s:s, s:I, s:I}", "name", "drain", "done", (json_int_t)s->drain_done,
						      "total", (json_int_t)s->drain_total));
	return list;
}

static co_fn int co_tasks(struct answer *a, json_t *args)
{
	json_t *tasks = json_array();

	rt_for_each_task(a->s->rt, add_task, tasks);
	return co_answer_ok(a, json_pack("{s:o, s:o}", "tasks", tasks, "jobs", jobs(a->s)));
}

/* --- Drain --- */

/* The drain is a coroutine of its own; this one tells its client how far it has got. */
struct drain {
	struct serve *s;
	struct disk *volume;	/* NULL: all */
	bool cancel, done, ignore_damage;
	unsigned users;
	int result;
	uint64_t at, total;
	struct co_queue q;
};

static void drain_put(struct drain *d)
{
	if (!--d->users)
		free(d);
}

static void drain_progress(void *arg, uint64_t done, uint64_t total)
{
	struct drain *d = arg;

	d->at = done;
	d->total = total;
}

static co_fn void co_drain_main(void *arg)
{
	struct drain *d = arg;

	if (d->volume && d->ignore_damage)
		wlog_ignore_damage(d->volume, true);
	if (d->volume)
		d->result = co_wlog_drain_volume(d->volume, &d->cancel);
	if (d->volume && d->ignore_damage)
		wlog_ignore_damage(d->volume, false);
	if (!d->volume)
		d->result = co_wlog_drain(d->s->graph.log, drain_progress, d, &d->cancel);
	d->done = true;
	co_queue_wake_all(&d->q);
	drain_put(d);
}

static co_fn int co_watch_drain(struct answer *a, struct drain *d)
{
	int ret = 0;

	while (!d->done && !ret) {
		co_queue_wait_until(&d->q, rt_now_ns() + PROGRESS_NS, "a drain");
		if (a->s->stop)
			d->cancel = true;
		if (!d->done && d->total)
			ret = co_answer(a, json_pack("{s:{s:I, s:I}}", "progress", "done", (json_int_t)d->at,
						     "total", (json_int_t)d->total));
	}
	d->cancel = true;	/* the client is gone */
	if (ret < 0)
		return ret;
	if (d->result == -ECANCELED)
		return co_answer_error(a, "the drain was cancelled; what is left stays safe in the log", NULL);
	if (d->result < 0)
		return co_answer_error(a, "the drain failed: %s; what is left stays safe in the log", strerror(-d->result));
	return co_answer_ok(a, NULL);
}

static co_fn int co_drain(struct answer *a, json_t *args)
{
	const char *name = json_string_value(json_object_get(args, "volume"));
	struct volume *v = name ? graph_find(&a->s->graph, name) : NULL;
	bool ignore_damage = json_is_true(json_object_get(args, "ignore_damage"));
	struct drain *d;
	int ret;

	if (!a->s->graph.log)
		return co_answer_error(a, "there is no log", NULL);
	if (name && !v)
		return co_answer_error(a, "there is no volume '%s'", name);
	if (a->s->stop)
		return co_answer_error(a, "the server is stopping", NULL);
	if (ignore_damage && !v)
		return co_answer_error(a, "\"ignore_damage\" needs a \"volume\"", NULL);
	d = calloc(1, sizeof(*d));
	if (!d)
		return -ENOMEM;
	d->s = a->s;
	d->volume = v ? v->disk : NULL;
	d->ignore_damage = ignore_damage;
	d->users = 2;
	co_queue_init(&d->q);
	if (co_spawn("drain", co_drain_main, d) < 0) {
		free(d);
		return co_answer_error(a, "too much is going on; try again", NULL);
	}
	ret = co_watch_drain(a, d);
	drain_put(d);
	return ret;
}

/* --- Rebuild --- */

/* The log copies by itself; this coroutine tells its client how far it has got, and stops it when the client goes. */
static co_fn int co_log_rebuild(struct answer *a, json_t *args)
{
	const char *device = json_string_value(json_object_get(args, "device"));
	struct graph *g = &a->s->graph;	/* its log may be closed while this sleeps */
	struct err err = ERR_INIT;
	struct wlog_info info = { .rebuild_error = -ECANCELED };
	int ret = 0;

	if (!g->log)
		return co_answer_error(a, "there is no log", NULL);
	if (a->s->stop)
		return co_answer_error(a, "the server is stopping", NULL);
	ret = co_graph_rebuild_log(g, device, json_is_true(json_object_get(args, "force")), &err);
	if (ret == -EACCES && a->s->confined.landlock)
		return co_answer_error(a, "%s; a server that runs opens only what --allow-path named when it was started", err.msg);
	if (ret < 0)
		return co_answer_error(a, "%s", err.msg);
	for (uint64_t told = rt_now_ns(); g->log;) {
		wlog_get_info(g->log, &info);
		if (!info.rebuilding)
			break;
		if (a->s->stop)
			wlog_rebuild_cancel(g->log);
		if (rt_now_ns() - told >= PROGRESS_NS && !ret) {
			told = rt_now_ns();
			ret = co_answer(a, json_pack("{s:{s:I, s:I}}", "progress", "done", (json_int_t)info.rebuild_done,
						     "total", (json_int_t)info.rebuild_total));
			if (ret < 0)
				break;
		}
		co_sleep_ns(POLL_NS);
	}
	if (ret < 0) {	/* the client is gone */
		if (g->log)
			wlog_rebuild_cancel(g->log);
		return ret;
	}
	if (info.rebuild_error == -ECANCELED)
		return co_answer_error(a, "the rebuild was stopped; the log is as it was, without a mirror", NULL);
	if (info.rebuild_error || info.degraded)
		return co_answer_error(a, "the rebuild failed: %s; the log is as it was, without a mirror",
				       strerror(info.rebuild_error ? -info.rebuild_error : EIO));
	return co_answer_ok(a, NULL);
}

/* --- The rest --- */

static co_fn int co_shutdown(struct answer *a, json_t *args)
{
	bool drain = json_is_true(json_object_get(args, "drain"));
	int ret = co_answer_ok(a, NULL);

	serve_stop(a->s, drain);
	return ret;
}

static co_fn int co_resize(struct answer *a, json_t *args)
{
	const char *name = json_string_value(json_object_get(args, "volume"));
	const json_t *size = json_object_get(args, "size");
	struct volume *v = name ? graph_find(&a->s->graph, name) : NULL;
	struct err err = ERR_INIT;
	uint64_t bytes = 0;
	int ret;

	if (!v)
		return co_answer_error(a, "there is no volume '%s'", name ? name : "");
	if (json_is_integer(size) && json_integer_value(size) > 0)
		bytes = (uint64_t)json_integer_value(size);
	else if (json_is_string(size) && size_parse(json_string_value(size), &bytes) < 0)
		bytes = 0;
	if (!bytes || bytes > DISK_MAX_SIZE || bytes % 512)
		return co_answer_error(a, "\"size\" is a number of bytes, or text such as \"20G\", and a multiple of 512", NULL);
	if (bytes < v->disk->size && !json_is_true(json_object_get(args, "shrink")))
		return co_answer_error(a, "volume '%s' would lose its end; \"shrink\": true allows that", name);
	if (a->s->stop)
		return co_answer_error(a, "the server is stopping", NULL);
	a->s->sizing++;
	ret = co_volume_resize(v, bytes, &err);
	bytes = v->disk->size;
	if (!ret)
		co_devices_resize(a->s, v);
	a->s->sizing--;
	co_queue_wake_all(&a->s->stop_q);
	if (ret < 0)
		return co_answer_error(a, "%s", err.msg);
	return co_answer_ok(a, json_pack("{s:I}", "size", (json_int_t)bytes));
}

static co_fn int co_fuse_add(struct answer *a, json_t *args)
{
	const char *name = json_string_value(json_object_get(args, "volume")), *path = json_string_value(json_object_get(args, "path"));
	struct volume *v = name ? graph_find(&a->s->graph, name) : NULL;
	struct err err = ERR_INIT;

	if (!v)
		return co_answer_error(a, "there is no volume '%s'", name ? name : "");
	if (!path || path[0] != '/')
		return co_answer_error(a, "\"path\" is the absolute path of a file", NULL);
	if (a->s->stop)
		return co_answer_error(a, "the server is stopping", NULL);
	if (a->s->confined.landlock || a->s->confined.seccomp || (a->s->fuse && fuse_server_guarded(a->s->fuse)))
		return co_answer_error(a, "the server has confined itself and can mount no file any more; start it with --fuse FILE for this one, or with --no-sandbox and without --user", NULL);
	if (co_add_file(a->s, v, path, &err) < 0)
		return co_answer_error(a, "%s", err.msg);
	return co_answer_ok(a, NULL);
}

/* --- Cache --- */

/* A size as a number of bytes or as text. False if it is there and neither. */
static bool get_size(const json_t *args, const char *key, uint64_t *ret)
{
	const json_t *v = json_object_get(args, key);

	if (json_is_integer(v) && json_integer_value(v) >= 0)
		*ret = (uint64_t)json_integer_value(v);
	else if (json_is_string(v))
		return size_parse(json_string_value(v), ret) == 0;
	else
		return !v;
	return true;
}

static co_fn int co_cache_size(struct answer *a, json_t *args)
{
	struct cache *c = a->s->graph.cache;
	struct err err = ERR_INIT;
	uint64_t size = 0;

	if (!c)
		return co_answer_error(a, "there is no cache; it comes with --cache-size", NULL);
	if (!get_size(args, "size", &size) || !size)
		return co_answer_error(a, "\"size\" is a number of bytes, or text such as \"1G\"", NULL);
	if (a->s->stop)
		return co_answer_error(a, "the server is stopping", NULL);
	/* The part of one reactor may be below what its index alone takes. */
	if (a->s->main || a->s->npeers)
		size = max(size, cache_least(c));
	/* Down at once; who gets more, and when, is up to co_memory_apply(): of several reactors the others have to give it back first. */
	if (cache_check_size(c, size, &err) < 0 || (size < cache_size(c) && co_cache_resize(c, size, &err) < 0))
		return co_answer_error(a, "%s", err.msg);
	pressure_set(a->s, size);
	co_memory_apply(a->s);
	c = a->s->graph.cache;	/* the end may have come meanwhile */
	return co_answer_ok(a, json_pack("{s:I}", "memory", (json_int_t)(c ? cache_memory(c) : 0)));
}

static co_fn int co_memory(struct answer *a, json_t *args)
{
	struct err err = ERR_INIT;
	uint64_t size = 0;

	if (!get_size(args, "size", &size))
		return co_answer_error(a, "\"size\" is a number of bytes, or text such as \"1G\"", NULL);
	if (a->s->stop)
		return co_answer_error(a, "the server is stopping", NULL);
	if (size && co_memory_set(a->s, size, &err) < 0)
		return co_answer_error(a, "%s", err.msg);
	return co_answer_ok(a, memory_status(a->s));
}

/* The cache's layer of the volume that the request names, and its number, or NULL with the error answered (its result in *ret). */
static co_fn struct disk *co_cached_volume(struct answer *a, json_t *args, unsigned *ret_i, int *ret)
{
	const char *name = json_string_value(json_object_get(args, "volume"));
	struct graph *g = &a->s->graph;

	*ret = 0;
	for (unsigned i = 0; name && !a->s->stop && i < g->n; i++) {
		if (!strcmp(g->volumes[i]->name, name) && g->cached[i]) {
			*ret_i = i;
			return g->cached[i];
		}
	}
	if (a->s->stop)
		*ret = co_answer_error(a, "the server is stopping", NULL);
	else if (!g->cache)
		*ret = co_answer_error(a, "there is no cache; it comes with --cache-size", NULL);
	else
		*ret = co_answer_error(a, "there is no volume '%s'", name ? name : "");
	return NULL;
}

/* What is said is checked before anything of it is done. */
static co_fn int co_cache_set(struct answer *a, json_t *args)
{
	const json_t *primary = json_object_get(args, "primarycache"), *secondary = json_object_get(args, "secondarycache");
	enum cache_mode mode = CACHE_ALL, second = CACHE_ALL;
	uint64_t share = 0, limit = 0;
	struct err err = ERR_INIT;
	struct disk *d;
	unsigned i;
	int ret;

	d = co_cached_volume(a, args, &i, &ret);
	if (!d)
		return ret;
	if (primary && (!json_is_string(primary) || cache_mode_parse(json_string_value(primary), &mode) < 0))
		return co_answer_error(a, "\"primarycache\" is \"all\", \"metadata\" or \"none\"", NULL);
	if (secondary && (!json_is_string(secondary) || cache_mode_parse(json_string_value(secondary), &second) < 0))
		return co_answer_error(a, "\"secondarycache\" is \"all\", \"metadata\" or \"none\"", NULL);
	if (secondary && !cache_has_device(a->s->graph.cache))
		return co_answer_error(a, "there is no second level; it comes with --cache-device", NULL);
	cache_get_limits(d, &share, &limit);
	if (!get_size(args, "share", &share) || !get_size(args, "limit", &limit))
		return co_answer_error(a, "\"share\" and \"limit\" are numbers of bytes, or text such as \"1G\"; 0 is none", NULL);
	if (co_cache_set_limits(d, share, limit, &err) < 0)
		return co_answer_error(a, "%s", err.msg);
	/* None of it is there any more if the end has come meanwhile. */
	if (primary && !a->s->stop)
		co_graph_set_primarycache(&a->s->graph, i, mode);
	if (secondary && !a->s->stop)
		graph_set_secondarycache(&a->s->graph, i, second);
	return co_answer_ok(a, NULL);
}

static co_fn int co_cache_curve(struct answer *a, json_t *args)
{
	unsigned i;
	int ret;
	struct disk *d = co_cached_volume(a, args, &i, &ret);

	return d ? co_answer_ok(a, cache_curve(d)) : ret;
}

static co_fn int co_tls_reload(struct answer *a, json_t *args)
{
	struct err err = ERR_INIT;

	if (co_reload_credentials(a->s, &err) < 0)
		return co_answer_error(a, "%s", err.msg);
	return co_answer_ok(a, NULL);
}

static co_fn int co_help(struct answer *a, json_t *args);

static const struct command {
	const char *name, *help;
	const char *args;	/* names of the arguments it takes, in one string */
	int (*co_run)(struct answer *a, json_t *args);
	bool all;	/* the answers of all reactors make one: gather.c */
} commands[] = {
	{ "status", "volumes, log, clients", "", co_status, true },
	{ "stats", "counters and latencies", "", co_stats, true },
	{ "tasks", "what each coroutine waits for, and since when", "", co_tasks, true },
	{ "drain", "write everything dirty to the images; \"volume\": only that one, \"ignore_damage\": all but what is damaged",
	  "volume ignore_damage", co_drain },
	{ "log-rebuild", "copy the log to a new side of its mirror; \"device\": the DISK (else the side that is out), \"force\": whatever it holds",
	  "device force", co_log_rebuild },
	{ "resize", "give \"volume\" the \"size\"; \"shrink\": true lets it lose its end", "volume size shrink", co_resize },
	{ "fuse-add", "show \"volume\" as the file \"path\" (absolute), until it is unmounted", "volume path", co_fuse_add },
	{ "cache-size", "give the read cache \"size\" bytes of memory", "size", co_cache_size, true },
	{ "memory", "who has how much of the process's memory; \"size\": the new limit of all of it", "size", co_memory },
	{ "cache-set", "of \"volume\": what is cached (\"primarycache\", \"secondarycache\": all, metadata, none), its \"share\" and \"limit\" of the cache",
	  "volume primarycache secondarycache share limit", co_cache_set },
	{ "cache-curve", "the share of reads that \"volume\" would miss with other sizes of cache", "volume", co_cache_curve },
	{ "tls-reload", "read the certificates and keys of --tls-creds again, as SIGHUP does", "", co_tls_reload },
	{ "shutdown", "end the process; \"drain\": true empties the log first", "drain", co_shutdown },
	{ "help", "this list", "", co_help },
};

static co_fn int co_help(struct answer *a, json_t *args)
{
	json_t *r = json_object();

	for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
		json_object_set_new(r, commands[i].name, json_string(commands[i].help));
	return co_answer_ok(a, r);
}

static bool has_word(const char *words, const char *word)
{
	size_t len = strlen(word);

	for (const char *p = words; *word && (p = strstr(p, word)); p++) {
		if ((p == words || p[-1] == ' ') && (p[len] == ' ' || !p[len]))
			return true;
	}
	return false;
}

/* The first key that the command does not know, or NULL. */
static const char *unknown_key(const struct command *c, json_t *args)
{
	const char *key;
	json_t *value;

	json_object_foreach(args, key, value)
		if (strcmp(key, "command") && strcmp(key, "id") && !has_word(c->args, key))
			return key;
	return NULL;
}

/* Nesting deeper than DEPTH_MAX outside of strings. */
static bool too_deep(const char *p, size_t len)
{
	bool string = false;
	int depth = 0;

	for (size_t i = 0; i < len; i++) {
		if (string) {
			if (p[i] == '\\')
				i++;
			else if (p[i] == '"')
				string = false;
		} else if (p[i] == '"') {
			string = true;
		} else if (p[i] == '{' || p[i] == '[') {
			if (++depth > DEPTH_MAX)
				return true;
		} else if (p[i] == '}' || p[i] == ']') {
			depth--;
		}
	}
	return false;
}

static co_fn int co_run_command(struct answer *a, json_t *req)
{
	const char *name = json_string_value(json_object_get(req, "command")), *key;

	if (!json_is_object(req))
		return co_answer_error(a, "a request is a JSON object", NULL);
	if (!name)
		return co_answer_error(a, "the request lacks \"command\"; {\"command\": \"help\"} lists them", NULL);
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
		if (strcmp(name, commands[i].name))
			continue;
		key = unknown_key(&commands[i], req);
		if (key)
			return co_answer_error(a, "the command takes no \"%s\"", key);
		if (a->s->npeers && (commands[i].all || gather_elsewhere(a->s, req)))
			return co_answer(a, co_gather(a->s, req, commands[i].all));
		return commands[i].co_run(a, req);
	}
	return co_answer_error(a, "unknown command '%s'; {\"command\": \"help\"} lists them", name);
}

co_fn int co_control_own(struct serve *s, json_t *req, int (*co_send)(void *arg, const char *text, size_t len), void *arg)
{
	struct answer a = { .s = s, .co_send = co_send, .arg = arg };
	const char *name = json_string_value(json_object_get(req, "command"));

	for (size_t i = 0; name && i < ARRAY_SIZE(commands); i++)
		if (!strcmp(name, commands[i].name))
			return commands[i].co_run(&a, req);
	return -EINVAL;
}

co_fn int co_control_request(struct serve *s, const char *line, size_t len, int (*co_send)(void *arg, const char *text, size_t len), void *arg)
{
	struct answer a = { .s = s, .co_send = co_send, .arg = arg };
	json_error_t error;
	json_t *req;
	int ret;

	while (len && (line[len - 1] == '\r' || line[len - 1] == ' '))
		len--;
	if (!len)
		return 0;
	if (too_deep(line, len))
		return co_answer_error(&a, "the request is nested too deeply", NULL);
	req = json_loadb(line, len, JSON_REJECT_DUPLICATES, &error);
	if (!req)
		return co_answer_error(&a, "not JSON: %s", error.text);
	a.id = json_object_get(req, "id");
	ret = co_run_command(&a, req);
	json_decref(req);
	return ret;
}
