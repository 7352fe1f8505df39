/* SPDX-License-Identifier: MIT */
/*
 * Giving up what is not needed any more: the user, and files by Landlock. System calls are in syscalls.c.
 *
 * Landlock binds the calling thread and those that it starts. Of other threads there are only the reactor's workers: those that opened files before finish
 * what they have and end, and new ones are started from here. Work that io_uring gives to the kernel's threads is done with the rights of who submitted it.
 */
#include "daemon/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/landlock.h>
#include <pwd.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/syscalls.h"
#include "rt/rt.h"
#include "util/access.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

/* What Debian 12's header does not know yet. */
#define FS_REFER (1ull << 13)		/* interface 2 */
#define FS_TRUNCATE (1ull << 14)	/* 3 */
#define NET_BIND_TCP (1ull << 0)	/* 4 */
#define NET_CONNECT_TCP (1ull << 1)

#define FS_FIRST ((1ull << 13) - 1)	/* all rights of interface 1 */
#define FS_READ (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define FS_WRITE (FS_READ | LANDLOCK_ACCESS_FS_WRITE_FILE | FS_TRUNCATE)
#define FS_OF_FILES (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE | FS_TRUNCATE)

struct ruleset {
	uint64_t fs, net;
};

/* --- The user --- */

static int drop_capabilities(void)
{
	for (int cap = 0; prctl(PR_CAPBSET_READ, cap) >= 0; cap++)
		if (prctl(PR_CAPBSET_DROP, cap) < 0)
			return -errno;
	return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 && errno != EINVAL ? -errno : 0;
}

static int become(const char *user, struct err *err)
{
	const struct passwd *pw;
	gid_t gid = (gid_t)-1;
	uid_t uid;
	int ret = user_find(user, &uid, &gid, err);

	if (ret < 0)
		return err_prefix(err, "--user");
	if (geteuid()) {
		if (uid == geteuid())
			return 0;
		return err_set(err, -EPERM, "--user %s: only root can become another user; start weir as root, or as this user", user);
	}
	pw = getpwuid(uid);
	if (gid == (gid_t)-1)
		return err_set(err, -EINVAL, "--user %s: no account has this number, so its group is not known; give a user's name", user);
	ret = drop_capabilities();
	/* glibc does these for all threads. */
	if (!ret && (pw ? initgroups(pw->pw_name, gid) : setgroups(0, NULL)) < 0)
		ret = -errno;
	if (!ret && (setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0))
		ret = -errno;
	if (!ret && uid && !setuid(0))
		ret = -EPERM;
	return ret < 0 ? err_errno(err, ret, "--user %s: cannot become this user", user) : 0;
}

/* --- Landlock --- */

static int allow(int ruleset, const char *path, uint64_t rights, bool optional, struct err *err)
{
	struct landlock_path_beneath_attr rule = { .allowed_access = rights };
	int fd = open(path, O_PATH | O_CLOEXEC), ret = 0;
	struct stat st;

	if (fd < 0)
		return optional ? 0 : err_errno(err, -errno, "sandbox: %s", path);
	if (!fstat(fd, &st) && !S_ISDIR(st.st_mode))
		rule.allowed_access &= FS_OF_FILES;
	rule.parent_fd = fd;
	if (syscall(__NR_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) < 0)
		ret = err_errno(err, -errno, "sandbox: %s: cannot be allowed", path);
	close(fd);
	return ret;
}

static int allow_all(int ruleset, const char *const *paths, uint64_t rights, bool optional, struct err *err)
{
	int ret = 0;

	for (; *paths && !ret; paths++)
		ret = allow(ruleset, *paths, rights, optional, err);
	return ret;
}

static int restrict_files(const struct confine_config *c, struct confined *done, struct err *err)
{
	/* What is read when a device is looked at; and what a look-up of a host needs. */
	static const char *const facts[] = { "/proc", "/sys", NULL };
	static const char *const names[] = { "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/host.conf", "/etc/services",
					     "/run/systemd/resolve", "/run/nscd", NULL };
	int version = syscall(__NR_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION), fd, ret;
	struct ruleset set = { FS_FIRST, 0 };

	if (version < 1 && !done)
		return 0;
	if (version < 1) {
		log_warn("sandbox: this kernel has no Landlock, so what files may be opened later is not restricted (--no-sandbox is silent)");
		return 0;
	}
	set.fs |= version >= 2 ? FS_REFER : 0;
	set.fs |= version >= 3 ? FS_TRUNCATE : 0;
	set.net |= version >= 4 ? NET_BIND_TCP | (c->connects ? 0 : NET_CONNECT_TCP) : 0;
	fd = syscall(__NR_landlock_create_ruleset, &set, version >= 4 ? sizeof(set) : sizeof(set.fs), 0);
	if (fd < 0)
		return err_errno(err, -errno, "sandbox: Landlock (--no-sandbox does without)");
	ret = allow_all(fd, c->write, FS_WRITE & set.fs, false, err);
	if (!ret)
		ret = allow_all(fd, c->read, FS_READ, true, err);
	if (!ret)
		ret = allow_all(fd, c->remove, LANDLOCK_ACCESS_FS_REMOVE_FILE, false, err);
	if (!ret)
		ret = allow_all(fd, facts, FS_READ, true, err);
	if (!ret && c->connects)
		ret = allow_all(fd, names, FS_READ, true, err);
	if (!ret && syscall(__NR_landlock_restrict_self, fd, 0) < 0)
		ret = err_errno(err, -errno, "sandbox: Landlock (--no-sandbox does without)");
	close(fd);
	if (!ret && done)
		done->landlock = version;
	return ret;
}

/* --- Together --- */

int confine_capabilities(const struct confine_config *c, struct err *err)
{
	int ret = c->user && !geteuid() ? drop_capabilities() : 0;

	return ret < 0 ? err_errno(err, ret, "--user %s: cannot give up capabilities", c->user) : 0;
}

int confine_user(const struct confine_config *c, struct err *err)
{
	return c->user ? become(c->user, err) : 0;
}

int confine_files(struct rt *rt, const struct confine_config *c, struct confined *done, struct err *err)
{
	int ret;

	if ((c->user || c->sandbox || c->deny_list) && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return err_errno(err, -errno, "sandbox: no_new_privs");
	if (!c->sandbox)
		return 0;
	ret = restrict_files(c, done, err);
	return ret < 0 || !rt ? ret : rt_renew_workers(rt);
}

int confine_calls(const struct confine_config *c, struct confined *done, struct err *err)
{
	return c->sandbox ? restrict_calls(&done->seccomp, err) : c->deny_list ? forbid_calls(&done->seccomp, err) : 0;
}

int confine(struct rt *rt, const struct confine_config *c, struct confined *done, struct err *err)
{
	int ret = confine_user(c, err);

	*done = (struct confined){ 0 };
	if (!ret)
		ret = confine_files(rt, c, done, err);
	if (!ret)
		ret = confine_calls(c, done, err);
	return ret;
}
