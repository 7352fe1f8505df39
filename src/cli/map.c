/* SPDX-License-Identifier: MIT */
/* weir map, weir unmap: disks as block devices of this host. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/ask.h"
#include "cli/cli.h"
#include "cli/mapping.h"
#include "daemon/graph.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/mountinfo.h"
#include "util/size.h"

/* --- What is mapped --- */

static void server_text(const struct mapping *m, char buf[static 24])
{
	if (m->dead)
		strcpy(buf, "dead");
	else if (m->pid)
		snprintf(buf, 24, "pid %d", (int)m->pid);
	else
		strcpy(buf, "-");
}

static void print_table(const struct mapping *list, int n)
{
	int device = 6, volume = 6;
	char size[16], server[24];

	for (int i = 0; i < n; i++) {
		device = max(device, (int)strlen(list[i].device));
		volume = max(volume, (int)strlen(list[i].volume));
	}
	printf("%-*s  %-*s  %9s  %-6s  %-11s  %s\n", device, "DEVICE", volume, "VOLUME", "SIZE", "ACCESS", "SERVER", "FILE");
	for (int i = 0; i < n; i++) {
		const struct mapping *m = &list[i];

		server_text(m, server);
		printf("%-*s  %-*s  %9s  %-6s  %-11s  %s\n", device, *m->device ? m->device : "-", volume, m->volume,
		       m->size ? size_format(m->size, size) : "-", m->read_only ? "ro" : "rw", server, m->file);
	}
}

static int print_json(const struct mapping *list, int n)
{
	json_t *array = json_array();

	for (int i = 0; i < n; i++) {
		const struct mapping *m = &list[i];

		json_array_append_new(array, json_pack("{s:s?, s:s, s:s, s:I, s:b, s:b, s:b, s:o}", "device", *m->device ? m->device : NULL,
						       "volume", m->volume, "file", m->file, "size", (json_int_t)m->size, "read_only", m->read_only,
						       "dead", m->dead, "own", m->own, "pid", m->pid ? json_integer(m->pid) : json_null()));
	}
	json_dumpf(array, stdout, JSON_INDENT(2));
	putchar('\n');
	json_decref(array);
	return 0;
}

static int show(bool json)
{
	struct mapping *list;
	struct err err = ERR_INIT;
	int n = mapping_list(&list, &err);

	if (n < 0)
		return cli_fail("map", &err);
	if (json)
		print_json(list, n);
	else
		print_table(list, n);
	free(list);
	return 0;
}

/* --- Map --- */

struct map_args {
	const char *dir, *name, *volume;
	struct cli_list logs;
	bool read_only, file_only, list, json;
	uint64_t block_size;
};

static int check_name(const char *name, struct err *err)
{
	if (!*name || *name == '.' || strchr(name, '/') || strlen(name) > 200)
		return err_set(err, -EINVAL, "'%.200s' cannot be the name of a file; give another with --name", name);
	return 0;
}

/* A server that was killed under a loop device: its dead file must not be covered by a new one, or nobody would find the device. */
static int check_free(const char *file, struct err *err)
{
	struct mapping *list;
	int n = mapping_list(&list, err), ret = min(n, 0);

	for (int i = 0; i < n && !ret; i++) {
		const char *what = *list[i].device ? list[i].device : file;

		if (strcmp(list[i].file, file))
			continue;
		if (!list[i].dead)
			ret = err_set(err, -EBUSY, "%s: is mapped already%s%s; give another --name", file, *list[i].device ? ", as " : "", list[i].device);
		else if (*list[i].device)
			ret = err_set(err, -EBUSY, "%s: its server was killed, and %s still sits on it; weir unmap %s first", file, what, what);
	}
	free(list);
	return ret;
}

/* Gives the device, or with --file the file, to standard output. On failure nothing stays if `own`. */
static int finish(const struct map_args *a, const char *file, bool own, bool read_only, struct err *err)
{
	struct mapping m = { .own = own };
	struct err ignored = ERR_INIT;
	struct mapping *list = NULL;
	int ret, n;

	if (a->file_only) {
		puts(file);
		return 0;
	}
	ret = loop_attach(file, (uint32_t)a->block_size, read_only, m.device, err);
	if (!ret) {
		puts(m.device);
		return 0;
	}
	n = own ? mapping_list(&list, &ignored) : 0;
	for (int i = 0; i < n; i++)
		if (!strcmp(list[i].file, file))
			map_server_stop(&list[i], &ignored);
	free(list);
	return ret;
}

/* The path of a file NAME that is not there yet, in the folder for files, which is made if need be. */
static int take_path(const struct map_args *a, const char *name, char file[PATH_MAX], struct err *err)
{
	int ret = check_name(name, err);
	char *dir;

	if (ret < 0)
		return ret;
	dir = mkdir(a->dir, 0700) < 0 && errno != EEXIST ? NULL : realpath(a->dir, NULL);
	if (!dir)
		return err_errno(err, -errno, "%s", a->dir);
	snprintf(file, PATH_MAX, "%s/%s", dir, name);
	free(dir);
	return check_free(file, err);
}

static int map_disk(const struct map_args *a, const char *disk, struct err *err)
{
	const char *args[2 * CLI_LIST_MAX + 2];
	char name[256], file[PATH_MAX];
	int n = 0, ret = 0;

	if (a->name)
		snprintf(name, sizeof(name), "%s", a->name);
	else
		ret = graph_default_name(disk, name, sizeof(name), err);
	if (!ret)
		ret = take_path(a, name, file, err);
	if (ret < 0)
		return ret;
	for (int i = 0; i < a->logs.n; i++) {
		args[n++] = "--log";
		args[n++] = a->logs.v[i];
	}
	if (a->read_only)
		args[n++] = "--read-only";
	args[n] = NULL;
	ret = map_server_start(disk, file, name, args, err);
	return ret < 0 ? ret : finish(a, file, true, a->read_only, err);
}

/* The volume that is meant of a server that shows no file of it. NULL with a message. */
static const char *choose_volume(const struct map_args *a, const char *path, json_t *status, struct err *err)
{
	json_t *volumes = json_object_get(status, "volumes");

	if (!a->volume && json_array_size(volumes) != 1)
		err_set(err, -EINVAL, "%s: that server has %zu volumes; choose one with --volume NAME", path, json_array_size(volumes));
	return a->volume ? a->volume : err->code ? NULL : json_string_value(json_object_get(json_array_get(volumes, 0), "name"));
}

/* Has the server show a file of a volume. The log beside it is empty, and marks the file as made here. */
static int map_added(const struct map_args *a, const char *path, json_t *status, struct err *err)
{
	const char *volume = choose_volume(a, path, status, err), *name = a->name ? a->name : volume;
	char file[PATH_MAX], mark[MAP_PATH_MAX];
	json_t *answer;
	FILE *f;
	int ret;

	if (!volume)
		return err->code ? err->code : err_set(err, -EINVAL, "%s: a volume has no name", path);
	ret = take_path(a, name, file, err);
	if (ret < 0)
		return ret;
	answer = ask_server(path, json_pack("{s:s, s:s, s:s}", "command", "fuse-add", "volume", volume, "path", file), err);
	if (!answer)
		return err->code;
	json_decref(answer);
	mapping_path(mark, sizeof(mark), file, ".log");
	f = fopen(mark, "we");
	if (f)
		fclose(f);
	return finish(a, file, true, a->read_only, err);
}

/* The file that a running server shows of a volume. */
static int map_served(const struct map_args *a, const char *path, struct err *err)
{
	json_t *status = ask_server(path, json_pack("{s:s}", "command", "status"), err), *e;
	struct mountinfo *info = malloc(sizeof(*info));
	const char *file = NULL, *v;
	size_t i, n = 0;
	int ret;

	json_array_foreach(json_object_get(status, "fuse"), i, e) {
		v = json_string_value(json_object_get(e, "volume"));
		if (!json_is_true(json_object_get(e, "mounted")) || !v || (a->volume && strcmp(v, a->volume)))
			continue;
		file = json_string_value(json_object_get(e, "path"));
		n++;
	}
	if (!status || !info)
		ret = err->code ? err->code : err_errno(err, -ENOMEM, "%s", path);
	else if (!n)
		ret = map_added(a, path, status, err);
	else if (n > 1)
		ret = err_set(err, -EINVAL, "%s: that server shows %zu files; choose one with --volume NAME", path, n);
	else
		ret = finish(a, file, false, mountinfo_find(file, info) && info->read_only, err);
	free(info);
	json_decref(status);
	return ret;
}

static bool is_socket(const char *path)
{
	struct stat st;

	return !stat(path, &st) && S_ISSOCK(st.st_mode);
}

int cli_map(int argc, char **argv)
{
	struct map_args a = { .dir = MAP_DIR, .block_size = 512 };
	struct err err = ERR_INIT;
	const struct cli_opt opts[] = {
		CLI_FLAG("list", 'l', &a.list),
		CLI_FLAG("json", 'j', &a.json),
		CLI_STR("fuse-dir", 0, "DIR", &a.dir),
		CLI_STR("name", 0, "NAME", &a.name),
		CLI_LIST("log", 0, "DEVICE", &a.logs),
		CLI_FLAG("read-only", 'r', &a.read_only),
		CLI_STR("volume", 0, "NAME", &a.volume),
		CLI_SIZE("block-size", 0, "BYTES", &a.block_size, 512, 4096),
		CLI_FLAG("file", 0, &a.file_only),
		CLI_END
	};
	char **disk = cli_parse("map", opts, "[DISK...]", argc, argv);
	int n = 0;

	while (disk[n])
		n++;
	if (a.list && n)
		cli_usage("map", "--list takes no disk");
	if (a.list)
		return show(a.json);
	if (!n)
		cli_usage("map", "DISK is missing; --list shows what is mapped");
	if (a.json)
		cli_usage("map", "--json goes with --list");
	if (n > 1 && (a.name || a.logs.n))
		cli_usage("map", "--name and --log are for one disk; disks that share a log are served by one weir serve --fuse");
	if (!is_pow2(a.block_size))
		cli_usage("map", "--block-size is a power of two from 512 to 4096");
	if (geteuid()) {
		err_set(&err, -EPERM, "only root makes block devices");
		return cli_fail("map", &err);
	}
	for (int i = 0; i < n; i++)
		if ((is_socket(disk[i]) ? map_served(&a, disk[i], &err) : map_disk(&a, disk[i], &err)) < 0)
			return cli_fail("map", &err);
	return 0;
}

/* --- Unmap --- */

/* The device goes first. The file of a server that runs for others as well stays. */
static int unmap(const struct mapping *m, struct err *err)
{
	int ret = *m->device ? loop_detach(m->device, m->dead, err) : 0;

	if (!ret && (m->own || m->dead))
		ret = map_server_stop(m, err);
	return ret;
}

static bool is_meant(const struct mapping *m, const char *what)
{
	char *real = realpath(what, NULL);
	bool same = !strcmp(what, m->file) || !strcmp(what, m->device) || (real && (!strcmp(real, m->file) || !strcmp(real, m->device)));

	free(real);
	return same;
}

/* One that the file system of its file has left: the kernel names no path for it any more. */
static int unmap_orphan(const char *what, struct err *err)
{
	char backing[PATH_MAX];

	if (loop_backing(what, backing) && !strcmp(backing, "/"))
		return loop_detach(what, true, err);
	return err_set(err, -ENOENT, "%s: is no device or file of weir; weir map --list shows those", what);
}

static int unmap_one(const struct mapping *list, int n, const char *what, struct err *err)
{
	int ret = 0, found = 0;

	for (int i = 0; i < n && !ret; i++) {
		if (!is_meant(&list[i], what))
			continue;
		found++;
		/* Another device on the same file keeps it. */
		if (i + 1 < n && !strcmp(list[i].file, list[i + 1].file) && *list[i].device)
			ret = loop_detach(list[i].device, list[i].dead, err);
		else
			ret = unmap(&list[i], err);
	}
	return ret < 0 || found ? ret : unmap_orphan(what, err);
}

int cli_unmap(int argc, char **argv)
{
	struct err err = ERR_INIT, one;
	bool all = false;
	const struct cli_opt opts[] = { CLI_FLAG("all", 'a', &all), CLI_END };
	char **what = cli_parse("unmap", opts, "[DEVICE...]", argc, argv);
	struct mapping *list;
	int n, failed = 0;

	if (all == !!what[0])
		cli_usage("unmap", "give DEVICE, or --all");
	n = mapping_list(&list, &err);
	if (n < 0)
		return cli_fail("unmap", &err);
	for (int i = 0; all && i < n; i++) {
		bool shared = i + 1 < n && !strcmp(list[i].file, list[i + 1].file);

		one = (struct err)ERR_INIT;
		if ((shared && *list[i].device ? loop_detach(list[i].device, list[i].dead, &one) : unmap(&list[i], &one)) < 0)
			failed |= cli_fail("unmap", &one);
	}
	for (int i = 0; what[i]; i++) {
		one = (struct err)ERR_INIT;
		if (unmap_one(list, n, what[i], &one) < 0)
			failed |= cli_fail("unmap", &one);
	}
	free(list);
	return failed;
}
