/* SPDX-License-Identifier: MIT */
/* The list of backends. */
#include "backend/drivers.h"

#include "backend/nbd.h"
#include "util/bytes.h"

static const struct disk_driver *const backends[] = {
	&file_driver,
	&mem_driver,
	&null_driver,
	&delay_driver,
	&fault_driver,
	&nbd_driver,
	&rbd_driver,
};

void backends_register(void)
{
	for (unsigned i = 0; i < ARRAY_SIZE(backends); i++)
		disk_register_driver(backends[i]);
}
