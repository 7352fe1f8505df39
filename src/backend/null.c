/* SPDX-License-Identifier: MIT */
/*
 * null:SIZE — reads zeroes and accepts everything, at no cost: shows what the layers above cost.
 */
#include <errno.h>
#include <stdlib.h>

#include "backend/drivers.h"
#include "util/err.h"
#include "util/iov.h"
#include "util/size.h"

static co_fn int null_co_read(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	iov_set(iov, niov, 0, 0, len);
	return 0;
}

static co_fn int null_co_write(struct disk *d, uint64_t off, uint64_t len, const struct iovec *iov, int niov, unsigned flags)
{
	return 0;
}

static co_fn int null_co_flush(struct disk *d)
{
	return 0;
}

static co_fn int null_co_clear(struct disk *d, uint64_t off, uint64_t len, unsigned flags)
{
	return 0;
}

static co_fn int null_co_extent(struct disk *d, uint64_t off, uint64_t len, struct disk_extent *ret)
{
	*ret = (struct disk_extent){ .len = len, .hole = true, .zero = true };
	return 0;
}

static co_fn int null_co_resize(struct disk *d, uint64_t size)
{
	return 0;
}

static const struct disk_ops null_ops = {
	.driver = "null",
	.co_read = null_co_read,
	.co_write = null_co_write,
	.co_flush = null_co_flush,
	.co_discard = null_co_clear,
	.co_zero = null_co_clear,
	.co_extent = null_co_extent,
	.co_resize = null_co_resize,
};

static co_fn int null_co_open(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	struct disk *d;
	uint64_t size;
	int r = size_parse(spec->rest, &size);

	if (r || size > DISK_MAX_SIZE)
		return err_set(err, -EINVAL, "%.200s: \"%.40s\" is not a size; write null:1T", spec->text, spec->rest);
	d = calloc(1, sizeof(*d));
	if (!d)
		return err_errno(err, -ENOMEM, "%.200s", spec->text);
	r = disk_init(d, &null_ops, spec->text, NULL);
	if (r) {
		free(d);
		return err_errno(err, r, "%.200s", spec->text);
	}
	d->size = size;
	d->read_only = !(flags & DISK_OPEN_RDWR);
	d->limits = (struct disk_limits){
		.align = 1, .mem_align = 1, .atomic_unit = 512, .discard_gran = 1, .discard_zeroes = true, .fast_zero = true,
		.fua = true, .multi_conn = true,
	};
	*ret = d;
	return 0;
}

const struct disk_driver null_driver = {
	.name = "null",
	.options = "",
	.co_open = null_co_open,
};
