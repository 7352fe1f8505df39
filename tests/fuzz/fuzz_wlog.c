/* SPDX-License-Identifier: MIT */
/*
 * A write log device with any content: opened, attached, read, written, drained, checked and dumped. Whatever it holds, that ends in an
 * error or in a working log, in bounded time and memory.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz/disk_fuzz.h"
#include "fuzz/wlog_image.h"
#include "util/bytes.h"
#include "util/crc32c.h"
#include "wlog/wlog.h"

#define HANG_NS (3600ull * 1000000000)	/* of virtual time */

static uint8_t device[WLOG_IMAGE_SIZE];

static void fix_super(uint8_t *slot)
{
	put_le32(slot + WL_SB_CRC, 0);
	put_le32(slot + WL_SB_CRC, crc32c(0, slot, WL_SB_SLOT));
}

/* Data, descriptors, index and header of the batch at p, as far as its lengths stay within `room`. */
static void fix_batch(uint8_t *p, uint64_t room, const uint8_t *uuid)
{
	uint64_t payload = get_le32(p + WL_B_PAYLOAD), count = get_le32(p + WL_B_COUNT), index = get_le32(p + WL_B_INDEX_LEN);
	uint8_t *desc = p + WL_B_HEADER + payload;

	if (WL_B_HEADER + payload + count * WL_D_SIZE <= room) {
		for (uint64_t i = 0; i < count; i++) {
			uint8_t *d = desc + i * WL_D_SIZE;
			uint64_t len = get_le64(d + WL_D_LEN), at = get_le32(d + WL_D_DATA);

			if (d[WL_D_TYPE] == WL_WRITE && len <= room && at + len <= room)
				put_le32(d + WL_D_CRC, crc32c(0, p + at, len));
		}
		put_le32(p + WL_B_DESC_CRC, crc32c(0, desc, count * WL_D_SIZE));
		if (index <= payload)
			put_le32(p + WL_B_INDEX_CRC, crc32c(0, p + WL_B_HEADER, index));
	}
	memcpy(p + WL_B_UUID, uuid, 16);
	put_le32(p + WL_B_CRC, crc32c(0, p + WL_B_SEQ, WL_B_HEADER - WL_B_SEQ));
}

static void fix_checksums(void)
{
	uint8_t *slot = device + WL_SB_SLOT;

	fix_super(slot);
	for (uint64_t pos = WL_FIRST_SEGMENT; pos < WLOG_IMAGE_SIZE; pos += WL_BLOCK)
		if (get_le32(device + pos) == WL_B_MAGIC_VALUE)
			fix_batch(device + pos, WLOG_IMAGE_SIZE - pos, slot + WL_SB_UUID);
}

static void build_device(const uint8_t *data, size_t size)
{
	uint8_t flags = size ? data[0] : 0;
	size_t super;

	memset(device, 0, sizeof(device));
	if (!size)
		return;
	super = min(size - 1, (size_t)WLOG_IMAGE_SUPER);
	memcpy(device + WL_SB_SLOT, data + 1, super);
	data += 1 + super;
	size -= 1 + super;
	memcpy(device + WL_FIRST_SEGMENT, data, min(size, sizeof(device) - WL_FIRST_SEGMENT));
	if (flags & WLOG_IMAGE_FIX)
		fix_checksums();
}

/* --- What is done with it --- */

static void on_line(void *arg, const char *text)
{
	if (strlen(text) > 4096)
		abort();
}

static co_fn struct disk *co_attach_first(struct wlog *w, struct powercut *p, unsigned n)
{
	static const struct wlog_volume_config config = { .force_replay = true, .no_mark = true };
	struct wlog_volume_info info;
	struct powercut_dev *dev = powercut_dev_find(p, n ? "image1" : "image0");
	struct disk *image, *volume;
	struct err err = ERR_INIT;

	if (wlog_get_volume(w, n, &info) || powercut_dev_open(dev, &image))
		return NULL;
	if (!co_wlog_attach(w, info.name, image, &config, &volume, &err))
		return volume;
	co_disk_close(image);
	return NULL;
}

static co_fn void co_use(struct disk *d)
{
	static uint8_t buf[WLOG_IMAGE_VOLUME];

	co_disk_read(d, 0, buf, sizeof(buf), 0);
	co_disk_write(d, 1000, buf, 3000, 0);
	co_disk_flush(d);
	co_wlog_drain_volume(d, NULL);
	co_disk_read(d, 0, buf, sizeof(buf), 0);
}

static co_fn void co_open_and_use(struct powercut *p, bool ignore_damage)
{
	struct wlog_config config = { .ignore_damage = ignore_damage };
	struct disk *dev = co_fuzz_device(p, "log"), *volume[2];
	struct err err = ERR_INIT;
	struct wlog *w;
	int rc = co_wlog_open(&dev, 1, &config, &w, &err);

	fuzz_told(rc, &err);
	if (rc) {
		co_disk_close(dev);
		return;
	}
	for (unsigned i = 0; i < 2; i++)
		volume[i] = co_attach_first(w, p, i);
	for (unsigned i = 0; i < 2; i++)
		if (volume[i])
			co_use(volume[i]);
	for (unsigned i = 0; i < 2; i++)
		co_disk_close(volume[i]);
	co_wlog_close(w);
}

static co_fn void co_work(struct powercut *p, void *arg)
{
	struct wlog_check_report report = { 0 };
	struct disk *dev = co_fuzz_device(p, "log");
	struct err err = ERR_INIT;

	co_wlog_check(&dev, 1, true, on_line, NULL, &report, &err);
	co_disk_close(dev);
	co_open_and_use(p, false);
	co_open_and_use(p, true);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct powercut *p = powercut_create(1);
	struct powercut_dev *log = powercut_dev_create(p, "log", WLOG_IMAGE_SIZE, NULL);

	powercut_dev_create(p, "image0", WLOG_IMAGE_VOLUME, NULL);
	powercut_dev_create(p, "image1", WLOG_IMAGE_VOLUME, NULL);
	build_device(data, size);
	powercut_dev_poke(log, 0, device, sizeof(device), false);
	fuzz_run_on(p, co_work, NULL, HANG_NS);
	return 0;
}
