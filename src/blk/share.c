/* SPDX-License-Identifier: MIT */
/* One disk under several. See share.h. */
#include "blk/share.h"

#include <errno.h>
#include <stdlib.h>

struct share {
	struct disk disk;
	struct disk_shared *s;
};

static co_fn void share_co_close(struct disk *d)
{
	struct share *me = container_of(d, struct share, disk);
	struct disk_shared *s = me->s;

	disk_fini(d);
	free(me);
	if (--s->users)
		return;
	co_disk_close(s->disk);
	if (s->gone)
		s->gone(s);
}

static const struct disk_ops share_ops = { .driver = "shared", .co_close = share_co_close };

int disk_share(struct disk_shared *s, struct disk **ret)
{
	struct share *me = calloc(1, sizeof(*me));

	if (!me || disk_init(&me->disk, &share_ops, s->disk->name, s->disk)) {
		free(me);
		return -ENOMEM;
	}
	me->s = s;
	me->disk.read_only = true;
	s->users++;
	*ret = &me->disk;
	return 0;
}
