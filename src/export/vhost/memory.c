/* SPDX-License-Identifier: MIT */
/* The guest's memory: regions, tables of them, addresses, the log of dirty pages. */
#include "export/vhost/memory.h"

#include <errno.h>
#include <stdlib.h>

#include "util/bytes.h"
#include "util/err.h"

int vhost_region_map(const struct vhost_user_region *d, int fd, struct vhost_region **ret, struct err *err)
{
	size_t page = rt_shm_page(fd);
	uint64_t start = align_down(d->offset, page), skip = d->offset - start;
	struct vhost_region *r;
	int rc;

	if (!d->size || d->gpa > UINT64_MAX - d->size || d->uva > UINT64_MAX - d->size)
		return err_set(err, -EINVAL, "memory region at 0x%llx of %llu bytes wraps or is empty", (unsigned long long)d->gpa,
			       (unsigned long long)d->size);
	if (d->size > INT64_MAX / 2 || d->offset > INT64_MAX / 2)
		return err_set(err, -EINVAL, "memory region at 0x%llx is too large", (unsigned long long)d->gpa);
	r = calloc(1, sizeof(*r));
	if (!r)
		return err_set(err, -ENOMEM, "no memory for a memory region");
	rc = rt_shm_map(&r->shm, fd, start, align_up(skip + d->size, page), err);
	/* The last page of a file may be partial: then only what is there is mapped. */
	if (rc == -EINVAL && !is_aligned(skip + d->size, page)) {
		err_clear(err);
		rc = rt_shm_map(&r->shm, fd, start, skip + d->size, err);
	}
	if (rc < 0) {
		free(r);
		err_prefix(err, "memory region at 0x%llx", (unsigned long long)d->gpa);
		return rc;
	}
	r->gpa = d->gpa;
	r->size = d->size;
	r->uva = d->uva;
	r->host = r->shm.base + skip;
	r->refs = 1;
	*ret = r;
	return 0;
}

void vhost_region_put(struct vhost_region *r)
{
	if (!r || --r->refs)
		return;
	rt_shm_unmap(&r->shm);
	free(r);
}

static struct vhost_memory *alloc_table(unsigned n)
{
	struct vhost_memory *m = calloc(1, sizeof(*m) + n * sizeof(m->region[0]));

	if (m)
		m->refs = 1;
	return m;
}

int vhost_memory_add(const struct vhost_memory *old, struct vhost_region *r, struct vhost_memory **ret, struct err *err)
{
	unsigned n = old ? old->n : 0, at = 0;
	struct vhost_memory *m;

	if (n == VHOST_REGIONS_MAX)
		return err_set(err, -ENOSPC, "more than %u memory regions", VHOST_REGIONS_MAX);
	for (unsigned i = 0; i < n; i++) {
		const struct vhost_region *o = old->region[i];

		if (o->gpa < r->gpa + r->size && r->gpa < o->gpa + o->size)
			return err_set(err, -EEXIST, "memory region at 0x%llx overlaps with the one at 0x%llx",
				       (unsigned long long)r->gpa, (unsigned long long)o->gpa);
		at += o->gpa < r->gpa;
	}
	m = alloc_table(n + 1);
	if (!m)
		return err_set(err, -ENOMEM, "no memory for a memory table");
	for (unsigned i = 0; i < n + 1; i++) {
		m->region[i] = i < at ? old->region[i] : i == at ? r : old->region[i - 1];
		m->region[i]->refs++;
	}
	m->n = n + 1;
	*ret = m;
	return 0;
}

int vhost_memory_remove(const struct vhost_memory *old, const struct vhost_user_region *d, struct vhost_memory **ret, struct err *err)
{
	unsigned n = old ? old->n : 0, at = 0;
	struct vhost_memory *m;

	while (at < n && (old->region[at]->gpa != d->gpa || old->region[at]->uva != d->uva || old->region[at]->size != d->size))
		at++;
	if (at == n)
		return err_set(err, -ENOENT, "there is no memory region at 0x%llx of %llu bytes to remove", (unsigned long long)d->gpa,
			       (unsigned long long)d->size);
	m = alloc_table(n);
	if (!m)
		return err_set(err, -ENOMEM, "no memory for a memory table");
	for (unsigned i = 0; i < n; i++) {
		if (i == at)
			continue;
		m->region[m->n++] = old->region[i];
		old->region[i]->refs++;
	}
	*ret = m;
	return 0;
}

void vhost_memory_put(struct vhost_memory *m)
{
	if (!m || --m->refs)
		return;
	for (unsigned i = 0; i < m->n; i++)
		vhost_region_put(m->region[i]);
	free(m);
}

/* The last region that begins at or before `gpa`, or NULL. */
static struct vhost_region *find(struct vhost_memory *m, uint64_t gpa)
{
	unsigned lo = 0, hi = m->n;

	if (m->hint < m->n && gpa - m->region[m->hint]->gpa < m->region[m->hint]->size)
		return m->region[m->hint];
	while (lo < hi) {
		unsigned mid = (lo + hi) / 2;

		if (m->region[mid]->gpa <= gpa)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (!lo)
		return NULL;
	m->hint = lo - 1;
	return m->region[lo - 1];
}

void *vhost_memory_at(struct vhost_memory *m, uint64_t gpa, uint64_t *len)
{
	struct vhost_region *r = find(m, gpa);

	if (!r || gpa - r->gpa >= r->size)
		return NULL;
	*len = min(*len, r->size - (gpa - r->gpa));
	return r->host + (gpa - r->gpa);
}

void *vhost_memory_at_user(const struct vhost_memory *m, uint64_t uva, uint64_t len)
{
	for (unsigned i = 0; i < m->n; i++) {
		const struct vhost_region *r = m->region[i];

		if (uva >= r->uva && uva - r->uva < r->size && len <= r->size - (uva - r->uva))
			return r->host + (uva - r->uva);
	}
	return NULL;
}

uint64_t vhost_memory_guest(const struct vhost_memory *m, const void *p)
{
	for (unsigned i = 0; i < m->n; i++) {
		const struct vhost_region *r = m->region[i];

		if ((const char *)p >= r->host && (const char *)p < r->host + r->size)
			return r->gpa + (uint64_t)((const char *)p - r->host);
	}
	return UINT64_MAX;
}

bool vhost_memory_read(struct vhost_memory *m, uint64_t gpa, void *dst, size_t len)
{
	char *to = dst;

	while (len) {
		uint64_t part = len;
		const void *p = vhost_memory_at(m, gpa, &part);

		if (!p)
			return false;
		rt_shm_read(to, p, part);
		to += part;
		gpa += part;
		len -= part;
	}
	return true;
}

bool vhost_memory_lost(const struct vhost_memory *m)
{
	for (unsigned i = 0; m && i < m->n; i++)
		if (rt_shm_lost(&m->region[i]->shm))
			return true;
	return false;
}

/* --- Dirty pages --- */

int vhost_log_map(struct vhost_log *log, const struct vhost_user_log *d, int fd, struct err *err)
{
	size_t page = rt_shm_page(fd);
	uint64_t start = align_down(d->offset, page), skip = d->offset - start;
	struct vhost_log *l = log;
	int rc;

	if (!d->size || d->size > INT64_MAX / 2 || d->offset > INT64_MAX / 2)
		return err_set(err, -EINVAL, "a log of %llu bytes at %llu", (unsigned long long)d->size, (unsigned long long)d->offset);
	vhost_log_unmap(l);
	rc = rt_shm_map(&l->shm, fd, start, skip + d->size, err);
	if (rc < 0) {
		err_prefix(err, "log of dirty pages");
		return rc;
	}
	l->bits = (uint8_t *)l->shm.base + skip;
	l->size = d->size;
	return 0;
}

void vhost_log_unmap(struct vhost_log *log)
{
	rt_shm_unmap(&log->shm);
	log->bits = NULL;
	log->size = 0;
}

void vhost_log_mark(struct vhost_log *log, uint64_t gpa, uint64_t len)
{
	uint64_t page = gpa / VHOST_LOG_PAGE, last;

	if (!log->bits || !len || gpa > UINT64_MAX - len)
		return;
	last = (gpa + len - 1) / VHOST_LOG_PAGE;
	for (; page <= last && page / 8 < log->size; page++)
		shm_or8_release(log->bits + page / 8, (uint8_t)(1u << page % 8));
}
