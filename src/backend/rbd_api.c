/* SPDX-License-Identifier: MIT */
/* librbd and librados, loaded when they are needed. */
#include "backend/rbd_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

#include "util/bytes.h"
#include "util/err.h"

#define LIBRARY "librbd.so.1"

static const struct {
	const char *name;
	size_t at;
} functions[] = {
#define X(name) { #name, offsetof(struct rbd_api, name) },
	RBD_FUNCTIONS(X)
#undef X
};

int rbd_api_load(const struct rbd_api **ret, struct err *err)
{
	static struct rbd_api api;	/* every thread that fills it writes the same */
	void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

	if (!lib)
		return err_set(err, -ENOTSUP, LIBRARY " cannot be loaded (%s); install the package librbd1", dlerror());
	for (size_t i = 0; i < ARRAY_SIZE(functions); i++) {
		void *fn = dlsym(lib, functions[i].name);

		if (!fn)
			return err_set(err, -ENOTSUP, LIBRARY " has no %s: it is older than Ceph 16; install a newer librbd1", functions[i].name);
		*(void **)((char *)&api + functions[i].at) = fn;
	}
	*ret = &api;
	return 0;
}
