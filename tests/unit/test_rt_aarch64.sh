#!/bin/sh
# SPDX-License-Identifier: MIT
# Coroutines on aarch64, emulated: the switch, and the simulated reactor on top of it.
# usage: test_rt_aarch64.sh SOURCE-ROOT
root=$1
unset MALLOC_PERTURB_	# the compiler needs no help in finding its faults
cc=aarch64-linux-gnu-gcc
run=$(command -v qemu-aarch64 || command -v qemu-aarch64-static) || { echo "skipped: qemu-aarch64 is not installed (Debian: qemu-user)"; exit 77; }
command -v $cc >/dev/null || { echo "skipped: $cc is not installed (Debian: gcc-aarch64-linux-gnu)"; exit 77; }

dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
# The headers of liburing depend on no machine.
mkdir "$dir/include" && ln -s /usr/include/liburing.h /usr/include/liburing "$dir/include/" || exit 1

sources="$(ls "$root"/src/rt/*.c "$root"/src/rt/*.S | grep -v -e /ring.c -e /io.c) $root/tests/unit/no_ring.c $root/src/util/err.c $root/src/util/log.c
	$root/src/util/rng.c"
flags="-g1 -O2 -std=gnu17 -D_GNU_SOURCE -I$root/src -I$root/tests -I$dir/include"
# shellcheck disable=SC2086
(cd "$dir" && $cc $flags -c $sources) || exit 1
for test in switch sim; do
	# shellcheck disable=SC2086
	$cc -static $flags -o "$dir/$test" "$root/tests/unit/test_rt_$test.c" "$dir"/*.o -lm -pthread || exit 1
	echo "== $test"
	timeout 100 "$run" "$dir/$test" || { echo "$test: exit status $?"; exit 1; }
done
