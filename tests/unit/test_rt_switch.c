/* SPDX-License-Identifier: MIT */
/*
 * What a switch keeps, in terms of C: many live values, integer and floating, across switches between coroutines
 * that all do the same. Needs no ring, so that it also runs where only the processor is emulated.
 */
#include <fenv.h>

#include "test_rt.h"

#define TASKS 40
#define STEPS 200

static unsigned finished;

static co_fn void co_computes(void *arg)
{
	uint64_t seed = (uintptr_t)arg, a = seed, b = seed + 1, c = seed + 2, d = seed + 3, e = seed + 4, f = seed + 5;
	double p = (double)seed, q = p + 0.5, r = p + 0.25, s = p + 0.125, t = p * 2, u = p * 3, v = p * 4, w = p * 5;
	uint64_t sum = 0, expected = 0;
	double fsum = 0, fexpected = 0;

	for (unsigned i = 0; i < STEPS; i++) {
		/* All of these live across the switch, in registers as far as those go. */
		a += 1, b += 3, c += 5, d += 7, e += 11, f += 13;
		p += 1, q += 2, r += 3, s += 4, t += 5, u += 6, v += 7, w += 8;
		co_yield();
		sum += a + b + c + d + e + f;
		fsum += p + q + r + s + t + u + v + w;
	}
	for (unsigned i = 1; i <= STEPS; i++) {
		expected += 6 * seed + 15 + 40ull * i;
		fexpected += 18 * (double)seed + 0.875 + 36.0 * i;
	}
	CHECK_EQ(sum, expected);
	CHECK(fsum == fexpected);
	finished++;
}

static co_fn void co_starts_computing(void *arg)
{
	finished = 0;
	for (uintptr_t i = 0; i < TASKS; i++)
		CHECK_EQ(co_spawn("computes", co_computes, (void *)(i * 1000)), 0);
}

static void live_values_survive_switches(void)
{
	on_sim(1, co_starts_computing, NULL);
	CHECK_EQ(finished, (unsigned)TASKS);
}

static co_fn void co_rounds(void *arg)
{
	int mode = (int)(intptr_t)arg;

	CHECK_EQ(fegetround(), FE_TONEAREST);
	fesetround(mode);
	for (int i = 0; i < 10; i++) {
		co_yield();
		CHECK_EQ(fegetround(), mode);
	}
	fesetround(FE_TONEAREST);
}

static co_fn void co_starts_rounding(void *arg)
{
	CHECK_EQ(co_spawn("up", co_rounds, (void *)(intptr_t)FE_UPWARD), 0);
	CHECK_EQ(co_spawn("down", co_rounds, (void *)(intptr_t)FE_DOWNWARD), 0);
	for (int i = 0; i < 20; i++) {
		co_yield();
		CHECK_EQ(fegetround(), FE_TONEAREST);
	}
}

static void the_rounding_mode_is_each_coroutines_own(void)
{
	on_sim(1, co_starts_rounding, NULL);
}

static co_fn void co_formats(void *arg)
{
	char buf[64];

	/* Variadic, with floating point: it faults where the stack is not aligned. */
	snprintf(buf, sizeof(buf), "%d %.3f %d %.3f", 1, 2.5, 3, 4.25);
	CHECK_STR(buf, "1 2.500 3 4.250");
}

static void a_coroutine_starts_with_an_aligned_stack(void)
{
	on_sim(1, co_formats, NULL);
}

int main(void)
{
	RUN(live_values_survive_switches);
	RUN(the_rounding_mode_is_each_coroutines_own);
	RUN(a_coroutine_starts_with_an_aligned_stack);
	return 0;
}
