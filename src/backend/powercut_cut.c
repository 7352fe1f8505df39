/* SPDX-License-Identifier: MIT */
/* The power-cut simulator: the supply, cuts and forks. */
#include "backend/powercut_int.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/bytes.h"

/* --- What a cut leaves: (4) of fault.h --- */

/* What becomes of the sectors of one request. */
enum fate { LOST, WHOLE, HEAD, TAIL, SCATTERED, FATES };

static void write_fate(const struct powercut_dev *dev, struct media *to, const struct version *v, enum fate fate, unsigned pct, struct rng *rng)
{
	uint64_t n = v->len / dev->sector, from = 0, end = n;

	if (fate > WHOLE && v->data && powercut_is_whole(dev, v->off, v->len))
		fate = rng_below(rng, 2) ? WHOLE : LOST;
	if (fate == LOST)
		return;
	if (fate == HEAD)
		end = rng_below(rng, n + 1);
	if (fate == TAIL)
		from = rng_below(rng, n + 1);
	for (uint64_t i = from; i < end; i++)
		if (fate != SCATTERED || rng_below(rng, 100) < pct)
			powercut_write_sector(dev, to, v, i);
}

/* How a device loses things in one cut. The index of a request counts in order of effect, those in flight last. */
enum style { ALL_LOST, ALL_KEPT, FLIGHTS_TORN, COINS, PREFIX, NEWEST_ONLY, ALL_BUT_ONE, SECTORS, MIXTURE, STYLES };

static enum fate choose(enum style style, uint64_t i, uint64_t n, uint64_t n_effective, uint64_t pick, unsigned pct, struct rng *rng)
{
	switch (style) {
	case ALL_LOST:
		return LOST;
	case ALL_KEPT:
		return WHOLE;
	case FLIGHTS_TORN:
		return i < n_effective ? WHOLE : SCATTERED;
	case COINS:
		return rng_below(rng, 100) < pct ? WHOLE : LOST;
	case PREFIX:
		return i < pick ? WHOLE : i == pick ? HEAD : LOST;
	case NEWEST_ONLY:
		return i + 1 == n ? WHOLE : LOST;
	case ALL_BUT_ONE:
		return i != pick ? WHOLE : (enum fate[]){ LOST, HEAD, TAIL, SCATTERED }[rng_below(rng, 4)];
	case SECTORS:
		return SCATTERED;
	default:
		return rng_below(rng, FATES);
	}
}

/* Un-flushed versions and flights of `dev` reach `to`, or do not. */
static void resolve(const struct powercut_dev *dev, struct media *to, struct rng *rng)
{
	enum style style = rng_below(rng, STYLES);
	unsigned pct = (unsigned[]){ 10, 50, 90 }[rng_below(rng, 3)];
	uint64_t n = 0, n_effective = 0, n_flights = 0, pick, i = 0;
	struct version **flights;

	list_for_each(&dev->versions, v)
		n_effective++;
	list_for_each(&dev->flights, f)
		n_flights++;
	n = n_effective + n_flights;
	if (!n)
		return;
	pick = rng_below(rng, n);
	list_for_each(&dev->versions, node) {
		const struct version *v = container_of(node, struct version, node);

		write_fate(dev, to, v, choose(style, i, n, n_effective, pick, pct, rng), pct, rng);
		i++;
	}
	flights = powercut_must(calloc(n_flights + 1, sizeof(struct version *)));
	n_flights = 0;
	list_for_each(&dev->flights, node) {
		uint64_t at = rng_below(rng, n_flights + 1);

		flights[n_flights] = flights[at];
		flights[at] = powercut_version_of(dev, container_of(node, struct flight, node));
		n_flights++;
	}
	for (uint64_t k = 0; k < n_flights; k++, i++) {
		write_fate(dev, to, flights[k], choose(style, i, n, n_effective, pick, pct, rng), pct, rng);
		powercut_version_free(dev, flights[k]);
	}
	free(flights);
}

/* Leaves in `to` (which may be `dev` itself) what a cut leaves of `dev`: media, mark and stamp. */
static void cut_dev(const struct powercut_dev *dev, struct powercut_dev *to, struct rng *rng)
{
	uint64_t oldest = dev->config.lazy_stamp ? dev->opened_stamp : dev->stable_stamp;
	uint64_t stamps[] = { oldest, dev->stable_stamp, dev->stamp };

	resolve(dev, to->stable, rng);
	if (dev->new_mark && rng_below(rng, 2))
		strcpy(to->mark, dev->new_mark);
	to->stamp = to->stable_stamp = to->opened_stamp = stamps[rng_below(rng, 3)];
	to->highest_stamp = dev->highest_stamp;
}

void powercut_cut(struct powercut *p)
{
	struct rng rng;

	if (p->off)
		return;
	rng_seed(&rng, p->has_cut_seed ? p->cut_seed : rng_u64(&p->rng));
	p->off = true;
	for (unsigned i = 0; i < p->n_dev; i++) {
		struct powercut_dev *dev = p->dev[i];

		cut_dev(dev, dev, &rng);
		powercut_versions_free(dev);
		media_destroy(dev->view);
		dev->view = media_clone(dev->stable);
	}
	/* Behind rt_sim_stop() there is nobody to wake: powercut_abandon() follows. */
	if (rt_self())
		co_queue_wake_all(&p->waiting);
}

struct powercut *powercut_fork(const struct powercut *p, uint64_t seed)
{
	struct powercut *q = powercut_create(seed);
	struct rng rng;

	rng_seed(&rng, seed);
	for (unsigned i = 0; i < p->n_dev; i++) {
		const struct powercut_dev *from = p->dev[i];
		struct powercut_dev *to = powercut_dev_create(q, from->name, from->size, &from->config);

		media_destroy(to->stable);
		to->stable = media_clone(from->stable);
		strcpy(to->mark, from->mark);
		if (p->off) {
			to->stamp = to->stable_stamp = to->opened_stamp = from->stamp;
			to->highest_stamp = from->highest_stamp;
		} else {
			cut_dev(from, to, &rng);
		}
		media_destroy(to->view);
		to->view = media_clone(to->stable);
	}
	return q;
}

/* --- The supply --- */

struct powercut *powercut_create(uint64_t seed)
{
	struct powercut *p = powercut_must(calloc(1, sizeof(*p)));

	rng_seed(&p->rng, seed);
	co_queue_init(&p->waiting);
	return p;
}

void powercut_destroy(struct powercut *p)
{
	if (!p)
		return;
	for (unsigned i = 0; i < p->n_dev; i++) {
		struct powercut_dev *dev = p->dev[i];

		assert(list_empty(&dev->handles));
		powercut_versions_free(dev);
		media_destroy(dev->stable);
		media_destroy(dev->view);
		free(dev->name);
		free(dev);
	}
	for (unsigned k = 0; k < POWERCUT_SPARES; k++)
		while (p->spare[k]) {
			struct spare *s = p->spare[k];

			p->spare[k] = s->next;
			free(s);
		}
	free(p);
}

void powercut_restart(struct powercut *p, uint64_t seed)
{
	powercut_cut(p);
	for (unsigned i = 0; i < p->n_dev; i++) {
		struct powercut_dev *dev = p->dev[i];

		assert(list_empty(&dev->handles));
		dev->error = 0;
		dev->stalled = false;
		dev->ios = 0;
		dev->count = (struct powercut_counters){ 0 };
	}
	p->off = false;
	p->ios = p->writes = 0;
	p->cut_at = p->fail_at = 0;
	p->has_cut_seed = false;
	p->hook = NULL;
	rng_seed(&p->rng, seed);
}

void powercut_abandon(struct powercut *p)
{
	co_queue_init(&p->waiting);
	for (unsigned i = 0; i < p->n_dev; i++) {
		list_init(&p->dev[i]->flights);
		p->dev[i]->new_mark = NULL;
		list_for_each_safe(&p->dev[i]->handles, n)
			powercut_handle_free(container_of(n, struct handle, node));
	}
}

void powercut_cut_at(struct powercut *p, uint64_t n)
{
	p->cut_at = n;
}

void powercut_fail_at(struct powercut *p, struct powercut_dev *dev, uint64_t n, int error)
{
	p->fail_at = n;
	p->fail_dev = dev;
	p->fail_error = error;
}

void powercut_seed_cut(struct powercut *p, uint64_t seed)
{
	p->cut_seed = seed;
	p->has_cut_seed = true;
}

bool powercut_is_off(const struct powercut *p)
{
	return p->off;
}

uint64_t powercut_ios(const struct powercut *p)
{
	return p->ios;
}

uint64_t powercut_writes(const struct powercut *p)
{
	return p->writes;
}

void powercut_set_hook(struct powercut *p, powercut_hook *fn, void *arg)
{
	p->hook = fn;
	p->hook_arg = arg;
}

/* --- Devices --- */

struct powercut_dev *powercut_dev_create(struct powercut *p, const char *name, uint64_t size, const struct powercut_dev_config *config)
{
	struct powercut_dev *dev = powercut_must(calloc(1, sizeof(*dev)));
	uint32_t align;

	assert(p->n_dev < POWERCUT_MAX_DEVICES);
	if (config)
		dev->config = *config;
	align = dev->config.align ? dev->config.align : 512;
	dev->sector = dev->config.sector ? dev->config.sector : 512;
	dev->unit = max(dev->sector, align);
	dev->latency_ns = dev->config.latency_ns ? dev->config.latency_ns : 100000;
	dev->power = p;
	dev->name = powercut_must(strdup(name));
	dev->size = size;
	dev->stable = media_create(align_up(size, dev->unit));
	dev->view = media_clone(dev->stable);
	list_init(&dev->versions);
	list_init(&dev->flights);
	list_init(&dev->handles);
	p->dev[p->n_dev++] = dev;
	return dev;
}

struct powercut_dev *powercut_dev_find(struct powercut *p, const char *name)
{
	for (unsigned i = 0; i < p->n_dev; i++)
		if (!strcmp(p->dev[i]->name, name))
			return p->dev[i];
	return NULL;
}

const char *powercut_dev_name(const struct powercut_dev *dev)
{
	return dev->name;
}

void powercut_dev_fail(struct powercut_dev *dev, int error)
{
	dev->error = error;
}

void powercut_dev_stall(struct powercut_dev *dev, bool on)
{
	dev->stalled = on;
	if (!on)
		co_queue_wake_all(&dev->power->waiting);
}

const struct media *powercut_dev_stable(const struct powercut_dev *dev)
{
	return dev->stable;
}

const struct media *powercut_dev_view(const struct powercut_dev *dev)
{
	return dev->view;
}

uint64_t powercut_dev_volatile(const struct powercut_dev *dev)
{
	uint64_t n = 0;

	list_for_each(&dev->versions, v)
		n += container_of(v, struct version, node)->len;
	return n;
}

const struct powercut_counters *powercut_dev_counters(const struct powercut_dev *dev)
{
	return &dev->count;
}
