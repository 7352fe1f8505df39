/* SPDX-License-Identifier: MIT */
/* Option lists: what is accepted, and what the messages say. */
#include <errno.h>

#include "lib/test.h"
#include "util/err.h"
#include "util/opts.h"

static struct opts o;
static struct err err;

static int parse(const char *s)
{
	err_clear(&err);
	return opts_parse(&o, s, "vm.raw", &err);
}

static void keys_and_values_are_split_at_commas(void)
{
	CHECK_EQ(parse("format=raw,lock,aio=native,empty="), 0);
	CHECK_EQ(o.n, 4u);
	CHECK_STR(opts_str(&o, "format"), "raw");
	CHECK_STR(opts_str(&o, "lock"), "on");
	CHECK_STR(opts_str(&o, "aio"), "native");
	CHECK_STR(opts_str(&o, "empty"), "");
	CHECK(!opts_str(&o, "absent"));
	opts_free(&o);
	CHECK_EQ(parse(NULL), 0);
	CHECK_EQ(o.n, 0u);
	CHECK_EQ(parse(""), 0);
	CHECK_EQ(o.n, 0u);
	opts_free(&o);
}

static void a_doubled_comma_belongs_to_the_value(void)
{
	CHECK_EQ(parse("a=1,,2,b=,,,,,c==,,"), 0);
	CHECK_STR(opts_str(&o, "a"), "1,2");
	CHECK_STR(opts_str(&o, "b"), ",,");
	CHECK_STR(opts_str(&o, "c"), "=,");
	opts_free(&o);
}

static void a_bad_list_is_refused_and_the_message_names_it(void)
{
	char many[OPTS_MAX * 8 + 16] = "";

	CHECK_EQ(parse("=1"), -EINVAL);
	CHECK(strstr(err.msg, "vm.raw"));
	CHECK_EQ(parse("a=1,"), -EINVAL);
	CHECK_EQ(parse(",a"), -EINVAL);
	CHECK_EQ(parse("a,,b"), -EINVAL);
	CHECK_EQ(parse("a=1,b=2,a=3"), -EINVAL);
	CHECK_STR(err.msg, "vm.raw: option \"a\" is given twice");
	for (int i = 0; i < OPTS_MAX; i++)
		sprintf(many + strlen(many), "%sk%d", i ? "," : "", i);
	CHECK_EQ(parse(many), 0);
	CHECK_EQ(opts_add(&o, "one-more", ""), -E2BIG);
	CHECK_EQ(opts_add(&o, "k3", "new"), 0);
	CHECK_STR(opts_str(&o, "k3"), "new");
	opts_free(&o);
	strcat(many, ",last");
	CHECK_EQ(parse(many), -EINVAL);
	CHECK(strstr(err.msg, "more than 64"));
	CHECK_EQ(o.n, 0u);
}

static void values_are_typed_and_absent_ones_leave_the_default(void)
{
	static const char *const names[] = { "io_uring", "native", "threads", NULL };
	uint64_t size = 7, ns = 7, n = 7;
	bool flag = true;
	int choice = 2;

	CHECK_EQ(parse("x=1"), 0);
	CHECK_EQ(opts_size(&o, "size", &size, &err), 0);
	CHECK_EQ(opts_duration(&o, "read", &ns, &err), 0);
	CHECK_EQ(opts_u64(&o, "n", 1, 9, &n, &err), 0);
	CHECK_EQ(opts_bool(&o, "lock", &flag, &err), 0);
	CHECK_EQ(opts_enum(&o, "aio", names, &choice, &err), 0);
	CHECK(size == 7 && ns == 7 && n == 7 && flag && choice == 2);
	opts_free(&o);

	CHECK_EQ(parse("size=4K,read=8ms,n=9,lock=off,aio=native"), 0);
	CHECK_EQ(opts_size(&o, "size", &size, &err), 0);
	CHECK_EQ(opts_duration(&o, "read", &ns, &err), 0);
	CHECK_EQ(opts_u64(&o, "n", 1, 9, &n, &err), 0);
	CHECK_EQ(opts_bool(&o, "lock", &flag, &err), 0);
	CHECK_EQ(opts_enum(&o, "aio", names, &choice, &err), 0);
	CHECK(size == 4096 && ns == 8000000 && n == 9 && !flag && choice == 1);
	CHECK_EQ(opts_finish(&o, "vm.raw", "", &err), 0);
	opts_free(&o);
}

static void check_message(int rc, const char *want)
{
	CHECK_EQ(rc, -EINVAL);
	CHECK_STR(err.msg, want);
	err_clear(&err);
}

static void a_bad_value_says_what_would_be_good(void)
{
	static const char *const names[] = { "io_uring", "native", NULL };
	uint64_t v;
	bool flag;
	int choice;

	CHECK_EQ(parse("size=big,huge=99999999999E,read=8 ms,n=10,lock=maybe,aio=posix"), 0);
	check_message(opts_size(&o, "size", &v, &err), "size=big: must be a size such as 4096, 64K or 10G");
	check_message(opts_size(&o, "huge", &v, &err),
		      "huge=99999999999E: too large; must be a size such as 4096, 64K or 10G");
	check_message(opts_duration(&o, "read", &v, &err), "read=8 ms: must be a duration such as 100us, 8ms or 2s");
	check_message(opts_u64(&o, "n", 1, 9, &v, &err), "n=10: must be a number from 1 to 9");
	check_message(opts_bool(&o, "lock", &flag, &err), "lock=maybe: must be on or off");
	check_message(opts_enum(&o, "aio", names, &choice, &err), "aio=posix: must be one of io_uring, native");
	opts_free(&o);
}

static void an_option_that_nobody_knows_is_named(void)
{
	CHECK_EQ(parse("aio=native,cahce=none"), 0);
	opts_str(&o, "aio");
	check_message(opts_finish(&o, "vm.raw", "aio, cache", &err),
		      "vm.raw: unknown option \"cahce\"; known are: aio, cache");
	opts_free(&o);
}

static void a_replaced_value_must_be_asked_for_again(void)
{
	CHECK_EQ(parse("aio=native"), 0);
	opts_str(&o, "aio");
	CHECK_EQ(opts_add(&o, "aio", "threads"), 0);
	CHECK_EQ(o.n, 1u);
	CHECK_EQ(opts_finish(&o, "vm.raw", "", &err), -EINVAL);
	err_clear(&err);
	CHECK_STR(opts_str(&o, "aio"), "threads");
	CHECK_EQ(opts_finish(&o, "vm.raw", "", &err), 0);
	opts_free(&o);
}

int main(void)
{
	RUN(keys_and_values_are_split_at_commas);
	RUN(a_doubled_comma_belongs_to_the_value);
	RUN(a_bad_list_is_refused_and_the_message_names_it);
	RUN(values_are_typed_and_absent_ones_leave_the_default);
	RUN(a_bad_value_says_what_would_be_good);
	RUN(an_option_that_nobody_knows_is_named);
	RUN(a_replaced_value_must_be_asked_for_again);
	return 0;
}
