/* SPDX-License-Identifier: MIT */
/*
 * Command line of the crash tests: which variants, which seeds, which cut; progress, figures and reports.
 */
#include <errno.h>
#include <getopt.h>
#include <malloc.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "crash.h"
#include "rt/buf.h"
#include "util/err.h"

#define STUCK_SECONDS 120	/* of real time without a finished cut: a loop that never suspends */

struct crash_opts crash_opts;
uint64_t crash_at_cut, crash_at_cut2, crash_cuts, crash_until;

static const struct variant *now_variant;
static uint64_t now_seed;
static const char *program;

static void reproduce(char *buf, size_t size)
{
	int n = snprintf(buf, size, "%s --variant %s --seed %llu", program, now_variant->name, (unsigned long long)now_seed);

	if (crash_at_cut)
		n += snprintf(buf + n, size - n, " --cut %llu", (unsigned long long)crash_at_cut);
	if (crash_at_cut2)
		snprintf(buf + n, size - n, " --cut2 %llu", (unsigned long long)crash_at_cut2);
}

void crash_fail(const char *what, const char *fmt, ...)
{
	char command[300];
	va_list ap;

	reproduce(command, sizeof(command));
	printf("\nFAILED: %s\n  ", what);
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("\n  reproduce: %s\n", command);
	fflush(stdout);
	_exit(1);
}

static void on_signal(int sig)
{
	char command[300], line[400];
	int n;

	reproduce(command, sizeof(command));
	n = snprintf(line, sizeof(line), "\nFAILED: %s\n  reproduce: %s\n",
		     sig == SIGALRM ? "stuck (no cut finished in time, nothing suspends)" : strsignal(sig), command);
	(void)!write(STDOUT_FILENO, line, n);
	signal(sig, SIG_DFL);
	raise(sig);
}

static void on_hang(struct rt_timer *t)
{
	printf("\ncoroutines:\n");
	fflush(stdout);
	rt_dump_tasks(rt_self(), stdout);
	crash_fail("hang", "nothing has ended in %llu s of virtual time", (unsigned long long)(CRASH_HANG_NS / 1000000000));
}

struct watched {
	co_entry *fn;
	void *arg;
	uint64_t start_ns;
};

static co_fn void co_watched(void *arg)
{
	struct watched *x = arg;
	struct rt_timer watchdog = RT_TIMER_INIT;

	/* The clock of a machine goes on while it is off. */
	if (rt_now_ns() < x->start_ns)
		co_sleep_ns(x->start_ns - rt_now_ns() + 1000000000);
	rt_timer_arm(&watchdog, rt_now_ns() + CRASH_HANG_NS, on_hang);
	x->fn(x->arg);
	rt_timer_cancel(&watchdog);
}

static struct rt *the_reactor(void)
{
	static const struct rt_config config = { .coroutines = 200 };
	static struct rt *rt;
	struct rt_bufpool *bufs;
	struct err err = ERR_INIT;

	if (rt)
		return rt;
	if (rt_create_sim(&config, 0, &rt, &err) || rt_bufpool_create(rt, 1, &bufs, &err)) {
		printf("%s\n", err.msg);
		exit(1);
	}
	rt_set_bufs(rt, bufs);
	return rt;
}

void crash_run(uint64_t start_ns, uint64_t seed, co_entry *fn, void *arg)
{
	struct rt *rt = the_reactor();
	struct watched x = { fn, arg, start_ns };
	int ret;

	alarm(STUCK_SECONDS);
	rt_sim_reseed(rt, seed);
	ret = rt_run(rt, co_watched, &x);
	if (ret)
		crash_fail("deadlock", "the reactor ended with %s", strerror(-ret));
}

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static const struct variant *find_variant(const char *name)
{
	for (const struct variant *v = crash_variants; v->name; v++)
		if (!strcmp(v->name, name))
			return v;
	fprintf(stderr, "%s: no variant \"%s\"; --list shows them\n", program, name);
	exit(2);
}

static void run_seed(const struct variant *v, uint64_t seed)
{
	struct scenario sc;
	struct rng r;

	now_variant = v;
	now_seed = seed;
	scenario_init(&sc, v->name, seed);
	rng_seed(&r, ~seed);
	if (v->adjust)
		v->adjust(&sc, &r);
	if (crash_opts.verbose)
		scenario_print(&sc);
	v->run(&sc);
}

/* Sanitizers make everything ten times slower, TSan thirty. Clang tells of them by another name than gcc. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if __has_feature(thread_sanitizer) || defined(__SANITIZE_THREAD__)
#define CUTS_PCT 3
#elif __has_feature(address_sanitizer) || defined(__SANITIZE_ADDRESS__)
#define CUTS_PCT 10
#else
#define CUTS_PCT 100
#endif

/* Runs seeds until `seeds` are done or, if that is 0, until `cuts` are. */
static void run_variant(const struct variant *v, uint64_t seed, uint64_t seeds, uint64_t cuts)
{
	uint64_t first = crash_cuts, n = 0;
	double began = seconds(), told = began;

	crash_until = CUTS_PCT < 100 && !seeds ? first + cuts : 0;
	while (seeds ? n < seeds : crash_cuts - first < cuts) {
		run_seed(v, seed + n++);
		if (isatty(STDOUT_FILENO) && seconds() - told > 0.5) {
			told = seconds();
			printf("\r%-8s seed %llu, %llu cuts, %.0f cuts/s ", v->name, (unsigned long long)(seed + n),
			       (unsigned long long)(crash_cuts - first), (crash_cuts - first) / (told - began));
			fflush(stdout);
		}
	}
	printf("%s%-8s %6llu cuts of %llu seeds in %.1f s (%.0f/s): %s\n", isatty(STDOUT_FILENO) ? "\r" : "", v->name,
	       (unsigned long long)(crash_cuts - first), (unsigned long long)n, seconds() - began,
	       (crash_cuts - first) / (seconds() - began + 1e-9), v->promise);
	fflush(stdout);
}

static uint64_t scaled(uint64_t cuts)
{
	const char *s = getenv("WEIR_CRASH_PERCENT");
	uint64_t pct = CUTS_PCT;

	if (s && *s)
		pct = strtoull(s, NULL, 0);
	return cuts * pct / 100 + 1;
}

static void usage(void)
{
	printf("usage: %s [--variant NAME] [--seed S] [--seeds N | --cuts N] [--cut N [--cut2 N]] [-v] [--list]\n"
	       "Without --seeds, seeds are taken until N cuts are verified (default 1000, scaled by WEIR_CRASH_PERCENT).\n", program);
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "variant", 1, NULL, 'V' }, { "seed", 1, NULL, 's' }, { "seeds", 1, NULL, 'n' }, { "cuts", 1, NULL, 'c' },
		{ "cut", 1, NULL, '1' }, { "cut2", 1, NULL, '2' }, { "list", 0, NULL, 'l' }, { "verbose", 0, NULL, 'v' },
		{ "help", 0, NULL, 'h' }, { 0 },
	};
	const struct variant *only = NULL;
	uint64_t seed = 1, seeds = 0, cuts = 1000;
	int c;

	program = argv[0];
	/* Volumes' contents come and go with each cut: keep their pages. */
	mallopt(M_MMAP_THRESHOLD, 64 << 20);
	mallopt(M_TRIM_THRESHOLD, 512 << 20);
	while ((c = getopt_long(argc, argv, "vh", options, NULL)) != -1) {
		switch (c) {
		case 'V': only = find_variant(optarg); break;
		case 's': seed = strtoull(optarg, NULL, 0); break;
		case 'n': seeds = strtoull(optarg, NULL, 0); break;
		case 'c': cuts = strtoull(optarg, NULL, 0); break;
		case '1': crash_opts.cut = strtoull(optarg, NULL, 0); break;
		case '2': crash_opts.cut2 = strtoull(optarg, NULL, 0); break;
		case 'v': crash_opts.verbose = true; break;
		case 'l':
			for (const struct variant *v = crash_variants; v->name; v++)
				printf("%-10s %s\n", v->name, v->promise);
			return 0;
		case 'h': usage(); return 0;
		default: usage(); return 2;
		}
	}
	if (crash_opts.cut && !seeds)
		seeds = 1;
	for (int sig = 0; sig < 3; sig++)
		signal((const int[]){ SIGALRM, SIGABRT, SIGSEGV }[sig], on_signal);
	for (const struct variant *v = crash_variants; v->name; v++)
		if (only ? v == only : v->promise[0] != '(')
			run_variant(v, seed, seeds, scaled(cuts));
	if (model_undecided)
		printf("%llu checks were undecided\n", (unsigned long long)model_undecided);
	return 0;
}
