/* SPDX-License-Identifier: MIT */
/*
 * Runs a fuzz target on its corpus as an ordinary test: each file, its truncations, and damaged copies of it
 * (a few bits, bytes or ranges changed, by WEIR_SEED). In a fuzz build libFuzzer takes this file's place.
 *
 * usage: fuzz fuzz_TARGET FOLDER
 */
#include <dirent.h>
#include <errno.h>

#define PROGRAM_CHOOSES
#include "lib/multi.h"
#include "lib/test.h"
#include "util/bytes.h"
#include "util/rng.h"

#define FILE_MAX (1 << 20)
#define DAMAGED_COPIES 200

static int (*fuzz)(const uint8_t *data, size_t size);

/* An exact heap copy, so that ASan sees a read beyond the end. */
static void run(const uint8_t *data, size_t size)
{
	uint8_t *copy = malloc(max(size, (size_t)1));

	CHECK(copy);
	memcpy(copy, data, size);
	fuzz(copy, size);
	free(copy);
}

static void damage(struct rng *rng, uint8_t *data, size_t size)
{
	for (uint64_t n = 1 + rng_below(rng, 4); n; n--) {
		size_t at = rng_below(rng, size), len = min(1 + rng_below(rng, 8), size - at);

		switch (rng_below(rng, 4)) {
		case 0:
			data[at] ^= 1 << rng_below(rng, 8);
			break;
		case 1:
			rng_fill(rng, data + at, len);
			break;
		case 2:
			memset(data + at, rng_below(rng, 2) ? 0xff : 0, len);
			break;
		case 3:
			memmove(data + at, data + rng_below(rng, size - len + 1), len);
			break;
		}
	}
}

static void run_file(const char *path, uint64_t seed)
{
	static uint8_t data[FILE_MAX], copy[FILE_MAX];
	FILE *f = fopen(path, "rb");
	struct rng rng;
	size_t size;

	CHECK(f);
	size = fread(data, 1, sizeof(data), f);
	fclose(f);
	run(data, size);
	rng_seed(&rng, seed);
	for (uint64_t n = size ? test_scale(64) : 0; n; n--)
		run(data, rng_below(&rng, size));
	for (uint64_t n = size ? test_scale(DAMAGED_COPIES) : 0; n; n--) {
		memcpy(copy, data, size);
		damage(&rng, copy, size);
		run(copy, size);
	}
}

int replay(int argc, char **argv, int (*target)(const uint8_t *data, size_t size))
{
	uint64_t seed = test_seed();
	struct dirent *e;
	char path[4096];
	int files = 0;
	DIR *d;

	if (argc != 2)
		test_fail("usage: fuzz fuzz_TARGET FOLDER");
	fuzz = target;
	d = opendir(argv[1]);
	if (!d)
		test_fail("%s: %s", argv[1], strerror(errno));
	while ((e = readdir(d))) {
		if (e->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", argv[1], e->d_name);
		printf("%s\n", path);
		fflush(stdout);
		run_file(path, seed);
		files++;
	}
	closedir(d);
	CHECK(files > 0);
	return 0;
}
