/* SPDX-License-Identifier: MIT */
/*
 * rbd: whether anybody else has written to an image whose newest data may be in a log.
 *
 * Whoever writes takes the exclusive lock first, and to take it or to give it back changes the image's header object, whatever program does it. So the version that
 * RADOS gives the header tells whether there was another writer. An image that carries a mark has a witness, an object of its own ("weir_writer.ID"):
 *
 *	writers=W	a number that grows whenever there was somebody else
 *	generation=G	advanced by each writable open
 *	client=C	who had the lock last, of us
 *	release=V	the header's version behind the release of that lock; 0: it was not released
 *	process=P	which process C is: rbd_process.c
 *
 * At an open the number stays as it is if the lock is free and the header's version is V; or if the lock is still C's, who is dead: whoever wants it must break
 * it first. Else somebody else was there. An image without the witness counts as written by others, too. (Between the look at the version and taking the lock somebody
 * could come and go unseen; that is a matter of milliseconds.)
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "backend/rbd.h"
#include "util/bytes.h"

#define FORMAT "weir-writer-1 writers=%llu generation=%llu client=%63s release=%llu process=%127s"

static int header_version(struct rbd_disk *r, uint64_t *ret)
{
	uint64_t bytes;
	time_t when;
	int error = r->api->rados_stat(r->io, r->header, &bytes, &when);

	if (!error)
		*ret = r->api->rados_get_last_version(r->io);
	return error;
}

struct witness {
	unsigned long long writers, generation, release;
	char client[64], process[RBD_PROCESS_MAX];
	bool there, valid;
};

static int read_witness(struct rbd_disk *r, struct witness *w)
{
	char text[512] = "";
	int n;

	*w = (struct witness){ 0 };
	snprintf(r->witness, sizeof(r->witness), "weir_writer.%s", r->id);
	n = r->api->rados_read(r->io, r->witness, text, sizeof(text) - 1, 0);
	if (n < 0 && n != -ENOENT)
		return n;
	w->there = n >= 0;
	/* The process came later. */
	w->valid = sscanf(text, FORMAT, &w->writers, &w->generation, w->client, &w->release, w->process) >= 4;
	return 0;
}

int rbd_look_at_writers(struct rbd_disk *r, const char *owner)
{
	struct witness w;
	uint64_t version;
	bool same = false;
	int ret = header_version(r, &version);

	ret = ret ? ret : read_witness(r, &w);
	if (ret)
		return ret;
	r->marked = w.there;
	if (w.valid)
		same = *owner ? !w.release && !strcmp(owner, w.client) : w.release == version;
	r->generation = w.generation + 1;
	r->writers = same ? w.writers : max((uint64_t)w.writers + 1, version);
	return 0;
}

int rbd_owner_died_here(struct rbd_disk *r, const char *owner)
{
	struct witness w;

	if (read_witness(r, &w) || !w.valid || w.release || strcmp(owner, w.client))
		return 0;
	return rbd_process_is_dead(w.process);
}

static int write_witness(struct rbd_disk *r, const char *client, uint64_t release)
{
	char text[512], process[RBD_PROCESS_MAX];

	rbd_process_name(process, sizeof(process));
	snprintf(text, sizeof(text), "weir-writer-1 writers=%llu generation=%llu client=%.63s release=%llu process=%s\n", (unsigned long long)r->writers,
		 (unsigned long long)r->generation, client, (unsigned long long)release, process);
	return r->api->rados_write_full(r->io, r->witness, text, strlen(text));
}

int rbd_sign(struct rbd_disk *r)
{
	char *owner[4] = { NULL };
	size_t n = ARRAY_SIZE(owner);
	rbd_lock_mode_t mode;
	int ret;

	if (!r->locked)
		return 0;
	ret = r->api->rbd_lock_get_owners(r->img, &mode, owner, &n);
	if (ret || !n)
		return ret ? ret : -EROFS;
	ret = write_witness(r, owner[0], 0);
	r->api->rbd_lock_get_owners_cleanup(owner, n);
	r->marked |= !ret;
	return ret;
}

int rbd_unsign(struct rbd_disk *r)
{
	int ret = r->marked ? r->api->rados_remove(r->io, r->witness) : 0;

	r->marked = false;
	return ret == -ENOENT ? 0 : ret;
}

void rbd_release(struct rbd_disk *r)
{
	uint64_t version;

	if (r->locked && r->marked && !r->disk.fenced && !r->api->rbd_lock_release(r->img) && !header_version(r, &version))
		write_witness(r, "none", version);
}

co_fn int co_rbd_writers(struct disk *d, uint64_t *ret)
{
	struct rbd_disk *r = rbd_of(d);

	if (!r->locked)
		return -ENOTSUP;
	*ret = r->writers;
	return 0;
}
