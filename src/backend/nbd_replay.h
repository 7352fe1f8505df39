/* SPDX-License-Identifier: MIT */
/*
 * What an NBD server has acknowledged and may still lose: a bounded copy, to be sent again after a reconnect.
 *
 * A ring of entries, one for each modification since the last flush, in the order of completion (overlapping ones are never in flight
 * together, so that is the server's order too), and a ring of bytes with the data of the writes.
 *
 * Invariants
 *  (1) used + reserved <= size and the entries + reserved entries <= max: who reserved can always add.
 *  (2) The plan (nbd_replay_next) goes from the newest entry to the oldest and leaves out what a newer one covers. So the pieces of a plan never
 *      overlap and may be sent in any order, all at once.
 *  (3) A durable entry (FUA) holds no data and is never sent; it only keeps what is older from being sent over it. Sending the older data
 *      first and the FUA write again behind it would undo a durable write if both ends crashed in between.
 *  (4) Discards are not kept: what was written before one and sent again after it reads "as before", which a discard allows.
 *  (5) Memory is mapped when the buffer is created, and touched as far as it is used.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

enum nbd_replay_kind { NBD_REPLAY_WRITE, NBD_REPLAY_ZERO, NBD_REPLAY_DURABLE };

struct nbd_replay;

/* One piece to send. The data may lie in two parts. */
struct nbd_replay_op {
	enum nbd_replay_kind kind;
	unsigned flags;		/* as given to nbd_replay_add() */
	uint64_t off, len;
	struct iovec iov[2];
	int niov;
};

/* NULL: no memory. */
struct nbd_replay *nbd_replay_create(uint64_t bytes);
void nbd_replay_destroy(struct nbd_replay *r);	/* NULL is fine */

/* Room for one entry with `bytes` of data. False: a flush or a completion must come first. */
bool nbd_replay_reserve(struct nbd_replay *r, uint64_t bytes);
/* Gives the reservation back. */
void nbd_replay_release(struct nbd_replay *r, uint64_t bytes);
/* Turns the reservation into an entry; `iov` (NULL unless a write) is copied, and `reserved` is what had been reserved. */
void nbd_replay_add(struct nbd_replay *r, enum nbd_replay_kind kind, unsigned flags, uint64_t off, uint64_t len,
		    const struct iovec *iov, int niov, uint64_t reserved);

/* All entries so far are covered by a flush that is issued now; when it has succeeded, drop(mark) forgets them. */
uint64_t nbd_replay_mark(const struct nbd_replay *r);
void nbd_replay_drop(struct nbd_replay *r, uint64_t mark);
bool nbd_replay_is_empty(const struct nbd_replay *r);
uint64_t nbd_replay_bytes(const struct nbd_replay *r);	/* in use, without what is reserved */
uint64_t nbd_replay_size(const struct nbd_replay *r);

/* Starts a plan; nothing may be added or dropped until next() has returned false or the plan is given up. Pieces have at most `max` bytes of data. */
void nbd_replay_begin(struct nbd_replay *r);
bool nbd_replay_next(struct nbd_replay *r, uint64_t max, struct nbd_replay_op *ret);
