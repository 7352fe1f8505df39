/* SPDX-License-Identifier: MIT */
/*
 * virtio-blk requests, apart from the transport that carries them (Virtual I/O Device 1.2, section 5.2).
 *
 * Durability. Each write, discard and write-zeroes is durable before it completes unless the driver has negotiated FLUSH, and the
 * writeback field (CONFIG_WCE) says that the cache is on. The field is 1 until the driver changes it, and after each reset.
 */
#pragma once

#include "blk/volume.h"

struct err;

#define VIRTIO_BLK_SERIAL_MAX 20
#define VIRTIO_BLK_SEG_MAX 126	/* data segments of one request: with header and status 128 descriptors, QEMU's ring */
#define VIRTIO_BLK_CONFIG_LEN 60u
#define VIRTIO_BLK_CONFIG_WCE 32u /* offset of the writeback field */

struct virtio_blk {
	struct volume *v;
	uint64_t features;	/* what the driver has acknowledged */
	bool writeback;		/* the config field */
	uint16_t queues;	/* for the config space */
	uint32_t block_size;	/* logical, a power of two >= 512 */
	char serial[VIRTIO_BLK_SERIAL_MAX + 1];
	uint64_t requests, errors, flushes;
	uint64_t durable;	/* changes that were made durable before they completed */
};

/* The feature bits of the device type (not those of the transport). */
uint64_t virtio_blk_features(const struct virtio_blk *b);
/* Whether writes complete before they are durable. */
bool virtio_blk_is_writeback(const struct virtio_blk *b);
/* Back to how the device is before a driver has found it. */
void virtio_blk_reset(struct virtio_blk *b);
void virtio_blk_config(const struct virtio_blk *b, uint8_t config[VIRTIO_BLK_CONFIG_LEN]);
/* The driver writes to the config space. -EINVAL for all but the writeback field. When the cache is switched off, what was written before is made durable first. */
co_fn int co_virtio_blk_set_config(struct virtio_blk *b, uint32_t off, const void *data, uint32_t len);

/*
 * Carries out one request: `nout` segments that the device reads, then `nin` that it writes. The memory may belong to a hostile guest that changes
 * it meanwhile. Returns the bytes written to the writable segments, at least 1 for the status; or -EPROTO with the reason if the layout is none of a request: the
 * device must then be stopped. Clobbers the list of readable segments; that of writable ones is as before afterwards.
 */
co_fn int64_t co_virtio_blk_request(struct virtio_blk *b, struct iovec *iov, int nout, int nin, struct err *err);
