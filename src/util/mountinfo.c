/* SPDX-License-Identifier: MIT */
/* The mounts that this process sees; proc(5) describes the lines. */
#include "util/mountinfo.h"

#include <stdlib.h>
#include <string.h>

static bool is_octal(char c)
{
	return c >= '0' && c <= '7';
}

/* A word in which blanks and backslashes are written as \ooo. */
static void unescape(const char *s, char *dst, size_t size)
{
	size_t n = 0;

	while (*s && n + 1 < size) {
		if (s[0] == '\\' && is_octal(s[1]) && is_octal(s[2]) && is_octal(s[3])) {
			dst[n++] = (char)((s[1] - '0') << 6 | (s[2] - '0') << 3 | (s[3] - '0'));
			s += 4;
		} else {
			dst[n++] = *s++;
		}
	}
	dst[n] = '\0';
}

/* "36 35 98:0 /root /point rw,noatime shared:1 - type source superoptions" */
static bool parse(char *line, struct mountinfo *m)
{
	char *word[6], *save = NULL, *tail = strstr(line, " - "), *type, *source;

	if (!tail)
		return false;
	*tail = '\0';
	for (int i = 0; i < 6; i++) {
		word[i] = strtok_r(i ? NULL : line, " ", &save);
		if (!word[i])
			return false;
	}
	type = strtok_r(tail + 3, " \n", &save);
	source = type ? strtok_r(NULL, " \n", &save) : NULL;
	if (!source || sscanf(word[2], "%u:%u", &m->major, &m->minor) != 2)
		return false;
	m->id = (unsigned)strtoul(word[0], NULL, 10);
	unescape(word[4], m->point, sizeof(m->point));
	unescape(type, m->type, sizeof(m->type));
	unescape(source, m->source, sizeof(m->source));
	m->read_only = !strncmp(word[5], "ro", 2) && (word[5][2] == ',' || !word[5][2]);
	return true;
}

bool mountinfo_next(FILE *f, struct mountinfo *ret)
{
	char *line = NULL;
	size_t size = 0;
	bool found = false;

	while (!found && getline(&line, &size, f) >= 0)
		found = parse(line, ret);
	free(line);
	return found;
}

bool mountinfo_find(const char *path, struct mountinfo *ret)
{
	FILE *f = fopen("/proc/self/mountinfo", "re");
	struct mountinfo *m = f ? malloc(sizeof(*m)) : NULL;
	bool found = false;

	while (m && mountinfo_next(f, m)) {
		if (!strcmp(m->point, path)) {
			*ret = *m;
			found = true;
		}
	}
	free(m);
	if (f)
		fclose(f);
	return found;
}
