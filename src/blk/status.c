/* SPDX-License-Identifier: MIT */
/*
 * What a disk and the layers below it tell about themselves, as JSON.
 */
#include <jansson.h>
#include <string.h>

#include "blk/disk.h"

static const char *const op_names[DISK_OPS] = {
	[DISK_OP_READ] = "read", [DISK_OP_WRITE] = "write", [DISK_OP_FLUSH] = "flush",
	[DISK_OP_DISCARD] = "discard", [DISK_OP_ZERO] = "zero", [DISK_OP_EXTENT] = "extent",
};

static json_t *counters(const struct disk_counters *c)
{
	json_t *obj = json_object();

	for (int i = 0; i < DISK_OPS; i++)
		json_object_set_new(obj, op_names[i], json_pack("{sI sI sI}", "ops", (json_int_t)c->ops[i],
				    "bytes", (json_int_t)c->bytes[i], "errors", (json_int_t)c->errors[i]));
	json_object_set_new(obj, "rmw", json_integer((json_int_t)c->rmw));
	json_object_set_new(obj, "bounced", json_integer((json_int_t)c->bounced));
	return obj;
}

static json_t *limits(const struct disk_limits *l)
{
	return json_pack("{sI sI sI sI sI sI sI sI sI sI sb sb sb sb sb}",
			 "align", (json_int_t)l->align, "mem_align", (json_int_t)l->mem_align,
			 "atomic_unit", (json_int_t)l->atomic_unit, "atomic_write", (json_int_t)l->atomic_write, "opt_io", (json_int_t)l->opt_io,
			 "object", (json_int_t)l->object, "opt_depth", (json_int_t)l->opt_depth,
			 "max_io", (json_int_t)l->max_io, "max_zero", (json_int_t)l->max_zero,
			 "discard_granularity", (json_int_t)l->discard_gran,
			 "discard_zeroes", l->discard_zeroes, "fast_zero", l->fast_zero, "fua", l->fua,
			 "volatile_cache", l->volatile_cache, "rotational", l->rotational);
}

void *disk_status(struct disk *d)
{
	json_t *obj = json_object();

	json_object_set_new(obj, "driver", json_string(d->ops->driver));
	/* A file name need not be UTF-8. */
	json_object_set_new(obj, "name", json_string(d->name) ?: json_string("(not UTF-8)"));
	json_object_set_new(obj, "size", json_integer((json_int_t)d->size));
	json_object_set_new(obj, "read_only", json_boolean(d->read_only));
	json_object_set_new(obj, "failed", d->failed ? json_string(strerror(-d->failed)) : json_null());
	json_object_set_new(obj, "in_flight", json_integer(d->in_flight));
	json_object_set_new(obj, "limits", limits(&d->limits));
	json_object_set_new(obj, "counters", counters(&d->count));
	if (d->ops->status)
		d->ops->status(d, obj);
	if (d->file)
		json_object_set_new(obj, "file", disk_status(d->file));
	return obj;
}
