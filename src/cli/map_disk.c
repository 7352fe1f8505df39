/* SPDX-License-Identifier: MIT */
/*
 * What disk a device is of.
 *
 * Under a device that waits for its server there may be a file system. To go on with another disk, which a name and a size do not exclude, would destroy both.
 *
 * Invariants
 *  (1) FILE.disk is written before its device exists, and removed after it.
 *  (2) The text holds all that says where a disk's contents are: each wrapper, the driver, real paths, a regular file's inode, all options, the logs. What cannot be compared
 *      is not the same.
 */
#include "cli/map_disk.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "blk/spec.h"
#include "util/err.h"

#define TEXT_MAX (1 << 20)
#define SHOWN 250

static int compare(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* A path as it is without links and from any folder, anything else as it is; commas doubled. */
static void put(FILE *f, const char *s)
{
	char *real = realpath(s, NULL);

	for (const char *p = real ? real : s; *p; p++)
		fprintf(f, *p == ',' ? ",," : "%c", *p);
	free(real);
}

static void put_options(FILE *f, const struct opts *o, const char *before)
{
	for (size_t i = 0; i < o->n; i++) {
		fprintf(f, "%s%s=", i ? "," : before, o->v[i].key);
		put(f, o->v[i].val);
	}
}

/* A socket that is named from this folder. */
static void put_folder(FILE *f, const char *rest)
{
	const char *socket = strstr(rest, "socket=");
	char *folder = socket && socket[7] != '/' && strncmp(socket + 7, "%2F", 3) && strncmp(socket + 7, "%2f", 3) ? getcwd(NULL, 0) : NULL;

	if (folder)
		fprintf(f, " in %s", folder);
	free(folder);
}

static void put_disk(FILE *f, const struct disk_spec *s, bool *gone)
{
	struct stat st;

	for (; s->inner; s = s->inner) {
		fprintf(f, "%s:", s->driver);
		put_options(f, &s->opts, "");
		fputc(':', f);
	}
	fprintf(f, "%s:", s->driver);
	put(f, s->rest);
	put_options(f, &s->opts, ",");
	if (!strcmp(s->driver, "file") && !stat(s->rest, &st) && S_ISREG(st.st_mode))
		fprintf(f, " (inode %llu)", (unsigned long long)st.st_ino);
	if (!strcmp(s->driver, "nbd"))
		put_folder(f, s->rest);
	*gone |= !strcmp(s->driver, "mem");
}

/* NULL with a message. */
static char *disk_text(const char *disk, bool *gone, struct err *err)
{
	struct disk_spec *spec;
	char *text = NULL;
	size_t size;
	FILE *f;

	if (disk_spec_parse(disk, &spec, err) < 0)
		return NULL;
	f = open_memstream(&text, &size);
	if (f)
		put_disk(f, spec, gone);
	disk_spec_free(spec);
	if (!f || fclose(f)) {
		err_set(err, -ENOMEM, "out of memory");
		free(text);
		return NULL;
	}
	return text;
}

int map_disk_describe(struct map_disk *d, const char *disk, const char *const *logs, int nlogs, uint64_t block_size, struct err *err)
{
	char **log = calloc((size_t)nlogs + 1, sizeof(*log)), *text;
	size_t size;
	FILE *f = NULL;
	int n = 0;

	*d = (struct map_disk){ NULL };
	text = log ? disk_text(disk, &d->gone, err) : NULL;
	while (text && n < nlogs && (log[n] = disk_text(logs[n], &d->gone, err)) != NULL)
		n++;
	if (text && n == nlogs)
		f = open_memstream(&d->text, &size);
	if (f) {
		/* Two logs mirror each other, in whatever order. */
		qsort(log, (size_t)n, sizeof(*log), compare);
		fprintf(f, "%s\n", text);
		for (int i = 0; i < n; i++)
			fprintf(f, "--log %s\n", log[i]);
		fprintf(f, "--block-size %llu\n", (unsigned long long)block_size);
	}
	if ((!f || fclose(f)) && !err->code)
		err_set(err, -ENOMEM, "out of memory");
	for (int i = 0; i < n; i++)
		free(log[i]);
	free(log);
	free(text);
	return err->code;
}

void map_disk_free(struct map_disk *d)
{
	free(d->text);
	d->text = NULL;
}

static void path_of(char path[PATH_MAX + 16], const char *file)
{
	snprintf(path, PATH_MAX + 16, "%s.disk", file);
}

int map_disk_keep(const struct map_disk *d, const char *file, struct err *err)
{
	char path[PATH_MAX + 16];
	FILE *f;
	int ret;

	path_of(path, file);
	f = fopen(path, "we");
	ret = f && fputs(d->text, f) >= 0 ? 0 : -errno;
	if (f && fclose(f) && !ret)
		ret = -errno;
	if (ret < 0)
		unlink(path);
	return ret < 0 ? err_errno(err, ret, "%s", path) : 0;
}

/* NULL: it cannot be read. */
static char *read_text(const char *path)
{
	FILE *f = fopen(path, "re");
	char *text = f ? malloc(TEXT_MAX) : NULL;
	size_t n = text ? fread(text, 1, TEXT_MAX - 1, f) : 0;

	if (text && (ferror(f) || !n)) {
		free(text);
		text = NULL;
	}
	if (text)
		text[n] = '\0';
	if (f)
		fclose(f);
	return text;
}

/* On one line, cut where it is too long for a message. */
static const char *shown(const char *text, char buf[SHOWN])
{
	snprintf(buf, SHOWN, "%s", text);
	for (char *p = buf; *p; p++)
		if (*p == '\n')
			*p = p[1] ? ' ' : '\0';
	return buf;
}

int map_disk_check(const struct map_disk *d, const char *file, const char *device, struct err *err)
{
	char path[PATH_MAX + 16], a[SHOWN], b[SHOWN], *was;
	int ret = 0;

	path_of(path, file);
	was = read_text(path);
	if (!was)
		ret = err_set(err, -EBUSY, "%s: waits for its disk, and %s does not say which that is; weir unmap %s first", device, path, device);
	else if (strcmp(was, d->text))
		ret = err_set(err, -EBUSY, "%s: waits for %s, and cannot go on with %s; give another --name, or weir unmap %s first", device, shown(was, a),
			      shown(d->text, b), device);
	else if (d->gone)
		ret = err_set(err, -EBUSY, "%s: its disk was in the memory of its server, and went with it; weir unmap %s first", device, device);
	free(was);
	return ret;
}
