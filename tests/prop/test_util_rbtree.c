/* SPDX-License-Identifier: MIT */
/* Random insertions and removals in the red-black tree, against a table of what is in it. */
#include "lib/test.h"
#include "util/list.h"
#include "util/rbtree.h"
#include "util/rng.h"

#define KEYS 200

struct item {
	int key;
	bool present;
	struct rb_node node;
};

static struct item items[KEYS];
static struct rb_tree tree;

static struct item *item_of(struct rb_node *n)
{
	return container_of(n, struct item, node);
}

static void insert(int key)
{
	struct rb_node **link = &tree.root, *parent = NULL;

	while (*link) {
		parent = *link;
		link = key < item_of(parent)->key ? &parent->left : &parent->right;
	}
	rb_insert(&tree, &items[key].node, parent, link);
	items[key].present = true;
}

static void erase(int key)
{
	rb_erase(&tree, &items[key].node);
	items[key].present = false;
}

/* The black height; checks the tree's invariants (2) and (3), the order and the parents below `n`. */
static int check_subtree(struct rb_node *n, struct rb_node *parent, int low, int high)
{
	int left, right;

	if (!n)
		return 1;
	CHECK(n->parent == parent);
	CHECK(item_of(n)->key > low && item_of(n)->key < high);
	CHECK(!(n->red && parent && parent->red));
	left = check_subtree(n->left, n, low, item_of(n)->key);
	right = check_subtree(n->right, n, item_of(n)->key, high);
	CHECK_EQ(left, right);
	return left + !n->red;
}

static void check_tree(void)
{
	struct rb_node *n = rb_first(&tree), *m = rb_last(&tree);

	CHECK(!tree.root || !tree.root->red);
	check_subtree(tree.root, NULL, -1, KEYS);
	for (int i = 0; i < KEYS; i++) {
		if (items[i].present) {
			CHECK(n && item_of(n)->key == i);
			n = rb_next(n);
		}
		if (items[KEYS - 1 - i].present) {
			CHECK(m && item_of(m)->key == KEYS - 1 - i);
			m = rb_prev(m);
		}
	}
	CHECK(!n && !m);
}

int main(void)
{
	uint64_t rounds = test_scale(20000);
	struct rng rng;

	for (int i = 0; i < KEYS; i++)
		items[i].key = i;
	check_tree();
	rng_seed(&rng, test_seed());
	for (uint64_t i = 0; i < rounds; i++) {
		/* The number of keys in use goes up and down, so that the tree is small as often as it is large. */
		int key = rng_below(&rng, 1 + (i / 500 * 37) % KEYS);

		if (items[key].present)
			erase(key);
		else
			insert(key);
		check_tree();
	}
	for (int i = 0; i < KEYS; i++) {
		int key = (i * 61) % KEYS;

		if (items[key].present)
			erase(key);
		check_tree();
	}
	CHECK(!tree.root);
	return 0;
}
