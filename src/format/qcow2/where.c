/* SPDX-License-Identifier: MIT */
/* qcow2: where the bytes of an open disk lie, through its chain of backing files. */
#include "format/qcow2/where.h"

#include <errno.h>

#include "format/qcow2/internal.h"

static bool is_qcow2(const struct disk *d)
{
	return !strcmp(d->ops->driver, "qcow2");
}

static void describe(struct qcow2 *q, struct qcow2_l2e e, enum qcow2_kind kind, uint64_t in_cluster, struct qcow2_where *w)
{
	uint64_t host = qcow2_l2_host(e.entry);
	bool compressed = kind == QCOW2_COMPRESSED_DATA;

	*w = (struct qcow2_where){ .present = kind != QCOW2_UNALLOCATED, .zero = kind == QCOW2_ZERO_PLAIN || kind == QCOW2_ZERO_ALLOCATED,
				   .data = compressed || kind == QCOW2_NORMAL, .compressed = compressed };
	if (compressed || (!host && !(q->has_data_file && (e.entry & QCOW2_COPIED))))
		return;
	w->has_offset = true;
	w->offset = host + in_cluster;
	w->file = q->data;
}

static bool goes_on(const struct qcow2_where *a, const struct qcow2_where *b)
{
	return a->present == b->present && a->zero == b->zero && a->data == b->data && a->compressed == b->compressed && a->has_offset == b->has_offset &&
	       (!a->has_offset || a->offset + a->len == b->offset);
}

/* What this image alone says. */
static co_fn int co_where_here(struct qcow2 *q, uint64_t off, uint64_t len, struct qcow2_where *w)
{
	uint32_t cs = q->g.cluster_size, n;
	uint8_t *at;
	int rc = co_q2_l2(q, off, &at, &n);

	*w = (struct qcow2_where){ 0 };
	if (rc)
		return rc;
	if (!at) {
		w->len = min(len, ((uint64_t)n << q->g.cluster_bits) - (off & (cs - 1)));
		return 0;
	}
	for (uint32_t i = 0; i < n && w->len < len;) {
		uint64_t pos = (off + w->len) & (cs - 1);
		struct qcow2_l2e e = qcow2_l2_get(&q->g, at, i);
		enum qcow2_kind kind = q2_kind(q, e, (unsigned)(pos >> q->g.sub_bits));
		struct qcow2_where next;

		if (kind == QCOW2_INVALID)
			return w->len ? 0 : -EIO;
		describe(q, e, kind, pos, &next);
		if (w->len && !goes_on(w, &next))
			break;
		next.len = q->g.sub_size - (pos & (q->g.sub_size - 1));
		if (!w->len)
			*w = (struct qcow2_where){ .present = next.present, .zero = next.zero, .data = next.data, .compressed = next.compressed,
						   .has_offset = next.has_offset, .offset = next.offset, .file = next.file };
		w->len += next.len;
		i += pos + next.len == cs;
	}
	w->len = min(w->len, len);
	return 0;
}

static co_fn int co_where_else(struct disk *d, uint64_t off, uint64_t len, struct qcow2_where *w)
{
	struct disk_extent e;
	int rc = co_disk_extent(d, off, len, &e);

	if (!rc)
		*w = (struct qcow2_where){ .len = e.len, .present = true, .zero = e.zero, .data = !e.zero, .has_offset = true, .offset = off, .file = d };
	return rc;
}

co_fn int co_qcow2_where(struct disk *d, uint64_t off, uint64_t len, struct qcow2_where *ret)
{
	for (unsigned depth = 0;; depth++) {
		struct qcow2 *q;
		int rc;

		if (!is_qcow2(d)) {
			rc = co_where_else(d, off, len, ret);
			ret->depth = depth;
			return rc;
		}
		q = q2_of(d);
		rc = co_where_here(q, off, len, ret);
		ret->depth = depth;
		if (rc || ret->present)
			return rc;
		if (q2_unallocated_is_zero(q, off)) {
			ret->zero = true;
			return 0;
		}
		len = min(ret->len, q->backing->size - off);
		d = q->backing;
	}
}
