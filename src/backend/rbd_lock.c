/* SPDX-License-Identifier: MIT */
/*
 * rbd: the exclusive lock.
 *
 * librbd hands the lock over between clients that ask each other politely, which is how a virtual machine's disk would be taken away while it runs. So whoever
 * holds it is asked first, by a notification on the image's header to which every live client answers: who answers keeps it. The lock of a client
 * that is dead is waited for until the cluster has given up its watch (30 s as a rule), and then broken; librbd has the dead client blocklisted. From then
 * on the lock is kept: librbd refuses whoever asks for it.
 *
 * A weir that was killed on this very host need not be waited for: the image's witness tells which process had the lock, and if that one does not answer and
 * is not there any more, its lock is broken at once. That it is blocklisted keeps what it may have left in the network from the image.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/rbd.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/log.h"

#define ASK_MS 2000
#define ASK_DEAD_MS 1000	/* Ceph counts in seconds */
#define STEP_NS 250000000ull
#define WATCHERS 32

enum state { LOCK_FREE, LOCK_ALIVE, LOCK_DYING, LOCK_DEAD };

struct lock_look {
	struct rbd_disk *r;
	enum state state;
	bool asked;		/* this owner did not answer before */
	char owner[64];		/* the address of its client, "192.0.2.1:0/4123" */
	uint64_t id;		/* of the client, which watches the image */
	int died;		/* it was this process of this host, which is dead */
};

/* Whether the owner watches the image, and as which client. */
static int find_watcher(struct lock_look *l, bool *ret_watches)
{
	rbd_image_watcher_t w[WATCHERS];
	size_t n = WATCHERS;
	int ret = l->r->api->rbd_watchers_list(l->r->img, w, &n);

	*ret_watches = false;
	if (ret)
		return ret;
	for (size_t i = 0; i < n; i++) {
		if (strcmp(w[i].addr, l->owner))
			continue;
		*ret_watches = true;
		l->id = w[i].id;
	}
	l->r->api->rbd_watchers_list_cleanup(w, n);
	return 0;
}

/* An empty notification is the old form of "look at the header again": everybody who watches answers it, and it does no harm. */
static bool owner_answers(struct lock_look *l, unsigned wait_ms)
{
	const struct rbd_api *a = l->r->api;
	struct notify_timeout_t *late = NULL;
	struct notify_ack_t *ack = NULL;
	size_t len = 0, n = 0, nlate = 0;
	bool found = false;
	char *reply = NULL;

	a->rados_notify2(l->r->io, l->r->header, "", 0, wait_ms, &reply, &len);
	if (reply && !a->rados_decode_notify_response(reply, len, &ack, &n, &late, &nlate)) {
		for (size_t i = 0; i < n; i++)
			found |= ack[i].notifier_id == l->id;
		a->rados_free_notify_response(ack, n, late);
	}
	if (reply)
		a->rados_buffer_free(reply);
	return found;
}

static int look_at_owner_blocking(void *arg)
{
	struct lock_look *l = arg;
	const struct rbd_api *a = l->r->api;
	char *owner[4] = { NULL }, before[64];
	size_t n = ARRAY_SIZE(owner);
	rbd_lock_mode_t mode;
	bool watches;
	int ret = a->rbd_lock_get_owners(l->r->img, &mode, owner, &n);

	l->state = LOCK_FREE;
	l->died = 0;
	strcpy(before, l->owner);
	l->owner[0] = '\0';
	if (ret == -ENOENT || (!ret && !n))
		return 0;
	if (ret)
		return ret;
	snprintf(l->owner, sizeof(l->owner), "%s", owner[0]);
	a->rbd_lock_get_owners_cleanup(owner, n);
	l->asked &= !strcmp(before, l->owner);
	ret = find_watcher(l, &watches);
	if (ret)
		return ret;
	l->died = watches ? rbd_owner_died_here(l->r, l->owner) : 0;
	if (!watches)
		l->state = LOCK_DEAD;
	else if (!l->asked && owner_answers(l, l->died ? ASK_DEAD_MS : ASK_MS))
		l->state = LOCK_ALIVE;
	else
		l->state = l->died ? LOCK_DEAD : LOCK_DYING;
	l->asked = true;
	return 0;
}

static int break_lock(const struct lock_look *l)
{
	int ret = l->died ? l->r->api->rbd_lock_break(l->r->img, RBD_LOCK_MODE_EXCLUSIVE, l->owner) : 0;

	return ret == -ENOENT ? 0 : ret;	/* it is free by now */
}

static int acquire_blocking(void *arg)
{
	struct lock_look *l = arg;
	struct rbd_disk *r = l->r;
	int ret = rbd_look_at_writers(r, l->owner);

	ret = ret ? ret : break_lock(l);
	if (!ret)
		ret = r->api->rbd_lock_acquire(r->img, RBD_LOCK_MODE_EXCLUSIVE);
	if (ret)
		return ret;
	r->locked = true;
	if (r->marked)
		ret = rbd_sign(r);
	/* Who had it may have changed the size. */
	return ret ? ret : r->api->rbd_get_size(r->img, &r->size);
}

static int in_use(struct rbd_disk *r, const struct lock_look *l, struct err *err)
{
	return err_set(err, -EBUSY, "%s: is in use by another client of the cluster (%s), which holds its exclusive lock; stop that one first, "
		       "or open the image read-only", r->disk.name, l->owner);
}

const char *rbd_needs_caps(int error)
{
	return error != -EPERM && error != -EACCES ? "" :
		" (the user needs \"mon 'profile rbd'\" and \"osd 'profile rbd pool=...'\"; \"profile rbd-read-only\" is enough for --read-only)";
}

co_fn int co_rbd_take_lock(struct rbd_disk *r, uint64_t timeout_ns, struct err *err)
{
	uint64_t deadline = rt_now_ns() + timeout_ns;
	struct lock_look l = { .r = r };
	bool told = false;
	int ret;

	for (;;) {
		ret = co_rbd_call(r, look_at_owner_blocking, &l);
		if (ret)
			return err_errno(err, ret, "%s: cannot see who holds its exclusive lock", r->disk.name);
		if (l.state == LOCK_ALIVE)
			return in_use(r, &l, err);
		if (l.state != LOCK_DYING)
			break;
		if (rt_now_ns() >= deadline)
			return in_use(r, &l, err);
		if (!told)
			log_info("%s: client %s holds its exclusive lock and does not answer; waiting until the cluster takes it for dead", r->disk.name,
				 l.owner);
		told = true;
		co_sleep_ns(STEP_NS);
	}
	if (l.died)
		log_info("%s: its exclusive lock is that of process %d of this host, which is dead; it is broken, and client %s blocklisted", r->disk.name,
			 l.died, l.owner);
	ret = co_rbd_call(r, acquire_blocking, &l);
	if (ret == -EROFS || ret == -EBUSY) {
		if (!*l.owner && !co_rbd_call(r, look_at_owner_blocking, &l) && !*l.owner)
			snprintf(l.owner, sizeof(l.owner), "unknown");
		return in_use(r, &l, err);
	}
	if (ret)
		return err_errno(err, ret, "%s: cannot take its exclusive lock%s", r->disk.name, rbd_needs_caps(ret));
	return 0;
}
