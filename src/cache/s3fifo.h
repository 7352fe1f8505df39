/* SPDX-License-Identifier: MIT */
/*
 * S3-FIFO: J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP '23.
 *
 * A small queue of a tenth of the cache filters what is seen once; what is seen again while it is there, or while its ghost is, goes to the
 * main queue, which gives second chances by a counter of two bits. A hit moves nothing.
 *
 * How it differs from the paper's algorithm 1
 *  - Ghosts are a queue in the index, as many as the main queue's nominal size, where the paper suggests fingerprints in a table.
 *  - At most S3_STEPS entries are given another chance for one eviction, so that it is bounded in time; then the oldest goes.
 *  - Residents can be removed, any can be evicted, and the capacity can change.
 */
#pragma once

#include "cache/policy.h"

enum { S3_SMALL, S3_MAIN, S3_GHOST };

#define S3_STEPS 1024u
