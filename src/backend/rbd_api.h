/* SPDX-License-Identifier: MIT */
/*
 * librbd and librados, loaded when the first rbd: disk is opened: everybody else starts without them and their forty libraries, and
 * a machine without Ceph runs the same program.
 */
#pragma once

#include <rados/librados.h>
#include <rbd/librbd.h>

struct err;

#define RBD_FUNCTIONS(X) \
	X(rados_create) X(rados_conf_read_file) X(rados_conf_parse_env) X(rados_conf_set) X(rados_conf_get) X(rados_connect) \
	X(rados_shutdown) X(rados_ioctx_create) X(rados_ioctx_set_namespace) X(rados_ioctx_destroy) X(rados_notify2) \
	X(rados_decode_notify_response) X(rados_free_notify_response) X(rados_buffer_free) X(rados_stat) X(rados_get_last_version) \
	X(rados_read) X(rados_write_full) X(rados_remove) \
	X(rbd_open) X(rbd_open_read_only) X(rbd_close) X(rbd_get_id) X(rbd_get_features) X(rbd_get_size) X(rbd_stat) X(rbd_get_stripe_unit) X(rbd_get_stripe_count) X(rbd_resize) \
	X(rbd_config_image_list) X(rbd_config_image_list_cleanup) X(rbd_set_image_notification) X(rbd_poll_io_events) \
	X(rbd_lock_acquire) X(rbd_lock_release) X(rbd_lock_break) X(rbd_lock_get_owners) X(rbd_lock_get_owners_cleanup) X(rbd_is_exclusive_lock_owner) \
	X(rbd_watchers_list) X(rbd_watchers_list_cleanup) X(rbd_diff_iterate2) X(rbd_metadata_get) X(rbd_metadata_set) X(rbd_metadata_remove) \
	X(rbd_aio_create_completion) X(rbd_aio_get_return_value) X(rbd_aio_get_arg) X(rbd_aio_release) \
	X(rbd_aio_readv) X(rbd_aio_writev) X(rbd_aio_flush) X(rbd_aio_discard) X(rbd_aio_write_zeroes)

struct rbd_api {
#define X(name) __typeof__(name) *name;
	RBD_FUNCTIONS(X)
#undef X
};

/* Loads it once, on whatever thread; blocks. */
int rbd_api_load(const struct rbd_api **ret, struct err *err);
