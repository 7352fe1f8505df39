/* SPDX-License-Identifier: MIT */
/*
 * A qcow2 image with any content: opened read-only and for writing, read, mapped, written, zeroed, discarded, given another size, flushed, closed, opened
 * again. Whatever it holds, that ends in an error or works, in bounded time and memory, and no write goes where the image has its header.
 *
 * Input: 8 bytes that seed the requests, then the image.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/media.h"
#include "format/qcow2/format.h"
#include "format/qcow2/qcow2.h"
#include "fuzz/disk_fuzz.h"
#include "util/bytes.h"
#include "util/rng.h"

#define HANG_NS (36000ull * 1000000000)	/* of virtual time */
#define REQUESTS 24
#define NEAR (2ull << 20)		/* requests stay this near to the start or the end */
#define MOST (256u << 10)

static uint8_t buf[MOST];

static co_fn void co_request(struct disk *d, struct rng *r)
{
	uint64_t range = min(d->size, NEAR), off, len;
	struct disk_extent e;

	if (!d->size)
		return;
	off = rng_below(r, range);
	len = 1 + rng_below(r, min(range - off, (uint64_t)MOST));
	if (rng_below(r, 4) == 0)
		off += d->size - range;
	if (rng_below(r, 2)) {
		off = align_down(off, 512);
		len = min(align_up(len, 512), d->size - off);
		len = min(len, (uint64_t)MOST);
	}
	switch (rng_below(r, 8)) {
	case 0: co_disk_read(d, off, buf, len, 0); break;
	case 1: co_disk_zero(d, off, len, rng_below(r, 2) ? DISK_UNMAP : 0); break;
	case 2: co_disk_discard(d, off, len, 0); break;
	case 3: co_disk_flush(d); break;
	case 4: co_disk_extent(d, off, len, &e); break;
	case 5:
		if (d->size <= NEAR && rng_below(r, 4) == 0)
			co_disk_resize(d, align_up(rng_below(r, 2 * NEAR), 512), NULL);
		break;
	default: co_disk_write(d, off, buf, len, rng_below(r, 4) ? 0 : DISK_FUA); break;
	}
}

/* Returns whether it could be opened. */
static co_fn bool co_use(struct powercut *p, unsigned flags, struct rng *r)
{
	static const struct qcow2_opts opts = { .table_cache = 1, .run_ahead = 1, .fill_debt = 1 };
	struct err err = ERR_INIT;
	struct disk *file = co_fuzz_device(p, "image"), *d;
	int rc = co_qcow2_open(file, "image", &opts, flags, &d, &err);

	fuzz_told(rc, &err);
	if (rc) {
		co_disk_close(file);
		return false;
	}
	for (int i = 0; i < REQUESTS; i++)
		co_request(d, r);
	co_disk_close(d);
	return true;
}

static co_fn void co_work(struct powercut *p, void *arg)
{
	struct rng *rng = arg;

	co_use(p, 0, rng);
	if (co_use(p, DISK_OPEN_RDWR, rng)) {
		uint8_t magic[8];

		/* The header is still one. */
		media_read(powercut_dev_view(powercut_dev_find(p, "image")), 0, magic, sizeof(magic));
		if (get_be32(magic) != QCOW2_MAGIC)
			abort();
	}
	co_use(p, DISK_OPEN_RDWR, rng);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint8_t seed[8] = { 0 };
	size_t n = min(size, sizeof(seed));
	struct rng rng;

	memcpy(seed, data, n);
	rng_seed(&rng, get_le64(seed));
	fuzz_run(data + n, size - n, NULL, co_work, &rng, HANG_NS);
	return 0;
}
