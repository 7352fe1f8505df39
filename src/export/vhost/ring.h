/* SPDX-License-Identifier: MIT */
/*
 * A split ring in a guest's memory, as the device sees it: no I/O, no coroutines.
 *
 * The guest writes to all of it at any moment. Each field is read once, and what was read is checked before use.
 *
 * Invariants
 *  (1) last_avail - used_next (mod 2^16) requests are in flight, at most `num`, and each of them has another head: busy[head].
 *  (2) The guest learns of completions only by vring_publish(); used_next - used_idx (mod 2^16) are pushed and not published.
 *  (3) With an in-flight region, desc[head].inflight is 1 from vring_pop() until after the used index that covers the head was
 *      stored. At every instant either region->used_idx equals the ring's used index and the flags are exact, or the difference is the length of
 *      the list from last_batch_head whose flags are about to be cleared. So after SIGKILL the requests in flight are known, and
 *      counter tells their order.
 */
#pragma once

#include <sys/uio.h>

#include "export/vhost/memory.h"

/* Where requests in flight are written down for the next process: one of these for each queue (docs/interop/vhost-user.rst). */
struct vring_inflight_desc {
	uint8_t inflight, padding[5];
	uint16_t next;
	uint64_t counter;
};

struct vring_inflight {
	uint64_t features;
	uint16_t version, desc_num, last_batch_head, used_idx;
	struct vring_inflight_desc desc[];
};
#define VRING_INFLIGHT_LEN(num) (sizeof(struct vring_inflight) + (num) * sizeof(struct vring_inflight_desc))

struct vring {
	/* set by the front end */
	uint32_t num;
	uint64_t desc_uva, used_uva, avail_uva, log_addr;
	bool log_used;
	uint16_t last_avail;
	/* at the start */
	bool event_idx, indirect;
	char *desc, *used, *avail; /* in the guest's memory; NULL: not mapped */
	uint8_t *busy;		/* num of them */
	uint16_t used_next, used_idx;
	bool armed;		/* the driver was asked for kicks */
	bool call_owed;		/* published without a descriptor to call */
	struct vring_inflight *inflight; /* NULL without */
	uint64_t counter;
	uint16_t *resubmit;	/* heads that an earlier process had in flight, in order */
	unsigned resubmit_n, resubmit_at;
};

/* Finds the three parts in the guest's memory; again when the table of memory changes. */
int vring_map(struct vring *r, const struct vhost_memory *m, struct err *err);
/*
 * Begins with the ring as it is; the parts are mapped. Where `inflight` tells of requests in flight they come again, in order, from vring_pop(), and
 * last_avail is what follows from it. -EBADMSG if the region contradicts itself.
 */
int vring_start(struct vring *r, struct err *err);
/* Forgets all but what the front end has set. Nothing is in flight any more. `log` may be NULL. */
void vring_stop(struct vring *r, struct vhost_log *log);
void vring_fini(struct vring *r);

/* The head of the next request: 1, 0 if there is none, -EPROTO. It is in flight from then on. */
int vring_pop(struct vring *r, uint16_t *head, struct err *err);
/* Whether vring_pop() would find one. */
bool vring_has_work(const struct vring *r);

#define VRING_SEGMENTS_MAX 256
/*
 * Describes the buffers of a request: first `*nout` that the device reads, then `*nin` that it writes, in `iov` of VRING_SEGMENTS_MAX. -EPROTO, with
 * the reason: nothing that it describes lies outside of the guest's memory.
 */
int vring_chain(const struct vring *r, struct vhost_memory *m, uint16_t head, struct iovec *iov, int *nout, int *nin, struct err *err);

/* The request has ended; `written` bytes of its buffers were written. */
void vring_push(struct vring *r, uint16_t head, uint32_t written);
/* Lets the guest see what was pushed. True if the driver wants to be called. `log` may be NULL. */
bool vring_publish(struct vring *r, struct vhost_log *log);
/* Asks the driver for a kick with its next request. */
void vring_arm(struct vring *r);
/* No more kicks for now. */
void vring_disarm(struct vring *r);
