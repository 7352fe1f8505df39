/* SPDX-License-Identifier: MIT */
/*
 * Crash tests of the write log: what the parts share. README.md says what is tested and how to reproduce a failure.
 *
 * A scenario is all that a seed decides: volumes, modes, sizes, devices, workload. A world is devices on one power supply
 * with what is open on them, and the volumes' histories. While a workload runs, a snapshot is taken at each write to a device (and at each
 * durable answer): a fork of the supply as a cut at that instant would leave it, and the tick of that instant. Later each snapshot
 * becomes a world of its own in which the log is recovered and the volumes are compared with the histories.
 */
#pragma once

#include "backend/fault.h"
#include "model.h"
#include "rt/sync.h"
#include "util/rng.h"
#include "cache/cache.h"
#include "wlog/wlog.h"

#define CRASH_VOLUMES 3
#define CRASH_HANG_NS (600ull * 1000000000)	/* virtual time after which a phase counts as hung */

/* What is asked for on the command line. */
struct crash_opts {
	uint64_t cut;		/* only this cut of the run; 0: every one */
	uint64_t cut2;		/* only this second cut; 0: every one */
	bool verbose;
};
extern struct crash_opts crash_opts;

struct workload {
	unsigned workers, ops;	/* per volume; per worker */
	uint64_t max_write, hot_size;
	uint64_t think_ns;	/* longest pause between two requests of a worker */
	uint8_t flush_pct, fua_pct, zero_pct, discard_pct, read_pct, unaligned_pct, hot_pct;
};

struct scenario {
	const char *variant;
	uint64_t seed;
	bool logged;		/* with a log; else the choke points of the image alone */
	bool filled;		/* the images hold words before the first write, not zeroes */
	bool perfect;		/* self-test: no log, one worker, each write FUA and one sector */
	bool qcow2;		/* the images are qcow2 images */
	unsigned cluster_bits;
	bool ext_l2;
	uint64_t cache;		/* bytes of a read cache below the log, in small chunks; 0: none */
	bool kill;		/* not the power is cut, but the process ends: the log's memory is kept */
	bool lying;		/* self-test: flushes and FUA never reach the image */
	unsigned nvols, nsides;
	bool spare;		/* a device log2 that can replace a side */
	uint64_t size[CRASH_VOLUMES], log_size;
	struct powercut_dev_config log_dev, image_dev;
	struct wlog_format_opts format;
	struct wlog_config log;
	struct wlog_volume_config vol[CRASH_VOLUMES];
	struct workload work;
	uint64_t warm_up;	/* bytes that are written before anything is cut, so that the ring is somewhere else */
	uint64_t bulk;		/* bytes that a writer of large requests puts on the last volume during the run */
};

/* The scenario of a seed; variants change it further. */
void scenario_init(struct scenario *sc, const char *variant, uint64_t seed);
void scenario_print(const struct scenario *sc);

struct relic_copy;

struct snap {
	struct powercut *p;
	struct relic_copy *relic;	/* what the log had in memory that outlives a kill; NULL: nothing */
	uint64_t at;		/* the tick of the cut */
	uint64_t time_ns;	/* the clock at the cut */
	uint64_t n;		/* number of the cut */
	bool recovering;	/* the world's content was not known yet: the histories of the world before count */
	const char *where;
};

struct snaps {
	struct snap *v;
	unsigned n, max;
	uint64_t seen;		/* instants, whether a snapshot was taken or not */
	uint64_t want;		/* only this one; 0: all */
	unsigned every;		/* only each such one (a prime spreads them); 0: off */
	unsigned per_cut;	/* snapshots with different losses at one instant */
};

struct world {
	const struct scenario *sc;
	struct powercut *p;
	struct relic_copy *relic;	/* for the first open */
	bool opened;
	bool forgetful;		/* the memory was lost after all, with the machine */
	uint64_t steps;
	uint64_t clock;
	uint64_t time_ns;	/* the latest known to have passed, before the next run */
	struct model *model[CRASH_VOLUMES];
	unsigned sides;		/* bit mask of the log devices to open */
	bool complete;		/* when it was closed last, no side of the mirror was missing */
	struct wlog *log;
	struct cache *cache;
	struct disk *vol[CRASH_VOLUMES];
	struct snaps snaps;
	unsigned cut_every;	/* for world_arm() once the workload proper begins */
	/* workload */
	bool known;		/* the models' bases are what the volumes hold */
	bool errors_expected;
	bool stop;		/* workers end */
	unsigned running, running_of[CRASH_VOLUMES];
	struct co_queue idle;
	uint64_t errors, done[CRASH_VOLUMES], failed[CRASH_VOLUMES];
	uint64_t longest_ns[CRASH_VOLUMES]; /* one request */
	bool sticky[CRASH_VOLUMES]; /* a flush failed */
	/* I/O hook of the variant, called behind the snapshots' */
	powercut_hook *hook;
	void *hook_arg;
};

/* --- world.c --- */

/* Devices with the scenario's content; nothing formatted or opened. */
struct world *world_create(const struct scenario *sc);
/* A world on the supply `p`, whose histories start with the given contents later: world_know(). */
struct world *world_on(const struct scenario *sc, struct powercut *p, uint64_t time_ns);
void world_destroy(struct world *w);
struct powercut_dev *world_log_dev(struct world *w, unsigned side);
struct powercut_dev *world_image_dev(struct world *w, unsigned vol);
/* From here on `content` is what volume `vol` holds; request numbers go on after those of `before`. */
void world_know(struct world *w, unsigned vol, const struct model *before, const uint8_t *content);
/* Snapshots are taken from now on. */
void world_arm(struct world *w, unsigned every, unsigned per_cut, uint64_t want);
void world_disarm(struct world *w);
/* One snapshot now, whether armed or not. */
void world_take(struct world *w, const char *where);
/* Those that are left. */
void world_drop_snaps(struct world *w);
/* Moves the histories to a world that has nothing else. */
struct world *world_take_histories(struct world *w);
/* Another instant to cut at. */
void world_instant(struct world *w, const char *where);
/* A durable answer: another instant to cut at. */
void world_answered(struct world *w);

co_fn int co_world_format(struct world *w, struct err *err);
/* Opens the log and attaches all volumes; on failure nothing is open. */
co_fn int co_world_open(struct world *w, struct err *err);
/* Closes what is open; the log's error. */
co_fn int co_world_close(struct world *w);
/* The whole of a volume; the caller frees it. NULL: a read failed. */
co_fn uint8_t *co_world_read(struct world *w, unsigned vol);
/* What the image holds by itself. */
uint8_t *world_image(struct world *w, unsigned vol);

/* --- relic.c --- */

struct relic_copy *relic_copy(const struct world *w);
void relic_free(struct relic_copy *c);	/* NULL is fine */
/* Of a world of kills: gives the log its memory, with what was left there when it is opened first. */
void relic_open(struct world *w, struct wlog_config *config);

/* --- work.c --- */

/* Writes sc->warm_up bytes, waits, and begins the histories anew with what the volumes then hold. */
co_fn void co_warm_up(struct world *w);
/*
 * Runs the scenario's workload with `ops` requests per worker. False if it had not ended after `limit_ns` (0: never gives up); workers
 * then start nothing new, and co_work_wait() waits for them again.
 */
co_fn bool co_work_wait(struct world *w, uint64_t limit_ns);
co_fn bool co_work(struct world *w, unsigned ops, uint64_t seed, uint64_t limit_ns);

/* --- verify.c --- */

enum verify_then {
	THEN_CLOSE = 0,
	THEN_DRAIN = 1 << 0,	/* drain, and hold the image alone against the content */
	THEN_WORK = 1 << 1,	/* go on working */
	THEN_CUT = 1 << 2,	/* cuts again at each write from the start of recovery on, and verifies those */
	THEN_REOPEN = 1 << 3,	/* close, open again, the same content */
	THEN_ALONE = 1 << 5,	/* of a mirror that is complete each side alone is enough, after the close */
	THEN_IMAGE = 1 << 4,	/* the ordered image alone, as if the log were lost */
};

/* Recovers snapshot `s` of world `w` and compares; reports failures itself and does not return from them. */
void verify_snap(struct world *w, struct snap *s, unsigned then);
/* All of them; frees them. */
void verify_snaps(struct world *w, unsigned (*then)(uint64_t n, struct rng *r));

/*
 * Of `n` snapshots each so many-th is to be verified, the first one being a number below that: every one, or under sanitizers as many
 * as are missing from the number that was asked for, from all over the run.
 */
unsigned verify_step(const struct world *w, unsigned n, unsigned *ret_first);

/* Drains, and holds the images alone and the volumes against the histories: nothing is left out. */
co_fn void co_drain_and_verify(struct world *w);

/* Compares what is open in `w` with the histories of `before` at tick `at`, with nothing left out if `all`. */
co_fn void co_verify_content(struct world *w, const struct world *before, uint64_t at, bool all, const char *where);
/* The same, and makes it w's base: w->known. */
co_fn void co_verify_and_know(struct world *w, const struct world *before, uint64_t at, bool all, const char *where);

/* --- main.c --- */

/* Runs fn(arg) as the first coroutine of a new simulated reactor, whose clock is past `start_ns`; a hang or a deadlock is reported. */
void crash_run(uint64_t start_ns, uint64_t seed, co_entry *fn, void *arg);
/* Reports and ends the program: variant, seed, cut, what and why. */
__attribute__((format(printf, 2, 3), noreturn))
void crash_fail(const char *what, const char *fmt, ...);
/* Where the program is, for reports. */
extern uint64_t crash_at_cut, crash_at_cut2;
extern uint64_t crash_cuts;	/* verified so far */
extern uint64_t crash_until;	/* of them are enough, under sanitizers; 0: every cut of a seed is verified */

struct variant {
	const char *name, *promise;
	void (*run)(const struct scenario *sc);
	void (*adjust)(struct scenario *sc, struct rng *r);
};
extern const struct variant crash_variants[];

static inline bool chance(struct rng *r, unsigned pct)
{
	return rng_below(r, 100) < pct;
}
