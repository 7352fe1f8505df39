/* SPDX-License-Identifier: MIT */
/* The table of verbs. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "export/fuse/server.h"

/* weir help [VERB [COMMAND]] */
static int cli_help_verb(int argc, char **argv)
{
	char verb[64];

	if (argc > 3)
		cli_usage(NULL, "help: at most a verb and its command can be named");
	if (argc > 1 && argv[1][0] == '-')
		argc = 1;
	if (argc < 2)
		return !cli_help(NULL);
	snprintf(verb, sizeof(verb), "%s%s%s", argv[1], argc > 2 ? " " : "", argc > 2 ? argv[2] : "");
	if (!cli_help(verb))
		cli_usage(NULL, "there is no verb \"%s\"", verb);
	return 0;
}

static const struct cli_verb verbs[] = {
	{ "serve", cli_serve },
	{ "log", cli_log },
	{ "cache", cli_cache },
	{ "image", cli_image },
	{ "map", cli_map },
	{ "unmap", cli_unmap },
	{ "perf", cli_perf },
	{ "stat", cli_stat },
	{ "advise", cli_advise },
	{ "help", cli_help_verb },
	{ NULL, NULL }
};

int main(int argc, char **argv)
{
	int rc;

	/* A file that would be larger than this process may make one (ulimit -f) is an error like any other, and no end of the process. */
	signal(SIGXFSZ, SIG_IGN);
	if (argc > 1 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))) {
		printf("weir %s\n", WEIR_VERSION);
		rc = 0;
	} else if (argc == 3 && !strcmp(argv[1], FUSE_UNMOUNTER)) {
		rc = fuse_unmounter_main(atoi(argv[2]));	/* started by weir itself, and no verb for people */
	} else {
		rc = cli_dispatch(NULL, verbs, argc, argv);
	}
	/* Output that did not get where it should (a full disk, a closed pipe) is a failure. */
	if (fflush(stdout) || ferror(stdout)) {
		perror("weir: cannot write to standard output");
		return rc ? rc : 1;
	}
	return rc;
}
