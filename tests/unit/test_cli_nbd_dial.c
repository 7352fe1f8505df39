/* SPDX-License-Identifier: MIT */
/*
 * The handshake of `weir map` with servers that lie, stop in the middle or dawdle.
 *
 * A server in a child goes through the same list of cases as the test: for each it accepts one connection, sends what is to be sent, and waits for its end.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "cli/nbd_dial.h"
#include "lib/test.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/nbd_proto.h"

#define SIZE 0x123456789a00ull
#define FLAGS (NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA)
#define PATIENCE_MS 60000u

static char folder[] = "/tmp/weir-nbd-dial-XXXXXX", path[64];

/* --- What a server says --- */

struct speech {
	uint8_t bytes[16384];
	unsigned len;
	unsigned step, pause_us; /* so many bytes at a time, 0: all; and what is between them */
	bool silent;		/* stays, and says no more; else it hangs up */
};

static void hello(struct speech *s, unsigned flags)
{
	put_be64(s->bytes, NBD_MAGIC);
	put_be64(s->bytes + 8, NBD_OPT_MAGIC);
	put_be16(s->bytes + 16, flags);
	s->len = 18;
}

static uint8_t *reply(struct speech *s, uint32_t type, const void *data, uint32_t len)
{
	uint8_t *p = s->bytes + s->len;

	CHECK(s->len + 20 + len <= sizeof(s->bytes));
	put_be64(p, NBD_REP_MAGIC);
	put_be32(p + 8, NBD_OPT_GO);
	put_be32(p + 12, type);
	put_be32(p + 16, len);
	memcpy(p + 20, data, len);
	s->len += 20 + len;
	return p;
}

static void info_export(struct speech *s, uint64_t size, unsigned flags)
{
	uint8_t d[12];

	put_be16(d, NBD_INFO_EXPORT);
	put_be64(d + 2, size);
	put_be16(d + 10, flags);
	reply(s, NBD_REP_INFO, d, sizeof(d));
}

static void info_blocks(struct speech *s, uint32_t least)
{
	uint8_t d[14];

	put_be16(d, NBD_INFO_BLOCK_SIZE);
	put_be32(d + 2, least);
	put_be32(d + 6, 4096);
	put_be32(d + 10, NBD_MAX_PAYLOAD);
	reply(s, NBD_REP_INFO, d, sizeof(d));
}

/* Without a fault. */
static void truth(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	info_export(s, SIZE, FLAGS);
	info_blocks(s, 512);
	reply(s, NBD_REP_ACK, "", 0);
}

/* --- A server --- */

static void speak(int fd, const struct speech *s)
{
	char buf[4096];

	for (unsigned at = 0; at < s->len;) {
		unsigned n = min(s->step ? s->step : s->len, s->len - at);

		if (send(fd, s->bytes + at, n, MSG_NOSIGNAL) != (ssize_t)n)
			break;
		at += n;
		usleep(s->pause_us);
	}
	if (!s->silent)
		shutdown(fd, SHUT_WR);
	while (recv(fd, buf, sizeof(buf), 0) > 0)
		;
	close(fd);
}

static int listen_there(int backlog)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	strcpy(sun.sun_path, path);
	CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&sun, sizeof(sun)) && !listen(fd, backlog));
	return fd;
}

/* `make` returns false when there are no more cases. */
static pid_t serve(bool (*make)(unsigned i, struct speech *s))
{
	int fd = listen_there(4);
	pid_t pid;

	fflush(stdout);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		static struct speech s;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (unsigned i = 0; memset(&s, 0, sizeof(s)), make(i, &s); i++)
			speak(accept(fd, NULL, NULL), &s);
		_exit(0);
	}
	close(fd);
	return pid;
}

static void served(pid_t pid)
{
	int status;

	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	unlink(path);
}

/* --- The client --- */

static struct err err;
static struct nbd_dialled d;

static unsigned descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	unsigned n = 0;

	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

/* Whatever was said: an error that is told and leaves nothing, or a connection that can be used. */
static int dial(unsigned patience_ms)
{
	struct timeval t = { 1, 1 };
	socklen_t len = sizeof(t);
	unsigned before = descriptors();
	int ret;

	err_clear(&err);
	memset(&d, 0xee, sizeof(d));
	ret = nbd_dial(path, "disk", patience_ms, &d, &err);
	CHECK_EQ(descriptors(), before + !ret);
	if (ret < 0) {
		CHECK_EQ(err.code, ret);
		CHECK(!strncmp(err.msg, path, strlen(path)) && strlen(err.msg) > strlen(path) + 5);
		return ret;
	}
	CHECK(is_pow2(d.min_block) && d.min_block <= 65536 && d.size <= INT64_MAX && d.flags & NBD_FLAG_HAS_FLAGS);
	/* The kernel would take a time-out for the end of the connection. */
	CHECK(!getsockopt(d.fd, SOL_SOCKET, SO_RCVTIMEO, &t, &len) && !t.tv_sec && !t.tv_usec);
	CHECK(!getsockopt(d.fd, SOL_SOCKET, SO_SNDTIMEO, &t, &len) && (t.tv_sec | t.tv_usec) == 0);
	close(d.fd);
	return 0;
}

/* --- Cut at each byte --- */

static bool cut(unsigned i, struct speech *s)
{
	truth(s);
	if (i > s->len)
		return false;
	s->len = i;
	return true;
}

static void who_hangs_up_at_any_byte_of_the_handshake_is_told(void)
{
	pid_t pid = serve(cut);
	struct speech s;
	unsigned i = 0;

	for (truth(&s); i < s.len; i++)
		CHECK_EQ(dial(PATIENCE_MS), -ECONNRESET);
	CHECK_EQ(dial(PATIENCE_MS), 0);
	CHECK(d.size == SIZE && d.flags == FLAGS && d.min_block == 512);
	served(pid);
}

/* --- Another byte in each place --- */

static const uint8_t bits[] = { 0x01, 0x80, 0xff };

static bool changed(unsigned i, struct speech *s)
{
	truth(s);
	if (i / ARRAY_SIZE(bits) >= s->len)
		return false;
	s->bytes[i / ARRAY_SIZE(bits)] ^= bits[i % ARRAY_SIZE(bits)];
	return true;
}

/* Of the three replies the header's first 12 bytes are known; then come the kind and the length. */
static bool is_fixed(unsigned at)
{
	static const unsigned replies[] = { 18, 18 + 32, 18 + 32 + 34 };

	for (unsigned i = 0; i < ARRAY_SIZE(replies); i++)
		if (at >= replies[i] && at < replies[i] + 12)
			return true;
	return at < 16;
}

static void no_byte_of_the_handshake_is_believed(void)
{
	pid_t pid = serve(changed);
	struct speech s;
	unsigned good = 0;

	truth(&s);
	for (unsigned i = 0; i < s.len * ARRAY_SIZE(bits); i++) {
		int ret = dial(PATIENCE_MS);

		good += !ret;
		if (is_fixed(i / ARRAY_SIZE(bits)))
			CHECK_EQ(ret, -EPROTO);
		else
			CHECK(!ret || ret == -EPROTO || ret == -ENOENT || ret == -ECONNRESET);
	}
	/* The export's size and flags, and block sizes that are not asked for, may be others. */
	CHECK(good > 20 && good < 100);
	served(pid);
}

/* --- Lies --- */

static void no_newstyle(struct speech *s)
{
	hello(s, NBD_FLAG_NO_ZEROES);
}

static void oldstyle(struct speech *s)
{
	hello(s, 0);
	put_be64(s->bytes + 8, 0x00420281861253ull);
	s->len = 152;
}

static void nothing_about_the_export(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	info_blocks(s, 512);
	reply(s, NBD_REP_ACK, "", 0);
}

static void flags_that_are_none(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	info_export(s, SIZE, FLAGS & ~NBD_FLAG_HAS_FLAGS);
	reply(s, NBD_REP_ACK, "", 0);
}

static void more_than_a_disk_can_have(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	info_export(s, 1ull << 63, FLAGS);
	reply(s, NBD_REP_ACK, "", 0);
}

static void blocks_of(struct speech *s, uint32_t least)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	info_export(s, SIZE, FLAGS);
	info_blocks(s, least);
	reply(s, NBD_REP_ACK, "", 0);
}

static void blocks_of_nothing(struct speech *s)
{
	blocks_of(s, 0);
}

static void blocks_of_513(struct speech *s)
{
	blocks_of(s, 513);
}

static void blocks_of_128k(struct speech *s)
{
	blocks_of(s, 128 << 10);
}

static void an_information_of_one_byte(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	reply(s, NBD_REP_INFO, "", 1);
}

static void an_export_with_more_to_it(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	reply(s, NBD_REP_INFO, "\0\0aaaaaaaabb", 13);
}

static void block_sizes_with_less(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	reply(s, NBD_REP_INFO, "\0\3aaaabbbbccc", 13);
}

static void an_acknowledgement_with_a_word(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	info_export(s, SIZE, FLAGS);
	reply(s, NBD_REP_ACK, "yes", 3);
}

static void a_list(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	info_export(s, SIZE, FLAGS);
	reply(s, NBD_REP_SERVER, "\0\0\0\4disk", 8);
}

static void a_reply_without_end(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	put_be32(reply(s, NBD_REP_INFO, "\0\1", 2) + 16, UINT32_MAX);
	s->silent = true;
}

static void replies_without_end(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	for (int i = 0; i < 200; i++)
		info_export(s, SIZE, FLAGS);
	s->silent = true;
}

static void tls(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	reply(s, NBD_REP_ERR_TLS_REQD, "first STARTTLS", 14);
}

static void a_refusal(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	reply(s, NBD_REP_ERR_UNKNOWN, "no such disk", 12);
}

static void a_refusal_of_4096_bytes(struct speech *s)
{
	char words[NBD_STRING_MAX];

	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	memset(words, 'x', sizeof(words));
	reply(s, NBD_REP_ERR_POLICY, words, sizeof(words));
}

static void a_refusal_that_is_too_long(struct speech *s)
{
	static const char words[NBD_STRING_MAX + 64];

	hello(s, NBD_FLAG_FIXED_NEWSTYLE);
	reply(s, NBD_REP_ERR_POLICY, words, sizeof(words));
}

/* These are no lies. */
static void what_was_not_asked_for(struct speech *s)
{
	hello(s, NBD_FLAG_FIXED_NEWSTYLE | 0x8000);
	reply(s, NBD_REP_INFO, "\0\1disk", 6);
	info_export(s, 1, FLAGS);
	reply(s, NBD_REP_INFO, "\xff\xff", 2);
	info_export(s, SIZE, FLAGS);
	reply(s, NBD_REP_ACK, "", 0);
}

static const struct lie {
	void (*make)(struct speech *s);
	int ret;
	const char *words;
} lies[] = {
	{ no_newstyle, -EPROTO, "is no NBD server" },
	{ oldstyle, -EPROTO, "is no NBD server" },
	{ nothing_about_the_export, -EPROTO, "does not say what the export is like" },
	{ flags_that_are_none, -EPROTO, "does not say what the export is like" },
	{ more_than_a_disk_can_have, -EPROTO, "has 9223372036854775808 bytes, which no disk has" },
	{ blocks_of_nothing, -EPROTO, "smallest block is to have 0 bytes" },
	{ blocks_of_513, -EPROTO, "smallest block is to have 513 bytes" },
	{ blocks_of_128k, -EPROTO, "smallest block is to have 131072 bytes" },
	{ an_information_of_one_byte, -EPROTO, "an information that is none" },
	{ an_export_with_more_to_it, -EPROTO, "the export's information has a wrong length" },
	{ block_sizes_with_less, -EPROTO, "the block sizes have a wrong length" },
	{ an_acknowledgement_with_a_word, -EPROTO, "an acknowledgement with something in it" },
	{ a_list, -EPROTO, "a reply of another kind" },
	{ a_reply_without_end, -EPROTO, "a reply to an option that is none" },
	{ replies_without_end, -EPROTO, "does not come to an end" },
	{ tls, -EACCES, "wants TLS" },
	{ a_refusal, -ENOENT, "refuses: no such disk" },
	{ a_refusal_of_4096_bytes, -ENOENT, "refuses: xxx" },
	{ a_refusal_that_is_too_long, -EPROTO, "a reply to an option that is none" },
	{ what_was_not_asked_for, 0, "" },
};

static bool lie(unsigned i, struct speech *s)
{
	if (i == ARRAY_SIZE(lies))
		return false;
	lies[i].make(s);
	return true;
}

static void lies_are_refused_by_name(void)
{
	pid_t pid = serve(lie);

	for (unsigned i = 0; i < ARRAY_SIZE(lies); i++) {
		CHECK_EQ(dial(PATIENCE_MS), lies[i].ret);
		if (!strstr(err.msg, lies[i].words))
			test_fail("case %u: no '%s' in: %s", i, lies[i].words, err.msg);
	}
	CHECK(d.size == SIZE && d.min_block == 1);
	served(pid);
}

/* --- Time --- */

static bool slow(unsigned i, struct speech *s)
{
	truth(s);
	s->silent = true;
	if (i < 2) {
		s->len = i ? 20 : 0;
	} else {
		/* No byte comes late, nor does a message; but all of it takes seven seconds, and one. */
		s->step = i == 2 ? 1 : 18;
		s->pause_us = i == 2 ? 60000 : 150000;
	}
	return i < 4;
}

static void who_trickles_or_is_silent_is_waited_for_as_long_as_was_said(void)
{
	pid_t pid = serve(slow);

	for (unsigned i = 0; i < 4; i++) {
		CHECK_EQ(dial(200), -ETIMEDOUT);
		CHECK(strstr(err.msg, "timed out"));
	}
	served(pid);
}

static void who_accepts_nobody_is_waited_for_no_longer(void)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int server = listen_there(0), fd[8], n = 0;

	strcpy(sun.sun_path, path);
	for (bool full = false; !full; n++) {
		CHECK(n < 8);
		fd[n] = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		full = connect(fd[n], (struct sockaddr *)&sun, sizeof(sun)) < 0;
	}
	CHECK_EQ(dial(50), -ETIMEDOUT);
	while (n)
		close(fd[--n]);
	close(server);
	CHECK_EQ(dial(50), -ECONNREFUSED);
	unlink(path);
	CHECK_EQ(dial(50), -ENOENT);
}

static bool once(unsigned i, struct speech *s)
{
	truth(s);
	return !i;
}

static void a_name_or_a_path_that_is_too_long_is_refused(void)
{
	char name[NBD_STRING_MAX + 2], long_path[200];
	pid_t pid = serve(once);

	memset(name, 'n', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	err_clear(&err);
	CHECK_EQ(nbd_dial(path, name, PATIENCE_MS, &d, &err), -ENAMETOOLONG);
	served(pid);
	memset(long_path, 'p', sizeof(long_path) - 1);
	long_path[sizeof(long_path) - 1] = '\0';
	err_clear(&err);
	CHECK_EQ(nbd_dial(long_path, "disk", PATIENCE_MS, &d, &err), -ENAMETOOLONG);
}

int main(void)
{
	CHECK(mkdtemp(folder));
	snprintf(path, sizeof(path), "%s/s", folder);
	RUN(who_hangs_up_at_any_byte_of_the_handshake_is_told);
	RUN(no_byte_of_the_handshake_is_believed);
	RUN(lies_are_refused_by_name);
	RUN(who_trickles_or_is_silent_is_waited_for_as_long_as_was_said);
	RUN(who_accepts_nobody_is_waited_for_no_longer);
	RUN(a_name_or_a_path_that_is_too_long_is_refused);
	rmdir(folder);
	return 0;
}
