/* SPDX-License-Identifier: MIT */
/*
 * Numbers of the NBD protocol (doc/proto.md of the nbd project, with its extended headers extension), for the client and the
 * server. All fields are big-endian.
 */
#pragma once

#include <stdint.h>

#define NBD_MAGIC 0x4e42444d41474943ull		/* "NBDMAGIC" */
#define NBD_OPT_MAGIC 0x49484156454f5054ull	/* "IHAVEOPT" */
#define NBD_REP_MAGIC 0x0003e889045565a9ull

#define NBD_REQUEST_MAGIC 0x25609513u
#define NBD_EXT_REQUEST_MAGIC 0x21e41c71u
#define NBD_SIMPLE_REPLY_MAGIC 0x67446698u
#define NBD_STRUCTURED_REPLY_MAGIC 0x668e33efu
#define NBD_EXT_REPLY_MAGIC 0x6e8a278cu

#define NBD_REQUEST_LEN 28	/* magic 4, flags 2, type 2, cookie 8, offset 8, length 4 */
#define NBD_EXT_REQUEST_LEN 32	/* the same with a length of 8 */
#define NBD_SIMPLE_REPLY_LEN 16	/* magic 4, error 4, cookie 8 */
#define NBD_STRUCTURED_REPLY_LEN 20 /* magic 4, flags 2, type 2, cookie 8, length 4 */
#define NBD_EXT_REPLY_LEN 32	/* magic 4, flags 2, type 2, cookie 8, offset 8, length 8 */
#define NBD_OPTION_LEN 16	/* magic 8, option 4, length 4 */
#define NBD_OPTION_REPLY_LEN 20	/* magic 8, option 4, type 4, length 4 */

#define NBD_STRING_MAX 4096
#define NBD_MAX_PAYLOAD (32u << 20)
#define NBD_DEFAULT_PORT "10809"

/* Handshake flags, of the server and of the client. */
#define NBD_FLAG_FIXED_NEWSTYLE (1 << 0)
#define NBD_FLAG_NO_ZEROES (1 << 1)

/* Transmission flags. */
#define NBD_FLAG_HAS_FLAGS (1 << 0)
#define NBD_FLAG_READ_ONLY (1 << 1)
#define NBD_FLAG_SEND_FLUSH (1 << 2)
#define NBD_FLAG_SEND_FUA (1 << 3)
#define NBD_FLAG_ROTATIONAL (1 << 4)
#define NBD_FLAG_SEND_TRIM (1 << 5)
#define NBD_FLAG_SEND_WRITE_ZEROES (1 << 6)
#define NBD_FLAG_SEND_DF (1 << 7)
#define NBD_FLAG_CAN_MULTI_CONN (1 << 8)
#define NBD_FLAG_SEND_CACHE (1 << 10)
#define NBD_FLAG_SEND_FAST_ZERO (1 << 11)
#define NBD_FLAG_BLOCK_STATUS_PAYLOAD (1 << 12)

enum nbd_option {
	NBD_OPT_EXPORT_NAME = 1,
	NBD_OPT_ABORT = 2,
	NBD_OPT_LIST = 3,
	NBD_OPT_STARTTLS = 5,
	NBD_OPT_INFO = 6,
	NBD_OPT_GO = 7,
	NBD_OPT_STRUCTURED_REPLY = 8,
	NBD_OPT_LIST_META_CONTEXT = 9,
	NBD_OPT_SET_META_CONTEXT = 10,
	NBD_OPT_EXTENDED_HEADERS = 11,
};

enum nbd_option_reply {
	NBD_REP_ACK = 1,
	NBD_REP_SERVER = 2,
	NBD_REP_INFO = 3,
	NBD_REP_META_CONTEXT = 4,
};

/* Error replies to options. */
#define NBD_REP_ERR(n) (0x80000000u + (n))
#define NBD_REP_ERR_UNSUP NBD_REP_ERR(1)
#define NBD_REP_ERR_POLICY NBD_REP_ERR(2)
#define NBD_REP_ERR_INVALID NBD_REP_ERR(3)
#define NBD_REP_ERR_PLATFORM NBD_REP_ERR(4)
#define NBD_REP_ERR_TLS_REQD NBD_REP_ERR(5)
#define NBD_REP_ERR_UNKNOWN NBD_REP_ERR(6)
#define NBD_REP_ERR_SHUTDOWN NBD_REP_ERR(7)
#define NBD_REP_ERR_BLOCK_SIZE_REQD NBD_REP_ERR(8)
#define NBD_REP_ERR_TOO_BIG NBD_REP_ERR(9)
#define NBD_REP_ERR_EXT_HEADER_REQD NBD_REP_ERR(10)

enum nbd_info {
	NBD_INFO_EXPORT = 0,
	NBD_INFO_NAME = 1,
	NBD_INFO_DESCRIPTION = 2,
	NBD_INFO_BLOCK_SIZE = 3,
};

enum nbd_cmd {
	NBD_CMD_READ = 0,
	NBD_CMD_WRITE = 1,
	NBD_CMD_DISC = 2,
	NBD_CMD_FLUSH = 3,
	NBD_CMD_TRIM = 4,
	NBD_CMD_CACHE = 5,
	NBD_CMD_WRITE_ZEROES = 6,
	NBD_CMD_BLOCK_STATUS = 7,
};

#define NBD_CMD_FLAG_FUA (1 << 0)
#define NBD_CMD_FLAG_NO_HOLE (1 << 1)
#define NBD_CMD_FLAG_DF (1 << 2)
#define NBD_CMD_FLAG_REQ_ONE (1 << 3)
#define NBD_CMD_FLAG_FAST_ZERO (1 << 4)
#define NBD_CMD_FLAG_PAYLOAD_LEN (1 << 5)

#define NBD_REPLY_FLAG_DONE (1 << 0)

enum nbd_chunk {
	NBD_CHUNK_NONE = 0,
	NBD_CHUNK_OFFSET_DATA = 1,
	NBD_CHUNK_OFFSET_HOLE = 2,
	NBD_CHUNK_BLOCK_STATUS = 5,
	NBD_CHUNK_BLOCK_STATUS_EXT = 6,
	NBD_CHUNK_ERROR = 0x8001,
	NBD_CHUNK_ERROR_OFFSET = 0x8002,
};
#define NBD_CHUNK_ERROR_BIT 0x8000

/* Errors of replies: errno numbers, fixed by the protocol. */
enum nbd_error {
	NBD_EPERM = 1,
	NBD_EIO = 5,
	NBD_ENOMEM = 12,
	NBD_EINVAL = 22,
	NBD_ENOSPC = 28,
	NBD_EOVERFLOW = 75,
	NBD_ENOTSUP = 95,
	NBD_ESHUTDOWN = 108,
};

/* base:allocation */
#define NBD_STATE_HOLE (1 << 0)
#define NBD_STATE_ZERO (1 << 1)
