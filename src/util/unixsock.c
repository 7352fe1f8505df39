/* SPDX-License-Identifier: MIT */
/* Listening Unix sockets. */
#include "util/unixsock.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "util/access.h"
#include "util/err.h"

#define ORPHAN_TURNS 1000u	/* of 10 ms */

/*
 * connect(2) on a full backlog says EAGAIN: alive as well. *ret_orphan: who listens there is a process that has ended; the kernel is still taking its
 * io_uring down, which holds the socket for a moment after a SIGKILL. Nobody accepts our attempts there, so that its backlog fills up; an orphan stays one.
 */
static bool somebody_answers(const struct sockaddr_un *sun, bool *ret_orphan)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	bool connected = fd >= 0 && !connect(fd, (const struct sockaddr *)sun, sizeof(*sun));
	bool alive = fd < 0 || connected || errno != ECONNREFUSED;
	struct ucred peer;
	socklen_t len = sizeof(peer);

	if (connected)
		*ret_orphan = !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) && peer.pid > 0 && kill(peer.pid, 0) < 0 && errno == ESRCH;
	if (fd >= 0)
		close(fd);
	return alive;
}

/* Waits for an orphan to go. */
static bool is_taken(const struct sockaddr_un *sun)
{
	static const struct timespec pause = { .tv_nsec = 10000000 };
	bool orphan = false;

	for (unsigned i = 0; i < ORPHAN_TURNS; i++) {
		if (!somebody_answers(sun, &orphan))
			return false;
		if (!orphan)
			return true;
		nanosleep(&pause, NULL);
	}
	return true;
}

/* The umask, and not chmod(2) afterwards, decides: there is no moment in which others can connect. */
static int bind_mode(int fd, const struct sockaddr_un *sun, mode_t mode)
{
	mode_t old = 0;
	int ret;

	if (mode)
		old = umask(0777 & ~mode);
	ret = bind(fd, (const struct sockaddr *)sun, sizeof(*sun)) < 0 ? -errno : 0;
	if (mode)
		umask(old);
	return ret;
}

static int bind_replacing_stale(int fd, const struct sockaddr_un *sun, mode_t mode, struct err *err)
{
	const char *path = sun->sun_path;
	struct stat st;
	int ret = bind_mode(fd, sun, mode);

	if (ret != -EADDRINUSE || lstat(path, &st))
		return ret;
	if (!S_ISSOCK(st.st_mode))
		return err_set(err, ret, "%s: exists and is not a socket; remove it or choose another path", path);
	if (is_taken(sun))
		return err_set(err, ret, "%s: another process listens there; stop it or choose another path", path);
	if (unlink(path) < 0)
		return err_errno(err, -errno, "%s: cannot remove the stale socket", path);
	return bind_mode(fd, sun, mode);
}

/* Before listen(2), so that nobody can have connected. */
static int give_away(const char *path, const struct file_access *a, struct err *err)
{
	if ((a->uid == (uid_t)-1 && a->gid == (gid_t)-1) || !lchown(path, a->uid, a->gid))
		return 0;
	return err_errno(err, -errno, "%s: cannot give the socket to this owner or group; only root can give to others, and a user to its own groups", path);
}

int unix_listen(const char *path, const struct file_access *access, int backlog, struct unix_listener *ret, struct err *err)
{
	static const struct file_access any = FILE_ACCESS_INIT;
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	struct stat st;
	int fd, r;

	if (!*path)
		return err_set(err, -EINVAL, "a Unix socket needs a path");
	if (strlen(path) >= sizeof(sun.sun_path))
		return err_set(err, -ENAMETOOLONG, "%s: the path of a Unix socket has at most %zu bytes, this one has %zu", path,
			       sizeof(sun.sun_path) - 1, strlen(path));
	strcpy(sun.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return err_errno(err, -errno, "%s: cannot make a socket", path);
	if (!access)
		access = &any;
	r = bind_replacing_stale(fd, &sun, access->mode, err);
	if (!r) {
		r = give_away(path, access, err);
		if (!r && listen(fd, backlog) < 0)
			r = -errno;
		if (r < 0)
			unlink(path);
	}
	if (!r && stat(path, &st) < 0)
		r = -errno;
	if (r < 0) {
		close(fd);
		return err_errno(err, r, "%s: cannot listen", path);
	}
	ret->fd = fd;
	strcpy(ret->path, path);
	ret->dev = st.st_dev;
	ret->ino = st.st_ino;
	return 0;
}

void unix_unlisten(struct unix_listener *l)
{
	struct stat st;

	if (!lstat(l->path, &st) && st.st_dev == l->dev && st.st_ino == l->ino)
		unlink(l->path);
	close(l->fd);
}
