/* SPDX-License-Identifier: MIT */
/*
 * ARC: N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03.
 *
 * T1 holds what was seen once lately, T2 what was seen again; B1 and B2 hold the keys that left them. A hit in B1 says that T1 should be larger,
 * one in B2 that T2 should; `target` is the size of T1 (the paper's p) that follows from that. A scan passes through T1 and leaves T2 alone.
 *
 * How it differs from the paper's figure 4
 *  - The three steps of a miss (adapt; REPLACE; insert and trim the ghosts) are functions of their own, since a read lies between the first
 *    and the last. Called one after the other they decide as the figure does: trimming behind the insertion instead of before leaves the same
 *    lists, also in case IV.A with |T1| = c, whose victim passes through B1 and is trimmed at once.
 *  - Residents can be removed (a discard) and the capacity can change. REPLACE happens only when the cache is full, not whenever |L1| + |L2|
 *    reaches c; without removals that is the same moment. It takes T1 whenever T2 is empty, and T2 whenever T1 is.
 *  - p is a fixed-point number of POLICY_TARGET_BITS fractional bits, where the figure has a quotient of integers.
 *  - Any resident can be evicted, not only the one that REPLACE names: a limit of a volume chooses its own. It becomes a ghost of the list it was on.
 */
#pragma once

#include "cache/policy.h"

enum { ARC_T1, ARC_T2, ARC_B1, ARC_B2 };
