/* SPDX-License-Identifier: MIT */
/* What blk/disk.h promises, checked on any disk. */
#include "lib/disk_conformance.h"

#include <errno.h>

#include "lib/test.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/iov.h"
#include "util/rng.h"

struct conform {
	struct disk *d;
	unsigned flags, rounds;
	struct rng rng;
	char *model, *buf, *got; /* of the disk's size and a page more; got is what a check reads into, kept since fresh memory is slow */
	uint64_t max_len;
};

static void *must_alloc(uint64_t len)
{
	void *p = NULL;

	CHECK_EQ(posix_memalign(&p, 4096, len + 4096), 0);
	return p;
}

/* --- Helpers: an operation on the disk and on the model --- */

static void pick_range(struct conform *c, uint64_t max_len, uint64_t *off, uint64_t *len)
{
	static const uint64_t units[] = { 1, 1, 512, 4096, 65536 };
	uint64_t unit = units[rng_below(&c->rng, 5)];

	*len = 1 + rng_below(&c->rng, min(max_len, rng_below(&c->rng, 4) ? 16384 : max_len));
	if (unit > 1)
		*len = max(align_down(*len, unit), min(unit, max_len));
	*off = rng_below(&c->rng, c->d->size - *len + 1);
	if (rng_below(&c->rng, 8) == 0)
		*off = c->d->size - *len;
	else
		*off = align_down(*off, unit);
}

static co_fn void co_check_range(struct conform *c, uint64_t off, uint64_t len)
{
	char *p = c->got;

	memset(p, 0xa5, len + 1);
	CHECK_EQ(co_disk_read(c->d, off, p, len, 0), 0);
	if (!(c->flags & CONFORM_NO_DATA) && memcmp(p, c->model + off, len)) {
		uint64_t i = 0;

		while (p[i] == c->model[off + i])
			i++;
		test_fail("%s: byte %" PRIu64 " (read of %" PRIu64 "+%" PRIu64 ") is 0x%02x, wanted 0x%02x", c->d->name, off + i,
			  off, len, (uint8_t)p[i], (uint8_t)c->model[off + i]);
	}
	CHECK_EQ((uint8_t)p[len], 0xa5);
}

static co_fn void co_check_all(struct conform *c)
{
	for (uint64_t off = 0, n; off < c->d->size; off += n) {
		n = min(c->d->size - off, (uint64_t)1 << 20);
		co_check_range(c, off, n);
	}
}

static co_fn void co_write_random(struct conform *c, uint64_t off, uint64_t len, unsigned flags)
{
	rng_fill(&c->rng, c->model + off, len);
	memcpy(c->buf, c->model + off, len);
	CHECK_EQ(co_disk_write(c->d, off, c->buf, len, flags), 0);
	CHECK(!memcmp(c->buf, c->model + off, len));
}

static co_fn void co_fill(struct conform *c)
{
	for (uint64_t off = 0, n; off < c->d->size; off += n) {
		n = min(c->d->size - off, c->max_len);
		co_write_random(c, off, n, 0);
	}
}

/* --- Checks --- */

static co_fn void co_zero_length_succeeds(struct conform *c)
{
	uint64_t at[] = { 0, 1, c->d->size };

	for (unsigned i = 0; i < ARRAY_SIZE(at); i++) {
		CHECK_EQ(co_disk_read(c->d, at[i], c->buf, 0, 0), 0);
		CHECK_EQ(co_disk_write(c->d, at[i], c->buf, 0, DISK_FUA), 0);
		CHECK_EQ(co_disk_discard(c->d, at[i], 0, 0), 0);
		CHECK_EQ(co_disk_zero(c->d, at[i], 0, 0), 0);
	}
}

static co_fn void co_beyond_the_size_is_einval_and_changes_nothing(struct conform *c)
{
	uint64_t size = c->d->size;
	const uint64_t bad[][2] = { { size, 1 }, { size - 1, 2 }, { size + 4096, 1 }, { UINT64_MAX, 1 }, { UINT64_MAX - 511, 512 },
				    { 0, size + 1 }, { size - 512, UINT64_MAX - 256 }, { 512, UINT64_MAX } };
	struct disk_extent e;

	for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
		CHECK_EQ(co_disk_discard(c->d, bad[i][0], bad[i][1], 0), -EINVAL);
		CHECK_EQ(co_disk_zero(c->d, bad[i][0], bad[i][1], 0), -EINVAL);
		CHECK_EQ(co_disk_extent(c->d, bad[i][0], bad[i][1], &e), -EINVAL);
		if (bad[i][1] > size + 1)
			continue;
		CHECK_EQ(co_disk_read(c->d, bad[i][0], c->buf, bad[i][1], 0), -EINVAL);
		CHECK_EQ(co_disk_write(c->d, bad[i][0], c->buf, bad[i][1], 0), -EINVAL);
	}
	CHECK_EQ(co_disk_extent(c->d, 0, 0, &e), -EINVAL);
	co_check_all(c);
}

static co_fn void co_reads_return_what_was_written(struct conform *c)
{
	uint64_t off, len;

	for (unsigned i = 0; i < c->rounds; i++) {
		pick_range(c, c->max_len, &off, &len);
		co_write_random(c, off, len, rng_below(&c->rng, 8) ? 0 : DISK_FUA);
		if (rng_below(&c->rng, 16) == 0)
			CHECK_EQ(co_disk_flush(c->d), 0);
		pick_range(c, c->max_len, &off, &len);
		co_check_range(c, off, len);
	}
	co_check_all(c);
}

static co_fn void co_the_edges_of_the_size_work(struct conform *c)
{
	static const uint64_t lens[] = { 1, 2, 3, 511, 512, 513, 4095, 4096, 4097, 70001 };

	for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
		co_write_random(c, 0, lens[i], 0);
		co_write_random(c, c->d->size - lens[i], lens[i], 0);
		co_check_range(c, 0, 2 * lens[i]);
		co_check_range(c, c->d->size - 2 * lens[i], 2 * lens[i]);
	}
	co_check_all(c);
}

/* Segments of all shapes: empty ones, single bytes, odd addresses, more than a call of the kernel takes. */
static int cut_into_segments(struct conform *c, char *p, uint64_t len, struct iovec *iov, int max)
{
	uint64_t mean = 1 + rng_below(&c->rng, 2 * len / max + 2);
	int n = 0;

	while (len && n < max - 1) {
		uint64_t l = rng_below(&c->rng, 16) ? min(len, 1 + rng_below(&c->rng, 2 * mean)) : 0;

		if (rng_below(&c->rng, 3) == 0)
			l = min(len, align_up(l, 512));
		iov[n++] = (struct iovec){ p, l };
		p += l;
		len -= l;
	}
	iov[n++] = (struct iovec){ p, len };
	return n;
}

static co_fn void co_segments_may_have_any_shape(struct conform *c)
{
	enum { MAX = 1500 };
	static const int maxima[] = { 2, 3, 17, 64, 65, 200, 1024, MAX };
	struct iovec *iov = must_alloc(MAX * sizeof(*iov));
	uint64_t off, len, shift;

	for (unsigned i = 0; i < c->rounds; i++) {
		int n;

		pick_range(c, min(c->max_len, (uint64_t)300000), &off, &len);
		shift = rng_below(&c->rng, 2) ? 0 : rng_below(&c->rng, 4096);
		rng_fill(&c->rng, c->model + off, len);
		memcpy(c->buf + shift, c->model + off, len);
		n = cut_into_segments(c, c->buf + shift, len, iov, maxima[i % ARRAY_SIZE(maxima)]);
		CHECK_EQ(co_disk_writev(c->d, off, iov, n, 0), 0);
		CHECK(!memcmp(c->buf + shift, c->model + off, len));

		shift = rng_below(&c->rng, 2) ? 0 : rng_below(&c->rng, 4096);
		memset(c->buf, 0x5a, len + shift + 1);
		n = cut_into_segments(c, c->buf + shift, len, iov, maxima[(i + 3) % ARRAY_SIZE(maxima)]);
		CHECK_EQ(co_disk_readv(c->d, off, iov, n, 0), 0);
		if (!(c->flags & CONFORM_NO_DATA))
			CHECK(!memcmp(c->buf + shift, c->model + off, len));
		CHECK_EQ(c->buf[shift + len], 0x5a);
		CHECK(!shift || c->buf[shift - 1] == 0x5a);
	}
	free(iov);
}

static co_fn void co_large_requests_work(struct conform *c)
{
	uint64_t len = min(c->d->size - 1, c->flags & CONFORM_SLOW ? (uint64_t)1 << 20 : (uint64_t)32 << 20);

	for (int odd = 0; odd < 2; odd++) {
		rng_fill(&c->rng, c->model + odd, len);
		CHECK_EQ(co_disk_write(c->d, odd, c->model + odd, len, 0), 0);
		memset(c->buf, 0, len);
		CHECK_EQ(co_disk_read(c->d, odd, c->buf, len, 0), 0);
		if (!(c->flags & CONFORM_NO_DATA))
			CHECK(!memcmp(c->buf, c->model + odd, len));
	}
}

static co_fn void co_write_zeroes_reads_as_zeroes(struct conform *c)
{
	static const unsigned flags[] = { 0, DISK_UNMAP, DISK_FAST, DISK_FAST | DISK_UNMAP, DISK_FUA, DISK_FUA | DISK_UNMAP };
	uint64_t off, len;
	int ret;

	for (unsigned i = 0; i < c->rounds; i++) {
		unsigned f = flags[i % ARRAY_SIZE(flags)];

		pick_range(c, c->max_len, &off, &len);
		ret = co_disk_zero(c->d, off, len, f);
		if (f & DISK_FAST)
			CHECK_EQ(ret, c->d->limits.fast_zero ? 0 : -EOPNOTSUPP);
		else
			CHECK_EQ(ret, 0);
		if (!ret)
			memset(c->model + off, 0, len);
		co_check_range(c, off, len);
		if (rng_below(&c->rng, 2)) {
			pick_range(c, c->max_len, &off, &len);
			co_write_random(c, off, len, 0);
		}
	}
	CHECK_EQ(co_disk_zero(c->d, 0, c->d->size, 0), 0);
	memset(c->model, 0, c->d->size);
	co_check_all(c);
}

/* Zeroes or as before, byte for byte; and certainly zeroes where the disk says so. What is around stays. */
static co_fn void co_discard_gives_zeroes_or_changes_nothing(struct conform *c)
{
	bool certain = c->d->limits.discard_gran && c->d->limits.discard_zeroes;
	uint64_t off, len;

	co_fill(c);
	for (unsigned i = 0; i < c->rounds; i++) {
		pick_range(c, c->max_len, &off, &len);
		CHECK_EQ(co_disk_discard(c->d, off, len, rng_below(&c->rng, 4) ? 0 : DISK_FUA), 0);
		CHECK_EQ(co_disk_read(c->d, off, c->buf, len, 0), 0);
		for (uint64_t k = 0; k < len && !(c->flags & CONFORM_NO_DATA); k++) {
			if (c->buf[k] && (certain || c->buf[k] != c->model[off + k]))
				test_fail("%s: discard of %" PRIu64 "+%" PRIu64 ": byte %" PRIu64 " is 0x%02x, was 0x%02x", c->d->name, off, len,
					  off + k, (uint8_t)c->buf[k], (uint8_t)c->model[off + k]);
			c->model[off + k] = c->buf[k];
		}
		if (rng_below(&c->rng, 2)) {
			pick_range(c, c->max_len, &off, &len);
			co_write_random(c, off, len, 0);
		}
	}
	co_check_all(c);
}

static co_fn void co_check_extent(struct conform *c, uint64_t off, const struct disk_extent *e)
{
	for (uint64_t done = 0, n; e->zero && done < e->len; done += n) {
		n = min(e->len - done, c->max_len);
		CHECK_EQ(co_disk_read(c->d, off + done, c->buf, n, 0), 0);
		CHECK(bytes_are_zero(c->buf, n));
	}
}

static co_fn void co_extents_cover_the_disk_and_tell_the_truth(struct conform *c)
{
	uint64_t off, len, n = 0;
	struct disk_extent e;

	for (off = 0; off < c->d->size; off += e.len, n++) {
		CHECK_EQ(co_disk_extent(c->d, off, c->d->size - off, &e), 0);
		CHECK(e.len >= 1 && e.len <= c->d->size - off);
		co_check_extent(c, off, &e);
	}
	CHECK(n <= c->d->size / 512 + 1);
	for (unsigned i = 0; i < c->rounds; i++) {
		pick_range(c, c->max_len, &off, &len);
		CHECK_EQ(co_disk_extent(c->d, off, len, &e), 0);
		CHECK(e.len >= 1 && e.len <= len);
		co_check_extent(c, off, &e);
		co_write_random(c, off, 1, 0);
		CHECK_EQ(co_disk_extent(c->d, off, len, &e), 0);
		CHECK((c->flags & CONFORM_NO_DATA) || !c->model[off] || !e.zero);
	}
}

/* --- Several requests at once --- */

struct job {
	struct conform *c;
	enum disk_op op;
	uint64_t off, len;
	char *data;		/* what it writes, or where it reads to */
	unsigned flags;
};

static co_fn int co_run_job(void *arg)
{
	struct job *j = arg;

	switch (j->op) {
	case DISK_OP_READ:
		return co_disk_read(j->c->d, j->off, j->data, j->len, 0);
	case DISK_OP_WRITE:
		return co_disk_write(j->c->d, j->off, j->data, j->len, j->flags);
	case DISK_OP_ZERO:
		return co_disk_zero(j->c->d, j->off, j->len, j->flags);
	case DISK_OP_DISCARD:
		return co_disk_discard(j->c->d, j->off, j->len, j->flags);
	default:
		return co_disk_flush(j->c->d);
	}
}

static co_fn void co_run_jobs(struct job *jobs, unsigned n)
{
	struct co_group g;

	co_group_init(&g);
	for (unsigned i = 0; i < n; i++)
		co_group_start(&g, "job", co_run_job, &jobs[i]);
	CHECK_EQ(co_group_wait(&g), 0);
}

/* Neighbours of all sizes within the same few units: whoever loses an update of another is found. */
static co_fn void co_neighbours_in_flight_lose_nothing(struct conform *c)
{
	enum { JOBS = 24 };
	struct job jobs[JOBS + 2];
	char *scratch = must_alloc(65536);

	for (unsigned round = 0; round < c->rounds / 4 + 1; round++) {
		uint64_t at = rng_below(&c->rng, c->d->size - 500000);
		unsigned n = 0;

		if (rng_below(&c->rng, 2))
			at = align_down(at, 4096);
		while (n < JOBS) {
			uint64_t len = 1 + rng_below(&c->rng, rng_below(&c->rng, 4) ? 1500 : 15000);

			if (rng_below(&c->rng, 3) == 0)
				len = align_up(at + len, 4096) - at;
			rng_fill(&c->rng, c->model + at, len);
			jobs[n] = (struct job){ .c = c, .op = DISK_OP_WRITE, .off = at, .len = len, .data = c->buf + at };
			memcpy(c->buf + at, c->model + at, len);
			if (rng_below(&c->rng, 6) == 0) {
				jobs[n].op = DISK_OP_ZERO;
				jobs[n].flags = rng_below(&c->rng, 2) ? DISK_UNMAP : 0;
				memset(c->model + at, 0, len);
			}
			at += len;
			n++;
		}
		for (unsigned i = JOBS - 1; i > 0; i--) {
			unsigned k = rng_below(&c->rng, i + 1);
			struct job t = jobs[i];

			jobs[i] = jobs[k];
			jobs[k] = t;
		}
		jobs[n++] = (struct job){ .c = c, .op = DISK_OP_FLUSH };
		jobs[n++] = (struct job){ .c = c, .op = DISK_OP_READ, .off = jobs[0].off, .len = min(jobs[0].len, (uint64_t)65536), .data = scratch };
		co_run_jobs(jobs, n);
		co_check_range(c, at - min(at, (uint64_t)500000), min(at, (uint64_t)500000));
	}
	free(scratch);
	co_check_all(c);
}

/* Promise (5), by sectors. A read in flight with them sees the old or one of the new. */
static co_fn void co_overlapping_requests_leave_each_sector_with_one_or_the_other(struct conform *c)
{
	enum { JOBS = 6, SPAN = 32 * 512 };
	char *data = must_alloc((JOBS + 2) * SPAN), *got = data + JOBS * SPAN, *seen = got + SPAN;
	struct job jobs[JOBS + 1];

	for (unsigned round = 0; round < c->rounds / 4 + 1; round++) {
		uint64_t at = align_down(rng_below(&c->rng, c->d->size - SPAN), 512);

		for (unsigned i = 0; i < JOBS; i++) {
			uint64_t off = 512 * rng_below(&c->rng, 16), len = 512 * (1 + rng_below(&c->rng, 16));

			memset(data + i * SPAN, i + 1, SPAN);
			jobs[i] = (struct job){ .c = c, .op = DISK_OP_WRITE, .off = at + off, .len = len, .data = data + i * SPAN + off };
		}
		jobs[JOBS] = (struct job){ .c = c, .op = DISK_OP_READ, .off = at, .len = SPAN, .data = seen };
		memset(c->buf, 0xee, SPAN);
		CHECK_EQ(co_disk_write(c->d, at, c->buf, SPAN, 0), 0);
		co_run_jobs(jobs, JOBS + 1);
		CHECK_EQ(co_disk_read(c->d, at, got, SPAN, 0), 0);
		for (uint64_t s = 0; s < SPAN / 512 && !(c->flags & CONFORM_NO_DATA); s++) {
			uint64_t written = 0;

			for (unsigned i = 0; i < JOBS; i++)
				if (at + s * 512 >= jobs[i].off && at + s * 512 < jobs[i].off + jobs[i].len)
					written |= 1u << (i + 1);
			for (char *p = got;; p = seen) {
				uint8_t v = p[s * 512];

				if (p == seen && (c->flags & CONFORM_TORN_READS))
					break;
				for (unsigned k = 1; k < 512; k++)
					CHECK_EQ((uint8_t)p[s * 512 + k], v);
				if (p == got && written)
					CHECK(v <= JOBS && (written >> v & 1));
				else
					CHECK(v == 0xee || (v <= JOBS && (written >> v & 1)));
				if (p == seen)
					break;
			}
		}
		memcpy(c->model + at, got, SPAN);
	}
	free(data);
	co_check_all(c);
}

/* --- The rest --- */

static co_fn void co_marks_are_kept_or_refused(struct conform *c)
{
	static char mark[DISK_MARK_MAX + 2], got[DISK_MARK_MAX + 2];
	struct err err = ERR_INIT;
	int ret = co_disk_mark_get(c->d, got, sizeof(got));

	memset(mark, 'm', DISK_MARK_MAX);
	mark[DISK_MARK_MAX] = '\0';
	if (ret == -ENOTSUP) {
		CHECK_EQ(co_disk_mark_set(c->d, mark, &err), -ENOTSUP);
		return;
	}
	CHECK_EQ(ret, 0);
	CHECK_EQ(co_disk_mark_set(c->d, mark, &err), 0);
	CHECK_EQ(co_disk_mark_get(c->d, got, sizeof(got)), 0);
	CHECK_STR(got, mark);
	CHECK_EQ(co_disk_mark_set(c->d, "a shorter one", &err), 0);
	CHECK_EQ(co_disk_mark_get(c->d, got, sizeof(got)), 0);
	CHECK_STR(got, "a shorter one");
	CHECK_EQ(co_disk_mark_set(c->d, "", &err), 0);
	CHECK_EQ(co_disk_mark_get(c->d, got, sizeof(got)), 0);
	CHECK_STR(got, "");
	CHECK(!err.code);
	mark[DISK_MARK_MAX] = 'm';
	CHECK_EQ(co_disk_mark_set(c->d, mark, &err), -EINVAL);
	CHECK(err.msg[0]);
	co_check_range(c, 0, 65536);
}

static co_fn void co_the_stamp_changes_with_a_write(struct conform *c)
{
	uint64_t before, after, now;
	int ret;

	/* Not yet, where a write within the same tick of the clock would be given the same. */
	while ((ret = co_disk_stamp(c->d, &before, &now)) == -EAGAIN)
		co_sleep_ns(2000000);
	if (ret == -ENOTSUP)
		return;
	CHECK_EQ(ret, 0);
	co_write_random(c, 4096, 512, DISK_FUA);
	while ((ret = co_disk_stamp(c->d, &after, &now)) == -EAGAIN)
		co_sleep_ns(2000000);
	CHECK_EQ(ret, 0);
	CHECK(after != before);
}

static co_fn void co_a_new_size_keeps_the_data_and_reads_as_zeroes_beyond(struct conform *c)
{
	struct err err = ERR_INIT;
	uint64_t size = c->d->size, small = size / 2 + 77;
	int ret;

	co_fill(c);
	ret = co_disk_resize(c->d, small, &err);
	if (ret) {
		CHECK_EQ(ret, -ENOTSUP);
		CHECK(err.msg[0]);
		CHECK_EQ(c->d->size, size);
		co_check_all(c);
		return;
	}
	CHECK_EQ(c->d->size, small);
	CHECK_EQ(co_disk_read(c->d, small, c->buf, 1, 0), -EINVAL);
	co_check_all(c);
	CHECK_EQ(co_disk_resize(c->d, size, &err), 0);
	memset(c->model + small, 0, size - small);
	co_check_all(c);
	co_write_random(c, size - 5, 5, 0);
	co_check_range(c, size - 100, 100);
}

static co_fn void co_prefetch_is_harmless(struct conform *c)
{
	CHECK_EQ(co_disk_prefetch(c->d, 0, c->d->size), 0);
	CHECK_EQ(co_disk_prefetch(c->d, 1, 511), 0);
	CHECK_EQ(co_disk_prefetch(c->d, c->d->size, 1), -EINVAL);
	co_check_range(c, 0, 65536);
}

static void counters_agree(struct conform *c, const struct disk_counters *before)
{
	CHECK_EQ(c->d->in_flight, 0);
	CHECK(c->d->count.ops[DISK_OP_READ] > before->ops[DISK_OP_READ]);
	CHECK(c->d->count.bytes[DISK_OP_WRITE] > before->bytes[DISK_OP_WRITE]);
	CHECK(!c->d->failed);
}

#define CONFORM(fn) \
	do { \
		printf("  %s: %s\n", c.d->name, &#fn[3]); \
		fflush(stdout); \
		fn(&c); \
	} while (0)

co_fn void co_disk_conform(struct disk *d, unsigned flags, uint64_t seed)
{
	struct conform c = { .d = d, .flags = flags, .rounds = test_scale(flags & CONFORM_SLOW ? 40 : 200) };
	struct disk_counters before = d->count;

	CHECK(d->size >= 1 << 20 && d->size <= 64 << 20);
	CHECK(!d->read_only);
	rng_seed(&c.rng, seed);
	c.model = must_alloc(d->size + 4096);
	c.buf = must_alloc(d->size + 4096);
	c.got = must_alloc(d->size + 4096);
	c.max_len = flags & (CONFORM_SLOW | CONFORM_SHORT) || TEST_SANITIZED ? 100000 : 700000;
	CONFORM(co_fill);
	CONFORM(co_zero_length_succeeds);
	CONFORM(co_beyond_the_size_is_einval_and_changes_nothing);
	CONFORM(co_reads_return_what_was_written);
	CONFORM(co_the_edges_of_the_size_work);
	CONFORM(co_segments_may_have_any_shape);
	CONFORM(co_large_requests_work);
	CONFORM(co_write_zeroes_reads_as_zeroes);
	CONFORM(co_discard_gives_zeroes_or_changes_nothing);
	CONFORM(co_extents_cover_the_disk_and_tell_the_truth);
	CONFORM(co_neighbours_in_flight_lose_nothing);
	CONFORM(co_overlapping_requests_leave_each_sector_with_one_or_the_other);
	CONFORM(co_marks_are_kept_or_refused);
	CONFORM(co_the_stamp_changes_with_a_write);
	CONFORM(co_prefetch_is_harmless);
	if (!(flags & CONFORM_NO_RESIZE))
		CONFORM(co_a_new_size_keeps_the_data_and_reads_as_zeroes_beyond);
	counters_agree(&c, &before);
	free(c.model);
	free(c.buf);
	free(c.got);
}
