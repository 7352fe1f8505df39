/* SPDX-License-Identifier: MIT */
/* Scatter-gather lists against the same bytes in one piece. */
#include <errno.h>

#include "lib/test.h"
#include "util/bytes.h"
#include "util/iov.h"
#include "util/rng.h"

#define SPACE 512
#define PIECES 12

/* Cuts `mem` into pieces, some empty, in order and without gaps, so that `mem` is the model of the list. */
static int cut(struct rng *rng, uint8_t *mem, struct iovec *iov, size_t *len)
{
	int n = rng_below(rng, PIECES + 1);

	*len = 0;
	for (int i = 0; i < n; i++) {
		iov[i] = (struct iovec){ mem + *len, rng_below(rng, 3) ? rng_below(rng, SPACE / PIECES) : 0 };
		*len += iov[i].iov_len;
	}
	return n;
}

static void every_operation_equals_that_on_flat_memory(void)
{
	uint8_t mem[SPACE], flat[SPACE], buf[SPACE];
	struct iovec iov[PIECES], slice[PIECES];
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (int round = 0; round < 20000; round++) {
		size_t len, off, want, size;
		int n = cut(&rng, mem, iov, &len), count;

		CHECK_EQ(iov_len(iov, n), len);
		rng_fill(&rng, mem, sizeof(mem));
		memcpy(flat, mem, sizeof(mem));
		off = rng_below(&rng, SPACE);
		size = rng_below(&rng, SPACE - off);
		want = off < len ? min(size, len - off) : 0;

		CHECK_EQ(iov_copy_out(iov, n, off, buf, size), want);
		CHECK(!memcmp(buf, flat + off, want));
		rng_fill(&rng, buf, sizeof(buf));
		CHECK_EQ(iov_copy_in(iov, n, off, buf, size), want);
		memcpy(flat + off, buf, want);
		CHECK(!memcmp(mem, flat, sizeof(mem)));

		count = iov_slice(iov, n, off, size, slice, PIECES);
		CHECK(count >= 0);
		CHECK_EQ(iov_len(slice, count), want);
		CHECK_EQ(iov_copy_out(slice, count, 0, buf, sizeof(buf)), want);
		CHECK(!memcmp(buf, flat + off, want));
		if (count)
			CHECK_EQ(iov_slice(iov, n, off, size, slice, count - 1), -E2BIG);

		CHECK_EQ(iov_set(iov, n, off, 0, size), want);
		memset(flat + off, 0, want);
		CHECK(!memcmp(mem, flat, sizeof(mem)));
		CHECK(iov_is_zero(iov, n, off, size));
		if (want) {
			mem[off + rng_below(&rng, want)] = 1;
			CHECK(!iov_is_zero(iov, n, off, size));
		}
	}
}

static void a_list_is_aligned_if_every_base_and_length_is(void)
{
	_Alignas(512) static uint8_t mem[2048];
	struct iovec iov[2] = { { mem, 512 }, { mem + 1024, 512 } };

	CHECK(iov_is_aligned(iov, 2, 512));
	CHECK(iov_is_aligned(NULL, 0, 512));
	iov[1].iov_len = 511;
	CHECK(!iov_is_aligned(iov, 2, 512));
	iov[1] = (struct iovec){ mem + 1025, 512 };
	CHECK(!iov_is_aligned(iov, 2, 512));
}

int main(void)
{
	RUN(every_operation_equals_that_on_flat_memory);
	RUN(a_list_is_aligned_if_every_base_and_length_is);
	return 0;
}
