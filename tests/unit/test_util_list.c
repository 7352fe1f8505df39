/* SPDX-License-Identifier: MIT */
/* The doubly linked list. */
#include "lib/test.h"
#include "util/list.h"

struct item {
	int value;
	struct list node;
};

static struct item items[6] = { { .value = 0 }, { .value = 1 }, { .value = 2 }, { .value = 3 }, { .value = 4 }, { .value = 5 } };

/* The values as digits; checks the links in both directions. */
static int digits(const struct list *l)
{
	int n = 0;

	list_for_each((struct list *)l, i) {
		CHECK(i->next->prev == i && i->prev->next == i);
		n = n * 10 + container_of(i, struct item, node)->value;
	}
	return n;
}

static void items_come_out_in_the_order_of_the_list(void)
{
	struct list l = LIST_INIT(l);

	CHECK(list_empty(&l));
	CHECK(!list_first(&l, struct item, node));
	CHECK(!list_last(&l, struct item, node));
	list_add_tail(&l, &items[2].node);
	list_add_tail(&l, &items[3].node);
	list_add_head(&l, &items[1].node);
	list_insert(&items[2].node, &items[5].node);
	CHECK_EQ(digits(&l), 1253);
	CHECK_EQ(list_first(&l, struct item, node)->value, 1);
	CHECK_EQ(list_last(&l, struct item, node)->value, 3);
}

static void removing_twice_does_no_harm(void)
{
	struct list l = LIST_INIT(l);

	for (int i = 1; i < 5; i++)
		list_add_tail(&l, &items[i].node);
	list_del(&items[2].node);
	list_del(&items[2].node);
	CHECK_EQ(digits(&l), 134);
	list_for_each_safe(&l, i)
		if (i != &items[3].node)
			list_del(i);
	CHECK_EQ(digits(&l), 3);
}

static void splicing_moves_all_to_the_tail(void)
{
	struct list a = LIST_INIT(a), b = LIST_INIT(b);

	list_splice_tail(&a, &b);
	CHECK(list_empty(&a));
	for (int i = 1; i < 6; i++)
		list_add_tail(i < 3 ? &a : &b, &items[i].node);
	list_splice_tail(&a, &b);
	CHECK_EQ(digits(&a), 12345);
	CHECK(list_empty(&b));
	list_splice_tail(&b, &a);
	CHECK_EQ(digits(&b), 12345);
	CHECK(list_empty(&a));
}

int main(void)
{
	RUN(items_come_out_in_the_order_of_the_list);
	RUN(removing_twice_does_no_harm);
	RUN(splicing_moves_all_to_the_tail);
	return 0;
}
