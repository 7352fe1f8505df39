/* SPDX-License-Identifier: MIT */
/* Sizes, durations, numbers and switches as text. */
#include <errno.h>

#include "lib/test.h"
#include "util/bytes.h"
#include "util/size.h"

#define UNCHANGED 77

static void check_u64(int (*parse)(const char *, uint64_t *), const char *s, int rc, uint64_t want)
{
	uint64_t got = UNCHANGED;
	int result = parse(s, &got);

	if (result != rc || got != (rc ? UNCHANGED : want))
		test_fail("\"%s\" gives %d, %" PRIu64 "; wanted %d, %" PRIu64, s, result, got, rc, want);
}

static void sizes_are_powers_of_two(void)
{
	check_u64(size_parse, "0", 0, 0);
	check_u64(size_parse, "4096", 0, 4096);
	check_u64(size_parse, "512B", 0, 512);
	check_u64(size_parse, "4K", 0, 4096);
	check_u64(size_parse, "4k", 0, 4096);
	check_u64(size_parse, "4KB", 0, 4096);
	check_u64(size_parse, "4KiB", 0, 4096);
	check_u64(size_parse, "3M", 0, 3ull << 20);
	check_u64(size_parse, "10G", 0, 10ull << 30);
	check_u64(size_parse, "1.5T", 0, 3ull << 39);
	check_u64(size_parse, "2P", 0, 2ull << 50);
	check_u64(size_parse, "7E", 0, 7ull << 60);
	check_u64(size_parse, "7.875E", 0, 63ull << 57);
	check_u64(size_parse, "0.5K", 0, 512);
	check_u64(size_parse, "1.50K", 0, 1536);
	check_u64(size_parse, "1.0", 0, 1);
	check_u64(size_parse, "9223372036854775807", 0, INT64_MAX);
}

static void what_is_no_size_is_refused(void)
{
	static const char *const bad[] = {
		"", " 1", "1 ", "1 K", "-1", "+1", "K", ".5K", "1.", "1.K", "1,5K", "1KK", "1iB", "1Ki", "1Q", "0x10",
		"1e3", "0.3K", "1.5", "0.0000000000000000001K", "1\n", "inf", "1KiBs",
	};

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		check_u64(size_parse, bad[i], -EINVAL, 0);
	check_u64(size_parse, "8E", -ERANGE, 0);
	check_u64(size_parse, "9223372036854775808", -ERANGE, 0);
	check_u64(size_parse, "18446744073709551617", -ERANGE, 0);
	check_u64(size_parse, "99999999999999999999999999999999K", -ERANGE, 0);
	/* A word is no size, however long its digits. */
	check_u64(size_parse, "99999999999999999999999999999999x", -EINVAL, 0);
}

static void durations_are_nanoseconds(void)
{
	check_u64(duration_parse, "2", 0, 2000000000);
	check_u64(duration_parse, "0.5", 0, 500000000);
	check_u64(duration_parse, "100ns", 0, 100);
	check_u64(duration_parse, "4us", 0, 4000);
	check_u64(duration_parse, "8ms", 0, 8000000);
	check_u64(duration_parse, "1.5s", 0, 1500000000);
	check_u64(duration_parse, "2m", 0, 120000000000);
	check_u64(duration_parse, "1h", 0, 3600000000000);
	check_u64(duration_parse, "0.1ns", -EINVAL, 0);
	check_u64(duration_parse, "5sec", -EINVAL, 0);
	check_u64(duration_parse, "5 s", -EINVAL, 0);
	check_u64(duration_parse, "5S", -EINVAL, 0);
	check_u64(duration_parse, "", -EINVAL, 0);
	check_u64(duration_parse, "ms", -EINVAL, 0);
	check_u64(duration_parse, "9999999999h", -ERANGE, 0);
}

static void numbers_are_decimal_or_hexadecimal(void)
{
	check_u64(u64_parse, "0", 0, 0);
	check_u64(u64_parse, "010", 0, 10);
	check_u64(u64_parse, "0xfF", 0, 255);
	check_u64(u64_parse, "18446744073709551615", 0, UINT64_MAX);
	check_u64(u64_parse, "0xffffffffffffffff", 0, UINT64_MAX);
	check_u64(u64_parse, "18446744073709551616", -ERANGE, 0);
	check_u64(u64_parse, "0x10000000000000000", -ERANGE, 0);
	check_u64(u64_parse, "", -EINVAL, 0);
	check_u64(u64_parse, "0x", -EINVAL, 0);
	check_u64(u64_parse, "-1", -EINVAL, 0);
	check_u64(u64_parse, "1 ", -EINVAL, 0);
	check_u64(u64_parse, "a", -EINVAL, 0);
}

static void switches_have_four_names_each(void)
{
	static const char *const on[] = { "on", "yes", "true", "1" }, *const off[] = { "off", "no", "false", "0" };
	int v;

	for (int i = 0; i < 4; i++) {
		CHECK_EQ(bool_parse(on[i], &v), 0);
		CHECK_EQ(v, 1);
		CHECK_EQ(bool_parse(off[i], &v), 0);
		CHECK_EQ(v, 0);
	}
	CHECK_EQ(bool_parse("", &v), -EINVAL);
	CHECK_EQ(bool_parse("On", &v), -EINVAL);
	CHECK_EQ(bool_parse("2", &v), -EINVAL);
}

static void sizes_and_durations_print_with_three_digits(void)
{
	static const struct {
		uint64_t value;
		const char *size, *duration;
	} table[] = {
		{ 0, "0 B", "0 ns" },
		{ 999, "999 B", "999 ns" },
		{ 1023, "1023 B", "1.02 us" },
		{ 4096, "4 KiB", "4.1 us" },
		{ 1536, "1.5 KiB", "1.54 us" },
		{ 81000, "79.1 KiB", "81 us" },
		{ 999600, "976 KiB", "1 ms" },
		{ 1048575, "1 MiB", "1.05 ms" },
		{ 1400000, "1.34 MiB", "1.4 ms" },
		{ 2000000000, "1.86 GiB", "2 s" },
		{ 119000000000, "111 GiB", "119 s" },
		{ 120000000000, "112 GiB", "2 min" },
		{ 7200000000000, "6.55 TiB", "2 h" },
		{ 259200000000000, "236 TiB", "3 d" },
		{ UINT64_MAX, "16 EiB", "213504 d" },
	};
	char buf[16];

	for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
		CHECK_STR(size_format(table[i].value, buf), table[i].size);
		CHECK_STR(duration_format(table[i].value, buf), table[i].duration);
	}
}

int main(void)
{
	RUN(sizes_are_powers_of_two);
	RUN(what_is_no_size_is_refused);
	RUN(durations_are_nanoseconds);
	RUN(numbers_are_decimal_or_hexadecimal);
	RUN(switches_have_four_names_each);
	RUN(sizes_and_durations_print_with_three_digits);
	return 0;
}
