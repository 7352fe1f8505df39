/* SPDX-License-Identifier: MIT */
/*
 * Snapshots and repair of a closed qcow2 image on a disk that loses power.
 *
 *	qcow2_tools snapshot [SEEDS]    create, apply, delete: each runs once; at each of its writes the power supply is forked as a cut would leave it, and each
 *	                                fork has no damage and is the old state or the new one, whole: contents, snapshots, and their contents
 *	qcow2_tools repair [SEEDS]      refcounts, flags and blocks are damaged; a repair that is cut at any write and started again repairs all, and loses no data
 *	qcow2_tools make [SEEDS]        an image is created over an older one, and filled with compressed clusters; a cut at any write leaves the older one whole, no
 *	                                image, an empty one, or the new one
 *	qcow2_tools error [SEEDS]       the n-th I/O of a snapshot operation fails: the old state or the new one, no damage
 *	qcow2_tools bitmaps [SEEDS]     a disk with persistent bitmaps gets another size, as "weir image resize" does it; a cut at any write, or an I/O that fails, leaves
 *	                                no damage, the old or the new size, and bitmaps that are not in force or fit that size and hold what they should
 */
#include <errno.h>

#include "backend/fault.h"
#include "format/qcow2/create.h"
#include "format/qcow2/pack.h"
#include "format/qcow2/qcow2.h"
#include "format/qcow2/tools.h"
#include "lib/qcow2_verify.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/rng.h"

#define SECTOR 512u
#define MAX_SECTORS 2048u
#define MAX_SNAPSHOTS 4
#define MAX_FORKS 300

enum mode { SNAPSHOT, REPAIR, ERROR, MAKE, BITMAPS };

#define MAX_BITMAPS 3
#define MAX_BITS (MAX_SECTORS + 8)

/* What a bitmap holds, over a disk of so many bits. */
struct bits {
	unsigned granularity_bits, n;
	bool bit[MAX_BITS];
};

/* What an image holds: a number for each sector. */
struct contents {
	uint32_t sector[MAX_SECTORS];
	unsigned sectors;
};

struct state {
	struct contents disk, snap[MAX_SNAPSHOTS];
	char name[MAX_SNAPSHOTS][16];
	unsigned n;
	struct bits bits[MAX_BITMAPS];
	unsigned bitmaps;
};

static struct world {
	enum mode mode;
	uint64_t seed;
	struct rng rng;
	struct qcow2_create create;
	struct powercut_dev_config dev;
	struct powercut *p;
	struct state old, new;
	struct powercut *fork[MAX_FORKS];
	unsigned nforks;
	unsigned every, ios;
	uint32_t value;
	unsigned names;
	bool damage;
} w;

static uint64_t looked_at, in_force;

__attribute__((format(printf, 1, 2), noreturn))
static void fail(const char *fmt, ...)
{
	char why[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	test_fail("%s\n  WEIR_SEED=%" PRIu64 ": clusters of %" PRIu64 ", version %u, refcounts of %" PRIu64 " bits%s, size %" PRIu64, why, w.seed,
		  w.create.cluster_size, w.create.version, w.create.refcount_bits, w.create.ext_l2 ? ", extended L2 entries" : "", w.create.size);
}

static void choose(enum mode mode, uint64_t seed)
{
	static const uint8_t bits[] = { 9, 9, 10, 12, 14 };
	struct rng *r = &w.rng;
	unsigned b;

	memset(&w, 0, sizeof(w));
	w.mode = mode;
	w.seed = seed;
	rng_seed(r, seed);
	b = bits[rng_below(r, ARRAY_SIZE(bits))];
	w.create.version = rng_below(r, 5) || mode == BITMAPS ? 3 : 2;
	if (mode == BITMAPS)	/* the extension has to fit into the first cluster, too */
		b = max(b, 10u);
	w.create.ext_l2 = w.create.version == 3 && b >= 14;
	w.create.cluster_size = 1ull << b;
	w.create.refcount_bits = w.create.version == 2 ? 16 : 1ull << (3 + rng_below(r, 4));
	w.create.size = SECTOR * (64 + rng_below(r, MAX_SECTORS - 64));
	w.dev.align = rng_below(r, 3) ? 512 : 4096;
	/* Files of several windows are small here. */
	qcow2_check_window = rng_below(r, 2) ? QCOW2_WINDOW : 8 * (1 + rng_below(r, 64));
	w.old.disk.sectors = (unsigned)(w.create.size / SECTOR);
}

/* --- What is in an image --- */

static co_fn struct disk *co_device(struct powercut *p)
{
	struct disk *d;

	if (powercut_dev_open(powercut_dev_find(p, "image"), &d))
		fail("the device does not open");
	return d;
}

static co_fn struct disk *co_driver(struct powercut *p, unsigned flags)
{
	struct qcow2_opts opts = { .run_ahead = 1, .fill_debt = 1, .table_cache = 1 };
	struct disk *file = co_device(p), *d;
	struct err err = ERR_INIT;

	if (co_qcow2_open(file, "image", &opts, flags, &d, &err))
		fail("the driver refuses it: %s", err.msg);
	return d;
}

static void fill(uint8_t *buf, uint32_t value)
{
	for (unsigned i = 0; i < SECTOR; i += 4)
		put_le32(buf + i, value);
}

static co_fn void co_write_some(struct powercut *p, struct contents *c)
{
	struct disk *d = co_driver(p, DISK_OPEN_RDWR);
	uint8_t buf[SECTOR];

	for (uint64_t n = 1 + rng_below(&w.rng, 12); n; n--) {
		unsigned at = (unsigned)rng_below(&w.rng, c->sectors), len = 1 + (unsigned)rng_below(&w.rng, 12);

		for (; len && at < c->sectors; len--, at++) {
			c->sector[at] = ++w.value;
			fill(buf, w.value);
			if (co_disk_write(d, (uint64_t)at * SECTOR, buf, SECTOR, 0))
				fail("a write fails");
		}
	}
	if (co_disk_flush(d))
		fail("a flush fails");
	co_disk_close(d);
}

static co_fn bool co_holds(struct powercut *p, const struct contents *c, unsigned *ret_at)
{
	struct disk *d = co_driver(p, 0);
	uint8_t buf[SECTOR], want[SECTOR];
	bool ok = d->size == (uint64_t)c->sectors * SECTOR;

	for (unsigned i = 0; i < c->sectors && ok; i++) {
		fill(want, c->sector[i]);
		if (co_disk_read(d, (uint64_t)i * SECTOR, buf, SECTOR, 0))
			fail("sector %u cannot be read", i);
		ok = !memcmp(buf, want, SECTOR);
		*ret_at = i;
	}
	co_disk_close(d);
	return ok;
}

static co_fn int co_tool(struct powercut *p, enum qcow2_snap_op op, const char *which, struct err *err)
{
	struct disk *file = co_device(p);
	struct qcow2_img img;
	int rc = co_qcow2_img_open(&img, file, "image", 0, err);

	if (!rc)
		rc = co_qcow2_snapshot(&img, op, which, 1, NULL, err);
	qcow2_img_close(&img);
	co_disk_close(file);
	return rc;
}

static co_fn uint64_t co_check(struct powercut *p, enum qcow2_repair repair, uint64_t *ret_leaks, char *text, size_t size);

struct findings {
	char *text;
	size_t size;
};

static void on_finding(void *arg, const struct qcow2_finding *f)
{
	struct findings *x = arg;

	if (f->kind != QCOW2_FOUND_LEAK && !*x->text)
		snprintf(x->text, x->size, "%s", f->text);
}

/* The damage that is left. */
static co_fn uint64_t co_check(struct powercut *p, enum qcow2_repair repair, uint64_t *ret_leaks, char *text, size_t size)
{
	struct findings x = { text, size };
	struct qcow2_check c = { .repair = repair, .finding = on_finding, .arg = &x };
	struct disk *file = co_device(p);
	struct err err = ERR_INIT;
	struct qcow2_img img;
	int rc;

	*text = '\0';
	rc = co_qcow2_img_open(&img, file, "image", 0, &err);
	if (!rc)
		rc = co_qcow2_check(&img, &c, &err);
	if (rc && !(powercut_is_off(p) || w.mode == ERROR || w.mode == BITMAPS))
		fail("the check fails: %s", err.msg);
	qcow2_img_close(&img);
	co_disk_close(file);
	*ret_leaks = c.leaks - c.leaks_fixed;
	return c.damage - c.damage_fixed;
}

static void keep(struct powercut *p)
{
	qcow2_keep(powercut_dev_view(powercut_dev_find(p, "image")));
}

static co_fn bool co_has_names(struct powercut *p, const struct state *s)
{
	struct disk *file = co_device(p);
	struct err err = ERR_INIT;
	struct qcow2_img img;
	bool ok;

	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_img_read_snapshots(&img, &err))
		fail("the snapshots cannot be read: %s", err.msg);
	ok = img.n_snap == s->n;
	for (unsigned i = 0; i < s->n && ok; i++)
		ok = !strcmp(img.snap[i].name, s->name[i]);
	qcow2_img_close(&img);
	co_disk_close(file);
	return ok;
}

/* No damage; the old state or the new one; and each snapshot gives what it was made of. */
static co_fn void co_verify(struct powercut *p, unsigned io)
{
	const struct state *s;
	uint64_t leaks;
	char text[320];
	unsigned at, in_old = 0, in_new = 0;
	bool old, new;

	keep(p);
	if (co_check(p, QCOW2_REPAIR_NONE, &leaks, text, sizeof(text)))
		fail("damage after a cut at write %u: %s", io, text);
	old = co_has_names(p, &w.old) && co_holds(p, &w.old.disk, &in_old);
	new = !old && co_has_names(p, &w.new) && co_holds(p, &w.new.disk, &in_new);
	if (!old && !new)
		fail("after a cut at write %u it is neither the old state (sector %u) nor the new one (sector %u)", io, in_old, in_new);
	s = old ? &w.old : &w.new;
	for (unsigned i = 0; i < s->n; i++) {
		struct err err = ERR_INIT;

		if (co_tool(p, QCOW2_SNAP_APPLY, s->name[i], &err))
			fail("after a cut at write %u snapshot %s cannot be applied: %s", io, s->name[i], err.msg);
		if (!co_holds(p, &s->snap[i], &at))
			fail("after a cut at write %u snapshot %s has not its contents, at sector %u", io, s->name[i], at);
	}
	if (co_check(p, QCOW2_REPAIR_NONE, &leaks, text, sizeof(text)) || leaks)
		fail("not clean after snapshots were applied, cut at write %u: %s, %" PRIu64 " leaks", io, text, leaks);
	looked_at++;
}

/* --- The operations --- */

static int on_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	if (op == DISK_OP_READ || op == DISK_OP_EXTENT)
		return 0;
	if (w.ios++ % w.every == 0 && w.nforks < MAX_FORKS)
		w.fork[w.nforks++] = powercut_fork(w.p, rng_u64(&w.rng));
	return 0;
}

static void next_state(enum qcow2_snap_op op, unsigned which)
{
	struct state *s = &w.new;

	*s = w.old;
	if (op == QCOW2_SNAP_CREATE) {
		snprintf(s->name[s->n], sizeof(s->name[0]), "n%u", w.names++);
		s->snap[s->n++] = s->disk;
	} else if (op == QCOW2_SNAP_APPLY) {
		s->disk = s->snap[which];
	} else {
		s->n--;
		memmove(&s->name[which], &s->name[which + 1], (s->n - which) * sizeof(s->name[0]));
		memmove(&s->snap[which], &s->snap[which + 1], (s->n - which) * sizeof(s->snap[0]));
	}
}

static co_fn int co_snapshot_step(void)
{
	enum qcow2_snap_op op = w.old.n ? (enum qcow2_snap_op)rng_below(&w.rng, 3) : QCOW2_SNAP_CREATE;
	unsigned which = w.old.n ? (unsigned)rng_below(&w.rng, w.old.n) : 0;
	struct err err = ERR_INIT;
	int rc;

	if (op == QCOW2_SNAP_CREATE && w.old.n == MAX_SNAPSHOTS)
		op = QCOW2_SNAP_DELETE;
	next_state(op, which);
	w.ios = 0;
	w.every = 1 + (unsigned)rng_below(&w.rng, 4);
	w.nforks = 0;
	if (w.mode == SNAPSHOT)
		powercut_set_hook(w.p, on_io, NULL);
	else
		powercut_fail_at(w.p, NULL, powercut_ios(w.p) + 1 + rng_below(&w.rng, 60), -EIO);
	rc = co_tool(w.p, op, op == QCOW2_SNAP_CREATE ? w.new.name[w.new.n - 1] : w.old.name[which], &err);
	powercut_set_hook(w.p, NULL, NULL);
	powercut_fail_at(w.p, NULL, 0, 0);
	if (rc && w.mode == SNAPSHOT)
		fail("a snapshot operation fails: %s", err.msg);
	for (unsigned i = 0; i < w.nforks; i++) {
		co_verify(w.fork[i], i * w.every + 1);
		powercut_destroy(w.fork[i]);
	}
	if (w.mode == ERROR) {
		struct powercut *q = powercut_fork(w.p, rng_u64(&w.rng));

		co_verify(q, 0);
		if (!co_has_names(q, &w.new) && !rc)
			fail("what was called a success is not there");
		powercut_destroy(q);
	}
	w.old = w.new;
	return rc;
}

/* --- Repair --- */

static void poke(uint64_t off, const void *buf, uint64_t len)
{
	powercut_dev_poke(powercut_dev_find(w.p, "image"), off, buf, len, true);
}

/* Damage that costs no data: a refcount, a flag of the active tree, or a whole block of refcounts. */
static co_fn void co_damage(void)
{
	struct disk *file = co_device(w.p);
	struct err err = ERR_INIT;
	struct qcow2_img img;
	uint8_t zero[8] = { 0 }, entry[8];
	uint64_t off, l2;

	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_img_read_rt(&img, &err))
		fail("%s", err.msg);
	for (uint64_t n = 1 + rng_below(&w.rng, 4); n; n--) {
		switch (rng_below(&w.rng, 4)) {
		case 0:
			poke(img.h.rt_off, zero, 8);
			break;
		case 1:
			off = (img.rt[0] & QCOW2_RT_OFFSET_MASK) + rng_below(&w.rng, min(img.h.geo.cluster_size, 64u));
			poke(off, zero, 1);
			break;
		default:
			if (co_qcow2_img_read(&img, img.h.l1_off, entry, 8, &err))
				fail("%s", err.msg);
			l2 = get_be64(entry) & QCOW2_OFFSET_MASK;
			off = l2 + rng_below(&w.rng, 1u << img.h.geo.l2_bits) * img.h.geo.l2_entry_size;
			if (!l2 || co_qcow2_img_read(&img, off, entry, 8, &err) || !(get_be64(entry) & QCOW2_OFFSET_MASK))
				break;
			put_be64(entry, get_be64(entry) ^ QCOW2_COPIED);
			poke(off, entry, 8);
		}
	}
	qcow2_img_close(&img);
	co_disk_close(file);
}

static co_fn void co_repaired(struct powercut *p, unsigned io)
{
	uint64_t leaks;
	char text[320];
	unsigned at;

	if (co_check(p, QCOW2_REPAIR_ALL, &leaks, text, sizeof(text)) || leaks)
		fail("a repair that was cut at write %u cannot be finished: %s", io, text);
	if (co_check(p, QCOW2_REPAIR_NONE, &leaks, text, sizeof(text)) || leaks)
		fail("after a repair that was cut at write %u there is damage: %s", io, text);
	if (!co_has_names(p, &w.old) || !co_holds(p, &w.old.disk, &at))
		fail("a repair that was cut at write %u has lost data", io);
	for (unsigned i = 0; i < w.old.n; i++) {
		struct err err = ERR_INIT;

		if (co_tool(p, QCOW2_SNAP_APPLY, w.old.name[i], &err) || !co_holds(p, &w.old.snap[i], &at))
			fail("a repair that was cut at write %u has lost snapshot %s: %s", io, w.old.name[i], err.msg);
	}
	looked_at++;
}

static co_fn void co_repair_step(void)
{
	uint64_t leaks;
	char text[320];

	co_damage();
	w.ios = 0;
	w.every = 1 + (unsigned)rng_below(&w.rng, 3);
	w.nforks = 0;
	powercut_set_hook(w.p, on_io, NULL);
	co_check(w.p, QCOW2_REPAIR_ALL, &leaks, text, sizeof(text));
	powercut_set_hook(w.p, NULL, NULL);
	for (unsigned i = 0; i < w.nforks; i++) {
		co_repaired(w.fork[i], i * w.every + 1);
		powercut_destroy(w.fork[i]);
	}
}

/* --- Making --- */

static co_fn bool co_is_image(struct powercut *p)
{
	struct disk *file = co_device(p);
	uint8_t head[4] = { 0 };
	int rc = file->size >= sizeof(head) ? co_disk_read(file, 0, head, sizeof(head), 0) : 0;

	co_disk_close(file);
	return !rc && get_be32(head) == QCOW2_MAGIC;
}

/* An image that is there is whole, and one of the three. */
static co_fn void co_made(struct powercut *p, unsigned io)
{
	struct contents empty = { .sectors = w.new.disk.sectors };
	uint64_t leaks;
	char text[320];
	unsigned at;

	looked_at++;
	if (!co_is_image(p)) {
		if (io == UINT32_MAX)
			fail("the image that was made is not there");
		return;
	}
	keep(p);
	if (co_check(p, QCOW2_REPAIR_NONE, &leaks, text, sizeof(text)))
		fail("damage after a cut at write %u: %s", io, text);
	if (!co_holds(p, &w.new.disk, &at) && (io == UINT32_MAX || (!co_holds(p, &empty, &at) && !co_holds(p, &w.old.disk, &at))))
		fail("after a cut at write %u it is neither the old image, nor empty, nor the new one", io);
}

/* Sectors that deflate makes smaller, and some that it does not. */
static void fill_cluster(uint8_t *buf, uint64_t off, uint64_t len)
{
	for (uint64_t at = 0; at < len; at += SECTOR) {
		w.new.disk.sector[(off + at) / SECTOR] = ++w.value;
		fill(buf + at, w.value);
	}
}

static co_fn int co_pack(struct disk *file, struct err *err)
{
	struct qcow2_packer *packer;
	uint64_t cs = w.create.cluster_size;
	uint8_t *buf = malloc(cs);
	int rc = co_qcow2_pack_begin(&packer, file, &w.create, 2, err), end;

	for (uint64_t off = 0, n; off < w.create.size && !rc; off += n) {
		n = min(cs, w.create.size - off);
		if (rng_below(&w.rng, 3))
			continue;
		fill_cluster(buf, off, n);
		rc = co_qcow2_pack_write(packer, off, buf, n);
		if (rc)
			fail("a compressed write fails");
	}
	free(buf);
	if (rc)
		return rc;
	end = co_qcow2_pack_end(packer, true, err);
	return end;
}

static co_fn void co_make_step(bool pack)
{
	struct disk *file = co_device(w.p);
	struct err err = ERR_INIT;
	int rc;

	w.new.disk = (struct contents){ .sectors = (unsigned)(w.create.size / SECTOR) };
	w.ios = w.nforks = 0;
	w.every = 1 + (unsigned)rng_below(&w.rng, 3);
	powercut_set_hook(w.p, on_io, NULL);
	rc = pack ? co_pack(file, &err) : co_qcow2_create(file, NULL, &w.create, &err);
	powercut_set_hook(w.p, NULL, NULL);
	co_disk_close(file);
	if (rc)
		fail("it cannot be made: %s", err.msg);
	for (unsigned i = 0; i < w.nforks; i++) {
		co_made(w.fork[i], i * w.every + 1);
		powercut_destroy(w.fork[i]);
	}
	w.fork[0] = powercut_fork(w.p, rng_u64(&w.rng));
	co_made(w.fork[0], UINT32_MAX);
	powercut_destroy(w.fork[0]);
	w.old = w.new;
}

static co_fn void co_make(void)
{
	for (uint64_t n = 2 + rng_below(&w.rng, 3); n; n--) {
		/* Another layout each time, on the same device. */
		w.create.size = SECTOR * (64 + rng_below(&w.rng, MAX_SECTORS - 64));
		w.create.cluster_size = max(w.create.cluster_size >> rng_below(&w.rng, 2), w.create.ext_l2 ? 16384ull : 512ull);
		w.create.prealloc = QCOW2_PREALLOC_OFF;
		if (rng_below(&w.rng, 2)) {
			co_make_step(true);
			continue;
		}
		w.create.prealloc = rng_below(&w.rng, 2) ? QCOW2_PREALLOC_METADATA : QCOW2_PREALLOC_OFF;
		co_make_step(false);
		w.create.prealloc = QCOW2_PREALLOC_OFF;
		co_write_some(w.p, &w.old.disk);
	}
}

/* --- Bitmaps --- */

static unsigned bits_over(unsigned granularity_bits, uint64_t size)
{
	return (unsigned)((size + (1ull << granularity_bits) - 1) >> granularity_bits);
}

static bool count_ref(struct qcow2_walk *walk, const struct qcow2_ref *r)
{
	struct qcow2_commit *c = walk->arg;

	qcow2_commit_use_old(c, r);
	if (r->kind != QCOW2_REF_RT && r->kind != QCOW2_REF_RB)
		qcow2_count_add(&c->count, &c->img->h.geo, r, r->weight);
	return false;
}

/* A table and its clusters: all zeroes, all ones, or a cluster of bits; cluster by cluster. */
static co_fn uint64_t co_put_bits(struct qcow2_commit *c, struct bits *b, uint32_t *ret_clusters, struct err *err)
{
	uint32_t cs = c->img->h.geo.cluster_size, n = (uint32_t)qcow2_clusters(&c->img->h.geo, (b->n + 7) / 8);
	uint8_t *table = qcow2_img_alloc(cs), *buf = qcow2_img_alloc(cs);
	uint64_t off, at;

	memset(table, 0, cs);
	for (uint32_t i = 0; i < n; i++) {
		uint64_t how = rng_below(&w.rng, 4);

		memset(buf, 0, cs);
		for (unsigned k = i * cs * 8, end = min(k + cs * 8, b->n); k < end; k++) {
			b->bit[k] = how == 0 ? false : how == 1 ? true : rng_below(&w.rng, 2);
			buf[k / 8 - i * cs] |= (uint8_t)(b->bit[k] << k % 8);
		}
		if (how < 2) {
			put_be64(table + i * 8, how ? QCOW2_BITMAP_ALL_ONES : 0);
			continue;
		}
		at = co_qcow2_commit_alloc(c, 1, err);
		if (!at || co_qcow2_img_write(c->img, at, buf, cs, err))
			fail("%s", err->msg);
		put_be64(table + i * 8, at);
	}
	off = co_qcow2_commit_alloc(c, 1, err);
	if (!off || co_qcow2_img_write(c->img, off, table, cs, err))
		fail("%s", err->msg);
	free(table);
	free(buf);
	*ret_clusters = n;
	return off;
}

/* weir makes none itself. */
static co_fn void co_add_bitmaps(struct state *s)
{
	struct disk *file = co_device(w.p);
	struct err err = ERR_INIT;
	struct qcow2_img img;
	struct qcow2_commit c;
	struct qcow2_walk walk = { .img = &img, .arg = &c, .ref = count_ref };
	uint8_t *dir, *head;
	uint64_t at = 0, dir_off;

	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_img_read_rt(&img, &err) || co_qcow2_img_read_snapshots(&img, &err) ||
	    qcow2_commit_init(&c, &img, &err) || co_qcow2_walk(&walk, &err))
		fail("%s", err.msg);
	dir = qcow2_img_alloc(img.h.geo.cluster_size);
	head = qcow2_img_alloc(img.h.geo.cluster_size);
	memset(dir, 0, img.h.geo.cluster_size);
	s->bitmaps = 1 + (unsigned)rng_below(&w.rng, MAX_BITMAPS);
	for (unsigned i = 0; i < s->bitmaps; i++) {
		struct qcow2_raw_bitmap *raw = (void *)(dir + at);
		struct bits *b = &s->bits[i];
		uint32_t clusters;

		b->granularity_bits = 9 + (unsigned)rng_below(&w.rng, 4);
		b->n = bits_over(b->granularity_bits, s->disk.sectors * SECTOR);
		put_be64(raw->table_off, co_put_bits(&c, b, &clusters, &err));
		put_be32(raw->table_size, clusters);
		put_be32(raw->flags, rng_below(&w.rng, 2) ? QCOW2_BM_AUTO : 0);
		raw->type[0] = 1;
		raw->granularity_bits[0] = (uint8_t)b->granularity_bits;
		put_be16(raw->name_len, 1);
		dir[at + sizeof(*raw)] = (uint8_t)('a' + i);
		at += align_up(sizeof(*raw) + 1, 8);
	}
	dir_off = co_qcow2_commit_alloc(&c, 1, &err);
	if (!dir_off || co_qcow2_img_write(&img, dir_off, dir, img.h.geo.cluster_size, &err))
		fail("%s", err.msg);
	img.h.autoclear |= QCOW2_AUTOCLEAR_BITMAPS;
	img.h.bitmaps.count = s->bitmaps;
	img.h.bitmaps.dir_size = at;
	img.h.bitmaps.dir_off = dir_off;
	/* The extension, and what the commit has put in force. */
	if (co_qcow2_commit(&c, &err) || qcow2_header_serialise(&img.h, head, "image", &err) ||
	    co_qcow2_img_write(&img, 0, head, img.h.geo.cluster_size, &err) || co_qcow2_img_flush(&img, &err))
		fail("%s", err.msg);
	free(dir);
	free(head);
	qcow2_commit_fini(&c);
	qcow2_img_close(&img);
	co_disk_close(file);
}

static co_fn void co_check_bits(struct qcow2_img *img, const struct qcow2_bm *bm, const struct bits *b, unsigned io)
{
	uint32_t cs = img->h.geo.cluster_size;
	uint8_t *table = qcow2_img_alloc(align_up(bm->table_size * 8, cs)), *buf = qcow2_img_alloc(cs);
	struct err err = ERR_INIT;

	if (bm->granularity_bits != b->granularity_bits || bm->table_size != qcow2_clusters(&img->h.geo, (b->n + 7) / 8))
		fail("after a cut at write %u bitmap %s has a table of %u clusters, for %u bits", io, bm->name, bm->table_size, b->n);
	if (co_qcow2_img_read(img, bm->table_off, table, bm->table_size * 8, &err))
		fail("%s", err.msg);
	for (uint32_t i = 0; i < bm->table_size; i++) {
		uint64_t e = get_be64(table + i * 8), off = e & QCOW2_OFFSET_MASK;

		memset(buf, e & QCOW2_BITMAP_ALL_ONES ? 0xff : 0, cs);
		if (off && co_qcow2_img_read(img, off, buf, cs, &err))
			fail("%s", err.msg);
		for (unsigned k = i * cs * 8, end = min(k + cs * 8, b->n); k < end; k++)
			if ((buf[k / 8 - i * cs] >> k % 8 & 1) != b->bit[k])
				fail("after a cut at write %u bit %u of %u of bitmap %s is %u", io, k, b->n, bm->name, !b->bit[k]);
	}
	free(table);
	free(buf);
}

/* No damage, one of the two sizes with its contents, and bitmaps that fit it or are not in force. Whether they are. */
static co_fn bool co_verify_bitmaps(struct powercut *p, unsigned io)
{
	struct disk *file;
	struct err err = ERR_INIT;
	const struct state *s;
	struct qcow2_img img;
	uint64_t leaks;
	char text[320];
	unsigned at = 0;
	bool ret;

	keep(p);
	looked_at++;
	if (co_check(p, QCOW2_REPAIR_NONE, &leaks, text, sizeof(text)))
		fail("damage after a cut at write %u: %s", io, text);
	s = co_holds(p, &w.old.disk, &at) ? &w.old : &w.new;
	if (!co_holds(p, &s->disk, &at))
		fail("after a cut at write %u it is neither the old state nor the new one (sector %u)", io, at);
	file = co_device(p);
	if (co_qcow2_img_open(&img, file, "image", 0, &err) || co_qcow2_img_read_bitmaps(&img, &err))
		fail("after a cut at write %u: %s", io, err.msg);
	ret = img.h.autoclear & QCOW2_AUTOCLEAR_BITMAPS;
	if (ret && img.n_bm != s->bitmaps)
		fail("after a cut at write %u there are %u bitmaps", io, img.n_bm);
	for (unsigned i = 0; i < img.n_bm; i++)
		co_check_bits(&img, &img.bm[i], &s->bits[i], io);
	in_force += ret;
	qcow2_img_close(&img);
	co_disk_close(file);
	/* What the cut has leaked is found, and the image goes on. */
	if (co_check(p, QCOW2_REPAIR_ALL, &leaks, text, sizeof(text)) || leaks || co_check(p, QCOW2_REPAIR_NONE, &leaks, text, sizeof(text)) || leaks)
		fail("after a cut at write %u it cannot be repaired: %s, %" PRIu64 " leaks", io, text, leaks);
	return ret;
}

/* As cli/image_resize.c does it. */
static co_fn int co_resize_and_fit(uint64_t size, struct err *err)
{
	struct qcow2_opts opts = { .run_ahead = 1, .fill_debt = 1, .table_cache = 1 };
	struct disk *file = co_device(w.p), *d;
	struct qcow2_img img;
	struct err keep = ERR_INIT;
	uint64_t old = w.old.disk.sectors * SECTOR;
	int rc = co_qcow2_img_open(&img, file, "image", 0, err), kept;

	if (!rc)
		rc = co_qcow2_img_read_bitmaps(&img, err);
	if (!rc)
		rc = co_qcow2_bitmaps_can_fit(&img, size, NULL, err);
	qcow2_img_close(&img);
	if (!rc)
		rc = co_qcow2_open(file, "image", &opts, DISK_OPEN_RDWR, &d, err);
	if (rc) {
		co_disk_close(file);
		return rc;
	}
	rc = co_disk_resize(d, size, err);
	if (!rc)
		rc = co_disk_flush(d);
	co_disk_close(d);
	file = co_device(w.p);
	kept = co_qcow2_img_open(&img, file, "image", QCOW2_PARSE_LAX, &keep);
	if (!kept && !(img.h.autoclear & QCOW2_AUTOCLEAR_BITMAPS))
		kept = co_qcow2_bitmaps_fit(&img, old, NULL, &keep);
	qcow2_img_close(&img);
	co_disk_close(file);
	return rc ? rc : kept;
}

static co_fn void co_bitmaps_step(bool error)
{
	unsigned sectors = (unsigned)(64 + rng_below(&w.rng, MAX_SECTORS - 64));
	struct err err = ERR_INIT;
	struct powercut *q;
	bool kept;
	int rc;

	w.new = w.old;
	w.new.disk.sectors = sectors;
	for (unsigned i = sectors; i < w.old.disk.sectors; i++)
		w.new.disk.sector[i] = 0;
	for (unsigned i = 0; i < w.new.bitmaps; i++) {
		struct bits *b = &w.new.bits[i];
		unsigned n = bits_over(b->granularity_bits, sectors * SECTOR);

		for (unsigned k = n; k < b->n; k++)
			b->bit[k] = false;
		b->n = n;
	}
	w.ios = w.nforks = 0;
	w.every = 1 + (unsigned)rng_below(&w.rng, 2);
	if (error)
		powercut_fail_at(w.p, NULL, powercut_ios(w.p) + 1 + rng_below(&w.rng, 80), -EIO);
	else
		powercut_set_hook(w.p, on_io, NULL);
	rc = co_resize_and_fit(sectors * SECTOR, &err);
	powercut_set_hook(w.p, NULL, NULL);
	powercut_fail_at(w.p, NULL, 0, 0);
	if (rc && !error)
		fail("another size: %s", err.msg);
	for (unsigned i = 0; i < w.nforks; i++) {
		co_verify_bitmaps(w.fork[i], i * w.every + 1);
		powercut_destroy(w.fork[i]);
	}
	q = powercut_fork(w.p, rng_u64(&w.rng));
	kept = co_verify_bitmaps(q, 0);
	if (!rc && (!kept || !co_holds(q, &w.new.disk, &(unsigned){ 0 })))
		fail("what was called a success is not there");
	powercut_destroy(q);
	w.old = w.new;
}

static co_fn void co_bitmaps(void)
{
	bool error = rng_below(&w.rng, 4) == 0;

	co_write_some(w.p, &w.old.disk);
	if (rng_below(&w.rng, 2)) {
		struct err err = ERR_INIT;

		if (co_tool(w.p, QCOW2_SNAP_CREATE, "s", &err))
			fail("a snapshot cannot be made: %s", err.msg);
		co_write_some(w.p, &w.old.disk);
	}
	co_add_bitmaps(&w.old);
	w.new = w.old;
	if (!co_verify_bitmaps(w.p, 0))
		fail("there are no bitmaps");
	for (uint64_t n = error ? 1 : 1 + rng_below(&w.rng, 3); n; n--)
		co_bitmaps_step(error);
}

static co_fn void co_main(void *arg)
{
	struct disk *file = co_device(w.p);
	struct err err = ERR_INIT;

	if (w.mode == MAKE) {
		co_disk_close(file);
		co_make();
		return;
	}
	if (co_qcow2_create(file, NULL, &w.create, &err))
		fail("it cannot be created: %s", err.msg);
	co_disk_close(file);
	if (w.mode == BITMAPS) {
		co_bitmaps();
		return;
	}
	for (uint64_t n = 2 + rng_below(&w.rng, 5); n; n--) {
		co_write_some(w.p, &w.old.disk);
		if (w.mode != REPAIR) {
			/* Which of the two it is now only a cut could tell. */
			if (co_snapshot_step())
				return;
			continue;
		}
		if (w.old.n < 2 && rng_below(&w.rng, 2)) {
			next_state(QCOW2_SNAP_CREATE, 0);
			if (co_tool(w.p, QCOW2_SNAP_CREATE, w.new.name[w.new.n - 1], &err))
				fail("a snapshot cannot be made: %s", err.msg);
			w.old = w.new;
		}
		co_repair_step();
	}
}

static void one_seed(struct rt *rt, enum mode mode, uint64_t seed)
{
	choose(mode, seed);
	rt_sim_reseed(rt, seed);
	w.p = powercut_create(seed);
	powercut_dev_create(w.p, "image", 4096, &w.dev);
	if (rt_run(rt, co_main, NULL))
		fail("the reactor stopped");
	powercut_destroy(w.p);
}

int main(int argc, char **argv)
{
	static const char *const modes[] = { "snapshot", "repair", "error", "make", "bitmaps" };
	static struct rt_config config = { .coroutines = 64 };
	uint64_t seed = test_seed(), seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 20;
	struct rt_bufpool *bufs;
	struct rt *rt;
	int mode = -1;

	for (int i = 0; i < 5; i++)
		if (argc > 1 && !strcmp(argv[1], modes[i]))
			mode = i;
	if (mode < 0)
		test_fail("usage: qcow2_tools snapshot|repair|error|make|bitmaps [SEEDS]");
	CHECK(!rt_create_sim(&config, seed, &rt, NULL));
	CHECK(!rt_bufpool_create(rt, 64 << 20, &bufs, NULL));
	rt_set_bufs(rt, bufs);
	seeds = test_scale(seeds);
	if (mode == BITMAPS)	/* the driver would warn that it does not keep them */
		log_set_level(LOG_ERROR);
	for (uint64_t i = 0; i < seeds; i++)
		one_seed(rt, (enum mode)mode, seed + i);
	printf("%" PRIu64 " seeds, %" PRIu64 " images looked at, %" PRIu64 " with bitmaps in force\n", seeds, looked_at, in_force);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	return looked_at ? 0 : 1;
}
