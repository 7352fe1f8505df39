/* SPDX-License-Identifier: MIT */
/*
 * NBD server: fixed newstyle handshake, up to transmission.
 */
#include "export/nbd/internal.h"

#include <errno.h>

#include "util/iov.h"

/* One option of the client. `data` lies in the receive buffer until the next co_conn_fill(). */
struct option {
	uint32_t number, len;
	const uint8_t *data;
};

/* What an option does to the handshake: 0 goes on, TRANSMISSION ends it well, -errno ends the connection. */
#define TRANSMISSION 1

/* --- Replies --- */

static co_fn int co_option_reply(struct nbd_conn *c, const struct option *o, uint32_t type, struct iovec *data, int n)
{
	uint8_t head[NBD_OPTION_REPLY_LEN];
	struct iovec iov[4] = { { head, sizeof(head) } };

	for (int i = 0; i < n; i++)
		iov[i + 1] = data[i];
	put_be64(head, NBD_REP_MAGIC);
	put_be32(head + 8, o->number);
	put_be32(head + 12, type);
	put_be32(head + 16, iov_len(iov + 1, n));
	return co_conn_send(c, iov, n + 1);
}

static co_fn int co_option_ack(struct nbd_conn *c, const struct option *o)
{
	return co_option_reply(c, o, NBD_REP_ACK, NULL, 0);
}

static co_fn int co_option_error(struct nbd_conn *c, const struct option *o, uint32_t type, const char *text)
{
	struct iovec iov = { (void *)text, strlen(text) };

	c->errors++;
	return co_option_reply(c, o, type, &iov, 1);
}

/* --- What an export is like --- */

static uint16_t transmission_flags(const struct nbd_conn *c, const struct nbd_export *e, const struct nbd_facts *f)
{
	uint16_t flags = NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA | NBD_FLAG_CAN_MULTI_CONN | NBD_FLAG_SEND_CACHE;

	if (f->read_only)
		flags |= NBD_FLAG_READ_ONLY;
	else
		flags |= NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES | NBD_FLAG_SEND_FAST_ZERO;
	if (f->rotational)
		flags |= NBD_FLAG_ROTATIONAL;
	if (c->structured || c->extended)
		flags |= NBD_FLAG_SEND_DF;
	if (c->extended && c->meta == e)
		flags |= NBD_FLAG_BLOCK_STATUS_PAYLOAD;
	return flags;
}

static co_fn int co_info_export(struct nbd_conn *c, const struct option *o, const struct nbd_export *e, const struct nbd_facts *f)
{
	uint8_t info[12];
	struct iovec iov = { info, sizeof(info) };

	put_be16(info, NBD_INFO_EXPORT);
	put_be64(info + 2, f->size);
	put_be16(info + 10, transmission_flags(c, e, f));
	return co_option_reply(c, o, NBD_REP_INFO, &iov, 1);
}

static co_fn int co_info_block_size(struct nbd_conn *c, const struct option *o, const struct nbd_facts *f)
{
	uint8_t info[14];
	struct iovec iov = { info, sizeof(info) };

	/* The choke points of a disk take any alignment, so a client need not. */
	put_be16(info, NBD_INFO_BLOCK_SIZE);
	put_be32(info + 2, 1);
	put_be32(info + 6, f->block);
	put_be32(info + 10, NBD_MAX_PAYLOAD);
	return co_option_reply(c, o, NBD_REP_INFO, &iov, 1);
}

static co_fn int co_info_string(struct nbd_conn *c, const struct option *o, uint16_t info, const char *text)
{
	uint8_t head[2];
	struct iovec iov[2] = { { head, 2 }, { (void *)text, strlen(text) } };

	put_be16(head, info);
	return co_option_reply(c, o, NBD_REP_INFO, iov, 2);
}

/* "": none is known here. */
static const char *description(const struct nbd_export *e)
{
	return e->v && e->v->description ? e->v->description : "";
}

/* --- Options --- */

static co_fn int co_opt_list(struct nbd_conn *c, const struct option *o)
{
	if (o->len)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "NBD_OPT_LIST carries no data");
	/* Names are copied by the send, the list is walked by position: it may change while a slow client takes the replies. */
	for (unsigned i = 0;; i++) {
		struct nbd_export *e = NULL;
		unsigned at = 0;
		uint8_t len[4];
		struct iovec iov[3];
		int ret;

		list_for_each(&c->s->exports, n) {
			struct nbd_export *x = container_of(n, struct nbd_export, node);

			if ((!c->only || c->only == x) && at++ == i) {
				e = x;
				break;
			}
		}
		if (!e)
			return co_option_ack(c, o);
		put_be32(len, strlen(e->name));
		iov[0] = (struct iovec){ len, 4 };
		iov[1] = (struct iovec){ e->name, strlen(e->name) };
		iov[2] = (struct iovec){ (void *)description(e), strlen(description(e)) };
		ret = co_option_reply(c, o, NBD_REP_SERVER, iov, 3);
		if (ret < 0)
			return ret;
	}
}

static co_fn int co_opt_export_name(struct nbd_conn *c, const struct option *o)
{
	uint8_t reply[10 + 124] = { 0 };
	struct iovec iov = { reply, c->no_zeroes ? 10 : sizeof(reply) };
	struct nbd_export *e = conn_export(c, o->data, o->len);
	struct nbd_facts f;
	int ret;

	/* There is no error reply to this option; with extended headers it is forbidden. */
	if (!e || c->extended || o->len > NBD_STRING_MAX)
		return -EPROTO;
	ret = co_export_facts(e, &f);
	if (ret < 0)
		return ret;
	put_be64(reply, f.size);
	put_be16(reply + 8, transmission_flags(c, e, &f));
	c->exp = e;
	ret = co_conn_send(c, &iov, 1);
	return ret < 0 ? ret : TRANSMISSION;
}

/* INFO and GO: name length, name, number of information requests, the requests. */
static co_fn int co_opt_go(struct nbd_conn *c, const struct option *o)
{
	uint32_t name_len, ninfo;
	const uint8_t *info;
	struct nbd_export *e;
	bool want_name = false, want_description = false;
	struct nbd_facts f;
	int ret;

	if (o->len < 6)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the option is too short");
	name_len = get_be32(o->data);
	if (name_len > o->len - 6)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the name is longer than the option");
	if (name_len > NBD_STRING_MAX)
		return co_option_error(c, o, NBD_REP_ERR_TOO_BIG, "the name is longer than 4096 bytes");
	ninfo = get_be16(o->data + 4 + name_len);
	info = o->data + 6 + name_len;
	if (o->len != 6 + name_len + 2 * ninfo)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the number of information requests does not fit the option's length");
	e = conn_export(c, o->data + 4, name_len);
	if (!e)
		return co_option_error(c, o, NBD_REP_ERR_UNKNOWN, "there is no such export");
	for (uint32_t i = 0; i < ninfo; i++) {
		want_name |= get_be16(info + 2 * i) == NBD_INFO_NAME;
		want_description |= get_be16(info + 2 * i) == NBD_INFO_DESCRIPTION;
	}

	ret = co_export_facts(e, &f);
	if (ret < 0)
		return ret;
	ret = co_info_export(c, o, e, &f);
	if (!ret)
		ret = co_info_block_size(c, o, &f);
	if (!ret && want_name)
		ret = co_info_string(c, o, NBD_INFO_NAME, e->name);
	if (!ret && want_description && *description(e))
		ret = co_info_string(c, o, NBD_INFO_DESCRIPTION, description(e));
	if (!ret)
		ret = co_option_ack(c, o);
	if (ret || o->number == NBD_OPT_INFO)
		return ret;
	c->exp = e;
	return TRANSMISSION;
}

/* Does the query select (set) or find (list) base:allocation? Unknown names and namespaces are ignored. */
static bool query_matches(const uint8_t *q, uint32_t len, bool list)
{
	return (len == 15 && !memcmp(q, "base:allocation", 15)) || (list && len == 5 && !memcmp(q, "base:", 5));
}

static co_fn int co_reply_context(struct nbd_conn *c, const struct option *o, uint32_t id)
{
	uint8_t head[4];
	struct iovec iov[2] = { { head, 4 }, { (void *)"base:allocation", 15 } };

	put_be32(head, id);
	return co_option_reply(c, o, NBD_REP_META_CONTEXT, iov, 2);
}

/* LIST and SET_META_CONTEXT: name length, name, number of queries, each a length and a string. */
static co_fn int co_opt_meta(struct nbd_conn *c, const struct option *o)
{
	bool list = o->number == NBD_OPT_LIST_META_CONTEXT, found = false;
	uint32_t name_len, nqueries, at;
	struct nbd_export *e;
	int ret;

	if (!list)
		c->meta = NULL;
	if (!c->structured && !c->extended)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "structured replies or extended headers must be negotiated first");
	if (o->len < 8)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the option is too short");
	name_len = get_be32(o->data);
	if (name_len > o->len - 8)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the name is longer than the option");
	if (name_len > NBD_STRING_MAX)
		return co_option_error(c, o, NBD_REP_ERR_TOO_BIG, "the name is longer than 4096 bytes");
	nqueries = get_be32(o->data + 4 + name_len);
	at = 8 + name_len;
	for (uint32_t i = 0; i < nqueries; i++) {
		uint32_t len;

		if (o->len - at < 4 || get_be32(o->data + at) > o->len - at - 4)
			return co_option_error(c, o, NBD_REP_ERR_INVALID, "a query is longer than the option");
		len = get_be32(o->data + at);
		found |= query_matches(o->data + at + 4, len, list);
		at += 4 + len;
	}
	if (at != o->len)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the option is longer than its queries");
	e = conn_export(c, o->data + 4, name_len);
	if (!e)
		return co_option_error(c, o, NBD_REP_ERR_UNKNOWN, "there is no such export");
	if (list && !nqueries)
		found = true;

	ret = found ? co_reply_context(c, o, list ? 0 : META_ALLOCATION) : 0;
	if (!ret)
		ret = co_option_ack(c, o);
	if (!ret && found && !list)
		c->meta = e;
	return ret;
}

static co_fn int co_opt_switch(struct nbd_conn *c, const struct option *o)
{
	if (o->len)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "the option carries no data");
	if (o->number == NBD_OPT_EXTENDED_HEADERS) {
		c->extended = true;
	} else {
		if (c->extended)
			return co_option_error(c, o, NBD_REP_ERR_EXT_HEADER_REQD, "extended headers are in use");
		c->structured = true;
	}
	return co_option_ack(c, o);
}

static co_fn int co_opt_starttls(struct nbd_conn *c, const struct option *o)
{
	int ret;

	if (c->tls)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "TLS is in use already");
	if (o->len)
		return co_option_error(c, o, NBD_REP_ERR_INVALID, "NBD_OPT_STARTTLS carries no data");
	if (c->s->config.tls == NBD_TLS_OFF)
		return co_option_error(c, o, NBD_REP_ERR_POLICY, "this server is not set up for TLS");
	/* (6) */
	if (c->rpos != c->rend) {
		conn_refused_tls(c, "TLS: more was sent before STARTTLS was answered, by the client or by somebody in between");
		return -EPROTO;
	}
	ret = co_option_ack(c, o);
	if (!ret)
		ret = co_conn_starttls(c);
	c->structured = c->extended = false;
	c->meta = NULL;
	return ret;
}

/* In the mode FORCEDTLS of the protocol: is this option refused until there is TLS? */
static bool wants_tls_first(const struct nbd_conn *c, uint32_t number)
{
	return c->s->config.tls == NBD_TLS_REQUIRE && !c->tls && number != NBD_OPT_STARTTLS && number != NBD_OPT_ABORT;
}

static co_fn int co_tls_first(struct nbd_conn *c, const struct option *o)
{
	/* There is no error reply to this one. */
	if (o->number == NBD_OPT_EXPORT_NAME) {
		conn_refused_tls(c, "refused; it does not use TLS, which is required here (--tls)");
		return -EPROTO;
	}
	if (o->number == NBD_OPT_GO)
		conn_refused_tls(c, "refused; it does not use TLS, which is required here (--tls)");
	return co_option_error(c, o, NBD_REP_ERR_TLS_REQD, "this server requires TLS");
}

static co_fn int co_option(struct nbd_conn *c, const struct option *o)
{
	/* Who did not say that he knows the fixed form cannot understand a reply to anything else. */
	if (!c->fixed && o->number != NBD_OPT_EXPORT_NAME)
		return -EPROTO;
	if (wants_tls_first(c, o->number))
		return co_tls_first(c, o);
	if (c->s->stopping && o->number != NBD_OPT_ABORT)
		return co_option_error(c, o, NBD_REP_ERR_SHUTDOWN, "the server is shutting down");

	switch (o->number) {
	case NBD_OPT_EXPORT_NAME:
		return co_opt_export_name(c, o);
	case NBD_OPT_ABORT:
		co_option_ack(c, o);
		return -ECANCELED;
	case NBD_OPT_LIST:
		return co_opt_list(c, o);
	case NBD_OPT_INFO:
	case NBD_OPT_GO:
		return co_opt_go(c, o);
	case NBD_OPT_STRUCTURED_REPLY:
	case NBD_OPT_EXTENDED_HEADERS:
		return co_opt_switch(c, o);
	case NBD_OPT_LIST_META_CONTEXT:
	case NBD_OPT_SET_META_CONTEXT:
		return co_opt_meta(c, o);
	case NBD_OPT_STARTTLS:
		return co_opt_starttls(c, o);
	default:
		return co_option_error(c, o, NBD_REP_ERR_UNSUP, "this server does not know the option");
	}
}

/* Receives one option and answers it. */
static co_fn int co_next_option(struct nbd_conn *c)
{
	struct option o;
	int ret = co_conn_fill(c, NBD_OPTION_LEN);

	if (ret < 0)
		return ret;
	if (get_be64(c->rbuf + c->rpos) != NBD_OPT_MAGIC)
		return -EPROTO;
	o.number = get_be32(c->rbuf + c->rpos + 8);
	o.len = get_be32(c->rbuf + c->rpos + 12);
	c->rpos += NBD_OPTION_LEN;
	if (o.len > RBUF_SIZE) {
		if (o.len > OPTION_SKIP_MAX || o.number == NBD_OPT_EXPORT_NAME || !c->fixed)
			return -EPROTO;
		ret = co_conn_skip(c, o.len);
		if (!ret && wants_tls_first(c, o.number))
			return co_tls_first(c, &o);
		return ret < 0 ? ret : co_option_error(c, &o, NBD_REP_ERR_TOO_BIG, "the option is too long");
	}
	ret = co_conn_fill(c, o.len);
	if (ret < 0)
		return ret;
	o.data = c->rbuf + c->rpos;
	c->rpos += o.len;
	return co_option(c, &o);
}

co_fn int co_conn_handshake(struct nbd_conn *c)
{
	uint8_t hello[18];
	struct iovec iov = { hello, sizeof(hello) };
	uint32_t flags;
	int ret;

	put_be64(hello, NBD_MAGIC);
	put_be64(hello + 8, NBD_OPT_MAGIC);
	put_be16(hello + 16, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	ret = co_conn_send(c, &iov, 1);
	if (!ret)
		ret = co_conn_fill(c, 4);
	if (ret < 0)
		return ret;
	flags = get_be32(c->rbuf + c->rpos);
	c->rpos += 4;
	if (flags & ~(uint32_t)(NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES))
		return -EPROTO;
	c->fixed = flags & NBD_FLAG_FIXED_NEWSTYLE;
	c->no_zeroes = flags & NBD_FLAG_NO_ZEROES;

	while (c->options++ < OPTIONS_MAX) {
		ret = co_next_option(c);
		if (ret < 0)
			return ret;
		if (ret == TRANSMISSION) {
			c->block_status = c->meta == c->exp;
			return 0;
		}
		conn_handshake_clock(c);
	}
	return -EPROTO;
}
