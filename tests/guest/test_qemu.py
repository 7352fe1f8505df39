#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Real guests under QEMU (software emulation): several queues, and a server that is killed under a running guest.

usage: test_qemu.py WEIR CACHE [TEST ...]
"""
import os
import re
import threading
import time

from guest import Guest, Weir, check, main

MIB = 1 << 20

KILLED = r"""
echo queues=$(ls /sys/block/vda/mq | wc -l)
mkfs.ext4 -q -F /dev/vda || exit 1
mount -t ext4 /dev/vda /mnt || exit 2
echo AT kill
fio --name=v --directory=/mnt --rw=randwrite --bs=4k --size=4m --numjobs=2 --ioengine=libaio --iodepth=8 --direct=1 --verify=crc32c --do_verify=1 \
	--loops=2 --fsync=256 --output=/tmp/fio || { cat /tmp/fio; dmesg | tail -n 20; exit 3; }
echo AT done
umount /mnt
e2fsck -fn /dev/vda >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 4; }
dmesg | grep -i "i/o error" && exit 5
exit 0
"""


def queues_and_kills_under_a_running_guest(weir, cache, folder):
    """Killed with SIGKILL several times while fio writes; the guest sees no error, its data verify, its file system is clean."""
    disk = os.path.join(folder, "disk")
    with open(disk, "wb") as f:
        f.truncate(128 * MIB)
    # slow enough that something is in flight at a kill
    w = Weir(weir, folder, ["delay:write=5ms:" + disk])
    stop, kills, seen = threading.Event(), [], {}

    def killer():
        while not stop.wait(1.5) and len(kills) < 3:
            w.kill()
            time.sleep(0.2)
            w.start()
            kills.append(time.monotonic())

    thread = threading.Thread(target=killer)

    def done():
        stop.set()
        thread.join()
        seen.update(w.device())

    try:
        g = Guest("qemu", cache, w.sockets, KILLED, at={"kill": thread.start, "done": done}, queues=4, cpus=2, reconnect=1, timeout=200)
    finally:
        stop.set()
    g.ok()
    check(g.value("queues") == "2", "a queue for each processor")
    check(kills, "the server was killed")
    check(seen["errors"] == 0 and not seen["error"], f"{seen}")
    check(sum(q["requests"] > 0 for q in seen["queues"]) >= 2, f"several queues are used: {seen['queues']}")
    again = re.findall(r"queue \d+: (\d+) requests that were in flight are done again", w.text())
    check(again, "something was in flight at a kill")
    print(f"{len(kills)} kills; {' + '.join(again)} requests done again")
    w.stop()


RESIZE = r"""
echo AT grow
i=0
while [ "$(cat /sys/block/vda/size)" != 131072 ]; do
	i=$((i + 1))
	[ $i -lt 200 ] || exit 2
	sleep 0.1
done
dd if=/dev/zero of=/dev/vda bs=4k seek=16383 count=1 oflag=direct 2>/dev/null || exit 3
echo "write through" >/sys/block/vda/cache_type || exit 4
dd if=/dev/zero of=/dev/vda bs=4k count=10 oflag=direct 2>/dev/null || exit 5
exit 0
"""


def a_resize_and_the_cache_mode_through_qemu(weir, cache, folder):
    disk = os.path.join(folder, "disk")
    with open(disk, "wb") as f:
        f.truncate(32 * MIB)
    w = Weir(weir, folder, [disk])
    g = Guest("qemu", cache, w.sockets, RESIZE, at={"grow": lambda: w.control(command="resize", volume="disk0", size="64M")})
    g.ok()
    check(w.device()["durable_writes"] == 10, f"{w.device()}")
    w.stop()


main([queues_and_kills_under_a_running_guest, a_resize_and_the_cache_mode_through_qemu])
