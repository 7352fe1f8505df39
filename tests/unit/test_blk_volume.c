/* SPDX-License-Identifier: MIT */
/* Volumes: the gate, sync modes, figures. */
#include <jansson.h>

#include "blk/spec.h"
#include "blk/volume.h"
#include "test_rt.h"

static char buf[4096];

static co_fn struct volume *co_open_volume(const char *text)
{
	struct volume *v;
	struct disk *d;

	CHECK_EQ(co_disk_open(text, DISK_OPEN_RDWR, &d, NULL), 0);
	CHECK_EQ(volume_create("vol", d, &v, NULL), 0);
	return v;
}

static co_fn int co_vol_write(struct volume *v, unsigned flags)
{
	struct iovec iov = { buf, sizeof(buf) };

	return co_volume_writev(v, 0, &iov, 1, flags);
}

static co_fn int co_write_job(void *arg)
{
	return co_vol_write(arg, 0);
}

static co_fn void co_a_closed_gate_waits_for_what_is_inside_and_holds_what_is_outside(void *arg)
{
	struct volume *v = co_open_volume("delay:write=5ms:mem:1M");
	struct co_group g;
	uint64_t start = rt_now_ns();

	co_group_init(&g);
	co_group_start(&g, "inside", co_write_job, v);
	co_sleep_ns(1000000);
	co_volume_gate_close(v);
	CHECK_EQ((rt_now_ns() - start) / 1000000, 5);
	CHECK_EQ(v->in_flight, 0);
	co_group_start(&g, "outside", co_write_job, v);
	co_sleep_ns(100000000);
	CHECK_EQ(v->disk->in_flight, 0);
	CHECK_EQ(v->disk->count.ops[DISK_OP_WRITE], 1);
	volume_gate_open(v);
	CHECK_EQ(co_group_wait(&g), 0);
	CHECK_EQ(v->disk->count.ops[DISK_OP_WRITE], 2);
	co_volume_destroy(v);
}

static co_fn void co_two_closers_take_turns(void *arg)
{
	struct volume *v = co_open_volume("mem:1M");

	co_volume_gate_close(v);
	volume_gate_open(v);
	co_volume_gate_close(v);
	volume_gate_open(v);
	CHECK_EQ(co_vol_write(v, 0), 0);
	co_volume_destroy(v);
	co_volume_destroy(NULL);
}

/* mem has FUA; flags and flushes that reach it are counted by the hook. */
static unsigned fua, flushes;

static int count_sync(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	fua += (flags & DISK_FUA) != 0;
	flushes += op == DISK_OP_FLUSH;
	return 0;
}

static co_fn void co_sync_modes_decide_what_reaches_the_disk(void *arg)
{
	static const struct {
		enum volume_sync sync;
		unsigned fua, flushes;
	} want[] = { { VOLUME_SYNC_STANDARD, 1, 1 }, { VOLUME_SYNC_ALWAYS, 4, 1 }, { VOLUME_SYNC_DISABLED, 0, 0 } };

	for (unsigned i = 0; i < 3; i++) {
		struct volume *v = co_open_volume("mem:1M");
		json_t *j;

		v->sync = want[i].sync;
		v->disk->trace = count_sync;
		fua = flushes = 0;
		CHECK_EQ(co_vol_write(v, 0), 0);
		CHECK_EQ(co_vol_write(v, DISK_FUA), 0);
		CHECK_EQ(co_volume_zero(v, 0, 4096, 0), 0);
		CHECK_EQ(co_volume_discard(v, 0, 65536, 0), 0);
		CHECK_EQ(co_volume_flush(v), 0);
		CHECK_EQ(fua, want[i].fua);
		CHECK_EQ(flushes, want[i].flushes);
		j = volume_status(v);
		CHECK_EQ(json_object_get(j, "warning") != NULL, v->sync == VOLUME_SYNC_DISABLED);
		json_decref(j);
		co_volume_destroy(v);
	}
}

static co_fn void co_a_read_only_volume_on_a_writable_disk_refuses_changes(void *arg)
{
	struct volume *v = co_open_volume("mem:1M");
	struct iovec iov = { buf, sizeof(buf) };

	v->read_only = true;
	CHECK_EQ(co_vol_write(v, 0), -EROFS);
	CHECK_EQ(co_volume_zero(v, 0, 512, 0), -EROFS);
	CHECK_EQ(co_volume_discard(v, 0, 512, 0), -EROFS);
	CHECK_EQ(co_volume_resize(v, 512, NULL), -EROFS);
	CHECK_EQ(co_volume_flush(v), 0);
	CHECK_EQ(co_volume_readv(v, 0, &iov, 1), 0);
	co_volume_destroy(v);
}

static void note_resized(struct volume *v, void *arg)
{
	*(uint64_t *)arg = v->disk->size;
}

static co_fn void co_a_resize_waits_for_requests_and_tells_the_exports(void *arg)
{
	struct volume *v = co_open_volume("mem:1M");
	uint64_t told = 0;
	struct err err = ERR_INIT;

	v->resized = note_resized;
	v->resized_arg = &told;
	CHECK_EQ(co_volume_resize(v, 3 << 20, NULL), 0);
	CHECK_EQ(told, 3 << 20);
	CHECK_EQ(co_volume_resize(v, UINT64_MAX, &err), -EINVAL);
	CHECK_EQ(told, 3 << 20);
	CHECK(!v->closed);
	co_volume_destroy(v);
}

static co_fn void co_latencies_are_those_of_the_disk_and_failures_are_not_among_them(void *arg)
{
	struct volume *v = co_open_volume("delay:write=8ms:fault:op=write,nth=3:mem:1M");
	json_t *j, *w;

	for (unsigned i = 0; i < 10; i++)
		co_vol_write(v, 0);
	CHECK_EQ(v->latency[DISK_OP_WRITE].count, 9);
	CHECK(hist_quantile(&v->latency[DISK_OP_WRITE], 500) >= 8000000);
	CHECK(hist_quantile(&v->latency[DISK_OP_WRITE], 500) < 8300000);
	j = volume_stats(v);
	w = json_object_get(j, "write");
	CHECK_EQ(json_integer_value(json_object_get(w, "ops")), 9);
	CHECK_EQ(json_integer_value(json_object_get(w, "errors")), 1);
	json_decref(j);
	co_volume_destroy(v);
}

#define RUN_CO(fn) \
	do { \
		printf("%s\n", &#fn[3]); \
		fflush(stdout); \
		on_sim(1, fn, NULL); \
	} while (0)

int main(void)
{
	backends_register();
	RUN_CO(co_a_closed_gate_waits_for_what_is_inside_and_holds_what_is_outside);
	RUN_CO(co_two_closers_take_turns);
	RUN_CO(co_sync_modes_decide_what_reaches_the_disk);
	RUN_CO(co_a_read_only_volume_on_a_writable_disk_refuses_changes);
	RUN_CO(co_a_resize_waits_for_requests_and_tells_the_exports);
	RUN_CO(co_latencies_are_those_of_the_disk_and_failures_are_not_among_them);
	return 0;
}
