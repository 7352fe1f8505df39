/* SPDX-License-Identifier: MIT */
/*
 * NBD client: the driver "nbd". See nbd.h for the design.
 */
#include "backend/nbd.h"

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tls/tls.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/log.h"
#include "util/size.h"

#define REPLAY_DEFAULT (32ull << 20)
#define REPLAY_MIN (1ull << 20)
#define MAX_ZERO (1ull << 30)
#define MAX_ZERO_EXTENDED (1ull << 40)
#define DEFAULT_BLOCK 512u
#define OBJECT_MIN (1u << 20)	/* who prefers so much a request keeps objects */
#define DEPTH 32u

static struct nbd *nbd_of(struct disk *d)
{
	return container_of(d, struct nbd, disk);
}

/* --- Requests --- */

static co_fn int co_request(struct nbd *n, struct nbd_req *r)
{
	r->n = n;
	r->co = co_self();
	r->since_ns = rt_now_ns();
	list_init(&r->node);
	co_sem_take(&n->slots, "a free NBD request");
	if (n->dead) {
		co_sem_give(&n->slots);
		return n->dead;
	}
	r->slot = n->free_slot[--n->nfree];
	n->slot[r->slot] = r;
	nbd_dispatch(n, r);
	while (!r->done)
		co_park("the NBD server");
	co_sem_give(&n->slots);
	return r->error;
}

static int plain_errno(int error)
{
	return error == -EOVERFLOW ? -EIO : error;
}

static co_fn int co_nbd_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct nbd_req r = { .type = NBD_CMD_READ, .off = off, .len = len, .iov = iov, .niov = niov };

	assert(niov <= DISK_MAX_IOV && len <= NBD_MAX_PAYLOAD);
	return plain_errno(co_request(nbd_of(d), &r));
}

static co_fn int co_flush_covered(struct nbd *n)
{
	struct nbd_req r = { .type = NBD_CMD_FLUSH };
	uint64_t mark = n->replay ? nbd_replay_mark(n->replay) : 0, changes = n->changes;
	int ret = co_request(n, &r);

	if (ret)
		return plain_errno(ret);
	n->flushed = max(n->flushed, changes);
	if (n->replay) {
		nbd_replay_drop(n->replay, mark);
		co_queue_wake_all(&n->room);
	}
	return 0;
}

static co_fn int co_nbd_flush(struct disk *d)
{
	return co_flush_covered(nbd_of(d));
}

/* The copy is full: flushes for the client's own sake. */
static co_fn void co_self_flush(struct nbd *n)
{
	int ret;

	n->self_flushing = true;
	n->self_flushes++;
	ret = co_flush_covered(n);
	n->self_flushing = false;
	if (ret && ret != -ESHUTDOWN)
		disk_fail(&n->disk, ret, "a flush that made room for more unflushed writes");
	co_queue_wake_all(&n->room);
}

/* Waits for room in the copy. */
static co_fn int co_reserve(struct nbd *n, uint64_t bytes)
{
	while (!nbd_replay_reserve(n->replay, bytes)) {
		if (n->dead)
			return n->dead;
		if (n->disk.failed)
			return -EIO;
		if (!n->self_flushing && !nbd_replay_is_empty(n->replay))
			co_self_flush(n);
		else
			co_queue_wait(&n->room, "room for unflushed NBD writes");
	}
	return 0;
}

/* A change, with all that makes it survive the server: see invariants 5 and 6 of nbd.h. `keep` is what the copy holds of it. */
static co_fn int co_change(struct nbd *n, struct nbd_req *r, unsigned flags)
{
	bool trim = r->type == NBD_CMD_TRIM, durable = false;
	uint64_t bytes = 0;
	struct co_range range;
	int ret;

	if (n->always_fua || ((flags & DISK_FUA) && n->disk.limits.fua)) {
		r->flags |= NBD_CMD_FLAG_FUA;
		durable = true;
	}
	if (!n->replay || trim) {
		ret = co_request(n, r);
		n->changes += !ret && !durable && !trim && n->disk.limits.volatile_cache;
		return ret;
	}
	if (r->type == NBD_CMD_WRITE && !durable)
		bytes = r->len;
	ret = co_reserve(n, bytes);
	if (ret)
		return ret;
	co_range_lock(&n->lock, &range, r->off, r->len, false);
	ret = co_request(n, r);
	if (ret) {
		nbd_replay_release(n->replay, bytes);
	} else {
		nbd_replay_add(n->replay, durable ? NBD_REPLAY_DURABLE : bytes ? NBD_REPLAY_WRITE : NBD_REPLAY_ZERO,
			       r->flags & NBD_CMD_FLAG_NO_HOLE, r->off, r->len, r->iov, r->niov, bytes);
		n->changes += !durable;
	}
	co_range_unlock(&n->lock, &range);
	if (!co_queue_is_empty(&n->room))
		co_queue_wake_all(&n->room);
	return ret;
}

static co_fn int co_nbd_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct nbd_req r = { .type = NBD_CMD_WRITE, .off = off, .len = len, .iov = iov, .niov = niov };

	assert(niov <= DISK_MAX_IOV && len <= NBD_MAX_PAYLOAD);
	return plain_errno(co_change(nbd_of(d), &r, flags));
}

/* A server may find a trim or write zeroes too long that it takes in pieces: EOVERFLOW, or EINVAL beyond its payload. */
static co_fn int co_long_change(struct nbd *n, uint16_t type, uint16_t cmd_flags, uint64_t off, uint64_t len, unsigned flags)
{
	while (len) {
		struct nbd_req r = { .type = type, .flags = cmd_flags, .off = off, .len = min(len, n->max_zero) };
		int ret = co_change(n, &r, flags);

		if ((ret == -EOVERFLOW || ret == -EINVAL) && r.len > n->disk.limits.max_io) {
			n->max_zero = n->disk.limits.max_io;
			continue;
		}
		if (ret)
			return plain_errno(ret);
		off += r.len;
		len -= r.len;
	}
	return 0;
}

static co_fn int co_nbd_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return co_long_change(nbd_of(d), NBD_CMD_TRIM, 0, off, len, flags);
}

static co_fn int co_nbd_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	uint16_t cmd_flags = flags & DISK_UNMAP ? 0 : NBD_CMD_FLAG_NO_HOLE;

	if (flags & DISK_FAST)
		cmd_flags |= NBD_CMD_FLAG_FAST_ZERO;
	return co_long_change(nbd_of(d), NBD_CMD_WRITE_ZEROES, cmd_flags, off, len, flags);
}

static co_fn int co_nbd_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	struct nbd *n = nbd_of(d);
	struct disk_extent e;
	struct nbd_req r = {
		.type = NBD_CMD_BLOCK_STATUS, .flags = NBD_CMD_FLAG_REQ_ONE, .off = off,
		.len = min(len, n->info.extended ? MAX_ZERO_EXTENDED : MAX_ZERO), .extent = &e,
	};
	int error = co_request(n, &r);

	if (error)
		return plain_errno(error);
	*ret = e;
	return 0;
}

static co_fn int co_nbd_prefetch(struct disk *d, uint64_t off, uint64_t len)
{
	struct nbd *n = nbd_of(d);
	uint64_t start = align_down(off, d->limits.align), end = min(align_up(off + len, d->limits.align), d->size);
	struct nbd_req r = { .type = NBD_CMD_CACHE, .off = start, .len = min(end - start, (uint64_t)d->limits.max_io) };

	return plain_errno(co_request(n, &r));
}

static void nbd_cancel(struct disk *d)
{
	struct nbd *n = nbd_of(d);

	nbd_die(n, -ESHUTDOWN, NULL);
}

static void nbd_status(struct disk *d, void *obj)
{
	const struct nbd *n = nbd_of(d);

	json_object_set_new(obj, "connected", json_boolean(n->session == NBD_UP));
	json_object_set_new(obj, "connections", json_integer(n->nconns));
	json_object_set_new(obj, "tls", n->conn[0].tls ? json_string(tls_description(n->conn[0].tls)) : json_null());
	json_object_set_new(obj, "export", json_string(n->config.uri.export));
	json_object_set_new(obj, "extended_headers", json_boolean(n->info.extended));
	json_object_set_new(obj, "structured_replies", json_boolean(n->info.structured || n->info.extended));
	json_object_set_new(obj, "block_status", json_boolean(n->info.has_context));
	json_object_set_new(obj, "requests_in_flight", json_integer(NBD_SLOTS + NBD_REPLAYS - n->nfree));
	json_object_set_new(obj, "reconnects", json_integer(n->reconnects));
	json_object_set_new(obj, "requests_sent_again", json_integer(n->resent));
	json_object_set_new(obj, "changes_replayed", json_integer(n->replayed));
	json_object_set_new(obj, "flushes_for_room", json_integer(n->self_flushes));
	json_object_set_new(obj, "unflushed_bytes_kept", json_integer(n->replay ? nbd_replay_bytes(n->replay) : 0));
	json_object_set_new(obj, "unflushed_bytes_max", json_integer(n->replay ? nbd_replay_size(n->replay) : 0));
}

/* --- Life --- */

static void nbd_free(struct nbd *n)
{
	for (unsigned i = 0; i < n->config.connections && n->conn; i++)
		nbd_conn_fini(&n->conn[i]);
	free(n->conn);
	tls_creds_free(n->creds);
	nbd_replay_destroy(n->replay);
	nbd_uri_fini(&n->config.uri);
	disk_fini(&n->disk);
	free(n);
}

static co_fn void co_nbd_close(struct disk *d)
{
	struct nbd *n = nbd_of(d);

	rt_timer_cancel(&n->tick);
	if (n->session != NBD_UP)
		nbd_die(n, -ESHUTDOWN, NULL);
	n->closing = true;
	for (unsigned i = 0; i < n->config.connections; i++) {
		co_queue_wake_all(&n->conn[i].tx_wait);
		co_queue_wake_all(&n->conn[i].rx_wait);
	}
	co_queue_wake_all(&n->changed);
	while (n->tasks)
		co_queue_wait(&n->changed, "the NBD connections to end");
	nbd_free(n);
}

static const struct disk_ops nbd_ops = {
	.driver = "nbd",
	.co_read = co_nbd_read,
	.co_write = co_nbd_write,
	.co_flush = co_nbd_flush,
	.co_discard = co_nbd_discard,
	.co_zero = co_nbd_zero,
	.co_extent = co_nbd_extent,
	.co_prefetch = co_nbd_prefetch,
	.cancel = nbd_cancel,
	.co_close = co_nbd_close,
	.status = nbd_status,
};

/* What the server offers becomes size, limits and operations. */
static int take_info(struct nbd *n, unsigned flags, struct err *err)
{
	const struct nbd_facts *i = &n->info;
	struct disk_limits *l = &n->disk.limits;
	uint32_t payload = i->max_payload ? min(i->max_payload, NBD_MAX_PAYLOAD) : NBD_MAX_PAYLOAD;

	n->ops = nbd_ops;
	n->disk.ops = &n->ops;
	n->disk.read_only = !(flags & DISK_OPEN_RDWR);
	if ((flags & DISK_OPEN_RDWR) && (i->flags & NBD_FLAG_READ_ONLY))
		return err_set(err, -EROFS, "%s: the server exports it read-only; open it with --read-only", n->disk.name);

	l->align = i->min_block ? i->min_block : i->size % DEFAULT_BLOCK ? 1 : DEFAULT_BLOCK;
	n->disk.size = align_down(i->size, l->align);
	if (n->disk.size != i->size)
		log_warn("%s: the last %llu bytes cannot be reached, since the server takes blocks of %u bytes only", n->disk.name,
			 (unsigned long long)(i->size - n->disk.size), l->align);
	l->opt_io = i->opt_block;
	l->object = i->opt_block >= OBJECT_MIN && is_pow2(i->opt_block) ? i->opt_block : 0;
	l->opt_depth = DEPTH;
	if (n->config.replay)
		payload = min((uint64_t)payload, n->config.replay / 4);
	l->max_io = align_down(payload, l->align);
	if (!l->max_io)
		return err_set(err, -EPROTO, "%s: the server takes at most %u bytes a request but no block below %u", n->disk.name, payload, l->align);
	n->max_zero = i->extended ? MAX_ZERO_EXTENDED : MAX_ZERO;
	l->max_zero = n->max_zero;
	l->fua = i->flags & NBD_FLAG_SEND_FUA;
	l->multi_conn = i->flags & NBD_FLAG_CAN_MULTI_CONN;
	l->rotational = i->flags & NBD_FLAG_ROTATIONAL;
	l->fast_zero = i->flags & NBD_FLAG_SEND_FAST_ZERO && i->flags & NBD_FLAG_SEND_WRITE_ZEROES;
	l->volatile_cache = i->flags & NBD_FLAG_SEND_FLUSH;
	n->always_fua = l->fua && !l->volatile_cache;
	if ((flags & DISK_OPEN_LOG) && !l->fua && !l->volatile_cache)
		return err_set(err, -ENOTSUP, "%s: the server offers neither flush nor FUA, so nothing that it acknowledges is known to be stable; "
			       "it cannot hold a log", n->disk.name);

	if (!l->volatile_cache)
		n->ops.co_flush = NULL;
	if (i->flags & NBD_FLAG_SEND_TRIM)
		l->discard_gran = max(l->align, DEFAULT_BLOCK);
	else
		n->ops.co_discard = NULL;
	if (!(i->flags & NBD_FLAG_SEND_WRITE_ZEROES))
		n->ops.co_zero = NULL;
	if (!(i->flags & NBD_FLAG_SEND_CACHE))
		n->ops.co_prefetch = NULL;
	if (!i->has_context)
		n->ops.co_extent = NULL;
	return 0;
}

/* The coroutines, which never end before the disk does: so a reconnect needs none. */
static int spawn(struct nbd *n, struct err *err)
{
	int ret = co_spawn("nbd manager", co_nbd_manager, n);

	n->tasks += !ret;
	for (unsigned i = 0; i < n->config.connections && !ret; i++) {
		ret = co_spawn("nbd sender", co_nbd_sender, &n->conn[i]);
		n->tasks += !ret;
		if (!ret)
			ret = co_spawn("nbd receiver", co_nbd_receiver, &n->conn[i]);
		n->tasks += !ret;
	}
	return ret ? err_set(err, ret, "%s: too many coroutines are in use to open it; try again when less is going on", n->disk.name) : 0;
}

static co_fn int co_first_connect(struct nbd *n, struct err *err)
{
	uint64_t until = rt_now_ns() + n->config.open_timeout_ns, wait_ns = 50000000;

	for (;;) {
		struct err e = ERR_INIT;
		int ret = co_nbd_connect(&n->conn[0], &e);

		if (!ret)
			return 0;
		if (rt_now_ns() >= until || ret == -EPROTO || ret == -ENOTSUP || ret == -EACCES || ret == -EPERM)
			return err_set(err, ret, "%s", e.msg);
		co_sleep_ns(wait_ns);
		wait_ns = min(2 * wait_ns, (uint64_t)1000000000);
	}
}

static co_fn int co_start(struct nbd *n, unsigned flags, struct err *err)
{
	int ret = co_nbd_load_creds(n, err);

	if (!ret)
		ret = co_first_connect(n, err);
	if (ret)
		return ret;
	n->info = n->conn[0].info;
	ret = take_info(n, flags, err);
	if (ret)
		return ret;
	if (n->config.replay && n->disk.limits.volatile_cache && !n->disk.read_only) {
		n->replay = nbd_replay_create(n->config.replay);
		if (!n->replay)
			return err_errno(err, -ENOMEM, "%s: no memory for %llu bytes of unflushed writes (replay=)", n->disk.name,
					 (unsigned long long)n->config.replay);
	}
	if (n->config.connections > 1 && !n->disk.limits.multi_conn) {
		log_warn("%s: uses one connection, since the server does not say that several see the same flushes", n->disk.name);
		while (n->config.connections > 1)
			nbd_conn_fini(&n->conn[--n->config.connections]);
	}
	n->nconns = co_nbd_connect_more(n);
	n->session = NBD_UP;
	for (unsigned i = 0; i < n->nconns; i++)
		nbd_conn_start(&n->conn[i]);
	return spawn(n, err);
}

co_fn int co_nbd_open_config(struct nbd_config *config, const char *name, unsigned flags, struct disk **ret, struct err *err)
{
	struct nbd *n = calloc(1, sizeof(*n));
	int r = n ? disk_init(&n->disk, &nbd_ops, name, NULL) : -ENOMEM;

	if (r) {
		free(n);
		nbd_uri_fini(&config->uri);
		return err_errno(err, r, "%s", name);
	}
	n->config = *config;
	n->conn = calloc(config->connections, sizeof(*n->conn));
	for (unsigned i = 0; i < config->connections; i++) {
		if (!n->conn || nbd_conn_init(n, &n->conn[i], i)) {
			nbd_free(n);
			return err_errno(err, -ENOMEM, "%s", name);
		}
	}
	n->dial_fd = -1;
	list_init(&n->pending);
	co_queue_init(&n->changed);
	co_queue_init(&n->room);
	co_rangelock_init(&n->lock);
	co_sem_init(&n->slots, NBD_SLOTS);
	for (unsigned i = 0; i < ARRAY_SIZE(n->free_slot); i++)
		n->free_slot[n->nfree++] = i;
	r = co_start(n, flags, err);
	if (r) {
		if (n->tasks)
			co_nbd_close(&n->disk);
		else
			nbd_free(n);
		return r;
	}
	if (n->config.timeout_ns)
		nbd_tick(&n->tick);
	*ret = &n->disk;
	return 0;
}

static int parse_reconnect(struct opts *o, uint64_t *ret_ns, const char *name, struct err *err)
{
	const char *s = opts_str(o, "reconnect");

	*ret_ns = UINT64_MAX;
	if (!s || !strcmp(s, "on"))
		return 0;
	if (!strcmp(s, "off")) {
		*ret_ns = 0;
		return 0;
	}
	if (duration_parse(s, ret_ns))
		return err_set(err, -EINVAL, "%s: reconnect=%s is neither on, off nor a duration such as 30s", name, s);
	return 0;
}

/* What the URI asks for, and what stands behind it. */
static int take_tls_options(struct opts *o, struct nbd_uri *u, const char *text, struct err *err)
{
	for (unsigned i = 0; nbd_tls_keys[i]; i++) {
		const char *val = opts_str(o, nbd_tls_keys[i]);
		int ret = val ? nbd_uri_set_tls(u, nbd_tls_keys[i], val, text, err) : 0;

		if (ret)
			return ret;
	}
	return nbd_uri_check_tls(u, text, err);
}

static co_fn int co_nbd_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	struct nbd_config config = { .connections = 1, .replay = REPLAY_DEFAULT };
	uint64_t connections = 1;
	int r;

	r = parse_reconnect(&spec->opts, &config.reconnect_ns, spec->text, err);
	if (!r)
		r = opts_duration(&spec->opts, "timeout", &config.timeout_ns, err);
	if (!r)
		r = opts_duration(&spec->opts, "open-timeout", &config.open_timeout_ns, err);
	if (!r)
		r = opts_u64(&spec->opts, "connections", 1, NBD_CONNS_MAX, &connections, err);
	if (!r)
		r = opts_size(&spec->opts, "replay", &config.replay, err);
	if (!r && config.replay && (config.replay < REPLAY_MIN || config.replay > (1ull << 40)))
		r = err_set(err, -EINVAL, "%s: replay is 0 or at least 1M", spec->text);
	if (r)
		return r;
	config.connections = connections;
	config.replay = align_down(config.replay, 4096);
	r = nbd_uri_parse(spec->rest, &config.uri, err);
	if (!r)
		r = take_tls_options(&spec->opts, &config.uri, spec->text, err);
	if (!r)
		r = co_nbd_open_config(&config, spec->rest, flags, ret, err);
	else
		nbd_uri_fini(&config.uri);
	return r;
}

const struct disk_driver nbd_driver = {
	.name = "nbd",
	.options = "timeout,reconnect,open-timeout,connections,replay,tls-certificates,tls-psk-file,tls-username,tls-hostname,tls-verify-peer",
	.co_open = co_nbd_open,
};
