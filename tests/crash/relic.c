/* SPDX-License-Identifier: MIT */
/*
 * Kills: what the log keeps in memory for the next process is copied with each snapshot of the devices, and is there when the log is opened again. Snapshots
 * are taken between the stores to that memory, too.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "crash.h"
#include "variants.h"
#include "wlog/internal.h"

#define PARTS_MAX 2048
#define STEPS 11		/* of so many stores one is an instant to kill at */

struct relic_copy {
	unsigned n;
	struct { uint64_t off, len; } part[PARTS_MAX];
	uint8_t *data;
};

static uint8_t *memory;	/* of the log that is open */

static uint8_t *the_memory(const struct scenario *sc)
{
	if (!memory)
		memory = mmap(NULL, wl_relic_size(sc->log.memory), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		abort();
	return memory;
}

static void add(struct relic_copy *c, uint64_t off, uint64_t len)
{
	if (c->n == PARTS_MAX)
		abort();
	c->part[c->n].off = off;
	c->part[c->n++].len = len;
}

struct relic_copy *relic_copy(const struct world *w)
{
	const struct wl_relic_head *h = (const void *)memory;
	struct relic_copy *c;
	uint64_t size = 0;

	if (!w->sc->kill || !memory)
		return NULL;
	c = calloc(1, sizeof(*c));
	if (!c)
		abort();
	add(c, 0, WL_BLOCK);
	if (get_le64(h->magic)) {
		struct wl_relic_layout l = wl_relic_layout(h->mem_size);

		add(c, WL_BLOCK + h->written % h->slots * sizeof(struct wl_relic_slot), sizeof(struct wl_relic_slot));
		add(c, l.desc, wl_relic_count(h->fill) * WL_D_SIZE);
		for (uint64_t seq = h->written + 1; seq <= h->last; seq++) {
			uint64_t at = WL_BLOCK + seq % h->slots * sizeof(struct wl_relic_slot);
			const struct wl_relic_slot *s = (const void *)(memory + at);

			add(c, at, sizeof(*s));
			add(c, l.ring + (uint64_t)s->off * WL_BLOCK, s->length ? s->length : WL_B_HEADER + wl_relic_payload(h->fill));
		}
	}
	for (unsigned i = 0; i < c->n; i++)
		size += c->part[i].len;
	c->data = malloc(size);
	if (!c->data)
		abort();
	uint8_t *p = c->data;

	for (unsigned i = 0; i < c->n; p += c->part[i++].len)
		memcpy(p, memory + c->part[i].off, c->part[i].len);
	return c;
}

void relic_free(struct relic_copy *c)
{
	if (c)
		free(c->data);
	free(c);
}

static void on_step(void *arg, const char *where)
{
	struct world *w = arg;

	if (++w->steps % STEPS == 0)
		world_instant(w, where);
}

void relic_open(struct world *w, struct wlog_config *config)
{
	struct relic_copy *c = w->relic;

	if (!w->sc->kill)
		return;
	config->relic_mem = the_memory(w->sc);
	config->relic_step = on_step;
	config->relic_arg = w;
	if (w->opened)
		return;
	w->opened = true;
	memset(memory, 0, WL_BLOCK);
	const uint8_t *p = c ? c->data : NULL;

	for (unsigned i = 0; c && i < c->n; p += c->part[i++].len)
		memcpy(memory + c->part[i].off, p, c->part[i].len);
}

void adjust_kill(struct scenario *sc, struct rng *r)
{
	sc->kill = true;
	sc->log.memory = 4 << 20;
	sc->nsides = 1 + chance(r, 30);
	sc->work.flush_pct = rng_below(r, 15);
	if (chance(r, 40))
		sc->work.max_write = 140000;	/* groups */
	for (unsigned i = 0; i < sc->nvols; i++)
		sc->vol[i].mode = WLOG_MODE_FLUSH;
}
