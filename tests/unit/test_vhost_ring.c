/* SPDX-License-Identifier: MIT */
/* Split rings in the memory of a guest that may be hostile, and the in-flight region. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "export/vhost/ring.h"
#include "lib/test.h"
#include "util/bytes.h"
#include "util/err.h"

#define NUM 16u
#define PART 65536u		/* bytes of each region */
#define GPA 0x40000000ull
#define HOLE 0x80000000ull	/* a third region, apart from the others */

/* Two neighbouring regions and one apart; the ring lies at the beginning of the first. */
struct guest {
	int fd;
	char *mem;
	struct vhost_memory *m;
	struct vring r;
	struct iovec iov[VRING_SEGMENTS_MAX];
	int nout, nin;
	struct err err;
	char *region;
};

static void add(struct guest *g, uint64_t gpa, uint64_t at)
{
	struct vhost_user_region d = { gpa, PART, (uintptr_t)g->mem + at, at };
	struct vhost_region *r;
	struct vhost_memory *more;

	CHECK_EQ(vhost_region_map(&d, g->fd, &r, &g->err), 0);
	CHECK_EQ(vhost_memory_add(g->m, r, &more, &g->err), 0);
	vhost_region_put(r);
	vhost_memory_put(g->m);
	g->m = more;
}

static char *at_gpa(struct guest *g, uint64_t gpa)
{
	return g->mem + (gpa >= HOLE ? 2 * PART + (gpa - HOLE) : gpa - GPA);
}

static void begin(struct guest *g)
{
	*g = (struct guest){ .fd = memfd_create("guest", 0) };
	CHECK(!ftruncate(g->fd, 3 * PART));
	g->mem = mmap(NULL, 3 * PART, PROT_READ | PROT_WRITE, MAP_SHARED, g->fd, 0);
	CHECK(g->mem != MAP_FAILED);
	add(g, HOLE, 2 * PART);
	add(g, GPA + PART, PART);
	add(g, GPA, 0);
	g->r = (struct vring){ .num = NUM, .desc_uva = (uintptr_t)g->mem, .avail_uva = (uintptr_t)g->mem + 4096, .used_uva = (uintptr_t)g->mem + 8192,
			       .event_idx = true, .indirect = true };
	g->region = calloc(1, VRING_INFLIGHT_LEN(NUM));
	CHECK_EQ(vring_map(&g->r, g->m, &g->err), 0);
	CHECK_EQ(vring_start(&g->r, &g->err), 0);
}

static void end(struct guest *g)
{
	vring_fini(&g->r);
	vhost_memory_put(g->m);
	munmap(g->mem, 3 * PART);
	close(g->fd);
	free(g->region);
}

static void set_desc(struct guest *g, uint64_t table, unsigned i, uint64_t addr, uint32_t len, uint16_t flags, uint16_t next)
{
	char *p = at_gpa(g, table + 16 * i);

	put_le64(p, addr);
	put_le32(p + 8, len);
	put_le16(p + 12, flags);
	put_le16(p + 14, next);
}

static void offer(struct guest *g, uint16_t index, uint16_t head)
{
	put_le16(g->mem + 4096 + 4 + 2 * (index % NUM), head);
	put_le16(g->mem + 4096 + 2, index + 1);
}

static int chain(struct guest *g, uint16_t head)
{
	err_clear(&g->err);
	return vring_chain(&g->r, g->m, head, g->iov, &g->nout, &g->nin, &g->err);
}

static void refused(struct guest *g, uint16_t head, const char *why)
{
	CHECK_EQ(chain(g, head), -EPROTO);
	if (!strstr(g->err.msg, why))
		test_fail("refused with \"%s\", wanted \"%s\"", g->err.msg, why);
}

static void a_chain_is_described(void)
{
	struct guest g;

	begin(&g);
	set_desc(&g, GPA, 0, GPA + 12288, 16, VRING_F_NEXT, 5);
	set_desc(&g, GPA, 5, GPA + 20480, 4096, VRING_F_NEXT | VRING_F_WRITE, 2);
	set_desc(&g, GPA, 2, HOLE + PART - 1, 1, VRING_F_WRITE, 0);
	CHECK_EQ(chain(&g, 0), 0);
	CHECK_EQ(g.nout, 1);
	CHECK_EQ(g.nin, 2);
	CHECK_EQ(g.iov[1].iov_len, 4096);
	CHECK_EQ(vhost_memory_guest(g.m, g.iov[1].iov_base), GPA + 20480);
	CHECK_EQ(vhost_memory_guest(g.m, g.iov[2].iov_base), HOLE + PART - 1);
	end(&g);
}

static void a_buffer_across_neighbouring_regions_is_cut(void)
{
	struct guest g;

	begin(&g);
	set_desc(&g, GPA, 0, GPA + PART - 100, 300, VRING_F_WRITE, 0);
	CHECK_EQ(chain(&g, 0), 0);
	CHECK_EQ(g.nin, 2);
	CHECK_EQ(g.iov[0].iov_len, 100);
	CHECK_EQ(g.iov[1].iov_len, 200);
	end(&g);
}

static void buffers_outside_of_memory_are_refused(void)
{
	static const struct {
		uint64_t addr;
		uint32_t len;
	} bad[] = {
		{ 0, 1 }, { GPA - 1, 1 }, { GPA - 1, 2 }, { GPA + 2 * PART, 1 }, { GPA + 2 * PART - 1, 2 }, { HOLE - 1, 1 }, { HOLE + PART, 1 },
		{ HOLE, PART + 1 }, { GPA, UINT32_MAX }, { UINT64_MAX, 1 },
	};
	struct guest g;

	begin(&g);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		set_desc(&g, GPA, 0, bad[i].addr, bad[i].len, 0, 0);
		refused(&g, 0, bad[i].addr == UINT64_MAX ? "" : "not in the guest's memory");
	}
	set_desc(&g, GPA, 0, UINT64_MAX - 3, 100, 0, 0);
	refused(&g, 0, "wraps");
	end(&g);
}

static void loops_and_wrong_chains_are_refused(void)
{
	struct guest g;

	begin(&g);
	set_desc(&g, GPA, 0, GPA, 16, VRING_F_NEXT, 1);
	set_desc(&g, GPA, 1, GPA, 16, VRING_F_NEXT, 0);
	refused(&g, 0, "loop");
	set_desc(&g, GPA, 1, GPA, 16, VRING_F_NEXT, 1);
	refused(&g, 0, "loop");
	set_desc(&g, GPA, 1, GPA, 16, VRING_F_NEXT, NUM);
	refused(&g, 0, "names descriptor 16 of 16");
	set_desc(&g, GPA, 1, GPA, 0, 0, 0);
	refused(&g, 0, "no bytes");
	set_desc(&g, GPA, 0, GPA, 16, VRING_F_NEXT | VRING_F_WRITE, 1);
	set_desc(&g, GPA, 1, GPA, 16, 0, 0);
	refused(&g, 0, "read from behind");
	end(&g);
}

static void indirect_tables(void)
{
	struct guest g;
	uint64_t t = GPA + PART - 32;	/* its third descriptor lies in the next region */

	begin(&g);
	set_desc(&g, GPA, 3, t, 48, VRING_F_INDIRECT, 0);
	set_desc(&g, t, 0, GPA + 12288, 16, VRING_F_NEXT, 2);
	set_desc(&g, t, 2, GPA + 16384, 1, VRING_F_WRITE, 0);
	CHECK_EQ(chain(&g, 3), 0);
	CHECK_EQ(g.nout, 1);
	CHECK_EQ(g.nin, 1);
	/* behind direct descriptors it is fine, too */
	set_desc(&g, GPA, 0, GPA + 12288, 8, VRING_F_NEXT, 3);
	CHECK_EQ(chain(&g, 0), 0);
	CHECK_EQ(g.nout, 2);
	set_desc(&g, t, 2, t, 16, VRING_F_INDIRECT, 0);
	refused(&g, 3, "within an indirect table");
	set_desc(&g, t, 2, GPA, 16, VRING_F_NEXT, 0);
	refused(&g, 3, "descriptors");	/* a loop: cut by the limit */
	set_desc(&g, t, 2, GPA, 16, VRING_F_NEXT, 3);
	refused(&g, 3, "of 3 descriptors names descriptor 3");
	set_desc(&g, GPA, 3, t, 47, VRING_F_INDIRECT, 0);
	refused(&g, 3, "indirect table of 47");
	set_desc(&g, GPA, 3, t, 0, VRING_F_INDIRECT, 0);
	refused(&g, 3, "indirect table of 0");
	set_desc(&g, GPA, 3, UINT64_MAX - 15, 48, VRING_F_INDIRECT, 0);
	refused(&g, 3, "wraps");
	set_desc(&g, GPA, 3, GPA + 2 * PART, 48, VRING_F_INDIRECT, 0);
	refused(&g, 3, "not in the guest's memory");
	set_desc(&g, GPA, 3, t, 48, VRING_F_INDIRECT | VRING_F_NEXT, 0);
	refused(&g, 3, "goes on");
	g.r.indirect = false;
	set_desc(&g, GPA, 3, t, 48, VRING_F_INDIRECT, 0);
	refused(&g, 3, "not negotiated");
	end(&g);
}

static void wrong_indexes_are_refused(void)
{
	struct guest g;
	uint16_t head;

	begin(&g);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), 0);
	offer(&g, 0, NUM);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), -EPROTO);
	CHECK(strstr(g.err.msg, "names descriptor 16 of 16"));
	err_clear(&g.err);
	offer(&g, 0, 3);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), 1);
	CHECK_EQ(head, 3);
	offer(&g, 1, 3);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), -EPROTO);
	CHECK(strstr(g.err.msg, "in flight"));
	err_clear(&g.err);
	put_le16(g.mem + 4096 + 2, 1 + NUM + 1);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), -EPROTO);
	CHECK(strstr(g.err.msg, "jumps"));
	end(&g);
}

static void rings_outside_of_memory_are_refused(void)
{
	struct guest g;
	struct vring r;

	begin(&g);
	r = g.r;
	r.desc_uva = (uintptr_t)g.mem + 8;
	CHECK_EQ(vring_map(&r, g.m, &g.err), -EINVAL);
	r.desc_uva = 16;
	CHECK(vring_map(&r, g.m, NULL) < 0);
	/* a ring must not cross regions: they need not be neighbours in our memory */
	r.desc_uva = (uintptr_t)g.mem + PART - 16;
	CHECK(vring_map(&r, g.m, NULL) < 0);
	r.desc_uva = UINT64_MAX & ~15ull;
	CHECK(vring_map(&r, g.m, NULL) < 0);
	end(&g);
}

static void regions_that_overlap_or_wrap_are_refused(void)
{
	struct guest g;
	struct vhost_user_region d;
	struct vhost_region *r;
	struct vhost_memory *m;

	begin(&g);
	d = (struct vhost_user_region){ GPA + 4096, 4096, 0, 0 };
	CHECK_EQ(vhost_region_map(&d, g.fd, &r, &g.err), 0);
	CHECK_EQ(vhost_memory_add(g.m, r, &m, &g.err), -EEXIST);
	vhost_region_put(r);
	d = (struct vhost_user_region){ UINT64_MAX - 100, 4096, 0, 0 };
	CHECK_EQ(vhost_region_map(&d, g.fd, &r, NULL), -EINVAL);
	d = (struct vhost_user_region){ GPA, 0, 0, 0 };
	CHECK_EQ(vhost_region_map(&d, g.fd, &r, NULL), -EINVAL);
	d = (struct vhost_user_region){ GPA, 4 * PART, 0, 0 };
	CHECK_EQ(vhost_region_map(&d, g.fd, &r, NULL), -EINVAL);
	d = (struct vhost_user_region){ GPA, PART, 0, 3 * PART };
	CHECK_EQ(vhost_region_map(&d, g.fd, &r, NULL), -EINVAL);
	d = (struct vhost_user_region){ GPA, PART, 0, UINT64_MAX - 4095 };
	CHECK_EQ(vhost_region_map(&d, g.fd, &r, NULL), -EINVAL);
	end(&g);
}

static void the_guest_is_called_only_when_it_asked(void)
{
	struct guest g;
	uint16_t head;

	begin(&g);
	for (uint16_t i = 0; i < 3; i++) {
		offer(&g, i, i);
		CHECK_EQ(vring_pop(&g.r, &head, &g.err), 1);
	}
	put_le16(g.mem + 4096 + 4 + 2 * NUM, 1);	/* used_event: when the second has completed */
	vring_push(&g.r, 0, 1);
	CHECK(!vring_publish(&g.r, NULL));
	vring_push(&g.r, 1, 1);
	CHECK(vring_publish(&g.r, NULL));
	vring_push(&g.r, 2, 1);
	CHECK(!vring_publish(&g.r, NULL));
	CHECK(!vring_publish(&g.r, NULL));
	CHECK_EQ(get_le16(g.mem + 8192 + 2), 3);
	/* without the event index: a flag */
	g.r.event_idx = false;
	offer(&g, 3, 0);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), 1);
	vring_push(&g.r, 0, 1);
	CHECK(vring_publish(&g.r, NULL));
	put_le16(g.mem + 4096, VRING_NO_INTERRUPT);
	offer(&g, 4, 0);
	CHECK_EQ(vring_pop(&g.r, &head, &g.err), 1);
	vring_push(&g.r, 0, 1);
	CHECK(!vring_publish(&g.r, NULL));
	end(&g);
}

/* --- The in-flight region --- */

/* The next process: only the region and the guest's memory are left. */
static void die(struct guest *g)
{
	struct vring next = { .num = NUM, .desc_uva = g->r.desc_uva, .avail_uva = g->r.avail_uva, .used_uva = g->r.used_uva, .event_idx = true };

	next.inflight = (void *)g->region;
	/* what a front end that has lost its server can give as the base */
	next.last_avail = get_le16(g->mem + 8192 + 2);
	vring_fini(&g->r);
	g->r = next;
	CHECK_EQ(vring_map(&g->r, g->m, &g->err), 0);
}

static void begin_with_region(struct guest *g)
{
	begin(g);
	vring_fini(&g->r);
	g->r.inflight = (void *)g->region;
	CHECK_EQ(vring_start(&g->r, &g->err), 0);
}

static void pop_is(struct guest *g, int want)
{
	uint16_t head;
	int ret = vring_pop(&g->r, &head, &g->err);

	CHECK_EQ(ret, want >= 0);
	if (want >= 0)
		CHECK_EQ(head, want);
}

static void requests_in_flight_come_again_in_order(void)
{
	static const uint16_t heads[] = { 7, 2, 9, 0, 4 };
	struct guest g;

	begin_with_region(&g);
	for (uint16_t i = 0; i < 5; i++) {
		offer(&g, i, heads[i]);
		pop_is(&g, heads[i]);
	}
	/* none has completed, and one is new */
	offer(&g, 5, 11);
	die(&g);
	CHECK_EQ(vring_start(&g.r, &g.err), 0);
	for (int i = 0; i < 5; i++)
		pop_is(&g, heads[i]);
	pop_is(&g, 11);
	pop_is(&g, -1);
	/* two complete out of order; dies again */
	vring_push(&g.r, 9, 1);
	vring_push(&g.r, 7, 1);
	vring_publish(&g.r, NULL);
	die(&g);
	CHECK_EQ(vring_start(&g.r, &g.err), 0);
	CHECK_EQ(g.r.last_avail, 6);
	pop_is(&g, 2);
	pop_is(&g, 0);
	pop_is(&g, 4);
	pop_is(&g, 11);
	pop_is(&g, -1);
	end(&g);
}

static void the_first_request_alone_comes_again(void)
{
	struct guest g;

	begin_with_region(&g);
	offer(&g, 0, 0);
	pop_is(&g, 0);
	die(&g);
	CHECK_EQ(vring_start(&g.r, &g.err), 0);
	pop_is(&g, 0);
	pop_is(&g, -1);
	vring_push(&g.r, 0, 1);
	vring_publish(&g.r, NULL);
	die(&g);
	CHECK_EQ(vring_start(&g.r, &g.err), 0);
	pop_is(&g, -1);
	end(&g);
}

/* Dies between any two of the stores that a batch of completions makes: each request comes again or was seen as used, and never both. */
static void a_death_within_a_batch_neither_loses_nor_repeats(void)
{
	for (int cut = 0; cut < 6; cut++) {
		struct vring_inflight *f;
		struct guest g;

		begin_with_region(&g);
		f = (void *)g.region;
		for (uint16_t i = 0; i < 4; i++) {
			offer(&g, i, (uint16_t)(i + 3));
			pop_is(&g, i + 3);
		}
		if (cut >= 1)
			vring_push(&g.r, 4, 1);
		if (cut >= 2)
			vring_push(&g.r, 3, 1);
		if (cut >= 3) {		/* the index is out, nothing else */
			put_le16(g.mem + 8192 + 2, 2);
			if (cut >= 4)
				f->desc[4].inflight = 0;
			if (cut >= 5)
				f->desc[3].inflight = 0;
		}
		die(&g);
		CHECK_EQ(vring_start(&g.r, &g.err), 0);
		if (cut < 3) {
			pop_is(&g, 3);
			pop_is(&g, 4);
		}
		pop_is(&g, 5);
		pop_is(&g, 6);
		pop_is(&g, -1);
		end(&g);
	}
}

static void a_wrong_region_is_refused(void)
{
	struct vring_inflight *f;
	struct guest g;

	begin_with_region(&g);
	f = (void *)g.region;
	offer(&g, 0, 0);
	pop_is(&g, 0);
	f->used_idx = 100;
	die(&g);
	CHECK_EQ(vring_start(&g.r, &g.err), -EBADMSG);
	err_clear(&g.err);
	f->used_idx = 0xffff;
	f->last_batch_head = NUM;
	CHECK_EQ(vring_start(&g.r, &g.err), -EBADMSG);
	err_clear(&g.err);
	f->desc_num = 8;
	CHECK_EQ(vring_start(&g.r, &g.err), -EBADMSG);
	f->desc_num = NUM;
	f->version = 2;
	CHECK_EQ(vring_start(&g.r, &g.err), -EBADMSG);
	end(&g);
}

static void after_an_orderly_stop_the_region_is_new(void)
{
	struct guest g;

	begin_with_region(&g);
	offer(&g, 0, 5);
	pop_is(&g, 5);
	vring_push(&g.r, 5, 1);
	vring_publish(&g.r, NULL);
	vring_stop(&g.r, NULL);
	/* the guest boots anew with the same region */
	memset(g.mem + 4096, 0, 8192);
	die(&g);
	CHECK_EQ(vring_start(&g.r, &g.err), 0);
	pop_is(&g, -1);
	end(&g);
}

/* The copy of a guest that moves must have what was written last, also if nothing was published after it. */
static void what_was_asked_of_the_driver_is_logged(void)
{
	enum { USED_PAGE = 8192 / 4096, LAST_PAGE = USED_PAGE + 1 };
	uint8_t bits[1] = { 0 };
	struct vhost_log log = { .bits = bits, .size = sizeof(bits) };
	struct guest g;

	for (int i = 0; i < 2; i++) {
		begin(&g);
		g.r.event_idx = i;
		g.r.log_used = true;
		/* as if the ring ended on the next page, with the field that asks for kicks */
		g.r.log_addr = USED_PAGE * 4096 + 4096 - (4 + 8 * NUM);
		offer(&g, 0, 3);
		pop_is(&g, 3);
		vring_push(&g.r, 3, 1);
		vring_publish(&g.r, &log);
		CHECK_EQ(bits[0], 1 << USED_PAGE | 1 << LAST_PAGE);
		bits[0] = 0;
		vring_arm(&g.r);
		vring_stop(&g.r, &log);
		CHECK_EQ(bits[0], 1 << USED_PAGE | 1 << LAST_PAGE);
		bits[0] = 0;
		end(&g);
	}
}

int main(void)
{
	RUN(a_chain_is_described);
	RUN(a_buffer_across_neighbouring_regions_is_cut);
	RUN(buffers_outside_of_memory_are_refused);
	RUN(loops_and_wrong_chains_are_refused);
	RUN(indirect_tables);
	RUN(wrong_indexes_are_refused);
	RUN(rings_outside_of_memory_are_refused);
	RUN(regions_that_overlap_or_wrap_are_refused);
	RUN(the_guest_is_called_only_when_it_asked);
	RUN(requests_in_flight_come_again_in_order);
	RUN(the_first_request_alone_comes_again);
	RUN(a_death_within_a_batch_neither_loses_nor_repeats);
	RUN(a_wrong_region_is_refused);
	RUN(after_an_orderly_stop_the_region_is_new);
	RUN(what_was_asked_of_the_driver_is_logged);
	return 0;
}
