/* SPDX-License-Identifier: MIT */
/* Memory that the reactors' read caches lend each other. See balance.h. */
#include "daemon/balance.h"

#include "util/bytes.h"

static uint64_t total(const struct balance *b)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < b->n; i++)
		sum += b->part[i].own;
	return sum;
}

/* Rounded down, so that all together are no more than there is. */
static uint64_t by_weight(uint64_t all, uint32_t weight)
{
	return (uint64_t)((unsigned __int128)all * weight / BALANCE_ONE);
}

uint64_t balance_target(const struct balance *b, unsigned part)
{
	const struct balance_part *p = &b->part[part];

	return b->lent ? by_weight(total(b), p->weight) : p->own;
}

/* Each by its part, rounded down. */
static void start_anew(struct balance *b)
{
	uint64_t all = total(b);

	for (unsigned i = 0; i < b->n; i++)
		b->part[i].weight = all ? (uint32_t)((unsigned __int128)b->part[i].own * BALANCE_ONE / all) : 0;
	b->lent = false;
}

static void count(struct balance *b)
{
	for (unsigned i = 0; i < b->n; i++) {
		struct balance_part *p = &b->part[i];

		/* What a volume has missed is gone with it. */
		p->missed = b->begun && p->misses > p->misses_before ? p->misses - p->misses_before : 0;
		p->ghosts = b->begun && p->ghost_hits > p->ghost_hits_before ? p->ghost_hits - p->ghost_hits_before : 0;
		p->misses_before = p->misses;
		p->ghost_hits_before = p->ghost_hits;
		p->hold -= p->hold > 0;
	}
	b->begun = true;
}

/* What weights cannot say. */
static uint64_t grain(const struct balance *b)
{
	return total(b) / BALANCE_ONE + 1;
}

/* What the part must keep, and may have. */
static uint64_t floor_of(const struct balance *b, const struct balance_part *p)
{
	return min(max(p->own / 4, p->least) + grain(b), p->own);
}

static uint64_t ceiling_of(const struct balance_part *p)
{
	return max(p->most, p->own);
}

/* Who misses, and is owed some of its own part: the one that lacks most of it. */
static int who_is_owed(const struct balance *b)
{
	uint64_t most = 0;
	int found = -1;

	for (unsigned i = 0; i < b->n; i++) {
		const struct balance_part *p = &b->part[i];
		uint64_t has = balance_target(b, i);

		if (p->missed < BALANCE_MISSES || has >= p->own || p->own - has <= most)
			continue;
		most = p->own - has;
		found = (int)i;
	}
	return most > grain(b) ? found : -1;
}

/* Who has most of what is not its own. */
static int who_owes(const struct balance *b)
{
	uint64_t most = 0;
	int found = -1;

	for (unsigned i = 0; i < b->n; i++) {
		uint64_t has = balance_target(b, i);

		if (has <= b->part[i].own || has - b->part[i].own <= most)
			continue;
		most = has - b->part[i].own;
		found = (int)i;
	}
	return found;
}

/* For whom more memory would do most: the one with the most ghost hits, or where there are none (a loop that is too long leaves no ghosts), misses. */
static int who_could_use(const struct balance *b, uint64_t step)
{
	int found = -1;

	for (unsigned i = 0; i < b->n; i++) {
		const struct balance_part *p = &b->part[i], *q = found < 0 ? NULL : &b->part[found];

		if (p->missed < BALANCE_MISSES || balance_target(b, i) + step > ceiling_of(p))
			continue;
		if (!q || p->ghosts > q->ghosts || (p->ghosts == q->ghosts && p->missed > q->missed))
			found = (int)i;
	}
	return found;
}

/* Who can do with less: who has most that it need not keep, *ret. */
static int who_lends(const struct balance *b, uint64_t *ret)
{
	uint64_t most = 0;
	int found = -1;

	for (unsigned i = 0; i < b->n; i++) {
		const struct balance_part *p = &b->part[i];
		uint64_t has = balance_target(b, i), keep = floor_of(b, p);

		if (p->missed >= BALANCE_FEW || p->hold || has + 2 * grain(b) < keep + BALANCE_STEP_LEAST || has <= keep || has - keep <= most)
			continue;
		most = has - keep;
		found = (int)i;
	}
	*ret = most;
	return found;
}

static bool move(struct balance *b, int from, int to, uint64_t bytes)
{
	uint64_t weight = (uint64_t)((unsigned __int128)bytes * BALANCE_ONE / total(b));

	weight = min(weight, (uint64_t)b->part[from].weight);
	if (!weight)
		return false;
	b->part[from].weight -= (uint32_t)weight;
	b->part[to].weight += (uint32_t)weight;
	b->lent = true;
	b->moves++;
	return true;
}

void balance_told(struct balance *b)
{
	for (unsigned i = 0; i < b->n && b->lent; i++) {
		const struct balance_part *p = &b->part[i];
		uint64_t has = balance_target(b, i), keep = max(p->own / 4, p->least), near = p->own > grain(b) ? p->own - grain(b) : 0;

		if (has < min(keep, near) || has > ceiling_of(p))
			start_anew(b);
	}
}

/* No more than one has too much, and the other too little. */
static uint64_t what_is_due(const struct balance *b, int from, int to, uint64_t step)
{
	uint64_t too_much = balance_target(b, (unsigned)from) - b->part[from].own, too_little = b->part[to].own - balance_target(b, (unsigned)to);
	uint64_t due = min(too_much, too_little);

	return min(due, step);
}

bool balance_step(struct balance *b)
{
	uint64_t all = total(b), step = max(all / 16, BALANCE_STEP_LEAST), spare;
	int from, to;

	count(b);
	if (b->n < 2 || !all)
		return false;
	if (!b->lent)
		start_anew(b);
	to = who_is_owed(b);
	if (to >= 0) {
		from = who_owes(b);
		b->part[to].hold = BALANCE_HOLD;
		if (from >= 0 && move(b, from, to, what_is_due(b, from, to, step)))
			return true;
	}
	to = who_could_use(b, step);
	from = who_lends(b, &spare);
	return from >= 0 && to >= 0 && from != to && move(b, from, to, min(step, spare));
}
