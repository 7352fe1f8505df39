/* SPDX-License-Identifier: MIT */
/*
 * Shared by the files that hold variants.
 */
#pragma once

#include "crash.h"

/* Opens the closed log again: all that was acknowledged is there; drains, and the images alone hold it. Closes. */
co_fn void co_verify_closed(struct world *w);

void adjust_kill(struct scenario *sc, struct rng *r);
void run_error(const struct scenario *sc);
void run_dead(const struct scenario *sc);
void run_stall(const struct scenario *sc);
void adjust_stall(struct scenario *sc, struct rng *r);
void run_mirror(const struct scenario *sc);
void run_hang(const struct scenario *sc);
void run_rebuild(const struct scenario *sc);
void adjust_mirror(struct scenario *sc, struct rng *r);
void adjust_hang(struct scenario *sc, struct rng *r);
void adjust_rebuild(struct scenario *sc, struct rng *r);
void run_reformat(const struct scenario *sc);
void adjust_reformat(struct scenario *sc, struct rng *r);
void run_clean(const struct scenario *sc);
void adjust_clean(struct scenario *sc, struct rng *r);
void run_rot(const struct scenario *sc);
void adjust_rot(struct scenario *sc, struct rng *r);
