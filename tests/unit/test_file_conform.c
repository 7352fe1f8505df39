/* SPDX-License-Identifier: MIT */
/*
 * The file backend keeps the disk contract in every mode: on files of even and odd sizes, and on loop devices with sectors of 512
 * and 4096 bytes, where this machine lets us have one.
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "blk/spec.h"
#include "lib/disk_conformance.h"
#include "rt/buf.h"
#include "test_loop.h"
#include "test_rt.h"
#include "util/bytes.h"

static char dir[] = "test-file-conform-XXXXXX";
static uint64_t seed;

struct plan {
	const char *aio, *cache;
	uint64_t size;
	unsigned loop;		/* a loop device with sectors of that size */
};

static const struct plan plans[] = {
	{ "io_uring", "none", 1200001, 0 },
	{ "io_uring", "directsync", 1200001, 0 },
	{ "io_uring", "writeback", 1200001, 0 },
	{ "io_uring", "writethrough", 1200001, 0 },
	{ "io_uring", "unsafe", 1200001, 0 },
	{ "native", "none", 1200512, 0 },
	{ "native", "directsync", 1200512, 0 },
	{ "threads", "none", 2 << 20, 0 },
	{ "threads", "directsync", 2 << 20, 0 },
	{ "threads", "writeback", 2 << 20, 0 },
	{ "threads", "writethrough", 2 << 20, 0 },
	{ "io_uring", "none", 2 << 20, 512 },
	{ "io_uring", "none", 2 << 20, 4096 },
	{ "native", "directsync", 2 << 20, 4096 },
	{ "threads", "none", 2 << 20, 4096 },
	{ "io_uring", "writeback", 2 << 20, 4096 },
	{ "threads", "writethrough", 2 << 20, 512 },
};

struct run {
	const char *disk;
	unsigned flags;
};

static co_fn void co_conform(void *arg)
{
	const struct run *run = arg;
	struct err err = ERR_INIT;
	struct disk *d;

	if (co_disk_open(run->disk, DISK_OPEN_RDWR, &d, &err))
		test_fail("%s", err.msg);
	co_disk_conform(d, CONFORM_SLOW | run->flags, seed);
	co_disk_close(d);
}

static void conform(const struct plan *p, const char *path)
{
	struct rt *rt = make_rt(NULL);
	struct rt_bufpool *bufs;
	struct err err = ERR_INIT;
	bool direct = !strcmp(p->cache, "none") || !strcmp(p->cache, "directsync");
	char text[256];
	struct run run = { text, direct ? 0 : CONFORM_TORN_READS };

	snprintf(text, sizeof(text), "%s,aio=%s,cache=%s", path, p->aio, p->cache);
	printf("%s\n", text);
	if (rt_bufpool_create(rt, RT_BUF_MAX, &bufs, &err))
		test_fail("%s", err.msg);
	rt_set_bufs(rt, bufs);
	CHECK_EQ(rt_run(rt, co_conform, &run), 0);
	CHECK_EQ(rt_bufpool_used(bufs), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
}

static bool run_plan(const struct plan *p)
{
	char path[64], dev[64];
	struct stat st;
	int fd;

	snprintf(path, sizeof(path), "%s/image", dir);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	CHECK(fd >= 0 && !ftruncate(fd, (off_t)p->size));
	close(fd);
	if (!p->loop) {
		conform(p, path);
		CHECK_EQ(stat(path, &st), 0);
		CHECK_EQ((uint64_t)st.st_size, p->size);
		return true;
	}
	fd = loop_attach(path, p->loop, dev, sizeof(dev));
	if (fd < 0)
		return false;
	conform(p, dev);
	close(fd);
	return true;
}

int main(void)
{
	unsigned left_out = 0;
	char command[64], state[256];

	seed = test_seed();
	CHECK(mkdtemp(dir));
	CHECK(getcwd(state, sizeof(state) - sizeof(dir) - 1));
	strcat(strcat(state, "/"), dir);
	setenv("WEIR_STATE_DIR", state, 1);
	backends_register();
	for (unsigned i = 0; i < ARRAY_SIZE(plans); i++)
		left_out += !run_plan(&plans[i]);
	snprintf(command, sizeof(command), "rm -rf ./%s", dir);
	if (system(command))
		test_fail("%s is left", dir);
	if (left_out)
		test_skip("%u of the modes need a loop device (root, /dev/loop-control)", left_out);
	return 0;
}
