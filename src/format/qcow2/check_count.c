/* SPDX-License-Identifier: MIT */
/* qcow2 tools: how often each cluster is referred to. */
#include <errno.h>
#include <stdlib.h>

#include "format/qcow2/tools.h"

int qcow2_count_init(struct qcow2_count *c, uint64_t first, uint64_t n)
{
	*c = (struct qcow2_count){ .first = first, .n = n, .v = calloc(max(n, 1ull), sizeof(*c->v)), .chunks = n / QCOW2_COUNT_CHUNK + 1 };
	c->touched = calloc(c->chunks / 8 + 1, 1);
	return c->v && c->touched ? 0 : -ENOMEM;
}

void qcow2_count_fini(struct qcow2_count *c)
{
	free(c->v);
	free(c->touched);
	*c = (struct qcow2_count){ 0 };
}

/* Tables of fixed places come first in a walk, so that an L2 table or data on top of one is seen; an L2 table may be shared by trees. */
static bool may_add(unsigned v, enum qcow2_ref_kind kind)
{
	if (!v)
		return true;
	if (kind < QCOW2_REF_L2)
		return false;
	if (kind == QCOW2_REF_L2)
		return (v & QCOW2_COUNT_L2) && !(v & QCOW2_COUNT_FIXED);
	return !(v & (QCOW2_COUNT_FIXED | QCOW2_COUNT_L2));
}

static void span(const struct qcow2_count *c, const struct qcow2_geo *g, const struct qcow2_ref *r, uint64_t *from, uint64_t *to)
{
	*from = max(r->off >> g->cluster_bits, c->first);
	*to = min((r->off + r->len - 1) >> g->cluster_bits, c->first + c->n - 1);
}

bool qcow2_count_conflicts(const struct qcow2_count *c, const struct qcow2_geo *g, const struct qcow2_ref *r, uint64_t *ret_where)
{
	uint64_t i, to;

	for (span(c, g, r, &i, &to); i <= to; i++) {
		if (!may_add(c->v[i - c->first], r->kind)) {
			*ret_where = i << g->cluster_bits;
			return true;
		}
	}
	return false;
}

bool qcow2_count_is_empty(const struct qcow2_count *c, uint64_t cluster, uint64_t n)
{
	uint64_t from = max(cluster, c->first) - c->first, to = min(cluster + n, c->first + c->n);

	for (uint64_t i = from / QCOW2_COUNT_CHUNK; c->first + i * QCOW2_COUNT_CHUNK < to; i++)
		if (i >= c->chunks || (c->touched[i / 8] & 1 << i % 8))
			return false;
	return true;
}

void qcow2_count_add(struct qcow2_count *c, const struct qcow2_geo *g, const struct qcow2_ref *r, unsigned weight)
{
	unsigned flag = r->kind < QCOW2_REF_L2 ? QCOW2_COUNT_FIXED : r->kind == QCOW2_REF_L2 ? QCOW2_COUNT_L2 : 0;
	uint64_t i, to;

	for (span(c, g, r, &i, &to); i <= to && weight; i++) {
		uint16_t *v = &c->v[i - c->first];
		uint64_t chunk = (i - c->first) / QCOW2_COUNT_CHUNK;
		unsigned n = min((*v & QCOW2_COUNT_MAX) + weight, QCOW2_COUNT_MAX);

		if (chunk < c->chunks)
			c->touched[chunk / 8] |= 1 << chunk % 8;
		*v = (uint16_t)((*v & ~QCOW2_COUNT_MAX) | flag | n);
	}
}
