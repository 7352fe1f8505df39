/* SPDX-License-Identifier: MIT */
/* Users, groups and modes by their names. */
#include "util/access.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdint.h>
#include <stdlib.h>

#include "util/err.h"
#include "util/opts.h"
#include "util/size.h"

static int parse_mode(const char *text, mode_t *ret, struct err *err)
{
	char *end;
	unsigned long mode = strtoul(text, &end, 8);

	if (*text < '0' || *text > '7' || *end || !mode || mode > 0777)
		return err_set(err, -EINVAL, "mode is octal, 1 to 0777, and not '%s'", text);
	*ret = (mode_t)mode;
	return 0;
}

int user_find(const char *text, uid_t *uid, gid_t *gid, struct err *err)
{
	const struct passwd *pw;
	uint64_t id;

	if (!u64_parse(text, &id) && id < UINT32_MAX) {
		*uid = (uid_t)id;
		pw = getpwuid(*uid);
	} else {
		pw = getpwnam(text);
		if (!pw)
			return err_set(err, -EINVAL, "there is no user '%s'", text);
		*uid = pw->pw_uid;
	}
	if (pw)
		*gid = pw->pw_gid;
	return 0;
}

static int group_find(const char *text, gid_t *gid, struct err *err)
{
	const struct group *gr;
	uint64_t id;

	if (!u64_parse(text, &id) && id < UINT32_MAX) {
		*gid = (gid_t)id;
		return 0;
	}
	gr = getgrnam(text);
	if (!gr)
		return err_set(err, -EINVAL, "there is no group '%s'", text);
	*gid = gr->gr_gid;
	return 0;
}

int file_access_parse(struct opts *o, const char *what, struct file_access *ret, struct err *err)
{
	const char *mode = opts_str(o, "mode"), *owner = opts_str(o, "owner"), *group = opts_str(o, "group");
	gid_t unused;
	int r = 0;

	*ret = (struct file_access)FILE_ACCESS_INIT;
	if (mode)
		r = parse_mode(mode, &ret->mode, err);
	if (!r && owner)
		r = user_find(owner, &ret->uid, &unused, err);
	if (!r && group)
		r = group_find(group, &ret->gid, err);
	return r < 0 ? err_prefix(err, "%s", what) : 0;
}
