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

#define FORMAT "weir-writer-1 writers=%llu generation=%llu client=%63s release=%llu"

static int header_version(struct rbd_disk *r, uint64_t *ret)
{
	uint64_t bytes;
	time_t when;
	int error = r->api->rados_stat(r->io, r->header, &bytes, &when);

	if (!error)
		*ret = r->api->rados_get_last_version(r->io);
	return error;
}

int rbd_look_at_writers(struct rbd_disk *r, const char *owner)
{
	unsigned long long writers = 0, generation = 0, release = 0;
	char text[256] = "", client[64] = "";
	uint64_t version;
	bool same = false;
	int n, ret = header_version(r, &version);

	if (ret)
		return ret;
	snprintf(r->witness, sizeof(r->witness), "weir_writer.%s", r->id);
	n = r->api->rados_read(r->io, r->witness, text, sizeof(text) - 1, 0);
	if (n < 0 && n != -ENOENT)
		return n;
	r->marked = n >= 0;
	if (sscanf(text, FORMAT, &writers, &generation, client, &release) == 4)
		same = *owner ? !release && !strcmp(owner, client) : release == version;
	r->generation = generation + 1;
	r->writers = same ? writers : max((uint64_t)writers + 1, version);
	return 0;
}

static int write_witness(struct rbd_disk *r, const char *client, uint64_t release)
{
	char text[256];

	snprintf(text, sizeof(text), "weir-writer-1 writers=%llu generation=%llu client=%.63s release=%llu\n", (unsigned long long)r->writers,
		 (unsigned long long)r->generation, client, (unsigned long long)release);
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
