/* SPDX-License-Identifier: MIT */
/*
 * Shared by model.c and check.c.
 */
#pragma once

#include "model.h"

/* The word that request `id` leaves as word number `word` of volume `vol`. */
uint64_t model_word(uint32_t id, unsigned vol, uint64_t word);
/* The request that left `value` there, 0 if none could have. */
uint32_t model_word_id(uint64_t value, unsigned vol, uint64_t word);
/* True if `value` can be a word of any request at any place. */
bool model_word_is_any(uint64_t value);
/* True if all bytes are what `id` leaves there; if not, the first word that is not. */
bool model_is_from(uint32_t id, unsigned vol, uint64_t off, const uint8_t *p, uint64_t len, uint64_t *ret_off);
