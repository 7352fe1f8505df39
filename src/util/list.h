/* SPDX-License-Identifier: MIT */
/*
 * Intrusive doubly linked list with a sentinel head.
 *
 * A node that is on no list points at itself, so list_del() may be called twice.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct list {
	struct list *next, *prev;
};

#define LIST_INIT(l) { &(l), &(l) }

#define container_of(ptr, type, member) \
	((type *)((char *)(ptr) - offsetof(type, member)))

static inline void list_init(struct list *l)
{
	l->next = l->prev = l;
}

static inline bool list_empty(const struct list *l)
{
	return l->next == l;
}

static inline void list_insert(struct list *prev, struct list *n)
{
	n->prev = prev;
	n->next = prev->next;
	prev->next->prev = n;
	prev->next = n;
}

static inline void list_add_head(struct list *l, struct list *n)
{
	list_insert(l, n);
}

static inline void list_add_tail(struct list *l, struct list *n)
{
	list_insert(l->prev, n);
}

static inline void list_del(struct list *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

/* Moves all of `from` to the tail of `to`; `from` is empty afterwards. */
static inline void list_splice_tail(struct list *to, struct list *from)
{
	if (list_empty(from))
		return;
	from->next->prev = to->prev;
	to->prev->next = from->next;
	from->prev->next = to;
	to->prev = from->prev;
	list_init(from);
}

#define list_first(l, type, member) \
	(list_empty(l) ? NULL : container_of((l)->next, type, member))

#define list_last(l, type, member) \
	(list_empty(l) ? NULL : container_of((l)->prev, type, member))

/* `n` must not be removed in the body; list_for_each_safe() allows it. */
#define list_for_each(l, n) \
	for (struct list *n = (l)->next; n != (l); n = n->next)

#define list_for_each_safe(l, n) \
	for (struct list *n = (l)->next, *n##_next = n->next; n != (l); \
	     n = n##_next, n##_next = n->next)
