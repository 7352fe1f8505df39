/* SPDX-License-Identifier: MIT */
/* Pollers, watched eventfds, signals, and shared memory that vanishes. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "rt/io.h"
#include "rt/shm.h"
#include "rt/watch.h"
#include "test_rt.h"

#define MS 1000000ull

/* --- Pollers --- */

static struct {
	uint64_t work, seen;	/* the memory that is looked at */
	unsigned polls, sleeps;
	struct co *waiter;
	int fd;
} p;

static bool poll_memory(struct rt_poller *poller)
{
	p.polls++;
	if (__atomic_load_n(&p.work, __ATOMIC_ACQUIRE) == p.seen)
		return false;
	p.seen++;
	if (p.waiter)
		co_wake(p.waiter);
	p.waiter = NULL;
	return true;
}

static void about_to_sleep(struct rt_poller *poller)
{
	p.sleeps++;
}

static void *add_work(void *arg)
{
	uint64_t one = 1;

	usleep(20000);
	__atomic_store_n(&p.work, 1, __ATOMIC_RELEASE);
	CHECK_EQ(write(p.fd, &one, 8), 8);
	return NULL;
}

static co_fn void co_poller_finds_work(void *arg)
{
	struct rt_poller poller = { .poll = poll_memory, .sleep = about_to_sleep };
	struct rt_watch *w;
	pthread_t thread;

	p.fd = eventfd(0, EFD_CLOEXEC);
	w = rt_watch_start(p.fd, NULL, NULL);
	rt_poller_add(&poller);
	CHECK(!pthread_create(&thread, NULL, add_work, NULL));
	p.waiter = co_self();
	co_park("work");
	CHECK_EQ(p.seen, 1);
	/* it was asleep meanwhile: it said so, and polled a few times, not for 20 ms */
	CHECK(p.sleeps >= 1);
	CHECK(p.polls < 1000);
	pthread_join(thread, NULL);
	rt_poller_del(&poller);
	rt_watch_stop(w);
	close(p.fd);
}

static void a_sleeping_reactor_is_woken_to_poll(void)
{
	on_real(co_poller_finds_work, NULL);
}

/* Work that appears between the last look and the sleep: `sleep` is called, then `poll` once more. */
static void work_appears(struct rt_poller *poller)
{
	p.sleeps++;
	p.work++;
}

static co_fn void co_looks_once_more(void *arg)
{
	struct rt_poller poller = { .poll = poll_memory, .sleep = work_appears };

	memset(&p, 0, sizeof(p));
	rt_poller_add(&poller);
	p.waiter = co_self();
	co_park("work");
	CHECK_EQ(p.sleeps, 1);
	CHECK_EQ(p.seen, 1);
	rt_poller_del(&poller);
}

static void work_that_appears_before_the_sleep_is_seen(void)
{
	on_real(co_looks_once_more, NULL);
}

/* --- Watches and signals --- */

static unsigned events;

static void event(void *arg)
{
	events++;
	co_wake(arg);
}

static co_fn void co_watch(void *arg)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), back = eventfd(0, EFD_CLOEXEC);
	struct rt_watch *w = rt_watch_start(fd, event, co_self());
	uint64_t one = 1, value, sum = 0;

	events = 0;
	for (int i = 1; i <= 10; i++) {
		CHECK_EQ(write(fd, &one, 8), 8);
		co_park("an event");
		CHECK_EQ(events, i);
		rt_event_signal(back);
	}
	/* A blocking one is written to from a thread of the kernel's, so that not all may be there at once. */
	while (sum < 10) {
		CHECK(co_io_poll(back, POLLIN, 0) > 0);
		CHECK_EQ(read(back, &value, 8), 8);
		sum += value;
	}
	CHECK_EQ(sum, 10);
	rt_watch_stop(w);
	CHECK_EQ(write(fd, &one, 8), 8);
	co_sleep_ns(5 * MS);
	CHECK_EQ(events, 10);
	/* one that blocks and is full does not stop the reactor */
	value = UINT64_MAX - 1;
	CHECK_EQ(write(back, &value, 8), 8);
	for (int i = 0; i < 3; i++) {
		rt_event_signal(back);
		co_sleep_ns(MS);
	}
	CHECK_EQ(read(back, &value, 8), 8);
	co_sleep_ns(5 * MS);
	co_io_close(back);
	close(fd);
}

static void events_arrive_and_signals_never_block(void)
{
	on_real(co_watch, NULL);
}

/* --- Memory --- */

static void memory_that_is_cut_becomes_zeroes(void)
{
	int fd = memfd_create("test", 0);
	struct err err = ERR_INIT;
	struct rt_shm a, b;
	unsigned losses = rt_shm_losses();

	CHECK(!ftruncate(fd, 1 << 20));
	CHECK_EQ(rt_shm_map(&a, fd, 0, 1 << 20, &err), 0);
	CHECK_EQ(rt_shm_map(&b, fd, 65536, 4096, &err), 0);
	memset(a.base, 7, 1 << 20);
	CHECK_EQ(b.base[4095], 7);
	CHECK_EQ(rt_shm_map(&b, fd, 1 << 20, 4096, NULL), -EINVAL);
	CHECK_EQ(rt_shm_map(&b, fd, 65536, 4096, &err), 0);
	CHECK(!ftruncate(fd, 4096));
	CHECK_EQ(a.base[0], 7);
	CHECK(!rt_shm_lost(&a));
	CHECK_EQ(shm_load64(a.base + 8192), 0);
	CHECK(rt_shm_lost(&a));
	CHECK(!rt_shm_lost(&b));
	a.base[500000] = 1;
	shm_store16(b.base, 5);
	CHECK(rt_shm_lost(&b));
	CHECK_EQ(rt_shm_losses(), losses + 2);
	rt_shm_unmap(&a);
	rt_shm_unmap(&b);
	rt_shm_unmap(&b);
	close(fd);
}

static void what_cannot_be_mapped_is_refused(void)
{
	int fd = memfd_create("test", 0), sock = eventfd(0, 0);
	struct rt_shm m;

	CHECK(!ftruncate(fd, 8192));
	CHECK_EQ(rt_shm_map(&m, fd, 0, 0, NULL), -EINVAL);
	CHECK_EQ(rt_shm_map(&m, fd, 4096, 8192, NULL), -EINVAL);
	CHECK_EQ(rt_shm_map(&m, fd, UINT64_MAX - 4095, 4096, NULL), -EINVAL);
	CHECK(rt_shm_map(&m, fd, 100, 4096, NULL) < 0);
	CHECK(rt_shm_map(&m, sock, 0, 4096, NULL) < 0);
	CHECK(rt_shm_map(&m, -1, 0, 4096, NULL) < 0);
	close(fd);
	close(sock);
}

int main(void)
{
	RUN(a_sleeping_reactor_is_woken_to_poll);
	RUN(work_that_appears_before_the_sleep_is_seen);
	RUN(events_arrive_and_signals_never_block);
	RUN(memory_that_is_cut_becomes_zeroes);
	RUN(what_cannot_be_mapped_is_refused);
	return 0;
}
