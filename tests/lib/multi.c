/* SPDX-License-Identifier: MIT */
/* Chooses one of the programs that are linked together: see multi.h. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define PROGRAM_CHOOSES
#include "lib/multi.h"

static struct program *programs;

void program_add(struct program *p)
{
	p->next = programs;
	programs = p;
}

static bool is_named(const struct program *p, const char *name)
{
	const char *slash = strrchr(p->source, '/'), *base = slash ? slash + 1 : p->source;
	size_t len = strlen(name);

	return !strncmp(base, name, len) && !strcmp(base + len, ".c");
}

int main(int argc, char **argv)
{
	for (struct program *p = programs; argc > 1 && p; p = p->next)
		if (is_named(p, argv[1]))
			return p->run(argc - 1, argv + 1);
	fprintf(stderr, "usage: %s PROGRAM [ARGUMENT...]; one of:\n", argv[0]);
	for (struct program *p = programs; p; p = p->next)
		fprintf(stderr, "\t%s\n", p->source);
	return 1;
}
