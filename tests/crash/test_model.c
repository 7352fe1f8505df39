/* SPDX-License-Identifier: MIT */
/*
 * The checker of the crash tests, held against bad states made by hand and against brute force.
 */
#include "lib/test.h"
#include "model.h"
#include "util/bytes.h"
#include "util/rng.h"

#define SIZE 8192u
#define UNIT 512u

static uint64_t clk;
static struct model *m;
static uint8_t img[SIZE];
static char why[400];

static void begin(bool filled)
{
	model_destroy(m);
	clk = 0;
	m = model_create(3, SIZE, &clk);
	if (filled)
		model_fill_base(m);
	memcpy(img, m->base, SIZE);
}

static unsigned issue(enum model_kind kind, uint64_t off, uint64_t len)
{
	return model_issue(m, kind, off, len, false);
}

static unsigned done(enum model_kind kind, uint64_t off, uint64_t len)
{
	unsigned op = issue(kind, off, len);

	model_complete(m, op, 0);
	return op;
}

/* Puts part of a request into the image. */
static void put(unsigned op, uint64_t off, uint64_t len)
{
	if (m->ops[op].kind == MODEL_WRITE)
		model_data(m, op, off, img + off, len);
	else
		memset(img + off, 0, len);
}

static void put_all(unsigned op)
{
	put(op, m->ops[op].off, m->ops[op].len);
}

static const char *check(enum model_promise promise)
{
	const char *what = model_check(m, clk, promise, img, why, sizeof(why));

	return what ? what : "ok";
}

static void the_untouched_volume_is_a_prefix(void)
{
	begin(true);
	CHECK_STR(check(MODEL_ALL), "ok");
	done(MODEL_FLUSH, 0, 0);
	done(MODEL_WRITE, 0, 1000);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	CHECK_STR(check(MODEL_ALL), "lost");
}

static void a_write_that_a_flush_covers_must_be_there(void)
{
	unsigned w;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	w = done(MODEL_WRITE, 512, 2048);
	done(MODEL_FLUSH, 0, 0);
	CHECK_STR(check(MODEL_PREFIX), "lost");
	CHECK_STR(check(MODEL_DISK), "lost");
	put_all(w);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	CHECK_STR(check(MODEL_DISK), "ok");
}

static void a_write_before_the_first_flush_must_be_there(void)
{
	begin(true);
	done(MODEL_WRITE, 512, 2048);
	CHECK_STR(check(MODEL_PREFIX), "lost");
	CHECK_STR(check(MODEL_DISK), "ok");
}

static void a_fua_write_must_be_there_and_so_all_before_it(void)
{
	unsigned a, b;

	begin(false);
	done(MODEL_FLUSH, 0, 0);
	a = done(MODEL_WRITE, 0, 512);
	b = model_issue(m, MODEL_WRITE, 1024, 512, true);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	model_complete(m, b, 0);
	CHECK_STR(check(MODEL_PREFIX), "lost");
	put_all(b);
	CHECK_STR(check(MODEL_PREFIX), "hole");
	CHECK_STR(check(MODEL_DISK), "ok");
	put_all(a);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void a_flush_covers_only_what_had_returned_when_it_was_issued(void)
{
	unsigned f, w;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	w = issue(MODEL_WRITE, 0, 512);
	f = issue(MODEL_FLUSH, 0, 0);
	model_complete(m, w, 0);
	model_complete(m, f, 0);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	f = issue(MODEL_FLUSH, 0, 0);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	model_complete(m, f, -5);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void a_write_is_not_torn_whatever_its_size_and_alignment(void)
{
	unsigned w;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	w = issue(MODEL_WRITE, 100, 3000);
	put(w, 100, 412);
	CHECK_STR(check(MODEL_PREFIX), "torn");
	CHECK_STR(check(MODEL_DISK), "ok");
	put(w, 100, 2999);
	CHECK_STR(check(MODEL_PREFIX), "torn");
	put_all(w);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void a_torn_write_shows_between_two_others(void)
{
	unsigned a, b;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	a = done(MODEL_WRITE, 0, 4096);
	b = issue(MODEL_WRITE, 1024, 1024);
	put_all(a);
	put(b, 1024, 512);
	CHECK_STR(check(MODEL_PREFIX), "torn");
	put_all(b);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	put(a, 1024, 512);
	CHECK_STR(check(MODEL_PREFIX), "torn");
}

static void a_later_write_without_an_earlier_one_is_a_hole(void)
{
	unsigned a, b;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	a = done(MODEL_WRITE, 0, 512);
	b = issue(MODEL_WRITE, 4096, 512);
	put_all(b);
	CHECK_STR(check(MODEL_PREFIX), "hole");
	CHECK_STR(check(MODEL_DISK), "ok");
	put_all(a);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void writes_in_flight_together_have_any_order_but_one(void)
{
	unsigned a, b;

	begin(true);
	a = issue(MODEL_WRITE, 0, 2048);
	b = issue(MODEL_WRITE, 1024, 2048);
	model_complete(m, a, 0);
	model_complete(m, b, 0);
	put_all(a);
	put_all(b);
	CHECK_STR(check(MODEL_ALL), "ok");
	put_all(a);
	CHECK_STR(check(MODEL_ALL), "ok");
	/* Each over the other in a part of what they share: no order does that. */
	put(b, 1024, 512);
	CHECK_STR(check(MODEL_ALL), "torn");
	CHECK_STR(check(MODEL_DISK), "ok");
}

static void an_order_that_goes_in_a_circle_is_refused(void)
{
	unsigned a, b, c;

	begin(true);
	a = issue(MODEL_WRITE, 0, 4096);
	b = issue(MODEL_WRITE, 1024, 2048);
	c = issue(MODEL_WRITE, 2048, 4096);
	put_all(a);
	put_all(c);
	put_all(b);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	/* a over b here, b over a there. */
	put(a, 1024, 1024);
	CHECK_STR(check(MODEL_PREFIX), "order");
	/* a over b, b over c, c over a. */
	put(c, 3072, 1024);
	CHECK_STR(check(MODEL_PREFIX), "order");
	put(c, 2048, 1024);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	put(b, 2048, 1024);
	put(b, 1024, 1024);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	put(a, 3072, 1024);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void an_old_version_does_not_come_back(void)
{
	unsigned a, b;

	begin(true);
	a = done(MODEL_WRITE, 0, 1024);
	b = done(MODEL_WRITE, 0, 1024);
	done(MODEL_FLUSH, 0, 0);
	put_all(b);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	put_all(a);
	CHECK_STR(check(MODEL_PREFIX), "lost");
	CHECK_STR(check(MODEL_DISK), "lost");
}

static void data_does_not_come_back_after_zeroes_or_a_discard(void)
{
	for (int kind = MODEL_ZERO; kind <= MODEL_DISCARD; kind++) {
		unsigned a, z;

		begin(true);
		a = done(MODEL_WRITE, 0, 2048);
		z = done(kind, 512, 1024);
		done(MODEL_FLUSH, 0, 0);
		put_all(a);
		CHECK_STR(check(MODEL_PREFIX), "lost");
		put(z, 512, 512);
		CHECK_STR(check(MODEL_PREFIX), "torn");
		put_all(z);
		CHECK_STR(check(MODEL_PREFIX), "ok");
		memcpy(img + 512, m->base + 512, 1024);
		CHECK_STR(check(MODEL_PREFIX), "lost");
	}
}

static void a_disk_may_ignore_a_discard_but_not_lose_what_came_after(void)
{
	unsigned a, z, b;

	begin(true);
	m->weak_discard = true;
	a = done(MODEL_WRITE, 0, 2048);
	z = done(MODEL_DISCARD, 512, 1024);
	done(MODEL_FLUSH, 0, 0);
	put_all(a);
	CHECK_STR(check(MODEL_DISK), "ok");
	put_all(z);
	CHECK_STR(check(MODEL_DISK), "ok");
	memcpy(img + 512, m->base + 512, 512);
	CHECK_STR(check(MODEL_DISK), "lost");
	put_all(a);
	b = done(MODEL_WRITE, 512, 512);
	done(MODEL_FLUSH, 0, 0);
	CHECK_STR(check(MODEL_DISK), "lost");
	put_all(b);
	CHECK_STR(check(MODEL_DISK), "ok");
}

static void torn_zeroes_are_seen(void)
{
	unsigned z;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	z = issue(MODEL_ZERO, 1024, 2048);
	put(z, 1024, 1024);
	CHECK_STR(check(MODEL_PREFIX), "torn");
	put_all(z);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

/* Zeroes with two explanations: the first alone leaves a hole, the two together are a prefix. */
static void zeroes_with_several_explanations_are_searched(void)
{
	unsigned z1, z2;

	begin(true);
	done(MODEL_FLUSH, 0, 0);
	z1 = issue(MODEL_ZERO, 0, 2048);
	z2 = issue(MODEL_ZERO, 1024, 2048);
	put(z1, 1024, 1024);
	/* Only what they share: neither is whole. */
	CHECK_STR(check(MODEL_PREFIX), "order");
	put_all(z1);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	put_all(z2);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	memcpy(img, m->base, 1024);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	memcpy(img + 1024, m->base + 1024, 512);
	CHECK_STR(check(MODEL_PREFIX), "torn");
}

static void foreign_bytes_are_garbage(void)
{
	unsigned a, b;

	begin(true);
	a = done(MODEL_WRITE, 0, 1024);
	b = issue(MODEL_WRITE, 4096, 1024);
	put_all(a);
	img[700] ^= 1;
	CHECK_STR(check(MODEL_ALL), "garbage");
	put_all(a);
	memset(img + 512, 0, 8);
	CHECK_STR(check(MODEL_ALL), "garbage");
	put_all(a);
	/* The right words at the wrong place. */
	model_data(m, b, 4096, img + 2048, 512);
	CHECK_STR(check(MODEL_ALL), "garbage");
	memcpy(img + 2048, m->base + 2048, 512);
	CHECK_STR(check(MODEL_ALL), "ok");
	memset(img + 2048, 0, 512);
	CHECK_STR(check(MODEL_ALL), "garbage");
}

static void what_was_issued_after_the_cut_is_not_there(void)
{
	uint64_t cut;
	unsigned a, b;

	begin(true);
	a = issue(MODEL_WRITE, 0, 512);
	cut = clk;
	model_complete(m, a, 0);
	b = issue(MODEL_WRITE, 512, 512);
	/* At the cut `a` had not returned. */
	CHECK(!model_check(m, cut, MODEL_PREFIX, img, why, sizeof(why)));
	put_all(a);
	CHECK(!model_check(m, cut, MODEL_PREFIX, img, why, sizeof(why)));
	put_all(b);
	CHECK_STR(model_check(m, cut, MODEL_PREFIX, img, why, sizeof(why)), "garbage");
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void an_ordered_image_is_between_two_flushes(void)
{
	unsigned a, b, c;

	begin(true);
	a = done(MODEL_WRITE, 0, 1024);
	done(MODEL_FLUSH, 0, 0);
	b = done(MODEL_WRITE, 1024, 1024);
	done(MODEL_FLUSH, 0, 0);
	c = done(MODEL_WRITE, 2048, 1024);
	CHECK_STR(check(MODEL_EPOCH), "ok");
	put(a, 0, 512);
	CHECK_STR(check(MODEL_EPOCH), "ok");
	put(b, 1024, 512);
	CHECK_STR(check(MODEL_EPOCH), "future");
	put_all(a);
	CHECK_STR(check(MODEL_EPOCH), "ok");
	put(c, 2048, 512);
	CHECK_STR(check(MODEL_EPOCH), "future");
	put_all(b);
	CHECK_STR(check(MODEL_EPOCH), "ok");
	memcpy(img, m->base, 512);
	CHECK_STR(check(MODEL_EPOCH), "future");
}

static void a_rebased_history_starts_anew(void)
{
	unsigned a;

	begin(false);
	a = done(MODEL_WRITE, 0, 1024);
	put_all(a);
	model_rebase(m, img);
	CHECK_STR(check(MODEL_ALL), "ok");
	a = issue(MODEL_WRITE, 512, 1024);
	CHECK_STR(check(MODEL_PREFIX), "ok");
	put(a, 512, 512);
	CHECK_STR(check(MODEL_PREFIX), "torn");
	put_all(a);
	CHECK_STR(check(MODEL_PREFIX), "ok");
}

static void a_read_sees_nothing_older_than_what_had_returned(void)
{
	unsigned a, b;
	uint64_t t0;

	begin(true);
	a = done(MODEL_WRITE, 0, 1024);
	t0 = ++clk;
	CHECK_STR(model_check_read(m, t0, ++clk, 0, 2048, img, why, sizeof(why)), "lost");
	put_all(a);
	CHECK(!model_check_read(m, t0, ++clk, 0, 2048, img, why, sizeof(why)));
	b = issue(MODEL_WRITE, 512, 512);
	CHECK(!model_check_read(m, t0, ++clk, 100, 900, img + 100, why, sizeof(why)));
	put_all(b);
	CHECK(!model_check_read(m, t0, ++clk, 100, 900, img + 100, why, sizeof(why)));
	CHECK_STR(model_check_read(m, t0, m->ops[b].issued - 1, 100, 900, img + 100, why, sizeof(why)), "garbage");
}

/* --- Against brute force --- */

#define BRUTE_OPS 5

/* Is img the result of some ordered down-set that holds all with must? Tries every one. */
static bool brute(unsigned used, const uint8_t *now, const bool *must)
{
	bool all_must = true;

	for (unsigned i = 0; i < m->nops; i++)
		all_must &= !must[i] || (used >> i & 1);
	if (all_must && !memcmp(now, img, SIZE))
		return true;
	for (unsigned i = 0; i < m->nops; i++) {
		uint8_t next[SIZE];
		bool ready = !(used >> i & 1) && m->ops[i].kind != MODEL_FLUSH;

		for (unsigned j = 0; j < m->nops && ready; j++)
			ready = m->ops[j].kind == MODEL_FLUSH || (used >> j & 1) ||
				m->ops[j].completed > m->ops[i].issued;
		if (!ready)
			continue;
		memcpy(next, now, SIZE);
		if (m->ops[i].kind == MODEL_WRITE)
			model_data(m, i, m->ops[i].off, next + m->ops[i].off, m->ops[i].len);
		else
			memset(next + m->ops[i].off, 0, m->ops[i].len);
		if (brute(used | 1u << i, next, must))
			return true;
	}
	return false;
}

/* A few requests over few units, some in flight together, and a random mixture of them as the content. */
static void random_case(struct rng *r, bool *must)
{
	unsigned open[BRUTE_OPS + 1], nopen = 0, units = 3 + rng_below(r, 3);

	begin(rng_below(r, 2));
	for (int i = 0; i < BRUTE_OPS; i++) {
		uint64_t lo = rng_below(r, units), hi = lo + 1 + rng_below(r, units - lo);
		enum model_kind kind = rng_below(r, 3) ? MODEL_WRITE : MODEL_ZERO;

		if (i == 2 && rng_below(r, 2)) {
			kind = MODEL_FLUSH;
			lo = hi = 0;
		}
		open[nopen++] = issue(kind, lo * UNIT, (hi - lo) * UNIT);
		while (nopen && rng_below(r, 2)) {
			unsigned k = rng_below(r, nopen);

			model_complete(m, open[k], 0);
			open[k] = open[--nopen];
		}
	}
	for (unsigned i = 0; i < m->nops; i++) {
		must[i] = false;
		for (unsigned f = 0; f < m->nops; f++)
			if (m->ops[f].kind == MODEL_FLUSH &&
			    ((m->ops[f].completed != MODEL_NEVER && m->ops[i].completed < m->ops[f].issued)))
				must[i] = true;
		if (m->ops[i].completed != MODEL_NEVER) {
			bool flushed_before = false;

			for (unsigned f = 0; f < m->nops; f++)
				flushed_before |= m->ops[f].kind == MODEL_FLUSH && m->ops[f].issued <= m->ops[i].completed;
			must[i] |= !flushed_before;
		}
		if (m->ops[i].kind == MODEL_FLUSH)
			must[i] = false;
	}
	for (unsigned u = 0; u < units; u++) {
		unsigned k = rng_below(r, m->nops + 1);

		if (k < m->nops && m->ops[k].kind != MODEL_FLUSH && m->ops[k].off <= u * UNIT &&
		    m->ops[k].off + m->ops[k].len > u * UNIT)
			put(k, u * UNIT, UNIT);
	}
	/* Half of the cases: a whole order, perhaps with one unit off. */
	if (rng_below(r, 2)) {
		unsigned n = rng_below(r, m->nops + 1);

		for (unsigned i = 0; i < n; i++)
			if (m->ops[i].kind != MODEL_FLUSH)
				put_all(i);
	}
}

static void the_checker_agrees_with_brute_force(void)
{
	struct rng r;
	uint64_t n = test_scale(20000), good = 0, undecided = model_undecided;

	rng_seed(&r, test_seed());
	for (uint64_t i = 0; i < n; i++) {
		bool must[BRUTE_OPS], want;
		const char *got;

		random_case(&r, must);
		want = brute(0, m->base, must);
		got = check(MODEL_PREFIX);
		good += want;
		if (want != !strcmp(got, "ok"))
			test_fail("case %llu: brute force says %d, the checker %s (%s)", (unsigned long long)i, want, got, why);
	}
	printf("%llu of %llu were possible\n", (unsigned long long)good, (unsigned long long)n);
	CHECK(good > n / 10 && good < n - n / 10);
	CHECK_EQ(model_undecided, undecided);
}

int main(void)
{
	RUN(the_untouched_volume_is_a_prefix);
	RUN(a_write_that_a_flush_covers_must_be_there);
	RUN(a_write_before_the_first_flush_must_be_there);
	RUN(a_fua_write_must_be_there_and_so_all_before_it);
	RUN(a_flush_covers_only_what_had_returned_when_it_was_issued);
	RUN(a_write_is_not_torn_whatever_its_size_and_alignment);
	RUN(a_torn_write_shows_between_two_others);
	RUN(a_later_write_without_an_earlier_one_is_a_hole);
	RUN(writes_in_flight_together_have_any_order_but_one);
	RUN(an_order_that_goes_in_a_circle_is_refused);
	RUN(an_old_version_does_not_come_back);
	RUN(data_does_not_come_back_after_zeroes_or_a_discard);
	RUN(a_disk_may_ignore_a_discard_but_not_lose_what_came_after);
	RUN(torn_zeroes_are_seen);
	RUN(zeroes_with_several_explanations_are_searched);
	RUN(foreign_bytes_are_garbage);
	RUN(what_was_issued_after_the_cut_is_not_there);
	RUN(an_ordered_image_is_between_two_flushes);
	RUN(a_rebased_history_starts_anew);
	RUN(a_read_sees_nothing_older_than_what_had_returned);
	RUN(the_checker_agrees_with_brute_force);
	model_destroy(m);
	return 0;
}
