/* SPDX-License-Identifier: MIT */
/*
 * The memory of a serving process.
 *
 *	limit (--memory) ┬─ program		code, libraries, heap: measured
 *			 ├─ stacks		of coroutines, as they are used
 *			 ├─ write log		its buffers, in full; its index of what is dirty
 *			 ├─ requests, bounce	pools, in pieces of 2 MiB, as they are used
 *			 ├─ connections
 *			 ├─ headroom		what others may take at once
 *			 └─ read cache		index and data: what is left, up to --cache-size
 *
 * Whoever grows takes from the budget (rt/budget.h); who is refused waits, or does with what it has. When little is left the bell rings, and the keeper here makes
 * the read cache smaller, which is the one user that loses nothing but speed, and if that is not enough gives back buffers and stacks that are free.
 *
 * What nobody counts (the heap, tables of images, libraries such as librbd) is what the kernel says is resident beyond what was counted. It is looked at once
 * a second and counts as the program's. So the sum is never below the truth for longer than that. A guest's memory that a virtual machine shares is not ours, and
 * is not counted; neither is a disk of `mem:`, beside which nothing is measured.
 */
#include "daemon/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blk/spec.h"
#include "daemon/internal.h"
#include "daemon/peers.h"
#include "daemon/serve.h"
#include "daemon/split.h"
#include "rt/io.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/size.h"

#define MIB (1ull << 20)
#define SECOND_NS 1000000000ull
#define STEP_NS 5000000ull
#define WANTED_NS SECOND_NS	/* room for the largest request that was refused stays so long */
#define TRIM_NS 200000000ull	/* between two: what is given back will be wanted again */
#define PARTS 16u
#define PROGRAM_FLOOR (16 * MIB)
#define LARGEST_REQUEST (32 * MIB)	/* room for one at least, once the cache has given way */
#define REGROW (4 * MIB)		/* the cache grows back by no less */

void memory_defaults(struct serve_config *c, bool memory_given, bool cache_given)
{
	struct graph_config *g = &c->graph;

	if (!cache_given)
		g->cache_size = memory_given ? align_down(c->memory / 4, MIB) : MEMORY_CACHE;
	if (!g->log.memory)
		g->log.memory = memory_given ? min(max(align_down(c->memory / 4, MIB), 4 * MIB), MEMORY_CACHE) : MEMORY_CACHE;
	if (memory_given)
		return;
	c->memory = MEMORY_DEFAULT + MEMORY_PER_DISK * (max(g->ndisks, 1u) - 1);
	/* Who asks for more of a part gets it on top. */
	if (g->cache_size > MEMORY_CACHE)
		c->memory += g->cache_size - MEMORY_CACHE;
	if (g->nlogs && g->log.memory > MEMORY_CACHE)
		c->memory += g->log.memory - MEMORY_CACHE;
}

/* --- What is resident --- */

static bool field(const char *text, const char *name, uint64_t *sum)
{
	const char *at = strstr(text, name);

	if (!at)
		return false;
	*sum += strtoull(at + strlen(name), NULL, 10) << 10;
	return true;
}

bool memory_parse_status(const char *text, uint64_t *ret_bytes)
{
	uint64_t sum = 0;

	if (!field(text, "\nRssAnon:", &sum) || !field(text, "\nRssFile:", &sum))
		return false;
	*ret_bytes = sum;
	return true;
}

/* A disk in memory is data, and not to be told from the rest. */
static bool has_mem_disk(const struct graph_config *c)
{
	bool found = false;

	for (unsigned i = 0; i < c->ndisks + c->nlogs; i++) {
		struct disk_spec *spec, *s;

		if (disk_spec_parse(i < c->ndisks ? c->disks[i] : c->logs[i - c->ndisks], &spec, NULL) < 0)
			continue;
		for (s = spec; s->inner; s = s->inner)
			;
		found |= !strcmp(s->driver, "mem");
		disk_spec_free(spec);
	}
	return found || (c->cache_device && strstr(c->cache_device, "mem:"));
}

static co_fn void co_look(struct serve *s)
{
	struct memory *m = &s->memory;
	char text[4096];
	uint64_t logs, others;
	ssize_t n;

	if (s->graph.log) {
		wlog_memory(s->graph.log, &logs, &others);
		budget_set_held(&m->index, others);
	}
	if (m->fd < 0)
		return;
	n = co_io_read(m->fd, text, sizeof(text) - 1, 0);
	if (n <= 0)
		return;
	text[n] = '\0';
	if (!memory_parse_status(text, &m->resident))
		return;
	/* Shared memory is not in it: a guest's is none of ours, but the log's is. */
	m->resident += s->graph.log ? wlog_shared_memory(s->graph.log) : 0;
	others = 0;
	struct budget_part part[PARTS];
	unsigned parts = budget_parts(m->b, part, PARTS);

	for (unsigned i = 0; i < parts; i++)
		others += strcmp(part[i].name, m->program.name) ? part[i].held : 0;
	budget_set_held(&m->program, max(m->resident > others ? m->resident - others : 0, m->program.floor));
}

/* --- Giving way --- */

static uint64_t others_have(const struct budget *b)
{
	uint64_t limit = budget_limit(b), left = budget_obtainable(b);

	return limit > left ? limit - left : 0;
}

/* Of what somebody has lately wanted: what is to be free for it. */
static uint64_t lacking(const struct memory *m)
{
	uint64_t have = others_have(m->b);

	return m->wanted > have ? m->wanted - have : 0;
}

/* What others may take at once: the headroom, or more if somebody has lately wanted more. */
static uint64_t reserve(const struct serve *s)
{
	return max(budget_headroom(s->memory.b), lacking(&s->memory));
}

static void look_at_wanted(struct memory *m)
{
	uint64_t wanted = budget_wanted(m->b), now = rt_now_ns();

	if (wanted)
		wanted += others_have(m->b);
	if (wanted >= m->wanted || now - m->wanted_ns >= WANTED_NS) {
		m->wanted = wanted;
		m->wanted_ns = now;
	}
}

/* What the caches, which have `committed`, may have so that the reserve stays for others. */
static uint64_t left_for_caches(const struct serve *s, uint64_t committed)
{
	const struct budget *b = s->memory.b;
	uint64_t limit = budget_limit(b), all = budget_committed(b), others = (all > committed ? all - committed : 0) + reserve(s);

	return limit > others ? limit - others : 0;
}

/* What a reactor's cache is to do. */
struct part {
	struct serve *s;
	uint64_t committed;
	uint64_t full, allowed;	/* what it may have in quiet times, and now */
	bool grow;		/* or else shrink */
	bool silent;		/* it has not answered: what is known of it is from an earlier round */
	uint64_t over;		/* what it has not given back */
	struct balance_part told;
};

static int look_at_cache(void *arg)
{
	struct part *p = arg;
	struct cache *c = p->s->graph.cache;
	struct cache_use use;

	p->committed = 0;
	p->told = (struct balance_part){ 0 };
	if (!c)
		return 0;
	cache_get_use(c, &use);
	p->committed = cache_committed(c);
	p->told = (struct balance_part){ .own = p->s->pressure.size, .least = cache_least(c) + cache_shares(c) / 3 * 4, .most = cache_most(c),
					 .misses = use.misses, .ghost_hits = use.ghost_hits };
	return 0;
}

static co_fn int co_fit_cache(void *arg)
{
	struct part *p = arg;
	struct serve *s = p->s;
	struct cache *c = s->graph.cache;
	uint64_t want, now;

	s->memory.allowed = p->allowed;
	s->memory.full = p->full;
	s->memory.asked = p->told.own;
	p->over = 0;
	if (!c || s->ending)
		return 0;
	want = max(min(p->full, p->allowed), cache_least(c));
	now = cache_size(c);
	if (p->grow) {
		/* Small steps upwards are not worth their while. */
		if (want > now && (want == p->full || want > now + REGROW))
			co_cache_resize(c, want, NULL);
		return 0;
	}
	if (want < now)
		co_cache_resize(c, want, NULL);
	/* Where a read that hung kept memory of it. */
	co_cache_keep_budget(c);
	now = max(cache_size(c), cache_memory(c));
	p->over = now > max(want, p->full) ? now - max(want, p->full) : 0;
	return 0;
}

static co_fn int co_fit_there(void *arg)
{
	struct part *p = arg;

	/* Who could not be asked has given nothing back. */
	p->over = 1;
	return p->silent ? 0 : co_serve_call(p->s, co_fit_cache, p);
}

/* All at once: one in which a read hangs takes its time. Returns what was not given back. */
static co_fn uint64_t co_fit_all(struct part *part, unsigned n, bool grow)
{
	uint64_t over = 0;
	struct co_group g;

	co_group_init(&g);
	for (unsigned i = 0; i < n; i++) {
		part[i].grow = grow;
		co_group_start(&g, "cache", co_fit_there, &part[i]);
	}
	co_group_wait(&g);
	for (unsigned i = 0; i < n; i++)
		over += part[i].over;
	return over;
}

/* How each is doing; a second later who has lent what to whom may be another. False: there is nothing to go by yet. */
static co_fn bool co_look_at_caches(struct serve *s, struct part *part, unsigned n)
{
	struct balance *b = &s->memory.balance;
	bool all = true;

	b->n = n;
	for (unsigned i = 0; i < n; i++) {
		part[i] = (struct part){ .s = i ? &s->peers[i - 1] : s };
		/* One with no coroutine to spare for a second: as if it had answered what it answered last, but nothing is concluded from that. */
		if (co_serve_call(part[i].s, look_at_cache, &part[i]) < 0) {
			part[i].silent = true;
			part[i].committed = s->memory.committed[i];
			part[i].told = b->part[i];
			all = false;
			continue;
		}
		s->memory.committed[i] = part[i].committed;
		b->part[i].own = part[i].told.own;
		b->part[i].least = part[i].told.least;
		b->part[i].most = part[i].told.most;
		b->part[i].misses = part[i].told.misses;
		b->part[i].ghost_hits = part[i].told.ghost_hits;
	}
	if (!all)
		return b->begun;
	balance_told(b);
	if (rt_now_ns() >= s->memory.balance_ns) {
		s->memory.balance_ns = rt_now_ns() + SECOND_NS;
		balance_step(b);
	}
	return true;
}

/* All caches together get what the others leave. Who gets less comes first, so that at no time they have more than that, or than --cache-size. */
static co_fn void co_share_out(struct serve *s)
{
	struct part part[SPLIT_MAX];
	uint64_t committed = 0, full = 0, left;
	unsigned n = s->npeers + 1;

	co_mutex_lock(&s->memory.sharing);
	if (s->ending || !co_look_at_caches(s, part, n))
		goto out;
	for (unsigned i = 0; i < n; i++) {
		part[i].full = balance_target(&s->memory.balance, i);
		committed += part[i].committed;
		full += part[i].full;
	}
	left = left_for_caches(s, committed);
	for (unsigned i = 0; i < n; i++)
		part[i].allowed = part[i].full == full ? left : (uint64_t)((double)left * (double)part[i].full / (double)full);
	if (!co_fit_all(part, n, false))
		co_fit_all(part, n, true);
out:
	co_mutex_unlock(&s->memory.sharing);
}

/* One of several gives back at once, and gets more when the first reactor says so. */
static co_fn void co_fit_own(struct serve *s)
{
	const struct memory *m = &s->memory;
	uint64_t asked = m->asked, size = s->pressure.size;
	struct part own = { .s = s, .allowed = m->allowed, .full = m->full, .told.own = m->asked };

	if (asked && size < asked)
		own.full = (uint64_t)((double)own.full * (double)size / (double)asked);
	co_fit_cache(&own);
}

co_fn void co_memory_apply(struct serve *s)
{
	if (s->main)
		co_fit_own(s);
	else if (!s->ending)
		co_share_out(s);
}

static int trim(void *arg)
{
	struct serve *s = arg;

	rt_trim(s->rt);
	return 0;
}

static co_fn void co_make_room(struct serve *s)
{
	struct memory *m = &s->memory;

	look_at_wanted(m);
	co_memory_apply(s);
	if (s->ending || budget_room(m->b) >= max(budget_headroom(m->b) / 2, lacking(m)) || rt_now_ns() - m->trimmed_ns < TRIM_NS)
		return;
	m->trimmed_ns = rt_now_ns();
	co_everywhere(s, trim);
}

static void bell(void *arg)
{
	struct memory *m = arg;

	m->rung = true;
	co_queue_wake_all(&m->q);
}

static co_fn void co_keeper(void *arg)
{
	struct serve *s = arg;
	struct memory *m = &s->memory;
	uint64_t next = 0;

	while (!s->ending) {
		m->rung = false;
		if (rt_now_ns() >= next) {
			co_look(s);
			next = rt_now_ns() + SECOND_NS;
		}
		co_make_room(s);
		while (!m->rung && !s->ending && co_queue_wait_until(&m->q, min(next, rt_now_ns() + SECOND_NS / 4), "memory to be short"))
			;
		/* Not more often than it helps. */
		if (m->rung && !s->ending)
			co_sleep_ns(STEP_NS);
	}
}

/* --- Limits --- */

static uint64_t headroom_for(uint64_t limit)
{
	return min(max(limit / 32, 4 * MIB), 16 * MIB);
}

/* That the limit leaves room for all that cannot shrink. */
static int check_limit(struct serve *s, uint64_t limit, struct err *err)
{
	struct budget_part part[PARTS];
	unsigned n = budget_parts(s->memory.b, part, PARTS);
	uint64_t sum = LARGEST_REQUEST + headroom_for(limit);
	char list[512] = "", a[16], b[16], c[16];
	size_t at = 0;

	for (unsigned i = 0; i < n; i++) {
		sum += part[i].floor;
		if (part[i].floor >= MIB)
			at += (size_t)snprintf(list + at, sizeof(list) - at, "%s %s, ", part[i].name, size_format(align_up(part[i].floor, MIB), a));
		at = min(at, sizeof(list) - 1);
	}
	if (sum <= limit)
		return 0;
	return err_set(err, -EINVAL, "--memory %s is too little, at least %s is needed: %sone large request %s, reserve %s; less of it with a smaller --log-memory or --cache-size",
		       size_format(limit, a), size_format(align_up(sum, MIB), b), list, size_format(LARGEST_REQUEST, c), "4M or more");
}

int memory_init(struct serve *s, struct err *err)
{
	struct memory *m = &s->memory;
	int r = budget_create(UINT64_MAX / 2, &m->b);

	m->fd = -1;
	if (r < 0)
		return err_set(err, r, "no memory for a budget");
	co_queue_init(&m->q);
	co_mutex_init(&m->sharing);
	budget_join(m->b, &m->program, "program", PROGRAM_FLOOR);
	budget_set_keeper(m->b, s->rt, bell, m);
	return rt_set_budget(s->rt, m->b);
}

int memory_start(struct serve *s, struct err *err)
{
	struct memory *m = &s->memory;
	uint64_t limit = s->config->memory, buffers, index;
	int r;

	if (s->graph.log) {
		wlog_memory(s->graph.log, &buffers, &index);
		budget_join(m->b, &m->log, "write log", buffers);
		budget_force(&m->log, buffers);
		budget_join(m->b, &m->index, "log index", 0);
		budget_force(&m->index, index);
	}
	r = check_limit(s, limit, err);
	if (r < 0)
		return r;
	budget_set_limit(m->b, limit);
	budget_set_headroom(m->b, headroom_for(limit));
	if (s->graph.cache)
		pressure_set(s, s->config->graph.cache_size);
	if (!has_mem_disk(&s->split->whole->graph))
		m->fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
	r = co_spawn("memory", co_keeper, s);
	return r < 0 ? err_errno(err, r, "memory") : 0;
}

void memory_fini(struct serve *s)
{
	struct memory *m = &s->memory;

	if (!m->b)
		return;
	budget_set_keeper(m->b, NULL, NULL, NULL);
	budget_leave(&m->log);
	budget_leave(&m->index);
	budget_leave(&m->program);
	if (m->fd >= 0)
		close(m->fd);
}

co_fn int co_memory_set(struct serve *s, uint64_t limit, struct err *err)
{
	struct budget *b = s->memory.b;
	uint64_t deadline = rt_now_ns() + SECOND_NS;
	int r = check_limit(s, limit, err);

	if (r < 0)
		return r;
	budget_set_limit(b, limit);
	budget_set_headroom(b, headroom_for(limit));
	for (;;) {
		co_make_room(s);
		if (s->stop || budget_committed(b) <= limit || rt_now_ns() >= deadline)
			return 0;
		co_sleep_ns(STEP_NS);
	}
}

void *memory_status(struct serve *s)
{
	struct memory *m = &s->memory;
	struct budget_part part[PARTS];
	unsigned n = budget_parts(m->b, part, PARTS);
	json_t *parts = json_object();

	for (unsigned i = 0; i < n; i++)
		json_object_set_new(parts, part[i].name, json_pack("{s:I, s:I, s:I}", "bytes", (json_int_t)part[i].held, "floor", (json_int_t)part[i].floor,
								    "peak", (json_int_t)part[i].peak));
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:o}", "limit", (json_int_t)budget_limit(m->b), "committed", (json_int_t)budget_committed(m->b),
			 "headroom", (json_int_t)budget_headroom(m->b), "resident", (json_int_t)m->resident,
			 "refused", (json_int_t)budget_refused(m->b), "parts", parts);
}
