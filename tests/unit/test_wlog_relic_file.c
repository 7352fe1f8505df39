/* SPDX-License-Identifier: MIT */
/* The file that outlives a killed process: it takes little memory, makes do with what there is, and is ours alone. */
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "wlog_env.h"

#define MEM (6u << 20)
#define RING (wl_relic_layout(MEM).ring)

/* --- A tmpfs of any size --- */

static uint64_t room = UINT64_MAX, taken_room = UINT64_MAX;	/* when it is asked for, and when it is taken */

/* In the place of libc's. */
int fallocate(int fd, int mode, off_t off, off_t len)
{
	if (taken_room != UINT64_MAX && (uint64_t)(off + len) > taken_room) {
		errno = ENOSPC;
		return -1;
	}
	return (int)syscall(SYS_fallocate, fd, mode, off, len);
}

int fstatvfs(int fd, struct statvfs *st)
{
	memset(st, 0, sizeof(*st));
	st->f_bsize = st->f_frsize = 4096;
	st->f_bavail = st->f_blocks = room / 4096;
	return 0;
}

static char folder[64];

static bool make_folder(void)
{
	strcpy(folder, "/dev/shm/weir-test-XXXXXX");
	return mkdtemp(folder);
}

/* Runs `fn` with a file in a folder of its own, with so much room. */
static void run(void (*fn)(struct env *e), uint64_t says, uint64_t has)
{
	struct env_config c = { .log_size = WL_FIRST_SEGMENT + (64 << 20), .segment = 1 << 20, .image_size = 16 << 20,
				.log = { .memory = MEM, .no_destage = true, .relic_dir = folder } };

	if (!make_folder()) {
		printf("not tested: no /dev/shm\n");
		return;
	}
	room = says;
	taken_room = has;
	env_run(&c, fn);
	room = taken_room = UINT64_MAX;
	CHECK_EQ(rmdir(folder), 0);
}

static uint64_t bytes_of(const struct env *e)
{
	struct stat st;

	return stat(e->w->relic.path, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static struct wlog_info info_of(struct env *e)
{
	struct wlog_info i;

	wlog_get_info(e->w, &i);
	return i;
}

/* `mib` MiB in writes of `blocks`, each block with its number and version in front, and all of it is there. */
static co_fn void co_write_around(struct env *e, unsigned mib, unsigned blocks, uint64_t version)
{
	uint64_t *data = calloc(blocks, ENV_BLOCK), word;

	CHECK(data);
	for (unsigned at = 0; at < mib * 256; at += blocks) {
		for (unsigned b = 0; b < blocks; b++)
			data[b * ENV_BLOCK / 8] = env_word(at + b, version);
		CHECK_EQ(co_disk_write(e->vol[0], (uint64_t)at * ENV_BLOCK, data, (uint64_t)blocks * ENV_BLOCK, 0), 0);
	}
	co_flush(e, 0);
	for (unsigned at = blocks - 1; at < mib * 256; at += blocks) {	/* the last of each */
		CHECK_EQ(co_disk_read(e->vol[0], (uint64_t)at * ENV_BLOCK, &word, sizeof(word), 0), 0);
		CHECK_EQ(word, env_word(at, version));
	}
	free(data);
}

/* --- How much memory --- */

static co_fn void co_memory(struct env *e)
{
	char path[256];

	e->c.log.no_destage = false;
	co_env_start(e, 1, NULL);
	CHECK(e->w->relic.kept && bytes_of(e) < 4 << 20);
	for (unsigned round = 1; round <= 2; round++) {
		for (unsigned i = 0; i < 1000; i += 20)
			co_put(e, 0, i, 20, round);
		CHECK(bytes_of(e) > 4 << 20);
		CHECK_EQ(co_wlog_drain(e->w, NULL, NULL, NULL), 0);
		EXPECT_BLOCKS(e, 0, 0, 1000, round);
		co_sleep_ns(20 * SEC);
		CHECK(bytes_of(e) < 4 << 20);
	}
	strcpy(path, e->w->relic.path);
	CHECK_EQ(co_env_close(e), 0);
	CHECK(access(path, F_OK) < 0);
}

static void memory_goes_back_when_nothing_is_dirty(void)
{
	run(co_memory, UINT64_MAX, UINT64_MAX);
}

/* Less than the whole ring from the start. */
static co_fn void co_small(struct env *e)
{
	co_env_start(e, 1, NULL);
	CHECK(info_of(e).survives_kill);
	CHECK_EQ(info_of(e).memory_limit, 5 << 20);
	co_write_around(e, 7, 20, 1);
	/* The largest request fits it, too. */
	CHECK(e->vol[0]->limits.max_io >= 1 << 20);
	co_write_around(e, 6, 1024, 2);
	CHECK(info_of(e).survives_kill);
	CHECK(bytes_of(e) <= RING + (5 << 20) + (256 << 10));
	CHECK_EQ(co_env_close(e), 0);
}

static void with_less_room_the_ring_is_smaller(void)
{
	run(co_small, RING + (5 << 20) + 100, RING + (5 << 20));
}

static co_fn void co_none(struct env *e)
{
	co_env_start(e, 1, NULL);
	CHECK(!info_of(e).survives_kill);
	CHECK_EQ(info_of(e).memory_limit, MEM);
	CHECK(access(e->w->relic.path, F_OK) < 0);
	co_write_around(e, 2, 20, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void with_no_room_it_goes_on_without(void)
{
	run(co_none, RING + WL_MEM_MIN - 1, UINT64_MAX);
	run(co_none, UINT64_MAX, RING);
}

/* Others take it later. */
static co_fn void co_less_later(struct env *e)
{
	co_env_start(e, 1, NULL);
	CHECK_EQ(info_of(e).memory_limit, MEM);
	for (unsigned i = 1; i <= 2; i++) {
		co_write_around(e, 6, 20, i);
		CHECK(info_of(e).survives_kill);
		CHECK_EQ(info_of(e).memory_limit, 4 << 20);
	}
	CHECK_EQ(co_env_close(e), 0);
}

static void room_that_others_take_later_is_done_without(void)
{
	run(co_less_later, UINT64_MAX, RING + (5 << 20));
}

/* A request that was promised room in the whole ring: it has it, and nothing survives from then on. Whoever has the file open still cannot have its lock. */
static co_fn void co_outgrown(struct env *e)
{
	char other[300];
	uint64_t blocks;
	int fd;

	co_env_start(e, 1, NULL);
	blocks = e->vol[0]->limits.max_io / ENV_BLOCK;
	CHECK(blocks * ENV_BLOCK > 3 << 20);
	co_write_around(e, 6, 20, 1);
	CHECK(info_of(e).survives_kill);
	snprintf(other, sizeof(other), "%s.other", e->w->relic.path);
	CHECK_EQ(link(e->w->relic.path, other), 0);
	fd = open(other, O_RDWR);
	CHECK(fd >= 0);
	co_write_around(e, 3, (unsigned)blocks, 2);
	CHECK(!info_of(e).survives_kill);
	CHECK_EQ(info_of(e).memory_limit, MEM);
	CHECK(access(e->w->relic.path, F_OK) < 0);
	CHECK(flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	co_write_around(e, 3, 20, 3);
	CHECK_EQ(co_env_close(e), 0);
	/* Its memory has gone back. */
	struct stat st;

	CHECK_EQ(fstat(fd, &st), 0);
	CHECK_EQ(st.st_size, 0);
	CHECK_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
	close(fd);
	CHECK_EQ(unlink(other), 0);
}

static void a_log_that_gave_its_shared_memory_up_keeps_the_lock(void)
{
	run(co_outgrown, UINT64_MAX, RING + (4 << 20));
}

/* The same when the request is the first that needs more than what was taken ahead: it is known before any of it is put in. */
static co_fn void co_large_first(struct env *e)
{
	uint64_t blocks;

	co_env_start(e, 1, NULL);
	co_put(e, 0, 2000, 200, 2);	/* so that it ends beyond 4 MiB */
	co_flush(e, 0);
	blocks = e->vol[0]->limits.max_io / ENV_BLOCK;
	co_put(e, 0, 0, blocks, 1);
	CHECK(!info_of(e).failed && !info_of(e).survives_kill);
	co_flush(e, 0);
	EXPECT_BLOCKS(e, 0, 0, blocks, 1);
	CHECK_EQ(co_env_close(e), 0);
}

static void a_large_request_finds_its_memory_or_has_it_made(void)
{
	run(co_large_first, UINT64_MAX, RING + (4 << 20));
}

/* --- Whose file --- */

struct holder {
	struct rt_timer timer;
	int fd;
};

static void let_go(struct rt_timer *t)
{
	struct holder *h = container_of(t, struct holder, timer);

	close(h->fd);
}

static co_fn void co_locked(struct env *e)
{
	struct holder h = { .fd = -1 };
	struct wl_super *sb = malloc(sizeof(*sb));
	char path[256], uuid[37];

	CHECK_EQ(co_env_try_format(e, false), 0);
	env_super(e, 0, sb);
	snprintf(path, sizeof(path), "%s/weir-log-%s", folder, uuid_format(&sb->uuid, uuid));
	free(sb);
	h.fd = open(path, O_RDWR | O_CREAT, 0600);
	CHECK(h.fd >= 0);
	CHECK_EQ(flock(h.fd, LOCK_EX), 0);
	/* Somebody has it, for good: a takeover on the same host waits, and is refused. */
	CHECK_EQ(co_env_try_open(e), -EBUSY);
	CHECK(strstr(e->err.msg, "in use by another process") && strstr(e->err.msg, path));
	/* Or it ends a moment later. */
	rt_timer_arm(&h.timer, rt_now_ns() + 3 * SEC, let_go);
	co_env_open(e);
	CHECK(info_of(e).survives_kill);
	CHECK_EQ(co_env_close(e), 0);
}

static void who_takes_over_on_the_same_host_waits_for_the_other_one(void)
{
	run(co_locked, UINT64_MAX, UINT64_MAX);
}

/* Whatever the umask, the next start must not take it for somebody else's. */
static co_fn void co_umask(struct env *e)
{
	mode_t old = umask(0777);
	struct stat st;

	co_env_start(e, 1, NULL);
	umask(old);
	CHECK(info_of(e).survives_kill);
	CHECK_EQ(stat(e->w->relic.path, &st), 0);
	CHECK_EQ(st.st_mode & 07777, 0600);
	CHECK_EQ(co_env_close(e), 0);
}

static void its_mode_does_not_depend_on_the_umask(void)
{
	run(co_umask, UINT64_MAX, UINT64_MAX);
}

int main(int argc, char **argv)
{
	log_set_level(LOG_NONE);
	RUN(memory_goes_back_when_nothing_is_dirty);
	RUN(with_less_room_the_ring_is_smaller);
	RUN(with_no_room_it_goes_on_without);
	RUN(room_that_others_take_later_is_done_without);
	RUN(a_log_that_gave_its_shared_memory_up_keeps_the_lock);
	RUN(a_large_request_finds_its_memory_or_has_it_made);
	RUN(who_takes_over_on_the_same_host_waits_for_the_other_one);
	RUN(its_mode_does_not_depend_on_the_umask);
	return 0;
}
