/* SPDX-License-Identifier: MIT */
/*
 * The checker: is this content a possible outcome of that history?
 *
 * The requests' edges cut the volume into atoms; in a possible outcome all of an atom's bytes come from one request (or the base).
 * Each atom is looked at once and explained: by the write whose words it holds, by any zeroes over it if it is zero, by the base.
 *
 * Prefix (MODEL_PREFIX, MODEL_ALL)
 *  (1) The smallest set that could be in is the requests that must be in and those that alone explain an atom, closed downwards
 *      under "before". A larger set only adds constraints, but for the requests that are needed to explain zeroes.
 *  (2) The order is built from its end. A request can be the last of those that remain if none of them is after it and every atom
 *      of it that no later one has covered shows it. Taking one never spoils another's chance, so any choice will do, and the
 *      set is possible if and only if all can be taken and what is uncovered then shows the base.
 *  (3) Where zeroes have several explanations, requests that may explain them are added one after the other, within a bound.
 *
 * Disk (MODEL_DISK, MODEL_EPOCH, reads): each atom by itself shows something that is not before anything that must be in.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_impl.h"
#include "util/bytes.h"

#define SEARCH_NODES 300

uint64_t model_undecided;

struct atom {
	uint64_t lo, hi;
	const uint8_t *p;	/* the content at lo */
	int from;		/* the op whose words it holds, -1 */
	bool base, zero;	/* what else explains it */
	bool small;		/* holds no whole word: compare with each */
	bool covered;		/* while ordering: by an op that was taken */
};

struct cop {
	const struct model_op *op;
	uint64_t completed;	/* as known at the time of the check */
	int lo, hi;		/* its atoms */
	bool must, shown;	/* has to be in; alone explains an atom */
	bool in, taken;
	int blockers;		/* atoms of it that are not covered yet and show something else */
};

struct view {
	const struct model *m;
	struct cop *ops;
	int nops;
	struct atom *atoms;
	int natoms;
	const char *what;
	char *why;
	size_t why_size;
	int nodes;
};

static const char *kind_name[] = { "write", "zero", "discard", "flush" };

__attribute__((format(printf, 3, 4)))
static const char *fault(struct view *v, const char *what, const char *fmt, ...)
{
	va_list ap;
	size_t n;

	n = snprintf(v->why, v->why_size, "%s: ", what);
	va_start(ap, fmt);
	if (n < v->why_size)
		vsnprintf(v->why + n, v->why_size - n, fmt, ap);
	va_end(ap);
	return v->what = what;
}

static const char *describe(const struct view *v, int i, char buf[static 96])
{
	const struct cop *c;

	if (i < 0)
		return "the base";
	c = &v->ops[i];
	snprintf(buf, 96, "%s #%u [%llu,+%llu)%s%s", kind_name[c->op->kind], c->op->id, (unsigned long long)c->op->off,
		 (unsigned long long)c->op->len, c->op->fua ? " fua" : "",
		 c->completed == MODEL_NEVER ? c->op->error ? " failed" : " in flight" : "");
	return buf;
}

static bool matches(const struct view *v, int op, const struct atom *a)
{
	const struct model_op *o = v->ops[op].op;
	uint64_t at;

	if (o->kind != MODEL_WRITE)
		return a->zero;
	return a->small ? model_is_from(o->id, v->m->vol, a->lo, a->p, a->hi - a->lo, &at) : a->from == op;
}

static bool covers(const struct view *v, int op, int atom)
{
	return v->ops[op].lo <= atom && atom < v->ops[op].hi;
}

static int cmp_u64(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

/* Bytes that no single request explains: two requests mixed, or nobody's. */
static const char *explain_mixture(struct view *v, int atom, const int *index)
{
	const struct atom *a = &v->atoms[atom];
	int first = -2;
	bool zeroed = false;
	char b1[96], b2[96];

	for (int i = 0; i < v->nops; i++)
		zeroed |= covers(v, i, atom) && v->ops[i].op->kind != MODEL_WRITE;
	for (uint64_t w = align_up(a->lo, 8); w + 8 <= a->hi; w += 8) {
		uint64_t val = get_le64(a->p + (w - a->lo));
		uint32_t id = model_word_id(val, v->m->vol, w >> 3);
		int op = -2;

		if (id >= v->m->first_id && id - v->m->first_id < v->m->nops)
			op = index[id - v->m->first_id] < 0 ? -3 : index[id - v->m->first_id];
		else if (!memcmp(v->m->base + w, a->p + (w - a->lo), 8))
			op = -1;
		else if (val || !zeroed)
			op = -3;
		if (op == -3 || (op >= 0 && !covers(v, op, atom)))
			return fault(v, "garbage", "at %llu: %016llx, which nobody had written there", (unsigned long long)w,
				     (unsigned long long)val);
		if (w == align_up(a->lo, 8))
			first = op;
		if (op != first)
			return fault(v, "torn", "[%llu,%llu) begins with %s and has %s at %llu", (unsigned long long)a->lo,
				     (unsigned long long)a->hi, first == -2 ? "zeroes" : describe(v, first, b1),
				     op == -2 ? "zeroes" : describe(v, op, b2), (unsigned long long)w);
	}
	/* Whole words agree: the bytes at the ends do not. */
	return fault(v, "torn", "the ends of [%llu,%llu) are not from %s", (unsigned long long)a->lo,
		     (unsigned long long)a->hi, first == -2 ? "zeroes" : describe(v, first, b1));
}

static const char *identify(struct view *v, int atom, const int *index)
{
	struct atom *a = &v->atoms[atom];
	uint64_t w = align_up(a->lo, 8), len = a->hi - a->lo, at;

	a->from = -1;
	a->small = w + 8 > a->hi;
	a->zero = bytes_are_zero(a->p, len);
	a->base = !memcmp(a->p, v->m->base + a->lo, len);
	if (!a->small && !a->zero && !a->base) {
		uint32_t id = model_word_id(get_le64(a->p + (w - a->lo)), v->m->vol, w >> 3);
		int op = id >= v->m->first_id && id - v->m->first_id < v->m->nops ? index[id - v->m->first_id] : -1;

		if (op < 0 || !covers(v, op, atom) || !model_is_from(id, v->m->vol, a->lo, a->p, len, &at))
			return explain_mixture(v, atom, index);
		a->from = op;
		return NULL;
	}
	if (a->base)
		return NULL;
	for (int i = 0; i < v->nops; i++)
		if (covers(v, i, atom) && matches(v, i, a))
			return NULL;
	return fault(v, "garbage", "[%llu,%llu) is %s, and no request explains it", (unsigned long long)a->lo,
		     (unsigned long long)a->hi, a->zero ? "zero" : "nobody's");
}

static int find_atom(const struct view *v, uint64_t off)
{
	int lo = 0, hi = v->natoms;

	while (lo < hi) {
		int mid = (lo + hi) / 2;

		if (v->atoms[mid].lo < off)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* The edges of all requests within [off, off+len), cut further at multiples of `grain` if that is not 0. */
static void cut_into_atoms(struct view *v, uint64_t off, uint64_t len, uint64_t grain, const uint8_t *content)
{
	uint64_t end = off + len;
	uint64_t *edge = malloc((2 * v->nops + 2 + (grain ? len / grain + 2 : 0)) * sizeof(*edge));
	int n = 0;

	if (!edge)
		abort();
	edge[n++] = off;
	edge[n++] = end;
	for (int i = 0; i < v->nops; i++) {
		const struct model_op *o = v->ops[i].op;

		edge[n++] = max(off, min(end, o->off));
		edge[n++] = max(off, min(end, o->off + o->len));
	}
	for (uint64_t g = grain ? align_up(off, grain) : end; g < end; g += grain)
		edge[n++] = g;
	qsort(edge, n, sizeof(*edge), cmp_u64);
	v->atoms = calloc(n, sizeof(*v->atoms));
	if (!v->atoms)
		abort();
	for (int i = 0; i + 1 < n; i++)
		if (edge[i] < edge[i + 1])
			v->atoms[v->natoms++] = (struct atom){ .lo = edge[i], .hi = edge[i + 1],
							       .p = content + (edge[i] - off) };
	free(edge);
	for (int i = 0; i < v->nops; i++) {
		const struct model_op *o = v->ops[i].op;

		v->ops[i].lo = find_atom(v, max(off, o->off));
		v->ops[i].hi = find_atom(v, min(end, o->off + o->len));
	}
}

static const char *view_build(struct view *v, const struct model *m, uint64_t at, uint64_t off, uint64_t len, uint64_t grain,
			      const uint8_t *content)
{
	int *index = malloc((m->nops + 1) * sizeof(*index));
	const char *what = NULL;

	v->m = m;
	v->ops = calloc(m->nops + 1, sizeof(*v->ops));
	if (!v->ops || !index)
		abort();
	for (unsigned i = 0; i < m->nops; i++) {
		const struct model_op *o = &m->ops[i];

		index[i] = -1;
		if (o->issued > at || o->kind == MODEL_FLUSH || o->off >= off + len || o->off + o->len <= off)
			continue;
		index[i] = v->nops;
		v->ops[v->nops++] = (struct cop){ .op = o, .completed = o->completed <= at ? o->completed : MODEL_NEVER };
	}
	cut_into_atoms(v, off, len, grain, content);
	for (int a = 0; a < v->natoms && !what; a++)
		what = identify(v, a, index);
	free(index);
	return what;
}

static void view_free(struct view *v)
{
	free(v->ops);
	free(v->atoms);
}

/* --- Prefix --- */

/* (2): takes from the end what can be last, until nothing can. True if that explains all. */
static bool order(struct view *v)
{
	int last = v->nops - 1;
	bool progress = true;

	for (int a = 0; a < v->natoms; a++)
		v->atoms[a].covered = false;
	for (int i = 0; i < v->nops; i++) {
		struct cop *c = &v->ops[i];

		c->taken = !c->in;
		c->blockers = 0;
		for (int a = c->lo; c->in && a < c->hi; a++)
			c->blockers += !matches(v, i, &v->atoms[a]);
	}
	while (progress) {
		progress = false;
		for (int i = last; i >= 0; i--) {
			struct cop *c = &v->ops[i];

			while (last >= 0 && v->ops[last].taken)
				last--;
			if (c->taken || c->blockers || v->ops[last].op->issued > c->completed)
				continue;
			c->taken = progress = true;
			for (int a = c->lo; a < c->hi; a++) {
				if (v->atoms[a].covered)
					continue;
				v->atoms[a].covered = true;
				for (int j = 0; j < v->nops; j++)
					if (!v->ops[j].taken && covers(v, j, a) && !matches(v, j, &v->atoms[a]))
						v->ops[j].blockers--;
			}
		}
	}
	for (int i = 0; i < v->nops; i++)
		if (!v->ops[i].taken)
			return false;
	for (int a = 0; a < v->natoms; a++)
		if (!v->atoms[a].covered && !v->atoms[a].base)
			return false;
	return true;
}

/* Everything before something that is in is in. */
static void close_downwards(struct view *v)
{
	uint64_t newest = 0;

	for (int i = 0; i < v->nops; i++)
		if (v->ops[i].in)
			newest = max(newest, v->ops[i].op->issued);
	for (int i = 0; i < v->nops; i++)
		if (v->ops[i].completed < newest)
			v->ops[i].in = true;
}

static bool may_help(const struct view *v, int op)
{
	const struct cop *c = &v->ops[op];

	for (int a = c->lo; !c->in && a < c->hi; a++)
		if (!v->atoms[a].covered && matches(v, op, &v->atoms[a]))
			return true;
	return false;
}

/* (3). Leaves v->ops[].in as it was if it fails. */
static bool search(struct view *v, int depth)
{
	bool *saved, *helps, found = false;

	if (order(v))
		return true;
	if (depth == 0)
		return false;
	saved = malloc(v->nops);
	helps = malloc(v->nops);
	if (!saved || !helps)
		abort();
	for (int i = 0; i < v->nops; i++) {
		saved[i] = v->ops[i].in;
		helps[i] = may_help(v, i);
	}
	for (int i = 0; i < v->nops && !found && v->nodes < SEARCH_NODES; i++) {
		if (!helps[i])
			continue;
		v->nodes++;
		v->ops[i].in = true;
		close_downwards(v);
		found = search(v, depth - 1);
		for (int j = 0; !found && j < v->nops; j++)
			v->ops[j].in = saved[j];
	}
	free(saved);
	free(helps);
	return found;
}

/* Says what keeps the requests that could not be taken from being the last. */
static const char *explain_order(struct view *v)
{
	static const char *const rank[] = { "order", "hole", "torn", "lost" };
	int worst = -1, worst_op = 0, worst_atom = 0;
	char b1[96], b2[96];

	order(v);
	for (int i = 0; i < v->nops; i++) {
		const struct cop *c = &v->ops[i];

		for (int a = c->lo; !c->taken && a < c->hi; a++) {
			const struct atom *t = &v->atoms[a];
			int r = c->must ? 3 : c->shown ? 2 : 1;

			if (t->covered || matches(v, i, t))
				continue;
			if (t->from >= 0 ? v->ops[t->from].completed >= c->op->issued : !t->base)
				r = 0;
			if (r > worst) {
				worst = r;
				worst_op = i;
				worst_atom = a;
			}
		}
	}
	if (worst < 0)
		return fault(v, "order", "zeroes that no possible order explains");
	return fault(v, rank[worst], "%s is not at [%llu,%llu), which shows %s", describe(v, worst_op, b1),
		     (unsigned long long)v->atoms[worst_atom].lo, (unsigned long long)v->atoms[worst_atom].hi,
		     v->atoms[worst_atom].from < 0 && !v->atoms[worst_atom].base ? "zeroes" :
		     describe(v, v->atoms[worst_atom].from, b2));
}

static const char *check_prefix(struct view *v)
{
	for (int i = 0; i < v->nops; i++)
		v->ops[i].in = v->ops[i].must;
	for (int a = 0; a < v->natoms; a++) {
		int n = 0, only = 0;

		for (int i = 0; i < v->nops && !v->atoms[a].base && n < 2; i++)
			if (covers(v, i, a) && matches(v, i, &v->atoms[a])) {
				only = i;
				n++;
			}
		if (n == 1)
			v->ops[only].in = v->ops[only].shown = true;
	}
	close_downwards(v);
	if (search(v, 6))
		return NULL;
	if (v->nodes >= SEARCH_NODES) {
		model_undecided++;
		return NULL;
	}
	return explain_order(v);
}

/* What has to be in: covered by a flush or FUA, or older than the guest's first flush. */
static void mark_must(struct view *v, uint64_t at, bool all)
{
	uint64_t covered = 0, first_flush = v->m->flushed ? 0 : MODEL_NEVER;

	for (unsigned i = 0; i < v->m->nops; i++) {
		const struct model_op *o = &v->m->ops[i];

		if (o->kind != MODEL_FLUSH || o->issued > at)
			continue;
		first_flush = min(first_flush, o->issued);
		if (o->completed <= at)
			covered = max(covered, o->issued);
	}
	for (int i = 0; i < v->nops; i++) {
		struct cop *c = &v->ops[i];

		if (c->completed != MODEL_NEVER)
			c->must = all || c->op->fua || c->completed < covered || c->completed < first_flush;
	}
}

/* --- Disk --- */

/* Each atom shows something that is not before any request with `must`, and that was issued by `limit`. */
static const char *check_atoms(struct view *v, uint64_t limit)
{
	char b1[96], b2[96];

	for (int a = 0; a < v->natoms; a++) {
		const struct atom *t = &v->atoms[a];
		int newer = -1, future = -1;
		bool ok = false;

		/* The base is before every request. */
		for (int i = 0; i < v->nops; i++)
			if (v->ops[i].must && covers(v, i, a))
				newer = i;
		if (t->base && newer < 0)
			continue;
		for (int i = 0; i < v->nops && !ok; i++) {
			if (!covers(v, i, a) || !matches(v, i, t))
				continue;
			if (v->ops[i].op->issued > limit) {
				future = i;
				continue;
			}
			ok = true;
			for (int j = 0; j < v->nops && ok; j++)
				if (v->ops[j].must && covers(v, j, a) && v->ops[i].completed < v->ops[j].op->issued) {
					ok = false;
					newer = j;
				}
		}
		if (ok)
			continue;
		if (future >= 0)
			return fault(v, "future", "[%llu,%llu) shows %s", (unsigned long long)t->lo,
				     (unsigned long long)t->hi, describe(v, future, b1));
		return fault(v, "lost", "%s is not at [%llu,%llu), which shows %s", describe(v, newer, b1),
			     (unsigned long long)t->lo, (unsigned long long)t->hi,
			     t->from < 0 && !t->base ? "zeroes" : describe(v, t->from, b2));
	}
	return NULL;
}

static const char *check_disk(struct view *v, uint64_t at, bool all)
{
	uint64_t covered = all ? MODEL_NEVER : 0;

	for (unsigned i = 0; i < v->m->nops; i++)
		if (v->m->ops[i].kind == MODEL_FLUSH && v->m->ops[i].completed <= at)
			covered = max(covered, v->m->ops[i].issued);
	for (int i = 0; i < v->nops; i++) {
		struct cop *c = &v->ops[i];

		c->must = c->completed != MODEL_NEVER && (c->op->fua || c->completed < covered) &&
			  !(v->m->weak_discard && c->op->kind == MODEL_DISCARD);
	}
	return check_atoms(v, MODEL_NEVER);
}

static const char *check_epoch(struct view *v, uint64_t at)
{
	const struct model *m = v->m;
	const char *what = NULL;

	/* From the newest flush back, so that what is said of the last try is about the empty image. */
	for (int f = m->nops - 1; f >= -1; f--) {
		const struct model_op *o = f < 0 ? NULL : &m->ops[f];
		uint64_t covered = o ? o->issued : 0, done = o ? o->completed : 0, limit = MODEL_NEVER;

		if (o && (o->kind != MODEL_FLUSH || o->completed > at))
			continue;
		for (unsigned i = 0; i < m->nops; i++)
			if (m->ops[i].kind == MODEL_FLUSH && m->ops[i].issued > done && m->ops[i].completed <= at)
				limit = min(limit, m->ops[i].completed);
		for (int i = 0; i < v->nops; i++)
			v->ops[i].must = v->ops[i].completed < covered;
		what = check_atoms(v, limit);
		if (!what)
			return NULL;
	}
	return what;
}

const char *model_check(const struct model *m, uint64_t at, enum model_promise promise, const uint8_t *content,
			char *why, size_t why_size)
{
	struct view v = { .why = why, .why_size = why_size };
	bool disk = promise == MODEL_DISK || promise == MODEL_VISIBLE || promise == MODEL_EPOCH;
	const char *what = view_build(&v, m, at, 0, m->size, disk ? 512 : 0, content);

	if (!what && disk)
		what = promise == MODEL_EPOCH ? check_epoch(&v, at) : check_disk(&v, at, promise == MODEL_VISIBLE);
	if (!what && !disk) {
		if (promise != MODEL_ANY_PREFIX)
			mark_must(&v, at, promise == MODEL_ALL);
		what = check_prefix(&v);
	}
	view_free(&v);
	return what;
}

const char *model_check_read(const struct model *m, uint64_t issued, uint64_t returned, uint64_t off, uint64_t len,
			     const uint8_t *content, char *why, size_t why_size)
{
	struct view v = { .why = why, .why_size = why_size };
	const char *what = view_build(&v, m, returned, off, len, 512, content);

	for (int i = 0; i < v.nops; i++)
		v.ops[i].must = v.ops[i].completed < issued &&
				!(m->weak_discard && v.ops[i].op->kind == MODEL_DISCARD);
	if (!what)
		what = check_atoms(&v, MODEL_NEVER);
	view_free(&v);
	return what;
}
