/* SPDX-License-Identifier: MIT */
/*
 * A split ring, device side. The invariants are in ring.h.
 */
#include "export/vhost/ring.h"

#include <errno.h>
#include <stdlib.h>

#include "util/bytes.h"
#include "util/err.h"

#define INFLIGHT_VERSION 1

/* Offsets within the parts. */
#define AVAIL_FLAGS 0
#define AVAIL_IDX 2
#define AVAIL_RING 4
#define USED_FLAGS 0
#define USED_IDX 2
#define USED_RING 4

static_assert(sizeof(struct vring_inflight_desc) == 16 && sizeof(struct vring_inflight) == 16, "shared with the next process");

int vring_map(struct vring *r, const struct vhost_memory *m, struct err *err)
{
	r->desc = r->used = r->avail = NULL;
	if (!r->num)
		return err_set(err, -EINVAL, "the ring has no size");
	if (!is_aligned(r->desc_uva, 16) || !is_aligned(r->avail_uva, 2) || !is_aligned(r->used_uva, 4))
		return err_set(err, -EINVAL, "the ring is not aligned");
	r->desc = vhost_memory_at_user(m, r->desc_uva, VRING_DESC_LEN * r->num);
	r->avail = vhost_memory_at_user(m, r->avail_uva, VRING_AVAIL_LEN(r->num));
	r->used = vhost_memory_at_user(m, r->used_uva, VRING_USED_LEN(r->num));
	/* The file's offset counts as well: memory at an odd place would make every access unaligned. */
	if (r->desc && r->avail && r->used && is_aligned((uintptr_t)r->desc, 16) && is_aligned((uintptr_t)r->avail, 2) &&
	    is_aligned((uintptr_t)r->used, 4))
		return 0;
	r->desc = r->used = r->avail = NULL;
	return err_set(err, -EFAULT, "the ring is not in the guest's memory");
}

/* --- Start --- */

static int by_counter(const void *a, const void *b, void *arg)
{
	const struct vring_inflight *f = arg;
	uint64_t x = shm_load64(&f->desc[*(const uint16_t *)a].counter), y = shm_load64(&f->desc[*(const uint16_t *)b].counter);

	return (x > y) - (x < y);
}

/* The batch whose used index was stored when the last process died has been completed. */
static int finish_batch(struct vring *r, struct err *err)
{
	struct vring_inflight *f = r->inflight;
	uint16_t n = (uint16_t)(r->used_idx - shm_load16(&f->used_idx)), at = shm_load16(&f->last_batch_head);

	if (n > r->num)
		return err_set(err, -EBADMSG, "the in-flight region does not belong to this ring: it is %u completions behind", n);
	for (; n; n--) {
		if (at >= r->num)
			return err_set(err, -EBADMSG, "the in-flight region is damaged: there is no descriptor %u", at);
		shm_store8_release(&f->desc[at].inflight, 0);
		at = shm_load16(&f->desc[at].next);
	}
	shm_store16_release(&f->used_idx, r->used_idx);
	return 0;
}

static int resume(struct vring *r, struct err *err)
{
	struct vring_inflight *f = r->inflight;
	int ret;

	if (shm_load16(&f->version) != INFLIGHT_VERSION || shm_load16(&f->desc_num) != r->num)
		return err_set(err, -EBADMSG, "the in-flight region has version %u and %u descriptors, wanted are %u and %u", f->version, f->desc_num,
			       INFLIGHT_VERSION, r->num);
	ret = finish_batch(r, err);
	if (ret < 0)
		return ret;
	for (uint32_t i = 0; i < r->num; i++) {
		if (!shm_load8(&f->desc[i].inflight))
			continue;
		r->resubmit[r->resubmit_n++] = (uint16_t)i;
		r->counter = max(r->counter, shm_load64(&f->desc[i].counter));
	}
	qsort_r(r->resubmit, r->resubmit_n, sizeof(*r->resubmit), by_counter, f);
	/* What the front end gave was at most a guess: the process that knew better is dead. */
	r->last_avail = (uint16_t)(r->used_idx + r->resubmit_n);
	return 0;
}

static void begin_region(struct vring *r)
{
	struct vring_inflight *f = r->inflight;

	memset(f, 0, VRING_INFLIGHT_LEN(r->num));
	f->desc_num = (uint16_t)r->num;
	f->used_idx = r->used_idx;
	shm_store16_release(&f->version, INFLIGHT_VERSION);
}

int vring_start(struct vring *r, struct err *err)
{
	int ret = 0;

	free(r->busy);
	free(r->resubmit);
	r->busy = calloc(r->num, sizeof(*r->busy));
	r->resubmit = calloc(r->num, sizeof(*r->resubmit));
	r->resubmit_n = r->resubmit_at = 0;
	r->counter = 0;
	r->armed = r->call_owed = false;
	if (!r->busy || !r->resubmit)
		return err_set(err, -ENOMEM, "no memory for a ring");
	r->used_idx = r->used_next = le16toh(shm_load16(r->used + USED_IDX));
	if (r->inflight) {
		if (shm_load16(&r->inflight->version))
			ret = resume(r, err);
		else
			begin_region(r);
	}
	if (!ret && !r->event_idx)
		shm_store16(r->used + USED_FLAGS, htole16(VRING_NO_NOTIFY));
	return ret;
}

/* What is not an element: flags and index, and where the device wants to be kicked. */
static void log_words(struct vring *r, struct vhost_log *log)
{
	vhost_log_mark(log, r->log_addr, USED_RING);
	vhost_log_mark(log, r->log_addr + USED_RING + 8ull * r->num, 2);
}

void vring_stop(struct vring *r, struct vhost_log *log)
{
	/* vring_arm() and vring_disarm() leave that to us: a mark is in time as long as the ring runs. */
	if (log && r->log_used)
		log_words(r, log);
	/* All is told: a region that stays with the front end must not be taken for that of a process that died. */
	if (r->inflight)
		shm_store16_release(&r->inflight->version, 0);
	free(r->busy);
	free(r->resubmit);
	r->busy = NULL;
	r->resubmit = NULL;
	r->resubmit_n = r->resubmit_at = 0;
	r->desc = r->used = r->avail = NULL;
}

void vring_fini(struct vring *r)
{
	free(r->busy);
	free(r->resubmit);
	r->busy = NULL;
	r->resubmit = NULL;
}

/* --- Requests --- */

bool vring_has_work(const struct vring *r)
{
	return r->resubmit_at < r->resubmit_n || le16toh(shm_load16(r->avail + AVAIL_IDX)) != r->last_avail;
}

static int take_desc(struct vring *r, uint16_t head, struct err *err)
{
	if (head >= r->num)
		return err_set(err, -EPROTO, "the available ring names descriptor %u of %u", head, r->num);
	if (r->busy[head])
		return err_set(err, -EPROTO, "descriptor %u is offered again while its request is in flight", head);
	r->busy[head] = 1;
	return 1;
}

int vring_pop(struct vring *r, uint16_t *ret_head, struct err *err)
{
	uint16_t avail, head;
	int ret;

	if (r->resubmit_at < r->resubmit_n) {
		*ret_head = r->resubmit[r->resubmit_at++];
		return take_desc(r, *ret_head, err);
	}
	avail = le16toh(shm_load16_acquire(r->avail + AVAIL_IDX));
	if (avail == r->last_avail)
		return 0;
	if ((uint16_t)(avail - r->last_avail) > r->num)
		return err_set(err, -EPROTO, "the available index jumps from %u to %u in a ring of %u", r->last_avail, avail, r->num);
	head = le16toh(shm_load16(r->avail + AVAIL_RING + 2 * (r->last_avail & (r->num - 1))));
	ret = take_desc(r, head, err);
	if (ret < 0)
		return ret;
	if (r->inflight) {
		shm_store64(&r->inflight->desc[head].counter, ++r->counter);
		shm_store8_release(&r->inflight->desc[head].inflight, 1);
	}
	r->last_avail++;
	*ret_head = head;
	return 1;
}

/* --- Chains --- */

struct desc {
	uint64_t addr;
	uint32_t len;
	uint16_t flags, next;
};

/* A walk over one request. */
struct walk {
	struct vhost_memory *m;
	struct iovec *iov;
	int nout, nin;
	unsigned seen;		/* descriptors */
	struct err *err;
};

static struct desc decode(uint64_t a, uint64_t b)
{
	a = le64toh(a);
	b = le64toh(b);
	return (struct desc){ a, (uint32_t)b, (uint16_t)(b >> 32), (uint16_t)(b >> 48) };
}

/* One buffer; where it crosses into the next region it becomes several segments. */
static int add_buffer(struct walk *w, const struct desc *d)
{
	uint64_t at = d->addr, left = d->len;
	bool write = d->flags & VRING_F_WRITE;

	if (!left)
		return err_set(w->err, -EPROTO, "a buffer of no bytes");
	if (!write && w->nin)
		return err_set(w->err, -EPROTO, "a buffer to read from behind one to write to");
	if (at > UINT64_MAX - left)
		return err_set(w->err, -EPROTO, "a buffer at 0x%llx that wraps", (unsigned long long)at);
	while (left) {
		uint64_t part = left;
		void *p = vhost_memory_at(w->m, at, &part);

		if (!p)
			return err_set(w->err, -EPROTO, "a buffer at 0x%llx of %u bytes is not in the guest's memory", (unsigned long long)d->addr, d->len);
		if (w->nout + w->nin == VRING_SEGMENTS_MAX)
			return err_set(w->err, -EPROTO, "a request of more than %u buffers", VRING_SEGMENTS_MAX);
		w->iov[w->nout + w->nin] = (struct iovec){ p, part };
		if (write)
			w->nin++;
		else
			w->nout++;
		at += part;
		left -= part;
	}
	return 0;
}

static int walk_indirect(struct walk *w, const struct desc *table)
{
	uint32_t n = table->len / VRING_DESC_LEN, at = 0;
	int ret;

	if (!n || table->len % VRING_DESC_LEN || n > 65536)
		return err_set(w->err, -EPROTO, "an indirect table of %u bytes", table->len);
	if (table->addr > UINT64_MAX - table->len)
		return err_set(w->err, -EPROTO, "an indirect table at 0x%llx that wraps", (unsigned long long)table->addr);
	for (;;) {
		uint64_t raw[2];
		struct desc d;

		if (w->seen++ >= VRING_SEGMENTS_MAX)
			return err_set(w->err, -EPROTO, "a request of more than %u descriptors", VRING_SEGMENTS_MAX);
		if (!vhost_memory_read(w->m, table->addr + (uint64_t)at * VRING_DESC_LEN, raw, sizeof(raw)))
			return err_set(w->err, -EPROTO, "an indirect table at 0x%llx is not in the guest's memory", (unsigned long long)table->addr);
		d = decode(raw[0], raw[1]);
		if (d.flags & VRING_F_INDIRECT)
			return err_set(w->err, -EPROTO, "an indirect table within an indirect table");
		ret = add_buffer(w, &d);
		if (ret < 0 || !(d.flags & VRING_F_NEXT))
			return ret;
		at = d.next;
		if (at >= n)
			return err_set(w->err, -EPROTO, "an indirect table of %u descriptors names descriptor %u", n, at);
	}
}

int vring_chain(const struct vring *r, struct vhost_memory *m, uint16_t head, struct iovec *iov, int *nout, int *nin, struct err *err)
{
	struct walk w = { .m = m, .iov = iov, .err = err };
	uint16_t at = head;
	int ret = 0;

	for (;;) {
		const char *p = r->desc + VRING_DESC_LEN * at;
		struct desc d = decode(shm_load64(p), shm_load64(p + 8));

		if (w.seen++ >= r->num)
			return err_set(err, -EPROTO, "a loop of descriptors");
		if (d.flags & VRING_F_INDIRECT) {
			if (!r->indirect)
				return err_set(err, -EPROTO, "an indirect table, which was not negotiated");
			if (d.flags & VRING_F_NEXT)
				return err_set(err, -EPROTO, "a descriptor that is indirect and goes on");
			ret = walk_indirect(&w, &d);
			break;
		}
		ret = add_buffer(&w, &d);
		if (ret < 0 || !(d.flags & VRING_F_NEXT))
			break;
		at = d.next;
		if (at >= r->num)
			return err_set(err, -EPROTO, "a descriptor names descriptor %u of %u", at, r->num);
	}
	*nout = w.nout;
	*nin = w.nin;
	return ret;
}

/* --- Completions --- */

void vring_push(struct vring *r, uint16_t head, uint32_t written)
{
	char *elem = r->used + USED_RING + 8 * (r->used_next & (r->num - 1));
	struct vring_inflight *f = r->inflight;

	shm_store32(elem, htole32(head));
	shm_store32(elem + 4, htole32(written));
	if (f) {
		shm_store16(&f->desc[head].next, shm_load16(&f->last_batch_head));
		shm_store16_release(&f->last_batch_head, head);
	}
	r->busy[head] = 0;
	r->used_next++;
}

static void clear_batch(struct vring *r, uint16_t from)
{
	struct vring_inflight *f = r->inflight;

	/* By the used ring as this process has written it, not by the list: the region may be changed by others. */
	for (; from != r->used_next; from++) {
		const char *elem = r->used + USED_RING + 8 * (from & (r->num - 1));
		uint32_t head = le32toh(shm_load32(elem));

		if (head < r->num)
			shm_store8_release(&f->desc[head].inflight, 0);
	}
	shm_store16_release(&f->used_idx, r->used_next);
}

static void log_used(struct vring *r, struct vhost_log *log, uint16_t from)
{
	for (; from != r->used_next; from++)
		vhost_log_mark(log, r->log_addr + USED_RING + 8 * (from & (r->num - 1)), 8);
	log_words(r, log);
}

bool vring_publish(struct vring *r, struct vhost_log *log)
{
	uint16_t old = r->used_idx, event;

	if (old == r->used_next)
		return false;
	shm_store16_release(r->used + USED_IDX, htole16(r->used_next));
	r->used_idx = r->used_next;
	if (r->inflight)
		clear_batch(r, old);
	if (log && r->log_used)
		log_used(r, log, old);
	/* The driver may write where it wants to be called and then look at the index: one of the two sides sees the other. */
	shm_fence();
	if (!r->event_idx)
		return !(le16toh(shm_load16(r->avail + AVAIL_FLAGS)) & VRING_NO_INTERRUPT);
	event = le16toh(shm_load16(r->avail + AVAIL_RING + 2 * r->num));
	return (uint16_t)(r->used_next - event - 1) < (uint16_t)(r->used_next - old);
}

void vring_arm(struct vring *r)
{
	if (r->event_idx)
		shm_store16(r->used + USED_RING + 8 * r->num, htole16(r->last_avail));
	else if (!r->armed)
		shm_store16(r->used + USED_FLAGS, 0);
	r->armed = true;
}

void vring_disarm(struct vring *r)
{
	if (r->armed && !r->event_idx)
		shm_store16(r->used + USED_FLAGS, htole16(VRING_NO_NOTIFY));
	r->armed = false;
}
