# SPDX-License-Identifier: MIT
# The front door; meson does the building. `make help` lists what there is.

PREFIX ?= /usr/local
DESTDIR ?=
SEEDS ?= 200
FUZZ_SECONDS ?= 60
BUILD = build

all: build-deps $(BUILD)/build.ninja
	ninja -C $(BUILD) all

$(BUILD)/build.ninja:
	meson setup $(BUILD) -Dwerror=true -Dprefix=$(PREFIX)

# Both install what is missing from Debian's packages, and do nothing when all is there.
build-deps:
	@tools/deps.sh build
deps:
	@tools/deps.sh all

check: deps
	@tools/run-checks $(VARIANTS)

crash: all
	@# A variant whose promise is in brackets is meant to fail: it checks the checker.
	@$(BUILD)/tests/crash/crash --list | grep -v '^[^ ]* *(' | cut -d' ' -f1 | \
		xargs -P "$$(nproc)" -I VARIANT $(BUILD)/tests/crash/crash --variant VARIANT --seeds $(SEEDS)

fuzz: deps
	@tools/run-fuzz $(FUZZ_SECONDS)

bench: deps all
	/usr/bin/python3 tests/perf/bench.py --weir $(BUILD)/src/cli/weir

demo: deps all
	@tools/demo $(BUILD)/src/cli/weir

install: all
	meson configure $(BUILD) -Dprefix=$(PREFIX)
	DESTDIR=$(DESTDIR) meson install -C $(BUILD)

clean:
	rm -rf build build-asan build-tsan build-fuzz

help:
	@echo 'make                 install what is missing to build (Debian packages, as root), and build'
	@echo 'make deps            install what is missing to build, test and measure'
	@echo 'make check           build plain, with ASan+UBSan and with TSan, and run every test (VARIANTS=plain: only that)'
	@echo 'make crash SEEDS=N   crash tests, N seeds of each variant ($(SEEDS))'
	@echo 'make fuzz            libFuzzer on each target for FUZZ_SECONDS ($(FUZZ_SECONDS))'
	@echo 'make bench           the comparison with other servers, as a table'
	@echo 'make demo            the main job: a slow disk without and with a log, a kill, a verification'
	@echo 'make install         PREFIX ($(PREFIX)), DESTDIR'
	@echo 'make clean           remove all build folders'

.PHONY: all build-deps deps check crash fuzz bench demo install clean help
