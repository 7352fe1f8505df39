/* SPDX-License-Identifier: MIT */
/* The rbd driver over a double of librbd: what a cluster seldom does, at the moment that a test wants it. */
#include <pthread.h>
#include <sys/wait.h>

#include "backend/rbd.h"
#include "blk/spec.h"
#include "lib/disk_conformance.h"
#include "lib/fake_rbd.h"
#include "test_rt.h"
#include "util/bytes.h"
#include "util/log.h"
#include "util/rng.h"

#define MS 1000000ull
#define SEC 1000000000ull
#define SIZE (1u << 20)
#define BLOCK 4096u
#define MANY 700	/* more than twice what is in flight */

static const char *options;
static unsigned threads = 4;

static co_fn struct disk *co_open_it(unsigned flags)
{
	struct err err = ERR_INIT;
	struct disk *d = NULL;
	char name[128];

	snprintf(name, sizeof(name), "rbd:rbd/img%s", options ? options : "");
	if (co_disk_open(name, flags, &d, &err))
		test_fail("%s: %s", name, err.msg);
	return d;
}

static co_fn int co_open_error(char *msg, size_t size, const char *more)
{
	struct err err = ERR_INIT;
	struct disk *d = NULL;
	char name[128];
	int ret;

	snprintf(name, sizeof(name), "rbd:rbd/img%s", more);
	ret = co_disk_open(name, DISK_OPEN_RDWR, &d, &err);
	snprintf(msg, size, "%s", ret ? err.msg : "");
	co_disk_close(d);
	return ret;
}

/* One image, one thread of the reactor, several of the library. */
static void on_fake(co_entry *fn)
{
	struct rt *rt = make_rt(NULL);

	fake_rbd_start(SIZE, threads);
	CHECK_EQ(rt_run(rt, fn, NULL), 0);
	fake_rbd_stop();
	rt_destroy(rt);
}

static co_fn void co_wait_for(bool (*cond)(void *arg), void *arg, const char *what)
{
	uint64_t end = rt_now_exact_ns() + 20 * SEC;

	while (!cond(arg)) {
		if (rt_now_exact_ns() > end)
			test_fail("%s did not happen", what);
		co_sleep_ns(5 * MS);
	}
}

/* --- Requests that are in flight together --- */

struct req {
	struct disk *d;
	enum disk_op op;
	uint64_t off;
	uint8_t buf[BLOCK];
	int result;
	bool ended;
};

static struct req reqs[MANY];
static unsigned ended;

static co_fn int co_do(struct disk *d, enum disk_op op, uint64_t off, uint8_t *buf)
{
	switch (op) {
	case DISK_OP_READ:
		return co_disk_read(d, off, buf, BLOCK, 0);
	case DISK_OP_WRITE:
		return co_disk_write(d, off, buf, BLOCK, 0);
	case DISK_OP_DISCARD:
		return co_disk_discard(d, off, BLOCK, 0);
	case DISK_OP_ZERO:
		return co_disk_zero(d, off, BLOCK, 0);
	default:
		return co_disk_flush(d);
	}
}

static co_fn void co_req(void *arg)
{
	struct req *q = arg;

	q->result = co_do(q->d, q->op, q->off, q->buf);
	q->ended = true;
	ended++;
}

static void start(struct disk *d, unsigned i, enum disk_op op, uint64_t off)
{
	reqs[i].d = d;
	reqs[i].op = op;
	reqs[i].off = off;
	reqs[i].ended = false;
	CHECK_EQ(co_spawn("request", co_req, &reqs[i]), 0);
}

static bool all_ended(void *arg)
{
	return ended == *(unsigned *)arg;
}

static co_fn void co_all_end(unsigned n, const char *what)
{
	co_wait_for(all_ended, &n, what);
	ended = 0;
}

static bool in_flight(void *arg)
{
	return fake_rbd_in_flight() == *(unsigned *)arg;
}

/* --- The contract --- */

static co_fn void co_conform(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);

	co_disk_conform(d, CONFORM_SLOW, test_seed());
	co_disk_close(d);
	CHECK_STR(fake_rbd_owner(), "");
}

static void the_contract_holds_with_completions_from_many_threads(void)
{
	threads = 8;
	on_fake(co_conform);
	options = ",error-after=60s";
	on_fake(co_conform);
	options = NULL;
	threads = 4;
}

/* --- An image that shrinks under requests that wait --- */

static bool has_shrunk(void *arg)
{
	return rbd_of(arg)->size == SIZE / 2;
}

static co_fn void co_shrunk(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);

	fake_rbd_hold(true);
	for (unsigned i = 0; i < MANY; i++)
		start(d, i, i % 2 ? DISK_OP_READ : DISK_OP_WRITE, i < RBD_SLOTS ? i % 64 * BLOCK : SIZE / 2 + i % 64 * BLOCK);
	co_wait_for(in_flight, &(unsigned){ RBD_SLOTS }, "all places being taken");
	fake_rbd_resize(SIZE / 2);
	co_wait_for(has_shrunk, d, "the new size being seen");
	fake_rbd_hold(false);
	co_all_end(MANY, "the end of all requests");
	for (unsigned i = 0; i < MANY; i++)
		CHECK_EQ(reqs[i].result, i < RBD_SLOTS ? 0 : -EIO);
	co_disk_close(d);
}

static void who_waited_for_what_is_gone_lets_the_next_one_pass(void)
{
	on_fake(co_shrunk);
}

static bool has_grown(void *arg)
{
	return rbd_of(arg)->size == 2 * SIZE;
}

static co_fn void co_resized(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	struct err err = ERR_INIT;
	uint8_t buf[BLOCK];

	memset(buf, 0x5a, sizeof(buf));
	fake_rbd_resize(SIZE - 100);
	/* Not known yet: librbd cuts the read short, and that is no success. */
	CHECK_EQ(co_disk_read(d, SIZE - BLOCK, buf, BLOCK, 0), -EIO);
	fake_rbd_resize(2 * SIZE);
	co_wait_for(has_grown, d, "the new size being seen");
	CHECK_EQ(d->ops->store_size(d), 2 * SIZE);
	CHECK_EQ(d->size, SIZE);	/* until a layer above takes it */
	CHECK_EQ(co_disk_resize(d, 2 * SIZE, &err), 0);
	CHECK_EQ(co_disk_write(d, 2 * SIZE - BLOCK, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_resize(d, SIZE, &err), 0);
	CHECK_EQ(co_disk_write(d, SIZE, buf, BLOCK, 0), -EINVAL);
	co_disk_close(d);
}

static void a_size_that_changes_while_open_is_seen(void)
{
	on_fake(co_resized);
}

/* --- What is kept as one --- */

static co_fn void co_pieces(void *arg)
{
	static const struct { uint64_t stripe; const char *options; uint32_t object, atomic; } rows[] = {
		{ 0, "", FAKE_OBJECT, FAKE_OBJECT }, { 0, ",error-after=1s", FAKE_OBJECT, FAKE_OBJECT }, { 0, ",rbd_cache=true", FAKE_OBJECT, 0 },
		{ 4096, "", 4096, 4096 }, { 4096, ",rbd_cache=true", 4096, 0 }, { 12288, "", 0, 0 },
	};
	struct err err = ERR_INIT;
	char name[64];
	struct disk *d;

	for (unsigned i = 0; i < ARRAY_SIZE(rows); i++) {
		fake_rbd_stripe(rows[i].stripe);
		snprintf(name, sizeof(name), "rbd:rbd/img%s", rows[i].options);
		if (co_disk_open(name, DISK_OPEN_RDWR, &d, &err))
			test_fail("%s: %s", name, err.msg);
		CHECK_EQ(d->limits.object, rows[i].object);
		CHECK_EQ(d->limits.atomic_write, rows[i].atomic);
		co_disk_close(d);
	}
	fake_rbd_stripe(0);
}

static void a_write_is_whole_within_an_object_or_a_stripes_unit_unless_librbd_caches(void)
{
	on_fake(co_pieces);
}

/* --- Errors --- */

static const struct { enum fake_verb fake; enum disk_op op; } verbs[] = {
	{ FAKE_READ, DISK_OP_READ }, { FAKE_WRITE, DISK_OP_WRITE }, { FAKE_DISCARD, DISK_OP_DISCARD }, { FAKE_ZERO, DISK_OP_ZERO },
};

static const struct { int from, to; bool fences; } errors[] = {
	{ -EIO, -EIO }, { -ENOSPC, -ENOSPC }, { -EDQUOT, -ENOSPC }, { -EROFS, -EROFS, true }, { -ESHUTDOWN, -ESHUTDOWN, true }, { -ENOENT, -EIO },
	{ -EINVAL, -EIO }, { -ETIMEDOUT, -ETIMEDOUT }, { -EPERM, -EPERM }, { -EBADMSG, -EBADMSG }, { -ENOMEM, -ENOMEM },
};

static co_fn void co_one_error(unsigned v, unsigned e, void (*set)(enum fake_verb, int))
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	bool fences = errors[e].fences && verbs[v].op != DISK_OP_READ;
	uint8_t buf[BLOCK] = { 0 };
	int ret;

	set(verbs[v].fake, errors[e].from);
	ret = co_do(d, verbs[v].op, 0, buf);
	if (ret != errors[e].to)
		test_fail("verb %u: %d became %d, wanted %d", v, errors[e].from, ret, errors[e].to);
	set(verbs[v].fake, 0);
	CHECK_EQ(disk_is_fenced(d), fences);
	/* An error is one request's, but for what tells that the image is another's. */
	CHECK_EQ(co_do(d, verbs[v].op, 0, buf), fences ? -ESHUTDOWN : 0);
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), 0);
	co_disk_close(d);
}

static co_fn void co_errors(void *arg)
{
	for (unsigned v = 0; v < ARRAY_SIZE(verbs); v++)
		for (unsigned e = 0; e < ARRAY_SIZE(errors); e++) {
			co_one_error(v, e, fake_rbd_fail);
			co_one_error(v, e, fake_rbd_refuse);
		}
}

static void each_error_is_reported_and_only_a_lost_lock_is_final(void)
{
	on_fake(co_errors);
}

static co_fn void co_full(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	uint8_t buf[BLOCK] = { 1 };

	fake_rbd_fail(FAKE_WRITE, -ENOSPC);
	for (unsigned i = 0; i < MANY; i++)
		start(d, i, DISK_OP_WRITE, i % 64 * BLOCK);
	co_all_end(MANY, "the end of all writes");
	for (unsigned i = 0; i < MANY; i++)
		CHECK_EQ(reqs[i].result, -ENOSPC);
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_flush(d), 0);
	fake_rbd_fail(FAKE_WRITE, 0);
	CHECK_EQ(co_disk_write(d, 0, buf, BLOCK, 0), 0);
	CHECK_EQ(d->failed, 0);
	co_disk_close(d);
}

/* Also one whose quota is used up (EDQUOT). A real cluster finds that out from its manager's figures, and the one of the tests has no manager. */
static void a_full_pool_fails_writes_and_nothing_else(void)
{
	on_fake(co_full);
}

static co_fn void co_short(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	uint8_t buf[BLOCK];

	fake_rbd_short_reads(true);
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), -EIO);
	fake_rbd_short_reads(false);
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), 0);
	co_disk_close(d);
}

static void a_short_read_is_an_error(void)
{
	on_fake(co_short);
}

static co_fn void co_flush_passed(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);

	CHECK(d->limits.volatile_cache);
	CHECK_EQ(co_disk_flush(d), 0);
	fake_rbd_fail(FAKE_FLUSH, -EIO);
	CHECK_EQ(co_disk_flush(d), -EIO);
	fake_rbd_fail(FAKE_FLUSH, 0);
	CHECK_EQ(co_disk_flush(d), -EIO);
	co_disk_close(d);
}

static void a_failed_flush_of_librbds_cache_is_never_a_success_again(void)
{
	options = ",rbd_cache=true";
	on_fake(co_flush_passed);
	options = NULL;
}

/* --- Completions that do not come --- */

static co_fn void co_never(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	uint8_t buf[BLOCK];

	fake_rbd_hold(true);
	/* Two rounds: behind the first all places are in use, and stay so. */
	for (unsigned round = 0; round < 2; round++) {
		for (unsigned i = 0; i < RBD_SLOTS + 20; i++) {
			memset(reqs[i].buf, 0xee, BLOCK);
			start(d, i, i % 2 ? DISK_OP_READ : DISK_OP_WRITE, i % 64 * BLOCK);
		}
		co_all_end(RBD_SLOTS + 20, "giving up");
		for (unsigned i = 0; i < RBD_SLOTS + 20; i++)
			CHECK_EQ(reqs[i].result, -ETIMEDOUT);
	}
	CHECK_EQ(fake_rbd_in_flight(), RBD_SLOTS);
	CHECK(rbd_of(d)->given_up >= RBD_SLOTS && rbd_waiting_ns(rbd_of(d)) > 0);
	fake_rbd_write(BLOCK, 0x77);
	fake_rbd_hold(false);
	co_wait_for(in_flight, &(unsigned){ 0 }, "the late answers");
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), 0);
	/* Who gave a read up may do with the memory what he likes. */
	for (unsigned i = 1; i < RBD_SLOTS; i += 2)
		for (unsigned k = 0; k < BLOCK; k++)
			CHECK_EQ(reqs[i].buf[k], 0xee);
	co_disk_close(d);
}

static void requests_that_were_given_up_end_without_those_who_asked(void)
{
	options = ",error-after=50ms";
	on_fake(co_never);
	options = NULL;
}

static co_fn void co_release_soon(void *arg)
{
	co_sleep_ns(100 * MS);
	fake_rbd_hold(false);
}

static co_fn void co_close_waits(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);

	fake_rbd_hold(true);
	for (unsigned i = 0; i < 20; i++)
		start(d, i, DISK_OP_READ, i * BLOCK);
	co_all_end(20, "giving up");
	CHECK_EQ(co_spawn("release", co_release_soon, NULL), 0);
	/* Librbd still has the slots' buffers. */
	co_disk_close(d);
	CHECK_EQ(fake_rbd_in_flight(), 0);
}

static void a_close_waits_for_what_librbd_still_has(void)
{
	options = ",error-after=20ms";
	on_fake(co_close_waits);
	options = NULL;
}

static co_fn void co_pauses(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);

	fake_rbd_hold(true);
	for (unsigned i = 0; i < MANY; i++)
		start(d, i, DISK_OP_WRITE, i % 64 * BLOCK);
	co_sleep_ns(300 * MS);
	CHECK_EQ(ended, 0);
	CHECK_EQ(fake_rbd_in_flight(), RBD_SLOTS);
	fake_rbd_hold(false);
	co_all_end(MANY, "the end of all writes");
	for (unsigned i = 0; i < MANY; i++)
		CHECK_EQ(reqs[i].result, 0);
	co_disk_close(d);
}

static void without_a_limit_all_wait_and_none_is_lost(void)
{
	on_fake(co_pauses);
}

/* --- The lock and the image go away --- */

static bool is_fenced(void *arg)
{
	return disk_is_fenced(arg);
}

static void (*take_away)(void);

static co_fn void co_taken(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	uint8_t buf[BLOCK] = { 3 };
	struct err err = ERR_INIT;

	CHECK_EQ(co_disk_write(d, 0, buf, BLOCK, 0), 0);
	take_away();
	co_wait_for(is_fenced, d, "being fenced");
	for (unsigned v = 1; v < ARRAY_SIZE(verbs); v++)
		CHECK_EQ(co_do(d, verbs[v].op, 0, buf), -ESHUTDOWN);
	CHECK_EQ(co_disk_resize(d, SIZE * 2, &err), -ESHUTDOWN);
	CHECK_EQ(co_disk_mark_set(d, "m", &err), -ESHUTDOWN);
	CHECK_EQ(fake_rbd_in_flight(), 0);
	co_disk_close(d);
}

static void a_lock_or_an_image_that_is_gone_is_noticed_without_a_write(void)
{
	static void (*const ways[])(void) = { fake_rbd_steal, fake_rbd_remove, fake_rbd_blocklist };

	for (unsigned i = 0; i < ARRAY_SIZE(ways); i++) {
		take_away = ways[i];
		on_fake(co_taken);
	}
}

static co_fn void co_blocklisted(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	uint8_t buf[BLOCK];
	unsigned lost = 0;

	fake_rbd_hold(true);
	for (unsigned i = 0; i < MANY; i++) {
		memset(reqs[i].buf, 0xaa, BLOCK);
		start(d, i, DISK_OP_WRITE, i % 64 * BLOCK);
	}
	co_wait_for(in_flight, &(unsigned){ RBD_SLOTS }, "all places being taken");
	fake_rbd_blocklist();
	fake_rbd_hold(false);
	co_all_end(MANY, "the end of all writes");
	for (unsigned i = 0; i < MANY; i++)
		lost += reqs[i].result == -ESHUTDOWN;
	CHECK_EQ(lost, MANY);
	for (unsigned k = 0; k < SIZE; k++)
		CHECK_EQ(fake_rbd_data()[k], 0);
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), 0);
	co_disk_close(d);
}

static void who_is_blocklisted_with_writes_in_flight_changes_nothing_more(void)
{
	on_fake(co_blocklisted);
}

/* --- Who has the lock --- */

static co_fn void co_lock(void *arg)
{
	struct disk *d;
	char msg[512];
	uint64_t began;

	fake_rbd_own(FAKE_OTHER, true, true);
	CHECK_EQ(co_open_error(msg, sizeof(msg), ""), -EBUSY);
	CHECK(strstr(msg, FAKE_OTHER));
	CHECK(!fake_rbd_blocklisted(FAKE_OTHER));
	/* It does not answer, and may yet live: its lock is waited for. */
	fake_rbd_own(FAKE_OTHER, true, false);
	began = rt_now_exact_ns();
	CHECK_EQ(co_open_error(msg, sizeof(msg), ",open-timeout=300ms"), -EBUSY);
	CHECK(rt_now_exact_ns() - began >= 300 * MS);
	CHECK(!fake_rbd_blocklisted(FAKE_OTHER));
	/* The cluster has given it up. */
	fake_rbd_expire();
	d = co_open_it(DISK_OPEN_RDWR);
	CHECK(fake_rbd_blocklisted(FAKE_OTHER));
	/* Readers need no lock, and a second writer is refused. */
	co_disk_close(co_open_it(0));
	CHECK_EQ(co_open_error(msg, sizeof(msg), ""), -EBUSY);
	co_disk_close(d);
}

static void only_a_dead_clients_lock_is_broken(void)
{
	on_fake(co_lock);
}

struct child {
	pid_t pid;
	int out;
	char name[RBD_PROCESS_MAX];
};

/* Another process, by the name that it has for itself; it lives until child_end(). */
static void child_start(struct child *c)
{
	int out[2], in[2];

	CHECK_EQ(pipe(out), 0);
	CHECK_EQ(pipe(in), 0);
	c->pid = fork();
	CHECK(c->pid >= 0);
	if (!c->pid) {
		char end;

		close(in[1]);
		rbd_process_name(c->name, sizeof(c->name));
		CHECK_EQ(write(out[1], c->name, sizeof(c->name)), sizeof(c->name));
		_exit(read(in[0], &end, 1) < 0);
	}
	close(out[1]);
	close(in[0]);
	CHECK_EQ(read(out[0], c->name, sizeof(c->name)), sizeof(c->name));
	close(out[0]);
	c->out = in[1];
}

static void child_end(struct child *c)
{
	close(c->out);
	CHECK_EQ(waitpid(c->pid, NULL, 0), c->pid);
}

static void a_process_is_dead_only_if_that_is_certain(void)
{
	char own[RBD_PROCESS_MAX], other[RBD_PROCESS_MAX];
	struct child c;

	rbd_process_name(own, sizeof(own));
	CHECK(strcmp(own, "unknown"));
	CHECK_EQ(rbd_process_is_dead(own), 0);
	child_start(&c);
	CHECK_EQ(rbd_process_is_dead(c.name), 0);
	child_end(&c);
	CHECK_EQ(rbd_process_is_dead(c.name), c.pid);
	/* Its id, taken by another one since. */
	snprintf(other, sizeof(other), "%s", own);
	*strrchr(other, '/') = '\0';
	CHECK(strlen(other) + 3 < sizeof(other));
	strcat(other, "/1");
	CHECK_EQ(rbd_process_is_dead(other), getpid());
	/* Another boot, another namespace, and what is no name. */
	snprintf(other, sizeof(other), "%s", c.name);
	other[0] = other[0] == 'a' ? 'b' : 'a';
	CHECK_EQ(rbd_process_is_dead(other), 0);
	snprintf(other, sizeof(other), "%s", c.name);
	strchr(other, '/')[1] ^= 1;
	CHECK_EQ(rbd_process_is_dead(other), 0);
	/* Cut short, up to behind the process id. */
	for (size_t n = 0; n < strlen(c.name); n++) {
		snprintf(other, sizeof(other), "%s", c.name);
		other[n] = '\0';
		if (n <= (size_t)(strrchr(c.name, '/') - c.name))
			CHECK_EQ(rbd_process_is_dead(other), 0);
	}
	CHECK_EQ(rbd_process_is_dead("unknown"), 0);
}

static void set_witness(const char *client, const char *process)
{
	char text[512];

	snprintf(text, sizeof(text), "weir-writer-1 writers=41 generation=3 client=%s release=0 process=%s\n", client, process);
	fake_rbd_set_witness(text);
}

static co_fn void co_died_here(void *arg)
{
	struct child *c = arg;
	struct disk *d;
	char msg[512];
	uint64_t writers;

	/* It lives, and does not answer. */
	set_witness(FAKE_OTHER, c->name);
	fake_rbd_own(FAKE_OTHER, true, false);
	CHECK_EQ(co_open_error(msg, sizeof(msg), ",open-timeout=300ms"), -EBUSY);
	child_end(c);
	/* Dead, but the lock is not its; and whoever answers lives, whatever the name says. */
	set_witness("192.0.2.8:0/1", c->name);
	CHECK_EQ(co_open_error(msg, sizeof(msg), ",open-timeout=300ms"), -EBUSY);
	set_witness(FAKE_OTHER, c->name);
	fake_rbd_own(FAKE_OTHER, true, true);
	CHECK_EQ(co_open_error(msg, sizeof(msg), ",open-timeout=300ms"), -EBUSY);
	CHECK(!fake_rbd_blocklisted(FAKE_OTHER));
	fake_rbd_own(FAKE_OTHER, true, false);
	d = co_open_it(DISK_OPEN_RDWR);
	CHECK(fake_rbd_blocklisted(FAKE_OTHER));
	/* Nobody else was there: what it left in its log may be replayed. */
	CHECK_EQ(co_disk_writers(d, &writers), 0);
	CHECK_EQ(writers, 41);
	CHECK(strstr(fake_rbd_witness(), "generation=4"));
	co_disk_close(d);
}

static void the_lock_of_a_process_that_died_on_this_host_is_broken_at_once(void)
{
	struct rt *rt = make_rt(NULL);
	struct child c;

	child_start(&c);
	fake_rbd_start(SIZE, 1);
	CHECK_EQ(rt_run(rt, co_died_here, &c), 0);
	fake_rbd_stop();
	rt_destroy(rt);
}

/* --- What a user may not do --- */

static co_fn void co_not_allowed(void *arg)
{
	static const struct { const char *call; int error; const char *says; } rows[] = {
		{ "rados_connect", -EACCES, "does not let client.admin in" }, { "rados_connect", -ETIMEDOUT, "are its monitors" },
		{ "rados_ioctx_create", -EPERM, "pool \"rbd\"" }, { "rbd_open", -EPERM, "profile rbd" }, { "rbd_open", -EROFS, "librbd cannot open it" },
		{ "rbd_lock_acquire", -EPERM, "profile rbd" }, { "rbd_lock_acquire", -EACCES, "profile rbd" }, { "rbd_lock_get_owners", -EPERM, "who holds" },
	};
	struct err err = ERR_INIT;
	uint8_t buf[BLOCK] = { 5 };
	char msg[512];
	struct disk *d;

	for (unsigned i = 0; i < ARRAY_SIZE(rows); i++) {
		fake_rbd_fail_named(rows[i].call, rows[i].error);
		CHECK_EQ(co_open_error(msg, sizeof(msg), ""), rows[i].error);
		if (!strstr(msg, rows[i].says))
			test_fail("%s: \"%s\" does not say \"%s\"", rows[i].call, msg, rows[i].says);
	}
	/* A pool that may only be read: readers are served, and a log is not attached. */
	fake_rbd_fail_named("rbd_lock_acquire", -EPERM);
	d = co_open_it(0);
	CHECK_EQ(co_disk_read(d, 0, buf, BLOCK, 0), 0);
	CHECK_EQ(co_disk_write(d, 0, buf, BLOCK, 0), -EROFS);
	co_disk_close(d);
	fake_rbd_fail_named("rbd_metadata_set", -EPERM);
	d = co_open_it(DISK_OPEN_RDWR);
	CHECK_EQ(co_disk_mark_set(d, "m", &err), -EPERM);
	CHECK(strstr(err.msg, "weir.mark"));
	co_disk_close(d);
	fake_rbd_fail_named(NULL, 0);
}

static void what_a_user_may_not_do_is_said(void)
{
	on_fake(co_not_allowed);
}

/* --- Calls that hang --- */

static bool has_a_call(void *arg)
{
	return rbd_of(arg)->call_since_ns && rbd_waiting_ns(rbd_of(arg)) > 100 * MS;
}

static co_fn void co_call_hangs(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	uint8_t buf[BLOCK] = { 6 };

	fake_rbd_hang(true);
	co_wait_for(has_a_call, d, "the look at the lock");
	fake_rbd_hold(true);
	start(d, 0, DISK_OP_READ, 0);
	co_wait_for(in_flight, &(unsigned){ 1 }, "a request being sent");
	fake_rbd_hang(false);
	fake_rbd_hold(false);
	co_all_end(1, "the read");
	CHECK_EQ(co_disk_write(d, 0, buf, BLOCK, 0), 0);
	co_disk_close(d);
}

static void a_call_that_hangs_is_counted_and_stops_no_request(void)
{
	on_fake(co_call_hangs);
}

/* --- Every call fails once --- */

static co_fn int co_use(struct err *err)
{
	struct disk *d = NULL;
	struct disk_extent e;
	char mark[DISK_MARK_MAX + 1];
	uint8_t buf[BLOCK] = { 9 };
	int ret = co_disk_open("rbd:rbd/img,rbd_cache=true", DISK_OPEN_RDWR, &d, err);

	if (ret)
		return ret;
	ret = co_disk_mark_get(d, mark, sizeof(mark));
	ret = ret ? ret : co_disk_mark_set(d, "log", err);
	ret = ret ? ret : co_disk_write(d, 0, buf, BLOCK, 0);
	ret = ret ? ret : co_disk_extent(d, 0, SIZE, &e);
	ret = ret ? ret : co_disk_resize(d, SIZE, err);
	ret = ret ? ret : co_disk_mark_set(d, "", err);
	co_disk_close(d);
	return ret;
}

static co_fn void co_each_call(void *arg)
{
	static const int codes[] = { -EIO, -ENOENT, -ESHUTDOWN };
	struct err err = ERR_INIT;

	for (unsigned c = 0; c < ARRAY_SIZE(codes); c++)
		for (int n = 0;; n++) {
			fake_rbd_fail_call(n, codes[c]);
			err = (struct err)ERR_INIT;
			if (!co_use(&err) && !*fake_rbd_failed())
				break;
			CHECK(n < 200);
			/* It is none the worse for it. */
			fake_rbd_fail_call(-1, 0);
			err = (struct err)ERR_INIT;
			if (co_use(&err))
				test_fail("behind a failed %s: %s", fake_rbd_failed(), err.msg);
			CHECK_STR(fake_rbd_owner(), "");
		}
}

static void every_call_may_fail_once(void)
{
	on_fake(co_each_call);
}

/* --- Requests of all kinds against a model --- */

static co_fn void co_random(void *arg)
{
	struct disk *d = co_open_it(DISK_OPEN_RDWR);
	static uint8_t model[SIZE], got[SIZE];
	unsigned rounds = test_scale(40);
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (unsigned r = 0; r < rounds; r++) {
		/* Each unit of the image has one request at a time. */
		for (unsigned i = 0; i < SIZE / BLOCK; i++) {
			enum disk_op op = verbs[rng_below(&rng, ARRAY_SIZE(verbs))].op;

			if (op == DISK_OP_DISCARD)
				op = DISK_OP_WRITE;
			if (op == DISK_OP_WRITE)
				memset(reqs[i].buf, 1 + (int)rng_below(&rng, 255), BLOCK);
			start(d, i, op, i * BLOCK);
		}
		co_all_end(SIZE / BLOCK, "a round");
		for (unsigned i = 0; i < SIZE / BLOCK; i++) {
			uint8_t *now = model + i * BLOCK;

			CHECK_EQ(reqs[i].result, 0);
			if (reqs[i].op == DISK_OP_READ)
				CHECK(!memcmp(now, reqs[i].buf, BLOCK));
			else if (reqs[i].op == DISK_OP_WRITE)
				memcpy(now, reqs[i].buf, BLOCK);
			else
				memset(now, 0, BLOCK);
		}
	}
	CHECK_EQ(co_disk_read(d, 0, got, SIZE, 0), 0);
	CHECK(!memcmp(got, model, SIZE));
	co_disk_close(d);
}

static void all_requests_in_flight_together_give_what_the_model_has(void)
{
	threads = 12;
	on_fake(co_random);
	threads = 4;
}

/* --- Two reactors --- */

#define PART_WORKERS 32u

/* Half of the image, on a reactor of its own: one of them has the lock and writes, the other only reads. */
struct part {
	uint64_t base;
	bool writes;
	struct rt *rt;
	struct disk *d;
	unsigned begun, ended;
};

static co_fn void co_part_worker(void *arg)
{
	struct part *p = arg;
	unsigned n = p->begun++;
	uint64_t off = p->base + n * BLOCK;
	uint8_t now[BLOCK], got[BLOCK];

	for (unsigned r = 0, rounds = test_scale(60); r < rounds; r++) {
		memset(now, p->writes ? 1 + (int)((n * 7 + r) % 255) : 0x5a, BLOCK);
		if (p->writes)
			CHECK_EQ(co_disk_write(p->d, off, now, BLOCK, 0), 0);
		CHECK(rt_self() == p->rt);
		CHECK_EQ(co_disk_read(p->d, off, got, BLOCK, 0), 0);
		CHECK(rt_self() == p->rt && !memcmp(now, got, BLOCK));
	}
	p->ended++;
}

static co_fn void co_part(void *arg)
{
	struct part *p = arg;

	p->rt = rt_self();
	p->d = co_open_it(p->writes ? DISK_OPEN_RDWR : 0);
	for (unsigned i = 0; i < PART_WORKERS; i++)
		CHECK_EQ(co_spawn("worker", co_part_worker, p), 0);
	while (p->ended < PART_WORKERS)
		co_sleep_ns(1 * MS);
	co_disk_close(p->d);
}

static void *part_main(void *arg)
{
	struct rt *rt = make_rt(NULL);

	CHECK_EQ(rt_run(rt, co_part, arg), 0);
	rt_destroy(rt);
	return NULL;
}

static void disks_of_two_reactors_have_nothing_to_do_with_each_other(void)
{
	struct part one = { .base = 0, .writes = true }, two = { .base = SIZE / 2 };
	pthread_t other;

	fake_rbd_start(SIZE, 8);
	memset(fake_rbd_data() + SIZE / 2, 0x5a, SIZE / 2);
	CHECK_EQ(pthread_create(&other, NULL, part_main, &two), 0);
	part_main(&one);
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(fake_rbd_in_flight(), 0);
	fake_rbd_stop();
}

int main(void)
{
	backends_register();
	/* Each failure is told, many times over. */
	log_set_level(LOG_NONE);
	RUN(the_contract_holds_with_completions_from_many_threads);
	RUN(who_waited_for_what_is_gone_lets_the_next_one_pass);
	RUN(a_size_that_changes_while_open_is_seen);
	RUN(a_write_is_whole_within_an_object_or_a_stripes_unit_unless_librbd_caches);
	RUN(each_error_is_reported_and_only_a_lost_lock_is_final);
	RUN(a_full_pool_fails_writes_and_nothing_else);
	RUN(a_short_read_is_an_error);
	RUN(a_failed_flush_of_librbds_cache_is_never_a_success_again);
	RUN(requests_that_were_given_up_end_without_those_who_asked);
	RUN(a_close_waits_for_what_librbd_still_has);
	RUN(without_a_limit_all_wait_and_none_is_lost);
	RUN(a_lock_or_an_image_that_is_gone_is_noticed_without_a_write);
	RUN(who_is_blocklisted_with_writes_in_flight_changes_nothing_more);
	RUN(only_a_dead_clients_lock_is_broken);
	RUN(a_process_is_dead_only_if_that_is_certain);
	RUN(the_lock_of_a_process_that_died_on_this_host_is_broken_at_once);
	RUN(what_a_user_may_not_do_is_said);
	RUN(a_call_that_hangs_is_counted_and_stops_no_request);
	RUN(every_call_may_fail_once);
	RUN(all_requests_in_flight_together_give_what_the_model_has);
	RUN(disks_of_two_reactors_have_nothing_to_do_with_each_other);
	return 0;
}
