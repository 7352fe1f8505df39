/* SPDX-License-Identifier: MIT */
/*
 * NBD client: the handshake (fixed newstyle; the older newstyle where that is all there is).
 *
 * Asks for extended headers, else structured replies; then for base:allocation; then goes with the block sizes asked for. Everything that
 * the server sends is bounded: REPLIES_MAX replies to an option, OPTION_DATA_MAX bytes each, NBD_HANDSHAKE_NS in all.
 */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/nbd.h"
#include "rt/io.h"
#include "util/bytes.h"

#define REPLIES_MAX 256
#define OPTION_DATA_MAX (64u << 10)
#define OPTION_SEND_MAX (NBD_STRING_MAX + 64)
#define CONTEXT "base:allocation"

struct guard {
	struct rt_timer timer;
	int fd;
	bool fired;
};

struct option_reply {
	uint32_t type, len;
};

static void guard_fired(struct rt_timer *t)
{
	struct guard *g = container_of(t, struct guard, timer);

	g->fired = true;
	rt_io_shutdown(g->fd);
}

static int violation(struct nbd_conn *c, struct err *err, const char *what)
{
	return err_set(err, -EPROTO, "%s: breaks the NBD protocol in the handshake: %s", c->n->disk.name, what);
}

static co_fn int co_send_option(struct nbd_conn *c, uint32_t option, const void *data, uint32_t len)
{
	uint8_t head[NBD_OPTION_LEN];
	struct iovec iov[2] = { { head, sizeof(head) }, { (void *)(uintptr_t)data, len } };

	put_be64(head, NBD_OPT_MAGIC);
	put_be32(head + 8, option);
	put_be32(head + 12, len);
	return co_nbd_send(c, iov, len ? 2 : 1);
}

/* The header of one reply; its `len` bytes follow in the stream. */
static co_fn int co_option_reply(struct nbd_conn *c, uint32_t option, struct option_reply *ret, struct err *err)
{
	const uint8_t *p;
	int r = co_nbd_need(c, NBD_OPTION_REPLY_LEN);

	if (r)
		return r;
	p = nbd_rx(c);
	if (get_be64(p) != NBD_REP_MAGIC)
		return violation(c, err, "a reply to an option has a wrong magic number");
	if (get_be32(p + 8) != option)
		return violation(c, err, "a reply is to another option than the one that was sent");
	ret->type = get_be32(p + 12);
	ret->len = get_be32(p + 16);
	c->rx_head += NBD_OPTION_REPLY_LEN;
	if (ret->len > OPTION_DATA_MAX)
		return violation(c, err, "a reply to an option is too long");
	return 0;
}

/* An option without data that the server acknowledges or not. 1: acknowledged; 0: not. */
static co_fn int co_ask(struct nbd_conn *c, uint32_t option, struct err *err)
{
	struct option_reply rep;
	int r = co_send_option(c, option, NULL, 0);

	if (!r)
		r = co_option_reply(c, option, &rep, err);
	if (!r)
		r = co_nbd_skip(c, rep.len);
	if (r)
		return r;
	if (rep.type == NBD_REP_ACK)
		return 1;
	return rep.type & 0x80000000u ? 0 : violation(c, err, "an option is answered with a reply of another kind");
}

/* NAME with its length in front; returns behind it. */
static uint8_t *put_name(uint8_t *p, const char *name)
{
	size_t len = strlen(name);

	put_be32(p, len);
	memcpy(p + 4, name, len);
	return p + 4 + len;
}

static co_fn int co_set_context(struct nbd_conn *c, struct err *err)
{
	uint8_t data[OPTION_SEND_MAX], *p;
	struct option_reply rep;
	int r;

	p = put_name(data, c->n->config.uri.export);
	put_be32(p, 1);
	p = put_name(p + 4, CONTEXT);
	r = co_send_option(c, NBD_OPT_SET_META_CONTEXT, data, p - data);
	for (int i = 0; !r && i < REPLIES_MAX; i++) {
		r = co_option_reply(c, NBD_OPT_SET_META_CONTEXT, &rep, err);
		if (r)
			return r;
		if (rep.type == NBD_REP_META_CONTEXT && rep.len == 4 + strlen(CONTEXT)) {
			r = co_nbd_need(c, rep.len);
			if (!r && !memcmp(nbd_rx(c) + 4, CONTEXT, strlen(CONTEXT))) {
				c->info.has_context = true;
				c->info.context = get_be32(nbd_rx(c));
			}
		}
		if (!r)
			r = co_nbd_skip(c, rep.len);
		if (!r && rep.type == NBD_REP_ACK)
			return 0;
		if (!r && rep.type & 0x80000000u) {
			c->info.has_context = false;
			return 0;
		}
	}
	return r ? r : violation(c, err, "too many metadata contexts");
}

static co_fn int co_read_info(struct nbd_conn *c, uint32_t len, bool *have_export, struct err *err)
{
	const uint8_t *p;
	int r;

	if (len < 2)
		return violation(c, err, "an information reply is too short");
	r = co_nbd_need(c, min(len, 14u));
	if (r)
		return r;
	p = nbd_rx(c);
	switch (get_be16(p)) {
	case NBD_INFO_EXPORT:
		if (len != 12)
			return violation(c, err, "the export's information has a wrong length");
		c->info.size = get_be64(p + 2);
		c->info.flags = get_be16(p + 10);
		*have_export = true;
		break;
	case NBD_INFO_BLOCK_SIZE:
		if (len != 14)
			return violation(c, err, "the block sizes have a wrong length");
		c->info.min_block = get_be32(p + 2);
		c->info.opt_block = get_be32(p + 6);
		c->info.max_payload = get_be32(p + 10);
		break;
	}
	return co_nbd_skip(c, len);
}

/* The server's own words, made safe to print: " (WORDS)" or "". */
static co_fn int co_read_words(struct nbd_conn *c, uint32_t len, char *buf, size_t size)
{
	uint32_t n = min(len, (uint32_t)200);
	int r = co_nbd_need(c, n);
	size_t at = 0;

	buf[0] = '\0';
	if (r)
		return r;
	if (n) {
		at = snprintf(buf, size, " (it says: ");
		for (uint32_t i = 0; i < n && at + 2 < size; i++)
			buf[at++] = isprint(nbd_rx(c)[i]) ? (char)nbd_rx(c)[i] : '?';
		buf[at++] = ')';
		buf[at] = '\0';
	}
	return co_nbd_skip(c, len);
}

static int refused(struct nbd_conn *c, uint32_t type, const char *words, struct err *err)
{
	const char *name = c->n->disk.name, *export = c->n->config.uri.export;

	switch (type) {
	case NBD_REP_ERR_UNKNOWN:
		return err_set(err, -ENOENT, "%s: the server has no export named \"%s\"%s; nbdinfo --list shows those that it has", name, export, words);
	case NBD_REP_ERR_TLS_REQD:
		return err_set(err, -ENOTSUP, "%s: the server insists on TLS%s; write nbds:// in place of nbd://, with tls-certificates=DIR or tls-psk-file=FILE", name, words);
	case NBD_REP_ERR_POLICY:
		return err_set(err, -EACCES, "%s: the server does not let this client use the export%s", name, words);
	case NBD_REP_ERR_SHUTDOWN:
		return err_set(err, -ESHUTDOWN, "%s: the server is shutting down%s; try again when it is back", name, words);
	default:
		return err_set(err, -EPROTO, "%s: the server refuses the export with error %u%s", name, type & 0x7fffffffu, words);
	}
}

/* 1: in transmission; 0: the server does not know the option. */
static co_fn int co_go(struct nbd_conn *c, struct err *err)
{
	uint8_t data[OPTION_SEND_MAX], *p;
	char words[256];
	bool have_export = false;
	struct option_reply rep;
	int r;

	p = put_name(data, c->n->config.uri.export);
	put_be16(p, 1);
	put_be16(p + 2, NBD_INFO_BLOCK_SIZE);
	r = co_send_option(c, NBD_OPT_GO, data, p + 4 - data);
	for (int i = 0; !r && i < REPLIES_MAX; i++) {
		r = co_option_reply(c, NBD_OPT_GO, &rep, err);
		if (r)
			return r;
		if (rep.type == NBD_REP_ACK) {
			if (!have_export)
				return violation(c, err, "it goes without having told the export's size");
			r = co_nbd_skip(c, rep.len);
			return r ? r : 1;
		}
		if (rep.type == NBD_REP_INFO) {
			r = co_read_info(c, rep.len, &have_export, err);
		} else if (rep.type & 0x80000000u) {
			r = co_read_words(c, rep.len, words, sizeof(words));
			if (r || rep.type == NBD_REP_ERR_UNSUP)
				return r;
			return refused(c, rep.type, words, err);
		} else {
			return violation(c, err, "the answer to GO is of another kind");
		}
	}
	return r ? r : violation(c, err, "too many information replies");
}

/* The way of old servers, which hang up if they do not have the export. */
static co_fn int co_export_name(struct nbd_conn *c, bool no_zeroes, struct err *err)
{
	const char *name = c->n->config.uri.export;
	int r = co_send_option(c, NBD_OPT_EXPORT_NAME, name, strlen(name));

	if (!r)
		r = co_nbd_need(c, 10);
	if (r == -ECONNRESET)
		return err_set(err, -ENOENT, "%s: the server hung up on the export name \"%s\"; it has none of this name", c->n->disk.name, name);
	if (r)
		return r;
	c->info.size = get_be64(nbd_rx(c));
	c->info.flags = get_be16(nbd_rx(c) + 8);
	return co_nbd_skip(c, no_zeroes ? 10 : 134);
}

/* What cannot be true of any export. */
static int check_info(struct nbd_conn *c, struct err *err)
{
	struct nbd_facts *i = &c->info;

	if (!(i->flags & NBD_FLAG_HAS_FLAGS))
		return violation(c, err, "the transmission flags are not flags");
	if (i->size > DISK_MAX_SIZE)
		return violation(c, err, "the export's size is beyond all bounds");
	if (i->min_block || i->opt_block || i->max_payload) {
		if (!is_pow2(i->min_block) || i->min_block > 65536)
			return violation(c, err, "the minimum block size is not a power of two up to 64 KiB");
		if (!is_pow2(i->opt_block) || i->opt_block < i->min_block)
			return violation(c, err, "the preferred block size is not a power of two, or below the minimum");
		if (i->max_payload < i->opt_block && i->max_payload < i->size)
			return violation(c, err, "the maximum payload is below the preferred block size");
	}
	return 0;
}

/* Never goes on without. */
static co_fn int co_encrypt(struct nbd_conn *c, bool has_options, struct err *err)
{
	int r = has_options ? co_ask(c, NBD_OPT_STARTTLS, err) : 0;

	if (r < 0)
		return r;
	if (!r)
		return err_set(err, -ENOTSUP, "%s: the server does not offer TLS; give it certificates or keys, or write nbd:// if the network is to be trusted",
			       c->n->disk.name);
	return co_nbd_starttls(c, err);
}

static co_fn int co_negotiate(struct nbd_conn *c, struct err *err)
{
	uint16_t flags;
	uint8_t reply[4];
	int r = co_nbd_need(c, 18);

	if (r)
		return r;
	if (get_be64(nbd_rx(c)) != NBD_MAGIC)
		return err_set(err, -EPROTO, "%s: is not an NBD server", c->n->disk.name);
	if (get_be64(nbd_rx(c) + 8) != NBD_OPT_MAGIC)
		return err_set(err, -ENOTSUP, "%s: speaks the oldstyle NBD handshake, which went out of use in 2011; use a current server", c->n->disk.name);
	flags = get_be16(nbd_rx(c) + 16);
	c->rx_head += 18;
	put_be32(reply, flags & (NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES));
	r = co_io_send_all(c->fd, reply, sizeof(reply));
	if (r)
		return r;
	if (c->n->config.uri.is_tls) {
		r = co_encrypt(c, flags & NBD_FLAG_FIXED_NEWSTYLE, err);
		if (r)
			return r;
	}
	if (!(flags & NBD_FLAG_FIXED_NEWSTYLE))
		return co_export_name(c, flags & NBD_FLAG_NO_ZEROES, err);

	r = co_ask(c, NBD_OPT_EXTENDED_HEADERS, err);
	if (r < 0)
		return r;
	c->info.extended = r;
	if (!r) {
		r = co_ask(c, NBD_OPT_STRUCTURED_REPLY, err);
		if (r < 0)
			return r;
		c->info.structured = r;
	}
	if (c->info.extended || c->info.structured) {
		r = co_set_context(c, err);
		if (r)
			return r;
	}
	r = co_go(c, err);
	if (r)
		return r < 0 ? r : 0;
	if (c->info.extended)
		return violation(c, err, "it has extended headers but does not know GO");
	return co_export_name(c, flags & NBD_FLAG_NO_ZEROES, err);
}

co_fn int co_nbd_handshake(struct nbd_conn *c, struct err *err)
{
	struct guard g = { RT_TIMER_INIT, c->fd, false };
	int r;

	memset(&c->info, 0, sizeof(c->info));
	c->rx_head = c->rx_tail = 0;
	rt_timer_arm(&g.timer, rt_now_ns() + NBD_HANDSHAKE_NS, guard_fired);
	r = co_negotiate(c, err);
	/* In TLS 1.3 a client hears only behind its handshake that it is refused, and may find first that nobody takes what it says. */
	if (r == -EPIPE && c->tls) {
		c->rx_iov[0] = (struct iovec){ c->rx, NBD_RX_SIZE };
		(void)!co_nbd_recv(c, c->rx_iov, 1);
	}
	rt_timer_cancel(&g.timer);
	if (r && c->tls && c->tls_why[0])
		return err_set(err, -EPERM, "%s: %s; has it the certificate or key that the server wants (tls-certificates, tls-psk-file)?", c->n->disk.name,
			       c->tls_why);
	if (!r)
		r = check_info(c, err);
	if (r && g.fired)
		return err_set(err, -ETIMEDOUT, "%s: the server accepted the connection but did not finish the handshake in %llu s", c->n->disk.name,
			       NBD_HANDSHAKE_NS / 1000000000);
	if (r == -ECONNRESET || r == -EPIPE)
		return err_set(err, r, "%s: the server closed the connection during the handshake", c->n->disk.name);
	return r ? err_errno(err, r, "%s: handshake failed", c->n->disk.name) : 0;
}
