/* SPDX-License-Identifier: MIT */
/*
 * One budget of memory for all that a process caches and buffers.
 *
 * Who uses memory is a user of the budget: it takes before it touches, and gives back when the kernel has it again. A user has a floor, which is
 * kept for it whether it uses it or not; beyond its floor it competes with the others for what is left.
 *
 * Invariants
 *  (1) `committed` is the sum over all users of max(held, floor);
 *  (2) budget_take() never raises it above the limit. Only budget_force() does, for what is there already and can only be counted;
 *  (3) a take within the floor never fails.
 *
 * A take that is refused, and one that leaves less than the headroom, ring the bell: whoever keeps the budget then takes memory from users that can do with
 * less. So the headroom is what others may take at once, and a refusal is over within milliseconds. The largest take that was refused is remembered for
 * the keeper: one that is larger than the headroom needs more to be given back than that.
 *
 * A user that yields is one from which the keeper takes all beyond its floor, if others want it.
 *
 * Users may live on several reactors; each calls for itself on its own.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "rt/rt.h"

struct budget;

struct budget_user {
	struct list node;
	struct budget *b;	/* NULL: it counts nothing and refuses nothing */
	const char *name;	/* static text; figures of users with the same name are added up */
	uint64_t held, floor, peak;
	bool yields;
};

/* `keeper` gets the bell: fn(arg), on its reactor, never nested. NULL: nobody. */
int budget_create(uint64_t limit, struct budget **ret);
void budget_destroy(struct budget *b);	/* NULL is fine; all users have left */
void budget_set_keeper(struct budget *b, struct rt *keeper, void (*fn)(void *arg), void *arg);

/* False, with nothing done, if the floor does not fit. `b` may be NULL: all calls then succeed. */
bool budget_join(struct budget *b, struct budget_user *u, const char *name, uint64_t floor);
/* From now on it yields; it holds nothing yet. */
void budget_set_yielding(struct budget_user *u);
/* All that it held is given back. */
void budget_leave(struct budget_user *u);
bool budget_take(struct budget_user *u, uint64_t bytes);
void budget_force(struct budget_user *u, uint64_t bytes);
void budget_give(struct budget_user *u, uint64_t bytes);
/* What it holds now, by its own count. */
void budget_set_held(struct budget_user *u, uint64_t bytes);

uint64_t budget_limit(const struct budget *b);
void budget_set_limit(struct budget *b, uint64_t limit);
uint64_t budget_headroom(const struct budget *b);
void budget_set_headroom(struct budget *b, uint64_t headroom);
uint64_t budget_committed(const struct budget *b);
/* What could still be taken; with NULL all there is. */
uint64_t budget_room(const struct budget *b);
/* The same, once all that yield have given way. */
uint64_t budget_obtainable(const struct budget *b);
uint64_t budget_refused(const struct budget *b);
/* Somebody waits until so much can be taken: rings the bell. NULL is fine. */
void budget_want(struct budget *b, uint64_t bytes);
/* The largest that was refused, or wanted, since the last call. */
uint64_t budget_wanted(struct budget *b);

struct budget_part {
	const char *name;
	uint64_t held, floor, peak;
	unsigned users;
};
/* The parts by name, as many as fit. Returns their number. */
unsigned budget_parts(struct budget *b, struct budget_part *part, unsigned max);
