/* SPDX-License-Identifier: MIT */
/*
 * librbd and librados without a cluster: the calls that weir makes, with one image "rbd/img" in memory, for what no real cluster does on demand.
 *
 * A test that is linked with it gets it instead of the real libraries. Requests complete on threads of the double's own, in any order. It does what
 * librbd 16 was seen to do: a write across the end of the image is cut short and called a success, a read there is short, what is wholly behind is EINVAL;
 * discards free whole granules only; taking or giving up the lock changes the header's version.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fake_verb { FAKE_READ, FAKE_WRITE, FAKE_FLUSH, FAKE_DISCARD, FAKE_ZERO, FAKE_VERBS };

#define FAKE_OBJECT 65536u
#define FAKE_OTHER "192.0.2.7:0/77"	/* a client that is not ours */

/* A cluster with an empty image, and `threads` that complete requests. Stop it when all disks are closed. */
void fake_rbd_start(uint64_t size, unsigned threads);
void fake_rbd_stop(void);

/* From now on requests of this kind complete with `error`, or are refused at once; 0: no more. Nothing is changed by them. */
void fake_rbd_fail(enum fake_verb verb, int error);
void fake_rbd_refuse(enum fake_verb verb, int error);
/* Reads give one byte less than was asked for. */
void fake_rbd_short_reads(bool on);
/* Requests are taken and do not complete; off: they all do. */
void fake_rbd_hold(bool on);
/* Calls that block do so for ever, but for those that look at nothing but memory. */
void fake_rbd_hang(bool on);
unsigned fake_rbd_in_flight(void);	/* taken and not completed */
/* The n-th call (from 0) that can fail fails with `error`, once; -1: none. Counts from here. */
void fake_rbd_fail_call(int n, int error);
const char *fake_rbd_failed(void);	/* its name, "" before */
/* Each call of this name ("rbd_open") fails with `error`; NULL: none. */
void fake_rbd_fail_named(const char *name, int error);

/* The image is striped over four objects at a time in such units; 0: it is not. Asked at an open. */
void fake_rbd_stripe(uint64_t unit);

/* By other hands. */
void fake_rbd_resize(uint64_t size);
void fake_rbd_remove(void);		/* the image's header */
void fake_rbd_steal(void);		/* another client breaks the lock and takes it */
void fake_rbd_blocklist(void);		/* all of our clients */
void fake_rbd_write(uint64_t off, uint8_t byte);
/* Somebody holds the lock: FAKE_OTHER, or who `client` says. */
void fake_rbd_own(const char *client, bool watches, bool answers);
void fake_rbd_expire(void);		/* its watch is over */
/* The lock's owner, "" if it is free. */
const char *fake_rbd_owner(void);
bool fake_rbd_blocklisted(const char *client);
/* The object beside the image that remembers who had the lock; "" if there is none. */
const char *fake_rbd_witness(void);
void fake_rbd_set_witness(const char *text);
const char *fake_rbd_mark(void);
uint8_t *fake_rbd_data(void);		/* for when nothing is in flight */
