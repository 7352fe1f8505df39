/* SPDX-License-Identifier: MIT */
/* `weir perf`: text in pveperf's form, and JSON. */
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <string.h>

#include "bench/perf.h"
#include "util/size.h"

static double rate(uint64_t count, uint64_t ns)
{
	return ns ? (double)count * 1e9 / (double)ns : 0;
}

static const char *yes_no(int flag)
{
	return flag < 0 ? "unknown" : flag ? "yes" : "no";
}

__attribute__((format(printf, 3, 4)))
static void row(FILE *out, const char *name, const char *fmt, ...)
{
	va_list ap;

	fprintf(out, "%-19s", name);
	va_start(ap, fmt);
	vfprintf(out, fmt, ap);
	va_end(ap);
	fputc('\n', out);
}

static void print_reads(const struct perf_result *r, FILE *out)
{
	row(out, "HD SIZE:", "%.2f GB (%s)", (double)r->size / 1e9, r->path.source[0] ? r->path.source : r->read_from);
	row(out, "BUFFERED READS:", "%.2f MB/sec (%s)", r->read_bytes_per_s / 1e6, r->read_from);
	row(out, "AVERAGE SEEK TIME:", "%.3f ms", (double)r->seek_ns / 1e6);
}

static void print_latency(FILE *out, const char *name, const struct hist *h)
{
	char p50[16], p99[16], p999[16];

	row(out, name, "p50 %s, p99 %s, p99.9 %s", duration_format(hist_quantile(h, 500), p50),
	    duration_format(hist_quantile(h, 990), p99), duration_format(hist_quantile_10k(h, 9990), p999));
}

static void print_syncs(const struct perf_result *r, FILE *out)
{
	if (!r->wrote) {
		row(out, "FSYNCS/SECOND:", "not measured: that writes to the disk, and destroys what is there; --write allows it");
		return;
	}
	row(out, "FSYNCS/SECOND:", "%.2f", rate(r->fsyncs, r->fsync_ns));
	print_latency(out, "ETCD FDATASYNC:", &r->etcd);
	row(out, "ETCD VERDICT:", r->verdict == PERF_OK ? "ok, %.0f a second, and p99 is below 10 ms" :
	    "TOO SLOW, %.0f a second: etcd needs a p99 below 10 ms", rate(r->etcd.count, r->etcd_ns));
}

static void print_path(const struct perf_result *r, FILE *out)
{
	const struct perf_path *p = &r->path;

	if (p->fs[0])
		row(out, "FILE SYSTEM:", "%s, journal: %s", p->fs, p->journal);
	if (p->device[0])
		row(out, "DEVICE:", "%s, sectors %u/%u, write cache: %s, FUA: %s, rotates: %s", p->device, p->logical_block,
		    p->physical_block, yes_no(p->write_cache), yes_no(p->fua), yes_no(p->rotational));
	if (p->cache[0])
		row(out, "ACCESS:", "O_DIRECT: %s, cache=%s, aio=%s", yes_no(p->o_direct), p->cache, p->aio);
	else
		row(out, "ACCESS:", "driver %s", p->driver);
	if (r->flush.count) {
		print_latency(out, "4K WRITE:", &r->write);
		print_latency(out, "4K WRITE, FUA:", &r->stable);
		print_latency(out, "4K WRITE, FLUSH:", &r->flush);
	}
	row(out, "A GUEST SEES:", "write cache: %s, FUA: %s, discard: %s, sectors of %u", yes_no(p->guest_flush),
	    yes_no(p->guest_fua), yes_no(p->guest_discard), p->guest_block);
	for (unsigned i = 0; i < r->n_warnings; i++)
		row(out, i ? "" : "DOUBTS:", "%s", r->warning[i]);
	if (!r->n_warnings)
		row(out, "DOUBTS:", "none");
}

void perf_print(const struct perf_opts *o, const struct perf_result *r, FILE *out)
{
	row(out, "CPU BOGOMIPS:", "%.2f", r->bogomips);
	row(out, "REGEX/SECOND:", "%.0f", r->regex_per_s);
	print_reads(r, out);
	print_syncs(r, out);
	if (r->dns_count)
		row(out, "DNS EXT:", "%.2f ms (%s)", (double)r->dns_ns / 1e6, o->dns);
	print_path(r, out);
}

/* --- JSON --- */

static json_t *latency_json(const struct hist *h)
{
	if (!h->count)
		return json_null();
	return json_pack("{sI sI sI sI sI}", "count", (json_int_t)h->count, "p50_ns", (json_int_t)hist_quantile(h, 500),
			 "p99_ns", (json_int_t)hist_quantile(h, 990), "p999_ns", (json_int_t)hist_quantile_10k(h, 9990),
			 "max_ns", (json_int_t)h->max);
}

/* A file name need not be UTF-8. */
static json_t *text_json(const char *s)
{
	json_t *v = json_string(s);

	return v ? v : json_string("(not UTF-8)");
}

static json_t *flag_json(int flag)
{
	return flag < 0 ? json_null() : json_boolean(flag);
}

static json_t *etcd_json(const struct perf_result *r)
{
	static const char *const verdict[] = { "not measured", "ok", "too slow" };

	return json_pack("{sI sI so so ss}", "bytes", (json_int_t)PERF_ETCD_BYTES, "limit_ns", (json_int_t)PERF_ETCD_LIMIT_NS,
			 "per_second", r->etcd.count ? json_real(rate(r->etcd.count, r->etcd_ns)) : json_null(),
			 "latency", latency_json(&r->etcd), "verdict", verdict[r->verdict]);
}

static json_t *path_json(const struct perf_path *p)
{
	return json_pack("{ss ss ss ss ss ss ss so so so so so sb sb sI sI}",
			 "driver", p->driver, "file_system", p->fs, "source", p->source, "device", p->device,
			 "journal", p->journal, "cache", p->cache, "aio", p->aio,
			 "write_cache", flag_json(p->write_cache), "fua", flag_json(p->fua),
			 "rotational", flag_json(p->rotational), "o_direct", flag_json(p->o_direct),
			 "barriers", flag_json(p->barriers), "flush_ignored", p->flush_ignored, "in_memory", p->in_memory,
			 "logical_block", (json_int_t)p->logical_block, "physical_block", (json_int_t)p->physical_block);
}

static json_t *guest_json(const struct perf_path *p)
{
	return json_pack("{sb sb sb sI}", "write_cache", p->guest_flush, "fua", p->guest_fua, "discard", p->guest_discard,
			 "sector", (json_int_t)p->guest_block);
}

int perf_print_json(const struct perf_opts *o, const struct perf_result *r, FILE *out)
{
	json_t *warnings = json_array(), *obj;
	int rc;

	for (unsigned i = 0; i < r->n_warnings; i++)
		json_array_append_new(warnings, text_json(r->warning[i]));
	obj = json_pack("{so ss sb sI sf sf so sI so sf so so so so so so so so}",
			"target", text_json(o->target), "kind", r->directory ? "directory" : "disk", "wrote", r->wrote,
			"part_ns", (json_int_t)o->part_ns,
			"bogomips", r->bogomips, "regex_per_second", r->regex_per_s,
			"dns_ns", r->dns_count ? json_integer((json_int_t)r->dns_ns) : json_null(),
			"size", (json_int_t)r->size, "read_from", text_json(r->read_from),
			"read_bytes_per_second", r->read_bytes_per_s,
			"seek_ns", r->seek_ns ? json_integer((json_int_t)r->seek_ns) : json_null(),
			"fsyncs_per_second", r->wrote ? json_real(rate(r->fsyncs, r->fsync_ns)) : json_null(),
			"etcd", etcd_json(r), "write_4k", latency_json(&r->write), "write_4k_fua", latency_json(&r->stable),
			"write_4k_flush", latency_json(&r->flush), "path", path_json(&r->path), "guest", guest_json(&r->path));
	if (!obj)
		return -ENOMEM;
	json_object_set_new(obj, "doubts", warnings);
	rc = json_dumpf(obj, out, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) || fputc('\n', out) == EOF ? -EIO : 0;
	json_decref(obj);
	return rc;
}
