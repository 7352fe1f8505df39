/* SPDX-License-Identifier: MIT */
/*
 * Whether a qcow2 image is consistent, apart from the driver's own code paths: counts every reference that the active tables make, and holds
 * them against the refcounts. For small images without snapshots in memory.
 */
#pragma once

#include <stdint.h>

struct media;

struct qcow2_verdict {
	uint64_t leaks;		/* clusters whose refcount is higher than what refers to them */
	uint64_t used;
	char wrong[256];	/* "" if it is not corrupt */
};

/* What the image holds: `len` bytes from its start. For images that qcow2_verify() accepts, without compressed clusters; what is unallocated is zeroes. */
void qcow2_verify_read(const struct media *m, uint8_t *buf, uint64_t len);
void qcow2_verify(const struct media *m, struct qcow2_verdict *v);
/* With WEIR_KEEP_IMAGES=FOLDER in the environment: puts a copy there, "000000.qcow2" and so on, so that QEMU can have a look at it. */
void qcow2_keep(const struct media *m);
