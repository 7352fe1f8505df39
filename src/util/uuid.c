/* SPDX-License-Identifier: MIT */
/* UUIDs, version 4. */
#include "util/uuid.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "util/bytes.h"

void uuid_random(struct uuid *u)
{
	ssize_t n;

	/* Up to 256 bytes come in one piece; without a source of randomness nothing here could be identified. */
	do
		n = getrandom(u->b, sizeof(u->b), 0);
	while (n < 0 && errno == EINTR);
	if (n != sizeof(u->b))
		abort();
	u->b[6] = (u->b[6] & 0x0f) | 0x40;
	u->b[8] = (u->b[8] & 0x3f) | 0x80;
}

bool uuid_equal(const struct uuid *a, const struct uuid *b)
{
	return !memcmp(a->b, b->b, sizeof(a->b));
}

bool uuid_is_null(const struct uuid *u)
{
	return bytes_are_zero(u->b, sizeof(u->b));
}

static bool dash_follows(int byte)
{
	return byte == 3 || byte == 5 || byte == 7 || byte == 9;
}

const char *uuid_format(const struct uuid *u, char buf[static 37])
{
	static const char hex[] = "0123456789abcdef";
	char *w = buf;

	for (int i = 0; i < 16; i++) {
		*w++ = hex[u->b[i] >> 4];
		*w++ = hex[u->b[i] & 15];
		if (dash_follows(i))
			*w++ = '-';
	}
	*w = '\0';
	return buf;
}

static int hex_digit(char c)
{
	if (!isxdigit((unsigned char)c))
		return -1;
	return isdigit((unsigned char)c) ? c - '0' : tolower((unsigned char)c) - 'a' + 10;
}

int uuid_parse(const char *s, struct uuid *ret)
{
	struct uuid u;

	if (strlen(s) != 36)
		return -EINVAL;
	for (int i = 0; i < 16; i++) {
		int hi = hex_digit(s[0]), lo = hex_digit(s[1]);

		if (hi < 0 || lo < 0)
			return -EINVAL;
		u.b[i] = hi << 4 | lo;
		s += 2;
		if (dash_follows(i) && *s++ != '-')
			return -EINVAL;
	}
	*ret = u;
	return 0;
}
