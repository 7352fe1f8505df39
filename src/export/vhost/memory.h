/* SPDX-License-Identifier: MIT */
/*
 * The guest's memory, as the front end has described it.
 *
 * A table never changes: an update makes a new one, and requests that began with the old one keep it, and its regions mapped, until they end.
 */
#pragma once

#include "export/vhost/proto.h"
#include "rt/shm.h"

struct err;

#define VHOST_REGIONS_MAX 256u

struct vhost_region {
	uint64_t gpa, size, uva;
	char *host;
	struct rt_shm shm;
	unsigned refs;
};

struct vhost_memory {
	unsigned refs, n, hint;
	struct vhost_region *region[]; /* by gpa, without overlaps */
};

/* Maps a region; `fd` stays the caller's. */
int vhost_region_map(const struct vhost_user_region *d, int fd, struct vhost_region **ret, struct err *err);
void vhost_region_put(struct vhost_region *r);	/* NULL is fine */

/* The table `old` (NULL: an empty one) with one region more, or less. The references to `old` and `r` stay the caller's. */
int vhost_memory_add(const struct vhost_memory *old, struct vhost_region *r, struct vhost_memory **ret, struct err *err);
int vhost_memory_remove(const struct vhost_memory *old, const struct vhost_user_region *d, struct vhost_memory **ret, struct err *err);
static inline struct vhost_memory *vhost_memory_get(struct vhost_memory *m)
{
	m->refs++;
	return m;
}
void vhost_memory_put(struct vhost_memory *m);	/* NULL is fine */

/* The memory at a guest address; *len is cut to what follows in the same region. NULL if there is none. */
void *vhost_memory_at(struct vhost_memory *m, uint64_t gpa, uint64_t *len);
/* The same by the front end's own address, for all of `len` or not at all. */
void *vhost_memory_at_user(const struct vhost_memory *m, uint64_t uva, uint64_t len);
/* The guest address of memory in the table; the caller knows that it is. */
uint64_t vhost_memory_guest(const struct vhost_memory *m, const void *p);
/* Copies from guest memory, each byte read once. False if the range is not all there. */
bool vhost_memory_read(struct vhost_memory *m, uint64_t gpa, void *dst, size_t len);
/* Whether somebody has cut a file that a region lies in. */
bool vhost_memory_lost(const struct vhost_memory *m);

/* Dirty pages, for live migration: a bit for each page of guest memory. */
struct vhost_log {
	struct rt_shm shm;
	uint8_t *bits;
	uint64_t size;		/* bytes of `bits` */
};
int vhost_log_map(struct vhost_log *log, const struct vhost_user_log *d, int fd, struct err *err);
void vhost_log_unmap(struct vhost_log *log);
/* Marks the pages of a range; what lies beyond the log is left out. */
void vhost_log_mark(struct vhost_log *log, uint64_t gpa, uint64_t len);
