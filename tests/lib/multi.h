/* SPDX-License-Identifier: MIT */
/*
 * Many test programs linked as one, which takes a hundredth of the linking: `unit test_util_size ARGS` is what the program of
 * test_util_size.c alone would be, in a process of its own. The compiler includes this ahead of each source, which knows nothing of it.
 *
 *  (1) All that a source defines is static, its main() too, so that no two sources have to agree on names.
 *  (2) The name of the source is the name of the program, so the compiler gets one source at a time (unity is off).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
struct program {
	const char *source;
	/* As any main(), of two arguments or of none. */
	int (*run)();
	struct program *next;
};
#pragma GCC diagnostic pop

void program_add(struct program *p);

/* Of fuzz/replay.c: what a fuzz target does as a test. */
int replay(int argc, char **argv, int (*target)(const uint8_t *data, size_t size));

#define PROGRAM_REGISTER() \
	__attribute__((constructor)) \
	static void program_register(void) \
	{ \
		static struct program program = { .source = __BASE_FILE__, .run = program_main }; \
	\
		program_add(&program); \
	}

#if defined(PROGRAM_FUZZ)
static int program_fuzz(const uint8_t *data, size_t size);
#define LLVMFuzzerTestOneInput program_fuzz

static int program_main(int argc, char **argv)
{
	return replay(argc, argv, program_fuzz);
}

PROGRAM_REGISTER()
#elif !defined(PROGRAM_CHOOSES)
/* After the "int" of its definition. */
#define main(...) \
	program_none(void); \
	static int program_main(__VA_ARGS__); \
	PROGRAM_REGISTER() \
	static int program_main(__VA_ARGS__)
#endif
