/* SPDX-License-Identifier: MIT */
/* Sizes and durations as people write them. */
#include "util/size.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "util/bytes.h"

#define FRACTION_DIGITS 18

/* whole + fraction / 10^digits */
struct decimal {
	uint64_t whole, fraction, scale;
};

/* Reads digits, and a point with digits; *rest is what follows them. */
static int decimal_parse(const char *s, struct decimal *d, const char **rest)
{
	bool too_big = false;
	int digits = 0;

	*d = (struct decimal){ .scale = 1 };
	if (!isdigit((unsigned char)*s))
		return -EINVAL;
	for (; isdigit((unsigned char)*s); s++) {
		if (__builtin_mul_overflow(d->whole, 10, &d->whole) ||
		    __builtin_add_overflow(d->whole, *s - '0', &d->whole))
			too_big = true;
	}
	if (*s == '.') {
		if (!isdigit((unsigned char)*++s))
			return -EINVAL;
		for (; isdigit((unsigned char)*s); s++) {
			if (++digits > FRACTION_DIGITS)
				return -EINVAL;
			d->fraction = d->fraction * 10 + (*s - '0');
			d->scale *= 10;
		}
	}
	*rest = s;
	return too_big ? -ERANGE : 0;
}

/* *ret = d * unit, if that is a whole number of at most 63 bits. */
static int decimal_scale(const struct decimal *d, uint64_t unit, uint64_t *ret)
{
	unsigned __int128 part = (unsigned __int128)d->fraction * unit;
	unsigned __int128 value = (unsigned __int128)d->whole * unit + part / d->scale;

	if (part % d->scale)
		return -EINVAL;
	if (value > INT64_MAX)
		return -ERANGE;
	*ret = value;
	return 0;
}

int size_parse(const char *s, uint64_t *ret)
{
	static const char units[] = "KMGTPE";
	struct decimal d;
	uint64_t unit = 1;
	const char *u;
	int rc = decimal_parse(s, &d, &s);

	if (rc && rc != -ERANGE)
		return rc;
	u = *s ? strchr(units, toupper((unsigned char)*s)) : NULL;
	if (u) {
		unit = 1ull << (10 * (u - units + 1));
		s++;
		if (!strcasecmp(s, "iB"))
			s += 2;
	}
	if (!strcasecmp(s, "B"))
		s++;
	if (*s)
		return -EINVAL;
	return rc ? rc : decimal_scale(&d, unit, ret);
}

int duration_parse(const char *s, uint64_t *ret_ns)
{
	static const struct {
		const char *name;
		uint64_t ns;
	} units[] = {
		{ "", 1000000000 }, { "ns", 1 }, { "us", 1000 }, { "ms", 1000000 }, { "s", 1000000000 },
		{ "m", 60 * 1000000000ull }, { "h", 3600 * 1000000000ull },
	};
	struct decimal d;
	int rc = decimal_parse(s, &d, &s);

	if (rc && rc != -ERANGE)
		return rc;
	for (size_t i = 0; i < ARRAY_SIZE(units); i++)
		if (!strcmp(s, units[i].name))
			return rc ? rc : decimal_scale(&d, units[i].ns, ret_ns);
	return -EINVAL;
}

/*
 * Prints `value`/`unit` with three significant digits, no trailing zeros, and `name` behind it. False if that
 * rounds to `limit` or more, so that the next unit should be used.
 */
static bool format_in_unit(uint64_t value, uint64_t unit, unsigned limit, const char *name, char buf[static 16])
{
	unsigned decimals = value / unit >= 100 ? 0 : value / unit >= 10 ? 1 : 2;
	unsigned pow = decimals == 2 ? 100 : decimals == 1 ? 10 : 1;
	uint64_t v = ((unsigned __int128)value * pow + unit / 2) / unit;

	if (v / pow >= limit)
		return false;
	for (; decimals && v % 10 == 0; decimals--) {
		v /= 10;
		pow /= 10;
	}
	if (decimals)
		snprintf(buf, 16, "%u.%0*u %s", (unsigned)(v / pow), (int)decimals, (unsigned)(v % pow), name);
	else
		snprintf(buf, 16, "%u %s", (unsigned)v, name);
	return true;
}

const char *size_format(uint64_t bytes, char buf[static 16])
{
	static const char *const names[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	size_t i = 0;

	while (!format_in_unit(bytes, 1ull << (10 * i), 1024, names[i], buf))
		i++;
	return buf;
}

const char *duration_format(uint64_t ns, char buf[static 16])
{
	static const struct {
		const char *name;
		uint64_t ns;
		unsigned limit;
	} units[] = {
		{ "ns", 1, 1000 }, { "us", 1000, 1000 }, { "ms", 1000000, 1000 }, { "s", 1000000000, 120 },
		{ "min", 60 * 1000000000ull, 120 }, { "h", 3600 * 1000000000ull, 48 },
		{ "d", 86400 * 1000000000ull, UINT32_MAX },
	};
	size_t i = 0;

	while (!format_in_unit(ns, units[i].ns, units[i].limit, units[i].name, buf))
		i++;
	return buf;
}

int u64_parse(const char *s, uint64_t *ret)
{
	unsigned base = 10;
	bool too_big = false;
	uint64_t v = 0;

	if (s[0] == '0' && (s[1] == 'x' || s[1] == 'X')) {
		base = 16;
		s += 2;
	}
	if (!*s)
		return -EINVAL;
	for (; *s; s++) {
		unsigned char c = tolower((unsigned char)*s);
		unsigned digit = isdigit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 16;

		if (digit >= base)
			return -EINVAL;
		if (__builtin_mul_overflow(v, base, &v) || __builtin_add_overflow(v, digit, &v))
			too_big = true;
	}
	if (too_big)
		return -ERANGE;
	*ret = v;
	return 0;
}

int bool_parse(const char *s, int *ret)
{
	static const char *const names[] = { "off", "on", "no", "yes", "false", "true", "0", "1" };

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (!strcmp(s, names[i])) {
			*ret = i & 1;
			return 0;
		}
	}
	return -EINVAL;
}
