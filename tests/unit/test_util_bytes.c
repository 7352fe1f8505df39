/* SPDX-License-Identifier: MIT */
/* Fixed-width loads and stores, alignment, and the search for zeroes. */
#include "lib/test.h"
#include "util/bytes.h"

static void integers_are_stored_in_the_named_byte_order_at_any_alignment(void)
{
	uint8_t b[16] = { 0 };

	put_le16(b + 1, 0x0102);
	CHECK(b[1] == 2 && b[2] == 1);
	put_be16(b + 1, 0x0102);
	CHECK(b[1] == 1 && b[2] == 2);
	put_le32(b + 3, 0x01020304);
	CHECK(b[3] == 4 && b[6] == 1);
	CHECK_EQ(get_be32(b + 3), 0x04030201u);
	put_be64(b + 5, 0x0102030405060708);
	CHECK(b[5] == 1 && b[12] == 8);
	CHECK_EQ(get_le64(b + 5), 0x0807060504030201u);
}

static void alignment_rounds_to_powers_of_two(void)
{
	CHECK(is_pow2(1) && is_pow2(4096) && is_pow2(1ull << 63));
	CHECK(!is_pow2(0) && !is_pow2(3) && !is_pow2(UINT64_MAX));
	CHECK_EQ(align_down(4097, 4096), 4096u);
	CHECK_EQ(align_up(4097, 4096), 8192u);
	CHECK_EQ(align_up(4096, 4096), 4096u);
	CHECK_EQ(align_up(UINT64_MAX, 4096), 0u);
	CHECK(is_aligned(0, 512) && is_aligned(1024, 512) && !is_aligned(513, 512));
}

static void one_byte_that_is_not_zero_is_found_wherever_it_is(void)
{
	uint8_t b[200];

	memset(b, 0, sizeof(b));
	CHECK(bytes_are_zero(NULL, 0));
	for (size_t len = 0; len < sizeof(b) - 3; len++) {
		for (size_t start = 0; start < 3; start++) {
			/* What is outside of the range does not count. */
			memset(b, 0xff, sizeof(b));
			memset(b + start, 0, len);
			CHECK(bytes_are_zero(b + start, len));
			for (size_t i = 0; i < len; i++) {
				b[start + i] = 1;
				CHECK(!bytes_are_zero(b + start, len));
				b[start + i] = 0;
			}
		}
	}
}

static void min_and_max_evaluate_their_arguments_once(void)
{
	int n = 0;

	CHECK_EQ(min(n++, 5), 0);
	CHECK_EQ(n, 1);
	CHECK_EQ(max(n++, 0), 1);
	CHECK_EQ(n, 2);
	CHECK_EQ(min(max(1, 2), 3), 2);
}

int main(void)
{
	RUN(integers_are_stored_in_the_named_byte_order_at_any_alignment);
	RUN(alignment_rounds_to_powers_of_two);
	RUN(one_byte_that_is_not_zero_is_found_wherever_it_is);
	RUN(min_and_max_evaluate_their_arguments_once);
	return 0;
}
