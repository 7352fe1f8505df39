/* SPDX-License-Identifier: MIT */
/*
 * What a volume may hold after a crash: the history of its requests, and a checker.
 *
 * Each write fills its range with words that name the write and the place, so that from the bytes alone one can
 * tell which write they came from. The harness notes when each request was issued and when it returned; "A before B" means
 * that A had returned when B was issued. Requests that were in flight together have no order: the checker accepts
 * whatever the log may have decided.
 *
 * Pure: needs neither reactor nor disk. Times are ticks of a counter that all volumes of a run share.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum model_kind { MODEL_WRITE, MODEL_ZERO, MODEL_DISCARD, MODEL_FLUSH };

/* What the content is held against. */
enum model_promise {
	/*
	 * The write log's: a prefix of some order of all requests that agrees with "before", each request wholly in or wholly
	 * out, and in it all that a completed flush covers, each FUA request that returned, and what returned before the guest
	 * sent its first flush (until then nobody could rely on flushes).
	 */
	MODEL_PREFIX,
	/* The same, and in it each request that returned 0: logmode=write, a clean close, a drain, a run without a crash. */
	MODEL_ALL,
	/* Some prefix, with nothing that has to be in: the last batch of a log may look torn when it is damaged. */
	MODEL_ANY_PREFIX,
	/* A disk with a volatile cache: byte by byte, nothing older than what the last completed flush covers. */
	MODEL_DISK,
	/* The same with all that had returned, flushed or not: reads without a crash between. */
	MODEL_VISIBLE,
	/*
	 * For some completed flush (or none): as MODEL_DISK for that flush, and nothing that was issued after the next flush had
	 * completed: the image of an ordered log without the log.
	 */
	MODEL_EPOCH,
};

#define MODEL_NEVER UINT64_MAX

struct model_op {
	uint32_t id;
	enum model_kind kind;
	bool fua;
	uint64_t off, len;
	uint64_t issued, completed; /* ticks; MODEL_NEVER: has not returned, or returned an error */
	int error;
};

struct model {
	unsigned vol;		/* 0..15 */
	uint64_t size;
	uint8_t *base;		/* the content before the first op */
	struct model_op *ops;
	unsigned nops, max_ops;
	uint32_t first_id;	/* of ops[0] */
	uint64_t *clock;
	bool flushed;		/* a flush was issued before the history begins */
	bool weak_discard;	/* a discarded range may read as before */
};

struct model *model_create(unsigned vol, uint64_t size, uint64_t *clock);
void model_destroy(struct model *m);	/* NULL is fine */
/* Fills the base with words of its own (no write has them). Otherwise it is zeroes. */
void model_fill_base(struct model *m);
/* The content is known to be `content` now and durable: it becomes the base, and the history is forgotten. */
void model_rebase(struct model *m, const uint8_t *content);

/* Notes that a request is about to be issued; returns its index. */
unsigned model_issue(struct model *m, enum model_kind kind, uint64_t off, uint64_t len, bool fua);
/* The bytes that write `op` puts at [off, off+len) of the volume. */
void model_data(const struct model *m, unsigned op, uint64_t off, void *buf, uint64_t len);
void model_complete(struct model *m, unsigned op, int error);

/*
 * Holds `content` (the whole volume) against the history as it was at tick `at`. Returns NULL if it is a possible outcome, else a static
 * word for what is wrong: "garbage" (bytes that nobody wrote there), "torn" (a request partly in), "lost" (a request that had to be in),
 * "hole" (a request left out though a later one is in), "order" (no order explains it), "future" (MODEL_EPOCH); `why` gets a sentence.
 */
const char *model_check(const struct model *m, uint64_t at, enum model_promise promise, const uint8_t *content,
			char *why, size_t why_size);

/* The same for a read of a range, issued and returned at the given ticks: nothing older than what had returned before. */
const char *model_check_read(const struct model *m, uint64_t issued, uint64_t returned, uint64_t off, uint64_t len,
			     const uint8_t *content, char *why, size_t why_size);

/* Checks that gave up because zeroes left too many explanations (they count as passed). */
extern uint64_t model_undecided;
