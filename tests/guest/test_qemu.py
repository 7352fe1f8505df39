#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
A real guest under QEMU (software emulation): several queues, a server that is killed under the running guest, a resize, the cache mode; at last QEMU itself is
killed, and the next guest, of user-mode-linux because that boots in a second, finds what was synced.

usage: test_qemu.py WEIR CACHE [TEST ...]
"""
import os
import re
import subprocess
import threading
import time

from guest import KILL, Failure, Guest, Weir, check, main

MIB = 1 << 20

# Writes until the disk becomes larger: that is how the host says that it has killed often enough.
GUEST = r"""
echo queues=$(ls /sys/block/vda/mq | wc -l)
size=$(cat /sys/block/vda/size)
mkfs.ext4 -q -F /dev/vda || exit 1
mount -t ext4 /dev/vda /mnt || exit 2
echo AT kill
rounds=0
while [ "$(cat /sys/block/vda/size)" = $size ]; do
	# A job on each processor, and so on each queue.
	fio --name=v --directory=/mnt --rw=randwrite --bs=4k --size=1m --numjobs=4 --cpus_allowed=0-3 --cpus_allowed_policy=split --ioengine=libaio --iodepth=8 \
		--direct=1 --verify=crc32c --do_verify=1 --fsync=256 --output=/tmp/fio || { cat /tmp/fio; dmesg | tail -n 20; exit 3; }
	rounds=$((rounds + 1))
done
echo rounds=$rounds
umount /mnt
e2fsck -fn /dev/vda >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 4; }
dmesg | grep -i "i/o error" && exit 5
[ "$(cat /sys/block/vda/size)" = 524288 ] || exit 6
dd if=/dev/zero of=/dev/vda bs=4k seek=65535 count=1 oflag=direct 2>/dev/null || exit 7
echo AT wrote
sleep 0.5
echo "write through" >/sys/block/vda/cache_type || exit 8
probe writes /dev/vda 10 || exit 9
echo AT through
echo "write back" >/sys/block/vda/cache_type || exit 10
mkfs.ext4 -q -F /dev/vda 65536 && mount -t ext4 /dev/vda /mnt || exit 11
i=0
while [ $i -lt 100 ]; do
	i=$((i + 1))
	yes "line $i" | head -c 65536 | dd of=/mnt/f$i conv=fsync 2>/dev/null || exit 12
	echo "synced $i"
	dd if=/dev/zero of=/mnt/more$i bs=64k count=4 2>/dev/null &
	[ $i != 6 ] || echo AT die
done
exit 13
"""

RECOVER = r"""
mount -t ext4 /dev/vda /mnt || exit 1
dmesg | grep -q "recovery complete" || exit 2
i=0
while [ $i -lt $synced ]; do
	i=$((i + 1))
	yes "line $i" | head -c 65536 | cmp - /mnt/f$i || exit 3
done
umount /mnt
e2fsck -fn /dev/vda >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 4; }
exit 0
"""


class Killer(threading.Thread):
    """Kills the server until that was three times and something was in flight, then makes the disk larger."""

    def __init__(self, w):
        super().__init__()
        self.w, self.kills, self.again, self.trouble, self.seen = w, 0, [], None, None

    def run(self):
        try:
            while self.kills < 3 or not self.again:
                check(self.kills < 30, "of 30 kills none found anything in flight")
                self.wait(lambda d: d["connected"] and any(q["in_flight"] for q in d["queues"]), "a request in flight")
                self.w.kill()
                self.kills += 1
                time.sleep(0.2)
                self.w.start()
                self.wait(lambda d: d["requests"] > 0, "requests after a kill")
                self.again = re.findall(r"queue \d+: (\d+) requests that were in flight", self.w.text())
            # All processors have used their queues: what each process saw is counted from its start.
            self.wait(lambda d: sum(q["requests"] > 0 for q in d["queues"]) == 4, "requests in four queues")
            self.w.control(command="resize", volume="disk0", size="256M")
        except (Failure, OSError, ValueError) as e:
            self.trouble = e

    def wait(self, condition, what):
        end = time.monotonic() + 60
        while not condition(self.w.device()):
            check(time.monotonic() < end, f"{what}: {self.w.device()}")
            time.sleep(0.002)


def queues_kills_on_both_sides_a_resize_and_the_cache_mode(weir, cache, folder):
    """
    weir, with a log, is killed with SIGKILL several times while fio writes: the guest sees no error, its data verify, its file system is clean. QEMU is killed while files are
    written and synced: what was synced is there, in a file system that recovers.
    """
    disk = os.path.join(folder, "disk")
    with open(disk, "wb") as f:
        f.truncate(128 * MIB)
    # Most writes are acknowledged from memory, which a kill must not lose; and the log is so slow that what was in flight a moment ago still is.
    log = os.path.join(folder, "log")
    subprocess.run([weir, "log", "create", log, "--size", "64M"], check=True, timeout=60)
    w = Weir(weir, folder, [disk], ["--log", "delay:write=20ms:" + log])
    killer, seen, end = Killer(w), {}, {}
    g = Guest("qemu", cache, w.sockets, GUEST, at={"kill": killer.start, "wrote": lambda: seen.update(w.device()), "die": KILL,
                                                       "through": lambda: end.update(w.device())}, queues=4, cpus=4, reconnect=1)
    if killer.ident:
        killer.join()
    check(not killer.trouble, f"{killer.trouble}\n" + "\n".join(g.lines[-40:]) + "\n" + w.text())
    synced = sum(line.startswith("synced ") for line in g.lines)
    check(g.status is None and synced >= 6, f"QEMU was to be killed and the guest ended with {g.status}:\n" + "\n".join(g.lines[-40:]))
    check(g.value("queues") == "4", "a queue for each processor")
    check(seen["errors"] == 0 and not seen["error"] and seen["durable_writes"] == 0, f"{seen}")
    check(end["errors"] == 0 and end["durable_writes"] == 10, f"write through: {end}")
    print(f"{killer.kills} kills, {' + '.join(killer.again)} requests done again, {g.value('rounds')} rounds of fio, {synced} files synced")
    Guest("uml", cache, w.sockets, f"synced={synced}\n" + RECOVER).ok()
    w.stop()


main([queues_kills_on_both_sides_a_resize_and_the_cache_mode])
