/* SPDX-License-Identifier: MIT */
/* Second level of the read cache: life. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cache/internal.h"
#include "util/err.h"
#include "util/log.h"
#include "util/size.h"

#define SETTLE_NS 5000000000ull
#define RATE (64ull << 20)

void second_fail(struct second *s, int error, const char *what)
{
	s->count.errors++;
	if (s->off)
		return;
	s->off = true;
	s->error = error;
	s->why = what;
	log_warn("cache device %s: %s: %s; the cache goes on without it", s->dev->name, what, strerror(-error));
	co_queue_wake_all(&s->wake);
}

/* --- The superblock --- */

/* The newer of the two slots. */
static co_fn int co_super_read(struct disk *dev, uint8_t *buf, struct second_super *ret, struct err *err)
{
	struct second_super *sb = malloc(sizeof(*sb));
	const char *why = "is no cache device", *other = why;
	int found = -EINVAL, r;

	if (!sb)
		return err_errno(err, -ENOMEM, "%s", dev->name);
	for (unsigned i = 0; i < 2; i++) {
		if (dev->size < SECOND_FIRST)
			break;
		r = co_disk_read(dev, i * SECOND_SUPER_STRIDE, buf, SECOND_SUPER, 0);
		if (r < 0) {
			free(sb);
			return err_errno(err, r, "%s: its superblock cannot be read", dev->name);
		}
		r = second_super_decode(buf, sb, &other);
		if (!r && (found || sb->seq > ret->seq)) {
			*ret = *sb;
			found = 0;
		} else if (r < 0 && found == -EINVAL) {
			found = r;
			why = other;
		}
	}
	free(sb);
	if (!found && ret->size > dev->size)
		return err_set(err, -EINVAL, "%s: is smaller than it was when it was made a cache device; weir cache create makes it anew", dev->name);
	return found ? err_set(err, found, "%s: %s; weir cache create makes one", dev->name, why) : 0;
}

static uint8_t *get_super_buf(void)
{
	return aligned_alloc(SECOND_BLOCK, SECOND_SUPER);
}

co_fn int co_cache_device_read(struct disk *dev, struct cache_device_info *ret, struct err *err)
{
	struct second_super *sb = calloc(1, sizeof(*sb));
	uint8_t *buf = get_super_buf();
	int r = sb && buf ? co_super_read(dev, buf, sb, err) : err_errno(err, -ENOMEM, "%s", dev->name);

	if (!r) {
		*ret = (struct cache_device_info){ .size = sb->size, .segment_size = sb->segment_size, .segments = sb->segments, .uuid = sb->uuid,
						   .wall_ns = sb->wall_ns };
		for (unsigned i = 0; i < SECOND_RECORDS; i++) {
			const struct second_record *rec = &sb->rec[i];

			if (!rec->epoch || ret->volumes == ARRAY_SIZE(ret->volume))
				continue;
			ret->volume[ret->volumes].settled = rec->settled;
			ret->volume[ret->volumes].wall_ns = rec->wall_ns;
			ret->volume[ret->volumes].size = rec->size;
			memcpy(ret->volume[ret->volumes++].name, rec->name, SECOND_NAME);
		}
	}
	free(buf);
	free(sb);
	return r;
}

/* All headers are invalid without being written: the UUID is new. */
co_fn int co_cache_device_format(struct disk *dev, uint32_t segment_size, struct err *err)
{
	struct second_super *sb = calloc(1, sizeof(*sb));
	uint8_t *buf = get_super_buf();
	char a[16];
	uint64_t n;
	int r = 0;

	segment_size = segment_size ? segment_size : SECOND_SEGMENT;
	n = dev->size > SECOND_FIRST ? (dev->size - SECOND_FIRST) / segment_size : 0;
	if (!sb || !buf)
		r = err_errno(err, -ENOMEM, "%s", dev->name);
	else if (n < SECOND_MIN_SEGMENTS)
		r = err_set(err, -EINVAL, "%s: a cache device has at least %s", dev->name,
			    size_format(second_segment_at(segment_size, SECOND_MIN_SEGMENTS), a));
	if (!r) {
		*sb = (struct second_super){ .seq = 1, .size = dev->size, .segment_size = segment_size,
					     .segments = (uint32_t)min(n, (uint64_t)UINT32_MAX / SECOND_ENTRIES / 2),
					     .wall_ns = rt_wall_ns() };
		uuid_random(&sb->uuid);
		second_super_encode(sb, buf);
		for (unsigned i = 0; i < 2 && !r; i++)
			r = co_disk_write(dev, i * SECOND_SUPER_STRIDE, buf, SECOND_SUPER, DISK_FUA);
		if (!r)
			r = co_disk_flush(dev);
		if (r)
			err_errno(err, r, "%s: cannot be written", dev->name);
	}
	free(buf);
	free(sb);
	return r;
}

/* --- Memory --- */

struct layout {
	uint64_t slots, buckets, seq, dirty, stages, ops, bufs, all;
	uint32_t bits;
};

static void lay_out(uint32_t segments, uint32_t segment_size, uint32_t entries, struct layout *l)
{
	uint64_t n = (uint64_t)(segments + SECOND_STAGES) * entries;

	l->bits = 4;
	while (l->bits < 31 && (2ull << l->bits) <= n)
		l->bits++;
	l->slots = align_up(n * sizeof(struct second_slot), 4096);
	l->buckets = align_up(sizeof(uint32_t) << l->bits, 4096);
	l->seq = align_up(segments * sizeof(uint64_t), 4096);
	l->dirty = align_up(segments, 4096);
	l->stages = (uint64_t)SECOND_STAGES * segment_size;
	l->ops = (uint64_t)SECOND_OPS * SECOND_RUN * SECOND_BLOCK;
	l->bufs = SECOND_SUPER + 2 * SECOND_HEADER;
	l->all = l->slots + l->buckets + l->seq + l->dirty + l->stages + l->ops + l->bufs;
}

/* As much of the device as a quarter of the cache can keep an index of. */
static uint32_t plan(const struct cache *c, const struct second_super *sb, uint32_t entries, struct layout *l)
{
	uint32_t n = sb->segments;

	for (; n >= SECOND_MIN_SEGMENTS; n -= max(n / 256, 1u)) {
		lay_out(n, sb->segment_size, entries, l);
		if (l->all + sizeof(struct second) <= c->budget / 4)
			return n;
	}
	return 0;
}

static void place(struct second *s, const struct layout *l)
{
	char *at = s->map;

	s->slot = (struct second_slot *)at;
	at += l->slots;
	s->bucket = (uint32_t *)at;
	at += l->buckets;
	s->seq = (uint64_t *)at;
	at += l->seq;
	s->dirty = (uint8_t *)at;
	at += l->dirty;
	for (unsigned i = 0; i < SECOND_STAGES; i++, at += s->sb.segment_size)
		s->stage[i].mem = at;
	for (unsigned i = 0; i < SECOND_OPS; i++, at += SECOND_RUN * SECOND_BLOCK) {
		s->op[i] = (struct second_op){ .s = s, .buf = at, .next = s->op_free };
		s->op_free = &s->op[i];
	}
	s->super_buf = (uint8_t *)at;
	s->header_buf = s->super_buf + SECOND_SUPER;
	s->scan_buf = s->header_buf + SECOND_HEADER;
}

uint64_t second_memory(const struct second *s)
{
	return s ? s->map_bytes + sizeof(*s) : 0;
}

static void free_second(struct second *s)
{
	if (s && s->map && s->map != MAP_FAILED)
		munmap(s->map, s->map_bytes);
	free(s);
}

static int make_memory(struct cache *c, struct second *s, struct err *err)
{
	struct layout l;
	char size[16], part[16];

	s->entries = s->sb.segment_size / SECOND_BLOCK - SECOND_HEADER / SECOND_BLOCK;
	s->segments = plan(c, &s->sb, s->entries, &l);
	if (!s->segments)
		return err_set(err, -EINVAL, "%s: a cache of %s is too small for the index of a cache device, which takes a quarter of it at most; give more "
			       "with --cache-size", s->dev->name, size_format(c->budget, size));
	if (s->segments < s->sb.segments)
		log_warn("cache device %s: only %s of it are used: an index of more would take more than a quarter of the cache's memory (--cache-size)",
			 s->dev->name, size_format((uint64_t)s->segments * s->sb.segment_size, part));
	s->slots = s->segments * s->entries;
	s->shift = 64 - l.bits;
	s->map_bytes = l.all;
	s->map = mmap(NULL, s->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (s->map == MAP_FAILED)
		return err_errno(err, -ENOMEM, "%s: the index of the cache device", s->dev->name);
	/* Touched when it is first used, and then in large pieces. */
	madvise(s->map, s->map_bytes, MADV_HUGEPAGE);
	madvise(s->map, s->map_bytes, MADV_DONTDUMP);
	place(s, &l);
	return 0;
}

/* --- Life --- */

co_fn int co_cache_add_device(struct cache *c, struct disk *dev, const struct cache_device_config *config, struct err *err)
{
	struct second *s = calloc(1, sizeof(*s));
	uint8_t *buf = get_super_buf();
	int r = s && buf ? 0 : err_errno(err, -ENOMEM, "%s", dev->name);

	if (!r && c->block != SECOND_BLOCK)
		r = err_set(err, -EINVAL, "%s: a cache device needs blocks of %u bytes", dev->name, SECOND_BLOCK);
	if (!r)
		r = co_super_read(dev, buf, &s->sb, err);
	if (!r) {
		s->c = c;
		s->dev = dev;
		s->rate = config->rate ? config->rate : RATE;
		s->settle_ns = config->settle_ns ? config->settle_ns : SETTLE_NS;
		s->tokens = s->rate;
		co_mutex_init(&s->lock);
		co_queue_init(&s->wake);
		co_queue_init(&s->idle);
		r = make_memory(c, s, err);
	}
	free(buf);
	if (r < 0) {
		free_second(s);
		return r;
	}
	c->second = s;
	cache_recompute(c);
	return 0;
}

/* A record whose contents count, by identity; else one for new contents. */
static int choose_record(struct second *s, const struct cache_volume *v, bool *ret_kept)
{
	int best = -1;

	*ret_kept = false;
	for (int i = 0; i < (int)SECOND_RECORDS; i++) {
		const struct second_record *r = &s->sb.rec[i];

		if (s->vol[i])
			continue;
		if (v->second.has_identity && r->epoch && r->settled && disk_identity_equal(&r->identity, &v->second.identity)) {
			*ret_kept = true;
			return i;
		}
		if (r->epoch && !strncmp(r->name, v->name, SECOND_NAME - 1)) {
			best = i;
			continue;
		}
		if (best < 0 || (strncmp(s->sb.rec[best].name, v->name, SECOND_NAME - 1) && r->wall_ns < s->sb.rec[best].wall_ns))
			best = i;
	}
	return best;
}

/* Invariant (5). */
static uint64_t new_epoch(void)
{
	uint64_t epoch = 0;
	struct uuid u;

	while (!epoch) {
		uuid_random(&u);
		epoch = get_le64(u.b) ^ get_le64(u.b + 8);
	}
	return epoch;
}

co_fn void co_second_attach(struct cache_volume *v)
{
	struct second *s = v->c->second;
	struct second_record *r;
	int i;

	v->second = (struct second_volume){ .rec = -1, .mode = v->mode };
	co_mutex_init(&v->second.lock);
	if (!s || s->started)
		return;
	v->second.mode = CACHE_ALL;
	v->second.has_identity = co_second_identity(v, &v->second.identity) == 0;
	i = choose_record(s, v, &v->second.kept);
	if (i < 0)
		return;
	r = &s->sb.rec[i];
	s->vol[i] = v;
	v->second.rec = i;
	v->second.settled = v->second.kept;
	if (!v->second.kept)
		*r = (struct second_record){ .epoch = new_epoch() };
	r->size = v->disk.size;
	r->wall_ns = rt_wall_ns();
	memset(r->name, 0, sizeof(r->name));
	memcpy(r->name, v->name, strnlen(v->name, SECOND_NAME - 1));
}

co_fn void co_cache_start_device(struct cache *c)
{
	struct second *s = c->second;
	co_entry *const own[] = { co_second_scan, co_second_writer, co_second_keeper };

	if (!s || s->started)
		return;
	s->scanning = true;
	s->started = true;
	for (unsigned i = 0; i < ARRAY_SIZE(own) && !s->off; i++) {
		s->running++;
		if (co_spawn("second level", own[i], s) < 0) {
			s->running--;
			second_fail(s, -EAGAIN, "cannot be used");
		}
	}
}

co_fn void co_cache_close_device(struct cache *c)
{
	struct second *s = c->second;

	if (!s)
		return;
	s->stop = true;
	co_queue_wake_all(&s->wake);
	while (s->running || s->ops)
		co_queue_wait(&s->idle, "the cache device");
	c->second = NULL;
	co_disk_close(s->dev);
	free_second(s);
}

/* What is there stays valid, and is overwritten in time. */
void cache_set_secondary(struct disk *d, enum cache_mode mode)
{
	volume_of(d)->second.mode = mode;
}

bool cache_has_device(const struct cache *c)
{
	return c->second;
}
