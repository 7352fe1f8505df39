/* SPDX-License-Identifier: MIT */
/* TLS: pre-shared keys, from a file as psktool(1) writes it: NAME:HEX, a line for each. */
#include "tls/internal.h"

#include <errno.h>
#include <gnutls/crypto.h>
#include <stdlib.h>
#include <string.h>

#include "util/err.h"

#define KEYS_MAX 4096u
#define KEY_MIN 16u

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Never prints what is in the line: it may be a key. */
static int parse_line(const char *line, size_t len, struct tls_psk *k, const char *path, unsigned number, struct err *err)
{
	const char *colon = memchr(line, ':', len), *hex;
	size_t user = colon ? (size_t)(colon - line) : 0, digits;

	if (!user || user >= TLS_USER_MAX)
		return err_set(err, -EINVAL, "%s, line %u: is not NAME:HEX with a name of 1 to %u bytes; psktool makes such lines", path, number,
			       TLS_USER_MAX - 1);
	hex = colon + 1;
	digits = len - user - 1;
	if (digits % 2 || digits < 2 * KEY_MIN || digits > 2 * TLS_KEY_MAX)
		return err_set(err, -EINVAL, "%s, line %u: a key is %u to %u hexadecimal digits, an even number; psktool makes such lines", path, number,
			       2 * KEY_MIN, 2 * TLS_KEY_MAX);
	memcpy(k->user, line, user);
	for (size_t i = 0; i < digits; i += 2) {
		int hi = hex_digit(hex[i]), lo = hex_digit(hex[i + 1]);

		if (hi < 0 || lo < 0)
			return err_set(err, -EINVAL, "%s, line %u: the key has something that is no hexadecimal digit", path, number);
		k->key[k->key_len++] = (uint8_t)(hi << 4 | lo);
	}
	return 0;
}

int tls_psk_load(const char *path, struct tls_psk **ret, struct err *err)
{
	struct tls_psk *list = NULL;
	gnutls_datum_t file;
	unsigned number = 0, keys = 0;
	int r = tls_file_read(path, true, &file, err);

	if (r < 0)
		return r;
	for (char *p = (char *)file.data; *p && !r;) {
		size_t len = strcspn(p, "\n"), used = len && p[len - 1] == '\r' ? len - 1 : len;

		number++;
		if (used && *p != '#') {
			struct tls_psk *k = calloc(1, sizeof(*k));

			if (!k || keys++ == KEYS_MAX) {
				r = err_set(err, -ENOMEM, "%s: more than %u keys, or out of memory", path, KEYS_MAX);
				free(k);
				break;
			}
			k->next = list;
			list = k;
			r = parse_line(p, used, k, path, number, err);
		}
		p += len + (p[len] != '\0');
	}
	tls_file_free(&file);
	if (!r && !list)
		r = err_set(err, -EINVAL, "%s: has no key; psktool -u NAME -p FILE makes one", path);
	if (r < 0) {
		tls_psk_free(list);
		return r;
	}
	*ret = list;
	return 0;
}

void tls_psk_free(struct tls_psk *list)
{
	while (list) {
		struct tls_psk *next = list->next;

		explicit_bzero(list, sizeof(*list));
		free(list);
		list = next;
	}
}

/* Who is not known gets a key that nobody has: so the answer does not tell which names exist. */
int tls_psk_find(gnutls_session_t s, const gnutls_datum_t *user, gnutls_datum_t *key)
{
	const struct tls_creds *c = gnutls_session_get_ptr(s);
	const struct tls_psk *k = c->psk;

	while (k && (strlen(k->user) != user->size || memcmp(k->user, user->data, user->size)))
		k = k->next;
	key->size = k ? k->key_len : 32;
	key->data = gnutls_malloc(key->size);
	if (!key->data)
		return -1;
	if (k)
		memcpy(key->data, k->key, k->key_len);
	else if (gnutls_rnd(GNUTLS_RND_KEY, key->data, key->size) < 0)
		return -1;
	return 0;
}
