/* SPDX-License-Identifier: MIT */
/* NBD server: all that a client may say from its first byte on; in the plain, and to a server that has TLS with a pre-shared key. */
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz/nbd_fuzz.h"
#include "tls/tls.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tls_creds *make_creds(void)
{
	char dir[] = "/tmp/weir-fuzz-XXXXXX", path[64];
	struct tls_creds *creds = NULL;
	struct err err = ERR_INIT;
	FILE *f;

	if (!tls_is_built_in())
		return NULL;
	fuzz_check(mkdtemp(dir) != NULL);
	snprintf(path, sizeof(path), "%s/keys.psk", dir);
	f = fopen(path, "w");
	fuzz_check(f != NULL);
	fchmod(fileno(f), 0600);
	fputs("fuzz:00112233445566778899aabbccddeeff\n", f);
	fclose(f);
	fuzz_check(!tls_creds_load_server(dir, true, &creds, &err));
	unlink(path);
	rmdir(dir);
	return creds;
}

/* Behind a STARTTLS a client waits; one that does not is cut off. */
static size_t behind_starttls(const uint8_t *data, size_t size)
{
	for (size_t i = 0; i + NBD_OPTION_LEN <= size; i++)
		if (get_be64(data + i) == NBD_OPT_MAGIC && get_be32(data + i + 8) == NBD_OPT_STARTTLS)
			return i + NBD_OPTION_LEN;
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct tls_creds *creds;
	struct fuzz_client c = { .in = data, .len = size }, hasty = c, patient = c;

	fuzz_serve(&c, false);
	if (!creds)
		creds = make_creds();
	if (!creds)
		return 0;
	log_set_level(LOG_NONE);
	fuzz_serve_tls(&hasty, false, NBD_TLS_REQUIRE, creds);
	patient.wait_at = behind_starttls(data, size);
	if (patient.wait_at)
		fuzz_serve_tls(&patient, false, NBD_TLS_ALLOW, creds);
	return 0;
}
