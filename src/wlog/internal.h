/* SPDX-License-Identifier: MIT */
/*
 * Write log: structures and theory.
 *
 * The log is a ring of segments on a device. Guest writes are appended to the open *batch* in memory; a *commit* writes one batch, header, data and
 * descriptors together, with one durable device write. A volume's reads look at `fresh` (records whose batch is not durable yet), then at
 * `map` (durable records that are not in the image yet), then at the image. *Destage* brings the map's contents into the image, flushes it, and
 * only then removes them from the map; a batch that no map needs any more is *retired* when it is the oldest, which moves the tail.
 *
 * Invariants
 *  (1) Batches are numbered without a gap, and one is in flight at a time: batch n+1 is written only after n is durable. So a valid header of n+1
 *      proves n, and recovery can tell damage from a torn end.
 *  (2) Records are applied to `map` in the order of the log, when their batch and their whole atomic group are durable, and never before.
 *      Recovery applies the same records in the same order by the same function (wl_apply_batch).
 *  (3) A flush completes when `applied_seq` has reached the batch of the volume's last record. A record is acknowledged as durable at the same moment.
 *  (4) Only what is in `map` is destaged: nothing reaches the image before its record is durable.
 *  (5) A piece leaves `map` only when the image was flushed after it was written, or a newer durable record covers it.
 *  (6) A segment is written again only when a superblock that is durable says that the tail has passed it.
 *  (7) After any failed device write (of all sides) the log is in the sticky state `failed`: no commit, flush or write succeeds again.
 *
 * Life of a batch, with the function that makes each step:
 *
 *      open ──seal_open──▶ sealed ──co_commit_one──▶ written ──wl_apply_batch──▶ applied ──wl_advance_tail──▶ retired
 *
 * All of it runs on the log's home reactor. Only functions named co_ suspend, so every sequence without one is atomic.
 */
#pragma once

#include "blk/disk.h"
#include "rt/budget.h"
#include "rt/buf.h"
#include "util/err.h"
#include "util/log.h"
#include "wlog/format.h"
#include "wlog/map.h"
#include "wlog/relic.h"
#include "wlog/wlog.h"

#define WL_MEM_DEFAULT (64ull << 20)
#define WL_MEM_MIN (4ull << 20)
#define WL_POOL_RESERVE 4096u
#define WL_SEG_RESERVE 3u	/* free segments that guests may not take: two for the cleaner, one for the end */
#define WL_COMMIT_IDLE_NS 1000000000ull /* data that nobody flushes is committed after this */
#define WL_HEARTBEAT_NS 5000000000ull
#define WL_RETRY_NS 1000000000ull
#define WL_MARK_WAIT_NS 1000000000ull
#define WL_DEPTH_USUAL 16u	/* image writes in flight */
#define WL_DEPTH_MAX 64u
#define WL_RUN_MAX (1u << 20)	/* of one image write */
#define WL_RUN_CHUNK (64u << 10)
#define WL_RUN_CHUNKS 256u
#define WL_RUN_MEM ((uint64_t)WL_RUN_CHUNKS * WL_RUN_CHUNK)
#define WL_ROUND_MAX (64ull << 20)
#define WL_KEPT_MAX 32u
#define WL_UNREADABLE_NS 10000000000ull /* what cannot be read for so long, and is in everybody's way, counts as lost */

struct wl_side;

/* One device or two mirrored ones. */
struct wl_dev {
	struct disk *disk[WLOG_MAX_DEVICES];	/* NULL: missing */
	struct wl_side *side[WLOG_MAX_DEVICES];	/* of a mirror: how its disk is asked; see side.c */
	struct co_queue answered;		/* something that was asked of a side has returned */
	unsigned retiring;			/* disks that are closed as soon as they have answered */
	char retired[128];			/* the name of the last one that did not at once */
	bool told_waiting;
	uint64_t write_since;			/* when the write in progress began; 0: none */
	unsigned n;		/* sides of the log */
	bool in_sync[WLOG_MAX_DEVICES];
	bool rebuilding;	/* the side that is not in sync gets all new writes */
	int error[WLOG_MAX_DEVICES];
	uint64_t errors;
	struct co_mutex lock;	/* one write at a time: commits, superblocks and rebuild copies */
};

struct wlog_volume {
	struct disk disk;	/* first: the layer; disk.file is the image */
	struct wlog *w;
	struct list node;	/* wlog.volumes */
	unsigned slot;
	bool attached;		/* else only known from the superblock and the log */
	struct wlog_volume_config config;
	struct wl_map map, fresh;
	/*
	 * Ordered destage: durable records in order, wl_entry.fifo; of epochs up to `ordered_upto` only: all of them, none (0), or, of a volume that
	 * was ordered and is merged from now on, those before that. They are brought forward whole, other records piece by piece, so that one that
	 * was must not leave the map in parts.
	 */
	struct list fifo;
	uint64_t ordered_upto;
	uint64_t fifo_bytes, fifo_entries;
	struct wl_map round;	/* ordered destage: what the round in progress writes; its pieces move with their records */
	bool whole;		/* it goes in one write or not at all: several epochs */
	uint64_t joined;	/* epochs that went into the image with the one before them */
	uint64_t applied_rno;	/* highest record number that was ever in the map */
	uint64_t last_seq;	/* batch of the last record appended */
	uint64_t fresh_bytes;	/* appended and not applied */
	bool flushed_once;
	uint64_t dirty_since;	/* wall clock of the oldest dirty data, 0: clean */
	uint64_t last_io_ns;	/* of the guest */
	/* A foreseen flush, see layer.c. */
	uint32_t unflushed;	/* records since the last flush */
	uint32_t habit;		/* that many came before each of the last `habit_runs` flushes, one at a time */
	uint32_t habit_runs;
	uint64_t last_miss_ns;	/* when a read of the guest last began or ended on the image */
	uint64_t run_ns;	/* how long the last image write took */
	uint64_t round_began_ns, burst_ns; /* pace.c: the round in progress; what destage worked since it last rested */
	uint64_t cursor;	/* merged destage: where the next round begins; 0: at the bottom */
	uint64_t lap_since;	/* wall clock when it was there */
	uint64_t failures;
	/* destage */
	bool cancelled;		/* nobody waits for room any more */
	struct co_mutex admit_lock;
	struct co_queue room;	/* who waits for the volume's share; at most one, with admit_lock */
	unsigned draining;	/* drains of this volume */
	bool stop, stalled, damaged, destaging, running, has_stamp, has_writers, has_mark;
	bool marking;		/* the marker runs: marker.c */
	uint64_t mark_wanted, mark_has;
	struct co_queue mark_wake;
	struct co_queue destage_wake, destage_done;
	/* what is being written: runs.c */
	unsigned depth;		/* the most at once */
	unsigned runs;		/* now */
	uint64_t run_bytes;	/* of data in them */
	uint64_t run_free;	/* bit set: slot is free */
	struct co_queue run_done;
	uint8_t *run_mem;	/* WL_RUN_CHUNKS of WL_RUN_CHUNK; NULL: not attached */
	struct budget_user run_user; /* of what of it was touched */
	uint64_t run_taken[WL_RUN_CHUNKS / 64];
	uint64_t passed_over;	/* pieces that a round left to a later one since they are newer */
	unsigned run_high;	/* chunks from the start on that may have been touched */
	uint64_t records, destaged_bytes;
	/* damage, and what cannot be read */
	bool ignore_damage, log_unreadable;
	uint64_t bad_off, bad_len, lost_bytes;
	unsigned nkept;		/* ranges of the round that cannot be read, and stay in the map */
	struct { uint64_t off, len; } kept[WL_KEPT_MAX];
};

struct wlog {
	struct wl_dev dev;
	struct wlog_config config;
	struct wl_super sb;	/* as it will be written next */
	uint64_t seg_bytes;	/* segments x size */

	/* append */
	struct list batches;	/* struct wl_batch from the tail on; the open one is last */
	struct wl_batch *open;
	uint8_t *desc;		/* encoded descriptors of the open batch */
	uint32_t open_count, open_payload, open_cap, open_index_len;
	uint32_t open_desc_crc, open_index_crc;
	uint64_t open_since_ns;
	bool group_open;	/* an atomic group is being appended: seal with MORE */
	bool group_waits;	/* one waits for memory: nobody else may take it */
	uint64_t head_pos;	/* where the next batch goes, if it fits head_seg */
	uint32_t head_seg;
	uint64_t admitted;	/* bytes that admitted requests are going to append */
	struct wl_batch *commit_next; /* oldest batch that is not written */
	uint64_t next_seq, last_nonce;
	uint64_t applied_seq, durable_seq, want_seq;
	uint64_t unapplied_records;
	struct co_mutex group_lock, admit_lock;
	struct co_mutex attach_lock; /* attach, detach and drop are one at a time */
	struct co_queue commit_wake, commit_done, space;
	struct co_queue marked;	/* a mark was written, or could not be */
	uint64_t mark_deadline_ns; /* commits wait for marks until then; 0: they do not */
	bool commit_running, stop, ticker_running;
	int failed;
	uint8_t *clean_buf;	/* WL_MAX_BATCH, for copying forward */
	uint8_t *index;		/* of the segment that the head is in; index_len 0 and index_full when too large */
	uint32_t index_len;
	bool index_full;

	/* memory ring */
	uint8_t *mem;
	uint64_t mem_size, mem_head;
	uint64_t mem_end;	/* of the ring, up to mem_size: relic.c */
	struct wl_relic relic;	/* what of it outlives a killed process */
	struct wl_batch *mem_first; /* oldest batch with a buf, NULL: none */

	/* pools */
	struct wl_pool pool;
	struct wl_batch *batch_base, *batch_free;
	uint64_t batch_cap, batch_fresh, batch_used;

	/* checkpoint */
	uint32_t durable_tail_seg;
	bool sb_dirty, space_wanted, ticker_kicked;
	unsigned draining;	/* drains of all volumes */
	unsigned room_waiters;	/* on some volume's `room` */
	uint64_t space_need;	/* bytes that the largest waiting request will take of the ring */
	uint64_t clean_bad_since, clean_bad_last, clean_bad_pos; /* the record that the cleaner cannot read */
	uint64_t clean_spent;	/* bytes copied forward since anybody got room or anything was destaged */
	uint64_t sb_written_ns;
	uint8_t *sb_buf;
	struct co_queue ticker_wake;

	struct list volumes;
	struct wlog_volume *by_slot[WLOG_MAX_VOLUMES];

	unsigned rebuild_side;
	bool rebuild_running, rebuild_cancel;
	int rebuild_error;	/* of the last one that ended */
	uint64_t rebuild_done, rebuild_total;

	uint64_t commits, commit_bytes;
	uint64_t foreseen;	/* commits that began before their flush came */
	struct hist commit_latency;
	uint64_t opened_wall;
};

/* dev.c */
/* Durable on every side in sync; a side that fails is dropped, and the survivors' superblocks say so before this returns. */
co_fn int co_wl_dev_write(struct wlog *w, uint64_t pos, const void *buf, uint64_t len);
void wl_drop_side(struct wlog *w, unsigned side, int error);
/* Invariant (7): enters the failed state and wakes everybody. */
void wl_fail(struct wlog *w, int error, const char *what);
/*
 * From side `side`, or from any (-1). *buf is a buffer of rt_bufs() of `cap` bytes; a device that hangs keeps it, and *buf is then another one, with
 * undefined contents. -ETIMEDOUT: the side hangs; never of a log that has no mirror.
 */
co_fn int co_wl_dev_read(struct wlog *w, int side, uint64_t pos, uint8_t **buf, uint64_t cap, uint64_t len);

/* side.c */
struct wl_side *wl_side_create(struct wlog *w, struct disk *disk);
void wl_side_free(struct wl_side *s);		/* NULL is fine; owes nothing */
bool wl_side_owes(const struct wl_side *s);	/* an answer, to anything */
co_fn void co_wl_side_settle(struct wl_side *s);
/* Closes `disk` as soon as nothing is in flight, in the background; dev.retiring counts. */
co_fn void co_wl_side_retire(struct wlog *w, struct wl_side *side, struct disk *disk);
/* What a write may be prepared in: WL_MAX_BATCH bytes. */
uint8_t *wl_side_buf(struct wl_side *s);
/* Begins a write (`buf` is copied), or a flush (len 0). */
co_fn void co_wl_side_start(struct wl_side *s, uint64_t pos, const void *buf, uint64_t len, unsigned flags);
/* Waits for what was started on the sides of the bit mask; result[i] is -ETIMEDOUT for one that is late, of whose kind at least one is not. */
co_fn void co_wl_sides_wait(struct wlog *w, unsigned sides, int *result);
/* One write or flush, late if it takes longer than the limit. */
co_fn int co_wl_side_write(struct wl_side *s, uint64_t pos, const void *buf, uint64_t len, unsigned flags);
co_fn int co_wl_side_read(struct wl_side *s, uint64_t pos, uint8_t **buf, uint64_t cap, uint64_t len);
/* A side to read from that is in sync and not in the mask `tried`; waits while those that are left hang. -1: none is left. */
co_fn int co_wl_pick_side(struct wlog *w, unsigned tried);

/* super.c */
co_fn int co_wl_checkpoint(struct wlog *w);
/* The same for who holds dev.lock. */
co_fn int co_wl_super_write(struct wlog *w);
/*
 * Reads both slots of one device; the newer valid one. *ret_half (may be NULL) says that the other is damaged or cannot be read, so that it may have
 * been the newer.
 */
co_fn int co_wl_super_read(struct disk *d, struct wl_super *ret, bool *ret_half, struct err *err);
void wl_kick_ticker(struct wlog *w);
co_fn void co_wl_ticker(void *arg);

/* append.c */
int wl_append_init(struct wlog *w);
void wl_append_fini(struct wlog *w);
struct wl_batch *wl_batch_get(struct wlog *w);
void wl_batch_put(struct wlog *w, struct wl_batch *b);
/* Seals the open batch if there is one. */
void wl_seal(struct wlog *w);
/*
 * Appends one request as one atomic group. `iov` may be NULL (zero, discard). Waits for room; 0 or -errno. `ret_seq` is the batch whose application
 * makes it durable.
 */
co_fn int co_wl_append(struct wlog_volume *v, uint8_t type, uint64_t off, uint64_t len, const struct iovec *iov,
		       int niov, uint64_t *ret_seq);
/*
 * Brings `len` bytes of a record forward with its number and epoch; without waiting for space. -ENOSPC if there is none now. `data` NULL: the data of a
 * write is damaged, and the copy says so.
 */
int wl_append_copy(struct wlog_volume *v, const struct wl_entry *e, uint64_t off, uint64_t len, const void *data);
/* Waits until everything up to batch `seq` is durable and applied. */
co_fn int co_wl_commit_upto(struct wlog *w, uint64_t seq);
co_fn int co_wl_commit_all(struct wlog *w);
co_fn void co_wl_committer(void *arg);
/* Applies one durable batch whose bytes are at `bytes`; shared with recovery. */
int wl_apply_desc(struct wlog *w, struct wl_batch *b, const struct wl_desc *d);
void wl_apply_batch(struct wlog *w, struct wl_batch *b);
uint32_t wl_segment_of(const struct wlog *w, uint64_t pos);
uint64_t wl_segment_pos(const struct wlog *w, uint32_t seg);
/* Adds a batch of the head's segment to the index that the next segment will carry. */
void wl_index_add(struct wlog *w, uint64_t pos, const struct wl_bhead *h, const uint8_t *desc);
/* Makes the memory of the retired data unused again when nothing is dirty. */
void wl_mem_trim(struct wlog *w);

/* relic.c: takes the file, and completes what a killed process left in it. Before the scan of recovery. */
co_fn int co_wl_relic_take(struct wlog *w, struct err *err);
/* relic_complete.c: writes to the log what the file of that size holds. */
co_fn int co_wl_relic_complete(struct wlog *w, uint64_t size, struct err *err);
/* Behind the new generation's superblock: from here on the memory ring is kept. Where it cannot be, that is told, and all is as without. */
void wl_relic_begin(struct wlog *w);
/* Everything is in the log. */
void wl_relic_end(struct wlog *w);
void wl_relic_fini(struct wlog *w);
/* Room for the ring up to `end` bytes. False: the ring is smaller now (mem_end), or, if there is no memory at all, the log has failed. */
bool wl_relic_reserve(struct wlog *w, uint64_t end);
/* `need` bytes of the ring at once: if it is smaller, though it could be larger, it becomes so. False: the log has failed. */
bool wl_relic_outgrow(struct wlog *w, uint64_t need);
/* A superblock is begun, or durable: 0, or -errno if that cannot be noted for the next start. */
int wl_relic_super(struct wlog *w, bool durable);
void wl_relic_trim(struct wlog *w);
/* Bytes beside the ring and what a log has without it. */
uint64_t wl_relic_overhead(const struct wlog *w);
/* The log of this UUID is given up. */
void wl_relic_forget(const char *dir, const struct uuid *log);

/* space.c */
/* Whole segments that may be written now. */
uint32_t wl_free_segments(const struct wlog *w);
/* How full the log is for this volume, 0..1000: the worse of the ring and the volume's quota. */
unsigned wl_fill_permille(const struct wlog_volume *v);
uint64_t wl_quota(const struct wlog_volume *v);
/* Waits for space, throttled along the curve. `bytes` of log will be taken. */
co_fn int co_wl_admit(struct wlog_volume *v, uint64_t bytes);
/* Somebody waits on w->space for `need` bytes of the ring: destagers and the cleaner hurry. */
void wl_want_space(struct wlog *w, uint64_t need);
/* Somebody waits for what only the destage of `v` gives back: room in its share, or entries of the index that all have in common. */
bool wl_room_is_wanted(const struct wlog_volume *v);
/* Somebody who waits for room may find it now. */
void wl_wake_space(struct wlog *w);
void wl_advance_tail(struct wlog *w);
/* Copies forward what pins the tail. */
co_fn void co_wl_clean(struct wlog *w);
/* Room that dirty data takes. 0 does not mean clean: zeroes, and what a discard left, take none. */
uint64_t wl_dirty_bytes(const struct wlog_volume *v);
bool wl_is_dirty(const struct wlog_volume *v);
/* What a message calls that of a volume that is dirty: "12 MiB", or "zeroes". */
const char *wl_dirty_text(uint64_t bytes, char buf[static 16]);

/* read.c */
/* Copies or reads a piece of a record into `dst`, verified. -EBADMSG: damaged. */
co_fn int co_wl_read_piece(struct wlog *w, struct wl_batch *b, const struct wl_entry *piece, uint64_t off, uint64_t len,
			   uint8_t *dst);
/* Tells once what is damaged, and stops changing the volume. */
void wl_report_damage(struct wlog_volume *v, uint64_t rno, uint64_t off, uint64_t len);
co_fn int co_wl_read(struct wlog_volume *v, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags);

/* runs.c */
int wl_runs_init(struct wlog_volume *v);	/* with disk.file set; -ENOMEM */
void wl_runs_fini(struct wlog_volume *v);
/*
 * Writes runs of `src` from `off` on, without records behind `cap_rno` where it can, to the image until the end, the round's limit, or an error. *ret_end is where it
 * stopped, *ret_all that it had come to the end.
 */
co_fn int co_wl_write_runs(struct wlog_volume *v, const struct wl_map *src, uint64_t cap_rno, uint64_t off, uint64_t *ret_end, bool *ret_all);
bool wl_runs_hold_memory(const struct wlog_volume *v);
void wl_runs_trim(struct wlog_volume *v);	/* with nothing in flight */

/* pace.c */
bool wl_is_urgent(const struct wlog_volume *v);
bool wl_is_far(const struct wlog_volume *v);
bool wl_guest_comes_first(const struct wlog_volume *v);
/* One more run of `len` bytes of data (none: zeroes) may be in flight now. */
bool wl_may_start_run(const struct wlog_volume *v, uint64_t len);
/* The round has worked for long enough beside a guest. */
bool wl_burst_is_over(const struct wlog_volume *v);
/* Behind a round: rests if it is the guest's turn. */
co_fn void co_wl_pace(struct wlog_volume *v);

/* destage.c */
co_fn void co_wl_destager(void *arg);
void wl_destage_kick(struct wlog_volume *v);

/* The queue of ordered destage. */
void wl_fifo_drop(struct wlog_volume *v, struct wl_entry *e);
void wl_fifo_clear(struct wlog_volume *v);

/* replay.c */
co_fn int co_wl_recover(struct wlog *w, struct err *err);

/* layer.c */
extern const struct disk_ops wl_volume_ops;
struct wlog_volume *wl_volume_new(struct wlog *w, unsigned slot);

/* attach.c */
/* Advances the generation in the log and on the image. */
co_fn int co_wl_remark(struct wlog_volume *v, struct err *err);
co_fn void co_wl_stop_volume(struct wlog_volume *v);

/* marker.c */
void wl_want_marks(struct wlog *w);	/* a side of the mirror was lost */
bool wl_mark_is_wanted(const struct wlog_volume *v);
co_fn void co_wl_marker(void *arg);
co_fn void co_wl_wait_for_marks(struct wlog *w);
co_fn void co_wl_leave_dirty(struct wlog_volume *v);	/* tells in the mark how much it was and since when, for who finds the image elsewhere */
void wl_volume_snapshot(struct wlog_volume *v, struct wl_volrec *rec);
uint32_t wl_volume_flags(const struct wlog_volume *v);
