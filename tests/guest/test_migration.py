#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Live migration under QEMU: a guest moves from one QEMU to another while it reads and writes a volume of weir.

usage: test_migration.py WEIR CACHE [TEST ...]
"""
import json
import os
import socket
import struct
import subprocess
import threading
import time

from guest import Failure, Guest, Weir, check, main

MIB = 1 << 20

# What the device puts into the guest's memory while that is being copied must arrive as well: pages of the page cache are filled by the device
# again and again, and one that was filled behind the copier's back holds something else. The grown disk tells the guest that it has moved.
PAGES = 2048
MOVING = f"pages={PAGES}\n" + r"""
modprobe xfs
mkfs.xfs -q -f /dev/vda || exit 1
mount -t xfs /dev/vda /mnt || exit 2
probe fill /mnt/a $pages || exit 3
echo AT migrate
rounds=0
moved=0
while [ $moved -lt 2 ]; do
	[ "$(cat /sys/block/vda/size)" != 1048576 ] || moved=$((moved + 1))
	rounds=$((rounds + 1))
	[ $rounds -lt 400 ] || exit 4
	echo 3 >/proc/sys/vm/drop_caches
	probe verify /mnt/a $pages || { echo "wrong=$rounds moved=$moved size=$(cat /sys/block/vda/size)"; dmesg | tail -n 20; exit 5; }
	echo $rounds | dd of=/mnt/b conv=fsync 2>/dev/null || exit 6
done
echo rounds=$rounds
[ "$(cat /mnt/b)" = $rounds ] || exit 7
umount /mnt
xfs_repair -n /dev/vda >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 8; }
dmesg | grep -i "i/o error" && exit 9
exit 0
"""


# Not a multiple of 256 KiB. For such sizes QEMU before 9.0 takes 64 pages at a time out of its own bitmap of dirty pages and does not tell its emulated
# processors, whose later stores to these pages are not seen then: the guest dies in the second QEMU, or finds wrong data, without any vhost-user device as
# well (mended there in "physmem: fix migration dirty bitmap coherency with TCG memory access"). For others it goes page by page.
MEMORY = "196616K"


class Qmp:
    """QEMU's own control socket, as much of it as a migration needs."""

    def __init__(self, path):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.settimeout(30)
        end = time.monotonic() + 10
        while True:
            try:
                self.s.connect(path)
                break
            except OSError:
                check(time.monotonic() < end, "QEMU opens its control socket " + path)
                time.sleep(0.02)
        self.f = self.s.makefile()
        self.f.readline()
        self.do("qmp_capabilities")

    def do(self, command, **arguments):
        self.s.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            answer = json.loads(self.f.readline())
            if "error" in answer:
                raise Failure(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]


class MovingGuest(Guest):
    """Begins in a QEMU on the first socket and ends in another on the second. `after` is called when the guest runs there."""

    def __init__(self, cache, sockets, script, after, **kw):
        self.sockets, self.after = sockets, after
        self.second, self.mover, self.trouble, self.result = None, None, None, None
        try:
            super().__init__("qemu", cache, sockets[:1], script, at={"migrate": self.begin}, **kw)
            self.mover.join(60)
        finally:
            if self.second:
                self.second.kill()
                self.second.wait()
        if self.trouble:
            raise Failure(f"the migration: {self.trouble}\n" + "\n".join(self.lines[-40:]))

    def run(self, argv, timeout):
        # The guest's kernel shall not write the pages itself before the device does.
        argv = [a + " init_on_alloc=0" if a.startswith("console=") else a for a in argv]
        self.argv = argv
        super().run(argv + ["-qmp", f"unix:{self.tmp}/q1,server=on,wait=off"], timeout)
        # What the guest says now comes from the second.
        if self.mover:
            self.mover.join(timeout)

    def begin(self):
        self.mover = threading.Thread(target=self.move)
        self.mover.start()

    def move(self):
        try:
            argv = [a.replace("path=" + self.sockets[0], "path=" + self.sockets[1]) for a in self.argv]
            argv += ["-qmp", f"unix:{self.tmp}/q2,server=on,wait=off", "-incoming", f"unix:{self.tmp}/m"]
            self.second = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                           errors="replace", env=dict(os.environ, TMPDIR="/dev/shm"))
            q1, q2 = Qmp(f"{self.tmp}/q1"), Qmp(f"{self.tmp}/q2")
            q1.do("migrate-set-parameters", **{"max-bandwidth": 24 * MIB, "downtime-limit": 2000})
            q1.do("migrate", uri=f"unix:{self.tmp}/m")
            began = time.monotonic()
            while True:
                self.result = q1.do("query-migrate")
                if self.result["status"] in ("completed", "failed"):
                    break
                check(time.monotonic() - began < 60, f"the migration ends: {self.result}")
                if time.monotonic() - began > 4:
                    q1.do("migrate-set-parameters", **{"max-bandwidth": 1024 * MIB})
                time.sleep(0.1)
            check(self.result["status"] == "completed", f"{self.result}")
            check(q2.do("query-status")["status"] == "running", "the guest runs in the second QEMU")
            self.lines.append("(the second QEMU runs the guest)")
            self.after()
            for line in self.second.stdout:
                self.line(line.rstrip())
            self.compare(q1)
            q1.do("quit")
        except (Failure, OSError, ValueError) as e:
            self.trouble = e
            self.kill()

    def compare(self, q1):
        """What the first QEMU, which still has the guest's memory as it was when it stopped, holds where the guest found bad pages."""
        for line in [x for x in self.lines if x.startswith("bad page=")]:
            bad = dict(x.split("=") for x in line.split()[1:])
            path = os.path.join(self.tmp, "page")
            q1.do("pmemsave", val=int(bad["frame"]) * 4096, size=4096, filename=path)
            with open(path, "rb") as f:
                words = struct.unpack("<512Q", f.read())
            right = [0x77656972 << 32 | int(bad["page"]) << 9 | i for i in range(512)]
            self.lines.append(f"frame {bad['frame']} in the first QEMU: " + ("right" if words == tuple(right) else f"wrong, {words[0]:016x} {words[1]:016x}"))


def a_guest_moves_while_it_reads_and_writes(weir, cache, folder):
    """Each reading of a file gives the same sum, before, during and after; its file system (XFS) is clean; no request failed."""
    disk = os.path.join(folder, "disk")
    with open(disk, "wb") as f:
        f.truncate(320 * MIB)
    second = os.path.join(folder, "second")
    w = Weir(weir, folder, [disk], ["--vhost-user", second + ",volume=disk0"])
    seen = []

    def after():
        seen.append(w.device(0))
        w.control(command="resize", volume="disk0", size="512M")

    g = MovingGuest(cache, [w.sockets[0], second], MOVING, after, memory=MEMORY, timeout=300)
    g.ok()
    end = w.device(1)
    check(end["errors"] == 0 and not end["error"] and end["requests"] > 0, f"{end}")
    check(seen[0]["errors"] == 0 and not seen[0]["error"], f"{seen}")
    ram = g.result["ram"]
    print(f"{g.value('rounds')} readings; {ram['dirty-sync-count']} passes over the memory; {g.result['downtime']} ms of pause")
    w.stop()


main([a_guest_moves_while_it_reads_and_writes])
