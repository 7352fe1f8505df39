/* SPDX-License-Identifier: MIT */
/* What mem, delay and fault promise beyond the contract. */
#include <jansson.h>

#include "blk/spec.h"
#include "test_rt.h"
#include "util/bytes.h"

static char buf[1 << 20];

static co_fn struct disk *co_open_disk(const char *text)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(text, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s: %s", text, err.msg);
	return d;
}

/* --- mem --- */

static co_fn void co_a_disk_in_memory_is_sparse_and_gives_back_what_is_discarded(void *arg)
{
	struct disk *d = co_open_disk("mem:1T");
	struct disk_extent e;

	CHECK_EQ(co_disk_write(d, 512ull << 30, "x", 1, 0), 0);
	CHECK_EQ(co_disk_extent(d, 0, 1ull << 40, &e), 0);
	CHECK(e.hole && e.zero);
	CHECK_EQ(e.len, 512ull << 30);
	CHECK_EQ(co_disk_extent(d, 512ull << 30, 1 << 20, &e), 0);
	CHECK(!e.hole && !e.zero);
	CHECK_EQ(e.len, 65536);
	CHECK_EQ(co_disk_zero(d, 512ull << 30, 65536, 0), 0);
	CHECK_EQ(co_disk_extent(d, 512ull << 30, 1 << 20, &e), 0);
	CHECK(!e.hole);
	CHECK_EQ(co_disk_discard(d, 0, 1ull << 40, 0), 0);
	CHECK_EQ(co_disk_extent(d, 0, 1ull << 40, &e), 0);
	CHECK(e.hole);
	CHECK_EQ(e.len, 1ull << 40);
	co_disk_close(d);
}

/* --- delay --- */

static co_fn uint64_t co_time_of(struct disk *d, enum disk_op op, unsigned flags)
{
	uint64_t start = rt_now_ns();
	int ret = op == DISK_OP_READ ? co_disk_read(d, 0, buf, 512, 0) : op == DISK_OP_WRITE ? co_disk_write(d, 0, buf, 512, flags) :
		  op == DISK_OP_FLUSH ? co_disk_flush(d) : op == DISK_OP_ZERO ? co_disk_zero(d, 0, 512, flags) :
		  co_disk_discard(d, 0, 512, flags);

	CHECK_EQ(ret, 0);
	return (rt_now_ns() - start) / 1000000;
}

static co_fn void co_each_operation_waits_as_long_as_it_is_told(void *arg)
{
	struct disk *d = co_open_disk("delay:read=1ms,write=2ms,flush=8ms,discard=16ms,zero=32ms:mem:1M");

	CHECK_EQ(co_time_of(d, DISK_OP_READ, 0), 1);
	CHECK_EQ(co_time_of(d, DISK_OP_WRITE, 0), 2);
	CHECK_EQ(co_time_of(d, DISK_OP_FLUSH, 0), 8);
	CHECK_EQ(co_time_of(d, DISK_OP_DISCARD, 0), 16);
	CHECK_EQ(co_time_of(d, DISK_OP_ZERO, 0), 32);
	CHECK_EQ(co_time_of(d, DISK_OP_WRITE, DISK_FUA), 10);
	co_disk_close(d);
	d = co_open_disk("delay:write=2ms,flush=8ms,fua=3ms:mem:1M");
	CHECK_EQ(co_time_of(d, DISK_OP_WRITE, DISK_FUA), 3);
	CHECK_EQ(co_time_of(d, DISK_OP_READ, 0), 0);
	co_disk_close(d);
}

static co_fn int co_read_job(void *arg)
{
	return co_disk_read(arg, 0, buf, 512, 0);
}

static co_fn uint64_t co_time_of_reads(const char *text, unsigned n)
{
	struct disk *d = co_open_disk(text);
	uint64_t start = rt_now_ns();
	struct co_group g;

	co_group_init(&g);
	for (unsigned i = 0; i < n; i++)
		co_group_start(&g, "read", co_read_job, d);
	CHECK_EQ(co_group_wait(&g), 0);
	co_disk_close(d);
	return (rt_now_ns() - start) / 1000000;
}

static co_fn void co_parallel_bounds_how_many_are_served_at_once(void *arg)
{
	CHECK_EQ(co_time_of_reads("delay:read=4ms:mem:1M", 20), 4);
	CHECK_EQ(co_time_of_reads("delay:read=4ms,parallel=1:mem:1M", 20), 80);
	CHECK_EQ(co_time_of_reads("delay:read=4ms,parallel=8:mem:1M", 20), 12);
	CHECK(co_time_of_reads("delay:read=4ms,jitter=40ms:mem:1M", 20) > 20);
}

/* --- fault --- */

static co_fn void co_the_nth_write_fails_and_no_other(void *arg)
{
	struct disk *d = co_open_disk("fault:op=write,nth=3,error=ENOSPC:mem:1M");

	for (unsigned i = 1; i <= 6; i++) {
		CHECK_EQ(co_disk_read(d, 0, buf, 512, 0), 0);
		CHECK_EQ(co_disk_write(d, 0, buf, 512, 0), i == 3 ? -ENOSPC : 0);
	}
	co_disk_close(d);
}

static co_fn void co_all_fail_from_the_nth_on(void *arg)
{
	struct disk *d = co_open_disk("fault:after=3:mem:1M");

	for (unsigned i = 1; i <= 6; i++)
		CHECK_EQ(co_disk_read(d, 0, buf, 512, 0), i >= 3 ? -EIO : 0);
	co_disk_close(d);
}

static co_fn void co_only_what_touches_the_range_fails_and_only_once(void *arg)
{
	struct disk *d = co_open_disk("fault:off=4096,len=512,once=on:mem:1M");

	CHECK_EQ(co_disk_read(d, 0, buf, 4096, 0), 0);
	CHECK_EQ(co_disk_read(d, 4608, buf, 4096, 0), 0);
	CHECK_EQ(co_disk_zero(d, 4607, 1, 0), -EIO);
	CHECK_EQ(co_disk_zero(d, 4607, 1, 0), 0);
	co_disk_close(d);
	d = co_open_disk("fault:off=64K:mem:1M");
	CHECK_EQ(co_disk_read(d, 0, buf, 65536, 0), 0);
	CHECK_EQ(co_disk_read(d, 0, buf, 65537, 0), -EIO);
	co_disk_close(d);
}

static co_fn void co_a_failed_flush_sticks(void *arg)
{
	struct disk *d = co_open_disk("fault:op=flush,nth=2:mem:1M");

	CHECK_EQ(co_disk_flush(d), 0);
	CHECK_EQ(co_disk_flush(d), -EIO);
	CHECK_EQ(co_disk_flush(d), -EIO);
	CHECK_EQ(co_disk_write(d, 0, buf, 512, 0), -EIO);
	co_disk_close(d);
}

static co_fn void co_a_torn_write_leaves_some_sectors_and_fails(void *arg)
{
	struct disk *d = co_open_disk("fault:op=write,tear=on,seed=5:mem:1M");
	unsigned new = 0;

	memset(buf, 'n', 32768);
	CHECK_EQ(co_disk_write(d, 100, buf, 32768, 0), -EIO);
	CHECK_EQ(co_disk_read(d, 0, buf, 65536, 0), 0);
	for (unsigned s = 1; s < 64; s++) {
		for (unsigned i = 1; i < 512; i++)
			CHECK_EQ(buf[s * 512 + i], buf[s * 512]);
		new += buf[s * 512] == 'n';
	}
	CHECK(new > 10 && new < 54);
	co_disk_close(d);
}

static co_fn void co_a_corrupted_read_succeeds_with_other_bits(void *arg)
{
	struct disk *d = co_open_disk("fault:op=read,corrupt=on,prob=0.5,seed=9:mem:1M");
	unsigned bad = 0;

	for (unsigned i = 0; i < 100; i++) {
		CHECK_EQ(co_disk_read(d, 0, buf, 4096, 0), 0);
		bad += !bytes_are_zero(buf, 4096);
	}
	CHECK(bad > 20 && bad < 80);
	co_disk_close(d);
}

static co_fn void co_a_stall_delays_and_succeeds(void *arg)
{
	struct disk *d = co_open_disk("fault:op=read,stall=5s,nth=2:mem:1M");

	CHECK_EQ(co_time_of(d, DISK_OP_READ, 0), 0);
	CHECK_EQ(co_time_of(d, DISK_OP_READ, 0), 5000);
	CHECK_EQ(co_time_of(d, DISK_OP_READ, 0), 0);
	co_disk_close(d);
}

static co_fn void co_status_tells_about_each_layer(void *arg)
{
	struct disk *d = co_open_disk("delay:read=1ms:fault:op=write:mem:1M,align=4096");
	json_t *j = disk_status(d), *fault = json_object_get(j, "file"), *mem = json_object_get(fault, "file");

	CHECK_STR(json_string_value(json_object_get(j, "driver")), "delay");
	CHECK_STR(json_string_value(json_object_get(fault, "driver")), "fault");
	CHECK_STR(json_string_value(json_object_get(mem, "name")), "mem:1M,align=4096");
	CHECK_EQ(json_integer_value(json_object_get(json_object_get(mem, "limits"), "align")), 4096);
	CHECK_EQ(json_integer_value(json_object_get(json_object_get(j, "delay_ns"), "read")), 1000000);
	json_decref(j);
	co_disk_close(d);
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
	RUN_CO(co_a_disk_in_memory_is_sparse_and_gives_back_what_is_discarded);
	RUN_CO(co_each_operation_waits_as_long_as_it_is_told);
	RUN_CO(co_parallel_bounds_how_many_are_served_at_once);
	RUN_CO(co_the_nth_write_fails_and_no_other);
	RUN_CO(co_all_fail_from_the_nth_on);
	RUN_CO(co_only_what_touches_the_range_fails_and_only_once);
	RUN_CO(co_a_failed_flush_sticks);
	RUN_CO(co_a_torn_write_leaves_some_sectors_and_fails);
	RUN_CO(co_a_corrupted_read_succeeds_with_other_bits);
	RUN_CO(co_a_stall_delays_and_succeeds);
	RUN_CO(co_status_tells_about_each_layer);
	return 0;
}
