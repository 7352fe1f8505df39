/* SPDX-License-Identifier: MIT */
/*
 * The region that outlives this process: which requests are in flight. A memory file that the front end keeps, and gives to the next
 * process. Its file cannot be made smaller by anybody when it was made here.
 */
#include "export/vhost/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/bytes.h"

#define REGION_ALIGN 64u

static size_t stride(uint32_t num)
{
	return align_up(VRING_INFLIGHT_LEN(num), REGION_ALIGN);
}

static int check(const struct vhost_device *d, const struct vhost_user_inflight *desc, struct err *err)
{
	if (!desc->queues || desc->queues > d->config.queues)
		return err_set(err, -EINVAL, "an in-flight region for %u queues; there are up to %u", desc->queues, d->config.queues);
	if (!desc->queue_size || desc->queue_size > VRING_NUM_MAX)
		return err_set(err, -EINVAL, "an in-flight region for rings of %u", desc->queue_size);
	return 0;
}

int inflight_create(struct vhost_device *d, struct vhost_user_inflight *desc, int *ret_fd, struct err *err)
{
	int ret = check(d, desc, err), fd;

	if (ret < 0)
		return ret;
	desc->mmap_size = stride(desc->queue_size) * desc->queues;
	desc->mmap_offset = 0;
	fd = memfd_create("weir in-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return err_errno(err, -errno, "in-flight region");
	if (ftruncate(fd, (off_t)desc->mmap_size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
		ret = err_errno(err, -errno, "in-flight region of %llu bytes", (unsigned long long)desc->mmap_size);
		close(fd);
		return ret;
	}
	*ret_fd = fd;
	return 0;
}

int inflight_attach(struct vhost_device *d, const struct vhost_user_inflight *desc, int fd, struct err *err)
{
	size_t page = rt_shm_page(fd);
	uint64_t need, start, skip;
	int ret = check(d, desc, err);

	if (ret < 0)
		return ret;
	need = stride(desc->queue_size) * desc->queues;
	if (desc->mmap_size < need || desc->mmap_size > need + (1u << 20) || desc->mmap_offset > INT64_MAX / 2 || desc->mmap_offset % 8)
		return err_set(err, -EINVAL, "an in-flight region of %llu bytes at %llu; %u rings of %u need %llu", (unsigned long long)desc->mmap_size,
			       (unsigned long long)desc->mmap_offset, desc->queues, desc->queue_size, (unsigned long long)need);
	for (unsigned i = 0; i < d->nqueues; i++)
		if (d->queues[i] && d->queues[i]->running)
			return err_set(err, -EBUSY, "an in-flight region while queue %u is running", i);
	start = align_down(desc->mmap_offset, page);
	skip = desc->mmap_offset - start;
	rt_shm_unmap(&d->inflight);
	d->inflight_base = NULL;
	ret = rt_shm_map(&d->inflight, fd, start, skip + desc->mmap_size, err);
	if (ret < 0) {
		err_prefix(err, "in-flight region");
		return ret;
	}
	d->inflight_base = d->inflight.base + skip;
	d->inflight_stride = stride(desc->queue_size);
	d->inflight_queues = desc->queues;
	d->inflight_num = desc->queue_size;
	return 0;
}

struct vring_inflight *inflight_of(struct vhost_device *d, unsigned queue, uint32_t num)
{
	if (!d->inflight_base || queue >= d->inflight_queues || num > d->inflight_num)
		return NULL;
	return (struct vring_inflight *)(d->inflight_base + queue * d->inflight_stride);
}
