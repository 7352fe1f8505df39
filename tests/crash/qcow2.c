/* SPDX-License-Identifier: MIT */
/*
 * qcow2 images on a disk that loses power.
 *
 *	qcow2 cut [SEEDS]       a workload runs once; at its I/Os the power supply is forked as a cut would leave it, and each fork must be consistent
 *	                        (leaks are allowed), open, and hold for each sector what the last completed flush covers, or something later. Half of
 *	                        them end with another size, and the forks of that time have the one or the other
 *	qcow2 model [SEEDS]     no cuts: what is read is compared with what was written, also across closing, opening and another size, and a closed
 *	                        image has no leaks
 *	qcow2 error [SEEDS]     the n-th I/O fails, for some n: no data is lost that a flush has covered, and the image is consistent
 *	qcow2 full [SEEDS]      the disk is too small: writes fail with -ENOSPC, nothing else does
 *
 * Each sector belongs to one of several workers, who are sequential, in stripes that share clusters; so a sector's versions have an order. A sector is
 * filled with the number of its version, and 0 is zeroes. The image's geometry, backing file and memory limits follow from the seed, which is printed on failure.
 * Forks of forks: some are worked on again, and cut again.
 */
#include <errno.h>

#include "backend/fault.h"
#include "backend/media.h"
#include "blk/disk.h"
#include "format/qcow2/create.h"
#include "format/qcow2/qcow2.h"
#include "lib/qcow2_verify.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"

#define SECTOR 512u
#define WORKERS 4
#define MAX_VERSIONS 200000
#define MAX_FORKS 400
#define RESIZE_FORKS 100

enum mode { CUT, MODEL, ERROR, FULL };

struct version {
	uint64_t value;		/* what the sector holds */
	uint64_t issued, done;	/* ticks; done 0: in flight */
	uint32_t prev;		/* + 1 */
	bool failed, discard;	/* discard: or zeroes */
	bool fua;		/* stable when done */
};

struct fork {
	struct powercut *p;
	uint64_t tick, floor;	/* of the cut, and when the last flush that completed was issued */
	uint64_t io;
	uint64_t resized;	/* 0, or the size that it was about to get or had got */
};

static struct world {
	enum mode mode;
	uint64_t seed, size, tick, floor, ios, every;
	struct rng rng;
	struct qcow2_create create;
	struct qcow2_opts opts;
	struct powercut_dev_config dev;
	bool backed, failing;
	uint64_t backing_size, stripe;
	uint8_t *backing;
	struct powercut *p;
	struct disk *d;
	struct version *v;
	uint32_t nv, *last;	/* per sector: newest version + 1 */
	struct fork fork[MAX_FORKS + RESIZE_FORKS];
	unsigned nforks, running;
	uint64_t resized;
	struct co_queue idle;
	uint64_t fail_at;
} w;

static uint64_t checked, leaks_seen;

__attribute__((format(printf, 1, 2), noreturn))
static void fail(const char *fmt, ...)
{
	char why[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	test_fail("%s\n  WEIR_SEED=%" PRIu64 ": clusters of %" PRIu64 ", version %u, refcounts of %" PRIu64 " bits%s, size %" PRIu64 ", %s", why, w.seed,
		  w.create.cluster_size, w.create.version, w.create.refcount_bits, w.create.ext_l2 ? ", extended L2 entries" : "", w.size,
		  w.backed ? "with a backing file" : "no backing file");
}

/* --- Scenario --- */

static void choose(uint64_t seed)
{
	static const uint8_t bits[] = { 9, 10, 12, 12, 13, 14, 16, 16, 18 };
	struct rng *r = &w.rng;
	unsigned b;

	memset(&w.create, 0, sizeof(w.create));
	memset(&w.opts, 0, sizeof(w.opts));
	memset(&w.dev, 0, sizeof(w.dev));
	w.seed = seed;
	rng_seed(r, seed);
	b = bits[rng_below(r, ARRAY_SIZE(bits))];
	w.create.version = rng_below(r, 5) ? 3 : 2;
	w.create.ext_l2 = w.create.version == 3 && rng_below(r, 3) == 0;
	if (w.create.ext_l2 && b < 14)
		b = 14 + rng_below(r, 4);
	w.create.cluster_size = 1ull << b;
	w.create.refcount_bits = w.create.version == 2 ? 16 : 1ull << rng_below(r, 7);
	w.size = SECTOR * (64 + rng_below(r, 2048));
	if (b >= 14)
		w.size += (1ull << b) * rng_below(r, 8);
	w.create.size = w.size;
	w.backed = rng_below(r, 2);
	w.backing_size = SECTOR * (rng_below(r, 2) ? w.size / SECTOR : 1 + rng_below(r, 2 * w.size / SECTOR));
	w.stripe = SECTOR << rng_below(r, 8);
	w.opts.table_cache = 1;
	w.opts.fill_debt = rng_below(r, 2) ? 1 : 0;
	w.opts.run_ahead = rng_below(r, 2) ? 1 : 1ull << (12 + rng_below(r, 10));
	w.opts.tidy_ns = rng_below(r, 2) ? 0 : 20000 + rng_below(r, 1000000);
	w.dev.sector = SECTOR;
	w.dev.align = rng_below(r, 4) ? 512 : 4096;
	w.dev.no_discard = rng_below(r, 4) == 0;
	w.dev.no_zero = rng_below(r, 6) == 0;
	w.dev.discard_keeps = rng_below(r, 4) == 0;
	w.create.backing_file = w.backed ? "base" : NULL;
	w.create.backing_format = w.backed ? "raw" : NULL;
}

/* --- The backing file: a disk that knows its bytes --- */

static co_fn int back_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	uint64_t at = off;

	co_sleep_ns(1 + rng_below(&w.rng, 100000));
	for (int i = 0; i < niov; i++) {
		memcpy(iov[i].iov_base, w.backing + at, iov[i].iov_len);
		at += iov[i].iov_len;
	}
	return 0;
}

static co_fn int back_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	fail("a backing file was written to");
}

static const struct disk_ops back_ops = { .driver = "back", .co_read = back_co_read, .co_write = back_co_write };

static struct disk *open_backing(void)
{
	struct disk *d = calloc(1, sizeof(*d));

	CHECK_EQ(disk_init(d, &back_ops, "base", NULL), 0);
	d->size = w.backing_size;
	d->read_only = true;
	return d;
}

/* In mode FULL it cannot grow. */
static struct disk *open_file(struct powercut *p)
{
	static struct disk_ops fixed;
	struct disk *file;

	CHECK_EQ(powercut_dev_open(powercut_dev_find(p, "image"), &file), 0);
	fixed = *file->ops;
	fixed.co_resize = NULL;
	if (w.mode == FULL)
		file->ops = &fixed;
	return file;
}

static co_fn struct disk *co_open(struct powercut *p)
{
	struct qcow2_opts o = w.opts;
	struct err err = ERR_INIT;
	struct disk *file = open_file(p), *d;

	o.backing = w.backed ? open_backing() : NULL;
	if (co_qcow2_open(file, "image", &o, DISK_OPEN_RDWR, &d, &err)) {
		if (!w.failing)
			fail("cannot be opened: %s", err.msg);
		co_disk_close(o.backing);
		co_disk_close(file);
		return NULL;
	}
	return d;
}

static uint64_t base_value(uint64_t sector)
{
	uint64_t v;

	if (!w.backed || (sector + 1) * SECTOR > w.backing_size)
		return 0;
	memcpy(&v, w.backing + sector * SECTOR, 8);
	return v;
}

static void say(const char *what, uint64_t first, uint64_t n)
{
	static int verbose = -1;

	if (verbose < 0)
		verbose = getenv("WEIR_VERBOSE") != NULL;
	if (verbose)
		printf("%s [%" PRIu64 ",+%" PRIu64 ") tick %" PRIu64 " I/O %" PRIu64 "\n", what, first, n, w.tick, w.ios);
}

/* --- Versions --- */

static uint32_t add_version(uint64_t sector, uint64_t value)
{
	if (w.nv == MAX_VERSIONS)
		fail("too many versions");
	w.v[w.nv] = (struct version){ value, w.tick, 0, w.last[sector], false, false };
	w.last[sector] = ++w.nv;
	return w.nv - 1;
}

static void settle(uint64_t first, uint64_t n, bool failed)
{
	uint64_t now = ++w.tick;

	for (uint64_t s = first; s < first + n; s++) {
		w.v[w.last[s] - 1].done = now;
		w.v[w.last[s] - 1].failed = failed;
	}
}

static uint64_t newest(uint64_t sector)
{
	return w.last[sector] ? w.v[w.last[sector] - 1].value : base_value(sector);
}

static bool is_value(const uint8_t *p, uint64_t value)
{
	for (unsigned i = 0; i < SECTOR; i += 8)
		if (memcmp(p + i, &value, 8))
			return false;
	return true;
}

/* Whether the sector may hold this after a cut. */
static bool allowed(const uint8_t *p, uint64_t sector, const struct fork *f)
{
	for (uint32_t i = w.last[sector]; i; i = w.v[i - 1].prev) {
		const struct version *v = &w.v[i - 1];

		if (v->issued > f->tick)
			continue;
		if (is_value(p, v->value) || (v->discard && is_value(p, 0)))
			return true;
		/* What a flush covers, or its own FUA, has replaced all that was before. */
		if (v->done && v->done <= (v->fua ? f->tick : f->floor) && !v->failed && !(v->discard && v->prev && w.v[v->prev - 1].failed))
			return false;
	}
	return is_value(p, base_value(sector));
}

/* --- Workers --- */

static bool expected_error(int ret)
{
	if (w.mode == FULL)
		return ret == -ENOSPC;
	return w.failing;
}

static co_fn void co_read_check(uint64_t first, uint64_t n)
{
	uint8_t *buf = malloc(n * SECTOR);
	int ret = co_disk_read(w.d, first * SECTOR, buf, n * SECTOR, 0);

	say("read", first, n);
	if (ret && !expected_error(ret))
		fail("read: %s", strerror(-ret));
	for (uint64_t s = 0; s < n && !ret; s++) {
		uint32_t v = w.last[first + s];

		/* A write that failed left the old or the new. */
		if (v && w.v[v - 1].failed)
			continue;
		if (!is_value(buf + s * SECTOR, newest(first + s))) {
			uint64_t got;

			memcpy(&got, buf + s * SECTOR, 8);
			fail("sector %" PRIu64 " reads as %" PRIx64 ", wanted %" PRIx64, first + s, got, newest(first + s));
		}
	}
	free(buf);
}

static co_fn int co_write_some(uint64_t first, uint64_t n)
{
	bool fua = rng_below(&w.rng, 8) == 0;
	uint64_t *buf = malloc(n * SECTOR);
	int ret;

	say("write", first, n);
	++w.tick;
	for (uint64_t s = 0; s < n; s++) {
		uint32_t v = add_version(first + s, 0);

		w.v[v].value = (w.seed << 32) + v + 1;
		w.v[v].fua = fua;
		for (unsigned i = 0; i < SECTOR / 8; i++)
			buf[s * SECTOR / 8 + i] = w.v[v].value;
	}
	ret = co_disk_write(w.d, first * SECTOR, buf, n * SECTOR, fua ? DISK_FUA : 0);
	settle(first, n, ret);
	free(buf);
	return ret;
}

static co_fn int co_zero_some(uint64_t first, uint64_t n)
{
	bool fua = rng_below(&w.rng, 8) == 0;
	int ret;

	say("zero", first, n);
	++w.tick;
	for (uint64_t s = 0; s < n; s++)
		w.v[add_version(first + s, 0)].fua = fua;
	ret = co_disk_zero(w.d, first * SECTOR, n * SECTOR, (rng_below(&w.rng, 2) ? DISK_UNMAP : 0) | (fua ? DISK_FUA : 0));
	settle(first, n, ret);
	return ret;
}

/* Either content may come out of it; which one did is what the last version says. */
static co_fn int co_discard_some(uint64_t first, uint64_t n)
{
	uint8_t *buf = malloc(n * SECTOR);
	int ret;

	say("discard", first, n);
	++w.tick;
	for (uint64_t s = 0; s < n; s++)
		w.v[add_version(first + s, 0)].discard = true;
	ret = co_disk_discard(w.d, first * SECTOR, n * SECTOR, 0);
	if (!ret)
		ret = co_disk_read(w.d, first * SECTOR, buf, n * SECTOR, 0);
	for (uint64_t s = 0; s < n && !ret; s++) {
		struct version *v = &w.v[w.last[first + s] - 1];
		uint64_t old = v->prev ? w.v[v->prev - 1].value : base_value(first + s);

		if (is_value(buf + s * SECTOR, 0))
			continue;
		/* What it was is not known: it is now. */
		if (v->prev && w.v[v->prev - 1].failed)
			memcpy(&old, buf + s * SECTOR, 8);
		if (!is_value(buf + s * SECTOR, old))
			fail("sector %" PRIu64 " holds neither zeroes nor the old after a discard", first + s);
		v->value = old;
	}
	settle(first, n, ret);
	free(buf);
	return ret;
}

static co_fn int co_flush(void)
{
	uint64_t issued = ++w.tick;
	int ret;

	say("flush", 0, 0);
	ret = co_disk_flush(w.d);

	if (!ret)
		w.floor = max(w.floor, issued);
	return ret;
}

/* A range within one stripe of this worker. */
static void pick(unsigned id, uint64_t *first, uint64_t *n)
{
	uint64_t per = w.stripe / SECTOR, stripes = (w.size / SECTOR + per - 1) / per, k;

	k = rng_below(&w.rng, (stripes + WORKERS - 1 - id) / WORKERS) * WORKERS + id;
	*first = k * per + rng_below(&w.rng, per);
	if (*first >= w.size / SECTOR)
		*first = k * per;
	*n = 1 + rng_below(&w.rng, rng_below(&w.rng, 2) ? 8 : per);
	*n = min(*n, (k + 1) * per - *first);
	*n = min(*n, w.size / SECTOR - *first);
}

static co_fn void co_worker(void *arg)
{
	unsigned id = (uintptr_t)arg, ops = 10 + rng_below(&w.rng, 50);
	uint64_t per = w.stripe / SECTOR, stripes = (w.size / SECTOR + per - 1) / per;

	while (ops-- && id < stripes && !w.d->failed) {
		uint64_t first, n;
		int ret = 0;

		pick(id, &first, &n);
		switch (rng_below(&w.rng, 16)) {
		case 0: case 1: ret = co_flush(); break;
		case 2: case 3: ret = co_zero_some(first, n); break;
		case 4: case 5: ret = co_discard_some(first, n); break;
		case 6: case 7: co_read_check(first, n); break;
		default: ret = co_write_some(first, n); break;
		}
		if (ret && !expected_error(ret) && !(w.mode == FULL && ret == -EIO && w.d->failed))
			fail("an operation failed: %s", strerror(-ret));
		if (rng_below(&w.rng, 4) == 0)
			co_sleep_ns(rng_below(&w.rng, 1000000));
	}
	w.running--;
	co_queue_wake_all(&w.idle);
}

/* One worker, requests of any size. */
static co_fn void co_large_ops(unsigned ops)
{
	while (ops-- && !w.d->failed) {
		uint64_t sectors = w.size / SECTOR, first = rng_below(&w.rng, sectors), n = 1 + rng_below(&w.rng, sectors - first);
		int ret = 0;

		switch (rng_below(&w.rng, 8)) {
		case 0: ret = co_flush(); break;
		case 1: ret = co_zero_some(first, n); break;
		case 2: ret = co_discard_some(first, n); break;
		case 3: co_read_check(first, n); break;
		default: ret = co_write_some(first, min(n, 600ull)); break;
		}
		if (ret && !expected_error(ret) && !(w.mode == FULL && ret == -EIO && w.d->failed))
			fail("an operation failed: %s", strerror(-ret));
	}
}

static co_fn void co_workload(void)
{
	w.running = WORKERS;
	for (uintptr_t i = 0; i < WORKERS; i++)
		CHECK_EQ(co_spawn("worker", co_worker, (void *)i), 0);
	while (w.running)
		co_queue_wait(&w.idle, "the workers");
	co_large_ops(rng_below(&w.rng, 12));
}

/* --- Verification --- */

static uint64_t verify_image(struct powercut *p, const char *when)
{
	struct qcow2_verdict v;

	qcow2_keep(powercut_dev_view(powercut_dev_find(p, "image")));
	qcow2_verify(powercut_dev_view(powercut_dev_find(p, "image")), &v);
	if (v.wrong[0])
		fail("%s: corrupt: %s", when, v.wrong);
	return v.leaks;
}

static co_fn void co_verify_content(struct disk *d, const struct fork *f)
{
	uint8_t *buf = malloc(d->size);
	int ret = 0;

	if (d->size != w.size && (!f->resized || d->size != f->resized))
		fail("cut at I/O %" PRIu64 ": it has %" PRIu64 " bytes", f->io, d->size);
	for (uint64_t off = 0; off < d->size && !ret; off += 65536)
		ret = co_disk_read(d, off, buf + off, min(d->size - off, 65536ull), 0);
	if (ret)
		fail("cut at I/O %" PRIu64 ": read: %s", f->io, strerror(-ret));
	for (uint64_t s = 0; s < d->size / SECTOR; s++) {
		uint64_t got;

		/* What a larger size has added is zeroes, whatever the backing file has there. */
		if (s < w.size / SECTOR ? allowed(buf + s * SECTOR, s, f) : is_value(buf + s * SECTOR, 0))
			continue;
		if (s >= w.size / SECTOR)
			fail("cut at I/O %" PRIu64 ": sector %" PRIu64 " is new, and holds something", f->io, s);
		memcpy(&got, buf + s * SECTOR, 8);
		fail("cut at I/O %" PRIu64 ": sector %" PRIu64 " holds %" PRIx64 ", which the last flush had replaced or nobody wrote (newest %" PRIx64 ")",
		     f->io, s, got, newest(s));
	}
	free(buf);
}

static co_fn void co_verify_fork(struct fork *f)
{
	struct disk *d;
	char zero[SECTOR] = "";

	leaks_seen += verify_image(f->p, "after a cut");
	d = co_open(f->p);
	co_verify_content(d, f);
	/* It works on, and closes. */
	CHECK_EQ(co_disk_write(d, rng_below(&w.rng, d->size / SECTOR) * SECTOR, zero, SECTOR, 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	co_disk_close(d);
	verify_image(f->p, "worked on after a cut, and closed");
	powercut_destroy(f->p);
	checked++;
}

static int on_io(void *arg, struct powercut_dev *dev, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	w.ios++;
	if (w.fail_at && w.ios >= w.fail_at && op != DISK_OP_EXTENT && (w.ios == w.fail_at || w.seed % 2)) {
		w.failing = true;
		return w.seed % 3 ? -EIO : -ENOSPC;
	}
	if (w.every && op != DISK_OP_READ && op != DISK_OP_EXTENT && rng_below(&w.rng, w.every) == 0 &&
	    w.nforks < MAX_FORKS + (w.resized ? RESIZE_FORKS : 0))
		w.fork[w.nforks++] = (struct fork){ powercut_fork(w.p, rng_u64(&w.rng)), w.tick, w.floor, w.ios, w.resized };
	return 0;
}

/* --- Modes --- */

static co_fn void co_make(uint64_t dev_size)
{
	struct err err = ERR_INIT;
	struct disk *file;

	w.p = powercut_create(w.seed);
	CHECK_EQ(powercut_dev_open(powercut_dev_create(w.p, "image", dev_size, &w.dev), &file), 0);
	if (qcow2_create_check(&w.create, "image", &err) || co_qcow2_create(file, NULL, &w.create, &err))
		fail("%s", err.msg);
	co_disk_close(file);
}

static co_fn void co_reopen(void)
{
	struct fork now = { w.p, ++w.tick, w.tick, w.ios, 0 };
	uint64_t leaks;

	CHECK_EQ(co_flush(), 0);
	co_disk_close(w.d);
	leaks = verify_image(w.p, "closed");
	if (leaks)
		fail("closed: %" PRIu64 " clusters are leaked", leaks);
	now.tick = now.floor = ++w.tick;
	w.d = co_open(w.p);
	co_verify_content(w.d, &now);
}

static co_fn void co_another_size(void)
{
	uint64_t sectors = 32 + rng_below(&w.rng, 3000), old = w.size / SECTOR;
	struct err err = ERR_INIT;
	int ret = co_disk_resize(w.d, sectors * SECTOR, &err);

	if (ret)
		fail("resize from %" PRIu64 " to %" PRIu64 " sectors: %s", old, sectors, err.msg);
	w.last = realloc(w.last, max(sectors, old) * sizeof(*w.last));
	w.size = sectors * SECTOR;
	++w.tick;
	for (uint64_t s = old; s < sectors; s++) {
		w.last[s] = 0;
		add_version(s, 0);
	}
	if (sectors > old)
		settle(old, sectors - old, false);
	co_read_check(0, sectors);
}

static co_fn void co_model_mode(void)
{
	co_make(64 << 20);
	w.d = co_open(w.p);
	co_workload();
	co_read_check(0, w.size / SECTOR);
	for (int i = 0; i < 3; i++) {
		co_reopen();
		if (rng_below(&w.rng, 2))
			co_another_size();
		co_large_ops(10);
		co_workload();
		co_read_check(0, w.size / SECTOR);
	}
	co_reopen();
	co_disk_close(w.d);
	checked++;
}

/* The model keeps the old size: a cut shows the one or the other. */
static co_fn void co_another_size_while_cut(void)
{
	struct err err = ERR_INIT;

	CHECK_EQ(co_flush(), 0);
	w.resized = SECTOR * (32 + rng_below(&w.rng, 2 * w.size / SECTOR));
	++w.tick;
	if (co_disk_resize(w.d, w.resized, &err))
		fail("resize to %" PRIu64 ": %s", w.resized, err.msg);
}

static co_fn void co_cut_mode(void)
{
	co_make(64 << 20);
	w.d = co_open(w.p);
	w.every = 1 + rng_below(&w.rng, 8);
	powercut_set_hook(w.p, on_io, NULL);
	co_workload();
	if (rng_below(&w.rng, 2))
		co_another_size_while_cut();
	if (rng_below(&w.rng, 2))
		co_disk_close(w.d), w.d = NULL;
	powercut_set_hook(w.p, NULL, NULL);
	if (w.d)
		co_disk_close(w.d);
	verify_image(w.p, "closed");
	for (unsigned i = 0; i < w.nforks; i++)
		co_verify_fork(&w.fork[i]);
}

static co_fn void co_error_mode(void)
{
	struct fork f;
	struct disk *d;

	co_make(64 << 20);
	w.d = co_open(w.p);
	w.fail_at = 1 + rng_below(&w.rng, 300);
	powercut_set_hook(w.p, on_io, NULL);
	co_workload();
	powercut_set_hook(w.p, NULL, NULL);
	f = (struct fork){ powercut_fork(w.p, rng_u64(&w.rng)), w.tick, w.floor, w.ios, 0 };
	co_disk_close(w.d);
	w.failing = false;
	verify_image(w.p, "closed after an error");
	f.io = w.fail_at;
	/* Also without a cut everything that a flush covered is there. */
	d = co_open(w.p);
	co_verify_content(d, &f);
	co_disk_close(d);
	co_verify_fork(&f);
}

static co_fn void co_full_mode(void)
{
	struct fork f;

	co_make(w.create.cluster_size * 8 + 65536 + rng_below(&w.rng, w.size));
	w.d = co_open(w.p);
	powercut_set_hook(w.p, on_io, NULL);
	co_workload();
	if (!w.d->failed)
		co_flush();
	powercut_set_hook(w.p, NULL, NULL);
	f = (struct fork){ powercut_fork(w.p, rng_u64(&w.rng)), w.tick, w.floor, w.ios, 0 };
	co_disk_close(w.d);
	verify_image(w.p, "closed");
	verify_image(f.p, "full, after a cut");
	powercut_destroy(f.p);
	checked++;
}

static co_fn void co_main(void *arg)
{
	w.nv = w.nforks = 0;
	w.tick = 1;
	w.floor = w.ios = w.fail_at = w.every = w.resized = 0;
	w.failing = false;
	co_queue_init(&w.idle);
	w.last = calloc(w.size / SECTOR, sizeof(*w.last));
	w.backing = malloc(w.backing_size);
	for (uint64_t i = 0; i < w.backing_size; i += 8) {
		uint64_t v = rng_below(&w.rng, 4) || i % SECTOR ? (w.seed << 32) + 0x80000000 + i / SECTOR : 0;

		/* Some sectors are zeroes. */
		if (i % SECTOR)
			memcpy(&v, w.backing + i - 8, 8);
		memcpy(w.backing + i, &v, 8);
	}
	switch (w.mode) {
	case CUT: co_cut_mode(); break;
	case MODEL: co_model_mode(); break;
	case ERROR: co_error_mode(); break;
	case FULL: co_full_mode(); break;
	}
	powercut_destroy(w.p);
	free(w.last);
	free(w.backing);
}

int main(int argc, char **argv)
{
	static const char *const names[] = { "cut", "model", "error", "full" };
	static const struct rt_config config = { .coroutines = 200 };
	uint64_t seeds = argc > 2 ? strtoull(argv[2], NULL, 0) : 20, first;
	struct rt_bufpool *bufs;
	struct err err = ERR_INIT;
	struct rt *rt;

	for (w.mode = CUT; argc > 1 && w.mode < FULL && strcmp(argv[1], names[w.mode]); w.mode++)
		;
	first = test_seed();
	seeds = getenv("WEIR_SEED") ? 1 : test_scale(seeds);
	w.v = calloc(MAX_VERSIONS, sizeof(*w.v));
	CHECK_EQ(rt_create_sim(&config, 1, &rt, &err), 0);
	CHECK_EQ(rt_bufpool_create(rt, 1, &bufs, &err), 0);
	rt_set_bufs(rt, bufs);
	for (uint64_t s = first; s < first + seeds; s++) {
		choose(s);
		rt_sim_reseed(rt, s);
		if (rt_run(rt, co_main, NULL))
			fail("deadlock");
	}
	printf("%s: %" PRIu64 " seeds, %" PRIu64 " images checked, %" PRIu64 " clusters leaked by cuts\n", names[w.mode], seeds, checked, leaks_seen);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	free(w.v);
	return 0;
}
