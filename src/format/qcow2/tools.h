/* SPDX-License-Identifier: MIT */
/*
 * qcow2: tools for images that nobody has open: check, repair, snapshots.
 *
 *   check_image.c   an image as the tools hold it: header, refcount table, snapshots, bitmaps
 *   check_walk.c    every reference to a cluster, in order
 *   check_count.c   how often each cluster is referred to
 *   check.c         what is wrong, and repair in place
 *   check_commit.c  new refcount structures, put in force by one write of the header
 *   snapshot.c      the snapshot table
 *   snapshot_edit.c create, apply, delete
 *   bitmap.c        the bitmap directory; bitmap_resize.c: bitmaps of a disk that gets another size
 *
 * Memory is bounded whatever the image says: two tables of a cluster, the refcount table (8 MiB), the snapshot table (64 MiB and its
 * like in memory), the bitmap directory (72 MiB), each only as far as the file reaches; and two bytes for each cluster of a window of at most QCOW2_WINDOW
 * clusters. Where the file has more, it is walked once for each window that something refers to.
 */
#pragma once

#include "format/qcow2/format.h"
#include "rt/role.h"

struct disk;

#define QCOW2_WINDOW (64ull << 20)	/* clusters */
extern uint64_t qcow2_check_window;	/* QCOW2_WINDOW; tests make it smaller, a multiple of 8 */

/* A snapshot as the table has it. The texts come from the image: print them with care. */
struct qcow2_snap {
	uint64_t l1_off;
	uint32_t l1_size;
	uint32_t date_sec, date_nsec;
	uint64_t clock_nsec, vm_state_size, disk_size, icount;	/* icount UINT64_MAX: none */
	uint32_t extra_len;
	uint8_t *extra;			/* as it is */
	char *id, *name;
	bool lost;			/* its L1 table lies on something else: its tree is not followed */
};

struct qcow2_bm {
	uint64_t table_off;
	uint32_t table_size, flags, granularity_bits;
	char *name;
};
enum { QCOW2_BM_IN_USE = 1 << 0, QCOW2_BM_AUTO = 1 << 1, QCOW2_BM_EXTRA_COMPATIBLE = 1 << 2 };

struct qcow2_img {
	struct disk *file;
	const char *name;
	struct qcow2_header h;
	uint64_t end;			/* the file's size, up to a whole cluster */
	uint64_t *rt;			/* refcount table as it is, host order */
	uint64_t rt_entries;
	struct qcow2_snap *snap;
	unsigned n_snap;
	uint64_t snap_bytes;		/* of the table on disk */
	struct qcow2_bm *bm;
	unsigned n_bm;
};

/* --- check_image.c --- */

/* Reads and checks the header, nothing else. `flags` are qcow2_header_parse()'s. Close it whatever is returned. */
co_fn int co_qcow2_img_open(struct qcow2_img *img, struct disk *file, const char *name, unsigned flags, struct err *err);
void qcow2_img_close(struct qcow2_img *img);	/* does not close the file */
/* Fills img->rt. */
co_fn int co_qcow2_img_read_rt(struct qcow2_img *img, struct err *err);
/* What lies behind the file's end reads as zeroes. -EIO and the like with a message. */
co_fn int co_qcow2_img_read(struct qcow2_img *img, uint64_t off, void *buf, uint64_t len, struct err *err);
co_fn int co_qcow2_img_write(struct qcow2_img *img, uint64_t off, const void *buf, uint64_t len, struct err *err);
co_fn int co_qcow2_img_flush(struct qcow2_img *img, struct err *err);
/* Changes header fields at once: the first 512 bytes, from img->h. What else is in the header stays. */
co_fn int co_qcow2_img_write_header(struct qcow2_img *img, struct err *err);
/* A cluster's memory. */
void *qcow2_img_alloc(size_t len);

/* --- snapshot.c --- */

/* Fills img->snap. -EINVAL with what is wrong. */
co_fn int co_qcow2_img_read_snapshots(struct qcow2_img *img, struct err *err);
void qcow2_snaps_free(struct qcow2_img *img);
void qcow2_snap_fini(struct qcow2_snap *s);
/* The table for img->snap, in a new buffer of whole clusters (*ret_len: bytes that count). NULL without memory. */
uint8_t *qcow2_snaps_serialise(const struct qcow2_img *img, uint64_t *ret_len);
/* By id, else by name. -1: none. */
int qcow2_snap_find(const struct qcow2_img *img, const char *which);

enum qcow2_snap_op { QCOW2_SNAP_CREATE, QCOW2_SNAP_APPLY, QCOW2_SNAP_DELETE };
/*
 * Changes a closed image in one step: until the header is written the old state holds, then the new one. `which` is the name of the new snapshot, or
 * id or name of an existing one.
 */
co_fn int co_qcow2_snapshot(struct qcow2_img *img, enum qcow2_snap_op op, const char *which, uint64_t now_ns, const bool *stop, struct err *err);

/* --- bitmap.c --- */

/* Fills img->bm if the header has bitmaps that are in force. */
co_fn int co_qcow2_img_read_bitmaps(struct qcow2_img *img, struct err *err);
void qcow2_bms_free(struct qcow2_img *img);

/* --- bitmap_resize.c --- */

/* Whether the bitmaps, which have been read, can be kept when the disk gets this size; nothing is built on damage. */
co_fn int co_qcow2_bitmaps_can_fit(struct qcow2_img *img, uint64_t size, const bool *stop, struct err *err);
/*
 * Makes the bitmaps that the image had before its disk was resized fit, and puts them in force again. The image is fresh from co_qcow2_img_open(), with
 * QCOW2_PARSE_LAX.
 */
co_fn int co_qcow2_bitmaps_fit(struct qcow2_img *img, uint64_t old_size, const bool *stop, struct err *err);

/* --- check_walk.c --- */

enum qcow2_ref_kind {
	QCOW2_REF_HEADER, QCOW2_REF_RT, QCOW2_REF_RB, QCOW2_REF_L1, QCOW2_REF_SNAPSHOTS, QCOW2_REF_BITMAP_DIR, QCOW2_REF_BITMAP_TABLE,
	/* What several may share. */
	QCOW2_REF_L2, QCOW2_REF_DATA, QCOW2_REF_COMPRESSED, QCOW2_REF_BITMAP,
};
const char *qcow2_ref_name(enum qcow2_ref_kind kind);

struct qcow2_ref {
	enum qcow2_ref_kind kind;
	uint64_t off, len;	/* in the file; len may span clusters */
	int snap;		/* whose tree: -1 the active one's; the first of those that share an L2 table */
	unsigned weight;	/* how many references it stands for */
	uint64_t guest;		/* L2, DATA, COMPRESSED: guest offset */
	uint64_t entry_off;	/* where the entry lies that refers to it; 0: the header */
	uint64_t entry;
};

struct qcow2_walk {
	struct qcow2_img *img;
	void *arg;		/* the caller's own */
	/* A reference that can be: aligned, and within the file. True: clear the entry in place. May be NULL. */
	bool (*ref)(struct qcow2_walk *w, const struct qcow2_ref *r);
	/* One that cannot be. True: clear the entry. May be NULL. A table of a fixed place has no entry: its tree is not followed then. */
	bool (*bad)(struct qcow2_walk *w, const struct qcow2_ref *r, const char *why);
	/* An L2 table of the active tree, before its entries are looked at. True: it was changed, write it back. May be NULL. */
	bool (*l2)(struct qcow2_walk *w, const struct qcow2_ref *table, uint8_t *buf);
	/* As l2 for pieces of the active L1 table; `first` is the index of the first of n entries. May be NULL. */
	bool (*l1)(struct qcow2_walk *w, uint64_t first, uint64_t n, uint8_t *buf);
	/* What one reference of a tree's L2 tables weighs; NULL: 1. */
	unsigned (*tree_weight)(const struct qcow2_walk *w, int snap);
	void (*progress)(void *arg, uint64_t done, uint64_t total);
	void *progress_arg;
	const bool *stop;
	bool active_only;	/* only the active tree, and no fixed tables */
	uint8_t *l2_buf;	/* the walker's */
	struct qcow2_gathered *tables;
	unsigned twins;
	uint64_t done, total;
};

/* Calls back for everything that refers to clusters. -ECANCELED, or an I/O error. */
co_fn int co_qcow2_walk(struct qcow2_walk *w, struct err *err);
#define QCOW2_L1_PIECE 8192u	/* entries of an L1 table that are read at once */

/* --- check_count.c --- */

#define QCOW2_COUNT_FIXED 0x8000u	/* a table that nothing else may refer to */
#define QCOW2_COUNT_L2 0x4000u
#define QCOW2_COUNT_MAX 0x3fffu		/* or more */

/* References to the clusters of a window. */
struct qcow2_count {
	uint64_t first, n;	/* clusters */
	uint16_t *v;
	uint8_t *touched;	/* a bit for each QCOW2_COUNT_CHUNK of those that it was made for: anything was counted there */
	uint64_t chunks;
};
#define QCOW2_COUNT_CHUNK 2048u
int qcow2_count_init(struct qcow2_count *c, uint64_t first, uint64_t n);	/* -ENOMEM */
void qcow2_count_fini(struct qcow2_count *c);
/* Whether the reference shares a cluster of the window with what it may not; then *ret_where is that. Ask before it is added. */
bool qcow2_count_conflicts(const struct qcow2_count *c, const struct qcow2_geo *g, const struct qcow2_ref *r, uint64_t *ret_where);
/* Whether nothing was counted in [cluster, cluster + n). */
bool qcow2_count_is_empty(const struct qcow2_count *c, uint64_t cluster, uint64_t n);
/* Counts `weight` references to each of its clusters in the window. */
void qcow2_count_add(struct qcow2_count *c, const struct qcow2_geo *g, const struct qcow2_ref *r, unsigned weight);
static inline unsigned qcow2_count_get(const struct qcow2_count *c, uint64_t cluster)
{
	return cluster - c->first < c->n ? c->v[cluster - c->first] & QCOW2_COUNT_MAX : 0;
}

/* --- check_commit.c --- */

/*
 * A new state of the image beside the old one. Clusters are taken from what neither refers to, the file grows where there are none; new tables are written;
 * then the header puts all of it in force.
 */
struct qcow2_commit {
	struct qcow2_img *img;
	struct qcow2_count count;	/* of the new state; v has room for `room` clusters */
	uint8_t *old;			/* one bit for each cluster that the old state uses */
	uint64_t room, cursor, end;	/* clusters; `end`: of the file in the new state */
	uint64_t old_size;		/* bytes of the file */
	bool in_force;			/* or may be: the header has been written */
};
int qcow2_commit_init(struct qcow2_commit *c, struct qcow2_img *img, struct err *err);
void qcow2_commit_fini(struct qcow2_commit *c);
void qcow2_commit_use_old(struct qcow2_commit *c, const struct qcow2_ref *r);
/* n clusters in a row: their offset, 0 with a message if there is no room. Makes the file longer where needed. */
co_fn uint64_t co_qcow2_commit_alloc(struct qcow2_commit *c, uint64_t n, struct err *err);
/* The same behind everything else, not counted yet. */
co_fn uint64_t co_qcow2_commit_append(struct qcow2_commit *c, uint64_t n, struct err *err);
/* -ERANGE if a cluster has more references than its refcount can count. */
int qcow2_commit_check(const struct qcow2_commit *c, struct err *err);
/* After a failure: gives back what the file has grown. */
co_fn void co_qcow2_commit_undo(struct qcow2_commit *c);
/* Writes refcount table and blocks for c->count, flushes, and writes the header from img->h, which the caller has changed. */
co_fn int co_qcow2_commit(struct qcow2_commit *c, struct err *err);

/* --- check.c --- */

enum qcow2_finding_kind {
	QCOW2_FOUND_LEAK, QCOW2_FOUND_REFCOUNT, QCOW2_FOUND_OVERLAP, QCOW2_FOUND_ENTRY, QCOW2_FOUND_FLAG, QCOW2_FOUND_BLOCK,
	QCOW2_FOUND_SNAPSHOTS, QCOW2_FOUND_BITMAPS, QCOW2_FOUND_BIT,
};
const char *qcow2_finding_name(enum qcow2_finding_kind kind);

struct qcow2_finding {
	enum qcow2_finding_kind kind;
	uint64_t off;			/* in the file */
	uint64_t clusters;
	bool fixed;
	char text[320];
};

enum qcow2_repair { QCOW2_REPAIR_NONE, QCOW2_REPAIR_LEAKS, QCOW2_REPAIR_ALL };

struct qcow2_check {
	enum qcow2_repair repair;
	void (*finding)(void *arg, const struct qcow2_finding *f); /* may be NULL */
	void *arg;
	void (*progress)(void *arg, uint64_t done, uint64_t total);
	void *progress_arg;
	const bool *stop;
	/* results */
	uint64_t leaks, damage;		/* clusters, and entries or clusters */
	uint64_t leaks_fixed, damage_fixed;
	uint64_t total, allocated, compressed, fragmented;	/* guest clusters */
	uint64_t image_end;		/* bytes up to the last cluster in use */
	/* the check's own: a repair goes over the image three times */
	unsigned pass, passes;
};
/* Fails only if the check could not be completed. */
co_fn int co_qcow2_check(struct qcow2_img *img, struct qcow2_check *c, struct err *err);
