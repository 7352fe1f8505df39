/* SPDX-License-Identifier: MIT */
/* What memory pressure makes of the cache's size. */
#include "daemon/pressure.h"
#include "lib/test.h"

#define MIB (1ull << 20)

static void it_shrinks_at_once_and_grows_back_slowly(void)
{
	struct pressure p = { .wanted = 64 * MIB, .size = 64 * MIB, .least = 8 * MIB };
	uint64_t total = 5000000, size;
	unsigned seconds = 0;

	CHECK_EQ(pressure_step(&p, total), 64 * MIB);	/* what was before the start counts for nothing */
	CHECK_EQ(pressure_step(&p, total += PRESSURE_US), 64 * MIB);
	CHECK_EQ(pressure_step(&p, total += PRESSURE_US + 1), 48 * MIB);
	for (unsigned i = 0; i < 20; i++)
		pressure_step(&p, total += 900000);
	CHECK_EQ(p.size, 8 * MIB);
	CHECK_EQ(p.events, 21);
	for (unsigned i = 0; i < PRESSURE_CALM - 1; i++)
		CHECK_EQ(pressure_step(&p, total), 8 * MIB);
	for (size = p.size; p.size < 64 * MIB; seconds++) {
		pressure_step(&p, total);
		CHECK(p.size >= size && p.size - size <= 4 * MIB);
		size = p.size;
		CHECK(seconds < 1000);
	}
	CHECK(seconds > 30);
	for (unsigned i = 0; i < 100; i++)
		CHECK_EQ(pressure_step(&p, total), 64 * MIB);
}

static void what_the_kernel_writes_is_read(void)
{
	uint64_t total;

	CHECK(pressure_parse("some avg10=0.00 avg60=0.00 avg300=0.00 total=1234567\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n", &total));
	CHECK_EQ(total, 1234567);
	CHECK(!pressure_parse("", &total));
	CHECK(!pressure_parse("some avg10=0.00\nfull total=9\n", &total));
	CHECK(!pressure_parse("some total=", &total));
}

int main(void)
{
	RUN(it_shrinks_at_once_and_grows_back_slowly);
	RUN(what_the_kernel_writes_is_read);
	return 0;
}
