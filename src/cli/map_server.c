/* SPDX-License-Identifier: MIT */
/* The servers of `weir map`: started behind it, stopped by unmounting their file, or by their control socket. */
#include "cli/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/ask.h"
#include "util/bytes.h"
#include "util/err.h"

#define ARGS_MAX 32
#define END_MS 60000

extern char **environ;

/* A socket for sd_notify(3), in the abstract name space; its name becomes NOTIFY_SOCKET. */
static int notify_socket(struct err *err)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	char name[64];
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0), len;

	len = snprintf(name, sizeof(name), "@weir-map-%d", (int)getpid());
	memcpy(sun.sun_path + 1, name + 1, (size_t)len - 1);
	if (fd < 0 || bind(fd, (struct sockaddr *)&sun, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) < 0) {
		err_errno(err, -errno, "cannot make a socket");
		if (fd >= 0)
			close(fd);
		return err->code;
	}
	setenv("NOTIFY_SOCKET", name, 1);
	return fd;
}

/* Held by the server for as long as it lives, as its standard error: so that no second one takes the name, and the messages, of one that is starting or serves. */
static int take_messages(const char *log, const char *file, struct err *err)
{
	struct stat mine, there;

	for (;;) {
		int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600), ret;

		if (fd < 0)
			return err_errno(err, -errno, "%s", log);
		if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
			ret = errno == EWOULDBLOCK ? err_set(err, -EBUSY, "%s: a server of this name runs, or is starting; give another --name", file) :
						     err_errno(err, -errno, "%s: cannot be locked", log);
			close(fd);
			return ret;
		}
		/* The one before may have removed it meanwhile. */
		if (!fstat(fd, &mine) && !stat(log, &there) && mine.st_dev == there.st_dev && mine.st_ino == there.st_ino)
			return ftruncate(fd, 0) < 0 ? (err_errno(err, -errno, "%s", log), close(fd), err->code) : fd;
		close(fd);
	}
}

static int spawn(char *const argv[], int log, pid_t *pid)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	int ret;

	if (posix_spawn_file_actions_init(&actions))
		return -ENOMEM;
	if (posix_spawnattr_init(&attr)) {
		posix_spawn_file_actions_destroy(&actions);
		return -ENOMEM;
	}
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, log, STDERR_FILENO);
	ret = -posix_spawn(pid, "/proc/self/exe", &actions, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	return ret;
}

/* True once the server says so; false if it has ended. */
static bool wait_ready(int fd, pid_t pid)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char text[512];

	for (;;) {
		ssize_t got = poll(&p, 1, 50) > 0 ? recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT) : 0;

		if (got > 0) {
			text[got] = '\0';
			if (strstr(text, "READY=1"))
				return true;
		} else if (waitpid(pid, NULL, WNOHANG) == pid) {
			return false;
		}
	}
}

/* The reason is the last line of its messages. */
static int told_by_server(const char *log, struct err *err)
{
	char line[700] = "", next[700];
	const char *text = line;
	FILE *f = fopen(log, "re");

	while (f && fgets(next, sizeof(next), f))
		strcpy(line, next);
	if (f)
		fclose(f);
	line[strcspn(line, "\n")] = '\0';
	if (!strncmp(text, "weir serve: ", 12))
		text += 12;
	return err_set(err, -EIO, "%s", *text ? text : "the server ended, and does not say why");
}

/* "FILE" as an option wants it: commas are doubled. */
static void put_file(char *dst, size_t size, const char *file)
{
	size_t n = 0;

	for (; *file && n + 2 < size; file++) {
		if (*file == ',')
			dst[n++] = ',';
		dst[n++] = *file;
	}
	dst[n] = '\0';
}

int map_server_start(const char *disk, const char *file, bool nbd, const char *name, const char *const *args, struct err *err)
{
	char export[PATH_MAX + 64], path[MAP_PATH_MAX], sock[MAP_PATH_MAX], log[MAP_PATH_MAX], pid_file[MAP_PATH_MAX];
	const char *argv[ARGS_MAX] = { "weir", "serve", nbd ? "--nbd" : "--fuse", export, "--control", sock, "--name", name, "--pid-file", pid_file };
	int n = 10, fd, messages, ret;
	pid_t pid;

	mapping_path(log, sizeof(log), file, ".log");
	messages = take_messages(log, file, err);
	if (messages < 0)
		return messages;
	fd = notify_socket(err);
	if (fd < 0) {
		close(messages);
		return fd;
	}
	mapping_path(path, sizeof(path), file, nbd ? ".nbd" : "");
	snprintf(export, sizeof(export), "%s", nbd ? "unix:" : "");
	put_file(export + strlen(export), PATH_MAX, path);
	if (nbd)
		strcat(export, ",mode=0600");
	else
		argv[n++] = "--exit-unmounted";
	mapping_path(sock, sizeof(sock), file, ".sock");
	mapping_path(pid_file, sizeof(pid_file), file, ".pid");
	while (*args && n < ARGS_MAX - 3)
		argv[n++] = *args++;
	argv[n++] = "--";
	argv[n] = disk;
	ret = spawn((char *const *)argv, messages, &pid);
	if (ret < 0)
		ret = err_errno(err, ret, "cannot start a server");
	else if (!wait_ready(fd, pid))
		ret = told_by_server(log, err);
	if (ret < 0)
		unlink(log);
	close(fd);
	close(messages);
	return ret;
}

/* --- The end --- */

static int wait_end(int pidfd, const struct mapping *m, struct err *err)
{
	struct pollfd p = { .fd = pidfd, .events = POLLIN };

	if (poll(&p, 1, END_MS) > 0)
		return 0;
	return err_set(err, -ETIMEDOUT, "%s: its server (pid %d) has not ended after %d s; see %s.log", m->file, (int)m->pid, END_MS / 1000, m->file);
}

static int tell_end(const struct mapping *m, struct err *err)
{
	char path[MAP_PATH_MAX];
	json_t *answer;

	if (m->dead)
		return 0;
	mapping_path(path, sizeof(path), m->file, ".sock");
	answer = ask_server(path, json_pack("{s:s}", "command", "shutdown"), err);
	json_decref(answer);
	return answer ? 0 : err->code;
}

static int unmount(const struct mapping *m, struct err *err)
{
	if (!umount2(m->file, m->dead ? MNT_DETACH | UMOUNT_NOFOLLOW : UMOUNT_NOFOLLOW))
		return 0;
	if (errno == EBUSY)
		return err_set(err, -EBUSY, "%s: is in use; close it first (fuser -m %s tells by whom)", m->file, m->file);
	return err_errno(err, -errno, "%s: cannot be unmounted", m->file);
}

int map_server_stop(const struct mapping *m, struct err *err)
{
	static const char *const left[] = { ".sock", ".nbd", ".pid", ".log", ".disk" };
	int pidfd = m->pid > 0 ? (int)syscall(SYS_pidfd_open, m->pid, 0) : -1, ret = m->nbd ? tell_end(m, err) : unmount(m, err);
	char path[MAP_PATH_MAX];
	struct stat st;

	if (!ret && pidfd >= 0)
		ret = wait_end(pidfd, m, err);
	if (pidfd >= 0)
		close(pidfd);
	if (ret < 0 || !m->own || m->waits)
		return ret;
	/* A server that was killed has left these. */
	for (size_t i = 0; i < ARRAY_SIZE(left); i++) {
		mapping_path(path, sizeof(path), m->file, left[i]);
		unlink(path);
	}
	if (!m->nbd && !lstat(m->file, &st) && S_ISREG(st.st_mode) && !st.st_size)
		unlink(m->file);
	return 0;
}
