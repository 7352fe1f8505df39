/* SPDX-License-Identifier: MIT */
/* Messages on standard error, read back through a pipe. */
#include <errno.h>

#include "lib/test.h"
#include "util/log.h"

static int saved_stderr, pipe_in;

static void redirect(void)
{
	int fd[2];

	CHECK_EQ(pipe(fd), 0);
	saved_stderr = dup(STDERR_FILENO);
	dup2(fd[1], STDERR_FILENO);
	close(fd[1]);
	pipe_in = fd[0];
}

/* What was written since redirect(). */
static const char *restore(void)
{
	static char buf[8192];
	ssize_t n;

	dup2(saved_stderr, STDERR_FILENO);
	close(saved_stderr);
	n = read(pipe_in, buf, sizeof(buf) - 1);
	close(pipe_in);
	buf[n > 0 ? n : 0] = '\0';
	return buf;
}

static void a_message_is_one_line_with_our_name(void)
{
	redirect();
	log_error("%s: %d", "disk", 7);
	CHECK_STR(restore(), "weir: disk: 7\n");
}

static void text_from_outside_cannot_begin_a_line_or_an_escape_sequence(void)
{
	redirect();
	log_warn("name \"%s\"", "a\nweir: all is well\033[2J");
	CHECK_STR(restore(), "weir: name \"a?weir: all is well?[2J\"\n");
}

static void messages_below_the_level_are_left_out(void)
{
	redirect();
	log_debug("hidden");
	log_set_level(LOG_DEBUG);
	log_debug("shown");
	log_set_level(LOG_ERROR);
	log_warn("hidden");
	log_set_level(LOG_INFO);
	CHECK_STR(restore(), "weir: shown\n");
}

static void a_long_message_is_cut_and_still_one_line(void)
{
	char big[5000];
	const char *got;

	memset(big, 'x', sizeof(big) - 1);
	big[sizeof(big) - 1] = '\0';
	redirect();
	log_info("%s", big);
	got = restore();
	CHECK(strlen(got) > 1000 && strlen(got) < 2100);
	CHECK_EQ(strchr(got, '\n') - got, (long)strlen(got) - 1);
}

static void errno_survives(void)
{
	redirect();
	errno = ENOSPC;
	log_info("x");
	CHECK_EQ(errno, ENOSPC);
	restore();
}

int main(void)
{
	RUN(a_message_is_one_line_with_our_name);
	RUN(text_from_outside_cannot_begin_a_line_or_an_escape_sequence);
	RUN(messages_below_the_level_are_left_out);
	RUN(a_long_message_is_cut_and_still_one_line);
	RUN(errno_survives);
	return 0;
}
