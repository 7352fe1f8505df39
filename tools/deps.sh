#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs the Debian packages that are missing; does nothing, and needs no root, when all are there.
#
# usage: deps.sh build|all
set -eu

build='gcc libc6-dev meson ninja-build pkg-config python3 liburing-dev libisal-dev libjansson-dev zlib1g-dev libzstd-dev libgnutls28-dev libseccomp-dev'
# Sanitizers, fuzzing and the compile-time role check; then the programs that weir is tested against.
all="$build clang-14 libclang-rt-14-dev llvm-14 valgrind
	qemu-utils qemu-system-common nbdkit libnbd-bin libnbd-dev python3-libnbd fio strace mandoc gnutls-bin
	user-mode-linux qemu-system-x86 busybox-static kmod cpio
	e2fsprogs fuse3 xfsprogs btrfs-progs gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
	ceph-mon ceph-osd ceph-common python3-rbd librbd-dev librados-dev
	etcd-server libvirt0 libxml2-utils patch"

case "${1:-all}" in
build) wanted=$build ;;
all) wanted=$all ;;
*)
	echo "usage: deps.sh build|all" >&2
	exit 2
	;;
esac

if ! command -v dpkg-query >/dev/null; then
	# Not Debian: nothing can be installed here, but it may all be there.
	for program in cc meson ninja pkg-config python3; do
		command -v $program >/dev/null || missing="${missing-} $program"
	done
	for library in liburing libisal jansson zlib libzstd gnutls libseccomp; do
		pkg-config --exists $library 2>/dev/null || missing="${missing-} $library"
	done
	[ -z "${missing-}" ] && exit 0
	echo "deps: this is not Debian; install by hand:$missing" >&2
	exit 1
fi

missing=
for package in $wanted; do
	case $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) in
	?i*) ;;
	*) missing="$missing $package" ;;
	esac
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ]; then
	echo "deps: missing packages; as root, run: apt-get install$missing" >&2
	exit 1
fi
echo "deps: installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
	apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=600 "$@" </dev/null >"$log" 2>&1 || {
		tail -n 30 "$log" >&2
		echo "deps: apt-get $1 failed (above); is the network there, and is this Debian 12?" >&2
		exit 1
	}
}
apt update
# shellcheck disable=SC2086
apt install --no-install-recommends --no-upgrade $missing
echo "deps: done"
