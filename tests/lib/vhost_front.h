/* SPDX-License-Identifier: MIT */
/*
 * A small vhost-user-blk front end: the virtual machine's side without a virtual machine, for tests and measurements. Any server will do.
 *
 * The guest's memory is one memory file: for each queue a split ring, then for each slot a header, a status byte, an indirect table and a data
 * buffer. A slot is one request; its head descriptor has the slot's number times SLOT_DESCS, so that rings and slots never need a search. All
 * is in the open: hostile tests write what they like.
 *
 * What goes wrong in the protocol ends the test program with a message, unless a function says that it returns it.
 */
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "export/vhost/proto.h"

#define VF_QUEUES_MAX 16
#define VF_SLOT_DESCS 4		/* direct descriptors of a slot */

struct vf_desc {
	uint64_t addr;
	uint32_t len;
	uint16_t flags, next;
};

struct vf_ring {
	unsigned index, num;	/* num: descriptors */
	unsigned slots;		/* num / VF_SLOT_DESCS */
	struct vf_desc *desc;
	uint16_t *avail, *used;	/* as arrays of 16 bits: flags, idx, ... */
	int kick, call;
	uint16_t avail_idx, last_used, kicked;
	uint64_t kicks, calls;
	uint16_t *free;		/* stack of slots */
	unsigned nfree;
	char *slot_mem;
};

struct vf_config {
	const char *path;
	unsigned queues;	/* 0: 1 */
	unsigned num;		/* ring size; 0: 128 */
	uint32_t data;		/* bytes of a slot's buffer, a multiple of 4096; 0: 64 KiB */
	unsigned regions;	/* the memory is given as so many neighbouring regions; 0: 1 */
	uint64_t mask;		/* features that are not acknowledged though offered */
	uint64_t protocol_mask;
	bool indirect;		/* requests use an indirect table */
	bool inflight;		/* asks for an in-flight region */
	bool ask_early;		/* an answer to SET_PROTOCOL_FEATURES, if it negotiates answers */
	bool slots;		/* ADD_MEM_REG instead of SET_MEM_TABLE */
	bool no_start;		/* only memory and features; the rings are the caller's */
};

struct vf {
	struct vf_config c;
	int fd, backend_fd, mem_fd, inflight_fd;
	struct vhost_user_inflight inflight;
	char *mem;
	uint64_t mem_len, gpa;
	uint64_t features, protocol, offered, protocol_offered;
	struct vf_ring ring[VF_QUEUES_MAX];
};

/* Connects, negotiates, starts the rings. */
void vf_open(struct vf *f, const struct vf_config *c);
/* The same again after the server went away: the same memory and rings, as QEMU's reconnect=1 does. The base is the used index. */
void vf_reconnect(struct vf *f);
/* GET_VRING_BASE for each ring, then closes. */
void vf_close(struct vf *f);
/* Just closes the socket. */
void vf_drop(struct vf *f);
void vf_free(struct vf *f);

/* --- Messages --- */

/* Sends one; returns 0 or -errno. */
int vf_send(struct vf *f, uint32_t request, uint32_t flags, const void *payload, uint32_t len, const int *fds, unsigned nfds);
/* Receives a reply with up to `size` bytes of payload: its length, or -errno (-ECONNRESET: the server has closed). */
int vf_recv(struct vf *f, uint32_t request, void *payload, uint32_t size, int *fd);
/* Sends with NEED_REPLY and returns the verdict: 0, 1 refused, -errno. */
int vf_ack(struct vf *f, uint32_t request, const void *payload, uint32_t len, const int *fds, unsigned nfds);
uint64_t vf_get_u64(struct vf *f, uint32_t request);
int vf_get_config(struct vf *f, uint32_t off, void *buf, uint32_t len);
int vf_set_config(struct vf *f, uint32_t off, const void *buf, uint32_t len);
void vf_set_memory(struct vf *f);
void vf_start_ring(struct vf *f, struct vf_ring *r, uint16_t base);
/* The index where it stopped; all that was taken has been completed. */
uint16_t vf_stop_ring(struct vf *f, struct vf_ring *r);
/* True if the server has closed the connection within the time. */
bool vf_is_closed(struct vf *f, int timeout_ms);

/* --- Requests --- */

char *vf_data(struct vf *f, struct vf_ring *r, unsigned slot);
uint8_t *vf_status(struct vf *f, struct vf_ring *r, unsigned slot);
uint64_t vf_gpa(struct vf *f, const void *p);
/* A free slot, or -1. */
int vf_slot_get(struct vf_ring *r);
void vf_slot_put(struct vf_ring *r, unsigned slot);
/*
 * Describes a request in the slot and puts it into the available ring. Its data are `len` bytes of the slot's buffer, from `off` of it on; the device
 * writes to them for IN and GET_ID and reads them otherwise. The driver's index is advanced by vf_kick().
 */
void vf_submit(struct vf *f, struct vf_ring *r, unsigned slot, uint32_t type, uint64_t sector, uint32_t off, uint32_t len);
/* Makes what was submitted visible, and signals if the device wants that. */
void vf_kick(struct vf *f, struct vf_ring *r);
/* Makes it visible and signals whatever the device wants. */
void vf_kick_always(struct vf *f, struct vf_ring *r);
/* The slot of the next completion, or -1. `len` may be NULL. */
int vf_poll(struct vf_ring *r, uint32_t *len);
/* The same, but waits; -1 after the time (in ms; -1: none) or when the server is gone. */
int vf_wait(struct vf *f, struct vf_ring *r, int timeout_ms);
/* One request from beginning to end on ring 0: its status, or -1. Data as for vf_submit(), copied from or to `buf`. */
int vf_request(struct vf *f, uint32_t type, uint64_t sector, void *buf, uint32_t len);
