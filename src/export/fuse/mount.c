/* SPDX-License-Identifier: MIT */
/*
 * FUSE server: mounting over a file, and taking that away. Who may not mount(2) asks fusermount3, as libfuse does.
 */
#include "export/fuse/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/log.h"
#include "util/mountinfo.h"

#define FSTYPE "fuse.weir"
#define STACK_MAX 16		/* dead mounts on top of each other */

int fuse_mount_path(const char *path, char **ret, struct err *err)
{
	char *copy, *dir, *name, *real = realpath(path, NULL);
	size_t size;

	*ret = real;
	if (real)
		return 0;
	if (errno != ENOENT)
		return err_errno(err, -errno, "%s", path);
	copy = strdup(path);
	name = strrchr(path, '/') ? strrchr(path, '/') + 1 : (char *)path;
	if (!copy || !*name || !strcmp(name, ".") || !strcmp(name, "..")) {
		free(copy);
		return err_set(err, -EINVAL, "%s: is no path of a file", path);
	}
	dir = realpath(dirname(copy), NULL);
	free(copy);
	if (!dir)
		return err_errno(err, -errno, "%s: its folder", path);
	size = strlen(dir) + strlen(name) + 2;
	*ret = malloc(size);
	if (*ret)
		snprintf(*ret, size, "%s/%s", strcmp(dir, "/") ? dir : "", name);
	free(dir);
	return *ret ? 0 : err_errno(err, -ENOMEM, "%s", path);
}

/* --- fusermount3 --- */

extern char **environ;

/* Runs fusermount3; `comm` (-1: none) is the socket that it sends the descriptor of /dev/fuse to. Its exit status, or -errno. */
static int run_fusermount(char *const argv[], int comm)
{
	char var[32], *env[64] = { NULL };
	posix_spawn_file_actions_t actions;
	unsigned n = 0;
	int ret, status;
	pid_t pid;

	snprintf(var, sizeof(var), "_FUSE_COMMFD=%d", comm);
	if (comm >= 0)
		env[n++] = var;
	for (char **e = environ; *e && n < ARRAY_SIZE(env) - 1; e++)
		if (!strncmp(*e, "PATH=", 5) || !strncmp(*e, "LANG=", 5))
			env[n++] = *e;
	if (posix_spawn_file_actions_init(&actions))
		return -ENOMEM;
	if (comm < 0)
		posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
	ret = -posix_spawnp(&pid, argv[0], &actions, NULL, argv, env);
	posix_spawn_file_actions_destroy(&actions);
	if (ret)
		return ret;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -EIO;
}

/* The descriptor, or -errno. */
static int receive_fd(int sock)
{
	char byte;
	union {
		struct cmsghdr hdr;
		char buf[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *c;
	ssize_t got;
	int fd;

	do
		got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	c = got > 0 ? CMSG_FIRSTHDR(&msg) : NULL;
	if (!c || c->cmsg_type != SCM_RIGHTS || c->cmsg_len != CMSG_LEN(sizeof(int)))
		return -EPERM;
	memcpy(&fd, CMSG_DATA(c), sizeof(fd));
	return fd;
}

static int mount_by_helper(const struct fuse_mount_config *c, const char *path, const char *options, struct err *err)
{
	char *argv[] = { (char *)"fusermount3", (char *)"-o", (char *)options, (char *)"--", (char *)path, NULL };
	int sv[2], fd, ret;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv) < 0)
		return err_errno(err, -errno, "%s: cannot make a socket", c->path);
	fcntl(sv[1], F_SETFD, 0);
	ret = run_fusermount(argv, sv[1]);
	close(sv[1]);
	fd = ret ? -EPERM : receive_fd(sv[0]);
	close(sv[0]);
	if (ret == -ENOENT || ret == 127)
		return err_set(err, -EPERM, "%s: only root may mount, and there is no fusermount3 that does it for others; install fuse3", c->path);
	if (fd < 0)
		return err_set(err, fd, "%s: fusermount3 refuses to mount (its reason is above)", c->path);
	fcntl(fd, F_SETFL, O_RDWR | O_NONBLOCK);
	return fd;
}

/* --- Mounting --- */

static int mount_direct(const struct fuse_mount_config *c, const char *path, int fd)
{
	char options[160];

	snprintf(options, sizeof(options), "fd=%d,rootmode=%o,user_id=%u,group_id=%u,default_permissions,max_read=%u%s", fd,
		 (unsigned)S_IFREG | c->mode, (unsigned)geteuid(), (unsigned)getegid(), FUSE_DATA_MAX, c->allow_other ? ",allow_other" : "");
	return mount(c->source, path, FSTYPE, MS_NOSUID | MS_NODEV | (c->read_only ? MS_RDONLY : 0), options) < 0 ? -errno : 0;
}

/* The descriptor of /dev/fuse, or -errno with a message. */
static int do_mount(const struct fuse_mount_config *c, const char *path, struct err *err)
{
	char options[512], *out = options;
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK), ret = fd < 0 ? -errno : mount_direct(c, path, fd);

	if (!ret)
		return fd;
	if (fd >= 0)
		close(fd);
	if (ret == -ENOENT || ret == -ENODEV || ret == -ENXIO)
		return err_set(err, ret, "%s: this kernel has no FUSE (/dev/fuse); load its module: modprobe fuse", c->path);
	if (ret != -EPERM && ret != -EACCES)
		return err_errno(err, ret, "%s: cannot mount", c->path);
	out += snprintf(out, sizeof(options), "default_permissions,max_read=%u,subtype=weir,%s%sfsname=", FUSE_DATA_MAX, c->read_only ? "ro," : "",
			c->allow_other ? "allow_other," : "");
	for (const char *s = c->source; *s && out < options + sizeof(options) - 3; s++) {
		if (*s == ',' || *s == '\\')
			*out++ = '\\';
		*out++ = *s;
	}
	*out = '\0';
	return mount_by_helper(c, path, options, err);
}

/* True if it is gone afterwards. `real` is `path` for those who cannot see our descriptors. */
static bool detach(const char *path, const char *real)
{
	char *argv[] = { (char *)"fusermount3", (char *)"-u", (char *)"-z", (char *)"-q", (char *)"--", (char *)real, NULL };

	if (!umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW))
		return true;
	return errno == EPERM && run_fusermount(argv, -1) == 0;
}

/* `path` as fuse_mount_path() gives it. */
static int clear_dead(const char *path, struct err *err)
{
	struct mountinfo *m = malloc(sizeof(*m));
	struct stat st;
	int ret = m ? 0 : err_errno(err, -ENOMEM, "%s", path);

	for (int i = 0; !ret && i < STACK_MAX && mountinfo_find(path, m) && !strcmp(m->type, FSTYPE); i++) {
		bool dead = stat(path, &st) < 0 && (errno == ENOTCONN || errno == ECONNABORTED);

		if (!dead)
			ret = err_set(err, -EADDRINUSE, "%s: another process serves a disk there; stop it or choose another file", path);
		else if (!detach(path, path))
			ret = err_set(err, -EBUSY, "%s: a server that was killed has left its mount there, and it cannot be taken away; as root: "
				      "umount -l %s", path, path);
		else
			log_info("%s: took away the mount of a server that was killed", path);
	}
	free(m);
	return ret;
}

int fuse_clear_dead(const char *path, struct err *err)
{
	struct err ignored = ERR_INIT;
	char *real;
	int ret = 0;

	/* A path that is none is told when it is needed. */
	if (!fuse_mount_path(path, &real, &ignored)) {
		ret = clear_dead(real, err);
		free(real);
	}
	return ret;
}

/* The file to mount over: made if it is not there. */
static int take_file(const struct fuse_mount_config *c, struct fuse_mount *m, struct err *err)
{
	struct stat st;
	int fd = open(m->path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);

	if (fd < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s: cannot make the file to mount over", c->path);
	m->created = fd >= 0;
	if (fd >= 0)
		close(fd);
	if (lstat(m->path, &st) < 0)
		return err_errno(err, -errno, "%s", c->path);
	if (!S_ISREG(st.st_mode))
		return err_set(err, -EINVAL, "%s: is no regular file; name one, or one that is not there yet", c->path);
	m->dev = st.st_dev;
	m->ino = st.st_ino;
	return 0;
}

static const char *name_of(const struct fuse_mount *m)
{
	return strrchr(m->path, '/') + 1;
}

static void remove_file(struct fuse_mount *m)
{
	int dir = m->has_dir ? m->dir : AT_FDCWD;
	const char *path = m->has_dir ? name_of(m) : m->path;
	struct stat st;

	if (m->created && !fstatat(dir, path, &st, AT_SYMLINK_NOFOLLOW) && st.st_dev == m->dev && st.st_ino == m->ino && !st.st_size)
		unlinkat(dir, path, 0);
	m->created = false;
}

int fuse_mount_hold(struct fuse_mount *m)
{
	char *copy = strdup(m->path);

	if (!copy)
		return -ENOMEM;
	/* The file itself is not looked at: that would ask the server, which waits for us. */
	m->dir = strchr(copy, '/') ? open(dirname(copy), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
	m->has_dir = m->dir >= 0;
	free(copy);
	return m->has_dir ? 0 : -EINVAL;
}

/* Where the file is now: a folder may have been moved. False: the path is too long, or the folder was removed. */
static bool find_path(const struct fuse_mount *m, char path[PATH_MAX])
{
	char link[32], dir[PATH_MAX];
	ssize_t n;

	if (!m->has_dir)
		return snprintf(path, PATH_MAX, "%s", m->path) < PATH_MAX;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", m->dir);
	n = readlink(link, dir, sizeof(dir) - 1);
	if (n <= 0)
		return false;
	dir[n] = '\0';
	return snprintf(path, PATH_MAX, "%s/%s", n > 1 ? dir : "", name_of(m)) < PATH_MAX;
}

int fuse_mount_attach(const struct fuse_mount_config *c, struct fuse_mount *ret, struct err *err)
{
	struct mountinfo *info = malloc(sizeof(*info));
	struct fuse_mount m = { .fd = -1 };
	int r = info ? fuse_mount_path(c->path, &m.path, err) : err_errno(err, -ENOMEM, "%s", c->path);

	if (!r)
		r = clear_dead(m.path, err);
	if (!r)
		r = take_file(c, &m, err);
	if (!r) {
		m.fd = do_mount(c, m.path, err);
		r = min(m.fd, 0);
	}
	if (!r && mountinfo_find(m.path, info)) {
		m.major = info->major;
		m.minor = info->minor;
	}
	free(info);
	if (r) {
		if (m.path)
			remove_file(&m);
		free(m.path);
		return r;
	}
	*ret = m;
	return 0;
}

bool fuse_mount_detach(struct fuse_mount *m)
{
	struct mountinfo *info = malloc(sizeof(*info));
	char path[PATH_MAX], by[32 + NAME_MAX + 1];
	bool gone = true, found = info && find_path(m, path) && mountinfo_find(path, info);

	snprintf(by, sizeof(by), "/proc/self/fd/%d/%s", m->dir, name_of(m));
	if (found && info->major == m->major && info->minor == m->minor)
		gone = detach(m->has_dir ? by : path, path);
	else if (found && !strcmp(info->type, FSTYPE))
		gone = false;
	free(info);
	if (gone)
		remove_file(m);
	return gone;
}
