#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Real guests under user-mode-linux: Linux' own virtio_blk driver and file system on weir's disks.

usage: test_uml.py WEIR CACHE [TEST ...]
"""
import os
import subprocess

from guest import KILL, Guest, Weir, check, main

MIB = 1 << 20


def sparse(path, size):
    with open(path, "wb") as f:
        f.truncate(size)
    return path


FILE_SYSTEM = r"""
q=/sys/block/vda/queue
echo size=$(cat /sys/block/vda/size)
echo serial=$(cat /sys/block/vda/serial)
echo cache=$(cat /sys/block/vda/cache_type)
echo discard=$(cat $q/discard_max_bytes)
echo zeroes=$(cat $q/write_zeroes_max_bytes)
echo block=$(cat $q/logical_block_size)
mkfs.ext4 -q -F /dev/vda || exit 1
mount -t ext4 -o discard /dev/vda /mnt || exit 2
fio --name=v --directory=/mnt --rw=randwrite --bs=4k --size=4m --ioengine=libaio --iodepth=16 --direct=1 --verify=crc32c --do_verify=1 \
	--fsync=64 --output=/tmp/fio || { cat /tmp/fio; exit 3; }
dd if=/dev/urandom of=/mnt/a bs=64k count=16 conv=fsync 2>/dev/null || exit 4
s=$(md5sum </mnt/a)
umount /mnt
e2fsck -fn /dev/vda >/dev/null 2>&1 || exit 5
mount -t ext4 /dev/vda /mnt || exit 6
[ "$s" = "$(md5sum </mnt/a)" ] || exit 7
umount /mnt
exit 0
"""


def a_file_system_with_verified_data(weir, cache, folder):
    disk = sparse(os.path.join(folder, "disk"), 128 * MIB)
    w = Weir(weir, folder, [disk])
    g = Guest("uml", cache, w.sockets, FILE_SYSTEM)
    g.ok()
    check(g.value("size") == str(128 * MIB // 512), "size")
    check(g.value("serial") == "disk0", "serial")
    check(g.value("cache") == "write back", "the cache is on")
    check(int(g.value("discard")) > 0 and int(g.value("zeroes")) > 0 and g.value("block") == "512", "queue limits")
    d = w.device()
    check(d["errors"] == 0 and d["flushes"] > 0 and d["durable_writes"] == 0 and not d["error"], f"{d}")
    w.stop()


FSYNCS = r"""
loop() {
	i=0
	while [ $i -lt 20 ]; do
		dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=$i oflag=direct conv=fsync 2>/dev/null || exit 1
		i=$((i + 1))
	done
}
loop
echo AT on
sleep 0.5
echo "write through" >/sys/block/vda/cache_type || exit 2
loop
echo AT off
sleep 0.5
echo "write back" >/sys/block/vda/cache_type || exit 3
loop
exit 0
"""


def fsyncs_are_counted_on_the_server(weir, cache, folder):
    """20 writes, each with an fsync: with the cache on a flush each, with it off durable writes and no flush."""
    w = Weir(weir, folder, [sparse(os.path.join(folder, "disk"), 16 * MIB)])
    seen = {}
    g = Guest("uml", cache, w.sockets, FSYNCS, at={"on": lambda: seen.update(on=w.device()), "off": lambda: seen.update(off=w.device())})
    g.ok()
    end = w.device()
    check(seen["on"]["flushes"] >= 20 and seen["on"]["durable_writes"] == 0, f"cache on: {seen['on']}")
    check(seen["off"]["durable_writes"] == 20 and seen["off"]["flushes"] - seen["on"]["flushes"] <= 1, f"cache off: {seen['off']}")
    check(end["flushes"] - seen["off"]["flushes"] >= 20 and end["durable_writes"] == 20, f"cache on again: {end}")
    w.stop()


DISCARDS = r"""
dd if=/dev/urandom of=/dev/vda bs=1M count=16 oflag=direct 2>/dev/null || exit 1
sync
echo AT full
sleep 0.5
/usr/bin/blkdiscard -o 0 -l 8388608 /dev/vda || exit 2
/usr/bin/blkdiscard -z -o 8388608 -l 4194304 /dev/vda || exit 3
[ "$(dd if=/dev/vda bs=1M skip=8 count=4 iflag=direct 2>/dev/null | tr -d '\0' | wc -c)" = 0 ] || exit 4
[ "$(dd if=/dev/vda bs=1M skip=12 count=4 iflag=direct 2>/dev/null | tr -d '\0' | wc -c)" != 0 ] || exit 5
exit 0
"""


def discards_and_zeroes_reach_the_image(weir, cache, folder):
    disk = sparse(os.path.join(folder, "disk"), 16 * MIB)
    w = Weir(weir, folder, [disk])
    full = []
    g = Guest("uml", cache, w.sockets, DISCARDS, at={"full": lambda: full.append(os.stat(disk).st_blocks)})
    g.ok()
    check(full[0] * 512 >= 16 * MIB, "all is allocated")
    check(os.stat(disk).st_blocks * 512 <= 9 * MIB, f"what was discarded is free: {os.stat(disk).st_blocks}")
    w.stop()


RESIZE = r"""
dd if=/dev/zero of=/dev/vda bs=4k seek=16383 count=1 oflag=direct 2>/dev/null || exit 1
echo AT grow
i=0
while [ "$(cat /sys/block/vda/size)" != 262144 ]; do
	i=$((i + 1))
	[ $i -lt 100 ] || exit 2
	sleep 0.1
done
dd if=/dev/zero of=/dev/vda bs=4k seek=32767 count=1 oflag=direct 2>/dev/null || exit 3
exit 0
"""


def a_resize_reaches_the_running_guest(weir, cache, folder):
    w = Weir(weir, folder, [sparse(os.path.join(folder, "disk"), 64 * MIB)])
    g = Guest("uml", cache, w.sockets, RESIZE, at={"grow": lambda: w.control(command="resize", volume="disk0", size="128M")})
    g.ok()
    w.stop()


TWO = r"""
for d in vda vdb; do
	fio --name=v --filename=/dev/$d --rw=randwrite --bs=8k --size=16m --ioengine=libaio --iodepth=8 --direct=1 --verify=crc32c --output=/tmp/$d &
done
wait
grep -q "err= 0" /tmp/vda && grep -q "err= 0" /tmp/vdb || { cat /tmp/vda /tmp/vdb; exit 1; }
exit 0
"""


def two_disks_with_one_write_log(weir, cache, folder):
    log = os.path.join(folder, "log")
    subprocess.run([weir, "log", "create", "--size", "128M", log], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    w = Weir(weir, folder, [sparse(os.path.join(folder, f"disk{i}"), 32 * MIB) for i in range(2)], ["--log", log])
    g = Guest("uml", cache, w.sockets, TWO)
    g.ok()
    check(all(w.device(i)["errors"] == 0 and w.device(i)["requests"] > 0 for i in range(2)), "both are used")
    w.stop()


WRITES = r"""
mkfs.ext4 -q -F /dev/vda || exit 1
mount -t ext4 /dev/vda /mnt || exit 2
(while :; do dd if=/dev/zero of=/mnt/noise bs=64k count=40 2>/dev/null; done) &
for i in 1 2 3 4 5 6 7 8; do
	echo "file $i" | dd of=/mnt/$i conv=fsync 2>/dev/null || exit 3
done
echo AT kill
sleep 10
exit 4
"""

RECOVER = r"""
mount -t ext4 /dev/vda /mnt || exit 1
for i in 1 2 3 4 5 6 7 8; do
	[ "$(cat /mnt/$i)" = "file $i" ] || exit 2
done
umount /mnt
e2fsck -fn /dev/vda >/dev/null 2>&1 || exit 3
exit 0
"""


def what_a_guest_had_synced_is_there_after_it_was_killed(weir, cache, folder):
    """The guest dies while it writes, then the server as well; both start again, with a write log between them and the image."""
    log = os.path.join(folder, "log")
    subprocess.run([weir, "log", "create", "--size", "128M", log], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    w = Weir(weir, folder, [sparse(os.path.join(folder, "disk"), 64 * MIB)], ["--log", log])
    g = Guest("uml", cache, w.sockets, WRITES, at={"kill": KILL})
    check(g.status is None, f"the guest was to be killed and ended with {g.status}")
    w.kill()
    w.start()
    Guest("uml", cache, w.sockets, RECOVER).ok()
    w.stop()


main([a_file_system_with_verified_data, fsyncs_are_counted_on_the_server, discards_and_zeroes_reach_the_image, a_resize_reaches_the_running_guest,
      two_disks_with_one_write_log, what_a_guest_had_synced_is_there_after_it_was_killed])
