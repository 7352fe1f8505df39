/* SPDX-License-Identifier: MIT */
/* Offload: blocking work on other threads. */
#include <pthread.h>
#include <signal.h>

#include "rt/sync.h"
#include "test_rt.h"

static pthread_t loop_thread;

struct work {
	int in;
	bool other_thread, signals_blocked;
};

static int square(void *arg)
{
	struct work *w = arg;
	sigset_t set;

	w->other_thread = !pthread_equal(pthread_self(), loop_thread);
	pthread_sigmask(SIG_SETMASK, NULL, &set);
	w->signals_blocked = sigismember(&set, SIGTERM) == 1;
	return w->in * w->in;
}

static co_fn int co_squares(void *arg)
{
	for (int i = 0; i < 100; i++) {
		struct work w = { .in = i };

		CHECK_EQ(co_offload(square, &w), i * i);
		CHECK(w.other_thread);
		CHECK(w.signals_blocked);
	}
	return 0;
}

static co_fn void co_many_square(void *arg)
{
	struct co_group g;

	loop_thread = pthread_self();
	co_group_init(&g);
	for (int i = 0; i < 20; i++)
		co_group_start(&g, "squares", co_squares, NULL);
	CHECK_EQ(co_group_wait(&g), 0);
}

static void blocking_functions_run_elsewhere_and_return_their_result(void)
{
	on_real(co_many_square, NULL);
}

static int blocks(void *arg)
{
	pthread_barrier_wait(arg);
	return -EIO;
}

static co_fn int co_blocks(void *arg)
{
	return co_offload(blocks, arg);
}

static co_fn void co_joins_barrier(void *arg)
{
	pthread_barrier_t barrier;
	struct co_group g;
	unsigned turns = 0;

	pthread_barrier_init(&barrier, NULL, 5);
	co_group_init(&g);
	for (int i = 0; i < 4; i++)
		co_group_start(&g, "blocks", co_blocks, &barrier);
	for (; turns < 1000; turns++)
		co_yield();
	CHECK_EQ(g.running, 4u);
	pthread_barrier_wait(&barrier);
	CHECK_EQ(co_group_wait(&g), -EIO);
	pthread_barrier_destroy(&barrier);
}

static void the_reactor_runs_on_while_threads_block(void)
{
	on_real(co_joins_barrier, NULL);
}

static co_fn void co_offloads_in_simulation(void *arg)
{
	uint64_t start = rt_now_ns();
	struct work w = { .in = 7 };

	loop_thread = pthread_self();
	CHECK_EQ(co_offload(square, &w), 49);
	CHECK(!w.other_thread);
	CHECK(rt_now_ns() > start);
}

static void on_a_simulated_reactor_it_runs_in_place_after_a_while(void)
{
	on_sim(1, co_offloads_in_simulation, NULL);
}

int main(void)
{
	RUN(blocking_functions_run_elsewhere_and_return_their_result);
	RUN(the_reactor_runs_on_while_threads_block);
	RUN(on_a_simulated_reactor_it_runs_in_place_after_a_while);
	return 0;
}
