/* SPDX-License-Identifier: MIT */
/* UUIDs as text and as bytes. */
#include <errno.h>

#include "lib/test.h"
#include "util/uuid.h"

static void text_and_bytes_convert_both_ways(void)
{
	static const struct uuid want = { { 0x0f, 0x8f, 0xad, 0x5b, 0xd9, 0xcb, 0x46, 0x9f, 0xa1, 0x65, 0x70, 0x86, 0x77,
					    0x28, 0x95, 0x0e } };
	struct uuid u;
	char buf[37];

	CHECK_EQ(uuid_parse("0f8fad5b-d9cb-469f-a165-70867728950e", &u), 0);
	CHECK(uuid_equal(&u, &want));
	CHECK_EQ(uuid_parse("0F8FAD5B-D9CB-469F-A165-70867728950E", &u), 0);
	CHECK(uuid_equal(&u, &want));
	CHECK_STR(uuid_format(&u, buf), "0f8fad5b-d9cb-469f-a165-70867728950e");
}

static void what_is_no_uuid_is_refused_and_changes_nothing(void)
{
	static const char *const bad[] = {
		"", "0f8fad5b", "0f8fad5bd9cb469fa16570867728950e", "0f8fad5b-d9cb-469f-a165-70867728950",
		"0f8fad5b-d9cb-469f-a165-70867728950e0", "0f8fad5b-d9cb-469f-a165-70867728950g",
		"0f8fad5b-d9cb-469f-a16570-867728950e", "0f8fad5b-d9cb-469f-a165 70867728950e",
		"{f8fad5b-d9cb-469f-a165-70867728950}",
	};
	struct uuid u = { { 1 } }, before = u;

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		CHECK_EQ(uuid_parse(bad[i], &u), -EINVAL);
		CHECK(uuid_equal(&u, &before));
	}
}

static void random_ones_are_version_4_and_differ(void)
{
	struct uuid a, b, null = { { 0 } };

	uuid_random(&a);
	uuid_random(&b);
	CHECK(!uuid_equal(&a, &b));
	CHECK_EQ(a.b[6] >> 4, 4);
	CHECK_EQ(a.b[8] >> 6, 2);
	CHECK(!uuid_is_null(&a));
	CHECK(uuid_is_null(&null));
}

int main(void)
{
	RUN(text_and_bytes_convert_both_ways);
	RUN(what_is_no_uuid_is_refused_and_changes_nothing);
	RUN(random_ones_are_version_4_and_differ);
	return 0;
}
