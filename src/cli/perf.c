/* SPDX-License-Identifier: MIT */
/* weir perf: how fast, and how honestly, a place syncs. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/perf.h"
#include "blk/spec.h"
#include "cli/cli.h"
#include "format/qcow2/qcow2.h"
#include "util/err.h"

#define SECOND 1000000000ull
#define EXIT_BY_SIGNAL 128

static volatile sig_atomic_t stop;

/* The second signal ends at once. */
static void on_signal(int sig)
{
	stop = sig;
	signal(sig, SIG_DFL);
}

static void catch_signals(void)
{
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction sa = { .sa_handler = on_signal };

	sigemptyset(&sa.sa_mask);
	for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
		sigaction(signals[i], &sa, NULL);
}

static void show_progress(void *arg, const char *part)
{
	fprintf(stderr, "\r\033[K%s ...", part);
}

int cli_perf(int argc, char **argv)
{
	struct perf_opts o = { .part_ns = 3 * SECOND, .stop = &stop };
	struct perf_result *r;
	struct err err = ERR_INIT;
	bool json = false, terminal = isatty(STDERR_FILENO);
	const struct cli_opt opts[] = {
		CLI_DURATION("seconds", 's', "N", &o.part_ns, SECOND / 100, 3600 * SECOND),
		CLI_FLAG("write", 'w', &o.write),
		CLI_STR("dns", 0, "DOMAIN", &o.dns),
		CLI_FLAG("json", 'j', &json),
		CLI_END
	};
	char **operand = cli_parse("perf", opts, "[DIR|DISK]", argc, argv);
	int rc;

	o.target = operand[0] ? operand[0] : ".";
	if (terminal)
		o.progress = show_progress;
	r = malloc(sizeof(*r));
	if (!r)
		return EXIT_FAILURE;
	catch_signals();
	backends_register();
	disk_register_format(&qcow2_format);
	rc = perf_run(&o, r, &err);
	if (terminal)
		fputs("\r\033[K", stderr);
	if (!rc && json)
		rc = perf_print_json(&o, r, stdout);
	else if (!rc)
		perf_print(&o, r, stdout);
	free(r);
	if (rc && stop) {
		cli_fail("perf", &err);
		return EXIT_BY_SIGNAL + stop;
	}
	return rc ? cli_fail("perf", &err) : EXIT_SUCCESS;
}
