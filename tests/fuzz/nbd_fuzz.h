/* SPDX-License-Identifier: MIT */
/*
 * What the NBD fuzz targets share: a server with one small volume on a simulated reactor, and a client that is nothing but bytes.
 *
 * The client's bytes arrive in pieces that the simulated reactor's random numbers decide. What the server sends goes through a checker that knows how
 * replies are framed: a stream out of step, a reply nobody asked for, or one too long is a failure.
 */
#pragma once

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "blk/spec.h"
#include "blk/volume.h"
#include "export/nbd/server.h"
#include "rt/buf.h"
#include "rt/rt.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/nbd_proto.h"

#define FUZZ_SIZE (1u << 20)

/* Reads the server's stream: first `skip` bytes unseen, then frames of the given kind. */
enum fuzz_stream { STREAM_ANY, STREAM_STRUCTURED, STREAM_EXTENDED };

struct fuzz_client {
	struct nbd_transport t;
	const uint8_t *in;
	size_t len, pos;
	size_t wait_at;		/* here the client waits for a reply before it says more; 0: nowhere */
	bool shut;
	/* checker */
	enum fuzz_stream stream;
	uint64_t skip;
	uint8_t head[64];
	size_t have;
};

static inline void fuzz_check(bool ok)
{
	if (!ok)
		abort();
}

/* A frame's header is complete in c->head; returns its payload length. */
static inline uint64_t fuzz_frame(struct fuzz_client *c)
{
	uint32_t magic = get_be32(c->head);
	uint16_t type = get_be16(c->head + 6);
	uint64_t len;

	if (magic == NBD_SIMPLE_REPLY_MAGIC) {
		fuzz_check(c->stream == STREAM_STRUCTURED);
		return 0;
	}
	fuzz_check(magic == (c->stream == STREAM_EXTENDED ? NBD_EXT_REPLY_MAGIC : NBD_STRUCTURED_REPLY_MAGIC));
	len = c->stream == STREAM_EXTENDED ? get_be64(c->head + 24) : get_be32(c->head + 16);
	switch (type) {
	case NBD_CHUNK_NONE:
		fuzz_check(len == 0);
		break;
	case NBD_CHUNK_OFFSET_DATA:
		fuzz_check(len > 8 && len <= NBD_MAX_PAYLOAD + 8);
		break;
	case NBD_CHUNK_OFFSET_HOLE:
		fuzz_check(len == 12);
		break;
	case NBD_CHUNK_BLOCK_STATUS:
		fuzz_check(c->stream == STREAM_STRUCTURED && len > 4 && (len - 4) % 8 == 0);
		break;
	case NBD_CHUNK_BLOCK_STATUS_EXT:
		fuzz_check(c->stream == STREAM_EXTENDED && len > 8 && (len - 8) % 16 == 0);
		break;
	case NBD_CHUNK_ERROR:
		fuzz_check(len >= 6 && len < 4096);
		break;
	default:
		fuzz_check(false);
	}
	return len;
}

static inline void fuzz_sent(struct fuzz_client *c, const uint8_t *p, size_t n)
{
	while (n && c->stream != STREAM_ANY) {
		size_t want, k;

		if (c->skip) {
			k = min((uint64_t)n, c->skip);
			c->skip -= k;
			p += k;
			n -= k;
			continue;
		}
		want = c->have < 4 ? 4 : c->stream == STREAM_EXTENDED ? NBD_EXT_REPLY_LEN :
		       get_be32(c->head) == NBD_SIMPLE_REPLY_MAGIC ? NBD_SIMPLE_REPLY_LEN : NBD_STRUCTURED_REPLY_LEN;
		k = min(n, want - c->have);
		memcpy(c->head + c->have, p, k);
		c->have += k;
		p += k;
		n -= k;
		if (c->have == want && want > 4) {
			c->skip = fuzz_frame(c);
			c->have = 0;
		}
	}
}

static inline co_fn ssize_t co_fuzz_recv(struct nbd_transport *t, struct iovec *iov, int n)
{
	struct fuzz_client *c = container_of(t, struct fuzz_client, t);
	size_t total = 0, want = 1 + rt_rand64() % 5000;

	if (rt_rand64() % 4 == 0)
		co_sleep_ns(rt_rand64() % 1000);
	for (int i = 0; i < n && !c->shut; i++) {
		size_t k = min(iov[i].iov_len, c->len - c->pos);

		k = min(k, want - total);
		if (c->pos < c->wait_at)
			k = min(k, c->wait_at - c->pos);
		memcpy(iov[i].iov_base, c->in + c->pos, k);
		c->pos += k;
		total += k;
		if (c->pos == c->wait_at)
			break;
	}
	return total;
}

static inline co_fn ssize_t co_fuzz_send(struct nbd_transport *t, struct iovec *iov, int n)
{
	struct fuzz_client *c = container_of(t, struct fuzz_client, t);
	size_t k = min(iov->iov_len, (size_t)(1 + rt_rand64() % 100000));

	if (rt_rand64() % 4 == 0)
		co_sleep_ns(rt_rand64() % 1000);
	if (c->shut)
		return -EPIPE;
	fuzz_check(iov->iov_len > 0);
	fuzz_sent(c, iov->iov_base, k);
	return k;
}

static inline void fuzz_shutdown(struct nbd_transport *t, int how)
{
	container_of(t, struct fuzz_client, t)->shut = true;
}

static inline co_fn void co_fuzz_close(struct nbd_transport *t)
{
}

static const struct nbd_transport_ops fuzz_ops = { co_fuzz_recv, co_fuzz_send, fuzz_shutdown, co_fuzz_close };

struct fuzz_run {
	struct fuzz_client *client;
	bool read_only;
	enum nbd_tls tls;
	struct tls_creds *creds;
};

static inline co_fn void co_fuzz_main(void *arg)
{
	struct fuzz_run *r = arg;
	struct err err = ERR_INIT;
	struct nbd_server_config config = { .max_in_flight = 16, .max_requests = 24, .memory = 1, .tls = r->tls, .creds = r->creds };
	struct nbd_server *s;
	struct disk *d;
	struct volume *v;

	fuzz_check(!co_disk_open("mem:1M", r->read_only ? 0 : DISK_OPEN_RDWR, &d, &err));
	fuzz_check(!volume_create("disk", d, &v, &err));
	v->read_only = r->read_only;
	fuzz_check(!nbd_server_create(&config, &s, &err));
	fuzz_check(!nbd_server_add_volume(s, v, &err));
	fuzz_check(!nbd_server_adopt(s, &r->client->t, "fuzz"));
	while (nbd_server_connections(s))
		co_sleep_ns(100000);
	fuzz_check(!v->in_flight);
	fuzz_check(!co_nbd_server_stop(s, rt_now_ns()));
	nbd_server_destroy(s);
	co_volume_destroy(v);
}

static inline void fuzz_serve_tls(struct fuzz_client *c, bool read_only, enum nbd_tls tls, struct tls_creds *creds)
{
	static struct rt *rt;
	static struct rt_bufpool *bufs;
	struct fuzz_run run = { c, read_only, tls, creds };
	struct err err = ERR_INIT;

	if (!rt) {
		struct rt_config config = { .coroutines = 64, .stack_size = 512 << 10 }; /* TLS computes in place on a simulated reactor */

		log_set_level(LOG_ERROR);
		backends_register();
		fuzz_check(!rt_create_sim(&config, 1, &rt, &err));
		fuzz_check(!rt_bufpool_create(rt, RT_BUF_MAX, &bufs, &err));
		rt_set_bufs(rt, bufs);
	}
	c->t.ops = &fuzz_ops;
	fuzz_check(!rt_run(rt, co_fuzz_main, &run));
}

static inline void fuzz_serve(struct fuzz_client *c, bool read_only)
{
	fuzz_serve_tls(c, read_only, NBD_TLS_OFF, NULL);
}
