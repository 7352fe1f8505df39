/* SPDX-License-Identifier: MIT */
/* The choke points of blk/disk.h, over a driver that writes down what it is asked. */
#include "blk/disk.h"
#include "rt/buf.h"
#include "test_rt.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/log.h"
#include "util/rng.h"

#define PROBE_LOG 256
#define PROBE_SIZE (4u << 20)

struct call {
	enum disk_op op;
	uint64_t off, len;
	int niov;
	unsigned flags;
};

struct probe {
	struct disk disk;
	char *data;
	struct call call[PROBE_LOG];
	unsigned n;
	int fail[DISK_OPS];	/* what each op returns */
	uint64_t sleep_ns;
};

static struct probe *to_probe(struct disk *d)
{
	return container_of(d, struct probe, disk);
}

/* Notes a call, and checks that it is as clean as the contract says. */
static co_fn int co_note(struct disk *d, enum disk_op op, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	struct probe *p = to_probe(d);
	const struct disk_limits *l = &d->limits;
	bool io = op == DISK_OP_READ || op == DISK_OP_WRITE;

	CHECK(p->n < PROBE_LOG);
	p->call[p->n++] = (struct call){ op, off, len, niov, flags };
	if (op != DISK_OP_FLUSH) {
		CHECK(len > 0 && is_aligned(off | len, l->align));
		CHECK(off + len <= align_up(d->size, l->align));
		CHECK(!(flags & DISK_FUA) || l->fua);
	}
	if (io) {
		CHECK_EQ(iov_len(iov, niov), len);
		CHECK(niov <= DISK_MAX_IOV);
		CHECK(!l->max_io || len <= l->max_io);
		for (int i = 0; i < niov && l->mem_align > 1; i++)
			CHECK(is_aligned((uintptr_t)iov[i].iov_base, l->mem_align) && is_aligned(iov[i].iov_len, l->align));
	}
	if (op == DISK_OP_ZERO || op == DISK_OP_DISCARD)
		CHECK(!l->max_zero || len <= l->max_zero);
	if (p->sleep_ns)
		co_sleep_ns(p->sleep_ns);
	return p->fail[op];
}

static co_fn int probe_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	int ret = co_note(d, DISK_OP_READ, off, len, iov, niov, flags);

	iov_copy_in(iov, niov, 0, to_probe(d)->data + off, len);
	return ret;
}

static co_fn int probe_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	int ret = co_note(d, DISK_OP_WRITE, off, len, iov, niov, flags);

	if (!ret)
		iov_copy_out(iov, niov, 0, to_probe(d)->data + off, len);
	return ret;
}

static co_fn int probe_co_flush(struct disk *d)
{
	return co_note(d, DISK_OP_FLUSH, 0, 0, NULL, 0, 0);
}

static co_fn int probe_co_discard(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	int ret = co_note(d, DISK_OP_DISCARD, off, len, NULL, 0, flags);

	if (!ret)
		memset(to_probe(d)->data + off, 0, len);
	return ret;
}

static co_fn int probe_co_zero(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	int ret = co_note(d, DISK_OP_ZERO, off, len, NULL, 0, flags);

	if (!ret)
		memset(to_probe(d)->data + off, 0, len);
	return ret;
}

static co_fn void probe_co_close(struct disk *d)
{
	free(to_probe(d)->data);
	disk_fini(d);
	free(to_probe(d));
}

static const struct disk_ops probe_ops = {
	.driver = "probe",
	.co_read = probe_co_read,
	.co_write = probe_co_write,
	.co_flush = probe_co_flush,
	.co_discard = probe_co_discard,
	.co_zero = probe_co_zero,
	.co_close = probe_co_close,
};

static const struct disk_ops bare_ops = {
	.driver = "bare",
	.co_read = probe_co_read,
	.co_write = probe_co_write,
	.co_close = probe_co_close,
};

static struct probe *open_probe(const struct disk_ops *ops, uint32_t align)
{
	struct probe *p = calloc(1, sizeof(*p));

	CHECK(p);
	CHECK_EQ(disk_init(&p->disk, ops, "probe", NULL), 0);
	p->data = calloc(1, PROBE_SIZE + 65536);
	p->disk.size = PROBE_SIZE;
	p->disk.limits.align = align;
	p->disk.limits.mem_align = align;
	p->disk.limits.fua = true;
	p->disk.limits.volatile_cache = true;
	p->disk.limits.discard_gran = align;
	p->disk.limits.fast_zero = true;
	return p;
}

static unsigned count(const struct probe *p, enum disk_op op)
{
	unsigned n = 0;

	for (unsigned i = 0; i < p->n; i++)
		n += p->call[i].op == op;
	return n;
}

static char page[1 << 20] __attribute__((aligned(4096)));

/* --- Reads and writes --- */

static co_fn void co_aligned_requests_are_one_op(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 4096);
	struct disk *d = &p->disk;

	CHECK_EQ(co_disk_write(d, 8192, page, 65536, DISK_BACKGROUND), 0);
	CHECK_EQ(co_disk_read(d, 4096, page, sizeof(page), 0), 0);
	CHECK_EQ(p->n, 2);
	CHECK_EQ(p->call[0].len, 65536);
	CHECK_EQ(p->call[0].flags, DISK_BACKGROUND);
	CHECK_EQ(d->count.bounced, 0);
	CHECK_EQ(d->count.rmw, 0);
	CHECK_EQ(d->rmw_lock.n, 0);
	CHECK(list_empty(&d->writes));
	CHECK_EQ(d->count.bytes[DISK_OP_READ], sizeof(page));
	co_disk_close(d);
}

static co_fn void co_an_unaligned_write_reads_its_edges_and_writes_once(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 4096);
	struct disk *d = &p->disk;

	memset(p->data, 'o', PROBE_SIZE);
	memset(page, 'n', 20000);
	CHECK_EQ(co_disk_write(d, 4000, page, 20000, 0), 0);
	CHECK_EQ(p->n, 3);
	CHECK_EQ(p->call[0].op, DISK_OP_READ);
	CHECK_EQ(p->call[1].op, DISK_OP_READ);
	CHECK_EQ(p->call[2].op, DISK_OP_WRITE);
	CHECK_EQ(p->call[2].off, 0);
	CHECK_EQ(p->call[2].len, 24576);
	CHECK_EQ(p->data[3999], 'o');
	CHECK_EQ(p->data[4000], 'n');
	CHECK_EQ(p->data[23999], 'n');
	CHECK_EQ(p->data[24000], 'o');
	CHECK_EQ(d->count.rmw, 1);
	CHECK_EQ(d->rmw_active, 0);
	co_disk_close(d);
}

/* Promise of the header: the last unit may be partial. */
static co_fn void co_a_write_up_to_an_odd_size_needs_no_read(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 4096);
	struct disk *d = &p->disk;

	d->size = 10000;
	memset(p->data, 'o', 12288);
	memset(page, 'n', 4096);
	CHECK_EQ(co_disk_write(d, 8192, page, 1808, 0), 0);
	CHECK_EQ(p->n, 1);
	CHECK_EQ(p->call[0].len, 4096);
	CHECK_EQ(p->data[9999], 'n');
	CHECK_EQ(p->data[10000], 0);
	CHECK_EQ(co_disk_write(d, 9999, page, 1, 0), 0);
	CHECK_EQ(count(p, DISK_OP_READ), 1);
	co_disk_close(d);
}

static co_fn void co_memory_that_ops_cannot_take_is_bounced(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;
	struct iovec iov[] = { { page, 512 }, { page + 1000, 300 }, { page + 2048, 724 }, { page + 4096, 8192 } };

	rng_fill(&(struct rng){ { 1, 2, 3, 4 } }, page, 65536);
	CHECK_EQ(co_disk_write(d, 0, page + 8, 4096, 0), 0);
	CHECK_EQ(d->count.bounced, 1);
	CHECK_EQ(d->count.rmw, 0);
	CHECK(!memcmp(p->data, page + 8, 4096));
	CHECK_EQ(co_disk_writev(d, 8192, iov, 4, 0), 0);
	CHECK(!memcmp(p->data + 8192 + 512, page + 1000, 300));
	CHECK(!memcmp(p->data + 8192 + 1536, page + 4096, 8192));
	CHECK_EQ(co_disk_read(d, 8192, page + 65536 + 3, 8192, 0), 0);
	CHECK(!memcmp(p->data + 8192, page + 65536 + 3, 8192));
	co_disk_close(d);
}

static co_fn void co_requests_are_split_at_max_io(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;

	d->limits.max_io = 10000;
	CHECK_EQ(co_disk_write(d, 0, page, 65536, 0), 0);
	CHECK_EQ(p->n, 7);
	CHECK_EQ(p->call[0].len, 9728);
	CHECK_EQ(p->call[6].off + p->call[6].len, 65536);
	co_disk_close(d);
}

/* One flush at the end costs less than a barrier with each piece, and promises as much. */
static co_fn void co_a_split_write_with_fua_ends_with_one_flush(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;

	CHECK_EQ(co_disk_write(d, 0, page, 8192, DISK_FUA), 0);
	CHECK_EQ(p->n, 1);
	CHECK_EQ(p->call[0].flags, DISK_FUA);
	d->limits.max_io = 4096;
	p->n = 0;
	CHECK_EQ(co_disk_write(d, 0, page, 8192, DISK_FUA), 0);
	CHECK_EQ(p->n, 3);
	CHECK_EQ(p->call[2].op, DISK_OP_FLUSH);
	co_disk_close(d);
}

static co_fn void co_fua_that_ops_lack_becomes_a_flush_behind(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;

	d->limits.fua = false;
	CHECK_EQ(co_disk_write(d, 0, page, 512, DISK_FUA), 0);
	CHECK_EQ(co_disk_zero(d, 0, 512, DISK_FUA), 0);
	CHECK_EQ(co_disk_discard(d, 0, 512, DISK_FUA), 0);
	CHECK_EQ(p->n, 6);
	for (unsigned i = 0; i < 6; i++)
		CHECK_EQ(p->call[i].op == DISK_OP_FLUSH, i % 2);
	d->limits.volatile_cache = false;
	CHECK_EQ(co_disk_write(d, 0, page, 512, DISK_FUA), 0);
	CHECK_EQ(p->n, 7);
	co_disk_close(d);
}

/* --- Failures --- */

static co_fn void co_a_failed_flush_is_never_followed_by_a_success(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;

	p->fail[DISK_OP_FLUSH] = -ENOSPC;
	CHECK_EQ(co_disk_flush(d), -EIO);
	p->fail[DISK_OP_FLUSH] = 0;
	p->n = 0;
	CHECK_EQ(co_disk_flush(d), -EIO);
	CHECK_EQ(co_disk_write(d, 0, page, 512, 0), -EIO);
	CHECK_EQ(co_disk_write(d, 0, page, 512, DISK_FUA), -EIO);
	CHECK_EQ(co_disk_zero(d, 0, 512, 0), -EIO);
	CHECK_EQ(co_disk_discard(d, 0, 512, 0), -EIO);
	CHECK_EQ(p->n, 0);
	CHECK_EQ(co_disk_read(d, 0, page, 512, 0), 0);
	CHECK_EQ(d->failed, -ENOSPC);
	co_disk_close(d);
}

static co_fn void co_a_failed_fua_write_fails_the_disk_but_a_plain_one_does_not(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;

	p->fail[DISK_OP_WRITE] = -EIO;
	CHECK_EQ(co_disk_write(d, 0, page, 512, 0), -EIO);
	CHECK_EQ(co_disk_flush(d), 0);
	p->fail[DISK_OP_WRITE] = -ENOSPC;
	CHECK_EQ(co_disk_write(d, 0, page, 512, DISK_FUA), -ENOSPC);
	CHECK_EQ(co_disk_flush(d), 0);
	p->fail[DISK_OP_WRITE] = -EIO;
	CHECK_EQ(co_disk_write(d, 0, page, 512, DISK_FUA), -EIO);
	CHECK_EQ(co_disk_flush(d), -EIO);
	co_disk_close(d);

	p = open_probe(&probe_ops, 512);
	p->fail[DISK_OP_ZERO] = -EIO;
	CHECK_EQ(co_disk_zero(&p->disk, 0, 512, DISK_FUA), -EIO);
	CHECK_EQ(co_disk_flush(&p->disk), -EIO);
	co_disk_close(&p->disk);
}

static co_fn int co_flush_job(void *arg)
{
	return co_disk_flush(arg);
}

/* The kernel tells an error of write-back only once: the other flush may not claim success after it. */
static co_fn void co_a_flush_in_flight_beside_a_failing_one_fails_too(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct co_group g;

	p->sleep_ns = 1000;
	co_group_init(&g);
	co_group_start(&g, "flush", co_flush_job, &p->disk);
	co_sleep_ns(500);
	disk_fail(&p->disk, -EIO, "another flush");
	CHECK_EQ(co_group_wait(&g), -EIO);
	co_disk_close(&p->disk);
}

static co_fn void co_an_unsupported_flush_is_a_success(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);

	p->fail[DISK_OP_FLUSH] = -EOPNOTSUPP;
	CHECK_EQ(co_disk_flush(&p->disk), 0);
	CHECK_EQ(co_disk_flush(&p->disk), 0);
	co_disk_close(&p->disk);
}

static co_fn void co_a_disk_that_is_gone_stays_eshutdown(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);

	p->fail[DISK_OP_FLUSH] = -ESHUTDOWN;
	CHECK_EQ(co_disk_flush(&p->disk), -ESHUTDOWN);
	p->fail[DISK_OP_FLUSH] = 0;
	CHECK_EQ(co_disk_flush(&p->disk), -ESHUTDOWN);
	CHECK_EQ(co_disk_write(&p->disk, 0, page, 512, 0), -ESHUTDOWN);
	co_disk_close(&p->disk);
}

static co_fn void co_a_read_only_disk_changes_nothing(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	struct disk *d = &p->disk;

	d->read_only = true;
	CHECK_EQ(co_disk_write(d, 0, page, 512, 0), -EROFS);
	CHECK_EQ(co_disk_zero(d, 0, 512, 0), -EROFS);
	CHECK_EQ(co_disk_discard(d, 0, 512, 0), -EROFS);
	CHECK_EQ(co_disk_resize(d, 512, NULL), -EROFS);
	CHECK_EQ(co_disk_mark_set(d, "m", NULL), -EROFS);
	CHECK_EQ(p->n, 0);
	CHECK_EQ(co_disk_read(d, 0, page, 512, 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	CHECK_EQ(d->count.errors[DISK_OP_WRITE], 1);
	co_disk_close(d);
}

static co_fn void co_a_failed_piece_ends_the_request(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);

	p->disk.limits.max_io = 512;
	p->fail[DISK_OP_WRITE] = -ENOSPC;
	CHECK_EQ(co_disk_write(&p->disk, 0, page, 4096, 0), -ENOSPC);
	CHECK_EQ(p->n, 1);
	p->fail[DISK_OP_READ] = -EIO;
	CHECK_EQ(co_disk_write(&p->disk, 1, page, 4096, 0), -EIO);
	CHECK_EQ(count(p, DISK_OP_WRITE), 1);
	CHECK_EQ(p->disk.rmw_active, 0);
	CHECK(!p->disk.failed);
	co_disk_close(&p->disk);
}

/* --- Zeroes and discards --- */

static co_fn void co_write_zeroes_without_an_op_writes_zeroes(void *arg)
{
	struct probe *p = open_probe(&bare_ops, 512);

	memset(p->data, 'o', PROBE_SIZE);
	CHECK_EQ(co_disk_zero(&p->disk, 100, 3000000, DISK_UNMAP), 0);
	CHECK_EQ(p->data[99], 'o');
	CHECK(bytes_are_zero(p->data + 100, 3000000));
	CHECK_EQ(p->data[3000100], 'o');
	p->n = 0;
	p->disk.limits.fast_zero = false;
	CHECK_EQ(co_disk_zero(&p->disk, 0, 1, DISK_FAST), -EOPNOTSUPP);
	CHECK_EQ(p->n, 0);
	co_disk_close(&p->disk);
}

static co_fn void co_an_unsupported_write_zeroes_falls_back_unless_it_must_be_fast(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);

	memset(p->data, 'o', PROBE_SIZE);
	p->fail[DISK_OP_ZERO] = -EOPNOTSUPP;
	CHECK_EQ(co_disk_zero(&p->disk, 700, 8192, DISK_FAST), -EOPNOTSUPP);
	CHECK_EQ(count(p, DISK_OP_WRITE), 0);
	CHECK_EQ(co_disk_zero(&p->disk, 700, 8192, 0), 0);
	CHECK(bytes_are_zero(p->data + 700, 8192));
	CHECK_EQ(p->data[699], 'o');
	CHECK_EQ(p->data[8892], 'o');
	co_disk_close(&p->disk);
}

static co_fn void co_zeroes_and_discards_are_split_at_max_zero(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);

	p->disk.limits.max_zero = 1 << 20;
	CHECK_EQ(co_disk_zero(&p->disk, 0, 3 << 20, 0), 0);
	CHECK_EQ(co_disk_discard(&p->disk, 0, PROBE_SIZE, 0), 0);
	CHECK_EQ(p->n, 7);
	co_disk_close(&p->disk);
}

static co_fn void co_a_discard_spares_what_it_does_not_cover_whole(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 4096);
	struct disk *d = &p->disk;

	memset(p->data, 'o', PROBE_SIZE);
	CHECK_EQ(co_disk_discard(d, 100, 8192, 0), 0);
	CHECK_EQ(p->n, 1);
	CHECK_EQ(p->call[0].off, 4096);
	CHECK_EQ(p->call[0].len, 4096);
	CHECK_EQ(p->data[100], 'o');
	CHECK_EQ(co_disk_discard(d, 100, 3000, 0), 0);
	CHECK_EQ(p->n, 1);
	/* But where zeroes are promised, the edges are zeroes too. */
	d->limits.discard_zeroes = true;
	CHECK_EQ(co_disk_discard(d, 100, 8192, 0), 0);
	CHECK_EQ(p->data[99], 'o');
	CHECK(bytes_are_zero(p->data + 100, 8192));
	CHECK_EQ(p->data[8292], 'o');
	d->limits.discard_gran = 0;
	p->n = 0;
	CHECK_EQ(co_disk_discard(d, 16384, 8192, DISK_FUA), 0);
	CHECK_EQ(p->n, 0);
	p->fail[DISK_OP_DISCARD] = -EOPNOTSUPP;
	d->limits.discard_gran = 4096;
	d->limits.discard_zeroes = false;
	CHECK_EQ(co_disk_discard(d, 16384, 8192, 0), 0);
	co_disk_close(d);
}

/* --- Layers --- */

static const struct disk_ops shell_ops = { .driver = "shell" };

static co_fn void co_what_a_layer_lacks_goes_to_the_one_below(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 4096);
	struct disk *shell = calloc(1, sizeof(*shell));
	struct disk_extent e;

	p->disk.size = 100001;
	CHECK_EQ(disk_init(shell, &shell_ops, "shell", &p->disk), 0);
	CHECK_EQ(shell->size, 100001);
	CHECK_EQ(shell->limits.align, 4096);
	CHECK_EQ(co_disk_write(shell, 1, page, 100000, DISK_FUA), 0);
	CHECK_EQ(co_disk_read(shell, 99999, page, 2, 0), 0);
	CHECK_EQ(co_disk_zero(shell, 0, 4096, DISK_FAST), 0);
	CHECK_EQ(co_disk_discard(shell, 0, 4096, 0), 0);
	CHECK_EQ(co_disk_extent(shell, 5, 10, &e), 0);
	CHECK_EQ(e.len, 10);
	CHECK(!e.zero && !e.hole);
	CHECK_EQ(co_disk_flush(shell), 0);
	CHECK_EQ(co_disk_resize(shell, 5, NULL), -ENOTSUP);
	CHECK_EQ(p->disk.count.ops[DISK_OP_WRITE], 1);
	CHECK_EQ(p->disk.count.rmw, 1);
	CHECK_EQ(shell->count.rmw, 0);
	p->fail[DISK_OP_FLUSH] = -EIO;
	CHECK_EQ(co_disk_flush(shell), -EIO);
	p->fail[DISK_OP_FLUSH] = 0;
	CHECK_EQ(co_disk_flush(shell), -EIO);
	co_disk_close(shell);
}

static int count_or_fail(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	unsigned *left = arg;

	return (*left)-- ? 0 : -ETIMEDOUT;
}

static co_fn void co_the_hook_sees_each_op_and_can_fail_it(void *arg)
{
	struct probe *p = open_probe(&probe_ops, 512);
	unsigned left = 3;

	p->disk.trace = count_or_fail;
	p->disk.trace_arg = &left;
	CHECK_EQ(co_disk_write(&p->disk, 100, page, 300, 0), 0);
	CHECK_EQ(left, 1);
	CHECK_EQ(co_disk_zero(&p->disk, 0, 512, 0), 0);
	CHECK_EQ(co_disk_read(&p->disk, 0, page, 512, 0), -ETIMEDOUT);
	CHECK_EQ(p->n, 3);
	co_disk_close(&p->disk);
}

/* --- Read-modify-write --- */

struct rmw_job {
	struct disk *d;
	uint64_t off, len, start_ns;
	uint64_t done_ns;
	enum disk_op op;
};

static co_fn int co_rmw_job(void *arg)
{
	struct rmw_job *j = arg;
	int ret;

	co_sleep_ns(j->start_ns);
	ret = j->op == DISK_OP_WRITE ? co_disk_write(j->d, j->off, page, j->len, 0) :
	      j->op == DISK_OP_ZERO ? co_disk_zero(j->d, j->off, j->len, 0) : co_disk_read(j->d, j->off, page + 65536, j->len, 0);
	j->done_ns = rt_now_ns();
	return ret;
}

/* Every op takes 1 ms; the read-modify-write of the first job 2 ms (read, write). */
static co_fn void co_run_rmw_jobs(struct rmw_job *jobs, unsigned n, uint64_t *ret_ms)
{
	struct probe *p = open_probe(&probe_ops, 4096);
	uint64_t start = rt_now_ns();
	struct co_group g;

	p->sleep_ns = 1000000;
	co_group_init(&g);
	for (unsigned i = 0; i < n; i++) {
		jobs[i].d = &p->disk;
		co_group_start(&g, "job", co_rmw_job, &jobs[i]);
	}
	CHECK_EQ(co_group_wait(&g), 0);
	for (unsigned i = 0; i < n; i++)
		ret_ms[i] = (jobs[i].done_ns - start + 500000) / 1000000;
	CHECK_EQ(p->disk.rmw_active, 0);
	CHECK(list_empty(&p->disk.writes));
	co_disk_close(&p->disk);
}

static co_fn void co_only_writers_of_the_same_unit_wait_for_each_other(void *arg)
{
	struct rmw_job jobs[] = {
		{ .op = DISK_OP_WRITE, .off = 4096, .len = 100 },
		{ .op = DISK_OP_WRITE, .off = 8000, .len = 100, .start_ns = 1000 },	/* same unit, partial */
		{ .op = DISK_OP_WRITE, .off = 0, .len = 16384, .start_ns = 2000 },	/* covers it whole */
		{ .op = DISK_OP_ZERO, .off = 4096, .len = 4096, .start_ns = 3000 },	/* zeroes it */
		{ .op = DISK_OP_WRITE, .off = 8192, .len = 4096, .start_ns = 4000 },	/* a neighbour, aligned */
		{ .op = DISK_OP_WRITE, .off = 40960, .len = 10, .start_ns = 5000 },	/* another unit, partial */
		{ .op = DISK_OP_READ, .off = 4096, .len = 100, .start_ns = 6000 },	/* readers never wait */
	};
	const uint64_t want_ms[] = { 2, 4, 5, 5, 1, 2, 1 };
	uint64_t ms[ARRAY_SIZE(jobs)];

	co_run_rmw_jobs(jobs, ARRAY_SIZE(jobs), ms);
	for (unsigned i = 0; i < ARRAY_SIZE(jobs); i++)
		if (ms[i] != want_ms[i])
			test_fail("job %u took %" PRIu64 " ms, wanted %" PRIu64, i, ms[i], want_ms[i]);
}

/* The aligned one was there first, without a lock: the partial one must still see what it wrote. */
static co_fn void co_a_partial_write_waits_for_an_earlier_aligned_one(void *arg)
{
	struct rmw_job jobs[] = {
		{ .op = DISK_OP_WRITE, .off = 0, .len = 8192 },
		{ .op = DISK_OP_WRITE, .off = 4196, .len = 100, .start_ns = 1000 },
		{ .op = DISK_OP_WRITE, .off = 12388, .len = 100, .start_ns = 2000 },
	};
	uint64_t ms[ARRAY_SIZE(jobs)];

	co_run_rmw_jobs(jobs, ARRAY_SIZE(jobs), ms);
	CHECK_EQ(ms[0], 1);
	CHECK_EQ(ms[1], 3);
	CHECK_EQ(ms[2], 2);
}

static void run(const char *name, co_entry *fn)
{
	struct rt *rt = make_sim(1);
	struct rt_bufpool *bufs;

	printf("%s\n", &name[3]);
	fflush(stdout);
	CHECK_EQ(rt_bufpool_create(rt, RT_BUF_MAX, &bufs, NULL), 0);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, fn, NULL), 0);
	CHECK_EQ(rt_bufpool_used(bufs), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
}

#define RUN_CO(fn) run(#fn, fn)

int main(void)
{
	log_set_level(LOG_NONE);
	RUN_CO(co_aligned_requests_are_one_op);
	RUN_CO(co_an_unaligned_write_reads_its_edges_and_writes_once);
	RUN_CO(co_a_write_up_to_an_odd_size_needs_no_read);
	RUN_CO(co_memory_that_ops_cannot_take_is_bounced);
	RUN_CO(co_requests_are_split_at_max_io);
	RUN_CO(co_a_split_write_with_fua_ends_with_one_flush);
	RUN_CO(co_fua_that_ops_lack_becomes_a_flush_behind);
	RUN_CO(co_a_failed_flush_is_never_followed_by_a_success);
	RUN_CO(co_a_failed_fua_write_fails_the_disk_but_a_plain_one_does_not);
	RUN_CO(co_a_flush_in_flight_beside_a_failing_one_fails_too);
	RUN_CO(co_an_unsupported_flush_is_a_success);
	RUN_CO(co_a_disk_that_is_gone_stays_eshutdown);
	RUN_CO(co_a_read_only_disk_changes_nothing);
	RUN_CO(co_a_failed_piece_ends_the_request);
	RUN_CO(co_write_zeroes_without_an_op_writes_zeroes);
	RUN_CO(co_an_unsupported_write_zeroes_falls_back_unless_it_must_be_fast);
	RUN_CO(co_zeroes_and_discards_are_split_at_max_zero);
	RUN_CO(co_a_discard_spares_what_it_does_not_cover_whole);
	RUN_CO(co_what_a_layer_lacks_goes_to_the_one_below);
	RUN_CO(co_the_hook_sees_each_op_and_can_fail_it);
	RUN_CO(co_only_writers_of_the_same_unit_wait_for_each_other);
	RUN_CO(co_a_partial_write_waits_for_an_earlier_aligned_one);
	return 0;
}
