/* SPDX-License-Identifier: MIT */
/*
 * The kernel's NBD client: devices /dev/nbdN, by netlink (linux/nbd-netlink.h). All of it blocks, and needs CAP_SYS_ADMIN.
 *
 * A device carries the name of who made it, its "backend", for as long as it lives: so it is found again without any record, also after a crash.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;

#define NBD_BACKEND_MAX 512

struct nbd_device_config {
	int fd;			/* a socket on which the transmission phase has begun, with simple replies; the kernel keeps it, the caller closes his */
	uint64_t size;
	uint32_t block_size;
	uint16_t flags;		/* transmission flags, as the server sent them */
	uint32_t wait_s;	/* so long requests wait for another connection once this one is lost; 0: they fail */
	const char *backend;
};

/* Has the kernel this client? */
bool nbd_device_possible(void);
/* Makes a device of one that is free, or of a new one. */
int nbd_device_connect(const struct nbd_device_config *c, unsigned *ret_index, struct err *err);
/* Gives a device whose connection is lost another one. What was sent and not answered is sent again, by the kernel's clock within half a minute. */
int nbd_device_reconnect(unsigned index, const struct nbd_device_config *c, struct err *err);
/* Reads the first block past the page cache: the kernel does not say whether it had use for a connection. All of it, or an error. */
int nbd_device_check_alive(const char *device, size_t block_size, struct err *err);
int nbd_device_resize(unsigned index, const char *backend, uint64_t size, struct err *err);
/* Whatever it had to do fails. It is free when the last who has it open goes. */
int nbd_device_disconnect(unsigned index, struct err *err);
/* Of /sys/block/nbdN: the backend's name; false if there is none, as of a device that is free. */
bool nbd_device_backend(unsigned index, char buf[NBD_BACKEND_MAX]);
/* Calls fn for each device that has a backend. */
void nbd_device_for_each(void (*fn)(void *arg, unsigned index, const char *backend), void *arg);
