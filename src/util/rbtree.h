/* SPDX-License-Identifier: MIT */
/*
 * Intrusive red-black tree (Cormen et al., "Introduction to Algorithms", chapter 13).
 *
 * The caller walks down to find the place (it knows its keys), and rb_insert() links the
 * node there and rebalances; so no comparison goes through a pointer.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct rb_node {
	struct rb_node *parent, *left, *right;
	bool red;
};

struct rb_tree {
	struct rb_node *root;
};

/* Links `n` below `parent` at `*link` (&tree->root, &parent->left or &parent->right) and rebalances. */
void rb_insert(struct rb_tree *t, struct rb_node *n, struct rb_node *parent, struct rb_node **link);
void rb_erase(struct rb_tree *t, struct rb_node *n);
struct rb_node *rb_first(const struct rb_tree *t);
struct rb_node *rb_last(const struct rb_tree *t);
struct rb_node *rb_next(const struct rb_node *n);
struct rb_node *rb_prev(const struct rb_node *n);
