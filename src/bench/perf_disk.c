/* SPDX-License-Identifier: MIT */
/*
 * `weir perf` on a DISK: through its driver, as a server would. Writes only with --write, to the first PERF_SPACE bytes.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "bench/perf.h"
#include "blk/spec.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"

#define READ_SIZE (2u << 20)	/* pveperf's */
#define BLOCK 4096u

/* --- What the driver tells --- */

static void copy_text(const json_t *obj, const char *key, char *buf, size_t size)
{
	const char *text = json_string_value(json_object_get(obj, key));

	if (text)
		snprintf(buf, size, "%s", text);
}

static int read_flag(const json_t *obj, const char *key)
{
	const json_t *v = json_object_get(obj, key);

	return json_is_boolean(v) ? json_is_true(v) : -1;
}

void perf_read_path(struct disk *d, struct perf_result *r)
{
	json_t *top = disk_status(d);
	const json_t *obj = top, *below;
	struct perf_path *p = &r->path;

	/* The lowest layer is the one that holds the data. */
	while ((below = json_object_get(obj, "file")) && json_is_object(below))
		obj = below;
	copy_text(obj, "driver", p->driver, sizeof(p->driver));
	copy_text(obj, "file_system", p->fs, sizeof(p->fs));
	copy_text(obj, "source", p->source, sizeof(p->source));
	copy_text(obj, "device", p->device, sizeof(p->device));
	copy_text(obj, "journal", p->journal, sizeof(p->journal));
	copy_text(obj, "cache", p->cache, sizeof(p->cache));
	copy_text(obj, "aio", p->aio, sizeof(p->aio));
	p->write_cache = read_flag(obj, "write_cache");
	p->fua = read_flag(obj, "fua");
	p->rotational = read_flag(obj, "rotational");
	p->o_direct = read_flag(obj, "o_direct");
	p->barriers = read_flag(obj, "barriers");
	p->flush_ignored = read_flag(obj, "flush_ignored") == 1;
	p->in_memory = read_flag(obj, "in_memory") == 1 || !strcmp(p->driver, "mem") || !strcmp(p->driver, "null");
	p->logical_block = (uint32_t)json_integer_value(json_object_get(obj, "logical_block"));
	p->physical_block = (uint32_t)json_integer_value(json_object_get(obj, "physical_block"));
	p->guest_flush = d->limits.volatile_cache;
	p->guest_fua = d->limits.fua;
	p->guest_discard = d->limits.discard_gran > 0;
	p->guest_block = max(d->limits.align, 512u);
	json_decref(top);
}

/* --- Reads --- */

static co_fn int co_reads(const struct perf_opts *o, struct perf_result *r, struct disk *d, char *buf)
{
	uint64_t start = perf_now_ns(), done = 0, pos = 0, len, elapsed;
	int rc;

	perf_part(o, "sequential reads");
	while (perf_goes_on(o, start)) {
		len = min((uint64_t)READ_SIZE, d->size - pos);
		rc = co_disk_read(d, pos, buf, len, 0);
		if (rc)
			return rc;
		done += len;
		pos = pos + len < d->size ? pos + len : 0;
	}
	elapsed = perf_now_ns() - start;
	r->read_bytes_per_s = elapsed ? (double)done * 1e9 / (double)elapsed : 0;
	return 0;
}

static co_fn int co_seeks(const struct perf_opts *o, struct perf_result *r, struct disk *d, char *buf)
{
	uint64_t start = perf_now_ns(), count = 0, unit = max(d->limits.align, 512u);
	struct rng rng;
	int rc;

	perf_part(o, "seeks");
	rng_seed(&rng, start);
	while (d->size >= unit && perf_goes_on(o, start)) {
		rc = co_disk_read(d, rng_below(&rng, d->size / unit) * unit, buf, unit, 0);
		if (rc)
			return rc;
		count++;
	}
	r->seek_ns = count ? (perf_now_ns() - start) / count : 0;
	return 0;
}

/* --- Writes --- */

/*
 * Writes of `len` one after the other in the first PERF_SPACE bytes, each with `flags`, and a flush behind each if `flush`. What is
 * written is widened to whole blocks, as a guest's file system does.
 */
static co_fn int co_writes(const struct perf_opts *o, struct disk *d, const char *buf, uint64_t len, unsigned flags, bool flush,
			   struct hist *h, uint64_t *ret_ns)
{
	uint64_t space = align_down(min(d->size, (uint64_t)PERF_SPACE), BLOCK), pos = 0, start, before, from, to;
	int rc;

	hist_init(h);
	if (space < align_up(len, BLOCK) + BLOCK)
		return -ENOSPC;
	start = perf_now_ns();
	while (perf_goes_on(o, start)) {
		from = align_down(pos, BLOCK);
		to = align_up(pos + len, BLOCK);
		before = perf_now_ns();
		rc = co_disk_write(d, from, buf, to - from, flags);
		if (!rc && flush)
			rc = co_disk_flush(d);
		if (rc)
			return rc;
		hist_add(h, perf_now_ns() - before);
		pos = pos + 2 * len <= space ? pos + len : 0;
	}
	*ret_ns = perf_now_ns() - start;
	return 0;
}

static void *make_data(size_t len)
{
	struct rng rng;
	void *buf;

	if (posix_memalign(&buf, 4096, len))
		return NULL;
	rng_seed(&rng, 1);
	rng_fill(&rng, buf, len);
	return buf;
}

static co_fn int co_timed_write(struct disk *d, uint64_t pos, const char *buf, unsigned flags, bool flush, struct hist *h)
{
	uint64_t before = perf_now_ns();
	int rc = co_disk_write(d, pos, buf, BLOCK, flags);

	if (!rc && flush)
		rc = co_disk_flush(d);
	if (!rc)
		hist_add(h, perf_now_ns() - before);
	return rc;
}

/* The three kinds take turns, so that what else goes on in the machine meets them alike. */
static co_fn int co_three_kinds(const struct perf_opts *o, struct perf_result *r, struct disk *d, const char *buf)
{
	uint64_t space = align_down(min(d->size, (uint64_t)PERF_SPACE), BLOCK), pos = 0, start = perf_now_ns();
	int rc = 0;

	while (!rc && perf_goes_on(o, start)) {
		rc = co_timed_write(d, pos, buf, 0, false, &r->write);
		if (!rc)
			rc = co_timed_write(d, pos, buf, DISK_FUA, false, &r->stable);
		if (!rc)
			rc = co_timed_write(d, pos, buf, 0, true, &r->flush);
		pos = pos + 2 * BLOCK <= space ? pos + BLOCK : 0;
	}
	return rc;
}

co_fn int co_perf_flush_cost(const struct perf_opts *o, struct perf_result *r, struct disk *d, struct err *err)
{
	char *buf = make_data(BLOCK);
	int rc;

	if (!buf)
		return err_set(err, -ENOMEM, "out of memory");
	perf_part(o, "cost of a flush");
	/* What others left in the device's cache is not ours to count. */
	rc = co_disk_flush(d);
	if (!rc)
		rc = co_three_kinds(o, r, d, buf);
	free(buf);
	return rc ? err_errno(err, rc, "%s: writing failed", d->name) : 0;
}

static co_fn int co_syncs(const struct perf_opts *o, struct perf_result *r, struct disk *d, struct err *err)
{
	struct hist h;
	char *buf = make_data(PERF_ETCD_BYTES + 2 * BLOCK);
	int rc;

	if (!buf)
		return err_set(err, -ENOMEM, "out of memory");
	perf_part(o, "fsyncs");
	rc = co_writes(o, d, buf, BLOCK, 0, true, &h, &r->fsync_ns);
	r->fsyncs = h.count;
	if (!rc) {
		perf_part(o, "etcd's writes");
		rc = co_writes(o, d, buf, PERF_ETCD_BYTES, 0, true, &r->etcd, &r->etcd_ns);
	}
	free(buf);
	if (rc)
		return err_errno(err, rc, "%s: writing failed", d->name);
	r->wrote = true;
	return co_perf_flush_cost(o, r, d, err);
}

static co_fn int co_measure_disk(const struct perf_opts *o, struct perf_result *r, struct disk *d, struct err *err)
{
	char *buf = make_data(READ_SIZE);
	int rc;

	if (!buf)
		return err_set(err, -ENOMEM, "out of memory");
	rc = d->size ? co_reads(o, r, d, buf) : 0;
	if (!rc)
		rc = co_seeks(o, r, d, buf);
	free(buf);
	if (rc)
		return err_errno(err, rc, "%s: reading failed", d->name);
	return o->write ? co_syncs(o, r, d, err) : 0;
}

co_fn int co_perf_disk(const struct perf_opts *o, struct perf_result *r, struct err *err)
{
	struct disk *d;
	int rc;

	/* Reading disturbs nobody, also while somebody else uses it; writing takes the lock that a server would. */
	rc = co_disk_open(o->target, o->write ? DISK_OPEN_RDWR : DISK_OPEN_NOLOCK, &d, err);
	if (rc)
		return rc;
	r->size = d->size;
	snprintf(r->read_from, sizeof(r->read_from), "%s", d->name);
	perf_read_path(d, r);
	rc = co_measure_disk(o, r, d, err);
	co_disk_close(d);
	return rc;
}
