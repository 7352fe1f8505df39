/* SPDX-License-Identifier: MIT */
/*
 * The write log: public interface. Theory and invariants are in wlog/internal.h; the format is docs/format-wlog.md.
 *
 * One log lives on one log device, or on two that mirror each other, and serves many volumes. Each attached
 * volume is a disk layer over its image: writes go to the log and later, in the background, to the image (destage).
 * Everything runs on one reactor, the home of the log and of its volumes.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "blk/disk.h"
#include "util/hist.h"
#include "util/uuid.h"

struct wlog;

#define WLOG_MAX_DEVICES 2
#define WLOG_MAX_VOLUMES 64
#define WLOG_NAME_MAX 63
#define WLOG_MIN_SIZE (32ull << 20)

enum wlog_mode {
	WLOG_MODE_FLUSH,	/* a write is acknowledged from memory, a flush commits what came before it */
	WLOG_MODE_WRITE,	/* each write is acknowledged from the log */
};

enum wlog_destage {
	WLOG_DESTAGE_MERGED,	/* newest version only, by offset, epochs merged */
	WLOG_DESTAGE_ORDERED,	/* epoch by epoch, the image flushed between two */
};

/* --- Life of a log --- */

struct wlog_format_opts {
	uint32_t segment_size;	/* power of two, 1..64 MiB; 0: chosen from the size (4 MiB, less for small logs) */
	bool force;		/* format over a log that holds dirty data */
	const char *relic_dir;	/* as in struct wlog_config: what it holds of the old log goes */
	bool small;		/* segments down to 64 KiB and any size of at least 8 segments (tests) */
	bool no_prewrite;	/* do not write the device once with zeroes (tests) */
	void (*progress)(void *arg, uint64_t done, uint64_t total);
	void *progress_arg;
};

/*
 * Formats. Refuses (-EEXIST, bytes and age in the message) a device that holds a log with dirty data unless `force`. The devices stay the
 * caller's.
 */
co_fn int co_wlog_format(struct disk *const *dev, int ndev, const struct wlog_format_opts *opts, struct err *err);

struct wlog_config {
	uint64_t memory;	/* bound for data held in memory; 0: 64 MiB */
	unsigned destage_parallel; /* image writes in flight per volume; 0: what the image says it needs (opt_depth), 16 at least */
	unsigned destage_holes;	/* holes between dirty pieces that are worth a read, to write them together; 0: 3 */
	uint64_t destage_round;	/* bytes that go to the image between two flushes of it, at most; 0: 64 MiB */
	uint64_t destage_delay_ns; /* how long dirty data may rest before it is destaged; 0: 1 s. The sooner of this and the watermark */
	unsigned low_pct, high_pct; /* of a volume's quota and of the log: destaging urges from low on (0: 25), writers are slowed from high on (0: 60) */
	uint64_t side_timeout_ns; /* a side of the mirror that answers a write so much later than the other has failed; 0: 5 s; UINT64_MAX: never */
	bool no_destage;	/* tests and read-only tools: nothing is destaged but by drain */
	bool read_only;		/* recovery builds the map but writes nothing anywhere */
	/*
	 * The operator's explicit choice to have the rest: a batch whose header or descriptors are damaged is given up with all that follows it; a record
	 * whose data is damaged, or cannot be read, is left out when it is destaged, and the image keeps what it held there.
	 */
	bool ignore_damage;
	/*
	 * A folder in memory (tmpfs) where what is acknowledged and not yet in the log outlives this process: relic.h. NULL: it does not. Tests give memory
	 * of their own instead, wl_relic_size() bytes, and are told of each step at which a kill could fall.
	 */
	const char *relic_dir;
	void *relic_mem;
	void (*relic_step)(void *arg, const char *where);
	void *relic_arg;
	void (*on_lost)(void *arg, const char *volume, uint64_t rno, uint64_t off, uint64_t len); /* told what is left out; NULL: the log's messages */
	void *on_lost_arg;
};

/* The folder for wlog_config.relic_dir: /dev/shm, or what the environment says (WEIR_SHM_DIR). */
const char *wlog_relic_dir(void);
/* The file in that folder where a killed server of this log has left something that the next open for writing takes; false: there is none. */
bool wlog_relic_left(const char *dir, const struct uuid *log, char *path, size_t size);

/*
 * Opens and recovers: reads the superblock and the index of each segment, verifies the tail, and is usable at once. The devices become the log's
 * on success. Errors: -EINVAL not a log / truncated device / other version; -EBADMSG damaged record that had been durable (which, where, of
 * which volumes); -EBUSY in use.
 */
co_fn int co_wlog_open(struct disk *const *dev, int ndev, const struct wlog_config *config, struct wlog **ret, struct err *err);

/* Makes durable what was acknowledged from memory, of all volumes. */
co_fn int co_wlog_commit(struct wlog *w);

/* Commits what is in memory, waits for running destage writes, records a clean stop and frees. All volumes must be closed. Returns the commit's error. */
co_fn int co_wlog_close(struct wlog *w);

/* --- Volumes --- */

struct wlog_volume_config {
	enum wlog_mode mode;
	enum wlog_destage destage;
	uint64_t quota;		/* bytes of log the volume may hold dirty; 0: an equal share that grows into free space */
	bool discard_log;	/* drop the volume's dirty data first (operator's explicit choice) */
	bool force_replay;	/* accept an image that changed since (operator's explicit choice) */
	bool volatile_from_start; /* writes are acknowledged from memory though no flush has come yet: flushes are ignored above, by the operator's choice */
	bool no_mark;		/* do not mark the image (tests; stores without a place for marks are detected by themselves) */
};

/*
 * Attaches `image` as volume `name`, a new one or one that the log knows. Refuses: an image marked by another log (-EBUSY), an image that
 * changed since the log last wrote to it (-ESTALE), an image of another size or identity while dirty (-EINVAL); each message says what would be lost and which
 * option overrides. On success *ret is a disk that owns `image`; co_disk_close() of it commits and detaches: clean volumes leave no mark, dirty ones
 * stay in the log. On failure `image` stays the caller's.
 */
co_fn int co_wlog_attach(struct wlog *w, const char *name, struct disk *image, const struct wlog_volume_config *config,
			 struct disk **ret, struct err *err);

/*
 * For an image that is to be opened without a log: -EBUSY, with the log and its host in the message, if a log left its mark on it. With `discard` the
 * mark is removed instead (operator's explicit choice).
 */
co_fn int co_wlog_check_unlogged(struct disk *image, bool discard, struct err *err);

/* Writes everything dirty of the attached volumes to their images and flushes those. -EIO if an image failed, -ECANCELED if cancelled. */
co_fn int co_wlog_drain(struct wlog *w, void (*progress)(void *arg, uint64_t done, uint64_t total), void *arg, const bool *cancel);
/* The same for one volume, the disk that co_wlog_attach() returned. */
co_fn int co_wlog_drain_volume(struct disk *volume, const bool *cancel);
/* From now on, or not any more, what is damaged of this volume is left out when it is destaged: see wlog_config.ignore_damage. */
void wlog_ignore_damage(struct disk *volume, bool on);

/* Drops a volume that is not attached, dirty or not; the caller has asked the operator. -ENOENT. */
co_fn int co_wlog_drop_volume(struct wlog *w, const char *name, struct err *err);

/* --- Mirror --- */

/*
 * Replaces the failed, missing or outdated side by `dev`, or gives a log of one device a second one, and copies in the background (wlog_info.rebuilding). With `dev`
 * NULL the side that is present but outdated is brought back. `dev` is the log's in any case: on failure it is closed, as is what it replaced.
 */
co_fn int co_wlog_rebuild(struct wlog *w, struct disk *dev, struct err *err);
/* True if `device` is how the side that is out, and open, is called: it cannot be opened again, and is brought back instead. */
bool wlog_is_out(const struct wlog *w, const char *device);
/* For who must not overwrite anything by mistake: -EEXIST if the device is not empty where a log or a file system begins. */
co_fn int co_wlog_check_blank(struct disk *dev, struct err *err);
/* Stops the copying, soon: the side stays out. Plain function. */
void wlog_rebuild_cancel(struct wlog *w);

/* --- Figures --- */

struct wlog_volume_info {
	char name[WLOG_NAME_MAX + 1];
	struct uuid uuid;
	char image[256];	/* what the operator wrote */
	uint64_t size;
	bool attached, stalled;	/* stalled: the image fails or hangs */
	bool damaged;		/* a record is: the volume is not written, not even by destage */
	uint64_t bad_off, bad_len; /* the last range that was found damaged, or that cannot be read and holds the log's tail; bad_len 0: none */
	uint64_t lost_bytes;	/* left out as the operator chose */
	enum wlog_destage destage;
	enum wlog_mode mode;
	bool dirty;		/* something is in the log and not in the image */
	uint64_t dirty_bytes;	/* the room that it takes; zeroes, and what a discard left, take none */
	uint64_t volatile_bytes; /* acknowledged from memory, not in the log yet */
	uint64_t dirty_since_wall_ns; /* of the oldest; 0 if clean */
	uint64_t quota;
	uint64_t records, epochs;
	uint64_t destaged_bytes;
};

struct wlog_info {
	struct uuid uuid;
	uint64_t size, segment_size, used_bytes, memory_bytes, memory_limit;
	uint64_t sequence;	/* of the next batch */
	bool clean, failed, degraded, rebuilding;
	bool survives_kill;	/* what was acknowledged from memory outlives a killed process */
	int rebuild_error;	/* of the last rebuild that ended */
	uint64_t rebuild_done, rebuild_total;
	uint64_t write_waits_ns; /* how long the device write in progress has been waiting */
	const char *hanging;	/* a device that owes an answer and is not used any more; NULL: none. Valid until the next rebuild */
	uint64_t commits, commit_bytes, device_errors;
	uint64_t commits_foreseen; /* of them: begun before their flush came */
	unsigned devices, volumes;
	const struct hist *commit_latency;
};

/* Bytes of its buffers, whose size does not change, and of its index of what is dirty. */
void wlog_memory(const struct wlog *w, uint64_t *ret_buffers, uint64_t *ret_index);
/* Of the buffers, what lies in memory that outlives the process, and is resident. */
uint64_t wlog_shared_memory(const struct wlog *w);
void wlog_get_info(const struct wlog *w, struct wlog_info *ret);
/* 0, or -ENOENT beyond the last. */
int wlog_get_volume(const struct wlog *w, unsigned index, struct wlog_volume_info *ret);
/* json_t object, new reference. */
void *wlog_status(struct wlog *w);

/* --- Offline tools --- */

struct wlog_check_report {
	uint64_t batches, records, bytes, damaged;
	uint64_t torn_tail_bytes;
};
/* Reads everything, verifies every checksum. `line` is told each finding, and with `dump` each batch and record. Changes nothing. -EBADMSG if damage was found. */
co_fn int co_wlog_check(struct disk *const *dev, int ndev, bool dump, void (*line)(void *arg, const char *text), void *arg,
			struct wlog_check_report *ret, struct err *err);
