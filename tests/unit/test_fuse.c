/* SPDX-License-Identifier: MIT */
/* The FUSE server: what it answers to a kernel that keeps to the rules, and to one that does not; mounts; the list of mounts. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "blk/spec.h"
#include "export/fuse/server.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "test_rt.h"
#include "util/bytes.h"
#include "util/log.h"
#include "util/mountinfo.h"

#define SIZE (1u << 20)
#define SECOND 1000000000ull

/* --- A kernel of our own --- */

static struct kernel {
	struct volume *v;
	int fd, fail, fail_extent; /* fail: what flushes of the disk return */
	unsigned fua, flushes, discards;
	uint64_t unique;
	bool ended;
	uint8_t answer[sizeof(struct fuse_out_header) + (1 << 20)];
	size_t len;		/* of the answer's payload */
	char message[sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) + (1 << 20)];
} k;

static int trace(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	k.fua += op == DISK_OP_WRITE && (flags & DISK_FUA);
	k.flushes += op == DISK_OP_FLUSH;
	k.discards += op == DISK_OP_DISCARD;
	return op == DISK_OP_FLUSH ? k.fail : op == DISK_OP_EXTENT ? k.fail_extent : 0;
}

static size_t put_message(uint32_t opcode, const void *args, size_t len, const void *data, size_t data_len)
{
	struct fuse_in_header h = { .len = (uint32_t)(sizeof(h) + len + data_len), .opcode = opcode, .unique = k.unique += 2, .nodeid = 1 };

	memcpy(k.message, &h, sizeof(h));
	memcpy(k.message + sizeof(h), args, len);
	memcpy(k.message + sizeof(h) + len, data, data_len);
	return h.len;
}

/* The error of the answer to what was sent last. */
static co_fn int co_answer(void)
{
	struct fuse_out_header h;
	ssize_t got = co_io_recv(k.fd, k.answer, sizeof(k.answer), 0);

	CHECK(got >= (ssize_t)sizeof(h));
	memcpy(&h, k.answer, sizeof(h));
	CHECK_EQ(h.len, (uint32_t)got);
	CHECK_EQ(h.unique, k.unique);
	k.len = (size_t)got - sizeof(h);
	CHECK(!h.error || !k.len);
	return h.error;
}

static co_fn int co_ask(uint32_t opcode, const void *args, size_t len, const void *data, size_t data_len)
{
	size_t total = put_message(opcode, args, len, data, data_len);

	CHECK_EQ(send(k.fd, k.message, total, 0), (ssize_t)total);
	return co_answer();
}

static co_fn int co_init(uint32_t major, uint32_t minor, uint32_t flags)
{
	struct fuse_init_in in = { .major = major, .minor = minor, .max_readahead = 65536, .flags = flags };

	return co_ask(FUSE_INIT, &in, sizeof(in), "", 0);
}

static const void *payload(void)
{
	return k.answer + sizeof(struct fuse_out_header);
}

static co_fn int co_write(uint64_t off, const void *data, uint32_t len, uint32_t flags)
{
	struct fuse_write_in in = { .offset = off, .size = len, .flags = flags };
	struct fuse_write_out out;
	int ret = co_ask(FUSE_WRITE, &in, sizeof(in), data, len);

	if (ret)
		return ret;
	CHECK_EQ(k.len, sizeof(out));
	memcpy(&out, payload(), sizeof(out));
	return (int)out.size;
}

static co_fn int co_read(uint64_t off, uint32_t len)
{
	struct fuse_read_in in = { .offset = off, .size = len };
	int ret = co_ask(FUSE_READ, &in, sizeof(in), "", 0);

	return ret ? ret : (int)k.len;
}

static co_fn int co_fallocate(uint32_t mode, uint64_t off, uint64_t len)
{
	struct fuse_fallocate_in in = { .offset = off, .length = len, .mode = mode };

	return co_ask(FUSE_FALLOCATE, &in, sizeof(in), "", 0);
}

static co_fn int64_t co_lseek(uint64_t off, uint32_t whence)
{
	struct fuse_lseek_in in = { .offset = off, .whence = whence };
	struct fuse_lseek_out out;
	int ret = co_ask(FUSE_LSEEK, &in, sizeof(in), "", 0);

	if (ret)
		return ret;
	memcpy(&out, payload(), sizeof(out));
	return (int64_t)out.offset;
}

static co_fn void co_serve(void *arg)
{
	struct fuse_export_config c = { .path = "test", .volume = k.v, .max_in_flight = 4 };
	struct err err = ERR_INIT;
	struct fuse_server *s;

	CHECK_EQ(fuse_server_create(&s, &err), 0);
	CHECK_EQ(co_fuse_server_serve(s, &c, *(int *)arg, &err), 0);
	fuse_server_destroy(s);
	k.ended = true;
}

/* Runs the test with a server at the other end of k.fd. */
static co_fn void co_with_server(void (*co_test)(void), const char *disk, unsigned flags)
{
	struct err err = ERR_INIT;
	struct disk *d;
	int pair[2];

	k.ended = false;
	k.fail = k.fail_extent = 0;
	k.fua = k.flushes = k.discards = 0;
	if (co_disk_open(disk, flags, &d, &err) < 0)
		test_fail("%s", err.msg);
	d->trace = trace;
	CHECK_EQ(volume_create("test", d, &k.v, &err), 0);
	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	k.fd = pair[0];
	CHECK_EQ(setsockopt(k.fd, SOL_SOCKET, SO_SNDBUF, &(int){ 4 << 20 }, sizeof(int)), 0);
	CHECK_EQ(setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &(int){ 4 << 20 }, sizeof(int)), 0);
	CHECK_EQ(co_spawn("server", co_serve, &pair[1]), 0);
	co_test();
	close(k.fd);
	while (!k.ended)
		co_sleep_ns(1000000);
	co_volume_destroy(k.v);
}

/* --- Tests --- */

static co_fn void co_rules(void)
{
	struct fuse_init_out init;
	char data[9000];

	memset(data, 'x', sizeof(data));
	CHECK_EQ(co_read(0, 512), -EPROTO);
	CHECK_EQ(co_init(8, 1, FUSE_MAX_PAGES), 0);
	CHECK_EQ(co_init(7, 27, FUSE_MAX_PAGES), -EPROTO);
	CHECK_EQ(co_init(6, 99, FUSE_MAX_PAGES), -EPROTO);
	CHECK_EQ(co_read(0, 512), -EPROTO);
	CHECK_EQ(co_init(7, 45, ~0u), 0);
	memcpy(&init, payload(), sizeof(init));
	CHECK_EQ(init.major, 7u);
	CHECK_EQ(init.max_write, 1u << 20);
	CHECK(!(init.flags & (FUSE_WRITEBACK_CACHE | FUSE_ATOMIC_O_TRUNC | FUSE_INIT_EXT)));
	CHECK_EQ(co_write(SIZE - 100, data, 200, 0), 100);
	CHECK_EQ(co_write(100, data, sizeof(data), 0), (int)sizeof(data));
	CHECK_EQ(co_read(0, 10000), 10000);
	CHECK(bytes_are_zero(payload(), 100) && !memcmp((const char *)payload() + 100, data, sizeof(data)));
	CHECK_EQ(co_read(SIZE - 50, 100), 50);
	CHECK_EQ(co_read(SIZE, 100), 0);
	CHECK_EQ(k.fua + k.flushes, 0u);
	CHECK_EQ(co_write(0, data, 512, O_WRONLY | O_DSYNC), 512);
	CHECK_EQ(co_write(0, data, 512, O_WRONLY | O_SYNC), 512);
	CHECK_EQ(k.fua + k.flushes, 2u);
	CHECK_EQ(co_ask(FUSE_FSYNC, &(struct fuse_fsync_in){ .fsync_flags = 1 }, sizeof(struct fuse_fsync_in), "", 0), 0);
	CHECK_EQ(co_lseek(0, SEEK_DATA), 0);
	CHECK_EQ(co_lseek(0, SEEK_SET), -EINVAL);
	CHECK_EQ(co_lseek(SIZE, SEEK_HOLE), -ENXIO);
	CHECK_EQ(co_fallocate(3, 0, 4096), 0);
	CHECK_EQ(co_read(0, 4096), 4096);
	CHECK(bytes_are_zero(payload(), 4096));
	CHECK_EQ(k.discards, 0u);	/* a disk may ignore those, and a hole has to read as zeroes */
	CHECK_EQ(co_fallocate(2, 0, 4096), -EOPNOTSUPP);
	/* what the kernel would take for "not there", or not at all */
	k.fail_extent = -ENOSYS;
	CHECK_EQ(co_lseek(0, SEEK_DATA), -EIO);
	k.fail_extent = -524;
	CHECK_EQ(co_lseek(0, SEEK_DATA), -EIO);
	k.fail_extent = -ENOSPC;
	CHECK_EQ(co_lseek(0, SEEK_DATA), -ENOSPC);
	k.fail = -ENOSYS;
	CHECK_EQ(co_ask(FUSE_FSYNC, &(struct fuse_fsync_in){ 0 }, sizeof(struct fuse_fsync_in), "", 0), -EIO);
	k.fail = 0;
	/* it is sticky */
	CHECK_EQ(co_ask(FUSE_FSYNC, &(struct fuse_fsync_in){ 0 }, sizeof(struct fuse_fsync_in), "", 0), -EIO);
}

static co_fn void co_strange(void)
{
	static const uint8_t zeroes[4096];
	struct fuse_in_header h = { .len = sizeof(h), .opcode = FUSE_GETATTR };
	struct fuse_write_in w = { .offset = 0, .size = 4096 };
	struct fuse_read_in r = { .size = 1 << 21 };

	CHECK_EQ(co_init(7, 36, ~0u), 0);
	/* no header, no unique number, forgotten inodes: no answer, and the next request is answered */
	CHECK_EQ(send(k.fd, &h, 8, 0), 8);
	CHECK_EQ(send(k.fd, &h, sizeof(h), 0), (ssize_t)sizeof(h));
	h.unique = 99;
	h.opcode = FUSE_FORGET;
	CHECK_EQ(send(k.fd, &h, sizeof(h), 0), (ssize_t)sizeof(h));
	for (uint32_t op = 0; op < 70; op++) {
		if (op == FUSE_FORGET || op == FUSE_BATCH_FORGET || op == FUSE_INIT)
			continue;
		CHECK(co_ask(op, "", 0, "", 0) <= 0);
		CHECK(co_ask(op, zeroes, 7, "", 0) <= 0);
		CHECK(co_ask(op, zeroes, sizeof(zeroes), "", 0) <= 0);
	}
	CHECK_EQ(co_ask(UINT32_MAX, "", 0, "", 0), -ENOSYS);
	CHECK_EQ(co_ask(FUSE_LOOKUP, "x", 2, "", 0), -ENOTDIR);
	CHECK_EQ(co_ask(FUSE_WRITE, &w, sizeof(w), zeroes, 4095), -EINVAL);
	CHECK_EQ(co_ask(FUSE_WRITE, &w, sizeof(w) - 1, "", 0), -EINVAL);
	w.offset = UINT64_MAX - 100;
	CHECK_EQ(co_ask(FUSE_WRITE, &w, sizeof(w), zeroes, 4096), -EINVAL);
	w = (struct fuse_write_in){ .offset = 512 };
	CHECK_EQ(co_ask(FUSE_WRITE, &w, sizeof(w), "", 0), 0);
	CHECK_EQ(co_ask(FUSE_READ, &r, sizeof(r), "", 0), -EINVAL);
	CHECK_EQ(co_read(UINT64_MAX, 4096), 0);
	CHECK_EQ(co_fallocate(3, UINT64_MAX - 4095, 4096), -EINVAL);
	CHECK_EQ(co_fallocate(3, 4096, UINT64_MAX), -EINVAL);
	CHECK_EQ(co_fallocate(3, SIZE - 512, INT64_MAX), 0);
	CHECK_EQ(co_lseek(UINT64_MAX, SEEK_DATA), -ENXIO);
	/* a header that lies about its length */
	put_message(FUSE_GETATTR, zeroes, 16, "", 0);
	((struct fuse_in_header *)k.message)->len += 1;
	CHECK_EQ(send(k.fd, k.message, sizeof(h) + 16, 0), (ssize_t)sizeof(h) + 16);
	CHECK_EQ(co_answer(), -EINVAL);
	CHECK_EQ(co_read(0, 512), 512);
}

static co_fn void co_deep(void)
{
	struct fuse_read_in in = { .size = 512 };
	uint64_t seen = 0;

	CHECK_EQ(co_init(7, 36, ~0u), 0);
	k.unique = 0;
	for (int i = 0; i < 40; i++) {
		size_t total = put_message(FUSE_READ, &in, sizeof(in), "", 0);

		CHECK_EQ(send(k.fd, k.message, total, 0), (ssize_t)total);
	}
	co_sleep_ns(2000000);
	CHECK(k.v->in_flight <= 4);
	for (int i = 0; i < 40; i++) {
		struct fuse_out_header h;

		CHECK_EQ(co_io_recv(k.fd, k.answer, sizeof(k.answer), 0), (ssize_t)sizeof(h) + 512);
		memcpy(&h, k.answer, sizeof(h));
		CHECK(!h.error && h.unique >= 2 && h.unique <= 80 && !(seen >> (h.unique / 2) & 1));
		seen |= 1ull << (h.unique / 2);
	}
}

static co_fn void co_read_only(void)
{
	struct fuse_open_in in = { .flags = O_RDWR };

	CHECK_EQ(co_init(7, 36, ~0u), 0);
	CHECK_EQ(co_ask(FUSE_OPEN, &in, sizeof(in), "", 0), -EROFS);
	CHECK_EQ(co_write(0, "x", 1, 0), -EROFS);
	CHECK_EQ(co_fallocate(3, 0, 512), -EROFS);
	CHECK_EQ(co_read(0, 512), 512);
}

static co_fn void co_main_rules(void *arg)
{
	co_with_server(co_rules, "mem:1M", DISK_OPEN_RDWR);
}

static co_fn void co_main_strange(void *arg)
{
	co_with_server(co_strange, "mem:1M", DISK_OPEN_RDWR);
}

static co_fn void co_main_deep(void *arg)
{
	co_with_server(co_deep, "delay:read=3ms:mem:1M", DISK_OPEN_RDWR);
}

static co_fn void co_main_read_only(void *arg)
{
	co_with_server(co_read_only, "mem:1M", 0);
}

static void a_kernel_that_keeps_to_the_rules_is_served(void)
{
	on_real(co_main_rules, NULL);
}

static void strange_requests_are_answered_with_an_error_or_dropped(void)
{
	on_real(co_main_strange, NULL);
}

static void more_requests_than_allowed_wait_and_are_all_answered(void)
{
	on_real(co_main_deep, NULL);
}

static void a_disk_that_is_read_only_refuses_changes(void)
{
	on_real(co_main_read_only, NULL);
}

static unsigned descriptors(void)
{
	unsigned n = 0;
	DIR *d = opendir("/proc/self/fd");

	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static co_fn void co_mounts(void *arg)
{
	struct fuse_export_config c = { .path = arg };
	struct fuse_server *s;
	struct err err = ERR_INIT;
	struct disk *d;
	struct stat st;
	unsigned before = 0;

	CHECK_EQ(co_disk_open("mem:1M", DISK_OPEN_RDWR, &d, &err), 0);
	CHECK_EQ(volume_create("test", d, &c.volume, &err), 0);
	for (int i = 0; i < 100; i++) {
		CHECK_EQ(fuse_server_create(&s, &err), 0);
		if (co_fuse_server_add(s, &c, &err) < 0)
			test_fail("%s", err.msg);
		CHECK_EQ(fuse_server_mounted(s), 1u);
		CHECK_EQ(co_fuse_server_stop(s, rt_now_exact_ns() + 20 * SECOND), 0);
		fuse_server_destroy(s);
		if (i == 0)
			before = descriptors();
	}
	CHECK_EQ(descriptors(), before);
	CHECK(stat(arg, &st) < 0 && errno == ENOENT);
	co_volume_destroy(c.volume);
}

static void a_hundred_mounts_leave_no_descriptor_and_no_file(void)
{
	char path[] = "/tmp/weir-fuse-XXXXXX";
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

	if (geteuid() || fd < 0) {
		printf("(left out: it needs root and /dev/fuse)\n");
		return;
	}
	close(fd);
	close(mkstemp(path));
	unlink(path);
	on_real(co_mounts, path);
}

static void the_list_of_mounts_is_read_as_the_kernel_writes_it(void)
{
	char text[] = "22 1 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
		      "nonsense\n"
		      "1 2 3 4 5 6 7\n"
		      "40 22 0:38 / /a\\040b\\134c ro master:1 shared:2 - fuse.weir weir:x\\054y rw,user_id=0\n"
		      "41 22 0:39 / /end rw,relatime - tmpfs tmpfs rw";
	struct mountinfo *m = malloc(sizeof(*m));
	FILE *f = fmemopen(text, sizeof(text) - 1, "r");

	CHECK(f && m && mountinfo_next(f, m));
	CHECK_STR(m->point, "/sys");
	CHECK(mountinfo_next(f, m));
	CHECK_STR(m->point, "/a b\\c");
	CHECK_STR(m->type, "fuse.weir");
	CHECK_STR(m->source, "weir:x,y");
	CHECK(m->read_only && m->id == 40 && m->major == 0 && m->minor == 38);
	CHECK(mountinfo_next(f, m));
	CHECK_STR(m->point, "/end");
	CHECK(!m->read_only);
	CHECK(!mountinfo_next(f, m));
	fclose(f);
	CHECK(mountinfo_find("/proc", m) && !strcmp(m->type, "proc"));
	CHECK(!mountinfo_find("/no/such/mount", m));
	free(m);
}

int main(void)
{
	log_set_level(LOG_NONE);
	backends_register();
	RUN(a_kernel_that_keeps_to_the_rules_is_served);
	RUN(strange_requests_are_answered_with_an_error_or_dropped);
	RUN(more_requests_than_allowed_wait_and_are_all_answered);
	RUN(a_disk_that_is_read_only_refuses_changes);
	RUN(a_hundred_mounts_leave_no_descriptor_and_no_file);
	RUN(the_list_of_mounts_is_read_as_the_kernel_writes_it);
	return 0;
}
