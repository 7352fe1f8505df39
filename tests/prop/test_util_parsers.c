/* SPDX-License-Identifier: MIT */
/*
 * Sizes, durations and option lists from random text: what was printed reads back as the same, whatever is accepted
 * is in range, and nothing that is refused changes the caller's value.
 */
#include <errno.h>

#include "lib/test.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/opts.h"
#include "util/rng.h"
#include "util/size.h"

static struct rng rng;

static const char *random_text(char *buf, size_t size)
{
	static const char alphabet[] = "0011223456789..KMGTPEkiBbxsmunh,,==ab-+ \n\x80";
	size_t len = rng_below(&rng, size);

	for (size_t i = 0; i < len; i++)
		buf[i] = alphabet[rng_below(&rng, sizeof(alphabet) - 1)];
	buf[len] = '\0';
	return buf;
}

static void what_is_accepted_is_in_range_and_what_is_refused_changes_nothing(void)
{
	static int (*const parsers[])(const char *, uint64_t *) = { size_parse, duration_parse, u64_parse };
	char text[24];

	for (uint64_t i = 0; i < test_scale(300000); i++) {
		size_t which = rng_below(&rng, 3);
		uint64_t v = 1234567;
		int rc;

		random_text(text, sizeof(text));
		rc = parsers[which](text, &v);
		CHECK(rc == 0 || rc == -EINVAL || rc == -ERANGE);
		if (rc)
			CHECK_EQ(v, 1234567u);
		else if (which < 2)
			CHECK(v <= INT64_MAX);
		if (!rc)
			CHECK(text[0] >= '0' && text[0] <= '9');
	}
}

static void exact_sizes_read_back_as_they_were(void)
{
	static const char suffix[] = "KMGTPE";
	char text[40];
	uint64_t v;

	for (uint64_t i = 0; i < test_scale(100000); i++) {
		uint64_t want = rng_u64(&rng) >> (1 + rng_below(&rng, 62));
		int unit = rng_below(&rng, 6);
		uint64_t whole = want >> (10 * (unit + 1)), eighths = want >> (10 * unit + 7) & 7;

		snprintf(text, sizeof(text), "%" PRIu64, want);
		CHECK_EQ(size_parse(text, &v), 0);
		CHECK_EQ(v, want);
		snprintf(text, sizeof(text), "%" PRIu64 ".%03" PRIu64 "%c", whole, eighths * 125, suffix[unit]);
		CHECK_EQ(size_parse(text, &v), 0);
		CHECK_EQ(v, (whole << 3 | eighths) << (10 * unit + 7));
		snprintf(text, sizeof(text), "%" PRIu64 "ns", want);
		CHECK_EQ(duration_parse(text, &v), 0);
		CHECK_EQ(v, want);
	}
}

static void printed_sizes_are_within_half_a_percent(void)
{
	char buf[16], text[16];
	uint64_t v;

	for (uint64_t i = 0; i < test_scale(100000); i++) {
		uint64_t want = rng_u64(&rng) >> (2 + rng_below(&rng, 60));
		double number, unit = 1;
		char letter;

		size_format(want, buf);
		CHECK(strlen(buf) < sizeof(buf) - 1);
		CHECK_EQ(sscanf(buf, "%lf %c", &number, &letter), 2);
		if (letter != 'B')
			for (const char *p = "KMGTPE"; ; p++) {
				unit *= 1024;
				if (*p == letter)
					break;
			}
		CHECK(number * unit >= want * 0.995 && number * unit <= want * 1.005);
		/* A whole multiple reads back exactly. */
		snprintf(text, sizeof(text), "%.0f%c", number, letter);
		if (number == (uint64_t)number) {
			CHECK_EQ(size_parse(text, &v), 0);
			CHECK(v == (uint64_t)number * (uint64_t)unit);
		}
	}
}

/* Writes `val` so that opts_parse() reads the same back. */
static char *quote(char *w, const char *val)
{
	for (; *val; val++) {
		if (*val == ',')
			*w++ = ',';
		*w++ = *val;
	}
	*w = '\0';
	return w;
}

static void option_lists_read_back_as_they_were(void)
{
	for (uint64_t i = 0; i < test_scale(20000); i++) {
		char text[OPTS_MAX * 64] = "", val[OPTS_MAX][16], key[16], *w = text;
		int n = 1 + rng_below(&rng, OPTS_MAX);
		struct err err = ERR_INIT;
		struct opts o;

		for (int k = 0; k < n; k++) {
			w += sprintf(w, "%skey%d=", k ? "," : "", k);
			w = quote(w, random_text(val[k], sizeof(val[k])));
		}
		CHECK_EQ(opts_parse(&o, text, "test", &err), 0);
		CHECK_EQ(o.n, (size_t)n);
		for (int k = 0; k < n; k++) {
			snprintf(key, sizeof(key), "key%d", k);
			CHECK_STR(opts_str(&o, key), val[k]);
		}
		CHECK_EQ(opts_finish(&o, "test", "", &err), 0);
		opts_free(&o);
	}
}

static void random_option_lists_are_parsed_or_refused_with_a_message(void)
{
	char text[200];

	for (uint64_t i = 0; i < test_scale(100000); i++) {
		struct err err = ERR_INIT;
		struct opts o;
		uint64_t v;
		int rc = opts_parse(&o, random_text(text, sizeof(text)), "test", &err);

		CHECK(rc == 0 || rc == -EINVAL);
		if (rc)
			CHECK(err.code == rc && strlen(err.msg) > 5);
		for (size_t k = 0; k < o.n; k++) {
			CHECK(o.v[k].key[0]);
			opts_size(&o, o.v[k].key, &v, &err);
		}
		opts_free(&o);
	}
}

int main(void)
{
	rng_seed(&rng, test_seed());
	RUN(what_is_accepted_is_in_range_and_what_is_refused_changes_nothing);
	RUN(exact_sizes_read_back_as_they_were);
	RUN(printed_sizes_are_within_half_a_percent);
	RUN(option_lists_read_back_as_they_were);
	RUN(random_option_lists_are_parsed_or_refused_with_a_message);
	return 0;
}
