/* SPDX-License-Identifier: MIT */
/*
 * Write log: keeping the memory ring for who comes after a kill, and completing what a killed process left. relic.h has the invariants.
 *
 * Completing. First everything is read and verified, then written: batch by batch, in order, each durable before the next, which is invariant (1) of the log.
 * A kill in between is like the first one. `written` follows, so that nothing is left by the time the new generation begins.
 */
#include "wlog/relic.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/crc32c.h"
#include "wlog/internal.h"

#define LOCK_WAIT_NS 10000000000ull
#define LOCK_POLL_NS 20000000ull
#define REST_NS 10000000000ull	/* without a write, before memory is given back: its pages are small, and dear to get again */

static const char magic[8] = { 'W', 'E', 'I', 'R', 'R', 'L', 'I', 'C' };

struct wl_relic_layout wl_relic_layout(uint64_t mem_size)
{
	struct wl_relic_layout l = { .slots = mem_size / WL_BLOCK + 2 };

	l.desc = align_up(WL_BLOCK + (uint64_t)l.slots * sizeof(struct wl_relic_slot), WL_BLOCK);
	l.ring = l.desc + WL_MAX_BATCH;
	l.size = l.ring + mem_size;
	return l;
}

static uint64_t ring_size(uint64_t memory)
{
	return align_up(max(memory, WL_MEM_MIN), WL_BLOCK);
}

uint64_t wl_relic_size(uint64_t memory)
{
	return wl_relic_layout(ring_size(memory ? memory : WL_MEM_DEFAULT)).size;
}

uint64_t wl_relic_overhead(const struct wlog *w)
{
	return w->relic.head ? wl_relic_layout(w->mem_size).desc : 0;
}

uint64_t wlog_shared_memory(const struct wlog *w)
{
	return w->relic.kept && w->relic.fd >= 0 ? WL_BLOCK + w->relic.reserved : 0;
}

const char *wlog_relic_dir(void)
{
	const char *dir = getenv("WEIR_SHM_DIR");

	return dir && *dir ? dir : "/dev/shm";
}

static void boot_id(char *buf, size_t size)
{
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, buf, size - 1);

	memset(buf + max(n, (ssize_t)0), 0, size - max(n, (ssize_t)0));
	if (fd >= 0)
		close(fd);
}

static void make_path(char *buf, size_t size, const char *dir, const struct uuid *log)
{
	char uuid[37];

	snprintf(buf, size, "%s/weir-log-%s", dir, uuid_format(log, uuid));
}

void wl_relic_forget(const char *dir, const struct uuid *log)
{
	char path[256];

	make_path(path, sizeof(path), dir, log);
	unlink(path);
}

/* Once for a log: that it goes on without, why, and the way out. */
static void go_without(struct wlog *w, const char *what, int error)
{
	struct wl_relic *k = &w->relic;

	if (!k->told)
		log_warn("write log: %s: %s (%s); if this server is killed, what was acknowledged and not flushed is lost, also for a guest that lives on: stop it in "
			 "order, or make room in that folder", k->path, what, strerror(error));
	k->told = true;
	k->kept = false;
	/* The lock stays as long as any of the file is mapped: who had it would empty the file, and our next store be the end of the process. */
	if (k->fd >= 0 && !k->head) {
		close(k->fd);
		k->fd = -1;
	}
}

/* --- The file --- */

/* Ours alone: who else could write it would write our log. */
static int open_file(const char *path, const char **ret_what)
{
	struct stat st;
	int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);

	*ret_what = "cannot be opened";
	if (fd < 0)
		return -errno;
	int r = fstat(fd, &st) < 0 ? -errno : 0;

	if (r == 0 && (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 07777) != 0600 || st.st_nlink > 1)) {
		*ret_what = "is not a file of ours alone and is not used; remove it";
		r = -EPERM;
	}
	if (r < 0) {
		close(fd);
		return r;
	}
	return fd;
}

/* A process that was killed a moment ago may still hold it. */
static co_fn int co_lock_file(struct wlog *w, const char **ret_what)
{
	struct wl_relic *k = &w->relic;
	uint64_t deadline = rt_now_ns() + LOCK_WAIT_NS;
	struct stat st;

	for (;;) {
		k->fd = open_file(k->path, ret_what);
		if (k->fd < 0)
			return k->fd;
		*ret_what = "cannot be locked";
		if (flock(k->fd, LOCK_EX | LOCK_NB) == 0) {
			if (fstat(k->fd, &st) == 0 && st.st_nlink == 1)
				return 0;
		} else if (errno != EWOULDBLOCK) {
			return -errno;
		} else if (rt_now_ns() >= deadline) {
			return -EBUSY;
		}
		close(k->fd);
		k->fd = -1;
		co_sleep_ns(LOCK_POLL_NS);
	}
}

static int fetch(struct wlog *w, uint64_t off, void *buf, uint64_t len)
{
	if (w->config.relic_mem) {
		memcpy(buf, (uint8_t *)w->config.relic_mem + off, len);
		return 0;
	}
	ssize_t n = pread(w->relic.fd, buf, len, off);

	return n < 0 ? -errno : (uint64_t)n == len ? 0 : -EBADMSG;
}

static int store_written(struct wlog *w, uint64_t seq)
{
	uint64_t off = offsetof(struct wl_relic_head, written);

	if (w->config.relic_mem) {
		memcpy((uint8_t *)w->config.relic_mem + off, &seq, sizeof(seq));
		return 0;
	}
	return pwrite(w->relic.fd, &seq, sizeof(seq), off) == sizeof(seq) ? 0 : -EIO;
}

/* --- What a killed process left --- */

struct completion {
	struct wlog *w;
	struct wl_relic_head head;
	struct wl_relic_layout layout;
	uint64_t first, last;	/* batches that are to be written */
	bool cut;		/* the last one is what it was before a group began in it */
	uint64_t nonce;		/* of the batch before; valid behind `first` */
	uint64_t end;		/* where that one ended on the device */
	const char *what;	/* what is wrong */
};

static int bad(struct completion *c, const char *what)
{
	c->what = what;
	return -EBADMSG;
}

static int check_place(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint64_t len)
{
	const struct wlog *w = c->w;
	uint64_t log_end = wl_segment_pos(w, w->sb.seg_count);

	if (s->pos < WL_FIRST_SEGMENT || s->pos >= log_end || !is_aligned(s->pos, WL_BLOCK))
		return bad(c, "has a place outside the log");
	uint32_t seg = wl_segment_of(w, s->pos);

	if (len > WL_MAX_BATCH || len > wl_segment_pos(w, seg) + w->sb.seg_size - s->pos)
		return bad(c, "is longer than its segment");
	if ((uint64_t)s->off * WL_BLOCK + len > c->head.mem_size)
		return bad(c, "lies outside the memory");
	if (seq == c->first)
		return 0;
	uint32_t before = wl_segment_of(w, c->end - 1);

	if (s->pos != c->end && s->pos != wl_segment_pos(w, (before + 1) % w->sb.seg_count))
		return bad(c, "does not follow the batch before it");
	return 0;
}

/* All that has checksums: descriptors, data and index. */
static int check_content(struct completion *c, const struct wl_bhead *h, const uint8_t *p)
{
	const uint8_t *desc = p + wl_batch_desc_off(h);

	if (crc32c(0, p + WL_B_HEADER, h->index_len) != h->index_crc || crc32c(0, desc, h->count * WL_D_SIZE) != h->desc_crc)
		return bad(c, "does not match its checksum");
	for (uint32_t i = 0; i < h->count; i++) {
		struct wl_desc d;

		wl_desc_decode(desc + i * WL_D_SIZE, &d);
		if (!wl_desc_is_sane(&d, h) || (c->w->by_slot[d.volume] && d.off + d.len > align_up(c->w->sb.vol[d.volume].size, 65536)))
			return bad(c, "has an impossible record");
		if (d.type == WL_WRITE && crc32c(0, p + d.data, d.len) != d.crc)
			return bad(c, "has a record that does not match its checksum");
	}
	return 0;
}

static int load_sealed(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint8_t *p, struct wl_bhead *h)
{
	const struct wlog *w = c->w;
	int r = check_place(c, seq, s, s->length);

	if (r == 0 && (s->length < WL_BLOCK || !is_aligned(s->length, WL_BLOCK)))
		r = bad(c, "has an impossible length");
	if (r == 0)
		r = fetch(c->w, c->layout.ring + (uint64_t)s->off * WL_BLOCK, p, s->length);
	if (r < 0)
		return r;
	if (wl_bhead_decode(p, s->length, &w->sb.uuid, h) < 0 || h->length != s->length || h->seq != seq || h->generation != w->sb.generation ||
	    h->segment != wl_segment_of(w, s->pos))
		return bad(c, "has a damaged header");
	if (seq != c->first && h->prev != c->nonce)
		return bad(c, "does not name the batch before it");
	return check_content(c, h, p);
}

/* Makes a whole batch of `fill` at `p`, with the descriptors in the buffer `desc`. */
static int seal(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint64_t fill, uint8_t *p, const uint8_t *desc, struct wl_bhead *h)
{
	uint32_t count = fill >> 32, payload = (uint32_t)fill, used = WL_B_HEADER + payload + count * WL_D_SIZE;

	*h = (struct wl_bhead){
		.seq = seq, .generation = c->w->sb.generation, .prev = h->prev, .nonce = rt_rand64(), .wall = rt_wall_ns(),
		.length = align_up(used, WL_BLOCK), .payload = payload, .count = count, .index_len = h->index_len,
		.desc_crc = crc32c(0, desc, count * WL_D_SIZE), .index_crc = crc32c(0, p + WL_B_HEADER, h->index_len),
		.segment = wl_segment_of(c->w, s->pos),
	};
	memmove(p + wl_batch_desc_off(h), desc, count * WL_D_SIZE);
	memset(p + used, 0, h->length - used);
	wl_bhead_encode(h, &c->w->sb.uuid, p);
	return check_content(c, h, p);
}

/* The batch that was open, or what one held before a group began in it. */
static int load_open(struct completion *c, uint64_t seq, const struct wl_relic_slot *s, uint8_t *p, struct wl_bhead *h)
{
	struct wlog *w = c->w;
	uint64_t fill = c->cut ? c->head.group_fill : c->head.fill;
	uint64_t count = fill >> 32, payload = (uint32_t)fill, most = min(w->sb.seg_size, WL_MAX_BATCH);
	int r = 0;

	if (count > WL_MAX_BATCH / WL_D_SIZE || WL_B_HEADER + payload + count * WL_D_SIZE > most)
		return bad(c, "is larger than a batch");
	r = check_place(c, seq, s, align_up(WL_B_HEADER + payload + count * WL_D_SIZE, WL_BLOCK));
	if (r < 0)
		return r;
	if (s->length) {
		/* Sealed since, as a part of the group: its descriptors are behind its data. */
		r = load_sealed(c, seq, s, p, h);
		if (r == 0 && (h->count < count || h->payload < payload || h->index_len > payload))
			r = bad(c, "has fewer records than it had");
		return r < 0 ? r : seal(c, seq, s, fill, p, p + wl_batch_desc_off(h), h);
	}
	if (c->head.open_index > payload || c->head.open_index > WL_MAX_INDEX)
		return bad(c, "has an impossible index");
	if (seq != c->first && c->head.open_prev != c->nonce)
		return bad(c, "does not name the batch before it");
	h->index_len = c->head.open_index;
	h->prev = c->head.open_prev;
	r = fetch(w, c->layout.ring + (uint64_t)s->off * WL_BLOCK, p, WL_B_HEADER + payload);
	if (r == 0)
		r = fetch(w, c->layout.desc, w->desc, count * WL_D_SIZE);
	return r < 0 ? r : seal(c, seq, s, fill, p, w->desc, h);
}

static int load(struct completion *c, uint64_t seq, uint8_t *p, struct wl_relic_slot *ret, struct wl_bhead *h)
{
	int r = fetch(c->w, WL_BLOCK + seq % c->head.slots * sizeof(*ret), ret, sizeof(*ret));

	c->what = "cannot be read";
	if (r == 0)
		r = seq == c->last && (c->cut || !ret->length) ? load_open(c, seq, ret, p, h) : load_sealed(c, seq, ret, p, h);
	if (r < 0)
		return r;
	if (seq < c->last && !ret->length)
		return bad(c, "is not whole");
	c->nonce = h->nonce;
	c->end = ret->pos + h->length;
	return 0;
}

/* Which batches there are, from the head alone. */
static int find_range(struct completion *c, uint64_t size)
{
	const struct wl_relic_head *h = &c->head;

	if (h->mem_size < WL_MEM_MIN || h->mem_size > 1ull << 40 || !is_aligned(h->mem_size, WL_BLOCK))
		return bad(c, "says an impossible size");
	c->layout = wl_relic_layout(h->mem_size);
	if (h->slots != c->layout.slots || size < c->layout.size)
		return bad(c, "says a size that it does not have");
	if (h->last < h->written || h->last - h->written >= h->slots || h->written == UINT64_MAX)
		return bad(c, "says impossible numbers");
	if (h->written == h->last)
		return 0;	/* nothing, or it is in the log since an open that went no further */
	/* What the superblock knows to be durable is. */
	c->first = max(h->written, c->w->sb.durable_seq) + 1;
	c->last = h->last;
	if (h->group_seq && h->group_seq <= h->last) {
		if (h->group_seq <= h->written)
			return bad(c, "says that a group began where it cannot have");
		c->cut = h->group_fill >> 32 != 0;
		c->last = c->cut ? h->group_seq : h->group_seq - 1;
	} else if (c->first <= c->last) {
		struct wl_relic_slot s;
		int r = fetch(c->w, WL_BLOCK + h->last % h->slots * sizeof(s), &s, sizeof(s));

		if (r < 0)
			return r;
		c->last -= !s.length && h->fill >> 32 == 0;	/* opened, and nothing put in */
	}
	return 0;
}

/* A side that was in sync until now and is not there must not pass for one that has these batches. */
static co_fn int co_tell_missing_sides(struct wlog *w)
{
	for (unsigned i = 0; i < w->dev.n; i++) {
		if (!w->dev.in_sync[i] && w->sb.side_state[i] == WL_SIDE_IN_SYNC)
			return co_wl_checkpoint(w);
	}
	return 0;
}

static co_fn int co_write_batches(struct completion *c, struct err *err)
{
	struct wlog *w = c->w;
	struct wl_relic_slot s;
	struct wl_bhead h;
	int r = co_tell_missing_sides(w);

	for (uint64_t seq = c->first; seq <= c->last && r == 0; seq++) {
		r = load(c, seq, w->clean_buf, &s, &h);
		if (r == 0)
			r = co_wl_dev_write(w, s.pos, w->clean_buf, h.length);
		/* What is left out stays so: with the last one in the same store, or the next open would not understand what it finds. */
		if (r == 0)
			r = store_written(w, seq == c->last ? c->head.last : seq);
	}
	if (r < 0)
		return err_errno(err, r, "write log: what a killed server had acknowledged and not written yet cannot be written to the log; it stays in %s, and is "
				 "written when the log is opened next", w->relic.path);
	log_info("write log: %llu batches that a killed server had not written yet are in the log now", (unsigned long long)(c->last + 1 - c->first));
	return 0;
}

static co_fn int co_complete(struct completion *c, uint64_t size, struct err *err)
{
	struct wlog *w = c->w;
	struct wl_relic_slot s;
	struct wl_bhead h = { 0 };
	uint64_t seq = 0;
	int r = find_range(c, size);

	for (seq = c->first; seq <= c->last && r == 0; seq++)
		r = load(c, seq, w->clean_buf, &s, &h);
	if (r == 0)
		return c->first <= c->last ? co_write_batches(c, err) : 0;
	if (w->config.ignore_damage) {
		log_warn("write log: %s, where a killed server kept what it had not written yet, is damaged; it is given up, as was asked for", w->relic.path);
		return 0;
	}
	return err_set(err, r, "write log: %s, where a killed server kept what it had acknowledged and not written yet, is damaged: %s%s. To lose it (guests that were not "
		       "started anew may then hold what the disk does not have), remove the file or say --ignore-damage", w->relic.path,
		       seq > c->first ? "a batch " : "it ", c->what);
}

/* The device is behind who was killed: a side of the mirror that had been dropped, or an older copy. To go on would leave that server's work to nobody. */
static bool is_ahead(const struct wlog *w, const struct wl_relic_head *h)
{
	char boot[sizeof(h->boot)];

	boot_id(boot, sizeof(boot));
	return !memcmp(h->magic, magic, sizeof(magic)) && h->version == WL_RELIC_VERSION && uuid_equal(&h->log, &w->sb.uuid) &&
	       !memcmp(h->boot, boot, sizeof(boot)) && h->generation > w->sb.generation && h->last != h->written && !w->config.ignore_damage;
}

/* Does it belong to the log as it is now? */
static bool is_current(struct wlog *w, const struct wl_relic_head *h)
{
	char boot[sizeof(h->boot)];
	const char *why = NULL;

	if (memcmp(h->magic, magic, sizeof(magic)))
		return false;
	boot_id(boot, sizeof(boot));
	if (h->version != WL_RELIC_VERSION)
		why = "is of another version of weir";
	else if (!uuid_equal(&h->log, &w->sb.uuid))
		why = "is of another log";
	else if (memcmp(h->boot, boot, sizeof(boot)))
		why = "is from before this machine was started";
	else if (h->generation != w->sb.generation)
		why = "is from another time than the log, which was opened elsewhere or restored since";
	else if (w->sb.flags & WL_SB_FLAG_CLEAN)
		why = "is older than the log, which was stopped in order since";
	if (why && (h->version != WL_RELIC_VERSION || h->last != h->written))
		log_warn("write log: %s %s: what it holds is not used. Guests that were not started anew since then may hold what the disk does not have", w->relic.path, why);
	return !why;
}

co_fn int co_wl_relic_complete(struct wlog *w, struct err *err)
{
	struct completion c = { .w = w, .first = 1 };
	struct wl_relic *k = &w->relic;
	const char *what = NULL;
	uint64_t size;
	int r;

	if (w->config.relic_mem) {
		snprintf(k->path, sizeof(k->path), "memory of the test");
		size = wl_relic_size(w->config.memory);
	} else if (w->config.relic_dir) {
		make_path(k->path, sizeof(k->path), w->config.relic_dir, &w->sb.uuid);
		r = co_lock_file(w, &what);
		if (r == -EBUSY)
			return err_set(err, r, "write log: %s is in use by another process; is a copy of this log open? Stop the other one", k->path);
		if (r < 0) {
			go_without(w, what, -r);
			return 0;
		}
		struct stat st;

		size = fstat(k->fd, &st) == 0 ? st.st_size : 0;
	} else {
		return 0;
	}
	if (size < sizeof(c.head) || fetch(w, 0, &c.head, sizeof(c.head)) < 0)
		return 0;
	if (is_ahead(w, &c.head))
		return err_set(err, -ESTALE, "write log: this device is older than the server that was killed on this host, whose last writes are in %s: name the other side of "
			       "the mirror, or the device that it had. To lose them, remove the file or say --ignore-damage", k->path);
	if (!is_current(w, &c.head))
		return 0;
	k->completing = true;
	r = co_complete(&c, size, err);
	k->completing = false;
	return r;
}

/* --- Keeping --- */

/* Memory for bytes [from, to) of the file, now: later there might be none, and a store would be the end of the process. */
static int take_memory(struct wl_relic *k, uint64_t from, uint64_t to)
{
	if (k->fd < 0)
		return 0;
	int r;

	do
		r = fallocate(k->fd, 0, from, to - from) < 0 ? -errno : 0;
	while (r == -EINTR);	/* work of io_uring for this thread is enough for that */
	return r;
}

/* The same for the ring, with its pages: a hundred faults cost more than one call. */
static int take_ring(struct wlog *w, uint64_t from, uint64_t to)
{
	struct wl_relic *k = &w->relic;
	uint64_t ring = wl_relic_layout(w->mem_size).ring;
	int r = take_memory(k, ring + from, ring + to);

	if (r == 0 && k->fd >= 0)
		(void)madvise((uint8_t *)k->head + ring + from, to - from, MADV_POPULATE_WRITE);
	return r;
}

static int map_file(struct wl_relic *k, uint64_t size, uint8_t **ret)
{
	/* What it held is in the log. */
	if (ftruncate(k->fd, 0) < 0 || ftruncate(k->fd, size) < 0)
		return -errno;
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, k->fd, 0);

	if (p == MAP_FAILED)
		return -errno;
	*ret = p;
	return 0;
}

void wl_relic_begin(struct wlog *w)
{
	struct wl_relic *k = &w->relic;
	struct wl_relic_layout l = wl_relic_layout(w->mem_size);
	uint64_t first = min((uint64_t)WL_RELIC_CHUNK, w->mem_size);
	uint8_t *p = w->config.relic_mem;
	int r = 0;

	if (!p && k->fd < 0)
		return;
	if (!p)
		r = map_file(k, l.size, &p);
	if (r == 0) {
		k->head = (struct wl_relic_head *)p;
		if (k->fd >= 0)
			(void)madvise(p + l.ring, w->mem_size, MADV_HUGEPAGE);
		r = take_memory(k, 0, l.ring);
		if (r == 0)
			r = take_ring(w, 0, first);
		if (r < 0) {
			munmap(p, l.size);
			k->head = NULL;
		}
	}
	if (r < 0) {
		(void)!ftruncate(k->fd, 0);
		unlink(k->path);
		go_without(w, "there is no memory for it", -r);
		return;
	}
	munmap(w->mem, w->mem_size);
	munmap(w->desc, WL_MAX_BATCH);
	w->mem = p + l.ring;
	w->desc = p + l.desc;
	k->slot = (struct wl_relic_slot *)(p + WL_BLOCK);
	k->slots = l.slots;
	k->size = l.size;
	k->reserved = first;
	k->kept = true;
	k->step = w->config.relic_step;
	k->arg = w->config.relic_arg;
	memset(k->head, 0, sizeof(*k->head));
	k->head->version = WL_RELIC_VERSION;
	k->head->slots = l.slots;
	k->head->log = w->sb.uuid;
	boot_id(k->head->boot, sizeof(k->head->boot));
	k->head->generation = w->sb.generation;
	k->head->mem_size = w->mem_size;
	k->head->written = k->head->last = w->next_seq - 1;
	uint64_t word;

	memcpy(&word, magic, sizeof(word));
	shm_publish64((uint64_t *)(void *)k->head->magic, word);
}

bool wl_relic_reserve(struct wlog *w, uint64_t end)
{
	struct wl_relic *k = &w->relic;

	if (!k->head || k->fd < 0 || end <= k->reserved)
		return true;
	uint64_t upto = min(align_up(end, WL_RELIC_CHUNK), w->mem_size);
	int r = take_ring(w, k->reserved, upto);

	if (r == 0) {
		k->reserved = upto;
		return true;
	}
	/* The rest of the ring is memory of our own; what the file holds is not to be believed any more. */
	shm_publish64((uint64_t *)(void *)k->head->magic, 0);
	unlink(k->path);
	if (mmap(w->mem + k->reserved, w->mem_size - k->reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
		wl_fail(w, -ENOMEM, "the memory of the log");
		return false;
	}
	k->reserved = w->mem_size;
	go_without(w, "there is no more memory for it", -r);
	return true;
}

void wl_relic_trim(struct wlog *w)
{
	struct wl_relic *k = &w->relic;
	uint64_t first = min((uint64_t)WL_RELIC_CHUNK, w->mem_size);

	if (!k->kept || k->fd < 0 || k->reserved <= first || rt_now_ns() - w->open_since_ns < REST_NS)
		return;
	if (madvise(w->mem + first, k->reserved - first, MADV_REMOVE) == 0)
		k->reserved = first;
}

void wl_relic_end(struct wlog *w)
{
	struct wl_relic *k = &w->relic;

	if (!k->kept)
		return;
	shm_publish64((uint64_t *)(void *)k->head->magic, 0);
	if (k->fd < 0)
		return;
	/* Confined, the file cannot be removed, but emptied. */
	(void)!ftruncate(k->fd, 0);
	unlink(k->path);
}

void wl_relic_fini(struct wlog *w)
{
	struct wl_relic *k = &w->relic;

	if (k->head) {
		if (!w->config.relic_mem)
			munmap(k->head, k->size);
		w->mem = w->desc = NULL;
		k->head = NULL;
		/* Given up on the way: nobody is to believe what it holds, and its memory goes back. */
		if (!k->kept && k->fd >= 0)
			(void)!ftruncate(k->fd, 0);
	}
	if (k->fd >= 0)
		close(k->fd);
	k->fd = -1;
}
