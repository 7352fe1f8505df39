/* SPDX-License-Identifier: MIT */
/*
 * What a verb of the command line uses: its table of options, its help, and uniform usage errors.
 *
 * A verb is one file with `int cli_VERB(int argc, char **argv)`; argv[0] is the verb. The returned value is
 * the exit status: 0, 1 when it failed (after one line on standard error, see cli_fail()), 2 for a usage error.
 *
 *	struct serve_args a = { .aio = AIO_IO_URING };
 *	const struct cli_opt opts[] = {
 *		CLI_LIST("log", 0, "DEVICE", &a.logs),
 *		CLI_ENUM("aio", 0, aio_names, &a.aio),
 *		CLI_FLAG("read-only", 'r', &a.read_only),
 *		CLI_END
 *	};
 *	char **operand = cli_parse("serve", opts, "DISK", argc, argv);
 *
 * The texts of -h come from man/weir-VERB.1 (tools/mkhelp); a test compares its options with the table, which
 * the hidden option --list-options prints.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;

#define CLI_EXIT_USAGE 2

struct cli_verb {
	const char *name;
	int (*run)(int argc, char **argv);
};

int cli_serve(int argc, char **argv);
int cli_log(int argc, char **argv);
int cli_map(int argc, char **argv);
int cli_unmap(int argc, char **argv);
int cli_perf(int argc, char **argv);
int cli_stat(int argc, char **argv);
int cli_advise(int argc, char **argv);
int cli_cache(int argc, char **argv);
int cli_image(int argc, char **argv);

/* The values of an option that may be given several times. */
#define CLI_LIST_MAX 16
struct cli_list {
	const char *v[CLI_LIST_MAX];
	int n;
};

enum cli_kind { CLI_KIND_END, CLI_KIND_FLAG, CLI_KIND_STR, CLI_KIND_LIST, CLI_KIND_SIZE, CLI_KIND_DURATION,
		CLI_KIND_U64, CLI_KIND_ENUM };

struct cli_opt {
	enum cli_kind kind;
	const char *name;	/* without the dashes */
	char letter;		/* of the short form, 0 if there is none */
	const char *arg;	/* what the value is called in the help */
	union {			/* where the value goes; what was there before is the default */
		bool *flag;
		const char **str;
		struct cli_list *list;
		uint64_t *num;
		int *choice;
	};
	const char *const *names; /* CLI_ENUM: ends with NULL; the choice is an index */
	uint64_t min, max;	/* CLI_SIZE, CLI_DURATION and CLI_U64: inclusive */
};

#define CLI_FLAG(name_, letter_, dst_) \
	{ .kind = CLI_KIND_FLAG, .name = (name_), .letter = (letter_), .flag = (dst_) }
#define CLI_STR(name_, letter_, arg_, dst_) \
	{ .kind = CLI_KIND_STR, .name = (name_), .letter = (letter_), .arg = (arg_), .str = (dst_) }
#define CLI_LIST(name_, letter_, arg_, dst_) \
	{ .kind = CLI_KIND_LIST, .name = (name_), .letter = (letter_), .arg = (arg_), .list = (dst_) }
#define CLI_SIZE(name_, letter_, arg_, dst_, min_, max_) \
	{ .kind = CLI_KIND_SIZE, .name = (name_), .letter = (letter_), .arg = (arg_), .num = (dst_), \
	  .min = (min_), .max = (max_) }
#define CLI_DURATION(name_, letter_, arg_, dst_, min_, max_) \
	{ .kind = CLI_KIND_DURATION, .name = (name_), .letter = (letter_), .arg = (arg_), .num = (dst_), \
	  .min = (min_), .max = (max_) }
#define CLI_U64(name_, letter_, arg_, dst_, min_, max_) \
	{ .kind = CLI_KIND_U64, .name = (name_), .letter = (letter_), .arg = (arg_), .num = (dst_), \
	  .min = (min_), .max = (max_) }
#define CLI_ENUM(name_, letter_, names_, dst_) \
	{ .kind = CLI_KIND_ENUM, .name = (name_), .letter = (letter_), .names = (names_), .choice = (dst_) }
#define CLI_END { .kind = CLI_KIND_END }

/*
 * Reads options and operands in any order. `verb` is "serve" or "log create". `operands` has one word for each
 * operand: "DISK", "[DISK]" for an optional one, "DISK..." for one or more. Returns the operands, NULL after the
 * last. Does not return after -h (prints the help, exit 0) or a usage error (one line, exit 2).
 */
char **cli_parse(const char *verb, const struct cli_opt *opts, const char *operands, int argc, char **argv);

/* Runs the one of `verbs` (up to a name of NULL) that argv[1] names; `verb` is "log", or NULL for weir itself. */
int cli_dispatch(const char *verb, const struct cli_verb *verbs, int argc, char **argv);

/* "weir VERB: TEXT" on standard error, with where to find help behind it; exits with 2. */
void cli_usage(const char *verb, const char *fmt, ...) __attribute__((format(printf, 2, 3), noreturn));

/* "weir VERB: " and the error's message on standard error. Returns 1, the exit status. */
int cli_fail(const char *verb, const struct err *err);

/* Prints the help of "serve", "log create", or of weir itself if `verb` is NULL. False if there is none. */
bool cli_help(const char *verb);
