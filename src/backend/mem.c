/* SPDX-License-Identifier: MIT */
/*
 * mem:SIZE — a disk in memory, for trials and tests.
 *
 * One mapping of the whole size whose pages the kernel gives when they are first written; a bitmap tells which chunks of 64 KiB
 * were written, so that reads of the others touch nothing and extents are known. Discards and write-zeroes with
 * DISK_UNMAP give whole chunks back. A change of size maps anew.
 *
 * Suspends in nothing but background writes, which let others run between two chunks: the first touch of a page can be slow.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/drivers.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/iov.h"
#include "util/size.h"

#define CHUNK 65536u
#define MEM_MAX (1ull << 44)

struct mem {
	struct disk disk;
	char *data;
	uint64_t mapped;	/* the size rounded up to a chunk */
	uint64_t *written;	/* a bit per chunk */
	uint64_t n_written;
	char *mark;
};

static bool chunk_is_written(const struct mem *m, uint64_t chunk)
{
	return m->written[chunk / 64] >> (chunk % 64) & 1;
}

static void chunk_set(struct mem *m, uint64_t chunk, bool written)
{
	uint64_t bit = 1ull << (chunk % 64);

	if (chunk_is_written(m, chunk) == written)
		return;
	m->written[chunk / 64] ^= bit;
	m->n_written += written ? 1 : -1;
}

static void *map(uint64_t len)
{
	void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static uint64_t bitmap_bytes(uint64_t mapped)
{
	return align_up(mapped / CHUNK / 8 + 8, 4096);
}

static int mem_map(struct mem *m, uint64_t size)
{
	uint64_t mapped = max(align_up(size, CHUNK), (uint64_t)CHUNK);

	m->data = map(mapped);
	m->written = m->data ? map(bitmap_bytes(mapped)) : NULL;
	if (!m->written) {
		if (m->data)
			munmap(m->data, mapped);
		m->data = NULL;
		return -ENOMEM;
	}
	m->mapped = mapped;
	m->n_written = 0;
	return 0;
}

static void mem_unmap(struct mem *m)
{
	if (!m->data)
		return;
	munmap(m->data, m->mapped);
	munmap(m->written, bitmap_bytes(m->mapped));
}

/* The length of the run of chunks from `off` on that are all written, or all not. */
static uint64_t run_len(const struct mem *m, uint64_t off, uint64_t len, bool *ret_written)
{
	uint64_t chunk = off / CHUNK, last = (off + len - 1) / CHUNK;
	bool written = chunk_is_written(m, chunk);

	while (chunk < last && chunk_is_written(m, chunk + 1) == written)
		chunk++;
	*ret_written = written;
	return min((chunk + 1) * CHUNK - off, len);
}

static co_fn int mem_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct mem *m = container_of(d, struct mem, disk);
	uint64_t run;
	bool written;

	for (uint64_t done = 0; done < len; done += run) {
		run = run_len(m, off + done, len - done, &written);
		if (written)
			iov_copy_in(iov, niov, done, m->data + off + done, run);
		else
			iov_set(iov, niov, done, 0, run);
	}
	return 0;
}

static co_fn int mem_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct mem *m = container_of(d, struct mem, disk);

	uint64_t step = flags & DISK_BACKGROUND ? CHUNK : len;

	for (uint64_t chunk = off / CHUNK; chunk <= (off + len - 1) / CHUNK; chunk++)
		chunk_set(m, chunk, true);
	for (uint64_t done = 0; done < len; done += step) {
		if (done)
			co_yield();
		iov_copy_out(iov, niov, done, m->data + off + done, min(step, len - done));
	}
	/* Growing shows what lies beyond the size: it must be zero. */
	if (off + len > d->size)
		memset(m->data + d->size, 0, off + len - d->size);
	return 0;
}

static void clear(struct mem *m, uint64_t off, uint64_t len, bool unmap)
{
	uint64_t run;
	bool written;

	for (uint64_t end = off + len; off < end; off += run) {
		run = run_len(m, off, end - off, &written);
		if (!written)
			continue;
		if (!unmap || !is_aligned(off, CHUNK) || run < CHUNK) {
			run = min(run, CHUNK - off % CHUNK);
			memset(m->data + off, 0, run);
			continue;
		}
		run = align_down(run, CHUNK);
		madvise(m->data + off, run, MADV_DONTNEED);
		for (uint64_t chunk = off / CHUNK; chunk < (off + run) / CHUNK; chunk++)
			chunk_set(m, chunk, false);
	}
}

/* A last chunk that the size cuts may be freed as a whole. */
static uint64_t widen(const struct disk *d, uint64_t off, uint64_t len)
{
	return off + len >= d->size ? align_up(off + len, CHUNK) - off : len;
}

static co_fn int mem_co_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	clear(container_of(d, struct mem, disk), off, widen(d, off, len), true);
	return 0;
}

static co_fn int mem_co_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	struct mem *m = container_of(d, struct mem, disk);

	if (flags & DISK_UNMAP) {
		clear(m, off, widen(d, off, len), true);
		return 0;
	}
	/* Stays, or becomes, allocated; only what was written needs clearing. */
	clear(m, off, len, false);
	for (uint64_t chunk = off / CHUNK; chunk <= (off + len - 1) / CHUNK; chunk++)
		chunk_set(m, chunk, true);
	return 0;
}

static co_fn int mem_co_flush(struct disk *d)
{
	return 0;
}

static co_fn int mem_co_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	bool written;

	ret->len = run_len(container_of(d, struct mem, disk), off, len, &written);
	ret->hole = ret->zero = !written;
	return 0;
}

static co_fn int mem_co_resize(struct disk *d, uint64_t size)
{
	struct mem *m = container_of(d, struct mem, disk), old = *m;
	uint64_t keep = min(size, d->size), run;
	bool written;
	int ret;

	if (size > MEM_MAX)
		return -EFBIG;
	if (size < d->size)
		clear(m, size, m->mapped - size, true);
	if (max(align_up(size, CHUNK), (uint64_t)CHUNK) == m->mapped)
		return 0;
	ret = mem_map(m, size);
	if (ret) {
		m->data = old.data;
		m->written = old.written;
		return ret;
	}
	for (uint64_t off = 0; off < keep; off += run) {
		run = run_len(&old, off, keep - off, &written);
		if (!written)
			continue;
		memcpy(m->data + off, old.data + off, run);
		for (uint64_t chunk = off / CHUNK; chunk <= (off + run - 1) / CHUNK; chunk++)
			chunk_set(m, chunk, true);
	}
	mem_unmap(&old);
	return 0;
}

static co_fn int mem_co_mark_get(struct disk *d, char *buf, size_t size)
{
	const char *mark = container_of(d, struct mem, disk)->mark ?: "";

	if (strlen(mark) >= size)
		return -ENOSPC;
	strcpy(buf, mark);
	return 0;
}

static co_fn int mem_co_mark_set(struct disk *d, const char *mark, struct err *err)
{
	struct mem *m = container_of(d, struct mem, disk);
	char *copy = strdup(mark);

	if (!copy)
		return err_errno(err, -ENOMEM, "%s: mark", d->name);
	free(m->mark);
	m->mark = copy;
	return 0;
}

static co_fn void mem_co_close(struct disk *d)
{
	struct mem *m = container_of(d, struct mem, disk);

	mem_unmap(m);
	free(m->mark);
	disk_fini(d);
	free(m);
}

static const struct disk_ops mem_ops = {
	.driver = "mem",
	.co_read = mem_co_read,
	.co_write = mem_co_write,
	.co_flush = mem_co_flush,
	.co_discard = mem_co_discard,
	.co_zero = mem_co_zero,
	.co_extent = mem_co_extent,
	.co_resize = mem_co_resize,
	.co_mark_get = mem_co_mark_get,
	.co_mark_set = mem_co_mark_set,
	.co_close = mem_co_close,
};

static int parse_size(struct disk_spec *spec, uint64_t *ret, struct err *err)
{
	int r = size_parse(spec->rest, ret);

	if (r)
		return err_set(err, -EINVAL, "%.200s: \"%.40s\" is not a size; write mem:1G", spec->text, spec->rest);
	if (*ret > MEM_MAX)
		return err_set(err, -EINVAL, "%.200s: at most 16T fit into a disk in memory", spec->text);
	return 0;
}

static co_fn int mem_co_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	uint64_t size, align = 1;
	struct mem *m;
	int r = parse_size(spec, &size, err);

	if (!r)
		r = opts_size(&spec->opts, "align", &align, err);
	if (!r && (!is_pow2(align) || align > 65536))
		r = err_set(err, -EINVAL, "%.200s: align must be a power of two up to 64K, as in align=4096", spec->text);
	if (r)
		return r;
	m = calloc(1, sizeof(*m));
	if (!m)
		return err_errno(err, -ENOMEM, "%.200s", spec->text);
	r = mem_map(m, size);
	if (r) {
		free(m);
		return err_errno(err, r, "%.200s: cannot map %.40s of address space", spec->text, spec->rest);
	}
	r = disk_init(&m->disk, &mem_ops, spec->text, NULL);
	if (r) {
		mem_unmap(m);
		free(m);
		return err_errno(err, r, "%.200s", spec->text);
	}
	m->disk.size = size;
	m->disk.read_only = !(flags & DISK_OPEN_RDWR);
	m->disk.limits = (struct disk_limits){
		.align = align, .mem_align = min(align, (uint64_t)4096), .atomic_unit = max(align, (uint64_t)512),
		.discard_gran = CHUNK, .discard_zeroes = true, .fast_zero = true, .fua = true, .multi_conn = true,
	};
	*ret = &m->disk;
	return 0;
}

const struct disk_driver mem_driver = {
	.name = "mem",
	.options = "align",
	.co_open = mem_co_open,
};
