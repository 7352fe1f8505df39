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
#include "cli/map_disk.h"
#include "cli/mapping.h"
#include "daemon/graph.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"
#include "util/mountinfo.h"
#include "util/nbd_device.h"
#include "util/pid_file.h"
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
		       m->size ? size_format(m->size, size) : "-", m->read_only ? "ro" : "rw", server, m->nbd ? "-" : m->file);
	}
}

static int print_json(const struct mapping *list, int n)
{
	json_t *array = json_array();

	for (int i = 0; i < n; i++) {
		const struct mapping *m = &list[i];

		json_array_append_new(array, json_pack("{s:s?, s:s, s:s, s:s?, s:I, s:b, s:b, s:b, s:o}", "device", *m->device ? m->device : NULL,
						       "via", m->nbd ? "nbd" : "fuse", "volume", m->volume, "file", m->nbd ? NULL : m->file, "size", (json_int_t)m->size, "read_only", m->read_only,
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

enum via { VIA_AUTO, VIA_NBD, VIA_FUSE };

static const char *const via_names[] = { "auto", "nbd", "fuse", NULL };

struct map_args {
	const char *dir, *name, *volume;
	struct cli_list logs;
	bool read_only, file_only, list, json;
	uint64_t block_size, wait_ns;
	int via;
	bool automatic;
};

static uint32_t wait_seconds(const struct map_args *a)
{
	return (uint32_t)((a->wait_ns + 999999999) / 1000000000);
}

static int check_name(const char *name, struct err *err)
{
	if (!*name || *name == '.' || strchr(name, '/') || strlen(name) > 200)
		return err_set(err, -EINVAL, "'%.200s' cannot be the name of a file; give another with --name", name);
	return 0;
}

/* A server that ends with all written takes its pid file away. */
static bool was_killed(const struct mapping *m)
{
	char path[MAP_PATH_MAX];
	struct stat st;

	mapping_path(path, sizeof(path), m->file, ".pid");
	return !lstat(path, &st);
}

/* It answers no more, and is still writing what it has. */
static bool is_ending(const struct mapping *m)
{
	char path[MAP_PATH_MAX];

	mapping_path(path, sizeof(path), m->file, ".pid");
	return pid_file_is_held(path);
}

/*
 * A server that was killed under a device: its dead file must not be covered by a new one, or nobody would find the device. An NBD device whose server has ended
 * can go on with the next: *ret_again, if there is one.
 */
static int check_free(const char *file, struct mapping *ret_again, struct err *err)
{
	struct mapping *list;
	int n = mapping_list(&list, err), ret = min(n, 0);

	for (int i = 0; i < n && !ret; i++) {
		const char *what = *list[i].device ? list[i].device : file;

		if (strcmp(list[i].file, file) || (list[i].nbd && !list[i].own))
			continue;
		if (list[i].nbd && list[i].dead && !was_killed(&list[i]) && ret_again)
			*ret_again = list[i];
		else if (list[i].nbd && list[i].dead && !was_killed(&list[i]))
			ret = err_set(err, -EBUSY, "%s: belongs to %s, whose server has ended; --via nbd gives it another, and weir unmap %s takes it away", file, what, what);
		else if (list[i].nbd && list[i].dead && is_ending(&list[i]))
			ret = err_set(err, -EBUSY, "%s: belongs to %s, whose server is about to end; try again in a second", file, what);
		else if (!list[i].dead)
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
static int take_path(const struct map_args *a, const char *name, char file[PATH_MAX], struct mapping *ret_again, struct err *err)
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
	return check_free(file, ret_again, err);
}

static void print_nbd(const struct map_args *a, const char *device)
{
	if (a->automatic)
		log_info("%s: by the kernel's NBD client (--via fuse does without)", device);
	puts(device);
}

/* Over NBD: the server is there. */
static int finish_nbd(const struct map_args *a, const char *file, const char *name, const struct map_disk *disk, const struct mapping *again, struct err *err)
{
	struct map_nbd n = { .file = file, .volume = name, .block_size = (uint32_t)a->block_size, .wait_s = wait_seconds(a), .own = true,
			     .read_only = a->read_only };
	struct mapping m = { .nbd = true, .own = true };
	char socket[MAP_PATH_MAX], control[MAP_PATH_MAX];
	struct err ignored = ERR_INIT;
	int ret;

	mapping_path(socket, sizeof(socket), file, ".nbd");
	n.socket = socket;
	if (*again->device) {
		ret = map_nbd_attach_again(&n, again, err);
		snprintf(m.device, sizeof(m.device), "%s", again->device);
	} else {
		ret = map_disk_keep(disk, file, err);
		if (!ret)
			ret = map_nbd_attach(&n, m.device, err);
	}
	if (!ret) {
		print_nbd(a, m.device);
		return 0;
	}
	snprintf(m.file, sizeof(m.file), "%s", file);
	m.waits = *again->device;
	mapping_path(control, sizeof(control), file, ".sock");
	m.pid = mapping_server_pid(control);
	map_server_stop(&m, &ignored);
	return ret;
}

static int map_disk(const struct map_args *a, const char *disk, struct err *err)
{
	const char *args[2 * CLI_LIST_MAX + 2];
	struct mapping again = { .device = "" };
	struct map_disk d = { NULL };
	char name[256], file[PATH_MAX];
	bool nbd = a->via == VIA_NBD;
	int n = 0, ret = 0;

	if (a->name)
		snprintf(name, sizeof(name), "%s", a->name);
	else
		ret = graph_default_name(disk, name, sizeof(name), err);
	if (!ret)
		ret = take_path(a, name, file, nbd ? &again : NULL, err);
	if (!ret && nbd)
		ret = map_disk_describe(&d, disk, a->logs.v, a->logs.n, a->block_size, err);
	/* Before a server touches what may be another disk. */
	if (!ret && *again.device)
		ret = map_disk_check(&d, file, again.device, err);
	if (ret < 0)
		goto out;
	for (int i = 0; i < a->logs.n; i++) {
		args[n++] = "--log";
		args[n++] = a->logs.v[i];
	}
	if (a->read_only)
		args[n++] = "--read-only";
	args[n] = NULL;
	ret = map_server_start(disk, file, nbd, name, args, err);
	if (!ret)
		ret = nbd ? finish_nbd(a, file, name, &d, &again, err) : finish(a, file, true, a->read_only, err);
out:
	map_disk_free(&d);
	return ret;
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
	ret = take_path(a, name, file, NULL, err);
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

/* A running server's socket that the kernel can speak to. False if there is none. */
static bool nbd_socket(const json_t *status, char path[PATH_MAX])
{
	const json_t *nbd = json_object_get(status, "nbd"), *e;
	const char *tls = json_string_value(json_object_get(nbd, "tls")), *addr;
	size_t i;

	json_array_foreach(json_object_get(nbd, "addresses"), i, e) {
		addr = json_string_value(e);
		if (addr && !strncmp(addr, "unix:/", 6) && tls && strcmp(tls, "require")) {
			snprintf(path, PATH_MAX, "%s", addr + 5);
			return true;
		}
	}
	return false;
}

static int map_served_nbd(const struct map_args *a, const char *control, const char *socket, json_t *status, struct err *err)
{
	const char *volume = choose_volume(a, control, status, err);
	char *real = volume ? realpath(control, NULL) : NULL, device[32];
	struct map_nbd n = { .file = real, .socket = socket, .volume = volume, .block_size = (uint32_t)a->block_size, .wait_s = wait_seconds(a),
			     .read_only = a->read_only };
	int ret = 0;

	if (!volume)
		ret = err->code ? err->code : err_set(err, -EINVAL, "%s: a volume has no name", control);
	else if (!real)
		ret = err_errno(err, -errno, "%s", control);
	if (!ret)
		ret = map_nbd_attach(&n, device, err);
	free(real);
	if (!ret)
		print_nbd(a, device);
	return ret;
}

/* The file that a running server shows of a volume. */
static int map_served(const struct map_args *a, const char *path, struct err *err)
{
	json_t *status = ask_server(path, json_pack("{s:s}", "command", "status"), err), *e;
	struct mountinfo *info = malloc(sizeof(*info));
	const char *file = NULL, *v;
	char socket[PATH_MAX] = "";
	size_t i, n = 0;
	int ret;

	if (status && a->via == VIA_NBD && (nbd_socket(status, socket) || !a->automatic)) {
		ret = *socket ? map_served_nbd(a, path, socket, status, err) :
		      err_set(err, -ENOTSUP, "%s: that server listens on no Unix socket for NBD without TLS (--nbd unix:/PATH); --via fuse needs none", path);
		free(info);
		json_decref(status);
		return ret;
	}
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

/* The first way that there is. ublk would come before, but no kernel that has it was there to be tried. */
static int choose_way(struct map_args *a, struct err *err)
{
	bool possible = a->via != VIA_FUSE && !a->file_only && nbd_device_possible();

	if (a->via == VIA_NBD && a->file_only)
		return err_set(err, -EINVAL, "--file prints a file, and --via nbd makes none");
	if (a->via == VIA_NBD && !possible)
		return err_set(err, -ENOTSUP, "--via nbd: this kernel has no NBD client; modprobe nbd loads it, and --via fuse does without");
	a->automatic = a->via == VIA_AUTO;
	if (a->automatic)
		a->via = possible ? VIA_NBD : VIA_FUSE;
	return 0;
}

static bool is_socket(const char *path)
{
	struct stat st;

	return !stat(path, &st) && S_ISSOCK(st.st_mode);
}

int cli_map(int argc, char **argv)
{
	struct map_args a = { .dir = MAP_DIR, .block_size = 512, .wait_ns = 60000000000ull };
	struct err err = ERR_INIT;
	const struct cli_opt opts[] = {
		CLI_FLAG("list", 'l', &a.list),
		CLI_FLAG("json", 'j', &a.json),
		CLI_ENUM("via", 0, via_names, &a.via),
		CLI_DURATION("wait", 0, "DURATION", &a.wait_ns, 0, 86400000000000ull),
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
	if (choose_way(&a, &err) < 0)
		return cli_fail("map", &err);
	for (int i = 0; i < n; i++)
		if ((is_socket(disk[i]) ? map_served(&a, disk[i], &err) : map_disk(&a, disk[i], &err)) < 0)
			return cli_fail("map", &err);
	return 0;
}

/* --- Unmap --- */

/* The device goes first. The file of a server that runs for others as well stays. */
static int detach(const struct mapping *m, bool force, struct err *err)
{
	return m->nbd ? map_nbd_detach(m, force, err) : *m->device ? loop_detach(m->device, m->dead || force, err) : 0;
}

static int unmap(const struct mapping *m, bool force, struct err *err)
{
	int ret = detach(m, force, err);

	if (!ret && (m->own || (m->dead && !m->nbd)))
		ret = map_server_stop(m, err);
	return ret;
}

static bool is_meant(const struct mapping *m, const char *what)
{
	char *real = realpath(what, NULL);
	bool same = (!strcmp(what, m->file) && !m->nbd) || !strcmp(what, m->device) || (real && ((!strcmp(real, m->file) && !m->nbd) || !strcmp(real, m->device)));

	free(real);
	return same;
}

/* Another device on the same file keeps it. */
static bool is_shared(const struct mapping *list, int n, int i)
{
	return i + 1 < n && !list[i].nbd && !list[i + 1].nbd && !strcmp(list[i].file, list[i + 1].file) && *list[i].device;
}

/* One that the file system of its file has left: the kernel names no path for it any more. */
static int unmap_orphan(const char *what, struct err *err)
{
	char backing[PATH_MAX];

	if (loop_backing(what, backing) && !strcmp(backing, "/"))
		return loop_detach(what, true, err);
	return err_set(err, -ENOENT, "%s: is no device or file of weir; weir map --list shows those", what);
}

static int unmap_one(const struct mapping *list, int n, const char *what, bool force, struct err *err)
{
	int ret = 0, found = 0;

	for (int i = 0; i < n && !ret; i++) {
		if (!is_meant(&list[i], what))
			continue;
		found++;
		ret = is_shared(list, n, i) ? detach(&list[i], force, err) : unmap(&list[i], force, err);
	}
	return ret < 0 || found ? ret : unmap_orphan(what, err);
}

int cli_unmap(int argc, char **argv)
{
	struct err err = ERR_INIT, one;
	bool all = false, force = false;
	const struct cli_opt opts[] = { CLI_FLAG("all", 'a', &all), CLI_FLAG("force", 'f', &force), CLI_END };
	char **what = cli_parse("unmap", opts, "[DEVICE...]", argc, argv);
	struct mapping *list;
	int n, failed = 0;

	if (all == !!what[0])
		cli_usage("unmap", "give DEVICE, or --all");
	n = mapping_list(&list, &err);
	if (n < 0)
		return cli_fail("unmap", &err);
	for (int i = 0; all && i < n; i++) {
		one = (struct err)ERR_INIT;
		if ((is_shared(list, n, i) ? detach(&list[i], force, &one) : unmap(&list[i], force, &one)) < 0)
			failed |= cli_fail("unmap", &one);
	}
	for (int i = 0; what[i]; i++) {
		one = (struct err)ERR_INIT;
		if (unmap_one(list, n, what[i], force, &one) < 0)
			failed |= cli_fail("unmap", &one);
	}
	free(list);
	return failed;
}
