/* SPDX-License-Identifier: MIT */
/* DISK strings: what they mean, and what is said about those that mean nothing. */
#include "backend/drivers.h"
#include "blk/spec.h"
#include "test_rt.h"
#include "util/bytes.h"

static struct disk_spec *parse(const char *text)
{
	struct err err = ERR_INIT;
	struct disk_spec *s;

	if (disk_spec_parse(text, &s, &err))
		test_fail("%s: %s", text, err.msg);
	return s;
}

static void every_form_is_understood(void)
{
	static const struct {
		const char *text, *driver, *rest, *key, *val;
	} forms[] = {
		{ "vm.raw", "file", "vm.raw" },
		{ "./mem:1G", "file", "./mem:1G" },
		{ "file:mem:1G", "file", "mem:1G" },
		{ "unknown:thing", "file", "unknown:thing" },
		{ "/dev/disk/by-id/x:y", "file", "/dev/disk/by-id/x:y" },
		{ "vm.raw,aio=native,cache=none", "file", "vm.raw", "cache", "none" },
		{ "a,,b.raw,aio=native", "file", "a,b.raw", "aio", "native" },
		{ "a,,", "file", "a," },
		{ "file:/dev/sdb,lock", "file", "/dev/sdb", "lock", "on" },
		{ "mem:1G", "mem", "1G" },
		{ "mem:1G,align=4096", "mem", "1G", "align", "4096" },
		{ "null:1T", "null", "1T" },
		{ "nbd://host:10809/export", "nbd", "nbd://host:10809/export" },
		{ "nbds://host/export", "nbd", "nbds://host/export" },
		{ "nbd+unix:///name?socket=/run/x,reconnect=5s", "nbd", "nbd+unix:///name?socket=/run/x", "reconnect", "5s" },
		{ "rbd:pool/image", "rbd", "pool/image" },
	};

	for (unsigned i = 0; i < ARRAY_SIZE(forms); i++) {
		struct disk_spec *s = parse(forms[i].text);

		CHECK_STR(s->text, forms[i].text);
		CHECK_STR(s->driver, forms[i].driver);
		CHECK_STR(s->rest, forms[i].rest);
		CHECK(!s->inner);
		if (forms[i].key)
			CHECK_STR(opts_str(&s->opts, forms[i].key), forms[i].val);
		disk_spec_free(s);
	}
}

static void wrappers_nest_and_keep_their_own_options(void)
{
	struct disk_spec *s = parse("delay:read=4ms,write=5ms:fault:op=write:vm.raw,aio=native");

	CHECK_STR(s->driver, "delay");
	CHECK_EQ(s->opts.n, 2);
	CHECK_STR(opts_str(&s->opts, "write"), "5ms");
	CHECK_STR(s->inner->driver, "fault");
	CHECK_EQ(s->inner->opts.n, 1);
	CHECK_STR(s->inner->inner->driver, "file");
	CHECK_STR(s->inner->inner->text, "vm.raw,aio=native");
	CHECK_STR(opts_str(&s->inner->inner->opts, "aio"), "native");
	disk_spec_free(s);
	disk_spec_free(parse("delay::mem:1M"));
	disk_spec_free(NULL);
}

static co_fn void co_bad_strings_are_refused_with_the_reason(void *arg)
{
	static const struct {
		const char *text, *says;
	} bad[] = {
		{ "", "empty" },
		{ "mem:", "mem:1G" },
		{ "file:", "path" },
		{ ",aio=native", "nothing is named" },
		{ "vm.raw,", "ends with a comma" },
		{ "vm.raw,=x", "no name" },
		{ "vm.raw,a=1,a=2", "twice" },
		{ "delay:read=4ms", "wraps no disk" },
		{ "delay:read=4ms:", "empty" },
		{ "delay::delay::delay::delay::delay::delay::delay::delay::delay::mem:1M", "more than 8 wrappers" },
		{ "nbd:host:10809", "nbd://" },
		{ "mem:lots", "not a size" },
		{ "mem:1P", "at most 16T" },
		{ "mem:1M,align=3", "power of two" },
		{ "mem:1M,colour=red", "unknown option \"colour\"" },
		{ "mem:1M,format=qcow2", "raw images only" },
		{ "mem:1M,format=tar", "no such format" },
		{ "null:-1", "not a size" },
		{ "rbd:pool/image", "a toy" },
		{ "delay:read=soon:mem:1M", "read=soon" },
		{ "delay:parallel=0:mem:1M", "parallel=0" },
		{ "delay:speed=1:mem:1M", "unknown option \"speed\"" },
		{ "fault:op=jump:mem:1M", "op=jump" },
		{ "fault:error=E42:mem:1M", "error=E42" },
		{ "fault:prob=2:mem:1M", "prob=2" },
		{ "fault:prob=nan:mem:1M", "prob=nan" },
		{ "fault:nth=0:mem:1M", "nth=0" },
		{ "fault:tear=on,error=none:mem:1M", "tear=on" },
		{ "fault:nth=1:delay:read=1ms:mem:1X", "1X" },
	};

	for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
		struct err err = ERR_INIT;
		struct disk *d = NULL;

		CHECK(co_disk_open(bad[i].text, DISK_OPEN_RDWR, &d, &err) < 0);
		CHECK(!d);
		if (!strstr(err.msg, bad[i].says))
			test_fail("\"%s\": the message \"%s\" does not say \"%s\"", bad[i].text, err.msg, bad[i].says);
	}
}

static co_fn void co_a_qcow2_name_is_not_opened_as_raw_by_accident(void *arg)
{
	struct err err = ERR_INIT;
	struct disk *d;

	if (!disk_find_driver("file"))
		return;
	CHECK_EQ(co_disk_open("vm.qcow2", 0, &d, &err), -ENOTSUP);
	CHECK(strstr(err.msg, "format=raw"));
}

static void an_endless_string_is_refused(void)
{
	struct err err = ERR_INIT;
	struct disk_spec *s = NULL;
	char *text = malloc(100001);

	memset(text, 'a', 100000);
	text[100000] = '\0';
	CHECK_EQ(disk_spec_parse(text, &s, &err), -EINVAL);
	CHECK(strstr(err.msg, "longer than"));
	CHECK(!s);
	free(text);
}

static co_fn void co_format_raw_is_accepted_everywhere(void *arg)
{
	struct disk *d;

	CHECK_EQ(co_disk_open("mem:1M,format=raw", DISK_OPEN_RDWR, &d, NULL), 0);
	CHECK_EQ(d->size, 1 << 20);
	co_disk_close(d);
}

static co_fn void co_a_disk_opened_without_rdwr_is_read_only(void *arg)
{
	struct disk *d;

	CHECK_EQ(co_disk_open("delay::fault::mem:1M", 0, &d, NULL), 0);
	CHECK_EQ(co_disk_write(d, 0, "x", 1, 0), -EROFS);
	co_disk_close(d);
}

/* --- Defaults --- */

static char got[32], cache[32];

static co_fn int co_open_toy(struct disk_spec *spec, unsigned flags, struct disk **ret, struct err *err)
{
	const char *v = opts_str(&spec->opts, "toy"), *k = opts_str(&spec->opts, "cache");

	snprintf(got, sizeof(got), "%s", v ? v : "none");
	snprintf(cache, sizeof(cache), "%s", k ? k : "none given");
	return err_set(err, -ENXIO, "a toy");
}

static const struct disk_driver toy = { .name = "rbd", .options = "conf,cache,toy=TOY", .co_open = co_open_toy };

static co_fn void co_defaults_reach_drivers_that_know_them_and_strings_win(void *arg)
{
	struct disk *d;

	CHECK_EQ(co_disk_open("rbd:x", 0, &d, NULL), -ENXIO);
	CHECK_STR(got, "none");
	disk_set_default("toy", "car");
	disk_set_default("toy", NULL);
	CHECK_EQ(co_disk_open("rbd:x", 0, &d, NULL), -ENXIO);
	CHECK_STR(got, "car");
	CHECK_EQ(co_disk_open("rbd:x,toy=train", 0, &d, NULL), -ENXIO);
	CHECK_STR(got, "train");
	CHECK_EQ(co_disk_open("mem:1M", 0, &d, NULL), 0);
	co_disk_close(d);
}

static co_fn void co_the_cache_default_is_for_images_and_not_for_logs(void *arg)
{
	struct disk *d;

	disk_set_default("cache", "unsafe");
	CHECK_EQ(co_disk_open("rbd:x", DISK_OPEN_LOG, &d, NULL), -ENXIO);
	CHECK_STR(cache, "none given");
	CHECK_EQ(co_disk_open("rbd:x", 0, &d, NULL), -ENXIO);
	CHECK_STR(cache, "unsafe");
}

/* `line` is an .It of the page that names the option. */
static bool names_option(const char *line, const char *name, size_t len)
{
	for (const char *p = line; (p = strstr(p, "Cm ")) != NULL;) {
		p += 3;
		if (!strncmp(p, name, len) && (!p[len] || strchr(" \n", p[len])))
			return true;
	}
	return false;
}

/* Looks below ".Ss DRIVER", up to the next section. */
static bool page_has(const char *page, const char *driver, const char *name, size_t len)
{
	char line[256];
	bool here = false, found = false;
	FILE *f = fopen(page, "r");

	if (!f)
		test_fail("%s cannot be read", page);
	while (fgets(line, sizeof(line), f)) {
		if (!strncmp(line, ".Ss ", 4))
			here = !strncmp(line + 4, driver, strlen(driver)) && line[4 + strlen(driver)] == '\n';
		if (here && !strncmp(line, ".It ", 4))
			found |= names_option(line, name, len);
	}
	fclose(f);
	return found;
}

static void every_option_of_every_driver_is_in_the_manual(const char *page)
{
	static const char *const names[] = { "file", "nbd", "mem", "null", "delay", "fault", "rbd" };

	printf("%s\n", __func__);
	for (unsigned i = 0; i < ARRAY_SIZE(names); i++) {
		const struct disk_driver *drv = disk_find_driver(names[i]);

		CHECK(drv);
		if (drv == &toy)
			drv = &rbd_driver;
		for (const char *p = drv->options; *p; p += strspn(p, ",")) {
			size_t len = strcspn(p, ",");

			if (!page_has(page, names[i], p, len))
				test_fail("%s: says nothing about option %.*s of driver %s", page, (int)len, p, names[i]);
			p += len;
		}
	}
}

int main(int argc, char **argv)
{
	disk_register_driver(&toy);	/* before the real one of this name */
	backends_register();
	if (argc > 1)
		every_option_of_every_driver_is_in_the_manual(argv[1]);
	RUN(every_form_is_understood);
	RUN(wrappers_nest_and_keep_their_own_options);
	RUN(an_endless_string_is_refused);
	on_sim(1, co_bad_strings_are_refused_with_the_reason, NULL);
	on_sim(1, co_a_qcow2_name_is_not_opened_as_raw_by_accident, NULL);
	on_sim(1, co_format_raw_is_accepted_everywhere, NULL);
	on_sim(1, co_a_disk_opened_without_rdwr_is_read_only, NULL);
	on_sim(1, co_defaults_reach_drivers_that_know_them_and_strings_win, NULL);
	on_sim(1, co_the_cache_default_is_for_images_and_not_for_logs, NULL);
	return 0;
}
