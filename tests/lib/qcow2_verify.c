/* SPDX-License-Identifier: MIT */
/* Whether a qcow2 image is consistent. */
#include "lib/qcow2_verify.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/media.h"
#include "format/qcow2/format.h"
#include "lib/test.h"
#include "util/err.h"

struct verify {
	const struct media *m;
	struct qcow2_header h;
	struct qcow2_geo g;
	uint64_t clusters, *refs, *counts;
	struct qcow2_verdict *v;
};

__attribute__((format(printf, 2, 3)))
static void wrong(struct verify *x, const char *fmt, ...)
{
	va_list ap;

	if (x->v->wrong[0])
		return;
	va_start(ap, fmt);
	vsnprintf(x->v->wrong, sizeof(x->v->wrong), fmt, ap);
	va_end(ap);
}

/* The bytes at `off`; the caller frees them. */
static uint8_t *bytes_at(struct verify *x, uint64_t off, uint64_t len)
{
	uint8_t *buf = calloc(1, len + 1);
	uint64_t size = media_size(x->m);

	if (off < size)
		media_read(x->m, off, buf, min(len, size - off));
	return buf;
}

static void ref(struct verify *x, uint64_t off, uint64_t len, const char *what)
{
	for (uint64_t c = off >> x->g.cluster_bits; c <= (off + len - 1) >> x->g.cluster_bits; c++) {
		if (c >= x->clusters) {
			wrong(x, "%s at %llu lies beyond the end", what, (unsigned long long)off);
			return;
		}
		x->refs[c]++;
	}
}

static void read_counts(struct verify *x)
{
	uint64_t n = ((uint64_t)x->h.rt_clusters << x->g.cluster_bits) / 8, per = 1ull << x->g.rb_bits;
	uint8_t *rt = bytes_at(x, x->h.rt_off, n * 8);

	ref(x, x->h.rt_off, n * 8, "refcount table");
	for (uint64_t i = 0; i < n; i++) {
		uint64_t off = get_be64(rt + i * 8) & QCOW2_RT_OFFSET_MASK;
		uint8_t *block;

		if (!off)
			continue;
		if (!is_aligned(off, x->g.cluster_size)) {
			wrong(x, "refcount block %llu is not aligned", (unsigned long long)i);
			continue;
		}
		ref(x, off, x->g.cluster_size, "refcount block");
		block = bytes_at(x, off, x->g.cluster_size);
		for (uint64_t k = 0; k < per; k++) {
			uint64_t count = qcow2_refcount_get(x->g.refcount_order, block, k), c = i * per + k;

			if (c < x->clusters)
				x->counts[c] = count;
			else
				x->v->leaks += count != 0;
		}
		free(block);
	}
	free(rt);
}

static void walk_l2(struct verify *x, uint64_t table)
{
	uint8_t *l2 = bytes_at(x, table, x->g.cluster_size);

	for (uint32_t i = 0; i < 1u << x->g.l2_bits; i++) {
		struct qcow2_l2e e = qcow2_l2_get(&x->g, l2, i);
		uint64_t off = qcow2_l2_host(e.entry);
		uint32_t len = x->g.cluster_size;

		for (unsigned s = 0; s < x->g.subs; s++)
			if (qcow2_l2_kind(&x->g, e, s, false) == QCOW2_INVALID)
				wrong(x, "L2 entry %016llx %016llx means nothing", (unsigned long long)e.entry, (unsigned long long)e.bitmap);
		if (e.entry & QCOW2_COMPRESSED)
			qcow2_l2_compressed(&x->g, e.entry, &off, &len);
		if (off)
			ref(x, off, len, "guest data");
		if (off && !(e.entry & QCOW2_COMPRESSED) && (off >> x->g.cluster_bits) < x->clusters &&
		    !!(e.entry & QCOW2_COPIED) != (x->counts[off >> x->g.cluster_bits] == 1))
			wrong(x, "the copied flag of the data at %llu is wrong (refcount %llu)", (unsigned long long)off,
			      (unsigned long long)x->counts[off >> x->g.cluster_bits]);
	}
	free(l2);
}

static void walk(struct verify *x)
{
	uint8_t *l1 = bytes_at(x, x->h.l1_off, (uint64_t)x->h.l1_size * 8);

	ref(x, 0, 1, "header");
	if (x->h.l1_size)
		ref(x, x->h.l1_off, (uint64_t)x->h.l1_size * 8, "L1 table");
	for (uint32_t i = 0; i < x->h.l1_size; i++) {
		uint64_t off = get_be64(l1 + (size_t)i * 8) & QCOW2_OFFSET_MASK;

		if (!off)
			continue;
		ref(x, off, x->g.cluster_size, "L2 table");
		if (is_aligned(off, x->g.cluster_size))
			walk_l2(x, off);
		else
			wrong(x, "L2 table %u is not aligned", i);
	}
	free(l1);
}

static bool open_image(struct verify *x)
{
	struct err err = ERR_INIT;
	uint32_t need = 0;
	uint8_t *buf = bytes_at(x, 0, 512);
	int ret;

	if (!qcow2_header_probe(buf, 512, "image", &need, &err)) {
		free(buf);
		buf = bytes_at(x, 0, need);
	}
	ret = need ? qcow2_header_parse(buf, need, "image", 0, &x->h, &err) : -1;
	free(buf);
	if (ret)
		wrong(x, "the header: %.200s", err.msg);
	x->g = x->h.geo;
	return !ret;
}

void qcow2_verify_read(const struct media *m, uint8_t *buf, uint64_t len)
{
	struct qcow2_verdict v = { 0 };
	struct verify x = { .m = m, .v = &v };
	uint8_t entry[16];

	memset(buf, 0, len);
	if (!open_image(&x))
		return;
	for (uint64_t off = 0, n; off < len; off += n) {
		uint64_t table, in = off & (x.g.cluster_size - 1);
		struct qcow2_l2e e;

		n = min(x.g.sub_size - (off & (x.g.sub_size - 1)), len - off);
		media_read(m, x.h.l1_off + qcow2_l1_index(&x.g, off) * 8, entry, 8);
		table = get_be64(entry) & QCOW2_OFFSET_MASK;
		if (!table)
			continue;
		media_read(m, table + (uint64_t)qcow2_l2_index(&x.g, off) * x.g.l2_entry_size, entry, x.g.l2_entry_size);
		e = qcow2_l2_get(&x.g, entry, 0);
		if (qcow2_l2_kind(&x.g, e, in >> x.g.sub_bits, false) == QCOW2_NORMAL)
			media_read(m, qcow2_l2_host(e.entry) + in, buf + off, n);
	}
	qcow2_header_fini(&x.h);
}

void qcow2_verify(const struct media *m, struct qcow2_verdict *v)
{
	struct verify x = { .m = m, .v = v };

	memset(v, 0, sizeof(*v));
	if (!open_image(&x))
		return;
	x.clusters = qcow2_clusters(&x.g, media_size(m));
	x.refs = calloc(x.clusters, sizeof(*x.refs));
	x.counts = calloc(x.clusters, sizeof(*x.counts));
	read_counts(&x);
	walk(&x);
	for (uint64_t c = 0; c < x.clusters; c++) {
		v->used += x.refs[c] != 0;
		if (x.refs[c] > x.counts[c])
			wrong(&x, "cluster %llu is referred to %llu times and has refcount %llu", (unsigned long long)c,
			      (unsigned long long)x.refs[c], (unsigned long long)x.counts[c]);
		/* Without snapshots, and but for compressed data, nothing is used twice. */
		v->leaks += x.refs[c] < x.counts[c];
	}
	free(x.refs);
	free(x.counts);
	qcow2_header_fini(&x.h);
}

void qcow2_keep(const struct media *m)
{
	const char *folder = getenv("WEIR_KEEP_IMAGES");
	static unsigned kept;
	static uint8_t buf[65536];
	char path[4096];
	int fd;

	if (!folder)
		return;
	snprintf(path, sizeof(path), "%s/%06u.qcow2", folder, kept++);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0 && !ftruncate(fd, (off_t)media_size(m)));
	for (uint64_t at = 0, n; at < media_size(m); at += n) {
		bool hole;

		n = media_extent(m, at, min(media_size(m) - at, (uint64_t)sizeof(buf)), &hole);
		if (hole)
			continue;
		media_read(m, at, buf, n);
		CHECK_EQ(pwrite(fd, buf, n, (off_t)at), (ssize_t)n);
	}
	close(fd);
}
