/* SPDX-License-Identifier: MIT */
/*
 * Makes the corpus of fuzz_wlog from real logs: stopped in order or not, two volumes, groups over several batches.
 *
 * usage: make_wlog_corpus FOLDER
 */
#include "backend/fault.h"
#include "fuzz/wlog_image.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"
#include "wlog/wlog.h"

struct sample {
	const char *name;
	unsigned writes, most;	/* how many, and bytes of the largest */
	bool stop;
};

static const char *folder;
static uint8_t device[WLOG_IMAGE_SIZE];

static void save(struct powercut_dev *dev, const struct sample *s, uint8_t flags)
{
	uint64_t end = WL_FIRST_SEGMENT, slot;
	char path[4096];
	FILE *f;

	media_read(powercut_dev_view(dev), 0, device, sizeof(device));
	slot = get_le64(device + WL_SB_SEQ) > get_le64(device + WL_SB_SLOT + WL_SB_SEQ) ? 0 : WL_SB_SLOT;
	for (uint64_t i = WL_FIRST_SEGMENT; i < sizeof(device); i++)
		if (device[i])
			end = i + 1;
	snprintf(path, sizeof(path), "%s/%s%s", folder, s->name, flags ? "-fix" : "");
	f = fopen(path, "wb");
	CHECK(f);
	CHECK_EQ(fputc(flags, f), flags);
	CHECK_EQ(fwrite(device + slot, 1, WLOG_IMAGE_SUPER, f), WLOG_IMAGE_SUPER);
	CHECK_EQ(fwrite(device + WL_FIRST_SEGMENT, 1, end - WL_FIRST_SEGMENT, f), end - WL_FIRST_SEGMENT);
	CHECK_EQ(fclose(f), 0);
}

static co_fn void co_fill(struct disk **vol, const struct sample *s)
{
	static uint8_t buf[WLOG_IMAGE_VOLUME];
	struct rng r;

	rng_seed(&r, 7);
	for (unsigned i = 0; i < s->writes; i++) {
		struct disk *d = vol[rng_below(&r, 2)];
		uint64_t len = 1 + rng_below(&r, s->most), off = rng_below(&r, d->size - len);

		memset(buf, 'a' + i % 26, len);
		CHECK_EQ(co_disk_write(d, off, buf, len, 0), 0);
		if (i % 5 == 1)
			CHECK_EQ(co_disk_zero(d, off + len / 2, 700, DISK_UNMAP), 0);
		if (i % 3 == 2)
			CHECK_EQ(co_disk_flush(d), 0);
	}
	CHECK_EQ(co_disk_flush(vol[0]), 0);
}

static co_fn void co_make(void *arg)
{
	const struct sample *s = arg;
	static const struct wlog_format_opts format = { .segment_size = WLOG_IMAGE_SEGMENT, .small = true, .no_prewrite = true };
	const struct wlog_config config = { .no_destage = true };
	const struct wlog_volume_config volume = { .no_mark = true, .destage = WLOG_DESTAGE_ORDERED };
	struct powercut *p = powercut_create(1);
	struct powercut_dev *dev = powercut_dev_create(p, "log", WLOG_IMAGE_SIZE, NULL);
	struct disk *d, *image, *vol[2];
	struct err err = ERR_INIT;
	struct wlog *w;

	CHECK_EQ(powercut_dev_open(dev, &d), 0);
	CHECK_EQ(co_wlog_format(&d, 1, &format, &err), 0);
	CHECK_EQ(co_wlog_open(&d, 1, &config, &w, &err), 0);
	for (unsigned i = 0; i < 2; i++) {
		powercut_dev_open(powercut_dev_create(p, i ? "b" : "a", WLOG_IMAGE_VOLUME, NULL), &image);
		CHECK_EQ(co_wlog_attach(w, i ? "b" : "a", image, &volume, &vol[i], &err), 0);
	}
	co_fill(vol, s);
	if (!s->stop)
		save(dev, s, 0);
	for (unsigned i = 0; i < 2; i++)
		co_disk_close(vol[i]);
	CHECK_EQ(co_wlog_close(w), 0);
	if (s->stop) {
		save(dev, s, 0);
		save(dev, s, WLOG_IMAGE_FIX);
	}
	powercut_destroy(p);
}

int main(int argc, char **argv)
{
	static const struct sample samples[] = {
		{ "stopped", 6, 900, true },
		{ "killed", 6, 900, false },
		{ "segments", 12, 9000, true },
		{ "groups", 2, 60000, true },
	};
	struct rt_bufpool *bufs;
	struct rt *rt;

	if (argc != 2)
		test_fail("usage: make_wlog_corpus FOLDER");
	folder = argv[1];
	CHECK_EQ(rt_create_sim(NULL, 1, &rt, NULL), 0);
	CHECK_EQ(rt_bufpool_create(rt, 1, &bufs, NULL), 0);
	rt_set_bufs(rt, bufs);
	for (size_t i = 0; i < ARRAY_SIZE(samples); i++)
		CHECK_EQ(rt_run(rt, co_make, (void *)&samples[i]), 0);
	rt_bufpool_destroy(bufs);
	rt_destroy(rt);
	return 0;
}
