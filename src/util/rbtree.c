/* SPDX-License-Identifier: MIT */
/*
 * Intrusive red-black tree.
 *
 * Invariants (Cormen et al., 13.1)
 *  (1) the root is black;
 *  (2) a red node has no red child;
 *  (3) every path from the root to a missing child passes the same number of black nodes.
 *
 * Differences from the book: missing children are NULL and not a sentinel, so the parent of the place that is
 * to be repaired is passed along; erase moves the successor's links, never its contents.
 */
#include "util/rbtree.h"

static bool is_red(const struct rb_node *n)
{
	return n && n->red;
}

/* Puts `new` (may be NULL) where `old` hangs. */
static void replace_child(struct rb_tree *t, struct rb_node *parent, struct rb_node *old, struct rb_node *new)
{
	if (!parent)
		t->root = new;
	else if (parent->left == old)
		parent->left = new;
	else
		parent->right = new;
	if (new)
		new->parent = parent;
}

static void rotate_left(struct rb_tree *t, struct rb_node *n)
{
	struct rb_node *up = n->right;

	n->right = up->left;
	if (n->right)
		n->right->parent = n;
	replace_child(t, n->parent, n, up);
	up->left = n;
	n->parent = up;
}

static void rotate_right(struct rb_tree *t, struct rb_node *n)
{
	struct rb_node *up = n->left;

	n->left = up->right;
	if (n->left)
		n->left->parent = n;
	replace_child(t, n->parent, n, up);
	up->right = n;
	n->parent = up;
}

void rb_insert(struct rb_tree *t, struct rb_node *n, struct rb_node *parent, struct rb_node **link)
{
	*n = (struct rb_node){ .parent = parent, .red = true };
	*link = n;

	while (is_red(n->parent)) {
		struct rb_node *p = n->parent, *g = p->parent;
		bool left = p == g->left;
		struct rb_node *uncle = left ? g->right : g->left;

		if (is_red(uncle)) {
			p->red = uncle->red = false;
			g->red = true;
			n = g;
			continue;
		}
		if (n == (left ? p->right : p->left)) {
			left ? rotate_left(t, p) : rotate_right(t, p);
			p = n;
		}
		p->red = false;
		g->red = true;
		left ? rotate_right(t, g) : rotate_left(t, g);
		break;
	}
	t->root->red = false;
}

/* The paths through `n` (may be NULL), a child of `parent`, lack one black node. */
static void erase_fixup(struct rb_tree *t, struct rb_node *n, struct rb_node *parent)
{
	while (parent && !is_red(n)) {
		bool left = n == parent->left;
		struct rb_node *s = left ? parent->right : parent->left;
		struct rb_node *near, *far;

		if (s->red) {
			s->red = false;
			parent->red = true;
			left ? rotate_left(t, parent) : rotate_right(t, parent);
			s = left ? parent->right : parent->left;
		}
		near = left ? s->left : s->right;
		far = left ? s->right : s->left;
		if (!is_red(near) && !is_red(far)) {
			s->red = true;
			n = parent;
			parent = n->parent;
			continue;
		}
		if (!is_red(far)) {
			near->red = false;
			s->red = true;
			left ? rotate_right(t, s) : rotate_left(t, s);
			far = s;
			s = near;
		}
		s->red = parent->red;
		parent->red = false;
		far->red = false;
		left ? rotate_left(t, parent) : rotate_right(t, parent);
		return;
	}
	if (n)
		n->red = false;
}

void rb_erase(struct rb_tree *t, struct rb_node *n)
{
	struct rb_node *child, *parent, *next;
	bool removed_red = n->red;

	if (!n->left || !n->right) {
		child = n->left ? n->left : n->right;
		parent = n->parent;
		replace_child(t, parent, n, child);
	} else {
		/* The successor, which has no left child, takes the place and the colour of `n`. */
		for (next = n->right; next->left;)
			next = next->left;
		removed_red = next->red;
		child = next->right;
		parent = next->parent;
		if (parent == n) {
			parent = next;
		} else {
			replace_child(t, parent, next, child);
			next->right = n->right;
			next->right->parent = next;
		}
		replace_child(t, n->parent, n, next);
		next->left = n->left;
		next->left->parent = next;
		next->red = n->red;
	}
	if (!removed_red)
		erase_fixup(t, child, parent);
}

struct rb_node *rb_first(const struct rb_tree *t)
{
	struct rb_node *n = t->root;

	while (n && n->left)
		n = n->left;
	return n;
}

struct rb_node *rb_last(const struct rb_tree *t)
{
	struct rb_node *n = t->root;

	while (n && n->right)
		n = n->right;
	return n;
}

struct rb_node *rb_next(const struct rb_node *n)
{
	struct rb_node *p;

	if (n->right) {
		for (p = n->right; p->left;)
			p = p->left;
		return p;
	}
	for (p = n->parent; p && n == p->right; p = p->parent)
		n = p;
	return p;
}

struct rb_node *rb_prev(const struct rb_node *n)
{
	struct rb_node *p;

	if (n->left) {
		for (p = n->left; p->right;)
			p = p->right;
		return p;
	}
	for (p = n->parent; p && n == p->left; p = p->parent)
		n = p;
	return p;
}
