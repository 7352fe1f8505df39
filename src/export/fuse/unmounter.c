/* SPDX-License-Identifier: MIT */
/*
 * FUSE server: a program that takes the mounts away in place of a server that has given up the right to.
 *
 *   server ──── what is mounted, "that is all", then a mount's number ────▶ unmounter
 *          ◀────────────────────── taken away, or not ─────────────────────
 *
 * Invariants
 *  (1) What it takes away was named before the server confined itself: after SEAL it believes nothing but numbers. A server that was taken over can end
 *      its own exports with it, and nothing else.
 *  (2) It ends with the server, of which it holds nothing but one end of a socket. A server that is killed leaves its mounts, with it as without.
 *  (3) The server does not wait for it beyond a time, and after that not at all: an answer that comes late would be taken for that to the next order.
 *  (4) It is a process of its own and not a fork: pages that it shared with the server would have to be copied before each is written.
 */
#include "export/fuse/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util/bytes.h"

#define MOUNTS_MAX 64u
#define START_MS 5000
#define MS 1000000ull

enum order { NAME, SEAL, DETACH };

struct message {
	uint32_t order, number;
	uint32_t major, minor, created;
	uint64_t dev, ino;
	char path[PATH_MAX];
};

/* --- The program --- */

static bool obey(const struct message *m, struct fuse_mount *mounts, unsigned *n, bool *sealed)
{
	struct fuse_mount *mount = &mounts[*n];

	switch (m->order) {
	case NAME:
		if (*sealed || *n == MOUNTS_MAX || !memchr(m->path, '\0', sizeof(m->path)))
			return false;
		*mount = (struct fuse_mount){ .path = strdup(m->path), .fd = -1, .major = m->major, .minor = m->minor, .created = m->created,
					      .dev = m->dev, .ino = m->ino };
		/* From here on others may be able to move its folder and put another one there. */
		if (!mount->path || fuse_mount_hold(mount) < 0) {
			free(mount->path);
			return false;
		}
		++*n;
		return true;
	case SEAL:
		*sealed = true;
		return true;
	case DETACH:
		return *sealed && m->number < *n && fuse_mount_detach(&mounts[m->number]);
	default:
		return false;
	}
}

int fuse_unmounter_main(int fd)
{
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE };
	static struct fuse_mount mounts[MOUNTS_MAX];
	static struct message m;
	unsigned n = 0;
	bool sealed = false;

	prctl(PR_SET_NAME, "weir-unmount");
	/* They are sent to the server's group, and the server needs it for its end. */
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		signal(signals[i], SIG_IGN);
	for (;;) {
		ssize_t got = recv(fd, &m, sizeof(m), 0);
		uint8_t answer;

		if (got < 0 && errno == EINTR)
			continue;
		if (got != (ssize_t)sizeof(m))
			return 0;
		answer = obey(&m, mounts, &n, &sealed);
		if (send(fd, &answer, 1, MSG_NOSIGNAL) != 1)
			return 0;
	}
}

/* --- The server's side --- */

/* 1: done; 0: it could not; -1: there is no answer until then, and never will be one that can be told apart. */
static int order(int fd, const struct message *m, uint64_t until_ns)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	uint8_t answer = 0;
	int ret = send(fd, m, sizeof(*m), MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof(*m) ? 0 : -1;

	while (!ret) {
		uint64_t now = rt_now_exact_ns();

		ret = poll(&p, 1, until_ns > now ? (int)((until_ns - now + MS - 1) / MS) : 0);
		if (ret < 0 && errno == EINTR)
			ret = 0;
		else
			ret = ret == 1 && recv(fd, &answer, 1, MSG_DONTWAIT) == 1 ? 1 : -1;
	}
	return ret < 0 ? -1 : answer != 0;
}

static int start(int sock, struct err *err)
{
	char *argv[] = { (char *)"weir", (char *)FUSE_UNMOUNTER, (char *)"3", NULL };
	posix_spawn_file_actions_t actions;
	pid_t pid;
	int ret = -posix_spawn_file_actions_init(&actions);

	if (ret)
		return err_errno(err, ret, "FUSE");
	posix_spawn_file_actions_adddup2(&actions, sock, 3);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	ret = -posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ);
	posix_spawn_file_actions_destroy(&actions);
	return ret ? err_errno(err, ret, "FUSE: cannot start the program that unmounts later (--no-sandbox does without)") : 0;
}

int fuse_server_guard(struct fuse_server *s, struct err *err)
{
	static struct message m;
	uint64_t until = rt_now_exact_ns() + START_MS * MS;
	int sv[2], ret;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0)
		return err_errno(err, -errno, "FUSE: cannot make a socket");
	ret = start(sv[1], err);
	close(sv[1]);
	s->guarded = 0;
	list_for_each(&s->exports, node) {
		struct fuse_export *e = container_of(node, struct fuse_export, node);

		m = (struct message){ .order = NAME, .major = e->mount.major, .minor = e->mount.minor, .created = e->mount.created,
				      .dev = e->mount.dev, .ino = e->mount.ino };
		e->number = s->guarded++;
		snprintf(m.path, sizeof(m.path), "%s", e->mount.path);
		if (!ret && order(sv[0], &m, until) <= 0)
			ret = err_set(err, -EIO, "FUSE: %s: the program that is to unmount it does not answer (--no-sandbox does without)", e->config.path);
	}
	m = (struct message){ .order = SEAL };
	if (!ret && order(sv[0], &m, until) <= 0)
		ret = err_set(err, -EIO, "FUSE: the program that unmounts later does not answer (--no-sandbox does without)");
	if (ret < 0) {
		close(sv[0]);
		return ret;
	}
	s->unmounter = sv[0];
	return 0;
}

bool fuse_server_guarded(const struct fuse_server *s)
{
	return s->unmounter != FUSE_UNGUARDED;
}

bool fuse_export_detach(struct fuse_export *e, uint64_t until_ns)
{
	struct message m = { .order = DETACH, .number = e->number };
	struct fuse_server *s = e->s;
	int ret;

	if (s->unmounter == FUSE_UNGUARDED)
		return fuse_mount_detach(&e->mount);
	if (s->unmounter < 0)
		return false;
	ret = order(s->unmounter, &m, until_ns);
	if (ret < 0) {
		close(s->unmounter);
		s->unmounter = FUSE_UNMOUNTER_GONE;
	}
	return ret > 0;
}
