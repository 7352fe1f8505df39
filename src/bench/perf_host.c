/* SPDX-License-Identifier: MIT */
/* `weir perf`: processor, regular expressions, name look-ups. */
#include <netdb.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "bench/perf.h"
#include "util/rng.h"

#define DNS_LOOKUPS 101		/* at most, as pveperf does */

/* The sum over all processors; 0 where the kernel has no such figure (arm64 calls it BogoMIPS, others have none). */
static double bogomips(void)
{
	FILE *in = fopen("/proc/cpuinfo", "re");
	double sum = 0;
	char line[512];

	if (!in)
		return 0;
	while (fgets(line, sizeof(line), in)) {
		const char *colon = strchr(line, ':');

		if (colon && !strncasecmp(line, "bogomips", 8))
			sum += strtod(colon + 1, NULL);
	}
	fclose(in);
	return sum;
}

/* POSIX extended expression with alternatives and repeats against a line of text that it matches near the end. */
static double regexes(const struct perf_opts *o)
{
	static const char expression[] = "(disk|log|cache)-[0-9]+: (p50|p99)=[0-9.]+(us|ms)$";
	static const char text[] = "2026-01-01T00:00:00Z host weir[4711]: volume vm-100 of pool tank on disk-17: p99=81.5us";
	uint64_t start = perf_now_ns(), count = 0, elapsed;
	regex_t re;

	if (regcomp(&re, expression, REG_EXTENDED | REG_NOSUB))
		return 0;
	while (perf_goes_on(o, start)) {
		for (int i = 0; i < 100; i++, count++)
			if (regexec(&re, text, 0, NULL, 0))
				break;
	}
	elapsed = perf_now_ns() - start;
	regfree(&re);
	return elapsed ? (double)count * 1e9 / (double)elapsed : 0;
}

void perf_host(const struct perf_opts *o, struct perf_result *r)
{
	perf_part(o, "processor");
	r->bogomips = bogomips();
	r->regex_per_s = regexes(o);
}

/* Names that do not exist, so that no cache on the way has them. */
void perf_dns(const struct perf_opts *o, struct perf_result *r)
{
	const struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM };
	uint64_t start = perf_now_ns();
	struct rng rng;

	if (!o->dns)
		return;
	perf_part(o, "name look-ups");
	rng_seed(&rng, start);
	for (r->dns_count = 0; r->dns_count < DNS_LOOKUPS && perf_goes_on(o, start); r->dns_count++) {
		struct addrinfo *found = NULL;
		char name[256];

		snprintf(name, sizeof(name), "weir%llx.%s", (unsigned long long)rng_u64(&rng), o->dns);
		if (!getaddrinfo(name, NULL, &hints, &found))
			freeaddrinfo(found);
	}
	if (r->dns_count)
		r->dns_ns = (perf_now_ns() - start) / r->dns_count;
}
