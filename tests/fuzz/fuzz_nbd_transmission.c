/* SPDX-License-Identifier: MIT */
/*
 * NBD server: requests after a good handshake.
 *
 * The first byte chooses: bit 0 structured replies, bit 1 extended headers, bit 2 block status, bit 3 read-only, bit 4 raw bytes. Otherwise each 12 bytes
 * that follow are a request with a good header: command, flags, offset and length as small numbers times a unit; a payload follows where it should.
 */
#include "fuzz/nbd_fuzz.h"

#define STREAM_MAX (1u << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct out {
	uint8_t buf[STREAM_MAX];
	size_t len;
};

static void put(struct out *o, const void *p, size_t n)
{
	n = min(n, sizeof(o->buf) - o->len);
	if (n)
		memcpy(o->buf + o->len, p, n);
	o->len += n;
}

static void put_option(struct out *o, uint32_t option, const void *data, uint32_t len)
{
	uint8_t head[NBD_OPTION_LEN];

	put_be64(head, NBD_OPT_MAGIC);
	put_be32(head + 8, option);
	put_be32(head + 12, len);
	put(o, head, sizeof(head));
	put(o, data, len);
}

static uint64_t spread(uint16_t v)
{
	static const uint64_t unit[] = { 1, 512, 4096, 65536, 1 << 20, 32 << 20, 1ull << 40, 1ull << 60 };

	return (v >> 3) * unit[v & 7];
}

/* One request of 12 input bytes: command, 1 spare, flags 2, offset 2, length 2, cookie 4. */
static void put_request(struct out *o, const uint8_t *rec, bool extended)
{
	uint8_t head[NBD_EXT_REQUEST_LEN] = { 0 };
	static const uint8_t payload[65536];
	uint16_t type = rec[0] % 10, flags = get_be16(rec + 2);
	uint64_t len = spread(get_be16(rec + 6)), data;

	put_be32(head, extended ? NBD_EXT_REQUEST_MAGIC : NBD_REQUEST_MAGIC);
	put_be16(head + 4, flags);
	put_be16(head + 6, type);
	memcpy(head + 8, rec + 8, 4);
	put_be64(head + 16, spread(get_be16(rec + 4)));
	if (extended) {
		put_be64(head + 24, len);
		data = flags & NBD_CMD_FLAG_PAYLOAD_LEN ? len : 0;
	} else {
		put_be32(head + 24, len);
		data = type == NBD_CMD_WRITE ? (uint32_t)len : 0;
	}
	put(o, head, extended ? NBD_EXT_REQUEST_LEN : NBD_REQUEST_LEN);
	if (type == NBD_CMD_BLOCK_STATUS && data == 12) {
		uint8_t status[12] = { [5] = rec[1], [11] = 1 };

		put(o, status, sizeof(status));
		return;
	}
	for (; data && o->len < sizeof(o->buf); data -= min(data, sizeof(payload)))
		put(o, payload, min(data, sizeof(payload)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct out o;
	static const uint8_t meta[] = "\0\0\0\0" "\0\0\0\1" "\0\0\0\17" "base:allocation", go[6];
	uint8_t mode = size ? data[0] : 0;
	bool structured = mode & 1, extended = mode & 2, status = mode & 4;
	struct fuzz_client c = { .in = o.buf };

	o.len = 0;
	put(&o, "\0\0\0\3", 4);
	c.skip = 18;
	if (structured) {
		put_option(&o, NBD_OPT_STRUCTURED_REPLY, NULL, 0);
		c.skip += NBD_OPTION_REPLY_LEN;
	}
	if (extended) {
		put_option(&o, NBD_OPT_EXTENDED_HEADERS, NULL, 0);
		c.skip += NBD_OPTION_REPLY_LEN;
	}
	if (status && (structured || extended)) {
		put_option(&o, NBD_OPT_SET_META_CONTEXT, meta, sizeof(meta) - 1);
		c.skip += 2 * NBD_OPTION_REPLY_LEN + 4 + 15;
	}
	put_option(&o, NBD_OPT_GO, go, sizeof(go));
	c.skip += 3 * NBD_OPTION_REPLY_LEN + 12 + 14;
	if (structured || extended)
		c.stream = extended ? STREAM_EXTENDED : STREAM_STRUCTURED;
	if (mode & 16)
		put(&o, data + 1, size - 1);
	else
		for (size_t at = 1; at + 12 <= size; at += 12)
			put_request(&o, data + at, extended);
	c.len = o.len;
	fuzz_serve(&c, mode & 8);
	return 0;
}
