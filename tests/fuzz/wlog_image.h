/* SPDX-License-Identifier: MIT */
/*
 * A log device as a short fuzz input: one byte of flags, the part of a superblock that small logs use, and what lies in the segments.
 */
#pragma once

#include "wlog/format.h"

#define WLOG_IMAGE_SEGMENT (64u << 10)
#define WLOG_IMAGE_SEGMENTS 12u
#define WLOG_IMAGE_SIZE (WL_FIRST_SEGMENT + (uint64_t)WLOG_IMAGE_SEGMENT * WLOG_IMAGE_SEGMENTS)
#define WLOG_IMAGE_SUPER (WL_SB_VOLUMES + 4 * WL_VOL_ENTRY)
#define WLOG_IMAGE_VOLUME (128u << 10)	/* bytes of a volume */

#define WLOG_IMAGE_FIX 1u		/* set the checksums right, so that what is behind them is reached */
