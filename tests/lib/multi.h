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

#define PROGRAM_PASTE(a, b) a##b
#define PROGRAM_NAME(line) PROGRAM_PASTE(program_register_, line)
/* __BASE_FILE__ is not yet known here, but where these macros are used. */
#define PROGRAM_REGISTER() \
	__attribute__((constructor)) \
	static void PROGRAM_NAME(__LINE__)(void) \
	{ \
		static struct program program = { .source = __BASE_FILE__, .run = program_main }; \
	\
		program_add(&program); \
	}

/* Both stand for what follows the "int" of a declaration or definition. */
#if defined(PROGRAM_FUZZ)
static int program_fuzz(const uint8_t *data, size_t size);

static int program_main(int argc, char **argv)
{
	return replay(argc, argv, program_fuzz);
}

/* Declared and defined, and so registered twice, which does no harm. */
#define LLVMFuzzerTestOneInput(...) \
	program_none(void); \
	PROGRAM_REGISTER() \
	static int program_fuzz(__VA_ARGS__)
#elif !defined(PROGRAM_CHOOSES)
#define main(...) \
	program_none(void); \
	static int program_main(__VA_ARGS__); \
	PROGRAM_REGISTER() \
	static int program_main(__VA_ARGS__)
#endif
