/* SPDX-License-Identifier: MIT */
/*
 * The vhost-user protocol: numbers and layouts, after QEMU's docs/interop/vhost-user.rst, and the split ring of Virtual I/O Device 1.2,
 * section 2.7. All numbers of messages are in the machine's own byte order.
 */
#pragma once

#include <assert.h>
#include <stdint.h>

enum vhost_user_request {
	VHOST_USER_GET_FEATURES = 1,
	VHOST_USER_SET_FEATURES,
	VHOST_USER_SET_OWNER,
	VHOST_USER_RESET_OWNER,
	VHOST_USER_SET_MEM_TABLE,
	VHOST_USER_SET_LOG_BASE,
	VHOST_USER_SET_LOG_FD,
	VHOST_USER_SET_VRING_NUM,
	VHOST_USER_SET_VRING_ADDR,
	VHOST_USER_SET_VRING_BASE,
	VHOST_USER_GET_VRING_BASE,
	VHOST_USER_SET_VRING_KICK,
	VHOST_USER_SET_VRING_CALL,
	VHOST_USER_SET_VRING_ERR,
	VHOST_USER_GET_PROTOCOL_FEATURES,
	VHOST_USER_SET_PROTOCOL_FEATURES,
	VHOST_USER_GET_QUEUE_NUM,
	VHOST_USER_SET_VRING_ENABLE,
	VHOST_USER_SET_BACKEND_REQ_FD = 21,
	VHOST_USER_GET_CONFIG = 24,
	VHOST_USER_SET_CONFIG,
	VHOST_USER_GET_INFLIGHT_FD = 31,
	VHOST_USER_SET_INFLIGHT_FD,
	VHOST_USER_RESET_DEVICE = 34,
	VHOST_USER_GET_MAX_MEM_SLOTS = 36,
	VHOST_USER_ADD_MEM_REG,
	VHOST_USER_REM_MEM_REG,
	VHOST_USER_SET_STATUS,
	VHOST_USER_GET_STATUS,
	VHOST_USER_REQUESTS
};

#define VHOST_USER_BACKEND_CONFIG_CHANGE 2u

/* Header flags */
#define VHOST_USER_VERSION 1u
#define VHOST_USER_VERSION_MASK 3u
#define VHOST_USER_REPLY (1u << 2)
#define VHOST_USER_NEED_REPLY (1u << 3)

/* Feature bits of the transport */
#define VHOST_F_LOG_ALL (1ull << 26)
#define VIRTIO_F_INDIRECT_DESC (1ull << 28)
#define VIRTIO_F_EVENT_IDX (1ull << 29)
#define VHOST_USER_F_PROTOCOL_FEATURES (1ull << 30)
#define VIRTIO_F_VERSION_1_BIT (1ull << 32)

/* Protocol feature bits */
#define VHOST_USER_PROTOCOL_F_MQ (1ull << 0)
#define VHOST_USER_PROTOCOL_F_LOG_SHMFD (1ull << 1)
#define VHOST_USER_PROTOCOL_F_REPLY_ACK (1ull << 3)
#define VHOST_USER_PROTOCOL_F_BACKEND_REQ (1ull << 5)
#define VHOST_USER_PROTOCOL_F_CONFIG (1ull << 9)
#define VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD (1ull << 12)
#define VHOST_USER_PROTOCOL_F_RESET_DEVICE (1ull << 13)
#define VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS (1ull << 15)
#define VHOST_USER_PROTOCOL_F_STATUS (1ull << 16)

#define VHOST_USER_MAX_FDS 8u
#define VHOST_USER_CONFIG_MAX 256u
#define VHOST_LOG_PAGE 4096u
#define VHOST_VRING_F_LOG_USED 1u
#define VHOST_VRING_INDEX 0xffu
#define VHOST_VRING_NOFD 0x100u

struct vhost_user_hdr {
	uint32_t request, flags, size;
};

struct vhost_user_region {
	uint64_t gpa, size, uva, offset;
};

struct vhost_user_memory {
	uint32_t n, padding;
	struct vhost_user_region region[VHOST_USER_MAX_FDS];
};

struct vhost_user_single_region {
	uint64_t padding;
	struct vhost_user_region region;
};

struct vhost_user_vring_state {
	uint32_t index, num;
};

struct vhost_user_vring_addr {
	uint32_t index, flags;
	uint64_t desc, used, avail, log;
};

struct vhost_user_log {
	uint64_t size, offset;
};

struct vhost_user_config {
	uint32_t offset, size, flags;
	uint8_t data[VHOST_USER_CONFIG_MAX];
};

struct vhost_user_inflight {
	uint64_t mmap_size, mmap_offset;
	uint16_t queues, queue_size;
	uint32_t padding;
};
#define VHOST_USER_INFLIGHT_LEN 20u	/* QEMU packs it, others pad it to 24 */

union vhost_user_payload {
	uint64_t u64;
	struct vhost_user_memory memory;
	struct vhost_user_single_region single;
	struct vhost_user_vring_state state;
	struct vhost_user_vring_addr addr;
	struct vhost_user_log log;
	struct vhost_user_config config;
	struct vhost_user_inflight inflight;
};

static_assert(sizeof(struct vhost_user_hdr) == 12, "on the wire");
static_assert(sizeof(struct vhost_user_memory) == 8 + 8 * 32, "on the wire");
static_assert(sizeof(struct vhost_user_vring_addr) == 40, "on the wire");
static_assert(sizeof(struct vhost_user_config) == 12 + VHOST_USER_CONFIG_MAX, "on the wire");

/* Split ring: descriptor flags, ring flags, the size of each part. */
#define VRING_F_NEXT 1u
#define VRING_F_WRITE 2u
#define VRING_F_INDIRECT 4u
#define VRING_NO_INTERRUPT 1u	/* avail->flags */
#define VRING_NO_NOTIFY 1u	/* used->flags */
#define VRING_DESC_LEN 16u
#define VRING_AVAIL_LEN(num) (4u + 2u * (num) + 2u)	/* flags, idx, ring, used_event */
#define VRING_USED_LEN(num) (4u + 8u * (num) + 2u)	/* flags, idx, ring, avail_event */
#define VRING_NUM_MAX 32768u
