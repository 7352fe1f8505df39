/* SPDX-License-Identifier: MIT */
/* Mailbox: posts from threads and signal handlers, calls between reactors, holds. */
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#include "rt/sync.h"
#include "test_rt.h"

/* Posts from threads */

#define THREADS 4
#define POSTS 20000

struct letter {
	struct rt_msg msg;
	unsigned thread, n;
};

static struct rt *target;
static unsigned received[THREADS];

static void receive(struct rt_msg *m)
{
	struct letter *l = container_of(m, struct letter, msg);

	CHECK(rt_self() == target);
	/* In the order of its thread, none lost, none twice. */
	CHECK_EQ(received[l->thread], l->n);
	received[l->thread]++;
	free(l);
}

static void *post_many(void *arg)
{
	for (unsigned n = 0; n < POSTS; n++) {
		struct letter *l = malloc(sizeof(*l));

		*l = (struct letter){ .msg.fn = receive, .thread = (unsigned)(uintptr_t)arg, .n = n };
		rt_post(target, &l->msg);
		/* Now and then let the reactor fall asleep. */
		if (n % 5000 == 0)
			usleep(2000);
	}
	rt_release(target);
	return NULL;
}

static co_fn void co_nothing(void *arg)
{
}

static void posts_of_each_thread_arrive_once_and_in_order(void)
{
	pthread_t t[THREADS];

	target = make_rt(NULL);
	memset(received, 0, sizeof(received));
	for (uintptr_t i = 0; i < THREADS; i++) {
		rt_hold(target);
		CHECK_EQ(pthread_create(&t[i], NULL, post_many, (void *)i), 0);
	}
	/* Only the holds keep it running. */
	CHECK_EQ(rt_run(target, co_nothing, NULL), 0);
	/* Nothing touches a reactor after its last hold was released. */
	rt_destroy(target);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(t[i], NULL);
		CHECK_EQ(received[i], (unsigned)POSTS);
	}
}

static void *release_soon(void *arg)
{
	usleep(2000);
	rt_release(arg);
	return NULL;
}

static void a_hold_keeps_the_reactor_running(void)
{
	struct rt *rt = make_rt(NULL);
	pthread_t t;
	uint64_t start;

	for (int i = 0; i < 3; i++) {
		rt_hold(rt);
		start = rt_now_ns();
		CHECK_EQ(pthread_create(&t, NULL, release_soon, rt), 0);
		CHECK_EQ(rt_run(rt, co_nothing, NULL), 0);
		CHECK(rt_now_ns() - start >= 1900000);
		pthread_join(t, NULL);
	}
	/* Released before it runs. */
	rt_hold(rt);
	rt_release(rt);
	CHECK_EQ(rt_run(rt, co_nothing, NULL), 0);
	rt_destroy(rt);
}

/* Signals */

#define SIGNALS 200

static struct co *signal_waiter;
static struct rt_msg signal_msg;
static volatile sig_atomic_t msg_free = 1;
static unsigned signals_seen;

static void signal_arrived(struct rt_msg *m)
{
	signals_seen++;
	msg_free = 1;
	if (signal_waiter)
		co_wake(signal_waiter);
}

static void on_signal(int sig)
{
	int saved = errno;

	if (!msg_free)
		return;
	msg_free = 0;
	rt_post(target, &signal_msg);
	if (errno != saved)
		_exit(1);
}

static co_fn void co_waits_for_signals(void *arg)
{
	struct itimerval it = { { 0, 200 }, { 0, 200 } }, off = { 0 };

	signal_msg.fn = signal_arrived;
	signal_waiter = co_self();
	setitimer(ITIMER_REAL, &it, NULL);
	while (signals_seen < SIGNALS) {
		/* Asleep, and busy, when the signal comes. */
		if (signals_seen % 2)
			co_park("a signal");
		else
			co_yield();
	}
	setitimer(ITIMER_REAL, &off, NULL);
	signal_waiter = NULL;
}

static void a_signal_handler_may_post(void)
{
	struct sigaction sa = { .sa_handler = on_signal };

	target = make_rt(NULL);
	sigaction(SIGALRM, &sa, NULL);
	CHECK_EQ(rt_run(target, co_waits_for_signals, NULL), 0);
	signal(SIGALRM, SIG_IGN);
	rt_destroy(target);
}

/* Calls between reactors */

struct peer {
	struct rt *rt;
	struct co *keeper;
	pthread_t thread;
	unsigned calls;
};

static co_fn void co_serves_until_told(void *arg)
{
}

static void *run_peer(void *arg)
{
	struct peer *p = arg;

	CHECK_EQ(rt_run(p->rt, co_serves_until_told, p), 0);
	return NULL;
}

static co_fn int co_counts_there(void *arg)
{
	struct peer *p = arg;

	CHECK(rt_self() == p->rt);
	CHECK(co_self() != NULL);
	co_yield();
	return (int)++p->calls;
}

static struct peer peers[2];

static co_fn int co_calls_back(void *arg)
{
	return co_call(arg, co_counts_there, &peers[0]) + 1000;
}

static co_fn int co_calls_often(void *arg)
{
	struct peer *p = arg;

	for (int i = 0; i < 500; i++)
		CHECK(co_call(p->rt, co_counts_there, p) > 0);
	return 0;
}

static co_fn void co_calls_peers(void *arg)
{
	struct co_group g;

	co_group_init(&g);
	for (int i = 0; i < 4; i++)
		co_group_start(&g, "caller", co_calls_often, &peers[i % 2]);
	CHECK_EQ(co_group_wait(&g), 0);
	CHECK_EQ(peers[1].calls, 1000u);
	CHECK_EQ(peers[0].calls, 1000u);
	/* There and back again. */
	CHECK_EQ(co_call(peers[1].rt, co_calls_back, peers[0].rt), 2001);
	/* To itself: in place. */
	CHECK_EQ(co_call(peers[0].rt, co_counts_there, &peers[0]), 1002);
	rt_release(peers[1].rt);
}

static void a_call_runs_there_and_returns_its_result(void)
{
	for (int i = 0; i < 2; i++)
		peers[i] = (struct peer){ .rt = make_rt(NULL) };
	rt_hold(peers[1].rt);
	CHECK_EQ(pthread_create(&peers[1].thread, NULL, run_peer, &peers[1]), 0);
	CHECK_EQ(rt_run(peers[0].rt, co_calls_peers, NULL), 0);
	rt_destroy(peers[0].rt);
	pthread_join(peers[1].thread, NULL);
	rt_destroy(peers[1].rt);
}

static co_fn int co_never_runs(void *arg)
{
	return 0;
}

static co_fn void co_parks_forever(void *arg)
{
	signal_waiter = co_self();
	co_park("the end of the test");
}

static void wake_keeper(struct rt_msg *m)
{
	co_wake(signal_waiter);
}

static co_fn void co_calls_full_peer(void *arg)
{
	struct rt_msg m = { .fn = wake_keeper };

	CHECK_EQ(co_call(arg, co_never_runs, NULL), -EAGAIN);
	rt_post(arg, &m);
	/* `m` must outlive its delivery: the call comes after it. */
	while (co_call(arg, co_never_runs, NULL) < 0)
		co_sleep_ns(1000000);
	rt_release(arg);
}

static void *run_full(void *arg)
{
	CHECK_EQ(rt_run(arg, co_parks_forever, NULL), 0);
	return NULL;
}

static void a_call_to_a_reactor_without_room_says_so(void)
{
	struct rt *full = make_rt(&(struct rt_config){ .coroutines = 1 }), *rt = make_rt(NULL);
	pthread_t t;

	rt_hold(full);
	CHECK_EQ(pthread_create(&t, NULL, run_full, full), 0);
	usleep(10000);
	CHECK_EQ(rt_run(rt, co_calls_full_peer, full), 0);
	pthread_join(t, NULL);
	rt_destroy(full);
	rt_destroy(rt);
}

/* A message posted on a simulated reactor is delivered before time goes on. */
static unsigned got_at_home;

static void count_at_home(struct rt_msg *m)
{
	got_at_home++;
}

static co_fn void co_posts_home(void *arg)
{
	struct rt_msg m[3] = { { .fn = count_at_home }, { .fn = count_at_home }, { .fn = count_at_home } };
	uint64_t now = rt_now_ns();

	for (int i = 0; i < 3; i++)
		rt_post(rt_self(), &m[i]);
	CHECK_EQ(got_at_home, 0u);
	co_sleep_ns(1);
	CHECK_EQ(got_at_home, 3u);
	CHECK_EQ(rt_now_ns(), now + 1);
}

static void a_simulated_reactor_has_a_mailbox_too(void)
{
	on_sim(1, co_posts_home, NULL);
}

/* Threads of reactors */

static unsigned ended_here;

static void destroy_here(void *arg)
{
	rt_destroy(arg);
	ended_here++;
}

static co_fn int co_signals_are_blocked(void *arg)
{
	sigset_t set;

	CHECK(rt_self() == arg);
	CHECK(!pthread_sigmask(SIG_SETMASK, NULL, &set));
	CHECK(sigismember(&set, SIGTERM) && sigismember(&set, SIGALRM));
	CHECK(!sigismember(&set, SIGSEGV) && !sigismember(&set, SIGBUS) && !sigismember(&set, SIGSYS));
	return 7;
}

static co_fn void co_sleeps_there(void *arg)
{
	co_sleep_ns(5000000);
	++*(unsigned *)arg;
}

static co_fn int co_leaves_work(void *arg)
{
	return co_spawn("sleeper", co_sleeps_there, arg);
}

static struct rt *threaded[3];
static unsigned slept[3];

static co_fn void co_uses_threads(void *arg)
{
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(co_call(threaded[i], co_signals_are_blocked, threaded[i]), 7);
		CHECK_EQ(co_call(threaded[i], co_leaves_work, &slept[i]), 0);
	}
}

static void a_reactor_on_a_thread_ends_when_told_and_idle(void)
{
	struct rt *rt = make_rt(NULL);
	struct rt_thread *t[3];

	for (int i = 0; i < 3; i++) {
		threaded[i] = make_rt(NULL);
		CHECK_EQ(rt_thread_start(threaded[i], "peer", destroy_here, threaded[i], &t[i]), 0);
	}
	CHECK_EQ(rt_run(rt, co_uses_threads, NULL), 0);
	for (int i = 0; i < 3; i++) {
		rt_thread_end(t[i]);
		CHECK_EQ(ended_here, i + 1u);
		CHECK_EQ(slept[i], 1u);
	}
	rt_thread_end(NULL);
	rt_destroy(rt);
}

int main(void)
{
	RUN(posts_of_each_thread_arrive_once_and_in_order);
	RUN(a_hold_keeps_the_reactor_running);
	RUN(a_signal_handler_may_post);
	RUN(a_call_runs_there_and_returns_its_result);
	RUN(a_call_to_a_reactor_without_room_says_so);
	RUN(a_simulated_reactor_has_a_mailbox_too);
	RUN(a_reactor_on_a_thread_ends_when_told_and_idle);
	return 0;
}
