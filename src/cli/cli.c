/* SPDX-License-Identifier: MIT */
/* Options and operands of the verbs, and usage errors. */
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/err.h"
#include "util/size.h"

#define MAX_OPTS 64

/* What getopt_long() returns for the long option number i; above every character. */
#define LONG_BASE 0x100
enum { LONG_HELP = LONG_BASE + MAX_OPTS, LONG_LIST };

void cli_usage(const char *verb, const char *fmt, ...)
{
	va_list ap;

	fflush(stdout);
	fprintf(stderr, "weir%s%s: ", verb ? " " : "", verb ? verb : "");
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, "; see weir%s%s -h\n", verb ? " " : "", verb ? verb : "");
	exit(CLI_EXIT_USAGE);
}

int cli_fail(const char *verb, const struct err *err)
{
	char msg[sizeof(err->msg)] = "failed";

	if (err->code)
		memcpy(msg, err->msg, sizeof(msg));
	/* It may have words of a server or an image in it: none of them writes a second line or an escape sequence. */
	for (char *p = msg; *p; p++)
		if ((unsigned char)*p < ' ' || *p == 0x7f)
			*p = '?';
	fflush(stdout);
	fprintf(stderr, "weir %s: %s\n", verb, msg);
	return 1;
}

/* "a|b|c" */
static const char *enum_arg(const char *const *names, char *buf, size_t size)
{
	size_t len = 0;

	buf[0] = '\0';
	for (int i = 0; names[i] && len < size; i++)
		len += snprintf(buf + len, size - len, "%s%s", i ? "|" : "", names[i]);
	return buf;
}

static void list_options(const struct cli_opt *opts)
{
	char arg[256];

	for (const struct cli_opt *o = opts; o->kind != CLI_KIND_END; o++) {
		if (o->letter)
			printf("-%c ", o->letter);
		printf("--%s", o->name);
		if (o->kind == CLI_KIND_ENUM)
			printf(" %s", enum_arg(o->names, arg, sizeof(arg)));
		else if (o->kind != CLI_KIND_FLAG)
			printf(" %s", o->arg);
		putchar('\n');
	}
}

static void set_number(const char *verb, const struct cli_opt *o, const char *val,
		       int (*parse)(const char *, uint64_t *), const char *wanted)
{
	uint64_t num;
	char low[24], high[24];
	int rc = parse(val, &num);

	if (rc == -EINVAL)
		cli_usage(verb, "--%s %s: must be %s", o->name, val, wanted);
	if (!rc && num >= o->min && num <= o->max) {
		*o->num = num;
		return;
	}
	if (o->kind == CLI_KIND_SIZE)
		cli_usage(verb, "--%s %s: must be from %s to %s", o->name, val, size_format(o->min, low),
			  size_format(o->max, high));
	if (o->kind == CLI_KIND_DURATION)
		cli_usage(verb, "--%s %s: must be from %s to %s", o->name, val, duration_format(o->min, low),
			  duration_format(o->max, high));
	cli_usage(verb, "--%s %s: must be from %" PRIu64 " to %" PRIu64, o->name, val, o->min, o->max);
}

static void set_option(const char *verb, const struct cli_opt *o, const char *val)
{
	char list[256];

	switch (o->kind) {
	case CLI_KIND_FLAG:
		*o->flag = true;
		return;
	case CLI_KIND_STR:
		*o->str = val;
		return;
	case CLI_KIND_LIST:
		if (o->list->n == CLI_LIST_MAX)
			cli_usage(verb, "--%s is given more than %d times", o->name, CLI_LIST_MAX);
		o->list->v[o->list->n++] = val;
		return;
	case CLI_KIND_SIZE:
		set_number(verb, o, val, size_parse, "a size such as 4096, 64K or 10G");
		return;
	case CLI_KIND_DURATION:
		set_number(verb, o, val, duration_parse, "a duration such as 100us, 8ms or 2s");
		return;
	case CLI_KIND_U64:
		set_number(verb, o, val, u64_parse, "a number");
		return;
	case CLI_KIND_ENUM:
		for (int i = 0; o->names[i]; i++) {
			if (!strcmp(val, o->names[i])) {
				*o->choice = i;
				return;
			}
		}
		cli_usage(verb, "--%s %s: must be one of %s", o->name, val, enum_arg(o->names, list, sizeof(list)));
	case CLI_KIND_END:
		break;
	}
	abort();
}

/* Fills getopt_long()'s two tables from ours. */
static void make_tables(const struct cli_opt *opts, char *shorts, struct option *longs)
{
	int n = 0;

	/* The colon makes it tell a missing value from an unknown option. */
	*shorts++ = ':';
	*shorts++ = 'h';
	for (const struct cli_opt *o = opts; o->kind != CLI_KIND_END; o++, n++) {
		bool has_arg = o->kind != CLI_KIND_FLAG;

		if (n == MAX_OPTS)
			abort();
		*longs++ = (struct option){ o->name, has_arg, NULL, LONG_BASE + n };
		if (o->letter) {
			*shorts++ = o->letter;
			if (has_arg)
				*shorts++ = ':';
		}
	}
	*shorts = '\0';
	*longs++ = (struct option){ "help", no_argument, NULL, LONG_HELP };
	*longs++ = (struct option){ "list-options", no_argument, NULL, LONG_LIST };
	*longs = (struct option){ 0 };
}

static const struct cli_opt *find_option(const struct cli_opt *opts, int c)
{
	const struct cli_opt *o = opts;

	for (; o->kind != CLI_KIND_END; o++)
		if (c == o->letter || c == LONG_BASE + (o - opts))
			return o;
	return NULL;
}

/* getopt_long() takes "--dr" for "--drain"; scripts that use this break when an option is added. */
static void refuse_abbreviation(const char *verb, const struct cli_opt *o, char **argv)
{
	const char *word = argv[optind - 1];
	size_t len;

	if (optarg && word == optarg)
		word = argv[optind - 2];
	len = strcspn(word, "=");
	if (len != strlen(o->name) + 2)
		cli_usage(verb, "unknown option %.*s (is --%s meant?)", (int)len, word, o->name);
}

/* `c` is '?' or ':'. */
static void refuse_option(const char *verb, const struct cli_opt *opts, int c, char **argv)
{
	const struct cli_opt *o = optopt ? find_option(opts, optopt) : NULL;
	const char *word = argv[optind - 1];

	if (o && c == ':')
		cli_usage(verb, "--%s needs a value", o->name);
	if (o)
		cli_usage(verb, "--%s takes no value", o->name);
	if (word[0] == '-' && word[1] == '-')
		cli_usage(verb, "unknown option %.*s", (int)strcspn(word, "="), word);
	cli_usage(verb, "unknown option -%c", optopt);
}

static void check_operands(const char *verb, const char *operands, char **given)
{
	const char *word = operands;
	int n = 0, len;

	for (;; word += len + strspn(word + len, " ")) {
		len = strcspn(word, " ");
		if (!len)
			break;
		if (!given[n]) {
			if (word[0] == '[')
				return;
			cli_usage(verb, "%.*s is missing", (int)strcspn(word, " ."), word);
		}
		n++;
		if (memmem(word, len, "...", 3))
			return;
	}
	if (given[n])
		cli_usage(verb, "\"%s\" is one operand too many", given[n]);
}

char **cli_parse(const char *verb, const struct cli_opt *opts, const char *operands, int argc, char **argv)
{
	char shorts[2 * MAX_OPTS + 3];
	struct option longs[MAX_OPTS + 3];
	const struct cli_opt *o;
	int c;

	make_tables(opts, shorts, longs);
	opterr = 0;
	optind = 0;
	for (;;) {
		optopt = 0;
		c = getopt_long(argc, argv, shorts, longs, NULL);
		if (c == -1)
			break;
		if (c == 'h' || c == LONG_HELP)
			exit(!cli_help(verb));
		if (c == LONG_LIST) {
			list_options(opts);
			exit(0);
		}
		if (c == '?' || c == ':')
			refuse_option(verb, opts, c, argv);
		o = find_option(opts, c);
		if (c >= LONG_BASE)
			refuse_abbreviation(verb, o, argv);
		set_option(verb, o, optarg);
	}
	check_operands(verb, operands, argv + optind);
	return argv + optind;
}

static const char *verb_names(const struct cli_verb *verbs, char *buf, size_t size)
{
	size_t len = 0;

	buf[0] = '\0';
	for (int i = 0; verbs[i].name && len < size; i++)
		len += snprintf(buf + len, size - len, "%s%s", i ? ", " : "", verbs[i].name);
	return buf;
}

int cli_dispatch(const char *verb, const struct cli_verb *verbs, int argc, char **argv)
{
	char names[256];

	verb_names(verbs, names, sizeof(names));
	if (argc < 2)
		cli_usage(verb, "what to do is missing: %s", names);
	if (!strcmp(argv[1], "-h") || !strcmp(argv[1], "--help"))
		return !cli_help(verb);
	for (const struct cli_verb *v = verbs; v->name; v++)
		if (!strcmp(v->name, argv[1]))
			return v->run(argc - 1, argv + 1);
	cli_usage(verb, "there is no \"%s\"; known are: %s", argv[1], names);
}
