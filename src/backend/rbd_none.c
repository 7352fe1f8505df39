/* SPDX-License-Identifier: MIT */
/* rbd: in a build without librbd's headers: says so. */
#include <errno.h>

#include "backend/drivers.h"
#include "util/err.h"

static co_fn int rbd_co_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	return err_set(err, -ENOTSUP, "%.200s: this program was built without Ceph; install the packages librbd-dev and librados-dev and build it again "
		       "(meson setup -Drbd=enabled)", spec->text);
}

const struct disk_driver rbd_driver = {
	.name = "rbd",
	.options = "conf,id",
	.any_option = true,
	.co_open = rbd_co_open,
};
