/* SPDX-License-Identifier: MIT */
/*
 * Measures a vhost-user-blk server without a virtual machine. Overwrites the disk when it writes.
 *
 * usage: vhost_bench SOCKET [randread|randwrite|writeflush] [qd=N] [queues=N] [seconds=N] [ops=N] [bs=BYTES] [span=BYTES] [wce=0|1] [poll] [indirect]
 *
 * `qd` is per queue. It ends after `seconds`, or so many `ops`. "writeflush" has a flush behind each write, and counts the pair as one. The cache is switched on (wce=1) where the server lets it be, so that
 * a flush is what makes data durable on every server. With `poll` the client looks at the used ring instead of waiting for its eventfd.
 * Prints one line of JSON: operations per second, latencies in ns, kicks and calls per operation, and the client's own processor time.
 */
#include <errno.h>
#include <linux/virtio_blk.h>
#include <sys/resource.h>
#include <time.h>

#include "lib/test.h"
#include "lib/vhost_front.h"
#include "util/bytes.h"
#include "util/hist.h"
#include "util/rng.h"

#define SECTOR 512u

struct bench {
	struct vf f;
	const char *rw;
	uint64_t qd, queues, seconds, limit, bs, span, wce;
	bool poll, indirect;
	uint64_t start[VF_QUEUES_MAX][1024];
	bool flushing[VF_QUEUES_MAX][1024];
	struct rng rng;
	struct hist hist;
	uint64_t ops, failed;
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static bool number(const char *arg, const char *name, uint64_t *v)
{
	size_t n = strlen(name);

	if (strncmp(arg, name, n) || arg[n] != '=')
		return false;
	*v = strtoull(arg + n + 1, NULL, 0);
	return true;
}

static void begin(struct bench *b, struct vf_ring *r, unsigned slot)
{
	bool read = !strcmp(b->rw, "randread");
	uint64_t block = rng_below(&b->rng, b->span / align_up(b->bs, SECTOR));

	b->start[r->index][slot] = now_ns();
	b->flushing[r->index][slot] = false;
	vf_submit(&b->f, r, slot, read ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT, block * (align_up(b->bs, SECTOR) / SECTOR), 0, (uint32_t)align_up(b->bs, SECTOR));
}

/* One completion; true if the slot has begun something new. */
static void complete(struct bench *b, struct vf_ring *r, unsigned slot, bool go_on)
{
	if (*vf_status(&b->f, r, slot) != VIRTIO_BLK_S_OK)
		b->failed++;
	if (!strcmp(b->rw, "writeflush") && !b->flushing[r->index][slot]) {
		b->flushing[r->index][slot] = true;
		vf_submit(&b->f, r, slot, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
		return;
	}
	hist_add(&b->hist, now_ns() - b->start[r->index][slot]);
	b->ops++;
	if (go_on)
		begin(b, r, slot);
	else
		vf_slot_put(r, slot);
}

static unsigned reap(struct bench *b, struct vf_ring *r, bool go_on)
{
	unsigned n = 0;
	int slot;

	while ((slot = vf_poll(r, NULL)) >= 0) {
		complete(b, r, (unsigned)slot, go_on);
		n++;
	}
	if (n)
		vf_kick(&b->f, r);
	return n;
}

/* Asks to be called for the next completion of each queue, and sleeps unless there is one. */
static void sleep_for_call(struct bench *b)
{
	struct pollfd p[VF_QUEUES_MAX];
	uint64_t value;

	for (unsigned i = 0; i < b->queues; i++) {
		struct vf_ring *r = &b->f.ring[i];

		p[i] = (struct pollfd){ .fd = r->call, .events = POLLIN };
		r->avail[2 + r->num] = r->last_used;
	}
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	for (unsigned i = 0; i < b->queues; i++)
		if (__atomic_load_n(b->f.ring[i].used + 1, __ATOMIC_ACQUIRE) != b->f.ring[i].last_used)
			return;
	if (poll(p, b->queues, 5000) <= 0)
		test_fail("no completion within 5 seconds");
	for (unsigned i = 0; i < b->queues; i++)
		if (p[i].revents && read(p[i].fd, &value, sizeof(value)) > 0)
			b->f.ring[i].calls++;
}

static void run(struct bench *b)
{
	uint64_t begun = now_ns(), end = begun + b->seconds * 1000000000u, in_flight = b->qd * b->queues;
	unsigned idle = 0;

	for (unsigned i = 0; i < b->queues; i++) {
		for (unsigned k = 0; k < b->qd; k++)
			begin(b, &b->f.ring[i], (unsigned)vf_slot_get(&b->f.ring[i]));
		vf_kick(&b->f, &b->f.ring[i]);
	}
	while (in_flight) {
		bool go_on = now_ns() < end && b->ops < b->limit;
		unsigned n = 0;
		uint64_t before = b->ops;

		for (unsigned i = 0; i < b->queues; i++)
			n += reap(b, &b->f.ring[i], go_on);
		if (!go_on)
			in_flight -= b->ops - before;
		if (n)
			idle = 0;
		else if (in_flight && (!b->poll || ++idle > 10000000))
			sleep_for_call(b);
	}
}

int main(int argc, char **argv)
{
	static struct bench b = { .rw = "randread", .qd = 1, .queues = 1, .seconds = 3, .limit = UINT64_MAX, .bs = 4096, .wce = 1 };
	struct vf_config c = { .path = argc > 1 ? argv[1] : "" };
	uint64_t capacity = 0, begun, ns, kicks = 0, calls = 0;
	struct rusage u;
	uint8_t wce;

	for (int i = 2; i < argc; i++) {
		if (!strcmp(argv[i], "poll"))
			b.poll = true;
		else if (!strcmp(argv[i], "indirect"))
			c.indirect = true;
		else if (!strncmp(argv[i], "rand", 4) || !strcmp(argv[i], "writeflush"))
			b.rw = argv[i];
		else if (!number(argv[i], "qd", &b.qd) && !number(argv[i], "queues", &b.queues) && !number(argv[i], "seconds", &b.seconds) &&
			 !number(argv[i], "ops", &b.limit) && !number(argv[i], "bs", &b.bs) && !number(argv[i], "span", &b.span) && !number(argv[i], "wce", &b.wce))
			test_fail("unknown argument %s", argv[i]);
	}
	if (argc < 2 || !b.qd || b.qd > 512 || !b.queues || b.queues > VF_QUEUES_MAX || !b.bs)
		test_fail("usage: vhost_bench SOCKET [randread|randwrite|writeflush] [qd=1..512] [queues=1..16] [seconds=] [ops=] [bs=] [span=] [wce=] [poll]");
	c.queues = (unsigned)b.queues;
	c.num = 128;
	while (c.num / VF_SLOT_DESCS < b.qd)
		c.num *= 2;
	c.data = (uint32_t)align_up(b.bs, 4096);
	vf_open(&b.f, &c);
	CHECK_EQ(vf_get_config(&b.f, 0, &capacity, sizeof(capacity)), 0);
	wce = (uint8_t)b.wce;
	if (vf_set_config(&b.f, 32, &wce, 1))
		fprintf(stderr, "vhost_bench: the server does not take wce=%u\n", wce);
	b.span = b.span && b.span < capacity * SECTOR ? b.span : capacity * SECTOR;
	rng_seed(&b.rng, 42);
	hist_init(&b.hist);
	begun = now_ns();
	run(&b);
	ns = now_ns() - begun;
	for (unsigned i = 0; i < b.queues; i++) {
		kicks += b.f.ring[i].kicks;
		calls += b.f.ring[i].calls;
	}
	getrusage(RUSAGE_SELF, &u);
	printf("{\"iops\": %.0f, \"p50_ns\": %" PRIu64 ", \"p99_ns\": %" PRIu64 ", \"p999_ns\": %" PRIu64 ", \"mean_ns\": %" PRIu64 ", \"ops\": %" PRIu64
	       ", \"failed\": %" PRIu64 ", \"kicks_per_op\": %.3f, \"calls_per_op\": %.3f, \"client_cpu_s\": %.2f, \"seconds\": %.2f}\n",
	       (double)b.ops * 1e9 / (double)ns, hist_quantile(&b.hist, 500), hist_quantile(&b.hist, 990), hist_quantile_10k(&b.hist, 9990),
	       b.hist.sum / (b.hist.count ? b.hist.count : 1), b.ops, b.failed, (double)kicks / (double)b.ops, (double)calls / (double)b.ops,
	       (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6, (double)ns / 1e9);
	vf_close(&b.f);
	return b.failed ? 1 : 0;
}
