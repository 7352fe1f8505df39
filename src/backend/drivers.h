/* SPDX-License-Identifier: MIT */
/* The drivers of this build; drivers.c registers them. */
#pragma once

#include "blk/spec.h"

extern const struct disk_driver file_driver;
extern const struct disk_driver mem_driver;
extern const struct disk_driver null_driver;
extern const struct disk_driver delay_driver;
extern const struct disk_driver fault_driver;
extern const struct disk_driver rbd_driver;
