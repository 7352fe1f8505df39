/* SPDX-License-Identifier: MIT */
/*
 * qcow2: filling a new image with compressed clusters. For `weir image convert -c`.
 */
#pragma once

#include "format/qcow2/create.h"

struct qcow2_packer;

/* Makes an image of `file` (co_qcow2_create()) and begins. `workers` is how many clusters are compressed at once. Data files and preallocation are refused. */
co_fn int co_qcow2_pack_begin(struct qcow2_packer **ret, struct disk *file, const struct qcow2_create *c, unsigned workers, struct err *err);
/* One cluster, or the last one as far as it goes. Each at most once, in any order, several at a time. Compression runs on worker threads. */
co_fn int co_qcow2_pack_write(void *packer, uint64_t off, const void *buf, uint64_t len);
/* Whole clusters (or the last one) that are zeroes over a backing file. */
co_fn int co_qcow2_pack_zero(void *packer, uint64_t off, uint64_t len);
/* Writes what is left, and puts it in force; all is flushed. Frees in any case. */
co_fn int co_qcow2_pack_end(struct qcow2_packer *p, bool ok, struct err *err);
