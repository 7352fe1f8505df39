/* SPDX-License-Identifier: MIT */
/* Devices that `weir map` has made of our volumes by the kernel's NBD client. */
#pragma once

#include "rt/role.h"

struct serve;
struct volume;

/* Tells them the volume's size: over NBD itself nobody would learn of it. What goes wrong is a warning. The volume stays while this waits. */
co_fn void co_devices_resize(struct serve *s, const struct volume *v);
