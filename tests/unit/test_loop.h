/* SPDX-License-Identifier: MIT */
/* A loop device for a test; it goes away with the descriptor, however the test ends. */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* Returns the descriptor that holds the device over `file` with sectors of `sector` bytes, and its path; or -errno. */
static inline int loop_attach(const char *file, unsigned sector, char *path, size_t size)
{
	struct loop_config config = { .block_size = sector, .info = { .lo_flags = LO_FLAGS_AUTOCLEAR } };
	int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), fd = -1, rc = 0;

	if (control < 0)
		return -errno;
	config.fd = (unsigned)open(file, O_RDWR | O_CLOEXEC);
	/* Somebody else may take the free one before us. */
	for (int tries = 0; tries < 20 && fd < 0; tries++) {
		int n = ioctl(control, LOOP_CTL_GET_FREE);

		if (n < 0)
			break;
		snprintf(path, size, "/dev/loop%d", n);
		fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &config)) {
			rc = -errno;
			close(fd);
			fd = -1;
			if (rc != -EBUSY)
				break;
		}
	}
	close((int)config.fd);
	close(control);
	return fd >= 0 ? fd : rc ? rc : -ENODEV;
}
