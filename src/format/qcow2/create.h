/* SPDX-License-Identifier: MIT */
/*
 * qcow2: making a new image.
 */
#pragma once

#include "format/qcow2/format.h"
#include "rt/role.h"

struct disk;
struct opts;

enum qcow2_prealloc { QCOW2_PREALLOC_OFF, QCOW2_PREALLOC_METADATA, QCOW2_PREALLOC_FALLOC, QCOW2_PREALLOC_FULL };

/* What `qemu-img create -o` takes. */
struct qcow2_create {
	uint64_t size;		/* rounded up to 512 by qcow2_create_check() */
	uint64_t cluster_size, refcount_bits;
	unsigned version;
	bool ext_l2, lazy_refcounts, data_file_raw;
	enum qcow2_compression compression;
	enum qcow2_prealloc prealloc;
	const char *backing_file, *backing_format, *data_file; /* as the header is to name them; NULL: none */
	void (*progress)(void *arg, uint64_t done, uint64_t total); /* of QCOW2_PREALLOC_FULL; may be NULL */
	void *progress_arg;
	const bool *stop;	/* may be NULL; once true, -ECANCELED */
};

#define QCOW2_CREATE_OPTIONS "size,compat,cluster_size,refcount_bits,extended_l2,lazy_refcounts,compression_type,preallocation," \
	"backing_file,backing_fmt,data_file,data_file_raw"
/* Takes the options out of `o`, the defaults where there is none. The texts belong to `o`. `size` is left alone if not given. -EINVAL, or -ENOTSUP. */
int qcow2_create_options(struct qcow2_create *c, struct opts *o, const char *name, struct err *err);
/* Whether these go together. */
int qcow2_create_check(struct qcow2_create *c, const char *name, struct err *err);
/*
 * Makes an image of `file`, whose former contents are void; gives it its size where it can be given one. `data` is the data file, NULL if there is none.
 * All is flushed when it returns; the header is written last.
 */
co_fn int co_qcow2_create(struct disk *file, struct disk *data, const struct qcow2_create *c, struct err *err);
