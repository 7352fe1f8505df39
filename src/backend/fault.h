/* SPDX-License-Identifier: MIT */
/*
 * The power-cut simulator: devices in RAM with a volatile cache, that share one power supply.
 *
 *	struct powercut *p = powercut_create(seed);
 *	struct powercut_dev *log = powercut_dev_create(p, "log", 8 << 20, NULL);
 *	powercut_dev_open(log, &disk)		an ordinary struct disk; hand it to the code under test
 *	powercut_cut_at(p, 17)			arm; run the workload on a simulated reactor
 *	co_disk_close(disk)			everything fails with -ESHUTDOWN since the cut
 *	powercut_restart(p, seed2)		the devices are there again, with what the cut left on the media
 *	powercut_dev_open(log, &disk)		recover and compare with the model
 *
 * or, much cheaper, because the workload runs once for all its cuts:
 *
 *	powercut_set_hook(p, fn, arg)		in fn, at every I/O: q = powercut_fork(p, seed), keep q with a copy of the model
 *	powercut_dev_find(q, "log") ...		recover on q, compare, powercut_destroy(q)
 *
 * What a device does
 *
 *  (1) A write, discard or write-zeroes takes effect (becomes visible to reads) at one instant between its submission and its
 *      completion; it is volatile from there on. Reads see volatile data. Two in flight take effect in any order.
 *  (2) A flush makes stable what had taken effect when it was submitted, at once when it completes. What came later stays volatile.
 *  (3) A FUA write is stable when it completes, and nothing else becomes stable by it. In flight it is like any other.
 *  (4) At a cut each sector (of config.sector bytes) of the media holds its last stable content or any one of the versions that
 *      it was given since, those in flight included, independently of its neighbours. `seed` decides by one of several styles (all
 *      lost, all kept, whole requests, a prefix in order, torn requests, each sector by itself, a mixture), since independent
 *      coins alone would never leave a long request whole.
 *  (5) From the cut to powercut_restart() every I/O on every device of the supply fails with -ESHUTDOWN; those in flight return
 *      at once. In particular nothing is ever acknowledged after the cut.
 *  (6) An I/O that is made to fail leaves, sector by sector, the old or the new data. A flush that is made to fail drops a random part of the
 *      volatile writes for good (they stay visible, and a later flush succeeds without them), as kernels do.
 *  (7) Each I/O takes a random virtual time, so that the simulated reactor reorders completions. All randomness comes from the
 *      seeds: the same seeds, program and reactor seed give the same run.
 *  (8) An identity mark is stable when co_disk_mark_set() returns; at a cut in the middle it is the old or the new one. The stamp
 *      (co_disk_stamp) grows with each write that takes effect; a cut may turn it back as far as the last stable write.
 *
 *  (9) Of a device that is `whole`, a write that lies within one unit of limits.atomic_write is never torn, by a cut or by an error: all of it or nothing.
 *
 * I/O numbers. Reads, writes, flushes, discards, write-zeroes and mark changes of all devices of a supply count as I/O 1, 2, 3 ... in
 * submission order, as `ios`. `writes` counts those that are not reads or extents: a cut before a read shows nothing that a cut before the next write does
 * not, so cuts count writes, errors count all I/O.
 *
 * For the simulated reactor (it needs nothing but timers). A device may be opened again after its disk was closed without
 * a cut: that is a killed process, its volatile cache lives on. Out of memory aborts.
 */
#pragma once

#include "backend/media.h"
#include "blk/disk.h"
#include "util/rng.h"

struct err;
struct powercut;
struct powercut_dev;

struct powercut_dev_config {
	uint32_t sector;	/* unit of tearing, limits.atomic_unit; 0: 512 */
	uint32_t align;		/* limits.align; 0: 512 */
	uint32_t max_io;	/* limits.max_io; 0: no limit */
	uint32_t object, opt_depth; /* limits */
	bool whole;		/* limits.atomic_write is `object`, or max_io if that is less: (9) */
	uint64_t latency_ns;	/* longest time of one I/O; 0: 100 us */
	bool no_fua;		/* lacks FUA: the choke point sends flushes */
	bool no_discard;	/* discard succeeds without an effect */
	bool no_zero;		/* lacks write-zeroes: the choke point writes a buffer */
	bool discard_keeps;	/* discarded data reads as before or as zeroes, at random; limits.discard_zeroes is false */
	bool write_through;	/* no volatile cache: stable at completion; flushes cost nothing and count nonetheless */
	bool lazy_stamp;	/* a cut may turn the stamp back to the last open or restart: fdatasync(2) does not write mtime */
	uint64_t stamp_step;	/* the stamp is the clock's time in steps of so many ns, as of a file system with times in whole seconds; 0: each one is new */
	bool no_mark;		/* marks and stamps are -ENOTSUP, as on a block device */
};

struct powercut_counters {
	uint64_t ops[DISK_OPS];		/* that reached the device */
	uint64_t bytes[DISK_OPS];
	uint64_t fua_writes;		/* writes and write-zeroes with DISK_FUA */
	uint64_t marks;
};

/* --- The supply --- */

struct powercut *powercut_create(uint64_t seed);
/* Destroys the devices too. All disks must be closed. NULL is fine. */
void powercut_destroy(struct powercut *p);

/* Arms a cut at the submission of write number n (from 1 on, counted since the start or the last restart): it is in flight. 0 disarms. */
void powercut_cut_at(struct powercut *p, uint64_t n);
/* I/O number n fails with `error` (-EIO...). With `dev` set, n counts the I/O of this device only. 0 disarms. At most one is armed. */
void powercut_fail_at(struct powercut *p, struct powercut_dev *dev, uint64_t n, int error);
/* Cuts now. Plain function. No effect if the power is off. */
void powercut_cut(struct powercut *p);
/* What a cut does is decided by this seed rather than by the run: many cuts of one run. Before the cut. */
void powercut_seed_cut(struct powercut *p, uint64_t seed);
bool powercut_is_off(const struct powercut *p);
/* Power on again: counters 0, nothing armed, no hook, device failures cleared; cuts first if the power is on. All disks must be closed. */
void powercut_restart(struct powercut *p, uint64_t seed);
/* Where the coroutines that had disks open were abandoned (rt_sim_stop()): forgets what is in flight and frees the disks. After the cut, before their stacks are reused. */
void powercut_abandon(struct powercut *p);
/*
 * A new supply as `p` would be after a cut at this instant and a restart, `p` being left alone: same devices (by name and order of
 * creation), power on, all disks closed, nothing armed. Plain function, also from a hook. Costs what is volatile now.
 */
struct powercut *powercut_fork(const struct powercut *p, uint64_t seed);

uint64_t powercut_ios(const struct powercut *p);
uint64_t powercut_writes(const struct powercut *p);

/*
 * Called at the submission of each I/O, when it is already in flight (so that a fork or a cut in the hook may leave it torn). Plain function.
 * Returns 0, a -errno to fail the I/O with, or POWERCUT_NOW. Mark changes come as DISK_OP_WRITE of length 0.
 */
#define POWERCUT_NOW 1
typedef int powercut_hook(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags);
void powercut_set_hook(struct powercut *p, powercut_hook *fn, void *arg);

/* --- Devices --- */

/* `config` may be NULL. The name is copied. */
struct powercut_dev *powercut_dev_create(struct powercut *p, const char *name, uint64_t size, const struct powercut_dev_config *config);
struct powercut_dev *powercut_dev_find(struct powercut *p, const char *name);
const char *powercut_dev_name(const struct powercut_dev *dev);
/* Any number of times, also at once. Never fails but with -ESHUTDOWN (power off). Closed by co_disk_close(). */
int powercut_dev_open(struct powercut_dev *dev, struct disk **ret);
/* From now on every I/O of this device fails with `error` (-EIO: dead side of a mirror; -ENOSPC: writes only); 0: well again. What is volatile stays so. */
void powercut_dev_fail(struct powercut_dev *dev, int error);
/* I/O submitted from now on waits until powercut_dev_stall(dev, false) or a cut: a hanging device. */
void powercut_dev_stall(struct powercut_dev *dev, bool on);
/* What is stable, and what reads see. Both belong to the device and change with it: clone what must last. */
const struct media *powercut_dev_stable(const struct powercut_dev *dev);
const struct media *powercut_dev_view(const struct powercut_dev *dev);
/* Bytes that would be lost by an unlucky cut now (versions, not distinct sectors). */
uint64_t powercut_dev_volatile(const struct powercut_dev *dev);
const struct powercut_counters *powercut_dev_counters(const struct powercut_dev *dev);
/* Changes the device behind everybody's back, stable at once (bit rot, another program). Changes the stamp if `stamp` says so. */
void powercut_dev_poke(struct powercut_dev *dev, uint64_t off, const void *buf, uint64_t len, bool stamp);
/* A snapshot of the file system that the device is a file of: what it holds now, with stamp and mark. Going back to it brings that stamp back too; later ones are new all the same. */
struct powercut_snapshot;
struct powercut_snapshot *powercut_dev_snapshot(const struct powercut_dev *dev);
void powercut_dev_rollback(struct powercut_dev *dev, const struct powercut_snapshot *snap);
void powercut_snapshot_free(struct powercut_snapshot *snap);	/* NULL is fine */
