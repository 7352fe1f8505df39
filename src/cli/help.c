/* SPDX-License-Identifier: MIT */
/* The help texts, which tools/mkhelp takes from the manual pages. */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"

struct help_entry {
	const char *verb;	/* "" for weir itself */
	const char *page;
	const char *text;
};

#include "help_text.h"

bool cli_help(const char *verb)
{
	for (const struct help_entry *e = help_entries; e->verb; e++) {
		if (!strcmp(e->verb, verb ? verb : "")) {
			printf("%s\nThe manual page %s says more.\n", e->text, e->page);
			return true;
		}
	}
	return false;
}
