/* SPDX-License-Identifier: MIT */
/* The error message: the first one stays, and nothing overflows. */
#include <errno.h>

#include "lib/test.h"
#include "util/err.h"

static void the_first_error_is_the_one_that_stays(void)
{
	struct err err = ERR_INIT;

	CHECK_EQ(err_set(&err, -ENOENT, "cause %d", 1), -ENOENT);
	CHECK_EQ(err_set(&err, -EIO, "effect"), -EIO);
	CHECK_EQ(err_errno(&err, -EIO, "effect"), -EIO);
	CHECK_EQ(err.code, -ENOENT);
	CHECK_STR(err.msg, "cause 1");
	err_clear(&err);
	CHECK_EQ(err.code, 0);
	CHECK_STR(err.msg, "");
	CHECK_EQ(err_set(&err, -EIO, "another"), -EIO);
	CHECK_STR(err.msg, "another");
}

static void the_reason_and_the_thing_can_be_added(void)
{
	struct err err = ERR_INIT;

	CHECK_EQ(err_prefix(&err, "nothing is set"), 0);
	CHECK_STR(err.msg, "");
	CHECK_EQ(err_errno(&err, -ENOENT, "cannot open %s", "a.raw"), -ENOENT);
	CHECK_STR(err.msg, "cannot open a.raw: No such file or directory");
	CHECK_EQ(err_prefix(&err, "volume %s", "vm"), -ENOENT);
	CHECK_STR(err.msg, "volume vm: cannot open a.raw: No such file or directory");
}

static void nobody_needs_to_want_the_message(void)
{
	CHECK_EQ(err_set(NULL, -EIO, "x"), -EIO);
	CHECK_EQ(err_errno(NULL, -EIO, "x"), -EIO);
	CHECK_EQ(err_prefix(NULL, "x"), 0);
	err_clear(NULL);
}

static void a_long_message_is_cut(void)
{
	struct err err = ERR_INIT;
	char big[2000];

	memset(big, 'x', sizeof(big) - 1);
	big[sizeof(big) - 1] = '\0';
	err_errno(&err, -EIO, "%s", big);
	CHECK_EQ(strlen(err.msg), sizeof(err.msg) - 1);
	err_prefix(&err, "%s", big);
	CHECK_EQ(strlen(err.msg), sizeof(err.msg) - 1);
	err_clear(&err);
	err_set(&err, -EIO, "end");
	err_prefix(&err, "%.*s", (int)sizeof(err.msg) - 4, big);
	CHECK_EQ(strlen(err.msg), sizeof(err.msg) - 1);
}

int main(void)
{
	RUN(the_first_error_is_the_one_that_stays);
	RUN(the_reason_and_the_thing_can_be_added);
	RUN(nobody_needs_to_want_the_message);
	RUN(a_long_message_is_cut);
	return 0;
}
